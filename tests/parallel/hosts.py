"""Ranks on several "hosts" of this machine: each host has memory of its own, and their first ranks sockets to each other."""

import socket
from itertools import combinations

from zse.parallel.group import STREAM, SUMS, RankGroup, new_memory


class Hosts:
    """Made before the ranks are forked; each calls group(rank)."""

    def __init__(self, size: int, nodes: int, keys: bytes | None = None):
        self.size, self.nodes = size, nodes
        self.memory = [new_memory(size, nodes) for _ in range(nodes)]
        self.sockets, self._keys = {}, keys
        for kind in (SUMS, STREAM):
            for one, other in combinations(range(nodes), 2):
                pair = _connected()
                self.sockets[kind, one, other], self.sockets[kind, other, one] = pair

    def group(self, rank: int) -> RankGroup:
        node = rank * self.nodes // self.size
        found = RankGroup(rank, self.size, self.memory[node], self.nodes)
        for (kind, one, other), sock in self.sockets.items():
            if one == node and rank == found.here[0]:
                up, down = bytes(range(16)), bytes(range(16, 32))
                keys = (up + down if one < other else down + up) if self._keys is None or one else self._keys
                found.link(other, sock, keys, kind)
            else:
                sock.close()
        return found

    def close(self) -> None:
        """This process's, once all ranks are there: else nobody sees that a host has closed its."""
        for sock in self.sockets.values():
            sock.close()


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    for sock in (one, other):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, other
