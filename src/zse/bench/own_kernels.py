"""Kernels of one's own: the operations of a Python file, and devices that have their kernels (`zse kernels
check|bench`)."""

import importlib.util
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zse.bench import kernels
from zse.errors import CompileError, ConfigError, DeviceError
from zse.kernel import archs, emit, nvrtc
from zse.kernel.targets.cpu import ISAS
from zse.kernels import gather
from zse.kernels.gpu import probe
from zse.kernels.op import Op
from zse.lazy import numpy as np
from zse.runtime import compiler, cpu, cuda, native
from zse.runtime import gpu as gpu_device
from zse.runtime.bindings import cuda as cuda_driver


def load(path: str, names: "list[str] | tuple[str, ...]" = ()) -> list[Op]:
    """The Ops that a file defines, in its order, or those of these names. ConfigError for a file that cannot be read,
    fails, or has none, and for an unknown name."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"no file {path}; `zse kernels new {path}` writes one to start with")
    spec = importlib.util.spec_from_file_location(f"zse_own_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the author's file raises
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(file.absolute())
        ]
        place = f"{path}, line {lines[-1]}" if lines else str(path)
        raise ConfigError(f"{place}: {type(error).__name__}: {error}") from error
    ops = [value for value in vars(module).values() if isinstance(value, Op)]
    if not ops:
        raise ConfigError(f"{path} defines no Op; `zse kernels new` writes a file that does")
    there = {op.name: op for op in ops}
    for name in names:
        if name not in there:
            raise ConfigError(f"no operation {name!r} in {path}; there are {', '.join(there)}")
    return [there[name] for name in names] or ops


def cpu_device(op: Op, threads: int | None = None) -> Any:
    """This machine's CPU with the operation's kernels, and with gather_rows, which the ceiling is measured with."""
    isa = native.choose_level()
    target = ISAS[isa]
    text, manifest = emit.emit_unit([*op.variants(target), *gather.GATHER_ROWS.variants(target)], isa)
    with tempfile.TemporaryDirectory(prefix="zse-kernels-") as folder:
        source, library = Path(folder, "kernels.c"), Path(folder, "kernels.so")
        source.write_text(text, encoding="utf-8")
        compiler.link(compiler.find_compiler()[0], [source], library, (*compiler.KERNEL_FLAGS, *target.flags))
        return cpu.CPUDevice(threads, str(library), manifest)


def cuda_device(op: Op, ordinal: int = 0) -> Any:
    """A GPU with the operation's kernels, and with probe_read. DeviceError without a GPU, ConfigError without NVRTC."""
    driver = cuda_driver.CUDADriver()
    driver.start(ordinal)
    target = emit.gpu_target(driver.isa)
    variants = [*(op.gpu_variants(target) if op.gpu_variants else ()), *probe.variants(target)]
    compiled = {variant.symbol: nvrtc.compile_variant(variant, driver.isa) for variant in variants}
    manifest = {symbol: one.manifest() | {"image": symbol} for symbol, one in compiled.items()}
    return cuda.CUDADevice(ordinal, driver, gpu_device.CompiledKernels(manifest, lambda symbol: compiled[symbol].cubin))


def device_for(op: Op, name: str | None) -> Any:
    """The device to time an operation on: "cpu", "cuda", "cuda:1", or None: the first GPU for an operation that has a
    GPU form, else the CPU. ConfigError for another name, DeviceError without such a device."""
    kind, _, number = (name or "cuda").partition(":")
    if name == "cpu" or (name is None and op.gpu_variants is None):
        return cpu_device(op)
    if kind != "cuda" or (number and not number.isdecimal()):
        raise ConfigError(f"--device {name}: kernels of one's own are timed on cpu, cuda or cuda:N")
    if op.gpu_variants is None:
        raise ConfigError(f"{op.name} has no GPU form (its gpu_variants)")
    try:
        return cuda_device(op, int(number or 0))
    except DeviceError:
        if name is None:
            return cpu_device(op)
        raise


def emulated_device(op: Op, arch: str, seed: int) -> Any:
    """The emulated GPU with the operation's kernels. ConfigError where the emulator is not: it is no part of a
    wheel."""
    try:
        from zse_emulator import EmulateDevice  # beside zse in a checkout, absent from a wheel
    except ModuleNotFoundError:
        raise ConfigError("the emulator is not here: it comes with a checkout of zse's sources") from None
    variants = op.gpu_variants(emit.gpu_target(arch)) if op.gpu_variants else []
    return EmulateDevice(arch, {variant.symbol: variant for variant in variants}, seed)


def devices(op: Op, arch: str, seed: int) -> "Iterator[tuple[str, Any]]":
    """(what it is, a device that has the operation's kernels, or why there is none) of every form that the operation
    has: the CPU's; the GPU's on a GPU, if there is one, and in the emulator."""
    yield f"cpu {native.choose_level()}", cpu_device(op)
    if op.gpu_variants is None:
        return
    try:
        device = cuda_device(op)
        yield f"{device.product} {device.isa}", device
    except (DeviceError, ConfigError) as error:
        yield "GPU", str(error)
    try:
        archs.features_of(arch)
        yield f"emulated {arch}", emulated_device(op, arch, seed)
    except (ConfigError, CompileError) as error:
        yield f"emulated {arch}", str(error)


def check(op: Op, device, seed: int) -> Iterator[tuple[str, str]]:
    """(case, what is wrong with its results, "" for nothing) of every case with inputs from `seed`. Outputs are
    poisoned before the launch, so what the kernel does not write is wrong as well."""
    for case in kernels.cases_of(op, device, np.random.default_rng(seed)):
        quantized = [name for name, output in case.outputs.items() if output.int8 or output.fp8]
        if quantized:
            raise ConfigError(
                f"{op.name}: {quantized[0]} is a quantized activation, which `zse kernels check` does not compare; "
                "make its numbers and scales outputs of their own"
            )
        try:
            yield case.name, kernels.problem(device, op, case)
        except DeviceError as error:  # a rule of the language that the emulator saw broken
            yield case.name, str(error)
