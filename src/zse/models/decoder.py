"""The one forward: records the launches of a decoder-only transformer over a flat batch of tokens.

A batch is [tokens, hidden_size]: prompts, chunks of prompts and single decoded tokens of several sequences stand one
after another; what differs between them is in StepBuffers. What differs between architectures is in ModelConfig. The
number of tokens and of rows with logits are symbols, so that one recording serves every batch up to its size.
"""

from array import array
from typing import NamedTuple

from zse.dtypes import ITEM_BYTES
from zse.errors import ConfigError
from zse.kernels.activation import gated
from zse.kernels.attention import attention, num_splits, partial_shape
from zse.kernels.embed import embed
from zse.kernels.gather import gather_rows
from zse.kernels.matmul import matmul
from zse.kernels.norm import add_rmsnorm
from zse.kernels.qkv_post import qkv_post
from zse.kernels.rope import rope_table
from zse.models.config import ModelConfig, RopeConfig
from zse.tensor import Activation, Tensor

ACTIVATIONS = ("int8", "f32")
SPLIT_TOKENS = 16               # batches up to this size may split a sequence's keys between threads


class StepBuffers(NamedTuple):
    """What the host fills before a step, and the logits it finds afterwards. All of the largest step's size.

    token_ids, positions, token_row i32 [max_tokens]: a token's id, its position in its sequence (from 0), and its row
    in page_table. Tokens of a row stand together, positions ascending by one. page_table i32 [max_rows, max_pages]: the
    row's KV pages as block numbers (KVCache.block_of). logit_rows i32 [max_rows]: which tokens of the batch want
    logits. logits f32 [max_rows, vocab_size]: one line for each of them.
    """

    token_ids: Tensor
    positions: Tensor
    token_row: Tensor
    page_table: Tensor
    logit_rows: Tensor
    logits: Tensor

    @classmethod
    def allocate(cls, device, config: ModelConfig, *, max_tokens: int, max_rows: int, max_pages: int) -> "StepBuffers":
        """max_tokens: of one step; max_rows: sequences of one step; max_pages: of one sequence."""
        def new(dtype, *shape):
            count = ITEM_BYTES[dtype]
            for size in shape:
                count *= size
            return Tensor(device.alloc(count, label="step"), shape, dtype)

        return cls(token_ids=new("i32", max_tokens), positions=new("i32", max_tokens), token_row=new("i32", max_tokens),
                   page_table=new("i32", max_rows, max_pages), logit_rows=new("i32", max_rows),
                   logits=new("f32", max_rows, config.vocab_size))


