"""What the kernels for few tokens share: how weights are copied to shared memory, and the epilogue.

A *unit* is 32 rows, two tiles of 16: neighbours, or, for `gated`, a tile of the gate and the same tile of the up
projection. Lane (g = lane / 4, t = lane % 4) of a warp holds rows 4 (g % 4) ... + 3 of tile g / 4, that is rows g
and g + 8 of two mma. A *chunk* is what a warp copies of a unit at once, into a slot of its ring: CHUNK columns and
their scales. The order of k inside a mma is a permutation, the same for both operands, that makes a lane's weights
contiguous in memory.
"""

from zse import kernel as zl
from zse.kernels.activation import activate

UNIT = 32  # rows of a unit
PITCH = 36  # floats between the tokens of a warp's sums: 32 rows, and no bank conflicts between tokens
LOW = 0x0F0F0F0F
STORE, ACCUMULATE, STORE_BF16, GATED_SILU, GATED_GELU = range(5)  # modes of the epilogue

INTEGERS = ("int4", "int5", "int6", "int8")
MIDDLE = {"int4": 8.0, "int5": 16.0, "int6": 32.0, "int8": 128.0}  # what symmetric schemes subtract
ITEM = {"e4m3": 1, "bf16": 2, "f16": 2, "f32": 4}  # bytes of a dense weight


def pieces(kind: str, chunk: int) -> int:
    """16-byte pieces that a lane copies for a chunk of columns: its four rows' weights."""
    if kind in ITEM:
        return chunk * ITEM[kind] // 16
    return chunk // 32 * {"int4": 1, "int5": 2, "int6": 3, "int8": 2}[kind]


