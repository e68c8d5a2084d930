import os
import subprocess
import sys
import time

import pytest

from zse.errors import ModelNotFoundError, ZSEError
from zse.formats import store


def put(home, folder, *files):
    for name in files:
        path = home / "models" / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"data")


def test_resolve_finds_the_single_model_file_or_the_folder(home):
    put(home, "one", "a.gguf", "LICENSE")
    put(home, "two", "model.safetensors", "config.json")
    assert store.resolve("one") == home / "models/one/a.gguf"
    assert store.resolve("two") == home / "models/two"


def test_a_stored_name_wins_over_a_path_and_a_dot_slash_forces_the_path(home, tmp_path, monkeypatch):
    put(home, "same", "a.gguf")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "same").mkdir()
    assert store.resolve("same") == home / "models/same/a.gguf"
    assert os.path.samefile(store.resolve("./same"), tmp_path / "same")


def test_resolve_serves_a_path_in_place(home, tmp_path):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"")
    assert store.resolve(str(file)) == file
    assert store.resolve(file) == file


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smollm2", "zse pull smollm2"),
        ("hf:org/name", "zse pull hf:org/name"),
        ("nothing", "the catalog has: smollm2, gemma3-270m and "),
        ("nothing", " more (`zse ls --available`); the store has: mine"),
        ("qwen3-8b", "zse pull qwen3-8b"),
        ("qwen3-8b:Q8_0", "zse pull qwen3-8b:Q8_0"),
        ("hf:foo", "'hf:foo' names no repository: the form is hf:ORG/NAME[@REV][:FILE]"),
        ("Qwen/Qwen3-8B", "no such file or folder (a Hugging Face repository is hf:Qwen/Qwen3-8B)"),
        ("qwen3-0.6", "unknown model 'qwen3-0.6'; did you mean qwen3-0.6b"),
        ("Llama-3.2-1B", "; did you mean llama3.2-1b"),
        ("mins", "; did you mean mine?"),
        ("./no.gguf", "./no.gguf: no such file or folder"),
        ("no.gguf", "no.gguf: no such file or folder"),
        ("", "unknown model ''"),
    ],
)
def test_resolve_says_what_to_do(home, name, words):
    put(home, "mine", "a.gguf")
    with pytest.raises(ModelNotFoundError, match=r".") as caught:
        store.resolve(name)
    assert words in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("smollm2", "smollm2"),
        ("hf:org/name", "hf--org--name"),
        ("hf:org/na.me@v1.0", "hf--org--na.me@v1.0"),
        ("hf:org/name@refs/pr/1", "hf--org--name@refs--pr--1"),
        ("hf:org/name:Q4_K_M", "hf--org--name=Q4_K_M"),
        ("hf:org/name@main:a.gguf", "hf--org--name@main=a.gguf"),
        ("qwen3-8b:Q4_K_M", "qwen3-8b=Q4_K_M"),
    ],
)
def test_folder_name(name, folder):
    assert store.folder_name(name) == folder


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".partial", "a/b", "a--b", "../x", "/x", "a\0b", "a b", "-a", "x" * 129, "hf:", "hf:a", "hf:a/b/c",
     "hf:../x", "hf:a/..", "hf:a/b@", "hf:a/b:", "hf:a/b@../..", "hf:a/b:../../x", "hf:a--b/c",
     "hf:a/b@x//y", "hf:a/b\n"],
)  # fmt: skip
def test_hostile_names_have_no_folder(name):
    assert store.folder_name(name) is None


def test_a_name_finds_the_quantization_that_is_stored(home):
    put(home, "m=Q8_0", "a.gguf")
    assert store.resolve("m") == store.resolve("m:Q8_0") == home / "models/m=Q8_0/a.gguf"
    assert store.stored_name(str(store.resolve("m"))) == "m:Q8_0" and store.stored_name("/tmp/a.gguf") is None
    assert store.describe("m")["path"].endswith("m=Q8_0/a.gguf")
    with pytest.raises(ModelNotFoundError):
        store.resolve("m:Q4_K_M")
    put(home, "m=Q4_K_M", "a.gguf")
    put(home, "hf--org--name=Q8_0", "a.gguf")
    with pytest.raises(ModelNotFoundError):
        store.resolve("hf:org/name")  # a repository and one of its files are two models
    assert store.resolve("m") == home / "models/m=Q4_K_M/a.gguf"
    with pytest.raises(ModelNotFoundError, match="the store has: .*m=Q4_K_M, m=Q8_0"):
        store.remove("m")  # which of them is for the user to say
    assert store.remove("m:Q8_0") == 4


