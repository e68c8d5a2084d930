"""Bits and packed pairs: lop3, prmt, two 16-bit floats in a u32; and the escape to a target's own assembly."""

import zse.kernel.ir as ir
from zse.kernel.intrinsics.row import Effect, Intrinsic, Plan, StageError


def _lop3_signature(a: object, b: object, c: object, table: object) -> ir.Type | str:
    if not isinstance(table, int) or not 0 <= table <= 255:
        return "the table is a compile-time number of 0 to 255"
    return ir.U32 if all(type in (ir.U32,) or isinstance(type, int) for type in (a, b, c)) else "needs u32 values"


def _lop3_cuda(t, result, types, args):
    table = int(args[3])
    body = f'u32 r; asm("lop3.b32 %0, %1, %2, %3, {table:#04x};" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r;'
    return t.call(f"lop3_{table:02x}", "u32", "u32 a, u32 b, u32 c", body, args[:3])


def _words(count: int):
    def signature(*types: object) -> ir.Type | str:
        good = len(types) == count and all(type == ir.U32 or isinstance(type, int) for type in types)
        return ir.U32 if good else f"needs {count} u32 values"

    return signature


# name → (PTX, operands, needs sm_90): arithmetic on two 16-bit floats at once
PAIRS = {
    "fma_bf16x2": ("fma.rn.bf16x2", 3, False),
    "mul_bf16x2": ("mul.rn.bf16x2", 2, True),
    "add_bf16x2": ("add.rn.bf16x2", 2, True),
    "fma_f16x2": ("fma.rn.f16x2", 3, False),
    "mul_f16x2": ("mul.rn.f16x2", 2, False),
    "add_f16x2": ("add.rn.f16x2", 2, False),
    "sub_f16x2": ("sub.rn.f16x2", 2, False),
    "max_bf16x2": ("max.bf16x2", 2, False),
}


def _pair(name: str) -> Intrinsic:
    instruction, count, hopper = PAIRS[name]

    def cuda(t, result, types, args):
        text, values = instruction, list("abc")[:count]
        if hopper and t.arch < 90:  # sm_80 has only the fused form: a * b - 0, a * 1 + b
            text = "fma.rn.bf16x2"
            values = ["a", "b", "0x80008000u"] if name.startswith("mul") else ["a", "0x3f803f80u", "b"]
        places = ", ".join(f"%{i + 1}" for i in range(len(values)))
        operands = ", ".join(f'"r"({value})' for value in values)
        params = ", ".join(f"u32 {value}" for value in "abc"[:count])
        body = f'u32 r; asm("{text} %0, {places};" : "=r"(r) : {operands}); return r;'
        return t.call(name, "u32", params, body, args)

    return Intrinsic(name, _words(count), {"cuda": cuda}, unify=True)


_LETTERS = {
    "f32": "f",
    "i32": "r",
    "u32": "r",
    "i64": "l",
    "u64": "l",
    "f64": "d",
    "u16": "h",
    "i16": "h",
    "bf16": "h",
    "f16": "h",
}


def _letter(type: ir.Type) -> str:
    if isinstance(type, ir.Pointer):
        return "r" if type.space == "shared" else "l"
    if not isinstance(type, ir.Scalar) or type.name not in _LETTERS:
        raise StageError(f"asm(): no register holds {type}; bitcast it to u32 or u64")
    return _LETTERS[type.name]


def _asm_plan(stager, text, result=None, *args, pure=False) -> Plan:
    if not isinstance(text, str) or '"' in text:
        raise StageError("asm(): the text is a compile-time string without quotes")
    values = []
    for value in args:
        if not hasattr(value, "type"):
            raise StageError(f"asm(): {value!r} has no type; write it into the text or convert it")
        _letter(value.type)
        values.append(value)
    if isinstance(result, list):
        if any(not isinstance(place, ir.Var) for place in result):
            raise StageError("asm(): the list holds variables, which are changed in place")
        return Plan(tuple(values), (text, bool(pure)), places=tuple(result))
    results = () if result is None else result if isinstance(result, tuple) else (result,)
    return Plan(tuple(values), (text, bool(pure)), results=tuple(dtype.ir for dtype in results))


def _asm_cuda(t, stmt, outs, args):
    text, pure = stmt.attrs
    mark = "+" if stmt.in_place else "="
    results = ", ".join(f'"{mark}{_letter(var.type)}"({out})' for var, out in zip(stmt.outs, outs, strict=True))
    operands = []
    for value, arg in zip(stmt.args, args, strict=True):
        shared = isinstance(value.type, ir.Pointer) and value.type.space == "shared"
        operands.append(f'"{_letter(value.type)}"({t.shared_address(arg) if shared else arg})')
    escaped = text.replace("\n", "\\n")
    tail = ");" if pure else ' : "memory");'
    return f'asm{"" if pure else " volatile"}("{escaped}" : {results} : {", ".join(operands)}{tail}'


TABLE = (
    Intrinsic("lop3", _lop3_signature, {"cuda": _lop3_cuda}),
    Intrinsic("prmt", _words(3), {"cuda": "__byte_perm({0}, {1}, {2})"}, unify=True),
    *(_pair(name) for name in PAIRS),
)

EFFECTS = (Effect("asm", _asm_plan, {"cuda": _asm_cuda}),)
