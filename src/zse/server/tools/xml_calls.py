"""The reader of blocks whose calls are XML: each parameter comes out when it is certain where it ends."""

import json
import re
from collections.abc import Callable

import msgspec

from zse.server.tools.blocks import MORE, NEVER, SPACE, ahead
from zse.server.tools.calls import CallPart, is_name, load_json

MAX_MARK = 300  # characters of one mark
_CDATA, _CDATA_END = "<![CDATA[", "]]>"


class XmlStyle(msgspec.Struct, frozen=True):
    """How calls are written.

    Args:
        function: a regular expression of what begins a call; its group is the name.
        parameter: of what begins a parameter; its group `key`, and `string` if it says whether the value is one ("true", "false", or its type).
        value_end, call_end: end a parameter's value and a call.
        newline: whether one stands on both sides of a value.
        nests: whether calls in a value are told by their marks, and a forgotten value_end by the function's schema.
        cdata: whether a value may stand in <![CDATA[ and ]]>, with any marks in it.
    """

    function: str
    parameter: str
    value_end: str
    call_end: str
    newline: bool = False
    nests: bool = True
    cdata: bool = False

    def marks(self, closing: str) -> re.Pattern:
        """Of what stands in a call; the name of the group says which it is."""
        marks = {"parameter": self.parameter, "end": re.escape(self.value_end), "stop": re.escape(self.call_end)}
        if self.nests:
            marks["function"] = self.function
        if closing:
            marks["closing"] = re.escape(closing)
        return re.compile("|".join(f"(?P<{name}>{mark})" for name, mark in marks.items()))


