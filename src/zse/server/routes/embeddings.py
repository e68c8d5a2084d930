"""POST /v1/embeddings: vectors of texts, from the model's own hidden states."""

import base64
import math
from array import array
from collections.abc import Iterator

import msgspec

from zse.engine.messages import Ask, Ready
from zse.http.exchange import Response
from zse.server import measuring
from zse.server.api_request import APIRequest
from zse.server.errors import APIError
from zse.server.relevance import Measurement
from zse.server.requests.measures import Embeddings, read_embeddings
from zse.server.work import maybe_in_thread

LONG = 1 << 16  # numbers; JSON of more is written in a thread (some 10 ms)


async def embeddings(app, request: APIRequest) -> Response:
    """POST /v1/embeddings"""
    asked, results = await measuring.measure(app, request, read_embeddings, prepare_texts, check_dimensions)
    long = sum(len(result.vector) for result in results.results) > 4 * LONG
    return Response(200, await maybe_in_thread(long, lambda: _body(asked, results)))


def prepare_texts(asked: Embeddings, model, info: Ready) -> Iterator[Measurement]:
    # Of a part of the vector only that part is brought to length 1, once it is there.
    ask = Ask(pooling_of(asked.pooling, info), normalize=asked.normalize)
    prompt = "" if asked.prompt_name is None else _prompt(asked.prompt_name, model.prompts)
    for index, given in enumerate(asked.input):
        path = "input" if len(asked.input) == 1 else f"input[{index}]"
        ids = model.encode_text(prompt + given) if isinstance(given, str) else given
        if asked.truncate and len(ids) > info.max_context:
            ids = model.cut(ids, info.max_context) if isinstance(given, str) else ids[: info.max_context]
        yield Measurement(ids, ask, path)


def _prompt(name: str, prompts: dict[str, str]) -> str:
    if name not in prompts:
        known = f"it has {', '.join(prompts)}" if prompts else "it has none"
        raise APIError(
            "invalid_value", f"'prompt_name' {name!r} is not one of this model's prompts: {known}.", "prompt_name"
        )
    return prompts[name]


def pooling_of(asked: str | None, info: Ready):
    """What a request asks for, else what the model's files say, else what its kind is mostly pooled by."""
    return asked or info.pooling or ("last" if info.generates else "mean")


def check_dimensions(asked: Embeddings, info: Ready) -> None:
    most = info.hidden_size
    if asked.dimensions is not None and asked.dimensions > most:
        raise APIError(
            "out_of_range", f"'dimensions' must be at most {most}, the numbers of this model's vectors.", "dimensions"
        )


def _body(asked: Embeddings, results: measuring.Results) -> bytes:
    data = [
        {"object": "embedding", "index": index, "embedding": vector_of(asked, result.vector)}
        for index, result in enumerate(results.results)
    ]
    return msgspec.json.encode({"object": "list", "data": data, "model": results.model, "usage": results.usage})


def vector_of(asked: Embeddings, data: bytes | None) -> str | list[float]:
    assert data is not None
    if asked.dimensions is not None:
        data = data[: 4 * asked.dimensions]
        if asked.normalize:
            values = floats(data)
            length = math.sqrt(math.fsum(value * value for value in values)) or 1.0
            data = array("f", [value / length for value in values]).tobytes()
    return base64.b64encode(data).decode() if asked.encoding_format == "base64" else floats(data).tolist()


def floats(data: bytes) -> array:
    """f32 little-endian, as all machines are that this runs on."""
    out = array("f")
    out.frombytes(data)
    return out
