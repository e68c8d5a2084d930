"""Masks of a grammar on their way to the sampler.

A step whose masks come first is two replays: the forward, and, once the grammar process has given the masks
(structured/service.py), masking and sampling. So the masks are computed while the model runs, and steps without masks
are recorded without them. Where tokens may be drawn first (engine/lazy_masks.py), a step is one replay as without
grammars, and one more, of a line, for each token that is refused."""

from collections.abc import Iterable
from typing import Any

from zse.engine.lazy_masks import SECOND_DRAW, DrawnRun, check_drawn, check_masked, may_draw_first
from zse.engine.step import masks_at, masks_staging
from zse.errors import RequestError
from zse.kernels.mask import mask_logits
from zse.scheduler.request import FINISHED
from zse.structured.service import Grammars, MaskAsk
from zse.tensor import Tensor

# So many requests with a grammar in a step have their masks computed beside the forward, also where they may be drawn
# first: a mask takes 0.07 to 0.14 ms of another core, the way to the grammar process and back holds up the step for
# 0.25.
MOST_AHEAD = 2


class StepMasks:
    """The masks of one step, which are being computed. failures: filled with requests whose grammar cannot go on: what
    is sampled for them is to be dropped. come_first: whether there are lines that must not be sampled before they are
    masked; draws_first: whether there are others."""

    def __init__(self, grammars: Grammars, failures: dict[int, RequestError]):
        self._grammars, self._failures = grammars, failures
        self.come_first = False
        self._later: list[DrawnRun] = []  # drawn first, their masks are computed all the same
        self._lazy: list[DrawnRun] = []  # drawn first, the grammar is asked about the tokens
        self._asked: list[MaskAsk] = []
        self._later_lines: set[int] = set()
        self._masked: frozenset[int] | None = None  # lines that have a mask, once that is known
        self._kept: list[tuple[int, bytes]] = []

    @classmethod
    def of_batch(
        cls, batch, grammars: Grammars, failures: dict[int, RequestError], lazy: bool = False
    ) -> "StepMasks | None":
        """Ask for the masks of a batch; None when it has no request with a grammar. lazy: tokens may be drawn first."""
        bound, line = [], 0
        for entry in batch.entries:
            if entry.samples:
                if entry.request.options.structure is not None:
                    bound.append((entry, line))
                line += entry.samples
        if not bound:
            return None
        masks, ahead = cls(grammars, failures), len(bound) <= MOST_AHEAD
        for entry, line in bound:
            masks._add(entry, line, lazy, ahead)
        if masks._asked:
            grammars.begin(masks._asked)
        return masks

    def _add(self, entry, line: int, lazy: bool, ahead: bool) -> None:
        request = entry.request
        if lazy and may_draw_first(request.params):
            run = DrawnRun(request, line, entry.drafts)
            # Behind drafts there is a mask for each, which takes next to nothing where the grammar has one token only.
            is_ahead = ahead and (not entry.drafts or request.forced is not None)
            if not is_ahead and request.params.logprobs is None and not self._grammars.refuses_often(request.id):
                self._lazy.append(run)
                return
            self._later.append(run)
            self._later_lines.update(range(line, line + entry.samples))
        else:
            self.come_first = True
        self._asked.append(MaskAsk(request, line, entry.drafts))

    @property
    def draws_first(self) -> bool:
        return bool(self._later or self._lazy)

    @property
    def memory(self) -> memoryview:
        """The masks of all lines."""
        return self._grammars.memory

    def mask(self, line: int) -> memoryview:
        """Of a line that has one."""
        nbytes = self._grammars.line_nbytes
        return self._grammars.memory[line * nbytes : (line + 1) * nbytes]

    def wait(self) -> frozenset[int]:
        """Lines of logits that have a mask."""
        if self._masked is None:
            self._masked = frozenset()
            if self._asked:
                lines, failures, _, forced = self._grammars.finish()
                if failures:
                    self._failures.update(failures)
                self._masked = frozenset(lines)
                for ask in self._asked:
                    ask.request.forced = forced.get(ask.request.id) if forced else None
        return self._masked

    def keep(self) -> None:
        """Wait for the masks, and keep those of lines that are drawn first: others are asked for before restore()."""
        self._kept = [(line, bytes(self.mask(line))) for line in self.wait() & self._later_lines]

    def restore(self) -> None:
        """The step has run, and is to be checked: put back what was kept, forget requests that ended meanwhile."""
        for line, mask in self._kept:
            self.mask(line)[:] = mask
        self._later, self._lazy = (
            [run for run in runs if run.request.state is not FINISHED] for runs in (self._later, self._lazy)
        )

    def first_lines(self) -> frozenset[int]:
        """Those that are to be masked before they are sampled."""
        return self.wait() - self._later_lines

    def stands(self, token_of) -> bool:
        """Whether nothing is to be done about what was drawn, asked of one request without drafts: most steps.
        token_of(line)."""
        if len(self._later) != 1 or self._lazy:
            return False
        run = self._later[0]
        request, line = run.request, run.line
        if run.drafts or request.params.logprobs is not None:
            return False
        masked = self.wait()
        if self._failures:
            return False
        token = token_of(line)
        if token < 0 or line not in masked:
            return True
        grammars = self._grammars
        if not grammars.memory[line * grammars.line_nbytes + (token >> 3)] >> (token & 7) & 1:
            return False
        grammars.note(request.id, False)
        return True

    def check(self, tokens: list[int], draw_again) -> None:
        """Settle what was drawn first. tokens, draw_again: as of check_masked."""
        masked = self.wait()
        if self._later:
            runs = self._later
            if self._failures:
                runs = [run for run in runs if run.request.id not in self._failures]
            check_masked(runs, tokens, masked, self._grammars, draw_again)
        if self._lazy:
            check_drawn(self._lazy, tokens, self._grammars, self._failures, draw_again)


