"""ModelConfig: parsers, limits, exact names, RoPE scalings against transformers' functions."""

import math
import subprocess
import sys

import numpy as np
import pytest
import tiny
import tiny_rope

from zse.errors import FormatError, UnsupportedError
from zse.models import registry
from zse.models.config import ModelConfig, RopeConfig

REFERENCES = np.load(tiny.REFERENCES)
SHAPES = {"token_embd.weight": (64, 64), "blk.0.attn_q.weight": (64, 64)}


def metadata(arch="llama", **changes):
    values = {
        "general.architecture": arch,
        f"{arch}.block_count": 2,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": 64,
        f"{arch}.feed_forward_length": 96,
        f"{arch}.attention.head_count": 4,
        f"{arch}.attention.head_count_kv": 2,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 50000.0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in values.items() if value is not None}


def from_gguf(shapes=SHAPES, **changes):
    values = metadata(**changes)
    return registry.config_from_gguf("m.gguf", values, shapes)


def from_hf(family="llama", generation=None, **changes):
    config = {key: value for key, value in (tiny.config(family) | changes).items() if value != "absent"}
    return registry.config_from_hf("config.json", config, generation)


def test_llama_gguf():
    config = from_gguf()
    assert (config.architecture, config.vocab_size, config.num_layers, config.head_dim) == ("llama", 64, 2, 16)
    assert (config.rope.theta, config.query_scale, config.tied_head) == (50000.0, 0.25, True)
    assert (config.bos_id, config.eos_ids) == (1, (2,))
    assert not from_gguf({**SHAPES, "output.weight": (64, 64)}).tied_head
    assert from_gguf({**SHAPES, "blk.0.attn_q.bias": (64,)}).qkv_bias


def test_end_of_turn_ids_join_the_end_of_sequence_ids():
    assert from_gguf(tokenizer__ggml__eot_token_id=5, tokenizer__ggml__eom_token_id=2).eos_ids == (2, 5)
    assert from_hf(generation={"eos_token_id": [7, 2]}).eos_ids == (7, 2)


def test_gemma3_gguf_knows_what_the_metadata_leaves_out():
    changes = {
        "gemma3.attention.key_length": 16,
        "gemma3.attention.sliding_window": 512,
        "gemma3.rope.freq_base": 1e6,
        "gemma3.block_count": 18,
    }
    config = registry.config_from_gguf("m.gguf", metadata("gemma3", **changes), SHAPES)
    assert [layer for layer in range(18) if not config.sliding_layers[layer]] == [5, 11, 17]
    assert config.window(0) == 512 and config.window(5) == 0
    assert config.local_rope.theta == 10000.0 and config.rope.theta == 1e6
    assert config.uses_local_rope(4) and not config.uses_local_rope(5)
    assert config.embed_scale == 8.0 and config.post_norms and config.qk_norm and config.activation == "gelu_tanh"
    scaled = registry.config_from_gguf(
        "m.gguf",
        metadata("gemma3", **changes, **{"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}),
        SHAPES,
    )
    assert (scaled.rope.scaling, scaled.rope.factor, scaled.local_rope.scaling) == ("linear", 8.0, "none")


def test_gemma3_27b_has_its_own_query_scale():
    config = registry.config_from_gguf(
        "m.gguf",
        metadata(
            "gemma3",
            **{
                "gemma3.block_count": 62,
                "gemma3.attention.key_length": 128,
                "gemma3.embedding_length": 5376,
                "gemma3.attention.head_count": 32,
            },
        ),
        {"token_embd.weight": (64, 5376)},
    )
    assert config.query_scale == pytest.approx(168**-0.5)


@pytest.mark.parametrize(
    "name", ["Qwen3", "LlamaForCausalLMv2", "MyLlamaForCausalLM", "llamaforcausallm", "GPT2LMHeadModel"]
)
def test_architecture_names_are_exact(name):
    with pytest.raises(UnsupportedError) as error:
        from_hf(architectures=[name])
    assert name in str(error.value) and all(known in str(error.value) for known in registry.HF_NAMES)


@pytest.mark.parametrize("name", ["llama4", "qwen3-next", "qwen3-moe", "gemma", "olmo3", "", "LLAMA"])
def test_gguf_architecture_names_are_exact(name):
    with pytest.raises(UnsupportedError, match="supported: " + ", ".join(registry.GGUF_NAMES)):
        from_gguf(general__architecture=name)


def test_qwen3_is_not_qwen2():
    assert from_hf("qwen3").qk_norm and not from_hf("qwen2").qk_norm
    assert from_hf("qwen2").qkv_bias and not from_hf("qwen3").qkv_bias


BAD = [0, -1, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1, 1.5, "7", True, [], {}, math.nan, math.inf]


@pytest.mark.parametrize("value", BAD, ids=str)
@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "context_length",
        "attention.key_length",
    ],
)
def test_every_gguf_size_is_checked(key, value):
    with pytest.raises((FormatError, UnsupportedError)) as error:
        registry.config_from_gguf("m.gguf", metadata(**{f"llama.{key}": value}), SHAPES)
    assert "m.gguf" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("value", [-1, 1 << 63, 1.5, "7", True, [], {}, math.nan], ids=str)
