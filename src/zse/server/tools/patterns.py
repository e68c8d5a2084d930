"""`pattern` and `format` of JSON schemas as regular expressions of whole texts, for values that are not written as
JSON.

A pattern is ECMAScript's and may match anywhere in the text; llguidance's regular expressions are Rust's and match the
whole of it. What the two read alike is translated (\\d, \\w and \\s are ASCII's here, as there); what they do not, such
as look-around, back-references and anchors within the expression, is not."""

import re

ANYTHING = "(.|\\n)*"
MAX_PATTERN = 1000  # characters
_DAY = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = f"{_LABEL}(\\.{_LABEL})*"
_ATOM = "[A-Za-z0-9!#$%&'*+\\x2f=?^_`\\x7b\\x7c\\x7d~-]+"
_HEX4 = "[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [
        f"({_HEX4}:){{7}}{_HEX4}",
        "::",
        *(
            f"({_HEX4}:){{{before}}}(:{_HEX4}){{1,{7 - before}}}" if before else f":(:{_HEX4}){{1,7}}"
            for before in range(7)
        ),
        f"({_HEX4}:){{1,7}}:",
    ]
)
# Of RFC 3339, 4122, 791, 4291, 5321 (without quoted names), 1123 and 3986 (what a URI looks like, not its parts).
FORMATS = {
    "date": _DAY,
    "time": _TIME,
    "date-time": f"{_DAY}[Tt ]{_TIME}",
    "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "ipv4": f"{_BYTE}(\\.{_BYTE}){{3}}",
    "ipv6": _IPV6,
    "hostname": _HOST,
    "email": f"{_ATOM}(\\.{_ATOM})*@{_HOST}",
    "uri": "[A-Za-z][A-Za-z0-9+.-]*:([A-Za-z0-9._~:\\x2f?#\\x5b\\x5d@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+",
}
_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "s": "\\t\\n\\x0b\\x0c\\r\\x20"}
_CONTROLS = {"t": "\\t", "n": "\\n", "r": "\\r", "v": "\\x0b", "f": "\\x0c"}
_TOKEN = re.compile(
    r"""
    \\x(?P<hex>[0-9A-Fa-f]{2}) | \\u(?P<unicode>[0-9A-Fa-f]{4})
  | \\(?P<escape>.)
  | (?P<quantifier>[*+?]\??|\{[0-9]{1,4}(?:,[0-9]{0,4})?\}\??)
  | (?P<open>\((?:\?:)?)(?!\?) | (?P<close>\)) | (?P<bar>\|) | (?P<dot>\.)
  | \[(?P<not>\^|(?!\^))(?P<members>(?:\\.|[^\]\\\[&~])+)\]
  | (?P<literal>[^\\*+?{}()|.\[\]^$])
""",
    re.VERBOSE | re.DOTALL,
)


def whole(pattern: str) -> str | None:
    """A regular expression of the texts in which `pattern` is found, for between slashes; None when it cannot be
    said."""
    found = _whole(pattern) if len(pattern) <= MAX_PATTERN else None
    try:
        # What is left are ranges and counts in the wrong order, and halves of characters.
        found and (found.encode(), re.compile(found))
    except (re.error, RecursionError, OverflowError, UnicodeEncodeError):
        return None
    return found


def _whole(pattern: str) -> str | None:
    branches: list[str] = []
    at, depth, length = 0, 0, len(pattern)
    while at <= length:
        out, begins, ends, can_repeat = "", False, False, False
        if pattern.startswith("^", at):
            begins, at = True, at + 1
        while at < length:
            if pattern[at] == "$" and not depth and (at + 1 == length or pattern[at + 1] == "|"):
                ends, at = True, at + 1
                continue
            token = _TOKEN.match(pattern, at)
            if token is None or token.lastgroup == "quantifier" and not can_repeat:
                return None
            if token["bar"] and not depth:
                break
            depth += bool(token["open"]) - bool(token["close"])
            text = _translated(token)
            if depth < 0 or text is None:
                return None
            can_repeat = not (token["open"] or token["bar"] or token["quantifier"])
            out += text
            at = token.end()
        branches.append(("" if begins else ANYTHING) + f"({out})" + ("" if ends else ANYTHING))
        at += 1
    return "|".join(branches) if not depth else None


def _translated(token: re.Match) -> str | None:
    if token["hex"] or token["unicode"]:
        return _character(chr(int(token["hex"] or token["unicode"], 16)))
    if token["escape"]:
        escape = token["escape"]
        if escape in _CLASSES:
            return f"[{_CLASSES[escape]}]"
        if escape.lower() in _CLASSES:
            return f"[^{_CLASSES[escape.lower()]}]"
        return _escaped(escape)
    if token["members"]:
        members = _members(token["members"])
        return members and f"[{token['not']}{members}]"
    if token["literal"]:
        return _character(token["literal"])
    # A slower search for the same texts: whether a match is greedy says nothing about which texts have one.
    return token["quantifier"].rstrip("?") or "?" if token["quantifier"] else "(" if token["open"] else token[0]


def _members(text: str) -> str | None:
    """The inside of a class."""
    out, at = "", 0
    while at < len(text):
        character = text[at]
        if character != "\\":
            out += character if character in "-^" and at else _character(character)
            at += 1
            continue
        name = text[at + 1]
        code = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4}))").match(text, at)
        if code is not None:
            out += _character(chr(int(code[1] or code[2], 16)))
            at = code.end()
            continue
        part = _CLASSES.get(name) or _escaped(name)
        if part is None:
            return None
        out += part
        at += 2
    return out


def _escaped(name: str) -> str | None:
    """What a letter or sign behind a backslash means, None for assertions, references and what nobody knows."""
    if name in _CONTROLS:
        return _CONTROLS[name]
    return None if name.isalnum() or name == "_" else _character(name)


def _character(character: str) -> str:
    """A character as itself."""
    if character.isalnum() or ord(character) > 127 and character.isprintable():
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 128 else character
