"""Recurrent layers on a GPU: which kernels their operations record, Metal's forms in the emulator, and that a run's
results are its own. Every operation's cases on NVIDIA's architectures are in test_emulated_ops.py, HIP's in
tests/kernel/test_hip.py, whole models in tests/models/test_emulated_model.py."""

import numpy as np
import pytest
from gpu.harness import check_cases, run_case

from zse.kernel import cache
from zse.kernels.conv import CONV, conv
from zse.kernels.delta import DELTA, OutputGate, delta, make_case
from zse.kernels.gate_output import GATE_OUTPUT
from zse.kernels.gated_norm import GATED_NORM
from zse.kernels.gpu import state_cases, state_chunks
from zse.kernels.op import Case, OutputSpec
from zse.kernels.scan import SCAN, scan
from zse.runtime.null import NullGPU
from zse.tensor import SHORT_RUN, Runs, StatePart, Tensor
from zse_emulator import EmulateDevice


def new(device, dtype, *shape):
    return Tensor(device.alloc(4), shape, dtype)


def recorded(op, arch="sm_90a", tokens=64, longest_run=None, size=128, gate=False, work=True, stride=0):
    """The symbols that an operation over three runs records: delta of 2 and 4 heads, scan of 4 heads of one group."""
    device = NullGPU(arch)
    recorder = device.record()
    runs = Runs(new(device, "i32", 4), new(device, "i32", 3), new(device, "i32", tokens))
    heads, state = 4, new(device, "f32", 5, 1 << 20)
    vectors = [new(device, "f32", heads) for _ in range(3)]
    common = {"longest_run": longest_run}
    if op is delta:
        width = heads * size
        inputs = [new(device, "f32", tokens, columns) for columns in (4 * size + width, heads, heads)]
        if work:
            columns = state_chunks.work_width("delta", 2, size, heads) + width
            common["work"] = new(device, "f32", tokens, columns)
        if gate:
            z, norm = new(device, "f32", tokens, width), new(device, "f32", size)
            common["gate"] = OutputGate(z, norm, 1e-6)
        part, out = StatePart(state, 0, (heads, size, size)), new(device, "bf16" if gate else "f32", tokens, width)
        delta(recorder, *inputs, *vectors[:2], part, runs, out, k_heads=2, k_size=size, **common)
    elif op is scan:
        x, dt = new(device, "f32", tokens, heads * 64 + 2 * size), new(device, "f32", tokens, heads)
        if work:
            common["work"] = new(device, "f32", tokens, state_chunks.work_width("scan", 1, size, heads))
        part, out = StatePart(state, 0, (heads, size, 64)), new(device, "f32", tokens, heads * 64)
        scan(recorder, x, dt, *vectors, part, runs, out, groups=1, state_size=size, **common)
    else:
        x, weight = new(device, "f32", tokens, 64 + stride), new(device, "f32", 64 + stride, 4)
        out = new(device, "f32", tokens, 64 + stride)
        conv(recorder, x, weight, None, StatePart(state, 0, (3, 64 + stride)), runs, out, "silu", **common)
    return [launch.symbol for launch in recorder.launches]


def test_steps_of_one_token_a_row_have_one_launch_and_prompts_their_chunks():
    chunks = ["prepare_delta_128_128", "walk_delta_128_128_w4"]
    assert recorded(delta, longest_run=1) == ["delta_tokens_128_128"]
    assert recorded(delta, longest_run=1, gate=True) == ["delta_tokens_128_128_silu"]
    assert recorded(delta, longest_run=SHORT_RUN, gate=True) == ["delta_tokens_128_128_silu"]
    assert recorded(delta) == ["delta_tokens_128_128", *chunks]
    assert recorded(delta, gate=True) == ["delta_tokens_128_128", *chunks, "gated_norm_norm_first_silu_w32"]
    assert recorded(scan) == ["scan_tokens_128_64", "prepare_scan_128_64", "walk_scan_128_64_w4"]
    assert recorded(scan, longest_run=1) == ["scan_tokens_128_64"]
    assert recorded(conv) == ["conv_4_silu_t8"] and recorded(conv, longest_run=1) == ["conv_4_silu_t1"]


def test_sizes_without_kernels_of_their_own_go_token_by_token():
    assert recorded(delta, size=64) == ["delta_tokens_64_64"]
    assert recorded(delta, size=48) == ["delta_columns"]
    assert recorded(scan, size=48) == ["scan_columns"]
    assert recorded(delta, work=False) == ["delta_tokens_128_128"]
    assert recorded(delta, arch="gfx90a", gate=True) == ["delta_tokens_128_128_silu"]
    assert recorded(scan, arch="metal3.1") == ["scan_tokens_128_64"]


