"""The GPU of this machine, if there is one: what tests/gpu needs to be collected."""

from functools import cache

from zse.errors import ConfigError, DeviceError
from zse.kernel.nvrtc import nvrtc
from zse.runtime.cuda import list_devices


@cache
def missing() -> str:
    """Why tests/gpu cannot run on this machine; empty where it can."""
    try:
        list_devices()[0]
        nvrtc()
        return ""
    except (DeviceError, ConfigError, IndexError) as error:
        return f"tests/gpu left out: no CUDA device: {error}"


def isa() -> str:
    """The first CUDA device's architecture as NVRTC names it."""
    arch = list_devices()[0]["arch"]
    return f"sm_{arch}{'a' if arch == 90 else ''}"
