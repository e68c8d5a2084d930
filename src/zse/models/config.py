"""What a decoder-only transformer looks like: one frozen, validated record that every part of the engine reads.

Parsers live with each architecture (`llama.py`, `gemma3.py`, ...); this module holds the record, the checked access to
metadata of files (`Fields`), and the parsing that all architectures share.
"""

import math

import msgspec

from zse.errors import FormatError, UnsupportedError

MAX_LAYERS = 4096
MAX_WIDTH = 1 << 20  # hidden size, intermediate size, heads * head_dim
MAX_VOCAB = 1 << 23
MAX_CONTEXT = 1 << 30
WIDTH_MULTIPLE = 32  # weights are stored in blocks of 32 columns
ACTIVATIONS = ("silu", "gelu_tanh")
ROPE_SCALINGS = ("none", "linear", "dynamic", "llama3", "yarn", "longrope")


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rotary position embedding (arXiv 2104.09864), rotate-half form.

    rotary_dim: how many dimensions of a head turn, from the first on; 0: all.
    scaling: none; linear (positions / factor); dynamic (NTK: theta grows with the context over original_context);
    llama3 (Llama 3.1 report: long wavelengths / factor, a smooth ramp between original_context / low_freq_factor and
    original_context / high_freq_factor); yarn (arXiv 2309.00071); longrope (arXiv 2402.13753: frequencies / long_factors
    for a context over original_context, else / short_factors).
    freq_factors: a divisor for each of the frequencies, from a file that carries them; () for none.
    attention_factor: multiplies cos and sin; None: what the method says (1 except for yarn and longrope).
    temperature_beta, temperature_length: q is multiplied with 1 + beta * ln(1 + position // length) (Ministral 3).
    """

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
        _choice("rope scaling", self.scaling, ROPE_SCALINGS)
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            _number("rope " + name, getattr(self, name), 1e-9, 1e15)
        _number("rope rotary_dim", self.rotary_dim, 0, MAX_WIDTH)
        _number("rope temperature_beta", self.temperature_beta, 0, 1e9)
        _number("rope temperature_length", self.temperature_length, 1, MAX_CONTEXT)
        if self.scaling not in ("none", "linear"):
            _number("rope original_context", self.original_context, 1, MAX_CONTEXT)
        if self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("rope high_freq_factor: must be above low_freq_factor")
        if self.scaling == "yarn" and self.theta == 1:
            raise ValueError("rope theta: 1 cannot be scaled by yarn")
        if self.scaling == "longrope" and not (self.short_factors and self.long_factors):
            raise ValueError("rope long_factors: longrope needs long and short factors")
        for value in (*self.freq_factors, *self.short_factors, *self.long_factors):
            _number("rope freq_factors", value, 1e-9, 1e15)

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


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only transformer. Sizes in elements, context in tokens.

    sliding_layers: for each layer whether it sees only the last `sliding_window` tokens (its own included); such layers
    rotate by `local_rope` where that is set. nope_layers: for each layer whether nothing is rotated. query_scale multiplies
    q·k. embed_scale multiplies the embedding, logit_scale the logits. softcaps: cap * tanh(x / cap), 0 = off. A uniform
    factor r on what joins the residual stream is in embed_scale / r and norm_eps / r²: the stream is then x / r, which a
    norm does not see. eos_ids end a generation. bos_id: None where the model has none. Raises ValueError naming the field.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    max_context: int
    rope: RopeConfig
    query_scale: float
    local_rope: RopeConfig | None = None
    sliding_window: int = 0
    sliding_layers: tuple[bool, ...] = ()
    nope_layers: tuple[bool, ...] = ()
    activation: str = "silu"
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    post_norms: bool = False
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    attn_softcap: float = 0.0
    logit_softcap: float = 0.0
    tied_head: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self):
        _number("num_layers", self.num_layers, 1, MAX_LAYERS)
        _number("vocab_size", self.vocab_size, 1, MAX_VOCAB)
        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
            _number(name, getattr(self, name), 1, MAX_WIDTH)
        _number("num_heads * head_dim", self.num_heads * self.head_dim, 1, MAX_WIDTH)
        for name, value in (
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_heads * head_dim", self.num_heads * self.head_dim),
        ):
            if value % WIDTH_MULTIPLE:
                raise ValueError(f"{name}: {value} is not a multiple of {WIDTH_MULTIPLE}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads: {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim} is odd, RoPE turns pairs")
        _number("max_context", self.max_context, 1, MAX_CONTEXT)
        _number("norm_eps", self.norm_eps, 0, 1)
        _number("query_scale", self.query_scale, 1e-9, 1e9)
        _number("embed_scale", self.embed_scale, 1e-9, 1e9)
        _number("logit_scale", self.logit_scale, 1e-9, 1e9)
        _number("attn_softcap", self.attn_softcap, 0, 1e9)
        _number("logit_softcap", self.logit_softcap, 0, 1e9)
        _number("sliding_window", self.sliding_window, 0, MAX_CONTEXT)
        _choice("activation", self.activation, ACTIVATIONS)
        if self.sliding_layers and len(self.sliding_layers) != self.num_layers:
            raise ValueError(f"sliding_layers: {len(self.sliding_layers)} entries for {self.num_layers} layers")
        if self.nope_layers and len(self.nope_layers) != self.num_layers:
            raise ValueError(f"nope_layers: {len(self.nope_layers)} entries for {self.num_layers} layers")
        for rope in (self.rope, self.local_rope):
            dims = rope.dims(self.head_dim) if rope else 0
            if dims > self.head_dim or dims % 2:
                raise ValueError(f"rope rotary_dim: {dims} of {self.head_dim} dimensions cannot turn in pairs")
            for name in ("freq_factors", "short_factors", "long_factors") if rope else ():
                values = getattr(rope, name)
                if values and len(values) != dims // 2:
                    raise ValueError(f"rope {name}: {len(values)} values for {dims} dimensions that turn")
        if any(self.sliding_layers) and not self.sliding_window:
            raise ValueError("sliding_window: missing, but there are sliding layers")
        for token in (*self.eos_ids, *(() if self.bos_id is None else (self.bos_id,))):
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"bos_id, eos_ids: token id {token} is outside the vocabulary of {self.vocab_size}")

    def window(self, layer: int) -> int:
        """How many last tokens layer `layer` sees, its own included; 0: all."""
        return self.sliding_window if self.sliding_layers and self.sliding_layers[layer] else 0

    def rope_of(self, layer: int) -> RopeConfig | None:
        """What layer `layer` rotates by; None: nothing is rotated."""
        if self.nope_layers and self.nope_layers[layer]:
            return None
        return self.local_rope if self.uses_local_rope(layer) else self.rope

    def uses_local_rope(self, layer: int) -> bool:
        """Whether layer `layer` rotates by `local_rope`."""
        return self.local_rope is not None and bool(self.sliding_layers) and self.sliding_layers[layer]

    def to_json(self) -> bytes:
        """The record as JSON, for the config section of a `.zse` file."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes, path: object = "config") -> "ModelConfig":
        """The inverse of to_json, validated. Raises FormatError."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise FormatError(path, 0, "config", str(error)) from None


def _number(name: str, value: float, low: float, high: float) -> None:
    if not (isinstance(value, (int, float)) and low <= value <= high):  # NaN fails both comparisons
        raise ValueError(f"{name}: {value!r} is outside {low}..{high}")


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: {value!r} is not one of {', '.join(choices)}")


_MISSING = object()


class Fields:
    """Checked access to the metadata of one file: GGUF keys or the entries of a config.json.

    Every getter raises FormatError(path, 0, key, reason) for a missing key without a default, a wrong type, or a number
    out of range. `prefix` is put before each key that starts with a dot ("llama" + ".block_count").
    """

    def __init__(self, path: object, values, prefix: str = ""):
        self.path, self.values, self.prefix = path, values, prefix

    def key(self, name: str) -> str:
        return self.prefix + name if name.startswith(".") else name

    def fail(self, name: str, reason: str) -> FormatError:
        return FormatError(self.path, 0, self.key(name), reason)

    def get(self, name: str, default=None):
        """The raw value; JSON null counts as missing."""
        value = self.values.get(self.key(name))
        return default if value is None else value

    def _required(self, name: str, default):
        value = self.get(name, default)
        if value is _MISSING:
            raise self.fail(name, "is missing")
        return value

    def integer(self, name: str, default=_MISSING, low: int = 1, high: int = MAX_CONTEXT) -> int:
        value = self._required(name, default)
        if value is default:
            return value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(name, f"{_short(value)} is not a whole number")
        if not low <= value <= high:
            raise self.fail(name, f"{value} is outside {low}..{high}")
        return value

    def per_layer(self, name: str, default=_MISSING, high: int = MAX_CONTEXT) -> int:
        """A number that a file may give once or for each layer: layers that differ are not supported."""
        value = self.get(name)
        if isinstance(value, (list, tuple)) or (
            value is not None and hasattr(value, "__len__") and not isinstance(value, (str, bytes))
        ):
            distinct = set(value)
            if len(distinct) != 1:
                raise UnsupportedError(
                    f"{self.path}: {self.key(name)} that differs between layers",
                    _short(sorted(distinct)),
                    ["one value for all layers"],
                )
            return Fields(self.path, {self.key(name): distinct.pop()}).integer(self.key(name), high=high)
        return self.integer(name, default, high=high)

    def number(self, name: str, default=_MISSING, low: float = 0.0, high: float = 1e15) -> float:
        value = self._required(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(name, f"{_short(value)} is not a number")
        if not low <= value <= high:
            raise self.fail(name, f"{value} is outside {low}..{high}")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of numbers; () when missing."""
        value = self.get(name, ())
        if not isinstance(value, (list, tuple)) or any(
            isinstance(v, bool) or not isinstance(v, (int, float)) for v in value
        ):
            raise self.fail(name, "is not a list of numbers")
        return tuple(float(v) for v in value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, f"{_short(value)} is not true or false")
        return value

    def text(self, name: str, default=_MISSING) -> str:
        value = self._required(name, default)
        if value is not default and not isinstance(value, str):
            raise self.fail(name, f"{_short(value)} is not text")
        return value

    def choice(self, name: str, table: dict, default=_MISSING):
        """The table's entry for the value; an unknown value is named with what is supported."""
        value = self.text(name, default)
        if value not in table:
            raise UnsupportedError(f"{self.path}: {self.key(name)}", value, sorted(table))
        return table[value]

    def section(self, name: str) -> "Fields | None":
        """A nested object, or None when it is missing."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(name, f"{_short(value)} is not an object")
        return Fields(f"{self.path}: {name}", value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; () when missing."""
        value = self.get(name)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        for item in values:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < MAX_VOCAB:
                raise self.fail(name, f"{_short(item)} is not a token id")
        return tuple(values)

    def build(self, **values) -> ModelConfig:
        """ModelConfig(**values), a refused value becomes a FormatError of this file."""
        try:
            return ModelConfig(**values)
        except ValueError as error:
            field, _, reason = str(error).partition(": ")
            raise FormatError(self.path, 0, field, reason or "is refused") from None

    def build_rope(self, **values) -> RopeConfig:
        """RopeConfig(**values), likewise."""
        try:
            return RopeConfig(**values)
        except ValueError as error:
            field, _, reason = str(error).partition(": ")
            raise FormatError(self.path, 0, field, reason or "is refused") from None

    def change_rope(self, rope: RopeConfig, **changes) -> RopeConfig:
        """`rope` with other values, likewise."""
        return self.build_rope(**(msgspec.structs.asdict(rope) | changes))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
