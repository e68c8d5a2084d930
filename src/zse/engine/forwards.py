"""Forwards without sampling, for jobs (engine/jobs.py): the hidden states of a chunk, and any of its lines of logits.

They use the Runner's planner, pages and logits between its steps, and inputs of their own: what is submitted and not
collected yet is not disturbed. Everything here waits for the device before it returns.
"""

from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

from zse.cache.pages import blocks_for
from zse.engine import pooling
from zse.engine.messages import TokenLogprob
from zse.engine.step import PageTable, StepInputs, job_inputs, job_rows, job_sampler
from zse.kernels import page_table as page_tables
from zse.kernels.sample import logprob_rows
from zse.lazy import numpy as np
from zse.sampling.params import SamplingParams
from zse.sampling.state import SamplerState
from zse.tensor import Tensor

HIDDEN, HEAD = KINDS = ("hidden", "head")  # of recordings, as ranks know them


class Piece(NamedTuple):
    """Part of a sequence: all of its tokens, which of them run, its pages, and its line, one of job_rows(). second:
    where a second text begins, whose tokens are of type 1 to an encoder; 0: nowhere. slot: of its state, of a model
    with one."""

    tokens: array
    start: int
    num_tokens: int
    pages: list[int]
    row: int
    second: int = 0
    slot: int = 0


class Line(NamedTuple):
    """What is asked of one token of a chunk. place: in the chunk; target: the token whose log-probability is wanted;
    top: how many alternatives."""

    place: int
    target: int
    top: int = 0


class _TopRequest(NamedTuple):
    """A line as the sampler's parameters see it."""

    params: SamplingParams
    seed: int = 0
    row: int = 0
    prompt_len: int = 0


