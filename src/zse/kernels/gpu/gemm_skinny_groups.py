"""The integer weights of gemm_skinny: words become operands 128 + q, and a group's sums are scaled when it is complete."""

from typing import Any, NamedTuple

from zse import kernel as zl

BLOCKS = 2  # blocks of 32 columns in a stage of integers
NIBBLES = 0x000F000F
# The bits of 128.0 and of 2048.0, twice; a nibble in their lowest bits counts 1 and 16.
MAGIC_LOW = 0x43004300
MAGIC_HIGH = 0x45004500


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


@zl.inline
def fold(total, acc, ones, scale, shift, BT):
    """A complete group: total += scale * acc + shift * ones."""
    for i in zl.static(range(BT // 2)):
        total[i] = zl.fma(acc[i], scale[i % 4 // 2], zl.fma(ones[i], shift[i % 4 // 2], total[i]))


@zl.inline
def read_group(scales, shifts, scale, offset, at, has_offset, center):
    """f32 scale and shift of the lane's two rows."""
    for y in zl.static(range(2)):
        s = zl.convert(scale[at[y]], zl.f32)
        shifts[y] = s * center
        if has_offset != 0:
            shifts[y] += zl.convert(offset[at[y]], zl.f32)
        scales[y] = s


class Groups(NamedTuple):
    """Scales of integers: of the lane's two rows, now and where they stand, and how far the group has come."""

    scale: Any
    offset: Any
    has_offset: Any
    center: Any
    groups: Any  # scales of a row
    blocks: Any  # of 32 columns of a row
    group_blocks: Any
    scales: Any
    shifts: Any
    at: Any
    state: Any  # [blocks of the group so far, 1 if nothing was added to its sums yet]

    def read(self):
        return (self.scales, self.shifts, self.scale, self.offset, self.at, self.has_offset, self.center)


@zl.inline
def first_group(groups, tile, first, own, row, cols, form):
    """Start a tile at step `first`: the scales of its first group."""
    tiles = form.WG * 4
    last_tile = (cols * (2 if form.GATED else 1) + 15) // 16 - 1
    group = first * BLOCKS // groups.group_blocks
    groups.state[0] = first * BLOCKS % groups.group_blocks
    groups.state[1] = 1
    row_tile = min(tile * (tiles // 2 if form.GATED else tiles) + own, last_tile)
    up_tile = min(tile * (tiles // 2) + own + cols // 16, last_tile)
    inside = group * 16 + row
    groups.at[0] = zl.i64(row_tile) * groups.groups * 16 + inside
    if form.GATED:
        groups.at[1] = zl.i64(up_tile) * groups.groups * 16 + inside
    else:
        groups.at[1] = zl.i64(row_tile) * groups.groups * 16 + (inside + 8)
    read_group(*groups.read())


@zl.inline
def close_group(sums, groups, block, BT):
    """The group is complete: scale it, and start the next."""
    total, acc, ones = sums
    zl.wgmma_wait(0, acc, ones)
    fold(total, acc, ones, groups.scales, groups.shifts, BT)
    groups.state[0] = 0
    groups.state[1] = 1
    if block < groups.blocks:
        for y in zl.static(range(2)):
            groups.at[y] += 16
        read_group(*groups.read())
