"""Documents → blocks: one file a kind. `parse(data, kind, …)` is called in the worker process (rag/worker.py), never in the server's."""

from zse import lazy

__getattr__ = lazy.submodules(__name__, __path__)
