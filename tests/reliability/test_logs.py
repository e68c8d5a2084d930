"""No field of a record can forge a line of the log, or change what is read of another one."""

import io
import logging
import sys

import pytest

from zse import log

# What ends a line or moves the cursor somewhere: control characters of both sets, Unicode's separators and directions.
FORGERIES = [
    *map(chr, [*range(32), *range(127, 160)]),
    *"\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069",
]


@pytest.fixture
def logged(monkeypatch):
    """What a record looks like in the log."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    logger = logging.getLogger("zse")
    before = logger.handlers[:], logger.level, logger.propagate
    log.setup("info")
    yield lambda: out.getvalue()
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.mark.parametrize("character", FORGERIES, ids=lambda character: f"{ord(character):04x}")
def test_a_field_stays_in_its_line(logged, character):
    logging.getLogger("zse.server").info("request of %s", f"me{character}2026-11-22 INFO zse: all is well")
    text = logged()
    assert character not in text.removesuffix("\n") and text.count("\n") == 1 and len(text.splitlines()) == 1
    assert f"{ord(character):02x}2026-11-22 INFO" in text


def test_letters_of_every_script_stay_readable(logged):
    logging.getLogger("zse.server").info("größe 日本語 עברית 🙂")
    assert logged().endswith("größe 日本語 עברית 🙂\n")


@pytest.mark.parametrize("character", "\n\r\x85\u2028\x1b")
def test_an_exception_s_text_cannot_begin_a_line(logged, character):
    """Of a traceback every line is indented."""
    forged = "2026-11-22 12:00:00,000 INFO zse.server: all is well"
    try:
        raise ValueError(f"wrong{character}{forged}")
    except ValueError:
        logging.getLogger("zse.server").exception("it failed")
    first, *rest = logged().splitlines()
    assert first.endswith("it failed") and rest and all(line.startswith("    ") for line in rest)
    assert any("ValueError: wrong" in line for line in rest)
