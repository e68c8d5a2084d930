"""What low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) add to products: y[m] += scale * B (A x[m]), with the
A, B and scale of the adapter that row m has, if any. Rows of several adapters stand in one batch.

Two launches serve all products that share an input: `adapt_down` computes scale * A x of every token, `adapt_up`
multiplies that with B and adds it to the results. An adapter lies in a slot, its matrices one behind the other as its
own rank makes them: those of a product begin at (what is before it, for a rank of 1) * rank, so that a small rank reads
little. A token without an adapter, and a product that its adapter leaves alone (scale 0), cost one look at a table."""

from typing import Any, NamedTuple

from zse import kernel as zl
from zse.kernels.op import (
    Case,
    Cost,
    HostActivation,
    HostArray,
    HostFp8Activation,
    Op,
    OutputSpec,
    Tolerance,
    check,
    later,
    require,
)
from zse.lazy import numpy as np
from zse.quant import pack
from zse.runtime.args import Args
from zse.runtime.symbol import ceil_div

RANK_STEP = 8  # ranks are whole multiples: rows of A that share a pass over x; missing ones are zeros
CHUNKS = {"cpu": 1024, "gpu": 512}  # results of a block of adapt_up
CHUNK = CHUNKS["cpu"]
# Tokens of a CPU's block. Those of a prompt share a slot, and so what is read and converted; of steps of few tokens
# each has its own, whose matrices are best read one token after another.
TOKENS, FEW = (1, 4), 16
MOST = 3  # products that share an input
GROUP = 32  # of int8 and int16 activations: numbers that share a scale


class Slots(NamedTuple):
    """Adapters in device memory. matrices f16 [slots, numbers]; ranks i32 [slots]; scales f32 [slots, products]: of
    each of the model's products, 0: the adapter leaves it alone; of_row i32 [rows]: the slot of each row of the page
    table, -1: no adapter. rank: the largest that fits."""

    matrices: Any
    ranks: Any
    scales: Any
    of_row: Any
    rank: int


class Place(NamedTuple):
    """Where the matrices of products that share an input stand in a slot, in numbers for a rank of 1: their A, one
    behind the other, from `down` on, their B from `up`. product: the first one's place in a line of scales; rows:
    results of each."""

    down: int
    up: int
    product: int
    rows: tuple[int, ...]


class AdaptDown(zl.Record):
    """Parameters of adapt_down. x: f32, bf16, or the q of an activation; low, scale: its others. size: numbers of a
    slot."""

    x: zl.Ptr["X", "const"]
    low: zl.Ptr[zl.i8, "const"]
    scale: zl.Ptr[zl.f32, "const"]
    matrices: zl.Ptr[zl.f16, "const"]
    ranks: zl.Ptr[zl.i32, "const"]
    scales: zl.Ptr[zl.f32, "const"]
    of_row: zl.Ptr[zl.i32, "const"]
    token_row: zl.Ptr[zl.i32, "const"]
    out: zl.Ptr[zl.f32]
    size: zl.i64
    products: zl.i64
    down: zl.i64
    product: zl.index
    tokens: zl.index
    rank: zl.index
    width: zl.index
    line: zl.index
    X: zl.static
    FORM: zl.static
    TOKENS: zl.static


class AdaptUp(zl.Record):
    """Parameters of adapt_up. y0, y1, y2: the results, whose lines are stride0, ... apart; rows0, ...: how many each
    has; chunks1, chunks2: the first chunk of the second and of the third. line: of `low`."""

    low: zl.Ptr[zl.f32, "const"]
    matrices: zl.Ptr[zl.f16, "const"]
    ranks: zl.Ptr[zl.i32, "const"]
    scales: zl.Ptr[zl.f32, "const"]
    of_row: zl.Ptr[zl.i32, "const"]
    token_row: zl.Ptr[zl.i32, "const"]
    y0: zl.Ptr[zl.f32]
    y1: zl.Ptr[zl.f32]
    y2: zl.Ptr[zl.f32]
    size: zl.i64
    products: zl.i64
    up: zl.i64
    product: zl.index
    tokens: zl.index
    rank: zl.index
    line: zl.index
    rows0: zl.index
    rows1: zl.index
    rows2: zl.index
    stride0: zl.index
    stride1: zl.index
    stride2: zl.index
    chunks1: zl.index
    chunks2: zl.index
    TOKENS: zl.static


