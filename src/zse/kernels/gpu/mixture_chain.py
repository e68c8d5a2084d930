"""What stands between the attentions of two layers with a mixture of experts, of one token and int4 weights, as one
launch: o and the residual, RMSNorm, the router and its choice, the chosen experts' gates and ups with their activation,
their downs weighted and added to the residual, RMSNorm, the next layer's q, k and v.

As zse.kernels.gpu.chain, whose way blocks tell each other numbers this is: `mid`, `logit`, `act` and `after` hold zeros, a
number is its own flag. All that a block multiplies with fits its shared memory (of Qwen3-30B-A3B 209 KB), so there is no
ring: o's weights, and those of q, k and v, lie there before attention is done; experts' are copied once the choice is
known, gates and ups first, behind them downs, over o's. A block multiplies tiles of 16 rows: the lower half of a warp the
even chunks of a tile, or of a gate, and the upper half the odd ones, or the up's; of the columns of a mma two belong to
either.

A block has the router's row of one expert, says its logit, and chooses for itself from all of them. What is said is said
REPLICAS times, so that fewer blocks ask for the same bytes at once. Whoever has heard all of `after` knows that the rest has
been read, and puts zeros back; `after` is cleared by the next launch but one, as the chain's. Loops are not unrolled, and
what needs a division is known before attention is done: a launch runs its code once, and mostly reads it from L2."""

from zse import kernel as zl
from zse.kernels.gpu import chain as dense
from zse.kernels.gpu import chain_parts as parts
from zse.kernels.gpu import matmul_few as few
from zse.kernels.gpu import matmul_tiles as tiles
from zse.kernels.gpu import mixture_parts as own
from zse.kernels.gpu import router
from zse.kernels.gpu.mixture_parts import DOWN, GATE_UP, QKV, O
from zse.kernels.route import MAX_CHOSEN
from zse.runtime.args import Args

WARPS, CHUNK = parts.WARPS, parts.CHUNK
ROUTER = "bf16"  # element of the router's weights, as checkpoints have them
SYMBOLS = {False: "mixture_chain_int4_g128", True: "mixture_chain_int4_g128_sym"}


@zl.inline
def keep(words, chunk, columns, facts, p):
    few.prepare_bits([words], [columns + chunk * 256], [facts + chunk * 2], p.lane, 0, True)


@zl.inline
def keep_pairs(words, chunk, columns, facts, p):
    keep([words[0] << 16, words[0] & 0xFFFF0000, words[1] << 16, words[1] & 0xFFFF0000], chunk, columns, facts, p)


