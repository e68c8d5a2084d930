"""Packed int8 products. A 32-bit lane holds four consecutive k of one row, so lanes never have to be added across.

x86: maddubs (AVX2) and vpdpbusd (VNNI); arm64: sdot.
"""

import zse.kernel.ir as ir
from zse.kernel.intrinsics.row import Intrinsic


def _lanes(*types: object) -> ir.Type | str:
    first = types[0]
    if not isinstance(first, ir.Vector) or first.elem != ir.I32 or any(type != first for type in types):
        return f"needs i32 vectors of one length (four packed bytes in each lane), got {', '.join(map(str, types))}"
    return first


def _signed_lanes(acc: object, w: object, a: object, lane: object = None) -> ir.Type | str:
    if lane is None:
        return _lanes(acc, w, a)
    if lane not in range(4) or a != ir.Vector(ir.I32, 4):
        return f"a lane is 0 to 3 of four i32, got {lane} of {a}"
    return _lanes(acc, w)


def _dot4_s8(target, result, types, args):
    """acc, w, a and perhaps the lane of a that all lanes of w are multiplied with."""
    lane = args[3].removesuffix("LL") if len(args) == 4 else ""
    if target.has("dotprod") and result.lanes == 4:
        call, more = ("vdotq_laneq_s32", f", {lane}") if lane else ("vdotq_s32", "")
        native = f"(int32x4_t){args[0]}, (int8x16_t){args[1]}, (int8x16_t){args[2]}{more}"
        return f"(({target.c_type(result)}){call}({native}))"
    ctype, wide = target.c_type(result), target.c_type(types[2])
    place = f"{4 * int(lane)} + j" if lane else "4 * i + j"
    body = (
        f"int8_t bw[{4 * result.lanes}], ba[{4 * types[2].lanes}]; __builtin_memcpy(bw, &w, sizeof w); "
        f"__builtin_memcpy(ba, &a, sizeof a); for (int i = 0; i < {result.lanes}; ++i) for (int j = 0; j < 4; ++j) "
        f"acc[i] += bw[4 * i + j] * ba[{place}]; return acc;"
    )
    return target.call(f"dot4_s8{lane}_{result}", ctype, f"{ctype} acc, {ctype} w, {wide} a", body, args[:3])


def _packed(
    name: str,
    params: str,
    loop: str,
    instruction: str,
    registers: tuple[str, ...] = (),
    feature: str = "",
    last: str = "",
):
    """A body: the x86 instruction (with the operand `last`) where the target has the feature and `registers` (all) of
    this size, else `loop`, which finds the bytes of each parameter p but acc in bp; %(lanes)d, %(halves)d, %(bytes)d:
    of the vector."""

    def body(target, result, types, args):
        prefix, ctype = target.register(result), target.c_type(result)
        if prefix and (not registers or prefix in registers) and (not feature or target.has(feature)):
            native = [f"(__m{result.lanes * 32}i){arg}" for arg in args] + ([prefix + last] if last else [])
            named = instruction if feature != "vnni" or target.has("avx512") else instruction.replace("_", "_avx_")
            return f"(({ctype}){prefix}_{named}({', '.join(native)}))"
        counts = {"lanes": result.lanes, "halves": result.lanes * 2, "bytes": result.lanes * 4}
        unsigned = "w" if "u8" in name else ""
        unpacked = " ".join(
            f"{'uint8_t' if p == unsigned else 'int8_t'} b{p}[{counts['bytes']}]; __builtin_memcpy(b{p}, &{p}, sizeof {p});"
            for p in params.split()
            if p != "acc"
        )
        declared = ", ".join(f"{ctype} {p}" for p in params.split())
        return target.call(f"{name}_{result}", ctype, declared, f"{unpacked} {loop % counts}", args)

    return {"cpu": body}


_LOOKUP = _packed(
    "lookup_s8",
    "table index",
    "int8_t r[%(bytes)d]; for (int i = 0; i < %(bytes)d; ++i) r[i] = btable[i / 16 * 16 + bindex[i]]; "
    "__builtin_memcpy(&index, r, sizeof index); return index;",
    "shuffle_epi8",
)["cpu"]


