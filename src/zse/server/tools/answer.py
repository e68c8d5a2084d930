"""An answer taken apart: content, reasoning and tool calls, in the order in which they come."""

import functools
import os
import re
import string
from collections.abc import Sequence

import msgspec

import zse.server.tools.parsers as parsers
import zse.server.tools.reasoning as reasoning
from zse.server.logprobs import TokenScore
from zse.server.tools import choosing, recipients
from zse.server.tools.blocks import BlockParser
from zse.server.tools.calls import CallPart
from zse.server.tools.harmony import MARKS, HarmonyParser
from zse.server.tools.reasoning import Marks, Reasoning, ReasoningParser
from zse.server.tools.recipients import RecipientParser

_LETTERS = string.ascii_letters + string.digits

CONTENT, REASONING, CALL = "content", "reasoning", "call"


class AnswerSegment(msgspec.Struct):
    """A stretch of an answer, in the order in which they came: an API whose answers are items or blocks makes one of
    each, whole or streamed. texts: of content, of reasoning or of a call's arguments, which together are its text.
    number, id, name: of a call, its position among the answer's. scores: of the content's tokens, with the first piece
    of their text."""

    kind: str
    number: int = 0
    id: str = ""
    name: str = ""
    texts: list[str] = []
    scores: list[TokenScore] = []

    @property
    def text(self) -> str:
        return "".join(self.texts)


def join(segments: list[AnswerSegment], more: list[AnswerSegment]) -> None:
    """Add what follows; the first of it may go on with the last one. Those of `more` become the list's own."""
    for segment in more:
        last = segments[-1] if segments else None
        if last is not None and last.kind == segment.kind and last.number == segment.number:
            last.texts += segment.texts
            last.scores += segment.scores
        else:
            segments.append(segment)


class Format(msgspec.Struct, frozen=True):
    """How a model writes: names of FORMATS (parsers.py) and PARSERS (reasoning.py), or "none". takes_tools: whether its
    chat template reads `tools` at all; names_tools: whether it knows of calls and results. recipients: whether answers
    say whom they are for."""

    tools: str = "none"
    reasoning: str = "none"
    takes_tools: bool = True
    names_tools: bool = True
    recipients: bool = False

    @property
    def marks(self) -> Marks | None:
        return reasoning.PARSERS.get(self.reasoning)

    def controls(self, with_tools: bool) -> tuple[str, ...]:
        """Texts of control tokens that have to be seen in the answer."""
        marks = self.marks
        texts = marks.controls if marks else MARKS if self.reasoning == reasoning.HARMONY else ()
        return texts + (parsers.FORMATS[self.tools].controls if with_tools and self.tools in parsers.FORMATS else ())


@functools.cache
def format_of(template: str | None, tools: str | None = None, thinking: str | None = None) -> Format:
    """By what the chat template writes and its text; `tools` and `thinking` override it."""
    if template is None:
        return Format()
    return Format(
        tools or choosing.choose(template),
        thinking or reasoning.choose(template),
        takes_tools=re.search(r"\btools\b", template) is not None,
        names_tools="tool" in template,
        recipients=recipients.ALL in template,
    )


class Splitter:
    """One answer. functions: what the request offers, None without tools. parallel: whether more than one call may
    come. push() and finish() give str (content), Reasoning and CallPart, each as soon as it is certain: a whole answer
    is what a stream of it adds up to. `done` once the only call allowed is there."""

    def __init__(self, form: Format, functions: dict[str, dict] | None, is_open: bool, parallel: bool = True):
        self._reasoning: ReasoningParser | HarmonyParser | RecipientParser | None = None
        if form.reasoning == reasoning.HARMONY:
            self._reasoning = HarmonyParser(is_open)
        elif form.marks:
            self._reasoning = ReasoningParser(form.marks, is_open)
        elif form.recipients:
            self._reasoning = RecipientParser()
        tools = None if functions is None else parsers.FORMATS.get(form.tools)
        self._tools = None
        if tools is not None and functions is not None:
            self._tools = BlockParser(tools.blocks, functions, tools.separators)
        self._short_ids = form.tools == "mistral"
        self._parallel, self._num_calls = parallel, 0
        self.done = False

    @property
    def is_reasoning(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_inside

    @property
    def is_undecided(self) -> bool:
        """Whether the text so far may be the beginning of the mark that opens reasoning."""
        return self._reasoning is not None and self._reasoning.is_undecided

    def push(self, text: str) -> list[str | Reasoning | CallPart]:
        return self._take(self._reasoning.push(text) if self._reasoning is not None else [text])

    def finish(self) -> list[str | Reasoning | CallPart]:
        if self.done:
            return []
        out = self._take(self._reasoning.finish()) if self._reasoning is not None else []
        if self._tools is not None and not self.done:
            out += self._checked(self._tools.finish())
        return out

    def _take(self, pieces: list[str | Reasoning]) -> list[str | Reasoning | CallPart]:
        out: list[str | Reasoning | CallPart] = []
        for piece in pieces:
            if isinstance(piece, Reasoning) or self._tools is None:
                out.append(piece)
            elif not self.done:
                out += self._checked(self._tools.push(piece))
        return [piece for piece in out if piece != ""]

    def _checked(self, pieces: Sequence[str | CallPart]) -> list[str | CallPart]:
        out: list[str | CallPart] = []
        for piece in pieces:
            if isinstance(piece, CallPart) and piece.name:
                self._num_calls += 1
                self.done = not self._parallel and self._num_calls > 1  # behind one that broke off
                piece = msgspec.structs.replace(piece, id=piece.id or self._new_id())
            if self.done:
                break
            out.append(piece)
            self.done = not self._parallel and isinstance(piece, CallPart) and piece.is_last
        return out

    def _new_id(self) -> str:
        """Mistral's templates refuse ids that are not nine letters and digits."""
        if self._short_ids:
            return "".join(_LETTERS[byte % len(_LETTERS)] for byte in os.urandom(9))
        return "call_" + os.urandom(12).hex()
