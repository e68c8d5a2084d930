"""Hugging Face directories: shards and their index, side files, and what is refused because it is not data."""

import json
import os

import numpy as np
import pytest
from formats_build import safetensors

from zse.errors import FormatError, UnsupportedError
from zse.formats.opening import open_model
from zse.formats.verify import verify


def f32(*shape):
    return "F32", shape, np.arange(np.prod(shape), dtype=np.float32).tobytes()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"], "text_config": {"vocab_size": 9}}')
    (tmp_path / "model.safetensors").write_bytes(safetensors({"a": f32(2, 3)}, {"format": "pt"}))
    return tmp_path


def shard(folder, weight_map=None):
    (folder / "model.safetensors").unlink()
    (folder / "model-1.safetensors").write_bytes(safetensors({"a": f32(2), "b": f32(3)}))
    (folder / "model-2.safetensors").write_bytes(safetensors({"c": f32(4)}))
    weight_map = weight_map or {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_single_file(folder):
    with open_model(folder) as source:
        assert (source.kind, source.naming, source.architecture) == ("safetensors", "hf", "Qwen3ForCausalLM")
        assert source.metadata == {"format": "pt"} and source.vocab_size == 9
        assert source.tensors["a"].shape == (2, 3) and source.read("a") == f32(2, 3)[2]
        assert source.tokenizer is None and source.chat_template is None and source.generation_config is None
        assert not source.interleaved_rope
    assert open_model(folder / "model.safetensors").hf_config == source.hf_config


def test_against_the_safetensors_package(tmp_path):
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    tensors = {
        f"layer.{i}": rng.normal(size=rng.integers(1, 9, rng.integers(1, 4))).astype(dtype)
        for i, dtype in enumerate(["f4", "f2", "i8", "u8", "i4", "f8", "?", "i2", "u4", "i8"])
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"k": "v"})
    with open_model(tmp_path / "x.safetensors") as source:
        assert source.metadata == {"k": "v"} and set(source.tensors) == set(tensors)
        for name, array in tensors.items():
            assert source.tensors[name].shape == array.shape and source.read(name) == array.tobytes()


def test_shards(folder):
    shard(folder)
    with open_model(folder) as source:
        assert [len(source.files), *source.tensors] == [2, "a", "b", "c"]
        assert source.read("c") == f32(4)[2] and source.nbytes == sum(file.size for file in source.files)


def test_shards_without_an_index(folder):
    shard(folder)
    (folder / "model.safetensors.index.json").unlink()
    assert set(open_model(folder).tensors) == {"a", "b", "c"}


def test_an_index_that_was_left_behind(folder):
    """Of shards of which none is there, beside one file of all tensors."""
    single = (folder / "model.safetensors").read_bytes()
    shard(folder)
    (folder / "model.safetensors").write_bytes(single)
    assert set(open_model(folder).tensors) == {"a", "b", "c"}
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(FormatError, match="is missing: model.safetensors.index.json names it"):
        open_model(folder)
    (folder / "model-2.safetensors").unlink()
    assert set(open_model(folder).tensors) == {"a"}


def test_tensors_without_elements_are_passed_over(folder):
    """The format has them: a quantizer's g_idx, say."""
    from safetensors.numpy import save

    tensors = {"a": np.ones((2, 3), np.float32), "empty": np.zeros(0, np.int32), "none": np.zeros((4, 0), np.float32)}
    (folder / "model.safetensors").write_bytes(save(tensors))
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_model(folder) as source:
        assert set(source.tensors) == {"a"}
    verify(folder)
    index["weight_map"]["gone"] = "model.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match="gone: is not in"):
        open_model(folder)


