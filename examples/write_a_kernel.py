"""Write a kernel, compile it for this machine, run it on the device, check it against NumPy.

python examples/write_a_kernel.py
"""

import subprocess
import tempfile
from pathlib import Path

import numpy as np

from zse import kernel as zl
from zse.kernel.emit import emit_unit
from zse.kernel.targets.cpu import ISAS
from zse.runtime.cpu import CPUDevice
from zse.runtime.native import choose_level
from zse.tensor import Tensor


@zl.kernel
def swish_rows(x: zl.Ptr[zl.f32, "const"], out: zl.Ptr[zl.f32], width: zl.i64, UNROLL: zl.static):
    """out = x / (1 + e**-x); one block is one row; width is a multiple of UNROLL registers."""
    row, L = zl.block_index(0), zl.target.lanes
    for i in range(0, width, L * UNROLL):
        for u in zl.static(range(UNROLL)):
            at = row * width + i + u * L
            v = zl.load(x + at, L)
            zl.store(out + at, v / (1.0 + zl.exp(-v)))


def main() -> None:
    isa = choose_level()
    text, manifest = emit_unit([zl.Variant("swish_rows_2", swish_rows, {"UNROLL": 2})], isa)
    print(f"--- C for {isa} ---", text[text.index("/*") :], sep="\n")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "swish.c"), Path(folder, "swish.so")
        source.write_text(text)
        subprocess.run(
            ["cc", "-O2", "-shared", "-fPIC", *ISAS[isa].flags, str(source), "-o", str(library), "-lm"], check=True
        )
        device = CPUDevice(threads=2, library=str(library), manifest=manifest)
        rows, width = 5, 256
        x, out = (Tensor(device.alloc(rows * width * 4), (rows, width), "f32") for _ in range(2))
        values = np.random.default_rng(0).standard_normal((rows, width)).astype(np.float32)
        x.view()[:] = memoryview(values.ravel())
        recorder = device.record()
        recorder.launch("swish_rows_2", [x, out, width], (rows,))
        graph = recorder.finish()
        graph.run()
        got = np.array(out.view()).reshape(rows, width)
        error = np.abs(got - values / (1 + np.exp(-values.astype(np.float64)))).max()
        print(f"largest error against NumPy: {error:.1e}")
        assert error < 1e-6
        graph.close()
        device.close()


if __name__ == "__main__":
    main()
