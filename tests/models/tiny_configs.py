"""config.json of every tiny model, one table: what a family says beside what all say."""


def hf(architecture: str, model_type: str, without: str = "", **fields) -> dict:
    """The config of an `architecture` (without its ForCausalLM): BASE less the names in `without`, and `fields`."""
    base = {name: value for name, value in BASE.items() if name not in without.split()}
    return base | dict(architectures=[f"{architecture}ForCausalLM"], model_type=model_type) | fields


def factors(pairs: int, start: float) -> list[float]:
    """longrope's, growing from pair to pair."""
    return [start + i / 4 for i in range(pairs)]


BASE = dict(
    vocab_size=160,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    tie_word_embeddings=False,
    rope_theta=10000.0,
)
TIED = dict(tie_word_embeddings=True)
ONE_KV_HEAD = dict(num_attention_heads=2, num_key_value_heads=1)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
GEMMA3 = dict(
    without="hidden_act rope_theta",
    head_dim=64,
    num_key_value_heads=1,
    sliding_window=8,
    query_pre_attn_scalar=48,
    hidden_activation="gelu_pytorch_tanh",
    **TIED,
)
DEFAULT_ROPE = dict(rope_type="default", rope_theta=10000.0)
LINEAR_ROPE = dict(rope_type="linear", factor=8.0, rope_theta=1000000.0)

# Models that numpy_model.py computes, too. Both spellings of RoPE appear: transformers 4 (rope_theta, rope_scaling, ...)
# and 5 (rope_parameters).
LLAMA_LIKE = {
    "llama": hf("Llama", "llama", head_dim=64),
    "llama3": hf("Llama", "llama", attention_bias=True, rope_scaling=LLAMA3, rope_theta=500000.0, **TIED),
    "llama_yarn": hf(
        "Llama",
        "llama",
        rope_parameters=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, rope_theta=10000.0),
    ),
    "mistral": hf("Mistral", "mistral", sliding_window=None, head_dim=128, **ONE_KV_HEAD),
    "mistral_window": hf("Mistral", "mistral", sliding_window=9),
    "qwen2": hf("Qwen2", "qwen2", "head_dim", hidden_size=128, use_sliding_window=False, **ONE_KV_HEAD, **TIED),
    "qwen2_window": hf(
        "Qwen2",
        "qwen2",
        hidden_size=128,
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=1,
    ),
    "qwen3": hf("Qwen3", "qwen3", head_dim=128, rope_parameters=LINEAR_ROPE | dict(factor=2.0)),
    "gemma3": hf(
        "Gemma3",
        "gemma3_text",
        **GEMMA3,
        num_hidden_layers=7,
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
        sliding_window_pattern=6,
    ),
    "gemma3_linear": hf(
        "Gemma3",
        "gemma3_text",
        **GEMMA3
        | dict(
            head_dim=32,
            num_hidden_layers=3,
            num_key_value_heads=2,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters=dict(full_attention=LINEAR_ROPE, sliding_attention=DEFAULT_ROPE),
        ),
    ),
}
# Large enough to be quantized; has no committed reference.
WIDE = hf("Llama", "llama", hidden_size=256, intermediate_size=320, head_dim=64)

YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=10000.0)
# Heads of 64, and of families whose heads are as wide as the hidden size says.
HEADS_64 = dict(without="rope_theta", head_dim=64)
NO_HEAD_DIM = dict(without="rope_theta head_dim", hidden_size=128, **ONE_KV_HEAD)
COHERE = NO_HEAD_DIM | dict(
    without="rope_theta head_dim rms_norm_eps", rope_theta=50000.0, layer_norm_eps=1e-5, logit_scale=0.25, **TIED
)
# Of multi-head latent attention; the smallest latents and rotary part that a GPU has.
LATENT = dict(
    num_key_value_heads=4, q_lora_rank=64, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=96
)
GEMMA2 = hf(
    "Gemma2",
    "gemma2",
    "rope_theta hidden_act",
    head_dim=64,
    num_hidden_layers=3,
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=64,
    sliding_window=8,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=5.0,
    **TIED,
)
EIGHT = dict(num_experts_per_tok=3, norm_topk_prob=True, moe_intermediate_size=32)
DEEPSEEK = LATENT | dict(
    n_routed_experts=8,
    n_shared_experts=2,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=1.5,
    rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.707, mscale_all_dim=0.707),
    num_hidden_layers=3,
)
GROUPS = dict(n_group=4, topk_group=2)
MIXTURES = {
    "deepseek_v2_lite": hf(
        "DeepseekV2", "deepseek_v2", "head_dim", **DEEPSEEK | dict(q_lora_rank=None), topk_method="greedy"
    ),
    "deepseek_v2": hf("DeepseekV2", "deepseek_v2", "head_dim", **DEEPSEEK | GROUPS, topk_method="group_limited_greedy"),
    "deepseek_v3": hf("DeepseekV3", "deepseek_v3", "head_dim", **DEEPSEEK | GROUPS | dict(n_shared_experts=1)),
    "mistral4": hf(
        "Mistral4",
        "mistral4",
        "head_dim rope_theta",
        **DEEPSEEK | GROUPS | dict(n_shared_experts=1, first_k_dense_replace=0, rope_scaling=None),
        rope_parameters=YARN
        | dict(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5, partial_rotary_factor=1 / 3),
    ),
    "glm4_moe_lite": hf(
        "Glm4MoeLite",
        "glm4_moe_lite",
        "head_dim rope_theta first_k_dense_replace",
        **DEEPSEEK | dict(rope_scaling=None, rms_norm_eps=1e-5),
        mlp_layer_types=["dense", "sparse", "sparse"],
        rope_parameters=DEFAULT_ROPE,
    ),
    "qwen3_moe": hf("Qwen3Moe", "qwen3_moe", "rope_theta", head_dim=64, num_experts=8, mlp_only_layers=[], **EIGHT),
    "qwen3_moe_dense": hf(
        "Qwen3Moe", "qwen3_moe", **HEADS_64, num_experts=8, mlp_only_layers=[1], num_hidden_layers=3, **EIGHT
    ),
    "qwen2_moe": hf(
        "Qwen2Moe",
        "qwen2_moe",
        **NO_HEAD_DIM,
        num_experts=6,
        shared_expert_intermediate_size=96,
        **EIGHT | dict(norm_topk_prob=False),
    ),
    "mixtral": hf("Mixtral", "mixtral", head_dim=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=9),
    "olmoe": hf("Olmoe", "olmoe", **NO_HEAD_DIM, num_experts=8, num_experts_per_tok=3),
    "granitemoe": hf(
        "GraniteMoe",
        "granitemoe",
        **NO_HEAD_DIM,
        num_local_experts=8,
        num_experts_per_tok=3,
        embedding_multiplier=6.0,
        residual_multiplier=0.22,
        attention_multiplier=0.0625,
        logits_scaling=8.0,
    ),
    "glm4_moe": hf(
        "Glm4Moe",
        "glm4_moe",
        **HEADS_64,
        attention_bias=True,
        use_qk_norm=True,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        rope_parameters=DEFAULT_ROPE | dict(partial_rotary_factor=0.5),
        **EIGHT,
    ),
    "minimax_m2": hf(
        "MiniMaxM2",
        "minimax_m2",
        "rope_theta",
        head_dim=64,
        rotary_dim=32,
        num_local_experts=8,
        num_experts_per_tok=3,
        rope_parameters=DEFAULT_ROPE,
    ),
}
# Heads of two sizes; "gemma4" as E2B is made, "gemma4_large" as 31B with its sizes of heads, "gemma4_moe" as 26B-A4B.
GEMMA4 = hf(
    "Gemma4",
    "gemma4_text",
    "rope_theta hidden_act",
    head_dim=64,
    global_head_dim=128,
    num_hidden_layers=7,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["full_attention"],
    hidden_activation="gelu_pytorch_tanh",
    sliding_window=8,
    vocab_size_per_layer_input=160,
    hidden_size_per_layer_input=0,
    final_logit_softcapping=5.0,
    rope_parameters=dict(
        full_attention=dict(rope_type="proportional", rope_theta=1000.0, partial_rotary_factor=0.25),
        sliding_attention=DEFAULT_ROPE,
    ),
    **TIED,
)
# Models whose forward is not Llama's.
OTHERS = {
    "gemma2": GEMMA2,
    "phi3": hf("Phi3", "phi3", **NO_HEAD_DIM, sliding_window=9),
    "phi4_mini": hf(
        "Phi3",
        "phi3",
        **NO_HEAD_DIM,
        **TIED,
        original_max_position_embeddings=16,
        partial_rotary_factor=0.75,
        rope_scaling=dict(type="longrope", short_factor=factors(24, 1.0), long_factor=factors(24, 1.5)),
    ),
    "olmo2": hf("Olmo2", "olmo2", "rope_theta head_dim", hidden_size=256),
    "olmo3": hf(
        "Olmo3",
        "olmo3",
        **NO_HEAD_DIM,
        num_hidden_layers=4,
        sliding_window=8,
        rope_parameters=dict(full_attention=YARN, sliding_attention=DEFAULT_ROPE),
    ),
    "smollm3": hf("SmolLM3", "smollm3", head_dim=64, num_hidden_layers=4, rope_theta=50000.0, **TIED),
    "smollm3_window": hf(
        "SmolLM3",
        "smollm3",
        head_dim=64,
        rope_theta=50000.0,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=9,
        no_rope_layers=[0, 1],
    ),
    "granite": hf(
        "Granite",
        "granite",
        **HEADS_64,
        attention_bias=True,
        embedding_multiplier=6.0,
        residual_multiplier=0.22,
        attention_multiplier=0.0625,
        logits_scaling=8.0,
    ),
    "ministral3": hf(
        "Ministral3",
        "ministral3",
        **HEADS_64,
        rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5),
    ),
    "glm4": hf("Glm4", "glm4", **HEADS_64, attention_bias=True),
    "minicpm": hf(
        "MiniCPM",
        "minicpm",
        **NO_HEAD_DIM,
        **TIED,
        scale_emb=12,
        scale_depth=1.4,
        dim_model_base=32,
        rope_scaling=dict(
            rope_type="longrope",
            original_max_position_embeddings=16,
            short_factor=factors(32, 1.0),
            long_factor=factors(32, 1.5),
        ),
    ),
    "minicpm3": hf(
        "MiniCPM3",
        "minicpm3",
        "rope_theta head_dim",
        **LATENT | TIED,
        scale_emb=12,
        scale_depth=1.4,
        dim_model_base=256,
        rope_scaling=dict(
            rope_type="longrope",
            original_max_position_embeddings=16,
            short_factor=factors(16, 1.0),
            long_factor=factors(16, 1.5),
        ),
    ),
    "cohere": hf("Cohere", "cohere", **COHERE, attention_bias=True),
    "cohere2": hf("Cohere2", "cohere2", **COHERE, num_hidden_layers=4, sliding_window=8),
    **MIXTURES,
    "gemma4": GEMMA4 | dict(num_kv_shared_layers=3, use_double_wide_mlp=True, hidden_size_per_layer_input=32),
    "gemma4_large": GEMMA4
    | dict(attention_k_eq_v=True, num_global_key_value_heads=1, num_attention_heads=4)
    | dict(head_dim=256, global_head_dim=512),
    "gemma4_moe": GEMMA4
    | dict(attention_k_eq_v=True, num_global_key_value_heads=1, num_attention_heads=4, enable_moe_block=True)
    | dict(num_experts=6, top_k_experts=3, moe_intermediate_size=32),
    "gemma2_scale": GEMMA2 | dict(query_pre_attn_scalar=48),
}
