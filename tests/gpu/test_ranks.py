"""A model on two GPUs of this machine, a process each: python -m pytest tests/gpu/test_ranks.py -n 4

Sums of shares are rounded where the sum of all is: log-probabilities are those of one GPU within LIMIT. The kernels of a pipeline, and their
order, are those of one GPU: with --deterministic its bits are, too."""

import faulthandler
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import test_gpt_oss
import test_prefill_elsewhere
import test_ranks_served
import tiny
import tiny_adapters
import tiny_eagle3
import tiny_families
import tiny_model
import tiny_mtp
import tiny_text
from test_act_order import write as write_gptq

from gpu.machine import isa
from zse import LLM, SamplingParams
from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.errors import GroupError
from zse.formats.convert import convert
from zse.kernel import cache
from zse.runtime.cuda import list_devices

pytestmark = pytest.mark.skipif(len(list_devices()) < 2, reason="needs two GPUs")
FIRST, SECOND = "cuda:0", "cuda:1"
SECONDS = 120  # of a test: who waits for ever is ended, with where it stands
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
# bf16 between the operations. Of the largest log-probability.
LIMIT = 0.05
# Of a mixture's tokens: a router's choice that rounding changes makes a token's log-probabilities others. Of weights in fp8,
# and in int4 of groups of 128: steps of more than 8 tokens have activations in fp8, those of a reply have not.
MOST = 0.9
MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v2_lite", "deepseek_v3", "gpt_oss")


@pytest.fixture(autouse=True)
def ends(monkeypatch):
    monkeypatch.setenv("ZSE_GROUP_TIMEOUT_S", "20")
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def engine(path, size: int, **options) -> LLM:
    options = dict(device=FIRST, tensor_parallel_size=size, max_context=128, num_pages=64, max_rows=4) | options
    return LLM(str(path), **options)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 120, length).tolist()


PROMPTS = [prompt(40), prompt(7, 1), prompt(90, 2)]


def near(found: LLM, wanted: LLM, part: float = 1.0, prompts=PROMPTS) -> None:
    """Log-probabilities of prompts, of which `part` must be within LIMIT; greedy replies."""
    for ids in prompts:
        a, b = (np.array(llm.logprobs_of(ids).logprobs) for llm in (found, wanted))
        assert np.quantile(np.abs(a - b), part) < LIMIT * np.abs(b).max()
    replies = [output.token_ids for output in found.generate(prompts, GREEDY)]
    as_good(replies, wanted, part, prompts)


def as_good(replies, wanted: LLM, part: float = 1.0, prompts=PROMPTS) -> None:
    """Each token of a greedy reply is the likeliest that `wanted` has after those before it, or as likely within LIMIT; most are."""
    for ids, reply in zip(prompts, replies, strict=True):
        assert len(reply) > 0
        told, start = wanted.logprobs_of(ids + reply), len(ids) - 1
        others = [place for place, token in enumerate(reply) if told.top1[start + place] != token]
        assert len(others) < 0.5 * len(reply)
        off = np.zeros(len(reply))
        one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=1)
        for place in others:
            (best,) = wanted.generate([ids + reply[:place]], one)
            off[place] = best.logprobs[0].logprob - told.logprobs[start + place]
        assert np.quantile(off, part) < LIMIT * np.abs(told.logprobs).max()


def written(family: str, folder: Path, monkeypatch, write=None) -> Path:
    """The tiny model of a family in bf16, with heads of a size that GPUs' kernels have and experts that can be cut, and a tokenizer.
    write: as tiny.write, another way to write it."""
    folder.mkdir()
    if family == "gpt_oss":
        monkeypatch.setattr(test_gpt_oss, "DIM", 64)
        path, vocabulary = Path(test_gpt_oss.write_folder(folder, "MXFP4")), test_gpt_oss.VOCAB
    else:
        module = tiny if family in tiny.CONFIGS else tiny_families
        config = module.CONFIGS[family]
        least = {name: size for name, size in (("head_dim", 64), ("moe_intermediate_size", 96)) if name in config}
        changes = {name: size for name, size in least.items() if config[name] < size}
        monkeypatch.setitem(module.CONFIGS, family, config | changes)
        path, vocabulary = (write or module.write)(family, folder, "BF16"), config["vocab_size"]
    tiny_text.write(path, letters="".join(map(chr, range(0xC0, 0xC0 + vocabulary - 124))))
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_with_text(tmp_path_factory.mktemp("models") / "tiny")


