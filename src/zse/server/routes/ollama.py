"""The routes of Ollama's API: /api/chat, /api/generate, /api/embed, /api/tags, /api/show, /api/ps, /api/version."""

import datetime
import functools
import hashlib
import math
import os
import time
from collections.abc import Callable

import msgspec

from zse import __version__
from zse.errors import ZSEError
from zse.formats.info import info
from zse.http.exchange import Response
from zse.server import measuring
from zse.server.answering import Choice, ChoiceDelta, CompletionRun, answer
from zse.server.api_request import APIRequest
from zse.server.errors import APIError
from zse.server.logprobs import chat_logprobs
from zse.server.requests.completions import Completion
from zse.server.requests.measures import Embeddings
from zse.server.requests.ollama import (
    SHOW,
    read_ollama_chat,
    read_ollama_embed,
    read_ollama_embeddings,
    read_ollama_generate,
    read_which,
)
from zse.server.routes.embeddings import check_dimensions, prepare_texts, vector_of
from zse.server.tools import parsers
from zse.server.tools.answer import format_of
from zse.server.tools.calls import arguments_of
from zse.server.work import RequestRun, maybe_in_thread

_encode = msgspec.json.encode
LINES = "application/x-ndjson"
SMALL = 16 << 10  # bytes of a body that is parsed on the event loop, to see whether it asks for anything


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


# -- /api/chat and /api/generate


class _Writer:
    """Lines of JSON, the last of which says why it ended and how long it took. Calls are written when they are
    complete."""

    def __init__(self, is_chat: bool, job: CompletionRun):
        self.job, self._is_chat = job, is_chat
        self._num_calls = 0  # that were written
        self._head = {"model": job.completion.model or job.work.served.name, "created_at": ""}

    def _line(self, text: str, reasoning: str, calls: list, scores: list, first_call: int = 0, **more: object) -> dict:
        self._head["created_at"] = _time(time.time())
        body: dict = {"content": text} | ({"thinking": reasoning} if reasoning else {})
        if calls:
            body["tool_calls"] = [  # Open WebUI joins what has the same index to one call
                {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments_of(call)}}
                for index, call in enumerate(calls, first_call)
            ]
        if self._is_chat:
            out = self._head | {"message": {"role": "assistant"} | body}
        else:
            out = self._head | {"response": body.pop("content")} | body
        if scores:
            out["logprobs"] = [
                {name: score[name] for name in ("token", "logprob", "bytes", "top_logprobs")}
                for score in chat_logprobs(scores, self.job.model.token_bytes)["content"]
            ]
        return out | {"done": False} | more

    def _end(self) -> dict:
        """What the last line says. Durations in nanoseconds: what stands before the prompt, which is the model's load where it was not
        loaded, and its place in the queue; the prompt; the answer."""
        job, usage, now = self.job, self.job.usage, time.monotonic()
        started, first = job.work.request.started, job.work.first or now
        prompt_s = job.work.prefill_s
        return {
            "done": True,
            "done_reason": "length" if job.choices[0].finish_reason == "length" else "stop",
            "total_duration": round(1e9 * (now - started)),
            "load_duration": round(1e9 * (first - started - prompt_s)),
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": round(1e9 * prompt_s),
            "eval_count": usage.completion,
            "eval_duration": round(1e9 * (now - first)),
        }

    def whole(self) -> bytes:
        choice = self.job.choices[0]
        return _encode(self._line(choice.text, choice.reasoning, choice.calls, choice.scores, **self._end()))

    def part(self, choice: Choice, delta: ChoiceDelta, is_first: bool) -> bytes:
        calls = []
        if delta.calls or delta.finish_reason is not None:
            calls = choice.calls[self._num_calls :]
            if delta.finish_reason is None and not delta.calls[-1][1].is_last:
                calls = calls[:-1]
            self._num_calls += len(calls)
        first = self._num_calls - len(calls)
        if not (delta.text or delta.reasoning or calls or delta.scores):
            return b""
        return _encode(self._line(delta.text, delta.reasoning, calls, delta.scores, first)) + b"\n"

    def last(self) -> bytes:
        return _encode(self._line("", "", [], [], **self._end())) + b"\n"


