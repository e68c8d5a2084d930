"""The sum of two ranks' parts, its addition to the stream and the RMSNorm behind it as one launch, of as few rows as go one way over the
link (peers.py says how): what all_reduce_small and add_rmsnorm_row give, bit for bit.

A launch less between two products is a wait less, and as a row is one block's, half of a GPU's multiprocessors are free for blocks of the
next product, which ask for their first weights meanwhile; parts carry no numbers, so half as many bytes go over the link."""

from zse import kernel as zl
from zse.kernels.gpu import peers
from zse.kernels.gpu.all_reduce import numbers_of, sent_as, words_of
from zse.kernels.gpu.gemm_push import place_of
from zse.kernels.gpu.norm import write_row
from zse.kernels.gpu.peers import PeerParams
from zse.kernels.norm import GPU_THREADS, VECTORS

FORMS = (("f32", zl.f32), ("half", zl.bf16))  # as what parts are sent


class SumNormParams(PeerParams):
    """x f32 [rows, width] += the sum of both ranks' delta; out or q, scale and sums = its RMSNorm times weight. width is a multiple of
    8. M: what parts are sent as; the others as NormParams'."""

    x: zl.Ptr[zl.f32]
    delta: zl.Ptr[zl.f32, "const"]
    weight: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.bf16]
    q: zl.Ptr[zl.e4m3]
    scale: zl.Ptr[zl.f32]
    sums: zl.Ptr[zl.f16]
    has_sums: zl.i32
    width: zl.i32
    eps: zl.f32
    M: zl.static
    OUT: zl.static
    V: zl.static
    NORM: zl.static
    PARTS: zl.static


@zl.inline
def load_weights(ws, places, p):
    for v in zl.static(range(p.V)):
        if places[v] < p.width:
            ws[v] = zl.load(p.weight + places[v], 4)


@zl.inline
def add_and_norm(p):
    M, V = p.M, p.V
    t, header = zl.thread_index(), zl.cast_ptr(p.own, zl.u32)
    row = zl.i64(zl.block_index(0))
    places = [(t + v * zl.target.threads) * 4 for v in zl.static(range(V))]
    within = [place < p.width for place in places]
    xs = [zl.f32.x(4)(0) for v in zl.static(range(V))]
    ds = [zl.f32.x(4)(0) for v in zl.static(range(V))]
    ws = [zl.f32.x(4)(0) for v in zl.static(range(V))]
    if V <= 4:  # no kernel writes them: they may be read before the wait, registers permitting
        load_weights(ws, places, p)
    zl.grid_wait()
    number = peers.small_number(p)
    for v in zl.static(range(V)):
        if within[v]:
            ds[v] = zl.load(p.delta + row * p.width + places[v], 4)
    for v in zl.static(range(V)):
        if within[v]:
            xs[v] = zl.load(p.x + row * p.width + places[v], 4)
    # Numbers in a word of 8 bytes: two f32 or four bf16.
    of_word, count = 2 if M is zl.f32 else 4, 4 if M is zl.f32 else 2
    first = peers.bare_slot(number, p)
    words = [first + (zl.block_index(0) * p.width + places[v]) // of_word for v in zl.static(range(V))]
    other = zl.where(p.rank == 0, p.peer1, p.peer0)
    mine = [peers.not_zero(words_of(sent_as(ds[v], zl.f32, M), M)) for v in zl.static(range(V))]
    for v in zl.static(range(V)):
        if within[v]:
            peers.send_bare(mine[v], other + words[v])
    theirs = peers.receive_bare(count, [p.own + word for word in words], within, p)
    for v in zl.static(range(V)):
        if within[v]:
            xs[v] = xs[v] + (numbers_of(mine[v], M) + numbers_of(theirs[v], M))
            zl.store(p.x + row * p.width + places[v], xs[v])
    # All of this block have read the number: the last block to say so gives the next exchange its own, without waiting here.
    zl.barrier()
    before = zl.u32(0)
    if t == 0:
        before = zl.atomic_add(header + peers.SMALL_DONE, 1)
    if V > 4:
        load_weights(ws, places, p)
    write_row(xs, ws, places, row, p)
    if (t == 0) & (before == zl.u32(zl.num_blocks(0)) - 1):
        zl.store_relaxed(header + peers.SMALL_DONE, 0)
        zl.store_relaxed(header + peers.SMALL_NUMBER, zl.where(number == 0xFFFFFFFF, zl.u32(1), number))


@zl.kernel
def sum_norm_row(p: SumNormParams):
    """Grid (rows)."""
    zl.grid_launch_dependents()
    add_and_norm(p)


class PushedNormParams(SumNormParams):
    """The parts are in slots of gemm_push, this rank's and the other's. OUT "none": x is added to, nothing more. `delta` is not read."""

    mine: zl.Ptr[zl.u64]
    theirs: zl.Ptr[zl.u64]


@zl.kernel
def pushed_norm_row(p: PushedNormParams):
    """Grid (rows). This begins when all that was before the product has ended (gemm_push lets it), so slots that it finds filled were filled
    by this product, and waits for that word by word, not for its end. When a row's own words are all there, all blocks have multiplied, so
    nobody reads any more what this writes. The wait at the end is for who waits for this launch."""
    zl.grid_launch_dependents()
    pushed_norm(p)
    zl.grid_wait()


@zl.inline
def pushed_norm(p):
    V, M, row = p.V, zl.bf16, zl.i64(zl.block_index(0))
    places = [(zl.thread_index() + v * zl.target.threads) * 4 for v in zl.static(range(V))]
    within = [place < p.width for place in places]
    xs = [zl.f32.x(4)(0) for v in zl.static(range(V))]
    ws = [zl.f32.x(4)(0) for v in zl.static(range(V))]
    if p.OUT != "none":
        load_weights(ws, places, p)
    words = [place_of(place // 16, zl.block_index(0)) + place // 4 % 4 for place in places]
    for v in zl.static(range(V)):
        if within[v]:
            xs[v] = zl.load(p.x + row * p.width + places[v], 4)
    mine = peers.receive_bare(2, [p.mine + word for word in words], within, p)
    theirs = peers.receive_bare(2, [p.theirs + word for word in words], within, p)
    for v in zl.static(range(V)):
        if within[v]:
            xs[v] = xs[v] + (numbers_of(mine[v], M) + numbers_of(theirs[v], M))
            zl.store(p.x + row * p.width + places[v], xs[v])
    if p.OUT != "none":  # behind a barrier: all words of the row are there
        write_row(xs, ws, places, row, p)


def pushed_variants() -> list[zl.Variant]:
    return [
        zl.Variant(
            f"pushed_norm_{out}_v{vectors}",
            pushed_norm_row,
            {"WORLD": 2, "M": zl.bf16, "OUT": out, "V": vectors, "NORM": "rms", "PARTS": 1},
            threads=GPU_THREADS,
        )
        for out in ("none", "bf16", "fp8")
        for vectors in VECTORS[:2]
    ]


def variants(target) -> list[zl.Variant]:
    """As of all_reduce."""
    if target.name.startswith(("metal", "emulate-metal")):
        return []
    pushed = pushed_variants() if target.has("wgmma") else []
    return pushed + [
        zl.Variant(
            f"sum_norm_{form}_{out}_v{vectors}",
            sum_norm_row,
            {"WORLD": 2, "M": M, "OUT": out, "V": vectors, "NORM": "rms", "PARTS": 1},
            threads=GPU_THREADS,
        )
        for form, M in FORMS
        for out in ("bf16", "fp8")
        for vectors in VECTORS
    ]
