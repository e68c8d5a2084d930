"""Whole models on one GPU, in the engine's process: memory, time to first token, decode speed at several batch sizes,
the host's share of a step.

    python benchmarks/gpu_models.py MODEL... [--rows 1,4,16] [--prompts 128,1024,7000] [--tokens 256] [--context 8192]
                                    [--graphs both]

One line a figure, and the floor beside decode: weights (of experts as many as so many tokens choose where every choice is as likely) and KV read
once a step at 4.3 TB/s. Neither cached prompts nor drafts.
--graphs both: each figure with steps replayed as captured graphs, then with their launches one by one.
"""

import argparse
import random
import sys
import time
from pathlib import Path

from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.models import expert_places
from zse.sampling.params import SamplingParams

BYTES_PER_S = 4.3e12  # of an H200, measured reads


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def first_token(engine, prompt: list[int], id: int) -> float:
    """Seconds from submission to the first token of a reply."""
    start = time.perf_counter()
    engine.submit(id, prompt, greedy(1))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start


def decode(engine, rows: int, prompt_len: int, tokens: int, rng, vocab: int, first_id: int) -> dict[str, float]:
    """`rows` replies of `tokens` tokens at once; the rate is that of steps in which all rows run."""
    waited, submitted = [0.0], [0.0]
    collect, launch = engine.runner.collect, engine.runner.launch

    def timed(handle):
        start = time.perf_counter()
        handle[0].wait()
        waited[0] += time.perf_counter() - start
        return collect(handle)

    def timed_launch(step):
        start = time.perf_counter()
        ticket = launch(step)
        submitted[0] += time.perf_counter() - start
        return ticket

    for row in range(rows):
        engine.submit(first_id + row, [rng.randrange(vocab) for _ in range(prompt_len)], greedy(tokens))
    counts = dict.fromkeys(range(first_id, first_id + rows), 0)
    start = time.perf_counter()
    while min(counts.values()) < 3:  # prompts, and graphs for these sizes
        for output in engine.step():
            counts[output.id] += len(output.tokens)
    prefilled = time.perf_counter() - start
    engine.runner.collect, engine.runner.launch = timed, timed_launch
    said, times = 0, []
    while max(counts.values()) < tokens - 1:
        start = time.perf_counter()
        for output in engine.step():
            counts[output.id] += len(output.tokens)
            said += len(output.tokens)
        times.append(time.perf_counter() - start)
    seconds, steps = sum(times), len(times)
    del engine.runner.collect, engine.runner.launch
    while engine.has_work:
        engine.step()
    return {
        "tok/s": said / seconds,
        "ms/step": 1e3 * seconds / steps,
        "submit ms/step": 1e3 * submitted[0] / steps,
        "host ms/step": 1e3 * (seconds - waited[0]) / steps,
        "prefill s": prefilled,
        "median ms": 1e3 * sorted(times)[steps // 2],
        "slowest": sorted(times)[-3:],
        "steady": rows * (steps - 8) / sum(times[8:]),
    }


def measure(path: str, args, graphs: bool) -> None:
    rows, prompts = ([int(word) for word in text.split(",")] for text in (args.rows, args.prompts))
    start = time.perf_counter()
    phases = Phases(lambda: time.perf_counter() - start)
    plans = []
    loaded = load_engine(
        EngineConfig(
            model=path,
            device="cuda",
            max_context=args.context,
            max_rows=max(rows),
            max_tokens_per_step=args.step_tokens,
            graphs=graphs,
            prefix_cache=False,
            speculation="none",
        ),
        phases,
        on_plan=plans.append,
    )
    name = Path(path).name + ("" if graphs else " without graphs")
    engine, device, config = loaded.engine, loaded.device, loaded.model_config
    taken = device.memory_total - device.memory_free
    print(f"== {name}\n{plans[0].describe()}\nphases ms: {phases.ms}\nGPU memory in use: {taken / 1e9:.2f} GB")
    rng, vocab, number = random.Random(1), config.vocab_size, 0
    for length in prompts:
        prompt = [rng.randrange(vocab) for _ in range(length)]
        times = []
        for _ in range(4):
            times.append(first_token(engine, prompt, number))
            number += 1
        print(f"{name}: first token of {length}: {1e3 * min(times):.2f} ms (cold {1e3 * times[0]:.1f})")
    weights = sum(nbytes for label, nbytes in loaded.memory_bytes.items() if label in ("layers", "head"))
    if config.tied_head:
        weights += loaded.memory_bytes.get("embedding", 0)
    moe = config.moe
    experts = expert_places.host_bytes(plans[0].model._replace(expert_slots=1)) if moe else 0
    kv = 4 * config.num_layers * config.num_kv_heads * config.head_dim
    for count in rows:
        result = decode(engine, count, args.prompt, args.tokens, rng, vocab, number)
        number += count
        unused = experts * (1 - moe.experts_per_token / moe.num_experts) ** count if moe else 0
        floor = (weights - unused + count * kv * (args.prompt + args.tokens // 2)) / BYTES_PER_S
        print(
            f"{name}: {count} rows: {result['tok/s']:.0f} tok/s ({result['steady']:.0f} after 8 steps), median "
            f"{result['median ms']:.3f} ms a step (floor {1e3 * floor:.3f}, "
            f"{1e5 * floor / result['median ms']:.0f} %), host {result['host ms/step']:.3f} ms "
            f"({result['submit ms/step']:.3f} of it submitting), prompts {result['prefill s']:.2f} s, slowest steps "
            + " ".join(f"{1e3 * value:.1f}" for value in result["slowest"]),
            flush=True,
        )
    problems = engine.scheduler.check_integrity()
    taken = device.memory_total - device.memory_free
    print(f"{name}: GPU memory at the end {taken / 1e9:.2f} GB; integrity: {problems or 'sound'}", flush=True)
    engine.close()
    loaded.source.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rows", default="1,4,16")
    parser.add_argument("--prompts", default="128,1024,7000")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompts before decoding")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--step-tokens", type=int)
    parser.add_argument("--graphs", choices=("on", "off", "both"), default="on")
    args = parser.parse_args()
    for path in args.models:
        for graphs in {"on": (True,), "off": (False,), "both": (True, False)}[args.graphs]:
            measure(path, args, graphs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
