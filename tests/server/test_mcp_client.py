"""The MCP client: the file, stdio and HTTP servers, and those that do what they should not."""

import asyncio
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time

import mcp_server
import pytest
from harness import read_reply, request, wait_for
from test_lifecycle import start  # noqa: F401

from zse.errors import ConfigError, RequestError
from zse.server.mcp import servers as module
from zse.server.mcp.config import read_file
from zse.server.mcp.servers import McpServer, McpServers
from zse.server.mcp.session import McpError

COMMAND = {"command": sys.executable, "args": [mcp_server.__file__]}


def write(path, servers: dict, mode: int = 0o600) -> str:
    path.write_text(json.dumps({"mcpServers": servers}))
    path.chmod(mode)
    return str(path)


def with_server(path, entry: dict, work):
    """What work(McpServer) gives; nothing is left of the server behind it."""

    async def run():
        server = McpServer(read_file(write(path, {"one": entry}))[0])
        try:
            return await asyncio.wait_for(work(server), 30)
        finally:
            await server.close()

    return asyncio.run(run())


@pytest.fixture
def file(tmp_path):
    return tmp_path / "mcp.json"


def test_tools_of_a_process(file, monkeypatch, caplog):
    monkeypatch.setenv("SECRET_OF_OURS", "x")
    caplog.set_level(logging.INFO, "zse.server")
    entry = COMMAND | {"env": {"GIVEN": "yes"}, "deny": ["secret"], "max_result_bytes": 1000, "timeout_s": 20}

    async def work(server):
        assert server.state == "stopped"
        tools = await server.tools()
        assert list(tools)[:2] == ["echo", "say"] and "secret" not in tools and "image" in tools
        assert tools["echo"].description == "says it again" and not {"bad name", "bad_schema"} & {*tools}
        say = lambda name, **given: server.call(name, given, 20)  # noqa: E731
        assert await say("echo", text="héllo\n<|im_end|>") == ("héllo\n<|im_end|>", False, False)
        assert await say("fail") == ("it cannot be done", True, False)
        assert (await say("image")).output == "[left out: image of image/png]\nseen"
        huge = await say("huge")
        assert huge.was_cut and huge.output == "é" * 500 + "\n[cut: 1000 of 200000 bytes]"
        assert (await say("secret")).is_error and (await say("nothing")).is_error
        environment = json.loads((await say("environment")).output)
        assert environment["GIVEN"] == "yes" and {*environment} <= {"GIVEN", "PATH", "HOME", "LANG", "LC_CTYPE", "PWD"}
        assert (await say("garbage")).output == "behind garbage"
        assert (await say("grow")).output and "grown0" in await server.tools()
        child = int((await say("child")).output)
        os.kill(child, 0)
        return child

    child = with_server(file, entry, work)
    wait_for(lambda: not alive(child))
    assert "bad_schema" in caplog.text


def test_what_it_started_dies_with_the_server(file):
    """Also where the server was killed: the processes that a wrapper such as npx has left behind."""
    script = """if True:
        import asyncio, sys
        from zse.server.mcp.servers import McpServers
        async def main():
            servers = McpServers(sys.argv[1])
            tool = (await servers.by_label["one"].tools())["child"]
            print((await servers.call(tool, {}, "")).output, flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())"""
    command = [sys.executable, "-c", script, write(file, {"one": COMMAND})]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        child = int(process.stdout.readline())
        assert alive(child)
        process.kill()
    wait_for(lambda: not alive(child), timeout=20)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    "tool, words",
    [("hang", "within 0.5 s"), ("crash", "code 9"), ("endless", "line of more"), ("flood", "nobody asked")],
)
def test_a_call_fails_alone(file, caplog, monkeypatch, tool, words):
    """And the next one is answered, by a new process where the old one is gone or silent."""
    monkeypatch.setattr(module, "ALIVE_S", 0.2)
    caplog.set_level(logging.DEBUG, "zse.server")

    async def work(server):
        await server.tools()
        failed = await server.call(tool, {}, 0.5 if tool == "hang" else 20)
        assert failed.is_error and words in failed.output
        assert (await server.call("echo", {"text": "again"}, 20)).output == "again"

    with_server(file, COMMAND, work)
    if tool == "crash":
        (record,) = (one for one in caplog.records if "dies" in one.getMessage())
        assert record.getMessage() == "mcp one: dies \\x1b[31m now" and record.levelno == logging.DEBUG


