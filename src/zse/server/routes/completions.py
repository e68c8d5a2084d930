"""POST /v1/chat/completions and /v1/completions: from the body to the engine and back, whole or streamed."""

import functools
import time
from collections.abc import Callable
from typing import Any

import msgspec

from zse.engine.messages import Ask, Measured, Tokens
from zse.errors import RequestError
from zse.http.exchange import EventStream, Response
from zse.sampling.params import BeamParams
from zse.scheduler.options import RequestOptions
from zse.server.api_request import APIRequest
from zse.server.errors import APIError
from zse.server.generation import Choice, ChoiceDelta, chat_logprobs, completion_logprobs
from zse.server.off_loop import ON_LOOP_ENTRIES, maybe_in_thread
from zse.server.prompt_scores import echoed_logprobs, prompt_logprobs
from zse.server.requests.completions import Completion, check_token_ids, choice_params, read_chat, read_completions
from zse.server.requests.forms import named
from zse.server.tools.chat import Answers, deltas, message, prepare, structure_for
from zse.server.work import Work

_encode = msgspec.json.encode


# Reserved of a quota for an answer that has no max_tokens: what it may become is the rest of the context, what it becomes is
# less.
UNBOUNDED_TOKENS = 512


class CompletionRun(msgspec.Struct):
    """One admitted request: its prompts as token ids, and what answers look like. model: its tokenizer and template."""

    completion: Completion
    chat: bool
    id: str
    created: int
    work: Work
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


async def chat(app, request: APIRequest) -> Response | None:
    """POST /v1/chat/completions"""
    return await _serve(app, request, read_chat, is_chat=True)


async def text(app, request: APIRequest) -> Response | None:
    """POST /v1/completions"""
    return await _serve(app, request, read_completions, is_chat=False)


async def _serve(app, request: APIRequest, read: Callable[[dict], Completion], is_chat: bool) -> Response | None:
    with Work(app, request) as work:
        completion = await work.read(read)
        most = completion.params.max_tokens
        longest = UNBOUNDED_TOKENS if most is None else most
        work.start(completion.model, completion.num_choices, completion.num_choices * longest)
        completion.model = completion.model or work.served.name
        id = ("chatcmpl-" if is_chat else "cmpl-") + request.id.removeprefix("req_")
        job = CompletionRun(completion, is_chat, id, int(time.time()), work)
        if completion.stream:
            # From now on a client that waits for long gets comments.
            work.channel.is_stalled = EventStream(request).is_stalled
        try:
            await _begin(app, job)
            if completion.stream:
                await _stream(request, job)
                return None
            return await _collect(request, job)
        except RequestError as error:
            raise named(error, job.structure_field) from None
        finally:
            work.cached = job.cached_tokens


async def _begin(app, job: CompletionRun) -> None:
    """From text to the engine: tokenize, check what depends on the model, submit."""
    work, completion = job.work, job.completion
    model = job.model = await app.pool.text(work.served)
    check_token_ids(completion, model.vocab_size)
    if job.chat:
        parsers = app.tool_parser, app.reasoning_parser
        job.answers = await work.off_loop(lambda: prepare(completion, model, *parsers))
    job.prompts = await work.off_loop(lambda: _tokenize(model, completion))
    work.set_prompt(sum(map(len, job.prompts)))
    info = await app.pool.ready(work.served)
    limits = [_max_tokens(completion, len(prompt), info.max_context) for prompt in job.prompts]
    if job.answers is not None:
        job.answers.is_open = job.answers.opens_reasoning(model.decode(job.prompts[0][-16:]))
    structure, job.structure_field = structure_for(completion, job.answers)
    options = work.options(completion.options)
    work.submitted = work.watch.prompt_tokens
    if completion.prompt_top is not None:
        ask = Ask("logprobs", top=completion.prompt_top)
        job.measured = await work.channel.complete(job.prompts, [ask] * len(job.prompts), options)
        work.computed = work.submitted
    if completion.beams is not None:
        await _search(job, completion.beams, limits, options)
    else:
        _submit(job, limits, msgspec.structs.replace(options, structure=structure))


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


def _submit(job: CompletionRun, limits: list[int], options: RequestOptions) -> None:
    """One engine request per choice; choice index = prompt index * best_of + answer index."""
    completion = job.completion
    for prompt, limit in zip(job.prompts, limits, strict=True):
        for answer in range(completion.best_of):
            choice = _new_choice(job)
            if limit == 0:
                choice.finish_reason = "length"  # only the prompt was wanted
                job.work.watch.finished("length")
                continue
            job.work.channel.submit(choice.index, prompt, choice_params(completion, answer, limit), options)


def _new_choice(job: CompletionRun) -> Choice:
    params, answers = job.completion.params, job.answers
    choice = Choice(
        len(job.choices),
        job.model.detokenizer(params.stop, answers.controls if answers else ()),
        params.logprobs is not None,
        answers.splitter(job.completion.stream) if answers else None,
    )
    job.choices.append(choice)
    return choice


async def _search(job: CompletionRun, beams: BeamParams, limits: list[int], options: RequestOptions) -> None:
    """A beam search of each prompt; its best answers become the choices, complete."""
    params = [msgspec.structs.replace(beams, max_tokens=limit) for limit in limits]
    for result in await job.work.channel.complete(job.prompts, params, options):
        for reply in result.replies[: job.completion.n]:
            event = Tokens(result.id, reply.tokens, reply.logprobs, reply.finish, result.cached_tokens)
            _accept(job, _new_choice(job), event)


