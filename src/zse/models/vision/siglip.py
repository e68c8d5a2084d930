"""SigLIP (arXiv 2303.15343) as Gemma 3 sees with it: learned positions, LayerNorm before each part, means of 4 × 4
patches, an RMSNorm and a projection."""

from zse.models.encoder import ACTIVATIONS
from zse.models.vision.tower import Tower, TowerConfig, TowerWeight, layers_config, width


class Siglip(Tower):
    hf_layer = "encoder.layers.{}."
    parts = {
        "attn_norm": ("ln1", "layer_norm1"),
        "q": ("attn_q", "self_attn.q_proj"),
        "k": ("attn_k", "self_attn.k_proj"),
        "v": ("attn_v", "self_attn.v_proj"),
        "o": ("attn_out", "self_attn.out_proj"),
        "mlp_norm": ("ln2", "layer_norm2"),
        "up": ("ffn_up", "mlp.fc1"),
        "down": ("ffn_down", "mlp.fc2"),
    }
    anchors = ("embeddings.patch_embedding.weight", "mm_input_projection_weight")

    @classmethod
    def tower_from_hf(cls, fields, vision, kernels):
        text = fields.section("text_config") or fields
        config, dim = layers_config(
            hidden=width(vision, "hidden_size", 768),
            layers=vision.integer("num_hidden_layers", 12, high=4096),
            heads=width(vision, "num_attention_heads", 12),
            inner=width(vision, "intermediate_size", 3072),
            eps=vision.number("layer_norm_eps", 1e-6, high=1.0),
            activation=vision.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh"),
            turns=False,
            kernels=kernels,
        )
        side = vision.integer("image_size", 224) // vision.integer("patch_size", 16)
        inner, out = width(vision, "intermediate_size", 3072), width(text, "hidden_size", 2304)
        return TowerConfig(layers=config, head_dim=dim, inner=inner, out=out, positions=side**2)

    @classmethod
    def tower_from_gguf(cls, fields, out, kernels, tensors):
        inner = width(fields, ".feed_forward_length")
        config, dim = layers_config(
            hidden=width(fields, ".embedding_length"),
            layers=fields.integer(".block_count", high=4096),
            heads=width(fields, ".attention.head_count"),
            inner=inner,
            eps=fields.number(".attention.layer_norm_epsilon", 1e-6, high=1.0),
            activation="gelu_tanh",
            turns=False,
            kernels=kernels,
        )
        side = fields.integer(".image_size") // fields.integer(".patch_size")
        return TowerConfig(layers=config, head_dim=dim, inner=inner, out=out, positions=side**2)

    def outer_weights(self, naming):
        hidden, out, p = self.config.hidden_size, self.tower.out, self.vision.patch
        rows = self.tower.positions
        is_hf = naming == "hf"
        patch = "embeddings.patch_embedding" if is_hf else "v.patch_embd"
        position = "embeddings.position_embedding.weight" if is_hf else "v.position_embd.weight"
        post = "post_layernorm" if is_hf else "v.post_ln"
        yield TowerWeight("patch", (hidden, 3 * p * p), ((f"{patch}.weight", (hidden, 3, p, p)),))
        yield TowerWeight("patch_bias", (hidden,), ((f"{patch}.bias", (hidden,)),))
        yield TowerWeight("position_table", (rows, hidden), ((position, (rows, hidden)),))
        for suffix, part in (("", "weight"), ("_bias", "bias")):
            yield TowerWeight(f"post_norm{suffix}", (hidden,), ((f"{post}.{part}", (hidden,)),))
        norm = "/mm_soft_emb_norm.weight" if is_hf else "mm.soft_emb_norm.weight"
        # Gemma's norms are kept as their distance from 1; llama.cpp's converter has added it.
        plus_one = (lambda values: values + 1) if is_hf else None
        yield TowerWeight("soft_norm", (hidden,), ((norm, (hidden,)),), plus_one)
        projection = "/mm_input_projection_weight" if is_hf else "mm.input_projection.weight"
        yield TowerWeight("projection", (out, hidden), ((projection, (hidden, out)),), lambda values: values.T)

    def positions(self, table, height, width):
        row, column = self.places(height, width)
        return table[row * (width // self.vision.patch) + column]

    def finish(self, x):
        return self.normalize(x, "post_norm")

    def tail(self, work, hidden, number):
        pooled = work.mean(hidden, self.vision.merge**2)
        return work.product(work.norm(pooled, "soft_norm", "rms", self.config.norm_eps), "projection")
