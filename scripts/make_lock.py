"""The locks and the bill of materials: `.venv/bin/python scripts/make_lock.py [--upgrade]`.

requirements.lock        what `make serve` installs: the dependencies, the extra `tokenizers`, and setuptools, which builds the package
requirements-pdf.lock    what it installs besides: the extra `pdf`, which images with GPU kernels have no room for
requirements-images.lock and the extra `images`, likewise
requirements-test.lock   all of them, and the extras `test`, `reference`, `lint` and `otel`, on Linux
sbom.cdx.json            requirements.lock, requirements-pdf.lock, requirements-images.lock and what the web page has of npm (vendor_page.py) as CycloneDX 1.6, with licences and who needs whom

pip resolves and names the hashes (`pip install --dry-run --report`), for every platform and Python of ENVIRONMENTS; nothing is
installed and no package's code runs. Versions of the present lock are kept where they still fit, unless `--upgrade`. Licences and
dependencies come from the environment that this runs in, which must have the locked versions: run it again after `make serve`.
"""

import argparse
import base64
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import uuid
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import vendor_page
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCK, TEST_LOCK, SBOM = ROOT / "requirements.lock", ROOT / "requirements-test.lock", ROOT / "sbom.cdx.json"
PDF_LOCK, IMAGES_LOCK = ROOT / "requirements-pdf.lock", ROOT / "requirements-images.lock"
TESTED = ("tokenizers", "pdf", "images", "test", "reference", "lint", "otel")
INDEX = "https://pypi.org/simple"
BUILDS = ["setuptools>=70.1"]  # has bdist_wheel itself
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# A package may have several wheels for a system, newer ones preferred: each step is asked for.
GLIBC, MACOS = (31, 42), (11, 14, 26)
LINUX = [
    tuple(f"manylinux_2_{minor}_{machine}" for minor in range(most, 4, -1)) + (f"manylinux2014_{machine}",)
    for machine in ("x86_64", "aarch64")
    for most in GLIBC
]
MAC = [(f"macosx_{major}_0_{machine}",) for machine in ("arm64", "x86_64") for major in MACOS]
ENVIRONMENTS = [(platforms, python) for platforms in (*LINUX, *MAC) for python in PYTHONS]
_LINE = re.compile(r"^([A-Za-z0-9._-]+)==([^ ]+) ", re.MULTILINE)
# Words of metadata that names no SPDX expression → SPDX.
_SPDX = {
    # pypdfium2, with what is linked into its pdfium (BUILD_LICENSES of the wheel).
    "BSD-3-Clause, Apache-2.0, dependency licenses": "Apache-2.0 AND BSD-2-Clause AND BSD-3-Clause AND FTL AND ICU AND IJG AND MIT AND Zlib AND libpng-2.0 AND libtiff",
    "License :: OSI Approved :: BSD License": "BSD-3-Clause",
    "License :: OSI Approved :: MIT License": "MIT",
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: The Unlicense (Unlicense)": "Unlicense",
}


def wanted(*extras: str) -> list[str]:
    """Lines of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    return sorted({*lines, *BUILDS})


def wanted_besides(extra: str) -> list[str]:
    """Lines of one extra alone."""
    return sorted(set(wanted(extra)) - set(wanted()))


def pins(lock: Path) -> dict[str, str]:
    """Name → version of a lock."""
    return dict(_LINE.findall(lock.read_text(encoding="utf-8"))) if lock.exists() else {}


def hashes(lock: Path) -> dict[str, list[str]]:
    """Name → SHA-256 in hex of every file that may be installed for it."""
    blocks = re.split(r"\n(?=\S)", lock.read_text(encoding="utf-8"))
    return {match[1]: re.findall(r"sha256:([0-9a-f]{64})", block) for block in blocks if (match := _LINE.match(block))}


def report(lines: list[str], platforms: tuple[str, ...], python: str, *options: str, constraints=()) -> list[dict]:
    """What pip would install there: [{"name", "version", "sha256", "requires"}]."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PIP_") or name == "PIP_CERT"
    }
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "in").write_text("\n".join(lines))
        (place / "constraints").write_text("\n".join(constraints))
        command = [
            *(sys.executable, "-P", "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"),
            *("--index-url", INDEX, "--only-binary", ":all:", "--python-version", python, "--target", folder),
            *("--report", f"{folder}/out", "--requirement", f"{folder}/in", "--constraint", f"{folder}/constraints"),
            *(word for platform in platforms for word in ("--platform", platform)),
            *options,
        ]
        done = subprocess.run(
            command, env={**environment, "PIP_CONFIG_FILE": os.devnull}, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{platforms[0]}, Python {python}: {done.stderr}")
        found = json.loads((place / "out").read_text())["install"]
    return [
        {
            "name": canonicalize_name(one["metadata"]["name"]),
            "version": one["metadata"]["version"],
            "sha256": one["download_info"]["archive_info"]["hashes"]["sha256"],
            "requires": one["metadata"].get("requires_dist", []),
        }
        for one in found
    ]


def markers(platforms: tuple[str, ...], python: str) -> dict[str, str]:
    """What the markers of dependencies are asked of."""
    mac = platforms[0].startswith("macosx")
    machine = re.sub(r"^(macosx_\d+_\d+|manylinux_2_\d+)_", "", platforms[0])
    system = "Darwin" if mac else "Linux"
    return {
        **{"python_version": python, "python_full_version": f"{python}.0", "platform_machine": machine},
        **{"sys_platform": system.lower(), "platform_system": system, "os_name": "posix"},
        **{"implementation_name": "cpython", "platform_python_implementation": "CPython"},
    }


def make(lock: Path, lines: list[str], environments: list, upgrade: bool) -> None:
    kept = {} if upgrade else pins(lock)
    first = report(lines, *environments[0], constraints=[f"{name}=={version}" for name, version in kept.items()])
    exact = [f"{one['name']}=={one['version']}" for one in first]
    names = {one["name"] for one in first}
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(lambda where: report(exact, *where, "--no-deps"), environments))
    files: dict[str, set[str]] = {name: set() for name in names}
    for where, found in zip(environments, reports, strict=True):
        for one in found:
            files[one["name"]].add(one["sha256"])
            for line in one["requires"]:
                need = Requirement(line)
                asked = need.marker is None or need.marker.evaluate({**markers(*where), "extra": ""})
                if asked and canonicalize_name(need.name) not in names:
                    raise SystemExit(
                        f"{one['name']} needs {need} on {where[0][0]}, Python {where[1]}: add it to BUILDS"
                    )
    text = "# Made by scripts/make_lock.py from pyproject.toml, with pip; do not edit.\n"
    for one in sorted(first, key=lambda one: one["name"]):
        listed = " \\\n".join(f"    --hash=sha256:{each}" for each in sorted(files[one["name"]]))
        text += f"{one['name']}=={one['version']} \\\n{listed}\n"
    lock.write_text(text, encoding="utf-8")
    print(
        f"{lock.name}: {len(first)} packages, {sum(map(len, files.values()))} files, {len(environments)} environments"
    )


