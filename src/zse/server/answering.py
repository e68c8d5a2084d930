"""A request for text, from its checked body to the engine and back, whole or streamed, in whatever way an API writes
it."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

import msgspec

from zse.engine.messages import Ask, ImageInput, Measured, Tokens
from zse.errors import RequestError
from zse.http.exchange import Response
from zse.sampling.params import BeamParams, SamplingParams, with_bad_tokens
from zse.scheduler.options import RequestOptions
from zse.server import citations, idempotency, images, sessions
from zse.server.api_request import APIRequest
from zse.server.errors import APIError, unsupported
from zse.server.logprobs import TokenScore
from zse.server.requests import image_parts
from zse.server.requests.completions import SESSION_HEADER, Completion, Extras, check_token_ids, choice_params
from zse.server.requests.forms import named
from zse.server.tools.answer import CALL, CONTENT, REASONING, AnswerSegment, join
from zse.server.tools.calls import CallPart, ToolCall, fold
from zse.server.tools.chat import Answers, prepare, structure_for
from zse.server.tools.reasoning import Reasoning
from zse.server.work import ON_LOOP_ENTRIES, RequestRun, maybe_in_thread

NO_EXTRAS = Extras()
# Reserved of a quota for an answer that has no max_tokens: what it may become is the rest of the context, what it
# becomes is less.
UNBOUNDED_TOKENS = 512


class ChoiceDelta(msgspec.Struct):
    """What one engine event adds to an answer. tokens: where they are wanted, that which ended it included. text: of
    its content; calls: (position among the answer's calls, a part). segments: all of these in their order. scores: of
    all tokens that came. citations: whose markers it completes."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[int, CallPart]] = []
    scores: list[TokenScore] = []
    segments: list[AnswerSegment] = []
    tokens: list[int] = []
    citations: list[dict] = []
    finish_reason: str | None = None


class Choice:
    """One answer in the making. feed() takes the engine's events until finish_reason is set. model: its detokenizer is
    used. answers: how reasoning and tool calls are taken out of the text; None: all of it is content. grounding: the
    passages that it may cite."""

    def __init__(
        self,
        index: int,
        model,
        params: SamplingParams,
        answers: Answers | None = None,
        extras: Extras = NO_EXTRAS,
        grounding: "citations.Grounding | None" = None,
    ):
        self.index, self._extras = index, extras
        self.citations: list[dict] = []
        self._cites = None if grounding is None else citations.CitationReader(grounding.passages)
        self.tokens: list[int] = []
        self.segments: list[AnswerSegment] = []
        self.call_parts: list[CallPart] = []
        self._num_calls = 0
        self.reasoning_tokens = 0  # the marks around it included
        self._undecided = 0  # tokens that may be the opening mark of reasoning
        self.scores: list[TokenScore] = []
        self._open_scores: list[TokenScore] = []  # of tokens of which nothing was given out yet
        self.finish_reason: str | None = None
        self.num_tokens = 0
        self.cached_tokens = 0
        self.total_logprob = 0.0
        self._num_chars = 0
        self._want_scores = params.logprobs is not None
        kept = () if answers is None else answers.controls
        self._detokenizer = model.detokenizer(params.stop, kept, extras.skip_special_tokens, params.min_tokens)
        self._splitter = None if answers is None else answers.splitter()

    @property
    def text(self) -> str:
        return "".join([text for segment in self.segments if segment.kind == CONTENT for text in segment.texts])

    @property
    def calls(self) -> list[ToolCall]:
        """What the parts so far add up to."""
        return fold(self.call_parts)

    def feed(self, event: Tokens) -> ChoiceDelta:
        """Take an event. finish_reason of the result (and of self) is set by the last one; when a stop string ended
        the answer the engine still runs: cancel it."""
        delta = ChoiceDelta()
        self.num_tokens += len(event.tokens)
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        logprobs = event.logprobs or []
        self.total_logprob += sum(entry.logprob for entry in logprobs)
        # The token that ended generation is no part of the answer.
        visible = event.tokens[:-1] if event.finish == "stop" else event.tokens
        for position, token in enumerate(visible):
            if self._want_scores and position < len(logprobs):
                offset = self._num_chars + len(delta.text) + self._detokenizer.num_held
                delta.scores.append(TokenScore.of(token, logprobs[position], offset))
                self._open_scores.append(delta.scores[-1])
            self._add(delta, self._detokenizer.push(token))
            if self._detokenizer.stopped or self._splitter is not None and self._splitter.done:
                self.num_tokens -= len(event.tokens) - position - 1
                self.total_logprob -= sum(entry.logprob for entry in logprobs[position + 1 :])
                delta.finish_reason = "stop"
                del event.tokens[position + 1 :]
                break
        else:
            if event.finish is not None:
                self._add(delta, self._detokenizer.finish(), of_token=False)
                delta.finish_reason = "stop" if self._detokenizer.stopped else event.finish
        if self._extras.return_token_ids:
            delta.tokens = event.tokens
            self.tokens += delta.tokens
        if self._extras.include_stop_str_in_output and self._detokenizer.stopped:
            self._add(delta, self._detokenizer.stopped, of_token=False)
        if delta.finish_reason is not None and self._splitter is not None:
            self._put(delta, self._splitter.finish())
            if self._num_calls and delta.finish_reason == "stop":
                delta.finish_reason = "tool_calls"
        if self._cites is not None:
            delta.citations = self._cites.push(delta.text)
            self.citations += delta.citations
        self._num_chars += len(delta.text)
        if self._splitter is not None:
            join(self.segments, delta.segments)
        elif delta.text:
            delta.segments = [AnswerSegment(CONTENT, texts=[delta.text], scores=self._open_scores)]
            self._open_scores = []
            self.segments = self.segments or [AnswerSegment(CONTENT)]
            self.segments[0].texts.append(delta.text)
            self.segments[0].scores += delta.segments[0].scores
        self.scores += delta.scores
        self.finish_reason = delta.finish_reason
        return delta

    @property
    def is_grounded(self) -> bool:
        """Whether it may cite: its request asked for documents."""
        return self._cites is not None

    @property
    def stop_text(self) -> str | None:
        """The stop string that ended it."""
        return self._detokenizer.stopped

    @property
    def reasoning(self) -> str:
        return "".join([text for segment in self.segments if segment.kind == REASONING for text in segment.texts])

    def _add(self, delta: ChoiceDelta, text: str, of_token: bool = True) -> None:
        splitter = self._splitter
        if splitter is None:
            delta.text += text  # which is one segment
            return
        was_reasoning = splitter.is_reasoning
        if text:
            self._put(delta, splitter.push(text))
        if of_token:
            self._undecided += 1
        if was_reasoning or splitter.is_reasoning:
            self.reasoning_tokens += self._undecided
            self._open_scores = []  # the marks around it are no content
        if not splitter.is_undecided:
            self._undecided = 0

    def _put(self, delta: ChoiceDelta, pieces: list[str | Reasoning | CallPart]) -> None:
        for piece in pieces:
            if isinstance(piece, Reasoning):
                delta.reasoning += piece.text
                segment = AnswerSegment(REASONING, texts=[piece.text])
            elif isinstance(piece, CallPart):
                self._num_calls += bool(piece.name)
                delta.calls.append((self._num_calls - 1, piece))
                self.call_parts.append(piece)
                segment = AnswerSegment(CALL, self._num_calls - 1, piece.id, piece.name, [piece.arguments])
            else:
                delta.text += piece
                segment = AnswerSegment(CONTENT, texts=[piece], scores=self._open_scores)
            join(delta.segments, [segment])
            self._open_scores = []

    @property
    def rank(self) -> tuple[float, int]:
        """For best_of: higher mean log-probability first, then the earlier index."""
        return (-self.total_logprob / max(1, self.num_tokens), self.index)


class TokenUsage(msgspec.Struct):
    """Tokens of one request. cached: of the prompts, each of which counts once, however many answers it gets;
    reasoning: of the answers."""

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
    images: list[ImageInput] = []  # of a chat's prompt
    choices: list[Choice] = []
    measured: list[Measured] = []  # of the prompts, where their log-probabilities are wanted
    structure_field: str = ""
    answers: Answers | None = None  # of a chat: how its answers are taken apart
    grounding: "citations.Grounding | None" = None  # what was found for it in documents, where it asks for them
    keeps: list[Callable[[], Awaitable[None]]] = []  # awaited when the answer is over, before its end is sent

    @property
    def num_scores(self) -> int:
        """Log-probabilities of prompts and answers so far, alternatives included."""
        asked = self.completion.params.logprobs
        of_answers = 0 if asked is None else (1 + asked) * sum(len(choice.scores) for choice in self.choices)
        return of_answers + (1 + (self.completion.prompt_top or 0)) * sum(result.num_tokens for result in self.measured)

    @property
    def timings(self) -> dict[str, float]:
        """Where the request's time went, in milliseconds and tokens; the names that llama.cpp has too mean the same."""
        work, usage, now = self.work, self.usage, time.monotonic()
        prompt, made = usage.prompt - usage.cached, usage.completion
        prompt_s = work.prefill_s
        predicted_s = work.last - work.first if work.first else 0.0  # of all tokens but the first
        return {
            "before_ms": round(1000 * ((work.submitted or now) - work.request.started), 3),
            "queue_ms": round(1000 * work.queued_s, 3),
            "cache_n": usage.cached,
            "prompt_n": prompt,
            "prompt_ms": round(1000 * prompt_s, 3),
            "prompt_per_second": round(prompt / prompt_s, 3) if prompt_s else 0.0,
            "predicted_n": made,
            "predicted_ms": round(1000 * predicted_s, 3),
            "predicted_per_second": round((made - 1) / predicted_s, 3) if made > 1 and predicted_s else 0.0,
            "total_ms": round(1000 * (now - work.request.started), 3),
        }

    @property
    def usage(self) -> TokenUsage:
        """So far."""
        return TokenUsage(
            prompt=self.work.prompt_tokens,
            completion=sum(choice.num_tokens for choice in self.choices),
            cached=sum(choice.cached_tokens for choice in self.choices[:: self.completion.best_of]),
            reasoning=sum(choice.reasoning_tokens for choice in self.choices),
        )


class Writer(Protocol):
    """How an API shows the answers of one request. What a stream is made of are whole events."""

    def whole(self) -> bytes:
        """The body of an answer that is not streamed."""

    def part(self, choice: Choice, delta: ChoiceDelta, is_first: bool) -> bytes:
        """What one event of the engine adds, is_first: of this choice, which it opens; b"": nothing to show."""

    def last(self) -> bytes:
        """The end of a stream."""


Read = tuple[Completion, Callable[[CompletionRun], Writer]]
# Awaitable: it needs what is stored. Another coroutine function: it answers the request, with runs of its own.
ReadOrAnswer = Read | Callable[[], Awaitable[Response | None]]
Reader = Callable[[dict], ReadOrAnswer | Awaitable[ReadOrAnswer]]


async def answer(app, request: APIRequest, *, read: Reader, body: dict | None = None) -> Response | None:
    """Handles a request. read: checks its body, and says how it is answered. body: where it is parsed already. Raises
    RequestError."""
    with RequestRun(app, request) as work:
        found: Any = await maybe_in_thread(work.is_long, lambda: read(request.json() if body is None else body))
        if hasattr(found, "__await__"):
            found = await found
        if isinstance(found, tuple):
            completion, make_writer = found
            job = CompletionRun(completion, work, int(time.time()))
            async with begun(job):
                writer = make_writer(job)
                response = await (_stream(job, writer) if completion.stream else _collect(job, writer))
                request.note = f"{job.usage.prompt}+{job.usage.completion} tokens"
                return response
    return await found()


@asynccontextmanager
async def begun(job: CompletionRun) -> AsyncIterator[None]:
    """The request is admitted, and the engine works for it; what it took is counted at the end. Raises RequestError."""
    work, completion, request = job.work, job.completion, job.work.request
    if completion.stream and "idempotency-key" in request.headers:
        raise idempotency.of_a_stream()
    most, made = completion.params.max_tokens, completion.num_choices
    if completion.beams is not None:
        made = made // completion.n * completion.beams.beam_width  # the beams that are not answers, too
    most_tokens = made * (UNBOUNDED_TOKENS if most is None else most)
    image_bytes = image_parts.num_characters(completion.messages or []) if completion.has_images else 0
    work.start(completion.model, completion.num_choices, most_tokens, completion.num_ids, image_bytes)
    if completion.keep_alive is not None:
        work.keep(completion.keep_alive)
    if completion.session_id or completion.session_ttl or SESSION_HEADER in request.headers:
        await sessions.resume(job)
    if completion.stream:
        request.last_write = time.monotonic()  # from now on a client that waits for long gets comments
        work.channel.stalled_s = request.connection.stalled_s
    try:
        await _begin(work.app, job)
        yield
    except RequestError as error:
        raise named(error, job.structure_field, completion.messages_field) from None
    finally:
        work.cached = job.usage.cached


async def _begin(app, job: CompletionRun) -> None:
    """From text to the engine: tokenize, check what depends on the model, submit."""
    work, completion = job.work, job.completion
    model = job.model = await app.pool.text(work.served)
    own = {name: model.sampling[name] for name in completion.left_out & model.sampling.keys()}
    completion.params = msgspec.structs.replace(completion.params, **own)
    check_token_ids(completion, model.vocab_size)
    if completion.params.bad_words:
        find = partial(with_bad_tokens, completion.params, model.encode_part)
        completion.params = await maybe_in_thread(True, find)
    if job.completion.messages is not None and not model.has_chat_template:
        info = await app.pool.ready(work.served)
        if not info.generates:
            raise _encoder()  # it has no template either, which is not the reason
        if completion.plain and not (model.template_refused or completion.has_images or completion.options.session):
            completion.messages, completion.prompts = None, [completion.plain]
    if completion.rag is not None:
        job.grounding = await app.documents("rag").ground(work, completion, model)
    if job.completion.messages is not None:
        # The template is a stranger's program: the event loop does not wait for it, however short the chat is.
        parsers = app.tool_parser, app.reasoning_parser
        job.answers = await maybe_in_thread(True, lambda: prepare(completion, model, *parsers))
    pictures = None
    if completion.has_images:
        pictures = await images.prepare(work, work.served, completion.messages or [], model)
        images.check_options(completion, pictures)
    job.prompts = await maybe_in_thread(
        work.is_long or job.completion.messages is not None, lambda: _tokenize(job, pictures)
    )
    cut = completion.extras.truncate_prompt_tokens
    if cut is not None:
        room = max(1, (await app.pool.ready(work.served)).max_context - (completion.params.max_tokens or 1))
        job.prompts = [prompt[-min(room, cut) if cut > 0 else -room :] for prompt in job.prompts]
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
    if structure is not None and completion.params.rule:
        raise unsupported(completion.params.rule, f"it does not go with '{job.structure_field}'")
    options = app.request_options(work.request, completion.options)
    if work.request.adapter:
        options = msgspec.structs.replace(options, adapter=await work.served.adapters.id_of(work.request.adapter))
    if completion.prompt_top is not None:
        ask = Ask("logprobs", top=completion.prompt_top)
        job.measured = await work.channel.complete(job.prompts, [ask] * len(job.prompts), options)
    work.submitted = time.monotonic()
    if completion.beams is not None:
        await _search(job, completion.beams, limits, options)
        return
    options = msgspec.structs.replace(options, structure=structure)
    points = [()] * len(job.prompts)
    if info.has_state and completion.messages is not None:  # the first time it renders a few chats
        points = await maybe_in_thread(True, lambda: [model.message_points(prompt) for prompt in job.prompts])
    for prompt, limit, state_points in zip(job.prompts, limits, points, strict=True):
        options = msgspec.structs.replace(options, state_points=state_points)
        for answer in range(completion.best_of):  # choice index = prompt index * best_of + answer index
            choice = Choice(len(job.choices), model, completion.params, job.answers, completion.extras, job.grounding)
            job.choices.append(choice)
            if limit:
                params = choice_params(completion, answer, limit)
                work.served.engine.submit(work.channel, choice.index, prompt, params, options, job.images)
            else:
                choice.finish_reason = "length"  # only the prompt was wanted
                work.outcomes["length"] += 1
    job.images = []  # the engine has them


def _encoder() -> APIError:
    message = "This model is an encoder and writes no text: it answers /v1/embeddings, /v1/rerank and /v1/score."
    return APIError("unsupported_parameter", message, "model")


def _tokenize(job: CompletionRun, pictures: "images.Pictures | None") -> list[list[int]]:
    model, completion = job.model, job.completion
    if completion.messages is not None:
        given = completion.tools, completion.template_variables
        if pictures is None:
            prompts = [model.encode_chat(completion.messages, *given)]
        else:
            prompt, job.images = pictures.encode_chat(model, completion.messages, *given)
            prompts = [prompt]
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
    if wanted and completion.is_bounded:
        wanted = min(wanted, max(1, max_context - prompt_tokens))
    if prompt_tokens + (1 if wanted is None else wanted) <= max_context:
        return max_context - prompt_tokens if wanted is None else wanted
    field = "prompt" if completion.messages is None else completion.messages_field or "messages"
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
            more = job.answers, job.completion.extras, job.grounding
            job.choices.append(Choice(len(job.choices), job.model, job.completion.params, *more))
            event = Tokens(result.id, reply.tokens, reply.logprobs, reply.finish, result.cached_tokens)
            accept(job, job.choices[-1], event)


def accept(job: CompletionRun, choice: Choice, event: Tokens) -> ChoiceDelta:
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
            running -= accept(job, choices[index], event).finish_reason is not None
    body = await maybe_in_thread(job.num_scores > ON_LOOP_ENTRIES, writer.whole)
    for keep in job.keeps:
        await keep()
    return Response(200, body)


async def _stream(job: CompletionRun, writer: Writer) -> None:
    choices, request = job.choices, job.work.request
    running = len(choices)
    opened: set[int] = set()
    while running:
        index, event = await job.work.channel.next()
        choice = choices[index]
        if choice.finish_reason is not None:
            continue
        delta = accept(job, choice, event)
        running -= delta.finish_reason is not None
        is_first, is_long = index not in opened, False
        if is_first:
            opened.add(index)
            is_long = bool(job.measured) and job.num_scores > ON_LOOP_ENTRIES  # those of the prompt are repeated
        data = await maybe_in_thread(is_long, partial(writer.part, choice, delta, is_first))
        if data:
            request.send_events(data)
            if request.connection.is_behind:
                await request.connection.drain()
    for keep in job.keeps:
        await keep()
    request.send_events(writer.last(), is_last=True)
