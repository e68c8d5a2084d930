"""Masks of a grammar on their way to the sampler.

A step with masks is two replays: the forward, and, once the grammar process has given the masks (structured/service.py),
masking and sampling. So the masks are computed while the model runs, and steps without masks are recorded without them.
"""

from typing import Any

from zse.errors import RequestError
from zse.kernels.mask import mask_logits
from zse.structured.service import Grammars
from zse.tensor import Tensor

_ALIGN = 256


class StepMasks:
    """The masks of one step, which are being computed. failures: filled by wait() with requests whose grammar cannot go
    on: what is sampled for them is to be dropped."""

    def __init__(self, grammars: Grammars, failures: dict[int, RequestError]):
        self._grammars, self._failures = grammars, failures

    @classmethod
    def of_batch(cls, batch, grammars: Grammars, failures: dict[int, RequestError]) -> "StepMasks | None":
        """Ask for the masks of a batch; None when it has no request with a grammar."""
        jobs: list[tuple] = []
        line = 0
        for entry in batch.entries:
            if entry.samples:
                request = entry.request
                if request.options.structure is not None:
                    jobs.append((request.id, request, line, list(entry.drafts)))
                line += entry.samples
        if not jobs:
            return None
        grammars.begin(jobs)
        return cls(grammars, failures)

    def wait(self) -> tuple[list[int], memoryview]:
        """(lines of logits that have a mask, the masks of all lines)."""
        masks = self._grammars.finish()
        self._failures.update(masks.failures)
        return masks.lines, self._grammars.memory


def masks_nbytes(lines: int, vocab_size: int) -> int:
    """Device bytes of the masks of one step, for the memory plan."""
    return _ALIGN + 4 * lines + 4 * lines * ((vocab_size + 31) // 32)


class Masking:
    """The second replay. logits f32 [lines, vocab]: of the step buffers. Memory is taken with the first masks."""

    def __init__(self, device, logits: Tensor):
        self._device, self._logits = device, logits
        self._lines, vocab = logits.shape
        self._words = (vocab + 31) // 32
        self._at = -(-4 * self._lines // _ALIGN) * _ALIGN
        self._stagings: dict[int, Any] = {}         # by the number of the turn
        self._graphs: dict[tuple[int, int], Any] = {}

    def submit(self, turn, rows: int, masks: StepMasks):
        """Wait for the masks, then mask and sample `rows` lines of logits; the Ticket. turn: the runner's _Turn."""
        size = next((1 << bits for bits in range(16) if 1 << bits >= rows), rows)
        size = min(size, self._lines)
        graph = self._graphs.get((turn.number, size)) or self._record(turn, size)
        lines, memory = masks.wait()
        host = self._stagings[turn.number].host
        place, nbytes = host[:4 * rows].cast("i"), 4 * self._words
        for row in range(rows):
            place[row] = -1
        for line in lines:
            place[line] = line
            at = self._at + line * nbytes
            host[at:at + nbytes] = memory[line * nbytes:(line + 1) * nbytes]
        return graph.submit(rows=rows)

    def _record(self, turn, size: int):
        staging = self._stagings.get(turn.number)
        if staging is None:
            staging = self._stagings[turn.number] = self._device.staging(
                self._at + 4 * self._lines * self._words, label="masks")
        recorder = self._device.record()
        rows = recorder.symbol("rows", size)
        recorder.upload(staging, 0, self._at + 4 * size * self._words)
        logits = self._logits.with_rows(rows)
        mask = Tensor(staging.buffer, (self._lines, self._words), "i32", self._at)
        line_of_row = Tensor(staging.buffer, (self._lines,), "i32").with_rows(rows)
        mask_logits(recorder, logits, mask, line_of_row)
        turn.sampler.record(recorder, logits)
        recorder.download(turn.results)
        graph = self._graphs[turn.number, size] = recorder.finish()
        return graph

    def close(self) -> None:
        """Drop the graphs."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
