"""What a load reads and where it puts it: every tensor of an open file is checked against what the architecture needs, and
gets its place in memory. Nothing is allocated or read, but a GGUF's rotation frequencies.

q, k and v that have one scheme become one matrix, gate and up likewise: one launch reads all their rows. All lies in
one buffer, vectors first, then the matrices as a step reads them; a `.zse` that was written for the device has the same
order and distances, so that its load is a few large copies.
"""

import math
from array import array
from typing import Any, NamedTuple

import msgspec

from zse.errors import ConfigError, FormatError, UnsupportedError
from zse.formats.source import DENSE_TYPES, ModelSource, TensorInfo
from zse.models import names, registry
from zse.models.config import ModelConfig
from zse.models.names import ROPE_TENSORS
from zse.quant import policy as policies
from zse.quant.scheme import LAYOUT, TILE_ROWS, Plane, Scheme, memory_layout
from zse.tensor import Tensor, Weight

# Bytes that planes start at multiples of: a cache line; on a GPU what tensor maps and large copies want, as in a .zse.
ALIGN = {"cpu": 64, "gpu": 256}
MAX_HEAD_DIM = 256  # of the attention kernels
MAX_GROUP = 32  # query heads that share a KV head, of the attention kernels
# Columns that share a scale where integer weights are quantized on load; None: the policy's. On a GPU half the scales' bytes, and
# its activations have no groups of their own to match.
LOAD_GROUPS = {"cpu": None, "gpu": 128}
FUSED: dict[str, tuple[str, ...]] = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


class FileTensor(NamedTuple):
    """One tensor of the file and the rows (elements of a vector) of its matrix that it fills, from `first` on."""

    role: names.Role
    info: TensorInfo
    first: int


class MatrixPlan(NamedTuple):
    """A weight in memory: [rows, columns] in `scheme` and `layout`, made of one or more tensors."""

    name: str
    shape: tuple[int, int]
    scheme: Scheme
    parts: tuple[FileTensor, ...]
    layout: str = LAYOUT

    @property
    def planes(self) -> tuple[Plane, ...]:
        return self.scheme.planes(*self.shape, self.layout)


class VectorPlan(NamedTuple):
    """Norm weights or biases in memory: f32 [size]."""

    name: str
    size: int
    parts: tuple[FileTensor, ...]


class ModelPlan(NamedTuple):
    """What will be loaded. policy: how dense matrices are quantized while loading, or None. memory_bytes: device memory
    by label: embedding, layers, head. family: of the device ("cpu", "gpu"), which decides layouts and alignment."""

    source: ModelSource
    config: ModelConfig
    matrices: tuple[MatrixPlan, ...]
    vectors: tuple[VectorPlan, ...]
    policy: Any
    memory_bytes: dict[str, int]
    family: str = "cpu"


def read_config(source: ModelSource) -> ModelConfig:
    """The ModelConfig of an open model (zse.formats.source.ModelSource). FormatError, UnsupportedError."""
    shapes = {name: info.shape for name, info in source.tensors.items()}
    if source.naming == "gguf":
        found = (source.tensors[name] for name in ROPE_TENSORS if name in source.tensors)
        metadata = dict(source.metadata) | {info.name: _small_vector(source, info) for info in found}
        return registry.config_from_gguf(source.path, metadata, shapes)
    if source.hf_config is None:
        raise FormatError(source.path, 0, "config.json", "is missing; put it beside the safetensors file")
    config = registry.config_from_hf(source.path, source.hf_config, source.generation_config)
    if "text_config" in source.hf_config:
        # The two halves of such a file may differ in whether the head is tied: what is there decides.
        tied = not any(name.endswith("lm_head.weight") for name in source.tensors)
        config = msgspec.structs.replace(config, tied_head=tied)
    return config


