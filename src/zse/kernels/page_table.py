"""Writes what is new into the page table: a step brings a few entries, not the table. (On a CPU the host may as well
write the table itself.)"""

from zse import kernel as zl
from zse.kernels.op import EXACT, Case, Cost, Op, OutputSpec, check
from zse.lazy import numpy as np
from zse.runtime.args import Args

THREADS = 256


class PageUpdate(zl.Record):
    """Parameters of update_pages."""

    count: zl.Ptr[zl.i32, "const"]
    index: zl.Ptr[zl.i32, "const"]
    value: zl.Ptr[zl.i32, "const"]
    table: zl.Ptr[zl.i32]
    size: zl.index


@zl.kernel
def update_pages_cpu(p: PageUpdate):
    """Grid (chunks of entries)."""
    first = zl.block_index(0) * THREADS
    for at in range(first, min(first + THREADS, zl.i64(p.count[0]))):
        place = zl.i64(p.index[at])
        if place >= 0 and place < p.size:
            p.table[place] = p.value[at]


@zl.kernel
def update_pages_gpu(p: PageUpdate):
    """Grid (chunks of entries). The number of entries is read on the device: the same recording serves every step."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    at = zl.block_index(0) * zl.target.threads + zl.thread_index()
    if at < p.count[0]:
        place = p.index[at]
        if place >= 0 and place < p.size:
            p.table[place] = p.value[at]


def update_pages(recorder, count, index, value, table) -> None:
    """table i32 [rows, max_pages], flat: table[index[i]] = value[i] for i < count[0]. count i32 [1]; index and value
    i32 [N], places inside the table, each at most once."""
    (most,) = index.shape
    check("update_pages count", count, "i32", 1)
    check("update_pages index", index, "i32", most)
    check("update_pages value", value, "i32", most)
    check("update_pages table", table, "i32", None, None)
    args = Args(count=count, index=index, value=value, table=table, size=table.shape[0] * table.shape[1])
    recorder.launch("update_pages", args, (-(-most // THREADS),))


def _reference(count, index, value, table):
    out = table.copy()
    entries = int(count[0])
    out.reshape(-1)[index[:entries]] = value[:entries]
    return {"table": out}


def _cases(rng, family="cpu"):
    for rows, pages, most, count in ((3, 7, 9, 0), (4, 64, 300, 200), (2, 40, 20, 20)):
        table = rng.integers(0, 1 << 20, (rows, pages)).astype(np.int32)
        index = rng.permutation(max(rows * pages, most))[:most].astype(np.int32) % (rows * pages)
        index[:count] = rng.permutation(rows * pages)[:count]
        value = rng.integers(0, 1 << 20, most).astype(np.int32)
        yield Case(
            f"{count} of {most}",
            {"count": np.array([count], np.int32), "index": index, "value": value},
            {"table": OutputSpec(table.shape, "int32", EXACT, inout=table)},
        )


def _cost(case: Case) -> Cost:
    return Cost(4 + 12 * int(case.inputs["count"][0]), 0)


UPDATE_PAGES = Op(
    "update_pages",
    lambda target: [zl.Variant("update_pages", update_pages_cpu)],
    update_pages,
    _reference,
    _cases,
    _cost,
    lambda target: [zl.Variant("update_pages", update_pages_gpu, threads=THREADS)],
)
