"""Measures llama.cpp through llama-cpp-python's C bindings; runs in the environment that has it and prints one JSON line.

    python benchmarks/llamacpp_worker.py MODEL.gguf --threads 2 --flash -1|0|1

Figures are as in `zse bench`: decode of N tokens after a context, prefill of 512, 8 sequences decoded together, all greedy.
"""

import argparse
import ctypes
import json
import random
import time

import llama_cpp as ll


def peak_mib() -> float:
    """VmHWM of this process."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))


SILENT = ll.llama_log_callback(lambda level, text, data: None)  # kept alive: C calls it later


class Engine:
    def __init__(self, path: str, threads: int, flash: int, context: int, sequences: int, seed: int):
        self.seed = seed
        ll.llama_log_set(SILENT, ctypes.c_void_p(0))
        ll.llama_backend_init()
        self.model = ll.llama_model_load_from_file(path.encode(), ll.llama_model_default_params())
        params = ll.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, 512, 512
        params.n_threads = params.n_threads_batch = threads
        params.n_seq_max, params.flash_attn_type, params.kv_unified = sequences, flash, True
        self.ctx = ll.llama_init_from_model(self.model, params)
        self.vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.batch = ll.llama_batch_init(512, 0, sequences)

    def clear(self) -> None:
        ll.llama_memory_clear(ll.llama_get_memory(self.ctx), True)

    def decode(self, items: list[tuple[int, int, int, bool]]) -> None:
        """One llama_decode of (token, position, sequence, wants logits)."""
        self.batch.n_tokens = len(items)
        for i, (token, position, sequence, logits) in enumerate(items):
            self.batch.token[i], self.batch.pos[i], self.batch.n_seq_id[i] = token, position, 1
            self.batch.seq_id[i][0], self.batch.logits[i] = sequence, logits
        assert ll.llama_decode(self.ctx, self.batch) == 0

    def prompt(self, length: int, sequence: int = 0) -> None:
        draw = random.Random(f"{self.seed} {length} {sequence}")  # as cpu_vs_llamacpp.py has them
        ids = [draw.randrange(5, 2005) for _ in range(length)]
        for start in range(0, length, 512):
            stop = min(start + 512, length)
            self.decode([(ids[i], i, sequence, i == length - 1) for i in range(start, stop)])

    def best(self, index: int) -> int:
        """Greedy token of logits row `index`, by the C sampler."""
        return ll.llama_sampler_sample(self.greedy, self.ctx, index)

    def generate(self, context: int, count: int, sequences: int = 1) -> float:
        """Seconds for `count` steps of all sequences after `context` tokens each."""
        self.clear()
        self.greedy = ll.llama_sampler_init_greedy()
        tokens = []
        for sequence in range(sequences):
            self.prompt(context, sequence)
            tokens.append(self.best(-1))
        start = time.perf_counter()
        for step in range(count):
            self.decode([(tokens[s], context + step, s, True) for s in range(sequences)])
            tokens = [self.best(s) for s in range(sequences)]
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--flash", type=int, default=-1)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--only", help="one figure of them")
    parser.add_argument("--only-memory", action="store_true", help="the peak after a context of 2,048 tokens is full")
    args = parser.parse_args()
    if args.only_memory:
        Engine(args.model, args.threads, args.flash, 2048, 1, args.seed).generate(2048 - 17, 16)
        print(json.dumps({"peak_mib": peak_mib()}))
        return
    engine = Engine(args.model, args.threads, args.flash, 8 * 1024, 8, args.seed)
    engine.generate(16, 8)

    def prefill() -> float:
        engine.clear()
        start = time.perf_counter()
        engine.prompt(512)
        return 512 / (time.perf_counter() - start)

    figures = {
        "decode_16": lambda: args.tokens / engine.generate(16, args.tokens),
        "decode_1024": lambda: args.tokens / engine.generate(1024, args.tokens),
        "decode_4096": lambda: args.tokens / engine.generate(4096, args.tokens),
        "prefill_512": prefill,
        "batch_8": lambda: 8 * args.tokens / engine.generate(16, args.tokens, 8),
    }
    result = {name: figures[name]() for name in ([args.only] if args.only else figures)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
