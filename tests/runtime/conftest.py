"""A device with a few tiny kernels of its own, compiled once."""

import subprocess

import pytest

from zse.kernel import Ptr, Variant, block_index, i64, kernel, u8
from zse.kernel.emit import emit_unit
from zse.kernel.targets.cpu import ISAS
from zse.runtime.cpu import CPUDevice
from zse.runtime.native import choose_level


@kernel
def count_blocks(out: Ptr[i64]):
    out[block_index(0)] += i64(1)


@kernel
def sum_before(x: Ptr[i64, "const"], n: i64, out: Ptr[i64], add: i64):
    total = i64(0)
    for i in range(n):
        total += x[i]
    out[block_index(0)] = total + add


@kernel
def copy_piece(src: Ptr[u8, "const"], out: Ptr[u8], count: i64):
    for i in range(count):
        out[i] = src[i]


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runtime")
    isa = choose_level()
    text, manifest = emit_unit(
        [Variant("count_blocks", count_blocks), Variant("sum_before", sum_before), Variant("copy_piece", copy_piece)],
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
