"""The emulator: every part of the GPU language computes what it should in any order of threads, and every planted mistake of
emulator_bugs.py is caught with its source line. The same cases run on hardware: `python -m kernel.probe`."""

import inspect
import re
from ctypes import c_uint64

import numpy as np
import pytest

from zse import kernel as zl
from zse.errors import CompileError, DeviceError
from zse.kernel import cache
from zse.runtime.args import Args
from zse.tensor import Tensor
from zse_emulator import EmulateDevice, compiling
from zse_emulator.device import core

from . import emulator_bugs as bugs
from . import gpu_cases

CASES = {case.name: case.variant.symbol for case in gpu_cases.all_cases(np.random.default_rng(0))}


@pytest.fixture(scope="module")
def device(kept_kernels):
    variants = {case.variant.symbol: case.variant for case in gpu_cases.all_cases(np.random.default_rng(0))}
    with EmulateDevice(variants=variants, dependent=False) as device:
        yield device


@pytest.mark.parametrize("name", CASES)
def test_the_language(name, device):
    seed = int(np.random.default_rng().integers(2**32))
    for number in range(2):
        case = next(case for case in gpu_cases.all_cases(np.random.default_rng([seed, number])) if case.name == name)
        order = device.seed
        try:
            gpu_cases.run_case(device, case)
        except AssertionError as error:
            raise AssertionError(f"inputs {seed}, order {order}: {error}") from None


class Run:
    """One kernel of emulator_bugs.py on fresh buffers."""

    def __init__(self, function, threads: int, seed: int, dependent: bool = False, grid: int = 1, elements: int = 256):
        self.variant = zl.Variant(function.name, function, threads=threads)
        self.device = EmulateDevice(variants={function.name: self.variant}, seed=seed, dependent=dependent)
        rng = np.random.default_rng(seed)
        self.x = rng.uniform(0.5, 1, 8192 if elements > 256 else 256).astype(np.float32)
        extra = {"n": 0, "parts": np.zeros(8, np.float32), "arrived": np.zeros(1, np.uint32)}
        self.args = Args()
        for name, annotation in function.params:
            value = {"x": self.x, "out": np.zeros(elements, np.float32)}.get(name, extra.get(name))
            if isinstance(value, np.ndarray):
                tensor = Tensor(
                    self.device.alloc(value.nbytes, name), value.shape, "u32" if value.dtype == np.uint32 else "f32"
                )
                self.device.write(tensor, value.tobytes())
                value = tensor
            self.args[name] = value
        self.grid = grid

    def launch(self) -> None:
        self.device.run(lambda recorder: recorder.launch(self.variant.symbol, self.args, self.grid))

    def out(self) -> np.ndarray:
        return np.frombuffer(self.device.read(self.args["out"]), np.float32)


def lines_of(function) -> list[str]:
    """file:line of the lines marked `# here`."""
    lines, first = inspect.getsourcelines(function.function)
    return [f"emulator_bugs.py:{first + index}" for index, line in enumerate(lines) if line.rstrip().endswith("# here")]


