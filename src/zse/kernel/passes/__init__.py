"""Passes over a staged function, in the order they run."""

from zse import lazy
from zse.kernel import ir
from zse.kernel.passes.dead import remove_dead_variables

PASSES = (remove_dead_variables,)


def run(function: ir.Function) -> ir.Function:
    """Apply every pass."""
    for apply in PASSES:
        function = apply(function)
    return function


__getattr__ = lazy.submodules(__name__, __path__)
