"""Blocks → chunks of at most so many tokens: cut where the document's structure ends, else at sentences, words, characters.

    chunks = chunk_document(document, lambda texts: [len(tokenizer.encode(t, add_bos=False)) for t in texts], 512, 64)

Every character of the document stands in some chunk, but for white space at a chunk's ends. A document is cut into atoms (headings,
short runs of sentences, lines or rows of one page) that are counted once each, and packed by the sums; what was packed is counted
once more, because a tokenizer may merge across the seams. So the tokenizer reads each character about twice, whatever the text."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from zse.errors import RequestError
from zse.rag.documents import Chunk, DocumentError, ParsedDocument, TextBlock

MIN_TOKENS, MAX_TOKENS, DEFAULT_TOKENS = 32, 4096, 512
MAX_CHUNKS = 100_000  # of a document
MAX_HEADING = 200  # characters of a heading above a chunk; in the text it is whole
_COUNTED = 4096  # texts that are counted in one call
_SENTENCE = re.compile(r"(?<=[.!?…])[\"'”’»)\]]*+\s++|(?<=[。！？])|\n++")
_LINE = re.compile(r"\n++")

Counter = Callable[[list[str]], Sequence[int]]


class _Atom(NamedTuple):
    """What is never cut again, with what separates it from the next. begins: of its block; header: the row of a table that names the
    columns of this one; path: the headings that it stands under."""

    text: str
    block: int
    begins: bool
    page: int
    kind: str
    header: str
    path: tuple[str, ...]


def checked_sizes(chunk_tokens: int | None, overlap_tokens: int | None) -> tuple[int, int]:
    """Both with their defaults, 512 and an eighth of a chunk. RequestError names the field that cannot be used."""
    chunk = DEFAULT_TOKENS if chunk_tokens is None else chunk_tokens
    if not MIN_TOKENS <= chunk <= MAX_TOKENS:
        raise RequestError(
            f"chunk_tokens must be between {MIN_TOKENS} and {MAX_TOKENS}", code="out_of_range", param="chunk_tokens"
        )
    overlap = chunk // 8 if overlap_tokens is None else overlap_tokens
    if not 0 <= 2 * overlap < chunk:
        raise RequestError(
            f"overlap_tokens must be at least 0 and less than half of chunk_tokens ({chunk})",
            code="out_of_range",
            param="overlap_tokens",
        )
    return chunk, overlap


def chunk_document(
    document: ParsedDocument, count_tokens: Counter, chunk_tokens: int | None = None, overlap_tokens: int | None = None
) -> list[Chunk]:
    """The document's chunks in reading order, [] without text. count_tokens: of each of the texts, without what a tokenizer adds at
    the ends. Raises RequestError for sizes out of their bounds, DocumentError beyond MAX_CHUNKS."""
    budget, overlap = checked_sizes(chunk_tokens, overlap_tokens)
    atoms, counts = _counted(list(_atoms(document.blocks, budget)), count_tokens, budget)
    packer = _Packer(atoms, counts, budget, overlap)
    packer.pack()
    return _made(packer.packed, count_tokens, budget)


# -- atoms


def _cuts(text: str, pattern: re.Pattern, size: int) -> list[str]:
    """`text` in parts that end where the pattern matches: of up to `size` characters where two or more fit together, of up to four
    times that else."""
    parts, start, end = [], 0, 0
    for match in pattern.finditer(text):
        at = match.end()
        if at == end:
            continue
        if at - start > size and end > start:
            parts.append(text[start:end])
            start = end
        end = at
    if len(text) - start > size and end > start:
        parts.append(text[start:end])
        start = end
    parts.append(text[start:])
    most = 4 * size
    return [piece for part in parts if part for piece in ([part] if len(part) <= most else _words(part, most))]


def _words(text: str, size: int) -> list[str]:
    """`text` in parts of at most `size` characters, cut behind white space where there is some in the last half of a part."""
    parts, start = [], 0
    while len(text) - start > size:
        end = start + size
        space = max(text.rfind(" ", start + size // 2, end), text.rfind("\n", start + size // 2, end))
        end = space + 1 if space >= 0 else end
        parts.append(text[start:end])
        start = end
    return [*parts, text[start:]]


def _atoms(blocks: list[TextBlock], budget: int):
    size = max(24, budget // 2)  # characters: about an eighth of a chunk
    path: list[tuple[int, str]] = []
    under: tuple[str, ...] = ()
    header, kept, kind, page, first, num_blocks = "", "", "", 0, 0, len(blocks)
    for index, block in enumerate(blocks):
        text, following = block.text, blocks[index + 1].kind if index + 1 < num_blocks else ""
        text += "\n" if block.kind == following and following in ("list", "table") else "\n\n"
        alone = block.kind == "heading" or (block.kind == "table" and block.level == 1)
        if kept and (alone or len(kept) + len(text) > size or block.page != page or block.kind != kind):
            yield _Atom(kept, first, True, page, kind, header if kind == "table" else "", under)
            kept = ""
        if block.kind != "table":
            header = ""
        if block.kind == "heading":
            path = [entry for entry in path if entry[0] < block.level]
            under = tuple(entry[1] for entry in path)
        if alone or len(text) > size:
            pattern = _LINE if block.kind == "code" else _SENTENCE
            for number, part in enumerate(_cuts(text, pattern, size)):
                row = header if block.kind == "table" and not alone else ""
                yield _Atom(part, index, not number, block.page, block.kind, row, under)
            if block.kind == "heading":
                path.append((block.level, " ".join(block.text[:MAX_HEADING].split())))
                under = tuple(entry[1] for entry in path[-6:])
            elif alone:
                header = text
        else:
            if not kept:
                first, page, kind = index, block.page, block.kind
            kept += text
    if kept:
        yield _Atom(kept, first, True, page, kind, header if kind == "table" else "", under)


def _count(texts: list[str], count_tokens: Counter) -> list[int]:
    counts: list[int] = []
    for at in range(0, len(texts), _COUNTED):
        counts += count_tokens(texts[at : at + _COUNTED])
    return counts


def _counted(atoms: list[_Atom], count_tokens: Counter, budget: int) -> tuple[list[_Atom], list[int]]:
    """Atoms of at most half a chunk, and their tokens."""
    counts = _count([atom.text for atom in atoms], count_tokens)
    most = budget // 2
    while any(count > most and len(atom.text) > 1 for atom, count in zip(atoms, counts)):
        smaller: list[_Atom] = []
        known: list[int] = []
        for atom, count in zip(atoms, counts):
            if count <= most or len(atom.text) == 1:
                smaller.append(atom)
                known.append(count)
                continue
            parts = _words(atom.text, max(1, len(atom.text) * most // (count + most)))
            smaller += [
                atom._replace(text=part, begins=atom.begins and not number) for number, part in enumerate(parts)
            ]
            known += [-1] * len(parts)
        counted = iter(_count([atom.text for atom, count in zip(smaller, known) if count < 0], count_tokens))
        atoms, counts = smaller, [next(counted) if count < 0 else count for count in known]
    return atoms, counts


# -- packing


class _Packed(NamedTuple):
    """num_carried: of its texts that stand in the chunk before, too, or in the table's first row."""

    texts: list[str]
    num_carried: int
    path: tuple[str, ...]
    first_page: int
    last_page: int


