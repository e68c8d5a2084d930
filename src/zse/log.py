"""Logging set-up: a record is one line on stderr, as text or as JSON. Control characters are escaped so that no field
can forge a line; a traceback is indented, in JSON a field. What is said to a model or by it is in no record."""

import logging
import sys
import time
from collections import deque
from collections.abc import Iterator
from itertools import takewhile
from typing import NamedTuple

from zse import env
from zse.lazy import json

LEVELS, FORMS = ("debug", "info", "warning", "error"), ("text", "json")
# Control characters of both sets; what ends a line or turns its direction in some terminals and viewers.
_ESCAPES = {code: f"\\x{code:02x}" for code in [*range(32), *range(127, 160)]}
_ESCAPES |= {code: f"\\u{code:04x}" for code in [0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]}


def utc(at: float) -> str:
    """A time, seconds since 1970, as records of JSON show it."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(at))}.{int(at % 1 * 1000):03d}Z"


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        head, *rest = text.split("\n") if record.exc_info else [text]
        return "\n".join([head.translate(_ESCAPES), *("    " + line.translate(_ESCAPES) for line in rest)])


class _JSONFormatter(logging.Formatter):
    """time (UTC), level, logger, message; the record's `fields`, a dict, where it has some; exception."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # ASCII only: nothing in it ends a line


_EXCEPTIONS = logging.Formatter()
MOST_CHARACTERS = 2000  # of a text that is kept in memory


class RecentRecord(NamedTuple):
    """What is kept of a record. id: one more with each; at: seconds since 1970; fields: as in a line of JSON."""

    id: int
    at: float
    level: int
    logger: str
    message: str
    fields: dict


class RecentRecords(logging.Handler):
    """The newest records, with bounded texts, whose control characters are escaped: 2,000 access records take 1.6 MB."""

    def __init__(self, most: int = 2000):
        super().__init__()
        self._records: deque[RecentRecord] = deque(maxlen=most)
        self._count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Called with the handler's lock."""
        self._count += 1
        fields = getattr(record, "fields", {})
        if record.exc_info:
            fields = fields | {"exception": _EXCEPTIONS.formatException(record.exc_info)[-MOST_CHARACTERS:]}
        message = record.getMessage()[:MOST_CHARACTERS].translate(_ESCAPES)
        self._records.append(RecentRecord(self._count, record.created, record.levelno, record.name, message, fields))

    def attach(self) -> None:
        """Take the records of all of zse from now on, beside what setup() made."""
        logging.getLogger("zse").addHandler(self)

    def newest_first(self, after: int) -> Iterator[RecentRecord]:
        """Those with a greater id than `after`."""
        with self.lock:  # type: ignore[union-attr]  # made by Handler
            records = [*self._records]
        return takewhile(lambda record: record.id > after, reversed(records))


def setup(level: str | None = None, form: str | None = None) -> None:
    """Send zse's records to stderr at `level` (default: ZSE_LOG). form: text or json (default: ZSE_LOG_FORMAT). Raises ConfigError
    for values of these that are none."""
    level = level or env.chosen("ZSE_LOG", LEVELS)
    is_json = (form or env.chosen("ZSE_LOG_FORMAT", FORMS)) == "json"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JSONFormatter() if is_json else _Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("zse")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
