"""GGUF files of the types with a table, mixed as unsloth's dynamic quantizations mix them: they load, mean what their blocks mean, and
become a `.zse` of the same logits."""

import json

import numpy as np
import numpy_model
import pytest
import tiny
from formats_build import BLOCKS, random_blocks, safetensors
from formats_build import Tensor as GGUFTensor
from session import Session, load
from test_emulated_model import load_emulated
from test_load_gpu import PretendGPU
from test_models_load import gguf_of

from zse.formats import opening
from zse.formats.convert import convert
from zse.formats.gguf_blocks import dequantize, to_scheme
from zse.formats.matrix import Rows
from zse.formats.source import DENSE_TYPES
from zse.kernel import cache
from zse.kernels.matmul_affine_parts import FP4_CODES, FP4_MIDDLE
from zse.models import registry
from zse.models.load import load_model, plan_model
from zse.plan.rules import JOINED
from zse.quant.lut4 import FORMATS, TABLES
from zse.runtime.cpu import CPUDevice
from zse_emulator import EmulateDevice

MIXES = [
    dict(
        embed="IQ4_XS",
        q="IQ3_S",
        k="IQ3_S",
        v="Q4_K",
        o="IQ4_NL",
        gate="IQ2_XXS",
        up="IQ2_XXS",
        down="Q3_K",
        head="Q6_K",
    ),
    dict(
        embed="IQ2_S",
        q="IQ1_S",
        k="IQ1_M",
        v="IQ2_XS",
        o="IQ3_XXS",
        gate="IQ2_S",
        up="Q2_K",
        down="TQ1_0",
        head="IQ3_S",
    ),
    dict(embed="MXFP4", q="MXFP4", k="MXFP4", v="MXFP4", o="NVFP4", gate="Q1_0", up="TQ2_0", down="Q2_0", head="NVFP4"),
]
CONFIG = tiny.config("qwen2") | dict(
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    tie_word_embeddings=False,
)


@pytest.fixture
def file_of(tmp_path, monkeypatch):
    """(types by role) → a GGUF file of a model that is wide enough for blocks of 256, with random blocks of about the size of
    weights."""
    monkeypatch.setitem(tiny.CONFIGS, "wide_qwen2", CONFIG)
    rng = np.random.default_rng()

    def init(self, name, type, shape, data=None, **more):
        if data is None and type in BLOCKS and BLOCKS[type][0] > 1:
            count, state = int(np.prod(shape)) // BLOCKS[type][0], rng.bit_generator.state
            spread = dequantize(type, random_blocks(rng, type, count, 2.0**-9), shape).std()
            rng.bit_generator.state = state
            data = random_blocks(rng, type, count, 2.0**-9 * 0.06 / spread)
        made(self, name, type, shape, data, **more)

    made = GGUFTensor.__init__
    monkeypatch.setattr(GGUFTensor, "__init__", init)
    return lambda types: gguf_of("wide_qwen2", tmp_path, types)[0]


def meant(path, config) -> dict:
    """Every weight by its role, as the blocks say, with the rounded scales of K types."""
    weights = {}
    with opening.open_model(path) as source:
        family = registry.architecture(config.architecture)
        for role in family.roles(config):
            info = source.tensors[family.gguf_name(role.name)]
            raw, stored = source.read(info), info.type in DENSE_TYPES
            weights[role.name] = (
                dequantize(info.type, raw, info.shape) if stored else to_scheme(info.type, raw, info.shape).dequantize()
            )
    return weights


@pytest.mark.parametrize("types", MIXES, ids=["UD", "grids", "fp4"])
def test_a_mixed_file_has_the_logits_of_its_blocks(types, device, file_of, tmp_path):
    path = file_of(types)
    model = load(device, path)
    ids = tiny.tokens("wide_qwen2")
    expected = numpy_model.forward(model.config, meant(path, model.config), ids)
    size = np.abs(expected).max()
    got = Session(device, model).run(ids)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * size)
    # Integer activations round to 1 part in 127 of the largest of 32.
    rough = Session(device, model, activations="int8").run(ids)
    assert np.abs(rough - expected).mean() < 0.02 * size
    convert(path, tmp_path / "m.zse")
    again = load(device, str(tmp_path / "m.zse"))
    assert {name: weight.scheme for name, weight in again.weights.items()} == {
        name: weight.scheme for name, weight in model.weights.items()
    }
    assert np.array_equal(Session(device, again).run(ids), got)


