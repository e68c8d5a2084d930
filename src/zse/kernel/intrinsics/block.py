"""Where a block stands in its grid, and hints to the memory system."""

from zse.kernel import ir
from zse.kernel.intrinsics.row import Intrinsic


def _dimension(d: object) -> ir.Type | str:
    return ir.I64 if d in (0, 1, 2) else "the grid dimension is 0, 1 or 2"


def _pointer(pointer: object) -> ir.Type | str:
    return ir.VOID if isinstance(pointer, ir.Pointer) else "needs a pointer"


TABLE = (
    Intrinsic(
        "block_index",
        _dimension,
        "index of this work item",
        {
            "cpu": lambda t, r, types, a: f"block_{a[0][:1]}",
            "cuda": lambda t, r, types, a: f"(i32)blockIdx.{'xyz'[int(a[0][:1])]}",
        },
    ),
    Intrinsic(
        "num_blocks",
        _dimension,
        "size of the grid",
        {
            "cpu": lambda t, r, types, a: f"grid[{a[0][:1]}]",
            "cuda": lambda t, r, types, a: f"(i32)gridDim.{'xyz'[int(a[0][:1])]}",
        },
    ),
    Intrinsic(
        "prefetch",
        _pointer,
        "bring a cache line nearer",
        {
            "cpu": lambda t, r, types, a: f"__builtin_prefetch({a[0]})",
            "cuda": lambda t, r, types, a: f'asm volatile("prefetch.global.L1 [%0];" :: "l"({a[0]}))',
        },
    ),
    Intrinsic(
        "prefetch_l2",
        _pointer,
        "bring a cache line into the device's L2",
        {"cuda": lambda t, r, types, a: f'asm volatile("prefetch.global.L2 [%0];" :: "l"({a[0]}))'},
    ),
)