def scale_bytes(kind: str, group: int, chunk: int) -> int:
    """Of the scales of a chunk in a slot, and as many of the offsets; lane t of four holds those of groups t, t + 4."""
    if kind == "e4m3":
        return 128
    return 256 * max(1, chunk // group // 4) if group else 256 if kind in INTEGERS else 0


def slot_bytes(kind: str, group: int, chunk: int) -> int:
    """Of a warp's slot: the pieces of its 32 lanes, then the scales."""
    return pieces(kind, chunk) * 512 + scale_bytes(kind, group, chunk) * (2 if kind in INTEGERS else 1)


def sums_bytes(warps: int, tokens: int) -> int:
    """Where the warps of a block leave their sums of a unit, twice."""
    return 2 * warps * tokens * PITCH * 4


@zl.inline
def low_bits(word, s):
    """The four low (s = 0) or high nibbles of a word as bytes."""
    return (word >> 4) & LOW if s else word & LOW


@zl.inline
def first_row(unit, x, rows, gated):
    """Where tile x (0, 1) of a unit begins."""
    return x * (rows // 2) + unit * 16 if gated != 0 else unit * UNIT + x * 16


def block_bytes(kind: str) -> tuple[int, int]:
    """Of a block of 32 columns and 16 rows: in the plane q, in the plane high."""
    return 512 if kind == "int8" else 256, {"int5": 64, "int6": 128}.get(kind, 0)


def state_of(kind: str) -> int:
    """Pointers that follow a lane's weights: one and one into `high`, or one for each of its four rows."""
    return 2 if kind in INTEGERS else 4


@zl.inline
def point(at, sources, sizes, unit, chunk, lane, KIND, CHUNK):
    """Let the pointers in `at` show where this lane's weights of a chunk of a unit begin."""
    w, high, scale, offset = sources
    rows, width, groups, shift, scaling, gated, symmetric = sizes
    g, t = lane // 4, lane % 4
    row = first_row(unit, g // 4, rows, gated)
    if KIND in INTEGERS:
        q_bytes, high_bytes = block_bytes(KIND)
        block = zl.i64(min(row // 16, (rows + 15) // 16 - 1) * (width // 32) + chunk * (CHUNK // 32))
        at[0] = w + (block * q_bytes + (t * 64 + g % 4 * 16))
        at[1] = high + (block * high_bytes + g % 4 * 16)
    else:
        item = ITEM[KIND]
        for j in zl.static(range(4)):
            at[j] = w + (
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
def copy_chunk(slot, at, sources, sizes, unit, chunk, lane, KIND, GROUP, CHUNK):
    """Start the copies of this lane's weights of a chunk (`at` points there), and of the scales, into a slot of the
    ring."""
    w, high, scale, offset = sources
    rows, width, groups, shift, scaling, gated, symmetric = sizes
    g, t = lane // 4, lane % 4
    whole = chunk * CHUNK + CHUNK <= width
    if KIND in INTEGERS:
        to = slot + ((lane // 16) * 256 + t * 64 + ((g % 4) ^ (t & 2)) * 16)
        last = width // 32 - chunk * (CHUNK // 32) - 1
    else:
        to = slot + lane * 16
        last = (width - chunk * CHUNK) * ITEM[KIND] - t * 16 - 16
    if whole:
        copy_weights(to, at, last, KIND, CHUNK, True)
    else:
        copy_weights(to, at, last, KIND, CHUNK, False)
    if KIND in INTEGERS:
        # Lane t of four copies the scales of groups t, t + 4 of the chunk; class 32 is any multiple of 32, class 0 of
        # the chunk.
        nbytes, step = scale_bytes(KIND, GROUP, CHUNK), GROUP or CHUNK
        tile = min(first_row(unit, g // 4, rows, gated) // 16, (rows + 15) // 16 - 1)
        for s in zl.static(range(nbytes // 256)):
            index = chunk * (CHUNK // step) + min(s * 4 + t, CHUNK // step - 1)
            index = min(index >> shift if GROUP in (0, 32) else index, groups - 1)
            source = zl.i64(tile * groups + index) * 32 + (g % 4) * 8
            to_scale = slot + (pieces(KIND, CHUNK) * 512 + s * 256 + lane * 8)
            zl.copy_async(to_scale, scale + source, 8)
            if symmetric == 0:
                zl.copy_async(to_scale + nbytes, offset + source, 8)
    if KIND == "e4m3":
        if scaling == 2:
            at_block = (first_row(unit, g // 4, rows, gated) // 128) * ((width + 127) // 128) + chunk * CHUNK // 128
            zl.copy_async(slot + (pieces(KIND, CHUNK) * 512 + lane * 4), scale + at_block * 4, 4)


@zl.inline
def copy_next(slot, at, following, sources, sizes, limits, lane, KIND, GROUP, CHUNK, WARPS):
    """Start the copies of `following` = [unit, chunk], the next that this warp needs, and move it on."""
    warp, chunks, units = limits
    if following[0] < units:
        copy_chunk(slot, at, sources, sizes, following[0], following[1], lane, KIND, GROUP, CHUNK)
        following[1] += WARPS
        if following[1] < chunks:
            if KIND in INTEGERS:
                q_bytes, high_bytes = block_bytes(KIND)
                at[0] = at[0] + WARPS * (CHUNK // 32) * q_bytes
                at[1] = at[1] + WARPS * (CHUNK // 32) * high_bytes
            else:
                for j in zl.static(range(4)):
                    at[j] = at[j] + WARPS * CHUNK * ITEM[KIND]
        else:
            following[0] += zl.num_blocks(0)
            following[1] = warp + 0
            point(at, sources, sizes, following[0], following[1], lane, KIND, CHUNK)
    zl.copy_commit()


@zl.inline
def load_scales(slot, lane, p, symmetric, KIND, GROUP, CHUNK):
    """The scales and offsets of this lane's four rows for group p of the chunk, f32."""
    source = lane if GROUP == 0 else lane // 4 * 4 + p % 4
    at = slot + (pieces(KIND, CHUNK) * 512 + p // 4 * 256 + source * 8)
    scales = zl.convert(zl.load(zl.cast_ptr(at, zl.f16), 4), zl.f32)
    offsets = [scales[q] * -MIDDLE[KIND] for q in zl.static(range(4))]
    if symmetric == 0:
        stored = zl.convert(zl.load(zl.cast_ptr(at + scale_bytes(KIND, GROUP, CHUNK), zl.f16), 4), zl.f32)
        for q in zl.static(range(4)):
            offsets[q] = stored[q]
    return scales, offsets


@zl.inline
def row_factor(scale, row, scaling, KIND):
    """What a row's sum is multiplied by in the end."""
    if KIND == "e4m3":
        factors = zl.cast_ptr(scale, zl.f32)
        return zl.f32(1) if scaling == 2 else factors[row if scaling == 0 else 0]
    return zl.f32(1)


@zl.inline
def finish_unit(sums, unit, tokens, first_token, scale, bias, out, sizes, has_bias, mode, KIND, WARPS, TOKENS):
    """Add the warps' sums [WARPS][TOKENS][PITCH] of a unit in their order, and write its rows for `tokens` tokens."""
    rows, width, groups, shift, scaling, gated, symmetric = sizes
    bits = zl.i32(4) if gated != 0 else zl.i32(5)
    num_rows = rows // 2 if gated != 0 else rows
    for i in range(zl.thread_index(), tokens << bits, zl.target.threads):
        token, r = i >> bits, i & ((1 << bits) - 1)
        row = (unit << bits) + r
        if row < num_rows:
            at_sum = sums + (token * PITCH + r)
            total = at_sum[0]
            for n in zl.static(range(1, WARPS)):
                total += at_sum[n * (TOKENS * PITCH)]
            total = total * row_factor(scale, row, scaling, KIND)
            if has_bias != 0:
                total += bias[row]
            at_out = zl.i64(first_token + token) * num_rows + row
            if mode == STORE:
                out[at_out] = total
            elif mode == ACCUMULATE:
                out[at_out] = out[at_out] + total
            else:
                if gated != 0:
                    up = at_sum[16]
                    for n in zl.static(range(1, WARPS)):
                        up += at_sum[n * (TOKENS * PITCH) + 16]
                    up = up * row_factor(scale, row + num_rows, scaling, KIND)
                    if has_bias != 0:
                        up += bias[row + num_rows]
                    total = (activate(total, "gelu_tanh") if mode == GATED_GELU else activate(total, "silu")) * up
                to = zl.cast_ptr(out, zl.bf16)
                to[at_out] = zl.convert(total, zl.bf16)
