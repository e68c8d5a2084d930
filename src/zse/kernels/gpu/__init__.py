"""Kernels of the GPU family: cuda, hip, metal and the emulator."""

from zse import lazy

__getattr__ = lazy.submodules(__name__, __path__)
