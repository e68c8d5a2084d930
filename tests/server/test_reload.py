"""SIGHUP: the configuration is read again; what can change does, the rest is named and waits."""

import json
import signal
import time

import pytest
from harness import chat_body, read_reply, request, wait_for
from test_lifecycle import start  # noqa: F401
from test_stored_keys import zse_keys


@pytest.fixture
def configured(start, tmp_path):  # noqa: F811
    """A server with a configuration file, and a function that writes another one, sends SIGHUP and waits for its lines."""
    path = tmp_path / "zse.toml"
    path.write_text("[serve]\nlog-level = 'warning'\n")

    def make(text="", *options, **settings):
        if text:
            path.write_text(text)
        return start("--config", str(path), *options, **settings)

    def write(process, text):
        path.write_text(text)
        process.popen.send_signal(signal.SIGHUP)

    return make, write


def test_a_limit_changes_while_the_server_runs(configured):
    make, write = configured
    process = make("[serve]\nmax-body-bytes = 2048\nmax-rows = 4\n", "--log-level", "warning")
    long = chat_body("x" * 4000)
    assert process.chat("x" * 4000).status == 413
    with process.send(request("POST", "/v1/chat/completions", chat_body("!tokens=60 !ms=10", stream=True))) as stream:
        write(process, "[serve]\nmax-body-bytes = 1000000\nmax-rows = 8\nport = 1\n")
        wait_for(lambda: process.get("/health/live").status == 200)

        def taken():
            with process.send(request("POST", "/v1/chat/completions", long)) as sock:
                return read_reply(sock).status == 200

        wait_for(taken)
        assert read_reply(stream).events[-1] == "[DONE]"  # what runs goes on
    process.popen.send_signal(signal.SIGTERM)
    code, stderr = process.finish()
    assert code == 0 and "took --max-body-bytes 2048 -> 1000000" in stderr
    assert "--max-rows 4 -> 8 waits for a restart" in stderr
    assert "--port" not in stderr  # it stands on the command line, which wins


def test_keys_and_hosts_change(configured, tmp_path):
    make, write = configured
    process = make()
    assert process.get("/v1/models").status == 200
    write(process, "[serve]\napi-key = 'sk-1'\nany-model-name = true\n")  # others can read it: 0644
    time.sleep(0.3)
    assert process.get("/v1/models").status == 200
    (tmp_path / "zse.toml").chmod(0o600)
    process.popen.send_signal(signal.SIGHUP)
    wait_for(lambda: process.get("/v1/models").status == 401)
    with process.send(request("GET", "/v1/models", None, {"authorization": "Bearer sk-1"})) as sock:
        assert read_reply(sock).status == 200
    write(process, "[serve]\nallowed-host = ['my.name']\n")
    wait_for(lambda: process.get("/v1/models").status == 200)
    with process.send(request("GET", "/v1/models", None, {"host": "my.name"})) as sock:
        assert read_reply(sock).status == 200
    process.popen.send_signal(signal.SIGTERM)
    code, stderr = process.finish()
    assert code == 0 and "the configuration stays as it was" in stderr and "chmod 600" in stderr
    assert "took --api-key" in stderr and "sk-1" not in stderr


def test_a_file_with_a_mistake_changes_nothing(configured):
    make, write = configured
    process = make()
    write(process, "[serve]\nmax-body-bytes = 1024\nprot = 3\n")
    write(process, "[serve]\n")
    assert process.chat("x" * 4000).status == 200
    process.popen.send_signal(signal.SIGTERM)
    assert process.finish()[0] == 0


def test_a_server_for_others_keeps_its_keys(configured, tmp_path):
    """A file without its key would open the server: it is refused as at a start."""
    make, write = configured
    (tmp_path / "zse.toml").chmod(0o600)
    process = make("[serve]\napi-key = 'sk-1'\n", "--host", "0.0.0.0")
    write(process, "[serve]\n")
    time.sleep(0.3)
    assert process.get("/v1/models").status == 401
    process.popen.send_signal(signal.SIGTERM)
    code, stderr = process.finish()
    assert code == 0 and "the configuration stays as it was: --host 0.0.0.0 can be reached" in stderr


def test_the_keys_of_a_database_stay(configured, tmp_path):
    make, write = configured
    path = str(tmp_path / "server.db")
    key = zse_keys(path, "create", "a")
    process = make("", "--database", path)

    def status(key: str) -> int:
        with process.send(request("GET", "/v1/models", None, {"authorization": f"Bearer {key}"})) as sock:
            return read_reply(sock).status

    assert [status(key), status("sk-1")] == [200, 401]
    (tmp_path / "zse.toml").chmod(0o600)
    write(process, "[serve]\napi-key = 'sk-1'\ndatabase = 'none'\n")
    wait_for(lambda: status("sk-1") == 200)
    assert status(key) == 200
    write(process, "[serve]\n")
    wait_for(lambda: status("sk-1") == 401)
    zse_keys(path, "revoke", "a")
    wait_for(lambda: status(key) == 401, 2)


def test_the_log_changes(configured):
    make, write = configured
    process = make("[serve]\nlog-level = 'error'\n")
    assert process.chat("one").status == 200
    write(process, "[serve]\nlog-level = 'info'\nlog-format = 'json'\n")
    time.sleep(0.3)
    assert process.chat("two").status == 200
    write(process, "[serve]\nlog-level = 'error'\n")
    time.sleep(0.3)
    assert process.chat("three").status == 200
    process.popen.send_signal(signal.SIGTERM)
    code, stderr = process.finish()
    lines = [json.loads(line) for line in stderr.splitlines() if line.startswith("{")]
    assert code == 0 and sum("request_id" in line for line in lines) == 1 and "/v1/chat" not in stderr.split("{")[0]
