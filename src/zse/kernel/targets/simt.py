"""What the targets HIP and Metal have in common: GPUs of which the language uses threads, warps, shared memory and atomics only.

A warp of the language has 32 lanes on all of them. On a GPU whose waves have 64 lanes, two warps share a wave: lane l of warp w is
lane 32 (w % 2) + l of it, exchanges and votes stay within a half, so that kernels written for 32 lanes give the same bits. f16, bf16 and
e4m3 are integers, converted by arithmetic; vectors go to memory as words of up to 16 bytes. exp, log, sin, cos and tanh are those of
mathlib.py. Copies of copy_async() are finished when it returns.
"""

from zse.kernel import ir, mathlib
from zse.kernel.archs import SHARED_LIMIT, features_of
from zse.kernel.targets.gpu import GpuTarget

_WIDE = {1: "u32", 2: "uint2", 4: "uint4"}


def _lines(*lines: str):
    return lambda t, stmt, outs, args: list(lines)


def _exchange(kind: str):
    def body(t, stmt, outs, args):
        type = stmt.outs[0].type
        words = t.words("a", type)
        if type.bits == 16:
            moved = [f"(u32)(u16)({t.exchanged(kind, words[0], 'n')})"]
        else:
            moved = [t.exchanged(kind, word, "n") for word in words]
        ctype = t.c_type(type)
        helper = t.helper(
            f"{kind}_{type}",
            f"{{device}} {ctype} {{name}}({ctype} a, i32 n{t.lane_param}) {{{{ {ctype} r; "
            f"{t.unworded(type, moved)} return r; }}}}",
        )
        return f"{helper}({args[0]}, {args[1]}{t.lane_argument})"

    return body


def _atomic(name: str):
    def body(t, stmt, outs, args):
        space = stmt.args[0].type.space
        return t.atomic(name, stmt.outs[0].type, space, args)

    return body


def _accumulate(t, stmt, outs, args):
    type, space = stmt.args[1].type, stmt.args[0].type.space
    if not isinstance(type, ir.Vector):
        return [f"(void){t.atomic('atomic_add', type, space, args)};"]
    lanes = " ".join(
        f"(void){t.atomic('atomic_add', type.elem, space, [f'(p + {i})', t.lane_text('a', type, i)])};"
        for i in range(type.lanes)
    )
    return [f"{{ const {t.c_type(type)} a = {args[1]}; {t.space_of(space)}f32 *const p = {args[0]}; {lanes} }}"]


