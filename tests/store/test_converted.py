"""Copies that `zse serve --cache-converted` keeps: made once, found until the model changes, listed and deleted as models."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("models", "formats")]
import tiny
from test_models_load import TYPES, gguf_of

from zse.cli import keep_converted, serve
from zse.errors import FormatError
from zse.formats import converted, store
from zse.formats.opening import open_model
from zse.models.load import load_model, plan_model
from zse.runtime.cpu import CPUDevice


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A folder that is quantized while it is loaded; a store of its own."""
    monkeypatch.setenv("ZSE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "nice", lambda step: step)
    (tmp_path / "My Model").mkdir()
    return str(tiny.write("wide", tmp_path / "My Model", "BF16"))


def loaded(path, quantize=None) -> bytes:
    with CPUDevice(2) as device, open_model(path) as source:
        made = load_model(device, plan_model(source, quantize=quantize))
        made.wait()
        return bytes(made.buffer.view())


@pytest.mark.parametrize("quantize", ["int4", "int4-g128", "int8"])
def test_a_copy_has_the_same_weights_and_is_found(quantize, model):
    assert converted.find(model, quantize, "cpu") is None
    assert keep_converted.main(["cpu", quantize, "-", model]) == 0
    kept = converted.find(model, quantize, "cpu")
    assert loaded(kept) == loaded(model, quantize)
    (entry,) = store.entries()
    assert entry["path"] == kept and entry["source"] == os.path.realpath(model)
    assert entry["name"].startswith(f"{os.path.basename(model)[:2]}") and f"-for-cpu-{quantize}-" in entry["name"]
    assert converted.find(model, "int8" if quantize == "int4" else "int4", "cpu") is None
    assert converted.find(model, quantize, "gpu") is None
    assert converted._IS_COPY.search(entry["name"])  # counts where copies may take so much
    assert store.remove(entry["name"]) > 0 and converted.find(model, quantize, "cpu") is None


def test_a_changed_model_makes_a_new_copy_and_the_old_one_goes(model):
    keep_converted.main(["cpu", "int4", "-", model])
    (old,) = store.entries()
    file = next(Path(model).glob("*.safetensors"))
    os.utime(file, ns=(1, 1))
    assert converted.find(model, "int4", "cpu") is None
    keep_converted.main(["cpu", "int4", "-", model])
    (new,) = store.entries()
    assert new["name"] != old["name"] and converted.find(model, "int4", "cpu") == new["path"]


def test_nothing_is_kept_of_what_is_only_copied(model):
    keep_converted.main(["gpu", "-", "-", model])
    assert store.entries() == []


def test_a_model_that_changes_meanwhile_is_not_kept(model):
    def make(source, out):
        Path(out).write_bytes(b"x")
        os.utime(next(Path(source).glob("*.safetensors")), ns=(2, 2))

    with pytest.raises(FormatError, match="changed while it was converted"):
        converted.write(model, "int4", "cpu", make)
    assert store.entries() == [] and store.partials() == []


def test_what_cannot_be_converted_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ZSE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "nice", lambda step: step)
    assert keep_converted.main(["cpu", "int4", "-", str(tmp_path / "none")]) == 0
    assert capsys.readouterr().err.startswith("zse: no converted copy of ")


def test_the_engine_gets_the_copy_and_a_process_makes_it(model, monkeypatch):
    arguments = SimpleNamespace(
        cache_converted=True, quantize="int4", device="cpu", max_rows=None, max_queue=None, mmproj=None
    )
    arguments.draft_model = None
    monkeypatch.setattr(serve, "values_of", lambda args, options: {"quantize": args.quantize})
    started = []

    def start(command, **options):
        started.append(command)
        return SimpleNamespace(pid=1)

    monkeypatch.setattr(subprocess, "Popen", start)
    words = serve._engine_arguments(arguments, model)
    assert words[words.index("--model") + 1] == model and words[words.index("--quantize") + 1] == "int4"
    copies = serve._copies(arguments)
    assert copies.arguments(words) == words
    copies.begin([model])
    assert started[0][1:3] == ["-m", "zse.cli.keep_converted"] and started[0][3:] == ["cpu", "int4", "-", model]
    keep_converted.main(started[0][3:])
    assert serve._engine_arguments(arguments, model) == copies.arguments(words)
    words = copies.arguments(words)
    assert words[words.index("--model") + 1] == converted.find(model, "int4", "cpu") and "--quantize" not in words
    copies.begin([model])
    serve._copies(arguments).begin([model])
    assert len(started) == 1


def test_a_gguf_has_a_copy_on_a_cpu(tmp_path, monkeypatch, capsys):
    """A load repacks its blocks: unasked, too, up to a bound; its copy has the same bytes in memory."""
    monkeypatch.setenv("ZSE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "nice", lambda step: step)
    path = str(gguf_of("gemma3", tmp_path, TYPES["gemma3"])[0])
    arguments = SimpleNamespace(cache_converted=None, quantize=None, device="cpu")
    copies = serve._copies(arguments)
    words = ["--model", path, "--threads", "2"]
    assert copies.arguments(words) == words
    keep_converted.main(["cpu", "-", "1000", path])
    assert "copies take 0 of 0 MiB" in capsys.readouterr().err and not store.entries()
    monkeypatch.setattr(converted, "LEFT_BYTES", 1 << 60)
    keep_converted.main(["cpu", "-", str(1 << 30), path])
    assert "of the disk are free" in capsys.readouterr().err and not store.entries()
    monkeypatch.setattr(converted, "LEFT_BYTES", 0)
    keep_converted.main(["cpu", "-", str(1 << 30), path])
    kept = converted.find(path, None, "cpu")
    assert kept is not None and loaded(kept) == loaded(path)
    assert copies.arguments(words) == ["--model", kept, "--threads", "2"]
    assert copies.arguments([*words, "--adapter-slots", "4"]) == [*words, "--adapter-slots", "4"]
    os.utime(path, ns=(1, 1))
    assert copies.arguments(words) == words  # a copy of what it was
    keep_converted.main(["gpu", "-", "-", path])
    assert len(store.entries()) == 1  # a GPU reads the blocks as they are


def test_the_kind_of_device(monkeypatch):
    assert converted.family_of("cpu") == "cpu" and converted.family_of("cuda:1") == "gpu"
    monkeypatch.setattr(converted, "FOR_GPU", ("/nowhere",))
    assert converted.family_of("auto") == "cpu"
    monkeypatch.setattr(converted, "FOR_GPU", (json.__file__,))
    assert converted.family_of("auto") == "gpu"
