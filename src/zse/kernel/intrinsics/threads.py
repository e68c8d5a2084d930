"""The threads of a block: where they stand, barriers, warp exchange and votes, atomics, order of memory. GPU families."""

from zse.kernel import ir
from zse.kernel.intrinsics.row import Effect, EffectBody, Intrinsic, Plan, StageError

FULL = "0xffffffffu"  # every lane of a CUDA warp takes part


def pointer_of(value: object, what: str, space: str | None = None, writable: bool = False) -> ir.Expr:
    """The argument if it is a pointer of that address space, else StageError."""
    type = getattr(value, "type", None)
    if not isinstance(type, ir.Pointer):
        raise StageError(f"{what} needs a pointer")
    if space and type.space != space:
        raise StageError(f"{what} needs a pointer to {space} memory, got one to {type.space} memory")
    if writable and type.const:
        raise StageError(f"{what} writes through {type}")
    return value  # type: ignore[return-value]


def number(value: object, what: str, low: int, high: int) -> int:
    """A compile-time integer of a range, else StageError."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise StageError(f"{what} is a compile-time number of {low} to {high}")
    return value


def _index(text: str):
    return {"cuda": lambda t, r, types, a: text}


def _nothing(*args: object) -> ir.Type | str:
    return ir.I32 if not args else "takes no arguments"


def _scalar(value: object, what: str) -> ir.Expr:
    type = getattr(value, "type", None)
    if not isinstance(type, ir.Scalar) or type.bits not in (16, 32, 64):
        raise StageError(f"{what} exchanges a 16-, 32- or 64-bit scalar, got {type or repr(value)}; bitcast it")
    return value  # type: ignore[return-value]


def _shuffle_plan(name: str):
    def plan(stager, value, lane) -> Plan:
        value = _scalar(value, f"{name}()")
        return Plan((value, stager.coerce(lane, ir.I32, f"{name}() counts lanes in i32")), results=(value.type,))

    return plan


def _shuffle_cuda(function: str):
    def body(t, stmt, outs, args):
        if stmt.outs[0].type.bits == 16:
            return f"({t.c_type(stmt.outs[0].type)}){function}({FULL}, (u32){args[0]}, {args[1]})"
        return f"{function}({FULL}, {args[0]}, {args[1]})"

    return {"cuda": body}


def _vote(result: ir.Type):
    def plan(stager, condition) -> Plan:
        return Plan((stager.condition(condition, "a vote"),), results=(result,))

    return plan


def _none(stager) -> Plan:
    return Plan()


def _named(name: str):
    def plan(stager, which, threads) -> Plan:
        return Plan(
            (stager.coerce(which, ir.I32, f"{name}(): the barrier is an i32"),),
            (number(threads, f"{name}(): threads", 32, 1024),),
        )

    return plan


_ATOMIC_TYPES = {
    "atomic_add": ("i32", "u32", "i64", "u64", "f32"),
    "atomic_max": ("i32", "u32", "i64", "u64"),
    "atomic_min": ("i32", "u32", "i64", "u64"),
    "atomic_cas": ("i32", "u32", "i64", "u64"),
}


def _atomic(name: str):
    def plan(stager, pointer, *values) -> Plan:
        pointer = pointer_of(pointer, f"{name}()", writable=True)
        elem = pointer.type.elem
        if elem.name not in _ATOMIC_TYPES[name]:
            raise StageError(f"{name}() of {elem}: {', '.join(_ATOMIC_TYPES[name])}")
        if len(values) != (2 if name == "atomic_cas" else 1):
            raise StageError(
                f"{name}() takes {'the expected and the new value' if name == 'atomic_cas' else 'one value'}"
            )
        return Plan((pointer, *(stager.coerce(value, elem, f"{name}()") for value in values)), results=(elem,))

    return plan


def _atomic_cuda(function: str):
    def body(t, stmt, outs, args):
        name = stmt.outs[0].type.name
        if name != "i64":
            return f"{function}({', '.join(args)})"
        wide = "(unsigned long long *)" if function in ("atomicAdd", "atomicCAS") else "(long long *)"
        values = [f"(u64){arg}" if function in ("atomicAdd", "atomicCAS") else arg for arg in args[1:]]
        return f"(i64){function}({wide}{args[0]}, {', '.join(values)})"

    return {"cuda": body}


def _accumulate(stager, pointer, value) -> Plan:
    pointer = pointer_of(pointer, "atomic_accumulate()", writable=True)
    elem, type = pointer.type.elem, getattr(value, "type", None)
    if isinstance(type, ir.Vector):
        if type.elem != elem or elem != ir.F32 or type.lanes not in (2, 4) or pointer.type.space != "global":
            raise StageError(f"atomic_accumulate() of {type} at {pointer.type}: vectors of 2 or 4 f32 in global memory")
        return Plan((pointer, value))
    if elem.name not in _ATOMIC_TYPES["atomic_add"]:
        raise StageError(f"atomic_accumulate() of {elem}: {', '.join(_ATOMIC_TYPES['atomic_add'])}")
    return Plan((pointer, stager.coerce(value, elem, "atomic_accumulate()")))


def _accumulate_cuda(t, stmt, outs, args):
    type = stmt.args[1].type
    if not isinstance(type, ir.Vector):
        wide = type.name == "i64"
        return [f"atomicAdd({'(unsigned long long *)' if wide else ''}{args[0]}, {'(u64)' if wide else ''}{args[1]});"]
    lanes = [t.lane_text("a", type, i) for i in range(type.lanes)]
    if t.arch >= 90:
        places = ", ".join(f"%{i + 1}" for i in range(type.lanes))
        values = ", ".join(f'"f"({lane})' for lane in lanes)
        body = f'asm volatile("red.global.add.v{type.lanes}.f32 [%0], {{{places}}};" :: "l"(p), {values} : "memory");'
    else:
        body = " ".join(f"atomicAdd(p + {i}, {lane});" for i, lane in enumerate(lanes))
    body = body.replace("{", "{{").replace("}", "}}")
    helper = t.helper(f"accumulate_{type}", f"{{device}} void {{name}}(f32 *p, {t.c_type(type)} a) {{{{ {body} }}}}")
    return [f"{helper}({', '.join(args)});"]


def _acquire(stager, pointer) -> Plan:
    pointer = pointer_of(pointer, "load_acquire()")
    if pointer.type.elem.bits not in (32, 64) or pointer.type.elem.kind == "float":
        raise StageError(f"load_acquire() of {pointer.type.elem}: 32- and 64-bit integers")
    return Plan((pointer,), results=(pointer.type.elem,))


def _release(stager, pointer, value) -> Plan:
    pointer = pointer_of(pointer, "store_release()", writable=True)
    if pointer.type.elem.bits not in (32, 64) or pointer.type.elem.kind == "float":
        raise StageError(f"store_release() of {pointer.type.elem}: 32- and 64-bit integers")
    return Plan((pointer, stager.coerce(value, pointer.type.elem, "store_release()")))


def _acquire_cuda(t, stmt, outs, args):
    bits = stmt.outs[0].type.bits
    letter = "r" if bits == 32 else "l"
    return [f'asm volatile("ld.acquire.gpu.b{bits} %0, [%1];" : "={letter}"({outs[0]}) : "l"({args[0]}) : "memory");']


def _release_cuda(t, stmt, outs, args):
    bits = stmt.args[1].type.bits
    letter = "r" if bits == 32 else "l"
    return [f'asm volatile("st.release.gpu.b{bits} [%0], %1;" :: "l"({args[0]}), "{letter}"({args[1]}) : "memory");']


def _cuda_text(text: str) -> dict[str, EffectBody]:
    return {"cuda": lambda t, stmt, outs, args: [text]}


def _if_has(feature: str, text: str) -> dict[str, EffectBody]:
    return {"cuda": lambda t, stmt, outs, args: [text] if t.has(feature) else []}


def _named_cuda(instruction: str):
    return {
        "cuda": lambda t, stmt, outs, args: [
            f'asm volatile("{instruction} %0, {stmt.attrs[0]};" :: "r"({args[0]}) : "memory");'
        ]
    }


def _registers(stager, direction, count) -> Plan:
    if direction not in ("inc", "dec"):
        raise StageError('set_max_registers("inc" or "dec", count)')
    if number(count, "the number of registers", 24, 256) % 8:
        raise StageError("the number of registers is a multiple of 8")
    return Plan(attrs=(direction, count))


def _registers_cuda(t, stmt, outs, args):
    return [f'asm volatile("setmaxnreg.{stmt.attrs[0]}.sync.aligned.u32 {stmt.attrs[1]};");'] if t.has("wgmma") else []


TABLE = (
    Intrinsic("thread_index", _nothing, "index in the block", _index("(i32)threadIdx.x")),
    Intrinsic("lane_index", _nothing, "index in the warp", _index("(i32)(threadIdx.x & 31)")),
    Intrinsic("warp_index", _nothing, "index of the warp in the block", _index("(i32)(threadIdx.x >> 5)")),
    Intrinsic(
        "cluster_rank",
        _nothing,
        "index of the block in its cluster",
        {
            "cuda": lambda t, r, types, a: (
                t.helper(
                    "cluster_rank",
                    '{device} i32 {name}() {{ u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); '
                    "return (i32)r; }}",
                )
                + "()"
                if t.has("tma")
                else "0"
            )
        },
    ),
)

EFFECTS = (
    Effect("barrier", _none, "all threads of the block", _cuda_text("__syncthreads();")),
    Effect("warp_barrier", _none, "all lanes of the warp", _cuda_text("__syncwarp();")),
    Effect("named_barrier", _named("named_barrier"), "these threads", _named_cuda("bar.sync")),
    Effect("named_arrive", _named("named_arrive"), "arrive without waiting", _named_cuda("bar.arrive")),
    Effect(
        "cluster_barrier",
        _none,
        "all threads of the cluster",
        {
            "cuda": lambda t, stmt, outs, args: [
                'asm volatile("barrier.cluster.arrive.release.aligned;\\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");'
            ]
        },
        "tma",
    ),
    Effect("fence", _none, "order of this thread's accesses for the device", _cuda_text("__threadfence();")),
    Effect("load_acquire", _acquire, "a load that later accesses stay behind", {"cuda": _acquire_cuda}),
    Effect("store_release", _release, "a store that earlier accesses stay before", {"cuda": _release_cuda}),
    Effect("shuffle", _shuffle_plan("shuffle"), "the value of another lane", _shuffle_cuda("__shfl_sync")),
    Effect("shuffle_xor", _shuffle_plan("shuffle_xor"), "of lane ^ mask", _shuffle_cuda("__shfl_xor_sync")),
    Effect("shuffle_up", _shuffle_plan("shuffle_up"), "of lane - n", _shuffle_cuda("__shfl_up_sync")),
    Effect("shuffle_down", _shuffle_plan("shuffle_down"), "of lane + n", _shuffle_cuda("__shfl_down_sync")),
    Effect(
        "ballot",
        _vote(ir.U64),
        "one bit per lane",
        {"cuda": lambda t, stmt, outs, args: f"(u64)__ballot_sync({FULL}, {args[0]})"},
    ),
    Effect(
        "any_thread",
        _vote(ir.BOOL),
        "in the warp",
        {"cuda": lambda t, stmt, outs, args: f"(__any_sync({FULL}, {args[0]}) != 0)"},
    ),
    Effect(
        "all_threads",
        _vote(ir.BOOL),
        "in the warp",
        {"cuda": lambda t, stmt, outs, args: f"(__all_sync({FULL}, {args[0]}) != 0)"},
    ),
    Effect("atomic_add", _atomic("atomic_add"), "old value", _atomic_cuda("atomicAdd")),
    Effect("atomic_accumulate", _accumulate, "atomic_add without the old value", {"cuda": _accumulate_cuda}),
    Effect("atomic_max", _atomic("atomic_max"), "old value", _atomic_cuda("atomicMax")),
    Effect("atomic_min", _atomic("atomic_min"), "old value", _atomic_cuda("atomicMin")),
    Effect("atomic_cas", _atomic("atomic_cas"), "old value", _atomic_cuda("atomicCAS")),
    Effect(
        "grid_wait",
        _none,
        "the kernels before are done",
        _if_has("pdl", 'asm volatile("griddepcontrol.wait;" ::: "memory");'),
    ),
    Effect(
        "grid_launch_dependents",
        _none,
        "the kernel after may start",
        _if_has("pdl", 'asm volatile("griddepcontrol.launch_dependents;" ::: "memory");'),
    ),
    Effect("set_max_registers", _registers, "of the warpgroup", {"cuda": _registers_cuda}),
    Effect(
        "clock",
        lambda stager: Plan(results=(ir.I64,)),
        "cycles",
        {"cuda": lambda t, stmt, outs, args: [f'asm volatile("mov.u64 %0, %%clock64;" : "=l"({outs[0]}));']},
    ),
)
