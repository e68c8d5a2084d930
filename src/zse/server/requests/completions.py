"""What the completion routes accept: a table of fields each, and the typed request that comes out of it."""

import math
import re
from hashlib import blake2b
from typing import Annotated, Any

import msgspec

from zse.errors import RequestError
from zse.sampling.fields import (
    CHAT,
    COMPLETIONS,
    LABELS,
    Array,
    Boolean,
    Custom,
    Field,
    Fields,
    Integer,
    Kind,
    Matching,
    Object,
    OneOf,
    String,
    fields_of,
    refused,
    wrong_type,
)
from zse.sampling.params import MAX_LOGPROBS, RECOMMENDED, BeamParams, SamplingParams, TokenIds, are_ids
from zse.scheduler.options import DEFAULT, RequestOptions
from zse.server.errors import APIError
from zse.server.requests import finding
from zse.server.requests.conversation import CONVERSATION, ToolChoice
from zse.server.requests.forms import EFFORTS, FORMS, GUIDED, STRUCTURED_OUTPUTS, named
from zse.structured.options import Structure

MAX_PROMPTS = 128
MAX_CHOICES = 16
MAX_IDS = 1 << 20


class Extras(msgspec.Struct, frozen=True):
    """What vLLM has beside OpenAI's fields, about texts and tokens; and timings."""

    include_stop_str_in_output: Annotated[
        bool, Field(Boolean(), "The stop string that ends an answer is a part of it.")
    ] = False
    skip_special_tokens: Annotated[bool, Field(Boolean(), "false shows control tokens in the answer.")] = True
    truncate_prompt_tokens: Annotated[
        int | None,
        Field(Integer(-1), "Keep the last so many tokens of a prompt; -1: as many as the context has room for."),
    ] = None
    return_token_ids: Annotated[
        bool, Field(Boolean(), "Answer with prompt_token_ids, and with token_ids of each choice.")
    ] = False
    timings: Annotated[
        bool,
        Field(Boolean(), "Answer with timings: where the time of the request went; of a stream in its last chunk."),
    ] = False
    add_generation_prompt: Annotated[
        bool, Field(Boolean(), "false: the prompt ends behind the last message.", routes=(CHAT,))
    ] = True
    continue_final_message: Annotated[
        bool, Field(Boolean(), "The answer goes on with the last message, the assistant's.", routes=(CHAT,))
    ] = False


class Completion(msgspec.Struct):
    """A checked request of either route. prompts: text or token ids (completions); messages: role/content (chat, the API's messages_field), of which some has_images (image_parts.py).
    tools: what may be called, None when nothing may. structure: the form that structure_field asks for.
    thinking_budget: tokens of reasoning, by thinking_field. left_out: sampling fields that the request leaves to the
    model's own recommendation. is_bounded: max_tokens is a bound, which the context may fall short of. plain: the prompt where the
    model has no chat template; "": it has to have one. template_variables: for the chat template. num_choices: generations that the engine has
    to make; of best_of > n answers the n likeliest are given. num_ids: tokens of prompts that are token ids, None where
    one is text. prompt_top: alternatives for each token of the prompt, None where its log-probabilities are not wanted.
    keep_alive: seconds for which the model stays loaded afterwards; None: nothing is asked. session_id: of the stored
    conversation that it goes on with; session_ttl: seconds for which that is kept from then on. rag: the checked field."""

    model: str | None
    params: SamplingParams
    left_out: frozenset[str] = frozenset()
    is_bounded: bool = False
    plain: str = ""
    options: RequestOptions = DEFAULT
    extras: Extras = Extras()
    n: int = 1
    best_of: int = 1
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    prompts: list = []
    messages: list[dict] | None = None
    messages_field: str = ""
    has_images: bool = False
    tools: list[dict] | None = None
    tool_choice: ToolChoice = ToolChoice()
    strict_tools: frozenset[str] = frozenset()
    parallel_tool_calls: bool = True
    structure: Structure | None = None
    structure_field: str = ""
    thinking_budget: int | None = None
    thinking_field: str = ""
    template_variables: dict = {}
    service_tier: str | None = None
    beams: BeamParams | None = None
    num_choices: int = 1
    num_ids: int | None = None
    prompt_top: int | None = None
    keep_alive: float | None = None
    session_id: str | None = None
    session_ttl: int | None = None
    rag: dict | None = None


