"""POST /v1/chat/completions and /v1/completions: from the body to the engine and back, whole or streamed."""

import functools
import time
from collections.abc import Callable

import msgspec

from zse.engine.client import Channel
from zse.engine.messages import Ask, Measured, Tokens
from zse.errors import RequestError
from zse.http import json_body
from zse.http.exchange import Response
from zse.sampling.params import BeamParams
from zse.scheduler.options import RequestOptions
from zse.server.admission import BYTES_PER_TOKEN, Ticket
from zse.server.api_request import APIRequest
from zse.server.errors import APIError
from zse.server.generation import Choice, Delta, chat_logprobs, completion_logprobs
from zse.server.off_loop import OFF_LOOP_BYTES, ON_LOOP_ENTRIES, maybe_in_thread
from zse.server.prompt_scores import echoed_logprobs, prompt_logprobs
from zse.server.quotas import UNBOUNDED_TOKENS
from zse.server.requests import completions
from zse.server.requests.completions import Completion
from zse.server.requests.forms import named
from zse.server.statistics import CANCELLED, ERROR, Watch
from zse.server.tools import chat as chat_format

_encode = msgspec.json.encode


class Job(msgspec.Struct):
    """One admitted request: its prompts as token ids, and what answers look like."""

    completion: Completion
    chat: bool
    id: str
    created: int
    prompts: list[list[int]]
    ticket: Ticket
    watch: Watch
    fingerprint: str
    choices: list[Choice] = []
    measured: list[Measured] = []  # of the prompts, where their log-probabilities are wanted
    structure_field: str = ""
    answers: chat_format.Answers | None = None  # of a chat: how its answers are taken apart

    @property
    def num_scores(self) -> int:
        """Log-probabilities of prompts and answers so far, alternatives included."""
        asked = self.completion.params.logprobs
        of_answers = 0 if asked is None else (1 + asked) * sum(len(choice.scores) for choice in self.choices)
        return of_answers + (1 + (self.completion.prompt_top or 0)) * sum(result.num_tokens for result in self.measured)

    @property
    def total(self) -> int:
        return len(self.prompts) * self.completion.n


async def chat(app, request: APIRequest) -> Response | None:
    """POST /v1/chat/completions"""
    return await _serve(app, request, completions.read_chat, is_chat=True)


async def text(app, request: APIRequest) -> Response | None:
    """POST /v1/completions"""
    return await _serve(app, request, completions.read_completions, is_chat=False)


