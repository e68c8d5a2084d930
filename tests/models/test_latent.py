"""Multi-head latent attention: what the cache holds, 8-bit latents, both forms of files, the prefix cache, preemption, bad input."""

import json

import numpy as np
import pytest
import tiny
import tiny_families
from formats_build import safetensors
from session import Session, load
from test_model_families import REFERENCES

from zse.bench import check
from zse.cache.layout import block_nbytes
from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.errors import FormatError, UnsupportedError
from zse.formats.convert import convert
from zse.formats.opening import open_model
from zse.models.load import plan_model
from zse.quant.pack import bf16_to_f32, e4m3_to_f32, f32_to_bf16, f32_to_e4m3
from zse.sampling.params import SamplingParams

FAMILY = "minicpm3"
CONFIG = tiny_families.CONFIGS[FAMILY]
WIDTH = CONFIG["kv_lora_rank"] + CONFIG["qk_rope_head_dim"]


@pytest.fixture
def path(tmp_path):
    return str(tiny_families.write(FAMILY, tmp_path))


@pytest.mark.parametrize(("dtype", "item", "scales"), [("f16", 2, 0), ("f32", 4, 0), ("int8", 1, 8), ("fp8", 1, 8)])
def test_a_token_is_its_latent(dtype, item, scales, path):
    """One vector a layer, in 8 bits with two scales: not keys and values of heads."""
    with open_model(path) as source:
        config = plan_model(source).config
    assert block_nbytes(config, dtype) == 16 * config.num_layers * (WIDTH * item + scales)


@pytest.mark.parametrize(("dtype", "limit"), [("f16", 1e-3), ("int8", 0.02), ("fp8", 0.06)])
def test_narrow_latents(dtype, limit, path, device):
    """f16 rounds by 2^-12, int8 by 2^-8 of a token's largest number, e4m3 by 2^-4: an eighth of that is left of the logits."""
    ids, wanted = tiny.tokens(FAMILY), REFERENCES[FAMILY]
    session = Session(device, load(device, path), kv_dtype=dtype)
    got = session.run(ids)
    assert np.abs(got - wanted).mean() < limit * np.abs(wanted).mean()
    session.reset()
    np.testing.assert_array_equal(session.run(ids, [7, 17, 2, 14]), got)


def test_many_keys_between_threads(path, device):
    """Segments of 256 keys that blocks of their own compute, against those that follow one another."""
    ids = np.resize(tiny.tokens(FAMILY), 600)
    session = Session(device, load(device, path), context=640, max_tokens=640)
    whole = session.run(ids)
    session.reset()
    tail = session.run(ids, [590, *[1] * 10])[590:]
    np.testing.assert_allclose(tail, whole[590:], rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize(("type", "limit"), [("F32", 1e-5), ("Q8_0", 0.02)])
def test_gguf_with_two_matrices(type, limit, tmp_path, device):
    """As llama.cpp writes them since 2025, also quantized, where they become f16."""
    gguf = tiny_families.write_gguf(FAMILY, tmp_path, split=type)
    wanted = REFERENCES[FAMILY]
    for file in (gguf, tmp_path / "kept.zse"):
        got = Session(device, load(device, str(file))).run(tiny.tokens(FAMILY))
        assert np.abs(got - wanted).mean() < limit * np.abs(wanted).mean()
        if file is gguf:
            convert(str(gguf), str(tmp_path / "kept.zse"))


def test_matrices_of_latents_stay_dense(path, tmp_path, device):
    """A policy does not reach them, on the way into a file and out of one."""
    convert(path, str(tmp_path / "model.zse"), quant="int8")
    for file, quantize in ((path, "int8"), (str(tmp_path / "model.zse"), None)):
        model = load(device, file, quantize=quantize)
        schemes = {name.rpartition(".")[2]: str(weight.scheme) for name, weight in model.weights.items()}
        assert schemes["k_b"] == schemes["v_b"] == "f32"
        assert schemes["q_b"].startswith("int8")


def replies(path: str, **options) -> tuple[list[list[int]], dict]:
    """Greedy tokens of three prompts with a common beginning, and the counters."""
    options = dict(max_rows=3, max_tokens_per_step=16, activations="f32") | options
    loaded = load_engine(EngineConfig(model=path, device="cpu", threads=2, **options), Phases(lambda: 0.0))
    ids, engine, said = tiny.tokens(FAMILY).tolist(), loaded.engine, {}
    try:
        for id, prompt in enumerate((ids[:30], [*ids[:20], 7, 8, 9], ids[:33])):
            engine.submit(id, prompt, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
            if not id:
                engine.step()
                engine.step()
        while engine.has_work:
            for output in engine.step():
                assert output.finish != "error"
                said.setdefault(output.id, []).extend(output.tokens)
            assert engine.scheduler.check_integrity() == []
        return [said[id] for id in sorted(said)], engine.scheduler.snapshot()
    finally:
        engine.close()
        loaded.source.close()


@pytest.mark.parametrize("kv_dtype", ["f32", "int8"])
def test_prefixes_are_shared_and_preempted_requests_go_on(kv_dtype, path):
    plain, _ = replies(path, prefix_cache=False, kv_dtype=kv_dtype)
    shared, counters = replies(path, kv_dtype=kv_dtype)
    assert shared == plain and counters["prefix_hits"] > 0
    tight, counters = replies(path, kv_dtype=kv_dtype, reserve_output=False, num_pages=5)
    assert tight == plain and counters["preemptions"] > 0


def test_every_tensor_is_read(path):
    found = check.tensors(path, "cpu")
    assert not found["not_read"] and found["read"] == 1 + 1 + CONFIG["num_hidden_layers"] * 13


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        (dict(v_head_dim=32), FormatError, "kv_b_proj.weight: has shape .*expected 4 heads of 64 . 32 rows"),
        (dict(kv_lora_rank=None), FormatError, "kv_lora_rank: is missing"),
        (dict(qk_nope_head_dim="x"), FormatError, "qk_nope_head_dim: is 'x'"),
        (dict(kv_lora_rank=40), UnsupportedError, "kv_lora_rank 40"),
        (dict(attention_bias=True), UnsupportedError, "attention_bias"),
    ],
)
def test_bad_input(changes, error, reason, tmp_path):
    folder = tiny_families.write(FAMILY, tmp_path)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    with pytest.raises(error, match=reason), open_model(str(folder)) as source:
        plan_model(source)


