"""What a model's forward is written in. An architecture is a class:

    class Qwen3(Decoder):
        def layer(self, x, i):
            q, k, v = self.qkv(self.norm(x, "attn_norm", i), i, qk_norm=True)
            x = x + self.linear(self.attention(q, k, v, i), "o", i)
            return x + self.mlp(self.norm(x, "mlp_norm", i), i)

`layer` runs over symbolic tensors (zse.plan.trace) once for each kind of layer, and zse.plan makes launches of what it
did: nothing here knows a device, a dtype or a weight's scheme. The contract:

- x is the residual stream. `x + y` is made in place: after it the old x must not be used (the planner says so).
- Names are those of weights without their layer: "attn_norm", "o". A linear has the bias NAME_bias where the model has
  one. q, k, v and gate, up are named apart; where they lie joined (as "qkv", "gate_up") one product computes them.
- What `layer` asks of the configuration by i must be in `kind(i)`, beside which layers of one kind have weights of the same
  names, shapes and schemes.
- A new operation is a method here that adds a node, a launch in zse.plan.launch, a rule where it fuses, and a name in
  zse.plan.forward.BY_ROW where a row of its results depends on no other.
"""

from collections.abc import Container, Hashable, Iterator
from typing import Any, ClassVar

import msgspec

from zse.models.config import Fields, ModelConfig, RopeConfig
from zse.models.names import HF_PREFIXES, LLAMA, MIXTURE, MLP, MODEL, Names, Role, hf_prefix, layer_roles
from zse.plan.trace import Trace, Value

StateParts = tuple[tuple[str, tuple[int, ...]], ...]


