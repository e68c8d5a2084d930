"""zse pull hf:… as a user runs it, a process per pull: huggingface_hub reads HF_ENDPOINT when it is imported."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest
from fake_hub import COMMIT, WEIGHTS

from zse.errors import ModelNotFoundError, UnsupportedError, ZSEError
from zse.formats import huggingface, store

PROMPT = ("What is two plus two?", "--temperature", "0", "--max-tokens", "8")


def test_pull_takes_the_data_files_and_nothing_else(zse, fake, home):
    done = zse("pull", "hf:org/name")
    folder = home / "models/hf--org--name"
    assert done.stdout.strip() == str(folder) == str(store.resolve("hf:org/name"))
    assert sorted(os.listdir(folder)) == [
        "README.md",
        "config.json",
        "model.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert "left out" in done.stderr and "pytorch_model.bin" in done.stderr and "100 %" in done.stderr
    (entry,) = store.entries()
    assert entry["name"] == "hf:org/name" and entry["revision"] == COMMIT and entry["licence"] == "mit"
    assert not (home.parent / "hf" / "hub").exists(), "one copy, in our store"
    assert zse("pull", "hf:org/name").stderr == ""  # nothing to do


def test_a_revision_is_its_own_model(zse, home):
    zse("pull", "hf:org/name@v1")
    assert store.resolve("hf:org/name@v1") == home / "models/hf--org--name@v1"
    assert "no revision 'v2'" in zse("pull", "hf:org/name@v2", code=2).stderr


def test_a_killed_pull_resumes_from_its_last_byte(zse, fake, home, tmp_path):
    environment = {
        **os.environ,
        "HF_ENDPOINT": fake.url,
        "HF_HOME": str(tmp_path / "hf"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    half = len(WEIGHTS) // 2
    fake.cut["model.safetensors"] = half
    killed = threading.Event()

    def kill():
        deadline = time.monotonic() + 60
        while store.tree_bytes(home / "models/.partial") < half * 9 // 10 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
        killed.set()

    fake.on_cut = kill
    process = subprocess.Popen([sys.executable, "-m", "zse", "pull", "-q", "hf:org/name"], env=environment)
    assert process.wait(timeout=120) != 0 and killed.wait(60)
    assert store.entries() == []
    have = store.tree_bytes(home / "models/.partial")
    fake.ranges.clear()
    done = zse("pull", "hf:org/name")
    assert "resuming" in done.stderr
    (resumed,) = (start for file, start in fake.ranges if file == "model.safetensors")
    assert half * 8 // 10 < resumed <= have
    assert (store.resolve("hf:org/name") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_dropped_connection_continues_by_itself(zse, fake):
    fake.cut["model.safetensors"] = 5 << 20
    zse("pull", "hf:org/name")
    starts = [start for file, start in fake.ranges if file == "model.safetensors"]
    assert starts[0] == 0 and 4 << 20 < starts[1] <= 5 << 20
    assert (store.resolve("hf:org/name") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_server_without_ranges_starts_again(zse, fake):
    fake.cut["model.safetensors"] = 5 << 20
    fake.has_ranges = False
    zse("pull", "hf:org/name")
    assert (store.resolve("hf:org/name") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_server_that_sends_too_much_is_stopped(zse, fake):
    fake.wrong["model.safetensors"] = WEIGHTS + b"more"
    assert "sends more than" in zse("pull", "hf:org/name", code=1).stderr


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_other_bytes_than_the_hub_published_are_refused(zse, fake, file):
    fake.wrong[file] = bytes(len(fake.repos["org/name"][file]))
    done = zse("pull", "hf:org/name", code=1)
    assert f"{file} is damaged" in done.stderr and store.entries() == []
    fake.wrong.clear()
    zse("pull", "hf:org/name")


def test_a_repository_that_wants_its_own_code_is_refused_before_the_weights(zse, fake):
    fake.repos["org/name"]["config.json"] = json.dumps({"auto_map": {"AutoModel": "modeling_x.X"}}).encode()
    assert "auto_map" in zse("pull", "hf:org/name", code=1).stderr
    assert "model.safetensors" not in fake.served


def test_a_repository_of_pickles_is_refused(zse, fake):
    for file in ("model.safetensors", "onnx/model.onnx"):
        del fake.repos["org/name"][file]
    assert "modeling_x.py, pytorch_model.bin can run code" in zse("pull", "hf:org/name", code=1).stderr


def test_unknown_and_gated_repositories_say_what_to_do(zse, fake):
    assert "no such repository" in zse("pull", "hf:org/other", code=2).stderr
    fake.gated.add("org/name")
    assert "accepted terms" in zse("pull", "hf:org/name", code=1).stderr


def test_no_network_is_one_line(zse, fake):
    fake.close()
    done = zse("pull", "hf:org/name", code=1)
    assert done.stderr.count("\n") == 1 and "the download failed" in done.stderr
    assert "check the network and its proxy (HTTPS_PROXY, HF_ENDPOINT)" in done.stderr


@pytest.mark.parametrize("routes", [("api/models",), ("resolve",)])
def test_a_proxy_that_answers_with_a_page_is_one_line(zse, fake, routes):
    fake.pages_for = routes
    done = zse("pull", "hf:org/name", code=1)
    assert "what answers is not a Hugging Face hub but a web page" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("zse: error: hf:org/name: ")
    fake.pages_for = ()
    zse("pull", "hf:org/name")


def test_a_file_that_ends_too_soon_is_one_line(zse, fake):
    fake.wrong["model.safetensors"] = WEIGHTS[:1000]
    fake.has_ranges = False
    assert "sends 1000 of 12582912 bytes and no more" in zse("pull", "hf:org/name", code=1).stderr


def test_no_space_is_one_line_before_anything_is_fetched(zse, fake):
    fake.sizes["model.safetensors"] = 1 << 50
    done = zse("pull", "hf:org/name", code=1)
    assert "not enough disk space" in done.stderr and "free some, or set ZSE_HOME" in done.stderr
    assert "model.safetensors" not in fake.served


def test_one_gguf_of_several(zse, fake, home):
    fake.repos["org/gguf"] = {"m-Q4_K_M.gguf": b"GGUF4", "m-Q8_0.gguf": b"GGUF8", "LICENSE": b"MIT"}
    assert "name one" in zse("pull", "hf:org/gguf", code=1).stderr
    zse("pull", "hf:org/gguf:q8_0")
    assert store.resolve("hf:org/gguf:q8_0") == home / "models/hf--org--gguf=q8_0/m-Q8_0.gguf"


def test_a_quantization_is_the_end_of_a_name():
    names = ["m-Q6_K.gguf", "m-Q6_K_L.gguf", "m-UD-Q6_K.gguf", "m.Q8_0.gguf"]
    assert huggingface.select("o/n", names, "q6_k") == ["m-Q6_K.gguf"]
    assert huggingface.select("o/n", names, "Q8_0") == ["m.Q8_0.gguf"]


NAMES = [
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "consolidated.safetensors",
    "a-Q4_0.gguf",
    "sub/model.safetensors",
    "LICENSE",
]


def test_run_fetches_a_repository_that_is_not_there_yet(zse, fake, real_models):
    path = real_models["smollm2"]
    fake.repos["org/smol"] = {path.name: path.read_bytes()}
    first = zse("run", "hf:org/smol", *PROMPT)
    assert first.stdout.strip() and "downloading" in first.stderr
    again = zse("run", "hf:org/smol", *PROMPT)
    assert again.stdout == first.stdout and again.stderr == ""


def test_select_prefers_the_transformers_shards():
    assert huggingface.select("o/n", NAMES, None) == ["LICENSE", *NAMES[:3]]
    assert huggingface.select("o/n", NAMES, "Q4_0") == ["a-Q4_0.gguf", "LICENSE"]


@pytest.mark.parametrize(
    ("names", "file", "error", "words"),
    [
        (["a.gguf", "b.gguf"], "c", ModelNotFoundError, "fits 0 files"),
        (["a-Q4.gguf", "b-Q4.gguf"], "Q4", ModelNotFoundError, "fits 2 files"),
        (["model.safetensors"], None, ZSEError, "no config.json"),
        (["a-00001-of-00002.gguf"], None, UnsupportedError, "split GGUF"),
        (["README.md"], None, UnsupportedError, "README.md"),
        ([], None, UnsupportedError, "empty repository"),
    ],
)
def test_select_refuses(names, file, error, words):
    with pytest.raises(error, match=words):
        huggingface.select("o/n", names, file)
