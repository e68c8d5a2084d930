"""The static API key: who may use the API, and which Host names are ours."""

import hashlib
import hmac

from zse.server.bind import is_ip
from zse.server.errors import APIError


class KeyCheck:
    """Compares bearer keys by SHA-256 and in constant time; the key itself is not kept. None: no key is needed."""

    def __init__(self, key: str | None):
        self._digest = hashlib.sha256(key.encode()).digest() if key else None

    @property
    def needed(self) -> bool:
        return self._digest is not None

    def check(self, authorization: str | None) -> None:
        """Raises APIError 401; text and time are the same whatever is wrong."""
        if self._digest is None:
            return
        scheme, _, key = (authorization or "").partition(" ")
        same = hmac.compare_digest(hashlib.sha256(key.strip().encode("latin-1")).digest(), self._digest)
        if not (same and scheme.lower() == "bearer"):
            raise APIError("invalid_api_key", "Give a valid API key in the header 'Authorization: Bearer KEY'.")


class HostCheck:
    """Refuses Host names that are not ours: a web page that rebinds its DNS name to this address must not reach the
    API. allowed None: any name (a key protects instead). IP literals pass: a rebound page always sends a name."""

    def __init__(self, allowed: frozenset[str] | None):
        self._allowed = allowed

    def check(self, host: str | None, http_10: bool) -> None:
        """Raises APIError invalid_http for a missing, malformed or foreign Host."""
        if host is None:
            if http_10:
                return
            raise APIError("invalid_http", "The Host header is missing.", close=True)
        name, port = split_host(host)
        if name is None or (port and not (port.isascii() and port.isdigit() and int(port) < 65536)):
            raise APIError("invalid_http", "The Host header is malformed.", close=True)
        if self._allowed is None or name in self._allowed or is_ip(name):
            return
        raise APIError("invalid_http", "This Host name is not served here; start with --allowed-host NAME to allow it.",
                       close=True)


def split_host(host: str) -> tuple[str | None, str]:
    """Name in lower case (None when malformed) and port of a Host header or --host value; [::1]:80 → ::1, 80."""
    if host.startswith("["):
        name, bracket, rest = host[1:].partition("]")
        if not bracket or rest and not rest.startswith(":"):
            return None, ""
        return name.lower(), rest[1:]
    name, _, port = host.partition(":")
    if not name or not all(letter.isascii() and (letter.isalnum() or letter in "-._") for letter in name):
        return None, ""
    return name.lower().rstrip("."), port
