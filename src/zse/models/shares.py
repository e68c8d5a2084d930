"""What one rank of several has of a model (docs/design/0011-several-devices.md): its configuration, and the rows and columns of
each stored tensor that are its own.

Query heads go with their KV head, gate and up with the columns of down that read them, the head by rows of the vocabulary. What all
ranks need, all have; a bias behind a product whose parts are added is rank 0's alone."""

from collections.abc import Iterable
from math import gcd, lcm
from typing import Any, NamedTuple

import msgspec

from zse.errors import UnsupportedError
from zse.formats.source import TensorInfo
from zse.models import registry
from zse.models.config import ModelConfig
from zse.models.mixer_shares import MixerShares
from zse.models.names import Role
from zse.models.spans import Span, head_spans, reads_rows, spread
from zse.quant.scheme import TILE_ROWS, AffineScheme, Scheme, SuperblockScheme

QUERIES, KEYS, INNER, EXPERTS, SHARED = "queries", "keys", "inner", "experts", "shared"
LATENTS, VALUES = "latents", "values"  # of query heads: what meets a latent, what is made of one
# Role → the spans of its rows, one behind the other; the span of its columns.
ROWS: dict[str, tuple[str, ...]] = {
    "q": (QUERIES,),
    "k": (KEYS,),
    "v": (KEYS,),
    "qkv": (QUERIES, KEYS, KEYS),
    "q_b": (QUERIES,),
    "q_whole": (QUERIES,),
    "k_b": (LATENTS,),
    "v_b": (VALUES,),
    "gate": (INNER,),
    "up": (INNER,),
    "gate_up": (INNER, INNER),
    "gate_exps": (EXPERTS,),
    "up_exps": (EXPERTS,),
    "shared_gate": (SHARED,),
    "shared_up": (SHARED,),
}
COLUMNS = {"o": VALUES, "down": INNER, "down_exps": EXPERTS, "shared_down": SHARED}
ONCE = ("o_bias", "down_bias", "down_exps_bias")  # are added by rank 0
BY_COLUMN = ("awq", "gptq", "gptq+1")  # layouts whose columns follow one another
HEAD_UNIT = 4 * TILE_ROWS  # rows of the vocabulary
# From so many ranks on, of whole experts and tokens of their own, rows go only to ranks that have one of their experts: of two nearly
# all do, and it is an exchange more a layer, and shared experts that all have whole. At most as many as a mask has bits.
DISPATCH_RANKS, MOST_DISPATCH_RANKS = 8, 32


class ShareCut(NamedTuple):
    """Which rows and columns of a stored matrix are a part of the model, where these cannot be read apart."""

    rows: Span
    columns: Span


class SharePiece(NamedTuple):
    """What a rank has of a stored tensor. cut: None where `info` is all of it."""

    role: Role
    info: TensorInfo
    cut: ShareCut | None


