"""A GPU's kernels against NumPy: `zse kernels check` and `build` compare them, what was wrong is remembered by the hash of its cubin and
not loaded. The GPU is the emulator, the cubins' bytes are invented."""

from types import SimpleNamespace

import pytest
from gpu_fixtures import Fake, compile_driver

from zse.bench import kernels, self_check
from zse.cli import doctor_gpu
from zse.cli import kernels as command
from zse.errors import CompileError, DeviceLost, DeviceMemoryError
from zse.kernel import cache, emit, nvrtc
from zse.kernels import table
from zse.runtime.bindings.cuda import CUDADriver
from zse.runtime.cuda import CUDADevice
from zse_emulator import EmulateDevice
from zse_emulator import device as emulated

ARCH = "sm_80"
OPS = [op for op in table.all_ops() if op.name in ("gather_rows", "scale_rows")]
VARIANTS = {variant.symbol: variant for op in OPS for variant in op.gpu_variants(emit.gpu_target(ARCH))}


def pack_of(cubins: dict[str, bytes]) -> None:
    entry = dict(params=[], threads=1, shared_bytes=0)
    made = [nvrtc.Compiled(symbol, ARCH, cubin, 10, 0, "", **entry) for symbol, cubin in cubins.items()]
    cache.write_pack(cache.pack_path(ARCH), ARCH, made)


