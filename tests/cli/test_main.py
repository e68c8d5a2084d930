import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from cli_process import ENVIRONMENT

sys.path.append(str(Path(__file__).parents[1] / "engine"))
import tiny_model  # noqa: E402

from zse.cli import main as cli
from zse.cli.parser import Amount


def test_every_command_has_what_the_table_needs():
    for name, help in cli.COMMANDS.items():
        module = cli.load(name)
        assert help and "\n" not in help and not help.endswith("."), name
        assert cli.parser_of(name) and callable(module.run), name


def test_help_lists_every_command(zse):
    text = zse("--help").stdout
    for name in cli.COMMANDS:
        assert f"\n  {name} " in text
    assert zse("help").stdout == text
    assert zse(code=2).stdout == text
    assert zse("help", "pull").stdout == zse("pull", "--help").stdout
    for name in cli.COMMANDS:
        assert zse(name, "--help").stdout.startswith(f"usage: zse {name} ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pul"], "unknown command pul; did you mean pull?"),
        (["--jsn"], "unknown option --jsn"),
        (["ls", "--jsn"], "unknown option --jsn; did you mean --json?"),
        (["ls", "extra"], "unexpected argument 'extra'"),
        (["pull"], "the following arguments are required: MODEL"),
        (["pull", "--forc", "x"], "unknown option --forc; did you mean --force?"),
        (["run", "echo", "hi", "--max-token=3"], "unknown option --max-token; did you mean --max-tokens?"),
        (["run", "echo", "hi", "--max-tokens", "0"], "--max-tokens: '0' is not a whole number at least 1"),
        (
            ["run", "echo", "hi", "--temperature", "nan"],
            "--temperature: 'nan' is not a number at least 0 and at most 2",
        ),
        (["run", "echo", "hi", "--activations", "int3"], "invalid choice: 'int3'"),
        (["run", "nothing", "hi"], "unknown model 'nothing'; the catalog has: smollm2"),
        (["run", "./no.gguf", "hi"], "./no.gguf: no such file or folder"),
        (["show", "nothing"], "unknown model 'nothing'"),
        (["run", "qwen3-0.6", "hi"], "unknown model 'qwen3-0.6'; did you mean qwen3-0.6b"),
        (["run", "hf:foo", "hi"], "the form is hf:ORG/NAME[@REV][:FILE]"),
        (["serve", "--bogus"], "unknown option --bogus (see `zse serve --help`)"),
        (["serve", "--max-num-seq", "3"], "unknown option --max-num-seq; did you mean --max-num-seqs?"),
        (
            ["serve", "--data-parallel-size", "2"],
            "--data-parallel-size 2 (vLLM) is not taken: a server has one engine a model",
        ),
        (
            ["run", "base", "hi", "--tp", "2", "--lazy-experts"],
            "--lazy-experts is not possible with --tensor-parallel-size 2 yet",
        ),
        (["run", "base", "hi", "--tp", "2", "--device", "hip"], "--tensor-parallel-size is for CPUs and NVIDIA GPUs"),
        (["profile", "base", "--tp", "2"], "zse profile replays launches on one device"),
        (["serve", "--max-num-seqs", "0"], "--max-rows/--max-concurrency: '0' is not a whole number"),
        (["rm", "nosuch"], "model 'nosuch' is not in the store; the store has: base, echo"),
        (["rm", "-y", "nothing"], "model 'nothing' is not in the store; the store has: base, echo"),
        (["rm", "echo"], "pass -y"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(zse, arguments, words):
    done = zse(*arguments, code=2)
    assert done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("zse: error: ") and words in done.stderr


def test_help_costs_at_most_40_ms_more_than_python():
    """Processor time, least of several in turns, because other work on the machine only adds. The bound is the issue's
    60 ms less a bare interpreter."""

    def milliseconds(*arguments):
        process = subprocess.Popen([sys.executable, *arguments], env=ENVIRONMENT, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return 1000 * (usage.ru_utime + usage.ru_stime)

    pairs = [(milliseconds("-c", "pass"), milliseconds("-m", "zse", "--help")) for _ in range(9)]
    assert min(help for _, help in pairs) - min(bare for bare, _ in pairs) <= 40, pairs


def test_help_imports_nothing_heavy():
    script = (
        "import sys\nfrom zse.cli.main import main\nmain(['--help'])\n"
        "heavy = "
        "{'numpy', 'msgspec', 'asyncio', 'tokenizers', 'huggingface_hub', 'uvicorn', 'subprocess',"
        " 'json', 'ctypes', 'dataclasses'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)


def test_a_reader_that_went_away_is_quiet(home):
    process = subprocess.Popen(
        [sys.executable, "-m", "zse", "ls"],
        env={**ENVIRONMENT, "ZSE_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() in (0, 141)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed(home, closed):
    """Nothing else gets its number, and what is printed to it is for nobody."""
    environment = ENVIRONMENT | {"ZSE_HOME": str(home)}
    command = f"{sys.executable} -m zse ls --json {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (0, "") and (">" in closed.replace("2>", "")) == (not done.stdout)
    wrong = subprocess.run(["sh", "-c", f"{sys.executable} -m zse nothing {closed}"], env=environment, timeout=60)
    assert wrong.returncode == 2


def test_a_full_disk_is_one_line(home):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "zse", "ls", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
    assert (done.returncode, done.stderr) == (1, "zse: error: No space left on device\n")


def test_a_home_that_is_a_file_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    environment = ENVIRONMENT | {"ZSE_HOME": str(tmp_path / "file")}
    done = subprocess.run([sys.executable, "-m", "zse", "ls"], capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and done.stderr == f"zse: error: {tmp_path}/file/models: Not a directory\n"


def test_what_the_outputs_encoding_lacks_is_a_question_mark(home):
    environment = ENVIRONMENT | {"PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run([sys.executable, "-m", "zse", "serve", "--help"], capture_output=True, env=environment)
    assert done.returncode == 0 and not done.stderr and b"NAME=W" in done.stdout and b"models=NAME,?" in done.stdout


def test_a_name_that_is_not_utf8_is_shown_as_it_is(home, tmp_path):
    environment = ENVIRONMENT | {"PYTHONIOENCODING": "utf-8:strict"}
    folder = tiny_model.write(tmp_path / os.fsdecode(b"m\xe9"))
    made = os.fsencode(tmp_path) + b"/\xff.zse"

    def zse(*words):
        return subprocess.run([sys.executable, "-m", "zse", *words], capture_output=True, env=environment, timeout=120)

    assert b"m\xe9" in zse("show", folder).stdout
    assert zse("convert", folder, made).returncode == 0
    verified = zse("verify", made)
    assert verified.returncode == 0 and made + b": sound" in verified.stdout
    served = zse("serve", folder, "--port", "0")
    assert served.returncode == 2 and b"must be UTF-8; rename it" in served.stderr


def test_ctrl_c_is_quiet_and_130(home, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    holder = os.open(fifo, os.O_RDWR)
    process = subprocess.Popen(
        [sys.executable, os.path.join(os.path.dirname(__file__), "fake_llm.py"), "run", "echo"],
        env={**ENVIRONMENT, "ZSE_HOME": str(home)}, stdin=holder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    waits_in, deadline = Path(f"/proc/{process.pid}/wchan"), time.monotonic() + 5
    while time.monotonic() < deadline and not (waits_in.exists() and "pipe" in waits_in.read_text()):
        time.sleep(0.01)  # until it reads its prompt, where the system tells
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    os.close(holder)
    assert process.returncode == 130 and stdout == b"" and stderr == b""


def test_number_refuses_what_is_not_finite_or_outside():
    import argparse

    assert Amount(int, 1, 3)("2") == 2 and Amount(float, high=1, above=0)("1") == 1.0
    refused = [
        (Amount(int, 1, 3), "4"),
        (Amount(int), "1.5"),
        (Amount(float), "inf"),
        (Amount(float), "nan"),
        (Amount(float, above=0), "0"),
        (Amount(float), "x"),
    ]
    for convert, text in refused:
        with pytest.raises(argparse.ArgumentTypeError):
            convert(text)


@pytest.mark.parametrize(
    "moment",
    [
        "class Finder:\n def find_spec(self, name, *rest):\n  if name == 'zse.cli.main': interrupt()\n"
        "sys.meta_path.insert(0, Finder())",
        "import argparse\nargparse.ArgumentParser.format_usage = interrupt",
        "from zse.cli import run\nrun.run = interrupt",
        "from zse.cli import run\nimport time\nclass Freed:\n __del__ = interrupt\n"
        "def free(*_):\n Freed()\n time.sleep(20)\n return 0\nrun.run = free",
    ],
    ids=["importing", "parsing", "running", "freeing"],
)
def test_ctrl_c_is_quiet_from_the_first_import_on(moment):
    script = (
        "import os, signal, sys\ndef interrupt(*_):\n os.kill(os.getpid(), signal.SIGINT)\n for _ in range(9999): pass\n"
        f"{moment}\nsys.argv = ['zse', 'run', 'm', 'hello']\nfrom zse.__main__ import main\nsys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_command_begins_where_the_module_does():
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"zse": "zse.__main__:main"}


@pytest.mark.parametrize("command", ["serve", "pull"])
def test_every_device_is_in_the_help(zse, command):
    assert "--device auto|cpu|cuda|hip|metal" in zse(command, "--help").stdout
