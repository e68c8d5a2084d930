"""What ranks compute together, by the kind of memory that they share."""

from zse import lazy

__getattr__ = lazy.submodules(__name__, __path__)
