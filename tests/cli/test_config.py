"""Configuration: file < environment < command line, in one table; what is wrong is one line that names the place."""

import json
import logging
import re
import sys
from pathlib import Path

import pytest

from zse import log
from zse.cli import main, serve, settings
from zse.errors import ConfigError

FILE = """
[serve]
models = ["smollm2", "qwen3-4b"]
port = 9000
max_context = 4096
idle-timeout = 60
no-prefix-cache = true
"""


@pytest.fixture
def parsed(tmp_path, monkeypatch):
    """A function: arguments of a command from a file's text, variables and words."""
    monkeypatch.setenv("ZSE_HOME", str(tmp_path))
    for switch in ("ZSE_THREADS", "ZSE_API_KEY", "ZSE_LOG", "ZSE_CONFIG"):
        monkeypatch.delenv(switch, raising=False)

    def parse(text, *words, command="serve", mode=0o600, **variables):
        if text is not None:
            (tmp_path / "zse.toml").write_text(text)
            (tmp_path / "zse.toml").chmod(mode)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return settings.parse(command, main.parser_of(command), [*words])

    return parse


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(parsed, tmp_path):
    args = parsed(FILE, "--port", "1", ZSE_SERVE_PORT="2", ZSE_SERVE_MAX_CONTEXT="512")
    assert (args.port, args.max_context, args.idle_timeout, args.max_rows) == (1, 512, 60.0, None)
    assert args.models == ["smollm2", "qwen3-4b"] and args.prefix_cache is False and args.graphs is True
    assert args.sources == {
        "port": "command line",
        "max_context": "ZSE_SERVE_MAX_CONTEXT",
        "models": str(tmp_path / "zse.toml"),
        "idle_timeout": str(tmp_path / "zse.toml"),
        "prefix_cache": str(tmp_path / "zse.toml"),
    }


def test_a_file_may_begin_with_a_bom(parsed):
    assert parsed("\ufeff" + FILE).idle_timeout == 60.0


def test_every_option_can_be_given_in_every_way(parsed):
    """What the file and the environment give is what the parser makes of the same words."""
    for command in settings.COMMANDS:
        for name, action in settings.options(main.parser_of(command)).items():
            if action.nargs == 0:
                text = value = True
            else:
                text = value = _value_for(action)
            toml = f"[{command}]\n{name} = {json.dumps(value)}\n"
            words = [] if command != "run" else ["some-model"]
            filed = parsed(toml, *words, command=command)
            variable = settings.variable(command, name)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(variable, "true" if text is True else str(text))
                told = parsed("", *words, command=command)
            if action.option_strings:
                typed = parsed("", *words, f"--{name}", *([] if text is True else [str(text)]), command=command)
            else:
                typed = parsed("", *words, str(text), command=command)
            assert getattr(filed, action.dest) == getattr(told, action.dest) == getattr(typed, action.dest), name


def _value_for(action):
    if action.choices:
        return list(action.choices)[-1]
    for value in ("3", "0.5", "64", "4096", "2G", "name=2", "text"):
        try:
            action.type(value) if action.type else value
            return value
        except Exception:  # the type's own refusal
            continue
    raise AssertionError(action)


def test_lists_take_the_place_of_those_below(parsed):
    text = '[serve]\nallowed-host = ["a", "b"]\ntenant-weight = ["x=1", "y=2"]\nmodels = "one"\n'
    args = parsed(text)
    assert (args.allowed_host, args.tenant_weights, args.models) == (["a", "b"], "x=1,y=2", ["one"])
    args = parsed(text, "two", "--allowed-host", "c", "--tenant-weight", "z=3")
    assert (args.allowed_host, args.tenant_weights, args.models) == (["c"], "z=3", ["two"])
    args = parsed(text, ZSE_SERVE_ALLOWED_HOST="d,e", ZSE_SERVE_MODELS="three,four")
    assert (args.allowed_host, args.models) == (["d", "e"], ["three", "four"])