@pytest.mark.parametrize(
    "key",
    [
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "vocab_size",
        "num_key_value_heads",
        "max_position_embeddings",
        "head_dim",
    ],
)
def test_every_hf_size_is_checked(key, value):
    with pytest.raises((FormatError, UnsupportedError)) as error:
        from_hf(**{key: value})
    assert "config.json" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(num_hidden_layers=4097), "num_hidden_layers: 4097 is outside 1..4096"),
        (dict(hidden_size=72), "hidden_size"),
        (dict(num_attention_heads=3), "num_heads"),
        (dict(rms_norm_eps=math.nan), "rms_norm_eps"),
        (dict(rms_norm_eps="small"), "not a number"),
        (dict(eos_token_id=160), "token id 160 is outside the vocabulary of 160"),
        (dict(eos_token_id=[1, "x"]), "not a token id"),
        (dict(rope_theta=0), "rope_theta"),
        (dict(rope_scaling=7), "not an object"),
        (dict(rope_scaling=dict(rope_type="linear")), "factor: is missing"),
        (dict(rope_scaling=dict(rope_type="linear", factor=0)), "factor"),
        (dict(architectures=None), "architectures"),
        (dict(architectures=[3]), "architectures"),
        (dict(vocab_size="absent"), "vocab_size: is missing"),
    ],
)
def test_what_a_config_may_not_say(changes, message):
    with pytest.raises(FormatError, match=message) as error:
        from_hf(**changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "family, changes, what",
    [
        ("llama", dict(hidden_act="relu"), "gelu_pytorch_tanh, silu"),
        ("llama", dict(rope_scaling=dict(rope_type="proportional", factor=2.0)), "llama3"),
        ("llama", dict(mlp_bias=True), "mlp_bias"),
        ("llama", dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
        ("gemma3", dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
        ("gemma3", dict(layer_types=["chunked_attention"] * 7), "chunked_attention"),
    ],
)
def test_what_is_not_supported_is_named(family, changes, what):
    with pytest.raises(UnsupportedError, match=what):
        from_hf(family, **changes)


def test_layers_that_differ_are_not_supported():
    assert from_gguf(llama__feed_forward_length=[96, 96]).intermediate_size == 96
    with pytest.raises(UnsupportedError, match="differs between layers"):
        from_gguf(llama__feed_forward_length=[96, 128])


def test_json_round_trip():
    for family in tiny.FAMILIES:
        config = from_hf(family)
        assert ModelConfig.from_json(config.to_json()) == config
    with pytest.raises(FormatError, match="num_layers"):
        ModelConfig.from_json(config.to_json().replace(b'"num_layers":3', b'"num_layers":0'))


@pytest.mark.parametrize("name", tiny_rope.SCALINGS)
def test_rope_frequencies_equal_transformers(name):
    rope = from_hf(rope_parameters=tiny_rope.SCALINGS[name] | dict(rope_theta=tiny_rope.THETA), head_dim=128).rope
    for context, (*wanted, scale) in zip(tiny_rope.CONTEXTS, REFERENCES[f"rope {name}"], strict=True):
        assert rope.inv_freq(128, context) == pytest.approx(wanted, rel=2e-6)
        assert rope.mscale == pytest.approx(scale)


@pytest.mark.exhaustive("beside PyTorch")
@pytest.mark.parametrize("name", tiny_rope.SCALINGS)
def test_frequencies_are_those_of_transformers(name):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import make_references

    for named, found in make_references.rope(name).items():
        np.testing.assert_allclose(found, REFERENCES[named], rtol=1e-6)


@pytest.mark.exhaustive("beside PyTorch")
def test_rope_of_a_part_of_the_head_equals_transformers():
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = {name: tiny_rope.LONGROPE[name][:48] for name in ("short_factor", "long_factor")}
    raw = dict(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_scaling=dict(type="longrope", **factors),
        partial_rotary_factor=0.75,
        rope_theta=10000.0,
    )
    theirs = transformers.Phi3Config(**raw)
    ours = from_hf(**(raw | dict(architectures=["Phi3ForCausalLM"], rope_parameters=None, head_dim=128))).rope
    assert ours.rotary_dim == 96
    for context in (64, 65):
        want, scale = ROPE_INIT_FUNCTIONS["longrope"](theirs, "cpu", seq_len=context)
        assert ours.inv_freq(128, context) == pytest.approx([float(value) for value in want], rel=2e-6)
        assert ours.mscale == pytest.approx(scale)


def test_a_wrapper_says_of_its_text_part_what_is_not_the_default():
    """Gemma 3 4B's config.json."""
    transformers = pytest.importorskip("transformers")
    text = dict(
        model_type="gemma3_text",
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=34,
        rope_scaling=dict(factor=8.0, rope_type="linear"),
        sliding_window=1024,
    )
    config = registry.config_from_hf(
        "config.json", dict(architectures=["Gemma3ForConditionalGeneration"], text_config=text, eos_token_id=[1, 106])
    )
    theirs = transformers.Gemma3TextConfig(**{key: value for key, value in text.items() if key != "model_type"})
    assert (config.num_heads, config.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert (config.head_dim, config.vocab_size) == (theirs.head_dim, theirs.vocab_size)
    assert (config.max_context, config.norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert config.query_scale == theirs.query_pre_attn_scalar**-0.5 and config.activation == "gelu_tanh"
    assert config.sliding_layers == tuple(kind == "sliding_attention" for kind in theirs.layer_types)
    assert (config.rope.theta, config.rope.factor, config.local_rope.theta) == (1e6, 8.0, 1e4)
    assert config.tied_head and config.eos_ids == (1, 106)
    with pytest.raises(UnsupportedError, match="gemma3_text"):
        registry.config_from_hf(
            "config.json",
            dict(architectures=["Gemma3ForConditionalGeneration"], text_config=text | dict(model_type="gemma4")),
        )


def test_attn_factor_multiplies_what_yarn_says():
    """vLLM's key, and what llama.cpp does with its own: it multiplies yarn's factor; attention_factor replaces it."""
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    default = from_hf(rope_scaling=yarn).rope.mscale
    assert from_hf(rope_scaling=yarn | dict(attn_factor=0.5)).rope.mscale == pytest.approx(default / 2)
    keys = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__attn_factor": 0.5}
    changes = {f"llama__{key}": value for key, value in keys.items()}
    config = from_gguf(llama__rope__scaling__original_context_length=64, **changes)
    assert config.rope.mscale == pytest.approx(default / 2)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_sliding_window_of_a_gguf(arch):
    def windows(**changes):
        values = metadata(arch, **{f"{arch}__attention__{key}": value for key, value in changes.items()})
        config = registry.config_from_gguf("m.gguf", values, SHAPES)
        return [config.window(layer) for layer in range(config.num_layers)]

    assert windows() == windows(sliding_window=0) == windows(sliding_window=128) == [0, 0]
    assert windows(sliding_window=32) == [32, 32]


def test_freq_factors_divide():
    assert RopeConfig(freq_factors=(2.0, 4.0)).inv_freq(4) == pytest.approx((0.5, 0.01 / 4))
    with pytest.raises(ValueError, match="2 values for 8 dimensions"):
        RopeConfig(freq_factors=(2.0, 4.0)).inv_freq(8)


def test_every_role_has_a_name_in_both_formats():
    for family in tiny.FAMILIES:
        config = from_hf(family)
        roles = [role.name for role in registry.architecture(config.architecture).roles(config)]
        assert len(set(roles)) == len(roles)
        hf = [registry.architecture(config.architecture).hf_name(role) for role in roles]
        assert sorted(hf) == sorted(tiny.shapes(family))
        gguf = [registry.architecture(config.architecture).gguf_name(role) for role in roles]
        assert len(set(gguf)) == len(gguf)


def test_parsing_does_not_import_numpy():
    code = (
        "import sys, zse.models.registry; [zse.models.registry.architecture(name) for name in "
        "zse.models.registry.ARCHITECTURES]; bad = {'numpy', 'asyncio', 'tokenizers', 'torch'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
