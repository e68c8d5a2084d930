"""Compiles the CPU libraries (zse.build) when the package is built or installed; everything else stands in pyproject.toml.

ZSE_BUILD_ISA says which kernels, ZSE_BUILD_MACHINE and CC another architecture (`make wheel`)."""

import os
import re
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "src"))
# The same sources and compiler give the same bytes, whoever builds, when and where: times are these, modes those below.
os.environ.setdefault("SOURCE_DATE_EPOCH", "1577836800")
os.umask(0o022)


def libraries() -> list[Path]:
    """What was compiled and belongs into the package: the libraries of hand-written C, and of the levels that were asked for
    the kernels with their manifests."""
    from zse import env
    from zse.build import build, isas_to_install
    from zse.runtime import isa

    machine = env.get("ZSE_BUILD_MACHINE") or isa.machine()
    # In the source tree where it is this machine's: what did not change is not compiled again.
    here = machine == isa.machine()
    folder = ROOT / "src" / "zse" / "_native" if here else ROOT / "build" / f"native-{machine}"
    isas = isas_to_install() if here else None
    build(folder, isas, machine=machine)
    wanted = isas if isas is not None else isa.levels_of_machine(machine)
    kernels = {f"libzse_kernels_{level}.so": level for level in isa.LEVELS}
    return [
        path
        for path in [*folder.glob("*.so"), *folder.glob("*.json")]
        if (level := kernels.get(path.name, path.stem if path.suffix == ".json" else None)) is None or level in wanted
    ]


class BuildWithKernels(build_py):
    """In the source tree first, then into what is installed."""

    def run(self):
        super().run()
        found = libraries()
        if not getattr(self, "editable_mode", False):
            target = Path(self.build_lib) / "zse" / "_native"
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            for path in found:
                shutil.copy2(path, target / path.name)


class PlatformWheel(bdist_wheel):
    """The libraries are loaded with ctypes: any Python 3 on a platform that has the C library they were linked with."""

    def write_wheelfile(self, *args, **named):
        """The last step before the archive: modes come from whoever checked the tree out."""
        super().write_wheelfile(*args, **named)
        for path in Path(self.bdist_dir).rglob("*"):
            path.chmod(0o755 if path.is_dir() or path.suffix == ".so" else 0o644)

    def get_tag(self):
        platform = super().get_tag()[2]
        if platform.startswith("linux"):
            found = libraries()
            versions = {int(minor) for path in found for minor in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())}
            machine = "aarch64" if any("arm64" in path.name for path in found) else platform.removeprefix("linux_")
            platform = f"manylinux_2_{max(versions)}_{machine}"
        return "py3", "none", platform


class WithLibraries(Distribution):
    def has_ext_modules(self):
        return True


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel}, distclass=WithLibraries)
