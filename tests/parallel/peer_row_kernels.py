"""The kernels of rows that ranks have of their own, with all ranks in one launch of the emulator (peer_kernels.py)."""

from peer_kernels import Ranks, peer_params

from zse import kernel as zl
from zse.kernels.gpu import peer_rows


class RowRanks(Ranks):
    """spread: x u32 [rounds, size, rows, width], each rank's rows first; out likewise, all. collect: x f32 likewise, all rows; out each
    rank's rows first. owner, wanted i32 [rounds, rows]; place i32 [rounds, size, rows]."""

    x: zl.Ptr["T", "const"]  # noqa: F821
    out: zl.Ptr["T"]  # noqa: F821
    owner: zl.Ptr[zl.i32, "const"]  # noqa: F821
    place: zl.Ptr[zl.i32, "const"]  # noqa: F821
    wanted: zl.Ptr[zl.i32, "const"]  # noqa: F821
    count: zl.i32
    width: zl.i32
    begin: zl.i32
    most: zl.i32
    chooses: zl.i32
    KIND: zl.static
    T: zl.static
    M: zl.static


@zl.kernel
def row_ranks(p: RowRanks):
    """By turns, as in a model: rounds of both kinds, the one's results not the other's numbers."""
    zl.grid_wait()
    rank = zl.block_index(1)
    common = peer_params(p, rank)
    for i in range(p.rounds):
        at = i * p.size + rank
        place = at * p.count * p.width
        shared = dict(
            owner=p.owner + i * p.count,
            place=p.place + at * p.count,
            wanted=p.wanted + i * p.count,
            count=p.count,
            width=p.width,
            begin=p.begin,
            most=p.most,
            chooses=p.chooses,
        )
        if p.KIND in ("spread small", "spread large"):
            q = peer_rows.SpreadParams(**vars(common), x=p.x + place, out=p.out + place, **shared)
            if p.KIND == "spread small":
                peer_rows.spread_small(q)
            else:
                peer_rows.spread_large(q)
        else:
            q = peer_rows.CollectParams(**vars(common), x=p.x + place, out=p.out + place, **shared, M=p.M)
            if p.KIND == "collect small":
                peer_rows.collect_small(q)
            else:
                peer_rows.collect_large(q)
        zl.barrier()
