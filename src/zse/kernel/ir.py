"""Typed intermediate representation of a kernel, and its verifier.

Expressions are trees without side effects (loads included); everything that changes state is a statement. A target
prints this and nothing else: whatever Python did at compile time is gone by now.

A look-up in a module that came lazily costs 1 µs, and generating a level's C makes 6 million of them: the compiler's
files say `import zse.kernel.ir as ir`."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, dataclass_transform

from zse.errors import CompileError


class OneEach(type):
    """Types of which there is one object of each value: equal ones are the same, so that `is` and a dictionary's look-up compare them.
    A level's kernels ask for half a million."""

    def __init__(cls, *args: Any) -> None:
        super().__init__(*args)
        cls._made: dict[tuple, Any] = {}

    def __call__(cls, *args: Any, **named: Any) -> Any:
        found = None if named else cls._made.get(args)
        if found is None:
            found = super().__call__(*args, **named)
            found = cls._made.setdefault(tuple(vars(found).values()), found)
            if not named:
                cls._made[args] = found  # as it was asked for, without what has a default
        return found


@dataclass(frozen=True, eq=False)
class Scalar(metaclass=OneEach):
    """A scalar type. kind: "int", "uint", "float", "bool", or "opaque" (a parameter that only intrinsics read); bits:
    its size."""

    name: str
    kind: str
    bits: int

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Vector(metaclass=OneEach):
    """`lanes` elements of one scalar type in a register."""

    elem: Scalar
    lanes: int

    def __str__(self) -> str:
        return f"{self.elem}x{self.lanes}"


@dataclass(frozen=True, eq=False)
class Mask(metaclass=OneEach):
    """The result of comparing two vectors: per lane all ones or all zeros, as wide as the compared elements."""

    bits: int
    lanes: int

    def __str__(self) -> str:
        return f"mask{self.bits}x{self.lanes}"


@dataclass(frozen=True, eq=False)
class Pointer(metaclass=OneEach):
    """An address of elements. space: "global", "local" (scratch of the block) or "shared" (GPU targets)."""

    elem: Scalar
    const: bool = False
    space: str = "global"

    def __str__(self) -> str:
        return f"Ptr[{self.elem}{', const' if self.const else ''}]"


@dataclass(frozen=True, eq=False)
class Void(metaclass=OneEach):
    def __str__(self) -> str:
        return "void"


Type = Scalar | Vector | Mask | Pointer | Void
VOID = Void()
BOOL = Scalar("bool_", "bool", 8)
I32 = Scalar("i32", "int", 32)
I64 = Scalar("i64", "int", 64)
U32 = Scalar("u32", "uint", 32)
U64 = Scalar("u64", "uint", 64)
F32 = Scalar("f32", "float", 32)
COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
TENSOR_MAP = Scalar("tensormap", "opaque", 1024)


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple]:
    """What gives the fields of these names."""
    if len(names) != 1:
        return attrgetter(*names) if names else lambda expr: ()
    get = attrgetter(*names)
    return lambda expr: (get(expr),)


@dataclass_transform()
@dataclass(unsafe_hash=True)
class Expr:
    """An expression; subclasses are dataclasses. inner: gives the fields that are expressions. printer: the printers'
    method for it. It is not changed once it is made; frozen=True, which would say so, takes a seventh of the time of a
    level's C."""

    type: Type
    inner: ClassVar[Any]
    printer: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        cls.printer = f"expr_{cls.__name__}"
        fields = [name for name, kind in cls.__annotations__.items() if kind is Expr]
        cls.inner = staticmethod(attrgetter("args") if "args" in cls.__annotations__ else _getter(tuple(fields)))
        dataclass(unsafe_hash=True)(cls)


class Const(Expr):
    value: int | float | bool


class Var(Expr):
    name: str


class Binary(Expr):
    """op: + - * / % & | ^ << >> (arithmetic) or == != < <= > >= (type is bool or Mask) or && || (bool)."""

    op: str
    left: Expr
    right: Expr


class Unary(Expr):
    """op: - ~ !"""

    op: str
    operand: Expr


class Select(Expr):
    """condition ? left : right; a Mask condition selects lane by lane."""

    condition: Expr
    left: Expr
    right: Expr


class Convert(Expr):
    """Numeric conversion, lane-wise; f32 → integer truncates."""

    operand: Expr


class Bitcast(Expr):
    operand: Expr


