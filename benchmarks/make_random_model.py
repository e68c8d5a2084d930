"""Models with random weights in published shapes, made in seconds: for benchmarks, which do not care what is said.

    python benchmarks/make_random_model.py OUT [--shape qwen2.5-7b] [--type int4] [--layers N] [--tokenizer FILE] [--mtp] [--eagle3]

--type int4 | int8 | fp8 | bf16 writes a `.zse` file straight in the layout that GPU kernels read (int4: groups of 128,
embedding and head int8; a router and its stacks of experts as convert leaves them); hf-bf16 | hf-fp8 | hf-awq | hf-gptq write a Hugging Face directory (safetensors; GPTQ with
act-order, which is one order for modules that read the same). Numbers have a
standard deviation of 0.02, norms are 1. Weights are cut at random places from a block of random bytes, so that writing
is as fast as the page cache. --mtp: of qwen3.5 with its next-token block. --eagle3: instead of the model an EAGLE-3 head for it, a directory in bf16, of the
first 32,000 tokens. Unless --tokenizer names a tokenizer.json, a byte-level BPE vocabulary of the shape's size
is made up.
"""

import argparse
import json
import os
import random
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from zse.formats.quantized import AWQ_ORDER
from zse.formats.zse import TOKENIZER_IMAGE
from zse.formats.zse_writer import PlannedTensor, ZseWriter, place_blobs, to_json
from zse.quant.pack import f32_to_bf16, f32_to_e4m3
from zse.tokenizer.huggingface import from_json

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
    "vocab_size": 152064,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}

QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}

# Three layers of Gated DeltaNet, then one that attends.
QWEN35 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 248044,
    "eos_token_id": 248046,
    "torch_dtype": "bfloat16",
    "vocab_size": 248320,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def _sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
    }


SHAPES = {
    "qwen2.5-0.5b": QWEN2
    | _sizes(896, 4864, 24, 14, 2)
    | {"head_dim": 64, "tie_word_embeddings": True, "vocab_size": 151936},
    "qwen2.5-7b": QWEN2 | _sizes(3584, 18944, 28, 28, 4),
    "qwen2.5-14b": QWEN2 | _sizes(5120, 13824, 48, 40, 8) | {"rms_norm_eps": 1e-05},
    "qwen2.5-32b": QWEN2 | _sizes(5120, 27648, 64, 40, 8) | {"rms_norm_eps": 1e-05},
    "qwen3-30b-a3b": QWEN3_MOE | _sizes(2048, 6144, 48, 32, 4),
    "qwen3.5-0.8b": QWEN35
    | _sizes(1024, 3584, 24, 8, 2)
    | {"head_dim": 256, "linear_num_value_heads": 16, "tie_word_embeddings": True},
    "qwen3.5-9b": QWEN35 | _sizes(4096, 12288, 32, 16, 4) | {"head_dim": 256},
    "llama3.1-8b": LLAMA | _sizes(4096, 14336, 32, 32, 8),
    "tiny": QWEN2
    | _sizes(256, 512, 2, 4, 2)
    | {"head_dim": 64, "vocab_size": 2048, "bos_token_id": 2000, "eos_token_id": 2002},
}
HEAD = dict(architectures=["LlamaForCausalLMEagle3"], model_type="llama", num_hidden_layers=1, draft_vocab_size=32_000)
HEAD |= dict(tie_word_embeddings=False)
AS_THEY_ARE = ("mlp.gate.weight", "conv1d.weight", "in_proj_b.weight", "in_proj_a.weight")  # as convert leaves them
TYPES = ("int4", "int8", "fp8", "bf16", "hf-bf16", "hf-fp8", "hf-awq", "hf-gptq")
STD = 0.02
GROUP = 128
BLOCK_BYTES = 32 << 20
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
    " + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="the .zse file or, for --type hf-..., the folder to write")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--type", choices=TYPES, default="int4")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--tokenizer", help="a tokenizer.json to take instead of a made-up one")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mtp", action="store_true", help="with the next-token block, of qwen3.5 shapes")
    parser.add_argument("--eagle3", action="store_true", help="an EAGLE-3 head for the shape, --type hf-bf16")
    own = parser.parse_args()
    start = time.perf_counter()
    config = dict(SHAPES[own.shape])
    if own.eagle3:
        own.type, config = "hf-bf16", config | HEAD
    if own.layers:
        config["num_hidden_layers"] = own.layers
    if own.mtp:
        if config["model_type"] != "qwen3_5_text":
            parser.error("--mtp: of qwen3.5 shapes")
        config["mtp_num_hidden_layers"] = 1
    tokenizer = open(own.tokenizer, "rb").read() if own.tokenizer else made_up_tokenizer(config, own.seed)
    if ("num_experts" in config or "full_attention_interval" in config) and own.type.startswith("hf-"):
        parser.error(f"{own.shape} is written as a .zse: --type int4, int8, fp8 or bf16")
    write = write_directory if own.type.startswith("hf-") else write_zse
    nbytes = write(own.out, config, own.type.removeprefix("hf-"), tokenizer, Blocks(own.seed), own.threads)
    print(f"{own.out}: {own.shape} {own.type}, {nbytes / 1e9:.2f} GB in {time.perf_counter() - start:.1f} s")
    return 0


