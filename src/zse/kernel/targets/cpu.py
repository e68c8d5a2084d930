"""The CPU target: C with vector types (GCC and Clang vector extensions), one text per ISA level.

Entry point of a variant: `void symbol(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last)`.
"""

from dataclasses import dataclass

import zse.kernel.ir as ir
from zse.kernel import mathlib
from zse.kernel.intrinsics.row import elem_of
from zse.kernel.targets import neon
from zse.kernel.targets.c import CTarget, mask_vector

C_NAMES = {
    "i8": "int8_t",
    "u8": "uint8_t",
    "i16": "int16_t",
    "u16": "uint16_t",
    "i32": "int32_t",
    "u32": "uint32_t",
    "i64": "int64_t",
    "u64": "uint64_t",
    "f16": "uint16_t",
    "bf16": "uint16_t",
    "f32": "float",
    "f64": "double",
    "bool_": "_Bool",
}
HEADER = """#include <math.h>
#include <stdint.h>
{includes}
typedef union {{ uint64_t slot; float f32; double f64; }} zse_slot;
"""


@dataclass(frozen=True)
class Isa:
    """One ISA level: what the compiler is told and what kernels may ask for. lanes: f32 elements in a register."""

    name: str
    lanes: int
    features: frozenset[str]
    flags: tuple[str, ...]
    x86: bool
    kernels = "cpu"  # as runtime/device.py: Device.kernels


ISAS = {
    isa.name: isa
    for isa in (
        Isa("x86-64-v3", 8, frozenset({"avx2"}), ("-march=x86-64-v3",), True),
        Isa("x86-64-v3-vnni", 8, frozenset({"avx2", "vnni"}), ("-march=x86-64-v3", "-mavxvnni"), True),
        Isa(
            "x86-64-v4-vnni",
            16,
            frozenset({"avx2", "avx512", "vnni"}),
            ("-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512"),
            True,
        ),
        # gcc's first scheduling makes more values live at once than there are registers: a product of int16 went to the
        # stack 30 times in 305 instructions, 16 in 268 without. clang has no such flag, and would say so.
        Isa(
            "arm64-dotprod",
            4,
            frozenset({"neon", "dotprod"}),
            ("-march=armv8.2-a+dotprod+fp16", "-fno-schedule-insns", "-Wno-ignored-optimization-argument"),
            False,
        ),
    )
}


INFINITE = {"inf": "INFINITY", "-inf": "(-INFINITY)", "nan": "NAN"}
SUFFIXES = {"i64": "LL", "u64": "ULL", "u32": "u"}
REGISTERS = {128: "_mm", 256: "_mm256", 512: "_mm512"}  # bits of an x86 register → what its intrinsics begin with
# gcc 12 makes one instruction of most helpers for arm64, and then a call of each: 256 in a loop of 256 multiply-adds.
ALWAYS = "static inline __attribute__((always_inline))"

# (from, to) → x86, other: one value of a 16-bit float.
_ONE_F16 = {
    "f32_of_f16": ("return _cvtsh_ss(a);", "__fp16 h; __builtin_memcpy(&h, &a, 2); return h;"),
    "f16_of_f32": ("return _cvtss_sh(a, 0);", "__fp16 h = a; uint16_t r; __builtin_memcpy(&r, &h, 2); return r;"),
}


