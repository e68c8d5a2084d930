"""The HIP target: HIP C++ without any header or device library, for clang (kernel/amd.py).

Waves of 64 lanes (gfx9) hold two warps of the language, waves of 32 (gfx10, gfx11) one; see targets/simt.py. Lanes are exchanged with
ds_bpermute, which takes lanes of the whole wave: the half's own are chosen by bit 5 of the thread's index. Not to be used where the two
halves of a wave take different branches: a barrier in each branch, or one half that waits for the other's progress.
"""

from zse.errors import CompileError
from zse.kernel import ir
from zse.kernel.targets.simt import EFFECTS, VALUES, SimtTarget

PRELUDE = """typedef signed char i8; typedef unsigned char u8; typedef short i16; typedef unsigned short u16;
typedef int i32; typedef unsigned int u32; typedef long long i64; typedef unsigned long long u64;
typedef unsigned short f16; typedef unsigned short bf16; typedef unsigned char e4m3; typedef float f32; typedef double f64;
typedef bool bool_;
typedef u32 uint2 __attribute__((ext_vector_type(2))); typedef u32 uint4 __attribute__((ext_vector_type(4)));
"""

_MATH = {
    "sqrt": "__builtin_sqrtf",
    "floor": "__builtin_floorf",
    "round_even": "__builtin_rintf",
    "fma": "__builtin_fmaf",
    "absolute": "__builtin_fabsf",
    "minimum": "__builtin_fminf",
    "maximum": "__builtin_fmaxf",
    "exp2": "__builtin_exp2f",
    "rsqrt": "__builtin_amdgcn_rsqf",
    "reciprocal": "__builtin_amdgcn_rcpf",
}
NOT_EQUAL = 33  # LLVM's number of the comparison
_ORDER = "__ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT"
_ATOMICS = {"atomic_add": "add", "atomic_max": "max", "atomic_min": "min"}


def _fence(scope: str, order: str = "__ATOMIC_SEQ_CST") -> str:
    return f'__builtin_amdgcn_fence({order}, "{scope}");'


def _lines(*lines: str):
    return lambda t, stmt, outs, args: list(lines)


def _vote(text: str):
    def body(t, stmt, outs, args):
        half = " >> (__builtin_amdgcn_workitem_id_x() & 32)" if t.wave == 64 else ""
        ballot = t.helper(
            "ballot",
            f"{{device}} u32 {{name}}(bool a) {{{{ return (u32)(__builtin_amdgcn_uicmp((u32)a, 0u, {NOT_EQUAL}){half}); }}}}",
        )
        return text.format(f"{ballot}({args[0]})", f"{ballot}(true)")

    return body


def _acquire(t, stmt, outs, args):
    return f"__hip_atomic_load({args[0]}, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT)"


def _release(t, stmt, outs, args):
    return [f"__hip_atomic_store({args[0]}, {args[1]}, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);"]


def _position(text: str):
    return lambda t, result, types, args: text.format(
        axis="xyz"[int(args[0][:1])], threads=t.threads if args[0][:1] == "0" else 1
    )


class HipTarget(SimtTarget):
    """One variant as HIP C++ for an architecture such as "gfx90a"."""

    family = "hip"
    device = "static __attribute__((device)) inline __attribute__((always_inline))"
    prelude = PRELUDE
    effects = EFFECTS | {
        "barrier": _lines(
            _fence("workgroup", "__ATOMIC_RELEASE"),
            "__builtin_amdgcn_s_barrier();",
            _fence("workgroup", "__ATOMIC_ACQUIRE"),
        ),
        "warp_barrier": _lines(
            _fence("wavefront", "__ATOMIC_RELEASE"),
            "__builtin_amdgcn_wave_barrier();",
            _fence("wavefront", "__ATOMIC_ACQUIRE"),
        ),
        "fence": _lines(_fence("agent")),
        "load_acquire": _acquire,
        "store_release": _release,
        "ballot": _vote("(u64){0}"),
        "any_thread": _vote("({0} != 0)"),
        "all_threads": _vote("({0} == {1})"),
        "clock": lambda t, stmt, outs, args: "(i64)__builtin_readcyclecounter()",
    }
    values = VALUES | {
        "block_index": _position("(i32)__builtin_amdgcn_workgroup_id_{axis}()"),
        "num_blocks": _position("(i32)(__builtin_amdgcn_grid_size_{axis}() / {threads}u)"),
        "popcount": lambda t, result, types, args: f"(({t.c_type(result)})__builtin_popcountll({args[0]}))",
    }

    def __init__(self, arch: str, threads: int = 256, min_blocks: int = 1, cluster: int = 1):
        super().__init__(arch, threads, min_blocks, cluster)
        self.wave = 64 if self.arch == 9 else 32

    def float_bits(self, text: str) -> str:
        return f"__builtin_bit_cast(u32, (f32){text})"

    def float_of_bits(self, text: str) -> str:
        return f"__builtin_bit_cast(f32, (u32){text})"

    def double_bits(self, text: str) -> str:
        return f"__builtin_bit_cast(u64, {text})"

    def double_of_bits(self, text: str) -> str:
        return f"__builtin_bit_cast(f64, (u64){text})"

    def f32_of_f16(self, text: str) -> str:
        return f"(f32)__builtin_bit_cast(_Float16, (u16){text})"

    def f16_of_f32(self, text: str) -> str:
        return f"__builtin_bit_cast(u16, (_Float16){text})"

    def exchanged(self, kind: str, word: str, argument: str) -> str:
        lane = "((i32)__builtin_amdgcn_workitem_id_x() & 31)"
        source = {
            "shuffle": f"({argument} & 31)",
            "shuffle_xor": f"(({lane} ^ {argument}) & 31)",
            "shuffle_up": f"({lane} >= {argument} ? {lane} - {argument} : {lane})",
            "shuffle_down": f"({lane} + {argument} < 32 ? {lane} + {argument} : {lane})",
        }[kind]
        half = "((i32)__builtin_amdgcn_workitem_id_x() & 32)" if self.wave == 64 else "0"
        return f"(u32)__builtin_amdgcn_ds_bpermute(({half} + {source}) * 4, (i32){word})"

    def atomic(self, name: str, type: ir.Scalar, space: str, args: list[str]) -> str:
        ctype = self.c_type(type)
        if name == "atomic_cas":
            helper = self.helper(
                f"cas_{type}",
                f"{{device}} {ctype} {{name}}({ctype} *p, {ctype} expected, {ctype} value) {{{{ "
                f"__hip_atomic_compare_exchange_strong(p, &expected, value, __ATOMIC_RELAXED, {_ORDER}); return expected; }}}}",
            )
            return f"{helper}({', '.join(args)})"
        return f"__hip_atomic_fetch_{_ATOMICS[name]}({args[0]}, ({ctype}){args[1]}, {_ORDER})"

    def scalar_math(self, name: str, elem: ir.Scalar, args: list[str]) -> str:
        if elem.name == "f32" and name in _MATH:
            return f"{_MATH[name]}({', '.join(args)})"
        if elem.name == "f64" and name in ("sqrt", "floor", "round_even", "fma", "absolute", "minimum", "maximum"):
            return f"{_MATH[name].removesuffix('f')}({', '.join(args)})"
        if elem.name == "f64" and name == "reciprocal":
            return f"(1.0 / {args[0]})"
        if elem.kind == "float":
            raise CompileError(f"intrinsic {name} of {elem} has no body for target {self.name}")
        return super().scalar_math(name, elem, args)

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
