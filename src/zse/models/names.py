"""Weight roles: what each tensor of a model is for, and what GGUF and Hugging Face files call it.

A role name ("layers.3.q") is what the loader, the decoder and the `.zse` file use. Shapes are [rows, columns], a weight
multiplies a column vector: q is [num_heads * head_dim, hidden_size]. An architecture's `names` has a layer's roles in the
order in which a step reads them, made of the tables here.
"""

from collections.abc import Container

import msgspec

from zse.errors import FormatError
from zse.models.config import ModelConfig

# role → (GGUF name, Hugging Face name), both behind the layer's prefix.
Names = dict[str, tuple[str, str]]
ATTENTION: Names = {
    "q": ("attn_q.weight", "self_attn.q_proj.weight"),
    "k": ("attn_k.weight", "self_attn.k_proj.weight"),
    "v": ("attn_v.weight", "self_attn.v_proj.weight"),
    "q_bias": ("attn_q.bias", "self_attn.q_proj.bias"),
    "k_bias": ("attn_k.bias", "self_attn.k_proj.bias"),
    "v_bias": ("attn_v.bias", "self_attn.v_proj.bias"),
    "o": ("attn_output.weight", "self_attn.o_proj.weight"),
    "o_bias": ("attn_output.bias", "self_attn.o_proj.bias"),
}
FUSED_ATTENTION: Names = {"qkv": ("attn_qkv.weight", "self_attn.qkv_proj.weight"), "o": ATTENTION["o"]}
QK_NORM: Names = {
    "q_norm": ("attn_q_norm.weight", "self_attn.q_norm.weight"),
    "k_norm": ("attn_k_norm.weight", "self_attn.k_norm.weight"),
}
ATTN_NORM: Names = {"attn_norm": ("attn_norm.weight", "input_layernorm.weight")}
MLP_NORM: Names = {"mlp_norm": ("ffn_norm.weight", "post_attention_layernorm.weight")}
MLP: Names = {
    "gate": ("ffn_gate.weight", "mlp.gate_proj.weight"),
    "up": ("ffn_up.weight", "mlp.up_proj.weight"),
    "down": ("ffn_down.weight", "mlp.down_proj.weight"),
}
FUSED_MLP: Names = {"gate_up": ("ffn_up.weight", "mlp.gate_up_proj.weight"), "down": MLP["down"]}
# Norms after attention and MLP; where there is one before the MLP as well, the second is called otherwise.
POST_NORMS: Names = {
    "post_attn_norm": ("post_attention_norm.weight", "post_attention_layernorm.weight"),
    "post_mlp_norm": ("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
}
LLAMA: Names = ATTN_NORM | ATTENTION | MLP_NORM | MLP
MODEL: Names = {
    "embed": ("token_embd.weight", "embed_tokens.weight"),
    "final_norm": ("output_norm.weight", "norm.weight"),
    "head": ("output.weight", "lm_head.weight"),
}
# What a Hugging Face file puts before its names → and before the head's. Gemma3TextModel is saved without a prefix, the
# text part of a model that sees in one of two ways.
HF_PREFIXES = {"model.": "", "": "", "language_model.model.": "language_model.", "model.language_model.": ""}
# GGUF: divisors of the rotation frequencies (Llama 3.1's scaling; longrope's for short and for long contexts).
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


class Role(msgspec.Struct, frozen=True):
    """One tensor of the model. kind: matrix, norm or bias. heads: for rows of q and k (and their biases) the number of
    heads they belong to, else 0."""

    name: str
    shape: tuple[int, ...]
    kind: str
    heads: int = 0


def layer_roles(config: ModelConfig, names: Names, whole_qk_norm: bool = False) -> list[Role]:
    """The roles of one layer, without the "layers.N." prefix, in the order of `names`; biases only where there are some.
    whole_qk_norm: q_norm and k_norm are of all heads together."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    rows = {"q": q, "k": kv, "v": kv, "qkv": q + 2 * kv, "o": hidden, "gate": inner, "up": inner, "down": hidden}
    rows["gate_up"] = 2 * inner
    columns = {"o": q, "down": inner}
    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    roles = []
    for name in names:
        member = name.removesuffix("_bias").removesuffix("_norm")
        if name.endswith("_bias"):
            if config.o_bias if member == "o" else config.qkv_bias:
                roles.append(Role(name, (rows[member],), "bias", heads.get(member, 0)))
        elif name.endswith("_norm"):
            width = hidden if member not in "qk" else rows[member] if whole_qk_norm else dim
            roles.append(Role(name, (width,), "norm"))
        else:
            roles.append(Role(name, (rows[name], columns.get(name, hidden)), "matrix", heads.get(name, 0)))
    return roles


def hf_prefix(path: object, names: Container[str]) -> str:
    """The prefix of a Hugging Face file's tensor names, told by where its embedding is. Raises FormatError."""
    for prefix in HF_PREFIXES:
        if prefix + "embed_tokens.weight" in names:
            return prefix
    raise FormatError(path, 0, "model.embed_tokens.weight", "the tensor is missing")
