"""The emulator's target: C++ of the same IR against csrc/emulate.h, one function that is one thread.

Every load and store goes through a check, every effect through the emulator; `T->at` follows the author's source lines.
"""

from zse.kernel import ir, mathlib
from zse.kernel.archs import SHARED_LIMIT, features_of
from zse.kernel.intrinsics import fragments
from zse.kernel.intrinsics.matrix import WGMMA, descriptor_bits
from zse.kernel.targets.gpu import GpuTarget

GUARD = 128  # bytes between shared arrays that nothing may touch

_MATH = {
    "sqrt": "sqrtf",
    "exp": "expf",
    "log": "logf",
    "sin": "sinf",
    "cos": "cosf",
    "tanh": "tanhf",
    "floor": "floorf",
    "round_even": "rintf",
    "fma": "fmaf",
    "absolute": "fabsf",
    "minimum": "fminf",
    "maximum": "fmaxf",
    "exp2": "zse_exp2",
    "rsqrt": "zse_rsqrt",
    "reciprocal": "zse_reciprocal",
}
_ATOMICS = {"atomic_add": "ADD", "atomic_max": "MAX", "atomic_min": "MIN", "atomic_cas": "CAS"}


def _shared(expr: ir.Expr) -> str:
    return "true" if expr.type.space == "shared" else "false"


def _array(kind: str, values: list[str]) -> str:
    return f"zse_list<{kind}>({{{', '.join(values)}}})"


def _call(function: str, *more: str):
    """emulate::function(T, arguments, more)."""
    return lambda t, stmt, outs, args: [f"emulate::{function}({', '.join(['T', *args, *more])});"]


def _attrs(function: str, *indices: int):
    return lambda t, stmt, outs, args: [
        f"emulate::{function}({', '.join(['T', *args, *(t.literal(stmt.attrs[i]) for i in indices)])});"
    ]


def _exchange(kind: str):
    return lambda t, stmt, outs, args: (
        f"zse_exchange<{t.c_type(stmt.outs[0].type)}>(T, emulate::{kind}, {args[0]}, {args[1]})"
    )


def _vote(kind: str):
    def body(t, stmt, outs, args):
        value = f"emulate::exchange(T, emulate::{kind}, {args[0]}, 0)"
        return value if kind == "BALLOT" else f"({value} != 0)"

    return body


def _atomic(kind: str):
    def body(t, stmt, outs, args):
        ctype = t.c_type(stmt.outs[0].type)
        values = [args[2], args[1]] if kind == "CAS" else [args[1]]
        return f"zse_atomic<{ctype}>(T, {', '.join([args[0], _shared(stmt.args[0]), f'emulate::{kind}', *values])})"

    return body


def _accumulate(t, stmt, outs, args):
    type = stmt.args[1].type
    if not isinstance(type, ir.Vector):
        return [f"zse_atomic<{t.c_type(type)}>(T, {args[0]}, {_shared(stmt.args[0])}, emulate::ADD, {args[1]});"]
    lanes = " ".join(
        f"zse_atomic<f32>(T, {args[0]} + {i}, false, emulate::ADD, zse_sum.v[{i}]);" for i in range(type.lanes)
    )
    return [f"{{ const {t.c_type(type)} zse_sum = {args[1]}; {lanes} }}"]


def _acquire(t, stmt, outs, args):
    ctype = t.c_type(stmt.outs[0].type)
    return f"zse_value<{ctype}>(emulate::acquire(T, {args[0]}, {_shared(stmt.args[0])}, sizeof({ctype})))"


def _release(t, stmt, outs, args):
    ctype = t.c_type(stmt.args[1].type)
    return [f"emulate::release(T, {args[0]}, {_shared(stmt.args[0])}, sizeof({ctype}), zse_slot<{ctype}>({args[1]}));"]