class _Rag(Kind, frozen=True):
    """Its table comes with the first request that has it: a start does without."""

    def check(self, value, path):
        return finding.RAG.check(value, path)

    @property
    def schema(self):
        return finding.RAG.schema


def texts_or_ids(most: int, empty: bool = True) -> Custom:
    """A string, strings, token ids or lists of token ids → list of str | list[int]. Neither of the lists is empty."""
    text, ids = String(empty=empty), TokenIds(max_length=MAX_IDS, min_length=1)
    texts, lists = Array(text, most, 1), Array(ids, most, 1)

    def check(value: Any, path: str) -> list:
        if type(value) is str:
            return [text.check(value, path)]
        if type(value) is not list:
            raise wrong_type(path, "a string or an array", value)
        if not value:
            raise refused("invalid_value", f"'{path}' must not be empty.", path)
        first = type(value[0])
        if first in (int, float):
            return [ids.check(value, path)]
        if first not in (str, list):
            raise wrong_type(path + "[0]", "a string, an integer or an array of integers", value[0])
        return (texts if first is str else lists).check(value, path)

    return Custom(check, {"anyOf": [kind.schema for kind in (text, texts, ids, lists)]})


MODEL = Field(String(256, empty=False), "A name from GET /v1/models; left out: the first one.")
USER = Field(String(512), "An identifier of yours; accepted, not used.")
_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")


def _seconds(value: Any, path: str) -> float:
    if type(value) in (int, float):
        seconds = float(value)
    elif type(value) is str:
        text = value.strip().lstrip("+-")
        parts = _PART.findall(text)
        if not parts or "".join(map("".join, parts)) != text or len(text) > 64:
            raise refused("invalid_value", f'\'{path}\' must be seconds or a duration such as "5m" or "1h30m".', path)
        seconds = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
        seconds = -seconds if value.strip().startswith("-") else seconds
    else:
        raise wrong_type(path, "a number of seconds or a duration", value)
    return math.inf if seconds < 0 else seconds


KEEP_ALIVE = Field(
    Custom(
        _seconds,
        {
            "anyOf": [
                {"type": "number"},
                {"type": "string", "maxLength": 64, "pattern": r"^[+-]?([0-9]+(\.[0-9]+)?(ms|s|m|h)){1,8}$"},
            ]
        },
    ),
    "How long the model stays loaded without requests, until it is unloaded: seconds or a duration (5m, 1h30m), 0: not at all, below "
    "0: for ever; instead of --idle-timeout. An admin's key may say so, where there are keys; of others it is not used.",
)
SESSION_HEADER = "zse-session-id"  # of APIs that have no field for it
SESSION_ID = Matching("[A-Za-z0-9_-]{1,64}", "1 to 64 letters, digits, '_' and '-'")
_SESSION = Field(SESSION_ID, "A conversation that the server keeps: send what is new in it; see Sessions.")
_SESSION_TTL = Field(Integer(1, 366 * 86400), "Seconds for which it is kept from now on, at most --session-ttl.")
METADATA = Field(LABELS, "Up to 16 strings; accepted, not used.")
_SAMPLING, _BEAMS, _OPTIONS, _EXTRAS = map(fields_of, (SamplingParams, BeamParams, RequestOptions, Extras))


def of_route(fields: Fields, route: str) -> Fields:
    """The part of a table that a route accepts."""
    return {name: field for name, field in fields.items() if route in field.routes}


def _common(route: str) -> Fields:
    return (
        {"model": MODEL}
        | of_route(_SAMPLING, route)
        | {
            "n": Field(Integer(1, MAX_CHOICES), "Number of answers, up to 16.", 1),
            "use_beam_search": Field(
                Boolean(),
                "Search for the likeliest answers instead of sampling; not with stream, stop, penalties, logit_bias, forbidden tokens or a "
                "form of the answer.",
                False,
            ),
        }
        | of_route(_BEAMS, route)
        | {
            "beam_width": msgspec.structs.replace(_BEAMS["beam_width"], default=None),
            "stream": Field(Boolean(), "Answer as server-sent events.", False),
            "stream_options": Field(
                Object(
                    {
                        "include_usage": Field(Boolean(), default=False),
                        "include_obfuscation": Field(None, harmless=(None, False)),
                    }
                ),
                '{"include_usage": true}: a last chunk with usage; needs stream.',
            ),
        }
        | of_route(_OPTIONS, route)
        | of_route(_EXTRAS, route)
        | {"user": USER, "keep_alive": KEEP_ALIVE, "session_id": _SESSION, "session_ttl": _SESSION_TTL}
        | {"structured_outputs": STRUCTURED_OUTPUTS}
        | GUIDED
    )


