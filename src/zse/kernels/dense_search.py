"""Products of int8 questions with all int8 rows of a block of vectors: exact search, in one reading of the memory."""

from zse import kernel as zl
from zse.kernels.op import Case, Cost, Op, OutputSpec, Tolerance, check, later, require
from zse.lazy import numpy as np
from zse.runtime.args import Args

STEP = 64  # bytes that a row is a multiple of: the largest register of a CPU
CHUNK = 512  # rows of one block on a CPU: 300 KB of a small model's
GPU_THREADS = 256


class DenseSearch(zl.Record):
    """rows i8 [count, width]; queries i8 [Q, width], from -127 to 127; scales f32 [count]; factors f32 [Q]; out f32 [Q, count]."""

    rows: zl.Ptr[zl.i8, "const"]
    scales: zl.Ptr[zl.f32, "const"]
    queries: zl.Ptr[zl.i8, "const"]
    factors: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    count: zl.i64
    width: zl.i64


@zl.inline
def add_products(total, row, query):
    """total i32 lanes + four products a lane. With VNNI rows are read as unsigned, 128 higher (see dense_search_rows)."""
    lanes = zl.target.lanes
    if zl.target.has("vnni"):
        return zl.dot4_u8s8(total, row ^ zl.i32.x(lanes)(-2139062144), query)  # 0x80808080
    if zl.target.has("dotprod"):
        return zl.dot4_s8(total, row, query)
    return total + zl.pairs_i16(zl.pairs_u8s8(zl.abs_s8(row), zl.sign_s8(query, row)))


@zl.kernel
def dense_search_rows(p: DenseSearch):
    """Grid (chunks of rows, queries). Four rows at once: their sums are independent chains."""
    lanes = zl.target.lanes
    words = p.width // 4
    query = zl.cast_ptr(p.queries, zl.i32) + zl.block_index(1) * words
    rows = zl.cast_ptr(p.rows, zl.i32)
    out = p.out + zl.block_index(1) * p.count
    factor = p.factors[zl.block_index(1)]
    above = zl.i32(0)
    if zl.target.has("vnni"):
        sums = zl.i32.x(lanes)(0)
        for k in range(0, words, lanes):
            sums = zl.dot4_u8s8(sums, zl.i32.x(lanes)(-2139062144), zl.load(query + k, lanes))
        above = zl.reduce_add(sums)
    first = zl.block_index(0) * CHUNK
    last = min(first + CHUNK, p.count)
    whole = first + (last - first) // 4 * 4
    for row in range(first, whole, 4):
        totals = [zl.i32.x(lanes)(0) for _ in zl.static(range(4))]
        for k in range(0, words, lanes):
            part = zl.load(query + k, lanes)
            for r in zl.static(range(4)):
                totals[r] = add_products(totals[r], zl.load(rows + (row + r) * words + k, lanes), part)
        for r in zl.static(range(4)):
            out[row + r] = zl.f32(zl.reduce_add(totals[r]) - above) * (p.scales[row + r] * factor)
    for row in range(whole, last):
        total = zl.i32.x(lanes)(0)
        for k in range(0, words, lanes):
            total = add_products(total, zl.load(rows + row * words + k, lanes), zl.load(query + k, lanes))
        out[row] = zl.f32(zl.reduce_add(total) - above) * (p.scales[row] * factor)


def dense_search(recorder, rows, scales, queries, factors, out) -> None:
    """out f32 [Q, N] = factors f32 [Q] * scales f32 [N] * (queries i8 [Q, width] · rows i8 [N, width]); width a multiple of 64 up to
    2^17, values from -127 to 127."""
    count, width = rows.shape
    num_queries = queries.shape[0]
    check("dense_search rows", rows, "i8", count, width)
    check("dense_search scales", scales, "f32", count)
    check("dense_search queries", queries, "i8", num_queries, width)
    check("dense_search factors", factors, "f32", num_queries)
    check("dense_search out", out, "f32", num_queries, count)
    require(
        width % STEP == 0 and 0 < width <= 1 << 17,
        f"dense_search: width {width} is not a multiple of {STEP} up to 2^17",
    )
    args = Args(rows=rows, scales=scales, queries=queries, factors=factors, out=out, count=count, width=width)
    per_block = CHUNK if recorder.device.kernels == "cpu" else GPU_THREADS // 32
    recorder.launch("dense_search", args, (-(-count // per_block), num_queries))


def _reference(rows, scales, queries, factors):
    products = queries.astype(np.float64) @ rows.astype(np.float64).T
    return {"out": products * scales.astype(np.float64) * factors.astype(np.float64)[:, None]}


def _cases(rng, family="cpu"):
    rounding = Tolerance(0.0, 3e-7, "the exact sum as f32, two products: half an ulp each")
    for count, width, num_queries in ((1, 64, 1), (7, 576, 3), (1029, 640, 2), (18, 8192, 1)):
        rows = rng.integers(-127, 128, (count, width)).astype(np.int8)
        queries = rng.integers(-127, 128, (num_queries, width)).astype(np.int8)
        rows[0], queries[0] = 127, -127  # the largest sum
        scales = rng.random(count).astype(np.float32)
        factors = rng.random(num_queries).astype(np.float32)
        inputs = {"rows": rows, "scales": scales, "queries": queries, "factors": factors}
        yield Case(
            f"{num_queries} in {count}x{width}", inputs, {"out": OutputSpec((num_queries, count), "float32", rounding)}
        )


def _cost(case: Case) -> Cost:
    (count, width), num_queries = case.inputs["rows"].shape, len(case.inputs["queries"])
    moved = count * (width + 4) + num_queries * (width + 4) + num_queries * count * 4
    return Cost(moved, 2 * num_queries * count * width)


DENSE_SEARCH = Op(
    "dense_search",
    lambda target: [zl.Variant("dense_search", dense_search_rows)],
    dense_search,
    _reference,
    _cases,
    _cost,
    later("gpu.dense_search", "variants"),
)
