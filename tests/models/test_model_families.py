"""Families whose forward is not Llama's against transformers' logits: from Hugging Face directories, from GGUF files, in
chunks, token by token, with 8-bit activations, and from a converted file."""

from pathlib import Path

import numpy as np
import pytest
import tiny
import tiny_families
import tiny_hybrids
from session import Session, load

from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.formats.convert import convert
from zse.formats.opening import open_model
from zse.sampling.params import SamplingParams
from zse.tensor import Tensor

REFERENCES = np.load(Path(__file__).with_name("references.npz"))
# Sums of up to 128 f32 products in another order, through up to 4 layers, with logits up to 10.
NEAR = dict(rtol=2e-5, atol=5e-5)
# What recurrent layers sum runs through all tokens before; delta's chunks solve small systems in f32.
FAR = dict(rtol=2e-5, atol=1e-4)
# The kernel for one token sums over k in another order than the one for many.
SAME = dict(rtol=1e-5, atol=3e-5)


def near(family: str) -> dict:
    return FAR if family in tiny_hybrids.CONFIGS else NEAR


@pytest.fixture(params=tiny_families.FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def model(family, device, tmp_path):
    return load(device, str(tiny_families.write(family, tmp_path)))


@pytest.mark.exhaustive("beside PyTorch")
def test_references_are_those_of_transformers(family):
    """Where transformers is installed, the committed logits are checked against it."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from make_references import logits

    np.testing.assert_allclose(logits(family), REFERENCES[family], rtol=1e-5, atol=1e-5)


def test_logits_equal_transformers(family, model, device):
    logits = Session(device, model).run(tiny.tokens(family))
    np.testing.assert_allclose(logits, REFERENCES[family], **near(family))


@pytest.mark.parametrize("family", tiny_families.IN_GGUF)
def test_gguf_gives_the_logits_of_transformers(family, device, tmp_path):
    """Tensor names by the gguf package, row orders as its converters write them, everything else out of the metadata."""
    model = load(device, str(tiny_families.write_gguf(family, tmp_path)))
    np.testing.assert_allclose(Session(device, model).run(tiny.tokens(family)), REFERENCES[family], **near(family))


@pytest.mark.parametrize(
    "family",
    ["glm4", "cohere", "phi4_mini", "minicpm3", "deepseek_v2_lite", "gemma4", "gemma4_moe", *tiny_hybrids.IN_GGUF],
)
@pytest.mark.parametrize("write", [tiny_families.write, tiny_families.write_gguf], ids=["hf", "gguf"])
def test_a_converted_file_gives_the_same(family, write, device, tmp_path):
    """Rows that stand in pairs are put in order once, by the conversion."""
    convert(str(write(family, tmp_path)), str(tmp_path / "model.zse"))
    logits = Session(device, load(device, str(tmp_path / "model.zse"))).run(tiny.tokens(family))
    np.testing.assert_allclose(logits, REFERENCES[family], **near(family))


@pytest.mark.parametrize("family, cost", [("gemma4_large", 0.284), ("glm4", 0.097)])
def test_fp8_on_a_cpu(family, cost, device, tmp_path):
    """What NumPy fills: heads of two sizes, rows that stand in pairs. cost: what the same rounding of the matrices (e4m3, a scale a row)
    costs transformers' logits, their mean difference as a part of their mean size."""
    convert(str(tiny_families.write(family, tmp_path)), str(tmp_path / "fp8.zse"), quant="fp8")
    logits = Session(device, load(device, str(tmp_path / "fp8.zse"))).run(tiny.tokens(family))
    off = np.abs(logits - REFERENCES[family]).mean() / np.abs(REFERENCES[family]).mean()
    assert 0.5 * cost < off < 1.1 * cost, off


def test_mixtral_files_of_2023_open(device, tmp_path):
    """A tensor for each expert, as llama.cpp's converter wrote them until April 2024; converted, too."""
    path = tiny_families.write_gguf("mixtral", tmp_path, apart=True)
    with open_model(path) as source:
        assert "blk.0.ffn_down.3.weight" in source.tensors and "blk.0.ffn_down_exps.weight" not in source.tensors
    convert(str(path), str(tmp_path / "model.zse"))
    for found in (path, tmp_path / "model.zse"):
        logits = Session(device, load(device, str(found))).run(tiny.tokens("mixtral"))
        np.testing.assert_allclose(logits, REFERENCES["mixtral"], **NEAR)


@pytest.mark.parametrize("activations", ["f32", "int8"])
def test_quantized_on_load(activations, family, device, tmp_path):
    """8 bits a weight: rows are put in order by the part of the loader that quantizes, too. Weights are off by up to 2^-8 of
    the largest of 32, activations likewise, which is 1 to 3 % of the logits here, and up to 7 % where three products of
    one input are multiplied (LFM2) or a choice of experts is close; rows in a wrong order are 30 %."""
    model = load(device, str(tiny_families.write(family, tmp_path)), quantize="int8")
    logits = Session(device, model, activations=activations).run(tiny.tokens(family))
    most = 0.1 if family in tiny_hybrids.CONFIGS else 0.05
    assert np.abs(logits - REFERENCES[family]).mean() < most * np.abs(REFERENCES[family]).mean()


def test_what_is_converted_for_some_products_of_an_input(device, tmp_path):
    """q has 8 bits, k and v are too small to: nothing is read that a step before left in memory."""
    model, found = load(device, str(tiny.write("llama", tmp_path)), quantize="int8"), []
    for left in (0, 100):
        planner = (session := Session(device, model, activations="int8")).decoder
        rest = Tensor(planner.scratch, (planner.scratch.nbytes - planner._scratch_at,), "i8", planner._scratch_at)
        device.write(rest, bytes([left]) * rest.nbytes)
        found.append(session.run(tiny.tokens("llama")))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    "family",
    ["gemma2", "olmo3", "smollm3_window", "ministral3", "cohere2", "gemma4", "gemma4_large", "gemma4_moe"]
    + list(tiny_hybrids.CONFIGS),
)
def test_an_engine_gives_the_tokens_of_a_session(family, device, tmp_path):
    """Windows that give pages back, layers without positions, a second request beside the first."""
    path = str(tiny_families.write(family, tmp_path))
    options = dict(max_rows=3, max_context=64, max_tokens_per_step=16, activations="f32", kv_dtype="f32")
    loaded = load_engine(EngineConfig(model=path, device="cpu", threads=2, **options), Phases(lambda: 0.0))
    ids, engine = tiny.tokens(family).tolist(), loaded.engine
    replies: dict[int, list[int]] = {0: [], 1: []}
    try:
        for id, prompt in enumerate((ids[:30], ids[5:14])):
            engine.submit(id, prompt, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
        while engine.has_work:
            for output in engine.step():
                assert output.finish != "error"
                replies[output.id] += output.tokens
    finally:
        engine.close()
        loaded.source.close()
    model = load(device, path)
    for prompt, reply in zip((ids[:30], ids[5:14]), replies.values(), strict=True):
        session, expected = Session(device, model, context=64), []
        logits = session.step([(0, prompt)])[-1]
        for _ in range(20):
            expected.append(int(logits.argmax()))
            logits = session.step([(0, expected[-1:])])[-1]
        assert reply == expected


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_part_of_a_model_that_sees(prefix, device, tmp_path):
    """The outer config.json says that the head is tied, as transformers writes by default; the file has one."""
    wrapper = dict(
        architectures=["Mistral3ForConditionalGeneration"],
        model_type="mistral3",
        vision_config={},
        tie_word_embeddings=True,
    )
    path = tiny_families.write("ministral3", tmp_path, prefix=prefix, wrapper=wrapper)
    logits = Session(device, load(device, str(path))).run(tiny.tokens("ministral3"))
    np.testing.assert_allclose(logits, REFERENCES["ministral3"], **NEAR)


@pytest.mark.parametrize(
    ("family", "name", "kind"),
    [
        ("gemma4", "Gemma4", "gemma4_text"),
        ("gemma4_large", "Gemma4Unified", "gemma4_unified_text"),
        ("gemma4_moe", "Gemma4", "gemma4_text"),
    ],
)
def test_gemma4_as_it_is_published(family, name, kind, device, tmp_path):
    """A wrapper whose text_config leaves out what is usual, and, as transformers 5.23 saves it, has the large heads by layer."""
    text = dict(tiny_families.CONFIGS[family]) | {"model_type": kind}
    large = {"head_dim": text.pop("global_head_dim")}
    if "num_global_key_value_heads" in text:
        large["num_key_value_heads"] = text.pop("num_global_key_value_heads")
    kinds = text["layer_types"]
    text["per_layer_config"] = {str(i): large for i, each in enumerate(kinds) if each == "full_attention"}
    usual = {"architectures", "hidden_activation"}
    if kind == "gemma4_unified_text":
        usual |= {"vocab_size_per_layer_input", "hidden_size_per_layer_input"}
    text = {key: value for key, value in text.items() if key not in usual}
    outer = dict(architectures=[f"{name}ForConditionalGeneration"], vision_config={}, text_config=text)
    named = {each.replace("model.", TEXT, 1): values for each, values in tiny_families.weights(family).items()} | {
        "model.embed_vision.embedding_projection.weight": np.zeros((2, 2), np.float32)
    }
    model = load(device, str(tiny.save(tmp_path, outer, named, "F32")))
    np.testing.assert_allclose(Session(device, model).run(tiny.tokens(family)), REFERENCES[family], **NEAR)


TEXT = "model.language_model."
MROPE = {"type": "mrope", "mrope_section": [8, 12, 12]}
SEEING = [
    ("Qwen3VLForConditionalGeneration", "qwen3_vl_text", "qwen3", TEXT, {}),
    ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", "qwen2", TEXT, {"rope_scaling": MROPE}),
    ("Qwen2VLForConditionalGeneration", "qwen2_vl_text", "qwen2", TEXT, {"rope_scaling": MROPE}),
    ("InternVLForConditionalGeneration", "qwen2", "qwen2", TEXT, {}),
    ("LlavaOnevisionForConditionalGeneration", "qwen2", "qwen2", "language_model.model.", {}),
    ("Idefics3ForConditionalGeneration", "llama", "llama", "model.text_model.", {}),
    ("SmolVLMForConditionalGeneration", "llama", "llama", "model.text_model.", {}),
]


@pytest.mark.parametrize(("name", "kind", "family", "prefix", "changes"), SEEING, ids=[case[0] for case in SEEING])
def test_text_part_of_other_models_that_see(name, kind, family, prefix, changes, device, tmp_path):
    """Its text is the family's; transformers says so below."""
    text = {key: value for key, value in tiny.config(family).items() if key != "architectures"}
    outer = dict(architectures=[name], vision_config={}, text_config=text | changes | {"model_type": kind})
    model = load(device, str(tiny.write(family, tmp_path, prefix=prefix, outer=outer)))
    np.testing.assert_allclose(Session(device, model).run(tiny.tokens(family)), REFERENCES[family], **NEAR)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_a_model_that_sees_without_a_text_config(kind, device, tmp_path):
    """As these two were published: the text's numbers stand in config.json itself, its names begin as Qwen2's."""
    name = {"qwen2_vl": "Qwen2VLForConditionalGeneration", "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration"}[kind]
    outer = tiny.config("qwen2") | dict(architectures=[name], model_type=kind, rope_scaling=MROPE, vision_config={})
    model = load(device, str(tiny.write("qwen2", tmp_path, outer=outer)))
    np.testing.assert_allclose(Session(device, model).run(tiny.tokens("qwen2")), REFERENCES["qwen2"], **NEAR)


EYES = dict(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=28, patch_size=14
)
VISION = {
    "qwen3_vl_text": dict(depth=1, hidden_size=32, num_heads=2, out_hidden_size=64, deepstack_visual_indexes=[0]),
    "qwen2_5_vl_text": dict(depth=1, hidden_size=32, num_heads=2, out_hidden_size=64),
    "qwen2_vl_text": dict(depth=1, embed_dim=32, hidden_size=64, num_heads=2),
}


@pytest.mark.exhaustive("beside PyTorch")
@pytest.mark.parametrize(("name", "kind", "family", "prefix", "changes"), SEEING, ids=[case[0] for case in SEEING])
def test_transformers_gives_the_same_for_a_text(name, kind, family, prefix, changes):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    kinds = getattr(transformers, name)
    text = {key: value for key, value in tiny.config(family).items() if key != "architectures"}
    eyes = VISION.get(kind, EYES) | ({"model_type": "siglip_vision_model"} if "Llava" in name else {})
    config = kinds.config_class(text_config=text | changes | {"model_type": kind}, vision_config=eyes)
    model = kinds(config).eval()
    start = next(key for key in model.state_dict() if key.endswith("embed_tokens.weight")).removesuffix(
        "embed_tokens.weight"
    )
    state = {
        key.replace("model.", start, 1): torch.from_numpy(value.copy()) for key, value in tiny.weights(family).items()
    }
    left = model.load_state_dict(state, strict=False)
    assert not left.unexpected_keys and not [key for key in left.missing_keys if key.startswith(start)]
    model.lm_head.weight.data = state.get("lm_head.weight", state[start + "embed_tokens.weight"])
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(tiny.tokens(family).astype(np.int64))[None]).logits[0].numpy()
    np.testing.assert_allclose(logits, REFERENCES[family], rtol=1e-5, atol=1e-5)


def test_short_contexts_take_the_short_factors(device, tmp_path):
    """longrope's factors are chosen once, by the longest sequence that the engine will compute, as in llama.cpp."""
    path = str(tiny_families.write("phi4_mini", tmp_path))
    model = load(device, path)
    short = Session(device, model, context=16).run(tiny.tokens("phi4_mini")[:16])
    long = Session(device, model, context=256).run(tiny.tokens("phi4_mini")[:16])
    np.testing.assert_allclose(long, REFERENCES["phi4_mini"][:16], **NEAR)
    np.testing.assert_allclose(short, REFERENCES["phi4_mini_short"], **NEAR)


def test_chunks_and_tokens_equal_whole(family, model, device):
    session, ids = Session(device, model), tiny.tokens(family)
    whole = session.run(ids)
    session.reset()
    if family in tiny_hybrids.CONFIGS:
        np.testing.assert_allclose(session.run(ids, [7, 17, 2, 14]), whole, **FAR)
    else:
        np.testing.assert_array_equal(session.run(ids, [7, 17, 2, 14]), whole)
    session.reset()
    np.testing.assert_allclose(
        session.run(ids, [1] * len(ids)), whole, **FAR if family in tiny_hybrids.CONFIGS else SAME
    )
