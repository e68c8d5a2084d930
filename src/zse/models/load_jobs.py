"""The work of loading: which bytes of the file are copied as they lie, which pass a repacking kernel of the CPU, and
which NumPy has to make.

The load threads repack on the way: on the CPU straight into the weights, for a GPU into pinned memory that is copied.
What only NumPy can make is made in host memory, matrix by matrix, and written to a GPU from there.
"""

import struct
from array import array
from typing import NamedTuple

from zse.formats.file import ModelFile
from zse.formats.source import rope_row_order
from zse.kernels.repack import vector_job, weight_jobs
from zse.lazy import logging
from zse.models import quantize_load, registry
from zse.models.weight_plan import MatrixPlan, ModelPlan, Part, VectorPlan
from zse.quant.scheme import Fp8Scheme, Plane, rows_per_line
from zse.runtime.buffer import Account, Buffer
from zse.runtime.load import LoadJob
from zse.runtime.opening import open_device
from zse.tensor import Tensor, Weight

MERGE_GAP = 256  # bytes of padding between two copies that may be copied with them: no plane fits in


class Copy(NamedTuple):
    """Bytes that go from the file to `destination` (a u8 Tensor) as they are; source None: made otherwise."""

    destination: Tensor
    source: tuple[ModelFile, int] | None  # and the offset in it
    field: str


def start_loading(device, plan: ModelPlan, weights: dict[str, Weight], vectors: dict[str, Tensor]):
    """Starts everything and returns the device's Load of what goes on in the background."""
    if plan.family == "gpu":
        return _load_gpu(device, plan, weights, vectors)
    jobs, to_make = [], []
    order = _row_order(device, plan)
    for vector in plan.vectors:
        jobs += _vector_jobs(order, plan, vector, vectors[vector.name])
    for matrix in plan.matrices:
        ready, made = _matrix_jobs(order, plan, matrix, weights[matrix.name])
        jobs += ready
        to_make += made
    loading = device.load(jobs)
    if to_make:
        try:
            quantize_load.fill_parts(plan, to_make, device.threads)
        except BaseException:
            loading.cancel()
            raise
    return loading


# -- on the CPU: also how host copies for a GPU are made


def _vector_jobs(head_order: Tensor | None, plan: ModelPlan, vector: VectorPlan, tensor: Tensor):
    """Jobs that make norms and biases f32, with the +1 of Gemma's directories and the order of GGUF's heads undone."""
    plus_one = plan.source.naming == "hf" and registry.architecture(plan.config.architecture).hf_norm_plus_one
    for part in vector.parts:
        out = Tensor(tensor.buffer, (part.role.shape[0],), "f32", tensor.offset + 4 * part.first)
        order = head_order if _is_permuted(plan, part) else None
        yield vector_job(
            part.info,
            out,
            1.0 if plus_one and part.role.kind == "norm" else 0.0,
            order,
            plan.config.head_dim if order else 1,
        )


def _matrix_jobs(head_order: Tensor | None, plan: ModelPlan, matrix: MatrixPlan, weight: Weight):
    """(jobs of the load threads, parts that NumPy has to make) of a matrix in host memory."""
    jobs: list[LoadJob] = []
    made: list[tuple[Part, MatrixPlan, Weight]] = []
    for part in matrix.parts:
        info = part.info
        if _is_stored(plan, part, matrix):
            for copy in _plane_copies(part, matrix, weight):
                file, offset = copy.source
                jobs.append(
                    LoadJob(
                        file.fd, offset, copy.destination.nbytes, None, [copy.destination], (1,), file.path, copy.field
                    )
                )
        elif matrix.layout == "r16" and (info.layout == "ggml" or info.is_dense) and matrix.scheme == info.scheme:
            order = head_order if _is_permuted(plan, part) else None
            jobs += weight_jobs(
                info, weight, first_row=part.first, order=order, **({"unit": plan.config.head_dim} if order else {})
            )
        else:
            made.append((part, matrix, weight))
    return jobs, made


