"""Every GPU variant compiles for every architecture, with the registers, spills and shared memory of gpu_resources.json.

`python -m pytest tests/kernels/test_gpu_resources.py --update-golden` rewrites the table; look at the diff."""

import json
import os
from pathlib import Path

import pytest

from zse.kernel import cache, nvrtc
from zse.kernel.archs import SHARED_LIMIT
from zse.kernel.emit import emit_gpu

TABLE = Path(__file__).parent / "gpu_resources.json"
ARCHS = ("sm_80", "sm_90a", "sm_100")
# Another version of the compiler may use a few registers more; a spill that was not there is a failure always.
OTHER_COMPILER_REGISTERS = 8


@pytest.fixture
def compiler():
    if nvrtc.find_library() is None:
        pytest.skip("NVRTC is not here: pip install 'zse[cuda]'")
    return nvrtc.nvrtc()


def write_table(arch: str, version: list[int], found: dict[str, list[int]]) -> None:
    """One kernel a line, so that a change is one line of a diff."""
    table = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    table[arch] = found
    table["nvrtc"] = version
    parts = [f'"nvrtc": {json.dumps(version)}', '"columns": ["registers", "spilled bytes", "shared bytes"]']
    for name in ARCHS:
        rows = ",\n".join(
            f"  {json.dumps(symbol)}: {json.dumps(row)}" for symbol, row in sorted(table.get(name, {}).items())
        )
        parts.append(f'"{name}": {{\n{rows}\n}}' if rows else f'"{name}": {{}}')
    TABLE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def test_shared_memory_fits_the_gpus_that_have_least():
    """emit_gpu() raises where a block has more than the architecture can give; sm_86, 89 and 120 have 99 KiB."""
    for variant in cache.package_variants("sm_86").values():
        assert emit_gpu(variant, "sm_86")[1]["shared_bytes"] <= SHARED_LIMIT["sm_86"] == SHARED_LIMIT["sm_120"]


@pytest.mark.parametrize("arch", ARCHS)
def test_resources(arch, compiler, request, kept_kernels):
    if int(arch.removeprefix("sm_").removesuffix("a")) not in compiler.architectures():
        pytest.skip(f"this NVRTC does not know {arch}")
    _, compiled = cache.build(arch, jobs=min(2, os.cpu_count() or 1))
    found = {one.symbol: [one.registers, one.spills, one.shared_bytes] for one in compiled}
    version = list(compiler.version)
    if request.config.getoption("--update-golden"):
        write_table(arch, version, found)
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    assert sorted(found) == sorted(table[arch]), "kernels came or went: --update-golden"
    slack = 0 if version == table["nvrtc"] else OTHER_COMPILER_REGISTERS
    wrong = {
        symbol: (row, table[arch][symbol])
        for symbol, row in found.items()
        if row[2] != table[arch][symbol][2]
        or row[1] > table[arch][symbol][1]
        or row[0] > table[arch][symbol][0] + slack
        or (not slack and row != table[arch][symbol])
    }
    assert not wrong, f"[registers, spills, shared] now and in the table: {wrong}"
