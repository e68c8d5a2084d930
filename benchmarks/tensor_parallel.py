"""A model on one device and on several: `python benchmarks/tensor_parallel.py [--device cuda] [--sizes 1,2,2/f32,pp2] [--quantize none,fp8]`.

Random bf16 weights, by default eight layers of a 32B shape (hidden 5,120, 40 heads of 128 for 8 KV heads, inner 27,648), with --latent of
DeepSeek-V2-Lite's (the first without experts), are written to --folder (8 GB; memory is best). For each size (2: tensor parallel; 2+own: with
--data-parallel-attention; 2+own+experts: and --expert-parallel; 2/f32: with ZSE_ALL_REDUCE=f32; pp2: a pipeline): the start's phases, then of
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

REPLY = 4  # tokens behind a prompt that is measured
SHARED = dict(
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    hidden_act="silu",
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    torch_dtype="bfloat16",
)
LATENT = SHARED | dict(
    architectures=["DeepseekV2ForCausalLM"],
    model_type="deepseek_v2",
    vocab_size=102400,
    hidden_size=2048,
    intermediate_size=10944,
    num_attention_heads=16,
    num_key_value_heads=16,
    kv_lora_rank=512,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=64,
    n_shared_experts=2,
    num_experts_per_tok=6,
    moe_intermediate_size=1408,
    first_k_dense_replace=1,
    topk_method="greedy",
    norm_topk_prob=False,
    routed_scaling_factor=1.0,
)
WRITERS = 8  # threads that write the file


def config_of(args) -> dict:
    if args.latent:
        return LATENT | dict(num_hidden_layers=args.layers)
    return SHARED | dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.inner,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
    )


def latent_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    hidden, inner, experts, vocab = 2048, 1408, 64, LATENT["vocab_size"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
    }
    found["model.norm.weight"] = (hidden,)
    for layer in range(layers):
        at = f"model.layers.{layer}."
        attention = dict(q_proj=(16 * 192, hidden), kv_a_proj_with_mqa=(576, hidden), kv_a_layernorm=(512,))
        attention |= dict(kv_b_proj=(16 * 256, 512), o_proj=(hidden, 16 * 128))
        found |= {f"{at}self_attn.{name}.weight": shape for name, shape in attention.items()}
        found |= {f"{at}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        mlps = {"": LATENT["intermediate_size"]} if not layer else {f"experts.{i}.": inner for i in range(experts)}
        if layer:
            found[f"{at}mlp.gate.weight"] = experts, hidden
            mlps["shared_experts."] = 2 * inner
        for name, width in mlps.items():
            found |= {f"{at}mlp.{name}{role}_proj.weight": (width, hidden) for role in ("gate", "up")}
            found[f"{at}mlp.{name}down_proj.weight"] = hidden, width
    return found


def shapes_of(args) -> dict[str, tuple[int, ...]]:
    if args.latent:
        return latent_shapes(args.layers)
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
    ranks, *more = ranks.split("+")
    os.environ["ZSE_ALL_REDUCE"] = sent
    kind = "pipeline_parallel_size" if ranks.startswith("pp") else "tensor_parallel_size"
    options = {kind: int(ranks.removeprefix("pp")), "max_context": 2048, "max_rows": max(args.requests)}
    options |= {{"own": "data_parallel_attention", "experts": "expert_parallel"}[name]: True for name in more}
    options |= {"max_context": 4096} if args.latent else {}
    begun, reply = time.perf_counter(), []
    with LLM(str(folder), device=args.device, speculation="none", quantize=quantize, **options) as llm:
        ready = round(1000 * (time.perf_counter() - begun))
        phases = {name: round(ms) for name, ms in llm.phases_ms.items()}
        found: dict = {"size": size, "quantize": quantize, "ready_ms": ready, "start_ms": phases}
        long = ((*map(int, each.split("x")), REPLY) for each in args.prompts.split(","))
        for rows, prompt, count in [*((rows, 32, 100 if rows == 1 else 60) for rows in args.requests), *long]:
            run(llm._engine, args.vocab, rows, prompt, count, 1)  # records what is measured then
            tries = [run(llm._engine, args.vocab, rows, prompt, count, 2 + again) for again in range(args.tries)]
            first_s, per_s, replies = min(each[0] for each in tries), max(each[1] for each in tries), tries[0][2]
            found[f"{rows} x {prompt}"] = {"first_ms": round(1000 * first_s, 2), "tokens_per_s": round(per_s, 1)}
            reply = reply or replies[0]
        ids = np.random.default_rng(3).integers(3, args.vocab, 1024).tolist()
        return found, reply, np.array(llm.logprobs_of(ids).logprobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", default="1,2")
    parser.add_argument("--requests", default="1,64")
    parser.add_argument("--prompts", default="1x1024", help="how many and how long")
    parser.add_argument("--tries", type=int, default=1, help="the best of so many")
    parser.add_argument("--latent", action="store_true", help="DeepSeek-V2-Lite's shape; --layers counts alone")
    parser.add_argument("--keep", action="store_true", help="what an earlier run wrote to --folder")
    parser.add_argument("--quantize", default="none,fp8")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/zse-tensor-parallel"))
    shape = dict(layers=8, hidden=5120, heads=40, kv_heads=8, head_dim=128, inner=27648, vocab=32768)
    for name, value in shape.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    args = parser.parse_args()
    args.requests = [int(rows) for rows in args.requests.split(",")]
    begun = time.perf_counter()
    if args.latent:
        args.vocab = LATENT["vocab_size"]
    if not args.keep:
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
