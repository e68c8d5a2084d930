"""Experts that are read when a token first chooses them (`--lazy-experts`, on a CPU): what no token chooses never takes
memory.

A matrix of experts has its place in the weights, whose pages become resident when they are written. Behind each choice
of experts the recording has a call of the host: it reads those that are not there yet and waits for them. What must
pass NumPy, or a kernel that looks at the whole checkpoint, is read at the start as ever."""

from functools import partial
from typing import Any, NamedTuple

from zse.lazy import logging
from zse.runtime.host_call import call_host
from zse.runtime.load import LoadJob
from zse.tensor import Routing, Tensor, Weight

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from zse.models.weight_plan import MatrixPlan


class Stack(NamedTuple):
    """The experts of one matrix. jobs(matrix, weight): what fills the parts that a MatrixPlan has."""

    matrix: "MatrixPlan"
    weight: Weight

    def of(self, expert: int, experts: int) -> "MatrixPlan":
        """The matrix with one expert's parts only."""
        members = len(self.matrix.parts) // experts
        return self.matrix._replace(parts=self.matrix.parts[expert * members : (expert + 1) * members])


class LazyExperts:
    """device: a CPU. jobs(matrix, weight): the LoadJobs of a MatrixPlan's parts. source: whose files stay open.
    num_read, bytes_read: experts of a layer that were read, and their bytes in the files."""

    def __init__(self, device, source, experts: int, jobs: "Callable[[MatrixPlan, Weight], list[LoadJob]]"):
        self._device, self._source, self._experts, self._jobs = device, source, experts, jobs
        self._stacks: dict[int, list[Stack]] = {}
        self._missing: dict[int, set[int]] = {}  # of layers
        self.num_read = self.bytes_read = 0

    def add(self, layer: int, matrix: "MatrixPlan", weight: Weight) -> None:
        """A matrix that is filled when its experts are chosen. Its memory becomes resident by small pages from here on:
        a large one would bring neighbours along."""
        self._stacks.setdefault(layer, []).append(Stack(matrix, weight))
        self._missing.setdefault(layer, set(range(self._experts)))
        for plane in weight.planes.values():
            plane.buffer.use_small_pages(plane.offset, plane.nbytes)

    def record(self, recorder, layer: int, routing: Routing) -> None:
        """Behind the launch that chooses: the call that reads what is missing."""
        if layer in self._stacks:
            call_host(recorder, partial(self._read_chosen, layer, routing.ids))

    def _read_chosen(self, layer: int, ids: Tensor, symbols: dict[str, int]) -> None:
        missing = self._missing[layer]
        if not missing:
            return
        rows: Any = ids.shape[0]
        tokens = rows if isinstance(rows, int) else rows.value(symbols)
        chosen = missing.intersection(ids.with_rows(tokens).view())
        if not chosen:
            return
        jobs: list[LoadJob] = []
        for expert in sorted(chosen):
            for stack in self._stacks[layer]:
                jobs += self._jobs(stack.of(expert, self._experts), stack.weight)
        self._source.check_unchanged()
        self._device.load(jobs).wait()
        missing -= chosen
        self.num_read += len(chosen)
        self.bytes_read += sum(job.nbytes for job in jobs)
        logging.getLogger("zse.load").debug("layer %d: read experts %s", layer, sorted(chosen))
