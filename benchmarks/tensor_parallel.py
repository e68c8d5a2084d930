"""A model on one device and on several: `python benchmarks/tensor_parallel.py [--device cuda] [--sizes 1,2,2/f32,pp2] [--quantize none,fp8]`.

Random bf16 weights, by default eight layers of a 32B shape (hidden 5,120, 40 heads of 128 for 8 KV heads, inner 27,648), are written to
--folder (8 GB; memory is best). For each size (2: tensor parallel; 2/f32: with ZSE_ALL_REDUCE=f32; pp2: a pipeline): the start's phases, then of
one request and of several the tokens a second once all have a first one, and the time to that one; how many of a greedy reply's tokens are those
of the first size, and how far the log-probabilities of a prompt are from its (of the largest)."""

import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from zse import LLM
from zse.sampling.params import SamplingParams

LONG = (1, 1024, 4)  # requests, tokens of a prompt and of a reply
WRITERS = 8  # threads that write the file


def config_of(args) -> dict:
    return dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.inner,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        hidden_act="silu",
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        torch_dtype="bfloat16",
    )


def shapes_of(args) -> dict[str, tuple[int, ...]]:
    hidden, inner, q, kv = args.hidden, args.inner, args.heads * args.head_dim, args.kv_heads * args.head_dim
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (args.vocab, hidden),
        "lm_head.weight": (args.vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    products = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    for layer in range(args.layers):
        at = f"model.layers.{layer}."
        found |= {f"{at}self_attn.{name}_proj.weight": shape for name, shape in products.items()}
        found |= {f"{at}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        found[f"{at}mlp.down_proj.weight"] = hidden, inner
        found |= {f"{at}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    return found


def write(folder: Path, args) -> None:
    """Numbers of both signs from 2**-7 to 2**-6, parts of one block of them from random places; norms are 1."""
    folder.mkdir(parents=True, exist_ok=True)
    header, end = {}, 0
    for name, shape in shapes_of(args).items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 16, 1 << 25, np.uint16) & np.uint16(0x807F) | np.uint16(0x3C00)
    block = bits.view(np.uint8)
    with (folder / "model.safetensors").open("wb") as file, ThreadPoolExecutor(WRITERS) as pool:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()

        def fill(entry: dict, start: int) -> None:
            at, end = (8 + len(text) + offset for offset in entry["data_offsets"])
            if len(entry["shape"]) == 1:
                os.pwrite(file.fileno(), np.full(entry["shape"], 0x3F80, np.uint16).tobytes(), at)
                return
            while at < end:
                at += os.pwrite(file.fileno(), block[start : start + end - at], at)
                start = 0

        for done in [pool.submit(fill, entry, 2 * int(rng.integers(0, 1 << 20))) for entry in header.values()]:
            done.result()
    (folder / "config.json").write_text(json.dumps(config_of(args)))


def run(engine, vocab: int, rows: int, prompt: int, count: int, seed: int) -> tuple[float, float, list[list[int]]]:
    """(seconds until all have a token, tokens a second from then on, the replies)."""
    rng, params = np.random.default_rng(seed), SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    for row in range(rows):
        engine.submit(1000 * seed + row, rng.integers(3, vocab, prompt).tolist(), params)
    replies: dict[int, list[int]] = {}
    begun, first = time.perf_counter(), None
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise output.error
            replies.setdefault(output.id, []).extend(output.tokens)
        if first is None and len(replies) == rows:
            first = time.perf_counter(), sum(map(len, replies.values()))
    assert first is not None
    total, end = sum(map(len, replies.values())), time.perf_counter()
    return first[0] - begun, (total - first[1]) / (end - first[0]), [replies[id] for id in sorted(replies)]


def measure(folder: Path, args, size: str, quantize: str | None) -> tuple[dict, list[int], np.ndarray]:
    """(figures, a greedy reply, the log-probabilities of a prompt's tokens)."""
    ranks, _, sent = size.partition("/")
    os.environ["ZSE_ALL_REDUCE"] = sent
    kind = "pipeline_parallel_size" if ranks.startswith("pp") else "tensor_parallel_size"
    options = {kind: int(ranks.removeprefix("pp")), "max_context": 2048, "max_rows": max(args.requests)}
    begun, reply = time.perf_counter(), []
    with LLM(str(folder), device=args.device, speculation="none", quantize=quantize, **options) as llm:
        ready = round(1000 * (time.perf_counter() - begun))
        phases = {name: round(ms) for name, ms in llm.phases_ms.items()}
        found: dict = {"size": size, "quantize": quantize, "ready_ms": ready, "start_ms": phases}
        for rows, prompt, count in [*((rows, 32, 100 if rows == 1 else 60) for rows in args.requests), LONG]:
            run(llm._engine, args.vocab, rows, prompt, count, 1)  # records what is measured then
            first_s, per_s, replies = run(llm._engine, args.vocab, rows, prompt, count, 2)
            found[f"{rows} x {prompt}"] = {"first_ms": round(1000 * first_s, 2), "tokens_per_s": round(per_s, 1)}
            reply = reply or replies[0]
        ids = np.random.default_rng(3).integers(3, args.vocab, 1024).tolist()
        return found, reply, np.array(llm.logprobs_of(ids).logprobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", default="1,2")
    parser.add_argument("--requests", default="1,64")
    parser.add_argument("--quantize", default="none,fp8")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/zse-tensor-parallel"))
    shape = dict(layers=8, hidden=5120, heads=40, kv_heads=8, head_dim=128, inner=27648, vocab=32768)
    for name, value in shape.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    args = parser.parse_args()
    args.requests = [int(rows) for rows in args.requests.split(",")]
    begun = time.perf_counter()
    write(args.folder, args)
    print(json.dumps({"written_s": round(time.perf_counter() - begun, 1)}), flush=True)
    for quantize in args.quantize.split(","):
        alone: tuple[list[int], np.ndarray] | None = None
        for size in args.sizes.split(","):
            found, reply, told = measure(args.folder, args, size, None if quantize == "none" else quantize)
            alone = alone or (reply, told)
            pairs = zip(reply, alone[0], strict=True)
            found["same_tokens"] = next((count for count, (a, b) in enumerate(pairs) if a != b), len(reply))
            off = np.abs(told - alone[1]) / np.abs(alone[1]).max()
            found["off"] = {"most": round(float(off.max()), 5), "mean": round(float(off.mean()), 6)}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
