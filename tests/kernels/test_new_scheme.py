"""What a scheme of weights takes that is not affine, on a CPU: a class, its place in the list of schemes, and a file of kernels.

Here all of it is this module: 4-bit indices into a table of 16 values, which each group of 32 columns scales."""

# ruff: noqa: F821

from collections import namedtuple
from itertools import product

import numpy as np
import pytest

from zse import kernel as zl
from zse.bench import kernels as timing
from zse.bench import own_kernels
from zse.kernels.host import random_weight
from zse.kernels.matmul import MATMUL
from zse.kernels.matmul_tile import TILE, block_tokens, store_tile
from zse.kernels.op import Case, Op, OutputSpec, Tolerance
from zse.plan.forms import form_of
from zse.quant import pack, scheme
from zse.quant.plane import BLOCK_COLUMNS, LAYOUT, TILE_ROWS, StoredScheme, cached, plane, tiles


class Lut4Scheme(namedtuple("Lut4Scheme", "group"), StoredScheme):
    """Planes: q u8 [T, K, 8] (two rows' indices a byte), table f32 [16], scale f16 [T, K/group, 16]."""

    __slots__ = ()
    kind, name, element, numbers = "lut4", "lut4-g32", "lut4", "q"
    layouts, in_memory, forms = (LAYOUT,), {"cpu": LAYOUT}, ("f32",)
    products = __name__
    step = BLOCK_COLUMNS

    def fits(self, k: int) -> bool:
        return k > 0 and k % self.group == 0

    def groups(self, k: int) -> int:
        return k // self.group

    @cached
    def planes(self, n: int, k: int, layout: str = LAYOUT):
        self.check_layout(layout)
        t = tiles(n)
        return (
            plane("q", "u8", t, k, TILE_ROWS // 2),
            plane("table", "f32", 16),
            plane("scale", "f16", t, self.groups(k), TILE_ROWS),
        )

    def quantize(self, w, layout=LAYOUT, **options):
        n, k = w.shape
        table = np.sinh(np.linspace(-2, 2, 16)).astype(np.float32)
        grouped = w.reshape(n, -1, self.group)
        scale = (np.abs(grouped).max(axis=2) / table[-1]).astype(np.float16)
        steps = grouped / np.maximum(scale.astype(np.float32), 1e-8)[..., None]
        index = np.abs(steps[..., None] - table).argmin(axis=-1).astype(np.uint8).reshape(n, k)
        tiled = pack.tile(index)
        return {"q": tiled[..., ::2] | tiled[..., 1::2] << 4, "table": table, "scale": pack.tile(scale)}

    def dequantize(self, planes, n, k, layout=LAYOUT):
        given = pack.check_planes(self, planes, n, k)
        index = np.stack([given["q"] & 15, given["q"] >> 4], axis=-1).reshape(tiles(n), k, TILE_ROWS)
        scale = pack.untile(given["scale"], n).astype(np.float32)
        return given["table"][pack.untile(index, n)] * np.repeat(scale, self.group, axis=1)

    def random(self, rng, n, k, layout=LAYOUT):
        return self.quantize(rng.standard_normal((n, k)).astype(np.float32))


class Lut4Product(zl.Record):
    q: zl.Ptr[zl.u8, "const"]
    table: zl.Ptr[zl.f32, "const"]
    scale: zl.Ptr[zl.f16, "const"]
    a: zl.Ptr[zl.f32, "const"]
    bias: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    tokens: zl.i64
    rows: zl.i64
    width: zl.i64
    group: zl.i64
    has_bias: zl.i64


@zl.kernel
def matmul_lut4(p: Lut4Product):
    lanes = zl.target.lanes
    tile = zl.block_index(0)
    first, last = block_tokens(p.tokens)
    weights = zl.local_array(zl.f32, TILE)
    for token in range(first, last):
        for part in range(TILE // lanes):
            acc = zl.f32.x(lanes)(0)
            for k in range(p.width):
                scale = p.scale + (tile * (p.width // p.group) + k // p.group) * TILE
                for r in range(TILE):
                    both = zl.i32(p.q[(tile * p.width + k) * (TILE // 2) + r // 2])
                    weights[r] = p.table[zl.i64(both >> zl.i32(r % 2 * 4) & 15)] * zl.f32(scale[r])
                a = zl.f32.x(lanes)(p.a[token * p.width + k])
                acc = zl.fma(zl.load(weights + part * lanes, lanes), a, acc)
            store_tile(p, token, acc, tile, part)


def variants(target):
    return [zl.Variant("matmul_lut4", matmul_lut4)]


def launch_of(weight, a, max_tokens):
    return "matmul_lut4", dict(weight.planes, a=a, width=weight.shape[1], group=weight.scheme.group)


def cases(rng, family="cpu"):
    for (tokens, rows, width), has_bias in product(((1, 32, 64), (3, 40, 96), (70, 17, 32)), (False, True)):
        weight = random_weight(rng, rows, width, Lut4Scheme(32))
        inputs = {"a": rng.standard_normal((tokens, width)).astype(np.float32), "weight": weight}
        inputs["bias"] = rng.standard_normal(rows).astype(np.float32) if has_bias else None
        near = Tolerance(1e-4, 1e-5, "f32 sums in another order than float64")
        yield Case(f"{tokens}x{rows}x{width}", inputs, {"out": OutputSpec((tokens, rows), "float32", near)})


@pytest.fixture
def lut4(monkeypatch):
    """The scheme, listed."""
    found = Lut4Scheme(32)
    monkeypatch.setattr(scheme, "SCHEMES", [*scheme.SCHEMES, found])
    monkeypatch.setitem(scheme._BY_NAME, found.name, found)
    return found


def test_its_name_planes_and_memory_are_known(lut4):
    assert scheme.parse_scheme("lut4-g32") == lut4 and scheme.memory_layout(lut4, "cpu") == LAYOUT
    placed, nbytes = scheme.placed_planes(lut4, 40, 96)
    assert [found.name for found, _ in placed] == ["q", "table", "scale"] and nbytes >= lut4.nbytes(40, 96)
    with pytest.raises(ValueError, match="the GPU has no kernels for lut4-g32"):
        scheme.memory_layout(lut4, "gpu")


def test_what_is_quantized_means_the_same():
    w = np.random.default_rng().standard_normal((40, 96)).astype(np.float32)
    weight = Lut4Scheme(32)
    got = weight.dequantize(weight.quantize(w), 40, 96)
    assert np.abs(got - w).mean() < 0.1 * np.abs(w).mean()


def test_its_products_agree_with_its_reference(lut4):
    assert form_of(None, "int8", [lut4], 1, False) == "f32"
    op = Op("lut4", variants, MATMUL.launch, MATMUL.reference, cases, MATMUL.cost)
    with own_kernels.device_for(op, "cpu") as device:
        for case in cases(np.random.default_rng()):
            assert timing.problem(device, op, case) == "", case.name
