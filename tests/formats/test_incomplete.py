"""Files that are no whole model: what is wrong, and what to do about it, in one line."""

import os

import pytest
from formats_build import small_gguf, small_safetensors

from zse.errors import FormatError, UnsupportedError
from zse.formats.opening import open_model

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
