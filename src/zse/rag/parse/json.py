"""JSON, a value a line of it, and Jupyter's notebooks → one block a record: a line for each value, behind the names that lead to it."""

import json
from typing import Any

from zse.rag.documents import DocumentError, ParsedDocument, ParseLimits, TextBlock
from zse.rag.parse.markdown import parse as parse_markdown
from zse.rag.parse.text import decode, title_of

MAX_PATH = 120  # characters of the names before a value
_TITLES = ("title", "name", "subject", "headline", "id")


class _Object(list):
    """(name, value) pairs: names may come twice, and none is lost."""


# Numbers stay as they are written.
_DECODER = json.JSONDecoder(object_pairs_hook=_Object, parse_int=str, parse_float=str, parse_constant=str)


def parse(data: bytes, name: str, limits: ParseLimits) -> ParsedDocument:
    """Records are the items of a list, else the values of an object, else the lines. DocumentError says where the text is no JSON."""
    text, warnings = decode(data)
    records = _records(text, limits)
    if len(records) == 1 and isinstance(records[0], _Object) and _notebook(records[0]):
        blocks = _cells(records[0], limits)
    else:
        only = records[0] if len(records) == 1 else None
        if isinstance(only, list) and not isinstance(only, _Object) and any(isinstance(item, list) for item in only):
            records = only
        blocks, left = [], limits.max_text_bytes
        for record in records:
            parts = (
                [_Object([pair]) for pair in record] if len(records) == 1 and isinstance(record, _Object) else [record]
            )
            for part in parts:
                lines = _lines(part, limits.max_depth)
                left -= sum(map(len, lines))
                if left < 0:
                    raise DocumentError(
                        f"the document has more than {limits.max_text_bytes >> 20} MiB of text", "request_too_large"
                    )
                if lines:
                    blocks.append(TextBlock("paragraph", "\n".join(lines)))
    return ParsedDocument("json", _title(records) or title_of(name), blocks, warnings=warnings)


def _records(text: str, limits: ParseLimits) -> list[Any]:
    """The values of the text, one or one a line."""
    begin = len(text) - len(text.lstrip())
    if begin == len(text):
        return []
    number, values = 0, []
    try:
        value, end = _DECODER.raw_decode(text, begin)
        if not text[end:].strip():
            return [value]
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                values.append(_DECODER.decode(line))
    except json.JSONDecodeError as error:
        where = f"line {number or error.lineno}, column {error.colno}"
        raise DocumentError(f"the file is no JSON: {where}: {error.msg}") from None
    except RecursionError:
        raise DocumentError(f"the JSON is nested more than {limits.max_depth} deep") from None
    return values


def _lines(record: Any, max_depth: int) -> list[str]:
    """`names: value` for each value; a list of plain values is one line."""
    lines: list[str] = []
    todo: list[tuple[str, Any, int]] = [("", record, 0)]
    while todo:
        path, value, depth = todo.pop()
        if depth > max_depth:
            raise DocumentError(f"the JSON is nested more than {max_depth} deep")
        if isinstance(value, _Object):
            todo += [(_under(path, key, lines), item, depth + 1) for key, item in reversed(value)]
        elif isinstance(value, list):
            if all(not isinstance(item, list) for item in value):
                value = ", ".join(map(_word, value))
                if value:
                    lines.append(f"{path}: {value}" if path else value)
            else:
                todo += [
                    (_under(path, f"[{index}]", lines), item, depth + 1)
                    for index, item in reversed([*enumerate(value)])
                ]
        else:
            word = _word(value)
            lines.append(f"{path}: {word}" if path else word)
    return [line for line in lines if line.strip()]


def _under(path: str, key: str, lines: list[str]) -> str:
    if len(key) > MAX_PATH:
        lines.append(key)  # whole once, not before each value below it
        key = key[:MAX_PATH]
    joined = path + key if not path or key.startswith("[") else f"{path}.{key}"
    return joined if len(joined) <= MAX_PATH else "…" + joined[-MAX_PATH:]


def _word(value: Any) -> str:
    if isinstance(value, str):
        return value.replace("\0", "\ufffd")
    return "null" if value is None else str(value).lower()


def _title(records: list[Any]) -> str:
    """What a single object calls itself."""
    if len(records) == 1 and isinstance(records[0], _Object):
        named = {key.lower(): value for key, value in records[0] if isinstance(value, str)}
        return next((title_of(named[key]) for key in _TITLES if named.get(key)), "")
    return ""


def _notebook(record: _Object) -> bool:
    fields = dict(record)
    return "nbformat" in fields and isinstance(fields.get("cells"), list)


def _cells(record: _Object, limits: ParseLimits) -> list[TextBlock]:
    """Of a notebook (nbformat 4): text and code; what the code wrote as text stands behind it."""
    blocks: list[TextBlock] = []
    for cell in dict(record)["cells"]:
        fields = dict(cell) if isinstance(cell, _Object) else {}
        source = _joined(fields.get("source"))
        if fields.get("cell_type") == "markdown":
            found = parse_markdown(source.encode("utf-8", "replace"), "", limits).blocks
            for block in found:
                block.start = -1
            blocks += found
        elif source.strip():
            blocks.append(TextBlock("code", source.rstrip()))
        for output in fields.get("outputs") or () if isinstance(fields.get("outputs"), list) else ():
            shown = dict(output) if isinstance(output, _Object) else {}
            data = dict(shown["data"]) if isinstance(shown.get("data"), _Object) else {}
            text = _joined(shown.get("text")) or _joined(data.get("text/plain"))
            if text.strip():
                blocks.append(TextBlock("code", text.strip("\n").rstrip()))
    return blocks


def _joined(value: Any) -> str:
    if isinstance(value, list):
        return "".join(item for item in value if isinstance(item, str)).replace("\0", "\ufffd")
    return value.replace("\0", "\ufffd") if isinstance(value, str) else ""
