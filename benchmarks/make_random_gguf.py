"""A GGUF with random weights of the size that people run, which nobody need download: Llama's shape quantized by llama.cpp itself,
or the shape of a mixture of experts in blocks of Q4_K that are made here.

    python benchmarks/make_random_gguf.py OUT.gguf --llama-python OTHER_ENV/bin/python [--layers 16] [--type Q4_K_M]
    python benchmarks/make_random_gguf.py OUT.gguf --shape qwen3-30b-a3b [--layers 4]
    python benchmarks/make_random_gguf.py OUT.gguf --shape lfm2-350m

The shape is Llama 3.2 1B's: 16 layers of 2,048, 32 heads of 64 over 8 of keys, 8,192 inside, 128,256 tokens, embedding and head
tied: 1.24 G weights, 0.8 GB as Q4_K_M. An f16 file (2.5 GB) is written beside OUT and removed. Needs the packages of `make test`
(gguf); OTHER_ENV has llama-cpp-python, whose llama_model_quantize packs the blocks: about a minute on two cores.

qwen3-30b-a3b: 2,048 wide, 32 heads of 128 over 4 of keys, 128 experts of 768 of which 8 are chosen, 151,936 tokens; 4 of its 48 layers are 1.8 GB, made
in seconds. Its numbers have a standard deviation of about 0.02.

lfm2-350m: 1,024 wide, 10 layers with a short convolution and 6 with attention (16 heads of 64 over 8), 4,608 inside, 65,536 tokens, head and
embedding tied, Qwen's form of chats: 0.2 GB.
"""

import argparse
import json
import os
import random
import subprocess
import time

import gguf
import numpy as np
from make_random_model import LLAMA, Blocks, made_up_tokenizer

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCABULARY = 2048, 8192, 32, 8, 64, 128256
NORMAL, CONTROL = 1, 3  # tokenizer.ggml.token_type
QUANTIZE = """
import ctypes, sys
import llama_cpp as ll
params = ll.llama_model_quantize_default_params()
params.ftype = getattr(ll, "LLAMA_FTYPE_MOSTLY_" + sys.argv[3])
sys.exit(ll.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(params)))
"""


