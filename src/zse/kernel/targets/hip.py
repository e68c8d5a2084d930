"""The HIP target: HIP C++ without any header or device library, for clang (kernel/amd.py).

Waves of 64 lanes (gfx9) hold two warps of the language, waves of 32 (gfx10, gfx11) one; see targets/simt.py. Lanes are
exchanged with ds_bpermute, which takes lanes of the whole wave: the half's own are chosen by bit 5 of the thread's
index. Not to be used where the two halves of a wave take different branches: a barrier in each branch, or one half that
waits for the other's progress."""

import zse.kernel.ir as ir
from zse.kernel.targets.simt import ATOMICS, SimtTarget

PRELUDE = """typedef signed char i8; typedef unsigned char u8; typedef short i16; typedef unsigned short u16;
typedef int i32; typedef unsigned int u32; typedef long long i64; typedef unsigned long long u64;
typedef unsigned short f16; typedef unsigned short bf16; typedef unsigned char e4m3; typedef float f32; typedef double f64;
typedef bool bool_;
typedef u32 uint2 __attribute__((ext_vector_type(2))); typedef u32 uint4 __attribute__((ext_vector_type(4)));
"""

_BUILTINS = {
    "sqrt": "__builtin_sqrt",
    "floor": "__builtin_floor",
    "round_even": "__builtin_rint",
    "fma": "__builtin_fma",
    "absolute": "__builtin_fabs",
    "minimum": "__builtin_fmin",
    "maximum": "__builtin_fmax",
}
NOT_EQUAL = 33  # LLVM's number of the comparison
_ORDER = "__ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT"


class HipTarget(SimtTarget):
    """One variant as HIP C++ for an architecture such as "gfx90a"."""

    families = ("hip", "simt", "gpu")
    device = "static __attribute__((device)) inline __attribute__((always_inline))"
    prelude = PRELUDE
    float_bits, float_of_bits = "__builtin_bit_cast(u32, (f32){})", "__builtin_bit_cast(f32, (u32){})"
    double_bits, double_of_bits = "__builtin_bit_cast(u64, {})", "__builtin_bit_cast(f64, (u64){})"
    f32_of_f16, f16_of_f32 = "(f32)__builtin_bit_cast(_Float16, (u16){})", "__builtin_bit_cast(u16, (_Float16){})"
    math = {name: f"{function}f" for name, function in _BUILTINS.items()} | {
        "exp2": "__builtin_exp2f",
        "rsqrt": "__builtin_amdgcn_rsqf",
        "reciprocal": "__builtin_amdgcn_rcpf",
    }
    math64 = _BUILTINS | {"reciprocal": "(1.0 / {})"}
    lane = "((i32)__builtin_amdgcn_workitem_id_x() & 31)"

    @property
    def wave(self) -> int:
        """Lanes of a wave: one or two warps."""
        return 64 if self.arch == 9 else 32

    def exchanged(self, word: str, source: str) -> str:
        half = "((i32)__builtin_amdgcn_workitem_id_x() & 32)" if self.wave == 64 else "0"
        return f"(u32)__builtin_amdgcn_ds_bpermute(({half} + {source}) * 4, (i32){word})"

    def atomic(self, name: str, type: ir.Scalar, space: str, args: list[str]) -> str:
        ctype = self.c_type(type)
        if name == "atomic_cas":
            params = f"{ctype} *p, {ctype} expected, {ctype} value"
            exchange = f"__hip_atomic_compare_exchange_strong(p, &expected, value, __ATOMIC_RELAXED, {_ORDER})"
            return self.call(f"cas_{type}", ctype, params, f"{exchange}; return expected;", args)
        return f"__hip_atomic_fetch_{ATOMICS[name]}({args[0]}, ({ctype}){args[1]}, {_ORDER})"

    def ballot(self, condition: str) -> str:
        """A bit for each lane of the warp, u32."""
        half = " >> (__builtin_amdgcn_workitem_id_x() & 32)" if self.wave == 64 else ""
        body = f"return (u32)(__builtin_amdgcn_uicmp((u32)a, 0u, {NOT_EQUAL}){half});"
        return self.call("ballot", "u32", "bool a", body, [condition])

    # one variant

    def signature(self, function: ir.Function) -> str:
        params = ", ".join(self.declared(param) for param in function.params)
        return (
            f'extern "C" __attribute__((global, amdgpu_flat_work_group_size({self.threads}, {self.threads}))) '
            f"void {function.symbol}({params})"
        )

    def opening(self) -> list[str]:
        lines = ["  const i32 zse_thread = (i32)__builtin_amdgcn_workitem_id_x(); (void)zse_thread;"]
        if self.shared_bytes:
            lines.append("  extern __attribute__((shared)) __attribute__((aligned(16))) unsigned char zse_shared[];")
        return lines
