"""Embeddings, rerank and score: the shapes of OpenAI, Jina, Cohere and vLLM; every field; the engine's numbers.

The fake engine's vector counts vowels ([a, e, i, o, u, 1]); its log-probabilities are -0.5, those of targets grow less
with the token's id.
"""

import asyncio
import base64
import math
import struct
import threading

import openai
import pytest
from harness import read_reply, request, wait_for
from test_errors import check

from zse.server import errors, measuring

EMBED, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"


def unit(*values: float) -> list[float]:
    length = math.sqrt(sum(value * value for value in values))
    return [value / length for value in values]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.base + "/v1", api_key="any", timeout=20, max_retries=0) as client:
        yield client


def test_the_official_client(client):
    for given in ("aeea", ["aeea"], list(b"aeea"), [list(b"aeea")]):
        reply = client.embeddings.create(model="fake", input=given)
        assert reply.object == "list" and reply.model == "fake" and reply.data[0].object == "embedding"
        assert reply.data[0].embedding == pytest.approx(unit(2, 2, 0, 0, 0, 1), abs=1e-6)
        assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (4, 4)
    many = client.embeddings.create(model="fake", input=[f"{'a' * count}" for count in range(1, 41)])
    assert [item.index for item in many.data] == list(range(40))
    for count, item in enumerate(many.data, 1):
        assert item.embedding == pytest.approx(unit(count, 0, 0, 0, 0, 1), abs=1e-6)
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="fake", input="a", dimensions=7)
    assert caught.value.code == "out_of_range" and "6" in caught.value.message


def test_formats_pooling_and_dimensions(server):
    def embed(**fields):
        return server.post(EMBED, {"input": "aae", **fields}).json["data"][0]["embedding"]

    assert embed() == pytest.approx(unit(2, 1, 0, 0, 0, 1), abs=1e-6)
    packed = base64.b64decode(embed(encoding_format="base64"))
    assert struct.unpack("<6f", packed) == pytest.approx(unit(2, 1, 0, 0, 0, 1), abs=1e-6)
    assert embed(normalize=False) == [2, 1, 0, 0, 0, 1]
    assert embed(normalize=False, pooling="mean") == pytest.approx([2 / 3, 1 / 3, 0, 0, 0, 1 / 3])
    assert embed(dimensions=2) == pytest.approx(unit(2, 1), abs=1e-6)
    assert embed(dimensions=2, normalize=False) == [2, 1]
    assert struct.unpack("<2f", base64.b64decode(embed(dimensions=2, encoding_format="base64"))) == pytest.approx(
        unit(2, 1), abs=1e-6
    )


def test_rerank(server):
    documents = ["xyz", {"text": "aaa"}, "aex", "aae"]
    body = {"query": "aa", "documents": documents, "method": "embedding"}
    reply = server.post(RERANK, body).json
    assert [row["index"] for row in reply["results"]] == [1, 3, 2, 0]
    assert [row["document"]["text"] for row in reply["results"]] == ["aaa", "aae", "aex", "xyz"]
    scores = [row["relevance_score"] for row in reply["results"]]
    assert scores[0] == pytest.approx(7 / math.sqrt(5 * 10)) and scores == sorted(scores, reverse=True)
    assert reply["usage"] == {"prompt_tokens": 14, "total_tokens": 14} and reply["id"].startswith("rerank-")
    best = server.post("/v2/rerank", body | {"top_n": 1, "return_documents": False}).json["results"]
    assert best == [{"index": 1, "relevance_score": scores[0]}]


def test_rerank_by_likelihood_measures_the_query_only(server):
    seen = []
    link = server.engine._link
    send, link.send = link.send, lambda message: (seen.append(message), send(message))
    try:
        reply = server.post(RERANK, {"query": "why", "documents": ["b", "cc"]}).json
    finally:
        link.send = send
    assert [row["relevance_score"] for row in reply["results"]] == pytest.approx([math.exp(-0.5)] * 2)
    asked = {bytes(message.prompt): message.params for message in seen if hasattr(message, "params")}
    assert set(asked) == {b"Document: b\n\nQuery: why", b"Document: cc\n\nQuery: why"}
    assert all(ask.what == "logprobs" and prompt[ask.first :] == b" why" for prompt, ask in asked.items())


def test_yes_no_asks_for_both_answers(server):
    reply = server.post(RERANK, {"query": "q", "documents": ["d"], "method": "yes_no", "task": "Is it so?"}).json
    # First bytes of yes, Yes, YES; of no, No, NO; the space begins both and is left out.
    yes, no = (sum(math.exp(-(1 + ord(letter)) / 256) for letter in word) for word in ("Yy", "Nn"))
    assert reply["results"][0]["relevance_score"] == pytest.approx(yes / (yes + no))


