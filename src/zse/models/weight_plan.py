"""What a load reads and where it puts it: every tensor of an open file is checked against what the architecture needs,
and gets its place in memory. Nothing is allocated or read, but a GGUF's rotation frequencies.

q, k and v that have one scheme become one matrix, gate and up likewise: one launch reads all their rows. All lies in
one buffer, vectors first, then the matrices as a step reads them; a `.zse` that was written for the device has the same
order and distances, so that its load is a few large copies.
"""

import math
import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from zse.errors import ConfigError, FormatError, UnsupportedError
from zse.formats import column_order, latent
from zse.formats.source import DENSE_TYPES, ModelSource, TensorInfo
from zse.models import experts, names, registry, shares, stages
from zse.models.config import LatentConfig, ModelConfig
from zse.models.names import ROPE_TENSORS
from zse.plan.rules import JOINED
from zse.quant import policy as policies
from zse.quant.scheme import LAYOUT, TILE_ROWS, Plane, Scheme, memory_layout, rows_per_line
from zse.tensor import Tensor, Weight

# Bytes that planes start at multiples of: a cache line; on a GPU what tensor maps and large copies want, as in a .zse.
ALIGN = {"cpu": 64, "gpu": 256}
MAX_RANK = 512  # of latents, of the same
LATENT_SIZES = {"gpu": ((512, 64), (256, 64), (256, 32))}  # rank and rotary, where only some have kernels
# Of the attention kernels: of a model's layers, and of those without a window where their heads are others.
MAX_HEAD_DIM = {"cpu": (512, 512), "gpu": (256, 512)}
MAX_GROUP = 32  # query heads that share a KV head, of the attention kernels
STAGING_LABEL = "load staging"  # memory that a load needs and gives back
MATRICES = ("matrix", "table")  # kinds of roles
FLAT = ("flat", "vector")  # of those whose numbers stand in a row whatever their shape is
# Places on the device that the layers of the host's memory take turns in: one is computed with while the next is
# copied.
LAYER_SLOTS = 2


class FileTensor(NamedTuple):
    """One tensor of the file, or a part of one, and the rows (elements of a vector) of its matrix that it fills, from
    `first` on. cut: the rows and columns of `info` that are the part, of one rank of several; None: all."""

    role: names.Role
    info: TensorInfo
    first: int
    cut: "shares.ShareCut | None" = None

    @property
    def num_rows(self) -> int:
        """Rows, or elements of a vector."""
        return self.info.shape[0] if self.cut is None else self.cut.rows[1] - self.cut.rows[0]


class MatrixPlan(NamedTuple):
    """A weight in memory: [rows, columns] in `scheme` and `layout`, made of one or more tensors. order: of its columns,
    a name in the plan's `orders`, or None."""

    name: str
    shape: tuple[int, int]
    scheme: Scheme
    parts: tuple[FileTensor, ...]
    layout: str = LAYOUT
    order: str | None = None

    @property
    def planes(self) -> tuple[Plane, ...]:
        return self.scheme.planes(*self.shape, self.layout)


