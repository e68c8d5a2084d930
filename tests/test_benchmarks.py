"""The scripts of benchmarks/ that others build on: random models are sound models, `zse bench startup` measures them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zse.bench import startup
from zse.errors import EngineError
from zse.formats.opening import open_model
from zse.formats.verify import verify
from zse.models.load import plan_model
from zse.tokenizer.load import load_tokenizer

ROOT = Path(__file__).parents[1]
TYPES = {
    "int4": "int4-g128",
    "int8": "int8-g128-sym",
    "fp8": "fp8-row",
    "bf16": "BF16",
    "hf-bf16": "BF16",
    "hf-fp8": "fp8-row",
    "hf-awq": "int4-g128",
}


def make(path, type: str) -> Path:
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    script = ROOT / "benchmarks" / "make_random_model.py"
    subprocess.run(
        [sys.executable, script, path, "--shape", "tiny", "--type", type],
        check=True,
        stdout=subprocess.PIPE,
        env=environment,
    )
    return path


@pytest.mark.parametrize("type", TYPES)
def test_random_models_are_sound(type, tmp_path):
    path = make(tmp_path / ("hf" if type.startswith("hf") else "m.zse"), type)
    assert verify(path).num_tensors == 27
    with open_model(path) as source:
        assert source.tensors["model.layers.1.mlp.down_proj.weight"].type == TYPES[type]
        for family in ("cpu", "gpu"):
            plan = plan_model(source, family=family)
            assert {matrix.name for matrix in plan.matrices} >= {"layers.0.qkv", "layers.1.gate_up", "head"}
        tokenizer = load_tokenizer(source)
        text = "Hello, 世界! 123"
        assert tokenizer.decode(tokenizer.encode(text)) == text and 2002 in tokenizer.eos_ids
        assert (source.tokenizer.image is not None) == (source.kind == "zse")


def test_a_start_is_measured_from_outside(tmp_path):
    path = make(tmp_path / "m.zse", "int4")
    result = startup.startup(str(path), 1, ["--device", "cpu", "--threads", "1"])
    warm, cold = result["serve_exec_to_first_token_ms"], result["cold_serve_exec_to_first_token_ms"]
    assert 10 < result["serve_exec_to_socket_ms"] < min(warm, cold) < 60_000
    assert 10 < result["exec_to_first_token_ms"] <= result["exec_to_exit_ms"]
    assert {"socket", "engine spawned", "listening", "tokenizer", "ready"} <= set(result["phases_ms"]["server"])
    assert {"file open", "weights loaded", "ready"} <= set(result["phases_ms"]["engine"])
    assert json.dumps(result)


def test_what_does_not_start_is_one_line(tmp_path):
    (tmp_path / "bad.zse").write_bytes(b"\x89ZSE\r\n\x1a\n" + bytes(100))
    with pytest.raises(EngineError, match="zse serve failed with exit code 2: .zse version 0 is not supported"):
        startup._serve(str(tmp_path / "bad.zse"), ["--device", "cpu"])
    with pytest.raises(EngineError, match="zse run failed with exit code 2: .zse version 0 is not supported"):
        startup._run(str(tmp_path / "bad.zse"), ["--device", "cpu"])
