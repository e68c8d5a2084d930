"""Checkpoints with 4-bit floats: what each format means is written out here, number by number."""

import numpy as np
import pytest
from test_quantized import NAME, K, N, folder_of, read

from zse.errors import FormatError, UnsupportedError
from zse.formats.convert import convert
from zse.formats.matrix import Rows, planes_of_rows
from zse.formats.opening import open_model
from zse.formats.verify import verify
from zse.quant.pack import e4m3_to_f32

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
GLOBAL = np.float32(437.25)


@pytest.fixture
def numbers():
    rng = np.random.default_rng()
    return {
        "nibbles": rng.integers(0, 16, (N, K)).astype(np.uint8),
        "e4m3": rng.integers(1, 127, (N, K // 16)).astype(np.uint8),
        "e8m0": rng.integers(100, 140, (N, K // 32)).astype(np.uint8),
    }


def packed(nibbles) -> np.ndarray:
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4


def values(nibbles) -> np.ndarray:
    """A sign in bit 3 of E2M1's code."""
    return np.where(nibbles & 8, -E2M1[nibbles & 7], E2M1[nibbles & 7])


def grouped(n, scale, size: int) -> np.ndarray:
    return values(n["nibbles"]) * np.repeat(scale.astype(np.float32), size, axis=1)


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}},
}


def nvfp4(tmp_path, n, **parts):
    tensors = {
        NAME + ".weight_packed": ("U8", packed(n["nibbles"])),
        NAME + ".weight_scale": ("F8_E4M3", n["e4m3"]),
        NAME + ".weight_global_scale": ("F32", np.array([GLOBAL])),
        NAME + ".input_global_scale": ("F32", np.array([GLOBAL])),
    }
    tensors |= {f"{NAME}.{part}": value for part, value in parts.items()}
    tensors = {name: value for name, value in tensors.items() if value}
    return folder_of(tmp_path, tensors, COMPRESSED | {"format": "nvfp4-pack-quantized"})


def modelopt(tmp_path, n, extra=()):
    tensors = {
        NAME + ".weight": ("U8", packed(n["nibbles"])),
        NAME + ".weight_scale": ("F8_E4M3", n["e4m3"]),
        NAME + ".weight_scale_2": ("F32", np.array(1 / GLOBAL, np.float32)),
        NAME + ".input_scale": ("F32", np.array(0.5, np.float32)),
    }
    return folder_of(tmp_path, tensors | dict(extra), {"quant_method": "modelopt", "quant_algo": "NVFP4"})


def mxfp4(tmp_path, n):
    tensors = {NAME + ".weight_packed": ("U8", packed(n["nibbles"])), NAME + ".weight_scale": ("U8", n["e8m0"])}
    return folder_of(tmp_path, tensors, COMPRESSED | {"format": "mxfp4-pack-quantized"})


def test_nvfp4_of_compressed_tensors(tmp_path, numbers):
    info, got = read(nvfp4(tmp_path, numbers))
    assert info.type == "lut4-fp4-g16-e4m3" and info.shape == (N, K)
    scale = e4m3_to_f32(numbers["e4m3"])
    assert np.array_equal(got, grouped(numbers, scale * (np.float32(1) / GLOBAL), 16))
    np.testing.assert_allclose(got, grouped(numbers, scale / GLOBAL, 16), rtol=2**-22)


def test_nvfp4_of_modelopt(tmp_path, numbers):
    info, got = read(modelopt(tmp_path, numbers))
    assert info.type == "lut4-fp4-g16-e4m3"
    factor = np.float32(1 / GLOBAL)
    assert np.array_equal(got, grouped(numbers, e4m3_to_f32(numbers["e4m3"]) * factor, 16))


def test_modelopt_names_its_method_in_a_file_of_its_own(tmp_path, numbers):
    folder = modelopt(tmp_path, numbers)
    (folder / "hf_quant_config.json").write_text(
        '{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}'
    )
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "vocab_size": 512}')
    assert read(folder)[0].type == "lut4-fp4-g16-e4m3"


def test_modelopt_has_layers_of_8_bits_and_dense_ones_beside(tmp_path, numbers):
    extra = {
        "b.weight": ("F8_E4M3", numbers["nibbles"][:, :64] + 40),
        "b.weight_scale": ("F32", np.array(0.25, np.float32)),
        "c.weight": ("F32", np.ones((2, 2), np.float32)),
    }
    with open_model(modelopt(tmp_path, numbers, extra)) as source:
        assert {name: info.type for name, info in source.tensors.items()} == {
            NAME + ".weight": "lut4-fp4-g16-e4m3",
            "b.weight": "fp8-tensor",
            "c.weight": "F32",
            "model.norm.weight": "F32",
        }


def test_mxfp4_of_compressed_tensors(tmp_path, numbers):
    info, got = read(mxfp4(tmp_path, numbers))
    assert info.type == "lut4-fp4-g32-e8m0"
    assert np.array_equal(got, grouped(numbers, np.exp2(numbers["e8m0"].astype(np.float32) - 127), 32))


