"""What the kernels for few tokens share: how weights are copied to shared memory, and the epilogue.

A *unit* is 32 rows, two tiles of 16: neighbours, or, for `gated`, a tile of the gate and the same tile of the up
projection. Lane (g = lane / 4, t = lane % 4) of a warp holds rows 4 (g % 4) ... + 3 of tile g / 4, that is rows g
and g + 8 of two mma. A *chunk* is what a warp copies of a unit at once, into a slot of its ring: CHUNK columns and
their scales. The order of k inside a mma is a permutation, the same for both operands, that makes a lane's weights
contiguous in memory.
"""

from typing import Any

from zse import kernel as zl
from zse.kernels.activation import activate, clamped

UNIT = 32  # rows of a unit
PITCH = 36  # floats between the tokens of a warp's sums: 32 rows, and no bank conflicts between tokens
LOW = 0x0F0F0F0F
STORE, ACCUMULATE, STORE_BF16, GATED_SILU, GATED_GELU, GATED_CLAMPED = range(6)  # modes of the epilogue

INTEGERS = ("int4", "int5", "int6", "int8", "lut4", "fp4")
MIDDLE = {"int4": 8.0, "int5": 16.0, "int6": 32.0, "int8": 128.0, "lut4": 128.0}  # what symmetric schemes subtract
ITEM = {"e4m3": 1, "bf16": 2, "f16": 2, "f32": 4}  # bytes of a dense weight


def pieces(kind: str, chunk: int) -> int:
    """16-byte pieces that a lane copies for a chunk of columns: its four rows' weights."""
    if kind in ITEM:
        return chunk * ITEM[kind] // 16
    return chunk // 32 * {"int5": 2, "int6": 3, "int8": 2}.get(kind, 1)


