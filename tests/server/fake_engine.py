"""A stand-in for zse.engine.worker in the server's tests: the same protocol, deterministic bytes instead of a model.

Token ids below 256 are bytes, EOS is 256. The reply to a prompt is the last line's text after "user:" (or the whole
prompt), unless it holds directives: !tokens=N (N letters), !ms=N (pause before each token), !stall, !crash=N, !lost=N, !nan=N,
!eof=N, !garbage=N (after N tokens), !freeze (no heartbeats either), !random (letters drawn by the seed), !wide=N
(N tokens in one message), !points (where the engine is told that messages begin).
"""

import os
import random
import re
import signal
import sys
import time
import zlib
from array import array

from zse.engine.messages import (
    AdapterLoaded,
    Ask,
    Cancel,
    Cancelled,
    Expect,
    Failed,
    Fatal,
    FrameSocket,
    Heartbeat,
    LoadAdapter,
    LoadModel,
    Measured,
    Parked,
    Ready,
    Searched,
    SearchedReply,
    Shutdown,
    Submit,
    TokenLogprob,
    Tokens,
    UnloadAdapter,
    image_key,
)
from zse.engine.worker import die_with_parent
from zse.models.vision import config as vision
from zse.sampling.params import BeamParams

EOS = 256


class Row:
    """One running request: its reply and when the next token is due."""

    def __init__(self, submit: Submit):
        self.id, self.params, self.num_prompt = submit.id, submit.params, len(submit.prompt)
        text = bytes(token for token in submit.prompt if token < 256).decode("utf-8", "replace")
        last = (
            text.rsplit("user:", 1)[-1].removesuffix("<think>").removesuffix("assistant:").strip("\n")
            if "user:" in text
            else text
        )
        self.directives = {name: int(value or 0) for name, value in re.findall(r"!(\w+)(?:=(\d+))?", last)}
        if "tokens" in self.directives:
            self.reply = [97 + index % 26 for index in range(self.directives["tokens"])] + [EOS]
        elif "points" in self.directives:
            self.reply = [*repr(submit.options.state_points).encode(), EOS]
        elif "random" in self.directives:
            draw = random.Random(self.params.seed)
            self.reply = [97 + draw.randrange(26) for _ in range(12)] + [EOS]
        elif "images" in self.directives:
            assert all(one.key == image_key(one.height, one.width, one.pixels) for one in submit.images)
            told = (f"{one.start}+{one.count} {one.height}x{one.width} {one.pixels[:3].hex()}" for one in submit.images)
            self.reply = [*"; ".join(told).encode(), EOS]
        else:
            self.reply = [*last.encode(), EOS]
        if self.params.ignore_eos:
            self.reply = self.reply[:-1] or [97]
        self.sent = 0
        self.cached = len(submit.prompt) // 16 * 16 if "cached" in self.directives else 0
        self.pause = self.directives.get("ms", 0) / 1000
        self.due = time.monotonic() + self.pause

    @property
    def computed(self) -> int:
        """Tokens; the prompt is computed with the first one."""
        return self.num_prompt - self.cached + self.sent if self.sent else 0

    def step(self) -> list:
        reached = {
            name
            for name in ("crash", "nan", "eof", "garbage")
            if name in self.directives and self.sent >= self.directives[name]
        }
        if "crash" in reached:
            os.kill(os.getpid(), signal.SIGKILL)
        if "eof" in reached:
            os._exit(3)
        if "nan" in reached:
            return [
                Failed(
                    self.id,
                    "the model gave numbers that are not finite for this request",
                    500,
                    "server_error",
                    "numerical_error",
                    computed=self.computed,
                )
            ]
        if "garbage" in reached:
            return [b"\x05\x00\x00\x00hello"]
        count = max(1, self.directives.get("wide", 1))
        tokens, finish = [], None
        while len(tokens) < count and finish is None:
            token = self.reply[self.sent % len(self.reply)]
            tokens.append(token)
            self.sent += 1
            if token in self.params.stop_token_ids or token == EOS and not self.params.ignore_eos:
                finish = "stop"
            elif self.sent >= self.params.max_tokens:
                finish = "length"
        self.due = time.monotonic() + self.pause
        return [Tokens(self.id, tokens, self._logprobs(tokens), finish, self.cached)]

    def _logprobs(self, tokens):
        if self.params.logprobs is None:
            return None
        scores = []
        for token in tokens:
            top = [((token + offset) % 257, -0.5 - offset) for offset in range(self.params.logprobs)]
            scores.append(TokenLogprob(-0.5 - (self.params.seed or 0), top))
        return scores


def measured(message: Submit) -> Measured | Failed:
    """A vector counts the prompt's vowels, [a, e, i, o, u, 1], mean: divided by the prompt's length, normalize: to
    length 1. The log-probability of a token is -0.5, of a target -(1 + id) / 256, alternatives as a Row's."""
    ask, prompt = message.params, message.prompt
    if b"!nan" in bytes(token for token in prompt if token < 256):
        return Failed(
            message.id,
            "the model gave numbers that are not finite for this request",
            500,
            "server_error",
            "numerical_error",
        )
    if ask.what == "labels":
        reason = "this model is no cross-encoder"
        return Failed(message.id, reason, 400, "invalid_request_error", "unsupported_parameter")
    if ask.what in ("last", "mean", "cls", "max"):
        vector = [float(prompt.count(letter)) for letter in b"aeiou"] + [1.0]
        if ask.what == "mean":
            vector = [value / len(prompt) for value in vector]
        if ask.normalize:
            length = sum(value * value for value in vector) ** 0.5
            vector = [value / length for value in vector]
        return Measured(message.id, len(prompt), array("f", vector).tobytes())
    if ask.what == "targets":
        return Measured(message.id, len(prompt), None, [TokenLogprob(-(1 + id) / 256, []) for id in ask.targets])
    tops = [[((token + offset) % 257, -0.5 - offset) for offset in range(ask.top)] for token in prompt]
    found = [None, *(TokenLogprob(-0.5, top) for top in tops[1:])][ask.first :]
    return Measured(message.id, len(prompt), None, found).to_send()


