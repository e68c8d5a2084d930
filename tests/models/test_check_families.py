"""`zse check` over a tiny random checkpoint of every family: the config is understood, every tensor is read once, texts come back
from the tokenizer, the parts that compute end, and logits are those of transformers. What it must find wrong is the
perplexity, which is that of a guess.

PyTorch gives the logits, so those are compared in `make test-rest`. The families' own tests have their logits from references.npz.
"""

import json
import os

import pytest
import test_gpt_oss
import tiny
import tiny_encoders
import tiny_families
from preloaded import preloaded  # noqa: F401
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from zse.bench import check, check_vectors
from zse.engine.llm import LLM
from zse.formats.opening import open_model

SPECIAL = ["<unk>", "<s>", "</s>"]
VOCAB = 288  # three control tokens, 256 bytes, and rows that pad the embedding
EVERY = (*tiny.FAMILIES, *tiny_families.FAMILIES, "gpt_oss")
# What transformers has no class for.
NOT_IN_TRANSFORMERS = ("minicpm",)


@pytest.fixture
def reference(preloaded, monkeypatch):  # noqa: F811
    """Scripts of transformers run in forks of one process; `llama` and `bert_pair` are left to processes of their own."""
    for module in (check, check_vectors):
        monkeypatch.setattr(module, "subprocess", preloaded)
    return monkeypatch


@pytest.fixture
def folder_of(tmp_path, monkeypatch):
    """(family) → a folder of it with a tokenizer of bytes."""

    def write(family: str) -> str:
        sizes = dict(vocab_size=VOCAB, pad_token_id=0)
        if family == "gpt_oss":
            monkeypatch.setattr(test_gpt_oss, "VOCAB", VOCAB)
            test_gpt_oss.write_folder(tmp_path, "F32")
        else:
            module = tiny if family in tiny.FAMILIES else tiny_families
            config = module.CONFIGS[family]
            sizes |= {"vocab_size_per_layer_input": VOCAB} if "vocab_size_per_layer_input" in config else {}
            monkeypatch.setitem(module.CONFIGS, family, config | sizes)
            module.write(family, tmp_path)
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        made = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate([*SPECIAL, *letters])}, merges=[]))
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        made.save(str(tmp_path / "tokenizer.json"))
        return str(tmp_path)

    return write


def open_llm(path: str) -> LLM:
    return LLM(path, device="cpu", threads=1, activations="f32", kv_dtype="f32", prefix_cache=False, max_rows=1)


@pytest.mark.parametrize("family", EVERY)
def test_a_folder_is_read_whole(family, folder_of, monkeypatch):
    path = folder_of(family)
    monkeypatch.setattr(check, "compared", lambda llm, path: {"left_out": "below"})
    with open_llm(path) as llm:
        result = check.check(llm, path)
    assert result["config"]["vocab_size"] == VOCAB and result["tensors"]["read"] > 10
    assert result["tensors"]["not_read"] == [] == result["tokenizer"]["wrong"]
    assert result["tokenizer"]["texts"] == 7 and result["answer"]["prompt"] == check.BEGINNING
    assert all(rate > 0 for rate in result["speed"].values())
    assert len(result["wrong"]) == 1 and "that of a guess" in result["wrong"][0]
    json.dumps(result)


@pytest.mark.parametrize("family", tiny_families.IN_GGUF)
def test_a_gguf_file_is_read_whole(family, tmp_path):
    path = str(tiny_families.write_gguf(family, tmp_path))
    found = check.tensors(path, "cpu")
    with open_model(path) as source:
        assert found == {"read": len(source.tensors), "not_read": []}


@pytest.mark.exhaustive("beside PyTorch")
@pytest.mark.parametrize("family", [name for name in EVERY if name not in NOT_IN_TRANSFORMERS])
def test_logits_beside_transformers(family, folder_of, reference):
    path = folder_of(family)
    if family == "llama":
        reference.undo()
    with open_llm(path) as llm:
        found = check.compared(llm, path)
    assert "left_out" not in found, found
    assert found["same_next_token"] > 0.99 and found["mean_difference"] < 1e-4 * found["mean_logit"]


LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,:;!?@%+-='\"()[]/_*"


