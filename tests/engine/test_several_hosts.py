"""An engine whose ranks are on several hosts: each "host" here is a process group of its own, `zse serve --node-rank R` beside the
LLM that is node 0. Replies of one process; who may not join, and why; nothing waits for ever."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tiny_model

sys.path.insert(0, str(Path(__file__).parents[1] / "structured"))
import tiny_text

from zse import LLM, SamplingParams
from zse.engine import ranks, rendezvous, wire
from zse.engine.config import EngineConfig
from zse.errors import ConfigError, GroupError
from zse.parallel.group import RankGroup, new_memory

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, seed=7, repetition_penalty=1.2, ignore_eos=True, logprobs=2)
PROMPTS = [np.random.default_rng(n).integers(3, tiny_model.NAN_TOKEN, n).tolist() for n in (40, 7, 90)]
NUMBERS = dict(device="cpu", activations="f32", kv_dtype="f32", max_rows=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Wide and deep enough for four ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_model, "INNER", 128)
        patch.setattr(tiny_model, "LAYERS", 4)
        patch.setattr(tiny_model, "VOCAB", 256)
        folder = tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")
    tiny_text.write(folder)
    return folder


@pytest.fixture
def meeting(tmp_path):
    """Options of a group on hosts that are this one."""
    secret = tmp_path / "group.secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return dict(rendezvous=f"127.0.0.1:{port}", group_secret=str(secret), join_timeout=60)


def words(options: dict) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def start_node(model, rank: int, options: dict) -> subprocess.Popen:
    command = [sys.executable, "-m", "zse", "serve", str(model), "--node-rank", str(rank), *words(options)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def wanted(model):
    with LLM(str(model), threads=1, **NUMBERS) as llm:
        return [llm.generate(PROMPTS, params) for params in (GREEDY, SAMPLED)]


@pytest.mark.parametrize(
    "kind, size, nodes",
    [("tensor", 2, 2), ("tensor", 4, 2), ("pipeline", 2, 2), ("pipeline", 4, 2), ("pipeline", 3, 3)],
)
def test_replies_are_those_of_one_process(kind, size, nodes, model, meeting, wanted):
    options = NUMBERS | meeting | {f"{kind}_parallel_size": size, "nnodes": nodes, "threads": size // nodes}
    others = [start_node(model, node, options) for node in range(1, nodes)]
    try:
        with LLM(str(model), **options) as llm:
            for params, expected in zip((GREEDY, SAMPLED), wanted, strict=True):
                found = llm.generate(PROMPTS, params)
                assert [output.token_ids for output in found] == [output.token_ids for output in expected]
            told = [entry.logprob for entry in found[0].logprobs]
            assert told == pytest.approx([entry.logprob for entry in expected[0].logprobs], abs=1e-4)
    finally:
        for other in others:
            other.terminate()
    for node, other in enumerate(others, 1):
        said = other.communicate(timeout=20)[1]
        assert other.returncode == 0 and "Traceback" not in said, said
        assert f"zse node {node}: ranks " in said


def test_pages_in_files_of_each_host(model, meeting, wanted, tmp_path):
    """Found again after a restart of both."""
    options = NUMBERS | meeting | dict(tensor_parallel_size=2, nnodes=2, threads=1, cache_disk=str(tmp_path / "kv"))
    for cached in (0, 39):
        other = start_node(model, 1, options)
        try:
            with LLM(str(model), **options) as llm:
                (found,) = llm.generate(PROMPTS[:1], GREEDY)
                assert found.token_ids == wanted[0][0].token_ids
                assert llm.metrics()["prefix_disk_hit_tokens"] == cached
        finally:
            other.terminate()
        said = other.communicate(timeout=20)[1]
        assert other.returncode == 0 and "Traceback" not in said, said
    assert len(list(tmp_path.glob("kv/*/*.kv"))) == len(list(tmp_path.glob("kv/*/*/*.kv"))) == 1


def joined(config: EngineConfig, rank: int, outcome: list) -> threading.Thread:
    """enter() of a rank of another host, in a thread: what it gave or raised comes to `outcome`."""
    group = RankGroup(
        rank, config.tensor_parallel_size, new_memory(config.tensor_parallel_size, config.nnodes), config.nnodes
    )

    def run() -> None:
        try:
            outcome.append(rendezvous.enter(group, config, ranks.ToRank))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def config_of(model, meeting, **changes) -> EngineConfig:
    return EngineConfig(**dict(model=str(model), tensor_parallel_size=2, nnodes=2) | NUMBERS | meeting | changes)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda join: msgspec.structs.replace(join, version="0.0.1"), "another version of zse: 0.0.1, node 0 has "),
        (lambda join: msgspec.structs.replace(join, model=bytes(32)), "another model than node 0: its files differ"),
        (lambda join: msgspec.structs.replace(join, rank=0), "rank 0 of 2 is none of another host's"),
        (lambda join: msgspec.structs.replace(join, purpose="sums"), "rank 1 of 2 is none of another host's"),
        (lambda join: join.options.update(quantize="int4") or join, "another --quantize: int4, node 0 has None"),
        (
            lambda join: join.options.update(tensor_parallel_size="4") or join,
            "another --tensor-parallel-size: 4, node 0",
        ),
        (lambda join: join.options.update(page_size="64") or join, "another --page-size: 64, node 0 has 0"),
        (lambda join: join.options.clear() or join, "another --tensor-parallel-size: none, node 0 has 2"),
    ],
)
def test_who_differs_is_refused_by_name(change, said, model, meeting, monkeypatch):
    """Node 0 goes on waiting, and says at its end who came and why it could not join."""
    config, mine, outcome = config_of(model, meeting, join_timeout=3), rendezvous._mine, []
    monkeypatch.setattr(
        rendezvous, "_mine", lambda group, config: (lambda own: change(own) if group.rank else own)(mine(group, config))
    )
    thread, group = joined(config, 1, outcome), RankGroup.create(2, 2)
    with pytest.raises(
        GroupError, match="node 1 did not join within 3 s .--join-timeout.; the last one that came: 127.0.0.1: "
    ) as ended:
        rendezvous.assemble(group, config)
    thread.join(10)
    (error,) = outcome
    assert isinstance(error, ConfigError) and said in str(error) and said in str(ended.value)
    assert f"may not join node 0 at {config.rendezvous}" in str(error)
    group.close()


def test_another_secret_is_refused_by_name(model, meeting, tmp_path):
    other = tmp_path / "other.secret"
    other.write_text("fedcba9876543210")
    other.chmod(0o600)
    outcome, group = [], RankGroup.create(2, 2)
    thread = joined(config_of(model, meeting, group_secret=str(other)), 1, outcome)
    with pytest.raises(GroupError, match="node 1 did not join within 3 s .*: refused: it has another --group-secret"):
        rendezvous.assemble(group, config_of(model, meeting, join_timeout=3))
    thread.join(10)
    assert isinstance(outcome[0], ConfigError) and "refused: it has another --group-secret" in str(outcome[0])
    group.close()


def test_strangers_delay_nobody_and_a_second_node_is_refused(model, meeting):
    """One says nothing, one HTTP; of two ranks with the same number the second is refused; one that ended while it waited makes room."""
    config, group, outcomes = (
        config_of(model, meeting, nnodes=3, tensor_parallel_size=3),
        RankGroup.create(3, 3),
        [[], [], []],
    )
    found = []
    waiting = threading.Thread(target=lambda: found.append(rendezvous.assemble(group, config)), daemon=True)
    waiting.start()
    host, _, port = config.rendezvous.partition(":")
    deadline = time.monotonic() + 40
    while True:
        try:
            strangers = [socket.create_connection((host, int(port)))]
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    strangers.append(socket.create_connection((host, int(port))))
    strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(80))
    address, secret = rendezvous.check_options(config)
    gone = rendezvous._connected(rendezvous._mine(RankGroup(1, 3, new_memory(3, 3), 3), config), address, secret)
    time.sleep(0.5)
    gone.close()
    time.sleep(0.5)
    twice = [joined(config, 1, outcomes[0]), joined(config, 1, outcomes[1])]
    while not (outcomes[0] or outcomes[1]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    refused, kept = sorted(outcomes[:2], key=len, reverse=True)
    assert isinstance(refused[0], ConfigError) and "another node with --node-rank 1 has joined" in str(refused[0])
    third = joined(config, 2, outcomes[2])
    for thread in (waiting, *twice, third):
        thread.join(20)
    assert [far.node for far in found[0]] == [1, 2] and [far.pid for far in found[0]] == [os.getpid()] * 2
    assert all(hasattr(outcome[0], "receive") for outcome in (kept, outcomes[2])), outcomes
    found[0][0].sock.sendall(b"\x05\0\0\0\x91\xa5Other")  # nothing that rank 0 says
    with pytest.raises(Exception, match="a frame that is no message"):
        kept[0].receive(5.0)
    group.close()


def test_a_node_without_node_0_gives_up(model, meeting):
    began = time.monotonic()
    node = start_node(model, 1, NUMBERS | meeting | dict(tensor_parallel_size=2, nnodes=2, join_timeout=1))
    said = node.communicate(timeout=60)[1]
    assert node.returncode == 75 and time.monotonic() - began < 50
    assert (
        f"rank 1: node 0 at {meeting['rendezvous']} did not let it in within 1 s (--join-timeout): Connection refused"
        in said
    )


def test_an_engine_without_its_nodes_gives_up(model, meeting):
    with pytest.raises(GroupError, match=r"node 1 did not join within 1 s \(--join-timeout\)$"):
        LLM(str(model), threads=1, tensor_parallel_size=2, nnodes=2, **NUMBERS | meeting | dict(join_timeout=1))


def test_what_a_rank_of_another_host_cannot_load_ends_both(model, meeting):
    """It says so by its number; the node says the same, and ends: its options will not do."""
    options = NUMBERS | meeting | dict(tensor_parallel_size=2, nnodes=2, threads=1)
    node = start_node(model, 1, options | dict(max_memory=100_000))
    try:
        with pytest.raises(GroupError, match=r"rank 1: needs \d+ MiB of memory .* --max-memory") as refused:
            LLM(str(model), **options)
        said = node.communicate(timeout=20)[1]
    finally:
        node.kill()
    assert (refused.value.exit_code, refused.value.code) == (2, "out_of_memory")
    assert node.returncode == 2 and "of --max-memory" in said and "Traceback" not in said


def test_a_record_that_was_changed_ends_the_connection():
    ends, keys = socket.socketpair(), (b"a" * 32, b"b" * 32)
    one, other = wire.SignedSocket(ends[0], *keys), wire.SignedSocket(ends[1], *keys[::-1])
    one.sendall(b"as it was")
    assert other.recv() == b"as it was"
    one.sendall(b"as it was")
    raw = ends[1].recv(100)
    assert len(raw) == 4 + 9 + 16
    for bad in (raw[:6] + b"X" + raw[7:], raw):  # the second is right and comes once more
        ends[0].sendall(bad)
        expected = b"" if bad is not raw else b"as it was"
        assert other.recv() == expected
    ends[0].sendall(raw)
    assert other.recv() == b""  # what was sent before does not count again
    ends[0].sendall(b"\xff\xff\xff\x7f")
    assert other.recv() == b""
    one.close()
    assert other.recv() == b""
    other.close()


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(nnodes=2), "--nnodes 2 needs --rendezvous: HOST:PORT, where node 0 listens"),
        (dict(nnodes=2, rendezvous="h:1"), "--nnodes 2 needs --group-secret: a private file"),
        (dict(nnodes=3, tensor_parallel_size=4), "--nnodes 3: 4 ranks cannot be divided evenly: give a .* multiple"),
        (dict(nnodes=2, node_rank=2), "--node-rank 2 of --nnodes 2: they are numbered from 0"),
        (dict(node_rank=1), "--node-rank, --rendezvous and --group-secret are of several hosts"),
        (dict(rendezvous="h:1"), "are of several hosts: give --nnodes N too"),
        (dict(nnodes=0), "nnodes 0 is not a whole number from 1 to 64"),
        (dict(join_timeout=0), "join_timeout 0 is not a whole number from 1 to 86400"),
    ],
)
def test_options_that_do_not_go_together(options, said):
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**dict(model="x", tensor_parallel_size=2) | options)


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(rendezvous="unix:/x"), "--rendezvous is HOST:PORT"),
        (dict(rendezvous="nowhere"), "--rendezvous 'nowhere' is neither HOST:PORT"),
        (dict(group_secret="/nowhere"), "--group-secret /nowhere: No such file"),
    ],
)
def test_an_address_and_a_secret_that_are_none(changes, said, model, meeting):
    with pytest.raises(ConfigError, match=said):
        rendezvous.check_options(config_of(model, meeting, **changes))


def test_of_processors_with_other_kernels_mixtures_are_refused(caplog):
    hello = ranks.Hello("1", [], "cpu", "f16", "f32", {}, 1, 0, isa="x86-64-v4")
    other = msgspec.structs.replace(hello, isa="x86-64-v3")

    class Planned:
        class model:
            class config:
                moe = None

    ranks._check_levels([hello, other], Planned)
    assert "rank 1 has the kernels of x86-64-v3, rank 0 of x86-64-v4" in caplog.text
    Planned.model.config.moe = True
    ranks._check_levels([hello, hello], Planned)
    with pytest.raises(GroupError, match="give both ZSE_ISA, so that they route alike"):
        ranks._check_levels([hello, other], Planned)
