"""A step's last layer is computed of the rows that are wanted alone (zse.plan.forward.LastLayer): their logits are those of the whole
layer, bit for bit where the kernels are the same, and what stands in the cache too."""

import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import tiny_families
from session import Session, load
from test_emulated_model import load_emulated

from zse.formats.opening import open_model
from zse.kernel import cache
from zse.models.load import load_model, plan_model
from zse.parallel.group import RankGroup
from zse.plan.forward import last_layer_of
from zse.runtime.opening import open_device
from zse_emulator import EmulateDevice

FAMILIES = [*tiny.FAMILIES, *tiny_families.FAMILIES]
# Their layers read the embeddings of their own of every token, behind the first addition to the stream.
WHOLE = ("gemma4",)
# Of a chunk in the middle of a prompt, the end of a prompt, both ends and between, all tokens.
WANTED = ([], [28], [0, 8, 9, 27, 28], list(range(29)))


def write(family, path, dtype="F32"):
    return str((tiny if family in tiny.FAMILIES else tiny_families).write(family, path, dtype))


def steps(session, ids, wanted):
    """Logits of the wanted rows of a chunk beside the beginning of another sequence, then of a token behind each."""
    session.reset()
    session.step([(0, ids[:3])])
    rows = session.step([(0, ids[3:12]), (1, ids[:20])], wanted=wanted, max_tokens=48)
    return rows, session.step([(0, ids[12:13]), (1, ids[20:21])])


def both(device, model, **options):
    """A Session, and one whose last layers are whole."""
    sessions = [Session(device, model, **options) for _ in range(2)]
    sessions[1].decoder._last = None
    return sessions


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_the_whole_layer(family, device, tmp_path):
    ids = tiny.tokens(family)
    some, whole = both(device, load(device, write(family, tmp_path)), max_tokens=48)
    assert (some.decoder._last is None) == (family in WHOLE)
    for wanted in WANTED:
        for got, expected in zip(steps(some, ids, wanted), steps(whole, ids, wanted), strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("activations", ["int8", "f32"])
@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_rows_of_quantized_weights(quantize, activations, device, tmp_path):
    """What attention gives is brought into 8 bits behind the copy, and not by attention: the same bits."""
    model, ids = load(device, str(tiny.write("wide", tmp_path)), quantize=quantize), tiny.tokens("wide")
    some, whole = both(device, model, max_tokens=48, activations=activations)
    for wanted in WANTED:
        for got, expected in zip(steps(some, ids, wanted), steps(whole, ids, wanted), strict=True):
            np.testing.assert_array_equal(got, expected)


# A norm that attention and MLP share, experts that few tokens pass otherwise, latents, recurrent layers, norms behind products.
@pytest.mark.parametrize(
    "family, deterministic",
    [
        ("llama", False),
        *((family, True) for family in ("llama", "cohere2", "qwen2_moe", "deepseek_v2", "qwen3_5")),
        *((family, False) for family in ("qwen2_moe", "qwen3_5_moe", "granite_hybrid", "gemma3")),
    ],
)
def test_on_a_gpu(family, deterministic, kept_kernels, tmp_path):
    """Also in the forms that a deterministic engine takes, those of the largest step, in which a token has the bits of a step whose
    tokens all have logits."""
    device = EmulateDevice("sm_90a", cache.package_variants("sm_90a"))
    model, _ = load_emulated(device, write(family, tmp_path, "BF16"))
    ids = tiny.tokens(family)
    session = Session(device, model, rows=2, max_tokens=16, context=32, deterministic=deterministic)
    assert session.decoder._last is not None
    every = session.step([(0, ids[:9]), (1, ids[:4])])
    for wanted in ([], [8], [0, 8, 12]):
        session.reset()
        got = session.step([(0, ids[:9]), (1, ids[:4])], wanted=wanted, max_tokens=16)
        if deterministic:
            np.testing.assert_array_equal(got, every[wanted])
        else:
            assert np.abs(got - every[wanted]).max(initial=0) < 0.05 * np.abs(every).max()


@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
def test_one_row_at_most(family, kept_kernels, tmp_path):
    """Kernels that compute exactly one row, whatever a step has, are not taken: a chunk wants none."""
    device = EmulateDevice("sm_90a", cache.package_variants("sm_90a"))
    model, _ = load_emulated(device, write(family, tmp_path, "BF16"))
    ids, options = tiny.tokens(family), dict(rows=1, max_tokens=16, context=32)
    every = Session(device, model, **options).run(ids[:13], [9, 4])
    session = Session(device, model, max_lines=1, **options)
    assert session.step([(0, ids[:9])], wanted=[], max_tokens=16).shape == (0, every.shape[1])
    last = session.step([(0, ids[9:13])], wanted=[3], max_tokens=16)
    assert np.abs(last - every[12:]).max() < 0.05 * np.abs(every).max()


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_on_ranks(family, tmp_path):
    """Sums of ranks are of the rows, of none too."""
    path, ids = write(family, tmp_path), tiny.tokens(family)

    def rank_of(group):
        with open_device("cpu", threads=1) as device, open_model(path) as source:
            group.connect(device)
            model = load_model(device, plan_model(source, rank=group.rank, ranks=2))
            model.wait()
            found = [[steps(each, ids, wanted) for wanted in WANTED] for each in both(device, model, group=group)]
            return found if group.rank == 0 else None

    groups = [RankGroup.create(2)]
    groups.append(RankGroup.join(1, 2, os.dup(groups[0].descriptor)))
    try:
        with ThreadPoolExecutor(2) as pool:
            some, whole = [done.result() for done in [pool.submit(rank_of, group) for group in groups]][0]
    finally:
        for group in groups:
            group.close()
    for got, expected in zip(some, whole, strict=True):
        np.testing.assert_array_equal(np.concatenate(got), np.concatenate(expected))


def test_it_is_left_whole_where_more_is_read(device, tmp_path):
    """Of drafts that read the stream of every token, and of images that are added behind the last layer."""
    session = Session(device, load(device, write("llama", tmp_path)))
    planner = session.decoder
    few, many = (SimpleNamespace(more=(None,) * count) for count in (1, planner.config.num_layers))
    assert last_layer_of(planner, None) is last_layer_of(planner, few) is planner._last is not None
    assert last_layer_of(planner, many) is None

    def copies(**options) -> int:
        recorder = device.record()
        planner.record(recorder, **options)
        return sum(launch.symbol.startswith("gather_rows") for launch in recorder.finish().launches)

    # Of the stream and of what attention gave; of the stream alone; of no rows.
    assert copies() == 2 and copies(every_token=True) == 0
    planner.kept = SimpleNamespace(begin=lambda: None, end=lambda run, logits: logits)
    assert copies() == 1
