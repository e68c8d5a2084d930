"""The first token under a grammar that nobody had before, of source trees in turns.

    python benchmarks/structured_first_token.py MODEL.gguf --trees A B [--prompts 36 500] [--repeats 21] [--threads 2]
        [--device cpu] [--stand-in STEP_MS TOKEN_MS] [--cases fresh large]

Each tree has a process with an engine of its own, with one request at a time, one token each; the trees take turns, request by
request, with equal schemas, so that whatever else the machine does hits all. known: a regular expression that was compiled before;
fresh: a random record of 3 to 6 fields; medium: of 30; large: 606 fields in records within records. --stand-in: a device that
computes beside the host's cores: a step takes STEP_MS and TOKEN_MS a token, in which the host sleeps, and gives the first token that
the mask allows.
Printed: best and median milliseconds of each tree; of the last tree, the median ratio to the first; and what compiling took.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import time

from structured import TYPES, structure_of


def record(chance: random.Random, number: int, fields: int, depth: int = 0) -> dict:
    """The schema of a record; every tenth field is a record of 20, the last of 60, `depth` deep."""
    properties = {
        f"field_{number}_{depth}_{index}": record(chance, number, 60 if depth == 1 else 20, depth - 1)
        if depth and not index % 10
        else chance.choice(TYPES)
        for index in range(fields)
    }
    return {"type": "object", "additionalProperties": False, "required": list(properties), "properties": properties}


CASES = {
    "known": lambda chance: {"regex": "[a-z]{40}"},
    "fresh": lambda chance: structure_of("fresh records", chance),
    "medium": lambda chance: {"json": record(chance, chance.randint(0, 10**9), 30)},
    "large": lambda chance: {"json": record(chance, chance.randint(0, 10**9), 20, 3)},
}


def stand_in(runner, step_ms: float, token_ms: float) -> None:
    """Let the runner's steps take time alone."""
    runner.lazy_masks = False

    def submit(batch, *masks):
        time.sleep((step_ms + token_ms * batch.num_tokens) / 1000)
        tokens = [5] * batch.num_samples
        for some in masks:
            for line in some.first_lines():
                bits = int.from_bytes(some.mask(line), "little")
                tokens[line] = (bits & -bits).bit_length() - 1
        return [(token, None) for token in tokens]

    runner.submit, runner.collect = submit, lambda sampled: sampled


def work(given: argparse.Namespace) -> None:
    """The process of a tree: a line in for each request, milliseconds and the token out."""
    from zse import LLM, SamplingParams

    options = dict(device=given.device, threads=given.threads, max_rows=2, speculation="none", prefix_cache=False)
    llm = LLM(given.model, max_context=4096, **options)
    if given.stand_in:
        stand_in(llm._engine.runner, *given.stand_in)
    text = llm.tokenizer.encode("Write a record as JSON. ")
    params = SamplingParams(max_tokens=1, temperature=0.0)
    print("ready", flush=True)
    for line in sys.stdin:
        length, case, seed = line.split()
        prompt = (text * (int(length) // len(text) + 1))[: int(length)]
        structure = CASES[case](random.Random(seed))
        before = llm.metrics().get("grammar_compile_ms", 0.0)
        started = time.perf_counter()
        (output,) = llm.generate([prompt], params, structure=structure)
        took = 1000 * (time.perf_counter() - started)
        print(took, llm.metrics()["grammar_compile_ms"] - before, output.token_ids[0], flush=True)


def ask(process: subprocess.Popen, line: str) -> list[float]:
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return [float(word) for word in process.stdout.readline().split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--trees", nargs="+", default=["."], help="checkouts with an environment in .venv")
    parser.add_argument("--prompts", type=int, nargs="+", default=[36, 500])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--stand-in", type=float, nargs=2, metavar="MS")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        return work(given)
    options = ["--work", f"--device={given.device}"] + [f"--threads={given.threads}"] * (given.threads is not None)
    options += ["--stand-in", *map(str, given.stand_in)] if given.stand_in else []
    processes = [
        subprocess.Popen(
            [f"{os.path.abspath(tree)}/.venv/bin/python", __file__, given.model, *options],
            cwd=tree,
            stdin=-1,
            stdout=-1,
            text=True,
        )
        for tree in given.trees
    ]
    assert all(process.stdout.readline() == "ready\n" for process in processes)
    print("| prompt | grammar | best ms | median ms | ratio | compiling ms |\n|---|---|---|---|---|---|")
    for length in given.prompts:
        for case in given.cases:
            asked: list[list[list[float]]] = [[] for _ in processes]
            for number in range(given.repeats + 1):
                line = f"{length} {case} {os.getpid()}-{length}-{case}-{number}"
                places = range(len(processes)) if number % 2 else reversed(range(len(processes)))
                for place in places:
                    asked[place].append(ask(processes[place], line))
                is_same = len({found[-1][2] for found in asked}) == 1
                assert is_same or given.device != "cpu", "another first token"  # a GPU's sums have no fixed order
            took = [[one[0] for one in found[1:]] for found in asked]  # the first one records
            ratio = statistics.median(last / first for first, last in zip(took[0], took[-1], strict=True))
            best = ", ".join(f"{min(times):.1f}" for times in took)
            median = ", ".join(f"{statistics.median(times):.1f}" for times in took)
            compiling = ", ".join(f"{statistics.median(one[1] for one in found[1:]):.1f}" for found in asked)
            print(f"| {length} | {case} | {best} | {median} | {ratio:.3f} | {compiling} |", flush=True)
    for process in processes:
        process.stdin.close()
        process.wait()


if __name__ == "__main__":
    main()
