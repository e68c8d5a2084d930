"""Offline use: `from zse import LLM, SamplingParams`. The engine runs in the calling process and thread."""

import gc
import os
import threading
from collections import deque
from math import exp, fsum
from operator import index
from typing import Any, NamedTuple

import msgspec

from zse.engine import config as engine_config
from zse.engine import load, messages
from zse.engine.metrics import Phases, since_exec_clock
from zse.engine.reply import Delta, Output, Reply
from zse.errors import ConfigError, EngineError, RequestError
from zse.formats import recommended, store
from zse.lazy import numpy
from zse.sampling import fields
from zse.sampling import params as sampling
from zse.scheduler import options as scheduling
from zse.structured import options as structured
from zse.tokenizer import chat_template, detokenize
from zse.tokenizer import load as tokenizer_load

_clock = since_exec_clock()  # taken when this module is imported: the earlier, the truer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from zse.sampling.params import SamplingParams
    from zse.structured.options import Structure

    Form = Structure | dict | None
    Prompt = str | Sequence[int]
    Prompts = Prompt | Iterable[Prompt]
    Params = SamplingParams | None
    SomeParams = Params | Iterable[SamplingParams]


class Found(NamedTuple):
    """A reply that a beam search found. text: without control tokens. token_ids: the end token too. finish_reason:
    "stop" or "length". score: logprob, the sum of the tokens' log-probabilities, divided by their number to the power
    of the length penalty. logprobs: a TokenLogprob for each token."""

    text: str
    token_ids: list[int]
    finish_reason: str
    score: float
    logprob: float
    logprobs: list


class Scores(NamedTuple):
    """Teacher-forced results over n token ids: n - 1 entries, entry i about token i + 1 given those before it.
    logprobs: of the given token; top1: the likeliest token."""

    logprobs: list[float]
    top1: list[int]


def _each(value, count: int, kind: type, name: str) -> list:
    """`value` for each of `count` prompts: one for all, or as many. TypeError, ValueError."""
    several = list(value) if hasattr(value, "__iter__") and not isinstance(value, kind) else [value] * count
    for one in several:
        if not isinstance(one, kind):
            raise TypeError(f"{name} is of type {type(one).__name__}, not {kind.__name__}")
    if len(several) != count:
        raise ValueError(f"{len(several)} {name} for {count} prompts")
    return several


