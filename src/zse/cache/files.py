"""Cold prefixes on disk, which the next engine of the same model finds: full pages, last pages of sessions as far as they
go, and of models with a state those that were kept.

DIR/<fingerprint>/<name>.kv: a file for each session and for each run of pages of no session (segments.py). The
fingerprint stands for everything that the content depends on beside the tokens: model revision, layout, page size,
element type. key = BLAKE2b(parent's key, tokens); a root's key is that of the salt (tenant, ...), with a secret of the
folder, so that names tell nothing about what was said. The key of a state is that of the page before, the number of
tokens behind it, and a hash of these; so is that of a page that is not full. Each record has its tokens, and an engine that
starts knows what there is behind which page: so a prompt that leaves a page within it finds what it has in common.

A page stands in one file, that of the session which wrote it, and others continue behind it by its key. When a session
goes (its end, its deletion, the room), what others continue behind stays, in a file of nobody; the rest is gone by one
rename. The folder is private (0700): who reads it reads what users said. One engine at a time has it; another of the
same model has one beside it."""

import fcntl
import hashlib
import math
import os
import re
import stat
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from zse import trust
from zse.cache import segments
from zse.cache.page_index import PageIndex
from zse.cache.pages import BLOCK
from zse.cache.segments import CONTENT, HEAD_BYTES, KEY_BYTES, SESSION, TAIL_BYTES, PageRecord, RecordFile
from zse.errors import ConfigError

NAME_BYTES = 16  # of a file's name, and of what names a session
MOST_FOLDERS = 16  # engines of one model at once
EXTEND_S = 60.0  # a session's end is written again when it is so much later
_NAME = re.compile(rf"[0-9a-f]{{{2 * NAME_BYTES}}}\.kv")
SECRET = "secret"
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def key_of(parent: bytes, tokens: bytes) -> bytes:
    """The key of the page with `tokens` behind the page (or root) of key `parent`."""
    return hashlib.blake2b(tokens, key=parent, digest_size=KEY_BYTES).digest()