async def _serve(app, request: APIRequest, read: Callable[[dict], Completion], is_chat: bool) -> Response | None:
    app.check_accepting()
    app.admission.check(request.tenant)
    quota = app.limiter.enter(request)
    long = len(request.body) > OFF_LOOP_BYTES
    completion = await maybe_in_thread(long, lambda: read(json_body.parse(bytes(request.body))))
    served = app.find_model(request, completion.model, "model")
    if completion.model is None:
        completion.model = served.name
    ticket = app.admission.reserve(completion.num_choices, len(request.body) // BYTES_PER_TOKEN, request.tenant)
    watch = Watch(served.statistics, request.started, completion.num_choices, app.tenants.usage(request.tenant))
    job = Job(
        completion,
        is_chat,
        ("chatcmpl-" if is_chat else "cmpl-") + request.id.removeprefix("req_"),
        int(time.time()),
        [],
        ticket,
        watch,
        served.fingerprint,
    )
    channel = Channel(served.engine)
    failure = CANCELLED
    if completion.stream:
        # From now on a client that waits for long gets comments.
        channel.is_stalled = request.open_stream().is_stalled
    try:
        # The engine loads while the prompt becomes tokens.
        app.pool.enter(served)
        longest = UNBOUNDED_TOKENS if completion.params.max_tokens is None else completion.params.max_tokens
        quota.reserve(completion.num_choices, ticket.tokens + completion.num_choices * longest)
        model = await app.pool.text(served)
        completions.check_token_ids(completion, model.vocab_size)
        if is_chat:
            job.answers = await maybe_in_thread(
                long, lambda: chat_format.prepare(completion, model, app.tool_parser, app.reasoning_parser)
            )
        job.prompts = await maybe_in_thread(long, lambda: _tokenize(model, completion))
        watch.prompt_tokens = sum(map(len, job.prompts))
        ticket.set_tokens(watch.prompt_tokens)
        info = await app.pool.ready(served)
        limits = [_max_tokens(completion, len(prompt), info.max_context) for prompt in job.prompts]
        if job.answers is not None:
            job.answers.is_open = job.answers.opens_reasoning(model.decode(job.prompts[0][-16:]))
        structure, job.structure_field = chat_format.structure(completion, job.answers)
        options = app.request_options(request, completion.options)
        if completion.prompt_top is not None:
            job.measured = await channel.measure(job.prompts, Ask("logprobs", top=completion.prompt_top), options)
        if completion.beams is not None:
            await _search(channel, model, job, completion.beams, limits, options)
        else:
            _submit(channel, model, job, limits, msgspec.structs.replace(options, structure=structure))
        if completion.stream:
            await _stream(request, channel, model, job)
            return None
        return await _collect(request, channel, model, job)
    except RequestError as error:
        failure = ERROR
        raise named(error, job.structure_field) from None
    finally:
        channel.close()
        ticket.release()
        quota.leave(watch.completion_tokens + (watch.prompt_tokens if job.choices else 0))
        watch.end(_cached_tokens(job), failure)
        app.pool.leave(served)


def _tokenize(model, completion: Completion) -> list[list[int]]:
    if completion.messages is not None:
        prompts = [model.encode_chat(completion.messages, completion.tools, completion.template_variables)]
    else:
        prompts = [model.encode_text(prompt) if type(prompt) is str else prompt for prompt in completion.prompts]
    field = "prompt" if completion.messages is None else "messages"
    for index, prompt in enumerate(prompts):
        if not prompt:
            path = field if len(prompts) == 1 else f"{field}[{index}]"
            raise APIError("invalid_value", f"'{path}' is empty: it has no tokens.", path)
    return prompts


def _max_tokens(completion: Completion, prompt_tokens: int, max_context: int) -> int:
    """The answer's bound for one prompt; the rest of the context when the request has none."""
    wanted = completion.params.max_tokens
    if prompt_tokens + (1 if wanted is None else wanted) <= max_context:
        return max_context - prompt_tokens if wanted is None else wanted
    field = "prompt" if completion.messages is None else "messages"
    asked = f"{prompt_tokens} tokens in the {field}"
    if wanted:
        asked = f"{prompt_tokens + wanted} tokens ({prompt_tokens} in the {field}, {wanted} in the completion)"
    raise APIError(
        "context_length_exceeded", f"This model's context is {max_context} tokens, and you asked for {asked}.", field
    )


def _submit(channel: Channel, model, job: Job, limits: list[int], options: RequestOptions) -> None:
    """One engine request per choice; choice index = prompt index * best_of + answer index."""
    completion = job.completion
    for prompt, limit in zip(job.prompts, limits, strict=True):
        for answer in range(completion.best_of):
            choice = _new_choice(model, job)
            if limit == 0:
                choice.finish_reason = "length"  # only the prompt was wanted
                job.watch.finished("length")
                continue
            params = completions.choice_params(completion, answer, limit)
            channel.submit(choice.index, prompt, params, options)


def _new_choice(model, job: Job) -> Choice:
    completion, answers = job.completion, job.answers
    choice = Choice(
        len(job.choices),
        model.detokenizer(completion.params.stop, answers.controls if answers else ()),
        completion.params.logprobs is not None,
        answers.splitter(completion.stream) if answers else None,
    )
    job.choices.append(choice)
    return choice


async def _search(
    channel: Channel, model, job: Job, beams: BeamParams, limits: list[int], options: RequestOptions
) -> None:
    """A beam search of each prompt; its best answers become the choices, complete."""
    params = [msgspec.structs.replace(beams, max_tokens=limit) for limit in limits]
    for result in await channel.search(job.prompts, params, options):
        for reply in result.replies[: job.completion.n]:
            _accept(
                channel,
                job,
                _new_choice(model, job),
                Tokens(result.id, reply.tokens, reply.logprobs, reply.finish, result.cached_tokens),
            )


def _accept(channel: Channel, job: Job, choice: Choice, event: Tokens):
    """Feed one event; frees the queue's token share and stops the engine where a stop string ended the answer."""
    job.ticket.prefilled()
    job.watch.tokens(choice.index, event)
    delta = choice.feed(event)
    if delta.finish_reason is not None:
        job.watch.finished(delta.finish_reason)
        channel.cancel(choice.index)
    return delta


async def _collect(request: APIRequest, channel: Channel, model, job: Job) -> Response:
    choices = job.choices
    running = sum(choice.finish_reason is None for choice in choices)
    while running:
        index, event = await channel.next()
        if choices[index].finish_reason is None:
            running -= _accept(channel, job, choices[index], event).finish_reason is not None
    usage = _usage(job)
    request.note = f"{usage['prompt_tokens']}+{usage['completion_tokens']} tokens"
    return Response(200, await maybe_in_thread(job.num_scores > ON_LOOP_ENTRIES, lambda: _whole(model, job, usage)))


def _whole(model, job: Job, usage: dict) -> bytes:
    """The body of an answer that is not streamed."""
    choices, best_of, n = job.choices, job.completion.best_of, job.completion.n
    answers = []
    for prompt in range(len(job.prompts)):
        group = choices[prompt * best_of : (prompt + 1) * best_of]
        answers += sorted(group, key=lambda choice: choice.rank)[:n] if job.completion.rank else group
    body = _envelope(job, streamed=False)
    body["choices"] = [_whole_choice(model, job, choice, index) for index, choice in enumerate(answers)]
    body["usage"] = usage
    if job.chat and job.completion.params.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs(job.prompts[0], job.measured[0], model.token_bytes)
    return _encode(body)


def _envelope(job: Job, streamed: bool) -> dict:
    name = ("chat.completion.chunk" if streamed else "chat.completion") if job.chat else "text_completion"
    envelope = {
        "id": job.id,
        "object": name,
        "created": job.created,
        "model": job.completion.model,
        "system_fingerprint": job.fingerprint,
    }
    if job.completion.service_tier:
        envelope["service_tier"] = "default"
    return envelope


def _whole_choice(model, job: Job, choice: Choice, index: int) -> dict:
    scores = None
    if job.completion.params.logprobs is not None:
        scores = (chat_logprobs if job.chat else completion_logprobs)(choice.scores, model.token_bytes)
    out: dict = {"index": index, "logprobs": scores, "finish_reason": choice.finish_reason}
    if job.chat:
        out["message"] = chat_format.message(choice)
    else:
        echo = _echo(model, job, choice.index)
        out["text"] = echo + choice.text
        prompt = choice.index // job.completion.best_of
        if echo and scores is not None:
            out["logprobs"] = echoed_logprobs(
                job.prompts[prompt], job.measured[prompt], choice.scores, len(echo), model.token_bytes
            )
        if job.completion.params.prompt_logprobs is not None:
            out["prompt_logprobs"] = prompt_logprobs(job.prompts[prompt], job.measured[prompt], model.token_bytes)
    return out


def _echo(model, job: Job, choice_index: int) -> str:
    if not job.completion.echo:
        return ""
    prompt = choice_index // job.completion.best_of
    given = job.completion.prompts[prompt]
    return given if type(given) is str else model.decode(given)


def _cached_tokens(job: Job) -> int:
    """Of the prompts; each counts once, however many answers it gets."""
    return sum(choice.cached_tokens for choice in job.choices[:: job.completion.best_of])


def _usage(job: Job) -> dict:
    prompt_tokens = sum(map(len, job.prompts))
    completion_tokens = sum(choice.num_tokens for choice in job.choices)
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": _cached_tokens(job)},
    }
    if job.chat:
        reasoning = sum(choice.reasoning_tokens for choice in job.choices)
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return usage


