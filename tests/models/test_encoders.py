"""Encoders against transformers' hidden states and logits: from folders, GGUF files and a converted file, whole texts batched by tokens,
pooled as their files say; and what they refuse."""

import json
import struct

import numpy as np
import pytest
import tiny_encoders as tiny

from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.messages import Ask
from zse.engine.metrics import Phases
from zse.errors import ConfigError, FormatError, RequestError, UnsupportedError
from zse.formats.convert import convert
from zse.formats.opening import open_model
from zse.models.weight_plan import plan_model, read_config
from zse.sampling.params import SamplingParams

REFERENCES = np.load(tiny.PATH)
F32 = dict(kv_dtype="f32", activations="f32")


def states(family: str) -> list[np.ndarray]:
    """transformers' hidden states of each text, f64."""
    ends = np.cumsum(tiny.LENGTHS)[:-1]
    return np.split(REFERENCES[family].astype(np.float64), ends)


def pooled(family: str, kind: str) -> np.ndarray:
    pick = {"mean": lambda h: h.mean(0), "cls": lambda h: h[0], "last": lambda h: h[-1], "max": lambda h: h.max(0)}[
        kind
    ]
    return np.array([pick(each) for each in states(family)])


def measure(path, asks: list[Ask], texts: list[list[int]], **options) -> np.ndarray:
    """The vectors that an engine gives."""
    config = EngineConfig(model=str(path), device="cpu", threads=2, **(F32 | options))
    loaded = load_engine(config, Phases(lambda: 0.0))
    found: dict[int, np.ndarray] = {}
    try:
        for id, (ask, ids) in enumerate(zip(asks, texts, strict=True)):
            loaded.engine.submit(id, ids, ask)
        while loaded.engine.has_work:
            loaded.engine.step()
            for job in loaded.engine.take_completed():
                assert job.error is None, job.error
                found[job.id] = np.frombuffer(job.result.vector, "<f4")
        problems = loaded.engine.integrity._scheduler.check_integrity()
        assert not problems
    finally:
        loaded.engine.close()
        loaded.source.close()
    return np.array([found[id] for id in range(len(texts))])


def embed(family: str, path, kind: str = "mean", **options) -> np.ndarray:
    texts = tiny.texts(family)
    return measure(path, [Ask(kind, second=second) for _, second in texts], [ids for ids, _ in texts], **options)


def cosines(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)


