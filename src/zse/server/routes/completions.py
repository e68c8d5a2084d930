"""POST /v1/chat/completions and /v1/completions: from the body to the engine and back, whole or streamed."""

import functools
import time
from collections.abc import Callable
from typing import Any

import msgspec

from zse.engine.messages import Ask, Measured, Tokens
from zse.errors import RequestError
from zse.http.exchange import Response
from zse.sampling.params import BeamParams
from zse.scheduler.options import RequestOptions
from zse.server.api_request import APIRequest
from zse.server.errors import APIError
from zse.server.generation import Choice, ChoiceDelta, chat_logprobs, completion_logprobs
from zse.server.prompt_scores import echoed_logprobs, prompt_logprobs
from zse.server.requests.completions import Completion, check_token_ids, choice_params, read_chat, read_completions
from zse.server.requests.forms import named
from zse.server.tools.chat import Answers, deltas, message, prepare, structure_for
from zse.server.work import ON_LOOP_ENTRIES, RequestRun, maybe_in_thread

_encode = msgspec.json.encode


# Reserved of a quota for an answer that has no max_tokens: what it may become is the rest of the context, what it becomes is
# less.
UNBOUNDED_TOKENS = 512


class CompletionRun(msgspec.Struct):
    """One admitted request: its prompts as token ids, and what answers look like. envelope: what the body and every chunk
    of it begin with. model: its tokenizer and template."""

    completion: Completion
    is_chat: bool
    envelope: dict
    work: RequestRun
    model: Any = None
    prompts: list[list[int]] = []
    choices: list[Choice] = []
    measured: list[Measured] = []  # of the prompts, where their log-probabilities are wanted
    structure_field: str = ""
    answers: Answers | None = None  # of a chat: how its answers are taken apart

    @property
    def num_scores(self) -> int:
        """Log-probabilities of prompts and answers so far, alternatives included."""
        asked = self.completion.params.logprobs
        of_answers = 0 if asked is None else (1 + asked) * sum(len(choice.scores) for choice in self.choices)
        return of_answers + (1 + (self.completion.prompt_top or 0)) * sum(result.num_tokens for result in self.measured)

    @property
    def cached_tokens(self) -> int:
        """Of the prompts; each counts once, however many answers it gets."""
        return sum(choice.cached_tokens for choice in self.choices[:: self.completion.best_of])


async def _serve(app, request: APIRequest, *, read: Callable[[dict], Completion], is_chat: bool) -> Response | None:
    with RequestRun(app, request) as work:
        completion = await maybe_in_thread(work.is_long, lambda: read(request.json()))
        most = completion.params.max_tokens
        made = completion.num_choices
        if completion.beams is not None:
            made = made // completion.n * completion.beams.beam_width  # the beams that are not answers, too
        work.start(
            completion.model,
            completion.num_choices,
            made * (UNBOUNDED_TOKENS if most is None else most),
            completion.num_ids,
        )
        envelope = {
            "id": ("chatcmpl-" if is_chat else "cmpl-") + request.id.removeprefix("req_"),
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": completion.model or work.served.name,
            "system_fingerprint": work.served.fingerprint,
        }
        if completion.service_tier:
            envelope["service_tier"] = "default"
        job = CompletionRun(completion, is_chat, envelope, work)
        if completion.stream:
            request.last_write = time.monotonic()  # from now on a client that waits for long gets comments
            work.channel.stalled_s = request.connection.stalled_s
        try:
            await _begin(app, job)
            return await (_stream(job) if completion.stream else _collect(job))
        except RequestError as error:
            raise named(error, job.structure_field) from None
        finally:
            work.cached = job.cached_tokens


# POST /v1/chat/completions and POST /v1/completions
chat = functools.partial(_serve, read=read_chat, is_chat=True)
text = functools.partial(_serve, read=read_completions, is_chat=False)