async def _stream(request: APIRequest, channel: Channel, model, job: Job) -> None:
    """Server-sent events: role first (chat), deltas, one finish_reason per choice, usage if asked, [DONE]."""
    stream, choices = request.stream, job.choices
    envelope = _envelope(job, streamed=True)
    if job.completion.include_usage:
        envelope["usage"] = None
    running = len(choices)
    opened: set[int] = set()
    while running:
        index, event = await channel.next()
        choice = choices[index]
        if choice.finish_reason is not None:
            continue
        delta = _accept(channel, job, choice, event)
        running -= delta.finish_reason is not None
        parts = []
        if index not in opened:
            parts = await maybe_in_thread(
                job.num_scores > ON_LOOP_ENTRIES, functools.partial(_opening, model, job, choice)
            )
        opened.add(index)
        parts += _parts(model, job, delta)
        if parts:
            data = b""
            for part in parts:
                part["index"] = index
                data += b"data: " + _encode(envelope | {"choices": [part]}) + b"\n\n"
            stream.send(data)
            await stream.drain()
    usage = _usage(job)
    request.note = f"{usage['prompt_tokens']}+{usage['completion_tokens']} tokens"
    data = b"data: [DONE]\n\n"
    if job.completion.include_usage:
        data = b"data: " + _encode(envelope | {"choices": [], "usage": usage}) + b"\n\n" + data
    stream.send(data)
    stream.finish()


def _opening(model, job: Job, choice: Choice) -> list[dict]:
    if job.chat:
        return [{"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}]
    echo, scores = _echo(model, job, choice.index), None
    if echo and job.completion.params.logprobs is not None:
        prompt = choice.index // job.completion.best_of
        scores = echoed_logprobs(job.prompts[prompt], job.measured[prompt], [], len(echo), model.token_bytes)
    return [{"text": echo, "logprobs": scores, "finish_reason": None}] if echo else []


def _parts(model, job: Job, delta: Delta) -> list[dict]:
    """What chunks hold of one event: a choice each, scores in the first, the finish reason in one of its own."""
    contents: list[dict] = []
    if not job.chat:
        contents = [{"text": delta.text}] if delta.text or delta.scores else []
    else:
        contents = [{"delta": words} for words in chat_format.deltas(delta)]
        if delta.scores and not contents:
            contents = [{"delta": {"content": ""}}]
    parts = [content | {"logprobs": None, "finish_reason": None} for content in contents]
    if parts and job.completion.params.logprobs is not None:
        parts[0]["logprobs"] = (chat_logprobs if job.chat else completion_logprobs)(delta.scores, model.token_bytes)
    if delta.finish_reason is not None:
        last: dict = {"delta": {}} if job.chat else {"text": ""}
        parts.append(last | {"logprobs": None, "finish_reason": delta.finish_reason})
    return parts
