"""Pages in files of several ranks: an engine's replies after a restart are those of one process, whatever became of a rank's files."""

import errno
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rank_threads import ThreadedRanks
from test_ranks import pids
from tiny_engines import TinyEngines, prompt

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import tiny
import tiny_families

from zse import LLM
from zse.cache import segments
from zse.cache.files import PageFiles, remove_session
from zse.cache.layout import PageMover
from zse.engine.offload import DiskTier
from zse.errors import ConfigError, GroupError
from zse.runtime.cpu import CPUDevice
from zse.runtime.opening import open_device
from zse.sampling.params import SamplingParams
from zse.scheduler.options import RequestOptions

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
NUMBERS = dict(device="cpu", activations="f32", kv_dtype="f32", max_rows=4, page_size=16, speculation="none")
SESSION, OTHER = "cc" * 16, "dd" * 16
IDS, TURN = prompt(90, 21), prompt(30, 23)


@pytest.fixture
def ranks_of(model, tmp_path):
    """Makes groups over one folder, one after the other; ranks are threads."""

    def make(size=2, kind="tensor", path=model, **options):
        options = NUMBERS | dict(model=str(path), cache_disk=str(tmp_path / "kv"), num_pages=64) | options
        return ThreadedRanks(lambda rank: open_device("cpu", threads=1), **{f"{kind}_parallel_size": size}, **options)

    return make


@pytest.fixture(scope="module")
def one(model):
    with TinyEngines(model, threads=1, prefix_cache=False, **NUMBERS) as engines:
        engine = engines()
        yield lambda ids: ask(engine, ids)[0]


def ask(engine, ids, session="", id=1):
    """(tokens, cached_tokens)"""
    engine.submit(id, ids, PARAMS, RequestOptions(session=session, session_ttl=100.0))
    return finish(engine)[id]


def finish(engine):
    """{request: (tokens, cached_tokens)}"""
    found = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            tokens, cached = found.get(output.id, ([], 0))
            found[output.id] = tokens + output.tokens, cached + output.cached_tokens
        assert engine.scheduler.check_integrity() == []
    return found


def rest(engine):
    """Until nothing is left to be written."""
    while engine.use_idle_time() or engine.feature("disk").pending_bytes:
        time.sleep(0.0005)


def parts(folder):
    """Files of each rank, those of rank 0 first."""
    own = sorted(folder.glob("*/*.kv"))
    others = sorted({path.parent for path in folder.glob("*/*/*.kv")})
    return [own, *[sorted(path.glob("*.kv")) for path in others]]


@pytest.mark.each()
@pytest.mark.parametrize(
    "kind, size, fills, ahead",
    [
        ("tensor", 2, True, False),
        ("pipeline", 2, False, True),
        ("tensor", 3, False, False),
        ("tensor", 2, False, True),
        ("pipeline", 2, True, False),
    ],
)
def test_a_session_goes_on_after_a_restart(kind, size, fills, ahead, ranks_of, one, tmp_path, monkeypatch):
    """Into pages and by slots of the host, as CPUs and GPUs do; of a pipeline, ranks have other layers."""
    monkeypatch.setattr(CPUDevice, "runs_ahead", ahead)
    if not fills:
        monkeypatch.setattr(PageMover, "can_fill_pages", False)
    expected = one(IDS)
    whole = [*IDS, *expected]
    longer, forked = [*whole, *TURN], [*whole[:85], *TURN]
    with ranks_of(size, kind) as found:
        assert ask(found.engine, IDS, SESSION) == (expected, 0)
        rest(found.engine)
        counters = found.engine.counters()
        assert counters["prefix_disk_written_pages"] == 6
        sizes = [path.stat().st_size for each in parts(tmp_path / "kv") for path in each]
        assert len(sizes) == size and counters["prefix_disk_bytes"] == counters["session_bytes"] == sum(sizes)
    files = parts(tmp_path / "kv")
    assert len(files) == size and all([path.stem for path in each] == [SESSION] for each in files)
    with ranks_of(size, kind) as found:
        assert ask(found.engine, longer, SESSION) == (one(longer), 101)
        assert ask(found.engine, forked, OTHER) == (one(forked), 85)
        counters = found.engine.counters()
        assert counters["prefix_disk_damaged_files"] == 0 and counters["prefix_disk_read_pages"] == 7
    with ranks_of(size, kind) as found:
        again = [*longer, *one(longer)]
        assert ask(found.engine, again, SESSION)[1] == len(again) - 1
        found.engine.drop_session(SESSION)
        rest(found.engine)
        assert found.engine.counters()["session_files"] == 1
    with ranks_of(size, kind) as found:  # what the other session continues behind has stayed
        assert ask(found.engine, again) == (one(again), 85)
        assert ask(found.engine, forked, OTHER) == (one(forked), len(forked) - 1)
        found.engine.drop_session(OTHER)
        rest(found.engine)
    assert [OTHER in [path.stem for path in each] for each in parts(tmp_path / "kv")] == [False] * size


