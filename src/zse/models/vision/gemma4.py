"""Gemma 4's tower (Google, 2026): a table of positions for rows and one for columns, a rotation of the first half of each
head by column and of the second by row, RMSNorm before and behind each part and of each head, gated MLP, in E2B and E4B
with inputs and results of products within bounds; means of 3 × 3 patches, normalized, and a projection."""

from functools import partial

from zse.errors import FormatError
from zse.lazy import numpy as np
from zse.models.encoder import ACTIVATIONS
from zse.models.vision.tower import Tower, TowerConfig, TowerWeight, layers_config, pad_heads, width

EPS = 1e-6
THETA = 100.0
BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class Gemma4Vision(Tower):
    hf_layer = "encoder.layers.{}."
    anchors = ("patch_embedder.input_proj.weight", "embed_vision.embedding_projection.weight")
    norm_kind = "rms"
    norms = ("attn_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm")
    has_biases = False
    is_gated = True
    hf_product = ".linear"
    parts = {
        "attn_norm": ("ln1", "input_layernorm"),
        "q": ("attn_q", "self_attn.q_proj"),
        "k": ("attn_k", "self_attn.k_proj"),
        "v": ("attn_v", "self_attn.v_proj"),
        "o": ("attn_out", "self_attn.o_proj"),
        "q_norm": ("attn_q_norm", "self_attn.q_norm"),
        "k_norm": ("attn_k_norm", "self_attn.k_norm"),
        "post_attn_norm": ("attn_post_norm", "post_attention_layernorm"),
        "mlp_norm": ("ln2", "pre_feedforward_layernorm"),
        "gate": ("ffn_gate", "mlp.gate_proj"),
        "up": ("ffn_up", "mlp.up_proj"),
        "down": ("ffn_down", "mlp.down_proj"),
        "post_mlp_norm": ("ffn_post_norm", "post_feedforward_layernorm"),
    }

    def __init__(self, tower, vision):
        super().__init__(tower, vision)
        longest = vision.max_patches // vision.merge
        if tower.positions < longest:
            what = f"{tower.positions} rows and columns, an image may have {longest} patches in one"
            raise FormatError("vision tower", 0, "position_embedding_size", what)

    @classmethod
    def tower_from_hf(cls, fields, vision, kernels):
        heads, hidden = width(vision, "num_attention_heads", 12), width(vision, "hidden_size", 768)
        for name, wanted in (("num_key_value_heads", heads), ("head_dim", hidden // heads), ("attention_bias", False)):
            if vision.get(name, wanted) not in (wanted, None):
                raise ValueError(f"{name}: {vision.get(name)!r}, {wanted!r} is supported")
        text = fields.section("text_config") or fields
        rope = vision.section("rope_parameters")
        return _tower(
            hidden=hidden,
            layers=vision.integer("num_hidden_layers", 16, high=4096),
            heads=heads,
            inner=width(vision, "intermediate_size", 3072),
            eps=vision.number("rms_norm_eps", EPS, high=1.0),
            activation=vision.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
            kernels=kernels,
            out=width(text, "hidden_size", 2304),
            positions=vision.integer("position_embedding_size", 10240, high=1 << 20),
            theta=rope.number("rope_theta", THETA, low=1.0) if rope else THETA,
            bounded=vision.boolean("use_clipped_linears", False),
            standardized=vision.boolean("standardize", False),
        )

    @classmethod
    def tower_from_gguf(cls, fields, out, kernels, tensors):
        table = tensors.get("v.position_embd.weight")
        return _tower(
            hidden=width(fields, ".embedding_length"),
            layers=fields.integer(".block_count", high=4096),
            heads=width(fields, ".attention.head_count"),
            inner=width(fields, ".feed_forward_length"),
            eps=fields.number(".attention.layer_norm_epsilon", EPS, high=1.0),
            activation="gelu_tanh",
            kernels=kernels,
            out=out,
            positions=table.shape[-2] if table is not None and len(table.shape) > 1 else 0,
            theta=THETA,
            bounded="v.blk.0.attn_q.input_max" in tensors,
            standardized="v.std_scale" in tensors,
        )

    def outer_weights(self, naming):
        hidden, out, p = self.config.hidden_size, self.tower.out, self.vision.patch
        is_hf, rows = naming == "hf", self.tower.positions
        if is_hf:  # its columns stand pixel by pixel, ours and a GGUF's channel by channel
            patch = "patch_embedder.input_proj.weight", (hidden, 3 * p * p)
            turned = lambda values: values.reshape(hidden, p, p, 3).transpose(0, 3, 1, 2)  # noqa: E731
            yield TowerWeight("patch", (hidden, 3 * p * p), (patch,), turned)
        else:
            yield TowerWeight("patch", (hidden, 3 * p * p), (("v.patch_embd.weight", (hidden, 3, p, p)),))
        table = "patch_embedder.position_embedding_table" if is_hf else "v.position_embd.weight"
        yield TowerWeight("position_table", (2 * rows, hidden), ((table, (2, rows, hidden)),))
        if self.tower.standardized:
            before = "" if is_hf else "v."
            scaled = lambda values: values / hidden**0.5  # noqa: E731
            yield TowerWeight("std_bias", (hidden,), ((f"{before}std_bias", (hidden,)),), scaled)
            yield TowerWeight("std_scale", (hidden,), ((f"{before}std_scale", (hidden,)),))
        yield TowerWeight("soft_norm", (hidden,), (), lambda: np.ones(hidden, np.float32))
        projection = "/embed_vision.embedding_projection.weight" if is_hf else "mm.input_projection.weight"
        yield TowerWeight("projection", (out, hidden), ((projection, (out, hidden)),))

    def layer_weights(self, naming, layer):
        yield from super().layer_weights(naming, layer)
        before = (self.gguf_layer if naming == "gguf" else self.hf_layer).format(layer)
        dim, wide = self.tower.head_dim, self.config.head_dim
        for name in ("q_norm", "k_norm"):
            norm = f"{before}{self.parts[name][naming == 'hf']}.weight"
            yield TowerWeight(f"layers.{layer}.{name}", (wide,), ((norm, (dim,)),), self._head_norm)
        for name in ("q", "k", "v", "o", "gate", "up", "down") if self.tower.bounded else ():
            called = f"{before}{self.parts[name][naming == 'hf']}"
            stored = tuple((f"{called}.{bound}", (1,)) for bound in BOUNDS)
            yield TowerWeight(f"layers.{layer}.{name}_bounds", (4,), stored, partial(self._bounds, called, name))

    def _bounds(self, called, name, *each):
        """Zeros behind a head stay zeros; what attention gives is larger where heads have them (layer()), and so is what
        the product behind it gives."""
        dim, wide, found = self.tower.head_dim, self.config.head_dim, np.concatenate(each)
        if dim < wide and name in "qkv" and not found[2] <= 0 <= found[3]:
            raise FormatError("vision tower", 0, f"{called}.output_min", f"{found[2]} to {found[3]} leave out 0")
        return found * np.float32((wide / dim) ** 0.5) if name == "o" else found

    def _head_norm(self, values):
        """The mean of squares of a head with zeros behind it is smaller."""
        wide, dim = self.config.head_dim, self.tower.head_dim
        return pad_heads(self.stored_rows("q", "", values), 1, wide) * np.float32((dim / wide) ** 0.5)

    def stored_rows(self, name, naming, values):
        """Its halves turn each for itself: what turns together comes to stand half a head apart."""
        if name not in "qk":
            return values
        dim = self.tower.head_dim
        return values.reshape(len(values) // dim, 2, 2, dim // 4, -1).swapaxes(1, 2).reshape(values.shape)

    def positions(self, table, height, width):
        row, column = self.places(height, width)
        return table[column] + table[self.tower.positions + row]

    def rotations(self, height, width):
        half = self.tower.head_dim // 2
        frequencies = self.tower.theta ** -(np.arange(0, half, 2) / half)
        return self.axial(height, width, np.concatenate([frequencies, frequencies]), np.arange(half) >= half // 2)

    def layer(self, x, i):
        h = self.norm(x, "attn_norm", i)
        q, k, v = (self.bounded(h, name, i) for name in "qkv")
        q, k = (self.rotate(self.head_norm(value, f"{name}_norm", i), i, name) for name, value in (("q", q), ("k", k)))
        attended = self.bounded(self.attention(q, k, self.head_norm(v, None, i), i), "o", i)
        # v's heads are normalized with zeros behind them, too: what attention gives is larger by a factor that this norm takes out.
        eps = self.config.norm_eps * self.config.head_dim / self.tower.head_dim
        x = x + self.norm(attended, "post_attn_norm", i, eps)
        h = self.norm(x, "mlp_norm", i)
        inner = self.gate(self.bounded(h, "gate", i), self.bounded(h, "up", i))
        return x + self.norm(self.bounded(inner, "down", i), "post_mlp_norm", i)

    def head_norm(self, x, name, i):
        eps = self.config.norm_eps * self.tower.head_dim / self.config.head_dim
        return self.trace.add("head_norm", (x,), x.width, {} if name is None else {"weight": name}, eps=eps)

    def bounded(self, x, name, i):
        """A product whose inputs and results stay within bounds where the tower has some."""
        if not self.tower.bounded:
            return self.linear(x, name, i)
        bounds = {"bounds": f"{name}_bounds"}
        product = self.linear(self.trace.add("clamp", (x,), x.width, bounds, first=0), name, i)
        return self.trace.add("clamp", (product,), product.width, bounds, first=2)

    def tail(self, work, hidden, number):
        # The means are multiplied with the root of the width first: the norm does not see it but by its eps.
        pooled = work.mean(hidden, self.vision.merge**2)
        if self.tower.standardized:
            pooled = work.standardize(pooled, "std_bias", "std_scale")
        eps = self.config.norm_eps / self.config.hidden_size
        return work.product(work.norm(pooled, "soft_norm", "rms", eps), "projection")


def _tower(*, out, positions, theta, bounded, standardized, inner, **sizes) -> TowerConfig:
    config, dim = layers_config(inner=inner, turns=True, scale=1.0, **sizes)
    if dim % 4:
        raise ValueError(f"num_attention_heads: heads of {dim} have no halves that turn")
    more = dict(theta=theta, bounded=bounded, standardized=standardized)
    return TowerConfig(layers=config, head_dim=dim, inner=inner, out=out, positions=positions, **more)
