"""The Metal target: Metal Shading Language 3.1 for newLibraryWithSource, warps are simdgroups of 32 (Apple silicon).

Metal has no f64: here it is a pair of f32 whose sum is the number, 48 bits (Dekker 1971, Knuth's two-sum). The library
is to be compiled without fast math: what the kernel says is what is computed."""

import struct

import zse.kernel.ir as ir
from zse.errors import CompileError
from zse.kernel.targets.simt import ATOMICS, SimtTarget

PRELUDE = """#include <metal_stdlib>
using namespace metal;
#pragma METAL fp contract(off)
typedef char i8; typedef uchar u8; typedef short i16; typedef ushort u16; typedef int i32; typedef uint u32; typedef long i64; typedef ulong u64;
typedef ushort f16; typedef ushort bf16; typedef uchar e4m3; typedef float f32; typedef bool bool_;
"""

F64 = """struct f64 { f32 hi, lo; };
static inline f64 zse_f64(f32 hi, f32 lo) { f64 r; r.hi = hi; r.lo = lo; return r; }
static inline f64 zse_f64_sum(f32 a, f32 b) { f32 s = a + b; f32 e = b - (s - a); return zse_f64(s, fabs(s) <= 3.4028235e38f ? e : 0.0f); }
static inline f64 zse_f64_of(i32 a) { f32 hi = (f32)a; return zse_f64(hi, (f32)((i64)a - (i64)hi)); }
static inline f64 zse_f64_of(u32 a) { f32 hi = (f32)a; return zse_f64(hi, (f32)((i64)a - (i64)hi)); }
static inline f64 zse_f64_of(u64 a) { f64 h = zse_f64_sum((f32)(a >> 32) * 4294967296.0f, (f32)(a >> 8 & 0xffffff) * 256.0f);
  return zse_f64_sum(h.hi, h.lo + (f32)(a & 0xff)); }
static inline f64 zse_f64_of(i64 a) { f64 r = zse_f64_of((u64)(a < 0 ? -a : a)); return a < 0 ? zse_f64(-r.hi, -r.lo) : r; }
static inline f64 zse_f64_of(f32 a) { return zse_f64(a, 0.0f); }
static inline u64 zse_f64_bits(f64 a) { return (u64)as_type<u32>(a.lo) << 32 | (u64)as_type<u32>(a.hi); }
static inline f64 zse_f64_of_bits(u64 a) { return zse_f64(as_type<f32>((u32)a), as_type<f32>((u32)(a >> 32))); }
static inline i64 zse_f64_floor(f64 a) { f32 whole = floor(a.hi); return (i64)whole + (i64)floor((a.hi - whole) + a.lo); }
static inline i64 zse_f64_truncated(f64 a) { return a.hi < 0.0f ? -zse_f64_floor(zse_f64(-a.hi, -a.lo)) : zse_f64_floor(a); }
static inline f64 operator-(f64 a) { return zse_f64(-a.hi, -a.lo); }
static inline f64 operator+(f64 a, f64 b) { f32 s = a.hi + b.hi; f32 v = s - a.hi; f32 e = (a.hi - (s - v)) + (b.hi - v);
  if (!(fabs(s) <= 3.4028235e38f)) return zse_f64(s, 0.0f); return zse_f64_sum(s, e + (a.lo + b.lo)); }
static inline f64 operator-(f64 a, f64 b) { return a + -b; }
static inline f64 operator*(f64 a, f64 b) { f32 p = a.hi * b.hi; if (!(fabs(p) <= 3.4028235e38f)) return zse_f64(p, 0.0f);
  f32 e = fma(a.hi, b.hi, -p); return zse_f64_sum(p, fma(a.hi, b.lo, fma(a.lo, b.hi, e))); }
static inline f64 operator/(f64 a, f64 b) { f32 q = a.hi / b.hi; if (!(fabs(q) <= 3.4028235e38f)) return zse_f64(q, 0.0f);
  f64 r = a - b * zse_f64(q, 0.0f); return zse_f64_sum(q, r.hi / b.hi); }
static inline bool operator<(f64 a, f64 b) { return a.hi < b.hi || (a.hi == b.hi && a.lo < b.lo); }
static inline bool operator>(f64 a, f64 b) { return b < a; }
static inline bool operator==(f64 a, f64 b) { return a.hi == b.hi && a.lo == b.lo; }
static inline bool operator!=(f64 a, f64 b) { return !(a == b); }
static inline bool operator<=(f64 a, f64 b) { return a < b || a == b; }
static inline bool operator>=(f64 a, f64 b) { return b <= a; }"""

_ATOMIC_TYPES = {"i32": "atomic_int", "u32": "atomic_uint", "f32": "atomic_float"}
_RELAXED = "memory_order_relaxed"


