"""The client and the figures, against a server whose answers are known."""

import asyncio
import random
import re
import socket

import numpy as np
import pytest

from zse.bench import client, load
from zse.bench.client import Outcome, Target
from zse.bench.load import LoadSettings, measure, run_workload
from zse.bench.percentiles import PERCENTILES, percentile, summary
from zse.bench.workloads import WORKLOADS, LoadRequest, make_requests, runs
from zse.errors import ConfigError, EngineError


@pytest.mark.parametrize("count", [1, 2, 3, 10, 47, 1000])
def test_percentiles_are_numpys(count):
    rng = random.Random(count)
    values = [rng.expovariate(1.0) for _ in range(count)]
    for percent in (0, 1, *PERCENTILES, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-12)
    got = summary(values)
    assert got["mean"] == pytest.approx(np.mean(values)) and list(got) == ["mean", "p50", "p90", "p95", "p99"]


def test_no_values_have_no_percentiles():
    assert summary([]) is None
    with pytest.raises(ValueError):
        percentile([], 50)


def ask(fake, tokens=5, route="/completions", timeout=10.0, **more) -> Outcome:
    body = {"model": "fake", "max_tokens": tokens, "stream": True, **more}
    return asyncio.run(client.stream(Target.of(fake.url), route, body, timeout))


@pytest.mark.parametrize("mode", ["sse", "close", "length"])
@pytest.mark.parametrize("route", ["/completions", "/chat/completions"])
def test_every_framing_gives_every_piece(fake, mode, route):
    fake.mode = mode
    outcome = ask(fake, 6, route)
    assert outcome.error is None and len(outcome.clocks_s) == outcome.tokens == 6
    assert (outcome.prompt_tokens, outcome.cached_tokens, len(outcome.itl_ms)) == (11, 4, 5)
    assert outcome.sent_s < outcome.clocks_s[0] and outcome.clocks_s[-1] <= outcome.done_s
    fake.usage = False
    assert ask(fake, 6, route).tokens == 6


@pytest.mark.timed
def test_times_are_those_of_the_server(fake):
    fake.first_s, fake.gap_s = 0.15, 0.03
    outcome = ask(fake, 5)
    assert 150 <= outcome.ttft_ms < 1000 and all(25 < gap < 500 for gap in outcome.itl_ms)
    assert outcome.tpot_ms == pytest.approx(sum(outcome.itl_ms) / 4)
    assert outcome.e2e_ms >= outcome.ttft_ms + sum(outcome.itl_ms)


@pytest.mark.parametrize(("mode", "reason"), [
    ("status", "503: too much at once"), ("error", "ended the stream: out of memory"), ("cut", "ended inside the answer"),
    ("open", r"without \[DONE\]"), ("html", "not HTTP"), ("hang", "no end within 0.3 s"), ("empty", "no text"),
    ("odd", "another form than OpenAI's"),
])  # fmt: skip
def test_what_goes_wrong_fails_its_request_with_the_reason(fake, mode, reason):
    fake.mode = mode
    outcome = ask(fake, timeout=0.3 if mode == "hang" else 10.0)
    assert outcome.error is not None and outcome.done_s > outcome.sent_s
    assert re.search(reason, outcome.error), outcome.error


def test_no_server_is_a_failure_and_a_config_error():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        target = Target.of(f"http://127.0.0.1:{probe.getsockname()[1]}/v1")
    outcome = asyncio.run(client.stream(target, "/completions", {}, 5.0))
    assert "onnect" in outcome.error
    with pytest.raises(ConfigError, match="is no OpenAI-compatible server"):
        measure(target, None, [WORKLOADS["baseline"]], LoadSettings())


@pytest.mark.parametrize("url", ["", "ftp://x/v1", "localhost:8000", "http://", "http://me:secret@host/v1",
                                 "http://host/v1?key=1", "http://host:99999/v1", "http://ho st/v1"])  # fmt: skip
def test_urls_that_are_refused(url):
    with pytest.raises(ConfigError, match="--url"):
        Target.of(url)


def test_urls_and_keys(fake):
    assert Target.of("https://[::1]/v1/") == Target("::1", 443, "/v1", True)
    assert Target.of("http://host") == Target("host", 80, "")
    target = Target.of(fake.url, "sk-abc")
    assert asyncio.run(client.get_json(target, "/models"))["data"][0]["id"] == "fake"
    assert "Authorization: Bearer sk-abc\r\n" in fake.heads[0] and "GET /v1/models HTTP/1.1" in fake.heads[0]