@zl.inline
def hear_stream(number, norm, row, columns, facts, p):
    """This warp's chunk of the stream, once it has been said, times the norm's weights, prepared; its part of the sum of
    squares, and of the product with the router's row."""
    squares, dot = zl.f32(0), zl.f32(0)
    words = [zl.u32(0) for _ in zl.static(range(4))]
    if p.warp < p.hidden >> 7:
        source = (p.mid if number == GATE_UP else p.after) + (p.replica * p.hidden + p.warp * CHUNK + p.lane * 4)
        while parts.missing(words):
            parts.load_words(words, source)
        for e in zl.static(range(4)):
            value = zl.bitcast(words[e], zl.f32)
            weighted = value * norm[e]
            squares = zl.fma(value, value, squares)
            bits = row[e // 2] & 0xFFFF0000 if e % 2 else row[e // 2] << 16
            dot = zl.fma(weighted, zl.bitcast(bits, zl.f32), dot)
            words[e] = zl.bitcast(weighted, zl.u32)
    squares, dot = zl.warp_sum(squares), zl.warp_sum(dot)
    if p.lane == 0:
        at = (number >> 1) * (2 * WARPS) + p.warp
        p.squares[at] = squares
        p.squares[at + WARPS] = dot
    dense.release(p.heard + (number >> 1), p)
    if p.warp < p.hidden >> 7:
        keep(words, p.warp, columns, facts, p)


@zl.inline
def hear_numbers(number, chunks, attended, columns, facts, p):
    """What attention gave (of the first two chunks `attended`), or the activations of the chosen experts, once they have been
    said, prepared: every WARPS-th chunk, all of which are asked for at once."""
    words = [zl.u32(0) for _ in zl.static(range(2 * own.MOST_OWN))]
    for i in zl.static(range(own.MOST_OWN)):
        if p.warp + i * WARPS >= chunks:
            words[2 * i], words[2 * i + 1] = zl.u32(1), zl.u32(1)
    if number == O:
        for i in zl.static(range(4)):
            words[i] = attended[i] + 0
        for i in zl.static(range(2, own.MOST_OWN)):
            if p.warp + i * WARPS < chunks:
                pair = zl.bitcast(zl.load(p.a + ((p.warp + i * WARPS) * CHUNK + p.lane * 4), 4), zl.u32)
                words[2 * i], words[2 * i + 1] = pair[0], pair[1]
    else:
        act = p.act + p.replica * (chunks * (CHUNK // 2))
        while parts.missing(words):
            for i in zl.static(range(own.MOST_OWN)):
                if p.warp + i * WARPS < chunks:
                    pair = zl.load_relaxed(act + ((p.warp + i * WARPS) * (CHUNK // 2) + p.lane * 2), 2)
                    words[2 * i], words[2 * i + 1] = pair[0], pair[1]
    for i in zl.static(range(own.MOST_OWN)):
        if p.warp + i * WARPS < chunks:
            keep_pairs(words[2 * i : 2 * i + 2], p.warp + i * WARPS, columns, facts, p)


@zl.inline
def multiply_units(product, share, buffer, columns, facts, p):
    """All units of this block. A warp multiplies every WARPS-th pair of chunks, and begins where the unit before ended."""
    half, is_pair = p.lane // 16, product == GATE_UP
    # A gate's and an up's tile each have their scales behind them.
    pairs, step = (share.chunks + 0 if is_pair else share.chunks >> 1), (zl.i32(1) if is_pair else zl.i32(2))
    fact, column = (zl.i32(0) if is_pair else half + 0), (zl.i32(0) if is_pair else p.lane // 8 % 2)
    piece = half * (share.chunks * own.CHUNK_BYTES if is_pair else zl.i32(parts.WEIGHT_BYTES))
    scale = half * (share.chunks * own.CHUNK_BYTES if is_pair else zl.i32(parts.SCALE_BYTES))
    piece += p.lane % 4 * 64 + p.lane // 4 % 4 * 16
    scale += share.chunks * parts.WEIGHT_BYTES + p.lane // 4 % 4 * 8
    tile, full, first = p.weights + share.begin * own.CHUNK_BYTES, p.full + share.barrier, p.warp + 0
    for _tile in zl.unroll(range(zl.block_index(0), share.tiles, zl.num_blocks(0)), 1):
        acc = [zl.f32(0) for _ in zl.static(range(4))]
        zl.mbarrier_wait(full, 0)
        for i in zl.unroll(range(first, pairs, WARPS), 1):
            at = i * step
            parts.multiply_chunk(
                acc,
                tile,
                at * parts.WEIGHT_BYTES + piece,
                tile,
                at * parts.SCALE_BYTES + scale,
                share.chunks * parts.SCALE_BYTES,
                columns,
                facts,
                at,
                column,
                fact,
                p.SYMMETRIC,
            )
        first = (first - pairs) & (WARPS - 1)
        tile, full = tile + share.step * own.CHUNK_BYTES, full + (zl.i32(1) if is_pair else zl.i32(0))
        zl.mbarrier_wait(p.free + buffer[0], buffer[1] ^ 1)
        if p.lane % 4 == fact:
            sums = p.sums + (buffer[0] * WARPS + p.warp) * tiles.PITCH
            zl.store(sums + p.lane // 4 * 4, zl.make_vector(acc[0], acc[1], acc[2], acc[3]))
        dense.release(p.ready + buffer[0], p)
        parts.move(buffer, 1, own.BUFFERS)


@zl.inline
def hears(number, p):
    """Whether this block needs the stream before gates and ups, or before q, k and v (all do, to put zeros back)."""
    return number != GATE_UP or zl.block_index(0) < max(p.chosen * p.inner >> 4, p.experts)


@zl.inline
def consume(p):
    """The warps that multiply."""
    chunks, block = p.hidden >> 7, zl.block_index(0)
    norm, second = [zl.f32(0) for _ in zl.static(range(4))], [zl.f32(0) for _ in zl.static(range(4))]
    row = [zl.u32(0) for _ in zl.static(range(2))]
    if p.warp < chunks:
        at = p.warp * CHUNK + p.lane * 4
        first, last = zl.load(p.norm1 + at, 4), zl.load(p.norm3 + at, 4)
        for e in zl.static(range(4)):
            norm[e], second[e] = first[e], last[e]
        if block < p.experts:
            pair = zl.bitcast(zl.load(p.router + (zl.i64(block) * p.hidden + at), 4), zl.u32)
            row[0], row[1] = pair[0], pair[1]
    place = tiles.kept(p.lane // 4 % 2 * 64 + p.lane % 4 * 16)
    buffer = [zl.i32(0), zl.i32(0)]
    tasks = parts.tasks_of(p)
    zl.grid_wait()
    attended = parts.hear_attended(tasks, p)
    for number in zl.unroll(range(4), 1):
        share, is_stream = own.share_of(number, p), number & 1
        begin = is_stream * (own.COLUMNS - chunks)
        columns, facts = p.columns + begin * 256, p.facts + begin * 2
        if is_stream != 0:
            if hears(number, p):
                hear_stream(number, norm, row, columns, facts, p)
        elif block < share.tiles:
            hear_numbers(number, share.chunks, attended, columns, facts, p)
        if number == DOWN:
            for e in zl.static(range(4)):
                norm[e] = second[e] + 0.0
        zl.named_barrier(parts.CONSUMERS, WARPS * 32)
        if number == GATE_UP and own.chooses(p):
            own.choose(p)
            dense.release(p.picked, p)
        multiply_units(number, share, buffer, columns + place, facts, p)
        if number == O:
            # What was asked for before is here by now, and is not asked for again where it is used.
            for e in zl.static(range(4)):
                second[e] = zl.shuffle(second[e], p.lane)
            dense.release(p.spent, p)


@zl.inline
def before_tile(number, share, tile, p):
    """What a row's sum of a tile is added to, asked for before it is there."""
    before, row = zl.f32(0), tile * 16 + p.lane % 16
    if tile < share.tiles:
        if number == O:
            before = p.x[row]
        elif number == DOWN:
            before = dense.take_one(p.mid + (p.replica * p.hidden + row))
        elif number == QKV:
            if p.has_bias != 0:
                before = p.bias[row]
    return before


@zl.inline
def say(number, tile, total, before, weight, p):
    """A tile's results to the other blocks, or the last product's where they go. total: of a gate, or of an up."""
    other, row = zl.shuffle_xor(total, 16), tile * 16 + p.lane % 16
    if number == GATE_UP:
        value = tiles.gated_value(total, other, p.mode, False) * weight
        bits = zl.bitcast(zl.convert(zl.make_vector(value, value), zl.bf16), zl.u32) & 0xFFFF
        bits = bits if bits != 0 else zl.u32(parts.NEGATIVE_ZERO >> 16)
        words = [bits, zl.shuffle_down(bits, 1)]
        packed = zl.shuffle(words[0] | words[1] << 16, p.lane % 8 * 2)
        for r in zl.static(range(0, own.REPLICAS, 4)):
            at = (r + p.lane // 8) * (p.chosen * p.inner >> 1) + (tile * 8 + p.lane % 8)
            zl.store_relaxed(p.act + at, packed)
    else:
        result = before + (total + other)
        if number != QKV:
            said = p.mid if number == O else p.after
            for r in zl.static(range(0, own.REPLICAS, 2)):
                zl.store_relaxed(said + ((r + p.lane // 16) * p.hidden + row), dense.flagged(result))
        if number != O and p.lane < 16:
            to = p.x if number == DOWN else p.out
            to[row] = result


@zl.inline
def inverse_rms(number, p):
    """Of the row before a product; before gates and ups the block's expert's logit is said, too."""
    zl.mbarrier_wait(p.heard + (number >> 1), 0)
    total = p.squares[(number >> 1) * (2 * WARPS) + p.lane] + 0.0
    for mask in zl.static((8, 4, 2, 1)):
        total = total + zl.shuffle_xor(total, mask)
    inverse = zl.rsqrt(zl.shuffle(total, 0) / zl.f32(p.hidden) + p.eps)
    logit = total * inverse
    replica = p.lane - WARPS
    if number == GATE_UP and zl.block_index(0) < p.experts and replica >= 0 and replica < own.REPLICAS:
        if p.has_router_bias != 0:
            logit = logit + p.router_bias[zl.block_index(0)]
        zl.store_relaxed(p.logit + (replica * p.experts + zl.block_index(0)), dense.flagged(logit))
    return inverse


@zl.inline
def add_up(p):
    """The warp that adds up the warps' sums of a tile, in their order, a lane each row."""
    buffer, weight, block = [zl.i32(0), zl.i32(0)], zl.f32(0), zl.block_index(0)
    which = min((block + p.lane * zl.num_blocks(0)) // (p.inner >> 4), 31)  # of the chosen, of the block's gates
    zl.grid_wait()
    for i in zl.unroll(range(block * 32 + p.lane, own.REPLICAS * p.hidden, zl.num_blocks(0) * 32), 1):
        p.stale[i] = zl.u32(0)
    for number in zl.unroll(range(4), 1):
        share = own.share_of(number, p)
        inverse, before, unit = zl.f32(1), before_tile(number, share, block, p), zl.i32(0)
        if number & 1 != 0 and hears(number, p):
            inverse = inverse_rms(number, p)
        if number == GATE_UP and block < share.tiles:
            zl.mbarrier_wait(p.picked, 0)
            weight = router.weight_of(p, p.found, p.lane)
        for tile in zl.unroll(range(block, share.tiles, zl.num_blocks(0)), 1):
            zl.mbarrier_wait(p.ready + buffer[0], buffer[1])
            sums = p.sums + (buffer[0] * (WARPS * tiles.PITCH) + p.lane)
            each = [sums[n * tiles.PITCH] + 0.0 for n in zl.static(range(WARPS))]
            dense.release(p.free + buffer[0], p)
            parts.move(buffer, 1, own.BUFFERS)
            total = zl.f32(0)
            for one in zl.static(each):
                total += one
            mine = zl.shuffle(weight, zl.shuffle(which, unit % 32))  # of other products' tiles not used
            say(number, tile, total * inverse, before, mine, p)
            before = before_tile(number, share, tile + zl.num_blocks(0), p)
            unit += 1


@zl.kernel
def mixture_chain(params: own.MixtureChainParams):
    """Grid (blocks), at most one a multiprocessor."""
    zl.grid_launch_dependents()
    lane, warp, thread = tiles.kept(zl.lane_index()), zl.warp_index(), zl.thread_index()
    weights = zl.shared_array(zl.u8, own.CHUNKS * own.CHUNK_BYTES, align=128)
    columns = zl.shared_array(zl.u8, own.COLUMNS * 256, align=128)
    facts = zl.shared_array(zl.f32, own.COLUMNS * 2)
    sums = zl.shared_array(zl.f32, own.BUFFERS * WARPS * tiles.PITCH)
    squares = zl.shared_array(zl.f32, 4 * WARPS)
    logits = zl.shared_array(zl.f32, own.MAX_EXPERTS)
    found = zl.shared_array(zl.i32, MAX_CHOSEN)
    full, ready, free = (
        zl.mbarrier_array(3 + own.MAX_UNITS),
        zl.mbarrier_array(own.BUFFERS),
        zl.mbarrier_array(own.BUFFERS),
    )
    heard, picked, spent = zl.mbarrier_array(2), zl.mbarrier_array(1), zl.mbarrier_array(1)
    if thread < 3 + own.MAX_UNITS:
        zl.mbarrier_init(full + thread, 1)
    if thread < own.BUFFERS:
        zl.mbarrier_init(ready + thread, WARPS)
        zl.mbarrier_init(free + thread, 1)
    if thread < 2:
        zl.mbarrier_init(heard + thread, WARPS)
    if thread == 0:
        zl.mbarrier_init(picked, WARPS)
        zl.mbarrier_init(spent, WARPS)
    zl.mbarrier_init_fence()
    zl.barrier()
    fields = [getattr(params, name) for name in own.MixtureChainParams._fields]
    barriers = dict(full=full, ready=ready, free=free, heard=heard, picked=picked, spent=spent)
    memory = dict(weights=weights, columns=columns, facts=facts, sums=sums, squares=squares, logits=logits, found=found)
    p = own.MixtureBlock(*fields, **barriers, **memory, lane=lane, warp=warp, replica=zl.block_index(0) % own.REPLICAS)
    if warp == WARPS:
        own.copy_all(p)
    elif warp == WARPS + 1:
        add_up(p)
    else:
        consume(p)


def variants(target) -> list[zl.Variant]:
    """Hopper's, as the chain's."""
    if target.arch != 90 or not target.has("tma"):
        return []
    threads = 32 * (WARPS + 2)
    return [zl.Variant(name, mixture_chain, {"SYMMETRIC": sym}, threads=threads) for sym, name in SYMBOLS.items()]


def fits(blocks: int, sizes: tuple[int, int, int, int], experts: int, chosen: int) -> bool:
    """Whether a launch of so many blocks takes a layer of these sizes (hidden, attended, inner, qkv): whole tiles and pairs of
    chunks, and a block has room for its share."""
    hidden, attended, inner, qkv = sizes
    if (
        hidden % (2 * CHUNK)
        or attended % (2 * CHUNK)
        or inner % CHUNK
        or chosen * inner % (2 * CHUNK)
        or qkv % 16
        or experts % 4
    ):
        return False
    numbers = max(attended, chosen * inner) // CHUNK
    units = -(-chosen * inner // 16 // blocks)
    chunks = begins(blocks, hidden, attended, chosen * inner)[1] + -(-qkv // 16 // blocks) * hidden // CHUNK
    is_known = (
        hidden <= own.MAX_HIDDEN and chosen <= min(experts, own.MOST_CHOSEN) and experts <= min(blocks, own.MAX_EXPERTS)
    )
    has_room = (
        chunks <= own.CHUNKS
        and numbers <= own.MOST_OWN * WARPS
        and numbers + hidden // CHUNK <= own.COLUMNS
        and units <= own.MAX_UNITS
    )
    return is_known and has_room


def begins(blocks: int, hidden: int, attended: int, inner: int) -> tuple[int, int]:
    """Where in a block's memory gates, and q, k and v begin, in chunks. inner: of all chosen experts."""
    first = -(-hidden // 16 // blocks) * max(attended, inner) // CHUNK
    return first, first + -(-inner // 16 // blocks) * 2 * hidden // CHUNK


def signal_bytes(hidden: int, inner: int, experts: int, chosen: int) -> int:
    """Of the memory of zse.kernels.mixture_chain.MixtureSignals."""
    return own.REPLICAS * (4 * (4 * hidden + experts) + 2 * chosen * inner)


def launch(recorder, x, attended, weights, product, norms, out, signals, bias, eps, gate, choice, records) -> None:
    """As checked by zse.kernels.mixture_chain.mixture_chain(). product: the router's weight and bias; choice: of
    zse.kernels.gpu.router.choice_args(). A block for each multiprocessor, as the chain's."""
    scheme, (weight, router_bias), blocks = weights[0].scheme, product, recorder.device.num_sms
    sizes = x.shape[1], attended.shape[1], choice["chosen"] * weights[2].shape[1]
    first_gate, first_qkv = begins(blocks, *sizes)
    args = Args(
        a=attended,
        x=x,
        out=out,
        norm1=norms[0],
        norm3=norms[1],
        **dense.records_of(records),
        router=weight.planes["w"],
        router_bias=router_bias,
        bias=bias,
        mid=signals.mid,
        logit=signals.logit,
        act=signals.act,
        after=signals.after,
        stale=signals.stale,
        first_gate=first_gate,
        first_qkv=first_qkv,
        hidden=x.shape[1],
        attended=attended.shape[1],
        inner=weights[2].shape[1],
        qkv=out.shape[1],
        experts=weight.shape[0],
        has_bias=int(bias is not None),
        has_router_bias=int(router_bias is not None),
        mode=dense.GATES[gate],
        eps=eps,
    )
    args |= {name: value for name, value in choice.items() if name != "logits"}
    for number, each in enumerate(weights):
        args[f"w{number}"] = each.planes[scheme.numbers]
        args[f"scale{number}"] = each.planes["scale"]
        args[f"offset{number}"] = each.planes.get("offset")
    recorder.launch(SYMBOLS[scheme.symmetric], args, (blocks,))
