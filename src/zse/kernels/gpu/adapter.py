"""adapt_down and adapt_up on a GPU: a block is a token; A and B come straight from memory, which is what few tokens
wait for."""

from zse import kernel as zl
from zse.kernels.adapter import CHUNKS, RANK_STEP, AdaptDown, AdaptUp

THREADS = 128
CHUNK = CHUNKS["gpu"]
FORMS = {"bf16": zl.bf16, "fp8": zl.e4m3}


@zl.kernel
def adapt_down_gpu(p: AdaptDown):
    """Grid (products x steps of RANK_STEP ranks, tokens)."""
    warps = zl.target.threads // zl.target.warp
    parts = zl.shared_array(zl.f32, RANK_STEP * warps)
    zl.grid_launch_dependents()
    zl.grid_wait()
    steps = p.rank // RANK_STEP
    number = zl.block_index(0) // steps
    first = zl.block_index(0) % steps * RANK_STEP
    token = zl.i64(zl.block_index(1))
    slot = zl.i64(p.of_row[p.token_row[token]])
    if slot < 0:
        return
    rank = p.ranks[slot]
    factor = p.scales[slot * p.products + (p.product + number)]
    if first >= rank or factor == 0.0:
        return
    a = p.matrices + (slot * p.size + p.down * rank + zl.i64(number * rank + first) * p.width)
    x = p.x + token * p.width
    sums = [zl.f32.x(8)(0) for _ in zl.static(range(RANK_STEP))]
    for k in range(zl.thread_index() * 8, p.width, zl.target.threads * 8):
        value = zl.convert(zl.load(x + k, 8), zl.f32)
        for r in zl.static(range(RANK_STEP)):
            row = zl.convert(zl.load(a + (zl.i64(r) * p.width + k), 8), zl.f32)
            sums[r] = zl.fma(row, value, sums[r])
    for r in zl.static(range(RANK_STEP)):
        s = sums[r]
        total = zl.warp_sum(((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7])))
        if zl.lane_index() == 0:
            parts[r * warps + zl.warp_index()] = total
    zl.barrier()
    t = zl.thread_index()
    if t < RANK_STEP:
        total = zl.f32(0)
        for w in zl.static(range(warps)):
            total += parts[t * warps + w]
        if p.FORM == "fp8":
            total = total * p.scale[token]
        p.out[token * p.line + (number * p.rank + first + t)] = total * factor


@zl.inline
def add_four(p, y, n, rows, before, number, slot, rank, token):
    """Four of a product's results from column n on, where it has so many."""
    if n < rows:
        b = p.matrices + (slot * p.size + (p.up + before) * rank + n)
        low = p.low + (token * p.line + number * p.rank)
        total = zl.f32.x(4)(0)
        for j in zl.unroll(range(0, rank), 8):
            total = zl.fma(zl.convert(zl.load(b + zl.i64(j) * rows, 4), zl.f32), zl.splat(low[j], 4), total)
        zl.store(y + n, zl.load(y + n, 4) + total)


@zl.kernel
def adapt_up_gpu(p: AdaptUp):
    """Grid (chunks of CHUNK results of each product, tokens); a thread has four of them."""
    zl.grid_launch_dependents()
    zl.grid_wait()
    chunk = zl.block_index(0)
    token = zl.i64(zl.block_index(1))
    slot = zl.i64(p.of_row[p.token_row[token]])
    if slot < 0:
        return
    rank = p.ranks[slot]
    number = zl.i32(0) if chunk < p.chunks1 else zl.i32(1) if chunk < p.chunks2 else zl.i32(2)
    if p.scales[slot * p.products + (p.product + number)] == 0.0:
        return
    at = zl.thread_index() * 4
    if chunk < p.chunks1:
        add_four(p, p.y0 + token * p.stride0, chunk * CHUNK + at, p.rows0, 0, 0, slot, rank, token)
    elif chunk < p.chunks2:
        n = (chunk - p.chunks1) * CHUNK + at
        add_four(p, p.y1 + token * p.stride1, n, p.rows1, p.rows0, 1, slot, rank, token)
    else:
        n = (chunk - p.chunks2) * CHUNK + at
        add_four(p, p.y2 + token * p.stride2, n, p.rows2, p.rows0 + p.rows1, 2, slot, rank, token)


def variants(target) -> list[zl.Variant]:
    return [
        *(
            zl.Variant(f"adapt_down_{form}", adapt_down_gpu, {"X": dtype, "FORM": form, "TOKENS": 1}, threads=THREADS)
            for form, dtype in FORMS.items()
        ),
        zl.Variant("adapt_up", adapt_up_gpu, {"TOKENS": 1}, threads=THREADS),
    ]
