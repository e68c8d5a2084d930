"""Offline use with the public models: text, streams, batches, teacher forcing."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_model

sys.path.append(str(Path(__file__).parents[1] / "structured"))
import tiny_text  # noqa: E402

from zse import LLM, BeamParams, SamplingParams  # noqa: E402
from zse.errors import ConfigError, EngineError, ModelNotFoundError, RequestError  # noqa: E402

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
MESSAGES = [{"role": "user", "content": "Name three colors."}]
PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):",
    "One, two, three,",
    "Once upon a time",
    "Dear Sir or Madam,",
    "The largest planet is",
    "<html><body>",
]


@pytest.fixture(scope="module")
def smollm2(real_models):
    with LLM(real_models["smollm2"], threads=2, max_rows=8, prepare_chat=True) as llm:
        yield llm


def test_roles_are_for_servers(model):
    with pytest.raises(ConfigError, match="options of `zse serve`"):
        LLM(model, device="cpu", role="prefill", kv_listen="unix:/nowhere", kv_secret="/nowhere")


def test_stream_generate_and_chat_agree(smollm2):
    output = smollm2.generate(PROMPTS[0], GREEDY)[0]
    deltas = list(smollm2.stream(PROMPTS[0], GREEDY))
    assert "".join(delta.text for delta in deltas) == output.text and output.text
    assert [id for delta in deltas for id in delta.token_ids] == output.token_ids
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [output.finish_reason]
    assert output.prompt_token_ids == smollm2.tokenizer.encode(PROMPTS[0])
    reply = smollm2.chat(MESSAGES, GREEDY)
    assert reply.text == "".join(delta.text for delta in smollm2.stream_chat(MESSAGES, GREEDY))
    assert reply.prompt_token_ids == smollm2.encode_chat(MESSAGES)
    # A CPU's level decides between tokens that are nearly as likely, and so whether the reply ends within these.
    ended = reply.token_ids[-1] in smollm2.tokenizer.eos_ids
    assert reply.finish_reason == ("stop" if ended else "length")
    assert ended or len(reply.token_ids) == GREEDY.max_tokens
    assert "<|im_end|>" not in reply.text and "red" in reply.text.lower()


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, seed=7)])
def test_eight_at_once_give_what_each_gives_alone(smollm2, params):
    together = smollm2.generate(PROMPTS, params)
    assert [output.token_ids for output in together] == [smollm2.generate(p, params)[0].token_ids for p in PROMPTS]
    assert smollm2._engine.scheduler.check_integrity() == [] and not smollm2._engine.has_work


def test_chunks_and_preemption_do_not_change_the_reply(real_models, smollm2):
    prompts = [" ".join(PROMPTS) * 3, PROMPTS[2], PROMPTS[4]]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    expected = [output.token_ids for output in smollm2.generate(prompts, params)]
    with LLM(
        real_models["smollm2"], threads=1, max_rows=3, max_tokens_per_step=37, num_pages=12, reserve_output=False
    ) as llm:
        assert [output.token_ids for output in llm.generate(prompts, params)] == expected


def test_a_stop_string_ends_the_text_before_it_and_the_request(smollm2):
    whole = smollm2.chat(MESSAGES, GREEDY).text
    stop = whole[5:9]
    deltas = list(smollm2.stream_chat(MESSAGES, SamplingParams(max_tokens=24, temperature=0.0, stop=(stop, "zzz"))))
    assert "".join(delta.text for delta in deltas) == whole[: whole.index(stop)]
    assert deltas[-1].finish_reason == "stop" and not smollm2._engine.has_work


def test_leaving_a_stream_stops_the_request(smollm2):
    stream = smollm2.stream(PROMPTS[4], SamplingParams(max_tokens=500, ignore_eos=True))
    next(stream)
    assert smollm2._engine.has_work
    stream.close()
    assert not smollm2._engine.has_work and not smollm2._streams


def test_two_streams_in_turns(smollm2):
    alone = [smollm2.generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS[:2]]
    streams = [smollm2.stream(prompt, GREEDY) for prompt in PROMPTS[:2]]
    got = [[], []]
    while any(streams):
        for index, stream in enumerate(streams):
            if stream:
                delta = next(stream, None)
                if delta is None:
                    streams[index] = None
                else:
                    got[index] += delta.token_ids
    assert got == alone


def test_the_same_seed_gives_the_same_reply(smollm2):
    def reply(seed):
        return smollm2.generate(PROMPTS[4], SamplingParams(max_tokens=16, seed=seed))[0].token_ids

    assert reply(1) == reply(1) != reply(2)
    assert len({tuple(reply(None)) for _ in range(3)}) > 1


def test_refusals(smollm2):
    with pytest.raises(RequestError, match="context is 8192 tokens") as caught:
        smollm2.generate([[1] * 8192], GREEDY)
    assert caught.value.code == "context_length_exceeded"
    for params, param in (
        (SamplingParams(temperature=2.5), "temperature"),
        (SamplingParams(top_p=0.0), "top_p"),
        (SamplingParams(min_p=float("nan")), "min_p"),
        (SamplingParams(logprobs=21), "logprobs"),
        (SamplingParams(max_tokens=0), "max_tokens"),
        (SamplingParams(stop=("",)), "stop[0]"),
        (SamplingParams(repetition_penalty=0.0), "repetition_penalty"),
        (SamplingParams(logit_bias={1: 101.0}), "logit_bias.1"),
    ):
        with pytest.raises(RequestError) as caught:
            smollm2.stream(PROMPTS[0], params)
        assert caught.value.param == param
    with pytest.raises(RequestError):  # the second is refused: the first must not run on
        smollm2.generate([[1], [1] * 9000], GREEDY)
    assert not smollm2._engine.has_work and not smollm2._streams
    with pytest.raises(ValueError, match="2 params for 1 prompts"):
        smollm2.generate(["a"], [GREEDY, GREEDY])
    with pytest.raises(ModelNotFoundError):
        LLM("no-such-model-anywhere")
    with pytest.raises(ConfigError, match="max_rows"):
        LLM(__file__, max_rows=0)


def test_a_base_model_says_that_it_cannot_chat(real_models):
    with LLM(real_models["gemma3-270m"], max_context=512, max_rows=1) as llm:
        assert not llm.has_chat_template and llm.config.max_context == 512
        with pytest.raises(ConfigError, match="base model without a chat template"):
            llm.chat(MESSAGES)
        assert "France" in llm.generate(PROMPTS[0], GREEDY)[0].text


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("smollm2", "smollm2"),
        pytest.param("gemma3-270m", "gemma", marks=pytest.mark.exhaustive("measures of real models")),
    ],
)
def test_f32_activations_follow_the_reference(real_models, goldens, name, file):
    """Greedy tokens equal the float32 reference's as long as its margin is clear; teacher forcing agrees in nats."""
    golden = json.loads((goldens / f"{file}.json").read_text())
    with LLM(real_models[name], activations="f32", max_rows=4, max_context=2048) as llm:
        params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
        outputs = llm.generate([case["prompt_ids"] for case in golden["cases"]], params)
        for case, output in zip(golden["cases"], outputs, strict=True):
            reference = case["reference"]["output_ids"]
            margins = case["reference"].get("margins") or [1.0] * len(reference)
            clear = next((i for i, margin in enumerate(margins) if margin < 0.02), len(margins))
            assert output.token_ids[:clear] == reference[: min(clear, 24)]
        ids = golden["perplexity"]["token_ids"][:129]
        scores = llm.logprobs_of(ids)
        reference = golden["perplexity"]["nll_reference"][:128]
        # f16 KV and f16 scales: single tokens differ by up to a few hundredths of a nat, their mean by far less.
        assert sum(scores.logprobs) / 128 == pytest.approx(-sum(reference) / 128, abs=0.005)
        assert llm.perplexity(ids) == pytest.approx(math.exp(-sum(scores.logprobs) / 128))
        starts = [(start, len(logits)) for start, logits in llm.logits_of(ids)]
        assert sum(count for _, count in starts) == 129 and starts[0][0] == 0


