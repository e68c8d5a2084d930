"""The threads of a block: where they stand, barriers, warp exchange and votes, atomics, order of memory. GPU
families."""

import zse.kernel.ir as ir
from zse.kernel.intrinsics.row import Effect, Intrinsic, Plan, StageError, nothing

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


def _no_arguments(*args: object) -> ir.Type | str:
    return ir.I32 if not args else "takes no arguments"


def _scalar(value: object, what: str) -> ir.Expr:
    type = getattr(value, "type", None)
    if not isinstance(type, ir.Scalar) or type.bits not in (16, 32, 64):
        raise StageError(f"{what} exchanges a 16-, 32- or 64-bit scalar, got {type or repr(value)}; bitcast it")
    return value  # type: ignore[return-value]


def _shuffle(name: str, function: str) -> Effect:
    def plan(stager, value, lane) -> Plan:
        value = _scalar(value, f"{name}()")
        return Plan((value, stager.coerce(lane, ir.I32, f"{name}() counts lanes in i32")), results=(value.type,))

    def cuda(t, stmt, outs, args):
        type = stmt.outs[0].type
        narrow, wide = (f"({type})", "(u32)") if type.bits == 16 else ("", "")
        return f"{narrow}{function}({FULL}, {wide}{args[0]}, {args[1]})"

    def simt(t, stmt, outs, args):
        return t.exchange(name, stmt.outs[0].type, args)

    return Effect(name, plan, {"cuda": cuda, "simt": simt})


def _vote(result: ir.Type):
    def plan(stager, condition) -> Plan:
        return Plan((stager.condition(condition, "a vote"),), results=(result,))

    return plan


def _top(stager, value) -> Plan:
    return Plan((stager.coerce(value, ir.U32, "warp_top() compares u32"),), results=(ir.U32,))


def _total(stager, value) -> Plan:
    return Plan((stager.coerce(value, ir.I32, "warp_total() adds i32"),), results=(ir.I32,))


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


def _atomic(name: str, function: str) -> Effect:
    needed, count = ("the expected and the new value", 2) if name == "atomic_cas" else ("one value", 1)

    def plan(stager, pointer, *values) -> Plan:
        pointer = pointer_of(pointer, f"{name}()", writable=True)
        elem = pointer.type.elem
        if elem.name not in _ATOMIC_TYPES[name]:
            raise StageError(f"{name}() of {elem}: {', '.join(_ATOMIC_TYPES[name])}")
        if len(values) != count:
            raise StageError(f"{name}() takes {needed}")
        return Plan((pointer, *(stager.coerce(value, elem, f"{name}()") for value in values)), results=(elem,))

    def cuda(t, stmt, outs, args):
        if stmt.outs[0].type.name != "i64":
            return f"{function}({', '.join(args)})"
        unsigned = function in ("atomicAdd", "atomicCAS")
        wide = "(unsigned long long *)" if unsigned else "(long long *)"
        values = [f"(u64){arg}" if unsigned else arg for arg in args[1:]]
        return f"(i64){function}({wide}{args[0]}, {', '.join(values)})"

    def simt(t, stmt, outs, args):
        return t.atomic(name, stmt.outs[0].type, stmt.args[0].type.space, args)

    return Effect(name, plan, {"cuda": cuda, "simt": simt})


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
        return f"atomicAdd({'(unsigned long long *)' if wide else ''}{args[0]}, {'(u64)' if wide else ''}{args[1]});"
    lanes = [t.lane_text("a", type, i) for i in range(type.lanes)]
    if t.arch >= 90:
        places = ", ".join(f"%{i + 1}" for i in range(type.lanes))
        values = ", ".join(f'"f"({lane})' for lane in lanes)
        body = f'asm volatile("red.global.add.v{type.lanes}.f32 [%0], {{{places}}};" :: "l"(p), {values} : "memory");'
    else:
        body = " ".join(f"atomicAdd(p + {i}, {lane});" for i, lane in enumerate(lanes))
    return t.call(f"accumulate_{type}", "void", f"f32 *p, {t.c_type(type)} a", body, args) + ";"


def _accumulate_simt(t, stmt, outs, args):
    return t.accumulate(stmt.args[1].type, stmt.args[0].type.space, args)


