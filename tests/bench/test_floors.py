"""A CPU's floors, what a step of a model must do, and figures that claim more than the machine can."""

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from zse import LLM
from zse.bench import floors, process, roofline
from zse.bench.floors import Floors
from zse.errors import EngineError
from zse.kernel.targets.cpu import ISAS
from zse.kernels import floor
from zse.runtime.cpu import CPUDevice

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
import tiny_model  # noqa: E402

MACHINE = Floors(read=10.0, int8=100.0, f32=50.0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    with LLM(tiny_model.write(tmp_path_factory.mktemp("models") / "tiny"), threads=1, device="cpu") as llm:
        yield llm


def test_the_kernels_do_what_is_counted():
    """Each word is read and each product added: else a compiler has left out what the floor counts."""
    meter = floors.FloorMeter(CPUDevice(1), 2 * floor.READ_BYTES)
    words = np.frombuffer(meter._source.view(), np.int32)
    words[:] = np.random.default_rng(0).integers(-(2**31), 2**31, words.size)
    out = np.frombuffer(meter._out.view(), np.int32)
    meter._graphs["read"].run()
    for block in range(2):
        mine = words[block * floor.READ_BYTES // 4 :][: floor.READ_BYTES // 4]
        got = out[block * floor.OUT_BYTES // 4 :][:16]
        assert np.bitwise_xor.reduce(got[: _lanes(got)]) == np.bitwise_xor.reduce(mine)
    meter._graphs["int8"].run()
    w, a = words[:16].view(np.uint8).astype(np.int64).reshape(16, 4), words[: floor.WORDS].view(np.int8).reshape(-1, 4)
    lane = (w[0] & 255) @ a.astype(np.int64).sum(0)
    passes = floor.PRODUCTS // (_registers(meter) * floor.WORDS)
    if "vnni" in ISAS[meter._device.isa].features:  # without VNNI random bytes saturate the sums of pairs
        assert out[0] == np.int64(lane * passes).astype(np.int32)
    numbers = words.view(np.float32)
    numbers[:] = np.random.default_rng(1).integers(-8, 9, words.size)  # whole: every order of adding is exact
    meter._graphs["f32"].run()
    lanes = ISAS[meter._device.isa].lanes
    passes = floor.PRODUCTS // ((12 if lanes == 16 else 3) * lanes * floor.WORDS)
    assert out[0].view(np.float32) == numbers[0] * numbers[: floor.WORDS].sum() * passes
    del words, out, mine, got, w, a, numbers
    found = meter.measure(0.01)
    assert all(value > 0.1 for value in found) and found.line().startswith("read ")
    assert floors.best([found, MACHINE]) >= MACHINE[:0] and floors.medians([MACHINE] * 3) == MACHINE
    meter.close()


def _lanes(got) -> int:
    return 16 if got[8:16].any() else 8


def _registers(meter) -> int:
    """Lanes that the block's registers of w have."""
    isa = ISAS[meter._device.isa]
    return isa.lanes * (12 if isa.lanes == 16 else 3 if "vnni" in isa.features else 4)


def test_a_step_reads_all_weights_and_multiplies_each_once_a_token(tiny):
    runner, config = tiny._engine.runner, tiny.model_config
    model = runner.model
    head = model.weights.get("head") or model.weights["embed"]
    layers = [weight for name, weight in model.weights.items() if name.startswith("layers.")]
    nbytes = sum(plane.nbytes for weight in [head, *layers] for plane in weight.planes.values())
    assert roofline.weights_bytes(model) == nbytes
    one, many = (roofline.step_work(runner, tokens, 1, 0) for tokens in (1, 7))
    products = [sum(weight.shape[0] * weight.shape[1] for weight in weights) for weights in ([head], layers)]
    assert one.bytes == many.bytes == nbytes
    assert one.int8 + one.f32 == sum(products) and many.int8 + many.f32 == products[0] + 7 * products[1]
    deep = roofline.step_work(runner, 1, 1, 32)
    assert deep.bytes - one.bytes == 32 * runner.kv.page_nbytes // (16 * runner.kv.blocks_per_page)
    assert deep.f32 - one.f32 == 2 * 32 * config.num_layers * config.num_heads * config.head_dim


def test_work_takes_the_longer_of_reading_and_multiplying():
    assert roofline.Work(bytes=10 * 10**9, int8=10**9).seconds(MACHINE) == 1.0
    assert roofline.Work(int8=50 * 10**9, f32=25 * 10**9).seconds(MACHINE) == 1.0


def test_a_figure_above_the_floor_fails(tiny):
    judge = roofline.FloorJudge(tiny._engine.runner, SimpleNamespace(measure=lambda: MACHINE))
    limit = 1 / roofline.step_work(tiny._engine.runner, 1, 1, 16).seconds(MACHINE)
    assert judge.share("decode", limit / 2, 1, 1, 16) == pytest.approx(0.5)
    with pytest.raises(EngineError, match="decode: .* is above the machine's floor of .*: something else was measured"):
        judge.share("decode", 1.2 * limit, 1, 1, 16)


def test_floors_that_others_slowed_are_measured_again(tiny):
    slow = MACHINE._replace(read=MACHINE.read / 2, int8=MACHINE.int8 / 2, f32=MACHINE.f32 / 2)
    limit = 1 / roofline.step_work(tiny._engine.runner, 1, 1, 16).seconds(MACHINE)
    for slowed, is_refused in ((roofline.AGAIN + 1, False), (roofline.AGAIN + 2, True)):
        measured = iter([slow] * slowed + [MACHINE] * 9)
        judge = roofline.FloorJudge(
            tiny._engine.runner, SimpleNamespace(measure=lambda measured=measured: next(measured))
        )
        with pytest.raises(EngineError, match="above the machine's floor") if is_refused else nullcontext():
            assert judge.share("decode", 0.9 * limit, 1, 1, 16) == pytest.approx(1.8)  # by the two beside it
        assert len(judge.floors) == 2 + roofline.AGAIN


def test_cached_tokens_and_drafts_are_no_figures_of_a_model():
    roofline.check_uncached({"prefix_hit_tokens": 0, "drafted_tokens": 0})
    with pytest.raises(EngineError, match="99 tokens came from the prefix cache"):
        roofline.check_uncached({"prefix_hit_tokens": 99})
    with pytest.raises(EngineError, match="3 tokens were drafts"):
        roofline.check_uncached({"prefix_hit_tokens": 0, "drafted_tokens": 3.0})


def test_a_gpus_memory_stands_beside_the_process():
    gpu = SimpleNamespace(shares_memory=False, memory=lambda: {"layers": 5, "kv": 7}, memory_total=100, memory_free=60)
    found = process.memory_bytes(gpu)
    assert (
        found["gpu_allocated_bytes"] == 12 and found["gpu_taken_bytes"] == 40 and found["peak_memory_bytes"] > 1 << 20
    )
    assert list(process.memory_bytes(SimpleNamespace(shares_memory=True))) == ["peak_memory_bytes"]
