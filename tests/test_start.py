"""What a start imports: `zse serve` is started on a tiny model and asked for a token, and both its processes tell what they
have imported by then. Half of a start are imports: a module that a first answer does not need comes with its feature."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

import pytest

from zse.server.database import keys
from zse.server.database.connection import Database

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / folder) for folder in ("engine", "structured")]
import tiny_model  # noqa: E402
import tiny_text  # noqa: E402

del sys.path[:2]

# Asked by a signal, because nothing in the processes themselves should serve for this.
TELL = """
import os, signal, sys, time
def tell(number, frame):
    with open({place!r} + str(os.getpid()) + ".new", "w") as file:
        file.write(" ".join([str(time.process_time()), *sys.modules]))
    os.rename(file.name, file.name.removesuffix(".new"))
signal.signal(signal.SIGUSR1, tell)
"""

# Features by the modules that they begin with.
NEITHER = {
    "numpy",
    "tokenizers",
    "jinja2",
    "huggingface_hub",
    "llguidance",
    "multiprocessing",
    "tempfile",
    "random",
    "shutil",
    "dataclasses",
    "typing_extensions",
    "zse.engine.llm",
    "zse.bench",
    "zse.structured.service",
}
NOT_IN_ENGINE = NEITHER | {
    "asyncio",
    "logging",
    "inspect",
    "dis",
    "ast",
    "tokenize",
    "subprocess",
    "ssl",
    "concurrent",
    "zse.engine.client",
    "zse.engine.jobs",
    "zse.engine.forwards",
    "zse.engine.beams",
    "zse.sampling.beam",
    "zse.engine.grammars",
    "zse.engine.masking",
    "zse.engine.lazy_masks",
    "zse.kernels.mask",
    "zse.engine.offload",
    "zse.engine.draft",
    "zse.cache.files",
    "zse.cache.contiguous",
    "zse.cache.grouped",
    "zse.speculative.draft_model",
    "zse.quant.pack",
    "zse.kernels.gpu",
    "zse.kernels.attention_cases",
    "zse.kernels.sample_cases",
    "zse.kernels.host",
    "zse.kernels.table",
    "zse.kernel.ir",
    "zse.kernel.cache",
    "zse.runtime.cuda",
    "zse.runtime.gpu",
}
NOT_IN_SERVER = NEITHER | {
    "ssl",
    "asyncio.windows_events",
    "zse.engine.core",
    "zse.engine.runner",
    "zse.engine.load",
    "zse.models.load",
    "zse.models.registry",
    "zse.kernel",
    "zse.kernels",
    "zse.runtime",
    "zse.scheduler.scheduler",
    "zse.cache.prefix",
    "zse.sampling.beam",
    "zse.server.routes.embeddings",
    "zse.server.routes.relevance",
    "zse.server.routes.metrics",
    "zse.server.tracing",
    "opentelemetry",
    "zse.server.relevance",
    "sqlite3",
    "zse.server.database.connection",
    "zse.server.measuring",
    "zse.server.requests.measures",
    "zse.server.engine_counters",
    "zse.server.tools.grammars",
    "zse.server.tools.patterns",
    "zse.structured.compile",
    "zse.rag",
    "zse.server.retrieval",
    "zse.server.citations",
}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A function that starts a server, asks for two tokens, and returns for "server" and "engine" what each had used when its
    answer was complete: (seconds of processor time, modules)."""
    folder = tmp_path_factory.mktemp("start")
    model = tiny_model.write(folder / "tiny")
    tiny_text.write(model)
    (folder / "sitecustomize.py").write_text(TELL.format(place=f"{folder}/modules-"))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)]),
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),  # as installed: what has no bytecode is compiled at each start
        "ZSE_LOG": "error",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def run(*options: str, key: str = "") -> dict[str, tuple[float, set[str]]]:
        command = [sys.executable, "-m", "zse", "serve", str(model), "--port", "0", "--device", "cpu", "--threads", "2"]
        command += options
        server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            found = (re.search(r"curl -N http://[^/]*:(\d+)/", line) for line in server.stdout)
            port = next(int(match[1]) for match in found if match)
            connection = HTTPConnection("127.0.0.1", port, timeout=60)
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            body = {"prompt": "Hello", "max_tokens": 2, "stream": True, "ignore_eos": True}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            assert answer.status == 200 and b"data: [DONE]" in answer.read()
            connection.close()
            children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
            return {"server": _told_by(server.pid, folder), "engine": _told_by(int(children[0]), folder)}
        finally:
            server.terminate()
            server.communicate(timeout=60)

    return run


@pytest.fixture(scope="module")
def imported(start) -> dict[str, set[str]]:
    """ "server", "engine" → the modules that it has imported when its first answer is complete."""
    return {process: modules for process, (_, modules) in start().items()}


def _told_by(pid: int, folder: Path) -> tuple[float, set[str]]:
    os.kill(pid, signal.SIGUSR1)
    file = folder / f"modules-{pid}"
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    seconds, *modules = file.read_text().split()
    return float(seconds), set(modules)


linux = pytest.mark.skipif(sys.platform != "linux", reason="a process's children are told by Linux's /proc")