# Scope → what PTX and clang call it. The system is all devices and the host.
_SCOPES = {"device": ("gpu", "AGENT"), "system": ("sys", "SYSTEM")}


def _word(pointer: object, what: str, writable: bool = False) -> ir.Expr:
    pointer = pointer_of(pointer, f"{what}()", writable=writable)
    elem = pointer.type.elem
    if elem.bits not in (32, 64) or elem.kind == "float":
        raise StageError(f"{what}() of {elem}: 32- and 64-bit integers")
    return pointer


def _scope(scope: object, what: str) -> str:
    if scope not in _SCOPES:
        raise StageError(f"{what}(): the scope is {' or '.join(map(repr, _SCOPES))}")
    return scope  # type: ignore[return-value]


def _acquire(stager, pointer, scope="device") -> Plan:
    pointer = _word(pointer, "load_acquire")
    return Plan((pointer,), (_scope(scope, "load_acquire"),), (pointer.type.elem,))


def _release(stager, pointer, value, scope="device") -> Plan:
    pointer = _word(pointer, "store_release", writable=True)
    value = stager.coerce(value, pointer.type.elem, "store_release()")
    return Plan((pointer, value), (_scope(scope, "store_release"),))


def _relaxed_load(stager, pointer, lanes=1) -> Plan:
    pointer = _word(pointer, "load_relaxed")
    elem = pointer.type.elem
    return Plan((pointer,), results=(elem if number(lanes, "the number of lanes", 1, 2) == 1 else ir.Vector(elem, 2),))


def _relaxed_store(stager, pointer, value) -> Plan:
    pointer = _word(pointer, "store_relaxed", writable=True)
    type = getattr(value, "type", None)
    if not isinstance(type, ir.Vector):
        value = stager.coerce(value, pointer.type.elem, "store_relaxed()")
    elif type.elem != pointer.type.elem or type.lanes != 2:
        raise StageError(f"store_relaxed() of {type} at {pointer.type}: a scalar or a vector of 2")
    return Plan((pointer, value))


def _letter(type: ir.Type) -> str:
    return "r" if (type.elem if isinstance(type, ir.Vector) else type).bits == 32 else "l"


def _acquire_cuda(t, stmt, outs, args):
    type, scope = stmt.outs[0].type, _SCOPES[stmt.attrs[0]][0]
    return f'asm volatile("ld.acquire.{scope}.b{type.bits} %0, [%1];" : "={_letter(type)}"({outs[0]}) : "l"({args[0]}) : "memory");'


def _release_cuda(t, stmt, outs, args):
    type, scope = stmt.args[1].type, _SCOPES[stmt.attrs[0]][0]
    return f'asm volatile("st.release.{scope}.b{type.bits} [%0], %1;" :: "l"({args[0]}), "{_letter(type)}"({args[1]}) : "memory");'


def _relaxed_load_cuda(t, stmt, outs, args):
    type = stmt.outs[0].type
    if not isinstance(type, ir.Vector):
        return (
            f'asm volatile("ld.relaxed.sys.b{type.bits} %0, [%1];" : "={_letter(type)}"({outs[0]}) : "l"({args[0]}));'
        )
    places = ", ".join(f'"={_letter(type)}"({t.lane_text(outs[0], type, i)})' for i in range(2))
    return f'asm volatile("ld.relaxed.sys.v2.b{type.elem.bits} {{%0, %1}}, [%2];" : {places} : "l"({args[0]}));'


def _relaxed_store_cuda(t, stmt, outs, args):
    type = stmt.args[1].type
    if not isinstance(type, ir.Vector):
        return f'asm volatile("st.relaxed.sys.b{type.bits} [%0], %1;" :: "l"({args[0]}), "{_letter(type)}"({args[1]}) : "memory");'
    ctype, letter = t.c_type(type), _letter(type)
    values = ", ".join(f'"{letter}"({t.lane_text("a", type, i)})' for i in range(2))
    text = f"st.relaxed.sys.v2.b{type.elem.bits} [%0], {{%1, %2}};"
    body = f'asm volatile("{text}" :: "l"(p), {values} : "memory");'
    return t.call(f"store_relaxed_{type}", "void", f"{type.elem.name} *p, {ctype} a", body, args) + ";"


