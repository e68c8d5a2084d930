"""`zse kernels`: build writes a pack that list and a start read; every mistake is one line that says what to do."""

import pytest

from zse.kernel import cache, nvrtc

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
