"""An image without docker: `python scripts/bare_image.py deploy/docker/Dockerfile.cpu FOLDER [--try MODEL]`, as root on Debian with debootstrap.

Runs the Dockerfile's own steps in bare roots (chroot) under FOLDER, and prints what the image weighs. Each base is Debian's minimal system as
the image of that name has it: without documentation, translations and package lists. --try starts the image's command on a model file as the
image's user, waits for its health check and asks for a completion.

The instructions are those that our Dockerfiles have; any other is refused."""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 250_000_000  # of an image without a model
BASES = {"debian:bookworm-slim": "bookworm"}
LEFT_OUT = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/info",
    "usr/share/locale",
    "var/lib/apt/lists",
    "var/cache/apt/archives",
)
# The machine's way to packages: proxies and certificates of the network that this runs in. Nothing of it stays in an image.
PASSED = re.compile("^(https?_proxy|no_proxy|PIP_(INDEX_URL|EXTRA_INDEX_URL|DEFAULT_TIMEOUT))$", re.IGNORECASE)
CACHE = Path("/var/cache/zse-images")  # where it is there, /root/.cache of every step: what pip and NVRTC made before
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, rest of its line) of a Dockerfile."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    pairs = [line.strip().partition(" ") for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return [(word.upper(), rest.strip()) for word, _, rest in pairs]


def context() -> list[Path]:
    """The files that a build sees, by .dockerignore: of the lines that match a path or a folder above it, the last one decides."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    found = []
    for path in sorted(ROOT.rglob("*")):
        name = path.relative_to(ROOT).as_posix()
        if name.split("/")[0] in (".git", ".venv") or path.is_dir() or path.is_symlink():
            continue
        prefixes = ["/".join(name.split("/")[: n + 1]) for n in range(name.count("/") + 1)]
        ignored = False
        for line in lines:
            pattern = line.lstrip("!")
            if any(fnmatch(each, pattern) or fnmatch(each, pattern.removeprefix("**/")) for each in prefixes):
                ignored = not line.startswith("!")
        if not ignored:
            found.append(path)
    return found


class Stage:
    """One root in the making. environment: of its RUNs. Raises SystemExit for what is not known."""

    def __init__(self, root: Path, base: str, kept: bool):
        self.kept = kept  # what stands there is taken as it is
        self.root, self.environment, self.folder, self.user = root, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, "/", "0"
        self.command: list[str] = []
        self.health: list[str] = []
        self.arguments: dict[str, str] = {}
        if kept:
            return
        print(f"{root.name}: {base}", flush=True)
        clean(root)
        subprocess.run(
            ["debootstrap", "--variant=minbase", BASES[base], str(root)], check=True, stdout=subprocess.DEVNULL
        )
        for name in LEFT_OUT:
            shutil.rmtree(root / name, ignore_errors=True)
        (root / "var/lib/apt/lists/partial").mkdir(parents=True)
        (root / "var/cache/apt/archives/partial").mkdir(parents=True)
        rules = "".join(f"path-exclude=/{name}/*\n" for name in LEFT_OUT[:4])
        (root / "etc/dpkg/dpkg.cfg.d/docker").write_text(rules)
        (root / "etc/apt/apt.conf.d/docker-clean").write_text('Dir::Cache::pkgcache ""; Dir::Cache::srcpkgcache "";\n')

    def run(self, words: list[str], user: str = "", **options) -> subprocess.Popen:
        chroot = [
            shutil.which("chroot") or "/usr/sbin/chroot",
            *([f"--userspec={user}:{user}"] if user else []),
            str(self.root),
            *words,
        ]
        environment = {**self.environment, **self.arguments, **{k: v for k, v in os.environ.items() if PASSED.match(k)}}
        return subprocess.Popen(chroot, env=environment, **options)

    def step(self, command: str) -> None:
        """RUN: with the network's names and certificates for as long as it runs."""
        if self.kept:
            return
        guests = {
            "etc/resolv.conf": Path("/etc/resolv.conf"),
            "etc/hosts": Path("/etc/hosts"),
            "tmp/certificates": CERTIFICATES,
        }
        for name, source in guests.items():
            shutil.copy(source, self.root / name)
        self.arguments |= {"PIP_CERT": "/tmp/certificates", "DEBIAN_FRONTEND": "noninteractive"}
        mounts = {"proc": ["-t", "proc", "proc"]} | ({"root/.cache": ["--bind", str(CACHE)]} if CACHE.is_dir() else {})
        for name, words in mounts.items():
            (self.root / name).mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", *words, str(self.root / name)], check=True)
        try:
            if self.run(["sh", "-c", f"cd {self.folder} && {command}"]).wait():
                raise SystemExit(f"failed: RUN {command}")
        finally:
            for name in mounts:
                subprocess.run(["umount", str(self.root / name)], check=True)
            for name in guests:
                (self.root / name).unlink(missing_ok=True)
            for name in ("PIP_CERT", "DEBIAN_FRONTEND"):
                del self.arguments[name]

    def copy(self, sources: list[Path], base: Path, target: str, whole: bool) -> None:
        if self.kept:
            return
        place = self.root / os.path.join(self.folder, target).lstrip("/")
        for source in sources:
            to = place / source.relative_to(base) if whole else place
            to.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, to, symlinks=True)
            else:
                shutil.copy2(source, to)


