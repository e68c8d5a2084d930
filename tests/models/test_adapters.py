"""Adapters against models with the same adapter merged into their weights."""

import numpy as np
import pytest
import tiny
import tiny_adapters
from session import Session, load
from test_emulated_model import load_emulated

from zse.formats.convert import convert
from zse.kernel import cache
from zse.lora.targets import Targets, read_image
from zse.runtime.cpu import CPUDevice
from zse_emulator import EmulateDevice

# Numbers of the adapters are exact in f16, and merged weights are rounded to f32: sums of up to 128 f32 products in another
# order, through up to 4 layers, as where a model's logits are held against transformers'.
NEAR = dict(rtol=2e-5, atol=5e-5)
FAMILIES = [
    *("llama", "qwen2", "qwen3", "gemma3", "gemma2", "phi4_mini", "olmo3", "glm4", "cohere", "granite", "gemma4"),
    *("deepseek_v2_lite", "deepseek_v2", "qwen2_moe", "smollm3", "lfm2", "qwen3_5_moe", "granite_hybrid", "nemotron_h"),
]


def image(model, path, most=16):
    return read_image(str(path), Targets(model.config), most)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_merged_models(family, device, tmp_path):
    """Two adapters and none in one batch, in a prompt and token by token."""
    model = load(device, str(tiny_adapters.base(family, tmp_path / "base")))
    found = [tiny_adapters.adapter(family, 1), tiny_adapters.adapter(family, 2, rank=9, alpha=3.0)]
    images = [
        image(model, tiny_adapters.write(each, tmp_path / f"a{rank}", rank, alpha))
        for each, rank, alpha in ((found[0], 4, 6.0), (found[1], 9, 3.0))
    ]
    expected = [
        Session(device, load(device, str(tiny_adapters.merged(family, each, tmp_path / f"m{number}")))).run(
            tiny.tokens(family)
        )
        for number, each in enumerate(found)
    ]
    plain = Session(device, model).run(tiny.tokens(family))
    session = Session(device, model, rows=3, max_tokens=128, adapters=images)
    session.adapt(images[1].id, None, images[0].id)
    ids = tiny.tokens(family)
    first = session.step([(0, ids[:21]), (1, ids[:30]), (2, ids[:17])])
    got = [[first[:21]], [first[21:51]], [first[51:]]]
    at = [21, 30, 17]
    for _ in range(len(ids) - 30):
        step = session.step([(row, ids[at[row] : at[row] + 1]) for row in range(3)])
        for row in range(3):
            got[row].append(step[row : row + 1])
            at[row] += 1
    for logits, wanted in zip(got, (expected[1], plain, expected[0]), strict=True):
        logits = np.concatenate(logits)
        np.testing.assert_allclose(logits, wanted[: len(logits)], **NEAR)
    assert np.abs(expected[0] - plain).max() > 0.1, "the adapter changes nothing that shows"


def test_rows_without_an_adapter_have_the_bits_of_the_base(device, tmp_path):
    model = load(device, str(tiny_adapters.base("llama", tmp_path / "base")))
    one = image(model, tiny_adapters.write(tiny_adapters.adapter("llama", 1), tmp_path / "a"))
    session = Session(device, model, adapters=[one])
    session.adapt(one.id, None)
    ids = tiny.tokens("llama")
    both = session.step([(0, ids[:9]), (1, ids)])
    np.testing.assert_array_equal(both[9:], Session(device, model).run(ids))


@pytest.mark.parametrize("only", [("q_proj", "v_proj"), ("down_proj",), ("up_proj",), ("k_proj", "o_proj")])
@pytest.mark.parametrize("family", ["llama", "phi4_mini"])
def test_some_modules_alone(family, only, device, tmp_path):
    """Only the launches that these need are recorded."""
    if family == "phi4_mini":
        only = {"q_proj": ("qkv_proj",), "up_proj": ("gate_up_proj",)}.get(only[0], ("o_proj", "down_proj"))
    found = tiny_adapters.adapter(family, 3, only=only)
    model = load(device, str(tiny_adapters.base(family, tmp_path / "base")))
    one = image(model, tiny_adapters.write(found, tmp_path / "a"))
    merged = load(device, str(tiny_adapters.merged(family, found, tmp_path / "merged")))
    session = Session(device, model, adapters=[one])
    session.adapt(one.id, None)
    np.testing.assert_allclose(
        session.run(tiny.tokens(family)), Session(device, merged).run(tiny.tokens(family)), **NEAR
    )


