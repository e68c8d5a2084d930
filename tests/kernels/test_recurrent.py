"""Recurrent operations on a CPU: chunks are the recurrence, whatever their size and a run's length; a run's results are
its own; a sequence may be cut anywhere; decays of any size leave numbers."""

import numpy as np
import pytest

from kernels.harness import check_case, each_isa, host_isas, run_case, to_tensor
from zse import kernel as zl
from zse.bench.kernels import problem
from zse.bench.own_kernels import cpu_device
from zse.kernels import conv, delta, delta_chunk, gate_output, gated_norm, scan
from zse.kernels.columns import Columns
from zse.kernels.op import Case, Op
from zse.kernels.runs import random_runs
from zse.runtime.null import NullDevice
from zse.tensor import Runs, StatePart, Tensor

BEST = host_isas()[-1:]
ODD = (*range(1, 36), 47, 48, 49, 63, 64, 65, 95, 127, 128, 130)


def variant(op: Op, symbol: str, kernel, **fixed) -> Op:
    """The operation with this form of one of its kernels."""
    return Op(op.name, lambda target: [zl.Variant(symbol, kernel, fixed)], op.launch, op.reference, op.cases, op.cost)


def cases(rng, lengths, fresh=()):
    """(operation, case of these runs) of every kind of state."""
    fixed = {"KERNEL": 4, "BIAS": True, "GATED": False, "ACTIVATION": "silu"}
    yield conv.CONV, conv._case(rng, fixed, 48, lengths, fresh)
    for decay in delta.CHUNKS:
        yield delta.DELTA, delta.make_case(rng, decay, (1, 2, 32, 16), lengths, fresh, 0, delta.NEAR)
    yield scan.SCAN, scan.make_case(rng, (3, 1, 16, 32), lengths, fresh, 0, None, scan.NEAR)


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize(
    "op",
    [
        lambda chunk: (variant(delta.DELTA, "delta_head", delta.delta_head, DECAY="head", CHUNK=chunk), "head"),
        lambda chunk: (variant(scan.SCAN, "scan", scan.scan_heads, CHUNK=chunk), None),
    ],
    ids=["delta", "scan"],
)
def test_chunks_of_other_sizes(op, chunk):
    rng = np.random.default_rng()
    seed = int(rng.integers(2**32))
    rng, (op, decay) = np.random.default_rng(seed), op(chunk)
    fresh = tuple(range(0, len(ODD), 3))
    if decay:
        case = delta.make_case(rng, decay, (1, 2, 32, 16), ODD, fresh, 0, delta.NEAR)
    else:
        case = scan.make_case(rng, (2, 1, 32, 16), ODD, fresh, 0, None, scan.NEAR)
    device = cpu_device(op, 2)
    assert not problem(device, op, case), f"seed {seed}"
    device.close()


@pytest.mark.parametrize("isa", each_isa())
def test_every_length_of_a_run(isa):
    seed = int(np.random.default_rng().integers(2**32))
    for op, case in cases(np.random.default_rng(seed), ODD, tuple(range(0, len(ODD), 3))):
        try:
            check_case(op, case, run_case(op, case, isa, np.random.default_rng(seed)))
        except AssertionError as error:
            raise AssertionError(f"{op.name}, seed {seed}: {error}") from None


@pytest.mark.parametrize("isa", BEST)
def test_states_behind_every_token(isa):
    """Of runs that are fresh and that go on, each token's state is that of the run which ends there, to the bit where that goes
    token by token, and what leaves none leaves the same results."""
    for op, case in cases(np.random.default_rng(), (16, 1, 5), (2,)):
        runs, state = case.inputs["runs"], case.inputs["state"]
        slots = len(state.tensor)
        tensor = np.concatenate([state.tensor, np.full((22, state.stride), np.nan, np.float32)])
        leave = np.arange(slots, slots + 22, dtype=np.int32)
        leave[[15, 16, 21]] = runs.slot  # of last tokens: not read
        runs = runs._replace(leave=leave)
        state = state._replace(tensor=tensor)
        got = run_case(op, part_of(case, 0, 22, runs, state), isa)
        near = case.outputs["out"].tolerance
        for run, (first, last) in enumerate(((0, 16), (16, 17), (17, 22))):
            for token in range(first, last):
                end = token + 1
                piece = Runs(np.array([0, end - first], np.int32), runs.slot[run : run + 1], runs.positions[first:end])
                alone = run_case(op, part_of(case, first, end, piece, state), isa)
                slot = runs.slot[run] if end == last else leave[token]
                found, wanted = got["state.tensor"][slot], alone["state.tensor"][runs.slot[run]]
                part = slice(state.place, state.place + int(np.prod(state.shape)))
                assert np.isnan(np.delete(found, np.r_[part])).all(), (op.name, token)
                wanted = wanted[part]
                assert np.allclose(found[part], wanted, near.relative, 2 * near.absolute), (op.name, token)


