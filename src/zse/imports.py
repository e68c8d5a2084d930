"""Imports that bring more than they are needed for."""

import sys


def import_msgspec() -> None:
    """msgspec, but not typing_extensions, which it takes where it is installed: that brings inspect, ast, dis and tokenize,
    a tenth of an engine's start. From Python 3.11 on, typing has all that msgspec wants of it."""
    if "msgspec" in sys.modules or "typing_extensions" in sys.modules:
        return
    sys.modules["typing_extensions"] = None     # type: ignore[assignment]  # importing it is an ImportError now
    try:
        import msgspec  # noqa: F401
    finally:
        del sys.modules["typing_extensions"]
