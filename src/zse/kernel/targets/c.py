"""What all targets print alike: C. A target is a subclass of CTarget: a table of class fields, and the few methods
whose text differs.

Operator precedence is never relied on: every operation is printed in parentheses.
"""

from typing import ClassVar

import zse.kernel.ir as ir
from zse.kernel.intrinsics import INTRINSICS


def mask_vector(type: ir.Type) -> ir.Type:
    """A mask as the vector of -1 and 0 that it is when printed."""
    return ir.Vector(ir.Scalar(f"i{type.bits}", "int", type.bits), type.lanes) if isinstance(type, ir.Mask) else type


def is_small_integer(type: ir.Type) -> bool:
    """Whether C computes with it as with an int, so that the result is to be made small again."""
    return isinstance(type, ir.Scalar) and type.kind in ("int", "uint") and type.bits < 32


class CTarget:
    """Prints IR as C. Types and helper functions appear in order of first use."""

    kernels = ""  # "cpu" or "gpu", as runtime/device.py: Device.kernels
    families: tuple[str, ...] = ()  # whose texts of an intrinsic it takes, the first one that there is
    own: ClassVar[dict] = {}  # intrinsic → text, before those of the tables in kernel/intrinsics
    inline_builtins: dict = {}  # f32 functions that are staged from mathlib.py
    inline_functions: ClassVar[dict] = {}  # functions that are staged whole
    name = ""
    arch = 0
    features: frozenset[str] = frozenset()
    lanes = 1  # f32 values of a register
    warp = threads = 1
    shared_limit = 0  # bytes of shared memory that a block can have
    index_type: ir.Scalar = ir.I64  # of block_index() and of loops that count from a number to a number
    offset_types: tuple[ir.Scalar, ...] = ()  # integers that are added to a pointer without becoming i64
    takes_hints = False  # of loads and stores
    unrolls = False  # prints the unroll count of a loop
    leave = "return;"
    device = "static inline"  # in front of helper functions

    def __init__(self) -> None:
        self.types: dict[str, str] = {}
        self.helpers: dict[str, str] = {}
        self.bodies: dict[str, object] = {}  # of intrinsics, by name, as Spelled.body_for() found them

    def has(self, feature: str) -> bool:
        return feature in self.features

    def c_type(self, type: ir.Type) -> str:
        raise NotImplementedError

    def helper(self, name: str, result: str, params: str, body: str) -> str:
        """The name of a helper function, which is defined once."""
        full = f"zse_{name}"
        if full not in self.helpers:
            self.helpers[full] = f"{self.device} {result} {full}({params}) {{ {body} }}"
        return full

    def call(self, name: str, result: str, params: str, body: str, args: list[str]) -> str:
        """A call of a helper function."""
        return f"{self.helper(name, result, params, body)}({', '.join(args)})"

    # expressions
    # ---------------------------------------------------------------------------------------------------------

    def expr(self, expr: ir.Expr) -> str:
        return getattr(self, expr.printer)(expr)

    def expr_Const(self, expr: ir.Const) -> str:
        return self.constant(expr.type, expr.value)

    def expr_Var(self, expr: ir.Var) -> str:
        return expr.name

    def expr_Binary(self, expr: ir.Binary) -> str:
        text = f"({self.expr(expr.left)} {expr.op} {self.expr(expr.right)})"
        cast = is_small_integer(expr.type) or isinstance(expr.type, ir.Mask)
        return f"(({self.c_type(expr.type)}){text})" if cast else text

    def expr_Unary(self, expr: ir.Unary) -> str:
        return f"({expr.op}{self.expr(expr.operand)})"

    def expr_Convert(self, expr: ir.Convert) -> str:
        return self.convert(expr.type, expr.operand.type, self.expr(expr.operand))

    def expr_Bitcast(self, expr: ir.Bitcast) -> str:
        return self.bitcast(expr.type, expr.operand.type, self.expr(expr.operand))

    def expr_Lane(self, expr: ir.Lane) -> str:
        return self.lane_text(self.expr(expr.operand), expr.operand.type, expr.index)

    def expr_Offset(self, expr: ir.Offset) -> str:
        base = self.expr(expr.pointer)
        here = isinstance(expr.index, ir.Const) and expr.index.value == 0
        return base if here else f"({base} + {self.expr(expr.index)})"

    def expr_Call(self, expr: ir.Call) -> str:
        body = INTRINSICS[expr.intrinsic].body_for(self)
        args = [self.expr(arg) for arg in expr.args]
        return body.format(*args) if isinstance(body, str) else body(self, expr.type, [a.type for a in expr.args], args)

    def constant(self, type: ir.Type, value: object) -> str:
        raise NotImplementedError

    def convert(self, type: ir.Type, source: ir.Type, text: str) -> str:
        """A numeric conversion."""
        raise NotImplementedError

    def bitcast(self, type: ir.Type, source: ir.Type, text: str) -> str:
        raise NotImplementedError

    def lane_text(self, text: str, type: ir.Type, lane: int) -> str:
        """One element of the vector that `text` names."""
        raise NotImplementedError

    # statements
    # ----------------------------------------------------------------------------------------------------------

    def declared(self, var: ir.Var) -> str:
        """The variable with its type in front."""
        return f"{self.c_type(var.type)} {var.name}"

    def statements(self, body: list[ir.Stmt], indent: str) -> list[str]:
        return [line for stmt in body for line in self.statement(stmt, indent)]

    def statement(self, stmt: ir.Stmt, indent: str) -> list[str]:
        return getattr(self, stmt.printer)(stmt, indent)

    def stmt_Declare(self, stmt: ir.Declare, indent: str) -> list[str]:
        return [f"{indent}{self.declared(stmt.var)} = {self.expr(stmt.value)};"]

    def stmt_Assign(self, stmt: ir.Assign, indent: str) -> list[str]:
        return [f"{indent}{stmt.var.name} = {self.expr(stmt.value)};"]

    def stmt_Store(self, stmt: ir.Store, indent: str) -> list[str]:
        return [f"{indent}{self.store(stmt)};"]

    def stmt_LocalArray(self, stmt: ir.LocalArray, indent: str) -> list[str]:
        return [f"{indent}{self.local_array(stmt.var.type.elem, stmt.var.name, stmt.count)};"]

    def stmt_Eval(self, stmt: ir.Eval, indent: str) -> list[str]:
        return [f"{indent}{self.expr(stmt.value)};"]

    def stmt_For(self, stmt: ir.For, indent: str) -> list[str]:
        name = stmt.var.name
        head = (
            f"for ({self.declared(stmt.var)} = {self.expr(stmt.start)}; {name} < {self.expr(stmt.stop)}; "
            f"{name} += {self.expr(stmt.step)}) {{"
        )
        count = f" {stmt.unroll}" if stmt.unroll else ""
        unroll = [f"{indent}#pragma unroll{count}"] if self.unrolls and stmt.unroll is not None else []
        return [*unroll, indent + head, *self.statements(stmt.body, indent + "  "), indent + "}"]

    def stmt_While(self, stmt: ir.While, indent: str) -> list[str]:
        inner = indent + "  "
        if not stmt.prepare:
            head = [f"{indent}while ({self.expr(stmt.condition)}) {{"]
        else:
            prepare = self.statements(stmt.prepare, inner)
            head = [f"{indent}while (true) {{", *prepare, f"{inner}if (!{self.expr(stmt.condition)}) break;"]
        return [*head, *self.statements(stmt.body, inner), indent + "}"]

    def stmt_If(self, stmt: ir.If, indent: str) -> list[str]:
        lines = [f"{indent}if ({self.expr(stmt.condition)}) {{", *self.statements(stmt.then, indent + "  ")]
        if stmt.otherwise:
            lines += [indent + "} else {", *self.statements(stmt.otherwise, indent + "  ")]
        return [*lines, indent + "}"]

    def stmt_Break(self, stmt: ir.Break, indent: str) -> list[str]:
        return [indent + "break;"]

    def stmt_Continue(self, stmt: ir.Continue, indent: str) -> list[str]:
        return [indent + "continue;"]

    def stmt_Return(self, stmt: ir.Return, indent: str) -> list[str]:
        return [indent + self.leave]

    def store(self, stmt: ir.Store) -> str:
        raise NotImplementedError

    def local_array(self, elem: ir.Scalar, name: str, count: int) -> str:
        raise NotImplementedError
