"""zse doctor: what this machine has, what is missing, and how to mend it. Looks only; changes nothing."""

import importlib.metadata
import json
import os
import platform
import sys
from importlib.util import find_spec

import zse
from zse import env
from zse.bench import self_check
from zse.cli import doctor_gpu, main, settings, terminal
from zse.cli.parser import FLAG, option
from zse.errors import ZSEError
from zse.formats import store
from zse.runtime import cpu, native, probe
from zse.server import mcp

EPILOG = "Exit code 0 when models can be served here, 1 when something that is needed is missing."

OK, NOTE, BAD = "ok", "note", "bad"
_LEAST_FREE_BYTES = 1 << 30
# Switches of this project's own tests.
_OF_TESTS = (
    "ZSE_TEST_MODELS ZSE_GOLDENS ZSE_REQUIRE_MODELS ZSE_REQUIRE_CLANG ZSE_REQUIRE_CHROMIUM ZSE_REQUIRE_ARM64".split()
)
_NEEDED = ("msgspec", "jinja2", "httptools")
_OPTIONAL = {
    "numpy": "zse convert",
    "llguidance": "structured output (response_format, guided decoding, strict tools)",
    "tokenizers": "Gemma's tokenizer.json and rare kinds; GGUF files and most folders do without",
}


ARGUMENTS = (option("--json", FLAG, "print JSON: a list of checks with state ok, note or bad"),)


def run(args) -> int:
    checks = [dict(zip(("check", "state", "found", "mend"), row, strict=True)) for row in _checks()]
    failed = [item for item in checks if item["state"] == BAD]
    if args.json:
        print(json.dumps({"ok": not failed, "checks": checks}, indent=1))
        return 1 if failed else 0
    sign = {OK: "ok  ", NOTE: "note", BAD: "BAD "}
    width = max(len(item["check"]) for item in checks)
    for item in checks:
        print(f"{sign[item['state']]}  {item['check']:<{width}}  {item['found']}")
        if item["mend"]:
            print(f"{'':<{width + 6}}  → {item['mend']}")
    print(f"\n{len(failed)} of {len(checks)} checks failed" if failed else "\neverything that serving needs is here")
    return 1 if failed else 0


def _checks():
    """(name, state, what was found, how to mend it) of everything, in the order of the output."""
    facts = probe.facts()
    yield _python()
    yield from _cpu(facts)
    yield _memory(facts["memory"])
    yield _compiler(facts)
    yield from doctor_gpu.checks(facts["cuda"])
    yield from _packages()
    yield _bytecode(len(probe.modules_without_bytecode()))
    yield from _store()
    yield _configuration()
    yield from _mcp()
    yield _switches()


def _python() -> tuple[str, str, str, str]:
    found = f"{platform.python_version()} at {sys.executable}"
    state, mend = (OK, "") if sys.version_info >= (3, 11) else (BAD, "install Python 3.11 or later")
    return "python", state, found, mend


def _cpu(facts: dict):
    features = ", ".join(facts["features"]) or "features unknown: the runtime library is missing"
    yield "cpu", OK, f"{facts['cpu']} ({facts['machine']}: {features})", ""
    quota = f", control group grants {facts['cpu_quota']:.1f} CPUs" if facts["cpu_quota"] else ""
    cores = f"{facts['physical_cores']} cores, {facts['logical_cpus']} logical"
    yield "threads", OK, f"{facts['threads'] or 'unknown'} of {cores}{quota}", ""
    compiled = f"{', '.join(facts['compiled']) or 'none'} in {facts['native_dir']}"
    if facts["error"]:
        yield "cpu kernels", BAD, f"compiled: {compiled}", facts["error"]
        return
    yield "cpu kernels", OK, f"using {facts['isa']}; compiled: {compiled}", ""
    if os.path.dirname(native.manifest_path(facts["isa"])) != facts["native_dir"]:
        found = f"{facts['isa']} in part: what a first model needs; another kernel is compiled when it is asked for"
        yield "cpu kernels", NOTE, found, "run `python -m zse.build` to compile all"
    else:
        yield _numbers(facts["isa"])
    best = facts["runnable"][0]
    if best != facts["isa"]:
        mend = "unset ZSE_ISA" if os.environ.get("ZSE_ISA") else "run `python -m zse.build` to compile it"
        yield "cpu kernels", NOTE, f"this CPU could run {best}, which is faster", mend


def _numbers(isa: str) -> tuple[str, str, str, str]:
    """Whether the kernels compute what NumPy computes, in a second: a build looked at its own, a wheel's were built
    elsewhere."""
    if find_spec("numpy") is None:
        return "cpu numbers", NOTE, "not compared: NumPy is missing", f"{sys.executable} -m pip install numpy"
    wrong = list(self_check.problems(cpu.CPUDevice(1), 1))
    if not wrong:
        return "cpu numbers", OK, f"kernels of {isa} compute what NumPy computes", ""
    place, reason = wrong[0]
    return (
        "cpu numbers",
        BAD,
        f"{place}: {reason}",
        "run `python -m zse.build --force`, with another C compiler if that does not help",
    )


