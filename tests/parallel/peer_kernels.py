"""The kernels of peers with all ranks in one launch of the emulator: grid dimension 1 is the rank, each has its part of every
buffer. Their blocks then run in any order among each other, as on GPUs, and with one block a rank each may be rounds ahead
of what the others have begun."""

from zse import kernel as zl
from zse.kernels.gpu import all_reduce, peer_messages, peers, sum_norm


class Ranks(zl.Record):
    """base: the ranks' buffers, `stride` words of 8 bytes apart. rounds: exchanges one after the other, each of other numbers:
    of round i rank r's stand at i * size + r."""

    base: zl.Ptr[zl.u64]
    stride: zl.i32
    stop: zl.Ptr[zl.u32]
    patience: zl.i64
    size: zl.i32
    inbox: zl.i32
    outbox: zl.i32
    rounds: zl.i32
    WORLD: zl.static


@zl.inline
def base_of(p, rank):
    return p.base + p.stride * rank


@zl.inline
def peer_params(p, rank):
    return peers.PeerParams(
        base_of(p, 0),
        base_of(p, 1),
        base_of(p, 2),
        base_of(p, 3),
        base_of(p, 4),
        base_of(p, 5),
        base_of(p, 6),
        base_of(p, 7),
        base_of(p, rank),
        p.stop,
        p.patience,
        rank,
        p.size,
        p.inbox,
        p.outbox,
        p.WORLD,
    )


class ReduceRanks(Ranks):
    """x, out: `count` numbers a rank and round."""

    x: zl.Ptr["T", "const"]  # noqa: F821
    out: zl.Ptr["T"]  # noqa: F821
    count: zl.i64
    begin: zl.i64
    most: zl.i32
    in_place: zl.i32
    KIND: zl.static
    T: zl.static
    M: zl.static


@zl.kernel
def reduce_ranks(p: ReduceRanks):
    zl.grid_wait()
    rank = zl.block_index(1)
    common = peer_params(p, rank)
    for i in range(p.rounds):
        place = p.count * (i * p.size + rank)
        q = all_reduce.ReduceParams(
            **vars(common),
            x=p.x + place,
            out=p.out + place,
            count=p.count,
            begin=p.begin,
            most=p.most,
            in_place=p.in_place,
            T=p.T,
            M=p.M,
        )
        if p.KIND == "small":
            all_reduce.reduce_small(q)
        else:
            all_reduce.reduce_large(q)
        zl.barrier()


class SumNormRanks(Ranks):
    """Of two ranks. x, delta f32 [rounds, 2, rows, width]: each rank's stream, which grows, and part; out bf16 likewise. By turns with sums
    that carry numbers, of the same deltas in `sums`."""

    x: zl.Ptr[zl.f32]
    delta: zl.Ptr[zl.f32, "const"]  # noqa: F821
    weight: zl.Ptr[zl.f32, "const"]  # noqa: F821
    out: zl.Ptr[zl.bf16]
    q: zl.Ptr[zl.e4m3]
    scale: zl.Ptr[zl.f32]
    sums: zl.Ptr[zl.f32]
    width: zl.i32
    eps: zl.f32
    M: zl.static
    OUT: zl.static
    V: zl.static
    TURNS: zl.static


@zl.kernel
def sum_norm_ranks(p: SumNormRanks):
    zl.grid_wait()
    rank = zl.block_index(1)
    common = peer_params(p, rank)
    count = zl.num_blocks(0) * p.width
    for i in range(p.rounds):
        place = (i * p.size + rank) * count
        q = sum_norm.SumNormParams(
            **vars(common),
            x=p.x + place,
            delta=p.delta + place,
            weight=p.weight,
            out=p.out + place,
            q=p.q + place,
            scale=p.scale + (i * p.size + rank) * zl.num_blocks(0),
            sums=zl.cast_ptr(p.sums, zl.f16),
            has_sums=zl.i32(0),
            width=p.width,
            eps=p.eps,
            M=p.M,
            OUT=p.OUT,
            V=p.V,
            NORM="rms",
            PARTS=1,
        )
        sum_norm.add_and_norm(q)
        zl.barrier()
        if p.TURNS:
            r = all_reduce.ReduceParams(
                **vars(common),
                x=p.delta + place,
                out=p.sums + place,
                count=zl.i64(count),
                begin=zl.i64(0),
                most=zl.i32(0),
                in_place=zl.i32(0),
                T=zl.f32,
                M=p.M,
            )
            all_reduce.reduce_small(r)
            zl.barrier()


