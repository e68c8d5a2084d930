"""What stands before the layers of a step of one token as one launch, on a Hopper GPU (zse.kernels.gpu.begin_token)."""

from typing import NamedTuple

from zse.kernels.kv_pages import BLOCK
from zse.kernels.op import Case, Cost, Op, cases_of, check, later, require
from zse.runtime.args import Args

THREADS = 256
OWN = 3  # blocks that do not copy


class Places(NamedTuple):
    """Where in a step's inputs, in words of 4 bytes, arguments of update_pages lie, and the token's id, position, row in the
    page table and source (zse.kernels.feed) one behind the other, which are the last: a multiple of 4."""

    count: int
    index: int
    value: int
    token: int


class Cutting(NamedTuple):
    """How attention is cut into tasks: of zse.kernels.gpu.attention_plan.PlanParams."""

    window: int
    heads: int
    blocks: int
    capacity: int


def begin_token(
    recorder,
    host,
    here,
    places: Places,
    sampled,
    history,
    plan,
    cut: Cutting,
    inv_freq,
    out,
    mscale: float = 1.0,
    temperature: tuple = (0.0, 1),
) -> None:
    """Copy the inputs host u32 [N], which the device can read where it is, or their address, to here u32 [N]; then, as
    update_pages(), feed_tokens(), plan_attention() and rope_table() do of this one token: history (a TokenHistory) and its
    page table, plan i32, out f32 [1, R]. What is left in `here` is the token's id. The caller guarantees what they want."""
    (words,), (half,) = here.shape, inv_freq.shape
    require(places.token == words - 4 and places.token % 4 == 0, f"begin_token: a token at {places.token} of {words}")
    check("begin_token here", here, "u32", words)
    check("begin_token sampled", sampled, "i32", None)
    check("begin_token history", history.tokens, "i32", None, BLOCK)
    check("begin_token page_table", history.page_table, "i32", None, None)
    check("begin_token plan", plan, "i32", None)
    check("begin_token inv_freq", inv_freq, "f32", half)
    check("begin_token out", out, "f32", None, 2 * half)
    pages = history.args()
    (rows, most), (beta, length) = history.page_table.shape, temperature
    args = Args(
        host=host,
        here=here,
        **places._asdict(),
        sampled=sampled,
        table=pages.pop("page_table"),
        size=rows * most,
        **pages,
        plan=plan,
        **cut._asdict(),
        inv_freq=inv_freq,
        out=out,
        pairs=half,
        mscale=float(mscale),
        beta=float(beta),
        length=length,
    )
    recorder.launch("begin_token", args, OWN + max(-(-places.token // (4 * THREADS)), 1))


def _cost(case: Case) -> Cost:
    return Cost(2 * case.inputs["host"].nbytes, 0)


BEGIN_TOKEN = Op(
    "begin_token",
    lambda target: [],
    begin_token,
    later("gpu.begin_token_cases", "reference"),
    cases_of(cpu=lambda rng: iter(()), gpu=later("gpu.begin_token_cases", "cases")),
    _cost,
    later("gpu.begin_token", "variants"),
)