def test_sizes_without_kernels_on_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setitem(tiny_families.CONFIGS, FAMILY, CONFIG | dict(kv_lora_rank=64))
    path = str(tiny_families.write(FAMILY, tmp_path))
    with open_model(path) as source, pytest.raises(UnsupportedError, match="qk_rope_head_dim on a GPU"):
        plan_model(source, family="gpu")


def fp8_blocks(weights: dict[str, np.ndarray]) -> tuple[dict[str, tuple], dict[str, np.ndarray]]:
    """The tensors of a folder as DeepSeek-V3's: matrices of the layers, but for the routers, as e4m3 with f32 scales of 128 x 128; and
    what a CPU makes of them: bf16, or f16 of what latents are multiplied with."""
    found, meant = {}, {}
    for name, values in weights.items():
        if values.ndim == 1 or "layers" not in name or "mlp.gate.weight" in name:
            found[name], meant[name] = ("F32", values.shape, values.tobytes()), values
            continue
        rows, columns = (-(-size // 128) for size in values.shape)
        padded = np.zeros((rows * 128, columns * 128), np.float32)
        padded[: values.shape[0], : values.shape[1]] = values
        blocks = padded.reshape(rows, 128, columns, 128)
        scale = np.abs(blocks).max(axis=(1, 3)) / np.float32(448)
        wide = scale.repeat(128, axis=0).repeat(128, axis=1)[: values.shape[0], : values.shape[1]]
        codes = f32_to_e4m3(values / wide)
        found[name] = ("F8_E4M3", values.shape, codes.tobytes())
        found[name + "_scale_inv"] = ("F32", scale.shape, scale.tobytes())
        exact = e4m3_to_f32(codes) * wide
        kept = exact.astype(np.float16).astype(np.float32) if "kv_b" in name else bf16_to_f32(f32_to_bf16(exact))
        meant[name] = kept
    return found, meant


def test_fp8_blocks(tmp_path, device):
    """Also of the matrix that is taken apart, whose heads (160 rows) end within blocks."""
    config = tiny_families.CONFIGS["deepseek_v3"]
    stored, meant = fp8_blocks(tiny_families.weights("deepseek_v3"))
    (tmp_path / "plain").mkdir()
    plain = load(device, str(tiny.save(tmp_path / "plain", config, meant, "F32")))
    fp8 = dict(quant_method="fp8", fmt="e4m3", weight_block_size=[128, 128], activation_scheme="dynamic")
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": fp8}))
    (tmp_path / "model.safetensors").write_bytes(safetensors(stored, {"format": "pt"}))
    model = load(device, str(tmp_path))
    assert str(model.weights["layers.1.k_b"].scheme) == "f16"
    got, wanted = (Session(device, each).run(tiny.tokens("deepseek_v3")) for each in (model, plain))
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=5e-5)


def test_text_of_kimi(tmp_path, device):
    outer = dict(architectures=["KimiK25ForConditionalGeneration"], model_type="kimi_k25", vision_config={})
    path = tiny_families.write("deepseek_v3", tmp_path, prefix="language_model.model.", wrapper=outer)
    got = Session(device, load(device, str(path))).run(tiny.tokens("deepseek_v3"))
    np.testing.assert_allclose(got, REFERENCES["deepseek_v3"], rtol=2e-5, atol=5e-5)


@pytest.mark.parametrize(
    ("family", "changes", "error", "reason"),
    [
        ("deepseek_v3", dict(topk_method="best"), UnsupportedError, "topk_method"),
        ("deepseek_v3", dict(moe_layer_freq=2), UnsupportedError, "moe_layer_freq 2"),
        ("deepseek_v2", dict(topk_method="noaux_tc"), FormatError, "e_score_correction_bias|exp_probs_b"),
        ("deepseek_v3", dict(n_group=3), FormatError, "3 do not divide 8 experts"),
        ("deepseek_v3", dict(n_routed_experts=9), FormatError, "expert|shape"),
        ("glm4_moe_lite", dict(mlp_layer_types=["dense"]), FormatError, "mlp_layer_types"),
    ],
)
def test_bad_routing(family, changes, error, reason, tmp_path):
    folder = tiny_families.write(family, tmp_path)
    (folder / "config.json").write_text(json.dumps({**tiny_families.CONFIGS[family], **changes}))
    with pytest.raises(error, match=reason), open_model(str(folder)) as source:
        plan_model(source)


def test_a_v2_that_chooses_as_v3_has_its_bias(tmp_path, device):
    """As the text part of DeepSeek-VL2 does: V3's weights under V2's name."""
    folder = tiny_families.write("deepseek_v3", tmp_path)
    named = dict(architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", topk_method="noaux_tc")
    named |= dict(scoring_func="sigmoid", norm_topk_prob=True)
    (folder / "config.json").write_text(json.dumps({**tiny_families.CONFIGS["deepseek_v3"], **named}))
    got = Session(device, load(device, str(folder))).run(tiny.tokens("deepseek_v3"))
    np.testing.assert_allclose(got, REFERENCES["deepseek_v3"], rtol=2e-5, atol=5e-5)
