"""Recurrent layers of hybrid models: their tensors and what files say of them (docs/design/0010-hybrid-models.md).

mix_in, mix_qkv, mix_z, mix_b, mix_a are products of a layer's input, mix_out comes last; conv is [channels, kernel]; A,
of each head, is negative: Hugging Face files have the logarithm of its size."""

from collections.abc import Hashable
from typing import ClassVar

import msgspec

from zse.errors import UnsupportedError
from zse.models.config import MAX_WIDTH, Fields, ModelConfig
from zse.models.config_parts import RecurrentConfig
from zse.models.decoder import StateParts
from zse.models.hybrid import Hybrid
from zse.models.names import ATTENTION, QK_NORM, Names, Role, layer_roles
from zse.plan.trace import Value

# A short convolution between two gates (LFM2).
SHORT_CONV: Names = {
    "mix_in": ("shortconv.in_proj.weight", "conv.in_proj.weight"),
    "conv": ("shortconv.conv.weight", "conv.conv.weight"),
    "mix_out": ("shortconv.out_proj.weight", "conv.out_proj.weight"),
}
# Gated DeltaNet. Qwen3-Next has q, k, v and z of a group of heads one behind the other in one tensor, and b and a
# likewise (zse.formats.latent).
DELTA: Names = {
    "mix_qkv": ("attn_qkv.weight|ssm_in.weight", "linear_attn.in_proj_qkv.weight|linear_attn.in_proj_qkvz.weight"),
    "mix_z": ("attn_gate.weight|ssm_in.weight", "linear_attn.in_proj_z.weight|linear_attn.in_proj_qkvz.weight"),
    "mix_b": ("ssm_beta.weight", "linear_attn.in_proj_b.weight"),
    "mix_a": ("ssm_alpha.weight", "linear_attn.in_proj_a.weight"),
    "conv": ("ssm_conv1d.weight", "linear_attn.conv1d.weight"),
    "A": ("ssm_a", "linear_attn.A_log"),
    "dt_bias": ("ssm_dt.bias", "linear_attn.dt_bias"),
    "mix_norm": ("ssm_norm.weight", "linear_attn.norm.weight"),
    "mix_out": ("ssm_out.weight", "linear_attn.out_proj.weight"),
}


def mamba(prefix: str) -> Names:
    """Names of Mamba-2's tensors, behind `prefix` in Hugging Face's."""
    found = {
        "mix_in": ("ssm_in.weight", "in_proj.weight"),
        "conv": ("ssm_conv1d.weight", "conv1d.weight"),
        "conv_bias": ("ssm_conv1d.bias", "conv1d.bias"),
        "A": ("ssm_a", "A_log"),
        "D": ("ssm_d", "D"),
        "dt_bias": ("ssm_dt.bias", "dt_bias"),
        "mix_norm": ("ssm_norm.weight", "norm.weight"),
        "mix_out": ("ssm_out.weight", "out_proj.weight"),
    }
    return {name: (gguf, prefix + hf) for name, (gguf, hf) in found.items()}


UNLIMITED = 1e9  # of a time step of Mamba-2, which softplus gives
OF_ATTENTION = frozenset(ATTENTION | QK_NORM)
OF_MIXERS = {"conv": frozenset(SHORT_CONV), "delta": frozenset(DELTA), "ssm": frozenset(mamba(""))}
NOT_OF_ALL = OF_ATTENTION.union(*OF_MIXERS.values())


def mixer_roles(config: ModelConfig, mixer: str) -> dict[str, Role]:
    """The roles of a layer's mixer, by their names."""
    found, hidden = config.recurrent, config.hidden_size
    if found is None or mixer not in OF_MIXERS:
        return {}
    channels, heads, inner = found.channels(mixer, hidden), found.heads, found.inner
    vectors: dict[str, tuple[int, ...]] = {"conv": (channels, found.kernel)}
    matrices = {"mix_in": (3 * channels, hidden), "mix_out": (hidden, channels)}
    if found.conv_bias:
        vectors["conv_bias"] = (channels,)
    if mixer != "conv":
        vectors |= {"A": (heads,), "D": (heads,), "dt_bias": (heads,)}
        vectors["mix_norm"] = (inner if mixer == "ssm" else found.value_size,)
        matrices = {"mix_in": (inner + channels + heads, hidden), "mix_out": (hidden, inner)}
        matrices |= {"mix_b": (heads, hidden), "mix_a": (heads, hidden)}
    roles = [Role(name, shape, "decay" if name == "A" else "vector") for name, shape in vectors.items()]
    roles += [Role(name, shape, "matrix") for name, shape in matrices.items()]
    if mixer == "delta":
        roles += _grouped(found, hidden)
    return {role.name: role for role in roles}