CHAT_FIELDS: Fields = (
    _common(CHAT)
    | CONVERSATION
    | FORMS
    | {
        "max_completion_tokens": Field(Integer(1), "The same as max_tokens."),
        "logprobs": Field(Boolean(), "Log-probabilities of the answer's tokens.", False),
        "top_logprobs": Field(Integer(0, MAX_LOGPROBS), "Alternatives for each token, up to 20; needs logprobs."),
        "metadata": METADATA,
        "safety_identifier": Field(String(512), "As user."),
        "prompt_cache_key": Field(String(512), "Accepted; prompts are matched by content, no key is needed."),
        "prompt_cache_retention": Field(String(64), "Accepted; cached prompts stay as long as there is room."),
        "modalities": Field(None, "Text only.", harmless=(None, ["text"])),
        "store": Field(None, "Nothing is stored.", harmless=(None, False)),
        "service_tier": Field(OneOf(("auto", "default")), "There is one tier; the answer says default."),
        "functions": Field(None, "Not supported.", harmless=(None, [])),
        "rag": Field(
            _Rag(),
            "Answer with passages of your documents and cite them; {} searches all of them. Its fields stand in "
            "docs/retrieval.md.",
        ),
    }
    | dict.fromkeys(
        ("function_call", "audio", "prediction", "verbosity", "web_search_options"), Field(None, "Not supported.")
    )
)

COMPLETIONS_FIELDS: Fields = _common(COMPLETIONS) | {
    "prompt": Field(
        texts_or_ids(MAX_PROMPTS),
        "A string, strings, token ids or lists of token ids; up to 128 prompts.",
        required=True,
    ),
    "max_tokens": Field(Integer(0), "Most tokens to generate; 0 only with echo.", 16),
    "best_of": Field(Integer(1, MAX_CHOICES), "Generate this many, return the n most likely; not with stream."),
    "echo": Field(Boolean(), "Return the prompt before the answer, with logprobs also its log-probabilities.", False),
    "logprobs": Field(Integer(0, 5), "Log-probabilities with this many alternatives, up to 5."),
    "suffix": Field(None, "Not supported.", harmless=(None, "")),
}


def read_chat(body: dict) -> Completion:
    """Check the body of POST /v1/chat/completions. Raises RequestError."""
    values = Object(CHAT_FIELDS).check(body, "")
    limit, other = values["max_tokens"], values["max_completion_tokens"]
    if limit is not None and other is not None and limit != other:
        raise refused(
            "invalid_value", "'max_tokens' and 'max_completion_tokens' differ; give one.", "max_completion_tokens"
        )
    values["max_tokens"] = other if limit is None else limit
    top = values["top_logprobs"]
    if top and not values["logprobs"]:  # 0 asks for nothing
        raise refused("invalid_value", "'top_logprobs' needs 'logprobs': true.", "top_logprobs")
    values["logprobs"] = (top or 0) if values["logprobs"] else None
    choice = values["tool_choice"]
    tools = None if choice.mode == "none" else values["tools"] or None
    if choice.is_given and choice.mode != "none" and tools is None:
        raise refused("invalid_value", f"'tool_choice' {choice.mode} needs 'tools'.", "tool_choice")
    if choice.name and all(tool["function"]["name"] != choice.name for tool in tools or ()):
        raise refused("invalid_value", "'tool_choice.function.name' is none of 'tools'.", "tool_choice.function.name")
    strict = frozenset(tool["function"]["name"] for tool in tools or () if tool["function"].pop("strict", False))
    budget, thinking_field, variables = _thinking_of(values)
    if values["continue_final_message"] or not values["add_generation_prompt"]:
        variables |= prompt_end(body, values)
    completion = _completion(
        body,
        values,
        messages=values["messages"],
        has_images=any(type(message["content"]) is list for message in values["messages"]),
        best_of=values["n"],
        tools=tools,
        tool_choice=choice,
        strict_tools=strict,
        service_tier=values["service_tier"],
        thinking_budget=budget,
        thinking_field=thinking_field,
        template_variables=variables,
        parallel_tool_calls=values["parallel_tool_calls"],
        rag=values["rag"],
    )
    field = completion.structure_field
    if completion.structure is not None and tools is not None and choice.mode in ("required", "named"):
        raise refused("invalid_value", f"'{field}' and 'tool_choice' {choice.mode} ask for different answers.", field)
    return completion


