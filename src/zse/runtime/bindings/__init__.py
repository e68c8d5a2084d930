"""ctypes tables of the GPU drivers: the functions that are used, each call checked. Nothing is opened on import."""

from zse import lazy

__getattr__ = lazy.submodules(__name__, __path__)
