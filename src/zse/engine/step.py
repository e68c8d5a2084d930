"""What the host tells the device for one step: its inputs, in one piece of memory that is uploaded at once, and the
page table; and what masks and jobs take beside.

The token arrays stand at the inputs' end, closely packed for each recording's size: a decode step of one token uploads
16 bytes of them, a prompt chunk 16 bytes a token."""

import functools
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from zse.cache.groups import PageGeometry
from zse.cache.layout import KVCache
from zse.cache.pages import BLOCK, blocks_for
from zse.engine.config import BLOCK_DRAFTS, ResolvedConfig
from zse.plan.record import StepBuffers, new_tensor
from zse.sampling.state import SamplerState, result_nbytes
from zse.scheduler.batch import Entry
from zse.scheduler.request import Request
from zse.tensor import OwnRows, Tensor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.runtime.device import Staging

ALIGN = 256
# Lines of logits kept at least: jobs read so many at a time. Lines that are not used are never touched.
SCORE_ROWS = 16
# Lines of the page table behind the requests', for jobs (engine/forwards.py). An encoder's texts are short, and all of
# its work.
JOB_ROWS, ENCODER_ROWS = 8, 32
# Tokens of a prompt that a first request on a GPU is likely not to have more of: its recording is made first. And those of
# one of a few words, behind the recordings that every request wants.
SHORT_PROMPT, LEAST_PROMPT = 64, 16


# What drafts with a step's streams → which it reads (Planner's whole_stream).
READ_STREAMS = {"mtp": "end", "eagle3": "layers"}


class StepArrays(NamedTuple):
    """Host views of the token arrays for recordings of one size, i32 each; source: where the token's id comes from: -1
    for token_ids, else its place among the results of all steps in flight."""

    token_ids: memoryview
    positions: memoryview
    token_row: memoryview
    source: memoryview


