"""The staged front end: runs what is known at compile time, turns the rest of a kernel's AST into IR.

Two kinds of values flow through the interpreter: Python objects (compile time) and `ir.Expr` (run time). A name bound to a run-time
value is a variable of the generated code; a name bound to a Python object exists only here.
"""

import ast
import builtins
import inspect
import operator
import textwrap
from dataclasses import dataclass
from typing import TypeGuard

from zse.errors import CompileError
from zse.kernel import ir, passes
from zse.kernel.intrinsics import EFFECTS, INTRINSICS
from zse.kernel.intrinsics.row import StageError as _Failure
from zse.kernel.language import (
    BUILTINS,
    DTYPES,
    Builtin,
    DType,
    Inline,
    Kernel,
    PointerType,
    StaticIterable,
    TensorMap,
    VectorType,
    _TargetProxy,
    static,
)

EXPR_TYPES = tuple(ir.Expr.__args__)
ARITHMETIC = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "/", ast.Mod: "%", ast.BitAnd: "&",
              ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>"}
PYTHON_OPS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
              ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.BitAnd: operator.and_,
              ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.LShift: operator.lshift, ast.RShift: operator.rshift}
COMPARES = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
PYTHON_COMPARES = {ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
                   ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
                   ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b}
PYTHON_TO_BUILTIN = {builtins.min: "minimum", builtins.max: "maximum", builtins.abs: "absolute"}


# Names that the printed languages or the entry point's own text already use.
RESERVED = frozenset("""args grid first last block block_0 block_1 block_2 next_block auto break case char const continue default do
double else enum extern float for goto if inline int long register restrict return short signed sizeof static struct switch typedef
union unsigned void volatile while asm class new delete template this operator private public namespace using half device kernel
thread threadgroup constant warp main bool true false int4 uint4 float4 min max dim3 threadIdx blockIdx blockDim gridDim""".split())


def is_runtime(value: object) -> TypeGuard[ir.Expr]:
    return isinstance(value, EXPR_TYPES)


class _InlineReturn(Exception):
    def __init__(self, value: object):
        self.value = value


@dataclass
class _Source:
    """A function's AST and where its text stands, for error excerpts."""
    tree: ast.FunctionDef
    path: str
    first_line: int
    lines: list[str]
    indent: int
    assigned: frozenset[str]
    signature: inspect.Signature
    name: str   # the path as error reports of generated code show it


_sources: dict[object, _Source] = {}


def _source_of(function) -> _Source:
    if function not in _sources:
        lines, first = inspect.getsourcelines(function)
        text = "".join(lines)
        tree = ast.parse(textwrap.dedent(text)).body[0]
        assert isinstance(tree, ast.FunctionDef)
        indent = len(lines[0]) - len(lines[0].lstrip())
        assigned = frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        path = (inspect.getsourcefile(function) or "?").replace("\\", "/")
        short = path[path.rfind("/zse/") + 1:] if "/zse/" in path else path.rsplit("/", 1)[-1]
        _sources[function] = _Source(tree, path, first, lines, indent, assigned, inspect.signature(function), short)
    return _sources[function]


def _closure_of(function) -> dict[str, object]:
    """The function's free variables and their values."""
    if not function.__closure__:
        return {}
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__), strict=True))


class _Scope:
    """Names visible in one block. run_time: entering it may happen any number of times when the kernel runs."""

    def __init__(self, parent: "_Scope | None", run_time: bool):
        self.names: dict[str, object] = {}
        self.parent, self.run_time = parent, run_time

    def find(self, name: str) -> tuple["_Scope | None", bool]:
        """The scope that binds the name, and whether a run-time block lies between here and there."""
        scope: _Scope | None = self
        crossed = False
        while scope is not None:
            if name in scope.names:
                return scope, crossed
            crossed = crossed or scope.run_time
            scope = scope.parent
        return None, False


