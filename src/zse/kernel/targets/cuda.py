"""The CUDA target: C++ without any header, for NVRTC or nvcc. `--fmad=false`: a fused multiply-add happens where fma is written."""

from zse.kernel import ir
from zse.kernel.archs import SHARED_LIMIT, features_of
from zse.kernel.targets.gpu import GpuTarget

PRELUDE = """typedef signed char i8; typedef unsigned char u8; typedef short i16; typedef unsigned short u16;
typedef int i32; typedef unsigned int u32; typedef long long i64; typedef unsigned long long u64;
typedef unsigned short f16; typedef unsigned short bf16; typedef unsigned char e4m3; typedef float f32; typedef double f64;
typedef bool bool_;
struct alignas(64) tensormap { u64 opaque[16]; };
"""

_MATH = {
    "sqrt": "__fsqrt_rn",
    "exp": "expf",
    "log": "logf",
    "sin": "sinf",
    "cos": "cosf",
    "tanh": "tanhf",
    "floor": "floorf",
    "round_even": "rintf",
    "fma": "__fmaf_rn",
    "absolute": "fabsf",
    "minimum": "fminf",
    "maximum": "fmaxf",
}
# One instruction each, about 2 ulp (PTX ISA). Subnormals count as zero.
_APPROXIMATE = {"exp2": "ex2.approx.ftz.f32", "rsqrt": "rsqrt.approx.ftz.f32", "reciprocal": "rcp.approx.ftz.f32"}

HINTS = {"readonly": "ld.global.nc", "stream": "ld.global.nc.L1::no_allocate.L2::256B"}


