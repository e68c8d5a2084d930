"""A whole tiny model through the GPU's kernels in the emulator: threads in a random order, every access and every rule
of dependent launches checked, logits against the float oracle. What no kernel's own cases see is how kernels follow each
other in a step."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import numpy_model
import pytest
import tiny
import tiny_families
from session import Session, dequantized, load, loss_of, quantized

from zse.bench.profile import profile
from zse.bench.speed import greedy
from zse.cache.grouped import GroupedCacheManager
from zse.cache.groups import PageGeometry, geometry
from zse.cache.pages import HostPool
from zse.cache.prefix import PrefixCache
from zse.cache.states import StateSlots
from zse.engine.config import EngineConfig
from zse.engine.core import Engine
from zse.engine.memory import plan_memory
from zse.engine.messages import Ask
from zse.engine.runner import Runner
from zse.errors import UnsupportedError
from zse.formats.convert import convert
from zse.formats.opening import open_model
from zse.kernel import cache
from zse.models.expert_places import with_expert_memory
from zse.models.host_experts import HostExperts
from zse.models.host_layers import HostLayers
from zse.models.load import Model, load_model, place, plan_model
from zse.runtime.cpu import CPUDevice
from zse.sampling.params import BeamParams, SamplingParams
from zse.scheduler.feature import Feature
from zse.scheduler.options import RequestOptions
from zse.scheduler.scheduler import Scheduler
from zse.speculative.speculator import Speculator
from zse.structured.options import Structure
from zse.tensor import Tensor
from zse_emulator import EmulateDevice

TOKENS = 14
REFERENCES = np.load(Path(__file__).with_name("references.npz"))


def load_emulated(device, path, quantize=None, host_layers=0, expert_memory=None, planned=plan_model, **share):
    """(Model, its ModelPlan): the host's memory as the loader fills it for a GPU, copied to the emulated one. host_layers: how many
    layers stay in the host's memory; expert_memory: bytes of the places for experts; planned, share: what makes
    the plan, with rank and ranks."""
    with CPUDevice(2) as cpu, open_model(path) as source:
        cpu.kernels = "gpu"
        plan = planned(source, family="gpu", quantize=quantize, **share).with_host_layers(host_layers)
        if expert_memory is not None:
            plan = with_expert_memory(plan, expert_memory)
        host = load_model(cpu, plan)
        host.wait()
        data = bytes(host.buffer.view())
        layers = bytes(host.host_layers.memory.view()) if host_layers else b""
        experts = bytes(host.host_experts.memory.view()) if plan.expert_slots else b""
    buffer = device.alloc(len(data), label="weights")
    device.write(buffer, data)
    if experts:
        some = HostExperts(device, plan, buffer, device.host_memory(len(experts), "experts"))
        some.memory.view()[:] = experts
        return Model(plan, *some.places.beside(*place(plan, buffer)), buffer, None, host_experts=some), plan
    kept = None
    if host_layers:
        kept = HostLayers(plan, buffer, device.host_memory(len(layers), "layers"))
        kept.memory.view()[:] = layers
    return Model(plan, *place(plan, buffer), buffer, None, host_layers=kept), plan


# 12 tokens at once go to the skinny GEMM on Hopper, up to 8 to kernels of their own.
@pytest.mark.each()
@pytest.mark.parametrize("like, sizes", [("sm_80", [12, 1, 1]), ("sm_90a", [12, 1, 1]), ("sm_90a", [5, 8, 1])])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_logits_and_order(like, sizes, family, kept_kernels, tmp_path):
    device = EmulateDevice(like, cache.package_variants(like))
    model, _ = load_emulated(device, str(tiny.write(family, tmp_path, "BF16")))
    ids = tiny.tokens(family)[:TOKENS]
    weights = {
        name: (tiny.to_bf16(values).astype(np.uint32) << 16).view(np.float32)
        for name, values in tiny.by_role(family, model.config).items()
    }
    reference = numpy_model.forward(model.config, weights, ids, np.float64)
    logits = Session(device, model, rows=1, max_tokens=16, context=32).run(ids, sizes)
    # bf16 between the operations, as in tests/gpu/test_models.py.
    assert np.abs(logits - reference).max() < 0.05 * np.abs(reference).max()


def test_int4_beside_fp8_activations(kept_kernels, monkeypatch, tmp_path):
    """From 9 tokens on e4m3 activations cost what they cost the reference (a rounding to bf16 before makes some difference).
    Steps of fewer tokens are those of bf16, bit for bit."""
    monkeypatch.setitem(tiny.CONFIGS, "wide", tiny.config("wide") | dict(intermediate_size=512))
    name, ids = str(tmp_path / "int4.zse"), tiny.tokens("wide")
    convert(tiny.write("wide", tmp_path), name, "int4", 128, head="bf16", layout="rows")
    device = EmulateDevice("sm_90a", cache.package_variants("sm_90a"))
    model, _ = load_emulated(device, name)
    weights = dequantized(device, model)
    reference = numpy_model.forward(model.config, weights, ids)
    rounded = loss_of(numpy_model.forward(model.config, weights, ids, operand=quantized), reference)
    options = dict(rows=1, max_tokens=64, context=64)
    for count in (40, 20):
        logits = Session(device, model, activations="fp8", **options).run(ids, [count] * (40 // count))
        assert rounded / 3 < loss_of(logits, reference) < 1.5 * rounded
    few, bf16 = (Session(device, model, activations=name, **options).run(ids[:16], [8, 8]) for name in ("fp8", "bf16"))
    np.testing.assert_array_equal(few, bf16)
    assert loss_of(bf16, reference[:16]) < rounded / 3


@pytest.mark.parametrize("family, count", [("gemma3", 3), ("llama", 1), ("qwen2_moe", 2)])
def test_layers_in_host_memory_change_no_bit(family, count, kept_kernels, tmp_path):
    """Slots hold NaN while their next layer is copied. Prompts, single tokens, and hidden states."""
    write = tiny.write if family in tiny.FAMILIES else tiny_families.write
    path, logits, hidden = str(write(family, tmp_path, "BF16")), [], []
    for kept in (0, count):
        device = EmulateDevice("sm_90a", cache.package_variants("sm_90a"))
        model, plan = load_emulated(device, path, host_layers=kept)
        assert len(plan.host_layers) == kept and sum(plan.memory_bytes.values()) == model.buffer.nbytes
        session = Session(device, model, rows=1, max_tokens=16, context=32)
        logits.append(session.run(tiny.tokens(family)[:TOKENS], [12, 1, 1]))
        recorder = device.record()
        state = session.decoder.record_hidden(recorder)
        graph = recorder.finish()
        graph.run(tokens=1)
        hidden.append(device.read(state.with_rows(1)))
        graph.close()
    np.testing.assert_array_equal(logits[1], logits[0])
    assert hidden[0] == hidden[1] and np.isfinite(logits[0]).all()


# Those that use the kernels' forms that others do not have; the others with --exhaustive.
WITH_FORMS_OF_THEIR_OWN = ("gemma2", "olmo2", "ministral3", "cohere2", "qwen2_moe", "glm4_moe")
WITH_FORMS_OF_THEIR_OWN += ("gemma4", "gemma4_large", "lfm2", "qwen3_5", "granite_hybrid")
# Choices of experts that are close fall otherwise in bf16.
LIMITS = {"qwen3_next": 0.15, "qwen3_5_moe": 0.15}
FAMILIES = [
    pytest.param(family, marks=() if family in WITH_FORMS_OF_THEIR_OWN else pytest.mark.exhaustive)
    for family in tiny_families.FAMILIES
]


@pytest.mark.parametrize("family", FAMILIES)
def test_families_equal_transformers(family, kept_kernels, tmp_path):
    """A prompt longer than the windows, then a token."""
    like = "sm_80" if family in ("gemma2", "olmo2", "cohere") else "sm_90a"
    device = EmulateDevice(like, cache.package_variants(like))
    path = str(tiny_families.write(family, tmp_path, "BF16"))
    model, _ = load_emulated(device, path)
    reference = REFERENCES[family][:18]
    session = partial(Session, device, model, rows=1, max_tokens=32, context=32)
    if family.startswith("nemotron_h"):
        with pytest.raises(UnsupportedError, match="head_dim 32"):
            session().run(tiny.tokens(family)[:18], [17, 1])
        return
    logits = session().run(tiny.tokens(family)[:18], [17, 1])
    assert np.abs(logits - reference).max() < LIMITS.get(family, 0.05) * np.abs(reference).max()


# Heads of the sizes that real models have: prompts by chunks, the norm of results in their launch.
REAL_HEADS = {
    "qwen3_5": dict(
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
    ),
    "nemotron_h": dict(
        head_dim=64,
        hybrid_override_pattern="M*-",
        num_hidden_layers=3,
        mamba_num_heads=4,
        mamba_head_dim=64,
        ssm_state_size=128,
    ),
}


@pytest.mark.parametrize(
    "family, like",
    [("qwen3_5", "sm_90a"), ("nemotron_h", "sm_80"), ("qwen3_5", "gfx90a")]
    + [pytest.param(*both, marks=pytest.mark.exhaustive) for both in (("qwen3_5", "sm_80"), ("nemotron_h", "sm_90a"))],
)
def test_recurrent_layers(family, like, device, kept_kernels, monkeypatch, tmp_path):
    """Two sequences, one of which goes on: prompts, short runs and single tokens in one batch, against the CPU's logits."""
    config = tiny_families.CONFIGS[family] | REAL_HEADS[family]
    monkeypatch.setitem(tiny_families.CONFIGS, family, config)
    path = str(tiny_families.write(family, tmp_path, "BF16"))
    ids, emulated = np.resize(tiny.tokens(family), 80), EmulateDevice(like, cache.package_variants(like))
    steps = [[(0, ids[:40])], [(0, ids[40:41]), (1, ids[3:73])], [(0, ids[41:44]), (1, ids[73:74])]]
    steps += [[(1, ids[74:75]), (0, ids[44:45])]]
    expected = Session(device, load(device, path), rows=2, max_tokens=80, context=160)
    model, _ = load_emulated(emulated, path)
    session = Session(emulated, model, rows=2, max_tokens=80, context=160)
    for step in steps:
        wanted = expected.step(step)
        assert np.abs(session.step(step) - wanted).max() < 0.05 * np.abs(wanted).max()


