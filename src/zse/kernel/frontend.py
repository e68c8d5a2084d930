"""The staged front end: runs what is known at compile time, turns the rest of a kernel's AST into IR.

Two kinds of values flow through the interpreter: Python objects (compile time) and `ir.Expr` (run time). A name bound
to a run-time value is a variable of the generated code; a name bound to a Python object exists only here."""

import ast
import builtins
import operator
from collections import defaultdict
from collections.abc import Callable

import zse.kernel.ir as ir
from zse.errors import CompileError
from zse.kernel.calls import Calls, InlineReturn
from zse.kernel.dead import remove_dead_variables
from zse.kernel.intrinsics.row import StageError
from zse.kernel.language import (
    BUILTINS,
    Builtin,
    DType,
    Inline,
    Kernel,
    PointerType,
    StaticIterable,
    TensorMap,
    VectorType,
    _TargetProxy,
    index,
    static,
)
from zse.kernel.source import Scope, closure_of, innermost, source_of
from zse.kernel.values import is_runtime

# How Python's AST calls an operator → the operator of the IR, or None, and what computes it at compile time.
ARITHMETIC: dict[type, tuple[str | None, Callable]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("/", operator.floordiv),
    ast.Mod: ("%", operator.mod),
    ast.Pow: (None, operator.pow),
    ast.MatMult: (None, operator.matmul),
    ast.BitAnd: ("&", operator.and_),
    ast.BitOr: ("|", operator.or_),
    ast.BitXor: ("^", operator.xor),
    ast.LShift: ("<<", operator.lshift),
    ast.RShift: (">>", operator.rshift),
}
UNARY: dict[type, tuple[str | None, Callable]] = {
    ast.USub: ("-", operator.neg),
    ast.UAdd: (None, operator.pos),
    ast.Invert: ("~", operator.invert),
    ast.Not: ("!", operator.not_),
}
COMPARES: dict[type, tuple[str | None, Callable]] = {
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
    ast.Is: (None, operator.is_),
    ast.IsNot: (None, operator.is_not),
    ast.In: (None, lambda a, b: a in b),
    ast.NotIn: (None, lambda a, b: a not in b),
}
BUILTIN_NAMES = vars(builtins)
AUGMENTED: dict[ast.AugAssign, ast.BinOp] = {}  # `a += b` → `a + b`
PYTHON_TO_BUILTIN = {builtins.min: "minimum", builtins.max: "maximum", builtins.abs: "absolute"}


