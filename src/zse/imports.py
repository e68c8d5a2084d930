"""Imports that bring more than they are needed for."""

import sys
from importlib import import_module


def import_msgspec() -> None:
    """msgspec, but not typing_extensions, which it takes where it is installed: that brings inspect, ast, dis and tokenize,
    a tenth of an engine's start. From Python 3.11 on, typing has all that msgspec wants of it."""
    _import_without("typing_extensions", "msgspec")


def import_asyncio() -> None:
    """asyncio, but not ssl, without which it does all but TLS: libssl takes the server 8 ms. For the server process alone."""
    _import_without("ssl", "asyncio")


def _import_without(absent: str, name: str) -> None:
    """Import `name`, to which `absent` seems not to be installed. Does nothing if either was imported before."""
    if name in sys.modules or absent in sys.modules:
        return
    sys.modules[absent] = None  # type: ignore[assignment]  # importing it is an ImportError now
    try:
        import_module(name)
    finally:
        del sys.modules[absent]
