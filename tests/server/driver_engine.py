"""scheduled_engine.py over a GPU's driver: before each step the device is written to, launches a kernel and is read.

Options beside those: --driver LIBRARY (a faulty_driver.Faulty), --faults FILE: a start takes the first line away, "N CODE": the N-th
call of the driver from then on fails with it; without a line none does."""

import ctypes
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

import scheduled_engine
from gpu_fixtures import kernels

from zse.runtime.args import Args
from zse.runtime.bindings.cuda import CUDADriver
from zse.runtime.cuda import CUDADevice
from zse.tensor import Tensor


def build(arguments: list[str], phases):
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    library, faults = options.pop("--driver"), Path(options.pop("--faults"))
    CUDADriver.libraries = (library,)
    device = CUDADevice(kernels=kernels())
    out = Tensor(device.alloc(8, "out"), (1,), "i64")
    recorder = device.record()
    recorder.launch("append", Args(out=out, value=1), 1)
    graph = recorder.finish()
    engine, ready = scheduled_engine.build([word for pair in options.items() for word in pair], phases)
    submit = engine.runner.submit

    def on_device(batch):
        device.write(out, bytes(8))
        graph.run()
        assert int.from_bytes(device.read(out), "little") == 1, "a fault that nobody told changed the result"
        return submit(batch)

    engine.runner.submit = on_device
    next_fault, _, rest = faults.read_text().partition("\n")
    faults.write_text(rest)
    if next_fault:
        at, code = map(int, next_fault.split())
        ctypes.CDLL(library).faulty_arm(ctypes.c_long(at), code, code in CUDADriver.sticky)
    return engine, ready


if __name__ == "__main__":
    from zse.engine.worker import main

    sys.exit(main(sys.argv[1:], build))
