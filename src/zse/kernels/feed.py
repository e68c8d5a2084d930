"""A step's token ids: sampled ids of the step before that the host has not read yet, and the history of what was
said."""

from typing import NamedTuple

from zse import kernel as zl
from zse.kernels.kv_pages import BLOCK
from zse.kernels.op import EXACT, Case, Cost, Op, OutputSpec, check, later, require
from zse.lazy import numpy as np
from zse.runtime.args import Args
from zse.runtime.symbol import ceil_div
from zse.tensor import Tensor

CHUNKS = {"cpu": 256, "gpu": 128}  # tokens of one block


class TokenHistory(NamedTuple):
    """Every token of every sequence, in pages like the KV cache's: tokens i32 [num_pages, BLOCK]; page_table i32 [rows,
    max_pages] holds block numbers, blocks_per_page of them a page. Sequences that share pages share their history."""

    tokens: Tensor
    page_table: Tensor
    blocks_per_page: int

    def args(self) -> dict:
        """As kernels take it."""
        return {
            "page_table": self.page_table,
            "history": self.tokens,
            "max_pages": self.page_table.shape[1],
            "blocks_per_page": self.blocks_per_page,
        }


class Feeding(zl.Record):
    """Parameters of feed_tokens."""

    token_ids: zl.Ptr[zl.i32]
    source: zl.Ptr[zl.i32, "const"]
    sampled: zl.Ptr[zl.i32, "const"]
    positions: zl.Ptr[zl.i32, "const"]
    token_row: zl.Ptr[zl.i32, "const"]
    page_table: zl.Ptr[zl.i32, "const"]
    history: zl.Ptr[zl.i32]
    count: zl.i32
    max_pages: zl.i32
    blocks_per_page: zl.i32


@zl.kernel
def feed_tokens_chunk(p: Feeding):
    """Grid (chunks of tokens)."""
    first = zl.block_index(0) * CHUNKS["cpu"]
    for at in range(first, min(first + CHUNKS["cpu"], zl.i64(p.count))):
        token = p.token_ids[at]
        if p.source[at] >= 0:
            token = p.sampled[p.source[at]]
            p.token_ids[at] = token
        if p.blocks_per_page > 0:
            position = p.positions[at]
            block = p.page_table[zl.i64(p.token_row[at]) * zl.i64(p.max_pages) + zl.i64(position // BLOCK)]
            p.history[zl.i64(block // p.blocks_per_page) * BLOCK + zl.i64(position % BLOCK)] = token


def feed_tokens(recorder, token_ids, source, sampled, positions, token_row, history=None) -> None:
    """token_ids i32 [M]: those with source i32 [M] >= 0 become sampled i32 [R] [source]. Then every token is written to
    `history` (a TokenHistory, or None) at positions i32 [M] of row token_row i32 [M] of its page table.

    The caller guarantees source < R, and that the page table has the positions' pages."""
    (count,) = token_ids.shape
    check("feed_tokens token_ids", token_ids, "i32", count)
    check("feed_tokens source", source, "i32", count)
    check("feed_tokens sampled", sampled, "i32", None)
    check("feed_tokens positions", positions, "i32", count)
    check("feed_tokens token_row", token_row, "i32", count)
    pages = {"page_table": None, "history": None, "max_pages": 0, "blocks_per_page": 0}
    if history is not None:
        check("feed_tokens history", history.tokens, "i32", None, BLOCK)
        check("feed_tokens page_table", history.page_table, "i32", None, None)
        require(history.blocks_per_page > 0, "feed_tokens: blocks_per_page must be positive")
        pages = history.args()
    args = Args(
        token_ids=token_ids,
        source=source,
        sampled=sampled,
        positions=positions,
        token_row=token_row,
        count=count,
        **pages,
    )
    recorder.launch("feed_tokens", args, (ceil_div(count, CHUNKS[recorder.device.kernels]),))


def make_history(rng, lengths, max_pages: int, blocks_per_page: int, num_pages: int):
    """(page_table [len(lengths), max_pages], tokens [num_pages, BLOCK]): pages of sequences of these lengths in random
    places, all tokens negative (nothing said)."""
    table = np.full((len(lengths), max_pages), -1, np.int32)
    free = rng.permutation(num_pages)
    for row, length in enumerate(lengths):
        pages = -(-length // BLOCK)
        table[row, :pages], free = free[:pages] * blocks_per_page, free[pages:]
    return table, np.full((num_pages, BLOCK), -7, np.int32)


def _reference(token_ids, source, sampled, positions, token_row, history):
    fed = np.where(source >= 0, sampled[np.maximum(source, 0)], token_ids)
    if history is None:
        return {"token_ids": fed}
    tokens = history.tokens.copy()
    for token, position, row in zip(fed, positions, token_row, strict=True):
        tokens[history.page_table[row, position // BLOCK] // history.blocks_per_page, position % BLOCK] = token
    return {"token_ids": fed, "history.tokens": tokens}


def _cases(rng, family="cpu"):
    for count, rows in ((1, 1), (7, 7), (300, 3)):
        ends = rng.integers(count // rows + 1, 90 + count, rows)
        table, tokens = make_history(rng, ends, 40, 6, 80)
        parts = np.array_split(np.arange(count), rows)
        token_row = np.concatenate([np.full(len(part), row) for row, part in enumerate(parts)]).astype(np.int32)
        positions = np.concatenate([np.arange(end - len(part), end) for end, part in zip(ends, parts, strict=True)])
        ids = rng.integers(0, 1000, count).astype(np.int32)
        source = np.where(rng.random(count) < 0.5, rng.integers(0, rows, count), -1).astype(np.int32)
        common = {
            "source": source,
            "sampled": rng.integers(1000, 2000, rows).astype(np.int32),
            "positions": positions.astype(np.int32),
            "token_row": token_row,
        }
        output = {"token_ids": OutputSpec((count,), "int32", EXACT, inout=ids)}
        yield Case(f"{count} of {rows}", common | {"history": None}, output)
        yield Case(
            f"{count} of {rows} with history",
            common | {"history": TokenHistory(tokens, table, 6)},
            output | {"history.tokens": OutputSpec(tokens.shape, "int32", EXACT, inout=tokens)},
        )


def _cost(case: Case) -> Cost:
    return Cost(20 * len(case.inputs["source"]), 0)


FEED_TOKENS = Op(
    "feed_tokens",
    lambda target: [zl.Variant("feed_tokens", feed_tokens_chunk)],
    feed_tokens,
    _reference,
    _cases,
    _cost,
    later("gpu.step", "feed_variants"),
)
