"""Copies that run beside the threads: cp.async, mbarriers, bulk copies and tensor maps (TMA). PTX ISA, chapters on
these."""

import zse.kernel.ir as ir
from zse.kernel.intrinsics.row import Effect, Plan, StageError, nothing
from zse.kernel.intrinsics.threads import number, pointer_of

# L2 policies as createpolicy makes them for whole accesses.
POLICIES = {"evict_first": "0x12F0000000000000ull", "evict_last": "0x14F0000000000000ull"}


def _asm(text: str, *operands: str) -> str:
    inputs = f":: {', '.join(operands)} :" if operands else ":::"
    return f'asm volatile("{text}" {inputs} "memory");'


def _shared(t, text: str) -> str:
    return f'"r"({t.shared_address(text)})'


def _on(text: str, kinds: str = ""):
    """An instruction on its arguments. kinds: a letter for each: s an address in shared memory, m a tensor map, else
    its register's."""

    def body(t, stmt, outs, args):
        operands = {"s": _shared, "m": lambda t, arg: f'"l"(&{arg})'}
        texts = [operands[k](t, arg) if k in operands else f'"{k}"({arg})' for k, arg in zip(kinds, args, strict=True)]
        return _asm(text.format(attr=stmt.attrs), *texts)

    return {"cuda": body}


def _copy_async(stager, dst, src, size, valid_bytes=None, hint="") -> Plan:
    dst = pointer_of(dst, "copy_async(): the destination", "shared", writable=True)
    src = pointer_of(src, "copy_async(): the source", "global")
    if size not in (4, 8, 16):
        raise StageError("copy_async() copies 4, 8 or 16 bytes")
    if hint not in ("", "stream"):
        raise StageError('copy_async(): the hint is "stream"')
    valid = () if valid_bytes is None else (stager.coerce(valid_bytes, ir.I32, "valid_bytes is an i32"),)
    return Plan((dst, src, *valid), (size, hint))


def _copy_async_cuda(t, stmt, outs, args):
    size, hint = stmt.attrs
    cache, sectors = "cg" if size == 16 else "ca", ".L2::256B" if hint else ""
    tail = ", %2" if len(args) == 3 else ""
    text = f"cp.async.{cache}.shared.global{sectors} [%0], [%1], {size}{tail};"
    return _asm(text, _shared(t, args[0]), f'"l"({args[1]})', *(f'"r"({arg})' for arg in args[2:]))


def _count(name: str, high: int):
    def plan(stager, n) -> Plan:
        return Plan(attrs=(number(n, f"{name}(): n", 0, high),))

    return plan


def _barrier(value: object, name: str) -> ir.Expr:
    pointer = pointer_of(value, f"{name}()", "shared")
    if pointer.type.elem != ir.U64:
        raise StageError(f"{name}() needs a barrier of mbarrier_array(), got {pointer.type}")
    return pointer


def _barrier_plan(name: str, *extra: tuple[str, ir.Type]):
    def plan(stager, barrier, *values) -> Plan:
        if len(values) != len(extra):
            raise StageError(f"{name}() takes a barrier{''.join(', ' + label for label, _ in extra)}")
        return Plan(
            (
                _barrier(barrier, name),
                *(
                    stager.coerce(value, type, f"{name}(): {label}")
                    for value, (label, type) in zip(values, extra, strict=True)
                ),
            )
        )

    return plan


def _wait_cuda(t, stmt, outs, args):
    body = (
        'u32 done; asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" '
        ': "=r"(done) : "r"(barrier), "r"(parity) : "memory"); return done != 0;'
    )
    helper = t.helper("mbarrier_wait", "bool", "u32 barrier, u32 parity", body)
    return f"while (!{helper}({t.shared_address(args[0])}, (u32){args[1]})) {{}}"


def _bulk_copy(stager, dst, src, size, barrier, hint="") -> Plan:
    return Plan(
        (
            pointer_of(dst, "bulk_copy(): the destination", "shared", writable=True),
            pointer_of(src, "bulk_copy(): the source", "global"),
            stager.coerce(size, ir.I32, "bulk_copy(): bytes"),
            _barrier(barrier, "bulk_copy"),
        ),
        (_policy(hint),),
    )


def _policy(hint: object) -> object:
    if hint not in ("", *POLICIES):
        raise StageError(f"the hint is one of {', '.join(POLICIES)}")
    return hint


def _bulk_copy_cuda(t, stmt, outs, args):
    policy = stmt.attrs[0]
    return _asm(
        f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes{'.L2::cache_hint' if policy else ''} "
        f"[%0], [%1], %2, [%3]{', %4' if policy else ''};",
        _shared(t, args[0]),
        f'"l"({args[1]})',
        f'"r"({args[2]})',
        _shared(t, args[3]),
        *([f'"l"({POLICIES[policy]})'] if policy else []),
    )


def _bulk_store(stager, dst, src, size) -> Plan:
    return Plan(
        (
            pointer_of(dst, "bulk_store(): the destination", "global", writable=True),
            pointer_of(src, "bulk_store(): the source", "shared"),
            stager.coerce(size, ir.I32, "bulk_store(): bytes"),
        )
    )


def _map(value: object, name: str) -> ir.Expr:
    if not isinstance(value, ir.Var) or value.type != ir.TENSOR_MAP:
        raise StageError(f"{name}() needs a parameter declared as TensorMap")
    return value


def _coordinates(stager, coords: object, name: str) -> list[ir.Expr]:
    if not isinstance(coords, list | tuple) or not 1 <= len(coords) <= 5:
        raise StageError(f"{name}(): one to five coordinates, the innermost first")
    return [stager.coerce(value, ir.I32, f"{name}(): coordinates are i32") for value in coords]


