"""Collectives between hosts: the sums' bits on every rank, odd sizes, threads, messages that were changed, hosts that end."""

import contextlib
import ctypes
import os
import signal
import socket
import time

import numpy as np
import pytest
from hosts import Hosts
from ranks import message_of, recorded_sum, run_ranks

from zse.errors import GroupError
from zse.parallel.group import RankGroup
from zse.runtime import native
from zse.runtime.cpu import CPUDevice
from zse.tensor import Tensor

ROWS, WIDTH = (1, 3, 1024, 0, 11, 1000), 97
SHAPES = [(2, 2, 1), (4, 2, 1), (4, 2, 3), (3, 3, 2), (6, 3, 1)]  # ranks, hosts, threads of a rank


def part(rank: int, count: int) -> np.ndarray:
    return np.random.default_rng(100 * count + rank).standard_normal(count).astype(np.float32)


def total(parts: list[np.ndarray], nodes: int) -> np.ndarray:
    """Added in the order of ranks within a host, then in that of hosts."""
    each, sums = len(parts) // nodes, []
    for node in range(nodes):
        sums.append(parts[node * each])
        for other in parts[node * each + 1 : (node + 1) * each]:
            sums[-1] = sums[-1] + other
    found = sums[0]
    for other in sums[1:]:
        found = found + other
    return found


def test_tags_are_those_of_the_paper():
    """SipHash-2-4, appendix A: the key 00 01 … 0f, the message 00 01 … 0e; the same where the first word is the head."""
    key, data = bytes(range(16)), bytes(range(15))
    tag = native.runtime().zse_siphash
    assert tag(key, None, 0, data, 15) == tag(key, data[:8], 1, data[8:], 7) == 0xA129CA6149BE45E5


@pytest.mark.parametrize("size, nodes, threads", SHAPES)
def test_every_rank_has_the_same_bits(size, nodes, threads):
    hosts = Hosts(size, nodes)
    widths = [5 + rank for rank in range(size)]

    def work(rank):
        group, found = hosts.group(rank), []
        with CPUDevice(threads) as device:
            group.connect(device)
            told = group.exchange(b"x" * rank)
            x, out = device.alloc(4 * 1024 * WIDTH), device.alloc(4 * 1024 * WIDTH)
            mine, whole = device.alloc(4 * 1024 * widths[rank]), device.alloc(4 * 1024 * sum(widths))
            everywhere = device.alloc(4 * 1024 * sum(widths))
            recorder = device.record()
            rows = recorder.symbol("rows", 1024)
            everywhere = Tensor(everywhere, (rows, sum(widths)), "f32")
            hidden, other = Tensor(x, (rows, WIDTH), "f32"), Tensor(out, (rows, WIDTH), "f32")
            columns, all_columns = Tensor(mine, (rows, widths[rank]), "f32"), Tensor(whole, (rows, sum(widths)), "f32")
            group.all_reduce(recorder, hidden, other)
            group.all_reduce(recorder, other, other)
            group.gather(recorder, columns, all_columns, widths)
            group.all_gather(recorder, columns, everywhere, widths)
            group.broadcast(recorder, hidden)
            graph = recorder.finish()
            for count in ROWS:
                whole.view()[:] = b"\xff" * len(whole.view())
                device.write(hidden.with_rows(count), part(rank, count * WIDTH).tobytes())
                device.write(columns.with_rows(count), part(rank, count * widths[rank]).tobytes())
                graph.run(rows=count)
                found += [device.read(tensor.with_rows(count)) for tensor in (other, hidden, everywhere)]
                if not rank:
                    found.append(device.read(all_columns.with_rows(count)))
            graph.close()
            group.close()
        return told, found

    for rank, (told, found) in enumerate(run_ranks(size, work, forked=hosts.close)):
        expected = []
        for count in ROWS:
            once = total([part(other, count * WIDTH) for other in range(size)], nodes)
            expected += [total([once] * size, nodes).tobytes(), part(0, count * WIDTH).tobytes()]
            columns = [part(other, count * width).reshape(count, width) for other, width in enumerate(widths)]
            expected += [np.concatenate(columns, 1).tobytes()] * (1 if rank else 2)
        assert told == [b"x" * other for other in range(size)]
        assert found == expected


@pytest.mark.parametrize("size, nodes, threads", SHAPES)
def test_a_ring_through_hosts(size, nodes, threads):
    """Messages of all sizes go once around; rank 0 sends the next before the last has come back, so that nobody may wait for who
    receives: two of 4 MB are more than sockets hold."""
    hosts, counts = Hosts(size, nodes), (5, 1_000_000, 1, 1_000_000, 999_999, 3)

    def work(rank):
        group, found = hosts.group(rank), []
        with CPUDevice(threads) as device:
            group.connect(device)
            x = device.alloc(4_000_000)
            graphs = []
            for kind in (group.send, group.receive):
                recorder = device.record()
                kind(recorder, Tensor(x, (recorder.symbol("count", 1_000_000), 1), "f32"))
                graphs.append(recorder.finish())
            send, receive = graphs
            numbers = np.frombuffer(x.view(), np.float32)
            for turn, count in enumerate(counts):
                if rank:
                    receive.run(count=count)
                    numbers[:count] += rank
                    send.run(count=count)
                else:
                    numbers[:count] = part(turn, count)
                    send.run(count=count)
                    if turn:
                        receive.run(count=counts[turn - 1])
                        found.append(numbers[: counts[turn - 1]].tobytes())
            if not rank:
                receive.run(count=counts[-1])
                found.append(numbers[: counts[-1]].tobytes())
            for graph in graphs:
                graph.close()
            del numbers
            group.exchange(b"")  # a host's first rank sends on what its others send: none may go before all have
            group.close()
        return found

    expected = [part(turn, count) for turn, count in enumerate(counts)]
    for rank in range(1, size):
        expected = [numbers + np.float32(rank) for numbers in expected]
    assert run_ranks(size, work, forked=hosts.close)[0] == [numbers.tobytes() for numbers in expected]


