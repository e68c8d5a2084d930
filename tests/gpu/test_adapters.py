"""LoRA adapters on the CUDA device of this machine: logits against models with the adapter merged into their weights, and an engine with
several of them, run ahead and captured.

    PYTHONPATH=src python -m pytest tests/gpu/test_adapters.py -s
"""

import numpy as np
import pytest
import tiny
import tiny_adapters
from session import Session, load
from tiny_engines import TinyEngines

from gpu.test_models import GPU, TINY_LIMIT, error_of, gpu_model, on_gpu
from zse.formats.convert import convert
from zse.lora.targets import Targets, read_image
from zse.runtime.cpu import CPUDevice
from zse.sampling.params import SamplingParams
from zse.scheduler.options import RequestOptions

FAMILIES = ["llama", "qwen3", "phi4_mini", "gemma2", "deepseek_v2_lite"]


def image(model, path):
    return read_image(str(path), Targets(model.config), 16)


def run_rows(session, ids, first: int, after: int) -> list[np.ndarray]:
    """The logits of three rows that read `ids` side by side: `first` tokens of each, then `after` at a time."""
    rows: list[list] = [[], [], []]
    cuts = [0, first, *range(first + after, len(ids), after), len(ids)]
    for begin, end in zip(cuts, cuts[1:], strict=False):
        logits = session.step([(row, ids[begin:end]) for row in range(3)])
        for row in range(3):
            rows[row].append(logits[(end - begin) * row : (end - begin) * (row + 1)])
    return [np.concatenate(row) for row in rows]


def with_adapters(device, model, paths, **options):
    """A session whose rows have the second adapter, the first, and none."""
    images = [image(model, path) for path in paths]
    session = Session(device, model, rows=3, max_tokens=128, adapters=images, **options)
    session.adapt(images[1].id, images[0].id, None)
    return session


@pytest.fixture
def made(family, tmp_path):
    """(the family's name here, its folder, two adapters, their folders)."""
    name = on_gpu(family) if family in tiny.FAMILIES else family
    found = [tiny_adapters.adapter(name, seed) for seed in (1, 2)]
    paths = [tiny_adapters.write(each, tmp_path / f"a{number}") for number, each in enumerate(found)]
    return name, tiny_adapters.base(name, tmp_path / "base"), found, paths


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_merged_model(family, made, tmp_path):
    """Two adapters and none in one batch, as a prompt and token by token."""
    name, base, found, paths = made
    ids = tiny.tokens(name)
    rows = run_rows(with_adapters(GPU, gpu_model(str(base)), paths), ids, 20, 1)
    for row, each in enumerate((found[1], found[0], {})):
        with CPUDevice(2) as cpu:
            merged = load(cpu, str(tiny_adapters.merged(name, each, tmp_path / f"m{row}")))
            error = error_of(rows[row], Session(cpu, merged).run(ids))
        print(f"\n{name} row {row}: {error:.4f}")
        assert error < TINY_LIMIT


@pytest.mark.parametrize("quantize", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_on_a_quantized_base_are_those_of_a_cpu(family, quantize, made, tmp_path):
    """Of the same file with the same adapters, f32 between the operations. Two tokens of a row at a time: with more than 8 in a step, fp8
    weights have activations in fp8. A router's choice that bf16 changes makes a token's logits others: of mixtures a tenth may be."""
    name, base, _, paths = made
    convert(str(base), str(tmp_path / "base.zse"), quant=quantize)
    ids = tiny.tokens(name)
    with CPUDevice(2) as cpu:
        session = with_adapters(cpu, load(cpu, str(tmp_path / "base.zse")), paths, activations="f32")
        expected = run_rows(session, ids, 20, 1)
    rows = run_rows(with_adapters(GPU, gpu_model(str(tmp_path / "base.zse")), paths), ids, 2, 2)
    for row in range(3):
        off = np.abs(rows[row] - expected[row]).max(1) / np.abs(expected[row]).max()
        print(f"\n{name} {quantize} row {row}: {off.max():.4f}, nine of ten tokens {np.quantile(off, 0.9):.4f}")
        assert (np.quantile(off, 0.9) if family == "deepseek_v2_lite" else off.max()) < TINY_LIMIT


def test_an_engine_with_more_adapters_than_slots(tmp_path):
    """Replies of three adapters over two slots are those of engines that have one adapter alone."""
    base = tiny_adapters.base(on_gpu("llama"), tmp_path / "base")
    folders = [
        tiny_adapters.write(tiny_adapters.adapter(on_gpu("llama"), seed), tmp_path / f"a{seed}") for seed in (1, 2, 3)
    ]
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    ids = tiny.tokens(on_gpu("llama")).tolist()

    def replies(engine, asked):
        found = {}
        for id, (prompt, adapter) in enumerate(asked):
            engine.submit(id, prompt, params, RequestOptions(adapter=adapter))
        while engine.has_work:
            for output in engine.step():
                assert output.finish != "error", output.error
                found.setdefault(output.id, []).extend(output.tokens)
        return found

    options = dict(device="cuda", activations="auto", max_rows=4, deterministic=True, speculation="none")
    with TinyEngines(base, **options) as engines:
        together = engines(adapter_slots=2)
        names = [together.feature("adapters").load(str(folder)).id for folder in folders]
        asked = [(ids[: 10 + 3 * number], names[number % 3]) for number in range(9)]
        got = replies(together, asked)
        assert together.counters()["adapter_loads"] >= 3
        for number, request in enumerate(asked):
            alone = engines(adapter_slots=1)
            alone.feature("adapters").load(str(folders[number % 3]))
            assert replies(alone, [request])[0] == got[number]
