"""Whole models on the CUDA device of this machine: every family against the float oracle, layers in the shape of a 7B
model, and the same tokens as the CPU wherever the CPU's margin is clear.

    PYTHONPATH=src python -m pytest tests/gpu/test_models.py -s

prints how far each model is from its reference. Real models: ZSE_TEST_MODELS=folder with the .gguf files.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy_model
import pytest
import test_gpt_oss
import tiny
import tiny_families
import tiny_text
from session import Session, dequantized, loss_of, quantized

from gpu.harness import device
from zse import LLM
from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.formats.convert import convert
from zse.formats.opening import open_model
from zse.models.load import load_model, plan_model, read_config
from zse.runtime.opening import open_device
from zse.sampling.params import SamplingParams

GPU = device()

# Activations, keys and values are rounded to 2**-9 of themselves at seven places a layer; the tiny models' attention is
# much sharper than a trained one's, which magnifies every error. Of the largest logit.
# Tiny heads of 32 are refused by name: Nemotron's real ones have 128.
ON_GPU = [family for family in tiny_families.FAMILIES if not family.startswith("nemotron_h")]
# Their files hold what is two products here: converted, the whole is quantized where each half would be too small for it.
JOINED_IN_FILES = ("qwen3_next", "granite_hybrid", "granite_hybrid_moe")
TINY_LIMIT = 0.05
MODELS = Path(__file__).resolve().parents[1] / "models"
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def on_gpu(family: str) -> str:
    """The family with heads that the GPU's attention has kernels for."""
    config = tiny.CONFIGS[family]
    if config.get("head_dim", 64) >= 64:
        return family
    tiny.CONFIGS[f"{family} 64"] = config | dict(head_dim=64)
    return f"{family} 64"


def gpu_model(path, **options):
    with open_model(path) as source:
        model = load_model(GPU, plan_model(source, family="gpu", **options))
        model.wait()
        return model


def error_of(logits, reference) -> float:
    """Largest difference, as a part of the largest logit."""
    assert np.isfinite(logits).all()
    return float(np.abs(logits - reference).max() / np.abs(reference).max())


RUNS = (("whole", None), ("chunks", [7, 17, 2, 14]), ("token by token", [1] * tiny.TOKENS))


def errors_of(session, ids, reference) -> dict[str, float]:
    """error_of() each way to run `ids`."""
    errors = {}
    for name, sizes in RUNS:
        session.reset()
        errors[name] = error_of(session.run(ids, sizes), reference)
    return errors


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_tiny_families(family, dtype, tmp_path):
    family = on_gpu(family)
    model = gpu_model(str(tiny.write(family, tmp_path, dtype)))
    config, ids = model.config, tiny.tokens(family)
    weights = tiny.by_role(family, config)
    if dtype == "BF16":
        weights = {
            name: (tiny.to_bf16(values).astype(np.uint32) << 16).view(np.float32) for name, values in weights.items()
        }
    reference = numpy_model.forward(config, weights, ids, np.float64)
    session = Session(GPU, model, rows=3)
    errors = errors_of(session, ids, reference)
    print(f"\n{family} {dtype}: " + ", ".join(f"{name} {value:.4f}" for name, value in errors.items()))
    assert max(errors.values()) < TINY_LIMIT
    # A token's logits do not depend on what else is in the step.
    session.reset()
    other = ids[::-1].copy()
    session.step([(0, ids[:9]), (1, other[:20])])
    mixed = session.step([(0, ids[9:10]), (1, other[20:33]), (2, ids[:12])], wanted=[0, 13, 25], max_tokens=48)
    assert error_of(mixed[[0, 2]], reference[[9, 11]]) < TINY_LIMIT


@pytest.mark.parametrize("family", ON_GPU)
def test_families_equal_transformers(family, tmp_path):
    """From Hugging Face files and from GGUF."""
    references, ids = np.load(tiny.REFERENCES), tiny.tokens(family)
    # Gemma 4's sums of unlike numbers lose 4 to 8 % to bf16 in transformers as well, which gives the families' limit where it is more.
    limit = max(TINY_LIMIT, 1.25 * float(references[f"{family} bf16"]))
    paths = [tiny_families.write(family, tmp_path, "BF16")]
    if family in tiny_families.IN_GGUF:
        paths.append(tiny_families.write_gguf(family, tmp_path))
    for path in paths:
        errors = errors_of(Session(GPU, gpu_model(str(path)), rows=2), ids, references[family])
        print(f"\n{family} {path.suffix or 'hf'}: {errors}, limit {limit}")
        assert max(errors.values()) < limit


