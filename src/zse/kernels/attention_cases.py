"""Reference, cases and cost of attention over paged keys and values."""

from functools import partial

from zse.kernels.kv_pages import BLOCK, PACKED, TRANSPOSED, head_dim_of, pack_pages, pages_shape, unpack_pages
from zse.kernels.op import Case, Cases, Cost, HostArray, OutputSpec, Tolerance
from zse.kernels.quantize import int8_output
from zse.lazy import numpy as np
from zse.quant import pack


def wide_pages(pages):
    """Values of pages as float64: NumPy arrays, HostArrays, or their bit patterns (u16: bf16, u8: e4m3)."""
    if isinstance(pages, HostArray):
        pages = pages.wide()
    elif pages.dtype.kind == "u":
        pages = pack.bf16_to_f32(pages) if pages.itemsize == 2 else pack.e4m3_to_f32(pages)
    return pages.astype("float64")


def token_major(pages, keys: bool, family: str):
    """Values f64 [P, Hk, 16, D] of any pages of a family of devices; packed ones are i8 arrays or e4m3 HostArrays."""
    array = pages.array if isinstance(pages, HostArray) else pages
    if array.ndim == 3:
        stored, scale = unpack_pages(array, "e4m3" if isinstance(pages, HostArray) else "i8", keys, family)
        return stored * scale[..., None]
    return wide_pages(pages).swapaxes(2, 3) if keys and TRANSPOSED[family] else wide_pages(pages)


def random_pages(rng, shape: tuple[int, int], head_dim: int, dtype: str, keys: bool, family: str):
    """Pages of shape[0] pages and shape[1] heads, random, as a kind of device has those of keys or values."""
    if dtype in PACKED:
        return pack_pages(rng.standard_normal((*shape, BLOCK, head_dim)), dtype, keys, family)
    numbers = rng.standard_normal((*shape, *pages_shape(head_dim, "f16", keys, family)))
    return narrow_pages(numbers, dtype)


def narrow_pages(values, dtype: str):
    """Values as pages of that dtype: f16 and f32 as such, bf16 as bit patterns."""
    if dtype == "bf16":
        return pack.f32_to_bf16(values.astype(np.float32))
    return values.astype({"f16": np.float16, "f32": np.float32}[dtype])


