"""The values of the staged front end: variables, types and conversions, operators on run-time values."""

import ast
from typing import Any, TypeGuard

import zse.kernel.ir as ir
from zse.kernel.intrinsics.row import StageError
from zse.kernel.language import DType, VectorType
from zse.kernel.source import Scope, Source

# Names that the printed languages or the entry point's own text already use.
RESERVED = frozenset(
    """args grid first last block block_0 block_1 block_2 next_block auto break case char const continue default do
double else enum extern float for goto if inline int long register restrict return short signed sizeof static struct switch typedef
union unsigned void volatile while asm class new delete template this operator private public namespace using half device kernel
thread threadgroup constant warp main bool true false int4 uint4 float4 min max dim3 threadIdx blockIdx blockDim gridDim""".split()
)


def is_runtime(value: object) -> TypeGuard[ir.Expr]:
    """Whether the generated code computes it."""
    return isinstance(value, ir.Expr)


def bits_of(type: ir.Type) -> int:
    """Bits of a scalar or vector."""
    return type.elem.bits * type.lanes if isinstance(type, ir.Vector) else type.bits


def dtype_of(type: ir.Scalar) -> DType:
    """An IR type as the language's."""
    return DType(type.name, type.kind, type.bits)


class Values:
    """What a Stager has: the statements so far, the names in sight, and where in the source it stands."""

    target: Any
    source: Source

    def __init__(self, target: Any):
        self.target = target
        self.body: list[ir.Stmt] = []
        self.counts: dict[str, int] = {}
        self.line = 0
        self.function: Any = None
        self.scope = Scope(None, False)
        self.depth = 0
        self.loops: list[str] = []
        self.hint = "item"  # the name that a list under construction will have
        self.fresh_results: set[str] = set()  # results of effects that no name is bound to yet

    def statement(self, node: ast.stmt) -> None:
        raise NotImplementedError

    # names and statements
    # ------------------------------------------------------------------------------------------------

    def fresh(self, hint: str) -> str:
        hint = f"{hint}_" if hint in RESERVED else hint
        number = self.counts.get(hint, 0)
        self.counts[hint] = number + 1
        return hint if number == 0 else f"{hint}_{number}"

    def emit(self, stmt: ir.Stmt) -> None:
        stmt.line, stmt.path = self.line, self.source.name
        self.body.append(stmt)

    def declare(self, hint: str, value: ir.Expr) -> ir.Var:
        if isinstance(value.type, ir.Void):
            raise StageError("this call has no value")
        if isinstance(value, ir.Var) and value.name in self.fresh_results:  # nobody else has a name for it: no copy
            self.fresh_results.discard(value.name)
            return value
        var = ir.Var(value.type, self.fresh(hint))
        self.emit(ir.Declare(var, value))
        return var

    def materialize(self, value: object, hint: str) -> object:
        """A run-time value as a variable of its own (so that it is computed once); containers element by element."""
        if isinstance(value, ir.Expr):
            return self.declare(hint, value)
        if isinstance(value, list | tuple):
            items = [self.materialize(item, hint) for item in value]
            return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)  # type: ignore[attr-defined]
        return value

    def bind(self, name: str, value: object) -> None:
        scope, crossed = self.scope.find(name)
        old = scope.names[name] if scope else None
        if isinstance(value, ir.Expr):
            if value.type is ir.TENSOR_MAP:
                raise StageError("a TensorMap is used where it is declared: as a parameter")
            if isinstance(old, ir.Var):
                self.emit(ir.Assign(old, self.coerce(value, old.type, f"{name} is {{type}}")))
                return
            if crossed and old is not None:
                raise StageError(
                    f"{name} is a compile-time value outside this run-time block; declare it with a type there, "
                    f"e.g. {name} = f32({old!r})"
                )
            self.scope.names[name] = self.declare(name, value)
            return
        if isinstance(old, ir.Var) and isinstance(value, int | float):
            self.emit(ir.Assign(old, self.coerce(value, old.type, f"{name} is {{type}}")))
            return
        if crossed:
            raise StageError(
                f"{name} is a compile-time value and changes inside a run-time block; declare it with a type before, "
                f"e.g. {name} = i32(0)"
            )
        # A list's elements became variables where it was written, so a second name for it is the same list.
        self.scope.names[name] = self.materialize(value, name) if isinstance(value, tuple) else value

    def block(
        self, statements: list[ast.stmt], run_time: bool, names: dict[str, object] | None = None
    ) -> list[ir.Stmt]:
        outer_body, outer_scope = self.body, self.scope
        self.body, self.scope = [], Scope(outer_scope, run_time)
        self.scope.names.update(names or {})
        self.depth += run_time
        try:
            for statement in statements:
                self.statement(statement)
            return self.body
        finally:
            self.body, self.scope = outer_body, outer_scope
            self.depth -= run_time

    # types
    # ---------------------------------------------------------------------------------------------------------------

    def coerce(self, value: object, type: ir.Type, context: str) -> ir.Expr:
        """The value as `type`: a Python number becomes a constant, a scalar is splat to a vector of its type.

        context: what an error begins with, "{type}" in it for the type."""
        if isinstance(value, ir.Expr):
            if value.type is type:
                return value
            if isinstance(type, ir.Vector) and not isinstance(value.type, ir.Vector):
                return ir.Splat(type, self.coerce(value, type.elem, context))
        elif isinstance(type, ir.Vector):
            return ir.Splat(type, self.number(value, type.elem, context))
        else:
            return self.number(value, type, context)
        if (
            isinstance(type, ir.Scalar)
            and isinstance(value.type, ir.Scalar)
            and type.kind == value.type.kind == "int"
            and value.type.bits < type.bits
        ):
            return ir.Convert(type, value)
        if (
            isinstance(type, ir.Pointer)
            and isinstance(value.type, ir.Pointer)
            and type.elem == value.type.elem
            and type.const
        ):
            return ir.Offset(type, value, ir.Const(ir.I64, 0))
        raise StageError(f"{context.format(type=type)}, got {value.type}; convert it")

    def number(self, value: object, type: ir.Type, context: str) -> ir.Const:
        """A Python number as a constant; context: as coerce() takes it."""
        if isinstance(value, bool) and type is ir.BOOL:
            return ir.Const(type, value)
        if not isinstance(value, int | float) or not isinstance(type, ir.Scalar):
            raise StageError(f"{context.format(type=type)}, got the compile-time value {value!r}")
        if type.kind == "float":
            return ir.Const(type, float(value))
        if isinstance(value, float):
            raise StageError(f"{context.format(type=type)}, {value!r} is not an integer")
        if type.kind in ("int", "uint"):
            signed = type.kind == "int"
            if not 0 <= value + (1 << type.bits - 1 if signed else 0) < 1 << type.bits:
                raise StageError(f"{value} does not fit in {type}")
        return ir.Const(type, int(value))

    def unify(self, left: object, right: object, what: str) -> tuple[ir.Expr, ir.Expr]:
        if not isinstance(left, ir.Expr):
            assert isinstance(right, ir.Expr)  # two compile-time values never come here: Python computes with them
            return self.coerce(left, right.type, f"{what} with {{type}}"), right
        if not isinstance(right, ir.Expr):
            return left, self.coerce(right, left.type, f"{what} with {{type}}")
        a, b = left.type, right.type
        if a is b:
            return left, right
        if isinstance(a, ir.Vector) and not isinstance(b, ir.Vector | ir.Pointer):
            return left, self.coerce(right, a, f"{what} with {{type}}")
        if isinstance(b, ir.Vector) and not isinstance(a, ir.Vector | ir.Pointer):
            return self.coerce(left, b, f"{what} with {{type}}"), right
        if isinstance(a, ir.Scalar) and isinstance(b, ir.Scalar) and a.kind == b.kind == "int":
            wide = a if a.bits >= b.bits else b
            return self.coerce(left, wide, what), self.coerce(right, wide, what)
        raise StageError(f"{what} of {a} and {b}: convert one of them")

    def binary(self, op: str, left: object, right: object) -> ir.Expr:
        if isinstance(left, ir.Expr) and isinstance(left.type, ir.Pointer):
            if op not in ("+", "-"):
                raise StageError(f"{left.type} {op} is not defined")
            narrow = op == "+" and isinstance(right, ir.Expr) and right.type in self.target.offset_types
            index = right if narrow else self.coerce(right, ir.I64, "a pointer offset is an integer")
            if op == "-":
                index = ir.Unary(ir.I64, "-", index)
            return ir.Offset(left.type, left, index)
        left, right = self.unify(left, right, op)
        type = left.type
        if isinstance(type, ir.Mask):
            if op not in "&|^":
                raise StageError(f"{op} on a mask")
            return ir.Binary(type, op, left, right)
        scalar = type.elem if isinstance(type, ir.Vector) else type
        if not isinstance(scalar, ir.Scalar):
            raise StageError(f"{op} on {type}")
        if scalar.bits < 32 and scalar.kind == "float":
            raise StageError(f"no arithmetic on {scalar}: convert to f32 first")
        if op in "%&|^<<>>" and scalar.kind == "float":
            raise StageError(f"{op} on {type}")
        return ir.Binary(type, op, left, right)

    def compare(self, op: str, left: object, right: object) -> ir.Expr:
        left, right = self.unify(left, right, op)
        if isinstance(left.type, ir.Vector):
            return ir.Binary(ir.Mask(left.type.elem.bits, left.type.lanes), op, left, right)
        return ir.Binary(ir.BOOL, op, left, right)

    def condition(self, value: object, what: str) -> ir.Expr:
        value = self.coerce(value, ir.BOOL, f"{what} needs a bool")
        return value

    def convert(self, value: object, to: object) -> ir.Expr:
        """T(value) and convert(value, T)."""
        type = to.ir if isinstance(to, DType | VectorType) else None
        if type is None:
            raise StageError(f"convert needs a type, got {to!r}")
        if not is_runtime(value):
            return self.coerce(value, type, f"{type}()")
        if isinstance(value.type, ir.Vector) and isinstance(type, ir.Scalar):
            type = ir.Vector(type, value.type.lanes)
        if value.type == type:
            return value
        if isinstance(type, ir.Vector):
            if isinstance(value.type, ir.Scalar):
                return ir.Splat(type, self.convert(value, dtype_of(type.elem)))
            if not isinstance(value.type, ir.Vector) or value.type.lanes != type.lanes:
                raise StageError(f"convert {value.type} to {type}: other number of lanes")
        elif not isinstance(value.type, ir.Scalar):
            raise StageError(f"convert {value.type} to {type}")
        return ir.Convert(type, value)

    def compile_time(self, value: object, what: str) -> object:
        if is_runtime(value):
            raise StageError(f"{what} must be known at compile time")
        return value

    def select(self, test: ir.Expr, left: object, right: object) -> ir.Expr:
        if not (is_runtime(left) or is_runtime(right)):
            raise StageError("select of two compile-time numbers: give one of them a type")
        left, right = self.unify(left, right, "select")
        if isinstance(test.type, ir.Mask):
            if (
                not isinstance(left.type, ir.Vector)
                or left.type.lanes != test.type.lanes
                or left.type.elem.bits != test.type.bits
            ):
                raise StageError(f"select of {left.type} by {test.type}")
        else:
            test = self.condition(test, "select")
        return ir.Select(left.type, test, left, right)
