"""Steps of one token with what stands between two attentions as one launch, in the emulator: beside the same steps by
launches of their own, and which layers get it."""

from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import tiny_families
from null_source import signatures, source_of
from session import Session
from test_emulated_model import load_emulated

from zse.bench.kernels import problem
from zse.cache.layout import KVCache
from zse.formats.convert import convert
from zse.kernel import cache
from zse.kernels import chain, mixture_chain
from zse.kernels.gpu import chain_parts
from zse.kernels.gpu.attention_plan import CHUNK, HEADER
from zse.models.load import load_model, plan_model
from zse.models.registry import forward_of
from zse.plan import chains
from zse.plan.record import Planner, StepBuffers
from zse.quant.pack import f32_to_bf16
from zse.runtime.null import NullGPU
from zse_emulator import EmulateDevice

WIDE = dict(hidden_size=1024, intermediate_size=4096, num_attention_heads=16, num_key_value_heads=2, head_dim=64)
MIXED = dict(
    hidden_size=256, num_key_value_heads=2, head_dim=64, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2
)
CHAINS = chain.CHAIN, mixture_chain.MIXTURE_CHAIN
CHAIN, MIXTURE = "chain_", "mixture_chain_int4_g128"


@pytest.mark.parametrize(
    ("family", "changes", "symbol", "products", "begin"),
    [
        pytest.param("wide", WIDE, CHAIN, (13, 5), 0, marks=pytest.mark.exhaustive("the wide model's other case")),
        ("wide", WIDE | dict(num_attention_heads=8, head_dim=128), CHAIN, (13, 5), 253),
        ("qwen3_moe", MIXED, MIXTURE, (13, 5), 0),
        ("qwen3_moe", MIXED | dict(head_dim=128), MIXTURE, (13, 5), 253),
    ],
)
def test_steps_equal_those_of_single_launches(
    family, changes, symbol, products, begin, kept_kernels, monkeypatch, tmp_path
):
    """Tokens one after another: what a step leaves for the next one to clear is cleared, in both ways that a step may end.
    begin: tokens before them. Behind 256 attention is in two tasks, which heads of 128 leave to the launch behind it."""
    tinies = tiny_families if family in tiny_families.CONFIGS else tiny
    monkeypatch.setitem(tinies.CONFIGS, family, tinies.CONFIGS[family] | changes | dict(num_hidden_layers=3))
    name, ids = str(tmp_path / "int4.zse"), tiny.random_tokens(family)[:7]
    convert(tinies.write(family, tmp_path, "BF16"), name, "int4", 128, head="bf16", layout="rows")
    found = {}
    for least in (1 << 62, 0):
        monkeypatch.setattr(chains, "LEAST_NUMBERS", least)
        monkeypatch.setattr(chains, "LEAST_MIXED", least)
        device = EmulateDevice("sm_90a", cache.package_variants("sm_90a"))
        model, _ = load_emulated(device, name)
        session = Session(device, model, rows=1, max_tokens=8, context=32 + begin)
        session.lengths = [begin]
        rng = np.random.default_rng(1)
        for pages in (*session.kv.keys, *session.kv.values) if begin else ():
            stored = f32_to_bf16(rng.standard_normal(pages.shape, np.float32))
            device.write(pages, stored.tobytes())
        steps = [session.step([(0, ids[:4])])]
        for at in range(4, 7):
            steps.append(session.step([(0, ids[at : at + 1])], wanted=None if at % 2 else [0]))
        found[least] = np.concatenate(steps)
        recorder = device.record()
        session.decoder.record(recorder, max_tokens=1, longest_run=1)
        launches = recorder.finish().launches
        kept = [each.args["keeps_records"] for each in launches if each.symbol.startswith("attention_heads")]
        assert kept == ([0, 0, 0] if least or not begin else [1, 1, 0])
        if begin:
            plan = session.decoder.attention_scratch[2, 128].plans[0]
            tasks = np.frombuffer(device.read(plan), np.int32)[HEADER + 7] & 4095
            assert tasks == 2
        symbols = [launch.symbol for launch in launches]
        assert sum(each.startswith(symbol) for each in symbols) == (0 if least else 2)
        assert sum(each.startswith("matmul") for each in symbols) == products[not least], symbols
    alone, together = found.values()
    np.testing.assert_array_equal(together[:4], alone[:4])
    # Normed rows are rounded to bf16 before single launches' products, and not in the one.
    assert 0 < np.abs(together - alone).max() < 0.02 * np.abs(alone).max()


