"""The table of request fields: what a request may ask of the sampler, and with which values.

Each line declares a field once: its type, range, default, meaning, the routes that accept it and its command-line
option. The checks of the HTTP API (zse.server.requests), of `zse run`, `zse chat` and `zse.LLM`, docs/api.md and the
OpenAPI document are made of it. The engine trusts what crossed one of these edges."""

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec

from zse.errors import RequestError
from zse.sampling.fields import (
    Array,
    Boolean,
    Custom,
    Field,
    Integer,
    Kind,
    Number,
    OneOrMore,
    String,
    expect,
    fields_of,
    refused,
    too_long,
    wrong_type,
)

MAX_LOGPROBS = 20  # alternatives of a token
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_BEAM_WIDTH = 16


def token_id(value: Any, path: str) -> int:
    """A token id; it is compared with the vocabulary later."""
    value = Integer().check(value, path)
    if not 0 <= value < 1 << 31:
        raise refused("invalid_token_id", f"'{path}' is not a token id.", path)
    return value


TOKEN_ID = Custom(token_id, {"type": "integer", "minimum": 0, "maximum": (1 << 31) - 1})


@functools.cache
def ids_below(limit: int) -> Any:
    """What msgspec.convert() takes for a list of integers of [0, limit) alone."""
    return list[Annotated[int, msgspec.Meta(ge=0, lt=limit)]]


def are_ids(value: Any, limit: int) -> bool:
    """Whether a list or tuple holds integers of [0, limit) alone, by one pass in C: 7,000 in 0.08 ms, where the types, min() and
    max() take 0.4. What else counts as an integer (NumPy's) gives False."""
    try:
        msgspec.convert(value, ids_below(limit))
    except msgspec.ValidationError:
        return False
    return True


class TokenIds(Array, frozen=True):
    """Token ids, checked together: one by one 7,000 take 4 ms of a prompt's time to its first token."""

    item: Kind = TOKEN_ID
    max_length: int = (1 << 31) - 1

    def check(self, value, path):
        fits = type(value) in (list, tuple) and self.min_length <= len(value) <= self.max_length
        if fits and are_ids(value, 1 << 31):
            return list(value)
        return Array.check(self, value, path)


MAX_STOPS = 16  # OpenAI's API has 4; editors that complete code send up to a dozen to others
_STOP = OneOrMore(String(256, empty=False), MAX_STOPS)
_IDS = TokenIds(max_length=128)
_TOKENS = Custom(lambda value, path: value, {"type": "array"})  # of nobody's request
_WORDS, _ALLOWED = Array(String(256, empty=False), 128), TokenIds(max_length=65_536, min_length=1)
_BIAS = Number(-100, 100)


def _tuple_of(kind: Array) -> Custom:
    """The same values, in a tuple."""
    return Custom(lambda value, path: tuple(kind.check(value, path)), kind.schema)


def _bad_words(value: Any, path: str) -> tuple[str, ...]:
    words = _WORDS.check(value, path)
    if not all(word.strip() for word in words):
        raise refused("invalid_value", f"'{path}' holds an empty text.", path)
    return tuple(words)


def _logit_bias(value: Any, path: str) -> dict[int, float]:
    """Keys are token ids, in JSON as strings; they are compared with the vocabulary later."""
    expect(dict, value, path)
    if len(value) > MAX_LOGIT_BIAS_ENTRIES:
        raise too_long(path, f"at most {MAX_LOGIT_BIAS_ENTRIES} entries")
    biases = {}
    for key, bias in value.items():
        if type(key) is str and not (key.isascii() and key.isdigit() and len(key) <= 9):
            raise refused("invalid_token_id", f"A key of '{path}' is not a token id.", path)
        biases[token_id(int(key), path)] = _BIAS.check(bias, f"{path}.{key}")
    return biases


def _early_stopping(value: Any, path: str) -> bool | str:
    if type(value) is not bool and value != "never":
        raise wrong_type(path, 'true, false or "never"', value)
    return value


STOP, STOP_TOKEN_IDS, ALLOWED_IDS = map(_tuple_of, (_STOP, _IDS, _ALLOWED))
BAD_WORDS = Custom(_bad_words, _WORDS.schema)
LOGIT_BIAS = Custom(
    _logit_bias, {"type": "object", "additionalProperties": _BIAS.schema, "maxProperties": MAX_LOGIT_BIAS_ENTRIES}
)
EARLY_STOPPING = Custom(_early_stopping, {"enum": [True, False, "never"]})
FILTERS = ("top_k", "top_p", "min_p", "top_n_sigma")  # fields that leave some of the likeliest tokens to draw from


class Asked(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="kind", tag=True):
    """What the engine is asked for with a sequence: its kind is told apart by a tag."""


