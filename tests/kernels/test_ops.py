"""Every operation against its float64 reference, on every kernel library that this machine can run."""

import numpy as np
import pytest
from gpu.harness import gpu_ops

from kernels.harness import check_case, each_isa, host_isas, library, run_case, to_tensor
from zse.kernel.emit import emit_unit
from zse.kernel.targets.cpu import ISAS
from zse.kernels.activation import gated
from zse.kernels.gather import gather_rows
from zse.kernels.norm import add_rmsnorm
from zse.kernels.quantize import quantize
from zse.kernels.rope import rope_table
from zse.kernels.sample import logprob_rows, sample
from zse.kernels.table import all_ops, all_variants
from zse.runtime.null import NullDevice
from zse.tensor import Activation


def test_this_machine_runs_some_kernels():
    assert host_isas(), "no kernel library fits this CPU: the kernels below were not tested"


# Some are a GPU's alone.
CPU_OPS = [op for op in all_ops() if op.variants(ISAS["x86-64-v3"])]


@pytest.mark.parametrize("isa", each_isa())
@pytest.mark.parametrize("op", CPU_OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("threads", [False, True], ids=["direct", "graph"])
def test_reference(op, isa, threads):
    """direct: blocks one by one in random order; graph: recorded and replayed by the pool's two threads."""
    rng = np.random.default_rng()  # fresh inputs in every run; the seed is in the failure's message
    seed = int(rng.integers(2**32))
    count = 0
    for case in op.cases(np.random.default_rng(seed)):
        got = run_case(op, case, isa, np.random.default_rng(seed), threads)
        try:
            check_case(op, case, got)
        except AssertionError as error:
            raise AssertionError(f"{op.name}, {isa}, seed {seed}: {error}") from None
        cost = op.cost(case)
        assert cost.bytes > 0 and cost.flops >= 0
        count += 1
    assert count


def test_no_test_compiles_a_lower_level(monkeypatch, tmp_path):
    """It is tests/prepare.py's to do, before the tests and with all cores."""
    monkeypatch.setenv("ZSE_NATIVE_DIR", str(tmp_path))
    lower = next(level for level in ISAS if level not in host_isas()[-1:])
    with pytest.raises(AssertionError, match="prepare.py --rest"):
        library.__wrapped__(lower)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("isa", sorted(ISAS))
def test_symbols_are_unique_and_launchable(isa):
    symbols = [variant.symbol for variant in all_variants(ISAS[isa])]
    assert len(symbols) == len(set(symbols)) and symbols == sorted(symbols)


@pytest.mark.each()
@pytest.mark.parametrize("isa", sorted(set(ISAS) - set(host_isas())))
@pytest.mark.parametrize("op", [op for op in all_ops() if op.name != "matmul"], ids=lambda op: op.name)
def test_emits_for_machines_other_than_this(op, isa):
    variants = op.variants(ISAS[isa])
    text, manifest = emit_unit(variants, isa)
    assert set(manifest) == {variant.symbol for variant in variants}
    assert all(f"void {symbol}(" in text for symbol in manifest)


def floats(*shape):
    return to_tensor(np.zeros(shape, np.float32))


def ints(*shape):
    return to_tensor(np.zeros(shape, np.int32))


def wide(rows, columns):
    """An int16 activation."""
    bytes, blocks = to_tensor(np.zeros((rows, columns), np.int8)), floats(rows, columns // 32)
    return Activation(bytes, blocks, blocks, bytes)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda r: add_rmsnorm(r, floats(2, 8), floats(2, 9), None, None, None, 1e-5), "delta: shape"),
        (lambda r: add_rmsnorm(r, floats(2, 8), None, None, None, None, 1e-5), "nothing to do"),
        (lambda r: add_rmsnorm(r, floats(2, 8), None, None, floats(8), None, 1e-5), "go together"),
        (lambda r: gated(r, floats(2, 8), floats(2, 5), "silu"), "gate_up: shape"),
        (lambda r: gated(r, floats(2, 8), floats(2, 4), "relu"), "kind 'relu'"),
        (lambda r: quantize(r, floats(2, 40), floats(2, 40)), "not a multiple of 32"),
        (lambda r: quantize(r, floats(2, 32), wide(2, 32)), "out is int16"),
        (lambda r: gather_rows(r, floats(5, 8), ints(3), floats(2, 8)), "rows: shape"),
        (lambda r: gather_rows(r, floats(5, 8), floats(2), floats(2, 8)), "rows: dtype f32, expected i32"),
        (lambda r: rope_table(r, ints(3), floats(12), floats(3, 24)), "not a multiple of 16"),
        (lambda r: logprob_rows(r, floats(3, 9), ints(2), floats(3), ints(3)), "targets: shape"),
        (lambda r: sample(r, floats(3, 9), temperature=floats(3)), "missing or unknown"),
    ],
)
def test_launchers_refuse_what_does_not_fit(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(NullDevice().record())


def test_operations_have_gpu_forms():
    assert {
        "embed",
        "add_rmsnorm",
        "gated",
        "quantize",
        "gather_rows",
        "rope_table",
        "sample",
        "logprob_rows",
        "feed_tokens",
    } <= {op.name for op in gpu_ops()}
