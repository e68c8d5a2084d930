"""Readers of blocks whose calls are JSON or Python."""

import re

from zse.server.tools.blocks import MORE, NEVER, SPACE, ahead
from zse.server.tools.calls import CallPart, load_json, make_call, read_json, read_python, whole
from zse.server.tools.json_text import DONE, Scanner
from zse.server.tools.json_text import MORE as OPEN

MAX_HEAD = 256  # characters before the arguments
_MAX_CLOSINGS = 16  # closing marks tried, when the text before one is no call yet: it may stand in a string


class JsonCalls:
    """{"name": …, "arguments": {…}} or a list of them; or, with a head, calls whose name stands before the arguments.

    Args:
        functions: name → schema, of what the request offers.
        closing: ends the block; models forget it at times, and brackets too many may stand before it.
        head: of calls whose arguments stand alone: its group `name`, its group `id` if it has one; a "{" follows.
        tail: words, in this order, behind the arguments of such a call; with a tail another one may follow in the block.
        known: only calls of functions that the request names are calls.
        lists: whether the first form may come, too, in a format with a head.
    """

    def __init__(
        self,
        functions: dict[str, dict],
        closing: str = "",
        head: str = "",
        tail: tuple[str, ...] = (),
        known: bool = False,
        lists: bool = True,
    ):
        self._functions, self._closing, self._tail, self._known, self._lists = functions, closing, tail, known, lists
        self._head = re.compile(head) if head else None
        self.parts: list[CallPart] = []
        self.at = self._begun_at = 0
        self._scanner: Scanner | None = None
        self._name, self._id, self._begun = "", "", ""
        self._num_calls = 0
        self._is_complete: bool | None = None  # the last call of this scanner; None: it has found none

    def read(self, text: str, is_last: bool) -> int | None:
        while True:
            if self._scanner is None:
                begins = self._begin(text, is_last)
                if begins is None:
                    return MORE
                if not begins:
                    return self.at if self._num_calls else NEVER
            scanner = self._scanner
            assert scanner is not None
            if scanner.state is OPEN:
                self.at = scanner.take(text, self.at)
                self._take_parts(scanner)
                if scanner.state is OPEN and not is_last:
                    return MORE
                if scanner.state is DONE and not self._name:
                    self._take_rest(scanner, text[self._begun_at : self.at])
            if scanner.state is not DONE and self._is_complete is False:  # the call breaks off
                return len(text) if scanner.state is OPEN else self.at
            if not self._num_calls or scanner.state is not DONE and self._is_complete is None:
                return self._begun_at if self._num_calls else NEVER
            is_closed = self._behind(text, is_last)
            if is_closed is not False or not self._name or not self._tail:
                return MORE if is_closed is None else self.at
            self._scanner = None  # perhaps another call

    def _begin(self, text: str, is_last: bool) -> bool | None:
        """Whether a value begins; None: not known yet."""
        at = self._begun_at = self.at
        self._is_complete = None
        while at < len(text) and text[at] in SPACE:
            at += 1
        if at == len(text):
            return False if is_last else None
        is_list = text[at] in "{[" and self._lists and not self._num_calls
        if is_list or self._head is None:
            if is_list:
                self._name, self._scanner = "", Scanner(self._functions)
                self.at = self._begun_at = at
            return is_list
        found = self._head.match(text, self.at)
        if found is None or not text.startswith("{", found.end()) or found.end() - self.at > MAX_HEAD:
            return False if is_last or len(text) - self.at > MAX_HEAD else None
        name = found["name"]
        if self._known and name not in self._functions:
            return False
        self._name, self._id = name, found.groupdict().get("id") or ""
        self._scanner, self.at = Scanner(self._functions, name), found.end()
        return True

    def _take_parts(self, scanner: Scanner) -> None:
        """What the scanner found; of a function that the request does not name only when it is complete."""
        if self._name and self._name not in self._functions and scanner.state is not DONE:
            return
        for name, arguments, is_last in scanner.parts:
            if name:
                self._begun = name
                self._num_calls += 1
                continue
            self.parts.append(CallPart(self._begun, arguments, self._id if self._begun else "", is_last))
            self._begun, self._is_complete = "", is_last
        scanner.parts = []

    def _take_rest(self, scanner: Scanner, value: str) -> None:
        """The calls of a complete value that did not come out yet: those with their keys in another order, of unknown
        names, without arguments."""
        if scanner.num_begun == 1 and value.startswith("{"):
            return
        calls = read_json(value) or []
        if self._known and not all(call.name in self._functions for call in calls):
            return
        self.parts += whole(calls[scanner.num_begun :])
        self._num_calls += len(calls[scanner.num_begun :])

    def _behind(self, text: str, is_last: bool) -> bool | None:
        """Behind complete arguments: whether the closing mark stands there; None: not known yet."""
        at = self.at
        for word in self._tail if self._name else ():
            end = ahead(text, at, word, is_last)
            if end is MORE:
                return None
            at = at if end == NEVER else end
        end = ahead(text, at, self._closing, is_last, SPACE if self._name else SPACE + "}]") if self._closing else NEVER
        if end is MORE:
            return None
        self.at = at if end == NEVER else end
        return end != NEVER


