"""Where a block stands in its grid, and hints to the memory system."""

import zse.kernel.ir as ir
from zse.kernel.intrinsics.row import Intrinsic


def _dimension(d: object) -> ir.Type | str:
    return ir.I64 if d in (0, 1, 2) else "the grid dimension is 0, 1 or 2"


def _pointer(pointer: object) -> ir.Type | str:
    return ir.VOID if isinstance(pointer, ir.Pointer) else "needs a pointer"


def _position(text: str):
    """{number}, {axis}: the dimension as 0, 1, 2 or x, y, z; {threads}: of a block in this dimension."""

    def body(t, result, types, args):
        number = int(args[0][:1])
        return text.format(number=number, axis="xyz"[number], threads=1 if number else t.threads)

    return body


TABLE = (
    Intrinsic(
        "block_index",
        _dimension,
        {
            "cpu": _position("block_{number}"),
            "cuda": _position("(i32)blockIdx.{axis}"),
            "hip": _position("(i32)__builtin_amdgcn_workgroup_id_{axis}()"),
            "metal": _position("(i32)zse_block.{axis}"),
        },
    ),
    Intrinsic(
        "num_blocks",
        _dimension,
        {
            "cpu": _position("grid[{number}]"),
            "cuda": _position("(i32)gridDim.{axis}"),
            "hip": _position("(i32)(__builtin_amdgcn_grid_size_{axis}() / {threads}u)"),
            "metal": _position("(i32)zse_grid.{axis}"),
        },
    ),
    Intrinsic(
        "prefetch",
        _pointer,
        {
            "cpu": "__builtin_prefetch({0})",
            "cuda": 'asm volatile("prefetch.global.L1 [%0];" :: "l"({0}))',
            "simt": "(void)0",
        },
    ),
    Intrinsic(
        "prefetch_l2",
        _pointer,
        {
            "cpu": "__builtin_prefetch({0}, 0, 2)",
            "cuda": 'asm volatile("prefetch.global.L2 [%0];" :: "l"({0}))',
            "simt": "(void)0",
        },
    ),
    Intrinsic(
        "prefetch_here",
        _pointer,
        {
            "cpu": '({{ __builtin_prefetch({0}, 0, 2); __asm__ volatile(""); }})',
            "cuda": 'asm volatile("prefetch.global.L2 [%0];" :: "l"({0}))',
            "simt": "(void)0",
        },
    ),
)
