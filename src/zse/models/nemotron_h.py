"""Nemotron-H (NVIDIA, arXiv 2504.03624) and Nemotron 3: a layer is one of Mamba-2 (arXiv 2405.21060), attention that turns
nothing, an MLP, or experts, each of whose products one squared ReLU follows; experts may read a token's latent."""

from zse.errors import UnsupportedError
from zse.models.common import gguf_moe, gguf_values, hf_moe, hf_values
from zse.models.config import MAX_WIDTH, Fields, ModelConfig
from zse.models.names import EXPERT_LATENTS, EXPERTS, MODEL, SELECT, Names
from zse.models.recurrent import Mixers, gguf_kv_heads, gguf_recurrent, hf_mixers, hf_scan, mamba

KINDS = {"mamba": "ssm", "linear_attention": "ssm", "attention": "attention", "full_attention": "attention"}
KINDS |= {"mlp": "none", "moe": "none"}
PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_SIZES = dict(heads="mamba_num_heads", groups="n_groups", key_size="ssm_state_size", value_size="mamba_head_dim")
_SIZES |= dict(kernel="conv_kernel", conv_bias="use_conv_bias")
_ATTENTION: Names = {
    name: (f"attn_{gguf}.weight", f"mixer.{name}_proj.weight")
    for name, gguf in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output"))
}
_MLP: Names = {"up": ("ffn_up.weight", "mixer.up_proj.weight"), "down": ("ffn_down.weight", "mixer.down_proj.weight")}
_EXPERTS: Names = {
    "router": (EXPERTS["router"][0], "mixer.gate.weight"),
    "router_select": (SELECT["router_select"][0], "mixer.gate.e_score_correction_bias"),
    "latent_down": EXPERT_LATENTS["latent_down"],
    "up_exps": ("ffn_up_exps.weight", "mixer.experts.{e}.up_proj.weight|mixer.experts.up_proj"),
    "down_exps": ("ffn_down_exps.weight", "mixer.experts.{e}.down_proj.weight|mixer.experts.down_proj"),
    "latent_up": EXPERT_LATENTS["latent_up"],
}
_EXPERTS |= {
    f"shared_{name}": (f"ffn_{name}_shexp.weight", f"mixer.shared_experts.{name}_proj.weight") for name in _MLP
}
_ROUTING: dict = dict(gating="sigmoid", normalize_eps=1e-20, selection_bias=True)


class NemotronH(Mixers):
    names = {"attn_norm": ("attn_norm.weight", "norm.weight")} | _ATTENTION | mamba("mixer.") | _MLP | _EXPERTS
    model_names = MODEL | {
        "embed": (MODEL["embed"][0], "embeddings.weight"),
        "final_norm": (MODEL["final_norm"][0], "norm_f.weight"),
    }

    @classmethod
    def layer_names(cls, config: ModelConfig, layer: int) -> Names:
        names = super().layer_names(config, layer)
        if config.mixer(layer) == "none":
            return names
        return {name: found for name, found in names.items() if name not in _MLP and name not in _EXPERTS}

    def layer(self, x, i):
        h, mixer = self.norm(x, "attn_norm", i), self.config.mixer(i)
        if mixer == "ssm":
            return x + self.mamba(h, i)
        if mixer == "attention":
            q, k, v = self.qkv(h, i)
            return x + self.linear(self.attention(q, k, v, i), "o", i)
        if "router" not in self.trace.shapes:
            return x + self.ungated(h, "up", "down", i)
        x = x + self.chosen(h, i)
        return x + self.ungated(h, "shared_up", "shared_down", i)

    def ungated(self, h, up, down, i):
        return self.linear(self.activate(self.linear(h, up, i)), down, i)

    def chosen(self, h, i):  # without the shared expert
        routing = self.route(self.linear(h, "router", i))
        read = self.linear(h, "latent_down", i) if self.trace.shapes.get("latent_down") else h
        inner = self.activate(self.experts(read, "up_exps", routing, gather=True))
        given = self.trace.add("combine", (self.experts(inner, "down_exps", routing), routing), read.width)
        return self.linear(given, "latent_up", i) if read is not h else given

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        pattern = fields.text("hybrid_override_pattern", "")
        types = fields.get("layers_block_type", [PATTERN.get(each, each) for each in pattern])
        if fields.boolean("use_bias", False) or fields.boolean("mamba_proj_bias", False):
            raise UnsupportedError(f"{fields.path}: use_bias", True, [False])
        fields.choice("mlp_hidden_act", {"relu2": "relu2"}, "relu2")
        eps, layers = fields.number("layer_norm_epsilon", 1e-5, high=1.0), len(types) if isinstance(types, list) else 0
        fields = fields.changed(layer_types=types, num_hidden_layers=layers, rms_norm_eps=eps)
        values, moe = hf_values(fields, generation), None
        mixers = hf_mixers(fields, KINDS, layers)
        if "moe" in types:
            sizes = dict(shared_size="moe_shared_expert_intermediate_size", input_size="moe_latent_size")
            found: dict = {name: fields.integer(key, 0, high=MAX_WIDTH) for name, key in sizes.items()}
            found |= dict(normalize=fields.boolean("norm_topk_prob", True))
            moe = hf_moe(fields, layers, dense_layers=tuple(kind != "moe" for kind in types), **found | _ROUTING)
        return _build(fields, values, mixers=mixers, recurrent=hf_scan(fields, _SIZES, eps), moe=moe)

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        layers = fields.integer(".block_count")
        heads, fields = gguf_kv_heads(fields, layers)
        inner = fields.each_layer(".feed_forward_length", layers, low=0)
        fields = fields.changed(**{fields.key(".feed_forward_length"): max(inner)})
        values = gguf_values(fields, tensors, experts=True)
        # The block behind the last layer, which predicts a further token, is not used.
        values["num_layers"] -= fields.integer(".nextn_predict_layers", 0, low=0, high=layers - 1)
        pairs = list(zip(heads, inner, strict=True))[: values["num_layers"]]
        mixers = tuple("attention" if kv else "none" if width else "ssm" for kv, width in pairs)
        moe = None
        if fields.integer(".expert_count", 0, low=0):
            latent = fields.integer(".moe_latent_size", 0, high=MAX_WIDTH)
            moe = gguf_moe(fields, values["num_layers"], input_size=latent, **_ROUTING)
        biased = any(name.endswith("ssm_conv1d.bias") for name in tensors)
        groups = fields.integer(".ssm.group_count", high=MAX_WIDTH)
        recurrent = gguf_recurrent(fields, norm_eps=values["norm_eps"], norm_groups=groups, conv_bias=biased)
        return _build(fields, values, mixers=mixers, recurrent=recurrent, moe=moe)


def _build(fields: Fields, values: dict, **found) -> ModelConfig:
    values |= dict(activation="relu2", nope_layers=(True,) * values["num_layers"])
    return fields.build(architecture="nemotron_h", **found, **values)
