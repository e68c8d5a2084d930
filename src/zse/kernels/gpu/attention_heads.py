"""Heads inside attention's launch: of decode steps of few tokens a launch less a layer (qkv_post.py is the launch).

Every block makes the query heads of its work item, a warp each, and leaves them in shared memory; the one that has the
last key of a row makes that key and its values as well. They go from there into the ring, where the copies of older
keys left room for them, and to the page. What is rounded is what qkv_post rounds: results are the same bits."""

from typing import Any

from zse import kernel as zl
from zse.kernels.gpu.qkv_post import rotate, write_value
from zse.kernels.kv_pages import BLOCK

HEAD_DIMS = (64, 128)
NORMS = ("plain", "norm")
GROUP = 8  # query heads of a key/value head, at most: columns of a tile
PAD = 8  # numbers behind a head in shared memory: ldmatrix without bank conflicts


def symbol_of(head_dim: int, norm: str) -> str:
    return f"attention_heads_bf16_d{head_dim}_{norm}"


def made_numbers(head_dim: int) -> int:
    """bf16 numbers of the heads that a block makes: queries, a key, values."""
    return (GROUP + 2) * (head_dim + PAD)


class HeadTurn(zl.Record):
    """What qkv_post's functions want to know."""

    head_dim: int
    NORM: str
    eps: Any
    KV: Any = zl.bf16

    @property
    def rotary(self) -> int:
        return self.head_dim

    @property
    def rest(self) -> int:
        return max(2, self.head_dim // 64)


@zl.inline
def make(item, head, p):
    """The heads of a work item. Returns the number of the page that the row's last key is in."""
    D, x, lane, W = p.D, p.heads, zl.lane_index(), zl.target.threads // zl.target.warp
    turn = HeadTurn(D, x.NORM, x.eps)
    token, row = zl.i64(item[0]), zl.i64(item[2])
    fresh = p.page_table[row * p.max_pages + item[3] // BLOCK] + 0
    count = p.group + 2 if item[5] > item[3] else p.group + 0
    for each in zl.unroll(range(zl.warp_index(), count, W), 1):
        out = p.made + each * (D + PAD)
        if each < p.group:
            query = x.q + (token * x.q_stride + (head * p.group + each) * D)
            rotate(query, x.q_norm, None, x.table + token * D, out, None, zl.bf16, turn)
        else:
            if each == p.group:
                key = x.k + (token * x.k_stride + head * D)
                rotate(key, x.k_norm, None, x.table + token * D, out, None, zl.bf16, turn)
            else:
                write_value(lane, x.v + (token * x.v_stride + head * D), out, None, turn)
    zl.barrier()
    return fresh


@zl.inline
def load_queries(out, p):
    """The queries as B operands: column g is query head g. Columns that are none repeat one."""
    lane = zl.lane_index()
    at = p.made + (min(lane % 8, p.group - 1) * (p.D + PAD) + lane // 8 * 8)
    for pair in zl.static(range(p.D // 32)):
        words = zl.ldmatrix(zl.cast_ptr(at + pair * 32, zl.u16), 4)
        for half in zl.static(range(2)):
            for u in zl.static(range(2)):
                out[2 * pair + half][0][u] = words[2 * half + u] + 0


@zl.inline
def add_fresh(slot, page, head, item, p):
    """The row's last key and its values into their page and its slot of the ring, by one warp: a lane 16 bytes of one."""
    lane, pieces = zl.lane_index(), p.D // 8
    if lane < 2 * pieces:
        which, piece, place = lane // pieces, lane % pieces, item[3] % BLOCK
        words = zl.load(zl.cast_ptr(p.made + ((p.group + which) * (p.D + PAD) + piece * 8), zl.u32), 4)
        zl.store(zl.cast_ptr(slot + ((which * BLOCK + place) * p.stride + piece * 16), zl.u32), words)
        at = ((zl.i64(page) * p.page_heads + head) * BLOCK + place) * (2 * p.D) + piece * 16
        if which == 0:
            zl.store(zl.cast_ptr(p.k_pages + at, zl.u32), words)
        else:
            zl.store(zl.cast_ptr(p.v_pages + at, zl.u32), words)
    zl.warp_barrier()
