import json
import os

import pytest
from cli_process import ENVIRONMENT

from zse.cli import doctor, doctor_gpu
from zse.errors import DeviceError


@pytest.fixture(autouse=True)
def without_the_tests_own_variables(monkeypatch):
    """ZSE_TEST_CACHE and its like are read by tests alone: `zse doctor` rightly names them as unknown."""
    for name in [name for name in os.environ if name.startswith("ZSE_TEST_")]:
        monkeypatch.delenv(name)
        monkeypatch.delitem(ENVIRONMENT, name, raising=False)


def test_a_working_installation_exits_0(zse):
    done = zse("doctor")
    assert "everything that serving needs is here" in done.stdout
    data = json.loads(zse("doctor", "--json").stdout)
    assert data["ok"] and {item["state"] for item in data["checks"]} <= {"ok", "note"}
    assert {
        "python",
        "cpu",
        "threads",
        "cpu kernels",
        "cpu numbers",
        "memory",
        "c compiler",
        "gpu",
        "packages",
        "pip",
        "disk",
    } <= {item["check"] for item in data["checks"]}


def test_kernels_that_compute_wrong_numbers_are_bad(monkeypatch):
    assert doctor._numbers("x")[1] == doctor.OK
    monkeypatch.setattr(
        doctor.self_check, "problems", lambda device, seed: iter([("matmul, odd sizes", "out: 3 of 9 values")])
    )
    assert doctor._numbers("x")[1:3] == (doctor.BAD, "matmul, odd sizes: out: 3 of 9 values")


def test_missing_kernels_exit_1_and_a_strange_switch_is_said(zse, tmp_path, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT, "ZSE_NATIVE_DIR", str(tmp_path))
    monkeypatch.setitem(ENVIRONMENT, "ZSE_THREAD", "2")
    done = zse("doctor", code=1)
    assert "zse does not read ZSE_THREAD" in done.stdout
    assert "BAD   cpu kernels" in done.stdout and "python -m zse.build" in done.stdout and "1 of " in done.stdout


def test_an_unwritable_store_is_said(monkeypatch):
    monkeypatch.setenv("ZSE_HOME", "/dev/null/home")
    assert [(name, state) for name, state, *_ in doctor._store()] == [("store", doctor.BAD)]


@pytest.mark.parametrize(
    ("facts", "state", "words"),
    [
        ({"compiler": None, "error": "no library"}, doctor.BAD, "needed to compile the CPU kernels: "),
        ({"compiler": None, "error": None}, doctor.NOTE, "anew"),
        ({"compiler": ("/usr/bin/gcc", "gcc 12"), "error": None}, doctor.OK, ""),
    ],
)
def test_a_missing_compiler_matters_only_without_libraries(facts, state, words):
    _, got, _, mend = doctor._compiler(facts)
    assert got == state and words in mend


CUDA = {"library": "/usr/lib/libcuda.so.1", "version": "580.1", "devices": "/dev/nvidia0"}
H200 = {"ordinal": 0, "name": "NVIDIA H200", "arch": 90, "memory_bytes": 150 << 30, "driver_version": 13000}


def gpu_checks(monkeypatch, devices, cuda=CUDA):
    from zse.runtime import cuda as runtime

    def list_devices():
        if isinstance(devices, Exception):
            raise devices
        return devices

    monkeypatch.setattr(runtime, "list_devices", list_devices)
    return list(doctor_gpu.checks(cuda))


def test_a_gpu_its_driver_and_its_kernels_are_shown(monkeypatch, tmp_path):
    monkeypatch.setenv("ZSE_HOME", str(tmp_path))
    gpu, kernels, nvrtc, *_ = gpu_checks(monkeypatch, [H200])
    assert gpu == ("gpu", "ok", "cuda:0 NVIDIA H200, sm_90a, 150.0 GiB, driver 580.1 (CUDA 13.0)", "")
    assert kernels[:2] == ("gpu kernels", "note") and "no pack for sm_90a" in kernels[2]
    assert kernels[3] == "zse kernels build" and nvrtc[0] == "nvrtc"


