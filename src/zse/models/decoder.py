"""The one forward: records the launches of a decoder-only transformer over a flat batch of tokens.

A batch is [tokens, hidden_size]: prompts, chunks of prompts and single decoded tokens of several sequences stand one
after another; what differs between them is in StepBuffers. What differs between architectures is in ModelConfig, what
differs between processors in Forms. The number of tokens and of rows with logits are symbols, so that one recording
serves every batch up to its size.
"""

from array import array
from math import prod
from typing import Any, NamedTuple

from zse.errors import ConfigError
from zse.kernels.activation import gated
from zse.kernels.attention import attention, num_splits
from zse.kernels.embed import embed
from zse.kernels.gather import gather_rows
from zse.kernels.matmul import matmul
from zse.kernels.norm import add_rmsnorm
from zse.kernels.qkv_post import qkv_post
from zse.kernels.quantize import quantize
from zse.kernels.rope import rope_table
from zse.models.config import ModelConfig, RopeConfig
from zse.models.forms import FORMS, SPLIT_TOKENS, gates_in_matmul, nbytes_of, scratch_tensors, shared_places
from zse.tensor import Activation, Fp8Activation, Tensor


class StepBuffers(NamedTuple):
    """What the host fills before a step, and the logits it finds afterwards. All of the largest step's size.

    token_ids, positions, token_row i32 [max_tokens]: a token's id, its position in its sequence (from 0), and its row
    in page_table. Tokens of a row stand together, positions ascending by one. page_table i32 [max_rows, max_pages]: the
    row's KV blocks by their numbers (KVCache.table_entries); of models with groups of layers one such table behind the other. logit_rows i32 [max_rows]: which tokens of the batch want
    logits. logits f32 [max_rows, vocab_size]: one line for each of them.
    """

    token_ids: Tensor
    positions: Tensor
    token_row: Tensor
    page_table: Tensor
    logit_rows: Tensor
    logits: Tensor

    @classmethod
    def allocate(
        cls, device, config: ModelConfig, *, max_tokens: int, max_rows: int, max_pages: int, groups: int = 1
    ) -> "StepBuffers":
        """max_tokens: of one step; max_rows: sequences of one step; max_pages: of one sequence; groups: of layers."""

        def new(dtype, *shape):
            return _new(device, "step", dtype, shape)

        return cls(
            token_ids=new("i32", max_tokens),
            positions=new("i32", max_tokens),
            token_row=new("i32", max_tokens),
            page_table=new("i32", groups * max_rows, max_pages),
            logit_rows=new("i32", max_rows),
            logits=new("f32", max_rows, config.vocab_size),
        )


