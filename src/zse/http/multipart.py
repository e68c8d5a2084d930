"""Forms with files (multipart/form-data, RFC 7578), part by part as their bytes arrive: a part's data is never held whole.

    form = FormReader(request.upload, request.headers["content-type"])
    async for part in form:
        async for data in part: ...          # or await part.read(max_bytes)

What is left of a part is skipped when the next one is asked for, and what stands behind the form is read and dropped."""

import re
from collections.abc import AsyncIterator

from zse.http.exchange import HTTPError

MAX_PARTS = 128
MAX_HEADER_BYTES = 8 << 10  # of a part's headers, and of what stands before the first part
MAX_HEADERS = 16  # of a part
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")  # RFC 2046 5.1.1
_PARAMETER = re.compile(r"\s*;\s*([!#$%&'*+.^_`|~0-9A-Za-z-]+)\s*=\s*(\"(?:[^\"\\]|\\.)*\"|[^\s;\"]*)")
_ESCAPED = re.compile(r"\\([\"\\])")
_BROWSERS = {"%22": '"', "%0D": "\r", "%0A": "\n"}  # the three that browsers escape in names (WHATWG HTML, 4.10.21.8)


def _invalid(reason: str) -> HTTPError:
    return HTTPError("invalid_multipart", f"The body is not a valid form (multipart/form-data): {reason}.")


def parameters(header: str) -> tuple[str, dict[str, str]]:
    """The value in lower case, and the parameters behind it, of `form-data; name="a"`. Raises HTTPError
    invalid_multipart."""
    value, found = header.partition(";")[0], {}
    place = len(value)
    while header[place:].strip(" \t;"):
        match = _PARAMETER.match(header, place)
        if match is None or match[1].lower() in found:
            raise _invalid("the parameters of a header cannot be read")
        text, place = match[2], match.end()
        found[match[1].lower()] = _ESCAPED.sub(r"\1", text[1:-1]) if text.startswith('"') else text
    return value.strip().lower(), found


class FormPart:
    """One field. name: of the field. filename: as the client sent it, None where it sent none: a text to show, never a
    path. media_type: as sent, in lower case, or text/plain."""

    def __init__(self, form: "FormReader", name: str, filename: str | None, media_type: str):
        self.name, self.filename, self.media_type = name, filename, media_type
        self._data = form._until_delimiter()

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Its bytes, which can be read once."""
        return self._data

    async def read(self, max_bytes: int) -> bytes:
        """All of it. Raises HTTPError request_too_large."""
        out = bytearray()
        async for data in self._data:
            out += data
            if len(out) > max_bytes:
                message = f"The field '{self.name[:64]}' is larger than {max_bytes} bytes."
                raise HTTPError("request_too_large", message)
        return bytes(out)


class FormReader:
    """The parts of a form. body: gives its bytes. content_type: of the request. Raises HTTPError invalid_multipart, and
    what `body` raises."""

    def __init__(self, body: AsyncIterator[bytes], content_type: str, max_parts: int = MAX_PARTS):
        boundary = parameters(content_type)[1].get("boundary", "")
        if not _BOUNDARY.fullmatch(boundary):
            raise _invalid("its Content-Type has no boundary of 1 to 70 characters")
        self._body, self._left = body, max_parts
        self._delimiter = b"\r\n--" + boundary.encode()
        self._buffer = bytearray(b"\r\n")  # a form may begin with its first delimiter
        self._part: FormPart | None = None

    def __aiter__(self) -> "FormReader":
        return self

    async def __anext__(self) -> FormPart:
        await self._skip()
        while len(self._buffer) < 2:
            await self._more()
        if self._buffer.startswith(b"--"):
            async for _ in self._body:
                self._buffer.clear()
            raise StopAsyncIteration
        self._left -= 1
        if self._left < 0:
            raise _invalid("it has too many parts")
        self._part = _part_of(self, await self._header_lines())
        return self._part

    async def _skip(self) -> None:
        """To the delimiter in front of the next part."""
        if self._part is not None:
            async for _ in self._part:
                pass
            return
        skipped = 0
        async for data in self._until_delimiter():
            skipped += len(data)
            if skipped > MAX_HEADER_BYTES:
                raise _invalid("its first part does not begin")

    async def _header_lines(self) -> list[bytes]:
        """Of the part that begins, without the rest of the delimiter's line."""
        while (end := self._buffer.find(b"\r\n\r\n")) < 0 and len(self._buffer) <= MAX_HEADER_BYTES:
            await self._more()
        if not 0 <= end <= MAX_HEADER_BYTES:
            raise _invalid(f"the headers of a part have more than {MAX_HEADER_BYTES} bytes")
        padding, *lines = bytes(self._buffer[:end]).split(b"\r\n")
        del self._buffer[: end + 4]
        if padding.strip(b" \t"):
            raise _invalid("a delimiter does not end its line")
        return lines

    async def _until_delimiter(self) -> AsyncIterator[bytes]:
        """What stands before the next delimiter, which is taken, too."""
        buffer, mark = self._buffer, self._delimiter
        while (place := buffer.find(mark)) < 0:
            ready = len(buffer) - len(mark) + 1  # the rest may be the beginning of one
            if ready > 0:
                data = bytes(buffer[:ready])
                del buffer[:ready]
                yield data
            await self._more()
        data = bytes(buffer[:place])
        del buffer[: place + len(mark)]
        if data:
            yield data

    async def _more(self) -> None:
        async for data in self._body:
            self._buffer += data
            return
        raise _invalid("it ends before its last delimiter")


def _part_of(form: FormReader, lines: list[bytes]) -> FormPart:
    headers: dict[str, str] = {}
    if len(lines) > MAX_HEADERS:
        raise _invalid(f"a part has more than {MAX_HEADERS} headers")
    for line in lines:
        try:
            name, colon, value = line.decode("utf-8").partition(":")
        except UnicodeDecodeError:
            raise _invalid("a header of a part is not UTF-8") from None
        name = name.lower()
        if not colon or not name or name != name.strip() or any(ord(c) < 32 and c != "\t" for c in value):
            raise _invalid("a header of a part is malformed")
        if name in headers:
            raise _invalid("a part has a header twice")
        headers[name] = value.strip()
    kind, found = parameters(headers.get("content-disposition", ""))
    if kind != "form-data" or "name" not in found:
        raise _invalid("a part has no Content-Disposition of form-data with a name")
    if headers.get("content-transfer-encoding", "binary").lower() not in ("binary", "7bit", "8bit"):
        raise _invalid("a part has a Content-Transfer-Encoding")
    filename = found.get("filename")
    media_type = headers.get("content-type", "text/plain").partition(";")[0].strip().lower()
    return FormPart(form, _unescaped(found["name"]), None if filename is None else _unescaped(filename), media_type)


def _unescaped(text: str) -> str:
    for escape, character in _BROWSERS.items():
        text = text.replace(escape, character)
    return text
