"""Files that are no whole model: what is wrong, and what to do about it, in one line."""

import os

import pytest
from formats_build import gguf, llama_metadata, llama_tensors, small_gguf, small_safetensors

from zse.errors import FormatError, UnsupportedError
from zse.formats.convert import convert
from zse.formats.opening import open_model
from zse.tokenizer.huggingface import from_json

AGAIN = "it is incomplete or damaged: fetch it again"


def refused(path) -> str:
    with pytest.raises((FormatError, UnsupportedError)) as caught:
        open_model(path).close()
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
@pytest.mark.parametrize(("make", "name"), [(small_gguf, "trunc.gguf"), (small_safetensors, "trunc.safetensors")])
def test_a_file_that_was_cut_off(tmp_path, make, name, share):
    path = tmp_path / name
    whole = make()
    path.write_bytes(whole[: int(share * len(whole))])
    assert AGAIN in refused(path)


def test_the_first_kilobyte_of_a_large_file(tmp_path, real_models):
    path = tmp_path / "x.gguf"
    with open(real_models["smollm2"], "rb") as file:
        path.write_bytes(file.read(1024))
    assert AGAIN in refused(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", f"is empty; {AGAIN}"),
        (os.urandom(8) + bytes(1016), f"does not begin as a model file does; {AGAIN}"),
        (b"<!DOCTYPE html><html>Log in</html>", "is a web page (of a login or an error), not a model"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
    ],
)
def test_what_is_no_model_under_a_models_name(tmp_path, content, words):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    assert words in refused(path)


def test_another_file_is_not_supported(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(b"some text")
    assert "is not supported; supported: *.gguf" in refused(path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "generation_config.json"])
def test_a_web_page_in_the_place_of_a_folder_s_file(tmp_path, file):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes(small_safetensors())
    (tmp_path / file).write_text("<!DOCTYPE html><html>Log in</html>")
    assert f"{file}: offset 0: " in refused(tmp_path) and "is a web page (of a login" in refused(tmp_path)


def test_json_that_was_cut_off(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(small_safetensors())
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaFor')
    assert AGAIN in refused(tmp_path)
    with pytest.raises(FormatError, match=AGAIN):
        from_json(b'{"model": {"type": "BPE", "vocab": {"a')


def test_a_zse_file_that_was_cut_off(tmp_path):
    """In its weights, in its section table, in its header."""
    source, whole = tmp_path / "a.gguf", tmp_path / "a.zse"
    source.write_bytes(gguf(llama_metadata(), llama_tensors()))
    convert(source, whole)
    data = whole.read_bytes()
    for length in (len(data) - 1, 100, 20):
        whole.write_bytes(data[:length])
        assert AGAIN in refused(whole)
