"""What a model's forward is written in. An architecture is a class:

    class Qwen3(Decoder):
        def layer(self, x, i):
            q, k, v = self.qkv(self.norm(x, "attn_norm", i), i, qk_norm=True)
            x = x + self.linear(self.attention(q, k, v, i), "o", i)
            return x + self.mlp(self.norm(x, "mlp_norm", i), i)

`layer` runs over symbolic tensors (zse.plan.trace) once for each kind of layer, and zse.plan makes launches of what it did:
nothing here knows a device, a dtype or a weight's scheme. The contract:

- x is the residual stream. `x + y` is made in place: after it the old x must not be used (the planner says so).
- Names are those of weights without their layer: "attn_norm", "o". A linear has the bias NAME_bias where the model has
  one. q, k, v and gate, up are named apart; where they lie joined (as "qkv", "gate_up") one product computes them.
- What `layer` asks of the configuration by i must be in `kind(i)`, beside which layers of one kind have weights of the same
  names, shapes and schemes.
- A new operation is a method here that adds a node, a launch in zse.plan.record, and a rule where it fuses.
"""

from collections.abc import Hashable, Iterator
from typing import Any, ClassVar

from zse.models.config import Fields, ModelConfig, RopeConfig
from zse.models.names import HF_PREFIXES, LLAMA, MODEL, Names, Role, layer_roles
from zse.plan.trace import Trace, Value


