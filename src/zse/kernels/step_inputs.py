"""The first launch of a step: what the host has written for it becomes device memory, and new pages enter the page table.

On a GPU the host writes into memory that kernels reach over the bus. A copy of 21 KB by the stream costs a decode step about
8 us between its neighbours, this launch about 3, and no part of a captured graph is anything but a kernel then. (On a
CPU both are one memory: only the pages are left to do.)"""

from zse.kernel import (
    Ptr,
    Variant,
    block_index,
    grid_launch_dependents,
    grid_wait,
    i32,
    i64,
    kernel,
    load,
    store,
    target,
    thread_index,
)
from zse.kernels.op import EXACT, Case, Cost, Op, Output, check, require

THREADS = 256
PIECE = 4               # words that a thread copies


@kernel
def step_inputs_cpu(source: Ptr[i32, "const"], out: Ptr[i32], words: i64, count: Ptr[i32, "const"],
                    index: Ptr[i32, "const"], value: Ptr[i32, "const"], table: Ptr[i32], size: i64, copying: i64):
    """One block."""
    for at in range(words):
        out[at] = source[at]
    for at in range(i64(count[0])):
        place = i64(index[at])
        if place >= 0 and place < size:
            table[place] = value[at]


@kernel
def step_inputs_gpu(source: Ptr[i32, "const"], out: Ptr[i32], words: i32, count: Ptr[i32, "const"],
                    index: Ptr[i32, "const"], value: Ptr[i32, "const"], table: Ptr[i32], size: i32, copying: i32):
    """Grid (`copying` blocks that copy, then blocks for the entries of the page table). The number of entries is read on
    the device: the same recording serves every step. All reads are of the host's memory: nobody waits for the copy."""
    grid_launch_dependents()
    grid_wait()
    if block_index(0) < copying:
        at = (block_index(0) * target.threads + thread_index()) * PIECE
        if at < words:
            store(out + at, load(source + at, PIECE))
    else:
        entry = (block_index(0) - copying) * target.threads + thread_index()
        if entry < count[0]:
            place = index[entry]
            if place >= 0 and place < size:
                table[place] = value[entry]


def step_inputs(recorder, source, out, count, index, value, table) -> None:
    """out i32 [W] = source i32 [W], W a multiple of 4 (None, None: they are one memory). table i32 [rows, max_pages],
    flat: table[index[i]] = value[i] for i < count[0]; count i32 [1], index and value i32 [N], places inside the table,
    each at most once. count, index and value are where the host writes them: parts of source."""
    (most,) = index.shape
    check("step_inputs count", count, "i32", 1)
    check("step_inputs index", index, "i32", most)
    check("step_inputs value", value, "i32", most)
    check("step_inputs table", table, "i32", None, None)
    require((source is None) == (out is None), "step_inputs: source and out go together")
    words = 0
    if source is not None:
        (words,) = source.shape
        check("step_inputs source", source, "i32", words)
        check("step_inputs out", out, "i32", words)
        require(words % PIECE == 0, f"step_inputs: {words} words are no multiple of {PIECE}")
    copying = -(-words // (PIECE * THREADS))
    entries = -(-most // THREADS)
    gpu = getattr(getattr(recorder, "device", None), "family", "cpu") == "gpu"
    recorder.launch("step_inputs", [0 if source is None else source, 0 if out is None else out, words, count, index,
                                    value, table, table.shape[0] * table.shape[1], copying],
                    (copying + entries if gpu else 1,))


def _reference(source, count, index, value, table, out=None):
    pages = table.copy()
    entries = int(count[0])
    pages.reshape(-1)[index[:entries]] = value[:entries]
    return {"table": pages, "out": source}


def _cases(rng, family="cpu"):
    import numpy as np

    for rows, pages, most, count, words in ((3, 7, 9, 0, 16), (4, 64, 300, 200, 2100), (2, 40, 20, 20, 1024)):
        table = rng.integers(0, 1 << 20, (rows, pages)).astype(np.int32)
        index = rng.permutation(max(rows * pages, most))[:most].astype(np.int32) % (rows * pages)
        index[:count] = rng.permutation(rows * pages)[:count]
        value = rng.integers(0, 1 << 20, most).astype(np.int32)
        source = rng.integers(-1 << 30, 1 << 30, words).astype(np.int32)
        yield Case(f"{count} of {most}, {words} words",
                   {"source": source, "count": np.array([count], np.int32), "index": index, "value": value},
                   {"out": Output((words,), "int32", EXACT), "table": Output(table.shape, "int32", EXACT, inout=table)})


def _cost(case: Case) -> Cost:
    return Cost(8 * len(case.inputs["source"]) + 12 * int(case.inputs["count"][0]), 0)


STEP_INPUTS = Op("step_inputs", lambda target: [Variant("step_inputs", step_inputs_cpu)], step_inputs, _reference, _cases,
                 _cost, lambda target: [Variant("step_inputs", step_inputs_gpu, threads=THREADS)])