def part_of(case: Case, first: int, last: int, runs: Runs, state: StatePart) -> Case:
    """Some of a case's tokens, as these runs, over this state."""
    inputs = {
        name: value[first:last]
        if isinstance(value, np.ndarray) and len(value) == len(case.inputs["runs"].positions)
        else value
        for name, value in case.inputs.items()
    }
    out = case.outputs["out"]
    outputs = {
        "out": type(out)((last - first, out.shape[1]), out.dtype, out.tolerance),
        "state.tensor": type(out)(state.tensor.shape, "float32", out.tolerance, inout=state.tensor),
    }
    return Case(case.name, inputs | {"runs": runs, "state": state}, outputs, case.options)


@pytest.mark.parametrize("isa", BEST)
def test_a_run_alone_and_in_a_batch(isa):
    lengths = (1, 70, 5, 1, 64, 3)
    for op, case in cases(np.random.default_rng(7), lengths, (1,)):
        got, runs, state = run_case(op, case, isa), case.inputs["runs"], case.inputs["state"]
        for run in range(len(lengths)):
            first, last = runs.start[run : run + 2]
            leave = None if runs.leave is None else runs.leave[first:last]
            mine = Runs(
                np.array([0, last - first], np.int32), runs.slot[run : run + 1], runs.positions[first:last], leave
            )
            alone = run_case(op, part_of(case, first, last, mine, state), isa)
            np.testing.assert_array_equal(alone["out"], got["out"][first:last], err_msg=f"{op.name}, run {run}")
            for slot in (runs.slot[run], *(leave[leave >= 0] if leave is not None else ())):
                np.testing.assert_array_equal(alone["state.tensor"][slot], got["state.tensor"][slot], err_msg=op.name)


@pytest.mark.parametrize("isa", BEST)
def test_heads_alone_and_together(isa, monkeypatch):
    """How many heads a block takes depends on the threads, and no result on that."""
    case = scan.make_case(np.random.default_rng(8), (16, 1, 32, 16), (40, 1), (0,), 0, None, scan.NEAR)
    together = run_case(scan.SCAN, case, isa)
    grids = []
    for threads, blocks in ((1, 4), (2, 4), (4, 8), (64, 16)):
        recorder = NullDevice(threads).record()
        recorder.launch = lambda symbol, args, grid: grids.append(grid)
        operands = {name: to_tensor(value) for name, value in case.inputs.items()}
        scan.scan(recorder, out=to_tensor(together["out"]), **operands, **case.options)
        assert grids.pop() == (blocks, 2), threads
    monkeypatch.setattr(scan, "HEADS", 1)
    alone = run_case(scan.SCAN, case, isa)
    for name, found in alone.items():
        np.testing.assert_array_equal(found, together[name])


@pytest.mark.parametrize("isa", BEST)
def test_a_sequence_may_be_cut_anywhere(isa):
    """As prompts in pieces, then token by token. Within the tolerance of the cases: chunks begin elsewhere."""
    total, cuts = 150, (0, 1, 2, 66, 70, 71, 149, 150)
    for op, case in cases(np.random.default_rng(11), (total,), (0,)):
        whole, state, runs = run_case(op, case, isa), case.inputs["state"], case.inputs["runs"]
        for first, last in zip(cuts, cuts[1:], strict=False):
            piece = Runs(np.array([0, last - first], np.int32), runs.slot, runs.positions[first:last])
            got = run_case(op, part_of(case, first, last, piece, state), isa)
            state = state._replace(tensor=got["state.tensor"])
            near = case.outputs["out"].tolerance
            assert np.allclose(got["out"], whole["out"][first:last], near.relative, 2 * near.absolute), (op.name, first)
        assert np.allclose(state.tensor, whole["state.tensor"], near.relative, 2 * near.absolute, equal_nan=True), (
            op.name
        )


@pytest.mark.parametrize("isa", BEST)
def test_decays_of_any_size(isa):
    """Some tokens forget all that there was, others little or nothing: sums of logs of -1e5 lose no digits of what lies between two
    tokens, and no exponent overflows."""
    rng = np.random.default_rng(3)
    for op, case in list(cases(rng, (200, 2), (0,)))[1:]:
        steps = case.inputs["a" if op.name == "delta" else "dt"]
        steps[:] = np.where(rng.random(steps.shape) < 0.1, 5000.0, rng.uniform(-30, 0, steps.shape))
        if "dt_limits" in case.options:
            case.options["dt_limits"] = (0.0, 5000.0)
            case.inputs["x"][:, : case.outputs["out"].shape[1]] *= 1e-4  # times dt
        check_case(op, case, run_case(op, case, isa))


