"""Reasoning in an answer: the text between <think> and </think>, apart from the answer that follows."""

import msgspec

from zse.server.tools.blocks import SPACE, held


class Marks(msgspec.Struct, frozen=True):
    """What encloses reasoning. label: a word behind the opening mark that is none of it."""

    opening: str
    closing: str
    label: str = ""


PARSERS: dict[str, Marks] = {
    "think": Marks("<think>", "</think>"),
    "mistral": Marks("[THINK]", "[/THINK]"),
    "seed": Marks("<seed:think>", "</seed:think>"),
    "command_r": Marks("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": Marks("<|channel>", "<channel|>", "thought"),
}


HARMONY = "harmony"  # gpt-oss' messages (harmony.py), which no two marks enclose
NAMES = (*PARSERS, HARMONY)


def choose(template: str) -> str:
    """The parser for a chat template's text, or "none"."""
    if "<|channel|>analysis" in template:
        return HARMONY
    return next((name for name, marks in PARSERS.items() if marks.closing in template), "none")


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
            if not self._begun:
                self._text = self._text.lstrip(SPACE)
            self._begun = self._begun or bool(self._text)
            if self._text:
                out.append(self._text)
            self._text = ""
        return out

    def finish(self) -> list[str | Reasoning]:
        """What was held back; reasoning that was never closed is reasoning."""
        text, self._text = self._text, ""
        if self._state == "inside":
            text = "" if self._label else text.rstrip(SPACE)
            return [Reasoning(text)] if text else []
        return [text] if text else []

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
