"""Reductions over the lanes of a vector, and vectors from parts of vectors."""

import zse.kernel.ir as ir
from zse.kernel.intrinsics import arithmetic
from zse.kernel.intrinsics.row import Intrinsic
from zse.kernel.targets import neon

ROWS = {row.name: row for row in arithmetic.TABLE}

I8 = ir.Scalar("i8", "int", 8)


def _reduce(type: object) -> ir.Type | str:
    return (
        type.elem
        if isinstance(type, ir.Vector) and type.elem.bits >= 32
        else f"needs a vector of 32- or 64-bit numbers, got {type}"
    )


def _needs_mask(type: object) -> ir.Type | str:
    return ir.BOOL if isinstance(type, ir.Mask) else "needs a mask"


def _half(type: object) -> ir.Type | str:
    return ir.Vector(type.elem, type.lanes // 2) if isinstance(type, ir.Vector) and type.lanes > 2 else "needs a vector"


def _concat(a: object, b: object) -> ir.Type | str:
    return ir.Vector(a.elem, a.lanes * 2) if isinstance(a, ir.Vector) and a == b else "needs two vectors of one type"


def _narrow(type: object) -> ir.Type | str:
    return ir.Vector(I8, type.lanes) if isinstance(type, ir.Vector) and type.elem.name == "i32" else "needs i32 lanes"


_NAMES = {"+": "add", "maximum": "max", "minimum": "min"}


def _both(op: str, target, type: ir.Type, a: str, b: str) -> str:
    return f"{a} + {b}" if op == "+" else ROWS[op].body_for(target)(target, type, [type, type], [a, b])


def _reduce_cpu(op: str):
    """A tree of halves: the same order of additions on every ISA with the same number of lanes."""

    def body(target, result, types, args):
        vector = types[0]
        lines, current, lanes = [], "v", vector.lanes
        while lanes > 2:
            n = lanes // 2
            half = ir.Vector(vector.elem, n)
            ctype = target.c_type(half)
            low, high = _shuffle(current, current, range(n)), _shuffle(current, current, range(n, lanes))
            lines.append(f"{ctype} a{n} = {low}, b{n} = {high};")
            lines.append(f"{ctype} r{n} = {_both(op, target, half, f'a{n}', f'b{n}')};")
            current, lanes = f"r{n}", n
        x, y = f"{current}[0]", f"{current}[1]"
        last = f"{x} + {y}" if op == "+" else f"{x} {'<' if op == 'minimum' else '>'} {y} ? {x} : {y}"
        text = f"{' '.join(lines)} return {last};"
        return target.call(
            f"reduce_{_NAMES[op]}_{vector}", target.c_type(result), f"{target.c_type(vector)} v", text, args
        )

    return body


def _make(*types: object) -> ir.Type | str:
    first = types[0]
    good = isinstance(first, ir.Scalar) and all(type == first for type in types) and len(types) in (2, 4, 8, 16, 32)
    return ir.Vector(first, len(types)) if good else "needs 2, 4, 8, 16 or 32 scalars of one type"


def _reduce_gpu(op: str):
    """The same tree of halves as on the CPU."""

    def body(target, result, types, args):
        vector = types[0]
        items = [target.lane_text("v", vector, i) for i in range(vector.lanes)]
        while len(items) > 1:
            half = len(items) // 2
            pairs = zip(items[:half], items[half:], strict=True)
            both = [_both(op, target, vector.elem, a, b) for a, b in pairs]
            items = [f"({text})" for text in both] if op == "+" else both
        return target.call(
            f"reduce_{_NAMES[op]}_{vector}", str(result), f"{target.c_type(vector)} v", f"return {items[0]};", args
        )

    return body


def _any(boolean: str):
    def body(target, result, types, args):
        tests = " | ".join(target.lane_text("m", types[0], i) for i in range(types[0].lanes))
        return target.call(f"any_{types[0]}", boolean, f"{target.c_type(types[0])} m", f"return ({tests}) != 0;", args)

    return body


def _pick_gpu(name: str, first: int):
    """A helper that takes lanes of its arguments: first = 0 the lower half, 1 the upper half, 2 both arguments."""

    def body(target, result, types, args):
        lanes = [target.lane_text("a", types[0], i) for i in range(types[0].lanes)]
        if first == 2:
            lanes += [target.lane_text("b", types[0], i) for i in range(types[0].lanes)]
        else:
            lanes = lanes[first * result.lanes : (first + 1) * result.lanes]
        return target.from_lanes(f"{name}_{types[0]}", result, types, lanes, args)

    return body


_CLAMP = "({0} < -128 ? -128 : {0} > 127 ? 127 : {0})"


def _narrow_gpu(target, result, types, args):
    return target.lanewise("narrow_s8", result, types, lambda lanes: f"(i8){_CLAMP.format(lanes[0])}", args)


def _shuffle(first: str, second: str, indices) -> str:
    return f"__builtin_shufflevector({first}, {second}, {', '.join(map(str, indices))})"


def _narrow_cpu(target, result, types, args):
    source, ctype, lanes = target.c_type(types[0]), target.c_type(result), types[0].lanes
    if target.x86 and lanes == 16 and target.has("avx512"):
        return f"(({ctype})_mm512_cvtsepi32_epi8((__m512i){args[0]}))"
    if not target.x86 and lanes in (4, 8):
        body = neon.narrowed(target, result, 32, "vqmovn")
        return target.call(f"narrow_s8_{lanes}", ctype, f"{source} a", body, args)
    if target.x86 and lanes == 8:
        text = (
            "__m128i p = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1)); "
            f"p = _mm_packs_epi16(p, p); int64_t bits = _mm_cvtsi128_si64(p); return ({ctype})bits;"
        )
    else:
        loop = f"for (int i = 0; i < {lanes}; ++i) r[i] = (int8_t){_CLAMP.format('v[i]')};"
        text = f"{ctype} r; {loop} return r;"
    return target.call(f"narrow_s8_{lanes}", ctype, f"{source} v", text, args)


TABLE = (
    Intrinsic("reduce_add", _reduce, {"cpu": _reduce_cpu("+"), "gpu": _reduce_gpu("+")}),
    Intrinsic("reduce_max", _reduce, {"cpu": _reduce_cpu("maximum"), "gpu": _reduce_gpu("maximum")}),
    Intrinsic("reduce_min", _reduce, {"cpu": _reduce_cpu("minimum"), "gpu": _reduce_gpu("minimum")}),
    Intrinsic("any_lane", _needs_mask, {"cpu": _any("_Bool"), "gpu": _any("bool")}),
    Intrinsic(
        "widen_low",
        _half,
        {"cpu": lambda t, r, types, a: _shuffle(a[0], a[0], range(r.lanes)), "gpu": _pick_gpu("low", 0)},
    ),
    Intrinsic(
        "widen_high",
        _half,
        {"cpu": lambda t, r, types, a: _shuffle(a[0], a[0], range(r.lanes, 2 * r.lanes)), "gpu": _pick_gpu("high", 1)},
    ),
    Intrinsic(
        "concat",
        _concat,
        {"cpu": lambda t, r, types, a: _shuffle(a[0], a[1], range(r.lanes)), "gpu": _pick_gpu("concat", 2)},
    ),
    Intrinsic(
        "make_vector",
        _make,
        {
            "cpu": lambda t, r, types, a: f"(({t.c_type(r)}){{{', '.join(a)}}})",
            "gpu": lambda t, r, types, a: t.make(r, a),
        },
    ),
    Intrinsic("narrow_s8", _narrow, {"cpu": _narrow_cpu, "gpu": _narrow_gpu}),
)
