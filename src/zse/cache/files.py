"""Cold prefixes on disk: one file for each full page, of models with a state for each kept one, which the next engine of
the same model finds.

DIR/<fingerprint>/<key>.kv: magic, key, the page's tokens, the length of the content, BLAKE2b of all that and the
content; then the content. The fingerprint stands for everything that the content depends on beside the tokens: model
revision, layout, page size, element type. key = BLAKE2b(parent's key, tokens); a root's key is that of the salt
(tenant, ...), with a secret of the folder, so that names tell nothing about what was said. The key of a state is that of
the page before, the number of tokens behind it, and a hash of these: so an engine that starts knows behind which pages
there are some. Files are written beside
their place and renamed; one that is damaged or not what its name says is removed. The folder is private (0700): who
reads it reads what users said."""

import hashlib
import os
import re
import stat
import struct
import threading
from pathlib import Path

from zse import trust
from zse.cache.pages import BLOCK
from zse.errors import ConfigError

MAGIC = b"ZSEKVPG1"
KEY_BYTES = 20
TAIL_BYTES = 8  # of the hash of a state's last tokens
STATE_KEY_BYTES = KEY_BYTES + 1 + TAIL_BYTES
_NAME = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}([0-9a-f]{{{2 * (1 + TAIL_BYTES)}}})?\.kv")
_SECRET = "secret"


def key_of(parent: bytes, tokens: bytes) -> bytes:
    """The key of the page with `tokens` behind the page (or root) of key `parent`."""
    return hashlib.blake2b(tokens, key=parent, digest_size=KEY_BYTES).digest()