class VectorPlan(NamedTuple):
    """Norm weights or biases in memory: f32 [size], or of that shape."""

    name: str
    size: int
    parts: tuple[FileTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        role = self.parts[0].role
        if role.kind != "vector":
            return (self.size,)
        return self.size // math.prod(role.shape[1:]), *role.shape[1:]


class ModelPlan(NamedTuple):
    """What will be loaded. policy: how dense matrices are quantized while loading, or None. memory_bytes: device memory
    by label: embedding, layers, head, layer slots, expert places. family: of the device ("cpu", "gpu"), which decides
    layouts and alignment. orders: name → i32 [K], the input at each column of the matrices that say so; those of a
    layer that have the same one share it. host_layers: those whose matrices stay in the host's memory and are copied in
    every step, ascending. lazy_experts: experts are read when they are first chosen, on a CPU. expert_slots: of each
    layer, where experts stay in the host's memory and have places on a GPU by turns (zse.models.expert_places); 0: all
    are on the device. share: what the rank has of the model, of several; `config` is the rank's then."""

    source: ModelSource
    config: ModelConfig
    matrices: tuple[MatrixPlan, ...]
    vectors: tuple[VectorPlan, ...]
    policy: Any
    memory_bytes: dict[str, int]
    family: str = "cpu"
    orders: dict[str, array] = {}
    host_layers: tuple[int, ...] = ()
    lazy_experts: bool = False
    expert_slots: int = 0
    share: Any = None

    @property
    def layer_bytes(self) -> list[int]:
        """Of each layer's matrices, as they lie in memory."""
        sizes = [0] * self.config.num_layers
        for matrix in self.matrices:
            if matrix.name.startswith("layers."):
                sizes[_layer(matrix.name, self.config)] += placed_bytes(matrix, ALIGN[self.family])
        return sizes

    @property
    def slot_bytes(self) -> int:
        """Of a layer slot."""
        sizes = self.layer_bytes
        return max((sizes[layer] for layer in self.host_layers), default=0)

    @property
    def host_bytes(self) -> int:
        """Of the host's memory, and what every step copies."""
        sizes = self.layer_bytes
        return sum(sizes[layer] for layer in self.host_layers)

    def with_host_layers(self, count: int) -> "ModelPlan":
        """The plan with `count` of the layers in the host's memory, evenly among the others: while these are computed,
        the next is copied."""
        total = self.config.num_layers
        layers = tuple((number + 1) * total // count - 1 for number in range(count))
        plan = self._replace(host_layers=layers)
        memory = memory_bytes_of(self.matrices, self.vectors, self.orders, ALIGN[self.family])
        if layers:
            memory["layers"] -= plan.host_bytes
            memory["layer slots"] = min(LAYER_SLOTS, count) * plan.slot_bytes
        return plan._replace(memory_bytes=memory)


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
    if info.type != "F32" or len(info.shape) != 1 or info.num_elements > max(MAX_HEAD_DIM["cpu"]) // 2:
        what = f"is {info.type} {list(info.shape)}, expected F32 [half a head]"
        raise FormatError(source.path, info.offset, info.name, what)
    values = tuple(array("f", source.read(info)))
    if not all(0 < value < math.inf for value in values):
        raise FormatError(source.path, info.offset, info.name, "holds values that are no divisors")
    return values


def as_f32(raw: bytes, type: str) -> array:
    """Plain numbers of a type of DENSE_TYPES."""
    if type == "F32":
        return array("f", raw)
    if type == "BF16":
        return array("f", array("I", [bits << 16 for bits in array("H", raw)]).tobytes())
    return array("f", struct.unpack(f"<{len(raw) // 2}e", raw))


def decays_of(source, info: TensorInfo) -> bytes:
    """f32: -exp of the numbers of a dense vector. FormatError for one that is too large."""
    try:
        return array("f", [-math.exp(value) for value in as_f32(source.read(info), info.type)]).tobytes()
    except OverflowError:
        raise info.wrong("holds a logarithm of a decay that is no f32") from None


def plan_model(
    source: ModelSource,
    *,
    quantize: str | None = None,
    family: str = "cpu",
    rank: int = 0,
    ranks: int = 1,
    whole_experts: bool = False,
    whole_attention: bool = False,
    config: ModelConfig | None = None,
    pipeline: bool = False,
) -> ModelPlan:
    """Check that every tensor the architecture needs is there with its shape, and lay out memory.

    quantize: as zse.quant.policy.Policy.of_load() takes it: dense matrices are quantized while loading; already
    quantized ones stay as they are. family: of the device that it is for. rank, ranks: whose share of the model; whole_experts: of the experts
    some, not a part of each; whole_attention: each has all of it, for requests of its own; pipeline: of its layers some. config: of a part of the file (models/next_token.py). Raises FormatError,
    UnsupportedError, ConfigError.
    """
    is_part, config = config is not None, config or read_config(source)
    if ranks == 1 or pipeline:  # else of the share, below
        _check_kernels(source.path, config, family)
    policy = None if quantize is None else policies.Policy.of_load(quantize, family)
    family_of_model = registry.architecture(config.architecture)
    prefix = family_of_model.hf_prefix(source.path, source.tensors) if source.naming == "hf" else ""
    schemes: dict[str, Scheme] = {}
    parts: dict[str, list[FileTensor]] = {}
    for role, name in _named_roles(family_of_model, config, source.naming, prefix):
        stored: list[tuple[TensorInfo, Any]]
        if role.experts:
            stored = [*experts.stored_experts(source, role, name)]
        elif role.runs or role.columns or "|" in name or role.kind in ("vector", "decay"):
            stored = experts.stored_rows(source, role, name)
        else:  # all that most models have
            stored = [(source.matrix(name, role.shape), None)]
        parts[role.name] = [FileTensor(role, each, 0, cut) for each, cut in stored]
        info = parts[role.name][0].info
        if role.kind in MATRICES:
            schemes[role.name] = _scheme(role, info, config, policy, family)
        elif info.type not in DENSE_TYPES and (role.kind != "flat" or info.layout != "ggml"):
            raise UnsupportedError(f"{source.path}: type of {name}", info.type, DENSE_TYPES)
    if policy is not None and not is_part and not any(parts[role][0].info.is_dense for role in schemes):
        raise ConfigError(
            f"{source.path} is quantized already ({schemes[next(role for role in schemes if role != 'embed')]}): leave --quantize out"
        )
    share: Any = None
    if pipeline:
        share = stages.StageShare(source.path, config, parts, schemes, rank=rank, size=ranks, family=family)
        config, schemes, parts = share.config, share.cut(schemes), share.cut(parts)
    elif ranks > 1:
        if any(part.cut is not None for found in parts.values() for part in found):
            what = f"{source.path}: --tensor-parallel-size {ranks}: gate and up"
            raise UnsupportedError(what, "stored in one, in words of others", ["plain numbers, GGUF's or .zse's"])
        stored_infos = {role: [part.info for part in found] for role, found in parts.items()}
        options: dict[str, Any] = dict(rank=rank, size=ranks, quantizes=policy is not None, family=family)
        options |= dict(whole_experts=whole_experts, whole_attention=whole_attention)
        share = shares.ModelShare(source.path, config, stored_infos, schemes, **options)
        config, schemes = share.config, share.schemes
        _check_kernels(source.path, config, family)
        parts = {
            role: [FileTensor(of, info, 0, cut) for of, info, cut in share.pieces(found[0].role)]
            for role, found in parts.items()
        }
        parts = {role: found for role, found in parts.items() if found}
    orders, order_names = _orders(source.path, parts)
    matrices, vectors = _fuse(config, parts, schemes, order_names, family)
    memory = memory_bytes_of(matrices, vectors, orders, ALIGN[family])
    return ModelPlan(source, config, tuple(matrices), tuple(vectors), policy, memory, family, orders, share=share)


def part_of(plan: ModelPlan, matrices: Sequence[MatrixPlan], vectors: Sequence[VectorPlan] = ()) -> ModelPlan:
    """The plan of loading these alone."""
    wanted = {matrix.order for matrix in matrices}
    orders = {name: order for name, order in plan.orders.items() if name in wanted}
    memory = memory_bytes_of(matrices, vectors, orders, ALIGN[plan.family])
    return plan._replace(matrices=tuple(matrices), vectors=tuple(vectors), memory_bytes=memory, orders=orders)


def _named_roles(family, config: ModelConfig, naming: str, prefix: str) -> Iterator[tuple[names.Role, str]]:
    """The model's roles with what the file calls them."""
    for role in family.roles(config):
        yield role, family.file_name(config, role.name, naming, prefix)
    for role, gguf, hf in names.dense_roles(config):
        yield role, gguf if naming == "gguf" else hf


def _orders(path: object, parts: dict[str, list[FileTensor]]) -> tuple[dict[str, array], dict[str, str]]:
    """Orders of columns by name, and the name of each role's."""
    orders: dict[str, array] = {}
    names_of: dict[str, str] = {}
    known: dict[tuple[str, bytes], str] = {}  # layer and content → name
    for role, stored in parts.items():
        ordered = next((part for part in stored if part.info.order is not None), None)
        if ordered is None or stored[0].role.kind != "matrix":
            continue
        if role == "embed" or len(stored) > 1:
            what = f"{path}: an embedding or experts with ordered columns"
            raise UnsupportedError(what, ordered.info.name, ["plain columns"])
        info, cut = ordered.info, ordered.cut
        order = column_order.order_of(info.order, info.scheme.groups(info.shape[1]))
        if cut is not None:
            order = order[slice(*cut.columns)]
        names_of[role] = name = known.setdefault((role.rpartition(".")[0], order.tobytes()), role)
        orders.setdefault(name, order)
    return orders, names_of


def _check_kernels(path: object, config: ModelConfig, family: str) -> None:
    """Refuse what the kernels do not compute."""
    if config.latent is not None:
        _check_latent(path, config.latent, family)
    else:
        _check_heads(path, config, family)
    for rope in (config.rope, config.local_rope):
        dims = rope.dims(config.head_dim) if rope else 0
        if dims % TILE_ROWS:
            raise UnsupportedError(f"{path}: dimensions of a head that turn", dims, [f"multiples of {TILE_ROWS}"])


def _check_heads(path: object, config: ModelConfig, family: str) -> None:
    for head_dim, most in zip((config.head_dim, config.global_head_dim), MAX_HEAD_DIM[family], strict=True):
        if head_dim % TILE_ROWS or head_dim > most:
            what = "head_dim" if family == "cpu" else "head_dim on a GPU (--device cpu takes more)"
            raise UnsupportedError(f"{path}: {what}", head_dim, range(TILE_ROWS, most + 1, TILE_ROWS))
    for kv_heads in {config.kv_heads_of(layer) for layer in range(config.num_layers)}:
        if config.num_heads // kv_heads > MAX_GROUP:
            raise UnsupportedError(
                f"{path}: query heads for each KV head", config.num_heads // kv_heads, [f"1 to {MAX_GROUP}"]
            )


def _check_latent(path: object, latent: LatentConfig, family: str) -> None:
    unit = TILE_ROWS
    sizes = LATENT_SIZES.get(family)
    if sizes and (latent.rank, latent.rotary) not in sizes:
        found = latent.rank, latent.rotary
        raise UnsupportedError(
            f"{path}: kv_lora_rank and qk_rope_head_dim on a GPU (--device cpu takes more)", found, sizes
        )
    for name, size, most in (
        ("kv_lora_rank", latent.rank, MAX_RANK),
        ("qk_rope_head_dim", latent.rotary, MAX_RANK // 4),
        ("qk_nope_head_dim", latent.nope, MAX_RANK),
        ("v_head_dim", latent.value, MAX_RANK),
    ):
        if size % unit or not 0 < size <= most:
            raise UnsupportedError(f"{path}: {name}", size, [f"multiples of {unit} up to {most}"])


def _scheme(role: names.Role, info: TensorInfo, config: ModelConfig, policy, family: str) -> Scheme:
    """The scheme that a matrix has in memory."""
    scheme = info.scheme
    if policy is not None and info.was_dense and role.kind == "matrix" and not latent.stays_dense(info.name):
        shape = info.shape if role.experts else role.shape  # of which info may be some rows
        scheme = policy.scheme(shape, config.vocab_size, config.moe and config.moe.num_experts) or scheme
    scheme = scheme.loaded(family)
    if role.experts and info.shape[0] % scheme.row_unit:
        unit = [f"multiples of {scheme.row_unit}"]
        raise UnsupportedError(f"{info.name} as {scheme}: number of an expert's rows", info.shape[0], unit)
    if not scheme.fits(role.shape[1]):
        raise UnsupportedError(f"{info.name} as {scheme}: number of columns", role.shape[1], ["multiples of the group"])
    return scheme


def _fuse(
    config: ModelConfig,
    parts: dict[str, list[FileTensor]],
    schemes: dict[str, Scheme],
    orders: dict[str, str],
    family: str,
) -> tuple[list[MatrixPlan], list[VectorPlan]]:
    """Matrices and vectors in execution order, with q, k, v and gate, up joined where they can be."""
    member_of: dict[str, tuple[str, list[str]]] = {}  # role → what it is joined into, and all roles of that
    for layer in range(config.num_layers):
        for fused, members in JOINED.items():
            roles = [f"layers.{layer}.{member}" for member in members]
            if not all(role in schemes for role in roles):
                continue  # the file has them joined, or not all of them
            same = len({(schemes[role], orders.get(role)) for role in roles}) == 1
            unit = schemes[roles[0]].row_unit
            whole_tiles = all(parts[role][0].num_rows % unit == 0 for role in roles[:-1])
            if len({len(parts[role]) for role in roles}) == 1 and same and whole_tiles:
                for suffix in ("", "_bias"):
                    joined = [role + suffix for role in roles]
                    member_of |= {role: (f"layers.{layer}.{fused}{suffix}", joined) for role in joined}
    matrices, vectors = [], []
    for role, (part, *others) in parts.items():
        name, joined = member_of.get(role, (role, [role]))
        if role != joined[0]:
            continue  # came with the first
        first, placed = 0, []
        # Of experts the first one's members, then the second one's.
        pieces = [parts[member] for member in joined]
        for piece in chain(*zip(*pieces, strict=True)) if part.role.experts else chain(*pieces):
            placed.append(piece._replace(first=first))
            first += piece.role.size if part.role.kind in FLAT else piece.num_rows
        if part.role.kind in MATRICES:
            layout = memory_layout(schemes[role], family)
            shape = first, part.role.shape[1]
            matrices.append(MatrixPlan(name, shape, schemes[role], tuple(placed), layout, orders.get(role)))
        else:
            vectors.append(VectorPlan(name, first, tuple(placed)))
    # As in a .zse: in each layer the norms, then the biases.
    vectors.sort(key=lambda vector: (_layer(vector.name, config), vector.parts[0].role.kind == "bias"))
    return matrices, vectors


def _layer(name: str, config: ModelConfig) -> int:
    return int(name.split(".")[1]) if name.startswith("layers.") else config.num_layers


def placed_bytes(matrix: MatrixPlan, align: int) -> int:
    return sum(aligned(plane.nbytes, align) for plane in matrix.planes)


def memory_bytes_of(
    matrices: Sequence[MatrixPlan], vectors: Sequence[VectorPlan], orders: dict[str, array], align: int
) -> dict[str, int]:
    total = {"embedding": 0, "layers": 0, "head": 0}
    for matrix in matrices:
        label = {"embed": "embedding", "head": "head"}.get(matrix.name, "layers")
        total[label] += placed_bytes(matrix, align)
    total["layers"] += sum(aligned(4 * vector.size, align) for vector in vectors)
    total["layers"] += sum(aligned(4 * len(order), align) for order in orders.values())
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
    """Weights and vectors of the plan in `buffer`, from byte `base` on, in the order of a `.zse` file; behind them the
    layer slots, in which the weights of host layers are. Experts that have places by turns are not among them."""
    align, offset = ALIGN[plan.family], base
    weights, vectors = {}, {}
    for vector in plan.vectors:
        if plan.expert_slots and vector.parts[0].role.experts:
            continue
        vectors[vector.name] = Tensor(buffer, vector.shape, "f32", offset)
        offset += aligned(4 * vector.size, align)
    orders: dict[str | None, Tensor] = {}
    for name, order in plan.orders.items():
        orders[name] = Tensor(buffer, (len(order),), "i32", offset)
        offset += aligned(4 * len(order), align)
    later: list[MatrixPlan] = []
    for matrix in plan.matrices:
        if plan.expert_slots and matrix.parts[0].role.experts:
            continue
        if _layer(matrix.name, plan.config) in plan.host_layers:
            later.append(matrix)
            continue
        weights[matrix.name] = weight_at(matrix, buffer, offset, align, orders.get(matrix.order))
        offset += placed_bytes(matrix, align)
    if plan.share is not None and not plan.share.is_stage and plan.config.causal and "head" not in weights:
        weights["head"] = rows_of(weights["embed"], *plan.share.head_spans[plan.share.rank])
    ends: dict[int, int] = {}  # of layers in their slots
    for matrix in later:
        layer = _layer(matrix.name, plan.config)
        at = ends.get(layer, offset + plan.host_layers.index(layer) % LAYER_SLOTS * plan.slot_bytes)
        weights[matrix.name] = weight_at(matrix, buffer, at, align, orders.get(matrix.order))
        ends[layer] = at + placed_bytes(matrix, align)
    return weights, vectors


def place_host_layers(plan: ModelPlan, host, weights: dict[str, Weight]) -> dict[str, Weight]:
    """The weights of host layers where they are loaded to, one layer behind the other in `host`."""
    found, offset, align = {}, 0, ALIGN[plan.family]
    for matrix in plan.matrices:
        if _layer(matrix.name, plan.config) in plan.host_layers:
            found[matrix.name] = weight_at(matrix, host, offset, align, weights[matrix.name].order)
            offset += placed_bytes(matrix, align)
    return found


def weight_at(matrix: MatrixPlan, buffer, offset: int, align: int, order: Tensor | None) -> Weight:
    planes = {}
    for plane in matrix.planes:
        planes[plane.name] = Tensor(buffer, plane.shape, plane.dtype, offset)
        offset += aligned(plane.nbytes, align)
    return Weight(matrix.shape, matrix.scheme, planes, matrix.layout, order)


def rows_of(weight: Weight, start: int, stop: int) -> Weight:
    """Rows [start, stop) of a weight, which begin at whole lines of its planes."""
    planes = {}
    n, k = weight.shape
    for plane in weight.scheme.planes(n, k, weight.layout):
        lines, tensor = rows_per_line(plane, weight.layout, n), weight.planes[plane.name]
        offset = tensor.offset + start // lines * (plane.nbytes // plane.shape[0])
        shape = -(-(stop - start) // lines), *plane.shape[1:]
        planes[plane.name] = Tensor(tensor.buffer, shape, plane.dtype, offset)
    return weight._replace(shape=(stop - start, k), planes=planes)


def aligned(nbytes: int, align: int) -> int:
    return -(-nbytes // align) * align
