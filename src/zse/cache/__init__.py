"""The KV cache on the host side: page accounting. Device layout is in cache/layout.py."""

from zse import lazy

__getattr__ = lazy.submodules(__name__, __path__)