class GatherRanks(Ranks):
    """x u32 [rounds, rows, sum of widths]: of each round the ranks' parts one behind the other; out likewise gathered."""

    x: zl.Ptr[zl.u32, "const"]  # noqa: F821
    out: zl.Ptr[zl.u32]
    width0: zl.i32
    width1: zl.i32
    width2: zl.i32
    rows: zl.i32
    begin: zl.i32
    most: zl.i32
    KIND: zl.static  # "all": out is every rank's, one behind the other


@zl.kernel
def gather_ranks(p: GatherRanks):
    """Of three ranks."""
    zl.grid_wait()
    rank = zl.block_index(1)
    common = peer_params(p, rank)
    zero = zl.i32(0)
    total = p.width0 + p.width1 + p.width2
    before = zl.where(rank == 0, zero, zl.where(rank == 1, p.width0, p.width0 + p.width1))
    for i in range(p.rounds):
        every = p.KIND == "all"
        place = i * 3 + rank if every else i
        x, out = p.x + (i * total + before) * p.rows, p.out + place * total * p.rows
        if p.KIND != "broadcast":
            q = all_reduce.GatherParams(
                **vars(common),
                x=x,
                out=out,
                width0=p.width0,
                width1=p.width1,
                width2=p.width2,
                width3=zero,
                width4=zero,
                width5=zero,
                width6=zero,
                width7=zero,
                rows=p.rows,
                begin=p.begin,
                most=p.most,
                every=zl.i32(1 if every else 0),
            )
            all_reduce.gather_rows(q)
        else:
            q = all_reduce.BroadcastParams(**vars(common), x=p.out + (i * 3 + rank) * p.rows, count=p.rows)
            all_reduce.broadcast_words(q)
        zl.barrier()


class RingRanks(Ranks):
    """x u32 [rounds, size, count]: what each rank has. out, likewise: what came to rank 0 after a way round the ring, on which every
    other rank added 1 to each word; what the others sent on. ahead: messages that rank 0 sends before it takes the first."""

    x: zl.Ptr[zl.u32]
    out: zl.Ptr[zl.u32]
    count: zl.i32
    begin: zl.i32
    most: zl.i32
    ahead: zl.i32


@zl.inline
def message(p, common, x):
    return peer_messages.MessageParams(**vars(common), x=x, count=zl.i64(p.count), begin=zl.i64(p.begin), most=p.most)


@zl.kernel
def ring_ranks(p: RingRanks):
    """One block a rank, or, of a single round, several."""
    zl.grid_wait()
    rank = zl.block_index(1)
    common = peer_params(p, rank)
    for i in range(p.rounds + p.ahead):
        if rank == 0:
            if i < p.rounds:
                peer_messages.send_words(message(p, common, p.x + i * p.size * p.count))
            zl.barrier()
            if i >= p.ahead:
                peer_messages.receive_words(message(p, common, p.out + (i - p.ahead) * p.size * p.count))
        elif i < p.rounds:
            place = p.out + (i * p.size + rank) * p.count
            peer_messages.receive_words(message(p, common, place))
            zl.barrier()
            first = zl.block_index(0) * zl.target.threads + zl.thread_index()
            for k in zl.static(range(4)):  # what copy_share gives this thread's block
                if p.begin + first * 4 + k < p.count:
                    place[p.begin + first * 4 + k] = place[p.begin + first * 4 + k] + 1
            zl.barrier()
            peer_messages.send_words(message(p, common, place))
        zl.barrier()
