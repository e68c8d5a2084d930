"""zse kernels: compile the GPU kernels ahead of time, and show what there is."""

HELP = "compile the GPU kernels, or list them"

EPILOG = """examples:
  zse kernels build                       for the GPU of this machine
  zse kernels build --arch sm_90a --arch sm_80
  zse kernels build --op attention --arch sm_90a
  zse kernels list --arch sm_90a"""


def add_arguments(parser) -> None:
    from zse.cli.parser import number

    commands = parser.add_subparsers(dest="what", metavar="COMMAND", required=True)
    build = commands.add_parser("build", help="compile the kernels and write the pack that a start reads", description=(
        "compile the kernels for an architecture and write the pack that a start reads"))
    build.add_argument("--arch", action="append", metavar="ARCH", help="an architecture, such as sm_90a (may be repeated); default: "
                       "that of this machine's GPU")
    build.add_argument("--pack", metavar="FILE", help="write the pack to FILE instead of ZSE_HOME/kernels")
    build.add_argument("--op", action="append", default=[], metavar="NAME",
                       help="only kernels whose name starts with NAME (may be repeated); no pack is written without --pack")
    build.add_argument("--jobs", type=number(int, low=1), metavar="N", help="compilers at once (default: CPUs)")
    build.add_argument("--force", action="store_true", help="compile everything again")
    build.add_argument("-v", "--verbose", action="store_true", help="registers, spills and shared memory of every kernel")
    listing = commands.add_parser("list", help="the kernels and whether they are built", description=(
        "the kernels of an architecture and whether they are built"))
    listing.add_argument("--arch", metavar="ARCH", default=None, help="an architecture (default: that of this machine's GPU)")


def run(args) -> int:
    return {"build": _build, "list": _list}[args.what](args)


def _arch() -> str:
    """The architecture of this machine's first GPU."""
    from zse.errors import ConfigError, DeviceError
    from zse.runtime.bindings import cuda
    try:
        driver = cuda.CUDADriver()
        driver.init(0)
        device = driver.integer("device_get", 0)
        number = 10 * driver.integer("device_attribute", cuda.CAPABILITY_MAJOR, device) + driver.integer(
            "device_attribute", cuda.CAPABILITY_MINOR, device)
    except DeviceError as error:
        raise ConfigError(f"no GPU to compile for ({error}); name one, such as --arch sm_90a") from None
    from zse.kernel.cache import resolve_arch
    return resolve_arch(f"sm_{number}{'a' if number >= 90 else ''}")


def _build(args) -> int:
    import sys
    import time
    from pathlib import Path

    from zse.errors import ConfigError
    from zse.kernel import cache
    from zse.runtime import probe
    archs = args.arch or [_arch()]
    if args.pack and len(archs) > 1:
        raise ConfigError("--pack is one file: give one --arch")
    for arch in archs:
        start = time.perf_counter()
        say = (lambda line: print(line, file=sys.stderr)) if args.verbose else (lambda line: None)
        path, compiled = cache.build(arch, Path(args.pack) if args.pack else None, args.op, jobs=args.jobs or len(probe.allowed_cpus()), force=args.force, say=say)
        spilled = [one.symbol for one in compiled if one.spills]
        print(f"{cache.resolve_arch(arch)}: {len(compiled)} kernels in {time.perf_counter() - start:.1f} s"
              + (f", {path.stat().st_size / 1e6:.1f} MB: {path}" if path else "")
              + (f"; registers spilled: {', '.join(spilled)}" if spilled else ""))
    return 0


def _list(args) -> int:
    from zse.kernel import cache
    arch = cache.resolve_arch(args.arch or _arch())
    pack = cache.open_pack(arch).pack
    if pack is None:
        print(f"{arch}: no pack; `zse kernels build --arch {arch}` makes it")
    else:
        print(f"{arch}: {pack.path}")
    for symbol, variant in cache.package_variants(arch).items():
        entry = pack.manifest.get(symbol) if pack else None
        print(f"  {symbol:48} {variant.threads:5} threads" + (
            f" {entry['registers']:4} registers {entry['shared_bytes']:8,} bytes shared" + (
                f" {entry['spills']} bytes spilled" if entry["spills"] else "") if entry else ""))
    return 0