def _lookup(target, result, types, args):
    if not target.x86 and result.lanes == 4:
        return f"(({target.c_type(result)})vqtbl1q_s8((int8x16_t){args[0]}, (uint8x16_t){args[1]}))"
    return _LOOKUP(target, result, types, args)


def _add_i16(target, result, types, args):
    """On x86 as an instruction of its own: gcc's vector additions move to where their sum is used, behind all products of a
    block, whose results then go through the stack (131 stores in int4's loop for many tokens, 23 like this)."""
    ctype = target.c_type(result)
    if target.register(result) in ("_mm", "_mm256"):
        body = '__asm__("vpaddw %2, %1, %0" : "=x"(a) : "x"(a), "x"(b)); return a;'
        return target.call(f"add_i16_{result}", ctype, f"{ctype} a, {ctype} b", body, args)
    half = target.c_type(ir.Vector(ir.Scalar("i16", "int", 16), result.lanes * 2))
    return f"(({ctype})(({half}){args[0]} + ({half}){args[1]}))"


TABLE = (
    Intrinsic(
        "dot4_u8s8",
        _lanes,
        _packed(
            "dot4_u8s8",
            "acc w a",
            "for (int i = 0; i < %(lanes)d; ++i) for (int j = 0; j < 4; ++j) acc[i] += bw[4 * i + j] * ba[4 * i + j]; "
            "return acc;",
            "dpbusd_epi32",
            feature="vnni",
        ),
    ),
    Intrinsic("dot4_s8", _signed_lanes, {"cpu": _dot4_s8}),
    Intrinsic(
        "pairs_u8s8",
        _lanes,
        _packed(
            "pairs_u8s8",
            "w a",
            "int16_t r[%(halves)d]; for (int i = 0; i < %(halves)d; ++i) { "
            "int s = bw[2 * i] * ba[2 * i] + bw[2 * i + 1] * ba[2 * i + 1]; r[i] = s > 32767 ? 32767 : s < -32768 ? -32768 : s; } "
            "__builtin_memcpy(&w, r, sizeof w); return w;",
            "maddubs_epi16",
        ),
    ),
    Intrinsic(
        "pairs_i16",
        _lanes,
        _packed(
            "pairs_i16",
            "v",
            "int16_t h[%(halves)d]; __builtin_memcpy(h, &v, sizeof v); "
            "for (int i = 0; i < %(lanes)d; ++i) v[i] = h[2 * i] + h[2 * i + 1]; return v;",
            "madd_epi16",
            last="_set1_epi16(1)",
        ),
    ),
    Intrinsic(
        "dot2_i16",
        _lanes,
        _packed(
            "dot2_i16",
            "v w",
            "int16_t h[%(halves)d], g[%(halves)d]; __builtin_memcpy(h, &v, sizeof v); __builtin_memcpy(g, &w, sizeof w); "
            "for (int i = 0; i < %(lanes)d; ++i) v[i] = h[2 * i] * g[2 * i] + h[2 * i + 1] * g[2 * i + 1]; return v;",
            "madd_epi16",
        ),
    ),
    Intrinsic("add_i16", _lanes, {"cpu": _add_i16}),
    Intrinsic(
        "sign_s8",
        _lanes,
        _packed(
            "sign_s8",
            "a w",
            "int8_t r[%(bytes)d]; for (int i = 0; i < %(bytes)d; ++i) "
            "r[i] = bw[i] < 0 ? -ba[i] : bw[i] > 0 ? ba[i] : 0; __builtin_memcpy(&w, r, sizeof w); return w;",
            "sign_epi8",
            ("_mm", "_mm256"),
        ),
    ),
    Intrinsic(
        "abs_s8",
        _lanes,
        _packed(
            "abs_s8",
            "v",
            "int8_t r[%(bytes)d]; for (int i = 0; i < %(bytes)d; ++i) r[i] = bv[i] < 0 ? -bv[i] : bv[i]; "
            "__builtin_memcpy(&v, r, sizeof v); return v;",
            "abs_epi8",
        ),
    ),
    Intrinsic("lookup_s8", _lanes, {"cpu": _lookup}),
)
