"""Integer weights (layout r16) as the 64-row operand of wgmma: words of a stage become bf16 in registers, just before.

A warp multiplies 16 weight rows. Its lane (j = lane % 4, g = lane / 4) needs, of rows g and g + 8, the columns 2j, 2j +
1, 2j + 8 and 2j + 9 of sixteen. In r16 the word (s, row) of a 32-block holds columns 4s .. 4s + 3 in the low nibbles
and 16 + 4s .. in the high ones, so the words s = j / 2 and j / 2 + 2 have what the lane needs: bytes 0, 1 if j is even,
2, 3 if j is odd. r16.py makes bf16 of them: the rounded scale * q + offset.

Of a table's indices (KIND lut4) the lane's two bytes are the columns of both halves: one look-up gives the four
numbers.

gemm_skinny, gemm_experts and gemm_r16 use what is here; `p` is their record of parameters. They have KIND (bits, or
lut4), BLOCKS, HALVES, GATED, BT, tiles, tile_cols, token_bytes, blocks, groups, group_blocks, half_step, center,
has_offset, scale and offset."""

from typing import Any

from zse import kernel as zl
from zse.kernels.gpu.gemm_parts import release
from zse.kernels.gpu.r16 import (
    HIGH_BYTES,
    LUT4,
    WIDE,
    factors,
    four_of,
    pair_bf16,
    q_bytes,
    read_scales,
    selector,
    stage_blocks,
)

FOUND = ((0x7404, 0x7424), (0x7414, 0x7434))  # selectors as of r16.selector() for bytes 0 and 2, 1 and 3
HALF = 64  # columns of activations side by side in a stage: 128 bytes of bf16, the width of the swizzle


def weight_bytes(bits: object, bt: int) -> int:
    """Bytes of 16 weight rows in a stage."""
    return stage_blocks(bits, bt) * (q_bytes(bits) + HIGH_BYTES[bits])


@zl.inline
def assign(places, values):
    """Registers take new values."""
    for i in zl.static(range(len(places))):
        places[i] = values[i]


@zl.inline
def load_words(at, row_step, KIND):
    """The words of a lane for 32 columns: of its two columns' halves (x) and its two rows (y), 2 * x + y. Those of the
    second 16 columns follow (8 bits) or are in the same words (4 to 6)."""
    halves = 2 if KIND == 8 else 1
    return [
        at[h * 64 + x * 32 + y * row_step]
        for h in zl.static(range(halves))
        for x in zl.static(range(2))
        for y in zl.static(range(2))
    ]


@zl.inline
def load_high(at, row_step, KIND):
    """The words of the `high` plane: per row one (5 bits) or two (6 bits)."""
    words = 1 if KIND == 5 else 2 if KIND == 6 else 0
    return [at[h * 16 + y * row_step] for h in zl.static(range(words)) for y in zl.static(range(2))]


