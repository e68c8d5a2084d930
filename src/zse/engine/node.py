"""`zse serve` on a host beside node 0's: it has no HTTP, starts the ranks of its host, and starts them again when the group has ended."""

import os
import select
import signal
import sys
import time
from typing import Any

from zse.engine import messages, process, ranks, rendezvous
from zse.engine.config import EngineConfig
from zse.engine.rank_options import num_ranks
from zse.errors import GroupError, ZSEError
from zse.parallel import group as groups

AGAIN_S = 0.5
LOOK_MS = 200  # how soon a signal is noticed


class NodeRanks:
    """The ranks of this host. config: of the whole group; node_rank is not 0."""

    def __init__(self, config: EngineConfig):
        rendezvous.check_options(config)
        self.config, self.stopped = config, False
        self._started: dict[int, tuple[process.EngineProcess, messages.FrameReader]] = {}

    def stop(self, *signal: Any) -> None:
        """End, at once."""
        self.stopped = True

    def run(self) -> int:
        """Until stop(): exit code 0. Raises ZSEError where the group cannot be joined, or not with these options."""
        while not self.stopped:
            failed = self._once()
            if self.stopped:
                break
            if failed.code == rendezvous.NOT_JOINED or failed.exit_code != GroupError.exit_code:
                raise failed
            self._say(f"{failed}; joining again")
            time.sleep(AGAIN_S)
        return 0

    def _say(self, text: str) -> None:
        sys.stderr.write(f"zse node {self.config.node_rank}: {text}\n")
        sys.stderr.flush()

    def _once(self) -> ZSEError:
        """One life of the ranks; what ended it."""
        config, size = self.config, num_ranks(self.config)
        each, device = size // config.nnodes, ranks.device_of(self.config)
        memory = groups.new_memory(size, config.nnodes)
        os.set_inheritable(memory, True)
        try:
            for rank in range(config.node_rank * each, (config.node_rank + 1) * each):
                own = ranks.of_rank(config, device, rank)
                words = ["--rank", str(rank), "--memory", str(memory), *own.to_arguments()]
                self._started[rank] = process.spawn(words), messages.FrameReader(messages.Fatal)
            self._say(f"ranks {', '.join(map(str, self._started))} of {size} join node 0 at {config.rendezvous}")
            return self._watch()
        finally:
            for started, _ in self._started.values():
                started.kill()
                started.wait(ranks.END_S)
                started.sock.close()
            self._started.clear()
            os.close(memory)

    def _watch(self) -> ZSEError:
        poll, by_socket = select.poll(), {}
        for rank, (started, _) in self._started.items():
            poll.register(started.sock, select.POLLIN)
            by_socket[started.sock.fileno()] = rank
        found: ZSEError | None = None
        deadline = float("inf")
        while not self.stopped and by_socket and time.monotonic() < deadline:
            for descriptor, _ in poll.poll(LOOK_MS):
                rank = by_socket[descriptor]
                error, is_over = self._hear(rank)
                if is_over:
                    poll.unregister(descriptor)
                    del by_socket[descriptor]
                # The first one that says why; who ended without a word ends the others, which do.
                if error is not None and (found is None or found.exit_code == GroupError.exit_code != error.exit_code):
                    found = error
                if is_over and deadline == float("inf"):
                    deadline = time.monotonic() + ranks.END_S
        return found or GroupError("the group has ended")

    def _hear(self, rank: int) -> tuple[ZSEError | None, bool]:
        started, reader = self._started[rank]
        try:
            data = started.sock.recv(1 << 16)
        except OSError:
            data = b""
        for message in reader.feed(data):
            error = GroupError(message.message)
            error.exit_code, error.code = message.exit_code, message.code or None
            return error, False
        if data:
            return None, False
        code = started.wait(ranks.END_S)
        if not code:
            return None, True
        killed = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return (GroupError(f"rank {rank} (process {started.pid}) {killed}") if code < 0 else None), True


def serve_node(arguments: list[str]) -> int:
    """`zse serve` with --node-rank 1 and up: its exit code. arguments: of an engine. Raises ZSEError."""
    node = NodeRanks(EngineConfig.from_arguments(arguments))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, node.stop)
    return node.run()
