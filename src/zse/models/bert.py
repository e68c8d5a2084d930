"""BERT (arXiv 1810.04805), of which MiniLM, bge, mxbai and arctic-embed are, and RoBERTa and XLM-R (arXiv 1907.11692,
1911.02116; e5, bge-m3, arctic-embed 2): learned positions, LayerNorm after each addition, biases everywhere."""

from zse.models.config import Fields, ModelConfig, RopeConfig
from zse.models.encoder import HEAD, Encoder, gguf_encoder, hf_encoder
from zse.models.names import Names

MODEL: Names = {
    "embed": ("token_embd.weight", "embeddings.word_embeddings.weight"),
    "positions": ("position_embd.weight", "embeddings.position_embeddings.weight"),
    "types": ("token_types.weight", "embeddings.token_type_embeddings.weight"),
    "embed_norm": ("token_embd_norm.weight", "embeddings.LayerNorm.weight"),
    "embed_norm_bias": ("token_embd_norm.bias", "embeddings.LayerNorm.bias"),
}
_PARTS = {
    "q": ("attn_q", "attention.self.query"),
    "k": ("attn_k", "attention.self.key"),
    "v": ("attn_v", "attention.self.value"),
    "o": ("attn_output", "attention.output.dense"),
    "attn_norm": ("attn_output_norm", "attention.output.LayerNorm"),
    "up": ("ffn_up", "intermediate.dense"),
    "down": ("ffn_down", "output.dense"),
    "mlp_norm": ("layer_output_norm", "output.LayerNorm"),
}
# llama.cpp's converter leaves the pooler of a BERT out, so that GGUF files have RoBERTa's kind of classifier alone.
POOLER: Names = {
    "cls_dense": (HEAD["cls_dense"][0], "pooler.dense.weight"),
    "cls_dense_bias": (HEAD["cls_dense_bias"][0], "pooler.dense.bias"),
    "cls_out": (HEAD["cls_out"][0], "classifier.weight"),
    "cls_out_bias": (HEAD["cls_out_bias"][0], "classifier.bias"),
}


class Bert(Encoder):
    model_names = MODEL
    names = {
        name + suffix: (f"{ours}.{part}", f"{theirs}.{part}")
        for name, (ours, theirs) in _PARTS.items()
        for suffix, part in (("", "weight"), ("_bias", "bias"))
    }
    head_names = POOLER
    prefixes = ("", "bert.")

    def layer(self, x, i):
        q, k, v = self.qkv(x, i)
        x = self.normalize(x + self.linear(self.attention(q, k, v, i), "o", i), "attn_norm")
        return self.normalize(x + self.linear(self.activate(self.linear(x, "up", i)), "down", i), "mlp_norm")

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        return fields.build(architecture="bert", **_learned(hf_encoder(fields), fields, 0))

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        values = gguf_encoder(fields, tensors)
        return fields.build(architecture="bert", **_without_rope(values), positions=values["max_context"])


class Roberta(Bert):
    """Positions count from behind the padding's id on."""

    head_names = HEAD
    prefixes = ("", "roberta.")

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        first = fields.integer("pad_token_id", 1, low=0) + 1
        return fields.build(architecture="roberta", **_learned(hf_encoder(fields), fields, first))


def _without_rope(values: dict) -> dict:
    return values | dict(rope=RopeConfig(theta=10000.0), nope_layers=(True,) * values["num_layers"])


def _learned(values: dict, fields: Fields, first: int) -> dict:
    """Learned positions: a row each, from `first` on."""
    rows = fields.integer("max_position_embeddings")
    kind = fields.text("position_embedding_type", "absolute")
    if kind != "absolute":
        raise fields.fail("position_embedding_type", f"{kind!r}: expected absolute")
    if rows <= first:
        raise fields.fail("max_position_embeddings", f"{rows} rows, of which the first {first} are not used")
    context = min(values["max_context"], rows - first)
    return _without_rope(values) | dict(positions=rows, position_first=first, max_context=context)
