"""The one way to a model's data, whatever the file: `open_model(path)` -> `ModelSource`.

    source = open_model("SmolLM2-135M-Instruct.Q4_1.gguf")
    info = source.tensors["blk.0.attn_q.weight"]        # type Q4_1, shape (576, 576), offset, nbytes
    data = source.read(info)

Opening reads headers only, never numpy, and checks every number against the size of the real file.
"""

import os

from zse.errors import UnsupportedError
from zse.formats import directory, gguf, in_turn, latent, zse
from zse.formats.file import INCOMPLETE, WEB_PAGE, ModelFile
from zse.formats.source import ModelSource

SUPPORTED_FILES = ("*.gguf", "*.safetensors", "*.zse", "a directory with config.json and *.safetensors")


def open_model(path: str | os.PathLike) -> ModelSource:
    """Opens a GGUF file, a `.zse` file, a safetensors file, or a directory with config.json and safetensors.

    Files are told apart by their first bytes, not by their name. FormatError for a file that is damaged or not a
    model; UnsupportedError for a tensor type or version that is not known.
    """
    source = _open(os.fspath(path))
    try:
        if any("kv_b" in name or "attn_k_b" in name or "attn_v_b" in name for name in source.tensors):
            source.tensors = latent.split(source)
        if any(name.endswith(".mlp.experts.mlp.w2") for name in source.tensors):
            source.tensors = latent.turn_experts(source)
        if source.architecture in ("Qwen3NextForCausalLM", "qwen3next") and source.kind != "zse":
            source.tensors = latent.split_pairs(source)
        if source.architecture == "GptOssForCausalLM" and source.kind != "zse":
            source.tensors = in_turn.split(source)
        if source.architecture == "Qwen3VLMoeForConditionalGeneration" and source.kind != "zse":
            source.tensors = in_turn.split_blocks(source)
    except Exception:
        source.close()
        raise
    return source


def _open(path: str) -> ModelSource:
    if os.path.isdir(path):
        return directory.open_directory(path)
    file = ModelFile(path)
    try:
        start = file.read(0, min(16, file.size))
        if start[:4] == b"GGUF" or start[:4] == b"FUGG":
            return gguf.open_gguf(file)
        if start[1:4] == b"ZSE":
            return zse.open_zse(file)
        if start[8:9] == b"{":
            return directory.open_single(file)
        raise _unknown(file, start)
    except Exception:
        file.close()
        raise


def _unknown(file: ModelFile, start: bytes) -> Exception:
    """What to raise for a file that does not begin as a model does."""
    if not start:
        return file.wrong(0, "file", f"is empty{INCOMPLETE}")
    if start.lstrip()[:1] == b"<":
        return file.wrong(0, "file", WEB_PAGE)
    if start == b"version https://":
        return file.wrong(0, "file", "is a pointer of Git LFS, not a model; fetch it with: git lfs pull")
    if file.path.endswith((".gguf", ".zse", ".safetensors")):
        return file.wrong(0, "magic", f"does not begin as a model file does{INCOMPLETE}")
    return UnsupportedError("model file", file.path, SUPPORTED_FILES)
