"""Quantizing dense weights while a model is loaded (`--quantize`). The only part of loading that needs NumPy."""

import numpy as np

from zse.errors import FormatError
from zse.models.names import unpermute_row
from zse.quant.pack import bf16_to_f32, f32_to_bf16, pack, pack_dense
from zse.quant.quantize import quantize
from zse.quant.scheme import TILE_ROWS

CHUNK_BYTES = 16 << 20          # of the file, at once: bounds the memory that quantizing takes beside the model
_DTYPE = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def quantize_matrices(plan, weights) -> None:
    """Fill the matrices of `plan` (zse.models.load.ModelPlan) whose scheme differs from their file's."""
    dim = plan.config.head_dim
    head_order = np.array([unpermute_row(row, dim) for row in range(dim)])
    for matrix in plan.matrices:
        for part in matrix.parts:
            if part.info.layout != "rows" or matrix.scheme == part.info.scheme:
                continue
            order = head_order if plan.source.interleaved_rope and part.role.heads else None
            _quantize_part(plan.source, part, matrix.scheme, weights[matrix.name], order)


def _quantize_part(source, part, scheme, weight, order) -> None:
    rows, width = part.info.shape
    unit = TILE_ROWS if order is None else np.lcm(len(order), TILE_ROWS)
    row_bytes = part.info.nbytes // rows
    step = max(unit, CHUNK_BYTES // row_bytes // unit * unit)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        raw = np.frombuffer(source.read(part.info, start * row_bytes, count * row_bytes), _DTYPE[part.info.type])
        values = (bf16_to_f32(raw) if part.info.type == "BF16" else raw.astype(np.float32)).reshape(count, width)
        if order is not None:
            values = values.reshape(-1, len(order), width)[:, order].reshape(count, width)
        try:
            planes = pack(quantize(values, scheme)) if scheme.kind == "affine" else _dense(scheme, values)
        except ValueError as error:
            raise FormatError(source.path, part.info.offset, part.info.name, str(error)) from None
        tile = (part.first + start) // TILE_ROWS
        for name, data in planes.items():
            plane = weight.planes[name]
            at = plane.offset + tile * (plane.nbytes // plane.shape[0])
            memoryview(plane.buffer.view())[at:at + data.nbytes] = memoryview(np.ascontiguousarray(data).data).cast("B")


def _dense(scheme, values):
    if scheme.dtype == "bf16":
        return pack_dense(scheme, f32_to_bf16(values))
    return pack_dense(scheme, values.astype(np.float16 if scheme.dtype == "f16" else np.float32))
