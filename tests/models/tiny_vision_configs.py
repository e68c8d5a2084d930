"""config.json and preprocessor_config.json of the tiny models that see, and the sizes of their images."""

import tiny_configs
import tiny_deepseek_vl2
import tiny_hybrids

_GEMMA3 = dict(
    architectures=["Gemma3ForConditionalGeneration"],
    model_type="gemma3",
    text_config=dict(
        model_type="gemma3_text",
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=128,
        vocab_size=160,
        max_position_embeddings=256,
        hidden_activation="gelu_pytorch_tanh",
        rms_norm_eps=1e-6,
        query_pre_attn_scalar=32,
        sliding_window=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    vision_config=dict(
        model_type="siglip_vision_model",
        hidden_size=96,
        intermediate_size=104,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=112,
        patch_size=14,
        vision_use_head=False,
    ),
    mm_tokens_per_image=16,
    boi_token_index=148,
    eoi_token_index=149,
    image_token_index=150,
    eos_token_id=1,
    bos_token_id=2,
    pad_token_id=0,
    tie_word_embeddings=True,
)
_QWEN3_TEXT = dict(
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    intermediate_size=128,
    vocab_size=160,
    max_position_embeddings=256,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
)
_QWEN3_VL = dict(
    architectures=["Qwen3VLForConditionalGeneration"],
    model_type="qwen3_vl",
    text_config=_QWEN3_TEXT
    | dict(
        model_type="qwen3_vl_text",
        rope_parameters=dict(
            rope_type="default", rope_theta=5000000.0, mrope_section=[6, 5, 5], mrope_interleaved=True
        ),
    ),
    vision_config=dict(
        model_type="qwen3_vl_vision",
        depth=4,
        hidden_size=96,
        intermediate_size=104,
        num_heads=4,
        patch_size=4,
        spatial_merge_size=2,
        temporal_patch_size=2,
        out_hidden_size=64,
        num_position_embeddings=36,
        deepstack_visual_indexes=[0, 2],
    ),
    image_token_id=150,
    video_token_id=151,
    vision_start_token_id=148,
    vision_end_token_id=149,
    tie_word_embeddings=True,
    eos_token_id=1,
    bos_token_id=2,
)
_MISTRAL3 = dict(
    architectures=["Mistral3ForConditionalGeneration"],
    model_type="mistral3",
    text_config=_QWEN3_TEXT
    | dict(model_type="mistral", rope_theta=10000.0, rms_norm_eps=1e-5, sliding_window=None, tie_word_embeddings=False),
    vision_config=dict(
        model_type="pixtral",
        hidden_size=64,
        intermediate_size=104,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=64,
        patch_size=4,
        hidden_act="silu",
        rope_theta=10000.0,
    ),
    image_token_index=150,
    spatial_merge_size=2,
    multimodal_projector_bias=False,
    vision_feature_layer=-1,
    tie_word_embeddings=False,
    eos_token_id=1,
    bos_token_id=2,
)
_QWEN3_VL_MOE = _QWEN3_VL | dict(
    architectures=["Qwen3VLMoeForConditionalGeneration"],
    model_type="qwen3_vl_moe",
    text_config=_QWEN3_VL["text_config"]
    | dict(model_type="qwen3_vl_moe_text", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=96),
    vision_config=_QWEN3_VL["vision_config"] | dict(model_type="qwen3_vl_moe_vision"),
)
_QWEN2_5_VL = dict(
    architectures=["Qwen2_5_VLForConditionalGeneration"],
    model_type="qwen2_5_vl",
    text_config=_QWEN3_TEXT
    | dict(
        model_type="qwen2_5_vl_text",
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0, mrope_section=[4, 6, 6]),
    ),
    vision_config=dict(
        model_type="qwen2_5_vl_vision",
        depth=4,
        hidden_size=96,
        intermediate_size=104,
        num_heads=4,
        patch_size=4,
        spatial_merge_size=2,
        temporal_patch_size=2,
        window_size=24,
        out_hidden_size=64,
        fullatt_block_indexes=[1, 3],
    ),
    image_token_id=150,
    video_token_id=151,
    vision_start_token_id=148,
    vision_end_token_id=149,
    tie_word_embeddings=True,
    eos_token_id=1,
    bos_token_id=2,
)
_QWEN2_VL = _QWEN2_5_VL | dict(
    architectures=["Qwen2VLForConditionalGeneration"],
    model_type="qwen2_vl",
    text_config=_QWEN2_5_VL["text_config"] | dict(model_type="qwen2_vl_text"),
    vision_config=dict(
        model_type="qwen2_vl",
        depth=3,
        embed_dim=96,
        num_heads=4,
        mlp_ratio=4,
        patch_size=4,
        spatial_merge_size=2,
        temporal_patch_size=2,
        hidden_size=64,
    ),
)


