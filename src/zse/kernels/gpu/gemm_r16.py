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

from zse import kernel as zl
from zse.kernels.gpu.gemm_parts import activated, put_column, release, sum_parts, tile_place, transposed
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


@zl.kernel
def gemm_r16(
    a_map: zl.TensorMap,
    q_map: zl.TensorMap,
    high_map: zl.TensorMap,
    scale: zl.Ptr[zl.f16, "const"],
    offset: zl.Ptr[zl.f16, "const"],
    bias: zl.Ptr[zl.f32, "const"],
    out: zl.Ptr[zl.u8],
    partial: zl.Ptr[zl.f32],
    counters: zl.Ptr[zl.i32],
    tokens: zl.i32,
    cols: zl.i32,
    blocks: zl.i32,
    groups: zl.i32,
    group_span: zl.i32,
    half_step: zl.i32,
    splits: zl.i32,
    has_offset: zl.i32,
    has_bias: zl.i32,
    mode: zl.i32,
    center: zl.f32,
    linear: zl.f32,
    cubic: zl.f32,
    BITS: zl.static,
    WIDE: zl.static,
    HALVES: zl.static,
    BT: zl.static,
    WG: zl.static,
    STAGES: zl.static,
    GATED: zl.static,
):
    """cols: columns of out; the weights have as many rows, or twice as many when GATED. blocks = K / 32; groups: scales
    of a row. WIDE: groups of 64 columns and more, with one scale a step; else there are HALVES scales a block.
    group_span: blocks, or steps if WIDE, of a group (1 for groups of 16). half_step: with two, from the scale of a
    block's first 16 columns to that of the others: 16 for groups of 16, else 0. center: what multiplies the scale so
    that it can be added to the offset, see r16.py. mode, linear, cubic, partial, counters: as in gemm_wgmma."""
    token_bytes = BT * DEPTH * 2
    q_size = q_bytes(BITS) * 2  # of 16 rows in a stage
    high_size = HIGH_BYTES[BITS] * 2
    tiles = WG * 4  # of 16 rows
    stage_bytes = stage_size(BITS, BT, WG)
    stride = -(-stage_bytes // 1024) * 1024
    tile_cols = WG * 32 if GATED else WG * 64
    threads = WG * 128
    ring = zl.shared_array(zl.u8, STAGES * stride, 1024)
    full = zl.mbarrier_array(STAGES)
    empty = zl.mbarrier_array(STAGES)
    last = zl.shared_array(zl.i32, 4)
    if zl.thread_index() == 0:
        for i in zl.static(range(STAGES)):
            zl.mbarrier_init(full + i, 1)
            zl.mbarrier_init(empty + i, WG * 4)
        zl.mbarrier_init_fence()
    zl.barrier()
    zl.grid_launch_dependents()
    steps = (blocks + 1) // 2
    token_tiles = (tokens + (BT - 1)) // BT
    row_tiles = (cols + (tile_cols - 1)) // tile_cols
    units = token_tiles * row_tiles * splits
    if zl.warp_index() < 4:
        zl.set_max_registers("dec", 24 if WG > 2 else 40)
        if zl.thread_index() == 0:
            slot = zl.i32(0)
            parity = zl.i32(1)
            waited = zl.i32(0)
            for unit in range(zl.block_index(0), units, zl.num_blocks(0)):
                tile = unit // splits
                part = unit % splits
                m, n = tile_place(tile, token_tiles, row_tiles)
                row_tile = n * (tile_cols // 16)
                first = part * steps // splits
                for step in range(first, (part + 1) * steps // splits):
                    stage = ring + slot * stride
                    zl.mbarrier_wait(empty + slot, parity)
                    zl.mbarrier_expect(full + slot, stage_bytes)
                    weights = stage + token_bytes
                    if GATED:
                        for half in zl.static(range(2)):
                            zl.tma_load(
                                weights + half * (tiles // 2 * q_size),
                                q_map,
                                (step * (q_size // 4), row_tile + half * (cols // 16)),
                                full + slot,
                            )
                            if high_size > 0:
                                zl.tma_load(
                                    weights + tiles * q_size + half * (tiles // 2 * high_size),
                                    high_map,
                                    (step * (high_size // 4), row_tile + half * (cols // 16)),
                                    full + slot,
                                )
                    else:
                        zl.tma_load(weights, q_map, (step * (q_size // 4), row_tile), full + slot)
                        if high_size > 0:
                            zl.tma_load(
                                weights + tiles * q_size, high_map, (step * (high_size // 4), row_tile), full + slot
                            )
                    if waited == 0:
                        zl.grid_wait()
                        waited = 1
                    zl.tma_load(stage, a_map, (step * DEPTH, m * BT), full + slot)
                    slot += 1
                    if slot == STAGES:
                        slot = 0
                        parity = parity ^ 1
    else:
        zl.set_max_registers("inc", 112 if WG > 2 else 232)
        thread = zl.thread_index() - 128
        warp = thread // 32
        lane = zl.lane_index()
        j = lane % 4
        g = lane // 4
        s = zl.u32(j // 2)
        pick = selector(zl.u32(j % 2 * 2), BITS)
        base = zl.smem_desc(ring)
        # Where the lane's first row starts, in words: of the warp's 16 rows, or of gates (8 of the 16 rows of a tile).
        own = warp // 2 if GATED else warp
        own_row = warp % 2 * 8 + g if GATED else g
        row_step = tiles // 2 * q_size // 4 if GATED else 8
        high_step = tiles // 2 * high_size // 4 if GATED else 8
        word = own * (q_size // 4) + j // 2 * 16 + own_row
        high_word = own * (high_size // 4) + own_row
        slot = zl.i32(0)
        parity = zl.i32(0)
        accs = [[zl.f32(0) for _ in zl.static(range(BT // 2))] for x in zl.static(range(1))]
        acc = accs[0]
        a = [[zl.u32(0) for _ in zl.static(range(4))] for i in zl.static(range(4))]
        for unit in range(zl.block_index(0), units, zl.num_blocks(0)):
            tile = unit // splits
            part = unit % splits
            m, n = tile_place(tile, token_tiles, row_tiles)
            first = part * steps // splits
            end = (part + 1) * steps // splits
            last_tile = (cols * (2 if GATED else 1) + 15) // 16 - 1
            scale_tile = min(n * (tile_cols // 16) + own, last_tile)
            up_tile = min(n * (tile_cols // 16) + own + cols // 16, last_tile)
            per_step = 1 if WIDE else 2
            group = first * per_step // group_span * (1 + half_step // 16)
            in_group = first * per_step % group_span
            scale_at = [
                zl.i64(scale_tile) * groups * 16 + (group * 16 + own_row),
                zl.i64(up_tile) * groups * 16 + (group * 16 + own_row)
                if GATED
                else zl.i64(scale_tile) * groups * 16 + (group * 16 + own_row + 8),
            ]
            scales, offsets = read_scales(scale, offset, scale_at, has_offset, half_step, HALVES)
            zl.mbarrier_wait(full + slot, parity)
            weights = zl.cast_ptr(ring + slot * stride + token_bytes, zl.u32)
            words = load_words(weights + word, row_step, BITS)
            high = load_high(weights + (tiles * q_size // 4 + high_word), high_step, BITS)
            previous = zl.i32(-1)
            for step in range(first, end):
                tokens_desc = base + zl.u64(slot * stride // 16)
                next_slot = slot + 1 if slot + 1 < STAGES else 0
                for b in zl.static(range(2)):
                    if b == 0 or not WIDE:
                        factor, shift = factors(scales, offsets, center, BITS)
                        # The next scales are on their way while these are used; the last ones are not read again.
                        if step * per_step + b + 1 < (steps if WIDE else blocks):
                            in_group += 1
                            if in_group == group_span:
                                in_group = 0
                                for y in zl.static(range(2)):
                                    scale_at[y] += 16 + half_step
                            fresh = read_scales(scale, offset, scale_at, has_offset, half_step, HALVES)
                            assign(scales, fresh[0])
                            assign(offsets, fresh[1])
                    for i in zl.static(range(4)):
                        for half in zl.static(range(2)):
                            at = (half if HALVES == 2 else 0) * 2 + i % 2
                            a[b * 2 + half][i] = pair_bf16(
                                words[4 + i if BITS == 8 and half == 1 else i],
                                high[(half if BITS == 6 else 0) * 2 + i % 2] if BITS in (5, 6) else None,
                                s + zl.u32(i // 2 * 2),
                                half == 1,
                                pick,
                                factor[at],
                                shift[at],
                                BITS,
                            )
                    zl.wgmma_fence()
                    for half in zl.static(range(2)):
                        onto = True if b + half > 0 else step > first
                        zl.wgmma_bf16(acc, a[b * 2 + half], tokens_desc + (b * 4 + half * 2), BT, onto)
                    zl.wgmma_commit()
                    # The next words arrive while the products run.
                    if b == 0:
                        assign(words, load_words(weights + (word + q_size // 8), row_step, BITS))
                        assign(
                            high,
                            load_high(weights + (tiles * q_size // 4 + high_word + high_size // 8), high_step, BITS),
                        )
                    else:
                        if step + 1 < end:
                            zl.mbarrier_wait(full + next_slot, parity ^ 1 if next_slot == 0 else parity)
                            weights = zl.cast_ptr(ring + next_slot * stride + token_bytes, zl.u32)
                            assign(words, load_words(weights + word, row_step, BITS))
                            assign(high, load_high(weights + (tiles * q_size // 4 + high_word), high_step, BITS))
                    # Named here, the other block's operands keep their registers until the products that read them are
                    # done.
                    zl.wgmma_wait(1, *a[2 - b * 2 : 4 - b * 2])
                    if b == 0:
                        if previous >= 0:
                            release(empty + previous, lane)
                previous = slot
                slot = next_slot
                parity = parity ^ 1 if next_slot == 0 else parity
            zl.wgmma_wait(0, acc)
            release(empty + previous, lane)
            if unit == zl.block_index(0):
                zl.grid_wait()
            complete = splits <= 1
            if splits > 1:
                complete = sum_parts(accs, partial, unit, tile, splits, counters, last, thread, threads, BT)
            if complete:
                if GATED:
                    col = n * tile_cols + warp * 8 + j * 2
                    for i in zl.static(range(BT // 8)):
                        both = zl.make_vector(
                            activated(acc[i * 4], acc[i * 4 + 2], linear, cubic),
                            activated(acc[i * 4 + 1], acc[i * 4 + 3], linear, cubic),
                        )
                        pair = transposed(zl.bitcast(zl.convert(both, zl.bf16), zl.u32))
                        token = m * BT + i * 8 + g
                        if token < tokens:
                            if col < cols:
                                zl.store(zl.cast_ptr(out, zl.u32) + (zl.i64(token) * cols + col) // 2, pair)
                else:
                    for y in zl.static(range(2)):
                        col = n * tile_cols + warp * 16 + y * 8 + g
                        shift = zl.f32(0)
                        if has_bias != 0:
                            shift = bias[min(col, cols - 1)]
                        put_column(acc, y, out, col, m * BT, tokens, cols, mode, shift, j, g, BT)
