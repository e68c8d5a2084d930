"""The Metal device over an Objective-C runtime written in Python: retain counts, encoders, pipelines, errors."""

import ctypes
import gc
import os
import struct
import sys
from contextlib import contextmanager

import pytest

from zse.errors import DeviceError, DeviceLost
from zse.runtime.args import Args
from zse.runtime.bindings.objc import METHODS
from zse.runtime.gpu import CompiledKernels
from zse.runtime.load import LoadJob
from zse.runtime.metal import MetalDevice, product_name
from zse.runtime.opening import open_device
from zse.tensor import Tensor

MANIFEST = {
    "scale_rows": {
        "params": [["x", "ptr"], ["out", "ptr"], ["width", "i32"], ["factor", "f32"]],
        "threads": 64,
        "image": "a",
    },
    "append": {
        "params": [["out", "ptr"], ["value", "i64"], ["unused", "ptr"]],
        "threads": 1,
        "image": "a",
        "shared_bytes": 100,
    },
    "fails": {"params": [["out", "ptr"]], "threads": 1, "image": "a"},
    "damaged": {"params": [], "threads": 1, "image": "bad"},
    "absent": {"params": [], "threads": 1, "image": "a"},
}


class Object:
    def __init__(self, **fields):
        self.count, self.__dict__ = 1, fields | {"count": 1}


