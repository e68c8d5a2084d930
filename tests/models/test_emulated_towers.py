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


# Of two images the second follows the first in two families, of a whole picture and of windows; of the others it is in `make test-rest`.
BOTH, FIRST, SECOND = (0, 1), (0,), (1,)


@pytest.mark.each("family")
@pytest.mark.parametrize(
    ("family", "like", "images"),
    [
        ("gemma3", "sm_90a", BOTH),
        ("gemma3", "gfx90a", BOTH),
        ("qwen2_5_vl", "sm_90a", BOTH),
        ("qwen2_5_vl", "sm_80", BOTH),
        ("qwen3_vl", "sm_90a", FIRST),
        ("qwen3_vl", "sm_90a", SECOND),
        ("mistral3", "sm_80", FIRST),
        ("mistral3", "sm_80", SECOND),
        ("mistral3", "metal3.1", BOTH),
        ("qwen2_vl", "sm_90a", FIRST),
        ("qwen2_vl", "sm_90a", SECOND),
        ("qwen3_5", "sm_80", FIRST),
        ("qwen3_5", "sm_80", SECOND),
        ("gemma4", "sm_90a", FIRST),
        ("gemma4", "sm_90a", SECOND),
        ("gemma4", "gfx90a", BOTH),
        ("gemma4_moe", "sm_80", FIRST),
        ("gemma4_moe", "sm_80", SECOND),
        ("gemma4_moe", "metal3.1", BOTH),
        ("gemma4_unified", "sm_90a", BOTH),
        ("deepseek_vl2", "sm_90a", FIRST),
        ("deepseek_vl2", "sm_90a", SECOND),
        ("deepseek_vl2", "gfx90a", BOTH),
    ],
)
def test_embeddings_equal_transformers(family, like, images, kept_kernels, tmp_path):
    device = EmulateDevice(like, cache.package_variants(like))
    with open_model(str(tiny.write(family, tmp_path))) as source:
        plan = plan_tower(source, None, read_config(source), quantize=None, family="gpu")
        assert plan is not None
        encoder = ImageEncoder(device, plan, kv_dtype="bf16")
        encoder.load()
        for number in images:
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