def scale_bytes(kind: str, group: int, chunk: int) -> int:
    """Of the scales of a chunk in a slot, and as many of the offsets; lane t of four holds those of groups t, t + 4."""
    if kind == "e4m3":
        return 128
    return 256 * max(1, chunk // group // 4) if group else 256 if kind in INTEGERS else 0


def slot_bytes(kind: str, group: int, chunk: int) -> int:
    """Of a warp's slot: the pieces of its 32 lanes, then the scales."""
    return pieces(kind, chunk) * 512 + scale_bytes(kind, group, chunk) * (2 if kind in INTEGERS else 1)


def sums_bytes(warps: int, tokens: int, buffers: int = 2) -> int:
    """Where the warps of a block leave their sums of a unit, `buffers` times."""
    return buffers * warps * tokens * PITCH * 4


class ProductParams(zl.Record):
    """The parameters of matmul_small and matmul_few. groups: scales of a row; shift: of class 32 and 0, log2 of a group
    in multiples of 32 or of the chunk (31: the row); scaling (e4m3): 0 a scale per row, 1 one, 2 one per 128 x 128;
    mode: STORE, ..."""

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
    shift: zl.i32
    symmetric: zl.i32
    scaling: zl.i32
    has_bias: zl.i32
    mode: zl.i32
    KIND: zl.static
    GROUP: zl.static
    CHUNK: zl.static
    STAGES: zl.static


class Lut4ProductParams(ProductParams):
    """table0 .. 3: the 16 numbers of lut4 weights (zse.quant.lut4)."""

    table0: zl.u32
    table1: zl.u32
    table2: zl.u32
    table3: zl.u32


class BlockProduct(ProductParams):
    """What a block computes: the kernel's parameters, its tokens, and where it works."""

    gated: Any  # whether the weights are gates and ups
    first_token: Any
    here: Any  # tokens
    lane: Any
    warp: Any
    chunks: Any  # of a row
    units: Any
    ring: Any  # this warp's slots
    sums: Any  # of all warps
    WARPS: int
    TOKENS: int  # most of a block
    table: Any = None  # of lut4: its four words, each byte plus 128
    BUFFERS: int = 2  # of sums
    CLAMPS: bool = False  # the mode may be GATED_CLAMPED: others need no code for it, which every launch would read
    factor: Any = None  # [what act(gate) * up is multiplied with]
    piece: Any = None  # of piece_of(), kept
    HALVES: bool = False  # a unit is one tile of 16 rows, of two experts
    ROLLED: bool = (
        False  # the first copies are a loop: less code, which a launch of a few microseconds mostly waits for
    )

    @property
    def slot_bytes(self) -> int:
        return slot_bytes(self.KIND, self.GROUP, self.CHUNK)


def shifted(p, base, **changes):
    """The fields of `base`, of p or changed."""
    return {name: changes.get(name, getattr(p, name)) for name in base._fields}


@zl.inline
def kept(number):
    """An i32 that stays in a register: what the compiler knows to be made of the thread's index it makes anew in every
    round of a loop (of the 235 instructions of a chunk of int4 130 made addresses)."""
    return zl.shuffle(number, zl.lane_index())


@zl.inline
def place_of(lane, KIND):
    """Where in a slot the pieces are that a lane copies and reads."""
    t = lane % 4
    return (lane // 16) * 256 + t * 64 + ((lane // 4 % 4) ^ (t & 2)) * 16 if KIND in INTEGERS else lane * 16


@zl.inline
def piece_of(p):
    """place_of(), made anew where it was not kept."""
    return place_of(p.lane, p.KIND) if p.piece is None else p.piece


@zl.inline
def product_of(p, TOKENS, table=None):
    """The BlockProduct of this block, with its shared memory."""
    WARPS = zl.target.threads // 32
    nbytes = slot_bytes(p.KIND, p.GROUP, p.CHUNK)
    lane, warp = kept(zl.lane_index()), zl.warp_index()
    chunks = (p.width + (p.CHUNK - 1)) // p.CHUNK
    gated = zl.i32(p.mode >= GATED_SILU)
    units = (p.rows // 2 + 15) // 16 if gated != 0 else (p.rows + (UNIT - 1)) // UNIT
    ring = zl.shared_array(zl.u8, WARPS * p.STAGES * nbytes, align=128)
    sums = zl.shared_array(zl.f32, sums_bytes(WARPS, TOKENS) // 4)
    mine = ring + kept(warp * (p.STAGES * nbytes))
    first_token = zl.block_index(1) * TOKENS
    here = min(p.tokens - first_token, TOKENS)
    return BlockProduct(
        *[getattr(p, name) for name in ProductParams._fields],
        gated,
        first_token,
        here,
        lane,
        warp,
        chunks,
        units,
        mine,
        sums,
        WARPS,
        TOKENS,
        table,
        piece=kept(place_of(lane, p.KIND)),
    )


@zl.inline
def start(p):
    """Start the copies of this warp's first chunks. Returns what they go on with: [unit, chunk] that is copied next,
    STAGES - 1 ahead of what is computed, and pointers there."""
    zl.grid_launch_dependents()
    following = [zl.block_index(0) if p.warp < p.chunks else p.units, p.warp + 0]
    at = [p.w + 0 for _ in zl.static(range(num_pointers(p)))]
    point(at, p, following[0], following[1])
    if p.ROLLED:
        for s in zl.unroll(range(p.STAGES - 1), 1):
            copy_next(p.ring + s * p.slot_bytes, at, following, p)
    else:
        for s in zl.static(range(p.STAGES - 1)):
            copy_next(p.ring + s * p.slot_bytes, at, following, p)
    return following, at


@zl.inline
def stream(p, following, at, acc_count, prepare, multiply, leave, ends=None):
    """The product: every warp's chunks of all units of this block pass its ring and are multiplied. following, at: of
    start().

    prepare, multiply, leave: tuples of an inline function and what else it takes: prepare(unit, chunk), before the
    chunk's weights are waited for, or None; multiply(acc, slot, chunk); leave(acc, sums): this warp's sums of
    the unit. ends: room for what load_ends() loads, of blocks that have a thread for every row and token."""
    slot, free, buffer = zl.i32(0), zl.i32((p.STAGES - 1) * p.slot_bytes), zl.i32(0)
    for unit in range(zl.block_index(0), p.units, zl.num_blocks(0)):
        acc = [zl.f32(0) for _ in zl.static(range(acc_count))]
        if ends is not None:
            load_ends(unit, ends, p)
        for chunk in range(p.warp, p.chunks, p.WARPS):
            if prepare is not None:
                prepare[0](unit, chunk, *prepare[1:])
            zl.copy_wait(p.STAGES - 2)
            zl.warp_barrier()  # every lane's copies are here, and every lane is done with the slot that is filled next
            copy_next(p.ring + free, at, following, p)
            multiply[0](acc, p.ring + slot, chunk, *multiply[1:])
            free = slot + 0
            slot = slot + p.slot_bytes if slot < (p.STAGES - 1) * p.slot_bytes else zl.i32(0)
        leave[0](acc, p.sums + (buffer * p.WARPS + p.warp) * (p.TOKENS * PITCH), *leave[1:])
        zl.barrier()  # with two buffers the only one of a unit: the next unit's sums go to the other one
        finish_unit(p.sums + buffer * (p.WARPS * p.TOKENS * PITCH), unit, p, ends)
        if p.BUFFERS == 2:
            buffer = 1 - buffer
        else:
            zl.barrier()


@zl.inline
def low_bits(word, s):
    """The four low (s = 0) or high nibbles of a word as bytes."""
    return (word >> 4) & LOW if s else word & LOW


@zl.inline
def first_row(unit, x, p):
    """Where tile x (0, 1) of a unit begins."""
    if p.HALVES:
        return unit * 16
    return x * (p.rows // 2) + unit * 16 if p.gated != 0 else unit * UNIT + x * 16


def block_bytes(kind: str) -> tuple[int, int]:
    """Of a block of 32 columns and 16 rows: in the plane q, in the plane high."""
    return 512 if kind == "int8" else 256, {"int5": 64, "int6": 128}.get(kind, 0)


def num_pointers(p) -> int:
    """That follow a lane's weights: one for each of its four rows; of integers one, one into `high`, and two to the tile's
    scales and offsets where registers are not few (a mixture's, of which blocks share a multiprocessor, would spill)."""
    return 2 if p.KIND in INTEGERS and p.piece is None else 4


@zl.inline
def tile_of(unit, p):
    """The tile of this lane's rows, or the last."""
    return min(first_row(unit, p.lane // 4 // 4, p) // 16, (p.rows + 15) // 16 - 1)


@zl.inline
def point(at, p, unit, chunk):
    """Let the pointers in `at` show where this lane's weights of a chunk of a unit begin."""
    rows, width, KIND, CHUNK = p.rows, p.width, p.KIND, p.CHUNK
    g, t = p.lane // 4, p.lane % 4
    row = first_row(unit, g // 4, p)
    if KIND in INTEGERS:
        q_bytes, high_bytes = block_bytes(KIND)
        tile = tile_of(unit, p)
        block = zl.i64(tile * (width // 32) + chunk * (CHUNK // 32))
        at[0] = p.w + (block * q_bytes + (t * 64 + g % 4 * 16))
        at[1] = p.high + (block * high_bytes + g % 4 * 16)
        if num_pointers(p) > 2:
            scales = zl.i64(tile * p.groups) * 32 + (g % 4) * 8
            at[2] = p.scale + scales
            at[3] = p.offset + scales
    else:
        item = ITEM[KIND]
        for j in zl.static(range(4)):
            at[j] = p.w + (
                zl.i64(min(row + (g % 4 * 4 + j), rows - 1)) * (width * item) + (chunk * (CHUNK * item) + t * 16)
            )


@zl.inline
def copy_weights(to, at, last, KIND, CHUNK, WHOLE):
    """The pieces of a chunk. last: of its blocks (integers) or pieces of a row (dense) that exist; what lies behind is
    copied from there once more and multiplied by zero."""
    if KIND in INTEGERS:
        per = CHUNK // 32
        q_bytes, high_bytes = block_bytes(KIND)
        for i in zl.static(range(per)):
            b = i if WHOLE else min(last, i)
            for s in zl.static(range(q_bytes // 256)):
                zl.copy_async(to + (i * (q_bytes // 256) + s) * 512, at[0] + (b * q_bytes + s * 256), 16, hint="stream")
            for s in zl.static(range(high_bytes // 64)):
                zl.copy_async(
                    to + (per + i * (high_bytes // 64) + s) * 512, at[1] + (b * high_bytes + s * 64), 16, hint="stream"
                )
    else:
        per = CHUNK * ITEM[KIND] // 64  # pieces of a row
        for j in zl.static(range(4)):
            for i in zl.static(range(per)):
                zl.copy_async(
                    to + (j * per + i) * 512, at[j] + (i * 64 if WHOLE else min(last, i * 64)), 16, hint="stream"
                )


@zl.inline
def copy_chunk(slot, at, p, unit, chunk):
    """Start the copies of this lane's weights of a chunk (`at` points there), and of the scales, into a slot of the
    ring."""
    width, groups, lane, KIND, GROUP, CHUNK = p.width, p.groups, p.lane, p.KIND, p.GROUP, p.CHUNK
    g, t = lane // 4, lane % 4
    whole = chunk * CHUNK + CHUNK <= width
    to = slot + piece_of(p)
    if KIND in INTEGERS:
        last = width // 32 - chunk * (CHUNK // 32) - 1
    else:
        last = (width - chunk * CHUNK) * ITEM[KIND] - t * 16 - 16
    if whole:
        copy_weights(to, at, last, KIND, CHUNK, True)
    else:
        copy_weights(to, at, last, KIND, CHUNK, False)
    if KIND in INTEGERS:
        # Lane t of four copies the scales of groups t, t + 4 of the chunk; class 32 is any multiple of 32, class 0 of
        # the chunk.
        nbytes, step, kept_scales = scale_bytes(KIND, GROUP, CHUNK), GROUP or CHUNK, num_pointers(p) > 2
        tile = None if kept_scales else tile_of(unit, p)
        for s in zl.static(range(nbytes // 256)):
            index = chunk * (CHUNK // step) + min(s * 4 + t, CHUNK // step - 1)
            index = min(index >> p.shift if GROUP in (0, 32) else index, groups - 1)
            to_scale = slot + (pieces(KIND, CHUNK) * 512 + s * 256 + lane * 8)
            scale, offset = (at[2], at[3]) if kept_scales else (p.scale, p.offset)
            source = zl.i64(index) * 32 if kept_scales else zl.i64(tile * groups + index) * 32 + (g % 4) * 8
            zl.copy_async(to_scale, scale + source, 8)
            if p.symmetric == 0:
                zl.copy_async(to_scale + nbytes, offset + source, 8)
    if KIND == "e4m3":
        if p.scaling == 2:
            at_block = (first_row(unit, g // 4, p) // 128) * ((width + 127) // 128) + chunk * CHUNK // 128
            zl.copy_async(slot + (pieces(KIND, CHUNK) * 512 + lane * 4), p.scale + at_block * 4, 4)
        elif p.HALVES:
            to_factor = slot + (pieces(KIND, CHUNK) * 512 + lane * 4)
            zl.copy_async(to_factor, p.scale + (unit * 16 + lane % 16) * 4, 4)


@zl.inline
def copy_next(slot, at, following, p):
    """Start the copies of `following` = [unit, chunk], the next that this warp needs, and move it on."""
    if following[0] < p.units:
        copy_chunk(slot, at, p, following[0], following[1])
        following[1] += p.WARPS
        if following[1] < p.chunks:
            if p.KIND in INTEGERS:
                q_bytes, high_bytes = block_bytes(p.KIND)
                at[0] = at[0] + p.WARPS * (p.CHUNK // 32) * q_bytes
                at[1] = at[1] + p.WARPS * (p.CHUNK // 32) * high_bytes
            else:
                for j in zl.static(range(4)):
                    at[j] = at[j] + p.WARPS * p.CHUNK * ITEM[p.KIND]
        else:
            following[0] += zl.num_blocks(0)
            following[1] = p.warp + 0
            point(at, p, following[0], following[1])
    zl.copy_commit()


@zl.inline
def load_scales(slot, n, p):
    """The scales and offsets of this lane's four rows for group n of the chunk, f32."""
    KIND, GROUP, CHUNK = p.KIND, p.GROUP, p.CHUNK
    source = p.lane if GROUP == 0 else p.lane // 4 * 4 + n % 4
    at = slot + (pieces(KIND, CHUNK) * 512 + n // 4 * 256 + source * 8)
    scales = zl.convert(zl.load(zl.cast_ptr(at, zl.f16), 4), zl.f32)
    if KIND == "fp4":
        return scales, None
    offsets = [scales[q] * -MIDDLE[KIND] for q in zl.static(range(4))]
    if p.symmetric == 0:
        stored = zl.convert(zl.load(zl.cast_ptr(at + scale_bytes(KIND, GROUP, CHUNK), zl.f16), 4), zl.f32)
        for q in zl.static(range(4)):
            offsets[q] = stored[q]
    return scales, offsets


@zl.inline
def row_factor(p, row):
    """What a row's sum is multiplied by in the end."""
    if p.KIND == "e4m3":
        factors = zl.cast_ptr(p.scale, zl.f32)
        return zl.f32(1) if p.scaling == 2 else factors[row if p.scaling == 0 else 0]
    return zl.f32(1)


@zl.inline
def gated_value(gate, up, mode, CLAMPS):
    """act(gate) * up."""
    result = zl.f32(0)
    if CLAMPS and mode == GATED_CLAMPED:
        result = clamped(gate, up)
    else:
        result = (activate(gate, "gelu_tanh") if mode == GATED_GELU else activate(gate, "silu")) * up
    return result


@zl.inline
def fetch_ends(p):
    """Bring what the end of the first unit reads, a lane each tile, into L2: the bias, and factors of rows."""
    if p.lane < 2:
        row = first_row(zl.block_index(0), p.lane, p)
        if p.has_bias != 0:
            zl.prefetch_l2(p.bias + min(row, p.rows - 1))
        if p.KIND == "e4m3" and p.scaling == 0:
            zl.prefetch_l2(p.scale + min(row, p.rows - 1) * 4)


@zl.inline
def begin_ends(p, TOKENS):
    """Before grid_wait(): room for load_ends(), or None where a block has fewer threads than a unit results."""
    ends = None
    if zl.target.threads >= TOKENS * UNIT:
        ends = [zl.f32(1), zl.f32(1), zl.f32(0), zl.f32(0), zl.f32(0)]
        if p.warp == 0:
            fetch_ends(p)
    return ends


@zl.inline
def load_ends(unit, ends, p):
    """Starts the loads of what finish_unit() needs of this thread's row beside sums, while the weights are multiplied:
    its factor and bias, and those of its up projection; what it is added to."""
    bits = zl.i32(4) if p.gated != 0 else zl.i32(5)
    num_rows = p.rows // 2 if p.gated != 0 else p.rows
    i = zl.thread_index()
    row = (unit << bits) + (i & ((1 << bits) - 1))
    if i < p.here << bits and row < num_rows:
        ends[0] = row_factor(p, row)
        if p.gated != 0:
            ends[1] = row_factor(p, row + num_rows)
        if p.has_bias != 0:
            ends[2] = p.bias[row] + 0.0
            if p.gated != 0:
                ends[3] = p.bias[row + num_rows] + 0.0
        if p.mode == ACCUMULATE:
            ends[4] = p.out[zl.i64(p.first_token + (i >> bits)) * num_rows + row] + 0.0


@zl.inline
def finish_unit(sums, unit, p, ends=None):
    """Add the warps' sums [WARPS][TOKENS][PITCH] of a unit in their order, and write its rows. ends: of load_ends()."""
    rows, gated, mode, out, WARPS, TOKENS = p.rows, p.gated, p.mode, p.out, p.WARPS, p.TOKENS
    bits = zl.i32(4) if gated != 0 else zl.i32(5)
    num_rows = rows // 2 if gated != 0 else rows
    for i in range(zl.thread_index(), p.here << bits, zl.target.threads):
        token, r = i >> bits, i & ((1 << bits) - 1)
        row = (unit << bits) + r
        if row < num_rows:
            at_sum = sums + (token * PITCH + r)
            total = at_sum[0]
            for n in zl.static(range(1, WARPS)):
                total += at_sum[n * (TOKENS * PITCH)]
            total = total * (row_factor(p, row) if ends is None else ends[0])
            if p.has_bias != 0:
                total += p.bias[row] if ends is None else ends[2]
            at_out = zl.i64(p.first_token + token) * num_rows + row
            if mode == STORE:
                out[at_out] = total
            elif mode == ACCUMULATE:
                out[at_out] = (out[at_out] if ends is None else ends[4]) + total
            else:
                if gated != 0:
                    up = at_sum[16]
                    for n in zl.static(range(1, WARPS)):
                        up += at_sum[n * (TOKENS * PITCH) + 16]
                    up = up * (row_factor(p, row + num_rows) if ends is None else ends[1])
                    if p.has_bias != 0:
                        up += p.bias[row + num_rows] if ends is None else ends[3]
                    total = gated_value(total, up, mode, p.CLAMPS)
                    if p.factor is not None:
                        total = total * p.factor[0]
                to = zl.cast_ptr(out, zl.bf16)
                to[at_out] = zl.convert(total, zl.bf16)
