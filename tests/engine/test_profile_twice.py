"""zse profile in a process that profiles twice."""

import tiny_model

from zse.bench.profile import profile
from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases


def test_a_second_profile_finds_no_prompt_cached(tmp_path):
    path = tiny_model.write(tmp_path / "tiny")
    loaded = load_engine(EngineConfig(model=str(path), device="cpu", threads=1, max_rows=4), Phases(lambda: 0.0))
    try:
        for _ in range(2):
            prefill, decode = profile(loaded, rows=2, prompt_tokens=40, steps=3)
            assert (prefill.tokens, decode.tokens, decode.rows) == (40, 2, 2)
    finally:
        loaded.engine.close()
        loaded.source.close()
