"""Matrix products for GPUs without matrix instructions in the language (HIP, Metal): any weight, any number of tokens,
f32 arithmetic.

A block computes 16 rows (gated: 16 of the gate and the same 16 of the up projection) for up to TOKENS tokens. Its warps
take the blocks of 32 columns in turn; lane (r = lane / 2, side = lane % 2) has row r and columns 8 side .. 8 side + 7
and 16 + 8 side .. of a block, as four pieces of 4 columns: in layout r16 a word of the plane has 4 (8 bits) or twice 4
of them. The order of additions is that of the columns whatever else is in the batch, so that a token's result is the
same bits alone and in a batch."""

from zse import kernel as zl
from zse.kernels.gpu.matmul_tiles import ACCUMULATE, LOW, MIDDLE, STORE, gated_value
from zse.kernels.gpu.r16 import HIGH_BYTES, q_bytes
from zse.quant.scheme import FP8_BLOCK

THREADS = 128
TOKENS = 8
ROWS = 16
BITS = {"int4": 4, "int5": 5, "int6": 6, "int8": 8, "lut4": 4}
DENSE = {"bf16": zl.bf16, "f16": zl.f16, "f32": zl.f32, "e4m3": zl.e4m3}


class SimpleProductParams(zl.Record):
    """The parameters of matmul_simple. groups: scales of a row; group_blocks: blocks of 32 columns of a group, 0 for
    groups of 16; scaling (e4m3): 0 a scale per row, 1 one, 2 one per 128 x 128; mode: as of matmul_small."""

    w: zl.Ptr[zl.u8, "const"]
    high: zl.Ptr[zl.u8, "const"]
    scale: zl.Ptr[zl.u8, "const"]
    offset: zl.Ptr[zl.u8, "const"]
    a: zl.Ptr[zl.bf16, "const"]
    bias: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.f32]
    tokens: zl.i32
    rows: zl.i32
    width: zl.i32
    groups: zl.i32
    group_blocks: zl.i32
    symmetric: zl.i32
    scaling: zl.i32
    has_bias: zl.i32
    mode: zl.i32
    KIND: zl.static
    GATED: zl.static

    @property
    def parts(self) -> int:
        """Of a unit: gates and ups."""
        return 2 if self.GATED else 1


class Lut4SimpleParams(SimpleProductParams):
    """table0 .. 3: the 16 numbers of lut4 weights (zse.quant.lut4)."""

    table0: zl.u32
    table1: zl.u32
    table2: zl.u32
    table3: zl.u32


@zl.inline
def number_of(index, p):
    """The table's number, plus 128."""
    low = p.table0 if index < 4 else p.table1
    high = p.table2 if index < 12 else p.table3
    return ((low if index < 8 else high) >> (index % 4 * 8) & 255) ^ 128


@zl.inline
def step_bytes(word, high, step, second, bits):
    """Four weights as bytes of a u32: of step `step` (0 .. 3, run time), or of step + 4 if `second`. word: of that step
    (8 bits) or of both; high: the row's word of the `high` plane (6 bits: the half of it that has this step)."""
    if bits == 8:
        return word
    q = (word >> 4) & LOW if second else word & LOW
    if bits == 5:
        q = q | ((high >> step if second else high << (4 - step)) & 0x10101010)
    if bits == 6:
        q = q | (((high >> (step * 2)) & 0x03030303) << 4)
    return q


