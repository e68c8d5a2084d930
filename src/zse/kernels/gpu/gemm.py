"""Matrix products of more than a few tokens: which kernel and which tiles a weight and a number of tokens get
(gemm_launch records them).

On Hopper, up to 64 tokens, or 128 with integers, a product is bound by reading the weights (gemm_skinny); above, by the
tensor cores: gemm_wgmma for bf16 and fp8, gemm_r16 for integers. int4 weights with e4m3 activations are gemm_w4a8's and
gemm_w4a8_few's. With 132 multiprocessors a product of 1,024 tokens and 3,584 rows is 112 tiles of 128 x 256: a sixth of the chip would idle. So there are several tiles, and `choose` takes
what a simple model of measured times says is fastest: waves of units, each as long as its steps of k and its epilogue
(in pingpong only the last one's), and for few tiles their k split into parts. The figures stand in benchmarks/LOG.md.

Elsewhere, and for weights that these kernels have no form for (f16, f32), pieces of the weight that stay in the L2
cache are turned into bf16 (dequantize) and multiplied (gemm_wgmma, gemm_portable).
"""

from collections.abc import Callable
from typing import NamedTuple

from zse.kernel import Variant
from zse.kernels.gpu import (
    dequantize,
    gemm_portable,
    gemm_push,
    gemm_r16,
    gemm_skinny,
    gemm_w4a8,
    gemm_w4a8_few,
    gemm_wgmma,
)
from zse.kernels.gpu.r16 import stage_blocks

FEW_TOKENS = 8  # up to here matmul_small is faster
# above, a weight that must be made bf16 first is: matmul_small would read it once per 8 tokens
PREPARED_TOKENS = 32
# What a unit costs beyond its steps, us: filling the ring and a quarter of it per 8,192 elements to write; more for
# adding parts.
READ_BYTES_US = 4.1e6  # the memory's speed
UNIT_US, WRITE_US, SPLIT_US = 1.5, 2.5 / 32768, 3.0
PART_US = {False: 3.8 / 32768, True: 2.0 / 32768}  # for integers: True


class Tile(NamedTuple):
    """tokens x rows of the weight; step_us: time of 128 bytes of k (64 columns of integers), measured on an H200.
    pingpong: a tile is one warpgroup's, and its end runs beside the other's products."""

    tokens: int
    rows: int
    step_us: float
    pingpong: bool = False


# (kind, gated) -> tiles. Gated tiles are half gates, half ups.
TILES = {
    ("bf16", False): (
        Tile(128, 256, 0.690),
        Tile(256, 144, 0.700),
        Tile(128, 224, 0.595),
        Tile(128, 144, 0.365),
        Tile(128, 128, 0.335),
        Tile(128, 64, 0.230),
    ),
    ("bf16", True): (
        Tile(128, 192, 0.525, True),
        Tile(256, 144, 0.745),
        Tile(128, 256, 0.690),
        Tile(128, 192, 0.525),
        Tile(128, 144, 0.385),
    ),
    ("e4m3", False): (
        Tile(256, 128, 0.720),
        Tile(256, 144, 0.800),
        Tile(128, 144, 0.430, True),
        Tile(128, 112, 0.360, True),
        Tile(256, 112, 0.670),
        Tile(128, 144, 0.415),
        Tile(128, 128, 0.380),
        Tile(128, 64, 0.240),
    ),
    ("e4m3", True): (Tile(128, 192, 0.610, True), Tile(256, 128, 0.780), Tile(128, 192, 0.590), Tile(128, 144, 0.440)),
    ("block", False): (Tile(256, 128, 0.850), Tile(128, 128, 0.450)),
    ("block", True): (Tile(256, 128, 0.850), Tile(128, 128, 0.450)),
    ("integer", False): (Tile(256, 128, 0.670), Tile(176, 128, 0.560), Tile(128, 128, 0.490)),
    ("integer", True): (Tile(256, 128, 0.670), Tile(128, 128, 0.490)),
    ("w4a8", False): (Tile(256, 128, 0.800), Tile(192, 128, 0.630), Tile(152, 128, 0.500), Tile(128, 128, 0.455)),
    ("w4a8", True): (Tile(256, 128, 0.800), Tile(128, 128, 0.455)),
}
# gemm_w4a8_few: (tokens, blocks of 64 rows of a warpgroup) of its forms.
W4A8_FEW = ((16, 2), (64, 2))
# gemm_skinny: kind -> (tokens, warpgroups that multiply) of its forms.
SKINNY = {
    "bf16": ((16, 2), (64, 2)),
    "e4m3": ((16, 2), (64, 2)),
    "block": ((16, 2), (64, 2)),
    4: ((16, 4), (64, 4), (128, 3)),
    5: ((64, 4), (128, 3)),
    6: ((64, 4), (128, 3)),
    8: ((16, 4), (64, 4), (128, 3)),
}
FINE = 16  # columns of a group that needs two scales a block of 32: gemm_r16 has forms for it, gemm_skinny none


