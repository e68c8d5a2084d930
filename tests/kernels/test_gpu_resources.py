"""Every GPU variant compiles for every architecture, with the registers, spills and shared memory of gpu_resources.json.

The table also has a hash of each kernel's text, compiler and options: what is the same text has the same resources, so only
kernels with another hash are compiled. `make test` looks at PRINTED of them by chance, since printing all takes 16 s, `--exhaustive`
at all and compiles SOME that did not change as well, `--soak` all (four minutes).

`python -m pytest tests/kernels/test_gpu_resources.py --exhaustive=all --update-golden` rewrites the table (without --exhaustive:
of the architecture that `make test` looks at, what changed); look at the diff.
"""

import json
import os
import random
from pathlib import Path

import pytest

from zse.kernel import cache, nvrtc
from zse.kernel.archs import SHARED_LIMIT
from zse.kernel.emit import emit_gpu

TABLE = Path(__file__).parent / "gpu_resources.json"
ARCHS = ("sm_80", "sm_90a", "sm_100")
# Another version of the compiler may use a few registers more; a spill that was not there is a failure always.
OTHER_COMPILER_REGISTERS = 8
PRINTED, SOME = 100, int(os.environ.get("ZSE_TEST_KERNELS", "40"))


@pytest.fixture
def compiler():
    if nvrtc.find_library() is None:
        pytest.skip("NVRTC is not here: pip install 'zse[cuda]'")
    return nvrtc.nvrtc()


def write_table(arch: str, version: list[int], found: dict[str, list]) -> None:
    """One kernel a line, so that a change is one line of a diff."""
    table = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    table[arch] = found
    table["nvrtc"] = version
    parts = [f'"nvrtc": {json.dumps(version)}', '"columns": ["registers", "spilled bytes", "shared bytes", "text"]']
    for name in ARCHS:
        rows = ",\n".join(
            f"  {json.dumps(symbol)}: {json.dumps(row)}" for symbol, row in sorted(table.get(name, {}).items())
        )
        parts.append(f'"{name}": {{\n{rows}\n}}' if rows else f'"{name}": {{}}')
    TABLE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["largest", "all"])
def test_shared_memory_fits_the_gpus_that_have_least(every):
    """emit_gpu() raises where a block has more than the architecture can give; sm_86, 89 and 120 have 99 KiB.
    largest: the kernels that have more on an sm_80."""
    limit, on_sm_80 = SHARED_LIMIT["sm_86"], json.loads(TABLE.read_text(encoding="utf-8"))["sm_80"]
    assert limit == SHARED_LIMIT["sm_120"]
    for symbol, variant in cache.package_variants("sm_86").items():
        if every or symbol not in on_sm_80 or on_sm_80[symbol][2] > limit:
            assert emit_gpu(variant, "sm_86")[1]["shared_bytes"] <= limit


def text_keys(arch: str, version: tuple[int, ...], symbols) -> dict[str, str]:
    """Symbol → a hash of its text, compiler and options."""
    variants = cache.package_variants(arch)
    texts = {symbol: emit_gpu(variants[symbol], arch)[0] for symbol in symbols}
    return {symbol: cache.key_of(text, nvrtc.OPTIONS, version, arch)[:12] for symbol, text in texts.items()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("arch", "every"), [("sm_90a", False)] + [pytest.param(arch, True, marks=pytest.mark.exhaustive) for arch in ARCHS]
)
def test_resources(arch, every, compiler, request, kept_kernels):
    if int(arch.removeprefix("sm_").removesuffix("a")) not in compiler.architectures():
        pytest.skip(f"this NVRTC does not know {arch}")
    table, symbols = json.loads(TABLE.read_text(encoding="utf-8")), sorted(cache.package_variants(arch))
    rows, updates = table[arch], request.config.getoption("--update-golden")
    looked_at = symbols if every or updates else random.sample(symbols, PRINTED)
    keys = text_keys(arch, compiler.version, looked_at)
    changed = {symbol for symbol in keys if [keys[symbol]] != rows.get(symbol, [])[3:]}
    if every:
        changed |= set(keys if updates else random.sample(symbols, min(SOME, len(keys))))
    compiled = cache.build(arch, names=sorted(changed), jobs=min(2, os.cpu_count() or 1))[1] if changed else []
    found = {one.symbol: [one.registers, one.spills, one.shared_bytes] for one in compiled if one.symbol in changed}
    version = list(compiler.version)
    if updates:
        rows = {symbol: [*found[symbol], keys[symbol]] if symbol in found else rows[symbol] for symbol in keys}
        write_table(arch, version, rows)
    assert symbols == sorted(rows), "kernels came or went: --update-golden"
    slack = 0 if version == table["nvrtc"] else OTHER_COMPILER_REGISTERS
    wrong = {}
    for symbol, row in found.items():
        expected = rows[symbol][:3]
        worse = row[2] != expected[2] or row[1] > expected[1] or row[0] > expected[0] + slack
        if worse or (not slack and row != expected):
            wrong[symbol] = row, expected
    assert not wrong, f"[registers, spills, shared] now and in the table: {wrong}"