def tiny_with_text(folder, **options) -> Path:
    model = tiny_model.write(folder, head_dim=64, **options)
    tiny_text.write(model, letters="".join(map(chr, range(0xC0, 0xC0 + tiny_model.VOCAB - 124))))
    return model


# -- tensor parallel


def test_logits_of_one_gpu(path):
    with engine(path, 1) as one, engine(path, 2) as two:
        assert two._engine.runner.runs_ahead
        near(two, one)
        sampled = SamplingParams(max_tokens=16, temperature=0.8, seed=5, repetition_penalty=1.1, logprobs=2)
        assert [len(output.logprobs) for output in two.generate(PROMPTS, sampled)] == [
            len(output.token_ids) for output in two.generate(PROMPTS, sampled)
        ]
        np.testing.assert_allclose(two.embed(PROMPTS[:2]), one.embed(PROMPTS[:2]), atol=0.02)


FAMILIES = [
    ("llama", "int4"),
    ("llama", "int8"),
    ("gemma3", "fp8"),
    ("qwen3", "int6"),
    ("gpt_oss", None),
    ("olmo2", "bf16"),
    ("mixtral", "bf16"),
    ("qwen3_moe", "bf16"),
    ("deepseek_v2_lite", "bf16"),
    ("minicpm3", "bf16"),
    ("lfm2", "bf16"),
    ("qwen3_5", "bf16"),
    ("granite_hybrid", "bf16"),
    ("nemotron_h", "bf16"),
]


@pytest.mark.parametrize("family, quant", FAMILIES)
def test_families_and_schemes(family, quant, tmp_path, monkeypatch):
    source = written(family, tmp_path / "hf", monkeypatch)
    if quant is not None:
        convert(str(source), str(tmp_path / "model.zse"), quant=quant, layout="rows")
        source = tmp_path / "model.zse"
    with engine(source, 1) as one, engine(source, 2) as two:
        near(two, one, MOST if family in MIXTURES or quant == "fp8" else 1.0)


@pytest.mark.parametrize("quantize", ["fp8", "int4"])
def test_quantized_at_the_start(quantize, tmp_path, monkeypatch):
    source = written("wide", tmp_path / "hf", monkeypatch)
    with engine(source, 1, quantize=quantize) as one, engine(source, 2, quantize=quantize) as two:
        near(two, one, MOST)


def test_whole_experts(tmp_path, monkeypatch):
    source = written("mixtral", tmp_path / "hf", monkeypatch)
    with engine(source, 1) as one, engine(source, 2, expert_parallel=True) as two:
        near(two, one, MOST)


def test_columns_in_an_order_of_their_own(tmp_path):
    """GPTQ's act-order: ranks gather the inputs of o."""
    source, _ = write_gptq(tmp_path / "gptq")
    tiny_text.write(Path(source), letters="".join(map(chr, range(0xC0, 0xC0 + 36))))
    with engine(source, 1) as one, engine(source, 2) as two:
        near(two, one)


@pytest.mark.parametrize("sent", ["", "f32", "int8"])
def test_sums_of_many_rows(sent, tmp_path, monkeypatch):
    """Rows of 1,024 numbers in steps of 512 and 1,024 tokens: parts of 2 and 4 MiB, which are sent as bf16, one way and by sections, unless it
    is asked otherwise."""
    config = tiny.CONFIGS["llama"] | dict(hidden_size=1024, max_position_embeddings=1024)
    monkeypatch.setitem(tiny.CONFIGS, "broad", config)
    monkeypatch.setenv("ZSE_ALL_REDUCE", sent)
    # Of 16 times as many inputs, sums of the size that they have in the tiny model.
    weights = {name: each * 0.25 if each.ndim > 1 else each for name, each in tiny.weights("broad").items()}
    source, prompts = tiny.save(tmp_path, config, weights, "BF16"), [prompt(900, 5), prompt(430, 6)]
    tiny_text.write(source, letters="".join(map(chr, range(0xC0, 0xC0 + 36))))
    options = dict(max_context=1024, num_pages=256, max_tokens_per_step=1024)
    with engine(source, 1, **options) as one, engine(source, 2, **options) as two:
        near(two, one, prompts=prompts)