class SamplingParams(Asked, frozen=True, kw_only=True):
    """What a request asks of the sampler. temperature 0 is greedy. top_k 0 or -1 and top_p 1 are off. seed None: the
    engine draws one. logprobs: None for none, else how many alternatives beside the sampled token's own.
    prompt_logprobs: the same of the prompt's tokens, which the LLM and the server measure by a job: the engine's
    requests do not look at it."""

    max_tokens: Annotated[int | None, Field(Integer(1), "Most tokens to generate.", option="N")] = None
    temperature: Annotated[float, Field(Number(0, 2), "0 is greedy.", option="T")] = 1.0
    top_p: Annotated[float, Field(Number(0, 1, above_low=True), "Nucleus sampling; 1 is off.", option="P")] = 1.0
    top_k: Annotated[
        int, Field(Integer(-1, 1 << 30, floor=0), "Keep the k most likely tokens; 0 or -1 is off.", option="K")
    ] = 0
    min_p: Annotated[
        float, Field(Number(0, 1), "Drop tokens below this share of the most likely one's probability.", option="P")
    ] = 0.0
    top_n_sigma: Annotated[
        float,
        Field(
            Number(0, 100),
            "Drop tokens whose logit is more than so many standard deviations of the logits below the largest; 0 is off.",
            option="N",
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Field(
            Number(0, 100, above_low=True), "Divides logits of tokens seen in prompt or answer; 1 is off.", option="R"
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float, Field(Number(-2, 2), "Subtracted from logits of tokens that the answer holds.", option="R")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Field(Number(-2, 2), "Subtracted once per occurrence in the answer.", option="R")
    ] = 0.0
    logit_bias: Annotated[
        dict[int, float] | None, Field(LOGIT_BIAS, "Token id → bias in [-100, 100], at most 1,024.")
    ] = None
    seed: Annotated[
        int | None,
        Field(
            Integer(-1 << 63, (1 << 64) - 1),
            "Same seed, same request, same answer; further choices have seeds of their own, made of it.",
            option="N",
        ),
    ] = None
    stop: Annotated[
        tuple[str, ...],
        Field(STOP, "Up to 16 strings of up to 256 characters; the answer ends before one.", option="TEXT"),
    ] = ()
    stop_token_ids: Annotated[tuple[int, ...], Field(STOP_TOKEN_IDS, "Up to 128 token ids that end the answer.")] = ()
    ignore_eos: Annotated[bool, Field(Boolean(), "Go on after the model's own end token.")] = False
    min_tokens: Annotated[
        int,
        Field(
            Integer(0),
            "Fewest tokens before one may end the answer; stop strings are looked for behind them. Not with a form of the answer.",
            option="N",
        ),
    ] = 0
    bad_words: Annotated[
        tuple[str, ...],
        Field(
            BAD_WORDS,
            "Up to 128 texts of which the last token may not come behind the others. Not with a form of the answer.",
            option="TEXT",
        ),
    ] = ()
    allowed_token_ids: Annotated[
        tuple[int, ...] | None,
        Field(ALLOWED_IDS, "The only token ids that may come, up to 65,536. Not with a form of the answer."),
    ] = None
    # What bad_words are as tokens: with_bad_tokens() gives them.
    bad_token_ids: Annotated[tuple[tuple[int, ...], ...], Field(_TOKENS, routes=())] = ()
    # The routes have a field of this name each, of their own form.
    logprobs: Annotated[int | None, Field(Integer(0, MAX_LOGPROBS), routes=())] = None
    prompt_logprobs: Annotated[
        int | None,
        Field(
            Integer(0, MAX_LOGPROBS),
            "Log-probabilities of the prompt's tokens with this many alternatives, up to 20; not with stream.",
        ),
    ] = None

    @property
    def rule(self) -> str:
        """A field that forbids tokens; "": none does."""
        if self.min_tokens:
            return "min_tokens"
        if self.bad_token_ids:
            return "bad_words"
        return "" if self.allowed_token_ids is None else "allowed_token_ids"

    @property
    def is_filtered(self) -> bool:
        """Whether a draw is from some of the likeliest tokens only."""
        return any(getattr(self, name) != fields_of(SamplingParams)[name].default for name in FILTERS)


def with_bad_tokens(params: SamplingParams, encode: Callable[[str], list[int]]) -> SamplingParams:
    """`params` with the tokens of its bad words, each as it begins a text and as it stands behind a space (as vLLM has
    it). encode: text → its token ids, without BOS."""
    texts = [space + word.lstrip() for word in params.bad_words for space in ("", " ")]
    found = dict.fromkeys(tuple(encode(text)) for text in texts)
    return msgspec.structs.replace(params, bad_token_ids=tuple(ids for ids in found if ids))


RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # fields that a model's authors may set


def recommended_params(values: dict[str, float]) -> dict[str, Any]:
    """Those of a model's recommended values that are fields in range: {name: value}. What a file says beside is
    dropped."""
    found = {}
    for name in RECOMMENDED:
        if name in values:
            with suppress(RequestError):
                kind = fields_of(SamplingParams)[name].kind
                assert kind is not None
                found[name] = kind.check(values[name], name)
    return found


class BeamParams(Asked, frozen=True, kw_only=True):
    """What a beam search is asked for. beam_width: beams of the search. max_tokens None: the rest of the context.
    length_penalty: above 0 favours longer replies. early_stopping: True ends the search when beam_width hypotheses are
    there; False when no beam is likely to give a better one; "never" when none can. logprobs: None, or how many
    alternatives are told of each token."""

    beam_width: Annotated[int, Field(Integer(1, MAX_BEAM_WIDTH), "Beams of the search, up to 16; left out: n.")] = 4
    max_tokens: Annotated[int | None, Field(Integer(1), routes=())] = None
    length_penalty: Annotated[
        float, Field(Number(-10, 10), "A beam's score is its log-probability divided by its length to this power.")
    ] = 1.0
    early_stopping: Annotated[
        Literal[True, False, "never"],
        Field(
            EARLY_STOPPING,
            "true ends the search with the first beam_width answers, false when better ones are unlikely, "
            '"never" when there can be none.',
        ),
    ] = False
    stop_token_ids: Annotated[tuple[int, ...], Field(STOP_TOKEN_IDS, routes=())] = ()
    ignore_eos: Annotated[bool, Field(Boolean(), routes=())] = False
    logprobs: Annotated[int | None, Field(Integer(0, MAX_LOGPROBS), routes=())] = None
