"""Byte-pair tokenizers over the C tables: GPT-2's byte-level BPE and SentencePiece's BPE, from GGUF's arrays or an
image.

Methods: byte-level BPE (Radford et al. 2019; openai/gpt-2 encoder.py), SentencePiece BPE with byte fallback (Kudo and
Richardson 2018); token types and defaults as llama.cpp reads them, so that a GGUF file means the same here.
"""

import ctypes
import struct
from array import array
from collections.abc import Sequence
from typing import Any

from zse.errors import FormatError, UnsupportedError
from zse.lazy import unicodedata
from zse.tokenizer import native
from zse.tokenizer.base import Tokenizer

BPE, SPM = 0, 1
MODELS = {"gpt2": BPE, "llama": SPM, "gemma4": BPE}

NONE, GPT2, SMOLLM, LLAMA3, QWEN2, TEKKEN, DEFAULT, O200K, TEXT, DEEPSEEK3 = range(10)
QWEN35, MINICPM5, SEED, KIMI, DEEPSEEK_LLM = range(10, 15)
# tokenizer.ggml.pre -> (pattern, whole pieces that are tokens are not merged, BOS unless the file says otherwise).
PRE_TOKENIZERS = {
    name: (pattern, is_whole, has_bos)
    for names, pattern, is_whole, has_bos in (
        ("default", DEFAULT, False, False),
        ("gpt-2 phi-2 mpt olmo jais trillion gigachat mellum exaone4 a.x-4.0 modern-bert", GPT2, False, False),
        ("smollm starcoder refact command-r codeshell exaone mellum2 minerva-7b", SMOLLM, False, False),
        ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2 midm-2.0", LLAMA3, True, True),
        ("dbrx smaug-bpe chatglm-bpe", LLAMA3, False, False),
        ("glm4 glm5", LLAMA3, True, False),
        ("minicpm5", MINICPM5, True, False),
        ("qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan solar-open grok-2 kormo f2llmv2", QWEN2, False, False),
        ("qwen35", QWEN35, False, False),
        ("seed-coder", SEED, False, False),
        ("kimi-k2", KIMI, False, False),
        ("tekken", TEKKEN, True, True),
        ("gpt-4o llama4 minimax-m2 kanana2", O200K, False, False),
        ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", DEEPSEEK3, False, False),
        ("deepseek-llm", DEEPSEEK_LLM, False, False),
    )
    for name in names.split()
}

# Tokens that end a turn or a text, whatever eos_token_id says (the names that published chat models use).
END_TEXTS = """<|im_end|> <|eot_id|> <|eom_id|> <|end|> <|return|> <|call|> <end_of_turn> <|endoftext|> <|end_of_text|>
    <|end_of_sentence|> <turn|> <｜end▁of▁sentence｜> <EOT> _<EOT> <end_of_utterance>""".split()
HARMONY = "<|return|>", "<|call|>"  # where both are, <|end|> ends a message of several (gpt-oss)
# Files exist that mark these as ordinary text; from user text they would forge a turn.
CONTROL_TEXTS = (
    """<|turn> <|im_start|> <|start_header_id|> <|end_header_id|> <|begin_of_text|> <start_of_turn> <|user|> <|assistant|>
    <|system|>""".split()
    + END_TEXTS
)

UNKNOWN, CONTROL = 2, 3
_SPECIAL = (UNKNOWN, CONTROL)
_IGNORE_MERGES, _ADD_SPACE_PREFIX = 2, 1
_ARRAYS = ("tokens", "scores", "token_type", "merges")  # by the numbers that zt_error calls them; 4 is an image
# magic, vocab_size, bos, eos, unknown, pad, adds_bos, adds_eos, strips_space, is_nfc, number of eos_ids; then those ids
_SECTION = struct.Struct("<8s10i")
_SECTION_MAGIC = b"ZSETOK\x01\n"


