"""What an installation brings: every package by version and SHA-256, with its licence; documents that say what is so."""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import make_lock  # noqa: E402

sys.path.remove(str(ROOT / "scripts"))
LOCKS = {
    make_lock.LOCK: make_lock.wanted("tokenizers"),
    make_lock.PDF_LOCK: make_lock.wanted_besides("pdf"),
    make_lock.IMAGES_LOCK: make_lock.wanted_besides("images"),
    make_lock.TEST_LOCK: make_lock.wanted(*make_lock.TESTED),
}
# Licences that let a user of the whole do what Apache-2.0 lets them. MPL-2.0 (tqdm) binds changes of its own files.
PERMISSIVE = {
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "CC0-1.0",
    "FTL",
    "ICU",
    "IJG",
    "ISC",
    "MIT",
    "MIT-CMU",
    "MPL-2.0",
    "PSF-2.0",
    "Zlib",
    "libpng-2.0",
    "libtiff",
}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_a_lock_has_what_pyproject_asks_for(lock):
    versions, files = make_lock.pins(lock), make_lock.hashes(lock)
    for line in LOCKS[lock]:
        need = Requirement(line)
        assert need.specifier.contains(versions[canonicalize_name(need.name)]), f"{line}: run scripts/make_lock.py"
    assert set(versions) == set(files) and all(files.values())
    assert all(len(set(hashes)) == len(hashes) for hashes in files.values())
    assert lock.read_text().count("==") == len(versions) and "://" not in lock.read_text()


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_a_lock_is_closed(lock):
    """What a package of it needs on this machine is in it, in a version that fits."""
    versions = make_lock.pins(lock)
    for name, version in versions.items():
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # of another environment
        for line in found.requires or () if found.version == version else ():
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                assert need.specifier.contains(versions[canonicalize_name(need.name)], prereleases=True), (name, line)


def test_the_locks_agree():
    serve, test = (
        make_lock.pins(make_lock.LOCK) | make_lock.pins(make_lock.PDF_LOCK) | make_lock.pins(make_lock.IMAGES_LOCK),
        make_lock.pins(make_lock.TEST_LOCK),
    )
    assert {name: test.get(name) for name in serve} == serve


def test_binary_packages_have_a_file_for_every_platform():
    """4 Pythons on Linux and macOS, x86-64 and arm64, unless one file serves several Pythons."""
    files = make_lock.hashes(make_lock.LOCK)
    assert all(len(files[name]) >= 16 for name in ("numpy", "msgspec", "httptools", "markupsafe"))
    assert all(len(files[name]) >= 4 for name in ("llguidance", "tokenizers", "hf-xet"))
    assert len(make_lock.hashes(make_lock.PDF_LOCK)["pypdfium2"]) >= 4
    assert len(make_lock.hashes(make_lock.IMAGES_LOCK)["pillow"]) >= 16


def test_make_installs_by_hash():
    """`make serve` and what CI runs."""
    for target in (".venv/.installed", ".venv/.test-installed"):
        done = subprocess.run(["make", "--dry-run", "--always-make", target], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "--require-hashes --only-binary :all: --requirement requirements" in done.stdout
    assert "make test-all" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.exhaustive
def test_another_file_is_refused(tmp_path):
    """pip holds what it fetches to the lock: a hash that is not the file's ends the installation."""
    lock = tmp_path / "lock"
    lock.write_text(re.sub(r"sha256:[0-9a-f]{64}", "sha256:" + "0" * 64, make_lock.LOCK.read_text()))
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
        "--require-hashes",
    ]
    done = subprocess.run([*command, "-r", lock], capture_output=True, text=True)
    assert done.returncode and "DO NOT MATCH THE HASHES" in done.stderr


def test_the_bill_of_materials_is_the_lock_s():
    """CycloneDX 1.6: every package once, with its hashes, a licence that is permissive, and who needs it."""
    bill = json.loads(make_lock.SBOM.read_text())
    locks = make_lock.LOCK, make_lock.PDF_LOCK, make_lock.IMAGES_LOCK
    versions = {name: version for lock in locks for name, version in make_lock.pins(lock).items()}
    files = {name: each for lock in locks for name, each in make_lock.hashes(lock).items()}
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    vendored = [make_lock.vendored_component(package) for package in make_lock.vendor_page.PACKAGES]
    assert vendored and bill["components"][-len(vendored) :] == vendored
    installed = bill["components"][: -len(vendored)]
    assert {one["name"]: one["version"] for one in installed} == versions
    references = {one["bom-ref"] for one in bill["components"]}
    assert len(references) == len(versions) + len(vendored)
    for one in installed:
        assert one["purl"] == f"pkg:pypi/{one['name']}@{one['version']}"
        hashes = [each["content"] for each in one["externalReferences"][0]["hashes"]]
        assert hashes == files[one["name"]]
    for one in bill["components"]:
        (licence,) = one["licenses"]
        named = licence.get("expression") or licence["license"]["id"]
        assert set(re.split(r" AND | OR ", named)) <= PERMISSIVE, f"{one['name']}: {named}"
    reached, waiting = set(), ["zse"]
    edges = {edge["ref"]: edge["dependsOn"] for edge in bill["dependencies"]}
    while waiting:
        reached.add(one := waiting.pop())
        waiting += [other for other in edges.get(one, ()) if other not in reached]
    builds = {f"pkg:pypi/setuptools@{versions['setuptools']}"}
    assert reached == references - builds | {"zse"}


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/threat-model.md", "docs/reliability.md"])
def test_a_page_names_what_is_there(page):
    """Every file and test that it names exists."""
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(
        r"`((?:src|tests|docs|scripts|http|server|formats|tokenizer|kernel|runtime|structured|engine|cli)/[\w./-]+|\w+\.(?:py|md|lock|json))`",
        text,
    )
    assert named
    for name in named:
        places = (ROOT / name, ROOT / "src" / "zse" / name)
        assert any(place.exists() for place in places), name


def test_reports_have_an_address_and_a_promise():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "Report a vulnerability" in text and "90 days" in text


def test_no_file_has_the_marks_of_a_merge():
    """Of every text file that git knows. SECURITY.md once had both sides of one."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("not a clone")
    names = [ROOT / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    marks = re.compile(rb"^(<{7}|>{7}|\|{7}) ", re.MULTILINE)
    assert not [str(path) for path in names if path.is_file() and marks.search(path.read_bytes())]
