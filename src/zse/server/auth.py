"""API keys: who may use the API, and as which tenant; how many wrong ones an address may try; which Host names are
ours; what keeps tenants' caches apart."""

import hashlib
import hmac
import math
import os
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from zse import trust
from zse.errors import ConfigError
from zse.http.bind import is_ip
from zse.server.admission import Bucket
from zse.server.errors import APIError, limited
from zse.server.keys import Caller, Key

SECRET_FILE, SECRET_BYTES = "salts.secret", 32


# Wrong keys of one address: so many a minute are told that they are wrong. Addresses of which that is remembered.
WRONG_KEYS_PER_MINUTE, MAX_ADDRESSES = 200, 4096


def digest_of(secret: bytes, key: str) -> bytes:
    """By which a key is known."""
    return hmac.digest(secret, key.encode("latin-1"), "sha256")


class KeyCheck:
    """Looks bearer keys up by their HMAC-SHA-256 with a secret: how long that takes says nothing of the keys, since
    nobody else knows where theirs lies, and 4,096 keys take no longer than one. The keys themselves are not kept. No
    keys: none is needed.

    Args:
        clock: seconds since 1970.
        secret: of the database, whose keys bring their digests; None: one of this process. Where there is a database a key
            is always needed."""

    def __init__(self, keys: Iterable[Key] = (), clock: Callable[[], float] = time.time, secret: bytes | None = None):
        self._clock, self._secret, self._has_database = clock, secret or os.urandom(SECRET_BYTES), secret is not None
        self.replace(keys)

    def replace(self, keys: Iterable[Key]) -> None:
        """From the next request on, on open connections too, these keys and no others are valid."""
        self._callers = {
            key.digest or digest_of(self._secret, key.key): (
                math.inf if key.expires is None else key.expires,
                key.caller,
            )
            for key in keys
        }
        self._by_id = {caller.id: digest for digest, (_, caller) in self._callers.items() if caller.id}
        self.is_needed = self._has_database or bool(self._callers)

    def identity(self, authorization: str | None, caller: Caller) -> str:
        """By which holder() knows the key later, in another process too where there is a database; a key of the database
        also when it was given another text."""
        _, _, key = (authorization or "").partition(" ")
        return str(caller.id) if caller.id else digest_of(self._secret, key.strip()).hex()

    def holder(self, identity: str) -> Caller | None:
        """Whose key it is; None: it is not valid now."""
        digest = self._by_id.get(int(identity), b"") if len(identity) < 20 else bytes.fromhex(identity)
        return self._valid(digest)

    def find(self, authorization: str | None) -> Caller | None:
        """Whose key the header holds; None for one that is not valid now."""
        scheme, _, key = (authorization or "").partition(" ")
        return self._valid(digest_of(self._secret, key.strip())) if scheme.lower() == "bearer" else None

    def _valid(self, digest: bytes) -> Caller | None:
        expires, caller = self._callers.get(digest, (-math.inf, None))
        return caller if self._clock() < expires else None

    def check(self, authorization: str | None) -> Caller:
        """Whose key it is; where none is needed, the owner's of the server. Raises APIError 401; text and time are the
        same whatever is wrong."""
        if not self.is_needed:
            return Caller()
        caller = self.find(authorization)
        if caller is None:
            raise invalid_key()
        return caller


def invalid_key() -> APIError:
    return APIError("invalid_api_key", "Give a valid API key in the header 'Authorization: Bearer KEY'.")


class WrongKeys:
    """How many wrong keys came from an address lately; of IPv6 the /64, which one client has to itself. It keeps nobody
    out who has a key: keys cannot be guessed, and others may sit behind the same address. At most `most` addresses are
    remembered; those that come while that many have not been quiet for a minute share one allowance.

    clock: monotonic seconds."""

    def __init__(
        self,
        per_minute: int = WRONG_KEYS_PER_MINUTE,
        most: int = MAX_ADDRESSES,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._per_minute, self._most, self._clock = per_minute, most, clock
        self._others = Bucket(per_minute, clock())
        self.buckets: OrderedDict[bytes, Bucket] = OrderedDict()  # by address, the latest wrong key last
        self.num_wrong = 0

    def count(self, address: str) -> None:
        """A wrong key came from there. Raises APIError rate_limit_exceeded where too many did."""
        self.num_wrong += 1
        now, bucket = self._clock(), self._bucket(address)
        wait_s = bucket.wait_s(1, now)
        if wait_s > 0:
            raise limited("requests", "Too many wrong API keys came from this address.", wait_s)
        bucket.level -= 1

    def _bucket(self, address: str) -> Bucket:
        name, buckets, now = network(address), self.buckets, self._clock()
        if name in buckets:
            buckets.move_to_end(name)
            return buckets[name]
        while buckets and next(iter(buckets.values())).wait_s(self._per_minute, now) <= 0:
            buckets.popitem(last=False)  # full again: as if nothing had come
        if len(buckets) >= self._most:
            return self._others
        return buckets.setdefault(name, Bucket(self._per_minute, now))


def network(address: str) -> bytes:
    """Who is behind an address of a socket: the four bytes of IPv4, also as IPv6 writes it, or the first eight of IPv6;
    b"" for what is none."""
    try:
        if ":" not in address:
            return socket.inet_pton(socket.AF_INET, address)
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    except OSError:
        return b""
    return packed[12:] if packed.startswith(b"\0" * 10 + b"\xff\xff") else packed[:8]


class CacheSalts:
    """Salts of cached prefixes: HMAC-SHA-256 of tenant and the client's own salt, so that nobody can tell from times or
    `cached_tokens` what others have sent. secret None: a new one, for a cache that ends with this process. folder: where
    the cache is kept (--cache-disk), None: nowhere."""

    def __init__(self, secret: bytes | None = None, folder: str | None = None):
        self.folder = folder
        self._secret = secret or os.urandom(SECRET_BYTES)
        self._plain: dict[str, str] = {}  # tenant → salt of requests that bring none

    def session(self, tenant: str, id: str) -> str:
        """What the engines call a session by, 32 hex digits."""
        return self.salt(tenant, f"session {id}")

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
            trust.write_once(path, os.urandom(SECRET_BYTES))
        with open(path, "rb") as file:
            state = os.fstat(file.fileno())
            secret = file.read(SECRET_BYTES + 1)
    except OSError as error:
        reason = "is no folder" if isinstance(error, FileExistsError) else error.strerror or error
        raise ConfigError(f"--cache-disk {folder}: {reason}") from None
    if state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise ConfigError(f"{path} can be read by others; delete it and what is cached beside it")
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"{path} is damaged; delete it and what is cached beside it")
    return secret


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