@pytest.mark.parametrize("experts", ["F32", "MXFP4"])
def test_gpt_oss_equals_transformers(experts, tmp_path, monkeypatch):
    ids, wanted = test_gpt_oss.widened(monkeypatch), test_gpt_oss.REFERENCES["gpt_oss wide"]
    errors = errors_of(Session(GPU, gpu_model(test_gpt_oss.write(tmp_path, experts))), ids, wanted)
    print(f"\ngpt-oss {experts}: {errors}")
    assert max(errors.values()) < TINY_LIMIT


def test_gpt_oss_of_a_folder_in_an_engine(tmp_path, monkeypatch):
    """Log-probabilities of a CPU, but for a tenth of the tokens, of which rounding changes a router's choice."""
    monkeypatch.setattr(test_gpt_oss, "DIM", 64)
    path = test_gpt_oss.write_folder(tmp_path, "MXFP4")
    tiny_text.write(tmp_path, letters="".join(map(chr, range(0xC0, 0xC0 + test_gpt_oss.VOCAB - 124))))
    ids = np.random.default_rng(0).integers(3, 120, 90).tolist()
    options = dict(max_context=128, num_pages=64, max_rows=4)
    with LLM(path, device="cuda", **options) as gpu, LLM(path, device="cpu", activations="f32", **options) as cpu:
        found, wanted = (np.array(llm.logprobs_of(ids).logprobs) for llm in (gpu, cpu))
    assert np.quantile(np.abs(found - wanted), 0.9) < TINY_LIMIT * np.abs(wanted).max()


@pytest.mark.parametrize("family", ON_GPU)
def test_families_in_fp8(family, tmp_path):
    """Against the CPU with the same e4m3 weights, and against transformers. e4m3 keeps 3 bits, which costs these models of
    128 to 256 columns up to half of the largest logit, before a GPU has computed anything."""
    reference, ids = np.load(MODELS / "references.npz")[family], tiny.tokens(family)
    path = tiny_families.write(family, tmp_path, "BF16")
    convert(str(path), str(tmp_path / "fp8.zse"), quant="fp8")
    with open_device("cpu", 2) as cpu, open_model(str(tmp_path / "fp8.zse")) as source:
        model = load_model(cpu, plan_model(source, family="cpu"))
        model.wait()
        of_weights = Session(cpu, model, rows=2).run(ids).copy()
    cost = error_of(of_weights, reference)
    if family in JOINED_IN_FILES:
        session = Session(GPU, gpu_model(str(tmp_path / "fp8.zse")), rows=2)
    else:
        session = Session(GPU, gpu_model(str(path), quantize="fp8"), rows=2)
    near, far = errors_of(session, ids, of_weights), errors_of(session, ids, reference)
    print(f"\n{family} fp8: weights alone {cost:.4f}; from them {near}; from transformers {far}")
    # Up to 8 tokens activations stay bf16: a rounding 16 times finer, whose errors a model magnifies as it does those of the
    # weights. A state adds them up over 40 tokens, and the emulator has the same (Qwen3.5 0.058, of 0.31 for the weights).
    if family == "gemma4_moe":
        # Its tokens are chosen such that bf16 changes no choice of an expert with the file's numbers; with those of e4m3 it
        # does for some, 0.2 of the largest logit, the emulator's as well: half of the tokens are held to the limit.
        session.reset()
        off = np.abs(session.run(ids, [1] * len(ids)) - of_weights).max(axis=1)
        near["token by token"] = float(np.median(off) / np.abs(of_weights).max())
    assert near["token by token"] < TINY_LIMIT + (cost / 8 if model.config.has_state else 0.0)
    # With more tokens activations are rounded as the weights are: about as much again.
    assert max(far.values()) < TINY_LIMIT + 2 * cost


