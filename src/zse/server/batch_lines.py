"""Lines of a batch: read and checked before it runs, and their results, in OpenAI's form."""

import hashlib
import os
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import msgspec

from zse.sampling.fields import shown

MAX_LINES = 50_000
MAX_LINE_BYTES = 2 << 20  # as large as a body may be by default
MAX_ERRORS = 100  # that are told
MAX_ID = 512  # characters
READ_BYTES = 1 << 20  # about so many are read at once


class BatchLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """body: of the request, as it was sent."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct, frozen=True):
    """What is looked at of a body before it runs."""

    model: str | None = None
    stream: bool | None = None


class BatchProblem(msgspec.Struct, frozen=True):
    """Why a batch fails. line: of the input, from 1; None: it is the whole batch's."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


_line = msgspec.json.Decoder(BatchLine)
_body = msgspec.json.Decoder(_Body)


def read_line(data: bytes) -> BatchLine:
    """Raises msgspec.DecodeError."""
    return _line.decode(data)


def numbered(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(number from 1, bytes) of the lines that are not empty, without a BOM before the first. Of one that is too long the
    beginning, and nothing more of the file."""
    number = 0
    while data := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if number == 1:
            data = data.removeprefix(BOM_UTF8)
        if data.strip():
            yield number, data
        if len(data) > MAX_LINE_BYTES:
            return


def some(lines: Iterator[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """The next ones, to be taken in a thread; []: there are no more."""
    out, size = [], 0
    while size < READ_BYTES and (found := next(lines, None)) is not None:
        out.append(found)
        size += len(found[1])
    return out


def validate(
    file: BinaryIO, endpoint: str, model_problem: Callable[[str | None], str | None]
) -> tuple[int, list[BatchProblem]]:
    """(number of lines, what is wrong). model_problem: why a model's name cannot be asked for, None: it can. It takes a
    second for 200 MB: in a thread."""
    problems: list[BatchProblem] = []
    seen: set[bytes] = set()  # digests: 50,000 names may have 25 MB
    models: dict[str | None, str | None] = {}
    total = 0
    for number, data in numbered(file):
        total += 1
        if total > MAX_LINES:
            return total, [BatchProblem("too_many_lines", f"The file has more than {MAX_LINES} lines.", number)]
        found = _problem(number, data, endpoint, seen)
        if isinstance(found, BatchProblem):
            problems.append(found)
        else:
            if found.model not in models:
                models[found.model] = model_problem(found.model)
            if why := models[found.model]:
                problems.append(BatchProblem("model_not_found", why, number, "body.model"))
        if len(problems) >= MAX_ERRORS:
            break
    if not total:
        problems.append(BatchProblem("empty_file", "The file has no lines."))
    return total, problems


def _problem(number: int, data: bytes, endpoint: str, seen: set[bytes]) -> BatchProblem | _Body:
    """What is wrong with a line, or what is to be known of its body."""

    def refuse(code: str, message: str, param: str | None = None) -> BatchProblem:
        return BatchProblem(code, message, number, param)

    if len(data) > MAX_LINE_BYTES:
        return refuse("line_too_long", f"The line has more than {MAX_LINE_BYTES} bytes.")
    try:
        line = read_line(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return refuse("invalid_json_line", f"The line is no JSON object of custom_id, method, url and body: {error}")
    if not 0 < len(line.custom_id) <= MAX_ID:
        return refuse("invalid_custom_id", f"'custom_id' must have 1 to {MAX_ID} characters.", "custom_id")
    digest = hashlib.blake2b(line.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    if digest in seen:
        name = shown(line.custom_id)
        return refuse("duplicate_custom_id", f"The custom_id '{name}' stands in an earlier line.", "custom_id")
    seen.add(digest)
    if line.method != "POST":
        return refuse("invalid_method", "'method' must be POST.", "method")
    if line.url != endpoint:
        return refuse("invalid_url", f"'url' must be the batch's endpoint, {endpoint}.", "url")
    try:
        body = _body.decode(line.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return refuse("invalid_request", f"The body cannot be read: {error}", "body")
    if body.stream:
        return refuse("unsupported_parameter", "A line of a batch is not streamed.", "body.stream")
    return body


def answered(custom_id: str, request_id: str, status: int, body: bytes) -> bytes:
    """The line of a result. body: JSON, of the answer or of an error."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _result(custom_id, response, None)


def unanswered(custom_id: str, code: str, message: str) -> bytes:
    """The line of a request that was not run."""
    return _result(custom_id, None, {"code": code, "message": message})


def _result(custom_id: str, response: Any, error: Any) -> bytes:
    id = "batch_req_" + os.urandom(12).hex()
    return msgspec.json.encode({"id": id, "custom_id": custom_id, "response": response, "error": error})
