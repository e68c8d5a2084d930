"""EAGLE-3 heads (arXiv 2503.01840), whose predictions are drafts: a folder made for one model, in the format of EAGLE's authors, which
SpecForge, AngelSlim and NVIDIA use (`midlayer.*`), or of vLLM's speculators (`layers.0.*`).

A head is a decoder of one layer over states of the model between three of its layers. Its stream begins as fc · [the three states], its
attention reads [norm of the embedding of the token behind, norm of the stream], and its own stream is the state behind a draft. Its
logits are of `draft_vocab_size` tokens: number i of them is the model's i + d2t[i]."""

from array import array
from collections.abc import Container, Iterator, Sequence
from typing import Any

import msgspec

from zse.errors import ConfigError, FormatError, UnsupportedError
from zse.formats.source import ModelSource
from zse.models.common import hf_values
from zse.models.config import MAX_VOCAB, Fields, ModelConfig
from zse.models.config_parts import MAX_WIDTH, Eagle3Config
from zse.models.decoder import Decoder
from zse.models.names import ATTENTION, ATTN_NORM, MLP, MLP_NORM, Role
from zse.models.registry import EAGLE3_NAMES, is_head
from zse.models.weight_plan import ModelPlan, plan_model
from zse.plan.place import new_tensor
from zse.plan.trace import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.models.load import Model

NAMES = {
    "embed": "embed_tokens.weight",
    "fc": "fc.weight",
    "input_norm": "input_norm.weight",
    "hidden_norm": "hidden_norm.weight",
    "final_norm": "norm.weight",
    "head": "lm_head.weight",
}
LAYERS = ("midlayer.", "layers.0.")
PREFIXES = ("", "model.")
D2T, T2D = "d2t", "t2d"
IDS = "draft_ids"  # of the model's tokens, among the head's vectors


class Eagle3(Decoder):
    names = ATTN_NORM | {"hidden_norm": ("", "hidden_norm.weight")} | ATTENTION | MLP_NORM | MLP

    @classmethod
    def roles(cls, config: ModelConfig) -> Iterator[Role]:
        eagle, hidden = _eagle(config), config.hidden_size
        if eagle.owns_embedding:
            yield Role("embed", (config.vocab_size, hidden), "matrix")
        read = len(eagle.layers) * eagle.width
        if eagle.norm_before_fc:
            yield Role("input_norm", (read,), "norm")
        yield Role("fc", (hidden, read), "matrix")
        for role in cls.layer_roles(config, 0):
            shape = (role.shape[0], 2 * hidden) if role.name in ("q", "k", "v") else role.shape
            # Where the stream itself is normed it begins so.
            at = "" if role.name == "hidden_norm" and eagle.norm_before_residual else "layers.0."
            yield msgspec.structs.replace(role, name=at + role.name, shape=shape)
        yield Role("final_norm", (hidden,), "norm")
        yield Role("head", (eagle.vocab, hidden), "matrix")

    @classmethod
    def file_name(cls, config: ModelConfig, role: str, naming: str, prefix: str) -> str:
        if role.startswith("layers.") or role == "hidden_norm":
            name = cls.names[role.rpartition(".")[2]][1]
            return "|".join(prefix + layer + name for prefix in PREFIXES for layer in LAYERS)
        return "|".join(prefix + NAMES[role] for prefix in PREFIXES)

    @classmethod
    def hf_prefix(cls, path: object, names: Container[str]) -> str:
        return ""  # file_name() has them all

    def begin(self) -> Value:
        eagle = _eagle(self.config)
        x = self._join(self.taken(width=len(eagle.layers) * eagle.width), norms=["input_norm" * eagle.norm_before_fc])
        width, weights = self.config.hidden_size, {"weight": "fc"}
        return self._residual(self.trace.add("linear", (x,), width, weights, is_stream=True, exact=False))

    def begin_again(self) -> Value:
        """The stream behind a draft: the head's own."""
        state = self.taken("final_norm" * _eagle(self.config).norm_output)
        return self._residual(self._join(state, is_stream=True))

    def layer(self, x: Value, i: int) -> Value:
        embedded = self.trace.add("embed", (), self.config.hidden_size, {"weight": "embed"}, scale=1.0)
        hidden_norm = "hidden_norm" * (not _eagle(self.config).norm_before_residual)
        q, k, v = self.qkv(self._join(embedded, x, norms=["attn_norm", hidden_norm]), i)
        x = x + self.linear(self.attention(q, k, v, i), "o", i)
        return x + self.mlp(self.norm(x, "mlp_norm", i), i)

    def end(self, x: Value) -> Value:
        logits = self.head(self.norm(self.wanted(x), "final_norm"))
        if IDS not in self.trace.shapes:
            return logits
        return self.trace.add("spread", (logits,), self.config.vocab_size, {"ids": IDS})

    def _residual(self, x: Value) -> Value:
        if not _eagle(self.config).norm_before_residual:
            return x
        options: dict[str, Any] = dict(eps=self.config.norm_eps, kind="rms", in_place=True)
        return self.trace.add("norm", (x,), x.width, {"weight": "hidden_norm"}, is_stream=True, **options)

    def _join(self, *parts: Value, norms: Sequence[str] = (), is_stream: bool = False) -> Value:
        """The parts side by side, normalized by the vectors `norms` ("": as it is)."""
        weights = {f"norm{number}": name for number, name in enumerate(norms) if name}
        width = sum(part.width for part in parts)
        return self.trace.add("join", parts, width, weights, is_stream=is_stream, eps=self.config.norm_eps)