def has_wgmma(device) -> bool:
    """Only Hopper: the instructions were not carried over to later architectures."""
    return device.arch == 90


def kind_of(scheme) -> object:
    """Of the operands on Hopper: bits of an integer, "bf16", "e4m3", "block", or None where those kernels have no
    form."""
    return KINDS.get(scheme.kind, lambda scheme: None)(scheme)


KINDS: dict[str, Callable] = {
    "affine": lambda scheme: scheme.bits,
    "fp8": lambda scheme: "block" if scheme.scaling == "block" else "e4m3",
    "dense": lambda scheme: "bf16" if scheme.dtype == "bf16" else None,
}


def is_fp8(kind: object) -> bool:
    return kind in ("e4m3", "block")


def wants_fp8(device, scheme, max_tokens: int, narrow: bool = False) -> bool:
    """Whether products of this many tokens with such a weight take an Fp8Activation rather than bf16. narrow: int4
    weights do, too, where gemm_w4a8 takes them."""
    mine = scheme.element == "e4m3" or narrow and kind_of(scheme) == 4 and scheme.group == gemm_w4a8.DEPTH
    return has_wgmma(device) and mine and max_tokens > FEW_TOKENS


def direct(device, weight, activation: str, gated: bool, max_tokens: int) -> bool:
    """Whether a Hopper kernel takes the weight as it is."""
    rows, width = weight.shape
    kind = kind_of(weight.scheme)
    if not has_wgmma(device) or max_tokens <= FEW_TOKENS or kind is None:
        return False
    narrow = activation == "fp8"
    if narrow != is_fp8(kind) and not (narrow and wants_fp8(device, weight.scheme, max_tokens, True)):
        return False
    if kind == "block" and gated and rows % 128:
        return False
    if isinstance(kind, int):
        return rows % (32 if gated else 2) == 0
    return width % (16 if is_fp8(kind) else 8) == 0 and rows % (16 if gated else 2) == 0


def takes(device, weight, activation: str, gated: bool, max_tokens: int) -> bool:
    """Whether launch() has a kernel for this product. activation: "bf16" or "fp8"."""
    if direct(device, weight, activation, gated, max_tokens):
        return True
    rows, width = weight.shape
    return (
        activation == "bf16"
        and max_tokens > PREPARED_TOKENS
        and device.arch >= 80
        and width % 8 == 0
        and rows % (32 if gated else 1) == 0
    )


class TileChoice(NamedTuple):
    tile: Tile
    splits: int
    microseconds: float


