"""What a model's authors recommend: where it is found, and what is taken of it."""

import json

import pytest
from formats_build import small_gguf, small_safetensors

from zse import LLM, SamplingParams
from zse.formats import catalog
from zse.formats.opening import open_model
from zse.formats.recommended import GGUF_KEYS, recommended
from zse.formats.source import ModelSource
from zse.sampling.params import RECOMMENDED, recommended_params


def source(**more) -> ModelSource:
    return ModelSource("gguf", "m.gguf", "gguf", [], {}, **more)


def test_every_field_has_its_place_in_a_gguf():
    assert tuple(GGUF_KEYS) == RECOMMENDED


def test_the_nearest_place_wins():
    metadata = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "general.sampling.mirostat": 2}
    assert recommended(source()) == ({}, "")
    assert recommended(source(metadata=metadata)) == ({"temperature": 0.5, "top_k": 20}, "the file's metadata")
    config = {"temperature": 0.6, "top_p": None, "do_sample": False, "eos_token_id": 3, "min_p": "0.1"}
    found = recommended(source(metadata=metadata, generation_config=config))
    assert found == ({"temperature": 0.6}, "generation_config.json")


def test_a_catalog_model_is_known_by_its_file(tmp_path, monkeypatch):
    path = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.write_bytes(small_gguf())
    with open_model(str(path)) as model:
        assert recommended(model) == ({}, "")  # another file of the same name
        entry = catalog.CATALOG["smollm2"]._replace(size=model.nbytes)
        monkeypatch.setitem(catalog.CATALOG, "smollm2", entry)
        assert recommended(model) == ({"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.05}, "the catalog")


@pytest.mark.parametrize(
    "values, taken",
    [
        ({"temperature": 0.6, "top_k": -1, "top_p": 0.95}, {"temperature": 0.6, "top_k": 0, "top_p": 0.95}),
        ({"temperature": 7, "top_p": 0, "min_p": float("nan"), "top_k": 2.5, "seed": 3}, {}),
    ],
)
def test_only_values_in_range_are_taken(values, taken):
    assert recommended_params(values) == taken


def test_replies_of_an_llm_are_drawn_so(real_models):
    with LLM(real_models["smollm2"], max_context=256, max_rows=2) as llm:
        assert llm.recommended == {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.05}
        assert llm._params_of(None, 1) == [SamplingParams(temperature=0.2, top_p=0.9, repetition_penalty=1.05)]
        assert llm._params_of(SamplingParams(), 1) == [SamplingParams()]


def test_a_hugging_face_folder_says_it(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes(small_safetensors())
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_p": 0.8, "top_k": 20}))
    with open_model(str(tmp_path)) as model:
        assert recommended(model)[0] == {"temperature": 0.7, "top_p": 0.8, "top_k": 20}


def test_a_stored_model_is_known_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("ZSE_HOME", str(tmp_path))
    for folder, expected in (("qwen3-8b=Q4_K_M", {"temperature": 0.6, "top_p": 0.95, "top_k": 20}), ("mine", {})):
        path = tmp_path / "models" / folder / "m.gguf"
        path.parent.mkdir(parents=True)
        path.write_bytes(small_gguf())
        with open_model(str(path)) as model:
            assert recommended(model) == (expected, "the catalog" if expected else "")
