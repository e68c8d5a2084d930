"""The emulator's target: C++ of the same IR against csrc/emulate.h, one function that is one thread.

Every load and store goes through a check, every effect through the emulator; `T->at` follows the author's source lines.
"""

import zse.kernel.ir as ir
from zse.kernel import mathlib
from zse.kernel.intrinsics import fragments
from zse.kernel.intrinsics.arithmetic import LIBRARY
from zse.kernel.intrinsics.matrix import WGMMA, descriptor_bits
from zse.kernel.intrinsics.packed import PAIRS
from zse.kernel.targets.gpu import GpuTarget

GUARD = 128  # bytes between shared arrays that nothing may touch

_ATOMICS = {"atomic_add": "ADD", "atomic_max": "MAX", "atomic_min": "MIN", "atomic_cas": "CAS"}


def _shared(expr: ir.Expr) -> str:
    return "true" if expr.type.space == "shared" else "false"


def _array(kind: str, values: list[str]) -> str:
    return f"zse_list<{kind}>({{{', '.join(values)}}})"


def _call(function: str, *more: str):
    """emulate::function(T, arguments, more); compile-time arguments in `more` as {attr[0]}."""

    def body(t, stmt, outs, args):
        shown = [text.format(attr=[t.literal(value) for value in stmt.attrs]) for text in more]
        return f"emulate::{function}({', '.join(['T', *args, *shown])});"

    return body


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
        return f"zse_atomic<{t.c_type(type)}>(T, {args[0]}, {_shared(stmt.args[0])}, emulate::ADD, {args[1]});"
    lanes = " ".join(
        f"zse_atomic<f32>(T, {args[0]} + {i}, false, emulate::ADD, zse_sum.v[{i}]);" for i in range(type.lanes)
    )
    return f"{{ const {t.c_type(type)} zse_sum = {args[1]}; {lanes} }}"


def _acquire(t, stmt, outs, args):
    ctype = t.c_type(stmt.outs[0].type)
    return f"zse_value<{ctype}>(emulate::acquire(T, {args[0]}, {_shared(stmt.args[0])}, sizeof({ctype})))"


def _release(t, stmt, outs, args):
    ctype = t.c_type(stmt.args[1].type)
    return f"emulate::release(T, {args[0]}, {_shared(stmt.args[0])}, sizeof({ctype}), zse_slot<{ctype}>({args[1]}));"


def _relaxed_load(t, stmt, outs, args):
    ctype = t.c_type(stmt.outs[0].type)
    elem = t.c_type(getattr(stmt.outs[0].type, "elem", stmt.outs[0].type))
    return f"zse_load_relaxed<{ctype}>(T, {args[0]}, {_shared(stmt.args[0])}, sizeof({elem}))"


def _relaxed_store(t, stmt, outs, args):
    type = stmt.args[1].type
    elem = t.c_type(getattr(type, "elem", type))
    return f"zse_store_relaxed<{t.c_type(type)}>(T, {args[0]}, {_shared(stmt.args[0])}, sizeof({elem}), {args[1]});"


def _copy_async(t, stmt, outs, args):
    size = stmt.attrs[0]
    return f"emulate::copy_async(T, {args[0]}, {args[1]}, {size}, {args[2] if len(args) == 3 else size});"


def _tma_load(t, stmt, outs, args):
    rank, multicast, _ = stmt.attrs
    places = f"{rank}, {_array('i32', args[3 : 3 + rank])}, {args[3 + rank] if multicast else '-1'}"
    return f"emulate::tma_load(T, {', '.join(args[:3])}, {places});"


def _tma_store(t, stmt, outs, args):
    return f"emulate::tma_store(T, {args[0]}, {args[1]}, {stmt.attrs[0]}, {_array('i32', args[2:])});"


def _mma(name: str):
    table = fragments.MMA[name]

    def body(t, stmt, outs, args):
        words = table.a.per_lane * table.a.bits // 32
        acc = _array("f32 *", [f"(f32 *)&{out}" for out in outs])
        operands = f"{_array('u32', args[:words])}, {_array('u32', args[words:])}"
        return f"emulate::mma(T, {t.mma_table(name)}, {acc}, {operands});"

    return body


