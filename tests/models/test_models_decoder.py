"""The forward of every family against transformers' logits, and against itself: whole, chunked, by token, batched."""

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


@pytest.mark.exhaustive("beside PyTorch")
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


def dequantized(model, weights):
    """weights by role with those that `model` holds quantized replaced by what its planes stand for; and how many."""
    from zse.quant import pack

    members, count = {"qkv": "qkv", "gate_up": ("gate", "up")}, 0
    for name, weight in model.weights.items():
        if weight.scheme.kind != "affine":
            continue
        planes = {
            plane: np.frombuffer(tensor.view(), pack.NUMPY_DTYPE[tensor.dtype]).reshape(tensor.shape)
            for plane, tensor in weight.planes.items()
        }
        values = weight.scheme.dequantize(planes, *weight.shape)
        layer, _, stem = name.rpartition(".")
        at = 0
        for role in members.get(stem, (stem,)):
            role = f"{layer}.{role}" if layer else role
            rows = weights[role].shape[0]
            weights[role] = values[at : at + rows]
            at, count = at + rows, count + 1
    return weights, count


@pytest.mark.parametrize("quantize", ["int4", "int8"])
@pytest.mark.parametrize(
    "kv_dtype, activations, limit",
    [
        ("f32", "f32", 2e-5),  # the same f32 sums in another order
        ("f16", "f32", 0.01),  # keys and values are rounded to 2**-11 of themselves
        ("int8", "f32", 0.2),  # to 1/254 of the token's largest
        ("fp8", "f32", 0.4),  # to 2**-4 of themselves
        ("f16", "int8", 0.2),  # each activation is off by up to 1/254 of the largest of its 32
    ],
)
def test_quantized_model_is_near_its_oracle(device, tmp_path, quantize, kv_dtype, activations, limit):
    """The oracle runs on the dequantized planes, so that only activations and KV differ. limit: of the largest logit;
    the random model's attention is much sharper than a trained one's, which magnifies every error."""
    model = load(device, str(tiny.write("wide", tmp_path)), quantize=quantize)
    original = tiny.by_role("wide", model.config)
    weights, count = dequantized(model, dict(original))
    assert count == 2 * 7 + 2
    error = max(np.abs(weights[name] - original[name]).max() for name in weights)
    assert 0 < error < {"int4": 0.04, "int8": 0.003}[quantize]  # of weights in +-0.25: one step, clipped ranges
    ids = tiny.tokens("wide")
    expected = numpy_model.forward(model.config, weights, ids)
    scale = np.abs(expected).max()
    got = Session(device, model, activations=activations, kv_dtype=kv_dtype).run(ids)
    off = np.abs(got - expected).max() / scale
    assert off < limit
    if activations == "int8":
        assert off > 1e-4, "int8 activations left no trace: they were not used"
