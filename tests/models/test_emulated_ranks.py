"""Ranks on the kernels of a GPU, in the emulator: what a share's shapes and the rules of a GPU make of a step, and an engine that
runs ahead. What ranks exchange is added by the host here; the kernels that do it on GPUs: tests/parallel, tests/gpu."""

import ctypes
import os
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tiny
import tiny_families
import tiny_mtp
from session import Session
from test_act_order import write as write_gptq
from test_emulated_model import load_emulated

from zse.cache.files import PageFiles
from zse.cache.groups import ONE_GROUP
from zse.dtypes import ITEM_BYTES
from zse.engine import divided_files, load, memory, messages, rank_files, ranks
from zse.engine import draft as drafts
from zse.engine.config import EngineConfig
from zse.engine.core import Engine
from zse.engine.process import EngineProcess
from zse.formats.convert import convert
from zse.formats.opening import open_model
from zse.kernel import cache
from zse.kernels.gpu import peers
from zse.kernels.norm import add_rmsnorm
from zse.models import shares
from zse.models.load import plan_model
from zse.parallel.collectives.peer import PeerCollectives
from zse.parallel.group import RankGroup
from zse.runtime.args import Args
from zse.runtime.cpu import CPUDevice
from zse.runtime.device import Program
from zse.sampling.params import SamplingParams
from zse.scheduler.scheduler import Scheduler
from zse.speculative.block import BlockSpeculator
from zse_emulator import EmulateDevice

PARAMS = [["x", "ptr"], ["out", "ptr"], ["rows", "i64"], ["width", "i64"]]
ROW_PARAMS = [*PARAMS, ["place", "ptr"], ["own", "i64"], ["wanted", "ptr"]]
rings: list[queue.Queue] = [queue.Queue(), queue.Queue()]  # what each rank of a pipeline was sent
asked: set[str] = set()  # kernels of ranks
EMULATOR = threading.Lock()  # one launch at a time: kernels of two devices would stand in one stream


class HostSums:
    """A group's collectives as launches that RankDevice runs."""

    def __init__(self, group):
        self.group, self.widths = group, ()

    def all_reduce(self, recorder, x, out):
        recorder.launch("host sum", Args(x=x, out=out, rows=x.shape[0], width=x.shape[1]), 1)

    def gather(self, recorder, x, out, widths, every=False):
        kind = "gather"
        if every:
            kind = "all " + ",".join(str(width * ITEM_BYTES[x.dtype]) for width in widths)
        else:
            self.widths = tuple(widths)
        recorder.launch(f"host {kind}", Args(x=x, out=out, rows=x.shape[0], width=x.shape[1]), 1)

    def broadcast(self, recorder, x):
        recorder.launch("host broadcast", Args(x=x, out=x, rows=x.shape[0], width=1), 1)

    def spread_rows(self, recorder, x, out, own, wanted=None):
        width = x.shape[1] * ITEM_BYTES[x.dtype] // 4
        more = dict(place=own.place, own=x.shape[0], wanted=wanted)
        recorder.launch("host spread", Args(x=x, out=out, rows=out.shape[0], width=width, **more), 1)

    def collect_sums(self, recorder, x, out, own, wanted=None):
        more = dict(place=own.place, own=out.shape[0], wanted=wanted)
        recorder.launch("host collect", Args(x=x, out=out, rows=x.shape[0], width=x.shape[1], **more), 1)

    def send(self, recorder, x):
        recorder.launch("host send", Args(x=x, out=x, rows=x.shape[0], width=x.shape[1]), 1)

    def receive(self, recorder, x):
        recorder.launch("host receive", Args(x=x, out=x, rows=x.shape[0], width=x.shape[1]), 1)

    def close(self):
        pass


