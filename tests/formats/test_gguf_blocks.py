"""GGUF blocks: dequantization against the `gguf` package, the mapping onto affine groups against the formulas."""

import gguf
import numpy as np
import pytest
from formats_build import Tensor, random_blocks
from formats_build import gguf as gguf_file
from gguf import quants

from zse.errors import FormatError
from zse.formats.ggml import BLOCKS, EXACT, ROUNDED, SCHEMES
from zse.formats.gguf_blocks import dequantize, to_affine, to_scheme, unpack_blocks
from zse.formats.iq_grids import grid
from zse.formats.matrix import Rows
from zse.formats.opening import open_model
from zse.formats.source import DENSE_TYPES

QUANTIZED = [name for name in BLOCKS if name not in DENSE_TYPES]
IN_PACKAGE = [type for type in QUANTIZED if type not in ("Q1_0", "Q2_0")]  # gguf 0.19 knows the others


@pytest.mark.parametrize("type", IN_PACKAGE)
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
    found, shape = to_scheme(type, raw, (12, 16 * elements)), (12, 16 * elements)
    assert found.scheme == SCHEMES[type]
    expected = dequantize(type, raw, shape)
    # Equal as numbers: -0.0 (scale * 0 with a negative scale) may become 0.0.
    assert np.array_equal(found.dequantize(), expected)
    assert np.array_equal(found.scheme.dequantize(found.pack(), *shape), expected)


@pytest.mark.parametrize("type", [*ROUNDED, "Q4_K", "Q5_K", "Q6_K"])
def test_rounded_mappings_round_scale_and_offset_once(type):
    """K types as a GPU has them."""
    raw = random_blocks(np.random.default_rng(10), type, 24)
    shape = (6, 4 * 256)
    q, scale, offset = unpack_blocks(type, raw)
    affine = to_affine(type, raw, shape) if type in ROUNDED else to_scheme(type, raw, shape).narrowed()
    assert affine.scheme == SCHEMES[type].loaded("gpu")
    assert np.array_equal(affine.q, q.reshape(shape))
    for narrow, wide in ((affine.scale, scale), (affine.offset, offset)):
        if wide is None:
            assert narrow is None
            continue
        wide = wide.reshape(narrow.shape)
        error = np.abs(narrow.astype(np.float64) - wide)
        assert (error <= np.abs(wide) * 2.0**-11 + 2.0**-25).all()  # half a unit in the last place; subnormals
        assert np.array_equal(narrow, wide.astype(np.float16))


@pytest.mark.parametrize("type", ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M"])
def test_every_point_of_the_grids(type):
    known = getattr(quants, type)
    known.init_grid()
    levels = np.array(known.grid_map, np.float32)
    assert np.array_equal(levels[grid(type)], known.grid.reshape(known.grid_shape))


@pytest.mark.parametrize("type, size", [("Q1_0", 128), ("Q2_0", 64)])
def test_types_newer_than_the_package(type, size):
    """llama.cpp's pull requests 21273 and 24448: d for a set bit, else -d; (q - 1) d, lowest bits first."""
    raw = np.frombuffer(random_blocks(np.random.default_rng(11), type, 40), np.uint8).reshape(40, 18)
    width, expected = 128 // size, np.empty((40, size), np.float32)
    for block, row in zip(raw, expected, strict=True):
        d = np.float32(block[:2].view(np.float16)[0])
        for j in range(size):
            q = int(block[2 + j * width // 8]) >> j * width % 8 & (1 << width) - 1
            row[j] = d * np.float32(q - 1 if width == 2 else 2 * q - 1)
    assert np.array_equal(dequantize(type, raw.tobytes(), (40, size)), expected)


def test_a_stack_of_nvfp4_has_a_factor_for_each_expert(tmp_path):
    rng, factors = np.random.default_rng(), np.float32([2, 0.5, 3])
    raw = random_blocks(rng, "NVFP4", 3 * 16 * 2)
    tensors = [Tensor("blk.0.ffn_up_exps.weight", "NVFP4", (3, 16, 128), raw), Tensor("b.weight", "NVFP4", (2, 64))]
    tensors += [Tensor("blk.0.ffn_up_exps.scale", "F32", (3,), factors.tobytes())]
    (tmp_path / "m.gguf").write_bytes(bytes(gguf_file([], tensors)))
    plain = dequantize("NVFP4", raw, (3, 16, 128))
    with open_model(tmp_path / "m.gguf") as source:
        info = source.tensors["blk.0.ffn_up_exps.weight"]
        assert np.array_equal(Rows(source, info, 0, 3).f32(), plain * factors[:, None, None])
        flat = info._replace(shape=(48, 128))
        assert np.array_equal(
            Rows(source, flat, 10, 40).f32(), (plain * factors[:, None, None]).reshape(48, 128)[10:40]
        )
        assert np.array_equal(Rows(source, flat.rows(24, 8), 0, 8).f32(), plain[1, 8:] * factors[1])
    tensors[-1] = Tensor("blk.0.ffn_up_exps.scale", "F32", (2,))
    (tmp_path / "m.gguf").write_bytes(bytes(gguf_file([], tensors)))
    with pytest.raises(FormatError, match="expected one F32"):
        open_model(tmp_path / "m.gguf")


def test_q4_k_with_power_of_two_scales_is_exact():
    block = np.zeros(144, np.uint8)
    block[0:2] = np.float16([0.11]).view(np.uint8)
    block[2:4] = np.float16([0.07]).view(np.uint8)
    block[4:8] = 4  # scales 0..3; 4..7 stay 0
    block[8:12] = 8  # minima 0..3
    block[16:] = np.random.default_rng(2).integers(0, 256, 128)
    raw = block.tobytes()
    exact = dequantize("Q4_K", raw, (1, 256))
    assert np.array_equal(to_scheme("Q4_K", raw, (1, 256)).narrowed().dequantize(), exact)
