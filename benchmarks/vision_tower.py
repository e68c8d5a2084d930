"""Seconds that Gemma 3's vision tower (SigLIP, 27 layers, 896 x 896 pixels) takes for an image on this CPU, with random weights in
bf16: what a start does for it, its load, the encoding, and the longest piece, which other requests' next tokens wait for.

    python benchmarks/vision_tower.py [--quantize int8] [--threads N]
"""

import argparse
import json
import struct
import tempfile
import time
from pathlib import Path

import numpy as np

from zse.engine.image_encoder import ImageEncoder, encoder_bytes
from zse.formats.opening import open_model
from zse.models.config import Fields
from zse.models.vision.config import vision_from_hf
from zse.models.vision.load import plan_tower
from zse.models.vision.siglip import Siglip
from zse.models.weight_plan import read_config
from zse.runtime.opening import open_device

SIDE = 896
CONFIG = {
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
        "image_size": SIDE,
        "patch_size": 14,
    },
    "mm_tokens_per_image": 256,
    "image_token_index": 262144,
    "eos_token_id": 1,
}


def write(folder: Path) -> None:
    """A folder with the tower alone."""
    vision = vision_from_hf("config.json", CONFIG, None)
    fields = Fields("config.json", CONFIG)
    section = fields.section("vision_config")
    assert vision is not None and section is not None
    tower = Siglip(Siglip.tower_from_hf(fields, section, "cpu"), vision)
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
    (folder / "config.json").write_text(json.dumps(CONFIG))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantize", choices=("int8",))
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        device = open_device("cpu", threads=args.threads)
        with open_model(folder) as source:
            config = read_config(source)
            began = time.perf_counter()
            plan = plan_tower(source, None, config, quantize=args.quantize, family="cpu")
            assert plan is not None
            nbytes = encoder_bytes(device, plan, "f16")
            print(f"start {1000 * (time.perf_counter() - began):.0f} ms, {nbytes / 2**20:.0f} MiB in the plan")
            began = time.perf_counter()
            encoder = ImageEncoder(device, plan, kv_dtype="f16")
            encoder.load()
            print(f"load {time.perf_counter() - began:.1f} s")
        pixels = np.random.default_rng(1).integers(0, 256, 3 * SIDE * SIDE, dtype=np.uint8).tobytes()
        began = last = time.perf_counter()
        longest, values = 0.0, None
        for values in encoder.encode(pixels, SIDE, SIDE):
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        assert values is not None and np.isfinite(values).all()
        print(f"encode {last - began:.1f} s, the longest piece {longest:.2f} s, {device.threads} threads")
        encoder.close()
        device.close()


if __name__ == "__main__":
    main()