def state_key(parent: bytes, tail: bytes) -> bytes:
    """The key of the state behind `tail`, 1 to a page of tokens, and the page (or root) of key `parent` before them."""
    digest = hashlib.blake2b(tail, key=parent, digest_size=TAIL_BYTES).digest()
    return parent + bytes((len(tail) // 4,)) + digest


class PageFiles(PageIndex):
    """The files of one fingerprint, at most `max_bytes` of them: the longest unused go first. One thread may write while
    others read. page_size: tokens of a page. Raises ConfigError for a folder that cannot be used or that others may
    enter."""

    def __init__(self, folder: str | os.PathLike, fingerprint: bytes, max_bytes: int, page_size: int = BLOCK):
        super().__init__()
        self.max_bytes = max_bytes
        self._seal = fingerprint + struct.pack("<I", page_size)
        self.num_damaged = 0
        self._spoilt: dict[str, None] = {}  # files with a record that is not sound
        top = Path(folder)
        try:
            make_private(top)
            self.folder, self._claim = _claim(top / fingerprint.hex()[:32])
            self._secret = _make_secret(self.folder)
            self._scan()
        except OSError as error:
            raise ConfigError(f"--cache-disk {top}: {error.strerror or error}") from None
        self._make_room(0)

    def close(self) -> None:
        """Another engine may have the folder."""
        self._claim.close()

    def counters(self) -> dict[str, float]:
        """What is on disk now, and what was damaged."""
        with self._lock:
            sessions = [segment.nbytes for segment in self._files.values() if segment.expires]
            return {
                "prefix_disk_pages": len(self._at) - self.num_states,
                "prefix_disk_bytes": self.num_bytes,
                "prefix_disk_files": len(self._files),
                "prefix_disk_damaged_files": self.num_damaged,
                "session_files": len(sessions),
                "session_bytes": sum(sessions),
            }

    def root(self, salt: tuple[str, ...]) -> bytes:
        """The key of a salt's root."""
        parts = b"".join(struct.pack("<I", len(raw)) + raw for raw in (text.encode() for text in salt))
        return hashlib.blake2b(parts, key=self._secret, digest_size=KEY_BYTES).digest()

    # -- writing

    def write(
        self, key: bytes, parent: bytes, content: bytes, session: str = "", expires: float = 0.0, tokens: bytes = b""
    ) -> None:
        """Keep a page, or a state, behind the page (or root) of key `parent`. session: the name (32 hex digits) of the one
        that it is of alone, which ends at `expires`, in seconds since 1970. tokens: of the page, or before the state, by whose
        beginning it is found. Raises OSError; nothing is left behind then."""
        with self._lock:
            if key in self._at:
                return
            segment = self._file_for(parent, session, is_page=len(key) == KEY_BYTES)
            told = [SESSION] if session and segment.expires + EXTEND_S < expires else []
            size = len(content) + len(tokens) + (1 + len(told)) * HEAD_BYTES
            if not self._make_room(size, segment, max(expires, segment.expires) if session else 0.0):
                return
        added = [(SESSION, b"", b"", b"")] * len(told) + [(CONTENT, key, tokens, content)]
        self._append(segment, added, parent, expires)
        with self._lock:
            self._touch(key)

    def extend(self, session: str, expires: float) -> None:
        """The session of this name is in use. Raises OSError."""
        with self._lock:
            segment = self._files.get(session)
        if segment is not None and segment.expires + EXTEND_S < expires:
            self._append(segment, [(SESSION, b"", b"", b"")], bytes(KEY_BYTES), expires)

    def _append(
        self, segment: RecordFile, added: list[tuple[int, bytes, bytes, bytes]], parent: bytes, expires: float
    ) -> None:
        """Add (kind, key, tokens, content) at the file's end. Raises OSError; the file is as it was then."""
        found, size = [], segment.nbytes
        descriptor = os.open(self._path(segment.name), os.O_WRONLY | os.O_CREAT | _FLAGS, 0o600)
        try:
            if os.fstat(descriptor).st_size != size:
                os.ftruncate(descriptor, size)
            for kind, key, tokens, data in added:
                end = expires if kind == SESSION else 0.0
                record = PageRecord(kind, key, parent, size, len(data), segments.crc32(data), end, tokens)
                segments.write(descriptor, segments.pack(self._seal_of(segment.name), record), data, size)
                found.append(record)
                size = record.end
        except OSError:
            if not size:
                self._path(segment.name).unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        with self._lock:
            for record in found:
                self._enter(segment, record)

    def _file_for(self, parent: bytes, session: str, is_page: bool) -> RecordFile:
        """The session's file; of no session the one that ends with the page before, or has it, or a new one."""
        if session:
            return self._files.get(session) or RecordFile(session)
        there = self._at.get(parent)
        if there is not None and not there[0].expires and (there[0].tip == parent or not is_page):
            return there[0]
        return RecordFile(os.urandom(NAME_BYTES).hex())

    def _touch(self, key: bytes) -> None:
        """A page or state was of use, and what stands before it, which goes after it; but what others go on from in a
        session's file stays when that goes."""
        seen: dict[str, RecordFile] = {}
        while (there := self._at.get(key)) is not None and there[0].name not in seen:
            seen[there[0].name] = there[0]
            key = there[0].behind
        for number, (name, segment) in enumerate(seen.items()):
            if not number or not segment.expires:
                self._files.move_to_end(name)

    # -- reading

    def read(self, wanted: "Iterable[tuple[bytes, tuple[memoryview, ...]]]") -> int:
        """Fill views with the content of pages and states, in order: how many could be, up to the first that is not there
        or not sound, which is forgotten."""
        count, descriptor, opened = 0, -1, ""
        try:
            for key, views in wanted:
                with self._lock:
                    there = self._at.get(key)
                    if there is None:
                        return count
                    segment, record = there
                    if segment.name != opened:  # here, since a file may get another one's content
                        if descriptor >= 0:
                            os.close(descriptor)
                        descriptor = -1
                        descriptor, opened = self._open(segment.name), segment.name
                if not segments.read(descriptor, self._seal_of(segment.name), record, views):
                    self.forget(key, is_damaged=True)
                    return count
                count += 1
        except OSError:
            self.forget(key, is_there=False)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return count

    def _open(self, name: str) -> int:
        descriptor = os.open(self._path(name), os.O_RDONLY | _FLAGS)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError("no regular file")
        return descriptor

    def used(self, key: bytes) -> None:
        """A prompt went on from here."""
        with self._lock:
            self._touch(key)
            there = self._at.get(key)
        if there is not None:
            with suppress(OSError):
                os.utime(self._path(there[0].name), follow_symlinks=False)

    def forget(self, key: bytes, is_damaged: bool = False, is_there: bool = True) -> None:
        """Forget a record that is not sound, or of no use, whose bytes tidy() removes; or a file that is not there."""
        with self._lock:
            self.num_damaged += is_damaged
            there = self._at.get(key)
            if there is None:
                return
            if is_there:
                self._leave(key)
                self._spoilt[there[0].name] = None
            if not is_there or not there[0].keys:
                self._remove(there[0])

    # -- what goes

    def drop_session(self, name: str) -> None:
        """Remove what a session has alone. Raises OSError."""
        with self._lock:
            segment = self._files.get(name)
        if segment is not None and segment.expires:
            self._end(segment)

    def tidy(self, now: float) -> None:
        """Remove what is of sessions alone that have ended, and what is not sound. now: seconds since 1970. Raises
        OSError."""
        with self._lock:
            ended = [segment for segment in self._files.values() if 0 < segment.expires <= now]
            spoilt = [self._files[name] for name in self._spoilt if name in self._files]
            self._spoilt.clear()
        for segment in ended:
            self._end(segment)
        with self._lock:
            for segment in spoilt:
                if self._files.get(segment.name) is segment:
                    self._rewrite(segment, [self._at[key][1] for key in segment.keys], segment.expires)

    def _end(self, segment: RecordFile) -> None:
        """Keep of a session's file what others continue behind, as nobody's."""
        with self._lock:
            needed = self._needed_by_others(segment)
            kept = [self._at[key][1] for key in segment.keys if key in needed]
            if kept:
                self._rewrite(segment, kept)
            else:
                self._remove(segment)

    def _needed_by_others(self, segment: RecordFile) -> set[bytes]:
        needed: set[bytes] = set()
        for other, record in self._at.values():
            key = record.parent
            while other is not segment and key not in needed and (there := self._at.get(key)) is not None:
                needed.add(key)
                key = there[1].parent
        return needed

    def _rewrite(self, segment: RecordFile, kept: list[PageRecord], expires: float = 0.0) -> None:
        """A file of only these records, by one rename. expires: of the session that it is of, 0: of none."""
        half, seal = self.folder / f".{segment.name}.kv.tmp", self._seal_of(segment.name)
        made: list[PageRecord] = []
        offset = 0
        source = self._open(segment.name)
        try:
            target = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _FLAGS, 0o600)
            try:
                if expires:
                    kept = [PageRecord(SESSION, b"", bytes(KEY_BYTES), 0, 0, 0, expires), *kept]
                for record in kept:
                    content = bytearray(record.nbytes)
                    if record.kind == SESSION or segments.read(source, seal, record, (memoryview(content),)):
                        made.append(record._replace(offset=offset))
                        segments.write(target, segments.pack(seal, made[-1]), bytes(content), offset)
                        offset = made[-1].end
            finally:
                os.close(target)
            half.replace(self._path(segment.name))
        finally:
            os.close(source)
            half.unlink(missing_ok=True)
        self._forget(segment)
        again = RecordFile(segment.name)
        for record in made:
            self._enter(again, record)

    def _make_room(self, size: int, but: RecordFile | None = None, end: float = math.inf) -> bool:
        """Room for so many bytes more: files go, other than `but`, the longest unused first; of sessions that end up to `end` what
        they have alone. What is written was used long before, perhaps: no session goes for one that ends earlier, or for a page of nobody."""
        while self.num_bytes + size > self.max_bytes:
            segment = next((each for each in self._files.values() if each is not but and each.expires <= end), None)
            if segment is None or size > self.max_bytes:
                return False
            before = self.num_bytes
            try:
                if segment.expires:
                    self._end(segment)
                if self.num_bytes == before and segment.name in self._files:
                    self._remove(segment)
            except OSError:
                self._remove(segment)
        return True

    def _remove(self, segment: RecordFile) -> None:
        self._forget(segment)
        # A folder in its place, or a disk that has become read-only: it is not in the index any more.
        with suppress(OSError):
            self._path(segment.name).unlink(missing_ok=True)

    # -- the folder

    def _seal_of(self, name: str) -> bytes:
        return self._seal + bytes.fromhex(name)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.kv"

    def _scan(self) -> None:
        """Enter what the files have; what is none of ours is removed, of a file that was torn the end."""
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name == SECRET:
                    continue
                status = entry.stat(follow_symlinks=False)
                if _NAME.fullmatch(entry.name) and stat.S_ISREG(status.st_mode):
                    found.append((status.st_mtime, entry.name[:-3], status.st_size))
                elif not stat.S_ISDIR(status.st_mode):
                    os.unlink(entry.path)
        now = time.time()
        for _, name, size in sorted(found):
            segment, path = RecordFile(name), self._path(name)
            descriptor = os.open(path, os.O_RDWR | _FLAGS)
            try:
                for record in segments.records(descriptor, self._seal_of(name), size):
                    self._enter(segment, record)
                if segment.nbytes < size:
                    self.num_damaged += 1
                    os.ftruncate(descriptor, segment.nbytes)
            finally:
                os.close(descriptor)
            if not segment.keys:
                self._remove(segment)
        self.tidy(now)


def remove_session(folder: str | os.PathLike, name: str) -> None:
    """Remove a session's file of models whose engines do not run now. What others continued behind it is computed again.
    Raises OSError."""
    for path in Path(folder).glob(f"**/{name}.kv"):  # of several ranks within the first one's
        descriptor = os.open(path.parent / SECRET, os.O_RDONLY | _FLAGS)
        with open(descriptor, "rb") as claim, suppress(BlockingIOError):  # an engine has it, which is told
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)


