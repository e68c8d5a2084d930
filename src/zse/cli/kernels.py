"""zse kernels: compile the GPU kernels ahead of time, show what there is, and how fast it is; kernels of one's own."""

import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from zse import kernels as package
from zse.bench import kernels, own_kernels, reports, self_check
from zse.cli.parser import FLAG, Amount, Kinds, Many, arg, option
from zse.errors import ConfigError, DeviceError, DeviceMemoryError
from zse.kernel import cache, emit
from zse.runtime import opening, probe
from zse.runtime.bindings import cuda

EPILOG = """examples:
  zse kernels build                       for the GPU of this machine
  zse kernels build --arch sm_90a --arch sm_80
  zse kernels build --op attention --arch sm_90a
  zse kernels list --arch sm_90a
  zse kernels check                       the compiled kernels of this machine's GPU against NumPy
  zse kernels bench --op matmul --device cuda
  zse kernels new swish.py                a kernel of one's own: the file to start with
  zse kernels check swish.py              against its NumPy reference, in every form that can run here
  zse kernels bench swish.py"""


_KINDS = {
    "build": (
        "compile the kernels for an architecture and write the pack that a start reads",
        (
            option(
                "--arch",
                "ARCH",
                "an architecture, such as sm_90a (may be repeated); default: that of this machine's GPU",
                action="append",
            ),
            option("--pack", "FILE", "write the pack to FILE instead of ZSE_HOME/kernels"),
            option(
                "--op",
                Many("NAME"),
                "only kernels whose name starts with NAME (may be repeated); no pack is written without --pack",
            ),
            option("--jobs", Amount(int, low=1), "compilers at once (default: CPUs)"),
            option("--force", FLAG, "compile everything again"),
            option("-v --verbose", FLAG, "registers, spills and shared memory of every kernel"),
        ),
    ),
    "list": (
        "the kernels of an architecture and whether they are built",
        (option("--arch", "ARCH", "an architecture (default: that of this machine's GPU)"),),
    ),
    "bench": (
        "time the package's GPU kernels, or those of FILE, beside what the memory of this machine allows; every result is "
        "checked",
        (
            arg("file", nargs="?", metavar="FILE", help="kernels of one's own (default: the package's)"),
            option("--op", Many("NAME"), "only this operation (may be repeated)"),
            option("--only", Many("TEXT"), "only cases with TEXT in their name (may be repeated: all of them)"),
            option(
                "--device",
                "DEVICE",
                "cuda, cuda:1, ...; for FILE also cpu (default: the first GPU; for FILE the CPU where there is none)",
            ),
            option("--json", "FILE", "write the figures to FILE as well"),
        ),
    ),
    "new": (
        "write the file that a kernel of one's own starts with: an operation that works, to be changed",
        (arg("file", metavar="FILE", help="the file to write; it must not exist"),),
    ),
    "check": (
        "run the cases of a file's operations with fresh random inputs and compare with their NumPy references: on the "
        "CPU; GPU forms on this machine's GPU and in the emulator, where they are. Without FILE: the package's compiled "
        "GPU kernels on the GPU; one that is wrong is not loaded from then on",
        (
            arg("file", nargs="?", metavar="FILE", help="a file as `zse kernels new` writes it"),
            option("--device", "DEVICE", "without FILE: cuda, cuda:1, ... (default: the first GPU)"),
            option("--seed", Amount(int, low=0), "of the inputs (default: a fresh one, shown)"),
            option("--arch", "ARCH", "the GPU architecture that is emulated", "sm_90a"),
        ),
    ),
}
ARGUMENTS = (Kinds(_KINDS),)


def run(args) -> int:
    return {"build": _build, "list": _list, "bench": _bench, "new": _new, "check": _check}[args.kind](args)


def _new(args) -> int:
    path = Path(args.file)
    text = Path(package.__path__[0], "example.py").read_text(encoding="utf-8")
    try:
        with open(path, "x", encoding="utf-8") as file:  # never over a file that came meanwhile
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists already") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    print(f"{path}: change it, then `zse kernels check {path}` and `zse kernels bench {path}`")
    return 0


def _check(args) -> int:
    """0 when every form that could run is right; a form that cannot run here is said, and no failure."""
    seed = int.from_bytes(os.urandom(4), "little") if args.seed is None else args.seed
    if not args.file:
        device = opening.open_device(args.device or "cuda")
        if device.kernels != "gpu":
            raise ConfigError(f"{args.device} is no GPU; `zse doctor` compares the kernels of the CPU")
        return _compare(device, kernels.package_ops([]), seed)
    if args.device:
        raise ConfigError("--device is for the package's kernels: leave FILE or --device out")
    wrong = 0
    for op in own_kernels.load(args.file):
        for where, device in own_kernels.devices(op, args.arch, seed):
            if isinstance(device, str):
                print(f"{op.name:16} {where:24} not checked: {device}")
                continue
            found = list(own_kernels.check(op, device, seed))
            device.close()
            for case, what in found:
                if what:
                    print(f"{op.name:16} {where:24} {case}: {what}")
            bad = sum(bool(what) for _, what in found)
            wrong += bad
            print(f"{op.name:16} {where:24} {len(found) - bad} of {len(found)} cases right")
    print(f"inputs of --seed {seed}")
    return 1 if wrong else 0


