"""A compile error names the author's line, shows it, and puts a caret under the expression."""

import pytest

from zse import kernel as zl
from zse.errors import CompileError
from zse.kernel import ir
from zse.kernel.emit import emit_unit


def message(function, **statics) -> str:
    with pytest.raises(CompileError) as caught:
        emit_unit([zl.Variant("symbol", zl.kernel(function), statics)], "x86-64-v3")
    return str(caught.value)


def check(text: str, reason: str, excerpt: str, file: str = __file__) -> None:
    place, line, caret = text.split("\n")
    assert file in place and reason in place
    assert line.strip() == excerpt
    start = caret.index("^")
    assert start >= len(line) - len(line.lstrip()) and set(caret.strip()) == {"^"}
    assert start + len(caret.strip()) <= len(line)


def mixes_types(x: zl.Ptr[zl.f32], n: zl.i64):
    x[0] = x[0] + n


def undefined(x: zl.Ptr[zl.f32]):
    x[0] = missing  # noqa: F821


def const_store(x: zl.Ptr[zl.f32, "const"]):
    x[0] = 1.0


def changes_static(x: zl.Ptr[zl.f32], n: zl.i64):
    total = 0
    for i in range(n):
        total = total + 1
    x[0] = zl.f32(total)


def block_local(x: zl.Ptr[zl.f32], n: zl.i64):
    if n > 3:
        late = x[1]
    x[0] = late


def half_arithmetic(x: zl.Ptr[zl.f16]):
    x[0] = x[0] + x[1]


def other_type(x: zl.Ptr[zl.f32]):
    v = x[0]
    v = zl.load(x, 8)
    zl.store(x, v)


def too_many_lanes(x: zl.Ptr[zl.f32]):
    zl.store(x, zl.convert(zl.load(x, 8), zl.i32.x(4)))


def python_error(x: zl.Ptr[zl.f32]):
    x[0] = [1.0, 2.0][5]


def breaks_static(x: zl.Ptr[zl.f32], n: zl.i64):
    for i in zl.static(range(3)):
        if n > i:
            break


def float_index(x: zl.Ptr[zl.f32]):
    x[0] = x[1.5]


def a_lambda(x: zl.Ptr[zl.f32]):
    x[0] = (lambda: 1.0)()


@zl.inline
def helper(v):
    return v + zl.i32(1)


def through_inline(x: zl.Ptr[zl.f32]):
    x[0] = helper(x[0])


@pytest.mark.parametrize(
    "function,reason,excerpt",
    [
        (mixes_types, "+ of f32 and i64: convert one of them", "x[0] = x[0] + n"),
        (undefined, "missing is not defined here", "x[0] = missing  # noqa: F821"),
        (const_store, "store through Ptr[f32, const]", "x[0] = 1.0"),
        (changes_static, "declare it with a type before", "total = total + 1"),
        (block_local, "late is not defined here", "x[0] = late"),
        (half_arithmetic, "no arithmetic on f16: convert to f32 first", "x[0] = x[0] + x[1]"),
        (other_type, "v is f32, got f32x8", "v = zl.load(x, 8)"),
        (too_many_lanes, "other number of lanes", "zl.store(x, zl.convert(zl.load(x, 8), zl.i32.x(4)))"),
        (python_error, "IndexError", "x[0] = [1.0, 2.0][5]"),
        (breaks_static, "not to an unrolled one", "break"),
        (float_index, "1.5 is not an integer", "x[0] = x[1.5]"),
        (a_lambda, "Lambda is not part of the kernel language", "x[0] = (lambda: 1.0)()"),
        (through_inline, "+ of f32 and i32", "return v + zl.i32(1)"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_error_shows_line_and_caret(function, reason, excerpt):
    check(message(function), reason, excerpt)


def test_missing_static_is_named():
    def uses(x: zl.Ptr[zl.f32], N: zl.static):
        x[0] = zl.f32(N)

    assert "['N']" in message(uses)


def test_parameter_without_type():
    def bad(x):
        pass

    with pytest.raises(TypeError, match="'x' has no type"):
        zl.kernel(bad)


@pytest.mark.parametrize(
    "body,reason",
    [
        ([ir.Assign(ir.Var(ir.I64, "a"), ir.Const(ir.I64, 1))], "assigned before it is declared"),
        ([ir.Declare(ir.Var(ir.BOOL, "a"), ir.Const(ir.I64, 1))], "bool_ = i64"),
        ([ir.Break()], "outside a run-time loop"),
        ([ir.Eval(ir.Var(ir.I64, "ghost"))], "not declared here"),
    ],
)
def test_the_verifier_catches_broken_ir(body, reason):
    with pytest.raises(CompileError, match=reason):
        ir.verify(ir.Function("f", [], body, "somewhere"))
