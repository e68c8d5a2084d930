"""out[m, n] = sum_k a[m, k] * w[n, k] for up to 4 tokens and integer weights: few instructions for a weight.

With 4-bit weights made bf16 the instructions, not the memory, are the limit at one token (67 % of the bandwidth).
Here bytes of weights are an operand of the integer mma m16n8k32 as they are (u8). Activations become two s8 columns
of the product: with s = largest magnitude of a chunk of 128 columns / 32639, a = s * (256 high + low) to within s /
2, 2**-16 of that magnitude: far less than what was lost when a was rounded to bf16. The sums are exact; a group's
sum is scaled in f32, and its offset gets the sum of the group's activations:
sum w a = scale * s * (256 sum q high + sum q low) + offset * sum a.

A warp prepares the chunks that it multiplies itself, in shared memory, while its first weights are on their way. The
rest is as in matmul_small.py: a ring for each warp, the warps' sums added in their order. A token's result does not
depend on the other tokens.
"""

from zse import kernel as zl
from zse.kernels.gpu import matmul_tiles as tiles

TOKENS = 4
CHUNK = 128
TOGETHER = 2  # chunks that a warp prepares at a time: one's instructions run while another's wait
ELEMENTS = 32768  # of all tokens' activations: 64 KiB of shared memory
PEAK = 32639.0  # 127 * 256 + 127
HIGH = 0xF0F0F0F0
MAGIC = 12582912.0  # 1.5 * 2**23: adding it leaves the rounded integer in the low bits


def fixed_bytes(group: int, warps: int) -> int:
    """Shared memory beside the ring."""
    return ELEMENTS * 2 + ELEMENTS // CHUNK * (4 + 4 * totals(group)) + tiles.sums_bytes(warps, TOKENS)


def group_size(group: int) -> int:
    """Columns between two scalings of the sums, of a class of groups."""
    return group or CHUNK


def two_blocks(kind: str, group: int) -> bool:
    """Whether nibbles of two blocks are multiplied at once: the low ones, and the high ones where they stand."""
    return kind == "int4" and group_size(group) >= 64


def totals(group: int) -> int:
    """Sums of activations that are kept for a chunk and token."""
    return CHUNK // group_size(group)


@zl.inline
def prepare(loaded, at, facts, lane, GROUP, BESIDE):
    """prepare_bits() of two words of bf16 pairs each."""
    bits = [[x[0] << 16, x[0] & 0xFFFF0000, x[1] << 16, x[1] & 0xFFFF0000] for x in loaded]
    prepare_bits(bits, at, facts, lane, GROUP, BESIDE)


