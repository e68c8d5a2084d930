"""What the completion routes accept: one table of fields each, and the typed request that comes out of it."""

import msgspec

from zse.sampling.params import BeamParams, SamplingParams
from zse.scheduler.options import DEFAULT, MAX_DEADLINE_MS, PRIORITIES, RequestOptions
from zse.server.beam_fields import BEAM_FIELDS, read_beams
from zse.server.errors import APIError
from zse.server.fields import (
    Field,
    array,
    boolean,
    integer,
    logit_bias,
    metadata,
    number,
    one_of,
    read_fields,
    stop,
    string,
    token_id,
    token_ids,
    wrong_type,
)
from zse.server.messages import messages
from zse.server.structure_fields import (
    EFFORTS,
    effort,
    response_format,
    structured_outputs,
    template_variables,
    the_structure,
)
from zse.server.tools.fields import ToolChoice, tool_choice, tools
from zse.structured.options import Structure

MAX_PROMPTS = 128
MAX_CHOICES = 16
MAX_IDS = 1 << 20
_SEEDS = 1 << 63


class Completion(msgspec.Struct):
    """A checked request of either route. prompts: text or token ids (completions); messages: role/content (chat).
    top_logprobs: None for no log-probabilities, else how many alternatives. tools: what may be called, None when nothing may. structure: the form that structure_field asks for.
    thinking_budget: tokens of reasoning, by thinking_field. template_variables: for the chat template."""

    model: str | None
    params: SamplingParams
    options: RequestOptions = DEFAULT
    n: int = 1
    best_of: int = 1
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    stop: tuple[str, ...] = ()
    prompts: list = []
    messages: list[dict] | None = None
    tools: list[dict] | None = None
    tool_choice: ToolChoice = ToolChoice()
    strict_tools: frozenset[str] = frozenset()
    parallel_tool_calls: bool = True
    structure: Structure | None = None
    structure_field: str = ""
    thinking_budget: int | None = None
    thinking_field: str = ""
    template_variables: dict = {}
    cache_salt: str = ""
    service_tier: str | None = None
    prompt_logprobs: int | None = None
    beams: BeamParams | None = None

    @property
    def prompt_top(self) -> int | None:
        """Alternatives for each token of the prompt, None where its log-probabilities are not wanted."""
        if self.prompt_logprobs is None:
            return self.params.logprobs if self.echo else None
        return max(self.prompt_logprobs, (self.params.logprobs or 0) if self.echo else 0)

    @property
    def num_choices(self) -> int:
        """Generations that the engine has to make."""
        return self.best_of * (1 if self.messages is not None else len(self.prompts))


def _stream_options(value, path) -> dict:
    if type(value) is not dict:
        raise wrong_type(path, "an object", value)
    return read_fields(
        {"include_usage": Field(boolean, "", False), "include_obfuscation": Field(None, "", harmless=(None, False))},
        value,
        path + ".",
    )


def _prompt(value, path) -> list:
    """String, strings, token ids, or lists of token ids → list of str | list[int]."""
    if type(value) is str:
        return [value]
    if type(value) is not list:
        raise wrong_type(path, "a string or an array", value)
    if not value:
        raise APIError("invalid_value", f"'{path}' must not be empty.", path)
    if type(value[0]) is int:
        return [token_ids(MAX_IDS)(value, path)]
    if type(value[0]) is str:
        return array(string(), MAX_PROMPTS)(value, path)
    if type(value[0]) is list:
        return array(array(token_id, MAX_IDS, 1), MAX_PROMPTS)(value, path)
    raise wrong_type(path + "[0]", "a string, an integer or an array of integers", value[0])


