"""Calibrated quantization: what the engine's forward says of the inputs of products, and what rounding by it costs a model."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy_model
import pytest
import tiny
import tiny_families
from test_experts import wide

from zse.bench.perplexity import TEXT, perplexity
from zse.cli.main import main
from zse.engine import calibrate
from zse.engine.calibrate import Calibration
from zse.errors import ConfigError, FormatError, UnsupportedError
from zse.formats.convert import convert
from zse.formats.opening import open_model
from zse.models.registry import config_from_hf
from zse.quant import gptq

READS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")  # the first of what reads one input
TOKENS = 384  # that are predicted
DOCS = Path(__file__).parents[2] / "docs"


def use_tokens(monkeypatch, ids):
    tokenizer = SimpleNamespace(adds_bos=False, bos_id=None, encode=lambda text, **_: list(ids))
    monkeypatch.setattr(calibrate, "load_tokenizer", lambda source: tokenizer)
    monkeypatch.setattr(calibrate, "CHUNK", tiny.TOKENS)


def opened(family, folder, monkeypatch, ids):
    """A Calibration of a tiny model over these tokens, of all matrices of its layers."""
    source = open_model(str(tiny.write(family, folder)))
    use_tokens(monkeypatch, ids)
    names = {name for name, info in source.tensors.items() if ".layers." in name and len(info.shape) == 2}
    return Calibration(source, names, "", tokens=2 * tiny.TOKENS)


def seen(config, weights, chunks):
    """H of what each product reads in the reference's forward, in its order."""
    sums: list = []
    for ids in chunks:
        read: list = []
        numpy_model.forward(config, weights, ids, np.float64, lambda x, read=read: read.append(x) or x)
        squares = [x.T @ x for x in read]
        sums = [a + b for a, b in zip(sums, squares, strict=True)] if sums else squares
    return sums


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_inputs_are_those_of_the_forward(family, tmp_path, monkeypatch):
    """Two chunks, of which a rest is left out; the second layer reads what the first gives as it was rounded."""
    config = config_from_hf("config.json", tiny.config(family))
    weights, first = tiny.by_role(family, config), tiny.tokens(family)
    second = first[::-1].copy()
    calibration = opened(family, tmp_path, monkeypatch, [*first, *second, 5, 6])
    assert calibration.num_tokens == 2 * tiny.TOKENS
    changed = np.rint(weights["layers.0.o"] * 8) / 8
    expected = seen(config, weights | {"layers.0.o": changed}, [first, second])
    for layer in range(config.num_layers):
        names = [f"model.layers.{layer}.{name}.weight" for name in READS]
        assert calibration.comes_next(names[0])
        calibration.enter(names[0])
        assert not any(map(calibration.comes_next, names))
        if layer == 0:
            before = seen(config, weights, [first, second])
        for number, name in enumerate(names):
            found = calibration.inputs(name)
            meant = gptq.inputs_of((before if layer == 0 else expected)[4 * layer + number])
            np.testing.assert_allclose(found.weight, meant.weight, rtol=1e-4, atol=1e-6)
            # The damping keeps the condition of H below 100 K, so 2**-24 of an input is some 1e-4 of U.
            assert np.abs(found.upper - meant.upper).max() < 1e-3 * np.abs(meant.upper).max()
        if layer == 0:
            calibration.rounded(names[1], 0, changed[:16])
            calibration.rounded(names[1], 16, changed[16:])
    assert calibration.inputs("model.embed_tokens.weight") is None
    calibration.close()


@pytest.mark.parametrize("write", [tiny_families.write, tiny_families.write_gguf])
def test_experts_are_rounded_to_nearest(write, tmp_path, monkeypatch):
    """The products beside them are not; the router stays as it is."""
    use_tokens(monkeypatch, tiny.tokens("qwen3_moe"))
    source, files = wide(tmp_path, write), [str(tmp_path / name) for name in ("nearest.zse", "calibrated.zse")]
    convert(source, files[0], "int4")
    convert(source, files[1], "int4", calibrate=partial(Calibration, text=""))
    with open_model(files[0]) as nearest, open_model(files[1]) as calibrated:
        differ = {name for name, info in nearest.tensors.items() if info.crc32 != calibrated.tensors[name].crc32}
        assert differ and not [name for name in differ if "exp" in name or "gate_inp" in name or "embed" in name]
        layers = {name for name, info in nearest.tensors.items() if "layers." in name or "blk." in name}
        assert {name for name in layers if "attn_q.w" in name or "q_proj" in name} <= differ


def test_what_is_refused(tmp_path, monkeypatch, capsys):
    with pytest.raises(ConfigError, match="to calibrate on has 39 tokens, and 40 are the least"):
        opened(tiny.FAMILIES[0], tmp_path, monkeypatch, range(3, 42))
    source = str(tiny.write(tiny.FAMILIES[0], tmp_path))
    with pytest.raises(ConfigError, match="nothing to calibrate"):
        convert(source, tmp_path / "o.zse", "f16", calibrate=partial(Calibration, text=""))
    with pytest.raises(FormatError):  # without a tokenizer there is no text
        monkeypatch.undo()
        convert(source, tmp_path / "o.zse", "int4", calibrate=partial(Calibration, text="x"))
    words = ["convert", source, str(tmp_path / "o.zse"), "--quant"]
    assert main([*words, "f16", "--calibrate", __file__]) == main([*words, "int4", "--calibrate-tokens", "4096"]) == 2
    assert "goes with --quant int4" in (told := capsys.readouterr().err) and "goes with --calibrate FILE" in told
    monkeypatch.setattr("zse.models.load.plan_model", lambda source: None)
    encoder = SimpleNamespace(path="e", tensors={})
    monkeypatch.setattr(
        calibrate,
        "plan_model",
        lambda _: SimpleNamespace(config=SimpleNamespace(causal=False, architecture="BertModel")),
    )
    with pytest.raises(UnsupportedError, match="calibrating 'BertModel'"):
        Calibration(encoder, set(), "")


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_calibrated_weights_predict_text_better(name, real_models, tmp_path):
    """The models' 4-bit blocks of 32 as 4 bits for 128 columns, on 1,024 tokens of this project's documentation; measured on prose."""
    text = "".join(path.read_text() for path in sorted(DOCS.rglob("*.md")))
    assert TEXT[:60] not in text
    out = str(tmp_path / "m.zse")
    convert(real_models[name], out, "int4", 128)
    nearest = perplexity(out, TOKENS)
    report = convert(real_models[name], out, "int4", 128, calibrate=partial(Calibration, text=text, tokens=1024))
    calibrated, source = perplexity(out, TOKENS), perplexity(real_models[name], TOKENS)
    assert report.calibration.num_tokens == 1024 and report.resumed_bytes == 0
    # 33 % become 10 % with SmolLM2.
    assert source < calibrated < source + 0.6 * (nearest - source)