class CpuTarget(CTarget):
    """Prints IR functions of one compilation unit as C."""

    kernels = Isa.kernels
    families = ("cpu",)
    inline_builtins = {"exp": mathlib.exp_f32, "tanh": mathlib.tanh_f32}
    leave = "goto next_block;"

    def __init__(self, isa: Isa):
        super().__init__()
        self.name, self.lanes, self.features, self.x86 = isa.name, isa.lanes, isa.features, isa.x86
        self.device = CTarget.device if isa.x86 else ALWAYS
        self.read: set[str] = set()  # variables of the function that is printed
        self.assigned: set[str] = set()
        self._type_names: dict[int, tuple[str, ir.Type]] = {}  # by id, which a type keeps that is kept here

    # types and helpers

    def c_type(self, type: ir.Type) -> str:
        known = self._type_names.get(id(type))
        if known is None:  # types are few and stay; their own hash would take longer than the rest
            known = self._type_names[id(type)] = self._c_type(type), type
        return known[0]

    def _c_type(self, type: ir.Type) -> str:
        type = mask_vector(type)
        match type:
            case ir.Scalar(name):
                return C_NAMES[name]
            case ir.Pointer(elem, const):
                return f"{'const ' if const else ''}{C_NAMES[elem.name]} *"
            case ir.Vector(elem, lanes):
                size, name = elem.bits // 8 * lanes, f"{elem.name}x{lanes}"
                if name not in self.types:
                    word = f"typedef {C_NAMES[elem.name]} {name}"
                    self.types[name] = (
                        f"{word} __attribute__((vector_size({size})));\n"
                        f"{word}_mem __attribute__((vector_size({size}), aligned(1), may_alias));"
                    )
                return name
        raise AssertionError(type)

    def register(self, type: ir.Type) -> str | None:
        """What x86 intrinsics on a vector of this size begin with, None where there is no such register."""
        if not self.x86 or not isinstance(type, ir.Vector):
            return None
        bits = type.elem.bits * type.lanes
        return REGISTERS.get(bits) if bits < 512 or self.has("avx512") else None

    def lane_helper(self, name: str, result: ir.Vector, types, scalar_text) -> str:
        """A helper that applies a scalar expression to every lane; returns its C name."""
        params = ["a", "b", "c"][: len(types)]
        body = scalar_text([f"{param}[i]" for param in params])
        declared = ", ".join(f"{self.c_type(type)} {param}" for type, param in zip(types, params, strict=True))
        ctype = self.c_type(result)
        loop = f"for (int i = 0; i < {result.lanes}; ++i)"
        return self.helper(f"{name}_{result}", ctype, declared, f"{ctype} r; {loop} r[i] = {body}; return r;")

    # expressions

    def expr_Var(self, expr: ir.Var) -> str:
        self.read.add(expr.name)
        return expr.name

    def constant(self, type: ir.Type, value) -> str:
        if type.kind == "float":
            text = repr(float(value))
            if text in INFINITE:
                return INFINITE[text] if type.bits == 64 else f"((float){INFINITE[text]})"
            text = text if any(mark in text for mark in ".e") else text + ".0"
            return f"({text}f)" if type.bits == 32 else f"({text})"
        if type.kind == "bool":
            return "1" if value else "0"
        if value == -(2**63):
            return "INT64_MIN"
        text = f"{value}{SUFFIXES.get(type.name, '')}"
        return f"({text})" if value < 0 else text

    def expr_Splat(self, expr: ir.Splat) -> str:
        type = expr.type
        ctype, elem = self.c_type(type), self.c_type(type.elem)
        text = f"({ctype}){{{', '.join(['a'] * type.lanes)}}}"
        prefix = self.register(type)
        if prefix:
            suffix = {"f32": "ps", "f64": "pd"}.get(type.elem.name)
            suffix = suffix or ("epi64x" if type.elem.bits == 64 and prefix != "_mm512" else f"epi{type.elem.bits}")
            text = f"({ctype}){prefix}_set1_{suffix}(a)"
        helper = self.helper(f"splat_{type}", ctype, f"{elem} a", f"return {text};")
        return f"{helper}({self.expr(expr.operand)})"

    def expr_Select(self, expr: ir.Select) -> str:
        a, b = self.expr(expr.left), self.expr(expr.right)
        test, kind = self.expr(expr.condition), expr.condition.type
        if not isinstance(kind, ir.Mask):
            return f"({test} ? {a} : {b})"
        mask, ctype = self.c_type(kind), self.c_type(expr.type)
        body = f"return ({ctype})((m & ({mask})a) | (~m & ({mask})b));"
        return self.call(f"select_{expr.type}", ctype, f"{mask} m, {ctype} a, {ctype} b", body, [test, a, b])

    def lane_text(self, text: str, type: ir.Type, lane: int) -> str:
        return f"{text}[{lane}]"

    def expr_Load(self, expr: ir.Load) -> str:
        if not isinstance(expr.type, ir.Vector):
            return f"(*{self.expr(expr.pointer)})"
        return f"(*(const {self.c_type(expr.type)}_mem *){self.expr(expr.pointer)})"

    def bitcast(self, type: ir.Type, source: ir.Type, text: str) -> str:
        ctype = self.c_type(type)
        scalars = isinstance(type, ir.Scalar) and isinstance(source, ir.Scalar)
        if scalars and "float" in (type.kind, source.kind) and type.bits >= 32:
            body = f"{ctype} r; __builtin_memcpy(&r, &a, sizeof r); return r;"
            return self.call(f"bits_{source}_{type}", ctype, f"{self.c_type(source)} a", body, [text])
        return f"(({ctype}){text})"

    def convert(self, type: ir.Type, source: ir.Type, text: str) -> str:
        to, of = elem_of(type), elem_of(source)
        wide = ir.Vector(ir.F32, type.lanes) if isinstance(type, ir.Vector) else ir.F32
        if of.name in ("f16", "bf16"):
            text = self.half_to_f32(of.name, wide, source, text)
            return text if to.name == "f32" else self.convert(type, wide, text)
        if to.name in ("f16", "bf16"):
            text = text if of.name == "f32" else self.convert(wide, source, text)
            return self.f32_to_half(to.name, type, wide, text)
        if not isinstance(type, ir.Vector):
            return f"(({self.c_type(type)}){text})"
        if not self.x86:
            return neon.convert(self, type, source, text)
        if of.bits == 8 and to.bits in (16, 32) and type.lanes >= 8 and self.register(type):
            of = ir.Scalar(f"i{to.bits}", "int", to.bits)
            text = self.widen_bytes(ir.Vector(of, type.lanes), source, text)
        elif {to.kind, of.kind} in ({"float", "int"}, {"float", "uint"}) and to.bits + of.bits < 64:
            # gcc 12 converts floats to bytes one by one (72 instructions for 16 of them); by way of i32 they are 2.
            text = f"__builtin_convertvector({text}, {self.c_type(ir.Vector(ir.I32, type.lanes))})"
        return text if to == of else f"__builtin_convertvector({text}, {self.c_type(type)})"

    def widen_bytes(self, type: ir.Vector, source: ir.Vector, text: str) -> str:
        """8 to 32 i8 or u8 as i16 or i32, in one instruction: gcc 12 takes __builtin_convertvector() apart, 70 for
        16."""
        ctype = self.c_type(type)
        bytes_ = "_mm_cvtsi64_si128((int64_t)a)" if source.lanes == 8 else f"(__m{8 * source.lanes}i)a"
        body = f"return ({ctype}){self.register(type)}_cvtep{source.elem.name}_epi{type.elem.bits}({bytes_});"
        return self.call(f"{type.elem.name}_of_{source}", ctype, f"{self.c_type(source)} a", body, [text])

    def half_to_f32(self, name: str, wide: ir.Type, source: ir.Type, text: str) -> str:
        ctype = self.c_type(wide)
        if isinstance(wide, ir.Scalar):
            body = "uint32_t b = (uint32_t)a << 16; float r; __builtin_memcpy(&r, &b, 4); return r;"
            body = body if name == "bf16" else _ONE_F16["f32_of_f16"][not self.x86]
            return self.call(f"f32_of_{name}", "float", "uint16_t a", body, [text])
        if name == "bf16":
            bits = ir.Vector(ir.U32, wide.lanes)
            source = ir.Vector(ir.Scalar("u16", "uint", 16), wide.lanes)
            if self.x86:
                return f"(({ctype})(__builtin_convertvector({text}, {self.c_type(bits)}) << 16))"
            return f"(({ctype})({neon.convert(self, bits, source, text)} << 16))"
        prefix = self.register(wide)
        if prefix and wide.lanes >= 8:
            return f"(({ctype}){prefix}_cvtph_ps((__m{wide.lanes * 16}i){text}))"
        native = None if self.x86 else neon.half_conversion(self, wide, source, text)
        if native:
            return native
        one = self.half_to_f32(name, ir.F32, source.elem, "a[i]")
        return f"{self.lane_helper('f32_of_f16', wide, [source], lambda names: one)}({text})"

    def f32_to_half(self, name: str, type: ir.Type, wide: ir.Type, text: str) -> str:
        ctype = self.c_type(type)
        if isinstance(type, ir.Scalar):
            body = (  # round to nearest even; NaN stays NaN
                "uint32_t b; __builtin_memcpy(&b, &a, 4); "
                "if ((b & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((b >> 16) | 64); "
                "return (uint16_t)((b + 0x7fffu + ((b >> 16) & 1)) >> 16);"
            )
            body = body if name == "bf16" else _ONE_F16["f16_of_f32"][not self.x86]
            return self.call(f"{name}_of_f32", "uint16_t", "float a", body, [text])
        prefix = self.register(wide)
        if name == "f16" and prefix and wide.lanes >= 8:
            return f"(({ctype}){prefix}_cvtps_ph({text}, _MM_FROUND_TO_NEAREST_INT))"
        native = neon.half_conversion(self, type, wide, text) if name == "f16" and not self.x86 else None
        if native:
            return native
        one = self.f32_to_half(name, type.elem, ir.F32, "a[i]")
        return f"{self.lane_helper(f'{name}_of_f32', type, [wide], lambda names: one)}({text})"

    # statements

    def stmt_Assign(self, stmt: ir.Assign, indent: str) -> list[str]:
        self.assigned.add(stmt.var.name)
        return super().stmt_Assign(stmt, indent)

    def store(self, stmt: ir.Store) -> str:
        kind = f"({self.c_type(stmt.value.type)}_mem *)" if isinstance(stmt.value.type, ir.Vector) else ""
        return f"*{kind}{self.expr(stmt.pointer)} = {self.expr(stmt.value)}"

    def local_array(self, elem: ir.Scalar, name: str, count: int) -> str:
        return f"{C_NAMES[elem.name]} {name}[{count}] __attribute__((aligned(64)))"

    # a unit

    def parameter(self, index: int, param: ir.Var) -> str:
        """The parameter's value: each block starts with it again where the kernel assigns to it."""
        ctype = self.c_type(param.type)
        if isinstance(param.type, ir.Pointer):
            value = f"({ctype})(uintptr_t)args[{index}]"
        elif param.type.kind == "float":
            value = f"((const zse_slot *)args)[{index}].{param.type.name}"
        else:
            value = f"({ctype})args[{index}]"
        if param.name in self.assigned:
            return f"  {ctype} const_{param.name} = {value};"
        return f"  {ctype}{'' if ctype.endswith('*') else ' '}const {param.name} = {value};"

    def function(self, function: ir.Function) -> str:
        self.read, self.assigned = set(), set()
        body = self.statements(function.body, "    ")
        text = "\n".join(body)
        params = [(index, param) for index, param in enumerate(function.params) if param.name in self.read]
        again = [param for _, param in params if param.name in self.assigned]
        places = ("block % grid[0]", "block / grid[0] % grid[1]", "block / grid[0] / grid[1]")
        return "\n".join(
            [
                f"/* {function.origin} */",
                f"void {function.symbol}(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {{",
                *(self.parameter(index, param) for index, param in params),
                "  for (int64_t block = first; block < last; ++block) {",
                *(f"    {self.declared(param)} = const_{param.name};" for param in again),
                *(f"    const int64_t block_{d} = {at};" for d, at in enumerate(places) if f"block_{d}" in text),
                *body,
                *(["    next_block:;"] if "goto next_block;" in text else []),
                "  }",
                "}",
                "",
            ]
        )

    def unit(self, functions: list[ir.Function]) -> str:
        """One C file with these functions, their types and helpers."""
        bodies = [self.function(function) for function in functions]
        includes = "#include <immintrin.h>" if self.x86 else "#include <arm_neon.h>"
        parts = [HEADER.format(includes=includes), *self.types.values(), "", *self.helpers.values(), "", *bodies]
        return "\n".join(parts)
