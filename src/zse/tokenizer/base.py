"""The interface that every tokenizer has, and what follows from it alone."""

import re
from collections.abc import Iterator, Sequence


class Tokenizer:
    """Text <-> token ids. Constant after loading: any number of threads may use one.

    vocab_size: number of ids. bos_id, eos_id, unknown_id, pad_id: an id or None.
    eos_ids: every id that ends a generation: eos_id and the end-of-turn tokens that the vocabulary has.
    adds_bos, adds_eos: what the model wants around a prompt that is not a rendered chat template.
    strips_space: encode() puts a space before the text and decode() takes it away (SentencePiece's dummy prefix).
    end_id: what adds_eos adds, where it is not EOS (Qwen3-Embedding).
    pair_separators: how many EOS stand between the texts of a pair (BERT 1, RoBERTa 2).
    """

    vocab_size: int
    bos_id: int | None = None
    eos_id: int | None = None
    unknown_id: int | None = None
    pad_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    adds_bos: bool = False
    adds_eos: bool = False
    strips_space: bool = False
    end_id: int | None = None
    pair_separators: int = 1

    def encode(
        self, text: str, *, special: bool = False, add_bos: bool | None = None, barriers: Sequence[int] = ()
    ) -> list[int]:
        """Token ids of `text`.

        Args:
            special: whether the text of a control token (`<|im_end|>`) becomes that token; never pass user text with True.
            add_bos: None does what the model wants at both ends (adds_bos, adds_eos); True or False decides BOS and adds
                no EOS.
            barriers: ascending offsets in bytes of UTF-8; a control token is not recognized across one
                (chat_template.py)."""
        ids = self._encode(text, special, barriers)
        if add_bos is None:
            ids += self._end()
            add_bos = self.adds_bos
        if add_bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        return ids

    def _end(self) -> list[int]:
        """What stands behind a text."""
        id = self.eos_id if self.end_id is None else self.end_id
        return [id] if self.adds_eos and id is not None else []

    def join_pair(self, one: list[int], other: list[int]) -> tuple[list[int], int]:
        """(ids, where the second text begins) of a pair as a cross-encoder reads it: BOS one EOS other EOS. Both
        without BOS and EOS."""
        begin = [self.bos_id] if self.adds_bos and self.bos_id is not None else []
        end = self._end()
        first = [*begin, *one, *end * self.pair_separators]
        return [*first, *other, *end], len(first)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False, continuation: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. skip_special leaves control tokens out.

        continuation: the ids go on from other text, so a leading space is a space. IndexError for an unknown id.
        """
        return self.decode_bytes(ids, skip_special=skip_special, continuation=continuation).decode("utf-8", "replace")

    def decode_bytes(self, ids: Sequence[int], *, skip_special: bool = False, continuation: bool = False) -> bytes:
        """As decode(), before the bytes are read as UTF-8."""
        data = self._decode(ids, skip_special)
        return data[1:] if self.strips_space and not continuation and data[:1] == b" " else data

    def token_bytes(self, id: int) -> bytes:
        """What one token adds to a text. IndexError for an unknown id."""
        raise NotImplementedError

    def is_special(self, id: int) -> bool:
        """Whether the id is a control or unknown token, which is not part of the text that a user sees."""
        raise NotImplementedError

    def find(self, text: str) -> int | None:
        """Id of the token whose text is exactly `text`, or None."""
        raise NotImplementedError

    def control_texts(self) -> list[str]:
        """The texts of all control and unknown tokens."""
        raise NotImplementedError

    def control_first_characters(self) -> str:
        """The characters that control and unknown tokens begin with, each once."""
        return "".join(sorted({text[0] for text in self.control_texts() if text}))

    def ends_inside_control(self, text: str) -> bool:
        """Whether `text` ends in the beginning of a control token (may say yes of other special tokens too)."""
        return any(text.endswith(control[:size]) for control in self.control_texts() for size in range(1, len(control)))

    def text_of(self, id: int | None) -> str:
        """The text of a token, "" for None: the bos_token and eos_token of chat templates."""
        return "" if id is None else self.token_bytes(id).decode("utf-8", "replace")

    def _encode(self, text: str, special: bool, barriers: Sequence[int]) -> list[int]:
        raise NotImplementedError

    def _decode(self, ids: Sequence[int], skip_special: bool) -> bytes:
        raise NotImplementedError


def control_pattern(control: dict[int, dict]) -> re.Pattern | None:
    """Leftmost, longest control token, with the white space that it takes along. control: id → its entry in a
    tokenizer.json."""
    longest_first = sorted(control.items(), key=lambda item: -len(item[1]["content"]))
    parts = [
        (r"\s*" if token.get("lstrip") else "")
        + f"(?P<t{id}>{re.escape(token['content'])})"
        + (r"\s*" if token.get("rstrip") else "")
        for id, token in longest_first
        if token["content"]
    ]
    return re.compile("|".join(parts)) if parts else None


def cut_control(pattern: re.Pattern, text: str, barriers: Sequence[int]) -> Iterator[int | str]:
    """The ids of the control tokens in `text` that no barrier (in bytes) cuts, and the texts between them."""
    data = text.encode("utf-8")
    stops = [len(data[:offset].decode("utf-8", "ignore")) for offset in barriers]
    start = position = 0
    while match := pattern.search(text, position):
        group = match.lastgroup or ""
        begin, end = match.span(group)
        if any(begin < stop < end for stop in stops):
            position = begin + 1
            continue
        if match.start() > start:
            yield text[start : match.start()]
        yield int(group[1:])
        start = position = match.end()
    if start < len(text):
        yield text[start:]
