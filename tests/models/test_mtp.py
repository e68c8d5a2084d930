"""Blocks that predict behind a model's last layer: their logits against transformers', from folders, GGUF and .zse files,
with states of the model and of their own; what carries them, and files without one."""

import json
import sys
from math import prod
from pathlib import Path

import numpy as np
import pytest
import tiny
import tiny_families
import tiny_mtp
from session import Session

sys.path.insert(0, str(Path(__file__).parents[1] / "structured"))
import tiny_text

from zse.engine.calibrate import Calibration
from zse.errors import FormatError, UnsupportedError
from zse.formats.convert import convert
from zse.formats.opening import open_model
from zse.models import next_token
from zse.models.load import load_model, plan_model
from zse.plan.record import new_tensor
from zse.quant.pack import NUMPY_DTYPE
from zse.quant.scheme import SCHEME_NAMES, parse_scheme
from zse.tensor import Taken, Tensor, Weight

REFERENCES = np.load(Path(__file__).with_name("mtp.npz"))
AGAIN = 2
NEAR = dict(rtol=2e-5, atol=1e-4)  # as in test_model_families.py


def pair_of(device, path, quantize=None):
    """A model, and the block with what it shares."""
    with open_model(str(path)) as source:
        plan = plan_model(source, quantize=quantize, family=device.kernels)
        block = next_token.plan_block(source, plan.config, quantize=quantize, family=device.kernels)
        models = [load_model(device, each) for each in (plan, block)]
        for model in models:
            model.wait()
    next_token.share(models[1], models[0])
    return models


class Block(Session):
    """Runs pairs of a state and the token behind it. Positions begin at 0: only distances count."""

    def pairs(self, stream, rows, ids, again=False, instead=None):
        device, count = self.device, len(ids)
        recorder = device.record()
        places = new_tensor(device, "step", "i32", self.decoder.max_tokens)
        device.write(places.with_rows(count), np.array(rows, np.int32).tobytes())
        start = self.lengths[0]
        self.lengths[0] += count
        for tensor, values in (
            (self.buffers.token_ids, ids),
            (self.buffers.positions, range(start, start + count)),
            (self.buffers.token_row, [0] * count),
        ):
            self._put(tensor.with_rows(count), list(values))
        taken = Taken(stream, places, again)
        step = self.buffers
        if instead:
            lines = step.logits.shape[0]
            step = step._replace(logits=step.logits._replace(shape=(lines, instead["head"].shape[0])))
        logits = self.decoder.record(recorder, step=step, every_token=True, taken=taken, instead=instead)
        graph = recorder.finish()
        symbols = self.decoder.symbols(count, count, start + count)
        graph.run(**{name: symbols[name] for name in graph.symbols})
        found = np.frombuffer(device.read(logits.with_rows(count)), np.float32).reshape(count, -1)
        graph.close()
        return found


def logits_of(device, path, family, sizes=(9, 1, 29), quantize=None, **options):
    """(of the pairs of the reference sequence, of the last of them with the block's own states)."""
    model, block = pair_of(device, path, quantize)
    ids = tiny.tokens(family)
    target, drafts = Session(device, model, **options), Block(device, block, **options)
    found, at = [], 0
    for size in sizes:
        target.step([(0, ids[at : at + size])])
        found.append(drafts.pairs(target.decoder.hidden, range(size), ids[at + 1 : at + size + 1]))
        at += size
    # Back to before the last pairs: their keys are written over.
    last = len(ids) - 1 - AGAIN
    drafts.lengths[0] = last - 1
    target.reset()
    target.step([(0, ids[: last + 1])])
    drafts.pairs(target.decoder.hidden, [last - 1], ids[last : last + 1])
    again = [
        drafts.pairs(drafts.decoder.hidden, [0], ids[last + number + 1 : last + number + 2], again=True)
        for number in range(AGAIN)
    ]
    return np.concatenate(found), np.concatenate(again)


@pytest.mark.parametrize("family", tiny_mtp.FAMILIES)
def test_logits_equal_transformers(family, device, tmp_path):
    found, again = logits_of(device, tiny_mtp.write(family, tmp_path), family)
    np.testing.assert_allclose(found, REFERENCES[family], **NEAR)
    np.testing.assert_allclose(again, REFERENCES[f"{family} again"], **NEAR)


@pytest.mark.parametrize("name", SCHEME_NAMES)
@pytest.mark.parametrize("count", [64, 130])
def test_first_rows_of_a_head(name, count):
    """They are what they are in the whole head, in its memory, whatever scheme and layout it has."""
    scheme, (n, k), rng = parse_scheme(name), (392, 512), np.random.default_rng(count)
    for layout in scheme.layouts:
        stored = {part.name: rng.integers(0, 56, part.nbytes, np.uint8) for part in scheme.planes(n, k, layout)}
        stored = {
            p.name: stored[p.name].view(NUMPY_DTYPE[p.dtype]).reshape(p.shape) for p in scheme.planes(n, k, layout)
        }
        whole = {part.name: Tensor(None, part.shape, part.dtype, 64) for part in scheme.planes(n, k, layout)}
        found = next_token.first_rows(Weight((n, k), scheme, whole, layout), count)
        rows = found.shape[0]
        assert (
            count <= rows < count + 128
            and rows % 16 == 0
            and all(plane.offset == 64 for plane in found.planes.values())
        )
        cut = {}
        for part in scheme.planes(rows, k, layout):
            assert found.planes[part.name].shape == part.shape
            cut[part.name] = stored[part.name].reshape(-1)[: prod(part.shape)].reshape(part.shape)
        np.testing.assert_array_equal(
            scheme.dequantize(cut, rows, k, layout), scheme.dequantize(stored, n, k, layout)[:rows]
        )
        assert next_token.first_rows(Weight((n, k), scheme, whole, layout), n) == Weight((n, k), scheme, whole, layout)