@pytest.mark.parametrize("kv_dtype, limit", [("int8", 0.1), ("fp8", 0.3)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_kv_in_8_bits_is_near_bf16(family, kv_dtype, limit, tmp_path):
    """Of the largest logit; a CPU loses 0.014 to 0.034 to int8 and 0.059 to 0.16 to fp8 on these models."""
    family = on_gpu(family)
    model = gpu_model(str(tiny.write(family, tmp_path, "BF16")))
    ids = tiny.tokens(family)
    expected = Session(GPU, model).run(ids)
    errors = errors_of(Session(GPU, model, kv_dtype=kv_dtype), ids, expected)
    print(f"\n{family} {kv_dtype}: " + ", ".join(f"{name} {value:.4f}" for name, value in errors.items()))
    assert 1e-4 < min(errors.values()) and max(errors.values()) < limit


def random_model(folder, kind: str, layers: int, shape: str = "qwen2.5-7b") -> str:
    out = folder / (f"{shape}-{kind}-{layers}" + ("" if kind.startswith("hf-") else ".zse"))
    subprocess.run(
        [
            sys.executable,
            str(BENCHMARKS / "make_random_model.py"),
            str(out),
            "--shape",
            shape,
            "--type",
            kind,
            "--layers",
            str(layers),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=300,
    )
    return str(out)


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_quantized_on_load(quantize, tmp_path):
    """Against the oracle on what the planes stand for: only roundings to bf16 differ."""
    model = gpu_model(str(tiny.write("wide", tmp_path)), quantize=quantize)
    ids = tiny.tokens("wide")
    error = error_of(Session(GPU, model).run(ids), numpy_model.forward(model.config, dequantized(GPU, model), ids))
    print(f"\n{quantize}: {error:.4f} of the largest logit")
    assert error < TINY_LIMIT


# bf16 between the operations: each is off by up to 2**-9.
@pytest.mark.parametrize("kind", ["bf16", "int4", "int4-fp8", "int8", "fp8"])
def test_layers_of_a_7b_shape(kind, tmp_path):
    """Two layers with 7B widths: 150 tokens at once, 40 at once, and token by token, against NumPy in f32.

    Above 8 tokens fp8 weights get fp8 activations, and int4 weights where they are asked for. What these cost is measured on the reference; the GPU may lose 15 % more
    (the tensor cores keep 14 bits of a sum of fp8 products). A closer comparison says nothing: a rounding to bf16 before
    the one to fp8 makes the reference itself differ by two thirds of what fp8 costs."""
    stored, _, narrow = kind.partition("-")
    model = gpu_model(random_model(tmp_path, stored, 2))
    ids = np.random.default_rng(3).integers(0, 150_000, 150)
    weights = dequantized(GPU, model)
    reference = numpy_model.forward(model.config, weights, ids)
    errors, losses = {}, {}
    for name, sizes in (("150", None), ("40", [40, 40, 40, 30]), ("1", [8] * 15 + [1] * 30)):
        session = Session(GPU, model, activations=narrow or None, rows=1, max_tokens=160, context=160)
        logits = session.run(ids, sizes)
        errors[name], losses[name] = error_of(logits, reference), loss_of(logits, reference)
    print(
        f"\n{kind}: "
        + ", ".join(
            f"{name} tokens a step {value:.4f} ({losses[name]:.4f} in the mean)" for name, value in errors.items()
        )
    )
    limits = dict.fromkeys(errors, 0.02)
    if kind.endswith("fp8"):
        rounded = loss_of(numpy_model.forward(model.config, weights, ids, operand=quantized), reference)
        print(f"what fp8 activations cost the reference: {rounded:.4f} in the mean")
        assert max(losses["150"], losses["40"]) < 1.15 * rounded
        limits = {"1": 0.02}
    assert all(errors[name] < limit for name, limit in limits.items())


def replies(path: str, where: str, prompts, num_tokens: int, max_context: int = 256, **options):
    """[(tokens, margin of each: log-probability of the best minus the second)] of greedy replies run as one batch."""
    loaded = load_engine(
        EngineConfig(model=path, device=where, max_context=max_context, max_rows=4, **options), Phases(lambda: 0.0)
    )
    engine = loaded.engine
    try:
        found = [([], []) for _ in prompts]
        for id, ids in enumerate(prompts):
            engine.submit(
                id, list(ids), SamplingParams(max_tokens=num_tokens, temperature=0.0, logprobs=2, ignore_eos=True)
            )
        while engine.has_work:
            for output in engine.step():
                assert output.finish != "error"
                found[output.id][0].extend(output.tokens)
                found[output.id][1].extend(entry.top[0][1] - entry.top[1][1] for entry in output.logprobs)
            assert engine.scheduler.check_integrity() == []
        return found
    finally:
        engine.close()
        loaded.source.close()


def real_models() -> list[str]:
    folder = os.environ.get("ZSE_TEST_MODELS")
    return [str(path) for path in sorted(Path(folder).glob("*.gguf"))] if folder else []


# Where the two best tokens are closer than this, another rounding may choose the other one: see benchmarks/LOG.md.
CLEAR = 0.35


def compare(cpu, gpu) -> tuple[int, int]:
    """(tokens compared, replies that were followed to their end): one is followed until an unclear choice differs."""
    compared = complete = 0
    for (expected, margins), (got, _) in zip(cpu, gpu, strict=True):
        for index, (token, margin) in enumerate(zip(expected, margins, strict=True)):
            if got[index] != token:
                assert margin < CLEAR, f"token {index} differs with a margin of {margin:.2f}"
                break
            compared += 1
        else:
            complete += 1
    return compared, complete


@pytest.mark.parametrize("path", real_models(), ids=lambda path: Path(path).name)
def test_real_models_say_what_the_cpu_says(path):
    from zse.tokenizer.load import load_tokenizer

    with open_model(path) as source:
        tokenizer = load_tokenizer(source)
        prompts = [
            tokenizer.encode(text)
            for text in (
                "The capital of France is",
                "Once upon a time, in a village by the sea,",
                "def fibonacci(n):\n",
                "Water boils at 100 degrees because " * 12,
            )
        ]
    cpu = replies(path, "cpu", prompts, 48, activations="f32")
    compared, complete = compare(cpu, replies(path, "cuda", prompts, 48))
    print(f"\n{Path(path).name}: {compared} tokens the same, {complete} of {len(prompts)} replies to the end")
    assert compared >= 48


# On a CPU 8 bits change the perplexity of SmolLM2 and Gemma 3 by up to 0.45 % (benchmarks/LOG.md).
@pytest.mark.parametrize("kv_dtype, limit", [("int8", 0.01), ("fp8", 0.01)])
@pytest.mark.parametrize("path", real_models(), ids=lambda path: Path(path).name)
def test_perplexity_with_kv_in_8_bits(path, kv_dtype, limit):
    from zse.bench.perplexity import measure
    from zse.engine.llm import LLM

    found = {}
    for dtype in ("bf16", kv_dtype):
        with LLM(path, device="cuda", kv_dtype=dtype, max_context=768, max_rows=1) as llm:
            assert llm.config.kv_dtype == dtype
            found[dtype] = measure(llm, 768)["perplexity"]
    change = found[kv_dtype] / found["bf16"] - 1
    print(f"\n{Path(path).name}: {found['bf16']:.4f} with bf16, {change:+.3%} with {kv_dtype}")
    assert abs(change) < limit


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_tiny_models_say_what_the_cpu_says(family, tmp_path):
    path = str(tiny.write(family, tmp_path))
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 150, length).tolist() for length in (1, 16, 17, 60)]
    cpu = replies(path, "cpu", prompts, 24, activations="f32", kv_dtype="f32")
    compared, complete = compare(cpu, replies(path, "cuda", prompts, 24))
    print(f"\n{family}: {compared} of {24 * len(prompts)} tokens the same, {complete} replies to the end")
    assert compared >= 24


def test_config_of_a_random_model_is_read(tmp_path):
    with open_model(random_model(tmp_path, "int4", 1)) as source:
        assert read_config(source).hidden_size == 3584
