"""Matrix units: mma.sync, ldmatrix, wgmma. Which element a register of a lane holds stands in fragments.py."""

import zse.kernel.ir as ir
from zse.kernel.intrinsics.row import Effect, Intrinsic, Plan, StageError, nothing
from zse.kernel.intrinsics.threads import number, pointer_of

# name → (instruction, registers of a, registers of b, type of the sums, feature)
MMA = {
    "mma_bf16": ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", 4, 2, ir.F32, "mma_sync"),
    "mma_f16": ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", 4, 2, ir.F32, "mma_sync"),
    "mma_e4m3": ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", 4, 2, ir.F32, "fp8"),
    "mma_u8s8": ("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32", 4, 2, ir.I32, "mma_sync"),
}


def variables(values: object, count: int, what: str, type: ir.Type = ir.F32) -> tuple[ir.Var, ...]:
    """A list of variables, changed in place."""
    if (
        not isinstance(values, list)
        or len(values) != count
        or any(not isinstance(value, ir.Var) or value.type != type for value in values)
    ):
        raise StageError(f"{what}: a list of {count} {type} variables")
    return tuple(values)


def registers(stager, values: object, count: int, what: str) -> tuple[ir.Expr, ...]:
    """`count` u32 values."""
    if not isinstance(values, list | tuple) or len(values) != count:
        raise StageError(f"{what}: {count} u32 values")
    return tuple(stager.coerce(value, ir.U32, what) for value in values)


def _mma(name: str) -> Effect:
    instruction, num_a, num_b, sums, feature = MMA[name]
    letter = "f" if sums == ir.F32 else "r"

    def plan(stager, acc, a, b) -> Plan:
        return Plan(
            (*registers(stager, a, num_a, f"{name}(): a"), *registers(stager, b, num_b, f"{name}(): b")),
            places=variables(acc, 4, f"{name}(): acc", sums),
        )

    def cuda(t, stmt, outs, args):
        sources = [f"a{i}" for i in range(num_a)] + [f"b{i}" for i in range(num_b)]
        params = ", ".join([f"{sums} &c{i}" for i in range(4)] + [f"u32 {source}" for source in sources])
        held = ", ".join(f'"+{letter}"(c{i})' for i in range(4))
        values = ", ".join(f'"r"({source})' for source in sources)
        text = f"{instruction} {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
        lines = f'{{\n  asm("{text}"\n    : {held}\n    : {values});\n}}'
        t.helpers.setdefault(f"zse_{name}", f"{t.device} void zse_{name}({params}) {lines}")
        return f"zse_{name}({', '.join(outs + args)});"

    return Effect(name, plan, {"cuda": cuda}, feature)


def _ldmatrix(stager, pointer, count, trans=False) -> Plan:
    if count not in (1, 2, 4):
        raise StageError("ldmatrix() loads 1, 2 or 4 matrices")
    return Plan((pointer_of(pointer, "ldmatrix()", "shared"),), (bool(trans),), results=(ir.U32,) * count)


def _ldmatrix_cuda(t, stmt, outs, args):
    count = len(outs)
    places = ", ".join(f"%{i}" for i in range(count))
    results = ", ".join(f'"=r"({out})' for out in outs)
    return (
        f'asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{".trans" if stmt.attrs[0] else ""}.shared.b16 {{{places}}}, '
        f'[%{count}];" : {results} : "r"({t.shared_address(args[0])}) : "memory");'
    )


def _transpose(stager, word) -> Plan:
    return Plan((stager.coerce(word, ir.U32, "transpose_8x8() of a u32"),), results=(ir.U32,))


def _stmatrix(stager, pointer, values, trans=False) -> Plan:
    if not isinstance(values, list | tuple) or len(values) not in (1, 2, 4):
        raise StageError("stmatrix() stores 1, 2 or 4 matrices")
    return Plan(
        (
            pointer_of(pointer, "stmatrix()", "shared", writable=True),
            *registers(stager, values, len(values), "stmatrix()"),
        ),
        (bool(trans),),
    )


def _stmatrix_cuda(t, stmt, outs, args):
    count = len(args) - 1
    places = ", ".join(f"%{i + 1}" for i in range(count))
    values = ", ".join(f'"r"({arg})' for arg in args[1:])
    return (
        f'asm volatile("stmatrix.sync.aligned.m8n8.x{count}{".trans" if stmt.attrs[0] else ""}.shared.b16 [%0], '
        f'{{{places}}};" :: "r"({t.shared_address(args[0])}), {values} : "memory");'
    )


# name → (type in the instruction, k of one instruction, may operands be transposed)
WGMMA = {"wgmma_bf16": ("bf16", 16, True), "wgmma_f16": ("f16", 16, True), "wgmma_e4m3": ("e4m3", 32, False)}


