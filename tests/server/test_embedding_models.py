"""`zse serve` on tiny encoders with vocabularies of their own: embeddings, rerank, score, and what an encoder refuses."""

import base64
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from zse import LLM
from zse.engine.messages import Ask
from zse.server.models import trained_for
from zse.server.relevance import QWEN3_HEAD, QWEN3_TAIL, Judge

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("models", "formats")]

import tiny_encoders as tiny  # noqa: E402

TEXTS = ["the quick brown fox", "jumps over the lazy dog", "a cat and a fox", "0123456789 dogs"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def add_tokenizer(folder: Path) -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False)
    made.train_from_iterator(TEXTS * 20, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.save(str(folder / "tokenizer.json"))
    return made


class Client:
    def __init__(self, url: str):
        self._url = url

    def post(self, path: str, **body) -> dict:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def refused(self, path: str, **body) -> dict:
        with pytest.raises(urllib.error.HTTPError) as caught:
            self.post(path, **body)
        assert caught.value.code == 400
        return json.load(caught.value)["error"]


def serve(folder: Path):
    command = [
        sys.executable,
        "-m",
        "zse",
        "serve",
        str(folder),
        "--port",
        "0",
        "--model-name",
        "tiny",
        "--threads",
        "2",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert " on http://" in line, process.communicate()[1]
    yield Client(line.split(" on ")[1].split()[0])
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 0 and "Traceback" not in stderr


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = tiny.write("bert", tmp_path_factory.mktemp("bert"), pooling={"pooling_mode_cls_token": True})
    add_tokenizer(folder)
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": "the quick "}}')
    for client in serve(folder):
        client.folder = folder
        yield client


@pytest.fixture(scope="module")
def crossed(tmp_path_factory):
    folder = tiny.write("bert_pair", tmp_path_factory.mktemp("pair"))
    made = add_tokenizer(folder)
    for client in serve(folder):
        client.folder, client.tokenizer = folder, made
        yield client


def test_embeddings(embedder):
    answer = embedder.post("/v1/embeddings", input=TEXTS, model="tiny")
    found = np.array([entry["embedding"] for entry in answer["data"]])
    tokenizer = Tokenizer.from_file(str(embedder.folder / "tokenizer.json"))
    assert answer["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(text).ids) for text in TEXTS)
    with LLM(str(embedder.folder), device="cpu", threads=2) as llm:
        np.testing.assert_allclose(found, llm.embed(TEXTS, pooling="cls"), atol=1e-6)
        np.testing.assert_allclose(found, llm.embed(TEXTS), atol=1e-6)  # as its files say
        by_mean = embedder.post("/v1/embeddings", input=TEXTS[0], pooling="mean")["data"][0]["embedding"]
        np.testing.assert_allclose(by_mean, llm.embed(TEXTS[0], pooling="mean")[0], atol=1e-6)
    packed = embedder.post("/v1/embeddings", input=TEXTS[0], encoding_format="base64", dimensions=16)["data"][0][
        "embedding"
    ]
    short = found[0][:16] / np.linalg.norm(found[0][:16])
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(packed), "<f4"), short, atol=1e-6)


def test_prompts_of_the_model(embedder):
    with_prompt = embedder.post("/v1/embeddings", input="brown fox", prompt_name="query")
    assert with_prompt["data"] == embedder.post("/v1/embeddings", input="the quick brown fox")["data"]
    error = embedder.refused("/v1/embeddings", input="x", prompt_name="passage")
    assert error["param"] == "prompt_name" and "it has query" in error["message"]


def test_a_long_text_is_refused_or_cut(embedder):
    long = "fox " * 200
    error = embedder.refused("/v1/embeddings", input=["fox", long])
    assert (
        error["code"] == "context_length_exceeded"
        and "context is 80 tokens" in error["message"]
        and "'truncate'" in error["message"]
    )
    cut = embedder.post("/v1/embeddings", input=long, truncate=True)
    assert cut["usage"]["prompt_tokens"] == 80
    assert cut["data"] == embedder.post("/v1/embeddings", input="fox " * 78)["data"]  # its [SEP] stays
    best = embedder.post("/v1/rerank", query="fox", documents=[long, "dog"], truncate=True)["results"]
    assert len(best) == 2


def test_an_encoder_writes_no_text(embedder):
    messages = [{"role": "user", "content": "Hello"}]
    for path, body in (("/v1/chat/completions", {"messages": messages}), ("/v1/completions", {"prompt": "Hello"})):
        error = embedder.refused(path, **body)
        assert (
            error["code"] == "unsupported_parameter"
            and "encoder" in error["message"]
            and "/v1/embeddings" in error["message"]
        )
    for method, wanted in (("likelihood", "no next token"), ("cross_encoder", "no classifier")):
        assert wanted in embedder.refused("/v1/rerank", query="a", documents=["b"], method=method)["message"]


def test_bi_encoders_rank_by_cosine(embedder):
    vectors = [entry["embedding"] for entry in embedder.post("/v1/embeddings", input=TEXTS)["data"]]
    results = embedder.post("/v1/rerank", query=TEXTS[0], documents=TEXTS[1:], top_n=2, return_documents=False)[
        "results"
    ]
    expected = sorted(range(3), key=lambda index: -np.dot(vectors[0], vectors[index + 1]))[:2]
    assert [row["index"] for row in results] == expected and "document" not in results[0]
    score = embedder.post("/v1/score", text_1=TEXTS[0], text_2=TEXTS[1])["data"][0]["score"]
    assert score == pytest.approx(np.dot(vectors[0], vectors[1]), abs=1e-5)


def test_cross_encoders_score_by_their_classifier(crossed):
    """Against the engine's own logits, which tests/models compares with transformers."""
    query, documents = "the fox", TEXTS
    answer = crossed.post("/v1/rerank", query=query, documents=documents)
    pairs = [crossed.tokenizer.encode(query, document) for document in documents]
    assert answer["usage"]["prompt_tokens"] == sum(len(pair.ids) for pair in pairs)
    with LLM(str(crossed.folder), device="cpu", threads=2) as llm:
        asks = [Ask("labels", second=pair.type_ids.index(1)) for pair in pairs]
        logits = [
            np.frombuffer(result.vector, "<f4")[0] for result in llm._complete([pair.ids for pair in pairs], asks)
        ]
    expected = 1 / (1 + np.exp(-np.array(logits, np.float64)))
    scores = {row["index"]: row["relevance_score"] for row in answer["results"]}
    np.testing.assert_allclose([scores[index] for index in range(4)], expected, atol=1e-6)
    assert [row["index"] for row in answer["results"]] == sorted(range(4), key=lambda index: -expected[index])
    by_pair = crossed.post("/v1/score", text_1=[query] * 4, text_2=documents)["data"]
    np.testing.assert_allclose([row["score"] for row in by_pair], expected, atol=1e-6)
    long = "fox " * 300
    assert crossed.refused("/v1/rerank", query=query, documents=[long])["code"] == "context_length_exceeded"
    assert crossed.post("/v1/rerank", query=query, documents=[long], truncate=True)["usage"]["prompt_tokens"] == 80


class Words:
    """A tokenizer of characters; control text is negative."""

    has_chat_template = True

    def encode_part(self, text: str, control: bool = False) -> list[int]:
        return [-ord(letter) if control else ord(letter) for letter in text]


def test_qwen3_reranker_is_asked_by_its_template():
    judge = Judge(Words(), "qwen3_reranker", None)
    found = judge.sequence("who?", "a <|im_end|> b", "documents[0]")
    text = "".join(chr(abs(id)) for id in found.ids)
    task = "Given a web search query, retrieve relevant passages that answer the query"
    assert text == f"{QWEN3_HEAD}<Instruct>: {task}\n<Query>: who?\n<Document>: a <|im_end|> b{QWEN3_TAIL}"
    inner = len(QWEN3_HEAD), len(found.ids) - len(QWEN3_TAIL)
    assert all(id > 0 for id in found.ids[slice(*inner)]), "a user's text holds no control token"
    assert found.ask == Ask("targets", targets=(ord("y"), ord("n")))
    cut = Judge(Words(), "qwen3_reranker", "T", most=len(QWEN3_HEAD) + len(QWEN3_TAIL) + 20).sequence(
        "q", "d" * 99, "x"
    )
    assert len(cut.ids) == len(QWEN3_HEAD) + len(QWEN3_TAIL) + 20


@pytest.mark.parametrize(
    ("path", "metadata", "method"),
    [
        ("/models/Qwen3-Reranker-0.6B", {}, "qwen3_reranker"),
        ("m.gguf", {"general.name": "Qwen3 Reranker 4B"}, "qwen3_reranker"),
        ("m.gguf", {"general.architecture": "qwen3", "qwen3.pooling_type": 4}, "qwen3_reranker"),
        ("Qwen3-0.6B", {"general.architecture": "qwen3"}, None),
        ("/models/not-a-qwen3-reranker", {}, None),
    ],
)
def test_what_a_model_was_trained_for(path, metadata, method):
    assert trained_for(path, metadata) == method
