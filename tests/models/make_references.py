"""Makes references.npz: logits of the tiny models of tiny.py by transformers (PyTorch, CPU, float32).

    PYTHONPATH=src python tests/models/make_references.py

Run it when tiny.py changes, with transformers and torch installed; the tests compare against the committed file.
"""

from pathlib import Path

import numpy as np
import tiny

PATH = Path(__file__).with_name("references.npz")


def load(family: str):
    """The family's model in transformers."""
    import torch
    import transformers

    raw = dict(tiny.config(family))
    kind = raw.pop("model_type")
    names = raw.pop("architectures")
    config = transformers.AutoConfig.for_model(kind, **raw)
    config._attn_implementation = "eager"
    model = getattr(transformers, names[0])(config).eval()
    state = {name: torch.from_numpy(values.copy()) for name, values in tiny.weights(family).items()}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model


def logits(family: str) -> np.ndarray:
    """f32 [tokens, vocab] of the family's sequence."""
    import torch

    model = load(family)
    with torch.no_grad():
        return model(torch.from_numpy(tiny.tokens(family).astype(np.int64))[None]).logits[0].numpy()


if __name__ == "__main__":
    np.savez_compressed(PATH, **{family: logits(family) for family in tiny.FAMILIES})
    print(PATH, PATH.stat().st_size, "bytes")
