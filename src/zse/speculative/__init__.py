"""Drafts: guesses of the next tokens of a request, which one step verifies together. Lossless: see speculator.py."""

from zse import lazy

__getattr__ = lazy.submodules(__name__, __path__)
