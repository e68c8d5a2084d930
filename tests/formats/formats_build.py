"""Small model files made byte by byte, also wrong ones; the places of numbers are recorded for tests to change."""

import json
import struct

import numpy as np

GGUF_TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "BF16": 30,
    "Q2_K": 10,
    "Q3_K": 11,
    "IQ2_XXS": 16,
    "IQ2_XS": 17,
    "IQ3_XXS": 18,
    "IQ1_S": 19,
    "IQ4_NL": 20,
    "IQ3_S": 21,
    "IQ2_S": 22,
    "IQ4_XS": 23,
    "IQ1_M": 29,
    "TQ1_0": 34,
    "TQ2_0": 35,
    "MXFP4": 39,
    "NVFP4": 40,
    "Q1_0": 41,
    "Q2_0": 42,
}
BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ3_XXS": (256, 98),
    "IQ1_S": (256, 50),
    "IQ4_NL": (32, 18),
    "IQ3_S": (256, 110),
    "IQ2_S": (256, 82),
    "IQ4_XS": (256, 136),
    "IQ1_M": (256, 56),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
    "NVFP4": (64, 36),
    "Q1_0": (128, 18),
    "Q2_0": (64, 18),
}
F16_FIELDS = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "TQ1_0": [52],
    "TQ2_0": [64],
    "MXFP4": [],
    "NVFP4": [],
    "IQ1_M": [],
} | dict.fromkeys(("Q1_0", "Q2_0", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S"), [0])
VALUE_TYPES = {
    "u8": (0, "B"),
    "i8": (1, "b"),
    "u16": (2, "H"),
    "i16": (3, "h"),
    "u32": (4, "I"),
    "i32": (5, "i"),
    "f32": (6, "f"),
    "bool": (7, "B"),
    "u64": (10, "Q"),
    "i64": (11, "q"),
    "f64": (12, "d"),
}


def random_blocks(rng, type: str, count: int, size: float | None = None) -> bytes:
    """Random bits, with finite f16 fields: zeros and subnormals among them, or about `size`."""
    raw = rng.integers(0, 256, (count, BLOCKS[type][1]), dtype=np.uint8)

    def fields() -> np.ndarray:
        spread = 10.0 ** rng.integers(-8, 2, count) if size is None else size
        return (rng.normal(size=count) * spread).astype(np.float16)

    for start in F16_FIELDS[type]:
        raw[:, start : start + 2] = fields()[:, None].view(np.uint8)
    if type == "MXFP4":  # from 250 on, twelve times the scale is infinite
        raw[:, 0] = raw[:, 0] % 250 if size is None else 127 + np.rint(np.log2(size)) + raw[:, 0] % 4
    if type == "NVFP4":
        raw[:, :4] = raw[:, :4] & 127 if size is None else raw[:, :4] % 8 + 8  # without a sign; 2**-6 to 2**-5
    if type == "IQ1_M":  # its factor is the top quarters of four words
        quarters = fields().view(np.uint16)[:, None] >> np.array([0, 4, 8, 12], np.uint16) & 15
        raw[:, 49:56:2] = raw[:, 49:56:2] & 15 | quarters.astype(np.uint8) << 4
    return raw.tobytes()


class Bytes(bytearray):
    """Bytes with the (offset, size) of every number in `numbers`."""

    def __init__(self):
        super().__init__()
        self.numbers = []

    def put(self, letter: str, value) -> None:
        self.numbers.append((len(self), struct.calcsize(f"<{letter}")))
        self += struct.pack(f"<{letter}", value)

    def text(self, value: "str | bytes") -> None:
        data = value.encode() if isinstance(value, str) else value
        self.put("Q", len(data))
        self += data

    def value(self, type: str, value) -> None:
        if type == "string":
            self.put("I", 8)
            self.text(value)
        elif type.endswith("[]"):
            self.put("I", 9)
            item = type[:-2]
            self.put("I", 8 if item == "string" else VALUE_TYPES[item][0])
            self.put("Q", len(value))
            for each in value:
                if item == "string":
                    self.text(each)
                else:
                    self.put(VALUE_TYPES[item][1], each)
        else:
            self.put("I", VALUE_TYPES[type][0])
            self.put(VALUE_TYPES[type][1], value)


class Tensor:
    """One tensor; shape outermost first. `offset` and `dimensions` override what is written."""

    def __init__(self, name, type, shape, data=None, *, number=None, offset=None, dimensions=None):
        self.name, self.type, self.shape, self.number = name, type, shape, number
        elements, block = BLOCKS[type]
        nbytes = int(np.prod(shape, dtype=object)) // elements * block
        if data is None:
            rng = np.random.default_rng(len(name))
            if elements == 1:
                values = rng.normal(size=int(np.prod(shape))).astype(np.float32)
                data = {
                    "F32": values,
                    "F16": values.astype(np.float16),
                    "BF16": (values.view(np.uint32) >> 16).astype(np.uint16),
                }[type].tobytes()
            else:
                # Bytes below 64 keep every f16 finite.
                data = rng.integers(0, 64, nbytes, dtype=np.uint8).tobytes()
        assert len(data) == nbytes
        self.data, self.offset, self.dimensions = data, offset, dimensions or tuple(reversed(shape))


def gguf(metadata, tensors, *, version=3, magic=b"GGUF", alignment=32, num_tensors=None, num_keys=None) -> Bytes:
    """metadata: (key, type, value) triples; type as "u32", "string", "f32[]", "string[]"."""
    out = Bytes()
    out += magic
    out.put("I", version)
    out.put("Q", len(tensors) if num_tensors is None else num_tensors)
    out.put("Q", len(metadata) if num_keys is None else num_keys)
    for key, type, value in metadata:
        out.text(key)
        out.value(type, value)
    place = 0
    for tensor in tensors:
        out.text(tensor.name)
        out.put("I", len(tensor.dimensions))
        for size in tensor.dimensions:
            out.put("Q", size)
        out.put("I", GGUF_TYPES[tensor.type] if tensor.number is None else tensor.number)
        out.put("Q", place if tensor.offset is None else tensor.offset)
        place += len(tensor.data) + -len(tensor.data) % alignment
    for tensor in tensors:
        out += bytes(-len(out) % alignment)
        out += tensor.data
    return out


def llama_metadata(**changes):
    """A tiny llama's metadata; changes: key with dots as __ -> (type, value), or None to leave it out."""
    pieces = [b"<unk>", b"<s>", b"</s>", *(b"t%d" % i for i in range(61))]
    values = {
        "general.architecture": ("string", "llama"),
        "general.name": ("string", "Tiny"),
        "llama.block_count": ("u32", 1),
        "llama.context_length": ("u32", 128),
        "llama.embedding_length": ("u32", 64),
        "llama.feed_forward_length": ("u32", 256),
        "llama.attention.head_count": ("u32", 4),
        "llama.attention.head_count_kv": ("u32", 2),
        "llama.rope.freq_base": ("f32", 10000.0),
        "llama.attention.layer_norm_rms_epsilon": ("f32", 1e-5),
        "general.tags": ("string[]", ["a", "b"]),
        "tokenizer.ggml.model": ("string", "llama"),
        "tokenizer.ggml.tokens": ("string[]", pieces),
        "tokenizer.ggml.scores": ("f32[]", [float(-i) for i in range(64)]),
        "tokenizer.ggml.token_type": ("i32[]", [1] * 64),
        "tokenizer.ggml.bos_token_id": ("u32", 1),
        "tokenizer.ggml.add_bos_token": ("bool", 1),
        "tokenizer.chat_template": ("string", "{{ messages }}"),
    }
    for key, change in changes.items():
        name = key.replace("__", ".")
        if change is None:
            values.pop(name, None)
        else:
            values[name] = change
    return [(key, type, value) for key, (type, value) in values.items()]


def llama_tensors():
    """A one-layer llama: hidden 64, 4 heads of 16, 2 KV heads, feed-forward 256, vocabulary 64; most types appear."""
    return [
        Tensor("token_embd.weight", "Q8_0", (64, 64)),
        Tensor("blk.0.attn_norm.weight", "F32", (64,)),
        Tensor("blk.0.attn_q.weight", "Q4_0", (64, 64)),
        Tensor("blk.0.attn_k.weight", "Q4_1", (32, 64)),
        Tensor("blk.0.attn_v.weight", "Q5_0", (32, 64)),
        Tensor("blk.0.attn_output.weight", "Q5_1", (64, 64)),
        Tensor("blk.0.ffn_norm.weight", "F16", (64,)),
        Tensor("blk.0.ffn_gate.weight", "F16", (256, 64)),
        Tensor("blk.0.ffn_up.weight", "BF16", (256, 64)),
        Tensor("blk.0.ffn_down.weight", "Q4_K", (64, 256)),
        Tensor("blk.0.extra_a.weight", "Q5_K", (20, 256)),
        Tensor("blk.0.extra_b.weight", "Q6_K", (20, 256)),
        Tensor("blk.0.extra_c.weight", "IQ1_M", (20, 256)),
        Tensor("blk.0.extra_d.weight", "MXFP4", (20, 32)),
        Tensor("blk.0.extra_e.weight", "NVFP4", (20, 64)),
        Tensor("blk.0.extra_e.scale", "F32", (1,)),
        Tensor("blk.0.extra_f.weight", "IQ4_NL", (20, 32)),
        Tensor("output_norm.weight", "F32", (64,)),
    ]


def split_keys(index, count, total):
    """What llama.cpp's gguf-split puts into a part."""
    return [("split.no", "u16", index), ("split.count", "u16", count), ("split.tensors.count", "i32", total)]


def split_gguf(count, first=1, metadata=None, tensors=None):
    """A model, the tiny llama unless another is given, in parts. first: tensors of the first one, which alone has the metadata."""
    metadata, tensors = metadata or llama_metadata(), tensors or llama_tensors()
    each = -(-(len(tensors) - first) // (count - 1))
    parts = [gguf([*metadata, *split_keys(0, count, len(tensors))], tensors[:first])]
    for index in range(1, count):
        start = first + each * (index - 1)
        parts.append(gguf(split_keys(index, count, len(tensors)), tensors[start : start + each]))
    return parts


def small_gguf() -> Bytes:
    """A whole valid file of about 1.5 KB: for tests that open it thousands of times."""
    metadata = llama_metadata(
        tokenizer__ggml__tokens=("string[]", [b"<unk>", b"<s>", b"a"]),
        tokenizer__ggml__scores=("f32[]", [0.0, -1.0, -2.0]),
        tokenizer__ggml__token_type=("i32[]", [2, 3, 1]),
        tokenizer__ggml__merges=("string[]", [b"a b"]),
    )
    return gguf(
        metadata, [Tensor("a", "F32", (3,)), Tensor("b.weight", "Q8_0", (2, 32)), Tensor("c", "F16", (2, 2, 2))]
    )


def safetensors(tensors, metadata=None, *, header=None) -> bytes:
    """tensors: name -> (dtype, shape, data). header overrides the JSON text."""
    entries = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = (json.dumps(entries) if header is None else header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def small_safetensors() -> bytes:
    return safetensors(
        {
            "a": ("F32", (3,), bytes(12)),
            "b.weight": ("BF16", (4, 8), bytes(range(64))),
            "ids": ("I64", (1, 2), bytes(16)),
        },
        {"format": "pt"},
    )