def _compare(device, ops, seed: int) -> int:
    """Kernels of a GPU against NumPy, remembered by the hash of their cubins; 0 when none is wrong."""
    found: dict[str, str] = {}
    num_cases, short = 0, ""
    device.pack.comparing = True
    try:
        for one in self_check.compare(device, ops, seed):
            num_cases += 1
            reason = f"{one.op}, {one.case}: {one.reason}" if one.reason else ""
            if reason:
                print(reason)
            found |= {symbol: found.get(symbol) or reason for symbol in one.symbols}
    except DeviceMemoryError as error:
        short = f"; the others were not: {error}"
    finally:
        device.pack.comparing = False
    cache.remember(device.pack.arch, {device.pack.digest(symbol): reason for symbol, reason in found.items()})
    device.close()
    wrong = sum(map(bool, found.values()))
    verdict = f"{wrong} are wrong and will not be loaded" if wrong else "none is wrong"
    print(f"{device.product}: {len(found)} kernels compared with NumPy in {num_cases} cases, {verdict}{short}")
    return 1 if wrong else 0


def _compare_built(arch: str, symbols: set[str]) -> int:
    """What was just built, where this machine's GPU runs it and NumPy is here."""
    try:
        if cache.resolve_arch(arch) != _arch() or find_spec("numpy") is None:
            return 0
        device = opening.open_device("cuda")
    except (ConfigError, DeviceError):
        return 0
    target = emit.gpu_target(cache.resolve_arch(arch))
    ops = kernels.package_ops([])
    built = [op for op in ops if any(variant.symbol in symbols for variant in op.gpu_variants(target))]
    return _compare(device, built, int.from_bytes(os.urandom(4), "little"))


def _arch() -> str:
    """The architecture of this machine's first GPU."""
    try:
        driver = cuda.CUDADriver()
        driver.init(0)
        device = driver.integer("device_get", 0)
        major, minor = (
            driver.integer("device_attribute", attribute, device)
            for attribute in (cuda.CAPABILITY_MAJOR, cuda.CAPABILITY_MINOR)
        )
    except DeviceError as error:
        raise ConfigError(f"no GPU to compile for ({error}); name one, such as --arch sm_90a") from None
    return cache.resolve_arch(f"sm_{major}{minor}{'a' if major >= 9 else ''}")


def _build(args) -> int:
    archs, wrong = args.arch or [_arch()], 0
    if args.pack and len(archs) > 1:
        raise ConfigError("--pack is one file: give one --arch")
    for arch in archs:
        start = time.perf_counter()
        say = (lambda line: print(line, file=sys.stderr)) if args.verbose else (lambda line: None)
        path, compiled = cache.build(
            arch,
            Path(args.pack) if args.pack else None,
            args.op,
            jobs=args.jobs or len(probe.allowed_cpus()),
            force=args.force,
            say=say,
        )
        spilled = [one.symbol for one in compiled if one.spills]
        print(
            f"{cache.resolve_arch(arch)}: {len(compiled)} kernels in {time.perf_counter() - start:.1f} s"
            + (f", {path.stat().st_size / 1e6:.1f} MB: {path}" if path else "")
            + (f"; registers spilled: {', '.join(spilled)}" if spilled else "")
        )
        if not args.pack:
            wrong += _compare_built(arch, {one.symbol for one in compiled})
    return 1 if wrong else 0


def _list(args) -> int:
    arch = cache.resolve_arch(args.arch or _arch())
    pack = cache.open_pack(arch).pack
    print(f"{arch}: {pack.path if pack else f'no pack; `zse kernels build --arch {arch}` makes it'}")
    for symbol, variant in cache.package_variants(arch).items():
        entry = pack.manifest.get(symbol) if pack else None
        built = f" {entry['registers']:4} registers {entry['shared_bytes']:8,} bytes shared" if entry else ""
        spilled = f" {entry['spills']} bytes spilled" if entry and entry["spills"] else ""
        print(f"  {symbol:48} {variant.threads:5} threads{built}{spilled}")
    return 0


def _bench(args) -> int:
    if args.file:
        timed = [(own_kernels.device_for(op, args.device), [op]) for op in own_kernels.load(args.file, args.op)]
    else:
        device = opening.open_device(args.device or "cuda")
        if device.kernels != "gpu":
            raise ConfigError(f"{args.device} is no GPU; kernels of the CPU are timed by `zse bench`")
        timed = [(device, kernels.package_ops(args.op))]

    def report(line: kernels.Timing, ceiling: float) -> None:
        share, rate = 100 * line.gigabytes / ceiling, line.flops / line.microseconds / 1e6
        speed = f"{rate:7.1f} TFLOP/s" if rate >= 1 else f"{1e3 * rate:7.1f} GFLOP/s"
        print(
            f"{line.op:14} {line.case:44} {line.microseconds:9.2f} us {line.gigabytes:7.0f} GB/s {share:5.1f} % "
            f"{speed}{'' if line.checked else '  WRONG'}",
            flush=True,
        )

    rows, right = [], True
    for device, ops in timed:
        ceiling, lines = kernels.time_ops(device, ops, report, args.only)
        right = right and all(line.checked for line in lines)
        rows += [line._asdict() | {"gigabytes": line.gigabytes, "ceiling": ceiling} for line in lines]
        name = device.product or f"{device.threads} threads"
        print(f"{name}: {ceiling:.0f} GB/s {kernels.CEILINGS[device.kernels].moved}")
    if args.json:
        reports.write(args.json, json.dumps(rows, indent=1) + "\n")
    return 0 if right else 1
