"""Parsing that the architectures share: the keys every GGUF and every Hugging Face config.json has."""

import math

from zse.errors import UnsupportedError
from zse.models.config import MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, MISSING, Fields, MoeConfig, RopeConfig
from zse.models.names import ROPE_TENSORS

ACTIVATION_NAMES = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_GGUF_ROPE = {"none": "none", "linear": "linear", "yarn": "yarn", "longrope": "longrope"}
STANDS_STILL = 1e30  # the divisor of a frequency that does not turn, as GGUF files have it
_HF_ROPE = {
    "default": "none",
    "mrope": "none",  # of a text all parts of a position are one number
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",  # what Phi-3's first files call it
}


def gguf_values(fields: Fields, tensors, *, partial: bool = False, norm: str = "rms", experts: bool = False) -> dict:
    """ModelConfig fields from GGUF metadata (prefix = architecture).

    Args:
        tensors: name → shape, ne[0] first or last: only presence and the total size of the embedding are used, for what
            the metadata leaves out.
        partial: the architecture may turn a part of each head only.
        norm: "rms" or "layer": whose epsilon to read.
        experts: the architecture has some, which gguf_moe() reads.
    """
    hidden = fields.integer(".embedding_length", high=MAX_WIDTH)
    heads = fields.per_layer(".attention.head_count", high=MAX_WIDTH)
    head_dim = fields.integer(".attention.key_length", None, high=MAX_WIDTH)
    if head_dim is None:
        if hidden % heads:
            raise fields.fail(".attention.head_count", f"{heads} does not divide the embedding length {hidden}")
        head_dim = hidden // heads
    value_dim = fields.integer(".attention.value_length", head_dim, high=MAX_WIDTH)
    if value_dim != head_dim:
        raise UnsupportedError(f"{fields.path}: {fields.key('.attention.value_length')}", value_dim, [head_dim])
    rope_dim = fields.integer(".rope.dimension_count", head_dim, high=MAX_WIDTH)
    if rope_dim != head_dim and not partial:
        raise UnsupportedError(
            f"{fields.path}: partial rotation, {fields.key('.rope.dimension_count')}", rope_dim, [head_dim]
        )
    if fields.integer(".expert_count", 0, low=0) and not experts:
        raise UnsupportedError(f"{fields.path}: {fields.key('.expert_count')}", fields.get(".expert_count"), [0])
    shape = tensors.get("token_embd.weight")
    if shape is None:
        raise fields.fail("token_embd.weight", "the tensor is missing")
    vocab = _size(shape) // hidden
    eos: list[int] = []
    for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"):
        eos += fields.token_ids(key)
    bos = fields.token_ids("tokenizer.ggml.bos_token_id")
    return dict(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=fields.integer(".block_count", high=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=fields.per_layer(".attention.head_count_kv", heads, high=MAX_WIDTH),
        head_dim=head_dim,
        intermediate_size=fields.per_layer(".feed_forward_length", high=MAX_WIDTH),
        norm_eps=fields.number(f".attention.layer_norm_{'rms_' if norm == 'rms' else ''}epsilon", high=1.0),
        max_context=fields.integer(".context_length"),
        rope=gguf_rope(fields, rotary_dim=rope_dim if rope_dim != head_dim else 0),
        query_scale=head_dim**-0.5,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        tied_head="output.weight" not in tensors,
        bos_id=bos[0] if bos else None,
        eos_ids=tuple(dict.fromkeys(eos)),
    )


def gguf_rope(fields: Fields, default_theta: float = 10000.0, rotary_dim: int = 0) -> RopeConfig:
    """RoPE of GGUF metadata; what stands in tensors there (names.ROPE_TENSORS) are entries of the metadata here."""
    values: dict = dict(theta=fields.number(".rope.freq_base", default_theta, low=1.0), rotary_dim=rotary_dim)
    kind = fields.choice(".rope.scaling.type", _GGUF_ROPE, "none")
    frequencies, short, long = (fields.numbers(name) for name in ROPE_TENSORS)
    if long:  # Phi-3's files do not name a type
        original = fields.integer(".rope.scaling.original_context_length")
        return fields.build_rope(
            **values,
            scaling="longrope",
            original_context=original,
            factor=fields.integer(".context_length") / original,
            attention_factor=fields.number(".rope.scaling.attn_factor", None),
            short_factors=short,
            long_factors=long,
        )
    values["freq_factors"] = frequencies
    if kind == "none":
        # Files of 2023 give the linear factor alone.
        factor = fields.number(".rope.scale_linear", 1.0, low=1.0)
        return fields.build_rope(**values, scaling="linear" if factor != 1.0 else "none", factor=factor)
    values |= dict(scaling=kind, factor=fields.number(".rope.scaling.factor", 1.0, low=1.0))
    if kind == "yarn":
        values["original_context"] = fields.integer(".rope.scaling.original_context_length")
        # llama.cpp multiplies yarn's own factor with this one.
        factor = fields.number(".rope.scaling.attn_factor", None)
        if factor is not None:
            values["attention_factor"] = factor * yarn_factor(values["factor"])
        values["beta_fast"] = fields.number(".rope.scaling.yarn_beta_fast", 32.0)
        values["beta_slow"] = fields.number(".rope.scaling.yarn_beta_slow", 1.0)
    return fields.build_rope(**values)


def yarn_factor(factor: float, mscale: float = 1.0) -> float:
    """What yarn multiplies cos and sin with where a file does not say."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def hf_values(
    fields: Fields,
    generation: Fields | None,
    *,
    tied_default: bool = False,
    default_theta: float = 10000.0,
    partial: float = 0.0,
    norm: str = "rms",
) -> dict:
    """ModelConfig fields from a Hugging Face config.json and, for the end-of-sequence ids, generation_config.json.

    Args:
        default_theta: RoPE's base where the file does not say.
        partial: which part of each head turns where the file does not say; 0: the architecture turns all of it.
        norm: "rms" or "layer": whose epsilon to read.
    """
    hidden = fields.integer("hidden_size", high=MAX_WIDTH)
    heads = fields.integer("num_attention_heads", high=MAX_WIDTH)
    head_dim = fields.integer("head_dim", None, high=MAX_WIDTH)
    if head_dim is None:
        if hidden % heads:
            raise fields.fail("num_attention_heads", f"{heads} does not divide hidden_size {hidden}")
        head_dim = hidden // heads
    if fields.boolean("mlp_bias", False):
        raise UnsupportedError(f"{fields.path}: mlp_bias", True, [False])
    parameters = fields.section("rope_parameters") or fields
    part = parameters.number("partial_rotary_factor", fields.number("partial_rotary_factor", partial or 1.0))
    if part != 1.0 and not partial:
        raise UnsupportedError(f"{fields.path}: partial_rotary_factor", part, [1.0])
    rope = hf_rope(fields, default_theta=default_theta, rotary_dim=int(head_dim * part) if part != 1.0 else 0)
    context = fields.integer("max_position_embeddings")
    if rope.scaling == "dynamic":
        context = int(context * rope.factor)
    bias = fields.boolean("attention_bias", False)
    eos = (generation.token_ids("eos_token_id") if generation else ()) + fields.token_ids("eos_token_id")
    bos = fields.token_ids("bos_token_id")
    activation = "hidden_activation" if fields.get("hidden_activation") is not None else "hidden_act"
    return dict(
        vocab_size=fields.integer("vocab_size", high=MAX_VOCAB),
        hidden_size=hidden,
        num_layers=fields.integer("num_hidden_layers", high=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads, high=MAX_WIDTH),
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size", high=MAX_WIDTH),
        norm_eps=fields.number("rms_norm_eps" if norm == "rms" else "layer_norm_eps", 1e-6, high=1.0),
        max_context=context,
        rope=rope,
        query_scale=head_dim**-0.5,
        qkv_bias=bias,
        o_bias=bias,
        activation=fields.choice(activation, ACTIVATION_NAMES, "silu"),
        tied_head=fields.boolean("tie_word_embeddings", tied_default),
        bos_id=bos[0] if bos else None,
        eos_ids=tuple(dict.fromkeys(eos)),
    )


def hf_rope(
    fields: Fields,
    *,
    layer_type: str | None = None,
    default_theta: float = 10000.0,
    rotary_dim: int = 0,
    head_dim: int = 0,
) -> RopeConfig:
    """RoPE of a config.json: `rope_parameters` (transformers 5, optionally one entry per layer type), or `rope_theta`
    and `rope_scaling` (transformers 4). head_dim: of layers whose RoPE may be "proportional", Gemma 4's: frequencies of
    a whole head, of which all but the first stand still."""
    section = fields.section("rope_parameters")
    if section is not None and layer_type is not None and section.get(layer_type) is not None:
        section = section.section(layer_type)
    if head_dim and section is not None and section.get("rope_type") == "proportional":
        turned = int(section.number("partial_rotary_factor", 1.0, high=1.0) * head_dim // 2)
        divisors = (section.number("factor", 1.0, low=1.0),) * turned + (STANDS_STILL,) * (head_dim // 2 - turned)
        theta = section.number("rope_theta", default_theta, low=1.0)
        return fields.build_rope(theta=theta, rotary_dim=head_dim, freq_factors=divisors)
    scaling = section or fields.section("rope_scaling")
    theta = fields.number("rope_theta", default_theta, low=1.0)
    if scaling is None:
        return fields.build_rope(theta=theta, rotary_dim=rotary_dim)
    return rope_from_section(fields, scaling, scaling.number("rope_theta", theta, low=1.0), rotary_dim)


def rope_from_section(fields: Fields, scaling: Fields, theta: float, rotary_dim: int = 0) -> RopeConfig:
    """RoPE from a rope_scaling or rope_parameters object."""
    name = "rope_type" if scaling.get("rope_type") is not None else "type"
    kind = scaling.choice(name, _HF_ROPE, "default")
    values: dict = dict(theta=theta, rotary_dim=rotary_dim, scaling=kind)
    if kind in ("linear", "dynamic", "llama3"):
        values["factor"] = scaling.number("factor", low=1.0)
    context = fields.integer("max_position_embeddings", 0)
    if kind == "dynamic":
        values["original_context"] = context
    if kind in ("llama3", "yarn", "longrope"):
        # Phi-3 has it outside of the section, which then counts.
        key = "original_max_position_embeddings"
        original = values["original_context"] = fields.integer(key, scaling.integer(key, context))
    if kind in ("yarn", "longrope"):
        values["factor"] = scaling.number("factor", max(1.0, context / max(original, 1)), low=1.0)
        values["attention_factor"] = scaling.number("attention_factor", None)
    if kind == "llama3":
        values["low_freq_factor"] = scaling.number("low_freq_factor")
        values["high_freq_factor"] = scaling.number("high_freq_factor")
    if kind == "yarn":
        values["beta_fast"] = scaling.number("beta_fast", 32.0)
        values["beta_slow"] = scaling.number("beta_slow", 1.0)
        values["truncate"] = scaling.boolean("truncate", True)
        mscale, all_dims = (scaling.number(name, 0.0) for name in ("mscale", "mscale_all_dim"))
        if values["attention_factor"] is None and mscale and all_dims:
            factor = values["factor"]
            values["attention_factor"] = yarn_factor(factor, mscale) / yarn_factor(factor, all_dims)
        if values["attention_factor"] is None and scaling.get("attn_factor") is not None:
            values["attention_factor"] = scaling.number("attn_factor") * yarn_factor(values["factor"])
    if kind == "longrope":
        values["short_factors"], values["long_factors"] = map(scaling.numbers, ("short_factor", "long_factor"))
    return fields.build_rope(**values)


def scaled_residual(values: dict, multiplier: float) -> dict:
    """Where all that joins the residual stream is multiplied with r, the stream is kept as x / r: the branches join it
    as they are, and RMSNorm gives the same for x / r with eps / r²."""
    return values | dict(
        embed_scale=values.get("embed_scale", 1.0) / multiplier, norm_eps=values["norm_eps"] / multiplier**2
    )


def pattern_layers(pattern: int, num_layers: int) -> tuple[bool, ...]:
    """True for all layers but each `pattern`th: those that slide, or that rotate."""
    return tuple(bool((layer + 1) % pattern) for layer in range(num_layers)) if pattern else ()


def hf_windows(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Which layers slide, from `layer_types`; () when the file does not say."""
    types = fields.get("layer_types")
    if types is None:
        return ()
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.fail("layer_types", f"is not a list of {num_layers} names")
    table = {"sliding_attention": True, "full_attention": False}
    for name in types:
        if not isinstance(name, str) or name not in table:
            raise UnsupportedError(f"{fields.path}: layer type", str(name)[:60], sorted(table))
    return tuple(table[name] for name in types)


def full_heads(fields: Fields, sliding: tuple[bool, ...]) -> tuple[int, int]:
    """head_dim and KV heads (0: as many as others have) of the layers without a window, of a Gemma 4 config.json.
    transformers 5.23 saves them layer by layer."""
    section, full = fields.section("per_layer_config"), [str(i) for i, slides in enumerate(sliding) if not slides]
    one, names = fields, ("global_head_dim", "num_global_key_value_heads")
    if section is not None:
        if set(section.values) != set(full) or any(section.values[i] != section.values[full[0]] for i in full):
            raise UnsupportedError(
                f"{section.path}: layers", sorted(section.values), ["all of full attention, and alike"]
            )
        one, names = section.section(full[0]) or section, ("head_dim", "num_key_value_heads")
    elif not fields.boolean("attention_k_eq_v", False):
        return fields.integer(names[0], high=MAX_WIDTH), 0
    return one.integer(names[0], high=MAX_WIDTH), one.integer(names[1], 0, high=MAX_WIDTH)


def hf_moe(fields: Fields, num_layers: int, **fixed) -> MoeConfig:
    """The experts of a config.json, by the names that families share. fixed: what this family does not say, or means
    otherwise."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    name = next((name for name in names if fields.get(name) is not None), names[0])
    step = fields.integer("decoder_sparse_step", 1)
    first = fields.integer("first_k_dense_replace", 0, low=0)
    listed = fields.get("mlp_only_layers", [])
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise fields.fail("mlp_only_layers", "is not a list of layers")
    dense = tuple(layer < first or layer in listed or (layer + 1) % step > 0 for layer in range(num_layers))
    inner = fields.integer("moe_intermediate_size", None, high=MAX_WIDTH)
    values = dict(
        num_experts=fields.integer(name, high=MAX_WIDTH),
        experts_per_token=fields.integer("num_experts_per_tok", high=MAX_WIDTH),
        intermediate_size=inner,
        normalize=fields.boolean("norm_topk_prob", False),
        scale=fields.number("routed_scaling_factor", 1.0),
        groups=fields.integer("n_group", 1),
        groups_used=fields.integer("topk_group", 1),
        shared_size=fields.integer("n_shared_experts", 0, low=0) * (inner or 0),
        dense_layers=dense if any(dense) else (),
    )
    return fields.build_moe(**values | fixed)


_GGUF_GATINGS = {1: "softmax", 2: "sigmoid", 3: "softmax_chosen", 4: "sqrt_softplus"}


def gguf_moe(fields: Fields, num_layers: int, **defaults) -> MoeConfig:
    """The experts of GGUF metadata. defaults: what the metadata may leave out, or never say."""
    count = fields.integer(".expert_count", high=MAX_WIDTH)
    values: dict = defaults | dict(
        num_experts=count,
        experts_per_token=fields.integer(".expert_used_count", high=count),
        intermediate_size=fields.integer(
            ".expert_feed_forward_length", defaults.get("intermediate_size", MISSING), high=MAX_WIDTH
        ),
        shared_size=fields.integer(
            ".expert_shared_feed_forward_length", defaults.get("shared_size", 0), low=0, high=MAX_WIDTH
        ),
        normalize=fields.boolean(".expert_weights_norm", defaults.get("normalize", True)),
        scale=fields.number(".expert_weights_scale", 0.0) or defaults.get("scale", 1.0),
        groups=fields.integer(".expert_group_count", 0, low=0) or 1,
        groups_used=fields.integer(".expert_group_used_count", 0, low=0) or 1,
    )
    gating = fields.integer(".expert_gating_func", 0, low=0)
    if gating:
        if gating not in _GGUF_GATINGS:
            raise UnsupportedError(f"{fields.path}: {fields.key('.expert_gating_func')}", gating, _GGUF_GATINGS)
        values["gating"] = _GGUF_GATINGS[gating]
    dense = fields.integer(".leading_dense_block_count", 0, low=0, high=num_layers)
    if dense:
        values["dense_layers"] = tuple(layer < dense for layer in range(num_layers))
    return fields.build_moe(**values)


def gguf_windowed_values(fields: Fields, tensors, *, experts: bool = False) -> dict:
    """gguf_values() where only the file knows of a window (Mistral 7B 0.1 calls itself llama): of all layers, if
    shorter than the context."""
    values = gguf_values(fields, tensors, experts=experts)
    window = fields.integer(".attention.sliding_window", 0, low=0)
    layers = (True,) * values["num_layers"] if 0 < window < values["max_context"] else ()
    return values | dict(sliding_window=window if layers else 0, sliding_layers=layers)


def _size(shape) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total