def _small_vector(source: ModelSource, info: TensorInfo) -> tuple[float, ...]:
    if info.type != "F32" or len(info.shape) != 1 or info.num_elements > MAX_HEAD_DIM // 2:
        what = f"is {info.type} {list(info.shape)}, expected F32 [half a head]"
        raise FormatError(source.path, info.offset, info.name, what)
    values = tuple(array("f", source.read(info)))
    if not all(0 < value < math.inf for value in values):
        raise FormatError(source.path, info.offset, info.name, "holds values that are no divisors")
    return values


def plan_model(source: ModelSource, *, quantize: str | None = None, family: str = "cpu") -> ModelPlan:
    """Check that every tensor the architecture needs is there with its shape, and lay out memory.

    quantize: "int4" or "int8" (any zse.quant.policy.Policy quant): dense matrices are quantized while loading; already
    quantized ones stay as they are. family: of the device that it is for. Raises FormatError, UnsupportedError,
    ConfigError.
    """
    config = read_config(source)
    _check_kernels(source.path, config)
    policy = None
    if quantize is not None:
        policy = policies.Policy(quantize, LOAD_GROUPS[family] if quantize.startswith("int") else None)
    family_of_model = registry.architecture(config.architecture)
    prefix = names.hf_prefix(source.path, source.tensors) if source.naming == "hf" else ""
    schemes: dict[str, Scheme] = {}
    parts: dict[str, FileTensor] = {}
    for role in family_of_model.roles(config):
        gguf = source.naming == "gguf"
        name = family_of_model.gguf_name(role.name) if gguf else family_of_model.hf_name(role.name, prefix)
        info = source.tensors.get(name)
        if info is None:
            raise FormatError(source.path, 0, name, "the tensor is missing")
        if tuple(info.shape) != role.shape:
            raise FormatError(
                source.path, info.offset, name, f"has shape {list(info.shape)}, expected {list(role.shape)}"
            )
        parts[role.name] = FileTensor(role, info, 0)
        if role.kind == "matrix":
            schemes[role.name] = _scheme(role, info, config, policy, family)
        elif info.type not in DENSE_TYPES:
            raise UnsupportedError(f"{source.path}: type of {name}", info.type, DENSE_TYPES)
    if policy is not None and not any(parts[role].info.is_dense for role in schemes):
        raise ConfigError(
            f"{source.path} is quantized already ({schemes[next(role for role in schemes if role != 'embed')]}): leave --quantize out"
        )
    matrices, vectors = _fuse(config, parts, schemes, family)
    memory = _memory_bytes(matrices, vectors, ALIGN[family])
    return ModelPlan(source, config, tuple(matrices), tuple(vectors), policy, memory, family)


def _check_kernels(path: object, config: ModelConfig) -> None:
    """Refuse what the kernels do not compute."""
    if config.head_dim % TILE_ROWS or config.head_dim > MAX_HEAD_DIM:
        raise UnsupportedError(f"{path}: head_dim", config.head_dim, range(TILE_ROWS, MAX_HEAD_DIM + 1, TILE_ROWS))
    if config.num_heads // config.num_kv_heads > MAX_GROUP:
        raise UnsupportedError(
            f"{path}: query heads for each KV head", config.num_heads // config.num_kv_heads, [f"1 to {MAX_GROUP}"]
        )
    for rope in (config.rope, config.local_rope):
        dims = rope.dims(config.head_dim) if rope else 0
        if dims % TILE_ROWS:
            raise UnsupportedError(f"{path}: dimensions of a head that turn", dims, [f"multiples of {TILE_ROWS}"])


def _scheme(role: names.Role, info: TensorInfo, config: ModelConfig, policy, family: str) -> Scheme:
    """The scheme that a matrix has in memory."""
    scheme = info.scheme
    if policy is not None and info.is_dense:
        scheme = policy.scheme(role.shape, config.vocab_size) or scheme
    scheme = scheme.loaded(family)
    if not scheme.fits(role.shape[1]):
        raise UnsupportedError(f"{info.name} as {scheme}: number of columns", role.shape[1], ["multiples of the group"])
    return scheme