NEEDED = {True: "messages", False: "prompt"}
_NOTHING: dict = {True: [{"role": "user"}], False: " "}  # in its place, so that the other fields are checked


async def _generate(app, request: APIRequest, is_chat: bool, read: Callable) -> Response | None:
    body = None
    if len(request.body) <= SMALL:
        body = request.json()
        if not body.get(NEEDED[is_chat]):
            return await _load(app, request, read(body | {NEEDED[is_chat]: _NOTHING[is_chat]}), is_chat)
    request.media_type, request.comment = LINES, b""
    return await answer(app, request, read=lambda body: (read(body), functools.partial(_Writer, is_chat)), body=body)


async def _load(app, request: APIRequest, completion: Completion, is_chat: bool) -> Response:
    """A request without a prompt."""
    await _load_only(app, request, completion)
    empty: dict = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    done = {"done": True, "done_reason": "unload" if completion.keep_alive == 0 else "load"}
    return Response.json({"model": completion.model, "created_at": _time(time.time())} | empty | done)


async def _load_only(app, request: APIRequest, asked: Completion | Embeddings) -> None:
    """What is done where nothing is asked: the model is loaded, or, with a keep_alive of 0, unloaded. It waits as a request that
    asks for something does."""
    with RequestRun(app, request) as work:
        if asked.keep_alive == 0:
            await _unload(app, request, asked.model)
        else:
            work.start(asked.model, prompt_tokens=0)
            work.keep(asked.keep_alive)
            await app.pool.ready(work.served)
            work.outcomes["loaded"] += 1


async def _unload(app, request: APIRequest, name: str | None) -> None:
    """Now, or with the last of the requests that use it."""
    served = app.find_model(request, name, "model")
    if not request.access.admin:
        raise APIError("insufficient_permissions", "An admin's key may unload models.", "keep_alive")
    if served.users:
        app.pool.keep(served, 0.0)
    else:
        await app.pool.unload(served)


# POST /api/chat and POST /api/generate
chat = functools.partial(_generate, is_chat=True, read=read_ollama_chat)
generate = functools.partial(_generate, is_chat=False, read=read_ollama_generate)


# -- /api/embed and /api/embeddings


async def _embeds_nothing(app, request: APIRequest, field: str, read: Callable[[dict], Embeddings]) -> bool:
    """Whether there is no text in `field`; then the model is loaded."""
    body = request.json() if len(request.body) <= SMALL else None
    if body is None or body.get(field) not in (None, "", []):
        return False
    await _load_only(app, request, read(body | {field: " "}))
    return True


async def embed(app, request: APIRequest) -> Response:
    """POST /api/embed"""
    if await _embeds_nothing(app, request, "input", read_ollama_embed):
        return Response.json({"model": request.json()["model"], "embeddings": []})
    asked, results = await measuring.measure(app, request, read_ollama_embed, prepare_texts, check_dimensions)

    def body() -> bytes:
        vectors = [vector_of(asked, result.vector) for result in results.results]
        took = round(1e9 * (time.monotonic() - request.started))
        count = results.usage["prompt_tokens"]
        return _encode(
            {
                "model": results.model,
                "embeddings": vectors,
                "total_duration": took,
                "load_duration": 0,
                "prompt_eval_count": count,
            }
        )

    return Response(200, await maybe_in_thread(len(results.results) > 16, body))


async def embeddings(app, request: APIRequest) -> Response:
    """POST /api/embeddings"""
    if await _embeds_nothing(app, request, "prompt", read_ollama_embeddings):
        return Response.json({"embedding": []})
    asked, results = await measuring.measure(app, request, read_ollama_embeddings, prepare_texts, check_dimensions)
    return Response.json({"embedding": vector_of(asked, results.results[0].vector)})


# -- models


