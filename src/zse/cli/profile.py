"""zse profile: where a prefill step and a decode step of a model spend their time."""

import json

from zse.bench import floors, process, profile, reports
from zse.cli import options
from zse.cli.options import ENGINE_OPTIONS
from zse.cli.parser import MODEL, Amount, option
from zse.engine import config as engine_config
from zse.engine import load, metrics
from zse.errors import ConfigError

EPILOG = """examples:
  zse profile smollm2
  zse profile qwen.zse --device cuda --rows 16 --prompt-tokens 1024 -o trace.json

The trace opens in chrome://tracing or https://ui.perfetto.dev. Kernels run one by one while they are timed (on a GPU
each reads about 2 us too long); `replay` is the time of the step's kernels as the engine runs them. The last column is the
share of the roofline: the least time for what a kernel must read or multiply, over its own. A CPU's floors are measured, as
is a GPU's reading; a GPU's multiply-adds are those of its clock and units."""


ARGUMENTS = (
    MODEL,
    option("--rows", Amount(int, 1, 1024), "sequences that decode together", 1),
    option("--prompt-tokens", Amount(int, 1), "random tokens of each prompt", 512),
    option("--steps", Amount(int, 1, 10_000), "decode steps, of which the median is shown", 16),
    option("-o --output", "FILE", "write both steps to FILE as a Chrome trace"),
    ENGINE_OPTIONS,
)


def run(args) -> int:
    config = engine_config.EngineConfig(
        model=options.locate(args.model), max_rows=args.rows, **options.values_of(args, ENGINE_OPTIONS)
    )
    if max(config.tensor_parallel_size, config.pipeline_parallel_size) > 1:
        raise ConfigError(
            "zse profile replays launches on one device: leave --tensor-parallel-size and --pipeline-parallel-size out"
        )
    loaded = load.load_engine(config, metrics.Phases(metrics.since_exec_clock()))
    try:
        steps = profile.profile(loaded, rows=args.rows, prompt_tokens=args.prompt_tokens, steps=args.steps)
        limits = floors.of_device(loaded.device)
    finally:
        loaded.engine.close()
        loaded.source.close()
    device = loaded.device
    about = {
        "model": args.model,
        "device": device.name,
        "isa": device.isa,
        "threads": device.threads,
        **process.machine(),
    }
    print("\n".join(profile.describe(step, limits) for step in steps))
    print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in about.items()))
    if args.output:
        reports.write(args.output, json.dumps(profile.trace(steps, about), separators=(",", ":")))
    return 0
