"""What the routes accept: tables of fields, and the checked requests that are made of bodies."""

from zse import lazy

__getattr__ = lazy.submodules(__name__, __path__)