@functools.lru_cache(maxsize=64)
def facts_of(path: str, changed: float) -> dict:
    """What a model's files say of it; {} where they cannot be read. changed: of the file, so that it is read again."""
    try:
        found = info(path)
    except (ZSEError, OSError):
        return {}
    types = found["types"]
    largest = max(types, key=lambda name: types[name]["nbytes"]) if types else ""
    billions = found["num_parameters"] / 1e9
    size = f"{billions:.1f}B" if billions >= 1 else f"{1000 * billions:.0f}M"
    return {
        "size": found["nbytes"],
        "metadata": {key: value for key, value in found["metadata"].items() if not key.startswith("tokenizer.")},
        "parameter_count": found["num_parameters"],
        "details": {
            "parent_model": "",
            "format": found["kind"],
            "family": found["architecture"],
            "families": [found["architecture"]],
            "parameter_size": size,
            "quantization_level": largest.upper(),
        },
    }


def _changed(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


async def _card(served) -> dict:
    path = served.spec.path
    changed = _changed(path)
    facts = await maybe_in_thread(True, lambda: facts_of(path, changed))
    return {
        "name": served.name,
        "model": served.name,
        "modified_at": _time(changed),
        "size": facts.get("size", 0),
        "digest": hashlib.sha256(f"{served.name}\0{facts.get('size', 0)}\0{changed}".encode()).hexdigest(),
        "details": facts.get("details", {}),
    }


async def tags(app, request: APIRequest) -> Response:
    """GET /api/tags"""
    with RequestRun(app, request):
        return Response.json({"models": [await _card(served) for served in app.models(request)]})


async def running(app, request: APIRequest) -> Response:
    """GET /api/ps"""
    with RequestRun(app, request):
        out = []
        for served in app.models(request):
            ready = served.engine.info
            if served.state == "loaded" and ready is not None:
                size = sum(ready.memory_bytes.values())
                used = {"context_length": ready.max_context, "expires_at": _expires(app, served), "size": size}
                out.append(await _card(served) | used | {"size_vram": size if ready.kernels == "gpu" else 0})
        return Response.json({"models": out})


def _expires(app, served) -> str:
    """When it will have been idle for too long, unless it is asked. In a hundred years: never, which `ollama ps` calls so, where it takes
    no time for one that is over."""
    keep_s = app.pool.idle_s if served.keep_s is None else served.keep_s
    keep_s = math.inf if keep_s is None else keep_s
    idle_s = 0.0 if served.users else time.monotonic() - served.last_used
    return _time(time.time() + min(max(0.0, keep_s - idle_s), 100 * 365 * 86400.0))


async def show(app, request: APIRequest) -> Response:
    """POST /api/show"""
    with RequestRun(app, request):
        values = read_which(SHOW, request.json())
        served = app.find_model(request, values["model"], "model")
        model = await app.pool.text(served)
        card = await _card(served)
        facts = facts_of(served.spec.path, _changed(served.spec.path))
        ready = served.engine.info
        is_encoder = ready is not None and not ready.generates
        capabilities = ["embedding"] if is_encoder else ["completion", "embedding"]
        if not is_encoder and model.template_source is not None:
            found = await maybe_in_thread(True, lambda: _format(model.template_source, app))
            capabilities += [name for name, there in zip(("tools", "thinking"), found, strict=True) if there]
        if ready is not None and ready.vision:
            capabilities.append("vision")
        body = {
            "modelfile": "",
            "parameters": "\n".join(f"{name} {value:g}" for name, value in model.sampling.items()),
            "template": model.template_source or "",
            "details": card["details"],
            "model_info": facts.get("metadata", {}) | {"general.parameter_count": facts.get("parameter_count")},
            "capabilities": capabilities,
            "modified_at": card["modified_at"],
        }
        return Response.json(body)


def _format(template: str, app) -> tuple[bool, bool]:
    """Whether a chat template takes tools, and reasons."""
    form = format_of(template, app.tool_parser, app.reasoning_parser)
    return form.takes_tools and form.tools != parsers.NONE, form.reasoning != parsers.NONE


async def version(app, request: APIRequest) -> Response:
    """GET /api/version"""
    return Response.json({"version": __version__})
