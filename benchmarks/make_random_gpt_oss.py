"""A `.zse` file of gpt-oss-20b's shape with random weights, as `zse convert --for gpu` leaves its GGUF file: experts in MXFP4, attention,
embedding and head in 8 bits.

    python benchmarks/make_random_gpt_oss.py OUT.zse [--layers N]

24 layers of 2,880, 64 heads of 64 over 8 of keys, sinks, a window of 128 in every other layer, 32 experts of 2,880 of which 4 are chosen,
201,088 tokens: 12.9 GB, of which a token reads 2.65 GB. Numbers have a standard deviation of 0.02.
"""

import argparse
import os
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from make_random_model import STD, TEMPLATE, TOKENIZER_CONFIG, Blocks, made_up_tokenizer

from zse.formats.zse import TOKENIZER_IMAGE
from zse.formats.zse_writer import PlannedTensor, ZseWriter, place_blobs, to_json
from zse.tokenizer.huggingface import from_json

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD, VOCABULARY = 2880, 2880, 24, 64, 8, 64, 201088
EXPERTS, CHOSEN = 32, 4
INT8, MXFP4 = "int8-g32-sym", "lut4-fp4-g32"  # a GPU's scales of MXFP4 are f16
UNIFORM_STD = {INT8: 73.9, MXFP4: 2.93}  # of random codes
EOS = VOCABULARY - 1
METADATA = {
    "context_length": 131072,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "expert_feed_forward_length": INNER,
    "expert_count": EXPERTS,
    "expert_used_count": CHOSEN,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD,
    "attention.value_length": HEAD,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.sliding_window": 128,
    "rope.freq_base": 150000.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 32.0,
    "rope.scaling.original_context_length": 4096,
}


def tensors(layers: int) -> list[PlannedTensor]:
    """Vectors and routers, the embedding, layers, the head."""
    q, kv = HEADS * HEAD, KV_HEADS * HEAD
    small, large = [], [PlannedTensor("token_embd.weight", "r16", INT8, (VOCABULARY, HIDDEN))]
    for at in (f"blk.{layer}." for layer in range(layers)):
        sizes = dict(attn_norm=HIDDEN, post_attention_norm=HIDDEN, attn_sinks=HEADS)
        small += [PlannedTensor(f"{at}{name}.weight", "rows", "F32", (size,)) for name, size in sizes.items()]
        sizes = dict(attn_q=q, attn_k=kv, attn_v=kv, attn_output=HIDDEN, ffn_gate_inp=EXPERTS)
        sizes |= dict(ffn_gate_exps=EXPERTS * INNER, ffn_up_exps=EXPERTS * INNER, ffn_down_exps=EXPERTS * HIDDEN)
        small += [PlannedTensor(f"{at}{name}.bias", "rows", "F32", (size,)) for name, size in sizes.items()]
        small.append(PlannedTensor(f"{at}ffn_gate_inp.weight", "rows", "F32", (EXPERTS, HIDDEN)))
        for name, shape in {
            "attn_q": (q, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, q),
            "ffn_gate_exps": (EXPERTS * INNER, HIDDEN),
            "ffn_up_exps": (EXPERTS * INNER, HIDDEN),
            "ffn_down_exps": (EXPERTS * HIDDEN, INNER),
        }.items():
            scheme, group = MXFP4 if "exps" in name else INT8, f"{at}qkv" if name[-2:] in ("_q", "_k", "_v") else None
            large.append(PlannedTensor(f"{at}{name}.weight", "r16", scheme, shape, group))
    small.append(PlannedTensor("output_norm.weight", "rows", "F32", (HIDDEN,)))
    return [*small, *large, PlannedTensor("output.weight", "r16", INT8, (VOCABULARY, HIDDEN))]


def content(tensor: PlannedTensor, blocks: Blocks, seed: int):
    """(plane, offset, bytes) of everything."""
    if not tensor.planes:
        numbers = np.random.default_rng(seed).standard_normal(tensor.shape, np.float32) * np.float32(STD)
        yield 0, 0, (np.ones_like(numbers) if "norm" in tensor.name else numbers).tobytes()
        return
    for number, plane in enumerate(tensor.planes):
        if plane.name == "q":
            for offset, piece in blocks.take("bits", plane.nbytes, seed):
                yield number, offset, piece
        else:
            yield number, 0, np.full(plane.nbytes // 2, STD / UNIFORM_STD[tensor.type], np.float16).tobytes()


def write(out: str, layers: int, threads: int) -> int:
    """Bytes of the file."""
    tokenizer = made_up_tokenizer({"model_type": "qwen2", "eos_token_id": EOS}, 0)
    image = from_json(tokenizer, TOKENIZER_CONFIG, {}, {"eos_token_id": EOS}).to_section()
    blobs = [tokenizer, image]
    arrays = {
        name: {"type": "bytes", "count": len(data), "offset": offset, "nbytes": len(data), "crc32": zlib.crc32(data)}
        for name, data, offset in zip(("tokenizer.json", TOKENIZER_IMAGE), blobs, place_blobs(blobs)[0], strict=True)
    }
    metadata = {f"gpt-oss.{name}": value for name, value in METADATA.items()} | {"gpt-oss.block_count": layers}
    metadata |= {"general.architecture": "gpt-oss", "tokenizer.ggml.eos_token_id": EOS}
    small = {
        "config": to_json({"naming": "gguf", "metadata": metadata, "hf_config": None, "generation_config": None}),
        "tokenizer": to_json({"kind": "hf", "config": TOKENIZER_CONFIG, "special_tokens": {}, "arrays": arrays}),
        "template": TEMPLATE.encode(),
        "provenance": to_json({"made_by": "benchmarks/make_random_gpt_oss.py", "weights": "random"}),
    }
    plan, blocks = tensors(layers), Blocks(0)
    blocks.block("bits")
    if os.path.exists(out + ".part"):
        os.unlink(out + ".part")
    writer = ZseWriter(out, plan, small, blobs, b"random", is_durable=False)
    with writer, ThreadPoolExecutor(threads) as pool:
        jobs = [
            pool.submit(lambda at: writer.write(at, content(plan[at], blocks, at)), number)
            for number in range(len(plan))
        ]
        for done in jobs:
            done.result()
        writer.finish()
    return writer.file_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    own = parser.parse_args()
    start = time.perf_counter()
    nbytes = write(own.out, own.layers, own.threads)
    print(f"{own.out}: gpt-oss-20b, {nbytes / 1e9:.2f} GB in {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
