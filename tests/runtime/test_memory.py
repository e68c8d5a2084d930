"""Buffers and tensors: alignment, accounting, views, what cannot be had."""

import re
from pathlib import Path

import pytest

from zse.errors import DeviceError
from zse.runtime.buffer import HUGE_PAGE, Account, Buffer
from zse.runtime.symbol import Sym
from zse.tensor import Tensor


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, 2 * HUGE_PAGE - 1, 2 * HUGE_PAGE, 9 * HUGE_PAGE + 5])
def test_a_buffer_is_aligned_zero_and_writable_to_its_last_byte(nbytes):
    buffer = Buffer(nbytes, "test", Account())
    assert buffer.address % (HUGE_PAGE if nbytes >= 2 * HUGE_PAGE else 64) == 0
    view = buffer.view()
    assert view.nbytes == nbytes
    if nbytes:
        assert view[0] == view[-1] == 0
        view[0], view[-1] = 7, 9
        assert buffer.view()[-1] == 9
    view.release()
    buffer.free()


def test_memory_that_is_not_touched_is_not_resident():
    """A gigabyte that nobody writes must cost nothing: capacity is planned, not paid."""

    def resident_kib() -> int:
        return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])

    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc")
    before = resident_kib()
    buffer = Buffer(1 << 30, "test", Account())
    assert resident_kib() - before < 16 << 10
    buffer.free()


def test_bytes_are_counted_by_label():
    account = Account()
    weights, pages = Buffer(1000, "weights", account), Buffer(500, "pages", account)
    more = Buffer(24, "pages", account)
    assert account.by_label == {"weights": 1000, "pages": 524} and account.total == 1524
    weights.free()
    weights.free()
    del more
    assert account.by_label == {"pages": 500} and account.total == 500
    pages.free()
    assert account.by_label == {} and account.total == 0


def test_a_buffer_that_is_viewed_cannot_be_freed():
    buffer = Buffer(100, "test", Account())
    view = buffer.view("f")
    with pytest.raises(DeviceError, match="test: a view of the buffer is still in use"):
        buffer.free()
    view[3] = 1.5
    del view
    buffer.free()
    with pytest.raises(DeviceError, match="test: the buffer was freed"):
        buffer.view()


def test_a_view_outlives_its_buffer():
    view = Buffer(100, "test", Account()).view()
    view[99] = 5
    assert view[99] == 5


def test_what_cannot_be_allocated_is_one_line():
    account = Account()
    with pytest.raises(DeviceError, match="cannot allocate 4,611,686,018,427,387,904 bytes for weights"):
        Buffer(1 << 62, "weights", account)
    with pytest.raises(DeviceError, match="cannot allocate"):
        Buffer(1 << 70, "weights", account)
    with pytest.raises(ValueError, match="-1 bytes"):
        Buffer(-1, "weights", account)
    assert account.total == 0


def test_a_tensor_views_its_part_of_the_buffer():
    buffer = Buffer(4096, "test", Account())
    tensor = Tensor(buffer, (3, 5), "i32", 64)
    assert (tensor.address, tensor.nbytes) == (buffer.address + 64, 60)
    tensor.view()[:] = memoryview(bytes(range(60))).cast("i")
    assert bytes(buffer.view()[64:124]) == bytes(range(60)) and buffer.view()[124] == 0
    fewer = tensor.with_rows(2)
    assert fewer.address == tensor.address and list(fewer.view()) == list(tensor.view())[:10]


def test_a_symbolic_tensor_has_an_address_and_no_size():
    tensor = Tensor(Buffer(4096, "test", Account()), (8, 5), "f32").with_rows(Sym("tokens"))
    assert tensor.shape == (Sym("tokens"), 5) and tensor.address == tensor.buffer.address
    with pytest.raises(ValueError, match="symbolic"):
        tensor.nbytes  # noqa: B018
