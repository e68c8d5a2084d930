"""GGUF blocks: dequantization against the `gguf` package, the mapping onto affine groups against the formulas."""

import gguf
import numpy as np
import pytest
from gguf import quants

from zse.formats.ggml import AFFINE, BLOCKS, EXACT
from zse.formats.gguf_blocks import dequantize, to_affine, unpack_blocks
from zse.formats.source import DENSE_TYPES

QUANTIZED = [name for name in BLOCKS if name not in DENSE_TYPES]
F16_FIELDS = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


def random_blocks(rng, type, count):
    """Random bits, with finite f16 fields, zeros and subnormals among them."""
    raw = rng.integers(0, 256, (count, BLOCKS[type][1]), dtype=np.uint8)
    for start in F16_FIELDS[type]:
        values = (rng.normal(size=count) * 10.0 ** rng.integers(-8, 2, count)).astype(np.float16)
        raw[:, start : start + 2] = values[:, None].view(np.uint8)
    return raw.tobytes()


@pytest.mark.parametrize("type", QUANTIZED)
def test_dequantize_equals_the_gguf_package_bit_for_bit(type):
    elements, nbytes = BLOCKS[type]
    raw = random_blocks(np.random.default_rng(7), type, 600)
    rows = np.frombuffer(raw, np.uint8).reshape(20, 30 * nbytes)
    expected = quants.dequantize(rows, gguf.GGMLQuantizationType[type])
    got = dequantize(type, raw, (20, 30 * elements))
    assert got.dtype == np.float32
    assert np.array_equal(got.view(np.uint32), np.ascontiguousarray(expected, np.float32).view(np.uint32))


@pytest.mark.parametrize("type", ["F16", "BF16", "F32"])
def test_dense_types(type):
    bits = np.random.default_rng(8).normal(size=(3, 5)).astype(np.float32)
    if type == "BF16":
        raw = (bits.view(np.uint32) >> 16).astype(np.uint16)
        expected = (raw.astype(np.uint32) << 16).view(np.float32)
    else:
        raw = bits.astype({"F16": "f2", "F32": "f4"}[type])
        expected = raw.astype(np.float32)
    assert np.array_equal(dequantize(type, raw.tobytes(), (3, 5)), expected)


@pytest.mark.parametrize("type", EXACT)
def test_exact_mappings(type):
    elements, _ = BLOCKS[type]
    raw = random_blocks(np.random.default_rng(9), type, 12 * 16)
    affine = to_affine(type, raw, (12, 16 * elements))
    assert affine.scheme == AFFINE[type]
    expected = dequantize(type, raw, (12, 16 * elements))
    # Equal as numbers: -0.0 (scale * 0 with a negative scale) may become 0.0.
    assert np.array_equal(affine.dequantize(), expected)


@pytest.mark.parametrize("type", [name for name in QUANTIZED if name not in EXACT])
def test_rounded_mappings_round_scale_and_offset_once(type):
    raw = random_blocks(np.random.default_rng(10), type, 24)
    shape = (6, 4 * 256)
    q, scale, offset = unpack_blocks(type, raw)
    affine = to_affine(type, raw, shape)
    assert np.array_equal(affine.q, q.reshape(shape))
    for narrow, wide in ((affine.scale, scale), (affine.offset, offset)):
        if wide is None:
            assert narrow is None
            continue
        wide = wide.reshape(narrow.shape)
        error = np.abs(narrow.astype(np.float64) - wide)
        assert (error <= np.abs(wide) * 2.0**-11 + 2.0**-25).all()  # half a unit in the last place; subnormals
        assert np.array_equal(narrow, wide.astype(np.float16))


def test_q4_k_with_power_of_two_scales_is_exact():
    block = np.zeros(144, np.uint8)
    block[0:2] = np.float16([0.11]).view(np.uint8)
    block[2:4] = np.float16([0.07]).view(np.uint8)
    block[4:8] = 4  # scales 0..3; 4..7 stay 0
    block[8:12] = 8  # minima 0..3
    block[16:] = np.random.default_rng(2).integers(0, 256, 128)
    raw = block.tobytes()
    assert np.array_equal(to_affine("Q4_K", raw, (1, 256)).dequantize(), dequantize("Q4_K", raw, (1, 256)))