class ClosedCalls:
    """Calls up to a closing mark: read when they are complete, and none otherwise. A mark may stand in a text of
    theirs."""

    def __init__(self, functions: dict[str, dict], closing: str):
        self._functions, self._closing = functions, closing
        self.parts: list[CallPart] = []
        self.at = self._tries = 0

    def read(self, text: str, is_last: bool) -> int | None:
        while True:
            end = text.find(self._closing, self.at)
            if end < 0:
                self.at = max(self.at, len(text) - len(self._closing) + 1)
                return MORE if not is_last else len(text) if self._take(text) else NEVER
            self.at = end + len(self._closing)
            if self._take(text[:end]):
                return self.at
            self._tries += 1
            if not self._is_in_text(text, end) or self._tries == _MAX_CLOSINGS:
                return NEVER

    def _take(self, text: str) -> bool:
        """Whether the text is calls; their parts."""
        raise NotImplementedError

    def _is_in_text(self, text: str, at: int) -> bool:
        """Whether a mark that stands at `at` stands in a text: here between double quotes."""
        return (text.count('"', 0, at) - text.count('\\"', 0, at)) % 2 == 1


class KeyedCalls(ClosedCalls):
    """[{NAME: {…}}, …]: objects of one key each."""

    def _take(self, text: str) -> bool:
        try:
            entries = load_json(text)
        except ValueError:
            return False
        if not isinstance(entries, list) or not all(isinstance(entry, dict) and len(entry) == 1 for entry in entries):
            return False
        calls = [make_call(*pair) for entry in entries for pair in entry.items()]
        self.parts = whole(call for call in calls if call is not None)
        return 0 < len(self.parts) == len(calls)


class PythonLines(ClosedCalls):
    """Lines of f(a=1), of functions that the request names."""

    def _take(self, text: str) -> bool:
        calls = read_python(text) or []
        if not all(call.name in self._functions for call in calls):
            return False
        self.parts = whole(calls)
        return bool(calls)


class PythonCalls:
    """[f(a=1), g()] in brackets: read when they are complete, and none otherwise.

    Args:
        functions: name → schema, of what the request offers.
        closing: ends the block; it may be missing behind the bracket.
        known: only calls of functions that the request names are calls.
        json: whether the brackets may hold calls as JSON.
    """

    def __init__(self, functions: dict[str, dict], closing: str = "", known: bool = False, json: bool = False):
        self._functions, self._closing, self._known, self._json = functions, closing, known, json
        self.parts: list[CallPart] = []
        self.at = 0
        self._is_read = False
        self._open: list[str] = []
        self._quote = ""

    def read(self, text: str, is_last: bool) -> int | None:
        if not self._is_read:
            end = self._balanced(text)
            if end is MORE:
                return NEVER if is_last else MORE
            if end == NEVER or not self._take(text[:end]):
                return NEVER
            self._is_read = True
        if not self._closing:
            return self.at
        end = ahead(text, self.at, self._closing, is_last)
        return self.at if end == NEVER else end

    def _take(self, text: str) -> bool:
        """Whether the text is calls."""
        calls = self._json and read_json(text) or read_python(text)
        if not calls or self._known and not all(call.name in self._functions for call in calls):
            return False
        self.parts = whole(calls)
        return True

    def _balanced(self, text: str) -> int | None:
        """Where the bracket ends that the text begins with."""
        while self.at < len(text):
            character = text[self.at]
            if self._quote and character == "\\":
                if self.at + 1 == len(text):
                    return MORE
                self.at += 1
            elif self._quote:
                self._quote = "" if character == self._quote else self._quote
            elif character in "\"'" and self._open:
                self._quote = character
            elif character in "([{" and (self._open or character == "["):
                self._open.append(character)
            elif character in ")]}" and self._open:
                if self._open.pop() + character not in ("()", "[]", "{}"):
                    return NEVER
            elif not self._open and character not in SPACE:
                return NEVER
            self.at += 1
            if self._open == [] and character == "]":
                return self.at
        return MORE
