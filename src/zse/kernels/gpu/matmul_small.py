"""out[m, n] = sum_k a[m, k] * w[n, k] for up to 8 tokens: the weights are streamed once, at the speed of the memory.

Weights are the A operand of mma m16n8k16, tokens are its 8 columns. A block computes *units* of 32 rows; its warps
take the chunks of K columns in turn, each through a ring of its own in shared memory (a lane reads back what it
copied itself, so nothing waits for other warps), and add up their sums once a unit, in the order of the warps. A
unit is two tiles of 16 rows: neighbours, or, for `gated`, a tile of the gate and the same tile of the up
projection. Lane (g = lane / 4, t = lane % 4) holds rows 4 (g % 4) … + 3 of tile g / 4. The order of k inside a mma
is a permutation (the same for both operands) that makes a lane's weights contiguous in memory.

Integers are not scaled one by one: a fragment holds 128 + q, exact in bf16 (the bits of q are those of the mantissa),
the group's sum is multiplied by its scale, and a third mma with rows of ones gives the sum of the activations for the
offset: sum w a = scale * sum (128 + q) a + (offset - 128 scale) * sum a. 8-bit q are two nibbles: 128 + low and 2048 +
16 high. lut4's indices become such bytes, its numbers plus 128, on the way.

The bits of fp4 and e4m3 become bf16 without a prmt: a fragment has columns 0 and 2, 1 and 3 of four, and so have the
activations (crossed()). (With int4 the same took longer: 13.5 us for 12.6 on average of a 7B model's.) These bf16 are
2**-126 and 2**-120 times what they mean; activations are multiplied by 2**64 (exact below 2**63), and the sums by the
rest.

The accumulation is f32 of exact products. What a token gets does not depend on how many tokens there are.
"""

from zse import kernel as zl
from zse.kernels.gpu import matmul_tiles as tiles
from zse.kernels.gpu.r16 import looked_up, table_of

TOKENS = 8  # columns of one mma
ONES = 0x3F803F80  # two bf16 ones
RAISED = 0x5F805F80  # two bf16 2**64
# What sums of raised activations with such weights are multiplied by. The numbers of fp4's table are twice E2M1's.
REST = {"fp4": 2.0**63, "e4m3": 2.0**56}