def test_blocks_of_gpt_oss_are_a_stack_of_experts(tmp_path):
    rng, name = np.random.default_rng(), "model.layers.0.mlp.experts.gate_up_proj"
    nibbles = rng.integers(0, 16, (4, 32, 64)).astype(np.uint8)
    scales = rng.integers(100, 140, (4, 32, 2)).astype(np.uint8)
    tensors = {
        name + "_blocks": ("U8", packed(nibbles).reshape(4, 32, 2, 16)),
        name + "_scales": ("U8", scales),
        name + "_bias": ("F32", np.zeros((4, 32), np.float32)),
    }
    folder = folder_of(tmp_path, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    with open_model(folder) as source:
        assert set(source.tensors) == {name, name + "_bias", "model.norm.weight"}
        info = source.tensors[name]
        assert info.shape == (128, 64) and info.type == "lut4-fp4-g32-e8m0"
        expected = values(nibbles) * np.repeat(np.exp2(scales.astype(np.float32) - 127), 32, axis=2)
        assert np.array_equal(Rows(source, info, 0, 128).f32().reshape(4, 32, 64), expected)
        third = info.rows(64, 32)
        assert np.array_equal(Rows(source, third, 0, 32).f32(), expected[2]) and third.nbytes == info.nbytes // 4
        # Of an expert the planes are a range of those of all.
        scheme, whole = info.scheme, Rows(source, info, 0, 128).arrays().pack()
        third = Rows(source, info, 64, 96).arrays().pack()
        for plane in scheme.planes(128, 64):
            part, rows = third[plane.name].tobytes(), plane.nbytes // 4
            assert whole[plane.name].tobytes()[2 * rows : 3 * rows] == part


@pytest.mark.parametrize("make", [nvfp4, modelopt, mxfp4])
def test_converted_and_verified(make, tmp_path, numbers):
    folder = make(tmp_path, numbers)
    info, expected = read(folder)
    verify(folder)
    convert(folder, tmp_path / "m.zse")
    verify(tmp_path / "m.zse")
    converted, got = read(tmp_path / "m.zse")
    assert converted.type == info.type and np.array_equal(got, expected)


@pytest.mark.parametrize("order", [None, 16])
def test_rows_of_heads_may_change_places(order, tmp_path, numbers):
    with open_model(mxfp4(tmp_path, numbers)) as source:
        info = source.tensors[NAME + ".weight"]
        places = None if order is None else [row // order * order + (order - 1 - row % order) for row in range(N)]
        rows = Rows(source, info, 16, 48, places, order or 1)
        planes = planes_of_rows(rows, info.scheme, "r16")
        expected = Rows(source, info, 0, N).f32()[places or range(N)][16:48]
        assert np.array_equal(info.scheme.dequantize(planes, 32, K), expected)


WRONG = [
    (dict(weight_scale=None), "has no scale beside it"),
    (dict(weight_global_scale=None), "has no factor beside it"),
    (dict(weight_scale=("F8_E4M3", np.zeros((N, K // 32), np.uint8))), "expected F8_E4M3 of 384 numbers"),
    (dict(weight_scale=("F32", np.zeros((N, K // 16), np.float32))), "expected F8_E4M3 of 384 numbers"),
    (dict(weight_global_scale=("F32", np.ones(3, np.float32))), "expected F32 of 1 numbers"),
]


@pytest.mark.parametrize("parts, reason", WRONG)
def test_parts_that_do_not_fit(parts, reason, tmp_path, numbers):
    with pytest.raises(FormatError, match=reason):
        read(nvfp4(tmp_path, numbers, **parts))


@pytest.mark.parametrize("value, reason", [(0.0, "the scale of the whole weight is 0"), (np.nan, "is nan")])
def test_a_factor_that_is_none(value, reason, tmp_path, numbers):
    folder = nvfp4(tmp_path, numbers, weight_global_scale=("F32", np.array([value], np.float32)))
    with pytest.raises(FormatError, match=reason):
        verify(folder)


def test_a_scale_with_a_sign(tmp_path, numbers):
    numbers["e4m3"][3, 5] = 0x81
    with pytest.raises(FormatError, match="a scale is negative or NaN"):
        verify(nvfp4(tmp_path, numbers))


def test_other_methods_are_named(tmp_path, numbers):
    folder = modelopt(tmp_path, numbers, {NAME + ".pre_quant_scale": ("F32", np.ones(K, np.float32))})
    with pytest.raises(UnsupportedError, match="pre_quant_scale"):
        open_model(folder)
    folder = folder_of(tmp_path, {}, {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"})
    with pytest.raises(UnsupportedError, match="quant_algo 'W4A8_AWQ' is not supported; supported: NVFP4, FP8"):
        open_model(folder)
