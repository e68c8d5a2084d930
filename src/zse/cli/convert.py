"""zse convert: any readable model into one .zse file, quantized anew or kept as it is."""

import argparse
import math
import os
from functools import partial

from zse.bench import perplexity
from zse.cli.options import text_of
from zse.cli.parser import FLAG, Amount, ReadBy, arg, option
from zse.cli.terminal import ProgressBar, notice, size
from zse.engine.calibrate import CHUNK, DEFAULT_TOKENS, Calibration
from zse.errors import ConfigError, UnsupportedError
from zse.formats import store
from zse.formats.convert import convert
from zse.formats.opening import open_model
from zse.models.load import read_config
from zse.tokenizer.load import tokenizer_image

EPILOG = """examples:
  zse convert smollm2 smollm2.zse                     the same weights in the layout that the kernels read
  zse convert ./Qwen3-0.6B qwen3.zse --quant int4
  zse convert ./Qwen2.5-7B-Instruct-AWQ qwen.zse --head int8        AWQ, GPTQ and fp8 checkpoints stay as they are,
                                                      except for what they left in 16 bits
  zse convert ./Qwen2.5-7B-Instruct qwen.zse --quant int4 --group-size 128          for a GPU
  zse convert ./Qwen3-0.6B qwen3.zse --quant int4 --max-perplexity-change 2%         no file where it costs more
  zse convert ./Qwen3-0.6B qwen3.zse --quant int4 --group-size 128 --calibrate prose.txt

An interrupted conversion goes on with the same command, but for --calibrate; OUT appears only when it is complete."""


