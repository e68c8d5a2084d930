"""The CUDA target: C++ without any header, for NVRTC or nvcc. `--fmad=false`: a fused multiply-add happens where fma is
written."""

import zse.kernel.ir as ir
from zse.kernel.intrinsics.arithmetic import LIBRARY
from zse.kernel.intrinsics.row import elem_of
from zse.kernel.targets.gpu import GpuTarget

PRELUDE = """typedef signed char i8; typedef unsigned char u8; typedef short i16; typedef unsigned short u16;
typedef int i32; typedef unsigned int u32; typedef long long i64; typedef unsigned long long u64;
typedef unsigned short f16; typedef unsigned short bf16; typedef unsigned char e4m3; typedef float f32; typedef double f64;
typedef bool bool_;
struct alignas(64) tensormap { u64 opaque[16]; };
"""

# One instruction each, about 2 ulp (PTX ISA). Subnormals count as zero.
_APPROXIMATE = {"exp2": "ex2.approx.ftz.f32", "rsqrt": "rsqrt.approx.ftz.f32", "reciprocal": "rcp.approx.ftz.f32"}

HINTS = {"readonly": "ld.global.nc", "stream": "ld.global.nc.L1::no_allocate.L2::256B"}
# Bits of a value → the type of the register that it is loaded into, and the register's letter.
REGISTERS = {8: ("u16", "h"), 16: ("u16", "h"), 32: ("u32", "r"), 64: ("u64", "l")}