def _eagle(config: ModelConfig) -> Eagle3Config:
    assert config.eagle is not None, "a configuration of no EAGLE-3 head"
    return config.eagle


def head_config(source: ModelSource, model: ModelConfig) -> ModelConfig:
    """The configuration of the head in an open folder, for the model of `model`. Raises FormatError, UnsupportedError, and ConfigError
    where it was made for another model."""
    path, raw = source.path, source.hf_config
    if raw is None:
        raise ConfigError(f"{path} is no EAGLE-3 head: a folder with config.json and *.safetensors")
    if not is_head(raw):
        known = [*EAGLE3_NAMES, "LlamaForCausalLM with draft_vocab_size"]
        raise UnsupportedError(f"{path}: an EAGLE-3 head's architecture", raw.get("architectures"), known)
    whole = Fields(path, raw)
    layer = whole.section("transformer_layer_config")  # speculators'
    fields = whole if layer is None else Fields(path, raw | layer.values)
    own = whole.section("eagle_config") or Fields(path, {})

    def flag(name: str, default: bool = False) -> bool:
        return own.boolean(name, whole.boolean(name, default))

    for name, taken in (("use_aux_hidden_state", True), ("fc_norm", False), ("tie_word_embeddings", False)):
        if flag(name, taken) is not taken:
            raise UnsupportedError(f"{path}: {name}", not taken, [taken])
    values = hf_values(fields, None)
    if values["num_layers"] != 1:
        raise UnsupportedError(f"{path}: num_hidden_layers of a head", values["num_layers"], [1])
    width = fields.integer("target_hidden_size", values["hidden_size"], high=MAX_WIDTH)
    for what, theirs, ours in (
        ("tokens", values["vocab_size"], model.vocab_size),
        ("numbers of a hidden state", width, model.hidden_size),
    ):
        if theirs != ours:
            raise ConfigError(f"EAGLE-3 head {path}: made for a model with {theirs} {what}, this one has {ours}")
    eagle = Eagle3Config(
        layers=_layers(path, whole, own, model.num_layers),
        width=width,
        vocab=fields.integer("draft_vocab_size", values["vocab_size"], high=MAX_VOCAB),
        owns_embedding=any(prefix + NAMES["embed"] in source.tensors for prefix in PREFIXES),
        norm_before_fc=flag("norm_before_fc"),
        norm_before_residual=flag("norm_before_residual", layer is not None),
        norm_output=flag("norm_output"),
    )
    if not eagle.owns_embedding and values["hidden_size"] != model.hidden_size:
        why = f"is missing: the model's has rows of {model.hidden_size} numbers, the head's are {values['hidden_size']} wide"
        raise FormatError(path, 0, NAMES["embed"], why)
    # Only distances count, so it may follow the model as far as that goes.
    values |= dict(max_context=model.max_context, bos_id=None, eos_ids=())
    return fields.build(architecture="eagle3", follows=model.num_layers, eagle=eagle, **values)