class Stager(Calls):
    """Stages one kernel variant for one target: the AST of a kernel, statement by statement."""

    # expressions
    # ---------------------------------------------------------------------------------------------------------

    def expression(self, node: ast.expr) -> object:
        return EXPRESSIONS[type(node)](self, node)

    def unknown(self, node: ast.AST):
        raise StageError(f"{type(node).__name__} is not part of the kernel language")

    def expr_Constant(self, node):
        return node.value

    def expr_Name(self, node):
        name: str = node.id
        scope: Scope | None = self.scope
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        function = self.function
        for table in (closure_of(function) if function.__closure__ else {}, function.__globals__, BUILTIN_NAMES):
            if name in table:
                return self.of_target(table[name])
        raise StageError(
            f"{node.id} is not defined here (a name first assigned inside a run-time block is local to it)"
        )

    def of_target(self, value: object) -> object:
        """The target in place of what stands for it."""
        return self.target if isinstance(value, _TargetProxy) else value

    def expr_Attribute(self, node):
        base = self.expression(node.value)
        if isinstance(base, ir.Expr):
            raise StageError(f"a run-time value has no attribute {node.attr}")
        value = getattr(base, node.attr)
        return self.target if isinstance(value, _TargetProxy) else value

    def expr_List(self, node):
        hint = self.hint
        return [self.materialize(self.expression(item), hint) for item in node.elts]

    def expr_Tuple(self, node):
        return tuple(self.expression(item) for item in node.elts)

    def expr_Dict(self, node):
        return {self.expression(key): self.expression(value) for key, value in zip(node.keys, node.values, strict=True)}

    def expr_JoinedStr(self, node):
        return "".join(
            str(self.expression(part.value)) if isinstance(part, ast.FormattedValue) else part.value
            for part in node.values
        )

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
        self.scope = Scope(outer, False)
        try:
            run(node.generators)
        finally:
            self.scope = outer
        return results

    def static_items(self, value: object):
        if isinstance(value, StaticIterable):
            value = value.items
        if is_runtime(value):
            raise StageError("this loop runs at compile time and cannot walk a run-time value")
        return list(value)  # type: ignore[call-overload]

    def expr_BinOp(self, node):
        left, right = self.expression(node.left), self.expression(node.right)
        op, compute = ARITHMETIC[type(node.op)]
        # As is_runtime() says; there are 2 million calls.
        if not isinstance(left, ir.Expr) and not isinstance(right, ir.Expr):
            return compute(left, right)
        if op is None:
            raise StageError(f"{type(node.op).__name__} on run-time values")
        return self.binary(op, left, right)

    def expr_UnaryOp(self, node):
        value = self.expression(node.operand)
        op, compute = UNARY[type(node.op)]
        if not is_runtime(value):
            return compute(value)
        if op is None:
            raise StageError(f"{type(node.op).__name__} on run-time values")
        if op == "!":
            return ir.Unary(ir.BOOL, op, self.condition(value, "not"))
        return ir.Unary(value.type, op, value)

    def expr_Compare(self, node):
        result: object = None
        left = self.expression(node.left)
        for kind, item in zip(node.ops, node.comparators, strict=True):
            right = self.expression(item)
            op, compute = COMPARES[type(kind)]
            # `x is None` asks about the compile-time side of a value.
            if not (isinstance(left, ir.Expr) or isinstance(right, ir.Expr)) or compute in (
                operator.is_,
                operator.is_not,
            ):
                part: object = compute(left, right)
            elif op is None:
                raise StageError(f"{type(kind).__name__} on run-time values")
            else:
                part = self.compare(op, left, right)
            result = part if result is None else self.logical("&&", result, part)
            left = right
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

    def expr_Subscript(self, node):
        base, index = self.expression(node.value), self.expression(node.slice)
        if not is_runtime(base):
            return base[self.compile_time(index, "an index into a compile-time container")]
        if isinstance(base.type, ir.Pointer):
            return ir.Load(base.type.elem, self.binary("+", base, index))
        if isinstance(base.type, ir.Vector):
            lane = self.compile_time(index, "a vector's lane")
            if not 0 <= lane < base.type.lanes:
                raise StageError(f"lane {lane} of {base.type}")
            return ir.Lane(base.type.elem, base, lane)
        raise StageError(f"{base.type} cannot be indexed")

    def expr_Call(self, node):
        function = self.expression(node.func)
        args: list[object] = []
        for item in node.args:
            if isinstance(item, ast.Starred):
                args += self.expression(item.value)
            elif type(item) is ast.List and isinstance(function, Builtin):  # variables to change in place: no copies
                args.append([self.expression(part) for part in item.elts])
            else:
                args.append(self.expression(item))
        kwargs: dict[str, object] = {}
        for item in node.keywords:
            value = self.expression(item.value)
            kwargs.update({item.arg: value} if item.arg else value)  # type: ignore[call-overload]
        if isinstance(function, Builtin):
            return self.builtin(function.name, args, kwargs)
        if isinstance(function, Inline):
            return self.inline(function, args, kwargs)
        if isinstance(function, (DType, VectorType)):
            return self.convert(args[0], function)
        if isinstance(function, type(min)) and function in PYTHON_TO_BUILTIN and any(map(is_runtime, args)):
            return self.builtin(PYTHON_TO_BUILTIN[function], args, kwargs)
        return function(*args, **kwargs)

    def lazily(self, node: ast.expr) -> object:
        """An expression that the generated code may skip: it must not have become a statement."""
        count = len(self.body)
        value = self.expression(node)
        if any(isinstance(stmt, ir.Invoke) for stmt in self.body[count:]):
            raise StageError("an operation with an effect in a part that may be skipped: write an if statement")
        return value

    # statements
    # ----------------------------------------------------------------------------------------------------------

    def statement(self, node: ast.stmt) -> None:
        self.hint = "item"
        self.line = self.source.first_line + node.lineno - 1
        try:
            STATEMENTS[type(node)](self, node)
        except (CompileError, InlineReturn):
            raise
        except Exception as error:  # also what the author's compile-time Python raised
            is_ours = isinstance(error, StageError)
            detail = str(error) if is_ours else f"{type(error).__name__}: {error}"
            raise self.source.error(innermost(self, node, error), detail) from (None if is_ours else error)

    def stmt_Pass(self, node):
        pass

    def stmt_Expr(self, node):
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.expression(node.value)

    def stmt_Assert(self, node):
        if not self.compile_time(self.expression(node.test), "assert"):
            raise StageError(f"assertion failed: {self.expression(node.msg) if node.msg else ast.unparse(node.test)}")

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
        if node not in AUGMENTED:
            load = ast.copy_location(type(node.target)(**{**vars(node.target), "ctx": ast.Load()}), node.target)
            AUGMENTED[node] = ast.copy_location(ast.BinOp(load, node.op, node.value), node)
        self.bind_target(node.target, self.expression(AUGMENTED[node]))

    def bind_target(self, target: ast.expr, value: object, fresh: bool = False) -> None:
        if isinstance(target, ast.Name):
            if fresh:
                self.scope.names[target.id] = value
            else:
                self.bind(target.id, value)
        elif type(target) is ast.Tuple or type(target) is ast.List:
            if is_runtime(value):
                raise StageError("a run-time value cannot be unpacked")
            items = list(value)  # type: ignore[call-overload]
            if not fresh and len(items) > 1:  # a, b = b, a
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
                self.emit(ir.Assign(old, self.coerce(value, old.type, "this element is {type}")))
            elif self.depth and not is_runtime(value):
                raise StageError("a compile-time container changes inside a run-time block")
            else:
                base[index] = self.materialize(value, "item")
        else:
            raise StageError(f"cannot assign to {ast.unparse(target)}")

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
            raise StageError("while ... else is not part of the kernel language")
        outer, self.body = self.body, []
        try:  # what the condition needs computed first is computed before every test
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
            raise StageError("for ... else is not part of the kernel language")
        call, unroll = node.iter, None
        if isinstance(call, ast.Call) and self.expression(call.func) == BUILTINS["unroll"]:
            unroll = self.compile_time(self.expression(call.args[1]), "the unroll count") if len(call.args) > 1 else 0
            if not isinstance(unroll, int) or unroll < 0:
                raise StageError("the unroll count is a number: 0 all of it, 1 not at all")
            call = call.args[0]
            if not isinstance(call, ast.Call) or self.expression(call.func) is not range:
                raise StageError("unroll(range(...), n): a run-time loop")
        if isinstance(call, ast.Call) and self.expression(call.func) is range:
            self.runtime_loop(node, [self.expression(item) for item in call.args], unroll)
            return
        self.loops.append("static")
        for item in self.static_items(self.expression(node.iter)):
            self.bind_target(node.target, item, fresh=True)  # names live on after the loop, as in Python
            for statement in node.body:
                self.statement(statement)
        self.loops.pop()

    def runtime_loop(self, node, bounds, unroll):
        if not isinstance(node.target, ast.Name):
            raise StageError("a run-time loop has one loop variable")
        start, stop, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
        types = [value.type for value in (start, stop, step) if is_runtime(value)]
        wide = max(types, key=lambda type: type.bits, default=self.target.index_type)
        if not isinstance(wide, ir.Scalar) or wide.kind not in ("int", "uint"):
            raise StageError(f"range() of {wide}")
        if not is_runtime(step) and step <= 0:
            raise StageError("a run-time loop counts up")
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
            raise StageError("break and continue belong to a run-time loop, not to an unrolled one")
        self.emit(stmt)

    def stmt_Return(self, node):
        if self.scope_is_inline():
            if self.depth:
                raise StageError("return inside a run-time block of an @inline function")
            raise InlineReturn(self.expression(node.value) if node.value else None)
        if node.value:
            raise StageError("a kernel returns nothing")
        self.emit(ir.Return())

    def scope_is_inline(self) -> bool:
        return self.function is not self.kernel_function

    def run(self, kernel: Kernel, statics: dict[str, object], symbol: str) -> ir.Function:
        self.source, self.function = source_of(kernel.function), kernel.function
        self.kernel_function = kernel.function
        unbound = set(kernel.static_names()) ^ set(statics)
        if unbound:
            raise CompileError(f"kernel {kernel.name}: statics {sorted(unbound)} are missing or unknown")
        params: list[ir.Var] = []
        values: dict[str, object] = {}
        for name, annotation in kernel.params:
            if annotation is static:
                values[name] = statics[name]
                continue
            type: ir.Type
            if annotation is TensorMap:
                type = ir.TENSOR_MAP
            elif isinstance(annotation, PointerType):
                type = annotation.resolve(statics)
            elif isinstance(annotation, DType):
                type = annotation.ir
            elif annotation is index:
                type = self.target.index_type
            else:
                raise CompileError(f"kernel {kernel.name}: parameter {name} has no usable type ({annotation!r})")
            values[name] = var = ir.Var(type, self.fresh(name))
            params.append(var)
        for name, structure in kernel.structures.items():
            values[name] = structure(**{field: values.pop(field) for field in structure._fields})
        self.scope.names.update(values)
        for statement in self.source.tree.body:
            self.statement(statement)
        shown = ", ".join(f"{name}={value}" for name, value in statics.items())
        origin = f"{self.source.name}:{self.source.first_line} {kernel.name}({shown})"
        return ir.Function(symbol, params, self.body, origin)


def stage(kernel: Kernel, statics: dict[str, object], symbol: str, target) -> ir.Function:
    """Compile a kernel variant to verified IR. Raises CompileError with the author's line and a caret."""
    function = Stager(target).run(kernel, statics, symbol)
    return remove_dead_variables(function, ir.verify(function))


# By the type of a node: a level's kernels have 1.5 million of them.
EXPRESSIONS, STATEMENTS = (
    defaultdict(
        lambda: Stager.unknown,
        {getattr(ast, name[5:]): method for name, method in vars(Stager).items() if name.startswith(prefix)},
    )
    for prefix in ("expr_", "stmt_")
)