def test_what_kernels_cannot_take_is_refused():
    with pytest.raises(ValueError, match="66 channels are no multiple of 4"):
        recorded(conv, stride=2)
    with pytest.raises(ValueError, match="no gated form of 48 x 48"):
        recorded(delta, size=48, gate=True)


@pytest.mark.exhaustive  # HIP's forms, in make test, are in tests/kernel/test_hip.py
@pytest.mark.parametrize("op", [CONV, DELTA, SCAN, GATED_NORM, GATE_OUTPUT], ids=lambda op: op.name)
def test_reference(op, kept_kernels):
    seed = int(np.random.default_rng().integers(2**32))
    cases = list(op.cases(np.random.default_rng(seed), "gpu"))
    with EmulateDevice("metal3.1", cache.package_variants("metal3.1"), seed=seed) as device:
        check_cases(op, device, seed, cases, 6)


def alone(case: Case, run: int) -> Case:
    """The case with one of its runs. The state's slots stay where they are."""
    runs, inputs = case.inputs["runs"], dict(case.inputs)
    first, last = runs.start[run], runs.start[run + 1]
    for name in ("qkv", "b", "a"):
        inputs[name] = np.ascontiguousarray(inputs[name][first:last])
    start = np.array([0, last - first], np.int32)
    leave = None if runs.leave is None else np.ascontiguousarray(runs.leave[first:last])
    inputs["runs"] = Runs(start, runs.slot[run : run + 1], np.ascontiguousarray(runs.positions[first:last]), leave)
    out = case.outputs["out"]
    outputs = case.outputs | {"out": OutputSpec((int(last - first), out.shape[1]), out.dtype, out.tolerance)}
    return Case(case.name, inputs, outputs, case.options)


def test_a_run_has_the_same_bits_in_any_batch(kept_kernels):
    """Of prompts by chunks, wherever they begin in the batch, and of short runs beside them."""
    case = make_case(np.random.default_rng(), "head", (1, 1, 128, 128), (3, 70, 5), (1,), 0, state_cases.NEAR)
    case = state_cases.by_chunks(case, "delta", 1, 128, 1)
    with EmulateDevice("sm_90a", cache.package_variants("sm_90a")) as device:
        together = run_case(DELTA, case, device)
        start, slots = case.inputs["runs"].start, case.inputs["runs"].slot
        for run in range(3):
            found = run_case(DELTA, alone(case, run), device)
            np.testing.assert_array_equal(found["out"], together["out"][start[run] : start[run + 1]])
            np.testing.assert_array_equal(found["state.tensor"][slots[run]], together["state.tensor"][slots[run]])


def test_chunks_of_a_prompt_may_end_anywhere(kept_kernels):
    """A run in two steps against the reference of the whole: its state goes on from where the first ended."""
    whole = make_case(np.random.default_rng(), "head", (1, 1, 128, 128), (90,), (0,), 0, state_cases.NEAR)
    inputs, state = whole.inputs, whole.inputs["state"]
    forgetting = inputs | {"A": inputs["A"] * np.float32(state_cases.FORGETTING[0])}
    wanted = DELTA.reference(**forgetting, **whole.options)
    with EmulateDevice("sm_90a", cache.package_variants("sm_90a")) as device:
        results = []
        for first, last in ((0, 41), (41, 90)):
            part = {name: np.ascontiguousarray(inputs[name][first:last]) for name in ("qkv", "b", "a")}
            positions = np.arange(first, last, dtype=np.int32)
            part["runs"] = Runs(np.array([0, last - first], np.int32), inputs["runs"].slot, positions)
            out = OutputSpec((last - first, 128), "float32", state_cases.NEAR)
            outputs = {
                "out": out,
                "state.tensor": OutputSpec(state.tensor.shape, "float32", out.tolerance, state.tensor),
            }
            case = Case("part", inputs | part | {"state": state}, outputs, whole.options)
            found = run_case(DELTA, state_cases.by_chunks(case, "delta", 1, 128, 1), device)
            results.append(found["out"])
            state = state._replace(tensor=found["state.tensor"])
    assert not state_cases.off_by(np.concatenate(results), wanted["out"])
    assert not state_cases.off_by(state.tensor, wanted["state.tensor"])