def _layers(path: object, whole: Fields, own: Fields, count: int) -> tuple[int, ...]:
    """Whose inputs the head reads. A folder that names none is of EAGLE's authors, who take those of layers 2, n // 2 and n - 3 (EAGLE,
    modeling_llama_kv.py). vLLM's own list names inputs, and eagle_config's does unless it begins with 1: then its numbers are of layers whose
    outputs these are (SGLang, pull request 25454)."""
    name = "eagle_aux_hidden_state_layer_ids"
    ids = own.token_ids(name) or whole.token_ids(name) or (2, count // 2, count - 3)
    if own.get(name) is not None and ids[0] == 1:
        ids = tuple(id + 1 for id in ids)
    if len(ids) != 3 or not all(0 <= id <= count for id in ids):
        raise ConfigError(
            f"EAGLE-3 head {path}: reads three states between layers {list(ids)}, this model has {count} layers"
        )
    return ids


def plan_head(source: ModelSource, model: ModelConfig, family: str = "cpu") -> ModelPlan:
    """The plan of the head in an open folder, for the model of `model`; share() gives it the rest. Raises FormatError,
    UnsupportedError, ConfigError."""
    plan = plan_model(source, family=family, config=head_config(source, model))
    used = {part.info.name for some in (plan.matrices, plan.vectors) for item in some for part in item.parts}
    for name, info in source.tensors.items():
        if name not in used and name not in (D2T, T2D):
            raise info.wrong("is no part of an EAGLE-3 head as it is computed here")
    return plan


def read_ids(source: ModelSource, config: ModelConfig) -> array | None:
    """i32: of each token of the model the head's own number, -1: it has none; None where these are the same. FormatError for numbers
    that are no tokens of the model, or twice the same."""
    vocab, own = config.vocab_size, _eagle(config).vocab
    info = source.tensors.get(D2T)
    if info is None and own == vocab:
        return None
    info = source.matrix(D2T, (own,))  # raises where it is missing
    kind = {"I64": "q", "I32": "i"}.get(info.type)
    if kind is None:
        raise UnsupportedError(f"{source.path}: type of {D2T}", info.type, ["I64", "I32"])
    found = array("i", [-1]) * vocab
    for number, distance in enumerate(array(kind, source.read(info))):
        token = number + distance
        if not 0 <= token < vocab:
            raise info.wrong(f"token {number} of the head would be {token} of a model that has {vocab}")
        if found[token] >= 0:
            raise info.wrong(f"tokens {found[token]} and {number} of the head would both be {token} of the model")
        found[token] = number
    mask = source.tensors.get(T2D)
    if mask is not None and (mask.type != "BOOL" or source.read(mask) != bytes(id >= 0 for id in found)):
        raise mask.wrong(f"does not have the tokens of {D2T}, or not of {vocab}")
    return found


def share(head: "Model", model: "Model", ids: array | None, device: Any) -> None:
    """The head computes with the embedding of its model where it has none, and its logits are of the model's tokens."""
    head.weights.setdefault("embed", model.weights["embed"])
    head.weights["layers.0.embed"] = head.weights["embed"]
    if ids is not None:
        head.vectors[IDS] = new_tensor(device, "step", "i32", len(ids))
        device.write(head.vectors[IDS], ids.tobytes())
