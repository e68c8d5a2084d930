"""Towers through the GPU's kernels in the emulator, against transformers' image features: the product with patches, positions, attention
of whole images and of windows, poolers and mergers. bf16 between the operations."""

import numpy as np
import pytest
import tiny_vision as tiny

from zse.engine.image_encoder import ImageEncoder, encoder_bytes
from zse.formats.opening import open_model
from zse.kernel import cache
from zse.models.vision.load import plan_tower
from zse.models.weight_plan import read_config
from zse.runtime.null import NullGPU
from zse_emulator import EmulateDevice

REFERENCES = np.load(tiny.PATH)


@pytest.mark.each("family")
@pytest.mark.parametrize(
    ("family", "like"),
    [("gemma3", "sm_90a"), ("gemma3", "gfx90a"), ("qwen2_5_vl", "sm_90a"), ("qwen2_5_vl", "sm_80")]
    + [
        ("qwen3_vl", "sm_90a"),
        ("mistral3", "sm_80"),
        ("mistral3", "metal3.1"),
        ("qwen2_vl", "sm_90a"),
        ("qwen3_5", "sm_80"),
        ("gemma4", "sm_90a"),
        ("gemma4", "gfx90a"),
        ("gemma4_moe", "sm_80"),
        ("gemma4_moe", "metal3.1"),
        ("gemma4_unified", "sm_90a"),
        ("deepseek_vl2", "sm_90a"),
        ("deepseek_vl2", "gfx90a"),
    ],
)
def test_embeddings_equal_transformers(family, like, kept_kernels, tmp_path):
    """Two images, one after the other."""
    device = EmulateDevice(like, cache.package_variants(like))
    with open_model(str(tiny.write(family, tmp_path))) as source:
        plan = plan_tower(source, None, read_config(source), quantize=None, family="gpu")
        assert plan is not None
        encoder = ImageEncoder(device, plan, kv_dtype="bf16")
        encoder.load()
        for number in range(2):
            *between, found = encoder.encode(*(tiny.image(family, number)[i] for i in (2, 0, 1)))
            assert set(between) == {None} and len(between) == 1 + len(plan.forward.tower.deepstack)
            expected = REFERENCES[f"{family} image {number}"]
            assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()
        encoder.close()


@pytest.mark.parametrize("family", tiny.CONFIGS)
@pytest.mark.parametrize("like", ["sm_90a", "sm_80", "gfx90a"])
def test_what_is_allocated_is_what_the_plan_counts(family, like, tmp_path):
    with open_model(str(tiny.write(family, tmp_path))) as source:
        plan = plan_tower(source, None, read_config(source), quantize=None, family="gpu")
        assert plan is not None
        device = NullGPU(like)
        counted = encoder_bytes(device, plan, "bf16")
        encoder = ImageEncoder(device, plan, kv_dtype="bf16")
        before = sum(device.memory().values())
        assert len(encoder.record()) == 1 + len(plan.forward.tower.deepstack)
        assert before < sum(device.memory().values()) == counted
