"""A whole tiny model through the GPU's kernels in the emulator: threads in a random order, every access and every rule of
dependent launches checked, logits against the float oracle. What no kernel's own cases see is how kernels follow each
other in a step."""

import numpy as np
import numpy_model
import pytest
import tiny
from session import Session

from zse.formats.source import open_model
from zse.kernel import cache
from zse.models.load import Model, load_model, place, plan_model
from zse.runtime.cpu import CPUDevice
from zse.runtime.emulate import EmulateDevice

TOKENS = 14


@pytest.fixture(scope="module")
def home(request):
    """Compiled kernels are kept between runs of the tests, by content."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZSE_HOME", str(request.config.cache.mkdir("zse_home")))
        yield


def load_emulated(device, path) -> Model:
    """The host's memory as the loader fills it for a GPU, copied to the emulated one."""
    with CPUDevice(2) as cpu, open_model(path) as source:
        cpu.family = "gpu"
        plan = plan_model(source, family="gpu")
        host = load_model(cpu, plan)
        host.wait()
        data = bytes(host.buffer.view())
    buffer = device.alloc(len(data), label="weights")
    device.write(buffer, data)
    return Model(plan, *place(plan, buffer), buffer, None)


# 12 tokens at once go to the skinny GEMM on Hopper, up to 8 to kernels of their own.
@pytest.mark.parametrize("like, sizes", [("sm_80", [12, 1, 1]), ("sm_90a", [12, 1, 1]), ("sm_90a", [5, 8, 1])])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_logits_and_order(like, sizes, family, home, tmp_path):
    device = EmulateDevice(like, cache.package_variants(like))
    model = load_emulated(device, str(tiny.write(family, tmp_path, "BF16")))
    ids = tiny.tokens(family)[:TOKENS]
    weights = {name: (tiny.to_bf16(values).astype(np.uint32) << 16).view(np.float32)
               for name, values in tiny.by_role(family, model.config).items()}
    reference = numpy_model.forward(model.config, weights, ids, np.float64)
    logits = Session(device, model, rows=1, max_tokens=16, context=32).run(ids, sizes)
    # bf16 between the operations, as in tests/gpu/test_models.py.
    assert np.abs(logits - reference).max() < 0.05 * np.abs(reference).max()
