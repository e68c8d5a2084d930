"""zse pull hf:… as a user runs it, a process per pull."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_hub import COMMIT, WEIGHTS
from formats_build import llama_tensors, split_gguf

from zse.errors import ModelNotFoundError, UnsupportedError, ZSEError
from zse.formats import huggingface, sentence, store
from zse.formats.opening import open_model

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


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "README.md"])
def test_a_file_without_a_hash_is_refused(zse, fake, file):
    """A size is no check: nothing is fetched. The git object of a file in LFS is its pointer, which checks nothing either."""
    fake.without_hash.add(file)
    said = zse("pull", "hf:org/name", code=1).stderr
    assert f"does not give the size and hash of {file}, so the files cannot be checked" in said
    assert store.entries() == [] and set(fake.served) == {None}  # the question alone


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


def test_an_architecture_that_is_not_served_is_refused_before_the_weights(zse, fake):
    auto_map = {"AutoModel": "modeling_x.X"}
    fake.repos["org/name"]["config.json"] = json.dumps({"architectures": ["OwnLM"], "auto_map": auto_map}).encode()
    assert "hf:org/name: architecture 'OwnLM' is not supported" in zse("pull", "hf:org/name", code=2).stderr
    assert "model.safetensors" not in fake.served


def test_code_of_an_architecture_that_is_served_stays_where_it_is(zse, fake, home):
    config = {"architectures": ["LlamaForCausalLM"], "auto_map": {"AutoModel": "modeling_x.X"}}
    fake.repos["org/name"]["config.json"] = json.dumps(config).encode()
    assert "left out" in zse("pull", "hf:org/name").stderr
    assert "modeling_x.py" not in fake.served and not list((home / "models/hf--org--name").glob("*.py"))


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


PUBLISHED = """m-Q4_K_M.gguf m-Q4_K_S.gguf m-UD-Q4_K_M.gguf m-BF16.gguf m-F16.gguf mmproj-F16.gguf mmproj-BF16.gguf m.imatrix.gguf
    Q8_0/m-Q8_0-00001-of-00002.gguf Q8_0/m-Q8_0-00002-of-00002.gguf UD-Q2_K_XL/m-UD-Q2_K_XL.gguf MTP-m-Q4_K_M.gguf
    m-assistant-Q4_K_M.gguf""".split()


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("Q4_K_M", ["m-Q4_K_M.gguf"]),
        ("ud-q4_k_m", ["m-UD-Q4_K_M.gguf"]),
        ("F16", ["m-F16.gguf"]),
        ("mmproj-F16", ["mmproj-F16.gguf"]),
        ("q8_0", ["Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0/m-Q8_0-00002-of-00002.gguf"]),
        ("Q8_0/m-Q8_0-00001-of-00002.gguf", ["Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0/m-Q8_0-00002-of-00002.gguf"]),
        ("Q2_K_XL", ["UD-Q2_K_XL/m-UD-Q2_K_XL.gguf"]),
    ],
)
def test_a_tag_is_what_people_type_for_a_file(file, chosen):
    """Folders, parts, and what lies beside models: as the large publishers of quantizations lay out their repositories."""
    assert huggingface.select("o/n", PUBLISHED, file) == chosen


def test_all_parts_of_a_gguf_come_to_lie_beside_one_another(zse, fake, home):
    parts = split_gguf(2)
    names = [f"Q8_0/m-0000{number}-of-00002.gguf" for number in (1, 2)]
    fake.repos["org/parts"] = dict(zip(names, parts, strict=True))
    zse("pull", "hf:org/parts")
    folder = home / "models/hf--org--parts"
    assert store.resolve("hf:org/parts") == folder / "m-00001-of-00002.gguf"
    assert (folder / "m-00002-of-00002.gguf").read_bytes() == parts[1]
    with open_model(store.resolve("hf:org/parts")) as source:
        assert len(source.tensors) == len(llama_tensors())


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
        (["a-00001-of-00002.gguf"], None, ZSEError, "has 2 parts"),
        (["a-00001-of-00002.gguf", "a-00002-of-00003.gguf"], None, ZSEError, "has 2 parts"),
        (["../a.gguf", "/b.gguf", ".c/d.gguf", "e//f.gguf", "g\\h.gguf"], None, UnsupportedError, "empty repository"),
        (["README.md"], None, UnsupportedError, "README.md"),
        ([], None, UnsupportedError, "empty repository"),
    ],
)
def test_select_refuses(names, file, error, words):
    with pytest.raises(error, match=words):
        huggingface.select("o/n", names, file)


def test_an_embedding_model_brings_what_its_vectors_are_made_by(zse, fake, home):
    kinds = (("Pooling", "1_Pooling"), ("Dense", "2_Dense"))
    modules = json.dumps([{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds])
    fake.repos["org/embeds"] = fake.repos["org/name"] | {
        "modules.json": modules.encode(),
        "1_Pooling/config.json": b'{"pooling_mode_cls_token": true}',
        "sentence_bert_config.json": b'{"max_seq_length": 256}',
        "2_Dense/config.json": b'{"in_features": 4, "out_features": 3, "bias": false}',
        "2_Dense/model.safetensors": b"weights",
        "2_Dense/pytorch_model.bin": b"pickle",
        "3_Other/config.json": b"{}",
    }
    folder = Path(zse("pull", "hf:org/embeds").stdout.strip())
    assert (folder / "1_Pooling_config.json").is_file() and not any(name.is_dir() for name in folder.iterdir())
    assert not any("Other" in name or "pickle" in name or name.endswith(".bin") for name in os.listdir(folder))
    assert json.loads((folder / "config.json").read_text())["architectures"], (
        "a folder's config.json is not the model's"
    )
    settings, weights = sentence.settings(str(folder), os.listdir(folder))
    assert settings == {
        "modules": ["Pooling", "Dense"],
        "pooling": "cls",
        "dense": [{"inputs": 4, "outputs": 3, "bias": False, "activation": "tanh"}],
        "max_seq_length": 256,
    }
    assert [os.path.basename(path) for path in weights] == ["2_Dense_model.safetensors"]