def test_sums_with_their_norms(tmp_path, monkeypatch):
    """60 requests, rows of 5,120 numbers: products push their parts as bf16; of few rows and of prompts sums are joined, or as ever."""
    config = tiny.CONFIGS["llama"] | dict(hidden_size=5120)
    monkeypatch.setitem(tiny.CONFIGS, "broad", config)
    weights = {name: each * 0.1 if each.ndim > 1 else each for name, each in tiny.weights("broad").items()}
    source, prompts = (
        tiny.save(tmp_path, config, weights, "BF16"),
        [prompt(5 + number % 7, number) for number in range(60)],
    )
    tiny_text.write(source, letters="".join(map(chr, range(0xC0, 0xC0 + 36))))
    options = dict(num_pages=256, max_rows=64)
    monkeypatch.setenv("ZSE_JOINED_SUMS", "1")
    with engine(source, 1, **options) as one, engine(source, 2, **options) as two:
        near(two, one, prompts=prompts)


def test_adapters(tmp_path):
    """Two adapters, and none, in one slot: as good as the replies of a GPU that has the merged model."""
    base = tiny_adapters.base("llama", tmp_path / "base")
    found = [tiny_adapters.adapter("llama", seed) for seed in (1, 2)]
    folders = [tiny_adapters.write(each, tmp_path / f"a{number}") for number, each in enumerate(found)]
    merged = [base, *(tiny_adapters.merged("llama", each, tmp_path / f"m{n}") for n, each in enumerate(found))]
    for folder in merged:
        tiny_text.write(folder, letters="".join(map(chr, range(0xC0, 0xC0 + 36))))
    with engine(base, 2, adapter_slots=1) as two:
        names = ["", *(two.load_adapter(folder) for folder in folders)]
        outputs = two.generate(PROMPTS * 3, GREEDY, adapter=[name for name in names for _ in PROMPTS])
    replies = [output.token_ids for output in outputs]
    for number, folder in enumerate(merged):
        with engine(folder, 1) as one:
            as_good(replies[3 * number : 3 * number + 3], one)
    assert replies[:3] != replies[3:6] != replies[6:]


def test_a_draft_model_beside_rank_0(path):
    with engine(path, 1) as one, engine(path, 2, draft_model=str(path), draft_tokens=3) as two:
        speculator = two._engine.feature("speculation")
        speculator.room = lambda rows, most: most
        speculator.choose = lambda candidates, rows, most, round_s=0.0: [min(3, each.room) for each in candidates]
        near(two, one)
        counters = two._engine.counters()
        assert counters["accepted_tokens"] > 0.5 * counters["drafted_tokens"] > 20


@pytest.mark.parametrize("speculation", ["mtp", "eagle3"])
def test_drafts_behind_the_models_states(speculation, tmp_path, monkeypatch):
    """A block on rank 0, with its rows of a head that is cut, and an EAGLE-3 head. The next step is fed, on both GPUs, with drafts that the
    host has not read."""
    if speculation == "mtp":
        path, head = written("qwen3_5", tmp_path / "m", monkeypatch, partial(tiny_mtp.write, agrees=True)), None
    else:
        heads = dict(head_dim=64, num_attention_heads=2, num_key_value_heads=1)
        path, head = tiny_eagle3.write(tmp_path, "llama", "BF16", **heads)
        tiny_text.write(path, letters="".join(map(chr, range(0xC0, 0xC0 + tiny_eagle3.VOCAB - 124))))
    options = dict(speculation=speculation, draft_model=head and str(head), draft_tokens=3)
    with engine(path, 1) as one, engine(path, 2, **options) as two:
        speculator, fed = two._engine.feature("speculation"), []
        speculator.room = lambda rows, most: most
        speculator.choose = lambda candidates, rows, most, round_s=0.0: [min(3, each.room) for each in candidates]
        read = speculator._read_drafts
        speculator._read_drafts = lambda batch: (fed.append(batch), read(batch))
        near(two, one)
        counters = two._engine.counters()
        assert counters["drafted_tokens"] > 20 and fed
        assert counters["accepted_tokens"] > 0.03 * counters["drafted_tokens"] or speculation == "eagle3"


