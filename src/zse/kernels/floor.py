"""What bounds every kernel of a CPU: reading memory, int8 and f32 multiply-adds, each by a kernel that does nothing
else."""

from zse import kernel as zl

READ_BYTES = 1 << 16  # of a block
WORDS = 1024  # of a: 4 KiB, which the first cache holds
OUT_BYTES = 12 * 64  # of a block
PRODUCTS = 12 * 16 * 4 * WORDS  # of a block, a multiple of every target's registers: in lanes


@zl.kernel
def floor_read(src: zl.Ptr[zl.i32, "const"], out: zl.Ptr[zl.i32]):
    """A block reads READ_BYTES and writes the xor of its words."""
    lanes = zl.target.lanes
    words = READ_BYTES // 4
    mine = src + zl.block_index(0) * words
    seen = [zl.i32.x(lanes)(0) for _ in zl.static(range(4))]
    for at in range(0, words, 4 * lanes):
        for i in zl.static(range(4)):
            seen[i] = seen[i] ^ zl.load(mine + at + i * lanes, lanes)
    zl.store(out + zl.block_index(0) * (OUT_BYTES // 4), (seen[0] ^ seen[1]) ^ (seen[2] ^ seen[3]))


class Registers(zl.Record):
    """Parameters of floor_int8 and floor_f32. CHAINS: registers of w, each with SUMS sums, in turns of a's words: enough
    independent sums for two units of four or five cycles."""

    w: zl.Ptr["T", "const"]
    a: zl.Ptr["T", "const"]
    out: zl.Ptr["T"]
    T: zl.static
    CHAINS: zl.static
    SUMS: zl.static


@zl.inline
def start_registers(p):
    lanes = zl.target.lanes
    return [zl.load(p.w + c * lanes, lanes) for c in zl.static(range(p.CHAINS))], [
        [p.T.x(lanes)(0) for _ in range(p.CHAINS)] for _ in zl.static(range(p.SUMS))
    ]


@zl.inline
def store_sums(p, totals):
    lanes = zl.target.lanes
    for c in zl.static(range(p.CHAINS)):
        total = totals[0][c]
        for s in zl.static(range(1, p.SUMS)):
            total += totals[s][c]
        zl.store(p.out + zl.block_index(0) * (OUT_BYTES // 4) + c * lanes, total)


@zl.kernel
def floor_int8(p: Registers):
    """A block multiplies CHAINS registers of w with WORDS words of a, each in all lanes, 4 bytes a lane, until there
    were PRODUCTS in lanes. Without VNNI and dotprod the i16 sums of eight steps are widened together, as with 4-bit
    weights."""
    lanes = zl.target.lanes
    weights, totals = start_registers(p)
    for _ in range(PRODUCTS // (p.CHAINS * lanes * WORDS)):
        for step in range(0, WORDS, 8):
            sums = [zl.i32.x(lanes)(0) for _ in zl.static(range(p.CHAINS))]
            if zl.target.has("dotprod"):
                values = [zl.load(p.a + step + at, 4) for at in zl.static((0, 4))]
                for s in zl.static(range(8)):
                    for c in zl.static(range(p.CHAINS)):
                        totals[0][c] = zl.dot4_s8(totals[0][c], weights[c], values[s // 4], s % 4)
            for s in zl.static(range(0 if zl.target.has("dotprod") else 8)):
                value = zl.splat(p.a[step + s], lanes)
                for c in zl.static(range(p.CHAINS)):
                    if zl.target.has("vnni"):
                        totals[s % p.SUMS][c] = zl.dot4_u8s8(totals[s % p.SUMS][c], weights[c], value)
                    else:
                        pairs = zl.pairs_u8s8(weights[c], value)
                        sums[c] = pairs if s == 0 else zl.add_i16(sums[c], pairs)
            if not (zl.target.has("vnni") or zl.target.has("dotprod")):
                for c in zl.static(range(p.CHAINS)):
                    totals[0][c] += zl.pairs_i16(sums[c])
    store_sums(p, totals)


@zl.kernel
def floor_f32(p: Registers):
    """Likewise in f32, one value a lane."""
    lanes = zl.target.lanes
    weights, totals = start_registers(p)
    for _ in range(PRODUCTS // (p.CHAINS * lanes * WORDS)):
        for step in range(0, WORDS, p.SUMS):
            for s in zl.static(range(p.SUMS)):
                value = zl.splat(p.a[step + s], lanes)
                for c in zl.static(range(p.CHAINS)):
                    totals[s][c] = zl.fma(weights[c], value, totals[s][c])
    store_sums(p, totals)


def variants(target) -> list[zl.Variant]:
    few = "avx2" in target.features and target.lanes < 16  # weights, a word and 12 sums fit 16 registers, or 32
    chains = {"CHAINS": 3, "SUMS": 4} if few else {"CHAINS": 12, "SUMS": 1}
    pairs = chains if target.features & {"vnni", "dotprod"} else {"CHAINS": 4, "SUMS": 1}  # and sums of i16
    return [
        zl.Variant("floor_read", floor_read),
        zl.Variant("floor_int8", floor_int8, {"T": zl.i32} | pairs),
        zl.Variant("floor_f32", floor_f32, {"T": zl.f32} | chains),
    ]
