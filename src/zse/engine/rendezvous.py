"""How ranks on several hosts find each other (docs/design/0011-several-devices.md): rank 0 listens at one address, where every rank
of another host says what it is. Who has another secret, version, model or options is refused by name."""

import os
import queue
import socket
import threading
import time
from typing import Any, NamedTuple

import msgspec

import zse
from zse.engine import fingerprints, messages, wire
from zse.engine.config import EngineConfig
from zse.errors import ConfigError, GroupError
from zse.formats import opening as model_files
from zse.lazy import logging
from zse.parallel.group import STREAM, SUMS, RankGroup

MAGIC = b"ZSEGRP01"
FINGERPRINT = bytes(16)  # what differs is told in words, once the secret is known to be the same
REFUSALS = {wire.NO_SECRET: "it has another --group-secret", wire.OTHER: "it speaks otherwise"}
MAX_HANDSHAKES = 64  # at once, of strangers too
RETRY_S = 0.25
LINKS_S = 60.0  # for the connections between hosts, when all have joined
NOT_JOINED = "not_joined"  # code of the GroupError of a rank that found nobody to join
# What ranks compute depends on, beside the model.
AGREE = """tensor_parallel_size pipeline_parallel_size expert_parallel data_parallel_attention nnodes quantize activations kv_dtype kv_layout page_size num_pages
    max_context max_rows max_tokens_per_step speculation draft_tokens adapter_slots adapter_rank prefix_cache deterministic
    state_memory state_interval cache_host_memory""".split()


class JoinRequest(msgspec.Struct, tag=True, array_like=True):
    """What a rank of another host says first. purpose: "rank", or a kind of connection between the first ranks of hosts. options: of
    AGREE; model: a digest of its files. memory: what the ranks of a host share. session: of the Roster. port: where the first rank of
    a host listens for others."""

    rank: int
    purpose: str = "rank"
    version: str = zse.__version__
    options: dict[str, str] = {}
    model: bytes = b""
    memory: int = 0
    pid: int = 0
    session: bytes = b""
    port: int = 0


class Roster(msgspec.Struct, tag=True, array_like=True):
    """Rank 0's answer when all have joined. addresses: of the first ranks of hosts; rank 0's is known."""

    session: bytes
    addresses: list[tuple[str, int]]


class Refusal(msgspec.Struct, tag=True, array_like=True):
    """Or why this one may not."""

    message: str


class Joined(NamedTuple):
    """A rank that is there."""

    join: JoinRequest
    sock: wire.SignedSocket


class FarRank:
    """A rank of another host, in the place of a process that rank 0 started."""

    def __init__(self, joined: Joined, node: int):
        self.sock, self.pid, self.node = joined.sock, joined.join.pid, node

    def wait(self, timeout: float) -> int | None:
        """It ends when its connection does."""
        return 0

    def kill(self) -> None:
        """As wait()."""


def check_options(config: EngineConfig) -> "tuple[tuple[int, Any], bytes]":
    """The address of --rendezvous and the secret. Raises ConfigError."""
    address = wire.address_of(config.rendezvous or "", "--rendezvous")
    if address[0] == socket.AF_UNIX:
        raise ConfigError("--rendezvous is HOST:PORT: hosts have no files in common")
    return address, wire.read_secret(config.group_secret or "", "--group-secret")


