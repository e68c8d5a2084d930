"""Arguments of a launch: by the names of the kernel's parameters, checked, and encoded as the 8-byte slots that kernels
read."""

import struct

from zse.runtime.symbol import Sym

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

MAX_ARGS = 48

_INT_BITS = {"i8": 8, "u8": 8, "i16": 16, "u16": 16, "i32": 32, "u32": 32, "i64": 64, "u64": 64, "bool_": 1, "bool": 1}
_SMALL = 1 << 31  # numbers from 0 below this fit all of _TAKE_SMALL: most arguments need no other check
_TAKE_SMALL = frozenset(("ptr", "i32", "u32", "i64", "u64"))
_FLOATS = {"f32": "<fxxxx", "f64": "<d"}


class Args(dict):
    """A launch's arguments: `Args(x=x, out=out, width=width)`, `Args(**common, bias=None)`.

    For a pointer: anything with an `address` (Tensor, Buffer), an address, or None for the null pointer; the caller
    keeps the memory alive. For an integer: int, Sym or bool; for a float: int or float. A name given twice is Python's
    TypeError."""

    __slots__ = ()


def slots_of(
    symbol: str, params: "Sequence[Sequence[str]]", args: "dict[str, Any]"
) -> tuple[list[int], list[tuple[int, Sym]]]:
    """The arguments in the order of `params` ([[name, type], ...]) as 8-byte numbers, 0 where a symbol goes, and
    [(place among them, Sym), ...].

    Raises TypeError for a name that is missing or unknown and for a value of another type, ValueError for one that does
    not fit; both name the kernel and the parameter.
    """
    if len(args) != len(params):
        raise names_error(symbol, params, args)
    slots: list[int] = []
    syms: list[tuple[int, Sym]] = []
    for name, kind in params:
        try:
            arg = args[name]
        except KeyError:
            raise names_error(symbol, params, args) from None
        if arg.__class__ is int and 0 <= arg < _SMALL and kind in _TAKE_SMALL:
            slots.append(arg)
            continue
        address = getattr(arg, "address", None) if kind == "ptr" else None
        if address.__class__ is int:
            slots.append(address)
        elif isinstance(arg, Sym):
            if kind not in _INT_BITS:
                raise TypeError(f"{symbol}: {name} is {kind}, a symbol is an integer")
            syms.append((len(slots), arg))
            slots.append(0)
        else:
            slots.append(encode(symbol, name, kind, arg))
    return slots, syms


def names_error(symbol: str, params: "Sequence[Sequence[str]]", args: "dict[str, Any]") -> TypeError:
    names = [name for name, _ in params]
    missing = [name for name in names if name not in args]
    unknown = [name for name in args if name not in names]
    wrong = [f"{word} {', '.join(which)}" for word, which in (("missing", missing), ("unknown", unknown)) if which]
    return TypeError(f"{symbol}: {'; '.join(wrong)}; it takes {', '.join(names) or 'no arguments'}")


def encode(symbol: str, name: str, kind: str, arg: object) -> int:
    """The argument's 8-byte slot as an unsigned integer. TypeError or ValueError names kernel and parameter."""
    if kind == "ptr":
        if arg is None:
            return 0
        is_number = isinstance(arg, int) and not isinstance(arg, bool) and arg >= 0
        address: Any = arg if is_number else getattr(arg, "address", None)
        if address is None:
            raise TypeError(f"{symbol}: {name} is a pointer, got {type(arg).__name__} {arg!r}")
        return int(address)
    if kind == "tensormap":
        address = getattr(arg, "host_address", None)
        if address is None:
            raise TypeError(f"{symbol}: {name} is a tensor map (device.tensor_map), got {type(arg).__name__} {arg!r}")
        return int(address)
    if kind in _FLOATS:
        if isinstance(arg, bool) or not isinstance(arg, int | float):
            raise TypeError(f"{symbol}: {name} is {kind}, got {type(arg).__name__} {arg!r}")
        try:
            return int.from_bytes(struct.pack(_FLOATS[kind], arg), "little")
        except OverflowError:
            raise ValueError(f"{symbol}: {name} = {arg!r} does not fit {kind}") from None
    bits = _INT_BITS.get(kind)
    if bits is None:
        raise TypeError(f"{symbol}: {name} has type {kind}, which cannot be passed")
    if not isinstance(arg, int):
        raise TypeError(f"{symbol}: {name} is {kind}, got {type(arg).__name__} {arg!r}")
    low, high = (-(1 << bits - 1), 1 << bits - 1) if kind[0] == "i" else (0, 1 << bits)
    if not low <= arg < high:
        raise ValueError(f"{symbol}: {name} = {arg} does not fit {kind}")
    return arg & 0xFFFFFFFFFFFFFFFF