class JoinedSums(PeerCollectives):
    """Those between GPUs, where a sum and the norm behind it are one launch, or two of which the host is one. form: as joins() says."""

    def __init__(self, group, device, form):
        super().__init__(group, device)
        self.form, self.host = form, HostSums(group)
        self.all_reduce, self.gather, self.broadcast = self.host.all_reduce, self.host.gather, self.host.broadcast

    def _map(self, group, device, nbytes):
        self._buffer = device.alloc(nbytes, "peers")
        return [self._buffer.address] * 2

    def joins(self, rows, width):
        return self.form

    def sum_norm(self, recorder, x, part, weight, out, eps):
        recorder.launch("host sum", Args(x=part, out=part, rows=part.shape[0], width=part.shape[1]), 1)
        add_rmsnorm(recorder, x, part, None, weight, out, eps)

    def pushed_norm(self, recorder, turn, x, weight, out, eps):
        slot = self.slots(turn)[0]["theirs"]  # what was pushed there is the other rank's
        recorder.launch("host swap", Args(x=slot, out=slot, rows=peers.SMALL_VALUES, width=1), 1)
        super().pushed_norm(recorder, turn, x, weight, out, eps)


class RankDevice(EmulateDevice):
    """An emulated GPU of a rank. joined: the form of its sums, if they are JoinedSums, whose kernels wait word by word."""

    def __init__(self, group, like, joined=""):
        super().__init__(like, cache.package_variants(like), dependent=not joined)
        self.group, self.sums = group, HostSums(group)
        if joined:
            group.peers = JoinedSums(group, self, joined)
            self.sums = group.peers.host
        group.connect = lambda device: None
        group._collectives = group._staged = group.peers or self.sums

    def synchronize(self):
        with EMULATOR:
            super().synchronize()

    def alloc(self, nbytes, label="other"):
        with EMULATOR:
            return super().alloc(nbytes, label)

    def program(self, symbol):
        asked.add(symbol)
        params = ROW_PARAMS if symbol in ("host spread", "host collect") else PARAMS
        return Program(symbol, 0, {"params": params}) if symbol.startswith("host ") else super().program(symbol)

    def launch(self, symbol, slots, grid):
        if not symbol.startswith("host "):
            with EMULATOR:
                super().launch(symbol, slots, grid)
                super().synchronize()
            return
        if symbol in ("host spread", "host collect"):
            self.exchange_rows(symbol, *slots)
            return
        x, out, rows, width = slots
        if symbol.startswith("host all "):
            widths = [int(word) for word in symbol.removeprefix("host all ").split(",")]
            told = self.group.exchange(ctypes.string_at(x, rows * widths[self.group.rank]))
            parts = [np.frombuffer(data, np.uint8).reshape(rows, -1) for data in told]
            ctypes.memmove(out, np.concatenate(parts, axis=1).tobytes(), rows * sum(widths))
            return
        if symbol == "host send":
            rings[(self.group.rank + 1) % self.group.size].put(ctypes.string_at(x, 4 * rows * width))
            return
        if symbol == "host receive":
            ctypes.memmove(out, rings[self.group.rank].get(timeout=60), 4 * rows * width)
            return
        told = [np.frombuffer(data, np.float32) for data in self.group.exchange(ctypes.string_at(x, 4 * rows * width))]
        if symbol == "host swap":
            ctypes.memmove(out, told[1 - self.group.rank].tobytes(), 4 * rows * width)
        elif symbol == "host sum":
            ctypes.memmove(out, sum(told).astype(np.float32).tobytes(), 4 * rows * width)
        elif symbol == "host broadcast":
            ctypes.memmove(out, told[0].tobytes(), 4 * rows * width)
        elif not self.group.rank:
            parts = [part.reshape(rows, of) for part, of in zip(told, self.sums.widths, strict=True)]
            ctypes.memmove(out, np.concatenate(parts, axis=1).tobytes(), 4 * rows * sum(self.sums.widths))

    def exchange_rows(self, symbol, x, out, rows, width, place, own, wanted):
        """wanted: rows that do not come are poisoned, parts that are not sent never looked at."""
        wants = np.full(rows, -1) if not wanted else np.frombuffer(ctypes.string_at(wanted, 4 * rows), np.int32)
        places = np.frombuffer(ctypes.string_at(place, 4 * rows), np.int32)
        mine = np.flatnonzero(places < own)
        if symbol == "host spread":
            data = np.frombuffer(ctypes.string_at(x, 4 * own * width), np.uint32).reshape(own, width)
            told = self.group.exchange(mine.astype(np.int32).tobytes() + data[places[mine]].tobytes())
            whole, seen = np.full((rows, width), 0x7FC0DEAD, np.uint32), np.zeros(rows, int)
            for part in told:
                count = len(part) // (4 * width + 4)
                theirs = np.frombuffer(part[: 4 * count], np.int32)
                whole[theirs] = np.frombuffer(part[4 * count :], np.uint32).reshape(count, width)
                seen[theirs] += 1
            assert (seen == 1).all()
            others = np.setdiff1d(np.flatnonzero(wants >> self.group.rank & 1 == 0), mine)
            whole[others] = 0x7FC0DEAD
            ctypes.memmove(out, whole.tobytes(), whole.nbytes)
            return
        told = [np.frombuffer(data, np.float32) for data in self.group.exchange(ctypes.string_at(x, 4 * rows * width))]
        parts = [part.reshape(rows, width)[mine] for part in told]
        heard = [wants[mine, None] >> rank & 1 | int(rank == self.group.rank) for rank in range(len(parts))]
        total = sum(np.where(some, part, np.float32(0)) for some, part in zip(heard, parts, strict=True))
        assert (places[mine] == np.arange(own)).all()
        ctypes.memmove(out, total.tobytes(), total.nbytes)