def test_a_model_that_is_half_there_is_said(home):
    with pytest.raises(RuntimeError), store.PartialFolder("qwen3-8b:Q8_0") as stage:
        open(os.path.join(stage.path, "m.gguf"), "wb").close()
        raise RuntimeError
    with pytest.raises(ModelNotFoundError, match="was not fetched to its end; go on with: zse pull qwen3-8b:Q8_0"):
        store.resolve("qwen3-8b:Q8_0")


def test_resolve_is_cheap_and_imports_nothing(home):
    """The bound has a factor of 20 in hand on an idle machine; the imports are the point."""
    put(home, "one", "a.gguf")
    script = (
        "import sys, time\nimport zse.formats.store as store\nbefore = set(sys.modules)\n"
        "best = min((lambda t: (store.locate('one'), time.perf_counter() - t)[1])(time.perf_counter()) for _ in "
        "range(20))\n"
        "assert best < 1e-3, best\nassert set(sys.modules) == before, set(sys.modules) - before\n"
        "heavy = {'subprocess', 'json', 'huggingface_hub', 'numpy', 'dataclasses', 'zse.formats.hub'} & "
        "set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_commit_is_atomic_and_replaces(home):
    for text in (b"old", b"new"):
        with store.PartialFolder("m") as stage:
            with open(os.path.join(stage.path, "m.gguf"), "wb") as file:
                file.write(text)
            (home / "models/.partial/m/left").mkdir()
            (home / "models/.partial/m/left/over").write_bytes(b"x")
            stage.commit([{"name": "m.gguf", "size": 3, "sha256": "-"}], licence="MIT")
    assert store.resolve("m").read_bytes() == b"new"
    assert sorted(os.listdir(home / "models/m")) == ["m.gguf", "model.json"]
    assert store.partials() == [] and not (home / "models/.trash").exists()
    (entry,) = store.entries()
    assert entry["name"] == "m" and entry["licence"] == "MIT"


def test_a_failure_keeps_the_stored_model_and_the_partial_one(home):
    put(home, "m", "m.gguf")
    with pytest.raises(RuntimeError), store.PartialFolder("m") as stage:
        with open(os.path.join(stage.path, "m.gguf"), "wb") as file:
            file.write(b"half")
        raise RuntimeError
    assert store.resolve("m").read_bytes() == b"data"
    assert [part["name"] for part in store.partials()] == ["m"]


def test_remove_deletes_model_and_partial(home):
    put(home, "m", "m.gguf")
    with pytest.raises(RuntimeError), store.PartialFolder("m") as stage:
        open(os.path.join(stage.path, "m.gguf"), "wb").close()
        raise RuntimeError
    assert store.partials()
    assert store.remove("m") >= 4
    assert store.entries() == [] and store.partials() == []
    with pytest.raises(ModelNotFoundError, match="not in the store; the store has: nothing"):
        store.remove("m")
    with pytest.raises(ModelNotFoundError):
        store.remove("../..")


def test_a_second_writer_waits_and_rm_refuses(home):
    script = (
        "import sys\nfrom zse.formats import store\n"
        "with store.PartialFolder('m'):\n print('held', flush=True)\n sys.stdin.read()\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ZSEError, match="being pulled by another process"):
        store.remove("m")
    notices = []

    def waiter_notice(line):
        notices.append(line)
        holder.kill()  # the lock of a killed process is free at once

    start = time.monotonic()
    with store.PartialFolder("m", waiter_notice):
        assert notices == ["another process is pulling m; waiting for it"]
    assert time.monotonic() - start < 30
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()


def test_a_full_disk_is_said_in_one_line(home):
    """RLIMIT_FSIZE makes the kernel refuse the write, as a full disk does."""
    script = (
        "import resource, signal, os\nfrom zse.formats import store\nfrom zse.errors import ZSEError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n with store.PartialFolder('m') as stage:\n  f = open(os.path.join(stage.path, 'x'), 'wb', buffering=0)\n"
        "  [f.write(bytes(600)) for _ in range(3)]\nexcept ZSEError as error:\n print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert (
        "is full" in done.stdout
        and "run the same command again to resume" in done.stdout
        and done.stdout.count("\n") == 1
    )


def test_check_space_names_the_numbers(home):
    store.check_space(1)
    with pytest.raises(ZSEError, match=r"MiB needed, \d+ MiB free; free some, or set ZSE_HOME"):
        store.check_space(1 << 62)


def test_a_damaged_manifest_is_one_line(home):
    put(home, "m", "m.gguf", "model.json")
    with pytest.raises(ZSEError, match="not valid JSON.*pull it again"):
        store.entries()


def test_an_unwritable_home_is_one_line(monkeypatch):
    monkeypatch.setenv("ZSE_HOME", "/dev/null/home")
    with pytest.raises(ZSEError, match="cannot write to the model store"), store.PartialFolder("m"):
        pass
