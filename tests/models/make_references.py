"""Makes references.npz: logits of the tiny models of tiny_configs.py by transformers (PyTorch, CPU, float32).

    PYTHONPATH=src:tests:tests/formats:tests/models python tests/models/make_references.py [NAME...]

Beside them stands "FAMILY bf16": how far the same model is from that with weights and numbers between operations in bf16.

Run it when a tiny model changes, with transformers and torch installed; the tests compare against the committed file.
Without names all are made anew.

Roundings to bf16 or to 8 bits make a router choose another expert where two are nearly as good, and then a right model's logits
differ as a wrong one's do. So the tokens of a family with experts are chosen, one after another, such that noise of CLEAR times the
router's logits changes no choice in any layer, or else the one that bears most; they stand beside the logits as "FAMILY tokens".
"""

import copy
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import test_gpt_oss as oss
import tiny
import tiny_families
import tiny_hybrids
import tiny_rope

from zse.kernels.route import ROUTE, sorted_pairs
from zse.models import registry

SHORT = 16  # tokens of NAME_short: no more than the original context of the longrope models
PATH = tiny.REFERENCES
CLEAR, LEVELS, DRAWS = 0.3, (0.05, 0.1, 0.15, 0.2, 0.3), 12
CANDIDATES = 64


def load(family: str):
    """The family's model in transformers."""
    import torch
    import transformers

    new = family in tiny_families.FAMILIES
    # A copy: transformers writes into a config's parts, which families share.
    raw = copy.deepcopy(tiny_families.oracle(family) if new else tiny.config(family))
    kind = raw.pop("model_type")
    names = raw.pop("architectures")
    config = transformers.AutoConfig.for_model(kind, **raw)
    config._attn_implementation = "eager"
    if hasattr(config, "num_experts_per_tok") or family in tiny_hybrids.CONFIGS:
        return published(getattr(transformers, names[0]), family)
    model = getattr(transformers, names[0])(config).eval()
    weights = tiny_families.weights(family) if new else tiny.weights(family)
    state = {name: torch.from_numpy(values.copy()) for name, values in weights.items()}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model


def published(kind, family: str):
    """A model with experts from a directory with the names of published files, which transformers stores otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(tiny_families.write(family, Path(folder)))
        model, found = kind.from_pretrained(path, output_loading_info=True, attn_implementation="eager")
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), found
    return model.eval().float()


class Routers:
    """What the routers of a model in transformers get: the last token's of each sequence of a batch."""

    def __init__(self, family: str, model):
        config = registry.config_from_hf("config.json", tiny_families.CONFIGS[family])
        architecture, weights, moe = (
            registry.architecture(config.architecture),
            tiny_families.weights(family),
            config.moe,
        )
        self.inputs: list = []
        shape = (moe.num_experts, config.hidden_size)
        for module in model.modules():
            if tuple(getattr(getattr(module, "weight", None), "shape", ())) == shape:
                module.register_forward_pre_hook(lambda _, args: self.inputs.append(args[0]))
        self.options = dict(
            gating=moe.gating, groups=moe.groups, groups_used=moe.groups_used, group_best=moe.group_best
        )
        self.routing = sorted_pairs(np.zeros((1, moe.experts_per_token), np.int32), moe.num_experts)
        roles = {role.name for role in architecture.roles(config)}
        prefix = architecture.hf_prefix(family, weights)

        def named(role: str):
            names = architecture.hf_name(role, prefix).split("|") if role in roles else ()
            return next((weights[name] for name in names if name in weights), None)

        layers = [f"layers.{i}." for i in range(config.num_layers) if moe.is_sparse(i)]
        self.layers = [(named(at + "router"), named(at + "router_select")) for at in layers]

    def borne(self, count: int) -> np.ndarray:
        """For each of `count` sequences the most of LEVELS that changes no choice, or 0."""
        assert len(self.inputs) == len(self.layers), (len(self.inputs), len(self.layers))
        rng, levels = np.random.default_rng(5), np.full(count, len(LEVELS))
        for x, (router, bias) in zip(self.inputs, self.layers, strict=True):
            clean = x.reshape(count, -1, x.shape[-1])[:, -1].double().numpy() @ router.T.astype(np.float64)
            wanted = self._chosen(clean, bias)
            noise = rng.standard_normal((DRAWS, *clean.shape)) * np.sqrt(np.mean(clean**2))
            for index, level in enumerate(LEVELS):
                got = self._chosen((clean + level * noise).reshape(-1, clean.shape[1]), bias).reshape(DRAWS, count, -1)
                levels = np.where((got == wanted).all(axis=(0, 2)), levels, np.minimum(levels, index))
        self.inputs.clear()
        return np.array([0.0, *LEVELS])[levels]

    def _chosen(self, logits: np.ndarray, bias) -> np.ndarray:
        routing = self.routing._replace(ids=np.zeros((len(logits), self.routing.ids.shape[1]), np.int32))
        rows = sorted_pairs(routing.ids, logits.shape[1])
        found = ROUTE.reference(logits, rows._replace(ids=routing.ids), bias, **self.options)
        return np.sort(found["routing.ids"], axis=1)