def groups_of(size: int) -> list[RankGroup]:
    first = RankGroup.create(size)
    return [first, *(RankGroup.join(rank, size, os.dup(first.descriptor)) for rank in range(1, size))]


def logits_of(path, tokens, size, sizes, like="sm_90a", joined="", rows=16, **more):
    """Rank 0's logits; size 1: of one GPU. joined: as of RankDevice; rows: of the largest step; more: of plan_model, for ranks."""

    def rank_of(group):
        device = RankDevice(group, like, joined) if group else EmulateDevice(like, cache.package_variants(like))
        share = dict(rank=group.rank, ranks=size) | more if group else {}
        model, _ = load_emulated(device, path, **share)
        return Session(device, model, rows=1, max_tokens=rows, context=32, group=group).run(tokens, sizes)

    if size == 1:
        return rank_of(None)
    groups = groups_of(size)
    with ThreadPoolExecutor(size) as pool:
        found = [done.result() for done in [pool.submit(rank_of, group) for group in groups]]
    for group in groups:
        group.close()
    return found[0]


@pytest.mark.parametrize(
    "family, like, sizes, quantize",
    [
        ("llama", "sm_90a", [12, 1, 1], None),
        pytest.param("gemma3", "sm_80", [12, 1], None, marks=pytest.mark.exhaustive),
        ("llama", "sm_90a", [5, 8, 1], "int4"),
        ("olmo2", "sm_90a", [9, 1], None),
        pytest.param("minimax_m2", "sm_80", [9, 1], None, marks=pytest.mark.exhaustive),
        pytest.param("mixtral", "sm_90a", [9, 1], None, marks=pytest.mark.exhaustive),
        pytest.param("minicpm3", "sm_90a", [9, 1], None, marks=pytest.mark.exhaustive),
        pytest.param("lfm2", "sm_90a", [9, 1], None, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_5", "sm_90a", [9, 1], None, marks=pytest.mark.exhaustive),
        pytest.param("nemotron_h", "sm_90a", [9, 1], None, marks=pytest.mark.exhaustive),
    ],
)
def test_logits(family, like, sizes, quantize, kept_kernels, tmp_path, monkeypatch):
    module = tiny if family in tiny.CONFIGS else tiny_families
    if family == "nemotron_h":  # heads of a size that GPUs' kernels have
        monkeypatch.setitem(tiny_families.CONFIGS, family, tiny_families.CONFIGS[family] | dict(head_dim=64))
    path, tokens = str(module.write(family, tmp_path, "BF16")), tiny.tokens(family)[: sum(sizes)]
    if quantize:
        convert(path, str(tmp_path / "model.zse"), quant=quantize)
        path = str(tmp_path / "model.zse")
    found, wanted = (logits_of(path, tokens, size, sizes, like) for size in (2, 1))
    # bf16 between the operations: sums of shares are rounded where the sum of all is.
    assert np.abs(found - wanted).max() < 0.03 * np.abs(wanted).max()


@pytest.mark.each()
@pytest.mark.parametrize("family", ["llama", "gemma3", "cohere"])
@pytest.mark.parametrize("form", ["f32", "half"])
def test_sums_with_their_norms(form, family, kept_kernels, tmp_path):
    """As with launches of their own: bits, where parts are sent as f32. half: products of more than 16 tokens push their parts where a norm adds
    them to the stream, and of a prompt the last layer's, of the rows that are wanted, are few."""
    module = tiny if family in tiny.CONFIGS else tiny_families
    path, tokens, sizes = str(module.write(family, tmp_path, "BF16")), tiny.tokens("llama")[:26], [22, 3, 1]
    asked.clear()
    found = logits_of(path, tokens, 2, sizes, joined=form, rows=40)
    pushed = {symbol.partition("_v")[0] for symbol in asked if "push" in symbol}
    # Gemma normalizes a sum before it is added; the norm of Cohere is another kernel, behind the addition.
    few = form == "f32" or family == "gemma3"
    norms = {"llama": "pushed_norm_bf16", "cohere": "pushed_norm_none"}
    assert pushed == (set() if few else {"gemm_push_bf16_64x128", norms[family]}), pushed
    wanted = logits_of(path, tokens, 2, sizes, rows=40)
    if form == "f32":
        assert np.array_equal(found, wanted)
    assert np.abs(found - wanted).max() < 0.03 * np.abs(wanted).max()


def test_columns_in_an_order_of_their_own(kept_kernels, tmp_path, monkeypatch):
    """Every rank has all inputs of o, which it takes its columns' from."""
    monkeypatch.setattr(CPUDevice, "repacks", False)  # which fills the memory of the emulated GPU
    path, _ = write_gptq(tmp_path / "m")
    tokens, sizes = tiny.tokens("llama")[:10], [9, 1]
    found, wanted = (logits_of(path, tokens, size, sizes) for size in (2, 1))
    assert np.abs(found - wanted).max() < 0.03 * np.abs(wanted).max()


def engine_of(path, groups, wanted):
    """(rank 0's Leader, the thread of the other rank, place → its Runner)."""
    ours, theirs = socket.socketpair()
    leader = ranks.Leader(groups[0], wanted)
    leader._poll.register(ours, 1)
    leader._peers.append(
        ranks.Peer(EngineProcess(os.getpid(), ours), messages.FrameReader(ranks.ToLeader | messages.Fatal))
    )
    follower = ranks.Follower(groups[1], wanted, messages.FrameSocket(theirs, ranks.ToRank))

    def runner_of(place):
        device = RankDevice(place.group, "sm_90a")
        model, plan = load_emulated(device, path, **place.share)
        config = memory.plan_memory(wanted, plan, device, ranks=place).config
        return memory.runner_of(model)(device, model, config, ranks=place)

    other = threading.Thread(target=lambda: follower.run(runner_of(follower)), daemon=True)
    other.start()
    return leader, other, runner_of


@pytest.mark.parametrize(
    "family", ["minicpm3", pytest.param("deepseek_v2_lite", marks=[pytest.mark.long, pytest.mark.exhaustive])]
)
def test_requests_have_ranks(family, kept_kernels, tmp_path, monkeypatch):
    """--data-parallel-attention: each rank has attention and pages of one request; penalties look at the history of both on rank 0. The
    third begins with a copy of a page. Of a mixture rows go only to ranks that have one of their experts."""
    config = tiny_families.CONFIGS[family] | dict(intermediate_size=256)
    monkeypatch.setitem(tiny_families.CONFIGS, family, config)
    monkeypatch.setattr(shares, "DISPATCH_RANKS", 2)
    path, groups = str(tiny_families.write(family, tmp_path, "BF16")), groups_of(2)
    ids, options = tiny.tokens(family).tolist(), dict(tensor_parallel_size=2, data_parallel_attention=True)
    options |= dict(expert_parallel=family != "minicpm3")
    wanted = EngineConfig(model="m", max_rows=2, max_context=64, max_tokens_per_step=32, page_size=16, **options)
    leader, other, runner_of = engine_of(path, groups, wanted)
    runner = runner_of(leader)
    cache = load._divided_cache(runner.config, ONE_GROUP)
    sizes = dict(max_rows=2, max_tokens=32, max_context=64, vocab_size=runner.model.config.vocab_size)
    engine = Engine(Scheduler(num_pages=runner.config.num_pages, cache=cache, **sizes), runner)
    params = SamplingParams(max_tokens=4, temperature=0.0, repetition_penalty=1.3, ignore_eos=True)
    asked, replies, seen, copies = [ids[:14], ids[5:9], ids[5:9] + ids[20:23]], [[], [], []], set(), []
    tell = runner.pages._told
    runner.pages._told = lambda transfers: (copies.extend(transfers), tell(transfers))
    for some in ((0, 1), (2,)):
        for id in some:
            engine.submit(id, asked[id], params)
        while engine.has_work:
            for output in engine.step():
                assert output.error is None
                replies[output.id] += output.tokens
            seen |= {(rank, id) for id, rank in cache.rank_of.items()}
    assert {rank for rank, _ in seen} == {0, 1} and [kind.partition("@")[0] for kind, _, _ in copies] == ["copy"]
    leader.close()
    other.join(20)
    assert not other.is_alive()
    for prompt, reply in zip(asked, replies, strict=True):
        logits = logits_of(path, prompt + reply[:-1], 1, [len(prompt), *[1] * 3])[len(prompt) - 1 :]
        size = np.abs(logits).max()
        for number, token in enumerate(reply):
            known = list({*prompt, *reply[:number]})
            some = logits[number, known]
            logits[number, known] = np.where(some > 0, some / 1.3, some * 1.3)
            assert logits[number].max() - logits[number, token] < 0.03 * size


def test_pages_of_own_requests_come_back_from_files(kept_kernels, tmp_path, monkeypatch):
    """By slots of each rank, with the tokens that rank 0's penalties look at, after others were in the same pages."""
    path, groups = str(tiny_families.write("minicpm3", tmp_path, "BF16")), groups_of(2)
    options = dict(tensor_parallel_size=2, data_parallel_attention=True, cache_disk=str(tmp_path))
    wanted = EngineConfig(model="m", max_rows=2, max_context=64, max_tokens_per_step=32, page_size=16, **options)
    files = [PageFiles(tmp_path / str(rank), b"f" * 16, 1 << 20, 16) for rank in (0, 1)]
    files[1].left = set()
    run = ranks.Follower.run

    def with_store(follower, runner):
        follower.store = rank_files.RankStore(files[1], runner.pages, follower)
        run(follower, runner)
        follower.store.close()

    monkeypatch.setattr(ranks.Follower, "run", with_store)
    leader, other, runner_of = engine_of(path, groups, wanted)
    runner = runner_of(leader)
    cache = load._divided_cache(runner.config, ONE_GROUP)
    sizes = dict(max_rows=2, max_tokens=32, max_context=64, vocab_size=runner.model.config.vocab_size)
    engine = Engine(Scheduler(num_pages=runner.config.num_pages, cache=cache, **sizes), runner)
    disk = divided_files.DividedDisk(engine, runner.pages, files[0], leader, {1: rank_files.FilesThere([], {})})
    engine.use("disk", disk)
    ids = [tiny.tokens("minicpm3").tolist() * 4, tiny.tokens("minicpm3").tolist()[::-1] * 4]
    params = SamplingParams(max_tokens=4, temperature=0.0, repetition_penalty=2.0, ignore_eos=True)

    def ask(first):
        found, cached, on = {0: [], 1: []}, {0: 0, 1: 0}, {}
        for id in found:
            engine.submit(id, ids[id][first : first + 40], params)
        while engine.has_work:
            for output in engine.step():
                assert output.error is None
                found[output.id] += output.tokens
                cached[output.id] += output.cached_tokens
            on |= cache.rank_of
        while disk.idle(0.0) or disk.pending_bytes:
            pass
        cache.clear()
        assert engine.scheduler.check_integrity() == []
        return found, cached, on

    assert not runner.pages.can_fill_pages
    told, cached, on = ask(0)
    assert cached == {0: 0, 1: 0} and sorted(on.values()) == [0, 1] and [len(each) for each in files] == [2, 2]
    assert ask(11)[1] == {0: 0, 1: 0} and [len(each) for each in files] == [4, 4]
    assert ask(0) == (told, {0: 32, 1: 32}, on)
    engine.feature("disk").close()
    leader.close()
    other.join(20)
    assert not other.is_alive()


@pytest.mark.exhaustive
def test_whole_experts(kept_kernels, tmp_path):
    path, sizes = str(tiny_families.write("mixtral", tmp_path, "BF16")), [9, 1]
    tokens = tiny.tokens("mixtral")[: sum(sizes)]
    found, wanted = logits_of(path, tokens, 2, sizes, whole_experts=True), logits_of(path, tokens, 1, sizes)
    assert np.abs(found - wanted).max() < 0.03 * np.abs(wanted).max()


@pytest.mark.parametrize("form", ["tensor", "pipeline"])
def test_an_engine_runs_ahead(form, kept_kernels, tmp_path):
    """Ids that no host has read yet reach the other rank within the recording; both ranks have the pages and ids of their own. Of a
    pipeline two micro-batches and the first of them again are under way."""
    path, groups = str(tiny.write("llama", tmp_path, "BF16")), groups_of(2)
    size = {f"{form}_parallel_size": 2}
    wanted = EngineConfig(model="m", max_rows=2, max_context=64, max_tokens_per_step=32, **size)
    leader, other, runner_of = engine_of(path, groups, wanted)
    runner = runner_of(leader)
    scheduler = Scheduler(
        num_pages=runner.config.num_pages,
        max_rows=2,
        max_tokens=32,
        max_context=64,
        vocab_size=runner.model.config.vocab_size,
        micro_batches=runner.num_sets - 1,
    )
    engine, ids = Engine(scheduler, runner), tiny.tokens("llama").tolist()
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    replies = {0: [], 1: []}
    engine.submit(0, ids[:14], params)
    engine.submit(1, ids[5:9], params)
    most = 0
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            replies[output.id] += output.tokens
        most = max(most, len(engine._flights))
    assert most == runner.num_sets - 1 == (2 if form == "pipeline" else 1) and not any(ring.qsize() for ring in rings)
    assert runner.runs_ahead and [len(reply) for reply in replies.values()] == [5, 5]
    leader.close()
    other.join(20)
    assert not other.is_alive()
    # By teacher forcing on one GPU: each token is the likeliest after those before it, or as good.
    for start, stop, reply in ((0, 14, replies[0]), (5, 9, replies[1])):
        logits = logits_of(path, [*ids[start:stop], *reply[:-1]], 1, [stop - start, *[1] * 4])[stop - start - 1 :]
        best = logits.max(axis=1)
        assert (best - logits[range(5), reply] < 0.03 * np.abs(logits).max()).all()


@pytest.mark.long
@pytest.mark.exhaustive  # a minute of emulation
def test_an_engine_drafts(kept_kernels, tmp_path, monkeypatch):
    """A next-token block beside rank 0, with its rows of the head: steps are fed, on both ranks, with drafts that no host has read."""
    config = tiny_families.CONFIGS["glm4_moe"] | dict(moe_intermediate_size=96)
    monkeypatch.setitem(tiny_families.CONFIGS, "glm4_moe", config)
    path, groups = str(tiny_mtp.write("glm4_moe", tmp_path, "BF16", agrees=True)), groups_of(2)
    sizes = dict(max_rows=2, max_context=64, max_tokens_per_step=32, num_pages=12, draft_tokens=2)
    wanted = EngineConfig(model="m", tensor_parallel_size=2, deterministic=True, speculation="mtp", **sizes)
    leader, other, runner_of = engine_of(path, groups, wanted)
    runner = runner_of(leader)
    device, used, share = runner.device, runner.config, runner.model.share

    def of_block(source, family, quantize=None):
        return drafts.plan_drafts(wanted, source, share.whole, family).plan

    block, plan = load_emulated(device, path, planned=of_block)
    beside = drafts.draft_runner(used, device, drafts.DraftPlan(None, plan, is_block=True), block, runner)
    assert beside.num_ids == share.widths[0] < share.whole.vocab_size and beside.feeds

    def say(is_drafting: bool):
        options = dict(max_rows=2, max_tokens=32, max_context=64, vocab_size=share.whole.vocab_size)
        scheduler = Scheduler(num_pages=used.num_pages, max_drafts=used.max_drafts, **options)
        engine, fed = Engine(scheduler, runner), []
        if is_drafting:
            options = dict(num_pages=used.num_pages, page_size=16, max_tokens=32, max_context=64, share=0.2)
            speculator = BlockSpeculator(scheduler, beside, draft_tokens=2, family="gpu", runs_ahead=True, **options)
            speculator.room = lambda rows, most: most
            speculator.choose = lambda candidates, rows, most, round_s=0.0: [min(2, each.room) for each in candidates]
            speculator._can_feed = lambda requests: True
            read = speculator._read_drafts
            speculator._read_drafts = lambda batch: (fed.append(batch), read(batch))
            engine.use("speculation", speculator)
        for id, length in enumerate((9, 20)):
            params = SamplingParams(max_tokens=10, temperature=float(id), seed=3, ignore_eos=True)
            engine.submit(id, tiny.tokens("glm4_moe")[:length].tolist(), params)
        found: list[list[int]] = [[], []]
        while engine.has_work:
            for output in engine.step():
                assert output.error is None
                found[output.id] += output.tokens
        assert bool(fed) == is_drafting
        return found, scheduler.counters

    told, _ = say(False)
    found, counters = say(True)
    leader.close()
    other.join(20)
    assert found == told and 0 < counters.accepted_tokens < counters.drafted_tokens and not other.is_alive()


def test_shares_fit_the_tiles_of_a_gpu(tmp_path):
    """Where it can be, the inner width is cut at multiples of 128."""
    path = tiny.save(tmp_path, tiny.CONFIGS["llama"] | dict(intermediate_size=1152), wide(1152), "BF16")
    with open_model(str(path)) as source:
        sizes = [plan_model(source, family="gpu", rank=rank, ranks=2).config.intermediate_size for rank in range(2)]
    assert sizes == [512, 640]


def wide(inner: int) -> dict[str, np.ndarray]:
    """Weights of the tiny Llama with another inner width."""
    shapes = tiny.shapes_of(tiny.CONFIGS["llama"] | dict(intermediate_size=inner))
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