_COMMON = {
    "model": Field(string(256, empty=False), "A name from GET /v1/models; left out: the first one."),
    "max_tokens": Field(integer(1), "Most tokens to generate."),
    "temperature": Field(number(0, 2), "0 is greedy.", 1.0),
    "top_p": Field(number(0, 1, above_low=True), "Nucleus sampling; 1 is off.", 1.0),
    "top_k": Field(integer(-1, 1 << 20), "Keep the k most likely tokens; 0 or -1 is off.", 0),
    "min_p": Field(number(0, 1), "Drop tokens below this share of the most likely one's probability.", 0.0),
    "repetition_penalty": Field(
        number(0, 10, above_low=True), "Divides logits of tokens seen in prompt or answer.", 1.0
    ),
    "presence_penalty": Field(number(-2, 2), "Subtracted from logits of tokens that the answer holds.", 0.0),
    "frequency_penalty": Field(number(-2, 2), "Subtracted once per occurrence in the answer.", 0.0),
    "logit_bias": Field(logit_bias, "Token id → bias in [-100, 100], at most 1,024."),
    "seed": Field(integer(-_SEEDS, _SEEDS - 1), "Same seed, same request, same answer; choice i uses seed + i."),
    "stop": Field(stop, "Up to 4 strings of up to 256 characters; the answer ends before one.", ()),
    "stop_token_ids": Field(token_ids(128), "Up to 128 token ids that end the answer.", ()),
    "ignore_eos": Field(boolean, "Go on after the model's own end token.", False),
    "speculation": Field(boolean, "false verifies no drafts for this request; its answer is the same.", True),
    "prompt_logprobs": Field(
        integer(0, 20),
        "Log-probabilities of the prompt's tokens with this many alternatives, up to 20; not with stream.",
    ),
    "n": Field(integer(1, MAX_CHOICES), "Number of answers, up to 16.", 1),
    **BEAM_FIELDS,
    "stream": Field(boolean, "Answer as server-sent events.", False),
    "stream_options": Field(_stream_options, '{"include_usage": true}: a last chunk with usage; needs stream.'),
    "priority": Field(
        integer(*PRIORITIES),
        "From -10 to 10: higher goes first among the requests of one key; one that "
        "waits gains on newer ones (--ageing-ms).",
        0,
    ),
    "deadline_ms": Field(
        number(0, MAX_DEADLINE_MS, above_low=True),
        "When the whole answer is wanted, from now: sooner "
        "goes first; answered 504 if it passes before the request has begun.",
    ),
    "user": Field(string(512), "An identifier of yours; accepted, not used."),
    "structured_outputs": Field(
        structured_outputs,
        'One of {"json": schema}, {"regex": …}, {"choice": [texts]}, {"grammar": Lark or GBNF}; see Structured output.',
    ),
    "cache_salt": Field(
        string(256, empty=False), "Keeps cached prompts apart: only requests with the same one share.", ""
    ),
}

CHAT = _COMMON | {
    "messages": Field(
        messages,
        "The conversation: role (system, developer, user, assistant, tool) and content (text "
        "or text parts), up to 2,048.",
        required=True,
    ),
    "max_completion_tokens": Field(integer(1), "The same as max_tokens."),
    "logprobs": Field(boolean, "Log-probabilities of the answer's tokens.", False),
    "top_logprobs": Field(integer(0, 20), "Alternatives for each token, up to 20; needs logprobs."),
    "metadata": Field(metadata, "Up to 16 strings; accepted, not used."),
    "response_format": Field(
        response_format, "text, json_object, or json_schema with name, schema and strict; see Structured output."
    ),
    "safety_identifier": Field(string(512), "As user."),
    "prompt_cache_key": Field(string(512), "Accepted; prompts are matched by content, no key is needed."),
    "modalities": Field(None, "Text only.", harmless=(None, ["text"])),
    "store": Field(None, "Nothing is stored.", harmless=(None, False)),
    "service_tier": Field(one_of("auto", "default"), "There is one tier; the answer says default."),
    "tools": Field(tools, "Functions that the model may call, up to 128; see Tools."),
    "tool_choice": Field(
        tool_choice,
        'auto (with tools the default), none, required, or {"type": "function", "function": {"name": …}}.',
        ToolChoice(),
    ),
    "parallel_tool_calls": Field(boolean, "false ends the answer behind its first call.", True),
    "thinking_budget": Field(integer(0, 1 << 24), "Most tokens of reasoning; then the model has to answer."),
    "reasoning_effort": Field(
        effort,
        "none, minimal, low, medium or high: a thinking_budget of 0, 256, 1,024, 8,192 "
        "tokens or none; the chat template sees it too.",
    ),
    "chat_template_kwargs": Field(
        template_variables,
        'What the chat template may read beside the messages, such as {"enable_thinking": false}.',
        {},
    ),
    "functions": Field(None, "Not supported.", harmless=(None, [])),
    "function_call": Field(None, "Not supported."),
    "audio": Field(None, "Not supported."),
    "prediction": Field(None, "Not supported."),
    "verbosity": Field(None, "Not supported."),
    "web_search_options": Field(None, "Not supported."),
}

