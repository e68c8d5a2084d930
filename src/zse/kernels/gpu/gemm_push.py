"""gemm_skinny of one of two ranks that each have some of a weight's columns: what it makes goes as bf16 where the launch behind it adds both
ranks' parts (sum_norm.pushed_norm_row), into a slot of this rank and into one of the other. So the link works while other blocks still
multiply, and nobody waits for the end of a launch.

Words are their own flags, as peers.send_bare() sends them. A slot has 32 bytes for 16 columns of a token, [columns / 16, ROWS, 16] bf16, so a
warp's sums of 8 tokens are 256 bytes. Slots are used by turns, of a layer one for what attention and one for what the MLP gives: who fills one
again has had the other one's words from a rank that had put back this one's zeros. What adds them begins when all before this launch
has ended, its own zeros among it: the next launch is let begin that late."""

from zse import kernel as zl
from zse.kernels.gpu import gemm_parts as parts
from zse.kernels.gpu import peers
from zse.kernels.gpu.gemm_skinny import SkinnyParams, multiply

ROWS = 64  # tokens that a slot has room for


class PushParams(SkinnyParams):
    """mine, theirs: the slots of this rank and of the other one; nothing is written to out. cols is a multiple of 16."""

    mine: zl.Ptr[zl.u64]
    theirs: zl.Ptr[zl.u64]

    @property
    def pushes(self) -> bool:
        return True

    @property
    def push(self):
        return push_sums


@zl.inline
def place_of(group, token):
    """Where in a slot, in words of 8 bytes, 16 columns of a token begin."""
    return (group * ROWS + token) * 4


@zl.inline
def push_sums(total, tile, warp, first_token, p):
    """A warp's 16 columns of tokens from first_token on, as of gemm_skinny.store_sums: four columns of one token a lane."""
    lane = zl.lane_index()
    j, group = lane % 4, tile * (p.tile_cols // 16) + warp
    odd = j % 2 == 1
    shifts = [zl.f32(0) for _ in zl.static(range(2))]
    if p.has_bias != 0:
        for y in zl.static(range(2)):
            shifts[y] = p.bias[min(group * 16 + y * 8 + lane // 4, p.cols - 1)]
    for i in zl.static(range(len(total) // 4)):
        sums = [[total[i * 4 + y * 2 + e] + shifts[y] for e in zl.static(range(2))] for y in zl.static(range(2))]
        pairs = [zl.make_vector(two[0], two[1]) for two in sums]
        words = [parts.transposed(zl.bitcast(zl.convert(pair, zl.bf16), zl.u32)) for pair in pairs]
        theirs = zl.shuffle_xor(words[0] if odd else words[1], 1)
        four = peers.not_zero([theirs if odd else words[0], words[1] if odd else theirs])
        token = first_token + i * 8 + lane // 4
        if (token < p.tokens) & (group * 16 < p.cols):
            at = place_of(group, token) + (j // 2 + j % 2 * 2)
            peers.send_bare(four, p.theirs + at)
            peers.send_bare(four, p.mine + at)


@zl.kernel
def gemm_push(p: PushParams):
    multiply(p)
