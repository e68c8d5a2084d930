"""Matrices that no kernel makes while a model is loaded (repack_load.py says of which there is one): numbers in another
floating-point type, fp8 on a CPU, checkpoints whose heads' rows change places. The only part of loading that needs
NumPy."""

import os
from concurrent.futures import ThreadPoolExecutor

from zse.errors import FormatError
from zse.formats.matrix import Rows, planes_of_rows, prepare, rows_at_once
from zse.formats.source import rope_row_order
from zse.lazy import numpy as np
from zse.quant.scheme import rows_per_line

CHUNK_ELEMENTS = 1 << 20  # at once and thread: about 30 MB with all temporaries


def fill_parts(plan, parts, threads: int | None = None) -> None:
    """Fill what is written to host memory. plan: zse.models.load.ModelPlan; parts: [(FileTensor, MatrixPlan, Weight)],
    where the Weight's planes lie in memory that has a view(). FormatError names the tensor that cannot be had."""
    head_order = None
    if plan.source.interleaved_rope:
        head_order = rope_row_order(1, plan.config.head_dim, plan.config.rope.dims(plan.config.head_dim))
    threads = threads or os.cpu_count() or 1
    with ThreadPoolExecutor(threads) as pool:
        for part, matrix, weight in parts:  # one after another: a checkpoint's words are held whole
            _fill_part(pool, threads, plan.source, part, matrix, weight, head_order if part.role.heads else None)


def numbers_of(source, info) -> bytes:
    """A matrix of any type as f32, row after row."""
    return Rows(source, info, 0, info.shape[0]).f32().tobytes()


def _fill_part(pool, threads: int, source, part, matrix, weight, head_order) -> None:
    info, (first, last), columns = part.info, (0, part.info.shape[0]), None
    if part.cut is not None:
        (first, last), columns = part.cut
    prepared = prepare(source, info)
    order = None
    if head_order is not None:
        dim = len(head_order)
        order = [row // dim * dim + head_order[row % dim] for row in range(info.shape[0])]

    def fill(start: int) -> None:
        stop = min(start + step, last)
        taken = Rows(source, info, start, stop, order, len(head_order or (0,)))
        arrays = planes_of_rows(taken, matrix.scheme, matrix.layout, prepared=prepared, threads=threads)
        if columns is not None and columns != (0, info.shape[1]):
            arrays = {
                name: np.ascontiguousarray(plane)
                for name, plane in matrix.scheme.cut(arrays, info.shape[1], *columns).items()
            }
        write_rows(matrix, weight, part.first + start - first, arrays)

    step = rows_at_once(info, CHUNK_ELEMENTS)
    try:
        for done in [pool.submit(fill, start) for start in range(first, last, step)]:
            done.result()
    except ValueError as error:
        raise FormatError(source.path, info.offset, info.name, f"cannot become {matrix.scheme}: {error}") from None


def write_rows(matrix, weight, row: int, arrays) -> None:
    """Write planes of whole tiles (or rows) to the MatrixPlan's Weight, in host memory, from row number `row` on."""
    for plane in matrix.scheme.planes(*matrix.shape, matrix.layout):
        tensor, data = weight.planes[plane.name], memoryview(arrays[plane.name].data).cast("B")
        line = row // rows_per_line(plane, matrix.layout, matrix.shape[0])
        at = tensor.offset + line * (plane.nbytes // plane.shape[0])
        memoryview(tensor.buffer.view())[at : at + data.nbytes] = data
