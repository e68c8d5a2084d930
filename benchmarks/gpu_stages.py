"""Where the time of a load goes in a process whose GPU context is up (a parked engine): stages in ms, and what the host
does while the engine is built.

    python benchmarks/gpu_stages.py MODEL [--rows 1] [--repeats 3]

Every other run waits for the weights before it builds the engine: allocations then do not wait for the driver, which
registers pieces of the file meanwhile. Compare "build" of the two.
"""

import argparse
import cProfile
import pstats
import sys
import time

import zse.engine.load as engine_load
from zse.engine.config import EngineConfig
from zse.engine.memory import plan_memory
from zse.formats.opening import open_model
from zse.models.load import load_model, plan_model
from zse.sampling.params import SamplingParams


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    own = parser.parse_args()
    start = time.perf_counter()
    opening = engine_load.park(["--device", own.device])
    device = opening.result()
    print(f"parked after {1000 * (time.perf_counter() - start):.1f} ms")
    config = EngineConfig(model=own.model, device=own.device, max_context=own.context, max_rows=own.rows)
    for number in range(own.repeats):
        profile = cProfile.Profile() if number == own.repeats - 1 else None
        waits = number % 2 == 1
        stages = one(config, device, waits, profile)
        print(
            f"{'weights first' if waits else 'beside       '}: "
            + ", ".join(f"{name} {ms:.1f}" for name, ms in stages.items()),
            flush=True,
        )
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(14)
    return 0


def one(config: EngineConfig, device, waits: bool, profile: cProfile.Profile | None) -> dict[str, float]:
    """Load, answer one prompt of 16 tokens, drop: milliseconds by stage."""
    stages: dict[str, float] = {}
    last = time.perf_counter()

    def mark(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        stages[name], last = 1000 * (now - last), now

    with open_model(config.model) as source:
        mark("open")
        plan = plan_model(source, family=device.kernels)
        mark("plan")
        memory = plan_memory(config, plan, device)
        mark("memory plan")
        model = load_model(device, plan)
        mark("load started")
        if waits:
            model.wait()
            mark("weights")
        if profile is not None:
            profile.enable()
        engine = engine_load._build(memory.config, device, model, plan)
        if profile is not None:
            profile.disable()
        mark("build")
        engine.runner.record_ahead()
        mark("record")
        model.wait()
        mark("rest of the weights")
        engine.submit(1, list(range(16)), SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
        while not engine.step():
            pass
        mark("first token")
        while engine.has_work:
            engine.step()
        for graph in engine.runner._graphs.values():
            graph.close()
    return stages


if __name__ == "__main__":
    sys.exit(main())
