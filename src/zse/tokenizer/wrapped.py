"""Tokenizers that only the `tokenizers` library reads, behind our interface."""

import re
from collections.abc import Sequence

import msgspec

from zse.errors import FormatError, UnsupportedError
from zse.lazy import tokenizers
from zse.tokenizer.base import Tokenizer

DECODERS = ("ByteLevel", "ByteFallback", "Metaspace")


class WrappedTokenizer(Tokenizer):
    """A tokenizer.json in the `tokenizers` library. Constant after loading: special tokens are cut out here, because
    the library's switch for that is a property of the whole tokenizer.

    data: the file; parsed: its JSON, parts of which may be msgspec.Raw. FormatError: damaged. UnsupportedError: an
    unknown kind of decoder.
    """

    def __init__(self, data: bytes, parsed: dict, path: str = "tokenizer.json"):
        # Metaspace may add its space before the first piece only; `inner` encodes the pieces after a special token.
        steps = msgspec.json.encode(parsed.get("pre_tokenizer"))
        inner_steps = steps.replace(b'"prepend_scheme":"first"', b'"prepend_scheme":"never"')
        try:
            self._library = self._inner = tokenizers.Tokenizer.from_buffer(data)
            if inner_steps != steps:
                inner = parsed | {"pre_tokenizer": msgspec.Raw(inner_steps)}
                self._inner = tokenizers.Tokenizer.from_buffer(msgspec.json.encode(inner))
        except Exception as error:  # the library raises plain Exception
            raise FormatError(path, 0, "tokenizer.json", f"refused by the tokenizers library: {error}") from None
        self._library.encode_special_tokens = True  # special tokens in a text are text
        self._inner.encode_special_tokens = True
        self._library.no_truncation()
        self._library.no_padding()
        vocabulary = parsed["model"].get("vocab")
        if not isinstance(vocabulary, dict):
            vocabulary = self._library.get_vocab(with_added_tokens=False)
        added = parsed.get("added_tokens") or []
        ids = (self._library.token_to_id(token["content"]) for token in added)
        self.vocab_size = 1 + max((*vocabulary.values(), *(id for id in ids if id is not None)), default=-1)
        kinds = _kinds(parsed.get("decoder"))
        if not kinds & set(DECODERS):
            raise UnsupportedError("tokenizer decoder", ", ".join(sorted(kinds)) or None, DECODERS)
        self._is_byte_level = "ByteLevel" in kinds
        self.strips_space = not self._is_byte_level and _adds_space(parsed)
        self._added = {int(token["id"]): token["content"] for token in added}
        self._control = {int(token["id"]): token for token in added if token.get("special")}
        self._control_pattern = _pattern(self._control)
        self._bytes_of: dict[str, int] = {}

    def token_bytes(self, id: int) -> bytes:
        text = self._added.get(id)
        # The decoder of pieces sees added tokens too: Gemma's indentation is added tokens of U+2581.
        if text is not None and (self._is_byte_level or id in self._control):
            return text.encode("utf-8", "surrogatepass")
        if text is None:
            text = self._library.id_to_token(id) if 0 <= id < self.vocab_size else None
        if text is None:
            if 0 <= id < self.vocab_size:
                return b""  # a hole in the vocabulary
            raise IndexError(f"token id {id} is not in 0..{self.vocab_size - 1}")
        return self._from_alphabet(text) if self._is_byte_level else _from_pieces(text)

    def is_special(self, id: int) -> bool:
        return id in self._control

    def find(self, text: str) -> int | None:
        return self._library.token_to_id(text)

    def control_texts(self) -> list[str]:
        return [token["content"] for token in self._control.values()]

    def _encode(self, text: str, special: bool, barriers: Sequence[int]) -> list[int]:
        text = text.encode("utf-8", "replace").decode()  # the library takes no lone surrogates
        if not special or self._control_pattern is None:
            return self._library.encode(text, add_special_tokens=False).ids
        ids, start, library, stops = [], 0, self._library, _characters(text, barriers)
        position = 0
        while match := self._control_pattern.search(text, position):
            group = match.lastgroup or ""
            begin, end = match.span(group)
            if any(begin < stop < end for stop in stops):
                position = begin + 1
                continue
            if match.start() > start:
                ids += library.encode(text[start : match.start()], add_special_tokens=False).ids
            ids.append(int(group[1:]))
            start = position = match.end()
            library = self._inner
        if start < len(text):
            ids += library.encode(text[start:], add_special_tokens=False).ids
        return ids

    def _decode(self, ids: Sequence[int], skip_special: bool) -> bytes:
        return b"".join(self.token_bytes(id) for id in ids if not (skip_special and id in self._control))

    def _from_alphabet(self, text: str) -> bytes:
        if not self._bytes_of:
            plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
            rest = (byte for byte in range(256) if byte not in plain)
            self._bytes_of = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}
        try:
            return bytes(self._bytes_of[character] for character in text)
        except KeyError:
            return text.encode("utf-8", "surrogatepass")


def _pattern(control: dict[int, dict]) -> re.Pattern | None:
    """Leftmost, longest control token, with the white space that it takes along."""
    longest_first = sorted(control.items(), key=lambda item: -len(item[1]["content"]))
    parts = [
        (r"\s*" if token.get("lstrip") else "")
        + f"(?P<t{id}>{re.escape(token['content'])})"
        + (r"\s*" if token.get("rstrip") else "")
        for id, token in longest_first
        if token["content"]
    ]
    return re.compile("|".join(parts)) if parts else None


def _characters(text: str, offsets: Sequence[int]) -> list[int]:
    """Offsets in bytes as offsets in characters."""
    data = text.encode("utf-8")
    return [len(data[:offset].decode("utf-8", "ignore")) for offset in offsets]


def _from_pieces(text: str) -> bytes:
    byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", text)
    return bytes([int(byte[1], 16)]) if byte else text.replace("▁", " ").encode("utf-8", "surrogatepass")


def _kinds(decoder: dict | None) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    return {str(decoder.get("type"))}.union(*map(_kinds, decoder.get("decoders") or []))


def _adds_space(parsed: dict) -> bool:
    """Whether a space is put before the text: normalizer Prepend, or Metaspace unless told never to."""

    def steps(part, key):
        return [part] if isinstance(part, dict) and key not in part else (part or {}).get(key, [])

    for step in steps(parsed.get("normalizer"), "normalizers"):
        if step.get("type") == "Prepend":
            return True
    return any(
        step.get("type") == "Metaspace"
        and step.get("prepend_scheme", "always") != "never"
        and step.get("add_prefix_space", True)
        for step in steps(parsed.get("pre_tokenizer"), "pretokenizers")
    )