@zl.inline
def numbers_of(p, at, lanes):
    """`lanes` numbers of x from `at` on, f32."""
    if p.FORM == "f32":
        return zl.load(p.x + at, lanes)
    wide = zl.convert(zl.convert(zl.load(p.x + at, lanes), zl.i32), zl.f32)
    if p.FORM == "int16":
        rest = zl.convert(zl.convert(zl.load(p.low + at, lanes), zl.i32), zl.f32)
        wide = zl.fma(rest, zl.splat(zl.f32(0.00390625), lanes), wide)
    return wide * p.scale[at // GROUP]


@zl.inline
def down_tokens(p, token, COUNT, RANKS, number, first, slot, rank, factor):
    """A x of COUNT tokens from `token` on that share a slot, RANKS rows of A at a time: each is converted once for all
    of them. A token's sums go through the same operations whatever COUNT is."""
    L = zl.target.lanes
    whole = p.width // L * L
    for r0 in zl.static(range(0, RANK_STEP, RANKS)):
        a = p.matrices + (slot * p.size + p.down * rank + (number * rank + first + r0) * p.width)
        sums = [zl.f32.x(L)(0) for _ in zl.static(range(RANKS * COUNT))]
        rest = [zl.f32(0) for _ in zl.static(range(RANKS * COUNT))]
        for k in range(0, whole, L):
            values = [numbers_of(p, (token + t) * p.width + k, L) for t in zl.static(range(COUNT))]
            for r in zl.static(range(RANKS)):
                row = zl.convert(zl.load(a + r * p.width + k, L), zl.f32)
                for t in zl.static(range(COUNT)):
                    sums[r * COUNT + t] = zl.fma(row, values[t], sums[r * COUNT + t])
        if p.FORM == "f32":  # the others are whole groups
            for k in range(whole, p.width):
                for r in zl.static(range(RANKS)):
                    for t in zl.static(range(COUNT)):
                        i = r * COUNT + t
                        rest[i] = rest[i] + zl.f32(a[r * p.width + k]) * p.x[(token + t) * p.width + k]
        for t in zl.static(range(COUNT)):
            out = p.out + (token + t) * p.line + number * p.rank + first + r0
            for r in zl.static(range(RANKS)):
                out[r] = (zl.reduce_add(sums[r * COUNT + t]) + rest[r * COUNT + t]) * factor


@zl.inline
def slot_at(p, token):
    """The slot of a token's adapter, of the last token's where there are no more."""
    return zl.i64(p.of_row[zl.i64(p.token_row[min(token, p.tokens - 1)])])


@zl.inline
def is_alike(p, token):
    """Whether TOKENS tokens from `token` on are there and have one slot."""
    slot = slot_at(p, token)
    same = token + p.TOKENS <= p.tokens
    for t in zl.static(range(1, p.TOKENS)):
        same = same and slot_at(p, token + t) == slot
    return same


@zl.inline
def down_at(p, token, COUNT, RANKS, number, first):
    slot = slot_at(p, token)
    if slot >= 0:
        rank = zl.i64(p.ranks[slot])
        factor = p.scales[slot * p.products + p.product + number]
        if first < rank and factor != 0.0:
            down_tokens(p, token, COUNT, RANKS, number, first, slot, rank, factor)


@zl.kernel
def adapt_down_tokens(p: AdaptDown):
    """Grid (products x steps of RANK_STEP ranks, groups of TOKENS tokens)."""
    steps = p.rank // RANK_STEP
    number = zl.block_index(0) // steps
    first = zl.block_index(0) % steps * RANK_STEP
    token = zl.block_index(1) * p.TOKENS
    if p.TOKENS == 1:
        down_at(p, token, 1, RANK_STEP, number, first)
    elif is_alike(p, token):
        down_at(p, token, p.TOKENS, RANK_STEP // 2, number, first)
    else:
        for each in range(token, min(token + p.TOKENS, p.tokens)):
            down_at(p, each, 1, RANK_STEP, number, first)


@zl.inline
def add_columns(p, y, stride, number, begin, end, rows, before, slot, rank, token, COUNT):
    """y[begin .. end - 1] += B of product `number` @ its numbers in `low`, of COUNT tokens that share a slot. before:
    rows of the products before it."""
    L = zl.target.lanes
    b = p.matrices + (slot * p.size + (p.up + before) * rank)
    lows = [p.low + (token + t) * p.line + number * p.rank for t in zl.static(range(COUNT))]
    ys = [y + (token + t) * stride for t in zl.static(range(COUNT))]
    wide = begin + (end - begin) // (4 * L) * (4 * L)
    whole = begin + (end - begin) // L * L
    for n in range(begin, wide, 4 * L):
        sums = [zl.f32.x(L)(0) for _ in zl.static(range(4 * COUNT))]
        for j in range(rank):
            for u in zl.static(range(4)):
                column = zl.convert(zl.load(b + j * rows + n + u * L, L), zl.f32)
                for t in zl.static(range(COUNT)):
                    sums[u * COUNT + t] = zl.fma(column, zl.splat(lows[t][j], L), sums[u * COUNT + t])
        for u in zl.static(range(4)):
            for t in zl.static(range(COUNT)):
                zl.store(ys[t] + n + u * L, zl.load(ys[t] + n + u * L, L) + sums[u * COUNT + t])
    for n in range(wide, whole, L):
        totals = [zl.f32.x(L)(0) for _ in zl.static(range(COUNT))]
        for j in range(rank):
            column = zl.convert(zl.load(b + j * rows + n, L), zl.f32)
            for t in zl.static(range(COUNT)):
                totals[t] = zl.fma(column, zl.splat(lows[t][j], L), totals[t])
        for t in zl.static(range(COUNT)):
            zl.store(ys[t] + n, zl.load(ys[t] + n, L) + totals[t])
    for n in range(whole, end):
        for t in zl.static(range(COUNT)):
            total = zl.f32(0)
            for j in range(rank):
                total = total + zl.f32(b[j * rows + n]) * lows[t][j]
            ys[t][n] = ys[t][n] + total


@zl.inline
def up_at(p, token, COUNT, chunk):
    slot = slot_at(p, token)
    if slot >= 0:
        rank = zl.i64(p.ranks[slot])
        number = zl.i64(0) if chunk < p.chunks1 else zl.i64(1) if chunk < p.chunks2 else zl.i64(2)
        if p.scales[slot * p.products + p.product + number] != 0.0:
            if chunk < p.chunks1:
                begin = chunk * CHUNK
                end = min(begin + CHUNK, p.rows0)
                add_columns(p, p.y0, p.stride0, 0, begin, end, p.rows0, 0, slot, rank, token, COUNT)
            elif chunk < p.chunks2:
                begin = (chunk - p.chunks1) * CHUNK
                end = min(begin + CHUNK, p.rows1)
                add_columns(p, p.y1, p.stride1, 1, begin, end, p.rows1, p.rows0, slot, rank, token, COUNT)
            else:
                begin = (chunk - p.chunks2) * CHUNK
                end = min(begin + CHUNK, p.rows2)
                before = p.rows0 + p.rows1
                add_columns(p, p.y2, p.stride2, 2, begin, end, p.rows2, before, slot, rank, token, COUNT)


@zl.kernel
def adapt_up_tokens(p: AdaptUp):
    """Grid (chunks of CHUNK results of each product, groups of TOKENS tokens)."""
    chunk = zl.block_index(0)
    token = zl.block_index(1) * p.TOKENS
    if p.TOKENS == 1:
        up_at(p, token, 1, chunk)
    elif is_alike(p, token):
        up_at(p, token, p.TOKENS, chunk)
    else:
        for each in range(token, min(token + p.TOKENS, p.tokens)):
            up_at(p, each, 1, chunk)


FORMS = {"cpu": ("f32", "int8", "int16"), "gpu": ("bf16", "fp8")}


def adapt(recorder, x, low, slots: Slots, place: Place, token_row, y, y1=None, y2=None, *, max_tokens: int = 1) -> None:
    """y += scale * B (A x) for the tokens whose row has an adapter. What was launched just before must not write x or
    low.

    max_tokens: as of matmul. x: what the products took, [M, K]. low f32 [M, products * slots.rank]: what is between the
    two launches. token_row i32 [M]. y: the results f32 [M, N]; of several products one [M, the sum of place.rows] of
    joined ones, or y, y1, y2. K a multiple of 32 where x is int8 or int16; on a GPU of 8, place.rows of 4."""
    kind, count = recorder.device.kernels, len(place.rows)
    tokens, width = x.shape
    require(1 <= count <= MOST, f"adapt: {count} products, expected up to {MOST}")
    require(slots.rank % RANK_STEP == 0, f"adapt: a rank of {slots.rank} is not a multiple of {RANK_STEP}")
    require(x.dtype in ("f32",) or width % GROUP == 0, f"adapt: {width} columns of {x.dtype} are no whole groups")
    if kind == "gpu":
        require(width % 8 == 0 and not any(rows % 4 for rows in place.rows), f"adapt: {width} columns to {place.rows}")
    check("adapt x", x, FORMS[kind], tokens, width)
    check("adapt low", low, "f32", tokens, count * slots.rank)
    check("adapt token_row", token_row, "i32", tokens)
    check("adapt matrices", slots.matrices, "f16", None, None)
    number, size = slots.matrices.shape
    check("adapt ranks", slots.ranks, "i32", number)
    check("adapt scales", slots.scales, "f32", number, None)
    check("adapt of_row", slots.of_row, "i32", None)
    outs = _parts(y, y1, y2, place.rows, tokens)
    shared = Args(
        matrices=slots.matrices,
        ranks=slots.ranks,
        scales=slots.scales,
        of_row=slots.of_row,
        token_row=token_row,
        size=size,
        products=slots.scales.shape[1],
        product=place.product,
        tokens=tokens,
        rank=slots.rank,
        line=count * slots.rank,
    )
    numbers, rest, scale = x, None, None
    if x.dtype not in ("f32", "bf16"):
        numbers, rest, scale = x.q, getattr(x, "low", None), x.scale
    down = Args(x=numbers, low=rest, scale=scale, out=low, down=place.down, width=width, **shared)
    # On a CPU a barrier less: it needs nothing of the products that stand just before it.
    groups, suffix = tokens, ""
    if kind == "cpu":
        each = TOKENS[max_tokens > FEW]
        groups, suffix = ceil_div(tokens, each), f"_t{each}"
    grid = count * slots.rank // RANK_STEP, groups
    recorder.launch(f"adapt_down_{x.dtype}{suffix}", down, grid, independent=kind == "cpu")
    chunks = [-(-rows // CHUNKS[kind]) for rows in place.rows]
    rows = (*place.rows, 0, 0)
    up = Args(low=low, up=place.up, chunks1=chunks[0], chunks2=sum(chunks[:2]), **shared)
    for index, (tensor, stride) in enumerate(outs):
        up |= {f"y{index}": tensor, f"stride{index}": stride, f"rows{index}": rows[index]}
    recorder.launch(f"adapt_up{suffix}", up, (sum(chunks), groups))


def _parts(y, y1, y2, rows: tuple[int, ...], tokens) -> list[tuple[Any, int]]:
    """(where its first line is, distance of lines) of each product's results, three of them."""
    if y1 is None:
        check("adapt y", y, "f32", tokens, sum(rows))
        starts = [sum(rows[:index]) for index in range(len(rows))]
        found = [(y._replace(offset=y.offset + 4 * start), sum(rows)) for start in starts]
    else:
        found = [(tensor, count) for tensor, count in zip((y, y1, y2), rows, strict=False)]
        for tensor, count in found:
            check("adapt y", tensor, "f32", tokens, count)
    return [*found, (None, 0), (None, 0)][:MOST]


def _reference(x, slots: Slots, place: Place, token_row, low=None, y=None, y1=None, y2=None, max_tokens=None):
    wide = x.dequantize() if hasattr(x, "dequantize") else x.wide() if isinstance(x, HostArray) else x
    wide = np.asarray(wide, np.float64)
    width = wide.shape[1]
    outs = [np.asarray(each, np.float64).copy() for each in (y, y1, y2) if each is not None]
    between = np.asarray(low, np.float64).copy()
    for token, row in enumerate(token_row):
        slot, before = slots.of_row[row], 0
        for number, rows in enumerate(place.rows):
            scale = 0.0 if slot < 0 else float(slots.scales[slot, place.product + number])
            if scale:
                rank, plane = int(slots.ranks[slot]), slots.matrices[slot].astype(np.float64)
                at = (place.down + number * width) * rank
                a = plane[at : at + rank * width].reshape(rank, width)
                at = (place.up + before) * rank
                b = plane[at : at + rank * rows].reshape(rank, rows)
                part = scale * (a @ wide[token])
                first = number * slots.rank
                between[token, first : first + rank] = part
                out = outs[number] if len(outs) > 1 else outs[0][:, before:]
                out[token, :rows] += part @ b
            before += rows
    return {"low": between} | dict(zip(("y", "y1", "y2"), outs, strict=False))


def _cases(rng, family="cpu"):
    unit = 32 if family == "gpu" else 1
    for form in FORMS[family]:
        shapes = [
            (1, 64, (96,), 8, 3, 2, True),
            (5, 96, (64, 32, 36), 24, 4, 5, True),
            (7, 160, (528, 2060, 20), 16, 2, 4, False),
            (19, 1056, (608, 520), 32, 5, 3, True),
        ]
        if form == "f32":
            shapes += [(3, 37, (51, 7, 530), 16, 3, 3, True), (2, 5, (3,), 8, 1, 1, True)]
        for tokens, width, rows, rank, number, lines, joined in shapes:
            width = -(-width // unit) * unit
            yield _case(rng, form, tokens, width, rows, rank, number, lines, joined)


def _case(rng, form, tokens, width, rows, rank, number, lines, joined) -> Case:
    """A batch of `lines` rows, some without an adapter, over `number` slots of ranks of their own."""
    count, before, behind = len(rows), 3, 5
    place = Place(before, before + count * width + 4, int(rng.integers(3)), rows)
    size = (place.up + sum(rows) + behind) * rank // 8 * 8 + 8
    matrices = rng.standard_normal((number, size)).astype(np.float16)
    ranks = rng.integers(1, rank // RANK_STEP + 1, number).astype(np.int32) * RANK_STEP
    scales = rng.uniform(0.5, 2, (number, place.product + count + 1)).astype(np.float32)
    scales[rng.random(scales.shape) < 0.2] = 0
    of_row = rng.integers(-1, number, lines).astype(np.int32)
    token_row = np.sort(rng.integers(0, lines, tokens)).astype(np.int32)
    x = rng.standard_normal((tokens, width)).astype(np.float32)
    given: Any = x
    if form in ("int8", "int16"):
        given = HostActivation.quantize(x, form)
    elif form != "f32":
        given = host_form(x, form)
    low = rng.standard_normal((tokens, count * rank)).astype(np.float32)
    outs = [rng.standard_normal((tokens, each)).astype(np.float32) for each in ([sum(rows)] if joined else rows)]
    # |A x| is about sqrt(width), of f32 sums each product's rounding adds up at worst; B and the sum over ranks come on
    # top.
    first = Tolerance(4e-6 * width, 2e-6, "f32 sums of `width` products")
    second = Tolerance(4e-6 * width * rank, 2e-6, "the first sums' error times B, and f32 sums over ranks")
    outputs = {"low": OutputSpec(low.shape, "float32", first, inout=low)}
    outputs |= {
        name: OutputSpec(each.shape, "float32", second, inout=each)
        for name, each in zip(("y", "y1", "y2"), outs, strict=False)
    }
    return Case(
        f"{form} {tokens} tokens of {lines} rows, {width} to {rows}, rank {rank}, {number} slots",
        {"x": given, "slots": Slots(matrices, ranks, scales, of_row, rank), "token_row": token_row},
        outputs,
        {"place": place, "max_tokens": tokens if tokens != 7 else 17},
    )


def host_form(x, form: str) -> Any:
    """f32 as a GPU's products take it."""
    return HostFp8Activation.quantize(x) if form == "fp8" else HostArray("bf16", pack.f32_to_bf16(x))


def _cost(case: Case) -> Cost:
    place, slots = case.options["place"], case.inputs["slots"]
    tokens, x = case.outputs["low"].shape[0], case.inputs["x"]
    width = (x.array if isinstance(x, HostArray) else x).shape[1]
    numbers = (width * len(place.rows) + sum(place.rows)) * slots.rank
    return Cost(2 * min(tokens, len(slots.ranks)) * numbers + 8 * tokens * sum(place.rows), 2 * tokens * numbers)


def _variants(target) -> list[zl.Variant]:
    downs = [
        zl.Variant(
            f"adapt_down_{form}_t{tokens}",
            adapt_down_tokens,
            {"X": zl.f32 if form == "f32" else zl.i8, "FORM": form, "TOKENS": tokens},
        )
        for form in FORMS["cpu"]
        for tokens in TOKENS
    ]
    return [*downs, *(zl.Variant(f"adapt_up_t{tokens}", adapt_up_tokens, {"TOKENS": tokens}) for tokens in TOKENS)]


ADAPT = Op("adapt", _variants, adapt, _reference, _cases, _cost, later("gpu.adapter", "variants"))
