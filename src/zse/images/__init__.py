"""Images of requests: decoded and resized in processes with limits, as the processors of their models do it."""

from zse import lazy

__getattr__ = lazy.submodules(__name__, __path__)
