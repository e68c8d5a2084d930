"""Forms with files that routes take: `Route.upload` says how many bytes one may have, `Route.fields` what may stand in it.

The handler is called before the body has arrived, and reads it with read_form()."""

from collections.abc import Awaitable, Callable
from typing import Any

from zse.http.multipart import FormPart, FormReader
from zse.sampling.fields import Custom, Fields, Kind, Object, of_text, refused, shown
from zse.server.api_request import APIRequest

MAX_TEXT_BYTES = 4 << 10  # of a field that is no file

# The kind of a field that is a file. Its value is what the handler made of it.
FILE = Custom(lambda value, path: value, {"type": "string", "format": "binary"})


async def read_form(request: APIRequest, fields: Fields, take: Callable[[FormPart], Awaitable[Any]]) -> dict[str, Any]:
    """The checked fields of the form; a nested one is sent as `field[name]`. take: awaited with each part that `fields`
    says is a FILE, reads it and gives the field's value; what it keeps it gives up itself when this raises. Raises
    RequestError."""
    assert request.upload is not None
    values: dict[str, Any] = {}
    async for part in FormReader(request.upload, request.headers["content-type"]):
        outer, inner = _path(part.name)
        path, where = shown(part.name), values if inner is None else values.setdefault(outer, {})
        name = outer if inner is None else inner
        if type(where) is not dict or name in where:
            raise refused("invalid_value", f"'{path}' stands in the form twice.", path)
        if inner is None and outer in fields and fields[outer].kind is FILE:
            where[name] = await take(part)
            continue
        try:
            text = (await part.read(MAX_TEXT_BYTES)).decode()
        except UnicodeDecodeError:
            raise refused("invalid_value", f"'{path}' is not UTF-8.", path) from None
        where[name] = of_text(text, _kind(fields, outer, inner))
    return Object(fields).check(values, "")


def _path(name: str) -> tuple[str, str | None]:
    """`a` and `b` of `a[b]`."""
    outer, bracket, inner = name.partition("[")
    return (outer, inner[:-1]) if bracket and inner.endswith("]") else (name, None)


def _kind(fields: Fields, outer: str, inner: str | None) -> Kind | None:
    kind = fields[outer].kind if outer in fields else None
    if inner is None:
        return kind
    return kind.fields[inner].kind if isinstance(kind, Object) and inner in kind.fields else None