class _Packer:
    def __init__(self, atoms: list[_Atom], counts: list[int], budget: int, overlap: int):
        self.atoms, self.counts, self.budget, self.overlap = atoms, counts, budget, overlap
        self.packed: list[_Packed] = []
        self._start = 0  # the first atom that is in no chunk yet
        self._carried: list[tuple[str, int]] = []  # (text, its atom) of the chunk before, for the overlap
        self._tokens = 0
        self._headers = {atom.text: count for atom, count in zip(atoms, counts) if atom.kind == "table" and atom.begins}

    def pack(self) -> None:
        atoms, counts, budget = self.atoms, self.counts, self.budget
        whole = self._block_tokens()
        for index, atom in enumerate(atoms):
            count = counts[index]
            if index > self._start:
                if atom.kind == "heading" and atom.begins and self._tokens >= budget // 4:
                    if atoms[index - 1].kind != "heading":
                        self._flush(index, overlaps=False)
                elif atom.begins and budget // 2 <= self._tokens and budget - self._tokens < whole[index] <= budget:
                    self._flush(index)
                elif self._tokens + count > budget:
                    self._flush(index)
            if index == self._start:
                self._begin(atom, count)
            elif self._tokens + count > budget:  # headings that went along are long
                self._flush(index)
                self._begin(atom, count)
            self._tokens += count
        if self._start < len(atoms):
            self._flush(len(atoms))

    def _block_tokens(self) -> list[int]:
        """Of the block that begins with an atom."""
        whole, at = self.counts.copy(), 0
        for index, atom in enumerate(self.atoms):
            if atom.begins:
                at = index
            else:
                whole[at] += self.counts[index]
        return whole

    def _begin(self, atom: _Atom, count: int) -> None:
        """A chunk begins with this atom: what was carried over has to leave room for it."""
        self._tokens = sum(min(self.overlap, self.counts[at]) for _, at in self._carried)
        if self._tokens + count > self.budget:
            self._carried, self._tokens = [], 0
        header = self._headers.get(atom.header, self.budget) if atom.header else 0
        if atom.header and header <= self.budget // 4 and self._tokens + count + header <= self.budget:
            self._carried = [(atom.header, -1)]
            self._tokens = header

    def _flush(self, end: int, overlaps: bool = True) -> None:
        """Atoms up to `end` are a chunk. Headings at its end go with what they stand above."""
        atoms = self.atoms
        last = end
        while end < len(atoms) and last > self._start and atoms[last - 1].kind == "heading":
            last -= 1
        if last == self._start or sum(self.counts[last:end]) > self.budget // 4:
            last = end
        first = atoms[self._start]
        whose = [at for _, at in self._carried if at >= 0]
        begin = atoms[whose[0]] if whose else first
        texts = [text for text, _ in self._carried] + [atom.text for atom in atoms[self._start : last]]
        self.packed.append(_Packed(texts, len(self._carried), begin.path, begin.page, atoms[last - 1].page))
        if len(self.packed) > MAX_CHUNKS:
            raise DocumentError(
                f"the document has more than {MAX_CHUNKS} chunks: split it, or ask for more chunk_tokens",
                "request_too_large",
            )
        self._carried = self._tail(last) if overlaps and last == end < len(atoms) else []
        self._start, self._tokens = last, 0
        if last < end:
            self._begin(atoms[last], sum(self.counts[last:end]))
            self._tokens += sum(self.counts[last:end])

    def _tail(self, end: int) -> list[tuple[str, int]]:
        """What the next chunk repeats of this one: whole atoms, else the last words of the last."""
        room, at = self.overlap, end
        while at > self._start and self.counts[at - 1] <= room and self.atoms[at - 1].kind not in ("heading", "table"):
            at -= 1
            room -= self.counts[at]
        if at < end or not room or self.atoms[end - 1].kind in ("heading", "table"):
            return [(self.atoms[index].text, index) for index in range(at, end)] if at > self._start else []
        text, count = self.atoms[end - 1].text, self.counts[end - 1]
        tail = text[len(text) - len(text) * room // count :]
        words = re.search(r"\s\S", tail)
        if words is not None:
            return [(tail[words.start() + 1 :], end - 1)]
        return (
            [] if any(map(str.isspace, text.strip())) else [(tail, end - 1)]
        )  # no part of a word where there are words


def _made(packed: list[_Packed], count_tokens: Counter, budget: int) -> list[Chunk]:
    """Chunks with their tokens counted. What has more than the sum of its atoms said repeats nothing, or is halved."""
    while True:
        packed = [one for one in packed if not all(map(str.isspace, one.texts[one.num_carried :]))]
        texts = ["".join(one.texts).strip("\n").rstrip() for one in packed]
        counts = _count(texts, count_tokens)
        if all(count <= budget or len(text) == 1 for text, count in zip(texts, counts)):
            return [
                Chunk(text, list(one.path), one.first_page, one.last_page, count)
                for text, count, one in zip(texts, counts, packed)
            ]
        packed = [
            half
            for one, text, count in zip(packed, texts, counts)
            for half in ([one] if count <= budget or len(text) == 1 else _halves(one))
        ]


def _halves(one: _Packed) -> list[_Packed]:
    texts = one.texts[one.num_carried :]
    if one.num_carried:
        return [one._replace(texts=texts, num_carried=0)]
    if len(texts) == 1:
        texts = _words(texts[0], (len(texts[0]) + 1) // 2)
    middle = (len(texts) + 1) // 2
    return [one._replace(texts=texts[:middle]), one._replace(texts=texts[middle:])]
