"""What an open model is, whatever the file: ModelSource, its TensorInfos and its TokenizerSource.

Tensor names are the file's own; `source.naming` says whose they are ("gguf" or "hf"), which for a `.zse` is that of its
origin.
"""

import math
import zlib
from collections import namedtuple
from collections.abc import Iterable

from zse.errors import FormatError
from zse.formats import ggml
from zse.formats.file import ModelFile
from zse.quant.scheme import Plane, Scheme, parse_scheme, placed_planes, rows_per_line

CHECKED_BYTES = 1 << 22  # are read at once for a checksum
DENSE_TYPES = ("F32", "F16", "BF16")
BNB4_LAYOUT = "bnb4"  # of zse.formats.bitsandbytes: `planes` is a State
IN_TURN = "in turn"  # layout of rows that lie in turn with others' (zse.formats.in_turn)
FP4_LAYOUTS = ("fp4", "fp4-inverse")  # of zse.formats.quantized_fp4; inverse: the factor divides
# Bytes of an element, by safetensors' names. Weights are F32, F16 or BF16; the others occur in checkpoints that others
# quantized (zse.formats.quantized), and as buffers (position ids) that no model reads.
ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1}
ELEMENT_BYTES |= {"U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}

# Whose rows of q and k stand so that RoPE turns neighbours (2i, 2i + 1) of a head, with the part of a head that turns
# where the file does not say: GGUF architectures whose converter permutes them (llama.cpp: LlamaModel.permute), and
# those that were trained so.
INTERLEAVED_ROPE = {
    "gguf": {
        name: 1.0
        for name in ("llama", "mistral3", "granite", "smollm3", "minicpm", "glm4", "command-r", "cohere2", "granitemoe")
    },
    "hf": {"Glm4ForCausalLM": 0.5, "CohereForCausalLM": 1.0, "Cohere2ForCausalLM": 1.0},
}


def rope_row_order(num_heads: int, head_dim: int, rotary_dim: int | None = None) -> list[int]:
    """Which row of an interleaved file's q or k stands at each row of rotate-half order: `half[i] = file[order[i]]`.

    num_heads: attention heads for q, KV heads for k. rotary_dim: how many rows of a head turn, the first ones; the
    others stay. Only where source.interleaved_rope is set."""
    turn = head_dim if rotary_dim is None else rotary_dim
    if num_heads <= 0 or head_dim <= 0 or turn % 2 or not 0 <= turn <= head_dim:
        raise ValueError(f"{num_heads} heads of {head_dim}: both must be positive and head_dim even")
    # The converter's reshape(heads, 2, half).swapaxes(1, 2) put element (part, pair) of a head at 2 * pair + part.
    order = [2 * pair + part for part in (0, 1) for pair in range(turn // 2)] + list(range(turn, head_dim))
    return [head * head_dim + row for head in range(num_heads) for row in order]


class TensorInfo(
    namedtuple(
        "TensorInfo",
        "name type shape file offset nbytes layout crc32 planes parts factor order turn",
        defaults=("rows", None, None, None, None, None, None),
    )
):
    """Where a tensor lies.

    type: "F32", "F16", "BF16", "Q4_1", ... (GGUF's and safetensors' names), or a scheme's name. shape: outermost first,
    so a weight is (outputs, inputs) and row-major; GGUF's reversed order is undone. file: the ModelFile; offset:
    absolute, in bytes; nbytes: exactly the tensor's bytes. layout: "rows" (row-major, dense or fp8), "ggml" (rows of
    quantized blocks), "r16" (planes, zse.quant.scheme), or the kind of a checkpoint that others quantized
    (zse.formats.quantized): "awq", "gptq", "packed", "int8", ..., or "latent" (zse.formats.latent: `planes` is a Cut of
    the tensor in `parts`). crc32: of the bytes, where the file has one (`.zse`). planes: absolute offsets of the
    scheme's planes where they do not simply follow one another. factor: of GGUF's NVFP4, the tensor of the F32 that
    multiplies the weight, one for each expert of a stack. parts: for a weight that a checkpoint stores as several
    tensors: their TensorInfo by role ("w", "scale", ...; "columns", "rows": the group of each input by which columns or
    rows are sorted when they are read). turn: which of the stored rows are its own, a zse.formats.in_turn.Turn (layout
    IN_TURN); nbytes are those of all of them. order: i32 [K]: the input that each column belongs to
    (zse.formats.column_order); None: the columns are the inputs."""

    __slots__ = ()

    @property
    def fd(self) -> int:
        return self.file.fd

    @property
    def scheme(self) -> Scheme:
        """The scheme that the tensor has or takes in memory without being quantized anew.
        UnsupportedError for element types that are no weights, such as I64."""
        if self.layout == "ggml":
            return ggml.SCHEMES[self.type]
        return parse_scheme(self.type.lower())

    @property
    def is_dense(self) -> bool:
        """Floating-point numbers one after another: what can be quantized without loss upon loss."""
        return self.layout == "rows" and self.parts is None and self.type in DENSE_TYPES

    @property
    def was_dense(self) -> bool:
        """Whether the numbers are what was trained: is_dense, or taken out of what is."""
        if self.layout == IN_TURN:
            return self.type in DENSE_TYPES
        return self.is_dense or bool(self.parts and "stored" in self.parts and self.parts["stored"].is_dense)

    def placed(self) -> list[tuple[Plane, "ModelFile", int]]:
        """Planes of a matrix in layout r16 or rows with the file and the absolute offset of each."""
        if self.parts is not None:
            planes = self.scheme.planes(*self.shape, self.layout)
            return [(plane, self.parts[plane.name].file, self.parts[plane.name].offset) for plane in planes]
        if self.planes is not None:
            planes = self.scheme.planes(*self.shape, self.layout)
            return [(plane, self.file, offset) for plane, offset in zip(planes, self.planes, strict=True)]
        n, k = self.shape
        return [
            (plane, self.file, self.offset + offset)
            for plane, offset in placed_planes(self.scheme, n, k, self.layout)[0]
        ]

    def ranges(self) -> list[tuple["ModelFile", int, int]]:
        """(file, offset, bytes) of everything that belongs to the tensor, in the order of its bytes."""
        if self.parts is not None:
            return [place for part in self.parts.values() for place in part.ranges()]
        if self.planes is not None:
            order = [] if self.order is None else [(self.order.file, self.order.offset, self.order.nbytes)]
            return [(file, offset, plane.nbytes) for plane, file, offset in self.placed()] + order
        return [(self.file, self.offset, self.nbytes)]

    def rows(self, first: int, count: int) -> "TensorInfo":
        """Rows [first, first + count) as a tensor of their own, without a checksum: of plain numbers, GGUF's blocks,
        4-bit floats, or planes whose lines begin and end there (ValueError)."""
        return self.slices([(first, self.name)], count)[0]

    def slices(self, starts: "Iterable[tuple[int, str]]", count: int) -> "list[TensorInfo]":
        """rows(first, count), named so, for each (first, name) of `starts`: a stack has thousands of experts."""
        if self.layout in FP4_LAYOUTS or self.is_plain:
            return [self._few_rows(first, count)._replace(name=name) for first, name in starts]
        n, k = self.shape
        placed = [
            (plane, rows_per_line(plane, self.layout, n), offset, plane.nbytes // plane.shape[0])
            for plane, _, offset in self.placed()
        ]
        nbytes = sum(plane.nbytes for plane in self.scheme.planes(count, k, self.layout))
        found = []
        for first, name in starts:
            for plane, rows, _, _ in placed:
                if (first % rows or count % rows) and first + count != n:
                    raise ValueError(
                        f"{self.name}: rows {first} to {first + count} share plane {plane.name} with others"
                    )
            at = tuple([offset + first // rows * line_bytes for _, rows, offset, line_bytes in placed])
            found.append(self._replace(name=name, shape=(count, k), offset=at[0], nbytes=nbytes, crc32=None, planes=at))
        return found

    def _few_rows(self, first: int, count: int) -> "TensorInfo":
        """rows() of 4-bit floats, plain numbers and GGUF's blocks."""
        n, k = self.shape
        if self.layout in FP4_LAYOUTS:
            parts = {role: part.range_of(n, first, count) for role, part in self.parts.items()}
            nbytes = sum(part.nbytes for part in parts.values())
            return self._replace(shape=(count, k), offset=parts["q"].offset, nbytes=nbytes, parts=parts)
        factor = self.factor and self.factor.range_of(n, first, count)
        return self.range_of(n, first, count)._replace(shape=(count, k), factor=factor)

    def range_of(self, n: int, first: int, count: int) -> "TensorInfo":
        """The bytes of rows [first, first + count) of a matrix of n rows, without a checksum: of a tensor of numbers
        for each of its rows, or with one for as many rows in a row as they belong to (an expert's)."""
        lines = self.shape[0] if self.shape else 1
        if n % lines or self.nbytes % lines:
            raise ValueError(f"{self.name}: {list(self.shape)} for {n} rows")
        per, line_bytes = n // lines, self.nbytes // lines
        start, stop = first // per, -(-(first + count) // per)
        size = (stop - start) * line_bytes
        shape = (stop - start, *self.shape[1:])
        return self._replace(shape=shape, offset=self.offset + start * line_bytes, nbytes=size, crc32=None)

    def columns(self, first: int, count: int) -> "TensorInfo":
        """Columns [first, first + count), for files that have them one behind the other: GPTQ's and AWQ's. first and count
        are multiples of what share a scale."""
        n, k = self.shape
        parts = {role: part.range_of(k, first, count) for role, part in (self.parts or {}).items()}
        name = f"{self.name} columns {first} to {first + count}"
        nbytes = sum(part.nbytes for part in parts.values())
        return self._replace(
            name=name, shape=(n, count), offset=parts["q"].offset, nbytes=nbytes, crc32=None, parts=parts
        )

    @property
    def is_plain(self) -> bool:
        """Rows one after the other, whatever they are made of."""
        return self.layout in ("ggml", IN_TURN) or self.is_dense

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def wrong(self, reason: str) -> FormatError:
        """What is raised for this tensor."""
        return self.file.wrong(self.offset, self.name, reason)

    def damaged(self, crc32: int) -> FormatError:
        """What is raised when the tensor's bytes have this checksum and not the index's."""
        return self.wrong(f"checksum is {crc32:08x}, the index says {self.crc32:08x}: the weights are damaged")


class TokenizerSource:
    """What a model says about its tokenizer, unparsed.

    kind "gguf": `fields` is the `tokenizer.*` part of the GGUF metadata under its full keys: strings, numbers, and
    StringArray / ScalarArray (zse.formats.arrays: `.raw`, `.count`) for tokenizer.ggml.tokens, merges, scores and
    token_type.
    kind "hf": `json` is the content of tokenizer.json; `config` of tokenizer_config.json; `special_tokens` of
    special_tokens_map.json (dicts, empty where the file is absent).
    A `.zse` may hold the tokenizer's tables ready-made beside that: `image()`, or None.
    """

    __slots__ = ("kind", "fields", "config", "special_tokens", "image", "_read_json")

    def __init__(
        self,
        kind: str,
        fields: dict | None = None,
        read_json=None,
        config: dict | None = None,
        special_tokens: dict | None = None,
        image=None,
    ):
        self.kind, self.fields, self._read_json = kind, fields or {}, read_json
        self.config, self.special_tokens, self.image = config or {}, special_tokens or {}, image

    @property
    def json(self) -> bytes:
        """tokenizer.json, read at every access."""
        if self._read_json is None:
            raise ValueError(f"a {self.kind} tokenizer has no tokenizer.json")
        return self._read_json()


class ModelSource:
    """An open model.

    kind: "gguf", "safetensors" or "zse". path: what was opened. naming: "gguf" or "hf". metadata: GGUF's key -> value
    (naming "gguf"; big arrays are lazy), or the safetensors headers' own key -> text. hf_config, generation_config:
    dicts (naming "hf"), else None. tensors: name -> TensorInfo, in file order. tokenizer: TokenizerSource or None.
    chat_template: str or None. interleaved_rope: q's and k's rows stand so that neighbours turn (see rope_row_order); a
    converted `.zse`'s never do. provenance: dict of where a `.zse` comes from, else {}. image_processor: of a folder whose
    model sees, how images are prepared, or None."""

    def __init__(
        self,
        kind: str,
        path: str,
        naming: str,
        files: list[ModelFile],
        tensors: dict[str, TensorInfo],
        *,
        metadata: dict | None = None,
        hf_config: dict | None = None,
        generation_config: dict | None = None,
        tokenizer: TokenizerSource | None = None,
        chat_template: str | None = None,
        interleaved_rope: bool = False,
        provenance: dict | None = None,
        image_processor: dict | None = None,
    ):
        self.kind, self.path, self.naming, self.files, self.tensors = kind, path, naming, files, tensors
        self.metadata = metadata or {}
        self.hf_config, self.generation_config = hf_config, generation_config
        self.tokenizer, self.chat_template = tokenizer, chat_template
        self.interleaved_rope, self.provenance = interleaved_rope, provenance or {}
        self.image_processor = image_processor

    @property
    def architecture(self) -> str:
        """GGUF's `general.architecture` ("llama") or the first of config.json's `architectures` ("LlamaForCausalLM"),
        "" if it says none."""
        if self.naming == "gguf":
            name = self.metadata.get("general.architecture")
        else:
            names = (self.hf_config or {}).get("architectures")
            name = names[0] if isinstance(names, list) and names else None
        return name if isinstance(name, str) else ""

    @property
    def vocab_size(self) -> int | None:
        """Entries of the vocabulary, which is how many rows the embedding and the LM head have. None: not known."""
        if self.naming == "hf":
            config = self.hf_config or {}
            nested = config.get("text_config")
            size = config.get("vocab_size", nested.get("vocab_size") if isinstance(nested, dict) else None)
        else:
            tokens = self.metadata.get("tokenizer.ggml.tokens")
            size = getattr(tokens, "count", None) or self.metadata.get(f"{self.architecture}.vocab_size")
        return size if type(size) is int else None

    def matrix(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        """The tensor of that name, which has that shape; [1, K] may be stored as [K]. FormatError."""
        info = self.tensors.get(name)
        if info is None:
            raise FormatError(self.path, 0, name, "the tensor is missing")
        if shape[0] == 1 and tuple(info.shape) == shape[1:]:
            info = info._replace(shape=shape)
        if tuple(info.shape) != shape:
            raise FormatError(self.path, info.offset, name, f"has shape {list(info.shape)}, expected {list(shape)}")
        return info

    def info(self, tensor: str | TensorInfo) -> TensorInfo:
        """The tensor of that name. FormatError if the model has none."""
        if isinstance(tensor, TensorInfo):
            return tensor
        info = self.tensors.get(tensor)
        if info is None:
            raise FormatError(self.path, 0, tensor, "the model has no such tensor")
        return info

    @property
    def num_experts(self) -> int | None:
        """Experts of a layer, which is how many rows a router has. None: not known, or there are none."""
        if self.naming == "gguf":
            return self._number(self.metadata.get(f"{self.architecture}.expert_count"))
        config = self.hf_config or {}
        nested = config.get("text_config")
        for values in (config, nested if isinstance(nested, dict) else {}):
            for key in ("num_experts", "num_local_experts", "n_routed_experts"):
                if self._number(values.get(key)):
                    return self._number(values.get(key))
        return None

    @staticmethod
    def _number(value: object) -> int | None:
        return value if type(value) is int and value > 0 else None

    def read(self, tensor: str | TensorInfo, start: int = 0, nbytes: int | None = None) -> bytes:
        """The tensor's bytes [start, start + nbytes), or all from `start` on. ValueError outside the tensor."""
        info = self.info(tensor)
        nbytes = info.nbytes - start if nbytes is None else nbytes
        self._check_range(info, start, nbytes)
        ranges = info.ranges()
        if len(ranges) == 1:
            return info.file.read(info.offset + start, nbytes, info.name)
        pieces, end = [], start + nbytes
        for file, offset, size in ranges:
            low, high = max(start, 0), min(end, size)
            if low < high:
                pieces.append(file.read(offset + low, high - low, info.name))
            start, end = start - size, end - size
        return b"".join(pieces)

    def check_sum(self, tensor: str | TensorInfo) -> None:
        """Reads the whole tensor; FormatError where the file has a checksum of it that differs."""
        info, crc32 = self.info(tensor), 0
        for start in range(0, info.nbytes, CHECKED_BYTES):
            crc32 = zlib.crc32(self.read(info, start, min(CHECKED_BYTES, info.nbytes - start)), crc32)
        if info.crc32 is not None and crc32 != info.crc32:
            raise info.damaged(crc32)

    @staticmethod
    def _check_range(info: TensorInfo, start: int, nbytes: int) -> None:
        if start < 0 or nbytes < 0 or start + nbytes > info.nbytes:
            raise ValueError(f"{info.name}: bytes [{start}, {start + nbytes}) of {info.nbytes}")

    @property
    def nbytes(self) -> int:
        """Size of all the model's files."""
        return sum(file.size for file in self.files)

    def check_unchanged(self) -> None:
        """FormatError if a file was written to since it was opened. Call it when everything has been read."""
        for file in self.files:
            file.check_unchanged()

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __enter__(self) -> "ModelSource":
        return self

    def __exit__(self, *_) -> None:
        self.close()
