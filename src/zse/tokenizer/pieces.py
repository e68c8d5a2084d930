"""WordPiece and Unigram tokenizers: normalized in Python (normalize.py), segmented in C (csrc/pieces.c).

WordPiece: BERT (Devlin et al. 2018). Unigram: SentencePiece (Kudo and Richardson 2018), the vocabularies of XLM-R and
T5. Control tokens are not in the tables, so that no text of a user becomes one."""

import base64
import ctypes
import struct
from array import array
from collections.abc import Sequence
from typing import Any

from zse.errors import FormatError
from zse.tokenizer import native
from zse.tokenizer.base import Tokenizer, control_pattern, cut_control
from zse.tokenizer.normalize import METASPACE, UnknownStep, steps_of

UNKNOWN_PENALTY = 10.0  # below the least likely token of a Unigram
CONTINUING = "##"
UNKNOWN, CONTROL = 2, 3  # token types of GGUF


class PieceTokenizer(Tokenizer):
    """tokens: texts by id, None for a hole. model, normalizer, pre_tokenizer: as in a tokenizer.json; scores: of a
    Unigram. special: ids of control and unknown tokens, with their entries in a tokenizer.json. normalize.UnknownStep:
    a step that is not known; ValueError, KeyError, TypeError: damaged."""

    def __init__(
        self,
        tokens: list[str | None],
        model: dict,
        normalizer: dict | None,
        pre_tokenizer: dict | None,
        special: dict[int, dict],
        scores: list[float] | None = None,
    ):
        self._handle: int | None = None
        self._tokens, self._special = tokens, special
        self._ids = {text: id for id, text in enumerate(tokens) if text is not None}
        self._steps = [*steps_of(normalizer), *steps_of(pre_tokenizer)]
        self._prefix = "" if scores is not None else model.get("continuing_subword_prefix", CONTINUING)
        self._is_unigram = scores is not None
        self._pattern = control_pattern(special)
        self.vocab_size, self.strips_space = len(tokens), True
        unknown = model.get("unk_id") if self._is_unigram else self._ids.get(model.get("unk_token", "[UNK]"))
        if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
            raise ValueError("the model has no unknown token")
        if unknown in special and "unk" not in special[unknown]["content"].lower():
            raise ValueError(f"the unknown token is {special[unknown]['content']!r}, a control token")
        self.unknown_id = unknown
        hidden = special.keys() | {unknown}
        texts = [b"" if id in hidden else (text or "").encode() for id, text in enumerate(tokens)]
        data = b"".join([part for text in texts for part in (struct.pack("<Q", len(text)), text)])
        numbers = array("d", scores or ())
        if any(not abs(score) < 1e30 for score in numbers):
            raise ValueError("a score is not a number")
        by_byte = [self._ids.get(f"<0x{byte:02X}>", -1) for byte in range(256)]
        uses_bytes = self._is_unigram and model.get("byte_fallback") and min(by_byte) >= 0
        self._byte_of = {id: byte for byte, id in enumerate(by_byte)} if uses_bytes else {}
        byte_ids = array("i", by_byte)
        self._library, error = native.library(), native.Error()
        self._handle = self._library.zp_new(
            *(data, len(data), len(texts), numbers.buffer_info()[0] if self._is_unigram else None),
            *(min(numbers, default=0.0) - UNKNOWN_PENALTY, unknown, self._prefix.encode(), len(self._prefix.encode())),
            model.get("max_input_chars_per_word", 100),
            byte_ids.buffer_info()[0] if uses_bytes else None,
            ctypes.byref(error),
        )
        if not self._handle:
            if error.field < 0:
                raise MemoryError(error.reason.decode())
            raise ValueError(error.reason.decode())

    def __del__(self):
        if getattr(self, "_handle", None):
            self._library.zp_free(self._handle)
            self._handle = None

    def token_bytes(self, id: int) -> bytes:
        if not 0 <= id < self.vocab_size:
            raise IndexError(f"token id {id} is not in 0..{self.vocab_size - 1}")
        text = self._tokens[id] or ""
        if id in self._special:
            return text.encode()
        if id in self._byte_of:
            return bytes([self._byte_of[id]])
        if self._is_unigram:
            return text.replace(METASPACE, " ").encode()
        return (text.removeprefix(self._prefix) if text.startswith(self._prefix) else f" {text}").encode()

    def is_special(self, id: int) -> bool:
        return id in self._special

    def find(self, text: str) -> int | None:
        return self._ids.get(text)

    def control_texts(self) -> list[str]:
        return [entry["content"] for entry in self._special.values()]

    def _encode(self, text: str, special: bool, barriers: Sequence[int]) -> list[int]:
        text = text.encode("utf-8", "replace").decode()  # the separator of pieces is a lone surrogate
        if not special or self._pattern is None:
            return self._pieces(text)
        ids: list[int] = []
        for part in cut_control(self._pattern, text, barriers):
            ids += [part] if isinstance(part, int) else self._pieces(part)
        return ids

    def _pieces(self, text: str) -> list[int]:
        for step in self._steps:
            text = step(text)
        data = text.encode("utf-8", "surrogatepass").replace(b"\xed\xa0\x80", b"\xff")
        out = ctypes.c_void_p()
        count = self._library.zp_encode(self._handle, data, len(data), ctypes.byref(out))
        if count < 0:
            raise MemoryError("encode") if count == -1 else ValueError("a text of 2 GiB or more")
        try:
            return memoryview(ctypes.string_at(out, count * 4)).cast("i").tolist() if count else []
        finally:
            self._library.zt_release(out)

    def _decode(self, ids: Sequence[int], skip_special: bool) -> bytes:
        return b"".join(self.token_bytes(id) for id in ids if not (skip_special and id in self._special))


