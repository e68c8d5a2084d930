"""Rotary position embedding of a model: one frozen, validated record, and the checks of numbers that records share."""

import math

import msgspec

MAX_WIDTH = 1 << 20  # hidden size, intermediate size, heads * head_dim
MAX_CONTEXT = 1 << 30
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