COMPLETIONS = _COMMON | {
    "prompt": Field(_prompt, "A string, strings, token ids or lists of token ids; up to 128 prompts.", required=True),
    "max_tokens": Field(integer(0), "Most tokens to generate; 0 only with echo.", 16),
    "best_of": Field(integer(1, MAX_CHOICES), "Generate this many, return the n most likely; not with stream."),
    "echo": Field(boolean, "Return the prompt before the answer, with logprobs also its log-probabilities.", False),
    "logprobs": Field(integer(0, 5), "Log-probabilities with this many alternatives, up to 5."),
    "suffix": Field(None, "Not supported.", harmless=(None, "")),
}


def read_chat(body: dict) -> Completion:
    """Check the body of POST /v1/chat/completions. Raises APIError."""
    values = read_fields(CHAT, body)
    limit, other = values["max_tokens"], values["max_completion_tokens"]
    if limit is not None and other is not None and limit != other:
        raise APIError(
            "invalid_value", "'max_tokens' and 'max_completion_tokens' differ; give one.", "max_completion_tokens"
        )
    values["max_tokens"] = other if limit is None else limit
    top = values["top_logprobs"]
    if top is not None and not values["logprobs"]:
        raise APIError("invalid_value", "'top_logprobs' needs 'logprobs': true.", "top_logprobs")
    logprobs = (top or 0) if values["logprobs"] else None
    choice = values["tool_choice"]
    tools = None if choice.mode == "none" else values["tools"] or None
    if choice.is_given and choice.mode != "none" and tools is None:
        raise APIError("invalid_value", f"'tool_choice' {choice.mode} needs 'tools'.", "tool_choice")
    if choice.name and all(tool["function"]["name"] != choice.name for tool in tools or ()):
        raise APIError("invalid_value", "'tool_choice.function.name' is none of 'tools'.", "tool_choice.function.name")
    strict = frozenset(tool["function"]["name"] for tool in tools or () if tool["function"].pop("strict", False))
    structure, field = the_structure(values)
    if structure is not None and tools is not None and choice.mode in ("required", "named"):
        raise APIError("invalid_value", f"'{field}' and 'tool_choice' {choice.mode} ask for different answers.", field)
    budget, thinking_field, variables = _thinking(values)
    return _completion(
        values,
        logprobs,
        messages=values["messages"],
        best_of=values["n"],
        tools=tools,
        tool_choice=choice,
        strict_tools=strict,
        service_tier=values["service_tier"],
        thinking_budget=budget,
        thinking_field=thinking_field,
        template_variables=variables,
        parallel_tool_calls=values["parallel_tool_calls"],
    )


def _thinking(values: dict) -> tuple[int | None, str, dict]:
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
    """Check the body of POST /v1/completions. Raises APIError."""
    values = read_fields(COMPLETIONS, body)
    n, best_of = values["n"], values["best_of"] or values["n"]
    if best_of < n:
        raise APIError("out_of_range", "'best_of' must be at least 'n'.", "best_of")
    if best_of > n and values["stream"]:
        raise APIError("invalid_value", "'best_of' above 'n' cannot be streamed.", "best_of")
    if values["max_tokens"] == 0 and (not values["echo"] or values["stream"] or best_of > n):
        raise APIError(
            "out_of_range", "'max_tokens' 0 needs 'echo' and goes without 'stream' and 'best_of'.", "max_tokens"
        )
    return _completion(values, values["logprobs"], prompts=values["prompt"], echo=values["echo"], best_of=best_of)


