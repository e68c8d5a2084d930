"""POST /tokenize and /detokenize: the tokenizer of a served model; the engine is not asked."""

from collections.abc import Callable
from typing import Any

import msgspec

from zse.http.exchange import Response
from zse.server import images
from zse.server.api_request import APIRequest
from zse.server.errors import APIError
from zse.server.requests.conversation import has_images
from zse.server.requests.tokenize import read_detokenize, read_tokenize
from zse.server.work import RequestRun, check_text, maybe_in_thread


async def _answer(app, request: APIRequest, read: Callable[[dict], dict], make: Callable[[dict, Any, Any], dict]):
    with RequestRun(app, request) as run:
        values = await maybe_in_thread(run.is_long, lambda: read(request.json()))
        served = app.find_model(request, values["model"], "model")
        model = await app.pool.text(served)
        renders = values.get("messages") is not None  # as in routes/completions.py
        pictures = None
        if renders and has_images(values["messages"]):
            pictures = await images.prepare(run, served, values["messages"], model, reads=False)
        else:
            check_text(request, 0)
        body = await maybe_in_thread(run.is_long or renders, lambda: make(values, model, pictures))
        if served.engine.info is not None and "count" in body:
            body["max_model_len"] = served.engine.info.max_context
        return Response(200, msgspec.json.encode(body))


async def tokenize(app, request: APIRequest) -> Response:
    """POST /tokenize"""
    return await _answer(app, request, read_tokenize, _tokens)


async def detokenize(app, request: APIRequest) -> Response:
    """POST /detokenize"""
    return await _answer(app, request, read_detokenize, _text)


def _tokens(values: dict, model, pictures: "images.Pictures | None") -> dict:
    if values["messages"] is not None:
        given = values["messages"], values["tools"], values["variables"]
        ids = model.encode_chat(*given) if pictures is None else pictures.encode_chat(model, *given)[0]
    else:
        ids = (model.encode_text if values["add_special_tokens"] else model.encode_part)(values["prompt"])
    body = {"count": len(ids), "max_model_len": None, "tokens": ids}
    if values["return_token_strs"]:
        body["token_strs"] = [model.token_bytes(id).decode("utf-8", "replace") for id in ids]
    return body


def _text(values: dict, model, pictures: None) -> dict:
    if values["tokens"] and max(values["tokens"]) >= model.vocab_size:
        message = f"'tokens' holds a token id outside the vocabulary of {model.vocab_size}."
        raise APIError("invalid_token_id", message, "tokens")
    return {"prompt": model.decode(values["tokens"])}
