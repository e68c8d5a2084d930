"""Reasoning in an answer: the text between <think> and </think>, apart from the answer that follows."""

import re

import msgspec

from zse.server.tools.blocks import SPACE, held

# Marks of formats in which calls and what stands around an answer are told by the same ones.
SOLAR = ("<|tool_calls|>", *(f"<|tool_call:{word}|>" for word in ("begin", "name", "args", "end")), "<|calls|>")
KIMI_K3 = "<|open|>", "<|close|>", "<|sep|>"  # <|open|>WORD<|sep|> and <|close|>WORD<|sep|>
_TOKEN = re.compile(r"<\|[^<>|]+\|>")


def k3_mark(word: str, is_end: bool = False) -> str:
    """Kimi K3's mark of what `word` names, with its attributes."""
    return f"{KIMI_K3[is_end]}{word}{KIMI_K3[2]}"


class Marks(msgspec.Struct, frozen=True):
    """What encloses reasoning.

    Args:
        label: a word behind the opening mark that is none of it.
        sign: by which a chat template shows them; "": by the closing mark.
        around: marks around the answer that are none of it.
        calls: what begins and ends calls, in which the answer keeps all marks; an end of "": that of the answer.
        answer: what stands before an answer in words.
    """

    opening: str
    closing: str
    label: str = ""
    sign: str = ""
    around: tuple[str, ...] = ()
    calls: tuple[str, str] = ("", "")
    answer: str = ""

    @property
    def controls(self) -> tuple[str, ...]:
        """Texts of control tokens that have to be seen in the answer."""
        return (self.opening, self.closing, *_TOKEN.findall(self.opening + self.closing + "".join(self.around)))


PARSERS: dict[str, Marks] = {
    "think": Marks("<think>", "</think>"),
    "mistral": Marks("[THINK]", "[/THINK]"),
    "seed": Marks("<seed:think>", "</seed:think>"),
    "command_r": Marks("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": Marks("<|channel>", "<channel|>", "thought"),
    "apertus": Marks("<|inner_prefix|>", "<|inner_suffix|>"),
    # Messages without a role: <|think|>…<|end|><|begin|>assistant<|content|>…<|end|><|begin|>assistant<|tool_calls|>…
    "solar_open": Marks(
        "<|think|>",
        "<|end|>",
        sign=SOLAR[1],
        around=("<|begin|>assistant", "<|content|>", "<|end|>", "<|flush|>"),
        calls=(SOLAR[0], ""),
        answer="<|begin|>assistant<|content|>",
    ),
    "kimi_k3": Marks(
        k3_mark("think"),
        k3_mark("think", is_end=True),
        sign="<|open|>",
        around=(k3_mark("response"), k3_mark("response", is_end=True), k3_mark("message", is_end=True)),
        calls=(k3_mark("tools"), k3_mark("tools", is_end=True)),
        answer=k3_mark("response"),
    ),
}


HARMONY = "harmony"  # gpt-oss' messages (harmony.py), which no two marks enclose
NAMES = (*PARSERS, HARMONY)


def choose(template: str) -> str:
    """The parser for a chat template's text, or "none"."""
    if "<|channel|>analysis" in template:
        return HARMONY
    return next((name for name, marks in PARSERS.items() if (marks.sign or marks.closing) in template), "none")


class Reasoning(msgspec.Struct, frozen=True):
    """A piece of reasoning."""

    text: str


class ReasoningParser:
    """push() pieces of text, then finish(): strings (what the answer is) and Reasoning. Reasoning can only begin an
    answer. is_open: the prompt ended with the opening mark. Space around the reasoning belongs to neither."""

    def __init__(self, marks: Marks, is_open: bool):
        self._marks = marks
        self._state = "inside" if is_open else "before"
        self._text = ""
        self._label = "" if is_open else marks.label
        self._begun = False  # something of the part that the state names has been given out
        self._in_calls = False

    @property
    def is_inside(self) -> bool:
        return self._state == "inside"

    @property
    def is_undecided(self) -> bool:
        return self._state == "before"

    def push(self, text: str) -> list[str | Reasoning]:
        self._text += text
        out: list[str | Reasoning] = []
        if self._state == "before":
            rest = self._text.lstrip(SPACE)
            if rest.startswith(self._marks.opening):
                self._state, self._text = "inside", rest[len(self._marks.opening) :]
            elif self._marks.opening.startswith(rest):
                return out
            else:
                self._state, self._begun = "after", True
        if self._state == "inside":
            self._inside(out)
        if self._state == "after":
            self._after(out, is_last=False)
        return out

    def finish(self) -> list[str | Reasoning]:
        """What was held back; reasoning that was never closed is reasoning."""
        out: list[str | Reasoning] = []
        if self._state != "inside":
            self._begun = self._begun or self._state == "before"
            self._after(out, is_last=True)
            return out
        text, self._text = "" if self._label else self._text.rstrip(SPACE), ""
        return [Reasoning(text)] if text else []

    def _after(self, out: list, is_last: bool) -> None:
        """The answer, without the marks around it."""
        shown = ""
        while (found := self._first_mark()) is not None:
            at, mark = found
            end = at + len(mark)
            is_kept = mark not in self._marks.around
            shown += self._text[: end if is_kept else at]
            self._text = self._text[end:]
            self._in_calls = self._in_calls != is_kept
        kept = 0 if is_last else held(self._text, self._watched)
        shown += self._text[: len(self._text) - kept]
        self._text = self._text[len(self._text) - kept :]
        if not self._begun:
            shown = shown.lstrip(SPACE)
        self._begun = self._begun or bool(shown)
        if shown:
            out.append(shown)

    @property
    def _watched(self) -> tuple[str, ...]:
        """The marks that are looked for in the answer."""
        opening, closing = self._marks.calls
        if self._in_calls:
            return (closing,) if closing else ()
        return (*self._marks.around, opening) if opening else self._marks.around

    def _first_mark(self) -> tuple[int, str] | None:
        found = [(at, mark) for mark in self._watched if (at := self._text.find(mark)) >= 0]
        return min(found, default=None)

    def _inside(self, out: list) -> None:
        if not self._begun:
            self._text = self._text.lstrip(SPACE)
            if self._label and self._label.startswith(self._text):
                return  # no more than the beginning of the label
            if self._label and self._text.startswith(self._label):
                self._text = self._text[len(self._label) :].lstrip(SPACE)
            self._label = ""
        text, closing = self._text, self._marks.closing
        at = text.find(closing)
        if at >= 0:
            shown, self._text = text[:at].rstrip(SPACE), text[at + len(closing) :]
            self._state, self._begun = "after", False
        else:
            shown = text[: len(text) - held(text, (closing,))].rstrip(SPACE)
            self._text = text[len(shown) :]
            self._begun = self._begun or bool(shown)
        if shown:
            out.append(Reasoning(shown))
