"""Gemma 4 text (Google, 2026): Gemma 3 with a norm on V, heads of another size in the layers without a window, of which
only a part turns, last layers that read the K and V of earlier ones, and embeddings of each layer's own (as in Gemma
3n), or experts beside the MLP (26B-A4B), which read the same stream; the results of both are normalized, added and
normalized."""

from zse.errors import UnsupportedError
from zse.models import common
from zse.models import names as tables
from zse.models.config import MAX_WIDTH, Fields, ModelConfig, RopeConfig
from zse.models.decoder import Decoder
from zse.models.gemma2 import MLP_NORM

PATTERN = 6  # every sixth layer has no window where config.json does not say
# What a text_config leaves out where it is so: transformers' Gemma4TextConfig, and Gemma4UnifiedTextConfig.
DEFAULTS = dict(vocab_size=262144, hidden_size=2304, intermediate_size=9216, num_hidden_layers=30, sliding_window=512)
DEFAULTS |= dict(num_attention_heads=8, num_key_value_heads=4, head_dim=256, global_head_dim=512)
DEFAULTS |= dict(max_position_embeddings=131072, hidden_size_per_layer_input=256)
UNIFIED = DEFAULTS | dict(max_position_embeddings=262144, sliding_window=1024, hidden_size_per_layer_input=0)
ROPES = dict(
    sliding_attention=dict(rope_type="default", rope_theta=10000.0),
    full_attention=dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1000000.0),
)