def _copy_async(t, stmt, outs, args):
    size = stmt.attrs[0]
    return [f"emulate::copy_async(T, {args[0]}, {args[1]}, {size}, {args[2] if len(args) == 3 else size});"]


def _tma_load(t, stmt, outs, args):
    rank, multicast, _ = stmt.attrs
    mask = args[3 + rank] if multicast else "-1"
    return [
        f"emulate::tma_load(T, {args[0]}, {args[1]}, {args[2]}, {rank}, {_array('i32', args[3 : 3 + rank])}, {mask});"
    ]


def _tma_store(t, stmt, outs, args):
    return [f"emulate::tma_store(T, {args[0]}, {args[1]}, {stmt.attrs[0]}, {_array('i32', args[2:])});"]


def _mma(name: str):
    table = fragments.MMA[name]

    def body(t, stmt, outs, args):
        words = table.a.per_lane * table.a.bits // 32
        acc = _array("f32 *", [f"(f32 *)&{out}" for out in outs])
        return [
            f"emulate::mma(T, {t.mma_table(name)}, {acc}, {_array('u32', args[:words])}, {_array('u32', args[words:])});"
        ]

    return body


def _ldmatrix(t, stmt, outs, args):
    places = _array("u32 *", [f"&{out}" for out in outs])
    trans = t.literal(stmt.attrs[0])
    return [f"emulate::ldmatrix(T, {args[0]}, {len(outs)}, {trans}, {places}, {t.ldmatrix_table(stmt.attrs[0])});"]


def _stmatrix(t, stmt, outs, args):
    trans = t.literal(stmt.attrs[0])
    return [
        f"emulate::stmatrix(T, {args[0]}, {len(args) - 1}, {trans}, {_array('u32', args[1:])}, {t.ldmatrix_table(stmt.attrs[0])});"
    ]


def _wgmma(name: str):
    def body(t, stmt, outs, args):
        n, in_registers, trans_a, trans_b = stmt.attrs
        acc = _array("f32 *", [f"&{out}" for out in outs])
        registers = _array("u32", args[:4]) if in_registers else "nullptr"
        a = "0" if in_registers else args[0]
        return [
            f"emulate::wgmma(T, {list(WGMMA).index(name)}, {acc}, {n}, {registers}, {a}, {args[-2]}, {args[-1]}, "
            f"{t.literal(trans_a)}, {t.literal(trans_b)});"
        ]

    return body


def _nothing(t, stmt, outs, args):
    return []


