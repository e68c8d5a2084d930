"""The forward of every family against transformers' logits, and against itself: whole, chunked, token by token, batched."""

from pathlib import Path

import numpy as np
import numpy_model
import pytest
import tiny
from session import Session, load

from zse.models.registry import config_from_hf

REFERENCES = np.load(Path(__file__).with_name("references.npz"))
# Sums of up to 128 f32 products in another order, through up to 7 layers, with logits up to 10.
NEAR = dict(rtol=2e-5, atol=5e-5)
# The kernel for one token sums over k in another order than the one for many.
SAME = dict(rtol=1e-5, atol=3e-5)

families = pytest.mark.parametrize("family", tiny.FAMILIES)


@pytest.fixture(params=tiny.FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def model(family, device, tmp_path):
    return load(device, str(tiny.write(family, tmp_path)))


def test_oracle_equals_transformers(family):
    config = config_from_hf("config.json", tiny.config(family))
    logits = numpy_model.forward(config, tiny.by_role(family, config), tiny.tokens(family))
    np.testing.assert_allclose(logits, REFERENCES[family], **NEAR)


def test_references_are_those_of_transformers(family):
    """Where transformers is installed, the committed logits are checked against it."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from make_references import logits
    np.testing.assert_allclose(logits(family), REFERENCES[family], rtol=1e-5, atol=1e-5)


def test_logits_equal_transformers(family, model, device):
    logits = Session(device, model).run(tiny.tokens(family))
    np.testing.assert_allclose(logits, REFERENCES[family], **NEAR)


def test_chunked_equals_whole(family, model, device):
    session, ids = Session(device, model), tiny.tokens(family)
    whole = session.run(ids)
    session.reset()
    chunked = session.run(ids, [7, 17, 2, 14])
    np.testing.assert_array_equal(chunked, whole)


def test_token_by_token_equals_whole(family, model, device):
    session, ids = Session(device, model), tiny.tokens(family)
    whole = session.run(ids)
    session.reset()
    np.testing.assert_allclose(session.run(ids, [1] * len(ids)), whole, **SAME)


def test_a_batch_equals_its_sequences_alone(family, model, device):
    """A prompt, a chunk and a decoded token in one step, logits of some of the tokens only."""
    ids = tiny.tokens(family)
    other = ids[::-1].copy()
    session = Session(device, model, rows=3)
    alone = session.run(ids, row=0), session.run(other, row=1)
    session.reset()
    session.step([(0, ids[:9]), (1, other[:20])])
    mixed = session.step([(0, ids[9:10]), (1, other[20:33]), (2, ids[:12])], wanted=[0, 13, 25], max_tokens=48)
    np.testing.assert_allclose(mixed, [alone[0][9], alone[1][32], alone[0][11]], **SAME)


@pytest.mark.parametrize("kv_dtype, activations", [("f16", "f32"), ("f16", "int8")])
def test_quantized_model_is_near_its_oracle(device, tmp_path, kv_dtype, activations):
    """int4 weights: the oracle runs on the dequantized planes, so that what differs is activations and KV alone."""
    from zse.quant import pack
    path = str(tiny.write("llama", tmp_path))
    model = load(device, path, quantize="int8")
    quantized = [name for name, weight in model.weights.items() if weight.scheme.kind == "affine"]
    assert "layers.0.qkv" in quantized and "layers.1.gate_up" in quantized
    config, weights = model.config, tiny.by_role("llama", model.config)
    for name in quantized:
        weight = model.weights[name]
        planes = {plane: np.frombuffer(tensor.view(), pack.NUMPY_DTYPE[tensor.dtype]).reshape(tensor.shape)
                  for plane, tensor in weight.planes.items()}
        values = pack.unpack(weight.scheme, planes, *weight.shape).dequantize()
        layer, _, stem = name.rpartition(".")
        at = 0
        for role in {"qkv": "qkv", "gate_up": ("gate", "up")}.get(stem, (stem,)):
            role = f"{layer}.{role}" if layer else role
            rows = weights[role].shape[0]
            weights[role] = values[at:at + rows]
            at += rows
    ids = tiny.tokens("llama")
    expected = numpy_model.forward(config, weights, ids)
    got = Session(device, model, activations=activations, kv_dtype=kv_dtype).run(ids)
    # f16 keys and values: 2**-11 of a value. int8 activations: half a step of 1/127 of the largest of 32, summed as noise.
    limit = {"f32": 0.01, "int8": 0.15}[activations]
    assert np.abs(got - expected).max() < limit
    if activations == "int8":
        assert np.abs(got - expected).max() > 1e-4, "the int8 path was not taken"