class Masking:
    """The replays after the forward. logits f32 [lines, vocab]: of the step buffers. Memory is taken with the first
    masks."""

    def __init__(self, device, logits: Tensor):
        self._device, self._logits = device, logits
        self._lines, vocab = logits.shape
        self._words = (vocab + 31) // 32
        self._at = masks_at(self._lines)
        self._stagings: dict[int, Any] = {}  # by the number of the StepSet
        self._graphs: dict[tuple[int, int], Any] = {}
        self._line_graphs: dict[tuple[int, int], Any] = {}  # by StepSet and line

    def fill(self, buffers, rows: int, masks: Iterable[Any]):
        """Wait for the masks (StepMasks, RuleMasks); the Graph that masks and samples `rows` lines of logits. buffers: the
        runner's StepSet."""
        size = next((1 << bits for bits in range(16) if 1 << bits >= rows), rows)
        size = min(size, self._lines)
        graph = self._graphs.get((buffers.number, size)) or self._record(buffers, size)
        lines = [(line, some) for some in masks for line in some.first_lines()]
        place = self._stagings[buffers.number].host[: 4 * rows].cast("i")
        for row in range(rows):
            place[row] = -1
        for line, some in lines:
            self._write(buffers.number, line, some.mask(line))
        return graph

    def settle(self, buffers, rows: int, masks: StepMasks) -> None:
        """Hold what was sampled without a mask in `rows` lines against the grammars, and sample again what they refuse.
        What was submitted has run. For a device that does not run ahead: its logits are still there, and the host reads
        them."""
        sampler = buffers.sampler
        if masks.stands(sampler.token_of):
            return

        def draw_again(line: int, kept: int | None) -> int:
            logits, vocab, nbytes = self._logits.view(), self._logits.shape[1], 4 * self._words
            bits = int.from_bytes(masks.memory[line * nbytes : (line + 1) * nbytes], "little")
            if kept is None and not sampler.wants_logprobs and bits.bit_count() == 1:
                return sampler.put(line, bits.bit_length() - 1)
            graph = self._line_graphs.get((buffers.number, line)) or self._record_line(buffers, line)
            self._write(buffers.number, line, masks.mask(line))
            sampler.draw_again(line, SECOND_DRAW)
            graph.run()
            if kept is not None:
                sampler.keep(line, kept, logits[line * vocab : (line + 1) * vocab])
            return sampler.token_of(line)

        masks.check([sampler.token_of(line) for line in range(rows)], draw_again)

    def _write(self, number: int, line: int, mask: bytes | memoryview) -> None:
        host, nbytes = self._stagings[number].host, 4 * self._words
        host[4 * line : 4 * line + 4].cast("i")[0] = line
        at = self._at + line * nbytes
        host[at : at + nbytes] = mask

    def _staging(self, number: int):
        staging = self._stagings.get(number)
        if staging is None:
            staging = self._stagings[number] = masks_staging(self._device, self._logits)
        return staging

    def reserve(self, numbers: Iterable[int]) -> None:
        """Allocate what the first masks do. numbers: of the step buffers."""
        for number in numbers:
            self._staging(number)

    def _record_line(self, buffers, line: int):
        """Mask and sample one line of logits."""
        buffer = self._staging(buffers.number).buffer
        recorder = self._device.record()
        vocab = self._logits.shape[1]
        logits = Tensor(self._logits.buffer, (1, vocab), "f32", self._logits.offset + 4 * line * vocab)
        mask_logits(
            recorder,
            logits,
            Tensor(buffer, (self._lines, self._words), "i32", self._at),
            Tensor(buffer, (1,), "i32", 4 * line),
        )
        buffers.sampler.record(recorder, logits, line)
        graph = self._line_graphs[buffers.number, line] = recorder.finish()
        return graph

    def _record(self, buffers, size: int):
        staging = self._staging(buffers.number)
        recorder = self._device.record()
        rows = recorder.symbol("rows", size)
        recorder.upload(staging, 0, self._at + 4 * size * self._words)
        logits = self._logits.with_rows(rows)
        mask = Tensor(staging.buffer, (self._lines, self._words), "i32", self._at)
        line_of_row = Tensor(staging.buffer, (self._lines,), "i32").with_rows(rows)
        mask_logits(recorder, logits, mask, line_of_row)
        buffers.sampler.record(recorder, logits)
        recorder.download(*buffers.results)
        graph = self._graphs[buffers.number, size] = recorder.finish()
        return graph

    def close(self) -> None:
        """Drop the graphs."""
        for graph in (*self._graphs.values(), *self._line_graphs.values()):
            graph.close()
        self._graphs.clear()
        self._line_graphs.clear()