def state_key(parent: bytes, tail: bytes) -> bytes:
    """The key of the state behind `tail`, 1 to a page of tokens, and the page (or root) of key `parent` before them."""
    digest = hashlib.blake2b(tail, key=parent, digest_size=TAIL_BYTES).digest()
    return parent + bytes((len(tail) // 4,)) + digest


class PageFiles:
    """The files of one fingerprint, at most `max_bytes` of them: the longest unused go first. A thread may write while
    another reads. page_size: tokens of a page. Raises ConfigError for a folder that cannot be used or that others may
    enter."""

    def __init__(self, folder: str | os.PathLike, fingerprint: bytes, max_bytes: int, page_size: int = BLOCK):
        self.max_bytes, self._fingerprint = max_bytes, fingerprint
        self._head = struct.Struct(f"<8s{KEY_BYTES}s{4 * page_size}sQ32s")
        self.num_damaged = 0
        self._lock = threading.Lock()
        top = Path(folder)
        self._folder = top / fingerprint.hex()[:32]
        try:
            for path in (top, self._folder):
                path.mkdir(parents=True, exist_ok=True, mode=0o700)
                _check_private(path)
            self._secret = self._make_secret()
            found = sorted(self._scan(), key=lambda item: item[2])
        except OSError as error:
            raise ConfigError(f"--cache-disk {top}: {error.strerror or error}") from None
        self._sizes: dict[bytes, int] = {key: size for key, size, _ in found}  # the longest unused first
        self.num_bytes = sum(self._sizes.values())
        self.num_states = 0
        self._behind: dict[bytes, set[bytes]] = {}  # the key of a page → those of the states behind it
        for key in self._sizes:
            self._list(key)
        self._shrink(0)

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def states_behind(self, parent: bytes, tokens: bytes) -> list[bytes]:
        """The beginnings of `tokens`, the longest first, behind which and the page of key `parent` a state is kept."""
        with self._lock:
            keys = list(self._behind.get(parent, ()))
        tails = {key: tokens[: 4 * key[KEY_BYTES]] for key in keys}
        return sorted((tail for key, tail in tails.items() if state_key(parent, tail) == key), key=len, reverse=True)

    def _list(self, key: bytes) -> None:
        if len(key) == STATE_KEY_BYTES:
            self.num_states += 1
            self._behind.setdefault(key[:KEY_BYTES], set()).add(key)

    def root(self, salt: tuple[str, ...]) -> bytes:
        """The key of a salt's root."""
        parts = b"".join(struct.pack("<I", len(raw)) + raw for raw in (text.encode() for text in salt))
        return hashlib.blake2b(parts, key=self._secret, digest_size=KEY_BYTES).digest()

    def write(self, key: bytes, tokens: bytes, content: bytes) -> None:
        """Keep a page, or a state behind `tokens` of one. Raises OSError; nothing is left behind then."""
        size = self._head.size + len(content)
        if key in self._sizes or size > self.max_bytes:
            return
        self._shrink(size)
        path = self._path(key)
        half = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        head = self._head.pack(MAGIC, key, tokens, len(content), self._checksum(key, tokens, content))
        try:
            descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(head)
                file.write(content)
            half.replace(path)
        finally:
            half.unlink(missing_ok=True)
        with self._lock:
            self._sizes[key] = size
            self.num_bytes += size
            self._list(key)

    def read(self, key: bytes, tokens: bytes, nbytes: int) -> bytes | None:
        """The `nbytes` of content of the page with these tokens; None, and the file removed, when it is not there or
        not sound."""
        path = self._path(key)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise OSError("no regular file")
                data = file.read(self._head.size + nbytes + 1)
                os.utime(descriptor)
        except OSError:
            self._remove(key)
            return None
        content = data[self._head.size :]
        if len(content) != nbytes or data[: self._head.size] != self._head.pack(
            MAGIC, key, tokens, nbytes, self._checksum(key, tokens, content)
        ):
            self.num_damaged += 1
            self._remove(key)
            return None
        with self._lock:
            if key in self._sizes:
                self._sizes[key] = self._sizes.pop(key)
        return content

    def _checksum(self, key: bytes, tokens: bytes, content: bytes) -> bytes:
        total = hashlib.blake2b(key + tokens, key=self._fingerprint, digest_size=32)
        total.update(content)
        return total.digest()

    def _path(self, key: bytes) -> Path:
        return self._folder / f"{key.hex()}.kv"

    def _remove(self, key: bytes) -> None:
        with self._lock:
            size = self._sizes.pop(key, 0)
            self.num_bytes -= size
            if size and len(key) == STATE_KEY_BYTES:
                self.num_states -= 1
                behind = self._behind[key[:KEY_BYTES]]
                behind.discard(key)
                if not behind:
                    del self._behind[key[:KEY_BYTES]]
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError:
            pass  # a folder in its place, or a disk that has become read-only: it is not in the index any more

    def _shrink(self, size: int) -> None:
        while self._sizes and self.num_bytes + size > self.max_bytes:
            self._remove(next(iter(self._sizes)))

    def _scan(self) -> list[tuple[bytes, int, float]]:
        """(key, size, last use) of the files; what is none of ours is removed."""
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name == _SECRET:
                    continue
                status = entry.stat(follow_symlinks=False)
                if _NAME.fullmatch(entry.name) and stat.S_ISREG(status.st_mode):
                    found.append((bytes.fromhex(entry.name[:-3]), status.st_size, status.st_mtime))
                elif not stat.S_ISDIR(status.st_mode):
                    os.unlink(entry.path)
        return found

    def _make_secret(self) -> bytes:
        path = self._folder / _SECRET
        if not path.exists():  # an engine that dies here, or starts beside, finds no half of it
            trust.write_once(str(path), os.urandom(32))
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            secret = file.read(33)
        if len(secret) != 32:
            path.unlink()
            raise ConfigError(f"{path} was damaged and has been removed; start again")
        return secret


def _check_private(path: Path) -> None:
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"--cache-disk {path} is no folder (symbolic links are not followed)")
    if status.st_uid != os.geteuid():
        raise ConfigError(f"--cache-disk {path} belongs to another user")
    if status.st_mode & 0o077:
        raise ConfigError(
            f"--cache-disk {path} may be entered by others: run `chmod 700` on it, or name another folder"
        )