class BPETokenizer(Tokenizer):
    """A tokenizer in C. Made by from_gguf() or from_section().

    is_nfc: texts are brought to Unicode's normal form C first (Qwen's tokenizer.json asks for it).
    """

    is_nfc = False

    def __init__(self, handle: int, keep: object = None):
        self._library = native.library()
        self._handle: int | None = handle
        self._keep = keep
        self.vocab_size = self._library.zt_num_tokens(handle)

    def __del__(self):
        if getattr(self, "_handle", None):
            self._library.zt_free(self._handle)
            self._handle = None

    def token_bytes(self, id: int) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        size = self._library.zt_token_bytes(self._handle, id, buffer, 64)
        if size > 64:
            buffer = ctypes.create_string_buffer(size)
            self._library.zt_token_bytes(self._handle, id, buffer, size)
        if size < 0:
            raise IndexError(f"token id {id} is not in 0..{self.vocab_size - 1}")
        return buffer.raw[:size]

    def is_special(self, id: int) -> bool:
        return self._library.zt_token_type(self._handle, id) in _SPECIAL

    def find(self, text: str) -> int | None:
        data = text.encode("utf-8", "surrogatepass")
        found = self._library.zt_find(self._handle, data, len(data))
        return None if found < 0 else found

    def control_texts(self) -> list[str]:
        return [self.text_of(id) for id in range(self.vocab_size) if self.is_special(id)]

    def control_first_characters(self) -> str:
        bits = ctypes.create_string_buffer(32)
        self._library.zt_control_first(self._handle, bits)
        found = bytes(byte for byte in range(256) if bits.raw[byte >> 3] >> (byte & 7) & 1)
        return found.decode() if found.isascii() else super().control_first_characters()

    def ends_inside_control(self, text: str) -> bool:
        data = text.encode("utf-8", "surrogatepass")
        return bool(self._library.zt_ends_inside(self._handle, data, len(data)))

    def _encode(self, text: str, special: bool, barriers: Sequence[int]) -> list[int]:
        data = text.encode("utf-8", "surrogatepass")
        if self.is_nfc and len(data) != len(text):
            data, barriers = _normalized(data, barriers)
        return self.encode_bytes(data, special=special, barriers=barriers)

    def encode_bytes(self, data: bytes, *, special: bool = False, barriers: Sequence[int] = ()) -> list[int]:
        """As encode() of any bytes, UTF-8 or not, with nothing added at the ends."""
        out = ctypes.c_void_p()
        stops = array("q", barriers)
        count = self._library.zt_encode(
            self._handle, data, len(data), 1 if special else 0, stops.buffer_info()[0], len(stops), ctypes.byref(out)
        )
        if count < 0:
            raise MemoryError("encode") if count == -1 else ValueError("a text of 2 GiB or more")
        try:
            return memoryview(ctypes.string_at(out, count * 4)).cast("i").tolist()
        finally:
            self._library.zt_release(out)

    def _decode(self, ids: Sequence[int], skip_special: bool) -> bytes:
        try:
            numbers = array("i", ids)
        except OverflowError:
            raise IndexError(f"a token id is not in 0..{self.vocab_size - 1}") from None
        out = ctypes.c_void_p()
        size = self._library.zt_decode(
            self._handle, numbers.buffer_info()[0], len(numbers), skip_special, ctypes.byref(out)
        )
        if size == -1:
            raise MemoryError("decode")
        if size < 0:
            raise IndexError(f"token id {ids[-2 - size]} is not in 0..{self.vocab_size - 1}")
        try:
            return ctypes.string_at(out, size)
        finally:
            self._library.zt_release(out)

    def to_section(self) -> bytes:
        """The tokenizer as bytes from which from_section() starts without building anything: tables and all."""
        ids = (-1 if id is None else id for id in (self.bos_id, self.eos_id, self.unknown_id, self.pad_id))
        flags = self.adds_bos, self.adds_eos, self.strips_space, self.is_nfc
        head = _SECTION.pack(_SECTION_MAGIC, self.vocab_size, *ids, *flags, len(self.eos_ids))
        head += struct.pack(f"<{len(self.eos_ids)}i", *sorted(self.eos_ids))
        head += bytes(-len(head) % 64)
        size = self._library.zt_image(self._handle, None, 0)
        image = ctypes.create_string_buffer(size)
        self._library.zt_image(self._handle, image, size)
        return head + image.raw


