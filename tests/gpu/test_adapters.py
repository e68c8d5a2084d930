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
from zse.lora.targets import Targets, read_image
from zse.runtime.cpu import CPUDevice
from zse.sampling.params import SamplingParams
from zse.scheduler.options import RequestOptions


def image(model, path):
    return read_image(str(path), Targets(model.config), 16)


@pytest.mark.parametrize("quantize", [None, "int4", "int8", "fp8"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi4_mini", "gemma2", "deepseek_v2_lite"])
def test_logits_are_those_of_the_merged_model(family, quantize, tmp_path):
    """Two adapters and none in one batch, as a prompt and token by token. Quantized bases: an adapter moves the logits as it moves those of the
    same base with merged weights, whose quantization differs a little."""
    family = on_gpu(family) if family in tiny.FAMILIES else family
    found = [tiny_adapters.adapter(family, seed) for seed in (1, 2)]
    model = gpu_model(str(tiny_adapters.base(family, tmp_path / "base")), quantize=quantize)
    images = [image(model, tiny_adapters.write(each, tmp_path / f"a{number}")) for number, each in enumerate(found)]
    session = Session(GPU, model, rows=3, max_tokens=128, adapters=images)
    session.adapt(images[1].id, images[0].id, None)
    ids = tiny.tokens(family)
    logits = session.step([(row, ids[:20]) for row in range(3)])
    rows = [[logits[20 * row : 20 * row + 20]] for row in range(3)]
    for token in ids[20:]:
        step = session.step([(row, [token]) for row in range(3)])
        for row in range(3):
            rows[row].append(step[row : row + 1])
    limit = {None: 1, "int8": 1.5, "fp8": 3, "int4": 6}[quantize] * TINY_LIMIT
    for row, each in enumerate((found[1], found[0], {})):
        with CPUDevice(2) as cpu:
            merged = load(cpu, str(tiny_adapters.merged(family, each, tmp_path / f"m{row}")))
            expected = Session(cpu, merged).run(ids)
        error = error_of(np.concatenate(rows[row]), expected)
        print(f"\n{family} {quantize} row {row}: {error:.4f}")
        assert error < limit


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