def _acquire_hip(t, stmt, outs, args):
    return f"__hip_atomic_load({args[0]}, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_{_SCOPES[stmt.attrs[0]][1]})"


def _release_hip(t, stmt, outs, args):
    scope = _SCOPES[stmt.attrs[0]][1]
    return f"__hip_atomic_store({args[0]}, {args[1]}, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_{scope});"


_RELAXED_HIP = "__ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM"


def _relaxed_load_hip(t, stmt, outs, args):
    type = stmt.outs[0].type
    if not isinstance(type, ir.Vector):
        return f"__hip_atomic_load({args[0]}, {_RELAXED_HIP})"
    lanes = [f"__hip_atomic_load(p + {i}, {_RELAXED_HIP})" for i in range(2)]
    ctype = t.c_type(type)
    body = f"{ctype} r; {t.filled(type, lanes)} return r;"
    return t.call(f"load_relaxed_{type}", ctype, f"const {type.elem.name} *p", body, args)


def _relaxed_store_hip(t, stmt, outs, args):
    type = stmt.args[1].type
    if not isinstance(type, ir.Vector):
        return f"__hip_atomic_store({args[0]}, {args[1]}, {_RELAXED_HIP});"
    stores = " ".join(f"__hip_atomic_store(p + {i}, {t.lane_text('a', type, i)}, {_RELAXED_HIP});" for i in range(2))
    return t.call(f"store_relaxed_{type}", "void", f"{type.elem.name} *p, {t.c_type(type)} a", stores, args) + ";"


def _if_has(feature: str, text: str):
    """Nothing on a target without the feature."""
    return {"cuda": lambda t, stmt, outs, args: text.format(attr=stmt.attrs) if t.has(feature) else "", "simt": ""}


def _hip_fences(scope: str, between: str) -> str:
    fence = f'__builtin_amdgcn_fence({{}}, "{scope}");'
    return "\n".join([fence.format("__ATOMIC_RELEASE"), between, fence.format("__ATOMIC_ACQUIRE")])


def _hip_vote(text: str):
    """{0}: the lanes that say yes, {1}: all that vote."""
    return lambda t, stmt, outs, args: text.format(t.ballot(args[0]), t.ballot("true"))


def _cluster_rank(t, result, types, args):
    body = 'u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return (i32)r;'
    return t.call("cluster_rank", "i32", "", body, []) if t.has("tma") else "0"


def _cluster_plan(stager, relaxed=False) -> Plan:
    if not isinstance(relaxed, bool):
        raise StageError("cluster_barrier(): relaxed is True or False")
    return Plan(attrs=(relaxed,))


def _cluster_cuda(t, stmt, outs, args):
    order = "relaxed" if stmt.attrs[0] else "release"
    return (
        f'asm volatile("barrier.cluster.arrive.{order}.aligned;\\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");'
    )


_METAL_MEMORY = "mem_flags::mem_device | mem_flags::mem_threadgroup"


def _registers(stager, direction, count) -> Plan:
    if direction not in ("inc", "dec"):
        raise StageError('set_max_registers("inc" or "dec", count)')
    if number(count, "the number of registers", 24, 256) % 8:
        raise StageError("the number of registers is a multiple of 8")
    return Plan(attrs=(direction, count))


TABLE = (
    Intrinsic("thread_index", _no_arguments, {"cuda": "(i32)threadIdx.x", "simt": "zse_thread"}),
    Intrinsic("lane_index", _no_arguments, {"cuda": "(i32)(threadIdx.x & 31)", "simt": "(zse_thread & 31)"}),
    Intrinsic("warp_index", _no_arguments, {"cuda": "(i32)(threadIdx.x >> 5)", "simt": "(zse_thread >> 5)"}),
    Intrinsic("cluster_rank", _no_arguments, {"cuda": _cluster_rank, "simt": "0"}),
)

