"""Weight roles: what each tensor of a model is for, and what GGUF and Hugging Face files call it.

A role name ("layers.3.q") is what the loader, the decoder and the `.zse` file use. Shapes are [rows, columns], a weight
multiplies a column vector: q is [num_heads * head_dim, hidden_size].
"""

from collections.abc import Container, Iterator

import msgspec

from zse.errors import FormatError
from zse.models.config import ModelConfig

# role → (GGUF name, Hugging Face name), both behind the layer's prefix.
_LAYER = {
    "attn_norm": ("attn_norm.weight", "input_layernorm.weight"),
    "q": ("attn_q.weight", "self_attn.q_proj.weight"),
    "k": ("attn_k.weight", "self_attn.k_proj.weight"),
    "v": ("attn_v.weight", "self_attn.v_proj.weight"),
    "q_bias": ("attn_q.bias", "self_attn.q_proj.bias"),
    "k_bias": ("attn_k.bias", "self_attn.k_proj.bias"),
    "v_bias": ("attn_v.bias", "self_attn.v_proj.bias"),
    "q_norm": ("attn_q_norm.weight", "self_attn.q_norm.weight"),
    "k_norm": ("attn_k_norm.weight", "self_attn.k_norm.weight"),
    "o": ("attn_output.weight", "self_attn.o_proj.weight"),
    "o_bias": ("attn_output.bias", "self_attn.o_proj.bias"),
    "mlp_norm": ("ffn_norm.weight", "post_attention_layernorm.weight"),
    "gate": ("ffn_gate.weight", "mlp.gate_proj.weight"),
    "up": ("ffn_up.weight", "mlp.up_proj.weight"),
    "down": ("ffn_down.weight", "mlp.down_proj.weight"),
}
# With norms after attention and MLP the Hugging Face name of the second norm means another one.
_POST_NORMS = {
    "post_attn_norm": ("post_attention_norm.weight", "post_attention_layernorm.weight"),
    "mlp_norm": ("ffn_norm.weight", "pre_feedforward_layernorm.weight"),
    "post_mlp_norm": ("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
}
_MODEL = {
    "embed": ("token_embd.weight", "embed_tokens.weight"),
    "final_norm": ("output_norm.weight", "norm.weight"),
    "head": ("output.weight", "lm_head.weight"),
}
# A Hugging Face model file puts one of these before its names; Gemma3TextModel is saved without a prefix.
HF_PREFIXES = ("model.", "", "language_model.model.")
ROPE_FREQS = "rope_freqs.weight"  # GGUF: a divisor for each rotation frequency (Llama 3.1 scaling)


class Role(msgspec.Struct, frozen=True):
    """One tensor of the model. kind: matrix, norm or bias. heads: for rows of q and k (and their biases) the number of
    heads they belong to, else 0."""

    name: str
    shape: tuple[int, ...]
    kind: str
    heads: int = 0


def layer_roles(config: ModelConfig) -> list[Role]:
    """The roles of one layer, without the "layers.N." prefix, in execution order."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim
    roles = [
        Role("attn_norm", (hidden,), "norm"),
        Role("q", (q_rows, hidden), "matrix", config.num_heads),
        Role("k", (kv_rows, hidden), "matrix", config.num_kv_heads),
        Role("v", (kv_rows, hidden), "matrix"),
    ]
    if config.qkv_bias:
        roles += [
            Role("q_bias", (q_rows,), "bias", config.num_heads),
            Role("k_bias", (kv_rows,), "bias", config.num_kv_heads),
            Role("v_bias", (kv_rows,), "bias"),
        ]
    if config.qk_norm:
        roles += [Role("q_norm", (dim,), "norm"), Role("k_norm", (dim,), "norm")]
    roles.append(Role("o", (hidden, q_rows), "matrix"))
    if config.o_bias:
        roles.append(Role("o_bias", (hidden,), "bias"))
    if config.post_norms:
        roles.append(Role("post_attn_norm", (hidden,), "norm"))
    roles += [
        Role("mlp_norm", (hidden,), "norm"),
        Role("gate", (inner, hidden), "matrix"),
        Role("up", (inner, hidden), "matrix"),
        Role("down", (hidden, inner), "matrix"),
    ]
    if config.post_norms:
        roles.append(Role("post_mlp_norm", (hidden,), "norm"))
    return roles


def model_roles(config: ModelConfig) -> Iterator[Role]:
    """Every tensor of the model in execution order; a tied head is not a tensor of its own."""
    yield Role("embed", (config.vocab_size, config.hidden_size), "matrix")
    roles = layer_roles(config)
    for layer in range(config.num_layers):
        for role in roles:
            yield Role(f"layers.{layer}.{role.name}", role.shape, role.kind, role.heads)
    yield Role("final_norm", (config.hidden_size,), "norm")
    if not config.tied_head:
        yield Role("head", (config.vocab_size, config.hidden_size), "matrix")


def gguf_name(role: str) -> str:
    """ "layers.3.q" → "blk.3.attn_q.weight"."""
    if not role.startswith("layers."):
        return _MODEL[role][0]
    _, layer, name = role.split(".")
    return f"blk.{layer}.{(_POST_NORMS.get(name) or _LAYER[name])[0]}"


def hf_name(role: str, config: ModelConfig, prefix: str = "model.") -> str:
    """ "layers.3.q" → "model.layers.3.self_attn.q_proj.weight"; the head has no layer prefix."""
    if role == "head":
        return prefix.removesuffix("model.") + "lm_head.weight" if prefix else "lm_head.weight"
    if not role.startswith("layers."):
        return prefix + _MODEL[role][1]
    _, layer, name = role.split(".")
    table = _LAYER | _POST_NORMS if config.post_norms else _LAYER
    return f"{prefix}layers.{layer}.{table[name][1]}"


def hf_prefix(path: object, names: Container[str]) -> str:
    """The prefix of a Hugging Face file's tensor names, told by where its embedding is. Raises FormatError."""
    for prefix in HF_PREFIXES:
        if prefix + "embed_tokens.weight" in names:
            return prefix
    raise FormatError(path, 0, "model.embed_tokens.weight", "the tensor is missing")


def unpermute_row(row: int, head_dim: int) -> int:
    """Which row of a GGUF llama-architecture q or k holds row `row` of the rotate-half order.

    The converter stores, in each head, row j * head_dim / 2 + i at 2 * i + j (j = 0, 1).
    """
    head, within = divmod(row, head_dim)
    half, i = divmod(within, head_dim // 2)
    return head * head_dim + 2 * i + half