@pytest.mark.parametrize("family", ["llama", "glm4"])
def test_on_a_quantized_model(family, device, tmp_path):
    """8 bits a weight and 8-bit activations, against the float64 reference of what the adapter adds: the logits move as those of the
    merged model do."""
    found = tiny_adapters.adapter(family, 4)
    base = str(tiny_adapters.base(family, tmp_path / "base"))
    merged = load(device, str(tiny_adapters.merged(family, found, tmp_path / "merged")))
    expected = Session(device, merged).run(tiny.tokens(family))
    model = load(device, base, quantize="int8")
    one = image(model, tiny_adapters.write(found, tmp_path / "a"))
    session = Session(device, model, activations="int8", adapters=[one])
    session.adapt(one.id, None)
    got = session.run(tiny.tokens(family))
    # As of quantized models without an adapter: weights and activations are off by up to 2^-8 of the largest of 32.
    assert np.abs(got - expected).mean() < 0.05 * np.abs(expected).mean()
    plain = Session(device, load(device, base)).run(tiny.tokens(family))
    assert np.abs(expected - plain).mean() > 0.1 * np.abs(expected).mean()


@pytest.mark.parametrize("family", ["glm4", "cohere", "phi4_mini"])
def test_on_a_converted_file(family, device, tmp_path):
    """Rows in pairs are put in order by the conversion; an adapter's are as the Hugging Face file has them."""
    found = tiny_adapters.adapter(family, 5)
    convert(str(tiny_adapters.base(family, tmp_path / "base")), str(tmp_path / "model.zse"))
    merged = load(device, str(tiny_adapters.merged(family, found, tmp_path / "merged")))
    model = load(device, str(tmp_path / "model.zse"))
    one = image(model, tiny_adapters.write(found, tmp_path / "a"))
    session = Session(device, model, adapters=[one])
    session.adapt(one.id, None)
    np.testing.assert_allclose(
        session.run(tiny.tokens(family)), Session(device, merged).run(tiny.tokens(family)), **NEAR
    )


@pytest.mark.parametrize("family", ["llama", "phi4_mini"])
def test_a_gpus_kernels_in_the_emulator(family, tmp_path):
    """Products that gate and add are taken apart or followed: bf16 inputs, a batch with two adapters and none, then a decode step."""
    device = EmulateDevice("sm_90a", cache.package_variants("sm_90a"))
    model, _ = load_emulated(device, str(tiny_adapters.base(family, tmp_path / "base")))
    found = [tiny_adapters.adapter(family, seed) for seed in (1, 2)]
    images = [image(model, tiny_adapters.write(each, tmp_path / f"a{n}")) for n, each in enumerate(found)]
    ids = tiny.tokens(family)[:9]
    session = Session(device, model, rows=3, adapters=images)
    session.adapt(images[1].id, images[0].id, None)
    logits = session.step([(row, ids[:8]) for row in range(3)])
    logits = [*(logits[8 * row : 8 * row + 8] for row in range(3)), session.step([(row, ids[8:]) for row in range(3)])]
    for row, each in enumerate((found[1], found[0], {})):
        with CPUDevice(2) as cpu:
            merged = load(cpu, str(tiny_adapters.merged(family, each, tmp_path / f"m{row}")))
            expected = Session(cpu, merged).run(ids)
        got = np.concatenate([logits[row], logits[3][row : row + 1]])
        # Activations, keys and values are rounded to 2**-9 of themselves, of the largest logit; an adapter moves logits by more than half of it.
        assert np.abs(got - expected).max() < 0.05 * np.abs(expected).max()
