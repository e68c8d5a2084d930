"""NVRTC: CUDA C++ text → cubin, without a driver or a GPU. The library comes from the nvidia-cuda-nvrtc wheel or a CUDA
toolkit."""

import ctypes
import importlib.util
import os
import re
import runpy
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from zse.errors import CompileError, ConfigError
from zse.kernel.emit import emit_gpu
from zse.kernel.language import Variant

# --fmad=false: what the kernel says is what is computed. The rest of the flags is only about reports.
OPTIONS = ("--std=c++17", "--fmad=false", "--ptxas-options=-v", "--extra-device-vectorization")
HINT = "install it with `pip install 'zse[cuda]'`, or set CUDA_HOME to a CUDA toolkit"


@dataclass(frozen=True)
class Compiled:
    """One variant for one architecture. params: [[name, type], ...]; threads of a block; shared_bytes: dynamic shared
    memory that the launch asks for; registers of a thread; spills: bytes of registers that went to memory; text: the
    CUDA C++."""

    symbol: str
    arch: str
    cubin: bytes
    registers: int
    spills: int
    text: str
    params: list[list[str]]
    threads: int
    shared_bytes: int
    cluster: int = 1
    origin: str = ""

    def manifest(self) -> dict:
        """What a launcher needs to know, as JSON."""
        names = ("params", "threads", "cluster", "shared_bytes", "registers", "spills", "origin")
        return {name: getattr(self, name) for name in names}


def library_folders() -> list[Path]:
    """Where libnvrtc may stand: wheels of nvidia, then toolkits."""
    folders: list[Path] = []
    found = importlib.util.find_spec("nvidia")
    for place in (found.submodule_search_locations or ()) if found else ():
        folders += sorted(Path(place).glob("cu*/lib"), reverse=True) + [Path(place) / "cuda_nvrtc" / "lib"]
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    roots = ([Path(home)] if home else []) + [
        Path("/usr/local/cuda"),
        *sorted(Path("/usr/local").glob("cuda-*"), reverse=True),
    ]
    return folders + [root / sub for root in roots for sub in ("lib64", "lib")]


def find_library() -> Path | None:
    """The NVRTC library's file, or None."""
    for folder in library_folders():
        names = [path for path in sorted(folder.glob("libnvrtc.so*"), reverse=True) if ".alt." not in path.name]
        if names:
            return names[0]
    return None


class Nvrtc:
    """The library's few functions; every call checked."""

    def __init__(self, path: Path):
        self.path = path
        for builtins in sorted(path.parent.glob("libnvrtc-builtins.so*"), reverse=True):
            if ".alt." not in builtins.name:  # NVRTC opens it by name only, which does not look beside itself
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
                break
        self.library = ctypes.CDLL(str(path))
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p
        for name in (
            "nvrtcDestroyProgram",
            "nvrtcCompileProgram",
            "nvrtcGetProgramLogSize",
            "nvrtcGetProgramLog",
            "nvrtcGetCUBINSize",
            "nvrtcGetCUBIN",
            "nvrtcCreateProgram",
            "nvrtcVersion",
        ):
            getattr(self.library, name).restype = ctypes.c_int
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check("nvrtcVersion", self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = (major.value, minor.value)

    def _check(self, function: str, status: int) -> None:
        if status:
            raise CompileError(f"{function}: {self.library.nvrtcGetErrorString(status).decode()} ({self.path})")

    def architectures(self) -> list[int]:
        """What this library compiles for: 80, 90, ..."""
        count = ctypes.c_int()
        self._check("nvrtcGetNumSupportedArchs", self.library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        values = (ctypes.c_int * count.value)()
        self._check("nvrtcGetSupportedArchs", self.library.nvrtcGetSupportedArchs(values))
        return list(values)

    def _text(self, kind: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._check(f"nvrtcGet{kind}Size", getattr(self.library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)))
        data = ctypes.create_string_buffer(size.value)
        self._check(f"nvrtcGet{kind}", getattr(self.library, f"nvrtcGet{kind}")(program, data))
        return data.raw

    def compile(self, text: str, name: str, arch: str, options: tuple[str, ...] = OPTIONS) -> tuple[bytes, str]:
        """(cubin, log) of a text. CompileError with the compiler's messages."""
        program = ctypes.c_void_p()
        self._check(
            "nvrtcCreateProgram",
            self.library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None),
        )
        try:
            # NVRTC keeps compiled code below the home directory; a program taken from there has no resource report.
            uncached = ("--no-cache",) if self.version >= (13, 0) else ()
            flags = [option.encode() for option in (f"--gpu-architecture={arch}", *options, *uncached)]
            status = self.library.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
            log = self._text("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            if status:
                raise CompileError(
                    f"{name} for {arch}: {log.strip() or self.library.nvrtcGetErrorString(status).decode()}"
                )
            return self._text("CUBIN", program), log
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def nvrtc() -> Nvrtc:
    """The library, loaded once. ConfigError says how to get it."""
    path = find_library()
    if path is None:
        raise ConfigError(f"NVRTC, which compiles GPU kernels, was not found; {HINT}")
    return Nvrtc(path)


def resources_of(log: str, symbol: str) -> tuple[int, int]:
    """(registers, bytes of spill stores) that ptxas reports for a kernel."""
    part = log[log.index(f"entry function '{symbol}'") :]
    registers = re.search(r"Used (\d+) registers", part)
    spills = re.search(r"(\d+) bytes spill stores", part)
    if registers is None or spills is None:
        raise CompileError(f"{symbol}: no resource report in the compiler's log: {log.strip()}")
    return int(registers.group(1)), int(spills.group(1))


def compile_variant(variant: Variant, arch: str) -> Compiled:
    """Stage, print and compile one variant. CompileError: the author's line, or the compiler's log with the text's
    lines."""
    return compile_text(*emit_gpu(variant, arch), variant.symbol, arch)


def compile_text(text: str, entry: dict, symbol: str, arch: str) -> Compiled:
    """Compile what emit_gpu() gave for a variant."""
    cubin, log = nvrtc().compile(text, f"{symbol}.cu", arch)
    if f"'{symbol}'" not in log:
        # NVRTC 13 keeps cubins on disk beside a driver, and gives such a one without its resource report.
        cubin, log = nvrtc().compile(text, f"{symbol}.cu", arch, (*OPTIONS, "--no-cache"))
    return Compiled(symbol, arch, cubin, *resources_of(log, symbol), text, **entry)


def main() -> None:
    """`python -m zse.kernel.nvrtc FILE.py ARCH [NAME]`: compile the module's list VARIANTS, print texts and
    resources."""
    file, arch, *names = sys.argv[1:]
    for variant in runpy.run_path(file)["VARIANTS"]:
        if names and variant.symbol not in names:
            continue
        compiled = compile_variant(variant, arch)
        if names:
            print(compiled.text)
        print(
            f"{compiled.symbol}: {compiled.registers} registers, {compiled.spills} bytes spilled, {compiled.shared_bytes} bytes shared, "
            f"{len(compiled.cubin)} bytes of cubin"
        )


if __name__ == "__main__":
    main()