class Decoder:
    """Records steps of `model` (zse.models.load.Model) over `kv` (zse.cache.layout.KVCache).

    activations: what matrix products take: "int8" (8-bit, one scale per 32, wherever the weights are quantized) or
    "f32" on a CPU, "bf16" on a GPU. buffers: of the largest step. deterministic: every recording takes the forms of the
    largest step, so that a token's bits do not depend on how many run with it. Scratch memory is allocated here, once;
    every recording uses it, so recordings must not run at the same time.
    """

    def __init__(
        self, device, model, kv, buffers: StepBuffers, *, activations: str | None = None, deterministic: bool = False
    ):
        self.forms = forms = FORMS[device.family]
        # A CPU's sums do not depend on the batch in any of its forms.
        self._pins_forms = deterministic and forms.family == "gpu"
        self.activations = activations or forms.activations[0]
        if self.activations not in forms.activations:
            raise ConfigError(f"activations {activations!r}: expected one of {', '.join(forms.activations)}")
        self.device, self.model, self.kv, self.buffers = device, model, kv, buffers
        self.config: ModelConfig = model.config
        self._scratch: dict[str, Tensor] = {}
        self._allocate()

    def record(
        self,
        recorder,
        *,
        step: StepBuffers | None = None,
        max_tokens: int | None = None,
        every_token: bool = False,
        longest_run: int | None = None,
    ) -> Tensor:
        """Record one step and return its logits f32 [rows, vocab_size].

        step: the inputs (default: the Decoder's buffers). max_tokens: the most tokens that this recording will run with
        (default: the buffers' size); small ones choose kernels for few tokens. every_token: each token has logits, in
        order: logit_rows is not read and the step is run with rows = tokens. longest_run: the most tokens of one row in
        this recording where that is known (1: a decode step), which leaves out kernels for longer ones. Symbols to run
        with: `symbols()`.
        """
        step = step or self.buffers
        max_tokens = self._size_of(step, max_tokens)
        max_rows = min(max_tokens, step.logits.shape[0])
        head_rows = step.logits.shape[0] if self._pins_forms else max_rows  # for which the head's form is chosen
        run, x, delta, delta_norm = self._record_layers(recorder, step, max_tokens, longest_run)
        rows = run.tokens if every_token else recorder.symbol("rows", max_rows)
        logits = step.logits.with_rows(rows)
        if every_token:
            normed = run.activation("head_in", [self._head], head_rows).with_rows(rows)
            add_rmsnorm(recorder, x, delta, delta_norm, self.model.vectors["final_norm"], normed, self.config.norm_eps)
            matmul(recorder, normed, self._head, logits, max_tokens=head_rows)
        else:
            # Only the rows that are sampled pass the head, which is most of a small model's work.
            if delta is not None:
                add_rmsnorm(recorder, x, delta, delta_norm, None, None, self.config.norm_eps)
            self._record_head(recorder, run, x, step.logit_rows.with_rows(rows), logits, head_rows)
        return logits

    def record_hidden(self, recorder, *, step: StepBuffers | None = None, max_tokens: int | None = None) -> Tensor:
        """Record one step without the head and return the hidden states before the final norm, f32 [tokens, hidden]:
        `hidden`, whole until the next step of any recording. step, max_tokens: as of record()."""
        step = step or self.buffers
        run, x, delta, delta_norm = self._record_layers(recorder, step, self._size_of(step, max_tokens), None)
        if delta is not None:
            add_rmsnorm(recorder, x, delta, delta_norm, None, None, self.config.norm_eps)
        return x

    @property
    def hidden(self) -> Tensor:
        """f32 [max_tokens, hidden_size]: where record_hidden() leaves the step's hidden states."""
        return self._scratch["x"]

    def record_head(self, recorder, wanted: Tensor, logits: Tensor) -> None:
        """Record the final norm and the head over lines of `hidden`: wanted i32 [max_rows], logits f32 [max_rows,
        vocab_size]; to run with rows <= max_rows."""
        max_rows = wanted.shape[0]
        rows = recorder.symbol("rows", max_rows)
        run = _Recording(self, recorder, self.buffers, rows, max_rows, splits=False)
        self._record_head(recorder, run, self.hidden, wanted.with_rows(rows), logits.with_rows(rows), max_rows)

    def _record_layers(self, recorder, step: StepBuffers, max_tokens: int, longest_run: int | None):
        """(the _Recording, x, and what is still to be added to x: delta, its norm), after the last layer."""
        config, model = self.config, self.model
        run = _Recording(self, recorder, step, recorder.symbol("tokens", max_tokens), max_tokens)
        run.plan(longest_run)
        x = run.tensor("x")
        embed(recorder, run.of(step.token_ids), model.weights["embed"], x, config.embed_scale)
        tables = {}
        for name in self._ropes():
            rope = getattr(config, name)
            tables[name] = run.tensor(name)
            rope_table(recorder, run.of(step.positions), self._inv_freq[name], tables[name], rope.mscale)
        delta = delta_norm = None
        for layer in range(config.num_layers):
            table = tables["local_rope" if config.uses_local_rope(layer) else "rope"]
            delta, delta_norm = run.layer(layer, x, delta, delta_norm, table)
        return run, x, delta, delta_norm

    def _record_head(
        self, recorder, run: "_Recording", x: Tensor, wanted: Tensor, logits: Tensor, max_rows: int
    ) -> None:
        """max_rows: what the head's form is chosen for."""
        gathered = self._scratch["wanted"].with_rows(wanted.shape[0])
        gather_rows(recorder, x, wanted, gathered)
        normed = run.activation("head_in", [self._head], max_rows).with_rows(wanted.shape[0])
        add_rmsnorm(recorder, gathered, None, None, self.model.vectors["final_norm"], normed, self.config.norm_eps)
        matmul(recorder, normed, self._head, logits, max_tokens=max_rows)

    @property
    def _head(self):
        return self.model.weights["embed" if self.config.tied_head else "head"]

    def _size_of(self, step: StepBuffers, max_tokens: int | None) -> int:
        capacity = step.token_ids.shape[0]
        max_tokens = capacity if max_tokens is None else max_tokens
        if not 0 < max_tokens <= capacity:
            raise ConfigError(f"a step of {max_tokens} tokens: the buffers hold {capacity}")
        return max_tokens

    def symbols(self, tokens: int, rows: int, context: int, *, max_tokens: int | None = None) -> dict[str, int]:
        """The symbols of one run: graph.run(**symbols). context: tokens of the longest sequence, this step's included.
        max_tokens: as given to record()."""
        capacity = self.buffers.token_ids.shape[0]
        symbols = {"tokens": tokens, "rows": rows}
        if self.splits_attention(max_tokens or capacity):
            symbols["splits"] = num_splits(tokens, self.config.num_kv_heads, context, self.device.threads, SPLIT_TOKENS)
        return symbols

    def _ropes(self) -> list[str]:
        config = self.config
        local = [config.uses_local_rope(layer) for layer in range(config.num_layers)]
        return [name for name, used in (("rope", not all(local)), ("local_rope", any(local))) if used]

    def splits_attention(self, max_tokens: int) -> bool:
        """Whether recordings for up to `max_tokens` have the symbol `splits`."""
        return self.forms.family == "cpu" and max_tokens <= SPLIT_TOKENS

    def _allocate(self) -> None:
        step = self.buffers
        schemes = {name: weight.scheme for name, weight in self.model.weights.items()}
        tensors = scratch_tensors(
            self.config,
            self.forms,
            schemes,
            max_tokens=step.token_ids.shape[0],
            max_rows=step.logits.shape[0],
            max_context=step.page_table.shape[1] * 16,
        )
        shared_nbytes, places = shared_places(self.forms, tensors)
        shared = self.device.alloc(shared_nbytes, label="scratch") if places else None
        for name, (dtype, shape) in tensors.items():
            if name in places:
                self._scratch[name] = Tensor(shared, shape, dtype, places[name])
            else:
                self._scratch[name] = _new(self.device, "scratch", dtype, shape)
        self.attention_scratch = None
        if self.forms.family == "gpu":
            from zse.kernels.gpu.attention_plan import AttentionScratch

            self.attention_scratch = AttentionScratch.allocate(
                self.device, self.config, step.token_ids.shape[0], step.logits.shape[0], step.page_table.shape[1] * 16
            )
        if "gate_up" in self._scratch:
            # q, k and v are used up before gate and up are computed.
            self._scratch["qkv"] = self._scratch["gate_up"]
        self._inv_freq = {name: self._constant(getattr(self.config, name)) for name in self._ropes()}

    def _constant(self, rope: RopeConfig) -> Tensor:
        values = array("f", rope.inv_freq(self.config.head_dim))
        tensor = _new(self.device, "scratch", "f32", (len(values),))
        self.device.write(tensor, memoryview(values))
        return tensor

    def activation_form(self, weights, max_tokens: int) -> str:
        """The form of the activations that all of `weights` are multiplied with in a step of up to `max_tokens`."""
        kinds = {weight.scheme.kind for weight in weights}
        if self.activations == "int8":
            return "int8" if kinds == {"affine"} else "f32"  # dense weights take f32
        if self.activations == "bf16":
            # Few tokens: fp8 weights are converted exactly, in registers. Many: Hopper's tensor cores take both as fp8.
            if kinds != {"fp8"}:
                return "bf16"
            from zse.kernels.gpu.gemm import wants_fp8

            return "fp8" if all(wants_fp8(self.device, weight.scheme, max_tokens) for weight in weights) else "bf16"
        return self.activations