def read_chat_of(chat: dict, thinking: str, structure: str, messages: str = "", function: str = "") -> Completion:
    """The chat request that a body of another API means, whose fields of its reasoning, of its form and of the conversation have these
    names there; function: as named. Raises RequestError."""
    try:
        completion = read_chat(chat)
    except RequestError as error:
        raise named(error, structure, messages, function) from None
    completion.messages_field = messages
    if completion.thinking_field:
        completion.thinking_field = thinking
    if completion.structure is not None:
        completion.structure_field = structure
    return completion


def prompt_end(body: dict, values: dict) -> dict:
    """What the template is told of the prompt's end, by the checked values of a body. Raises RequestError."""
    if values["continue_final_message"]:
        if body.get("add_generation_prompt") or values["messages"][-1]["role"] != "assistant":
            message = "'continue_final_message' needs a last message of the assistant, and no 'add_generation_prompt'."
            raise refused("invalid_value", message, "continue_final_message")
        return {"continue_final_message": True}
    return {} if values["add_generation_prompt"] else {"add_generation_prompt": False}


def _thinking_of(values: dict) -> tuple[int | None, str, dict]:
    """(tokens of reasoning, the field that says so, variables of the template)."""
    effort, variables = values["reasoning_effort"], dict(values["chat_template_kwargs"])
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
        if effort == "none":
            variables.setdefault("enable_thinking", False)
    if values["thinking_budget"] is not None:
        return values["thinking_budget"], "thinking_budget", variables
    return (None, "", variables) if effort is None else (EFFORTS[effort], "reasoning_effort", variables)


def read_completions(body: dict) -> Completion:
    """Check the body of POST /v1/completions. Raises RequestError."""
    values = Object(COMPLETIONS_FIELDS).check(body, "")
    n, best_of = values["n"], values["best_of"] or values["n"]
    if best_of < n:
        raise refused("out_of_range", "'best_of' must be at least 'n'.", "best_of")
    if best_of > n and values["stream"]:
        raise refused("invalid_value", "'best_of' above 'n' cannot be streamed.", "best_of")
    if values["max_tokens"] == 0 and (not values["echo"] or values["stream"] or best_of > n):
        raise refused(
            "out_of_range", "'max_tokens' 0 needs 'echo' and goes without 'stream' and 'best_of'.", "max_tokens"
        )
    return _completion(body, values, prompts=values["prompt"], echo=values["echo"], best_of=best_of)


_ASKING = ("structured_outputs", *GUIDED, "response_format")


def _completion(body: dict, values: dict, **more: Any) -> Completion:
    """The request of checked values: those of a table become the Struct that declares it, whatever it has."""
    if values["stream_options"] is not None and not values["stream"]:
        raise refused("invalid_value", "'stream_options' needs 'stream': true.", "stream_options")
    if values["prompt_logprobs"] is not None and values["stream"]:
        raise refused("invalid_value", "'prompt_logprobs' cannot be streamed.", "prompt_logprobs")
    given = [name for name in _ASKING if values.get(name) is not None]
    if len(given) > 1:
        raise refused("invalid_value", f"'{given[0]}' and '{given[1]}' both ask for a form; give one.", given[0])
    field = given[0] if given else _ASKING[-1]
    structure = values.get(field)
    if values["truncate_prompt_tokens"] == 0:
        raise refused("out_of_range", "'truncate_prompt_tokens' must be at least 1, or -1.", "truncate_prompt_tokens")
    beams = _read_beams(values, more["best_of"], "" if structure is None else field)
    if beams is not None:
        more["best_of"] = values["n"]  # so many of them are answers
    tops = [values["prompt_logprobs"]]
    if more.get("echo"):
        tops.append(values["logprobs"])
    return Completion(
        model=values["model"],
        params=SamplingParams(**{name: values[name] for name in _SAMPLING if name in values}),
        left_out=frozenset(name for name in RECOMMENDED if body.get(name) is None),
        options=RequestOptions(**{name: values[name] for name in _OPTIONS if name in values}),
        extras=Extras(**{name: values[name] for name in _EXTRAS if name in values}),
        n=values["n"],
        stream=values["stream"],
        include_usage=bool((values["stream_options"] or {}).get("include_usage")),
        structure=structure,
        structure_field=field,
        beams=beams,
        num_choices=more["best_of"] * (len(more["prompts"]) if "prompts" in more else 1),
        num_ids=None
        if any(type(prompt) is str for prompt in more.get("prompts", [""]))
        else sum(map(len, more["prompts"])),
        keep_alive=values["keep_alive"],
        session_id=values["session_id"],
        session_ttl=values["session_ttl"],
        prompt_top=max((top for top in tops if top is not None), default=None),
        **more,
    )


