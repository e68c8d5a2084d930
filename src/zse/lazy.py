"""Imports that wait until they are used: half of a start are imports, and most requests use few features.

Two rules make every import statement stand at the top of its file, where readers and type checkers see it:

    from zse.kernels import matmul              # a module through its package: imported at its first use
    from zse.kernels.matmul import matmul       # a name out of a module: imported now
    from zse.lazy import numpy as np            # a module of OUTSIDE: imported at its first use

A package takes part with two lines in its `__init__.py`: `__getattr__ = lazy.submodules(__name__, __path__)`. What is
looked up often (a name in a loop of the step) is imported as a name.
"""

import os
import sys
from importlib import import_module
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

# Modules outside this package that a start does without: name → (module, what importing it costs a start; Python 3.11).
OUTSIDE = {
    "logging": ("logging", "6 ms with what it brings"),
    "numpy": ("numpy", "70 to 250 ms"),
    "subprocess": ("subprocess", "5 ms"),
    "tempfile": ("tempfile", "4 ms with random and shutil"),
}


class LazyModule(ModuleType):
    """Stands for the module `__name__` and imports it when an attribute is first asked for.

    Reads and writes go to the module itself, so that a test that patches it is seen here."""

    @property
    def __dict__(self) -> "dict[str, Any]":  # type: ignore[override]
        """The module's own: pytest's monkeypatch looks there for what it is to put back."""
        return import_module(self.__name__).__dict__

    def __getattr__(self, name: str) -> "Any":
        if name.startswith("__") and name not in ("__file__", "__version__"):
            raise AttributeError(name)  # what inspect and copy look for is no use of the module
        return getattr(import_module(self.__name__), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(import_module(self.__name__), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(import_module(self.__name__), name)

    def __repr__(self) -> str:
        return f"<lazy module {self.__name__!r}{'' if self.__name__ in sys.modules else ', not imported yet'}>"


def submodules(package: str, path: "Iterable[str]") -> "Callable[[str], ModuleType]":
    """The `__getattr__` of a package: `from package import module` gives a LazyModule where there is such a module."""
    folders = list(path)

    def find(name: str) -> ModuleType:
        if not name.startswith("_"):
            for folder in folders:
                place = os.path.join(folder, name)
                if os.path.exists(place + ".py") or os.path.exists(os.path.join(place, "__init__.py")):
                    return sys.modules.get(f"{package}.{name}") or LazyModule(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find


if TYPE_CHECKING:
    import logging as logging
    import subprocess as subprocess
    import tempfile as tempfile

    import numpy as numpy
else:

    def __getattr__(name: str) -> ModuleType:
        if name in OUTSIDE:
            module = OUTSIDE[name][0]
            return sys.modules.get(module) or LazyModule(module)
        raise AttributeError(f"module 'zse.lazy' has no attribute {name!r}")