def _claim(folder: Path):
    """The folder, or where another engine has it one beside it; with an open file that holds it."""
    for number in range(MOST_FOLDERS):
        path = folder.with_name(f"{folder.name}-{number}") if number else folder
        make_private(path)
        _make_secret(path)
        descriptor = os.open(path / SECRET, os.O_RDONLY | _FLAGS)
        # Open until close().
        claim = open(descriptor, "rb")  # noqa: SIM115
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            claim.close()
            continue
        except OSError:
            pass  # a file system without locks
        return path, claim
    raise ConfigError(f"--cache-disk {folder.parent}: {MOST_FOLDERS} engines of this model use it already")


def _make_secret(folder: Path) -> bytes:
    path = folder / SECRET
    if not path.exists():  # an engine that dies here, or starts beside, finds no half of it
        trust.write_once(str(path), os.urandom(32))
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        secret = file.read(33)
    if len(secret) != 32:
        path.unlink()
        raise ConfigError(f"{path} was damaged and has been removed; start again")
    return secret


def make_private(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"--cache-disk {path} is no folder (symbolic links are not followed)")
    if status.st_uid != os.geteuid():
        raise ConfigError(f"--cache-disk {path} belongs to another user")
    if status.st_mode & 0o077:
        raise ConfigError(
            f"--cache-disk {path} may be entered by others: run `chmod 700` on it, or name another folder"
        )