def _row_order(device, plan: ModelPlan) -> Tensor | None:
    """Brings the rows of a head of q or k from neighbours that turn into rotate-half order: i32 [head_dim]. None for
    other files. device: the CPU's, or None: host memory that no device counts."""
    if not plan.source.interleaved_rope:
        return None
    dim = plan.config.head_dim
    buffer = device.alloc(4 * dim, label="row order") if device else Buffer(4 * dim, "row order", Account())
    tensor = Tensor(buffer, (dim,), "i32")
    view = tensor.view()
    for row, source in enumerate(rope_row_order(1, dim, plan.config.rope.dims(dim))):
        view[row] = source
    return tensor


def _is_permuted(plan: ModelPlan, part: Part) -> bool:
    return bool(plan.source.interleaved_rope and part.role.heads)


def _is_stored(plan: ModelPlan, part: Part, matrix: MatrixPlan) -> bool:
    """Whether the file holds the tensor's planes as they are in memory, fp8's scales perhaps excepted."""
    info = part.info
    if info.layout != matrix.layout or _is_permuted(plan, part):
        return False
    scheme = info.scheme
    if isinstance(scheme, Fp8Scheme):
        return scheme == matrix.scheme and info.parts is None
    return scheme == matrix.scheme


def _plane_copies(part: Part, matrix: MatrixPlan, weight: Weight):
    """A Copy for each plane of a tensor that is stored as planes, or as plain rows."""
    for stored, file, offset in part.info.placed():
        yield Copy(_inside(part, matrix, weight, stored.name, stored.nbytes), (file, offset), part.info.name)


def _inside(part: Part, matrix: MatrixPlan, weight: Weight, name: str, nbytes: int) -> Tensor:
    """Where `nbytes` of the part's plane lie in that of the whole matrix."""
    plane = next(plane for plane in matrix.planes if plane.name == name)
    line_bytes = plane.nbytes // plane.shape[0]
    at = weight.planes[name].offset + part.first // rows_per_line(plane, matrix.layout, matrix.shape[0]) * line_bytes
    return Tensor(weight.planes[name].buffer, (nbytes,), "u8", at)


# -- on a GPU


def _load_gpu(device, plan: ModelPlan, weights: dict[str, Weight], vectors: dict[str, Tensor]):
    copies: list[Copy] = []
    repacked: list[LoadJob] = []
    small: list[tuple[Tensor, bytes]] = []
    to_make: list[MatrixPlan] = []
    order = _row_order(None, plan)
    plus_one = plan.source.naming == "hf" and registry.architecture(plan.config.architecture).hf_norm_plus_one
    for vector in plan.vectors:
        tensor = vectors[vector.name]
        as_stored = all(
            part.info.type == "F32" and not _is_permuted(plan, part) and not (plus_one and part.role.kind == "norm")
            for part in vector.parts
        )
        for part in vector.parts:
            out = Tensor(tensor.buffer, (4 * part.role.shape[0],), "u8", tensor.offset + 4 * part.first)
            copies.append(Copy(out, (part.info.file, part.info.offset) if as_stored else None, part.info.name))
        if not as_stored:
            repacked += _vector_jobs(order, plan, vector, tensor)
    for matrix in plan.matrices:
        weight = weights[matrix.name]
        if all(_is_stored(plan, part, matrix) for part in matrix.parts):
            for part in matrix.parts:
                copies += _plane_copies(part, matrix, weight)
        elif isinstance(matrix.scheme, Fp8Scheme) and all(
            isinstance(part.info.scheme, Fp8Scheme) and not _is_permuted(plan, part) for part in matrix.parts
        ):
            for part in matrix.parts:
                _fp8_part(plan, part, matrix, weight, copies, small)
        else:
            jobs, made = _matrix_jobs(order, plan, matrix, weight)
            if made:
                to_make.append(matrix)
            else:
                repacked += jobs
            copies += [
                Copy(Tensor(plane.buffer, (plane.nbytes,), "u8", plane.offset), None, matrix.name)
                for plane in weight.planes.values()
            ]
    loading = device.load([*repacked, *merge(copies)])
    try:
        for tensor, data in small:
            device.write(tensor, data)
        if to_make:
            _make(device, plan, order, to_make, weights)
    except BaseException:
        loading.cancel()
        raise
    return loading


