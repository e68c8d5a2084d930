"""Compiles the CPU libraries (zse.build) when the package is built or installed; everything else stands in pyproject.toml."""

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

SOURCE = Path(__file__).resolve().parent / "src"
sys.path.insert(0, str(SOURCE))


class BuildWithKernels(build_py):
    """In the source tree first (what did not change is not compiled again), then into what is installed."""

    def run(self):
        super().run()
        from zse.build import build, isas_to_install

        folder = build(SOURCE / "zse" / "_native", isas_to_install())
        if not getattr(self, "editable_mode", False):
            target = Path(self.build_lib) / "zse" / "_native"
            target.mkdir(parents=True, exist_ok=True)
            for path in [*folder.glob("*.so"), *folder.glob("*.json")]:
                shutil.copy2(path, target / path.name)


class PlatformWheel(bdist_wheel):
    """The libraries are loaded with ctypes: any Python 3 on this platform."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class WithLibraries(Distribution):
    def has_ext_modules(self):
        return True


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel}, distclass=WithLibraries)
