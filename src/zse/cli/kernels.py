"""zse kernels: compile the GPU kernels ahead of time, show what there is, and how fast it is."""

import json
import sys
import time
from pathlib import Path

from zse.bench import kernels
from zse.cli import parser as cli_parser
from zse.errors import ConfigError, DeviceError
from zse.kernel import cache
from zse.kernel import cache as kernel_cache
from zse.runtime import opening, probe
from zse.runtime.bindings import cuda

EPILOG = """examples:
  zse kernels build                       for the GPU of this machine
  zse kernels build --arch sm_90a --arch sm_80
  zse kernels build --op attention --arch sm_90a
  zse kernels list --arch sm_90a
  zse kernels bench --op matmul --device cuda"""


def add_arguments(parser) -> None:
    commands = parser.add_subparsers(dest="what", metavar="COMMAND", required=True)
    build = commands.add_parser(
        "build",
        help="compile the kernels and write the pack that a start reads",
        description=("compile the kernels for an architecture and write the pack that a start reads"),
    )
    build.add_argument(
        "--arch",
        action="append",
        metavar="ARCH",
        help="an architecture, such as sm_90a (may be repeated); default: that of this machine's GPU",
    )
    build.add_argument("--pack", metavar="FILE", help="write the pack to FILE instead of ZSE_HOME/kernels")
    build.add_argument(
        "--op",
        action="append",
        default=[],
        metavar="NAME",
        help="only kernels whose name starts with NAME (may be repeated); no pack is written without --pack",
    )
    build.add_argument(
        "--jobs", type=cli_parser.number(int, low=1), metavar="N", help="compilers at once (default: CPUs)"
    )
    build.add_argument("--force", action="store_true", help="compile everything again")
    build.add_argument(
        "-v", "--verbose", action="store_true", help="registers, spills and shared memory of every kernel"
    )
    listing = commands.add_parser(
        "list",
        help="the kernels and whether they are built",
        description=("the kernels of an architecture and whether they are built"),
    )
    listing.add_argument(
        "--arch", metavar="ARCH", default=None, help="an architecture (default: that of this machine's GPU)"
    )
    bench = commands.add_parser(
        "bench",
        help="time the kernels of this machine's GPU, checked in the same run",
        description=("time the kernels of this machine's GPU beside what its memory allows; every result is checked"),
    )
    bench.add_argument(
        "--op", action="append", default=[], metavar="NAME", help="only this operation (may be repeated)"
    )
    bench.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="only cases with TEXT in their name (may be repeated: all of them)",
    )
    bench.add_argument("--device", default="cuda", metavar="DEVICE", help="cuda, cuda:1, ... (default: cuda)")
    bench.add_argument("--json", metavar="FILE", help="write the figures to FILE as well")


def run(args) -> int:
    return {"build": _build, "list": _list, "bench": _bench}[args.what](args)


def _arch() -> str:
    """The architecture of this machine's first GPU."""
    try:
        driver = cuda.CUDADriver()
        driver.init(0)
        device = driver.integer("device_get", 0)
        number = 10 * driver.integer("device_attribute", cuda.CAPABILITY_MAJOR, device) + driver.integer(
            "device_attribute", cuda.CAPABILITY_MINOR, device
        )
    except DeviceError as error:
        raise ConfigError(f"no GPU to compile for ({error}); name one, such as --arch sm_90a") from None
    return kernel_cache.resolve_arch(f"sm_{number}{'a' if number >= 90 else ''}")


def _build(args) -> int:
    archs = args.arch or [_arch()]
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
    return 0


def _list(args) -> int:
    arch = cache.resolve_arch(args.arch or _arch())
    pack = cache.open_pack(arch).pack
    if pack is None:
        print(f"{arch}: no pack; `zse kernels build --arch {arch}` makes it")
    else:
        print(f"{arch}: {pack.path}")
    for symbol, variant in cache.package_variants(arch).items():
        entry = pack.manifest.get(symbol) if pack else None
        print(
            f"  {symbol:48} {variant.threads:5} threads"
            + (
                f" {entry['registers']:4} registers {entry['shared_bytes']:8,} bytes shared"
                + (f" {entry['spills']} bytes spilled" if entry["spills"] else "")
                if entry
                else ""
            )
        )
    return 0


def _bench(args) -> int:
    device = opening.open_device(args.device)
    if device.kernels != "gpu":
        raise ConfigError(f"{args.device} is no GPU; kernels of the CPU are timed by `zse bench`")

    def report(line: kernels.Line, ceiling: float) -> None:
        share = 100 * line.gigabytes / ceiling
        print(
            f"{line.op:14} {line.case:44} {line.microseconds:9.2f} us {line.gigabytes:7.0f} GB/s {share:5.1f} % "
            f"{line.flops / line.microseconds / 1e6:7.1f} TFLOP/s{'' if line.checked else '  WRONG'}",
            flush=True,
        )

    ceiling, lines = kernels.run(device, args.op, report, args.only)
    print(f"{device.product or device.name}: {ceiling:.0f} GB/s read")
    if args.json:
        rows = [line._asdict() | {"gigabytes": line.gigabytes, "ceiling": ceiling} for line in lines]
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if all(line.checked for line in lines) else 1
