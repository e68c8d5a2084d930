"""JSON while it is written: a scanner that accepts every character once it is certain, and finds the calls in it."""

import json
import math
import re

_SPACE = re.compile(r"[ \t\r\n]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(
    r'\\(?:["\\/bfnrt]|u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}'
    r"|[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))"
)
_LONGEST_ESCAPE = 12
_ATOM = re.compile(r"[-+.0-9A-Za-z]+")
_VALID_ATOM = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_MAX_ATOM, _MAX_DEPTH, _MAX_WORD = 400, 200, 256
_NAMES, _ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters")
MORE, DONE, BROKEN = "more", "done", "broken"


class Scanner:
    """One object or list. take() the text as it grows; `state` is MORE, DONE (the value is complete) or BROKEN (what
    comes is no JSON). What it accepts depends on the text alone, not on how it was cut.

    name: the value is the arguments of a call of it. Without, arguments are the object behind a name in functions, in
    {"name": …, "arguments": …}, alone, in a list or in {"function": …}. `parts`: (name or "", text of arguments,
    whether they are complete), in order; a name begins a call, together with the bracket that opens its arguments. Raw
    control characters in strings, which models write, come out as escapes."""

    def __init__(self, functions: dict[str, dict], name: str = ""):
        self._functions, self._name = functions, name
        self.parts: list[tuple[str, str, bool]] = []
        self.num_begun = 0
        self.state = MORE
        self._stack: list[list] = []  # of each open bracket: it, the key that was read last, the value of "name"
        self._expect = "value"
        self._word: list[str] | None = None  # of the string that is open
        self._top = 0 if name else -1  # the depth around the arguments that are being read
        self._out: list[str] = []

    def take(self, text: str, at: int) -> int:
        """Go on at `at`; where it stopped."""
        while self.state is MORE and at < len(text):
            after = self._string(text, at) if self._word is not None else self._token(text, at)
            if after == at:
                break
            at = after
        self._flush(is_end=False)
        return at

    def _flush(self, is_end: bool) -> None:
        if self._out or is_end:
            self.parts.append(("", "".join(self._out), is_end))
            self._out = []

    def _accept(self, piece: str) -> None:
        if self._top >= 0:
            self._out.append(piece)

    def _string(self, text: str, at: int) -> int:
        assert self._word is not None
        character = text[at]
        if character == '"':
            self._accept(character)
            self._end_string()
            return at + 1
        if character == "\\":
            found = _ESCAPE.match(text, at)
            if found is None:
                if len(text) - at >= _LONGEST_ESCAPE:
                    self.state = BROKEN
                return at
            piece, end = found[0], found.end()
        elif character < " ":
            piece, end = json.dumps(character)[1:-1], at + 1
        else:
            found = _PLAIN.match(text, at)
            assert found is not None
            piece, end = found[0], found.end()
        if len(self._word) < _MAX_WORD:
            self._word.append(piece)
        self._accept(piece)
        return end

    def _end_string(self) -> None:
        assert self._word is not None
        word, self._word = self._word, None
        if self._top < 0:
            value = json.loads(f'"{"".join(word)}"')
            if self._expect == "key":
                self._stack[-1][1] = value
            elif self._stack and self._stack[-1][1] in _NAMES:
                self._stack[-1][2] = value
        self._expect = "colon" if self._expect == "key" else "comma"

    def _token(self, text: str, at: int) -> int:
        character, expect = text[at], self._expect
        space = _SPACE.match(text, at)
        if space is not None:
            self._accept(space[0])
            return space.end()
        is_value = expect in ("value", "value or end")
        is_key = expect in ("key", "key or end")
        if character in "{[" and is_value and len(self._stack) < _MAX_DEPTH:
            self._open(character)
        elif character in "}]" and self._stack and expect in ("comma", "key or end", "value or end"):
            self._close(character)
        elif character == '"' and (is_value or is_key):
            self._word, self._expect = [], "key" if is_key else "value"
            self._accept(character)
        elif character == ":" and expect == "colon":
            self._expect = "value"
            self._accept(character)
        elif character == "," and expect == "comma":
            self._expect = "key" if self._stack[-1][0] == "{" else "value"
            self._accept(character)
        elif is_value and self._stack:
            return self._atom(text, at)
        else:
            self.state = BROKEN
        return at if self.state is BROKEN else at + 1

    def _atom(self, text: str, at: int) -> int:
        """A number, true, false or null: certain when something else follows."""
        found = _ATOM.match(text, at)
        if found is None or len(found[0]) > _MAX_ATOM:
            self.state = BROKEN
        elif found.end() < len(text):
            is_valid = _VALID_ATOM.fullmatch(found[0]) is not None
            if not is_valid or found[0][0] not in "tfn" and math.isinf(float(found[0])):
                self.state = BROKEN
                return at
            self._accept(found[0])
            self._expect = "comma"
            return found.end()
        return at

    def _open(self, bracket: str) -> None:
        begins = self._top < 0 and bracket == "{" and self._is_arguments()
        if begins:
            self._top = len(self._stack)
        if begins or self._top == 0 and not self._stack:
            self.parts.append((self._name or self._stack[-1][2], "", False))
            self.num_begun += 1
        self._stack.append([bracket, None, None])
        self._expect = "key or end" if bracket == "{" else "value or end"
        self._accept(bracket)

    def _is_arguments(self) -> bool:
        """Whether the object that begins here is the arguments of a call that the request offers."""
        *outer, inner = self._stack or [["", None, None]]
        is_envelope = all(bracket == "[" or key == "function" for bracket, key, _ in outer)
        return is_envelope and inner[0] == "{" and inner[1] in _ARGUMENTS and inner[2] in self._functions

    def _close(self, bracket: str) -> None:
        if self._stack[-1][0] + bracket not in ("{}", "[]"):
            self.state = BROKEN
            return
        self._stack.pop()
        self._accept(bracket)
        if len(self._stack) == self._top:
            self._flush(is_end=True)
            self._top = -1
        self._expect = "comma"
        if not self._stack:
            self.state = DONE
