"""Documents → blocks: one file a kind, whose `parse()` is called in the worker process (rag/worker.py), never in the server's.

That process opens no file once it parses: these modules import each other by names, and nothing lazily."""

from zse import lazy

__getattr__ = lazy.submodules(__name__, __path__)