class Splat(Expr):
    type: Vector
    operand: Expr


class Lane(Expr):
    """One element of a vector, at a compile-time index."""

    type: Scalar
    operand: Expr
    index: int


class Offset(Expr):
    """pointer + index elements."""

    type: Pointer
    pointer: Expr
    index: Expr


class Load(Expr):
    """A scalar, or a vector of consecutive elements. CPU: no alignment requirement; GPU: natural alignment up to 16
    bytes. hint: "" | "readonly" | "stream", global memory only."""

    pointer: Expr
    hint: str = ""


class Call(Expr):
    """An intrinsic: a row of the tables in kernel/intrinsics."""

    intrinsic: str
    args: tuple[Expr, ...]


@dataclass_transform(field_specifiers=(field,))
@dataclass
class Stmt:
    """A statement; subclasses are dataclasses. line, path: its place in its author's source, the file as the package
    names it. operands: gives the fields that are expressions; blocks: names of those that are lists of statements; printer: as
    Expr's."""

    line: int = field(default=0, kw_only=True)
    path: str = field(default="", kw_only=True)
    operands: ClassVar[Any]
    printer: ClassVar[str] = ""
    blocks: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls.printer = f"stmt_{cls.__name__}"
        cls.operands = staticmethod(_getter(tuple(name for name, kind in cls.__annotations__.items() if kind is Expr)))
        cls.blocks = tuple(name for name, kind in cls.__annotations__.items() if kind == list[Stmt])
        dataclass(cls)


class Declare(Stmt):
    var: Var
    value: Expr


class Assign(Stmt):
    var: Var
    value: Expr


class Store(Stmt):
    """hint: "" | "stream"."""

    pointer: Expr
    value: Expr
    hint: str = ""


class LocalArray(Stmt):
    """64-byte aligned scratch of the block; var has a Pointer type of space local or shared."""

    var: Var
    count: int


class SharedArray(Stmt):
    """Memory of the whole block (GPU targets): count elements at an address that is a multiple of align bytes."""

    var: Var
    count: int
    align: int


class Eval(Stmt):
    """A call for its effect (prefetch, barrier)."""

    value: Expr


class Invoke(Stmt):
    """An intrinsic with an effect, several results or results in place: a row of the effect tables in
    kernel/intrinsics.

    outs: variables that it writes; in_place: they exist and are read too, otherwise this statement declares them.
    attrs: compile-time arguments."""

    outs: tuple[Var, ...]
    intrinsic: str
    args: tuple[Expr, ...]
    attrs: tuple[object, ...] = ()
    in_place: bool = False


class For(Stmt):
    """for (var = start; var < stop; var += step); step is positive. unroll: how often to repeat the body (0: all of
    it), or None: the compiler decides."""

    var: Var
    start: Expr
    stop: Expr
    step: Expr
    body: list[Stmt] = field(default_factory=list)
    unroll: int | None = None


class While(Stmt):
    """prepare: statements that run before each test of the condition."""

    condition: Expr
    body: list[Stmt] = field(default_factory=list)
    prepare: list[Stmt] = field(default_factory=list)


class If(Stmt):
    condition: Expr
    then: list[Stmt] = field(default_factory=list)
    otherwise: list[Stmt] = field(default_factory=list)


class Break(Stmt):
    pass


class Continue(Stmt):
    pass


class Return(Stmt):
    """Ends the block's work."""


@dataclass
class Function:
    """One compiled variant. params: in order, with their types; origin: "file:line name(statics)"."""

    symbol: str
    params: list[Var]
    body: list[Stmt]
    origin: str


def children(expr: Expr) -> Sequence[Expr]:
    """The operands of an expression."""
    return expr.inner(expr)


def blocks(stmt: Stmt) -> list[list[Stmt]]:
    """The statement lists inside a statement."""
    return [getattr(stmt, name) for name in stmt.blocks] if stmt.blocks else []


def expressions(stmt: Stmt) -> Sequence[Expr]:
    """The expressions a statement evaluates itself (not those of its inner blocks)."""
    if isinstance(stmt, Invoke):
        return (*stmt.args, *stmt.outs) if stmt.in_place else stmt.args
    return stmt.operands(stmt)