class CudaTarget(GpuTarget):
    """One variant as CUDA C++ for an architecture such as "sm_90a"."""

    families = ("cuda", "gpu")
    device = "static __device__ __forceinline__"
    prelude = PRELUDE
    float_bits, float_of_bits = "__float_as_uint({})", "__uint_as_float({})"
    double_bits, double_of_bits = "__double_as_longlong({})", "__longlong_as_double({})"
    math = {name: f"{function}f" for name, function in LIBRARY.items()} | {"sqrt": "__fsqrt_rn", "fma": "__fmaf_rn"}
    math64 = LIBRARY | {"rsqrt": "(1.0 / sqrt({}))", "reciprocal": "(1.0 / {})"}

    def shared_address(self, text: str) -> str:
        """A pointer to shared memory as the 32-bit address that instructions take."""
        return self.call("shared_address", "u32", "const void *p", "return (u32)__cvta_generic_to_shared(p);", [text])

    def scalar_math(self, name: str, elem: ir.Scalar, args: list[str]) -> str:
        if elem.name == "f32" and name in _APPROXIMATE:
            return self._instruction(name, "f32", "f32 a", _APPROXIMATE[name], "f", '"f"(a)', args)
        return super().scalar_math(name, elem, args)

    # small floats

    def _instruction(self, name: str, result: str, params: str, instruction: str, out: str, operands: str, args) -> str:
        """Call of a helper that is one instruction. out: letter of the result's register."""
        places = ", ".join(f"%{i + 1}" for i in range(len(args)))
        body = f'{result} r; asm("{instruction} %0, {places};" : "={out}"(r) : {operands}); return r;'
        return self.call(name, result, params, body, args)

    def widen(self, name: str, source: ir.Type, text: str) -> str:
        if isinstance(source, ir.Scalar):
            return self.widen_one(name, text)
        lanes = []
        for i in range(source.lanes):
            if not self.packed(source):
                lanes.append(self.widen_one(name, f"a.v[{i}]"))
            elif name == "bf16":
                word = f"a.w[{i // 2}]"
                lanes.append(f"__uint_as_float({word} & 0xffff0000u)" if i % 2 else f"__uint_as_float({word} << 16)")
            elif name == "f16":
                lanes.append(self.widen_one("f16", self.lane_text("a", source, i)))
            else:
                pair = self._e4m3_pair(f"(u16)(a.w[{i // 4}] >> {i // 2 % 2 * 16})")
                lanes.append(self.widen_one("f16", f"(u16)({pair} >> {i % 2 * 16})"))
        wide = ir.Vector(ir.F32, source.lanes)
        return self.from_lanes(f"f32_of_{source}", wide, [source], lanes, [text])

    def convert(self, type: ir.Type, source: ir.Type, text: str) -> str:
        pair = isinstance(source, ir.Vector) and source.elem.name == "e4m3" and self.packed(source)
        if not pair or elem_of(type).name != "f16":
            return super().convert(type, source, text)
        ctype = self.c_type(type)
        words = [self._e4m3_pair(f"(u16)(a.w[{i // 2}] >> {i % 2 * 16})") for i in range(type.lanes // 2)]
        body = " ".join([f"{ctype} r;", *(f"r.w[{i}] = {word};" for i, word in enumerate(words)), "return r;"])
        return self.call(f"f16_of_{source}", ctype, f"{self.c_type(source)} a", body, [text])

    def widen_one(self, name: str, text: str) -> str:
        if name == "bf16":
            return f"__uint_as_float((u32){text} << 16)"
        if name == "f16":
            return self._instruction("f32_of_f16", "f32", "f16 a", "cvt.f32.f16", "f", '"h"(a)', [text])
        low = self.widen_one("f16", f"(u16){self._e4m3_pair('(u16)a')}")
        return self.call("f32_of_e4m3", "f32", "e4m3 a", f"return {low};", [text])

    def _e4m3_pair(self, text: str) -> str:
        """Two e4m3 (u16) as two f16 (u32)."""
        name = "f16x2_of_e4m3x2"
        if self.has("fp8"):
            return self._instruction(name, "u32", "u16 a", "cvt.rn.f16x2.e4m3x2", "r", '"h"(a)', [text])
        # The bits of e4m3 are those of an f16 that is 2**8 times smaller; 0x7f (NaN) becomes NaN by its own test.
        body = (
            "u32 b = (u32)a | (u32)a << 8; b = (b & 0x00800080u) << 8 | (b & 0x007f007fu) << 7; "
            'asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(b) : "r"(0x5c005c00u), "r"(0x80008000u)); '
            "if ((a & 0x7f) == 0x7f) b |= 0x7fffu; if ((a & 0x7f00) == 0x7f00) b |= 0x7fff0000u; return b;"
        )
        return self.call(name, "u32", "u16 a", body, [text])

    def narrow(self, name: str, type: ir.Type, text: str) -> str:
        if isinstance(type, ir.Scalar):
            if name == "e4m3":
                return f"((e4m3){self._e4m3_of('0.0f', text)})"
            return self._instruction(f"{name}_of_f32", name, "f32 a", f"cvt.rn.{name}.f32", "h", '"f"(a)', [text])
        source = ir.Vector(ir.F32, type.lanes)
        if not self.packed(type):
            return self.lanewise(f"{name}_of", type, [source], lambda v: self.narrow(name, type.elem, v[0]), [text])
        if name == "e4m3":
            halves = [f"(u32){self._e4m3_of(f'a.v[{i + 1}]', f'a.v[{i}]')}" for i in range(0, type.lanes, 2)]
            words = [f"{low} | {high} << 16" for low, high in zip(halves[::2], halves[1::2], strict=True)]
        else:
            words = [
                self._pair_of(f"{name}_pair_of_f32", "u32", f"cvt.rn.{name}x2.f32", "r", f"a.v[{i + 1}]", f"a.v[{i}]")
                for i in range(0, type.lanes, 2)
            ]
        ctype = self.c_type(type)
        body = " ".join([f"{ctype} r;", *(f"r.w[{i}] = {word};" for i, word in enumerate(words)), "return r;"])
        return self.call(f"narrow_{type}", ctype, f"{self.c_type(source)} a", body, [text])

    def _pair_of(self, name: str, result: str, instruction: str, out: str, high: str, low: str) -> str:
        """Two f32 converted by one instruction."""
        operands = '"f"(high), "f"(low)'
        return self._instruction(name, result, "f32 high, f32 low", instruction, out, operands, [high, low])

    def _e4m3_of(self, high: str, low: str) -> str:
        """Two f32 as two e4m3 (u16)."""
        if self.has("fp8"):
            return self._pair_of("e4m3x2_of_f32", "u16", "cvt.rn.satfinite.e4m3x2.f32", "h", high, low)
        # Adding 2**(exponent + 20) rounds to that exponent's 4 significant bits (nearest even); below 2**-6 all share
        # one step.
        one = self.helper(
            "e4m3_of_f32",
            "u32",
            "f32 a",
            "u32 bits = __float_as_uint(a), sign = bits >> 24 & 0x80u; "
            "if ((bits & 0x7fffffffu) > 0x7f800000u) return sign | 0x7fu; "
            "f32 size = fminf(fabsf(a), 448.0f); u32 step = max(__float_as_uint(size) & 0x7f800000u, 0x3c800000u); "
            "f32 big = __uint_as_float(step + 0x0a000000u); size = (size + big) - big; bits = __float_as_uint(size); "
            "if (size >= 0.015625f) return sign | ((bits - 0x3c000000u) >> 20); "
            "return sign | (u32)(size * 512.0f);",
        )
        return f"(u16)({one}({high}) << 8 | {one}({low}))"

    # memory: with a hint an access is written as its instruction

    def expr_Load(self, expr: ir.Load) -> str:
        type, hint = expr.type, expr.hint
        if not hint or isinstance(type, ir.Vector) and self.size(type) < 4:
            return super().expr_Load(expr)
        pointer = self.expr(expr.pointer)
        if isinstance(type, ir.Scalar):
            return self._hinted_scalar(type, hint, pointer)
        ctype, count = self.c_type(type), min(self.size(type) // 4, 4)
        lines, words = [], []
        for chunk in range(-(-self.size(type) // 16)):
            names = [f"t{chunk}{c}" for c in "xyzw"[:count]]
            words += names
            shape, places = self._places(count, 0)
            results = ", ".join(f'"=r"({name})' for name in names)
            lines.append(
                f'u32 {", ".join(names)}; asm volatile("{HINTS[hint]}{shape}.u32 {places}, [%{count}];" : {results} '
                f': "l"((const char *)p + {16 * chunk}));'
            )
        body = f"{ctype} r; {' '.join(lines)} {self.unworded(type, words)} return r;"
        return self.call(f"load_{type}_{hint}", ctype, "const void *p", body, [pointer])

    def _places(self, count: int, first: int) -> tuple[str, str]:
        """What an access of `count` words has behind its name, and its operands %first and on."""
        places = [f"%{first + i}" for i in range(count)]
        return (f".v{count}", f"{{{', '.join(places)}}}") if count > 1 else ("", places[0])

    def _hinted_scalar(self, type: ir.Scalar, hint: str, pointer: str) -> str:
        unsigned, (holder, letter) = ir.Scalar(f"u{type.bits}", "uint", type.bits), REGISTERS[type.bits]
        instruction = HINTS[hint].replace(".L2::256B", "") if type.bits < 32 else HINTS[hint]
        body = (
            f'{holder} r; asm volatile("{instruction}.{unsigned} %0, [%1];" : "={letter}"(r) : "l"(p)); '
            f"return ({unsigned})r;"
        )
        text = self.call(f"load_{hint}_{unsigned}", str(unsigned), "const void *p", body, [pointer])
        return self.bitcast(type, unsigned, text)

    def store(self, stmt: ir.Store) -> str:
        type = stmt.value.type
        if not stmt.hint or isinstance(type, ir.Scalar) or self.size(type) < 4:
            return super().store(stmt)
        pointer, value = self.expr(stmt.pointer), self.expr(stmt.value)
        ctype, words, count = self.c_type(type), self.words("a", type), min(self.size(type) // 4, 4)
        lines = []
        for chunk in range(-(-self.size(type) // 16)):
            shape, places = self._places(count, 1)
            operands = ", ".join(f'"r"({word})' for word in words[chunk * 4 : chunk * 4 + count])
            lines.append(
                f'asm volatile("st.global.L1::no_allocate{shape}.u32 [%0], {places};" :: '
                f'"l"((char *)p + {16 * chunk}), {operands} : "memory");'
            )
        return self.call(f"store_{type}_{stmt.hint}", "void", f"void *p, {ctype} a", " ".join(lines), [pointer, value])

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