def choose(kind: object, gated: bool, tokens: int, cols: int, width: int, sms: int, group: int = 0) -> TileChoice:
    """The tile and the number of parts of k for out [tokens, cols], by the model of this module."""
    integer = isinstance(kind, int)
    only = 256 if integer and (kind != 4 or group == FINE) else 0  # other integers have the large tile alone
    steps = -(-width // (128 if is_fp8(kind) or kind == "w4a8" else 64))
    item = kind / 8 if integer else {"bf16": 2.0, "w4a8": 0.5}.get(str(kind), 1.0)
    read_us = cols * (2 if gated else 1) * width * item / READ_BYTES_US
    best = None
    for tile in TILES["integer" if integer else kind, gated]:
        if only and tile.tokens != only:
            continue
        made = tile.rows // 2 if gated else tile.rows
        tiles = -(-tokens // tile.tokens) * -(-cols // made)
        size = tile.tokens * tile.rows
        if tile.pingpong and tiles <= sms:
            continue  # no block has two, so nothing would hide an end
        for splits in range(1, 2 if tile.pingpong else 10):
            if splits > 1 and (tiles * splits > sms or splits * 4 > steps):
                break
            waves = -(-tiles * splits // sms)
            ends = (1 if tile.pingpong else waves) * (UNIT_US + WRITE_US * size)  # that nothing hides
            computing = waves * -(-steps // splits) * tile.step_us + ends
            time = max(read_us, computing) + 0.1 * computing  # neither hides the other quite
            if splits > 1:
                time += SPLIT_US + PART_US[integer] * size * splits
            if best is None or time < best.microseconds:
                best = TileChoice(tile, splits, time)
    assert best is not None
    return best


def is_skinny(kind: object, max_tokens: int, group: int) -> bool:
    """Whether gemm_skinny multiplies. group: of an integer, else 0."""
    return max_tokens <= SKINNY[kind][-1][0] and group != FINE


def symbol_of(kernel: str, kind: object, tokens: int, rows: int, gated: bool, fine: bool = False) -> str:
    name = f"int{kind}" if isinstance(kind, int) else str(kind)
    return f"{kernel}_{name}{'_fine' if fine else ''}_{tokens}x{rows}{'_gated' if gated else ''}"


def variants(target) -> list[Variant]:
    """Every kernel of this module, and those that make bf16 of weights."""
    if not target.has("mma_sync"):
        return []
    made = dequantize.variants(target)
    made += [
        Variant(portable(gated), gemm_portable.gemm_portable, {"GATED": gated}, threads=gemm_portable.THREADS)
        for gated in (False, True)
    ]
    if not target.has("wgmma"):
        return made
    for (kind, gated), tiles in TILES.items():
        for tile in tiles:
            if kind == "w4a8":
                made.append(_w4a8_variant(tile.tokens, 0, gated))
            elif kind == "integer":
                made += [
                    _r16_variant(bits, fine, tile, gated)
                    for bits in (4, 5, 6, 8)
                    for fine in (False, True)
                    if tile.tokens == 256 or (bits == 4 and not fine)
                ]
            else:
                made.append(_wgmma_variant(kind, tile, gated))
    for kind, forms in SKINNY.items():
        made += [
            Variant(
                symbol_of("gemm_skinny", kind, tokens, wg * 64, gated),
                gemm_skinny.gemm_skinny,
                {"KIND": kind, "BT": tokens, "WG": wg, "STAGES": gemm_skinny.stages(kind, tokens, wg), "GATED": gated},
                threads=128 * (wg + 1),
            )
            for tokens, wg in forms
            for gated in (False, True)
        ]
    made.append(_push_variant())
    return made + [_w4a8_variant(tokens, mt, gated) for tokens, mt in W4A8_FEW for gated in (False, True)]


PUSH = "gemm_push_bf16_64x128"


def _push_variant() -> Variant:
    statics = {
        "KIND": "bf16",
        "BT": gemm_push.ROWS,
        "WG": 2,
        "STAGES": gemm_skinny.stages("bf16", gemm_push.ROWS, 2),
        "GATED": False,
    }
    return Variant(PUSH, gemm_push.gemm_push, statics, threads=128 * 3)


def portable(gated: bool) -> str:
    return f"gemm_portable{'_gated' if gated else ''}"


def _wgmma_variant(kind: object, tile: Tile, gated: bool) -> Variant:
    tokens, rows = tile.tokens, tile.rows
    statics = dict(BM=tokens, BN=rows, STAGES=gemm_wgmma.stages(tokens, rows), GATED=gated, KIND=kind)
    statics["PINGPONG"] = tile.pingpong
    return Variant(wgmma_symbol(kind, tile, gated), gemm_wgmma.gemm_wgmma, statics, threads=gemm_wgmma.THREADS)


def wgmma_symbol(kind: object, tile: Tile, gated: bool) -> str:
    return symbol_of("gemm", kind, tile.tokens, tile.rows, gated) + ("_pingpong" if tile.pingpong else "")


def w4a8_symbol(tokens: int, mt: int, gated: bool) -> str:
    """mt: 0, or of gemm_w4a8_few."""
    rows = f"few_{tokens}x{mt * 128}" if mt else f"{tokens}x{gemm_w4a8.ROWS}"
    return f"gemm_w4a8_{rows}{'_gated' if gated else ''}"


def _w4a8_variant(tokens: int, mt: int, gated: bool) -> Variant:
    kernel = gemm_w4a8_few.gemm_w4a8_few if mt else gemm_w4a8.gemm_w4a8
    stages = gemm_w4a8.stages(tokens, mt * 128 or gemm_w4a8.ROWS)
    statics = dict(BT=tokens, STAGES=stages, GATED=gated) | (dict(MT=mt) if mt else {})
    return Variant(w4a8_symbol(tokens, mt, gated), kernel, statics, threads=128 * (gemm_w4a8.WARPGROUPS + 1))


def _r16_variant(bits: int, fine: bool, tile: Tile, gated: bool) -> Variant:
    tokens, wg = tile.tokens, tile.rows // 64
    statics = dict(KIND=bits, BLOCKS=stage_blocks(bits, tokens), HALVES=2 if fine else 1, BT=tokens, WG=wg)
    statics |= dict(STAGES=gemm_r16.stages(bits, tokens, wg), GATED=gated)
    symbol = symbol_of("gemm", bits, tokens, tile.rows, gated, fine)
    return Variant(symbol, gemm_r16.gemm_r16, statics, threads=128 * (wg + 1))
