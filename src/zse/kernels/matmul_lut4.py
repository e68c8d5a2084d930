"""Products of a CPU with lut4 weights (zse.quant.lut4): those of 8-bit affine weights, whose bytes a shuffle makes of
indices.

One instruction looks up the numbers of 4 indices a lane, plus 128, so that they are without a sign as the multiply-add
wants them; from there on they are symmetric 8-bit weights: matmul_affine's loops, with scales as
zse.kernels.matmul_affine_parts.table_step makes them. 4-bit floats (up to 12) are 5-bit weights where that is cheaper
(dot_bits)."""

from zse import kernel as zl
from zse.kernels.matmul_affine import FEW, TILES, F32Product, multiply_tile, multiply_tile_f32
from zse.kernels.matmul_affine_many import multiply_many
from zse.kernels.matmul_affine_parts import BLOCK_TILES, LUT, Int8Product
from zse.kernels.matmul_tile import TILE, tile_for

KINDS = (("f16", 16), ("f16", 32), ("i8", 16), ("i8", 32), ("e8m0", 32), ("e4m3", 16))  # of scales, with their groups


class Lut4Int8Product(Int8Product):
    """table0 .. 3: the scheme's table_args(); unit: what multiplies the numbers."""

    scale: zl.Ptr[zl.u8, "const"]
    factor: zl.Ptr[zl.u8, "const"]
    table0: zl.i32
    table1: zl.i32
    table2: zl.i32
    table3: zl.i32
    unit: zl.f32


class Lut4F32Product(F32Product):
    """Likewise."""

    scale: zl.Ptr[zl.u8, "const"]
    factor: zl.Ptr[zl.u8, "const"]
    table0: zl.i32
    table1: zl.i32
    table2: zl.i32
    table3: zl.i32
    unit: zl.f32

    @property
    def GROUP(self) -> int:
        return 32 // self.HALVES


@zl.kernel
def matmul_int8_lut4(p: Lut4Int8Product):
    """As matmul_int8."""
    multiply_tile(p)


@zl.kernel
def matmul_int8_lut4_many(p: Lut4Int8Product):
    """As matmul_int8_many."""
    multiply_many(p)


@zl.kernel
def matmul_f32_lut4(p: Lut4F32Product):
    """As matmul_f32."""
    multiply_tile_f32(p)


def symbol_of(code: str, group: int, form: str, tokens: str) -> str:
    return f"matmul_{form}_lut4_{code}_g{group}_{tokens}"


def launch_of(weight, a, max_tokens: int) -> tuple[str, dict, int]:
    """(variant, the arguments that only these kernels take, tiles of a block) for activations a."""
    scheme, planes, width = weight.scheme, weight.planes, weight.shape[1]
    inputs = {"a": a} if a.dtype == "f32" else {"aq": a.q, "a_low": a.low, "a_scale": a.scale, "a_sum": a.sum}
    args = {name: planes.get(name) for name in ("q", "high", "scale", "offset", "factor")} | inputs
    args |= {"blocks": width // 32, "group_blocks": 1, "unit": scheme.unit} | scheme.table_args(signed=True)
    few = 1 if scheme.group == 16 or a.dtype == "int16" else FEW
    if a.dtype != "f32" and max_tokens > few:
        return symbol_of(scheme.code, scheme.group, a.dtype, "many"), args, BLOCK_TILES
    tokens = f"t{tile_for(max_tokens, TILES[a.dtype])}"
    return symbol_of(scheme.code, scheme.group, a.dtype, tokens), args, 1


def variants(target) -> list[zl.Variant]:
    made = []
    for code, group in KINDS:
        statics = {"BITS": LUT, "SYMMETRIC": True, "CODE": code}
        for form in ("int8", "int16"):
            more = statics | {"GROUP": group, "WIDE": form == "int16"}
            for tokens in TILES[form][: 1 if group == 16 else None]:
                parts = TILE // target.lanes if tokens == 1 else 1
                one = more | {"PARTS": parts, "TOKENS": tokens}
                made.append(zl.Variant(symbol_of(code, group, form, f"t{tokens}"), matmul_int8_lut4, one))
            many = more | {"PARTS": 1, "TOKENS": 4}
            made.append(zl.Variant(symbol_of(code, group, form, "many"), matmul_int8_lut4_many, many))
        for tokens in TILES["f32"]:
            more = statics | {"HALVES": 32 // group, "TOKENS": tokens}
            made.append(zl.Variant(symbol_of(code, group, "f32", f"t{tokens}"), matmul_f32_lut4, more))
    return made