def _copy_async(t, stmt, outs, args):
    size, valid = stmt.attrs[0], args[2] if len(args) == 3 else str(stmt.attrs[0])
    to, source = t.space_of("shared"), t.space_of("global")
    moves = (
        " ".join(f"u32 w{i} = 0;" for i in range(size // 4))
        + " "
        + " ".join(
            f"if (valid >= {4 * i + 4}) w{i} = ((const {source}u32 *)src)[{i}]; "
            f"else for (i32 b = {4 * i}; b < valid; ++b) w{i} |= (u32)((const {source}u8 *)src)[b] << (b - {4 * i}) * 8;"
            for i in range(size // 4)
        )
        + " "
        + " ".join(f"(({to}u32 *)dst)[{i}] = w{i};" for i in range(size // 4))
    )
    moves = moves.replace("{", "{{").replace("}", "}}")
    helper = t.helper(
        f"copy_async_{size}",
        f"{{device}} void {{name}}({to}void *dst, const {source}void *src, i32 valid) {{{{ {moves} }}}}",
    )
    return [f"{helper}({args[0]}, {args[1]}, {valid});"]


EFFECTS = {
    **{name: _exchange(name) for name in ("shuffle", "shuffle_xor", "shuffle_up", "shuffle_down")},
    **{name: _atomic(name) for name in ("atomic_add", "atomic_max", "atomic_min", "atomic_cas")},
    "atomic_accumulate": _accumulate,
    "copy_async": _copy_async,
    "copy_commit": _lines(),
    "copy_wait": _lines(),
    "grid_wait": _lines(),
    "grid_launch_dependents": _lines(),
    "set_max_registers": _lines(),
}


def _index(text: str):
    return lambda t, result, types, args: text


VALUES = {
    "thread_index": _index("zse_thread"),
    "lane_index": _index("(zse_thread & 31)"),
    "warp_index": _index("(zse_thread >> 5)"),
    "cluster_rank": _index("0"),
    "prefetch": _index("(void)0"),
    "prefetch_l2": _index("(void)0"),
}


class SimtTarget(GpuTarget):
    """One variant for an architecture such as "gfx90a" or "metal3.1"."""

    values = VALUES
    effects = EFFECTS
    inline_builtins = mathlib.FUNCTIONS
    spaces = {"global": "", "shared": "", "local": ""}  # the words that a pointer's type begins with
    lane_param = lane_argument = ""  # what helpers of exchanges take beside their operands

    def __init__(self, arch: str, threads: int = 256, min_blocks: int = 1, cluster: int = 1):
        super().__init__(threads, min_blocks, cluster)
        self.name = arch
        self.arch, self.features = features_of(arch)
        self.shared_limit = SHARED_LIMIT[arch]

    def space_of(self, space: str) -> str:
        return self.spaces[space]

    def pointer_type(self, type: ir.Pointer) -> str:
        return f"{'const ' if type.const else ''}{self.spaces[type.space]}{type.elem.name} *"

    # what a target says

    def exchanged(self, kind: str, word: str, argument: str) -> str:
        """A u32 of another lane: kind as the effect is called."""
        raise NotImplementedError

    def atomic(self, name: str, type: ir.Scalar, space: str, args: list[str]) -> str:
        raise NotImplementedError

    def f32_of_f16(self, text: str) -> str:
        raise NotImplementedError

    def f16_of_f32(self, text: str) -> str:
        raise NotImplementedError

    # small floats

    def widen(self, name: str, source: ir.Type, text: str) -> str:
        if not isinstance(source, ir.Scalar):
            wide = ir.Vector(ir.F32, source.lanes)
            return self.lanewise(
                f"f32_of_{name}", wide, [source], lambda v: self.widen(name, source.elem, v[0]), [text]
            )
        if name == "bf16":
            return self.float_of_bits(f"((u32)(u16){text} << 16)")
        if name == "f16":
            return self.f32_of_f16(text)
        # The bits of e4m3 are those of an f16 that is 2**8 times smaller; 0x7f is NaN.
        small = self.f32_of_f16("(u16)((a & 0x80) << 8 | (a & 0x7f) << 7)")
        return (
            self.helper(
                "f32_of_e4m3",
                f"{{device}} f32 {{name}}(e4m3 a) {{{{ return (a & 0x7f) == 0x7f ? "
                f"{self.float_of_bits('0x7fc00000u')} : {small} * 256.0f; }}}}",
            )
            + f"({text})"
        )

    def narrow(self, name: str, type: ir.Type, text: str) -> str:
        if not isinstance(type, ir.Scalar):
            source = ir.Vector(ir.F32, type.lanes)
            return self.lanewise(f"{name}_of_f32", type, [source], lambda v: self.narrow(name, type.elem, v[0]), [text])
        bits = self.float_bits("a")
        if name == "bf16":
            return (
                self.helper(
                    "bf16_of_f32",
                    f"{{device}} bf16 {{name}}(f32 a) {{{{ u32 b = {bits}; "
                    "if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fff; "
                    "return (bf16)((b + 0x7fffu + (b >> 16 & 1u)) >> 16); }}",
                )
                + f"({text})"
            )
        if name == "f16":
            return self.f16_of_f32(text)
        # To the nearest even by integers; below 2**-6 all steps are 2**-9: adding 2**14 (whose last bit is 2**-9) rounds to them.
        small = self.float_bits("(size + 16384.0f)")
        return (
            self.helper(
                "e4m3_of_f32",
                f"{{device}} e4m3 {{name}}(f32 a) {{{{ u32 b = {bits}, sign = b >> 24 & 0x80u; b &= 0x7fffffffu; "
                "if (b > 0x7f800000u) return (e4m3)(sign | 0x7fu); if (b > 0x43e00000u) b = 0x43e00000u; "
                f"f32 size = {self.float_of_bits('b')}; "
                f"if (size < 0.015625f) return (e4m3)(sign | ({small} - 0x46800000u)); "
                "b -= 0x3c000000u; return (e4m3)(sign | (b + 0x7ffffu + (b >> 20 & 1u)) >> 20); }}",
            )
            + f"({text})"
        )

    # memory

    def load(self, expr: ir.Load) -> str:
        pointer, type = self.expr(expr.pointer), expr.type
        space = expr.pointer.type.space
        words = self.spaces[space]
        if isinstance(type, ir.Scalar):
            return self.load_scalar(type, space, pointer)
        size, ctype = self.size(type), self.c_type(type)
        if size < 4:
            body = f"u16 t = *(const {words}u16 *)p; {self.filled(type, ['(t & 255)', '(t >> 8)'])}"
        else:
            count = min(size // 4, 4)
            lines, names = [], []
            for chunk in range(-(-size // 16)):
                lines.append(f"const {_WIDE[count]} t{chunk} = ((const {words}{_WIDE[count]} *)p)[{chunk}];")
                names += [f"t{chunk}.{c}" for c in "xyzw"[:count]] if count > 1 else [f"t{chunk}"]
            body = " ".join(lines) + " " + self.unworded(type, names)
        body = body.replace("{", "{{").replace("}", "}}")
        helper = self.helper(
            f"load_{space}_{type}",
            f"{{device}} {ctype} {{name}}(const {words}void *p) {{{{ {ctype} r; {body} return r; }}}}",
        )
        return f"{helper}({pointer})"

    def load_scalar(self, type: ir.Scalar, space: str, pointer: str) -> str:
        return f"(*{pointer})"

    def store(self, stmt: ir.Store) -> str:
        pointer, value, type = self.expr(stmt.pointer), self.expr(stmt.value), stmt.value.type
        space = stmt.pointer.type.space
        if isinstance(type, ir.Scalar):
            return self.store_scalar(type, space, pointer, value)
        size, ctype, words = self.size(type), self.c_type(type), self.spaces[space]
        if size < 4:
            body = (
                f"*({words}u16 *)p = (u16)((u16)(u8){self.lane_text('a', type, 0)} | "
                f"(u16)(u8){self.lane_text('a', type, 1)} << 8);"
            )
        else:
            parts, count, lines = self.words("a", type), min(size // 4, 4), []
            for chunk in range(-(-size // 16)):
                part = parts[chunk * 4 : chunk * 4 + count]
                fields = (
                    " ".join(f"t{chunk}.{c} = {word};" for c, word in zip("xyzw", part, strict=False))
                    if count > 1
                    else f"t{chunk} = {part[0]};"
                )
                lines.append(f"{_WIDE[count]} t{chunk}; {fields} (({words}{_WIDE[count]} *)p)[{chunk}] = t{chunk};")
            body = " ".join(lines)
        body = body.replace("{", "{{").replace("}", "}}")
        helper = self.helper(
            f"store_{space}_{type}", f"{{device}} void {{name}}({words}void *p, {ctype} a) {{{{ {body} }}}}"
        )
        return f"{helper}({pointer}, {value})"

    def store_scalar(self, type: ir.Scalar, space: str, pointer: str, value: str) -> str:
        return f"*{pointer} = {value}"

    def shared_array(self, var: ir.Var, offset: int, count: int) -> str:
        return f"{self.declared(var)} = ({self.c_type(var.type)})(zse_shared + {offset})"

    def local_array(self, var: ir.Var, count: int) -> str:
        return f"alignas(16) {var.type.elem.name} {var.name}[{count}]"