async def _begin(app, job: CompletionRun) -> None:
    """From text to the engine: tokenize, check what depends on the model, submit."""
    work, completion = job.work, job.completion
    model = job.model = await app.pool.text(work.served)
    own = {name: model.sampling[name] for name in completion.left_out & model.sampling.keys()}
    completion.params = msgspec.structs.replace(completion.params, **own)
    check_token_ids(completion, model.vocab_size)
    if job.is_chat and not model.has_chat_template:
        info = await app.pool.ready(work.served)
        if not info.generates:
            raise _encoder()  # it has no template either, which is not the reason
    if job.is_chat:
        # The template is a stranger's program: the event loop does not wait for it, however short the chat is.
        parsers = app.tool_parser, app.reasoning_parser
        job.answers = await maybe_in_thread(True, lambda: prepare(completion, model, *parsers))
    job.prompts = await maybe_in_thread(work.is_long or job.is_chat, lambda: _tokenize(model, completion))
    work.prompt_tokens = sum(map(len, job.prompts))
    work.hold(work.choices, work.prompt_tokens)  # the true number, in place of the estimate
    if work.prompt_tokens > work.estimated:
        work.reserve(work.prompt_tokens)
    info = await app.pool.ready(work.served)
    if not info.generates:
        raise _encoder()
    limits = [_max_tokens(completion, len(prompt), info.max_context) for prompt in job.prompts]
    if job.answers is not None:
        job.answers.is_open = job.answers.opens_reasoning(model.decode(job.prompts[0][-16:]))
    structure, job.structure_field = structure_for(completion, job.answers)
    options = app.request_options(work.request, completion.options)
    if completion.prompt_top is not None:
        ask = Ask("logprobs", top=completion.prompt_top)
        job.measured = await work.channel.complete(job.prompts, [ask] * len(job.prompts), options)
    if completion.beams is not None:
        await _search(job, completion.beams, limits, options)
        return
    options = msgspec.structs.replace(options, structure=structure)
    for prompt, limit in zip(job.prompts, limits, strict=True):
        for answer in range(completion.best_of):  # choice index = prompt index * best_of + answer index
            choice = Choice(len(job.choices), model, completion.params, job.answers)
            job.choices.append(choice)
            if limit:
                params = choice_params(completion, answer, limit)
                work.served.engine.submit(work.channel, choice.index, prompt, params, options)
            else:
                choice.finish_reason = "length"  # only the prompt was wanted
                work.outcomes["length"] += 1


def _encoder() -> APIError:
    message = "This model is an encoder and writes no text: it answers /v1/embeddings, /v1/rerank and /v1/score."
    return APIError("unsupported_parameter", message, "model")


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


async def _search(job: CompletionRun, beams: BeamParams, limits: list[int], options: RequestOptions) -> None:
    """A beam search of each prompt; its best answers become the choices, complete."""
    params = [msgspec.structs.replace(beams, max_tokens=limit) for limit in limits]
    for result in await job.work.channel.complete(job.prompts, params, options):
        for reply in result.replies[: job.completion.n]:
            job.choices.append(Choice(len(job.choices), job.model, job.completion.params, job.answers))
            event = Tokens(result.id, reply.tokens, reply.logprobs, reply.finish, result.cached_tokens)
            _accept(job, job.choices[-1], event)


def _accept(job: CompletionRun, choice: Choice, event: Tokens) -> ChoiceDelta:
    """Feed one event; stops the engine where a stop string ended the answer."""
    job.work.count(choice.index, event)
    delta = choice.feed(event)
    if delta.finish_reason is not None:
        job.work.outcomes[delta.finish_reason] += 1
        if event.finish is None:
            job.work.channel.cancel(choice.index)
    return delta


async def _collect(job: CompletionRun) -> Response:
    choices = job.choices
    running = sum(choice.finish_reason is None for choice in choices)
    while running:
        index, event = await job.work.channel.next()
        if choices[index].finish_reason is None:
            running -= _accept(job, choices[index], event).finish_reason is not None
    usage = _usage(job)
    return Response(200, await maybe_in_thread(job.num_scores > ON_LOOP_ENTRIES, lambda: _whole(job, usage)))


def _whole(job: CompletionRun, usage: dict) -> bytes:
    """The body of an answer that is not streamed."""
    choices, best_of, n = job.choices, job.completion.best_of, job.completion.n
    answers = []
    for prompt in range(len(job.prompts)):
        group = choices[prompt * best_of : (prompt + 1) * best_of]
        answers += sorted(group, key=lambda choice: choice.rank)[:n] if best_of > n else group
    body = job.envelope | {
        "choices": [_whole_choice(job, choice, index) for index, choice in enumerate(answers)],
        "usage": usage,
    }
    if job.is_chat and job.completion.params.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs(job.prompts[0], job.measured[0], job.model.token_bytes)
    return _encode(body)