@pytest.mark.parametrize("killed", [2, 3])
def test_a_rank_that_is_killed_ends_the_group_on_every_host(killed):
    """Of two hosts with two ranks each the first one of the second, then the last: the others know within a second."""
    hosts = Hosts(4, 2)

    def work(rank):
        group = hosts.group(rank)
        with CPUDevice(1) as device:
            group.connect(device)
            graph = recorded_sum(group, device)
            for _ in range(20):
                graph.run()
            if rank == killed:
                os.kill(os.getpid(), signal.SIGKILL)
            begin = time.monotonic()
            message = message_of(graph.run)
            seconds = time.monotonic() - begin
            again = message_of(graph.run)
            return message, again, seconds

    answers = run_ranks(4, work, (killed,), hosts.close)
    for rank, answer in enumerate(answers):
        if rank != killed:
            message, again, seconds = answer
            assert message == again and message.startswith(f"rank {rank} of 4: ") and seconds < 20
            assert f"rank {killed} (process " in message or (killed == 3 and rank < 2 and "rank 2 (process " in message)
    first = answers[0][0]
    assert (
        "the host of rank 2 (process " in first
        and first.endswith(" closed the connection")
        or "rank 2" in answers[1][0]
    )


def test_a_host_that_is_silent_is_given_up(monkeypatch):
    monkeypatch.setenv("ZSE_GROUP_TIMEOUT_S", "0.4")
    hosts = Hosts(2, 2)

    def work(rank):
        group = hosts.group(rank)
        with CPUDevice(1) as device:
            group.connect(device)
            graph = recorded_sum(group, device)
            if rank:
                time.sleep(8)
                return "", 0.0
            begin = time.monotonic()
            return message_of(graph.run), time.monotonic() - begin

    (message, seconds), _ = run_ranks(2, work, forked=hosts.close)
    assert message.startswith("rank 0 of 2: waited 0.4 s for rank 1 (process ") and 0.35 < seconds < 7


def test_a_message_of_other_keys_ends_the_group():
    """What is not signed with the connection's key is not added."""
    hosts = Hosts(2, 2, keys=bytes(32))

    def work(rank):
        group = hosts.group(rank)
        return message_of(lambda: group.exchange(b"me"))

    first, second = run_ranks(2, work, forked=hosts.close)
    assert "rank 0 of 2: a message of rank 1's host was changed on its way" == first
    assert "rank 1 of 2: " in second


def test_a_message_that_is_changed_on_its_way_ends_the_group():
    """Somebody between the hosts turns one bit of the 30th message."""
    hosts = Hosts(2, 2)
    ours, theirs = socket.socketpair(), hosts.sockets[0, 0, 1]
    hosts.sockets[0, 0, 1] = ours[0]

    def work(rank):
        if rank == 2:  # in between
            for sock in hosts.sockets.values():
                sock is theirs or sock.close()
            passed = 0
            while True:
                for a, b in ((ours[1], theirs), (theirs, ours[1])):
                    a.setblocking(False)
                    try:
                        data = bytearray(a.recv(1 << 16))
                    except BlockingIOError:
                        continue
                    except ConnectionResetError:
                        return ""
                    if not data:
                        return ""
                    if passed <= 8000 < passed + len(data) and a is theirs:
                        data[8000 - passed] ^= 4
                    passed += len(data) * (a is theirs)
                    b.setblocking(True)
                    with contextlib.suppress(OSError):
                        b.sendall(data)
        theirs.close(), ours[1].close()
        group = hosts.group(rank)
        with CPUDevice(1) as device:
            graph = recorded_sum(group, device)
            for turn in range(100):
                message = message_of(graph.run)
                if message != "nothing was raised":
                    return turn, message
        return 100, ""

    (turn, message), _, _ = run_ranks(3, work, forked=lambda: (hosts.close(), theirs.close(), ours[1].close()))
    assert turn == 8000 // 408 and message == "rank 0 of 2: a message of rank 1's host was changed on its way"


def test_links_are_of_first_ranks():
    hosts = Hosts(4, 2)
    first = RankGroup(1, 4, hosts.memory[0], 2)
    with pytest.raises(GroupError, match="rank 1: the connection to host 1 cannot be used"):
        first.link(1, hosts.sockets[0, 0, 1], bytes(32), 0)
    assert ctypes.sizeof(ctypes.c_uint64) == 8
    with pytest.raises(GroupError, match="rank 1 of 4: the group's memory is not that of such a group"):
        RankGroup.join(1, 4, hosts.memory[0], 4)
    first.close()
