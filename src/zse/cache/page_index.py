"""Which pages and states a folder of files has, by key: what is asked of files without reading them (cache/files.py), also of
those of another process (engine/divided_files.py)."""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from zse.cache.prefix import MAX_COMPARED, common_tokens
from zse.cache.segments import KEY_BYTES, SESSION, STATE_KEY_BYTES, PageRecord, RecordFile


class PageIndex:
    """Of one thread that changes it and others that ask. num_bytes: of the files, num_states: of their records. left: of those that
    are not there any more, where somebody is told of them (take_left)."""

    def __init__(self) -> None:
        self.num_bytes = self.num_states = 0
        self.left: set[bytes] | None = None
        self._lock = threading.RLock()
        self._files: OrderedDict[str, RecordFile] = OrderedDict()  # the longest unused first
        self._at: dict[bytes, tuple[RecordFile, PageRecord]] = {}
        # The key of a page or root, and bytes of those of what is behind it (full pages, or states and other pages) → these, the newest
        # last: behind a root are as many full pages as there are first ones.
        self._behind: dict[tuple[bytes, int], dict[bytes, None]] = {}

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: bytes) -> bool:
        return key in self._at

    def __iter__(self) -> Iterator[bytes]:
        return iter(tuple(self._at))

    def states_behind(self, parent: bytes, tokens: bytes) -> list[bytes]:
        """The beginnings of `tokens`, the longest first, behind which and the page of key `parent` a state is kept."""
        with self._lock:
            tails = [self._at[key][1].tokens for key in self._behind.get((parent, STATE_KEY_BYTES), ())]
        return sorted((tail for tail in tails if tokens.startswith(tail)), key=len, reverse=True)

    def nearest_behind(self, parent: bytes, tokens: bytes) -> tuple[bytes, bytes, int]:
        """(key, tokens, how many of them) of the page, full or not, behind the page of key `parent` that has the most of the
        beginning of `tokens`; nothing where none has any. Of many of a kind the newest are looked at, as in memory."""
        with self._lock:
            kinds = [self._behind.get((parent, size), {}) for size in (KEY_BYTES, STATE_KEY_BYTES)]
            newest = [key for behind in kinds for key in islice(reversed(behind), MAX_COMPARED)]
            found = [(key, self._at[key][1].tokens) for key in newest]
        near = ((key, tail, common_tokens(tokens, tail)) for key, tail in found)
        return max([(b"", b"", 0), *near], key=lambda each: each[2])

    def last_session(self) -> tuple[bytes, list[tuple[bytes, bytes]]]:
        """Of the session that was used last, which ends last: the key of its root, and (key, tokens) of the pages behind that, in
        order, the last as far as it goes. (b"", []) where there is none."""
        with self._lock:  # not the file that was written last: an engine that ends writes all in any order
            segment = max(self._files.values(), key=lambda each: each.expires, default=None)
            key = segment.tip if segment is not None and segment.expires else b""
            ends = self._behind.get((key, STATE_KEY_BYTES), ())
            chain = [(end, self._at[end][1].tokens) for end in islice(reversed(ends), 1)]
            while (there := self._at.get(key)) is not None and len(chain) <= len(self._at):  # a forged file has circles
                chain.append((key, there[1].tokens))
                key = there[1].parent
        return key, chain[::-1]

    def session_of(self, key: bytes) -> str:
        """The name of the session that the page or state is of alone; "": of none."""
        there = self._at.get(key)
        return there[0].name if there is not None and there[0].expires else ""

    def records(self) -> list[tuple[bytes, bytes, bytes, str]]:
        """(key, key of the page before, tokens, session_of()) of all, the oldest first."""
        with self._lock:
            found = [(key, segment, record) for key, (segment, record) in self._at.items()]
        return [(key, each.parent, each.tokens, file.name if file.expires else "") for key, file, each in found]

    def sessions(self) -> dict[str, float]:
        """When each ends, in seconds since 1970."""
        with self._lock:
            return {segment.name: segment.expires for segment in self._files.values() if segment.expires}

    # -- what changes

    def _enter(self, segment: RecordFile, record: PageRecord) -> None:
        before = segment.nbytes
        segment.add(record)
        self.num_bytes += segment.nbytes - before
        self._files.setdefault(segment.name, segment)
        if record.kind == SESSION:
            return
        if record.key in self._at:  # one that was found damaged, and written again
            self._leave(record.key)
            segment.keys[record.key] = None
        self._at[record.key] = segment, record
        self.num_states += len(record.key) == STATE_KEY_BYTES
        self._behind.setdefault((record.parent, len(record.key)), {})[record.key] = None

    def _forget(self, segment: RecordFile) -> None:
        for key in list(segment.keys):
            self._leave(key)
        if self._files.pop(segment.name, None) is not None:
            self.num_bytes -= segment.nbytes

    def _leave(self, key: bytes) -> None:
        segment, record = self._at.pop(key)
        segment.keys.pop(key, None)
        self.num_states -= len(key) == STATE_KEY_BYTES
        place = record.parent, len(key)
        del self._behind[place][key]
        if not self._behind[place]:
            del self._behind[place]
        if self.left is not None:
            self.left.add(key)

    def take_left(self) -> list[bytes]:
        """Of records that have gone since the last call, and are not there again. Nothing where `left` is None."""
        with self._lock:
            gone = [key for key in self.left or () if key not in self._at]
            if self.left:
                self.left.clear()
        return gone
