"""Turns a scheduler's Batch into one Graph replay: fills the step buffers, picks the recording, reads what was sampled.

Device memory and graphs have this one writer. Everything here is flat arrays and memoryviews: a decode step of eight
rows costs tens of microseconds of Python.
"""

from array import array
from typing import Any

from zse.cache.pages import PAGE, pages_for
from zse.engine.config import EngineConfig, ResolvedConfig
from zse.engine.messages import TokenLogprob
from zse.errors import RequestError
from zse.kernels.sample import logprob_rows
from zse.scheduler.request import Request
from zse.scheduler.scheduler import Batch, Entry
from zse.tensor import Tensor

# Lines of logits kept at least: score() reads so many at a time. Lines that are not used are never touched.
SCORE_ROWS = 16


def logit_rows(config: EngineConfig | ResolvedConfig) -> int:
    """Lines of logits that the step buffers hold."""
    return max(config.max_rows, min(SCORE_ROWS, config.max_tokens_per_step))


class Runner:
    """model: zse.models.load.Model, whose weights need not be loaded yet; run() must not be called before they are."""

    def __init__(self, device, model, config: ResolvedConfig):
        from zse.cache.layout import KVCache
        from zse.models.decoder import SPLIT_TOKENS, Decoder, StepBuffers
        from zse.sampling.state import SamplerState
        self.device, self.model, self.config = device, model, config
        self._max_pages = pages_for(config.max_context)
        lines = logit_rows(config)
        self.kv = KVCache(device, model.config, config.num_pages, config.kv_dtype)
        self.buffers = buffers = StepBuffers.allocate(
            device, model.config, max_tokens=config.max_tokens_per_step, max_rows=lines, max_pages=self._max_pages)
        self.decoder = Decoder(device, model, self.kv, buffers, activations=config.activations)
        # Running requests hold pages for all tokens but the last.
        self.sampler = SamplerState(device, model.config.vocab_size, max_rows=config.max_rows,
                                    max_tokens=config.num_pages * PAGE + config.max_rows)
        self._targets, self._target_logprob, self._argmax = (
            Tensor(device.alloc(4 * lines, label="sampler"), (lines,), dtype) for dtype in ("i32", "f32", "i32"))
        self._split_tokens = min(SPLIT_TOKENS, config.max_tokens_per_step)
        self._token_ids, self._positions = buffers.token_ids.view(), buffers.positions.view()
        self._token_row, self._page_table = buffers.token_row.view(), buffers.page_table.view()
        self._logit_rows = buffers.logit_rows.view()
        self._ascending = memoryview(array("i", range(config.max_context)))
        self._graphs: dict[tuple[str, int], Any] = {}
        sizes = dict.fromkeys((config.max_tokens_per_step, self._split_tokens))
        self._wanted_first = [("mixed", size) for size in sizes]
        self._wanted_first.insert(1, ("decode", 1))
        if config.max_rows > 1:
            self._wanted_first.append(("decode", self._split_tokens))
        # For each row of the page table: whose stay it describes, and how many of its pages are written.
        self._residents: list[tuple[Request | None, int, int]] = [(None, 0, 0)] * lines

    # -- a step

    def run(self, batch: Batch) -> list[tuple[int, object]]:
        """Run one batch; (token, TokenLogprob | None) for each entry that samples, in order. Token -1: the logits were
        not finite."""
        entries = batch.entries
        decode = batch.num_tokens == batch.num_samples     # one token an entry, each with logits
        context = self._fill_decode(entries) if decode else self._fill(entries)
        sampling = entries if batch.num_samples == len(entries) else [entry for entry in entries if entry.samples]
        self.sampler.prepare([entry.request for entry in sampling])
        self._replay("decode" if decode else "mixed", batch.num_tokens, batch.num_samples, context)
        return [(token, None if logprobs is None else TokenLogprob(*logprobs))
                for token, logprobs in self.sampler.read()]

    def record_ahead(self) -> bool:
        """Record the next graph that a first request will want, instead of when it does; False when there is none left.
        Each takes some tens of milliseconds of Python."""
        for key in self._wanted_first:
            if key not in self._graphs:
                self._graph(*key)
                return True
        return False

    def _fill_decode(self, entries: list[Entry]) -> int:
        """Step buffers of one token an entry; the longest context among them."""
        token_ids, positions, token_row = self._token_ids, self._positions, self._token_row
        context = 0
        for index, entry in enumerate(entries):
            request, position = entry.request, entry.start
            token_ids[index] = request.tokens[position]
            positions[index] = position
            token_row[index] = request.row
            if position % PAGE == 0 or self._residents[request.row][0] is not request:
                self._write_pages(request, entry.pages)
            if position >= context:
                context = position + 1
        return context

    def _fill(self, entries: list[Entry]) -> int:
        """Step buffers of any batch; the longest context among its entries."""
        at = line = context = 0
        for entry in entries:
            request, start, end = entry.request, entry.start, entry.start + entry.count
            last = at + entry.count
            self._token_ids[at:last] = request.tokens[start:end]
            self._positions[at:last] = self._ascending[start:end]
            self._token_row[at:last] = array("i", [request.row]) * entry.count
            self._write_pages(request, entry.pages)
            if entry.samples:
                self._logit_rows[line] = last - 1
                line += 1
            at, context = last, max(context, end)
        return context

    def _write_pages(self, request: Request, pages: list[int]) -> None:
        """Bring the request's line of the page table up to date: only pages that are new since last time."""
        resident, residency, written = self._residents[request.row]
        if resident is not request or residency != request.residency:
            written = 0
        at = request.row * self._max_pages
        for index in range(written, len(pages)):
            self._page_table[at + index] = self.kv.block_of(pages[index])
        self._residents[request.row] = (request, request.residency, len(pages))

    # -- graphs

    def _replay(self, kind: str, tokens: int, rows: int, context: int) -> None:
        size = self._size_for(kind, tokens)
        graph = self._graphs.get((kind, size)) or self._graph(kind, size)
        symbols = self.decoder.symbols(tokens, rows, context, max_tokens=size)
        graph.run(**{name: symbols[name] for name in graph.symbols})

    def _size_for(self, kind: str, tokens: int) -> int:
        """The smallest recording that a batch of `tokens` fits: one token, few, or any number."""
        if kind == "decode" and tokens == 1:
            return 1
        return self._split_tokens if tokens <= self._split_tokens else self.config.max_tokens_per_step

    def _graph(self, kind: str, size: int):
        """The recording of this kind and size, made when first asked for.

        decode: every token has logits and is sampled from. mixed: those in logit_rows. score: every token has logits,
        whose log-probability of the target is taken.
        """
        graph = self._graphs.get((kind, size))
        if graph is None:
            recorder = self.device.record()
            logits = self.decoder.record(recorder, max_tokens=size, every_token=kind != "mixed")
            if kind == "score":
                rows = logits.shape[0]
                logprob_rows(recorder, logits, self._targets.with_rows(rows), self._target_logprob.with_rows(rows),
                             self._argmax.with_rows(rows))
            else:
                self.sampler.record(recorder, logits)
            graph = self._graphs[kind, size] = recorder.finish()
        return graph

    # -- teacher forcing

    def score(self, tokens: array, pages: list[int]):
        """Run `tokens` as one sequence in `pages`; yields for each chunk (start, logprobs, top1, logits).

        logprobs, top1: lists, entry i about the token after tokens[start + i] (the last token of all has logprob of
        token 0: there is no next). logits: memoryview of f32 [n * vocab_size], valid until the next step. Requests may
        run between two chunks. Raises RequestError when the sequence is longer than the context.
        """
        if len(tokens) > self.config.max_context:
            raise RequestError(f"{len(tokens)} tokens are more than the context of {self.config.max_context}",
                               code="context_length_exceeded")
        vocab = self.model.config.vocab_size
        logits, targets = self.buffers.logits.view(), self._targets.view()
        logprobs, top1 = self._target_logprob.view(), self._argmax.view()
        chunk = min(logit_rows(self.config), self._split_tokens)
        following = tokens[1:] + array("i", [0])
        for start in range(0, len(tokens), chunk):
            end = min(start + chunk, len(tokens))
            count = end - start
            for index, page in enumerate(pages):
                self._page_table[index] = self.kv.block_of(page)
            self._residents[0] = (None, 0, 0)
            self._token_ids[:count] = tokens[start:end]
            targets[:count] = following[start:end]
            self._positions[:count] = self._ascending[start:end]
            self._token_row[:count] = array("i", bytes(4 * count))
            self._replay("score", count, count, end)
            yield start, logprobs[:count].tolist(), top1[:count].tolist(), logits[:count * vocab]

    def close(self) -> None:
        """Drop the graphs and stop the device."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self.device.close()
