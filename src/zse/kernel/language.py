"""What a kernel's author imports: types, decorators and the functions that become IR.

A kernel is written as a Python function and never called: `specialize` stages its AST (see frontend.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

# Launchers live beside kernels, so an engine that starts imports this module; the IR is for whoever compiles.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.kernel import ir


class DType:
    """A scalar type as a compile-time value. `T.x(n)` is its vector type; `T(value)` converts (in a kernel)."""

    def __init__(self, name: str, kind: str, bits: int):
        self.name, self.kind, self.bits = name, kind, bits

    @property
    def ir(self) -> "ir.Scalar":
        from zse.kernel import ir
        return ir.Scalar(self.name, self.kind, self.bits)

    def x(self, lanes: int) -> "VectorType":
        """The vector type of `lanes` (a power of two) elements."""
        return VectorType(self, lanes)

    def __repr__(self) -> str:
        return self.name


class VectorType:
    """A vector type as a compile-time value; calling it in a kernel converts or splats."""

    def __init__(self, elem: DType, lanes: int):
        self.elem, self.lanes = elem, lanes

    @property
    def ir(self) -> "ir.Vector":
        from zse.kernel import ir
        return ir.Vector(self.elem.ir, self.lanes)

    def __repr__(self) -> str:
        return str(self.ir)


@dataclass(frozen=True)
class PointerType:
    """elem: a DType, or the name of the static parameter that holds one."""
    elem: DType | str
    const: bool

    def resolve(self, statics: dict[str, object]) -> "ir.Pointer":
        """The IR type once the statics are known."""
        from zse.kernel import ir
        dtype = statics[self.elem] if isinstance(self.elem, str) else self.elem
        assert isinstance(dtype, DType), f"Ptr[{self.elem!r}]: the static is {dtype!r}, not a type"
        return ir.Pointer(dtype.ir, self.const)


class _PointerMaker:
    """`Ptr[f32]` is a pointer to writable elements, `Ptr[f32, "const"]` to constant ones; `Ptr["W", "const"]` takes its type from
    the static parameter W."""

    def __getitem__(self, item: object) -> PointerType:
        dtype, const = (item[0], item[1] == "const") if isinstance(item, tuple) else (item, False)
        assert isinstance(dtype, DType | str)
        return PointerType(dtype, const)


Ptr = _PointerMaker()

i8, u8 = DType("i8", "int", 8), DType("u8", "uint", 8)
i16, u16 = DType("i16", "int", 16), DType("u16", "uint", 16)
i32, u32 = DType("i32", "int", 32), DType("u32", "uint", 32)
i64, u64 = DType("i64", "int", 64), DType("u64", "uint", 64)
f16, bf16 = DType("f16", "float", 16), DType("bf16", "float", 16)
f32, f64 = DType("f32", "float", 32), DType("f64", "float", 64)
bool_ = DType("bool_", "bool", 8)
DTYPES = {dtype.name: dtype for dtype in (i8, u8, i16, u16, i32, u32, i64, u64, f16, bf16, f32, f64, bool_)}


class StaticIterable:
    """Marks an iterable as unrolled at compile time."""

    def __init__(self, items):
        self.items = items


def static(items):
    """As an annotation: a compile-time parameter. As a call around an iterable: unroll this loop."""
    return StaticIterable(items)


class _TargetProxy:
    """Stands for the target that is being compiled for; the front end replaces it. Attributes: `name`, `lanes`, `has(feature)`."""

    def __repr__(self) -> str:
        return "target"


target = _TargetProxy()


@dataclass(frozen=True)
class Inline:
    """A function in the language that is inlined where it is called."""
    function: Callable


def inline(function: Callable) -> Inline:
    """Decorator: the function's AST is staged into every caller. One `return`, last."""
    return Inline(function)


@dataclass(frozen=True)
class Kernel:
    """A kernel before specialization: parameters in order, each with a type or `static`."""
    function: Callable
    name: str
    params: tuple[tuple[str, object], ...]

    def static_names(self) -> list[str]:
        return [name for name, annotation in self.params if annotation is static]