def _wgmma(name: str) -> Effect:
    dtype, depth, transposable = WGMMA[name]

    def plan(stager, acc, a, b, n, accumulate=True, trans_a=False, trans_b=False) -> Plan:
        if number(n, f"{name}(): n", 8, 256) % 8:
            raise StageError(f"{name}(): n is a multiple of 8")
        if (trans_a or trans_b) and not transposable:
            raise StageError(f"{name}(): both operands have k innermost")
        in_registers = isinstance(a, list | tuple)
        if in_registers and trans_a:
            raise StageError(f"{name}(): an operand in registers cannot be transposed")
        operand = (
            registers(stager, a, 4, f"{name}(): a")
            if in_registers
            else (stager.coerce(a, ir.U64, f"{name}(): a is a descriptor or 4 registers"),)
        )
        scale = stager.coerce(accumulate, ir.BOOL, f"{name}(): accumulate")
        return Plan(
            (*operand, stager.coerce(b, ir.U64, f"{name}(): b is a descriptor"), scale),
            (n, in_registers, bool(trans_a), bool(trans_b)),
            places=variables(acc, n // 2, f"{name}(): acc"),
        )

    def cuda(t, stmt, outs, args):
        n, in_registers, trans_a, trans_b = stmt.attrs
        count = n // 2
        acc = ", ".join(f"%{i}" for i in range(count))
        first = count + (4 if in_registers else 1)
        a = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}" if in_registers else f"%{count}"
        trans = (
            "" if not transposable else (f", {int(trans_b)}" if in_registers else f", {int(trans_a)}, {int(trans_b)}")
        )
        text = (
            f"{{ .reg .pred p; setp.ne.b32 p, %{first + 1}, 0; "
            f"wgmma.mma_async.sync.aligned.m64n{n}k{depth}.f32.{dtype}.{dtype} {{{acc}}}, {a}, %{first}, p, 1, 1{trans}; }}"
        )
        operands = [f'"{"r" if in_registers else "l"}"({arg})' for arg in args[:-2]] + [
            f'"l"({args[-2]})',
            f'"r"((i32){args[-1]})',
        ]
        held = ", ".join(f'"+f"({out})' for out in outs)
        return f'asm volatile("{text}"\n  : {held}\n  : {", ".join(operands)});'

    return Effect(name, plan, {"cuda": cuda}, "wgmma")


def _accumulators(accs: tuple, what: str) -> tuple[ir.Var, ...]:
    flat = [value for acc in accs for value in (acc if isinstance(acc, list | tuple) else [acc])]
    if any(not isinstance(value, ir.Var) or value.type not in (ir.F32, ir.U32) for value in flat):
        raise StageError(f"{what}: lists of f32 accumulators (or u32 operands)")
    return tuple(flat)


def _wgmma_fence(stager, *accs) -> Plan:
    return Plan(places=_accumulators(accs, "wgmma_fence()"))


def _wgmma_wait(stager, n, *accs) -> Plan:
    return Plan(attrs=(number(n, "wgmma_wait(): n", 0, 7),), places=_accumulators(accs, "wgmma_wait()"))


def _ordered(text: str):
    """The accumulators pass through the statement, so that no use of theirs is moved across it."""

    def body(t, stmt, outs, args):
        letters = ["f" if var.type == ir.F32 else "r" for var in stmt.outs]
        held = ", ".join(f'"+{letter}"({out})' for letter, out in zip(letters, outs, strict=True))
        return f'asm volatile("{text.format(attr=stmt.attrs)}" : {held} :: "memory");'

    return {"cuda": body}


def _desc_signature(
    pointer: object, swizzle: object = 128, stride: object = 1024, leading: object = 16
) -> ir.Type | str:
    if not isinstance(pointer, ir.Pointer) or pointer.space != "shared":
        return "needs a pointer to shared memory"
    if swizzle not in (0, 32, 64, 128):
        return "the swizzle is 0, 32, 64 or 128 bytes"
    if not isinstance(stride, int) or not isinstance(leading, int) or stride % 16 or leading % 16:
        return "stride and leading are bytes, multiples of 16"
    return ir.U64


def descriptor_bits(swizzle: int, stride: int, leading: int) -> int:
    """The constant part of a shared-memory matrix descriptor (PTX ISA, "Matrix descriptor"): everything but the
    address."""
    return (leading >> 4 & 0x3FFF) << 16 | (stride >> 4 & 0x3FFF) << 32 | {0: 0, 128: 1, 64: 2, 32: 3}[swizzle] << 62


def _desc_cuda(t, result, types, args):
    values = [int(arg.removesuffix("LL")) for arg in args[1:]]
    swizzle, stride, leading = (*values, *(128, 1024, 16)[len(values) :])
    return f"({descriptor_bits(swizzle, stride, leading):#x}ull | (u64)(({t.shared_address(args[0])} & 0x3ffff) >> 4))"


TABLE = (Intrinsic("smem_desc", _desc_signature, {"cuda": _desc_cuda}),)

EFFECTS = (
    *(_mma(name) for name in MMA),
    Effect("ldmatrix", _ldmatrix, {"cuda": _ldmatrix_cuda}, "mma_sync"),
    Effect(
        "transpose_8x8",
        _transpose,
        {"cuda": 'asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"({out[0]}) : "r"({0}));'},
        "mma_sync",
    ),
    Effect("stmatrix", _stmatrix, {"cuda": _stmatrix_cuda}, "wgmma"),
    Effect("wgmma_fence", _wgmma_fence, _ordered("wgmma.fence.sync.aligned;"), "wgmma"),
    Effect(
        "wgmma_commit", nothing, {"cuda": 'asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");'}, "wgmma"
    ),
    Effect("wgmma_wait", _wgmma_wait, _ordered("wgmma.wait_group.sync.aligned {attr[0]};"), "wgmma"),
    *(_wgmma(name) for name in WGMMA),
)
