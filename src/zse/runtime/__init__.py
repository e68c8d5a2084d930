"""Devices: memory, compiled kernels, graphs that are recorded once and replayed many times. `opening` opens one."""

from zse import lazy

__getattr__ = lazy.submodules(__name__, __path__)
