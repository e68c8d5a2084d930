"""zse check: on a real model as a user runs it, and what it says of models that are not what they should be."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from zse.bench import check
from zse.engine.llm import LLM

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("engine", "models")]
import tiny_model  # noqa: E402
from preloaded import preloaded  # noqa: E402, F401


class Characters:
    """A tokenizer of the tiny model: one id for each character, some of which share one."""

    def encode(self, text, add_bos=None):
        return [3 + ord(character) % (tiny_model.VOCAB - 3) for character in text]

    def decode(self, ids):
        return "".join(chr(id - 3) for id in ids)


def with_characters(llm):
    names = ("config", "logits_of", "perplexity", "vocab_size", "model_config", "device", "stream", "generate")
    shown = {name: getattr(llm, name) for name in names}
    return SimpleNamespace(
        tokenizer=Characters(), has_chat_template=True, chat=lambda *_: SimpleNamespace(text="?"), **shown
    )


def test_a_sound_model(zse, real_models):
    done = zse("check", str(real_models["smollm2"]), "--device", "cpu")
    assert "tensors    272 read, 0 not read\n" in done.stdout and "Paris" in done.stdout
    assert "tokenizer  7 of 7" in done.stdout and "not compared: " in done.stdout
    result = json.loads(zse("check", str(real_models["smollm2"]), "--device", "cpu", "--json").stdout)
    assert 5 < result["perplexity"]["perplexity"] < 60 and result["wrong"] == []


def test_a_model_of_random_numbers_is_not_sound(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "compared", lambda llm, path: {"left_out": "below"})
    monkeypatch.setattr(check, "rates", lambda llm: {})  # replies want a tokenizer in the folder
    path = str(tiny_model.write(tmp_path / "tiny"))
    with LLM(path, device="cpu", threads=1, prefix_cache=False) as llm:
        result = check.check(with_characters(llm), path)
    assert result["tensors"] == {"read": 21, "not_read": []}
    assert any("that of a guess" in line for line in result["wrong"])
    assert any("gives back another text" in line for line in result["wrong"])


def test_a_tensor_that_nobody_reads_is_named(tmp_path):
    path = tiny_model.write(tmp_path / "tiny")
    data = (path / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["visual.patch.weight"] = {"dtype": "F32", "shape": [1], "data_offsets": [len(data) - 8 - size] * 2}
    header["visual.patch.weight"]["data_offsets"][1] += 4
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :] + bytes(4))
    assert check.tensors(str(path), "cpu") == {"read": 21, "not_read": ["visual.patch.weight"]}


def beside(tmp_path, changed: bool) -> dict:
    """What the check says of a model of the seed `changed` beside transformers' of seed 0."""
    path, other = (str(tiny_model.write(tmp_path / name, seed)) for name, seed in (("tiny", 0), ("other", changed)))
    with LLM(other, device="cpu", threads=1, activations="f32", kv_dtype="f32") as llm:
        return check.compared(with_characters(llm), path)


def assert_told(found: dict, changed: bool) -> None:
    assert found["tokens"] == tiny_model.CONTEXT == check.COMPARED_TOKENS
    if changed:
        assert found["same_next_token"] < 0.1
    else:
        assert found["same_next_token"] > 0.99 and found["mean_difference"] < 1e-4 * found["mean_logit"]


@pytest.mark.exhaustive("beside PyTorch")
@pytest.mark.parametrize("changed", [False, True])
def test_logits_beside_transformers(changed, tmp_path, monkeypatch, preloaded):  # noqa: F811
    monkeypatch.setattr(check, "subprocess", preloaded)
    assert_told(beside(tmp_path, changed), changed)


# Stands where the check's script asks transformers: what an engine of the same folder gave.
STAND_IN = """
import json, sys
import numpy
path, out = sys.argv[1:]
assert json.load(sys.stdin)
numpy.save(out, numpy.load(path + "/logits.npy"))
print("5.0")
"""


@pytest.mark.parametrize("changed", [False, True])
def test_logits_beside_others(changed, tmp_path, monkeypatch):
    path = tiny_model.write(tmp_path / "tiny")
    with LLM(str(path), device="cpu", threads=1, activations="f32", kv_dtype="f32") as llm:
        ids = Characters().encode(check.perplexity.TEXT)[: tiny_model.CONTEXT]
        np.save(path / "logits.npy", np.concatenate([logits for _, logits in llm.logits_of(ids)]))
    monkeypatch.setattr(check, "find_spec", lambda name: True)
    monkeypatch.setattr(check, "_REFERENCE", STAND_IN)
    found = beside(tmp_path, changed)
    assert found["transformers"] == "5.0"
    assert_told(found, changed)
    monkeypatch.setattr(check, "_REFERENCE", "raise SystemExit('no such family')")
    assert beside(tmp_path, changed) == {"left_out": "transformers: no such family"}
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    assert "not installed" in beside(tmp_path, changed)["left_out"]
