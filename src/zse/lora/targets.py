"""Which of a model's products an adapter may change, and an adapter's matrices as a slot holds them."""

import hashlib
import math
import re
from typing import Any, NamedTuple

from zse.errors import UnsupportedError
from zse.formats.adapter import AdapterFile, numbers_of, open_adapter
from zse.formats.source import INTERLEAVED_ROPE, rope_row_order
from zse.kernels.adapter import RANK_STEP
from zse.lazy import numpy as np
from zse.models import registry
from zse.models.config import ModelConfig
from zse.models.names import HF_PREFIXES
from zse.plan.rules import JOINED

ROUTERS = ("router", "shared_router")
HEAD_MATRICES = ("k_b", "v_b")  # of multi-head latent attention: made of one matrix of the file
_LAYER = re.compile(r"layers\.([0-9]{1,5})\.")


class AdaptedProduct(NamedTuple):
    """A product of a layer, [rows, columns]. down, up: where its A and B stand in a slot, for a rank of 1; product: its
    place in a line of scales; heads: of q and k where a Hugging Face file has their rows in pairs, else 0."""

    rows: int
    columns: int
    down: int
    up: int
    product: int
    heads: int


class Targets:
    """The products of a model that adapters may change, in a slot's order: a layer's A one behind the other, then its
    B.

    by_name: (layer, the weight's name in the forward) → AdaptedProduct. size: numbers of a slot for a rank of 1.
    modules: of each layer, the end of a module's name in a Hugging Face file → the names of its parts: q_proj → q,
    qkv_proj → q, k, v."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.by_name: dict[tuple[int, str], AdaptedProduct] = {}
        self.modules: list[dict[str, tuple[str, ...]]] = []
        self.size = 0
        model = registry.architecture(config.architecture)
        forward = model(config)
        pairs = any(family == config.architecture for name, family in registry.HF_NAMES.items() if name in _IN_PAIRS)
        for layer in range(config.num_layers):
            modules: dict[str, tuple[str, ...]] = {}
            found, names = {}, model.layer_names(config, layer)
            for role in model.layer_roles(config, layer):
                if role.kind != "matrix" or role.experts or role.name in (*ROUTERS, *HEAD_MATRICES):
                    continue
                members = JOINED.get(role.name, (role.name,))
                for way in names[role.name][1].split("|"):
                    module = way.removesuffix(".weight")  # several may lie in one, the first rows first
                    modules[module] = (*modules.get(module, ()), *members) if len(role.runs) == 1 else members
                for name in members:
                    rows = role.shape[0] if len(members) == 1 else forward.rows(name, layer)
                    found[name] = rows, role.shape[1], role.heads if pairs else 0
            self.modules.append(modules)
            self._place(layer, found)

    def _place(self, layer: int, found: dict[str, tuple[int, int, int]]) -> None:
        at = self.size
        up = at + sum(columns for _, columns, _ in found.values())
        for name, (rows, columns, heads) in found.items():
            self.by_name[layer, name] = AdaptedProduct(rows, columns, at, up, len(self.by_name), heads)
            at, up = at + columns, up + rows
        self.size = up

    @property
    def members(self) -> frozenset[str]:
        return frozenset(name for _, name in self.by_name)

    def parts_of(self, file: AdapterFile, module: str) -> tuple[int, tuple[str, ...]]:
        """(layer, names in the forward) of a module of an adapter. UnsupportedError names what adapters cannot
        change."""
        place = _LAYER.search(module)
        if place is not None and module[: place.start()] in HF_PREFIXES and int(place[1]) < len(self.modules):
            modules = self.modules[int(place[1])]
            if (found := modules.get(module[place.end() :])) is not None:
                return int(place[1]), found
        known = sorted({name.rpartition(".")[2] for modules in self.modules for name in modules})
        what = "an adapter of an expert" if ".experts." in module or ".block_sparse_moe." in module else "an adapter of"
        raise UnsupportedError(f"{file.path}: {what}", module[:160], known)

    def head_order(self) -> list[int] | None:
        """Which row of a head in the file stands at each row in memory; None: they are the same."""
        config = self.config
        if config.rope is None:
            return None
        return rope_row_order(1, config.head_dim, config.rope.dims(config.head_dim))


_IN_PAIRS = INTERLEAVED_ROPE["hf"]


class Image(NamedTuple):
    """An adapter as a slot holds it. rank: padded to whole RANK_STEPs. parts: (the first number, f16 numbers) of what
    is not zero. scales: f32, one of each product of the model. members: names in the forward of what it changes. id:
    the hash of all this. own_rank: its largest as its file has it."""

    id: str
    rank: int
    parts: list[tuple[int, bytes]]
    scales: bytes
    members: frozenset[str]
    own_rank: int

    @property
    def nbytes(self) -> int:
        return sum(len(data) for _, data in self.parts)


def read_image(path: str, targets: Targets, most: int) -> Image:
    """Read a PEFT folder for a model. most: the largest rank that slots hold. Raises FormatError, UnsupportedError."""
    file = open_adapter(path)
    try:
        return _image(file, targets, most)
    finally:
        file.close()


def _image(file: AdapterFile, targets: Targets, most: int) -> Image:
    own_rank = max(pair.rank for pair in file.pairs.values())
    if own_rank > most:
        raise UnsupportedError(f"{file.path}: rank", own_rank, [f"up to {most} (--adapter-rank)"])
    rank = -(-own_rank // RANK_STEP) * RANK_STEP
    scales = np.zeros(len(targets.by_name), np.float32)
    parts: list[tuple[int, Any]] = []
    members: set[str] = set()
    seen: set[AdaptedProduct] = set()
    for module, pair in file.pairs.items():
        layer, names = targets.parts_of(file, module)
        found = [targets.by_name[layer, name] for name in names]
        if not seen.isdisjoint(found):
            raise file.wrong(module, "is the second module for one weight of the model")
        seen.update(found)
        rows, columns = sum(target.rows for target in found), found[0].columns
        if pair.down.shape[1] != columns or pair.up.shape[0] != rows:
            got = f"lora_A {list(pair.down.shape)} and lora_B {list(pair.up.shape)}"
            raise file.wrong(module, f"has {got}; the model's weight is [{rows}, {columns}]")
        down, up = numbers_of(pair.down), numbers_of(pair.up)
        first = 0
        for name, target in zip(names, found, strict=True):
            mine = up[first : first + target.rows]
            first += target.rows
            if target.heads and (order := targets.head_order()) is not None:
                mine = mine.reshape(target.heads, -1, pair.rank)[:, order].reshape(target.rows, pair.rank)
            a, a_factor = _narrow(down, rank, target.columns)
            b, b_factor = _narrow(mine.T, rank, target.rows)
            scale = pair.scale * a_factor * b_factor
            if not math.isfinite(scale) or abs(scale) > 3e38:
                raise file.wrong(module, "holds numbers too large for f32")
            if a.any() and b.any():  # else it adds nothing
                scales[target.product] = scale
                parts += [(target.down * rank, a), (target.up * rank, b)]
                members.add(name)
    whole = merged(parts)
    digest = hashlib.blake2b(scales.tobytes(), digest_size=16)
    for at, data in whole:
        digest.update(at.to_bytes(8, "little") + len(data).to_bytes(8, "little") + data)
    return Image(digest.hexdigest(), rank, whole, scales.tobytes(), frozenset(members), own_rank)


def _narrow(values: Any, rank: int, width: int) -> tuple[Any, float]:
    """(f16 [rank, width], what they are to be multiplied with): divided by a power of two, so that the largest is from
    1 to 2 and what f16 rounds is 2^-11 of each number, of those below 2^-14 of the largest 2^-25 of that."""
    peak = float(np.abs(values).max())
    factor = 2.0 ** math.floor(math.log2(peak)) if peak > 0 else 1.0
    padded = np.zeros((rank, width), np.float16)
    padded[: len(values)] = (values.astype(np.float64) / factor).astype(np.float16)
    return padded, factor


def merged(parts: list[tuple[int, Any]]) -> list[tuple[int, bytes]]:
    """The parts as bytes, those that lie one behind the other as one."""
    found: list[tuple[int, list[bytes]]] = []
    end = -1
    for at, values in sorted(parts, key=lambda part: part[0]):
        if at != end:
            found.append((at, []))
        found[-1][1].append(values.tobytes())
        end = at + values.size
    return [(at, b"".join(data)) for at, data in found]
