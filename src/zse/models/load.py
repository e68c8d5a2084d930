"""From an open file to a model in device memory: plan the bytes, then read and repack every tensor in execution order.

    plan = plan_model(source, family=device.kernels)    # names, shapes and types are checked, nothing is allocated
    model = load_model(device, plan)            # reading goes on in the device's load threads
    ...                                         # record graphs meanwhile
    model.wait()                                # all weights are there, or FormatError

Bytes are copied as they lie, pass a kernel, or are converted by NumPy, whichever comes first. The load threads repack
GGUF on the way: on the CPU straight into the weights, for a GPU into pinned memory that is copied. Checkpoints of
others and numbers that are quantized pass kernels of the device that will use them (repack_load.py). What only NumPy
can convert (quantize_load.py) is converted in host memory, matrix by matrix, and written to a GPU from there."""

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from zse.formats.file import ModelFile
from zse.formats.source import TensorInfo, rope_row_order
from zse.kernels import repack
from zse.lazy import logging
from zse.models import expert_places, quantize_load, registry, repack_load
from zse.models import host_experts as experts_of_host
from zse.models import host_layers as layers_of_host
from zse.models import lazy_experts as later_experts
from zse.models.checksums import Checks
from zse.models.weight_plan import (
    FileTensor,
    MatrixPlan,
    ModelPlan,
    VectorPlan,
    as_f32,
    decays_of,
    place,
    place_host_layers,
    plan_model,
    read_config,
    require_memory,
)
from zse.quant.scheme import Fp8Scheme, rows_per_line
from zse.runtime.buffer import Account, Buffer
from zse.runtime.load import BackgroundLoad, LoadJob
from zse.runtime.opening import open_device
from zse.tensor import Tensor, Weight

__all__ = ["FileCopy", "Model", "load_model", "merge", "place", "plan_model", "read_config", "require_memory"]
MANY_PARTS = 8  # of a matrix: experts
MERGE_GAP = 256  # bytes of padding between two copies that may be copied with them: no plane fits in


class Model:
    """weights: name ("embed", "layers.0.qkv", ...) → Weight. vectors: name ("layers.0.attn_norm", ...) → f32 Tensor.
    Contents are valid after wait(). host_layers: HostLayers, of layers whose weights are in memory of the host, or
    None; lazy_experts: LazyExperts, of those that are read when they are chosen, or None; host_experts: HostExperts, of
    those that have places on the device by turns, or None. share: what one rank of several has of it, or None."""

    def __init__(
        self,
        plan: ModelPlan,
        weights: dict[str, Weight],
        vectors: dict[str, Tensor],
        buffer,
        begin=None,
        checks=None,
        finish=None,
        host_layers: "layers_of_host.HostLayers | None" = None,
        lazy_experts: "later_experts.LazyExperts | None" = None,
        host_experts: "experts_of_host.HostExperts | None" = None,
    ):
        """begin: () → the device's BackgroundLoad, for start(). checks: the Checks of what is loaded. finish: called
        when it is done, or None."""
        self.config, self.weights, self.vectors, self.buffer = plan.config, weights, vectors, buffer
        self.memory_bytes, self.host_layers, self.lazy_experts = plan.memory_bytes, host_layers, lazy_experts
        self.host_experts = host_experts
        self.share = plan.share
        self._source, self._begin, self._checks, self._finish = plan.source, begin, checks, finish
        self._loading: BackgroundLoad | None = None

    def start(self) -> None:
        """Start loading, if load_model() did not."""
        begin, self._begin = self._begin, None
        if begin is not None:
            self._loading = begin()
            self._checks.begin()

    @property
    def is_loaded(self) -> bool:
        """Whether wait() would return at once."""
        done = self._loading is None or (self._loading.finished and self._checks.finished)
        return self._begin is None and done

    def cancel(self) -> None:
        """Stop loading; the contents are never valid then. After wait() it does nothing."""
        self._begin = None
        if self._loading is not None:
            loading, self._loading = self._loading, None
            loading.cancel()
            self._checks.cancel()

    def wait(self) -> None:
        """Block until everything is loaded. FormatError if a file ended early, was changed meanwhile, or has a tensor
        that differs from its checksum."""
        self.start()
        if self._loading is not None:
            loading, self._loading = self._loading, None
            try:
                loading.wait()
                finish, self._finish = self._finish, None
                if finish is not None:
                    finish()
                self._checks.finish(loading)
            finally:
                self._checks.cancel()
            self._source.check_unchanged()

    def __del__(self) -> None:
        # Load threads write to the buffer: they are stopped before it goes.
        loading = getattr(self, "_loading", None)
        if loading is not None:
            loading.cancel()