def clean(root: Path) -> None:
    if root.exists():
        subprocess.run(["rm", "-rf", "--one-file-system", str(root)], check=True)
    root.parent.mkdir(parents=True, exist_ok=True)


def build(dockerfile: Path, folder: Path, given: dict[str, str], kept: bool) -> Stage:
    """The last stage of a Dockerfile. given: values of its ARGs. kept: it was built before."""
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for word, rest in instructions(dockerfile.read_text()):
        if word != "FROM" and not kept:
            assert stage is not None
            print(f"{stage.root.name}: {word} {rest[:100]}", flush=True)
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = stages[name or "image"] = Stage(folder / (name or "image"), base, kept)
        elif word == "ARG":
            name, _, value = rest.partition("=")
            stage.arguments[name] = given.get(name, value.strip('"'))
        elif word == "WORKDIR":
            stage.folder = rest
            if not kept:
                (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif word == "COPY" and rest.startswith("--from="):
            name, source, target = rest.removeprefix("--from=").split()
            stage.copy([stages[name].root / source.lstrip("/")], folder, target, whole=False)
        elif word == "COPY":
            source, target = rest.split()
            files = context() if source == "." else [ROOT / source]
            stage.copy(files, ROOT, target, whole=source == ".")
        elif word == "RUN":
            stage.step(rest)
        elif word == "ENV":
            stage.environment |= dict(pair.split("=", 1) for pair in shlex.split(rest))
        elif word == "USER":
            names = [line.split(":") for line in (stage.root / "etc/passwd").read_text().splitlines()]
            stage.user = next(line[2] for line in names if line[0] == rest)
        elif word in ("ENTRYPOINT", "CMD"):
            stage.command += json.loads(rest)
        elif word == "HEALTHCHECK":
            stage.health = json.loads(rest.partition("CMD ")[2])
        elif word not in ("VOLUME", "EXPOSE"):
            raise SystemExit(f"{dockerfile}: {word} is not known here")
    return stage


def weight(root: Path) -> int:
    """Bytes of the files, those with several names once."""
    seen, total = set(), 0
    for folder, _, names in os.walk(root):
        for name in names:
            state = os.lstat(os.path.join(folder, name))
            if (state.st_dev, state.st_ino) not in seen:
                seen.add((state.st_dev, state.st_ino))
                total += state.st_size
    return total


def attempt(stage: Stage, model: Path) -> None:
    """The image's command on a model: the health check and a completion, as its user."""
    shutil.copy(model, stage.root / "models/model.gguf")
    os.chmod(stage.root / "models/model.gguf", 0o644)
    subprocess.run(["mount", "-t", "proc", "proc", str(stage.root / "proc")], check=True)
    stage.environment["ZSE_API_KEY"] = "sk-image"
    command = [*stage.command, "/models/model.gguf"]
    server = None
    try:
        server = stage.run(command, stage.user, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while stage.run(stage.health, stage.user, stderr=subprocess.DEVNULL).wait():
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the image does not get healthy: exit code {server.poll()}")
            time.sleep(0.3)
        body = {"model": "model", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
        headers = {"content-type": "application/json", "authorization": "Bearer sk-image"}
        with urlopen(Request("http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(), headers)) as answer:
            print("answers:", json.load(answer)["choices"][0]["text"])
    finally:
        if server is not None:
            server.terminate()
            print("exit code", server.wait(60))
        subprocess.run(["umount", str(stage.root / "proc")], check=True)
        (stage.root / "models/model.gguf").unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="as docker build --build-arg")
    parser.add_argument("--try", dest="model", type=Path, metavar="MODEL", help="a .gguf file")
    parser.add_argument("--kept", action="store_true", help="take the image that stands in FOLDER")
    args = parser.parse_args()
    image = build(args.dockerfile, args.folder.resolve(), dict(pair.split("=", 1) for pair in args.arg), args.kept)
    size, own = weight(image.root), weight(image.root / "opt/zse")
    print(
        f"{args.dockerfile.name}: {size / 1e6:.1f} MB, of which /opt/zse {own / 1e6:.1f}; at most {MOST_BYTES / 1e6:.0f}"
    )
    if args.model is not None:
        attempt(image, args.model)
    return size > MOST_BYTES


if __name__ == "__main__":
    sys.exit(main())
