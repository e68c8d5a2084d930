"""From a list of variants to C text and the manifest that launchers check their arguments against."""

from collections.abc import Iterable

from zse.kernel import ir
from zse.kernel.frontend import stage
from zse.kernel.language import Variant
from zse.kernel.targets.cpu import ISAS, CpuTarget


def emit_unit(variants: Iterable[Variant], isa: str) -> tuple[str, dict[str, dict]]:
    """One C file for these variants on an ISA level, and {symbol: {"params": [[name, type], ...], "origin": ...}}
    with type "ptr", or the scalar's name. The text is deterministic."""
    target = CpuTarget(ISAS[isa])
    functions = [stage(variant.kernel, variant.statics, variant.symbol, target) for variant in variants]
    manifest = {function.symbol: {
        "params": [[param.name, "ptr" if isinstance(param.type, ir.Pointer) else str(param.type)] for param in function.params],
        "origin": function.origin} for function in functions}
    return target.unit(functions), manifest