class Stager:
    """Stages one kernel variant for one target."""

    def __init__(self, target):
        self.target = target
        self.body: list[ir.Stmt] = []
        self.counts: dict[str, int] = {}
        self.line = 0
        self.source: _Source
        self.function = None
        self.scope = _Scope(None, False)
        self.depth = 0
        self.loops: list[str] = []
        self.hint = "item"   # the name that a list under construction will have
        self.fresh_results: set[str] = set()   # results of effects that no name is bound to yet

    # names and statements ------------------------------------------------------------------------------------------------

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
            raise _Failure("this call has no value")
        if isinstance(value, ir.Var) and value.name in self.fresh_results:   # nobody else has a name for it: no copy
            self.fresh_results.discard(value.name)
            return value
        var = ir.Var(value.type, self.fresh(hint))
        self.emit(ir.Declare(var, value))
        return var

    def materialize(self, value: object, hint: str) -> object:
        """A run-time value as a variable of its own (so that it is computed once); containers element by element."""
        if isinstance(value, list | tuple):
            return type(value)(self.materialize(item, hint) for item in value)
        if is_runtime(value):
            return self.declare(hint, value)
        return value

    def bind(self, name: str, value: object) -> None:
        scope, crossed = self.scope.find(name)
        old = scope.names[name] if scope else None
        if is_runtime(value):
            if value.type == ir.TENSOR_MAP:
                raise _Failure("a TensorMap is used where it is declared: as a parameter")
            if isinstance(old, ir.Var):
                self.emit(ir.Assign(old, self.coerce(value, old.type, f"{name} is {old.type}")))
                return
            if crossed and old is not None:
                raise _Failure(f"{name} is a compile-time value outside this run-time block; declare it with a type there, "
                               f"e.g. {name} = f32({old!r})")
            self.scope.names[name] = self.declare(name, value)
            return
        if isinstance(old, ir.Var) and isinstance(value, int | float):
            self.emit(ir.Assign(old, self.coerce(value, old.type, f"{name} is {old.type}")))
            return
        if crossed:
            raise _Failure(f"{name} is a compile-time value and changes inside a run-time block; declare it with a type before, "
                           f"e.g. {name} = i32(0)")
        # A list's elements became variables where it was written, so a second name for it is the same list.
        self.scope.names[name] = self.materialize(value, name) if isinstance(value, tuple) else value

    def block(self, statements: list[ast.stmt], run_time: bool, names: dict[str, object] | None = None) -> list[ir.Stmt]:
        outer_body, outer_scope = self.body, self.scope
        self.body, self.scope = [], _Scope(outer_scope, run_time)
        self.scope.names.update(names or {})
        self.depth += run_time
        try:
            for statement in statements:
                self.statement(statement)
            return self.body
        finally:
            self.body, self.scope = outer_body, outer_scope
            self.depth -= run_time

    # types ---------------------------------------------------------------------------------------------------------------

    def coerce(self, value: object, type: ir.Type, context: str) -> ir.Expr:
        """The value as `type`: a Python number becomes a constant, a scalar is splat to a vector of its type."""
        if isinstance(type, ir.Vector) and not (is_runtime(value) and isinstance(value.type, ir.Vector)):
            return ir.Splat(type, self.coerce(value, type.elem, context))
        if not is_runtime(value):
            if isinstance(value, bool) and type == ir.BOOL:
                return ir.Const(type, value)
            if isinstance(value, int | float) and isinstance(type, ir.Scalar):
                if isinstance(value, float) and type.kind != "float":
                    raise _Failure(f"{context}, {value!r} is not an integer")
                if type.kind in ("int", "uint"):
                    low, high = (0, 2**type.bits) if type.kind == "uint" else (-2 ** (type.bits - 1), 2 ** (type.bits - 1))
                    if not low <= value < high:
                        raise _Failure(f"{value} does not fit in {type}")
                return ir.Const(type, float(value) if type.kind == "float" else int(value))
            raise _Failure(f"{context}, got the compile-time value {value!r}")
        if value.type == type:
            return value
        if isinstance(type, ir.Scalar) and isinstance(value.type, ir.Scalar) and type.kind == value.type.kind == "int" \
                and value.type.bits < type.bits:
            return ir.Convert(type, value)
        if isinstance(type, ir.Pointer) and isinstance(value.type, ir.Pointer) and type.elem == value.type.elem and type.const:
            return ir.Offset(type, value, ir.Const(ir.I64, 0))
        raise _Failure(f"{context}, got {value.type}; convert it")

    def unify(self, left: object, right: object, what: str) -> tuple[ir.Expr, ir.Expr]:
        if not is_runtime(left):
            assert is_runtime(right)   # two compile-time values never come here: Python computes with them
            return self.coerce(left, right.type, f"{what} with {right.type}"), right
        if not is_runtime(right):
            return left, self.coerce(right, left.type, f"{what} with {left.type}")
        a, b = left.type, right.type
        if a == b:
            return left, right
        if isinstance(a, ir.Vector) and not isinstance(b, ir.Vector | ir.Pointer):
            return left, self.coerce(right, a, f"{what} with {a}")
        if isinstance(b, ir.Vector) and not isinstance(a, ir.Vector | ir.Pointer):
            return self.coerce(left, b, f"{what} with {b}"), right
        if isinstance(a, ir.Scalar) and isinstance(b, ir.Scalar) and a.kind == b.kind == "int":
            wide = a if a.bits >= b.bits else b
            return self.coerce(left, wide, what), self.coerce(right, wide, what)
        raise _Failure(f"{what} of {a} and {b}: convert one of them")

    def binary(self, op: str, left: object, right: object) -> ir.Expr:
        if is_runtime(left) and isinstance(left.type, ir.Pointer):
            if op not in ("+", "-"):
                raise _Failure(f"{left.type} {op} is not defined")
            narrow = self.target.family != "cpu" and is_runtime(right) and right.type in (ir.I32, ir.U32) and op == "+"
            index = right if narrow else self.coerce(right, ir.I64, "a pointer offset is an integer")
            if op == "-":
                index = ir.Unary(ir.I64, "-", index)
            return ir.Offset(left.type, left, index)
        left, right = self.unify(left, right, op)
        type = left.type
        if isinstance(type, ir.Mask):
            if op not in "&|^":
                raise _Failure(f"{op} on a mask")
            return ir.Binary(type, op, left, right)
        scalar = type.elem if isinstance(type, ir.Vector) else type
        if not isinstance(scalar, ir.Scalar):
            raise _Failure(f"{op} on {type}")
        if scalar.bits < 32 and scalar.kind == "float":
            raise _Failure(f"no arithmetic on {scalar}: convert to f32 first")
        if op in "%&|^<<>>" and scalar.kind == "float":
            raise _Failure(f"{op} on {type}")
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
            raise _Failure(f"convert needs a type, got {to!r}")
        if not is_runtime(value):
            return self.coerce(value, type, f"{type}()")
        if isinstance(value.type, ir.Vector) and isinstance(type, ir.Scalar):
            type = ir.Vector(type, value.type.lanes)
        if value.type == type:
            return value
        if isinstance(type, ir.Vector):
            if isinstance(value.type, ir.Scalar):
                return ir.Splat(type, self.convert(value, _dtype(type.elem)))
            if not isinstance(value.type, ir.Vector) or value.type.lanes != type.lanes:
                raise _Failure(f"convert {value.type} to {type}: other number of lanes")
        elif not isinstance(value.type, ir.Scalar):
            raise _Failure(f"convert {value.type} to {type}")
        return ir.Convert(type, value)

    # expressions ---------------------------------------------------------------------------------------------------------

    def located(self, node: ast.AST, error: Exception) -> CompileError:
        source = self.source
        index = node.lineno - 1
        text = source.lines[index].rstrip("\n") if index < len(source.lines) else ""
        caret = " " * (node.col_offset + source.indent) + "^" * max(1, _width(node))
        return CompileError(f"{source.path}:{source.first_line + index}: {error}\n{text}\n{caret}")

    def expression(self, node: ast.expr) -> object:
        try:
            return getattr(self, f"expr_{type(node).__name__}", self.unknown)(node)
        except (CompileError, _InlineReturn):
            raise
        except Exception as error:   # also what the author's compile-time Python raised
            detail = error if isinstance(error, _Failure) else f"{type(error).__name__}: {error}"
            raise self.located(node, _Failure(detail)) from (None if isinstance(error, _Failure) else error)

    def unknown(self, node: ast.AST):
        raise _Failure(f"{type(node).__name__} is not part of the kernel language")

    def expr_Constant(self, node):
        return node.value

    def expr_Name(self, node):
        scope, _ = self.scope.find(node.id)
        if scope:
            return scope.names[node.id]
        for table in (_closure_of(self.function), self.function.__globals__, vars(builtins)):
            if node.id in table:
                value = table[node.id]
                return self.target if isinstance(value, _TargetProxy) else value
        raise _Failure(f"{node.id} is not defined here (a name first assigned inside a run-time block is local to it)")

    def expr_Attribute(self, node):
        base = self.expression(node.value)
        if is_runtime(base):
            raise _Failure(f"a run-time value has no attribute {node.attr}")
        return getattr(base, node.attr)

    def expr_List(self, node):
        hint = self.hint
        return [self.materialize(self.expression(item), hint) for item in node.elts]

    def expr_Tuple(self, node):
        return tuple(self.expression(item) for item in node.elts)

    def expr_Dict(self, node):
        return {self.expression(key): self.expression(value) for key, value in zip(node.keys, node.values, strict=True)}

    def expr_JoinedStr(self, node):
        return "".join(str(self.expression(part.value)) if isinstance(part, ast.FormattedValue) else part.value
                       for part in node.values)

    def expr_Slice(self, node):
        return slice(*(self.expression(part) if part else None for part in (node.lower, node.upper, node.step)))

    def expr_ListComp(self, node):
        results: list[object] = []
        hint = self.hint

        def run(generators):
            if not generators:
                results.append(self.materialize(self.expression(node.elt), hint))
                return
            head, *rest = generators
            for item in self.static_items(self.expression(head.iter)):
                self.bind_target(head.target, item, fresh=True)
                if all(self.compile_time(self.expression(test), "a comprehension's condition") for test in head.ifs):
                    run(rest)

        outer = self.scope
        self.scope = _Scope(outer, False)
        try:
            run(node.generators)
        finally:
            self.scope = outer
        return results

    def static_items(self, value: object):
        if isinstance(value, StaticIterable):
            value = value.items
        if is_runtime(value):
            raise _Failure("this loop runs at compile time and cannot walk a run-time value")
        return list(value)   # type: ignore[call-overload]

    def compile_time(self, value: object, what: str) -> object:
        if is_runtime(value):
            raise _Failure(f"{what} must be known at compile time")
        return value

    def expr_BinOp(self, node):
        left, right = self.expression(node.left), self.expression(node.right)
        if is_runtime(left) or is_runtime(right):
            if type(node.op) not in ARITHMETIC:
                raise _Failure(f"{type(node.op).__name__} on run-time values")
            return self.binary(ARITHMETIC[type(node.op)], left, right)
        return PYTHON_OPS[type(node.op)](left, right)

    def expr_UnaryOp(self, node):
        value = self.expression(node.operand)
        if not is_runtime(value):
            return {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert,
                    ast.Not: operator.not_}[type(node.op)](value)
        if isinstance(node.op, ast.Not):
            return ir.Unary(ir.BOOL, "!", self.condition(value, "not"))
        return ir.Unary(value.type, {ast.USub: "-", ast.Invert: "~"}[type(node.op)], value)

    def expr_Compare(self, node):
        values = [self.expression(item) for item in (node.left, *node.comparators)]
        result: object = None
        for op, left, right in zip(node.ops, values, values[1:], strict=False):
            if isinstance(op, ast.Is | ast.IsNot):   # `x is None` asks about the compile-time side of a value
                part: object = PYTHON_COMPARES[type(op)](left, right)
            elif is_runtime(left) or is_runtime(right):
                if type(op) not in COMPARES:
                    raise _Failure(f"{type(op).__name__} on run-time values")
                part = self.compare(COMPARES[type(op)], left, right)
            else:
                part = PYTHON_COMPARES[type(op)](left, right)
            result = part if result is None else self.logical("&&", result, part)
        return result

    def logical(self, op: str, left: object, right: object) -> object:
        if not is_runtime(left):
            return right if bool(left) == (op == "&&") else left
        if not is_runtime(right):
            return left if bool(right) == (op == "&&") else right
        return ir.Binary(ir.BOOL, op, self.condition(left, op), self.condition(right, op))

    def expr_BoolOp(self, node):
        op = "&&" if isinstance(node.op, ast.And) else "||"
        result = self.expression(node.values[0])
        for item in node.values[1:]:
            if not is_runtime(result) and bool(result) != (op == "&&"):
                return result
            result = self.logical(op, result, self.lazily(item) if is_runtime(result) else self.expression(item))
        return result

    def expr_IfExp(self, node):
        test = self.expression(node.test)
        if not is_runtime(test):
            return self.expression(node.body if test else node.orelse)
        left, right = self.lazily(node.body), self.lazily(node.orelse)
        return self.select(test, left, right)

    def select(self, test: ir.Expr, left: object, right: object) -> ir.Expr:
        if not (is_runtime(left) or is_runtime(right)):
            raise _Failure("select of two compile-time numbers: give one of them a type")
        left, right = self.unify(left, right, "select")
        if isinstance(test.type, ir.Mask):
            if not isinstance(left.type, ir.Vector) or left.type.lanes != test.type.lanes or left.type.elem.bits != test.type.bits:
                raise _Failure(f"select of {left.type} by {test.type}")
        else:
            test = self.condition(test, "select")
        return ir.Select(left.type, test, left, right)

    def expr_Subscript(self, node):
        base, index = self.expression(node.value), self.expression(node.slice)
        if not is_runtime(base):
            return base[self.compile_time(index, "an index into a compile-time container")]
        if isinstance(base.type, ir.Pointer):
            return ir.Load(base.type.elem, self.binary("+", base, index))
        if isinstance(base.type, ir.Vector):
            lane = self.compile_time(index, "a vector's lane")
            if not 0 <= lane < base.type.lanes:
                raise _Failure(f"lane {lane} of {base.type}")
            return ir.Lane(base.type.elem, base, lane)
        raise _Failure(f"{base.type} cannot be indexed")

    def expr_Call(self, node):
        function = self.expression(node.func)
        args: list[object] = []
        for item in node.args:
            if isinstance(item, ast.Starred):
                args += self.expression(item.value)
            elif isinstance(item, ast.List) and isinstance(function, Builtin):   # variables to change in place: no copies
                args.append([self.expression(part) for part in item.elts])
            else:
                args.append(self.expression(item))
        kwargs = {item.arg: self.expression(item.value) for item in node.keywords}
        runtime = any(is_runtime(value) for value in (*args, *kwargs.values()))
        if isinstance(function, DType | VectorType):
            return self.convert(args[0], function)
        if runtime and isinstance(function, type(min)) and function in PYTHON_TO_BUILTIN:
            return self.builtin(PYTHON_TO_BUILTIN[function], args, kwargs)
        if isinstance(function, Builtin):
            return self.builtin(function.name, args, kwargs)
        if isinstance(function, Inline):
            return self.inline(function, args, kwargs)
        return function(*args, **kwargs)

    # the language's functions --------------------------------------------------------------------------------------------

    def builtin(self, name: str, args: list, kwargs: dict) -> object:
        method = getattr(self, f"call_{name}", None)
        if method:
            return method(*args, **kwargs)
        if name in EFFECTS:
            return self.effect(name, args, kwargs)
        whole = self.target.inline_functions.get(name)
        if whole is not None:
            return self.inline(whole, args, kwargs)
        inline_body = self.target.inline_builtins.get(name)
        if inline_body is not None and is_runtime(args[0]) and isinstance(args[0].type, ir.Vector | ir.Scalar):
            elem = args[0].type.elem if isinstance(args[0].type, ir.Vector) else args[0].type
            if elem.name == "f32":
                return self.inline(inline_body, args, kwargs)
        row = INTRINSICS[name]
        if kwargs:
            raise _Failure(f"{name}() takes no keywords")
        runtime = [value for value in args if is_runtime(value)]
        if row.unify and runtime:
            widest = max((value.type for value in runtime), key=lambda type: isinstance(type, ir.Vector))
            args = [self.coerce(value, widest, f"{name}()") for value in args]
        result = row.signature(*[value.type if is_runtime(value) else value for value in args])
        if isinstance(result, str):
            raise _Failure(f"{name}(): {result}")
        row.body_for(self.target)
        call = ir.Call(result, name, tuple(value if is_runtime(value) else ir.Const(ir.I64, value) for value in args))
        if isinstance(result, ir.Void):
            self.emit(ir.Eval(call))
            return None
        return call

    def effect(self, name: str, args: list, kwargs: dict) -> object:
        """An intrinsic that becomes a statement; its results are variables."""
        row = EFFECTS[name]
        plan = row.plan(self, *args, **kwargs)
        row.body_for(self.target)
        if plan.places:
            self.emit(ir.Invoke(plan.places, name, plan.args, plan.attrs, in_place=True))
            return None
        hint = self.hint if self.hint != "item" else name
        outs = tuple(ir.Var(type, self.fresh(hint)) for type in plan.results)
        self.emit(ir.Invoke(outs, name, plan.args, plan.attrs))
        self.fresh_results |= {out.name for out in outs}
        return None if not outs else outs[0] if len(outs) == 1 else outs

    def lazily(self, node: ast.expr) -> object:
        """An expression that the generated code may skip: it must not have become a statement."""
        count = len(self.body)
        value = self.expression(node)
        if any(isinstance(stmt, ir.Invoke) for stmt in self.body[count:]):
            raise _Failure("an operation with an effect in a part that may be skipped: write an if statement")
        return value

    def grid_index(self, name: str, dimension: object) -> ir.Expr:
        if dimension not in (0, 1, 2):
            raise _Failure(f"{name}(): the grid dimension is 0, 1 or 2")
        INTRINSICS[name].body_for(self.target)
        return ir.Call(ir.I64 if self.target.family == "cpu" else ir.I32, name, (ir.Const(ir.I64, dimension),))

    def call_block_index(self, dimension):
        return self.grid_index("block_index", dimension)

    def call_num_blocks(self, dimension):
        return self.grid_index("num_blocks", dimension)

    def call_shared_array(self, dtype, count, align=16):
        if self.target.family == "cpu":
            raise _Failure("shared_array() on the CPU: a block is one thread, use local_array()")
        if align not in (4, 8, 16, 32, 64, 128, 256, 512, 1024):
            raise _Failure("shared_array(): align is a power of two of 4 to 1024 bytes")
        count = self.compile_time(count, "the size of a shared array")
        var = ir.Var(ir.Pointer(dtype.ir, False, "shared"), self.fresh(self.hint if self.hint != "item" else "shared"))
        self.fresh_results.add(var.name)
        self.emit(ir.SharedArray(var, count, max(align, dtype.bits // 8)))
        return var

    def call_mbarrier_array(self, count):
        return self.call_shared_array(DTYPES["u64"], count, 8)

    def call_smem_desc(self, pointer, swizzle=128, stride=1024, leading=16):
        row = INTRINSICS["smem_desc"]
        result = row.signature(pointer.type if is_runtime(pointer) else pointer, swizzle, stride, leading)
        if isinstance(result, str):
            raise _Failure(f"smem_desc(): {result}")
        row.body_for(self.target)
        return ir.Call(result, "smem_desc", (pointer, *(ir.Const(ir.I32, value) for value in (swizzle, stride, leading))))

    def call_lop3(self, a, b, c, table):
        result = INTRINSICS["lop3"].signature(ir.U32, ir.U32, ir.U32, table)
        if isinstance(result, str):
            raise _Failure(f"lop3(): {result}")
        INTRINSICS["lop3"].body_for(self.target)
        values = tuple(self.coerce(value, ir.U32, "lop3() of u32") for value in (a, b, c))
        return ir.Call(result, "lop3", (*values, ir.Const(ir.I32, table)))

    def call_unroll(self, *args):
        raise _Failure("unroll(range(...), n) stands in a for statement")

    def check_hint(self, hint: object, pointer: ir.Expr) -> str:
        if hint not in ("", "readonly", "stream"):
            raise _Failure('the hint is "readonly" or "stream"')
        return "" if self.target.family == "cpu" or pointer.type.space != "global" else hint

    def call_load(self, pointer, lanes=1, hint=""):
        if not is_runtime(pointer) or not isinstance(pointer.type, ir.Pointer):
            raise _Failure("load needs a pointer")
        elem = pointer.type.elem
        type = elem if lanes == 1 else ir.Vector(elem, self.compile_time(lanes, "the number of lanes"))
        return ir.Load(type, pointer, self.check_hint(hint, pointer))

    def call_store(self, pointer, value, hint=""):
        if not is_runtime(pointer) or not isinstance(pointer.type, ir.Pointer):
            raise _Failure("store needs a pointer")
        if pointer.type.const:
            raise _Failure(f"store through {pointer.type}")
        if not (is_runtime(value) and isinstance(value.type, ir.Vector)):
            value = self.coerce(value, pointer.type.elem, f"store to {pointer.type}")
        elif value.type.elem != pointer.type.elem:
            raise _Failure(f"store of {value.type} to {pointer.type}")
        self.emit(ir.Store(pointer, value, self.check_hint(hint, pointer)))

    def call_local_array(self, dtype, count):
        var = ir.Var(ir.Pointer(dtype.ir, False, "local"), self.fresh("scratch"))
        self.emit(ir.LocalArray(var, self.compile_time(count, "the size of a local array")))
        return var

    def call_cast_ptr(self, pointer, dtype):
        type = pointer.type
        return ir.Bitcast(ir.Pointer(dtype.ir, type.const, type.space), pointer)

    def call_splat(self, value, lanes):
        if not is_runtime(value):
            raise _Failure("splat of a number: write T.x(n)(number)")
        return ir.Splat(ir.Vector(value.type, lanes), value)

    def call_convert(self, value, to):
        return self.convert(value, to)

    def call_bitcast(self, value, to):
        type = to.ir
        if isinstance(value.type, ir.Vector) and isinstance(type, ir.Scalar):
            lanes = value.type.lanes * value.type.elem.bits // type.bits
            type = ir.Vector(type, lanes) if lanes > 1 else type
        if _bits(type) != _bits(value.type):
            raise _Failure(f"bitcast of {value.type} to {type}: other size")
        return ir.Bitcast(type, value)

    def call_where(self, condition, left, right):
        if not is_runtime(condition):
            return left if condition else right
        return self.select(condition, left, right)

    def inline(self, function: Inline, args: list, kwargs: dict) -> object:
        code = function.function
        outer = (self.source, self.function, self.scope, self.line)
        self.source, self.function = _source_of(code), code
        signature = self.source.signature.bind(*args, **kwargs)
        signature.apply_defaults()
        self.scope = _Scope(None, False)
        for name, value in signature.arguments.items():
            # A variable passed in is copied only if the function assigns to it; constants and variables are used as they are.
            simple = isinstance(value, ir.Const) or (isinstance(value, ir.Var) and name not in self.source.assigned)
            self.scope.names[name] = value if simple or not is_runtime(value) else self.declare(name, value)
        depth = self.depth
        try:
            self.depth = 0
            for statement in self.source.tree.body:
                self.statement(statement)
        except _InlineReturn as result:
            return result.value
        finally:
            self.source, self.function, self.scope, self.line = outer
            self.depth = depth
        return None

    # statements ----------------------------------------------------------------------------------------------------------

    def statement(self, node: ast.stmt) -> None:
        self.hint = "item"
        self.line = self.source.first_line + node.lineno - 1
        try:
            getattr(self, f"stmt_{type(node).__name__}", self.unknown)(node)
        except (CompileError, _InlineReturn):
            raise
        except _Failure as error:
            raise self.located(node, error) from None

    def stmt_Pass(self, node):
        pass

    def stmt_Expr(self, node):
        if not isinstance(node.value, ast.Constant):   # a docstring
            self.expression(node.value)

    def stmt_Assert(self, node):
        if not self.compile_time(self.expression(node.test), "assert"):
            raise _Failure(f"assertion failed: {self.expression(node.msg) if node.msg else ast.unparse(node.test)}")

    def stmt_Assign(self, node):
        self.hint = node.targets[0].id if isinstance(node.targets[0], ast.Name) else "item"
        value = self.expression(node.value)
        if len(node.targets) > 1:
            value = self.materialize(value, "value")
        for target in node.targets:
            self.bind_target(target, value)

    def stmt_AnnAssign(self, node):
        dtype = self.expression(node.annotation)
        self.bind_target(node.target, self.convert(self.expression(node.value), dtype))

    def stmt_AugAssign(self, node):
        load = ast.copy_location(type(node.target)(**{**vars(node.target), "ctx": ast.Load()}), node.target)
        self.bind_target(node.target, self.expression(ast.copy_location(ast.BinOp(load, node.op, node.value), node)))

    def bind_target(self, target: ast.expr, value: object, fresh: bool = False) -> None:
        if isinstance(target, ast.Name):
            if fresh:
                self.scope.names[target.id] = value
            else:
                self.bind(target.id, value)
        elif isinstance(target, ast.Tuple | ast.List):
            if is_runtime(value):
                raise _Failure("a run-time value cannot be unpacked")
            items = list(value)   # type: ignore[call-overload]
            if not fresh and len(items) > 1:   # a, b = b, a
                items = [self.materialize(item, "value") if is_runtime(item) else item for item in items]
            for part, item in zip(target.elts, items, strict=True):
                self.bind_target(part, item, fresh)
        elif isinstance(target, ast.Subscript):
            base, index = self.expression(target.value), self.expression(target.slice)
            if is_runtime(base):
                self.call_store(self.binary("+", base, index), value)
                return
            index = self.compile_time(index, "an index into a compile-time container")
            old = base[index] if isinstance(base, list) or index in base else None
            if isinstance(old, ir.Var):
                self.emit(ir.Assign(old, self.coerce(value, old.type, f"this element is {old.type}")))
            elif self.depth and not is_runtime(value):
                raise _Failure("a compile-time container changes inside a run-time block")
            else:
                base[index] = self.materialize(value, "item")
        else:
            raise _Failure(f"cannot assign to {ast.unparse(target)}")

    def stmt_If(self, node):
        test = self.expression(node.test)
        if not is_runtime(test):
            for statement in node.body if test else node.orelse:
                self.statement(statement)
            return
        test = self.condition(test, "if")
        line = self.line
        then = self.block(node.body, True)
        otherwise = self.block(node.orelse, True)
        self.line = line
        self.emit(ir.If(test, then, otherwise))

    def stmt_While(self, node):
        if node.orelse:
            raise _Failure("while ... else is not part of the kernel language")
        outer, self.body = self.body, []
        try:   # what the condition needs computed first is computed before every test
            test = self.condition(self.expression(node.test), "while")
            prepare = self.body
        finally:
            self.body = outer
        line = self.line
        self.loops.append("run-time")
        body = self.block(node.body, True)
        self.loops.pop()
        self.line = line
        self.emit(ir.While(test, body, prepare))

    def stmt_For(self, node):
        if node.orelse:
            raise _Failure("for ... else is not part of the kernel language")
        call, unroll = node.iter, None
        if isinstance(call, ast.Call) and self.expression(call.func) == BUILTINS["unroll"]:
            unroll = self.compile_time(self.expression(call.args[1]), "the unroll count") if len(call.args) > 1 else 0
            if not isinstance(unroll, int) or unroll < 0:
                raise _Failure("the unroll count is a number: 0 all of it, 1 not at all")
            call = call.args[0]
            if not isinstance(call, ast.Call) or self.expression(call.func) is not range:
                raise _Failure("unroll(range(...), n): a run-time loop")
        if isinstance(call, ast.Call) and self.expression(call.func) is range:
            self.runtime_loop(node, [self.expression(item) for item in call.args], unroll)
            return
        self.loops.append("static")
        for item in self.static_items(self.expression(node.iter)):
            self.bind_target(node.target, item, fresh=True)   # names live on after the loop, as in Python
            for statement in node.body:
                self.statement(statement)
        self.loops.pop()

    def runtime_loop(self, node, bounds, unroll):
        if not isinstance(node.target, ast.Name):
            raise _Failure("a run-time loop has one loop variable")
        start, stop, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
        types = [value.type for value in (start, stop, step) if is_runtime(value)]
        wide = max(types, key=lambda type: type.bits, default=ir.I64 if self.target.family == "cpu" else ir.I32)
        if not isinstance(wide, ir.Scalar) or wide.kind not in ("int", "uint"):
            raise _Failure(f"range() of {wide}")
        if not is_runtime(step) and step <= 0:
            raise _Failure("a run-time loop counts up")
        start, stop, step = (self.coerce(value, wide, f"range() counts in {wide}") for value in (start, stop, step))
        stop = stop if isinstance(stop, ir.Const | ir.Var) else self.declare(f"{node.target.id}_stop", stop)
        var = ir.Var(wide, self.fresh(node.target.id))
        line = self.line
        self.loops.append("run-time")
        body = self.block(node.body, True, {node.target.id: var})
        self.loops.pop()
        self.line = line
        self.emit(ir.For(var, start, stop, step, body, unroll))

    def stmt_Break(self, node):
        self.leave_loop(ir.Break())

    def stmt_Continue(self, node):
        self.leave_loop(ir.Continue())

    def leave_loop(self, stmt: ir.Stmt) -> None:
        if not self.loops or self.loops[-1] == "static":
            raise _Failure("break and continue belong to a run-time loop, not to an unrolled one")
        self.emit(stmt)

    def stmt_Return(self, node):
        if self.scope_is_inline():
            if self.depth:
                raise _Failure("return inside a run-time block of an @inline function")
            raise _InlineReturn(self.expression(node.value) if node.value else None)
        if node.value:
            raise _Failure("a kernel returns nothing")
        self.emit(ir.Return())

    def scope_is_inline(self) -> bool:
        return self.function is not self.kernel_function

    def run(self, kernel: Kernel, statics: dict[str, object], symbol: str) -> ir.Function:
        self.source, self.function = _source_of(kernel.function), kernel.function
        self.kernel_function = kernel.function
        unbound = set(kernel.static_names()) ^ set(statics)
        if unbound:
            raise CompileError(f"kernel {kernel.name}: statics {sorted(unbound)} are missing or unknown")
        params = []
        for name, annotation in kernel.params:
            if annotation is static:
                self.scope.names[name] = statics[name]
                continue
            if annotation is TensorMap:
                self.scope.names[name] = var = ir.Var(ir.TENSOR_MAP, self.fresh(name))
                params.append(var)
                continue
            if not isinstance(annotation, DType | PointerType):
                raise CompileError(f"kernel {kernel.name}: parameter {name} has no usable type ({annotation!r})")
            type = annotation.ir if isinstance(annotation, DType) else annotation.resolve(statics)
            var = ir.Var(type, self.fresh(name))
            self.scope.names[name] = var
            params.append(var)
        for statement in self.source.tree.body:
            self.statement(statement)
        shown = ", ".join(f"{name}={value}" for name, value in statics.items())
        origin = f"{self.source.name}:{self.source.first_line} {kernel.name}({shown})"
        return ir.Function(symbol, params, self.body, origin)


def _width(node: ast.AST) -> int:
    return node.end_col_offset - node.col_offset if node.end_lineno == node.lineno else 1


def _bits(type: ir.Type) -> int:
    return type.elem.bits * type.lanes if isinstance(type, ir.Vector) else type.bits


def _dtype(type: ir.Scalar) -> DType:
    return DType(type.name, type.kind, type.bits)


def stage(kernel: Kernel, statics: dict[str, object], symbol: str, target) -> ir.Function:
    """Compile a kernel variant to verified IR. Raises CompileError with the author's line and a caret."""
    function = Stager(target).run(kernel, statics, symbol)
    ir.verify(function)
    function = passes.run(function)
    ir.verify(function)
    return function