@pytest.mark.parametrize(
    ("op", "blocks"),
    [(CHAINS[0], 4), (CHAINS[0], 13), (CHAINS[0], 20), (CHAINS[1], 6), (CHAINS[1], 13), (CHAINS[1], 20)],
)
def test_any_number_of_blocks(op, blocks, kept_kernels):
    """Some have nothing of down, or of q, k and v; others several units of o."""
    rng = np.random.default_rng(seed := int(np.random.default_rng().integers(2**32)))
    device = EmulateDevice("sm_90a", cache.package_variants("sm_90a"))
    device.num_sms = blocks
    case = list(op.cases(rng, "gpu"))[int(rng.integers(4))]
    assert not problem(device, op, case), f"seed {seed}: {case.name}"


@pytest.mark.parametrize("count", range(2, 7))
def test_launches_find_zeros(count):
    """In steps one after another, whose numbers of launches may differ: as other layers of a model may be in a step."""
    device, clean = NullGPU("sm_90a", {}), {}
    for step in (count, count, 2, 3, count):
        for number in range(step):
            signals = chain.signals_for(device, 1024, 4096, number, step)
            said, stale = (each.offset for each in (signals.mid, signals.stale))
            assert said != stale and clean.get(said, True)
            assert signals.after.offset + signals.after.nbytes == said + signals.stale.nbytes
            clean |= {said: False, stale: True}


def recorded(config, schemes, **options) -> list[str]:
    """The symbols of a decode step's launches on an H200."""
    device = NullGPU("sm_90a", signatures("gpu"))
    plan = plan_model(source_of(config, schemes), family="gpu")
    model = load_model(device, plan, start=False)
    buffers = StepBuffers.allocate(device, plan.config, max_tokens=16, max_rows=4, max_pages=8)
    more = dict(max_tokens=options.pop("max_tokens", 1), longest_run=1, every_token=True)
    planner = Planner(
        device, forward_of(plan.config), model, KVCache(device, plan.config, 64, "bf16"), buffers, **options
    )
    recorder = device.record()
    planner.record(recorder, **more)
    return [launch.symbol for launch in recorder.finish().launches]


INT4 = {"embed": "int8-g32-sym", "lm_head": "int8-g32-sym", "": "int4-g128"}


@pytest.mark.parametrize(
    ("changes", "schemes", "options", "count"),
    [
        ({}, INT4, {}, 5),
        ({}, INT4 | {"": "int4-g128-sym"}, {}, 5),
        ({"attention_bias": True}, INT4, {}, 0),  # o has one, too
        ({}, {"1.mlp.down": "int8-g32-sym", **INT4}, {}, 4),
        ({}, {"3.self_attn": "int4-g64", "1.mlp.down": "int8-g32-sym", **INT4}, {}, 2),
        ({}, {"3.self_attn": "int4-g64", "mlp.down": "int8-g32-sym", **INT4}, {}, 0),
        (
            {},
            {"4.self_attn": "int4-g64", "1.mlp.down": "int8-g32-sym", "2.mlp.down": "int8-g32-sym", **INT4},
            {},
            0,
        ),  # one alone
        ({}, INT4 | {"": "int4-g32"}, {}, 0),
        ({}, INT4, {"deterministic": True}, 0),
        ({}, INT4, {"max_tokens": 2}, 0),
        ({"num_hidden_layers": 2}, INT4, {}, 2),
        ({"num_hidden_layers": 1}, INT4, {}, 0),
        ({"vocab_size": 500}, INT4 | {"lm_head": "bf16"}, {}, 5),
        ({"intermediate_size": 3968}, INT4, {}, 0),  # the last of four parts of down has 7 chunks
        ({"hidden_size": 896}, INT4, {}, 0),
    ],
)
def test_layers_that_have_one(changes, schemes, options, count, monkeypatch):
    monkeypatch.setattr(chains, "LEAST_NUMBERS", 0)
    config = tiny.config("llama") | dict(vocab_size=512, num_hidden_layers=5) | WIDE | changes
    found = recorded(config, schemes, **options)
    assert sum(symbol.startswith(CHAIN) for symbol in found) == count


