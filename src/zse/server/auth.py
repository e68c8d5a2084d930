"""API keys: who may use the API, and as which tenant; which Host names are ours; what keeps tenants' caches apart."""

import hashlib
import hmac
import math
import os
import time
from collections.abc import Callable, Iterable

from zse.errors import ConfigError
from zse.http.bind import is_ip
from zse.server.errors import APIError
from zse.server.keys import OWNER, Access, Key

SECRET_FILE, SECRET_BYTES = "salts.secret", 32


class KeyCheck:
    """Compares bearer keys by SHA-256 and in constant time, with every key each time; the keys themselves are not kept.
    No keys: none is needed. clock: seconds since 1970."""

    def __init__(self, keys: Iterable[Key] = (), clock: Callable[[], float] = time.time):
        self._clock = clock
        self.replace(keys)

    def replace(self, keys: Iterable[Key]) -> None:
        """From the next request on, on open connections too, these keys and no others are valid."""
        self._digests = [
            (
                hashlib.sha256(key.key.encode()).digest(),
                math.inf if key.expires is None else key.expires,
                (key.tenant, key.access),
            )
            for key in keys
        ]
        self.is_needed = bool(self._digests)

    def check(self, authorization: str | None) -> tuple[str, Access]:
        """Whose key it is, a tenant ("" where no key is needed), and what the key may do. Raises APIError 401; text and time are the same whatever is wrong."""
        if not self._digests:
            return "", OWNER
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
        now = self._clock()
        found = [
            caller for known, expires, caller in self._digests if hmac.compare_digest(digest, known) & (now < expires)
        ]
        if not (found and scheme.lower() == "bearer"):
            raise APIError("invalid_api_key", "Give a valid API key in the header 'Authorization: Bearer KEY'.")
        return found[0]


class CacheSalts:
    """Salts of cached prefixes: HMAC-SHA-256 of tenant and the client's own salt, so that nobody can tell from times or
    `cached_tokens` what others have sent. secret None: a new one, for a cache that ends with this process."""

    def __init__(self, secret: bytes | None = None):
        self._secret = secret or os.urandom(SECRET_BYTES)
        self._plain: dict[str, str] = {}  # tenant → salt of requests that bring none

    def salt(self, tenant: str, client_salt: str = "") -> str:
        known = self._plain.get(tenant) if not client_salt else None
        if known is not None:
            return known
        name = tenant.encode()
        message = len(name).to_bytes(4, "little") + name + client_salt.encode()
        made = hmac.new(self._secret, message, hashlib.sha256).hexdigest()[:32]
        if not client_salt:
            self._plain[tenant] = made
        return made


def kept_secret(folder: str) -> bytes:
    """The secret of the salts of a cache that is kept in a folder: read from there, or made. Raises ConfigError when it
    cannot be, or when others could have read it."""
    path = os.path.join(folder, SECRET_FILE)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if not os.path.exists(path):
            _make_secret(path)
        with open(path, "rb") as file:
            state = os.fstat(file.fileno())
            secret = file.read(SECRET_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    if state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise ConfigError(f"{path} can be read by others; delete it and what is cached beside it")
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"{path} is damaged; delete it and what is cached beside it")
    return secret


def _make_secret(path: str) -> None:
    """Whole or not at all, also when two servers start at once."""
    new = f"{path}.{os.getpid()}"
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(os.urandom(SECRET_BYTES))
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(new, path)
    except FileExistsError:
        pass  # the other server's
    finally:
        os.unlink(new)


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
        raise APIError(
            "invalid_http", "This Host name is not served here; start with --allowed-host NAME to allow it.", close=True
        )


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