def load_model(
    device, plan: ModelPlan, *, max_memory: int | None = None, start: bool = True, verify_weights: bool | None = None
) -> Model:
    """Allocate device memory for the plan and start loading (start False: Model.start() does); Model.wait() ends it.

    max_memory: bytes; ConfigError when the weights alone are over it. device.kernels must be the plan's.
    verify_weights: compare checksums of all tensors (True), of those where it costs nothing (None), or of none (False).
    """
    require_memory(plan.memory_bytes, max_memory)
    family = device.kernels
    if family != plan.family:
        raise ValueError(f"a plan for {plan.family} on a {family}")
    buffer = device.alloc(sum(plan.memory_bytes.values()), label="weights")
    weights, vectors = place(plan, buffer)
    stored, stored_vectors, host_layers, host_experts = weights, vectors, None, None
    if plan.host_layers:
        host_layers = layers_of_host.HostLayers(plan, buffer, device.host_memory(plan.host_bytes, "layers"))
        stored = weights | place_host_layers(plan, host_layers.memory, weights)
    if plan.expert_slots:
        memory = device.host_memory(expert_places.host_bytes(plan), "experts")
        host_experts = experts_of_host.HostExperts(device, plan, buffer, memory)
        stored, stored_vectors = host_experts.stored.beside(weights, vectors)
        weights, vectors = host_experts.places.beside(weights, vectors)
    checks = Checks(plan.source, device, verify_weights)

    for matrix in plan.matrices:
        if matrix.order is not None:
            device.write(weights[matrix.name].order, plan.orders[matrix.order].tobytes())
    loader = Loader(device, plan, stored, stored_vectors, checks.sums)

    def begin():
        return LOADS[family](loader)

    finish = loader.repacking and loader.repacking.finish
    model = Model(plan, weights, vectors, buffer, begin, checks, finish, host_layers, loader.lazy_experts, host_experts)
    if start:
        model.start()
    return model


class FileCopy(NamedTuple):
    """Bytes that go from the file to `destination` (a u8 Tensor) as they are; source None: written otherwise."""

    destination: Tensor
    source: tuple[ModelFile, int] | None  # and the offset in it
    field: str

    @property
    def job(self) -> LoadJob:
        file, offset = self.source  # type: ignore[misc]
        destination = self.destination
        return LoadJob(
            file.fd, offset, destination.nbytes, None, {"destination": destination}, (1,), file.path, self.field
        )


