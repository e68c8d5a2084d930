"""Small vocabularies, as the fields of a GGUF file."""

import struct

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


class Array:
    """An array of GGUF metadata as zse.formats hands it over."""

    def __init__(self, type: str, count: int, raw: bytes):
        self.type, self.count, self.raw, self.offset = type, count, memoryview(raw), 1000


def strings(items) -> Array:
    data = [item.encode() if isinstance(item, str) else item for item in items]
    return Array("string", len(data), b"".join(struct.pack("<Q", len(item)) + item for item in data))


def numbers(letter: str, items) -> Array:
    return Array({"f": "f32", "i": "i32"}[letter], len(items), struct.pack(f"<{len(items)}{letter}", *items))


def alphabet() -> list[str]:
    """GPT-2's byte alphabet: the character of each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(byte if byte in plain else next(rest)) for byte in range(256)]


def bpe_fields(merges=(), special=(), user=(), pre="gpt-2", extra=(), **more) -> dict:
    """Fields of a byte-level vocabulary: 256 bytes, the merges' results, extra, control and user-defined tokens."""
    tokens = [*alphabet(), *dict.fromkeys(merge.replace(" ", "") for merge in merges), *extra]
    types = [NORMAL] * len(tokens) + [CONTROL] * len(special) + [USER_DEFINED] * len(user)
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": strings([*tokens, *special, *user]),
        "token_type": numbers("i", types),
        "merges": strings(merges),
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def spm_fields(pieces: dict[str, float], special=("<unk>", "<s>", "</s>"), user=(), with_bytes=True, **more) -> dict:
    """Fields of a SentencePiece vocabulary: special tokens, byte tokens, pieces with their scores, user-defined
    tokens."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)] if with_bytes else []
    tokens = [*special, *byte_tokens, *pieces, *user]
    types = [UNKNOWN if name == "<unk>" else CONTROL for name in special]
    types += [BYTE] * len(byte_tokens) + [NORMAL] * len(pieces) + [USER_DEFINED] * len(user)
    scores = [0.0] * (len(special) + len(byte_tokens)) + list(pieces.values()) + [0.0] * len(user)
    fields = {
        "model": "llama",
        "tokens": strings(tokens),
        "scores": numbers("f", scores),
        "token_type": numbers("i", types),
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
