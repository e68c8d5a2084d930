"""Encoders: every token sees the whole of its sequence, or a window on both sides, and what is wanted are vectors. A
family is a class as a decoder's is (decoder.py), with a beginning that adds embeddings and normalizes them, and no
head: what pools the hidden states, and a cross-encoder's classifier, run on the host in float64 (engine/pooling.py).

A sequence runs whole, in one step: its keys and values live within a layer, so all layers share one place for them.
"""

from collections.abc import Container, Iterator
from math import prod
from typing import Any, ClassVar

from zse.errors import FormatError, UnsupportedError
from zse.models.config import MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, Fields, ModelConfig
from zse.models.decoder import Decoder
from zse.models.names import MIXTURE, Names, Role, mixture_role
from zse.plan.trace import Value

ALL = 1 << 20  # keys ahead of a token without a window: more than a sequence has
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
}
# `pooling_type` of GGUF metadata; 1_Pooling/config.json has a key for each.
GGUF_POOLING = {0: "", 1: "mean", 2: "cls", 3: "last", 4: "cls"}
LABELS = "ForSequenceClassification"
HEAD: Names = {
    "cls_dense": ("cls.weight", "classifier.dense.weight"),
    "cls_dense_bias": ("cls.bias", "classifier.dense.bias"),
    "cls_out": ("cls.output.weight", "classifier.out_proj.weight"),
    "cls_out_bias": ("cls.output.bias", "classifier.out_proj.bias"),
}


class Encoder(Decoder):
    """names: a layer's roles, biases among them, in execution order. model_names: of roles outside of layers.
    head_names: of a classifier, under no prefix. prefixes: what may stand before a Hugging Face file's names. layers:
    what stands before a layer's number there. head_activation: of the classifier's dense layer; head_norm: whether
    LayerNorm follows it."""

    names: ClassVar[Names] = {}
    model_names: ClassVar[Names] = {}
    head_names: ClassVar[Names] = HEAD
    prefixes: ClassVar[tuple[str, ...]] = ("",)
    layers: ClassVar[str] = "encoder.layer."
    norm_kind: ClassVar[str] = "layer"
    norms_on_host: ClassVar[bool] = False
    head_activation: ClassVar[str] = "tanh"

    # -- the files

    @classmethod
    def roles(cls, config: ModelConfig) -> Iterator[Role]:
        hidden, inner = config.hidden_size, config.intermediate_size
        tables = {"embed": config.vocab_size, "positions": config.positions, "types": config.token_types}
        for name in cls.model_names:
            if name not in tables:
                yield Role(name, (hidden,), "bias" if name.endswith("_bias") else "norm")
            elif tables[name]:
                yield Role(name, (tables[name], hidden), "matrix" if name == "embed" else "table")
        rows = {"qkv": 3 * hidden, "up": inner, "gate": inner, "gate_up": 2 * inner}
        for layer in range(config.num_layers):
            for name in cls.names:
                part = name.removesuffix("_bias")
                if not cls.has(config, layer, part):
                    continue
                if name in MIXTURE:
                    for role in mixture_role(name, config):
                        yield Role(f"layers.{layer}.{name}", role.shape, role.kind, experts=role.experts)
                    continue
                if name == "sum_bias":
                    yield Role(f"layers.{layer}.{name}", (1, hidden), "table")
                    continue
                is_norm, size = part.endswith("_norm"), rows.get(part, hidden)
                if name != part or is_norm:
                    yield Role(f"layers.{layer}.{name}", (size,), "bias" if name != part else "norm")
                else:
                    columns = inner if part == "down" else hidden
                    yield Role(f"layers.{layer}.{name}", (size, columns), "matrix")
        shapes: dict[str, tuple[int, ...]] = {"cls_dense": (hidden, hidden), "cls_out": (config.num_labels, hidden)}
        for name in cls.head_names if config.num_labels else ():
            part = name.removesuffix("_bias")
            shape = shapes.get(part, (hidden,))
            yield Role(name, shape[:1] if name != part else shape, "flat")

    @classmethod
    def has(cls, config: ModelConfig, layer: int, name: str) -> bool:
        """Whether a layer has this weight, of those in `names`."""
        return True

    @classmethod
    def gguf_name(cls, role: str) -> str:
        if role.startswith("layers."):
            _, layer, name = role.split(".")
            return "|".join(f"blk.{layer}.{way}" for way in cls.names[name][0].split("|"))
        return (cls.model_names | cls.head_names)[role][0]

    @classmethod
    def hf_name(cls, role: str, prefix: str = "") -> str:
        if role.startswith("layers."):
            _, layer, name = role.split(".")
            return "|".join(f"{prefix}{cls.layers}{layer}.{way}" for way in cls.names[name][1].split("|"))
        if role in cls.model_names:
            return prefix + cls.model_names[role][1]
        name = cls.head_names[role][1]
        return prefix + name if name.startswith("pooler.") else name

    @classmethod
    def hf_prefix(cls, path: object, names: Container[str]) -> str:
        embedding = cls.model_names["embed"][1]
        for prefix in cls.prefixes:
            if prefix + embedding in names:
                return prefix
        raise FormatError(path, 0, embedding, "the tensor is missing")

    # -- the forward

    def finish(self, x: Value) -> Value:
        """The hidden states that are pooled; what the last layer gave where nothing follows."""
        return x

    def begin(self) -> Value:
        x = self.embed()
        for name in ("positions", "types"):
            if name in self.trace.shapes:
                x = self.add_rows(x, name)
        return self.normalize(x, "embed_norm")

    def add_rows(self, x: Value, name: str) -> Value:
        """x + rows of a table: of "positions" those of the tokens' positions, of "types" those of their types, of a
        table of one row that row (an id past a table's end is its last row's)."""
        first = self.config.position_first if name == "positions" else 0
        ids = name if name in ("positions", "types") else "tokens"
        return self.trace.add("embed", (x,), x.width, {"weight": name}, is_stream=True, scale=1.0, ids=ids, first=first)

    def normalize(self, x: Value, name: str) -> Value:
        """The stream itself becomes LayerNorm of it: what follows adds to that."""
        weights = {"weight": name} | ({"bias": f"{name}_bias"} if f"{name}_bias" in self.trace.shapes else {})
        options: dict[str, Any] = dict(eps=self.config.norm_eps, kind="layer", in_place=True)
        return self.trace.add("norm", (x,), x.width, weights, is_stream=True, **options)

    def qkv(self, x: Value, i: int, *, qk_norm: bool = False) -> tuple[Value, Value, Value]:
        q, k, v = (self.linear(x, name, i) for name in "qkv")
        return self.rotate(q, i, "q"), self.rotate(k, i, "k"), v

    def attention(self, q: Value, k: Value | None, v: Value | None, i: int) -> Value:
        """Of all of a sequence, or of `window` - 1 tokens on both sides."""
        assert k is not None and v is not None
        window = self.config.window(i)
        options: dict[str, Any] = dict(window=window, softcap=self.config.attn_softcap, scale=self.config.query_scale)
        options["ahead"] = window - 1 if window else ALL
        return self.trace.add("attend", (q, k, v), q.width, **options)