def _share(text: str) -> float:
    """argparse type: "1%" or "0.01"."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        if 0 <= share < math.inf:
            return share
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 1% or 0.01")


ARGUMENTS = (
    arg("source", metavar="SRC", help="a stored name, or the path of a model file or folder"),
    arg("out", metavar="OUT", help="the .zse file to write"),
    option(
        "--quant",
        ("int4", "int5", "int6", "int8", "fp8", "f16", "bf16"),
        "type of the weight matrices (default: as they are); fp8 is for GPUs",
    ),
    option("--group-size", Amount(int, 0, 256), "columns that share a scale: 16, 32, 64, 128, 256, or 0 for a row"),
    option("--head", ("int4", "int8", "fp8", "f16", "bf16"), "type of the embedding and LM head, if another"),
    option(
        "--layout",
        ("auto", "r16", "rows"),
        "order of floating-point matrices: r16 for the CPU, rows for GPUs, auto by what this machine has"
        "; integers have one order for both",
        "auto",
    ),
    option("--threads", Amount(int, 1, 1024), "(default: all processors)"),
    option("--no-clip-search", FLAG, "quantize faster and less well: no search for the best clipping"),
    option(
        "--calibrate",
        "FILE",
        "quantize by what the model's inputs are on this text (GPTQ), which costs minutes; plain text like that "
        "which the model will see, some 100 KB of it",
    ),
    option(
        "--calibrate-tokens", Amount(int, CHUNK, 1 << 20), f"how much of the text is used (default: {DEFAULT_TOKENS:,})"
    ),
    option("--no-perplexity", FLAG, "do not measure what quantizing costs"),
    option(
        "--max-perplexity-change",
        ReadBy(_share, "PERCENT"),
        "write no file, and end with exit code 1, where the perplexity rises by more, for example 1%%",
    ),
    option(
        "--target-device",
        ("cpu", "gpu"),
        "measure with the activations of this device: int8 of a CPU, fp8 or bf16 of a GPU, which must be "
        "here (default: f32, where the weights alone make the difference; with --max-perplexity-change by --layout)",
    ),
    option("--perplexity-text", "FILE", "measure on a text of your own (default: a short fixed one)"),
    option("--force", FLAG, "replace OUT if it is there"),
    option("-q --quiet", FLAG, "no progress, no report"),
)


def run(args) -> int:
    source = store.resolve(args.source)
    if not args.out.endswith(".zse"):
        raise ConfigError(f"OUT is {args.out!r}; the name must end with .zse")
    if os.path.exists(args.out) and not args.force:
        raise ConfigError(f"{args.out} exists; pass --force to replace it")
    if args.group_size is not None and not (args.quant or args.head or "").startswith("int"):
        raise ConfigError("--group-size goes with --quant int4, int5, int6 or int8")
    gate = args.max_perplexity_change
    if gate is not None and args.no_perplexity:
        raise ConfigError("--max-perplexity-change measures the perplexity; leave --no-perplexity out")
    calibrate = None
    if args.calibrate is not None:
        if not (args.quant or args.head or "").startswith("int"):
            raise ConfigError("--calibrate goes with --quant int4, int5, int6 or int8")
        text = text_of(args.calibrate)
        tokens = args.calibrate_tokens or DEFAULT_TOKENS
        calibrate = partial(Calibration, text=text, tokens=tokens, threads=args.threads)
    elif args.calibrate_tokens is not None:
        raise ConfigError("--calibrate-tokens goes with --calibrate FILE")
    evaluate = _evaluator(source, args) if gate is not None or args.quant and not args.no_perplexity else None
    with ProgressBar("convert") as bar:
        progress = None if args.quiet else lambda done, total, name: bar("writing", done, total)
        report = convert(
            source,
            args.out,
            args.quant,
            args.group_size,
            head=args.head,
            clip_search=not args.no_clip_search,
            layout=_layout(args.layout),
            threads=args.threads,
            tokenizer_image=tokenizer_image,
            progress=progress,
            evaluate=evaluate,
            max_change=gate,
            calibrate=calibrate,
        )
    if not args.quiet:
        _print(report)
    return 0


def _layout(wanted: str) -> str:
    """ "rows" where this machine has a GPU."""
    if wanted != "auto":
        return wanted
    has_gpu = any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/kfd")) or os.uname().sysname == "Darwin"
    return "rows" if has_gpu else "r16"


def _evaluator(source, args):
    """A function path → perplexity; None (said once), UnsupportedError for a gate, where the model does not run or write."""
    try:
        with open_model(source) as opened:
            config = read_config(opened)
        if not config.causal:
            raise UnsupportedError(f"{source}: perplexity", "of an encoder", ["of models that write text"])
    except UnsupportedError as error:
        if args.max_perplexity_change is not None:
            raise
        notice(f"the perplexity is not measured: {error}")
        return None

    target = args.target_device
    if target is None:
        gpu = args.max_perplexity_change is not None and _layout(args.layout) == "rows"
        target = "weights" if args.max_perplexity_change is None else "gpu" if gpu else "cpu"
    text = None if args.perplexity_text is None else text_of(args.perplexity_text)

    def evaluate(path: str) -> float:
        if not args.quiet:
            notice(f"measuring the perplexity of {path}")
        found = perplexity.perplexity(path, min(perplexity.MOST_TOKENS, config.max_context), target, text)
        if args.max_perplexity_change is not None:
            notice(f"perplexity of {path}: {found:.4f}, with the activations of a {target.upper()}")
        return found

    return evaluate


def _print(report) -> None:
    print(
        f"{report.path}: {size(report.nbytes)}, {100 * report.nbytes / max(1, report.source_bytes):.0f} % of the "
        f"source's {size(report.source_bytes)}"
    )
    print(
        f"  {report.num_tensors} tensors: "
        + ", ".join(f"{name} {size(nbytes)}" for name, nbytes in report.schemes.items())
    )
    if report.calibration is not None:
        used = report.calibration
        print(f"  {len(used.names)} of them calibrated on {used.num_tokens} tokens, in {used.seconds:.0f} s")
    if report.resumed_bytes:
        print(f"  {size(report.resumed_bytes)} of it by an earlier run that was interrupted")
    if report.perplexity_after is not None:
        before, after = report.perplexity_before, report.perplexity_after
        print(f"  perplexity {before:.3f} → {after:.3f} ({100 * (after / before - 1):+.2f} %)")
