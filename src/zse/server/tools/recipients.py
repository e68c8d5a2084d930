"""Functionary 3.2's answers: parts with a recipient each, `all` or a function.

    >>>all
    words>>>f
    {"a": 1}>>>g
    {}

The first >>> ends the prompt. Source: MeetKai/functionary, tests/prompt_test_v3.llama3.txt."""

from zse.server.tools.blocks import MORE, NEVER, ahead, held
from zse.server.tools.readers import JsonCalls

RECIPIENT = ">>>"
WORDS = "all\n"  # the recipient of words
ALL = RECIPIENT + "all"  # by which a chat template shows the format


class RecipientCalls(JsonCalls):
    """A call behind the mark: the name of a function that the request offers on a line of its own, then its
    arguments."""

    def __init__(self, functions: dict[str, dict]):
        super().__init__(functions, head=r"(?P<name>[A-Za-z0-9_.-]{1,64})\n\s*", known=True, lists=False)

    def _begin(self, text: str, is_last: bool) -> bool | None:
        if all(ahead(text, self.at, f"{name}\n", is_last, skipped="") == NEVER for name in self._functions):
            self.at += 1  # no call begins here
            return False
        begins = super()._begin(text, is_last)
        if begins is False:
            self.at += 1
        return begins


class RecipientParser:
    """Has ReasoningParser's interface. Takes the recipient `all` out of the text; calls stay as they are."""

    is_inside = is_undecided = False

    def __init__(self) -> None:
        self._text = ""
        self._is_first = True

    def push(self, text: str) -> list:
        return self._pieces(text, False)

    def finish(self) -> list:
        return self._pieces("", True)

    def _pieces(self, text: str, is_last: bool) -> list:
        self._text += text
        if self._is_first:
            end = ahead(self._text, 0, WORDS, is_last, skipped="")
            if end is MORE:
                return []
            self._text, self._is_first = self._text[max(end, 0) :], False
        *parts, rest = self._text.split(f"{RECIPIENT}{WORDS}")
        kept = 0 if is_last else held(rest, (f"{RECIPIENT}{WORDS}",))
        self._text = rest[len(rest) - kept :]
        shown = "".join(parts) + rest[: len(rest) - kept]
        return [shown] if shown else []