def _memory(memory: dict) -> tuple[str, str, str, str]:
    limit = f", control group's limit {terminal.size(memory['limit'])}" if memory["limit"] else ""
    available = memory["available"]
    left = f", {terminal.size(available)} available" if available is not None else ""
    found = f"{terminal.size(memory['total'])}{limit}{left}"
    if available is not None and available < 512 << 20:
        return "memory", NOTE, found, "close other programs: the smallest catalog model needs about 300 MB"
    return "memory", OK, found, ""


def _compiler(facts: dict) -> tuple[str, str, str, str]:
    if facts["compiler"]:
        path, version = facts["compiler"]
        return "c compiler", OK, f"{path}: {version}", ""
    state, anew = (BAD, "") if facts["error"] else (NOTE, " anew")
    return "c compiler", state, "none", f"needed to compile the CPU kernels{anew}: {native.compiler_hint()}"


def _packages():
    versions, missing = [], []
    for name in (*_NEEDED, *_OPTIONAL):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    needed = [name for name in missing if name in _NEEDED]
    yield "zse", OK, f"{zse.__version__} in {os.path.dirname(os.path.abspath(zse.__file__))}", ""
    mend = f"missing: {', '.join(needed)}; run: {sys.executable} -m pip install {' '.join(needed)}" if needed else ""
    yield "packages", BAD if needed else OK, ", ".join(versions) or "none", mend
    for name in missing:
        if name in _OPTIONAL:
            mend = f"{sys.executable} -m pip install {name}"
            yield "packages", NOTE, f"{name} is missing: needed by {_OPTIONAL[name]}", mend
    if find_spec("pip") is None:
        mend = f"{sys.executable} -m ensurepip (uv: uv pip install pip)"
        yield "pip", NOTE, "none: zse pull cannot fetch catalog models", mend
    else:
        yield "pip", OK, importlib.metadata.version("pip"), ""


def _bytecode(missing: int) -> tuple[str, str, str, str]:
    if not missing:
        return "bytecode", OK, "all modules are compiled", ""
    found = f"{missing} modules of zse are not compiled: every start does it anew, up to 0.3 s"
    return "bytecode", NOTE, found, "run `python -m zse.build`, or start zse once as a user who may write beside them"


def _store():
    home = store.home()
    folder = home
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        yield "store", BAD, f"{home}: {folder} is not a folder", "set ZSE_HOME to a folder you own"
        return
    stats = os.statvfs(folder)
    free = stats.f_bavail * stats.f_frsize
    if not os.access(folder, os.W_OK):
        yield "store", BAD, f"{home}: {folder} cannot be written to", "set ZSE_HOME to a folder you own"
        return
    state, mend = (NOTE, "free some, or set ZSE_HOME to another disk") if free < _LEAST_FREE_BYTES else (OK, "")
    yield "disk", state, f"{terminal.size(free)} free under {home}", mend
    try:
        models, partials = store.entries(), store.partials()
    except ZSEError as error:
        yield "store", BAD, home, str(error)
        return
    names = ", ".join(f"{model['name']} ({terminal.size(model['bytes'])})" for model in models) or "no model yet"
    yield "store", OK, names, "" if models else "zse pull smollm2"
    for part in partials:
        found = f"{part['name']}: a download that did not end ({terminal.size(part['bytes'])})"
        yield "store", NOTE, found, f"zse pull {part['name']}, or zse rm {part['name']}"


def _configuration() -> tuple[str, str, str, str]:
    path = settings.config_path([])
    try:
        for command in settings.COMMANDS:
            settings.found(command, main.parser_of(command), [])
    except ZSEError as error:
        return "settings", BAD, path or "the environment", str(error)
    return "settings", OK, path or f"no configuration file ({os.path.join(store.home(), settings.NAME)})", ""


def _mcp():
    """The file of MCP servers that the settings name, if any."""
    try:
        given = settings.found("serve", main.parser_of("serve"), []).get("mcp")
    except ZSEError:
        return  # _configuration has said it
    if given is None:
        return
    path = str(given.value)
    try:
        servers = mcp.config.read_file(path)
    except ZSEError as error:
        yield "mcp", BAD, path, str(error)
        return
    missing = [one.label for one in servers if one.command and mcp.stdio.program_of(one) is None]
    yield "mcp", OK, f"{path}: {', '.join(one.label for one in servers) or 'no server'}", ""
    for label in missing:
        yield "mcp", NOTE, f"{label}: its command is no program that can be run", f"install it, or mend {path}"


def _switches() -> tuple[str, str, str, str]:
    options = [
        settings.variable(command, name)
        for command in settings.COMMANDS
        for name in settings.options(main.parser_of(command))
    ]
    given = [name for name in (*env.SWITCHES, *options) if os.environ.get(name)]
    known = [f"{name}={'(set)' if name.endswith('_API_KEY') else os.environ[name]}" for name in given]
    read = (*env.SWITCHES, *options, *_OF_TESTS)
    unknown = sorted(name for name in os.environ if name.startswith("ZSE_") and name not in read)
    if unknown:
        return "environment", NOTE, ", ".join(known + unknown), f"zse does not read {', '.join(unknown)}"
    return "environment", OK, ", ".join(known) or "no ZSE_ variable is set", ""
