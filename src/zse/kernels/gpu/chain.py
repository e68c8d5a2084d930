"""What stands between the attentions of two layers, of one token and int4 weights, as one launch: o and the residual,
RMSNorm, gate and up with their activation, down and the residual, RMSNorm, the next layer's q, k and v.

A launch costs 2.5 us above its bytes, and memory rests in most of that. Here a block's ring of weights (190 KB) goes on
filling across the four products. One warp copies; at most FLIGHT stages are on their way at a time, for what is asked of
memory stands in front of the activations that a block waits for (without a limit 40.6 us of a layer instead of 37.4, an
H200), and fewer of the first ones. Loops over products are not unrolled, and what needs a division is known before
attention is done: a launch runs its code once. Attention's tasks leave their records to be merged here, and its grid is
only as large as they are many, since this launch's blocks start 2 us behind the last of its. 16 warps multiply as matmul_few does; one adds up their sums of a unit of 32 rows, so that they never wait.

Blocks tell each other numbers that are their own flags: `mid`, `act` and `after` hold zeros, a number is stored as bits
that are not zero (+0 as -0), who needs it waits until it is there. No counters, no fences. All blocks wait for all
others, so a launch has at most one block a multiprocessor, which fills its shared memory; the next launch's blocks start
when these have. What a launch said the next one clears, and the next but one says anew. It reads the stream there, too:
`x` itself is left by the last launch alone, and nothing is done at an end that attention waits for.

Down's columns are in SPLIT parts: a block needs, and prepares, only that share of the activations; its rows' sums arrive
in as many parts. RMSNorm's factor is common to a row, so products take x times the norm's weights, and their results are
divided by the root of the mean square, which each block finds for itself.
"""

from zse import kernel as zl
from zse.kernels.gpu import chain_parts as parts
from zse.kernels.gpu import matmul_few as few
from zse.kernels.gpu import matmul_tiles as tiles
from zse.runtime.args import Args

GATES = {"silu": tiles.GATED_SILU, "gelu_tanh": tiles.GATED_GELU}
# By whether weights are symmetric, and whether what follows is no such launch. (Code of another one's end costs a launch 1.5
# us, an H200, also where it is jumped over.)
SYMBOLS = {
    (sym, last): f"chain{'_last' * last}_int4_g128{'_sym' * sym}" for sym in (False, True) for last in (False, True)
}


@zl.inline
def multiply(acc, stage, j, chunk, columns, facts, p):
    """acc += chunk j of a stage, the block's number `chunk` of a row."""
    g = p.lane // 4
    piece, scale = j * parts.WEIGHT_BYTES + p.piece, g // 4 * parts.TILE_SCALES + g % 4 * 8
    scales = stage + (parts.SCALES_AT + j * parts.SCALE_BYTES)
    parts.multiply_chunk(
        acc, stage, piece, scales, scale, 2 * parts.TILE_SCALES, columns, facts, chunk, 0, 0, p.SYMMETRIC
    )


@zl.inline
def release(barrier, p):
    """By a whole warp."""
    zl.warp_barrier()
    if p.lane == 0:
        zl.mbarrier_arrive(barrier)


@zl.inline
def multiply_units(share, ahead, state, buffer, columns, facts, p):
    """All units of this block. A warp multiplies one chunk of every other stage. ahead: stages from the product's first to
    the warp's next. Returns that of the next product."""
    j = p.warp % parts.PER_STAGE
    at, start, total = ahead * parts.PER_STAGE + j, zl.i32(0), share.units * share.count
    for _unit in zl.unroll(range(share.units), 1):
        acc = [zl.f32(0) for _ in zl.static(range(4))]
        while at < start + share.count:
            zl.mbarrier_wait(p.full + state[0], state[1])
            multiply(acc, p.ring + state[0] * parts.STAGE_BYTES, j, at - start, columns, facts, p)
            release(p.empty + state[0], p)
            parts.move(state, 2, p.STAGES)
            at += 2 * parts.PER_STAGE
        start += share.count
        zl.mbarrier_wait(p.free + buffer[0], buffer[1] ^ 1)
        few.leave(acc, p.sums + (buffer[0] * parts.WARPS + p.warp) * tiles.PITCH, p)
        release(p.ready + buffer[0], p)
        parts.move(buffer, 1, parts.BUFFERS)
    if at - j < total:  # the last stage has no chunk for this warp
        zl.mbarrier_wait(p.full + state[0], state[1])
        release(p.empty + state[0], p)
        parts.move(state, 2, p.STAGES)
        at += 2 * parts.PER_STAGE
    return (at - j) // parts.PER_STAGE - (total + (parts.PER_STAGE - 1)) // parts.PER_STAGE