def _matrices(function: str):
    """ldmatrix and stmatrix: an address, how many, whether transposed, the registers, the table of places."""

    def body(t, stmt, outs, args):
        held = _array("u32 *", [f"&{out}" for out in outs]) if outs else _array("u32", args[1:])
        count, trans = len(outs or args[1:]), t.literal(stmt.attrs[0])
        return f"emulate::{function}(T, {args[0]}, {count}, {trans}, {held}, {t.ldmatrix_table(stmt.attrs[0])});"

    return body


def _wgmma(name: str):
    def body(t, stmt, outs, args):
        n, in_registers, trans_a, trans_b = stmt.attrs
        acc = _array("f32 *", [f"&{out}" for out in outs])
        a = f"{_array('u32', args[:4])}, 0" if in_registers else f"nullptr, {args[0]}"
        more = f"{args[-2]}, {args[-1]}, {t.literal(trans_a)}, {t.literal(trans_b)}"
        return f"emulate::wgmma(T, {list(WGMMA).index(name)}, {acc}, {n}, {a}, {more});"

    return body


def _description(t, result, types, args):
    swizzle, stride, leading = (int(arg) for arg in args[1:])
    return f"({descriptor_bits(swizzle, stride, leading):#x}ull | (u64)((zse_shared_address(T, {args[0]}) & 0x3ffff) >> 4))"


def _dimension(field: str):
    return lambda t, result, types, args: f"T->{field}[{args[0].rstrip('lL')}]"


# Intrinsic → its text, of effects and of values (kernel/intrinsics/row.py).
BODIES = {
    **{
        name: _call(name)
        for name in (
            "barrier",
            "warp_barrier",
            "cluster_barrier",
            "fence",
            "fence_async",
            "grid_wait",
            "grid_launch_dependents",
            "copy_commit",
            "copy_arrive",
            "mbarrier_init",
            "mbarrier_init_fence",
            "mbarrier_wait",
            "bulk_copy",
            "bulk_store",
            "bulk_commit",
            "wgmma_commit",
        )
    },
    "named_barrier": _call("named_barrier", "{attr[0]}", "true"),
    "named_arrive": _call("named_barrier", "{attr[0]}", "false"),
    "load_acquire": _acquire,
    "store_release": _release,
    "load_relaxed": _relaxed_load,
    "store_relaxed": _relaxed_store,
    **{name: _exchange(name.upper()) for name in ("shuffle", "shuffle_xor", "shuffle_up", "shuffle_down")},
    "ballot": _vote("BALLOT"),
    "warp_top": "(u32)emulate::exchange(T, emulate::WARP_TOP, {0}, 0)",
    "warp_total": "(i32)emulate::exchange(T, emulate::WARP_TOTAL, (u32){0}, 0)",
    "any_thread": _vote("ANY"),
    "all_threads": _vote("ALL"),
    **{name: _atomic(kind) for name, kind in _ATOMICS.items()},
    "atomic_accumulate": _accumulate,
    "transpose_8x8": "zse_transpose(T, {0})",
    "set_max_registers": "",
    "clock": "(i64)++T->ticks",
    "copy_async": _copy_async,
    "copy_wait": _call("copy_wait", "{attr[0]}"),
    "mbarrier_arrive": _call("mbarrier_arrive", "-1", "0"),
    "mbarrier_arrive_remote": _call("mbarrier_arrive", "0"),
    "mbarrier_expect": "emulate::mbarrier_arrive(T, {0}, -1, {1});",
    "tma_load": _tma_load,
    "tma_store": _tma_store,
    "tma_prefetch": "",
    "bulk_wait": _call("bulk_wait", "{attr[0]}"),
    **{name: _mma(name) for name in ("mma_bf16", "mma_f16", "mma_e4m3", "mma_u8s8")},
    "ldmatrix": _matrices("ldmatrix"),
    "stmatrix": _matrices("stmatrix"),
    "wgmma_fence": "emulate::wgmma_fence(T);",
    "wgmma_wait": "emulate::wgmma_wait(T, {attr[0]});",
    **{name: _wgmma(name) for name in WGMMA},
    "thread_index": "T->index",
    "lane_index": "T->lane",
    "warp_index": "T->warp",
    "cluster_rank": "T->rank",
    "block_index": _dimension("block_index"),
    "num_blocks": _dimension("num_blocks"),
    "prefetch": "(void)0",
    "prefetch_l2": "(void)0",
    "popcount": lambda t, result, types, args: f"(({t.c_type(result)})__builtin_popcountll({args[0]}))",
    "lop3": "zse_lop3({0}, {1}, {2}, {3})",
    "prmt": "zse_prmt({0}, {1}, {2})",
    "smem_desc": _description,
    **{name: f"zse_{name}({', '.join(f'{{{i}}}' for i in range(PAIRS[name][1]))})" for name in PAIRS},
}


