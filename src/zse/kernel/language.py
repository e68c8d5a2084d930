"""What a kernel's author imports: types, decorators and the functions that become IR.

A kernel is written as a Python function and never called: `specialize` stages its AST (see frontend.py).
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, dataclass_transform

from zse.kernel import ir


@dataclass_transform()
class Record:
    """A class that only holds values, without the module dataclasses, which costs a starting engine 3 to 10 ms.

    A subclass's annotations are its fields, behind those of its base, values of the class their defaults; two are equal
    if all fields are. Not to be changed once it is in a set or a key."""

    _fields: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        cls._fields = tuple(dict.fromkeys((*cls._fields, *cls.__annotations__)))

    def __init__(self, *values: Any, **named: Any) -> None:
        fields = self._fields
        given = dict(zip(fields, values)) | named
        if len(given) < len(values) + len(named) or not given.keys() <= set(fields):
            raise TypeError(f"{type(self).__name__} takes {', '.join(fields)}, each once")
        missing = [name for name in fields if name not in given and not hasattr(type(self), name)]
        if missing:
            raise TypeError(f"{type(self).__name__} needs {', '.join(missing)}")
        for name in fields:
            if name not in given:
                default = getattr(type(self), name)
                given[name] = dict(default) if isinstance(default, dict) else default
        self.__dict__.update(given)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and all(getattr(self, name) == getattr(other, name) for name in self._fields)

    def __hash__(self) -> int:
        return hash((type(self), getattr(self, self._fields[0])))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self._fields)})"


class DType:
    """A scalar type as a compile-time value. `T.x(n)` is its vector type; `T(value)` converts (in a kernel)."""

    def __init__(self, name: str, kind: str, bits: int):
        self.name, self.kind, self.bits = name, kind, bits

    @cached_property
    def ir(self) -> "ir.Scalar":
        return ir.Scalar(self.name, self.kind, self.bits)

    @cached_property
    def _vectors(self) -> "dict[int, VectorType]":
        return {}

    def x(self, lanes: int) -> "VectorType":
        """The vector type of `lanes` (a power of two) elements."""
        found = self._vectors.get(lanes)
        if found is None:
            found = self._vectors[lanes] = VectorType(self, lanes)
        return found

    def __repr__(self) -> str:
        return self.name


class VectorType:
    """A vector type as a compile-time value; calling it in a kernel converts or splats."""

    def __init__(self, elem: DType, lanes: int):
        self.elem, self.lanes = elem, lanes

    @cached_property
    def ir(self) -> "ir.Vector":
        return ir.Vector(self.elem.ir, self.lanes)

    def __repr__(self) -> str:
        return str(self.ir)


class PointerType(Record):
    """elem: a DType, or the name of the static parameter that holds one."""

    elem: DType | str
    const: bool

    def resolve(self, statics: dict[str, object]) -> "ir.Pointer":
        """The IR type once the statics are known."""
        dtype = statics[self.elem] if isinstance(self.elem, str) else self.elem
        assert isinstance(dtype, DType), f"Ptr[{self.elem!r}]: the static is {dtype!r}, not a type"
        return ir.Pointer(dtype.ir, self.const)


class _PointerMaker:
    """`Ptr[f32]` is a pointer to writable elements, `Ptr[f32, "const"]` to constant ones; `Ptr["W", "const"]` takes its
    type from the static parameter W."""

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
e4m3 = DType("e4m3", "float", 8)
bool_ = DType("bool_", "bool", 8)
DTYPES = {dtype.name: dtype for dtype in (i8, u8, i16, u16, i32, u32, i64, u64, f16, bf16, f32, f64, e4m3, bool_)}


class _TensorMapType:
    """A kernel parameter that describes a tensor to the copy engine (128 bytes, made by the runtime)."""

    @property
    def ir(self) -> "ir.Scalar":
        return ir.TENSOR_MAP

    def __repr__(self) -> str:
        return "TensorMap"


TensorMap = _TensorMapType()


class _IndexType:
    """A parameter of the type that block_index() has, i64 and on a GPU i32: the kernels of both kinds of device share a
    structure."""

    def __repr__(self) -> str:
        return "index"


index = _IndexType()


class StaticIterable:
    """Marks an iterable as unrolled at compile time."""

    def __init__(self, items):
        self.items = items


def static(items):
    """As an annotation: a compile-time parameter. As a call around an iterable: unroll this loop."""
    return StaticIterable(items)


class _TargetProxy:
    """Stands for the target that is being compiled for; the front end replaces it. Attributes: `name`, `kernels` ("cpu"
    or "gpu"), `lanes` (CPU: f32 values of a register), `warp`, `threads`, `arch` (CUDA: 80, 90, 100; else 0),
    `shared_limit` (bytes a block can have), `has(feature)`."""

    def __repr__(self) -> str:
        return "target"


target = _TargetProxy()


class Inline(Record):
    """A function in the language that is inlined where it is called."""

    function: Callable


def inline(function: Callable) -> Inline:
    """Decorator: the function's AST is staged into every caller. One `return`, last."""
    return Inline(function)