def token_loads(kind: str, chunk: int) -> list[tuple[int, int, int, int]]:
    """How a lane t of four reads the activations of a chunk: (column, columns per t, words of two, first fragment
    word)."""
    if kind == "e4m3":
        return [(64 * p + 8 * h, 16, 4, 8 * p + 4 * h) for p in range(chunk // 64) for h in range(2)]
    if kind in ("bf16", "f16"):
        return [(32 * p, 8, 4, 4 * p) for p in range(chunk // 32)]
    return [(16 * s, 4, 2, 2 * s) for s in range(chunk // 16)]


@zl.inline
def pair(nibbles, half, HIGH):
    """Two of four small integers (bytes) as bf16: 128 + q, or 2048 + 16 q."""
    return zl.prmt(nibbles, 0x45454545 if HIGH else 0x43434343, 0x4342 if half else 0x4140)


@zl.inline
def e4m3_bits(word):
    """Four e4m3 → two words of two bf16, columns 0 and 2, 1 and 3: the bits move to where they mean value / 2**120,
    subnormals too."""
    low = zl.lop3(word << 4, zl.u32(0x07F007F0), (word << 8) & 0x80008000, 0xEA)
    high = zl.lop3(word >> 4, zl.u32(0x07F007F0), word & 0x80008000, 0xEA)
    return low, high


@zl.inline
def fp4_pair(word, n):
    """r16.fp4_bits() in three instructions, and one for two: the product has both places that a nibble's bits go to."""
    word = word >> 8 if n > 1 else word
    nibbles, factor = (word & 0x00F000F0, 0x104) if n % 2 else (word & 0x000F000F, 0x1040)
    return (nibbles * zl.u32(factor)) & 0x81C081C0


@zl.inline
def crossed(b, KIND):
    """The B fragments of a chunk as KIND's weights stand."""
    if KIND not in REST:
        return b
    words = [zl.mul_bf16x2(word, zl.u32(RAISED)) for word in b]
    return [
        zl.prmt(words[i], words[i + 1], order)
        for i in zl.static(range(0, len(words), 2))
        for order in zl.static((0x5410, 0x7632))
    ]


@zl.inline
def load_tokens(unit, chunk, b, a_row, p):
    """The B fragments of a chunk into b: two words for every 16 columns; columns past the last are zero."""
    width, t, KIND, CHUNK = p.width, p.lane % 4, p.KIND, p.CHUNK
    first = chunk * CHUNK
    if first + CHUNK <= width:
        for column, per_lane, words, at in token_loads(KIND, CHUNK):
            v = zl.bitcast(zl.load(a_row + (first + column + t * per_lane), words * 2), zl.u32)
            for i in zl.static(range(words)):
                b[at + i] = v[i]
    else:
        for column, per_lane, words, at in token_loads(KIND, CHUNK):
            k = first + column + t * per_lane
            v = zl.bitcast(zl.load(a_row + (k if k < width else 0), words * 2), zl.u32)
            for i in zl.static(range(words)):
                b[at + i] = v[i] if k < width else zl.u32(0)


@zl.inline
def multiply_integers(acc, slot, b, product):
    """acc += a chunk of quantized weights in a slot, times the tokens."""
    t, KIND, GROUP, CHUNK = product.lane % 4, product.KIND, product.GROUP, product.CHUNK
    per = CHUNK // 32
    place = slot + tiles.piece_of(product)
    words = [zl.load(zl.cast_ptr(place + i * 512, zl.u32), 4) for i in zl.static(range(tiles.pieces(KIND, CHUNK)))]
    num_groups = 1 if GROUP == 0 else CHUNK // GROUP
    steps = CHUNK // 16 // num_groups
    # 128 q's are 128 + q; 8 bits: (128 + low) + (2048 + 16 high)
    constant = 2176.0 if KIND in ("int8", "lut4") else 128.0
    for p in zl.static(range(num_groups)):
        part = [zl.f32(0) for _ in zl.static(range(8))]
        total = None if KIND == "fp4" else [zl.f32(0) for _ in zl.static(range(4))]
        for s in zl.static(range(p * steps, (p + 1) * steps)):
            i, h = s // 2, s % 2
            fb = [b[2 * s], b[2 * s + 1]]
            if KIND == "int8":
                for high in zl.static(range(2)):
                    n = [tiles.low_bits(words[2 * i + h][q], high) for q in zl.static(range(4))]
                    f = [pair(n[q], c, high) for q in zl.static(range(4)) for c in zl.static(range(2))]
                    zl.mma_bf16(part[0:4], [f[0], f[2], f[1], f[3]], fb)
                    zl.mma_bf16(part[4:8], [f[4], f[6], f[5], f[7]], fb)
            elif KIND == "lut4":
                numbers = [looked_up(words[i][q], h, product.table) for q in zl.static(range(4))]
                for high in zl.static(range(2)):
                    n = [tiles.low_bits(numbers[q], high) for q in zl.static(range(4))]
                    f = [pair(n[q], c, high) for q in zl.static(range(4)) for c in zl.static(range(2))]
                    zl.mma_bf16(part[0:4], [f[0], f[2], f[1], f[3]], fb)
                    zl.mma_bf16(part[4:8], [f[4], f[6], f[5], f[7]], fb)
            elif KIND == "fp4":
                f = [fp4_pair(words[i][q], c * 2 + h) for q in zl.static(range(4)) for c in zl.static(range(2))]
                zl.mma_bf16(part[0:4], [f[0], f[2], f[1], f[3]], fb)
                zl.mma_bf16(part[4:8], [f[4], f[6], f[5], f[7]], fb)
            else:
                n = [tiles.low_bits(words[i][q], h) for q in zl.static(range(4))]
                if KIND == "int5":
                    bits = [words[per + i][q] >> zl.u32(t) for q in zl.static(range(4))]
                    n = [n[q] | ((bits[q] if h else bits[q] << 4) & 0x10101010) for q in zl.static(range(4))]
                if KIND == "int6":
                    bits = [words[per + 2 * i + h][q] >> zl.u32(2 * t) for q in zl.static(range(4))]
                    n = [n[q] | ((bits[q] << 4) & 0x30303030) for q in zl.static(range(4))]
                f = [pair(n[q], c, 0) for q in zl.static(range(4)) for c in zl.static(range(2))]
                zl.mma_bf16(part[0:4], [f[0], f[2], f[1], f[3]], fb)
                zl.mma_bf16(part[4:8], [f[4], f[6], f[5], f[7]], fb)
            if KIND != "fp4":
                zl.mma_bf16(total, [zl.u32(ONES), zl.u32(ONES), zl.u32(ONES), zl.u32(ONES)], fb)
        scales, offsets = tiles.load_scales(slot, p, product)
        for q in zl.static(range(4)):
            for c in zl.static(range(2)):
                acc[q * 2 + c] = zl.fma(scales[q], part[q * 2 + c], acc[q * 2 + c])
            if KIND != "fp4":
                base = zl.fma(scales[q], -constant, offsets[q])
                for c in zl.static(range(2)):
                    acc[q * 2 + c] = zl.fma(base, total[c], acc[q * 2 + c])


@zl.inline
def split_bf16(v):
    """f32 numbers as words of bf16 pairs: rounded, and what that left out (f16 is their exact sum)."""
    first = zl.convert(v, zl.bf16)
    rest = zl.convert(v - zl.convert(first, zl.f32), zl.bf16)
    return zl.bitcast(first, zl.u32), zl.bitcast(rest, zl.u32)


@zl.inline
def multiply_dense(acc, slot, b, product):
    """acc += a chunk of dense or fp8 weights in a slot, times the tokens."""
    lane, scaling, KIND, CHUNK = product.lane, product.scaling, product.KIND, product.CHUNK
    item = tiles.ITEM[KIND]
    per = CHUNK * item // 64
    place = slot + tiles.piece_of(product)
    if KIND == "e4m3":
        part = [zl.f32(0) for _ in zl.static(range(8))]
        for p in zl.static(range(per)):
            words = [zl.load(zl.cast_ptr(place + (j * per + p) * 512, zl.u32), 4) for j in zl.static(range(4))]
            for q in zl.static(range(4)):
                s = 4 * p + q
                f = [e4m3_bits(words[j][q]) for j in zl.static(range(4))]
                zl.mma_bf16(part[0:4], [f[0][0], f[1][0], f[0][1], f[1][1]], [b[2 * s], b[2 * s + 1]])
                zl.mma_bf16(part[4:8], [f[2][0], f[3][0], f[2][1], f[3][1]], [b[2 * s], b[2 * s + 1]])
        factor = (
            zl.load(zl.cast_ptr(slot + (tiles.pieces(KIND, CHUNK) * 512 + lane * 4), zl.f32), 1)
            if scaling == 2
            else zl.f32(1)
        )
        factors = [factor] * 4
        if product.HALVES:  # the sum is of several experts, whose rows have factors of their own
            at_rows = zl.cast_ptr(slot + (tiles.pieces(KIND, CHUNK) * 512 + lane // 4 * 16), zl.f32)
            rows = zl.load(at_rows, 4)
            factors = [rows[q] if scaling == 0 else factor for q in zl.static(range(4))]
        for e in zl.static(range(8)):
            acc[e] = zl.fma(part[e], factors[e // 2], acc[e])
    else:
        for p in zl.static(range(per)):
            if KIND == "bf16":
                words = [zl.load(zl.cast_ptr(place + (j * per + p) * 512, zl.u32), 4) for j in zl.static(range(4))]
                for s in zl.static(range(2)):
                    fb = [b[4 * p + 2 * s], b[4 * p + 2 * s + 1]]
                    for r in zl.static(range(2)):
                        x, y = words[2 * r], words[2 * r + 1]
                        zl.mma_bf16(acc[4 * r : 4 * r + 4], [x[2 * s], y[2 * s], x[2 * s + 1], y[2 * s + 1]], fb)
            else:
                element, count = (zl.f16, 8) if KIND == "f16" else (zl.f32, 4)
                halves = [
                    split_bf16(zl.convert(zl.load(zl.cast_ptr(place + (j * per + p) * 512, element), count), zl.f32))
                    for j in zl.static(range(4))
                ]
                for s in zl.static(range(count // 4)):
                    at = (count // 4 * p + s) * 2
                    for r in zl.static(range(2)):
                        for x, y in zip(halves[2 * r], halves[2 * r + 1]):
                            zl.mma_bf16(
                                acc[4 * r : 4 * r + 4],
                                [x[2 * s], y[2 * s], x[2 * s + 1], y[2 * s + 1]],
                                [b[at], b[at + 1]],
                            )


@zl.inline
def multiply(acc, slot, chunk, b, product):
    fragments = crossed(b, product.KIND)
    if product.KIND in tiles.INTEGERS:
        multiply_integers(acc, slot, fragments, product)
    else:
        multiply_dense(acc, slot, fragments, product)


@zl.inline
def leave(acc, sums, product):
    """This warp's sums: lane (g, t) has four rows of tokens 2 t and 2 t + 1."""
    g, t = product.lane // 4, product.lane % 4
    for c in zl.static(range(2)):
        if 2 * t + c < product.here:
            four = zl.make_vector(acc[c], acc[2 + c], acc[4 + c], acc[6 + c])
            if product.KIND in REST:
                four = four * REST[product.KIND]
            zl.store(sums + ((2 * t + c) * tiles.PITCH + 4 * g), four)


@zl.kernel
def matmul_small(params: tiles.ProductParams):
    """Grid (blocks that share the units, groups of 8 tokens)."""
    multiply_units(tiles.product_of(params, TOKENS))


@zl.kernel
def matmul_small_lut4(params: tiles.Lut4ProductParams):
    """Likewise."""
    multiply_units(tiles.product_of(params, TOKENS, table_of(params)))


@zl.inline
def take_tokens(unit, chunk, b, ahead, a_row, p):
    """The B fragments of a chunk, loaded before, into b; starts the loads of the next chunk's."""
    for i in zl.static(range(p.CHUNK // 8)):
        b[i] = ahead[i] + 0
    following = chunk + p.WARPS
    load_tokens(unit, following if following < p.chunks else p.warp, ahead, a_row, p)


@zl.inline
def multiply_units(p):
    """The body of a kernel."""
    following, at = tiles.start(p)
    ends = tiles.begin_ends(p, TOKENS)
    zl.grid_wait()
    a_row = p.a + zl.i64(p.first_token + min(p.lane // 4, p.here - 1)) * p.width
    b = [zl.u32(0) for _ in zl.static(range(p.CHUNK // 8))]
    if p.KIND in tiles.ITEM:
        ahead = [zl.u32(0) for _ in zl.static(range(p.CHUNK // 8))]
        load_tokens(zl.i32(0), p.warp, ahead, a_row, p)
        tiles.stream(p, following, at, 8, (take_tokens, b, ahead, a_row, p), (multiply, b, p), (leave, p), ends)
    else:
        tiles.stream(p, following, at, 8, (load_tokens, b, a_row, p), (multiply, b, p), (leave, p), ends)