@pytest.mark.parametrize("like, kv_dtype, limit", [("sm_90a", "bf16", 0.05), ("sm_80", "int8", 0.1)])
def test_latent_attention(like, kv_dtype, limit, device, kept_kernels, monkeypatch, tmp_path):
    """A prompt, then tokens whose keys two blocks share, against the CPU's logits."""
    config = tiny_families.CONFIGS["minicpm3"] | dict(num_hidden_layers=1)
    monkeypatch.setitem(tiny_families.CONFIGS, "minicpm3", config)
    path = str(tiny_families.write("minicpm3", tmp_path, "BF16"))
    ids, emulated = np.resize(tiny.tokens("minicpm3"), 70), EmulateDevice(like, cache.package_variants(like))
    reference = Session(device, load(device, path), max_tokens=80, context=160).run(ids)[-2:]
    model, _ = load_emulated(emulated, path)
    session = Session(emulated, model, rows=1, max_tokens=80, context=160, kv_dtype=kv_dtype)
    logits = np.concatenate([session.step([(0, part)])[-1:] for part in (ids[:69], ids[69:])])
    assert np.abs(logits - reference).max() < limit * np.abs(reference).max()


@pytest.mark.parametrize("like, kv_dtype", [("sm_80", "fp8"), ("sm_90a", "int8")])
def test_kv_in_8_bits(like, kv_dtype, kept_kernels, tmp_path):
    """A prompt by the prefill kernel, then by the decode kernel, near the logits with bf16 pages: what the pages lose is
    more than nothing and less than the types explain. Of a sequence at once, in parts and beside another: the same bits."""
    device = EmulateDevice(like, cache.package_variants(like))
    model, _ = load_emulated(device, str(tiny.write("llama", tmp_path, "BF16")))
    ids = tiny.tokens("llama")[:20]
    expected, got = (
        Session(device, model, rows=2, max_tokens=32, context=32, kv_dtype=dtype).run(ids, [17, 2, 1])
        for dtype in ("bf16", kv_dtype)
    )
    lost = np.abs(got - expected).max() / np.abs(expected).max()
    # On a CPU, of the tiny families' largest logit: 0.014 to 0.034 in int8, 0.059 to 0.16 in fp8.
    assert 1e-4 < lost < {"int8": 0.1, "fp8": 0.3}[kv_dtype]
    session = Session(device, model, rows=2, max_tokens=16, context=32, kv_dtype=kv_dtype, deterministic=True)
    whole = session.step([(0, ids[:11])])
    session.lengths = [0, 0]
    parts = [
        session.step([(0, ids[:9])]),
        session.step([(0, ids[9:10]), (1, ids[3:6])])[:1],
        session.step([(0, ids[10:11]), (1, ids[:1])], wanted=[0]),
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("like", ["sm_80", "sm_90a"])
def test_deterministic_forms(like, kept_kernels, tmp_path):
    """A sequence at once, in parts, and token by token beside another: the same bits."""
    device = EmulateDevice(like, cache.package_variants(like))
    model, _ = load_emulated(device, str(tiny.write("llama", tmp_path, "BF16")))
    ids = tiny.tokens("llama")[:11]
    session = Session(device, model, rows=2, max_tokens=16, context=32, deterministic=True)
    whole = session.step([(0, ids)])
    session.lengths = [0, 0]
    parts = [
        session.step([(0, ids[:9])]),
        session.step([(0, ids[9:10]), (1, ids[3:6])])[:1],
        session.step([(0, ids[10:]), (1, ids[:1])], wanted=[0]),
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_an_engine_keeps_states_on_the_device(kept_kernels, monkeypatch, tmp_path):
    """Requests in one batch, then the conversation of one of them continued, most of whose prompt is not computed again:
    each token is among the likeliest after those before it."""
    monkeypatch.setitem(tiny_families.CONFIGS, "qwen3_5", tiny_families.CONFIGS["qwen3_5"] | REAL_HEADS["qwen3_5"])
    device = EmulateDevice("sm_90a", cache.package_variants("sm_90a"))
    model, plan = load_emulated(device, str(tiny_families.write("qwen3_5", tmp_path, "BF16")))
    wanted = EngineConfig(model="m", max_rows=3, max_context=128, max_tokens_per_step=64, speculation="none")
    config = plan_memory(wanted, plan, device).config
    size, nbytes = config.page_size, config.state_bytes // config.state_slots
    scheduler = Scheduler(
        num_pages=config.num_pages,
        max_rows=3,
        max_tokens=64,
        max_context=128,
        vocab_size=plan.config.vocab_size,
        geometry=PageGeometry(page_size=size),
        prefix_cache=PrefixCache(config.num_pages, page_size=size),
        states=StateSlots(config.state_slots, config.state_interval, HostPool(0), page_size=size, slot_nbytes=nbytes),
    )
    engine, params = Engine(scheduler, Runner(device, model, config)), SamplingParams(max_tokens=4, temperature=0.0)
    ids = np.resize(tiny.tokens("qwen3_5"), 90).tolist()
    session = Session(device, model, rows=1, max_tokens=96, context=160)

    def said(prompts) -> tuple[dict[int, list[int]], int]:
        replies, cached = {id: [] for id in prompts}, 0
        for id, prompt in prompts.items():
            engine.submit(id, prompt, msgspec.structs.replace(params, ignore_eos=True))
        while engine.has_work:
            for output in engine.step():
                assert output.finish != "error"
                replies[output.id] += output.tokens
                cached += output.cached_tokens
            assert scheduler.check_integrity() == []
        for id, prompt in prompts.items():
            session.lengths = [0]
            logits = session.step([(0, prompt + replies[id][:-1])])[len(prompt) - 1 :]
            for line, token in zip(logits, replies[id], strict=True):
                # Where a prompt is cut into steps moves logits by up to 0.4 % of the largest.
                assert line[token] >= line.max() - 0.02 * np.abs(logits).max()
        return replies, cached

    first, cached = said({0: ids[:70], 1: ids[5:9], 2: ids[20:50]})
    assert cached == 0
    _, cached = said({3: ids[:70] + first[0] + ids[80:86]})
    assert cached >= 70


def test_an_engine_runs_ahead(kept_kernels, tmp_path):
    """Requests that come and go, sampled with penalties and biases, a step submitted before the one before is read: the
    pages (of 8 bits, of two blocks), ids and histories that the device keeps are the host's, and a request says the same in
    other company."""
    device = EmulateDevice("sm_90a", cache.package_variants("sm_90a"))
    model, plan = load_emulated(device, str(tiny.write("llama", tmp_path, "BF16")))
    wanted = EngineConfig(model="m", max_rows=3, max_context=64, max_tokens_per_step=32, kv_dtype="int8", page_size=32)
    config = plan_memory(wanted, plan, device).config
    runner = Runner(device, model, config)
    assert runner.kv.page_nbytes == 2 * 2 * plan.config.num_layers * plan.config.num_kv_heads * (
        16 * plan.config.head_dim + 64
    )
    assert config.kv_bytes == config.num_pages * runner.kv.page_nbytes == runner.kv.nbytes
    ids = tiny.tokens("llama").tolist()
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    requests = {
        0: (ids[:14], params),
        1: (ids[5:9], msgspec.structs.replace(params, temperature=1.0, seed=3, presence_penalty=0.5)),
        2: (ids[3:4], msgspec.structs.replace(params, logit_bias={7: 100.0}, max_tokens=2)),
        3: (ids[:14], params),
    }

    def run(wanted) -> dict[int, list[int]]:
        scheduler = Scheduler(
            num_pages=config.num_pages,
            max_rows=3,
            max_tokens=32,
            max_context=64,
            vocab_size=plan.config.vocab_size,
            geometry=PageGeometry(page_size=32),
        )
        engine = Engine(scheduler, runner)
        replies: dict[int, list[int]] = {id: [] for id in wanted}
        for id in wanted:
            engine.submit(id, *requests[id])
        while engine.has_work:
            for output in engine.step():
                assert output.finish != "error"
                replies[output.id] += output.tokens
            assert scheduler.check_integrity() == []
        return replies

    assert runner.runs_ahead
    together = run([0, 1, 2, 3])
    assert together[0] == together[3] and together[2] == [7, 7]
    assert [len(reply) for reply in together.values()] == [5, 5, 2, 5]
    # The greedy reply again by teacher forcing: each token is the likeliest after those before it.
    session = Session(device, model, rows=1, max_tokens=16, context=32, kv_dtype="int8")
    logits = session.run(ids[:14] + together[0], [14, 1, 1, 1, 1, 1])
    best = np.sort(logits[13:18], axis=1)
    for line, token in enumerate(together[0]):
        assert logits[13 + line, token] >= best[line, -1] - 0.02 * np.abs(best).max()
    assert run([1])[1] == together[1]

    # Pages that are found again bring the tokens that penalties look at: shared, copied, and by way of the host.
    runner.pages.slots.count = 8
    scheduler = Scheduler(
        num_pages=3,
        max_rows=1,
        max_tokens=32,
        max_context=64,
        vocab_size=plan.config.vocab_size,
        prefix_cache=PrefixCache(3, page_size=32),
        host=HostPool(8),
        geometry=PageGeometry(page_size=32),
    )
    engine = Engine(scheduler, runner)

    def say(prompt) -> tuple[list[int], int]:
        engine.submit(9, prompt, msgspec.structs.replace(params, repetition_penalty=1.5, frequency_penalty=0.5))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
            assert scheduler.check_integrity() == []
        return [token for output in outputs for token in output.tokens], sum(output.cached_tokens for output in outputs)

    # A page has 32 tokens, in two blocks.
    first, _ = say(ids[:35])
    assert say(ids[:35]) == (first, 34)
    scheduler.cache.prefix.evict(3)  # as when others need pages: the full one goes to the host with the next step
    assert scheduler.snapshot()["prefix_host_pages"] == 1
    assert say(ids[:35]) == (first, 32)


def test_masks_between_the_forward_and_the_sampler(kept_kernels, tmp_path):
    """One request whose grammar allows one token in each step, beside a free one, on a device that runs ahead."""
    device = EmulateDevice("sm_80", cache.package_variants("sm_80"))
    model, plan = load_emulated(device, str(tiny.write("llama", tmp_path, "BF16")))
    config = plan_memory(
        EngineConfig(model="m", max_rows=2, max_context=64, max_tokens_per_step=32), plan, device
    ).config
    runner = Runner(device, model, config)
    vocab = plan.config.vocab_size
    nbytes = (vocab + 31) // 32 * 4

    class Masks(Feature):
        """Stands for the grammar process: token 5 + position is the only one allowed to request 1."""

        come_first, draws_first = True, False

        def before_run(self, batch):
            assert not runner.lazy_masks, "what is drawn on a device that runs ahead cannot be drawn again"
            self.lines, self.memory, line = [], memoryview(bytearray(nbytes * 4)), 0
            for entry in batch.entries:
                if entry.samples and entry.request.id == 1:
                    token = 5 + entry.start + entry.count
                    self.memory[line * nbytes + (token >> 3)] = 1 << (token & 7)
                    self.lines.append(line)
                line += entry.samples
            return self if self.lines else None

        def first_lines(self):
            return self.lines

        def mask(self, line):
            return self.memory[line * nbytes : (line + 1) * nbytes]

    def run(ids):
        scheduler = Scheduler(num_pages=config.num_pages, max_rows=2, max_tokens=32, max_context=64, vocab_size=vocab)
        engine = Engine(scheduler, runner)
        engine.use("grammars", Masks())
        params = SamplingParams(max_tokens=4, temperature=1.0, seed=1, ignore_eos=True)
        prompt = tiny.tokens("llama").tolist()[:6]
        replies = {id: [] for id in ids}
        for id in ids:
            options = RequestOptions(structure=Structure(kind="text")) if id == 1 else RequestOptions()
            scheduler.submit(id, prompt, params, seed=1, options=options)
        while scheduler.requests:
            for output in engine.step():
                replies[output.id] += output.tokens
        return replies

    both = run([1, 2])
    assert both[1] == [11, 12, 13, 14]
    assert both[2] == run([2])[2]


class Knowing(Speculator):
    """Drafts of known replies, every third one wrong; every other step is not given ahead."""

    replies: dict[int, list[int]] = {}

    def before_schedule(self, now):
        for request in self.scheduler.decoding():
            said = len(request.tokens) - request.prompt_len
            drafts = self.replies[request.id][said : said + 3]
            request.drafts = [draft ^ ((said + at) % 3 == 2) for at, draft in enumerate(drafts)]
        return []

    def after_commit(self, batch, seconds):
        self.reads_tokens = not self.reads_tokens


def test_drafts_are_verified_on_a_gpu(kept_kernels, tmp_path):
    """Runs of several tokens beside single ones and a prompt's chunk; penalties look at a history that has the drafts
    before each line and not those behind it."""
    device = EmulateDevice("sm_90a", cache.package_variants("sm_90a"))
    model, plan = load_emulated(device, str(tiny.write("llama", tmp_path, "BF16")))
    wanted = EngineConfig(
        model="m", max_rows=2, max_context=64, max_tokens_per_step=16, deterministic=True, draft_tokens=3
    )
    config = plan_memory(wanted, plan, device).config
    runner = Runner(device, model, config)
    ids = tiny.tokens("llama").tolist()
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, frequency_penalty=2.0, logprobs=1)
    requests = [
        (ids[:4], params),
        (ids[5:8], msgspec.structs.replace(params, temperature=1.0, seed=3)),
        (ids[3:9], msgspec.structs.replace(params, max_tokens=2, frequency_penalty=0.0)),
    ]

    def run(known):
        scheduler = Scheduler(
            num_pages=config.num_pages,
            max_rows=2,
            max_tokens=16,
            max_context=64,
            vocab_size=plan.config.vocab_size,
            max_drafts=config.max_drafts,
        )
        engine = Engine(scheduler, runner)
        if known is not None:
            speculator = Knowing(scheduler, 3, "gpu", runs_ahead=True)
            speculator.replies = known
            engine.use("speculation", speculator)
        replies = {id: [] for id in range(3)}
        for id, request in enumerate(requests):
            engine.submit(id, *request)
        while engine.has_work:
            for output in engine.step():
                replies[output.id] += zip(output.tokens, (entry.logprob for entry in output.logprobs), strict=True)
        return replies, scheduler.counters

    told, _ = run(None)
    again, counters = run({id: [token for token, _ in reply] for id, reply in told.items()})
    assert again == told
    assert 0 < counters.accepted_tokens < counters.drafted_tokens


def test_jobs_and_beams(kept_kernels, tmp_path):
    """Log-probabilities and hidden states beside a request that runs ahead, and a beam search: a GPU's recordings."""
    device = EmulateDevice("sm_90a", cache.package_variants("sm_90a"))
    model, plan = load_emulated(device, str(tiny.write("llama", tmp_path, "BF16")))
    config = plan_memory(
        EngineConfig(model="m", max_rows=2, max_context=64, max_tokens_per_step=16), plan, device
    ).config
    scheduler = Scheduler(
        num_pages=config.num_pages,
        max_rows=2,
        max_tokens=16,
        max_context=64,
        vocab_size=plan.config.vocab_size,
        eos_ids=frozenset((2,)),
    )
    engine = Engine(scheduler, Runner(device, model, config))
    ids = tiny.tokens("llama").tolist()[:10]
    weights = {
        name: (tiny.to_bf16(values).astype(np.uint32) << 16).view(np.float32)
        for name, values in tiny.by_role("llama", model.config).items()
    }
    logits = numpy_model.forward(model.config, weights, np.array(ids), np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    engine.submit(1, ids[:5], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    engine.submit(2, ids, Ask("logprobs", top=2))
    engine.submit(3, ids, Ask("last"))
    engine.submit(4, ids, BeamParams(beam_width=2, max_tokens=2))
    over = {}
    while engine.has_work:
        engine.step()
        over |= {job.id: job.result for job in engine.take_completed()}
        assert scheduler.check_integrity() == []
    near = 0.05 * np.abs(logits).max()
    found = [entry.logprob for entry in over[2].logprobs[1:]]
    assert np.abs(np.array(found) - logprobs[np.arange(9), ids[1:]]).max() < near
    assert [len(entry.top) for entry in over[2].logprobs[1:]] == [2] * 9
    state = np.frombuffer(over[3].vector, "<f4").astype(np.float64)
    head = weights["embed" if model.config.tied_head else "head"].astype(np.float64)
    assert np.abs(head @ state - logits[-1]).max() < near
    assert len(over[4].replies) == 2
    assert abs(over[4].replies[0].logprobs[0].logprob - logprobs[-1, over[4].replies[0].tokens[0]]) < near


@pytest.mark.parametrize(
    "like, kv_dtype",
    [
        ("sm_90a", "bf16"),
        pytest.param("sm_80", "fp8", marks=pytest.mark.exhaustive("kernels of a second architecture")),
    ],
)
def test_no_kernel_reads_what_a_window_has_passed(like, kv_dtype, kept_kernels, tmp_path, monkeypatch):
    """A prompt in chunks and a few tokens on a model with layers in groups: pages that were given back are NaN at once."""
    device = EmulateDevice(like, cache.package_variants(like))
    model, plan = load_emulated(device, str(tiny.write("gemma3", tmp_path, "BF16")))
    wanted = EngineConfig(
        model="m", max_rows=1, max_context=64, max_tokens_per_step=16, prefix_cache=False, kv_dtype=kv_dtype
    )
    config = plan_memory(wanted, plan, device).config
    runner = Runner(device, model, config)
    pages = geometry(plan.config, 16, 2)
    assert pages.num_groups == runner.kv.num_groups == 7
    scheduler = Scheduler(
        num_pages=config.num_pages,
        max_rows=1,
        max_tokens=16,
        max_context=64,
        vocab_size=plan.config.vocab_size,
        geometry=pages,
    )
    trim, gone = GroupedCacheManager.trim, []

    def trim_and_poison(self, sequence, position):
        held = self.windows(sequence).held()
        trim(self, sequence, position)
        for page in held:
            if not self.allocator.references(page):
                nbytes = runner.kv.page_nbytes
                device.write(Tensor(runner.kv.buffer, (nbytes,), "u8", page * nbytes), b"\xff" * nbytes)
                gone.append(page)

    monkeypatch.setattr(GroupedCacheManager, "trim", trim_and_poison)
    engine = Engine(scheduler, runner)
    ids = tiny.tokens("gemma3").tolist()
    engine.submit(0, ids, greedy(3))
    said = []
    while engine.has_work:
        for output in engine.step():
            assert output.finish != "error"
            said += output.tokens
    assert len(said) == 3 and gone
    session = Session(device, model, rows=1, max_tokens=16, context=64, kv_dtype=kv_dtype)
    logits = session.run([*ids, *said[:2]], [16, 16, 8, 1, 1])
    for line, token in zip(logits[39:], said, strict=True):
        assert line[token] >= line.max() - 0.02 * np.abs(logits).max()


def test_a_profiled_step_has_every_launch(kept_kernels, tmp_path):
    """On a device that alternates between two recordings and copies its inputs: a step of each kind, launch by launch,
    and the replies of an engine that was profiled are those of one that was not."""
    device = EmulateDevice("sm_90a", cache.package_variants("sm_90a"))
    model, plan = load_emulated(device, str(tiny.write("llama", tmp_path, "BF16")))
    config = plan_memory(
        EngineConfig(model="m", max_rows=2, max_context=64, max_tokens_per_step=32), plan, device
    ).config
    scheduler = Scheduler(
        num_pages=config.num_pages, max_rows=2, max_tokens=32, max_context=64, vocab_size=plan.config.vocab_size
    )
    engine = Engine(scheduler, Runner(device, model, config))
    loaded = SimpleNamespace(engine=engine, config=config, model_config=plan.config)

    def reply():
        engine.submit(100, tiny.tokens("llama").tolist()[:14], greedy(3))
        said = []
        while engine.has_work:
            for output in engine.step():
                said += output.tokens
        return said

    before = reply()
    prefill, decode = profile(loaded, rows=2, prompt_tokens=9, steps=1, repeats=1)
    assert reply() == before and scheduler.check_integrity() == []
    assert (prefill.kind, prefill.tokens, decode.kind, decode.tokens, decode.rows) == ("prefill", 9, "decode", 2, 2)
    for step in (prefill, decode):
        names = [kernel.name for kernel in step.kernels]
        assert names[0] == "upload" and names[-1] == "download" and "feed_tokens" in names
        assert all(kernel.us > 0 for kernel in step.kernels) and step.replay_us > 0