class Loader:
    """One load. plus_one: norm weights lack 1; order: i32 [head_dim], which row of a head of q or k in the file stands
    at each row in memory, or None."""

    def __init__(
        self, device, plan: ModelPlan, weights: dict[str, Weight], vectors: dict[str, Tensor], sums: bool = False
    ):
        self.device, self.plan, self.weights, self.vectors, self.sums = device, plan, weights, vectors, sums
        model = registry.architecture(plan.config.architecture)
        self.plus_one = plan.source.naming == "hf" and model.hf_norm_plus_one
        self.order = self._row_order() if plan.source.interleaved_rope else None
        self._turns: dict[tuple, Tensor] = {}  # orders of biases that lie in turn with others'
        # Imported where there is something to do only: most starts copy.
        is_needed = any(is_packed(part.info, matrix) for matrix in plan.matrices for part in matrix.parts)
        self.repacking = repack_load.Repacking(device, plan, self.order) if is_needed and device.repacks else None
        self.lazy_experts = self._later()

    def _row_order(self) -> Tensor:
        dim = self.plan.config.head_dim
        return _host_order(rope_row_order(1, dim, self.plan.config.rope.dims(dim)))

    def _later(self) -> "later_experts.LazyExperts | None":
        """The experts that are not read at the start."""
        waiting = [matrix for matrix in self.plan.matrices if self.plan.lazy_experts and self._can_wait(matrix)]
        if not waiting:
            return None
        experts = waiting[0].parts[0].role.experts
        found = later_experts.LazyExperts(self.device, self.plan.source, experts, lambda *of: self._matrix_jobs(*of)[0])
        for matrix in waiting:
            found.add(int(matrix.name.split(".")[1]), matrix, self.weights[matrix.name])
        return found

    def _can_wait(self, matrix: MatrixPlan) -> bool:
        """Whether it is a stack of experts that can be read one by one."""
        return matrix.parts[0].role.experts > 0 and all(
            self._is_stored(part, matrix) or (matrix.layout == "r16" and repack.takes(part.info, matrix.scheme))
            for part in matrix.parts
        )

    # -- on the CPU: also how host copies for a GPU are filled

    def load_cpu(self):
        jobs: list[LoadJob] = []
        for_numpy: list[tuple[FileTensor, MatrixPlan, Weight]] = []
        for vector in self.plan.vectors:
            jobs += self._vector_jobs(vector)
        for matrix in self.plan.matrices:
            if self.lazy_experts is not None and self._can_wait(matrix):
                continue
            repacked, converted = self._matrix_jobs(matrix, self.weights[matrix.name])
            jobs += repacked
            for_numpy += converted
        loading = self.device.load(jobs, sums=self.sums)
        if for_numpy:
            try:
                quantize_load.fill_parts(self.plan, for_numpy, self.device.threads)
            except BaseException:
                loading.cancel()
                raise
        return loading

    def _vector_jobs(self, vector: VectorPlan) -> Iterator[LoadJob]:
        """Norms and biases become f32, with the 1 added and the order of heads undone; decays are made of logarithms."""
        tensor = self.vectors[vector.name]
        for part in vector.parts:
            # Of the part alone: a GPU gets all bytes of `out`, and a stack's role is as large as all of its experts.
            out = Tensor(tensor.buffer, (part.info.num_elements,), "f32", tensor.offset + 4 * part.first)
            if self._is_logarithm(part) or part.info.layout == "ggml":  # of the host's, quantized
                made = decays_of if self._is_logarithm(part) else quantize_load.numbers_of
                self.device.write(out, made(self.plan.source, part.info))
                continue
            add = 1.0 if self.plus_one and part.role.kind == "norm" else 0.0
            yield repack.vector_job(part.info, out, add, factor=part.role.factor, **self._order_of(part))

    def _matrix_jobs(self, matrix: MatrixPlan, weight: Weight):
        """(jobs of the load threads, parts that NumPy has to convert) of a matrix in host memory."""
        jobs: list[LoadJob] = []
        for_numpy: list[tuple[FileTensor, MatrixPlan, Weight]] = []
        for part in matrix.parts:
            if self._is_stored(part, matrix):
                jobs += [copy.job for copy in _plane_copies(part, matrix, weight)]
            elif repack.takes_part(part, matrix):
                jobs += repack.part_jobs(part, matrix, weight, **self._order_of(part))
            elif self.plan.family == "cpu" and self.repacking and self.repacking.takes(part):
                jobs += self.repacking.jobs(part, weight)
            else:
                for_numpy.append((part, matrix, weight))
        return jobs, for_numpy

    def _is_logarithm(self, part: FileTensor) -> bool:
        return part.role.kind == "decay" and self.plan.source.naming == "hf"

    def _is_f32(self, part: FileTensor) -> bool:
        """Whether a vector's numbers are in the file as they are in memory, but for the 1 of a norm."""
        is_plain = part.info.type == "F32" and part.role.factor == 1 and not self._is_permuted(part)
        return is_plain and not self._is_logarithm(part)

    def _is_permuted(self, part: FileTensor) -> bool:
        return bool(part.info.turn or (self.order and part.role.heads))

    def _order_of(self, part: FileTensor) -> dict:
        """What the repacking kernels take to put the rows of heads in order."""
        if part.info.turn:
            return {"order": self._turn_order(part.info), "unit": part.info.shape[0]}
        return {"order": self.order, "unit": self.plan.config.head_dim} if self._is_permuted(part) else {}

    def _turn_order(self, info: TensorInfo) -> Tensor:
        """Where each number of a vector stands among those that lie in turn with it: i32 [size]."""
        key = info.turn, info.shape[0]
        if key not in self._turns:
            first, step = info.turn[:2]
            self._turns[key] = _host_order([first + step * place for place in range(info.shape[0])])
        return self._turns[key]

    def _is_stored(self, part: FileTensor, matrix: MatrixPlan) -> bool:
        """Whether the file holds the tensor's planes as they are in memory, fp8's scales perhaps excepted."""
        info = part.info
        is_same = part.cut is None and info.layout == matrix.layout and info.scheme == matrix.scheme
        if not is_same or self._is_permuted(part):
            return False
        return not isinstance(info.scheme, Fp8Scheme) or info.parts is None

    # -- on a GPU

    def load_gpu(self):
        copies: list[FileCopy] = []
        repacked: list[LoadJob] = []
        small: list[tuple[Tensor, bytes]] = []
        packed: list[tuple[FileTensor, Weight]] = []
        for_numpy: list[MatrixPlan] = []
        for vector in self.plan.vectors:
            tensor = self.vectors[vector.name]
            is_norm = self.plus_one and vector.parts[0].role.kind == "norm"
            as_stored = not is_norm and all(map(self._is_f32, vector.parts))
            for part in vector.parts:
                out = Tensor(tensor.buffer, (4 * part.info.num_elements,), "u8", tensor.offset + 4 * part.first)
                copies.append(FileCopy(out, (part.info.file, part.info.offset) if as_stored else None, part.info.name))
            if not as_stored:
                repacked += self._vector_jobs(vector)
        for matrix in self.plan.matrices:
            weight, parts = self.weights[matrix.name], matrix.parts
            if all(self._is_stored(part, matrix) for part in parts):
                copies += _stored_copies(matrix, weight)
            elif isinstance(matrix.scheme, Fp8Scheme) and all(
                isinstance(part.info.scheme, Fp8Scheme) and part.cut is None and not self._is_permuted(part)
                for part in parts
            ):
                for part in parts:
                    _fp8_part(part, matrix, weight, copies, small)
            elif self.repacking and all(self.repacking.takes(part) for part in parts):
                packed += [(part, weight) for part in parts]
            else:
                jobs, converted = self._matrix_jobs(matrix, weight)
                if converted:
                    for_numpy.append(matrix)
                else:
                    repacked += jobs
                copies += [
                    FileCopy(Tensor(plane.buffer, (plane.nbytes,), "u8", plane.offset), None, matrix.name)
                    for plane in weight.planes.values()
                ]
        steps = self.repacking.steps(packed) if self.repacking else []
        # In the order of the files: a disk reads so 1.3 times as fast as in that of the layers (H200 host, ext4).
        direct = sorted([*merge(copies), *steps], key=file_place)
        loading = self.device.load([*repacked, *direct])
        try:
            for tensor, data in small:
                self.device.write(tensor, data)
            if for_numpy:
                self._convert(for_numpy)
        except BaseException:
            loading.cancel()
            raise
        return loading

    def _convert(self, matrices: list[MatrixPlan]) -> None:
        """Matrices are converted by NumPy in host memory and written to the device, one after another."""
        logging.getLogger("zse.load").info(
            "%d of %d matrices of %s are not stored as this device reads them and are converted by NumPy while loading; "
            "`zse convert` makes a file that need not be",
            len(matrices),
            len(self.plan.matrices),
            self.plan.source.path,
        )
        with open_device("cpu") as host:
            for matrix in matrices:
                weight = self.weights[matrix.name]
                tensors = weight.planes.values()
                start = min(tensor.offset for tensor in tensors)
                end = max(tensor.offset + tensor.nbytes for tensor in tensors)
                buffer = host.alloc(end - start, label="staged weights")
                planes = {
                    name: Tensor(buffer, tensor.shape, tensor.dtype, tensor.offset - start)
                    for name, tensor in weight.planes.items()
                }
                jobs, converted = self._matrix_jobs(matrix, weight._replace(planes=planes, order=None))
                loading = host.load(jobs)
                quantize_load.fill_parts(self.plan, converted)
                loading.wait()
                view = buffer.view()
                self.device.write(Tensor(next(iter(tensors)).buffer, (buffer.nbytes,), "u8", start), view)
                view.release()
                buffer.free()


