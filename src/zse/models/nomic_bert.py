"""nomic-embed-text 1 and 1.5 (arXiv 2402.01613): BERT with rotated positions, a gated MLP, and no biases but the
norms'."""

from zse.errors import UnsupportedError
from zse.models.common import gguf_rope, hf_rope
from zse.models.config import Fields, ModelConfig
from zse.models.encoder import HEAD, Encoder, gguf_encoder, hf_encoder

THETA = 1000.0
# The files of the authors name what others call otherwise.
OWN_KEYS = dict(
    hidden="n_embd",
    layers="n_layer",
    heads="n_head",
    inner="n_inner",
    eps="layer_norm_epsilon",
    activation="activation_function",
    context="n_positions",
)
SETTINGS = {
    "activation_function": "swiglu",
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "num_experts": 0,
}


class NomicBert(Encoder):
    model_names = {
        "embed": ("token_embd.weight", "embeddings.word_embeddings.weight"),
        "types": ("token_types.weight", "embeddings.token_type_embeddings.weight"),
        "embed_norm": ("token_embd_norm.weight", "emb_ln.weight"),
        "embed_norm_bias": ("token_embd_norm.bias", "emb_ln.bias"),
    }
    names = {
        "qkv": ("attn_qkv.weight", "attn.Wqkv.weight"),
        "o": ("attn_output.weight", "attn.out_proj.weight"),
        "attn_norm": ("attn_output_norm.weight", "norm1.weight"),
        "attn_norm_bias": ("attn_output_norm.bias", "norm1.bias"),
        "gate": ("ffn_gate.weight", "mlp.fc12.weight"),
        "up": ("ffn_up.weight", "mlp.fc11.weight"),
        "down": ("ffn_down.weight", "mlp.fc2.weight"),
        "mlp_norm": ("layer_output_norm.weight", "norm2.weight"),
        "mlp_norm_bias": ("layer_output_norm.bias", "norm2.bias"),
    }
    head_names = HEAD
    prefixes = ("", "bert.")
    layers = "encoder.layers."

    def layer(self, x, i):
        q, k, v = self.qkv(x, i)
        x = self.normalize(x + self.linear(self.attention(q, k, v, i), "o", i), "attn_norm")
        return self.normalize(x + self.mlp(x, i), "mlp_norm")

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        own = fields.get("n_embd") is not None
        theta = fields.number("rotary_emb_base", THETA, low=1.0)
        if own:
            check_own(fields, SETTINGS)
            fields = Fields(fields.path, fields.values | {"activation_function": "silu", "rope_scaling": None})
        values = hf_encoder(fields, **(OWN_KEYS if own else {})) | dict(activation="silu")
        if values["num_labels"]:
            raise UnsupportedError(
                f"{fields.path}: architecture", "NomicBertForSequenceClassification", ["NomicBertModel"]
            )
        return fields.build(architecture="nomic_bert", rope=hf_rope(fields, default_theta=theta), **values)

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        values = gguf_encoder(fields, tensors) | dict(activation="silu")
        return fields.build(architecture="nomic_bert", rope=gguf_rope(fields, THETA), **values)


def check_own(fields: Fields, settings: dict) -> None:
    """Refuse what the authors' code can be set to and these models are not. settings: what differs between them."""
    wanted = settings | {"prenorm": False, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False}
    for name, value in wanted.items():
        if fields.get(name, value) != value:
            raise UnsupportedError(f"{fields.path}: {name}", str(fields.get(name))[:40], [value])
    if fields.get("use_rms_norm"):
        raise UnsupportedError(f"{fields.path}: use_rms_norm", str(fields.get("use_rms_norm"))[:40], [False])