class CudaTarget(GpuTarget):
    """One variant as CUDA C++ for an architecture such as "sm_90a"."""

    family = "cuda"
    device = "static __device__ __forceinline__"
    prelude = PRELUDE

    def __init__(self, arch: str, threads: int = 256, min_blocks: int = 1, cluster: int = 1):
        super().__init__(threads, min_blocks, cluster)
        self.name = arch
        self.arch, self.features = features_of(arch)
        self.shared_limit = SHARED_LIMIT[arch]

    def float_bits(self, text: str) -> str:
        return f"__float_as_uint({text})"

    def float_of_bits(self, text: str) -> str:
        return f"__uint_as_float({text})"

    def double_bits(self, text: str) -> str:
        return f"__double_as_longlong({text})"

    def double_of_bits(self, text: str) -> str:
        return f"__longlong_as_double({text})"

    def shared_address(self, text: str) -> str:
        """A pointer to shared memory as the 32-bit address that instructions take."""
        return (
            self.helper(
                "shared_address", "{device} u32 {name}(const void *p) {{ return (u32)__cvta_generic_to_shared(p); }}"
            )
            + f"({text})"
        )

    def scalar_math(self, name: str, elem: ir.Scalar, args: list[str]) -> str:
        if elem.name == "f32" and name in _APPROXIMATE:
            helper = self.helper(
                name,
                f'{{device}} f32 {{name}}(f32 a) {{{{ f32 r; asm("{_APPROXIMATE[name]} %0, %1;" : "=f"(r) '
                ': "f"(a)); return r; }}',
            )
            return f"{helper}({args[0]})"
        if elem.name == "f32":
            return f"{_MATH[name]}({', '.join(args)})"
        if elem.name == "f64":
            if name in ("rsqrt", "reciprocal"):
                return f"(1.0 / {f'sqrt({args[0]})' if name == 'rsqrt' else args[0]})"
            function = {"sqrt": "sqrt", "fma": "fma", "exp2": "exp2"}.get(name) or _MATH[name].removesuffix("f")
            return f"{function}({', '.join(args)})"
        return super().scalar_math(name, elem, args)

    # small floats

    def _cvt(self, name: str, result: str, params: str, instruction: str, out: str, operands: str) -> str:
        """A helper of one conversion instruction."""
        places = ", ".join(f"%{i + 1}" for i in range(operands.count('"') // 2))
        return self.helper(
            name,
            f'{{device}} {result} {{name}}({params}) {{{{ {result} r; asm("{instruction} %0, {places};" '
            f': "={out}"(r) : {operands}); return r; }}}}',
        )

    def widen(self, name: str, source: ir.Type, text: str) -> str:
        if isinstance(source, ir.Scalar):
            if name == "bf16":
                return f"__uint_as_float((u32){text} << 16)"
            if name == "f16":
                return self._cvt("f32_of_f16", "f32", "f16 a", "cvt.f32.f16", "f", '"h"(a)') + f"({text})"
            return (
                self.helper(
                    "f32_of_e4m3",
                    "{device} f32 {name}(e4m3 a) {{ return "
                    + self._f16_to_f32(f"(u16){self._e4m3_pair('(u16)a')}")
                    + "; }}",
                )
                + f"({text})"
            )
        lanes = []
        for i in range(source.lanes):
            if not self.packed(source):
                lanes.append(self.widen(name, source.elem, f"a.v[{i}]"))
            elif name == "bf16":
                word = f"a.w[{i // 2}]"
                lanes.append(f"__uint_as_float({word} & 0xffff0000u)" if i % 2 else f"__uint_as_float({word} << 16)")
            elif name == "f16":
                lanes.append(self._f16_to_f32(self.lane_text("a", source, i)))
            else:
                pair = self._e4m3_pair(f"(u16)(a.w[{i // 4}] >> {i // 2 % 2 * 16})")
                lanes.append(self._f16_to_f32(f"(u16)({pair} >> {i % 2 * 16})"))
        wide = ir.Vector(ir.F32, source.lanes)
        return self.from_lanes(f"f32_of_{source}", wide, [source], lanes, [text])

    def _f16_to_f32(self, text: str) -> str:
        return self.widen("f16", ir.Scalar("f16", "float", 16), text)

    def _e4m3_pair(self, text: str) -> str:
        """Two e4m3 (u16) as two f16 (u32)."""
        if self.has("fp8"):
            return self._cvt("f16x2_of_e4m3x2", "u32", "u16 a", "cvt.rn.f16x2.e4m3x2", "r", '"h"(a)') + f"({text})"
        # The bits of e4m3 are those of an f16 that is 2**8 times smaller; 0x7f (NaN) becomes NaN by its own test.
        return (
            self.helper(
                "f16x2_of_e4m3x2",
                "{device} u32 {name}(u16 a) {{ u32 b = (u32)a | (u32)a << 8; "
                "b = (b & 0x00800080u) << 8 | (b & 0x007f007fu) << 7; "
                'asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(b) : "r"(0x5c005c00u), "r"(0x80008000u)); '
                "if ((a & 0x7f) == 0x7f) b |= 0x7fffu; if ((a & 0x7f00) == 0x7f00) b |= 0x7fff0000u; return b; }}",
            )
            + f"({text})"
        )

    def narrow(self, name: str, type: ir.Type, text: str) -> str:
        pair = {"bf16": "cvt.rn.bf16x2.f32", "f16": "cvt.rn.f16x2.f32"}
        if isinstance(type, ir.Scalar):
            if name == "e4m3":
                return f"((e4m3){self._e4m3_of('0.0f', text)})"
            return self._cvt(f"{name}_of_f32", name, "f32 a", f"cvt.rn.{name}.f32", "h", '"f"(a)') + f"({text})"
        source = ir.Vector(ir.F32, type.lanes)
        if not self.packed(type):
            return self.lanewise(f"{name}_of", type, [source], lambda v: self.narrow(name, type.elem, v[0]), [text])
        if name == "e4m3":
            halves = [f"(u32){self._e4m3_of(f'a.v[{i + 1}]', f'a.v[{i}]')}" for i in range(0, type.lanes, 2)]
            words = [f"{low} | {high} << 16" for low, high in zip(halves[::2], halves[1::2], strict=True)]
        else:
            convert = self._cvt(
                f"{name}_pair_of_f32", "u32", "f32 high, f32 low", pair[name], "r", '"f"(high), "f"(low)'
            )
            words = [f"{convert}(a.v[{i + 1}], a.v[{i}])" for i in range(0, type.lanes, 2)]
        ctype = self.c_type(type)
        body = " ".join(f"r.w[{i}] = {word};" for i, word in enumerate(words))
        helper = self.helper(
            f"narrow_{type}",
            f"{{device}} {ctype} {{name}}({self.c_type(source)} a) {{{{ {ctype} r; {body} return r; }}}}",
        )
        return f"{helper}({text})"

    def _e4m3_of(self, high: str, low: str) -> str:
        """Two f32 as two e4m3 (u16)."""
        if self.has("fp8"):
            return (
                self._cvt(
                    "e4m3x2_of_f32",
                    "u16",
                    "f32 high, f32 low",
                    "cvt.rn.satfinite.e4m3x2.f32",
                    "h",
                    '"f"(high), "f"(low)',
                )
                + f"({high}, {low})"
            )
        # Adding 2**(exponent + 20) rounds to that exponent's 4 significant bits (nearest even); below 2**-6 all share one step.
        one = self.helper(
            "e4m3_of_f32",
            "{device} u32 {name}(f32 a) {{ u32 bits = __float_as_uint(a), sign = bits >> 24 & 0x80u; "
            "if ((bits & 0x7fffffffu) > 0x7f800000u) return sign | 0x7fu; "
            "f32 size = fminf(fabsf(a), 448.0f); u32 step = max(__float_as_uint(size) & 0x7f800000u, 0x3c800000u); "
            "f32 big = __uint_as_float(step + 0x0a000000u); size = (size + big) - big; bits = __float_as_uint(size); "
            "if (size >= 0.015625f) return sign | ((bits - 0x3c000000u) >> 20); "
            "return sign | (u32)(size * 512.0f); }}",
        )
        return f"(u16)({one}({high}) << 8 | {one}({low}))"

    # memory

    def load(self, expr: ir.Load) -> str:
        pointer, type, hint = self.expr(expr.pointer), expr.type, expr.hint
        if isinstance(type, ir.Scalar):
            return self._hinted_scalar(type, hint, pointer) if hint else f"(*{pointer})"
        size, ctype = self.size(type), self.c_type(type)
        name = f"load_{type}{'_' + hint if hint else ''}"
        if size < 4:
            body = f"u16 t = *(const u16 *)p; {self.filled(type, ['(t & 255)', '(t >> 8)'])}"
        else:
            count = min(size // 4, 4)
            lines, words = [], []
            for chunk in range(-(-size // 16)):
                names = [f"t{chunk}{c}" for c in "xyzw"[:count]]
                words += names
                if hint:
                    shape = f".v{count}" if count > 1 else ""
                    braces = "{" + ", ".join(f"%{i}" for i in range(count)) + "}" if count > 1 else "%0"
                    results = ", ".join(f'"=r"({name})' for name in names)
                    lines.append(
                        f'u32 {", ".join(names)}; asm volatile("{HINTS[hint]}{shape}.u32 {braces}, [%{count}];" : {results} '
                        f': "l"((const char *)p + {16 * chunk}));'
                    )
                else:
                    wide = {1: "u32", 2: "uint2", 4: "uint4"}[count]
                    lines.append(f"const {wide} t{chunk} = ((const {wide} *)p)[{chunk}];")
                    words[-count:] = [f"t{chunk}.{c}" for c in "xyzw"[:count]] if count > 1 else [f"t{chunk}"]
            body = " ".join(lines) + " " + self.unworded(type, words)
        body = body.replace("{", "{{").replace("}", "}}")
        helper = self.helper(name, f"{{device}} {ctype} {{name}}(const void *p) {{{{ {ctype} r; {body} return r; }}}}")
        return f"{helper}({pointer})"

    def _hinted_scalar(self, type: ir.Scalar, hint: str, pointer: str) -> str:
        letter = {8: "h", 16: "h", 32: "r", 64: "l"}[type.bits]
        holder = {8: "u16", 16: "u16", 32: "u32", 64: "u64"}[type.bits]
        unsigned = ir.Scalar(f"u{type.bits}", "uint", type.bits)
        instruction = HINTS[hint].replace(".L2::256B", "") if type.bits < 32 else HINTS[hint]
        helper = self.helper(
            f"load_{hint}_u{type.bits}",
            f"{{device}} u{type.bits} {{name}}(const void *p) {{{{ {holder} r; "
            f'asm volatile("{instruction}.u{type.bits} %0, [%1];" : "={letter}"(r) : "l"(p)); '
            f"return (u{type.bits})r; }}}}",
        )
        return self.bitcast(type, unsigned, f"{helper}({pointer})")

    def store(self, stmt: ir.Store) -> str:
        pointer, value, type, hint = self.expr(stmt.pointer), self.expr(stmt.value), stmt.value.type, stmt.hint
        if isinstance(type, ir.Scalar):
            return f"*{pointer} = {value}"
        size, ctype = self.size(type), self.c_type(type)
        name = f"store_{type}{'_' + hint if hint else ''}"
        if size < 4:
            body = f"*(u16 *)p = (u16)((u16)(u8){self.lane_text('a', type, 0)} | (u16)(u8){self.lane_text('a', type, 1)} << 8);"
        else:
            words, count, lines = self.words("a", type), min(size // 4, 4), []
            for chunk in range(-(-size // 16)):
                part = words[chunk * 4 : chunk * 4 + count]
                if hint:
                    shape = f".v{count}" if count > 1 else ""
                    braces = "{" + ", ".join(f"%{i + 1}" for i in range(count)) + "}" if count > 1 else "%1"
                    operands = ", ".join(f'"r"({word})' for word in part)
                    lines.append(
                        f'asm volatile("st.global.L1::no_allocate{shape}.u32 [%0], {braces};" :: '
                        f'"l"((char *)p + {16 * chunk}), {operands} : "memory");'
                    )
                else:
                    wide = {1: "u32", 2: "uint2", 4: "uint4"}[count]
                    fields = (
                        " ".join(f"t{chunk}.{c} = {word};" for c, word in zip("xyzw", part, strict=False))
                        if count > 1
                        else f"t{chunk} = {part[0]};"
                    )
                    lines.append(f"{wide} t{chunk}; {fields} (({wide} *)p)[{chunk}] = t{chunk};")
            body = " ".join(lines)
        body = body.replace("{", "{{").replace("}", "}}")
        helper = self.helper(name, f"{{device}} void {{name}}(void *p, {ctype} a) {{{{ {body} }}}}")
        return f"{helper}({pointer}, {value})"

    def shared_array(self, var: ir.Var, offset: int, count: int) -> str:
        return f"{self.declared(var)} = ({self.c_type(var.type)})(zse_shared + {offset})"

    def local_array(self, var: ir.Var, count: int) -> str:
        return f"alignas(16) {var.type.elem.name} {var.name}[{count}]"

    # one variant

    def signature(self, function: ir.Function) -> str:
        params = ", ".join(
            f"const __grid_constant__ tensormap {param.name}" if param.type == ir.TENSOR_MAP else self.declared(param)
            for param in function.params
        )
        cluster = f" __cluster_dims__({self.cluster}, 1, 1)" if self.cluster > 1 else ""
        return f'extern "C" __global__ void __launch_bounds__({self.threads}, {self.min_blocks}){cluster} {function.symbol}({params})'

    def opening(self) -> list[str]:
        return ["  extern __shared__ __align__(1024) unsigned char zse_shared[];"] if self.shared_bytes else []