def _new(device, label: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    return Tensor(device.alloc(nbytes_of(dtype, shape), label=label), shape, dtype)


class _Recording:
    """One recording: the symbols bound, the scratch with the step's number of tokens."""

    def __init__(self, decoder: Decoder, recorder, step: StepBuffers, tokens, max_tokens: int, splits: bool = True):
        self.decoder, self.recorder, self.step = decoder, recorder, step
        self.tokens, self.max_tokens = tokens, max_tokens
        # What the forms of products are chosen for.
        self.form_tokens = decoder.buffers.token_ids.shape[0] if decoder._pins_forms else max_tokens
        groups, (rows, max_pages) = decoder.kv.num_groups, step.page_table.shape
        shape = rows // groups, max_pages
        self.page_tables = [
            step.page_table._replace(shape=shape, offset=step.page_table.offset + group * 4 * prod(shape))
            for group in range(groups)
        ]
        self.splits = recorder.symbol("splits") if splits and decoder.splits_attention(max_tokens) else 1
        # What attention() takes besides: how a CPU's threads share a sequence, or what a GPU works from.
        self.sharing: dict[str, Any] = {
            "splits": self.splits,
            "partial": decoder._scratch["partial"] if self.splits != 1 else None,
        }

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.with_rows(self.tokens)

    def plan(self, longest_run: int | None) -> None:
        """On a GPU: cut the batch into the tasks of its attention, once for all layers."""
        scratch = self.decoder.attention_scratch
        if scratch is None:
            return
        from zse.kernels.gpu.attention_plan import MAX_RUN, plan_attention

        if self.decoder._pins_forms:
            # The kernel for prompts takes every row: it and the one for few tokens add in different orders.
            scratch, longest_run = scratch._replace(max_run=0), None
        elif longest_run is None and self.max_tokens <= MAX_RUN:
            longest_run = self.max_tokens
        plan_attention(self.recorder, scratch, self.of(self.step.token_row), self.of(self.step.positions), longest_run)
        self.sharing = {"scratch": scratch, "longest_run": longest_run}

    def tensor(self, name: str, width: int | None = None) -> Tensor:
        tensor = self.decoder._scratch[name]
        return Tensor(tensor.buffer, (self.tokens, width or tensor.shape[1]), tensor.dtype, tensor.offset)

    def activation(
        self, name: str, weights, max_tokens: int | None = None, int16: bool = False
    ) -> Tensor | Activation | Fp8Activation:
        """The scratch `name` in the form that `weights` take. Quantized forms share the place of the unquantized.
        int16: in place of int8."""
        whole = self.decoder._scratch[name]
        form = self.decoder.activation_form(weights, max_tokens or self.form_tokens)
        count, width = whole.shape
        scales = whole.offset + count * width  # bytes: q comes first, then the scales, then the sums
        if form == "int8":
            low = Tensor(whole.buffer, (self.tokens, width), "i8", scales + count * width // 4) if int16 else None
            return Activation(
                Tensor(whole.buffer, (self.tokens, width), "i8", whole.offset),
                Tensor(whole.buffer, (self.tokens, width // 32), "f32", scales),
                Tensor(whole.buffer, (self.tokens, width // 32), "f32", scales + count * width // 8),
                low,
            )
        if form == "fp8":
            return Fp8Activation(
                Tensor(whole.buffer, (self.tokens, width), "e4m3", whole.offset),
                Tensor(whole.buffer, (self.tokens,), "f32", scales),
            )
        return self.of(whole)

    def layer(self, layer: int, x: Tensor, delta, delta_norm, table: Tensor):
        """Record one layer. (delta, delta_norm): what the layer before has to add to x; returns what this one has."""
        recorder, config, kv = self.recorder, self.decoder.config, self.decoder.kv
        step, eps = self.step, config.norm_eps
        weights, vectors = self.decoder.model.weights, self.decoder.model.vectors
        at = f"layers.{layer}."
        fused = weights.get(at + "qkv")
        projections = [fused] if fused else [weights[at + name] for name in "qkv"]
        # The softmax amplifies what int8 activations lose before it: with f32 here the perplexity of Gemma 3 270M
        # is 0.04 % above the reference instead of 0.66 %, the mean KL of SmolLM2 0.0020 instead of 0.0028
        # (benchmarks/LOG.md). 16 bits are as good as f32 and cost half.
        normed = self.normed(x, delta, delta_norm, vectors[at + "attn_norm"], projections, int16=True)
        keys, values, page_table = kv.keys[layer], kv.values[layer], self.page_tables[kv.group_of[layer]]
        positions, token_row, q = self.of(step.positions), self.of(step.token_row), self.tensor("q")
        biases = [vectors.get(at + name) for name in (("qkv_bias",) if fused else ("q_bias", "k_bias", "v_bias"))]
        qkv_post(
            recorder,
            self.project(normed, projections, "qkv", biases),
            vectors.get(at + "q_norm"),
            vectors.get(at + "k_norm"),
            table,
            q,
            keys,
            values,
            page_table,
            token_row,
            positions,
            eps,
        )
        attended, o = self.made("attended", weights[at + "o"])
        attention(
            recorder,
            q,
            keys,
            values,
            page_table,
            token_row,
            positions,
            attended,
            config.query_scale,
            config.window(layer),
            config.attn_softcap,
            **self.sharing,
        )
        delta = self.add(
            x, self.taken(attended, o, "q"), o, vectors.get(at + "post_attn_norm"), vectors.get(at + "o_bias")
        )
        fused = weights.get(at + "gate_up")
        projections = [fused] if fused else [weights[at + name] for name in ("gate", "up")]
        gates = fused is not None and gates_in_matmul(self.decoder.forms, config)
        normed = self.normed(x, delta, vectors.get(at + "post_attn_norm"), vectors[at + "mlp_norm"], projections)
        inner, down = self.made("gated", weights[at + "down"])
        if gates:
            from zse.kernels.matmul import matmul_gated

            matmul_gated(recorder, normed, fused, inner, config.activation, max_tokens=self.form_tokens)
        else:
            gated(recorder, self.project(normed, projections, "gate_up"), inner, config.activation)
        delta = self.add(x, self.taken(inner, down, "quantized"), down, vectors.get(at + "post_mlp_norm"))
        return delta, vectors.get(at + "post_mlp_norm")

    def normed(
        self, x: Tensor, delta, delta_norm, norm: Tensor, weights, int16: bool = False
    ) -> Tensor | Activation | Fp8Activation:
        """rmsnorm(x + delta) * norm as the products with `weights` take it. int16: as in activation()."""
        normed = self.activation("normed", weights, int16=int16)
        add_rmsnorm(self.recorder, x, delta, delta_norm, norm, normed, self.decoder.config.norm_eps)
        return normed

    def made(self, name: str, weight):
        """(what an operation writes for `weight` to be multiplied with, the weight)."""
        if self.decoder.activation_form([weight], self.form_tokens) == "fp8":
            return self.tensor(name), weight  # quantized by a launch of its own: see taken()
        return self.activation(name, [weight]), weight

    def taken(self, made, weight, place: str):
        """`made` in the form that `weight` takes; quantized into the scratch `place`."""
        if self.decoder.activation_form([weight], self.form_tokens) != "fp8":
            return made
        scratch = self.decoder._scratch[place]
        count, width = self.decoder.buffers.token_ids.shape[0], made.shape[1]
        out = Fp8Activation(
            Tensor(scratch.buffer, (self.tokens, width), "e4m3", scratch.offset),
            Tensor(scratch.buffer, (self.tokens,), "f32", scratch.offset + count * width),
        )
        quantize(self.recorder, made, out)
        return out

    def add(self, x: Tensor, a, weight, post_norm, bias=None) -> Tensor | None:
        """Record the product that is to be added to x. Returns it if a later launch has to add it, None if done."""
        if self.decoder.forms.fuses and post_norm is None:
            matmul(self.recorder, a, weight, x, bias=bias, max_tokens=self.form_tokens, accumulate=True)
            return None
        delta = self.tensor("delta")
        matmul(self.recorder, a, weight, delta, bias=bias, max_tokens=self.form_tokens)
        return delta

    def project(self, normed, projections, name: str, biases=None):
        """Products of the normed tokens with `projections`: one Tensor, or a tuple where the weights are not joined."""
        scratch = self.decoder._scratch[name]
        outs, offset = [], scratch.offset
        for index, weight in enumerate(projections):
            out = Tensor(scratch.buffer, (self.tokens, weight.shape[0]), "f32", offset)
            # They do not read each other: the second and third may start before the first is done.
            matmul(
                self.recorder,
                normed,
                weight,
                out,
                bias=biases[index] if biases else None,
                independent=index > 0,
                max_tokens=self.form_tokens,
            )
            outs.append(out)
            offset += 4 * scratch.shape[0] * weight.shape[0]
        return outs[0] if len(outs) == 1 else tuple(outs)
