from zse import lazy

__getattr__ = lazy.submodules(__name__, __path__)
