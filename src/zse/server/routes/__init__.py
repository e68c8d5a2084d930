"""The routes: every (method, path) of the server stands in table.py, with who may call it."""

from zse import lazy

__getattr__ = lazy.submodules(__name__, __path__)
