"""Attention of many query tokens over pages in 8 bits, on Hopper's matrix units.

The kernel of attention_prefill.py, with another loading side: a warpgroup for keys and one for values, of which every
warp asks for its pages of a block (bulk copies of bytes and scales), turns them into f16, scales multiplied in, and
writes them where TMA would have put f16 pages. What computes is the same code, with f16 products: three bits more than
bf16 for a scale and for a number times its scale (2^-12 of it each, a sixteenth of what 8 bits cost)."""

from typing import Any

from zse import kernel as zl
from zse.kernels.gpu import attention_prefill as prefill
from zse.kernels.gpu import attention_tiles as tiling
from zse.kernels.gpu.attention_plan import HEAD_DIMS, PREFILL_ROWS, divide
from zse.kernels.gpu.kv8 import page_nbytes
from zse.kernels.kv_pages import BLOCK, PACKED

AT_ONCE = 2  # times 16 bytes that a loading thread has in registers
# Warpgroups that load → registers of a thread of theirs and of a computing one, so that neither spills.
REGISTERS = {1: (72, 216), 2: (48, 208)}
# Variables of the block that is loaded next: where its tile's items begin, whether there is one, the tile's line of the
# page table, head, first and last key, and the block's number.
TURN, MORE, LINE, HEAD, FIRST, LAST, NUMBER = range(7)


class Stream(zl.Record):
    """Keys or values on their way, as a warp of their warpgroup has them: pages; memory: where its part of a block's
    bytes stands in shared memory, scales behind each page; there: barriers of its parts; tiles: BlockRing of f16 that
    all warps fill."""

    pages: Any
    memory: Any
    there: Any
    tiles: Any


class Loading(zl.Record):
    """A loading thread's part of a block of keys or values: 16 bytes of a row in each column of `swizzle` bytes of f16,
    in PASSES rows that are ROWS apart. source: where its bytes of the first two columns begin in its warp's part of a
    block; scale: its row's; places: where its two times 16 bytes go, of the first two columns."""

    source: Any
    scale: Any
    places: Any
    PASSES: int
    ROWS: int


