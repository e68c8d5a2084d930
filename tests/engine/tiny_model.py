"""A tiny random Llama as a safetensors directory: written with NumPy, needs no download and no reference package."""

import json

import numpy as np

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER, CONTEXT, EOS = 160, 64, 2, 4, 2, 32, 96, 256, 2
NAN_TOKEN = 150  # its embedding is NaN: whoever has it in the prompt gets logits that are not finite


def write(folder, seed: int = 0, nan: bool = False, head_dim: int = HEAD_DIM, context: int = CONTEXT):
    """Write the model into `folder` and return its path. head_dim: a GPU's attention starts at 64. context: tokens."""
    rng = np.random.default_rng(seed)
    tensors = {
        "model.embed_tokens.weight": rng.normal(0, 1, (VOCAB, HIDDEN)),
        "lm_head.weight": rng.normal(0, 0.4, (VOCAB, HIDDEN)),
        "model.norm.weight": np.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (HEADS * head_dim, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * head_dim, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * head_dim, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * head_dim),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        tensors |= {f"{at}{name}.weight": rng.normal(0, 0.2, shape) for name, shape in shapes.items()}
        tensors |= {f"{at}{name}.weight": np.ones(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")}
    if nan:
        tensors["model.embed_tokens.weight"][NAN_TOKEN] = np.nan
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.astype(np.float32).tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    config = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=head_dim,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        hidden_act="silu",
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=EOS,
        torch_dtype="float32",
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder
