"""A runner whose model is a pipeline's rank (docs/design/0011-several-devices.md): what it records, and where its pages lie.

Pages have the same numbers on all ranks. What page tables hold depends on how many layers a rank has: rank 0's entries are
brought to the rank's own when they come.

On rank 0 a step is two replays: what comes before the stream goes to the next rank, and what follows when it has come back. The
second is put off until somebody waits for the step, so that the first of other steps, of other requests, come before it: as
many are under way as there are ranks, and each computes another's."""

from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

from zse.cache import groups, layout
from zse.engine import forwards, runner
from zse.errors import UnsupportedError
from zse.plan.stages import StagePlanner

SILENT = " silent"  # of a recording without logits: nothing comes back to rank 0, which goes on at once


class HalvedGraph:
    """A step's recording on rank 0, as Graph: `first` until the stream is sent, `second` from where it comes back."""

    def __init__(self, owner: "StageRunner", recorder: Any, cut: int):
        self._owner, self.symbols = owner, tuple(recorder.maxima)
        self.first, self.second = (
            self._part(recorder, launches) for launches in (recorder.launches[:cut], recorder.launches[cut:])
        )

    def _part(self, recorder: Any, launches: list) -> Any:
        part = recorder.device.record()
        part.launches, part.maxima, part.checks = launches, recorder.maxima, recorder.checks
        return part.finish()

    def submit(self, **symbols: int) -> "HalvedTicket":
        self.first.submit(**symbols)
        return HalvedTicket(self._owner, self.second, symbols)

    def prepare(self, **symbols: int) -> None:
        self.first.prepare(**symbols)
        self.second.prepare(**symbols)

    def close(self) -> None:
        self.first.close()
        self.second.close()


class HalvedTicket:
    """A step whose second half is replayed when its turn comes. masked: what masks are done with then, the half's Ticket → the
    last one. requests: that it samples for."""

    masked: Callable[[Any], Any] | None = None
    requests: frozenset[Any] = frozenset()

    def __init__(self, owner: "StageRunner", second: Any, symbols: dict[str, int]):
        self._owner, self._second, self._symbols = owner, second, symbols
        self._ticket: Any = None
        owner.sent.append(self)

    def receive(self) -> None:
        """Replay what is left; whoever sent before has done so."""
        self._ticket = self._second.submit(**self._symbols)
        if self.masked is not None:
            self._ticket = self.masked(self._ticket)

    def wait(self) -> None:
        self._owner.receive_until(self)
        self._ticket.wait()


class StageRunner(runner.Runner):
    """As Runner. sent: steps whose stream has not been taken back yet, oldest first: they come back in this order."""

    planner_class = StagePlanner
    planner: Any

    def __init__(self, device: Any, model: Any, config: Any, **options: Any):
        tower = options.get("tower")
        if tower is not None and tower.forward.tower.deepstack:
            what = f"{config.model}: --pipeline-parallel-size: images that come into several layers"
            raise UnsupportedError(what, model.config.architecture, ["images that come into the first one"])
        self.sent: deque[HalvedTicket] = deque()
        super().__init__(device, model, config, **options)
        share, whole = model.share, model.share.whole
        first = share.config_of(0)
        theirs = layout.parts_of(first, config.kv_dtype, groups.group_layers(first, whole))
        self._theirs = theirs if share.rank else self.kv.parts_of

    @property
    def num_sets(self) -> int:
        return self.model.share.size + self.runs_ahead

    def submit(self, batch: Any, *masks: Any) -> tuple[Any, Any]:
        if self.runs_ahead:  # tokens that the device is to feed it must be sampled before
            fed = {entry.request for entry in batch.entries if entry.request.pending > entry.samples}
            for ticket in list(self.sent):
                if not fed.isdisjoint(ticket.requests):
                    self.receive_until(ticket)
        ticket, sampler = super().submit(batch, *masks)
        if isinstance(ticket, HalvedTicket):
            ticket.requests = frozenset([entry.request for entry in batch.entries if entry.samples])
        return ticket, sampler

    def _submit_masked(self, step: Any, ticket: Any, rows: int, masks: Any) -> Any:
        first = [some for some in masks if some.come_first]
        later = [some for some in masks if some.draws_first]
        graph = self.masking.fill(step.buffers, rows, first) if first else None
        for some in later:
            some.keep()

        def masked(half: Any) -> Any:
            if graph is not None:
                half = graph.submit(rows=rows)
            for some in later:
                half.wait()
                some.restore()
                self.masking.settle(step.buffers, rows, some)
            return half

        ticket.masked = masked
        return ticket

    def receive_until(self, ticket: HalvedTicket | None) -> None:
        """Replay the second halves of steps up to this one; None: of all."""
        while self.sent and (ticket is None or ticket in self.sent):
            self.sent.popleft().receive()

    def fill(self, batch: Any, masked: bool = False) -> Any:
        # " forward": without sampling either.
        self._variant = "" if batch.num_samples else f"{SILENT} forward"
        return super().fill(batch, masked)

    def _graph(self, kind: str, size: int, number: int) -> Any:
        self.planner.returns = SILENT.strip() not in kind.split()
        return super()._graph(kind, size, number)

    def _finished(self, recorder: Any) -> Any:
        cut = self.planner.cut
        return recorder.finish() if cut is None else HalvedGraph(self, recorder, cut)

    @property
    def forwards(self) -> forwards.Forwards:
        self.receive_until(None)  # before what a job is to get
        self.planner.returns = True  # whatever a job records comes back
        return super().forwards

    def write_table(self, at: int, entries: bytes) -> None:
        group = at // 4 // self._table.group_entries
        mine = array("i", [self._mine(value, group) for value in memoryview(entries).cast("i")])
        super().write_table(at, mine.tobytes())

    def localize(self, key: tuple[str, int, int]) -> None:
        """Inputs of a recording came from rank 0."""
        inputs = self.forwards.inputs if key[0] in forwards.KINDS else self._sets[key[2]].inputs
        for index in range(inputs.page_count[0]):
            group = inputs.page_index[index] // self._table.group_entries
            inputs.page_value[index] = self._mine(inputs.page_value[index], group)

    def _mine(self, entry: int, group: int) -> int:
        return entry // self._theirs[group] * self.kv.parts_of[group]
