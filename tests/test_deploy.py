"""What deploy/ has, checked by what there is here: systemd-analyze, helm where it is installed, the options that files name, and each other.

The images are built for real by scripts/bare_image.py, which needs root, Debian and minutes; benchmarks/LOG.md has what came out."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml

from zse.cli import main, settings
from zse.kernel.archs import ARCHS

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
CHART, EXAMPLES = DEPLOY / "helm/zse", sorted((DEPLOY / "helm/examples").glob("*.yaml"))
sys.path.insert(0, str(ROOT / "scripts"))
import bare_image  # noqa: E402

sys.path.remove(str(ROOT / "scripts"))
DOCKERFILES = sorted((DEPLOY / "docker").glob("Dockerfile.*"))


def options() -> dict:
    return settings.options(main.parser_of("serve"))


def of_command_line(words: list[str]) -> None:
    """Raises when `zse WORDS` is not a command line, models aside."""
    assert words[0] == "serve"
    for word in words[1:]:
        assert not word.startswith("--") or word[2:] in options() or word == "--config", word


# -- systemd


def test_the_unit_is_one(tmp_path):
    text = (DEPLOY / "systemd/zse.service").read_text()
    (command,) = re.findall(r"^ExecStart=/opt/zse/bin/zse (.*)$", text, re.MULTILINE)
    of_command_line(command.split())
    stop = int(re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[1])
    assert stop > options()["drain-timeout"].default
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "zse.service"
    unit.write_text(text.replace("/opt/zse/bin/zse", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    unit.write_text(unit.read_text().replace("ProtectHome=yes", "ProtectHom=yes"))
    wrong = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert "ProtectHom" in wrong.stderr


# -- images


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_s_steps_can_be_run(path):
    found = bare_image.instructions(path.read_text())
    known = {
        "FROM",
        "ARG",
        "WORKDIR",
        "COPY",
        "RUN",
        "ENV",
        "USER",
        "VOLUME",
        "EXPOSE",
        "HEALTHCHECK",
        "ENTRYPOINT",
        "CMD",
    }
    assert {word for word, _ in found} <= known
    assert all(rest.partition(" AS ")[0] in bare_image.BASES for word, rest in found if word == "FROM")
    context = {str(file.relative_to(ROOT)) for file in bare_image.context()}
    for word, rest in found:
        if word == "COPY" and not rest.startswith("--from") and not rest.startswith(". "):
            assert rest.split()[0] in context
        for script in re.findall(r"\S+\.sh", rest) if word == "RUN" else ():
            assert script in context or f"deploy/docker/{Path(script).name}" in context
        if word == "ARG":
            assert set(rest.partition("=")[2].strip('"').split()) <= set(ARCHS)
    by_word = dict(found)
    assert by_word["USER"] == "zse" and json.loads(by_word["ENTRYPOINT"]) == ["zse"]
    of_command_line(json.loads(by_word["CMD"]))
    compile(json.loads(by_word["HEALTHCHECK"].partition("CMD ")[2])[2], "health", "exec")


def test_a_build_sees_the_sources_and_nothing_else():
    names = {str(file.relative_to(ROOT)) for file in bare_image.context()}
    assert {"pyproject.toml", "setup.py", "requirements.lock", "src/zse/cli/main.py", "deploy/docker/build.sh"} <= names
    assert not [name for name in names if re.search(r"\.git/|_native/|__pycache__|\.venv|^tests/|^models/|\.env", name)]


@pytest.mark.parametrize("name", ["build.sh", "runtime.sh"])
def test_a_script_is_shell(name):
    subprocess.run(["sh", "-n", str(DEPLOY / "docker" / name)], check=True)


def test_the_lock_has_what_a_cuda_image_compiles_with():
    """build.sh takes the lines of one package out of the lock."""
    command = re.search(r"awk '.*'", (DEPLOY / "docker/build.sh").read_text())[0]
    text = subprocess.run(
        ["sh", "-c", f"{command} requirements-test.lock"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    lines = text.splitlines()
    assert lines[0].startswith("nvidia-cuda-nvrtc==13.") and all("--hash=sha256:" in line for line in lines[1:])
    assert len(lines) > 1 and not lines[-1].endswith("\\")


def test_compose():
    compose = yaml.safe_load((DEPLOY / "docker/compose.yaml").read_text())
    variables = {settings.variable("serve", name) for name in options()}
    for service in compose["services"].values():
        told = {name for name in service["environment"] if name.startswith("ZSE_SERVE_")}
        assert told and told <= variables and "ZSE_API_KEY" in service["environment"]
        build = service["build"]
        place = (DEPLOY / "docker" / build["context"]).resolve()
        assert place == ROOT and (place / build["dockerfile"]) in DOCKERFILES
        (port,) = service["ports"]
        assert port.startswith("127.0.0.1:") and port.endswith(":8000")
        assert service["volumes"] == ["models:/models"] and service["read_only"] is True
        assert not set(service) - {
            *("restart", "environment", "ports", "volumes", "read_only", "tmpfs", "cap_drop", "security_opt"),
            *("stop_grace_period", "image", "build", "profiles", "deploy"),
        }


# -- the chart


def values(path: Path | None = None) -> dict:
    """The chart's, with those of an example over them."""

    def merged(base: dict, other: dict) -> dict:
        both = {
            name: merged(base[name], value) if isinstance(base.get(name), dict) else value
            for name, value in other.items()
        }
        return base | both

    base = yaml.safe_load((CHART / "values.yaml").read_text())
    return base if path is None else merged(base, yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("example", [None, *EXAMPLES], ids=lambda path: path.stem if path else "default")
def test_values_fit_the_schema_and_name_options(example):
    schema = json.loads((CHART / "values.schema.json").read_text())
    found = values(example)
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(found, schema)
    assert set(found) <= set(schema["properties"]) and set(found["config"]) <= set(options())
    for name in ("port", "api-key"):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(found | {"config": {name: 1}}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(found | {"replica": 1}, schema)


def test_templates_use_values_that_exist():
    found, used = values(), set()
    for path in sorted((CHART / "templates").iterdir()):
        text = path.read_text()
        assert text.count("{{") == text.count("}}")
        opened = len(re.findall(r"\{\{-? (?:if|range|with|define) ", text))
        assert opened == len(re.findall(r"\{\{-? end -?\}\}", text)), path.name
        for name in re.findall(r"\.Values\.([\w.]+)", text):
            place = found
            for part in name.split("."):
                assert part in place, f"{path.name}: .Values.{name}"
                place = place[part]
            used.add(name.split(".")[0])
    assert used == set(found)


@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")
@pytest.mark.parametrize("example", [None, *EXAMPLES], ids=lambda path: path.stem if path else "default")
def test_helm_renders_it(example, tmp_path, monkeypatch):
    more = ["--values", str(example)] if example else []
    subprocess.run(["helm", "lint", "--strict", str(CHART), *more], check=True, capture_output=True)
    text = subprocess.run(
        ["helm", "template", "r", str(CHART), *more], check=True, capture_output=True, text=True
    ).stdout
    kinds = {each["kind"]: each for each in yaml.safe_load_all(text) if each}
    toml = kinds["ConfigMap"]["data"]["zse.toml"]
    (tmp_path / "zse.toml").write_text(toml)
    monkeypatch.delenv("ZSE_LOG", raising=False)
    args = settings.parse("serve", main.parser_of("serve"), ["--config", str(tmp_path / "zse.toml")])
    asked = values(example)["config"]
    assert (
        tomllib.loads(toml)["serve"].items() >= asked.items()
        and args.host == "0.0.0.0"
        and args.models == asked["models"]
    )
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    of_command_line(container["args"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert pod["enableServiceLinks"] is False and pod["securityContext"]["runAsNonRoot"] is True
    assert pod["terminationGracePeriodSeconds"] > asked["drain-timeout"]
    scales = values(example)["scaleToZero"]["enabled"]
    assert (
        ("ScaledObject" in kinds)
        == ("InterceptorRoute" in kinds)
        == scales
        == ("replicas" not in kinds["Deployment"]["spec"])
    )
    if scales:
        name = kinds["Deployment"]["metadata"]["name"]
        assert kinds["ScaledObject"]["spec"]["scaleTargetRef"]["name"] == name
        assert kinds["ScaledObject"]["spec"]["minReplicaCount"] == 0
        assert kinds["InterceptorRoute"]["spec"]["target"]["service"] == kinds["Service"]["metadata"]["name"]
