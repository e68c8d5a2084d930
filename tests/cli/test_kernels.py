"""`zse kernels`: build writes a pack that list and a start read; every mistake is one line that says what to do."""

import json
import sys
from pathlib import Path

import pytest

from zse.bench import own_kernels
from zse.errors import ConfigError
from zse.kernel import cache, nvrtc

# NVIDIA's compiler is a package of the test extra; there is none for macOS.
needs_nvrtc = pytest.mark.skipif(nvrtc.find_library() is None, reason="NVRTC is not here")


@needs_nvrtc
def test_build_and_list(zse, home):
    file = home / "some.pack"
    done = zse("kernels", "build", "--arch", "sm_80", "--op", "gather_rows", "--op", "feed", "--pack", str(file), "-v")
    assert done.stdout.startswith("sm_80: 2 kernels in ") and str(file) in done.stdout
    assert "gather_rows: " in done.stderr and " registers, 0 bytes spilled" in done.stderr
    assert sorted(cache.Pack(file).manifest) == ["feed_tokens", "gather_rows"]
    listed = zse("kernels", "list", "--arch", "sm_80").stdout
    assert listed.startswith("sm_80: no pack; `zse kernels build --arch sm_80` makes it") and "feed_tokens" in listed
    file.rename(home / "kernels" / cache.pack_path("sm_80").name)
    lines = zse("kernels", "list", "--arch", "sm_80").stdout.splitlines()
    assert lines[0].endswith(".pack") and any("feed_tokens" in line and " registers " in line for line in lines)


@needs_nvrtc
def test_one_op_without_a_file_fills_the_cache_only(zse, home):
    assert zse("kernels", "build", "--arch", "sm_80", "--op", "gather_rows").stdout.rstrip().endswith(" s")
    assert not list((home / "kernels").glob("*.pack")) and len(list((home / "kernels" / "cubins").iterdir())) == 1


@pytest.mark.parametrize(
    "arguments,report",
    [
        (("build", "--arch", "sm_75"), "there are no kernels for GPU architecture sm_75"),
        (("build", "--arch", "sm_80", "--op", "nothing"), "`zse kernels list` shows them"),
        (("build", "--arch", "sm_80", "--arch", "sm_90a", "--pack", "x"), "--pack is one file"),
        (("build", "--arch", "sm_80", "--jobs", "0"), "--jobs"),
        (("list", "--archs", "sm_80"), "did you mean --arch?"),
    ],
)
def test_mistakes(zse, arguments, report):
    assert report in zse("kernels", *arguments, code=2).stderr


@pytest.fixture
def own(zse, tmp_path):
    """A file as `new` writes it, with small sizes."""
    file = tmp_path / "swish.py"
    assert str(file) in zse("kernels", "new", str(file)).stdout
    text = file.read_text()
    assert text == (Path(__file__).parents[2] / "examples" / "write_a_kernel.py").read_text()
    file.write_text(text.replace("(1024, 4096)", "(33, 64)"))
    return file


def test_a_kernel_of_ones_own_is_checked(zse, own):
    done = zse("kernels", "check", str(own), "--seed", "7")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("swish ") and lines[0].endswith("3 of 3 cases right") and " cpu " in lines[0]
    assert lines[2].endswith("3 of 3 cases right") and " emulated sm_90a " in lines[2]
    assert lines[-1] == "inputs of --seed 7"


@pytest.mark.parametrize(
    "written,instead,where,report",
    [
        ("v / (1.0 + zl.exp(-v))", "v / (1.5 + zl.exp(-v))", "cpu", "values are wrong, first (0, 0): "),
        ("for i in range(0, width,", "for i in range(L * UNROLL, width,", "cpu", "first (0, 0): nan, expected "),
        ("zl.grid_wait()", "pass", "emulated", "grid_wait"),
        ("zl.thread_index() * 4, width", "zl.thread_index() * 4, width + 4", "emulated", "swish.py:"),
    ],
    ids=["value", "unwritten", "rule", "bounds"],
)
def test_a_wrong_kernel_is_called_wrong(zse, own, written, instead, where, report):
    text = own.read_text()
    assert written in text
    own.write_text(text.replace(written, instead))
    wrong = [line for line in zse("kernels", "check", str(own), code=1).stdout.splitlines() if report in line]
    assert wrong and all(f" {where} " in line for line in wrong)


def test_a_kernel_of_ones_own_is_timed(zse, own, tmp_path):
    text = own.read_text()
    own.write_text(text[: text.index('    lambda target: [zl.Variant("swish_rows", swish_rows_gpu')] + ")\n")
    own.write_text(own.read_text().replace('def cases(rng, family="cpu"):', "def cases(rng):"))
    done = zse("kernels", "bench", str(own), "--device", "cpu", "--json", str(tmp_path / "figures"))
    assert done.stdout.startswith("swish          33 x 64 ") and " GB/s copied" in done.stdout
    (line,) = json.loads((tmp_path / "figures").read_text())
    assert line["checked"] and line["microseconds"] > 0 and line["ceiling"] > 0
    assert "swish has no GPU form" in zse("kernels", "bench", str(own), "--device", "cuda", code=2).stderr


def test_what_is_no_file_of_operations(zse, own, tmp_path):
    assert "exists already" in zse("kernels", "new", str(own), code=2).stderr
    assert "`zse kernels new" in zse("kernels", "check", str(tmp_path / "none.py"), code=2).stderr
    own.write_text("x = 1\n")
    assert "defines no Op" in zse("kernels", "check", str(own), code=2).stderr
    away = zse("kernels", "new", str(tmp_path / "no folder" / "mine.py"), code=2).stderr
    assert "cannot be written: No such file or directory" in away and "Traceback" not in away
    own.write_text("\nx = nothing\n")
    assert (
        f"{own}, line 2: NameError: name 'nothing' is not defined" in zse("kernels", "bench", str(own), code=2).stderr
    )


def test_without_the_emulator_the_cpus_form_is_checked(own, monkeypatch):
    """As in an installed wheel."""
    monkeypatch.setitem(sys.modules, "zse_emulator", None)
    (op,) = own_kernels.load(str(own))
    found = dict(own_kernels.devices(op, "sm_90a", 1))
    cpu, emulated = [found[name] for name in found if name.startswith(("cpu", "emulated"))]
    assert "comes with a checkout" in emulated
    assert [what for _, what in own_kernels.check(op, cpu, 1)] == ["", "", ""]
    cpu.close()
    with pytest.raises(ConfigError, match="no operation 'relu'"):
        own_kernels.load(str(own), ["relu"])
