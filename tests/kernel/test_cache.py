"""The cubin cache and the packs: what is damaged is compiled again, never loaded; a start reads a pack without NVRTC."""

import os
import stat
import subprocess
import sys

import pytest

from zse import kernel as zl
from zse.errors import CompileError, ConfigError
from zse.kernel import cache, nvrtc

needs_nvrtc = pytest.mark.skipif(nvrtc.find_library() is None, reason="NVRTC is not here")


@zl.kernel
def scale(x: zl.Ptr[zl.f32], n: zl.i32, factor: zl.f32, LANES: zl.static):
    i = zl.thread_index()
    if i < n:
        x[i] = x[i] * factor + zl.f32(LANES)


VARIANTS = {f"scale_{lanes}": zl.Variant(f"scale_{lanes}", scale, {"LANES": lanes}, threads=64) for lanes in (1, 2, 4)}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ZSE_HOME", str(tmp_path))
    monkeypatch.setattr(cache, "package_variants", lambda arch: VARIANTS)
    monkeypatch.setattr(cache, "_variants_here", {})
    return tmp_path


def mode(path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


@needs_nvrtc
def test_a_cubin_is_compiled_once(home, monkeypatch):
    first = cache.compile_cached(VARIANTS["scale_1"], "sm_80")
    (file,) = (home / "kernels" / "cubins").iterdir()
    assert mode(file.parent) == mode(home / "kernels") == 0o700
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", lambda *args: pytest.fail("compiled again"))
    assert cache.compile_cached(VARIANTS["scale_1"], "sm_80") == first
    assert first.cubin[:4] == b"\x7fELF" and first.params == [["x", "ptr"], ["n", "i32"], ["factor", "f32"]]


@needs_nvrtc
@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_cubin_is_compiled_again(home, damage):
    first = cache.compile_cached(VARIANTS["scale_1"], "sm_80")
    (file,) = (home / "kernels" / "cubins").iterdir()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes({"flip": bytes(data), "cut": bytes(data[:100]), "empty": b""}[damage])
    assert cache.read_cubin(file.stem) is None
    assert cache.compile_cached(VARIANTS["scale_1"], "sm_80").cubin == first.cubin
    assert cache.read_cubin(file.stem) is not None


def test_the_key_ignores_comments_only():
    def key(text, arch="sm_80", version=(13, 0), options=("-a",)):
        return cache.key_of(text, options, version, arch)

    assert key("x = 1;  // 12\ny") == key("x = 1;  // 13\ny")
    different = {
        key("x = 1;"),
        key("x = 2;"),
        key("x = 1;", "sm_90a"),
        key("x = 1;", version=(13, 1)),
        key("x = 1;", options=()),
    }
    assert len(different) == 5


@needs_nvrtc
def test_a_pack_is_read_without_the_compiler(home, monkeypatch):
    path, compiled = cache.build("sm_80")
    assert path == cache.pack_path("sm_80") and [one.symbol for one in compiled] == sorted(VARIANTS)
    monkeypatch.setattr(nvrtc, "find_library", lambda: None)
    monkeypatch.setattr(cache, "package_variants", lambda arch: pytest.fail("staged"))
    kernels = cache.open_pack("sm_80")
    assert sorted(kernels.manifest) == sorted(VARIANTS) and "scale_9" not in kernels.manifest
    cubin, entry = kernels("scale_2")
    assert cubin == compiled[1].cubin and kernels.image(entry["image"]) == cubin
    assert entry["threads"] == 64 and entry["registers"] == compiled[1].registers and entry["shared_bytes"] == 0


@needs_nvrtc
def test_a_damaged_image_of_a_pack_is_compiled_again(home):
    path, compiled = cache.build("sm_80")
    data = bytearray(path.read_bytes())
    data[data.rindex(b"\x7fELF") + 100] ^= 1  # the last cubin: scale_4
    path.write_bytes(bytes(data))
    with pytest.raises(CompileError, match="damaged"):
        cache.Pack(path).image("scale_4")
    kernels = cache.open_pack("sm_80")
    assert kernels("scale_4")[0] == compiled[2].cubin and kernels("scale_1")[0] == compiled[0].cubin


@needs_nvrtc
def test_a_damaged_head_counts_as_no_pack(home):
    path, compiled = cache.build("sm_80")
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CompileError, match="zse kernels build"):
        cache.Pack(path)
    kernels = cache.open_pack("sm_80")
    assert kernels.pack is None and kernels("scale_1")[0] == compiled[0].cubin


