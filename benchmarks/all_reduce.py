"""Microseconds of an all-reduce between the GPUs (or, with --device cpu, processes) of one machine, by form and size.

    python benchmarks/all_reduce.py --ranks 2
    python benchmarks/all_reduce.py --ranks 2 --device cpu --threads 1
    python benchmarks/all_reduce.py --device cpu --hosts    # two ranks, each as on a host of its own, over a TCP socket

A recording of REPEATS all-reduces is replayed as a captured graph, rounds in a row; the time is the slowest rank's, divided. "spread" and "collect" are of rows of 1,024 numbers that
ranks have by turns: those of all to all, as bf16, and sums to who has them. Each
form is checked first: every rank must have the bits of the sum in the order of ranks (int8: the same bits on all ranks, within its
error; half: f32 sent as bf16, within rounding)."""

import argparse
import json
import os
import socket
import subprocess
import sys
import time

import numpy as np

from zse.errors import ZSEError
from zse.parallel.group import SUMS, RankGroup, new_memory
from zse.runtime.opening import open_device
from zse.tensor import OwnRows, Tensor

KIB = (8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536)
REPEATS = 32


def numbers(rank: int, count: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(count).astype(np.float32)


def timed(group: RankGroup, record, device, rounds: int) -> float:
    """us of one of the recording's REPEATS."""
    recorder = device.record()
    for _ in range(REPEATS):
        record(recorder)
    graph = recorder.finish()
    for _ in range(3):
        graph.run()
    group.exchange(b"")
    begin = time.perf_counter()
    tickets = [graph.submit() for _ in range(rounds)]
    for ticket in tickets:
        ticket.wait()
    took = time.perf_counter() - begin
    graph.close()
    return max(float(other) for other in group.exchange(repr(took).encode())) * 1e6 / rounds / REPEATS


def check(device, x: Tensor, out: Tensor, form: str, size: int) -> None:
    count = x.nbytes // 4
    found = np.frombuffer(device.read(out), np.float32)
    parts = [numbers(rank, count) for rank in range(size)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    if form.endswith("half"):  # of two ranks each part is rounded once; of more the sum of large ones is, too
        bound = 2.0**-8 * (sum(map(np.abs, parts)) + np.abs(total)) * 1.01
        assert (np.abs(found - total) <= bound).all(), f"{form} of {4 * count} bytes is off by more than rounding"
    elif form == "int8":
        tops = sum(np.abs(part).reshape(-1, 32).max(1) for part in parts)
        worst = (np.abs(found - total).reshape(-1, 32).max(1) / tops).max()
        assert worst <= 2.02 / 254, f"int8 is off by {worst} of its group's largest numbers"
    else:
        assert np.array_equal(found, total), f"{form} of {4 * count} bytes: {(found != total).sum()} numbers are wrong"


def measure(rank: int, size: int, descriptor: int, args: argparse.Namespace) -> None:
    group = RankGroup.join(rank, size, descriptor, 1 + args.hosts) if rank else PLAYED[0]
    if rank and args.hosts:
        link(group, socket.socket(fileno=args.socket))
    name = "cpu" if args.device == "cpu" else f"{args.device}:{rank}"
    with open_device(name, threads=args.threads if args.device == "cpu" else None) as device:
        group.connect(device)
        collectives = group.peers
        for kib in args.kib:
            count = kib * 256
            x = Tensor(device.alloc(4 * count), (count // 1024, 1024), "f32")
            out = Tensor(device.alloc(4 * count), x.shape, "f32")
            device.write(x, numbers(rank, count).tobytes())
            row = {"KiB": kib}
            forms = ["host"] if args.device == "cpu" else ["small", "large", "small half", "large half", "int8"]
            for form in forms:
                if form.startswith("small") and kib > 1024 * (1 + form.endswith("half")):
                    continue

                def record(recorder, form=form, x=x, out=out):
                    if form == "host":
                        group.all_reduce(recorder, x, out)
                    else:
                        collectives.reduce_by(form, recorder, x, out)

                device.run(record)
                check(device, x, out, form, size)
                row[form] = round(timed(group, record, device, max(2, min(50, 200_000 // kib))), 2)
            row |= {name: round(took, 2) for name, took in rows_timed(group, device, x, out, kib)}
            if not rank:
                print(json.dumps(row), flush=True)
        group.exchange(b"")
        group.close()


def rows_timed(group: RankGroup, device, x: Tensor, out: Tensor, kib: int):
    """(form, us) of exchanges of rows of x and out."""
    if group.nodes > 1:
        return
    count, width, dtype = x.shape[0], x.shape[1], "f32" if device.kernels == "cpu" else "bf16"
    owner, place = np.arange(count, dtype=np.int32) % group.size, np.full(count, count, np.int32)
    rows = np.flatnonzero(owner == group.rank).astype(np.int32)
    place[rows] = np.arange(len(rows))
    found = [Tensor(device.alloc(4 * count), (count,), "i32") for _ in OwnRows._fields]
    own = OwnRows(*found)
    for tensor, values in ((own.rows, rows), (own.place, place), (own.owner, owner)):
        device.write(tensor.with_rows(max(1, len(values))), values.tobytes() or bytes(4))
    mine, whole = Tensor(x.buffer, (len(rows), width), dtype), Tensor(out.buffer, (count, width), dtype)
    rounds = max(2, min(50, 200_000 // kib))
    yield "spread", timed(group, lambda recorder: group.spread_rows(recorder, mine, whole, own), device, rounds)
    sums = out._replace(shape=(len(rows), width))
    yield "collect", timed(group, lambda recorder: group.collect_sums(recorder, x, sums, own), device, rounds)


PLAYED: list[RankGroup] = []


def link(group: RankGroup, sock: socket.socket) -> None:
    """To the other host."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    group.link(1 - group.node, sock, bytes(32), SUMS)


def loopback() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "hip", "cpu"), default="cuda")
    parser.add_argument("--threads", type=int, default=1, help="of each rank, on a CPU")
    parser.add_argument("--kib", type=int, nargs="*", default=KIB)
    parser.add_argument("--hosts", action="store_true", help="two ranks over a socket")
    parser.add_argument("--socket", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--descriptor", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        return measure(args.rank, args.ranks, args.descriptor, args)
    group = RankGroup.create(args.ranks, 1 + args.hosts)
    memory, theirs = group.descriptor, []
    if args.hosts:
        memory, (ours, other) = new_memory(2, 2), loopback()
        link(group, ours)
        other.set_inheritable(True)
        theirs = ["--socket", str(other.fileno())]
    os.set_inheritable(memory, True)
    PLAYED.append(group)
    others = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--rank", str(rank), "--descriptor", str(memory), *theirs],
            close_fds=False,
        )
        for rank in range(1, args.ranks)
    ]

    def look() -> None:
        for rank, other in enumerate(others, 1):
            if other.poll():
                raise SystemExit(f"rank {rank} ended with {other.returncode}")

    group.look = look
    try:
        measure(0, args.ranks, -1, args)
        for other in others:
            other.wait(30)
    except ZSEError as error:
        sys.exit(f"error: {error}")
    finally:
        for other in others:
            if other.poll() is None:
                other.kill()


if __name__ == "__main__":
    main()
