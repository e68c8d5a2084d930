"""What attention promises beyond its reference: a row's bits depend on nothing but the row."""

from types import SimpleNamespace

import numpy as np
import pytest

from kernels.harness import DirectRecorder, each_isa, host_isas, poisoned, to_tensor
from zse.kernels.attention import SEGMENT, attention, partial_shape, rows_in_registers
from zse.kernels.attention_cases import BLOCK, attention_batch, attention_reference
from zse.kernels.kv_pages import head_dim_of
from zse.plan.record import Planner


def run(isa, batch, width, **options):
    out = poisoned((len(batch["positions"]), width), np.float32)
    tensors = {name: to_tensor(value) for name, value in batch.items()}
    if options.get("splits", 1) != 1:
        head_dim = head_dim_of(getattr(batch["v_pages"], "array", batch["v_pages"]))
        heads = width // head_dim
        shape = partial_shape(len(batch["positions"]), heads, head_dim, batch["page_table"].shape[1] * BLOCK)
        options["partial"] = to_tensor(poisoned(shape, np.float32))
    attention(DirectRecorder(isa, np.random.default_rng()), out=to_tensor(out), scale=0.125, **tensors, **options)
    return out


def part(batch, chosen):
    """The batch with only some of its tokens."""
    tokens = {name: batch[name][chosen] for name in ("q", "token_row", "positions")}
    return batch | tokens


@pytest.mark.parametrize("isa", each_isa())
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, window, dtype",
    [
        (9, 3, 64, 0, "float16"),
        (4, 1, 128, 100, "float16"),
        (7, 1, 48, 0, "float16"),
        (2, 2, 32, 300, "float16"),
        (9, 3, 64, 0, "i8"),
        (9, 3, 64, 0, "e4m3"),
        (8, 1, 80, 0, "e4m3"),
        (4, 1, 128, 100, "e4m3"),
    ],
)
def test_rows_are_the_same_alone_batched_chunked_and_split(isa, heads, kv_heads, head_dim, window, dtype):
    rng = np.random.default_rng()
    first = int(rng.integers(200, 600))
    batch = attention_batch(
        rng, [(first, 45), (0, 70), (SEGMENT - 1, 1), (3 * SEGMENT, 2)], heads, kv_heads, head_dim, dtype
    )
    width = heads * head_dim
    whole = run(isa, batch, width, window=window)
    assert np.isfinite(whole).all()
    tokens = np.arange(len(whole))
    for index in rng.choice(tokens, 12, replace=False):
        alone = part(batch, np.array([index]))
        np.testing.assert_array_equal(run(isa, alone, width, window=window)[0], whole[index])
        np.testing.assert_array_equal(run(isa, alone, width, window=window, splits=4)[0], whole[index])
    cut = np.sort(rng.choice(tokens, 5, replace=False))
    for chunk in np.split(tokens, cut):
        if len(chunk):
            np.testing.assert_array_equal(run(isa, part(batch, chunk), width, window=window), whole[chunk])
    np.testing.assert_array_equal(run(isa, batch, width, window=window, splits=4), whole)


@pytest.mark.parametrize("isa", each_isa())
@pytest.mark.parametrize("count", [1, 24])
def test_every_e4m3_is_read_exactly(isa, count):
    """Subnormal numbers too, where pages are read as they are (one token) and where they become f16 first."""
    rng = np.random.default_rng()
    batch = attention_batch(rng, [(250, count)], 2, 1, 64, "e4m3")
    codes = np.array([code for code in range(256) if code & 127 != 127], np.uint8)
    for name in ("k_pages", "v_pages"):
        array = batch[name].array
        array[..., : 16 * 64] = rng.choice(codes, array[..., : 16 * 64].shape)
        small = array[..., : 8 * 64]
        small[:] = small & 0x80 | rng.integers(0, 9, small.shape)
    want = attention_reference(**batch, scale=0.125)["out"]
    np.testing.assert_allclose(run(isa, batch, 128), want, rtol=2e-5, atol=2e-5 * np.abs(want).max())


def splits(tokens: int, kv_heads: int, context: int, threads: int, most: int, runs: int = 0) -> int:
    """What a planner of such a model says of a step."""
    config, device = SimpleNamespace(num_kv_heads=kv_heads), SimpleNamespace(threads=threads)
    planner = SimpleNamespace(config=config, device=device, traits=SimpleNamespace(split_tokens=most), _attending=None)
    return Planner.symbols(planner, tokens, tokens, context, runs=runs)["splits"]


def test_splits_fill_the_threads_only_when_needed():
    assert splits(1, 3, 1024, 2, 16) == 4
    assert splits(1, 3, 200, 2, 16) == 1
    assert splits(8, 3, 1024, 2, 16) == 1
    assert splits(17, 1, 1024, 64, 16) == 1
    # One sequence's tokens are a block or two of each head, however many there are.
    assert splits(12, 3, 32_000, 2, 16, runs=1) == 125
    assert splits(12, 3, 32_000, 2, 16, runs=12) == splits(12, 3, 1024, 2, 16, runs=1) == 1
    assert splits(17, 3, 32_000, 2, 16, runs=1) == 1
    assert [rows_in_registers(group) for group in (1, 2, 3, 4, 5, 6, 7, 8, 9)] == [2, 2, 3, 4, 3, 3, 4, 4, 3]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": (5, 100)}, "q is 100 wide"),
        ({"v_pages": (9, 1, 16, 40)}, "multiple of 16"),
        ({"k_pages": (9, 1, 48, 16)}, "k_pages"),
        ({"positions": (4,)}, "positions"),
    ],
)
def test_wrong_shapes_are_refused(change, message):
    batch = attention_batch(np.random.default_rng(), [(3, 5)], 2, 1, 32)
    for name, shape in change.items():
        batch[name] = np.zeros(shape, batch[name].dtype)
    with pytest.raises(ValueError, match=message):
        run(host_isas()[-1], batch, 64)