def test_without_pack_and_compiler_the_error_names_the_command(home, monkeypatch):
    monkeypatch.setattr(nvrtc, "find_library", lambda: None)
    nvrtc.nvrtc.cache_clear()
    try:
        with pytest.raises(ConfigError, match="zse kernels build --arch sm_90a"):
            cache.open_pack("sm_90a").manifest["scale_1"]
    finally:
        nvrtc.nvrtc.cache_clear()


@needs_nvrtc
def test_a_build_replaces_the_packs_of_other_versions(home, monkeypatch):
    (home / "kernels").mkdir()
    stale, other = home / "kernels" / "sm_80-0123.pack", home / "kernels" / "sm_90a-0123.pack"
    stale.write_bytes(b""), other.write_bytes(b"")
    path, _ = cache.build("sm_80", names=["scale_2"])
    assert path is None and stale.exists()
    path, compiled = cache.build("sm_80", home / "own.pack", ["scale_2"])
    assert path == home / "own.pack" and list(cache.Pack(path).manifest) == ["scale_2"]
    cache.build("sm_80")
    assert not stale.exists() and other.exists()
    with pytest.raises(ConfigError, match="zse kernels list"):
        cache.build("sm_80", names=["nothing"])


@pytest.mark.parametrize(
    "device,arch", [("sm_90a", "sm_90a"), ("sm_87", "sm_86"), ("sm_100a", "sm_100"), ("sm_103a", "sm_100")]
)
def test_the_architecture_of_a_device(device, arch):
    assert cache.resolve_arch(device) == arch


@pytest.mark.parametrize("device", ["sm_75", "sm_79", "gfx950", ""])
def test_no_architecture(device):
    with pytest.raises(ConfigError, match="sm_90a"):
        cache.resolve_arch(device)


def test_reading_a_pack_imports_no_compiler(tmp_path):
    code = (
        "import sys; from zse.kernel import cache; cache.open_pack('sm_90a'); "
        "print([name for name in sys.modules if name.startswith('zse.kernel.') and name.rpartition('.')[2] in "
        "('ir', 'frontend', 'nvrtc', 'emit') or name in ('numpy', 'asyncio')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "ZSE_HOME": str(tmp_path)},
    )
    assert done.stdout.strip() == "[]"


@needs_nvrtc
def test_a_kernel_is_found_by_its_symbol_without_its_text(home, monkeypatch):
    first = cache.Kernels("sm_80", None, lambda arch: VARIANTS, "sources")("scale_2")
    monkeypatch.setattr(cache.emit, "emit_gpu", lambda *args: pytest.fail("text was made"))
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", lambda *args: pytest.fail("compiled again"))
    assert cache.Kernels("sm_80", None, lambda arch: pytest.fail("listed"), "sources")("scale_2") == first
    assert "scale_2" in cache.Kernels("sm_80", None, lambda arch: {}, "sources")
    assert "scale_2" not in cache.Kernels("sm_80", None, lambda arch: {}, "other sources")
    assert cache.read_named("scale_2", "sm_90a", "sources") is None


@needs_nvrtc
def test_what_will_be_asked_for_is_compiled_at_once(tmp_path, monkeypatch):
    """By `zse kernels build`, when the first of it is not there; a second start has all."""
    monkeypatch.setenv("ZSE_HOME", str(tmp_path))
    symbols = ["gather_rows", "update_pages", "feed_tokens"]
    kernels = cache.open_pack("sm_80")
    kernels.ahead = lambda: [*symbols, "no_kernel_of_a_gpu"]
    compiled = kernels("gather_rows")
    assert kernels.ahead is None
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", lambda *args: pytest.fail("compiled here"))
    assert cache.open_pack("sm_80")("gather_rows") == compiled
    assert all(kernels[symbol]["params"] for symbol in symbols)


def test_what_cannot_be_compiled_ahead_is_told_when_it_is_asked_for(home, monkeypatch):
    monkeypatch.setattr(cache.sys, "executable", "/bin/false")

    def no_compiler():
        raise ConfigError("NVRTC is not here")

    monkeypatch.setattr(nvrtc, "nvrtc", no_compiler)
    kernels = cache.Kernels("sm_80", None, lambda arch: VARIANTS, "sources")
    kernels.ahead = lambda: ["scale_1"]
    with pytest.raises(ConfigError, match="run `zse kernels build --arch sm_80` .NVRTC is not here"):
        kernels["scale_1"]
