"""Arithmetic beyond the operators. On the CPU a vector operation without an instruction of its own is a helper that walks the lanes."""

from zse.kernel import ir
from zse.kernel.intrinsics.row import Intrinsic, elem_of

_SCALAR_F32 = {
    "sqrt": "sqrtf",
    "exp": "expf",
    "log": "logf",
    "sin": "sinf",
    "cos": "cosf",
    "tanh": "tanhf",
    "floor": "floorf",
    "round_even": "rintf",
    "fma": "__builtin_fmaf",
    "exp2": "exp2f",
}
_X86 = {"sqrt": "sqrt", "fma": "fmadd", "minimum": "min", "maximum": "max"}


def _same_floats(*types: ir.Type | int | float) -> ir.Type | str:
    first = types[0]
    elem = elem_of(first)
    if (
        elem is None
        or isinstance(first, int | float)
        or elem.name not in ("f32", "f64")
        or any(type != first for type in types)
    ):
        return f"needs f32 or f64 values of one type, got {', '.join(map(str, types))}"
    return first


def _same_numbers(*types: ir.Type | int | float) -> ir.Type | str:
    first = types[0]
    elem = elem_of(first)
    if (
        elem is None
        or isinstance(first, int | float)
        or elem.kind == "bool"
        or (elem.kind == "float" and elem.bits == 16)
        or any(type != first for type in types)
    ):
        return f"needs numbers of one type, got {', '.join(map(str, types))}"
    return first


def _x86_suffix(type: ir.Type) -> tuple[str, str] | None:
    """(register prefix, element suffix) of the x86 intrinsics for this vector type."""
    if not isinstance(type, ir.Vector):
        return None
    bits = type.elem.bits * type.lanes
    prefix = {128: "_mm", 256: "_mm256", 512: "_mm512"}.get(bits)
    suffix = {"f32": "ps", "f64": "pd"}.get(type.elem.name)
    if type.elem.kind in ("int", "uint"):
        suffix = f"ep{'i' if type.elem.kind == 'int' else 'u'}{type.elem.bits}"
        if type.elem.bits == 64 and bits != 512:
            suffix = None
    return (prefix, suffix) if prefix and suffix else None


def _scalar_text(name: str, elem: ir.Scalar, args: list[str]) -> str:
    if name in ("rsqrt", "reciprocal"):
        one = "1.0" if elem.name == "f64" else "1.0f"
        root = ("sqrt({})" if elem.name == "f64" else "sqrtf({})").format(args[0])
        return f"({one} / {root if name == 'rsqrt' else args[0]})"
    if name in ("minimum", "maximum"):
        op = "<" if name == "minimum" else ">"
        return f"({args[0]} {op} {args[1]} ? {args[0]} : {args[1]})"
    if name == "absolute":
        return (
            f"__builtin_fabsf({args[0]})"
            if elem.name == "f32"
            else (f"__builtin_fabs({args[0]})" if elem.kind == "float" else f"({args[0]} < 0 ? -{args[0]} : {args[0]})")
        )
    function = _SCALAR_F32[name]
    if elem.name == "f64":
        function = "__builtin_fma" if name == "fma" else function[:-1]
    return f"{function}({', '.join(args)})"


def _cpu(name: str):
    def body(target, result, types, args):
        elem = elem_of(result)
        if isinstance(result, ir.Vector):
            x86 = _x86_suffix(result) if target.x86 else None
            if x86 and (x86[0] != "_mm512" or target.has("avx512")):
                prefix, suffix = x86
                if name in ("minimum", "maximum") or (name in _X86 and elem.kind == "float"):
                    native = ", ".join(target.native(a, t) for a, t in zip(args, types, strict=True))
                    return f"(({target.c_type(result)}){prefix}_{_X86[name]}_{suffix}({native}))"
                if name in ("round_even", "floor") and elem.kind == "float":
                    mode = "_MM_FROUND_TO_NEAREST_INT" if name == "round_even" else "_MM_FROUND_TO_NEG_INF"
                    call = "roundscale" if prefix == "_mm512" else "round"
                    return f"{prefix}_{call}_{suffix}({args[0]}, {mode} | _MM_FROUND_NO_EXC)"
            if name == "absolute" and elem.name == "f32":
                mask = target.c_type(ir.Vector(ir.Scalar("u32", "uint", 32), result.lanes))
                return f"(({target.c_type(result)})(({mask}){args[0]} & 0x7fffffffu))"
            return (
                target.lane_helper(name, result, types, lambda names: _scalar_text(name, elem, names))
                + f"({', '.join(args)})"
            )
        if name in ("minimum", "maximum", "absolute"):
            ctype = target.c_type(result)
            params = ["a", "b"][: len(args)]
            helper = target.helper(
                f"{name}_{result}",
                f"static inline {ctype} {{name}}({', '.join(f'{ctype} {p}' for p in params)}) "
                f"{{{{ return {_scalar_text(name, elem, params)}; }}}}",
            )
            return f"{helper}({', '.join(args)})"
        return _scalar_text(name, elem, args)

    return body


def _gpu(name: str):
    def body(target, result, types, args):
        elem = elem_of(result)
        if isinstance(result, ir.Vector):
            return target.lanewise(name, result, types, lambda lanes: target.scalar_math(name, elem, lanes), args)
        return target.scalar_math(name, elem, args)

    return body


def _row(name: str, meaning: str, signature=_same_floats) -> Intrinsic:
    return Intrinsic(name, signature, meaning, {"cpu": _cpu(name), "gpu": _gpu(name)}, unify=True)


def _popcount(type: object) -> ir.Type | str:
    return type if isinstance(type, ir.Scalar) and type.kind == "uint" else "needs an unsigned scalar"


TABLE = (
    _row("fma", "a * b + c, one rounding"),
    _row("sqrt", "square root"),
    _row("exp", "e**v"),
    _row("log", "natural logarithm"),
    _row("sin", "sine"),
    _row("cos", "cosine"),
    _row("tanh", "hyperbolic tangent"),
    _row("floor", "round down"),
    _row("round_even", "nearest integer, ties to even"),
    _row("minimum", "the smaller one", _same_numbers),
    _row("maximum", "the larger one", _same_numbers),
    _row("absolute", "without the sign", _same_numbers),
    _row("exp2", "2**v"),
    _row("rsqrt", "1 / sqrt(v)"),
    _row("reciprocal", "1 / v"),
    Intrinsic(
        "popcount",
        _popcount,
        "set bits",
        {
            "cpu": lambda t, r, types, a: f"(({t.c_type(r)})__builtin_popcountll({a[0]}))",
            "cuda": lambda t, r, types, a: f"(({t.c_type(r)})__popcll({a[0]}))",
        },
    ),
)
