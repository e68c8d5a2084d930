"""out[m, n] = sum_k a[m, k] * w[n, k] for integer weights (layout r16, 4, 5, 6 or 8 bits) on Hopper's tensor cores.

The weights stay integers until they stand in registers: a wgmma takes its 64-row operand from registers, so the weights
are that operand, dequantized just before, and the tokens are the other one, in shared memory. That makes out
transposed: a thread has two weight rows and BT / 4 tokens of each. No bf16 copy of the weights is written or read, and
a tile costs what a bf16 tile costs.

A warp multiplies 16 weight rows. Its lane (j = lane % 4, g = lane / 4) needs, of rows g and g + 8, the columns 2j, 2j +
1, 2j + 8 and 2j + 9 of sixteen. In r16 the word (s, row) of a 32-block holds columns 4s .. 4s + 3 in the low nibbles
and 16 + 4s .. in the high ones, so the words s = j / 2 and j / 2 + 2 have what the lane needs: bytes 0, 1 if j is even,
2, 3 if j is odd. r16.py makes bf16 of them: the rounded scale * q + offset.

A gated tile gives rows 0 .. 7 of a warp to gates and 8 .. 15 to the same rows' ups, so both meet in a thread. Grid,
ring and split k are those of gemm_wgmma. The idea of feeding wgmma from registers is Machete's (vLLM, 2024).
"""

from typing import Any

from zse import kernel as zl
from zse.kernels.gpu.gemm_parts import put_column, put_gated, release, ring_of, sum_parts, unit_place, units_of
from zse.kernels.gpu.r16 import HIGH_BYTES, factors, pair_bf16, q_bytes, read_scales, selector

DEPTH = 64  # k of a stage: 128 bytes of bf16, the width of the swizzle
SHARED_BYTES = 231_000


def stage_size(bits: int, bt: int, groups: int) -> int:
    """Bytes of a stage: BT tokens and 64 rows of each of `groups` warpgroups, 64 columns."""
    return bt * DEPTH * 2 + groups * 4 * 2 * (q_bytes(bits) + HIGH_BYTES[bits])


def stages(bits: int, bt: int, groups: int) -> int:
    """How many stages fit."""
    return min(8, SHARED_BYTES // -(-stage_size(bits, bt, groups) // 1024 * 1024))


@zl.inline
def assign(places, values):
    """Registers take new values."""
    for i in zl.static(range(len(places))):
        places[i] = values[i]


@zl.inline
def load_words(at, row_step, BITS):
    """The words of a lane for 32 columns: of its two columns' halves (x) and its two rows (y), 2 * x + y. Those of the
    second 16 columns follow (8 bits) or are in the same words (4 to 6)."""
    halves = 2 if BITS == 8 else 1
    return [
        at[h * 64 + x * 32 + y * row_step]
        for h in zl.static(range(halves))
        for x in zl.static(range(2))
        for y in zl.static(range(2))
    ]


@zl.inline
def load_high(at, row_step, BITS):
    """The words of the `high` plane: per row one (5 bits) or two (6 bits)."""
    words = 1 if BITS == 5 else 2 if BITS == 6 else 0
    return [at[h * 16 + y * row_step] for h in zl.static(range(words)) for y in zl.static(range(2))]


class R16Params(zl.Record):
    """The parameters of gemm_r16. cols: columns of out; the weights have as many rows, or twice as many when GATED. blocks =
    K / 32; groups: scales of a row. A tile is BT tokens x WG warpgroups of 64 weight rows (GATED: half gates, half ups).
    WIDE: groups of 64 columns and more, with one scale a step; else there are HALVES scales a block. group_span: blocks, or
    steps if WIDE, of a group (1 for groups of 16). half_step: with two, from the scale of a block's first 16 columns to that
    of the others: 16 for groups of 16, else 0. center: what multiplies the scale so that it can be added to the offset, see
    r16.py. mode, linear, cubic, partial, counters: as in gemm_wgmma."""

    a_map: zl.TensorMap
    q_map: zl.TensorMap
    high_map: zl.TensorMap
    scale: zl.Ptr[zl.f16, "const"]
    offset: zl.Ptr[zl.f16, "const"]
    bias: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.u8]
    partial: zl.Ptr[zl.f32]
    counters: zl.Ptr[zl.i32]
    tokens: zl.i32
    cols: zl.i32
    blocks: zl.i32
    groups: zl.i32
    group_span: zl.i32
    half_step: zl.i32
    splits: zl.i32
    has_offset: zl.i32
    has_bias: zl.i32
    mode: zl.i32
    center: zl.f32
    linear: zl.f32
    cubic: zl.f32
    BITS: zl.static
    WIDE: zl.static
    HALVES: zl.static
    BT: zl.static
    WG: zl.static
    STAGES: zl.static
    GATED: zl.static

    @property
    def token_bytes(self) -> int:
        return self.BT * DEPTH * 2

    @property
    def q_size(self) -> int:
        """Bytes of 16 rows in a stage."""
        return q_bytes(self.BITS) * 2

    @property
    def high_size(self) -> int:
        return HIGH_BYTES[self.BITS] * 2

    @property
    def tiles(self) -> int:
        """Of 16 rows."""
        return self.WG * 4

    @property
    def tile_cols(self) -> int:
        return self.WG * 32 if self.GATED else self.WG * 64


