"""C-like text of GPU kernels: what cuda, hip, metal and the emulator have in common. Each of them is a subclass that fills the table
of class fields and overrides the few methods whose text differs.

Vectors are structs: 32- and 64-bit elements as `v[lanes]`, smaller ones packed into `w[words]` of u32, so that a lane is a shift and a
bitcast to u32 is free. Every index is a constant, so compilers keep them in registers.
"""

import struct

import zse.kernel.ir as ir
from zse.kernel import warplib
from zse.kernel.intrinsics import EFFECTS, INTRINSICS
from zse.kernel.intrinsics.row import elem_of

F32, U32 = ir.F32, ir.U32
SMALL_FLOATS = ("f16", "bf16", "e4m3")


def small_float_bits(name: str, value: float) -> int:
    """The bits of a constant as f16, bf16 or e4m3, rounded to nearest even."""
    if name == "f16":
        return struct.unpack("<H", struct.pack("<e", value))[0]
    if name == "bf16":
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        return (bits >> 16 | 64) & 0xFFFF if value != value else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    sign, size = (0x80 if str(value).startswith("-") else 0), abs(value)
    if value != value:
        return 0x7F
    codes = [(2.0 ** (max(code >> 3, 1) - 7) * ((code & 7) / 8 + (code >= 8)), code) for code in range(0x7F)]
    return sign | min(codes, key=lambda item: (abs(item[0] - min(size, 448.0)), item[1] & 1))[1]


