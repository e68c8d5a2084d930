"""Which element of a matrix each register of each lane holds: the tables that kernels, the emulator and the probe on
hardware read.

An element is (row, column) of A [M, K], B [K, N] or C [M, N]. Sources: PTX ISA ("Matrix fragments for mma", "for
wgmma", "ldmatrix"), the CDNA3 instruction set ("Dense matrix operations"), and for Apple's 8x8 matrices the layout that
MLX documents."""

from collections.abc import Callable
from dataclasses import dataclass

# (lane, element of the lane's operand, in order: all of register 0 from its lowest bits, then register 1, ...) → (row,
# column)
Layout = Callable[[int, int], tuple[int, int]]


@dataclass(frozen=True)
class Fragment:
    """One operand. per_lane: its elements in a lane; bits: of an element."""

    rows: int
    columns: int
    per_lane: int
    bits: int
    place: Layout

    def element(self, lane: int, index: int) -> tuple[int, int]:
        """(row, column) of element `index` of a lane."""
        return self.place(lane, index)

    def table(self, lanes: int) -> list[list[tuple[int, int]]]:
        """[lane][index] → (row, column)."""
        return [[self.place(lane, index) for index in range(self.per_lane)] for lane in range(lanes)]


@dataclass(frozen=True)
class Mma:
    """D [M, N] = A [M, K] B [K, N] + C over `lanes` lanes. dtype: of A and B; the sums are f32, of "u8s8" (A unsigned,
    B signed) i32."""

    m: int
    n: int
    k: int
    lanes: int
    dtype: str
    a: Fragment
    b: Fragment
    c: Fragment


def _mma_a(lane: int, index: int) -> tuple[int, int]:
    register, half = divmod(index, 2)
    return lane // 4 + 8 * (register % 2), lane % 4 * 2 + half + 8 * (register // 2)


def _mma_b(lane: int, index: int) -> tuple[int, int]:
    register, half = divmod(index, 2)
    return lane % 4 * 2 + half + 8 * register, lane // 4


def _mma_c(lane: int, index: int) -> tuple[int, int]:
    return lane // 4 + 8 * (index // 2), lane % 4 * 2 + index % 2


def _mma8_a(lane: int, index: int) -> tuple[int, int]:
    register, byte = divmod(index, 4)
    return lane // 4 + 8 * (register % 2), lane % 4 * 4 + byte + 16 * (register // 2)


def _mma8_b(lane: int, index: int) -> tuple[int, int]:
    register, byte = divmod(index, 4)
    return lane % 4 * 4 + byte + 16 * register, lane // 4


def _mfma_a(lane: int, index: int) -> tuple[int, int]:
    return lane % 16, lane // 16 * 4 + index


def _mfma_b(lane: int, index: int) -> tuple[int, int]:
    return lane // 16 * 4 + index, lane % 16


def _mfma_c(lane: int, index: int) -> tuple[int, int]:
    return lane // 16 * 4 + index, lane % 16


def _simdgroup(lane: int, index: int) -> tuple[int, int]:
    quad = lane // 4
    return (quad & 4) + lane // 2 % 4, (quad & 2) * 2 + lane % 2 * 2 + index


_C = Fragment(16, 8, 4, 32, _mma_c)
_SIMDGROUP = Fragment(8, 8, 2, 32, _simdgroup)

MMA: dict[str, Mma] = {
    "mma_bf16": Mma(16, 8, 16, 32, "bf16", Fragment(16, 16, 8, 16, _mma_a), Fragment(16, 8, 4, 16, _mma_b), _C),
    "mma_f16": Mma(16, 8, 16, 32, "f16", Fragment(16, 16, 8, 16, _mma_a), Fragment(16, 8, 4, 16, _mma_b), _C),
    "mma_e4m3": Mma(16, 8, 32, 32, "e4m3", Fragment(16, 32, 16, 8, _mma8_a), Fragment(32, 8, 8, 8, _mma8_b), _C),
    "mma_u8s8": Mma(16, 8, 32, 32, "u8s8", Fragment(16, 32, 16, 8, _mma8_a), Fragment(32, 8, 8, 8, _mma8_b), _C),
    "mfma_f32_16x16x16_bf16": Mma(
        16,
        16,
        16,
        64,
        "bf16",
        Fragment(16, 16, 4, 16, _mfma_a),
        Fragment(16, 16, 4, 16, _mfma_b),
        Fragment(16, 16, 4, 32, _mfma_c),
    ),
    "simdgroup_mma": Mma(8, 8, 8, 32, "f32", _SIMDGROUP, _SIMDGROUP, _SIMDGROUP),
}


def ldmatrix(lane: int, register: int, half: int, transposed: bool = False) -> tuple[int, int, int]:
    """(matrix, row, column) of a 16-bit half of a register; row r of matrix m starts where lane 8 m + r points."""
    row, column = lane // 4, lane % 4 * 2 + half
    return (register, column, row) if transposed else (register, row, column)


def swizzled(offset: int, swizzle: int) -> int:
    """Where the byte at `offset` of a tile whose rows are `swizzle` bytes lies in shared memory (16-byte chunks are
    permuted by the row within 8 rows of 128 bytes; the tile starts at a multiple of 8 swizzle bytes). TMA writes it so
    and wgmma reads it so."""
    if not swizzle:
        return offset
    mask = {128: 7, 64: 3, 32: 1}[swizzle]
    return offset ^ ((offset >> 7 & mask) << 4)
