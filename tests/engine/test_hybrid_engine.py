"""A model with recurrent layers in the engine: its replies do not depend on what was cached, cut, preempted or forked, and little
of a conversation is computed twice."""

import json
import mmap
import random
import sys
from pathlib import Path

import pytest
from tiny_engines import TinyEngines, close

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import tiny_families  # noqa: E402

from zse.cache import segments
from zse.engine.llm import LLM  # noqa: E402
from zse.engine.messages import Ask  # noqa: E402
from zse.sampling.params import BeamParams, SamplingParams  # noqa: E402
from zse.scheduler.options import RequestOptions  # noqa: E402

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Makes engines of a tiny LFM2: three convolutions and two layers of attention."""
    folder = tiny_families.write("lfm2", tmp_path_factory.mktemp("lfm2"))
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 2048}))
    with TinyEngines(folder, max_context=256, kv_dtype="f32") as make:
        yield make


@pytest.fixture(scope="module")
def plain(engines):
    """One that computes everything, a prompt in one chunk."""
    return engines(prefix_cache=False)


def ids(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 150), k=count)


class Run:
    """What became of requests that were submitted together: tokens of each, and how many of its prompt were cached."""

    def __init__(self, engine, prompts, params=GREEDY, options=None, before_step=None):
        before = engine.scheduler.counters.scheduled_tokens
        for id, prompt in enumerate(prompts):
            engine.submit(id, prompt, params, options[id] if options else RequestOptions())
        self.tokens, self.cached = [[] for _ in prompts], [0] * len(prompts)
        while engine.has_work:
            if before_step is not None:
                before_step(engine.scheduler)
            for output in engine.step():
                assert output.error is None
                self.tokens[output.id] += output.tokens
                self.cached[output.id] += output.cached_tokens
            assert engine.scheduler.check_integrity() == []
        self.computed = engine.scheduler.counters.scheduled_tokens - before


def test_replies_do_not_depend_on_how_a_prompt_is_cut(engines, plain):
    prompts = [ids(70, 1), ids(33, 2), ids(1, 3)]
    expected = Run(plain, prompts).tokens
    for size in (4, 5, 7, 13, 31, 63):
        assert Run(engines(max_tokens_per_step=size, max_rows=3), prompts).tokens == expected, size
    assert Run(engines(max_rows=3, ahead=True), prompts).tokens == expected


@pytest.mark.parametrize("family", ["qwen3_next", "granite_hybrid", "nemotron_h"])
def test_every_kind_of_state(family, tmp_path):
    """Gated DeltaNet, Mamba-2, layers without either: what LFM2 does below, in short."""
    with TinyEngines(tiny_families.write(family, tmp_path), max_context=256, kv_dtype="f32") as make:
        plain, prompts = make(prefix_cache=False), [ids(70, 1), ids(33, 2), ids(110, 3)]
        expected = Run(plain, prompts).tokens
        points = [RequestOptions(state_points=(len(prompt) - 9,)) for prompt in prompts]
        engine = make(state_interval=40, max_tokens_per_step=63, max_rows=3)
        assert Run(engine, prompts, options=points).tokens == expected
        longer = [prompt + tokens[:-1] + ids(9, 5) for prompt, tokens in zip(prompts, expected, strict=True)]
        run = Run(engine, longer)
        assert run.tokens == Run(plain, longer).tokens and run.cached == [81, 44, 121]


@pytest.mark.parametrize(
    "options", [{}, dict(ahead=True), dict(page_size=64), dict(max_tokens_per_step=17, max_rows=4)]
)
def test_a_prompt_continues_from_a_state_that_was_kept(engines, plain, options):
    engine = engines(state_interval=40, **options)
    first = ids(90, 4)
    points = RequestOptions(state_points=(10, 34, 77))  # the first is not worth a chunk
    whole = Run(engine, [first], options=[points])
    assert whole.tokens == Run(plain, [first]).tokens and whole.cached == [0]
    # Behind the reply, where the last message began, there but for its last token, before all of them.
    continued = first + whole.tokens[0][:-1] + ids(9, 5)
    for prompt, cached in (
        (continued, 101),
        (first[:77] + ids(20, 6), 77),
        (first[:78], 77),
        (first[:77], 34),
        (first[:38] + ids(40, 7), 34),
        (first[:20] + ids(40, 8), 0),
    ):
        run = Run(engine, [prompt])
        assert run.tokens == Run(plain, [prompt]).tokens and run.cached == [cached]
    assert engine.scheduler.snapshot()["state_hits"] == 5


def test_a_request_that_is_preempted_goes_on(engines, plain):
    prompts = [ids(40, seed) for seed in range(10, 14)]
    expected = Run(plain, prompts).tokens
    for preemption, host in (("recompute", 0), ("swap", 4 << 20)):
        for prefix in (True, False):
            engine = engines(
                max_rows=4, preemption=preemption, cache_host_memory=host, prefix_cache=prefix, state_memory=0
            )
            rng = random.Random(1)

            def preempt(scheduler, rng=rng):
                if scheduler.running and rng.random() < 0.5:
                    scheduler.preempt(rng.choice(scheduler.running).id)

            assert Run(engine, prompts, before_step=preempt).tokens == expected
            counters = engine.scheduler.snapshot()
            assert counters["preemptions"] > 3 and (counters["swapped_in_pages"] > 3) == (preemption == "swap")


def test_choices_of_one_prompt_compute_it_once(engines, plain):
    prompt = ids(64, 20)
    params = SamplingParams(temperature=0.9, seed=7, max_tokens=10, ignore_eos=True)
    for ahead in (False, True):
        run = Run(engines(ahead=ahead), [prompt] * 3, params)
        assert run.tokens == Run(plain, [prompt] * 3, params).tokens
        assert run.cached == [0, 63, 63] and run.computed == 64 + 1 + 1 + 3 * 9


def test_requests_that_begin_alike_compute_it_once(engines, plain):
    """They part within a few tokens of each other: one state serves them."""
    common = ids(100, 21)
    prompts = [common[: 90 + count] + ids(20, 22 + count) for count in (10, 3, 0, 7, 1)]
    engine = engines(max_rows=5)
    run = Run(engine, prompts)
    assert run.tokens == Run(plain, prompts).tokens
    assert run.cached == [0, 90, 90, 90, 90] and engine.scheduler.snapshot()["state_taken"] == 1


def test_beams_copy_states(engines, plain):
    prompt = ids(50, 30)
    found = []
    for engine in (engines(), plain):
        engine.submit(1, prompt, BeamParams(beam_width=3, max_tokens=8))
        while engine.has_work:
            engine.step()
            assert engine.scheduler.check_integrity() == []
        assert engine.scheduler.counters.forks > 3
        (search,) = engine.take_completed()
        found.append([(reply.tokens, pytest.approx(reply.score, abs=1e-4)) for reply in search.result.replies])
    assert found[0] == found[1]


def test_tenants_share_no_state(engines):
    engine, prompt = engines(), ids(60, 40)
    mine, theirs, salted = (
        RequestOptions(tenant=tenant, cache_salt=salt, state_points=(50,))
        for tenant, salt in (("a", ""), ("b", ""), ("a", "x"))
    )
    for options, cached in ((mine, 0), (theirs, 0), (salted, 0), (mine, 50), (theirs, 50)):
        assert Run(engine, [prompt], options=[options]).cached == [cached]


def test_states_go_when_others_need_their_slots(engines, plain):
    """Five states for two rows: three snapshots of twelve places."""
    nbytes = 3 * 128 * 2 * 4  # of three convolutions' last two inputs
    engine = engines(max_rows=2, state_memory=3 * nbytes + 512, speculation="none")
    assert engine.runner.config.state_slots == 5 and engine.runner.states.slot_nbytes == nbytes
    prompts = [ids(40, seed) for seed in range(50, 56)]
    points = [RequestOptions(state_points=(35,))] * 6
    assert Run(engine, prompts, options=points).tokens == Run(plain, prompts).tokens
    again = Run(engine, prompts[::-1], options=points)
    assert again.tokens == Run(plain, prompts[::-1]).tokens and max(again.cached) == 35
    assert engine.scheduler.snapshot()["state_evicted"] > 6


def test_jobs_have_states_of_their_own(engines, plain):
    texts = [ids(count, 60 + count) for count in (5, 40, 90)]
    found = []
    for together in (True, False):
        engine = engines(max_tokens_per_step=32, max_rows=4)
        results = {}
        if together:
            engine.submit(99, ids(70, 70), GREEDY)
        for index, text in enumerate(texts):
            for what, id in (("mean", index), ("logprobs", 10 + index)):
                engine.submit(id, text, Ask(what))
                while engine.has_work and (not together or index == len(texts) - 1):
                    engine.step()
                    assert engine.scheduler.check_integrity() == []
                    results |= {job.id: job for job in engine.take_completed()}
        found.append([results[id].result for id in sorted(results)])
        assert len(results) == 6 and not engine.scheduler.cache.states.lent
    for mine, other in zip(*found, strict=True):
        assert mine.vector == other.vector and [line and line.logprob for line in mine.logprobs or ()] == [
            line and line.logprob for line in other.logprobs or ()
        ]


def test_an_agent_computes_little_twice(engines):
    """20 turns: the last answer stands differently in the next prompt, as where a client strips what was reasoned."""
    engine = engines(max_rows=2, max_context=2048, state_interval=10_000)
    rng, history, computed, new, before = random.Random(9), ids(200, 80), 0, 0, []
    for turn in range(20):
        user = len(history)
        history += ids(rng.randint(20, 60), 100 + turn)
        answer = len(history)
        prompt = history + [5, 6, 7]
        run = Run(engine, [prompt], options=[RequestOptions(state_points=(user, answer))])
        computed += run.computed - (len(run.tokens[0]) - 1)
        new += len(prompt) - next(
            (i for i, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b), len(before)
        )
        before = prompt + run.tokens[0]
        history = prompt + [8, *run.tokens[0][6:]]
    assert computed / new <= 1.1


def test_states_come_back_from_host_memory(engines, plain):
    """Two states on the device, one for each row: the third conversation pushes the first one's to the host."""
    engine = engines(max_rows=1, state_memory=3 * 1024, num_pages=16, cache_host_memory=8 << 20)
    prompts = [ids(90, seed) for seed in range(90, 94)]
    points = [RequestOptions(state_points=(77,))]
    for prompt in prompts:
        Run(engine, [prompt], options=points)
    counters = engine.scheduler.snapshot()
    assert counters["state_host_snapshots"] > 2 and counters["prefix_host_pages"] > 10
    for prompt in prompts:
        run = Run(engine, [prompt[:78] + ids(5, 1)])
        assert run.cached == [77] and run.tokens == Run(plain, [prompt[:78] + ids(5, 1)]).tokens
    assert engine.scheduler.snapshot()["state_host_hits"] >= 3