def _whole_choice(job: CompletionRun, choice: Choice, index: int) -> dict:
    scores = None
    if job.completion.params.logprobs is not None:
        scores = (chat_logprobs if job.is_chat else completion_logprobs)(choice.scores, job.model.token_bytes)
    out: dict = {"index": index, "logprobs": scores, "finish_reason": choice.finish_reason}
    if job.is_chat:
        out["message"] = message(choice)
    else:
        echo = _echo(job, choice.index)
        out["text"] = echo + choice.text
        prompt = choice.index // job.completion.best_of
        if echo and scores is not None:
            out["logprobs"] = echoed_logprobs(
                job.prompts[prompt], job.measured[prompt], choice.scores, len(echo), job.model.token_bytes
            )
        if job.completion.params.prompt_logprobs is not None:
            out["prompt_logprobs"] = prompt_logprobs(job.prompts[prompt], job.measured[prompt], job.model.token_bytes)
    return out


def _echo(job: CompletionRun, choice_index: int) -> str:
    if not job.completion.echo:
        return ""
    prompt = choice_index // job.completion.best_of
    given = job.completion.prompts[prompt]
    return given if type(given) is str else job.model.decode(given)


def _usage(job: CompletionRun) -> dict:
    prompt_tokens = job.work.prompt_tokens
    completion_tokens = sum(choice.num_tokens for choice in job.choices)
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": job.cached_tokens},
    }
    if job.is_chat:
        reasoning = sum(choice.reasoning_tokens for choice in job.choices)
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    job.work.request.note = f"{prompt_tokens}+{completion_tokens} tokens"
    return usage


async def _stream(job: CompletionRun) -> None:
    """Server-sent events: role first (chat), deltas, one finish_reason per choice, usage if asked, [DONE]."""
    choices, envelope, request = job.choices, job.envelope, job.work.request
    if job.is_chat:
        envelope["object"] = "chat.completion.chunk"
    if job.completion.include_usage:
        envelope["usage"] = None
    running = len(choices)
    opened: set[int] = set()
    while running:
        index, event = await job.work.channel.next()
        choice = choices[index]
        if choice.finish_reason is not None:
            continue
        delta = _accept(job, choice, event)
        running -= delta.finish_reason is not None
        parts = _parts(job, delta)
        if index not in opened and job.is_chat:
            role = {"role": "assistant", "content": ""}
            parts.insert(0, {"delta": role, "logprobs": None, "finish_reason": None})
        elif index not in opened and job.completion.echo:
            echo = functools.partial(_echo_part, job, choice)
            parts = await maybe_in_thread(job.num_scores > ON_LOOP_ENTRIES, echo) + parts
        opened.add(index)
        if parts:
            data = b""
            for part in parts:
                part["index"] = index
                data += b"data: " + _encode(envelope | {"choices": [part]}) + b"\n\n"
            request.send_events(data)
            await request.connection.drain()
    usage = _usage(job)
    data = b"data: [DONE]\n\n"
    if job.completion.include_usage:
        data = b"data: " + _encode(envelope | {"choices": [], "usage": usage}) + b"\n\n" + data
    request.send_events(data, is_last=True)


def _echo_part(job: CompletionRun, choice: Choice) -> list[dict]:
    """The first part of a completion that repeats its prompt, unless that is no text."""
    echo, scores = _echo(job, choice.index), None
    if not echo:
        return []
    if job.completion.params.logprobs is not None:
        prompt = choice.index // job.completion.best_of
        scores = echoed_logprobs(job.prompts[prompt], job.measured[prompt], [], len(echo), job.model.token_bytes)
    return [{"text": echo, "logprobs": scores, "finish_reason": None}]


def _parts(job: CompletionRun, delta: ChoiceDelta) -> list[dict]:
    """What chunks hold of one event: a choice each, scores in the first, the finish reason in one of its own."""
    contents: list[dict] = []
    if not job.is_chat:
        contents = [{"text": delta.text}] if delta.text or delta.scores else []
    else:
        contents = [{"delta": words} for words in deltas(delta)]
        if delta.scores and not contents:
            contents = [{"delta": {"content": ""}}]
    parts = [content | {"logprobs": None, "finish_reason": None} for content in contents]
    if parts and job.completion.params.logprobs is not None:
        parts[0]["logprobs"] = (chat_logprobs if job.is_chat else completion_logprobs)(
            delta.scores, job.model.token_bytes
        )
    if delta.finish_reason is not None:
        last: dict = {"delta": {}} if job.is_chat else {"text": ""}
        parts.append(last | {"logprobs": None, "finish_reason": delta.finish_reason})
    return parts
