"""The CPU device: every block runs once, launches wait for what they depend on, symbols, loads, memory, errors."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from kernels.harness import each_isa, host_isas
from kernels.harness import library as compiled

from zse import build, trust
from zse.errors import CompileError, ConfigError, DeviceError, FormatError
from zse.kernel import cache
from zse.runtime import isa, native
from zse.runtime.args import Args
from zse.runtime.cpu import CPUDevice
from zse.runtime.load import LoadJob
from zse.runtime.null import NullDevice


def test_every_block_runs_once_in_every_launch(device):
    draw = random.Random(5)
    out = device.alloc(8 * 300)
    expected = [0] * 300
    recorder = device.record()
    for _ in range(2000):
        blocks = draw.choice((1, 2, 3, 7, 64, 300))
        recorder.launch("count_blocks", Args(out=out), blocks, independent=False, min_chunk=draw.choice((1, 1, 5)))
        for block in range(blocks):
            expected[block] += 1
    graph = recorder.finish()
    for _ in range(10):
        graph.run()
    assert list(out.view("q")) == [10 * count for count in expected]
    graph.close()


def test_a_launch_sees_everything_before_it(device):
    """Each launch sums what the launch before wrote: a launch that started early would read old numbers."""
    width, steps = 37, 300
    x, y = device.alloc(8 * width), device.alloc(8 * width)
    recorder = device.record()
    for step in range(steps):
        source, target = (x, y) if step % 2 == 0 else (y, x)
        recorder.launch("sum_before", Args(x=source, n=1 + step % width, out=target, add=step), width)
    graph = recorder.finish()
    for _ in range(20):
        x.view("q")[:] = y.view("q")[:] = memoryview(bytes(8 * width)).cast("q")
        graph.run()
        a, b = [0] * width, [0] * width
        for step in range(steps):
            n = 1 + step % width
            b = [(sum(a[:n]) + step + 2**63) % 2**64 - 2**63] * width
            a, b = b, a
        assert list((x if steps % 2 == 0 else y).view("q")) == a
    graph.close()


def test_independent_launches_and_their_successor(device):
    parts = [device.alloc(8 * 50) for _ in range(3)]
    total = device.alloc(8)
    recorder = device.record()
    for index, part in enumerate(parts):
        recorder.launch("count_blocks", Args(out=part), 50, independent=index > 0)
    recorder.launch("sum_before", Args(x=parts[2], n=50, out=total, add=0), 1)
    graph = recorder.finish()
    for run in range(1, 200):
        graph.run()
        assert total.view("q")[0] == 50 * run
    graph.close()


def test_symbols_are_grids_and_arguments(device):
    x, out = device.alloc(8 * 100), device.alloc(8 * 100)
    x.view("q")[:] = memoryview(bytes(bytearray(b"\x01\0\0\0\0\0\0\0" * 100))).cast("q")
    recorder = device.record()
    n = recorder.symbol("n", 100)
    recorder.launch("sum_before", Args(x=x, n=n, out=out, add=n.ceil_div(8) * 3), n.ceil_div(10))
    graph = recorder.finish()
    for value in (100, 1, 57):
        out.view("q")[:] = memoryview(bytes(800)).cast("q")
        graph.run(n=value)
        blocks = -(-value // 10)
        assert list(out.view("q")[:11]) == [value + -(-value // 8) * 3] * blocks + [0] * (11 - blocks)
    for wrong, error in (({}, TypeError), ({"n": 101}, ValueError), ({"n": -1}, ValueError), ({"m": 1}, TypeError)):
        with pytest.raises(error):
            graph.run(**wrong)
    assert [name for name, _ in graph.profile(n=3)] == ["sum_before"]
    graph.close()


def test_launches_are_checked(device):
    out = device.alloc(8)
    recorder = device.record()
    with pytest.raises(DeviceError, match="near: count_blocks"):
        recorder.launch("count_block", Args(out=out), 1)
    with pytest.raises(TypeError, match="unknown more; it takes out"):
        recorder.launch("count_blocks", Args(out=out, more=1), 1)
    with pytest.raises(TypeError, match="out is a pointer"):
        recorder.launch("count_blocks", Args(out=1.5), 1)
    with pytest.raises(TypeError, match="add is i64"):
        recorder.launch("sum_before", Args(x=out, n=1, out=out, add=0.5), 1)


def test_a_launch_that_does_not_fit_asks_whether_the_kernels_are_old(library, tmp_path, monkeypatch):
    """The build notes what it compiled; sources that changed since are named, not what they make of a launch."""
    text, level = Path(library[0]).with_suffix(".c").read_text(), native.choose_level()
    monkeypatch.setattr(build, "kernel_units", lambda level: [("k", [])])
    monkeypatch.setattr(build.emit, "emit_unit", lambda variants, level: (text, library[1]))
    build.Builder(tmp_path, 1, quiet=True).kernel_library(level)
    monkeypatch.setenv("ZSE_NATIVE_DIR", str(tmp_path))
    monkeypatch.setenv("ZSE_ISA", level)
    (tmp_path / "weights").write_bytes(bytes(100))
    with CPUDevice(threads=1) as device, open(tmp_path / "weights", "rb") as file:
        out = device.alloc(8)
        job = LoadJob(file.fileno(), 0, 8, "copy_piece", Args(out=out, count=8, more=8))
        with pytest.raises(TypeError, match="unknown more"):
            device.record().launch("count_blocks", Args(out=out, more=1), 1)
        with pytest.raises(TypeError, match="unknown more"):
            device.load([job])
        monkeypatch.setattr(cache, "fingerprint", lambda: "of newer sources")
        old = pytest.raises(
            DeviceError, match="^the compiled kernels are older than their sources: run `python -m zse.b"
        )
        with old:
            device.record().launch("count_blocks", Args(out=out, more=1), 1)
        with old:
            device.record().launch("count_block", Args(out=out), 1)
        with old:
            device.load([job])
        device.record().launch("count_blocks", Args(out=out), 1)


def test_memory_is_counted_and_protected(device):
    buffer = device.alloc(1 << 20, label="weights")
    assert buffer.address % 64 == 0 and device.memory()["weights"] == 1 << 20
    recorder = device.record()
    recorder.launch("count_blocks", Args(out=buffer), 1)
    graph = recorder.finish()
    with pytest.raises(DeviceError, match="recorded graph"):
        buffer.free()
    graph.close()
    buffer.free()
    buffer.free()
    assert "weights" not in device.memory()


def test_load_runs_every_job(device, tmp_path):
    data = random.Random(1).randbytes(100_003)
    (tmp_path / "f").write_bytes(data)
    out = device.alloc(len(data))
    with open(tmp_path / "f", "rb") as file:
        jobs = []
        for start in range(0, len(data), 7001):
            count = min(7001, len(data) - start)
            if start % 2:
                jobs.append(
                    LoadJob(file.fileno(), start, count, "copy_piece", Args(out=out.address + start, count=count))
                )
            else:
                jobs.append(LoadJob(file.fileno(), start, count, None, {"destination": out.address + start}))
        load = device.load(jobs)
        load.wait()
    assert bytes(out.view()) == data and load.finished


def test_a_file_that_is_too_short_is_named(device, tmp_path):
    path = tmp_path / "short"
    path.write_bytes(bytes(1000))
    out = device.alloc(4000)
    with open(path, "rb") as file:
        load = device.load(
            [
                LoadJob(file.fileno(), 0, 500, "copy_piece", Args(out=out, count=500), path=str(path), field="first"),
                LoadJob(
                    file.fileno(), 500, 2000, "copy_piece", Args(out=out, count=2000), path=str(path), field="second"
                ),
            ]
        )
        with pytest.raises(FormatError) as caught:
            load.wait()
    assert caught.value.offset == 1000 and caught.value.field == "second" and "1500 more bytes" in str(caught.value)


def test_null_device_checks_and_records(library):
    seen = []
    device = NullDevice(manifest=library[1], on_run=lambda graph, symbols: seen.append(symbols))
    recorder = device.record()
    recorder.launch("count_blocks", Args(out=device.alloc(8)), recorder.symbol("n", 9))
    graph = recorder.finish()
    graph.run(n=9)
    with pytest.raises(ValueError):
        graph.run(n=10)
    assert seen == [{"n": 9}] and graph.runs == seen


@pytest.mark.parametrize("level", each_isa())
def test_levels(monkeypatch, level):
    assert level in isa.runnable_levels(native.runtime().zse_cpu_features())
    compiled(level)
    monkeypatch.setenv("ZSE_ISA", level)
    device = CPUDevice(threads=1)
    assert device.isa == level and "matmul_int8_int4a_g32_t1" in device.symbols()
    device.close()


def test_levels_that_this_machine_has_not(monkeypatch):
    bits = native.runtime().zse_cpu_features()
    assert isa.runnable_levels(bits) == list(reversed(host_isas()))
    monkeypatch.setenv("ZSE_ISA", "sparc")
    with pytest.raises(ConfigError, match="not a level of this machine"):
        CPUDevice(threads=1)
    assert "avx512vnni" in isa.missing_features("x86-64-v4-vnni", bits & ~(1 << isa.FEATURES["avx512vnni"]))


def test_a_level_that_is_being_put_in_place_is_not_taken(tmp_path, monkeypatch):
    """Its library comes before its manifest; an engine that started between the two ended with "No such file"."""
    native.runtime()
    monkeypatch.delenv("ZSE_ISA", raising=False)
    monkeypatch.setenv("ZSE_NATIVE_DIR", str(tmp_path))
    monkeypatch.setattr(isa, "runnable_levels", lambda bits: ["better", "good"])
    with pytest.raises(DeviceError, match="better"):
        native.choose_level()
    (tmp_path / "libzse_kernels_better.so").touch()
    assert native.choose_level() == "better", "which says what is missing"
    for name in ("libzse_kernels_good.so", "good.json"):
        (tmp_path / name).touch()
    assert native.choose_level() == "good"
    (tmp_path / "better.json").touch()
    assert native.choose_level() == "better"


def test_no_library_and_no_compiler_say_what_to_do(tmp_path):
    environment = {**os.environ, "ZSE_NATIVE_DIR": str(tmp_path / "none"), "PATH": str(tmp_path), "CC": ""}
    run = [sys.executable, "-c", "from zse.runtime.cpu import CPUDevice\nCPUDevice(threads=1)"]
    message = subprocess.run(run, env=environment, capture_output=True, text=True).stderr
    assert "python -m zse.build" in message and "gcc" in message
    done = subprocess.run([sys.executable, "-m", "zse.build"], env=environment, capture_output=True, text=True)
    assert (
        done.returncode != 0
        and "no C compiler" in done.stderr
        and "gcc" in done.stderr
        and "Traceback" not in done.stderr
    )


def test_what_an_installation_compiles(monkeypatch, tmp_path):
    everything = isa.levels_of_machine()
    for value, expected in (("", None), ("none", []), ("all", everything), ("a,b", ["a", "b"])):
        monkeypatch.setenv("ZSE_BUILD_ISA", value)
        assert build.isas_to_install() == expected
    with pytest.raises(ConfigError, match="'a' is not one of this machine's"):
        build.build(tmp_path, ["a"])
    build.build(tmp_path, [], quiet=True)
    assert build._best_level(tmp_path) == isa.runnable_levels(native.runtime().zse_cpu_features())[:1]
    monkeypatch.setattr(isa, "runnable_levels", lambda bits: [])
    assert build._best_level(tmp_path) == everything


@pytest.mark.skipif(isa.machine() != "x86_64", reason="arm64 is another machine's")
def test_a_level_of_another_machine_needs_its_compiler_and_a_folder(monkeypatch, tmp_path):
    """Before anything is compiled: what this machine's compiler made would be installed as if it were the other's."""
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(CompileError, match="compiles for x86_64, not arm64: set CC to a cross compiler"):
        build.build(tmp_path, ["arm64-dotprod"])
    with pytest.raises(ConfigError, match="'x86-64-v3' is not one of arm64's: arm64-dotprod"):
        build.build(tmp_path, ["arm64-dotprod", "x86-64-v3"])
    cross = tmp_path / "cross"
    cross.write_text("#!/bin/sh\necho aarch64-linux-gnu\n")
    cross.chmod(0o755)
    monkeypatch.setenv("CC", str(cross))
    with pytest.raises(ConfigError, match="libraries for arm64 need a folder of their own"):
        build.build(None, ["arm64-dotprod"])


def test_a_build_says_how_far_it_is(monkeypatch, capsys):
    from zse import build

    now = iter([0.0, 0.0, 1.0, 1.0, 2.0, 7.0, 7.0, 8.0])
    monkeypatch.setattr(build.time, "perf_counter", lambda: next(now))
    progress = build.Progress("kernels for a", quiet=False)
    progress.total = 5
    for _ in range(5):
        progress.step()
    progress.end("done")
    assert capsys.readouterr().err.splitlines() == [
        "kernels for a: compiled 1 of 5, about 4 s left",
        "kernels for a: compiled 4 of 5, about 2 s left",
        "done",
    ]


def test_a_start_asks_whether_the_kernels_are_old(library, tmp_path, monkeypatch):
    """After new sources came into a checkout, where the kernels would take the same arguments and compute what they did."""
    text, level = Path(library[0]).with_suffix(".c").read_text(), native.choose_level()
    monkeypatch.setattr(build, "kernel_units", lambda level: [("k", [])])
    monkeypatch.setattr(build.emit, "emit_unit", lambda variants, level: (text, library[1]))
    build.Builder(tmp_path, 1, quiet=True).kernel_library(level)
    monkeypatch.setenv("ZSE_NATIVE_DIR", str(tmp_path))
    monkeypatch.setenv("ZSE_ISA", level)
    here = tmp_path / "checkout" / "src" / "zse"
    (here / "kernels").mkdir(parents=True)
    (here / "kernels" / "product.py").write_text("")
    manifest = str(tmp_path / f"{level}.json")
    os.utime(manifest, (1e9, 1e9))
    monkeypatch.setattr(trust, "PACKAGE", str(here))
    monkeypatch.setattr(cache, "PACKAGE", here)
    CPUDevice(threads=1).close()  # no checkout: nobody changes what is installed
    (tmp_path / "checkout" / ".git").mkdir()
    with pytest.raises(DeviceError, match=r"older than their sources: run `python -m zse.build`$"):
        CPUDevice(threads=1)
    monkeypatch.setattr(build.Builder, "_check", lambda *others: None)
    build.Builder(tmp_path, 1, quiet=True).kernel_library(level)
    CPUDevice(threads=1).close()
    os.utime(manifest, (1e9, 1e9))  # as after a checkout of the same sources
    CPUDevice(threads=1).close()
    build.Builder(tmp_path, 1, quiet=True).kernel_library(level)
    assert not trust.has_newer_sources(manifest)