def from_gguf(fields: dict, path: str = "GGUF", pre_tokenizer: tuple[int, bool, bool] | None = None) -> BPETokenizer:
    """The tokenizer that the `tokenizer.ggml.*` metadata describes.

    fields: full keys; strings, numbers, and arrays as objects with `.raw` (the payload as in the file), `.count`,
    `.type`.
    pre_tokenizer: as a value of PRE_TOKENIZERS, for callers that know better than tokenizer.ggml.pre.
    FormatError: damaged. UnsupportedError: another kind of tokenizer or pre-tokenizer.
    """
    name = fields.get("tokenizer.ggml.model")
    if not isinstance(name, str) or name not in MODELS:
        raise UnsupportedError("tokenizer", name, MODELS)
    model = MODELS[name]
    pre, ignore_merges, default_bos = NONE, False, True
    if model == BPE and pre_tokenizer is not None:
        pre, ignore_merges, default_bos = pre_tokenizer
    elif name == "gemma4":  # merges of text; such files name no pre-tokenizer, and llama.cpp adds BOS whatever they say
        pre, ignore_merges, default_bos = TEXT, False, True
    elif model == BPE:
        pre_name = fields.get("tokenizer.ggml.pre", "default")
        if not isinstance(pre_name, str) or pre_name not in PRE_TOKENIZERS:
            raise UnsupportedError("pre-tokenizer", pre_name, sorted(PRE_TOKENIZERS))
        pre, ignore_merges, default_bos = PRE_TOKENIZERS[pre_name]
    strips_space = bool(fields.get("tokenizer.ggml.add_space_prefix", model == SPM)) and model == SPM
    arrays: dict[str, Any] = {}
    for field in _ARRAYS:
        key = "tokenizer.ggml." + field
        array = arrays[field] = fields.get(key)
        kind = {"scores": "f32", "token_type": "i32"}.get(field, "string")
        if array is None:
            if field == "tokens" or field == ("scores" if model == SPM else "merges"):
                raise FormatError(path, 0, key, "is missing")
        elif getattr(array, "type", None) != kind:
            raise FormatError(path, 0, key, f"is not an array of {kind}")
        elif kind != "string" and len(array.raw) != 4 * array.count:
            raise FormatError(path, 0, key, "are not numbers of 4 bytes each")

    count = arrays["tokens"].count
    ids = {key: _id(fields, key, count, path) for key in ("bos", "eos", "eot", "eom", "unknown", "padding")}
    control = b"".join(struct.pack("<Q", len(data)) + data for data in (text.encode() for text in CONTROL_TEXTS))
    control_ids = struct.pack("<4i", *(-1 if ids[key] is None else ids[key] for key in ("bos", "eos", "eot", "eom")))
    words, keep = dict.fromkeys(native.SOURCE_FIELDS, 0), []

    def put(field, data, number):
        words[field], owner = native.address(data)
        keep.append(owner)
        words["num_" + field] = number
        if field + "_bytes" in words:
            words[field + "_bytes"] = len(data)

    for field in ("tokens", "token_type", "scores" if model == SPM else "merges"):
        if arrays[field] is not None:
            put({"token_type": "types"}.get(field, field), arrays[field].raw, arrays[field].count)
    put("control", control, len(CONTROL_TEXTS))
    put("control_ids", control_ids, 4)
    words["model"], words["pre"] = model, pre
    words["flags"] = (_ADD_SPACE_PREFIX if strips_space else 0) | (_IGNORE_MERGES if ignore_merges else 0)
    words["unknown_id"] = (1 << 64) - 1 if ids["unknown"] is None else ids["unknown"]

    error = native.Error()
    packed = (ctypes.c_uint64 * len(words))(*words.values())
    handle = native.library().zt_new(packed, ctypes.byref(error))
    if not handle:
        refused = arrays[_ARRAYS[error.field]] if error.field in range(len(_ARRAYS)) else None
        raise _refused(error, path, getattr(refused, "offset", 0) + error.offset)
    tokenizer = BPETokenizer(handle)
    tokenizer.bos_id, tokenizer.eos_id = ids["bos"], ids["eos"]
    tokenizer.unknown_id, tokenizer.pad_id = ids["unknown"], ids["padding"]
    tokenizer.adds_bos = bool(fields.get("tokenizer.ggml.add_bos_token", default_bos)) and ids["bos"] is not None
    tokenizer.adds_eos = bool(fields.get("tokenizer.ggml.add_eos_token", False)) and ids["eos"] is not None
    tokenizer.strips_space = strips_space
    tokenizer.eos_ids = frozenset(id for key in ("eos", "eot", "eom") if (id := ids[key]) is not None) | ends_of(
        tokenizer
    )
    return tokenizer


