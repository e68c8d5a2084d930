"""Logging set-up: a record is one line on stderr, as text or as JSON. Control characters are escaped so that no field
can forge a line; a traceback is indented, in JSON a field. What is said to a model or by it is in no record."""

import logging
import sys
import time

from zse import env
from zse.lazy import json

# Control characters of both sets; what ends a line or turns its direction in some terminals and viewers.
_ESCAPES = {code: f"\\x{code:02x}" for code in [*range(32), *range(127, 160)]}
_ESCAPES |= {code: f"\\u{code:04x}" for code in [0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]}


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        head, *rest = text.split("\n") if record.exc_info else [text]
        return "\n".join([head.translate(_ESCAPES), *("    " + line.translate(_ESCAPES) for line in rest)])


class _JSONFormatter(logging.Formatter):
    """time (UTC), level, logger, message; the record's `fields`, a dict, where it has some; exception."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # ASCII only: nothing in it ends a line


def setup(level: str | None = None, form: str | None = None) -> None:
    """Send zse's records to stderr at `level` (default: ZSE_LOG). form: text or json (default: ZSE_LOG_FORMAT)."""
    handler = logging.StreamHandler(sys.stderr)
    is_json = (form or env.get("ZSE_LOG_FORMAT")) == "json"
    handler.setFormatter(_JSONFormatter() if is_json else _Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("zse")
    logger.handlers[:] = [handler]
    logger.setLevel((level or env.get("ZSE_LOG")).upper())
    logger.propagate = False
