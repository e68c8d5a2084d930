"""Checkpoints with act-order (GPTQ's desc_act): the weights in memory are the formula's bit for bit, and the logits those of a dense
copy of them; from the directory, from a `.zse`, with 8-bit activations, and with a GPU's kernels."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
from formats_build import safetensors
from session import Session, load
from test_emulated_model import load_emulated

from zse.errors import FormatError, UnsupportedError
from zse.formats.convert import convert
from zse.formats.matrix import Rows
from zse.formats.opening import open_model
from zse.formats.source import TensorInfo
from zse.formats.verify import verify
from zse.models import weight_plan
from zse.models.load import plan_model
from zse.models.weight_plan import FileTensor
from zse.plan import launch
from zse.runtime.cpu import CPUDevice
from zse_emulator import EmulateDevice

GROUP = 32
LAYERS = tiny.config("llama")["num_hidden_layers"]
# Modules that read the same input have the same order.
INPUTS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "mlp", "up_proj": "mlp"}
# Sums of f32 products in another order.
NEAR = dict(rtol=2e-5, atol=5e-5)


def packed(values: np.ndarray, bits: int) -> np.ndarray:
    """[R, C] → I32 [R * bits / 32, C]: a line of bits, lowest first, number by number."""
    out = np.zeros((values.shape[0] * bits // 32, values.shape[1]), np.uint32)
    for row, line in enumerate(values):
        for bit in range(bits):
            at = row * bits + bit
            out[at // 32] |= (line >> bit & 1).astype(np.uint32) << np.uint32(at % 32)
    return out.view(np.int32)


def quantized(name: str, shape, inputs: str, *, symmetric=True, trivial=False, bits=4):
    """(the stored tensors of a weight, the f32 matrix that they mean, with its offsets rounded to f16). inputs: weights with the
    same text have the same groups."""
    rng, (n, k) = np.random.default_rng(list(name.encode())), shape
    groups = np.arange(k, dtype=np.int32) // GROUP
    if not trivial:
        groups = np.random.default_rng(list(inputs.encode())).permutation(groups)
    q, zero = rng.integers(0, 1 << bits, (n, k)), np.full((n, k // GROUP), 1 << (bits - 1))
    if not symmetric:
        zero = rng.integers(1, 1 << bits, zero.shape)
    scale = ((0.01 + rng.random(zero.shape) * 0.04) * 16 / (1 << bits)).astype(np.float16)
    stem = name.removesuffix(".weight")
    stored = {
        f"{stem}.qweight": ("I32", packed(q.T, bits)),
        f"{stem}.qzeros": ("I32", packed(zero - 1, bits).T),
        f"{stem}.scales": ("F16", scale.T),
        f"{stem}.g_idx": ("I32", groups),
    }
    offset = (-zero * scale.astype(np.float32)).astype(np.float16).astype(np.float64)
    meant = q * scale.astype(np.float64)[:, groups] + offset[:, groups]
    return stored, meant.astype(np.float32)


def write(folder: Path, family="llama", dense=(), inputs=(), change=None, **options) -> tuple[str, str]:
    """Directories of a checkpoint and of a dense copy. dense: modules that are left alone; inputs: modules → with whom they share
    their order."""
    stored, plain = {}, {}
    for name, values in tiny.weights(family).items():
        plain[name], module = values, name.split(".")[-2]
        if "proj.weight" in name and module not in dense:
            share = name.split(".")[2] + dict(INPUTS | dict(inputs)).get(module, module)
            parts, plain[name] = quantized(name, values.shape, share, **options)
            stored |= parts
        else:
            stored[name] = ("F32", values)
    if change is not None:
        change(stored)
    method = dict(quant_method="gptq", bits=options.get("bits", 4), group_size=GROUP, desc_act=True)
    method["sym"] = options.get("symmetric", True)
    copy = folder.parent / f"{folder.name}-plain"
    folder.mkdir()
    copy.mkdir()
    entries = {
        name: (kind, array.shape, np.ascontiguousarray(array).tobytes()) for name, (kind, array) in stored.items()
    }
    (folder / "model.safetensors").write_bytes(safetensors(entries, {"format": "pt"}))
    (folder / "config.json").write_text(json.dumps(tiny.config(family) | {"quantization_config": method}))
    return str(folder), str(tiny.save(copy, tiny.config(family), plain, "F32"))


def logits(device, path, family="llama", **options):
    return Session(device, load(device, path), **options).run(tiny.tokens(family))


@pytest.fixture
def gathers(monkeypatch):
    """The orders of what a recording gathers."""
    found, record = [], launch.reorder.reorder

    def count(recorder, x, order, out):
        found.append(order.offset)
        record(recorder, x, order, out)

    monkeypatch.setattr(launch.reorder, "reorder", count)
    return found


@pytest.mark.parametrize(
    "count, options",
    [
        (3, {}),  # before q, k, v; before o; before gate, up. Rows of gate and up stand in down's order
        (3, dict(symmetric=False)),
        (3, dict(bits=3)),
        (0, dict(trivial=True)),
        (4, dict(dense=("gate_proj",))),
        (3, dict(dense=("v_proj",))),
        (4, dict(inputs={"k_proj": "own"})),
    ],
    ids=str,
)
def test_logits_of_a_dense_copy(count, options, gathers, device, tmp_path):
    """From the directory, and from a `.zse` of it, which has the same bytes in memory."""
    path, plain = write(tmp_path / "m", **options)
    expected = logits(device, plain)
    first = load(device, path)
    np.testing.assert_allclose(Session(device, first).run(tiny.tokens("llama")), expected, **NEAR)
    assert len(gathers) == count * LAYERS
    convert(path, str(tmp_path / "m.zse"))
    verify(str(tmp_path / "m.zse"))
    second = load(device, str(tmp_path / "m.zse"))
    assert bytes(first.buffer.view()) == bytes(second.buffer.view())
    # 8 bits of activations: 1 to 3 % of the logits here. Columns in a wrong order are all of them.
    got = Session(device, second, activations="int8").run(tiny.tokens("llama"))
    assert np.abs(got - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("options", [dict(bits=8), dict(bits=3), dict(bits=2), dict(trivial=True), {}], ids=str)
def test_weights_are_bit_for_bit_the_formula(options, tmp_path):
    """With rows of gate and up, and columns of down, in the order that they are given in memory."""
    path, plain = write(tmp_path / "m", **options)
    with open_model(path) as source, open_model(plain) as dense:
        for name, info in source.tensors.items():
            wanted = Rows(dense, dense.tensors[name], 0, info.shape[0]).f32()
            for role, axis in (("rows", 0), ("columns", 1)):
                if role in (info.parts or ()) and (axis == 0 or info.order is None):
                    groups = np.frombuffer(source.read(info.parts[role]), np.int32)
                    wanted = np.take(wanted, np.argsort(groups, kind="stable"), axis)
            assert np.array_equal(Rows(source, info, 0, info.shape[0]).f32(), wanted), name


def test_converted_anew_the_columns_are_the_inputs(device, tmp_path):
    path, plain = write(tmp_path / "m")
    convert(path, str(tmp_path / "m.zse"))
    convert(str(tmp_path / "m.zse"), str(tmp_path / "again.zse"), "f32")
    with open_model(tmp_path / "again.zse") as source:
        assert all(info.order is None for info in source.tensors.values())
    np.testing.assert_allclose(logits(device, str(tmp_path / "again.zse")), logits(device, plain), **NEAR)


def test_with_the_kernels_of_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(
        CPUDevice, "repacks", False
    )  # which fills the memory of the emulated GPU; test_repack.py has the kernels
    path, plain = write(tmp_path / "m")
    with EmulateDevice(like="sm_90a") as device:
        found = [
            Session(device, load_emulated(device, where)[0], max_tokens=16).run(tiny.tokens("llama")[:12])
            for where in (path, plain)
        ]
    # bf16 activations, weights in bf16 or exact.
    assert np.abs(found[0] - found[1]).max() < 0.03 * np.abs(found[1]).max()


def set_groups(values):
    def change(stored):
        stored["model.layers.1.self_attn.o_proj.g_idx"] = ("I32", np.asarray(values, np.int32))

    return change


WIDTH = tiny.shapes("llama")["model.layers.1.self_attn.o_proj.weight"][1]


@pytest.mark.parametrize(
    "values, reason",
    [
        ([0] * WIDTH, "1 groups, its scales have"),
        ([-1] + [0] * (WIDTH - 1), "a group that there cannot be"),
        ([2**31 - 1] + [0] * (WIDTH - 1), "a group that there cannot be"),
        ([1, *(column // GROUP for column in range(1, WIDTH))], "group 1 has 33 columns, the first has 31"),
        ([0] * (WIDTH - 1), "expected I32"),
    ],
)
def test_groups_that_cannot_be(values, reason, tmp_path):
    """Refused when the load is planned, before memory is taken."""
    path, _ = write(tmp_path / "m", change=set_groups(values))
    with pytest.raises(FormatError, match=reason), open_model(path) as source:
        plan_model(source)


def test_an_order_of_a_zse_that_is_none(tmp_path):
    """It would be read out of bounds."""
    path, _ = write(tmp_path / "m")
    out = tmp_path / "m.zse"
    convert(path, str(out))
    with open_model(out) as source:
        order = next(info.order for info in source.tensors.values() if info.order is not None)
    data = bytearray(out.read_bytes())
    data[order.offset : order.offset + 4] = (1 << 20).to_bytes(4, "little")
    out.write_bytes(data)
    with pytest.raises(FormatError, match="every column once"), open_model(out) as source:
        plan_model(source)


def test_an_expert_whose_columns_are_ordered_is_refused():
    """Also where the first one's are not."""
    role = SimpleNamespace(kind="matrix")
    stored = [
        FileTensor(role, TensorInfo(name, "int4-g32", (16, 32), None, 0, 0, order=order), 0)
        for name, order in (("a", None), ("b", 1))
    ]
    with pytest.raises(UnsupportedError, match="experts with ordered columns 'b'"):
        weight_plan._orders("m", {"layers.0.experts_down": stored})


def test_an_ordered_embedding_is_refused(tmp_path):
    def change(stored):
        parts, _ = quantized("model.embed_tokens.weight", stored.pop("model.embed_tokens.weight")[1].shape, "x")
        stored |= parts

    path, _ = write(tmp_path / "m", change=change)
    with (
        pytest.raises(UnsupportedError, match="an embedding or experts with ordered columns"),
        open_model(path) as source,
    ):
        plan_model(source)