EFFECTS = {
    "barrier": _call("barrier"),
    "warp_barrier": _call("warp_barrier"),
    "cluster_barrier": _call("cluster_barrier"),
    "named_barrier": lambda t, stmt, outs, args: [f"emulate::named_barrier(T, {args[0]}, {stmt.attrs[0]}, true);"],
    "named_arrive": lambda t, stmt, outs, args: [f"emulate::named_barrier(T, {args[0]}, {stmt.attrs[0]}, false);"],
    "fence": _call("fence"),
    "fence_async": _call("fence_async"),
    "load_acquire": _acquire,
    "store_release": _release,
    "shuffle": _exchange("SHUFFLE"),
    "shuffle_xor": _exchange("SHUFFLE_XOR"),
    "shuffle_up": _exchange("SHUFFLE_UP"),
    "shuffle_down": _exchange("SHUFFLE_DOWN"),
    "ballot": _vote("BALLOT"),
    "any_thread": _vote("ANY"),
    "all_threads": _vote("ALL"),
    **{name: _atomic(kind) for name, kind in _ATOMICS.items()},
    "atomic_accumulate": _accumulate,
    "transpose_8x8": lambda t, stmt, outs, args: f"zse_transpose(T, {args[0]})",
    "grid_wait": _call("grid_wait"),
    "grid_launch_dependents": _call("grid_launch_dependents"),
    "set_max_registers": _nothing,
    "clock": lambda t, stmt, outs, args: "(i64)++T->ticks",
    "copy_async": _copy_async,
    "copy_commit": _call("copy_commit"),
    "copy_wait": _attrs("copy_wait", 0),
    "copy_arrive": _call("copy_arrive"),
    "mbarrier_init": _call("mbarrier_init"),
    "mbarrier_init_fence": _call("mbarrier_init_fence"),
    "mbarrier_arrive": _call("mbarrier_arrive", "-1", "0"),
    "mbarrier_arrive_remote": _call("mbarrier_arrive", "0"),
    "mbarrier_expect": lambda t, stmt, outs, args: [f"emulate::mbarrier_arrive(T, {args[0]}, -1, {args[1]});"],
    "mbarrier_wait": _call("mbarrier_wait"),
    "bulk_copy": lambda t, stmt, outs, args: [f"emulate::bulk_copy(T, {', '.join(args)});"],
    "bulk_store": _call("bulk_store"),
    "tma_load": _tma_load,
    "tma_store": _tma_store,
    "tma_prefetch": _nothing,
    "bulk_commit": _call("bulk_commit"),
    "bulk_wait": _attrs("bulk_wait", 0),
    **{name: _mma(name) for name in ("mma_bf16", "mma_f16", "mma_e4m3", "mma_u8s8")},
    "ldmatrix": _ldmatrix,
    "stmatrix": _stmatrix,
    "wgmma_fence": lambda t, stmt, outs, args: ["emulate::wgmma_fence(T);"],
    "wgmma_commit": _call("wgmma_commit"),
    "wgmma_wait": lambda t, stmt, outs, args: [f"emulate::wgmma_wait(T, {stmt.attrs[0]});"],
    **{name: _wgmma(name) for name in WGMMA},
}


def _description(t, result, types, args):
    swizzle, stride, leading = (int(arg) for arg in args[1:])
    return f"({descriptor_bits(swizzle, stride, leading):#x}ull | (u64)((zse_shared_address(T, {args[0]}) & 0x3ffff) >> 4))"


def _plain(text: str):
    return lambda t, result, types, args: text.format(*args)


def _dimension(field: str):
    return lambda t, result, types, args: f"T->{field}[{args[0].rstrip('lL')}]"


VALUES = {
    "thread_index": _plain("T->index"),
    "lane_index": _plain("T->lane"),
    "warp_index": _plain("T->warp"),
    "cluster_rank": _plain("T->rank"),
    "block_index": _dimension("block_index"),
    "num_blocks": _dimension("num_blocks"),
    "prefetch": _plain("(void)0"),
    "prefetch_l2": _plain("(void)0"),
    "popcount": lambda t, result, types, args: f"(({t.c_type(result)})__builtin_popcountll({args[0]}))",
    "lop3": _plain("zse_lop3({}, {}, {}, {})"),
    "prmt": _plain("zse_prmt({}, {}, {})"),
    "smem_desc": _description,
    **{
        name: (lambda t, result, types, args, name=name: f"zse_{name}({', '.join(args)})")
        for name in (
            "fma_bf16x2",
            "mul_bf16x2",
            "add_bf16x2",
            "max_bf16x2",
            "fma_f16x2",
            "mul_f16x2",
            "add_f16x2",
            "sub_f16x2",
        )
    },
}