def _decoded(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError:
        raise wire.LinkError("it closed the connection" if not data else "it says what no rank does") from None


class Listener:
    """Takes connections that prove to have the secret, each in a thread of its own: a stranger who says nothing delays nobody."""

    def __init__(self, address: "tuple[int, Any]", secret: bytes):
        self._secret, self._heard = secret, queue.SimpleQueue[Joined]()
        self._handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self.refused = ""  # the last one, and why
        try:
            self._sock = socket.create_server(address[1], family=address[0], backlog=MAX_HANDSHAKES)
        except OSError as error:
            raise ConfigError(f"--rendezvous {address[1][0]}:{address[1][1]}: {error.strerror or error}") from None
        self.port = self._sock.getsockname()[1]
        threading.Thread(target=self._accept, name="rendezvous", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, (host, *_) = self._sock.accept()
            except OSError:
                return
            if self._handshakes.acquire(blocking=False):
                threading.Thread(target=self._welcome, args=(sock, host), name="handshake", daemon=True).start()
            else:
                sock.close()

    def _welcome(self, sock: socket.socket, host: str) -> None:
        try:
            signed = wire.SignedSocket(sock, *wire.answer(sock, MAGIC, FINGERPRINT, self._secret, REFUSALS))
            signed.settimeout(wire.HANDSHAKE_S)
            self._heard.put(Joined(_decoded(signed.recv(), JoinRequest), signed))
        except wire.LinkError as error:
            sock.close()
            self.note(f"{host}: {error}")
        finally:
            self._handshakes.release()

    def note(self, refused: str) -> None:
        """Say who may not join."""
        self.refused = refused
        logging.getLogger("zse.engine").warning("a rank may not join: %s", refused)

    def next(self, timeout: float) -> Joined | None:
        """Who came next, None after `timeout` seconds."""
        try:
            return self._heard.get(timeout=timeout)
        except queue.Empty:
            return None

    def close(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # ends the thread's accept()
        except OSError:
            pass
        self._sock.close()


def _mine(group: RankGroup, config: EngineConfig) -> JoinRequest:
    source = model_files.open_model(config.model)
    try:
        model = fingerprints.revision_of(source)
    finally:
        source.close()
    options = {name: str(getattr(config, name)) for name in AGREE} | {
        "draft_model": str(config.draft_model is not None)
    }
    return JoinRequest(
        group.rank, options=options, model=model, memory=os.fstat(group.descriptor).st_ino, pid=os.getpid()
    )


def _refusal(join: JoinRequest, mine: JoinRequest, group: RankGroup, there: dict[int, Joined]) -> str:
    """Why this rank may not join, in the terms of its host; "": it may."""
    if join.version != mine.version:
        return f"another version of zse: {join.version}, node 0 has {mine.version}"
    for name, value in mine.options.items():
        if join.options.get(name) != value:
            theirs = join.options.get(name, "none")
            return f"another --{name.replace('_', '-')}: {theirs}, node 0 has {value}"
    if join.model != mine.model:
        return "another model than node 0: its files differ"
    if join.purpose != "rank" or not 0 < join.rank < group.size or join.rank in group.here:
        return f"rank {join.rank} of {group.size} is none of another host's"
    each = len(group.here)
    others = [other.join for rank, other in there.items() if rank // each == join.rank // each]
    if join.rank in there or any(other.memory != join.memory for other in others):
        return f"another node with --node-rank {join.rank // each} has joined"
    return ""


def _drop_gone(there: dict[int, Joined]) -> None:
    """A rank that ended while it waited makes room for its next start."""
    for rank, joined in list(there.items()):
        if messages.FrameSocket(joined.sock, JoinRequest).is_hung_up:  # type: ignore[arg-type]
            joined.sock.close()
            del there[rank]


def assemble(group: RankGroup, config: EngineConfig) -> list[FarRank]:
    """Rank 0: wait for the ranks of all other hosts and connect the hosts. Raises ConfigError, GroupError."""
    (family, place), secret = check_options(config)
    listener, mine, there = Listener((family, place), secret), _mine(group, config), dict[int, Joined]()
    missing = f"{config.rendezvous}: node{'s' * (group.nodes > 2)} {', '.join(map(str, range(1, group.nodes)))}"
    logging.getLogger("zse.engine").warning("waiting at %s", missing)
    deadline = time.monotonic() + config.join_timeout
    try:
        while len(there) < group.size - len(group.here):
            if time.monotonic() > deadline:
                why = f"; the last one that came: {listener.refused}" if listener.refused else ""
                absent = sorted(
                    {rank // len(group.here) for rank in range(len(group.here), group.size) if rank not in there}
                )
                nodes = f"node{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
                raise GroupError(f"{nodes} did not join within {config.join_timeout} s (--join-timeout){why}")
            joined = listener.next(0.2)
            _drop_gone(there)
            if joined is None:
                continue
            refused = _refusal(joined.join, mine, group, there)
            if refused:
                listener.note(f"{_peer(joined)}: {refused}")
                _tell(joined, Refusal(refused))
                joined.sock.close()
            else:
                there[joined.join.rank] = joined
        session, firsts = os.urandom(16), range(0, group.size, len(group.here))
        addresses = [("", 0), *((_peer(there[first]), there[first].join.port) for first in firsts[1:])]
        for joined in there.values():
            _tell(joined, Roster(session, addresses))
        _take_links(group, listener, session)
    except BaseException:
        for joined in there.values():
            joined.sock.close()
        raise
    finally:
        listener.close()
    return [FarRank(there[rank], rank // len(group.here)) for rank in sorted(there)]


def _peer(joined: Joined) -> str:
    return joined.sock.sock.getpeername()[0]


def _tell(joined: Joined, message: Any) -> None:
    try:
        joined.sock.sendall(msgspec.msgpack.encode(message))
    except OSError as error:
        raise GroupError(f"rank {joined.join.rank} takes no messages: {error.strerror or error}") from None


def _kinds(group: RankGroup, other: int) -> list[int]:
    """The connections between this host and another: what is sent in the ring goes to the next host alone."""
    is_next = (other - group.node) % group.nodes in (1, group.nodes - 1)
    return [SUMS, STREAM] if group.is_ring and is_next else [SUMS]


def _take_links(group: RankGroup, listener: Listener, session: bytes) -> None:
    """What later hosts connect to the first rank of this one."""
    wanted = {(other, kind) for other in range(group.node + 1, group.nodes) for kind in _kinds(group, other)}
    deadline = time.monotonic() + LINKS_S
    while wanted:
        if time.monotonic() > deadline:
            nodes = sorted({node for node, _ in wanted})
            raise GroupError(f"node {nodes[0]} joined and did not connect to node {group.node} within {LINKS_S:.0f} s")
        joined = listener.next(0.2)
        if joined is None:
            continue
        node, kind = joined.join.rank // len(group.here), {"sums": SUMS, "stream": STREAM}.get(joined.join.purpose, -1)
        if joined.join.session != session or (node, kind) not in wanted:
            listener.note(f"{_peer(joined)}: rank {joined.join.rank} of another start")
            joined.sock.close()
            continue
        wanted.remove((node, kind))
        group.link(node, joined.sock, joined.sock.keys_for(b"links"), kind)


def enter(group: RankGroup, config: EngineConfig, kind: Any) -> messages.FrameSocket:
    """A rank of another host: find rank 0, be let in, connect to other hosts. The connection to rank 0. kind: of what it says. Raises ConfigError where it is
    refused, GroupError where nobody answers."""
    address, secret = check_options(config)
    join, deadline = _mine(group, config), time.monotonic() + config.join_timeout
    is_first, listener = group.rank == group.here[0], None
    if is_first and group.node + 1 < group.nodes:
        listener = Listener((address[0], ("::" if address[0] == socket.AF_INET6 else "0.0.0.0", 0)), secret)
        join.port = listener.port
    try:
        sock, roster = _roster(join, address, secret, deadline, config)
        for other in range(group.node if is_first else 0):
            place = address if not other else (address[0], tuple(roster.addresses[other]))
            for use in _kinds(group, other):
                purpose = ("sums", "stream")[use]
                link = _connected(JoinRequest(group.rank, purpose, session=roster.session), place, secret)
                group.link(other, link, link.keys_for(b"links"), use)
        if listener is not None:
            _take_links(group, listener, roster.session)
    except wire.LinkError as error:
        raise GroupError(f"rank {group.rank}: the connections between hosts failed: {error}") from None
    finally:
        if listener is not None:
            listener.close()
    return messages.FrameSocket(sock, kind)  # type: ignore[arg-type]


def _connected(join: JoinRequest, address: "tuple[int, Any]", secret: bytes) -> wire.SignedSocket:
    signed = wire.SignedSocket(*wire.ask(address, MAGIC, FINGERPRINT, secret, REFUSALS))
    try:
        signed.sendall(msgspec.msgpack.encode(join))
    except OSError as error:
        signed.close()
        raise wire.LinkError(error.strerror or str(error)) from None
    return signed


def _roster(
    join: JoinRequest, address: "tuple[int, Any]", secret: bytes, deadline: float, config: EngineConfig
) -> tuple[wire.SignedSocket, Roster]:
    """Rank 0 may not be there yet, and may end while others are waited for: until the deadline it is asked again."""
    why, where = "", f"node 0 at {config.rendezvous}"
    while time.monotonic() < deadline:
        try:
            signed = _connected(join, address, secret)
            signed.settimeout(max(1.0, deadline - time.monotonic()))
            answer = _decoded(signed.recv(), Roster | Refusal)
            if isinstance(answer, Roster):
                signed.settimeout(wire.SEND_S)
                return signed, answer
            signed.close()
            raise ConfigError(f"rank {join.rank} may not join {where}: {answer.message}")
        except wire.LinkRefused as error:
            raise ConfigError(f"rank {join.rank} may not join {where}: {error}") from None
        except wire.LinkError as error:
            why = str(error)
            time.sleep(RETRY_S)
    failed = GroupError(
        f"rank {join.rank}: {where} did not let it in within {config.join_timeout} s (--join-timeout): {why}"
    )
    failed.code = NOT_JOINED
    raise failed