def run(fake, name, **settings):
    return asyncio.run(run_workload(Target.of(fake.url), "fake", WORKLOADS[name], LoadSettings(**settings)))


def test_a_sequential_workload_sends_one_after_the_other(fake):
    fake.gap_s = 0.001
    figures = run(fake, "baseline", scale=0.03)
    assert fake.most_running == 1 and len(fake.bodies) == 4  # two to warm up
    assert figures["requests"] == 2 and figures["failures"] == 0 and figures["output_tokens"] == 16
    assert figures["output_tok_per_s"] == pytest.approx(16 / figures["seconds"])
    assert fake.bodies[2]["ignore_eos"] and fake.bodies[2]["stream_options"] == {"include_usage": True}
    assert fake.bodies[2]["prompt"] == make_requests(WORKLOADS["baseline"], scale=0.03)[1][0].prompt


def test_a_burst_is_sent_at_once_and_arrivals_do_not_wait_for_answers(fake):
    fake.first_s = 0.4
    figures = run(fake, "zedinfer_mu_b", scale=0.1)
    assert fake.most_running == figures["requests"] == 2
    sweep = runs(WORKLOADS["qps_sweep"], [40.0])[0]
    figures = asyncio.run(run_workload(Target.of(fake.url), "fake", sweep, LoadSettings(scale=0.3)))
    assert figures["requests"] == 10 and fake.most_running > 2
    wanted = [request.at_s for request in make_requests(sweep, scale=0.3)[1]]
    assert [each["sent_s"] for each in figures["each"]] == pytest.approx(wanted, abs=0.15)


def test_chat_ids_and_eos_settings_reach_the_body(fake):
    run(fake, "zedinfer_e", scale=0.3, chat=True, ignore_eos=False)
    assert "ignore_eos" not in fake.bodies[-1] and fake.bodies[-1]["messages"][0]["role"] == "user"
    assert "POST /v1/chat/completions" in fake.heads[-1]
    run(fake, "zedinfer_e", scale=0.3, vocab_size=500)
    assert len(fake.bodies[-1]["prompt"]) == 5 and max(fake.bodies[-1]["prompt"]) < 500


def test_failures_are_counted_and_left_out_of_the_figures(fake):
    fake.fail_every = 4
    figures = run(fake, "zedinfer_e", scale=0.8)  # one to warm up, then eight: numbers 4 and 8 fail
    assert (figures["requests"], figures["failures"]) == (8, 2)
    assert figures["errors"] == [{"message": "503: too much at once", "count": 2}]
    assert figures["output_tokens"] == 6 * 26 and figures["prompt_tokens"] == 6 * 11 and figures["cached_tokens"] == 24
    assert [bool(each["error"]) for each in figures["each"]] == [False, False, True, False, False, False, True, False]
    assert figures["requests_per_s"] == pytest.approx(6 / figures["seconds"])


def test_a_warm_up_that_fails_ends_the_run(fake):
    fake.mode = "status"
    with pytest.raises(EngineError, match="baseline: a request of the warm-up failed: 503: too much"):
        run(fake, "baseline")


def test_when_all_fail_there_are_no_times():
    outcomes = [Outcome(1.0, done_s=2.0, error="x"), Outcome(1.0, done_s=3.0, error="x")]
    figures = load.figures([LoadRequest(0.0, "a", 1, 4)] * 2, outcomes, 1.0)
    assert figures["failures"] == 2 and figures["seconds"] == 2 and figures["output_tok_per_s"] == 0
    assert figures["ttft_ms"] is figures["itl_ms"] is figures["e2e_ms"] is None


def test_pieces_of_several_tokens_are_counted_as_the_server_does():
    joined = Outcome(0.0, [1.0, 1.5, 2.0], 2.1, tokens=11)
    assert joined.itl_ms == [500, 500] and joined.tpot_ms == pytest.approx(100)
    assert Outcome(0.0, [1.0], 1.1, tokens=1).tpot_ms is None


def test_measure_names_the_model_and_tells_each_run(fake):
    told = []
    workloads = [WORKLOADS["zedinfer_e"], WORKLOADS["qps_sweep"]]
    found = measure(
        Target.of(fake.url), None, workloads, LoadSettings(scale=0.05), [50, 100], lambda name, _: told.append(name)
    )
    assert found["model"] == "fake" and list(found["workloads"]) == told == [
        "zedinfer_e",
        "qps_sweep@50",
        "qps_sweep@100",
    ]
    assert {body["model"] for body in fake.bodies} == {"fake"}
