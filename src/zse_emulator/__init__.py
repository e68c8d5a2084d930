"""The emulated GPU, for the development of kernels: `EmulateDevice` runs GPU kernels on the host and checks what they
do.

A package of its own, which the wheel leaves out: it needs a C++ compiler and zse's sources. `zse kernels check` finds
it in a checkout. Rules and limits: docs/kernel-language.md."""

from zse_emulator.device import EmulateDevice

__all__ = ["EmulateDevice"]