def test_reasoning_is_closed_before_the_answer(own_server):
    server = own_server(template="<think></think> ... <think>")
    seen = []
    link = server.engine._link
    send, link.send = link.send, lambda message: (seen.append(message), send(message))
    assert server.post(SCORE, {"text_1": "q", "text_2": "d", "method": "yes_no"}).status == 200
    prompt = bytes(seen[-1].prompt).decode()
    assert prompt.endswith("assistant:<think>\n</think>\n\n") and "Query: q\n\nDocument: d" in prompt


def test_score(server):
    one = server.post(SCORE, {"text_1": "aa", "text_2": ["aaa", "e"]}).json
    assert [row["score"] for row in one["data"]] == pytest.approx([7 / math.sqrt(50), 1 / math.sqrt(10)])
    assert one["object"] == "list" and one["data"][1]["index"] == 1 and one["data"][0]["object"] == "score"
    pairs = server.post(SCORE, {"text_1": ["aa", "e"], "text_2": ["aa", "i"]}).json
    assert [row["score"] for row in pairs["data"]] == pytest.approx([1, 0.5])
    assert server.post(SCORE, {"text_1": ["aa"], "text_2": "aa"}).json["data"][0]["score"] == pytest.approx(1)


FIELDS = {
    EMBED: (
        {"input": "a"},
        [
            ({"input": None}, "missing_required_parameter", "input"),
            ({"input": []}, "invalid_value", "input"),
            ({"input": ""}, "invalid_value", "input"),
            ({"input": ["a", ""]}, "invalid_value", "input[1]"),
            ({"input": 1}, "invalid_type", "input"),
            ({"input": [{}]}, "invalid_type", "input[0]"),
            ({"input": ["a"] * 2049}, "array_above_max_length", "input"),
            ({"input": [[]]}, "invalid_value", "input[0]"),
            ({"input": [260]}, "invalid_token_id", "input"),
            ({"input": [[1], [260]]}, "invalid_token_id", "input[1]"),
            ({"input": "a" * 4097}, "context_length_exceeded", "input"),
            ({"input": ["b", "a" * 4097]}, "context_length_exceeded", "input[1]"),
            ({"encoding_format": "int8"}, "invalid_value", "encoding_format"),
            ({"dimensions": 0}, "out_of_range", "dimensions"),
            ({"pooling": "middle"}, "invalid_value", "pooling"),
            ({"normalize": 1}, "invalid_type", "normalize"),
            ({"input": "!nan"}, "numerical_error", None),
        ],
    ),
    RERANK: (
        {"query": "a", "documents": ["b"]},
        [
            ({"query": None}, "missing_required_parameter", "query"),
            ({"query": ""}, "invalid_value", "query"),
            ({"query": ["a"]}, "invalid_type", "query"),
            ({"documents": []}, "invalid_value", "documents"),
            ({"documents": "a"}, "invalid_type", "documents"),
            ({"documents": ["a", ""]}, "invalid_value", "documents[1]"),
            ({"documents": [{}]}, "missing_required_parameter", "documents[0].text"),
            ({"documents": [1]}, "invalid_type", "documents[0]"),
            ({"documents": ["a"] * 1025}, "array_above_max_length", "documents"),
            ({"documents": ["b", "a" * 4090]}, "context_length_exceeded", "documents[1]"),
            ({"top_n": 0}, "out_of_range", "top_n"),
            ({"return_documents": "no"}, "invalid_type", "return_documents"),
            ({"method": "magic"}, "invalid_value", "method"),
            ({"task": ""}, "invalid_value", "task"),
            ({"rank_fields": ["a"]}, "unsupported_parameter", "rank_fields"),
        ],
    ),
    SCORE: (
        {"text_1": "a", "text_2": "b"},
        [
            ({"text_1": None}, "missing_required_parameter", "text_1"),
            ({"text_2": []}, "invalid_value", "text_2"),
            ({"text_1": ["a", "b"], "text_2": ["a"]}, "invalid_value", "text_2"),
            ({"text_1": [1]}, "invalid_type", "text_1[0]"),
            ({"text_1": "a" * 4097}, "context_length_exceeded", "text_1"),
            ({"encoding_format": "base64"}, "unsupported_parameter", "encoding_format"),
        ],
    ),
}


@pytest.mark.parametrize(
    "path,change,code,param",
    [
        (path, *case)
        for path, (_, cases) in FIELDS.items()
        for case in [
            *cases,
            ({"x": 1}, "unknown_parameter", "x"),
            ({"model": "other"}, "model_not_found", "model"),
            ({"user": 1}, "invalid_type", "user"),
            ({"temperature": 1}, "unknown_parameter", "temperature"),
        ]
    ],
)
def test_every_field_is_checked(server, path, change, code, param):
    check(server.post(path, FIELDS[path][0] | change), errors.CODES[code][0], code, param)
    assert server.post(path, FIELDS[path][0]).status == 200