class LLM:
    """A model in this process.

        with LLM("smollm2") as llm:
            print(llm.chat([{"role": "user", "content": "Hello!"}]).text)

    model: a name of the store, or a path. prepare_chat: load the chat template at once, while weights are read, instead
    of at the first chat. options: EngineConfig's, such as device: "auto" (the first GPU that can be used, else the CPU),
    "cpu", "cuda", "cuda:1". threads: of the CPU, default ZSE_THREADS, else physical cores. activations: "int8" or "f32" on
    a CPU, "fp8" or "bf16" on a GPU. kv_dtype: "f16" or "f32" on a CPU, "bf16" on a GPU, "int8" or "fp8" on both.
    max_context: tokens of prompt and reply (default: the model's). max_rows: requests that run as one batch (default: 64).
    Raises ZSEError with one line that says what is wrong.

    Not for several threads at once; several streams may be read in turns.
    """

    def __init__(self, model: "str | os.PathLike", *, prepare_chat: bool = False, **options):
        self._phases = phases = Phases(_clock)
        phases.mark("interpreter and command line")
        config = engine_config.EngineConfig(model=store.locate(model), **options)
        if config.role != "both" or (config.kv_listen or config.kv_peers) is not None:
            raise ConfigError("role, kv_listen and kv_peers are options of `zse serve`: prompts are computed here")
        phases.mark("imports")
        self._tokenizer: Any = None
        self._template: Any = None
        self._tokenizer_error: BaseException | None = None
        self._wants_chat = prepare_chat
        self._tokenizer_thread: threading.Thread | None = None

        def start_tokenizer(source) -> None:
            self._has_template = bool(source.chat_template)
            # Reading the vocabulary is C code without the interpreter lock, beside the reading of weights.
            self._tokenizer_thread = threading.Thread(target=self._load_tokenizer, args=(source,), daemon=True)
            self._tokenizer_thread.start()

        collects = gc.isenabled()
        gc.disable()  # a start makes many objects and no garbage
        try:
            self._loaded = load.load_engine(config, phases, start_tokenizer)
        finally:
            if collects:
                gc.enable()
        self.device, self._is_closed, self._next_id = self._loaded.device, False, 0
        self._streams: dict[int, deque] = {}  # id → scheduler outputs that its stream has not taken yet

    # -- what is loaded

    @property
    def _engine(self) -> Any:
        if self._is_closed:
            raise EngineError("this LLM is closed")
        return self._loaded.engine

    @property
    def config(self):
        """The ResolvedConfig in use."""
        return self._loaded.config

    @property
    def model_config(self):
        """The model's ModelConfig."""
        return self._loaded.model_config

    @property
    def vocab_size(self) -> int:
        return self._loaded.model_config.vocab_size

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Planned bytes by label; KV pages and scratch count in full though they are touched only when used."""
        return self._loaded.memory_bytes

    @property
    def phases_ms(self) -> dict[str, float]:
        """Start-up phases: name → milliseconds since exec, in the order in which they ended."""
        return self._phases.ms

    def metrics(self) -> dict[str, float]:
        """Totals since the start: steps, tokens, seconds in steps, and the scheduler's counters."""
        return {**msgspec.structs.asdict(self._engine.scheduler.totals), **self._engine.counters()}

    @property
    def tokenizer(self):
        """The model's tokenizer (zse.tokenizer). Raises FormatError when the model has none that can be read."""
        self._join_tokenizer()
        if self._tokenizer_error is not None:
            raise self._tokenizer_error
        return self._tokenizer

    @property
    def recommended(self) -> dict[str, Any]:
        """Sampling fields that the model's authors set: what replies get whose `params` is None."""
        return sampling.recommended_params(recommended.recommended(self._loaded.source)[0])

    @property
    def has_chat_template(self) -> bool:
        return self._has_template

    def _load_tokenizer(self, source) -> None:
        try:
            self._tokenizer = tokenizer_load.load_tokenizer(source)
            self._phases.mark("tokenizer loaded")
            if self._wants_chat:
                self._template = chat_template.load_chat_template(source, self._tokenizer)
                self._phases.mark("chat template loaded")
        except BaseException as error:  # kept for whoever needs text; token ids work without a tokenizer
            self._tokenizer_error = error

    def _join_tokenizer(self) -> None:
        if self._tokenizer_thread is not None:
            self._tokenizer_thread.join()

    # -- replies

    def generate(
        self,
        prompts: "Prompts",
        params: "SomeParams" = None,
        *,
        structure: "Form" = None,
        adapter: "str | Iterable[str]" = "",
    ) -> list[Output]:
        """A reply to each prompt (text, or token ids), run as one batch. params: one for all, or one for each prompt.
        adapter: what load_adapter() gave, "" for none, likewise. structure: the form of the replies: {"json": schema,
        or True for any object}, {"regex": …}, {"choice": [texts]}, {"grammar": Lark or GBNF} or a
        zse.structured.options.Structure. Raises RequestError for a prompt or parameter that is refused; nothing of the
        call runs on then."""
        ids = self._several(prompts)
        params = self._params_of(params, len(ids))
        options = [self._options_of(structure, each) for each in _each(adapter, len(ids), str, "adapter")]
        # First: the replies find in the prefix cache what this computes.
        measured = self._measure_prompts(ids, params, options)
        replies = []
        try:
            for prompt, wanted, extra in zip(ids, params, options, strict=True):
                replies.append(Reply(self, prompt, wanted, extra))
            while any(reply.finish_reason is None for reply in replies):
                self._step()
                for reply in replies:
                    reply.take()
        finally:
            for reply in replies:
                reply.close()
        outputs = [reply.output() for reply in replies]
        for at, result in measured.items():
            outputs[at] = outputs[at]._replace(prompt_logprobs=result.logprobs)
        return outputs

    def _measure_prompts(self, ids: list[list[int]], params: "list[SamplingParams]", options: list) -> dict:
        """The Measured of those prompts whose log-probabilities are wanted, by index."""
        asked = [at for at, wanted in enumerate(params) if wanted.prompt_logprobs is not None]
        asks = [messages.Ask("logprobs", top=params[at].prompt_logprobs or 0) for at in asked]
        # Of a reply's options, as of the server's jobs: an adapter is refused, a form is the reply's.
        asked_options = [scheduling.RequestOptions(adapter=options[at].adapter) for at in asked]
        return dict(zip(asked, self._complete([ids[at] for at in asked], asks, asked_options), strict=True))

    def stream(
        self, prompt: "Prompt", params: "Params" = None, *, structure: "Form" = None, adapter: str = ""
    ) -> "Iterator[Delta]":
        """The reply to one prompt as it is made. Closing the iterator stops it."""
        return self._stream(self._encode(prompt), params, structure, adapter)

    def chat(
        self, messages: "list[dict]", params: "Params" = None, *, structure: "Form" = None, adapter: str = ""
    ) -> Output:
        """The reply to a conversation: [{"role": "user", "content": ...}, ...]. structure: as of generate()."""
        return self.generate([self.encode_chat(messages)], params, structure=structure, adapter=adapter)[0]

    def stream_chat(
        self, messages: "list[dict]", params: "Params" = None, *, structure: "Form" = None, adapter: str = ""
    ) -> "Iterator[Delta]":
        """chat(), streamed."""
        return self._stream(self.encode_chat(messages), params, structure, adapter)

    def load_adapter(self, path: "str | os.PathLike") -> str:
        """Read a LoRA adapter, a folder as PEFT writes it, and keep it: what replies name it by. Raises RequestError
        where the LLM was made without adapter_slots, FormatError or UnsupportedError for what it cannot use."""
        return self._engine.feature("adapters").load(os.fspath(path)).id

    def unload_adapter(self, adapter: str) -> None:
        """Forget an adapter as soon as no reply needs it."""
        self._engine.feature("adapters").unload(adapter)

    def prepare_structure(self) -> None:
        """Begin to load what structured replies need, in a process beside, before the first of them is asked for."""
        self._engine.feature("grammars").start()

    def encode_chat(self, messages: "list[dict]", **variables) -> list[int]:
        """Token ids of a conversation, up to where the reply begins. Control tokens in a message stay plain text.
        variables: what else the template may read, such as enable_thinking=False. Raises ConfigError for a base model,
        RequestError for messages that the template refuses."""
        tokenizer = self.tokenizer
        self._template = self._template or chat_template.load_chat_template(self._loaded.source, tokenizer)
        if self._template is None:
            raise ConfigError(f"{self.config.model} is a base model without a chat template: use generate()")
        return self._template.encode(messages, add_generation_prompt=True, **variables)

    def _stream(self, prompt: list[int], params, structure: "Form" = None, adapter: str = "") -> "Iterator[Delta]":
        params = self._params_of(params, 1)[0]
        if params.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs cannot be streamed: use generate() or chat()",
                code="invalid_value",
                param="prompt_logprobs",
            )
        # Submitted now, not at the first next(): this call raises a refusal, and a stream that nobody reads ends its reply.
        stream = self._deltas(Reply(self, prompt, params, self._options_of(structure, adapter)))
        next(stream)
        return stream

    def _deltas(self, reply: Reply) -> "Iterator[Delta]":
        try:
            yield Delta("", [], None)  # _stream's
            while reply.finish_reason is None:
                if not self._streams.get(reply.id):
                    self._step()
                yield from reply.take()
        finally:
            reply.close()

    def _encode(self, prompt: "Prompt") -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(map(index, prompt))

    def _params_of(self, params, count: int) -> list:
        """One SamplingParams for each prompt. Here, where they come in, they are checked, and nowhere after it."""
        if params is None:
            params = sampling.SamplingParams(**self.recommended)
        return [self._checked(one) for one in _each(params, count, sampling.SamplingParams, "params")]

    def _checked(self, params: "SamplingParams") -> "SamplingParams":
        params = fields.checked(params)
        if not params.bad_words:
            return params
        return sampling.with_bad_tokens(params, lambda text: self.tokenizer.encode(text, add_bos=False))

    def _options_of(self, structure: "Form", adapter: str = ""):
        if structure is None and not adapter:
            return scheduling.DEFAULT
        if structure is not None and not isinstance(structure, structured.Structure):
            structure = structured.read_structure(structure)
        return scheduling.RequestOptions(structure=structure, adapter=adapter)

    def _step(self) -> None:
        for output in (outputs := self._engine.step()):
            self._streams.get(output.id, deque()).append(output)
        # A search whose prompt waited for the disk.
        if refused := next((output.error for output in outputs if output.id not in self._streams), None):
            raise refused

    # -- log-probabilities of given text

    def logits_of(self, token_ids: "Sequence[int]") -> "Iterator[tuple[int, Any]]":
        """Teacher forcing: yields (start, logits) chunk by chunk; logits f32 [n, vocab_size] (a NumPy copy), line i
        for the token after token_ids[start + i]. Raises RequestError for ids or lengths that do not fit."""
        for start, _, _, logits in self._engine.feature("jobs").score(list(token_ids)):
            yield start, numpy.array(logits, dtype=numpy.float32).reshape(-1, self.vocab_size)

    def logprobs_of(self, token_ids: "Sequence[int]") -> Scores:
        """log p(token i + 1 | tokens 0..i) for every i, and the likeliest tokens. Errors as logits_of()."""
        logprobs: list[float] = []
        top1: list[int] = []
        for _, some, ids, _ in self._engine.feature("jobs").score(list(token_ids)):
            logprobs += some
            top1 += ids
        return Scores(logprobs[:-1], top1[:-1])

    def perplexity(self, token_ids: "Sequence[int]") -> float:
        """exp of the mean negative log-probability of token_ids[1:]. ValueError for fewer than two ids."""
        if len(token_ids) < 2:
            raise ValueError("perplexity needs at least two token ids")
        logprobs = self.logprobs_of(token_ids).logprobs
        return exp(-fsum(logprobs) / len(logprobs))

    # -- forwards without sampling

    def embed(self, prompts: "Prompts", *, pooling: str | None = None, normalize: bool = True):
        """The model's vector of each prompt, f32 NumPy [prompts, hidden_size]. pooling: of the hidden states after the
        final norm, "last", "mean", "cls" (the first) or "max"; None: what the model's files say, else the last.
        normalize: each line brought to length 1. Raises RequestError for a prompt that is refused."""
        pooling = pooling or self._loaded.model_config.pooling or "last"
        if pooling not in messages.POOLINGS:
            raise ValueError(f"pooling {pooling!r}: expected one of {', '.join(messages.POOLINGS)}")
        several = self._several(prompts)
        ask = messages.Ask(pooling, normalize=normalize)  # type: ignore[arg-type]
        results = self._complete(several, [ask] * len(several))
        lines = [numpy.frombuffer(result.vector, "<f4") for result in results]
        return numpy.array(lines, numpy.float32).reshape(len(lines), self._loaded.model_config.embedding_size)

    def score(self, prompts: "Prompts", targets: "Sequence[str | int]") -> list[list[float]]:
        """log p(target | prompt) of each target as the next token, for each prompt: of "yes" and "no" that is how a
        model judges. targets: token ids, or texts that are one token. Raises RequestError for a text of several
        tokens."""
        ids: list[int] = []
        for target in targets:
            some = self.tokenizer.encode(target, add_bos=False) if isinstance(target, str) else [target]
            if len(some) != 1:
                raise RequestError(
                    f"the target {target!r} is {len(some)} tokens, not one", code="invalid_value", param="targets"
                )
            ids += some
        if not ids:
            raise RequestError("no target tokens are given", code="invalid_value", param="targets")
        several = self._several(prompts)
        ask = fields.checked(messages.Ask("targets", targets=tuple(ids)))
        results = self._complete(several, [ask] * len(several))
        return [[entry.logprob for entry in result.logprobs] for result in results]

    def beam_search(self, prompts: "Prompts", params=None) -> "list[list[Found]]":
        """The likeliest replies to each prompt, best first: beam_width of them. params: a zse.BeamParams for
        all. Raises RequestError for a prompt or parameter that is refused."""
        several = self._several(prompts)
        params = _each(params or sampling.BeamParams(), len(several), sampling.BeamParams, "params")
        results = self._complete(several, [fields.checked(one) for one in params])
        return [[self._found(reply) for reply in result.replies] for result in results]

    def _found(self, reply) -> Found:
        ids = reply.tokens[:-1] if reply.finish == "stop" else reply.tokens
        show = detokenize.IncrementalDetokenizer(self.tokenizer)  # which passes over ids that pad the embedding
        text = "".join(map(show.push, ids)) + show.finish()
        return Found(text, reply.tokens, reply.finish, reply.score, reply.total, reply.logprobs)

    def _several(self, prompts) -> list[list[int]]:
        several = [prompts] if isinstance(prompts, str) else list(prompts)
        if several and not hasattr(several[0], "__len__"):  # the ids of one
            several = [several]
        return [self._encode(prompt) for prompt in several]

    def _complete(self, prompts: list[list[int]], asks: list, options: list | None = None) -> list:
        """The result of an Ask or BeamParams for each prompt, in order. Streams that are open run on meanwhile."""
        options = options or [scheduling.DEFAULT] * len(asks)
        first, self._next_id = self._next_id, self._next_id + len(prompts)
        waiting = set()
        try:
            for id, asked in enumerate(zip(prompts, asks, options, strict=True), first):
                self._engine.submit(id, *asked)
                waiting.add(id)
            results = {}
            while waiting:
                self._step()
                for job in self._engine.take_completed():
                    waiting.discard(job.id)
                    if job.error is not None:
                        raise job.error
                    results[job.id] = job.result
        finally:
            for id in waiting:
                self._engine.cancel(id)
        return [results[id] for id in range(first, first + len(prompts))]

    # -- the end

    def close(self) -> None:
        """Stop the threads and give the memory back. Closing twice does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._streams.clear()
            self._join_tokenizer()
            self._loaded.engine.close()
            self._loaded.source.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc) -> None:
        self.close()