def _hybrid(family: str) -> dict:
    """As tests/models/tiny_hybrids.py has the text part, in a wrapper as Qwen3.5 is published."""
    text = {name: value for name, value in tiny_hybrids.CONFIGS[family].items() if name != "architectures"}
    name = "Qwen3_5" + "Moe" * family.endswith("moe")
    tower = {name: value for name, value in _QWEN3_VL["vision_config"].items() if not name.startswith("deepstack")}
    outer = dict(architectures=[f"{name}ForConditionalGeneration"], model_type=family, tie_word_embeddings=False)
    return _QWEN3_VL | outer | dict(text_config=text, vision_config=tower | {"model_type": f"{family}_vision"})


def _gemma4(family: str, tower: dict, **text) -> dict:
    """As tests/models/tiny_configs.py has the text part."""
    found = {name: value for name, value in tiny_configs.OTHERS[family].items() if name != "architectures"}
    sizes = dict(intermediate_size=104, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, patch_size=4)
    return dict(
        architectures=["Gemma4ForConditionalGeneration"],
        model_type="gemma4",
        text_config=found | text,
        vision_config=dict(model_type="gemma4_vision", position_embedding_size=1024, **sizes) | tower,
        audio_config=None,
        image_token_id=150,
        boi_token_id=148,
        eoi_token_id=149,
        video_token_id=151,
        audio_token_id=152,
        boa_token_id=153,
        eoa_token_index=154,
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_id=1,
    )


def _gemma4_unified() -> dict:
    sizes = dict(patch_size=4, mm_embed_dim=64, mm_posemb_size=280, output_proj_dims=64)
    found = _gemma4("gemma4_large", {}, use_bidirectional_attention="vision", model_type="gemma4_unified_text")
    outer = dict(architectures=["Gemma4UnifiedForConditionalGeneration"], model_type="gemma4_unified")
    return found | outer | dict(vision_config=dict(model_type="gemma4_unified_vision", **sizes))


CONFIGS = {
    "gemma3": _GEMMA3,
    "qwen2_5_vl": _QWEN2_5_VL,
    "qwen2_vl": _QWEN2_VL,
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL_MOE,
    "qwen3_5": _hybrid("qwen3_5"),
    "qwen3_5_moe": _hybrid("qwen3_5_moe"),
    "mistral3": _MISTRAL3,
    "gemma4": _gemma4("gemma4", dict(hidden_size=64, head_dim=16, use_clipped_linears=True)),
    # Heads that are made wider; images whose parts see each other in layers with a window, which is shorter than one of them.
    "gemma4_moe": _gemma4(
        "gemma4_moe", dict(hidden_size=96, head_dim=24, standardize=True), use_bidirectional_attention="vision"
    ),
    "gemma4_unified": _gemma4_unified(),
    "deepseek_vl2": tiny_deepseek_vl2.CONFIG,
    "deepseek_vl2_plain": tiny_deepseek_vl2.PLAIN,
}
_NORMALIZED = {"image_mean": [0.5, 0.4, 0.45], "image_std": [0.5, 0.45, 0.55]}
_AREA = _NORMALIZED | {"size": {"shortest_edge": 64, "longest_edge": 4096}}
PROCESSORS = {
    "gemma3": _NORMALIZED,
    **dict.fromkeys([family for family in CONFIGS if family.startswith("qwen")], _AREA),
    **dict.fromkeys(("gemma4", "gemma4_moe", "gemma4_unified"), {"max_soft_tokens": 70}),
    **dict.fromkeys(("deepseek_vl2", "deepseek_vl2_plain"), _NORMALIZED),
    "mistral3": _NORMALIZED | {"size": {"longest_edge": 64}},
}
SIZES = dict.fromkeys(CONFIGS, ((24, 40), (56, 16)))
SIZES |= dict.fromkeys(("gemma4", "gemma4_moe", "gemma4_unified"), ((36, 48), (48, 12)))
SIZES |= dict.fromkeys(("deepseek_vl2", "deepseek_vl2_plain"), ((28, 28), (56, 28)))
SIZES |= {"qwen2_5_vl": ((40, 56), (56, 16)), "gemma3": ((112, 112), (112, 112))}
# Tokens of text before, between and behind two images; -1: no second image.
PROMPTS = ((5, -1, 9), (0, -1, 4), (7, 3, 6), (18, 1, 3), (3, 40, 11))
