"""The GPU lines of zse doctor: what is here, whether it can be used, its kernels, and what has never run on
hardware."""

import os
import sys

from zse.errors import DeviceError, ZSEError
from zse.kernel import cache, nvrtc
from zse.runtime import cuda as runtime_cuda
from zse.runtime import hip, metal
from zse.runtime.bindings import cuda as bindings_cuda

OK, NOTE, BAD = "ok", "note", "bad"
# Memory, graphs and loading are tested over fake drivers, kernels by compilers and in the emulator; no one has run them
# on hardware.
UNPROVEN_HIP = "has never run on hardware; its kernels are compiled by clang and run in an emulator in the tests. --device hip tries it"
UNPROVEN_METAL = "has never run on hardware; its kernels are checked by clang and run in an emulator in the tests. --device metal tries it"


def checks(cuda: dict):
    """(name, state, what was found, how to mend it). cuda: probe.cuda_driver()."""
    found = [*_nvidia(cuda), *_amd(), *_apple()]
    yield from found
    if not found:
        yield "gpu", OK, "none: models run on the CPU", ""


def _nvidia(cuda: dict):
    if not cuda["library"] and not cuda["devices"]:
        return
    driver = f"driver {cuda['version'] or 'of unknown version'}"
    try:
        devices = runtime_cuda.list_devices()
    except DeviceError as error:
        found = f"NVIDIA {cuda['devices'] or ''} ({driver}) cannot be used; models run on the CPU"
        yield "gpu", NOTE, found, str(error)
        return
    for device in devices:
        version = device["driver_version"]
        arch = f"sm_{device['arch']}{'a' if device['arch'] >= 90 else ''}"
        line = (
            f"cuda:{device['ordinal']} {device['name']}, {arch}, {device['memory_bytes'] / 2**30:.1f} GiB, {driver} "
            f"(CUDA {version // 1000}.{version % 1000 // 10})"
        )
        if device["arch"] < bindings_cuda.LEAST_ARCH:
            needed = f"sm_{bindings_cuda.LEAST_ARCH} (Ampere) or later is needed"
            yield "gpu", NOTE, line, f"too old: {needed}; models run on the CPU"
            continue
        yield "gpu", OK, line, ""
        yield _kernels(arch)
    if devices:
        yield _nvrtc(devices[0]["driver_version"])


def _kernels(arch: str) -> tuple[str, str, str, str]:
    try:
        pack = cache.open_pack(arch).pack
    except ZSEError as error:
        return "gpu kernels", NOTE, f"none for {arch}", str(error)
    if pack is None:
        found = f"no pack for {arch}: kernels are compiled when a model first asks for them"
        return "gpu kernels", NOTE, found, "zse kernels build"
    known = cache.compared(pack.arch)
    there = [known[entry["place"][2]] for entry in pack.manifest.values() if entry["place"][2] in known]
    found = f"{len(pack.manifest)} kernels for {pack.arch} in {pack.path}, {len(there)} compared with NumPy here"
    wrong = next(filter(None, there), "")
    if wrong:
        return (
            "gpu kernels",
            BAD,
            f"{found}: {wrong}",
            "zse kernels build --force, with another NVRTC if that does not help",
        )
    return "gpu kernels", OK if there else NOTE, found, "" if there else "zse kernels check"


def _nvrtc(driver_version: int) -> tuple[str, str, str, str]:
    try:
        library = nvrtc.nvrtc()
    except (ZSEError, OSError) as error:
        return "nvrtc", NOTE, "none: GPU kernels cannot be compiled here, only read from a pack", str(error)
    major, minor = library.version
    found = f"{major}.{minor} at {library.path}"
    if major > driver_version // 1000:
        mend = f"update the driver, or {sys.executable} -m pip install nvidia-cuda-nvrtc-cu{driver_version // 1000}"
        return "nvrtc", NOTE, f"{found}: newer than the driver, which may refuse its kernels", mend
    return "nvrtc", OK, found, ""


def _amd():
    if not os.path.exists("/dev/kfd"):
        return
    try:
        devices = hip.list_devices()
    except DeviceError as error:
        yield "gpu", NOTE, "AMD (/dev/kfd) cannot be used; models run on the CPU", str(error)
        return
    for device in devices:
        found = f"hip:{device['ordinal']} {device['name']}, {device['isa']}, {device['memory_bytes'] / 2**30:.1f} GiB"
        yield "gpu", NOTE, f"{found}: zse's HIP device {UNPROVEN_HIP}", ""


def _apple():
    if sys.platform != "darwin":
        return
    try:
        yield "gpu", NOTE, f"metal {metal.product_name()}: zse's Metal device {UNPROVEN_METAL}", ""
    except DeviceError as error:
        yield "gpu", NOTE, "Metal cannot be used; models run on the CPU", str(error)
