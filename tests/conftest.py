"""What tests of every part share: where the public models and the reference results are."""

import os
import signal
from pathlib import Path

import pytest

from zse.formats import store
from zse.formats.catalog import CATALOG

# A shell starts background jobs with SIGINT ignored, and children inherit that: tests of Ctrl-C need the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _absent(what: str):
    line = f"{what} is not here: set ZSE_TEST_MODELS / ZSE_GOLDENS, or fetch models with `zse pull`"
    if os.environ.get("ZSE_REQUIRE_MODELS") == "1":
        pytest.fail(line)
    pytest.skip(line)


@pytest.fixture(scope="session")
def real_models() -> dict[str, Path]:
    """Catalog name -> file of every catalog model, from the folder ZSE_TEST_MODELS or the model store.

    Without them a test skips, or fails with ZSE_REQUIRE_MODELS=1."""
    folder = os.environ.get("ZSE_TEST_MODELS")
    found = {}
    for name, entry in CATALOG.items():
        path = Path(folder or os.path.join(store.models_dir(), name)) / entry.filename
        if not path.is_file():
            _absent(f"model {name} ({path})")
        found[name] = path
    return found


@pytest.fixture(scope="session")
def goldens() -> Path:
    """The folder of reference results: ZSE_GOLDENS, or ../shared/goldens beside the project."""
    path = Path(os.environ.get("ZSE_GOLDENS") or Path(__file__).parents[2] / "shared" / "goldens")
    if not path.is_dir():
        _absent(f"the folder of reference results ({path})")
    return path


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files of emitted C")


def pytest_collection_modifyitems(items):
    """Tests that are marked `timed` hold a time against a bound. They have three attempts: a shared machine may take the
    processor away for hundreds of milliseconds at any moment, and what the code makes slow is slow three times."""
    for item in items:
        if item.get_closest_marker("timed"):
            item.add_marker(pytest.mark.flaky(reruns=2))
