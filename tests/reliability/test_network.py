"""The network is used where the user asked for it, and nowhere else: `zse pull` (or a name that is to be fetched) and `zse bench --url`.

Every process of a command tells what it connects to and which names it looks up (Python's audit events), and the commands answer
in a network namespace that has a loopback and no route."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
SOURCE = HERE.parent / "src" / "zse"
sys.path[:0] = [str(HERE / folder) for folder in ("engine", "structured")]
import tiny_model  # noqa: E402
import tiny_text  # noqa: E402

del sys.path[:2]

# In every process of a command, by sitecustomize. What leaves the machine begins with one of these events.
TELL = """
import os, sys
def tell(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"):
        said = arguments[1] if event in ("socket.connect", "socket.sendto", "socket.sendmsg") else arguments[:2]
        with open({place!r}, "a") as file:
            file.write(f"{{event}} {{said!r}}\\n")
sys.addaudithook(tell)
"""
# Run in a fresh namespace: its loopback is down. SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP.
LOOPBACK = """
import fcntl, os, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    name, flags = struct.unpack("16sh", fcntl.ioctl(any_socket, 0x8913, struct.pack("16sh", b"lo", 0)))
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", name, flags | 1))
    try:
        any_socket.connect(("1.1.1.1", 53))
        sys.exit("there is a route")
    except OSError:
        pass
os.execvp(sys.argv[1], sys.argv[1:])
"""
ASK = """
import http.client, json, re, subprocess, sys
server = subprocess.Popen([sys.executable, "-m", "zse", "serve", *sys.argv[1:]], stdout=subprocess.PIPE, text=True)
try:
    port = next(int(found[1]) for line in server.stdout if (found := re.search(r"curl -N http://[^/]*:(\\d+)/", line)))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "ignore_eos": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    print("ANSWER", json.loads(connection.getresponse().read())["usage"]["completion_tokens"])
finally:
    server.terminate()
    server.communicate(timeout=60)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tiny_model.write(tmp_path_factory.mktemp("model") / "tiny")
    tiny_text.write(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def told(tmp_path):
    """(environment of a command, a function that gives the lines that its processes told)."""
    (tmp_path / "sitecustomize.py").write_text(TELL.format(place=str(tmp_path / "told")))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
        "ZSE_HOME": str(tmp_path / "home"),
        "HF_ENDPOINT": "http://127.0.0.1:9",  # nothing listens there: a pull is told and goes nowhere
    }
    environment.pop("HF_HUB_OFFLINE", None)
    return environment, lambda: (tmp_path / "told").read_text().splitlines() if (tmp_path / "told").exists() else []


def commands(model: Path) -> dict[str, tuple[list[str], str]]:
    """What is tried: name → (program, its input)."""
    zse = [sys.executable, "-m", "zse"]
    options = ["--device", "cpu", "--threads", "1", "--max-tokens", "3"]
    return {
        "run": ([*zse, "run", str(model), *options, "Hello"], ""),
        "chat": ([*zse, "chat", str(model), *options], "Hello\n"),
        "serve": ([sys.executable, "-c", ASK, str(model), "--port", "0", "--device", "cpu", "--threads", "1"], ""),
        "offline": ([sys.executable, "-c", f"from zse import LLM, SamplingParams\nprint(LLM({str(model)!r}, threads=1)"
                     ".generate(['Hello'], SamplingParams(max_tokens=3)))"], ""),
        "ls": ([*zse, "ls"], ""),
        "doctor": ([*zse, "doctor"], ""),
        "convert": ([*zse, "convert", str(model), str(model.parent / "tiny.zse"), "--force"], ""),
        "verify": ([*zse, "verify", str(model)], ""),
    }  # fmt: skip


@pytest.fixture(scope="module")
def namespace() -> list[str]:
    """The beginning of a command line that runs the rest without a route."""
    unshare = shutil.which("unshare")
    for options in (["-n"], ["-rn"]):
        command = [unshare or "", *options, sys.executable, "-c", LOOPBACK]
        if unshare and subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    pytest.skip("this user can make no network namespace")


@pytest.mark.parametrize("name", ["run", "chat", "serve"])
def test_it_answers_without_a_route(name, namespace, model, told):
    command, typed = commands(model)[name]
    done = subprocess.run([*namespace, *command], input=typed, env=told[0], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    if name == "serve":
        assert "ANSWER 3" in done.stdout


@pytest.mark.parametrize("name", ["run", "chat", "serve", "offline", "ls", "doctor", "convert", "verify"])
def test_nothing_connects_that_was_not_asked_to(name, model, told):
    environment, lines = told
    command, typed = commands(model)[name]
    done = subprocess.run(command, input=typed, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    # The test's own client asks the server; the server looks up the address that it binds.
    here = re.compile(r"socket\.(connect|getaddrinfo) \(b?'127\.0\.0\.1', \d+\)")
    assert [line for line in lines() if name != "serve" or not here.fullmatch(line)] == []


@pytest.mark.parametrize("command", ["pull", "run"])
def test_what_was_asked_for_connects(command, told):
    """The same ears hear a pull, and a name that is to be fetched."""
    environment, lines = told
    arguments = [sys.executable, "-m", "zse", command, "hf:org/name", *(["Hello"] if command == "run" else [])]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "the download failed" in done.stderr
    assert "socket.connect ('127.0.0.1', 9)" in lines()


CLIENTS = {"ssl", "urllib.request", "http.client", "ftplib", "smtplib", "xmlrpc", "requests", "httpx", "aiohttp"}


def test_three_modules_of_the_product_have_a_client():
    """One for hubs, one for commands that talk to a server of ours (plain HTTP, no redirects), one for MCP servers that the operator's
    file names, on this machine unless the file says otherwise; beside the benchmark, which asks a server that the user names."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        imports = [line for line in text.splitlines() if line.lstrip().startswith(("import ", "from "))]
        if not any(name.partition(".")[0] in line for name in CLIENTS for line in imports):
            continue  # to parse all modules took 7 s
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            if CLIENTS & {*names, *(name.partition(".")[0] for name in names)}:
                found.add(path.relative_to(SOURCE).as_posix())
    clients = {"formats/hub_client.py", "cli/remote.py", "server/mcp/http.py"}
    assert {place for place in found if not place.startswith("bench/")} == clients
