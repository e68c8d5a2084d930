"""One model on several devices (docs/design/0011-several-devices.md): ranks, what each has of the model, and how they add up."""

from zse import lazy

__getattr__ = lazy.submodules(__name__, __path__)
