"""Weight roles: what each tensor of a model is for, and what GGUF and Hugging Face files call it.

A role name ("layers.3.q") is what the loader, the decoder and the `.zse` file use. Shapes are [rows, columns], a weight
multiplies a column vector: q is [num_heads * head_dim, hidden_size]. An architecture's `names` has a layer's roles in
the order in which a step reads them, made of the tables here."""

from collections.abc import Container, Iterator
from math import prod

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
# Multi-head latent attention; k_b and v_b are made by zse.formats.latent where a file has them as one.
LATENT_ATTENTION: Names = {
    "q_a": ("attn_q_a.weight", "self_attn.q_a_proj.weight"),
    "kv_a": ("attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    "q_a_norm": ("attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight"),
    "q_b": ("attn_q_b.weight", "self_attn.q_b_proj.weight"),
    "q_whole": ("attn_q.weight", "self_attn.q_proj.weight"),
    "kv_a_norm": ("attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight"),
    "k_b": ("attn_k_b.weight", "self_attn.k_b_proj.weight"),
    "v_b": ("attn_v_b.weight", "self_attn.v_b_proj.weight"),
    "o": ATTENTION["o"],
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
# A mixture of experts. {e}: a tensor for each expert; "A|B": under one name or the other; "A#0/2": the first of two
# equal parts of each expert's rows.
EXPERTS: Names = {
    "router": ("ffn_gate_inp.weight", "mlp.gate.weight"),
    "gate_exps": (
        "ffn_gate_exps.weight|ffn_gate_up_exps.weight#0/2",
        "mlp.experts.{e}.gate_proj.weight|mlp.experts.gate_up_proj#0/2|mlp.experts.gate_proj",
    ),
    "up_exps": (
        "ffn_up_exps.weight|ffn_gate_up_exps.weight#1/2",
        "mlp.experts.{e}.up_proj.weight|mlp.experts.gate_up_proj#1/2|mlp.experts.up_proj",
    ),
    "down_exps": ("ffn_down_exps.weight", "mlp.experts.{e}.down_proj.weight|mlp.experts.down_proj"),
}
EXPERT_BIASES: Names = {
    "router_bias": ("ffn_gate_inp.bias", "mlp.router.bias"),
    "gate_exps_bias": ("ffn_gate_exps.bias", "mlp.experts.gate_proj_bias"),
    "up_exps_bias": ("ffn_up_exps.bias", "mlp.experts.up_proj_bias"),
    "down_exps_bias": ("ffn_down_exps.bias", "mlp.experts.down_proj_bias"),
}
# A score of each head without a value (gpt-oss).
SINKS: Names = {"sinks": ("attn_sinks.weight", "self_attn.sinks")}
SELECT: Names = {"router_select": ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias")}
SHARED: Names = {
    "shared_gate": ("ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight"),
    "shared_up": ("ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight"),
    "shared_down": ("ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight"),
}
SHARED_ROUTER: Names = {"shared_router": ("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight")}
# What brings a token into the space that experts read, and out of it (Nemotron 3).
EXPERT_LATENTS: Names = {
    "latent_down": ("ffn_latent_down.weight", "mixer.fc1_latent_proj.weight"),
    "latent_up": ("ffn_latent_up.weight", "mixer.fc2_latent_proj.weight"),
}
MIXTURE: Names = EXPERTS | EXPERT_BIASES | SELECT | SHARED | SHARED_ROUTER | EXPERT_LATENTS
LLAMA: Names = ATTN_NORM | ATTENTION | MLP_NORM | MLP
MODEL: Names = {
    "embed": ("token_embd.weight", "embed_tokens.weight"),
    "final_norm": ("output_norm.weight", "norm.weight"),
    "head": ("output.weight", "lm_head.weight"),
}
# Embeddings of each layer's own (Gemma 4), of the model and of a layer.
PLE_MODEL: Names = {
    "ple_embed": ("per_layer_token_embd.weight", "embed_tokens_per_layer.weight"),
    "ple_proj": ("per_layer_model_proj.weight", "per_layer_model_projection.weight"),
    "ple_norm": ("per_layer_proj_norm.weight", "per_layer_projection_norm.weight"),
}
PLE: Names = {
    "ple_gate": ("inp_gate.weight", "per_layer_input_gate.weight"),
    "ple_out": ("proj.weight", "per_layer_projection.weight"),
    "post_ple_norm": ("post_norm.weight", "post_per_layer_input_norm.weight"),
}
# Experts beside a dense MLP (Gemma 4): what the router multiplies its normalized input with, the norms around both, and
# a factor of each expert.
BESIDE: Names = {
    "router_norm": ("ffn_gate_inp.scale", "router.scale"),
    "experts_norm": ("pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight"),
    "post_dense_norm": ("post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight"),
    "post_experts_norm": ("post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight"),
    "expert_factors": ("ffn_down_exps.scale", "router.per_expert_scale"),
    "router": (EXPERTS["router"][0], "router.proj.weight"),
    "gate_exps": (EXPERTS["gate_exps"][0], "experts.gate_up_proj#0/2"),
    "up_exps": (EXPERTS["up_exps"][0], "experts.gate_up_proj#1/2"),
    "down_exps": (EXPERTS["down_exps"][0], "experts.down_proj"),
}
LAYER_SCALE: Names = {"layer_scale": ("layer_output_scale.weight", "layer_scalar")}
# What a Hugging Face file puts before its names → and before the head's. Gemma3TextModel is saved without a prefix, the
# text part of a model that sees in one of three ways.
HF_PREFIXES = {
    "model.": "",
    "": "",
    "backbone.": "",
    "language_model.model.": "language_model.",
    "language.model.": "language.",
    "model.language_model.": "",
    "model.text_model.": "",
}
# GGUF: divisors of the rotation frequencies (Llama 3.1's scaling; longrope's for short and for long contexts).
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


# Modules behind the pooling: GGUF counts them as sentence-transformers numbers its folders, behind Transformer and
# Pooling.
GGUF_DENSE, HF_DENSE = 2, "sentence_transformers.dense_"


class Role(msgspec.Struct, frozen=True):
    """One tensor of the model. kind: matrix, norm or bias; table: a matrix of rows that are never quantized; flat: a
    matrix or vector that the host reads, its numbers in a row; vector: numbers as they are, of any shape; decay: a
    vector of -exp(what a Hugging Face file has). factor: that a vector's numbers are multiplied with. heads: for rows
    of q and k (and their biases) the number of heads they belong to, else 0. experts: of a stack [experts * rows,
    columns], else 0. columns: where it is columns of a wider matrix of a file, the first one and how many that has. runs: where the matrix lies in a file that has it with others in one: (first row, rows) of one of
    `stored` rows, one behind the other."""

    name: str
    shape: tuple[int, ...]
    kind: str
    heads: int = 0
    experts: int = 0
    factor: float = 1.0
    runs: tuple[tuple[int, int], ...] = ()
    stored: int = 0
    columns: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)


def layer_roles(
    config: ModelConfig, names: Names, layer: int, whole_qk_norm: bool = False, others: dict[str, Role] | None = None
) -> list[Role]:
    """The roles of a layer, without the "layers.N." prefix, in the order of `names`; biases only where there are some.
    whole_qk_norm: q_norm and k_norm are of all heads together. others: roles that are known already, by name."""
    hidden, inner, dim = config.hidden_size, config.intermediate_of(layer), config.head_dim_of(layer)
    q, kv = config.num_heads * dim, config.kv_heads_of(layer) * dim
    rows = {"q": q, "k": kv, "v": kv, "qkv": q + 2 * kv, "o": hidden, "gate": inner, "up": inner, "down": hidden}
    rows |= {"gate_up": 2 * inner, "ple_gate": config.ple_width, "ple_out": hidden}
    columns = {"o": q, "down": inner, "ple_out": config.ple_width}
    heads = {"q": config.num_heads, "k": config.kv_heads_of(layer)}
    absent = {"k", "v", "k_norm"} if config.causal and config.kv_layer(layer) != layer else set()
    if config.values_are_keys and not config.window(layer):
        absent.add("v")
    if not config.ple_width:
        absent |= set(PLE)
    if config.moe is None:
        absent |= set(BESIDE)
    latents = latent_shapes(config)
    roles = []
    for name in names:
        if others and name in others:
            roles.append(others[name])
            continue
        if name in latents:
            shape = latents[name]
            if shape[0]:
                roles.append(Role(name, shape, "matrix" if len(shape) == 2 else "norm"))
            continue
        if name in MIXTURE:
            roles += mixture_role(name, config)
            continue
        if name in absent:
            continue
        if name == "sinks":
            roles.append(Role(name, (config.num_heads,), "norm"))
            continue
        if name == "expert_factors" and config.moe is not None:
            roles.append(Role(name, (config.moe.num_experts,), "norm"))
            continue
        if name == "layer_scale":
            if config.layer_scale:
                roles.append(Role(name, (1,), "norm"))
            continue
        member = name.removesuffix("_bias").removesuffix("_norm")
        if name.endswith("_bias"):
            if config.o_bias if member == "o" else config.qkv_bias:
                roles.append(Role(name, (rows[member],), "bias", heads.get(member, 0)))
        elif name.endswith("_norm"):
            width = hidden if member not in "qk" else rows[member] if whole_qk_norm else dim
            roles.append(Role(name, (width,), "norm", factor=hidden**-0.5 if name == "router_norm" else 1.0))
        else:
            roles.append(Role(name, (rows[name], columns.get(name, hidden)), "matrix", heads.get(name, 0)))
    return roles


def latent_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the roles of LATENT_ATTENTION; 0 rows for those that the model does not have."""
    latent, heads, hidden = config.latent, config.num_heads, config.hidden_size
    if latent is None:
        return {}
    q, query_rank = heads * config.head_dim, latent.query_rank
    return {
        "q_a": (query_rank, hidden),
        "q_a_norm": (query_rank,),
        "q_b": (q if query_rank else 0, query_rank),
        "q_whole": (0 if query_rank else q, hidden),
        "kv_a": (latent.width, hidden),
        "kv_a_norm": (latent.rank,),
        "k_b": (heads * latent.rank, latent.nope),
        "v_b": (heads * latent.value, latent.rank),
        "o": (hidden, heads * latent.value),
    }


def dense_roles(config: ModelConfig) -> Iterator[tuple[Role, str, str]]:
    """(role, GGUF name, Hugging Face name) of what the modules behind the pooling are made of."""
    for number, dense in enumerate(config.dense):
        for part, shape in (("weight", (dense.outputs, dense.inputs)), ("bias", (dense.outputs,))):
            if part == "weight" or dense.bias:
                role = Role(f"dense_{number}" + ("_bias" if part == "bias" else ""), shape, "flat")
                yield role, f"dense_{number + GGUF_DENSE}.{part}", f"{HF_DENSE}{number}.{part}"


def mixture_role(name: str, config: ModelConfig) -> list[Role]:
    """The role of MIXTURE of that name, or none where the model has no such tensor."""
    moe, hidden = config.moe, config.hidden_size
    if moe is None or (name in SHARED and not moe.shared_size):
        return []
    count, inner, read = moe.num_experts, moe.intermediate_size, moe.input_size or hidden
    if name in EXPERT_LATENTS:
        shape = (read, hidden) if name == "latent_down" else (hidden, read)
        return [Role(name, shape, "matrix")] if moe.input_size else []
    stacks = {"gate_exps": (inner, read), "up_exps": (inner, read), "down_exps": (read, inner)}
    if name in stacks:
        rows, columns = stacks[name]
        return [Role(name, (count * rows, columns), "matrix", experts=count)]
    if name.endswith("_bias"):
        rows = {"router_bias": 1, "down_exps_bias": hidden}.get(name, inner)
        return [Role(name, (count * rows,), "bias", experts=0 if name == "router_bias" else count)]
    if name == "router_select":
        return [Role(name, (count,), "bias")] if moe.selection_bias else []
    if name == "shared_router":
        return [Role(name, (1, hidden), "matrix")] if moe.shared_gate else []
    shapes = {"router": (count, hidden), "shared_down": (hidden, moe.shared_size)}
    return [Role(name, shapes.get(name, (moe.shared_size, hidden)), "matrix")]


def hf_prefix(path: object, names: Container[str], table: str) -> str:
    """The prefix of a Hugging Face file's tensor names, told by where its embedding `table` is. Raises FormatError."""
    for prefix in HF_PREFIXES:
        if prefix + table in names:
            return prefix
    raise FormatError(path, 0, f"model.{table}", "the tensor is missing")
