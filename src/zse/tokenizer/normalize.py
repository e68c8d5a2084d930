"""Normalizers and pre-tokenizers of WordPiece and Unigram vocabularies, as a tokenizer.json describes them: each is a
function from text to text. Pre-tokenizers put SEPARATOR, which no text holds, between the pieces.

What each does to which character is what the `tokenizers` package does: BERT's (Devlin et al. 2018, tokenization.py),
SentencePiece's compiled rules (sentencepiece, `builder.cc`; a darts-clone double array), Metaspace.
"""

import base64
import re
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

from zse.lazy import unicodedata
from zse.tokenizer.bert_table import RUNS

Step = Callable[[str], str]
SEPARATOR = "\ud800"
METASPACE = "▁"
# The White_Space property; str.split() also splits at U+001C to U+001F.
_SPACE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_SPACES = re.compile(f"[{_SPACE}]+")
_IS_SPACE = re.compile(f"[{_SPACE}]")
_REMOVED, _MARK, _PUNCTUATION = 1, 2, 3
# What BERT takes for Chinese: the blocks of ideographs.
_CHINESE = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


class UnknownStep(Exception):
    """A step that only the `tokenizers` package knows, by its name."""


class _Characters(dict):
    """code point → text, by a rule that is asked once for each character that comes: for str.translate()."""

    def __init__(self, rule: Callable[[str], str]):
        super().__init__()
        self._rule = rule

    def __missing__(self, code: int) -> str:
        found = self[code] = self._rule(chr(code))
        return found


def _characters(rule: Callable[[str], str]) -> Step:
    table = _Characters(rule)
    return lambda text: text.translate(table)


def _bert_class() -> Callable[[str], int]:
    """The class of a character; table lookups by bisection."""
    runs = array("I", [int(run, 16) for run in RUNS.split()])

    def class_of(character: str) -> int:
        code, low, high = ord(character), 0, len(runs)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if runs[middle] >> 2 <= code else (low, middle)
        return runs[low] & 3

    return class_of


def _bert(options: dict) -> Step:
    class_of = _bert_class()
    cleans, chinese = options.get("clean_text", True), options.get("handle_chinese_chars", True)
    lowers, strips = options.get("lowercase", True), options.get("strip_accents")
    strips = lowers if strips is None else strips

    def clean(character: str) -> str:
        if cleans and class_of(character) == _REMOVED:
            return ""
        if cleans and _IS_SPACE.match(character):
            return " "
        is_chinese = chinese and any(first <= ord(character) <= last for first, last in _CHINESE)
        return f" {character} " if is_chinese else character

    def fold(character: str) -> str:
        if strips and class_of(character) == _MARK:
            return ""
        return character.lower() if lowers else character

    first, last = _characters(clean), _characters(fold)
    if not strips:
        return lambda text: last(first(text))
    return lambda text: last(_form(first(text), "NFD"))


def _form(text: str, form: Any) -> str:
    return text if text.isascii() else unicodedata.normalize(form, text)


class Charsmap:
    """SentencePiece's compiled rules: a double array of UTF-8 prefixes → offsets of what replaces them. ValueError:
    damaged."""

    def __init__(self, data: bytes):
        size = int.from_bytes(data[:4], "little")
        if size % 4 or not 4 <= size <= len(data) - 4:
            raise ValueError(f"precompiled_charsmap: {size} bytes of rules in {len(data)}")
        self._units, self._texts = array("I", data[4 : 4 + size]), data[4 + size :]
        self._found: dict[str, str | None] = {}
        self._characters = _Characters(lambda character: character if (new := self._of(character)) is None else new)
        self._classes = _Characters(_cluster_class)

    def __call__(self, text: str) -> str:
        """By grapheme clusters of at most five bytes, else by characters: what `tokenizers` does."""
        if text.isascii() and "\r" not in text:
            return text.translate(self._characters)
        parts: list[str] = []
        at = 0
        for match in _CLUSTERS.finditer(text.translate(self._classes)):
            cluster = text[match.start() : match.end()]
            new = self._of(cluster) if len(cluster.encode()) < 6 else None
            if new is not None:
                parts += text[at : match.start()].translate(self._characters), new
                at = match.end()
        return "".join([*parts, text[at:].translate(self._characters)])

    def _of(self, chunk: str) -> str | None:
        """What replaces a whole chunk: the rule of its shortest prefix that has one; None: no prefix has."""
        if chunk not in self._found:
            self._found[chunk] = self._lookup(chunk.encode())
        return self._found[chunk]

    def _lookup(self, key: bytes) -> str | None:
        units = self._units
        try:
            node = _offset(units[0])
            for byte in key:
                if not byte:
                    return None
                node ^= byte
                unit = units[node]
                if unit & 0x800000FF != byte:
                    return None
                node ^= _offset(unit)
                if unit >> 8 & 1:
                    at = units[node] & 0x7FFFFFFF
                    return self._texts[at : self._texts.index(b"\0", at)].decode()
        except (IndexError, ValueError, UnicodeDecodeError):
            raise ValueError("precompiled_charsmap: a rule points outside of it") from None
        return None


def _offset(unit: int) -> int:
    return unit >> 10 << ((unit & 1 << 9) >> 6)


