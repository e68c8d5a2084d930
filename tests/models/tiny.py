"""Tiny random models of each family, made by transformers (a test dependency) and saved as safetensors."""

FAMILIES = ("llama", "llama3_rope", "mistral", "mistral_window", "qwen2", "qwen3", "gemma3", "gemma3_linear")
SIZES = dict(vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=64, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
             pad_token_id=0)


def make(family: str, seed: int = 0):
    """A transformers model in float32 with weights large enough that every part shows in the logits."""
    import torch
    import transformers as tf

    llama3 = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                  original_max_position_embeddings=32)
    gemma = SIZES | dict(num_hidden_layers=7, sliding_window=8, query_pre_attn_scalar=48, head_dim=32)
    config = {
        "llama": lambda: tf.LlamaConfig(**SIZES, tie_word_embeddings=False),
        "llama3_rope": lambda: tf.LlamaConfig(**SIZES, rope_parameters=llama3, attention_bias=True,
                                              tie_word_embeddings=True),
        "mistral": lambda: tf.MistralConfig(**SIZES, sliding_window=None, tie_word_embeddings=False),
        "mistral_window": lambda: tf.MistralConfig(**SIZES, sliding_window=8, tie_word_embeddings=False),
        "qwen2": lambda: tf.Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"} | dict(hidden_size=128, num_attention_heads=2),
                                        tie_word_embeddings=True),
        "qwen3": lambda: tf.Qwen3Config(**SIZES | dict(head_dim=128), tie_word_embeddings=False),
        "gemma3": lambda: tf.Gemma3TextConfig(**gemma),
        "gemma3_linear": lambda: tf.Gemma3TextConfig(**gemma | dict(sliding_window_pattern=2), rope_parameters={
            "full_attention": dict(rope_type="linear", factor=8.0, rope_theta=1000000.0),
            "sliding_attention": dict(rope_type="default", rope_theta=10000.0)}),
    }[family]()
    cls = {"llama": tf.LlamaForCausalLM, "mistral": tf.MistralForCausalLM, "qwen2": tf.Qwen2ForCausalLM,
           "qwen3": tf.Qwen3ForCausalLM, "gemma3": tf.Gemma3ForCausalLM}[family.split("_")[0].replace("llama3", "llama")]
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = cls(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if parameter.ndim == 1 else 0.15
            noise = torch.randn_like(parameter) * scale
            parameter.copy_(noise + (1.0 if "norm" in name and not family.startswith("gemma") else 0.0))
    return model
