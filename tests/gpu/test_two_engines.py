"""Two models of one process on one GPU, asked at once by two threads: kernels whose blocks wait for each other (a layer's chain, sums of
parts) need all of them on the chip, so everything of the process goes through one stream."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from test_runner import greedy, prompt, run

from gpu.test_models import random_model
from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases

LAYERS, ROUNDS, WAIT_S = 4, 6, 60
# One row has the chain of int4, 20 rows have sums of parts.
ASKED = {"chain": {"a": (prompt(40, 1), greedy(60))}, "sums": {str(i): (prompt(30, i), greedy(60)) for i in range(20)}}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    path = random_model(tmp_path_factory.mktemp("models"), "int4", LAYERS)
    config = EngineConfig(
        model=path, device="cuda", max_rows=32, max_context=256, speculation="none", prefix_cache=False, num_pages=512
    )
    items = [load_engine(config, Phases(lambda: 0.0)) for _ in range(2)]
    yield [item.engine for item in items]
    for item in items:
        item.engine.close()
        item.source.close()


def told(engine, asked):
    """Tokens of one request; of more, whose steps follow the clock, how many each has."""
    replies = {name: tokens for name, (tokens, *_) in run(engine, **asked).items()}
    return replies if len(replies) == 1 else {name: len(tokens) for name, tokens in replies.items()}


@pytest.mark.parametrize("first", ASKED)
@pytest.mark.parametrize("second", ASKED)
def test_both_answer_as_alone(engines, first, second):
    asked = ASKED[first], ASKED[second]
    alone = [told(engine, each) for engine, each in zip(engines, asked, strict=True)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(ROUNDS):
            both = [pool.submit(told, engine, each) for engine, each in zip(engines, asked, strict=True)]
            assert [future.result(WAIT_S) for future in both] == alone