# Grapheme clusters (Unicode Annex 29) of several characters that may fit in five bytes: \r\n, and a base with what
# extends it.
_CLUSTERS = re.compile("rn|p+[^crn]?e*|[^crn]?e+")
_PREPENDED = (*range(0x600, 0x606), 0x6DD, 0x70F)
_EXTENDS = (0x200C, 0x200D, 0xFF9E, 0xFF9F, 0xE33, 0xEB3, *range(0x1F3FB, 0x1F400))
# Spacing marks (Mc) that do not extend a cluster.
_APART = (
    *(0x102B, 0x102C, 0x1038, *range(0x1062, 0x1065), *range(0x1067, 0x106E), 0x1083, *range(0x1087, 0x108D)),
    *(0x108F, *range(0x109A, 0x109D), 0x1A61, 0x1A63, 0x1A64, 0xAA7B, 0xAA7D, 0x11720, 0x11721),
)


def _cluster_class(character: str) -> str:
    code = ord(character)
    if character in "\r\n":
        return "r" if character == "\r" else "n"
    if code in _PREPENDED:
        return "p"
    category = unicodedata.category(character)
    if code in _EXTENDS or category in ("Mn", "Me") or (category == "Mc" and code not in _APART):
        return "e"
    return "c" if category in ("Cc", "Cf", "Zl", "Zp") else "."


def _replace(options: dict) -> Step:
    pattern, content = options["pattern"], options["content"]
    if "String" in pattern:
        return lambda text: text.replace(pattern["String"], content)
    # Of regular expressions those that published files have, which mean the same everywhere.
    if pattern.get("Regex") not in (" {2,}", "\\s+", " +"):
        raise UnknownStep(f"Replace of {pattern}")
    expression = _SPACES if pattern["Regex"] == "\\s+" else re.compile(pattern["Regex"])
    return lambda text: expression.sub(lambda _: content, text)


def _strip(options: dict) -> Step:
    left = re.compile(rf"\A[{_SPACE}]+") if options.get("strip_left", True) else None
    right = re.compile(rf"[{_SPACE}]+\Z") if options.get("strip_right", True) else None

    def strip(text: str) -> str:
        text = left.sub("", text) if left else text
        return right.sub("", text) if right else text

    return strip


def _prepend(options: dict) -> Step:
    return lambda text: options["prepend"] + text if text else text


def _lowercase(options: dict) -> Step:
    return _characters(str.lower)


def _strip_accents(options: dict) -> Step:
    return _characters(lambda character: "" if unicodedata.category(character)[0] == "M" else character)


def _normal_form(form: str) -> Callable[[dict], Step]:
    return lambda options: partial(_form, form=form)


def _precompiled(options: dict) -> Step:
    return Charsmap(base64.b64decode(options["precompiled_charsmap"]))


def _bert_words(options: dict) -> Step:
    class_of = _bert_class()

    def cut(character: str) -> str:
        if _IS_SPACE.match(character):
            return SEPARATOR
        is_mark = class_of(character) == _PUNCTUATION
        return f"{SEPARATOR}{character}{SEPARATOR}" if is_mark else character

    return _characters(cut)


def _whitespace(options: dict) -> Step:
    return lambda text: _SPACES.sub(SEPARATOR, text)


_STARTS = re.compile(rf"(?:(?<={SEPARATOR})|\A)(?=[^{METASPACE}{SEPARATOR}])")
_FIRST = re.compile(rf"\A(?=[^{METASPACE}{SEPARATOR}])")
_INNER = re.compile(rf"(?<=[^{SEPARATOR}])(?={METASPACE})")


def _metaspace(options: dict) -> Step:
    scheme = options.get("prepend_scheme", "always" if options.get("add_prefix_space", True) else "never")
    if options.get("replacement", METASPACE) != METASPACE:
        raise UnknownStep(f"Metaspace as {options['replacement']}")
    starts = {"always": _STARTS, "first": _FIRST, "never": None}[scheme]

    def cut(text: str) -> str:
        text = text.replace(" ", METASPACE)
        text = starts.sub(METASPACE, text) if starts else text
        return _INNER.sub(SEPARATOR, text) if options.get("split", True) else text

    return cut


STEPS: dict[str, Callable[[dict], Step]] = {
    "BertNormalizer": _bert,
    "Precompiled": _precompiled,
    "Lowercase": _lowercase,
    "StripAccents": _strip_accents,
    "Strip": _strip,
    "Replace": _replace,
    "Prepend": _prepend,
    **{form: _normal_form(form) for form in ("NFC", "NFD", "NFKC", "NFKD")},
    "BertPreTokenizer": _bert_words,
    "WhitespaceSplit": _whitespace,
    "Metaspace": _metaspace,
}


def steps_of(part: dict | None) -> list[Step]:
    """The functions of a `normalizer` or `pre_tokenizer` of a tokenizer.json. UnknownStep, ValueError, KeyError,
    TypeError."""
    if part is None:
        return []
    kind = part.get("type")
    if kind == "Sequence":
        inner = part.get("normalizers", part.get("pretokenizers"))
        return [step for each in inner or [] for step in steps_of(each)]
    if kind not in STEPS:
        raise UnknownStep(str(kind))
    return [STEPS[kind](part)]
