"""Decode steps of mixtures of experts on a GPU before and after a change, in turns on one card.

    python benchmarks/gpu_mixtures.py TREE [TREE ...] [--models gpt-oss,int4,fp8] [--layers 24] [--rows 1,64] [--directory /dev/shm]

A TREE is a checkout whose src/ is imported, with its kernels built in a ZSE_HOME of its own, for a build removes another tree's there:
`ZSE_HOME=TREE/.home PYTHONPATH=TREE/src python -m zse kernels build`. The models, random weights in the shapes of gpt-oss-20b (MXFP4) and
Qwen3-30B-A3B (int4, fp8), are made by this checkout's own benchmarks. Each `zse profile` runs in the order of the trees and then in
its reverse, so that what a card loses by growing warm falls on all of them alike; what it prints is the profile, launch by launch.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CONTEXT, PROMPT = 4096, 512


def make(name: str, path: Path, layers: int) -> None:
    if name == "gpt-oss":
        command = ["make_random_gpt_oss.py", str(path)]
    else:
        command = ["make_random_model.py", str(path), "--shape", "qwen3-30b-a3b", "--type", name]
    subprocess.run([sys.executable, str(HERE / command[0]), *command[1:], "--layers", str(layers)], check=True)


def profile(tree: str, path: Path, rows: int) -> str:
    command = [sys.executable, "-m", "zse", "profile", str(path), "--device", "cuda", "--rows", str(rows)]
    sizes = ["--max-context", str(CONTEXT), "--prompt-tokens", str(PROMPT)]
    folders = {"PYTHONPATH": f"{tree}/src:{os.environ.get('PYTHONPATH', '')}", "ZSE_HOME": f"{tree}/.home"}
    return subprocess.run(
        [*command, *sizes], check=True, env=os.environ | folders, stdout=subprocess.PIPE, text=True
    ).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+")
    parser.add_argument("--models", default="gpt-oss,int4,fp8")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rows", default="1,64")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    for name in args.models.split(","):
        path = args.directory / f"mixture-{name}.zse"
        make(name, path, args.layers)
        try:
            for rows in map(int, args.rows.split(",")):
                for tree in (*args.trees, *reversed(args.trees)):
                    print(f"== {name}, {args.layers} layers, {rows} rows, {tree}", flush=True)
                    print(profile(tree, path, rows), flush=True)
        finally:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