def test_softplus():
    """Against float64, from where exp(x) is tiny to where softplus is x."""

    @zl.kernel
    def softplus_row(x: zl.Ptr[zl.f32], out: zl.Ptr[zl.f32], width: zl.i64):
        for i in range(0, width, zl.target.lanes):
            zl.store(out + i, delta_chunk.softplus(zl.load(x + i, zl.target.lanes)))

    op = Op("softplus", lambda target: [zl.Variant("softplus_row", softplus_row)], None, None, None, None)
    device = cpu_device(op, 1)
    x = np.concatenate([np.linspace(-87, 30, 4096), np.geomspace(1e-6, 100, 512), [0.0] * 16]).astype(np.float32)
    out = np.empty_like(x)
    tensors = dict(x=to_tensor(x), out=to_tensor(out))
    device.run(lambda recorder: recorder.launch("softplus_row", conv.Args(**tensors, width=x.size), (1,)))
    np.testing.assert_allclose(out, np.logaddexp(0, x.astype(np.float64)), rtol=1e-6)
    device.close()


def floats(*shape):
    return Tensor(None, shape, "f32")


def launched(call) -> None:
    recorder = NullDevice().record()
    state = StatePart(floats(4, 4096), 0, (3, 8))
    ints = [Tensor(None, (size,), "i32") for size in (3, 2, 5)]
    call(recorder, state, Runs(*ints))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda r, s, b: conv.conv(r, floats(5, 8), floats(8, 5), None, s, b, floats(5, 8)), "kernel of 5 inputs"),
        (
            lambda r, s, b: conv.conv(r, floats(5, 8), floats(8, 3), None, s, b, floats(5, 8)),
            r"shape \(3, 8\), expected \(2, 8\)",
        ),
        (lambda r, s, b: conv.conv(r, floats(5, 8), floats(8, 4), None, s, b, floats(5, 8), gated=True), "x: shape"),
        (
            lambda r, s, b: conv.conv(r, Columns(floats(5, 10), 4, 8), floats(8, 4), None, s, b, floats(5, 8)),
            "columns 4 to 12 of 10",
        ),
        (
            lambda r, s, b: conv.conv(r, floats(5, 8), floats(8, 4), None, s._replace(place=4080), b, floats(5, 8)),
            "place 4080",
        ),
        (
            lambda r, s, b: delta.delta(
                r, floats(5, 40), floats(5, 1), floats(5, 1), floats(1), floats(1), s, b, floats(5, 16), 1, 12
            ),
            "k_size 12 is not a multiple of 16",
        ),
        (
            lambda r, s, b: delta.delta(
                r, floats(5, 64), floats(5, 2), floats(5, 3), floats(2), floats(3), s, b, floats(5, 32), 1, 16
            ),
            "dt_bias: shape",
        ),
        (
            lambda r, s, b: scan.scan(
                r, floats(5, 64), floats(5, 2), floats(2), floats(2), floats(2), s, b, floats(5, 32), 3, 16
            ),
            "2 heads of 3 groups",
        ),
        (lambda r, s, b: gated_norm.gated_norm(r, *[floats(5, 8)] * 2, floats(3), floats(5, 8), 1e-6), "weight: shape"),
        (
            lambda r, s, b: gated_norm.gated_norm(r, *[floats(5, 8)] * 2, floats(8), floats(5, 8), 1e-6, 3),
            "no 3 equal parts",
        ),
        (lambda r, s, b: gate_output.gate_output(r, floats(5, 32), floats(5, 32), floats(5, 32), 2), "gate: shape"),
        (lambda r, s, b: gate_output.gate_output(r, floats(5, 24), floats(5, 48), floats(5, 24), 2), "multiples of 16"),
    ],
)
def test_launchers_refuse_what_does_not_fit(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        launched(call)


def test_poison_of_cases_shows():
    """Slots of runs that begin hold NaN, and so does what lies beside a part: a kernel that read them would show."""
    runs = random_runs(np.random.default_rng(1), (2, 3), (1,))
    assert runs.positions[2] == 0 and runs.positions[0] > 0 and len(set(runs.slot)) == 2
    (op, case), *_ = cases(np.random.default_rng(1), (2, 3), (1,))
    state = case.inputs["state"]
    assert np.isnan(state.tensor[case.inputs["runs"].slot[1]]).all()
    assert np.isfinite(op.reference(**case.inputs, **case.options)["out"]).all()
