"""Parts of a ModelConfig, frozen and validated: rotary position embedding, latents of attention, experts, recurrent
layers, dense modules; and the checks of numbers that records share."""

import math

import msgspec

from zse.tensor import GATINGS, MAX_EXPERT_GROUPS, MAX_EXPERTS

MAX_WIDTH = 1 << 20  # hidden size, intermediate size, heads * head_dim
MAX_CONTEXT = 1 << 30
WIDTH_MULTIPLE = 32  # weights are stored in blocks of 32 columns
MAX_KERNEL = 4  # tokens of a convolution, of its kernels
MAX_HEAD = 256  # numbers of a head's keys and values, of the kernels of recurrent layers
DENSE_ACTIVATIONS = ("identity", "tanh", "relu", "gelu", "silu", "sigmoid")
ROPE_SCALINGS = ("none", "linear", "dynamic", "llama3", "yarn", "longrope")


def number(name: str, value: float, low: float, high: float) -> None:
    if not (isinstance(value, (int, float)) and low <= value <= high):  # NaN fails both comparisons
        raise ValueError(f"{name}: {value!r} is outside {low}..{high}")


def choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: {value!r} is not one of {', '.join(choices)}")


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rotary position embedding (arXiv 2104.09864), rotate-half form.

    rotary_dim: how many dimensions of a head turn, from the first on; 0: all. scaling: none; linear (positions /
    factor); dynamic (NTK: theta grows with the context over original_context); llama3 (Llama 3.1 report: long
    wavelengths / factor, a smooth ramp between original_context / low_freq_factor and original_context /
    high_freq_factor); yarn (arXiv 2309.00071); longrope (arXiv 2402.13753: frequencies / long_factors for a context
    over original_context, else / short_factors). freq_factors: a divisor for each of the frequencies, from a file that
    carries them (1e30: does not turn); () for none. attention_factor: multiplies cos and sin; None: what the method
    says (1 except for yarn and longrope). temperature_beta, temperature_length: q is multiplied with 1 + beta * ln(1 +
    position // length) (Ministral 3)."""

    theta: float = 10000.0
    rotary_dim: int = 0
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    freq_factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    temperature_beta: float = 0.0
    temperature_length: int = 1

    def __post_init__(self):
        choice("rope scaling", self.scaling, ROPE_SCALINGS)
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            number("rope " + name, getattr(self, name), 1e-9, 1e15)
        number("rope rotary_dim", self.rotary_dim, 0, MAX_WIDTH)
        number("rope temperature_beta", self.temperature_beta, 0, 1e9)
        number("rope temperature_length", self.temperature_length, 1, MAX_CONTEXT)
        if self.scaling not in ("none", "linear"):
            # longrope divides by its logarithm.
            number("rope original_context", self.original_context, 1 + (self.scaling == "longrope"), MAX_CONTEXT)
        if self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("rope high_freq_factor: must be above low_freq_factor")
        if self.scaling == "yarn" and self.theta == 1:
            raise ValueError("rope theta: 1 cannot be scaled by yarn")
        if self.scaling == "longrope" and not (self.short_factors and self.long_factors):
            raise ValueError("rope long_factors: longrope needs long and short factors")
        for value in (*self.freq_factors, *self.short_factors, *self.long_factors):
            number("rope freq_factors", value, 1e-9, 1e31)

    def dims(self, head_dim: int) -> int:
        """How many dimensions of a head of `head_dim` turn."""
        return self.rotary_dim or head_dim

    def inv_freq(self, head_dim: int, context: int = 0) -> tuple[float, ...]:
        """The rotation speeds in radians per position, one for two dimensions that turn. context: the longest sequence
        in tokens that will be computed, which dynamic and longrope depend on; 0: no longer than the original."""
        dim = self.dims(head_dim)
        theta = self.theta
        if self.scaling == "dynamic" and dim > 2:
            stretch = self.factor * max(context, self.original_context) / self.original_context - (self.factor - 1)
            theta *= stretch ** (dim / (dim - 2))
        plain = [theta ** (-2.0 * i / dim) for i in range(dim // 2)]
        divisors = self.freq_factors
        if self.scaling == "linear":
            plain = [f / self.factor for f in plain]
        elif self.scaling == "llama3":
            plain = [self._llama3(f) for f in plain]
        elif self.scaling == "yarn":
            plain = self._yarn(plain, dim)
        elif self.scaling == "longrope":
            divisors = self.long_factors if context > self.original_context else self.short_factors
        if divisors:
            if len(divisors) != dim // 2:
                raise ValueError(f"rope freq_factors: {len(divisors)} values for {dim} dimensions that turn")
            plain = [f / divisor for f, divisor in zip(plain, divisors, strict=True)]
        return tuple(plain)

    def _llama3(self, freq: float) -> float:
        wavelength = 2 * math.pi / freq
        # How far between "long" (0) and "short" (1) this wavelength lies.
        ramp = (self.original_context / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        ramp = min(1.0, max(0.0, ramp))
        return freq * (ramp + (1 - ramp) / self.factor)

    def _yarn(self, plain: list[float], head_dim: int) -> list[float]:
        def dimension_of(rotations: float) -> float:
            """The (fractional) index whose frequency turns `rotations` times within the original context."""
            return head_dim * math.log(self.original_context / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dimension_of(self.beta_fast), dimension_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        span = high - low if high != low else 0.001
        out = []
        for i, freq in enumerate(plain):
            interpolate = min(1.0, max(0.0, (i - low) / span))
            out.append(freq * (1 - interpolate) + freq / self.factor * interpolate)
        return out

    @property
    def mscale(self) -> float:
        """What cos and sin are multiplied with."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.scaling == "yarn" and self.factor > 1:
            return 0.1 * math.log(self.factor) + 1.0
        if self.scaling == "longrope" and self.factor > 1:
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_context))
        return 1.0


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
    together. input_size: numbers that experts read and give where these are not hidden_size (Nemotron 3's latents).
    own: (first, number) of the experts that one rank of several has, where these have whole ones; (0, 0): all."""

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
    input_size: int = 0
    own: tuple[int, int] = (0, 0)

    def __post_init__(self):
        number("num_experts", self.num_experts, 1, MAX_EXPERTS)
        number("experts_per_token", self.experts_per_token, 1, self.num_experts)
        number("expert intermediate_size", self.intermediate_size, 1, MAX_WIDTH)
        number("shared_size", self.shared_size, 0, MAX_WIDTH)
        number("expert input_size", self.input_size, 0, MAX_WIDTH)
        for name in ("intermediate_size", "shared_size", "input_size"):
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

    @property
    def held(self) -> int:
        """Experts whose weights are here."""
        return self.own[1] or self.num_experts

    def is_sparse(self, layer: int) -> bool:
        """Whether layer `layer` has experts."""
        return not (self.dense_layers and self.dense_layers[layer])


class Eagle3Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an EAGLE-3 head (models/eagle3.py) reads of its model, and where it normalizes.

    layers: those of the model whose inputs it reads, the number of layers standing for what the last one gives; width: numbers
    of one of these. vocab: tokens that its own head knows; owns_embedding: it has an embedding of its own. norm_before_fc: what it reads is
    normalized; norm_before_residual: its layer adds to the normed state; norm_output: what it goes on from is normed."""

    layers: tuple[int, ...]
    width: int
    vocab: int
    owns_embedding: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    def __post_init__(self):
        number("eagle width", self.width, 1, MAX_WIDTH)
        number("eagle vocab", self.vocab, 1, 1 << 23)
        number("eagle layers", len(self.layers), 1, 16)
        if self.width % WIDTH_MULTIPLE:
            raise ValueError(f"eagle width: {self.width} is not a multiple of {WIDTH_MULTIPLE}")


class RecurrentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The layers of a hybrid model that are no attention; which they are, and of which kind, says ModelConfig.mixers.

    kernel: tokens that a convolution sees, a token's own included; conv_bias: it has a bias. Of Gated DeltaNet
    (arXiv 2412.06464) and Mamba-2 (arXiv 2405.21060) also: heads of values; groups of keys, each of which serves
    heads / groups of them; key_size: numbers of a key (of Mamba-2: the state's); value_size: of a head's values.
    tiled: head j belongs to group j % groups, not to j // (heads / groups). norm_eps: of the norm behind them;
    norm_groups: parts of all heads' numbers that it normalizes alone. dt_min, dt_max: limits of Mamba-2's time steps;
    dt_max 0: none. width: channels of a short convolution that one rank of several has; 0: hidden_size."""

    kernel: int
    conv_bias: bool = False
    heads: int = 0
    groups: int = 0
    key_size: int = 0
    value_size: int = 0
    tiled: bool = False
    norm_eps: float = 1e-6
    norm_groups: int = 1
    dt_min: float = 0.0
    dt_max: float = 0.0
    width: int = 0

    def __post_init__(self):
        number("recurrent kernel", self.kernel, 2, MAX_KERNEL)
        for name in ("heads", "groups", "key_size", "value_size"):
            number(f"recurrent {name}", getattr(self, name), 1 if self.heads else 0, MAX_WIDTH)
        number("recurrent norm_eps", self.norm_eps, 0, 1)
        number("recurrent norm_groups", self.norm_groups, 1, MAX_WIDTH)
        number("recurrent dt_min", self.dt_min, 0, 1e9)
        number("recurrent dt_max", self.dt_max, 0, 1e9)
        for name, unit in (("key_size", 16), ("value_size", WIDTH_MULTIPLE)):
            size = getattr(self, name)
            if size > MAX_HEAD or size % unit:
                raise ValueError(f"recurrent {name}: {size} is no multiple of {unit} up to {MAX_HEAD}")
        if self.heads % (self.groups or 1) or self.inner % self.norm_groups:
            parts = f"{self.groups} groups of keys and {self.norm_groups} of the norm"
            raise ValueError(f"recurrent heads: {self.heads} of {self.value_size} numbers, {parts}")

    @property
    def inner(self) -> int:
        """Values of all heads."""
        return self.heads * self.value_size

    def channels(self, mixer: str, hidden_size: int) -> int:
        """What the convolution of a layer of that kind sees of a token."""
        return (self.width or hidden_size) if mixer == "conv" else self.inner + 2 * self.groups * self.key_size

    def parts(self, mixer: str, hidden_size: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """What a sequence carries through a layer of that kind, one of ModelConfig's MIXERS: the last inputs of the
        convolution, oldest first, and the matrix of each head."""
        if mixer in ("attention", "none"):
            return ()
        tail = ("conv", (self.kernel - 1, self.channels(mixer, hidden_size)))
        return (tail,) if mixer == "conv" else (tail, (mixer, (self.heads, self.key_size, self.value_size)))
