"""Records the launches of a model's steps over a flat batch of tokens.

A batch is [tokens, hidden_size]: prompts, chunks of prompts, single decoded tokens of several sequences; what differs between
them is in StepBuffers. Numbers of tokens and of rows with logits are symbols: one recording serves every batch up to its size."""

from array import array
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

from zse.errors import ConfigError
from zse.kernels import gpu
from zse.kernels.attention import SEGMENT, partial_shape
from zse.kernels.norm import add_rmsnorm
from zse.kernels.rope import rope_table
from zse.plan import chains, ranks
from zse.plan.forms import BREAKS, PRODUCTS, TRAITS
from zse.plan.forward import LastLayer, bind_rows, last_layer_of, place_rows, trace_forward
from zse.plan.launch import LAUNCHES
from zse.plan.place import Placed, aligned, new_tensor, place_part, reserve, tensors_at
from zse.plan.rules import Part
from zse.plan.trace import Node, Value
from zse.tensor import OwnRows, Runs, StatePart, Taken, Tensor

BLOCK = 16  # tokens of an entry of the page table


class StepBuffers(NamedTuple):
    """What the host fills before a step, and the logits it finds afterwards. All of the largest step's size.

    token_ids, positions, token_row i32 [max_tokens]: a token's id, its position in its sequence (from 0), and its row in
    page_table. Tokens of a row stand together, positions ascending by one. page_table i32 [max_rows, max_pages]: the row's KV
    blocks by their numbers (KVCache.table_entries); of models with groups of layers one such table behind the other.
    logit_rows i32 [max_rows]: which tokens of the batch want logits. logits f32 [max_rows, vocab_size]: one line for each.

    Of models with a state: run_start i32 [max_rows + 1]: the first token of each run (the tokens of one sequence), and behind
    the last one the number of tokens; run_slot i32 [max_rows]: the slot of each run's state; leave i32 [max_tokens], of
    steps with drafts: the slot that the state behind a token is left in, too (zse.tensor.Runs). own: of ranks with requests
    of their own."""

    token_ids: Tensor
    positions: Tensor
    token_row: Tensor
    page_table: Tensor
    logit_rows: Tensor
    logits: Tensor
    run_start: Tensor | None = None
    run_slot: Tensor | None = None
    leave: Tensor | None = None
    own: OwnRows | None = None

    @classmethod
    def allocate(
        cls, device, config: Any, *, max_tokens: int, max_rows: int, max_pages: int, groups: int = 1
    ) -> "StepBuffers":
        """max_tokens: of one step; max_rows: sequences of one step; max_pages: of one sequence; groups: of layers."""
        return cls(
            token_ids=new_tensor(device, "step", "i32", max_tokens),
            positions=new_tensor(device, "step", "i32", max_tokens),
            token_row=new_tensor(device, "step", "i32", max_tokens),
            page_table=new_tensor(device, "step", "i32", groups * max_rows, max_pages),
            logit_rows=new_tensor(device, "step", "i32", max_rows),
            logits=new_tensor(device, "step", "f32", max_rows, config.vocab_size),
            run_start=new_tensor(device, "step", "i32", max_rows + 1) if config.has_state else None,
            run_slot=new_tensor(device, "step", "i32", max_rows) if config.has_state else None,
        )