@pytest.mark.parametrize("format", ["nvfp4-pack-quantized", "mxfp4-pack-quantized"])
def test_a_folder_of_4_bit_floats(format, device, tmp_path, monkeypatch):
    """compressed-tensors' layers of 4-bit floats beside a dense embedding and head."""
    method = {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"0": {"weights": {"num_bits": 4}}},
    }
    config, rng = CONFIG | {"quantization_config": method}, np.random.default_rng()
    entries = {}
    for name, shape in tiny.shapes_of(CONFIG).items():
        if "proj.weight" not in name:
            entries[name] = ("F32", shape, tiny.uniform(name, shape, 0.1).tobytes())
            continue
        rows, columns = shape
        entries[name + "_packed"] = ("U8", (rows, columns // 2), rng.bytes(rows * columns // 2))
        if format.startswith("nvfp4"):
            scale = rng.integers(8, 100, (rows, columns // 16)).astype(np.uint8)
            entries[name + "_scale"] = ("F8_E4M3", scale.shape, scale.tobytes())
            entries[name + "_global_scale"] = ("F32", (1,), np.float32([800]).tobytes())
        else:
            scale = rng.integers(118, 122, (rows, columns // 32)).astype(np.uint8)
            entries[name + "_scale"] = ("U8", scale.shape, scale.tobytes())
    (tmp_path / "model.safetensors").write_bytes(safetensors(entries, {"format": "pt"}))
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(device, str(tmp_path))
    weights = {}
    with opening.open_model(tmp_path) as source:
        for role in registry.architecture("qwen2").roles(model.config):
            info = source.tensors[registry.architecture("qwen2").hf_name(role.name, "model.")]
            plain = np.frombuffer(source.read(info), np.float32).reshape(info.shape) if info.parts is None else None
            weights[role.name] = Rows(source, info, 0, info.shape[0]).f32() if plain is None else plain
    ids = tiny.tokens("qwen2")
    expected = numpy_model.forward(model.config, weights, ids)
    np.testing.assert_allclose(Session(device, model).run(ids), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert {weight.scheme.kind for weight in model.weights.values()} == {"lut4", "dense"}


@pytest.mark.parametrize("types", MIXES, ids=["UD", "grids", "fp4"])
def test_a_gpu_gets_scales_of_16_bits(types, file_of):
    """On a device that calls itself one: indices as they are, every scale rounded to f16."""
    path = file_of(types)
    with PretendGPU(threads=2) as gpu, opening.open_model(path) as source:
        model = load_model(gpu, plan_model(source, family="gpu"))
        model.wait()
        exact = meant(path, model.config)
        for name, weight in model.weights.items():
            if weight.scheme.kind != "lut4":
                continue
            planes = {
                plane: np.frombuffer(gpu.read(tensor), {"u8": np.uint8, "f16": np.float16}[tensor.dtype]).reshape(
                    tensor.shape
                )
                for plane, tensor in weight.planes.items()
            }
            got, first = weight.scheme.dequantize(planes, *weight.shape), 0
            layer, short = name.rpartition(".")[0::2]
            for role in JOINED.get(short, (short,)):
                values = exact[f"{layer}.{role}" if layer else role]
                part = got[first : first + len(values)]
                first += len(values)
                assert (np.abs(part - values) <= np.abs(values) * 2.0**-11 + 2.0**-18).all(), name


def test_converted_for_a_gpu_a_file_is_copied(file_of, tmp_path):
    convert(file_of(MIXES[1]), tmp_path / "m.zse", layout="rows")
    with PretendGPU(threads=2) as gpu, opening.open_model(tmp_path / "m.zse") as source:
        plan = plan_model(source, family="gpu")
        assert all(part.info.scheme == matrix.scheme for matrix in plan.matrices for part in matrix.parts)
        load_model(gpu, plan).wait()
    ids = tiny.tokens("wide_qwen2")
    with CPUDevice(2) as cpu:  # scales of 16 bits have kernels there as well
        assert np.isfinite(Session(cpu, load(cpu, str(tmp_path / "m.zse"))).run(ids)).all()


def test_a_mixed_file_in_the_emulator(file_of):
    """The kernels for few tokens and the embedding; products of prompts are the operation's cases."""
    path = file_of(MIXES[0])
    device = EmulateDevice("sm_90a", cache.package_variants("sm_90a"))
    model, _ = load_emulated(device, path)
    ids = tiny.tokens("wide_qwen2")[:10]
    expected = numpy_model.forward(model.config, meant(path, model.config), ids, np.float64)
    got = Session(device, model, rows=1, max_tokens=16, context=32).run(ids, [5, 4, 1])
    # bf16 between the operations, as in test_emulated_model.py.
    assert np.abs(got - expected).max() < 0.02 * np.abs(expected).max()


def test_the_plan_says_what_two_bits_become(file_of):
    """Grids are stored as indices of 4 bits: the plan counts these, not the file's bytes."""
    with opening.open_model(file_of(MIXES[0])) as source:
        plan = plan_model(source)
        up = next(matrix for matrix in plan.matrices if matrix.name == "layers.0.gate_up")
        bits = 8 * up.scheme.nbytes(*up.shape) / (up.shape[0] * up.shape[1])
        assert up.scheme.name == "lut4-iq2-g32-i8" and bits == 4.3125
        assert sum(plan.memory_bytes.values()) >= sum(matrix.scheme.nbytes(*matrix.shape) for matrix in plan.matrices)


def test_scales_of_4_bit_floats_go_with_their_table():
    """Kernels without VNNI take the numbers plus FP4_MIDDLE as 5 bits, by how scales are stored."""
    tables = {table for table, code, _ in FORMATS if code in FP4_CODES}
    assert {max(map(abs, TABLES[table][0])) for table in tables} == {FP4_MIDDLE}