def test_long_documents_are_cut(server):
    body = {"query": "a", "documents": ["e" * 5000], "max_tokens_per_doc": 100, "return_documents": False}
    assert server.post(RERANK, body).json["usage"]["prompt_tokens"] < 200


@pytest.mark.parametrize("method", ["likelihood", "yes_no"])
def test_a_pair_is_cut_to_the_context_where_truncate_says_so(server, method):
    """The context of 4096: the document makes room, then the query."""
    given = {"method": method, "return_documents": False}
    for query, document in (("a", "e" * 5000), ("a" * 3000, "é" * 3000), ("a" * 5000, "e")):
        body = given | {"query": query, "documents": [document, "e"]}
        check(server.post(RERANK, body), 400, "context_length_exceeded", "documents[0]")
        cut = server.post(RERANK, body | {"truncate": True})
        assert cut.status == 200 and 4096 <= cut.json["usage"]["prompt_tokens"] <= 8192, cut.body
        cut = server.post(SCORE, {"text_1": query, "text_2": document, "method": method, "truncate": True})
        assert 4090 < cut.json["usage"]["prompt_tokens"] <= 4096


class Watched:
    """A text model that notes in which thread it tokenizes what, and has no chat template."""

    has_chat_template = False

    def __init__(self, model):
        self._model, self.threads, self.num_parts, self.empty = model, set(), 0, ""

    def __getattr__(self, name):
        return getattr(self._model, name)

    def encode_text(self, text):
        self.threads.add(threading.get_ident())
        return [] if text == self.empty else self._model.encode_text(text)

    def encode_part(self, text, control=False):
        self.num_parts += 1
        return self._model.encode_part(text, control)


@pytest.fixture
def watched(own_server):
    server = own_server(max_choices=4)
    model = Watched(server.call(lambda: server.pool.default.text.result()))
    future = asyncio.Future(loop=server.loop)
    server.call(lambda: (future.set_result(model), setattr(server.pool.default, "text", future)))
    return server, model


def test_a_short_body_that_is_long_to_tokenize_does_not_hold_up_the_event_loop(watched):
    server, model = watched
    body = {"query": "q" * 3000, "documents": ["d"] * 100}
    assert server.post(RERANK, body).status == 200 and model.num_parts == 100
    assert server.post(EMBED, {"input": "a"}).status == 200
    assert model.threads and server._thread.ident not in model.threads


def test_a_query_that_is_too_long_is_tokenized_once_not_with_each_document(watched):
    server, model = watched
    check(
        server.post(RERANK, {"query": "q" * 5000, "documents": ["d"] * 1000}),
        400,
        "context_length_exceeded",
        "documents[0]",
    )
    assert model.num_parts == 1


def test_what_a_query_and_a_thousand_documents_have_together_is_bounded(watched):
    server, model = watched
    check(
        server.post(RERANK, {"query": "q" * 4000, "documents": ["d"] * 1024}),
        413,
        "request_too_large",
        "documents[521]",
    )
    assert not server.engine.requests and model.num_parts < 530


def test_a_text_without_a_token_is_refused(watched):
    server, model = watched
    model.empty = "\u200b"
    check(server.post(EMBED, {"input": ["a", "\u200b"]}), 400, "invalid_value", "input[1]")


def test_many_texts_do_not_fill_the_engine_and_stop_with_their_client(own_server):
    server = own_server(max_choices=4)
    most = 0
    submit = server.engine.submit

    def counted(*arguments):
        nonlocal most
        id = submit(*arguments)
        most = max(most, len(server.engine.requests))
        return id

    server.engine.submit = counted
    data = request("POST", EMBED, {"input": ["a" * 50] * 2000})
    with server.connect() as sock:
        sock.sendall(data)
        assert read_reply(sock).status == 200
    assert 1 < most <= measuring.AT_ONCE
    for _ in range(3):
        sock = server.connect()
        sock.sendall(data)
        wait_for(lambda: server.engine.requests)
        sock.close()
        wait_for(lambda: not server.engine.requests, 1)
    server.assert_quiet()


def test_measures_are_counted(own_server):
    server = own_server()
    server.post(EMBED, {"input": ["abc", "de"]})
    server.post(EMBED, {"input": "!nan"})
    page = server.get("/metrics").body.decode()
    assert 'zse_prompt_tokens_total{model="fake"} 9\n' in page
    assert 'zse_answers_total{model="fake",reason="measured"} 1\n' in page
    assert 'zse_answers_total{model="fake",reason="error"} 1\n' in page
    assert 'zse_engine_pages{model="fake"} 100\n' in page and 'zse_engine_page_tokens{model="fake"} 64\n' in page
