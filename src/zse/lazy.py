"""What is imported when: half of a start are imports, and most requests use few features.

Two rules make every import statement stand at the top of its file, where readers and type checkers see it:

    from zse.kernels import matmul              # a module through its package: imported at its first use
    from zse.kernels.matmul import matmul       # a name out of a module: imported now
    from zse.lazy import numpy as np            # a module of OUTSIDE: imported at its first use

A package takes part with two lines in its `__init__.py`: `__getattr__ = lazy.submodules(__name__, __path__)`. What is
looked up often (a name in a loop of the step) is imported as a name. The tables OUTSIDE, LEAN, GPU_ENGINE and
PARKED_ENGINE say the rest; tests/test_start.py holds each process to its budget of modules and of processor time."""

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
    "ctypes": ("ctypes", "3 ms"),
    "datetime": ("datetime", "1 ms"),
    "difflib": ("difflib", "3 ms"),
    "hashlib": ("hashlib", "2 ms with libcrypto"),
    "json": ("json", "2 ms"),
    "logging": ("logging", "6 ms with what it brings"),
    "numpy": ("numpy", "70 to 250 ms"),
    "pathlib": ("pathlib", "4 ms with urllib"),
    "platform": ("platform", "2 ms"),
    "select": ("select", "1 ms"),
    "shutil": ("shutil", "3 ms"),
    "socket": ("socket", "8 ms with selectors"),
    "subprocess": ("subprocess", "5 ms"),
    "tempfile": ("tempfile", "4 ms with random and shutil"),
    "tokenizers": ("tokenizers", "60 ms"),
    "tomllib": ("tomllib", "4 ms"),
    "unicodedata": ("unicodedata", "1 ms"),
}

# Modules that import another one only because it is installed: name → (what to keep from it, what that saves a start).
LEAN = {
    "msgspec": (
        "typing_extensions",
        "10 ms: inspect, ast, dis and tokenize; typing has all it wants from Python 3.11 on",
    ),
    "asyncio": ("ssl", "5 ms: libssl; for the server process alone, which does without TLS"),
}
# What an engine on a GPU imports while the driver starts (0.2 s). First what stands between an open device and weights
# on their way (memory is allocated before), then what recording needs: a driver that is there sooner than all of it
# does not wait.
GPU_ENGINE = """zse.engine.memory zse.runtime.cuda zse.kernel.cache zse.models.load zse.engine.runner zse.cache.layout
    zse.plan.record zse.models.decoder zse.sampling.state zse.kernels.gpu.sample_parts zse.kernels.feed
    zse.kernels.gpu.attention_plan zse.kernels.gpu.gemm_parts zse.kernels.gpu.gemm zse.kernels.gpu.gemm_launch
    zse.kernels.gpu.r16 zse.kernels.gpu.dequantize zse.engine.core zse.speculative.ngram zse.runtime.gpu_load zse.runtime.probe
    zse.runtime.gpu_graph zse.kernels.page_table zse.kernels.gpu.step zse.kernels.gpu.norm zse.kernels.gpu.activation
    zse.kernels.gpu.qkv_post zse.kernels.heads_attention zse.kernels.gpu.attention_heads zse.kernels.gpu.matmul
    zse.kernels.gpu.attention zse.kernels.gpu.attention_prefill zse.kernels.gpu.quantize zse.plan.chains
    zse.kernels.gpu.chain zse.plan.ends zse.kernels.gpu.begin_token zse.engine.serving""".split()
# What an engine that is parked imports before it knows its model.
PARKED_ENGINE = "zse.engine.core zse.engine.memory zse.engine.runner zse.formats.zse zse.models.load zse.scheduler.scheduler".split()


def import_lean(name: str) -> None:
    """Import a module of LEAN as if the other one were not installed. Does nothing where either is imported already."""
    absent = LEAN[name][0]
    if name in sys.modules or absent in sys.modules:
        return
    sys.modules[absent] = None  # type: ignore[assignment]  # importing it is an ImportError now
    try:
        import_module(name)
    finally:
        del sys.modules[absent]


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
    import ctypes as ctypes
    import datetime as datetime
    import difflib as difflib
    import hashlib as hashlib
    import json as json
    import logging as logging
    import pathlib as pathlib
    import platform as platform
    import select as select
    import shutil as shutil
    import socket as socket
    import subprocess as subprocess
    import tempfile as tempfile
    import tomllib as tomllib
    import unicodedata as unicodedata
    from concurrent import futures as futures

    import numpy as numpy
    import tokenizers as tokenizers
else:

    def __getattr__(name: str) -> ModuleType:
        if name in OUTSIDE:
            module = OUTSIDE[name][0]
            return sys.modules.get(module) or LazyModule(module)
        raise AttributeError(f"module 'zse.lazy' has no attribute {name!r}")
