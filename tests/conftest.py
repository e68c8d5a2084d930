"""What tests of every part share: where the public models and the reference results are."""

import contextlib
import fcntl
import os
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
from breadth import combinations
from garbage import Garbage
from gpu.machine import missing
from order import dealt, rotated
from prepare import cache_folder

from zse.formats import store
from zse.formats.catalog import CATALOG

# A shell starts background jobs with SIGINT ignored, and children inherit that: tests of Ctrl-C need the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


HERE = Path(__file__).parent


def _absent(what: str):
    # Models are 100 MB to 1 GB of other people's weights: a clone has none, and CI, which must not skip, sets the variable.
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


@pytest.fixture(scope="session")
def kernel_cache() -> Path:
    """A ZSE_HOME for tests that compile kernels. What has not been compiled for two weeks is deleted."""
    folder = cache_folder()
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
        # Without a GPU no test there can be true: kernels and driver calls have tests over the emulator and a fake driver beside.
        pytest.skip(missing())


def pytest_collect_directory(path: Path, parent):
    if path == HERE / "gpu" and missing():
        return LeftOut.from_parent(parent, path=path)
    return None


# What `make soak` (pytest --soak) asks of tests whose size is a variable; set by hand, a variable keeps its value.
SOAK = {
    "ZSE_TEST_CANARIES": 20_000,
    "ZSE_TEST_CHARGES": 1_000,
    "ZSE_TEST_DETERMINISM": 100,
    "ZSE_TEST_DISCONNECTS": 10_000,
    "ZSE_TEST_DOCUMENT_WORKERS": 50_000,
    "ZSE_TEST_EXAMPLES": 1_000,
    "ZSE_TEST_KERNELS": 1_000,
    "ZSE_TEST_KILLS": 200,
    "ZSE_TEST_LEVELS": 4,
    "ZSE_TEST_LORIS_S": 30,
    "ZSE_TEST_MUTANTS": 100_000,
    "ZSE_TEST_OVERLOAD_S": 60,
    "ZSE_TEST_RAW_MUTANTS": 100_000,
    "ZSE_TEST_SEEDS": 10_000,
    "ZSE_TEST_SOAK": 1_000_000,
    "ZSE_TEST_STREAM_TOKENS": 200,
    "ZSE_TEST_TEMPLATES": 20_000,
    "ZSE_TEST_TIMINGS": 1_000,
    "ZSE_TEST_WORLDS": 20_000,
}


def pytest_addoption(parser):
    parser.addoption(
        "--soak", action="store_true", help="the long form of tests: hours (the table SOAK of tests/conftest.py)"
    )
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files of emitted C")
    parser.addoption(
        "--exhaustive",
        choices=("none", "only", "all"),
        default="none",
        help="the tests marked `exhaustive`: left out (default), run alone, or with the others",
    )


def pytest_configure(config):
    if config.getoption("--soak"):
        for name, size in SOAK.items():
            os.environ.setdefault(name, str(size))
    worker = getattr(config, "workerinput", None)
    if worker and config.args_source is config.ArgsSource.TESTPATHS:
        number = int(worker["workerid"].removeprefix("gw"))
        config.args = [str(path) for path in rotated(HERE, number % worker["workercount"], worker["workercount"])]
    config.pluginmanager.register(Gate(config))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.parts)  # wherever a worker began; as they stand in it, in each file


def wants_to_be_alone(item) -> bool:
    marker = item.get_closest_marker("timed")
    return marker is not None and marker.kwargs.get("alone", True)


class Gate:
    """Which tests run, in which order, and which of them alone.

    Tests marked `exhaustive` are breadth, and so are combinations of what tests marked `each` have once: `make test` leaves them out,
    says how many, and `make test-all` runs them.
    Tests marked `timed` hold a time against a bound. Of several processes (pytest -n) each waits while another runs one, or several
    that follow each other: to be alone costs what is left of the others' tests, and a core. Those whose bound has room for what others
    make of processor time say timed(alone=False).
    They have three attempts: a shared machine may take the processor away for hundreds of milliseconds at any moment, and
    what the code makes slow is slow three times."""

    def __init__(self, config):
        self.config, self.left_out, self.is_alone = config, {}, False
        self.garbage = None if config.getoption("--soak") else Garbage()  # long forms watch memory
        run = getattr(config, "workerinput", {}).get("testrunuid")
        self.files = [Path(tempfile.gettempdir(), f"zse-{run}-{name}") for name in ("gate", "running")] if run else []
        self.locks = [os.open(path, os.O_CREAT | os.O_RDWR, 0o600) for path in self.files]

    def pytest_collection_modifyitems(self, items):
        for item in items:
            if item.get_closest_marker("timed"):
                item.add_marker(pytest.mark.flaky(reruns=2))
        for item in combinations(items):
            item.add_marker(pytest.mark.exhaustive("combinations of what ran here once"))
        mode = self.config.getoption("--exhaustive")
        if mode != "all":
            left = [item for item in items if (item.get_closest_marker("exhaustive") is None) == (mode == "only")]
            leaves = set(left)
            items[:] = [item for item in items if item not in leaves]
            self.config.hook.pytest_deselected(items=left)
            if mode == "none":
                whys = ((*item.get_closest_marker("exhaustive").args, "long forms")[0] for item in left)
                self.left_out = dict(Counter(whys).most_common())
        items[:] = dealt(items, getattr(self.config, "workerinput", {}).get("workercount", 1), wants_to_be_alone)
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["left_out"] = self.left_out

    def pytest_collection_finish(self):
        if self.garbage is not None:
            self.garbage.begin()

    def pytest_runtest_logfinish(self):
        if self.garbage is not None:
            self.garbage.end_test()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.left_out = getattr(node, "workeroutput", {}).get("left_out", self.left_out)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        if not self.locks:
            yield
            return
        gate, running = self.locks  # who wants to be alone holds the gate until the others are done with their test
        alone = wants_to_be_alone(item)
        if not self.is_alone:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            fcntl.flock(gate, fcntl.LOCK_UN)
        yield
        self.is_alone = alone and nextitem is not None and wants_to_be_alone(nextitem)
        if not self.is_alone:
            fcntl.flock(running, fcntl.LOCK_UN)

    def pytest_sessionfinish(self):
        for path, lock in zip(self.files, self.locks):
            path.unlink(missing_ok=True)
            os.close(lock)

    def pytest_terminal_summary(self, terminalreporter):
        if self.left_out:
            kinds = ", ".join(f"{count} {why}" for why, count in self.left_out.items())
            terminalreporter.write_line(
                f"{sum(self.left_out.values())} tests are left to `make test-rest` (`make test-all` runs both): {kinds}"
            )