def _wrong_binary(expr: Binary) -> str | None:
    a, b, type, op = expr.left.type, expr.right.type, expr.type, expr.op
    if a is not b and op not in ("<<", ">>"):
        return f"{a} {op} {b}"
    if op not in COMPARISONS:
        return None if type is a else f"{op} of {a} gives {type}"
    return f"comparison of {a} gives {type}" if isinstance(a, Vector) != isinstance(type, Mask) else None


def _wrong_select(expr: Select) -> str | None:
    a, b = expr.left.type, expr.right.type
    return None if a == b == expr.type else f"select of {a} and {b} gives {expr.type}"


def _wrong_load(expr: Load) -> str | None:
    pointer, elem = expr.pointer.type, expr.type.elem if isinstance(expr.type, Vector) else expr.type
    is_right = isinstance(pointer, Pointer) and pointer.elem == elem
    return None if is_right else f"load of {expr.type} from {pointer}"


def _wrong_splat(expr: Splat) -> str | None:
    return None if expr.operand.type == expr.type.elem else f"splat of {expr.operand.type} to {expr.type}"


# What is wrong with the types of an expression, or None.
CHECKS: dict[type, Callable[[Any], str | None]] = {
    Binary: _wrong_binary,
    Select: _wrong_select,
    Load: _wrong_load,
    Splat: _wrong_splat,
}


def verify(function: Function) -> Counter[str]:
    """Check that every variable is declared before use in an enclosing block, once, and that all types agree; how often
    each is read. Raises CompileError: a failure here is a bug of the front end, not of the kernel's author."""
    names: set[str] = set()
    reads: dict[str, int] = defaultdict(int)  # a Counter takes twice as long to count one at a time

    def fail(line: int, reason: str) -> None:
        raise CompileError(f"{function.origin}: IR of {function.symbol}, line {line}: {reason}")

    def check_expr(expr: Expr, scope: dict[str, Type], line: int) -> None:
        kind = type(expr)  # half a million of them in a level's kernels: no patterns
        if kind is Const:
            return
        if type(expr) is Var:
            name, declared = expr.name, scope.get(expr.name)
            reads[name] += 1
            if declared is not expr.type:
                fail(line, f"{name} is used as {expr.type} but is {declared or 'not declared here'}")
            return
        for child in expr.inner(expr):
            check_expr(child, scope, line)
        check = CHECKS.get(kind)
        if check and (wrong := check(expr)):
            fail(line, wrong)

    def declare(var: Var, scope: dict[str, Type], line: int) -> None:
        if var.name in names:
            fail(line, f"{var.name} is declared twice")
        names.add(var.name)
        scope[var.name] = var.type

    def check_block(body: list[Stmt], scope: dict[str, Type], in_loop: bool) -> None:
        scope = dict(scope)
        for stmt in body:
            if isinstance(stmt, While):  # its condition may read what `prepare` declares
                check_block([*stmt.prepare, Eval(stmt.condition, line=stmt.line)], scope, False)
                check_block(stmt.body, scope, True)
                continue
            for expr in expressions(stmt):
                check_expr(expr, scope, stmt.line)
            inner, kind = scope, type(stmt)
            if isinstance(stmt, Declare | Assign):
                var = stmt.var
                if var.type is not stmt.value.type:
                    fail(stmt.line, f"{var.name}: {var.type} = {stmt.value.type}")
                if kind is Declare:
                    declare(var, scope, stmt.line)
                elif scope.get(var.name) is not var.type:
                    fail(stmt.line, f"{var.name} is assigned before it is declared")
            elif isinstance(stmt, Store):
                pointer, value = stmt.pointer.type, stmt.value.type
                elem = value.elem if isinstance(value, Vector) else value
                if not isinstance(pointer, Pointer) or pointer.elem is not elem or pointer.const:
                    fail(stmt.line, f"store of {value} to {pointer}")
            elif isinstance(stmt, LocalArray | SharedArray):
                declare(stmt.var, scope, stmt.line)
            elif isinstance(stmt, Invoke):
                for var in () if stmt.in_place else stmt.outs:
                    declare(var, scope, stmt.line)
            elif isinstance(stmt, For):
                inner = dict(scope)
                declare(stmt.var, inner, stmt.line)
            elif kind is Break or kind is Continue:
                if not in_loop:
                    fail(stmt.line, "break or continue outside a run-time loop")
            for name in stmt.blocks:
                check_block(getattr(stmt, name), inner, in_loop or kind is For)

    check_block(function.body, {param.name: param.type for param in function.params}, False)
    return Counter(reads)