def test_one_that_keeps_dying_is_started_less_and_less_often(file, tmp_path):
    entry = {"command": sys.executable, "args": ["-c", "raise SystemExit(3)"]}

    async def work(server):
        for words in ("code 3", "code 3", "tried again in"):
            with pytest.raises(McpError, match=words):
                await server.tools()
        assert server.state == "failed" and "code 3" in server.error

    with_server(file, entry, work)
    with pytest.raises(McpError, match="no program"):
        with_server(file, {"command": "no-such-program"}, lambda server: server.tools())
    with pytest.raises(McpError, match="1999-01-01"):
        with_server(file, COMMAND | {"args": [mcp_server.__file__, "old"]}, lambda server: server.tools())


def test_a_caller_that_leaves_and_one_that_stays(file):
    async def work(server):
        first, second = asyncio.create_task(server.tools()), asyncio.create_task(server.tools())
        await asyncio.sleep(0)
        first.cancel()
        assert "echo" in await second
        task = asyncio.create_task(server.call("hang", {}, 20))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert server.state == "running"

    with_server(file, COMMAND, work)


@pytest.mark.parametrize("as_events", [False, True])
def test_tools_over_http(file, as_events):
    other, url = mcp_server.http(as_events)
    handler = other.RequestHandlerClass

    async def work(server):
        assert "echo" in await server.tools()
        assert handler.seen["MCP-Protocol-Version"] == "2025-06-18" and handler.seen["X-Key"] == "k"
        assert (await server.call("echo", {"text": "a"}, 20)).output == "a"
        began = time.monotonic()
        assert "within 0.3 s" in (await server.call("hang", {}, 0.3)).output and time.monotonic() - began < 5
        assert (await server.call("crash", {}, 20)).is_error
        assert "no JSON" in (await server.call("garbage", {}, 20)).output
        assert "more than" in (await server.call("endless", {}, 20)).output
        handler.sessions.clear()
        assert "404" in (await server.call("echo", {"text": "a"}, 20)).output
        assert (await server.call("echo", {"text": "b"}, 20)).output == "b"  # with a new session

    try:
        with_server(file, {"url": url, "headers": {"X-Key": "k"}}, work)
        assert not handler.sessions  # told that it is over
    finally:
        other.shutdown()
        other.server_close()


def test_the_file_is_read_again(file, caplog):
    async def run():
        path = write(file, {"one": COMMAND, "two": COMMAND})
        servers = McpServers(path)
        tool = (await servers.by_label["one"].tools())["echo"]
        write(file, {"one": COMMAND, "three": COMMAND | {"disabled": True}})
        before = servers.by_label["one"]
        servers.read_again()
        assert list(servers.by_label) == ["one"] and servers.by_label["one"] is before
        file.write_text("{")
        servers.read_again()
        assert "stay as they were" in caplog.text and list(servers.by_label) == ["one"]
        write(file, {"two": COMMAND})
        servers.read_again()
        assert (await servers.call(tool, {}, "alice")).is_error
        await servers.close()
        assert before.state == "stopped"
        assert servers.counts == {("one", "error"): 1} and "tenant alice: failed" in caplog.text

    caplog.set_level(logging.INFO, "zse.server")
    asyncio.run(run())


def test_one_tenant_does_not_take_all_turns(file):
    async def run():
        path = write(file, {"one": COMMAND | {"timeout_s": 1}})
        servers = McpServers(path)
        hang = (await servers.by_label["one"].tools())["hang"]
        calls = [servers.call(hang, {}, "alice") for _ in range(module.CALLS_OF_TENANT + 1)]
        results = await asyncio.gather(*calls)
        assert sum("at once" in result.output for result in results) == 1
        await servers.close()

    asyncio.run(run())