ROUTED = {"mlp.gate.weight": "bf16"} | INT4


@pytest.mark.parametrize(
    ("changes", "schemes", "options", "count"),
    [
        ({}, ROUTED, {}, 4),
        ({}, ROUTED | {"": "int4-g128-sym"}, {}, 4),
        ({"num_experts": 64, "num_experts_per_tok": 8}, ROUTED, {}, 4),
        ({}, {"1.mlp.experts": "int4-g64", **ROUTED}, {}, 3),
        ({}, ROUTED | {"mlp.gate.weight": "f32"}, {}, 0),
        ({"mlp_only_layers": [1], "intermediate_size": 128}, ROUTED, {}, 3),
        ({"num_experts": 6}, ROUTED, {}, 0),
        ({"num_experts": 256}, ROUTED, {}, 0),
        ({"num_experts": 64, "num_experts_per_tok": 12}, ROUTED, {}, 0),
        ({"num_experts_per_tok": 1}, ROUTED, {}, 0),  # half a pair of chunks
        ({"hidden_size": 384}, ROUTED, {}, 0),
        ({"head_dim": 96}, ROUTED, {}, 0),
        ({"attention_bias": True}, ROUTED, {}, 0),
        ({}, ROUTED, {"deterministic": True}, 0),
        ({}, ROUTED, {"max_tokens": 2}, 0),
    ],
)
def test_mixtures_that_have_one(changes, schemes, options, count, monkeypatch):
    monkeypatch.setattr(chains, "LEAST_MIXED", 0)
    config = tiny_families.CONFIGS["qwen3_moe"] | dict(vocab_size=512, num_hidden_layers=5) | MIXED | changes
    found = recorded(config, schemes, **options)
    assert sum(symbol.startswith(MIXTURE) for symbol in found) == count


@pytest.mark.parametrize(
    ("kv_heads", "context", "blocks"),
    [(4, 1, 32), (4, 8 * CHUNK, 32), (4, 8 * CHUNK + 1, 64), (8, 2048, 64), (4, 8192, 128), (4, 8193, 132), (2, 0, 32)],
)
def test_blocks_of_attention_are_as_many_as_its_tasks(kv_heads, context, blocks):
    planner = SimpleNamespace(config=SimpleNamespace(num_kv_heads=kv_heads), device=SimpleNamespace(num_sms=132))
    assert chains.attending(planner, context) == blocks


def test_sizes_are_those_of_the_kernels():
    """Said once more where plans are made, which need not import kernels of a GPU."""
    assert chains.ATTENDED == CHUNK and chain.CHUNK == chain_parts.CHUNK
    assert chain.MOST_HEADS == 2 * chain_parts.WARPS  # two chunks of a warp


def test_small_layers_have_none():
    config = tiny.config("llama") | dict(vocab_size=512, num_hidden_layers=5) | WIDE
    assert not any(symbol.startswith(CHAIN) for symbol in recorded(config, INT4))
    config = tiny_families.CONFIGS["qwen3_moe"] | dict(vocab_size=512, num_hidden_layers=5) | MIXED
    assert not any(symbol.startswith(MIXTURE) for symbol in recorded(config, ROUTED))


@pytest.mark.parametrize("changes", [{"arch": 80}, {"arch": 120}, {"simt": True}, {"kernels": "cpu"}, {"num_sms": 2}])
def test_other_devices_take_none(changes):
    from zse.quant.scheme import AffineScheme

    shapes = (1024, 1024), (8192, 1024), (1024, 4096), (1280, 1024)
    weights = [SimpleNamespace(shape=shape, scheme=AffineScheme(4, 128, False)) for shape in shapes]
    h200 = dict(kernels="gpu", simt=False, arch=90, num_sms=132)
    assert chain.takes(SimpleNamespace(**h200), weights)
    assert not chain.takes(SimpleNamespace(**h200 | changes), weights)
