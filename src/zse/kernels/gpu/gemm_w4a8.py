"""out[m, n] = sum_k a[m, k] * w[n, k] for int4 weights (layout r16) and e4m3 activations on Hopper's 8-bit tensor cores,
for more tokens than gemm_w4a8_few takes.

A byte 0000qqqq, read as e4m3, is the number q * 2**-9: seven subnormal numbers and the first eight normal ones are in
one line. So the nibbles of a word need no conversion but a mask. A stage has 128 columns, a group's: the tensor cores sum
q * a exactly enough, then the sums are multiplied by the group's scale in f32 (as DeepGEMM does with blocks). What the
weights' offsets add is a product of its own, [rows, groups] times the sums of the activations' groups [tokens, groups] in
f16: the first stages of a tile, 32 groups each, in which weights and activations give way to these.

The weights are an operand in registers: a lane's words of layout r16, masked, are the very ones that it needs. The tokens
of a tile of 128 or 256 are multiplied 64 at a time, so that while one part's sums are scaled the next part's products run,
and their sums together have the registers of one tile of 128; those of other tiles all at once. A stage's place is the same
number in every thread: with one of the warpgroup's, descriptors leave the uniform registers, for 8 to 15 % more time.
Operands are named where products begin; else the compiler fills
their registers in between, and each product waits for the one before (ptxas C7519)."""

from typing import Any

from zse import kernel as zl
from zse.kernels.gpu import gemm_parts as parts
from zse.kernels.gpu import gemm_skinny as skinny

DEPTH = 128  # columns of a stage, and of a sum of activations
BLOCKS = DEPTH // 32
ROW_BYTES = DEPTH // 2  # of weights in a stage
NIBBLES = 0x0F0F0F0F
UNIT = 512.0  # 1 / what a nibble of one is as e4m3
MIDDLE = -8.0  # what is added to q of symmetric weights
SHIFTS = 32  # groups of a stage of offsets: as many bytes of a row as it has weights
BOX = 16  # of them in a copy, and in a product
SUM_BYTES = SHIFTS * 2
WARPGROUPS = 2  # that multiply
ROWS = 128  # of a tile of gemm_w4a8
PART = 64  # tokens of one of its products, where a tile has several
REGISTERS = (24, 240)  # of a thread that copies and of one that multiplies
SHARED_BYTES = 230_000