@pytest.mark.parametrize("family", ["minicpm3", "deepseek_v2_lite", "deepseek_v2_lite experts", "minicpm3 drafted"])
def test_attention_of_own_requests(family, tmp_path, monkeypatch):
    """More requests than rows; then conversations that go on from what their rank has cached. drafted: by the model beside rank 0; experts:
    whole ones."""
    family, _, kind = family.partition(" ")
    is_drafted = kind == "drafted"
    source, part = written(family, tmp_path / "hf", monkeypatch), MOST if family in MIXTURES else 1.0
    prompts = [prompt(length, seed) for seed, length in enumerate((40, 7, 25, 33, 16, 50, 3, 64))]
    more = dict(draft_model=str(source), draft_tokens=3) if is_drafted else dict(expert_parallel=kind == "experts")
    with engine(source, 1) as one, engine(source, 2, data_parallel_attention=True, **more) as two:
        if is_drafted:
            speculator = two._engine.feature("speculation")
            speculator.room = lambda rows, most: most
            speculator.choose = lambda candidates, rows, most, round_s=0.0: [min(3, each.room) for each in candidates]
        near(two, one, part, prompts)
        counters = two._engine.counters()
        assert not is_drafted or counters["accepted_tokens"] > 0.5 * counters["drafted_tokens"] > 20
        replies = [output.token_ids for output in two.generate(prompts, GREEDY)]
        longer = [ids + reply + prompt(5, 9) for ids, reply in zip(prompts[:4], replies, strict=False)]
        before = two._engine.counters()["prefix_hit_tokens"]
        near(two, one, part, longer)
        assert two._engine.counters()["prefix_hit_tokens"] - before > 100
        assert len(two._engine.scheduler.cache.parts) == 2 and two._engine.scheduler.check_integrity() == []


def test_own_pages_leave_for_host_memory(tmp_path, monkeypatch):
    """Of two requests a rank has pages for one: the other's go to its host memory, and the history of tokens with them on both."""
    source = written("minicpm3", tmp_path / "hf", monkeypatch)
    prompts = [prompt(length, seed) for seed, length in enumerate((40, 7, 25, 33, 16, 50, 3, 64))]
    tight = dict(num_pages=8, page_size=16, reserve_output=False, preemption="swap", cache_host_memory=1 << 26)
    with engine(source, 1) as one, engine(source, 2, data_parallel_attention=True, speculation="none", **tight) as two:
        near(two, one, 1.0, prompts)
        near(two, one, 1.0, prompts)
        counters = two._engine.counters()
        assert counters["swapped_out_pages"] and counters["swapped_in_pages"] and counters["prefix_onloaded_pages"]
        assert two._engine.scheduler.check_integrity() == []


def test_own_pages_in_files_outlast_a_restart(tmp_path, monkeypatch):
    """On both ranks, by slots of page-locked memory, with the tokens that penalties look at."""
    source = written("minicpm3", tmp_path / "hf", monkeypatch)
    prompts = [prompt(90, 30 + seed) for seed in range(4)]
    params = SamplingParams(max_tokens=8, temperature=0.0, repetition_penalty=1.3, ignore_eos=True)
    numbers = dict(data_parallel_attention=True, speculation="none", page_size=16, deterministic=True)
    numbers["max_context"] = 256  # a rank has slots of one context: 16, for two prompts of six pages
    replies = []
    for cached in (0, 4 * 89):
        with engine(source, 2, cache_disk=str(tmp_path / "kv"), **numbers) as llm:
            replies.append([output.token_ids for output in llm.generate(prompts, params)])
            assert llm.metrics()["prefix_disk_hit_tokens"] == cached
    assert replies[0] == replies[1]
    assert len(list(tmp_path.glob("kv/*/*.kv"))) == len(list(tmp_path.glob("kv/*/*/*.kv"))) == 2