def _accept(job: CompletionRun, choice: Choice, event: Tokens) -> ChoiceDelta:
    """Feed one event; frees the queue's token share and stops the engine where a stop string ended the answer."""
    work = job.work
    if not work.computed:
        work.computed = work.submitted
        work.admitted.set_tokens(0)
    work.watch.tokens(choice.index, event)
    delta = choice.feed(event)
    if delta.finish_reason is not None:
        work.watch.finished(delta.finish_reason)
        work.channel.cancel(choice.index)
    return delta


async def _collect(request: APIRequest, job: CompletionRun) -> Response:
    choices = job.choices
    running = sum(choice.finish_reason is None for choice in choices)
    while running:
        index, event = await job.work.channel.next()
        if choices[index].finish_reason is None:
            running -= _accept(job, choices[index], event).finish_reason is not None
    usage = _usage(request, job)
    return Response(200, await maybe_in_thread(job.num_scores > ON_LOOP_ENTRIES, lambda: _whole(job, usage)))


def _whole(job: CompletionRun, usage: dict) -> bytes:
    """The body of an answer that is not streamed."""
    choices, best_of, n = job.choices, job.completion.best_of, job.completion.n
    answers = []
    for prompt in range(len(job.prompts)):
        group = choices[prompt * best_of : (prompt + 1) * best_of]
        answers += sorted(group, key=lambda choice: choice.rank)[:n] if job.completion.rank else group
    body = _envelope(job, streamed=False)
    body["choices"] = [_whole_choice(job, choice, index) for index, choice in enumerate(answers)]
    body["usage"] = usage
    if job.chat and job.completion.params.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs(job.prompts[0], job.measured[0], job.model.token_bytes)
    return _encode(body)


def _envelope(job: CompletionRun, streamed: bool) -> dict:
    name = ("chat.completion.chunk" if streamed else "chat.completion") if job.chat else "text_completion"
    envelope = {
        "id": job.id,
        "object": name,
        "created": job.created,
        "model": job.completion.model,
        "system_fingerprint": job.work.served.fingerprint,
    }
    if job.completion.service_tier:
        envelope["service_tier"] = "default"
    return envelope


def _whole_choice(job: CompletionRun, choice: Choice, index: int) -> dict:
    scores = None
    if job.completion.params.logprobs is not None:
        scores = (chat_logprobs if job.chat else completion_logprobs)(choice.scores, job.model.token_bytes)
    out: dict = {"index": index, "logprobs": scores, "finish_reason": choice.finish_reason}
    if job.chat:
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


def _usage(request: APIRequest, job: CompletionRun) -> dict:
    prompt_tokens = sum(map(len, job.prompts))
    completion_tokens = sum(choice.num_tokens for choice in job.choices)
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": job.cached_tokens},
    }
    if job.chat:
        reasoning = sum(choice.reasoning_tokens for choice in job.choices)
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    request.note = f"{prompt_tokens}+{completion_tokens} tokens"
    return usage


async def _stream(request: APIRequest, job: CompletionRun) -> None:
    """Server-sent events: role first (chat), deltas, one finish_reason per choice, usage if asked, [DONE]."""
    stream, choices = request.stream, job.choices
    assert stream is not None
    envelope = _envelope(job, streamed=True)
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
        parts = []
        if index not in opened:
            parts = await maybe_in_thread(job.num_scores > ON_LOOP_ENTRIES, functools.partial(_opening, job, choice))
        opened.add(index)
        parts += _parts(job, delta)
        if parts:
            data = b""
            for part in parts:
                part["index"] = index
                data += b"data: " + _encode(envelope | {"choices": [part]}) + b"\n\n"
            stream.send(data)
            await stream.drain()
    usage = _usage(request, job)
    data = b"data: [DONE]\n\n"
    if job.completion.include_usage:
        data = b"data: " + _encode(envelope | {"choices": [], "usage": usage}) + b"\n\n" + data
    stream.finish(data)


def _opening(job: CompletionRun, choice: Choice) -> list[dict]:
    if job.chat:
        return [{"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}]
    echo, scores = _echo(job, choice.index), None
    if echo and job.completion.params.logprobs is not None:
        prompt = choice.index // job.completion.best_of
        scores = echoed_logprobs(job.prompts[prompt], job.measured[prompt], [], len(echo), job.model.token_bytes)
    return [{"text": echo, "logprobs": scores, "finish_reason": None}] if echo else []


def _parts(job: CompletionRun, delta: ChoiceDelta) -> list[dict]:
    """What chunks hold of one event: a choice each, scores in the first, the finish reason in one of its own."""
    contents: list[dict] = []
    if not job.chat:
        contents = [{"text": delta.text}] if delta.text or delta.scores else []
    else:
        contents = [{"delta": words} for words in deltas(delta)]
        if delta.scores and not contents:
            contents = [{"delta": {"content": ""}}]
    parts = [content | {"logprobs": None, "finish_reason": None} for content in contents]
    if parts and job.completion.params.logprobs is not None:
        parts[0]["logprobs"] = (chat_logprobs if job.chat else completion_logprobs)(delta.scores, job.model.token_bytes)
    if delta.finish_reason is not None:
        last: dict = {"delta": {}} if job.chat else {"text": ""}
        parts.append(last | {"logprobs": None, "finish_reason": delta.finish_reason})
    return parts
