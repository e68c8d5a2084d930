"""Marks of formats in which both calls and what stands around an answer are told by them."""

SOLAR = ("<|tool_calls|>", *(f"<|tool_call:{word}|>" for word in ("begin", "name", "args", "end")), "<|calls|>")
KIMI_K3 = "<|open|>", "<|close|>", "<|sep|>"  # <|open|>WORD<|sep|> and <|close|>WORD<|sep|>


def k3_mark(word: str, is_end: bool = False) -> str:
    """Kimi K3's mark of what `word` names, with its attributes."""
    return f"{KIMI_K3[is_end]}{word}{KIMI_K3[2]}"
