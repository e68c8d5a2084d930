"""The commands with real models and the real engine, as a user runs them."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_process import ENVIRONMENT

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("engine", "models", "structured")]
import tiny_encoders  # noqa: E402
import tiny_model  # noqa: E402
import tiny_text  # noqa: E402

import zse as package  # noqa: E402
from zse.bench.serving import RunningServer  # noqa: E402


@pytest.fixture
def smollm2(real_models):
    return str(real_models["smollm2"])


def test_run_is_reproducible_and_says_something_sensible(zse, smollm2):
    words = ("run", smollm2, "What is the capital of France?", "--temperature", "0", "--activations", "f32")
    done = zse(*words, "--stats")
    assert "Paris" in done.stdout and "exec to first token" in done.stderr and "weights loaded" in done.stderr
    assert zse(*words).stdout == done.stdout


def test_a_seed_fixes_the_reply(zse, smollm2):
    words = ("run", smollm2, "Tell a story.", "--temperature", "1", "--max-tokens", "12", "--seed")
    replies = [zse(*words, seed).stdout for seed in ("1", "1", "2", "3")]
    assert replies[0] == replies[1] and len(set(replies)) > 1


def test_stop_text_ends_the_reply_and_is_not_printed(zse, smollm2):
    words = ("run", smollm2, "--raw", "One, two, three,", "--temperature", "0", "--max-tokens", "24", "--stop", "six")
    assert zse(*words).stdout.strip().endswith("five,")


@pytest.mark.parametrize("seconds_after_first_byte", [None, 0.0, 0.2])
def test_ctrl_c_at_any_moment_is_quiet(home, smollm2, seconds_after_first_byte):
    command = [sys.executable, "-m", "zse", "run", smollm2, "Tell a very long story.", "--max-tokens", "2000"]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if seconds_after_first_byte is None:
        time.sleep(0.15)  # while the model loads
    else:
        assert os.read(process.stdout.fileno(), 1)
        time.sleep(seconds_after_first_byte)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    # -SIGINT: before the interpreter itself is ready for signals, on a busy machine; a shell says 130 of both. While it reads its own
    # modules (site, runpy), 35 ms of a quiet machine, it says so itself.
    if (
        seconds_after_first_byte is None
        and str(Path(package.__file__).parent).encode() not in stderr
        and b"<frozen " in stderr
    ):
        return
    assert process.returncode in (130, -signal.SIGINT) and stderr == b""


def test_a_reader_that_leaves_ends_the_reply(home, smollm2):
    command = [sys.executable, "-m", "zse", "run", smollm2, "Tell a very long story.", "--max-tokens", "2000"]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(20) == 141
    process.stderr.close()


def test_a_base_model_continues_the_text(zse, real_models):
    words = ("The capital of France is", "--temperature", "0", "--max-tokens", "8")
    done = zse("run", str(real_models["gemma3-270m"]), *words)
    assert done.stdout.strip()
    assert "without a chat template" in zse("chat", str(real_models["gemma3-270m"]), code=2).stderr


def test_chat_goes_on_and_regenerates(zse, smollm2):
    text = "What is two plus two?\n/regenerate\nWhy?\n/exit\n"
    done = zse("chat", smollm2, "--temperature", "0", "--max-tokens", "16", input=text)
    replies = [line for line in done.stdout.strip().splitlines() if not line.startswith("(cut")]
    assert replies[0] == replies[1] and "".join(replies[2:]) not in ("", replies[0])


def test_a_prompt_beyond_the_context_is_one_line_with_the_numbers(zse, smollm2):
    done = zse("run", smollm2, "word " * 200, "--max-context", "64", code=1)
    assert done.stderr.startswith("zse: error: ") and "64" in done.stderr and done.stderr.count("\n") == 1


def test_info_and_verify(zse, smollm2):
    facts = json.loads(zse("info", smollm2, "--json").stdout)
    assert facts["config"]["num_layers"] == 30 and facts["num_tensors"] == 272 and facts["not_served_because"] is None
    text = zse("info", smollm2, "--tensors", "--metadata").stdout
    assert "token_embd.weight" in text and "general.architecture" in text
    assert "sound, 272 tensors" in zse("verify", smollm2).stdout


def test_verify_knows_the_bytes_that_were_fetched(zse, home, smollm2):
    folder = home / "models/mine"
    folder.mkdir()
    data = Path(smollm2).read_bytes()
    record = {"name": "m.gguf", "size": len(data), "sha256": "0" * 64}
    (folder / "model.json").write_text(json.dumps({"name": "mine", "files": [record]}))
    (folder / "m.gguf").write_bytes(data)
    done = zse("verify", "-q", "mine", code=2)
    assert "m.gguf: offset 0: SHA-256: differs" in done.stderr and "zse pull --force mine" in done.stderr


def test_convert_prints_size_and_perplexity_and_the_result_runs(zse, smollm2, tmp_path):
    out = str(tmp_path / "s.zse")
    done = zse("convert", smollm2, out, "--quant", "int4", "--group-size", "64", "--no-clip-search")
    line = next(line for line in done.stdout.splitlines() if "perplexity" in line)
    before, after = float(line.split()[1]), float(line.split()[3])
    assert math.isfinite(before) and before < after < 3 * before, "int4 in groups of 64 is coarser than Q4_1"
    words = ("--temperature", "0", "--max-tokens", "16")
    assert zse("run", out, "What is the capital of France?", *words).stdout.strip()
    assert "exists; pass --force" in zse("convert", smollm2, out, code=2).stderr
    assert "checksums" in zse("verify", out).stdout
    assert "made by" in zse("info", out).stdout


@pytest.mark.parametrize(
    "quant", ["int4", pytest.param("int8", marks=pytest.mark.exhaustive("measures of real models"))]
)
def test_the_gate_of_a_conversion_measures_as_the_target_computes(quant, zse, smollm2, tmp_path):
    """Q4_1 as 4 bits with a scale for a whole row loses far more than a percent, 8 bits do not."""
    text = tmp_path / "text.txt"
    text.write_text(
        "The harbour lies at the mouth of a slow river, and for most of the year nothing much happens. " * 4
    )
    out, gate = tmp_path / "s.zse", ("--max-perplexity-change", "1%", "--perplexity-text", str(text))
    words = ("convert", smollm2, str(out), "--quant", quant)
    if quant == "int8":
        assert "perplexity" in zse(*words, "--target-device", "cpu", *gate).stdout and out.exists()
        return
    done = zse(*words, "--group-size", "0", "--no-clip-search", *gate, code=1)
    assert "was not written: its perplexity is" in done.stderr and "1.00% were allowed" in done.stderr
    assert done.stderr.count("with the activations of a CPU") == 2 and not list(tmp_path.glob("s.zse*"))
    done = zse("convert", smollm2, str(tmp_path / "o.zse"), "--no-perplexity", *gate, code=2)
    assert "--no-perplexity" in done.stderr
    assert "is not a share" in zse("convert", smollm2, "o.zse", "--max-perplexity-change", "lots", code=2).stderr


def test_conversions_measure_short_contexts_and_no_encoders(zse, tmp_path):
    """A context below the measured text's 768 tokens, as most encoders have, ended the conversion."""
    model = tiny_model.write(tmp_path / "tiny")
    tiny_text.write(model)
    words = ("--quant", "int8")
    assert "perplexity" in zse("convert", str(model), str(tmp_path / "tiny.zse"), *words).stdout
    (encoder := tmp_path / "bert").mkdir()
    tiny_encoders.write("bert", encoder)
    done = zse("convert", str(encoder), str(tmp_path / "bert.zse"), *words)
    assert "the perplexity is not measured" in done.stderr and (tmp_path / "bert.zse").exists()
    done = zse("convert", str(encoder), str(tmp_path / "b.zse"), *words, "--max-perplexity-change", "1%", code=2)
    assert "perplexity 'of an encoder' is not supported" in done.stderr and not (tmp_path / "b.zse").exists()