class Gemma4(Decoder):
    names = (
        tables.ATTN_NORM
        | tables.ATTENTION
        | tables.QK_NORM
        | MLP_NORM
        | tables.MLP
        | tables.BESIDE
        | tables.POST_NORMS
        | tables.PLE
        | tables.LAYER_SCALE
    )
    model_names = tables.MODEL | tables.PLE_MODEL

    def begin(self):
        x = self.embed()
        if self.config.ple_width:
            self.layer_inputs(x)
        return x

    def layer(self, x, i):
        attended = self.linear(self.attend(self.norm(x, "attn_norm", i), i), "o", i)
        x = x + self.norm(attended, "post_attn_norm", i)
        inner = self.dense(self.norm(x, "mlp_norm", i), i)
        if self.config.moe is not None:
            experts = self.mixture(self.norm(x, "experts_norm", i), i, self.norm(x, "router_norm", i))
            inner = self.norm(inner, "post_dense_norm", i) + self.norm(experts, "post_experts_norm", i)
        x = x + self.norm(inner, "post_mlp_norm", i)
        if self.config.ple_width:
            gated = self.gate_inputs(self.linear(x, "ple_gate", i), i)
            x = x + self.norm(self.linear(gated, "ple_out", i), "post_ple_norm", i)
        return self.scale_stream(x, "layer_scale", i) if self.config.layer_scale else x

    @classmethod
    def layer_names(cls, config: ModelConfig, layer: int) -> tables.Names:
        return cls.names

    def attend(self, x, i):
        q = self.head_norm(self.linear(x, "q", i, exact=True), "q_norm", i)
        q, shapes = self.rotate(q, i, "q"), self.trace.shapes
        if "k" not in shapes:
            return self.attention(q, None, None, i)
        k = self.linear(x, "k", i, exact=True)
        v = self.linear(x, "v", i, exact=True) if "v" in shapes else k
        k = self.rotate(self.head_norm(k, "k_norm", i), i, "k")
        return self.attention(q, k, self.head_norm(v, None, i), i)

    @staticmethod
    def from_hf(fields: Fields, generation: Fields | None) -> ModelConfig:
        defaults = UNIFIED if fields.get("model_type") == "gemma4_unified_text" else DEFAULTS
        fields = fields.changed(**{name: value for name, value in defaults.items() if fields.get(name) is None})
        if fields.get("use_bidirectional_attention") not in (None, "vision"):
            name = "use_bidirectional_attention"
            raise UnsupportedError(f"{fields.path}: {name}", fields.get(name), [None, "vision"])
        ropes = fields.get("rope_parameters") or ROPES
        values = common.hf_values(fields.changed(rope_parameters=None), generation, tied_default=True)
        layers, shared = values["num_layers"], fields.integer("num_kv_shared_layers", 0, low=0)
        # Of the last layer transformers makes one without a window, whatever the file says.
        sliding = (*(common.hf_windows(fields, layers) or common.pattern_layers(PATTERN, layers))[:-1], False)
        head_dim, kv_heads = common.full_heads(fields, sliding)
        fields, inner = fields.changed(rope_parameters=ropes), values["intermediate_size"]
        moe = None
        if fields.boolean("enable_moe_block", False):
            moe = common.hf_moe(fields.changed(num_experts_per_tok=fields.get("top_k_experts")), layers, normalize=True)
        wide = shared if fields.boolean("use_double_wide_mlp", False) else 0
        values |= dict(
            activation="gelu_tanh",
            rope=common.hf_rope(fields, layer_type="full_attention", head_dim=head_dim),
            local_rope=common.hf_rope(fields, layer_type="sliding_attention"),
            sliding_window=fields.integer("sliding_window"),
            logit_softcap=fields.number("final_logit_softcapping", 0.0),
            num_shared_kv=shared,
            values_are_keys=fields.boolean("attention_k_eq_v", False),
            intermediate_sizes=(inner,) * (layers - wide) + (inner * 2,) * wide if wide else (),
            ple_width=fields.integer("hidden_size_per_layer_input", low=0, high=MAX_WIDTH),
            layer_scale=True,
            moe=moe,
        )
        return _build(fields, values, sliding, head_dim, kv_heads)

    @staticmethod
    def from_gguf(fields: Fields, tensors) -> ModelConfig:
        layers = fields.integer(".block_count")
        sliding = tuple(map(bool, fields.each_layer(".attention.sliding_window_pattern", layers, low=0)))
        kv_heads, inner = (
            fields.each_layer(f".{name}", layers) for name in ("attention.head_count_kv", "feed_forward_length")
        )
        heads = dict(zip(sliding, kv_heads, strict=True))
        if any(heads[slides] != count for slides, count in zip(sliding, kv_heads, strict=True)):
            raise fields.fail(".attention.head_count_kv", "differs between layers of one kind")
        # The plain keys are of the layers without a window, the others' end in _swa.
        names = (".attention.key_length", ".attention.value_length", ".rope.dimension_count")
        small = {name: fields.integer(f"{name}_swa", high=MAX_WIDTH) for name in names}
        small |= {".attention.head_count_kv": heads.get(True, kv_heads[0]), ".feed_forward_length": inner[0]}
        head_dim, shared = fields.integer(names[0]), fields.integer(".attention.shared_kv_layers", 0, low=0)
        full = sliding.index(False) if False in sliding else 0
        plain = fields.changed(**{fields.key(name): value for name, value in small.items()})
        values = common.gguf_values(plain, tensors, experts=True) | dict(
            activation="gelu_tanh",
            rope=common.gguf_rope(fields, 1000000.0, head_dim),
            local_rope=RopeConfig(theta=fields.number(".rope.freq_base_swa", 10000.0, low=1.0)),
            sliding_window=fields.integer(".attention.sliding_window"),
            logit_softcap=fields.number(".final_logit_softcapping", 0.0),
            num_shared_kv=shared,
            values_are_keys=f"blk.{full}.attn_v.weight" not in tensors,
            intermediate_sizes=inner if len(set(inner)) > 1 else (),
            ple_width=fields.integer(".embedding_length_per_layer_input", 0, low=0, high=MAX_WIDTH),
            layer_scale="blk.0.layer_output_scale.weight" in tensors,
            moe=common.gguf_moe(fields, layers) if fields.integer(".expert_count", 0, low=0) else None,
        )
        return _build(fields, values, sliding, head_dim, heads.get(False, 0))


def _build(fields: Fields, values: dict, sliding: tuple[bool, ...], head_dim: int, kv_heads: int) -> ModelConfig:
    scales = dict(query_scale=1.0, embed_scale=values["hidden_size"] ** 0.5, qk_norm=True, post_norms=True)
    layers = dict(sliding_layers=sliding, global_head_dim=head_dim, global_kv_heads=kv_heads)
    return fields.build(architecture="gemma4", **values | scales | layers)