class XmlCalls:
    """Calls up to a closing mark.

    A value may hold the marks of its own format: its end is the first value_end with which those that were opened in it
    are closed, and behind which the next parameter or the end of the call stands.

    Args:
        functions: name → schema, of what the request offers.
        style: how calls are written.
        opening, closing: of the block; without them it is one call.
        known: only calls of functions that the request names are calls.
    """

    def __init__(
        self, functions: dict[str, dict], style: XmlStyle, opening: str = "", closing: str = "", known: bool = False
    ):
        self._functions, self._style, self._known = functions, style, known
        self._opening, self._closing = opening, closing
        self._function, self._parameter = re.compile(rf"\s*{style.function}"), re.compile(rf"\s*(?:{style.parameter})")
        self._marks = style.marks(closing)
        self.parts: list[CallPart] = []
        self._held: list[CallPart] = []  # of a call that nothing is certain of, or of an unknown function
        self.at = self._call_at = 0  # what is decided; where the call begins
        self._num_calls = 0
        self._name = ""
        self._is_over = False  # the last call is complete
        self._keys: list[str] = []
        self._current: re.Match | None = None  # the mark of the parameter whose value is being read
        self._nested = self._nested_calls = 0  # open in it
        self._scan = 0

    def read(self, text: str, is_last: bool) -> int | None:
        while True:
            if not self._name or self._is_over:
                begins = self._begin(text, is_last)
                if begins is not True:
                    return begins
            state = self._continue(text, is_last)
            if state is not True:
                return state

    def _begin(self, text: str, is_last: bool) -> bool | int | None:
        """True when a call begins, else what read() gives."""
        if self._is_over:
            if not self._closing:
                return self.at
            end = ahead(text, self.at, self._closing, is_last)
            if end != NEVER:
                return end
        found = self._function.match(text, self.at)
        if found is not None and found.end() - self.at > MAX_MARK - 20:
            found = None
        is_short = len(text) - self.at <= MAX_MARK and not is_last
        if found is None and is_short and not (self._is_over and text[self.at :].lstrip(SPACE)[:1] not in ("", "<")):
            return MORE
        if found is None or not is_name(found[1]) or self._known and found[1] not in self._functions:
            return self.at if self._is_over else NEVER
        self._name, self._keys, self._is_over, self._current = found[1], [], False, None
        self._call_at, self.at, self._scan = self.at, found.end(), found.end()
        return True

    def _continue(self, text: str, is_last: bool) -> bool | int | None:
        """The call's marks, one after the other: True when it is complete, else what read() gives."""
        while (mark := self._marks.search(text, self._scan)) is not None:
            kind = str(mark.lastgroup)
            step = self._outside(text, mark, kind) if self._current is None else self._inside(text, mark, kind, is_last)
            if step is None:
                return MORE
            if step is False:
                return self._broken(mark.end() if self._current or not self._keys else self.at)
            if self._is_over:
                return True
        self._scan = max(self._scan, len(text) - MAX_MARK)
        return self._broken(len(text)) if is_last else MORE

    def _broken(self, at: int) -> int:
        """Where the block ends when a call breaks off `at` a place: there, or before the call when nothing of it came
        out."""
        if self._keys and not self._held:
            return at
        self.at = at
        return self._call_at if self._num_calls else NEVER

    def _outside(self, text: str, mark: re.Match, kind: str) -> bool:
        if text[self.at : mark.start()].strip(SPACE) or kind in ("end", "function"):
            return False
        if kind == "closing":  # models forget call_end behind the last parameter
            if self._keys:
                self._complete()
            return bool(self._keys)
        self.at = self._scan = mark.end()
        if kind == "parameter":
            self._current, self._nested, self._nested_calls = mark, 0, 0
        else:
            self._complete()
        return True

    def _inside(self, text: str, mark: re.Match, kind: str, is_last: bool) -> bool | None:
        """A mark behind the beginning of a value: True when it is dealt with, None when more text has to say, False
        when the call breaks off here."""
        assert self._current is not None
        value, start = text[self._current.end() : mark.start()], self._scan
        self._scan = mark.end()
        if self._style.cdata and value.lstrip(SPACE).startswith(_CDATA):
            if kind != "end" or not value.rstrip(SPACE).endswith(_CDATA_END):
                return True  # a mark in the text
        if kind == "parameter":
            self._nested += 1
        elif kind == "function":
            self._nested_calls += 1
        elif kind == "end" and self._nested:
            self._nested -= 1
        elif kind == "stop" and self._nested_calls:
            self._nested_calls -= 1
        elif kind == "end":
            follows = self._follows(text, mark.end(), is_last)
            if follows is None:
                self._scan = start
            if not follows:
                return None if follows is None else True
            if not self._put(self._current, value):
                return False
            self.at, self._current = mark.end(), None
        elif kind == "stop" and self._style.nests:
            words = (self._closing, self._opening, self._style.call_end) if self._closing else (self._style.call_end,)
            ends = [ahead(text, mark.end(), word, is_last) for word in words]
            is_end = any(end not in (MORE, NEVER) for end in ends) or is_last and not text[mark.end() :].strip(SPACE)
            if not is_end and MORE in ends:
                self._scan = start
                return None
            if is_end:
                if not self._split(value):
                    return False
                self.at = mark.end()
                self._complete()
        return True

    def _follows(self, text: str, at: int, is_last: bool) -> bool | None:
        """Whether a value ends before `at`, by what stands behind; None: not known yet."""
        ends = [ahead(text, at, word, is_last) for word in (self._style.call_end, self._closing) if word]
        if any(end not in (MORE, NEVER) for end in ends):
            return True
        if MORE in ends:
            return None
        if self._parameter.match(text, at):
            return True
        rest = text[at:].lstrip(SPACE)
        if is_last:
            return not rest
        begins = self._style.parameter.partition("(")[0].replace("\\", "")
        may_come = begins.startswith(rest) or rest.startswith(begins) and len(rest) < MAX_MARK
        return None if may_come else False

    def _split(self, value: str) -> bool:
        """The values in a text in which a value_end is missing: only parameters that the function has begin one."""
        known = (self._functions.get(self._name) or {}).get("properties")
        known = known if isinstance(known, dict) else {}
        assert self._current is not None
        begin, pieces = 0, [self._current]
        texts = []
        for mark in re.finditer(self._style.parameter, value):
            before = value[begin : mark.start()]
            trimmed = before.rstrip(SPACE)
            if mark["key"] in known and ("\n" in before[len(trimmed) :] or trimmed.endswith(self._style.value_end)):
                texts.append(before)
                pieces.append(mark)
                begin = mark.end()
        texts.append(value[begin:])
        keys = [mark["key"] for mark in pieces]
        if self._current["key"] not in known or len({*keys, *self._keys}) < len(keys) + len(self._keys):
            return False
        return all(
            self._put(mark, text.rstrip().removesuffix(self._style.value_end))
            for mark, text in zip(pieces, texts, strict=True)
        )

    def _put(self, mark: re.Match, value: str) -> bool:
        """A parameter, certain; False when it makes no call."""
        key = mark["key"]
        if key in self._keys:
            return False
        if self._style.newline:
            value = value.removeprefix("\n").removesuffix("\n")
        if self._style.cdata and (inner := value.strip(SPACE)).startswith(_CDATA) and inner.endswith(_CDATA_END):
            value = inner[len(_CDATA) : -len(_CDATA_END)]
        properties = (self._functions.get(self._name) or {}).get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        said = mark.groupdict().get("string")
        said = said and str(said in ("true", "string")).lower()
        text = json.dumps({key: _typed(value, schema, said)}, ensure_ascii=False)[1:-1]
        self._emit(", " + text if self._keys else "{" + text)
        self._keys.append(key)
        return True

    def _complete(self) -> None:
        self._emit("}" if self._keys else "{}", is_last=True)
        self._is_over = True
        self._num_calls += 1

    def _emit(self, text: str, is_last: bool = False) -> None:
        begins = not self._keys and not self._held
        self._held.append(CallPart(self._name if begins else "", text, is_last=is_last))
        if self._name in self._functions or is_last:
            self.parts += self._held
            self._held = []


def reader(style: XmlStyle, **options) -> Callable[[dict[str, dict]], XmlCalls]:
    """What makes readers for a Block."""
    return lambda functions: XmlCalls(functions, style, **options)


def _typed(text: str, schema: object, said: str | None = None):
    """The value that a parameter's schema means by its text; text where it means nothing else. said: "true" where the
    mark says that it is a string, "false" that it is none, which counts where the schema leaves it open."""
    kinds = schema.get("type") if isinstance(schema, dict) else "string" if said is None else None
    if kinds == "string" or said == "true" and kinds is None:
        return text
    if isinstance(kinds, list) and "string" in kinds and text != "null" and said != "false":
        return text
    try:
        value = load_json({"True": "true", "False": "false", "None": "null"}.get(text, text))
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError):
        return text
