"""EAGLE-3 heads: their logits over several rounds against a forward in NumPy, behind states of numpy_model.py's models; the
forms in which they are published; folders that are damaged, or made for another model."""

import json
from types import SimpleNamespace

import numpy as np
import numpy_model
import pytest
import tiny
import tiny_eagle3
from session import Session
from test_mtp import NEAR, Block

from zse.errors import ConfigError, FormatError, UnsupportedError
from zse.formats.opening import open_model
from zse.models import eagle3, registry
from zse.models.load import load_model, plan_model
from zse.plan.kept import KeptStreams

ROUNDS = 3
SIZES = (9, 1, 29)


class Reference:
    """The head in NumPy, f64, one sequence: it keeps keys and values."""

    def __init__(self, config: dict, weights: dict, embedding: np.ndarray):
        self.config, self.flags = config, config | (config.get("eagle_config") or {})
        self.w = {"embed_tokens.weight": embedding} | weights
        self.w = {name: values.astype(np.float64) for name, values in self.w.items()}
        self.keys = self.values = None

    def norm(self, x, name):
        return numpy_model.rmsnorm(x, self.w[f"{name}.weight"], self.config["rms_norm_eps"])

    def project(self, x, name):
        return x @ self.w[f"midlayer.{name}.weight"].T + self.w.get(f"midlayer.{name}.bias", 0)

    def fused(self, states):
        if self.flags.get("norm_before_fc"):
            states = self.norm(states, "input_norm")
        return states @ self.w["fc.weight"].T

    def turned(self, x, positions):
        half = x.shape[-1] // 2
        angles = positions[:, None] * self.config["rope_theta"] ** (-np.arange(half) / half)
        cos, sin = (np.tile(f(angles), 2)[:, None] for f in (np.cos, np.sin))
        return x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin

    def pairs(self, state, tokens):
        """(logits of the head's own tokens, the state of each pair) of states and the tokens behind them."""
        config, count = self.config, len(tokens)
        normed = self.norm(state, "midlayer.hidden_norm")
        residual = normed if self.flags.get("norm_before_residual") else state
        embedded = self.norm(self.w["embed_tokens.weight"][np.array(tokens)], "midlayer.input_layernorm")
        x = np.concatenate([embedded, normed], -1)
        q, k, v = (self.project(x, f"self_attn.{name}_proj").reshape(count, -1, config["head_dim"]) for name in "qkv")
        start = 0 if self.keys is None else len(self.keys)
        positions = np.arange(start, start + count)
        q, k = self.turned(q, positions), self.turned(k, positions)
        self.keys = k if self.keys is None else np.concatenate([self.keys, k])
        self.values = v if self.values is None else np.concatenate([self.values, v])
        keys, values = (each.repeat(q.shape[1] // k.shape[1], 1) for each in (self.keys, self.values))
        scores = np.einsum("qhd,khd->hqk", q, keys) / config["head_dim"] ** 0.5
        scores = np.where(np.arange(len(keys))[None] > positions[:, None], -np.inf, scores)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), values)
        x = residual + self.project(attended.reshape(count, -1), "self_attn.o_proj")
        inner = self.norm(x, "midlayer.post_attention_layernorm")
        gate = numpy_model.gate_activation(self.project(inner, "mlp.gate_proj"), "silu")
        x = x + self.project(gate * self.project(inner, "mlp.up_proj"), "mlp.down_proj")
        normed = self.norm(x, "norm")
        return normed @ self.w["lm_head.weight"].T, normed if self.flags.get("norm_output") else x


def spread(logits, ids) -> np.ndarray:
    """Logits of the head's tokens among those of the model's."""
    if ids is None:
        return logits
    found = np.full((len(logits), tiny_eagle3.VOCAB), -np.inf)
    found[:, ids] = logits
    return found


def expected(family, config: dict, weights: dict, ids, tokens, layers=(2, 3, 4)) -> tuple[np.ndarray, list, list[int]]:
    """(logits of all pairs, of each further round, the drafts) behind the states of a model of tiny_eagle3.py."""
    model = registry.config_from_hf("config.json", tiny_eagle3.target_config(family))
    roles, found = tiny.by_role(family, model, tiny_eagle3.target_weights(family)), []
    numpy_model.forward(model, roles, tokens, np.float64, between=found)
    reference = Reference(config, weights, roles["embed"])
    states = np.concatenate([found[layer][:-1] for layer in layers], -1)
    logits, state = reference.pairs(reference.fused(states), tokens[1:].tolist())
    first, again, drafts = spread(logits, ids), [], []
    for _ in range(ROUNDS):
        drafts.append(int((first if not again else again[-1])[-1].argmax()))
        logits, state = reference.pairs(state[-1:], drafts[-1:])
        again.append(spread(logits, ids))
    return first, again, drafts


