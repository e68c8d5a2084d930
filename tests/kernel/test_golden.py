"""The emitted C of a few kernels, reviewed by diff: `python -m pytest tests/kernel/test_golden.py --update-golden` rewrites the files."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from zse.kernel.emit import emit_unit
from zse.kernel.targets.cpu import ISAS, CpuTarget
from zse.kernels.table import all_variants

FOLDER = Path(__file__).parent / "golden"
CASES = [
    (symbol, isa)
    for symbol in ("matmul_int8_int4a_g32_t8", "matmul_int8_int6s_g16_many", "repack_q4_1", "add_rmsnorm_add_int8")
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


GENERATE = """
import gc, time
from zse import build
from zse.kernel.emit import emit_unit
gc.disable()
start = time.process_time()
for _, variants in build.kernel_units("x86-64-v4-vnni"):
    emit_unit(variants, "x86-64-v4-vnni")
generated = time.process_time()
for number in range(10_000_000):
    start += 0
print(generated - start, time.process_time() - generated)
"""


@pytest.mark.timed(alone=False)
def test_the_c_of_a_level_is_generated_in_seconds():
    """All kernels of one level take 5 s of one core at most: 3 to 4 s, as busy as the machine is. A core on which Python itself is
    slower has as much longer: ten million turns of a loop, 0.6 s where the bound was set (9.2 and 1.5 s on one of less than half
    the speed). In a process of its own, as a build is: in one that holds what other tests imported, collecting garbage takes as
    long again."""
    done = subprocess.run([sys.executable, "-c", GENERATE], check=True, capture_output=True, text=True)
    generated, loop = map(float, done.stdout.split())
    assert generated <= 5 * max(1, loop / 0.6), (generated, loop)