@zl.inline
def integer_pieces(tile, block, blocks, r, side, p):
    """The four pieces of lane (r, side) in a block of 32 columns: lists of 4 f32."""
    bits = BITS[p.KIND]
    place = zl.i64(tile * blocks + block)
    at = zl.cast_ptr(p.w, zl.u32) + (place * (q_bytes(bits) // 4) + (side * 32 + r))
    high_at = zl.cast_ptr(p.high, zl.u32) + (place * (HIGH_BYTES[bits] // 4) + r)
    pieces = []
    for half in zl.static(range(2)):
        # Groups of 16 columns have two scales a block: group_blocks is 0.
        group = block * 2 + half if p.group_blocks == 0 else block // max(p.group_blocks, 1)
        scale_at = zl.i64(tile * p.groups + group) * ROWS + r
        step = zl.f32(zl.cast_ptr(p.scale, zl.f16)[scale_at])
        base = step * -MIDDLE[p.KIND]
        if p.symmetric == 0:
            base = zl.f32(zl.cast_ptr(p.offset, zl.f16)[scale_at])
        for i in zl.static(range(2)):
            word = at[half * 64 + i * 16] if bits == 8 else at[i * 16]
            extra = high_at[half * 16 if bits == 6 else 0] if bits in (5, 6) else None
            four = step_bytes(word, extra, zl.u32(side * 2 + i), half == 1, bits)
            values = [(four >> (8 * e)) & 255 for e in zl.static(range(4))]
            if p.KIND == "lut4":
                values = [number_of(value, p) for value in values]
            pieces.append([zl.fma(zl.f32(value), step, base) for value in values])
    return pieces


@zl.inline
def dense_pieces(row, block, side, p):
    """Likewise of a row-major weight; columns that are none become zeros."""
    unit = zl.f32(1)
    if p.KIND == "e4m3":
        if p.scaling == 2:
            unit = zl.cast_ptr(p.scale, zl.f32)[
                row // FP8_BLOCK * ((p.width + (FP8_BLOCK - 1)) // FP8_BLOCK) + block * 32 // FP8_BLOCK
            ]
    at = zl.cast_ptr(p.w, DENSE[p.KIND]) + zl.i64(row) * p.width
    pieces = []
    for half in zl.static(range(2)):
        for i in zl.static(range(2)):
            column = block * 32 + half * 16 + side * 8 + i * 4
            values = zl.f32.x(4)(0)
            if column < p.width:
                values = zl.convert(zl.load(at + column, 4), zl.f32)
            pieces.append([values[e] * unit for e in zl.static(range(4))])
    return pieces


@zl.inline
def multiply(acc, pieces, a_rows, block, width, side):
    """acc[t] += the lane's columns of a block times token t's activations."""
    for x in zl.static(range(4)):
        column = block * 32 + x // 2 * 16 + side * 8 + x % 2 * 4
        if column < width:
            for t in zl.static(range(TOKENS)):
                values = zl.convert(zl.load(a_rows[t] + column, 4), zl.f32)
                for e in zl.static(range(4)):
                    acc[t] = zl.fma(values[e], pieces[x][e], acc[t])


@zl.inline
def factor_of(scale, row, scaling, KIND):
    """What a row's sum is multiplied by in the end."""
    if KIND == "e4m3":
        return zl.f32(1) if scaling == 2 else zl.cast_ptr(scale, zl.f32)[row if scaling == 0 else 0]
    return zl.f32(1)


@zl.inline
def finish_unit(sums, unit, first, here, num_rows, p):
    """Add the warps' sums [warps][parts][TOKENS][ROWS] in their order, and write the unit's rows."""
    warps = zl.target.threads // zl.target.warp
    parts = p.parts
    for i in range(zl.thread_index(), here * ROWS, zl.target.threads):
        token = i // ROWS
        row = unit * ROWS + i % ROWS
        if row < num_rows:
            totals = [zl.f32(0) for part in zl.static(range(parts))]
            for part in zl.static(range(parts)):
                for n in zl.static(range(warps)):
                    totals[part] += sums[(n * parts + part) * (TOKENS * ROWS) + i]
                totals[part] = totals[part] * factor_of(p.scale, row + part * num_rows, p.scaling, p.KIND)
                if p.has_bias != 0:
                    totals[part] += p.bias[row + part * num_rows]
            at = zl.i64(first + token) * num_rows + row
            to = zl.cast_ptr(p.out, zl.bf16)
            if p.GATED:
                to[at] = zl.convert(gated_value(totals[0], totals[1], p.mode, True), zl.bf16)
            elif p.mode == STORE:
                p.out[at] = totals[0]
            elif p.mode == ACCUMULATE:
                p.out[at] = p.out[at] + totals[0]
            else:
                to[at] = zl.convert(totals[0], zl.bf16)


@zl.kernel
def matmul_simple(p: SimpleProductParams):
    """Grid (units of 16 rows, groups of TOKENS tokens)."""
    multiply_tokens(p)


@zl.kernel
def matmul_simple_lut4(p: Lut4SimpleParams):
    """Likewise."""
    multiply_tokens(p)


@zl.inline
def multiply_tokens(p):
    """The body of a kernel."""
    first = zl.block_index(1) * TOKENS
    here = min(p.tokens - first, TOKENS)
    zl.grid_launch_dependents()
    zl.grid_wait()
    a_rows = [p.a + zl.i64(first + min(t, here - 1)) * p.width for t in zl.static(range(TOKENS))]
    multiply_unit(p, first, here, a_rows)


@zl.inline
def multiply_unit(p, first, here, a_rows):
    """The unit of rows block_index(0) for tokens first .. first + here - 1, whose activations begin at a_rows."""
    warps = zl.target.threads // zl.target.warp
    parts = p.parts
    sums = zl.shared_array(zl.f32, warps * parts * TOKENS * ROWS)
    lane = zl.lane_index()
    warp = zl.warp_index()
    r = lane // 2
    side = lane % 2
    unit = zl.block_index(0)
    blocks = (p.width + 31) // 32
    num_rows = p.rows // 2 if p.GATED else p.rows
    acc = [[zl.f32(0) for t in zl.static(range(TOKENS))] for part in zl.static(range(parts))]
    for block in range(warp, blocks, warps):
        for part in zl.static(range(parts)):
            if p.KIND in BITS:
                pieces = integer_pieces(unit + part * (num_rows // ROWS), block, blocks, r, side, p)
            else:
                row = min(unit * ROWS + r, num_rows - 1) + part * num_rows
                pieces = dense_pieces(row, block, side, p)
            multiply(acc[part], pieces, a_rows, block, p.width, side)
    for part in zl.static(range(parts)):
        for t in zl.static(range(TOKENS)):
            total = acc[part][t] + zl.shuffle_xor(acc[part][t], 1)
            if side == 0:
                sums[((warp * parts + part) * TOKENS + t) * ROWS + r] = total
    zl.barrier()
    finish_unit(sums, unit, first, here, num_rows, p)


def symbol_of(kind: str, gated: bool) -> str:
    return f"matmul_simple_{kind}{'_gated' if gated else ''}"


def variants(target) -> list[zl.Variant]:
    """Every kind of weight, plain and gated."""
    return [
        zl.Variant(
            symbol_of(kind, gated),
            matmul_simple_lut4 if kind == "lut4" else matmul_simple,
            {"KIND": kind, "GATED": gated},
            threads=THREADS,
        )
        for kind in (*BITS, *DENSE)
        for gated in (False, True)
    ]
