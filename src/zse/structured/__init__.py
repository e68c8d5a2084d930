"""Structured output: grammars compiled with llguidance in a process of their own, and a mask of the vocabulary for each
step. service.py is the engine's end, worker.py the process; what users see: docs/api.md, Structured output."""

from zse import lazy

__getattr__ = lazy.submodules(__name__, __path__)