def licence(found: metadata.Distribution) -> str:
    """As an SPDX expression, or the package's own word."""
    said = found.metadata
    for known in (
        said.get("License-Expression"),
        _SPDX.get(said.get("License")),
        *map(_SPDX.get, said.get_all("Classifier") or ()),
    ):
        if known:
            return known
    return (said.get("License") or "NOASSERTION").strip().splitlines()[0]


def bill() -> dict:
    """The locks but that of tests as CycloneDX. The same bytes for the same lock: no time, and a serial number that is a hash of it."""
    version = pins(LOCK) | pins(PDF_LOCK) | pins(IMAGES_LOCK)
    files = hashes(LOCK) | hashes(PDF_LOCK) | hashes(IMAGES_LOCK)
    components, edges = [], []
    for name in sorted(version):
        found = metadata.distribution(name)
        if found.version != version[name]:
            raise SystemExit(f"{name} {found.version} is installed, {version[name]} is locked: run `make serve` first")
        reference = f"pkg:pypi/{name}@{version[name]}"
        named = licence(found)
        components.append(
            {
                **{"type": "library", "bom-ref": reference, "name": name, "version": version[name], "purl": reference},
                "licenses": [{"expression": named}]
                if " " in named and "(" not in named[:1]
                else [{"license": {"id": named}}],
                "externalReferences": [
                    {
                        "type": "distribution",
                        "url": f"https://pypi.org/project/{name}/{version[name]}/",
                        "hashes": [{"alg": "SHA-256", "content": each} for each in files[name]],
                    }
                ],
            }
        )
        needs = {canonicalize_name(Requirement(line).name) for line in found.requires or () if "extra ==" not in line}
        edges.append(
            {"ref": reference, "dependsOn": sorted(f"pkg:pypi/{one}@{version[one]}" for one in needs & set(version))}
        )
    vendored = [vendored_component(package) for package in vendor_page.PACKAGES]
    components += vendored
    direct = {canonicalize_name(Requirement(line).name) for line in wanted("tokenizers", "pdf", "images")} - {
        "setuptools"
    }
    needed = sorted(f"pkg:pypi/{one}@{version[one]}" for one in direct) + [one["bom-ref"] for one in vendored]
    edges.insert(0, {"ref": "zse", "dependsOn": needed})
    subject = {"type": "application", "bom-ref": "zse", "name": "zse", "licenses": [{"license": {"id": "Apache-2.0"}}]}
    return {
        **{"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1},
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, LOCK.read_text(encoding='utf-8'))}",
        "metadata": {"component": subject},
        "components": components,
        "dependencies": edges,
    }


def vendored_component(package: vendor_page.Package) -> dict:
    """What the web page has of npm's registry, with the hash of its archive there."""
    reference = f"pkg:npm/{package.name}@{package.version}"
    digest = base64.b64decode(package.integrity.removeprefix("sha512-")).hex()
    place = {
        "type": "distribution",
        "url": f"https://www.npmjs.com/package/{package.name}/v/{package.version}",
        "hashes": [{"alg": "SHA-512", "content": digest}],
    }
    named = {"bom-ref": reference, "name": package.name, "version": package.version, "purl": reference}
    return {
        "type": "library",
        **named,
        "licenses": [{"license": {"id": package.licence}}],
        "externalReferences": [place],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    parser.add_argument("--bill", action="store_true", help="only the bill of materials, from the lock that is there")
    options = parser.parse_args()
    if not options.bill:
        make(LOCK, wanted("tokenizers"), ENVIRONMENTS, options.upgrade)
        linux = [each for each in ENVIRONMENTS if each[0] in LINUX]
        # pypdfium2 has no wheel for macOS 11 any more.
        recent = [each for each in ENVIRONMENTS if not each[0][0].startswith("macosx_11_")]
        make(PDF_LOCK, wanted_besides("pdf"), recent, options.upgrade)
        make(IMAGES_LOCK, wanted_besides("images"), ENVIRONMENTS, options.upgrade)
        make(TEST_LOCK, wanted(*TESTED), linux, options.upgrade)
    SBOM.write_text(json.dumps(bill(), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