@pytest.fixture
def gpu(tmp_path, kernel_cache, monkeypatch):
    """(check() as `zse kernels check` runs it, harm(symbol): from now on the GPU miscomputes that kernel)."""
    monkeypatch.setenv("ZSE_HOME", str(tmp_path / "home"))
    pack_of({symbol: b"cubin of " + symbol.encode() for symbol in VARIANTS})
    harmed: set[str] = set()
    real, compiled = emulated.emitted, emulated.compiled

    def compiled_once(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ZSE_HOME", str(kernel_cache))
            return compiled(*args)

    def miscompiled(variant, like):
        text, entry = real(variant, like)
        return text.replace(")) * zse_load", ")) + zse_load") if variant.symbol in harmed else text, entry

    def opened(name):
        device = EmulateDevice(ARCH, VARIANTS, seed=1)
        device.pack = cache.open_pack(ARCH)
        return device

    monkeypatch.setattr(emulated, "emitted", miscompiled)
    monkeypatch.setattr(emulated, "compiled", compiled_once)
    monkeypatch.setattr(command.opening, "open_device", opened)
    monkeypatch.setattr(kernels, "package_ops", lambda names: OPS)
    check = SimpleNamespace(kind="check", file=None, device=None, seed=1)
    return lambda: command.run(check), harmed.add


def test_right_kernels_are_remembered_as_such(gpu, capsys):
    check, _ = gpu
    assert doctor_gpu._kernels(ARCH)[1::2] == ("note", "zse kernels check")
    assert check() == 0
    assert "2 kernels compared with NumPy" in capsys.readouterr().out
    assert list(cache.compared(ARCH).values()) == ["", ""]
    assert cache.open_pack(ARCH).image("scale_rows") == b"cubin of scale_rows"
    assert doctor_gpu._kernels(ARCH)[1] == "ok" and "2 compared with NumPy here" in doctor_gpu._kernels(ARCH)[2]


def test_a_wrong_kernel_is_not_loaded_until_it_is_right(gpu, capsys, tmp_path):
    check, harm = gpu
    harm("scale_rows")
    assert check() == 1
    said = capsys.readouterr().out
    assert "scale_rows, " in said and "values are wrong" in said and "1 are wrong and will not be loaded" in said
    kept = cache.open_pack(ARCH)
    assert kept.image("gather_rows") == b"cubin of gather_rows"
    with pytest.raises(CompileError, match="scale_rows is not loaded: it computed wrong numbers on this machine's GPU"):
        kept.image("scale_rows")
    assert doctor_gpu._kernels(ARCH)[1] == "bad"
    # The same kernel out of a pack with another cubin is another one.
    pack_of({symbol: b"newer cubin of " + symbol.encode() for symbol in VARIANTS})
    assert cache.open_pack(ARCH).image("scale_rows") == b"newer cubin of scale_rows"


def test_a_device_refuses_a_wrong_kernel(gpu, tmp_path, monkeypatch):
    """Where a kernel reaches the driver: nothing of it does."""
    pack_of({"scale_rows": b"FAKEIMG"})
    (tmp_path / "private").mkdir()
    fake = Fake(compile_driver(tmp_path), tmp_path / "private")
    monkeypatch.setattr(CUDADriver, "libraries", (fake.path,))
    device = CUDADevice(kernels=cache.open_pack(ARCH))
    device.program("scale_rows")
    device.close()
    cache.remember(
        ARCH, {cache.open_pack(ARCH).digest("scale_rows"): "scale_rows, one row: out: 3 of 9 values are wrong"}
    )
    device = CUDADevice(kernels=cache.open_pack(ARCH))
    loads = fake.count("module_load")
    with pytest.raises(CompileError, match=r"3 of 9 values are wrong.*zse kernels build --force"):
        device.program("scale_rows")
    assert fake.count("module_load") == loads
    device.close()


def test_a_result_is_wrong_twice_or_not_at_all(gpu, monkeypatch):
    """Random inputs may exceed a tolerance once; a miscompiled kernel does with the next ones too."""
    told: list[str] = []

    def problem(device, op, case, launched):
        launched.add(op.name)
        told.append(case.name)
        return "out: 1 of 9 values" if len(told) == 1 else ""

    monkeypatch.setattr(kernels, "problem", problem)
    found = list(self_check.compare(EmulateDevice(ARCH, VARIANTS), OPS[:1], 1))
    assert not any(one.reason for one in found) and told[0] == told[1] and len(told) == len(found) + 1


@pytest.mark.parametrize("error", [DeviceLost("an illegal address"), DeviceMemoryError("not enough memory")])
def test_a_device_that_fails_meanwhile(gpu, monkeypatch, error, capsys):
    """A kernel that ends the device is wrong; a device without memory has compared less."""
    check, _ = gpu

    def problem(device, op, case, launched):
        launched.add(next(symbol for symbol in VARIANTS if symbol.startswith(op.name)))
        raise error

    monkeypatch.setattr(kernels, "problem", problem)
    lost = isinstance(error, DeviceLost)
    assert check() == int(lost)
    assert list(cache.compared(ARCH).values()) == (
        [f"{OPS[0].name}, {first_case()}: DeviceLost: an illegal address"] if lost else []
    )
    assert str(error) in capsys.readouterr().out


def first_case() -> str:
    import numpy as np

    return next(iter(OPS[0].cases(np.random.default_rng(1), "gpu"))).name


def test_nothing_is_compiled_to_be_compared(gpu, monkeypatch):
    """A case whose kernels are not there is left out."""
    kept = cache.Kernels(ARCH, None, lambda arch: VARIANTS, "sources")
    monkeypatch.setattr(cache, "compile_cached", lambda *args, **named: pytest.fail("compiled"))
    kept.comparing = True
    with pytest.raises(CompileError, match="not compiled"):
        kept["scale_rows"]


def test_a_build_for_this_machine_s_gpu_ends_with_it(gpu, monkeypatch, capsys):
    """And one for another architecture does not."""
    _, harm = gpu
    harm("scale_rows")
    monkeypatch.setattr(command, "_arch", lambda: ARCH)
    entry = dict(params=[], threads=1, shared_bytes=0)
    made = [nvrtc.Compiled(symbol, ARCH, b"c" + symbol.encode(), 10, 0, "", **entry) for symbol in VARIANTS]
    monkeypatch.setattr(cache, "build", lambda arch, *args, **named: (None, made))
    args = SimpleNamespace(kind="build", arch=[ARCH], pack=None, op=[], jobs=1, force=False, verbose=False)
    assert command.run(args) == 1 and "1 are wrong" in capsys.readouterr().out
    args.arch = ["sm_90a"]
    assert command.run(args) == 0 and "compared" not in capsys.readouterr().out


def test_a_case_that_is_wrong_once_is_seen_with_other_inputs(monkeypatch):
    """The name of a case has what was drawn of its shape: seeds are looked through until the name comes again."""
    seen = []

    class Drawn:
        name = "drawn"

        def cases(self, rng, kind):
            draw = int(rng.integers(1, 5))
            yield SimpleNamespace(name=f"{draw} rows", outputs={}, inputs=rng.random())

    def reason(device, op, case, launched):
        launched.add("kernel")
        seen.append(case.inputs)
        return "values are wrong" if len(seen) == 1 else ""

    monkeypatch.setattr(kernels, "cases_of", lambda op, device, rng: op.cases(rng, "gpu"))
    monkeypatch.setattr(self_check, "_reason", reason)
    (found,) = self_check.compare(None, [Drawn()], seed=3)
    assert found.reason == "" and len(set(seen)) == 2