LOADS = {"cpu": Loader.load_cpu, "gpu": Loader.load_gpu}


def file_place(job: LoadJob) -> tuple[int, int]:
    """Where a job begins; of a step where its first one does, so that they stay together."""
    return (job.fd, job.offset) if job.step is None else job.step.place


def _host_order(order: list[int]) -> Tensor:
    """i32 in host memory, for the repacking kernels."""
    tensor = Tensor(Buffer(4 * len(order), "row order", Account()), (len(order),), "i32")
    tensor.view()[:] = array("i", order)
    return tensor


def is_packed(info, matrix: MatrixPlan) -> bool:
    """Whether the file holds something else than the planes or the numbers of the matrix: words of others, or what is
    to be quantized."""
    return info.layout not in (matrix.layout, "rows", "ggml") or (info.is_dense and info.scheme != matrix.scheme)


def _plane_copies(part: FileTensor, matrix: MatrixPlan, weight: Weight) -> Iterator[FileCopy]:
    """A FileCopy for each plane of a tensor that is stored as planes, or as plain rows."""
    for stored, file, offset in part.info.placed():
        yield FileCopy(_inside(part, matrix, weight, stored.name, stored.nbytes), (file, offset), part.info.name)
    order = part.info.order
    if (
        order is not None and weight.order is not None
    ):  # is there already; read with the planes, whose checksum is of both
        at = Tensor(weight.order.buffer, (order.nbytes,), "u8", weight.order.offset)
        yield FileCopy(at, (order.file, order.offset), part.info.name)