@pytest.mark.parametrize(
    ("devices", "words", "mend"),
    [
        ([H200 | {"arch": 75}], "sm_75", "too old: sm_80"),
        (DeviceError("cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH; restart"), "cannot be used", "restart"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_a_note(monkeypatch, devices, words, mend):
    (_, state, found, how), *_ = gpu_checks(monkeypatch, devices)
    assert state == "note" and words in found and mend in how


def test_nvrtc_newer_than_the_driver_is_a_note(monkeypatch):
    from types import SimpleNamespace

    from zse.kernel import nvrtc

    monkeypatch.setattr(nvrtc, "nvrtc", lambda: SimpleNamespace(version=(13, 0), path="/lib"))
    assert doctor_gpu._nvrtc(12040)[1] == "note" and doctor_gpu._nvrtc(13000)[1] == "ok"


def test_without_a_gpu_it_is_said_that_the_cpu_computes(monkeypatch):
    none = {"library": None, "version": None, "devices": None}
    monkeypatch.setattr(doctor_gpu, "_amd", lambda: ())
    monkeypatch.setattr(doctor_gpu, "_apple", lambda: ())
    assert gpu_checks(monkeypatch, [], none) == [("gpu", "ok", "none: models run on the CPU", "")]


def test_what_has_never_run_on_hardware_is_said(monkeypatch):
    from zse.runtime import hip

    monkeypatch.setattr(doctor_gpu.os.path, "exists", lambda path: path == "/dev/kfd")
    monkeypatch.setattr(
        hip, "list_devices", lambda: [{"ordinal": 0, "name": "MI300X", "isa": "gfx942", "memory_bytes": 192 << 30}]
    )
    ((_, state, found, _),) = doctor_gpu._amd()
    assert state == "note" and "hip:0 MI300X, gfx942" in found
    assert "has never run on hardware; its kernels are compiled by clang and run in an emulator in the tests" in found


def test_modules_without_bytecode_are_counted_and_compiled(tmp_path, monkeypatch):
    from zse import build
    from zse.runtime import probe

    monkeypatch.setattr("sys.pycache_prefix", None)
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text("x = 1\n")
    assert len(probe.modules_without_bytecode(str(tmp_path))) == 2
    assert build.compile_modules(tmp_path) and probe.modules_without_bytecode(str(tmp_path)) == []
    os.utime(tmp_path / "a.py", (1, 1))
    assert probe.modules_without_bytecode(str(tmp_path)) == [str(tmp_path / "a.py")]
    assert doctor._bytecode(1)[1] == doctor.NOTE and doctor._bytecode(0)[1] == doctor.OK


def test_the_configuration_is_read_and_keys_are_not_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("ZSE_HOME", str(tmp_path))
    for name, value in (("ZSE_API_KEY", "sk-1"), ("ZSE_SERVE_API_KEY", "sk-2"), ("ZSE_SERVE_PORT", "9")):
        monkeypatch.setenv(name, value)
    assert doctor._configuration()[1] == doctor.OK
    _, state, text, mend = doctor._switches()
    assert state == doctor.OK and not mend and "sk-" not in text
    assert "ZSE_API_KEY=(set)" in text and "ZSE_SERVE_API_KEY=(set)" in text and "ZSE_SERVE_PORT=9" in text
    (tmp_path / "zse.toml").write_text("[run]\ntemprature = 1\n")
    name, state, path, mend = doctor._configuration()
    assert state == doctor.BAD and path == str(tmp_path / "zse.toml") and "did you mean temperature?" in mend
    (tmp_path / "zse.toml").write_text(f'[serve]\nmcp = "{tmp_path}/mcp.json"\n')
    assert [row[1] for row in doctor._mcp()] == [doctor.BAD]
    servers = {"one": {"command": "no-such-program"}, "two": {"url": "http://127.0.0.1:1/"}}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    assert [row[1] for row in doctor._mcp()] == [doctor.OK, doctor.NOTE]
    (tmp_path / "zse.toml").unlink()
    assert not list(doctor._mcp())
    monkeypatch.setenv("ZSE_SERVE_PROT", "9")
    assert doctor._configuration()[1] == doctor.BAD and "ZSE_SERVE_PROT" in doctor._switches()[3]