def test_a_damaged_file_is_one_line_with_the_offset(zse, smollm2, tmp_path):
    damaged = tmp_path / "d.gguf"
    damaged.write_bytes(Path(smollm2).read_bytes()[:100_000])
    for command in (["run", str(damaged), "x"], ["info", str(damaged)], ["verify", str(damaged)],
                    ["convert", str(damaged), str(tmp_path / "o.zse")]):  # fmt: skip
        done = zse(*command, code=2)
        assert f"zse: error: {damaged}: offset " in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "o.zse").exists()


def test_bench_measures(zse, smollm2):
    for words in (
        ["decode", "--tokens", "4"],
        ["prefill", "--tokens", "32"],
        ["batch", "--tokens", "4", "--sequences", "2"],
    ):
        data = json.loads(zse("bench", *words[:1], smollm2, *words[1:], "--repeats", "1", "--json").stdout)
        assert data["tok_per_s"] > 0 and data["peak_memory_bytes"] > 50 << 20 and data["threads"] >= 1
    words = ("latency", smollm2, "--prompts", "16,64", "--tokens", "4", "--repeats", "1", "--json")
    short, long = json.loads(zse("bench", *words).stdout)["latency"]
    assert 0 < short["ttft_ms"]["p50"] and 0 < short["itl_ms"]["p50"] <= short["itl_ms"]["p99"]
    assert (short["prompt_tokens"], long["prompt_tokens"]) == (16, 64)
    data = json.loads(zse("bench", "startup", smollm2, "--repeats", "1", "--json").stdout)
    assert 0 < data["exec_to_first_token_ms"] <= data["exec_to_exit_ms"]
    data = json.loads(zse("bench", "serve", smollm2, "--clients", "2", "--tokens", "4", "--json").stdout)
    assert 0 < data["exec_to_ready_ms"] <= data["exec_to_first_token_ms"] and data["load"][0]["clients"] == 2


@pytest.mark.exhaustive("measures of real models")
def test_profile_shows_a_real_step(zse, smollm2, tmp_path):
    out = tmp_path / "trace.json"
    text = zse("profile", smollm2, "--device", "cpu", "--prompt-tokens", "64", "--steps", "2", "-o", str(out)).stdout
    assert "prefill: tokens 64" in text and "decode: tokens 1" in text and " 90 x" in text
    events = [event for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["name"] for event in events if event["tid"] == 1} == {"schedule", "fill", "submit", "wait", "commit"}
    attention = [event for event in events if event["pid"] == 2 and event["name"].startswith("attention_f16")]
    assert len(attention) == 30, "one a layer"


def test_the_examples_run(zse, smollm2):
    examples = Path(__file__).parents[2] / "examples"
    command = [sys.executable, str(examples / "offline.py"), smollm2]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=True)
    assert "Paris" in done.stdout
    pytest.importorskip("openai")
    with RunningServer(smollm2, []) as server:
        command = [sys.executable, str(examples / "python_client.py"), f"http://127.0.0.1:{server.port}/v1"]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=True)
    assert len(done.stdout.strip()) > 3


def test_the_python_of_the_readme_runs(home, smollm2):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    code = readme.partition("```python\n")[2].partition("```")[0]
    (home / "models/smollm2").mkdir()
    (home / "models/smollm2" / Path(smollm2).name).symlink_to(smollm2)
    environment = {**ENVIRONMENT, "ZSE_HOME": str(home)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert len(done.stdout.strip()) > 3