def ends_of(tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens of END_TEXTS that a vocabulary has."""
    found = {text: tokenizer.find(text) for text in END_TEXTS}
    if all(found[text] is not None for text in HARMONY):
        found["<|end|>"] = None
    return frozenset(id for id in found.values() if id is not None)


def is_section(section: bytes | bytearray | memoryview) -> bool:
    """Whether the bytes begin as a section of this version of the tables does."""
    return bytes(section[: len(_SECTION_MAGIC)]) == _SECTION_MAGIC


def from_section(section: bytes | bytearray | memoryview, path: str = "tokenizer") -> BPETokenizer:
    """The tokenizer that to_section() wrote. FormatError: damaged, or of another version."""
    view = memoryview(section).cast("B")
    if len(view) < _SECTION.size or bytes(view[:8]) != _SECTION_MAGIC:
        raise FormatError(path, 0, "tokenizer", "not a tokenizer section of this version; convert the model again")
    _, size, bos, eos, unknown, pad, adds_bos, adds_eos, strips_space, is_nfc, num_ends = _SECTION.unpack_from(view)
    start = _SECTION.size + 4 * num_ends
    start += -start % 64
    if not 0 <= num_ends <= 64 or start >= len(view):
        raise FormatError(path, 48, "tokenizer", "the end-of-generation ids do not fit in the section")
    ends = struct.unpack_from(f"<{num_ends}i", view, _SECTION.size)
    # A copy that starts on a page: the tables are used where they lie and need 8-byte alignment.
    image = bytearray(view[start:])
    where, owner = native.address(image)
    error = native.Error()
    handle = native.library().zt_open_image(where, len(image), ctypes.byref(error))
    if not handle:
        raise _refused(error, path, start + error.offset)
    tokenizer = BPETokenizer(handle, owner)
    if tokenizer.vocab_size != size or any(not -1 <= id < size for id in (bos, eos, unknown, pad, *ends)) or -1 in ends:
        raise FormatError(path, 8, "tokenizer", "a token id is outside the vocabulary")
    tokenizer.bos_id, tokenizer.eos_id, tokenizer.unknown_id, tokenizer.pad_id = (
        None if id < 0 else id for id in (bos, eos, unknown, pad)
    )
    tokenizer.adds_bos, tokenizer.adds_eos, tokenizer.strips_space, tokenizer.is_nfc = map(
        bool, (adds_bos, adds_eos, strips_space, is_nfc)
    )
    tokenizer.eos_ids = frozenset(ends)
    return tokenizer


def _normalized(data: bytes, barriers: Sequence[int]) -> tuple[bytes, list[int]]:
    """UTF-8 in normal form C, part by part between the barriers, and where the barriers are then."""
    parts, moved, at = [], [], 0
    for start, end in zip([0, *barriers], [*barriers, len(data)], strict=True):
        part = data[start:end].decode("utf-8", "surrogatepass")
        parts.append(unicodedata.normalize("NFC", part).encode("utf-8", "surrogatepass"))
        at += len(parts[-1])
        moved.append(at)
    return b"".join(parts), moved[:-1]


def _id(fields: dict, key: str, count: int, path: str) -> int | None:
    """A token id from the metadata; None when absent or -1 (what converters write for none)."""
    field = f"tokenizer.ggml.{key}_token_id"
    value = fields.get(field)
    if value is None or value in (-1, 0xFFFFFFFF):
        return None
    if type(value) is not int or not 0 <= value < count:
        raise FormatError(path, 0, field, f"{value!r} is not a token id (0 to {count - 1})")
    return value


def _refused(error: native.Error, path: str, offset: int) -> Exception:
    if error.field < 0:
        return MemoryError("not enough memory for the tokenizer")
    field = "tokenizer.ggml." + _ARRAYS[error.field] if error.field < len(_ARRAYS) else "tokenizer"
    return FormatError(path, offset, field, error.reason.decode())
