"""From a model's forward to recorded launches: traced once per kind of layer, fused, given forms and places,
recorded."""

from zse import lazy

__getattr__ = lazy.submodules(__name__, __path__)