@pytest.mark.each()
@pytest.mark.parametrize("harm", ["flipped", "torn", "gone", "folder gone", "another rank's"])
@pytest.mark.parametrize("rank", [0, 1])
def test_files_that_are_not_sound_are_never_used(harm, rank, ranks_of, one, tmp_path):
    expected, longer = one(IDS), [*IDS, *one(IDS), *TURN]
    with ranks_of() as found:
        ask(found.engine, IDS, SESSION)
    files = parts(tmp_path / "kv")
    (path,), (other,) = files[rank], files[1 - rank]
    data, rng = bytearray(path.read_bytes()), random.Random(rank)
    if harm == "flipped":
        data[len(data) // 2] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    elif harm == "torn":
        path.write_bytes(data[: len(data) // 2])
    elif harm == "gone":
        path.unlink()
    elif harm == "folder gone":
        shutil.rmtree(path.parent)
    else:
        path.write_bytes(other.read_bytes())
    with ranks_of() as found:
        told, cached = ask(found.engine, longer, SESSION)
        assert told == one(longer)
        assert cached in ((32, 48) if harm in ("flipped", "torn") else (0,))
        damaged = found.engine.counters()["prefix_disk_damaged_files"]
        assert damaged == (harm not in ("gone", "folder gone")) or harm == "flipped" and rank
        rest(found.engine)
        assert found.engine.counters()["prefix_disk_damaged_files"] <= 1
    with ranks_of() as found:  # what was lost was written again, by all
        again = [*longer, *told]
        assert ask(found.engine, again, SESSION) == (one(again), len(again) - 1)
        assert found.engine.counters()["prefix_disk_damaged_files"] == 0
    assert one(IDS) == expected


def test_damage_at_any_place(ranks_of, one, tmp_path):
    longer = [*IDS, *one(IDS), *TURN]
    wanted, rng = one(longer), random.Random(9)
    for _ in range(4):
        shutil.rmtree(tmp_path / "kv", ignore_errors=True)
        with ranks_of() as found:
            ask(found.engine, IDS, SESSION)
        for each in parts(tmp_path / "kv"):
            data = bytearray(each[0].read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            each[0].write_bytes(data[: rng.choice((len(data), rng.randrange(1, len(data))))])
        with ranks_of() as found:
            told, cached = ask(found.engine, longer, SESSION)
            assert told == wanted and cached <= 101


def test_a_session_is_removed_while_no_engine_runs(ranks_of, one, tmp_path):
    """And of a rank whose file was left, as on another host, the next start removes it."""
    for _ in range(2):
        with ranks_of() as found:
            assert ask(found.engine, IDS, SESSION) == (one(IDS), 0)
            rest(found.engine)
            remove_session(tmp_path / "kv", SESSION)  # an engine has the folders
            assert [len(each) for each in parts(tmp_path / "kv")] == [1, 1]
        remove_session(tmp_path / "kv", SESSION)
        assert not list(tmp_path.rglob("*.kv"))
    with ranks_of() as found:
        ask(found.engine, IDS, SESSION)
    (path,), _ = parts(tmp_path / "kv")
    path.unlink()
    with ranks_of():
        assert not list(tmp_path.rglob("*.kv"))


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
@pytest.mark.parametrize("family, cached", [("gemma3", 0), ("minicpm3", 101)])
def test_windows_and_latents(family, cached, kind, ranks_of, tmp_path):
    """Pages of windows are in no file, as on one device; latents are on all ranks."""
    path = (tiny if family in tiny.CONFIGS else tiny_families).write(family, tmp_path)
    ids, turn = ([id % 40 + 3 for id in some] for some in (IDS, TURN))
    with TinyEngines(path, threads=1, prefix_cache=False, **NUMBERS) as engines:
        plain = engines()
        told = ask(plain, ids)[0]
        longer = [*ids, *told, *turn]
        wanted = ask(plain, longer)[0]
    with ranks_of(2, kind, path) as found:
        assert ask(found.engine, ids, SESSION) == (told, 0)
    with ranks_of(2, kind, path) as found:
        assert ask(found.engine, longer, SESSION) == (wanted, cached)


def test_another_number_of_ranks_has_files_of_its_own(ranks_of, one, tmp_path, model):
    longer = [*IDS, *one(IDS), *TURN]
    kinds = ((2, "tensor"), (3, "tensor"), (2, "pipeline"))
    for size, kind in kinds:
        with ranks_of(size, kind) as found:
            assert ask(found.engine, IDS, SESSION) == (one(IDS), 0)
    with TinyEngines(model, threads=1, cache_disk=str(tmp_path / "kv"), num_pages=64, **NUMBERS) as engines:
        assert ask(engines(), longer, SESSION) == (one(longer), 0)
    for size, kind in kinds:
        with ranks_of(size, kind) as found:
            assert ask(found.engine, longer, SESSION) == (one(longer), 101)


def test_two_groups_at_a_time_have_folders_of_their_own(ranks_of, one, tmp_path):
    with ranks_of() as first, ranks_of() as second:
        assert ask(first.engine, IDS, SESSION) == ask(second.engine, IDS, OTHER) == (one(IDS), 0)
    assert len(list((tmp_path / "kv").glob("*/*.kv"))) == len(list((tmp_path / "kv").glob("*/*/*.kv"))) == 2
    with ranks_of() as found:
        assert ask(found.engine, [*IDS, 5], SESSION)[1] == 90


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_is_full(rank, ranks_of, one, tmp_path, monkeypatch):
    """Of one rank: nothing more is written by any, and replies go on."""
    write, tries = segments.write, []

    def full(descriptor, *arguments):
        depth = len(Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to((tmp_path / "kv").resolve()).parts)
        if depth == 2 + rank:
            tries.append(depth)
            raise OSError(errno.ENOSPC, "full")
        write(descriptor, *arguments)

    monkeypatch.setattr(segments, "write", full)
    with ranks_of() as found:
        assert ask(found.engine, IDS, SESSION) == (one(IDS), 0)
        rest(found.engine)
        assert ask(found.engine, [*IDS, *TURN], SESSION)[0] == one([*IDS, *TURN])
        rest(found.engine)
        assert len(tries) == 1 and found.engine.counters()["prefix_disk_written_pages"] == 0
    monkeypatch.setattr(segments, "write", write)
    with ranks_of() as found:
        assert ask(found.engine, IDS, SESSION) == (one(IDS), 0)
    with ranks_of() as found:
        assert ask(found.engine, [*IDS, *TURN], SESSION) == (one([*IDS, *TURN]), 90)


def test_files_of_all_ranks_stay_within_their_size(ranks_of, one, tmp_path):
    """Some go; whatever is left on either rank, replies are right."""
    size = 500_000
    asked = [(prompt(90, 50 + number), f"{number:02x}" * 16) for number in range(8)]
    with ranks_of(cache_disk_size=size) as found:
        for ids, session in asked:
            assert ask(found.engine, ids, session)[0] == one(ids)
            rest(found.engine)
            assert found.engine.counters()["prefix_disk_bytes"] <= size
    there = sum(path.stat().st_size for each in parts(tmp_path / "kv") for path in each)
    assert 0.5 * size < there <= size
    first, second = ([path.name for path in each] for each in parts(tmp_path / "kv"))
    assert first == second  # the same go on all
    with ranks_of(cache_disk_size=size) as found:
        hits = []
        for ids, session in asked[::-1]:
            told, cached = ask(found.engine, [*ids, 7, 8], session)
            assert told == one([*ids, 7, 8])
            hits.append(cached)
        assert hits[:2] == [90, 90] and hits[-1] < 16  # the last ones are there


def test_others_run_on_while_a_rank_reads(ranks_of, one, monkeypatch):
    with ranks_of() as found:
        ask(found.engine, IDS)
    monkeypatch.setattr(DiskTier, "read_ahead", lambda self: None)
    gate, real, leader = threading.Event(), PageFiles.read, threading.main_thread()
    slow = {}

    def read(files, wanted):
        if slow.setdefault(files, len(files.folder.parent.name) > 2):  # rank 1's, whose folder lies within another
            assert gate.wait(30)
        return real(files, wanted)

    monkeypatch.setattr(PageFiles, "read", read)
    with ranks_of() as found:
        engine = found.engine
        for id in (1, 2, 3):  # one that reads, one that waits for the same, one whose client leaves
            engine.submit(id, IDS, PARAMS, RequestOptions())
        engine.submit(4, prompt(40, 70), PARAMS, RequestOptions())
        told = {id: [] for id in range(1, 5)}
        while len(told[4]) < 12:
            for output in engine.step():
                told[output.id] += output.tokens
        assert told[1] == told[2] == [] and engine.num_computed(1) == 0 and engine.cancel(3)
        gate.set()
        got = finish(engine)
        assert got[1][0] == got[2][0] == one(IDS) and 3 not in got
        assert engine.counters()["prefix_disk_hit_tokens"] == 89
    assert sorted(slow.values()) == [False, True] and leader.is_alive()


def test_the_last_session_is_read_ahead_by_all_ranks(ranks_of, one):
    longer = [*IDS, *one(IDS), *TURN]
    with ranks_of() as found:
        ask(found.engine, IDS, SESSION)
    with ranks_of() as found:
        engine = found.engine
        while engine.use_idle_time() or engine.counters()["prefix_disk_read_pages"] < 7:
            pass
        assert ask(engine, longer, SESSION) == (one(longer), 101)
        assert engine.counters()["prefix_disk_hits"] == 1
    with ranks_of() as found:  # given up where a request waits for its pages, and dropped with its session
        engine, disk = found.engine, found.engine.feature("disk")
        disk._reader.pause(True)
        assert ask(engine, prompt(60, 71), OTHER) == (one(prompt(60, 71)), 0)
        engine.drop_session(SESSION)
        rest(engine)
        assert ask(engine, longer, OTHER) == (one(longer), 0)


@pytest.mark.parametrize("size", [2, 3])
def test_states_of_recurrent_layers(size, ranks_of, tmp_path_factory):
    path = tiny_families.write("qwen3_5", tmp_path_factory.mktemp("qwen3_5"))
    options = dict(path=path, num_pages=128, max_context=256, state_interval=64)
    with TinyEngines(path, threads=1, prefix_cache=False, max_context=256, **NUMBERS) as engines:
        plain = engines()
        told = ask(plain, IDS)[0]
        longer = [*IDS, *told, *TURN]
        wanted = ask(plain, longer)[0]
    with ranks_of(size, **options) as found:
        assert ask(found.engine, IDS, SESSION) == (told, 0)
    with ranks_of(size, **options) as found:
        assert ask(found.engine, longer, SESSION) == (wanted, 101)
        assert found.engine.counters()["state_disk_read"] == 1


def processes(model, folder, **options):
    options = NUMBERS | dict(threads=2, tensor_parallel_size=2, cache_disk=str(folder), num_pages=64) | options
    return LLM(str(model), **options)


def test_a_rank_that_is_killed_while_it_writes(model, one, tmp_path):
    """At several moments; what all had written by then is found, the rest computed."""
    longer = [*IDS, *one(IDS), *TURN]
    for pages in (1, 3):
        folder = tmp_path / str(pages)
        with processes(model, folder) as llm:
            engine = llm._engine
            assert ask(engine, IDS, SESSION)[0] == one(IDS)
            while engine.counters()["prefix_disk_written_pages"] < pages:
                engine.use_idle_time()
            os.kill(pids(llm)[0], signal.SIGKILL)
            with pytest.raises(GroupError, match="killed by signal 9"):
                for _ in range(2000):
                    engine.use_idle_time()
                    time.sleep(0.001)
        with processes(model, folder) as llm:
            told, cached = ask(llm._engine, longer, SESSION)
            assert told == one(longer) and 16 * pages <= cached < 101


KILLED = """
import os, signal, sys
sys.path[:0] = sys.argv[1:3]
from test_rank_files import IDS, SESSION, ask, processes
llm = processes(sys.argv[3], sys.argv[4])
ask(llm._engine, IDS, SESSION)
while llm._engine.counters()["prefix_disk_written_pages"] < 3:
    llm._engine.use_idle_time()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_rank_0_is_killed_while_it_writes(model, one, tmp_path):
    """The others end by themselves, and the next group finds what all had written."""
    here = Path(__file__).parent
    words = [sys.executable, "-c", KILLED, str(here), str(here.parent), str(model), str(tmp_path / "kv")]
    assert subprocess.run(words, timeout=120).returncode == -signal.SIGKILL
    longer = [*IDS, *one(IDS), *TURN]
    with processes(model, tmp_path / "kv") as llm:
        told, cached = ask(llm._engine, longer, SESSION)
        assert told == one(longer) and 48 <= cached < 101


def test_a_rank_waits_for_the_end_of_the_one_before(ranks_of, one, tmp_path):
    with ranks_of() as found:
        ask(found.engine, IDS, SESSION)
    (secret,) = (tmp_path / "kv").glob("*/*/secret")
    with open(secret, "rb") as before:
        fcntl.flock(before, fcntl.LOCK_EX)
        timer = threading.Timer(0.5, lambda: fcntl.flock(before, fcntl.LOCK_UN))
        timer.start()
        with ranks_of() as found:
            timer.join()
            assert ask(found.engine, [*IDS, 5], SESSION)[1] == 90


def test_a_rank_that_is_silent_is_not_waited_for_for_ever(model, tmp_path):
    with processes(model, tmp_path / "kv") as llm:
        ask(llm._engine, IDS)
    with processes(model, tmp_path / "kv") as llm:
        (pid,) = pids(llm)
        llm._engine.feature("ranks")._ranks.group.timeout_s = 2.0
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(GroupError, match="waited 2 s for other ranks to read pages from files"):
            ask(llm._engine, IDS)


def test_a_folder_of_a_rank_that_others_may_enter_is_refused(model, tmp_path):
    with processes(model, tmp_path / "kv") as llm:
        ask(llm._engine, IDS, SESSION)
    ((inner,),) = [{path.parent for path in (tmp_path / "kv").glob("*/*/*.kv")}]
    inner.chmod(0o755)
    with pytest.raises((GroupError, ConfigError), match="rank 1: --cache-disk .* may be entered by others"):
        processes(model, tmp_path / "kv").close()