def _grouped(found: RecurrentConfig, hidden: int) -> list[Role]:
    """The roles of q, k, v and z: where files have them in one, those of a group of heads stand together."""
    counts = (found.key_size, found.key_size, found.inner // found.groups, found.inner // found.groups)
    runs = [
        tuple((at * sum(counts) + sum(counts[:member]), count) for at in range(found.groups))
        for member, count in enumerate(counts)
    ]
    qkv, stored = runs[0] + runs[1] + runs[2], found.groups * sum(counts)
    rows = found.channels("delta", hidden)
    z = Role("mix_z", (found.inner, hidden), "matrix", runs=runs[3], stored=stored)
    return [Role("mix_qkv", (rows, hidden), "matrix", runs=qkv, stored=stored), z]


def _half(role: Role) -> Role:
    """gate or up, where both may be stored in one."""
    if role.name.removeprefix("shared_") not in ("gate", "up") or role.kind != "matrix":
        return role
    rows = role.shape[0]
    return msgspec.structs.replace(role, runs=((rows if role.name.endswith("up") else 0, rows),), stored=2 * rows)


class Mixers(Hybrid):
    """A decoder some of whose layers are recurrent (ModelConfig.mixers): its tensors and states. gated_attention: q's
    product has each head's queries, then the gates of what attention gives for it. joined_mlp: Hugging Face's files have gate and up of an MLP and
    of the shared expert in one tensor."""

    gated_attention: ClassVar[bool] = False
    joined_mlp: ClassVar[bool] = False

    @classmethod
    def layer_names(cls, config: ModelConfig, layer: int) -> Names:
        mixer = config.mixer(layer)
        own = OF_ATTENTION if mixer == "attention" else OF_MIXERS.get(mixer, frozenset())
        names = super().layer_names(config, layer)
        return {name: found for name, found in names.items() if name in own or name not in NOT_OF_ALL}

    @classmethod
    def layer_roles(cls, config: ModelConfig, layer: int) -> list[Role]:
        others = mixer_roles(config, config.mixer(layer))
        if cls.gated_attention and config.mixer(layer) == "attention":
            others["q"] = Role("q", (2 * config.num_heads * config.head_dim, config.hidden_size), "matrix")
        names = cls.layer_names(config, layer)
        names = {name: names[name] for name in names if name in others or name not in NOT_OF_ALL - OF_ATTENTION}
        roles = layer_roles(config, names, layer, cls.whole_qk_norm, others)
        return [_half(role) for role in roles] if cls.joined_mlp else roles

    @classmethod
    def state_parts(cls, config: ModelConfig, layer: int) -> StateParts:
        found = config.recurrent
        return () if found is None else found.parts(config.mixer(layer), config.hidden_size)

    def kind(self, i: int) -> Hashable:
        return self.config.mixer(i), super().kind(i)

    def rows(self, name: str, i: int) -> int:
        found = self.config.recurrent
        if found is not None and name.startswith("mix_"):
            heads = dict.fromkeys(("mix_b", "mix_a"), found.heads)
            return (heads | {"mix_qkv": found.channels("delta", self.config.hidden_size), "mix_z": found.inner})[name]
        return super().rows(name, i) * (2 if name == "q" and self.gated_attention else 1)

    @property
    def sizes(self) -> RecurrentConfig:
        """Of the recurrent layers."""
        assert self.config.recurrent is not None, "a configuration without recurrent layers"
        return self.config.recurrent

    def mamba(self, h: Value, i: int) -> Value:
        """Mamba-2 with its products: of the layer's normalized input, for the stream."""
        found = self.sizes
        channels, state = found.channels("ssm", self.config.hidden_size), found.key_size
        z, x, dt = self.parts(self.linear(h, "mix_in", i), found.inner, channels, found.heads)
        limits = (found.dt_min, found.dt_max or UNLIMITED) if found.dt_min or found.dt_max else None
        sizes: dict = dict(heads=found.heads, groups=found.groups, state_size=state, dt_limits=limits)
        y = self.scan(self.conv(x, "conv", i), dt, i, **sizes)
        return self.linear(
            self.gated_norm(y, z, "mix_norm", i, groups=found.norm_groups, gate_first=True), "mix_out", i
        )


# -- configurations


def hf_mixers(fields: Fields, kinds: dict[str, str], num_layers: int, default: list[str] | None = None):
    """ModelConfig.mixers of `layer_types`. kinds: what its names mean."""
    types = fields.get("layer_types", default)
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.fail("layer_types", f"is not a list of {num_layers} names")
    for name in types:
        if not isinstance(name, str) or name not in kinds:
            raise UnsupportedError(f"{fields.path}: layer type", str(name)[:60], sorted(kinds))
    return tuple(kinds[name] for name in types)


def every(interval: int, num_layers: int, names: tuple[str, str]) -> list[str]:
    """A name for each layer: the second for each `interval`th, the first for others."""
    return [names[(layer + 1) % interval == 0] for layer in range(num_layers)]


def gguf_kv_heads(fields: Fields, num_layers: int) -> tuple[tuple[int, ...], Fields]:
    """KV heads of each layer, 0 where there is no attention, and the fields with the one number of the others."""
    name = ".attention.head_count_kv"
    heads = fields.each_layer(name, num_layers, low=0)
    if len(set(heads) - {0}) != 1:
        raise fields.fail(name, "differs between layers with attention, or none has any")
    return heads, fields.changed(**{fields.key(name): max(heads)})


def hf_delta(fields: Fields, norm_eps: float) -> RecurrentConfig:
    """Of a config.json of Qwen3-Next's kind."""
    names = dict(heads="num_value_heads", groups="num_key_heads", key_size="key_head_dim", value_size="value_head_dim")
    sizes = {name: fields.integer(f"linear_{key}", high=MAX_WIDTH) for name, key in names.items()}
    return fields.build_recurrent(kernel=fields.integer("linear_conv_kernel_dim", 4), norm_eps=norm_eps, **sizes)


def hf_scan(fields: Fields, names: dict[str, str], norm_eps: float) -> RecurrentConfig:
    """Of Mamba-2 in a config.json. names: what that calls the fields of the record."""
    sizes: dict = {name: fields.integer(key, high=MAX_WIDTH) for name, key in names.items() if name != "conv_bias"}
    limits = fields.get("time_step_limit", [0.0, UNLIMITED])
    if not isinstance(limits, list) or len(limits) != 2 or not all(isinstance(each, (int, float)) for each in limits):
        raise fields.fail("time_step_limit", "is not two numbers")
    sizes |= dict(dt_min=float(limits[0]), dt_max=0.0 if limits[1] >= UNLIMITED else float(limits[1]))
    biased = fields.boolean(names["conv_bias"], True)
    return fields.build_recurrent(conv_bias=biased, norm_eps=norm_eps, norm_groups=sizes["groups"], **sizes)


def gguf_recurrent(fields: Fields, **values) -> RecurrentConfig:
    """Of GGUF metadata, which Gated DeltaNet and Mamba-2 have the same keys for. values: more of the record."""
    heads, inner = (fields.integer(f".ssm.{name}", high=MAX_WIDTH) for name in ("time_step_rank", "inner_size"))
    if inner % heads:
        raise fields.fail(".ssm.inner_size", f"{inner} is not a multiple of {heads} heads")
    return fields.build_recurrent(
        kernel=fields.integer(".ssm.conv_kernel"),
        heads=heads,
        groups=fields.integer(".ssm.group_count", high=MAX_WIDTH),
        key_size=fields.integer(".ssm.state_size", high=MAX_WIDTH),
        value_size=inner // heads,
        **values,
    )