def test_the_start_path_imports_no_heavy_package(real_models):
    script = (
        "import sys; from zse import LLM, BeamParams, SamplingParams\n"
        "llm = LLM(sys.argv[1], max_rows=1)\n"
        "text = next(llm.stream('Hello', SamplingParams(max_tokens=1)))\n"
        "heavy = {'numpy', 'tokenizers', 'uvicorn', 'asyncio', 'huggingface_hub', 'torch', 'jinja2'}\n"
        "heavy.add('zse.kernel.ir')\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "llm.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(real_models["smollm2"])], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_prompt_logprobs(smollm2):
    params = [SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=top) for top in (0, 2, None)]
    none, two, without = smollm2.generate([PROMPTS[0]] * 3, params)
    expected = smollm2.logprobs_of(none.prompt_token_ids).logprobs
    assert [entry.logprob for entry in none.prompt_logprobs[1:]] == pytest.approx(expected, abs=1e-5)
    assert two.prompt_logprobs[0] is None and [len(entry.top) for entry in two.prompt_logprobs[1:]] == [2] * 4
    assert without.prompt_logprobs is None and none.token_ids == two.token_ids == without.token_ids
    with pytest.raises(RequestError, match="cannot be streamed"):
        smollm2.stream("a", params[0])


def test_beam_search(smollm2):
    """The best reply of several beams is likelier than the greedy one; a single beam is the greedy one."""
    one, several = (
        smollm2.beam_search(PROMPTS[:2], BeamParams(beam_width=width, max_tokens=8, length_penalty=0.0))
        for width in (1, 4)
    )
    greedy = smollm2.generate(PROMPTS[:2], SamplingParams(max_tokens=8, temperature=0.0))
    for (alone,), found, reply in zip(one, several, greedy, strict=True):
        assert (alone.token_ids, alone.text) == (reply.token_ids, reply.text)
        assert len(found) == 4 and [reply.score for reply in found] == sorted((r.score for r in found), reverse=True)
        assert found[0].score >= alone.score and len({tuple(reply.token_ids) for reply in found}) == 4
        assert sum(entry.logprob for entry in found[0].logprobs) == pytest.approx(found[0].logprob, abs=1e-4)
    assert not smollm2._engine.has_work


