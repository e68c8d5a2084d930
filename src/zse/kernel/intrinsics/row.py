"""One row of an intrinsic table: values (`Intrinsic`) and statements (`Effect`)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zse.kernel.ir as ir
from zse.errors import CompileError


class StageError(Exception):
    """A compile error without its place; the innermost statement or expression of the author adds it."""


# A body prints the call as an expression of the target's text: (target, result type, argument types, argument texts) -> text.
Body = Callable[[object, ir.Type, list[ir.Type], list[str]], str]


@dataclass(frozen=True)
class Intrinsic:
    """signature: argument types (or compile-time values) → result type, or a sentence that says what is wrong.
    unify: numbers and scalars among the arguments take the type of the vector among them.
    bodies: target family ("cpu", "cuda", "hip", "metal", "emulate"), or "gpu" for all but the CPU → how it is printed there; a
    target's own table `values` comes before "gpu"."""

    name: str
    signature: Callable[..., ir.Type | str]
    meaning: str
    bodies: dict[str, Body]
    unify: bool = False

    def body_for(self, target) -> Body:
        body = self.bodies.get(target.family) or target.values.get(self.name)
        if body is None and target.family != "cpu":
            body = self.bodies.get("gpu")
        if body is None:
            raise CompileError(f"intrinsic {self.name} has no body for target {target.name}")
        return body


@dataclass(frozen=True)
class Plan:
    """What one use of an Effect becomes. results: types of new variables, or `places`: variables that are read and written."""

    args: tuple[ir.Expr, ...] = ()
    attrs: tuple[object, ...] = ()
    results: tuple[ir.Type, ...] = ()
    places: tuple[ir.Var, ...] = ()


# An effect's body gives the statement's text: (target, statement, texts of the results, texts of the arguments) -> lines, or an
# expression for the one result.
EffectBody = Callable[[Any, ir.Invoke, list[str], list[str]], "list[str] | str"]


@dataclass(frozen=True)
class Effect:
    """An intrinsic that changes something, needs the other threads, or has several results.

    plan: (stager, *author's arguments) → Plan; raises StageError with what is wrong. feature: what `target.has` must know.
    bodies: target family → text; a target's own table `effects` stands for a family that is not among them."""

    name: str
    plan: Callable[..., Plan]
    meaning: str
    bodies: dict[str, EffectBody]
    feature: str | None = None

    def body_for(self, target) -> EffectBody:
        if self.feature and not target.has(self.feature):
            raise CompileError(f"intrinsic {self.name} needs {self.feature}, which target {target.name} does not have")
        body = self.bodies.get(target.family) or target.effects.get(self.name)
        if body is None:
            raise CompileError(f"intrinsic {self.name} has no body for target {target.name}")
        return body


def elem_of(type: object) -> ir.Scalar | None:
    """The scalar type of a scalar or vector, else None."""
    if isinstance(type, ir.Vector):
        return type.elem
    return type if isinstance(type, ir.Scalar) else None