def from_json(parsed: dict) -> PieceTokenizer:
    """The tokenizer of a parsed tokenizer.json whose model is WordPiece or Unigram; see PieceTokenizer for errors."""
    model, added = parsed["model"], parsed.get("added_tokens") or []
    vocabulary = model["vocab"]
    scores: list[float] | None = None
    if isinstance(vocabulary, list):
        scores = [float(score) for _, score in vocabulary]
        ids = {text: id for id, (text, _) in enumerate(vocabulary)}
        known = len(vocabulary)
    else:
        ids, known = dict(vocabulary), len(vocabulary)
    special = {int(token["id"]): token for token in added if token.get("special")}
    ids |= {token["content"]: int(token["id"]) for token in added}
    size = 1 + max(ids.values())
    if size > 4 * (known + len(added)) or min(ids.values()) < 0:
        raise ValueError(f"token id {size - 1} in a vocabulary of {known}")
    tokens: list[str | None] = [None] * size
    for text, id in ids.items():
        tokens[id] = text
    if scores is not None:
        scores += [0.0] * (size - len(scores))
    if any(not token.get("special") for token in added):
        raise UnknownStep("added tokens that are not special")
    return PieceTokenizer(tokens, model, parsed.get("normalizer"), parsed.get("pre_tokenizer"), special, scores)


def from_gguf(fields: dict, path: str = "GGUF") -> PieceTokenizer:
    """The tokenizer of GGUF metadata whose tokenizer.ggml.model is bert or t5. fields: as of bpe.from_gguf().
    FormatError."""
    key = "tokenizer.ggml.%s"
    try:
        texts = _strings(fields[key % "tokens"])
        types = memoryview(fields[key % "token_type"].raw).cast("B").cast("i").tolist()
        ids = {
            name: fields.get(key % f"{name}_token_id")
            for name in ("bos", "eos", "unknown", "padding", "seperator", "cls")
        }
        special = {
            id: {"content": texts[id], "special": True} for id, kind in enumerate(types) if kind in (UNKNOWN, CONTROL)
        }
        named = [id for id in ids.values() if isinstance(id, int) and id < len(texts)]
        special |= {id: {"content": texts[id], "special": True} for id in named}
        if fields[key % "model"] == "bert":
            tokenizer = _bert_gguf(fields, texts, ids, special)
        else:
            tokenizer = _unigram_gguf(fields, texts, ids, special)
    except (KeyError, AttributeError, TypeError, ValueError, struct.error, IndexError) as error:
        raise FormatError(path, 0, "tokenizer.ggml", f"damaged: {type(error).__name__}: {error}") from None
    first, last = (
        ids["cls"] if ids["bos"] is None else ids["bos"],
        ids["seperator"] if ids["eos"] is None else ids["eos"],
    )
    tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id = first, last, ids["padding"]
    tokenizer.adds_bos, tokenizer.adds_eos = first is not None, last is not None
    return tokenizer


def _strings(array: Any) -> list[str]:
    texts, raw, at = [], bytes(array.raw), 0
    for _ in range(array.count):
        (size,) = struct.unpack_from("<Q", raw, at)
        texts.append(raw[at + 8 : at + 8 + size].decode("utf-8", "replace"))
        at += 8 + size
    return texts


def _bert_gguf(fields: dict, texts: list[str], ids: dict, special: dict[int, dict]) -> PieceTokenizer:
    """Words begin with U+2581 there, and what continues them with nothing."""
    tokens: list[str | None] = [
        text if id in special else text[1:] if text.startswith(METASPACE) else CONTINUING + text
        for id, text in enumerate(texts)
    ]
    lowers = bool(fields.get("tokenizer.ggml.normalizer.lowercase", True))
    strips = bool(fields.get("tokenizer.ggml.normalizer.strip_accents", lowers))
    normalizer = {"type": "BertNormalizer", "lowercase": lowers, "strip_accents": strips}
    unknown = {"unk_token": tokens[100 if ids["unknown"] is None else ids["unknown"]]}
    return PieceTokenizer(tokens, unknown, normalizer, {"type": "BertPreTokenizer"}, special)


def _unigram_gguf(fields: dict, texts: list[str], ids: dict, special: dict[int, dict]) -> PieceTokenizer:
    scores = [float(score) for score in memoryview(fields["tokenizer.ggml.scores"].raw).cast("B").cast("f")]
    if len(scores) != len(texts):
        raise ValueError(f"{len(scores)} scores of {len(texts)} tokens")
    rules = fields.get("tokenizer.ggml.precompiled_charsmap")
    normalizer = None
    if rules is not None and rules.count:
        data = base64.b64encode(bytes(rules.raw)).decode()
        normalizer = {"type": "Precompiled", "precompiled_charsmap": data}
    adds = fields.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[dict] = [{"type": "Metaspace", "prepend_scheme": "always" if adds else "never"}]
    if fields.get("tokenizer.ggml.remove_extra_whitespaces", True):
        steps.insert(0, {"type": "WhitespaceSplit"})
    model = {"unk_id": 2 if ids["unknown"] is None else ids["unknown"]}
    tokenizer = PieceTokenizer(
        list(texts), model, normalizer, {"type": "Sequence", "pretokenizers": steps}, special, scores
    )
    tokenizer.pair_separators = 2  # XLM-R: </s></s>
    return tokenizer
