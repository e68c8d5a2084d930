"""What targets of GPUs print alike: cuda, hip, metal and the emulator.

Vectors are structs: 32- and 64-bit elements as `v[lanes]`, smaller ones packed into `w[words]` of u32, so that a lane
is a shift and a bitcast to u32 is free. Every index is a constant, so compilers keep them in registers."""

import struct
from typing import ClassVar

import zse.kernel.ir as ir
from zse.errors import CompileError
from zse.kernel import warplib
from zse.kernel.archs import SHARED_LIMIT, features_of
from zse.kernel.intrinsics import EFFECTS
from zse.kernel.intrinsics.row import elem_of
from zse.kernel.targets.c import CTarget, mask_vector

SMALL_FLOATS = ("f16", "bf16", "e4m3")
SUFFIXES = {"i64": "ll", "u64": "ull", "u32": "u"}
WORDS = {1: "u32", 2: "uint2", 4: "uint4"}  # how many u32 one access moves → its type
OPERATIONS = {
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


class GpuTarget(CTarget):
    """Prints one variant for an architecture such as "sm_90a". threads, min_blocks, cluster: as in its Variant."""

    kernels = "gpu"
    warp = 32
    index_type = ir.I32
    offset_types = (ir.I32, ir.U32)
    takes_hints = unrolls = True
    limits_shared = True  # a kernel that asks for more shared memory than a block can have is refused
    inline_functions = warplib.FUNCTIONS
    prelude = ""
    spaces: ClassVar[dict[str, str]] = {
        "global": "",
        "shared": "",
        "local": "",
    }  # words that a pointer's type begins with
    access = "{kind}_{type}"  # names of helpers that load and store
    shared_memory = "zse_shared"  # where the block's shared memory begins
    local_align = 16
    # f32 and f64 from and to their bits
    float_bits = float_of_bits = double_bits = double_of_bits = "{}"
    # Functions of f32 and of f64 → a name, or a text with the argument in it. What is missing the target does not have.
    math: ClassVar[dict[str, str]] = {}
    math64: ClassVar[dict[str, str]] = {}

    def __init__(self, arch: str, threads: int = 256, min_blocks: int = 1, cluster: int = 1):
        super().__init__()
        self.name = arch
        self.arch, self.features = features_of(arch)
        self.shared_limit = SHARED_LIMIT[arch]
        self.threads, self.min_blocks, self.cluster = threads, min_blocks, cluster
        self.shared_bytes = 0
        self.place = ""  # of the last statement that was printed

    # types
    # ---------------------------------------------------------------------------------------------------------------

    def size(self, type: ir.Type) -> int:
        """Bytes of a scalar or vector."""
        return type.elem.bits * type.lanes // 8 if isinstance(type, ir.Vector) else type.bits // 8

    def packed(self, type: ir.Vector) -> bool:
        return type.elem.bits < 32 and self.size(type) >= 4

    def c_type(self, type: ir.Type) -> str:
        type = mask_vector(type)
        match type:
            case ir.Scalar(name):
                return name
            case ir.Pointer(elem, const, space):
                return f"{'const ' if const else ''}{self.spaces[space]}{elem.name} *"
            case ir.Vector(elem, lanes):
                name, size = f"{elem.name}x{lanes}", self.size(type)
                inside = f"u32 w[{size // 4}]" if self.packed(type) else f"{elem.name} v[{lanes}]"
                self.types.setdefault(name, f"struct alignas({min(size, 16)}) {name} {{ {inside}; }};")
                return name
        raise AssertionError(type)

    def declared(self, var: ir.Var) -> str:
        ctype = self.c_type(var.type)
        return f"{ctype}{'' if ctype.endswith('*') else ' '}{var.name}"

    # vectors
    # -------------------------------------------------------------------------------------------------------------

    def lane_text(self, text: str, type: ir.Type, lane: int) -> str:
        vector = mask_vector(type)
        if not self.packed(vector):
            return f"{text}.v[{lane}]"
        per_word = 32 // vector.elem.bits
        shift = lane % per_word * vector.elem.bits
        word = f"{text}.w[{lane // per_word}]"
        return f"(({vector.elem.name})({word} >> {shift}))" if shift else f"(({vector.elem.name}){word})"

    def filled(self, type: ir.Type, lanes: list[str]) -> str:
        """Statements that set the vector r from the texts of its lanes."""
        vector = mask_vector(type)
        if not self.packed(vector):
            return " ".join(f"r.v[{i}] = {lane};" for i, lane in enumerate(lanes))
        bits, per_word = vector.elem.bits, 32 // vector.elem.bits
        words = []
        for first in range(0, vector.lanes, per_word):
            parts = [f"(u32)(u{bits}){lane}" for lane in lanes[first : first + per_word]]
            words.append(" | ".join(part if i == 0 else f"{part} << {i * bits}" for i, part in enumerate(parts)))
        return " ".join(f"r.w[{i}] = {word};" for i, word in enumerate(words))

    def from_lanes(self, name: str, result: ir.Type, types, lanes: list[str], args: list[str]) -> str:
        """Call of a helper with parameters a, b, c of these types whose result has these lanes."""
        params = ", ".join(f"{self.c_type(type)} {param}" for type, param in zip(types, "abc", strict=False))
        ctype = self.c_type(result)
        return self.call(name, ctype, params, f"{ctype} r; {self.filled(result, lanes)} return r;", args)

    def lanewise(self, name: str, result: ir.Type, types, scalar_text, args: list[str]) -> str:
        """Call of a helper that applies a scalar expression to every lane."""
        full = f"{name}_{'_'.join(dict.fromkeys(str(type) for type in (*types, result)))}"
        if f"zse_{full}" in self.helpers:
            return f"zse_{full}({', '.join(args)})"
        lanes = [
            scalar_text([self.lane_text(param, type, i) for type, param in zip(types, "abc", strict=False)])
            for i in range(mask_vector(result).lanes)
        ]
        return self.from_lanes(full, result, types, lanes, args)

    def make(self, type: ir.Vector, args: list[str]) -> str:
        """A vector of these scalars."""
        ctype, names = self.c_type(type), [f"a{i}" for i in range(type.lanes)]
        params = ", ".join(f"{type.elem.name} {name}" for name in names)
        return self.call(f"make_{type}", ctype, params, f"{ctype} r; {self.filled(type, names)} return r;", args)

    def words(self, text: str, type: ir.Type) -> list[str]:
        """The value as u32 words, lowest first."""
        if isinstance(type, ir.Vector):
            if self.packed(type):
                return [f"{text}.w[{i}]" for i in range(self.size(type) // 4)]
            return [word for i in range(type.lanes) for word in self.words(f"{text}.v[{i}]", type.elem)]
        if type.name == "f32":
            return [self.float_bits.format(text)]
        if type.bits == 64:
            bits = self.double_bits.format(text) if type.name == "f64" else text
            return [f"(u32){bits}", f"(u32)((u64){bits} >> 32)"]
        return [f"(u32){text}"]

    def unworded(self, type: ir.Type, words: list[str]) -> str:
        """Statements that set r of this type from u32 words."""

        def scalar(elem: ir.Scalar, parts: list[str]) -> str:
            if elem.name == "f32":
                return self.float_of_bits.format(parts[0])
            if elem.bits == 64:
                both = f"((u64){parts[1]} << 32 | {parts[0]})"
                return self.double_of_bits.format(both) if elem.name == "f64" else f"({elem.name}){both}"
            return f"({elem.name}){parts[0]}"

        if not isinstance(type, ir.Vector):
            return f"r = {scalar(type, words)};"
        if self.packed(type):
            return " ".join(f"r.w[{i}] = {word};" for i, word in enumerate(words))
        per = max(1, type.elem.bits // 32)
        return " ".join(f"r.v[{i}] = {scalar(type.elem, words[i * per : i * per + per])};" for i in range(type.lanes))

    # expressions
    # ---------------------------------------------------------------------------------------------------------

    def expr_Unary(self, expr: ir.Unary) -> str:
        type, op = expr.type, expr.op
        if isinstance(mask_vector(type), ir.Vector):
            name = {"-": "negate", "~": "invert"}[op]
            return self.lanewise(name, type, [type], lambda v: f"{op}{v[0]}", [self.expr(expr.operand)])
        text = super().expr_Unary(expr)
        return f"(({type}){text})" if isinstance(type, ir.Scalar) and type.bits < 32 and op != "!" else text

    def expr_Select(self, expr: ir.Select) -> str:
        type, args = expr.type, [self.expr(part) for part in (expr.condition, expr.left, expr.right)]
        choice = "({} ? {} : {})"
        if not isinstance(expr.condition.type, ir.Mask):
            return choice.format(*args)
        return self.lanewise("select", type, [expr.condition.type, type, type], lambda v: choice.format(*v), args)

    def expr_Splat(self, expr: ir.Splat) -> str:
        type = expr.type
        return self.from_lanes(f"splat_{type}", type, [type.elem], ["a"] * type.lanes, [self.expr(expr.operand)])

    def expr_Binary(self, expr: ir.Binary) -> str:
        kind, op = expr.left.type, expr.op
        if not isinstance(mask_vector(kind), ir.Vector):
            return super().expr_Binary(expr)
        args = [self.expr(expr.left), self.expr(expr.right)]
        compares = isinstance(expr.type, ir.Mask) and not isinstance(kind, ir.Mask)
        text = "({} {op} {} ? -1 : 0)" if compares else "({} {op} {})"
        types = [kind, expr.right.type]
        return self.lanewise(OPERATIONS[op], expr.type, types, lambda v: text.format(*v, op=op), args)

    def constant(self, type: ir.Type, value) -> str:
        if type.kind == "float":
            if type.name in SMALL_FLOATS:
                return f"(({type.name}){small_float_bits(type.name, float(value)):#x})"
            text = repr(float(value))
            if text in ("inf", "-inf", "nan"):
                bits = struct.unpack("<I", struct.pack("<f", float(value)))[0]
                text = self.float_of_bits.format(f"{bits:#x}u")
                return text if type.bits == 32 else f"((f64){text})"
            text = text if any(mark in text for mark in ".e") else text + ".0"
            text = f"{text}f" if type.bits == 32 else text
            return f"({text})" if text.startswith("-") else text
        if type.kind == "bool":
            return "true" if value else "false"
        suffix = SUFFIXES.get(type.name, "")
        if type.kind == "int" and value in (-(2**31), -(2**63)):
            return f"({value + 1}{suffix} - 1)"
        return f"({value}{suffix})" if value < 0 else f"{value}{suffix}"

    def bitcast(self, type: ir.Type, source: ir.Type, text: str) -> str:
        integers = all(isinstance(t, ir.Scalar) and t.name not in ("f32", "f64") for t in (type, source))
        ctype = self.c_type(type)
        if integers or isinstance(type, ir.Pointer):
            return f"(({ctype}){text})"
        body = f"{ctype} r; {self.unworded(type, self.words('a', source))} return r;"
        return self.call(f"bits_{source}_{type}", ctype, f"{self.c_type(source)} a", body, [text])

    def convert(self, type: ir.Type, source: ir.Type, text: str) -> str:
        to, of = elem_of(type), elem_of(source)
        wide = ir.Vector(ir.F32, type.lanes) if isinstance(type, ir.Vector) else ir.F32
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
        """A row of kernel/intrinsics/arithmetic.py for scalars. CompileError where the target does not have it."""
        if elem.name in ("f32", "f64"):
            text = (self.math if elem.name == "f32" else self.math64).get(name)
            if text is None:
                raise CompileError(f"intrinsic {name} of {elem} has no body for target {self.name}")
            return text.format(*args) if "{" in text else f"{text}({', '.join(args)})"
        params = ", ".join(f"{elem.name} {param}" for param in "ab"[: len(args)])
        text = "(a < 0 ? -a : a)" if name == "absolute" else f"(a {'<' if name == 'minimum' else '>'} b ? a : b)"
        return self.call(f"{name}_{elem}", elem.name, params, f"return {text};", args)

    # Conversions of small floats. A target overrides these for all types, or the two below for one value.

    def widen(self, name: str, source: ir.Type, text: str) -> str:
        """f16, bf16 or e4m3, scalar or vector, to f32."""
        if isinstance(source, ir.Scalar):
            return self.widen_one(name, text)
        wide = ir.Vector(ir.F32, source.lanes)
        return self.lanewise(f"f32_of_{name}", wide, [source], lambda v: self.widen_one(name, v[0]), [text])

    def narrow(self, name: str, type: ir.Type, text: str) -> str:
        """f32, scalar or vector, to f16, bf16 or e4m3: nearest even; e4m3 saturates at 448."""
        if isinstance(type, ir.Scalar):
            return self.narrow_one(name, text)
        source = ir.Vector(ir.F32, type.lanes)
        return self.lanewise(f"{name}_of_f32", type, [source], lambda v: self.narrow_one(name, v[0]), [text])

    def widen_one(self, name: str, text: str) -> str:
        raise NotImplementedError

    def narrow_one(self, name: str, text: str) -> str:
        raise NotImplementedError

    # memory
    # --------------------------------------------------------------------------------------------------------------

    def expr_Load(self, expr: ir.Load) -> str:
        pointer, type, space = self.expr(expr.pointer), expr.type, expr.pointer.type.space
        if isinstance(type, ir.Scalar):
            return self.load_scalar(type, space, pointer)
        size, ctype, words = self.size(type), self.c_type(type), self.spaces[space]
        if size < 4:
            body = f"u16 t = *(const {words}u16 *)p; {self.filled(type, ['(t & 255)', '(t >> 8)'])}"
        else:
            count = min(size // 4, 4)
            lines, names = [], []
            for chunk in range(-(-size // 16)):
                lines.append(f"const {WORDS[count]} t{chunk} = ((const {words}{WORDS[count]} *)p)[{chunk}]; ")
                names += [f"t{chunk}.{c}" for c in "xyzw"[:count]] if count > 1 else [f"t{chunk}"]
            body = "".join(lines) + self.unworded(type, names)
        name = self.access.format(kind="load", space=space, type=type)
        return self.call(name, ctype, f"const {words}void *p", f"{ctype} r; {body} return r;", [pointer])

    def load_scalar(self, type: ir.Scalar, space: str, pointer: str) -> str:
        return f"(*{pointer})"

    def store(self, stmt: ir.Store) -> str:
        pointer, value, type = self.expr(stmt.pointer), self.expr(stmt.value), stmt.value.type
        space = stmt.pointer.type.space
        if isinstance(type, ir.Scalar):
            return self.store_scalar(type, space, pointer, value)
        size, ctype, words = self.size(type), self.c_type(type), self.spaces[space]
        if size < 4:
            low, high = (f"(u16)(u8){self.lane_text('a', type, lane)}" for lane in (0, 1))
            body = f"*({words}u16 *)p = (u16)({low} | {high} << 8);"
        else:
            parts, count, lines = self.words("a", type), min(size // 4, 4), []
            for chunk in range(-(-size // 16)):
                part = parts[chunk * 4 : chunk * 4 + count]
                places = [f"t{chunk}.{c}" for c in "xyzw"[:count]] if count > 1 else [f"t{chunk}"]
                fields = " ".join(f"{place} = {word};" for place, word in zip(places, part, strict=False))
                lines.append(f"{WORDS[count]} t{chunk}; {fields} (({words}{WORDS[count]} *)p)[{chunk}] = t{chunk};")
            body = " ".join(lines)
        name = self.access.format(kind="store", space=space, type=type)
        return self.call(name, "void", f"{words}void *p, {ctype} a", body, [pointer, value])

    def store_scalar(self, type: ir.Scalar, space: str, pointer: str, value: str) -> str:
        return f"*{pointer} = {value}"

    def local_array(self, elem: ir.Scalar, name: str, count: int) -> str:
        return f"alignas({self.local_align}) {elem.name} {name}[{count}]"

    def reserve(self, nbytes: int, align: int) -> int:
        """The offset of the next shared array."""
        offset = -(-self.shared_bytes // align) * align
        self.shared_bytes = offset + nbytes
        return offset

    # statements
    # ----------------------------------------------------------------------------------------------------------

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

    def stmt_SharedArray(self, stmt: ir.SharedArray, indent: str) -> list[str]:
        var = stmt.var
        offset = self.reserve(stmt.count * var.type.elem.bits // 8, stmt.align)
        return [f"{indent}{self.declared(var)} = ({self.c_type(var.type)})({self.shared_memory} + {offset});"]

    def stmt_Invoke(self, stmt: ir.Invoke, indent: str) -> list[str]:
        body = EFFECTS[stmt.intrinsic].body_for(self)
        outs, args = [self.expr(out) for out in stmt.outs], [self.expr(arg) for arg in stmt.args]
        if isinstance(body, str):
            text = body.format(*args, out=outs, attr=stmt.attrs)
        else:
            text = body(self, stmt, outs, args)
        if text and not text.endswith((";", "}")):  # an expression
            return [f"{indent}{self.declared(stmt.outs[0])} = {text};" if outs else f"{indent}{text};"]
        fresh = [] if stmt.in_place else [f"{self.declared(out)};" for out in stmt.outs]
        return [indent + line for line in [*([" ".join(fresh)] if fresh else []), *(text.split("\n") if text else [])]]

    # one variant
    # ---------------------------------------------------------------------------------------------------------

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
        return "\n".join(
            [
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
        )