def test_a_key_of_a_higher_source_takes_the_place_of_a_key_file(parsed):
    assert parsed('[serve]\napi-key-file = "f"\n', ZSE_SERVE_API_KEY="k").api_key_file is None
    assert parsed('[serve]\napi-key = "k"\n', "--api-key-file", "f", ZSE_SERVE_API_KEY="").api_key is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[serve]\nport = 'x'\n", "zse.toml: [serve] port: 'x' is not a whole number"),
        ("[serve]\nport = true\n", "[serve] port: it takes one text or number"),
        ("[serve]\nport = [1]\n", "[serve] port: it takes one text or number"),
        ("[serve]\nport = 70000\n", "at most 65535"),
        ("[serve]\nprot = 1\n", "[serve] prot is no option of `zse serve`; did you mean port?"),
        ("[serve]\ngraphs = 'yes'\n", "[serve] graphs: it takes true or false"),
        ("[serve]\nmax-rows = 1\nmax-concurrency = 2\n", "stands there by another name"),
        ("[serve]\nquantize = 'int5'\n", "invalid choice: 'int5'"),
        ("[serv]\nport = 1\n", "serv is none of its tables, [serve], [run], [chat]; did you mean serve?"),
        ("port = 1\n", "port is none of its tables"),
        ("[serve\n", "is not TOML"),
        ("[serve]\nx = " + "[" * 5000, "is not TOML"),
        ("[serve]\nport = 1" + "0" * 5000, "is not TOML"),
        ("[serve]\nconfig = 'other'\n", "config is no option"),
        ("# " + "x" * (1 << 20), "larger than 1048576 bytes"),
    ],
)
def test_a_wrong_file_is_refused(parsed, text, words):
    with pytest.raises(ConfigError) as caught:
        parsed(text)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_wrong_variable_is_refused(parsed):
    for name, value, words in (
        ("ZSE_SERVE_PROT", "1", "stands for no option of `zse serve`; did you mean ZSE_SERVE_PORT?"),
        ("ZSE_SERVE_PORT", "tcp://10.0.0.1:80", "ZSE_SERVE_PORT: 'tcp://10.0.0.1:80' is not a whole number"),
        ("ZSE_SERVE_GRAPHS", "maybe", "ZSE_SERVE_GRAPHS: 'maybe' is not true or false"),
    ):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as caught:
            patch.setenv(name, value)
            parsed("")
        assert words in str(caught.value)


def test_a_key_in_a_file_that_others_can_read_is_refused(parsed):
    with pytest.raises(ConfigError, match="chmod 600"):
        parsed('[serve]\napi-key = "sk-1"\n', mode=0o644)
    assert parsed('[serve]\napi-key = "sk-1"\n', mode=0o600).api_key == "sk-1"


def test_the_file_is_found_by_option_variable_and_place(parsed, tmp_path, monkeypatch):
    (tmp_path / "other.toml").write_text("[serve]\nport = 7\n")
    assert parsed("[serve]\nport = 5\n").port == 5
    assert parsed(None, "--config", str(tmp_path / "other.toml")).port == 7
    assert parsed(None, "--config=none").port == 8000
    monkeypatch.setenv("ZSE_CONFIG", str(tmp_path / "other.toml"))
    assert parsed(None).port == 7
    with pytest.raises(ConfigError, match="No such file"):
        parsed(None, "--config", str(tmp_path / "missing.toml"))


def test_without_a_file_nothing_is_read(parsed):
    assert parsed(None).sources == {} and parsed(None).config_path is None
    sys.modules.pop("tomllib", None)
    parsed(None, "--port", "1")
    assert "tomllib" not in sys.modules


def test_config_show(zse, home):
    (home / "zse.toml").write_text('[serve]\napi-key = "sk-secret"\nport = 9000\n')
    (home / "zse.toml").chmod(0o600)
    done = zse("config", "show", "serve", "--max-context", "64")
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert rows["port"] == ["9000", str(home / "zse.toml")] and rows["max-context"] == ["64", "command", "line"]
    assert rows["api-key"][0] == "(set)" and "sk-secret" not in done.stdout and str(home / "zse.toml") in done.stderr
    shown = json.loads(zse("config", "show", "--json").stdout)
    assert shown["options"]["port"] == {"value": 9000, "source": str(home / "zse.toml")}
    assert shown["options"]["host"] == {"value": "127.0.0.1", "source": "default"}
    parser = main.parser_of("serve")
    assert {action.dest for action in settings.options(parser).values()} == {
        settings.options(parser)[name].dest for name in shown["options"]
    }
    assert "ls has no file" in zse("config", "show", "ls", code=2).stderr
    (home / "zse.toml").write_text("[serve]\nprot = 1\n")
    assert "did you mean port?" in zse("serve", code=2).stderr


def test_what_sighup_changes_is_documented():
    parser = main.parser_of("serve")
    names = {dest: name for name, action in reversed(settings.options(parser).items()) for dest in [action.dest]}
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    section = page.split("### SIGHUP", 1)[1].split("\n## ", 1)[0].split("Of any other option", 1)[0]
    assert re.findall(r"`--([a-z-]+)`", section) == sorted(names[dest] for dest in serve.CHANGEABLE)


@pytest.mark.parametrize("name", ["*", "http://app.example", "app.example:8000", "", "a b"])
def test_a_host_name_that_no_request_can_have_is_refused(parsed, name):
    with pytest.raises(ConfigError, match="--allowed-host: .* is no host name"):
        serve._allowed_hosts(parsed("", "--allowed-host", name), False)
    assert serve._allowed_hosts(parsed("", "--allowed-host", "App.example"), False) >= {"app.example", "localhost"}


@pytest.mark.parametrize(("switch", "value"), [("ZSE_LOG", "verbose"), ("ZSE_LOG_FORMAT", "xml")])
def test_a_log_level_or_format_of_the_environment_that_is_none_is_refused(monkeypatch, switch, value):
    handlers = logging.getLogger("zse").handlers[:]
    monkeypatch.setenv(switch, value)
    with pytest.raises(ConfigError, match=f"{switch}={value}: not one of"):
        log.setup()
    assert logging.getLogger("zse").handlers == handlers
