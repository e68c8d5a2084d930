"""The lexer of template_parse.py, with jinja2's white space rules (trim_blocks, lstrip_blocks, `-` and `+` signs)."""

import re

from zse.tokenizer.template_fast import Unknown

_OPEN = re.compile(r"\{(?:(?P<kind>[%{#])(?P<sign>[-+]?))")
_TOKEN = re.compile(
    r"""\s*(?:(?P<float>\d+\.\d+)|(?P<int>\d+)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<close>[-+]?%\}|-?\}\})
    |(?P<op>//|\*\*|==|!=|<=|>=|[-+*/%~<>=()\[\]{}.,:|]))""",
    re.X | re.S,
)
_SINGLE = re.compile(r"\s*(?P<op>[-+%}])")
_COMMENT_END = re.compile(r"([-+]?)#\}")


def lex(source: str) -> list[tuple]:
    """[("data", text) | ("begin", "%" or "{") | (token kind, text) | ("end", "")], comments left out."""
    source = re.sub(r"\r\n|\r", "\n", source)
    if source.endswith("\n"):
        source = source[:-1]
    out, at, line_starts = [], 0, True
    while True:
        found = _OPEN.search(source, at)
        text = source[at : found.start()] if found else source[at:]
        if not found:
            out.append(("data", text))
            return out
        kind, sign = found["kind"], found["sign"]
        if kind == "{" and sign == "+":
            sign, stop = "", found.end() - 1
        else:
            stop = found.end()
        if sign == "-":
            text = text.rstrip()
        elif sign != "+" and kind != "{":
            # lstrip_blocks: white space between the line's start and the block goes.
            start = text.rfind("\n") + 1
            if (start > 0 or line_starts) and not text[start:].strip():
                text = text[:start]
        out.append(("data", text))
        if kind == "#":
            end = _COMMENT_END.search(source, stop)
            if not end:
                raise Unknown
            at, closing = end.end(), end[1]
        else:
            out.append(("begin", kind))
            at, closing = _lex_code(source, stop, "%}" if kind == "%" else "}}", out)
        if closing == "-":
            while at < len(source) and source[at].isspace():
                at += 1
        elif closing != "+" and kind != "{" and source[at : at + 1] == "\n":
            at += 1  # trim_blocks
        line_starts = source[at - 1] == "\n"


def _lex_code(source: str, at: int, close: str, out: list) -> tuple[int, str]:
    depth = 0
    while True:
        found = _TOKEN.match(source, at)
        if not found:
            raise Unknown
        kind = found.lastgroup or ""
        text = found[kind]
        if kind == "close" and (depth or not text.endswith(close)):
            # "}}" inside {{ {"a": {}}["a"] }}, or "-%" and the like in an expression: a single character is the token.
            found = _SINGLE.match(source, at)
            if not found:
                raise Unknown
            kind, text = "op", found["op"]
        if kind == "close":
            out.append(("end", ""))
            return found.end(), text[0] if text[0] in "-+" else ""
        if kind == "op" and text in "([{":
            depth += 1
        elif kind == "op" and text in ")]}":
            depth -= 1
        out.append((kind, text))
        at = found.end()


def string_value(token: str) -> str:
    body = token[1:-1]
    return body if "\\" not in body else body.encode("ascii", "backslashreplace").decode("unicode-escape")
