"""A GGUF and the `.zse` made of it become the same bytes in memory: the kernels that repack GGUF blocks on load agree
with quant/affine.py, which `zse convert` uses, for every type."""

import numpy as np
import pytest
from formats_build import Tensor, gguf, llama_metadata

from zse.formats.convert import convert
from zse.formats.ggml import BLOCKS
from zse.formats.opening import open_model
from zse.models.load import load_model, plan_model
from zse.runtime.cpu import CPUDevice

HIDDEN, FORWARD, VOCABULARY = 256, 512, 64


@pytest.fixture(scope="module")
def device():
    return CPUDevice(threads=2)


def tiny_llama(type):
    """A llama of one layer with 4 heads of 64 and 2 KV heads, all matrices of one type."""
    shapes = {
        "token_embd": (VOCABULARY, HIDDEN),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (128, HIDDEN),
        "blk.0.attn_v": (128, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (FORWARD, HIDDEN),
        "blk.0.ffn_up": (FORWARD, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FORWARD),
    }
    tensors = [Tensor(f"{name}.weight", type, shape) for name, shape in shapes.items()]
    norms = "blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"
    tensors += [Tensor(f"{name}.weight", "F32", (HIDDEN,)) for name in norms]
    sizes = {"llama__embedding_length": ("u32", HIDDEN), "llama__feed_forward_length": ("u32", FORWARD)}
    return gguf(llama_metadata(**sizes), tensors)


def loaded(device, path):
    """name -> bytes of every plane and vector after loading."""

    def content(tensor):
        return bytes(memoryview(tensor.buffer.view())[tensor.offset : tensor.offset + tensor.nbytes])

    with open_model(path) as source:
        model = load_model(device, plan_model(source))
        model.wait()
        planes = {
            f"{name}.{plane}": content(tensor)
            for name, weight in model.weights.items()
            for plane, tensor in weight.planes.items()
        }
        return planes | {name: content(tensor) for name, tensor in model.vectors.items()}


def compare(device, path, folder):
    convert(path, folder / "m.zse")
    from_gguf, from_zse = loaded(device, path), loaded(device, folder / "m.zse")
    assert from_gguf.keys() == from_zse.keys() and len(from_gguf) > 5
    for name, data in from_gguf.items():
        other = np.frombuffer(from_zse[name], np.uint8)
        assert np.array_equal(np.frombuffer(data, np.uint8), other), name
        assert other.any(), name


@pytest.mark.parametrize("type", BLOCKS)
def test_tiny_models(type, device, tmp_path):
    (tmp_path / "m.gguf").write_bytes(tiny_llama(type))
    compare(device, tmp_path / "m.gguf", tmp_path)


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_real_models(name, real_models, device, tmp_path):
    compare(device, real_models[name], tmp_path)
