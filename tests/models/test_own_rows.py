"""Ranks that have the stream of their own rows alone: logits are those of ranks that have everybody's, bit for bit, and of one process;
and what a token of a layer moves."""

from collections import Counter

import numpy as np
import pytest
import tiny
import tiny_families
from session import Session
from test_tensor_parallel import on_ranks, same

from zse.formats.opening import open_model
from zse.kernels.gather import gather_rows
from zse.models import shares
from zse.models.load import load_model, plan_model
from zse.parallel.group import RankGroup
from zse.plan.kept import KeptStreams
from zse.runtime.opening import open_device
from zse.runtime.symbol import Sym
from zse.tensor import Tensor

TOKENS = tiny.tokens("llama").tolist()
# (row, tokens) of each step: prompts beside replies; replies alone; one row.
STEPS = [[(0, 9), (1, 4), (2, 1)], [(0, 1), (1, 1), (2, 1), (3, 7)], [(2, 3)], [(0, 1), (1, 1), (2, 1), (3, 1)]]
WIDE = dict(vocab_size=512, intermediate_size=256)
# V3 has experts in groups; both have shared ones, and a first layer without.
EXPERTS = dict.fromkeys(("deepseek_v3", "deepseek_v2_lite"), dict(moe_intermediate_size=128))
FAMILIES = EXPERTS | {"minicpm3": {}}