class EmulateTarget(GpuTarget):
    """One variant as C++ for the emulator, which has the features of the GPU architecture `like`."""

    family = "emulate"
    limits_shared = False  # there are guards between the arrays
    device = "static inline"
    prelude = '#include "emulate.h"\n'
    effects = EFFECTS
    values = VALUES

    def __init__(self, like: str, threads: int = 256, min_blocks: int = 1, cluster: int = 1):
        super().__init__(threads, min_blocks, cluster)
        self.name = f"emulate-{like}"
        self.arch, self.features = features_of(like)
        self.shared_limit = SHARED_LIMIT[like]
        if self.has("simt"):
            self.inline_builtins = mathlib.FUNCTIONS
        self.places: dict[str, int] = {}
        self.arrays: list[tuple[int, int]] = []
        self.tables: dict[str, str] = {}

    def float_bits(self, text: str) -> str:
        return f"zse_float_bits({text})"

    def float_of_bits(self, text: str) -> str:
        return f"zse_float({text})"

    def double_bits(self, text: str) -> str:
        return f"zse_cast<u64>({text})"

    def double_of_bits(self, text: str) -> str:
        return f"zse_cast<f64>((u64){text})"

    def literal(self, value: object) -> str:
        return str(value).lower()

    def scalar_math(self, name: str, elem: ir.Scalar, args: list[str]) -> str:
        if elem.name == "f32":
            return f"{_MATH[name]}({', '.join(args)})"
        if elem.name == "f64":
            if name in ("rsqrt", "reciprocal"):
                return f"(1.0 / {f'sqrt({args[0]})' if name == 'rsqrt' else args[0]})"
            return f"{'exp2' if name == 'exp2' else _MATH[name].removesuffix('f')}({', '.join(args)})"
        return super().scalar_math(name, elem, args)

    # small floats: software, one value at a time

    def widen(self, name: str, source: ir.Type, text: str) -> str:
        if isinstance(source, ir.Scalar):
            return f"zse_f32_of_{name}({text})"
        wide = ir.Vector(ir.F32, source.lanes)
        return self.lanewise(f"f32_of_{name}", wide, [source], lambda v: f"zse_f32_of_{name}({v[0]})", [text])

    def narrow(self, name: str, type: ir.Type, text: str) -> str:
        if isinstance(type, ir.Scalar):
            return f"zse_{name}_of_f32({text})"
        return self.lanewise(
            f"{name}_of_f32", type, [ir.Vector(ir.F32, type.lanes)], lambda v: f"zse_{name}_of_f32({v[0]})", [text]
        )

    def numeric(self, to: ir.Scalar, of: ir.Scalar, text: str) -> str:
        return f"zse_convert<{to.name}, {of.name}>({text})"

    # memory

    def load(self, expr: ir.Load) -> str:
        return f"zse_load_{expr.pointer.type.space}<{self.c_type(expr.type)}>(T, {self.expr(expr.pointer)})"

    def store(self, stmt: ir.Store) -> str:
        ctype = self.c_type(stmt.value.type)
        return f"zse_store_{stmt.pointer.type.space}<{ctype}>(T, {self.expr(stmt.pointer)}, {self.expr(stmt.value)})"

    def reserve(self, nbytes: int, align: int) -> int:
        self.shared_bytes += GUARD if self.shared_bytes else 0
        offset = super().reserve(nbytes, max(align, 16))
        self.arrays.append((offset, nbytes))
        return offset

    def shared_array(self, var: ir.Var, offset: int, count: int) -> str:
        return f"{self.declared(var)} = ({self.c_type(var.type)})(T->shared + {offset})"

    def local_array(self, var: ir.Var, count: int) -> str:
        return f"alignas(64) {var.type.elem.name} {var.name}[{count}]"

    # statements

    def placed(self, stmt: ir.Stmt, indent: str) -> list[str]:
        place = f"{stmt.path}:{stmt.line}"
        mark = [] if place == self.place else [f"{indent}T->at = {self.places.setdefault(place, len(self.places))};"]
        self.place = place
        lines = self.statement(stmt, indent)
        if isinstance(stmt, ir.For | ir.While | ir.If):
            self.place = ""  # where control comes from is not known after it
        return mark + lines

    def statement(self, stmt: ir.Stmt, indent: str) -> list[str]:
        if isinstance(stmt, ir.If):
            inner = indent + "  "
            lines = [f"{indent}if ({self.expr(stmt.condition)}) {{", *self.statements(stmt.then, inner)]
            if stmt.otherwise:
                self.place = ""
                lines += [indent + "} else {", *self.statements(stmt.otherwise, inner)]
            return [*lines, indent + "}"]
        return super().statement(stmt, indent)

    def statements(self, body: list[ir.Stmt], indent: str) -> list[str]:
        if body and indent != "  ":
            self.place = ""  # a loop's body is entered from its end as well
        return super().statements(body, indent)

    def for_loop(self, stmt: ir.For, indent: str) -> list[str]:
        lines = super().for_loop(stmt, indent)
        return lines[1:] if stmt.unroll is not None else lines

    # tables

    def _places(self, name: str, fragment: fragments.Fragment, lanes: int) -> str:
        rows = ", ".join(f"{{{r},{c}}}" for lane in fragment.table(lanes) for r, c in lane)
        self.tables.setdefault(name, f"static const u8 {name}[][2] = {{{rows}}};")
        return f"{{{name}, {fragment.per_lane}, {fragment.bits}, {fragment.rows}, {fragment.columns}}}"

    def mma_table(self, name: str) -> str:
        table = fragments.MMA[name]
        parts = [self._places(f"zse_{name}_{part}", getattr(table, part), table.lanes) for part in "abc"]
        self.tables.setdefault(
            f"zse_{name}",
            f"static const emulate::Mma zse_{name} = {{{table.m}, {table.n}, {table.k}, {table.lanes}, "
            f'"{table.dtype}", {", ".join(parts)}}};',
        )
        return f"zse_{name}"

    def ldmatrix_table(self, transposed: bool) -> str:
        name = f"zse_ldmatrix{'_trans' if transposed else ''}"
        rows = ", ".join(
            "{" + ",".join(map(str, fragments.ldmatrix(lane, register, half, transposed))) + "}"
            for lane in range(32)
            for register in range(4)
            for half in range(2)
        )
        self.tables.setdefault(name, f"static const u8 {name}[][3] = {{{rows}}};")
        return name

    # one variant

    def parameter(self, index: int, param: ir.Var) -> str:
        if param.type == ir.TENSOR_MAP:
            return f"  const tensormap &{param.name} = *(const tensormap *)args[{index}];"
        if isinstance(param.type, ir.Pointer):
            return f"  {self.declared(param)} = ({self.c_type(param.type)})args[{index}];"
        return f"  {self.declared(param)} = zse_value<{self.c_type(param.type)}>(args[{index}]);"

    def unit(self, function: ir.Function) -> str:
        self.path = function.origin.partition(":")[0]
        self.place = ""
        self.places[function.origin.partition(" ")[0]] = 0
        body = self.statements(function.body, "  ")
        params = [self.parameter(index, param) for index, param in enumerate(function.params)]
        kinds = [
            3 if p.type == ir.TENSOR_MAP else (1 if p.type.const else 2) if isinstance(p.type, ir.Pointer) else 0
            for p in function.params
        ]
        places = ", ".join(f'"{place}"' for place in self.places)
        arrays = ", ".join(f"{{{offset}, {size}}}" for offset, size in self.arrays)
        tail = [
            f"static const i32 zse_params[] = {{{', '.join(map(str, kinds)) or '0'}}};",
            f"static const char *const zse_places[] = {{{places}}};",
            f"static const u32 zse_arrays[][2] = {{{arrays or '{0, 0}'}}};",
            f'extern "C" const emulate::Kernel zse_kernel = {{"{function.symbol}", zse_run, {self.threads}, {self.warp}, {self.cluster}, '
            f"{len(kinds)}, {len(self.places)}, {len(self.arrays)}, {self.shared_bytes}, zse_arrays, zse_params, zse_places}};",
            "",
        ]
        return "\n".join(
            [
                self.prelude,
                *self.types.values(),
                "",
                *self.helpers.values(),
                "",
                *self.tables.values(),
                "",
                f"// {function.origin}",
                "static void zse_run(Thread *const T, const u64 *args) {",
                *params,
                *body,
                "}",
                "",
                *tail,
            ]
        )
