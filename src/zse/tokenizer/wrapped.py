"""Tokenizers that only the `tokenizers` library reads, behind our interface."""

import re
import sys
from collections.abc import Sequence

import msgspec

from zse.errors import ConfigError, FormatError, UnsupportedError
from zse.lazy import tokenizers
from zse.tokenizer.base import Tokenizer, control_pattern, cut_control

DECODERS = ("ByteLevel", "ByteFallback", "Metaspace")
# Every byte of UTF-8, and characters that few vocabularies have: for an unknown token that is not there the library
# raises when it needs it.
_RARE = "".join(
    map(chr, (*range(0x80), *range(0x80, 0x800, 31), *range(0x800, 0xD800, 1039), *range(0xE000, 0x110000, 4099)))
)


class WrappedTokenizer(Tokenizer):
    """A tokenizer.json in the `tokenizers` library. Constant after loading: special tokens are cut out here, because
    the library's switch for that is a property of the whole tokenizer.

    data: the file; parsed: its JSON, parts of which may be msgspec.Raw. FormatError: damaged. UnsupportedError: an
    unknown kind of decoder. ConfigError: the library is not installed.
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
            self._library.encode(_RARE, add_special_tokens=False)
        except ImportError:
            raise ConfigError(
                f"{path}: this kind of tokenizer.json is read by the package tokenizers; run: {sys.executable} -m pip install "
                "tokenizers (or serve a GGUF file of the model)"
            ) from None
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
        if not 0 < self.vocab_size <= 4 * (len(vocabulary) + len(added)):
            raise FormatError(
                path, 0, "tokenizer.json", f"token id {self.vocab_size - 1} in a vocabulary of {len(vocabulary)}"
            )
        kinds = _kinds(parsed.get("decoder"))
        if not kinds & set(DECODERS):
            raise UnsupportedError("tokenizer decoder", ", ".join(sorted(kinds)) or None, DECODERS)
        self._is_byte_level = "ByteLevel" in kinds
        self.strips_space = not self._is_byte_level and _adds_space(parsed)
        self._added = {int(token["id"]): token["content"] for token in added}
        self._control = {int(token["id"]): token for token in added if token.get("special")}
        self._control_pattern = control_pattern(self._control)
        self._bytes_of: dict[str, int] = {}
        for id, content in self._added.items():
            piece = self._library.id_to_token(id) if 0 <= id < self.vocab_size else content
            if piece not in (content, None, ""):
                reason = f"{content!r} has id {id}, which the vocabulary gives to {piece!r}: each text needs its own"
                raise FormatError(path, 0, "added_tokens", reason)
        self._never = {id for id, token in self._control.items() if "unk" not in token["content"].lower()}

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
            return self._plain(self._library, text)
        ids, library = [], self._library
        for part in cut_control(self._control_pattern, text, barriers):
            if isinstance(part, int):
                ids.append(part)
                library = self._inner
            else:
                ids += self._plain(library, part)
        return ids

    def _plain(self, library, text: str) -> list[int]:
        """A user's text, which gives no control token (an unknown one where a character has none): Unigram takes "</s>"
        for one piece, and a file may name any as its unknown token. Such a piece is encoded in two parts, a single
        character is left out."""
        encoded = library.encode(text, add_special_tokens=False)
        ids: list[int] = encoded.ids
        if self._never.isdisjoint(ids):
            return ids
        cuts, gone = {0, len(text)}, set()
        for id, (begin, end) in zip(ids, encoded.offsets, strict=True):
            if id in self._never and end > begin:
                cuts |= {begin, begin + 1, end}
                if end - begin == 1:
                    gone.add(begin)
        if cuts == {0, len(text)}:
            return [id for id in ids if id not in self._never]
        places, out = sorted(cuts), []
        for begin, end in zip(places, places[1:]):
            if begin not in gone:
                out += self._plain(library if begin == 0 else self._inner, text[begin:end])
        return out

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