class MetalTarget(SimtTarget):
    """One variant as Metal Shading Language."""

    families = ("metal", "simt", "gpu")
    prelude = PRELUDE
    spaces = {"global": "device ", "shared": "threadgroup ", "local": "thread "}
    lane, lane_param, lane_argument = "lane", ", i32 lane", ", (zse_thread & 31)"
    float_bits, float_of_bits = "as_type<u32>((f32){})", "as_type<f32>((u32){})"
    double_bits, double_of_bits = "zse_f64_bits({})", "zse_f64_of_bits({})"
    f32_of_f16, f16_of_f32 = "(f32)as_type<half>((u16){})", "as_type<u16>((half){})"
    math = {
        "sqrt": "precise::sqrt",
        "floor": "floor",
        "round_even": "rint",
        "fma": "fma",
        "absolute": "fabs",
        "minimum": "fmin",
        "maximum": "fmax",
        "exp2": "precise::exp2",
        "rsqrt": "precise::rsqrt",
        "reciprocal": "(1.0f / {})",
    }

    def c_type(self, type: ir.Type) -> str:
        of = type.elem if isinstance(type, ir.Vector | ir.Pointer) else type
        if isinstance(of, ir.Scalar) and of.name == "f64":
            self.types.setdefault("f64", F64)
        return super().c_type(type)

    def constant(self, type: ir.Type, value) -> str:
        if type.kind == "float" and type.bits == 64:
            self.c_type(type)
            value = float(value)
            if value != value or value in (float("inf"), float("-inf")):
                return f"zse_f64({super().constant(ir.F32, value)}, 0.0f)"
            high = struct.unpack("<f", struct.pack("<f", value))[0]
            return f"zse_f64({super().constant(ir.F32, high)}, {super().constant(ir.F32, value - high)})"
        if type.kind in ("int", "uint") and type.bits == 64:
            return super().constant(type, value).replace("ull", "ul").replace("ll", "l")
        return super().constant(type, value)

    def numeric(self, to: ir.Scalar, of: ir.Scalar, text: str) -> str:
        if to.name == of.name:
            return text
        if to.name == "f64":
            self.c_type(to)
            wide = of.name if of.bits >= 32 else "i32"
            return f"zse_f64_of(({wide}){text})"
        if of.name == "f64":
            if to.name == "f32":
                return f"({text}).hi"
            return f"({to.name})zse_f64_truncated({text})"
        return super().numeric(to, of, text)

    def exchanged(self, word: str, source: str) -> str:
        return f"simd_shuffle((u32){word}, (u16){source})"

    def atomic(self, name: str, type: ir.Scalar, space: str, args: list[str]) -> str:
        atomic = _ATOMIC_TYPES.get(type.name)
        if atomic is None or type.name == "f32" and (name != "atomic_add" or space != "global"):
            raise CompileError(f"intrinsic {name} of {type} in {space} memory has no body for target {self.name}")
        words = self.spaces[space]
        if name == "atomic_cas":
            exchange = (
                f"atomic_compare_exchange_weak_explicit(({words}{atomic} *)p, &found, value, {_RELAXED}, {_RELAXED})"
            )
            params = f"{words}{type} *p, {type} expected, {type} value"
            body = f"{type} found = expected; while (!{exchange} && found == expected) {{}} return found;"
            return self.call(f"cas_{space}_{type}", str(type), params, body, args)
        return f"atomic_fetch_{ATOMICS[name]}_explicit(({words}{atomic} *){args[0]}, ({type}){args[1]}, {_RELAXED})"

    def load_scalar(self, type: ir.Scalar, space: str, pointer: str) -> str:
        if type.name != "f64":
            return super().load_scalar(type, space, pointer)
        ctype, words = self.c_type(type), self.spaces[space]
        body = f"return zse_f64(((const {words}f32 *)p)[0], ((const {words}f32 *)p)[1]);"
        return self.call(f"load_{space}_f64", ctype, f"const {words}void *p", body, [pointer])

    def store_scalar(self, type: ir.Scalar, space: str, pointer: str, value: str) -> str:
        if type.name != "f64":
            return super().store_scalar(type, space, pointer, value)
        words = self.spaces[space]
        body = f"(({words}f32 *)p)[0] = a.hi; (({words}f32 *)p)[1] = a.lo;"
        return self.call(f"store_{space}_f64", "void", f"{words}void *p, f64 a", body, [pointer, value])

    # one variant

    def signature(self, function: ir.Function) -> str:
        self._numbers = [param for param in function.params if not isinstance(param.type, ir.Pointer)]
        params = []
        for place, param in enumerate(function.params):
            if param.type == ir.TENSOR_MAP:
                raise CompileError(f"{function.symbol}: tensor maps have no form for target {self.name}")
            text = (
                self.declared(param)
                if isinstance(param.type, ir.Pointer)
                else f"constant {self.c_type(param.type)} &zse_arg_{param.name}"
            )
            params.append(f"{text} [[buffer({place})]]")
        if self.shared_bytes:
            params.append("threadgroup uchar *zse_shared [[threadgroup(0)]]")
        params += [
            "uint3 zse_place [[thread_position_in_threadgroup]]",
            "uint3 zse_block [[threadgroup_position_in_grid]]",
            "uint3 zse_grid [[threadgroups_per_grid]]",
        ]
        return (
            f"[[kernel, max_total_threads_per_threadgroup({self.threads})]] void {function.symbol}({', '.join(params)})"
        )

    def opening(self) -> list[str]:
        return [
            "  const i32 zse_thread = (i32)zse_place.x; (void)zse_thread; (void)zse_block; (void)zse_grid;",
            *(f"  {self.declared(param)} = zse_arg_{param.name};" for param in self._numbers),
        ]