class Decoder:
    """A decoder-only transformer. An architecture writes `layer`, `from_hf` and `from_gguf`, and overrides what differs
    from Llama:

    names: a layer's roles with their names. hf_norm_plus_one: a Hugging Face file stores norm weights as their distance
    from 1. whole_qk_norm: q and k are normalized over all heads together. norm_kind: of `norm`: "rms", or "layer"
    (LayerNorm without a bias). norms_on_host: "final_norm" of hidden states that are pooled is computed there.
    model_names: of the tensors that are no layer's."""

    names: ClassVar[Names] = LLAMA
    hf_norm_plus_one: ClassVar[bool] = False
    whole_qk_norm: ClassVar[bool] = False
    norm_kind: ClassVar[str] = "rms"
    norms_on_host: ClassVar[bool] = True
    model_names: ClassVar[Names] = MODEL

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
        if config.ple_width:
            width = config.num_layers * config.ple_width
            yield Role("ple_embed", (config.vocab_size, width), "matrix")
            yield Role("ple_proj", (width, config.hidden_size), "matrix")
            yield Role("ple_norm", (config.ple_width,), "norm")
        for layer in range(config.num_layers):
            for role in cls.layer_roles(config, layer):
                yield msgspec.structs.replace(role, name=f"layers.{layer}.{role.name}")
        yield Role("final_norm", (config.hidden_size,), "norm")
        if not config.tied_head:
            yield Role("head", (config.vocab_size, config.hidden_size), "matrix")

    @classmethod
    def layer_roles(cls, config: ModelConfig, layer: int) -> list[Role]:
        """The roles of layer `layer`, without its prefix."""
        return layer_roles(config, cls.layer_names(config, layer), layer, cls.whole_qk_norm)

    @classmethod
    def layer_names(cls, config: ModelConfig, layer: int) -> Names:
        """Those of `names` that layer `layer` has: a dense MLP or experts."""
        if config.moe is None:
            return cls.names
        left_out = MLP if config.moe.is_sparse(layer) else MIXTURE
        return {name: found for name, found in cls.names.items() if name not in left_out}

    @classmethod
    def gguf_name(cls, role: str) -> str:
        """ "layers.3.q" → "blk.3.attn_q.weight"; of a stack of experts see zse.models.experts."""
        if not role.startswith("layers."):
            return cls.model_names[role][0]
        _, layer, name = role.split(".")
        return "|".join(f"blk.{layer}.{way}" for way in cls.names[name][0].split("|"))

    @classmethod
    def hf_name(cls, role: str, prefix: str = "model.") -> str:
        """ "layers.3.q" → "model.layers.3.self_attn.q_proj.weight"; the head has a prefix of its own."""
        if not role.startswith("layers."):
            return (HF_PREFIXES[prefix] if role == "head" else prefix) + cls.model_names[role][1]
        _, layer, name = role.split(".")
        return "|".join(f"{prefix}layers.{layer}.{way}" for way in cls.names[name][1].split("|"))

    @classmethod
    def file_name(cls, config: ModelConfig, role: str, naming: str, prefix: str) -> str:
        """What a file with names of `naming` calls a role."""
        return cls.gguf_name(role) if naming == "gguf" else cls.hf_name(role, prefix)

    @classmethod
    def hf_prefix(cls, path: object, names: Container[str]) -> str:
        """What stands before a Hugging Face file's names, told by where its embedding is. Raises FormatError."""
        return hf_prefix(path, names, cls.model_names["embed"][1])

    @classmethod
    def state_parts(cls, config: ModelConfig, layer: int) -> StateParts:
        """What a sequence carries through layer `layer`: (name, shape) of each part, in f32; () where ModelConfig.mixers
        has none of it. Names are those that operations look for: "conv" [kernel - 1, channels], the last inputs, oldest
        first; "delta" [v heads, k size, v size]; "ssm" [heads, state size, head size]."""
        return ()

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

    def finish(self, x: Value) -> Value:
        """The hidden states that an encoder gives, after its last layer."""
        raise NotImplementedError

    def kind(self, i: int) -> Hashable:
        """What layer i differs by from others, beside its weights."""
        return self.config.mixer(i), self.config.window(i), self.rope(i, "q"), self.rope(i, "k")

    def rope(self, i: int, name: str) -> str | None:
        """Which of `ropes` layer i turns `name`, q or k, by; None: by none."""
        if self.config.rope_of(i) is None:
            return None
        return "local" if self.config.uses_local_rope(i) else "global"

    def ropes(self) -> dict[str, RopeConfig | None]:
        """The rotations that layers choose from; those that are used have a table."""
        return {"global": self.config.rope, "local": self.config.local_rope}

    def rows(self, name: str, i: int) -> int:
        """Rows of a weight of layer i that may lie joined with others."""
        config = self.config
        heads = {"q": config.num_heads, "k": config.kv_heads_of(i), "v": config.kv_heads_of(i)}
        if config.moe is not None and name.endswith("_exps"):
            return config.moe.held * config.moe.intermediate_size
        if config.moe is not None and name.startswith("shared_"):
            return config.moe.shared_size
        return heads[name] * config.head_dim_of(i) if name in heads else config.intermediate_of(i)

    # -- operations

    def embed(self, scale: float | None = None) -> Value:
        """scale (default: the configuration's embed_scale) times the rows of "embed" of the step's token ids."""
        _, width = self.trace.shape("embed")
        scale = self.config.embed_scale if scale is None else scale
        return self.trace.add("embed", (), width, {"weight": "embed"}, is_stream=True, scale=scale)

    def taken(self, norm: str = "", width: int = 0) -> Value:
        """Of each token the row of another stream that Planner.record() is told, normalized by the vector `norm`. width: of it,
        where it is not hidden_size."""
        weights = {"norm": norm} if norm else {}
        return self.trace.add("taken", (), width or self.config.hidden_size, weights)

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

    def head_norm(self, x: Value, name: str | None, i: int) -> Value:
        """RMSNorm of q, k or v, times the vector `name`."""
        if name is not None:
            self.trace.shape(name)
        weights = {} if name is None else {"weight": name}
        options: dict[str, Any] = {"whole": True} if self.whole_qk_norm and name else {}
        return self.trace.add("head_norm", (x,), x.width, weights, eps=self.config.norm_eps, **options)

    def rotate(self, x: Value, i: int, name: str) -> Value:
        """`name`, q or k, turned by the layer's rope."""
        return self.trace.add("rotate", (x,), x.width, rope=self.rope(i, name))

    def attention(self, q: Value, k: Value | None, v: Value | None, i: int) -> Value:
        """Causal attention, k and v of this step's tokens written to the cache before; None: an earlier layer wrote its
        own."""
        config = self.config
        options: dict[str, Any] = dict(window=config.window(i), softcap=config.attn_softcap, scale=config.query_scale)
        inputs = (q,) if k is None or v is None else (q, k, v)
        weights = {"sinks": "sinks"} if "sinks" in self.trace.shapes else {}
        return self.trace.add("attend", inputs, q.width, weights, **options)

    def layer_inputs(self, x: Value) -> None:
        """Each layer's own embeddings of the step's tokens, for `gate_inputs`: (norm of x's product with "ple_proj" +
        the rows of "ple_embed") / sqrt(2). x: the stream as it was embedded."""
        config = self.config
        width = self.trace.shape("ple_embed")[1]
        scale = config.ple_width**0.5
        rows = self.trace.add("embed", (), width, {"weight": "ple_embed"}, scale=scale)
        # The product is to be multiplied with hidden_size ** -0.5 first: the norm does not see it but by its eps.
        eps = config.norm_eps * config.hidden_size
        inputs = self.linear(x, "ple_proj"), rows
        self.trace.add("layer_inputs", inputs, 0, {"norm": "ple_norm"}, eps=eps)

    def gate_inputs(self, gate: Value, i: int) -> Value:
        """act(gate) * the layer's own embeddings."""
        return self.trace.add("gate_inputs", (gate,), gate.width, activation=self.config.activation)

    def scale_stream(self, x: Value, name: str, i: int) -> Value:
        """The stream times the one number of the vector `name`."""
        self.trace.shape(name)
        return self.trace.add("scale_stream", (x,), x.width, {"weight": name}, is_stream=True)

    def latent_attention(self, x: Value, i: int) -> Value:
        """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in its absorbed form, before "o": queries come
        into the space of the latents, results out of it; the latent and the key that turns of this step's tokens are
        written to the cache."""
        config, latent = self.config, self.config.latent
        assert latent is not None, "a configuration without latents"
        options: dict[str, Any] = dict(heads=config.num_heads)
        post: dict[str, Any] = options | dict(rope=self.rope(i, "q"), eps=latent.norm_eps, pairs=latent.pairs)
        q = self.linear(x, "q_a" if latent.query_rank else "q_whole", i, exact=True)
        new = self.linear(x, "kv_a", i, exact=True)
        if latent.query_rank:
            q = self.trace.add("norm", (q,), q.width, {"weight": "q_a_norm"}, eps=latent.norm_eps, kind="rms")
            q = self.linear(q, "q_b", i, exact=True)
        turned = self.trace.add("latent", (q, new), config.num_heads * latent.rotary, {"norm": "kv_a_norm"}, **post)
        queries = self._head_linear(q, "k_b")
        options |= dict(scale=config.query_scale, temperature=(latent.temperature_beta, latent.temperature_length))
        attended = self.trace.add("attend_latent", (queries, turned), queries.width, **options)
        return self._head_linear(attended, "v_b")

    def _head_linear(self, x: Value, name: str) -> Value:
        """Each head's own matrix times its first numbers in x."""
        rows, _ = self.trace.shape(name)
        return self.trace.add("head_linear", (x,), rows, {"weight": name}, heads=self.config.num_heads)

    def mlp(self, x: Value, i: int) -> Value:
        """down(act(gate(x)) * up(x)), or what the layer's experts give."""
        if "router" in self.trace.shapes:
            return self.mixture(x, i)
        return self.dense(x, i)

    def dense(self, x: Value, i: int) -> Value:
        """down(act(gate(x)) * up(x))."""
        gate, up = self.linear(x, "gate", i), self.linear(x, "up", i)
        return self.linear(self.gate(gate, up), "down", i)

    def mixture(self, x: Value, i: int, routed: Value | None = None) -> Value:
        """What the experts of "gate_exps", "up_exps", "down_exps" that "router" chooses give, weighted and added, with
        what the shared expert of "shared_gate", ... gives, times sigmoid of "shared_router" where there is one. routed:
        what the router reads (default: x)."""
        routing = self.route(self.linear(x if routed is None else routed, "router", i))
        gate, up = (self.experts(x, name, routing, gather=True) for name in ("gate_exps", "up_exps"))
        inputs = [self.experts(self.gate(gate, up), "down_exps", routing), routing]
        if "shared_down" in self.trace.shapes:
            gate, up = self.linear(x, "shared_gate", i), self.linear(x, "shared_up", i)
            inputs.append(self.linear(self.gate(gate, up), "shared_down", i))
            if "shared_router" in self.trace.shapes:
                inputs.append(self.linear(x, "shared_router", i))
        return self.trace.add("combine", tuple(inputs), x.width)

    def route(self, logits: Value) -> Value:
        """Which experts compute each token, by the configuration's `moe`; "router_select" is added to choose, weights
        are multiplied with the chosen experts' "expert_factors"."""
        moe = self.config.moe
        assert moe is not None
        vectors = dict(bias="router_select", factors="expert_factors")
        weights = {role: name for role, name in vectors.items() if name in self.trace.shapes}
        options: dict[str, Any] = dict(
            gating=moe.gating, normalize=moe.normalize, eps=moe.normalize_eps, scale=moe.scale
        )
        options |= dict(groups=moe.groups, groups_used=moe.groups_used, group_best=moe.group_best)
        return self.trace.add("route", (logits,), moe.experts_per_token, weights, **options)

    def experts(self, x: Value, name: str, routing: Value, *, gather: bool = False) -> Value:
        """x @ weight.T + bias with each pair's expert of the stack `name`. gather: x is a row a token, not a row a
        pair."""
        weights = {"weight": name} | ({"bias": f"{name}_bias"} if f"{name}_bias" in self.trace.shapes else {})
        moe, (rows, columns) = self.config.moe, self.trace.shape(name)
        assert moe is not None
        if columns != x.width or rows % moe.held:
            raise ValueError(f"experts {name}: [{rows}, {columns}] for {moe.held} and inputs {x.width} wide")
        width, chosen = rows // moe.held, moe.experts_per_token
        return self.trace.add("experts", (x, routing), width, weights, per_token=chosen, gather=gather)

    def gate(self, gate: Value, up: Value) -> Value:
        """act(gate) * up with the configuration's activation."""
        return self.trace.add("gate", (gate, up), up.width, per_token=up.per_token, activation=self.config.activation)

    def activate(self, x: Value) -> Value:
        """The configuration's activation of x alone."""
        return self.trace.add("act", (x,), x.width, per_token=x.per_token, activation=self.config.activation)

    def wanted(self, x: Value) -> Value:
        """The rows of the stream whose logits are wanted."""
        return x if self.trace.all_rows else self.trace.add("wanted", (x,), x.width)

    def head(self, x: Value) -> Value:
        """Logits f32 [rows, vocab_size], before a factor and `softcap`."""
        return self.linear(x, "embed" if self.config.tied_head else "head")

    def softcap(self, x: Value, cap: float) -> Value:
        """cap * tanh(x / cap); x itself for a cap of 0."""
        return self.trace.add("cap", (x,), x.width, cap=cap) if cap else x
