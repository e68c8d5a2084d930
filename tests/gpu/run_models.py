"""One command for a machine with a GPU: kernels compiled, whole models checked, then measured.

    python tests/gpu/run_models.py [--models FOLDER] [--types int4,fp8,bf16] [--skip-tests] [--out FOLDER]

Random models of a 7B shape are made in FOLDER (28 GB for the three types) and kept. SmolLM2 and Gemma 3 are compared
with the CPU where ZSE_TEST_MODELS names a folder with their .gguf files. The full output of each part goes to --out; what is
printed is a summary. Exit code: that of the tests.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def part(name: str, command: list, out: Path, show, seconds: int, **variables: str) -> int:
    """Run a command; its output to a file, lines for which show(line) holds to the screen. 124: it took too long."""
    environment = os.environ | variables
    folders = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    path = out / f"{name}.txt"
    with path.open("wb") as file:
        try:
            code = subprocess.run(
                [str(word) for word in command],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment,
                timeout=seconds,
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    print(f"== {name}: exit code {code}")
    for line in path.read_text(errors="replace").splitlines():
        if show(line):
            print(line[:400])
    sys.stdout.flush()
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "zse_models")
    parser.add_argument("--types", default="int4,fp8,bf16")
    parser.add_argument("--rows", default="1,4,16,64,256")
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "zse_results")
    args = parser.parse_args()
    for folder in (args.models, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    python = sys.executable
    code = part("kernels", [python, "-m", "zse", "kernels", "build"], args.out, lambda line: True, 300)
    if code:
        return code
    if not args.skip_tests:
        words = ("largest", "tokens a step", "tokens the same", "passed", "failed", "FAILED", "Error", "error")
        code = part(
            "tests",
            [
                python,
                "-X",
                "faulthandler",
                "-m",
                "pytest",
                "-s",
                "-v",
                "--tb=short",
                "-p",
                "no:cacheprovider",
                "tests/gpu/test_models.py",
                "tests/gpu/test_engine.py",
            ],
            args.out,
            lambda line: any(word in line for word in words),
            600,
        )
    for kind in args.types.split(","):
        model = args.models / f"q7-{kind}.zse"
        if not model.exists():
            part(
                f"make-{kind}",
                [python, "benchmarks/make_random_model.py", model, "--type", kind],
                args.out,
                lambda line: True,
                300,
            )
        part(
            f"speed-{kind}",
            [python, "benchmarks/gpu_models.py", model, "--rows", args.rows],
            args.out,
            lambda line: True,
            300,
        )
        for rows in ("1", "16"):
            part(
                f"profile-{kind}-{rows}",
                [python, "-m", "zse", "profile", model, "--device", "cuda", "--rows", rows, "--max-context", "4096"],
                args.out,
                lambda line: "replay" in line,
                100,
            )
    return code


if __name__ == "__main__":
    sys.exit(main())
