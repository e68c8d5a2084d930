"""Next-token blocks by a GPU's kernels, in the emulator: their logits, behind states of the model and of their own, and an engine that
drafts with one and runs ahead where it does not."""

import numpy as np
import pytest
import tiny
import tiny_mtp
from session import Session
from test_emulated_model import load_emulated
from test_mtp import AGAIN, REFERENCES, Block

from zse.engine import draft as drafts
from zse.engine.config import EngineConfig
from zse.engine.core import Engine
from zse.engine.memory import plan_memory
from zse.engine.runner import Runner
from zse.kernel import cache
from zse.models import next_token
from zse.models.load import plan_model
from zse.sampling.params import SamplingParams
from zse.scheduler.scheduler import Scheduler
from zse.speculative.block import BlockSpeculator
from zse_emulator import EmulateDevice


def of_block(source, family, quantize=None):
    return next_token.plan_block(source, plan_model(source, family=family).config, quantize=quantize, family=family)


def loaded(device, path):
    """(the model, its plan, the block, its plan)."""
    found = [*load_emulated(device, path), *load_emulated(device, path, planned=of_block)]
    next_token.share(found[2], found[0])
    return found


@pytest.mark.parametrize("like, family", [("sm_90a", "qwen3_5"), ("sm_80", "glm4_moe")])
def test_logits(like, family, kept_kernels, tmp_path):
    device, ids = EmulateDevice(like, cache.package_variants(like)), tiny.tokens(family)
    model, _, block, _ = loaded(device, str(tiny_mtp.write(family, tmp_path, "BF16")))
    target, mine = Session(device, model), Block(device, block)
    target.step([(0, ids[:-1])])
    rows = len(ids) - 1
    found, wanted = mine.pairs(target.decoder.hidden, range(rows), ids[1:]), REFERENCES[family]
    error = np.abs(found - wanted).mean() / np.abs(wanted).mean()
    assert error < 0.03
    mine.lengths[0] = rows - AGAIN
    mine.pairs(mine.decoder.hidden, [rows - AGAIN - 1], ids[rows - 1 : rows], again=True)
    narrow = next_token.first_rows(block.weights["head"], 100)
    found = mine.pairs(mine.decoder.hidden, [0], ids[rows:], again=True, instead={"head": narrow})
    assert found.shape[1] == 128
    wanted = REFERENCES[f"{family} again"][-1:, :128]
    assert np.abs(found - wanted).mean() < 0.05 * np.abs(wanted).mean()


@pytest.mark.long
@pytest.mark.exhaustive  # a minute of emulation
def test_an_engine_drafts(kept_kernels, tmp_path):
    device = EmulateDevice("sm_90a", cache.package_variants("sm_90a"))
    path = str(tiny_mtp.write("glm4_moe", tmp_path, "BF16", agrees=True))
    model, plan, block, block_plan = loaded(device, path)
    draft = drafts.DraftPlan(None, block_plan, is_block=True)
    wanted = EngineConfig(
        model="m",
        max_rows=2,
        max_context=64,
        max_tokens_per_step=32,
        deterministic=True,
        speculation="mtp",
        draft_tokens=2,
        draft_vocabulary=128,
    )
    config = plan_memory(wanted, plan, device, draft).config
    runner = Runner(device, model, config)
    beside = drafts.draft_runner(config, device, draft, block, runner)

    def say(is_drafting: bool):
        scheduler = Scheduler(
            num_pages=config.num_pages,
            max_rows=2,
            max_tokens=32,
            max_context=64,
            vocab_size=plan.config.vocab_size,
            max_drafts=config.max_drafts,
        )
        engine = Engine(scheduler, runner)
        if is_drafting:
            options = dict(num_pages=config.num_pages, page_size=16, max_tokens=32, max_context=64, share=0.2)
            speculator = BlockSpeculator(scheduler, beside, draft_tokens=2, family="gpu", runs_ahead=True, **options)
            speculator.room = lambda rows, most: most
            speculator.choose = lambda candidates, rows, most, round_s=0.0: [min(2, each.room) for each in candidates]
            assert speculator.is_narrow and beside.vocabulary == 128
            engine.use("speculation", speculator)
        for id, length in enumerate((9, 20)):
            params = SamplingParams(max_tokens=10, temperature=float(id), seed=3, ignore_eos=True)
            engine.submit(id, tiny.tokens("glm4_moe")[:length].tolist(), params)
        found: list[list[int]] = [[], []]
        while engine.has_work:
            for output in engine.step():
                assert output.finish != "error"
                found[output.id] += output.tokens
        return found, scheduler.counters

    told, _ = say(False)
    found, counters = say(True)
    assert found == told and 0 < counters.accepted_tokens < counters.drafted_tokens + 1
