"""A device with a few tiny kernels of its own, and the fake driver of a GPU (gpu_fixtures.py), both compiled once."""

import subprocess

import pytest
from gpu_fixtures import Fake, compile_driver

from zse import kernel as zl
from zse.kernel.emit import emit_unit
from zse.kernel.targets.cpu import ISAS
from zse.runtime import gpu_load
from zse.runtime.cpu import CPUDevice
from zse.runtime.native import choose_level


@zl.kernel
def count_blocks(out: zl.Ptr[zl.i64]):
    out[zl.block_index(0)] += zl.i64(1)


@zl.kernel
def sum_before(x: zl.Ptr[zl.i64, "const"], n: zl.i64, out: zl.Ptr[zl.i64], add: zl.i64):
    total = zl.i64(0)
    for i in range(n):
        total += x[i]
    out[zl.block_index(0)] = total + add


@zl.kernel
def copy_piece(src: zl.Ptr[zl.u8, "const"], out: zl.Ptr[zl.u8], count: zl.i64):
    for i in range(count):
        out[i] = src[i]


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runtime")
    isa = choose_level()
    text, manifest = emit_unit(
        [
            zl.Variant("count_blocks", count_blocks),
            zl.Variant("sum_before", sum_before),
            zl.Variant("copy_piece", copy_piece),
        ],
        isa,
    )
    (folder / "k.c").write_text(text)
    subprocess.run(
        ["gcc", "-O2", "-shared", "-fPIC", *ISAS[isa].flags, str(folder / "k.c"), "-o", str(folder / "k.so"), "-lm"],
        check=True,
    )
    return str(folder / "k.so"), manifest


@pytest.fixture(params=[1, 2, 4])
def device(request, library):
    made = CPUDevice(threads=request.param, library=library[0], manifest=library[1])
    yield made
    made.close()


@pytest.fixture(scope="session")
def driver_library(tmp_path_factory):
    return compile_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def fake(driver_library, tmp_path):
    return Fake(driver_library, tmp_path)


@pytest.fixture
def small_chunks(monkeypatch):
    """A load's pieces are small, so that files of megabytes have many."""
    monkeypatch.setattr(gpu_load, "CHUNK_BYTES", 256 << 10)
    monkeypatch.setattr(gpu_load, "SLOT_BYTES", 64 << 10)
