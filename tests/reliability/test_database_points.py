"""The databases, of the server and of documents, when the process dies, or the disk fails, at any of its writes; and when the tail of its log is torn."""

import json
import os
import random
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from zse.server.database import keys
from zse.server.database.connection import Database

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux's LD_PRELOAD and a C compiler"
)


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory):
    library = tmp_path_factory.mktemp("points") / "io_points.so"
    flags = ["-shared", "-fPIC", "-O1", "-U_FORTIFY_SOURCE", "-U_FILE_OFFSET_BITS"]
    subprocess.run(["cc", *flags, "-o", str(library), str(HERE / "io_points.c"), "-ldl"], check=True)
    return library


LONG = pytest.mark.exhaustive
WORKS = ("create", "first start", "revoke", "rotate", "store", "usage")
RUNS = [(work, "die") for work in WORKS] + [("create", "ENOSPC"), ("usage", "EIO")]
# A point of a document takes seconds: it is done with what a call can fail by in general.
LATER = [("document", how) for how in ("die", "ENOSPC")]
LATER += [("batch", how) for how in ("die", "ENOSPC", "EIO", "EACCES", "EMFILE")]
OTHERS = LATER + [
    (work, how) for work in WORKS for how in ("ENOSPC", "EIO", "EACCES", "EMFILE") if (work, how) not in RUNS
]


@pytest.mark.each("how")
@pytest.mark.parametrize(("work", "how"), [*RUNS, *(pytest.param(*run, marks=LONG) for run in OTHERS)])
def test_every_write_of_the_database(preloaded, tmp_path, work, how):
    environment = os.environ | {"LD_PRELOAD": str(preloaded), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(HERE / "database_points.py"), work, how, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["points"] >= 8 and (how != "die" or told["died"] == told["points"]), told


def test_a_torn_tail_takes_nothing_that_was_acknowledged(tmp_path):
    """What a power cut leaves of the log behind its last fsync: any part of it, zeros, or other bits. kill -9 does not show it."""
    draw, path = random.Random(7), tmp_path / "server.db"
    states = []  # (the database's file, its log) after each acknowledged key
    with Database(str(path)) as database:
        assert database.now(lambda c: c.execute("PRAGMA synchronous").fetchone(), writes=False) == (2,)  # FULL
        for number in range(12):
            database.now(partial(keys.create, name=f"k{number}", actor="x"))
            states.append((path.read_bytes(), Path(f"{path}-wal").read_bytes()))
    for case in range(240):
        known = draw.randrange(len(states) - 1)
        (main, log), (_, later) = states[known], states[known + 1]
        assert later.startswith(log[:32]) and len(later) > len(log)
        tail = bytearray(later[len(log) :][: draw.randrange(len(later) - len(log) + 1)])
        for _ in range(draw.randrange(4)):
            if tail:
                start = draw.randrange(len(tail))
                tail[start : start + draw.randrange(1, 600)] = draw.choice(
                    (b"", bytes(draw.randrange(600)), draw.randbytes(64))
                )
        torn = tmp_path / f"case{case}.db"
        for file, content in ((torn, main), (Path(f"{torn}-wal"), log + tail)):
            file.touch(0o600)
            file.write_bytes(content)
        with Database(str(torn)) as database:
            assert database.now(lambda c: c.execute("PRAGMA integrity_check").fetchone(), writes=False) == ("ok",)
            names = [key.name for key in database.now(keys.listed, writes=False)]
        assert names in ([f"k{index}" for index in range(known + 1)], [f"k{index}" for index in range(known + 2)]), case