def clear_tokens(family: str, model) -> np.ndarray:
    """The family's random tokens, each the first from there on whose choices are clear."""
    import torch

    routers, ids, least = Routers(family, model), np.zeros(0, np.int64), 1.0
    for first in tiny.random_tokens(family):
        candidates = (first - 3 + np.arange(CANDIDATES)) % 157 + 3
        batch = np.concatenate([np.tile(ids, (CANDIDATES, 1)), candidates[:, None]], axis=1)
        model(torch.from_numpy(batch))
        borne = routers.borne(CANDIDATES)
        best = int(np.argmax(borne >= min(CLEAR, borne.max())))
        ids, least = np.append(ids, candidates[best]), min(least, borne[best])
    print(f"{family}: choices bear noise of {least} of the router's logits")
    return ids.astype(np.int32)


def logits(family: str, ids: np.ndarray | None = None, model=None) -> np.ndarray:
    """f32 [tokens, vocab] of the family's sequence. ids: another one; model: as load() gives it."""
    import torch

    name = family.removesuffix("_short")
    ids = (tiny.tokens(name) if ids is None else ids)[: SHORT if "_short" in family else None]
    with torch.no_grad():
        return (model or load(name))(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].float().numpy()


def made(family: str) -> dict[str, np.ndarray]:
    """The family's logits, what bf16 costs them, and its sequence where that is chosen."""
    import torch

    model, found = load(family.removesuffix("_short")), {}
    if {"num_experts_per_tok", "top_k_experts"}.intersection(tiny_families.CONFIGS.get(family, {})):
        with torch.no_grad():
            found[f"{family} tokens"] = clear_tokens(family, model)
    ids = found.get(f"{family} tokens")
    found[family] = logits(family, ids, model)
    in_bf16 = logits(family, ids, model.to(torch.bfloat16))
    found[f"{family} bf16"] = np.abs(in_bf16 - found[family]).max() / np.abs(found[family]).max()
    return found


def gpt_oss(name: str, ids: np.ndarray | None = None) -> np.ndarray:
    """Logits of test_gpt_oss.py's model for its random tokens; "gpt_oss wide": with heads of a size that a GPU has, for `ids`."""
    with mock.patch.object(oss, "DIM", oss.WIDE if name.endswith("wide") else oss.DIM):
        return logits("gpt_oss", tiny.tokens("gpt-oss") if ids is None else ids, gpt_oss_model())


