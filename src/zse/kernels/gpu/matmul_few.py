"""out[m, n] = sum_k a[m, k] * w[n, k] for up to 4 tokens and integer weights: few instructions for a weight.

With 4-bit weights made bf16 the instructions, not the memory, are the limit at one token (67 % of the bandwidth).
Here bytes of weights are an operand of the integer mma m16n8k32 as they are (u8). Activations become two s8 columns
of the product: with s = largest magnitude of a chunk of 128 columns / 32639, a = s * (256 high + low) to within s /
2, 2**-16 of that magnitude: far less than what was lost when a was rounded to bf16. The sums are exact; a group's
sum is scaled in f32, and its offset gets the sum of the group's activations:
sum w a = scale * s * (256 sum q high + sum q low) + offset * sum a.

A warp prepares the chunks that it multiplies itself, when it meets them in the first of its units, in shared
memory. The rest is as in matmul_small.py: a ring for each warp, the warps' sums added in their order. A token's
result does not depend on the other tokens.
"""

from zse import kernel as zl
from zse.kernels.gpu import matmul_tiles as tiles

TOKENS = 4
CHUNK = 128
ELEMENTS = 32768  # of all tokens' activations: 64 KiB of shared memory
PEAK = 32639.0  # 127 * 256 + 127
MAGIC = 12582912.0  # 1.5 * 2**23: adding it leaves the rounded integer in the low bits


def fixed_bytes(group: int, warps: int) -> int:
    """Shared memory beside the ring."""
    return ELEMENTS * 2 + ELEMENTS // CHUNK * (4 + 4 * totals(group)) + tiles.sums_bytes(warps, TOKENS)


def group_size(group: int) -> int:
    """Columns between two scalings of the sums, of a class of groups."""
    return group or CHUNK


def totals(group: int) -> int:
    """Sums of activations that are kept for a chunk and token."""
    return CHUNK // group_size(group)


@zl.inline
def prepare(words, at, facts, lane, GROUP):
    """Four of a chunk's activations in each lane (two words of bf16 pairs) → 256 bytes at `at`, [64 columns][high,
    low][t][16], and facts: s, then the groups' sums."""
    bits = [words[0] << 16, words[0] & 0xFFFF0000, words[1] << 16, words[1] & 0xFFFF0000]
    size = [b & 0x7FFFFFFF for b in bits]
    peak = zl.bitcast(
        zl.warp_max(max(max(size[0], size[1]), max(size[2], size[3]))), zl.f32
    )  # as integers: NaN is the largest
    s = peak * (1.0 / PEAK)
    inverse = PEAK * zl.reciprocal(peak) if peak > 1e-30 else zl.f32(0)
    v = [zl.bitcast(zl.fma(zl.bitcast(b, zl.f32), inverse, MAGIC), zl.u32) for b in bits]
    up = [x + 128 for x in v]
    low = zl.prmt(zl.prmt(v[0], v[1], 0x0040), zl.prmt(v[2], v[3], 0x0040), 0x5410)
    high = zl.prmt(zl.prmt(up[0], up[1], 0x0051), zl.prmt(up[2], up[3], 0x0051), 0x5410)
    block, step = lane // 8, lane % 8
    place = at + (block // 2 * 128 + step % 4 * 16 + block % 2 * 8 + step // 4 * 4)
    zl.store(zl.cast_ptr(place, zl.u32), high)
    zl.store(zl.cast_ptr(place + 64, zl.u32), low)
    total = zl.bitcast(v[0] + v[1] + v[2] + v[3], zl.i32) - 0x2D000000  # four times the bits of MAGIC, mod 2**32
    masks = [1 << i for i in range((group_size(GROUP) // 4).bit_length() - 1)]
    for mask in zl.static(masks):
        total = total + zl.shuffle_xor(total, mask)
    per_group = group_size(GROUP) // 4
    if lane % per_group == 0:
        facts[1 + lane // per_group] = zl.f32(total) * s
    if lane == 0:
        facts[0] = s


@zl.inline
def load_chunk(x, a_lane, chunk, p):
    """This lane's four columns of a chunk, of every token; zero past the last."""
    width, here, lane = p.width, p.here, p.lane
    k = chunk * CHUNK
    inside = k + lane * 4 < width
    for m in zl.static(range(TOKENS)):
        if m < here:
            v = zl.bitcast(zl.load(a_lane + (zl.i64(m) * width + k if inside else zl.i64(0)), 4), zl.u32)
            x[2 * m] = v[0] if inside else zl.u32(0)
            x[2 * m + 1] = v[1] if inside else zl.u32(0)


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
def multiply(acc, slot, chunk, columns, facts, token, product):
    """acc[row] += a chunk of weights in a slot, times the token of this lane's columns."""
    lane, here, KIND, GROUP = product.lane, product.here, product.KIND, product.GROUP
    at = columns + ((chunk * here + token) * 256 + lane // 4 % 2 * 64 + lane % 4 * 16)
    facts = facts + (chunk * here + min(lane % 4, here - 1)) * (1 + totals(GROUP))
    t = lane % 4
    place = slot + ((lane // 16) * 256 + t * 64 + ((lane // 4 % 4) ^ (t & 2)) * 16)
    words = [zl.load(zl.cast_ptr(place + i * 512, zl.u32), 4) for i in zl.static(range(tiles.pieces(KIND, CHUNK)))]
    fb = [zl.load(zl.cast_ptr(at + h * 128, zl.u32), 4) for h in zl.static(range(2))]
    size = group_size(GROUP)
    for p in zl.static(range(CHUNK // size)):
        part = [zl.i32(0) for _ in zl.static(range(8))]
        for i in zl.static(range(p * size // 32, max((p + 1) * size // 32, p * size // 32 + 1))):
            rows = weight_bytes(words, i, KIND, t)
            b = [fb[i // 2][i % 2 * 2], fb[i // 2][i % 2 * 2 + 1]]
            for r in zl.static(range(2)):
                w = rows[r]
                if size == 16:  # a mma has two groups: the other one's weights are zero
                    w = [w[0], w[1], zl.u32(0), zl.u32(0)] if p % 2 == 0 else [zl.u32(0), zl.u32(0), w[2], w[3]]
                zl.mma_u8s8(part[4 * r : 4 * r + 4], w, b)
        scales, offsets = tiles.load_scales(slot, p, product)
        s, total = facts[0], facts[1 + p]
        for j in zl.static(range(4)):
            dot = zl.f32(part[2 * j] * 256 + part[2 * j + 1]) * s
            acc[j] = zl.fma(scales[j], dot, acc[j])
            acc[j] = zl.fma(offsets[j], total, acc[j])


@zl.inline
def load_first(unit, x, a_lane, p):
    if unit == zl.block_index(0):
        load_chunk(x, a_lane, p.warp, p)


@zl.inline
def prepare_chunk(unit, chunk, x, a_lane, columns, facts, p):
    """In the first unit: prepare the activations of a chunk, and ask for the next."""
    if unit == zl.block_index(0):
        for m in zl.static(range(TOKENS)):
            if m < p.here:
                place = chunk * p.here + m
                at = facts + place * (1 + totals(p.GROUP))
                prepare(x[2 * m : 2 * m + 2], columns + place * 256, at, p.lane, p.GROUP)
        load_chunk(x, a_lane, chunk + p.WARPS, p)


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
    zl.grid_wait()
    a_lane = p.a + (zl.i64(p.first_token) * p.width + p.lane * 4)
    x = [zl.u32(0) for _ in zl.static(range(2 * TOKENS))]  # the activations of the chunk that is prepared next
    token = min(p.lane // 4 // 2, p.here - 1)  # whose activations are this lane's column
    tiles.stream(
        p,
        following,
        at,
        4,
        (load_first, x, a_lane, p),
        (prepare_chunk, x, a_lane, columns, facts, p),
        (multiply, columns, facts, token, p),
        (leave, p),
    )