def attention_reference(
    q,
    k_pages,
    v_pages,
    page_table,
    token_row,
    positions,
    scale,
    window=0,
    softcap=0.0,
    splits=1,
    partial=None,
    out=None,
    longest_run=None,
    ahead=0,
    sinks=None,
    sees=None,
):
    """Softmax attention in float64, one token at a time."""
    family = "gpu" if isinstance(q, HostArray) else "cpu"
    k_pages, v_pages = token_major(k_pages, True, family), token_major(v_pages, False, family)
    _, kv_heads, _, head_dim = k_pages.shape
    queries = q.wide() if isinstance(q, HostArray) else q
    tokens, width = queries.shape
    queries = queries.astype(np.float64).reshape(tokens, kv_heads, -1, head_dim)
    result = np.zeros_like(queries)
    for m, (row, position) in enumerate(zip(token_row, positions, strict=True)):
        end = min(position + 1 + ahead, int(positions[token_row == row].max()) + 1)
        end = end if sees is None else int(sees[m]) + 1
        pages = page_table[row, : (end - 1) // BLOCK + 1]
        first = max(0, position + 1 - window) if window else 0
        keys = k_pages[pages].transpose(1, 0, 2, 3).reshape(kv_heads, -1, head_dim)
        values = v_pages[pages].transpose(1, 0, 2, 3).reshape(kv_heads, -1, head_dim)
        keys, values = keys[:, first:end], values[:, first:end]
        scores = np.einsum("hgd,htd->hgt", queries[m], keys) * scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        sink = None if sinks is None else sinks.astype(np.float64).reshape(*scores.shape[:2], 1)
        top = scores.max(axis=2, keepdims=True)
        top = top if sink is None else np.maximum(top, sink)
        weights = np.exp(scores - top)
        total = weights.sum(axis=2, keepdims=True) + (0 if sink is None else np.exp(sink - top))
        result[m] = np.einsum("hgt,htd->hgd", weights / total, values)
    return {"out": result.reshape(tokens, width)}


def attention_batch(rng, runs, heads, kv_heads, head_dim, dtype="float16", page_size=BLOCK):
    """A flat batch for `runs` [(first position, number of tokens), …], one sequence each: the launcher's arrays of a
    CPU. dtype: of the pages, a NumPy name, or "i8" or "e4m3" for packed ones. page_size: tokens whose blocks lie in a
    row. Slots of the pages that no token owns hold NaN: nothing may read them into a result."""
    context, together = max(first + count for first, count in runs), page_size // BLOCK
    max_pages = (-(-context // page_size) + 1) * together
    pages = len(runs) * max_pages + 3 * together
    first_blocks = rng.permutation(pages // together)[: len(runs) * max_pages // together] * together
    page_table = (first_blocks[:, None] + np.arange(together)).reshape(len(runs), max_pages).astype(np.int32)
    numbers = "float32" if dtype in PACKED else dtype
    k = rng.standard_normal((pages, kv_heads, head_dim, BLOCK), np.float32).astype(numbers, copy=False)
    v = rng.standard_normal((pages, kv_heads, BLOCK, head_dim), np.float32).astype(numbers, copy=False)
    for row, (first, count) in enumerate(runs):
        end = first + count
        last, used = page_table[row, (end - 1) // BLOCK], (end - 1) % BLOCK + 1
        k[last, :, :, used:] = np.nan
        v[last, :, used:] = np.nan
        for page in page_table[row, (end - 1) // BLOCK + 1 :]:
            k[page], v[page] = np.nan, np.nan
    if dtype in PACKED:
        packed = (pack_pages(k.swapaxes(2, 3), dtype, True), pack_pages(v, dtype, False))
        k, v = (array if dtype == "i8" else HostArray(dtype, array) for array in packed)
    tokens = sum(count for _, count in runs)
    return {
        "q": rng.standard_normal((tokens, heads * head_dim)).astype(np.float32),
        "k_pages": k,
        "v_pages": v,
        "page_table": page_table,
        "token_row": np.repeat(np.arange(len(runs)), [count for _, count in runs]).astype(np.int32),
        "positions": np.concatenate([np.arange(first, first + count) for first, count in runs]).astype(np.int32),
    }


def gpu_batch(rng, runs, heads, kv_heads, head_dim, dtype, page_size=BLOCK):
    """attention_batch() as a GPU has it: q bf16, pages [P, Hk, 16, D] of `dtype`, or packed ones."""
    batch = attention_batch(rng, runs, heads, kv_heads, head_dim, "float32", page_size)
    pages = {"k_pages": batch["k_pages"].swapaxes(2, 3), "v_pages": batch["v_pages"]}
    for name, values in pages.items():
        if dtype in PACKED:
            array = pack_pages(values, dtype, name == "k_pages", "gpu")
        else:
            array = np.ascontiguousarray(narrow_pages(values, dtype))
        batch[name] = array if dtype in ("f16", "i8") else HostArray(dtype, array)
    batch["q"] = HostArray("bf16", pack.f32_to_bf16(batch["q"]))
    return batch


def make_gpu_cases(rng, names: tuple[str, ...] = ("",)) -> Cases:
    """Decoding, verification, prompts and mixtures of them; every head_dim and dtype of pages. names: beginnings of those
    that are wanted."""
    near = Tolerance(6e-3, 6e-3, "weights and the result rounded to bf16 (2^-9), sums of some hundred values near 1")
    shapes = [
        ("decode", [(0, 1), (15, 1), (16, 1), (300, 1), (1023, 1)], 28, 4, 128, {"longest_run": 1}),
        ("decode, many chunks", [(5000, 1), (2100, 1)], 8, 2, 128, {"longest_run": 1}),
        ("decode", [(0, 1), (700, 1)], 9, 3, 64, {"longest_run": 1, "softcap": 20.0}),
        ("decode, group of 16", [(40, 1), (2000, 1)], 16, 1, 96, {"longest_run": 1}),
        ("decode, group of 24", [(40, 1), (700, 1)], 24, 1, 64, {"longest_run": 1}),
        ("decode, window", [(0, 1), (15, 1), (700, 1), (1500, 1)], 4, 1, 256, {"longest_run": 1, "window": 300}),
        ("verification", [(40, 4), (1700, 3), (12, 8), (1023, 1)], 28, 4, 128, {"longest_run": 8}),
        ("verification", [(40, 4), (600, 8)], 4, 1, 256, {"longest_run": 8, "window": 100}),
        ("prompt", [(0, 71)], 9, 3, 64, {}),
        ("chunks, mixed", [(250, 40), (3, 1), (17, 9), (700, 150)], 28, 4, 128, {}),
        ("chunks, mixed", [(90, 20), (3, 1), (17, 9), (40, 70)], 14, 2, 128, {}),
        ("chunks, pages of 128", [(309, 60), (0, 9), (130, 1)], 8, 2, 128, {"page_size": 128}),
        ("chunks, window", [(600, 20), (0, 130)], 4, 1, 256, {"window": 50}),
        ("chunks, softcap", [(40, 200), (5, 2)], 2, 2, 96, {"softcap": 20.0}),
        ("chunks, group of 32", [(100, 33)], 32, 1, 64, {}),
        ("decode, sinks", [(0, 1), (300, 1), (2500, 1)], 16, 2, 64, {"longest_run": 1, "sinks": True}),
        ("decode, sinks, window", [(15, 1), (700, 1)], 24, 1, 128, {"longest_run": 1, "sinks": True, "window": 128}),
        ("chunks, sinks", [(250, 40), (3, 1), (700, 150)], 16, 2, 64, {"sinks": True}),
        ("chunks, sinks", [(90, 20), (3, 1), (40, 70)], 16, 2, 64, {"sinks": True}),
        ("chunks, sinks, window", [(600, 20), (0, 130)], 4, 1, 256, {"sinks": True, "window": 128}),
        ("decode, wide", [(0, 1), (15, 1), (530, 1), (1500, 1)], 8, 1, 512, {"longest_run": 1}),
        ("decode, wide, group of 16", [(40, 1), (1100, 1)], 32, 2, 512, {"longest_run": 1, "sinks": True}),
        ("verification, wide", [(40, 4), (600, 8)], 4, 2, 512, {"longest_run": 8, "window": 100}),
        ("chunks, wide", [(250, 40), (3, 1), (17, 9), (100, 70)], 8, 1, 512, {"softcap": 20.0}),
        ("chunks, wide", [(0, 71), (600, 20)], 4, 4, 512, {"window": 50}),
        ("encoder", [(0, 37), (0, 1), (0, 150)], 3, 3, 32, {"ahead": 1 << 20}),
        ("encoder", [(0, 150), (0, 1), (0, 37), (0, 260)], 4, 4, 96, {"ahead": 1 << 20}),
        ("encoder, window", [(0, 150), (0, 40)], 2, 2, 64, {"ahead": 20, "window": 21}),
        ("images", [(0, 300), (17, 90), (40, 1)], 4, 2, 64, {"sees": True}),
        ("images, mixed", [(250, 40), (3, 1), (130, 150)], 14, 2, 128, {"sees": True}),
        ("images, window", [(0, 300), (500, 90)], 8, 4, 256, {"sees": True, "window": 150}),
        ("images, wide", [(0, 71), (600, 20)], 4, 1, 512, {"sees": True, "window": 50}),
    ]
    return Cases(
        partial(_gpu_case, rng, dtype, near, *shape)
        for shape in shapes
        if shape[0].startswith(names)
        for dtype in ("bf16", "f16", *PACKED)[: 2 if "ahead" in shape[-1] or shape[-2] == 512 else None]
    )


def _gpu_case(rng, dtype, near, name, runs, heads, kv_heads, head_dim, options):
    options = dict(options)
    page_size, has_sinks = options.pop("page_size", BLOCK), options.pop("sinks", False)
    sees = options.pop("sees", False)
    batch = gpu_batch(rng, runs, heads, kv_heads, head_dim, dtype, page_size)
    if has_sinks:
        batch["sinks"] = (rng.standard_normal(heads) * 3).astype(np.float32)
    if sees:
        batch["sees"] = _seen(rng, runs)
    tokens = sum(count for _, count in runs)
    return Case(
        f"{name} {dtype} {heads}/{kv_heads} D={head_dim}",
        batch,
        {"out": OutputSpec((tokens, heads * head_dim), "bf16", near)},
        {"scale": head_dim**-0.5} | options,
    )


def _seen(rng, runs):
    """The last key that each token sees: of images of 7 to 40 tokens, with tokens between, the image's last."""
    seen = []
    for first, count in runs:
        at, end = first, first + count
        while at < end:
            size = min(int(rng.integers(7, 40)), end - at)
            seen += [at + size - 1] * size
            plain = min(int(rng.integers(0, 9)), end - at - size)
            seen += range(at + size, at + size + plain)
            at += size + plain
    return np.array(seen, np.int32)


def make_cpu_cases(rng):
    near = Tolerance(3e-6, 3e-6, "f32 dot products and exponentials; sums of up to a thousand weights")
    shapes = [
        ("decode", [(0, 1), (15, 1), (16, 1), (300, 1), (1023, 1)], 9, 3, 64, {}),
        ("prefill", [(0, 71)], 9, 3, 64, {}),
        ("mixed, chunked", [(250, 40), (3, 1), (17, 9)], 4, 1, 256, {}),
        ("window", [(0, 50), (700, 3), (255, 2)], 4, 1, 32, {"window": 40}),
        ("long window", [(600, 20)], 4, 2, 128, {"window": 300}),
        ("softcap", [(40, 12)], 2, 2, 80, {"softcap": 20.0}),
        ("group of 7", [(5, 9), (64, 1)], 7, 1, 96, {}),
        ("group of 8", [(130, 5)], 16, 2, 16, {}),
        ("group of 5", [(13, 9)], 5, 1, 48, {}),
        ("sinks", [(0, 1), (300, 1), (600, 9)], 8, 2, 64, {"sinks": True}),
        ("sinks, window", [(17, 40), (700, 2)], 6, 2, 48, {"sinks": True, "window": 50}),
        ("wide heads", [(250, 12), (0, 1), (30, 5)], 8, 1, 512, {}),
        ("pages of 64", [(250, 40), (3, 1), (17, 9)], 8, 2, 128, {"page_size": 64}),
        ("encoder", [(0, 37), (0, 1), (0, 333), (0, 33)], 3, 3, 32, {"ahead": 1 << 20}),
        ("encoder, window", [(0, 400), (0, 70)], 2, 2, 64, {"ahead": 64, "window": 65}),
        ("images", [(0, 300), (17, 90), (40, 1)], 4, 2, 64, {"sees": True}),
        ("images, window", [(0, 300), (500, 90)], 6, 2, 48, {"sees": True, "window": 150}),
    ]
    for name, runs, heads, kv_heads, head_dim, options in shapes:
        page_size, has_sinks = options.pop("page_size", BLOCK), options.pop("sinks", False)
        sees = options.pop("sees", False)
        for dtype in ("float16", "float32", *PACKED):
            batch = attention_batch(rng, runs, heads, kv_heads, head_dim, dtype, page_size)
            if has_sinks:
                batch["sinks"] = (rng.standard_normal(heads) * 3).astype(np.float32)
            if sees:
                batch["sees"] = _seen(rng, runs)
            tokens, width = batch["q"].shape
            context = int(batch["positions"].max()) + 1
            segments = -(-batch["page_table"].shape[1] * BLOCK // 256)
            for splits in (1,) if "ahead" in options or sees else (1, -(-context // 256)):
                if splits == 1 and not ("ahead" in options or sees) and dtype != "float16" and name != "prefill":
                    continue
                scratch = {}
                if splits != 1:
                    scratch["partial"] = np.full((tokens, heads, segments, head_dim + BLOCK), np.nan, np.float32)
                int8 = dtype == "float16" and (splits != 1 or sees) or dtype == "float32" and name == "prefill"
                int8 = int8 and head_dim % 32 == 0
                out = int8_output(tokens, width, 4e-6) if int8 else OutputSpec((tokens, width), "float32", near)
                yield Case(
                    f"{name} {dtype} splits={splits}{' int8' if int8 else ''}",
                    batch | scratch,
                    {"out": out},
                    {"scale": head_dim**-0.5, "splits": splits} | options,
                )


def attention_cost(case: Case) -> Cost:
    pages, q = (
        case.inputs[name].array if isinstance(case.inputs[name], HostArray) else case.inputs[name]
        for name in ("v_pages", "q")
    )
    kv_heads, head_dim = pages.shape[1], head_dim_of(pages)
    tokens, width = q.shape
    positions = case.inputs["positions"]
    window = case.options.get("window", 0)
    ahead = case.options.get("ahead", 0)
    seen = sum(min(int(p) + 1, window) + min(ahead, window) if window else int(p) + 1 for p in positions)
    last = {int(row): int(p) + 1 for row, p in zip(case.inputs["token_row"], positions, strict=True)}
    return Cost(sum(last.values()) * 2 * kv_heads * head_dim * pages.itemsize + tokens * width * 8, seen * width * 4)
