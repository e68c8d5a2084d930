"""What arm64's vectors are printed as where gcc 12 would take them apart, lane by lane: conversions between sizes of
integers and of floats, and operations on two registers."""

from collections.abc import Callable
from typing import Any

import zse.kernel.ir as ir

# Lanes, bits from → an expression of a in NEON intrinsics; x: "s" or "u", n: "int" or "uint".
_AS_I16 = {
    (4, 8): "vmovl_{x}8(vreinterpret_{x}8_s32(vdup_n_s32((int32_t)a)))",
    (8, 8): "vmovl_{x}8(({n}8x8_t)a)",
    (8, 16): "({n}16x8_t)a",
}


def halves(vector: ir.Vector, name: str) -> list[str]:
    """The two halves of a variable."""
    each = vector.lanes // 2
    places = [", ".join(map(str, range(first, first + each))) for first in (0, each)]
    return [f"__builtin_shufflevector({name}, {name}, {place})" for place in places]


def joined(vector: ir.Vector, low: str, high: str) -> str:
    """A vector of two halves."""
    return f"__builtin_shufflevector({low}, {high}, {', '.join(map(str, range(vector.lanes)))})"


def by_halves(target: Any, name: str, result: ir.Vector, args: list[str], half: Callable[..., str]) -> str:
    """A call of an operation on two registers. half: (type, texts of the operands) → the operation on one."""
    params, ctype = "abc"[: len(args)], target.c_type(result)
    type = ir.Vector(result.elem, result.lanes // 2)
    parts = [half(type, list(places)) for places in zip(*(halves(result, param) for param in params), strict=True)]
    declared = ", ".join(f"{ctype} {param}" for param in params)
    return target.call(f"{name}_{result}", ctype, declared, f"return ({ctype}){joined(result, *parts)};", args)


def convert(target: Any, type: ir.Vector, source: ir.Vector, text: str) -> str:
    """A conversion of numbers but those to and from 16-bit floats. Between floats and small integers by way of i32."""
    to, of = type.elem, source.elem
    if to.bits + of.bits < 64 and (to.kind == "float") != (of.kind == "float"):
        wide = ir.Vector(ir.I32, type.lanes)
        return convert(target, type, wide, convert(target, wide, source, text))
    if to == of:
        return text
    sizes = {to.bits, of.bits}
    if len(sizes) == 2 and sizes <= {8, 16, 32} and type.lanes in (4, 8) and "float" not in (to.kind, of.kind):
        body = _widened(target, type, source) if to.bits > of.bits else narrowed(target, type, of.bits, "vmovn")
        return target.call(f"{type}_of_{source}", target.c_type(type), f"{target.c_type(source)} a", body, [text])
    return f"__builtin_convertvector({text}, {target.c_type(type)})"


def _widened(target: Any, type: ir.Vector, source: ir.Vector) -> str:
    ctype, kind = target.c_type(type), source.elem.kind
    x, n = {"int": ("s", "int"), "uint": ("u", "uint")}[kind]
    if (type.lanes, source.elem.bits) == (4, 16):
        return f"return ({ctype})vmovl_{x}16(({n}16x4_t)a);"
    wide = _AS_I16[type.lanes, source.elem.bits].format(x=x, n=n)
    if type.elem.bits == 16:
        return f"return ({ctype}){wide if type.lanes == 8 else f'vget_low_{x}16({wide})'};"
    low = f"vmovl_{x}16(vget_low_{x}16(h))"
    result = low if type.lanes == 4 else joined(type, low, f"vmovl_high_{x}16(h)")
    return f"{n}16x8_t h = {wide}; return ({ctype}){result};"


def narrowed(target: Any, type: ir.Vector, bits: int, move: str) -> str:
    """A helper's body: a, integers of `bits`, as smaller ones. move: "vmovn" drops bits, "vqmovn" saturates."""
    ctype = target.c_type(type)
    if type.lanes == 4:
        half = f"{move}_s32((int32x4_t)a)" if bits == 32 else "(int16x4_t)a"
        if type.elem.bits == 16:
            return f"return ({ctype}){half};"
        bytes_ = f"{move}_s16(vcombine_s16(h, h))"
        return f"int16x4_t h = {half}; return ({ctype})vget_lane_s32(vreinterpret_s32_s8({bytes_}), 0);"
    low, high = halves(ir.Vector(ir.I32, 8), "a")
    half = f"vcombine_s16({move}_s32((int32x4_t){low}), {move}_s32((int32x4_t){high}))"
    half = half if bits == 32 else "(int16x8_t)a"
    return f"return ({ctype}){half if type.elem.bits == 16 else f'{move}_s16({half})'};"


def half_conversion(target: Any, type: ir.Vector, source: ir.Vector, text: str) -> str | None:
    """f16 to f32 or back, to nearest even. None: of another size than one or two registers."""
    ctype, widens = target.c_type(type), type.elem == ir.F32
    if type.lanes == 4:
        return f"(({ctype}){'vcvt_f32_f16((float16x4_t)' if widens else 'vcvt_f16_f32((float32x4_t)'}{text}))"
    if type.lanes != 8:
        return None
    if widens:
        both = joined(type, "vcvt_f32_f16(vget_low_f16(h))", "vcvt_high_f32_f16(h)")
        body = f"float16x8_t h = (float16x8_t)a; return ({ctype}){both};"
    else:
        low, high = halves(source, "a")
        body = f"return ({ctype})vcvt_high_f16_f32(vcvt_f16_f32((float32x4_t){low}), (float32x4_t){high});"
    name = "f32_of_f16" if widens else "f16_of_f32"
    return target.call(f"{name}_{type}", ctype, f"{target.c_type(source)} a", body, [text])
