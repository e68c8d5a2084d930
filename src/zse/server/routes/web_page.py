"""GET / and GET /page/{file}: the web page, files of zse/server/static that stand in one table. No path is made of a
request."""

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from zse.http.exchange import Response
from zse.sampling.fields import shown
from zse.server.api_request import APIRequest
from zse.server.errors import APIError

_SCRIPT, _STYLE = "text/javascript; charset=utf-8", "text/css; charset=utf-8"
_TEXT = "text/plain; charset=utf-8"
STATIC, INDEX = Path(__file__).parents[1] / "static", "index.html"
# Names under /page/ and in zse/server/static.
TYPES = {
    INDEX: "text/html; charset=utf-8",
    "style.css": _STYLE,
    "icon.svg": "image/svg+xml",
    **dict.fromkeys(
        """adapters.js api.js answering.js app.js blocks.js chart.js chat.js chats.js cited.js composer.js controls.js conversation.js
        dashboard.js documents.js history.js html.js images.js inline.js keys.js logs.js markdown.js maths.js message.js metrics.js
        models.js playground.js settings.js store.js symbols.js tools.js vendor/hooks.js vendor/htm.js vendor/preact.js""".split(),
        _SCRIPT,
    ),
    "vendor/htm.LICENSE": _TEXT,
    "vendor/preact.LICENSE": _TEXT,
}
# What the page may do: its own scripts, styles and requests, and nothing that text of a model could ask for. A string
# never becomes markup or code (trusted types); no other site may frame it, and none learns where a link was followed.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = [
    ("content-security-policy", POLICY),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("permissions-policy", "camera=(), microphone=(), geolocation=()"),
    ("cache-control", "no-cache"),  # kept, and asked for by its tag: a newer server is seen at once
]


class PageFile(NamedTuple):
    """tag: quoted, as HTTP has it: of the content."""

    body: bytes
    media_type: str
    tag: str


@cache
def _read(name: str) -> PageFile:
    """A file of TYPES, read once."""
    body = (STATIC / name).read_bytes()
    return PageFile(body, TYPES[name], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def _answer(request: APIRequest, name: str) -> Response:
    found = _read(name)
    headers = [*_HEADERS, ("etag", found.tag)]
    known = request.headers.get("if-none-match", "")
    if found.tag in [tag.strip().removeprefix("W/") for tag in known.split(",")]:
        return Response(304, b"", headers, media_type=found.media_type)
    return Response(200, found.body, headers, media_type=found.media_type)


async def index(app, request: APIRequest) -> Response:
    """GET /"""
    return _answer(request, INDEX)


async def file(app, request: APIRequest) -> Response:
    """GET /page/{file}"""
    name = request.parameters["file"]
    if name not in TYPES:
        raise APIError("not_found", f"The page has no file '{shown(name)}'; it begins at /.")
    return _answer(request, name)
