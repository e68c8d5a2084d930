"""POST /v1/rerank and /v1/score: how well texts fit each other (zse.server.relevance has the methods)."""

import time
from collections.abc import Iterator

from zse.engine.messages import Ask, Ready
from zse.http.exchange import Response
from zse.server import measuring
from zse.server.api_request import APIRequest
from zse.server.errors import APIError
from zse.server.relevance import CROSS_ENCODER, EMBEDDING, LIKELIHOOD, Judge, Measurement, cosine
from zse.server.requests.measures import Pairs, read_rerank, read_score
from zse.server.routes.embeddings import floats, pooling_of
from zse.server.work import ON_LOOP_ENTRIES, maybe_in_thread

ON_LOOP_NUMBERS = 1 << 14  # of vectors that are compared: 1.5 ms; a thousand of 4,096 take 0.4 s


async def rerank(app, request: APIRequest) -> Response:
    """POST /v1/rerank"""
    scores, asked, results = await _compare(app, request, read_rerank, ("query", "documents"), LIKELIHOOD)
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: asked.top_n]
    rows: list[dict] = [{"index": index, "relevance_score": scores[index]} for index in order]
    if asked.return_documents:
        for row in rows:
            row["document"] = {"text": asked.documents[row["index"]]}
    id = "rerank-" + request.id.removeprefix("req_")
    return Response.json({"id": id, "model": results.model, "results": rows, "usage": results.usage})


async def score(app, request: APIRequest) -> Response:
    """POST /v1/score"""
    scores, asked, results = await _compare(app, request, read_score, ("text_1", "text_2"), EMBEDDING)
    body = {
        "id": "score-" + request.id.removeprefix("req_"),
        "object": "list",
        "created": int(time.time()),
        "model": results.model,
        "data": [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)],
        "usage": results.usage | {"completion_tokens": 0},
    }
    return Response.json(body)


async def _compare(app, request: APIRequest, read, fields: tuple[str, str], default: str):
    """(score of each pair, the request, measuring.Results). default: the method of a language model."""
    judges: list[Judge] = []

    def prepare(asked: Pairs, model, info: Ready) -> Iterator[Measurement]:
        documents = [_cut(model, document, asked.max_tokens_per_doc) for document in asked.documents]
        method = asked.method or _method(model, info, default)
        most = info.max_context if asked.truncate else None
        if method == EMBEDDING:
            ask = Ask(pooling_of(asked.pooling, info), normalize=True)

            def ids_of(text: str) -> list[int]:
                ids = model.encode_text(text)
                return ids if most is None else model.cut(ids, most)

            for name, texts in zip(fields, (asked.queries, documents), strict=True):
                for index, text in enumerate(texts):
                    yield Measurement(ids_of(text), ask, _path(name, index, texts))
            return
        judges.append(Judge(model, method, asked.task, most))
        queries = [_cut(model, query, most) for query in asked.queries]  # of more than the context nothing is left
        queries *= len(documents) if len(queries) == 1 else 1
        for index, (query, document) in enumerate(zip(queries, documents, strict=True)):
            yield judges[0].sequence(query, document, _path(fields[1], index, documents))

    asked, results = await measuring.measure(app, request, read, prepare)
    if judges:
        scores = await maybe_in_thread(
            results.num_tokens > ON_LOOP_ENTRIES, lambda: [judges[0].score(result) for result in results.results]
        )
        return scores, asked, results
    vectors = [floats(result.vector) for result in results.results]
    count = len(asked.queries)
    ones = vectors[:count] * (len(asked.documents) if count == 1 else 1)
    pairs = list(zip(ones, vectors[count:], strict=True))
    is_long = len(pairs) * len(vectors[0]) > ON_LOOP_NUMBERS
    return await maybe_in_thread(is_long, lambda: [cosine(*pair) for pair in pairs]), asked, results


def _method(model, info: Ready, default: str) -> str:
    """What the model was trained for, where that is known."""
    if info.num_labels > 1:
        message = f"This model's classifier has {info.num_labels} labels: how well two texts fit takes one. Give 'method' embedding."
        raise APIError("unsupported_parameter", message, "method")
    if info.num_labels:
        return CROSS_ENCODER
    return model.method or (default if info.generates else EMBEDDING)


def _path(name: str, index: int, texts: list[str]) -> str:
    return name if len(texts) == 1 and name != "documents" else f"{name}[{index}]"


def _cut(model, text: str, max_tokens: int | None) -> str:
    if max_tokens is None:
        return text
    ids = model.encode_part(text)
    return text if len(ids) <= max_tokens else model.decode(ids[:max_tokens])
