"""zse profile on the CUDA device: the launches of a step with times of the GPU, and nothing changed by it."""

import tiny_model

from gpu.harness import device
from zse.bench.profile import profile
from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases

GPU = device()


def test_steps_of_a_tiny_model(tmp_path):
    path = tiny_model.write(tmp_path / "tiny", head_dim=64)
    loaded = load_engine(EngineConfig(model=str(path), device="cuda", max_rows=4), Phases(lambda: 0.0))
    try:
        shares: dict[str, list[float]] = {"prefill": [], "decode": []}
        # A replay overlaps what is timed one by one. A turn of another process on the GPU is as long as twenty replays, so
        # beside others it takes some tries to see one without.
        while len(shares["decode"]) < 40 and not all(any(share < 2 for share in each) for each in shares.values()):
            prefill, decode = profile(loaded, rows=4, prompt_tokens=40, steps=6)
            assert (prefill.tokens, decode.tokens, decode.rows) == (40, 4, 4)
            for kind, step in (("prefill", prefill), ("decode", decode)):
                names = [kernel.name for kernel in step.kernels]
                assert names[0] == "upload" and names[-1] == "download" and "feed_tokens" in names
                assert all(0 < kernel.us < 10_000 for kernel in step.kernels)
                shares[kind].append(step.replay_us / step.kernels_us)
            assert loaded.engine.scheduler.check_integrity() == []
        assert all(0 < min(each) < 2 for each in shares.values()), shares
    finally:
        loaded.engine.close()
        loaded.source.close()
