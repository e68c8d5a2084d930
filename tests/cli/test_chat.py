import fcntl
import itertools
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from cli_process import ENVIRONMENT
from hypothesis import given
from hypothesis import strategies as st

from zse.cli import terminal as terminals


class Terminal:
    """`zse ARGUMENTS` on a pseudo-terminal, as a person would use it."""

    def __init__(self, home, *arguments):
        self.master, slave = pty.openpty()
        # Without NOFLSH the kernel drops, on Ctrl-C, what the program has just written and we have not read yet.
        modes = termios.tcgetattr(slave)
        modes[3] |= termios.NOFLSH
        termios.tcsetattr(slave, termios.TCSANOW, modes)
        program = [sys.executable, str(Path(__file__).parent / "fake_llm.py"), *arguments]
        environment = {**ENVIRONMENT, "ZSE_HOME": str(home), "TERM": "xterm", "INPUTRC": "/dev/null"}
        self.process = subprocess.Popen(
            program, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self.text = ""

    def type(self, text):
        os.write(self.master, text.encode())

    def expect(self, words, seconds=20):
        """Wait until `words` are printed after what was expected before."""
        deadline = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < deadline, f"no {words!r} in {self.text!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    data = os.read(self.master, 65536)
                except OSError:
                    data = b""
                assert data, f"ended without {words!r}: {self.text!r}"
                self.text += data.decode(errors="replace")
        before, _, self.text = self.text.partition(words)
        return before

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(home):
    opened = []

    def start(*arguments):
        opened.append(Terminal(home, *arguments))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_a_conversation_with_commands(terminal, home):
    chat = terminal("chat", "echo", "--seed", "1")
    chat.expect("/help lists the commands")
    chat.expect("> ")
    chat.type("hello\n")
    chat.expect("<> turn 1, you said: hello [")
    chat.type("again\n")
    chat.expect("turn 2, you said: again")
    chat.type("/system be kind\n")
    chat.expect("the conversation is empty")
    chat.type("hi\n")
    chat.expect("<be kind> turn 1, you said: hi")
    chat.type("/params temperature 0.25\n")
    chat.expect("temperature         0.25")
    chat.type("/params temperature 9\n")
    chat.expect("'9' is not a number at least 0 and at most 2")
    chat.type("/regenerate\n")
    chat.expect("<be kind> turn 1, you said: hi [t=0.25")
    chat.type("/nonsense\n")
    chat.expect("unknown command /nonsense; /help lists them")
    chat.type("/rest\n")
    chat.expect("unknown command /rest; did you mean /reset?; /help lists them")
    chat.type('"""\nline one\nline two\n"""\n')
    chat.expect("you said: line one\r\nline two [")
    chat.type("first\\\nsecond\n")
    chat.expect("you said: first\r\nsecond [")
    chat.type("/exit\n")
    assert chat.process.wait(20) == 0
    history = home / "chat_history"
    assert "hello" in history.read_text() and history.stat().st_mode & 0o077 == 0


def test_ctrl_c_stops_the_reply_and_not_the_program(terminal):
    chat = terminal("chat", "echo")
    chat.expect("> ")
    chat.type("slow please\n")
    chat.expect("on on on")
    chat.type("\x03")
    assert "^C" not in chat.expect("(stopped)")
    chat.expect("> ")
    chat.type("still there?\n")
    chat.expect("turn 2, you said: still there?")
    chat.expect("> ")
    chat.type("half a line")
    chat.expect("half a line")
    time.sleep(0.3)  # a signal that comes while readline takes in a key is seen at the next key only (CPython's loop)
    chat.type("\x03")
    assert "^C" not in chat.expect("(/exit or Ctrl-D leaves)")
    chat.expect("> ")
    chat.type("\x04")
    assert chat.process.wait(20) == 0


def test_save_and_load(terminal, zse, tmp_path):
    file = tmp_path / "talk.json"
    done = zse("chat", "echo", "--system", "s", input=f"one\n/save {file}\n", fake=True)
    assert "saved 2 messages" in done.stdout
    saved = json.loads(file.read_text())
    assert saved["system"] == "s" and [m["role"] for m in saved["messages"]] == ["user", "assistant"]
    done = zse("chat", "echo", "--load", str(file), input="two\n", fake=True)
    assert "<s> turn 2, you said: two" in done.stdout
    for text in (
        "",
        "{}",
        "[1]",
        '{"messages": [{"role": "user", "content": 3}], "system": null}',
        '{"messages": 1, "system": 2}',
    ):
        file.write_text(text)
        assert "not a conversation saved by /save" in zse("chat", "echo", "--load", str(file), code=1, fake=True).stderr
        assert "not a conversation" in zse("chat", "echo", input=f"/load {file}\n", fake=True).stdout


def test_without_a_terminal_every_line_is_a_message(zse):
    done = zse("chat", "echo", input="one\n\ntwo\n/reset\nthree\n/exit\nfour\n", fake=True)
    assert [line.split(" [")[0] for line in done.stdout.splitlines()] == [
        "<> turn 1, you said: one",
        "<> turn 2, you said: two",
        "the conversation is empty",
        "<> turn 1, you said: three",
    ]


def test_a_conversation_that_is_too_long_says_so_and_goes_on(zse):
    done = zse("chat", "echo", input=f"{'long ' * 1200}\nshort\n", fake=True)
    assert "error: the prompt has 9999 tokens, the context 2048; /reset starts anew" in done.stdout
    assert "<> turn 1, you said: short" in done.stdout


def test_a_base_model_is_refused(zse):
    assert "use: zse run base TEXT" in zse("chat", "base", code=2, fake=True).stderr


def test_the_model_cannot_send_escape_sequences_to_the_terminal(terminal):
    chat = terminal("chat", "echo")
    chat.expect("> ")
    chat.type('"""\n\x16\x1b]0;title\x16\x07\n"""\n')
    chat.expect("you said: ")
    assert "\\x1b]0;title" in chat.expect("[t=")
    chat.process.send_signal(signal.SIGTERM)


def test_a_reply_wraps_at_words(terminal):
    chat = terminal("chat", "echo")
    fcntl.ioctl(chat.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
    chat.expect("> ")
    chat.type("a conversation about nothing in particular\n")
    chat.expect("about nothing in\r\nparticular [t=")


class Screen:
    """A terminal's lines, as far as WordWrap needs one."""

    def __init__(self):
        self.lines = [""]

    def show(self, text: str) -> "Screen":
        for part in re.findall(r"\x1b\[\d+D\x1b\[K|\n|[^\x1b\n]", text):
            if part == "\n":
                self.lines.append("")
            elif part[0] == "\x1b":
                columns = int(part[2 : part.index("D")])
                while columns > 0:
                    columns -= terminals._columns(self.lines[-1][-1])
                    self.lines[-1] = self.lines[-1][:-1]
            else:
                self.lines[-1] += part
        return self


def wrapped(width: int, *pieces: str) -> list[str]:
    wrap = terminals.WordWrap(width)
    return Screen().show("".join(map(wrap.feed, pieces))).lines


def test_words_go_to_the_next_line_whole():
    assert wrapped(10, "one two", " thr", "ee four") == ["one two ", "three four"]
    assert wrapped(10, "a ", "incomprehensibilities b") == ["a ", "incomprehe", "nsibilitie", "s b"]
    assert wrapped(4, "caf", "e\u0301s e") == ["cafe\u0301", "s e"]
    assert wrapped(6, "日本語の文字 x") == ["日本語", "の文字", "x"]
    assert wrapped(4, " abc日") == [" ", "abc", "日"]
    assert wrapped(8, "a\n  b c d e\n") == ["a", "  b c d ", "e", ""]
    code = "```\nx = [1, 2, 3, 4]\n```"
    assert wrapped(8, code + "\nand so on") == [*code.split("\n"), "and so ", "on"]


@given(st.text(st.sampled_from("ab日é \n`"), max_size=80), st.lists(st.integers(0, 80), max_size=6), st.integers(1, 12))
def test_wrapping_loses_nothing_and_does_not_depend_on_the_pieces(text, cuts, width):
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    lines = wrapped(width, *pieces)
    assert lines == wrapped(width, text)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "").replace("\n", "")
    if "```" not in text:
        assert all(sum(map(terminals._columns, line)) <= max(width, 2) for line in lines)