def _stored_copies(matrix: MatrixPlan, weight: Weight) -> list[FileCopy]:
    """Those of all parts of a matrix. Of a stack of experts, which are thousands in a model, what lies behind one another
    in the file and in memory is one from the start (0.35 s of a start with 48 layers of 128 experts)."""
    if len(matrix.parts) < MANY_PARTS or weight.order is not None:
        return [copy for part in matrix.parts for copy in _plane_copies(part, matrix, weight)]
    lines = {
        plane.name: (rows_per_line(plane, matrix.layout, matrix.shape[0]), plane.nbytes // plane.shape[0])
        for plane in matrix.planes
    }
    runs: dict[str, list] = {}  # plane → [file, offset in it, offset in memory, bytes, name of the first part]
    copies: list[FileCopy] = []

    def end(name: str) -> None:
        file, offset, at, nbytes, field = runs[name]
        copies.append(FileCopy(Tensor(weight.planes[name].buffer, (nbytes,), "u8", at), (file, offset), field))

    for part in sorted(matrix.parts, key=lambda part: part.first):
        for stored, file, offset in part.info.placed():
            rows, line_bytes = lines[stored.name]
            at = weight.planes[stored.name].offset + part.first // rows * line_bytes
            run = runs.get(stored.name)
            if run is not None and run[0] is file and offset - run[1] == at - run[2] == run[3]:
                run[3] += stored.nbytes
                continue
            if run is not None:
                end(stored.name)
            runs[stored.name] = [file, offset, at, stored.nbytes, part.info.name]
    for name in runs:
        end(name)
    return copies


def _inside(part: FileTensor, matrix: MatrixPlan, weight: Weight, name: str, nbytes: int) -> Tensor:
    """Where `nbytes` of the part's plane lie in that of the whole matrix."""
    plane = next(plane for plane in matrix.planes if plane.name == name)
    line_bytes = plane.nbytes // plane.shape[0]
    at = weight.planes[name].offset + part.first // rows_per_line(plane, matrix.layout, matrix.shape[0]) * line_bytes
    return Tensor(weight.planes[name].buffer, (nbytes,), "u8", at)


def merge(copies: list[FileCopy]) -> list[LoadJob]:
    """As few jobs as there can be: neighbours in memory that are as far apart in the file become one."""
    jobs: list[LoadJob] = []
    previous: FileCopy | None = None
    for copy in sorted(copies, key=lambda copy: (id(copy.destination.buffer), copy.destination.offset)):
        if copy.source is not None:
            file, offset = copy.source
            if jobs and previous is not None and previous.source is not None:
                last = jobs[-1]
                start: Tensor = last.args["destination"]
                distance = copy.destination.offset - start.offset
                gap = distance - last.nbytes
                is_beside = start.buffer is copy.destination.buffer and last.fd == file.fd
                if is_beside and offset - last.offset == distance and 0 <= gap < MERGE_GAP:
                    nbytes = distance + copy.destination.nbytes
                    joined = Tensor(start.buffer, (nbytes,), "u8", start.offset)
                    jobs[-1] = last._replace(nbytes=nbytes, field="weights", args={"destination": joined})
                    previous = copy
                    continue
            jobs.append(copy.job)
        previous = copy
    return jobs


def _fp8_part(
    part: FileTensor, matrix: MatrixPlan, weight: Weight, copies: list[FileCopy], small: list[tuple[Tensor, bytes]]
) -> None:
    """The e4m3 numbers as they lie; the scales, where they are not f32 for each row, are made here."""
    info = part.info
    stored = {plane.name: (plane, file, offset) for plane, file, offset in info.placed()}
    plane, file, offset = stored["w"]
    copies.append(FileCopy(_inside(part, matrix, weight, "w", plane.nbytes), (file, offset), info.name))
    plane, file, offset = stored["scale"]
    type = info.parts["scale"].type if info.parts is not None else "F32"
    needed = next(p for p in matrix.scheme.planes(*info.shape, matrix.layout) if p.name == "scale")
    destination = _inside(part, matrix, weight, "scale", needed.nbytes)
    if type == "F32" and info.scheme == matrix.scheme:
        copies.append(FileCopy(destination, (file, offset), info.name))
        return
    copies.append(FileCopy(destination, None, info.name))
    values = as_f32(file.read(offset, plane.nbytes // (1 if type == "F32" else 2), info.name), type)
    if info.scheme == Fp8Scheme("tensor"):
        values = values * needed.shape[0]  # array repeated: every row has the one scale
    small.append((destination, values.tobytes()))
