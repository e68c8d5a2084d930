"""The CPU target: C with vector types (GCC and Clang vector extensions), one text per ISA level.

Entry point of a variant: `void symbol(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last)`.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import zse.kernel.ir as ir
from zse.kernel import mathlib
from zse.kernel.intrinsics import INTRINSICS
from zse.kernel.intrinsics.row import elem_of
from zse.kernel.passes import dead

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
I32 = ir.Scalar("i32", "int", 32)
F32 = ir.Scalar("f32", "float", 32)

HEADER = """#include <math.h>
#include <stdint.h>
{includes}
typedef union {{ uint64_t slot; float f32; double f64; }} zse_slot;
"""

# C operator precedence is never relied on: every operation is printed in parentheses.


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
        Isa(
            "x86-64-v4-vnni",
            16,
            frozenset({"avx2", "avx512", "vnni"}),
            ("-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512"),
            True,
        ),
        Isa("arm64-dotprod", 4, frozenset({"neon"}), ("-march=armv8.2-a+dotprod+fp16",), False),
    )
}


@dataclass
class CpuTarget:
    """Prints IR functions of one compilation unit as C. Vector types and helpers appear in order of first use."""

    isa: Isa
    family: str = "cpu"
    kernels = Isa.kernels
    types: dict[str, str] = field(default_factory=dict)
    helpers: dict[str, str] = field(default_factory=dict)

    inline_builtins = {"exp": mathlib.exp_f32, "tanh": mathlib.tanh_f32}
    inline_functions: ClassVar[dict] = {}
    values: ClassVar[dict] = {}
    effects: ClassVar[dict] = {}
    warp, threads, arch = 1, 1, 0

    @property
    def name(self) -> str:
        return self.isa.name

    @property
    def lanes(self) -> int:
        return self.isa.lanes

    @property
    def x86(self) -> bool:
        return self.isa.x86

    def has(self, feature: str) -> bool:
        return feature in self.isa.features

    # types and helpers

    def c_type(self, type: ir.Type) -> str:
        match type:
            case ir.Scalar(name):
                return C_NAMES[name]
            case ir.Pointer(elem, const):
                return f"{'const ' if const else ''}{C_NAMES[elem.name]} *"
            case ir.Vector(elem, lanes):
                size = elem.bits // 8 * lanes
                name = f"{elem.name}x{lanes}"
                self.types.setdefault(
                    name,
                    f"typedef {C_NAMES[elem.name]} {name} __attribute__((vector_size({size})));\n"
                    f"typedef {C_NAMES[elem.name]} {name}_mem __attribute__((vector_size({size}), aligned(1), "
                    "may_alias));",
                )
                return name
            case ir.Mask(bits, lanes):
                return self.c_type(ir.Vector(ir.Scalar(f"i{bits}", "int", bits), lanes))
        raise AssertionError(type)

    def helper(self, name: str, text: str) -> str:
        """Define a static inline function once; `{name}` in the text is its C name."""
        c_name = f"zse_{name}"
        self.helpers.setdefault(c_name, text.format(name=c_name))
        return c_name

    def lane_helper(self, name: str, result: ir.Vector, types, scalar_text) -> str:
        """A helper that applies a scalar expression to every lane; returns its C name."""
        params = ["a", "b", "c"][: len(types)]
        body = scalar_text([f"{param}[i]" for param in params])
        declared = ", ".join(f"{self.c_type(type)} {param}" for type, param in zip(types, params, strict=True))
        ctype = self.c_type(result)
        return self.helper(
            f"{name}_{result}",
            f"static inline {ctype} {{name}}({declared}) {{{{ {ctype} r; "
            f"for (int i = 0; i < {result.lanes}; ++i) r[i] = {body}; return r; }}}}",
        )

    def native(self, text: str, type: ir.Vector) -> str:
        """The value as the register type that x86 intrinsics take (integers only; floats convert by themselves)."""
        return f"(__m{type.elem.bits * type.lanes}i){text}" if type.elem.kind in ("int", "uint") else text

    # expressions

    def expr(self, expr: ir.Expr) -> str:
        match expr:
            case ir.Const(type, value):
                return self.constant(type, value)
            case ir.Var(_, name):
                return name
            case ir.Binary(type, op, a, b):
                text = f"({self.expr(a)} {op} {self.expr(b)})"
                if isinstance(type, ir.Scalar) and type.kind in ("int", "uint") and type.bits < 32:
                    return f"(({self.c_type(type)}){text})"
                return f"(({self.c_type(type)}){text})" if isinstance(type, ir.Mask) else text
            case ir.Unary(_, op, a):
                return f"({op}{self.expr(a)})"
            case ir.Select(type, condition, a, b):
                return self.select(type, condition, self.expr(a), self.expr(b))
            case ir.Convert(type, a):
                return self.convert(type, a.type, self.expr(a))
            case ir.Bitcast(type, a):
                return self.bitcast(type, a.type, self.expr(a))
            case ir.Splat(type, a):
                return self.splat(type, a)
            case ir.Lane(_, a, index):
                return f"{self.expr(a)}[{index}]"
            case ir.Offset(type, pointer, index):
                base = self.expr(pointer)
                return base if index == ir.Const(ir.I64, 0) else f"({base} + {self.expr(index)})"
            case ir.Load(type, pointer):
                if isinstance(type, ir.Vector):
                    self.c_type(type)
                    return f"(*(const {type}_mem *){self.expr(pointer)})"
                return f"(*{self.expr(pointer)})"
            case ir.Call(type, name, args):
                return INTRINSICS[name].body_for(self)(
                    self, type, [arg.type for arg in args], [self.expr(arg) for arg in args]
                )
        raise AssertionError(expr)

    def constant(self, type: ir.Type, value) -> str:
        if type.kind == "float":
            text = repr(float(value))
            if text in ("inf", "-inf", "nan"):
                text = {"inf": "INFINITY", "-inf": "(-INFINITY)", "nan": "NAN"}[text]
                return text if type.bits == 64 else f"((float){text})"
            text = text if any(mark in text for mark in ".e") else text + ".0"
            return f"({text}f)" if type.bits == 32 else f"({text})"
        if type.kind == "bool":
            return "1" if value else "0"
        suffix = {"i64": "LL", "u64": "ULL", "u32": "u"}.get(type.name, "")
        if value == -(2**63):
            return "INT64_MIN"
        return f"({value}{suffix})" if value < 0 else f"{value}{suffix}"

    def splat(self, type: ir.Vector, operand: ir.Expr) -> str:
        ctype = self.c_type(type)
        text = f"({ctype}){{{{{', '.join(['a'] * type.lanes)}}}}}"
        if self.x86 and type.elem.bits * type.lanes in ((128, 256, 512) if self.has("avx512") else (128, 256)):
            prefix = {128: "_mm", 256: "_mm256", 512: "_mm512"}[type.elem.bits * type.lanes]
            suffix = {"f32": "ps", "f64": "pd"}.get(type.elem.name)
            suffix = suffix or ("epi64x" if type.elem.bits == 64 and prefix != "_mm512" else f"epi{type.elem.bits}")
            text = f"({ctype}){prefix}_set1_{suffix}(a)"
        helper = self.helper(
            f"splat_{type}", f"static inline {ctype} {{name}}({self.c_type(type.elem)} a) {{{{ return {text}; }}}}"
        )
        return f"{helper}({self.expr(operand)})"

    def select(self, type: ir.Type, condition: ir.Expr, a: str, b: str) -> str:
        test = self.expr(condition)
        if not isinstance(condition.type, ir.Mask):
            return f"({test} ? {a} : {b})"
        mask, ctype = self.c_type(condition.type), self.c_type(type)
        helper = self.helper(
            f"select_{type}",
            f"static inline {ctype} {{name}}({mask} m, {ctype} a, {ctype} b) {{{{ "
            f"return ({ctype})((m & ({mask})a) | (~m & ({mask})b)); }}}}",
        )
        return f"{helper}({test}, {a}, {b})"

    def bitcast(self, type: ir.Type, source: ir.Type, text: str) -> str:
        if (
            isinstance(type, ir.Scalar)
            and isinstance(source, ir.Scalar)
            and "float" in (type.kind, source.kind)
            and type.bits >= 32
        ):
            helper = self.helper(
                f"bits_{source}_{type}",
                f"static inline {self.c_type(type)} {{name}}({self.c_type(source)} a) "
                f"{{{{ {self.c_type(type)} r; __builtin_memcpy(&r, &a, sizeof r); return r; }}}}",
            )
            return f"{helper}({text})"
        return f"(({self.c_type(type)}){text})"

    def convert(self, type: ir.Type, source: ir.Type, text: str) -> str:
        to, of = elem_of(type), elem_of(source)
        if of.name in ("f16", "bf16"):
            wide = ir.Vector(F32, type.lanes) if isinstance(type, ir.Vector) else F32
            text = self.half_to_f32(of.name, wide, source, text)
            return text if to.name == "f32" else self.convert(type, wide, text)
        if to.name in ("f16", "bf16"):
            wide = ir.Vector(F32, type.lanes) if isinstance(type, ir.Vector) else F32
            text = text if of.name == "f32" else self.convert(wide, source, text)
            return self.f32_to_half(to.name, type, wide, text)
        if isinstance(type, ir.Vector):
            if {to.kind, of.kind} in ({"float", "int"}, {"float", "uint"}) and to.bits + of.bits < 64:
                # gcc 12 converts bytes to floats one by one (72 instructions for 16 of them); by way of i32 they are 2.
                whole = ir.Vector(ir.Scalar("i32", "int", 32), type.lanes)
                text = f"__builtin_convertvector({text}, {self.c_type(whole)})"
            return f"__builtin_convertvector({text}, {self.c_type(type)})"
        return f"(({self.c_type(type)}){text})"

    def half_to_f32(self, name: str, wide: ir.Type, source: ir.Type, text: str) -> str:
        ctype = self.c_type(wide)
        if isinstance(wide, ir.Scalar):
            if name == "bf16":
                return (
                    self.helper(
                        "f32_of_bf16",
                        "static inline float {name}(uint16_t a) {{ uint32_t b = (uint32_t)a << 16; float r; "
                        "__builtin_memcpy(&r, &b, 4); return r; }}",
                    )
                    + f"({text})"
                )
            body = "return _cvtsh_ss(a);" if self.x86 else "__fp16 h; __builtin_memcpy(&h, &a, 2); return h;"
            return self.helper("f32_of_f16", f"static inline float {{name}}(uint16_t a) {{{{ {body} }}}}") + f"({text})"
        if name == "bf16":
            bits = self.c_type(ir.Vector(ir.Scalar("u32", "uint", 32), wide.lanes))
            return f"(({ctype})(__builtin_convertvector({text}, {bits}) << 16))"
        if self.x86 and wide.lanes == 8:
            return f"(({ctype})_mm256_cvtph_ps((__m128i){text}))"
        if self.x86 and wide.lanes == 16 and self.has("avx512"):
            return f"(({ctype})_mm512_cvtph_ps((__m256i){text}))"
        one = self.half_to_f32(name, F32, ir.Scalar("f16", "float", 16), "a[i]")
        return self.lane_helper("f32_of_f16", wide, [source], lambda names: one) + f"({text})"

    def f32_to_half(self, name: str, type: ir.Type, wide: ir.Type, text: str) -> str:
        ctype = self.c_type(type)
        if isinstance(type, ir.Scalar):
            if name == "bf16":  # round to nearest even; NaN stays NaN
                return (
                    self.helper(
                        "bf16_of_f32",
                        "static inline uint16_t {name}(float a) {{ uint32_t b; __builtin_memcpy(&b, &a, 4); "
                        "if ((b & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((b >> 16) | 64); "
                        "return (uint16_t)((b + 0x7fffu + ((b >> 16) & 1)) >> 16); }}",
                    )
                    + f"({text})"
                )
            body = (
                "return _cvtss_sh(a, 0);"
                if self.x86
                else "__fp16 h = a; uint16_t r; __builtin_memcpy(&r, &h, 2); return r;"
            )
            return self.helper("f16_of_f32", f"static inline uint16_t {{name}}(float a) {{{{ {body} }}}}") + f"({text})"
        if name == "f16" and self.x86 and wide.lanes == 8:
            return f"(({ctype})_mm256_cvtps_ph({text}, _MM_FROUND_TO_NEAREST_INT))"
        if name == "f16" and self.x86 and wide.lanes == 16 and self.has("avx512"):
            return f"(({ctype})_mm512_cvtps_ph({text}, _MM_FROUND_TO_NEAREST_INT))"
        one = self.f32_to_half(name, ir.Scalar(name, "float", 16), F32, "a[i]")
        return self.lane_helper(f"{name}_of_f32", type, [wide], lambda names: one) + f"({text})"

    # statements

    def statements(self, body: list[ir.Stmt], indent: str) -> list[str]:
        return [line for stmt in body for line in self.statement(stmt, indent)]

    def statement(self, stmt: ir.Stmt, indent: str) -> list[str]:
        inner = indent + "  "
        match stmt:
            case ir.Declare(var, value):
                return [f"{indent}{self.c_type(var.type)} {var.name} = {self.expr(value)};"]
            case ir.Assign(var, value):
                return [f"{indent}{var.name} = {self.expr(value)};"]
            case ir.Store(pointer, value):
                if isinstance(value.type, ir.Vector):
                    return [f"{indent}*({self.c_type(value.type)}_mem *){self.expr(pointer)} = {self.expr(value)};"]
                return [f"{indent}*{self.expr(pointer)} = {self.expr(value)};"]
            case ir.LocalArray(var, count):
                return [f"{indent}{C_NAMES[var.type.elem.name]} {var.name}[{count}] __attribute__((aligned(64)));"]
            case ir.Eval(value):
                return [f"{indent}{self.expr(value)};"]
            case ir.For(var, start, stop, step):
                ctype = self.c_type(var.type)
                head = f"for ({ctype} {var.name} = {self.expr(start)}; {var.name} < {self.expr(stop)}; {var.name} += {self.expr(step)}) {{"
                return [indent + head, *self.statements(stmt.body, inner), indent + "}"]
            case ir.While(condition):
                return [f"{indent}while ({self.expr(condition)}) {{", *self.statements(stmt.body, inner), indent + "}"]
            case ir.If(condition):
                lines = [f"{indent}if ({self.expr(condition)}) {{", *self.statements(stmt.then, inner)]
                if stmt.otherwise:
                    lines += [indent + "} else {", *self.statements(stmt.otherwise, inner)]
                return [*lines, indent + "}"]
            case ir.Break():
                return [indent + "break;"]
            case ir.Continue():
                return [indent + "continue;"]
            case ir.Return():
                return [indent + "goto next_block;"]
        raise AssertionError(stmt)

    def function(self, function: ir.Function) -> str:
        lines = [
            f"/* {function.origin} */",
            f"void {function.symbol}(const uint64_t *args, const int64_t *grid, int64_t first, int64_t last) {{",
        ]
        used = {name for stmt in dead.walk(function.body) for name in dead.reads_of(stmt)}
        assigned = {stmt.var.name for stmt in dead.walk(function.body) if isinstance(stmt, ir.Assign)}
        for index, param in enumerate(function.params):
            if param.name not in used:
                continue
            ctype = self.c_type(param.type)
            if isinstance(param.type, ir.Pointer):
                value = f"({ctype})(uintptr_t)args[{index}]"
            elif param.type.kind == "float":
                value = f"((const zse_slot *)args)[{index}].{param.type.name}"
            else:
                value = f"({ctype})args[{index}]"
            lines.append(
                f"  {ctype} const_{param.name} = {value};"
                if param.name in assigned
                else f"  {ctype}{'' if ctype.endswith('*') else ' '}const {param.name} = {value};"
            )
        lines.append("  for (int64_t block = first; block < last; ++block) {")
        lines += [
            f"    {self.c_type(param.type)} {param.name} = const_{param.name};"
            for param in function.params
            if param.name in assigned
        ]
        body = self.statements(function.body, "    ")
        text = "\n".join(body)
        if "block_0" in text:
            lines.append("    const int64_t block_0 = block % grid[0];")
        if "block_1" in text:
            lines.append("    const int64_t block_1 = block / grid[0] % grid[1];")
        if "block_2" in text:
            lines.append("    const int64_t block_2 = block / grid[0] / grid[1];")
        lines += body
        if "goto next_block;" in text:
            lines.append("    next_block:;")
        return "\n".join([*lines, "  }", "}", ""])

    def unit(self, functions: list[ir.Function]) -> str:
        """One C file with these functions, their types and helpers."""
        bodies = [self.function(function) for function in functions]
        includes = "#include <immintrin.h>" if self.x86 else "#include <arm_neon.h>"
        parts = [HEADER.format(includes=includes), *self.types.values(), "", *self.helpers.values(), "", *bodies]
        return "\n".join(parts)