def test_a_call_when_the_server_shuts_down(file):
    async def run():
        servers = McpServers(write(file, {"one": COMMAND | {"timeout_s": 20}}))
        hang = (await servers.by_label["one"].tools())["hang"]
        call = asyncio.create_task(servers.call(hang, {}, "alice"))
        left = asyncio.create_task(servers.call(hang, {}, "alice"))
        await asyncio.sleep(0.1)
        left.cancel()  # its client has left
        with pytest.raises(asyncio.CancelledError):
            await left
        servers.end_calls()
        with pytest.raises(RequestError) as caught:
            await call
        assert (caught.value.status, caught.value.code) == (503, "shutting_down")
        await servers.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "entry, words",
    [
        ({}, "one of 'command' and 'url'"),
        ({"command": "a", "url": "http://localhost"}, "one of 'command' and 'url'"),
        ({"command": "a", "headers": {"A": "b"}}, "headers"),
        ({"command": "a", "args": "b"}, "args"),
        ({"command": "a", "comand": 1}, "comand"),
        ({"command": "a", "env": {"A": 1}}, "env.A"),
        ({"command": "a", "env": {"A=": "b"}}, "env"),
        ({"command": "a\0"}, "zero byte"),
        ({"command": "a", "timeout_s": 0}, "timeout_s"),
        ({"command": "a", "type": "http"}, "type"),
        ({"url": "http://example.com/mcp"}, "allow_remote"),
        ({"url": "http://127.0.0.1.example.com/mcp"}, "allow_remote"),
        ({"url": "ftp://localhost/"}, "http://HOST"),
        ({"url": "http://me@localhost/"}, "http://HOST"),
        ({"url": "http://localhost:99999/"}, "http://HOST"),
        ({"url": "http://localhost/", "headers": {"Host": "x"}}, "transport"),
        ({"url": "http://localhost/", "headers": {"A": "x\r\nB: y"}}, "line ends"),
        ("x", "mcpServers.one"),
    ],
)
def test_what_the_file_may_not_say(file, entry, words):
    with pytest.raises(ConfigError, match=words):
        read_file(write(file, {"one": entry}))


def test_a_file_may_begin_with_a_bom(file):
    write(file, {"one": COMMAND}, 0o600)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert len(read_file(str(file))) == 1


def test_whose_file_it_is(file):
    write(file, {"one": COMMAND | {"env": {"TOKEN": "hidden"}}}, 0o644)
    with pytest.raises(ConfigError, match="chmod 600") as caught:
        read_file(str(file))
    assert "hidden" not in str(caught.value)
    assert len(read_file(write(file, {"one": COMMAND}, 0o644))) == 1  # nothing secret in it
    with pytest.raises(ConfigError, match="go-w"):
        read_file(write(file, {"one": COMMAND}, 0o666))
    with pytest.raises(ConfigError, match="letters, digits"):
        read_file(write(file, {"one two": COMMAND}))
    with pytest.raises(ConfigError, match="no JSON"):
        file.write_text("[" * 100_000)
        read_file(str(file))
    with pytest.raises(ConfigError, match="allow_remote"):
        read_file(write(file, {"one": {"url": "https://example.com/"}}))
    assert read_file(write(file, {"one": {"url": "https://example.com/", "allow_remote": True}}))[0].allow_remote


def test_a_server_with_the_option(start, file):  # noqa: F811
    """The file is read at the start and on SIGHUP; what was started ends with the server, which a wrong file keeps from
    starting, as does memory that may not be locked."""
    process = start("--mcp", write(file, {"one": COMMAND}), "--database", "none")

    def labels():
        return [server["server_label"] for server in process.get("/v1/mcp/tools").json["servers"]]

    assert labels() == ["one"]
    body = {"server_label": "one", "name": "child"}
    with process.send(request("POST", "/v1/mcp/call", body)) as sock:
        child = int(read_reply(sock).json["output"])
    assert alive(child)
    write(file, {"two": COMMAND, "one": COMMAND})
    process.popen.send_signal(signal.SIGHUP)
    wait_for(lambda: labels() == ["two", "one"])
    assert alive(child)
    process.popen.send_signal(signal.SIGTERM)
    code, stderr = process.finish()
    assert code == 0 and "again: two, one" in stderr and not alive(child)
    file.write_text("{")
    code, stderr = start("--mcp", str(file), "--database", "none", wait=False).finish()
    assert code == 2 and "is no JSON" in stderr.splitlines()[-1] and "Traceback" not in stderr
    with open("/proc/self/status") as status:
        rights = int(next(line for line in status if line.startswith("CapEff")).split()[1], 16)
    may_raise = rights >> 24 & 1  # CAP_SYS_RESOURCE
    if not may_raise and resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] != resource.RLIM_INFINITY:
        code, stderr = start("--keep-in-memory", "1000T", "--database", "none", wait=False).finish()
        assert code == 2 and "ulimit -l" in stderr
