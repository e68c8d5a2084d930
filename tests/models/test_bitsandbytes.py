"""bitsandbytes' 4-bit weights: what they mean is written out here, number by number, as its own dequantize_4bit gives them.

Compared once with bitsandbytes 0.50.2 itself: nf4 and fp4, with and without double quantization, in bf16, f16 and f32, 160 x 320
numbers each: all bits equal."""

import json

import numpy as np
import pytest
import tiny  # first: it finds tests/formats
from formats_build import safetensors
from session import Session, load
from test_quantized import NAME, folder_of

from zse.errors import FormatError, UnsupportedError
from zse.formats.convert import convert
from zse.formats.matrix import Rows, planes_of_rows
from zse.formats.opening import open_model
from zse.formats.verify import verify
from zse.quant.pack import narrow, widen

# QLoRA (arXiv 2305.14314), appendix E: quantiles of a normal distribution.
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def stored(rng, shape, dtype="bfloat16", nested=True, kind="nf4", name=NAME + ".weight", size=0.1):
    """(tensors of a weight, what it means in f32). Factors around `size`."""
    n, k = shape
    index, blocks = rng.integers(0, 16, n * k), -(-n * k // 64)
    state = {"quant_type": kind, "blocksize": 64, "dtype": dtype, "shape": [n, k]}
    tensors = {
        name: ("U8", (index[0::2] << 4 | index[1::2]).astype(np.uint8)[:, None]),
        f"{name}.quant_map": ("F32", NF4),
    }
    if nested:
        levels = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        code, above = rng.integers(0, 256, blocks), rng.uniform(0.1, 0.5, -(-blocks // 256)).astype(np.float32) * size
        offset = 0.5 * size
        factors = [np.float32(levels[code[i]] * above[i // 256]) + np.float32(offset) for i in range(blocks)]
        tensors |= {
            f"{name}.absmax": ("U8", code.astype(np.uint8)),
            f"{name}.nested_absmax": ("F32", above),
            f"{name}.nested_quant_map": ("F32", levels),
        }
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    else:
        factors = rng.uniform(0.5, 1.5, blocks).astype(np.float32) * np.float32(size)
        tensors[f"{name}.absmax"] = "F32", factors
    tensors[f"{name}.quant_state.bitsandbytes__{kind}"] = "U8", np.frombuffer(json.dumps(state).encode(), np.uint8)
    exact = NF4[index] * np.asarray(factors, np.float32)[np.arange(n * k) // 64]
    return tensors, widen(narrow(exact, DTYPES[dtype]), DTYPES[dtype]).reshape(n, k)


def in_four_bits(tensors, name=NAME + ".weight"):
    """f32 [N, K]: what a stored weight means with a table in 8 bits and factors in f16, written out here as well."""
    part = {key.removeprefix(name): values for key, (_, values) in tensors.items()}
    state = json.loads(bytes(next(values for key, values in part.items() if "quant_state" in key)))
    factors = part[".absmax"]
    if "nested_blocksize" in state:
        factors = part[".nested_quant_map"][factors] * part[".nested_absmax"].repeat(256)[: len(factors)]
        factors = factors + np.float32(state["nested_offset"])
    index = np.stack([part[""] >> 4, part[""] & 15], axis=1).ravel()
    table = np.rint(NF4 * np.float32(123.25)).astype(np.float32)
    scale = (factors / np.float32(123.25)).astype(np.float16).astype(np.float32)
    return (table[index] * scale.repeat(64)[: index.size]).reshape(state["shape"])


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_numbers_are_those_of_the_formula(dtype, nested, tmp_path):
    """160 x 320: blocks of 64 within rows; more than 256 of them. In 4 bits they are a table's of 8 bits, near the exact."""
    tensors, meant = stored(np.random.default_rng(), (160, 320), dtype, nested)
    rounded = in_four_bits(tensors)
    # The table is 0.0029 of a block's factor off, the factor 2**-12 in f16, the exact number 2**-8 in its dtype.
    assert np.abs(rounded - meant).max() <= 0.15 * (0.0029 + 2**-12 + 2**-8)
    folder = folder_of(tmp_path, tensors, CONFIG)
    with open_model(folder) as source:
        info = source.tensors[NAME + ".weight"]
        assert set(source.tensors) == {NAME + ".weight", "model.norm.weight"}
        assert info.type == "lut4-nf4-g32" and info.shape == (160, 320)
        got = Rows(source, info, 0, 160).f32()
        assert np.array_equal(Rows(source, info, 48, 96).f32(), meant[48:96])
        order = np.arange(160).reshape(-1, 2, 8).swapaxes(1, 2).reshape(-1)
        assert np.array_equal(Rows(source, info, 32, 64, order, 16).f32(), meant[order][32:64])
        few = Rows(source, info, 32, 64).arrays()
        as_planes = planes_of_rows(Rows(source, info, 32, 64, order, 16), info.scheme, "r16")
        assert np.array_equal(info.scheme.unpack(as_planes, 32, 320).dequantize(), rounded[order][32:64])
    assert got.tobytes() == meant.tobytes()
    assert np.array_equal(few.dequantize(), rounded[32:64])
    verify(folder)
    convert(folder, tmp_path / "m.zse")
    with open_model(tmp_path / "m.zse") as source:
        info = source.tensors[NAME + ".weight"]
        assert info.type == "lut4-nf4-g32" and np.array_equal(Rows(source, info, 0, 160).f32(), rounded)


def test_blocks_that_do_not_end_with_rows(tmp_path):
    tensors, meant = stored(np.random.default_rng(), (24, 100), nested=False, kind="fp4")
    with open_model(folder_of(tmp_path, tensors, CONFIG)) as source:
        info = source.tensors[NAME + ".weight"]
        assert info.type == "BF16"  # no groups of 32 columns, and fp4
        parts = [Rows(source, info, start, start + 8).f32() for start in (0, 8, 16)]
    assert np.array_equal(np.concatenate(parts), meant)


def test_a_block_that_is_said_to_be_huge(tmp_path):
    """It costs no memory: one factor for all numbers."""
    rng, name = np.random.default_rng(2), NAME + ".weight"
    tensors, _ = stored(rng, (16, 32), "float32", nested=False)
    state = {"quant_type": "nf4", "blocksize": 1 << 39, "dtype": "float32", "shape": [16, 32]}
    tensors[f"{name}.quant_state.bitsandbytes__nf4"] = "U8", np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors[f"{name}.absmax"] = "F32", np.array([2], np.float32)
    words = tensors[name][1].ravel()
    with open_model(folder_of(tmp_path, tensors, CONFIG)) as source:
        got = Rows(source, source.tensors[name], 0, 16).f32()
    assert np.array_equal(got.ravel(), 2 * NF4[np.stack([words >> 4, words & 15], axis=1).ravel()])


def test_a_model_runs(device, tmp_path):
    """As the same model with the numbers that the 4 bits stand for."""
    rng, family = np.random.default_rng(4), "llama"
    entries, dense = {}, {}
    for name, values in tiny.weights(family).items():
        if values.ndim == 2 and "proj" in name:
            tensors, _ = stored(rng, values.shape, name=name, size=0.3)
            dense[name] = in_four_bits(tensors, name)
            entries |= {key: (type, data.shape, data.tobytes()) for key, (type, data) in tensors.items()}
        else:
            dense[name] = widen(narrow(values, "bf16"), "bf16")
            entries[name] = "BF16", values.shape, tiny.to_bf16(dense[name]).tobytes()
    tiny.save(tmp_path, tiny.config(family), dense, "F32")
    expected = Session(device, load(device, str(tmp_path))).run(tiny.tokens(family))
    (tmp_path / "config.json").write_text(json.dumps(tiny.config(family) | {"quantization_config": CONFIG}))
    (tmp_path / "model.safetensors").write_bytes(safetensors(entries, {"format": "pt"}))
    model = load(device, str(tmp_path))
    got = Session(device, model).run(tiny.tokens(family))
    assert np.abs(got - expected).max() <= 0.02 * np.abs(expected).max()


@pytest.mark.parametrize(
    "part, value, reason",
    [
        ("absmax", None, "has no absmax beside it"),
        ("nested_absmax", None, "has no nested_absmax beside it"),
        ("quant_map", ("F32", np.zeros(15, np.float32)), "expected F32 of 16 numbers"),
        ("absmax", ("F32", np.zeros(160 * 5, np.float32)), "expected U8 of 800 numbers"),
        ("", ("U8", np.zeros(7, np.uint8)), "expected U8 of 25600 numbers"),
        ("", None, "there is no .*weight beside it"),
        ("quant_state.bitsandbytes__nf4", ("U8", np.frombuffer(b"{", np.uint8)), "is no JSON with shape"),
        ("quant_state.bitsandbytes__nf4", ("U8", np.frombuffer(b"[1]", np.uint8)), "is no JSON with shape"),
        (
            "quant_state.bitsandbytes__nf4",
            ("U8", np.frombuffer(b'{"shape": [3, -1], "blocksize": 64, "dtype": "float16"}', np.uint8)),
            "numbers that are none",
        ),
        (
            "quant_state.bitsandbytes__nf4",
            ("U8", np.frombuffer(b'{"shape": [3, 3], "blocksize": 64, "dtype": "float16"}', np.uint8)),
            "even number of columns",
        ),
        ("quant_state.bitsandbytes__nf4", ("U8", np.zeros(5000, np.uint8)), "expected U8 of JSON"),
    ],
)
def test_parts_that_do_not_fit(part, value, reason, tmp_path):
    tensors, _ = stored(np.random.default_rng(1), (160, 320))
    key = f"{NAME}.weight.{part}".rstrip(".")
    tensors[key] = value
    folder = folder_of(tmp_path, {name: entry for name, entry in tensors.items() if entry is not None}, CONFIG)
    with pytest.raises(FormatError, match=reason):
        open_model(folder)


def test_kinds_that_are_not_known(tmp_path):
    tensors, _ = stored(np.random.default_rng(1), (160, 320), kind="af4")
    with pytest.raises(UnsupportedError, match="kind of 4-bit weights 'af4'.*nf4"):
        open_model(folder_of(tmp_path, tensors, CONFIG))
