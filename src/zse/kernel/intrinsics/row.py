"""One row of an intrinsic table: values (`Intrinsic`) and statements (`Effect`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import zse.kernel.ir as ir
from zse.errors import CompileError


class StageError(Exception):
    """A compile error without its place; the innermost statement or expression of the author adds it."""


# What prints the call as an expression of the target's text: a template with the arguments' texts as {0}, {1}, or a
# function (target, result type, argument types, argument texts) -> text.
Body = str | Callable[[Any, ir.Type, list[ir.Type], list[str]], str]


class Spelled:
    """bodies: family of targets → text. "gpu" are all but the CPU, "simt" those that have threads, warps,
    shared memory and atomics only. feature: what `target.has` must know."""

    name: str
    bodies: Mapping[str, Any]
    feature: str | None = None

    def body_for(self, target) -> Any:
        """The target's own body, else that of its nearest family. CompileError where there is none."""
        known = target.bodies.get(self.name)
        if known is not None:
            return known
        if self.feature and not target.has(self.feature):
            raise CompileError(f"intrinsic {self.name} needs {self.feature}, which target {target.name} does not have")
        found = [self.bodies[family] for family in target.families if family in self.bodies]
        if self.name not in target.own and not found:
            raise CompileError(f"intrinsic {self.name} has no body for target {target.name}")
        body = target.bodies[self.name] = target.own.get(self.name, found[0] if found else None)
        return body


@dataclass(frozen=True)
class Intrinsic(Spelled):
    """signature: argument types (or compile-time values) → result type, or a sentence that says what is wrong.
    unify: numbers and scalars among the arguments take the type of the vector among them."""

    name: str
    signature: Callable[..., ir.Type | str]
    bodies: Mapping[str, Body]
    unify: bool = False


@dataclass(frozen=True)
class Plan:
    """What one use of an Effect becomes. results: types of new variables, or `places`: variables that are read and
    written."""

    args: tuple[ir.Expr, ...] = ()
    attrs: tuple[object, ...] = ()
    results: tuple[ir.Type, ...] = ()
    places: tuple[ir.Var, ...] = ()


# An effect's body gives statements (";" last, lines apart by newlines), nothing, or an expression for the one result: a
# template with the arguments {0}, {1}, the results {out[0]} and the compile-time arguments {attr[0]}, or a function
# (target, statement, texts of the results, texts of the arguments) -> text.
EffectBody = str | Callable[[Any, ir.Invoke, list[str], list[str]], str]


@dataclass(frozen=True)
class Effect(Spelled):
    """An intrinsic that changes something, needs the other threads, or has several results.

    plan: (stager, *author's arguments) → Plan; raises StageError with what is wrong."""

    name: str
    plan: Callable[..., Plan]
    bodies: Mapping[str, EffectBody]
    feature: str | None = None


def nothing(stager) -> Plan:
    """The plan of an effect without arguments."""
    return Plan()


def elem_of(type: object) -> ir.Scalar | None:
    """The scalar type of a scalar or vector, else None."""
    if isinstance(type, ir.Vector):
        return type.elem
    return type if isinstance(type, ir.Scalar) else None