@zl.inline
def loading_of(stages):
    """This thread's Loading. Eight neighbouring threads read from all 32 banks and write to all: two rows of 64 f16, or
    four of 32; where two rows of bytes begin in the same bank they take different columns."""
    D, BN, SW, lane = stages.D, stages.BN, stages.swizzle, zl.lane_index()
    PIECES = SW // 32
    ROWS = 32 // PIECES
    row, piece = lane // PIECES, lane % PIECES
    mix = row % 8 if SW == 128 else row // 2 % 4
    odd = row % 2 if D % 128 == 0 else zl.i32(0)
    to = (zl.warp_index() % 4 * (BN // 4) + row) * SW
    source = [row * D + piece * 16 + (c ^ odd) * (SW // 2) for c in zl.static(range(2))]
    places = [
        [to + ((piece * 2 + u) ^ mix) * 16 + (c ^ odd) * (BN * SW) for u in zl.static(range(2))]
        for c in zl.static(range(2))
    ]
    return Loading(source, BLOCK * D + row * 4, places, BN // 4 // ROWS, ROWS)


@zl.inline
def enter_tile(at, batch, BN):
    """The first block of the tile of turn at[TURN], if there is one."""
    work = tiling.work_of(at[TURN])
    at[MORE] = zl.i32(1) if work < batch.total else zl.i32(0)
    if work < batch.total:
        item = tiling.item_of(work, batch)
        tile = tiling.tile_of(item, batch)
        at[LINE] = tile[2] + 0
        at[HEAD] = item - divide(item, batch.by_heads) * batch.kv_heads
        at[FIRST] = max(tile[3] + 1 - batch.window, 0) if batch.window > 0 else zl.i32(0)
        at[LAST] = tiling.last_key(tile, batch)
        at[NUMBER] = at[FIRST] // BN


@zl.inline
def page_place(at, batch, stages):
    """Element of the pages where this lane's page of its warp's part of the block begins; of a page that is not seen,
    where the nearest that is does: what a window has passed may be another sequence's by now."""
    PAGES = stages.BN // BLOCK // 4
    page = at[NUMBER] * (4 * PAGES) + zl.warp_index() % 4 * PAGES + zl.lane_index() % PAGES
    seen = max(min(page, at[LAST] // BLOCK), at[FIRST] // BLOCK)
    number = batch.page_table[zl.i64(at[LINE]) * batch.max_pages + seen]
    return (zl.i64(number) * batch.kv_heads + at[HEAD]) * page_nbytes(stages.D, 1)


@zl.inline
def ask(stream, slot, place, stages):
    """Asks for a warp's part of a block, into slot `slot`. place: page_place()."""
    pages, size, lane = stages.BN // BLOCK // 4, page_nbytes(stages.D, 1), zl.lane_index()
    full = stream.there + slot * 4
    if lane == 0:
        zl.mbarrier_expect(full, pages * size)
    if lane < pages:
        zl.bulk_copy(stream.memory + (slot * (4 * pages) + lane) * size, stream.pages + place, size, full)


@zl.inline
def as_f16(word, KV):
    """Four stored numbers as two words of two f16, exact: 1 / 128 of i8, 1 / 256 of e4m3, so that what they are
    multiplied with is about the largest number of its token and no subnormal f16."""
    if KV is zl.e4m3:
        words = zl.bitcast(zl.convert(zl.bitcast(word, zl.e4m3.x(4)), zl.f16), zl.u32.x(2))
        low, high = zl.mul_f16x2(words[0], zl.u32(0x1C001C00)), zl.mul_f16x2(words[1], zl.u32(0x1C001C00))
    else:
        plain = word ^ 0x80808080
        # The byte as the last bits of an f16 from 8 on, whose steps are 1 / 128.
        low = zl.sub_f16x2(zl.prmt(plain, zl.u32(0x48484848), 0x4140), zl.u32(0x48804880))
        high = zl.sub_f16x2(zl.prmt(plain, zl.u32(0x48484848), 0x4342), zl.u32(0x48804880))
    return low, high


@zl.inline
def write_block(mine, part, ring, stage, phase, KV, stages):
    """Waits for the stage to be free, fills it with a warp's part of a block, and says so."""
    SW, BN, D, unit = stages.swizzle, stages.BN, stages.D, 256.0 if KV is zl.e4m3 else 128.0
    zl.mbarrier_wait(ring.empty + stage, phase)
    to = ring.memory + stage * stages.block
    sources = [part + mine.source[c] for c in zl.static(range(2))]
    places = [[to + mine.places[c][u] for u in zl.static(range(2))] for c in zl.static(range(2))]
    scale = part + mine.scale
    pieces = [(i, c) for i in range(mine.PASSES) for c in range(stages.columns)]
    for some in zl.static([pieces[n : n + AT_ONCE] for n in range(0, len(pieces), AT_ONCE)]):
        # All loads before the first store: none may pass a store to the same memory.
        loaded = [
            zl.load(
                zl.cast_ptr(
                    sources[c % 2]
                    + (i * mine.ROWS // BLOCK * page_nbytes(D, 1) + i * mine.ROWS % BLOCK * D + c // 2 * SW),
                    zl.u32,
                ),
                4,
            )
            for i, c in zl.static(some)
        ]
        scales = [
            zl.cast_ptr(scale + (i * mine.ROWS // BLOCK * page_nbytes(D, 1) + i * mine.ROWS % BLOCK * 4), zl.f32)[0]
            * unit
            for i, c in zl.static(some)
        ]
        for n, (i, c) in zl.static(list(enumerate(some))):
            words = loaded[n]
            both = zl.bitcast(zl.convert(zl.make_vector(scales[n], scales[n]), zl.f16), zl.u32)
            for u in zl.static(range(2)):
                first, second = as_f16(words[2 * u], KV)
                third, fourth = as_f16(words[2 * u + 1], KV)
                four = [zl.mul_f16x2(pair, both) for pair in zl.static((first, second, third, fourth))]
                place = places[c % 2][u] + (c // 2 * (2 * BN) + i * mine.ROWS) * SW
                zl.store(zl.cast_ptr(place, zl.u32), zl.make_vector(four[0], four[1], four[2], four[3]))
    zl.fence_async()
    zl.warp_barrier()
    if zl.lane_index() == 0:
        zl.mbarrier_arrive(ring.full + stage)


@zl.inline
def next_block(at, batch, BN):
    """The block behind at's, perhaps of the next tile."""
    at[NUMBER] += 1
    if at[NUMBER] > at[LAST] // BN:
        at[TURN] += zl.num_blocks(0)
        enter_tile(at, batch, BN)


@zl.inline
def produce(streams, batch, KV, stages, SLOTS):
    """A warpgroup that loads keys, or values, or both: streams. Each warp has its own rows of a block and waits for no
    other."""
    BN = stages.BN
    SIZE = BN // BLOCK * page_nbytes(stages.D, 1)
    mine = loading_of(stages)
    at = [zl.i32(0) for _ in zl.static(range(7))]
    stage = [zl.i32(0), zl.i32(1)]  # the first wait for an empty stage returns at once
    slot = [zl.i32(0), zl.i32(0)]
    asked = zl.i32(0)
    enter_tile(at, batch, BN)
    for n in zl.static(range(SLOTS)):
        if at[MORE] == 1:
            place = page_place(at, batch, stages)
            for stream in zl.static(streams):
                ask(stream, n, place, stages)
            asked += 1
            next_block(at, batch, BN)
    while asked > 0:
        coming = page_place(at, batch, stages)
        for stream in zl.static(streams):
            zl.mbarrier_wait(stream.there + slot[0] * 4, slot[1])
            write_block(mine, stream.memory + slot[0] * SIZE, stream.tiles, stage[0], stage[1], KV, stages)
            if at[MORE] == 1:
                ask(stream, slot[0], coming, stages)
        asked -= 1
        if at[MORE] == 1:
            asked += 1
            next_block(at, batch, BN)
        prefill.advance(stage, streams[0].tiles)
        slot[1] = 1 - slot[1] if slot[0] == SLOTS - 1 else slot[1]
        slot[0] = 0 if slot[0] == SLOTS - 1 else slot[0] + 1


def of_f16(batch: tiling.HalvedBatch) -> tiling.HalvedBatch:
    """The batch as its computing side has it."""
    return tiling.HalvedBatch(**(vars(batch) | {"KV": zl.f16}))


@zl.kernel
def attention_prefill_packed(
    q: zl.Ptr[zl.bf16, "const"],
    k_pages: zl.Ptr[zl.u8, "const"],
    v_pages: zl.Ptr[zl.u8, "const"],
    p: tiling.PrefillParams,
    BN: zl.static,
    SLOTS: zl.static,
    WGS: zl.static,
):
    """A persistent grid over the plan's tiles x kv heads. SLOTS: blocks of bytes of keys, and of values, in shared
    memory; WGS: warpgroups that load."""
    D, block = p.D, BN * p.D * 2  # bytes of a block of keys
    zl.grid_launch_dependents()
    size = BN // BLOCK * page_nbytes(D, 1)
    queries = zl.shared_array(zl.u8, PREFILL_ROWS * D * 2, align=1024)
    keys = zl.shared_array(zl.u8, 2 * prefill.STAGES * block, align=1024)
    bytes_ = zl.shared_array(zl.u8, 2 * SLOTS * size, align=128)
    there = zl.mbarrier_array(8 * SLOTS)
    full = zl.mbarrier_array(2 * prefill.STAGES)
    empty = zl.mbarrier_array(2 * prefill.STAGES)
    rings = [
        prefill.BlockRing(
            keys + which * (prefill.STAGES * block),
            full + which * prefill.STAGES,
            empty + which * prefill.STAGES,
            prefill.STAGES,
        )
        for which in zl.static(range(2))
    ]
    stages = prefill.KeyStages(prefill.BlockRing(queries, None, None, 1), rings[0], rings[1], D, BN)
    if zl.thread_index() == 0:
        for each in zl.static(range(8 * SLOTS)):
            zl.mbarrier_init(there + each, 1)
        for stage in zl.static(range(2 * prefill.STAGES)):
            zl.mbarrier_init(full + stage, 4)
            zl.mbarrier_init(empty + stage, prefill.GROUPS * 4)
        zl.mbarrier_init_fence()
    zl.barrier()
    zl.grid_wait()
    batch = of_f16(tiling.halved(tiling.batch_of(p), 0, 1))
    warp = zl.warp_index()
    if warp >= 4 and warp < 4 + 4 * prefill.GROUPS:
        zl.set_max_registers("inc", REGISTERS[WGS][1])
        prefill.consume(q, tiling.factor_of(p), batch, stages)
    else:
        zl.set_max_registers("dec", REGISTERS[WGS][0])
        part = bytes_ + warp % 4 * (size // 4)
        if WGS == 2:
            which = warp // 12
            tiles = prefill.BlockRing(
                keys + which * (prefill.STAGES * block),
                full + which * prefill.STAGES,
                empty + which * prefill.STAGES,
                prefill.STAGES,
            )
            its = there + (which * (4 * SLOTS) + warp % 4)
            stream = Stream(v_pages if which == 1 else k_pages, part + which * (SLOTS * size), its, tiles)
            produce((stream,), batch, p.KV, stages, SLOTS)
        else:
            for_keys = Stream(k_pages, part, there + warp % 4, rings[0])
            for_values = Stream(v_pages, part + SLOTS * size, there + (4 * SLOTS + warp % 4), rings[1])
            produce((for_keys, for_values), batch, p.KV, stages, SLOTS)


def packed_symbol(kv: str, head_dim: int) -> str:
    return f"attention_prefill_{kv}_d{head_dim}"


def packed_variants(target) -> list[zl.Variant]:
    """head_dim x dtype of the pages."""
    if target.arch != 90:
        return []
    variants = []
    for name, dtype in PACKED.items():
        for dim in HEAD_DIMS:
            # 256 dimensions leave room for one block of bytes, and ptxas has no registers for their wgmma beside 512
            # threads.
            small = {"BN": 64, "SLOTS": 1, "WGS": 1} if dim > 128 else {"BN": 128, "SLOTS": 2, "WGS": 2}
            threads = 128 * (prefill.GROUPS + small["WGS"])
            statics = {"D": dim, "KV": dtype, **small}
            variants.append(zl.Variant(packed_symbol(name, dim), attention_prefill_packed, statics, threads=threads))
    return variants