class FakeObjC:
    """Objects by number. Work runs when a command buffer is waited for, in the order of the queue."""

    def __init__(self):
        self.objects, self.pools, self.limit = {}, [], 1 << 24
        self.used = 0

    def new(self, **fields):
        number = 0x1000 + len(self.objects)
        self.objects[number] = Object(**fields)
        return number

    def temporary(self, **fields):
        """An autoreleased object; there must be a pool."""
        assert self.pools, "autoreleased without a pool"
        number = self.new(**fields)
        self.pools[-1].append(number)
        return number

    def default_device(self):
        return self.new(kind="device")

    @contextmanager
    def pool(self):
        self.pools.append([])
        depth = len(self.pools)
        try:
            yield
        finally:
            assert len(self.pools) == depth
            for number in self.pools.pop():
                self.release(number)

    def release(self, number):
        found = self.objects[number]
        assert found.count > 0, f"{found.kind} released once too often"
        found.count -= 1
        if not found.count and found.kind == "buffer":
            self.used -= found.nbytes

    def string(self, text):
        return self.temporary(kind="string", text=text)

    def text(self, string):
        return self.objects[string].text if string else ""

    def send(self, receiver, selector, *args):
        assert len(args) == selector.count(":") == len(METHODS.get(selector, (None, *args))) - 1, selector
        found = self.objects[receiver]
        assert found.count > 0, f"{selector} to a {found.kind} that is gone"
        return getattr(self, selector.replace(":", "_"))(receiver, found, *args)

    def name(self, _, found):
        return self.new(kind="string", text="Fake M9")

    def maxThreadgroupMemoryLength(self, *_):
        return 32768

    def recommendedMaxWorkingSetSize(self, *_):
        return self.limit

    def currentAllocatedSize(self, *_):
        return self.used

    def newCommandQueue(self, *_):
        return self.new(kind="queue", waiting=[])

    def newBufferWithLength_options_(self, _, found, nbytes, options):
        if self.used + nbytes > self.limit:
            return 0
        self.used += nbytes
        return self.new(kind="buffer", nbytes=nbytes, memory=(ctypes.c_ubyte * nbytes)(*[0xCD] * min(nbytes, 64)))

    def contents(self, _, found):
        return ctypes.addressof(found.memory)

    def make(self, name):
        assert name == "MTLCompileOptions"
        return self.new(kind="options", fast=True)

    def setFastMathEnabled_(self, _, found, value):
        found.fast = value

    def newLibraryWithSource_options_error_(self, _, found, source, options, error):
        assert self.objects[options].fast is False
        if self.text(source) != "good":
            ctypes.cast(error, ctypes.POINTER(ctypes.c_void_p))[0] = self.temporary(
                kind="error", text="program_source:3: error:\n  no"
            )
            return 0
        return self.new(kind="library")

    def localizedDescription(self, _, found):
        return self.new(kind="string", text=found.text)

    def newFunctionWithName_(self, _, found, name):
        return 0 if self.text(name) == "absent" else self.new(kind="function", symbol=self.text(name))

    def newComputePipelineStateWithFunction_error_(self, _, found, function, error):
        return self.new(kind="pipeline", symbol=self.objects[function].symbol)

    def commandBuffer(self, number, queue):
        made = self.temporary(kind="commands", queue=queue, work=[], status=0, error=0)
        return made

    def retain(self, number, found):
        found.count += 1
        return number

    def release_(self, number):
        self.release(number)

    def computeCommandEncoder(self, number, commands):
        return self.temporary(kind="encoder", commands=commands, pipeline=None, table={}, shared=0)

    def setComputePipelineState_(self, _, encoder, pipeline):
        encoder.pipeline, encoder.table = self.objects[pipeline].symbol, {}

    def setBytes_length_atIndex_(self, _, encoder, content, length, place):
        assert len(content) == length
        encoder.table[place] = content

    def setBuffer_offset_atIndex_(self, _, encoder, buffer, offset, place):
        encoder.table[place] = (buffer, offset)

    def setThreadgroupMemoryLength_atIndex_(self, _, encoder, nbytes, place):
        assert nbytes % 16 == 0 and place == 0
        encoder.shared = nbytes

    def dispatchThreadgroups_threadsPerThreadgroup_(self, _, encoder, grid, threads):
        encoder.commands.work.append(
            (
                encoder.pipeline,
                dict(encoder.table),
                (grid.width, grid.height, grid.depth),
                threads.width,
                encoder.shared,
            )
        )

    def endEncoding(self, *_):
        pass

    def commit(self, _, commands):
        commands.queue.waiting.append(commands)

    def status(self, _, commands):
        return commands.status

    def error(self, _, commands):
        return commands.error

    def waitUntilCompleted(self, _, commands):
        waiting = commands.queue.waiting
        while commands in waiting:
            done = waiting.pop(0)
            done.status = 4
            for symbol, table, grid, threads, shared in done.work:
                self.compute(done, symbol, table, grid, shared)

    def compute(self, commands, symbol, table, grid, shared):
        def memory(place, format):
            buffer, offset = table[place]
            assert self.objects[buffer].count > 0
            return memoryview(self.objects[buffer].memory).cast("B")[offset:].cast(format)

        if symbol == "fails":
            commands.status, commands.error = 5, self.new(kind="error", text="caused GPU address fault")
        elif symbol == "append":
            assert shared == 112 and table[2] == (0, 0)
            out = memory(0, "q")
            out[0] = out[0] * 2 + struct.unpack("q", table[1])[0]
        else:
            x, out, width, factor = memory(0, "f"), memory(1, "f"), *struct.unpack("if", table[2] + table[3])
            for index in range(grid[0] * width):
                out[index] = x[index] * factor


# `release` is both a message and our helper: the message has one more argument.
_helper = FakeObjC.release
FakeObjC.release = lambda self, number, found=None: _helper(self, number)


@pytest.fixture
def device():
    made = MetalDevice(FakeObjC(), CompiledKernels(MANIFEST, lambda image: b"good" if image == "a" else b"bad"))
    yield made
    made.close()
    assert not made.objc.pools


def test_facts_and_memory(device):
    assert (device.name, device.kernels, device.product, device.arch) == ("metal", "gpu", "Fake M9", 0)
    buffer = device.alloc(100, "x")
    assert bytes(buffer.view()) == bytes(100) == device.read(buffer) and device.memory() == {"x": 100}
    assert device.memory_free == device.memory_total - 100
    with pytest.raises(DeviceError, match="not enough memory on metal: 99,999,999 bytes for kv"):
        device.alloc(99_999_999, "kv")
    del buffer
    gc.collect()
    assert device.memory() == {} and device.objc.used == 0