def stage_size(bt: int, rows: int = ROWS) -> int:
    """Bytes of a stage: activations, weights and their scales, a multiple of 1024 for the swizzled tiles."""
    return -(-(bt * DEPTH + rows * (ROW_BYTES + 2)) // 1024) * 1024


def part_of(bt: int) -> int:
    """Tokens of one product of a tile of bt: of 128 and 256 PART, of others all."""
    return PART if bt % 128 == 0 else bt


def stages(bt: int, rows: int = ROWS) -> int:
    return min(16, SHARED_BYTES // stage_size(bt, rows))


class W4A8Params(zl.Record):
    """The parameters of both kernels. a_map: e4m3 [tokens, K]; sums_map: f16 [tokens, K / 128], the sums of each 128
    columns in units of a_scale f32 [tokens]; scale_map: f16 [row tiles, 16 * groups]; shift_map: of the offsets, or, if
    there are none, of the scales; shift_scale: what these are multiplied with. steps: stages of a tile, the first
    `shift_steps` of them of offsets. splits, share, partial, counters, mode, linear, cubic: as in gemm_wgmma and
    gemm_skinny. A tile is BT tokens x ROWS weight rows, or 2 * MT * 64 of gemm_w4a8_few (GATED: half gates, half ups)."""

    a_map: zl.TensorMap
    sums_map: zl.TensorMap
    w_map: zl.TensorMap
    scale_map: zl.TensorMap
    shift_map: zl.TensorMap
    a_scale: zl.Ptr[zl.f32, "const"]
    bias: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.u8]
    partial: zl.Ptr[zl.f32]
    counters: zl.Ptr[zl.i32]
    tokens: zl.i32
    cols: zl.i32
    steps: zl.i32
    shift_steps: zl.i32
    splits: zl.i32
    share: zl.i32
    has_bias: zl.i32
    mode: zl.i32
    shift_scale: zl.f32
    linear: zl.f32
    cubic: zl.f32
    BT: zl.static
    STAGES: zl.static
    GATED: zl.static

    @property
    def KIND(self) -> str:
        """What gemm_skinny's epilogue multiplies with."""
        return "w4a8"

    @property
    def WG(self) -> int:
        return WARPGROUPS

    @property
    def pushes(self) -> bool:
        return False

    @property
    def of_experts(self) -> bool:
        return False

    @property
    def tiles(self) -> int:
        """Of 16 rows."""
        return ROWS // 16

    @property
    def tile_cols(self) -> int:
        return self.tiles * (8 if self.GATED else 16)

    @property
    def weights_at(self) -> int:
        """In a stage."""
        return self.BT * DEPTH

    @property
    def scales_at(self) -> int:
        return self.weights_at + self.tiles * 16 * ROW_BYTES


@zl.inline
def load_weights(ring, slot, step, tile, p):
    """Ask for one stage's weights with their scales, or its offsets: gates, then ups. For few tokens none is read again."""
    halves = 2 if p.GATED else 1
    count = p.tiles // halves
    bar, weights = ring.full + slot, ring.memory + (slot * ring.stride + p.weights_at)
    if step < p.shift_steps:
        zl.mbarrier_expect(bar, p.BT * SUM_BYTES + p.tiles * 16 * SHIFTS * 2)
        for half in zl.static(range(halves)):
            row = tile * (p.tile_cols // 16) + half * (p.cols // 16)
            for box in zl.static(range(SHIFTS // BOX)):
                to = weights + (box * p.tiles + half * count) * (16 * BOX * 2)
                zl.tma_load(to, p.shift_map, ((step * SHIFTS + box * BOX) * 16, row), bar)
    else:
        group = step - p.shift_steps
        zl.mbarrier_expect(bar, p.BT * DEPTH + p.tiles * (16 * ROW_BYTES + 32))
        for half in zl.static(range(halves)):
            row = tile * (p.tile_cols // 16) + half * (p.cols // 16)
            to = weights + half * count * 16 * ROW_BYTES
            if p.BT < 128:
                zl.tma_load(to, p.w_map, (group * (16 * ROW_BYTES // 4), row), bar, None, "evict_first")
            else:
                zl.tma_load(to, p.w_map, (group * (16 * ROW_BYTES // 4), row), bar)
            zl.tma_load(weights + (p.tiles * 16 * ROW_BYTES + half * count * 32), p.scale_map, (group * 16, row), bar)


@zl.inline
def load_tokens(ring, slot, step, first_token, p):
    """Ask for one stage's activations or sums."""
    to, bar = ring.memory + slot * ring.stride, ring.full + slot
    if step < p.shift_steps:
        zl.tma_load(to, p.sums_map, (step * SHIFTS, first_token), bar)
    else:
        zl.tma_load(to, p.a_map, ((step - p.shift_steps) * DEPTH, first_token), bar, None, "evict_last")


class LanePlaces(zl.Record):
    """Where a lane's numbers of weight rows stand: its first row's tile of 16 and row in it, how far those of its second
    row and of its warpgroup's next 64 rows are; and of its words in a stage the first, how far those of the second row
    and of the next 64 rows are."""

    tile: Any
    row: Any
    next_tile: int
    next_row: int
    block_tiles: int
    word: Any
    row_step: int
    block_step: int


@zl.inline
def lane_places(warp, p):
    """Of a warp, 0 .. 7."""
    lane = zl.lane_index()
    j, g = lane % 4, lane // 4
    words, half, tiles = 16 * ROW_BYTES // 4, p.tiles // 2, WARPGROUPS * (2 if p.GATED else 4)
    own = warp // 2 if p.GATED else warp + 0
    row = warp % 2 * 8 + g if p.GATED else g
    return LanePlaces(
        own,
        row,
        half if p.GATED else 0,
        0 if p.GATED else 8,
        tiles,
        own * words + j * 16 + row,
        half * words if p.GATED else 8,
        tiles * words,
    )


@zl.inline
def place_of(lane, block, y, tile_size):
    """Of the lane's row y (0, 1) of a block of 64, where tiles are tile_size numbers apart."""
    return (lane.tile + (block * lane.block_tiles + y * lane.next_tile)) * tile_size + (lane.row + y * lane.next_row)


@zl.inline
def read_words(words, stage, lane, block, p):
    """A lane's words of a stage, of 64 rows."""
    at = zl.cast_ptr(stage + p.weights_at, zl.u32) + (lane.word + block * lane.block_step)
    for b in zl.static(range(BLOCKS)):
        for y in zl.static(range(2)):
            words[b * 2 + y] = at[b * 64 + y * lane.row_step]


@zl.inline
def mask(a, words):
    """Operands of a lane's words."""
    for b in zl.static(range(BLOCKS)):
        for y in zl.static(range(2)):
            a[b][y] = words[b * 2 + y] & NIBBLES
            a[b][2 + y] = (words[b * 2 + y] >> 4) & NIBBLES


@zl.inline
def multiply(acc, a, tokens_desc):
    """acc = a stage's products of 64 rows with as many tokens as acc is for."""
    for b in zl.static(range(BLOCKS)):
        zl.wgmma_e4m3(acc, a[b], tokens_desc + b * 2, len(acc) * 2, b > 0)
    zl.wgmma_commit()


@zl.inline
def scales_of(stage, lane, block, p):
    """What the sums of the lane's two rows are multiplied with."""
    scales = zl.cast_ptr(stage + p.scales_at, zl.f16)
    return [zl.convert(scales[place_of(lane, block, y, 16)], zl.f32) * UNIT for y in zl.static(range(2))]


@zl.inline
def add_scaled(total, acc, factors):
    """total += a stage's sums, scaled."""
    for i in zl.static(range(len(acc))):
        total[i] = zl.fma(acc[i], factors[i // 2 % 2], total[i])


@zl.inline
def read_shifts(a, shifts, lane, block, p):
    """A lane's part of the operand of offsets, 64 rows x BOX groups, from a box of them."""
    for y in zl.static(range(2)):
        at = place_of(lane, block, y, 16 * BOX) + zl.lane_index() % 4 * 32
        for half in zl.static(range(2)):
            pair = [zl.convert(shifts[at + (half * 128 + x * 16)], zl.f32) * p.shift_scale for x in zl.static(range(2))]
            a[half * 2 + y] = zl.bitcast(zl.convert(zl.make_vector(pair[0], pair[1]), zl.f16), zl.u32)


@zl.inline
def add_shifts(totals, a, stage, sums_desc, lane, block, p):
    """totals of a block of 64 rows, by parts of the tokens, += the offsets of SHIFTS groups, where a stage's weights
    would stand, times their activations' sums."""
    for box in zl.static(range(SHIFTS // BOX)):
        shifts = zl.cast_ptr(stage + (p.weights_at + box * p.tiles * (16 * BOX * 2)), zl.f16)
        read_shifts(a[box], shifts, lane, block, p)
    for part, total in enumerate(totals):
        count = len(total) * 2
        zl.wgmma_fence(total, *a)
        for box in zl.static(range(SHIFTS // BOX)):
            desc = sums_desc + (part * (count * SUM_BYTES // 16) + box * (BOX * 2 // 16))
            zl.wgmma_f16(total, a[box], desc, count, True)
        zl.wgmma_commit()
        zl.wgmma_wait(0, total, *a)


@zl.inline
def move_on(state, stages):
    """To the next stage of the ring. state: [slot, parity]."""
    state[0] += 1
    if state[0] == stages:
        state[0] = 0
        state[1] = state[1] ^ 1


@zl.inline
def produce(ring, units, p):
    """The thread that fills the ring."""
    state = [zl.i32(0), zl.i32(1)]
    waited = zl.i32(0)
    for unit in range(zl.block_index(0), units.count, zl.num_blocks(0)):
        tile, m, n, first, end = parts.unit_place(unit, units)
        for step in range(first, end):
            zl.mbarrier_wait(ring.empty + state[0], state[1])
            load_weights(ring, state[0], step, n, p)
            if waited == 0:
                zl.grid_wait()
                waited = 1
            load_tokens(ring, state[0], step, m * p.BT, p)
            move_on(state, ring.stages)


@zl.inline
def multiply_unit(totals, accs, words, a, lane, ring, state, bounds, p):
    """totals, by parts of the tokens, = the products of stages bounds[0] .. bounds[1] of a tile. accs: sums of two parts, words,
    a: what a thread reads and its operands; state: [slot, parity] of the ring, moved on."""
    first, end = bounds
    part_tokens = part_of(p.BT)
    for total in totals:
        for i in zl.static(range(part_tokens // 2)):
            total[i] = zl.f32(0)
    base = zl.smem_desc(ring.memory)
    sums_base = zl.smem_desc(ring.memory, SUM_BYTES, 8 * SUM_BYTES)
    for step in range(first, min(end, p.shift_steps)):
        zl.mbarrier_wait(ring.full + state[0], state[1])
        desc = sums_base + zl.u64(state[0] * ring.stride // 16)
        add_shifts(totals, a, ring.memory + state[0] * ring.stride, desc, lane, 0, p)
        parts.release(ring.empty + state[0], zl.lane_index())
        move_on(state, ring.stages)
    begin = max(first, p.shift_steps)
    if begin < end:
        zl.mbarrier_wait(ring.full + state[0], state[1])
        read_words(words, ring.memory + state[0] * ring.stride, lane, 0, p)
    for step in range(begin, end):
        slot = state[0] + 0
        stage = ring.memory + slot * ring.stride
        tokens_desc = base + zl.u64(slot * ring.stride // 16)
        move_on(state, ring.stages)
        factors = scales_of(stage, lane, 0, p)
        mask(a, words)
        zl.wgmma_fence(*a)
        multiply(accs[0], a, tokens_desc)
        for part in zl.static(range(1, len(totals))):
            zl.wgmma_fence()
            multiply(accs[part % 2], a, tokens_desc + part * (part_tokens * DEPTH // 16))
            zl.wgmma_wait(1, accs[1 - part % 2])
            add_scaled(totals[part - 1], accs[1 - part % 2], factors)
        # The next words arrive while the last part's products run.
        if step + 1 < end:
            zl.mbarrier_wait(ring.full + state[0], state[1])
            read_words(words, ring.memory + state[0] * ring.stride, lane, 0, p)
        last = (len(totals) - 1) % 2
        zl.wgmma_wait(0, accs[last], *a)
        parts.release(ring.empty + slot, zl.lane_index())
        add_scaled(totals[len(totals) - 1], accs[last], factors)


@zl.kernel
def gemm_w4a8(p: W4A8Params):
    """Units and parts of k as in gemm_wgmma."""
    ring, last = parts.ring_of(stage_size(p.BT), p.STAGES, WARPGROUPS * 4)
    units = parts.units_of(p.tokens, p.cols, p.steps, p.splits, p.BT, p.tile_cols)
    if zl.warp_index() < 4:
        zl.set_max_registers("dec", REGISTERS[0])
        if zl.thread_index() == 0:
            produce(ring, units, p)
    else:
        zl.set_max_registers("inc", REGISTERS[1])
        thread = zl.thread_index() - 128
        lane = lane_places(thread // 32, p)
        part_tokens = part_of(p.BT)
        count = p.BT // part_tokens
        totals = [[zl.f32(0) for _ in zl.static(range(part_tokens // 2))] for x in zl.static(range(count))]
        accs = [[zl.f32(0) for _ in zl.static(range(part_tokens // 2))] for x in zl.static(range(min(2, count)))]
        words = [zl.u32(0) for _ in zl.static(range(BLOCKS * 2))]
        a = [[zl.u32(0) for _ in zl.static(range(4))] for b in zl.static(range(BLOCKS))]
        state = [zl.i32(0) for _ in zl.static(range(2))]
        for unit in range(zl.block_index(0), units.count, zl.num_blocks(0)):
            tile, m, n, first, end = parts.unit_place(unit, units)
            multiply_unit(totals, accs, words, a, lane, ring, state, (first, end), p)
            if unit == zl.block_index(0):
                zl.grid_wait()
            complete = units.splits <= 1
            if units.splits > 1:
                complete = parts.sum_parts(totals, unit, tile, last, thread, WARPGROUPS * 128, p)
            if complete:
                for part, total in enumerate(totals):
                    skinny.store_sums(total, n, thread // 32, m * p.BT + part * part_tokens, p)