def _completion(values: dict, logprobs: int | None, **more) -> Completion:
    if values["stream_options"] is not None and not values["stream"]:
        raise APIError("invalid_value", "'stream_options' needs 'stream': true.", "stream_options")
    if values["prompt_logprobs"] is not None and values["stream"]:
        raise APIError("invalid_value", "'prompt_logprobs' cannot be streamed.", "prompt_logprobs")
    structure, field = the_structure(values)
    beams = read_beams(values, more["best_of"], "" if structure is None else field, logprobs)
    if beams is not None:
        more["best_of"] = values["n"]  # so many of them are answers
    params = SamplingParams(
        max_tokens=values["max_tokens"],
        temperature=values["temperature"],
        top_p=values["top_p"],
        top_k=max(0, values["top_k"]),
        min_p=values["min_p"],
        repetition_penalty=values["repetition_penalty"],
        presence_penalty=values["presence_penalty"],
        frequency_penalty=values["frequency_penalty"],
        logit_bias=values["logit_bias"] or None,
        seed=None if values["seed"] is None else values["seed"] % _SEEDS,
        stop_token_ids=tuple(values["stop_token_ids"]),
        ignore_eos=values["ignore_eos"],
        logprobs=logprobs,
    )
    options = RequestOptions(
        priority=values["priority"], deadline_ms=values["deadline_ms"], speculate=values["speculation"]
    )
    return Completion(
        model=values["model"],
        params=params,
        options=options,
        n=values["n"],
        stream=values["stream"],
        include_usage=bool((values["stream_options"] or {}).get("include_usage")),
        stop=values["stop"],
        cache_salt=values["cache_salt"],
        structure=structure,
        structure_field=field,
        prompt_logprobs=values["prompt_logprobs"],
        beams=beams,
        **more,
    )


def check_token_ids(completion: Completion, vocab_size: int) -> None:
    """Raises APIError invalid_token_id for an id outside [0, vocab_size)."""
    params = completion.params
    for index, prompt in enumerate(completion.prompts):
        if type(prompt) is list and max(prompt) >= vocab_size:
            raise _outside("prompt" if len(completion.prompts) == 1 else f"prompt[{index}]", vocab_size)
    if params.logit_bias and max(params.logit_bias) >= vocab_size:
        raise _outside("logit_bias", vocab_size)
    if params.stop_token_ids and max(params.stop_token_ids) >= vocab_size:
        raise _outside("stop_token_ids", vocab_size)


def _outside(path: str, vocab_size: int) -> APIError:
    return APIError("invalid_token_id", f"'{path}' holds a token id outside the vocabulary of {vocab_size}.", path)


def choice_params(params: SamplingParams, index: int, max_tokens: int, rank: bool) -> SamplingParams:
    """Parameters of choice `index`: its own seed; log-probabilities too when answers are to be ranked."""
    changes: dict = {"max_tokens": max_tokens}
    if params.seed is not None and index:
        changes["seed"] = (params.seed + index) % _SEEDS
    if rank and params.logprobs is None:
        changes["logprobs"] = 0
    return msgspec.structs.replace(params, **changes)


def describe(fields: dict[str, Field]) -> list[tuple[str, str, str]]:
    """(name, "required" | "refused" | default, doc) of each field: the tables of docs/api.md."""
    rows = []
    for name, item in fields.items():
        default = "" if item.default in (None, (), "", {}) else str(item.default)
        default = default.lower() if isinstance(item.default, bool) else default
        rows.append((name, "required" if item.required else "refused" if item.check is None else default, item.doc))
    return rows