def seen(kind: str) -> bytes:
    """How a model of that kind sees, with images of a few tokens."""
    common = dict(family=kind, patch=14, mean=(0.5,) * 3, std=(0.5,) * 3, marker="<image>", placeholder="<image>")
    more = {
        "area": dict(merge=2, resize="area", min_pixels=56 * 56, max_pixels=84 * 84),
        "square": dict(merge=2, resize="square", size=56, before="[", after="]", whole=True),
        "edge": dict(merge=1, resize="edge", size=56, row_end="<row>", image_end="<end>"),
    }
    return vision.VisionConfig(**common, **more[kind]).encode()


def searched(message: Submit) -> Searched:
    """Reply i is the prompt's letter i beam_width times, -(i + 1) each; the last one is cut at max_tokens."""
    params, replies = message.params, []
    for index in range(params.beam_width):
        tokens = [message.prompt[index % len(message.prompt)]] * params.beam_width
        if index < params.beam_width - 1:
            tokens = [*tokens[: params.max_tokens - 1], EOS]
        tokens = tokens[: params.max_tokens]
        top = [(tokens[0], -1.0 - index)][: params.logprobs or 0]
        replies.append(
            SearchedReply(
                tokens,
                [TokenLogprob(-1.0 - index, top)] * len(tokens),
                -1.0 * len(tokens),
                -1.0,
                "stop" if tokens[-1] == EOS else "length",
            )
        )
    computed = len(message.prompt) + sum(len(reply.tokens) for reply in replies)
    return Searched(message.id, len(message.prompt), replies, computed=computed)


def main(arguments: list[str]) -> int:
    parent = os.getppid()
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    arguments = [word for word in arguments if word != "--park"] + ["--park", "yes"] * ("--park" in arguments)
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    sock = FrameSocket.from_fd(int(options["--fd"]))
    if "--park" in options:
        if "--park-fatal" in options:
            sock.send(Fatal(options["--park-fatal"], 2))
            return 2
        sock.send(Parked({"parked": 1.0}))
        load = None
        while load is None:
            messages = sock.receive(None)
            if messages is None:
                return 0
            for message in messages:
                if isinstance(message, Expect) and "--expects" in options:
                    with open(options["--expects"], "a") as file:
                        file.write(f"{' '.join(message.paths)} {message.max_bytes}\n")
            load = next((message for message in messages if isinstance(message, LoadModel)), None)
        options |= dict(zip(load.arguments[::2], load.arguments[1::2], strict=True))
    if "--fits-beside" in options and os.path.exists(options["--fits-beside"]):
        sock.send(Fatal("it does not fit", 2, "out_of_memory"))
        return 2
    if "--taken" in options:
        # Stands for the memory that the process holds: gone when it is.
        with open(options["--taken"], "w") as file:
            file.write(str(os.getpid()))
    time.sleep(int(options.get("--load-ms", 0)) / 1000)
    if "--fatal" in options:
        sock.send(Fatal(options["--fatal"], 2))
        return 2
    if "--die" in options:
        return int(options["--die"])
    max_context = int(options.get("--max-context", 4096))
    sock.send(
        Ready(
            "fake",
            max_context,
            8,
            100,
            {"weights": 1 << 20, "kv": 2 << 20},
            {"ready": 1.0},
            page_size=64,
            hidden_size=6,
            vision=seen(options["--vision"]) if "--vision" in options else b"",
            has_state="--has-state" in options,
        )
    )
    rows: dict[int, Row] = {}
    steps, beat = 0, 0.0
    while True:
        now = time.monotonic()
        due = min((row.due for row in rows.values() if "stall" not in row.directives), default=now + 0.1)
        messages = sock.receive(max(0.0, min(due, beat) - now))
        if messages is None:
            return 0
        for message in messages:
            if isinstance(message, Submit) and isinstance(message.params, Ask):
                sock.send(measured(message))
            elif isinstance(message, Submit) and isinstance(message.params, BeamParams):
                sock.send(searched(message))
            elif isinstance(message, Submit):
                rows[message.id] = Row(message)
                if "freeze" in rows[message.id].directives:
                    time.sleep(3600)
            elif isinstance(message, Cancel):
                row = rows.pop(message.id, None)
                sock.send(Cancelled(message.id, row.computed if row is not None else 0))
            elif isinstance(message, LoadAdapter):
                sock.send(AdapterLoaded(message.id, f"{zlib.crc32(message.path.encode()):032x}", 4, ["q"], 100))
            elif isinstance(message, UnloadAdapter):
                pass
            elif isinstance(message, Shutdown):
                return 0
        replies, now = [], time.monotonic()
        for row in list(rows.values()):
            if row.due <= now and "stall" not in row.directives:
                steps += 1
                if row.directives.get("lost", row.sent + 1) <= row.sent:
                    sock.send(Fatal("the device failed: event_wait: CUDA_ERROR_LAUNCH_FAILED (719)", 75))
                    return 75
                for reply in row.step():
                    if isinstance(reply, bytes):
                        os.write(sock.fileno(), reply)
                        continue
                    replies.append(reply)
                    if isinstance(reply, Failed) or reply.finish is not None:
                        del rows[row.id]
        if now >= beat:
            replies.append(Heartbeat(steps, len(rows), 0, 100 - len(rows)))
            beat = now + 0.1
        if replies:
            sock.send(*replies)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
