"""The integer weights of gemm_skinny: words become operands 128 + q, and a group's sums are scaled when it is complete."""

from typing import Any

from zse import kernel as zl

BLOCKS = 2  # blocks of 32 columns in a stage of integers
NIBBLES = 0x000F000F
# The bits of 128.0 and of 2048.0, twice; a nibble in their lowest bits counts 1 and 16.
MAGIC_LOW = 0x43004300
MAGIC_HIGH = 0x45004500
ONES = 0x3F803F80  # two bf16


@zl.inline
def read_words(words, high, at, high_at, row_step, high_step, KIND):
    """A lane's words of 32 columns: of its two steps' rows, in the order of the operand (row, row + 8 at the first
    columns, then at the last); for 8 bits then the same of the second 16 columns. high: per row one (5 bits) or two (6
    bits)."""
    for i in zl.static(range(len(words))):
        words[i] = at[i // 4 * 64 + i % 4 // 2 * 32 + i % 2 * row_step]
    for i in zl.static(range(len(high))):
        high[i] = high_at[i // 2 * 16 + i % 2 * high_step]


@zl.inline
def operands(a, words, high, pick, s, KIND):
    """a: operands of 4 registers; those of the first and of the second 16 columns (8 bits: low nibbles of both, then
    high nibbles). pick: prmt selector of the lane's two bytes of a word. s: the lane's step."""
    for i in zl.static(range(4)):
        if KIND == 8:
            for half in zl.static(range(2)):
                pair = zl.prmt(words[half * 4 + i], zl.u32(0), pick)
                a[half][i] = pair & NIBBLES | MAGIC_LOW
                a[2 + half][i] = (pair >> 4) & NIBBLES | MAGIC_HIGH
        else:
            pair = zl.prmt(words[i], zl.u32(0), pick)
            low, second = pair & NIBBLES | MAGIC_LOW, (pair >> 4) & NIBBLES | MAGIC_LOW
            step = s + zl.u32(i // 2 * 2)
            if KIND == 5:
                bits = zl.prmt(high[i % 2], zl.u32(0), pick)
                low, second = low | bits << (4 - step) & 0x00100010, second | bits >> step & 0x00100010
            if KIND == 6:
                low = low | ((zl.prmt(high[i % 2], zl.u32(0), pick) >> (step * 2)) & 0x00030003) << 4
                second = second | ((zl.prmt(high[2 + i % 2], zl.u32(0), pick) >> (step * 2)) & 0x00030003) << 4
            a[0][i] = low
            a[1][i] = second


class LaneWords(zl.Record):
    """Of a lane: its operands, and where its words of two rows stand in a stage and in the matrix."""

    a: Any  # operands
    unit: Any  # the operand of ones
    words: Any
    high: Any
    word: Any
    high_word: Any
    row_step: int  # to the words of the second row
    high_step: int
    step: Any
    pick: Any  # selector
    own: Any  # tile of 16 rows
    row: Any


@zl.inline
def words_of(warp, lane, p):
    KIND, GATED = p.KIND, p.GATED
    tiles = p.WG * 4
    row = warp % 2 * 8 + lane // 4 if GATED else lane // 4
    own = warp // 2 if GATED else warp
    row_step = tiles // 2 * p.q_size // 4 if GATED else 8
    high_step = tiles // 2 * p.high_size // 4 if GATED else 8
    word = own * (p.q_size // 4) + lane % 4 // 2 * 16 + row
    high_word = tiles * p.q_size // 4 + own * (p.high_size // 4) + row
    step = zl.u32(lane % 4 // 2)
    pick = zl.u32(0x4140) + zl.u32(lane % 2) * 0x0202  # bytes 0, -, 1, - of a word, or 2, -, 3, -
    a = [[zl.u32(0) for _ in zl.static(range(4))] for x in zl.static(range(8 if KIND == 8 else 4))]
    unit = [zl.u32(ONES) for _ in zl.static(range(4))]
    words = [zl.u32(0) for _ in zl.static(range(8 if KIND == 8 else 4))]
    high = [zl.u32(0) for _ in zl.static(range({5: 2, 6: 4}.get(KIND, 0)))]
    return LaneWords(a, unit, words, high, word, high_word, row_step, high_step, step, pick, own, row)


class GroupSums(zl.Record):
    """Sums of a tile and of a group, with the scales of the lane's two rows, and how far the group has come."""

    total: Any
    acc: Any
    ones: Any
    scales: Any
    shifts: Any
    at: Any  # where the scales stand
    state: Any  # [blocks of the group so far, 1 if nothing was added to its sums yet]


@zl.inline
def sums_of(total, acc, ones):
    scales = [zl.f32(0) for _ in zl.static(range(2))]
    shifts = [zl.f32(0) for _ in zl.static(range(2))]
    rows_at = [zl.i64(0) for _ in zl.static(range(2))]
    state = [zl.i32(0) for _ in zl.static(range(2))]
    return GroupSums(total, acc, ones, scales, shifts, rows_at, state)


@zl.inline
def fold(sums):
    """A complete group: total += scale * acc + shift * ones."""
    for i in zl.static(range(len(sums.total))):
        y = i % 4 // 2
        sums.total[i] = zl.fma(sums.acc[i], sums.scales[y], zl.fma(sums.ones[i], sums.shifts[y], sums.total[i]))


@zl.inline
def read_group(sums, p):
    """f32 scale and shift of the lane's two rows."""
    for y in zl.static(range(2)):
        s = zl.convert(p.scale[sums.at[y]], zl.f32)
        sums.shifts[y] = s * p.center
        if p.has_offset != 0:
            sums.shifts[y] += zl.convert(p.offset[sums.at[y]], zl.f32)
        sums.scales[y] = s


@zl.inline
def first_group(sums, tile, first, lane, p):
    """Start a tile at step `first`: the scales of its first group."""
    tiles = p.WG * 4
    last_tile = (p.cols * (2 if p.GATED else 1) + 15) // 16 - 1
    group = first * BLOCKS // p.group_blocks
    sums.state[0] = first * BLOCKS % p.group_blocks
    sums.state[1] = 1
    row_tile = min(tile * (tiles // 2 if p.GATED else tiles) + lane.own, last_tile)
    up_tile = min(tile * (tiles // 2) + lane.own + p.cols // 16, last_tile)
    inside = group * 16 + lane.row
    sums.at[0] = zl.i64(row_tile) * p.groups * 16 + inside
    if p.GATED:
        sums.at[1] = zl.i64(up_tile) * p.groups * 16 + inside
    else:
        sums.at[1] = zl.i64(row_tile) * p.groups * 16 + (inside + 8)
    read_group(sums, p)


@zl.inline
def close_group(sums, block, p):
    """The group is complete: scale it, and start the next."""
    zl.wgmma_wait(0, sums.acc, sums.ones)
    fold(sums)
    sums.state[0] = 0
    sums.state[1] = 1
    if block < p.blocks:
        for y in zl.static(range(2)):
            sums.at[y] += 16
        read_group(sums, p)
