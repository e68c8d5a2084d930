"""The names of the catalog that come from Hugging Face: the table, which file fits, and how they are pulled, from a fake hub."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from zse.cli import options
from zse.errors import ConfigError, ModelNotFoundError
from zse.formats import catalog, fit, hub, store
from zse.formats.fit import Memory

QWEN = catalog.HUB_MODELS["qwen3-8b"]


@pytest.fixture
def qwen(fake):
    """qwen3-8b on the fake hub; each file holds its own name."""
    files = {f"Qwen3-8B-{tag}.gguf": f"GGUF {tag}".encode() for tag in QWEN.quantizations.split()}
    fake.repos["Qwen/Qwen3-8B-GGUF"] = {**files, "Qwen3-8B-Q6_K_L.gguf": b"another", "LICENSE": b"terms"}
    fake.repos["Qwen/Qwen3-8B"] = {
        "config.json": fake.repos["org/name"]["config.json"],
        "model.safetensors": b"original",
    }
    return fake


def test_the_table_is_consistent():
    for name, model in catalog.HUB_MODELS.items():
        assert name == model.name == name.lower() and store.folder_name(name) == name and name not in catalog.CATALOG
        bits = [catalog.BITS[tag] for tag in model.quantizations.split()]
        assert bits and bits == sorted(bits, reverse=True), "most precise first"
        assert all(store.folder_name(model.source(tag)) for tag in model.tags)
        assert 0.1 < model.billions < 100 and model.licence
        assert set(model.sampling) <= {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
        assert catalog.find(name) is catalog.find(f"{name}:Q8_0") is model
    data = json.loads(Path(catalog.__file__).with_name("catalog.json").read_text())
    assert tuple(data["columns"]) == catalog.HubModel._fields
    assert len(catalog.HUB_MODELS) == len(data["models"])
    assert {row[-1] for row in data["models"]} == {"", *data["sampling"]}


@pytest.mark.parametrize(
    ("gigabytes", "share", "tag", "why"),
    [
        (80, fit.GPU_SHARE, "Q8_0", "the most precise of its files that takes at most 50% of 80.0 GB of X"),
        (16, fit.GPU_SHARE, "Q6_K", "the most precise of its files that takes at most 50% of 16.0 GB of X"),
        (16, fit.CPU_SHARE, "Q4_K_M", "its smallest file, which fits 16.0 GB of X"),
        (64, fit.CPU_SHARE, "Q8_0", "the most precise of its files"),
    ],
)
def test_the_file_that_fits(gigabytes, share, tag, why):
    chosen, line = fit.choose(QWEN, Memory(gigabytes * 10**9, "X", share))
    assert chosen == tag and line.startswith(f"qwen3-8b:{tag} (≈ ") and why in line


def test_what_does_not_fit_is_refused_with_what_to_type():
    with pytest.raises(
        ConfigError, match="does not fit: Q4_K_M, .*zse ls --available.*zse pull qwen3-8b:Q4_K_M"
    ) as caught:
        fit.choose(QWEN, Memory(4 * 10**9, "RAM", 0.5))
    assert "\n" not in str(caught.value)


def test_the_memory_is_a_gpus_where_one_is_used(monkeypatch):
    gpus = [{"name": "A", "memory_bytes": 1}, {"name": "B", "memory_bytes": 2}]
    monkeypatch.setattr(fit, "_list_gpus", lambda: gpus)
    monkeypatch.setattr(fit.probe, "cuda_driver", lambda: {"library": "libcuda.so.1"})
    assert fit.memory_for("auto") == Memory(1, "the GPU A", fit.GPU_SHARE)
    assert fit.memory_for("cuda:1") == Memory(2, "the GPU B", fit.GPU_SHARE)
    assert fit.memory_for("cpu").owner == fit.memory_for("cuda:2").owner == "RAM"
    monkeypatch.setattr(fit.probe, "cuda_driver", lambda: {"library": None})
    assert fit.memory_for("auto").owner == "RAM"


def test_listing_gpus_starts_no_driver_here():
    assert isinstance(fit._list_gpus(), list)


def test_pull_takes_the_file_that_fits_and_says_why(zse, qwen, home):
    done = zse("pull", "qwen3-8b", "--device", "cpu")
    tag = fit.best(QWEN, fit.memory_for("cpu"))
    path = home / f"models/qwen3-8b={tag}/Qwen3-8B-{tag}.gguf"
    assert done.stdout.strip() == str(path) == str(store.resolve("qwen3-8b"))
    assert done.stderr.splitlines()[0] == fit.choose(QWEN, fit.memory_for("cpu"))[1]
    (entry,) = store.entries()
    assert entry["name"] == f"qwen3-8b:{tag}" and "Qwen/Qwen3-8B-GGUF" in entry["source"]
    qwen.close()
    assert zse("pull", "qwen3-8b").stdout == done.stdout  # no network is asked


def test_a_quantization_and_the_original_weights(zse, qwen, home):
    zse("pull", "qwen3-8b:q6_k")
    assert (home / "models/qwen3-8b=Q6_K/Qwen3-8B-Q6_K.gguf").read_bytes() == b"GGUF Q6_K"
    zse("pull", "qwen3-8b:original")
    assert (home / "models/qwen3-8b=original/model.safetensors").read_bytes() == b"original"
    assert options.locate("qwen3-8b") == str(home / "models/qwen3-8b=Q6_K/Qwen3-8B-Q6_K.gguf")
    assert options.locate("qwen3-8b", "int4") == str(home / "models/qwen3-8b=original")
    assert "fits 0 files; the repository has: Qwen3-8B-Q4_K_M.gguf" in zse("pull", "qwen3-8b:Q2_K", code=2).stderr
    shown = zse("show", "qwen3-8b").stdout
    assert "stored" in shown and "Qwen3-8B-Q6_K.gguf" in shown and "8.19 B" in shown
    assert "qwen3-8b:Q6_K" in zse("ls").stdout
    assert zse("rm", "-y", "qwen3-8b:Q6_K").stdout.startswith("deleted qwen3-8b:Q6_K")


def test_names_that_cannot_be_pulled(home):
    for name, words in {
        "qwen3-8": "cannot pull 'qwen3-8'; did you mean qwen3-8b",
        "smollm2:Q8_0": "has no quantizations to choose from: zse pull smollm2",
        "hf:foo": "'hf:foo'; the form of a repository is hf:ORG/NAME",
    }.items():
        with pytest.raises(ModelNotFoundError, match=words):
            hub.pull(name)
    with pytest.raises(ConfigError, match="no original weights of phi4-14b, only Q8_0"):
        hub.pull("phi4-14b:original")
    assert not home.exists()


def test_ls_available_shows_every_name(zse):
    lines = zse("ls", "--available", "--device", "cpu").stdout.splitlines()
    assert lines[0].split() == ["MODEL", "PARAMETERS", "DOWNLOAD", "FITS", "LICENCE"]
    assert [line.split()[0] for line in lines[1:]] == [*catalog.CATALOG, *catalog.HUB_MODELS]
    (row,) = (line for line in lines if line.startswith("qwen3-0.6b "))
    assert row.split() == ["qwen3-0.6b", "0.6", "B", "≈", "638", "MB", "Q8_0", "yes", "Apache-2.0"]
    data = json.loads(zse("ls", "--available", "--json").stdout)
    assert data["memory_bytes"] > 0 and {"name", "billions", "download_bytes", "fits", "source"} <= set(
        data["models"][5]
    )


def test_show_before_the_pull(zse):
    text = zse("show", "qwen3-8b", "--device", "cpu").stdout
    for words in ("not pulled", "8.19 B", "Apache-2.0", "temperature 0.6", "hf:Qwen/Qwen3-8B-GGUF", "Q4_K_M ≈ 5.0 GB"):
        assert words in text
    assert json.loads(zse("show", "qwen3-8b", "--json").stdout)["repository"] == "hf:Qwen/Qwen3-8B-GGUF"


def test_run_fetches_what_fits_and_answers(zse, fake, real_models):
    fake.repos["Qwen/Qwen3-0.6B-GGUF"] = {"Qwen3-0.6B-Q8_0.gguf": real_models["smollm2"].read_bytes()}
    arguments = (
        "run",
        "qwen3-0.6b",
        "What is two plus two?",
        "--device",
        "cpu",
        "--temperature",
        "0",
        "--max-tokens",
        "8",
    )
    first = zse(*arguments)
    assert first.stdout.strip() and first.stderr.startswith("qwen3-0.6b:Q8_0 (≈ 0.6 GB): ")
    fake.close()
    again = zse(*arguments)
    assert again.stdout == first.stdout and again.stderr == ""


def test_a_stored_model_starts_without_the_table(home):
    path = home / "models" / "qwen3-8b=Q8_0" / "m.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    script = (
        "import sys\nfrom zse.cli import options\n"
        "assert options.locate('qwen3-8b').endswith('m.gguf')\n"
        "assert not {'zse.formats.catalog', 'zse.formats.fit', 'zse.formats.hub', 'subprocess'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