@pytest.mark.parametrize("family", ["qwen3_5", "glm4_moe"])
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_logits_of_the_first_ids(family, quantize, device, tmp_path):
    """Those of the whole head, tied or not."""
    model, block = pair_of(device, tiny_mtp.write(family, tmp_path, "BF16"), quantize)
    assert model.config.tied_head == (family == "qwen3_5") or "head" in model.weights
    ids, rows = tiny.tokens(family), []
    narrow = next_token.first_rows(block.weights["head"], 50)
    for head in (block.weights["head"], narrow):
        target, drafts = Session(device, model), Block(device, block)
        target.step([(0, ids[:20])])
        rows.append(drafts.pairs(target.decoder.hidden, range(20), ids[1:21], instead={"head": head}))
    assert rows[1].shape == (20, 64) and rows[0].shape[1] > 64
    np.testing.assert_array_equal(rows[1], rows[0][:, :64])


@pytest.mark.parametrize("family", tiny_mtp.IN_GGUF)
def test_from_gguf(family, device, tmp_path):
    found, again = logits_of(device, tiny_mtp.write_gguf(family, tmp_path), family)
    np.testing.assert_allclose(found, REFERENCES[family], **NEAR)
    np.testing.assert_allclose(again, REFERENCES[f"{family} again"], **NEAR)


@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3"])
@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_conversion_carries_it(family, kind, device, tmp_path):
    path = (tiny_mtp.write if kind == "folder" else tiny_mtp.write_gguf)(family, tmp_path)
    convert(str(path), str(tmp_path / "model.zse"))
    found, _ = logits_of(device, tmp_path / "model.zse", family)
    np.testing.assert_allclose(found, REFERENCES[family], **NEAR)


@pytest.mark.parametrize("family", ["qwen3_5", "glm4_moe"])
def test_quantized_on_load_and_in_a_file(family, device, tmp_path):
    """The same integers both ways, and near what was there."""
    path = tiny_mtp.write(family, tmp_path, "BF16")
    on_load, _ = logits_of(device, path, family, quantize="int8")
    convert(str(path), str(tmp_path / "model.zse"), "int8")
    in_file, _ = logits_of(device, tmp_path / "model.zse", family)
    wanted = REFERENCES[family]
    for found in (on_load, in_file):
        assert np.abs(found - wanted).mean() < 0.05 * np.abs(wanted).mean()


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_behind_the_text_part_of_a_model_that_sees(family, device, tmp_path):
    """As Qwen3.5 is published: a wrapper, its block's tensors without the text part's prefix, experts fused."""
    name = "Qwen3_5ForConditionalGeneration" if family == "qwen3_5" else "Qwen3_5MoeForConditionalGeneration"
    text = {key: value for key, value in tiny_mtp.config(family).items() if key != "architectures"}
    outer = dict(architectures=[name], model_type="qwen3_5", vision_config={}, text_config=text)
    named = {each.replace("model.", "model.language_model.", 1): v for each, v in tiny_mtp.weights(family).items()}
    if family == "qwen3_5_moe":
        at = "mtp.layers.0.mlp.experts."
        gate, up, down = (
            np.stack([named.pop(f"{at}{e}.{kind}_proj.weight") for e in range(8)]) for kind in ("gate", "up", "down")
        )
        named |= {f"{at}gate_up_proj": np.concatenate([gate, up], axis=1), f"{at}down_proj": down}
    found, again = logits_of(device, tiny.save(tmp_path, outer, named, "F32"), family)
    np.testing.assert_allclose(found, REFERENCES[family], **NEAR)
    np.testing.assert_allclose(again, REFERENCES[f"{family} again"], **NEAR)


def test_calibration_leaves_it_to_plain_rounding(device, tmp_path):
    """What is known of the inputs of a model's layers is not of its block."""
    path, out = tiny_mtp.write("qwen3_5", tmp_path, "BF16"), tmp_path / "model.zse"
    tiny_text.write(path)
    text = "the quick brown fox jumps over the lazy dog " * 40
    calibrated = lambda source, names: Calibration(source, names, text, 64, 2)  # noqa: E731
    convert(str(path), str(out), "int8", calibrate=calibrated)
    found, _ = logits_of(device, out, "qwen3_5")
    wanted = REFERENCES["qwen3_5"]
    assert np.abs(found - wanted).mean() < 0.05 * np.abs(wanted).mean()


def test_without_a_block(tmp_path):
    plain = tiny_families.write("qwen3_5", tmp_path)
    with open_model(str(plain)) as source:
        config = plan_model(source).config
        with pytest.raises(FormatError, match=r"mtp\.fc\.weight: has no next-token block.*--speculation"):
            next_token.plan_block(source, config)
    (tmp_path / "llama").mkdir()
    with open_model(str(tiny.write("llama", tmp_path / "llama"))) as source:
        with pytest.raises(UnsupportedError, match="--speculation mtp for models of the architecture 'llama'"):
            next_token.plan_block(source, plan_model(source).config)


def test_a_part_is_missing(tmp_path):
    family = "glm4_moe"
    found = tiny_mtp.weights(family)
    del found["model.layers.3.hnorm.weight"]
    path = tiny.save(tmp_path, tiny_mtp.config(family), found, "F32")
    with open_model(str(path)) as source:
        with pytest.raises(FormatError, match=r"model\.layers\.3\.hnorm\.weight: the tensor is missing"):
            next_token.plan_block(source, plan_model(source).config)
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
