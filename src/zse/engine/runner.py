"""Turns a scheduler's Batch into one Graph replay: fills the step's inputs, picks the recording, reads what came out.

Device memory and graphs have this one writer. Everything here is flat arrays and memoryviews: a decode step of eight
rows costs tens of microseconds of Python.

On a device that runs ahead a step is submitted while the one before still runs, so two StepSets are filled alternately,
and a token that the host has not read yet is named by its place among their results (`feed_tokens`). Else there is one;
where host and device memory are the same, the page table is written in place."""

from array import array
from typing import Any

from zse.cache import states
from zse.cache.groups import PageGeometry, geometry, group_layers, paged_by
from zse.cache.layout import KVCache, PageMover
from zse.cache.pages import BLOCK
from zse.engine import forwards, image_step, masking
from zse.engine import step as steps
from zse.engine.config import ResolvedConfig
from zse.engine.messages import TokenLogprob
from zse.engine.step import FilledStep, PageTable, StepInputs, StepSet
from zse.kernels import feed, page_table
from zse.lora import slots as adapter_slots
from zse.lora import targets as adapter_targets
from zse.models.registry import forward_of
from zse.plan import ends
from zse.plan.record import Planner, new_tensor
from zse.runtime.device import Recorder
from zse.sampling.state import SamplerState, input_nbytes, result_nbytes
from zse.scheduler.batch import Batch, Entry, unread
from zse.scheduler.request import Request
from zse.tensor import Tensor


