"""What a step records on a GPU, on a null device that knows the GPU kernels' parameters: no GPU is needed."""

import pytest
import tiny

from zse import lazy
from zse.engine.config import EngineConfig
from zse.engine.memory import plan_memory
from zse.engine.runner import Runner
from zse.formats.opening import open_model
from zse.kernel import cache
from zse.kernel.emit import emit_gpu
from zse.models.load import load_model, plan_model
from zse.runtime.null import NullGPU

ARCHS = ("sm_80", "sm_90a", "gfx90a", "metal3.1")
GIB = 1 << 30


class Manifest:
    """Kernels of an architecture, staged when a launch asks for their parameters."""

    def __init__(self, arch: str):
        self.arch, self.variants = arch, cache.package_variants(arch)
        self.entries: dict = {}

    def __contains__(self, symbol):
        return symbol in self.variants

    def __iter__(self):
        return iter(self.variants)

    def __getitem__(self, symbol):
        if symbol not in self.entries:
            self.entries[symbol] = emit_gpu(self.variants[symbol], self.arch)[1]
        return self.entries[symbol]


class SmallGPU(NullGPU):
    memory_total = 24 * GIB
    memory_free = 20 * GIB


@pytest.fixture(scope="module", params=ARCHS)
def gpu(request):
    return SmallGPU(request.param, Manifest(request.param))


def runner_of(gpu, path, **options):
    source = open_model(path)
    plan = plan_model(source, family="gpu")
    default = dict(model="m", max_rows=4, max_context=256, num_pages=64 * 7, max_tokens_per_step=512)
    config = EngineConfig(**default | options)
    return Runner(gpu, load_model(gpu, plan), plan_memory(config, plan, gpu).config)


def write(family, folder, **changes):
    """A tiny model of the family with heads that the GPU's attention has kernels for."""
    return str(tiny.write(family, folder, "BF16"))


@pytest.mark.parametrize(
    "family, kv_dtype", [("llama", "bf16"), ("qwen2", "int8"), ("qwen3", "fp8"), ("gemma3", "bf16")]
)
def test_every_recording_is_complete(gpu, family, kv_dtype, tmp_path):
    runner = runner_of(gpu, write(family, tmp_path), kv_dtype=kv_dtype)
    layers, plain = runner.model.config.num_layers, not runner.model.config.post_norms
    for kind, size in (("decode", 1), ("decode", 4), ("mixed", 8), ("mixed", 64), ("mixed", 512), ("score", 16)):
        graph = runner._graph(kind, size, 0)
        symbols = [launch.symbol for launch in graph.launches]
        is_joined = gpu.arch == 90 and size == 1
        begins = is_joined and family != "gemma3"  # with two windows
        assert symbols[0] == ("begin_token" if begins else "upload")
        assert symbols[-1] == ("sample_row" if is_joined else "download")
        if kind == "decode" and plain:
            # norm, qkv, qkv_post, attention, o, norm, gate_up, down; before them pages, ids, embedding, rotations and the
            # plan (attention_simple has none), after them norm, head and two of the sampler. Of 16-bit pages attention makes
            # the heads.
            each = 7 if kv_dtype == "bf16" and not gpu.simt else 8
            before = 2 if begins else 1 + 5 - gpu.simt
            assert len(symbols) == before + each * layers + 2 + 2 + (not is_joined)


def test_step_sets_alternate_and_feed_each_other(gpu, tmp_path):
    runner = runner_of(gpu, write("llama", tmp_path))
    first, second = (runner._graph("decode", 1, number) for number in (0, 1))
    is_joined = gpu.arch == 90
    feeding = "begin_token" if is_joined else "feed_tokens"
    feeds = [next(launch for launch in graph.launches if launch.symbol == feeding).args for graph in (first, second)]
    # Either feeds from the results of all sets, in which a token in flight is named by its place.
    tokens = [each.sampler.tokens.address - each.results[1] for each in runner._sets]
    assert [feed["sampled"].address for feed in feeds] == tokens and feeds[0]["sampled"].nbytes == 2 * runner._sets[
        1
    ].results[1]
    if is_joined:
        assert [feed["host"] for feed in feeds] == [each.inputs.staging.host_address for each in runner._sets]
        assert [feed["here"].buffer for feed in feeds] == [each.inputs.staging.buffer for each in runner._sets]
        results = runner._sets[0].results[0]
        told = [graph.launches[-1].args["to_host"] for graph in (first, second)]
        assert told == 2 * [results.host_address - results.buffer.address]
        return
    downloads = [graph.launches[-1] for graph in (first, second)]
    assert [(copy.offset, copy.nbytes) for copy in downloads] == [each.results[1:] for each in runner._sets]
    uploads = [graph.launches[0].staging for graph in (first, second)]
    assert uploads == [each.inputs.staging for each in runner._sets] and uploads[0] is not uploads[1]
    assert first.launches[0].nbytes < runner._graph("mixed", 512, 0).launches[0].nbytes


def test_a_recording_looks_up_few_lazy_names(gpu, tmp_path, monkeypatch):
    """Each costs 2 us, and a first token waits for two or three recordings: 1,400 of them in a model of 24 layers made these
    twice as long as they are."""
    if gpu.arch != 90:
        return  # the others' were not measured
    runner = runner_of(gpu, write("llama", tmp_path))
    for kind, size in (("decode", 1), ("mixed", 16)):
        runner._graph(kind, size, 0)
    found, plain = [], lazy.LazyModule.__getattr__
    monkeypatch.setattr(lazy.LazyModule, "__getattr__", lambda self, name: found.append(name) or plain(self, name))
    for kind, size in (("decode", 1), ("mixed", 16)):
        runner._graph(kind, size, 1)
        assert len(found) <= 8, (kind, " ".join(found))
        found.clear()
