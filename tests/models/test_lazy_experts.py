"""Experts that are read when a token first chooses them: the same bits, and no page of memory for those that none chooses."""

import ctypes
import mmap
import os
import sys

import numpy as np
import pytest
import tiny
import tiny_families
from session import Session

from zse.bench.speed import greedy
from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.memory import plan_memory
from zse.engine.metrics import Phases
from zse.errors import ConfigError, FormatError
from zse.formats.convert import convert
from zse.formats.opening import open_model
from zse.models.load import load_model, plan_model
from zse.runtime.null import NullGPU

# Experts of 32 pages and more, of which a few tokens choose some.
WIDE = dict(hidden_size=256, moe_intermediate_size=256, num_experts=16, num_experts_per_tok=2)


@pytest.fixture(scope="module", params=["zse int4", "zse bf16", "gguf"])
def path(request, tmp_path_factory):
    folder, kind = tmp_path_factory.mktemp("moe"), request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_families.CONFIGS, "qwen3_moe", tiny_families.CONFIGS["qwen3_moe"] | WIDE)
        if kind == "gguf":
            return str(tiny_families.write_gguf("qwen3_moe", folder))
        written = str(tiny_families.write("qwen3_moe", folder, "BF16"))
    convert(written, folder / "m.zse", kind.split()[1], layout="r16")
    return str(folder / "m.zse")


def loaded(device, source, lazy):
    model = load_model(device, plan_model(source)._replace(lazy_experts=lazy))
    model.wait()
    return model


def resident_pages(address: int, nbytes: int) -> list[int]:
    """Of the pages that lie wholly inside: 1 for each that has memory (mincore)."""
    page = mmap.PAGESIZE
    first, last = -(-address // page) * page, (address + nbytes) // page * page
    found = (ctypes.c_ubyte * ((last - first) // page))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(last - first), found) == 0, os.strerror(
        ctypes.get_errno()
    )
    return [each & 1 for each in found]


def expert_pages(model, layer: int, expert: int) -> list[int]:
    pages = []
    for name in ("gate_up_exps", "down_exps"):
        for plane in model.weights[f"layers.{layer}.{name}"].planes.values():
            each = plane.nbytes // model.config.moe.num_experts
            pages += resident_pages(plane.address + expert * each, each)
    return pages


def test_a_chunk_that_wants_no_logits_reads_no_experts_of_the_last_layer(device, path):
    """Nothing is computed of it behind attention (zse.plan.forward.LastLayer)."""
    with open_model(path) as source:
        model = loaded(device, source, True)
        Session(device, model).step([(0, tiny.tokens("qwen3_moe")[:9])], wanted=[], max_tokens=9)
        lazy, last = model.lazy_experts, model.config.num_layers - 1
        missing = [len(lazy._missing[layer]) for layer in sorted(lazy._stacks)]
        assert missing[-1] == 16 > max(missing[:-1]) and lazy.num_read == sum(16 - each for each in missing) > 0
        assert max(lazy._stacks) == last


@pytest.mark.skipif(sys.platform != "linux", reason="mincore of memory that was never touched")
def test_experts_that_no_token_chooses_never_become_resident(device, path):
    ids = tiny.tokens("qwen3_moe")[:9]
    with open_model(path) as source:
        expected = Session(device, loaded(device, source, False)).run(ids, [6, 1, 1, 1])
        model = loaded(device, source, True)
        layers, experts = model.config.num_layers, model.config.moe.num_experts
        lazy, every = model.lazy_experts, [(layer, expert) for layer in range(layers) for expert in range(experts)]
        assert lazy.num_read == 0 and not any(any(expert_pages(model, *each)) for each in every)
        logits = Session(device, model).run(ids, [6, 1, 1, 1])
        np.testing.assert_array_equal(logits, expected)
        unused = [each for each in every if each[1] in lazy._missing[each[0]]]
        assert 0 < len(unused) < len(every) and lazy.num_read == len(every) - len(unused)
        for each in every:
            pages = expert_pages(model, *each)
            assert len(pages) >= 16 and set(pages) == {0 if each in unused else 1}, each
        mine = sum(
            plane.nbytes
            for layer in range(layers)
            for plane in model.weights[f"layers.{layer}.down_exps"].planes.values()
        )
        assert mine > 0 and path not in open("/proc/self/maps", encoding="utf-8").read()
        before = lazy.bytes_read
        np.testing.assert_array_equal(Session(device, model).run(ids, [6, 1, 1, 1]), expected)
        assert lazy.bytes_read == before  # nothing is read twice


def test_a_file_that_changes_under_lazy_experts_is_an_error(device, path):
    with open_model(path) as source:
        model = loaded(device, source, True)
        session = Session(device, model)
        os.utime(path, ns=(1, 1))
        with pytest.raises(FormatError, match="changed while it was in use"):
            session.run(tiny.tokens("qwen3_moe")[:3])


def test_an_engine_reads_experts_as_they_are_chosen(path):
    said = []
    for lazy in (False, True):
        config = EngineConfig(model=path, device="cpu", threads=2, max_rows=2, lazy_experts=lazy)
        made = load_engine(config, Phases(lambda: 0.0))
        engine = made.engine
        engine.submit(0, tiny.tokens("qwen3_moe").tolist()[:5], greedy(6))
        engine.submit(1, tiny.tokens("qwen3_moe").tolist()[3:12], greedy(4))
        said.append({})
        while engine.has_work:
            for output in engine.step():
                assert output.finish != "error"
                said[-1][output.id] = said[-1].get(output.id, []) + output.tokens
        experts = engine.runner.model.lazy_experts
        assert (experts is not None and 0 < experts.num_read) == lazy
        engine.close()
        made.source.close()
    assert said[0] == said[1]


def test_a_gpu_refuses(path):
    with open_model(path) as source, pytest.raises(ConfigError, match="lazy_experts is for a CPU"):
        plan_memory(EngineConfig(model="m", lazy_experts=True), plan_model(source, family="gpu"), NullGPU())
