"""Makes references.npz: logits of the tiny models of tiny_configs.py by transformers (PyTorch, CPU, float32).

    PYTHONPATH=src:tests/formats python tests/models/make_references.py [FAMILY...]

Run it when a tiny model changes, with transformers and torch installed; the tests compare against the committed file.
Without names all are made anew.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import tiny
import tiny_families

SHORT = 16  # tokens of NAME_short: no more than the original context of the longrope models
PATH = Path(__file__).with_name("references.npz")


def load(family: str):
    """The family's model in transformers."""
    import torch
    import transformers

    new = family in tiny_families.FAMILIES
    raw = dict(tiny_families.oracle(family) if new else tiny.config(family))
    kind = raw.pop("model_type")
    names = raw.pop("architectures")
    config = transformers.AutoConfig.for_model(kind, **raw)
    config._attn_implementation = "eager"
    if hasattr(config, "num_experts_per_tok"):
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


def logits(family: str) -> np.ndarray:
    """f32 [tokens, vocab] of the family's sequence."""
    import torch

    name = family.removesuffix("_short")
    ids = tiny.tokens(name)[: SHORT if "_short" in family else None]
    with torch.no_grad():
        return load(name)(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()


if __name__ == "__main__":
    every = (*tiny.FAMILIES, *tiny_families.FAMILIES, "phi4_mini_short")
    kept = dict(np.load(PATH)) if sys.argv[1:] else {}
    np.savez_compressed(PATH, **kept | {family: logits(family) for family in sys.argv[1:] or every})
    print(PATH, PATH.stat().st_size, "bytes")
