"""What a chat model writes besides its answer, in its template's own format: tool calls and reasoning."""