def kernel(function: Callable) -> Kernel:
    """Decorator: makes a kernel of a function whose parameters are annotated with types, `Ptr[...]` or `static`."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    missing = [name for name in names if name not in function.__annotations__]
    if missing:
        raise TypeError(f"kernel {function.__name__}: parameter {missing[0]!r} has no type")
    return Kernel(function, function.__name__, tuple((name, function.__annotations__[name]) for name in names))


@dataclass(frozen=True)
class Builtin:
    """A function of the language; frontend.py gives it meaning by name. doc: shown in docs/kernel-language.md."""
    name: str
    doc: str = field(compare=False)

    def __call__(self, *args, **kwargs):
        raise TypeError(f"{self.name}() can only be called inside a @kernel or @inline function")


def _builtins(**docs: str) -> dict[str, Builtin]:
    return {name: Builtin(name, doc) for name, doc in docs.items()}


BUILTINS = _builtins(
    block_index="block_index(d): which work item of grid dimension d (0, 1, 2) this is, i64",
    num_blocks="num_blocks(d): the grid's size in dimension d, i64",
    load="load(pointer, lanes): a vector of consecutive elements; no alignment needed",
    store="store(pointer, value): write a scalar or a vector of consecutive elements",
    prefetch="prefetch(pointer): bring the cache line nearer",
    local_array="local_array(T, n): 64-byte aligned scratch of n elements, uninitialised, of this block",
    cast_ptr="cast_ptr(pointer, T): the same address as elements of T",
    splat="splat(value, lanes): a vector with all lanes equal",
    convert="convert(value, T): numeric conversion, lane-wise; float to integer truncates, to f16/bf16 rounds to nearest even",
    bitcast="bitcast(value, T or T.x(n)): the same bits as another type of the same size",
    where="where(condition, a, b): select, lane by lane for a mask",
    fma="fma(a, b, c): a * b + c with one rounding",
    sqrt="sqrt(v)", exp="exp(v): within 2 ulp of f32", log="log(v)", sin="sin(v)", cos="cos(v)", tanh="tanh(v)",
    floor="floor(v)", round_even="round_even(v): to the nearest integer, ties to even, still a float",
    minimum="minimum(a, b), or min(a, b)", maximum="maximum(a, b), or max(a, b)", absolute="absolute(v), or abs(v)",
    reduce_add="reduce_add(v): the sum of the lanes, as a fixed tree", reduce_max="reduce_max(v)", reduce_min="reduce_min(v)",
    any_lane="any_lane(mask): true if any lane is set",
    widen_low="widen_low(v): the first half of the lanes", widen_high="widen_high(v): the second half of the lanes",
    concat="concat(a, b): a vector twice as long",
    popcount="popcount(v): number of set bits of an unsigned scalar",
    dot4_u8s8="dot4_u8s8(acc i32 lanes, w u8 x 4 in each i32, a s8 x 4 in each i32): acc + the four products, exact (needs vnni or dotprod)",
    pairs_u8s8="pairs_u8s8(w, a): i16 sums of two neighbouring u8*s8 products, 2 per i32 lane; saturates at 16 bits",
    pairs_i16="pairs_i16(v): i32 sums of two neighbouring i16",
    add_i16="add_i16(a, b): lane-wise sum of packed i16",
    sign_s8="sign_s8(a, w): per byte a * sign(w)", abs_s8="abs_s8(v): per byte absolute value",
    narrow_s8="narrow_s8(v): i32 lanes to i8 lanes, saturating",
)
globals().update(BUILTINS)


def __getattr__(name: str) -> Builtin:   # names made by the table above, for type checkers
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True)
class Variant:
    """A kernel with its statics bound: one exported symbol of a kernel library."""
    symbol: str
    kernel: Kernel
    statics: dict[str, object] = field(default_factory=dict, hash=False)
