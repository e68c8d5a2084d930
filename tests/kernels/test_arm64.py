"""Kernels of the arm64 level, compiled by a cross compiler whose warnings are errors and run in an emulator, beside their float64
references (tests/kernels/arm64.py). None has run on a CPU of that kind."""

import re
from pathlib import Path

import numpy as np
import pytest

from kernels import arm64, test_matmul_invariance
from kernels.harness import check_case, host_isas, join_fields, output_tensors, poisoned_outputs, run_case, to_tensor
from zse.kernel.targets.cpu import ISAS
from zse.kernels import floor
from zse.kernels.table import all_ops
from zse.runtime import native
from zse.runtime.args import Args

OPS = {op.name: op for op in all_ops() if op.variants(ISAS[arm64.LEVEL])}


class Symbols:
    """Stands for a Recorder: which kernels a launch takes."""

    device = arm64.DEVICE

    def __init__(self):
        self.found = set()

    def launch(self, symbol, *args, **options):
        self.found.add(symbol)


def symbols_of(op, case) -> set[str]:
    recorder = Symbols()
    tensors = {name: to_tensor(value) for name, value in case.inputs.items()}
    tensors |= output_tensors(case, poisoned_outputs(case))
    op.launch(recorder, **join_fields(tensors), **case.options)
    return recorder.found


def check(machine, op, cases) -> None:
    seed = int(np.random.default_rng().integers(2**32))
    rng, count = np.random.default_rng(seed), 0
    for case in cases(rng):
        got = arm64.run_case(op, case, machine, rng)
        try:
            check_case(op, case, got)
        except AssertionError as error:
            raise AssertionError(f"{op.name}, {arm64.LEVEL}, seed {seed}: {error}") from None
        count += 1
    assert count


@pytest.fixture(scope="module")
def level():
    with arm64.whole_level() as machine:
        yield machine


# A scheme's case has one of five sizes by chance: as many rounds as leave a tenth of the kernels of products out.
ROUNDS = {"matmul": 5}


@pytest.mark.exhaustive("kernels of arm64 in an emulator")
@pytest.mark.parametrize("name", sorted(OPS))
def test_reference(name, level):
    """Fresh inputs, poisoned outputs, no byte beside an array written; every second launch by the C runtime's pool of two threads."""
    for _ in range(ROUNDS.get(name, 1)):
        check(level, OPS[name], OPS[name].cases)


@pytest.mark.exhaustive("kernels of arm64 in an emulator")
def test_the_floor_of_products_multiplies_all(level):
    rng = np.random.default_rng()
    level.memory.clear()
    w, a = (level.memory.place(rng.integers(-(2**31), 2**31, count).astype(np.int32)) for count in (48, floor.WORDS))
    out = level.memory.place(np.zeros(floor.OUT_BYTES // 4, np.int32))
    args = Args({name: to_tensor(array, level.memory.place) for name, array in (("w", w), ("a", a), ("out", out))})
    arm64.Recorder(level, rng).launch("floor_int8", args, (1,))
    sums = a.view(np.int8).astype(np.int64).reshape(-1, 4).sum(0)
    passes = floor.PRODUCTS // (48 * floor.WORDS)
    wanted = (w.view(np.int8).astype(np.int64).reshape(48, 4) @ sums * passes).astype(np.int32)
    np.testing.assert_array_equal(out[:48], wanted)


# Of products a scheme of each way to multiply: bytes as they are, 128 less, and looked up; groups of 16 with integers as scales.
FEW = {
    "quantize": "",
    "dense_search": "",
    "matmul": "int4-g32 int|int8-g64 int|int6-g16-sym-i8 int8|lut4-iq4-g32-i8 int8",
}


def test_some_operations(tmp_path):
    """What `make test` runs of the level: its products in each form, a norm's sums, exact search."""
    arm64.need_tools()
    chosen = {
        name: [case for case in OPS[name].cases(np.random.default_rng(7)) if re.match(pattern, case.name)]
        for name, pattern in FEW.items()
    }
    symbols = {symbol for name, cases in chosen.items() for case in cases for symbol in symbols_of(OPS[name], case)}
    folder = arm64.build_level(symbols=symbols, part="tests")
    machine = arm64.Machine(folder, *map(Path, native.kernel_files(str(folder), arm64.LEVEL, "tests")))
    for name, cases in chosen.items():
        check(machine, OPS[name], lambda rng, cases=cases: cases)
    assert machine.features == ["dotprod", "fp16"]
    machine.close()


def test_a_core_without_the_level_says_so():
    """The C runtime on a core of 2016: it has neither feature, and a start would name them."""
    arm64.need_tools()
    folder = arm64.build_level(symbols=["quantize"], part="one")
    machine = arm64.Machine(folder, *map(Path, native.kernel_files(str(folder), arm64.LEVEL, "one")), core="cortex-a72")
    assert machine.features == []
    machine.close()


@pytest.mark.exhaustive("kernels of arm64 in an emulator")
@pytest.mark.parametrize("kind,shape", [("f32", (21, 40, 192)), ("int8", (71, 150, 576)), ("int16", (21, 40, 192))])
def test_a_token_alone_and_in_a_batch(kind, shape, level, monkeypatch):
    """A token's row has the same bits whatever is beside it, as on x86."""
    monkeypatch.setattr(test_matmul_invariance, "run_case", lambda op, case, isa: copied(op, case, level))
    test_matmul_invariance.test_a_token_alone_and_in_a_batch(arm64.LEVEL, kind, *shape)


def copied(op, case, machine) -> dict:
    results = arm64.run_case(op, case, machine, np.random.default_rng(1))
    return {name: np.array(value) for name, value in results.items()}


@pytest.mark.exhaustive("kernels of arm64 in an emulator")
def test_products_have_the_bits_of_x86(level):
    """Sums of integers, then the same f32 operations for a row, whatever a register holds: of weights of 4 to 6 bits; 8 bits are the
    same where x86 has no VNNI."""
    best = host_isas()[-1]
    count = 0
    for case in OPS["matmul"].cases(np.random.default_rng()):
        scheme = case.inputs["weight"].scheme
        if scheme.kind == "affine" and scheme.bits < 8 and not isinstance(case.inputs["a"], np.ndarray):
            here = run_case(OPS["matmul"], case, best)
            np.testing.assert_array_equal(copied(OPS["matmul"], case, level)["out"], here["out"], err_msg=case.name)
            count += 1
    assert count > 40
