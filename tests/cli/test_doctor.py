import json

import pytest

from zse.cli import doctor


def test_a_working_installation_exits_0(zse):
    done = zse("doctor")
    assert "everything that serving needs is here" in done.stdout
    data = json.loads(zse("doctor", "--json").stdout)
    assert data["ok"] and {item["state"] for item in data["checks"]} <= {"ok", "note"}
    assert {"python", "cpu", "threads", "cpu kernels", "memory", "c compiler", "gpu", "packages", "pip", "disk"} <= {
        item["check"] for item in data["checks"]
    }


def test_missing_kernels_exit_1_and_say_how_to_mend_it(zse, tmp_path, monkeypatch):
    from cli_process import ENVIRONMENT

    monkeypatch.setitem(ENVIRONMENT, "ZSE_NATIVE_DIR", str(tmp_path))
    done = zse("doctor", code=1)
    assert "BAD   cpu kernels" in done.stdout and "python -m zse.build" in done.stdout and "1 of " in done.stdout


def test_an_unwritable_store_and_a_strange_switch_are_said(zse, monkeypatch):
    from cli_process import ENVIRONMENT

    monkeypatch.setitem(ENVIRONMENT, "ZSE_THREAD", "2")
    assert "zse does not read ZSE_THREAD" in zse("doctor").stdout
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


def test_gpus_are_found_and_the_truth_is_said():
    cuda = {"library": "/usr/lib/libcuda.so.1", "version": "580.1", "devices": "/dev/nvidia0"}
    _, state, found, _ = doctor._gpu(cuda)
    assert state == doctor.OK and "580.1" in found and "CPU only" in found