def test_embeddings_and_scores(smollm2):
    texts = ["A cat sleeps on the sofa.", "A kitten naps on the couch.", "The stock market fell by two percent."]
    stream = smollm2.stream(PROMPTS[4], GREEDY)
    first = next(stream)
    vectors = smollm2.embed(texts, pooling="mean")
    assert vectors.shape == (3, 576) and str(vectors.dtype) == "float32"
    like = vectors @ vectors.T
    assert like.diagonal() == pytest.approx(1, abs=1e-5) and like[0, 1] > like[0, 2]
    assert "".join([first.text, *(delta.text for delta in stream)]) == smollm2.generate(PROMPTS[4], GREEDY)[0].text
    ids = smollm2.tokenizer.encode(PROMPTS[0])
    ((paris, rome),) = smollm2.score(PROMPTS[0], [" Paris", smollm2.tokenizer.encode(" Rome")[0]])
    expected = smollm2.logprobs_of([*ids, smollm2.tokenizer.encode(" Paris")[0]]).logprobs[-1]
    assert paris == pytest.approx(expected, abs=1e-4) and paris > rome
    with pytest.raises(RequestError, match="tokens, not one"):
        smollm2.score("a", ["antidisestablishmentarianism"])
    for targets, part in (([], "no target"), ([1] * 1025, "at most 1024"), ([-1], "not a token id")):
        with pytest.raises(RequestError, match=part):
            smollm2.score("a", targets)
    with pytest.raises(RequestError, match="vocabulary"):
        smollm2.embed([[1], [10**6]])
    assert not smollm2._engine.has_work and smollm2._engine.take_completed() == []


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """One whose embedding is padded beyond its tokenizer, with room for one request alone."""
    folder = tiny_model.write(tmp_path_factory.mktemp("padded") / "tiny")
    tiny_text.write(folder)
    with LLM(folder, device="cpu", threads=1, max_context=128, max_rows=1, num_pages=8, prefix_cache=False) as llm:
        assert llm.tokenizer.vocab_size < llm.vocab_size
        yield llm


def test_a_stream_that_nobody_reads_stops_its_reply(tiny):
    for leave in (lambda stream: stream.close(), lambda stream: None):
        leave(tiny.stream([5, 6], GREEDY))
        assert not tiny._engine.has_work and not tiny._streams


def test_logits_make_room_for_what_their_reader_asks_beside(tiny):
    """Who reads them has all pages; then it computes them again."""
    ids, others = list(range(3, 103)), list(range(103, 3, -1))
    asked = {
        "embed": lambda: tiny.embed(others).tolist(),
        "generate": lambda: tiny.generate([others], SamplingParams(max_tokens=4, temperature=0))[0].token_ids,
        "logprobs": lambda: tiny.logprobs_of(others),
        "beams": lambda: tiny.beam_search([others], BeamParams(beam_width=1, max_tokens=2)),
    }
    alone = {name: ask() for name, ask in asked.items()}
    wanted = list(tiny.logits_of(ids))
    assert len(wanted) > 3
    for name, ask in asked.items():
        reader = tiny.logits_of(ids)
        found = [next(reader), next(reader)]
        assert ask() == alone[name]
        found += reader
        assert [start for start, _ in found] == [start for start, _ in wanted]
        assert all((one == other).all() for (_, one), (_, other) in zip(found, wanted, strict=True))
        assert tiny._engine.scheduler.check_integrity() == [] and not tiny._engine.has_work
    pairs = list(zip(tiny.logits_of(ids), tiny.logits_of(ids), strict=True))
    assert all((one == other).all() for (_, one), (_, other) in pairs) and len(pairs) == len(wanted)