def write_encoder(family: str, folder) -> str:
    """A folder of a tiny encoder with a tokenizer of single letters, as its family has one."""
    dense = (dict(in_features=96, out_features=64, bias=False, activation_function="torch.nn.modules.activation.Tanh"),)
    pooling = None if family in tiny_encoders.PAIRS else {"pooling_mode_mean_tokens": True}
    tiny_encoders.write(family, folder, pooling=pooling, dense=dense if family == "gemma" else ())
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    if family.startswith("xlmr"):
        scores = [(piece, -float(at)) for at, piece in enumerate([*special, "\u2581", *LETTERS])]
        made = Tokenizer(models.Unigram(scores, unk_id=1))
        made.normalizer = normalizers.Lowercase()
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        pieces = [*special, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
        made = Tokenizer(models.WordPiece({piece: id for id, piece in enumerate(pieces)}, unk_token="[UNK]"))
        made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
    made.add_special_tokens(special)
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.mark.parametrize("family", tiny_encoders.CONFIGS)
def test_an_encoder_is_read_whole(family, tmp_path, monkeypatch):
    path = write_encoder(family, tmp_path)
    monkeypatch.setattr(check_vectors, "compared", lambda llm, path: {"left_out": "below"})
    with open_llm(path) as llm:
        result = check.check(llm, path)
    assert result["config"]["architecture"] and result["tensors"]["read"] > 10
    assert result["tensors"]["not_read"] == [] == result["tokenizer"]["wrong"]
    meant = result["meaning"]
    assert (meant["kind"] == "labels") == (family in tiny_encoders.PAIRS) and result["speed"]["text_tok_per_s"] > 0
    assert meant["numbers"] == (1 if family in tiny_encoders.PAIRS else 64)
    # Random weights know no meaning: no other line.
    assert set(result["wrong"]) <= {"a sentence about something else counts as the nearer one"}
    json.dumps(result)


@pytest.mark.exhaustive("beside PyTorch")
@pytest.mark.parametrize("family", tiny_encoders.CONFIGS)
def test_vectors_beside_transformers(family, tmp_path, reference):
    path = write_encoder(family, tmp_path)
    if family == "bert_pair":
        reference.undo()
    with open_llm(path) as llm:
        found = check_vectors.compared(llm, path)
    if family == "nomic_moe":
        assert "left_out" in found  # transformers has no such class
    else:
        assert "left_out" not in found, found
        assert found["cosine"] > 0.999999 and found["mean_difference"] < 1e-4 * found["mean_number"]


@pytest.fixture
def pooled(folder_of):
    """A Qwen3-Embedding is a Qwen3 whose files say how its states are pooled."""
    path = folder_of("qwen3")
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": path_}
        for kind, path_ in (("Transformer", ""), ("Pooling", "1_Pooling"))
    ]
    with open(f"{path}/modules.json", "w") as file:
        json.dump(modules, file)
    os.mkdir(f"{path}/1_Pooling")
    with open(f"{path}/1_Pooling/config.json", "w") as file:
        json.dump({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, file)
    return path


def test_a_language_model_with_a_pooling_gives_vectors(pooled, monkeypatch):
    """Its perplexity says nothing."""
    for module in (check, check_vectors):
        monkeypatch.setattr(module, "compared", lambda llm, path: {"left_out": "below"})
    with open_llm(pooled) as llm:
        result = check.check(llm, pooled)
    assert result["meaning"]["kind"] == "last" and "guess" not in " ".join(result["wrong"])
    assert result["vectors"] == {"left_out": "below"}


@pytest.mark.exhaustive("beside PyTorch")
def test_its_vectors_beside_transformers(pooled, reference):
    with open_llm(pooled) as llm:
        found = check_vectors.compared(llm, pooled)
    assert found["cosine"] > 0.999999, found


def test_wrong_vectors_are_told():
    sound = {"kind": "mean", "norm": 1.0, "near": 0.9, "far": 0.1}
    assert check_vectors.wrong(sound, {"cosine": 0.9999}) == []
    assert check_vectors.wrong(sound | {"near": float("nan")}, {"cosine": 0.5})[1:] == [
        "the vectors are not those of transformers"
    ]
