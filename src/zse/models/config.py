"""What a decoder-only transformer looks like: one frozen, validated record that every part of the engine reads.

Parsers live with each architecture (`llama.py`, `gemma3.py`, ...); this module holds the record (config_parts.py what
only some models have), the checked access to metadata of files (`Fields`), and the parsing that all architectures share.
"""

import msgspec

from zse.errors import FormatError, UnsupportedError
from zse.models.config_parts import (
    MAX_CONTEXT,
    MAX_WIDTH,
    WIDTH_MULTIPLE,
    DenseConfig,
    Eagle3Config,
    LatentConfig,
    MoeConfig,
    RecurrentConfig,
    RopeConfig,
    choice,
    number,
)

MAX_LAYERS = 4096
MAX_VOCAB = 1 << 23
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu", "relu2", "quick_gelu", "clamped")
POOLINGS = ("", "mean", "cls", "last", "max")
# What mixes the tokens of a layer: attention, a short convolution, Gated DeltaNet, Mamba-2; none: it only has an MLP.
MIXERS = ("attention", "conv", "delta", "ssm", "none")
MAX_DENSE = 8


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only transformer. Sizes in elements, context in tokens.

    sliding_layers: for each layer whether it sees only the last `sliding_window` tokens (its own included); such layers
    rotate by `local_rope` where that is set. nope_layers: for each layer whether nothing is rotated. query_scale
    multiplies q·k. embed_scale multiplies the embedding, logit_scale the logits. softcaps: cap * tanh(x / cap), 0 =
    off. A uniform factor r on what joins the residual stream is in embed_scale / r and norm_eps / r²: the stream is
    then x / r, which a norm does not see. Layers without a window have heads of global_head_dim and global_kv_heads of
    them where these are set; the last num_shared_kv layers read K and V of the last layer before them of their kind;
    values_are_keys: layers without a window have no v, k's product is normalized as such. intermediate_sizes: of each
    layer, where they differ; ple_width: columns of each layer's own embedding (Gemma 4), 0: none; layer_scale: each
    layer's output has a factor; sinks: attention has a score without a value for each head. latent: of multi-head
    latent attention, whose head_dim is that of queries and whose num_kv_heads is 1; None for keys and values of heads.
    mixers: what mixes the tokens of each layer, one of MIXERS; (): attention does in all of them. recurrent:
    the sizes of those that are neither attention nor none.
    eos_ids end a generation. bos_id: None where the model has none. follows: of a block of one layer that predicts behind a
    model (models/next_token.py, models/eagle3.py) how many layers the model has; 0: it is a model; eagle: what an EAGLE-3 head
    reads of it. Raises ValueError naming the field.

    causal: False of encoders, whose window is to both sides, own token included. Theirs are also: positions, rows of
    the table of learned positions (0: none), of which the first token's is position_first; token_types, rows of theirs;
    pooling, of the hidden states, as the model's files say ("": they do not); num_labels of a cross-encoder's
    classifier (0: none). dense: what a pooled state passes, of any model."""

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
    latent: LatentConfig | None = None
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
    moe: MoeConfig | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    global_head_dim: int = 0
    global_kv_heads: int = 0
    num_shared_kv: int = 0
    values_are_keys: bool = False
    intermediate_sizes: tuple[int, ...] = ()
    ple_width: int = 0
    layer_scale: bool = False
    causal: bool = True
    positions: int = 0
    position_first: int = 0
    token_types: int = 0
    pooling: str = ""
    num_labels: int = 0
    dense: tuple[DenseConfig, ...] = ()
    sinks: bool = False
    mixers: tuple[str, ...] = ()
    recurrent: RecurrentConfig | None = None
    follows: int = 0
    eagle: Eagle3Config | None = None

    def __post_init__(self):
        number("num_layers", self.num_layers, 1, MAX_LAYERS)
        number("vocab_size", self.vocab_size, 1, MAX_VOCAB)
        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
            number(name, getattr(self, name), 1, MAX_WIDTH)
        number("num_heads * head_dim", self.num_heads * self.head_dim, 1, MAX_WIDTH)
        for name, value in (
            ("hidden_size", self.hidden_size),
            ("num_heads * head_dim", self.num_heads * self.head_dim),
            *(("intermediate_size", size) for size in (self.intermediate_size, *self.intermediate_sizes)),
        ):
            if value % WIDTH_MULTIPLE:
                raise ValueError(f"{name}: {value} is not a multiple of {WIDTH_MULTIPLE}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads: {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim} is odd, RoPE turns pairs")
        if self.latent is not None and self.latent.nope + self.latent.rotary != self.head_dim:
            raise ValueError(
                f"head_dim: {self.head_dim} is not {self.latent.nope} + {self.latent.rotary} of the latent"
            )
        self._check_kinds()
        number("max_context", self.max_context, 1, MAX_CONTEXT)
        number("norm_eps", self.norm_eps, 0, 1)
        number("query_scale", self.query_scale, 1e-9, 1e9)
        number("embed_scale", self.embed_scale, 1e-9, 1e9)
        number("logit_scale", self.logit_scale, 1e-9, 1e9)
        number("attn_softcap", self.attn_softcap, 0, 1e9)
        number("logit_softcap", self.logit_softcap, 0, 1e9)
        number("sliding_window", self.sliding_window, 0, MAX_CONTEXT)
        choice("activation", self.activation, ACTIVATIONS)
        choice("pooling", self.pooling, POOLINGS)
        if self.positions and self.max_context > self.positions - self.position_first:
            raise ValueError(f"max_context: {self.max_context} tokens, but {self.positions} learned positions")
        if self.sliding_layers and len(self.sliding_layers) != self.num_layers:
            raise ValueError(f"sliding_layers: {len(self.sliding_layers)} entries for {self.num_layers} layers")
        if self.nope_layers and len(self.nope_layers) != self.num_layers:
            raise ValueError(f"nope_layers: {len(self.nope_layers)} entries for {self.num_layers} layers")
        self._check_mixers()
        if self.moe is not None and self.moe.dense_layers and len(self.moe.dense_layers) != self.num_layers:
            raise ValueError(f"dense_layers: {len(self.moe.dense_layers)} entries for {self.num_layers} layers")
        for rope, head_dim in ((self.rope, self.max_head_dim), (self.local_rope, self.head_dim)):
            dims = rope.dims(head_dim) if rope else 0
            if dims > head_dim or dims % 2:
                raise ValueError(f"rope rotary_dim: {dims} of {head_dim} dimensions cannot turn in pairs")
            for name in ("freq_factors", "short_factors", "long_factors") if rope else ():
                values = getattr(rope, name)
                if values and len(values) != dims // 2:
                    raise ValueError(f"rope {name}: {len(values)} values for {dims} dimensions that turn")
        number("dense modules", len(self.dense), 0, MAX_DENSE)
        widths = self.hidden_size, *(dense.outputs for dense in self.dense)
        for width, dense in zip(widths, self.dense, strict=False):
            if dense.inputs != width:
                raise ValueError(f"dense in_features: {dense.inputs}, what comes before gives {width} numbers")
        if any(self.sliding_layers) and not self.sliding_window:
            raise ValueError("sliding_window: missing, but there are sliding layers")
        for token in (*self.eos_ids, *(() if self.bos_id is None else (self.bos_id,))):
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"bos_id, eos_ids: token id {token} is outside the vocabulary of {self.vocab_size}")

    @property
    def embedding_size(self) -> int:
        """Numbers of a vector that is made of a text."""
        return self.dense[-1].outputs if self.dense else self.hidden_size

    @property
    def attended(self) -> tuple[int, int]:
        """Numbers of a key, and of a value, that attention multiplies for each query head, at most."""
        return (self.max_head_dim, self.max_head_dim) if self.latent is None else (self.latent.width, self.latent.rank)

    def _check_kinds(self) -> None:
        """Numbers in which layers may differ."""
        for name in ("global_head_dim", "global_kv_heads", "ple_width"):
            number(name, getattr(self, name), 0, MAX_WIDTH)
        number("num_shared_kv", self.num_shared_kv, 0, self.num_layers - 1)
        if self.global_head_dim % 2 or self.num_heads * self.global_head_dim % WIDTH_MULTIPLE:
            raise ValueError(f"global_head_dim: {self.num_heads} heads of {self.global_head_dim} dimensions do not fit")
        if self.global_kv_heads and self.num_heads % self.global_kv_heads:
            raise ValueError(f"global_kv_heads: {self.global_kv_heads} KV heads for {self.num_heads} heads")
        if self.ple_width % WIDTH_MULTIPLE:
            raise ValueError(f"ple_width: {self.ple_width} is not a multiple of {WIDTH_MULTIPLE}")
        if self.intermediate_sizes and len(self.intermediate_sizes) != self.num_layers:
            raise ValueError(f"intermediate_sizes: {len(self.intermediate_sizes)} entries for {self.num_layers} layers")
        for layer in range(self.num_layers - self.num_shared_kv, self.num_layers):
            if self.kv_layer(layer) == layer:
                raise ValueError(f"num_shared_kv: no layer before layer {layer} has K and V for it")

    def _check_mixers(self) -> None:
        if self.mixers and len(self.mixers) != self.num_layers:
            raise ValueError(f"mixers: {len(self.mixers)} entries for {self.num_layers} layers")
        for mixer in self.mixers:
            choice("mixers", mixer, MIXERS)
        if self.mixers and "attention" not in self.mixers:
            raise ValueError("mixers: no layer has attention")
        if self.recurrent is not None and self.recurrent.inner % WIDTH_MULTIPLE:
            raise ValueError(f"recurrent heads: {self.recurrent.inner} values are not a multiple of {WIDTH_MULTIPLE}")

    def mixer(self, layer: int) -> str:
        """What mixes the tokens of layer `layer`, one of MIXERS."""
        return self.mixers[layer] if self.mixers else "attention"

    @property
    def has_state(self) -> bool:
        """Whether a sequence has a state beside its keys and values (zse.cache.states)."""
        return any(mixer not in ("attention", "none") for mixer in self.mixers)

    def head_dim_of(self, layer: int) -> int:
        """Columns of a head of layer `layer`."""
        return self.head_dim if self.window(layer) else self.global_head_dim or self.head_dim

    @property
    def max_head_dim(self) -> int:
        """Columns of the largest head of any layer."""
        return max(self.head_dim, self.global_head_dim)

    def kv_heads_of(self, layer: int) -> int:
        """KV heads of layer `layer`."""
        return self.num_kv_heads if self.window(layer) else self.global_kv_heads or self.num_kv_heads

    def kv_layer(self, layer: int) -> int:
        """Whose K and V layer `layer` reads: its own, or those of the last layer of its kind that has some; -1: it has
        no attention."""
        if self.mixer(layer) != "attention":
            return -1
        if not self.causal:
            return 0  # an encoder's keys and values live within a layer
        last = self.num_layers - self.num_shared_kv
        if layer < last:
            return layer
        return next((i for i in reversed(range(last)) if self.window(i) == self.window(layer)), layer)

    def intermediate_of(self, layer: int) -> int:
        """Rows of gate and up of layer `layer`."""
        return self.intermediate_sizes[layer] if self.intermediate_sizes else self.intermediate_size

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


MISSING = object()


class Fields:
    """Checked access to the metadata of one file: GGUF keys or the entries of a config.json.

    Every getter raises FormatError(path, 0, key, reason) for a missing key without a default, a wrong type, or a number
    out of range. `prefix` is put before each key that starts with a dot ("llama" + ".block_count").
    """

    def __init__(self, path: object, values, prefix: str = ""):
        self.path, self.values, self.prefix = path, values, prefix

    def key(self, name: str) -> str:
        return self.prefix + name if name.startswith(".") else name

    def changed(self, **values) -> "Fields":
        """The same with other values; None: as if missing."""
        return Fields(self.path, {**self.values, **values}, self.prefix)

    def fail(self, name: str, reason: str) -> FormatError:
        return FormatError(self.path, 0, self.key(name), reason)

    def get(self, name: str, default=None):
        """The raw value; JSON null counts as missing."""
        value = self.values.get(self.key(name))
        return default if value is None else value

    def _required(self, name: str, default):
        value = self.get(name, default)
        if value is MISSING:
            raise self.fail(name, "is missing")
        return value

    def integer(self, name: str, default=MISSING, low: int = 1, high: int = MAX_CONTEXT) -> int:
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

    def per_layer(self, name: str, default=MISSING, high: int = MAX_CONTEXT) -> int:
        """A number that a file may give once or for each layer: layers that differ are not supported."""
        value = self.get(name)
        if isinstance(value, (list, tuple)) or (
            value is not None and hasattr(value, "__len__") and not isinstance(value, (str, bytes))
        ):
            values = list(value)
            if not all(type(each) is int for each in values):
                raise self.fail(name, f"{_short(values)} is not a list of whole numbers")
            distinct = set(values)
            if len(distinct) != 1:
                raise UnsupportedError(
                    f"{self.path}: {self.key(name)} that differs between layers",
                    _short(sorted(distinct)),
                    ["one value for all layers"],
                )
            return Fields(self.path, {self.key(name): distinct.pop()}).integer(self.key(name), high=high)
        return self.integer(name, default, high=high)

    def each_layer(self, name: str, layers: int, low: int = 1, high: int = MAX_WIDTH) -> tuple[int, ...]:
        """A number (or truth) of each of `layers` layers that a file may give once or as a list."""
        value = self._required(name, MISSING)
        values = list(value) if hasattr(value, "__len__") and not isinstance(value, (str, bytes)) else [value] * layers
        if len(values) != layers:
            raise self.fail(name, f"has {len(values)} entries for {layers} layers")
        key = self.key(name)
        return tuple(
            Fields(self.path, {key: int(each) if isinstance(each, bool) else each}).integer(key, low=low, high=high)
            for each in values
        )

    def number(self, name: str, default=MISSING, low: float = 0.0, high: float = 1e15) -> float:
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
            isinstance(v, bool) or not isinstance(v, (int, float)) or not -1e300 < v < 1e300 for v in value
        ):
            raise self.fail(name, "is not a list of numbers")
        return tuple(float(v) for v in value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, f"{_short(value)} is not true or false")
        return value

    def text(self, name: str, default=MISSING) -> str:
        value = self._required(name, default)
        if value is not default and not isinstance(value, str):
            raise self.fail(name, f"{_short(value)} is not text")
        return value

    def choice(self, name: str, table: dict, default=MISSING):
        """The table's entry for the value; an unknown value is named with what is supported."""
        value = self.text(name, default)
        if value not in table:
            raise UnsupportedError(f"{self.path}: {self.key(name)}", value, sorted(table))
        return table[value]

    def choice_of(self, name: str, table: dict, default: int):
        """The table's entry for a number, likewise."""
        value = self.integer(name, default, low=0)
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
        return self._built(ModelConfig, values)

    def build_rope(self, **values) -> RopeConfig:
        """RopeConfig(**values), likewise."""
        return self._built(RopeConfig, values)

    def build_recurrent(self, **values) -> RecurrentConfig:
        """RecurrentConfig(**values), likewise."""
        return self._built(RecurrentConfig, values)

    def build_moe(self, **values) -> MoeConfig:
        """MoeConfig(**values), likewise."""
        return self._built(MoeConfig, values)

    def _built(self, kind, values: dict):
        try:
            return kind(**values)
        except ValueError as error:
            field, _, reason = str(error).partition(": ")
            raise FormatError(self.path, 0, field, reason or "is refused") from None

    def change_rope(self, rope: RopeConfig, **changes) -> RopeConfig:
        """`rope` with other values, likewise."""
        return self.build_rope(**(msgspec.structs.asdict(rope) | changes))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