class StepInputs:
    """The inputs of a step in one Staging: the sampler's, pages that are new in the page table, the tokens.

    max_tokens: of the largest step; max_rows: lines of logits; sampler_nbytes: the sampler's part, which comes first.
    page_index, page_value i32 [max_updates]: page_table[index] = value, page_count of them. adapter_slots i32
    [adapter_rows]: the slot of each row's adapter, -1: none. max_runs: sequences of a step, of a model with a state;
    else 0; keeps: whether runs may leave states behind tokens before their last (Entry.kept). owners i32 [owner_rows]: the
    rank that has the pages of each row of the page table, where each has its own; such ranks find their tokens among all
    (fill_own)."""

    def __init__(
        self,
        device,
        *,
        max_tokens: int,
        max_rows: int,
        max_updates: int,
        sampler_nbytes: int = 0,
        adapter_rows: int = 0,
        max_runs: int = 0,
        keeps: bool = False,
        owner_rows: int = 0,
    ):
        self.max_tokens, self.max_updates, self.max_runs, self.keeps = max_tokens, max_updates, max_runs, keeps
        at = _align(sampler_nbytes)
        places = {}
        for name, count in (
            ("logit_rows", max_rows),
            ("page_count", 1),
            ("page_index", max_updates),
            ("page_value", max_updates),
            ("adapter_slots", adapter_rows),
            ("run_start", max_runs and max_runs + 1),
            ("run_slot", max_runs),
            ("owners", owner_rows),
        ):
            places[name] = at, count
            at = _align(at + 4 * count)
        self._tokens_at = at
        self._keeps_at = 36 if owner_rows else 16  # bytes of a token before `leave`
        self._token_bytes = self._keeps_at + 4 * keeps
        self.staging = device.staging(at + self._token_bytes * max_tokens, label="step")
        self.tensors = {
            name: Tensor(self.staging.buffer, (count,), "i32", start) for name, (start, count) in places.items()
        }
        views = [self._view(start, count) for start, count in places.values()]
        self.logit_rows, self.page_count, self.page_index, self.page_value, self.adapter_slots = views[:5]
        self._run_start, self._run_slot, self.owners = views[5:]
        self.arrays = functools.cache(self._arrays_of)

    def _view(self, start: int, count: int) -> memoryview:
        return self.staging.host[start : start + 4 * count].cast("i")

    def _arrays_of(self, size: int) -> StepArrays:
        """The host's token arrays of recordings for up to `size` tokens."""
        return StepArrays(*(self._view(self._tokens_at + 4 * size * index, size) for index in range(4)))

    def buffers(self, size: int, page_table: Tensor, logits: Tensor, keeps: bool = False) -> tuple[StepBuffers, Tensor]:
        """The same arrays as the kernels see them, and `source`. keeps: with `leave`, where there is one."""
        token_ids, positions, token_row, source, *own = (
            Tensor(self.staging.buffer, (size,), "i32", self._tokens_at + 4 * size * index)
            for index in range(self._keeps_at // 4)
        )
        runs: list[Any] = [self.tensors[name] if self.max_runs else None for name in ("run_start", "run_slot")]
        logit_rows = self.tensors["logit_rows"]
        if keeps and self.keeps:
            runs.append(Tensor(self.staging.buffer, (size,), "i32", self._tokens_at + self._keeps_at * size))
        found = StepBuffers(token_ids, positions, token_row, page_table, logit_rows, logits, *runs)
        return found._replace(own=OwnRows(*own) if own else None), source

    def fill_own(self, size: int, tokens: int, rank: int) -> int:
        """Which of the first `tokens` of a recording of `size` are of rows whose pages are on `rank`; how many."""
        arrays, owners = self.arrays(size), self.owners
        rows, positions, token_row, place, owner = (
            self._view(self._tokens_at + 4 * size * index, size) for index in range(4, 9)
        )
        ranks_of = [owners[row] for row in arrays.token_row[:tokens]]
        owner[:tokens] = array("i", ranks_of)
        mine = [index for index, each in enumerate(ranks_of) if each == rank]
        count = len(mine)
        rows[:count] = array("i", mine)
        positions[:count] = array("i", [arrays.positions[index] for index in mine])
        token_row[:count] = array("i", [arrays.token_row[index] for index in mine])
        place[:tokens] = array("i", [self.max_tokens]) * tokens  # a row of zeros
        for at, index in enumerate(mine):
            place[index] = at
        return count

    def fill_runs(self, counts: list[int], slots: list[int]) -> None:
        """The tokens of each sequence of the batch, and the slot of its state."""
        number = len(slots)
        self._run_start[: number + 1] = array("i", accumulate(counts, initial=0))
        self._run_slot[:number] = array("i", slots)

    def fill_entries(self, entries: Sequence[Entry], size: int, decode: bool) -> None:
        """fill_runs() of a batch, and for a recording of `size` where its states are left; decode: one token an entry."""
        self.fill_runs([entry.count for entry in entries], [entry.slot for entry in entries])
        if self.keeps and not decode:
            leave = array("i", [-1]) * self._run_start[len(entries)]
            for end, entry in zip(self._run_start[1 : len(entries) + 1], entries, strict=True):
                if entry.kept:
                    leave[end - 1 - len(entry.kept) : end - 1] = array("i", entry.kept)
            self._view(self._tokens_at + self._keeps_at * size, len(leave))[:] = leave

    def sent(self, size: int) -> tuple[int, int]:
        """The bytes of the staging, from and to, that ranks without a sampler need for a recording of `size`."""
        return self.tensors["logit_rows"].offset, self._tokens_at + (16 + 4 * self.keeps) * size

    def upload(self, recorder, size: int, keeps: bool = False) -> None:
        """Record the upload of everything that a recording of `size` reads. keeps: as of buffers()."""
        recorder.upload(self.staging, 0, self._tokens_at + (self._token_bytes if keeps else self._keeps_at) * size)


@functools.lru_cache(maxsize=2)
def ascending(count: int) -> "memoryview[int]":
    """0, 1, … count - 1, i32."""
    return memoryview(array("i", range(count)))


def result_staging(device: Any, config: ResolvedConfig, nbytes: int) -> Any:
    """A Staging for what steps draw, and behind these bytes what a block draws between them, which the next step is fed with before
    the host has read it."""
    drafted = result_nbytes(config.draft_tokens * config.max_rows) if config.speculation in BLOCK_DRAFTS else 0
    return device.staging(nbytes + drafted, label="step")


def unread_ids(config: ResolvedConfig, before: "StepSet", drafted: tuple[Any, int], kind: str) -> list[Tensor]:
    """What a step of this kind may be fed with before the host has read it: the tokens of the step before, and drafts that a block
    has made behind it, at byte `drafted` of a Staging."""
    found = [before.sampler.tokens]
    if config.speculation in BLOCK_DRAFTS and kind != "decode":
        found.append(Tensor(drafted[0].buffer, (config.draft_tokens * config.max_rows,), "i32", drafted[1]))
    return found


def steps_in_flight(device: Any, share: Any) -> int:
    """Batches that are submitted and not collected, at most. share: of the model that the device has, or None: of a pipeline one
    for each rank."""
    return device.steps_in_flight + (share.size - 1 if share is not None and share.is_stage else 0)


def job_rows(model: Any) -> int:
    """Jobs at once of a ModelConfig."""
    return JOB_ROWS if model.causal else ENCODER_ROWS


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class StepSet(NamedTuple):
    """The inputs and results that steps use, by turns with others where several are under way.

    results: (Staging, byte, bytes): what is downloaded at the end, of a Staging for all sets: a token in flight is named by its
    place there. sampler: whose parameters stand in the inputs."""

    number: int
    inputs: StepInputs
    results: tuple[Any, int, int]
    sampler: SamplerState


class FilledStep(NamedTuple):
    """A batch whose inputs are written: the Graph to replay, with which symbols, in which buffers; its kind, its size
    and the buffers' number."""

    graph: Any
    symbols: dict[str, int]
    buffers: StepSet
    key: tuple[str, int, int]


class PageTable:
    """tensor: i32 [groups * (max_rows + jobs), blocks of max_context]: of each group of layers one table behind the
    other, whose last rows no request gets: jobs write their pages there.

    in_place: the host writes entries itself; else they go with a step's inputs. told(byte offset, entries): called for those that
    are too many for that. residents: for each row of requests
    which residency it describes (request, its number), and how many of its blocks are written."""

    def __init__(
        self,
        device,
        kv: KVCache,
        pages: PageGeometry,
        *,
        max_rows: int,
        jobs: int,
        max_context: int,
        in_place: bool,
        told: Any = None,
    ):
        self._device, self._kv, self._pages = device, kv, pages
        self.max_rows, self.max_blocks = max_rows, blocks_for(max_context)
        self._rows = max_rows + jobs
        self.group_entries = self._rows * self.max_blocks
        self.tensor = new_tensor(device, "step", "i32", self._rows * kv.num_groups, self.max_blocks)
        self.in_place, self._told = in_place, told
        self._view: Any = self.tensor.view() if in_place else None
        self.residents: list[tuple[Request | None, int, int]] = [(None, 0, 0)] * max_rows

    def write(self, inputs: StepInputs, entry: Entry, length: int) -> None:
        """Bring the request's row up to date for `length` tokens: only what is new since last time."""
        request, windows = entry.request, entry.windows
        row = request.row
        resident, residency, written = self.residents[row]
        if resident is not request or residency != request.residency:
            written = 0
        end = -(-length // BLOCK)
        if end <= written:
            return
        self._update(inputs, row, entry.pages, written, end)
        if self._kv.num_groups > 1:
            assert windows is not None, "the scheduler was made without this model's PageGeometry"
            first = max(written, windows.first * self._kv.blocks_per_page)
            for group, pages in enumerate(windows.pages, 1):
                self._update(inputs, row + group * self._rows, pages, first, end, group)
        self.residents[row] = (request, request.residency, end)

    def write_job(self, inputs: StepInputs, row: int, pages: list[int], length: int, first: int, end: int) -> None:
        """The entries of blocks first .. end - 1 of a sequence of `length` tokens that runs beside the requests, in row
        0 .. jobs - 1, in all groups."""
        for group, table in enumerate(self._pages.tables(pages, length)):
            self._update(inputs, self.max_rows + row + group * self._rows, table, first, end, group)

    def _update(self, inputs: StepInputs, row: int, pages: list[int], first: int, end: int, group: int = 0) -> None:
        """A group's entries of blocks first .. end - 1 of a sequence that has `pages`."""
        kv, view = self._kv, self._view
        at, count = row * self.max_blocks + first, inputs.page_count[0]
        if end - first == 1 and count < inputs.max_updates:  # as in most steps
            entry = kv.table_entry(pages, first, group)
            if view is not None:
                view[at] = entry
                return
            inputs.page_index[count], inputs.page_value[count] = at, entry
            inputs.page_count[0] = count + 1
            kv.map_to(pages[first // kv.blocks_per_page])
            return
        entries = kv.table_entries(pages, first, end, group)
        new = len(entries)
        if view is not None:
            view[at : at + new] = entries
            return
        for page in kv.pages_of(pages, first, end):
            kv.map_to(page)
        if count + new > inputs.max_updates:
            # The pages of a long prompt that was in the prefix cache.
            if self._told is not None:
                self._told(4 * at, entries)
            self._device.write(Tensor(self.tensor.buffer, (new,), "i32", 4 * at), entries)
            return
        inputs.page_index[count : count + new] = array("i", range(at, at + new))
        inputs.page_value[count : count + new] = entries
        inputs.page_count[0] = count + new


def masks_at(lines: int) -> int:
    """Where in masks_staging() the masks begin: before them stands each row's line."""
    return _align(4 * lines)


def masks_staging(device, logits: Tensor) -> "Staging":
    """What the masks of one step are uploaded from (engine/masking.py): a line of bits for each of the logits."""
    lines, vocab = logits.shape
    return device.staging(masks_at(lines) + 4 * lines * ((vocab + 31) // 32), label="masks")


def job_inputs(device, config: ResolvedConfig, lines: int, num_groups: int, jobs: int) -> tuple[StepInputs, "Staging"]:
    """Inputs of jobs (engine/forwards.py), and four words for each line of logits."""
    tokens, runs = config.max_tokens_per_step, jobs if config.state_slots else 0
    updates = num_groups * new_blocks(tokens, jobs)
    owners = config.max_rows + jobs if config.page_pools > 1 else 0
    inputs = StepInputs(
        device, max_tokens=tokens, max_rows=lines, max_updates=updates, max_runs=runs, owner_rows=owners
    )
    return inputs, device.staging(16 * lines, label="step")


def job_sampler(device, logits: Tensor, history) -> SamplerState:
    """It finds alternatives for jobs."""
    return SamplerState(device, logits.shape[1], max_rows=logits.shape[0], max_tokens=1, history=history)


def new_blocks(max_tokens: int, max_rows: int) -> int:
    """Most entries of the page table that one step can need: one each BLOCK tokens, and one border a row."""
    return max_tokens // BLOCK + 2 * max_rows


def first_recordings(runner: Any) -> list[tuple[str, int, int]]:
    """Of a Runner: (kind, size, number of the StepSet) of the graphs to record when there is time, in this order: a first
    request's first."""
    config, sizes = runner.config, runner.planner.sizes
    if not runner.model.config.causal:
        return []
    if runner.runs_ahead:
        numbers = range(runner.num_sets)
        prompts = [size for size in sizes if size > 1]
        short = runner.size_for("mixed", min(SHORT_PROMPT, config.max_tokens_per_step))
        least = runner.size_for("mixed", min(LEAST_PROMPT, config.max_tokens_per_step))
        first = [("mixed", short, 0), *(("decode", 1, number) for number in reversed(numbers)), ("mixed", least, 0)]
        first += [("mixed", size, number) for number in numbers for size in prompts if size >= short]
        first += [
            ("decode", size, number)
            for size in sizes[1:]
            for number in numbers
            if sizes[sizes.index(size) - 1] < config.max_rows
        ]
        first += [
            ("verify", size, number)
            for size in sizes[1:]
            for number in numbers
            if config.max_drafts and sizes[sizes.index(size) - 1] < config.max_lines
        ]
    else:
        split = runner.size_for("mixed", 2)
        kinds = [("mixed", config.max_tokens_per_step), ("decode", 1), ("mixed", split)]
        if config.max_lines > 1:
            kinds.append(("decode", split))
        if config.max_lines > split:
            kinds.append(("decode", sizes[-1]))
        first = [(*kind, number) for kind in kinds for number in range(runner.num_sets)]
    return list(dict.fromkeys(first))


def logit_rows(max_lines: int, max_tokens_per_step: int) -> int:
    """Lines of logits that the step buffers hold; max_lines: of a step that samples."""
    return max(max_lines, min(SCORE_ROWS, max_tokens_per_step))