@pytest.fixture
def disk(engines, tmp_path):
    """(makes the next engine over one folder, closes it, the folder). Nothing of an engine is left but files."""
    folder = tmp_path / "kv"

    def make(**options):
        return engines(cache_disk=str(folder), max_rows=2, **options)

    def end(engine):
        loaded, first = engines.made.pop()
        assert loaded.engine is engine
        close(loaded, first)

    return make, end, folder


def kept_in(folder):
    """{file: [(place, length of the content, whether it is of a state)]}"""
    found = {}
    for path in folder.glob("*/*.kv"):
        seal = bytes.fromhex(path.parent.name) + (16).to_bytes(4, "little") + bytes.fromhex(path.stem)
        with path.open("rb") as file:
            records = list(segments.records(file.fileno(), seal, path.stat().st_size))
        found[path] = [(record.offset, record.nbytes, len(record.key) > segments.KEY_BYTES) for record in records]
    return found


def test_a_conversation_goes_on_after_a_restart(disk, plain):
    make, end, folder = disk
    prompt, points = ids(90, 95), [RequestOptions(state_points=(64, 77))]
    engine = make()
    reply = Run(engine, [prompt], options=points).tokens[0]
    end(engine)
    kept = [is_state for records in kept_in(folder).values() for *_, is_state in records]
    assert kept.count(True) == 3 and kept.count(False) == 6
    # Within a page, at its border, behind the reply.
    # A page agrees with more than it has a state for.
    for start, cached in ((prompt[:78], 77), (prompt[:66], 64), (prompt[:76], 64), (prompt + reply[:-1], 101)):
        engine = make()
        asked = start + ids(9, 96)
        run = Run(engine, [asked])
        assert run.cached == [cached] and run.tokens == Run(plain, [asked]).tokens
        counters = engine.counters()
        assert counters["state_disk_read"] == 1 and counters["state_host_hits"] == 1
        end(engine)
    engine = make()
    assert Run(engine, [prompt], options=[RequestOptions(tenant="other")]).cached == [0]
    end(engine)