def written(family, folder):
    """A model of the family, wide enough to be cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_families.CONFIGS, family, tiny_families.CONFIGS[family] | WIDE | FAMILIES[family])
        return tiny_families.write(family, folder)


@pytest.fixture(scope="module", params=FAMILIES)
def path(request, tmp_path_factory):
    return written(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=EXPERTS)
def mixture(request, tmp_path_factory):
    return written(request.param, tmp_path_factory.mktemp(request.param))


def logits_of(path, owners, whole_stream="", spied=None, quantize=None, activations=None, kept=None, **share):
    """Rank 0's logits of STEPS: of every token, then again of some. spied: called with each rank's group. kept: layers whose inputs rank 0
    keeps: then these, of each step."""
    size = 1 + max(owners)

    def rank_of(group: RankGroup | None):
        with open_device("cpu", threads=1) as device, open_model(str(path)) as source:
            options = dict(quantize=quantize)
            if group is not None:
                group.connect(device)
                options |= dict(rank=group.rank, ranks=size, whole_attention=True, **share)
                if spied is not None:
                    spied(group)
            model = load_model(device, plan_model(source, **options))
            model.wait()
            more = dict(group=group, owners=owners, whole_stream=whole_stream) if group else {}
            session = Session(device, model, rows=4, activations=activations, **more)
            if kept:
                if session.rank:
                    return [*steps_of(session, False)]
                session.decoder.kept = KeptStreams(session.decoder, kept)
                return np.concatenate([streams_of(session, rows) for rows in map(len, steps_of(session, False))])
            return np.concatenate([*steps_of(session, False), *steps_of(session, True)])

    return on_ranks(size, rank_of)


def steps_of(session: Session, some: bool):
    session.reset()
    for step in STEPS:
        batch = [(row, TOKENS[session.lengths[row] :][row : row + count]) for row, count in step]
        wanted = [sum(count for _, count in step) - 1, 0] if some else None
        yield session.step(batch, wanted=wanted, max_tokens=16 if len(step) > 1 else None)


def streams_of(session: Session, rows: int) -> np.ndarray:
    streams = session.decoder.kept.streams.with_rows(rows)
    return np.frombuffer(session.device.read(streams), np.float32).reshape(rows, -1)


OWNERS = pytest.mark.parametrize("owners", [(0, 1, 1, 1), (1, 0, 1, 1), (2, 0, 0, 0), (3, 0, 2, 3)])


@OWNERS
def test_logits_are_those_of_everybodys_stream(owners, path):
    """Also where a rank has no token of a step, or of none."""
    found = logits_of(path, owners)
    assert np.array_equal(found, logits_of(path, owners, "layers"))
    same(found, logits_of(path, (0, 0, 0, 0)))


@OWNERS
def test_logits_of_whole_experts_likewise(owners, mixture):
    found = logits_of(mixture, owners, whole_experts=True)
    assert np.array_equal(found, logits_of(mixture, owners, "layers", whole_experts=True))
    same(found, logits_of(mixture, (0, 0, 0, 0)))


@pytest.mark.parametrize("owners", [(0, 1, 1, 1), (2, 0, 0, 0), (3, 0, 2, 3), (0, 7, 3, 7)])
def test_rows_go_to_ranks_that_have_their_experts(owners, mixture, monkeypatch):
    """Nobody reads what was not sent. Shared experts are whole on every rank."""
    if max(owners) < 7:  # as from eight ranks on
        monkeypatch.setattr(shares, "DISPATCH_RANKS", 2)
    poisoned = []

    def spy(group):
        spread = group.spread_rows

        def spread_rows(recorder, x, out, own, wanted=None):
            if wanted is not None:
                device, width = recorder.device, x.shape[1]
                none = Tensor(device.alloc(4 * width), (1, width), "f32")
                none.view()[:] = memoryview(np.full(width, np.nan, np.float32))
                rows = Tensor(device.alloc(4 * 64), (64,), "i32")  # zeros
                gather_rows(recorder, none, rows.with_rows(out.shape[0]), out)
                poisoned.append(group.rank)
            spread(recorder, x, out, own, wanted)

        group.spread_rows = spread_rows

    found = logits_of(mixture, owners, spied=spy, whole_experts=True)
    assert set(poisoned) == set(range(1 + max(owners))) and np.isfinite(found).all()
    assert np.array_equal(found, logits_of(mixture, owners, "layers", whole_experts=True))
    same(found, logits_of(mixture, (0, 0, 0, 0)))
    with open_model(str(mixture)) as source:
        of = dict(rank=1, ranks=1 + max(owners), whole_experts=True, whole_attention=True)
        moe, whole = plan_model(source, **of).config.moe, plan_model(source).config.moe
        cut = plan_model(source, **of | dict(ranks=2, whole_attention=False)).config.moe
    assert (moe.shared_size, cut.shared_size) == (whole.shared_size, whole.shared_size // 2)


def test_streams_between_layers_are_of_all_tokens(path):
    """As an EAGLE-3 head reads them on rank 0."""
    found, wanted = (logits_of(path, owners, "layers", kept=(0, 1, 2)) for owners in ((0, 1, 2, 1), (0, 0, 0, 0)))
    assert found.shape[1] % 3 == 0 and np.abs(wanted).min(axis=1).all()
    same(found, wanted)


@pytest.mark.parametrize("activations", ["f32", "int8"])
def test_inputs_of_8_bits(activations, path):
    """Rows go to other ranks as f32, and are rounded there as the norm rounds them."""
    options = dict(quantize="int8", activations=activations)
    found = logits_of(path, (0, 1, 1, 0), **options)
    assert np.array_equal(found, logits_of(path, (0, 1, 1, 0), "layers", **options))


def test_a_token_of_a_layer_moves_half_as_often(path):
    """Rows of f32 that a rank sends to others, N ranks with as many tokens each: a sum of all on all ranks is twice (N - 1) / N."""
    sent: dict[str, Counter] = {"": Counter(), "layers": Counter()}

    def spy(group):
        if group.rank:
            return
        for name in ("all_reduce", "spread_rows", "collect_sums"):
            sums = getattr(group, name)

            def told(recorder, x, out, *own, name=name, sums=sums):
                rows = out.shape[0] if name == "spread_rows" else x.shape[0]
                assert isinstance(rows, Sym) and rows.name == "tokens"
                sent[form][name] += {"f32": 4}[x.dtype] * x.shape[1] * (2 if name == "all_reduce" else 1)
                return sums(recorder, x, out, *own)

            setattr(group, name, told)

    for form in sent:
        logits_of(path, (0, 1, 1, 0), form, spy)
    with open_model(str(path)) as source:
        config = plan_model(source).config
    recordings, row = 4, 4 * config.hidden_size  # of two sizes, with all logits or some
    layers = recordings * config.num_layers
    assert sent["layers"] == {"all_reduce": layers * 2 * 2 * row}
    # And the stream, once behind the layers.
    assert sent[""] == {"spread_rows": (layers + recordings) * row, "collect_sums": layers * row}