def _labels(fields: Fields) -> int:
    """Of a cross-encoder; 0: what is wanted are embeddings."""
    names = fields.get("architectures")
    if not isinstance(names, list) or not str(names[0]).endswith(LABELS):
        return 0
    labels = fields.get("id2label")
    return len(labels) if isinstance(labels, dict) and labels else fields.integer("num_labels", 2, high=1 << 16)


def hf_encoder(fields: Fields, **names: str) -> dict:
    """ModelConfig fields of an encoder's config.json. names: ours → theirs, where they differ from BERT's."""
    key = {
        "hidden": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "inner": "intermediate_size",
        "eps": "layer_norm_eps",
        "activation": "hidden_act",
        "context": "max_position_embeddings",
    } | names
    hidden, heads = fields.integer(key["hidden"], high=MAX_WIDTH), fields.integer(key["heads"], high=MAX_WIDTH)
    if hidden % heads:
        raise fields.fail(key["heads"], f"{heads} does not divide {key['hidden']} {hidden}")
    activation = fields.choice(key["activation"], ACTIVATIONS, "gelu")
    return dict(
        causal=False,
        vocab_size=fields.integer("vocab_size", high=MAX_VOCAB),
        hidden_size=hidden,
        num_layers=fields.integer(key["layers"], high=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=fields.integer(key["inner"], high=MAX_WIDTH),
        norm_eps=fields.number(key["eps"], 1e-12, high=1.0),
        max_context=fields.integer(key["context"]),
        query_scale=(hidden // heads) ** -0.5,
        activation=activation,
        tied_head=True,
        token_types=fields.integer("type_vocab_size", 0, low=0, high=MAX_WIDTH),
        num_labels=_labels(fields),
    )


def gguf_encoder(fields: Fields, tensors) -> dict:
    """ModelConfig fields of an encoder's GGUF metadata."""
    hidden, heads = fields.integer(".embedding_length", high=MAX_WIDTH), fields.per_layer(".attention.head_count")
    if hidden % heads:
        raise fields.fail(".attention.head_count", f"{heads} does not divide the embedding length {hidden}")
    shapes = {
        name: tuple(tensors.get(name, ())) for name in ("token_embd.weight", "token_types.weight", "cls.output.weight")
    }
    if not shapes["token_embd.weight"]:
        raise fields.fail("token_embd.weight", "the tensor is missing")
    has_head = "cls.weight" in tensors or "cls.output.weight" in tensors
    if has_head and not ("cls.weight" in tensors and "cls.output.weight" in tensors):
        raise UnsupportedError(
            f"{fields.path}: classifier", "one of cls and cls.output", ["cls.weight and cls.output.weight"]
        )

    return dict(
        causal=False,
        vocab_size=prod(shapes["token_embd.weight"]) // hidden,
        hidden_size=hidden,
        num_layers=fields.integer(".block_count", high=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=fields.per_layer(".feed_forward_length", high=MAX_WIDTH),
        norm_eps=fields.number(".attention.layer_norm_epsilon", 1e-12, high=1.0),
        max_context=fields.integer(".context_length"),
        query_scale=(hidden // heads) ** -0.5,
        activation="gelu",
        tied_head=True,
        token_types=prod(shapes["token_types.weight"]) // hidden if shapes["token_types.weight"] else 0,
        pooling=fields.choice_of(".pooling_type", GGUF_POOLING, 0),
        num_labels=prod(shapes["cls.output.weight"]) // hidden if has_head else 0,
    )
