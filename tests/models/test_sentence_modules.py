"""Dense modules of sentence-transformers behind the pooling, of encoders and of language models: by their formula, from folders, GGUF
files and converted files; what of modules.json is refused."""

import json
import math

import numpy as np
import pytest
import tiny as tiny_models
import tiny_encoders as tiny
from formats_build import Tensor as GGUFTensor
from test_encoders import F32, cosines, measure, pooled

from zse import LLM
from zse.engine.messages import Ask
from zse.errors import FormatError, UnsupportedError
from zse.formats.convert import convert
from zse.formats.opening import open_model
from zse.models.weight_plan import plan_model, read_config

IDENTITY, TANH = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"
MEAN = {"pooling_mode_mean_tokens": True}


def dense(inputs: int, outputs: int, bias: bool = False, activation: str = IDENTITY) -> dict:
    return dict(in_features=inputs, out_features=outputs, bias=bias, activation_function=activation)


GEMMA = (dense(96, 256), dense(256, 96))
FUNCTIONS = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "GELU": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "SiLU": lambda x: x / (1 + np.exp(-x)),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


def formula(vectors: np.ndarray, modules: tuple[dict, ...]) -> np.ndarray:
    """torch.nn.Linear and the activation, in f64, one module behind the other."""
    for number, config in enumerate(modules):
        read = tiny.dense_weights(number, config)
        vectors = vectors @ read["linear.weight"].T.astype(np.float64) + read.get("linear.bias", 0)
        vectors = FUNCTIONS[config["activation_function"].rpartition(".")[2]](vectors)
    return vectors


def embed(path, family: str = "gemma", **options) -> np.ndarray:
    """As the files say."""
    texts = [ids for ids, _ in tiny.texts(family)]
    return measure(path, [Ask("mean")] * len(texts), texts, **options)


def test_embedding_gemma(tmp_path):
    """Mean, 96 -> 256 -> 96 without bias and activation, as EmbeddingGemma's folder has them; four texts of one step together, and
    one alone. Sums of 256 products in f32 of vectors of length 10."""
    path = tiny.write("gemma", tmp_path, pooling=MEAN, dense=GEMMA)
    expected = formula(pooled("gemma", "mean"), GEMMA)
    found = embed(path)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert cosines(found, expected).min() > 1 - 1e-6
    np.testing.assert_allclose(embed(path, max_tokens_per_step=60), found, rtol=1e-5, atol=1e-5)
    with open_model(str(path)) as source:
        config = read_config(source)
    assert (config.pooling, config.embedding_size, config.sliding_window, config.causal) == ("mean", 96, 9, False)
    assert cosines(embed(path, kv_dtype="f16"), expected).min() > 0.9999


def test_pulled_files_lie_beside_one_another(tmp_path):
    path = tiny.write("gemma", tmp_path, pooling=MEAN, dense=GEMMA)
    found = embed(path)
    for folder in ("1_Pooling", "2_Dense", "3_Dense"):
        for file in list((path / folder).iterdir()):
            file.rename(path / f"{folder}_{file.name}")
        (path / folder).rmdir()
    np.testing.assert_array_equal(embed(path), found)
    (path / "model.safetensors").rename(path / "weights.safetensors")  # then every other file is read
    np.testing.assert_array_equal(embed(path), found)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_converted_file_has_them_as_they_are(quantize, tmp_path):
    path = tiny.write("gemma", tmp_path, "BF16", pooling=MEAN, dense=GEMMA)
    convert(str(path), str(tmp_path / "model.zse"), quantize)
    with open_model(str(tmp_path / "model.zse")) as source:
        assert source.tensors["sentence_transformers.dense_1.weight"].type == "BF16"
    np.testing.assert_allclose(
        embed(tmp_path / "model.zse"), embed(path, **({"quantize": quantize} if quantize else {})), rtol=2e-2, atol=2e-2
    )


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_activations_and_biases(activation, tmp_path):
    """Another width than the model's, a bias, each activation."""
    modules = (dense(64, 48, True, f"torch.nn.modules.activation.{activation}"), dense(48, 20, True, TANH))
    path = tiny.write("bert", tmp_path, pooling=MEAN, dense=modules)
    texts = tiny.texts("bert")
    found = measure(path, [Ask("mean", second=second) for _, second in texts], [ids for ids, _ in texts])
    expected = formula(pooled("bert", "mean"), modules)
    assert found.shape == (4, 20)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def q8_0(name: str, values: np.ndarray) -> GGUFTensor:
    """A GGUF tensor of 8 bits: of each 32 numbers their scale in f16, then 32 bytes."""
    blocks = values.reshape(-1, 32)
    scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
    codes = np.rint(blocks / scale.astype(np.float32)).astype(np.int8)
    data = np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=1).tobytes()
    return GGUFTensor(name, "Q8_0", values.shape, data)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "none"])
