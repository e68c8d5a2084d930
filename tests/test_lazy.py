"""Imports that wait: a module through its package, and those outside of it."""

import subprocess
import sys

import pytest

from zse.lazy import LazyModule


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_module_through_its_package_is_imported_when_it_is_used():
    script = """
import sys
from zse.quant import pack
print("zse.quant.pack" in sys.modules, repr(pack))
print(pack.f32_to_bf16.__name__, "zse.quant.pack" in sys.modules)
from zse.quant import pack as again
print(again is sys.modules["zse.quant.pack"])
"""
    assert run(script) == ("False <lazy module 'zse.quant.pack', not imported yet>\nf32_to_bf16 True\nTrue\n")


def test_a_module_outside_is_imported_when_it_is_used():
    script = """
import sys
from zse.lazy import numpy as np
print("numpy" in sys.modules)
print(np.float32(2), "numpy" in sys.modules)
"""
    assert run(script) == "False\n2.0 True\n"


def test_what_is_patched_in_a_lazy_module_is_patched_in_the_module():
    script = """
from zse.quant import pack
pack.made_here = 3
from zse.quant.pack import made_here
print(made_here)
del pack.made_here
import sys
print(hasattr(sys.modules["zse.quant.pack"], "made_here"))
"""
    assert run(script) == "3\nFalse\n"


def test_a_patch_of_a_lazy_module_is_undone():
    module = LazyModule("zse.quant.pack")
    before = module.f32_to_bf16
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "f32_to_bf16", None)
            assert sys.modules["zse.quant.pack"].f32_to_bf16 is None
        assert sys.modules["zse.quant.pack"].f32_to_bf16 is before


def test_a_module_that_is_not_there_is_an_import_error():
    with pytest.raises(ImportError, match="nothing_here"):
        from zse.quant import nothing_here  # noqa: F401
    with pytest.raises(ImportError, match="scipy"):
        from zse.lazy import scipy  # noqa: F401


def test_a_lazy_module_answers_no_questions_of_inspect():
    module = LazyModule("zse.quant.pack")
    assert not hasattr(module, "__wrapped__") and module.__name__ == "zse.quant.pack"
