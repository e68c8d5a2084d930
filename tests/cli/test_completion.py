"""Completions: each shell that is there is asked what it offers; the scripts name every option of every command."""

import os
import pty
import re
import select
import shutil
import subprocess
import time

import pytest

from zse.cli import completion, main

SHELLS = ("bash", "zsh", "fish")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completions")
    printed = {"bash": completion._bash, "zsh": completion._zsh, "fish": completion._fish}
    for shell, make in printed.items():
        (folder / shell).write_text(make(completion.places()))
    (folder / "home/models/my-model").mkdir(parents=True)
    return folder


def of_bash(scripts, lines):
    calls = "\n".join(
        f'COMP_WORDS=({" ".join(map(repr, line))}); COMP_CWORD={len(line) - 1}; _zse 2>/dev/null; echo "${{COMPREPLY[@]}}"'
        for line in lines
    )
    done = subprocess.run(
        ["bash", "-c", f"source {scripts}/bash\n{calls}"],
        env={**os.environ, "ZSE_HOME": str(scripts / "home")},
        capture_output=True,
        text=True,
        check=True,
    )
    return [set(line.split()) for line in done.stdout.splitlines()]


def of_fish(scripts, lines):
    calls = "\n".join(f'complete -C "{" ".join(line)}"; echo "== end"' for line in lines)
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source {scripts}/fish\n{calls}"],
        env={**os.environ, "ZSE_HOME": str(scripts / "home"), "HOME": str(scripts)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr
    parts = done.stdout.split("== end\n")[:-1]
    return [{row.partition("\t")[0] for row in part.splitlines()} for part in parts]


# What a completion adds is printed instead of shown; the shell ends with the first one.
ZSH = r"""
PROMPT=
autoload -U compinit && compinit -u -d DUMP
source SCRIPT
bindkey '^I' complete-word
begin () { echo -E - "<<<" }
finish () { echo -E - ">>>"; exit }
compprefuncs=( begin )
comppostfuncs=( finish )
compadd () {
    if [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\ * ]]; then
        builtin compadd "$@"
        return $?
    fi
    typeset -a __hits
    builtin compadd -A __hits "$@"
    (( $#__hits )) && print -rl -- "+"${^__hits}
    return 0
}
echo READY
"""


def of_zsh(scripts, lines):
    (scripts / "init").write_text(ZSH.replace("DUMP", f"{scripts}/dump").replace("SCRIPT", f"{scripts}/zsh"))
    return [_asked_of_zsh(scripts, " ".join(line)) for line in lines]


def _asked_of_zsh(scripts, line: str) -> set[str]:
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(scripts / "home")
        environment = {**os.environ, "ZSE_HOME": str(scripts / "home"), "TERM": "dumb", "ZDOTDIR": str(scripts)}
        os.execvpe("zsh", ["zsh", "-f", "-i"], environment)
    try:
        os.write(fd, f"source {scripts}/init\n".encode())
        _read_until(fd, b"\nREADY")
        os.write(fd, line.encode() + b"\t")
        text = _read_until(fd, b">>>").decode()
        return {row[1:] for row in re.findall(r"^\+.*$", text.replace("\r", "").partition("<<<")[2], re.MULTILINE)}
    finally:
        os.close(fd)
        os.waitpid(pid, 0)


def _read_until(fd: int, mark: bytes) -> bytes:
    data, deadline = b"", time.monotonic() + 20
    while mark not in data:
        assert select.select([fd], [], [], max(0, deadline - time.monotonic()))[0], data.decode()
        try:
            data += os.read(fd, 65536)
        except OSError:
            raise AssertionError(data.decode()) from None
    return data


ASK = {"bash": of_bash, "zsh": of_zsh, "fish": of_fish}


@pytest.fixture(params=SHELLS)
def ask(request, scripts):
    """What a shell offers for the last word of each line."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return lambda *lines: ASK[request.param](scripts, lines)


def test_what_is_offered(ask):
    found = ask(
        ["zse", "se"],
        ["zse", "serve", "--cache-disk"],
        ["zse", "serve", "--device", ""],
        ["zse", "serve", "--quantize", "i"],
        ["zse", "bench", ""],
        ["zse", "bench", "decode", "--js"],
        ["zse", "run", "my-"],
        ["zse", "run", "smollm2-3"],
        ["zse", "completion", ""],
    )
    assert found[0] == {"serve", "sessions"} and found[1] == {"--cache-disk", "--cache-disk-size"}
    assert {word for word in found[2] if word} == {"auto", "cpu", "cuda", "hip", "metal"}
    assert found[3] == {"int4", "int4-g32", "int4-g128", "int8"} and {"decode", "prefill", "serve"} <= found[4]
    assert found[5] == {"--json"} and found[6] == {"my-model"} and found[7] == {"smollm2-360m"}
    assert found[8] == {"bash", "zsh", "fish"}


def test_every_option_is_offered(ask):
    wanted = [place for place in completion.places() if not place.kinds]
    found = ask(*(["zse", *place.words, "--"] for place in wanted))
    for place, offered in zip(wanted, found, strict=True):
        names = {name for option in place.options for name in option.names if name.startswith("--")}
        assert {name.removesuffix("=") for name in offered} >= names, place.words


@pytest.mark.parametrize("shell", SHELLS)
def test_every_name_is_in_the_script(scripts, shell):
    text = (scripts / shell).read_text()
    for name in main.COMMANDS:
        assert re.search(rf"\b{name}\b", text)
        for action in main.parser_of(name)._all_actions():
            for option in action.option_strings:
                shown = option.lstrip("-") if shell == "fish" else option
                assert shown in text, (name, option)
    if shutil.which(shell):
        subprocess.run([shell, "-n", str(scripts / shell)], check=True)


def test_the_command_prints_them(zse, scripts):
    for shell in SHELLS:
        assert zse("completion", shell).stdout == (scripts / shell).read_text()
    assert "invalid choice: 'tcsh'" in zse("completion", "tcsh", code=2).stderr
