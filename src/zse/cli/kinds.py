"""What texts of the command line become, as argparse types."""

from argparse import ArgumentTypeError

from zse.cli.parser import Amount
from zse.engine import config
from zse.errors import one_line


def page_size(text: str) -> int:
    """argparse type: auto (0), 16, 32, 64 or 128."""
    if text == "auto":
        return 0
    if text not in ("16", "32", "64", "128"):
        raise ArgumentTypeError(f"{text!r} is not auto, 16, 32, 64 or 128")
    return int(text)


def resident_layers(text: str) -> int:
    """argparse type: auto (AUTO_LAYERS), or a number of layers."""
    return config.AUTO_LAYERS if text in ("auto", str(config.AUTO_LAYERS)) else Amount(int, 0, 1 << 16)(text)


def mixed_ratio(text: str) -> float:
    """argparse type: 0, or a number from 1.1 to 1000."""
    return 0.0 if text == "0" else Amount(float, 1.1, 1000)(text)


def tenant_weight(text: str) -> str:
    """argparse type: NAME=W, a weight above 0 and at most 1000."""
    name, _, weight = text.rpartition("=")
    if not name or "," in name:
        raise ArgumentTypeError(f"{text!r} is not NAME=WEIGHT")
    Amount(float, high=1000, above=0)(weight)
    return text


def memory_size(text: str) -> int:
    """argparse type: bytes from "6G", "5.5GiB", "800M" or a plain number; K, M, G, T are powers of 1024."""
    digits = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = "KMGT".find(digits[-1:]) + 1 if digits else 0
    try:
        value = float(digits[:-1] if unit else digits) * 1024**unit
    except ValueError:
        value = 0.0
    if not 1 <= value < 1 << 50:
        raise ArgumentTypeError(f"{one_line(text)!r} is not a size such as 6G or 800M")
    return int(value)
