"""Walks over the whole server in virtual time; see world.py for what must hold.

ZSE_TEST_WORLDS=N: seeds of the long form (`--exhaustive=only`), from ZSE_TEST_SEED on (0). A seed that fails is printed and written
to corpus/world.txt, which is replayed from then on."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import world
from world import World, walk

from zse.cache.manager import CacheManager
from zse.cache.prefix import PrefixCache
from zse.engine.client import Channel, EngineClient
from zse.http.listener import Server
from zse.scheduler.scheduler import Scheduler
from zse.server.admission import Bucket
from zse.server.auth import KeyCheck
from zse.server.work import RequestRun

CORPUS = Path(__file__).with_name("corpus") / "world.txt"
SHORT, PARTS = 8, 8  # the first seeds of the long form, which `make test-rest` walks
LONG = int(os.environ.get("ZSE_TEST_WORLDS", "400"))
FIRST = int(os.environ.get("ZSE_TEST_SEED", "0"))


def known() -> list[int]:
    lines = CORPUS.read_text(encoding="utf-8").splitlines()
    return [int(line.split()[0]) for line in lines if line and not line.startswith("#")]


def kept(seed: int) -> World:
    """walk(), a failing seed goes into the corpus."""
    try:
        return walk(seed)
    except AssertionError as error:
        if seed not in known():
            with open(CORPUS, "a", encoding="utf-8") as file:
                file.write(f"{seed} {' '.join(str(error).split())[:120]}\n")
        raise


def test_worlds():
    """Walks are worth their time only if faults happen and requests live through them: more than the first, where those do not."""
    answers: dict[int, int] = {}
    totals = dict.fromkeys("num_faults num_poisoned num_whole num_steps num_unanswered".split(), 0)
    pages = preemptions = 0

    def is_seen() -> bool:
        statuses = (200, 400, 401, 408, 429, 503, 504)
        enough = all(answers.get(status, 0) > 2 for status in statuses) and pages > 10 and preemptions > 10
        return enough and all(count > 4 for count in totals.values())

    for seed in [*range(SHORT), *range(100, 112)]:
        if seed >= SHORT and is_seen():
            break
        found = kept(seed)
        for status, count in found.num_answers.items():
            answers[status] = answers.get(status, 0) + count
        for name in totals:
            totals[name] += getattr(found, name)
        pages += len(found.pages)
        preemptions += sum(
            process.engine.scheduler.counters.preemptions for process in found.processes if process.engine is not None
        )
    assert is_seen(), (answers, totals, pages, preemptions)


@pytest.mark.parametrize("seed", known())
def test_worlds_that_failed_once(seed):
    walk(seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(PARTS))
def test_many_worlds(part):
    for seed in range(FIRST + part, FIRST + LONG, PARTS):
        kept(seed)


def test_the_same_seed_gives_the_same_trace_in_another_process():
    """Also where sets of texts have another order."""
    code = "import sys; sys.path[:0] = sys.argv[1:]; from world import walk; print(walk(3).digest.hexdigest())"
    found = set()
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", code, *sys.path], capture_output=True, text=True, env=environment, timeout=60
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found.add(done.stdout.splitlines()[-1])
    assert len(found) == 1


def test_a_supervisor_that_is_stopped_takes_its_watchdog_along():
    """stop() cancels the supervisor before it has seen the socket close, where the process ends at once."""

    async def stop() -> set:
        ours, theirs = socket.socketpair()
        process = SimpleNamespace(sock=ours, load=None, poll=lambda: 0, kill=lambda: None)
        client = EngineClient(lambda: process)
        client.start(process)
        await asyncio.sleep(0.01)
        await client.stop()
        await asyncio.sleep(0.01)
        theirs.close()
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert not asyncio.run(stop())


# Bugs that walks must find.


def _a_failed_engine_s_requests_are_forgotten(patch):
    patch.setattr(EngineClient, "_fail_all", lambda self, error: self.requests.clear())
    patch.setattr(world, "PATIENCE_S", 120.0)


def _a_body_is_not_given_back(patch):
    def half(self, request):
        if request is not None:
            self.bodies.remove(request.payer, len(request.body) // 2)
            request.body = b""

    patch.setattr(Server, "release_body", half)


def _room_in_the_queue_is_not_given_back(patch):
    leave = RequestRun.__exit__

    def forgets(self, kind, error, traceback):
        choices = self.choices
        leave(self, kind, error, traceback)
        self._control.choices += choices if kind is not None else 0

    patch.setattr(RequestRun, "__exit__", forgets)


def _an_event_comes_twice(patch):
    push = Channel.push

    def twice(self, key, event):
        push(self, key, event)
        if getattr(event, "tokens", None) and len(event.tokens) == 1 and event.tokens[0] == 9:
            push(self, key, event)

    patch.setattr(Channel, "push", twice)


def _tenants_share_prefixes(patch):
    match, root = PrefixCache.match, PrefixCache.root
    patch.setattr(PrefixCache, "match", lambda self, salt, data, **how: match(self, ("a", "x"), data, **how))
    patch.setattr(PrefixCache, "root", lambda self, salt: root(self, ("a", "x")))


def _numbers_that_are_not_finite_are_cached(patch):
    fail = Scheduler._fail

    def trusts(self, request):
        request.committed_len = request.computed_len
        return fail(self, request)

    patch.setattr(Scheduler, "_fail", trusts)
    patch.setattr(CacheManager, "distrust", lambda self, sequence: None)
    patch.setattr(World, "kill_engine", World.fail_device)


def _revoked_keys_go_on(patch):
    replace = KeyCheck.replace
    patch.setattr(KeyCheck, "replace", lambda self, keys: len(keys) > 2 and replace(self, keys))
    patch.setattr(World, "kill_engine", World.read_keys)


def _quotas_are_forgotten(patch):
    patch.setattr(Bucket, "wait_s", lambda self, amount, now: 0.0)
    patch.setattr(world, "RPM", 5)


@pytest.mark.parametrize(
    "bug",
    [
        _a_failed_engine_s_requests_are_forgotten,
        _a_body_is_not_given_back,
        _room_in_the_queue_is_not_given_back,
        _an_event_comes_twice,
        _tenants_share_prefixes,
        _numbers_that_are_not_finite_are_cached,
        _revoked_keys_go_on,
        _quotas_are_forgotten,
    ],
    ids=lambda bug: bug.__name__[1:],
)
def test_a_planted_bug_is_found(bug, monkeypatch):
    bug(monkeypatch)
    with pytest.raises(AssertionError, match="world seed"):
        for seed in range(60):
            walk(seed)