class Kernel(Record):
    """A kernel before specialization: parameters in order, each with a type or `static`. structures: parameters of the
    function that stand for several, their fields."""

    function: Callable
    name: str
    params: tuple[tuple[str, object], ...]
    structures: dict[str, type[Record]]

    def static_names(self) -> list[str]:
        return [name for name, annotation in self.params if annotation is static]


def kernel(function: Callable) -> Kernel:
    """Decorator: makes a kernel of a function whose parameters are annotated with types, `Ptr[...]` or `static`, or
    with a Record of such, whose fields are parameters in its place."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    missing = [name for name in names if name not in function.__annotations__]
    if missing:
        raise TypeError(f"kernel {function.__name__}: parameter {missing[0]!r} has no type")
    params: list[tuple[str, object]] = []
    structures: dict[str, type[Record]] = {}
    for name in names:
        annotation = function.__annotations__[name]
        if isinstance(annotation, type) and issubclass(annotation, Record):
            structures[name] = annotation
            types = {
                field: type
                for base in reversed(annotation.__mro__)
                for field, type in vars(base).get("__annotations__", {}).items()
            }
            params += [(field, types[field]) for field in annotation._fields]
        else:
            params.append((name, annotation))
    if len(dict(params)) < len(params):
        raise TypeError(f"kernel {function.__name__}: two parameters have the same name")
    return Kernel(function, function.__name__, tuple(params), structures)


class Builtin(Record):
    """A function of the language; frontend.py gives it meaning by name. doc: shown in docs/kernel-language.md."""

    name: str
    doc: str

    def __call__(self, *args, **kwargs):
        raise TypeError(f"{self.name}() can only be called inside a @kernel or @inline function")


def _builtins(**docs: str) -> dict[str, Builtin]:
    return {name: Builtin(name, doc) for name, doc in docs.items()}


BUILTINS = _builtins(
    block_index="block_index(d): which work item of grid dimension d (0, 1, 2) this is; i64, on a GPU i32",
    num_blocks="num_blocks(d): the grid's size in dimension d; i64, on a GPU i32",
    load="load(pointer, lanes, hint): a vector of consecutive elements; CPU: no alignment needed, GPU: natural alignment up to 16 "
    'bytes. hint (global memory): "readonly" = ld.global.nc, "stream" = also not kept in L1 and 256-byte L2 sectors',
    store='store(pointer, value, hint): write a scalar or a vector of consecutive elements; hint "stream": not kept in L1',
    prefetch="prefetch(pointer): bring the cache line nearer",
    local_array="local_array(T, n): 64-byte aligned scratch of n elements, uninitialised, of this block (GPU: of this thread; "
    "registers only if every index is known at compile time, so prefer lists of variables)",
    unroll="unroll(range(...), n): in a for statement: repeat the body n times per test; 0 or nothing: all of it, 1: never",
    make_vector="make_vector(a, b, ...): a vector of these scalars",
    cast_ptr="cast_ptr(pointer, T): the same address as elements of T",
    splat="splat(value, lanes): a vector with all lanes equal",
    convert="convert(value, T): numeric conversion, lane-wise; float to integer truncates, to f16/bf16 rounds to nearest even",
    bitcast="bitcast(value, T or T.x(n)): the same bits as another type of the same size",
    where="where(condition, a, b): select, lane by lane for a mask",
    fma="fma(a, b, c): a * b + c with one rounding",
    rsqrt="rsqrt(v): 1 / sqrt(v); GPU: one instruction, within 2 ulp",
    reciprocal="reciprocal(v): 1 / v; GPU: one instruction, within 1 ulp",
    exp2="exp2(v): 2**v; GPU: one instruction, within 2 ulp, subnormal results are zero",
    sqrt="sqrt(v)",
    exp="exp(v): within 2 ulp of f32",
    log="log(v)",
    sin="sin(v)",
    cos="cos(v)",
    tanh="tanh(v)",
    floor="floor(v)",
    round_even="round_even(v): to the nearest integer, ties to even, still a float",
    minimum="minimum(a, b), or min(a, b)",
    maximum="maximum(a, b), or max(a, b)",
    absolute="absolute(v), or abs(v)",
    reduce_add="reduce_add(v): the sum of the lanes, as a fixed tree",
    reduce_max="reduce_max(v)",
    reduce_min="reduce_min(v)",
    any_lane="any_lane(mask): true if any lane is set",
    widen_low="widen_low(v): the first half of the lanes",
    widen_high="widen_high(v): the second half of the lanes",
    concat="concat(a, b): a vector twice as long",
    popcount="popcount(v): number of set bits of an unsigned scalar",
    dot4_u8s8="dot4_u8s8(acc i32 lanes, w u8 x 4 in each i32, a s8 x 4 in each i32): acc + the four products, exact (an instruction with vnni)",
    dot4_s8="dot4_s8(acc, w, a, lane): likewise of signed bytes; lane (0 to 3): of a, four i32, which all lanes of w are multiplied "
    "with; none: each lane with its own (an instruction with dotprod)",
    pairs_u8s8="pairs_u8s8(w, a): i16 sums of two neighbouring u8*s8 products, 2 per i32 lane; saturates at 16 bits",
    pairs_i16="pairs_i16(v): i32 sums of two neighbouring i16",
    dot2_i16="dot2_i16(a, b): i32 sums of the products of two neighbouring i16",
    add_i16="add_i16(a, b): lane-wise sum of packed i16",
    sign_s8="sign_s8(a, w): per byte a * sign(w)",
    abs_s8="abs_s8(v): per byte absolute value",
    lookup_s8="lookup_s8(table, index): per byte table[index], indices 0 to 15; table: 16 bytes, the same in every four lanes",
    narrow_s8="narrow_s8(v): i32 lanes to i8 lanes, saturating",
    thread_index="thread_index(): which thread of the block this is, i32",
    lane_index="lane_index(): which lane of the warp, i32",
    warp_index="warp_index(): which warp of the block, i32",
    cluster_rank="cluster_rank(): which block of the cluster, i32",
    shared_array="shared_array(T, n, align): memory of the whole block, uninitialised; align in bytes (16; up to 1024 for swizzled "
    "tiles). All arrays of a kernel together are its dynamic shared memory",
    prefetch_l2="prefetch_l2(pointer): bring the cache line into L2",
    prefetch_here="prefetch_here(pointer): as prefetch_l2, which the compiler leaves where it stands (gcc gathers others at a block's start)",
    barrier="barrier(): all threads of the block; orders their memory accesses",
    warp_barrier="warp_barrier(): all lanes of the warp; orders their memory accesses",
    named_barrier="named_barrier(id, threads): barrier id (1 to 15) of that many threads, whole warps",
    named_arrive="named_arrive(id, threads): arrive at it without waiting",
    cluster_barrier="cluster_barrier(relaxed): all threads of the cluster; relaxed (False): as in mbarrier_arrive_remote()",
    fence="fence(): this thread's earlier accesses come before its later ones for the whole device",
    load_acquire='load_acquire(pointer, scope): integer load that later accesses stay behind; scope "device", or "system": all devices '
    "and the host",
    store_release="store_release(pointer, value, scope): integer store that earlier accesses stay before; likewise",
    load_relaxed="load_relaxed(pointer, lanes): integer load, or of a vector of 2, each of which is read whole, of memory that other "
    "devices change meanwhile; orders nothing",
    store_relaxed="store_relaxed(pointer, value): the store for it",
    shuffle="shuffle(value, lane): the value that another lane of the warp holds; all lanes take part",
    shuffle_xor="shuffle_xor(value, mask): of lane ^ mask",
    shuffle_up="shuffle_up(value, n): of lane - n, its own below n",
    shuffle_down="shuffle_down(value, n): of lane + n, its own at the end",
    warp_sum="warp_sum(value, width): sum over groups of `width` lanes (the whole warp) as an xor tree, in every lane",
    warp_max="warp_max(value, width): likewise the largest",
    warp_min="warp_min(value, width): likewise the smallest",
    warp_top="warp_top(value): the largest u32 of the warp, in every lane, in one instruction (needs mma_sync: NVIDIA)",
    warp_total="warp_total(value): the sum of an i32 over the warp, modulo 2**32, likewise",
    ballot="ballot(condition): u64 with one bit per lane",
    any_thread="any_thread(condition): true in a lane of the warp",
    all_threads="all_threads(condition): true in all lanes of the warp",
    atomic_add="atomic_add(pointer, value): returns the old value; global or shared; i32, u32, i64, u64, f32",
    atomic_max="atomic_max(pointer, value): likewise, integers",
    atomic_min="atomic_min(pointer, value): likewise, integers",
    atomic_cas="atomic_cas(pointer, expected, new): likewise; stores new if the old value is the expected one",
    atomic_accumulate="atomic_accumulate(pointer, value): atomic_add without the old value; also a vector of 2 or 4 f32 in global memory, "
    "each added by itself (one access from sm_90 on)",
    copy_async="copy_async(dst, src, bytes, valid_bytes, hint): 4, 8 or 16 bytes from global to shared; past valid_bytes zeros are written; "
    'hint "stream": 256-byte L2 sectors',
    copy_commit="copy_commit(): the copies so far are a group",
    copy_wait="copy_wait(n): until at most the n newest groups are in flight",
    copy_arrive="copy_arrive(b): arrive at mbarrier b when this thread's copies are done",
    mbarrier_array="mbarrier_array(n): n mbarriers in shared memory",
    mbarrier_init="mbarrier_init(b, count): by one thread; count: arrivals of a phase",
    mbarrier_init_fence="mbarrier_init_fence(): after the inits, before the barrier() that publishes them",
    mbarrier_arrive="mbarrier_arrive(b): one arrival",
    mbarrier_arrive_remote="mbarrier_arrive_remote(b, rank, relaxed): one arrival at the same barrier of another block of the "
    "cluster; relaxed (False): without the fence of the whole GPU that publishing this thread's stores takes, where it has only "
    "read",
    mbarrier_expect="mbarrier_expect(b, bytes): one arrival, and the phase waits for that many bytes of bulk copies",
    mbarrier_wait="mbarrier_wait(b, parity): until the phase of this parity (0, 1, 0, ...) is over",
    bulk_copy="bulk_copy(dst, src, bytes, b, hint): contiguous global to shared, multiples of 16 bytes, counted at mbarrier b; "
    'hint "evict_first" or "evict_last" of L2',
    bulk_store="bulk_store(dst, src, bytes): contiguous shared to global, in the group of bulk_commit()",
    tma_load="tma_load(dst, map, coords, b, multicast, hint): a box of the tensor of a TensorMap parameter; coords innermost first; "
    "multicast: mask of the cluster's blocks",
    tma_store="tma_store(map, coords, src): a box back, in the group of bulk_commit()",
    tma_prefetch="tma_prefetch(map): the map itself",
    bulk_commit="bulk_commit(): the bulk stores so far are a group",
    bulk_wait="bulk_wait(n, read): until at most n groups are in flight; read (default): only their reading of shared memory",
    fence_async="fence_async(): ordinary stores to shared memory before what the copy engine or wgmma reads next",
    mma_bf16="mma_bf16(acc, a, b): m16n8k16; acc: list of 4 f32 variables, changed in place; a: 4 u32, b: 2 u32 of two bf16",
    mma_f16="mma_f16(acc, a, b): likewise with f16",
    mma_e4m3="mma_e4m3(acc, a, b): m16n8k32 with four e4m3 in a u32 (sm_89)",
    mma_u8s8="mma_u8s8(acc, a, b): m16n8k32 with four u8 (a) or i8 (b) in a u32; acc: 4 i32 variables",
    ldmatrix="ldmatrix(p, count, trans): 1, 2 or 4 8x8 matrices of 16 bits from shared memory, a tuple of u32; lane i gives the "
    "address of row i % 8 of matrix i // 8",
    stmatrix="stmatrix(p, values, trans): the reverse (sm_90)",
    transpose_8x8="transpose_8x8(word): two 16-bit values of row lane / 4, columns 2 (lane % 4) and the next, of an 8x8 matrix become "
    "those of its transpose",
    wgmma_fence="wgmma_fence(acc, ...): before the first wgmma and after touching its registers",
    wgmma_commit="wgmma_commit(): the products so far are a group",
    wgmma_wait="wgmma_wait(n, acc, ...): until at most n groups are in flight; name the accumulators that are read next",
    wgmma_bf16="wgmma_bf16(acc, a, b, n, accumulate, trans_a, trans_b): 64 x n x 16 of a warpgroup; acc: list of n / 2 f32 "
    "variables; a: descriptor or 4 u32; b: descriptor; accumulate=False: acc = a b",
    wgmma_f16="wgmma_f16(acc, a, b, n, ...): likewise with f16",
    wgmma_e4m3="wgmma_e4m3(acc, a, b, n, accumulate): 64 x n x 32",
    smem_desc="smem_desc(p, swizzle, stride, leading): matrix descriptor of a tile in shared memory; swizzle 0, 32, 64, 128 bytes, "
    "stride between groups of 8 rows (1024) and leading offset in bytes",
    grid_wait="grid_wait(): until the kernels before this one are done (PDL; nothing elsewhere)",
    grid_launch_dependents="grid_launch_dependents(): the kernel after this one may start (PDL; nothing elsewhere)",
    set_max_registers='set_max_registers("inc" or "dec", n): registers of this warpgroup\'s threads',
    clock="clock(): cycle counter of the multiprocessor, i64",
    lop3="lop3(a, b, c, table): any function of three bits on u32; table = f(0xF0, 0xCC, 0xAA)",
    prmt="prmt(a, b, selector): four of the eight bytes of b:a, one hex digit each, lowest first",
    fma_bf16x2="fma_bf16x2(a, b, c): two bf16 in a u32, one rounding each",
    mul_bf16x2="mul_bf16x2(a, b)",
    add_bf16x2="add_bf16x2(a, b)",
    max_bf16x2="max_bf16x2(a, b)",
    fma_f16x2="fma_f16x2(a, b, c): two f16 in a u32",
    mul_f16x2="mul_f16x2(a, b)",
    add_f16x2="add_f16x2(a, b)",
    sub_f16x2="sub_f16x2(a, b)",
    asm="asm(text, result, args..., pure): CUDA only: PTX with %0, %1, ...; result: a type, a tuple of types, a list of variables "
    "(changed in place) or None; pure=True: may be moved and merged",
)
globals().update(BUILTINS)


def __getattr__(name: str) -> Builtin:  # names made by the table above, for type checkers
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Variant(Record):
    """A kernel with its statics bound: one exported symbol of a kernel library. GPU: threads of a block, blocks that a
    multiprocessor must be able to hold (it bounds the registers), blocks of a cluster."""

    symbol: str
    kernel: Kernel
    statics: dict[str, object] = {}
    threads: int = 256
    min_blocks: int = 1
    cluster: int = 1