def test_gguf(kind, tmp_path):
    """llama.cpp's names for EmbeddingGemma's modules, which its converter leaves out unless it is told; in files of 8 bits they are,
    too: 2^-8 of the greatest of 32 numbers."""
    matrices = [tiny.dense_weights(number, config)["linear.weight"] for number, config in enumerate(GEMMA)]
    named = [(f"dense_{number + 2}.weight", values) for number, values in enumerate(matrices)]
    extra = [GGUFTensor(name, "F32", each.shape, each.tobytes()) for name, each in named]
    extra = {"F32": extra, "Q8_0": [q8_0(*each) for each in named], "none": []}[kind]
    found = embed(tiny.write_gguf("gemma", tmp_path, extra=extra))
    expected = pooled("gemma", "mean")
    expected = expected if kind == "none" else formula(expected, GEMMA)
    assert cosines(found, expected).min() > (1 - 1e-6 if kind != "Q8_0" else 0.9995)


def test_language_models_have_them_too(tmp_path):
    """Of a causal model: pooled and passed on as its files say, where a request does not say."""
    plain, folder = tmp_path / "plain", tmp_path / "modules"
    for each in (plain, folder):
        each.mkdir()
        config = tiny_models.config("qwen3")
        tiny_models.save(each, config, tiny_models.weights("qwen3"), "F32")
    modules = (dense(config["hidden_size"], 24, True, TANH),)
    (folder / "1_Pooling").mkdir()
    (folder / "2_Dense").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(MEAN))
    tiny_models.save(folder / "2_Dense", modules[0], tiny.dense_weights(0, modules[0]), "F32")
    kinds = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense"))
    (folder / "modules.json").write_text(json.dumps([{"type": f"a.{kind}", "path": path} for kind, path in kinds]))
    prompts = [[5, 6, 7, 8], [9, 10]]
    with LLM(str(plain), device="cpu", threads=2, **F32) as llm:
        mean = llm.embed(prompts, pooling="mean", normalize=False)
    with LLM(str(folder), device="cpu", threads=2, **F32) as llm:
        found = llm.embed(prompts, normalize=False)
    np.testing.assert_allclose(found, formula(mean.astype(np.float64), modules), rtol=1e-4, atol=1e-5)


def test_refusals(tmp_path):
    """Each in one line, with the file."""
    path = tiny.write("gemma", tmp_path, pooling=MEAN, dense=GEMMA)
    settings, modules = path / "2_Dense" / "config.json", path / "modules.json"
    good, listed = json.loads(settings.read_text()), json.loads(modules.read_text())

    def refused(error, match):
        with pytest.raises(error, match=match) as caught, open_model(str(path)) as source:
            plan_model(source)
        assert "\n" not in str(caught.value)

    for changes, error, match in (
        ({"activation_function": "torch.nn.modules.activation.Mish"}, UnsupportedError, "activation_function .*Mish"),
        ({"module_input_name": "token_embeddings"}, UnsupportedError, "module_input_name 'token_embeddings'"),
        ({"in_features": 64}, FormatError, "in_features: 64, what comes before gives 96"),
        ({"out_features": 0}, FormatError, "outputs.*outside"),
        ({"bias": True}, FormatError, "dense_0.bias.*missing"),
        ({"bias": "no"}, FormatError, "bias.*not true or false"),
    ):
        settings.write_text(json.dumps(good | changes))
        refused(error, match)
    settings.write_text(json.dumps(good))
    for order in ([3, 4, 2], [0, 2, 1], [0, 1, 4, 2]):
        modules.write_text(json.dumps([listed[index] for index in order]))
        refused(UnsupportedError, "order of modules.*Transformer, Pooling, Dense, Dropout, Normalize")
    modules.write_text(json.dumps([*listed[:2], {"type": "a.LayerNorm", "path": "2_LayerNorm"}]))
    refused(UnsupportedError, "module 'LayerNorm'.*Transformer, Pooling, Dense, Dropout, Normalize")
    modules.write_text(json.dumps(listed))
    (path / "2_Dense" / "model.safetensors").rename(path / "2_Dense" / "pytorch_model.bin")
    refused(FormatError, "2_Dense/model.safetensors.*no pickle")