@zl.inline
def prepare_bits(bits, at, facts, lane, GROUP, BESIDE):
    """Of some chunks (the bits of four f32 activations of each lane's) → 256 bytes at at[i], [64 columns]
    [high, low][t][16], the 16 of a lane's two blocks by block and half of the block, BESIDE: by half and block; and
    facts[i]: s, then the groups' sums."""
    size = [[b & 0x7FFFFFFF for b in four] for four in bits]
    peaks = [
        zl.bitcast(zl.warp_top(max(max(four[0], four[1]), max(four[2], four[3]))), zl.f32) for four in size
    ]  # as integers: NaN is the largest
    inverse = [PEAK * zl.reciprocal(peak) if peak > 1e-30 else zl.f32(0) for peak in peaks]
    v = [
        [zl.bitcast(zl.fma(zl.bitcast(b, zl.f32), inverse[i], MAGIC), zl.u32) for b in bits[i]]
        for i in zl.static(range(len(at)))
    ]
    # Four times the bits of MAGIC are subtracted, mod 2**32.
    totals = [zl.bitcast(four[0] + four[1] + four[2] + four[3], zl.i32) - 0x2D000000 for four in v]
    block, step = lane // 8, lane % 8
    order = block % 2 * 4 + step // 4 * 8 if BESIDE else block % 2 * 8 + step // 4 * 4
    place = block // 2 * 128 + step % 4 * 16 + order
    for i in zl.static(range(len(at))):
        up = [x + 128 for x in v[i]]
        low = zl.prmt(zl.prmt(v[i][0], v[i][1], 0x0040), zl.prmt(v[i][2], v[i][3], 0x0040), 0x5410)
        high = zl.prmt(zl.prmt(up[0], up[1], 0x0051), zl.prmt(up[2], up[3], 0x0051), 0x5410)
        zl.store(zl.cast_ptr(at[i] + place, zl.u32), high)
        zl.store(zl.cast_ptr(at[i] + (place + 64), zl.u32), low)
    masks = [1 << i for i in range((group_size(GROUP) // 4).bit_length() - 1)]
    if group_size(GROUP) == CHUNK:
        totals = [zl.warp_total(total) for total in totals]
    else:
        for mask in zl.static(masks):
            totals = [total + zl.shuffle_xor(total, mask) for total in totals]
    per_group = group_size(GROUP) // 4
    for i in zl.static(range(len(at))):
        s = peaks[i] * (1.0 / PEAK)
        if lane % per_group == 0:
            facts[i][1 + lane // per_group] = zl.f32(totals[i]) * s
        if lane == 0:
            facts[i][0] = s


@zl.inline
def own_chunk(first, i, p):
    """The warp's i-th chunk from `first` on, or `first` once more."""
    return first + i * p.WARPS if first + i * p.WARPS < p.chunks else first + 0


@zl.inline
def load_chunks(x, a_lane, chunk, p):
    """This lane's four columns of TOGETHER of the warp's chunks, from `chunk` on, which stands for those that there are
    not; zero past the last column."""
    for i in zl.static(range(TOGETHER)):
        k = own_chunk(chunk, i, p) * CHUNK
        inside = k + p.lane * 4 < p.width
        v = zl.bitcast(zl.load(a_lane + (k if inside else 0), 4), zl.u32)
        for u in zl.static(range(2)):
            x[2 * i + u] = v[u] if inside else zl.u32(0)


@zl.inline
def prepare_all(columns, facts, p):
    """Prepare the chunks that this warp multiplies, while the ring fills."""
    for m in range(p.here):
        a_lane = p.a + (zl.i64(p.first_token + m) * p.width + p.lane * 4)
        x = [zl.u32(0) for _ in zl.static(range(2 * TOGETHER))]
        load_chunks(x, a_lane, p.warp, p)
        for first in range(p.warp, p.chunks, TOGETHER * p.WARPS):
            loaded = [[x[2 * i] + 0, x[2 * i + 1] + 0] for i in zl.static(range(TOGETHER))]
            load_chunks(x, a_lane, first + TOGETHER * p.WARPS, p)
            places = [own_chunk(first, i, p) * p.here + m for i in zl.static(range(TOGETHER))]
            at = [columns + place * 256 for place in places]
            kept = [facts + place * (1 + totals(p.GROUP)) for place in places]
            prepare(loaded, at, kept, p.lane, p.GROUP, two_blocks(p.KIND, p.GROUP))


@zl.inline
def weight_bytes(words, i, KIND, t):
    """A operands of block i: for each pair of rows four words of bytes."""
    per = CHUNK // 32
    if KIND == "int8":
        return [
            [words[2 * i][2 * r], words[2 * i][2 * r + 1], words[2 * i + 1][2 * r], words[2 * i + 1][2 * r + 1]]
            for r in zl.static(range(2))
        ]
    n = [[tiles.low_bits(words[i][q], s) for s in zl.static(range(2))] for q in zl.static(range(4))]
    if KIND == "int5":
        bits = [words[per + i][q] >> zl.u32(t) for q in zl.static(range(4))]
        n = [
            [n[q][s] | ((bits[q] if s else bits[q] << 4) & 0x10101010) for s in zl.static(range(2))]
            for q in zl.static(range(4))
        ]
    if KIND == "int6":
        n = [
            [n[q][s] | (((words[per + 2 * i + s][q] >> zl.u32(2 * t)) << 4) & 0x30303030) for s in zl.static(range(2))]
            for q in zl.static(range(4))
        ]
    return [[n[2 * r][0], n[2 * r + 1][0], n[2 * r][1], n[2 * r + 1][1]] for r in zl.static(range(2))]


@zl.inline
def group_sums(words, fb, p, t, KIND, size):
    """What the mma make of group p of a chunk."""
    part = [zl.i32(0) for _ in zl.static(range(8))]
    for i in zl.static(range(p * size // 32, max((p + 1) * size // 32, p * size // 32 + 1))):
        rows = weight_bytes(words, i, KIND, t)
        b = [fb[i // 2][i % 2 * 2], fb[i // 2][i % 2 * 2 + 1]]
        for r in zl.static(range(2)):
            w = rows[r]
            if size == 16:  # a mma has two groups: the other one's weights are zero
                w = [w[0], w[1], zl.u32(0), zl.u32(0)] if p % 2 == 0 else [zl.u32(0), zl.u32(0), w[2], w[3]]
            zl.mma_u8s8(part[4 * r : 4 * r + 4], w, b)
    return part


@zl.inline
def nibble_sums(words, fb, first, size):
    """16 times that, of two_blocks(): high nibbles have no shift."""
    low = [zl.i32(0) for _ in zl.static(range(8))]
    high = [zl.i32(0) for _ in zl.static(range(8))]
    for i in zl.static(range(first, first + size // 32, 2)):
        b = fb[i // 2]
        for r in zl.static(range(2)):
            w = [words[i][2 * r], words[i][2 * r + 1], words[i + 1][2 * r], words[i + 1][2 * r + 1]]
            zl.mma_u8s8(low[4 * r : 4 * r + 4], [word & tiles.LOW for word in w], [b[0], b[1]])
            zl.mma_u8s8(high[4 * r : 4 * r + 4], [word & HIGH for word in w], [b[2], b[3]])
    return [low[e] * 16 + high[e] for e in zl.static(range(8))]


@zl.inline
def multiply(acc, slot, chunk, columns, facts, product):
    """acc[row] += a chunk of weights in a slot, times the token of this lane's columns. columns, facts: of chunk 0."""
    t, here, KIND, GROUP = product.lane % 4, product.here, product.KIND, product.GROUP
    at = columns + chunk * here * 256
    facts = facts + chunk * here * (1 + totals(GROUP))
    place = slot + tiles.piece_of(product)
    words = [zl.load(zl.cast_ptr(place + i * 512, zl.u32), 4) for i in zl.static(range(tiles.pieces(KIND, CHUNK)))]
    fb = [zl.load(zl.cast_ptr(at + h * 128, zl.u32), 4) for h in zl.static(range(2))]
    size = group_size(GROUP)
    for p in zl.static(range(CHUNK // size)):
        beside = two_blocks(KIND, GROUP)
        part = nibble_sums(words, fb, p * size // 32, size) if beside else group_sums(words, fb, p, t, KIND, size)
        scales, offsets = tiles.load_scales(slot, p, product)
        s, total = facts[0] * (1 / 16 if beside else 1.0), facts[1 + p]
        for j in zl.static(range(4)):
            dot = zl.f32(part[2 * j] * 256 + part[2 * j + 1]) * s
            acc[j] = zl.fma(scales[j], dot, acc[j])
            acc[j] = zl.fma(offsets[j], total, acc[j])


@zl.inline
def leave(acc, sums, p):
    """This warp's sums: lane (g, t) has four rows of token t."""
    if p.lane % 4 < p.here:
        zl.store(sums + (p.lane % 4 * tiles.PITCH + 4 * (p.lane // 4)), zl.make_vector(acc[0], acc[1], acc[2], acc[3]))


@zl.kernel
def matmul_few(params: tiles.ProductParams):
    """Grid (blocks that share the units, groups of 4 tokens). tokens of a block times width rounded up to CHUNK: at
    most ELEMENTS."""
    p = tiles.product_of(params, TOKENS)
    columns = zl.shared_array(zl.u8, ELEMENTS * 2, align=128)  # [chunk][token][64 columns][high, low][64]
    facts = zl.shared_array(zl.f32, ELEMENTS // CHUNK * (1 + totals(p.GROUP)))  # [chunk][token]
    following, at = tiles.start(p)
    ends = tiles.begin_ends(p, TOKENS)
    zl.grid_wait()
    prepare_all(columns, facts, p)
    # The activations and facts of this lane's column.
    token = min(p.lane // 4 // 2, p.here - 1)
    columns = columns + tiles.kept(token * 256 + p.lane // 4 % 2 * 64 + p.lane % 4 * 16)
    facts = facts + tiles.kept(min(p.lane % 4, p.here - 1) * (1 + totals(p.GROUP)))
    tiles.stream(p, following, at, 4, None, (multiply, columns, facts, p), (leave, p), ends)
