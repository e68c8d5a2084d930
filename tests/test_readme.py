"""README says what is shown: its figures stand in the log of measurements, its counts are the catalog's."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README, LOG = (ROOT / "README.md").read_text(), (ROOT / "benchmarks/LOG.md").read_text()
NUMBER = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?![\w])")
SECTIONS = {title: README.partition(f"\n## {title}\n")[2].partition("\n## ")[0] for title in ("On a GPU", "On a CPU")}
# vLLM's starts, which the log has to a tenth of a second.
ROUNDED = {"65": "65.3", "97": "96.6", "81": "80.6", "28": "27.9", "360": "359.8"}


def numbers(text: str) -> set[str]:
    return {number.rstrip(",").replace(",", "") for number in NUMBER.findall(text)}


@pytest.mark.parametrize("title", SECTIONS)
def test_every_figure_is_in_the_log(title):
    rows = [line.split("|")[2:-1] for line in SECTIONS[title].splitlines() if line.startswith("| ")]
    figures = {number for row in rows[1:] for cell in row for number in numbers(cell)}
    known = numbers(LOG) | numbers((ROOT / "benchmarks/gpu_serve.py").read_text())
    log = {number for number in figures if number in known or ROUNDED.get(number) in known or _rounds(number, known)}
    assert len(figures) > 30 and figures == log, f"not in benchmarks/LOG.md: {sorted(figures - log)}"


def _rounds(number: str, known: set[str]) -> bool:
    """Whether an integer is a figure of the log without its decimals."""
    return "." not in number and any("." in value and round(float(value)) == int(number) for value in known)


def test_what_both_engines_had_to_hold_is_compared():
    """A reservation is not a need: both have weights and KV of the same tokens, and no row has 130 GiB."""
    assert "weights and KV of 8,192 tokens" in SECTIONS["On a GPU"]
    assert not re.search(r"^\|.*\b130\b", SECTIONS["On a GPU"], re.MULTILINE)


@pytest.mark.parametrize("row", ["first token of 7,000, ms", "default settings", "tuned: "])
def test_rows_that_may_not_flatter(row):
    assert row in SECTIONS["On a GPU"]


def test_drafts_have_a_row_of_their_own():
    rows = [line for line in SECTIONS["On a CPU"].splitlines() if line.startswith("| ")]
    assert sum("drafts" in row for row in rows) == 1


def test_the_catalogs_size():
    catalog = json.loads((ROOT / "src/zse/formats/catalog.json").read_text())
    assert f"{len(catalog['models']) + len(catalog['pinned'])} names" in README
