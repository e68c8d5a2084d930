"""--cache-disk with --data-parallel-attention: each rank has files of its own pages, and a request goes where its beginning is read."""

import errno
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from rank_threads import ThreadedRanks
from test_rank_files import finish, parts, rest
from test_ranks import pids
from tiny_engines import TinyEngines, prompt

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import tiny_families

from zse import LLM
from zse.cache import segments
from zse.cache.divided import DividedCache
from zse.cache.files import PageFiles, remove_session
from zse.cache.layout import PageMover
from zse.engine.offload import LEAST_GAIN, DiskTier
from zse.engine.rank_files import RankStore
from zse.errors import GroupError
from zse.runtime.cpu import CPUDevice
from zse.runtime.opening import open_device
from zse.sampling.params import BeamParams, SamplingParams
from zse.scheduler.options import RequestOptions

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
NUMBERS = dict(activations="f32", kv_dtype="f32", max_rows=4, max_context=256, page_size=16, speculation="none")
TURN = prompt(30, 23)
# Of one length, so that each of two ranks has two of them.
SESSIONS = {f"{number:02x}" * 16: prompt(90, 30 + number) for number in range(4)}


@pytest.fixture(scope="module", params=["deepseek_v3", "minicpm3"])
def latent(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        config = tiny_families.CONFIGS[request.param]
        changes = dict(vocab_size=384, intermediate_size=192)
        changes |= dict(moe_intermediate_size=96) if "moe_intermediate_size" in config else {}
        patch.setitem(tiny_families.CONFIGS, request.param, config | changes)
        yield tiny_families.write(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def one(latent):
    """Tokens of one process without a cache."""
    with TinyEngines(latent, threads=1, prefix_cache=False, **NUMBERS) as engines:
        engine, told = engines(), {}

        def ask(ids):
            if tuple(ids) not in told:
                engine.submit(1, ids, PARAMS, RequestOptions())
                told[tuple(ids)] = finish(engine)[1][0]
            return told[tuple(ids)]

        yield ask


@pytest.fixture
def ranks_of(latent, tmp_path):
    """Makes groups over one folder, one after the other; ranks are threads."""

    def make(size=2, **options):
        options = dict(model=str(latent), device="cpu", cache_disk=str(tmp_path / "kv"), num_pages=64) | options
        return ThreadedRanks(
            lambda rank: open_device("cpu", threads=1),
            data_parallel_attention=True,
            tensor_parallel_size=size,
            **NUMBERS | options,
        )

    return make


def ask(engine, asked, sessions=True):
    """asked: {session: ids}, all at once. {session: (tokens, cached_tokens)}, and {session: the rank that it ran on}."""
    ranks, names = {}, dict(enumerate(asked, 1))
    for id, name in names.items():
        options = RequestOptions(session=name if sessions else "", session_ttl=100.0)
        engine.submit(id, asked[name], PARAMS, options)
    admit = DividedCache.admit

    def seen(cache, sequence, *more):
        found = admit(cache, sequence, *more)
        if found is not None:
            ranks[names[sequence]] = cache.rank_of[sequence]
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DividedCache, "admit", seen)
        found = finish(engine)
    return {name: found[id] for id, name in names.items()}, ranks


def longer_of(one):
    return {name: [*ids, *one(ids), *TURN] for name, ids in SESSIONS.items()}


@pytest.mark.each()
@pytest.mark.parametrize("size, fills, ahead", [(2, True, False), (2, False, True), (3, False, False), (2, True, True)])
def test_sessions_go_on_after_a_restart(size, fills, ahead, ranks_of, one, tmp_path, monkeypatch):
    """On every rank, into pages and by slots of the host, as CPUs and GPUs do."""
    monkeypatch.setattr(CPUDevice, "runs_ahead", ahead)
    if not fills:
        monkeypatch.setattr(PageMover, "can_fill_pages", False)
    with ranks_of(size) as found:
        told, placed = ask(found.engine, SESSIONS)
        assert told == {name: (one(ids), 0) for name, ids in SESSIONS.items()}
        assert set(placed.values()) == set(range(size))
        rest(found.engine)
        counters = found.engine.counters()
        assert counters["prefix_disk_written_pages"] == counters["prefix_disk_pages"] == 6 * 4
        sizes = [path.stat().st_size for each in parts(tmp_path / "kv") for path in each]
        assert len(sizes) == 4 == counters["prefix_disk_files"] == counters["session_files"]
        assert counters["prefix_disk_bytes"] == counters["session_bytes"] == sum(sizes)
    there = [sorted(path.stem for path in each) for each in parts(tmp_path / "kv")]
    wanted = [sorted(name for name in SESSIONS if placed[name] == rank) for rank in range(size)]
    assert there[0] == wanted[0] and sorted(there) == sorted(wanted)
    asked = longer_of(one)
    with ranks_of(size) as found:
        told, again = ask(found.engine, asked)
        assert told == {name: (one(ids), 101) for name, ids in asked.items()}
        assert again == placed
        counters = found.engine.counters()
        assert counters["prefix_disk_hit_tokens"] == 4 * 101 and counters["prefix_disk_hits"] == 4
        assert counters["prefix_disk_read_pages"] == 4 * 7 and counters["prefix_disk_damaged_files"] == 0
        found.engine.drop_session(gone := next(iter(SESSIONS)))
        rest(found.engine)
        found.engine.feature("disk").tiers[-1]._far.order("tidy", at=time.time())
    assert gone not in {path.stem for each in parts(tmp_path / "kv") for path in each}
    with ranks_of(size) as found:
        told, _ = ask(found.engine, asked, sessions=False)
        assert told == {name: (one(ids), 0 if name == gone else 119 + 12) for name, ids in asked.items()}


@pytest.mark.parametrize("rests", [True, False])
def test_pages_that_were_pushed_out_come_back_from_files(rests, ranks_of, one):
    """Of an engine that runs on: both ranks are full of others' pages meanwhile, and write on their way to host memory what no idle
    time was for."""
    asked = longer_of(one)
    with ranks_of(num_pages=20) as found:
        engine, disk = found.engine, found.engine.feature("disk")
        _, placed = ask(engine, SESSIONS)
        if rests:
            rest(engine)
        for seed in range(6):
            told, _ = ask(engine, {"": prompt(120, 60 + seed)}, sessions=False)
            assert told[""][0] == one(prompt(120, 60 + seed)) and told[""][1] < 16
        while disk.pending_bytes:
            assert not disk.before_schedule(0.0)
        assert all(tier._writer.num_written for tier in disk.tiers)
        for number, (name, ids) in enumerate(asked.items()):
            told, _ = ask(engine, {name: ids})
            assert told[name][0] == one(ids) and told[name][1] >= (96 if rests else 48)
            assert engine.counters()["prefix_disk_hits"] > number // 2
        assert set(placed.values()) == {0, 1} and engine.scheduler.check_integrity() == []


@pytest.mark.each()
@pytest.mark.parametrize("harm", ["flipped", "torn", "gone", "another rank's", "gone meanwhile"])
@pytest.mark.parametrize("rank", [0, 1])
def test_files_that_are_not_sound_are_misses(harm, rank, ranks_of, one, tmp_path, monkeypatch):
    monkeypatch.setattr(DiskTier, "read_ahead", lambda tier: None)
    with ranks_of() as found:
        _, placed = ask(found.engine, SESSIONS)
    files, asked = parts(tmp_path / "kv"), longer_of(one)
    path, other = files[rank][0], files[1 - rank][0]
    data = bytearray(path.read_bytes())

    def spoil():
        if harm == "flipped":
            data[len(data) // 2] ^= 4
            path.write_bytes(data)
        elif harm == "torn":
            path.write_bytes(data[: len(data) // 2])
        elif harm == "another rank's":
            path.write_bytes(other.read_bytes())
        else:
            path.unlink()

    if harm != "gone meanwhile":
        spoil()
    with ranks_of() as found:
        if harm == "gone meanwhile":
            spoil()
        cached = {}
        for name, ids in asked.items():
            told, cached[name] = ask(found.engine, {name: ids})[0][name]
            assert told == one(ids)
        lost = cached.pop(path.stem)
        assert lost in (32, 48) if harm in ("flipped", "torn") else lost < LEAST_GAIN
        assert set(cached.values()) == {101}
        rest(found.engine)
        assert found.engine.counters()["prefix_disk_damaged_files"] == (not harm.startswith("gone"))
    with ranks_of() as found:  # what was lost was written again
        for name, ids in asked.items():
            again = [*ids, *one(ids)]
            assert ask(found.engine, {name: again})[0][name] == (one(again), len(again) - 1)
        assert found.engine.counters()["prefix_disk_damaged_files"] == 0


@pytest.fixture
def stores(monkeypatch):
    """What the other ranks have."""
    made, init = [], RankStore.__init__
    monkeypatch.setattr(RankStore, "__init__", lambda self, *given: (made.append(self), init(self, *given))[1])
    return made


def test_rank_0_knows_what_the_others_have(ranks_of, one, stores, tmp_path):
    """Where files make room for others, and sessions go: also of the next start."""
    asked = {f"{number:02x}" * 16: prompt(90, 50 + number) for number in range(12)}
    with ranks_of() as found:
        size = 2 * 20 * found.engine.runner.pages.page_nbytes  # two sessions and a half of each rank
    stores.clear()
    for _ in range(2):
        with ranks_of(cache_disk_size=size) as found:
            engine, (_, far) = found.engine, found.engine.feature("disk").tiers
            for name, ids in asked.items():
                assert ask(engine, {name: ids})[0][name][0] == one(ids)
                rest(engine)
                assert engine.counters()["prefix_disk_bytes"] <= size
            store = stores[-1]

            def same(gone, store=store, far=far):
                sessions = store._files.sessions().keys()
                return (
                    set(far._files) == set(store._files)
                    and far._files.sessions().keys() == sessions
                    and not sessions & gone
                )

            assert len(store._files) and same(set())
            gone = set(list(asked)[-4:])
            for name in gone:
                engine.drop_session(name)
            rest(engine)
            deadline = time.monotonic() + 10.0
            while not (is_same := same(gone)) and time.monotonic() < deadline:
                far._far._ranks.listen(0.01)
                far._far.look()
            assert is_same
    there = sum(path.stat().st_size for each in parts(tmp_path / "kv") for path in each)
    assert 0 < there <= size and len(stores) == 2


def test_a_session_that_moves_to_another_rank(ranks_of, one, monkeypatch):
    """Where the rank that has it is busy, the other computes it and keeps it too: each has a whole beginning."""
    name, ids = next(iter(SESSIONS.items()))
    with ranks_of() as found:
        _, placed = ask(found.engine, {name: ids})
    longer = [*ids, *one(ids), *TURN]
    with ranks_of() as found:
        monkeypatch.setattr(DividedCache, "load", lambda cache, rank, cached: (rank == placed[name], 0))
        told, moved = ask(found.engine, {name: longer})
        assert told[name] == (one(longer), 0) and moved[name] != placed[name]
    monkeypatch.undo()
    again = [*longer, *one(longer)]
    for busy in (0, 1):
        with ranks_of() as found, pytest.MonkeyPatch.context() as patch:
            patch.setattr(DividedCache, "load", lambda cache, rank, cached, busy=busy: (rank == busy, 0))
            told, on = ask(found.engine, {name: again})
            assert on[name] != busy and told[name][0] == one(again)
            assert told[name][1] == (101 if on == placed else len(again) - 1)


def test_others_run_on_while_a_rank_reads(ranks_of, one, monkeypatch):
    """A request is admitted where it was read, also where that rank has become the busier one; clients may leave."""
    monkeypatch.setattr(DiskTier, "read_ahead", lambda tier: None)
    with ranks_of() as found:
        _, placed = ask(found.engine, SESSIONS)
    first, second = ([name for name in SESSIONS if placed[name] == rank] for rank in (0, 1))
    asked, gate, real = longer_of(one), threading.Event(), PageFiles.read

    def read(files, wanted):
        assert len(files.folder.parent.name) == 2 or gate.wait(30)  # rank 1's folder lies within another
        return real(files, wanted)

    monkeypatch.setattr(PageFiles, "read", read)
    with ranks_of() as found:
        engine, told = found.engine, {}
        for id, name in enumerate((*first, *second), 1):
            engine.submit(id, asked[name], PARAMS, RequestOptions(session=name, session_ttl=100.0))
        while sum(map(len, told.values())) < 24:
            for output in engine.step():
                told[output.id] = told.get(output.id, []) + output.tokens
        assert told.keys() == {1, 2} and engine.num_computed(3) == 0 and engine.cancel(4) and not engine.cancel(4)
        cache = engine.scheduler.cache
        monkeypatch.setattr(type(cache), "load", lambda cache, rank, cached: (rank, 0))
        ranks, admit = {}, type(cache).admit
        monkeypatch.setattr(
            type(cache), "admit", lambda self, *given: (admit(self, *given), ranks.update(self.rank_of))[0]
        )
        gate.set()
        got = finish(engine)
        assert got == {3: (one(asked[second[0]]), 101)} and ranks[3] == 1 and not cache.preferred


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_is_full(rank, ranks_of, one, tmp_path, monkeypatch):
    """Of one rank: it writes no more, the other does."""
    write = segments.write

    def full(descriptor, *given):
        depth = len(Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to((tmp_path / "kv").resolve()).parts)
        if depth == 2 + rank:
            raise OSError(errno.ENOSPC, "full")
        write(descriptor, *given)

    monkeypatch.setattr(segments, "write", full)
    with ranks_of() as found:
        told, placed = ask(found.engine, SESSIONS)
        assert told == {name: (one(ids), 0) for name, ids in SESSIONS.items()}
        rest(found.engine)
    monkeypatch.setattr(segments, "write", write)
    with ranks_of() as found:
        for name, ids in longer_of(one).items():
            told, cached = ask(found.engine, {name: ids})[0][name]
            assert told == one(ids) and (cached < LEAST_GAIN if placed[name] == rank else cached == 101)


def test_a_session_is_removed_while_no_engine_runs(ranks_of, tmp_path):
    with ranks_of() as found:
        ask(found.engine, SESSIONS)
    for name in SESSIONS:
        remove_session(tmp_path / "kv", name)
    assert not list(tmp_path.rglob("*.kv"))


def processes(latent, folder, **options):
    options = dict(cache_disk=str(folder), num_pages=64, tensor_parallel_size=2, threads=2) | options
    return LLM(str(latent), device="cpu", data_parallel_attention=True, **NUMBERS | options)


def test_processes(latent, one, tmp_path):
    """Beams go on from files too; files of heads cut and of whole attention are not each other's; a rank that is silent is given up."""
    told = {name: (one(ids), 0) for name, ids in SESSIONS.items()}
    with processes(latent, tmp_path) as llm:
        assert ask(llm._engine, SESSIONS)[0] == told
    with processes(latent, tmp_path) as llm:
        assert ask(llm._engine, SESSIONS)[0] == {name: (tokens, 89) for name, (tokens, _) in told.items()}
    with processes(latent, tmp_path) as llm:
        engine = llm._engine
        for id, ids in enumerate(SESSIONS.values()):
            engine.submit(id, ids, BeamParams(beam_width=2, max_tokens=4), RequestOptions())
        finish(engine)
        assert len(engine.take_completed()) == 4 and not engine.scheduler.cache.preferred
        assert engine.counters()["prefix_disk_hit_tokens"] == 4 * 89
    with LLM(str(latent), device="cpu", threads=2, tensor_parallel_size=2, cache_disk=str(tmp_path), **NUMBERS) as llm:
        llm._engine.submit(1, next(iter(SESSIONS.values())), PARAMS, RequestOptions())
        assert finish(llm._engine)[1][1] == 0
    names = [path.stem for path in parts(tmp_path)[1]]
    with processes(latent, tmp_path) as llm:
        (pid,) = pids(llm)
        llm._engine.feature("ranks")._ranks.group.timeout_s = 2.0
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(GroupError, match="waited 2 s for"):
            ask(llm._engine, {name: SESSIONS[name] for name in names[:1]})
