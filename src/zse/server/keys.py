"""API keys as they are given: on the command line, or in a file with one tenant's key a line."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from zse.errors import ConfigError

DEFAULT_TENANT = "default"      # of a key that came without a name
MAX_KEYS, MAX_FILE_BYTES, MAX_WEIGHT = 4096, 1 << 20, 1000.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Key(NamedTuple):
    """key: what the client sends. tenant: who pays for its requests. weight: of the tenant's share, above 0."""

    tenant: str
    key: str
    weight: float = 1.0

    def __repr__(self) -> str:
        return f"<Key of {self.tenant}>"    # the key must not get into a log or a traceback


def single(key: str) -> tuple[Key, ...]:
    """The one key of --api-key or ZSE_API_KEY. Raises ConfigError."""
    if not _is_key(key):
        raise ConfigError("the API key must be 1 to 4096 printable ASCII characters without spaces")
    return (Key(DEFAULT_TENANT, key),)


def read_file(path: str) -> tuple[Key, ...]:
    """The keys of a file: `NAME KEY [WEIGHT]` a line, or a KEY alone; # begins a comment line. A tenant may have several
    keys (to change one without a gap). Raises ConfigError, which names the line and never shows a key."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(f"--api-key-file {path}: {reason}") from None
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"--api-key-file {path}: larger than {MAX_FILE_BYTES} bytes")
    keys: list[Key] = []
    weights: dict[str, float] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            key = _read_line(line.split())
            if any(other.key == key.key for other in keys):
                raise ValueError("this key stands in an earlier line")
            if weights.setdefault(key.tenant, key.weight) != key.weight:
                raise ValueError(f"{key.tenant} has another weight in an earlier line")
            keys.append(key)
            if len(keys) > MAX_KEYS:
                raise ValueError(f"more than {MAX_KEYS} keys")
        except ValueError as error:
            raise ConfigError(f"--api-key-file {path}, line {number}: {error}") from None
    if not keys:
        raise ConfigError(f"--api-key-file {path}: no key in it; one line is NAME KEY [WEIGHT]")
    return tuple(keys)


def _read_line(words: Sequence[str]) -> Key:
    name, key, weight = DEFAULT_TENANT, words[0], 1.0
    if len(words) > 1:
        name, key = words[0], words[1]
    if len(words) > 3 or not _is_key(key):
        raise ValueError("not NAME KEY [WEIGHT] with a key of 1 to 4096 printable ASCII characters")
    if not _NAME.fullmatch(name):
        raise ValueError("the name must be 1 to 64 letters, digits, '.', '_' and '-'")
    if len(words) == 3:
        try:
            weight = float(words[2])
        except ValueError:
            weight = math.nan
        if not 0 < weight <= MAX_WEIGHT:
            raise ValueError(f"the weight must be a number above 0, at most {MAX_WEIGHT:g}")
    return Key(name, key, weight)


def _is_key(key: str) -> bool:
    return 0 < len(key) <= 4096 and key.isascii() and key.isprintable() and " " not in key


def weights(keys: Sequence[Key]) -> dict[str, float]:
    """tenant → weight."""
    return {key.tenant: key.weight for key in keys}
