"""API keys as they are given: on the command line, or in a file with one tenant's key a line."""

import math
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from zse.errors import ConfigError
from zse.lazy import datetime

DEFAULT_TENANT = "default"  # of a key that came without a name
MAX_KEYS, MAX_FILE_BYTES, MAX_WEIGHT = 4096, 1 << 20, 1000.0
MAX_QUOTA = 1_000_000_000
# Of zse.server.routes.table, whose import would delay the engine's start; a test holds them to it.
USER_ROUTES = """/api/chat /api/embed /api/embeddings /api/generate /api/ps /api/show /api/tags /detokenize
    /tokenize /v1/batches /v1/batches/{batch} /v1/batches/{batch}/cancel /v1/chat/completions /v1/chats
    /v1/chats/{chat} /v1/completions /v1/embeddings /v1/files /v1/files/{file} /v1/files/{file}/content
    /v1/mcp/call /v1/mcp/tools /v1/messages /v1/messages/count_tokens /v1/models /v1/models/{model}
    /v1/rag/ask /v1/rag/documents /v1/rag/documents/{document} /v1/rag/search /v1/rerank /v1/responses
    /v1/responses/input_tokens /v1/responses/{response} /v1/responses/{response}/cancel
    /v1/responses/{response}/input_items /v1/score /v1/sessions /v1/sessions/{session} /v2/rerank""".split()
FORMAT = (
    "NAME KEY [WEIGHT] [rpm=N] [tpm=N] [concurrency=N] [admin] [models=NAME,…] [routes=PATH,…] "
    "[expires=YYYY-MM-DD[THH:MM[:SS]Z]]"
)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Quota(NamedTuple):
    """Of a tenant; 0 is unlimited. rpm, tpm: requests and tokens a minute. concurrency: answers at once."""

    rpm: int = 0
    tpm: int = 0
    concurrency: int = 0


class Access(NamedTuple):
    """What a key may do. admin: see the whole server (GET /metrics). models, routes: names and paths that it may use;
    None: all of them."""

    admin: bool = False
    models: frozenset[str] | None = None
    routes: frozenset[str] | None = None


OWNER = Access(admin=True)


class Caller(NamedTuple):
    """Whose key a request brought. tenant: who owns what it leaves, such as cached prompts. account: who is limited and
    counted. id: of the database's key; 0: it is none of them."""

    tenant: str = ""
    access: Access = OWNER
    account: str = ""
    id: int = 0


class Key(NamedTuple):
    """key: what the client sends. weight: of the account's share, above 0; None: 1, or what --tenant-weight says.
    expires: seconds since 1970 from which on the key is not valid; None: never. name, id, digest: of a key of the
    database, which is an account of its own; its text is not known."""

    tenant: str
    key: str
    weight: float | None = None
    quota: Quota = Quota()
    access: Access = Access()
    expires: float | None = None
    name: str = ""
    id: int = 0
    digest: bytes = b""

    @property
    def account(self) -> str:
        return f"{self.tenant}/{self.name}" if self.name else self.tenant

    @property
    def caller(self) -> Caller:
        return Caller(self.tenant, self.access, self.account, self.id)

    def __repr__(self) -> str:
        return f"<Key of {self.tenant}>"  # the key must not get into a log or a traceback


def single(key: str) -> tuple[Key, ...]:
    """The one key of --api-key or ZSE_API_KEY. Raises ConfigError."""
    if not _is_key(key):
        raise ConfigError("the API key must be 1 to 4096 printable ASCII characters without spaces")
    return (Key(DEFAULT_TENANT, key, access=OWNER),)


