"""The oracle: a decoder's forward in NumPy, one sequence at a time, no cache, driven by ModelConfig.

It shares no code with the engine beyond ModelConfig, so that a disagreement tells a kernel's error from a model's: it
is compared with transformers in test_models_decoder.py and with the engine elsewhere.
"""

import numpy as np

from zse.models.config import ModelConfig


def rmsnorm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x, positions, rope, head_dim):
    """x [tokens, heads, head_dim], rotate-half RoPE."""
    angle = np.asarray(positions, np.float64)[:, None] * np.asarray(rope.inv_freq(head_dim))[None]
    cos, sin = (np.concatenate([f(angle)] * 2, -1)[:, None].astype(x.dtype) * rope.mscale for f in (np.cos, np.sin))
    half = head_dim // 2
    return x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin


def softcap(x, cap):
    return cap * np.tanh(x / cap) if cap else x


def attention(q, k, v, config: ModelConfig, window):
    """Causal attention of a whole sequence. q [tokens, heads, dim]; k, v [tokens, kv_heads, dim]."""
    tokens, heads, dim = q.shape
    group = heads // k.shape[1]
    position = np.arange(tokens)
    visible = position[None, :] <= position[:, None]
    if window:
        visible &= position[None, :] > position[:, None] - window
    out = np.empty_like(q)
    for head in range(heads):
        scores = softcap(q[:, head] @ k[:, head // group].T * q.dtype.type(config.query_scale), config.attn_softcap)
        scores = np.where(visible, scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = scores / scores.sum(-1, keepdims=True) @ v[:, head // group]
    return out.reshape(tokens, heads * dim)


def gate_activation(x, kind):
    if kind == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def forward(config: ModelConfig, weights: dict, tokens, dtype=np.float32, operand=lambda x: x, between=None):
    """Logits [tokens, vocab] of one sequence. weights: role → array, dequantized. operand: what becomes of an activation that
    is multiplied with a weight, where the engine quantizes it. between: a list that gets what each layer reads, and the last norm."""

    def weight(role):
        return np.asarray(weights[role], dtype)

    count, dim = len(tokens), config.head_dim
    positions = np.arange(count)
    x = weight("embed")[np.asarray(tokens)] * dtype(config.embed_scale)
    for layer in range(config.num_layers):
        at = f"layers.{layer}."
        if between is not None:
            between.append(x)
        h = operand(rmsnorm(x, weight(at + "attn_norm"), config.norm_eps))
        q, k, v = (h @ weight(at + name).T for name in "qkv")
        if config.qkv_bias:
            q, k, v = q + weight(at + "q_bias"), k + weight(at + "k_bias"), v + weight(at + "v_bias")
        q, k, v = (t.reshape(count, -1, dim) for t in (q, k, v))
        if config.qk_norm:
            q = rmsnorm(q, weight(at + "q_norm"), config.norm_eps)
            k = rmsnorm(k, weight(at + "k_norm"), config.norm_eps)
        rope = config.local_rope if config.uses_local_rope(layer) else config.rope
        q, k = rotate(q, positions, rope, dim), rotate(k, positions, rope, dim)
        h = operand(attention(q.astype(dtype), k.astype(dtype), v, config, config.window(layer))) @ weight(at + "o").T
        if config.o_bias:
            h = h + weight(at + "o_bias")
        if config.post_norms:
            h = rmsnorm(h, weight(at + "post_attn_norm"), config.norm_eps)
        x = x + h
        h = operand(rmsnorm(x, weight(at + "mlp_norm"), config.norm_eps))
        h = gate_activation(h @ weight(at + "gate").T, config.activation) * (h @ weight(at + "up").T)
        h = operand(h) @ weight(at + "down").T
        if config.post_norms:
            h = rmsnorm(h, weight(at + "post_mlp_norm"), config.norm_eps)
        x = x + h
    if between is not None:
        between.append(x)
    x = operand(rmsnorm(x, weight("final_norm"), config.norm_eps))
    return softcap(x @ weight("embed" if config.tied_head else "head").T, config.logit_softcap)
