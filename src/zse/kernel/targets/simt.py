"""What the targets HIP and Metal have in common: GPUs of which the language uses threads, warps, shared memory and
atomics only.

A warp of the language has 32 lanes on all of them. On a GPU whose waves have 64 lanes, two warps share a wave: lane l
of warp w is lane 32 (w % 2) + l of it, exchanges and votes stay within a half, so that kernels written for 32 lanes
give the same bits. f16, bf16 and e4m3 are integers, converted by arithmetic; vectors go to memory as words of up to 16
bytes. exp, log, sin, cos and tanh are those of mathlib.py."""

import zse.kernel.ir as ir
from zse.kernel import mathlib
from zse.kernel.targets.gpu import GpuTarget

# Which lane a lane hears from, n lanes away.
SOURCES = {
    "shuffle": "({n} & 31)",
    "shuffle_xor": "(({lane} ^ {n}) & 31)",
    "shuffle_up": "({lane} >= {n} ? {lane} - {n} : {lane})",
    "shuffle_down": "({lane} + {n} < 32 ? {lane} + {n} : {lane})",
}
ATOMICS = {"atomic_add": "add", "atomic_max": "max", "atomic_min": "min"}


class SimtTarget(GpuTarget):
    """One variant for an architecture such as "gfx90a" or "metal3.1"."""

    inline_builtins = mathlib.FUNCTIONS
    access = "{kind}_{space}_{type}"
    lane = ""  # the lane of the warp, as helpers of exchanges know it
    lane_param = lane_argument = ""  # what those take beside their operands
    f32_of_f16 = f16_of_f32 = ""

    def exchanged(self, word: str, source: str) -> str:
        """A u32 of another lane."""
        raise NotImplementedError

    def atomic(self, name: str, type: ir.Scalar, space: str, args: list[str]) -> str:
        raise NotImplementedError

    # bodies of intrinsics

    def exchange(self, kind: str, type: ir.Scalar, args: list[str]) -> str:
        """A scalar of another lane, moved as words."""
        words, source = self.words("a", type), SOURCES[kind].format(lane=self.lane, n="n")
        moved = [self.exchanged(word, source) for word in words]
        if type.bits == 16:
            moved = [f"(u32)(u16)({moved[0]})"]
        ctype = self.c_type(type)
        body = f"{ctype} r; {self.unworded(type, moved)} return r;"
        return f"{self.helper(f'{kind}_{type}', ctype, f'{ctype} a, i32 n{self.lane_param}', body)}({args[0]}, {args[1]}{self.lane_argument})"

    def accumulate(self, type: ir.Type, space: str, args: list[str]) -> str:
        """atomic_add() without its result, lane by lane."""
        if not isinstance(type, ir.Vector):
            return f"(void){self.atomic('atomic_add', type, space, args)};"
        lanes = " ".join(
            f"(void){self.atomic('atomic_add', type.elem, space, [f'(p + {i})', self.lane_text('a', type, i)])};"
            for i in range(type.lanes)
        )
        return f"{{ const {self.c_type(type)} a = {args[1]}; {self.spaces[space]}f32 *const p = {args[0]}; {lanes} }}"

    # small floats

    def widen_one(self, name: str, text: str) -> str:
        if name == "bf16":
            return self.float_of_bits.format(f"((u32)(u16){text} << 16)")
        if name == "f16":
            return self.f32_of_f16.format(text)
        # The bits of e4m3 are those of an f16 that is 2**8 times smaller; 0x7f is NaN.
        small = self.f32_of_f16.format("(u16)((a & 0x80) << 8 | (a & 0x7f) << 7)")
        body = f"return (a & 0x7f) == 0x7f ? {self.float_of_bits.format('0x7fc00000u')} : {small} * 256.0f;"
        return self.call("f32_of_e4m3", "f32", "e4m3 a", body, [text])

    def narrow_one(self, name: str, text: str) -> str:
        if name == "f16":
            return self.f16_of_f32.format(text)
        bits = self.float_bits.format("a")
        if name == "bf16":
            body = (
                f"u32 b = {bits}; if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fff; "
                "return (bf16)((b + 0x7fffu + (b >> 16 & 1u)) >> 16);"
            )
            return self.call("bf16_of_f32", "bf16", "f32 a", body, [text])
        # To the nearest even by integers; below 2**-6 all steps are 2**-9: adding 2**14 (whose last bit is 2**-9)
        # rounds to them.
        body = (
            f"u32 b = {bits}, sign = b >> 24 & 0x80u; b &= 0x7fffffffu; "
            "if (b > 0x7f800000u) return (e4m3)(sign | 0x7fu); if (b > 0x43e00000u) b = 0x43e00000u; "
            f"f32 size = {self.float_of_bits.format('b')}; "
            f"if (size < 0.015625f) return (e4m3)(sign | ({self.float_bits.format('(size + 16384.0f)')} - 0x46800000u)); "
            "b -= 0x3c000000u; return (e4m3)(sign | (b + 0x7ffffu + (b >> 20 & 1u)) >> 20);"
        )
        return self.call("e4m3_of_f32", "e4m3", "f32 a", body, [text])
