"""zse launch: the form of every agent's settings, what --write does to files, and that clients with these settings reach the server."""

import json
import os
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from zse.cli import main
from zse.cli.agents import AGENTS, Endpoint, exports

sys.path.append(str(Path(__file__).parents[1] / "server"))

from harness import Harness  # noqa: E402

TARGET = Endpoint("http://127.0.0.1:8000", "hf:org/na me", "k'ey $x", 4096)
READERS = {".json": json.loads, ".toml": tomllib.loads, ".yaml": yaml.safe_load, ".yml": yaml.safe_load}


def strings(value) -> set[str]:
    if isinstance(value, dict):
        return {*value} | set().union(*map(strings, value.values()))
    return set().union(*map(strings, value)) if isinstance(value, list) else {value} if type(value) is str else set()


@pytest.mark.parametrize("name", AGENTS)
def test_form(name):
    """A file reads back as what was meant, a shell reads the variables, and address, model and key are in what is told."""
    agent = AGENTS[name]
    settings = agent.settings(TARGET)
    assert agent.docs.startswith("https://") and (settings.env or settings.path or settings.panel)
    if settings.path:
        assert READERS[Path(settings.path).suffix](settings.text()) == settings.value
    if settings.env:
        line = exports(settings.env) + "".join(f'printf "%s\\0" "${key}";' for key in settings.env)
        done = subprocess.run(["sh", "-ec", line], capture_output=True, text=True, check=True)
        assert done.stdout.split("\0")[:-1] == list(settings.env.values())
    told = strings(settings.value or {}) | {*settings.env.values()} | {*settings.panel.values()} | {settings.start}
    assert any(text.startswith(TARGET.url) for text in told)
    assert any(TARGET.model in text for text in told) or name in ("open-webui", "openai")
    # Where the file has only the name of a variable, that one is told.
    references = {text.strip("${}").removeprefix("env:") for text in told if "ZSE_CLIENT_KEY" in text}
    assert TARGET.key in told or name == "ollama"
    assert references <= settings.env.keys()


def test_files_by_their_documentation():
    codex = AGENTS["codex"].settings(TARGET).value
    provider = codex["model_providers"][codex["model_provider"]]
    assert provider["wire_api"] == "responses" and provider["base_url"].endswith("/v1") and "env_key" in provider
    opencode = AGENTS["opencode"].settings(TARGET).value
    provider, _, model = opencode["model"].partition("/")
    assert opencode["provider"][provider]["models"][model]["limit"]["context"] == 4096
    assert AGENTS["claude"].settings(TARGET).value["env"]["ANTHROPIC_BASE_URL"] == TARGET.url  # it adds /v1 itself
    [chat] = AGENTS["continue"].settings(TARGET).value["models"]
    assert chat["provider"] == "openai" and chat["apiBase"] == TARGET.base
    [endpoint] = AGENTS["librechat"].settings(TARGET).value["endpoints"]["custom"]
    assert {"name", "apiKey", "baseURL", "models"} <= endpoint.keys() and endpoint["models"]["default"]


@pytest.fixture(scope="module")
def server():
    made = Harness(key="s3cret")
    yield made
    made.close()


@pytest.fixture
def zse(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def run(*words, code=0):
        assert main.main(["launch", *words, "--server", server.base, "--api-key", "s3cret"]) == code
        said = capsys.readouterr()
        return said.out if code == 0 else said.err

    return run


def variables(text: str) -> dict[str, str]:
    done = subprocess.run(
        ["sh", "-ec", text + "env -0"], capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]}
    )
    return dict(pair.split("=", 1) for pair in done.stdout.split("\0")[:-1])


def test_clients_with_the_variables_reach_the_server(zse, monkeypatch):
    import anthropic  # here: three seconds in each process that collects tests
    import ollama
    import openai

    for agent in ("openai", "claude"):
        for name, value in variables(zse(agent, "--env")).items():
            if name.startswith(("OPENAI_", "ANTHROPIC_")):
                monkeypatch.setenv(name, value)
    messages = [{"role": "user", "content": "hi"}]
    with openai.OpenAI() as client:
        assert client.chat.completions.create(model="fake", messages=messages).choices[0].message.content == "hi"
    with anthropic.Anthropic() as client:
        model = os.environ["ANTHROPIC_MODEL"]
        assert client.messages.create(model=model, max_tokens=9, messages=messages).content[0].text == "hi"
    host = variables(zse("ollama", "--env"))["OLLAMA_HOST"]
    client = ollama.Client(host=host, headers={"authorization": "Bearer s3cret"})
    assert client.chat("fake", messages).message.content == "hi"


def test_what_is_printed(zse, server):
    text = zse("codex")
    assert "~/.codex/zse.config.toml" in text and server.base in text and text.endswith("codex --profile zse\n")
    assert "Base URL: " + server.base in zse("cline") and "API Provider: OpenAI Compatible" in zse("cline")
    assert "model_context_window = 4096" in text


def test_files_are_written_and_what_was_there_stays(zse, tmp_path):
    assert f"wrote {tmp_path}/.codex/zse.config.toml" in zse("codex", "--write")
    path = tmp_path / ".codex" / "zse.config.toml"
    assert tomllib.loads(path.read_text())["model"] == "fake" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "is there already" in zse("codex", "--write", code=2)
    settings = tmp_path / ".claude" / "settings.json"
    settings.parent.mkdir()
    settings.write_text('{"theme": "dark", "env": {"A": "1", "ANTHROPIC_MODEL": "x"}}')
    zse("claude", "fake", "--write")
    value = json.loads(settings.read_text())
    assert value["theme"] == "dark" and value["env"]["A"] == "1" and value["env"]["ANTHROPIC_MODEL"] == "fake"
    settings.write_text("{// mine\n}")
    assert "not JSON that can be added to" in zse("claude", "--write", code=2)
    assert settings.read_text() == "{// mine\n}" and [each.name for each in settings.parent.iterdir()] == [
        "settings.json"
    ]
    zse("aider", "--write")
    assert yaml.safe_load((tmp_path / ".aider.conf.yml").read_text())["model"] == "openai/fake"


def test_what_is_refused(zse):
    assert "serves no model other; it serves: fake" in zse("claude", "other", code=2)
    assert "has no settings file" in zse("cline", "--write", code=2)
    assert "takes no variables" in zse("cline", "--env", code=2)
    assert "claude" in zse("clippy", code=2)
