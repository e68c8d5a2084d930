"""Runs the block that predicts behind a model (zse.models.next_token, zse.models.eagle3) between the model's steps, on what they
leave: the stream behind the last layer, or what is kept between layers, which stands until the next step begins.

All drafts of a step are one recording: each is the token of the round behind it, which reads it where the sampler wrote it, so that
the host waits once."""

from array import array
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from zse.engine.config import ResolvedConfig
from zse.engine.runner import Runner
from zse.engine.step import FilledStep, StepSet
from zse.models.next_token import first_rows
from zse.plan.record import new_tensor
from zse.scheduler.batch import Batch, Entry, unread
from zse.tensor import Taken, Tensor

NARROW, WHOLE = "narrow", "whole"  # recordings with the first rows of the head, and with all


class BlockRunner(Runner):
    """A Runner of the block. model: the Runner of the model, whose logits it writes over. rounds: most drafts of a request. vocabulary:
    ids that it can draft with alone, the first ones, 0: always with all. num_ids: that it can draft with at all, of a head that ranks
    share the first ones. Entries' requests have a `shift`: the place in the reply of
    their first token, less 1: random numbers are those of the reply."""

    def __init__(self, device, block, config: ResolvedConfig, model: Runner, rounds: int, vocabulary: int = 0):
        self._rounds, self._shared_results = rounds, model.drafted
        super().__init__(device, block, config, runs_ahead=False, grouped=False, logits=model.logits)
        kept = model.planner.kept
        self._model_hidden = model.planner.hidden if kept is None else kept.streams
        # Whether the model's next step can be fed with drafts that the host has not read.
        self.feeds = model.runs_ahead
        self._started: tuple[Any, list[array]] | None = None
        self._rows: Sequence[int] = ()
        self._counts: Sequence[int] = ()
        self._lines_a_round = 1
        head = block.weights["head"]
        self.num_ids = block.config.vocab_size if block.config.eagle else head.shape[0]
        self._narrow = first_rows(head, vocabulary)
        self.vocabulary = self._narrow.shape[0] % head.shape[0]
        # The rows of the requests that have drafts, their positions in each round behind the first; then the rows of the model's
        # stream that a run takes.
        rows, count = config.max_rows, config.max_tokens_per_step
        self._staging = device.staging(4 * (rounds * rows + count), label="step")
        words = self._staging.host.cast("i")
        self._arrays = [words[rows * number : rows * (number + 1)] for number in range(rounds)]
        self._places = words[rows * rounds :]
        self._in_order = new_tensor(device, "step", "i32", rows)
        device.write(self._in_order, array("i", range(rows)))
        self._wanted_first = self._likely()

    def _likely(self) -> list[tuple[str, int, int]]:
        """Recordings that are made when there is time: most drafts first."""
        most, sizes = self.size_for("decode", self.config.max_rows), self.planner.sizes
        found = []
        for size in sizes:
            if size <= most:
                last = self.size_for("mixed", size * (1 + self._rounds))
                first_runs = ("decode", size), *(("mixed", tokens) for tokens in sizes if size < tokens <= last)
                for rounds in range(self._rounds, 0, -1):
                    variant = self._variant_of(rounds, size, self.vocabulary > 0)
                    found += [(kind + variant, tokens, 0) for kind, tokens in first_runs]
        return found

    def _variant_of(self, rounds: int, size: int, is_narrow: bool) -> str:
        return f" {NARROW if is_narrow else WHOLE} {rounds}x{min(size, self.config.max_rows)}"

    @property
    def num_recorded(self) -> int:
        """Recordings so far: a step that makes one takes long."""
        return len(self._graphs)

    def start_pairs(
        self, entries: list[Entry], rows: Sequence[int], counts: Sequence[int] = (), is_narrow: bool = False
    ) -> list[array]:
        """Run entries whose tokens stand behind the states in `rows` of the model's last step, until read_drafts(). counts: the
        drafts that each entry is to have behind its last token, where all sample; is_narrow: of the first ids alone. The drafts, as
        unread() says."""
        self._rows, self._counts, self._variant, self._ahead = rows, counts, "", 0
        if counts:
            size = self.size_for("decode", len(counts))
            self._ahead, self._lines_a_round = max(counts) - 1, min(size, self.config.max_rows)
            self._variant = self._variant_of(max(counts), size, is_narrow and self.vocabulary > 0)
        submitted, step = self.submit(Batch(entries, 0, [])), self._lines_a_round
        places = [array("i", range(line, line + step * count, step)) for line, count in enumerate(counts)]
        self._started = submitted, places
        first = submitted[1].tokens.offset // 4
        return [array("i", [unread(first + place) for place in each]) for each in places]

    def read_drafts(self) -> list[array]:
        """Of each entry that was to have some; fewer where logits were not finite. Waits for what start_pairs() began."""
        assert self._started is not None
        (submitted, places), self._started = self._started, None
        lines = self.collect(submitted)
        return [array("i", takewhile(lambda token: token >= 0, [lines[at][0] for at in each])) for each in places]

    def fill(self, batch: Batch, masked: bool = False) -> FilledStep:
        step = super().fill(batch, masked)
        self._places[: len(self._rows)] = array("i", self._rows)
        if self._ahead:
            token_row, *positions = self._arrays
            for line, (entry, count) in enumerate(zip(batch.entries, self._counts, strict=True)):
                end = entry.start + entry.count
                token_row[line] = entry.request.row
                # Who wants fewer goes on at its last place, which has a page and is written over.
                for number in range(self._ahead):
                    positions[number][line] = end + min(number, count - 1)
                self._table.write(step.buffers.inputs, entry, end + min(self._ahead, count))
        return step

    def _prepare(self, batch: Batch, sampling: list[Entry], buffers: StepSet) -> None:
        """The lines of each round stand behind those of the one before, as many as the recording has room for."""
        requests: list[Any] = [entry.request for entry in sampling]
        lengths = [entry.start + entry.count + request.shift for entry, request in zip(sampling, requests, strict=True)]
        left = self._lines_a_round - len(requests)
        lines, places = requests[:], lengths[:]
        for number in range(1, self._ahead + 1):
            lines += requests[-1:] * left + requests
            places += [0] * left + [length + number for length in lengths]
        buffers.sampler.prepare(lines, places)

    def _record_step(self, recorder, buffers: StepSet, parts: list[str], options: dict[str, Any]) -> None:
        recorder.upload(self._staging)
        rounds, size = map(int, parts[1].split("x")) if parts else (1, self._lines)
        step, logits = options["step"], options["step"].logits
        is_narrow = NARROW in parts
        logits = logits._replace(shape=(logits.shape[0], self.vocabulary if is_narrow else self.num_ids))
        if is_narrow:
            options["instead"] = {"head": self._narrow}
        staging, rows = self._staging.buffer, self.config.max_rows
        *arrays, places = (Tensor(staging, (rows,), "i32", 4 * rows * number) for number in range(1 + self._rounds))
        options["step"] = step._replace(logits=logits)
        taken = Taken(self._model_hidden, places._replace(shape=(self.config.max_tokens_per_step,)))
        drawn = self.planner.record(recorder, taken=taken, **options)
        sampler, count, wanted = buffers.sampler, drawn.shape[0], step.logit_rows
        sampler.record(recorder, drawn)
        if options["every_token"]:
            wanted = self._in_order
        for number in range(1, rounds):
            tokens = sampler.tokens
            at = tokens.offset + 4 * size * (number - 1)
            options |= dict(max_tokens=size, every_token=True, longest_run=1, tokens=count)
            options["step"] = step._replace(
                token_ids=Tensor(tokens.buffer, (size,), "i32", at),
                positions=arrays[number],
                token_row=arrays[0],
                logits=logits,
            )
            taken = Taken(self.planner.hidden, wanted, True)
            sampler.record(recorder, self.planner.record(recorder, taken=taken, **options), size * number)
            wanted = self._in_order
        recorder.download(*buffers.results)