class ModelShare:
    """What rank `rank` of `size` has. config: its ModelConfig; whole: the model's; widths: rows of the head that each rank has.
    schemes: of the matrices, by role, as the rank has them. UnsupportedError names what cannot be cut.

    stored: the tensors of each role of the model. quantizes: plain numbers are quantized while loading, in groups that may become
    smaller for it. family: of the device. whole_experts: a rank has some experts, not a part of each. whole_attention: every rank
    has all of the layers' attention, for tokens of its own requests; divides_rows: likewise. dispatches: rows go only to ranks that have
    one of their experts; shared experts are whole on all."""

    is_stage = False

    def __init__(
        self,
        path: object,
        config: ModelConfig,
        stored: dict[str, list[TensorInfo]],
        schemes: dict[str, Scheme],
        *,
        rank: int,
        size: int,
        quantizes: bool = False,
        family: str = "cpu",
        whole_experts: bool = False,
        whole_attention: bool = False,
    ):
        self.path, self.whole, self.rank, self.size = path, config, rank, size
        self._stored, self.schemes, self._quantizes, self._family = stored, dict(schemes), quantizes, family
        self._mixers: MixerShares | None = None
        self._own = self._own_experts() if whole_experts else None
        self.divides_rows = whole_attention
        is_many = DISPATCH_RANKS <= size <= MOST_DISPATCH_RANKS
        is_gated = any(role.endswith(".shared_router") for role in stored)  # which is added with experts alone
        self.dispatches = whole_experts and whole_attention and is_many and not is_gated
        self._check_kind()
        architecture = registry.architecture(config.architecture)
        self._gated = 2 if getattr(architecture, "gated_attention", False) else 1
        self._whole_norms = {"q_norm": "q", "k_norm": "k"} if getattr(architecture, "whole_qk_norm", False) else {}
        if config.num_heads < size and not whole_attention:
            raise self._refused("attention heads", config.num_heads, f"at least {size}")
        self._heads = [(0, config.num_heads)] * size
        if not whole_attention:
            self._heads = head_spans(config.num_heads, config.num_kv_heads, size)
        layers = range(config.num_layers)
        widths = [(layer, config.intermediate_of(layer)) for layer in layers if f"layers.{layer}.down" in stored]
        self._inner = {
            layer: self._spans("down", width, self._unit(f"layers.{layer}.", "down", width)) for layer, width in widths
        }
        moe = config.moe
        sparse = [f"layers.{layer}." for layer in layers if moe and moe.is_sparse(layer)]
        self._experts = self._common(sparse, "down_exps", moe.intermediate_size) if moe and not self._own else []
        self._shared = (
            self._common(sparse, "shared_down", moe.shared_size)
            if moe and moe.shared_size and not self.dispatches
            else []
        )
        table = self.schemes["embed" if config.tied_head else "head"]
        self.head_spans = spread(config.vocab_size, lcm(HEAD_UNIT, table.row_unit), size)
        self.widths = tuple(stop - start for start, stop in self.head_spans)
        if config.causal and not all(self.widths):
            raise self._refused("tokens of the vocabulary", config.vocab_size, f"at least {size * HEAD_UNIT}")
        self._check_columns()
        if config.has_state:
            self._mixers = MixerShares(config, stored, self.schemes, self._narrowed, rank, size)
        self.config = self._config()

    @property
    def partial(self) -> frozenset[str]:
        """Weights of layers of whose products each rank has a part of the sum."""
        is_cut = self._mixers is not None and self._mixers.is_cut
        found = {"o", "down", "shared_down", *(["mix_out"] if is_cut else [])}
        whole = {"o"} if self.divides_rows else set()
        return frozenset(found - (whole | {"shared_down"} if self.dispatches else whole))

    def _refused(self, what: str, found: object, known: str) -> UnsupportedError:
        return UnsupportedError(f"{self.path}: --tensor-parallel-size {self.size}: {what}", found, [known])

    def _own_experts(self) -> Span:
        """The experts that are whole on this rank."""
        moe = self.whole.moe
        if moe is None:
            raise UnsupportedError(
                f"{self.path}: --expert-parallel: model", "without experts", ["a mixture of experts"]
            )
        if moe.num_experts < self.size:
            raise self._refused("experts with --expert-parallel", moe.num_experts, f"at least {self.size}")
        return spread(moe.num_experts, 1, self.size)[self.rank]

    def _check_kind(self) -> None:
        config = self.whole
        if self.divides_rows and config.latent is None:
            what = f"{self.path}: --data-parallel-attention: attention"
            raise UnsupportedError(what, "with keys and values of heads", ["of latents (DeepSeek V2 and its like)"])

    # -- where cuts are

    def _common(self, layers: list[str], role: str, total: int) -> list[Span]:
        """Spans that all layers can be cut at: the configuration has one width for all."""
        units = {self._unit(layer, role, total) for layer in layers}
        return self._spans(role, total, lcm(*units))

    def _spans(self, role: str, total: int, unit: int) -> list[Span]:
        found = spread(total, unit, self.size)
        if any(start == stop for start, stop in found):
            raise self._refused(f"columns of {role} in groups of {unit}", total, f"at least {self.size * unit}")
        return found

    def _unit(self, layer: str, role: str, total: int) -> int:
        """What the columns of a matrix that is read by columns, and the rows of those that make them, can be cut at."""
        scheme = self._narrowed(layer + role, lambda unit: total // unit >= self.size)
        unit = lcm(scheme.column_unit, 2 * TILE_ROWS)
        for other, spans in ROWS.items():
            if spans[0] == COLUMNS[role] and layer + other in self.schemes:
                unit = lcm(unit, self.schemes[layer + other].row_unit)
        # Whole super-blocks are read by the loader's threads, whole tiles of 128 are what a GPU's products take at once.
        wanted = 256 if self._stored[layer + role][0].layout == "ggml" else 128 if self._family == "gpu" else unit
        wide = lcm(unit, wanted)
        return wide if total % wide == 0 and total // wide >= 2 * self.size else unit

    def _narrowed(self, role: str, fits) -> Scheme:
        """The scheme of a role; of numbers that are quantized now the groups are halved until they fit."""
        scheme, info = self.schemes[role], self._stored[role][0]
        if isinstance(scheme, SuperblockScheme) and not fits(scheme.column_unit):
            scheme = scheme.narrow  # a cut inside a super-block
        while self._quantizes and info.was_dense and isinstance(scheme, AffineScheme) and not fits(scheme.column_unit):
            if scheme.group <= 2 * TILE_ROWS:
                break
            scheme = AffineScheme(scheme.bits, scheme.group // 2, scheme.symmetric)
        self.schemes[role] = scheme
        return scheme

    def _check_columns(self) -> None:
        """That o can be cut where heads end."""
        for layer in range(self.whole.num_layers):
            role, dim = f"layers.{layer}.o", self._dim(VALUES, layer)
            if role not in self.schemes:
                continue  # a layer without attention
            ends = gcd(*(stop * dim for _, stop in self._heads))
            scheme = self._narrowed(role, lambda unit, ends=ends: ends % unit == 0)
            if ends % lcm(scheme.column_unit, 2 * TILE_ROWS):
                what = f"{self._stored[role][0].name}, whose scales are of {scheme.column_unit} columns, cut at multiples of"
                raise self._refused(what, ends, f"multiples of {lcm(scheme.column_unit, 2 * TILE_ROWS)}")
            self._kv_span(layer, self.rank)

    def _kv_span(self, layer: int, rank: int) -> Span:
        """The KV heads that the rank's query heads read: all of them by equally many."""
        start, stop = self._heads[rank]
        group = self.whole.num_heads // self.whole.kv_heads_of(layer)
        found = start // group, -(-stop // group)
        if found[1] - found[0] > 1 and (start % group or stop % group):
            what = f"query heads {start} to {stop} of a rank, for KV heads of layer {layer} with"
            raise self._refused(what, f"{group} query heads each", "whole groups, or a part of one")
        return found

    def _config(self) -> ModelConfig:
        whole, (start, stop) = self.whole, self._heads[self.rank]
        kinds = {whole.kv_heads_of(layer): self._kv_span(layer, self.rank) for layer in range(whole.num_layers)}
        heads = {count: last - first for count, (first, last) in kinds.items()}
        inner = {layer: _width(spans[self.rank]) for layer, spans in self._inner.items()}
        changes: dict[str, Any] = dict(
            num_heads=stop - start, num_kv_heads=heads.get(whole.num_kv_heads, 1), tied_head=False
        )
        if whole.global_kv_heads:
            changes["global_kv_heads"] = heads.get(whole.global_kv_heads, 1)
        if inner:
            widths = tuple(inner.get(layer, next(iter(inner.values()))) for layer in range(whole.num_layers))
            changes["intermediate_size"] = widths[0]
            changes["intermediate_sizes"] = widths if len(set(widths)) > 1 else ()
        if whole.moe is not None:
            shared = _width(self._shared[self.rank]) if self._shared else whole.moe.shared_size
            mine: dict[str, Any] = {"own": (self._own[0], _width(self._own))} if self._own else {}
            if not self._own:
                mine["intermediate_size"] = _width(self._experts[self.rank])
            changes["moe"] = msgspec.structs.replace(whole.moe, shared_size=shared, **mine)
        if self._mixers is not None:
            changes["recurrent"] = self._mixers.recurrent
        if self.rank and not self.divides_rows:
            changes["o_bias"] = False
        return msgspec.structs.replace(whole, **changes)

    def spans_of(self, layer: int, name: str) -> tuple[list[Span] | None, list[Span] | None]:
        """The rows, one range behind the other, and the columns of a product of a layer that are the rank's; None: all."""
        rows, at = [], 0
        for kind in self._row_kinds(layer, name):
            start, stop = self._span(kind, layer)
            rows.append((at + start, at + stop))
            at += self._total(kind, layer)
        columns = self._columns_of(f"layers.{layer}.{name}")
        return rows or None, [self._span(columns, layer)] if columns else None

    def whole_norm(self, layer: int) -> tuple[tuple[int, int], float]:
        """Of norms over all heads together: the columns of q and of k of all ranks, and how much of its keys' sum of squares
        is a rank's part, where others have the same KV heads."""
        mine, dim = self._kv_span(layer, self.rank), self.whole.head_dim_of(layer)
        copies = sum(self._kv_span(layer, rank) == mine for rank in range(self.size))
        return (self.whole.num_heads * dim, self.whole.kv_heads_of(layer) * dim), 1 / copies

    def gathered(self, layer: int, ordered: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Of products of a layer whose columns are in an order of their own (zse.formats.column_order) and cut: how many of their
        inputs each rank makes. A rank's columns are a range of that order, as long as its own inputs are: of any rank's."""
        kinds = {name: kind for name in ordered if (kind := self._columns_of(f"layers.{layer}.{name}"))}
        ranks = range(self.size)
        return {name: tuple(_width(self._span(kind, layer, rank)) for rank in ranks) for name, kind in kinds.items()}

    # -- pieces of tensors

    def pieces(self, role: Role) -> list[SharePiece]:
        """What the rank has of a role, in the order of its rows; none of what others add."""
        layer, _, name = role.name.rpartition(".")
        infos = self._stored[role.name]
        if role.experts and self._own:
            count = _width(self._own)
            shape = role.shape[0] // role.experts * count, *role.shape[1:]
            part = msgspec.structs.replace(role, shape=shape, experts=count)
            return [SharePiece(part, info, None) for info in infos[slice(*self._own)]]
        if name in ONCE and self.rank and not (name == "o_bias" and self.divides_rows):
            return []
        if role.name == "head":
            return [self._rows(role, info, self.head_spans[self.rank]) for info in infos]
        number = int(layer.partition(".")[2] or 0)
        if name == "sinks":
            return [self._rows(role, infos[0], self._heads[self.rank])]
        columns = self._columns_of(role.name)
        if columns:
            span = self._span(columns, number)
            part = msgspec.structs.replace(role, shape=(role.shape[0], _width(span)))
            return [SharePiece(part, *columns_of(info, span[0], _width(span))) for info in infos]
        rows = self.spans_of(number, name)[0] or self.spans_of(number, name.removesuffix("_bias"))[0]
        if rows is None:
            return [SharePiece(role, info, None) for info in infos]
        # Of experts each has a tensor; other rows may lie in several, one behind the other.
        found: list[SharePiece] = []
        for members in [[info] for info in infos] if role.experts else [infos]:
            for start, stop in rows:
                at = 0
                for info in members:
                    first, last = max(start - at, 0), min(stop - at, info.shape[0])
                    if first < last:
                        found.append(self._rows(role, info, (first, last)))
                    at += info.shape[0]
        return found

    def _columns_of(self, role: str) -> str:
        layer, _, name = role.rpartition(".")
        if not layer or (name == "down_exps" and self._own) or (name == "o" and self.divides_rows):
            return ""
        if name == "shared_down" and self.dispatches:
            return ""
        return COLUMNS.get(name) or (self._mixers.columns(int(layer[7:]), name) if self._mixers else "")

    def _row_kinds(self, layer: int, name: str) -> tuple[str, ...]:
        if self.dispatches and ROWS.get(name) == (SHARED,):
            return ()
        return ROWS.get(self._whole_norms.get(name, name)) or (self._mixers.rows(layer, name) if self._mixers else ())

    def _span(self, kind: str, layer: int, rank: int | None = None) -> Span:
        """Rows or columns, in numbers. rank: whose, by default this one's; of mixers (whose columns have no order) always."""
        if self._mixers is not None and (span := self._mixers.span(kind)) is not None:
            return span
        rank, dim = self.rank if rank is None else rank, self._dim(kind, layer)
        if dim:
            start, stop = self._kv_span(layer, rank) if kind == KEYS else self._heads[rank]
            return start * dim, stop * dim
        return {INNER: self._inner.get(layer), EXPERTS: self._experts, SHARED: self._shared}[kind][rank]  # type: ignore[index]

    def _dim(self, kind: str, layer: int) -> int:
        """Rows or columns of a head; 0 of what heads do not have."""
        latent, dim = self.whole.latent, self.whole.head_dim_of(layer)
        if latent is None:
            return {QUERIES: dim * self._gated, KEYS: dim, VALUES: dim}.get(kind, 0)
        return {QUERIES: dim, LATENTS: latent.rank, VALUES: latent.value}.get(kind, 0)

    def _total(self, kind: str, layer: int) -> int:
        if self._mixers is not None and self._mixers.span(kind) is not None:
            return self._mixers.total(kind)
        heads = {QUERIES: self.whole.num_heads, KEYS: self.whole.kv_heads_of(layer)}
        return heads[kind] * self._dim(kind, layer) if kind in heads else self.whole.intermediate_of(layer)

    def _rows(self, role: Role, info: TensorInfo, span: Span) -> SharePiece:
        start, stop = span
        rows, heads = stop - start, _width(span) // self.whole.head_dim_of(0) if role.heads else 0
        part = msgspec.structs.replace(role, shape=(rows * (role.experts or 1), *role.shape[1:]), heads=heads)
        name = f"{info.name} rows {start} to {stop}"
        if len(info.shape) == 1:
            return SharePiece(part, info.range_of(info.shape[0], start, rows)._replace(name=name), None)
        if reads_rows(info, start, stop):
            return SharePiece(part, info.rows(start, rows)._replace(name=name), None)
        unit = self.schemes[role.name].row_unit
        if start % unit or (stop % unit and stop != info.shape[0]):
            raise self._refused(
                f"rows of {info.name}, {start} to {stop}, as {self.schemes[role.name]}", rows, f"multiples of {unit}"
            )
        return SharePiece(part, info, ShareCut((start, stop), (0, info.shape[1])))


def _width(span: Span) -> int:
    return span[1] - span[0]


def columns_of(info: TensorInfo, first: int, count: int) -> tuple[TensorInfo, ShareCut | None]:
    """Columns of a stored matrix: as a tensor where they can be read apart, else as a cut."""
    if info.layout in BY_COLUMN and info.parts and info.parts.keys() <= {"q", "scale", "zero"}:
        return info.columns(first, count), None
    return info, ShareCut((0, info.shape[0]), (first, first + count))