def _fuse(
    config: ModelConfig, parts: dict[str, FileTensor], schemes: dict[str, Scheme], family: str
) -> tuple[list[MatrixPlan], list[VectorPlan]]:
    """Matrices and vectors in execution order, with q, k, v and gate, up joined where they can be."""
    member_of: dict[str, tuple[str, list[str]]] = {}  # role → what it is joined into, and all roles of that
    for layer in range(config.num_layers):
        for fused, members in FUSED.items():
            roles = [f"layers.{layer}.{member}" for member in members]
            if roles[0] not in schemes:
                continue  # the file has them joined
            same = len({schemes[role] for role in roles}) == 1
            unit = schemes[roles[0]].row_unit
            whole_tiles = all(parts[role].role.shape[0] % unit == 0 for role in roles[:-1])
            if same and whole_tiles:
                for suffix in ("", "_bias"):
                    joined = [role + suffix for role in roles]
                    member_of |= {role: (f"layers.{layer}.{fused}{suffix}", joined) for role in joined}
    matrices, vectors = [], []
    for role, part in parts.items():
        name, joined = member_of.get(role, (role, [role]))
        if role != joined[0]:
            continue  # came with the first
        first, placed = 0, []
        for member in joined:
            placed.append(parts[member]._replace(first=first))
            first += parts[member].role.shape[0]
        if part.role.kind == "matrix":
            layout = memory_layout(schemes[role], family)
            matrices.append(MatrixPlan(name, (first, part.role.shape[1]), schemes[role], tuple(placed), layout))
        else:
            vectors.append(VectorPlan(name, first, tuple(placed)))
    # As in a .zse: in each layer the norms, then the biases.
    vectors.sort(key=lambda vector: (_layer(vector.name, config), vector.parts[0].role.kind == "bias"))
    return matrices, vectors


def _layer(name: str, config: ModelConfig) -> int:
    return int(name.split(".")[1]) if name.startswith("layers.") else config.num_layers


def _memory_bytes(matrices: list[MatrixPlan], vectors: list[VectorPlan], align: int) -> dict[str, int]:
    total = {"embedding": 0, "layers": 0, "head": 0}
    for matrix in matrices:
        label = {"embed": "embedding", "head": "head"}.get(matrix.name, "layers")
        total[label] += sum(_aligned(plane.nbytes, align) for plane in matrix.planes)
    total["layers"] += sum(_aligned(4 * vector.size, align) for vector in vectors)
    return {label: nbytes for label, nbytes in total.items() if nbytes}


def require_memory(bytes_by_label: dict[str, int], limit: int | None) -> None:
    """ConfigError when the bytes together are over `limit` (None: no limit); the message lists them."""
    total = sum(bytes_by_label.values())
    if limit is not None and total > limit:
        parts = ", ".join(f"{label} {nbytes / 2**20:.0f} MiB" for label, nbytes in bytes_by_label.items())
        raise ConfigError(
            f"needs {total / 2**20:.0f} MiB of memory ({parts}), "
            f"over --max-memory {limit / 2**20:.0f} MiB: raise it, "
            "or use a smaller context or a quantized model"
        )


def place(plan: ModelPlan, buffer, base: int = 0) -> tuple[dict[str, Weight], dict[str, Tensor]]:
    """Weights and vectors of the plan in `buffer`, from byte `base` on, in the order of a `.zse` file."""
    align, offset = ALIGN[plan.family], base
    weights, vectors = {}, {}
    for vector in plan.vectors:
        vectors[vector.name] = Tensor(buffer, (vector.size,), "f32", offset)
        offset += _aligned(4 * vector.size, align)
    for matrix in plan.matrices:
        planes = {}
        for plane in matrix.planes:
            planes[plane.name] = Tensor(buffer, plane.shape, plane.dtype, offset)
            offset += _aligned(plane.nbytes, align)
        weights[matrix.name] = Weight(matrix.shape, matrix.scheme, planes, matrix.layout)
    return weights, vectors


def _aligned(nbytes: int, align: int) -> int:
    return -(-nbytes // align) * align
