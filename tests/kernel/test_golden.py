"""The emitted C of a few kernels, reviewed by diff: `python -m pytest tests/kernel/test_golden.py --update-golden` rewrites the files."""

import re
from pathlib import Path

import pytest

from zse.kernel.emit import emit_unit
from zse.kernel.targets.cpu import ISAS, CpuTarget
from zse.kernels.table import all_variants

FOLDER = Path(__file__).parent / "golden"
CASES = [
    (symbol, isa)
    for symbol in ("matmul_int8_int4a_g32_t8", "repack_q4_1", "add_rmsnorm_add_int8")
    for isa in ("x86-64-v3", "x86-64-v4-vnni", "arm64-dotprod")
]


def without_lines(text: str) -> str:
    """Without the numbers of source lines, which move with every change of a file."""
    return re.sub(r"(\.py:)\d+|( // )(\w+\.py:)?\d+$", r"\1\2\3", text, flags=re.M)


@pytest.mark.parametrize("symbol,isa", CASES)
def test_emitted_c(symbol, isa, request):
    variant = next(v for v in all_variants(CpuTarget(ISAS[isa])) if v.symbol == symbol)
    text = without_lines(emit_unit([variant], isa)[0])
    path = FOLDER / f"{symbol}.{isa}.c"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text(), f"the C of {symbol} changed; look at the diff, then --update-golden"
