"""The engine's own tests (tests/engine/test_runner.py) on the CUDA device: batching, chunks, preemption, cancellation,
sampling, log-probabilities, scoring, all with a step submitted ahead."""

import time

import pytest
import tiny_model
from test_runner import (  # noqa: F401
    alone,
    greedy,
    run,
    test_bias_and_penalties_do_what_they_say,
    test_cancel_in_the_middle_leaves_the_others_alone,
    test_rows_are_used_again,
    test_scores_agree_with_the_logits,
    test_scoring_beside_running_requests_disturbs_nobody,
    test_stop_ids_eos_and_the_context_end_a_reply,
)

from gpu.harness import device
from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.kernel import emit, nvrtc

GPU = device()
TINY_LIMIT = 0.05  # of the largest logit: as in test_models.py


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny", head_dim=64)


@pytest.fixture
def engine_of(model):
    loaded = []

    def make(**options):
        options.pop("activations", None)
        loaded.append(load_engine(EngineConfig(**dict(model=str(model), device="cuda") | options), Phases(lambda: 0.0)))
        assert loaded[-1].engine.runner.runs_ahead
        return loaded[-1].engine

    make.model = str(model)
    yield make
    for item in loaded:
        item.engine.close()
        item.source.close()


def test_a_row_that_is_not_finite_fails_alone(engine_of, tmp_path):
    from test_runner import MANY

    path = tiny_model.write(tmp_path / "nan", nan=True, head_dim=64)
    engine = engine_of(model=str(path), max_rows=4)
    expected = run(engine, a=MANY["page"], b=MANY["top_k"])
    got = run(engine, a=MANY["page"], bad=([5, tiny_model.NAN_TOKEN, 6], greedy()), b=MANY["top_k"])
    assert got["bad"] == ([], [], "error")
    assert got["a"] == expected["a"] and got["b"] == expected["b"]
    # Pages that held NaN are used again by the next request; nothing of it may show.
    assert run(engine, a=MANY["page"])["a"] == expected["a"]


def test_a_batch_is_deterministic(engine_of):
    """The same batch twice, with graphs captured in between, says the same. (A cached prefix would be computed by other
    kernels: the mode for that is --deterministic.)"""
    from test_runner import MANY

    engine = engine_of(max_rows=4, prefix_cache=False)
    first = run(engine, **MANY)
    assert [run(engine, **MANY) for _ in range(2)] == [first, first]
    assert first["over"] == first["same seed"]


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_pages_in_8_bits_leave_the_device_and_come_back(engine_of, kv_dtype):
    """Requests that are swapped to host memory and back say what they say without: their pages come back as they were."""
    from test_runner import MANY, sampled

    requests = {name: (MANY[name][0], sampled(11, 40)) for name in ("over", "penalties", "page", "top_p")}
    expected = run(engine_of(max_rows=4, kv_dtype=kv_dtype, deterministic=True), **requests)
    engine = engine_of(
        max_rows=4,
        kv_dtype=kv_dtype,
        deterministic=True,
        num_pages=9,
        reserve_output=False,
        preemption="swap",
        cache_host_memory=1 << 28,
    )
    assert engine.runner.kv.page_nbytes < 0.6 * engine_of(max_rows=4).runner.kv.page_nbytes
    assert run(engine, **requests) == expected
    told = engine.scheduler.snapshot()
    assert told["preemptions"] and told["swapped_in_pages"] + told["prefix_onloaded_pages"]


def test_preempted_requests_end(engine_of):
    """They are computed again by other kernels (many tokens at once), whose last bits differ: the same walk twice is
    the same, the same as without preemption it need not be."""
    from test_runner import MANY, sampled

    requests = {
        name: (MANY[name][0], sampled(11, 40, presence_penalty=0.4)) for name in ("over", "penalties", "page", "top_p")
    }
    walks = []
    for _ in range(2):
        engine = engine_of(max_rows=4, num_pages=9, reserve_output=False)
        walks.append(run(engine, **requests))
        assert engine.scheduler.counters.preemptions > 0
    assert walks[0] == walks[1] and all(len(reply[0]) == 40 for reply in walks[0].values())


def test_log_probabilities_and_scores_are_close_to_the_cpu(engine_of):
    """Those of sampled tokens come from kernels for one token, scores from those for many."""
    import numpy as np
    from test_runner import greedy, prompt

    ids = prompt(20)
    engine = engine_of()
    reply, logprobs, _ = run(engine, a=(ids, greedy(10, logprobs=5)))["a"]
    scores = [value for _, some, _, _ in engine.feature("jobs").score(ids + reply) for value in some][len(ids) - 1 : -1]
    cpu = load_engine(
        EngineConfig(model=engine_of.model, device="cpu", threads=2, activations="f32", kv_dtype="f32"),
        Phases(lambda: 0.0),
    )
    wanted, largest = [], 0.0
    for _, some, _, logits in cpu.engine.feature("jobs").score(ids + reply):
        wanted += some
        largest = max(largest, float(np.abs(np.array(logits)).max()))
    cpu.engine.close()
    cpu.source.close()
    limit = TINY_LIMIT * largest
    print(f"\nlargest logit {largest:.2f}, allowed {limit:.3f}")
    for got in ([entry.logprob for entry in logprobs], scores):
        assert got == pytest.approx(wanted[len(ids) - 1 : -1], abs=limit)


def test_a_first_start_compiles_its_kernels_side_by_side(model, tmp_path, monkeypatch, caplog):
    """Without a pack and a cache: one line, and nothing is compiled one by one; the next start makes no text."""
    monkeypatch.setenv("ZSE_HOME", str(tmp_path))
    config = EngineConfig(model=str(model), device="cuda", max_rows=4)
    seconds = []
    for number in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(nvrtc, "compile_text", lambda *args: pytest.fail("compiled one by one"))
            patch.setattr(emit, "emit_gpu", lambda *args: pytest.fail("text was made"))
            begin = time.perf_counter()
            loaded = load_engine(config, Phases(lambda: 0.0))
            run(loaded.engine, a=([5, 6, 7] * 40, greedy()), b=([5], greedy()))
            seconds.append(time.perf_counter() - begin)
            loaded.engine.close()
            loaded.source.close()
        assert caplog.text.count("compiling") == 1, number
    print(f"first start {seconds[0]:.1f} s, second {seconds[1]:.2f} s")
