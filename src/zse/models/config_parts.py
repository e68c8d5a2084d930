"""Parts of a ModelConfig that only some models have: latents of attention, experts, dense modules behind the pooling."""

import msgspec

from zse.models.rope import MAX_CONTEXT, MAX_WIDTH, choice, number
from zse.tensor import GATINGS, MAX_EXPERT_GROUPS, MAX_EXPERTS

WIDTH_MULTIPLE = 32  # weights are stored in blocks of 32 columns
DENSE_ACTIVATIONS = ("identity", "tanh", "relu", "gelu", "silu", "sigmoid")


class LatentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads are made of a latent of
    a token and of one key that turns, which all heads share.

    rank: numbers of a latent; rotary: of the key that turns. nope: numbers of a head's key that are made of the latent,
    and of its query that meet them; value: of a head's values. query_rank: of the latent that queries are made of; 0:
    of none. pairs: neighbours (2i, 2i + 1) turn together, not halves. norm_eps: of the norms of both latents.
    temperature_beta, temperature_length: scores are multiplied with 1 + beta * ln(1 + position // length) of the query.
    """

    rank: int
    rotary: int
    nope: int
    value: int
    query_rank: int = 0
    pairs: bool = False
    norm_eps: float = 1e-6
    temperature_beta: float = 0.0
    temperature_length: int = 1

    def __post_init__(self):
        number("latent temperature_beta", self.temperature_beta, 0, 1e9)
        number("latent temperature_length", self.temperature_length, 1, MAX_CONTEXT)
        number("latent norm_eps", self.norm_eps, 0, 1)
        for name in ("rank", "rotary", "nope", "value"):
            number(f"latent {name}", getattr(self, name), 1, MAX_WIDTH)
        number("latent query_rank", self.query_rank, 0, MAX_WIDTH)

    @property
    def width(self) -> int:
        """Numbers that are kept of a token."""
        return self.rank + self.rotary


class DenseConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Dense module of sentence-transformers behind the pooling: act(weight @ x + bias)."""

    inputs: int
    outputs: int
    bias: bool = True
    activation: str = "identity"

    def __post_init__(self):
        number("dense in_features", self.inputs, 1, MAX_WIDTH)
        number("dense out_features", self.outputs, 1, MAX_WIDTH)
        choice("dense activation", self.activation, DENSE_ACTIVATIONS)


class MoeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mixture of experts in the place of the MLP (zse.kernels.route says what is chosen).

    intermediate_size: of an expert. gating: one of zse.tensor.GATINGS. normalize: weights are divided by their sum +
    normalize_eps. scale multiplies them. selection_bias: experts are chosen by probability + bias. groups_used of
    `groups` groups of experts are chosen from, by the sum of the group_best best scores. shared_size: inner width of
    the expert that computes every token, 0: there is none; shared_gate: it is weighted, too. dense_layers: for each
    layer whether it has an MLP instead; (): none has. sum_bias: a vector is added to what a layer's experts give
    together."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    gating: str = "softmax"
    normalize: bool = True
    normalize_eps: float = 0.0
    scale: float = 1.0
    selection_bias: bool = False
    groups: int = 1
    groups_used: int = 1
    group_best: int = 2
    shared_size: int = 0
    shared_gate: bool = False
    dense_layers: tuple[bool, ...] = ()
    sum_bias: bool = False

    def __post_init__(self):
        number("num_experts", self.num_experts, 1, MAX_EXPERTS)
        number("experts_per_token", self.experts_per_token, 1, self.num_experts)
        number("expert intermediate_size", self.intermediate_size, 1, MAX_WIDTH)
        number("shared_size", self.shared_size, 0, MAX_WIDTH)
        for name in ("intermediate_size", "shared_size"):
            if getattr(self, name) % WIDTH_MULTIPLE:
                raise ValueError(f"expert {name}: {getattr(self, name)} is not a multiple of {WIDTH_MULTIPLE}")
        choice("expert gating", self.gating, GATINGS)
        number("expert scale", self.scale, 1e-9, 1e9)
        number("normalize_eps", self.normalize_eps, 0, 1)
        number("expert groups", self.groups, 1, MAX_EXPERT_GROUPS)
        number("expert groups_used", self.groups_used, 1, self.groups)
        number("expert group_best", self.group_best, 1, 2)
        if self.num_experts % self.groups:
            raise ValueError(f"expert groups: {self.groups} do not divide {self.num_experts} experts")
        if self.num_experts // self.groups * self.groups_used < self.experts_per_token:
            raise ValueError(f"expert groups_used: {self.groups_used} have fewer than {self.experts_per_token} experts")

    def is_sparse(self, layer: int) -> bool:
        """Whether layer `layer` has experts."""
        return not (self.dense_layers and self.dense_layers[layer])