# mistake → (threads, grid, what the report says)
MISTAKES = {
    "missing_barrier": (64, 1, "race: reads what thread \\d+ wrote|reads shared memory that nothing has written"),
    "missing_barrier_before_bytes": (64, 1, "race: reads what thread \\d+ wrote|nothing has written"),
    "missing_second_barrier": (64, 1, "race: (writes what thread \\d+ reads|reads what thread \\d+ wrote)"),
    "missing_warp_barrier": (64, 1, "race: reads what|nothing has written"),
    "missing_copy_wait": (64, 1, "has not been waited for"),
    "wait_for_too_few": (64, 1, "has not been waited for"),
    "wait_without_barrier": (64, 1, "race: reads what|nothing has written|has not been waited for"),
    "off_by_one_global": (256, 1, "reads 4 bytes at offset 1024 of 'x', which has 1024 bytes"),
    "off_by_one_shared": (64, 1, "writes shared memory outside of the arrays"),
    "store_past_the_end": (128, 1, "writes 16 bytes at offset \\d+ of 'out'"),
    "misaligned": (32, 1, "no multiple of 16"),
    "uninitialised": (64, 1, "reads shared memory that nothing has written"),
    "barrier_in_a_branch": (64, 1, "deadlock: 32 threads wait in barrier\\(\\)"),
    "named_barrier_of_too_many": (64, 1, "deadlock: 32 threads wait in named_barrier\\(\\)"),
    "shuffle_in_a_branch": (32, 1, "deadlock: 16 threads wait in shuffle_xor\\(\\)"),
    "divergent_shuffles": (32, 1, "not together"),
    "ldmatrix_of_own_stores": (32, 1, "race: reads what thread \\d+ wrote"),
    "mbarrier_never_completes": (64, 1, "deadlock: 64 threads wait in mbarrier_wait\\(\\)"),
    "mbarrier_unpublished": (64, 1, "not been initialised|no barrier has published"),
    "bulk_read_early": (64, 1, "has not been waited for|race: reads what"),
    "bulk_overwrites_readers": (64, 1, "race: copies into what thread \\d+ reads|has not been waited for|race: reads"),
    "store_without_fence": (64, 1, "without fence_async"),
    "wgmma_without_fence_async": (128, 1, "without fence_async"),
    "blocks_race": (32, 4, "race: writes what block \\d, 0, 0 wrote"),
    "last_block_without_fence": (32, 4, "race: reads what block \\d, 0, 0 wrote"),
    "spins_for_ever": (32, 2, "deadlock: \\d+ threads wait in a loop around load_acquire"),
    "no_end": (1, 1, "a loop without an end"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(name, kept_kernels, monkeypatch):
    """In every order of threads, with the line of the mistake."""
    threads, grid, report = MISTAKES[name]
    if name == "no_end":  # 400 million accesses take 10 s
        longest = c_uint64.in_dll(core(), "zse_emulate_longest")
        assert longest.value == 400 << 20
        monkeypatch.setattr(longest, "value", 4 << 20)
    function = getattr(bugs, name)
    for seed in range(1 if name == "no_end" else 12):
        with pytest.raises(DeviceError) as caught:
            Run(function, threads, seed, grid=grid, elements=8192 if "wgmma" in name else 256).launch()
        text = str(caught.value)
        assert re.search(report, text), text
        assert text.startswith(tuple(lines_of(function))), text
        assert f": {name}: " in text and f"seed {seed}" in text


def test_bytes_of_a_word_are_watched_one_by_one(kept_kernels):
    for seed in range(12):
        run = Run(bugs.bytes_side_by_side, 64, seed)
        run.launch()
        t = np.arange(64)
        np.testing.assert_array_equal(run.out()[:64], t + (63 - t) // 4 * 4 + 3)


def test_a_wrong_fragment_gives_a_wrong_product(kept_kernels):
    run = Run(bugs.wrong_fragment, 32, 0)
    run.launch()
    bits = run.x.view(np.uint16)[:256].reshape(16, 16)
    a = gpu_cases.of_bf16(bits).astype(np.float64)
    want = a @ a[:8].T
    assert not np.allclose(run.out()[:128].reshape(16, 8), want, rtol=1e-3)


def test_accumulators_are_nan_before_the_wait(kept_kernels):
    run = Run(bugs.accumulators_before_the_wait, 128, 0, elements=8192)
    run.launch()
    assert np.isnan(run.out()[:128]).all()


@pytest.mark.parametrize(
    "name,report",
    [
        ("reads_before_grid_wait", "reads of 'x' what an earlier kernel wrote, before grid_wait"),
        ("writes_before_grid_wait", "writes to 'out' before grid_wait"),
        ("never_waits", "no thread of the block calls grid_wait"),
    ],
)
def test_the_rule_of_dependent_launches(name, report, kept_kernels):
    function = getattr(bugs, name)
    variants = {name: zl.Variant(name, function, threads=32), "good": zl.Variant("good", bugs.good, threads=64)}
    device = EmulateDevice(variants=variants, seed=1)
    x, y, z = (Tensor(device.alloc(256, label), (64,), "f32") for label in ("w", "x", "out"))

    def two(recorder):
        recorder.launch("good", Args(x=x, out=y), 1)
        recorder.launch(name, Args(x=y, out=z), 1)

    with pytest.raises(DeviceError, match=report) as caught:
        device.run(two)
    assert str(caught.value).startswith(tuple(lines_of(function)))
    if (
        name == "reads_before_grid_wait"
    ):  # what a kernel before the one before wrote is there, and what was waited for may be read at once

        def three(recorder):
            recorder.launch("good", Args(x=x, out=y), 1)
            recorder.launch("good", Args(x=y, out=z), 1)
            recorder.launch(name, Args(x=y, out=x), 1)

        device.run(three)
        device.run(lambda recorder: recorder.launch("good", Args(x=x, out=y), 1))
        device.run(lambda recorder: recorder.launch(name, Args(x=y, out=z), 1))


def test_a_kernel_that_lets_the_next_start_early(kept_kernels):
    """Then the one after it may start before the one before it is done."""
    names = ("good", "lets_start_early", "reads_before_grid_wait")
    device = EmulateDevice(variants={name: zl.Variant(name, getattr(bugs, name), threads=64) for name in names}, seed=3)
    x, y, z = (Tensor(device.alloc(256, label), (64,), "f32") for label in ("w", "x", "out"))

    def three(recorder):
        for name, source, target in zip(names, (x, x, y), (y, z, z), strict=True):
            recorder.launch(name, Args(x=source, out=target), 1)

    with pytest.raises(DeviceError, match="reads of 'x' what an earlier kernel wrote, before grid_wait"):
        device.run(three)


def test_unwritten_memory_may_be_allowed(kept_kernels):
    variant = zl.Variant("uninitialised", bugs.uninitialised, threads=64)
    device = EmulateDevice(variants={"uninitialised": variant}, dependent=False, initialised=False)
    x, out = (Tensor(device.alloc(1024, label), (256,), "f32") for label in ("x", "out"))
    device.run(lambda recorder: recorder.launch("uninitialised", Args(x=x, out=out), 1))
    assert np.isnan(np.frombuffer(device.read(out), np.float32)[:64]).tolist() == [True] + [False] * 63


def test_good_kernels_pass_in_every_order(kept_kernels):
    for seed in range(20):
        run = Run(bugs.good, 64, seed, dependent=True)
        run.launch()
        sums = run.x[:64].reshape(2, 32).astype(np.float64).sum(1) * 32
        np.testing.assert_allclose(run.out()[:64], np.repeat(sums, 32)[::-1], rtol=1e-5)


def test_memory_between_buffers_is_nobodys(kept_kernels):
    device = EmulateDevice(
        variants={"blocks_race": zl.Variant("blocks_race", bugs.blocks_race, threads=32)}, dependent=False
    )
    x, out = device.alloc(128, "x"), device.alloc(128, "gone")
    device.run(lambda recorder: recorder.launch("blocks_race", Args(x=x, out=out), 1))
    address = out.address
    out.free()
    with pytest.raises(DeviceError, match="writes 4 bytes"):
        device.run(lambda recorder: recorder.launch("blocks_race", Args(x=x, out=address), 1))


@zl.kernel
def uses_asm(x: zl.Ptr[zl.u32]):
    x[0] = zl.asm("mov.u32 %0, 7;", zl.u32)


def test_assembly_cannot_be_emulated(kept_kernels):
    device = EmulateDevice(variants={"uses_asm": zl.Variant("uses_asm", uses_asm)})
    with pytest.raises(CompileError, match="asm has no body for target emulate-sm_90a"):
        device.program("uses_asm")


def test_a_printed_kernel_is_kept_for_other_processes(tmp_path, monkeypatch):
    """By its sources. Where these are written while a process runs it prints for itself, as it does kernels of no name elsewhere."""
    monkeypatch.setenv("ZSE_HOME", str(tmp_path))
    printed, real = [], compiling.emit_for
    monkeypatch.setattr(
        compiling, "emit_for", lambda variant, target: printed.append(target.name) or real(variant, target)
    )

    def in_another_process(like: str = "sm_90a") -> tuple[str, dict]:
        monkeypatch.setattr(compiling, "_emitted", {})
        return compiling.emitted(cache.package_variants(like)["gather_rows"], like)

    assert in_another_process() == in_another_process() and len(printed) == 1
    (kept,) = (tmp_path / "kernels" / "emulate").glob("*.json")
    in_another_process("sm_80")
    assert printed == ["emulate-sm_90a", "emulate-sm_80"]
    whole = kept.read_bytes()
    kept.write_bytes(whole.replace(b"gather", b"gathes", 1))
    assert "gathes" not in in_another_process()[0] and len(printed) == 3 and kept.read_bytes() == whole
    started = compiling._STARTED_NS
    monkeypatch.setattr(compiling, "_STARTED_NS", 0)
    in_another_process()
    assert len(printed) == 4
    monkeypatch.setattr(compiling, "_STARTED_NS", started)
    monkeypatch.setattr(compiling, "_fingerprint", lambda: "another")
    in_another_process()
    assert len(printed) == 5 and len(list(kept.parent.glob("*.json"))) == 3
    own = zl.Variant("missing_barrier", bugs.missing_barrier)
    assert compiling._text_file(own, "sm_90a", (256, 1, 1)) is None
