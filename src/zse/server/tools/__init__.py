"""What a chat model writes besides its answer, in its template's own format: tool calls and reasoning."""

from zse import lazy

__getattr__ = lazy.submodules(__name__, __path__)