@linux
def test_an_engine_imports_no_feature_before_it_is_asked_for(imported):
    assert "zse.engine.core" in imported["engine"] and "zse.runtime.cpu" in imported["engine"]
    assert not imported["engine"] & NOT_IN_ENGINE


@linux
def test_a_server_imports_no_route_before_it_is_asked_for(imported):
    assert "zse.server.routes.completions" in imported["server"] and "asyncio" in imported["server"]
    assert not imported["server"] & NOT_IN_SERVER


def test_every_route_has_its_handler():
    from zse.server.routes import table

    assert all(callable(table.resolve("routes", route.function)) for route in table.ROUTES)
    with pytest.raises(AttributeError):
        table.resolve("routes", "info.nothing")


@linux
@pytest.mark.parametrize(("process", "bound"), [("engine", 245), ("server", 284)])
def test_few_modules_are_imported(process, bound, imported):
    """On Python 3.11, of which other versions differ by some. Fewer than 20 below the bound: lower it."""
    assert len(imported[process]) <= bound + (sys.version_info[:2] != (3, 11)) * 30, sorted(imported[process])


def cpu_ms(*arguments: str) -> float:
    """Processor time of one Python process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


@pytest.fixture
def with_database(tmp_path) -> dict[str, list]:
    """The options and the key of a start with a hundred keys."""
    with Database(path := str(tmp_path / "server.db")) as database:
        made = [database.now(partial(keys.create, name=f"k{index}", actor="test", rpm=1000)) for index in range(100)]
    return {"options": ["--database", path], "key": made[-1][1]}


# Imports of Python's own, and what they take on two cores of a 2.5 GHz Xeon: where they take more, because others use its caches and its
# cores' other halves (176 ms at a load of 14), a start may, too.
YARDSTICK = "import asyncio, decimal, email.message, http.client, json, logging.handlers, unittest"
YARDSTICK_MS = 120


@linux
@pytest.mark.timed
@pytest.mark.parametrize("has_database", [False, True])
def test_a_start_takes_little_processor_time(start, imported, with_database, has_database):
    """With keys in a database, too. Until its first answer is complete, Python itself included; the best of up to six starts: a busy machine takes twice
    as long. On two cores of a 2.5 GHz Xeon the server takes 105 to 140 ms and the engine 80 to 100."""
    bounds, best, yardstick = {"server": 0.180, "engine": 0.140}, dict.fromkeys(("server", "engine"), 9.9), 9e9
    given = with_database if has_database else {"options": [], "key": ""}
    for _ in range(6):
        yardstick = min(yardstick, cpu_ms("-c", YARDSTICK))
        for process, (seconds, _) in start(*given["options"], key=given["key"]).items():
            best[process] = min(best[process], seconds)
        slower = max(1.0, yardstick / YARDSTICK_MS)
        if all(best[process] <= bound * slower for process, bound in bounds.items()):
            break
    print(best, yardstick)
    assert all(best[process] <= bound * slower for process, bound in bounds.items()), (best, yardstick)


@linux
@pytest.mark.timed
def test_the_command_line_starts_quickly():
    """`zse --help` takes at most 60 ms of processor time more than Python itself."""
    bare = min(cpu_ms("-c", "pass") for _ in range(5))
    ours = min(cpu_ms("-m", "zse", "--help") for _ in range(5))
    print(bare, ours)
    assert ours - bare <= 60


GPU_START = """
import sys
from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases


class Opening:
    '''A driver that is ready when all that is imported beside it is imported.'''

    done = False

    def result(self):
        from zse.runtime.null import NullGPU

        class Device(NullGPU):
            memory_total, memory_free = 24 << 30, 20 << 30

        device = Device()
        self.before = set(sys.modules)
        return device


opening = Opening()
loaded = load_engine(EngineConfig(model=sys.argv[1], device="cuda"), Phases(lambda: 0.0), opening=opening)
while loaded.engine.runner.record_ahead():
    pass
print(*sorted(set(sys.modules) - opening.before))
print(*sorted({"zse.engine.jobs", "zse.engine.beams", "zse.engine.grammars", "zse.engine.masking", "zse.engine.lazy_masks", "zse.kernels.mask", "tempfile",
               "zse.kernels.gpu.sample_row", "zse.kernels.gpu.matmul_simple", "zse.kernels.attention_cases"} & set(sys.modules)))
"""


def test_a_gpu_engine_imports_what_it_needs_while_the_driver_starts(tmp_path):
    model = tiny_model.write(tmp_path / "tiny", head_dim=64)
    done = subprocess.run(
        [sys.executable, "-c", GPU_START, str(model)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.stdout == "\n\n", done.stdout + done.stderr


EARLY = """
import os, sys
import zse.runtime.opening


def opened(name, threads=None):
    print(name, sorted({"msgspec", "zse.engine.config", "zse.engine.load"} & set(sys.modules)), flush=True)
    os._exit(0)


zse.runtime.opening.PendingDevice = opened
from zse.engine.worker import main
main(["--fd", "0", "--model", "m", "--device", "cuda:1"])
"""


def test_the_driver_starts_before_anything_is_imported():
    done = subprocess.run(
        [sys.executable, "-c", EARLY],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.stdout == "cuda:1 []\n", done.stdout + done.stderr