EFFECTS = (
    Effect(
        "barrier",
        nothing,
        {
            "cuda": "__syncthreads();",
            "hip": _hip_fences("workgroup", "__builtin_amdgcn_s_barrier();"),
            "metal": f"threadgroup_barrier({_METAL_MEMORY});",
        },
    ),
    Effect(
        "warp_barrier",
        nothing,
        {
            "cuda": "__syncwarp();",
            "hip": _hip_fences("wavefront", "__builtin_amdgcn_wave_barrier();"),
            "metal": f"simdgroup_barrier({_METAL_MEMORY});",
        },
    ),
    Effect(
        "named_barrier",
        _named("named_barrier"),
        {"cuda": 'asm volatile("bar.sync %0, {attr[0]};" :: "r"({0}) : "memory");'},
    ),
    Effect(
        "named_arrive",
        _named("named_arrive"),
        {"cuda": 'asm volatile("bar.arrive %0, {attr[0]};" :: "r"({0}) : "memory");'},
    ),
    Effect("cluster_barrier", _cluster_plan, {"cuda": _cluster_cuda}, "tma"),
    # Kernels leave data and count: acquire and release are enough (PTX ISA, "Memory Consistency Model"). __threadfence() is
    # fence.sc, which waits for longer.
    Effect(
        "fence",
        nothing,
        {
            "cuda": 'asm volatile("fence.acq_rel.gpu;" ::: "memory");',
            "hip": '__builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "agent");',
        },
    ),
    Effect("load_acquire", _acquire, {"cuda": _acquire_cuda, "hip": _acquire_hip}),
    Effect("store_release", _release, {"cuda": _release_cuda, "hip": _release_hip}),
    Effect("load_relaxed", _relaxed_load, {"cuda": _relaxed_load_cuda, "hip": _relaxed_load_hip}),
    Effect("store_relaxed", _relaxed_store, {"cuda": _relaxed_store_cuda, "hip": _relaxed_store_hip}),
    _shuffle("shuffle", "__shfl_sync"),
    _shuffle("shuffle_xor", "__shfl_xor_sync"),
    _shuffle("shuffle_up", "__shfl_up_sync"),
    _shuffle("shuffle_down", "__shfl_down_sync"),
    Effect(
        "ballot",
        _vote(ir.U64),
        {
            "cuda": f"(u64)__ballot_sync({FULL}, {{0}})",
            "hip": _hip_vote("(u64){0}"),
            "metal": "(u64)(simd_vote::vote_t)simd_ballot({0})",
        },
    ),
    Effect("warp_top", _top, {"cuda": f"__reduce_max_sync({FULL}, {{0}})"}, "mma_sync"),
    Effect("warp_total", _total, {"cuda": f"__reduce_add_sync({FULL}, {{0}})"}, "mma_sync"),
    Effect(
        "any_thread",
        _vote(ir.BOOL),
        {"cuda": f"(__any_sync({FULL}, {{0}}) != 0)", "hip": _hip_vote("({0} != 0)"), "metal": "simd_any({0})"},
    ),
    Effect(
        "all_threads",
        _vote(ir.BOOL),
        {"cuda": f"(__all_sync({FULL}, {{0}}) != 0)", "hip": _hip_vote("({0} == {1})"), "metal": "simd_all({0})"},
    ),
    _atomic("atomic_add", "atomicAdd"),
    Effect("atomic_accumulate", _accumulate, {"cuda": _accumulate_cuda, "simt": _accumulate_simt}),
    _atomic("atomic_max", "atomicMax"),
    _atomic("atomic_min", "atomicMin"),
    _atomic("atomic_cas", "atomicCAS"),
    Effect("grid_wait", nothing, _if_has("pdl", 'asm volatile("griddepcontrol.wait;" ::: "memory");')),
    Effect(
        "grid_launch_dependents",
        nothing,
        _if_has("pdl", 'asm volatile("griddepcontrol.launch_dependents;" ::: "memory");'),
    ),
    Effect(
        "set_max_registers",
        _registers,
        _if_has("wgmma", 'asm volatile("setmaxnreg.{attr[0]}.sync.aligned.u32 {attr[1]};");'),
    ),
    Effect(
        "clock",
        lambda stager: Plan(results=(ir.I64,)),
        {
            "cuda": 'asm volatile("mov.u64 %0, %%clock64;" : "=l"({out[0]}));',
            "hip": "(i64)__builtin_readcyclecounter()",
        },
    ),
)