_BEAM_FIELDS = tuple(of_route(_BEAMS, CHAT))
# Fields that a search would have to ignore.
_NOT_SEARCHED = """top_p top_k min_p top_n_sigma seed stop repetition_penalty presence_penalty frequency_penalty logit_bias min_tokens
    bad_words allowed_token_ids tools thinking_budget reasoning_effort""".split()


def _read_beams(values: dict, best_of: int, structure_field: str) -> BeamParams | None:
    """The search that the checked fields ask for, or None. Raises RequestError for what does not go together."""
    if not values["use_beam_search"]:
        for name in _BEAM_FIELDS:
            if values[name] != CHAT_FIELDS[name].default:
                raise refused("invalid_value", f"'{name}' needs 'use_beam_search': true.", name)
        return None
    if values["stream"]:
        raise refused("invalid_value", "A beam search cannot be streamed: its answers are known at the end.", "stream")
    for name in _NOT_SEARCHED:
        if values.get(name) not in ([], {}, None, CHAT_FIELDS[name].default):
            raise refused("invalid_value", f"'{name}' does not go with 'use_beam_search'.", name)
    if values["temperature"] not in (0, CHAT_FIELDS["temperature"].default):
        raise refused("invalid_value", "'temperature' does not go with 'use_beam_search'.", "temperature")
    if structure_field:
        raise refused("invalid_value", f"'{structure_field}' does not go with 'use_beam_search'.", structure_field)
    width = values["beam_width"] or best_of
    if width < values["n"]:
        raise refused("out_of_range", "'beam_width' must be at least 'n'.", "beam_width")
    if values["max_tokens"] == 0:
        raise refused("out_of_range", "'max_tokens' 0 does not go with 'use_beam_search'.", "max_tokens")
    return BeamParams(**{name: values[name] for name in _BEAMS} | {"beam_width": width})


def check_token_ids(completion: Completion, vocab_size: int) -> None:
    """Raises APIError invalid_token_id for an id outside [0, vocab_size)."""
    params, prompts = completion.params, completion.prompts
    given = {
        "prompt" if len(prompts) == 1 else f"prompt[{index}]": prompt
        for index, prompt in enumerate(prompts)
        if type(prompt) is list
    }
    fields = ("logit_bias", "stop_token_ids", "allowed_token_ids")
    for path, ids in (given | {name: getattr(params, name) for name in fields}).items():
        if ids and not are_ids(ids, vocab_size) and max(ids) >= vocab_size:
            message = f"'{path}' holds a token id outside the vocabulary of {vocab_size}."
            raise APIError("invalid_token_id", message, path)


def choice_seed(seed: int, index: int) -> int:
    """The seed of a further choice: hashed, so that requests with neighbouring seeds have no answer in common."""
    return int.from_bytes(blake2b(f"{seed} {index}".encode(), digest_size=8).digest(), "little") >> 1


def choice_params(completion: Completion, index: int, max_tokens: int) -> SamplingParams:
    """Parameters of choice `index`, for the engine: its own seed; log-probabilities too when answers are to be
    ranked."""
    params = completion.params
    seed = params.seed if params.seed is None or not index else choice_seed(params.seed, index)
    logprobs = 0 if completion.best_of > completion.n and params.logprobs is None else params.logprobs
    return msgspec.structs.replace(
        params, max_tokens=max_tokens, seed=seed, logprobs=logprobs, stop=(), bad_words=(), prompt_logprobs=None
    )
