"""ModernBERT (arXiv 2412.13663; gte-modernbert, granite-embedding r2): LayerNorm before each part, the first of them
the embedding's; every third layer sees all, the others 64 tokens on both sides and turn by a base of their own; gated
MLP."""

from zse.errors import UnsupportedError
from zse.models.common import gguf_rope, hf_rope, hf_windows
from zse.models.config import Fields, ModelConfig, RopeConfig
from zse.models.encoder import Encoder, gguf_encoder, hf_encoder

EVERY = 3
LOCAL, GLOBAL_THETA, LOCAL_THETA = 128, 160000.0, 10000.0


class ModernBert(Encoder):
    model_names = {
        "embed": ("token_embd.weight", "embeddings.tok_embeddings.weight"),
        "embed_norm": ("token_embd_norm.weight", "embeddings.norm.weight"),
        "final_norm": ("output_norm.weight", "final_norm.weight"),
    }
    names = {
        "attn_norm": ("attn_norm.weight", "attn_norm.weight"),
        "qkv": ("attn_qkv.weight", "attn.Wqkv.weight"),
        "o": ("attn_output.weight", "attn.Wo.weight"),
        "mlp_norm": ("ffn_norm.weight", "mlp_norm.weight"),
        "gate_up": ("ffn_up.weight", "mlp.Wi.weight"),
        "down": ("ffn_down.weight", "mlp.Wo.weight"),
    }
    head_names = {
        "cls_dense": ("cls.weight", "head.dense.weight"),
        "cls_norm": ("cls.norm.weight", "head.norm.weight"),
        "cls_out": ("cls.output.weight", "classifier.weight"),
        "cls_out_bias": ("cls.output.bias", "classifier.bias"),
    }
    prefixes = ("", "model.")
    layers = "layers."
    head_activation = "gelu"

    @classmethod
    def has(cls, config, layer, name):
        return name != "attn_norm" or layer > 0

    def kind(self, i):
        return i > 0, super().kind(i)

    def layer(self, x, i):
        q, k, v = self.qkv(self.norm(x, "attn_norm", i) if i else x, i)
        x = x + self.linear(self.attention(q, k, v, i), "o", i)
        return x + self.mlp(self.norm(x, "mlp_norm", i), i)

    def finish(self, x):
        return self.normalize(x, "final_norm")

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        for name in ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"):
            if fields.boolean(name, False):
                raise UnsupportedError(f"{fields.path}: {name}", True, [False])
        if fields.get("classifier_activation", "gelu") != "gelu":
            raise UnsupportedError(
                f"{fields.path}: classifier_activation", fields.get("classifier_activation"), ["gelu"]
            )
        values = hf_encoder(fields, eps="norm_eps", activation="hidden_activation")
        values["norm_eps"] = fields.number("norm_eps", 1e-5, high=1.0)
        turns, local = (
            hf_rope(fields, layer_type=kind, default_theta=fields.number(key, default, low=1.0))
            for kind, key, default in (
                ("full_attention", "global_rope_theta", GLOBAL_THETA),
                ("sliding_attention", "local_rope_theta", LOCAL_THETA),
            )
        )
        every = fields.integer("global_attn_every_n_layers", EVERY)
        layers = hf_windows(fields, values["num_layers"]) or _pattern(values["num_layers"], every)
        if values["num_labels"]:
            values["pooling"] = fields.choice("classifier_pooling", {"cls": "cls", "mean": "mean"}, "cls")
        return _build(fields, values, turns, local, layers, fields.integer("local_attention", LOCAL))

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        values = gguf_encoder(fields, tensors)
        if values["num_labels"]:
            raise UnsupportedError(f"{fields.path}: classifier", "cls.weight", ["none in a GGUF of ModernBERT"])
        local = RopeConfig(theta=fields.number(".rope.freq_base_swa", LOCAL_THETA, low=1.0))
        every = fields.integer(".attention.sliding_window_pattern", EVERY)
        layers = _pattern(values["num_layers"], every)
        window = fields.integer(".attention.sliding_window", LOCAL)
        return _build(fields, values, gguf_rope(fields, GLOBAL_THETA), local, layers, window)


def _pattern(num_layers: int, every: int) -> tuple[bool, ...]:
    return tuple(layer % every != 0 for layer in range(num_layers))


def _build(fields: Fields, values: dict, rope, local, layers, width: int) -> ModelConfig:
    """width: of the window as the files give it: half of it on each side, its own token between."""
    window = dict(sliding_window=width // 2 + 1, sliding_layers=layers, local_rope=local) if any(layers) else {}
    return fields.build(architecture="modernbert", rope=rope, **window, **values)
