"""A request for text, from its checked body to the engine and back, whole or streamed, in whatever way an API writes it."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import msgspec

from zse.engine.messages import Ask, Measured, Tokens
from zse.errors import RequestError
from zse.http.exchange import Response
from zse.sampling.params import BeamParams
from zse.scheduler.options import RequestOptions
from zse.server.api_request import APIRequest
from zse.server.errors import APIError
from zse.server.generation import Choice, ChoiceDelta
from zse.server.requests.completions import Completion, check_token_ids, choice_params
from zse.server.requests.forms import named
from zse.server.tools.chat import Answers, prepare, structure_for
from zse.server.work import ON_LOOP_ENTRIES, RequestRun, maybe_in_thread

# Reserved of a quota for an answer that has no max_tokens: what it may become is the rest of the context, what it becomes is
# less.
UNBOUNDED_TOKENS = 512


class TokenUsage(msgspec.Struct):
    """Tokens of one request. cached: of the prompts; reasoning: of the answers."""

    prompt: int
    completion: int
    cached: int
    reasoning: int


class CompletionRun(msgspec.Struct):
    """One admitted request: its prompts as token ids, and its answers. model: its tokenizer and template."""

    completion: Completion
    work: RequestRun
    created: int  # seconds since 1970
    model: Any = None
    prompts: list[list[int]] = []
    choices: list[Choice] = []
    measured: list[Measured] = []  # of the prompts, where their log-probabilities are wanted
    structure_field: str = ""
    answers: Answers | None = None  # of a chat: how its answers are taken apart

    @property
    def is_chat(self) -> bool:
        return self.completion.messages is not None

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

    @property
    def usage(self) -> TokenUsage:
        """So far."""
        return TokenUsage(
            prompt=self.work.prompt_tokens,
            completion=sum(choice.num_tokens for choice in self.choices),
            cached=self.cached_tokens,
            reasoning=sum(choice.reasoning_tokens for choice in self.choices),
        )


class Writer(Protocol):
    """How an API shows the answers of one request. What a stream is made of are whole events."""

    def whole(self) -> bytes:
        """The body of an answer that is not streamed."""

    def first(self, choice: Choice) -> bytes:
        """What stands before the choice's first part."""

    def part(self, choice: Choice, delta: ChoiceDelta) -> bytes:
        """What one event of the engine adds; b"": nothing to show."""

    def last(self) -> bytes:
        """The end of a stream."""


Reader = Callable[[dict], tuple[Completion, Callable[[CompletionRun], Writer]]]


async def answer(app, request: APIRequest, *, read: Reader) -> Response | None:
    """Handles a request. read: checks its body, and says how it is answered. Raises RequestError."""
    with RequestRun(app, request) as work:
        completion, make_writer = await maybe_in_thread(work.is_long, lambda: read(request.json()))
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
        job = CompletionRun(completion, work, int(time.time()))
        if completion.stream:
            request.last_write = time.monotonic()  # from now on a client that waits for long gets comments
            work.channel.stalled_s = request.connection.stalled_s
        try:
            await _begin(app, job)
            writer = make_writer(job)
            return await (_stream(job, writer) if completion.stream else _collect(job, writer))
        except RequestError as error:
            raise named(error, job.structure_field) from None
        finally:
            work.cached = job.cached_tokens


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


async def _collect(job: CompletionRun, writer: Writer) -> Response:
    choices = job.choices
    running = sum(choice.finish_reason is None for choice in choices)
    while running:
        index, event = await job.work.channel.next()
        if choices[index].finish_reason is None:
            running -= _accept(job, choices[index], event).finish_reason is not None
    _note(job)
    return Response(200, await maybe_in_thread(job.num_scores > ON_LOOP_ENTRIES, writer.whole))


async def _stream(job: CompletionRun, writer: Writer) -> None:
    choices, request = job.choices, job.work.request
    running = len(choices)
    opened: set[int] = set()
    while running:
        index, event = await job.work.channel.next()
        choice = choices[index]
        if choice.finish_reason is not None:
            continue
        delta = _accept(job, choice, event)
        running -= delta.finish_reason is not None
        data = b""
        if index not in opened:
            opened.add(index)
            data = await maybe_in_thread(job.num_scores > ON_LOOP_ENTRIES, partial(writer.first, choice))
        data += writer.part(choice, delta)
        if data:
            request.send_events(data)
            await request.connection.drain()
    _note(job)
    request.send_events(writer.last(), is_last=True)


def _note(job: CompletionRun) -> None:
    """For the access log."""
    usage = job.usage
    job.work.request.note = f"{usage.prompt}+{usage.completion} tokens"