def gpt_oss_model():
    import torch
    import transformers

    rope = dict(
        rope_type="yarn", factor=oss.FACTOR, original_max_position_embeddings=oss.ORIGINAL, rope_theta=oss.THETA
    )
    config = transformers.GptOssConfig(
        **dict(vocab_size=oss.VOCAB, hidden_size=oss.HIDDEN, intermediate_size=oss.INNER, head_dim=oss.DIM),
        **dict(num_attention_heads=oss.HEADS, num_key_value_heads=oss.KV_HEADS, num_local_experts=oss.EXPERTS),
        **dict(num_experts_per_tok=oss.CHOSEN, sliding_window=oss.WINDOW, max_position_embeddings=oss.CONTEXT),
        **dict(num_hidden_layers=oss.LAYERS, rms_norm_eps=oss.EPS),
        rope_parameters=rope | dict(beta_fast=32.0, beta_slow=1.0, truncate=False),
    )
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.GptOssForCausalLM(config).eval()
    state = {name: torch.from_numpy(values) for name, values in oss.folder_weights().items()}
    model.load_state_dict(state, strict=True)
    return model


def gpt_oss_tokens(count: int) -> np.ndarray:
    """i32 [count]: tokens that bf16 sends to no other expert of the wide model. Each is the one of CANDIDATES whose last chosen expert
    is furthest from the first that is not, in the layer where that is least; random tokens are 0.01 apart at times, and bf16 moves
    the router's logits by as much."""
    import torch

    with mock.patch.object(oss, "DIM", oss.WIDE):
        model, margins = gpt_oss_model(), []

    def note(router, args):
        given = torch.nn.functional.linear(
            args[0].reshape(CANDIDATES, -1, oss.HIDDEN)[:, -1], router.weight, router.bias
        )
        ranked = given.sort(descending=True).values
        margins.append(ranked[:, oss.CHOSEN - 1] - ranked[:, oss.CHOSEN])

    for layer in model.model.layers:
        layer.mlp.router.register_forward_pre_hook(note)
    rows = torch.zeros((CANDIDATES, 0), dtype=torch.int64)
    for first in np.resize(tiny.random_tokens("gpt-oss"), count):
        rows = torch.cat([rows, ((int(first) + torch.arange(CANDIDATES)) % oss.VOCAB)[:, None]], 1)
        margins.clear()
        with torch.no_grad():
            model(rows)
        rows = rows[int(torch.stack(margins).min(0).values.argmax())].repeat(CANDIDATES, 1)
    return rows[0].numpy().astype(np.int32)


def made_gpt_oss(_: str) -> dict[str, np.ndarray]:
    ids = gpt_oss_tokens(tiny.TOKENS)
    return {"gpt_oss": gpt_oss("gpt_oss"), "gpt_oss wide tokens": ids, "gpt_oss wide": gpt_oss("gpt_oss wide", ids)}


def rope(name: str) -> dict[str, np.ndarray]:
    """ "rope NAME", for each of CONTEXTS: a head's frequencies and, last, what cosines and sines are multiplied with."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters, rows = tiny_rope.SCALINGS[name], []
    raw = tiny.config("llama") | dict(rope_parameters=parameters | dict(rope_theta=tiny_rope.THETA), head_dim=128)
    config = transformers.LlamaConfig(
        **{key: value for key, value in raw.items() if key not in ("rope_theta", "architectures")}
    )
    for context in tiny_rope.CONTEXTS:
        if parameters["rope_type"] == "default":
            found, scale = [tiny_rope.THETA ** (-i / 64) for i in range(64)], 1.0
        else:
            found, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=context or None)
        rows.append([*map(float, found), scale])
    return {f"rope {name}": np.array(rows, np.float32)}


def makers() -> dict:
    """Name → what makes its references."""
    found = dict.fromkeys((*tiny.FAMILIES, *tiny_families.FAMILIES, "phi4_mini_short"), made)
    return found | {"gpt_oss": made_gpt_oss} | dict.fromkeys(tiny_rope.SCALINGS, rope)


if __name__ == "__main__":
    kept = dict(np.load(PATH)) if sys.argv[1:] else {}
    for name in sys.argv[1:] or makers():
        kept |= makers()[name](name)
    np.savez_compressed(PATH, **kept)
    print(PATH, PATH.stat().st_size, "bytes")
