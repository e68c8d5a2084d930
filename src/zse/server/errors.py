"""The error contract: every code the API can answer, with its status and type, in one table.

Body of every error: {"error": {"message", "type", "param", "code"}}. openai-python retries 408, 409, 429 and >= 500
twice, so a failure that will only repeat itself carries `x-should-retry: false`.
"""

import msgspec

from zse.errors import RequestError
from zse.http.exchange import Response

INVALID = "invalid_request_error"
SERVER = "server_error"

# code: (HTTP status, type, would the same request succeed later?)
CODES: dict[str, tuple[int, str, bool]] = {
    "invalid_json": (400, INVALID, False),
    "invalid_http": (400, INVALID, False),
    "invalid_multipart": (400, INVALID, False),
    "invalid_type": (400, INVALID, False),
    "invalid_value": (400, INVALID, False),
    "missing_required_parameter": (400, INVALID, False),
    "unknown_parameter": (400, INVALID, False),
    "unsupported_parameter": (400, INVALID, False),
    "out_of_range": (400, INVALID, False),
    "array_above_max_length": (400, INVALID, False),
    "invalid_schema": (400, INVALID, False),
    "schema_too_complex": (400, INVALID, False),
    "invalid_token_id": (400, INVALID, False),
    "context_length_exceeded": (400, INVALID, False),
    "no_chat_template": (400, INVALID, False),
    "chat_template_refused": (400, INVALID, False),
    "chat_template_failed": (400, INVALID, False),
    "chat_template_limit": (400, INVALID, False),
    "control_tokens_in_text": (400, INVALID, False),
    "invalid_api_key": (401, INVALID, False),
    "insufficient_permissions": (403, "permission_error", False),
    "model_not_found": (404, INVALID, False),
    "not_found": (404, INVALID, False),
    "method_not_allowed": (405, INVALID, False),
    "request_timeout": (408, INVALID, True),
    "conflict": (409, INVALID, False),
    "idempotency_key_in_use": (409, INVALID, True),
    "unprocessable_file": (422, INVALID, False),
    "length_required": (411, INVALID, False),
    "request_too_large": (413, INVALID, False),
    "uri_too_long": (414, INVALID, False),
    "unsupported_media_type": (415, INVALID, False),
    "idempotency_key_reused": (422, INVALID, False),
    "header_too_large": (431, INVALID, False),
    "rate_limit_exceeded": (429, "requests", True),
    "internal_error": (500, SERVER, False),
    "numerical_error": (500, SERVER, False),
    "pull_failed": (502, SERVER, False),
    "overloaded": (503, SERVER, True),
    "shutting_down": (503, SERVER, True),
    "engine_restarting": (503, SERVER, True),
    "prefill_only": (503, SERVER, False),
    "engine_unavailable": (503, SERVER, False),
    "storage_unavailable": (503, SERVER, True),
    "timeout": (504, SERVER, False),
}

# Seconds a client is asked to wait; a restart takes about one second, a full queue drains in a few.
_RETRY_AFTER = {
    "idempotency_key_in_use": 1,
    "overloaded": 1,
    "shutting_down": 5,
    "engine_restarting": 1,
    "storage_unavailable": 5,
}


class APIError(RequestError):
    """An answer of the table. headers: extra response headers; close: the connection cannot be used afterwards; kind:
    another type than the table's ("tokens" of rate_limit_exceeded)."""

    def __init__(
        self,
        code: str,
        message: str,
        param: str | None = None,
        *,
        headers: tuple[tuple[str, str], ...] = (),
        close: bool = False,
        kind: str | None = None,
    ):
        status, usual_kind, _ = CODES[code]
        super().__init__(message, status=status, type=kind or usual_kind, code=code, param=param)
        self.headers, self.close = headers, close


def unsupported(field: str, reason: str) -> APIError:
    """The 400 of a field that the model cannot honour."""
    return APIError("unsupported_parameter", f"'{field}': {reason}.", field)


def limited(kind: str, message: str, wait_s: float) -> APIError:
    """The 429 that tells how long to wait. kind: "requests" or "tokens"."""
    wait_ms = max(1, round(1000 * wait_s))
    headers = (("retry-after", str(-(-wait_ms // 1000))), ("retry-after-ms", str(wait_ms)))
    return APIError("rate_limit_exceeded", message, kind=kind, headers=headers)


# How the APIs write errors.
OPENAI, ANTHROPIC, OLLAMA = "openai", "anthropic", "ollama"
# Anthropic's types by status, which its clients read; others are invalid_request_error below 500 and api_error above.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def contents(error: RequestError, api: str = OPENAI) -> dict:
    """What the JSON body of an error holds."""
    out = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    if api == ANTHROPIC:
        usual = "api_error" if error.status >= 500 else INVALID
        return {"type": "error", "error": out | {"type": _ANTHROPIC_TYPES.get(error.status, usual)}}
    return {"error": error.message, "code": error.code} if api == OLLAMA else {"error": out}


def event(error: RequestError, api: str = OPENAI, number: int | None = None) -> bytes:
    """What ends a stream: a server-sent event, or a line. number: of the event, where they have one and a type."""
    out = contents(error, api)
    if api == OLLAMA:
        return msgspec.json.encode(out) + b"\n"
    if number is not None:  # clients look for `error`, or for the type
        out |= out["error"] | {"type": "error", "sequence_number": number}
    name = b"event: error\n" if "type" in out else b""
    return name + b"data: " + msgspec.json.encode(out) + b"\n\n"


def headers(error: RequestError) -> list[tuple[str, str]]:
    """Response headers that belong to the error (not content-type, not x-request-id)."""
    out = list(error.headers)
    retry = CODES.get(error.code or "", (0, "", error.status >= 500))[2]
    if not retry:
        out.append(("x-should-retry", "false"))
    elif error.code in _RETRY_AFTER:
        seconds = _RETRY_AFTER[error.code]
        out += [("retry-after", str(seconds)), ("retry-after-ms", str(seconds * 1000))]
    if error.status == 401:
        out.append(("www-authenticate", "Bearer"))
    return out


def response(error: RequestError, api: str = OPENAI) -> Response:
    """The answer of an error."""
    return Response(error.status, msgspec.json.encode(contents(error, api)), headers(error), error.close)
