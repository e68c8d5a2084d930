"""The ends of a recording of one token: what stands before its layers as one launch (zse.kernels.begin_token), and what is
drawn written where the host reads it, so that nothing is copied (15 us of a step of 1,270 that two copies took, an H200, and
10 of its first launches)."""

from typing import Any

from zse.kernels.begin_token import Cutting, Places, begin_token
from zse.kernels.feed import TokenHistory
from zse.runtime.args import Args
from zse.tensor import Tensor

FIRST = ("upload", "update_pages", "feed_tokens", "attention_plan")


def join_ends(recorder: Any) -> None:
    """Of a recording of one token on a device that has these kernels; what begins or ends in another way stays as it is. Not
    where an engine has ranks, whose inputs and tokens others want."""
    launches = recorder.launches
    symbols = [launch.symbol for launch in launches]
    alone = all(symbols.count(symbol) == 1 for symbol in ("attention_plan", "rope_table"))
    # Attention reads its plan before its own grid_wait(): an embedding lets what follows it start when all before it is done.
    if tuple(symbols[:4]) == FIRST and alone and symbols[4].startswith("embed"):
        _join_begin(recorder, launches[symbols.index("rope_table")])
    if symbols[-2:] == ["sample_row", "download"]:
        *_, row, download = launches
        args, staging = row.args, download.staging
        if args["tokens"].buffer is staging.buffer:
            del launches[-2:]
            recorder.launch(
                row.symbol, Args(args | {"to_host": staging.host_address - staging.buffer.address}), row.grid
            )


def _join_begin(recorder: Any, rotate: Any) -> None:
    launches = recorder.launches
    upload, pages, feed, plan = launches[:4]
    staging, fed = upload.staging, feed.args
    named = [*(pages.args[name] for name in ("count", "index", "value")), fed["token_ids"]]
    token = [fed["token_ids"], plan.args["positions"], plan.args["token_row"], fed["source"]]
    at, table = token[0].offset, fed["page_table"]
    if (
        any(each.buffer is not staging.buffer for each in (*named, *token))
        or [each.offset - at for each in token] != [0, 4, 8, 12]
        or (upload.offset, upload.nbytes) != (0, at + 16)
        or at % 16
        or table is None
        or table.address != pages.args["table"].address
        or not plan.args["max_run"]  # a deterministic engine's token is a tile of a prompt
    ):
        return
    here = Tensor(staging.buffer, (upload.nbytes // 4,), "u32")
    turned = rotate.args
    begin_token(
        recorder,
        staging.host_address,
        here,
        Places(*(each.offset // 4 for each in named)),
        fed["sampled"],
        TokenHistory(fed["history"], table, fed["blocks_per_page"]),
        plan.args["plan"],
        Cutting(*(plan.args[name] for name in Cutting._fields)),
        turned["inv_freq"],
        turned["out"],
        turned["mscale"],
        (turned["beta"], turned["length"]),
    )
    launches.remove(rotate)
    launches[:4] = [launches.pop()]