def loaded(device, model_path, head_path):
    """(the model, the head with what it shares)."""
    with open_model(str(model_path)) as source, open_model(str(head_path)) as beside:
        plan = plan_model(source, family=device.kernels)
        head_plan = eagle3.plan_head(beside, plan.config, family=device.kernels)
        ids = eagle3.read_ids(beside, head_plan.config)
        models = [load_model(device, each) for each in (plan, head_plan)]
        for model in models:
            model.wait()
    eagle3.share(models[1], models[0], ids, device)
    return models


def rounds_of(device, model, head, tokens, drafts, sizes=SIZES):
    """As expected() gives them, in steps of `sizes` tokens of the model."""
    target, mine = Session(device, model), Block(device, head)
    kept = target.decoder.kept = KeptStreams(target.decoder, head.config.eagle.layers)
    found, at = [], 0
    for size in sizes:
        target.step([(0, tokens[at : at + size])])
        found.append(mine.pairs(kept.streams, range(size), tokens[at + 1 : at + size + 1]))
        at += size
    again, row = [], sizes[-1] - 1
    for draft in drafts:
        again.append(mine.pairs(mine.decoder.hidden, [row], [draft], again=True))
        row = 0
    return np.concatenate(found), again


def compare(device, family, model_path, head_path, config, weights, ids, layers=(2, 3, 4)):
    tokens = tiny.random_tokens("eagle3")
    wanted, wanted_again, drafts = expected(family, config, weights, ids, tokens, layers)
    found, again = rounds_of(device, *loaded(device, model_path, head_path), tokens, drafts)
    np.testing.assert_allclose(found, wanted, **NEAR)
    for one, other in zip(again, wanted_again, strict=True):
        np.testing.assert_allclose(one, other, **NEAR)


def written(tmp_path, family="llama", dtype="F32", own_embedding=False, **changes):
    """(the model's folder, the head's, its config.json, weights, tokens)."""
    model, head = tiny_eagle3.write(tmp_path, family, dtype)
    config = tiny_eagle3.head_config(family, **changes)
    width = tiny_eagle3.target_config(family)["hidden_size"]
    weights = tiny_eagle3.head_weights(config, width, own_embedding)
    ids = tiny_eagle3.tokens_of(config) if "draft_vocab_size" in config else None
    return model, tiny_eagle3.save_head(head, config, weights, dtype, ids), config, weights, ids


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_rounds_equal_the_method(family, dtype, device, tmp_path):
    compare(device, family, *written(tmp_path, family, dtype))


FORMS = {
    "normed": dict(eagle_config=dict(norm_before_fc=True, norm_before_residual=True, norm_output=True)),
    "biases": dict(attention_bias=True),
    "all tokens": dict(draft_vocab_size=None),
    "own embedding": dict(own_embedding=True),
    "narrow": dict(
        own_embedding=True, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, target_hidden_size=64
    ),
    "by the authors": dict(architectures=["LlamaForCausalLM"]),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form, device, tmp_path):
    compare(device, "llama", *written(tmp_path, **FORMS[form]))


LISTS = {
    "outputs": (dict(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}), (2, 4, 7)),
    "inputs": (dict(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}), (0, 3, 6)),
    "vLLM's": (dict(eagle_aux_hidden_state_layer_ids=[1, 5, 7]), (1, 5, 7)),
}


@pytest.mark.parametrize("kind", LISTS)
def test_which_states_it_reads(kind, device, tmp_path):
    changes, layers = LISTS[kind]
    compare(device, "qwen3", *written(tmp_path, "qwen3", **changes), layers)


def test_as_speculators_writes_it(device, tmp_path):
    model, head, config, weights, ids = written(tmp_path, norm_before_residual=True)
    outer = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "target_hidden_size": None}
    outer |= {key: config[key] for key in ("draft_vocab_size", "tie_word_embeddings")}
    inner = {key: value for key, value in config.items() if key not in (*outer, "norm_before_residual")}
    named = {name.replace("midlayer.", "layers.0."): values for name, values in weights.items()}
    tiny_eagle3.save_head(head, outer | {"transformer_layer_config": inner}, named, "F32", ids)
    compare(device, "llama", model, head, config, weights, ids)


def plan(model, head):
    with open_model(str(model)) as source, open_model(str(head)) as beside:
        found = eagle3.plan_head(beside, plan_model(source).config)
        return found, eagle3.read_ids(beside, found.config)


