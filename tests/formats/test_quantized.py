"""Checkpoints that others quantized: what each format means is written out here, number by number."""

import json

import numpy as np
import pytest
from formats_build import safetensors

from zse.errors import FormatError, UnsupportedError
from zse.formats.convert import convert
from zse.formats.matrix import Rows, planes_of_rows, prepare
from zse.formats.opening import open_model
from zse.formats.source import rope_row_order
from zse.formats.verify import verify
from zse.quant.pack import e4m3_to_f32, f32_to_bf16

N, K, GROUP = 48, 128, 64
NAME = "model.layers.0.mlp.up_proj"
AWQ_COLUMN = {0: 0, 1: 2, 2: 4, 3: 6, 4: 1, 5: 3, 6: 5, 7: 7}  # nibble of a word -> column of its eight


@pytest.fixture
def numbers():
    rng = np.random.default_rng(11)
    return {
        "q": rng.integers(0, 16, (N, K)),
        "zero": rng.integers(0, 16, (N, K // GROUP)),
        "scale": (0.01 + rng.random((N, K // GROUP)) * 0.1).astype(np.float16),
    }


def words(values: np.ndarray, axis: int, bits: int = 4, places=None) -> np.ndarray:
    """Packs along an axis, a loop over every number: value at column places[i] goes to field i."""
    per_word = 32 // bits
    values = np.moveaxis(values, axis, 0)
    out = np.zeros((values.shape[0] // per_word, *values.shape[1:]), np.uint32)
    for word in range(out.shape[0]):
        for field in range(per_word):
            column = places[field] if places else field
            out[word] |= values[word * per_word + column].astype(np.uint32) << np.uint32(bits * field)
    return np.ascontiguousarray(np.moveaxis(out, 0, axis)).view(np.int32)


def folder_of(tmp_path, tensors: dict, method: dict, key: str = "quantization_config"):
    folder = tmp_path / "hf"
    folder.mkdir(exist_ok=True)
    entries = {}
    for name, (dtype, array) in tensors.items():
        entries[name] = (dtype, tuple(array.shape), np.ascontiguousarray(array).tobytes())
    entries["model.norm.weight"] = ("F32", (4,), bytes(16))
    (folder / "model.safetensors").write_bytes(safetensors(entries, {"format": "pt"}))
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": 512, key: method})
    )
    return folder


def awq(tmp_path, n):
    return folder_of(
        tmp_path,
        {
            NAME + ".qweight": ("I32", words(n["q"].T, 1, places=AWQ_COLUMN)),
            NAME + ".qzeros": ("I32", words(n["zero"].T, 1, places=AWQ_COLUMN)),
            NAME + ".scales": ("F16", n["scale"].T),
        },
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    )


def gptq(tmp_path, n, *, zero=None, version="gptq", sym=False, g_idx=True, bits=4):
    stored = (n["zero"] if zero is None else zero) - (1 if version == "gptq" else 0)
    tensors = {
        NAME + ".qweight": ("I32", words(n["q"].T, 0, bits)),
        NAME + ".qzeros": ("I32", words(stored.T & ((1 << bits) - 1), 1, bits)),
        NAME + ".scales": ("F16", n["scale"].T),
    }
    if g_idx is not None:
        order = np.arange(K, dtype=np.int32) // GROUP
        tensors[NAME + ".g_idx"] = ("I32", order if g_idx is True else g_idx)
    return folder_of(
        tmp_path,
        tensors,
        {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": GROUP,
            "sym": sym,
            "desc_act": False,
            "checkpoint_format": version,
        },
    )


def meant(n, zero) -> np.ndarray:
    """(q - zero) * scale in double precision."""
    return (
        (n["q"].reshape(N, -1, GROUP) - np.asarray(zero, np.float64).reshape(N, -1, 1))
        * n["scale"].astype(np.float64)[:, :, None]
    ).reshape(N, K)


def read(folder):
    with open_model(folder) as source:
        info = source.tensors[NAME + ".weight"]
        assert set(source.tensors) == {NAME + ".weight", "model.norm.weight"}
        return info, Rows(source, info, 0, N).f32()


def check_rounded(got, n, zero) -> None:
    """q and scale are exact; the offset is rounded to f16, which is at most 2**-11 of zero * scale."""
    room = 2.0**-11 * np.repeat(np.abs(np.asarray(zero, np.float64) * n["scale"].astype(np.float64)), GROUP, axis=1)
    assert (np.abs(got - meant(n, zero)) <= room + 1e-9).all()


def test_awq(tmp_path, numbers):
    info, got = read(awq(tmp_path, numbers))
    assert info.type == "int4-g64" and info.shape == (N, K)
    check_rounded(got, numbers, numbers["zero"])


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_with_zero_points(version, tmp_path, numbers):
    # What the first version stores is one less, in four bits: 0 stands for 1, 15 for a zero point of 0.
    info, got = read(gptq(tmp_path, numbers, version=version))
    assert info.type == "int4-g64"
    check_rounded(got, numbers, numbers["zero"])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_symmetric_gptq_is_exact(version, bits, tmp_path, numbers):
    numbers["q"] = np.random.default_rng(3).integers(0, 1 << bits, (N, K))
    middle = np.full_like(numbers["zero"], 1 << (bits - 1))
    info, got = read(gptq(tmp_path, numbers, zero=middle, version=version, sym=True, bits=bits))
    assert info.type == f"int{bits}-g64-sym"
    assert np.array_equal(got, meant(numbers, middle).astype(np.float32))


def test_gptq_that_is_not_symmetric_after_all(tmp_path, numbers):
    with pytest.raises(FormatError, match="zero points are not in the middle"):
        read(gptq(tmp_path, numbers, sym=True))


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_that_names_the_wrong_version(tmp_path, version):
    """Asymmetric weights as GPTQ rounds them, written as one version and named as the other: off by one step."""
    n = 1024
    weights = np.random.default_rng(7).normal(size=(n, K // GROUP, GROUP))
    low, high = weights.min(axis=2), weights.max(axis=2)
    scale = ((high - low) / 15).astype(np.float16)
    zero = np.rint(-low / scale).clip(0, 15).astype(np.int64)
    q = np.rint(weights / scale[:, :, None] + zero[:, :, None]).clip(0, 15).astype(np.int64).reshape(n, K)
    folder = gptq(tmp_path, {"q": q, "zero": zero, "scale": scale}, version=version)
    with open_model(folder):
        pass  # the right name is believed
    other = {"gptq": "gptq_v2", "gptq_v2": "gptq"}[version]
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = other
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=f"zero points of checkpoint_format {version}, the config says {other}"):
        open_model(folder)


def packed_config(**weights):
    values = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": values}},
    }


def test_compressed_tensors_packed(tmp_path, numbers):
    info, got = read(
        folder_of(
            tmp_path,
            {
                NAME + ".weight_packed": ("I32", words(numbers["q"], 1)),
                NAME + ".weight_scale": ("BF16", f32_to_bf16(numbers["scale"].astype(np.float32))),
                NAME + ".weight_shape": ("I64", np.array([N, K])),
            },
            packed_config(),
        )
    )
    assert info.type == "int4-g64-sym"
    numbers["scale"] = (f32_to_bf16(numbers["scale"].astype(np.float32)).astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(got, meant(numbers, np.full((N, K // GROUP), 8)).astype(np.float32))


def test_compressed_tensors_with_zero_points(tmp_path, numbers):
    info, got = read(
        folder_of(
            tmp_path,
            {
                NAME + ".weight_packed": ("I32", words(numbers["q"], 1)),
                NAME + ".weight_scale": ("F16", numbers["scale"]),
                NAME + ".weight_zero_point": ("I32", words(numbers["zero"], 0)),
            },
            packed_config(symmetric=False),
        )
    )
    assert info.type == "int4-g64"
    check_rounded(got, numbers, numbers["zero"])


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_of_any_width(bits, symmetric, tmp_path, numbers):
    """A row is one line of bits, also where words end within a number. Widths without a scheme take the next one's room."""
    rng = np.random.default_rng(bits)
    numbers["q"], numbers["zero"] = rng.integers(0, 1 << bits, (N, K)), rng.integers(0, 1 << bits, (N, K // GROUP))
    stored = {
        NAME + ".weight_packed": ("I32", line_of_bits(numbers["q"], bits)),
        NAME + ".weight_scale": ("F16", numbers["scale"]),
        NAME + ".weight_shape": ("I64", np.array([N, K])),
    }
    if not symmetric:
        stored[NAME + ".weight_zero_point"] = ("I32", np.ascontiguousarray(line_of_bits(numbers["zero"].T, bits).T))
    info, got = read(folder_of(tmp_path, stored, packed_config(num_bits=bits, symmetric=symmetric)))
    width = next(width for width in (4, 5, 6, 8) if width >= bits)
    assert info.type == f"int{width}-g64" + "-sym" * symmetric
    if symmetric:
        middle = np.full((N, K // GROUP), 1 << (bits - 1))
        assert np.array_equal(got, meant(numbers, middle).astype(np.float32))
    else:
        check_rounded(got, numbers, numbers["zero"])


def line_of_bits(values: np.ndarray, bits: int) -> np.ndarray:
    """[R, C] → I32 [R, ceil(C * bits / 32)], bit by bit."""
    out = np.zeros((values.shape[0], -(-values.shape[1] * bits // 32)), np.uint32)
    for column in range(values.shape[1]):
        for bit in range(bits):
            at = column * bits + bit
            out[:, at // 32] |= (values[:, column] >> bit & 1).astype(np.uint32) << np.uint32(at % 32)
    return out.view(np.int32)


def int8_config(bits=8, **weights):
    values = {"num_bits": bits, "type": "int", "strategy": "channel", "symmetric": True} | weights
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": values, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    "strategy, shape", [("channel", (N, 1)), ("channel", (N,)), ("tensor", (1,)), ("group", (N, 2))]
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_int8(strategy, shape, bits, symmetric, tmp_path):
    """W8A8: a byte for each number, in two's complement, also where it has 4 bits."""
    rng, half = np.random.default_rng(4), 1 << (bits - 1)
    q = rng.integers(-half, half, (N, K)).astype(np.int8)
    scale = (0.01 + rng.random(shape)).astype(np.float16)
    groups = shape[1] if len(shape) == 2 else 1
    zero = rng.integers(-half, half, (N, groups)).astype(np.int8)
    stored = {
        NAME + ".weight": ("I8", q),
        NAME + ".weight_scale": ("BF16", f32_to_bf16(scale.astype(np.float32))),
        NAME + ".input_scale": ("F32", np.ones(1, np.float32)),
    }
    if not symmetric:
        stored[NAME + ".weight_zero_point"] = ("I8", zero)
    options = {"strategy": strategy, "symmetric": symmetric} | ({"group_size": GROUP} if strategy == "group" else {})
    info, got = read(folder_of(tmp_path, stored, int8_config(bits, **options)))
    assert info.type == f"int{bits}-" + ("g64" if strategy == "group" else "row") + "-sym" * symmetric
    wide = (f32_to_bf16(scale.astype(np.float32)).astype(np.uint32) << 16).view(np.float32).reshape(-1, groups)
    wide = np.broadcast_to(wide, (N, groups)).astype(np.float64)
    steps = (q - (0 if symmetric else zero.astype(np.float64).repeat(K // groups, axis=1))) * wide.repeat(
        K // groups, axis=1
    )
    room = 0 if symmetric else 2.0**-11 * 256 * wide.max()
    assert np.abs(got - steps).max() <= room
    convert(tmp_path / "hf", tmp_path / "m.zse")
    with open_model(tmp_path / "m.zse") as source:
        assert np.array_equal(Rows(source, source.tensors[NAME + ".weight"], 0, N).f32(), got)
    verify(tmp_path / "hf")


def test_compressed_tensors_of_several_kinds(tmp_path, numbers):
    """Which of the groups a weight belongs to shows in what it is stored as: no pattern of names is run."""
    rng = np.random.default_rng(9)
    eight, codes = rng.integers(0, 256, (N, K)), rng.integers(0, 0x70, (N, K)).astype(np.uint8)
    four = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
    config = packed_config() | {"format": "mixed-precision"}
    config["config_groups"] = {
        "a": {"targets": ["re:.*up_proj"], "format": "pack-quantized", "weights": four},
        "b": {
            "targets": ["re:.*down_proj"],
            "format": "pack-quantized",
            "weights": four | {"num_bits": 8, "group_size": 32},
        },
        "c": {"targets": ["Linear"], "format": "float-quantized", "weights": {"num_bits": 8, "type": "float"}},
    }
    down, gate, out = (NAME.replace("up", part) for part in ("down", "gate", "out"))
    scale8, row = (0.01 + rng.random((N, K // 32))).astype(np.float16), (0.5 + rng.random((N, 1))).astype(np.float32)
    folder = folder_of(
        tmp_path,
        {
            NAME + ".weight_packed": ("I32", words(numbers["q"], 1)),
            NAME + ".weight_scale": ("F16", numbers["scale"]),
            NAME + ".weight_shape": ("I64", np.array([N, K])),
            down + ".weight_packed": ("I32", words(eight, 1, 8)),
            down + ".weight_scale": ("F16", scale8),
            down + ".weight_shape": ("I64", np.array([N, K])),
            gate + ".weight": ("F8_E4M3", codes),
            gate + ".weight_scale": ("F32", row),
            out + ".weight": ("F16", numbers["scale"]),
        },
        config,
    )
    with open_model(folder) as source:
        types = {name.split(".")[-2]: info.type for name, info in source.tensors.items()}
        assert types == {
            "norm": "F32",
            "up_proj": "int4-g64-sym",
            "down_proj": "int8-g32-sym",
            "gate_proj": "fp8-row",
            "out_proj": "F16",
        }
        got = {name: Rows(source, source.tensors[name + ".weight"], 0, N).f32() for name in (NAME, down, gate)}
    assert np.array_equal(got[NAME], meant(numbers, np.full((N, K // GROUP), 8)).astype(np.float32))
    wide = scale8.astype(np.float64).repeat(32, axis=1)
    assert np.array_equal(got[down], ((eight - 128.0) * wide).astype(np.float32))
    assert np.array_equal(got[gate], e4m3_to_f32(codes) * row)


@pytest.mark.parametrize("type", ["U8", "F8_E8M0"])
def test_mxfp8_becomes_bf16(type, tmp_path):
    """A byte of scale, a power of two, for 32 columns: every product is a number of bf16."""
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 256, (N, K)).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0x30
    scale = rng.integers(97, 157, (N, K // 32)).astype(np.uint8)
    config = packed_config(num_bits=8, type="float", group_size=32) | {"format": "mxfp8-quantized"}
    folder = folder_of(tmp_path, {NAME + ".weight": ("F8_E4M3", codes), NAME + ".weight_scale": (type, scale)}, config)
    wanted = e4m3_to_f32(codes).astype(np.float64) * np.exp2(scale.astype(np.float64) - 127).repeat(32, axis=1)
    info, got = read(folder)
    assert info.type == "BF16" and np.array_equal(got, wanted)
    verify(folder)
    convert(folder, tmp_path / "m.zse")
    with open_model(tmp_path / "m.zse") as source:
        info = source.tensors[NAME + ".weight"]
        assert info.type == "bf16" and np.array_equal(Rows(source, info, 0, N).f32(), wanted)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_awq_gemv(group, tmp_path):
    """Words along the inputs in plain order; lines of scales and zero points are filled up to whole words, and to 4 words in groups
    of 32, 2 in groups of 64."""
    rng, k = np.random.default_rng(group), 384
    q, zero = rng.integers(0, 16, (N, k)), rng.integers(0, 16, (N, k // group))
    scale = (0.01 + rng.random(zero.shape)).astype(np.float16)
    width = {32: 4, 64: 2, 128: 1}[group]  # words, as AutoAWQ's calculate_zeros_width says for 384 inputs
    filled = [np.pad(array, ((0, 0), (0, 8 * width - k // group)), constant_values=7) for array in (zero, scale)]
    folder = folder_of(
        tmp_path,
        {
            NAME + ".qweight": ("I32", words(q, 1)),
            NAME + ".qzeros": ("I32", words(filled[0], 1)),
            NAME + ".scales": ("F16", filled[1]),
        },
        {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemv", "zero_point": True},
    )
    info, got = read(folder)
    assert info.type == f"int4-g{group}" and info.shape == (N, k)
    wide = scale.astype(np.float64).repeat(group, axis=1)
    wanted = (q - zero.astype(np.float64).repeat(group, axis=1)) * wide
    assert (np.abs(got - wanted) <= 2.0**-11 * 15 * wide + 1e-9).all()


@pytest.mark.parametrize(
    "scale_name, shape, expected",
    [
        ("weight_scale", (N, 1), "fp8-row"),
        ("weight_scale", (N,), "fp8-row"),
        ("weight_scale", (1,), "fp8-tensor"),
        ("weight_scale", (), "fp8-tensor"),
        ("weight_scale_inv", (), "fp8-tensor"),
        ("weight_scale_inv", (2, 3), "fp8-block"),
    ],
)
@pytest.mark.parametrize("type", ["F32", "BF16"])
def test_fp8(scale_name, shape, expected, type, tmp_path):
    rng = np.random.default_rng(5)
    n, k = (200, 272) if expected == "fp8-block" else (N, K)
    codes = rng.integers(0, 256, (n, k)).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0x30
    scale = (0.5 + rng.random(shape)).astype(np.float32)
    bits = f32_to_bf16(scale)
    if type == "BF16":
        scale = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(shape)
    method = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if expected == "fp8-block":
        method["weight_block_size"] = [128, 128]
    folder = folder_of(
        tmp_path,
        {
            NAME + ".weight": ("F8_E4M3", codes),
            f"{NAME}.{scale_name}": (type, bits if type == "BF16" else scale),
            NAME + ".input_scale": ("F32", np.ones((), np.float32)),
            NAME + ".activation_scale": ("BF16", f32_to_bf16(np.ones((), np.float32))),
        },
        method,
    )
    wide = np.kron(scale, np.ones((128, 128), np.float32))[:n, :k] if expected == "fp8-block" else scale.reshape(-1, 1)
    with open_model(folder) as source:
        info = source.tensors[NAME + ".weight"]
        assert info.type == expected
        assert np.array_equal(Rows(source, info, 0, n).f32(), e4m3_to_f32(codes) * wide)
    verify(folder)
    convert(folder, tmp_path / "m.zse")
    with open_model(tmp_path / "m.zse") as source:
        info = source.tensors[NAME + ".weight"]
        assert info.type == expected.replace("tensor", "row") and info.layout == "rows"
        assert np.array_equal(Rows(source, info, 0, n).f32(), e4m3_to_f32(codes) * wide)
    verify(tmp_path / "m.zse")


def fp8(tmp_path, n, scale_shape=(N, 1), name="weight_scale", block=None):
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 0x70, (N if block is None else 272, K)).astype(np.uint8)
    scale = (0.5 + rng.random(scale_shape)).astype(np.float32)
    method = {"quant_method": "fp8", "activation_scheme": "dynamic"} | ({"weight_block_size": block} if block else {})
    tensors = {NAME + ".weight": ("F8_E4M3", codes), f"{NAME}.{name}": ("F32", scale)}
    return folder_of(tmp_path, tensors, method)


def fp8_block(tmp_path, n):
    return fp8(tmp_path, n, (3, 1), "weight_scale_inv", [128, 128])


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("make", [awq, gptq, fp8, fp8_block])
def test_rows_in_another_order(make, converted, tmp_path, numbers):
    """Heads of 16 whose rows stand in pairs (GLM-4, Cohere): in parts, each row is what it is in the plain order."""
    path = make(tmp_path, numbers)
    if converted:
        convert(path, tmp_path / "m.zse")
        path = tmp_path / "m.zse"
    with open_model(path) as source:
        info = source.tensors[NAME + ".weight"]
        rows, scheme = info.shape[0], info.scheme
        order = rope_row_order(rows // 16, 16, 8)
        prepared = prepare(source, info)
        layout = info.layout if info.layout in ("r16", "rows") else "r16"
        expected = Rows(source, info, 0, rows).f32()[order]
        for start in range(0, rows, 128):
            stop = min(start + 128, rows)
            planes = planes_of_rows(Rows(source, info, start, stop, order, 16), scheme, layout, prepared=prepared)
            shape = stop - start, info.shape[1]
            got = scheme.dequantize(planes, *shape)
            assert np.array_equal(got, expected[start:stop])


def test_heads_across_fp8_blocks_cannot_be_put_in_order(tmp_path, numbers):
    with open_model(fp8_block(tmp_path, numbers)) as source:
        info = source.tensors[NAME + ".weight"]
        order = rope_row_order(1, 272)
        with pytest.raises(ValueError, match="cannot be put in order"):
            planes_of_rows(Rows(source, info, 0, 128, order, len(order)), info.scheme, "rows")


@pytest.mark.parametrize("make", [awq, gptq])
def test_converting_keeps_the_quantization(make, tmp_path, numbers):
    folder = make(tmp_path, numbers)
    report = convert(folder, tmp_path / "m.zse")
    assert "int4-g64" in report.schemes
    with open_model(folder) as before, open_model(tmp_path / "m.zse") as after:
        a, b = (Rows(source, source.tensors[NAME + ".weight"], 0, N).arrays() for source in (before, after))
        for part in ("q", "scale", "offset"):
            assert np.array_equal(getattr(a, part), getattr(b, part)), part
    verify(tmp_path / "m.zse")


@pytest.mark.parametrize(
    "method, reason",
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes bits 8"),
        ({"quant_method": "hqq"}, "hqq"),
        ({"quant_method": "awq", "version": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 5}, "bits 5"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 100}, "100"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size"),
        (packed_config(num_bits=9), "num_bits 9"),
        (packed_config(actorder="rows"), "actorder"),
        (packed_config(strategy="block"), "strategy 'block'"),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"a": {"weights": {}}}},
            "marlin-24",
        ),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({}, "quantization method"),
        (7, "not an object"),
    ],
)
def test_what_is_not_known_is_named(method, reason, tmp_path, numbers):
    folder = awq(tmp_path, numbers)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    if method == {}:
        open_model(folder).close()  # an empty object says nothing
        return
    with pytest.raises((UnsupportedError, FormatError), match=reason):
        open_model(folder)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"scales": ("F16", np.ones((K // GROUP, N - 8), np.float16))}, "shape"),
        ({"scales": ("I32", np.ones((K // GROUP, N), np.int32))}, "scales"),
        ({"scales": None}, "scales"),
        ({"qzeros": None}, "zero points"),
        ({"qzeros": ("I32", np.ones((K // GROUP, N // 8 + 1), np.int32))}, "zero points"),
        ({"qweight": ("F32", np.ones((K, N // 8), np.float32))}, "words"),
        ({"qweight": ("I32", np.ones((K - 16, N // 8), np.int32))}, "shape"),
    ],
)
def test_parts_that_do_not_fit(change, reason, tmp_path, numbers):
    n = numbers
    tensors = {
        "qweight": ("I32", words(n["q"].T, 1, places=AWQ_COLUMN)),
        "qzeros": ("I32", words(n["zero"].T, 1, places=AWQ_COLUMN)),
        "scales": ("F16", n["scale"].T),
    } | change
    folder = folder_of(
        tmp_path,
        {f"{NAME}.{part}": value for part, value in tensors.items() if value is not None},
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
    )
    with pytest.raises((FormatError, UnsupportedError), match=reason):
        open_model(folder)


def test_the_head_that_a_checkpoint_left_dense(tmp_path, numbers):
    head = np.random.default_rng(2).normal(size=(512, 128)).astype(np.float16)
    n = numbers
    folder = folder_of(
        tmp_path,
        {
            NAME + ".qweight": ("I32", words(n["q"].T, 1, places=AWQ_COLUMN)),
            NAME + ".qzeros": ("I32", words(n["zero"].T, 1, places=AWQ_COLUMN)),
            NAME + ".scales": ("F16", n["scale"].T),
            "lm_head.weight": ("F16", head),
            "model.other.weight": ("F16", head[:256]),
        },
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
    )
    convert(folder, tmp_path / "m.zse", head="int8", group_size=128)
    with open_model(tmp_path / "m.zse") as source:
        types = {name: info.type for name, info in source.tensors.items()}
        got = Rows(source, source.tensors["lm_head.weight"], 0, 512).f32()
    assert types == {
        NAME + ".weight": "int4-g64",
        "lm_head.weight": "int8-g128-sym",
        "model.norm.weight": "F32",
        "model.other.weight": "f16",
    }
    assert np.abs(got - head).max() < 0.02
