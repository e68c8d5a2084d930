"""Causal attention over paged keys and values: one kernel for decode, prefill, chunked and mixed batches.

A block takes one key/value head and one *tile*: neighbouring tokens of one sequence whose positions share a multiple of
the tile length (the first token of a run leads its tile; the blocks of the others return at once). Tiles, key blocks
and segments lie at fixed positions, and every query row goes through the same instructions whatever else is in the
batch, so a row's result is bit for bit the same alone, batched, chunked or whole.

Keys are walked in segments of 256: scores (lanes are tokens), softmax, then P·V (lanes are dimensions) with the sums in
registers; segments are merged with running maxima (Milakov and Gimelshein 2018; Dao et al. 2022, and 2023 for the split
over keys). With several splits every segment is a block of its own, and attention_combine merges them in the same order
with the same arithmetic.
"""

from zse import kernel as zl
from zse.kernels.kv_pages import BLOCK, PACKED, SCALE_BYTES, head_dim_of, pages_shape, unit_of, widen
from zse.kernels.op import Op, cases_of, check, later, launcher, require
from zse.kernels.quantize import GROUP, quantize_group
from zse.runtime.args import Args

SEGMENT = 256
KEY_ALIGN = 64  # key blocks start at multiples of this
MAX_HEAD_DIM = 256
MAX_ROWS = 32  # query rows (tokens of the tile x query heads of the group) of one block
MASKED = -3.0e38  # the score of a key that must not be seen
FLOOR = -1.0e30  # the running maximum before any key
KV_DTYPES = {"f16": zl.f16, "f32": zl.f32, **PACKED}


@zl.inline
def weight_of(difference):
    """exp(score - maximum), at most 1: the polynomial of kernel/mathlib.py (Cephes expf) with a lower bound at which
    the power of two is exactly 0, so that masked keys weigh nothing. exp(0) is exactly 1."""
    x = max(difference, -88.3)
    n = zl.round_even(x * 1.44269504088896341)
    r = zl.fma(n, 2.12194440e-4, zl.fma(n, -0.693359375, x))
    p = zl.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = zl.fma(p, r, 8.3334519073e-3)
    p = zl.fma(p, r, 4.1665795894e-2)
    p = zl.fma(p, r, 1.6666665459e-1)
    p = zl.fma(p, r, 5.0000001201e-1)
    p = zl.fma(p, r * r, r) + 1.0
    return p * zl.bitcast((zl.convert(n, zl.i32) + 127) << 23, zl.f32)