@zl.inline
def consume(p):
    """The warps that multiply."""
    norms = [zl.f32(0) for _ in zl.static(range(8))]
    parts.load_norms(norms, parts.GATE_UP, p.warp, p)
    place = tiles.kept(p.lane // 4 % 2 * 64 + p.lane % 4 * 16)
    ahead = p.warp // parts.PER_STAGE
    state, buffer = [ahead + 0, zl.i32(0)], [zl.i32(0), zl.i32(0)]
    tasks = parts.tasks_of(p)
    zl.grid_wait()
    attended = parts.hear_attended(tasks, p)
    for product in zl.unroll(range(4), 1):
        share = parts.kept_share(product, p)
        columns = p.columns + product % 2 * (parts.MOST_CHUNKS * 256)
        facts = p.facts + product % 2 * (parts.MOST_CHUNKS * 2)
        if share.units > 0 or product == parts.QKV:
            square = zl.warp_sum(parts.prepare(product, share, attended, norms, columns, facts, p))
            if product % 2 == 1 and p.lane == 0:
                p.squares[product // 2 * parts.WARPS + p.warp] = square
        if product == parts.DOWN:
            parts.load_norms(norms, parts.QKV, p.warp, p)
        zl.named_barrier(parts.CONSUMERS, parts.WARPS * 32)
        if product % 2 == 1 and p.lane == 0:
            zl.mbarrier_arrive(p.heard + product // 2)
        ahead = multiply_units(share, ahead, state, buffer, columns + place, facts, p)


@zl.inline
def flagged(value):
    """The bits of an f32, not zero."""
    bits = zl.bitcast(value, zl.u32)
    return bits if bits != 0 else zl.u32(parts.NEGATIVE_ZERO)


@zl.inline
def take_one(pointer):
    word = zl.load_relaxed(pointer)
    while word == 0:
        word = zl.load_relaxed(pointer)
    return zl.bitcast(word, zl.f32)


@zl.inline
def inverse_of(which, p):
    """What the results of a normed row are multiplied with."""
    squares = zl.f32(0)
    for n in zl.static(range(parts.WARPS)):
        squares += p.squares[which * parts.WARPS + n]
    return zl.rsqrt(squares / zl.f32(p.hidden) + p.eps)


@zl.inline
def summed(after, row, p):
    """The stream's row of what all parts said."""
    words = [zl.load_relaxed(after + (s * p.hidden + row)) for s in zl.static(range(parts.SPLIT))]
    total = zl.bitcast(words[0], zl.f32)
    for word in zl.static(words[1:]):
        total = total + zl.bitcast(word, zl.f32)
    return total


@zl.inline
def leave_stream(p):
    """By the warp that copies, once this block has heard all: the stream's rows of this block, and where there are no q, k
    and v these normed."""
    zl.grid_wait()
    zl.mbarrier_wait(p.heard + 1, 0)
    inverse = inverse_of(zl.i32(1), p)
    for unit in zl.unroll(range(zl.block_index(0), p.hidden // 32, zl.num_blocks(0)), 1):
        row = unit * 32 + p.lane
        total = summed(p.after, row, p)
        p.x[row] = total
        if p.qkv == 0:
            zl.cast_ptr(p.out, zl.bf16)[row] = zl.convert(total * inverse * p.norm3[row], zl.bf16)


@zl.inline
def clear(p):
    """By the warp that adds up, this block's share of what the launch before said, but its sums."""
    for i in zl.unroll(range(zl.block_index(0) * 32 + p.lane, p.hidden // 4 + p.inner // 8, zl.num_blocks(0) * 32), 1):
        zl.store(p.stale + i * 4, zl.make_vector(*[zl.u32(0) for _ in zl.static(range(4))]))


@zl.inline
def before_unit(product, share, u, p):
    """What a row's sum of the block's unit u is added to, asked for before it is there."""
    before, row = zl.f32(0), parts.tile_of(share, u, 2) * 16 + p.lane
    if u < share.units and (u != share.half or p.lane < 16):
        if product == parts.O:
            sums = p.stale + (p.hidden + p.inner // 2)
            if p.follows != 0:
                before = summed(sums, row, p)
            else:
                before = p.x[row]
            for s in zl.static(range(parts.SPLIT)):
                zl.store_relaxed(sums + (s * p.hidden + row), 0)
        elif product == parts.DOWN:
            if share.begin == 0:
                before = take_one(p.mid + row)
        elif product == parts.QKV:
            if p.has_bias != 0:
                before = p.bias[row]
    return before


@zl.inline
def say(product, unit, row, is_one, before, total, p):
    """A row's result to the other blocks, or the last one's where it goes. is_one: of a tile alone."""
    if product == parts.GATE_UP:
        value = tiles.gated_value(total, zl.shuffle_xor(total, 16), p.mode, False)
        bits = zl.bitcast(zl.convert(zl.make_vector(value, value), zl.bf16), zl.u32) & 0xFFFF
        bits = bits if bits != 0 else zl.u32(parts.NEGATIVE_ZERO >> 16)
        words = [bits, zl.shuffle_down(bits, 1)]
        packed = zl.shuffle(words[0] | words[1] << 16, p.lane * 2 % 32)
        if p.lane < 8:
            zl.store_relaxed(p.act + (unit * 8 + p.lane), packed)
    elif product == parts.QKV:
        p.out[row] = before + total
    elif not is_one or p.lane < 16:
        said = p.mid + row if product == parts.O else p.after + (zl.block_index(0) % parts.SPLIT * p.hidden + row)
        zl.store_relaxed(said, flagged(before + total))


@zl.inline
def add_up(p):
    """The warp that adds up the warps' sums of a unit, in their order, a lane each row."""
    buffer = [zl.i32(0), zl.i32(0)]
    zl.grid_wait()
    clear(p)
    for product in zl.unroll(range(4), 1):
        share = parts.kept_share(product, p)
        before = before_unit(product, share, zl.i32(0), p)
        inverse = zl.f32(1)
        if product % 2 == 1:
            release(p.heard + product // 2, p)
            zl.mbarrier_wait(p.heard + product // 2, 0)
            inverse = inverse_of(product // 2, p)
        for u in zl.unroll(range(share.units), 1):
            unit = share.first + u * share.step
            zl.mbarrier_wait(p.ready + buffer[0], buffer[1])
            sums = p.sums + (buffer[0] * (parts.WARPS * tiles.PITCH) + p.lane)
            each = [sums[n * tiles.PITCH] + 0.0 for n in zl.static(range(parts.WARPS))]
            release(p.free + buffer[0], p)
            parts.move(buffer, 1, parts.BUFFERS)
            total = zl.f32(0)
            for one in zl.static(each):
                total += one
            row = parts.tile_of(share, u, 2) * 16 + p.lane
            say(product, unit, row, u == share.half, before, total * inverse, p)
            before = before_unit(product, share, u + 1, p)


@zl.kernel
def chain(params: parts.ChainParams):
    """Grid (blocks), at most one a multiprocessor."""
    zl.grid_launch_dependents()
    lane, warp, thread = tiles.kept(zl.lane_index()), zl.warp_index(), zl.thread_index()
    ring = zl.shared_array(zl.u8, params.STAGES * parts.STAGE_BYTES, align=128)
    columns = zl.shared_array(zl.u8, 2 * parts.MOST_CHUNKS * 256, align=128)
    facts = zl.shared_array(zl.f32, 2 * parts.MOST_CHUNKS * 2)
    sums = zl.shared_array(zl.f32, parts.BUFFERS * parts.WARPS * tiles.PITCH)
    squares = zl.shared_array(zl.f32, 2 * parts.WARPS)
    shares = zl.shared_array(zl.i32, 4 * len(parts.ChainShare._fields))
    full, empty = zl.mbarrier_array(params.STAGES), zl.mbarrier_array(params.STAGES)
    ready, free, heard = zl.mbarrier_array(parts.BUFFERS), zl.mbarrier_array(parts.BUFFERS), zl.mbarrier_array(2)
    if thread < params.STAGES:
        zl.mbarrier_init(full + thread, 1)
        zl.mbarrier_init(empty + thread, parts.PER_STAGE)
    if thread < parts.BUFFERS:
        zl.mbarrier_init(ready + thread, parts.WARPS)
        zl.mbarrier_init(free + thread, 1)
    if thread < 2:
        zl.mbarrier_init(heard + thread, parts.WARPS + 1)
    zl.mbarrier_init_fence()
    piece = tiles.kept(lane // 16 * (parts.SCALES_AT // 2) + lane % 4 * 64 + lane // 4 % 4 * 16)
    fields = [getattr(params, name) for name in parts.ChainParams._fields]
    barriers = dict(full=full, empty=empty, ready=ready, free=free, heard=heard)
    memory = dict(ring=ring, sums=sums, squares=squares, columns=columns, facts=facts, shares=shares)
    p = parts.ChainBlock(*fields, **barriers, **memory, lane=lane, warp=warp, piece=piece, here=1)
    if warp == 0:
        parts.keep_shares(p)
    zl.barrier()
    if warp == parts.WARPS:
        parts.copy_weights(p)
        if p.LEAVES:
            leave_stream(p)
    elif warp == parts.WARPS + 1:
        add_up(p)
    else:
        consume(p)


def variants(target) -> list[zl.Variant]:
    """Hopper's: the ring takes its shared memory, and nothing else was measured."""
    if target.arch != 90 or not target.has("tma"):
        return []
    fixed = {"STAGES": parts.STAGES, "FLIGHT": parts.FLIGHT}
    threads = 32 * (parts.WARPS + 2)
    return [
        zl.Variant(name, chain, fixed | {"SYMMETRIC": sym, "LEAVES": last}, threads=threads)
        for (sym, last), name in SYMBOLS.items()
    ]


def fits(blocks: int, hidden: int, attended: int, inner: int, qkv: int) -> bool:
    """Whether a launch of so many blocks takes a layer of these sizes: whole chunks and units; a stage of the ring has the
    chunks of at most two units; and what a block multiplies with has room."""
    share = -(-inner // parts.CHUNK // parts.SPLIT)
    chunks = hidden // parts.CHUNK, attended // parts.CHUNK, share, inner // parts.CHUNK - (parts.SPLIT - 1) * share
    is_whole = hidden % parts.CHUNK == attended % parts.CHUNK == inner % parts.CHUNK == qkv % 32 == 0
    return is_whole and blocks >= parts.SPLIT and min(chunks) >= parts.PER_STAGE and max(chunks) <= parts.MOST_CHUNKS


def signal_bytes(hidden: int, inner: int) -> int:
    """Of the memory of what zse.kernels.chain.Signals has of one launch."""
    return 4 * hidden + 2 * inner + 4 * parts.SPLIT * hidden


def records_of(records) -> dict:
    """The arguments of zse.kernels.chain.Records, or of none."""
    found = dict(zip(("records", "totals", "plan"), records or (None,) * 3, strict=True))
    return found | dict(has_records=int(records is not None))


def launch(recorder, x, attended, weights, norms, out, signals, bias, eps: float, gate: str, records, more) -> None:
    """As checked by zse.kernels.chain.chain(). more: (follows, leaves). A block for each multiprocessor, of which each has room
    for one: all run at once, as they have to."""
    scheme, (follows, leaves) = weights[0].scheme, more
    args = Args(
        a=attended,
        x=x,
        out=out,
        norm1=norms[0],
        norm3=norms[1],
        **records_of(records),
        bias=bias,
        mid=signals.mid,
        act=signals.act,
        after=signals.after,
        stale=signals.stale,
        hidden=x.shape[1],
        attended=attended.shape[1],
        inner=weights[2].shape[1],
        qkv=weights[3].shape[0] if len(weights) > 3 else 0,
        has_bias=int(bias is not None),
        follows=int(follows),
        mode=GATES[gate],
        eps=eps,
    )
    for number in range(4):
        planes = weights[number].planes if number < len(weights) else {}
        args[f"w{number}"] = planes.get(scheme.numbers)
        args[f"scale{number}"] = planes.get("scale")
        args[f"offset{number}"] = planes.get("offset")
    recorder.launch(SYMBOLS[scheme.symmetric, leaves], args, (recorder.device.num_sms,))