def _tma_load(stager, dst, map, coords, barrier, multicast=None, hint="") -> Plan:
    mask = () if multicast is None else (stager.coerce(multicast, ir.I32, "multicast is an i32 mask of blocks"),)
    values = _coordinates(stager, coords, "tma_load")
    return Plan(
        (
            pointer_of(dst, "tma_load(): the destination", "shared", writable=True),
            _map(map, "tma_load"),
            _barrier(barrier, "tma_load"),
            *values,
            *mask,
        ),
        (len(values), bool(mask), _policy(hint)),
    )


def _tma_load_cuda(t, stmt, outs, args):
    rank, multicast, policy = stmt.attrs
    places = ", ".join(f"%{3 + i}" for i in range(rank))
    tail, operands, at = "", [f'"r"({arg})' for arg in args[3 : 3 + rank]], 3 + rank
    suffix = ".multicast::cluster" if multicast else ""
    if multicast:
        tail, at = f", %{at}", at + 1
        operands.append(f'"h"((u16){args[3 + rank]})')
    if policy:
        tail, suffix = tail + f", %{at}", suffix + ".L2::cache_hint"
        operands.append(f'"l"({POLICIES[policy]})')
    return _asm(
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes{suffix} "
        f"[%0], [%1, {{{places}}}], [%2]{tail};",
        _shared(t, args[0]),
        f'"l"(&{args[1]})',
        _shared(t, args[2]),
        *operands,
    )


def _tma_store(stager, map, coords, src) -> Plan:
    values = _coordinates(stager, coords, "tma_store")
    return Plan((_map(map, "tma_store"), pointer_of(src, "tma_store(): the source", "shared"), *values), (len(values),))


def _tma_store_cuda(t, stmt, outs, args):
    rank = stmt.attrs[0]
    places = ", ".join(f"%{2 + i}" for i in range(rank))
    return _asm(
        f"cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group [%0, {{{places}}}], [%1];",
        f'"l"(&{args[0]})',
        _shared(t, args[1]),
        *(f'"r"({arg})' for arg in args[2:]),
    )


def _bulk_wait(stager, n, read=True) -> Plan:
    return Plan(attrs=(number(n, "bulk_wait(): n", 0, 63), bool(read)))


def _remote_plan(stager, barrier, rank, relaxed=False) -> Plan:
    name = "mbarrier_arrive_remote"
    if not isinstance(relaxed, bool):
        raise StageError(f"{name}(): relaxed is True or False")
    return Plan((_barrier(barrier, name), stager.coerce(rank, ir.I32, f"{name}(): rank")), (relaxed,))


def _remote_cuda(t, stmt, outs, args):
    text = (
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; "
        f"mbarrier.arrive.{'relaxed' if stmt.attrs[0] else 'release'}.cluster.shared::cluster.b64 _, [remote]; }}"
    )
    return _asm(text, _shared(t, args[0]), f'"r"({args[1]})')


def _barrier_effect(name: str, bodies: dict, *extra: tuple[str, ir.Type]) -> Effect:
    return Effect(name, _barrier_plan(name, *extra), bodies, "tma")


EFFECTS = (
    Effect("copy_async", _copy_async, {"cuda": _copy_async_cuda}, "cp_async"),
    Effect("copy_commit", nothing, _on("cp.async.commit_group;"), "cp_async"),
    Effect("copy_wait", _count("copy_wait", 63), _on("cp.async.wait_group {attr[0]};"), "cp_async"),
    _barrier_effect("mbarrier_init", _on("mbarrier.init.shared::cta.b64 [%0], %1;", "sr"), ("count", ir.I32)),
    Effect(
        "mbarrier_init_fence",
        nothing,
        _on("fence.mbarrier_init.release.cluster;\\nfence.proxy.async.shared::cta;"),
        "tma",
    ),
    _barrier_effect("mbarrier_arrive", _on("mbarrier.arrive.shared::cta.b64 _, [%0];", "s")),
    Effect("mbarrier_arrive_remote", _remote_plan, {"cuda": _remote_cuda}, "tma"),
    _barrier_effect(
        "mbarrier_expect", _on("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;", "sr"), ("bytes", ir.I32)
    ),
    _barrier_effect("mbarrier_wait", {"cuda": _wait_cuda}, ("parity", ir.I32)),
    _barrier_effect("copy_arrive", _on("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];", "s")),
    Effect("bulk_copy", _bulk_copy, {"cuda": _bulk_copy_cuda}, "tma"),
    Effect("bulk_store", _bulk_store, _on("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;", "lsr"), "tma"),
    Effect("tma_load", _tma_load, {"cuda": _tma_load_cuda}, "tma"),
    Effect("tma_store", _tma_store, {"cuda": _tma_store_cuda}, "tma"),
    Effect(
        "tma_prefetch",
        lambda stager, map: Plan((_map(map, "tma_prefetch"),)),
        _on("prefetch.tensormap [%0];", "m"),
        "tma",
    ),
    Effect("bulk_commit", nothing, _on("cp.async.bulk.commit_group;"), "tma"),
    Effect(
        "bulk_wait",
        _bulk_wait,
        {
            "cuda": lambda t, stmt, outs, args: _asm(
                f"cp.async.bulk.wait_group{'.read' if stmt.attrs[1] else ''} {stmt.attrs[0]};"
            )
        },
        "tma",
    ),
    Effect("fence_async", nothing, _on("fence.proxy.async.shared::cta;"), "tma"),
)
