"""llama.cpp's GBNF (as its README of grammars has it) in the words of it that llguidance's converter to Lark takes over with their meaning.

The converter hands escapes and classes on as they stand: `\\u00e9` without its zeros, `\\U…` and `\\[` within a text, of which
Lark has none, and `&&`, `--` and `~~` within a class, which are operators of Rust's expressions and characters of GBNF."""

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

_CHARACTER = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|"
_TOKENS = re.compile(
    r"(?P<comment>#[^\r\n]*)"
    r'|"(?P<text>(?:\\.|[^"\\])*)"'
    r"|\[(?P<denied>\^?)(?P<class>(?:\\.|[^\]\\])*)\]"
    r'|(?P<any>\.)|(?P<start>(?<![\w-])start(?![\w-]))|(?P<open>["\[].{0,20})',
    re.DOTALL,
)
_PARTS = re.compile(rf"({_CHARACTER}[^\\])(?:-({_CHARACTER}[^\\]))?", re.DOTALL)
_CONTROL = {"n": "\n", "r": "\r", "t": "\t"}
_LAST = "\U0010ffff"


def lark_of(source: str) -> str:
    """A grammar of GBNF in Lark. Raises what the converter does, and ValueError."""
    return gbnf_to_lark(_TOKENS.sub(_written, source))


def _written(token: re.Match) -> str:
    kind = token.lastgroup
    if kind == "text":
        parts = re.findall(_CHARACTER + ".", token["text"], re.DOTALL)
        return '"' + "".join(_safe(_read(part), '"\\') for part in parts) + '"'
    if kind == "class":
        return f"[{token['denied']}{''.join(map(_range, _PARTS.finditer(token['class'])))}]"
    if kind == "open":
        raise ValueError(f"{token[0]}: the {'class' if token[0][0] == '[' else 'text'} has no end")
    if kind == "any":
        return rf"[\x00-{_LAST}]"  # line breaks, too
    return "start-of-gbnf" if kind == "start" else token[0]  # the name of Lark's own first rule


def _range(part: re.Match) -> str:
    first, last = _read(part[1]), _read(part[2]) if part[2] else None
    if last is not None and last < first:
        raise ValueError(f"[{part[0]}]: the end of a range is before its beginning")
    return _safe(first) + ("" if last is None else "-" + _safe(last))


def _read(written: str) -> str:
    """The character that stands there, as it is or behind a backslash."""
    if written[0] != "\\" or len(written) == 1:
        return written
    if len(written) == 2:
        return _CONTROL.get(written[1], written[1])
    code = int(written[2:], 16)
    if code > ord(_LAST) or 0xD800 <= code < 0xE000:
        raise ValueError(f"{written} is no character")
    return chr(code)


def _safe(character: str, special: str = "\\[]^-&~/") -> str:
    """The character as text and expressions have it: by its number where it is a control or stands for something else."""
    return (
        rf"\x{ord(character):02x}"
        if ord(character) < 32 or ord(character) == 127 or character in special
        else character
    )
