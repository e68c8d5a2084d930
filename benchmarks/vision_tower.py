"""What a vision tower takes for an image, with random weights in bf16: Gemma 3's (SigLIP, 27 layers, 896 x 896 pixels) or
Qwen2.5-VL's (32 layers, most of windows, 1,008 x 1,008): what a start does for it, its load, the encoding, and the longest piece,
which other requests' next tokens wait for; on a GPU the graphs alone, too, and their share of --tflops by the multiply-adds of heads
and widths as the file has them.

    python benchmarks/vision_tower.py [--shape gemma3|qwen2.5-vl] [--device cpu|cuda] [--quantize int8] [--threads N] [--tflops 790] [--kernels]
"""

import argparse
import json
import statistics
import struct
import tempfile
import time
from pathlib import Path

import numpy as np

from zse.engine.image_encoder import ImageEncoder, encoder_bytes
from zse.formats.opening import open_model
from zse.models.config import Fields
from zse.models.vision.load import plan_tower
from zse.models.vision.read import vision_from_hf
from zse.models.vision.registry import tower_class
from zse.models.weight_plan import read_config
from zse.runtime.opening import open_device

SIDES = {"gemma3": 896, "qwen2.5-vl": 1008}
GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
    },
    "vision_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
    },
    "mm_tokens_per_image": 256,
    "image_token_index": 262144,
    "eos_token_id": 1,
}


QWEN2_5_VL = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 1,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "eos_token_id": 151645,
}
PROCESSOR = {"size": {"shortest_edge": 3136, "longest_edge": 1008 * 1008}}
CONFIGS = {"gemma3": GEMMA3, "qwen2.5-vl": QWEN2_5_VL}


def write(folder: Path, config: dict) -> None:
    """A folder with the tower alone."""
    vision = vision_from_hf("config.json", config, PROCESSOR)
    fields = Fields("config.json", config)
    section = fields.section("vision_config")
    assert vision is not None and section is not None
    family = tower_class(vision.family)
    assert family is not None
    tower = family(family.tower_from_hf(fields, section, "cpu"), vision)
    stored = {name.lstrip("/"): shape for weight in tower.weights("hf") for name, shape in weight.stored}
    index, at = {}, 0
    for name, shape in stored.items():
        nbytes = 2 * int(np.prod(shape))
        index[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    head = json.dumps(index).encode()
    head += b" " * (-len(head) % 8)
    rng = np.random.default_rng(0)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for name, shape in stored.items():
            values = rng.standard_normal(int(np.prod(shape)), dtype=np.float32) * np.float32(0.02)
            values += np.float32("norm" in name and name.endswith("weight") and "soft" not in name)
            file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))


def operations(plan, height: int, width: int) -> float:
    """Of one image: two for each multiply-add of products and attention."""
    forward, tower = plan.forward, plan.forward.tower
    layers, patches = tower.layers, (height // plan.vision.patch) * (width // plan.vision.patch)
    wide = layers.num_heads * tower.head_dim
    products = 4 * layers.hidden_size * wide + (3 if forward.is_gated else 2) * layers.hidden_size * tower.inner
    seen = [patches] * layers.num_layers
    for layer in tower.windowed:
        seen[layer] = (tower.window * plan.vision.merge) ** 2
    outside = [matrix for matrix in plan.matrices if not matrix.name.startswith("layers.")]
    parts = patches // plan.vision.merge**2
    around = sum(
        (patches if matrix.name == "patch" else parts) * matrix.shape[0] * matrix.shape[1] for matrix in outside
    )
    return 2.0 * (patches * (layers.num_layers * products + 2 * wide * sum(seen)) + around)


def time_graphs(device, encoder, count: int) -> float:
    """Seconds of the graphs of the last image, the median of `count`."""
    symbols, times = symbols_of(encoder, count), []
    for _ in range(10):
        device.synchronize()
        began = time.perf_counter()
        for graph in encoder._graphs:
            graph.submit(**{name: symbols[name] for name in graph.symbols}).wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def symbols_of(encoder, count: int) -> dict[str, int]:
    return {"tokens": count, "parts": count // encoder.plan.vision.merge**2, "rows": 1, "splits": 1}


def kernels_of(encoder, count: int) -> list[tuple[str, int, float]]:
    """(kernel, launches, milliseconds of all, one by one), those that take most first."""
    symbols, found = symbols_of(encoder, count), {}
    for graph in encoder._graphs:
        for name, ns in graph.profile(**{name: symbols[name] for name in graph.symbols}):
            launches, total = found.get(name, (0, 0.0))
            found[name] = launches + 1, total + ns / 1e6
    return sorted(((name, *each) for name, each in found.items()), key=lambda line: -line[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(CONFIGS), default="gemma3")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quantize", choices=("int8",))
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--tflops", type=float, default=790.0)
    parser.add_argument("--kernels", action="store_true", help="the time of each kind of kernel")
    args = parser.parse_args()
    side = SIDES[args.shape]
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), CONFIGS[args.shape])
        device = open_device(args.device, threads=args.threads)
        kv_dtype = "f16" if device.shares_memory else "bf16"
        with open_model(folder) as source:
            config = read_config(source)
            began = time.perf_counter()
            plan = plan_tower(source, None, config, quantize=args.quantize, family=device.kernels)
            assert plan is not None
            nbytes = encoder_bytes(device, plan, kv_dtype)
            print(f"start {1000 * (time.perf_counter() - began):.0f} ms, {nbytes / 2**20:.0f} MiB in the plan")
            began = time.perf_counter()
            encoder = ImageEncoder(device, plan, kv_dtype=kv_dtype)
            encoder.load()
            print(f"load {time.perf_counter() - began:.1f} s")
        pixels = np.random.default_rng(1).integers(0, 256, 3 * side * side, dtype=np.uint8).tobytes()
        for _ in range(1 if device.shares_memory else 4):  # on a GPU the last one's graphs are captured
            began = last = time.perf_counter()
            longest, values = 0.0, None
            for values in encoder.encode(pixels, side, side):
                now = time.perf_counter()
                longest, last = max(longest, now - last), now
        assert values is not None and np.isfinite(values).all()
        print(f"encode {last - began:.3f} s, the longest piece {longest:.3f} s, {device.threads} threads")
        if not device.shares_memory:
            patches = (side // plan.vision.patch) ** 2
            seconds, work = time_graphs(device, encoder, patches), operations(plan, side, side)
            share = work / seconds / args.tflops / 1e12
            print(
                f"graphs {1000 * seconds:.2f} ms: {work / 1e12:.2f} TFLOP, {work / seconds / 1e12:.0f} TFLOP/s, {share:.0%} of the floor"
            )
        for name, launches, ms in kernels_of(encoder, patches) if args.kernels and not device.shares_memory else ():
            print(f"{ms:8.2f} ms  {launches:4} {name}")
        encoder.close()
        device.close()


if __name__ == "__main__":
    main()
