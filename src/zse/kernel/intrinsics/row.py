"""One row of an intrinsic table."""

from collections.abc import Callable
from dataclasses import dataclass

from zse.errors import CompileError
from zse.kernel import ir

# A body prints the call as an expression of the target's text: (target, result type, argument types, argument texts) -> text.
Body = Callable[[object, ir.Type, list[ir.Type], list[str]], str]


@dataclass(frozen=True)
class Intrinsic:
    """signature: argument types (or compile-time values) → result type, or a sentence that says what is wrong.
    unify: numbers and scalars among the arguments take the type of the vector among them.
    bodies: target family ("cpu", "cuda", "hip", "metal", "emulate") → how it is printed there."""
    name: str
    signature: Callable[..., ir.Type | str]
    meaning: str
    bodies: dict[str, Body]
    unify: bool = False

    def body_for(self, target) -> Body:
        body = self.bodies.get(target.family)
        if body is None:
            raise CompileError(f"intrinsic {self.name} has no body for target {target.name}")
        return body


def elem_of(type: object) -> ir.Scalar | None:
    """The scalar type of a scalar or vector, else None."""
    if isinstance(type, ir.Vector):
        return type.elem
    return type if isinstance(type, ir.Scalar) else None