@zl.inline
def load_weights(at, bar, step, row_tile, p):
    """Ask for one stage's weights: gates, then ups."""
    halves = 2 if p.GATED else 1
    count = p.tiles // halves
    for half in zl.static(range(halves)):
        row = row_tile + half * (p.cols // 16)
        zl.tma_load(at + half * (count * p.q_size), p.q_map, (step * (p.q_size // 4), row), bar)
        if p.high_size > 0:
            to = at + p.tiles * p.q_size + half * (count * p.high_size)
            zl.tma_load(to, p.high_map, (step * (p.high_size // 4), row), bar)


@zl.inline
def produce(ring, units, p):
    """The thread that fills the ring."""
    slot = zl.i32(0)
    parity = zl.i32(1)
    waited = zl.i32(0)
    for unit in range(zl.block_index(0), units.count, zl.num_blocks(0)):
        tile, m, n, first, end = unit_place(unit, units)
        row_tile = n * (p.tile_cols // 16)
        for step in range(first, end):
            stage = ring.memory + slot * ring.stride
            zl.mbarrier_wait(ring.empty + slot, parity)
            zl.mbarrier_expect(ring.full + slot, stage_size(p.BITS, p.BT, p.WG))
            load_weights(stage + p.token_bytes, ring.full + slot, step, row_tile, p)
            if waited == 0:
                zl.grid_wait()
                waited = 1
            zl.tma_load(stage, p.a_map, (step * DEPTH, m * p.BT), ring.full + slot)
            slot += 1
            if slot == ring.stages:
                slot = 0
                parity = parity ^ 1


class LanePlace(zl.Record):
    """Where a lane's words stand in a stage, and which bytes of them are its own."""

    own: Any  # the warp's 16 rows, or those of gates (8 of the 16 rows of a tile)
    own_row: Any
    word: Any
    high_word: Any
    row_step: int  # to the words of the second row
    high_step: int
    s: Any
    pick: Any


@zl.inline
def place_of(warp, p):
    lane = zl.lane_index()
    g = lane // 4
    s = zl.u32(lane % 4 // 2)
    pick = selector(zl.u32(lane % 4 % 2 * 2), p.BITS)
    own = warp // 2 if p.GATED else warp
    own_row = warp % 2 * 8 + g if p.GATED else g
    row_step = p.tiles // 2 * p.q_size // 4 if p.GATED else 8
    high_step = p.tiles // 2 * p.high_size // 4 if p.GATED else 8
    word = own * (p.q_size // 4) + lane % 4 // 2 * 16 + own_row
    high_word = p.tiles * p.q_size // 4 + (own * (p.high_size // 4) + own_row)
    return LanePlace(own, own_row, word, high_word, row_step, high_step, s, pick)


@zl.inline
def read_words(words, high, weights, half, place, p):
    """A lane's words of the first or second 32 columns of a stage."""
    assign(words, load_words(weights + (place.word + half * (p.q_size // 8)), place.row_step, p.BITS))
    assign(high, load_high(weights + (place.high_word + half * (p.high_size // 8)), place.high_step, p.BITS))


@zl.inline
def dequantized(a, words, high, factor, shift, place, p):
    """a: the operands of 32 columns, two times four registers, from a lane's words."""
    for i in zl.static(range(4)):
        for half in zl.static(range(2)):
            at = (half if p.HALVES == 2 else 0) * 2 + i % 2
            a[half][i] = pair_bf16(
                words[4 + i if p.BITS == 8 and half == 1 else i],
                high[(half if p.BITS == 6 else 0) * 2 + i % 2] if p.BITS in (5, 6) else None,
                place.s + zl.u32(i // 2 * 2),
                half == 1,
                place.pick,
                factor[at],
                shift[at],
                p.BITS,
            )


class GroupScales(zl.Record):
    """Scales and offsets of a lane's rows for one group, and where they stand."""

    scales: Any
    offsets: Any
    at: Any
    in_group: Any  # [steps, or blocks, of the group so far]


@zl.inline
def scales_at(n, first, place, p):
    """The scales with which a tile begins at step `first`."""
    per_step = 1 if p.WIDE else 2
    in_group = [first * per_step % p.group_span for _ in zl.static(range(1))]
    group = first * per_step // p.group_span * (1 + p.half_step // 16)
    last_tile = (p.cols * (2 if p.GATED else 1) + 15) // 16 - 1
    scale_tile = min(n * (p.tile_cols // 16) + place.own, last_tile)
    up_tile = min(n * (p.tile_cols // 16) + place.own + p.cols // 16, last_tile)
    inside = group * 16 + place.own_row
    second = up_tile if p.GATED else scale_tile
    at = [
        zl.i64(scale_tile) * p.groups * 16 + inside,
        zl.i64(second) * p.groups * 16 + (inside if p.GATED else inside + 8),
    ]
    scales, offsets = read_scales(p.scale, p.offset, at, p.has_offset, p.half_step, p.HALVES)
    return GroupScales(scales, offsets, at, in_group)


@zl.inline
def next_scales(now, p):
    now.in_group[0] += 1
    if now.in_group[0] == p.group_span:
        now.in_group[0] = 0
        for y in zl.static(range(2)):
            now.at[y] += 16 + p.half_step
    fresh = read_scales(p.scale, p.offset, now.at, p.has_offset, p.half_step, p.HALVES)
    assign(now.scales, fresh[0])
    assign(now.offsets, fresh[1])


@zl.inline
def store_tile(acc, m, n, warp, p):
    """A warp's part of a tile."""
    lane = zl.lane_index()
    j, g, BT = lane % 4, lane // 4, p.BT
    if p.GATED:
        put_gated(acc, n * p.tile_cols + warp * 8, m * BT, p, j, g, BT)
    else:
        for y in zl.static(range(2)):
            put_column(acc, y, n * p.tile_cols + warp * 16 + y * 8 + g, m * BT, p, j, g, BT)


@zl.inline
def consume(ring, units, last, p):
    """The warpgroups that multiply: their weights pass through registers."""
    BT = p.BT
    thread = zl.thread_index() - 128
    warp = thread // 32
    lane = zl.lane_index()
    place = place_of(warp, p)
    base = zl.smem_desc(ring.memory)
    slot = zl.i32(0)
    parity = zl.i32(0)
    accs = [[zl.f32(0) for _ in zl.static(range(BT // 2))] for x in zl.static(range(1))]
    acc = accs[0]
    a = [[zl.u32(0) for _ in zl.static(range(4))] for i in zl.static(range(4))]
    for unit in range(zl.block_index(0), units.count, zl.num_blocks(0)):
        tile, m, n, first, end = unit_place(unit, units)
        now = scales_at(n, first, place, p)
        zl.mbarrier_wait(ring.full + slot, parity)
        weights = zl.cast_ptr(ring.memory + slot * ring.stride + p.token_bytes, zl.u32)
        words = load_words(weights + place.word, place.row_step, p.BITS)
        high = load_high(weights + place.high_word, place.high_step, p.BITS)
        previous = zl.i32(-1)
        for step in range(first, end):
            tokens_desc = base + zl.u64(slot * ring.stride // 16)
            next_slot = slot + 1 if slot + 1 < ring.stages else 0
            for b in zl.static(range(2)):
                if b == 0 or not p.WIDE:
                    factor, shift = factors(now.scales, now.offsets, p.center, p.BITS)
                    # The next scales are on their way while these are used; the last ones are not read again.
                    if step + 1 < units.steps if p.WIDE else step * 2 + b + 1 < p.blocks:
                        next_scales(now, p)
                dequantized(a[b * 2 : b * 2 + 2], words, high, factor, shift, place, p)
                zl.wgmma_fence()
                for half in zl.static(range(2)):
                    onto = True if b + half > 0 else step > first
                    zl.wgmma_bf16(acc, a[b * 2 + half], tokens_desc + (b * 4 + half * 2), BT, onto)
                zl.wgmma_commit()
                # The next words arrive while the products run.
                if b == 0:
                    read_words(words, high, weights, 1, place, p)
                else:
                    if step + 1 < end:
                        zl.mbarrier_wait(ring.full + next_slot, parity ^ 1 if next_slot == 0 else parity)
                        weights = zl.cast_ptr(ring.memory + next_slot * ring.stride + p.token_bytes, zl.u32)
                        read_words(words, high, weights, 0, place, p)
                # Named here, the other block's operands keep their registers until the products that read them are
                # done.
                zl.wgmma_wait(1, *a[2 - b * 2 : 4 - b * 2])
                if b == 0:
                    if previous >= 0:
                        release(ring.empty + previous, lane)
            previous = slot
            slot = next_slot
            parity = parity ^ 1 if next_slot == 0 else parity
        zl.wgmma_wait(0, acc)
        release(ring.empty + previous, lane)
        if unit == zl.block_index(0):
            zl.grid_wait()
        complete = units.splits <= 1
        if units.splits > 1:
            complete = sum_parts(accs, unit, tile, last, thread, p.WG * 128, p)
        if complete:
            store_tile(acc, m, n, warp, p)


@zl.kernel
def gemm_r16(p: R16Params):
    stage_bytes = stage_size(p.BITS, p.BT, p.WG)
    ring, last = ring_of(-(-stage_bytes // 1024) * 1024, p.STAGES, p.WG * 4)
    units = units_of(p.tokens, p.cols, (p.blocks + 1) // 2, p.splits, p.BT, p.tile_cols)
    if zl.warp_index() < 4:
        zl.set_max_registers("dec", 24 if p.WG > 2 else 40)
        if zl.thread_index() == 0:
            produce(ring, units, p)
    else:
        zl.set_max_registers("inc", 112 if p.WG > 2 else 232)
        consume(ring, units, last, p)