class GpuTarget:
    """Prints one variant. threads, min_blocks, cluster: as in its Variant."""

    family = kernels = "gpu"
    name = "gpu"
    arch = 0
    warp = 32
    lanes = 1
    features: frozenset[str] = frozenset()
    shared_limit = 0  # bytes of shared memory that a block can have
    limits_shared = True  # a kernel that asks for more is refused
    device = "static inline"  # in front of helper functions
    prelude = ""
    inline_builtins: dict = {}
    inline_functions = warplib.FUNCTIONS
    values: dict = {}  # intrinsic → body, beside those of the tables in kernel/intrinsics
    effects: dict = {}

    def __init__(self, threads: int = 256, min_blocks: int = 1, cluster: int = 1):
        self.threads, self.min_blocks, self.cluster = threads, min_blocks, cluster
        self.types: dict[str, str] = {}
        self.helpers: dict[str, str] = {}
        self.shared_bytes = 0
        self.place = ""  # of the last statement that was printed

    def has(self, feature: str) -> bool:
        return feature in self.features

    # types ---------------------------------------------------------------------------------------------------------------

    def pointer_type(self, type: ir.Pointer) -> str:
        return f"{'const ' if type.const else ''}{type.elem.name} *"

    def plain(self, type: ir.Type) -> ir.Type:
        """A mask as the vector of -1 and 0 that it is here."""
        return (
            ir.Vector(ir.Scalar(f"i{type.bits}", "int", type.bits), type.lanes) if isinstance(type, ir.Mask) else type
        )

    def size(self, type: ir.Type) -> int:
        """Bytes of a scalar or vector."""
        return type.elem.bits * type.lanes // 8 if isinstance(type, ir.Vector) else type.bits // 8

    def packed(self, type: ir.Vector) -> bool:
        return type.elem.bits < 32 and self.size(type) >= 4

    def c_type(self, type: ir.Type) -> str:
        type = self.plain(type)
        match type:
            case ir.Scalar(name):
                return name
            case ir.Pointer():
                return self.pointer_type(type)
            case ir.Vector(elem, lanes):
                name, size = f"{elem.name}x{lanes}", self.size(type)
                inside = f"u32 w[{size // 4}]" if self.packed(type) else f"{elem.name} v[{lanes}]"
                self.types.setdefault(name, f"struct alignas({min(size, 16)}) {name} {{ {inside}; }};")
                return name
        raise AssertionError(type)

    def helper(self, name: str, text: str) -> str:
        """Define a function once; `{name}` and `{device}` in the text are its name and the words in front of it."""
        full = f"zse_{name}"
        if full not in self.helpers:
            self.helpers[full] = text.format(name=full, device=self.device)
        return full

    # vectors -------------------------------------------------------------------------------------------------------------

    def lane_text(self, text: str, type: ir.Type, lane: int) -> str:
        """One element of the vector that `text` names."""
        vector = self.plain(type)
        if not self.packed(vector):
            return f"{text}.v[{lane}]"
        per_word = 32 // vector.elem.bits
        shift = lane % per_word * vector.elem.bits
        word = f"{text}.w[{lane // per_word}]"
        return f"(({vector.elem.name})({word} >> {shift}))" if shift else f"(({vector.elem.name}){word})"

    def filled(self, type: ir.Type, lanes: list[str]) -> str:
        """Statements that set the vector r from the texts of its lanes."""
        vector = self.plain(type)
        if not self.packed(vector):
            return " ".join(f"r.v[{i}] = {lane};" for i, lane in enumerate(lanes))
        bits, per_word = vector.elem.bits, 32 // vector.elem.bits
        unsigned = f"u{bits}"
        words = []
        for first in range(0, vector.lanes, per_word):
            parts = [f"(u32)({unsigned}){lane}" for lane in lanes[first : first + per_word]]
            words.append(" | ".join(part if i == 0 else f"{part} << {i * bits}" for i, part in enumerate(parts)))
        return " ".join(f"r.w[{i}] = {word};" for i, word in enumerate(words))

    def from_lanes(self, name: str, result: ir.Type, types, lanes: list[str], args: list[str]) -> str:
        """Call of a helper with parameters a, b, c of these types whose result has these lanes."""
        params = ", ".join(f"{self.c_type(type)} {param}" for type, param in zip(types, "abc", strict=False))
        ctype = self.c_type(result)
        body = self.filled(result, lanes).replace("{", "{{").replace("}", "}}")
        helper = self.helper(name, f"{{device}} {ctype} {{name}}({params}) {{{{ {ctype} r; {body} return r; }}}}")
        return f"{helper}({', '.join(args)})"

    def lanewise(self, name: str, result: ir.Type, types, scalar_text, args: list[str]) -> str:
        """Call of a helper that applies a scalar expression to every lane."""
        lanes = [
            scalar_text([self.lane_text(param, type, i) for type, param in zip(types, "abc", strict=False)])
            for i in range(self.plain(result).lanes)
        ]
        names = "_".join(dict.fromkeys(str(type) for type in (*types, result)))
        return self.from_lanes(f"{name}_{names}", result, types, lanes, args)

    def make(self, type: ir.Vector, args: list[str]) -> str:
        """A vector of these scalars."""
        ctype, names = self.c_type(type), [f"a{i}" for i in range(type.lanes)]
        params = ", ".join(f"{type.elem.name} {name}" for name in names)
        helper = self.helper(
            f"make_{type}",
            f"{{device}} {ctype} {{name}}({params}) {{{{ {ctype} r; {self.filled(type, names)} return r; }}}}",
        )
        return f"{helper}({', '.join(args)})"

    def words(self, text: str, type: ir.Type) -> list[str]:
        """The value as u32 words, lowest first."""
        if isinstance(type, ir.Vector):
            if self.packed(type):
                return [f"{text}.w[{i}]" for i in range(self.size(type) // 4)]
            return [word for i in range(type.lanes) for word in self.words(f"{text}.v[{i}]", type.elem)]
        if type.name == "f32":
            return [self.float_bits(text)]
        if type.bits == 64:
            bits = self.double_bits(text) if type.name == "f64" else text
            return [f"(u32){bits}", f"(u32)((u64){bits} >> 32)"]
        return [f"(u32){text}"]

    def unworded(self, type: ir.Type, words: list[str]) -> str:
        """Statements that set r of this type from u32 words."""

        def scalar(elem: ir.Scalar, parts: list[str]) -> str:
            if elem.name == "f32":
                return self.float_of_bits(parts[0])
            if elem.bits == 64:
                both = f"((u64){parts[1]} << 32 | {parts[0]})"
                return self.double_of_bits(both) if elem.name == "f64" else f"({elem.name}){both}"
            return f"({elem.name}){parts[0]}"

        if not isinstance(type, ir.Vector):
            return f"r = {scalar(type, words)};"
        if self.packed(type):
            return " ".join(f"r.w[{i}] = {word};" for i, word in enumerate(words))
        per = max(1, type.elem.bits // 32)
        return " ".join(f"r.v[{i}] = {scalar(type.elem, words[i * per : i * per + per])};" for i in range(type.lanes))

    def float_bits(self, text: str) -> str:
        raise NotImplementedError

    def float_of_bits(self, text: str) -> str:
        raise NotImplementedError

    def double_bits(self, text: str) -> str:
        raise NotImplementedError

    def double_of_bits(self, text: str) -> str:
        raise NotImplementedError

    # expressions ---------------------------------------------------------------------------------------------------------

    def expr(self, expr: ir.Expr) -> str:
        match expr:
            case ir.Const(type, value):
                return self.constant(type, value)
            case ir.Var(_, name):
                return name
            case ir.Binary(type, op, a, b):
                return self.binary(type, op, a, b)
            case ir.Unary(type, op, a):
                if isinstance(self.plain(type), ir.Vector):
                    return self.lanewise(
                        {"-": "negate", "~": "invert"}[op], type, [a.type], lambda v: f"{op}{v[0]}", [self.expr(a)]
                    )
                text = f"({op}{self.expr(a)})"
                return (
                    f"(({self.c_type(type)}){text})"
                    if isinstance(type, ir.Scalar) and type.bits < 32 and op != "!"
                    else text
                )
            case ir.Select(type, condition, a, b):
                if isinstance(condition.type, ir.Mask):
                    return self.lanewise(
                        "select",
                        type,
                        [condition.type, type, type],
                        lambda v: f"({v[0]} ? {v[1]} : {v[2]})",
                        [self.expr(condition), self.expr(a), self.expr(b)],
                    )
                return f"({self.expr(condition)} ? {self.expr(a)} : {self.expr(b)})"
            case ir.Convert(type, a):
                return self.convert(type, a.type, self.expr(a))
            case ir.Bitcast(type, a):
                return self.bitcast(type, a.type, self.expr(a))
            case ir.Splat(type, a):
                names = ["a"] * type.lanes
                return self.from_lanes(f"splat_{type}", type, [type.elem], names, [self.expr(a)])
            case ir.Lane(_, a, index):
                return self.lane_text(self.expr(a), a.type, index)
            case ir.Offset(type, pointer, index):
                base = self.expr(pointer)
                return base if isinstance(index, ir.Const) and index.value == 0 else f"({base} + {self.expr(index)})"
            case ir.Load():
                return self.load(expr)
            case ir.Call(type, name, args):
                return INTRINSICS[name].body_for(self)(
                    self, type, [arg.type for arg in args], [self.expr(arg) for arg in args]
                )
        raise AssertionError(expr)

    def binary(self, type: ir.Type, op: str, a: ir.Expr, b: ir.Expr) -> str:
        left, right = self.expr(a), self.expr(b)
        if isinstance(self.plain(a.type), ir.Vector):
            names = {
                "+": "add",
                "-": "sub",
                "*": "mul",
                "/": "div",
                "%": "mod",
                "&": "and",
                "|": "or",
                "^": "xor",
                "<<": "shl",
                ">>": "shr",
                "==": "eq",
                "!=": "ne",
                "<": "lt",
                "<=": "le",
                ">": "gt",
                ">=": "ge",
            }
            text = (
                "({} {op} {} ? -1 : 0)"
                if isinstance(type, ir.Mask) and not isinstance(a.type, ir.Mask)
                else "({} {op} {})"
            )
            return self.lanewise(names[op], type, [a.type, b.type], lambda v: text.format(*v, op=op), [left, right])
        text = f"({left} {op} {right})"
        return (
            f"(({self.c_type(type)}){text})"
            if isinstance(type, ir.Scalar) and type.kind in ("int", "uint") and type.bits < 32
            else text
        )

    def constant(self, type: ir.Type, value) -> str:
        if type.kind == "float":
            if type.name in SMALL_FLOATS:
                return f"(({type.name}){small_float_bits(type.name, float(value)):#x})"
            text = repr(float(value))
            if text in ("inf", "-inf", "nan"):
                bits = struct.unpack("<I", struct.pack("<f", float(value)))[0]
                return (
                    self.float_of_bits(f"{bits:#x}u")
                    if type.bits == 32
                    else f"((f64){self.float_of_bits(f'{bits:#x}u')})"
                )
            text = text if any(mark in text for mark in ".e") else text + ".0"
            text = f"{text}f" if type.bits == 32 else text
            return f"({text})" if text.startswith("-") else text
        if type.kind == "bool":
            return "true" if value else "false"
        suffix = {"i64": "ll", "u64": "ull", "u32": "u"}.get(type.name, "")
        if type.kind == "int" and value in (-(2**31), -(2**63)):
            return f"({value + 1}{suffix} - 1)"
        return f"({value}{suffix})" if value < 0 else f"{value}{suffix}"

    def bitcast(self, type: ir.Type, source: ir.Type, text: str) -> str:
        if isinstance(type, ir.Pointer):
            return f"(({self.c_type(type)}){text})"
        integers = all(isinstance(t, ir.Scalar) and t.name not in ("f32", "f64") for t in (type, source))
        if integers:
            return f"(({self.c_type(type)}){text})"
        ctype = self.c_type(type)
        body = self.unworded(type, self.words("a", source))
        helper = self.helper(
            f"bits_{source}_{type}",
            f"{{device}} {ctype} {{name}}({self.c_type(source)} a) {{{{ {ctype} r; {body} return r; }}}}",
        )
        return f"{helper}({text})"

    def convert(self, type: ir.Type, source: ir.Type, text: str) -> str:
        to, of = elem_of(type), elem_of(source)
        wide = ir.Vector(F32, type.lanes) if isinstance(type, ir.Vector) else F32
        if of.name in SMALL_FLOATS:
            text = self.widen(of.name, source, text)
            return text if to.name == "f32" else self.convert(type, wide, text)
        if to.name in SMALL_FLOATS:
            return self.narrow(to.name, type, text if of.name == "f32" else self.convert(wide, source, text))
        if isinstance(type, ir.Vector):
            return self.lanewise("convert", type, [source], lambda v: self.numeric(to, of, v[0]), [text])
        return f"({self.numeric(to, of, text)})"

    def numeric(self, to: ir.Scalar, of: ir.Scalar, text: str) -> str:
        """A conversion among integers, f32 and f64."""
        return f"({to.name}){text}"

    def scalar_math(self, name: str, elem: ir.Scalar, args: list[str]) -> str:
        """minimum, maximum or absolute of integers; targets add the functions of floats."""
        params = ", ".join(f"{elem.name} {param}" for param in "ab"[: len(args)])
        text = "(a < 0 ? -a : a)" if name == "absolute" else f"(a {'<' if name == 'minimum' else '>'} b ? a : b)"
        helper = self.helper(f"{name}_{elem}", f"{{device}} {elem.name} {{name}}({params}) {{{{ return {text}; }}}}")
        return f"{helper}({', '.join(args)})"

    def widen(self, name: str, source: ir.Type, text: str) -> str:
        """f16, bf16 or e4m3, scalar or vector, to f32."""
        raise NotImplementedError

    def narrow(self, name: str, type: ir.Type, text: str) -> str:
        """f32, scalar or vector, to f16, bf16 or e4m3: nearest even; e4m3 saturates at 448."""
        raise NotImplementedError

    # memory --------------------------------------------------------------------------------------------------------------

    def load(self, expr: ir.Load) -> str:
        raise NotImplementedError

    def store(self, stmt: ir.Store) -> str:
        raise NotImplementedError

    def shared_array(self, var: ir.Var, offset: int, count: int) -> str:
        raise NotImplementedError

    def local_array(self, var: ir.Var, count: int) -> str:
        raise NotImplementedError

    def reserve(self, nbytes: int, align: int) -> int:
        """The offset of the next shared array."""
        offset = -(-self.shared_bytes // align) * align
        self.shared_bytes = offset + nbytes
        return offset

    # statements ----------------------------------------------------------------------------------------------------------

    def statements(self, body: list[ir.Stmt], indent: str) -> list[str]:
        return [line for stmt in body for line in self.placed(stmt, indent)]

    def placed(self, stmt: ir.Stmt, indent: str) -> list[str]:
        """The statement's lines, the first with its source line as a comment where that changes."""
        place, note = f"{stmt.path}:{stmt.line}", ""
        if place != self.place:
            note = f"  // {stmt.line}" if stmt.path == self.path else f"  // {stmt.path.rsplit('/', 1)[-1]}:{stmt.line}"
            self.place = place
        lines = self.statement(stmt, indent)
        return [lines[0] + note, *lines[1:]] if lines else []

    def statement(self, stmt: ir.Stmt, indent: str) -> list[str]:
        inner = indent + "  "
        match stmt:
            case ir.Declare(var, value):
                return [f"{indent}{self.declared(var)} = {self.expr(value)};"]
            case ir.Assign(var, value):
                return [f"{indent}{var.name} = {self.expr(value)};"]
            case ir.Store():
                return [f"{indent}{self.store(stmt)};"]
            case ir.LocalArray(var, count):
                return [f"{indent}{self.local_array(var, count)};"]
            case ir.SharedArray(var, count, align):
                offset = self.reserve(count * var.type.elem.bits // 8, align)
                return [f"{indent}{self.shared_array(var, offset, count)};"]
            case ir.Eval(value):
                return [f"{indent}{self.expr(value)};"]
            case ir.Invoke():
                return [indent + line for line in self.invoke(stmt)]
            case ir.For():
                return self.for_loop(stmt, indent)
            case ir.While(condition, body, prepare):
                if not prepare:
                    return [f"{indent}while ({self.expr(condition)}) {{", *self.statements(body, inner), indent + "}"]
                head = [
                    f"{indent}while (true) {{",
                    *self.statements(prepare, inner),
                    f"{inner}if (!{self.expr(condition)}) break;",
                ]
                return [*head, *self.statements(body, inner), indent + "}"]
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
                return [indent + "return;"]
        raise AssertionError(stmt)

    def declared(self, var: ir.Var) -> str:
        ctype = self.c_type(var.type)
        return f"{ctype}{'' if ctype.endswith('*') else ' '}{var.name}"

    def for_loop(self, stmt: ir.For, indent: str) -> list[str]:
        name = stmt.var.name
        head = (
            f"for ({self.declared(stmt.var)} = {self.expr(stmt.start)}; {name} < {self.expr(stmt.stop)}; "
            f"{name} += {self.expr(stmt.step)}) {{"
        )
        unroll = [] if stmt.unroll is None else [f"{indent}#pragma unroll{f' {stmt.unroll}' if stmt.unroll else ''}"]
        return [*unroll, indent + head, *self.statements(stmt.body, indent + "  "), indent + "}"]

    def invoke(self, stmt: ir.Invoke) -> list[str]:
        body = EFFECTS[stmt.intrinsic].body_for(self)
        result = body(self, stmt, [self.expr(out) for out in stmt.outs], [self.expr(arg) for arg in stmt.args])
        if isinstance(result, str):  # an expression
            return [f"{self.declared(stmt.outs[0])} = {result};" if stmt.outs else f"{result};"]
        fresh = [] if stmt.in_place else [f"{self.declared(out)};" for out in stmt.outs]
        return ([" ".join(fresh)] if fresh else []) + result

    # one variant ---------------------------------------------------------------------------------------------------------

    def signature(self, function: ir.Function) -> str:
        raise NotImplementedError

    def opening(self) -> list[str]:
        """First lines of the body, once its size of shared memory is known."""
        return []

    def unit(self, function: ir.Function) -> str:
        """The text of one variant with its types and helpers."""
        self.path = function.origin.partition(":")[0]
        body = self.statements(function.body, "  ")
        head = f"{self.signature(function)} {{"
        parts = [
            self.prelude,
            *self.types.values(),
            "",
            *self.helpers.values(),
            "",
            f"// {function.origin}",
            head,
            *self.opening(),
            *body,
            "}",
            "",
        ]
        return "\n".join(parts)
