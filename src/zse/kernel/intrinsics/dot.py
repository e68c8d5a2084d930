"""Packed int8 products. A 32-bit lane holds four consecutive k of one row, so lanes never have to be added across.

x86: maddubs (AVX2) and vpdpbusd (VNNI); arm64: sdot/usdot when the target has it.
"""

from zse.kernel import ir
from zse.kernel.intrinsics.row import Intrinsic

I32 = ir.Scalar("i32", "int", 32)


def _lanes(*types: object) -> ir.Type | str:
    first = types[0]
    if not isinstance(first, ir.Vector) or first.elem != I32 or any(type != first for type in types):
        return f"needs i32 vectors of one length (four packed bytes in each lane), got {', '.join(map(str, types))}"
    return first


def _x86(target, type: ir.Vector) -> str | None:
    bits = type.lanes * 32
    if not target.x86 or bits not in (128, 256, 512) or (bits == 512 and not target.has("avx512")):
        return None
    return {128: "_mm", 256: "_mm256", 512: "_mm512"}[bits]


def _reg(type: ir.Vector) -> str:
    return f"__m{type.lanes * 32}i"


def _x86_call(function: str, prefix: str, type: ir.Vector, args: list[str], ctype: str) -> str:
    return f"(({ctype}){prefix}_{function}({', '.join(f'({_reg(type)})' + a for a in args)}))"


def _bytes_helper(target, name: str, type: ir.Vector, params: str, loop: str) -> str:
    ctype = target.c_type(type)
    names = params.split()
    text = " ".join(
        f"{kind} b{p}[{type.lanes * 4}]; __builtin_memcpy(b{p}, &{p}, sizeof {p});"
        for p, kind in ((p, "uint8_t" if p == "w" and "u8" in name else "int8_t") for p in names if p != "acc")
    )
    full = f"static inline {ctype} {name}_{type}({', '.join(f'{ctype} {p}' for p in names)}) {{ {text} {loop} }}"
    return target.helper(
        f"{name}_{type}", full.replace("{", "{{").replace("}", "}}").replace(f"{name}_{type}(", "{name}(", 1)
    )


def _dot4(target, result, types, args):
    prefix, ctype = _x86(target, result), target.c_type(result)
    if prefix and target.has("vnni"):
        return _x86_call("dpbusd_epi32", prefix, result, args, ctype)
    loop = (
        f"for (int i = 0; i < {result.lanes}; ++i) for (int j = 0; j < 4; ++j) acc[i] += bw[4 * i + j] * ba[4 * i + j]; "
        "return acc;"
    )
    return f"{_bytes_helper(target, 'dot4_u8s8', result, 'acc w a', loop)}({', '.join(args)})"


def _pairs(target, result, types, args):
    prefix, ctype = _x86(target, result), target.c_type(result)
    if prefix:
        return _x86_call("maddubs_epi16", prefix, result, args, ctype)
    loop = (
        f"int16_t r[{result.lanes * 2}]; for (int i = 0; i < {result.lanes * 2}; ++i) {{ "
        "int s = bw[2 * i] * ba[2 * i] + bw[2 * i + 1] * ba[2 * i + 1]; r[i] = s > 32767 ? 32767 : s < -32768 ? -32768 : s; } "
        "__builtin_memcpy(&w, r, sizeof w); return w;"
    )
    return f"{_bytes_helper(target, 'pairs_u8s8', result, 'w a', loop)}({', '.join(args)})"


def _halves(type: ir.Vector) -> ir.Vector:
    return ir.Vector(ir.Scalar("i16", "int", 16), type.lanes * 2)


def _pairs_i16(target, result, types, args):
    prefix, ctype = _x86(target, result), target.c_type(result)
    if prefix:
        ones = f"{prefix}_set1_epi16(1)"
        return f"(({ctype}){prefix}_madd_epi16(({_reg(result)}){args[0]}, {ones}))"
    loop = (
        f"int16_t h[{result.lanes * 2}]; __builtin_memcpy(h, &v, sizeof v); "
        f"for (int i = 0; i < {result.lanes}; ++i) v[i] = h[2 * i] + h[2 * i + 1]; return v;"
    )
    return f"{_bytes_helper(target, 'pairs_i16', result, 'v', loop)}({', '.join(args)})"


def _add_i16(target, result, types, args):
    half = target.c_type(_halves(result))
    return f"(({target.c_type(result)})(({half}){args[0]} + ({half}){args[1]}))"


def _sign(target, result, types, args):
    prefix, ctype = _x86(target, result), target.c_type(result)
    if prefix in ("_mm", "_mm256"):
        return _x86_call("sign_epi8", prefix, result, args, ctype)
    loop = (
        f"int8_t r[{result.lanes * 4}]; for (int i = 0; i < {result.lanes * 4}; ++i) "
        "r[i] = bw[i] < 0 ? -ba[i] : bw[i] > 0 ? ba[i] : 0; __builtin_memcpy(&w, r, sizeof w); return w;"
    )
    return f"{_bytes_helper(target, 'sign_s8', result, 'a w', loop)}({', '.join(args)})"


def _abs(target, result, types, args):
    prefix, ctype = _x86(target, result), target.c_type(result)
    if prefix:
        return _x86_call("abs_epi8", prefix, result, args, ctype)
    loop = (
        f"int8_t r[{result.lanes * 4}]; for (int i = 0; i < {result.lanes * 4}; ++i) r[i] = bv[i] < 0 ? -bv[i] : bv[i]; "
        "__builtin_memcpy(&v, r, sizeof v); return v;"
    )
    return f"{_bytes_helper(target, 'abs_s8', result, 'v', loop)}({', '.join(args)})"


TABLE = (
    Intrinsic("dot4_u8s8", _lanes, "acc + four u8*s8 products per lane", {"cpu": _dot4}),
    Intrinsic("pairs_u8s8", _lanes, "i16 sums of two u8*s8 products, saturating", {"cpu": _pairs}),
    Intrinsic("pairs_i16", _lanes, "i32 sums of two i16", {"cpu": _pairs_i16}),
    Intrinsic("add_i16", _lanes, "lane-wise sum of packed i16", {"cpu": _add_i16}),
    Intrinsic("sign_s8", _lanes, "a * sign(w) per byte", {"cpu": _sign}),
    Intrinsic("abs_s8", _lanes, "absolute value per byte", {"cpu": _abs}),
)
