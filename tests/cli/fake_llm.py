"""`python fake_llm.py ARGUMENTS`: the command `zse` with an LLM that echoes, to test terminals and options without a
model.

The reply to a conversation is "<system|…> you said: LAST", a word at a time; `slow` in the message makes it endless.
"""

import os
import sys
import time
import types
from types import SimpleNamespace

from zse.errors import RequestError


class EchoLLM:
    has_chat_template = True
    vocab_size = 5000
    recommended: dict = {}

    def __init__(self, path, **options):
        self.path, self.options, self.phases_ms = path, options, {"model opened": 12.0}
        self.is_closed = False
        self.config = SimpleNamespace(
            threads=options["threads"] or 2,
            max_context=512,
            activations="f32",
            kv_dtype=options["kv_dtype"],
            kv_bytes=7 * 16 * 20,
            num_pages=7,
        )
        memory = {"layers": 3 << 20, "kv cache": 2 << 20}
        self.device = SimpleNamespace(
            kernels="gpu", shares_memory=False, memory=lambda: memory, memory_total=80 << 30, memory_free=73 << 30
        )
        self.tokenizer = SimpleNamespace(encode=lambda text: list(text.encode()))
        if "base" in str(path):
            self.has_chat_template = False

    def prepare_structure(self):
        pass

    def stream(self, prompt, params, structure=None):
        form = f" as {structure.kind}" if structure else ""
        yield from self._words(f"raw: {prompt} [{self._show(params)}]{form}")

    def stream_chat(self, messages, params, structure=None):
        system = "".join(m["content"] for m in messages if m["role"] == "system")
        if len(str(messages)) > 5000:
            raise RequestError("the prompt has 9999 tokens, the context 2048", code="context_length_exceeded")
        text = messages[-1]["content"]
        if "slow" in text:
            while True:
                time.sleep(0.01)
                yield SimpleNamespace(text="on ", token_ids=[1], finish_reason=None)
        turn = sum(m["role"] == "user" for m in messages)
        yield from self._words(f"<{system}> turn {turn}, you said: {text} [{self._show(params)}]")

    def _show(self, params):
        return f"t={params.temperature} n={params.max_tokens} seed={params.seed} threads={self.options['threads']}"

    def _words(self, text):
        words = text.split(" ")
        for index, word in enumerate(words):
            is_last = index == len(words) - 1
            yield SimpleNamespace(
                text=word + ("" if is_last else " "), token_ids=[index], finish_reason="stop" if is_last else None
            )

    def metrics(self):
        return {"prefix_hit_tokens": 0}

    def perplexity(self, token_ids):
        return float(len(token_ids))

    def close(self):
        self.is_closed = True


if __name__ == "__main__":
    if sys.stdin.isatty():
        # A session leader that opens a terminal gets it as its own, so that Ctrl-C there is a signal for this process.
        os.open(os.ttyname(0), os.O_RDWR)
    fake = types.ModuleType("zse.engine.llm")
    fake.LLM = EchoLLM
    sys.modules["zse.engine.llm"] = fake
    from zse.cli.main import main

    sys.exit(main(sys.argv[1:]))
