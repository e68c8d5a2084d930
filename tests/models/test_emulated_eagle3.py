"""EAGLE-3 heads by a GPU's kernels, in the emulator: their logits behind states of the model, and behind their own."""

import numpy as np
import pytest
import tiny
import tiny_eagle3
from test_eagle3 import expected, rounds_of
from test_emulated_model import load_emulated

from zse.formats.opening import open_model
from zse.kernel import cache
from zse.models import eagle3
from zse_emulator import EmulateDevice

TOKENS = 13
HEADS = dict(head_dim=64, num_attention_heads=2, num_key_value_heads=1)  # of a size that a GPU's attention has


@pytest.mark.parametrize(
    "like, family, changes",
    [
        ("sm_90a", "qwen3", HEADS),
        (
            "sm_80",
            "llama",
            HEADS | dict(eagle_config=dict(norm_before_fc=True, norm_before_residual=True, norm_output=True)),
        ),
    ],
)
def test_rounds(like, family, changes, kept_kernels, tmp_path):
    device = EmulateDevice(like, cache.package_variants(like))
    model_path, head_path = tiny_eagle3.write(tmp_path, family, "BF16", **changes)
    config, tokens = tiny_eagle3.head_config(family, **changes), tiny.random_tokens("eagle3")[:TOKENS]
    weights = tiny_eagle3.head_weights(config, tiny_eagle3.target_config(family)["hidden_size"])
    known = tiny_eagle3.tokens_of(config)
    wanted, wanted_again, drafts = expected(family, config, weights, known, tokens)
    model, plan = load_emulated(device, str(model_path))
    head, head_plan = load_emulated(
        device,
        str(head_path),
        planned=lambda source, family, quantize=None: eagle3.plan_head(source, plan.config, family),
    )
    with open_model(str(head_path)) as source:
        eagle3.share(head, model, eagle3.read_ids(source, head_plan.config), device)
    found, again = rounds_of(device, model, head, tokens, drafts[:2], sizes=(TOKENS - 1,))
    for one, other in zip([found, *again], [wanted, *wanted_again], strict=False):
        assert (np.isinf(one) == np.isinf(other)).all() and not np.isnan(one).any()
        one, other = one[:, known], other[:, known]
        assert np.abs(one - other).mean() < 0.05 * np.abs(other).mean()