def read_file(path: str) -> tuple[Key, ...]:
    """The keys of a file: `NAME KEY [WEIGHT] [WORD…]` a line, where words are those of FORMAT, or a KEY alone; # begins
    a comment line. A tenant may have several keys (to change one without a gap, or for different ends), all with the
    same weight and quota. Raises ConfigError, which names the line and never shows a key."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            check_mode("--api-key-file", path, os.fstat(file.fileno()))
            text = file.read(MAX_FILE_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(f"--api-key-file {path}: {reason}") from None
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"--api-key-file {path}: larger than {MAX_FILE_BYTES} bytes")
    keys: list[Key] = []
    first: dict[str, Key] = {}  # of each tenant
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            key = _read_line(line.split())
            if any(other.key == key.key for other in keys):
                raise ValueError("this key stands in an earlier line")
            if first.setdefault(key.tenant, key)[2:4] != key[2:4]:
                raise ValueError(f"{key.tenant} has another weight or quota in an earlier line")
            keys.append(key)
            if len(keys) > MAX_KEYS:
                raise ValueError(f"more than {MAX_KEYS} keys")
        except ValueError as error:
            raise ConfigError(f"--api-key-file {path}, line {number}: {error}") from None
    if not keys:
        raise ConfigError(f"--api-key-file {path}: no key in it; one line is {FORMAT}")
    return tuple(keys)


def check_mode(option: str, path: str, state: os.stat_result) -> None:
    """Refuses a file that other users can read, as sshd and PostgreSQL do; symlinks were followed. Like PostgreSQL:
    what root owns, and a server that is not root reads, may be readable by a group. So Kubernetes mounts a secret of
    mode 0400 for a pod's fsGroup. A pipe is nobody else's."""
    of_group = stat.S_IRGRP if state.st_uid == 0 != os.geteuid() else 0
    if stat.S_ISREG(state.st_mode) and state.st_mode & 0o077 & ~of_group:
        raise ConfigError(
            f"{option} {path}: other users can read or change it (mode {state.st_mode & 0o777:04o}); run chmod 600 {path}, "
            "or mount the secret with mode 0400"
        )


def _read_line(words: Sequence[str]) -> Key:
    name, key = (words[0], words[1]) if len(words) > 1 else (DEFAULT_TENANT, words[0])
    if not _is_key(key):
        raise ValueError("a key must be 1 to 4096 printable ASCII characters")
    if len(words) > 1 and _is_word(key):
        raise ValueError(f"the second word is no key; a line is {FORMAT}, or a KEY alone")
    if not NAME.fullmatch(name):
        raise ValueError("the name must be 1 to 64 letters, digits, '.', '_' and '-'")
    given: dict[str, Any] = {}
    for word in words[2:]:
        field, equals, value = word.partition("=")
        read = WORDS.get(field)
        if not equals:
            field, value, read = ("admin", word, bool) if word == "admin" else ("weight", word, _weight)
        if read is None or field in given:
            raise ValueError(f"not {FORMAT}")
        given[field] = read(value)
    quota = Quota(**{field: given[field] for field in Quota._fields if field in given})
    access = Access("admin" in given, given.get("models"), given.get("routes"))
    return Key(name, key, given.get("weight"), quota, access, given.get("expires"))


def _is_word(text: str) -> bool:
    """Whether it is what may follow a key, or a comment: taken for a key, it would open the server to who guesses it."""
    field, equals, _ = text.partition("=")
    try:
        return text == "admin" or text[0] == "#" or (field in WORDS and equals != "") or _weight(text) > 0
    except ValueError:
        return False


def _count(field: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and 0 < int(value[:12]) <= MAX_QUOTA and len(value) <= 10):
        raise ValueError(f"{field} must be a whole number from 1 to {MAX_QUOTA}")
    return int(value)


def _names(field: str, value: str) -> frozenset[str]:
    names = frozenset(value.split(","))
    if "" in names:
        raise ValueError(f"{field} must be names with commas between")
    if field == "routes" and not names <= {*USER_ROUTES}:
        raise ValueError(f"routes must be of {', '.join(USER_ROUTES)}")
    return names


def _time(text: str) -> float:
    """Seconds since 1970 of a day's beginning or of a time, in UTC."""
    for form in ("%Y-%m-%d", "%Y-%m-%dT%H:%MZ", "%Y-%m-%dT%H:%M:%SZ"):
        try:
            return datetime.datetime.strptime(text, form).replace(tzinfo=datetime.UTC).timestamp()
        except ValueError:
            continue
    raise ValueError("expires must be YYYY-MM-DD or YYYY-MM-DDTHH:MMZ, in UTC")


def _weight(word: str) -> float:
    try:
        weight = float(word)
    except ValueError:
        weight = math.nan
    if not 0 < weight <= MAX_WEIGHT:
        raise ValueError(f"the weight must be a number above 0, at most {MAX_WEIGHT:g}")
    return weight


# FIELD=VALUE of a line: what reads the value.
WORDS: dict[str, Callable[[str], Any]] = {
    **{field: partial(_count, field) for field in Quota._fields},
    **{field: partial(_names, field) for field in ("models", "routes")},
    "expires": _time,
}
READERS = WORDS | {"weight": _weight}


def _is_key(key: str) -> bool:
    return 0 < len(key) <= 4096 and key.isascii() and key.isprintable() and " " not in key


def weights(keys: Sequence[Key], others: Mapping[str, float] | None = None) -> dict[str, float]:
    """account → weight. others: of --tenant-weight, for those whose key has none."""
    return {key.account: (others or {}).get(key.account, 1.0) if key.weight is None else key.weight for key in keys}


def quotas(keys: Sequence[Key]) -> dict[str, Quota]:
    """account → quota, of those that have one."""
    return {key.account: key.quota for key in keys if any(key.quota)}