def merge(copies: list[Copy]) -> list[LoadJob]:
    """As few jobs as there can be: neighbours in memory that are as far apart in the file become one."""
    jobs: list[LoadJob] = []
    previous: Copy | None = None
    for copy in sorted(copies, key=lambda copy: copy.destination.offset):
        if copy.source is not None:
            file, offset = copy.source
            last = jobs[-1] if jobs and previous is not None and previous.source is not None else None
            if last is not None:
                start: Tensor = last.args[0]
                distance = copy.destination.offset - start.offset
                gap = distance - last.nbytes
                if last.fd == file.fd and offset - last.offset == distance and 0 <= gap < MERGE_GAP:
                    nbytes = distance + copy.destination.nbytes
                    jobs[-1] = last._replace(
                        nbytes=nbytes, field="weights", args=[Tensor(start.buffer, (nbytes,), "u8", start.offset)]
                    )
                    previous = copy
                    continue
            jobs.append(
                LoadJob(file.fd, offset, copy.destination.nbytes, None, [copy.destination], (1,), file.path, copy.field)
            )
        previous = copy
    return jobs


def _fp8_part(
    plan: ModelPlan,
    part: Part,
    matrix: MatrixPlan,
    weight: Weight,
    copies: list[Copy],
    small: list[tuple[Tensor, bytes]],
) -> None:
    """The e4m3 numbers as they lie; the scales, where they are not f32 for each row, are made here."""
    info = part.info
    stored = {plane.name: (plane, file, offset) for plane, file, offset in info.placed()}
    plane, file, offset = stored["w"]
    copies.append(Copy(_inside(part, matrix, weight, "w", plane.nbytes), (file, offset), info.name))
    plane, file, offset = stored["scale"]
    type = info.parts["scale"].type if info.parts is not None else "F32"
    needed = next(p for p in matrix.scheme.planes(*info.shape, matrix.layout) if p.name == "scale")
    destination = _inside(part, matrix, weight, "scale", needed.nbytes)
    if type == "F32" and info.scheme == matrix.scheme:
        copies.append(Copy(destination, (file, offset), info.name))
        return
    copies.append(Copy(destination, None, info.name))
    values = _as_f32(file.read(offset, _count(plane) * {"F32": 4}.get(type, 2), info.name), type)
    if info.scheme == Fp8Scheme("tensor"):
        values = values * needed.shape[0]  # array repeated: every row has the one scale
    small.append((destination, values.tobytes()))


def _count(plane: Plane) -> int:
    return plane.nbytes // 4


def _as_f32(raw: bytes, type: str) -> array:
    if type == "F32":
        return array("f", raw)
    if type == "BF16":
        return array("f", array("I", [bits << 16 for bits in array("H", raw)]).tobytes())
    return array("f", struct.unpack(f"<{len(raw) // 2}e", raw))


def _make(
    device, plan: ModelPlan, order: Tensor | None, matrices: list[MatrixPlan], weights: dict[str, Weight]
) -> None:
    """Makes matrices in host memory with NumPy and writes them to the device, one after another."""
    logging.getLogger("zse.load").info(
        "%d of %d matrices of %s are not stored as this device reads them and are converted while loading; `zse convert` "
        "makes a file that need not be",
        len(matrices),
        len(plan.matrices),
        plan.source.path,
    )
    with open_device("cpu") as host:
        for matrix in matrices:
            weight = weights[matrix.name]
            tensors = weight.planes.values()
            start = min(tensor.offset for tensor in tensors)
            end = max(tensor.offset + tensor.nbytes for tensor in tensors)
            buffer = host.alloc(end - start, label="staged weights")
            planes = {
                name: Tensor(buffer, tensor.shape, tensor.dtype, tensor.offset - start)
                for name, tensor in weight.planes.items()
            }
            jobs, made = _matrix_jobs(order, plan, matrix, weight._replace(planes=planes))
            loading = host.load(jobs)
            quantize_load.fill_parts(plan, made)
            loading.wait()
            _write(device, next(iter(tensors)).buffer, start, buffer)


def _write(device, to, offset: int, buffer) -> None:
    view = buffer.view()
    device.write(Tensor(to, (buffer.nbytes,), "u8", offset), view)
    view.release()
    buffer.free()
