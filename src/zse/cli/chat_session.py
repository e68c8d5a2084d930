"""A conversation: its messages, its /commands, and one reply at a time."""

import json
import signal
import sys

from zse.bench import reports
from zse.cli.options import add_sampling_options, sampling_fields, sampling_params
from zse.cli.parser import Parser, hint
from zse.cli.terminal import reply_writer
from zse.errors import RequestError, ZSEError


class Session:
    """messages: [{"role", "content"}], without the system message, which is `system`. options: of LLM.stream_chat()."""

    def __init__(self, llm, model: str, params, system: str | None, options: dict):
        self.model, self.system = model, system
        self.messages: list[dict] = []
        self._llm, self._params, self._options = llm, params, options
        self._commands = {
            "/help": (self._help, "this list"),
            "/reset": (self._reset, "forget the conversation; the system message stays"),
            "/system": (self._system, "[TEXT] show the system message, or set it and start anew; /system - removes it"),
            "/regenerate": (self._regenerate, "another reply to the last message"),
            "/params": (self._show_or_set, "[NAME VALUE] show the sampling parameters, or set one"),
            "/save": (self._save, "FILE write the conversation as JSON"),
            "/load": (self._load, "FILE go on with a saved conversation"),
            "/exit": (None, "leave (also Ctrl-D)"),
        }

    def commands(self) -> list[str]:
        return list(self._commands)

    def handle(self, text: str) -> bool:
        """Obey a /command or answer a message. False when the user wants to leave."""
        if not text.startswith("/"):
            self._answer({"role": "user", "content": text})
            return True
        name, _, rest = text.partition(" ")
        if name in ("/exit", "/quit", "/bye"):
            return False
        if name not in self._commands:
            self._say(f"unknown command {name}{hint(name, self._commands)}; /help lists them")
            return True
        command = self._commands[name][0]
        assert command is not None
        try:
            command(rest.strip())
        except ZSEError as error:
            self._say(f"error: {error}")
        return True

    def load(self, path: str) -> None:
        """Take over messages and system message from a file of /save. ZSEError when it is not one."""
        try:
            with open(path, encoding="utf-8") as file:
                data = json.load(file)
            messages = [{"role": item["role"], "content": item["content"]} for item in data["messages"]]
            system = data["system"]
            is_sound = all(
                item["role"] in ("user", "assistant") and isinstance(item["content"], str) for item in messages
            )
            if not is_sound or not isinstance(system, str | None):
                raise ValueError("a message without a known role or text")
        except OSError as error:
            raise ZSEError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ZSEError(f"{path} is not a conversation saved by /save: {error}") from None
        self.messages, self.system = messages, system
        self._say(f"loaded {len(messages)} messages from {path}")

    def _say(self, line: str) -> None:
        print(line, flush=True)

    def _help(self, rest: str) -> None:
        for name, (_command, text) in self._commands.items():
            self._say(f"  {name:<13}{text}")

    def _reset(self, _: str) -> None:
        self.messages.clear()
        self._say("the conversation is empty")

    def _system(self, text: str) -> None:
        if not text:
            self._say(self.system or "no system message (the model's template may add its own)")
            return
        self.system = None if text == "-" else text
        self._reset("")

    def _regenerate(self, _: str) -> None:
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages:
            self._say("there is no message to answer yet")
            return
        self._answer(self.messages.pop())

    def _show_or_set(self, text: str) -> None:
        names = list(sampling_fields())
        if not text:
            for name in names:
                self._say(f"  {name:<20}{getattr(self._params, name)}")
            return
        name, _, value = text.partition(" ")
        if name not in names or not value:
            self._say(f"write /params NAME VALUE, with NAME one of {', '.join(names)}")
            return
        # The options' own parser: one set of limits.
        parser = Parser(prog="/params", add_help=False)
        add_sampling_options(parser, 1)
        parsed = parser.parse_args([f"--{name.replace('_', '-')}={value.strip()}"])
        values = {other: getattr(self._params, other) for other in names} | {name: getattr(parsed, name)}
        self._params = sampling_params(type("Values", (), values))
        self._say(f"  {name:<20}{getattr(self._params, name)}")

    def _save(self, path: str) -> None:
        if not path:
            raise ZSEError("write /save FILE")
        data = {"model": self.model, "system": self.system, "messages": self.messages}
        reports.write(path, json.dumps(data, ensure_ascii=False, indent=1))
        self._say(f"saved {len(self.messages)} messages to {path}")

    def _load(self, path: str) -> None:
        if not path:
            raise ZSEError("write /load FILE")
        self.load(path)

    def _answer(self, message: dict) -> None:
        """Stream the reply to `message`. A reply that is stopped stays in the conversation as far as it came."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        try:
            reply, is_stopped, finish = self._stream([*system, *self.messages, message])
        except RequestError as error:
            hint = "; /reset starts anew" if error.code == "context_length_exceeded" else ""
            self._say(f"error: {error}{hint}")
            return
        self.messages += [message, {"role": "assistant", "content": reply}]
        if is_stopped:
            self._say("(stopped)")
        elif finish == "length":
            self._say("(cut at max_tokens or the context's end; /params max_tokens N allows more)")

    def _stream(self, messages: list[dict]) -> tuple[str, bool, str | None]:
        write = reply_writer(sys.stdout, wraps=True)
        pieces: list[str] = []
        finish = None
        with _StopOnInterrupt() as stop:
            deltas = self._llm.stream_chat(messages, self._params, **self._options)
            try:
                for delta in deltas:
                    finish = delta.finish_reason
                    if delta.text:
                        pieces.append(delta.text)
                        write(delta.text)
                    if stop.is_set:
                        break
            finally:
                deltas.close()  # tells the engine to stop
        write("\n")
        return "".join(pieces), stop.is_set and finish is None, finish


class _StopOnInterrupt:
    """While a reply streams, the first Ctrl-C only sets a flag: an exception in the middle of an engine step would
    leave its state half changed. A second one is a KeyboardInterrupt, for an engine that hangs."""

    def __enter__(self):
        self.is_set = False
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def _on_signal(self, number, frame) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True

    def __exit__(self, kind, error, traceback) -> None:
        signal.signal(signal.SIGINT, self._previous)
