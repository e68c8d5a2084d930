"""zse profile and the code behind it, with a tiny random model on the CPU: which launches, at which time, in which step."""

import functools
import json
import sys
from pathlib import Path

import pytest

from zse.bench import floors, profile, roofline
from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
import tiny_model  # noqa: E402

PHASES = ["schedule", "fill", "submit", "wait", "commit"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(tiny_model.write(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def load(tiny):
    opened = []

    def make(**options):
        config = EngineConfig(**(dict(model=tiny, threads=1, device="cpu") | options))
        opened.append(load_engine(config, Phases(lambda: 0.0)))
        return opened[-1]

    yield make
    for loaded in opened:
        loaded.engine.close()
        loaded.source.close()


def test_a_step_of_each_kind_with_every_launch(load):
    loaded = load(max_rows=3)
    prefill, decode = profile.profile(loaded, rows=3, prompt_tokens=40, steps=4, repeats=2)
    assert (prefill.kind, prefill.tokens, prefill.rows, prefill.context) == ("prefill", 40, 1, 40)
    assert (decode.kind, decode.tokens, decode.rows) == ("decode", 3, 3) and decode.context >= 40 + 1 + profile.WARM_UP
    for step in (prefill, decode):
        assert [name for name, _ in step.phases] == PHASES and all(us >= 0 for _, us in step.phases)
        assert dict(step.phases)["submit"] > dict(step.phases)["wait"], "a CPU runs the step in submit()"
        assert step.replay_us > 0 and step.kernels_us > 0
        names = [kernel.name for kernel in step.kernels]
        assert sum(name.startswith("matmul") for name in names) >= 4 * tiny_model.LAYERS + 1
        assert sum(name.startswith("embed") for name in names) == 1
        assert sum(count for _, count, _ in step.totals()) == len(names)
        assert sum(us for _, _, us in step.totals()) == pytest.approx(step.kernels_us)
        assert all(
            1 <= len(kernel.grid) <= 3 and all(isinstance(size, int) for size in kernel.grid) for kernel in step.kernels
        )
    assert prefill.kernels[0].grid != decode.kernels[0].grid, "grids are those of this step's tokens"
    assert not loaded.engine.has_work and loaded.engine.scheduler.check_integrity() == []


def test_of_a_long_prompt_the_last_full_step_is_shown(load):
    prefill, _ = profile.profile(load(max_rows=1, max_tokens_per_step=32), prompt_tokens=72, steps=1, repeats=1)
    assert (prefill.tokens, prefill.context) == (32, 64)


def test_profiling_changes_no_result(load):
    """Replays rewrite the same keys and values: a sequence goes on as if nothing had happened."""

    def tokens(after_each):
        engine = load(max_rows=1, activations="f32").engine
        engine.submit(1, list(range(3, 40)), profile.greedy(8))
        said = []
        while engine.has_work:
            step = profile._run_step(engine)
            said += [token for output in step.outputs for token in output.tokens]
            after_each(step)
        return said

    measured = tokens(lambda step: profile._measure(step, 1))
    assert len(measured) == 8 and measured == tokens(lambda step: None)


def test_what_does_not_fit_is_told(load):
    with pytest.raises(ConfigError, match="4 steps do not fit the context of 64 tokens"):
        profile.profile(load(max_rows=1, max_context=64), prompt_tokens=60, steps=4, repeats=1)
    # Four sequences begin one after another, so that the first has said more than the steps that count.
    with pytest.raises(ConfigError, match="8 steps do not fit the context of 64 tokens"):
        profile.profile(
            load(max_rows=4, max_context=64, max_tokens_per_step=16), rows=4, prompt_tokens=52, steps=8, repeats=1
        )
    with pytest.raises(ConfigError, match="need 12 pages of KV cache, this engine has 4: take fewer rows"):
        profile.profile(load(max_rows=4, num_pages=4), rows=4, prompt_tokens=30, steps=4, repeats=1)


def test_a_step_does_what_its_model_must(load):
    """What the launches do, by their arguments, is what a step of the model is known to take."""
    loaded = load(max_rows=2)
    runner = loaded.engine.runner
    for step in profile.profile(loaded, rows=2, prompt_tokens=40, steps=2, repeats=1):
        mean = step.context - (step.tokens / step.rows - 1) / 2
        least = roofline.step_work(runner, step.tokens, step.rows, mean)
        products = [kernel.work for kernel in step.kernels if kernel.name.startswith(("matmul", "attention"))]
        total = functools.reduce(roofline.Work.plus, products)
        if step.kind == "decode":  # a prompt's last step has one line of logits
            assert total.int8 + total.f32 == pytest.approx(least.int8 + least.f32, rel=0.02)
        assert least.bytes <= total.bytes < 2 * least.bytes
        assert all(kernel.work.bytes > 0 for kernel in step.kernels if kernel.name.startswith(("add_", "qkv", "embed")))


def test_the_roofline_stands_beside_each_kernel():
    machine = floors.Floors(read=10.0, int8=100.0, f32=50.0)
    kernels = [
        profile.LaunchTime("reads", (1,), 200.0, roofline.Work(bytes=10**6)),
        profile.LaunchTime("multiplies", (1,), 40.0, roofline.Work(bytes=1, int8=10**6)),
        profile.LaunchTime("near", (1,), 1.0, roofline.Work(bytes=10**6)),
        profile.LaunchTime("nothing", (1,), 0.5),
    ]
    text = profile.describe(profile.StepProfile("decode", 1, 1, 8, [("fill", 1.0)], 400.0, kernels), machine)
    shares = ("50 % reading  reads", "25 % multiplying  multiplies", "cached  near", "-  nothing")
    assert all(share in text for share in (*shares, "roofline 50 % reading of the replay; read 10.0 GB/s"))


def test_a_trace_has_two_tracks_for_each_step():
    kernels = [
        profile.LaunchTime("a", (3,), 5.0),
        profile.LaunchTime("b", (2, 4), 7.0),
        profile.LaunchTime("a", (3,), 4.0),
    ]
    phases = list(zip(PHASES, (1.0, 2.0, 3.0, 20.0, 4.0), strict=True))
    steps = [profile.StepProfile(kind, 8, 1, 8, phases, 14.0, kernels) for kind in ("prefill", "decode")]
    data = profile.trace(steps, {"model": "m"})
    events = [event for event in data["traceEvents"] if event["ph"] == "X"]
    assert data["otherData"] == {"model": "m"} and {event["pid"] for event in events} == {1, 2}
    host, device = ([event for event in events if (event["pid"], event["tid"]) == (1, tid)] for tid in (1, 2))
    assert [(event["name"], event["ts"], event["dur"]) for event in host] == [
        ("schedule", 0, 1),
        ("fill", 1, 2),
        ("submit", 3, 3),
        ("wait", 6, 20),
        ("commit", 26, 4),
    ]
    assert [(event["name"], event["ts"], event["dur"], event["args"]["grid"]) for event in device] == [
        ("a", 3, 5, [3]),
        ("b", 8, 7, [2, 4]),
        ("a", 15, 4, [3]),
    ]
    second = [event["ts"] for event in events if event["pid"] == 2]
    assert min(second) == 30 + profile.TRACE_GAP_US
    named = {(event["pid"], event["tid"]): event["args"]["name"] for event in data["traceEvents"] if event["ph"] == "M"}
    assert named[1, 0] == "prefill: tokens 8, sequences 1" and named[2, 1] == "host"
    assert profile.describe(steps[0]).splitlines()[-2:] == [
        "         9.0 us  56.2 %     2 x      4.50 us  a",
        "         7.0 us  43.8 %     1 x      7.00 us  b",
    ]


def test_the_command_prints_a_table_and_writes_a_trace(zse, tiny, tmp_path):
    out = tmp_path / "trace.json"
    words = ("profile", tiny, "--device", "cpu", "--prompt-tokens", "32", "--steps", "2", "--rows", "2")
    text = zse(*words, "-o", str(out)).stdout
    assert "prefill: tokens 32, sequences 1, context 32" in text and "decode: tokens 2, sequences 2" in text
    assert " % reading" in text and "roofline" in text and "multiply-adds 8-bit" in text
    assert "launches one by one" in text and "device cpu" in text and "load average" in text
    data = json.loads(out.read_text())
    kernels = [event for event in data["traceEvents"] if event.get("cat") == "kernel"]
    assert len(kernels) > 20 and all(event["ph"] == "X" and event["dur"] >= 0 for event in kernels)
    assert data["otherData"]["device"] == "cpu"
    assert "cannot be written" in zse(*words, "-o", str(tmp_path / "no" / "t.json"), code=2).stderr
    assert "at least 1" in zse("profile", tiny, "--rows", "0", code=2).stderr
    assert "context" in zse("profile", tiny, "--device", "cpu", "--prompt-tokens", "5000", code=2).stderr