# -- pipeline


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Of five layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_model, "LAYERS", 5)
        return tiny_with_text(tmp_path_factory.mktemp("deep") / "tiny")


def stages(path, size: int, **options) -> LLM:
    options = dict(max_tokens_per_step=64, max_context=192, num_pages=256, deterministic=True) | options
    options |= dict(speculation="none")
    return engine(path, 1, pipeline_parallel_size=size, **options)


REQUESTS = (1, 2, 8)


@pytest.fixture(scope="module")
def of_one_gpu(deep):
    """Replies of one GPU to as many requests as are asked at once, and vectors."""
    with stages(deep, 1, max_rows=8) as llm:
        replies = [[(each.token_ids, each.logprobs) for each in llm.generate(asked(n), told())] for n in REQUESTS]
        return replies, llm.embed(PROMPTS[:2])


def asked(count: int) -> list[list[int]]:
    return [prompt(5 + 23 * number % 90, number) for number in range(count)]


def told() -> SamplingParams:
    return SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=2)


@pytest.mark.parametrize("rows", [8, 4])
def test_stages(rows, deep, of_one_gpu):
    """The bits of one GPU, with more requests than rows as well; one is cancelled beside micro-batches under way."""
    wanted, vectors = of_one_gpu
    with stages(deep, 2, max_rows=rows) as llm:
        for count, expected in zip(REQUESTS, wanted, strict=True):
            assert [(each.token_ids, each.logprobs) for each in llm.generate(asked(count), told())] == expected
        np.testing.assert_array_equal(llm.embed(PROMPTS[:2]), vectors)
        inner, got, most = llm._engine, {}, 0
        for id, ids in enumerate(asked(8)):
            inner.submit(1000 + id, ids, GREEDY)
        while inner.has_work:
            for output in inner.step():
                assert output.error is None
                got.setdefault(output.id - 1000, []).extend(output.tokens)
            most = max(most, len(inner._flights))
            if 1 in got and len(got[1]) > 3:
                inner.cancel(1001)
        expected = [tokens for tokens, _ in wanted[-1]]
        assert all(got[id] == expected[id] for id in range(8) if id != 1)
        assert 3 < len(got[1]) < len(expected[1]) and got[1] == expected[1][: len(got[1])]
        assert most >= 2 and inner.scheduler.check_integrity() == []


@pytest.mark.parametrize("family", ["gemma3", "qwen3_moe", "minicpm3"])
def test_stages_of_families(family, tmp_path, monkeypatch):
    source, found = written(family, tmp_path / "hf", monkeypatch), []
    for size in (1, 2):
        with stages(source, size) as llm:
            found.append([(output.token_ids, output.logprobs) for output in llm.generate(PROMPTS * 2, told())])
    assert found[0] == found[1]


# -- ranks that end


def kinds(size: int) -> list[dict]:
    return [dict(tensor_parallel_size=size), dict(pipeline_parallel_size=size)]