@zl.inline
def load_weights(at, bar, step, row_tile, p):
    """Ask for one stage's weights: gates, then ups. Up to 128 tokens none of them is read again."""
    halves = 2 if p.GATED else 1
    count, q_size, high_size = p.tiles // halves, p.BLOCKS * q_bytes(p.KIND), p.BLOCKS * HIGH_BYTES[p.KIND]
    for half in zl.static(range(halves)):
        row = row_tile + half * (p.cols // 16)
        load_plane(p.w_map, at + half * count * q_size, bar, step * (q_size // 4), row, p)
        if high_size > 0:
            to = at + (p.tiles * q_size + half * count * high_size)
            load_plane(p.high_map, to, bar, step * (high_size // 4), row, p)


@zl.inline
def load_plane(plane, to, bar, column, row, p):
    if p.BT <= 128:
        zl.tma_load(to, plane, (column, row), bar, None, "evict_first")
    else:
        zl.tma_load(to, plane, (column, row), bar)


@zl.inline
def load_tokens(at, bar, step, first_token, p):
    """Ask for one stage's activations: halves of 64 columns, one behind the other."""
    for half in zl.static(range(p.BLOCKS // 2)):
        to, place = at + half * (p.BT * HALF * 2), ((step * (p.BLOCKS // 2) + half) * HALF, first_token)
        if p.BT <= 128:
            zl.tma_load(to, p.a_map, place, bar, None, "evict_last")
        else:
            zl.tma_load(to, p.a_map, place, bar)


class LaneWords(zl.Record):
    """What a lane has of the weights: its operands, its words of 32 columns, and where its words stand in a stage."""

    a: Any  # four operands, two for a block: one block's are made while another's are multiplied
    words: Any
    high: Any
    own: Any  # the warp's 16 rows, or those of gates (8 of the 16 rows of a tile)
    own_row: Any
    word: Any
    high_word: Any
    row_step: int  # to the words of the second row
    high_step: int
    step: Any
    pick: Any  # which bytes are its own
    table: Any  # of lut4 (r16.table_of)


@zl.inline
def lane_words(warp, p, table=None):
    lane = zl.lane_index()
    g = lane // 4
    step = zl.u32(lane % 4 // 2)
    pick = selector(zl.u32(lane % 4 % 2 * 2), p.KIND)
    own = warp // 2 if p.GATED else warp
    own_row = warp % 2 * 8 + g if p.GATED else g
    q_size, high_size = p.BLOCKS * q_bytes(p.KIND), p.BLOCKS * HIGH_BYTES[p.KIND]  # bytes of 16 rows
    row_step = p.tiles // 2 * q_size // 4 if p.GATED else 8
    high_step = p.tiles // 2 * high_size // 4 if p.GATED else 8
    word = own * (q_size // 4) + lane % 4 // 2 * 16 + own_row
    high_word = p.tiles * q_size // 4 + (own * (high_size // 4) + own_row)
    a = [[zl.u32(0) for _ in zl.static(range(4))] for i in zl.static(range(4))]
    words = [zl.u32(0) for _ in zl.static(range(8 if p.KIND == 8 else 4))]
    high = [zl.u32(0) for _ in zl.static(range({5: 2, 6: 4}.get(p.KIND, 0)))]
    return LaneWords(a, words, high, own, own_row, word, high_word, row_step, high_step, step, pick, table)


@zl.inline
def read_words(lane, weights, block, p):
    """The lane's words of a block of a stage."""
    assign(lane.words, load_words(weights + (lane.word + block * (q_bytes(p.KIND) // 4)), lane.row_step, p.KIND))
    assign(lane.high, load_high(weights + (lane.high_word + block * (HIGH_BYTES[p.KIND] // 4)), lane.high_step, p.KIND))


@zl.inline
def dequantize(a, lane, now, p):
    """a: the operands of 32 columns, two times four registers, from the lane's words."""
    if p.KIND == LUT4:
        for i in zl.static(range(4)):
            found = four_of(lane.words[i] >> lane.pick, lane.table)
            for half in zl.static(range(2)):
                at = (half if p.HALVES == 2 else 0) * 2 + i % 2
                a[half][i] = pair_bf16(found, None, None, None, FOUND[half], now.factor[at], now.shift[at], p.KIND)
        return
    for i in zl.static(range(4)):
        for half in zl.static(range(2)):
            at = (half if p.HALVES == 2 else 0) * 2 + i % 2
            a[half][i] = pair_bf16(
                lane.words[4 + i if p.KIND == 8 and half == 1 else i],
                lane.high[(half if p.KIND == 6 else 0) * 2 + i % 2] if p.KIND in (5, 6) else None,
                lane.step + zl.u32(i // 2 * 2),
                half == 1,
                lane.pick,
                now.factor[at],
                now.shift[at],
                p.KIND,
            )


class GroupScales(zl.Record):
    """Factors and shifts of the lane's rows for one group, and the scales and offsets of the next, which are on their
    way."""

    factor: Any
    shift: Any
    scales: Any
    offsets: Any
    at: Any  # where the next ones stand
    left: Any  # [blocks of this group to come, blocks of the next]


@zl.inline
def group_scales(p):
    kind = zl.f32 if p.KIND in WIDE else zl.u32
    count = 2 * p.HALVES
    return GroupScales(
        [kind(0) for _ in zl.static(range(count))],
        [kind(0) for _ in zl.static(range(count))],
        [zl.f16(0) for _ in zl.static(range(count))],
        [zl.f16(0) for _ in zl.static(range(count))],
        [zl.i64(0) for _ in zl.static(range(2))],
        [zl.i32(0) for _ in zl.static(range(2))],
    )


@zl.inline
def fetch_scales(now, p):
    fresh = read_scales(p.scale, p.offset, now.at, p.has_offset, p.half_step, p.HALVES)
    assign(now.scales, fresh[0])
    assign(now.offsets, fresh[1])


@zl.inline
def first_scales(now, lane, n, first, p):
    """The scales with which row tile n begins at step `first`."""
    last_tile = (p.cols * (2 if p.GATED else 1) + 15) // 16 - 1
    row_tile = min(n * (p.tile_cols // 16) + lane.own, last_tile)
    up_tile = min(n * (p.tile_cols // 16) + lane.own + p.cols // 16, last_tile)
    inside = first * p.BLOCKS // p.group_blocks * (16 * p.HALVES) + lane.own_row
    now.at[0] = zl.i64(row_tile) * p.groups * 16 + inside
    if p.GATED:
        now.at[1] = zl.i64(up_tile) * p.groups * 16 + inside
    else:
        now.at[1] = zl.i64(row_tile) * p.groups * 16 + (inside + 8)
    fetch_scales(now, p)
    now.left[0] = 0
    now.left[1] = p.group_blocks - first * p.BLOCKS % p.group_blocks


@zl.inline
def next_block(now, block, p):
    """Before a block of 32 columns: the first of a group takes the group's scales, and asks for the next one's."""
    if now.left[0] == 0:
        fresh = factors(now.scales, now.offsets, p.center, p.KIND)
        assign(now.factor, fresh[0])
        assign(now.shift, fresh[1])
        now.left[0] = now.left[1] + 0
        now.left[1] = p.group_blocks + 0
        if block + now.left[0] < p.blocks:
            for y in zl.static(range(2)):
                now.at[y] += 16 * p.HALVES
            fetch_scales(now, p)
    now.left[0] -= 1


@zl.inline
def multiply_tile(acc, lane, now, ring, state, n, first, end, p):
    """acc = the products of steps first .. end of row tile n. state: [slot, parity] of the ring, moved on."""
    first_scales(now, lane, n, first, p)
    base = zl.smem_desc(ring.memory)
    zl.mbarrier_wait(ring.full + state[0], state[1])
    weights = zl.cast_ptr(ring.memory + state[0] * ring.stride + p.token_bytes, zl.u32)
    read_words(lane, weights, 0, p)
    previous = zl.i32(-1)
    for step in range(first, end):
        tokens_desc = base + zl.u64(state[0] * ring.stride // 16)
        next_slot = state[0] + 1 if state[0] + 1 < ring.stages else 0
        next_parity = state[1] ^ 1 if next_slot == 0 else state[1] + 0
        for b in zl.static(range(p.BLOCKS)):
            a, before = lane.a[b % 2 * 2 : b % 2 * 2 + 2], lane.a[2 - b % 2 * 2 : 4 - b % 2 * 2]
            next_block(now, step * p.BLOCKS + b, p)
            dequantize(a, lane, now, p)
            zl.wgmma_fence()
            for half in zl.static(range(2)):
                onto = True if b + half > 0 else step > first
                k = b // 2 * (p.BT * HALF * 2 // 16) + b % 2 * 4 + half * 2
                zl.wgmma_bf16(acc, a[half], tokens_desc + k, p.BT, onto)
            zl.wgmma_commit()
            # The next words arrive while the products run.
            if b + 1 < p.BLOCKS:
                read_words(lane, weights, b + 1, p)
            else:
                if step + 1 < end:
                    zl.mbarrier_wait(ring.full + next_slot, next_parity)
                    weights = zl.cast_ptr(ring.memory + next_slot * ring.stride + p.token_bytes, zl.u32)
                    read_words(lane, weights, 0, p)
            # Named here, the other block's operands keep their registers until the products that read them are done.
            zl.wgmma_wait(1, *before)
            if b == 0:
                if previous >= 0:
                    release(ring.empty + previous, zl.lane_index())
        previous = state[0] + 0
        state[0] = next_slot
        state[1] = next_parity
    zl.wgmma_wait(0, acc)
    release(ring.empty + previous, zl.lane_index())
