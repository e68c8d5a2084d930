"""gpt-oss' messages ("harmony"): an answer is several messages, each with a header (role, recipient, channel) before
<|message|>.

    <|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{…}<|call|>

analysis is reasoning, commentary to a function is a call, all else is content. Whatever else comes is content: nothing
fails, nothing is lost. Source: openai/harmony, docs/format.md."""

import re
from collections.abc import Iterator

from zse.server.tools.blocks import held
from zse.server.tools.reasoning import Reasoning

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
MARKS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
ENDS = (END, CALL, RETURN, START, CHANNEL)  # of a message; the last two where its own end was forgotten
BEGINNINGS = (START, CHANNEL, " to=")  # of a header; behind a prompt the role has been said
MAX_HEADER = 512  # characters; what is longer is content
_NAME = r"(?P<name>[A-Za-z0-9_.-]{1,64})"
# What stands between `to=functions.` and the arguments, the recipient before the channel or behind it.
HEAD_AFTER = rf"{_NAME}\s*(?:<\|constrain\|>\s*)?(?:json|code)?\s*<\|message\|>\s*"
HEAD_BEFORE = rf"{_NAME}\s*<\|channel\|>\s*commentary\s*(?:<\|constrain\|>\s*)?(?:json|code)?\s*<\|message\|>\s*"
_CHANNEL, _RECIPIENT = re.compile(r"<\|channel\|>\s*(\w+)"), re.compile(r"\bto=([A-Za-z0-9_.-]+)")


class HarmonyParser:
    """Has ReasoningParser's interface. Calls stay text, with the recipient behind the channel, for the format's
    blocks."""

    def __init__(self, is_open: bool):
        self._text = ""
        self._channel = "analysis" if is_open else ""  # of the message whose body comes; "": a header comes
        self._is_first = not is_open
        self._literal = 0  # characters of the text in which no mark is looked for: a mark that begins no header

    @property
    def is_inside(self) -> bool:
        return self._channel == "analysis"

    @property
    def is_undecided(self) -> bool:
        return self._is_first

    def push(self, text: str) -> list[str | Reasoning]:
        self._text += text
        return list(self._pieces(False))

    def finish(self) -> list[str | Reasoning]:
        return list(self._pieces(True))

    def _pieces(self, is_last: bool) -> Iterator[str | Reasoning]:
        while self._text:
            if not self._channel:
                if not self._header(is_last):
                    return
                if self._channel.startswith("functions."):
                    yield f"{CHANNEL}commentary to={self._channel}{MESSAGE}"
                continue
            at, mark = min(
                ((at, mark) for mark in ENDS if (at := self._text.find(mark, self._literal)) >= 0), default=(-1, "")
            )
            shown = len(self._text) - (0 if is_last else held(self._text, ENDS)) if at < 0 else at
            body, self._text, self._literal = self._text[:shown], self._text[shown:], 0
            if body:
                yield Reasoning(body) if self._channel == "analysis" else body
            if at < 0:
                return
            if mark not in (START, CHANNEL):
                self._text = self._text[len(mark) :]
            if self._channel.startswith("functions."):
                yield CALL
            self._channel = ""

    def _header(self, is_last: bool) -> bool:
        """Whether the channel of the next message is known, which then is where the text goes on."""
        text = self._text
        if not is_last and any(each.startswith(text) for each in BEGINNINGS):
            return False
        end = text.find(MESSAGE, 0, MAX_HEADER + len(MESSAGE))
        if end < 0 and not is_last and text.startswith(BEGINNINGS) and len(text) < MAX_HEADER + len(MESSAGE):
            return False
        self._is_first = False
        if end < 0 or not text.startswith(BEGINNINGS):
            self._channel = "final"  # no header
            self._literal = next((len(mark) for mark in BEGINNINGS if text.startswith(mark)), 0)
            return True
        channel, recipient = _CHANNEL.search(text, 0, end), _RECIPIENT.search(text, 0, end)
        self._text = text[end + len(MESSAGE) :]
        if recipient and recipient[1].startswith("functions."):
            self._channel = recipient[1]
        else:
            # Calls of built-in tools, which nobody runs here, are a part of the thought.
            hidden = recipient is not None or (channel is not None and channel[1] == "analysis")
            self._channel = "analysis" if hidden else "final"
        return True