class Decoder:
    """Records steps of `model` (zse.models.load.Model) over `kv` (zse.cache.layout.KVCache).

    activations: "int8" (8-bit, one scale per 32, wherever the weights are quantized) or "f32". Scratch memory for
    max_tokens is allocated here, once; every recording uses it, so recordings must not run at the same time.
    """

    def __init__(self, device, model, kv, buffers: StepBuffers, *, activations: str = "int8"):
        if activations not in ACTIVATIONS:
            raise ConfigError(f"activations {activations!r}: expected one of {', '.join(ACTIVATIONS)}")
        self.device, self.model, self.kv, self.buffers, self.activations = device, model, kv, buffers, activations
        self.config: ModelConfig = model.config
        self._scratch: dict[str, Tensor] = {}
        self._allocate()

    def record(self, recorder, *, max_tokens: int | None = None, every_token: bool = False) -> Tensor:
        """Record one step and return its logits f32 [rows, vocab_size].

        max_tokens: the most tokens that this recording will run with (default: the buffers' size); small ones choose
        kernels for few tokens. every_token: each token has logits, in order (a decode step): logit_rows is not read and
        the step is run with rows = tokens. Symbols to run with: `symbols()`.
        """
        config, model, step = self.config, self.model, self.buffers
        capacity = step.token_ids.shape[0]
        max_tokens = capacity if max_tokens is None else max_tokens
        if not 0 < max_tokens <= capacity:
            raise ConfigError(f"a step of {max_tokens} tokens: the buffers hold {capacity}")
        tokens = recorder.symbol("tokens", max_tokens)
        max_rows = min(max_tokens, step.logits.shape[0])
        rows = tokens if every_token else recorder.symbol("rows", max_rows)
        run = _Recording(self, recorder, tokens, max_tokens)
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
        head = model.weights["embed" if config.tied_head else "head"]
        final_norm = model.vectors["final_norm"]
        normed = run.activation("head_in", [head]).with_rows(rows)
        if every_token:
            add_rmsnorm(recorder, x, delta, delta_norm, final_norm, normed, config.norm_eps)
        else:
            # Only the rows that are sampled pass the head, which is most of a small model's work.
            add_rmsnorm(recorder, x, delta, delta_norm, None, None, config.norm_eps)
            wanted = self._scratch["wanted"].with_rows(rows)
            gather_rows(recorder, x, step.logit_rows.with_rows(rows), wanted)
            add_rmsnorm(recorder, wanted, None, None, final_norm, normed, config.norm_eps)
        logits = step.logits.with_rows(rows)
        matmul(recorder, normed, head, logits, max_tokens=max_rows)
        return logits

    def symbols(self, tokens: int, rows: int, context: int, *, max_tokens: int | None = None) -> dict[str, int]:
        """The symbols of one run: graph.run(**symbols). context: tokens of the longest sequence, this step's included.
        max_tokens: as given to record()."""
        capacity = self.buffers.token_ids.shape[0]
        symbols = {"tokens": tokens, "rows": rows}
        if (max_tokens or capacity) <= SPLIT_TOKENS:
            symbols["splits"] = num_splits(tokens, self.config.num_kv_heads, context, self.device.threads, SPLIT_TOKENS)
        return symbols

    def _ropes(self) -> list[str]:
        config = self.config
        local = [config.uses_local_rope(layer) for layer in range(config.num_layers)]
        return [name for name, used in (("rope", not all(local)), ("local_rope", any(local))) if used]

    def _allocate(self) -> None:
        config, step = self.config, self.buffers
        tokens, rows = step.token_ids.shape[0], step.logits.shape[0]
        shapes = scratch_shapes(config, tokens, rows, step.page_table.shape[1] * 16)
        self._partial = self._new("partial", *shapes.pop("partial"))
        for name, shape in shapes.items():
            self._new(name, *shape)
        # q, k and v are used up before gate and up are computed.
        self._scratch["qkv"] = self._scratch["gate_up"]
        self._inv_freq = {name: self._constant(getattr(config, name)) for name in self._ropes()}

    def _new(self, name: str, *shape: int) -> Tensor:
        count = 4
        for size in shape:
            count *= size
        tensor = Tensor(self.device.alloc(count, label="scratch"), shape, "f32")
        self._scratch[name] = tensor
        return tensor

    def _constant(self, rope: RopeConfig) -> Tensor:
        values = rope.inv_freq(self.config.head_dim)
        tensor = Tensor(self.device.alloc(4 * len(values), label="scratch"), (len(values),), "f32")
        tensor.view()[:] = memoryview(array("f", values))
        return tensor

    def activation_form(self, weights) -> str:
        """The form of the activations that all of `weights` are multiplied with: dense weights take f32."""
        quantized = all(weight.scheme.kind == "affine" for weight in weights)
        return "int8" if self.activations == "int8" and quantized else "f32"


def qkv_width(config: ModelConfig) -> int:
    return (config.num_heads + 2 * config.num_kv_heads) * config.head_dim


def scratch_shapes(config: ModelConfig, max_tokens: int, max_rows: int, max_context: int) -> dict[str, tuple[int, ...]]:
    """Scratch tensors by name, f32 (an int8 activation takes less and shares the place of its f32 form)."""
    hidden, q_width = config.hidden_size, config.num_heads * config.head_dim
    wide = max(2 * config.intermediate_size, qkv_width(config))
    return {
        "x": (max_tokens, hidden), "delta": (max_tokens, hidden), "normed": (max_tokens, hidden),
        "rope": (max_tokens, config.head_dim), "local_rope": (max_tokens, config.head_dim if config.local_rope else 0),
        "gate_up": (max_tokens, wide), "q": (max_tokens, q_width), "attended": (max_tokens, q_width),
        "gated": (max_tokens, config.intermediate_size), "wanted": (max_rows, hidden),
        "head_in": (max(max_rows, 1), hidden),
        "partial": partial_shape(min(SPLIT_TOKENS, max_tokens), config.num_heads, config.head_dim, max_context),
    }


def scratch_nbytes(config: ModelConfig, max_tokens: int, max_rows: int, max_context: int) -> int:
    """Bytes that a Decoder and its StepBuffers allocate, for the memory plan."""
    total = 4 * max_rows * config.vocab_size
    for shape in scratch_shapes(config, max_tokens, max_rows, max_context).values():
        count = 4
        for size in shape:
            count *= size
        total += count
    return total