def test_beams_of_ids_past_the_tokenizer(tiny):
    found = tiny.beam_search([[5, 6, 7]], BeamParams(beam_width=4, max_tokens=20, ignore_eos=True))[0]
    known = [[id for id in one.token_ids if id < tiny.tokenizer.vocab_size] for one in found]
    assert any(len(ids) < len(one.token_ids) for ids, one in zip(known, found, strict=True))
    assert [one.text for one in found] == [tiny.tokenizer.decode(ids, skip_special=True) for ids in known]


def test_prompts_of_any_iterable(tiny):
    two = SamplingParams(max_tokens=2, temperature=0)
    wanted = [output.token_ids for output in tiny.generate([[5, 6], [7, 8]], two)]
    for prompts in (np.array([[5, 6], [7, 8]]), (ids for ids in [(5, 6), range(7, 9)])):
        assert [output.token_ids for output in tiny.generate(prompts, (two for _ in range(2)))] == wanted
    (output,) = tiny.generate(np.array([5, 6]), two)
    assert output.token_ids == wanted[0] and json.dumps(output.prompt_token_ids) == "[5, 6]"
    assert tiny.embed([]).shape == (0, tiny_model.HIDDEN) and tiny.generate([]) == []
    assert tiny.score([[5]], np.array([6])) == tiny.score([[5]], [6])
    for call, text in (
        (lambda: tiny.generate("a", BeamParams()), "params is of type BeamParams, not SamplingParams"),
        (lambda: tiny.stream("a", {"max_tokens": 2}), "params is of type str, not SamplingParams"),
        (lambda: tiny.beam_search("a", two), "params is of type SamplingParams, not BeamParams"),
        (lambda: tiny.generate("a", two, adapter=None), "adapter is of type NoneType, not str"),
    ):
        with pytest.raises(TypeError, match=text):
            call()
    with pytest.raises(ValueError, match="1 adapter for 2 prompts"):
        tiny.generate(["a", "b"], two, adapter=[""])
    assert not tiny._engine.has_work


def test_nothing_runs_in_one_that_is_closed(model):
    llm = LLM(model, device="cpu", threads=1, max_context=64)
    stream = llm.stream([5, 6], GREEDY)
    llm.close()
    llm.close()
    calls = [lambda: next(stream), lambda: llm.embed([[5]]), lambda: llm.perplexity([5, 6]), llm.metrics]
    for call in [*calls, lambda: llm.generate([[5]], GREEDY)]:
        with pytest.raises(EngineError, match="this LLM is closed"):
            call()


def test_a_search_that_waited_for_the_disk_is_refused(tmp_path):
    """Its first pages are there, and so it is read for before the scheduler sees how long it is."""
    options = dict(device="cpu", threads=1, max_context=128, max_rows=1, page_size=16, cache_disk=str(tmp_path / "kv"))
    model, ids = tiny_model.write(tmp_path / "tiny"), [3 + index % 140 for index in range(200)]
    tiny_text.write(model)
    with LLM(model, **options) as llm:
        llm.generate([ids[:100]], SamplingParams(max_tokens=1))
    with LLM(model, **options) as llm:
        stream = llm.stream([5, 6], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
        with pytest.raises(RequestError, match="this model's context is 128 tokens; the request has 200"):
            llm.beam_search([ids], BeamParams(max_tokens=4))
        assert sum(len(delta.token_ids) for delta in stream) == 2 and not llm._engine.has_work


def test_a_stop_string_ends_the_tokens_too(tmp_path):
    """Where the model drafts for itself, tokens behind the stop string come in the same step."""
    model = tiny_model.write(tmp_path / "tiny")
    tiny_text.write(model)
    options = dict(device="cpu", threads=1, max_context=128, max_rows=1, activations="f32", kv_dtype="f32")
    found, steps = [], []
    for more in (dict(speculation="none"), dict(draft_model=str(model), draft_tokens=5)):
        with LLM(model, **options, **more) as llm:
            if "draft_model" in more:
                speculator = llm._engine.feature("speculation")
                speculator.choose = lambda candidates, *_, **__: [min(5, each.room) for each in candidates]
            before, replies = llm.metrics()["steps"], []
            for seed in range(12):
                params = SamplingParams(max_tokens=40, seed=seed, logprobs=0, stop=tuple("aeioulnrst"), ignore_eos=True)
                (output,) = llm.generate([[3 + seed, 5, 6]], params)
                deltas = list(llm.stream([3 + seed, 5, 6], params))
                assert [id for delta in deltas for id in delta.token_ids] == output.token_ids
                assert sum(len(delta.logprobs) for delta in deltas) == len(output.logprobs) == len(output.token_ids)
                replies.append((output.text, output.token_ids, output.finish_reason))
            found.append(replies)
            steps.append(llm.metrics()["steps"] - before)
    assert found[0] == found[1] and steps[1] < 0.6 * steps[0]
    assert sum(reason == "stop" for _, _, reason in found[0]) > 6