@pytest.mark.parametrize(
    "weight_map,reason",
    [
        ({"a": "../model-1.safetensors"}, "is not the name of"),
        ({"a": "/etc/passwd"}, "is not the name of"),
        ({"a": "sub/model-1.safetensors"}, "is not the name of"),
        ({"a": 3}, "is not the name of"),
        ({"a": "model-9.safetensors"}, "is missing: model.safetensors.index.json names it; .*fetch it again"),
        ({"d": "model-1.safetensors"}, "where the index puts it"),
        ({"a": "model-2.safetensors", "b": "model-1.safetensors"}, "where the index puts it"),
        ([], "weight_map"),
        ({}, "weight_map"),
    ],
)
def test_bad_indexes(folder, weight_map, reason):
    shard(folder, weight_map if weight_map else None)
    if not weight_map:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(FormatError, match=reason):
        open_model(folder)


def test_a_tensor_in_two_shards(folder):
    shard(folder)
    (folder / "model-2.safetensors").write_bytes(safetensors({"c": f32(4), "a": f32(2)}))
    with pytest.raises(FormatError, match="a: stands also in"):
        open_model(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "x.pkl", "y.CKPT"])
def test_weights_that_are_pickles_are_refused(folder, name):
    (folder / name).write_bytes(b"")
    open_model(folder).close()  # beside weights that are data they are left alone
    (folder / "model.safetensors").unlink()
    with pytest.raises(FormatError, match="is a pickle") as caught:
        open_model(folder)
    assert name in str(caught.value)


def test_code_beside_the_weights_is_left_alone(folder):
    """Neither what auto_map names nor the file itself is read: a pipe in its place would hang who opened it."""
    os.mkfifo(folder / "modeling.py")
    auto_map = {"auto_map": {"AutoModel": "modeling.Model"}}
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **auto_map}))
    (folder / "tokenizer_config.json").write_text(json.dumps(auto_map))
    with open_model(folder) as source:
        assert source.read("a") == f32(2, 3)[2]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1, "a": 2}', '{"a": NaN}', "[" * 100_000, "\udcff"])
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "model.safetensors.index.json",
    ],
)
def test_damaged_json(folder, name, text):
    (folder / "tokenizer.json").write_text("{}")
    (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(FormatError) as caught:
        open_model(folder)
    assert name in caught.value.path


@pytest.mark.parametrize(
    "config,template,expected",
    [
        ({"chat_template": "one"}, None, "one"),
        ({"chat_template": "one"}, "file", "file"),
        ({}, None, None),
        ({}, "file", "file"),
        ({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}, None, "d"),
        ({"chat_template": [{"name": "tool_use", "template": "t"}]}, None, None),
        ({"chat_template": 5}, None, None),
    ],
)
def test_chat_templates(folder, config, template, expected):
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    assert open_model(folder).chat_template == expected


def test_a_template_that_is_no_text(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(FormatError, match="chat template: is not UTF-8"):
        open_model(folder)


def test_weights_quantized_by_others_are_named(folder):
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "hqq"}}')
    with pytest.raises(UnsupportedError, match="quantization method 'hqq' is not supported"):
        open_model(folder)


def test_missing_files(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(FormatError, match="model.safetensors: is missing"):
        open_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FormatError, match="config.json: is missing"):
        open_model(folder)


def test_huge_side_files_are_not_read(folder):
    with open(folder / "config.json", "wb") as file:
        file.truncate(1 << 28)
    with pytest.raises(FormatError, match="at most"):
        open_model(folder)


def test_the_start_path_stays_light(folder):
    """Opening a model imports neither numpy nor anything else that costs tens of milliseconds."""
    import os
    import subprocess
    import sys
    from pathlib import Path

    code = (
        "import sys; from zse.formats.opening import open_model; open_model(sys.argv[1]);"
        "heavy = 'numpy', 'asyncio', 'tokenizers', 'huggingface_hub', 'dataclasses';"
        "print([m for m in heavy if m in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}
    result = subprocess.run(
        [sys.executable, "-c", code, folder], capture_output=True, text=True, env=environment, check=True
    )
    assert result.stdout.strip() == "[]"


def test_unsupported_files_are_listed(tmp_path):
    (tmp_path / "notes.txt").write_text("not a model")
    with pytest.raises(UnsupportedError, match=r"supported: \*.gguf"):
        open_model(tmp_path / "notes.txt")
