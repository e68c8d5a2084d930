"""out[m, n] = sum_k a[m, k] * w[n, k] for integer weights (layout r16, 4, 5, 6 or 8 bits) on Hopper's tensor cores.

The weights stay integers until they stand in registers: a wgmma takes its 64-row operand from registers, so the weights
are that operand, dequantized just before (gemm_integers.py), and the tokens are the other one, in shared memory. That
makes out transposed: a thread has two weight rows and BT / 4 tokens of each. No bf16 copy of the weights is written or
read, and a tile costs what a bf16 tile costs.

A gated tile gives rows 0 .. 7 of a warp to gates and 8 .. 15 to the same rows' ups, so both meet in a thread. Grid,
ring and split k are those of gemm_wgmma. The idea of feeding wgmma from registers is Machete's (vLLM, 2024).
"""

from zse import kernel as zl
from zse.kernels.gpu import gemm_integers as integers
from zse.kernels.gpu.gemm_parts import REGISTERS, put_column, put_gated, ring_of, sum_parts, unit_place, units_of
from zse.kernels.gpu.r16 import stage_blocks

SHARED_BYTES = 231_000


def stage_size(bits: int, bt: int, groups: int) -> int:
    """Bytes of a stage: BT tokens and 64 rows of each of `groups` warpgroups."""
    return bt * integers.HALF * stage_blocks(bits, bt) + groups * 4 * integers.weight_bytes(bits, bt)


def stages(bits: int, bt: int, groups: int) -> int:
    """How many stages fit."""
    return min(8, SHARED_BYTES // -(-stage_size(bits, bt, groups) // 1024 * 1024))


class R16Params(zl.Record):
    """The parameters of gemm_r16. cols: columns of out; the weights have as many rows, or twice as many when GATED.
    blocks = K / 32; groups: scales of a row; group_blocks: blocks of a group (1 for groups of 16). A tile is BT tokens
    x WG warpgroups of 64 weight rows (GATED: half gates, half ups). KIND: bits. BLOCKS: of 32 columns in a stage.
    HALVES: scales of a block, 2 for groups of 16: then half_step is 16, from the scale of a block's first 16 columns to
    that of the others, else 0. center: what multiplies the scale so that it can be added to the offset, see r16.py.
    mode, linear, cubic, partial, counters: as in gemm_wgmma."""

    a_map: zl.TensorMap
    w_map: zl.TensorMap
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
    group_blocks: zl.i32
    half_step: zl.i32
    splits: zl.i32
    has_offset: zl.i32
    has_bias: zl.i32
    mode: zl.i32
    center: zl.f32
    linear: zl.f32
    cubic: zl.f32
    KIND: zl.static
    BLOCKS: zl.static
    HALVES: zl.static
    BT: zl.static
    WG: zl.static
    STAGES: zl.static
    GATED: zl.static

    @property
    def token_bytes(self) -> int:
        """Of a stage; the weights follow."""
        return self.BT * integers.HALF * self.BLOCKS

    @property
    def tiles(self) -> int:
        """Of 16 rows."""
        return self.WG * 4

    @property
    def tile_cols(self) -> int:
        return self.WG * 32 if self.GATED else self.WG * 64


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
            zl.mbarrier_expect(ring.full + slot, stage_size(p.KIND, p.BT, p.WG))
            integers.load_weights(stage + p.token_bytes, ring.full + slot, step, row_tile, p)
            if waited == 0:
                zl.grid_wait()
                waited = 1
            integers.load_tokens(stage, ring.full + slot, step, m * p.BT, p)
            slot += 1
            if slot == ring.stages:
                slot = 0
                parity = parity ^ 1


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
    thread = zl.thread_index() - 128
    warp = thread // 32
    lane = integers.lane_words(warp, p)
    now = integers.group_scales(p)
    state = [zl.i32(0) for _ in zl.static(range(2))]
    accs = [[zl.f32(0) for _ in zl.static(range(p.BT // 2))] for x in zl.static(range(1))]
    for unit in range(zl.block_index(0), units.count, zl.num_blocks(0)):
        tile, m, n, first, end = unit_place(unit, units)
        integers.multiply_tile(accs[0], lane, now, ring, state, n, first, end, p)
        if unit == zl.block_index(0):
            zl.grid_wait()
        complete = units.splits <= 1
        if units.splits > 1:
            complete = sum_parts(accs, unit, tile, last, thread, p.WG * 128, p)
        if complete:
            store_tile(accs[0], m, n, warp, p)


@zl.kernel
def gemm_r16(p: R16Params):
    stage_bytes = stage_size(p.KIND, p.BT, p.WG)
    ring, last = ring_of(-(-stage_bytes // 1024) * 1024, p.STAGES, p.WG * 4)
    units = units_of(p.tokens, p.cols, (p.blocks + (p.BLOCKS - 1)) // p.BLOCKS, p.splits, p.BT, p.tile_cols)
    if zl.warp_index() < 4:
        zl.set_max_registers("dec", REGISTERS[p.WG][0])
        if zl.thread_index() == 0:
            produce(ring, units, p)
    else:
        zl.set_max_registers("inc", REGISTERS[p.WG][1])
        consume(ring, units, last, p)