@pytest.mark.parametrize("harm", ["torn", "flipped", "foreign", "gone"])
def test_a_state_file_that_is_not_sound_is_never_used(disk, plain, harm):
    make, end, folder = disk
    prompt = ids(90, 97)
    engine = make()
    Run(engine, [prompt], options=[RequestOptions(state_points=(77,))])
    end(engine)
    places = [(path, offset, size) for path, kept in kept_in(folder).items() for offset, size, state in kept if state]
    for path, offset, size in sorted(places, reverse=True):
        data = path.read_bytes() if path.exists() else b""
        if harm == "torn":
            path.write_bytes(data[: offset + size // 2])
        elif harm == "flipped":
            at = offset + segments.HEAD_BYTES + size - 100
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        elif harm == "foreign":  # sound, of another file
            if path.exists():
                path.rename(path.with_stem(f"{len(list(folder.rglob('0*.kv'))):032}"))
    engine = make()
    for path in {path for path, *_ in places} if harm == "gone" else ():
        path.unlink()
    asked = prompt[:80] + ids(5, 98)
    run = Run(engine, [asked])
    assert run.cached == [0] and run.tokens == Run(plain, [asked]).tokens
    assert (engine.counters()["prefix_disk_damaged_files"] > 0) == (harm != "gone")
    assert engine.counters()["state_disk_read"] == 0
    end(engine)


def test_states_of_another_model_are_not_found(disk, engines, tmp_path):
    make, end, folder = disk
    engine = make()
    Run(engine, [ids(90, 99)], options=[RequestOptions(state_points=(77,))])
    end(engine)
    (tmp_path / "other").mkdir()
    with TinyEngines(tiny_families.write("lfm2", tmp_path / "other", "BF16"), max_context=128, kv_dtype="f32") as other:
        engine = other(cache_disk=str(folder))
        assert Run(engine, [ids(90, 99)]).cached == [0] and engine.counters()["state_disk_files"] == 0


def test_an_idle_engine_keeps_few_states(engines, plain):
    engine = engines(state_interval=16, cache_idle_memory=4 * 3072)
    now = [0.0]
    engine.clock = lambda: now[0]
    told = Run(engine, [ids(200, 110)]).tokens
    buffer, busy = engine.runner.states.buffer, engine.scheduler.snapshot()["state_snapshots"]
    assert busy == 14  # every 16 tokens, and behind the reply
    for now[0] in range(0, 30, 3):
        while engine.use_idle_time():
            pass
        assert engine.scheduler.check_integrity() == []
    assert engine.scheduler.snapshot()["state_snapshots"] <= 4
    runs = [run for run in engine.scheduler.cache.states.free_runs() if run[0] < busy]  # of slots that were used
    assert max(count for _, count in runs) > 4
    for first, count in runs:
        start, end = (-(-3072 * slot // mmap.PAGESIZE) * mmap.PAGESIZE for slot in (first, first + count - 1))
        assert not any(buffer.view()[start:end])
    assert Run(engine, [ids(200, 110)]).tokens == told


def test_numbers_that_are_not_finite_stay_with_their_request(tmp_path):
    """Neither the prefix nor the slot of a request that failed spoils another one."""
    folder, token = tiny_families.write("qwen3_next", tmp_path), 155
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    size = int.from_bytes(data[:8], "little")
    embed = json.loads(data[8 : 8 + size])["model.embed_tokens.weight"]
    width = 4 * embed["shape"][1]
    at = 8 + size + embed["data_offsets"][0] + width * token
    data[at : at + width] = b"\xff" * width
    file.write_bytes(data)
    points = RequestOptions(state_points=(10, 20))
    for options in ({}, dict(ahead=True)):
        with TinyEngines(folder, max_context=256, kv_dtype="f32", max_rows=2) as make:
            engine, good = make(**options), ids(40, 1)
            told = Run(engine, [good]).tokens
            engine.submit(1, [*ids(30, 2), token, 5, 6], GREEDY, points)
            errors = []
            while engine.has_work:
                errors += [output.error.code for output in engine.step() if output.error]
                assert engine.scheduler.check_integrity() == []
            assert errors == ["numerical_error"]
            assert Run(engine, [ids(30, 2) + [7, 8]]).cached == [0]
            assert all(Run(engine, [good]).tokens == told for _ in range(3))


def with_tokenizer(folder: Path) -> Path:
    """Files of a tokenizer of bytes and of a ChatML template beside a model."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: id for id, text in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content.split('</think>')[-1] if m.role == 'assistant' "
        "else m.content) + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    settings = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token="<|im_end|>", chat_template=template)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_chat_goes_on_where_its_last_message_began(tmp_path, monkeypatch):
    """The template strips what was reasoned, so the answer stands differently in the next prompt."""
    monkeypatch.setitem(tiny_families.CONFIGS, "lfm2", tiny_families.CONFIGS["lfm2"] | dict(vocab_size=288))
    folder = with_tokenizer(tiny_families.write("lfm2", tmp_path))
    with LLM(str(folder), device="cpu", threads=2, max_context=256, kv_dtype="f32") as llm:
        messages = [{"role": "user", "content": "Good morning to you, how are you today?"}]
        first = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
        assert first.cached_tokens == 0
        messages += [
            {"role": "assistant", "content": "<think>hm</think>Well."},
            {"role": "user", "content": "And the weather?"},
        ]
        second = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
        begin = len(llm.encode_chat(messages[:1])) - len(b"1assistant\n")
        assert second.cached_tokens == begin > 40
