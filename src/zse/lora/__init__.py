"""Adapters (LoRA): which of a model's products one may change, and the slots that adapters have in device memory."""

from zse import lazy

__getattr__ = lazy.submodules(__name__, __path__)
