"""nomic-embed-text 2 (arXiv 2502.07972): BERT with rotated positions and biases, whose every other MLP is a mixture of
experts without gates, to which one vector is added."""

from zse.errors import UnsupportedError
from zse.models.common import gguf_moe, gguf_rope, hf_rope
from zse.models.config import Fields, ModelConfig
from zse.models.encoder import gguf_encoder, hf_encoder
from zse.models.nomic_bert import OWN_KEYS, NomicBert, check_own

THETA = 10000.0
# What the authors' code can be set to and this model is.
SETTINGS = {
    "activation_function": "gelu",
    "qkv_proj_bias": True,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "moe_normalize_expert_weights": False,
    "expert_choice_router": False,
    "num_shared_experts": 0,
    "ffn_div": 1,
}


class NomicBertMoe(NomicBert):
    names = {name: NomicBert.names[name] for name in ("qkv", "o", "attn_norm", "attn_norm_bias")} | {
        "qkv_bias": ("attn_qkv.bias", "attn.Wqkv.bias"),
        "o_bias": ("attn_output.bias", "attn.out_proj.bias"),
        "up": ("ffn_up.weight", "mlp.fc1.weight"),
        "up_bias": ("ffn_up.bias", "mlp.fc1.bias"),
        "down": ("ffn_down.weight", "mlp.fc2.weight"),
        "down_bias": ("ffn_down.bias", "mlp.fc2.bias"),
        "router": ("ffn_gate_inp.weight", "mlp.router.layer.weight"),
        "up_exps": ("ffn_up_exps.weight", "mlp.experts.mlp.w1"),
        "down_exps": ("ffn_down_exps.weight", "mlp.experts.{e}.w2"),
        "sum_bias": ("", "mlp.experts.bias"),
        "mlp_norm": NomicBert.names["mlp_norm"],
        "mlp_norm_bias": NomicBert.names["mlp_norm_bias"],
    }

    @classmethod
    def has(cls, config, layer, name):
        assert config.moe is not None
        if name == "sum":  # "sum_bias" without its ending
            return config.moe.is_sparse(layer) and config.moe.sum_bias
        if name in ("up", "down"):
            return not config.moe.is_sparse(layer)
        return config.moe.is_sparse(layer) or name not in ("router", "up_exps", "down_exps")

    def mlp(self, x, i):
        if "router" not in self.trace.shapes:
            return x + self.linear(self.activate(self.linear(x, "up", i)), "down", i)
        routing = self.route(self.linear(x, "router", i))
        inner = self.activate(self.experts(x, "up_exps", routing, gather=True))
        x = x + self.trace.add("combine", (self.experts(inner, "down_exps", routing), routing), x.width)
        return self.add_rows(x, "sum_bias") if "sum_bias" in self.trace.shapes else x

    def layer(self, x, i):
        q, k, v = self.qkv(x, i)
        x = self.normalize(x + self.linear(self.attention(q, k, v, i), "o", i), "attn_norm")
        return self.normalize(self.mlp(x, i), "mlp_norm")

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        check_own(fields, SETTINGS)
        theta = fields.number("rotary_emb_base", THETA, low=1.0)
        values = hf_encoder(fields.changed(rope_scaling=None), **OWN_KEYS)
        if values["num_labels"]:
            raise UnsupportedError(f"{fields.path}: architecture", fields.get("architectures")[0], ["NomicBertModel"])
        moe = fields.build_moe(
            num_experts=fields.integer("num_experts"),
            experts_per_token=fields.integer("moe_top_k"),
            sum_bias=True,
            **_shared(fields, values, fields.integer("moe_every_n_layers", low=2)),
        )
        rope = hf_rope(fields.changed(rope_scaling=None), default_theta=theta)
        return fields.build(architecture="nomic_bert_moe", rope=rope, moe=moe, **values)

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        """llama.cpp's converter leaves out the vector that is added to the experts' sum."""
        values = gguf_encoder(fields, tensors)
        shared = _shared(fields, values, fields.integer(".moe_every_n_layers", low=2))
        moe = gguf_moe(fields, values["num_layers"], **shared)
        return fields.build(architecture="nomic_bert_moe", rope=gguf_rope(fields, THETA), moe=moe, **values)


def _shared(fields: Fields, values: dict, every: int) -> dict:
    """Layers 1, 1 + every, ... have experts, as wide as the others' MLPs; their weights are not divided by their
    sum."""
    dense = tuple(layer % every != 1 for layer in range(values["num_layers"]))
    return dict(intermediate_size=values["intermediate_size"], normalize=False, dense_layers=dense)