class Planner:
    """Records steps of `model` (zse.models.load.Model) over `kv` (zse.cache.layout.KVCache). forward: the model's
    zse.models.decoder.Decoder. buffers: of the largest step. activations: what matrix products take, one of device.activations: "int8"
    (8-bit, one scale per 32, wherever the weights are quantized) or "f32" on a CPU; "fp8" (e4m3 wherever kernels take it) or "bf16" on a
    GPU. deterministic: every recording takes the forms of the largest step, so that a token's bits do not depend on how many run with it.
    Scratch memory is allocated here, once; every recording uses it, so recordings must not run at the same time. states: StateCache of
    a model with a state. adapters: zse.lora.slots.AdapterSlots, of an engine that may be given some. group: zse.parallel.group.RankGroup where the
    model is one rank's share. whole_stream: "end": `hidden` is read behind a step, of every token; "layers": and between layers. Raises PlanError for a forward that this device has no launches for."""

    def __init__(
        self,
        device,
        forward: Any,
        model,
        kv,
        buffers: StepBuffers,
        *,
        activations: str | None = None,
        deterministic: bool = False,
        adapters: Any = None,
        states: Any = None,
        group: Any = None,
        whole_stream: str = "",
    ):
        self.activations = activations or device.activations[0]
        if self.activations not in device.activations:
            raise ConfigError(f"activations {activations!r}: expected one of {', '.join(device.activations)}")
        self.traits = TRAITS[device.kernels]
        self.pins_forms = deterministic and self.traits.rounds_by_form
        self.device, self.forward, self.model, self.kv, self.buffers = device, forward, model, kv, buffers
        self.config, self.has_state = model.config, model.config.has_state
        self.max_tokens, self.max_lines = buffers.token_ids.shape[0], buffers.logits.shape[0]
        self.adapters, self.states, self.group = adapters, states, group
        self.kept: Any = None  # zse.plan.kept.KeptStreams, where something drafts with streams between layers
        self._head = None if group is None else ranks.head_of(device, group, model, self.max_lines)
        self.divided: Any = buffers.own and ranks.divided_of(device, group, buffers, self.config, whole_stream)
        asked: Any = (chains.chains_of, chains.attending) if device.arch == 90 else (None, None)
        self._chains_of, self._attending = asked  # once: a lazy name costs 2 us
        self._trace = lambda adapted=None: trace_forward(forward, model, device, adapted, self.divided)
        found = self._trace()
        self._begin, self._again, self._layers, self._ends, self._finish, self._ropes, self._hops, _ = found
        self._last = None if whole_stream or self.max_tokens < 2 else found.last
        self._adapted_layers: list[Part] = []
        if adapters is not None:
            self.adapt(adapters.every)
        self._allocate()
        if adapters is not None:
            self.adapt(adapters.adapted)

    def adapt(self, adapted: Any) -> None:
        """From now on recordings with adapters add what these (zse.plan.trace.Adapted) change."""
        self._adapted_layers = self._trace(adapted).layers

    @property
    def sizes(self) -> list[int]:
        """The sizes that recordings are worth making in, ascending."""
        return [*(size for size in self.traits.sizes if size < self.max_tokens), self.max_tokens]

    # -- recordings

    def record(
        self,
        recorder,
        *,
        step: StepBuffers | None = None,
        max_tokens: int | None = None,
        every_token: bool = False,
        longest_run: int | None = None,
        adapted: Any = None,
        images: Any = None,
        taken: Taken | None = None,
        tokens: Any = None,
        instead: dict[str, Any] | None = None,
    ) -> Tensor:
        """Record one step and return its logits f32 [rows, vocab_size].

        Args:
            step: the inputs (default: the Planner's buffers).
            max_tokens: the most tokens that this recording will run with (default: the buffers' size); few choose their own kernels.
            every_token: each token has logits, in order: logit_rows is not read and the step is run with rows = tokens.
            longest_run: the most tokens of one row where that is known (1: a decode step): kernels for longer ones are left out.
            adapted: the zse.kernels.adapter.Slots of the rows. images: the StepImages (zse.engine.image_step) of tokens with embeddings.
            taken: what a block begins with. instead: weights for the model's of these names behind the layers.
            tokens: the symbol of how many there are (default: "tokens"), of a step behind another in the recording.

        Symbols to run with: `symbols()`."""
        more: dict[str, Any] = dict(adapted=adapted, images=images, taken=taken, tokens=tokens)
        last = None if every_token or adapted or taken else last_layer_of(self, images)
        end = self._ends.get(True) if every_token else None
        run = self._record_layers(recorder, step, max_tokens, longest_run, last=last, end=end, **more)
        run.instead, max_rows = instead or {}, min(run.max_tokens, self.max_lines)
        rows = run.tokens if every_token else recorder.symbol("rows", max_rows)
        if last is not None:  # what is left has the wanted rows alone
            run, every_token = last.record(run, rows, max_rows), True
        logits = self._record_end(run, run.step.logits.with_rows(rows), run.step.logit_rows, max_rows, every_token)
        return logits if self.kept is None else self.kept.end(run, logits)

    def record_hidden(
        self, recorder, *, step: StepBuffers | None = None, max_tokens: int | None = None, types: Tensor | None = None
    ) -> Tensor:
        """Record one step without the head and return the hidden states before the final norm, of an encoder those that are pooled, f32
        [tokens, hidden]: `hidden`, whole until the next step. step, max_tokens: as of record(). types: i32 [max_tokens], of an encoder."""
        run, x = self._record_layers(recorder, step, max_tokens, None, types), self.hidden
        pending = self._layers[-1].pending
        if self._finish is not None:
            room = self._room(run.max_tokens, self.max_tokens)
            run.play(self._finish, self._place(self._finish, room), "", run.tokens)
        elif pending is not None:
            run.add(run.of(x), run.of(self._carry), run.prefix, pending.options)
        return run.of(x)

    @property
    def hidden(self) -> Tensor:
        """f32 [max_tokens, hidden_size]: where record_hidden() leaves the step's hidden states."""
        return Tensor(self.scratch, (self.max_tokens, self.config.hidden_size), "f32")

    def record_head(self, recorder, wanted: Tensor, logits: Tensor) -> None:
        """Record the final norm and the head over lines of `hidden`: wanted i32 [max_rows], logits f32 [max_rows, vocab_size]."""
        max_rows = wanted.shape[0]
        rows = recorder.symbol("rows", max_rows)
        run = Run(self, recorder, self.buffers, rows, max_rows)
        self._record_end(run, logits.with_rows(rows), wanted, max_rows, None)

    def _record_ropes(self, run: "Run", images: Any = None) -> None:
        for name, (table, inv_freq) in self._tables.items():
            rope = self._ropes[name]
            if images is not None and images.turn(run, inv_freq, run.of(table), rope.mscale):
                continue
            temperature = rope.temperature_beta, rope.temperature_length
            rope_table(run.recorder, run.positions, inv_freq, run.tables[name], rope.mscale, temperature)

    def symbols(self, tokens: int, rows: int, context: int, *, runs: int = 0) -> dict[str, int]:
        """The symbols of one run, of which a graph has some (Graph.symbols). context: tokens of the longest sequence, this step's
        included. runs: of one sequence's tokens each, as in StepBuffers.run_start of a model with a state; 0: as many as tokens. "own" each
        rank says itself. splits: one block a segment of keys while heads x tokens do not fill the threads evenly, else 1; results do
        not depend on it. attending: as of zse.plan.chains."""
        segments, threads = -(-context // SEGMENT), self.device.threads
        # Of neighbours the first one's block does all the work, and a thread takes all of its heads: of 12 tokens 1.36 times its share.
        is_uneven = 0 < runs < tokens and segments >= 4 * threads or tokens * self.config.num_kv_heads < 4 * threads
        splits = segments if tokens <= self.traits.split_tokens and is_uneven else 1
        attending = 0 if self._attending is None else self._attending(self, context)
        return {"tokens": tokens, "rows": rows, "runs": runs, "splits": splits, "own": tokens, "attending": attending}

    def _record_layers(
        self,
        recorder,
        step: StepBuffers | None,
        max_tokens: int | None,
        longest_run: int | None,
        types: Tensor | None = None,
        adapted: Any = None,
        images: Any = None,
        taken: Taken | None = None,
        tokens: Any = None,
        last: LastLayer | None = None,
        end: Part | None = None,
    ) -> "Run":
        """After the last layer, which may leave something to be added to the stream; `last`: after its first part; end: behind it."""
        capacity = (step := step or self.buffers).token_ids.shape[0]
        max_tokens = capacity if max_tokens is None else max_tokens
        if not 0 < max_tokens <= capacity:
            raise ConfigError(f"a step of {max_tokens} tokens: the buffers hold {capacity}")
        run = Run(self, recorder, step, recorder.symbol(tokens.name if tokens else "tokens", max_tokens), max_tokens)
        run.types, run.adapters, run.longest_run = types, adapted, longest_run or max_tokens
        run.images, run.taken = images, taken
        run.use_states()
        run.tap = self.kept and self.kept.begin()
        if self.divided is not None:
            self.divided.begin(run)
        # Norms of other kinds have no form that adds experts.
        kinds = {
            node.options.get("kind", "rms") for part in self._layers for node in part.nodes if node.op == "add_norm"
        }
        run.may_defer = self.device.kernels == "gpu" and run.form_tokens == 1 and kinds == {"rms"}
        host_layers = self.model.host_layers
        if host_layers is not None:
            host_layers.begin(recorder)
        run.share_attention(longest_run, None if images is None else images.sees)
        room = self._room(max_tokens, self.max_tokens)
        begin = self._begin if taken is None or not taken.again or self._again is None else self._again
        run.play(begin, self._place(begin, room), "", run.tokens)
        self._record_ropes(run, images)
        layers = self._layers if adapted is None else self._adapted_layers
        if last is not None:
            layers = last.begin(run, layers)
        if self._chains_of is not None:
            run.chains = self._chains_of(run, layers, (adapted, images, taken, host_layers, run.tap, self.divided), end)
        for layer, part in enumerate(layers):
            run.layer = layer
            if host_layers is not None:
                host_layers.before(recorder, layer)
            run.play(part, self._place(part, room), f"layers.{layer}.", run.tokens)
            if run.images is not None and layer < len(run.images.more):
                run.images.place(run, layer)
            if host_layers is not None:
                host_layers.after(recorder, layer)
        return run

    def _record_end(
        self, run: "Run", logits: Tensor, wanted: Tensor, max_rows: int, every_token: bool | None
    ) -> Tensor:
        """max_rows: what the head's form is chosen for. every_token: a key of the ends."""
        part = self._ends[every_token]
        run.form_tokens = self.max_lines if self.pins_forms else max_rows
        run.wanted, run.logits = (
            wanted.with_rows(logits.shape[0]),
            logits if self._head is None else self._head.part(logits),
        )
        run.play(part, self._place(part, self._room(max_rows, self.max_lines)), "", logits.shape[0])
        if self._head is not None:
            self._head.gather(run.recorder, logits)
        return logits

    # -- the plan

    def _room(self, size: int, most: int) -> int:
        """Up to how many tokens (or rows of logits, of at most `most`) steps share places with those of `size`."""
        if self.pins_forms:
            return most
        return next((room for room in BREAKS[self.device.kernels] if size <= room <= most), most)

    def _place(self, part: Part, room: int) -> Placed:
        """The part with forms and places for steps of up to `room` tokens."""
        if room not in part.placed:
            splits = room <= self.traits.split_tokens
            work = 4 * prod(self._partial_shape(room, self.config.attended[1])) if splits else 0
            part.placed[room] = place_part(part, self.device, self.activations, room, work)
        return part.placed[room]

    def _partial_shape(self, tokens: int, head_dim: int) -> tuple[int, ...]:
        context = self.buffers.page_table.shape[1] * BLOCK
        return partial_shape(tokens, self.config.num_heads, head_dim, context)

    def _allocate(self) -> None:
        """One piece of memory: the stream, what layers hand on, the tables of rotations, layers' own embeddings, then
        what lives within a part."""
        at = aligned(4 * self.max_tokens * self.config.hidden_size)
        carry_at = at
        if any(part.pending for part in self._layers):
            at += aligned(4 * self.max_tokens * self.config.hidden_size)
        self._carried_bytes = at
        tables = {}
        for name, rope in self._ropes.items():
            values = array("f", rope.inv_freq(self.config.head_dim, self.buffers.page_table.shape[1] * BLOCK))
            tables[name] = values, at
            at += aligned(8 * self.max_tokens * len(values)) + aligned(4 * len(values))
        inputs_at = at
        at += aligned(4 * self.max_tokens * self.config.num_layers * self.config.ple_width)
        rows_at, self._scratch_at = place_rows(self._last, self.max_lines, (carry_at, self._carried_bytes), at)
        at = self._scratch_at
        layers = dict.fromkeys([*self._layers, *self._adapted_layers, *(self._last or ())])
        parts = [self._begin, *layers, *(part for part in (self._again, self._finish) if part)]
        rooms = {self._room(size, self.max_tokens) for size in (*BREAKS[self.device.kernels], self.max_tokens)}
        at += max(self._place(part, room).nbytes for part in parts for room in rooms)
        rooms = {self._room(size, self.max_lines) for size in (*BREAKS[self.device.kernels], self.max_lines)}
        end = max((self._place(part, room).nbytes for part in self._ends.values() for room in rooms), default=0)
        at = max(at, self._scratch_at + end)
        self.scratch = self.device.alloc(at, label="scratch")
        self._carry = Tensor(self.scratch, self.hidden.shape, "f32", carry_at)
        self.wanted_rows = Tensor(self.scratch, (self.max_lines, self.config.hidden_size), "f32", rows_at)
        shape = self.config.num_layers, self.max_tokens, self.config.ple_width
        self.layer_inputs = Tensor(self.scratch, shape, "f32", inputs_at)
        self._tables = {}
        for name, (values, start) in tables.items():
            table = Tensor(self.scratch, (self.max_tokens, 2 * len(values)), "f32", start)
            inv_freq = Tensor(self.scratch, (len(values),), "f32", start + aligned(8 * self.max_tokens * len(values)))
            self.device.write(inv_freq, memoryview(values))
            self._tables[name] = table, inv_freq
        if self.traits.own_scratch:
            reserve(self)
        self.attention_scratch = self.new_attention_scratch(self.max_tokens, self.buffers.page_table.shape[1] * BLOCK)

    def new_attention_scratch(self, max_tokens: int, context: int) -> Any:
        """What attention works in; None: in the part's own memory."""
        if not self.traits.own_scratch:
            return None
        latent = self.config.latent is not None
        kind = gpu.latent_attention.LatentScratch if latent else gpu.attention_plan.AttentionScratch
        return kind.allocate(self.device, self.config, max_tokens, context)


class Run:
    """One recording: the symbols bound, the scratch with the step's number of tokens.

    max_tokens: of this recording; longest_run: of a run in it, at most; form_tokens: what kernels of products are chosen for."""

    def __init__(self, planner: Planner, recorder, step: StepBuffers, tokens, max_tokens: int):
        self.planner, self.recorder, self.step = planner, recorder, step
        self.tokens, self.max_tokens, self.longest_run = tokens, max_tokens, max_tokens
        self.form_tokens = planner.max_tokens if planner.pins_forms else max_tokens
        self.wanted = self.logits = step.logits
        self.stream, self.carry = planner.hidden, planner._carry
        groups, (rows, max_pages) = planner.kv.num_groups, step.page_table.shape
        shape = rows // groups, max_pages
        self.page_tables = [
            step.page_table._replace(shape=shape, offset=step.page_table.offset + group * 4 * prod(shape))
            for group in range(groups)
        ]
        self.positions, self.token_row = self.of(step.positions), self.of(step.token_row)
        self.runs: Runs | None = None
        self.tables: dict[str | None, Any] = {name: self.of(table) for name, (table, _) in planner._tables.items()}
        self.sharing: dict[str, Any] = {}
        self.scratch = planner.attention_scratch
        self.images: Any = None
        self.taken: Any = None
        self.instead: dict[str, Any] = {}
        self.types: Tensor | None = None
        self.adapters: Any = None
        self._tensors: dict[Part, dict[Value | Node, Any]] = {}
        self.prefix = self.before = ""  # of the weights' names, in this part and in the one before
        self.tap: Callable[[Run, Node], None] | None = None
        self.part: Part = planner._begin
        self.deferred: Any = None  # what the experts before gave, and their routing (defers()); None, None: is added
        self.layer, self.may_defer, self.own = 0, False, tokens
        self.chains: chains.Chains | None = None
        self.sums = None if planner.group is None else ranks.sums_of(self)
        self.makers: dict[Node, Any] = {}  # of heads: what computes them in attention's launch, or None

    def use_states(self, runs: int | None = None) -> None:
        """Of a model with a state: so many runs are in the step's buffers; None: the symbol `runs` of them."""
        start, slot = self.step.run_start, self.step.run_slot
        if start is not None and slot is not None:
            many = self.recorder.symbol("runs", min(slot.shape[0], self.max_tokens)) if runs is None else runs
            leave = None if self.step.leave is None else self.of(self.step.leave)
            self.runs = Runs(start, slot.with_rows(many), self.positions, leave)

    def state(self, part: str) -> StatePart:
        """The part (of Decoder.state_parts) of the layer that is recorded; which tokens it is for say `runs`."""
        return self.planner.states.part(self.layer, part)

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.with_rows(self.tokens)

    def share_attention(self, longest_run: int | None, sees: Tensor | None = None) -> None:
        """How a CPU's threads share a sequence; on a GPU cut the batch into the tasks of its attention, once for all
        layers. sees: i32 [tokens], the last position that each token sees, where that is not its own."""
        planner, scratch, kv = self.planner, self.scratch, self.planner.kv.kind
        seen = {} if sees is None else {"sees": self.of(sees)}
        if scratch is None:
            self.sharing = seen
            if self.max_tokens <= planner.traits.split_tokens and planner.config.causal and not seen:
                self.sharing = {"splits": self.recorder.symbol("splits")}
            return
        if planner.config.latent is not None:
            self.sharing = scratch.sharing(self.form_tokens)
            return
        if planner.pins_forms or seen:
            # The kernel for prompts takes every row: it and the one for few tokens, which sees no keys behind a token's
            # own, add in different orders.
            longest_run, scratch = None, {kind: each._replace(max_run=0) for kind, each in scratch.items()}
        elif longest_run is None and self.max_tokens <= gpu.attention_plan.MAX_RUN:
            longest_run = self.max_tokens
        for each in scratch.values():
            gpu.attention_plan.plan_attention(self.recorder, each, self.token_row, self.positions, kv, longest_run)
        self.sharing = {"scratch": scratch, "longest_run": longest_run} | seen

    def play(self, part: Part, placed: Placed, prefix: str, rows: Any) -> None:
        """Record a part. prefix: of its weights' names; rows: of values that are not the stream."""
        self.t = self.tensors_of(part, placed, prefix, rows)
        self.before, self.prefix, self.part = self.prefix, prefix, part
        for node in placed.nodes:
            if self.tap is not None and node.op in PRODUCTS:
                self.tap(self, node)
            if self.sums is not None:
                self.sums.before(node)
            if self.chains is None or not self.chains.takes(self, node):
                LAUNCHES[node.op](self, node)

    def tensors_of(self, part: Part, placed: Placed, prefix: str, rows: Any) -> "dict[Value | Node, Any]":
        if part not in self._tensors:
            self._tensors[part] = self.bind(part, placed, rows, prefix)
        return self._tensors[part]

    def bind(self, part: Part, placed: Placed, rows: Any, prefix: str) -> "dict[Value | Node, Any]":
        """The tensor of each value. prefix: of the first layer that plays the part."""
        planner, tensors = self.planner, tensors_at(self, placed, rows, prefix)
        stream = self.of(self.stream)
        for node in placed.nodes:
            for value in (*node.inputs, node.output):
                if value.is_stream:
                    tensors[value] = stream
        carry = self.of(self.carry)
        if part.carried is not None:
            tensors[part.carried] = carry
        if part.pending is not None:
            tensors[part.pending.delta] = carry
        if not part.end.is_stream:
            tensors[part.end] = self.logits
        bind_rows(self, part, tensors)
        if self.sums is not None:
            self.sums.bind(part, placed, prefix, tensors)
        if planner.divided:
            planner.divided.bind(self, placed.nodes, tensors)
        return tensors

    def add(
        self, x: Tensor, delta: Tensor | None, prefix: str, options: dict[str, Any], norm=None, out=None, bias=None
    ) -> None:
        """x += delta, or its norm by the vector prefix + options["delta_norm"]; then out = norm of x."""
        planner, delta_norm = self.planner, options.get("delta_norm")
        if delta_norm is not None:
            delta_norm = planner.model.vectors[prefix + delta_norm]
        eps, kind = options.get("eps", planner.config.norm_eps), options.get("kind", "rms")
        in_place = options.get("in_place", False)
        (delta, routing), self.deferred = self.deferred or (delta, None), None
        if self.sums is not None and delta is not None:
            if self.sums.norms(x, delta, delta_norm, kind, norm, out, eps):
                return
            delta = self.sums.left(x, delta)
        if delta is not None or out is not None or in_place:
            add_rmsnorm(self.recorder, x, delta, delta_norm, norm, out, eps, kind, bias, in_place, routing)

    def defers(self, combine: Node) -> bool:
        """Whether what the experts of the only token give stays as it is until the next part's first launch adds it,
        which reads all of it before it writes where it lies."""
        pending = self.part.pending
        return self.may_defer and pending is not None and pending.delta is combine.output and not pending.options

    def weight(self, node: Node, role: str = "weight") -> Any:
        name = self.prefix + node.weights[role]
        return self.instead.get(name) or self.planner.model.weights[name]

    def vector(self, node: Node, role: str) -> Tensor | None:
        name = node.weights.get(role)
        return None if name is None else self.planner.model.vectors[self.prefix + name]
