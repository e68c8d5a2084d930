"""Documents in, passages out: parsing, chunks, the index and its search. It knows neither HTTP nor routes."""

from zse import lazy

__getattr__ = lazy.submodules(__name__, __path__)