class Decoder:
    """A decoder-only transformer. An architecture writes `layer`, `from_hf` and `from_gguf`, and overrides what differs from
    Llama:

    names: a layer's roles with their names. hf_norm_plus_one: a Hugging Face file stores norm weights as their distance
    from 1. whole_qk_norm: q and k are normalized over all heads together. norm_kind: of `norm`: "rms", or "layer"
    (LayerNorm without a bias).
    """

    names: ClassVar[Names] = LLAMA
    hf_norm_plus_one: ClassVar[bool] = False
    whole_qk_norm: ClassVar[bool] = False
    norm_kind: ClassVar[str] = "rms"

    def __init__(self, config: ModelConfig):
        self.config = config
        self.trace = Trace({})

    # -- the files

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        """ModelConfig of config.json (and generation_config.json, for its end-of-sequence ids)."""
        raise NotImplementedError

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        """ModelConfig of GGUF metadata. tensors: name → shape."""
        raise NotImplementedError

    @classmethod
    def roles(cls, config: ModelConfig) -> Iterator[Role]:
        """Every tensor of the model in execution order; a tied head is not a tensor of its own."""
        yield Role("embed", (config.vocab_size, config.hidden_size), "matrix")
        roles = layer_roles(config, cls.names, cls.whole_qk_norm)
        for layer in range(config.num_layers):
            for role in roles:
                yield Role(f"layers.{layer}.{role.name}", role.shape, role.kind, role.heads)
        yield Role("final_norm", (config.hidden_size,), "norm")
        if not config.tied_head:
            yield Role("head", (config.vocab_size, config.hidden_size), "matrix")

    @classmethod
    def gguf_name(cls, role: str) -> str:
        """ "layers.3.q" → "blk.3.attn_q.weight"."""
        if not role.startswith("layers."):
            return MODEL[role][0]
        _, layer, name = role.split(".")
        return f"blk.{layer}.{cls.names[name][0]}"

    @classmethod
    def hf_name(cls, role: str, prefix: str = "model.") -> str:
        """ "layers.3.q" → "model.layers.3.self_attn.q_proj.weight"; the head has a prefix of its own."""
        if not role.startswith("layers."):
            return (HF_PREFIXES[prefix] if role == "head" else prefix) + MODEL[role][1]
        _, layer, name = role.split(".")
        return f"{prefix}layers.{layer}.{cls.names[name][1]}"

    # -- the forward: begin, each layer, end

    def begin(self) -> Value:
        """The stream that the first layer gets."""
        return self.embed()

    def layer(self, x: Value, i: int) -> Value:
        """The stream after layer i."""
        raise NotImplementedError

    def end(self, x: Value) -> Value:
        """The logits, of the tokens for which they are wanted: only these pass the head, which is most of a small
        model's work."""
        logits = self.head(self.norm(self.wanted(x), "final_norm"))
        return self.softcap(logits * self.config.logit_scale, self.config.logit_softcap)

    def kind(self, i: int) -> Hashable:
        """What layer i differs by from others, beside its weights."""
        return self.config.window(i), self.rope(i, "q"), self.rope(i, "k")

    def rope(self, i: int, name: str) -> str | None:
        """Which of `ropes` layer i turns `name`, q or k, by; None: by none."""
        if self.config.rope_of(i) is None:
            return None
        return "local" if self.config.uses_local_rope(i) else "global"

    def ropes(self) -> dict[str, RopeConfig | None]:
        """The rotations that layers choose from; those that are used have a table."""
        return {"global": self.config.rope, "local": self.config.local_rope}

    def rows(self, name: str) -> int:
        """Rows of a weight that may lie joined with others."""
        config = self.config
        heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        return heads[name] * config.head_dim if name in heads else config.intermediate_size

    # -- operations

    def embed(self, scale: float | None = None) -> Value:
        """scale (default: the configuration's embed_scale) times the rows of "embed" of the step's token ids."""
        _, width = self.trace.shape("embed")
        scale = self.config.embed_scale if scale is None else scale
        return self.trace.add("embed", (), width, {"weight": "embed"}, is_stream=True, scale=scale)

    def norm(self, x: Value, name: str, i: int | None = None) -> Value:
        """x normalized (see norm_kind), times the vector `name`."""
        self.trace.shape(name)
        options: dict[str, Any] = dict(eps=self.config.norm_eps, kind=self.norm_kind)
        return self.trace.add("norm", (x,), x.width, {"weight": name}, **options)

    def linear(self, x: Value, name: str, i: int | None = None, *, exact: bool = False) -> Value:
        """x @ weight.T + bias. exact: 16 bits where others take their inputs in 8 (zse.plan.forms)."""
        weights = {"weight": name} | ({"bias": f"{name}_bias"} if f"{name}_bias" in self.trace.shapes else {})
        rows, columns = self.trace.shape(name)
        if columns != x.width:
            raise ValueError(f"linear {name}: {columns} columns of inputs that are {x.width} wide")
        return self.trace.add("linear", (x,), rows, weights, exact=exact)

    def qkv(self, x: Value, i: int, *, qk_norm: bool = False) -> tuple[Value, Value, Value]:
        """Queries, keys and values. qk_norm: RMSNorm by "q_norm" and "k_norm", of each head or of all together as these
        vectors are long, before the rotation."""
        q, k, v = (self.linear(x, name, i, exact=True) for name in "qkv")
        if qk_norm:
            q, k = self.head_norm(q, "q_norm", i), self.head_norm(k, "k_norm", i)
        return self.rotate(q, i, "q"), self.rotate(k, i, "k"), v

    def head_norm(self, x: Value, name: str, i: int) -> Value:
        """RMSNorm of q or k."""
        self.trace.shape(name)
        return self.trace.add("head_norm", (x,), x.width, {"weight": name}, eps=self.config.norm_eps)

    def rotate(self, x: Value, i: int, name: str) -> Value:
        """`name`, q or k, turned by the layer's rope."""
        return self.trace.add("rotate", (x,), x.width, rope=self.rope(i, name))

    def attention(self, q: Value, k: Value, v: Value, i: int) -> Value:
        """Causal attention, k and v of this step's tokens written to the cache before."""
        config = self.config
        options: dict[str, Any] = dict(window=config.window(i), softcap=config.attn_softcap, scale=config.query_scale)
        return self.trace.add("attend", (q, k, v), q.width, **options)

    def mlp(self, x: Value, i: int) -> Value:
        """down(act(gate(x)) * up(x))."""
        gate, up = self.linear(x, "gate", i), self.linear(x, "up", i)
        return self.linear(self.gate(gate, up), "down", i)

    def gate(self, gate: Value, up: Value) -> Value:
        """act(gate) * up with the configuration's activation."""
        return self.trace.add("gate", (gate, up), up.width, activation=self.config.activation)

    def wanted(self, x: Value) -> Value:
        """The rows of the stream whose logits are wanted."""
        return x if self.trace.all_rows else self.trace.add("wanted", (x,), x.width)

    def head(self, x: Value) -> Value:
        """Logits f32 [rows, vocab_size], before a factor and `softcap`."""
        return self.linear(x, "embed" if self.config.tied_head else "head")

    def softcap(self, x: Value, cap: float) -> Value:
        """cap * tanh(x / cap); x itself for a cap of 0."""
        return self.trace.add("cap", (x,), x.width, cap=cap) if cap else x
