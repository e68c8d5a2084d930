"""Logging set-up: one line a record on stderr, control characters escaped so that no field can forge a line;
a traceback is indented."""

import logging
import sys

from zse import env

# Control characters of both sets; what ends a line or turns its direction in some terminals and viewers.
_ESCAPES = {code: f"\\x{code:02x}" for code in [*range(32), *range(127, 160)]}
_ESCAPES |= {code: f"\\u{code:04x}" for code in [0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]}


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        head, *rest = text.split("\n") if record.exc_info else [text]
        return "\n".join([head.translate(_ESCAPES), *("    " + line.translate(_ESCAPES) for line in rest)])


def setup(level: str | None = None) -> None:
    """Send zse's records to stderr at `level` (default: ZSE_LOG)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("zse")
    logger.handlers[:] = [handler]
    logger.setLevel((level or env.get("ZSE_LOG")).upper())
    logger.propagate = False
