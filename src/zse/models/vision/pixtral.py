"""Pixtral's tower (arXiv 2410.07073) as Mistral 3 sees with it: a rotation by row and column, RMSNorm before each part, gated
MLP; 2 × 2 patches merged by a product, then two more."""

from zse.lazy import numpy as np
from zse.models.encoder import ACTIVATIONS
from zse.models.vision.tower import Tower, TowerConfig, TowerWeight, layers_config, width

EPS = 1e-5  # of the tower's norms
THETA = 10000.0


class Pixtral(Tower):
    hf_layer = "transformer.layers.{}."
    anchors = ("patch_conv.weight", "patch_merger.merging_layer.weight")
    norm_kind = "rms"
    has_biases = False
    is_gated = True
    parts = {
        "attn_norm": ("ln1", "attention_norm"),
        "q": ("attn_q", "attention.q_proj"),
        "k": ("attn_k", "attention.k_proj"),
        "v": ("attn_v", "attention.v_proj"),
        "o": ("attn_out", "attention.o_proj"),
        "mlp_norm": ("ln2", "ffn_norm"),
        "gate": ("ffn_gate", "feed_forward.gate_proj"),
        "up": ("ffn_up", "feed_forward.up_proj"),
        "down": ("ffn_down", "feed_forward.down_proj"),
    }

    @classmethod
    def tower_from_hf(cls, fields, vision, kernels):
        for name, wanted in (("vision_feature_layer", -1), ("projector_hidden_act", "gelu")):
            if fields.get(name, wanted) != wanted:
                raise ValueError(f"{name}: {fields.get(name)!r}, {wanted!r} is supported")
        inner = width(vision, "intermediate_size", 4096)
        config, dim = layers_config(
            hidden=width(vision, "hidden_size", 1024),
            layers=vision.integer("num_hidden_layers", 24, high=4096),
            heads=width(vision, "num_attention_heads", 16),
            inner=inner,
            eps=EPS,
            activation=vision.choice("hidden_act", ACTIVATIONS, "gelu"),
            turns=True,
            kernels=kernels,
        )
        text = fields.section("text_config") or fields
        sizes = dict(out=width(text, "hidden_size", 5120), tail_eps=text.number("rms_norm_eps", EPS, high=1.0))
        biases = fields.boolean("multimodal_projector_bias", False)
        return TowerConfig(layers=config, head_dim=dim, inner=inner, tail_biases=biases, **sizes)

    @classmethod
    def tower_from_gguf(cls, fields, out, kernels, tensors):
        inner = width(fields, ".feed_forward_length")
        config, dim = layers_config(
            hidden=width(fields, ".embedding_length"),
            layers=fields.integer(".block_count", high=4096),
            heads=width(fields, ".attention.head_count"),
            inner=inner,
            eps=fields.number(".attention.layer_norm_epsilon", EPS, high=1.0),
            activation="silu" if fields.boolean("clip.use_silu", False) else "gelu",
            turns=True,
            kernels=kernels,
        )
        return TowerConfig(layers=config, head_dim=dim, inner=inner, out=out, tail_eps=config.norm_eps)

    def stored_rows(self, name, naming, values):
        """llama.cpp's converter stores q and k so that neighbours turn."""
        if naming != "gguf" or name not in "qk":
            return values
        heads, half = self.config.num_heads, self.tower.head_dim // 2
        return values.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(values.shape)

    def outer_weights(self, naming):
        hidden, out, p, is_hf = self.config.hidden_size, self.tower.out, self.vision.patch, naming == "hf"
        merged = self.vision.merge**2
        names = dict(patch="patch_conv", pre_norm="ln_pre", norm="/norm", merger="/patch_merger.merging_layer")
        names |= dict(fc1="/linear_1", fc2="/linear_2")
        if not is_hf:
            names = dict(patch="v.patch_embd", pre_norm="v.pre_ln", norm="mm.input_norm", merger="mm.patch_merger")
            names |= dict(fc1="mm.1", fc2="mm.2")
        stored = {name: f"{found}.weight" for name, found in names.items()}
        yield TowerWeight("patch", (hidden, 3 * p * p), ((stored["patch"], (hidden, 3, p, p)),))
        yield TowerWeight("pre_norm", (hidden,), ((stored["pre_norm"], (hidden,)),))
        yield TowerWeight("norm", (hidden,), ((stored["norm"], (hidden,)),))

        def patch_by_patch(values):
            """Its columns stand channel by channel; rows of patches are put together patch by patch."""
            return values.reshape(hidden, hidden, merged).swapaxes(1, 2).reshape(hidden, -1)

        shape = hidden, hidden * merged
        yield TowerWeight("merger", shape, ((stored["merger"], shape),), patch_by_patch)
        for name, columns in (("fc1", hidden), ("fc2", out)):
            yield TowerWeight(name, (out, columns), ((stored[name], (out, columns)),))
            if self.tower.tail_biases:
                yield TowerWeight(f"{name}_bias", (out,), ((f"{names[name]}.bias", (out,)),))

    def rotations(self, height, width):
        dim = self.tower.head_dim
        every = THETA ** -(np.arange(0, dim, 2) / dim)
        return self.axial(height, width, np.concatenate([every[0::2], every[1::2]]), np.arange(dim // 2) < dim // 4)

    def tail(self, work, hidden, number):
        x = work.together(work.norm(hidden, "norm", "rms", self.tower.tail_eps), self.vision.merge**2)
        return work.product(work.act(work.product(work.product(x, "merger"), "fc1"), "gelu"), "fc2")