class Forwards:
    """planner, config, table, logits, history, ranks: the Runner's. size_for(tokens): the size of recording for them. What is
    needed on the device is made when first asked for."""

    def __init__(
        self,
        planner,
        config,
        *,
        table: PageTable,
        logits: Tensor,
        history,
        size_for: Callable[[int], int],
        ranks: Any = None,
    ):
        self._ranks = ranks
        self._planner, self._device, self._config = planner, planner.device, config
        self._table, self._logits, self._history, self._size_for = table, logits, history, size_for
        self.max_lines: int = logits.shape[0]
        self._inputs: StepInputs | None = None
        self._graphs: dict[tuple[str, int], Any] = {}
        self._sampler: Any = None
        self._top_of: dict[int, _TopRequest] = {}
        self._final_norm: Any = None
        self._classifier: pooling.Classifier | None = None
        self._dense: pooling.DenseModules | None = None

    def run(self, pieces: list[Piece]) -> None:
        """Run a chunk. Its hidden states stay readable until anything else runs; K and V are in the pages."""
        inputs = self._inputs = self._inputs or self._make_inputs()
        tokens = sum(piece.num_tokens for piece in pieces)
        size = self._size_for(tokens)
        arrays = inputs.arrays(size)
        inputs.page_count[0] = 0
        at = context = 0
        for piece in pieces:
            end, last, row = piece.start + piece.num_tokens, at + piece.num_tokens, self._config.max_rows + piece.row
            self._table.write_job(
                inputs, piece.row, piece.pages, len(piece.tokens), blocks_for(piece.start), blocks_for(end)
            )
            arrays.token_ids[at:last] = piece.tokens[piece.start : end]
            arrays.source[at:last] = self._sources(piece)
            arrays.positions[at:last] = array("i", range(piece.start, end))
            arrays.token_row[at:last] = array("i", [row]) * piece.num_tokens
            if inputs.owners:
                inputs.owners[row] = piece.pages.rank  # type: ignore[attr-defined]
            at, context = last, max(context, end)
        if inputs.max_runs:
            inputs.fill_runs([piece.num_tokens for piece in pieces], [piece.slot for piece in pieces])
        graph = self._graphs.get((HIDDEN, size)) or self._record_hidden(size)
        symbols = self._planner.symbols(tokens, 1, context, runs=len(pieces))
        used = {name: symbols[name] for name in graph.symbols}
        if self._ranks is not None:
            self._ranks.replay((HIDDEN, size, 0), used, inputs.staging, *inputs.sent(size), self._planner.kv)
            if inputs.owners:
                used["own"] = inputs.fill_own(size, tokens, self._ranks.group.rank)
        graph.submit(**used).wait()

    def logprobs(self, lines: list[Line]) -> list[TokenLogprob]:
        """Log-probabilities of at most `max_lines` lines of the chunk that ran last. NaN where logits are not
        finite."""
        tops = any(line.top for line in lines)
        count, words = len(lines), self._words()
        words[0][:count] = array("i", [line.place for line in lines])
        words[1][:count] = array("i", [line.target for line in lines])
        if tops:
            self._sampler = self._sampler or self._make_sampler()
            self._sampler.prepare([self._top_request(line.top) for line in lines], [0] * count)
        kind = "tops" if tops else HEAD
        graph = self._graphs.get((kind, 0)) or self._record_head(tops)
        if self._ranks is not None and not self._ranks.is_pipeline:
            asked = self._head_words
            self._ranks.replay((HEAD, 0, 0), {"rows": count}, asked, 0, 4 * self.max_lines, self._planner.kv)
        graph.submit(rows=count).wait()
        found = words[2][:count].tolist()
        if not tops:
            return [TokenLogprob(value, []) for value in found]
        return [
            TokenLogprob(
                value,
                []
                if token < 0 or result is None
                else [(id, value if id == line.target else other) for id, other in result[1]],
            )
            for value, (token, result), line in zip(found, self._sampler.read(), lines, strict=True)
        ]

    def top1(self, count: int) -> list[int]:
        """The likeliest token of each of the first `count` lines that logprobs() was asked for last."""
        return self._words()[3][:count].tolist()

    def logits(self, count: int) -> "memoryview[float]":
        """f32 [count * vocab_size] of the first `count` of those lines; valid until anything else runs."""
        data = self._device.read(self._logits.with_rows(count))
        return memoryview(data).cast("f")

    def hidden(self, place: int, count: int):
        """Hidden states after the final norm, NumPy [count, hidden_size], of the chunk's tokens from `place` on: of an
        encoder as they are, f32, until anything else runs; of what norms_on_host float64, the norm computed here: on no
        device is its f32 output needed otherwise."""
        planner = self._planner
        tensor = planner.hidden
        width = tensor.shape[1]
        part = Tensor(tensor.buffer, (count, width), "f32", tensor.offset + 4 * width * place)
        lines = np.frombuffer(self._device.read(part), np.float32).reshape(count, width)
        if not planner.forward.norms_on_host:
            return lines
        lines = lines.astype(np.float64)
        if self._final_norm is None:
            self._final_norm = self._vector("final_norm")
        return lines / np.sqrt((lines * lines).mean(axis=1, keepdims=True) + planner.config.norm_eps) * self._final_norm

    def classify(self, pooled):
        """A cross-encoder's logits, float64 NumPy [num_labels], of a pooled state."""
        if self._classifier is None:
            self._classifier = pooling.Classifier(self._planner.forward, self._vector)
        return self._classifier(pooled)

    def dense(self, pooled):
        """What the model's dense modules make of pooled states, float64 NumPy [texts, embedding_size]; without such
        modules the states themselves."""
        if not self._planner.config.dense:
            return pooled
        if self._dense is None:
            self._dense = pooling.DenseModules(self._planner.config.dense, self._vector)
        return self._dense(pooled)

    def _vector(self, name: str):
        """A vector of the model in float64, None where there is none."""
        vector = self._planner.model.vectors.get(name)
        return None if vector is None else np.frombuffer(self._device.read(vector), np.float32).astype(np.float64)

    def _sources(self, piece: Piece) -> array:
        """For each token -1: its id is known; to an encoder its type."""
        if self._planner.config.causal:
            return array("i", [-1]) * piece.num_tokens
        second = piece.second or piece.num_tokens
        return array("i", [0]) * second + array("i", [1]) * (piece.num_tokens - second)

    def close(self) -> None:
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()

    def reserve(self) -> None:
        """Allocate what the first chunk and the first alternatives do."""
        self._inputs = self._inputs or self._make_inputs()
        self._sampler = self._sampler or self._make_sampler()

    # -- recordings

    @property
    def inputs(self) -> StepInputs:
        """Of chunks."""
        self._inputs = self._inputs or self._make_inputs()
        return self._inputs

    def followed(self, kind: str, size: int) -> tuple[Any, Any]:
        """As Runner.followed(): of a chunk, or of the head alone."""
        inputs = self._inputs = self._inputs or self._make_inputs()
        if kind == HIDDEN:
            return self._graphs.get((HIDDEN, size)) or self._record_hidden(size), inputs.staging
        return self._graphs.get((HEAD, 0)) or self._record_head(False), self._head_words

    def _make_inputs(self) -> StepInputs:
        inputs, self._head_words = job_inputs(
            self._device, self._config, self.max_lines, self._planner.kv.num_groups, job_rows(self._planner.config)
        )
        return inputs

    def _make_sampler(self) -> SamplerState:
        return job_sampler(self._device, self._logits, self._history)

    def _top_request(self, top: int) -> _TopRequest:
        found = self._top_of.get(top)
        if found is None:
            found = self._top_of[top] = _TopRequest(SamplingParams(temperature=0.0, logprobs=top))
        return found

    def _words(self) -> list[memoryview]:
        """places, targets, log-probabilities and likeliest tokens of the lines."""
        nbytes = 4 * self.max_lines
        return [
            self._head_words.host[nbytes * index : nbytes * (index + 1)].cast(format)  # type: ignore[call-overload]
            for index, format in enumerate("iifi")
        ]

    def _record_hidden(self, size: int):
        inputs = self._inputs
        assert inputs is not None
        if self._ranks is not None:
            self._ranks.record((HIDDEN, size, 0))
        recorder = self._device.record()
        step, types = inputs.buffers(size, self._table.tensor, self._logits)
        inputs.upload(recorder, size)
        if not self._table.in_place:
            tensors = inputs.tensors
            page_tables.update_pages(
                recorder, tensors["page_count"], tensors["page_index"], tensors["page_value"], step.page_table
            )
        self._planner.record_hidden(recorder, step=step, max_tokens=size, types=types)
        graph = self._graphs[HIDDEN, size] = recorder.finish()
        return graph

    def _record_head(self, tops: bool):
        if self._ranks is not None and not self._ranks.is_pipeline:
            self._ranks.record((HEAD, 0, 0))
        recorder, count = self._device.record(), self.max_lines
        wanted, targets, logprob, argmax = (
            Tensor(self._head_words.buffer, (count,), dtype, 4 * count * index)
            for index, dtype in enumerate(("i32", "i32", "f32", "i32"))
        )
        recorder.upload(self._head_words)
        self._planner.record_head(recorder, wanted, self._logits)
        rows = recorder.symbol("rows", count)
        logits = self._logits.with_rows(rows)
        if self._ranks is not None and not self._ranks.leads:
            graph = self._graphs[HEAD, 0] = recorder.finish()
            return graph
        logprob_rows(recorder, logits, *(tensor.with_rows(rows) for tensor in (targets, logprob, argmax)))
        if tops:
            self._sampler.record(recorder, logits)
        recorder.download(self._head_words)
        graph = self._graphs["tops" if tops else HEAD, 0] = recorder.finish()
        return graph