def test_launches_symbols_and_offsets(device):
    buffer = device.alloc(96, "data")
    x, out = Tensor(buffer, (12,), "f32", 0), Tensor(buffer, (12,), "f32", 48)
    device.write(x, struct.pack("12f", *range(12)))
    recorder = device.record()
    rows, width = recorder.symbol("rows", 4), recorder.symbol("width", 3)
    recorder.launch("scale_rows", Args(x=x, out=out, width=width, factor=2.0), rows)
    recorder.launch("scale_rows", Args(x=out, out=out, width=width, factor=10.0), rows)
    graph = recorder.finish()
    for count in (2, 4, 0):
        device.write(out, bytes(48))
        ticket = graph.submit(rows=count, width=3)
        assert not ticket.done
        ticket.wait()
        assert ticket.done
        assert struct.unpack("12f", device.read(out)) == (
            *[20.0 * i for i in range(3 * count)],
            *[0.0] * (12 - 3 * count),
        )
    with pytest.raises(ValueError, match="rows = 5"):
        graph.run(rows=5, width=1)
    with pytest.raises(DeviceError, match="used by 1 recorded graph"):
        buffer.free()
    graph.close()
    with pytest.raises(DeviceError, match="closed"):
        graph.run(rows=1, width=1)
    buffer.free()


def test_null_pointers_shared_memory_and_order(device):
    staging = device.staging(8, "counter")
    recorder = device.record()
    recorder.upload(staging)
    for value in (1, 0, 1):
        recorder.launch("append", Args(out=staging.buffer, value=value, unused=0), 1)
    recorder.download(staging)
    graph = recorder.finish()
    tickets = [graph.submit() for _ in range(2)]
    tickets[1].wait()
    assert list(staging.host.cast("q")) == [0b101101]
    with pytest.raises(TypeError, match="its Tensor is needed"):
        device.run(lambda recorder: recorder.launch("append", Args(out=staging.buffer.address, value=1, unused=0), 1))


def test_no_object_leaks(device):
    buffer = device.alloc(8)
    recorder = device.record()
    recorder.launch("append", Args(out=buffer, value=1, unused=0), 1)
    graph = recorder.finish()
    for _ in range(3):
        graph.run()
        graph.submit()
    device.synchronize()
    alive = [
        found.kind
        for found in device.objc.objects.values()
        if found.count and found.kind in ("commands", "encoder", "function")
    ]
    assert alive == []


def test_errors(device):
    with pytest.raises(DeviceError, match="Metal: compiling damaged: program_source:3: error: no"):
        device.program("damaged")
    with pytest.raises(DeviceError, match="no such function"):
        device.program("absent")
    with pytest.raises(DeviceError, match="no kernel 'nothing'"):
        device.program("nothing")
    out = device.alloc(8)
    with pytest.raises(DeviceLost, match=r"Metal: fails: caused GPU address fault"):
        device.run(lambda recorder: recorder.launch("fails", Args(out=out), 1))
    with pytest.raises(DeviceLost):
        device.read(out)


def test_its_kernels_are_those_of_its_pack(tmp_path, monkeypatch):
    """Without a compiler: a pack of Metal is source, which the system compiles."""
    monkeypatch.setenv("ZSE_HOME", str(tmp_path))
    device = MetalDevice(FakeObjC())
    kernels = device.pack
    assert {"sample_scan", "sample_row", "attention_simple_bf16_d64"} <= set(device.symbols())
    assert all(entry.get("shared_bytes", 0) <= 32 << 10 for entry in kernels.manifest.values())
    source = kernels.image(kernels.manifest["sample_row"]["image"])
    assert source.startswith(b"#include <metal_stdlib>") and b"void sample_row(" in source
    device.close()


def test_the_product_has_a_name():
    assert product_name(FakeObjC()) == "Fake M9"


def test_loading_is_the_cpus(device, tmp_path):
    content = os.urandom(100_000)
    (tmp_path / "w").write_bytes(content)
    fd = os.open(tmp_path / "w", os.O_RDONLY)
    buffer = device.alloc(100_000, "weights")
    device.load([LoadJob(fd, 0, 100_000, None, {"destination": Tensor(buffer, (100_000,), "u8")})]).wait()
    os.close(fd)
    assert device.read(buffer) == content


@pytest.mark.skipif(sys.platform == "darwin", reason="there is Metal here")
def test_no_metal():
    with pytest.raises(DeviceError, match="no Metal: .*use --device cpu"):
        open_device("metal")