WRONG = {
    "another hidden size": (
        dict(target_hidden_size=96),
        ConfigError,
        "made for a model with 96 numbers of a hidden state, this one has",
    ),
    "another vocabulary": (dict(vocab_size=200), ConfigError, "made for a model with 200 tokens, this one has 160"),
    "two layers": (dict(num_hidden_layers=2), UnsupportedError, "num_hidden_layers of a head 2"),
    "final state": (
        dict(eagle_config=dict(use_aux_hidden_state=False)),
        UnsupportedError,
        "use_aux_hidden_state False",
    ),
    "norms apart": (dict(fc_norm=True), UnsupportedError, "fc_norm True"),
    "more layers": (
        dict(eagle_aux_hidden_state_layer_ids=[2, 8, 9]),
        ConfigError,
        r"layers \[2, 8, 9\], this model has 7",
    ),
    "two states": (dict(eagle_aux_hidden_state_layer_ids=[2, 5]), ConfigError, "reads three states"),
    "no layer": (dict(eagle_aux_hidden_state_layer_ids=["a"]), FormatError, "eagle_aux_hidden_state_layer_ids"),
    "a model": (dict(architectures=["Qwen3ForCausalLM"]), UnsupportedError, "an EAGLE-3 head's architecture"),
    "no such head": (dict(draft_vocab_size=110), FormatError, "lm_head.weight.*expected"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_refused(kind, tmp_path):
    changes, error, message = WRONG[kind]
    model, head, config, _, _ = written(tmp_path)
    (head / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(error, match=message) as raised:
        plan(model, head)
    assert "\n" not in str(raised.value)


def damaged(ids, kind):
    ids = ids.copy()
    if kind == "outside":
        ids[-1] = tiny_eagle3.VOCAB
    if kind == "below":
        ids[0] = -1
    if kind == "twice":
        ids[4] = ids[3]
    return ids


@pytest.mark.parametrize(
    "kind, message",
    [
        ("outside", "token 119 of the head would be 160 of a model that has 160"),
        ("below", "token 0 of the head would be -1 of a model"),
        ("twice", "tokens 3 and 4 of the head would both be"),
        ("missing", "d2t: the tensor is missing"),
        ("short", r"d2t: has shape \[119\], expected \[120\]"),
        ("of floats", "type of d2t 'F32'"),
        ("mask", "t2d: does not have the tokens of d2t"),
        ("unknown", "extra.weight: is no part of an EAGLE-3 head"),
        ("no layer", "o_proj.weight: the tensor is missing"),
        ("narrow", "embed_tokens.weight: is missing: the model's has rows of"),
    ],
)
def test_damaged(kind, message, tmp_path):
    changes = FORMS["narrow"] | dict(own_embedding=False) if kind == "narrow" else {}
    model, head, config, weights, ids = written(tmp_path, **changes)
    extra = {}
    if kind == "short":
        extra["d2t"] = ("I64", (119,), bytes(8 * 119))
    if kind == "of floats":
        extra["d2t"] = ("F32", (120,), bytes(4 * 120))
    if kind == "mask":
        extra["t2d"] = ("BOOL", (tiny_eagle3.VOCAB,), bytes(tiny_eagle3.VOCAB))
    if kind == "unknown":
        extra["extra.weight"] = ("F32", (1,), bytes(4))
    if kind == "no layer":
        del weights["midlayer.self_attn.o_proj.weight"]
    if kind in ("outside", "below", "twice"):
        extra["d2t"] = ("I64", ids.shape, (damaged(ids, kind) - np.arange(len(ids))).astype(np.int64).tobytes())
    tiny_eagle3.save_head(head, config, weights, "F32", None if kind == "missing" else ids, extra)
    with pytest.raises((FormatError, UnsupportedError), match=message) as raised:
        plan(model, head)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["LlamaForCausalLMEagle3", "LlamaForCausalLM"])
def test_it_is_no_model(name, tmp_path):
    _, head, *_ = written(tmp_path, architectures=[name])
    with (
        open_model(str(head)) as source,
        pytest.raises(FormatError, match="is an EAGLE-3 head, no model.*--draft-model"),
    ):
        plan_model(source)
    assert registry.name_of(head, json.loads((head / "config.json").read_text())) == name  # it can be pulled


def test_too_few_layers(tmp_path):
    _, head, *_ = written(tmp_path)
    hidden = tiny_eagle3.target_config("llama")["hidden_size"]
    with open_model(str(head)) as source, pytest.raises(ConfigError, match=r"layers \[2, 1, -1\], this model has 2"):
        eagle3.head_config(source, SimpleNamespace(num_layers=2, vocab_size=160, hidden_size=hidden))
