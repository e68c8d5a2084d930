"""Parsing for models with multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): what common.py reads, and the
latents."""

from zse.errors import UnsupportedError
from zse.models.common import gguf_values, hf_values, yarn_factor
from zse.models.config import MAX_WIDTH, Fields, LatentConfig


def hf_latent_values(fields: Fields, generation: Fields | None, *, pairs: bool, **options) -> dict:
    """ModelConfig fields of a config.json. pairs: whether neighbours turn together where the file does not say;
    options: of hf_values()."""
    sizes = {
        name: fields.integer(key, high=MAX_WIDTH)
        for name, key in (("rank", "kv_lora_rank"), ("rotary", "qk_rope_head_dim"), ("nope", "qk_nope_head_dim"))
    }
    heads = fields.integer("num_attention_heads", high=MAX_WIDTH)
    rope = fields.section("rope_parameters") or fields.section("rope_scaling")
    temperature: dict = {}
    if rope is not None and rope.number("llama_4_scaling_beta", 0.0):
        length = rope.integer("original_max_position_embeddings")
        temperature = dict(temperature_beta=rope.number("llama_4_scaling_beta", high=1e9), temperature_length=length)
    value = fields.integer("v_head_dim", fields.integer("hidden_size", high=MAX_WIDTH) // heads, high=MAX_WIDTH)
    if fields.boolean("attention_bias", False):
        raise UnsupportedError(f"{fields.path}: attention_bias", True, [False])
    latent = LatentConfig(
        **sizes,
        value=value,
        query_rank=fields.integer("q_lora_rank", 0, high=MAX_WIDTH),
        pairs=fields.boolean("rope_interleave", pairs),
        **temperature,
    )
    seen = Fields(fields.path, {**fields.values, "head_dim": latent.nope + latent.rotary, "num_key_value_heads": 1})
    values = hf_values(seen, generation, partial=1.0, **options)
    return _with_latent(fields, values, latent, rope.number("mscale_all_dim", 0.0) if rope is not None else 0.0)


def gguf_latent_values(fields: Fields, tensors, *, pairs: bool, **options) -> dict:
    """ModelConfig fields of GGUF metadata. options: of gguf_values()."""
    heads = fields.per_layer(".attention.head_count", high=MAX_WIDTH)
    # Files for llama.cpp's latent cache say of keys and values what it has in it, and of the heads' own apart.
    keys, rotary = _own(fields, "key", None), fields.integer(".rope.dimension_count", high=MAX_WIDTH)
    if keys <= rotary:
        raise fields.fail(".attention.key_length", f"{keys} numbers of a key, of which {rotary} turn")
    latent = LatentConfig(
        rank=fields.integer(".attention.kv_lora_rank", high=MAX_WIDTH),
        rotary=rotary,
        nope=keys - rotary,
        value=_own(fields, "value", fields.integer(".embedding_length", high=MAX_WIDTH) // heads),
        query_rank=fields.integer(".attention.q_lora_rank", 0, high=MAX_WIDTH),
        pairs=pairs,
    )
    plain = {f"{fields.prefix}.attention.{name}": keys for name in ("key_length", "value_length")}
    plain |= {f"{fields.prefix}.rope.dimension_count": keys, f"{fields.prefix}.attention.head_count_kv": 1}
    values = gguf_values(Fields(fields.path, {**fields.values, **plain}, fields.prefix), tensors, **options)
    # What converters write of mscale_all_dim.
    multiplier = fields.number(".rope.scaling.yarn_log_multiplier", 0.0)
    return _with_latent(fields, values, latent, 10 * multiplier)


def _own(fields: Fields, which: str, default: int | None) -> int:
    """Numbers of a head's key or value."""
    length = f".attention.{which}_length"
    missing = {} if default is None else {"default": default}
    return fields.integer(f"{length}_mla" if fields.get(f"{length}_mla") else length, high=MAX_WIDTH, **missing)


def _with_latent(fields: Fields, values: dict, latent: LatentConfig, all_dims: float) -> dict:
    """all_dims: mscale_all_dim of yarn, by which scores are scaled, too."""
    changes: dict = dict(rotary_dim=latent.rotary)
    if all_dims and values["rope"].attention_factor is None:
        changes["attention_factor"] = 1.0  # GGUF: mscale is mscale_all_dim, and cancels it, in all of these models
    rope = fields.change_rope(values["rope"], **changes)
    scale = yarn_factor(rope.factor, all_dims) if all_dims and rope.scaling == "yarn" else 1.0
    return values | dict(
        latent=latent,
        head_dim=latent.nope + latent.rotary,
        num_kv_heads=1,
        rope=rope,
        query_scale=(latent.nope + latent.rotary) ** -0.5 * scale**2,
    )
