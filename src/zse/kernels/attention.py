"""Attention over paged keys and values: one kernel for decode, prefill, chunked and mixed batches
(attention_kernels.py, attention_combine.py; kernels/gpu/attention.py)."""

from zse import kernel as zl
from zse.kernels.kv_pages import BLOCK, PACKED, head_dim_of, pages_shape
from zse.kernels.op import Op, cases_of, check, later, launcher, require
from zse.kernels.quantize import GROUP
from zse.runtime.args import Args

SEGMENT = 256
MAX_HEAD_DIM = 512
MAX_RANK = 512  # numbers of a latent
SEEING_ROWS = 4  # rows_in_registers() of steps with images, which are prompts
MAX_ROWS = 32  # query rows (tokens of the tile x query heads of the group) of one block
KV_DTYPES = {"f16": zl.f16, "f32": zl.f32, **PACKED}


def rows_in_registers(group: int) -> int:
    """Query rows that a pass computes together, for a group of `group` query heads: few enough idle copies, and 12 to
    16 sums in registers."""
    return 2 if group <= 2 else 3 if group % 3 == 0 or group == 5 else 4


def partial_shape(max_tokens: int, heads: int, head_dim: int, max_context: int) -> tuple[int, int, int, int]:
    """Shape of the f32 scratch that splits > 1 needs for up to `max_tokens` tokens."""
    return max_tokens, heads, -(-max_context // SEGMENT), head_dim + BLOCK


def split_args(op: str, splits, partial, page_table, heads: int, width: int) -> dict:
    """What kernels take of segments that are computed apart. width: numbers of a head's state."""
    if splits == 1:
        return dict(splits=splits, partial=None, max_segments=1)
    require(partial is not None, f"{op}: splits other than 1 need partial")
    check(f"{op} partial", partial, "f32", None, heads, None, width + BLOCK)
    max_segments = partial.shape[2]
    require(
        max_segments * SEGMENT >= page_table.shape[1] * BLOCK,
        f"{op}: partial holds {max_segments} segments, the page table {page_table.shape[1]} pages",
    )
    return dict(splits=splits, partial=partial, max_segments=max_segments)


def _attention(
    recorder,
    q,
    k_pages,
    v_pages,
    page_table,
    token_row,
    positions,
    out,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    splits=1,
    partial=None,
    ahead: int = 0,
    sinks=None,
    sees=None,
) -> None:
    """Attention of M tokens, whose keys and values are already in their pages.

    q f32 [M, Hq * D]; k_pages [P, Hk, D, 16] and v_pages [P, Hk, 16, D], f16 or f32, or both packed i8 or e4m3
    (kv_pages.py); page_table i32 [rows, max_pages]; token_row, positions i32 [M] (tokens of a row stand together,
    positions ascending by one); out [M, Hq * D], f32 Tensor or int8 Activation (D a multiple of 32). scale: of the
    scores. window: keys that a token sees, itself included (0: all). softcap: c of c * tanh(score / c) (0: none).
    sinks: f32 [Hq], a score of each head that weighs in the softmax's sum and has no value (gpt-oss, arXiv 2508.10925;
    None: none). splits: int or Sym, from Planner.symbols(); other than 1 it needs partial, f32 of partial_shape().
    ahead: keys behind itself that a token sees: 0 is causal attention; an encoder's sees its sequence's, all of which
    is in the batch, and has splits 1. sees: i32 [M], the last key that each token sees, its own or one behind it in the
    batch (tokens of an image see each other; None: its own; without ahead, with splits 1). D is a multiple of 16 up to 512, Hq a multiple of Hk, Hq / Hk at most 32."""
    tokens, width = q.shape
    kv_heads, head_dim = v_pages.shape[1], head_dim_of(v_pages)
    _check(q, k_pages, v_pages, page_table, token_row, positions, out)
    heads, group = width // head_dim, width // (kv_heads * head_dim)
    form = "int8" if out.dtype == "int8" else "f32"
    require(form == "f32" or head_dim % GROUP == 0, f"attention: head_dim {head_dim} is not a multiple of {GROUP}")
    if sinks is not None:
        check("attention sinks", sinks, "f32", heads)
    common = Args(sinks=sinks, has_sinks=int(sinks is not None), out=None, oq=None, oscale=None, osum=None)
    common |= {"oq": out.q, "oscale": out.scale, "osum": out.sum} if form == "int8" else {"out": out}
    common |= dict(positions=positions, head_dim=head_dim, window=window)
    common |= split_args("attention", splits, partial, page_table, heads, head_dim)
    require(not (ahead or sees) or splits == 1, "attention: keys ahead are not split")
    if sees is not None:
        require(not ahead, "attention: ahead and sees do not go together")
        check("attention sees", sees, "i32", tokens)
        common["partial"] = sees
    args = Args(
        **common,
        ahead=ahead,
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=page_table,
        token_row=token_row,
        tokens=tokens,
        max_pages=page_table.shape[1],
        kv_heads=kv_heads,
        group=group,
        scale=float(scale),
        softcap=float(softcap),
    )
    symbol = f"attention_{k_pages.dtype}_r{rows_in_registers(group)}_{form}"
    if sees is not None:
        symbol = f"attention_sees_{k_pages.dtype}_r{SEEING_ROWS}_{form}"
    recorder.launch(symbol, args, (kv_heads, tokens, splits))
    if splits != 1:
        recorder.launch(f"attention_combine_{form}", Args(**common, heads=heads), (heads, tokens))


def _check(q, k_pages, v_pages, page_table, token_row, positions, out) -> None:
    pages, kv_heads = v_pages.shape[:2]
    head_dim = head_dim_of(v_pages)
    tokens, width = q.shape
    require(
        head_dim % 16 == 0 and head_dim <= MAX_HEAD_DIM,
        f"attention: head_dim {head_dim} is not a multiple of 16 up to 512",
    )
    require(width % (kv_heads * head_dim) == 0, f"attention: q is {width} wide, {kv_heads} kv heads of {head_dim}")
    group = width // (kv_heads * head_dim)
    require(group <= MAX_ROWS, f"attention: {group} query heads share a kv head, at most {MAX_ROWS} are supported")
    check("attention q", q, "f32", tokens, width)
    key_shape, value_shape = (pages_shape(head_dim, k_pages.dtype, keys, "cpu") for keys in (True, False))
    check("attention k_pages", k_pages, tuple(KV_DTYPES), pages, kv_heads, *key_shape)
    check("attention v_pages", v_pages, k_pages.dtype, pages, kv_heads, *value_shape)
    check("attention page_table", page_table, "i32", None, None)
    check("attention token_row", token_row, "i32", tokens)
    check("attention positions", positions, "i32", tokens)
    require(tuple(out.shape) == (tokens, width), f"attention: out has shape {tuple(out.shape)}, q {(tokens, width)}")


attention = launcher(cpu=_attention, gpu=later("gpu.attention", "record_attention"))


ATTENTION = Op(
    "attention",
    later("attention_combine", "variants"),
    attention,
    later("attention_cases", "attention_reference"),
    cases_of(cpu=later("attention_cases", "make_cpu_cases"), gpu=later("attention_cases", "make_gpu_cases")),
    later("attention_cases", "attention_cost"),
    later("gpu.attention", "attention_variants"),
)