class EmulateTarget(GpuTarget):
    """One variant as C++ for the emulator, which has the features of the GPU architecture `like`."""

    families = ("emulate", "gpu")
    own = BODIES
    limits_shared = False  # there are guards between the arrays
    unrolls = False
    prelude = '#include "emulate.h"\n'
    shared_memory = "T->shared"
    local_align = 64
    float_bits, float_of_bits = "zse_float_bits({})", "zse_float({})"
    double_bits, double_of_bits = "zse_cast<u64>({})", "zse_cast<f64>((u64){})"
    math = {name: f"{function}f" for name, function in LIBRARY.items()} | {
        name: f"zse_{name}" for name in ("exp2", "rsqrt", "reciprocal")
    }
    math64 = LIBRARY | {"rsqrt": "(1.0 / sqrt({}))", "reciprocal": "(1.0 / {})"}

    def __init__(self, like: str, threads: int = 256, min_blocks: int = 1, cluster: int = 1):
        super().__init__(like, threads, min_blocks, cluster)
        self.name = f"emulate-{like}"
        if self.has("simt"):
            self.inline_builtins = mathlib.FUNCTIONS
        self.places: dict[str, int] = {}
        self.arrays: list[tuple[int, int]] = []
        self.tables: dict[str, str] = {}

    def literal(self, value: object) -> str:
        return str(value).lower()

    def widen_one(self, name: str, text: str) -> str:
        return f"zse_f32_of_{name}({text})"

    def narrow_one(self, name: str, text: str) -> str:
        return f"zse_{name}_of_f32({text})"

    def numeric(self, to: ir.Scalar, of: ir.Scalar, text: str) -> str:
        if of.kind == "float" and to.kind != "float":  # which saturates
            return f"zse_convert<{to.name}, {of.name}>({text})"
        # C++ computes with integers below 32 bits as with i32: first the type that it has in the language.
        return f"(({to.name})({of.name})({text}))" if of.bits < 32 else f"(({to.name})({text}))"

    # memory

    def expr_Load(self, expr: ir.Load) -> str:
        return f"zse_load_{expr.pointer.type.space}<{self.c_type(expr.type)}>(T, {self.expr(expr.pointer)})"

    def store(self, stmt: ir.Store) -> str:
        ctype = self.c_type(stmt.value.type)
        return f"zse_store_{stmt.pointer.type.space}<{ctype}>(T, {self.expr(stmt.pointer)}, {self.expr(stmt.value)})"

    def reserve(self, nbytes: int, align: int) -> int:
        self.shared_bytes += GUARD if self.shared_bytes else 0
        offset = super().reserve(nbytes, max(align, 16))
        self.arrays.append((offset, nbytes))
        return offset

    # statements

    def placed(self, stmt: ir.Stmt, indent: str) -> list[str]:
        place = f"{stmt.path}:{stmt.line}"
        mark = [] if place == self.place else [f"{indent}T->at = {self.places.setdefault(place, len(self.places))};"]
        self.place = place
        lines = self.statement(stmt, indent)
        if isinstance(stmt, ir.For | ir.While | ir.If):
            self.place = ""  # where control comes from is not known after it
        return mark + lines

    def statements(self, body: list[ir.Stmt], indent: str) -> list[str]:
        if body and indent != "  ":
            self.place = ""  # a loop's body is entered from its end as well
        return super().statements(body, indent)

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
