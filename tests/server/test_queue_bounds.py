"""How much may wait, by what the engine does; and the burst that benchmark clients send."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from zse.engine.config import QUEUE_TOKENS, EngineConfig, settle
from zse.server.admission import LEAST_CHOICES, LEAST_TOKENS, MOST_TOKENS, QueueBounds
from zse.server.requests.completions import read_chat, read_completions


def drain(bounds: QueueBounds, tokens_per_s: int, seconds: float, start: float, left: int = 10**6) -> float:
    """Prompts of 100 tokens that begin one after the other."""
    count = int(tokens_per_s * seconds / 100)
    for index in range(count + 1):
        bounds.drained(100, 1, left, start + index * 100 / tokens_per_s)
    return start + count * 100 / tokens_per_s


def test_what_is_set_stays():
    bounds = QueueBounds(10, 5000)
    bounds.set_engine(8, QUEUE_TOKENS["gpu"])
    drain(bounds, 10**6, 10, 1)
    assert (bounds.max_choices, bounds.max_tokens) == (18, 5000)


def test_nothing_is_refused_while_a_model_loads_and_then_the_device_counts():
    bounds = QueueBounds(None, None)
    assert bounds.max_tokens == MOST_TOKENS and bounds.max_choices > 4000
    bounds.set_engine(64, QUEUE_TOKENS["cpu"])
    assert (bounds.max_choices, bounds.max_tokens) == (64 + 256, 262_144)
    bounds.set_engine(256, QUEUE_TOKENS["gpu"])
    assert (bounds.max_choices, bounds.max_tokens) == (256 + 4096, 1 << 22)


@pytest.mark.parametrize(
    "rate, timeout, expected",
    [
        (100, 60, LEAST_TOKENS),
        (1000, 60, 60_000),
        (20_000, 60, 1_200_000),
        (20_000, 30, 600_000),
        (10**6, 60, MOST_TOKENS),
    ],
)
def test_they_follow_the_rate_at_which_prompts_begin(rate, timeout, expected):
    bounds = QueueBounds(None, None, timeout)
    bounds.set_engine(64, QUEUE_TOKENS["cpu"])
    drain(bounds, rate, 5, 1)
    assert bounds.max_tokens == pytest.approx(expected, rel=0.02)


def test_many_short_prompts_wait_for_rows_not_for_tokens():
    """3.4 answers a second to prompts of 60 tokens: what is begun in 30 s may wait. By tokens alone 256 did, for 78 s."""
    bounds = QueueBounds(None, None, 30.0)
    bounds.set_engine(8, QUEUE_TOKENS["cpu"])
    for index in range(20):
        bounds.drained(60, 1, 6000, 1 + index / 3.4)
    assert bounds.max_choices - 8 == pytest.approx(102, abs=15)
    for index in range(8):
        bounds.drained(60, 1, 6000, 100 + 10 * index)
    assert bounds.max_choices - 8 == LEAST_CHOICES  # a request may ask for sixteen


def test_time_without_a_queue_says_nothing_of_the_rate():
    bounds = QueueBounds(None, None)
    bounds.set_engine(64, QUEUE_TOKENS["cpu"])
    for hour in range(1, 20):
        end = drain(bounds, 20_000, 1, 3600 * hour)  # too short to be believed alone
        bounds.drained(100, 1, 0, end + 0.01)  # the last one: the queue is empty
    assert bounds.max_tokens == QUEUE_TOKENS["cpu"]
    drain(bounds, 20_000, 3, 10**6)
    assert bounds.max_tokens == pytest.approx(1_200_000, rel=0.02)


@pytest.mark.parametrize("family, gib, vocab, rows", [
    ("cpu", 900, 1000, 64), ("gpu", 141, 152_064, 256), ("gpu", 24, 152_064, 128), ("gpu", 8, 152_064, 64),
    ("gpu", 8, 32_000, 256), ("gpu", 0, 32_000, 64),
])  # fmt: skip
def test_as_many_rows_as_the_memory_is_for(family, gib, vocab, rows):
    config = EngineConfig(model="m")
    assert settle(config, family, vocab_size=vocab, memory_bytes=gib << 30).max_rows == rows
    assert settle(EngineConfig(model="m", max_rows=7), family, vocab_size=vocab, memory_bytes=gib << 30).max_rows == 7


def test_prompts_of_token_ids_count_as_they_are():
    ids = list(range(10_000, 11_000))
    assert read_completions({"prompt": [ids, ids]}).num_ids == 2000
    assert read_completions({"prompt": ids}).num_ids == 1000
    assert read_completions({"prompt": "some text"}).num_ids is None
    assert read_chat({"messages": [{"role": "user", "content": "x"}]}).num_ids is None


def test_a_burst_of_a_thousand_prompts_is_served_without_a_refusal(own_server):
    """As benchmark clients send it: all at once, 1,024 token ids each; bounds as on a GPU."""
    bounds = QueueBounds(None, None)
    server = own_server(engine="--max-context 4096")
    server.app.admission.bounds = bounds
    bounds.set_engine(256, QUEUE_TOKENS["gpu"])
    body = {"prompt": [65 + index % 26 for index in range(1024)], "max_tokens": 2}
    with ThreadPoolExecutor(1000) as pool:
        statuses = list(pool.map(lambda _: server.post("/v1/completions", body, timeout=60).status, range(1000)))
    assert set(statuses) == {200}
    assert server.app.admission.num_refused == 0 and server.app.admission.queued_tokens == 0
