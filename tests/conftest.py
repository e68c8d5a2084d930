"""What tests of every part share: where the public models and the reference results are."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from gpu.machine import missing

from zse.formats import store
from zse.formats.catalog import CATALOG

# A shell starts background jobs with SIGINT ignored, and children inherit that: tests of Ctrl-C need the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


HERE = Path(__file__).parent


def _absent(what: str):
    line = f"{what} is not here: set ZSE_TEST_MODELS, or fetch models with `zse pull`"
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
    """The folder of reference results: tests/goldens, or ZSE_GOLDENS."""
    return Path(os.environ.get("ZSE_GOLDENS") or HERE / "goldens")


def _cache_folder() -> Path:
    """Where compiled kernels are kept between runs and clones, by content: ZSE_TEST_CACHE, or zse-tests in the user's
    cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("ZSE_TEST_CACHE") or os.path.join(home, "zse-tests"))


@pytest.fixture(scope="session")
def kernel_cache() -> Path:
    """A ZSE_HOME for tests that compile kernels. What has not been compiled for two weeks is deleted."""
    folder = _cache_folder()
    for path in folder.glob("kernels/*/*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > 14 * 86400:
                path.unlink()
    return folder


@pytest.fixture(scope="module")
def kept_kernels(kernel_cache):
    """Sets ZSE_HOME to the kernel cache while a module's tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZSE_HOME", str(kernel_cache))
        yield


class LeftOut(pytest.Directory):
    """A folder of tests that this machine cannot run: one skip, with the reason."""

    def collect(self):
        pytest.skip(missing())


def pytest_collect_directory(path: Path, parent):
    if path == HERE / "gpu" and missing():
        return LeftOut.from_parent(parent, path=path)
    return None


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files of emitted C")


def pytest_collection_modifyitems(items):
    """Tests that are marked `timed` hold a time against a bound. They have three attempts: a shared machine may take the
    processor away for hundreds of milliseconds at any moment, and what the code makes slow is slow three times."""
    for item in items:
        if item.get_closest_marker("timed"):
            item.add_marker(pytest.mark.flaky(reruns=2))