class Runner:
    """model: zse.models.load.Model, whose weights need not be loaded yet; submit() must not be called before they are.

    runs_ahead: whether one batch more may be submitted before the first is collected (default: the device's). On a CPU it is for tests
    of that: penalties do not see the token in flight. grouped: whether layers with a window have page tables of their own. ranks:
    zse.engine.ranks.Ranks where the model is one rank's share. tower: the TowerPlan of a model that sees. logits: of a runner whose
    steps are never between a step of this one and its results."""

    _variant = ""  # of the next recording, behind its kind
    _rounds = 1  # most tokens that one replay draws of a line, each behind the one before
    _shared_results: tuple[Any, int] | None = None  # where a block's results go; others have a Staging of their own
    _ahead = 0  # tokens of a row that the next replay adds to those it is given
    planner_class: type[Planner] = Planner
    table_class: type[PageTable] = PageTable
    mover_class: type[PageMover] = PageMover

    def __init__(
        self, device, model, config: ResolvedConfig, runs_ahead=None, grouped=True, ranks=None, tower=None, logits=None
    ):
        self.device, self.model, self.config, self.ranks = device, model, config, ranks
        grouped = grouped and config.kv_layout == "paged"
        self.runs_ahead = device.runs_ahead if runs_ahead is None else runs_ahead
        # The device is done with the logits when a step's tokens are known: they can be sampled again.
        self.lazy_masks = config.lazy_masks and not self.runs_ahead
        self._lines = lines = steps.logit_rows(config.max_lines, config.max_tokens_per_step)
        self.kv = KVCache(
            device,
            model.config,
            config.num_pages,
            config.kv_dtype,
            group_layers(model.config, paged_by(model)) if grouped else None,
            config.page_size,
        )
        pages = PageGeometry(page_size=config.page_size)
        if grouped:
            most = steps.steps_in_flight(device, model.share)
            pages = geometry(paged_by(model), config.max_tokens_per_step, most, config.page_size)
        self._table = self.table_class(
            device,
            self.kv,
            pages,
            max_rows=config.max_rows,
            jobs=steps.job_rows(model.config),
            max_context=config.max_context,
            in_place=device.shares_memory and not self.runs_ahead and ranks is None,
            told=ranks and ranks.write_table,
        )
        self._logits = (
            new_tensor(device, "step", "f32", lines, model.config.vocab_size)
            if logits is None
            else logits.with_rows(lines)
        )
        self.adapters: adapter_slots.AdapterSlots | None = None
        if config.adapter_slots:
            targets = adapter_targets.Targets(model.config)
            sizes = config.adapter_slots, config.adapter_rank
            self.adapters = adapter_slots.AdapterSlots(device, targets, *sizes, model.share, ranks)
        forward = forward_of(model.config)
        self.states = states.state_cache(device, forward, config.state_slots) if config.state_slots else None
        self._history: Tensor | None = None  # of tokens, by block, where the host cannot keep it
        self._sets = self._make_sets()
        told, host = ranks and ranks.move, (config.host_slots, config.host_states)
        self.pages = self.mover_class(device, self.kv, self._history, self.states, told, *host)
        buffers, _ = self._sets[0].inputs.buffers(config.max_tokens_per_step, self._table.tensor, self._logits)
        self.planner = self.planner_class(
            device,
            forward,
            model,
            self.kv,
            buffers,
            states=self.states,
            activations=config.activations,
            deterministic=config.deterministic,
            adapters=self.adapters,
            group=ranks and ranks.group,
            whole_stream=steps.READ_STREAMS.get(config.speculation, ""),
        )
        self._sizes = self.planner.sizes
        self._ascending = steps.ascending(config.max_context)
        self._graphs: dict[tuple[str, int, int], Any] = {}
        self.images = None if tower is None else image_step.ImageSets(device, tower, config, len(self._sets))
        self._forwards: forwards.Forwards | None = None
        self._masking: masking.Masking | None = None
        self._wanted_first = steps.first_recordings(self) if ranks is None or ranks.leads else []
        # Drafts are verified in runs of several tokens that all have logits; a CPU's launches for it are those of
        # decode.
        self._run_kind = "verify" if device.runs_ahead else "decode"
        self._num_submitted, self._line_of_row = 0, [0] * config.max_rows  # places in self._sampled
        # Requests and their residencies, of the last decode step.
        self._decoded: tuple[list[Request], list[int]] = ([], [])

    def _make_sets(self) -> list[StepSet]:
        config, device, lines = self.config, self.device, self._rounds * self.config.max_lines
        history = None
        if not device.shares_memory:
            self._history = new_tensor(device, "step", "i32", config.page_pools * self.kv.num_blocks, BLOCK)
            history = feed.TokenHistory(self._history, self._table.tensor, self.kv.parts_per_block)
        sets, nbytes = [], result_nbytes(lines)
        results, first = self._shared_results or (steps.result_staging(device, config, self.num_sets * nbytes), 0)
        self.drafted = results, self.num_sets * nbytes
        self._sampled = Tensor(results.buffer, (results.nbytes // 4,), "i32")
        for number in range(self.num_sets):
            inputs = StepInputs(
                device,
                max_tokens=config.max_tokens_per_step,
                max_rows=self._lines,
                max_updates=self.kv.num_groups * steps.new_blocks(config.max_tokens_per_step, config.max_rows),
                sampler_nbytes=input_nbytes(lines, device.kernels),
                adapter_rows=config.max_rows if config.adapter_slots else 0,
                max_runs=config.max_rows if config.state_slots else 0,
                keeps=config.state_slots > 0 and config.max_drafts > 0,
                owner_rows=config.max_rows + steps.job_rows(self.model.config) if config.page_pools > 1 else 0,
            )
            sampler = SamplerState(
                device,
                self.model.config.vocab_size,
                max_rows=lines,
                history=history,
                # Running requests hold pages for all tokens but the last; each line of a draft has lists of its own.
                max_tokens=(config.all_pages * config.page_size + config.max_rows) * (1 + config.draft_tokens),
                inputs=(inputs.staging, 0),
                results=(results, first + number * nbytes),
            )
            sets.append(StepSet(number, inputs, (results, first + number * nbytes, nbytes), sampler))
        return sets

    @property
    def num_sets(self) -> int:
        """StepSets: batches that may be submitted and not collected, at most."""
        return 1 + self.runs_ahead

    # -- a step

    def run(self, batch: Batch) -> list[tuple[int, object]]:
        """Run one batch; results as of collect()."""
        return self.collect(self.submit(batch))

    def submit(self, batch: Batch, *masks: Any) -> tuple[Any, Any]:
        """Start a batch, behind what was submitted before; collect() takes what this returns. masks: StepMasks of
        requests with a grammar (engine/masking.py), RuleMasks of those that forbid tokens (engine/token_rules.py)."""
        if batch.transfers:
            self.pages.run(batch.transfers)
        step = self.fill(batch, masked=any(some.come_first for some in masks))
        ticket = self.launch(step)
        if masks:
            ticket = self._submit_masked(step, ticket, batch.num_samples, masks)
        return ticket, step.buffers.sampler

    def _submit_masked(self, step: FilledStep, ticket, rows: int, masks) -> Any:
        first = [some for some in masks if some.come_first]
        if first:
            ticket = self.masking.fill(step.buffers, rows, first).submit(rows=rows)
        for some in masks:
            if some.draws_first:  # only of a device that does not run ahead
                ticket.wait()
                self.masking.settle(step.buffers, rows, some)
        return ticket

    def launch(self, step: FilledStep) -> Any:
        """Start what fill() prepared; its Ticket."""
        if self.ranks is not None:
            inputs, images = step.buffers.inputs, [] if self.images is None else self.images.sent(step.key)
            self.ranks.replay(step.key, step.symbols, inputs.staging, *inputs.sent(step.key[1]), self.kv, images)
        return step.graph.submit(**step.symbols)

    def fill(self, batch: Batch, masked: bool = False) -> FilledStep:
        """Write a batch's inputs, the first half of submit(). launch() must follow before the next fill(). masked: the
        recording ends with the logits."""
        buffers = self._sets[self._num_submitted % len(self._sets)]
        self._num_submitted += 1
        entries = batch.entries
        sees = self.images is not None and self.images.needed(entries)
        # One token an entry, each with logits.
        decode = batch.num_tokens == len(entries) == batch.num_samples and not sees
        kind = "mixed" if sees or batch.num_tokens != batch.num_samples else "decode" if decode else self._run_kind
        size = self.size_for(kind, batch.num_tokens)
        buffers.inputs.page_count[0] = 0
        context = (self._fill_decode if decode else self._fill)(entries, buffers.inputs, size)
        self._prepare(batch, entries if decode else [entry for entry in entries if entry.samples], buffers)
        if sees and self.images is not None:
            kind += " images"
            self.images[buffers.number].fill(entries, buffers.inputs.arrays(size)[0])
        if self.adapters is not None and self._fill_adapters(entries, buffers.inputs):
            kind += f" adapted{self.adapters.version}"
        kind += self._variant + (" forward" if masked else "")
        graph = self._graphs.get((kind, size, buffers.number)) or self._graph(kind, size, buffers.number)
        if self.states is not None:
            buffers.inputs.fill_entries(entries, size, decode)
        symbols = self.planner.symbols(batch.num_tokens, batch.num_samples, context + self._ahead, runs=len(entries))
        return FilledStep(graph, {name: symbols[name] for name in graph.symbols}, buffers, (kind, size, buffers.number))

    def _prepare(self, batch: Batch, sampling: list[Entry], buffers: StepSet) -> None:
        """Tell the sampler whose lines there will be."""
        line_of_row, first = self._line_of_row, buffers.results[1] // 4
        drafts = None
        if not batch.num_drafts and not batch.entries[0].drafts:  # a draft model's entries all have drafts, or none
            requests = [entry.request for entry in sampling]
            if self.runs_ahead:
                for line, request in enumerate(requests, first):
                    line_of_row[request.row] = line
            lengths = [entry.start + entry.count for entry in sampling]
        else:
            requests, lengths = [], []
            drafts = {entry.request: entry.drafts for entry in sampling if entry.drafts}
            for entry in sampling:
                end = entry.start + entry.count
                line_of_row[entry.request.row] = first + len(requests)
                requests += [entry.request] * entry.samples
                lengths += range(end - entry.samples + 1, end + 1)
        buffers.sampler.prepare(requests, lengths, drafts)

    def collect(self, submitted: tuple[Any, Any]) -> list[tuple[int, object]]:
        """Wait for a batch; (token, TokenLogprob | None) for each entry that samples, in order. Token -1: the logits
        were not finite."""
        ticket, sampler = submitted
        ticket.wait()
        return [result if result[1] is None else (result[0], TokenLogprob(*result[1])) for result in sampler.read()]

    def record_ahead(self) -> bool:
        """Record the next graph that a first request will want, instead of when it does; False when there is none left.
        Each takes some tens of milliseconds of Python."""
        for key in self._wanted_first:
            if key not in self._graphs:
                kind, size, _ = key
                graph = self._graph(*key)
                if kind == "decode" and size == 1:
                    symbols = self.planner.symbols(1, 1, 1)
                    graph.prepare(**{name: symbols[name] for name in graph.symbols})
                return True
        return False

    def _fill_decode(self, entries: list[Entry], inputs: StepInputs, size: int) -> int:
        """Inputs of one token an entry; the longest context among them."""
        token_ids, positions, token_row, source = inputs.arrays(size)
        # Lists in one go cost half of a loop; a token in flight, or a draft, stands in no list yet.
        requests, starts = [entry.request for entry in entries], [entry.start for entry in entries]
        try:
            ids = [request.tokens[start] for request, start in zip(requests, starts, strict=True)]
        except IndexError:
            return self._fill_decode_ahead(entries, inputs, size)
        count = len(ids)
        token_ids[:count] = array("i", ids)
        positions[:count] = array("i", starts)
        token_row[:count] = array("i", [request.row for request in requests])
        source[:count] = array("i", [-1]) * count
        residencies = [request.residency for request in requests]
        if (requests, residencies) == self._decoded:
            fresh = [entry for entry in entries if not entry.start % BLOCK]
        else:
            # A request that comes back into its row (preempted, found in the cache) has other pages.
            residents = self._table.residents
            fresh = [
                entry
                for entry, request in zip(entries, requests, strict=True)
                if not entry.start % BLOCK
                or residents[request.row][0] is not request
                or residents[request.row][1] != request.residency
            ]
            self._decoded = requests, residencies
        for entry in fresh:
            self._table.write(inputs, entry, entry.start + 1)
        return max(starts) + 1

    def _fill_adapters(self, entries: list[Entry], inputs: StepInputs) -> bool:
        """The slot of each row's adapter; False where none has one and the step needs no launches for them."""
        slots, of_row = self.adapters, inputs.adapter_slots
        assert slots is not None
        is_adapted = False
        for entry in entries:
            adapter = entry.request.options.adapter
            of_row[entry.request.row] = slots.slot_of(adapter) if adapter else -1
            is_adapted = is_adapted or bool(adapter)
        # Where bits must not depend on the batch, rows without an adapter take the launches of those with one.
        return is_adapted or self.planner.pins_forms and bool(slots.images)

    def keep_adapter(self, image) -> None:
        """Requests may name an adapter from now on."""
        assert self.adapters is not None
        if self.adapters.keep(image):
            self.planner.adapt(self.adapters.adapted)

    def _fill_decode_ahead(self, entries: list[Entry], inputs: StepInputs, size: int) -> int:
        """As _fill_decode, where tokens are in flight or drafts."""
        token_ids, positions, token_row, source = inputs.arrays(size)
        line_of_row, residents = self._line_of_row, self._table.residents
        context = 0
        for index, entry in enumerate(entries):
            request, position = entry.request, entry.start
            row, tokens = request.row, request.tokens
            if position < len(tokens):
                token_ids[index], source[index] = tokens[position], -1
            elif entry.drafts:
                token_ids[index], source[index] = entry.drafts[position - len(tokens)], -1
            else:
                source[index] = line_of_row[row]  # in flight
            positions[index] = position
            token_row[index] = row
            resident = residents[row]  # as in _fill_decode
            if position % BLOCK == 0 or resident[0] is not request or resident[1] != request.residency:
                self._table.write(inputs, entry, position + 1)
            if position >= context:
                context = position + 1
        return context

    def _fill(self, entries: list[Entry], inputs: StepInputs, size: int) -> int:
        """Inputs of any batch; the longest context among its entries."""
        token_ids, positions, token_row, source = inputs.arrays(size)
        at = line = context = 0
        for entry in entries:
            request, start, end = entry.request, entry.start, entry.start + entry.count
            last = at + entry.count
            if start < len(request.tokens) or entry.drafts:
                ids = request.tokens[start:end]
                if len(ids) < entry.count:
                    known = len(request.tokens)
                    ids += array("i", entry.drafts[max(start - known, 0) : end - known])
                token_ids[at:last] = ids
                source[at:last] = array("i", [-1]) * entry.count
                if entry.drafts and entry.drafts[0] < -1:
                    source[at:last] = array("i", [max(unread(id), -1) for id in ids])
            else:
                source[at] = self._line_of_row[request.row]
            positions[at:last] = self._ascending[start:end]
            token_row[at:last] = array("i", [request.row]) * entry.count
            self._table.write(inputs, entry, end)
            for index in range(last - entry.samples, last):
                inputs.logit_rows[line] = index
                line += 1
            at, context = last, max(context, end)
        return context

    # -- graphs

    def size_for(self, kind: str, tokens: int) -> int:
        """The smallest recording that a batch of `tokens` fits."""
        if kind != "decode" and tokens == 1:
            tokens = 2  # one for a single token is worth it for decode steps only
        return next((size for size in self._sizes if size >= tokens), self._sizes[-1])

    def _graph(self, kind: str, size: int, number: int):
        """The recording of this kind and size, made when first asked for.

        decode: every token has logits and is sampled from, one token a row. verify: the same with runs of several
        tokens. mixed: those in logit_rows. With " images" behind it: some tokens take rows of image embeddings; with
        " adapted": rows have adapters; with " forward": without the sampling, for steps with masks."""
        key = kind, size, number
        graph = self._graphs.get(key)
        if graph is None:
            if self.ranks is not None:
                self.ranks.record(key)
            recorder = self.device.record()
            buffers = self._sets[number]
            kind, *parts = kind.split()
            keeps, longest = kind in ("mixed", self._run_kind), 1 if kind == "decode" else None
            step, source = buffers.inputs.buffers(size, self._table.tensor, self._logits, keeps)
            tokens = recorder.symbol("tokens", size)
            buffers.inputs.upload(recorder, size, keeps)
            if not self._table.in_place:
                self._record_inputs(recorder, buffers, step, source, tokens, kind)
            options = dict(step=step, max_tokens=size, every_token=kind != "mixed", longest_run=longest)
            self._record_step(recorder, buffers, parts, options)
            if size == 1 and self.device.arch == 90 and self.ranks is None:
                ends.join_ends(recorder)
            graph = self._graphs[key] = self._finished(recorder)
        return graph

    _finished = staticmethod(Recorder.finish)  # a recorder → what is replayed

    def _record_step(self, recorder, buffers: StepSet, parts: list[str], options: dict[str, Any]) -> None:
        """What a step computes and draws. parts: of its kind; options: of Planner.record()."""
        if "images" in parts and self.images is not None:
            options["images"] = self.images[buffers.number].record(recorder, options["max_tokens"])
        if self.adapters is not None and any(part.startswith("adapted") for part in parts):
            options["adapted"] = self.adapters.tensors(buffers.inputs.tensors["adapter_slots"])
        logits = self.planner.record(recorder, **options)
        if parts[-1:] != ["forward"]:
            buffers.sampler.record(recorder, logits)
            recorder.download(*buffers.results)

    @property
    def logits(self) -> Tensor:
        """Of the last step, which another runner may write over once its tokens are read."""
        return self._logits

    def followed(self, key: tuple[str, int, int]) -> tuple[Any, Any]:
        """The recording that a rank beside rank 0 makes for one of its, without sampling, and the Staging of its inputs."""
        kind, size, number = key
        if kind in forwards.KINDS:
            return self.forwards.followed(kind, size)
        return self._graph(kind.removesuffix(" forward") + " forward", size, number), self._sets[number].inputs.staging

    def write_table(self, at: int, entries: bytes) -> None:
        """Entries of the page table, from byte `at` on."""
        self.device.write(Tensor(self._table.tensor.buffer, (len(entries) // 4,), "i32", at), entries)

    def _record_inputs(self, recorder, buffers: StepSet, step, source: Tensor, tokens, kind: str) -> None:
        """The first launches of a step that runs ahead: new pages into the page table, sampled ids into the inputs."""
        pages = buffers.inputs.tensors
        page_table.update_pages(
            recorder, pages["page_count"], pages["page_index"], pages["page_value"], step.page_table
        )
        if not self.runs_ahead:
            return
        if self.ranks is not None and not self.ranks.is_pipeline:  # of a pipeline rank 0 alone has use for them
            for ids in steps.unread_ids(self.config, self._sets[1 - buffers.number], self.drafted, kind):
                self.ranks.group.broadcast(recorder, ids)
        feed.feed_tokens(
            recorder,
            step.token_ids.with_rows(tokens),
            source.with_rows(tokens),
            self._sampled,
            step.positions.with_rows(tokens),
            step.token_row.with_rows(tokens),
            buffers.sampler.history,
        )

    # -- forwards without sampling

    @property
    def masking(self) -> "masking.Masking":
        """Masks of grammars before the sampler."""
        if self._masking is None:
            self._masking = masking.Masking(self.device, self._logits)
        return self._masking

    @property
    def forwards(self) -> "forwards.Forwards":
        """What jobs run on."""
        if self._forwards is None:
            self._forwards = forwards.Forwards(
                self.planner,
                self.config,
                table=self._table,
                logits=self._logits,
                history=self._sets[0].sampler.history,
                size_for=lambda tokens: self.size_for("mixed", tokens),
                ranks=self.ranks,
            )
        return self._forwards

    def reserve(self) -> list:
        """What masks, jobs and host slots take when they are first asked for: a memory plan counts it. Nothing uses it."""
        device, config = self.device, self.config
        self.pages.reserve()
        return [
            *(steps.masks_staging(device, self._logits) for _ in self._sets),
            steps.job_inputs(device, config, self._lines, self.kv.num_groups, steps.job_rows(self.model.config)),
            steps.job_sampler(device, self._logits, self._sets[0].sampler.history),
            *(self.images.all() if self.images is not None else ()),
        ]

    def close(self) -> None:
        """Drop the graphs and stop the device."""
        self.drop_graphs()
        self.device.close()

    def drop_graphs(self) -> None:
        """Drop the graphs: nothing runs after that."""
        if self._forwards is not None:
            self._forwards.close()
        if self._masking is not None:
            self._masking.close()
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self.pages.close()