def matrices(layers: int) -> dict[str, tuple[int, int]]:
    """Name → (rows, columns) of all f16 tensors."""
    layer = {
        "attn_q": (HEADS * HEAD, HIDDEN),
        "attn_k": (KV_HEADS * HEAD, HIDDEN),
        "attn_v": (KV_HEADS * HEAD, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    made = {"token_embd.weight": (VOCABULARY, HIDDEN)}
    return made | {f"blk.{i}.{name}.weight": shape for i in range(layers) for name, shape in layer.items()}


def write_f16(path: str, layers: int, seed: int) -> None:
    """The file that is quantized: metadata, norms of 1, matrices with a standard deviation of 0.02."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("random 1.2B")
    writer.add_context_length(LLAMA["max_position_embeddings"])
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(layers)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(LLAMA["rope_theta"])
    writer.add_layer_norm_rms_eps(LLAMA["rms_norm_eps"])
    writer.add_vocab_size(VOCABULARY)
    model = json.loads(made_up_tokenizer(LLAMA, seed))["model"]
    control = [f"<|control_{i}|>" for i in range(VOCABULARY - len(model["vocab"]))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*model["vocab"], *control])
    writer.add_token_types([NORMAL] * len(model["vocab"]) + [CONTROL] * len(control))
    writer.add_token_merges(model["merges"])
    writer.add_bos_token_id(LLAMA["bos_token_id"])
    writer.add_eos_token_id(LLAMA["eos_token_id"])
    norms = ["output_norm", *(f"blk.{i}.{norm}" for i in range(layers) for norm in ("attn_norm", "ffn_norm"))]
    shapes = matrices(layers)
    for name in norms:
        writer.add_tensor_info(f"{name}.weight", (HIDDEN,), np.dtype(np.float32), 4 * HIDDEN)
    for name, (rows, columns) in shapes.items():
        writer.add_tensor_info(name, (rows, columns), np.dtype(np.float16), 2 * rows * columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _ in norms:
        writer.write_tensor_data(np.ones(HIDDEN, np.float32))
    block = np.frombuffer(Blocks(seed).block("f16"), np.float16)
    draw = random.Random(seed)
    for shape in shapes.values():
        # Cut from one block of random numbers at a place of its own: drawing 1.2 G numbers takes a minute.
        writer.write_tensor_data(np.resize(np.roll(block, draw.randrange(block.size)), shape))
    writer.close()


MOE: dict[str, int] = dict(
    hidden=2048, heads=32, kv_heads=4, head=128, inner=6144, experts=128, chosen=8, expert_inner=768, vocabulary=151936
)
K_BLOCK, K_BYTES = 256, 144  # of Q4_K: d, dmin f16, 12 bytes of scales, 128 of numbers


def q4_k_blocks(count: int, rng: np.random.Generator) -> np.ndarray:
    """u8 [count, 144]: random scales, minima and numbers; d so small that weights have a standard deviation of about 0.02, dmin 7.5 d,
    so that their mean is 0."""
    blocks = rng.integers(0, 256, (count, K_BYTES), np.uint8)
    blocks[:, :4] = np.array([1e-4, 7.5e-4], np.float16).view(np.uint8)
    return blocks


def write_mixture(path: str, layers: int, seed: int) -> None:
    """qwen3-30b-a3b with `layers` layers."""
    m, rng, draw = MOE, np.random.default_rng(seed), random.Random(seed)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_name("random mixture of experts")
    writer.add_context_length(40960)
    writer.add_embedding_length(m["hidden"])
    writer.add_feed_forward_length(m["inner"])
    writer.add_block_count(layers)
    writer.add_head_count(m["heads"])
    writer.add_head_count_kv(m["kv_heads"])
    writer.add_key_length(m["head"])
    writer.add_value_length(m["head"])
    writer.add_rope_freq_base(1000000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(m["experts"])
    writer.add_expert_used_count(m["chosen"])
    writer.add_expert_feed_forward_length(m["expert_inner"])
    model = json.loads(made_up_tokenizer(LLAMA, seed))["model"]
    control = [f"<|control_{i}|>" for i in range(m["vocabulary"] - len(model["vocab"]))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*model["vocab"], *control])
    writer.add_token_types([NORMAL] * len(model["vocab"]) + [CONTROL] * len(control))
    writer.add_token_merges(model["merges"])
    writer.add_bos_token_id(LLAMA["bos_token_id"])
    writer.add_eos_token_id(LLAMA["eos_token_id"])
    q, kv, hidden, inner, experts = (
        m["heads"] * m["head"],
        m["kv_heads"] * m["head"],
        m["hidden"],
        m["expert_inner"],
        m["experts"],
    )
    matrices = {"attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, q)}
    matrices |= {f"ffn_{name}_exps": (experts, inner, hidden) for name in ("gate", "up")}
    matrices |= {"ffn_down_exps": (experts, hidden, inner)}
    norms = {"attn_norm": hidden, "ffn_norm": hidden, "attn_q_norm": m["head"], "attn_k_norm": m["head"]}
    blocks = q4_k_blocks(1 << 17, rng)

    def add_blocks(name: str, shape: tuple[int, ...]) -> None:
        count = int(np.prod(shape)) // K_BLOCK
        data = np.resize(np.roll(blocks, draw.randrange(len(blocks)), axis=0), (count, K_BYTES))
        rows = data.reshape(*shape[:-1], shape[-1] // K_BLOCK * K_BYTES)
        writer.add_tensor(f"{name}.weight", rows, raw_dtype=gguf.GGMLQuantizationType.Q4_K)

    add_blocks("token_embd", (m["vocabulary"], hidden))
    add_blocks("output", (m["vocabulary"], hidden))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for i in range(layers):
        for name, width in norms.items():
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(width, np.float32))
        router = (rng.standard_normal((experts, hidden)) * 0.05).astype(np.float32)
        writer.add_tensor(f"blk.{i}.ffn_gate_inp.weight", router)
        for name, shape in matrices.items():
            add_blocks(f"blk.{i}.{name}", shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


LFM2 = dict(hidden=1024, heads=16, kv_heads=8, inner=4608, vocabulary=65536, kernel=3)
LFM2_ATTENTION = (2, 5, 8, 10, 12, 14)  # of 16 layers
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_lfm2(path: str, seed: int) -> None:
    """lfm2-350m."""
    m, rng, draw = LFM2, np.random.default_rng(seed), random.Random(seed)
    hidden, inner, vocabulary = m["hidden"], m["inner"], m["vocabulary"]
    writer = gguf.GGUFWriter(path, "lfm2")
    writer.add_name("random LFM2 350M")
    writer.add_context_length(128000)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_block_count(16)
    writer.add_head_count(m["heads"])
    writer.add_head_count_kv([m["kv_heads"] if layer in LFM2_ATTENTION else 0 for layer in range(16)])
    writer.add_rope_freq_base(1000000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_uint32("lfm2.shortconv.l_cache", m["kernel"])
    writer.add_vocab_size(vocabulary)
    tokenizer = json.loads(made_up_tokenizer({"model_type": "qwen2", "eos_token_id": vocabulary - 1}, seed))
    control = [token["content"] for token in tokenizer["added_tokens"]]
    model = tokenizer["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*model["vocab"], *control])
    writer.add_token_types([NORMAL] * len(model["vocab"]) + [CONTROL] * len(control))
    writer.add_token_merges(model["merges"])
    writer.add_eos_token_id(vocabulary - 1)
    writer.add_chat_template(CHAT)
    blocks = q4_k_blocks(1 << 16, rng)

    def add_blocks(name: str, rows: int, columns: int) -> None:
        data = np.resize(np.roll(blocks, draw.randrange(len(blocks)), axis=0), (rows * columns // K_BLOCK, K_BYTES))
        shaped = data.reshape(rows, columns // K_BLOCK * K_BYTES)
        writer.add_tensor(f"{name}.weight", shaped, raw_dtype=gguf.GGMLQuantizationType.Q4_K)

    add_blocks("token_embd", vocabulary, hidden)
    writer.add_tensor("token_embd_norm.weight", np.ones(hidden, np.float32))
    for i in range(16):
        at, head = f"blk.{i}", hidden // m["heads"]
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{at}.{norm}.weight", np.ones(hidden, np.float32))
        if i in LFM2_ATTENTION:
            kv = m["kv_heads"] * head
            for name, rows in (("attn_q", hidden), ("attn_k", kv), ("attn_v", kv), ("attn_output", hidden)):
                add_blocks(f"{at}.{name}", rows, hidden)
            for norm in ("attn_q_norm", "attn_k_norm"):
                writer.add_tensor(f"{at}.{norm}.weight", np.ones(head, np.float32))
        else:
            taps = (rng.standard_normal((hidden, m["kernel"])) * 0.5).astype(np.float32)
            writer.add_tensor(f"{at}.shortconv.conv.weight", taps)
            add_blocks(f"{at}.shortconv.in_proj", 3 * hidden, hidden)
            add_blocks(f"{at}.shortconv.out_proj", hidden, hidden)
        add_blocks(f"{at}.ffn_gate", inner, hidden)
        add_blocks(f"{at}.ffn_up", inner, hidden)
        add_blocks(f"{at}.ffn_down", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--shape", default="llama-1b", choices=("llama-1b", "qwen3-30b-a3b", "lfm2-350m"))
    parser.add_argument("--llama-python", help="a Python that has llama-cpp-python; for llama-1b")
    parser.add_argument("--layers", type=int, help="16 of llama-1b, 4 of qwen3-30b-a3b by default")
    parser.add_argument("--type", default="Q4_K_M", help="one of llama.cpp's file types")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.perf_counter()
    wide = f"{args.out}.f16"
    if args.shape != "llama-1b":
        if args.shape == "lfm2-350m":
            write_lfm2(args.out, args.seed)
        else:
            write_mixture(args.out, args.layers or 4, args.seed)
        print(f"{args.out}: {os.path.getsize(args.out) / 1e9:.2f} GB in {time.perf_counter() - start:.0f} s")
        return
    if args.llama_python is None:
        parser.error("--shape llama-1b needs --llama-python")
    try:
        write_f16(wide, args.layers or 16, args.seed)
        command = [args.llama_python, "-c", QUANTIZE, wide, args.out, args.type]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"llama_model_quantize failed with {done.returncode}:\n{done.stderr[-2000:]}")
    finally:
        if os.path.exists(wide):
            os.remove(wide)
    print(f"{args.out}: {os.path.getsize(args.out) / 1e9:.2f} GB in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