@zl.inline
def key_block(queries, key_pages, next_pages, acc, head_dim, R, VECTORS, KV):
    """acc[r][v] = q_r · K of VECTORS * lanes neighbouring keys; key_pages[p] points at [head_dim, 16] of page p.
    next_pages: of the next block, brought near meanwhile: a page is too short for the processor to foresee it."""
    L = zl.target.lanes
    per_page = BLOCK // L
    LINE = 1 if KV is zl.f32 else 2 if KV is zl.f16 else 4  # dimensions in 64 bytes
    for line in range(0, head_dim, max(LINE, 2)):
        for page in next_pages:
            for d in zl.static(range(0, max(LINE, 2), LINE)):
                zl.prefetch(page + (line + d) * BLOCK)
        for d in zl.static(range(max(LINE, 2))):
            keys = [
                widen(zl.load(key_pages[v // per_page] + (line + d) * BLOCK + v % per_page * L, L), KV)
                for v in range(VECTORS)
            ]
            for r in zl.static(range(R)):
                query = zl.splat(queries[r][line + d], L)
                for v in zl.static(range(VECTORS)):
                    acc[r][v] = zl.fma(query, keys[v], acc[r][v])


@zl.inline
def mix_values(
    scores,
    page_ids,
    value_base,
    page_stride,
    head_dim,
    state,
    rescale,
    factors,
    begin,
    stop,
    segment,
    last_page,
    column,
    R,
    VECTORS,
    KV,
):
    """Columns column .. column + VECTORS * lanes of state rows: state * rescale + factor * sum over keys of p * V."""
    L = zl.target.lanes
    LINE = 16 if KV is zl.f32 else 32 if KV is zl.f16 else 64  # values in 64 bytes
    acc = [[zl.f32.x(L)(0) for v in range(VECTORS)] for r in range(R)]
    for page in range(begin // BLOCK, (stop + BLOCK - 1) // BLOCK):
        values = value_base + zl.i64(page_ids[page]) * page_stride + column
        coming = value_base + zl.i64(page_ids[min(page + 1, last_page)]) * page_stride + column
        weights = scores + (page * BLOCK - segment)
        for t in range(min(BLOCK, stop - page * BLOCK)):
            for line in zl.static(range(0, VECTORS * L, LINE)):
                zl.prefetch(coming + t * head_dim + line)
            row = [widen(zl.load(values + t * head_dim + v * L, L), KV) for v in range(VECTORS)]
            for r in zl.static(range(R)):
                weight = zl.splat(weights[r * SEGMENT + t], L)
                for v in zl.static(range(VECTORS)):
                    acc[r][v] = zl.fma(weight, row[v], acc[r][v])
    for r in zl.static(range(R)):
        for v in zl.static(range(VECTORS)):
            place = state[r] + column + v * L
            zl.store(place, zl.fma(zl.load(place, L), rescale[r], acc[r][v] * factors[r]))


@zl.inline
def write_row(state, total, out, oq, oscale, osum, at, head_dim, INT8):
    """The finished row state / total, at element `at` of the output."""
    L = zl.target.lanes
    inverse = 1.0 / total
    if INT8:
        for d in range(0, head_dim, GROUP):
            values = [zl.load(state + d + i, L) * inverse for i in zl.static(range(0, GROUP, L))]
            quantize_group(values, oq + at + d, oscale + (at + d) // GROUP, osum + (at + d) // GROUP)
    else:
        for d in range(0, head_dim, L):
            zl.store(out + at + d, zl.load(state + d, L) * inverse)


@zl.kernel
def attention_tile(
    q: zl.Ptr[zl.f32, "const"],
    k_pages: zl.Ptr[zl.u8, "const"],
    v_pages: zl.Ptr[zl.u8, "const"],
    page_table: zl.Ptr[zl.i32, "const"],
    token_row: zl.Ptr[zl.i32, "const"],
    positions: zl.Ptr[zl.i32, "const"],
    out: zl.Ptr[zl.f32],
    oq: zl.Ptr[zl.i8],
    oscale: zl.Ptr[zl.f32],
    osum: zl.Ptr[zl.f32],
    partial: zl.Ptr[zl.f32],
    tokens: zl.i64,
    max_pages: zl.i64,
    max_segments: zl.i64,
    splits: zl.i64,
    kv_heads: zl.i64,
    group: zl.i64,
    head_dim: zl.i64,
    scale: zl.f32,
    window: zl.i64,
    softcap: zl.f32,
    R: zl.static,
    KV: zl.static,
    INT8: zl.static,
):
    """Grid (kv heads, tokens, splits). splits: 1, or at least the number of segments. R: query rows in registers at
    once."""
    L = zl.target.lanes
    KEY_VECTORS = COLUMN_VECTORS = 2 if L == 8 and R == 4 else 4  # sums in registers: AVX2 has 16, the others 32
    KEYS = KEY_VECTORS * L
    SCALED = KV is zl.i8 or KV is zl.e4m3
    head = zl.block_index(0)
    token = zl.block_index(1)
    row = token_row[token]
    position = zl.i64(positions[token])
    tile = MAX_ROWS // group
    if token > 0 and position % tile != 0:
        if token_row[token - 1] == row:
            return  # another token leads this tile
    count = zl.i64(1)
    room = min(tile - position % tile, tokens - token)
    while count < room and token_row[token + count] == row:
        count += 1

    num_keys = zl.i64(positions[token + count - 1]) + 1
    first_key = max(position + 1 - window, 0) if window > 0 else zl.i64(0)
    first_segment = first_key // SEGMENT
    last_segment = (num_keys - 1) // SEGMENT
    if splits > 1:
        if zl.block_index(2) < first_segment or zl.block_index(2) > last_segment:
            return
        first_segment = zl.block_index(2)
        last_segment = zl.block_index(2)

    rows = count * group
    q_width = kv_heads * group * head_dim
    STORED = zl.u8 if KV is zl.e4m3 else KV
    head_size = head_dim * BLOCK + (SCALE_BYTES if SCALED else 0)
    page_stride = kv_heads * head_size
    page_ids = page_table + zl.i64(row) * max_pages
    keys_base = zl.cast_ptr(k_pages, STORED) + head * head_size
    values_base = zl.cast_ptr(v_pages, STORED) + head * head_size
    first_page = first_key // BLOCK
    last_page = (num_keys - 1) // BLOCK
    scores = zl.local_array(zl.f32, 4 * SEGMENT)
    state = zl.local_array(zl.f32, (MAX_ROWS + 4) * MAX_HEAD_DIM)
    maxima = zl.local_array(zl.f32, MAX_ROWS + 4)
    totals = zl.local_array(zl.f32, MAX_ROWS + 4)
    for i in range(0, (rows + R - 1) // R * R):
        maxima[i] = FLOOR
        totals[i] = 0.0
        for d in range(0, head_dim, L):
            zl.store(state + i * head_dim + d, zl.f32.x(L)(0))

    for index in range(first_segment, last_segment + 1):
        segment = index * SEGMENT
        stop = min(segment + SEGMENT, num_keys)
        begin = max(segment, first_key // KEY_ALIGN * KEY_ALIGN)
        value_begin = max(segment, first_page * BLOCK)
        padded = begin + (stop - begin + KEY_ALIGN - 1) // KEY_ALIGN * KEY_ALIGN
        for sub in range(0, rows, R):
            # Rows of this pass; beyond the last one the last is computed again and its copies are dropped.
            which = [min(sub + r, rows - 1) for r in zl.static(range(R))]
            queries = [
                q + (token + which[r] // group) * q_width + (head * group + which[r] % group) * head_dim
                for r in zl.static(range(R))
            ]
            limits = [zl.i64(positions[token + which[r] // group]) + 1 for r in zl.static(range(R))]
            for key in range(begin, stop, KEYS):
                key_pages = [
                    keys_base + zl.i64(page_ids[min(max(key // BLOCK + p, first_page), last_page)]) * page_stride
                    for p in zl.static(range(KEYS // BLOCK))
                ]
                next_pages = [
                    keys_base
                    + zl.i64(page_ids[min(max((key + KEYS) // BLOCK + p, first_page), last_page)]) * page_stride
                    for p in zl.static(range(KEYS // BLOCK))
                ]
                acc = [[zl.f32.x(L)(0) for v in range(KEY_VECTORS)] for r in range(R)]
                key_block(queries, key_pages, next_pages, acc, head_dim, R, KEY_VECTORS, KV)
                scales = [zl.splat(scale, L) for _ in range(KEY_VECTORS)]
                if SCALED:
                    scales = [
                        zl.load(zl.cast_ptr(key_pages[v * L // BLOCK] + head_dim * BLOCK, zl.f32) + v * L % BLOCK, L)
                        * (scale * unit_of(KV))
                        for v in range(KEY_VECTORS)
                    ]
                for r in zl.static(range(R)):
                    for v in zl.static(range(KEY_VECTORS)):
                        score = acc[r][v] * scales[v]
                        if softcap > 0.0:
                            score = zl.tanh(score / softcap) * softcap
                        zl.store(scores + r * SEGMENT + (key - segment) + v * L, score)
            for r in zl.static(range(R)):
                for hidden in range(max(limits[r], begin), padded):
                    scores[r * SEGMENT + hidden - segment] = MASKED
                if window > 0:
                    for gone in range(begin, min(limits[r] - window, padded)):
                        scores[r * SEGMENT + gone - segment] = MASKED
            rescale = [zl.f32(0) for r in range(R)]
            factors = [zl.f32(0) for r in range(R)]
            for r in zl.static(range(R)):
                high = [zl.f32.x(L)(FLOOR) for _ in range(2)]
                mine = scores + r * SEGMENT - segment
                for key in range(begin, padded, 2 * L):
                    for u in zl.static(range(2)):
                        high[u] = max(high[u], zl.load(mine + key + u * L, L))
                peak = zl.reduce_max(max(high[0], high[1]))
                sums = [zl.f32.x(L)(0) for _ in range(2)]
                for key in range(begin, padded, 2 * L):
                    for u in zl.static(range(2)):
                        p = weight_of(zl.load(mine + key + u * L, L) - peak)
                        sums[u] += p
                        zl.store(mine + key + u * L, p)
                old = maxima[sub + r]
                new = max(old, peak)
                rescale[r] = weight_of(old - new)
                factors[r] = weight_of(peak - new)
                totals[sub + r] = zl.fma(totals[sub + r], rescale[r], zl.reduce_add(sums[0] + sums[1]) * factors[r])
                maxima[sub + r] = new
            if SCALED:
                for page in range(value_begin // BLOCK, (stop + BLOCK - 1) // BLOCK):
                    lines = zl.cast_ptr(values_base + zl.i64(page_ids[page]) * page_stride + head_dim * BLOCK, zl.f32)
                    for part in zl.static(range(0, BLOCK, L)):
                        units = zl.load(lines + part, L) * unit_of(KV)
                        for r in zl.static(range(R)):
                            place = scores + (r * SEGMENT + page * BLOCK - segment + part)
                            zl.store(place, zl.load(place, L) * units)
            states = [state + (sub + r) * head_dim for r in zl.static(range(R))]
            wide = head_dim // (COLUMN_VECTORS * L) * (COLUMN_VECTORS * L)
            for column in range(0, wide, COLUMN_VECTORS * L):
                mix_values(
                    scores,
                    page_ids,
                    values_base,
                    page_stride,
                    head_dim,
                    states,
                    rescale,
                    factors,
                    value_begin,
                    stop,
                    segment,
                    last_page,
                    column,
                    R,
                    COLUMN_VECTORS,
                    KV,
                )
            for column in range(wide, head_dim, L):
                mix_values(
                    scores,
                    page_ids,
                    values_base,
                    page_stride,
                    head_dim,
                    states,
                    rescale,
                    factors,
                    value_begin,
                    stop,
                    segment,
                    last_page,
                    column,
                    R,
                    1,
                    KV,
                )

    for i in range(rows):
        place = (token + i // group) * kv_heads * group + head * group + i % group
        if splits > 1:
            record = partial + (place * max_segments + first_segment) * (head_dim + BLOCK)
            for d in range(0, head_dim, L):
                zl.store(record + d, zl.load(state + i * head_dim + d, L))
            record[head_dim] = maxima[i]
            record[head_dim + 1] = totals[i]
        else:
            write_row(state + i * head_dim, totals[i], out, oq, oscale, osum, place * head_dim, head_dim, INT8)


@zl.kernel
def attention_combine(
    positions: zl.Ptr[zl.i32, "const"],
    out: zl.Ptr[zl.f32],
    oq: zl.Ptr[zl.i8],
    oscale: zl.Ptr[zl.f32],
    osum: zl.Ptr[zl.f32],
    partial: zl.Ptr[zl.f32, "const"],
    max_segments: zl.i64,
    splits: zl.i64,
    heads: zl.i64,
    head_dim: zl.i64,
    window: zl.i64,
    INT8: zl.static,
):
    """Grid (query heads, tokens): merge the segments of one query row, in order. Nothing to do when splits is 1."""
    if splits == 1:
        return
    L = zl.target.lanes
    num_keys = zl.i64(positions[zl.block_index(1)]) + 1
    first = max(num_keys - window, 0) // SEGMENT if window > 0 else zl.i64(0)
    place = zl.block_index(1) * heads + zl.block_index(0)
    state = zl.local_array(zl.f32, MAX_HEAD_DIM)
    for d in range(0, head_dim, L):
        zl.store(state + d, zl.f32.x(L)(0))
    maximum_ = zl.f32(FLOOR)
    total = zl.f32(0)
    for index in range(first, (num_keys - 1) // SEGMENT + 1):
        record = partial + (place * max_segments + index) * (head_dim + BLOCK)
        peak = record[head_dim]
        new = max(maximum_, peak)
        rescale = weight_of(maximum_ - new)
        factor = weight_of(peak - new)
        total = zl.fma(total, rescale, record[head_dim + 1] * factor)
        for d in range(0, head_dim, L):
            zl.store(state + d, zl.fma(zl.load(state + d, L), rescale, zl.load(record + d, L) * factor))
        maximum_ = new
    write_row(state, total, out, oq, oscale, osum, place * head_dim, head_dim, INT8)


def rows_in_registers(group: int) -> int:
    """Query rows that a pass computes together, for a group of `group` query heads: few enough idle copies, and 12 to
    16 sums in registers."""
    return 2 if group <= 2 else 3 if group % 3 == 0 or group == 5 else 4


def partial_shape(max_tokens: int, heads: int, head_dim: int, max_context: int) -> tuple[int, int, int, int]:
    """Shape of the f32 scratch that splits > 1 needs for up to `max_tokens` tokens."""
    return max_tokens, heads, -(-max_context // SEGMENT), head_dim + BLOCK


def num_splits(tokens: int, kv_heads: int, context: int, threads: int, max_tokens: int) -> int:
    """The `splits` of a step: one block a segment while heads x tokens do not fill the threads evenly, else 1.
    Results do not depend on it. context: the longest sequence's tokens, this step's included; max_tokens: of
    partial_shape."""
    segments = -(-context // SEGMENT)
    return segments if tokens <= max_tokens and tokens * kv_heads < 4 * threads else 1


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
) -> None:
    """Causal attention of M tokens, whose keys and values are already in their pages.

    q f32 [M, Hq * D]; k_pages [P, Hk, D, 16] and v_pages [P, Hk, 16, D], f16 or f32, or both packed i8 or e4m3
    (kv_pages.py); page_table i32 [rows, max_pages];
    token_row, positions i32 [M] (tokens of a row stand together, positions ascending by one); out [M, Hq * D], f32
    Tensor or int8 Activation (D a multiple of 32). scale: of the scores. window: keys that a token sees, itself
    included (0: all). softcap: c of c * tanh(score / c) (0: none). splits: int or Sym, from num_splits(); other than
    1 it needs partial, f32 of partial_shape(). D is a multiple of 16 up to 256, Hq a multiple of Hk, Hq / Hk at most
    32."""
    pages, kv_heads = v_pages.shape[:2]
    head_dim = head_dim_of(v_pages)
    tokens, width = q.shape
    require(
        head_dim % 16 == 0 and head_dim <= MAX_HEAD_DIM,
        f"attention: head_dim {head_dim} is not a multiple of 16 up to 256",
    )
    require(width % (kv_heads * head_dim) == 0, f"attention: q is {width} wide, {kv_heads} kv heads of {head_dim}")
    group = width // (kv_heads * head_dim)
    require(group <= MAX_ROWS, f"attention: {group} query heads share a kv head, at most {MAX_ROWS} are supported")
    check("attention q", q, "f32", tokens, width)
    for name, tensor in (("k_pages", k_pages), ("v_pages", v_pages)):
        check(
            f"attention {name}",
            tensor,
            tuple(KV_DTYPES) if tensor is k_pages else k_pages.dtype,
            pages,
            kv_heads,
            *pages_shape(head_dim, k_pages.dtype, tensor is k_pages, "cpu"),
        )
    check("attention page_table", page_table, "i32", None, None)
    check("attention token_row", token_row, "i32", tokens)
    check("attention positions", positions, "i32", tokens)
    require(tuple(out.shape) == (tokens, width), f"attention: out has shape {tuple(out.shape)}, q {(tokens, width)}")
    form = "int8" if out.dtype == "int8" else "f32"
    require(form == "f32" or head_dim % GROUP == 0, f"attention: head_dim {head_dim} is not a multiple of {GROUP}")
    outs = dict.fromkeys(("out", "oq", "oscale", "osum"))
    outs |= {"oq": out.q, "oscale": out.scale, "osum": out.sum} if form == "int8" else {"out": out}
    split = splits != 1
    max_segments = 1
    if split:
        require(partial is not None, "attention: splits other than 1 need partial")
        check("attention partial", partial, "f32", None, width // head_dim, None, head_dim + BLOCK)
        max_segments = partial.shape[2]
        require(
            max_segments * SEGMENT >= page_table.shape[1] * BLOCK,
            f"attention: partial holds {max_segments} segments, the page table {page_table.shape[1]} pages",
        )
    symbol = f"attention_{k_pages.dtype}_r{rows_in_registers(group)}_{form}"
    recorder.launch(
        symbol,
        Args(
            q=q,
            k_pages=k_pages,
            v_pages=v_pages,
            page_table=page_table,
            token_row=token_row,
            positions=positions,
            **outs,
            partial=partial if split else None,
            tokens=tokens,
            max_pages=page_table.shape[1],
            max_segments=max_segments,
            splits=splits,
            kv_heads=kv_heads,
            group=group,
            head_dim=head_dim,
            scale=float(scale),
            window=window,
            softcap=float(softcap),
        ),
        (kv_heads, tokens, splits),
    )
    if split:
        recorder.launch(
            f"attention_combine_{form}",
            Args(
                positions=positions,
                **outs,
                partial=partial,
                max_segments=max_segments,
                splits=splits,
                heads=width // head_dim,
                head_dim=head_dim,
                window=window,
            ),
            (width // head_dim, tokens),
        )


attention = launcher(cpu=_attention, gpu=later("gpu.attention", "record_attention"))


def _variants(target):
    return [
        zl.Variant(f"attention_{name}_r{rows}_{form}", attention_tile, {"R": rows, "KV": dtype, "INT8": form == "int8"})
        for name, dtype in KV_DTYPES.items()
        for rows in (2, 3, 4)
        for form in ("f32", "int8")
    ] + [
        zl.Variant(f"attention_combine_{form}", attention_combine, {"INT8": form == "int8"}) for form in ("f32", "int8")
    ]


ATTENTION = Op(
    "attention",
    _variants,
    attention,
    later("attention_cases", "attention_reference"),
    cases_of(cpu=later("attention_cases", "make_cpu_cases"), gpu=later("attention_cases", "make_gpu_cases")),
    later("attention_cases", "attention_cost"),
    later("gpu.attention", "attention_variants"),
)
