"""Mutants of everything that strangers send; see mutator.py for what must hold.

ZSE_TEST_MUTANTS=100000: of each format in the long form (`--exhaustive=only`). ZSE_TEST_SEED changes them. A mutant that failed is
copied to corpus/FORMAT/ and tried first from then on."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import mutator
import pytest

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
LONG = int(os.environ.get("ZSE_TEST_MUTANTS", "5000"))
SEED = int(os.environ.get("ZSE_TEST_SEED", "1"))
# The first of the long form's, which `make test-rest` tries.
SHORT = dict.fromkeys(("http", "body", "query", "config.json", "vocabulary", *mutator.DOCUMENTS), 150)
SHORT |= dict.fromkeys(("tokenizer.json", "chat template", "json schema", "regex", "lark", "gbnf"), 80)
FEW = 80  # of formats that tests/formats has more of
ADDRESSES_MIB = 4096


def run(format: str, count: int, folder: Path) -> dict:
    command = [sys.executable, HERE / "mutator.py", format, str(count), str(SEED), folder, str(ADDRESSES_MIB)]
    source = HERE.parents[1] / "src"
    environment = os.environ | {"PYTHONPATH": f"{source}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60 + count / 5)
    except subprocess.TimeoutExpired:
        keep(format, next(folder.glob("*-now")))
        raise AssertionError(f"ZSE_TEST_SEED={SEED}: {format} hangs") from None
    if done.returncode and (now := next(folder.glob("*-now"), None)) is not None:
        keep(format, now)
    assert done.returncode == 0, f"ZSE_TEST_SEED={SEED}: {format}: exit code {done.returncode}: {done.stderr[-2000:]}"
    report = json.loads(done.stdout.splitlines()[-1])
    for _, _, path in report["failures"]:
        keep(format, Path(path))
    assert not report["failures"], f"ZSE_TEST_SEED={SEED}: {report['failures'][:3]}"
    # One regular expression of the long form takes 80 MiB of lexer states; the checker's limit is 256.
    assert report["grown_mib"] <= (256 if format in ("json schema", "regex", "lark", "gbnf") else 64)
    return report


def keep(format: str, mutant: Path) -> None:
    folder = CORPUS / format.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(mutant, folder / mutant.name)


@pytest.mark.parametrize("format", mutator.FORMATS)
def test_mutants(format, tmp_path):
    report = run(format, SHORT.get(format, FEW), tmp_path)
    assert report["accepted"] > 0 and report["refused"] > 10, report


@pytest.mark.exhaustive
@pytest.mark.parametrize("format", mutator.FORMATS)
def test_many_mutants(format, tmp_path):
    report = run(format, LONG, tmp_path)
    print(format, report)


def known() -> list[Path]:
    return sorted(path for path in CORPUS.glob("*/*") if path.is_file())


@pytest.mark.parametrize("path", known(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_mutants_that_failed_once(path):
    format = mutator.FORMATS[
        path.parent.name if path.parent.name in mutator.FORMATS else path.parent.name.replace("-", " ")
    ]()
    assert format.attempt(path.read_bytes()) in ("accepted", "refused")


def test_a_mutator_that_finds_nothing_is_noticed(tmp_path):
    """A planted bug in what is accepted is told, with the mutant."""
    format = mutator.FORMATS["config.json"]()
    broken = mutator.Format(format.seeds, lambda data: "accepted" if data in format.seeds else 1 // 0, is_json=True)
    mutator.FORMATS["broken"] = lambda: broken
    try:
        report = mutator.run("broken", 5, 1, str(tmp_path))
    finally:
        del mutator.FORMATS["broken"]
    assert len(report["failures"]) >= 3 and Path(report["failures"][0][2]).exists()


def test_grammars_are_compiled_together_as_the_server_compiles_them(monkeypatch):
    """A schema that takes longer than it may costs the compiler of the others, and the server's checker says what it is."""
    made, Compilers = [], mutator.Compilers
    monkeypatch.setattr(mutator, "Compilers", lambda words: made.append(Compilers(words)) or made[0])
    schema = mutator.schema()
    slow = {"type": "integer", "minimum": 0, "maximum": 10**15, "multipleOf": 9999991}
    mutants = [b'{"type": "integer"}', json.dumps(slow).encode(), b"\xff", b'{"type": 5}', b'{"type": "boolean"}']
    schema.ahead(mutants)
    (compilers,) = made
    first = compilers.pid
    assert schema.attempt(mutants[0]) == "accepted" and (compilers.pid, compilers.alone) == (first, 0)
    assert schema.attempt(mutants[1]) == "refused" and compilers.pid != first and compilers.alone == 1
    assert [schema.attempt(mutant) for mutant in mutants[2:]] == ["refused", "refused", "accepted"]
    assert compilers.alone == 1 and not compilers.waiting
    monkeypatch.setattr(compilers, "_served", lambda structure: ("invalid_schema", "another answer"))
    compilers.count = mutator.SERVED_EVERY - 1
    schema.ahead(mutants[:1])
    with pytest.raises(AssertionError, match="another answer"):
        schema.attempt(mutants[0])
    compilers.end()