@pytest.mark.exhaustive("beside PyTorch")
def test_references_are_those_of_transformers(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    for family in ("bert", "modernbert_pair", "gemma"):
        (tmp_path / family).mkdir()
        np.testing.assert_allclose(tiny.references(family, tmp_path / family), REFERENCES[family], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", tiny.PLAIN)
def test_two_ranks_give_the_vectors_of_one(family, tmp_path):
    path = tiny.write(family, tmp_path)
    np.testing.assert_allclose(embed(family, path, tensor_parallel_size=2), embed(family, path), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("family", tiny.PLAIN)
def test_vectors_equal_transformers(family, tmp_path):
    """Sums of up to 96 f32 products in another order, through four layers."""
    path = tiny.write(family, tmp_path)
    for kind in ("mean", "cls", "last", "max") if family == "bert" else ("mean",):
        np.testing.assert_allclose(embed(family, path, kind), pooled(family, kind), rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("family", tiny.PAIRS)
def test_logits_of_pairs_equal_transformers(family, tmp_path):
    found = embed(family, tiny.write(family, tmp_path), "labels")
    np.testing.assert_allclose(found, REFERENCES[family], rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("family", tiny.IN_GGUF)
def test_gguf_gives_the_same(family, tmp_path):
    path = tiny.write_gguf(family, tmp_path, pooling=4 if family in tiny.PAIRS else 2)
    with open_model(str(path)) as source:
        assert read_config(source).pooling == "cls"
    if family in tiny.PAIRS:
        np.testing.assert_allclose(embed(family, path, "labels"), REFERENCES[family], rtol=1e-4, atol=3e-5)
    else:
        expected = pooled(family, "cls")
        if family == "nomic_moe":  # its files lack the experts' vector
            every = [tiny.nomic_moe(ids, tiny.weights(family), sum_bias=False)[0] for ids, _ in tiny.texts(family)]
            assert not np.allclose(expected, every, atol=0.1)
            expected = np.array(every)
        np.testing.assert_allclose(embed(family, path, "cls"), expected, rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("family", ["bert_pair", "modernbert", "gemma", "nomic_moe"])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_converted_file_gives_the_same(family, quantize, tmp_path):
    """Tables of positions and classifiers stay as they are, also in a quantized file."""
    convert(str(tiny.write(family, tmp_path)), str(tmp_path / "model.zse"), quantize)
    kind = "labels" if family in tiny.PAIRS else "mean"
    expected = REFERENCES[family] if family in tiny.PAIRS else pooled(family, "mean")
    found = embed(family, tmp_path / "model.zse", kind)
    if quantize is None:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=3e-5)
    else:  # 8 bits a weight through four layers
        assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max()


@pytest.mark.parametrize(
    "options", [dict(kv_dtype="f16"), dict(quantize="int8"), dict(quantize="int8", activations="int8")], ids=str
)
@pytest.mark.parametrize("family", ["bert", "modernbert", "gemma", "nomic_moe"])
def test_smaller_numbers(family, options, tmp_path):
    """Keys and values of 16 bits as by default: 2^-11 of each. 8 bits of weights and activations: 2^-8 of the largest of 32, on random
    weights, whose vectors have no direction of their own to keep."""
    found = cosines(embed(family, tiny.write(family, tmp_path), **options), pooled(family, "mean"))
    assert found.min() > (0.9999 if "kv_dtype" in options else 0.99)


def test_a_result_does_not_depend_on_the_batch(tmp_path):
    """Steps of 60 tokens take the four texts in three batches, and more texts than a step has rows wait."""
    path = tiny.write("modernbert", tmp_path)
    alone = embed("modernbert", path)
    np.testing.assert_allclose(embed("modernbert", path, max_tokens_per_step=60), alone, rtol=1e-5, atol=1e-6)
    texts = [ids for ids, _ in tiny.texts("modernbert")] * 15
    many = measure(path, [Ask("mean")] * len(texts), texts)
    np.testing.assert_allclose(many, np.tile(alone, (15, 1)), rtol=1e-5, atol=1e-6)


POOLINGS = {
    "cls": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
    "mean": {"pooling_mode_mean_tokens": True},
    "last": {"pooling_mode": "last"},
}


@pytest.mark.parametrize("kind", POOLINGS)
def test_pooling_is_read_from_the_files(kind, tmp_path):
    path = tiny.write("bert", tmp_path, pooling=POOLINGS[kind])
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 48}')
    with open_model(str(path)) as source:
        config = read_config(source)
    assert (config.pooling, config.max_context) == (kind, 48)


def test_files_that_say_what_is_not_computed(tmp_path):
    path = tiny.write("bert", tmp_path, pooling={"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True})
    with pytest.raises(UnsupportedError, match="pooling_mode_mean_tokens, pooling_mode_cls_token"):
        open_model(str(path))
    (path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    modules = json.loads((path / "modules.json").read_text())
    for bad, error, match in (
        ([*modules, {"type": "sentence_transformers.models.LSTM", "path": "2_LSTM"}], UnsupportedError, "LSTM"),
        ([{"type": "x.Pooling", "path": "../other"}], FormatError, "not a folder"),
        ([{"path": ""}], FormatError, "modules.json"),
        ({"a": 1}, FormatError, "modules.json"),
        ("[" * 100_000, FormatError, "modules.json"),
    ):
        (path / "modules.json").write_text(bad if isinstance(bad, str) else json.dumps(bad))
        with pytest.raises(error, match=match), open_model(str(path)) as source:
            read_config(source)


def test_damaged_configs_are_named(tmp_path):
    for family, changes, match in (
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"num_attention_heads": 5}, "num_attention_heads"),
        ("bert", {"hidden_act": "mish"}, "hidden_act"),
        ("xlmr", {"max_position_embeddings": 2}, "max_position_embeddings"),
        ("modernbert", {"norm_bias": True}, "norm_bias"),
        ("nomic", {"n_embd": 64, "prenorm": True}, "prenorm"),
        ("nomic_moe", {"moe_normalize_expert_weights": True}, "moe_normalize_expert_weights"),
        ("nomic_moe", {"moe_every_n_layers": 1}, "moe_every_n_layers"),
        ("nomic_moe", {"num_experts": 3}, "experts"),
        ("gemma", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    ):
        path = tmp_path / f"{family}-{match}"
        path.mkdir()
        tiny.write(family, path)
        (path / "config.json").write_text(json.dumps(tiny.CONFIGS[family] | changes))
        with pytest.raises((FormatError, UnsupportedError), match=match), open_model(str(path)) as source:
            plan_model(source)


def test_an_encoder_refuses_what_it_cannot_do(tmp_path):
    path = str(tiny.write("bert", tmp_path))
    with pytest.raises(ConfigError, match="drafts have no use"):
        load_engine(EngineConfig(model=path, device="cpu", speculation="ngram"), Phases(lambda: 0.0))
    config = EngineConfig(model=path, device="cpu", threads=2, max_tokens_per_step=30)
    loaded = load_engine(config, Phases(lambda: 0.0))
    try:
        for params, ids, match in (
            (SamplingParams(), [5], "writes no text"),
            (Ask("logprobs"), [5], "no next token"),
            (Ask("labels"), [5], "no cross-encoder"),
            (Ask("mean"), [5] * 31, "one step, of 30"),
        ):
            with pytest.raises(RequestError, match=match):
                loaded.engine.submit(1, ids, params)
        assert not loaded.engine.has_work
    finally:
        loaded.engine.close()
        loaded.source.close()


def test_keys_and_values_take_one_layer(tmp_path):
    loaded = load_engine(
        EngineConfig(model=str(tiny.write("bert", tmp_path)), device="cpu", threads=2, **F32), Phases(lambda: 0.0)
    )
    try:
        kv = loaded.engine.runner.kv
        assert kv.page_nbytes == 2 * 16 * 64 * 4 and {tensor.offset for tensor in kv.keys} == {0}
        assert loaded.plan.parts["kv cache"] == kv.nbytes
    finally:
        loaded.engine.close()
        loaded.source.close()


def test_vectors_are_little_endian_floats(tmp_path):
    texts = tiny.texts("bert")[:1]
    config = EngineConfig(model=str(tiny.write("bert", tmp_path)), device="cpu", threads=2)
    loaded = load_engine(config, Phases(lambda: 0.0))
    try:
        loaded.engine.submit(1, texts[0][0], Ask("mean", normalize=True))
        while loaded.engine.has_work:
            loaded.engine.step()
        (job,) = loaded.engine.take_completed()
    finally:
        loaded.engine.close()
        loaded.source.close()
    values = struct.unpack("<64f", job.result.vector)
    assert sum(value * value for value in values) == pytest.approx(1, abs=1e-6)
