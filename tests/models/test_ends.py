"""The ends of steps of one token joined, in the emulator: what an engine says beside what it says where they are not."""

import msgspec
import pytest
import tiny
from test_emulated_model import load_emulated

from zse.engine.config import EngineConfig
from zse.engine.core import Engine
from zse.engine.memory import plan_memory
from zse.engine.runner import Runner
from zse.kernel import cache
from zse.plan import ends
from zse.sampling.params import SamplingParams
from zse.scheduler.scheduler import Scheduler
from zse_emulator import EmulateDevice

GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=3)
SAMPLED = msgspec.structs.replace(GREEDY, temperature=1.0, seed=3, presence_penalty=0.5, logprobs=None)
ENDS = {"upload", "update_pages", "feed_tokens", "attention_plan", "rope_table", "download"}


@pytest.mark.parametrize(
    ("family", "joins", "options"),
    [("llama", "both", {}), ("gemma3", "results", {}), ("llama", "results", {"deterministic": True})],
    ids=["one plan", "plans of two windows", "deterministic"],
)
def test_an_engine_says_the_same(family, joins, options, kept_kernels, monkeypatch, tmp_path):
    """Across new pages, with tokens that the host has not read, log-probabilities and penalties."""
    said, join_ends = [], ends.join_ends
    for is_joined in (False, True):
        device = EmulateDevice("sm_90a", cache.package_variants("sm_90a"))
        model, plan = load_emulated(device, str(tiny.write(family, tmp_path, "BF16")))
        wanted = EngineConfig(model="m", max_rows=2, max_context=64, max_tokens_per_step=32, **options)
        config = plan_memory(wanted, plan, device).config
        runner = Runner(device, model, config, grouped=False)
        assert runner.runs_ahead
        monkeypatch.setattr(ends, "join_ends", join_ends if is_joined else lambda recorder: None)
        scheduler = Scheduler(
            num_pages=config.num_pages, max_rows=2, max_tokens=32, max_context=64, vocab_size=plan.config.vocab_size
        )
        engine, ids = Engine(scheduler, runner), tiny.tokens(family).tolist()
        for id, params in enumerate((GREEDY, SAMPLED)):  # one after the other: alone
            engine.submit(id, ids[: 7 + 3 * id], params)
            replies = []
            while engine.has_work:
                for output in engine.step():
                    assert output.finish != "error"
                    replies += zip(output.tokens, output.logprobs or [None] * len(output.tokens), strict=True)
            assert len(replies) == 20
            said.append(replies)
        graphs = [graph for (kind, size, _), graph in runner._graphs.items() if kind == "decode" and size == 1]
        found = [{launch.symbol for launch in graph.launches} for graph in graphs]
        assert len(found) == 2
        left = ENDS - ({"download"} if joins == "results" else ENDS) if is_joined else ENDS
        for symbols in found:
            assert ENDS & symbols == left and ("begin_token" in symbols) == (left == set())
        runner.close()
    assert said[:2] == said[2:]
