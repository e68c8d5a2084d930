"""The scripts of benchmarks/ that others build on: random models are sound models, `zse bench startup` measures them."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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


def run(script: str, *arguments) -> str:
    """What a script of benchmarks/ prints."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, ROOT / "benchmarks" / script, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, text=True).stdout


def make(path, type: str) -> Path:
    run("make_random_model.py", path, "--shape", "tiny", "--type", type)
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


def test_products_take_turns():
    printed = run(
        "cpu_matmul.py", "int4-g32", "lut4-fp4-g32-e8m0", "--shape", "32", "256", "--tokens", "3", "--seconds", "0.1"
    )
    rows = [line.split("|")[1:4] for line in printed.splitlines()[2:]]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["3", "int4-g32", "5.00"],
        ["3", "lut4-fp4-g32-e8m0", "4.25"],
    ]


def test_a_start_is_measured_from_outside(tmp_path):
    path = make(tmp_path / "m.zse", "int4")
    result = startup.startup(str(path), 1, ["--device", "cpu", "--threads", "1"])
    warm, cold = result["serve_exec_to_first_token_ms"], result["cold_serve_exec_to_first_token_ms"]
    assert 10 < result["serve_exec_to_socket_ms"] < min(warm, cold) < 60_000
    assert 10 < result["exec_to_first_token_ms"] <= result["exec_to_exit_ms"]
    assert {"socket", "engine spawned", "listening", "tokenizer", "ready"} <= set(result["phases_ms"]["server"])
    assert {"file open", "weights loaded", "ready"} <= set(result["phases_ms"]["engine"])
    assert json.dumps(result)


@pytest.mark.timed
@pytest.mark.exhaustive("times beside a load")
def test_the_figures_of_a_cpu_stand_beside_its_floors(tmp_path):
    """Each but that of drafts has its share of the floor; drafts have a row of their own; memory stands beside what cannot be less."""
    path = make(tmp_path / "m.zse", "int4")
    found = json.loads(run("cpu_vs_llamacpp.py", "--worker", path, "--tokens", "48", "--threads", "1"))
    figures = {"decode_16", "decode_1024", "decode_4096", "prefill_512", "batch_8"}
    assert {name.removesuffix(" floor") for name in found if name.endswith(" floor")} == figures
    assert set(found) - figures - {f"{name} floor" for name in figures} == {
        "floor read",
        "floor int8",
        "floor f32",
        "drafts_16",
    }
    assert all(0 < found[f"{name} floor"] <= 1.1 and found[name] > 0 for name in figures)
    memory = json.loads(run("cpu_vs_llamacpp.py", "--worker", path, "--only-memory", "--threads", "1"))
    layer = 2 * 2 * 64 * 2  # bytes of a token: keys and values of two heads of 64 in f16
    assert memory["kv_mib"] == 2048 * 2 * layer / 2**20, memory
    assert memory["kv_mib"] < memory["needs_mib"] < memory["peak_mib"]


def test_what_does_not_start_is_one_line(tmp_path):
    (tmp_path / "bad.zse").write_bytes(b"\x89ZSE\r\n\x1a\n" + bytes(100))
    with pytest.raises(EngineError, match="zse serve failed with exit code 2: .zse version 0 is not supported"):
        startup._serve(str(tmp_path / "bad.zse"), ["--device", "cpu"])
    with pytest.raises(EngineError, match="zse run failed with exit code 2: .zse version 0 is not supported"):
        startup._run(str(tmp_path / "bad.zse"), ["--device", "cpu"])


def test_each_case_on_a_gpu_has_prompts_of_its_own(tmp_path, monkeypatch):
    """With one seed the prompts of many clients began with those of the few before them, which default settings had cached."""
    client = tmp_path / "client.py"
    client.write_text("import json, sys\nprint(json.dumps({'seed': sys.argv[sys.argv.index('--seed') + 1]}))")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # as for a script
    script = runpy.run_path(str(ROOT / "benchmarks" / "gpu_serve.py"))
    server = SimpleNamespace(url="http://127.0.0.1:1", check=lambda deadline: None)
    seeds = [script["play"](str(client), server, "64:512:256", 1e9)["seed"] for _ in range(3)]
    assert len(set(seeds)) == 3