class Blocks:
    """Random content by kind, cut from one block of each: `take(kind, nbytes)` yields pieces."""

    def __init__(self, seed: int):
        self._rng = np.random.default_rng(seed)
        self._made: dict[str, memoryview] = {}

    def block(self, kind: str) -> memoryview:
        if kind not in self._made:
            count, rng = BLOCK_BYTES, self._rng
            if kind == "bits":
                data = rng.bytes(count)
            elif kind == "bf16":
                data = f32_to_bf16(rng.standard_normal(count // 2, np.float32) * np.float32(STD)).tobytes()
            elif kind == "f16":
                data = (rng.standard_normal(count // 2, np.float32) * np.float32(STD)).astype(np.float16).tobytes()
            elif kind == "e4m3":
                data = 8 * f32_to_e4m3(rng.standard_normal(count // 8, np.float32) * np.float32(64)).tobytes()
            else:
                raise ValueError(kind)
            self._made[kind] = memoryview(data)
        return self._made[kind]

    def take(self, kind: str, nbytes: int, seed: int):
        """(offset, bytes) pieces of `nbytes` in all, from places that depend on the seed."""
        block, rng, done = self.block(kind), random.Random(seed), 0
        while done < nbytes:
            start = rng.randrange(0, BLOCK_BYTES // 2, 64)
            piece = block[start : start + min(nbytes - done, BLOCK_BYTES - start)]
            yield done, piece
            done += piece.nbytes


def tensors(config: dict) -> list[tuple[str, tuple[int, ...], str | None]]:
    """(name, shape, group) as a checkpoint has them, in the order of a `.zse`: small ones, embedding, layers, head."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    if "draft_vocab_size" in config:
        return head_tensors(config, q, kv)
    small: list = []
    large: list = [("model.embed_tokens.weight", (config["vocab_size"], hidden), None)]
    layers = [(layer, f"model.layers.{layer}.") for layer in range(config["num_hidden_layers"])]
    if config.get("mtp_num_hidden_layers"):
        layers.append((config["full_attention_interval"] - 1, "mtp.layers.0."))
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        small += [(f"mtp.{name}.weight", (hidden,), None) for name in norms]
        large.append(("mtp.fc.weight", (hidden, 2 * hidden), None))
    for layer, at in layers:
        small += [
            (at + "input_layernorm.weight", (hidden,), None),
            (at + "post_attention_layernorm.weight", (hidden,), None),
        ]
        if config["model_type"] == "qwen2":
            small += [
                (f"{at}self_attn.{name}_proj.bias", (rows,), at + "qkv_bias")
                for name, rows in (("q", q), ("k", kv), ("v", kv))
            ]
        if config["model_type"] == "qwen3_5_text":
            mixer_small, mixer_large = qwen35_mixer(config, layer, at)
            small, large = small + mixer_small, large + mixer_large
        else:
            large += [
                (f"{at}self_attn.{name}_proj.weight", (rows, hidden), at + "qkv")
                for name, rows in (("q", q), ("k", kv), ("v", kv))
            ]
            large.append((at + "self_attn.o_proj.weight", (hidden, q), None))
        if config["model_type"] == "qwen3_moe":
            small += [(f"{at}self_attn.{name}_norm.weight", (dim,), None) for name in "qk"]
            experts, inner = config["num_experts"], config["moe_intermediate_size"]
            large += [  # stacks, each expert's gate before its up
                (at + "mlp.gate.weight", (experts, hidden), None),
                (at + "mlp.experts.gate_up_proj", (experts * 2 * inner, hidden), None),
                (at + "mlp.experts.down_proj", (experts * hidden, inner), None),
            ]
            continue
        large += [
            (at + "mlp.gate_proj.weight", (inner, hidden), at + "gate_up"),
            (at + "mlp.up_proj.weight", (inner, hidden), at + "gate_up"),
            (at + "mlp.down_proj.weight", (hidden, inner), None),
        ]
    small.append(("model.norm.weight", (hidden,), None))
    if not config["tie_word_embeddings"]:
        large.append(("lm_head.weight", (config["vocab_size"], hidden), None))
    return small + large


def head_tensors(config: dict, q: int, kv: int) -> list[tuple[str, tuple[int, ...], str | None]]:
    """tensors() of an EAGLE-3 head."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["draft_vocab_size"]
    rows = {"self_attn.q": q, "self_attn.k": kv, "self_attn.v": kv, "mlp.gate": inner, "mlp.up": inner}
    shapes = {f"{name}_proj": (count, 2 * hidden if "attn" in name else hidden) for name, count in rows.items()}
    shapes |= {"self_attn.o_proj": (hidden, q), "mlp.down_proj": (hidden, inner)}
    norms = [f"midlayer.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    large = {
        "fc": (hidden, 3 * hidden),
        **{f"midlayer.{name}": shape for name, shape in shapes.items()},
        "lm_head": (vocab, hidden),
    }
    named = dict.fromkeys([*norms, "norm"], (hidden,)) | large
    return [("d2t", (vocab,), None), *((f"{name}.weight", shape, None) for name, shape in named.items())]


def qwen35_mixer(config: dict, layer: int, at: str) -> tuple[list, list]:
    """(small tensors, large ones) of what mixes a layer's tokens."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    if (layer + 1) % config["full_attention_interval"] == 0:
        small = [(f"{at}self_attn.{name}_norm.weight", (dim,), None) for name in "qk"]
        rows = {"q": 2 * q, "k": kv, "v": kv}  # q with its gate
        large = [(f"{at}self_attn.{name}_proj.weight", (rows[name], hidden), at + "qkv") for name in "qkv"]
        return small, [*large, (at + "self_attn.o_proj.weight", (hidden, q), None)]
    heads, size = config["linear_num_value_heads"], config["linear_value_head_dim"]
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + heads * size
    at += "linear_attn."
    small = [(at + "A_log", (heads,), None), (at + "dt_bias", (heads,), None), (at + "norm.weight", (size,), None)]
    large = [
        (f"{at}{name}.weight", (rows, hidden), None)
        for name, rows in (
            ("in_proj_qkv", channels),
            ("in_proj_z", heads * size),
            ("in_proj_b", heads),
            ("in_proj_a", heads),
        )
    ]
    large.append((at + "conv1d.weight", (channels, config["linear_conv_kernel_dim"]), None))
    return small, [*large, (at + "out_proj.weight", (hidden, heads * size), None)]


def write_zse(out: str, config: dict, type: str, tokenizer: bytes, blocks: Blocks, threads: int) -> int:
    plan = [planned(name, shape, group, type) for name, shape, group in tensors(config)]
    image = from_json(tokenizer, TOKENIZER_CONFIG, {}, {"eos_token_id": config["eos_token_id"]}).to_section()
    blobs = [tokenizer, image]
    import zlib

    arrays = {
        name: {"type": "bytes", "count": len(data), "offset": offset, "nbytes": len(data), "crc32": zlib.crc32(data)}
        for name, data, offset in zip(("tokenizer.json", TOKENIZER_IMAGE), blobs, place_blobs(blobs)[0], strict=True)
    }
    small = {
        "config": to_json(
            {
                "naming": "hf",
                "metadata": {},
                "hf_config": config,
                "generation_config": {"eos_token_id": config["eos_token_id"]},
            }
        ),
        "tokenizer": to_json({"kind": "hf", "config": TOKENIZER_CONFIG, "special_tokens": {}, "arrays": arrays}),
        "template": TEMPLATE.encode(),
        "provenance": to_json({"made_by": "benchmarks/make_random_model.py", "weights": "random"}),
    }
    if os.path.exists(out + ".part"):
        os.unlink(out + ".part")
    writer = ZseWriter(out, plan, small, blobs, b"random", is_durable=False)
    for kind in {"int4": "bits", "int8": "bits", "fp8": "e4m3"}.get(type, "bf16"), "bf16":
        blocks.block(kind)
    with writer, ThreadPoolExecutor(threads) as pool:

        def fill(number: int) -> None:
            writer.write(number, content(plan[number], blocks, number))

        for done in [pool.submit(fill, number) for number in range(len(plan))]:
            done.result()
        writer.finish()
    return writer.file_bytes


def planned(name: str, shape: tuple[int, ...], group: str | None, type: str) -> PlannedTensor:
    if len(shape) == 1:
        return PlannedTensor(name, "rows", "F32", shape, group)
    if type == "bf16" or name.endswith(AS_THEY_ARE):
        return PlannedTensor(name, "rows", "BF16", shape, group)
    if type == "fp8":
        return PlannedTensor(name, "rows", "fp8-row", shape, group)
    is_head = name in ("model.embed_tokens.weight", "lm_head.weight")
    columns = GROUP if shape[1] % GROUP == 0 else 32
    scheme = f"int8-g{columns}-sym" if type == "int8" or is_head else f"int4-g{columns}"
    return PlannedTensor(name, "r16", scheme, shape, group)


def content(tensor: PlannedTensor, blocks: Blocks, seed: int):
    """(plane, offset, bytes) of everything."""
    if len(tensor.shape) == 1:
        values = (
            np.ones(tensor.shape, np.float32)
            if "norm" in tensor.name
            else np.random.default_rng(seed).standard_normal(tensor.shape, np.float32) * np.float32(STD)
        )
        yield 0, 0, values.tobytes()
        return
    if tensor.type == "BF16":
        for offset, piece in blocks.take("bf16", tensor.nbytes, seed):
            yield 0, offset, piece
        return
    for number, plane in enumerate(tensor.planes):
        if plane.name in ("q", "w"):
            for offset, piece in blocks.take("bits" if plane.name == "q" else "e4m3", plane.nbytes, seed):
                yield number, offset, piece
            continue
        # Uniform integers below 16 or 256 deviate by 4.61 or 73.9; e4m3 codes were made with 64.
        step = STD / (64 if plane.dtype == "f32" else 4.61 if tensor.type.startswith("int4") else 73.9)
        value = step if plane.name == "scale" else -7.5 * step
        dtype = np.float32 if plane.dtype == "f32" else np.float16
        yield number, 0, np.full(plane.nbytes // np.dtype(dtype).itemsize, value, dtype).tobytes()


# -- Hugging Face directories


def write_directory(out: str, config: dict, type: str, tokenizer: bytes, blocks: Blocks, threads: int) -> int:
    os.makedirs(out, exist_ok=True)
    config = dict(config)
    entries: list[tuple[str, str, tuple[int, ...], str]] = []  # name, dtype, shape, kind of content
    for name, shape, _ in tensors(config):
        stem, is_linear = name.removesuffix(".weight"), "_proj.weight" in name
        plain = ("F16", "f16") if type in ("awq", "gptq") else ("BF16", "bf16")
        if name == "d2t":
            entries.append((name, "I64", shape, "nothing"))
        elif not is_linear or type == "bf16":
            entries.append((name, plain[0], shape, "ones" if "norm" in name else plain[1]))
        elif type == "fp8":
            entries += [(name, "F8_E4M3", shape, "e4m3"), (stem + ".weight_scale", "F32", (shape[0], 1), "scale")]
        elif type == "gptq":
            n, k = shape
            entries += [
                (stem + ".qweight", "I32", (k // 8, n), "bits"),
                (stem + ".qzeros", "I32", (k // GROUP, n // 8), "sevens"),
                (stem + ".scales", "F16", (k // GROUP, n), "scales"),
                (stem + ".g_idx", "I32", (k,), "groups"),
            ]
        else:
            n, k = shape
            entries += [
                (stem + ".qweight", "I32", (k, n // 8), "bits"),
                (stem + ".qzeros", "I32", (k // GROUP, n // 8), "zeros"),
                (stem + ".scales", "F16", (k // GROUP, n), "scales"),
            ]
    if type == "fp8":
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 8,
                        "type": "float",
                        "strategy": "channel",
                        "symmetric": True,
                        "dynamic": False,
                    },
                    "input_activations": {
                        "num_bits": 8,
                        "type": "float",
                        "strategy": "token",
                        "symmetric": True,
                        "dynamic": True,
                    },
                }
            },
        }
    if type == "awq":
        config |= {
            "torch_dtype": "float16",
            "quantization_config": {
                "bits": 4,
                "group_size": GROUP,
                "modules_to_not_convert": None,
                "quant_method": "awq",
                "version": "gemm",
                "zero_point": True,
            },
        }
        assert AWQ_ORDER[1] == 2
    if type == "gptq":
        method = {"bits": 4, "group_size": GROUP, "quant_method": "gptq", "sym": True, "desc_act": True}
        config |= {"torch_dtype": "float16", "quantization_config": method}
    for name, value in (
        ("config.json", config),
        ("tokenizer_config.json", TOKENIZER_CONFIG | {"chat_template": TEMPLATE}),
        ("generation_config.json", {"eos_token_id": config["eos_token_id"], "bos_token_id": config["bos_token_id"]}),
    ):
        with open(os.path.join(out, name), "w") as file:
            json.dump(value, file, indent=1)
    with open(os.path.join(out, "tokenizer.json"), "wb") as file:
        file.write(tokenizer)
    for kind in {entry[3] for entry in entries} & {"bits", "bf16", "f16", "e4m3"}:
        blocks.block(kind)
    shards: list[list] = [[]]
    size = 0
    for entry in entries:
        if size > 4 << 30:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry_bytes(entry)
    weight_map, total = {}, 0
    with ThreadPoolExecutor(threads) as pool:
        for number, shard in enumerate(shards, 1):
            file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            total += write_shard(os.path.join(out, file_name), shard, blocks, pool)
            weight_map |= {entry[0]: file_name for entry in shard}
    with open(os.path.join(out, "model.safetensors.index.json"), "w") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, file)
    return total


def entry_bytes(entry) -> int:
    _, dtype, shape, _ = entry
    return int(np.prod(shape)) * {"BF16": 2, "F16": 2, "F8_E4M3": 1, "F32": 4, "I32": 4, "I64": 8}[dtype]


def write_shard(path: str, entries: list, blocks: Blocks, pool: ThreadPoolExecutor) -> int:
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape, _ in entries:
        nbytes = entry_bytes((name, dtype, shape, None))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.flush()
        start = 8 + len(text)
        os.ftruncate(file.fileno(), start + at)

        def fill(entry) -> None:
            name, dtype, shape, kind = entry
            place = start + header[name]["data_offsets"][0]
            for offset, piece in shard_content(entry, blocks):
                os.pwrite(file.fileno(), piece, place + offset)

        for done in [pool.submit(fill, entry) for entry in entries]:
            done.result()
    return at


def shard_content(entry, blocks: Blocks):
    name, dtype, shape, kind = entry
    count = int(np.prod(shape))
    if kind in ("bits", "bf16", "f16", "e4m3"):
        yield from blocks.take(kind, entry_bytes(entry), sum(name.encode()) * 7919)
    elif kind == "nothing":
        yield 0, bytes(entry_bytes(entry))
    elif kind == "ones":
        yield 0, (np.ones(count, np.float16) if dtype == "F16" else f32_to_bf16(np.ones(count, np.float32))).tobytes()
    elif kind == "zeros":  # zero points 7 or 8, so that the mean is 0
        words = np.random.default_rng(count).integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)
        yield 0, ((words & np.uint32(0x11111111)) + np.uint32(0x77777777)).tobytes()
    elif kind == "sevens":  # stored zero points of 8
        yield 0, np.full(count, 0x77777777, np.uint32).tobytes()
    elif kind == "groups":
        module = name.split(".")[-2].translate(str.maketrans({"k": "q", "v": "q"})).replace("up", "gate")
        rng = np.random.default_rng([*name.split(".")[2].encode(), *module.encode()])
        yield 0, rng.permutation(np.arange(count, dtype=np.int32) // GROUP).tobytes()
    elif kind == "scales":
        yield 0, np.full(count, STD / 4.61, np.float16).tobytes()
    else:
        yield 0, np.full(count, STD / 64, np.float32).tobytes()


# -- a vocabulary


TOKENIZER_CONFIG = {
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "bos_token": None,
    "model_max_length": 131072,
    "tokenizer_class": "Qwen2Tokenizer",
}


def made_up_tokenizer(config: dict, seed: int) -> bytes:
    """A tokenizer.json of Qwen's kind: all bytes, then merges of random earlier tokens, then three control tokens."""
    keep = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    texts = [chr(byte) if byte in keep else chr(next(others)) for byte in range(256)]
    vocab, merges, rng = {text: id for id, text in enumerate(texts)}, [], random.Random(seed)
    # eos_token_id is "<|im_end|>", the third control token.
    size = config["eos_token_id"] - 2 if config["model_type"] == "qwen2" else config["bos_token_id"]
    while len(texts) < size:
        left, right = (texts[int(len(texts) * rng.random() ** 3)] for _ in "lr")
        if len(left) + len(right) <= 16 and left + right not in vocab:
            vocab[left + right] = len(texts)
            texts.append(left + right)
            merges.append(f"{left} {right}")
    added = [
        {
            "id": size + place,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for place, text in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False},
                    level,
                ],
            },
            "post_processor": level,
            "decoder": level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": "",
                "end_of_word_suffix": "",
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocab,
                "merges": merges,
            },
        },
        ensure_ascii=False,
    ).encode()


if __name__ == "__main__":
    sys.exit(main())