class _Recording:
    """One recording: the symbols bound, the scratch with the step's number of tokens."""

    def __init__(self, decoder: Decoder, recorder, tokens, max_tokens: int):
        self.decoder, self.recorder, self.tokens, self.max_tokens = decoder, recorder, tokens, max_tokens
        self.splits = recorder.symbol("splits") if max_tokens <= SPLIT_TOKENS else 1

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.with_rows(self.tokens)

    def tensor(self, name: str, width: int | None = None) -> Tensor:
        tensor = self.decoder._scratch[name]
        return Tensor(tensor.buffer, (self.tokens, width or tensor.shape[1]), tensor.dtype, tensor.offset)

    def activation(self, name: str, weights) -> Tensor | Activation:
        """The scratch `name` in the form that `weights` take."""
        whole = self.decoder._scratch[name]
        if self.decoder.activation_form(weights) == "f32":
            return self.of(whole)
        count, width = whole.shape
        scales = whole.offset + count * width           # bytes: q comes first, then the scales, then the sums
        return Activation(Tensor(whole.buffer, (self.tokens, width), "i8", whole.offset),
                          Tensor(whole.buffer, (self.tokens, width // 32), "f32", scales),
                          Tensor(whole.buffer, (self.tokens, width // 32), "f32", scales + count * width // 8))

    def layer(self, layer: int, x: Tensor, delta, delta_norm, table: Tensor):
        """Record one layer. (delta, delta_norm): what the layer before has to add to x; returns what this one has."""
        recorder, config, kv = self.recorder, self.decoder.config, self.decoder.kv
        step, eps = self.decoder.buffers, config.norm_eps
        weights, vectors = self.decoder.model.weights, self.decoder.model.vectors
        at = f"layers.{layer}."
        fused = weights.get(at + "qkv")
        projections = [fused] if fused else [weights[at + name] for name in "qkv"]
        # The softmax amplifies what int8 activations lose before it: with f32 here the perplexity of Gemma 3 270M is
        # 0.04 % above the reference instead of 0.66 %, the mean KL of SmolLM2 0.0020 instead of 0.0028
        # (benchmarks/LOG.md).
        normed: Tensor | Activation = self.tensor("normed")
        add_rmsnorm(recorder, x, delta, delta_norm, vectors[at + "attn_norm"], normed, eps)
        q, attended = self.tensor("q"), self.activation("attended", [weights[at + "o"]])
        keys, values = kv.keys[layer], kv.values[layer]
        positions, token_row = self.of(step.positions), self.of(step.token_row)
        biases = [vectors.get(at + name) for name in (("qkv_bias",) if fused else ("q_bias", "k_bias", "v_bias"))]
        qkv_post(recorder, self.project(normed, projections, "qkv", biases), vectors.get(at + "q_norm"),
                 vectors.get(at + "k_norm"), table, q, keys, values, step.page_table, token_row, positions, eps)
        attention(recorder, q, keys, values, step.page_table, token_row, positions, attended, config.query_scale,
                  config.window(layer), config.attn_softcap, self.splits,
                  self.decoder._partial if self.splits != 1 else None)
        delta = self.tensor("delta")
        matmul(recorder, attended, weights[at + "o"], delta, bias=vectors.get(at + "o_bias"),
               max_tokens=self.max_tokens)
        fused, down = weights.get(at + "gate_up"), weights[at + "down"]
        projections = [fused] if fused else [weights[at + name] for name in ("gate", "up")]
        normed = self.activation("normed", projections)
        add_rmsnorm(recorder, x, delta, vectors.get(at + "post_attn_norm"), vectors[at + "mlp_norm"], normed, eps)
        inner = self.activation("gated", [down])
        gated(recorder, self.project(normed, projections, "gate_up"), inner, config.activation)
        matmul(recorder, inner, down, delta, max_tokens=self.max_tokens)
        return delta, vectors.get(at + "post_mlp_norm")

    def project(self, normed, projections, name: str, biases=None):
        """Products of the normed tokens with `projections`: one Tensor, or a tuple where the weights are not joined."""
        scratch = self.decoder._scratch[name]
        outs, offset = [], scratch.offset
        for index, weight in enumerate(projections):
            out = Tensor(scratch.buffer, (self.tokens, weight.shape[0]), "f32", offset)
            # They do not read each other: the second and third may start before the first is done.
            matmul(self.recorder, normed, weight, out, bias=biases[index] if biases else None, independent=index > 0,
                   max_tokens=self.max_tokens)
            outs.append(out)
            offset += 4 * scratch.shape[0] * weight.shape[0]
        return outs[0] if len(outs) == 1 else tuple(outs)
