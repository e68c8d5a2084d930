"""The functions of the language in the staged front end: intrinsics, effects, memory, and @inline functions."""

import zse.kernel.ir as ir
from zse.kernel.intrinsics import EFFECTS, INTRINSICS
from zse.kernel.intrinsics.row import StageError
from zse.kernel.language import DTYPES, Inline
from zse.kernel.source import Scope, source_of
from zse.kernel.values import Values, bits_of, is_runtime


class InlineReturn(Exception):
    """The `return` of an @inline function, with its value."""

    def __init__(self, value: object):
        self.value = value


class Calls(Values):
    """call_<name>: functions whose arguments are not just values; the rest are rows of the tables in
    kernel/intrinsics."""

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
            raise StageError(f"{name}() takes no keywords")
        if row.unify:
            types = [value.type for value in args if isinstance(value, ir.Expr)]
            if types:
                widest = max(types, key=lambda type: isinstance(type, ir.Vector))
                args = [self.coerce(value, widest, f"{name}()") for value in args]
        result = self.result_of(name, [value.type if isinstance(value, ir.Expr) else value for value in args])
        values = [value if isinstance(value, ir.Expr) else ir.Const(ir.I64, value) for value in args]
        call = ir.Call(result, name, tuple(values))
        if isinstance(result, ir.Void):
            self.emit(ir.Eval(call))
            return None
        return call

    def result_of(self, name: str, types: list) -> ir.Type:
        """What an intrinsic gives for these types and compile-time values, if the target has it."""
        row = INTRINSICS[name]
        result = row.signature(*types)
        if isinstance(result, str):
            raise StageError(f"{name}(): {result}")
        row.body_for(self.target)
        return result

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

    def grid_index(self, name: str, dimension: object) -> ir.Expr:
        if dimension not in (0, 1, 2):
            raise StageError(f"{name}(): the grid dimension is 0, 1 or 2")
        INTRINSICS[name].body_for(self.target)
        return ir.Call(self.target.index_type, name, (ir.Const(ir.I64, dimension),))

    def call_block_index(self, dimension):
        return self.grid_index("block_index", dimension)

    def call_num_blocks(self, dimension):
        return self.grid_index("num_blocks", dimension)

    def call_shared_array(self, dtype, count, align=16):
        if not self.target.shared_limit:
            raise StageError("shared_array() on the CPU: a block is one thread, use local_array()")
        if align not in (4, 8, 16, 32, 64, 128, 256, 512, 1024):
            raise StageError("shared_array(): align is a power of two of 4 to 1024 bytes")
        count = self.compile_time(count, "the size of a shared array")
        var = ir.Var(ir.Pointer(dtype.ir, False, "shared"), self.fresh(self.hint if self.hint != "item" else "shared"))
        self.fresh_results.add(var.name)
        self.emit(ir.SharedArray(var, count, max(align, dtype.bits // 8)))
        return var

    def call_mbarrier_array(self, count):
        return self.call_shared_array(DTYPES["u64"], count, 8)

    def call_smem_desc(self, pointer, swizzle=128, stride=1024, leading=16):
        type = pointer.type if is_runtime(pointer) else pointer
        result = self.result_of("smem_desc", [type, swizzle, stride, leading])
        numbers = (ir.Const(ir.I32, value) for value in (swizzle, stride, leading))
        return ir.Call(result, "smem_desc", (pointer, *numbers))

    def call_lop3(self, a, b, c, table):
        result = self.result_of("lop3", [ir.U32, ir.U32, ir.U32, table])
        values = tuple(self.coerce(value, ir.U32, "lop3() of u32") for value in (a, b, c))
        return ir.Call(result, "lop3", (*values, ir.Const(ir.I32, table)))

    def call_unroll(self, *args):
        raise StageError("unroll(range(...), n) stands in a for statement")

    def check_hint(self, hint: object, pointer: ir.Expr) -> str:
        if hint not in ("", "readonly", "stream"):
            raise StageError('the hint is "readonly" or "stream"')
        return hint if self.target.takes_hints and pointer.type.space == "global" else ""

    def call_load(self, pointer, lanes=1, hint=""):
        if not is_runtime(pointer) or not isinstance(pointer.type, ir.Pointer):
            raise StageError("load needs a pointer")
        elem = pointer.type.elem
        type = elem if lanes == 1 else ir.Vector(elem, self.compile_time(lanes, "the number of lanes"))
        return ir.Load(type, pointer, self.check_hint(hint, pointer))

    def call_store(self, pointer, value, hint=""):
        if not is_runtime(pointer) or not isinstance(pointer.type, ir.Pointer):
            raise StageError("store needs a pointer")
        if pointer.type.const:
            raise StageError(f"store through {pointer.type}")
        if not (is_runtime(value) and isinstance(value.type, ir.Vector)):
            value = self.coerce(value, pointer.type.elem, f"store to {pointer.type}")
        elif value.type.elem != pointer.type.elem:
            raise StageError(f"store of {value.type} to {pointer.type}")
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
            raise StageError("splat of a number: write T.x(n)(number)")
        return ir.Splat(ir.Vector(value.type, lanes), value)

    def call_convert(self, value, to):
        return self.convert(value, to)

    def call_bitcast(self, value, to):
        type = to.ir
        if isinstance(value.type, ir.Vector) and isinstance(type, ir.Scalar):
            lanes = value.type.lanes * value.type.elem.bits // type.bits
            type = ir.Vector(type, lanes) if lanes > 1 else type
        if bits_of(type) != bits_of(value.type):
            raise StageError(f"bitcast of {value.type} to {type}: other size")
        return ir.Bitcast(type, value)

    def call_where(self, condition, left, right):
        if not is_runtime(condition):
            return left if condition else right
        return self.select(condition, left, right)

    def inline(self, function: Inline, args: list, kwargs: dict) -> object:
        code = function.function
        outer = (self.source, self.function, self.scope, self.line)
        self.source, self.function = source_of(code), code
        self.scope = Scope(None, False)
        for name, value in self.source.arguments(args, kwargs).items():
            # A variable passed in is copied only if the function assigns to it; constants and variables are used as
            # they are.
            simple = isinstance(value, ir.Const) or (isinstance(value, ir.Var) and name not in self.source.assigned)
            self.scope.names[name] = value if simple or not is_runtime(value) else self.declare(name, value)
        depth = self.depth
        try:
            self.depth = 0
            for statement in self.source.tree.body:
                self.statement(statement)
        except InlineReturn as result:
            return result.value
        finally:
            self.source, self.function, self.scope, self.line = outer
            self.depth = depth
        return None
