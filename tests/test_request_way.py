"""The way of a chat request: how many functions of this package in how many files run for it, from the HTTP body to the last
server-sent event in the server, and from the submission to the last token in the engine. A reader has to know them all; the
numbers only go down. `python tests/test_request_way.py` lists them."""

import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = str(HERE.parent / "src" / "zse") + "/"
sys.path[:0] = [str(HERE / folder) for folder in ("server", "engine", "structured")]
import tiny_model  # noqa: E402
from harness import Harness  # noqa: E402

del sys.path[:3]

# Lower them with every change. The aim is 100 in 35 for both parts together.
MOST_FUNCTIONS, MOST_FILES = {"server": 97, "engine": 94}, 36


class Way:
    """The functions of this package that are called while it is entered, in the threads that start after __init__."""

    def __init__(self) -> None:
        self.found: set[tuple[str, str]] = set()
        self._on = False
        threading.setprofile(self._called)

    def _called(self, frame, event, argument) -> None:
        code = frame.f_code
        if self._on and event == "call" and code.co_filename.startswith(SOURCE) and code.co_name[0] != "<":
            self.found.add((code.co_filename.removeprefix(SOURCE), code.co_qualname))

    def of(self, work, times: int = 3) -> set[tuple[str, str]]:
        """What every one of some runs calls: what happens beside them, such as heartbeats, falls out."""
        work()  # what only a first request needs, such as imports
        runs = []
        for _ in range(times):
            self.found, self._on = set(), True
            work()
            self._on = False
            runs.append(self.found)
        return set.intersection(*runs)

    def close(self) -> None:
        threading.setprofile(None)


def server_way() -> set[tuple[str, str]]:
    way = Way()
    try:
        server = Harness()
        try:
            return way.of(lambda: (server.chat("hello", stream=True, max_tokens=8).events[-1], time.sleep(0.1)))
        finally:
            server.close()
    finally:
        way.close()


def engine_way(folder: Path) -> set[tuple[str, str]]:
    from zse.engine.config import EngineConfig
    from zse.engine.load import load_engine
    from zse.engine.metrics import Phases
    from zse.sampling.params import SamplingParams

    way, found, ids = Way(), set(), iter(range(100))
    config = EngineConfig(model=str(tiny_model.write(folder)), device="cpu", threads=1, max_context=128)
    loaded = load_engine(config, Phases(lambda: 0.0))

    def request() -> None:
        loaded.engine.submit(next(ids), [5, 6, 7, 8], SamplingParams(max_tokens=4, ignore_eos=True, seed=1))
        while loaded.engine.has_work:
            loaded.engine.step()

    try:
        thread = threading.Thread(target=lambda: found.update(way.of(request)))
        thread.start()
        thread.join()
    finally:
        way.close()
        loaded.engine.close()
        loaded.source.close()
    return found


def test_a_chat_request_has_a_short_way(tmp_path):
    ways = {"server": server_way(), "engine": engine_way(tmp_path)}
    for part, found in ways.items():
        assert 10 < len(found) <= MOST_FUNCTIONS[part], listed(found)
    files = {file for found in ways.values() for file, _ in found}
    assert len(files) <= MOST_FILES, sorted(files)


def listed(found: set[tuple[str, str]]) -> str:
    lines = [f"{len(found)} functions in {len({file for file, _ in found})} files"]
    for file in sorted({file for file, _ in found}):
        lines.append(f"  {file}: {', '.join(sorted(name for other, name in found if other == file))}")
    return "\n".join(lines)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        print("server:", listed(server_way()))
        print("engine:", listed(engine_way(Path(folder))))
