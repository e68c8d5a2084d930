"""What the host tells the device for one step, in one piece of memory that is uploaded at once.

The token arrays stand at its end, closely packed for each recording's size: a decode step of one token uploads 16
bytes of them, a prompt chunk 16 bytes a token.
"""

from typing import NamedTuple

from zse.cache.pages import BLOCK
from zse.engine.config import ResolvedConfig
from zse.plan.record import StepBuffers
from zse.sampling.state import SamplerState
from zse.tensor import Tensor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.runtime.device import Staging

ALIGN = 256
# Lines of the page table behind the requests', for jobs (engine/forwards.py).
JOB_ROWS = 8


class StepArrays(NamedTuple):
    """Host views of the token arrays for recordings of one size, i32 each; source: where the token's id comes from: -1
    for token_ids, else the line of the step before that sampled it."""

    token_ids: memoryview
    positions: memoryview
    token_row: memoryview
    source: memoryview


class StepInputs:
    """The inputs of a step in one Staging: the sampler's, pages that are new in the page table, the tokens.

    max_tokens: of the largest step; max_rows: lines of logits; sampler_nbytes: the sampler's part, which comes first.
    page_index, page_value i32 [max_updates]: page_table[index] = value, page_count of them.
    """

    def __init__(self, device, *, max_tokens: int, max_rows: int, max_updates: int, sampler_nbytes: int = 0):
        self.max_tokens, self.max_updates = max_tokens, max_updates
        at = _align(sampler_nbytes)
        places = {}
        for name, count in (
            ("logit_rows", max_rows),
            ("page_count", 1),
            ("page_index", max_updates),
            ("page_value", max_updates),
        ):
            places[name] = at, count
            at = _align(at + 4 * count)
        self._tokens_at = at
        self.staging = device.staging(at + 16 * max_tokens, label="step")
        self.tensors = {
            name: Tensor(self.staging.buffer, (count,), "i32", start) for name, (start, count) in places.items()
        }
        self.logit_rows, self.page_count, self.page_index, self.page_value = (
            self._view(start, count) for start, count in places.values()
        )
        self._arrays: dict[int, StepArrays] = {}

    def _view(self, start: int, count: int) -> memoryview:
        return self.staging.host[start : start + 4 * count].cast("i")

    def arrays(self, size: int) -> StepArrays:
        """The host's token arrays of recordings for up to `size` tokens."""
        found = self._arrays.get(size)
        if found is None:
            found = self._arrays[size] = StepArrays(
                *(self._view(self._tokens_at + 4 * size * index, size) for index in range(4))
            )
        return found

    def buffers(self, size: int, page_table: Tensor, logits: Tensor) -> tuple[StepBuffers, Tensor]:
        """The same arrays as the kernels see them, and `source`."""
        token_ids, positions, token_row, source = (
            Tensor(self.staging.buffer, (size,), "i32", self._tokens_at + 4 * size * index) for index in range(4)
        )
        return StepBuffers(token_ids, positions, token_row, page_table, self.tensors["logit_rows"], logits), source

    def upload(self, recorder, size: int) -> None:
        """Record the upload of everything that a recording of `size` reads."""
        recorder.upload(self.staging, 0, self._tokens_at + 16 * size)


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def masks_at(lines: int) -> int:
    """Where in masks_staging() the masks begin: before them stands each row's line."""
    return _align(4 * lines)


def masks_staging(device, logits: Tensor) -> "Staging":
    """What the masks of one step are uploaded from (engine/masking.py): a line of bits for each of the logits."""
    lines, vocab = logits.shape
    return device.staging(masks_at(lines) + 4 * lines * ((vocab + 31) // 32), label="masks")


def job_inputs(device, config: ResolvedConfig, lines: int, num_groups: int) -> tuple[StepInputs, "Staging"]:
    """Inputs of jobs (engine/forwards.py), and four words for each line of logits."""
    tokens = config.max_tokens_per_step
    inputs = StepInputs(
        device, max_tokens=tokens, max_rows=lines, max_updates=num_groups * new_blocks(tokens, JOB_ROWS)
    )
    return inputs, device.staging(16 * lines, label="step")


def job_sampler(device, logits: Tensor, history) -> SamplerState:
    """It finds alternatives for jobs."""
    return SamplerState(device, logits.shape[1], max_rows=logits.shape[0], max_tokens=1, history=history)


def new_blocks(max_tokens: int, max_rows: int) -> int:
    """Most entries of the page table that one step can need: one each BLOCK tokens, and one border a row."""
    return max_tokens // BLOCK + 2 * max_rows
