"""out[m, n] = sum_k rmsnorm(x)[m, k] * w[n, k] for up to 4 tokens: matmul_small and matmul_few with add_rmsnorm's bits
as their prologue. A decode layer then has two launches fewer.

Everything else, the order of all sums too, is theirs: a result is bit for bit that of add_rmsnorm and the product.
"""

from zse.kernel import Ptr, f32, i32, kernel, static, u8
from zse.kernels.gpu import matmul_few as few
from zse.kernels.gpu import matmul_small as small


@kernel
def matmul_small_norm(
    w: Ptr[u8, "const"],
    high: Ptr[u8, "const"],
    scale: Ptr[u8, "const"],
    offset: Ptr[u8, "const"],
    x: Ptr[f32, "const"],
    norm: Ptr[f32, "const"],
    bias: Ptr[f32, "const"],
    out: Ptr[f32],
    tokens: i32,
    rows: i32,
    width: i32,
    groups: i32,
    shift: i32,
    symmetric: i32,
    scaling: i32,
    has_bias: i32,
    mode: i32,
    eps: f32,
    KIND: static,
    GROUP: static,
    CHUNK: static,
    STAGES: static,
    ELEMENTS: static,
):
    """As matmul_small, with (x, norm, eps) for a. Tokens times norm_prologue.pitch(): at most ELEMENTS."""
    small.product(
        (w, high, scale, offset),
        x,
        (norm, eps),
        bias,
        out,
        tokens,
        (rows, width, groups, shift, scaling, symmetric),
        has_bias,
        mode,
        KIND,
        GROUP,
        CHUNK,
        STAGES,
        ELEMENTS,
    )


@kernel
def matmul_few_norm(
    w: Ptr[u8, "const"],
    high: Ptr[u8, "const"],
    scale: Ptr[u8, "const"],
    offset: Ptr[u8, "const"],
    x: Ptr[f32, "const"],
    norm: Ptr[f32, "const"],
    bias: Ptr[f32, "const"],
    out: Ptr[f32],
    tokens: i32,
    rows: i32,
    width: i32,
    groups: i32,
    shift: i32,
    symmetric: i32,
    scaling: i32,
    has_bias: i32,
    mode: i32,
    eps: f32,
    KIND: static,
    GROUP: static,
    STAGES: static,
):
    """As matmul_few, with (x, norm, eps) for a."""
    few.product(
        (w, high, scale, offset),
        x,
        (norm, eps),
        bias,
        out,
        tokens,
        (rows, width, groups, shift, scaling, symmetric),
        has_bias,
        mode,
        KIND,
        GROUP,
        STAGES,
    )
