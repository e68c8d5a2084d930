"""Arithmetic beyond the operators. On the CPU a vector operation without an instruction of its own is a helper that
walks the lanes."""

from zse.kernel import ir
from zse.kernel.intrinsics.row import Intrinsic, elem_of
from zse.kernel.targets import neon

# Functions of the C library for f64; those for f32 have an f behind.
LIBRARY = {
    "sqrt": "sqrt",
    "exp": "exp",
    "log": "log",
    "sin": "sin",
    "cos": "cos",
    "tanh": "tanh",
    "floor": "floor",
    "round_even": "rint",
    "fma": "fma",
    "absolute": "fabs",
    "minimum": "fmin",
    "maximum": "fmax",
    "exp2": "exp2",
}
_X86 = {"sqrt": "sqrt", "fma": "fmadd", "minimum": "min", "maximum": "max"}
_NEON = {"sqrt": "vsqrtq", "floor": "vrndmq", "round_even": "vrndnq", "fma": "vfmaq"}
_X86_ROUND = {"round_even": "_MM_FROUND_TO_NEAREST_INT", "floor": "_MM_FROUND_TO_NEG_INF"}


def _wrong(what: str, types: tuple) -> str:
    return f"needs {what} of one type, got {', '.join(map(str, types))}"


def _same_floats(*types: ir.Type | int | float) -> ir.Type | str:
    first, elem = types[0], elem_of(types[0])
    good = elem is not None and elem.name in ("f32", "f64") and all(type == first for type in types)
    return first if good else _wrong("f32 or f64 values", types)  # type: ignore[return-value]


def _same_numbers(*types: ir.Type | int | float) -> ir.Type | str:
    first, elem = types[0], elem_of(types[0])
    small = elem is not None and (elem.kind == "bool" or elem.kind == "float" and elem.bits == 16)
    good = elem is not None and not small and all(type == first for type in types)
    return first if good else _wrong("numbers", types)  # type: ignore[return-value]


def _cpu_scalar(name: str, elem: ir.Scalar, args: list[str]) -> str:
    f = "" if elem.name == "f64" else "f"
    if name in ("rsqrt", "reciprocal"):
        return f"(1.0{f} / {f'sqrt{f}({args[0]})' if name == 'rsqrt' else args[0]})"
    if name in ("minimum", "maximum"):
        return f"({args[0]} {'<' if name == 'minimum' else '>'} {args[1]} ? {args[0]} : {args[1]})"
    if name == "absolute" and elem.kind != "float":
        return f"({args[0]} < 0 ? -{args[0]} : {args[0]})"
    builtin = "__builtin_" if name in ("fma", "absolute") else ""
    return f"{builtin}{LIBRARY[name]}{f}({', '.join(args)})"


def _cpu_vector(target, name: str, result: ir.Vector, args: list[str]) -> str:
    """By an instruction where there is one, else lane by lane."""
    elem, prefix, ctype = result.elem, target.register(result), target.c_type(result)
    floats = elem.kind == "float"
    if prefix and floats:
        suffix = {"f32": "ps", "f64": "pd"}[elem.name]
        if name in _X86:
            return f"(({ctype}){prefix}_{_X86[name]}_{suffix}({', '.join(args)}))"
        if name in _X86_ROUND:
            call = "roundscale" if prefix == "_mm512" else "round"
            return f"{prefix}_{call}_{suffix}({args[0]}, {_X86_ROUND[name]} | _MM_FROUND_NO_EXC)"
    if prefix and name in ("minimum", "maximum") and (elem.bits < 64 or prefix == "_mm512"):
        native = ", ".join(f"(__m{elem.bits * result.lanes}i){arg}" for arg in args)
        return f"(({ctype}){prefix}_{_X86[name]}_ep{elem.kind[0]}{elem.bits}({native}))"
    neon_text = None if target.x86 else _neon_vector(target, name, result, args)
    if neon_text:
        return neon_text
    if name == "absolute" and elem.name == "f32":
        mask = target.c_type(ir.Vector(ir.U32, result.lanes))
        return f"(({ctype})(({mask}){args[0]} & 0x7fffffffu))"
    helper = target.lane_helper(name, result, [result] * len(args), lambda names: _cpu_scalar(name, elem, names))
    return f"{helper}({', '.join(args)})"


def _neon_vector(target, name: str, result: ir.Vector, args: list[str]) -> str | None:
    """By instructions of arm64; None where there are none, or gcc finds them."""
    elem, ctype, bits = result.elem, target.c_type(result), result.elem.bits * result.lanes
    if name in _NEON and elem.kind == "float" and bits == 128:
        places = [args[2], args[0], args[1]] if name == "fma" else args
        return f"(({ctype}){_NEON[name]}_{elem.name}({', '.join(places)}))"
    if name in _NEON and elem.kind == "float" and bits == 256:
        return neon.by_halves(target, name, result, args, lambda half, texts: _cpu_vector(target, name, half, texts))
    if name in ("minimum", "maximum"):
        mask = target.c_type(ir.Vector(ir.Scalar(f"i{elem.bits}", "int", elem.bits), result.lanes))
        test = f"{mask} m = a {'<' if name == 'minimum' else '>'} b;"
        body = f"{test} return ({ctype})((m & ({mask})a) | (~m & ({mask})b));"
        return target.call(f"{name}_{result}", ctype, f"{ctype} a, {ctype} b", body, args)
    return None


def _cpu(name: str):
    def body(target, result, types, args):
        if isinstance(result, ir.Vector):
            return _cpu_vector(target, name, result, args)
        if name not in ("minimum", "maximum", "absolute"):
            return _cpu_scalar(name, result, args)
        ctype, params = target.c_type(result), list("ab"[: len(args)])
        declared = ", ".join(f"{ctype} {param}" for param in params)
        return target.call(f"{name}_{result}", ctype, declared, f"return {_cpu_scalar(name, result, params)};", args)

    return body


def _gpu(name: str):
    def body(target, result, types, args):
        if not isinstance(result, ir.Vector):
            return target.scalar_math(name, result, args)
        return target.lanewise(name, result, types, lambda lanes: target.scalar_math(name, result.elem, lanes), args)

    return body


def _row(name: str, signature) -> Intrinsic:
    return Intrinsic(name, signature, {"cpu": _cpu(name), "gpu": _gpu(name)}, unify=True)


def _popcount(type: object) -> ir.Type | str:
    return type if isinstance(type, ir.Scalar) and type.kind == "uint" else "needs an unsigned scalar"


def _count(function: str):
    return lambda t, result, types, args: f"(({t.c_type(result)}){function}({args[0]}))"


TABLE = (
    *(
        _row(name, _same_floats)
        for name in (
            "fma",
            "sqrt",
            "exp",
            "log",
            "sin",
            "cos",
            "tanh",
            "floor",
            "round_even",
            "exp2",
            "rsqrt",
            "reciprocal",
        )
    ),
    *(_row(name, _same_numbers) for name in ("minimum", "maximum", "absolute")),
    Intrinsic(
        "popcount",
        _popcount,
        {
            "cpu": _count("__builtin_popcountll"),
            "cuda": _count("__popcll"),
            "hip": _count("__builtin_popcountll"),
            "metal": _count("popcount"),
        },
    ),
)
