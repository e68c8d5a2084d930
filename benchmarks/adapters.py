"""What LoRA adapters cost: tokens a second of a batch of requests that each have an adapter of their own, beside the same batch of the
base model, in turns.

    python benchmarks/adapters.py smollm2 --requests 16 --rank 16 --modules all
    python benchmarks/adapters.py MODEL --device cuda --max-tokens 64

The adapters are random, as PEFT writes them. Each request has a prompt of its own; times are those of the steps that only decode.
"""

import argparse
import json
import struct
import tempfile
import time
from pathlib import Path

import numpy as np

from zse import LLM, SamplingParams
from zse.formats import store
from zse.formats.opening import open_model
from zse.lora.targets import Targets
from zse.models.weight_plan import read_config

MODULES = {"qv": ("q_proj", "v_proj"), "attention": ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"), "all": ("",)}


def write_adapter(folder: Path, targets: Targets, rank: int, ends: tuple[str, ...], seed: int) -> Path:
    """A random PEFT folder for all modules whose names end so."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer, modules in enumerate(targets.modules):
        for module, names in modules.items():
            if not module.endswith(ends):
                continue
            found = [targets.by_name[layer, name] for name in names]
            name = f"base_model.model.model.layers.{layer}.{module}"
            columns, rows = found[0].columns, sum(target.rows for target in found)
            tensors[f"{name}.lora_A.weight"] = rng.standard_normal((rank, columns), np.float32) / columns**0.5
            tensors[f"{name}.lora_B.weight"] = rng.standard_normal((rows, rank), np.float32) / 100
    folder.mkdir(parents=True)
    head, at = {}, 0
    for name, values in tensors.items():
        head[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(head).encode()
    with open(folder / "adapter_model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for values in tensors.values():
            file.write(values.tobytes())
    config = dict(peft_type="LORA", r=rank, lora_alpha=rank, bias="none", task_type="CAUSAL_LM")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_adapters(folder: Path, model: str, count: int, rank: int, ends: tuple[str, ...]) -> list[Path]:
    with open_model(model) as source:
        targets = Targets(read_config(source))
    return [write_adapter(folder / str(number), targets, rank, ends, number) for number in range(count)]


def decode_s(llm: LLM, adapters: list[str], prompt_tokens: int, max_tokens: int) -> list[float]:
    """Seconds of each step that decodes one token of each request. adapters: of each, "" for none."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    rng = np.random.default_rng(7)
    ids = rng.integers(100, llm.vocab_size - 100, (len(adapters), prompt_tokens)).tolist()
    streams = [llm.stream(prompt, params, adapter=adapter) for prompt, adapter in zip(ids, adapters, strict=True)]
    totals = llm._engine.scheduler.totals
    for stream in streams:
        next(stream)
    steps = []
    while True:
        before, start = totals.steps, time.perf_counter()
        try:
            for stream in streams:
                next(stream)
        except StopIteration:
            break
        if totals.steps == before + 1:
            steps.append(time.perf_counter() - start)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--modules", choices=MODULES, default="all")
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--write", metavar="FOLDER", help="write the adapters there and stop")
    args = parser.parse_args()
    path = str(store.locate(args.model))
    with tempfile.TemporaryDirectory() as folder:
        made = Path(args.write or folder)
        folders = write_adapters(made / "adapters", path, args.adapters, args.rank, MODULES[args.modules])
        if args.write:
            return
        slots = dict(adapter_slots=args.adapters, adapter_rank=args.rank)
        context = args.prompt_tokens + args.max_tokens + 16
        options = dict(device=args.device, threads=args.threads, max_rows=args.requests, max_context=context)
        with LLM(path, speculation="none", prefix_cache=False, **options, **slots) as llm:
            ids = [llm.load_adapter(str(each)) for each in folders]
            chosen = [ids[number % len(ids)] for number in range(args.requests)]
            cases = {"base": [""] * args.requests, "one adapter": [ids[0]] * args.requests, "adapters": chosen}
            times: dict[str, list[float]] = {name: [] for name in cases}
            for number in range(args.rounds + 1):
                for name, adapters in cases.items():
                    steps = decode_s(llm, adapters, args.prompt_tokens, args.max_tokens)
                    times[name] += steps if number else []  # the first records
            slots_mib = llm.memory_bytes["adapters"] / 2**20
            print(
                f"{args.model} on {llm.device.name}, {args.requests} requests, {args.adapters} adapters of rank {args.rank}, ",
                end="",
            )
            print(f"modules: {args.modules}; slots {slots_mib:.0f} MiB; {len(times['base'])} steps each, in turns")
            # On a shared machine the fastest tenth is what the step takes, the median what others left of the machine.
            for name, seconds in times.items():
                line = f"  {name:12}"
                for what, share in (("fastest tenth", 0.1), ("median", 0.5)):
                    found, base = (sorted(each)[int(share * len(each))] for each in (seconds, times["base"]))
                    line += f" {what} {1000 * found:7.2f} ms {args.requests / found:6.0f} tokens/s {100 * (found / base - 1):+6.1f} %"
                print(line)


if __name__ == "__main__":
    main()