@pytest.mark.parametrize("options", kinds(2), ids=["tensor", "pipeline"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
def test_a_rank_that_ends_or_is_silent_ends_the_group(how, options, path, monkeypatch):
    monkeypatch.setenv("ZSE_GROUP_TIMEOUT_S", "3")
    with engine(path, 1, **options) as two:
        peer = two._engine.feature("ranks")._ranks._peers[0].process.pid
        two.generate(PROMPTS, GREEDY)
        os.kill(peer, how)
        began = time.monotonic()
        with pytest.raises(GroupError, match="rank 1" if how == signal.SIGKILL else "waited 3 s"):
            two.generate(PROMPTS, GREEDY)
        assert time.monotonic() - began < 15


@pytest.mark.parametrize("options", kinds(2), ids=["tensor", "pipeline"])
def test_pages_in_files_outlast_a_restart(options, deep, tmp_path):
    """By slots of page-locked memory of each rank."""
    numbers = dict(device=FIRST, max_context=128, num_pages=64, max_rows=4, page_size=16, deterministic=True) | options
    replies = []
    for cached in (0, 89):
        with LLM(str(deep), cache_disk=str(tmp_path / "kv"), **numbers) as llm:
            replies.append(llm.generate(PROMPTS[2:], GREEDY)[0].token_ids)
            assert llm.metrics()["prefix_disk_hit_tokens"] == cached
    assert replies[0] == replies[1]
    assert len(list(tmp_path.glob("kv/*/*.kv"))) == len(list(tmp_path.glob("kv/*/*/*.kv"))) == 1


@pytest.mark.parametrize("option", ["--tp", "--pp"])
def test_a_server_replaces_ranks_that_end(option, tmp_path):
    pack = cache.pack_path(isa())
    if pack.exists():  # the server has a ZSE_HOME of its own
        (tmp_path / "kernels").mkdir(mode=0o700)
        shutil.copy2(pack, tmp_path / "kernels")
    options = option, "2", "--device", FIRST, "--num-pages", "64"
    with test_ranks_served.serving(tmp_path, *options, head_dim=64) as served:
        took = test_ranks_served.ranks_are_replaced(*served)
    assert max(seconds for _, seconds in took) < 10, took


# -- two hosts, which are this one


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_two_hosts_of_a_gpu_each(kind, deep, tmp_path, of_one_gpu):
    secret = tmp_path / "group.secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    options = dict(max_context=192, num_pages=256, max_rows=8, max_tokens_per_step=64, nnodes=2, rendezvous=address)
    options |= {"speculation": "none", "group_secret": str(secret), "join_timeout": 60, f"{kind}_parallel_size": 2}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "zse", "serve", str(deep), "--node-rank", "1", "--device", SECOND, *words]
    node = subprocess.Popen([*command, "--deterministic"], stderr=subprocess.PIPE, text=True)
    try:
        with LLM(str(deep), device=FIRST, deterministic=True, **options) as llm:
            found = llm.generate(asked(8), told())
        if kind == "pipeline":
            assert [(each.token_ids, each.logprobs) for each in found] == of_one_gpu[0][-1]
        else:
            with stages(deep, 1, max_rows=8) as one:
                as_good([each.token_ids for each in found], one, prompts=asked(8))
    finally:
        node.terminate()
        said = node.communicate(timeout=20)[1]
    assert node.returncode == 0 and "Traceback" not in said, said


# -- prompts computed elsewhere


def test_prefill_and_decode_have_a_gpu_each(tmp_path):
    """The tokens of one engine, for which the pages of long prompts come from the other process."""
    source = tiny_with_text(tmp_path / "long", context=2048)
    secret = tmp_path / "kv.secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    common = dict(max_context=2048, num_pages=512, max_rows=4, speculation="none")
    words = [word for name, value in common.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    link = ["--role", "prefill", "--kv-listen", f"unix:{tmp_path}/kv", "--kv-secret", str(secret)]
    command = [sys.executable, "-m", "zse", "serve", str(source), "--port", "0", "--device", SECOND, *words, *link]
    server = subprocess.Popen([*command, "--deterministic"], stdout=subprocess.PIPE, text=True)
    loaded = []
    try:
        assert " on http://" in server.stdout.readline()
        for more in (dict(role="decode", kv_peers=f"unix:{tmp_path}/kv", kv_secret=str(secret)), {}):
            config = EngineConfig(model=str(source), device=FIRST, deterministic=True, **common, **more)
            loaded.append(load_engine(config, Phases(lambda: 0.0)))
        asks, alone = (each.engine for each in loaded)
        test_prefill_elsewhere.until(lambda: asks.counters()["prefill_peers"] == 1, 20.0)
        prompts = [prompt(length, length) for length in (40, 257, 300, 512, 513, 777, 1500, 1900)]
        found, expected = (test_prefill_elsewhere.replies(each, prompts, timeout_s=60.0) for each in (asks, alone))
        assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in expected]
        assert not any(errors for *_, errors in found)
        counters = asks.counters()
        assert counters["prefill_failed_prompts"] == 0
        assert counters["prefill_asked_prompts"] == sum(len(ids) > 256 for ids in prompts)
        assert counters["prefill_fetched_pages"] > 50
    finally:
        server.terminate()
        for each in loaded:
            each.engine.close()
            each.source.close()
        server.communicate(timeout=20)
    assert server.returncode == 0
