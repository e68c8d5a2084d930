"""Pages of other origins that may use the API from a browser (CORS: https://fetch.spec.whatwg.org/#http-cors-protocol).

Nothing is allowed unless --cors-origin says so. Cookies are never a part of it: who a page speaks for is said by the key that it
sends. Without keys the admin's routes stay closed to pages, which would otherwise hold them."""

import re

from zse.errors import ConfigError
from zse.server.api_request import APIRequest
from zse.server.routes.table import ADMIN, Route

ANY = "*"
MAX_AGE_S = 600  # for which a browser remembers what a preflight said; Chrome keeps it no longer than two hours
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]{0,31}://[a-z0-9.\-\[\]:]{1,253}")
_HEADERS = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?: *, *[A-Za-z0-9!#$%&'*+.^_`|~-]+){0,63}")
# What a page may read of an answer beside its body.
_EXPOSED = "request-id, retry-after, retry-after-ms, x-request-id, x-should-retry, " + ", ".join(
    f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")
)


def read_origins(given: list[str], needs_key: bool) -> frozenset[str]:
    """The values of --cors-origin. Raises ConfigError."""
    for origin in given:
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--cors-origin: {origin!r} is no origin; write https://name, http://localhost:3000, or *"
            )
    if ANY in given and not needs_key:
        raise ConfigError(
            "--cors-origin '*' without keys lets every page that a browser here shows use this server; give --api-key, or name the origins"
        )
    return frozenset(given)


class CrossOrigin:
    """origins: that may use the API; "*": all."""

    def __init__(self, origins: frozenset[str] = frozenset()):
        self._origins = origins

    def allow(self, request: APIRequest, routes: dict[str, Route], needs_key: bool) -> bool:
        """Set the headers of the answer; whether it is a preflight, which asks what another request may do. routes: of the path, by
        method."""
        origin = request.headers.get("origin")
        methods = [method for method, route in routes.items() if needs_key or route.scope != ADMIN]
        if origin is None or not methods or not (ANY in self._origins or origin in self._origins):
            return False
        headers = [("access-control-allow-origin", origin), ("vary", "origin")]
        asked = request.headers.get("access-control-request-method")
        if request.method != "OPTIONS" or asked is None:
            request.more_headers += [*headers, ("access-control-expose-headers", _EXPOSED)]
            return False
        headers += [("access-control-allow-methods", ", ".join(methods)), ("access-control-max-age", str(MAX_AGE_S))]
        wanted = request.headers.get("access-control-request-headers", "")
        if _HEADERS.fullmatch(wanted):
            headers.append(("access-control-allow-headers", wanted))
        if request.headers.get("access-control-request-private-network") == "true":
            headers.append(("access-control-allow-private-network", "true"))
        request.more_headers += headers
        return True
