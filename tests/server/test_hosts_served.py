"""`zse serve --nnodes 2` with real processes on both "hosts": what a client sees when a rank, a node or the engine is killed in the
middle of an answer, and that all come back."""

import os
import signal
import socket
import subprocess
import sys
import threading
from urllib.parse import urlsplit

import pytest
import tiny_model
import tiny_text
from harness import request, wait_for
from test_ranks_served import BODY, ask, children, is_running, text_of, until_ready

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


class Service:
    """Node 0 and node 1 of a model, started by the same command."""

    def __init__(self, home, *options: str):
        model = tiny_model.write(home / "models" / "one")
        tiny_text.write(model)
        secret = home / "group.secret"
        secret.write_text("0123456789abcdef")
        secret.chmod(0o600)
        with socket.create_server(("127.0.0.1", 0)) as server:
            place = f"127.0.0.1:{server.getsockname()[1]}"
        self.command = [
            sys.executable,
            "-m",
            "zse",
            "serve",
            "one",
            "--port",
            "0",
            "--device",
            "cpu",
            "--threads",
            "1",
            *options,
        ]
        self.command += ["--nnodes", "2", "--rendezvous", place, "--group-secret", str(secret), "--join-timeout", "60"]
        self.environment, self.said = os.environ | {"ZSE_HOME": str(home)}, {}
        self.nodes = {1: self.start(1), 0: self.start(0)}
        line = self.nodes[0].stdout.readline()
        assert " on http://" in line, self.said
        where = urlsplit(line.split(" on ")[1].split()[0])
        self.address = (where.hostname, where.port)

    def start(self, node: int) -> subprocess.Popen:
        process = subprocess.Popen(
            [*self.command, "--node-rank", str(node)],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        lines = self.said.setdefault(node, [])
        threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True).start()
        return process

    def rank(self, node: int) -> int:
        """The process that computes on this node."""
        (found,) = children(self.nodes[node].pid)
        return found

    def close(self) -> None:
        for process in self.nodes.values():
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.fixture(params=["--tp", "--pp"])
def service(request, tmp_path):
    made = Service(tmp_path, request.param, "2")
    yield made
    made.close()


def cut_off(service: Service, kill) -> bytes:
    """What a stream has seen whose engine ended behind its first token."""
    with socket.create_connection(service.address, timeout=30) as sock:
        sock.sendall(request("POST", "/v1/completions", BODY | {"stream": True, "max_tokens": 240}))
        begun = sock.recv(4096)
        while b"data:" not in begun:
            begun += sock.recv(4096)
        kill()
        while data := sock.recv(1 << 16):
            begun += data
            if data.endswith(b"0\r\n\r\n"):
                break
    return begun


def test_a_node_that_dies_is_told_and_comes_back(service):
    wanted = text_of(ask(service.address))
    gone = []

    def kill(pid: int) -> None:
        gone.append(pid)
        os.kill(pid, signal.SIGKILL)

    def kill_node() -> None:
        gone.append(service.rank(1))
        service.nodes[1].kill()
        service.nodes[1].wait()

    victims = {"rank": lambda: kill(service.rank(1)), "engine": lambda: kill(engine(service)), "node": kill_node}
    for name, victim in victims.items():
        assert b"engine_restarting" in cut_off(service, victim), name
        wait_for(lambda: not any(map(is_running, gone)))  # a node's ranks end with it
        if name == "node":
            service.nodes[1] = service.start(1)
        until_ready(service.address)
        assert text_of(ask(service.address)) == wanted, name
    last = [engine(service), service.rank(1)]
    for node in (0, 1):
        service.nodes[node].send_signal(signal.SIGTERM)
        assert service.nodes[node].wait(20) == 0
    wait_for(lambda: not any(map(is_running, last)))
    first, second = "".join(service.said[0]), "".join(service.said[1])
    assert f"rank 1 (process {gone[0]}) on node 1 has ended, or cannot be reached" in first
    assert f"zse node 1: rank 1 (process {gone[0]}) was killed by signal 9; joining again" in second
    assert "Traceback" not in first + second


def engine(service: Service) -> int:
    found = [pid for pid in children(service.nodes[0].pid)]
    return min(found)  # forked first


def test_options_that_other_hosts_cannot_follow(tmp_path):
    command = [sys.executable, "-m", "zse", "serve", "one", "--tp", "2", "--nnodes", "2", "--idle-timeout", "5"]
    model = tiny_model.write(tmp_path / "models" / "one")
    tiny_text.write(model)
    done = subprocess.run(command, env=os.environ | {"ZSE_HOME": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 2 and "--idle-timeout is not possible with --nnodes 2" in done.stderr
