"""The fields of Ollama's API, and the requests that they mean."""

from typing import Any

import msgspec

from zse.sampling.fields import (
    Array,
    Boolean,
    Custom,
    Field,
    Fields,
    Integer,
    Number,
    Object,
    OneOf,
    OneOrMore,
    String,
    expect,
    refused,
    wrong_type,
)
from zse.sampling.params import MAX_LOGPROBS, MAX_STOPS
from zse.server.requests.completions import KEEP_ALIVE, MODEL, Completion, read_chat_of, read_completions
from zse.server.requests.conversation import MAX_CALLS, MAX_MESSAGES, MAX_TOOLS, NAME, PARAMETERS
from zse.server.requests.image_parts import BARE_IMAGE, images_of
from zse.server.requests.measures import MAX_INPUTS, Embeddings, read_embeddings

_ANY = Custom(lambda value, path: value, {})
_OBJECT = Custom(lambda value, path: expect(dict, value, path), {"type": "object"})
# Options of Ollama that are about how a model is loaded, which is the server's: accepted, unused.
_OF_LOADING = """num_ctx num_batch num_gpu main_gpu num_thread num_keep numa low_vram f16_kv logits_all vocab_only use_mmap
    use_mlock embedding_only penalize_newline repeat_last_n""".split()
OPTIONS = Object(
    {
        "num_predict": Field(Integer(-2)),  # -1, -2: to the end of the context
        "seed": Field(Integer()),
        "temperature": Field(Number(0, 2)),
        "top_k": Field(Integer(-1)),
        "top_p": Field(Number(0, 1)),
        "min_p": Field(Number(0, 1)),
        "repeat_penalty": Field(Number(0, 10, above_low=True)),
        "presence_penalty": Field(Number(-2, 2)),
        "frequency_penalty": Field(Number(-2, 2)),
        "stop": Field(OneOrMore(String(256, empty=False), MAX_STOPS)),
        "typical_p": Field(None, harmless=(None, 1, 0)),
        "tfs_z": Field(None, harmless=(None, 1, 0)),
        "mirostat": Field(None, harmless=(None, 0)),
        "mirostat_tau": Field(_ANY),
        "mirostat_eta": Field(_ANY),
    },
    (*_OF_LOADING,),
)
_NAMES = {"repeat_penalty": "repetition_penalty"}  # option → field of a chat request, where they differ


def _format(value: Any, path: str) -> dict | None:
    """ "json", or a JSON schema → `response_format`."""
    if value == "":
        return None
    if value == "json":
        return {"type": "json_object"}
    if type(value) is not dict:
        raise wrong_type(path, '"json" or a JSON schema (an object)', value)
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": value, "strict": True}}


_EFFORTS = OneOf(("low", "medium", "high"))


def _think(value: Any, path: str) -> bool | str:
    return value if type(value) is bool else _EFFORTS.check(value, path)


_COMMON: Fields = {
    "model": msgspec.structs.replace(MODEL, required=True),
    "options": Field(
        OPTIONS,
        "num_predict, seed, temperature, top_k, top_p, min_p, repeat_penalty, presence_penalty, frequency_penalty, stop; those of "
        "loading (num_ctx, num_gpu …) are accepted, and are the server's.",
        dict.fromkeys(OPTIONS.fields),
    ),
    "keep_alive": KEEP_ALIVE,
}
_GENERATING: Fields = _COMMON | {
    "stream": Field(Boolean(), "Answer as lines of JSON.", True),
    "format": Field(
        Custom(_format, {"anyOf": [{"enum": ["", "json"]}, {"type": "object"}]}),
        '"json", or a JSON schema of the answer.',
    ),
    "think": Field(Custom(_think, {"anyOf": [Boolean().schema, _EFFORTS.schema]}), "true, false, low, medium or high."),
    "logprobs": Field(Boolean(), "Log-probabilities of the answer's tokens.", False),
    "top_logprobs": Field(Integer(0, MAX_LOGPROBS), "Alternatives for each token, up to 20."),
    "truncate": Field(None, "What is longer than the context is refused.", harmless=(None, False)),
    "shift": Field(None, "An answer ends with the context.", harmless=(None, False)),
}
_IMAGES = Field(Array(BARE_IMAGE, 256), "PNG, JPEG or WebP files in base64, shown before the text.", [])
_CALLS = Array(
    Object(
        {
            "id": Field(String(256)),
            "function": Field(
                Object(
                    {"name": Field(NAME, required=True), "arguments": Field(_OBJECT, default={})},
                    ("index", "description"),
                ),
                required=True,
            ),
        },
        ("type", "index"),
    ),
    MAX_CALLS,
)
_MESSAGE = Object(
    {
        "role": Field(OneOf(("system", "user", "assistant", "tool")), required=True),
        "content": Field(String(), default=""),
        "thinking": Field(String(), default=""),
        "images": _IMAGES,
        "tool_calls": Field(_CALLS, default=[]),
        "tool_name": Field(String(64)),
        "tool_call_id": Field(String(256)),
    },
    ("name",),
)

_FUNCTION = Object(
    {
        "name": Field(NAME, required=True),
        "description": Field(String(16384)),
        "parameters": Field(PARAMETERS),
        "strict": Field(Boolean(), default=False),
    }
)
_TOOL = Object({"type": Field(OneOf(("function",)), default="function"), "function": Field(_FUNCTION, required=True)})

CHAT: Fields = _GENERATING | {
    "messages": Field(Array(_MESSAGE, MAX_MESSAGES), "The conversation; without one the model is loaded.", []),
    "tools": Field(Array(_TOOL, MAX_TOOLS), "Functions that the model may call, up to 128."),
}
GENERATE: Fields = _GENERATING | {
    "prompt": Field(String(), "What the user says; without it the model is loaded.", ""),
    "system": Field(String(), "A system message."),
    "raw": Field(Boolean(), "The prompt is continued as it is, without the chat template.", False),
    "images": _IMAGES,
    "suffix": Field(None, "Not supported.", harmless=(None, "")),
    "template": Field(None, "Not supported: the model's own is used.", harmless=(None, "")),
    "context": Field(None, "Not supported: use /api/chat.", harmless=(None, [])),
}
EMBED: Fields = _COMMON | {
    "input": Field(OneOrMore(String(), MAX_INPUTS), "A text, or texts; without one the model is loaded.", []),
    "truncate": Field(Boolean(), "Cut texts that are longer than the context.", True),
    "dimensions": Field(Integer(1), "The first so many numbers of each vector."),
}
EMBEDDINGS: Fields = _COMMON | {"prompt": Field(String(), "A text; without it the model is loaded.", "")}
_NAME = String(256, empty=False)
_OLDER = Field(_NAME, "The same, as older clients call it.")
SHOW: Fields = {
    "model": Field(_NAME, "A name from GET /api/tags."),
    "name": _OLDER,
    "verbose": Field(Boolean(), "Accepted.", False),
}
_WHICH: Fields = {"model": Field(_NAME, "A name of the catalog or the store, or hf:ORG/NAME."), "name": _OLDER}
PULL: Fields = _WHICH | {
    "stream": Field(Boolean(), "Answer as lines of JSON, with the progress.", True),
    "insecure": Field(Boolean(), "Accepted; files are checked against their hashes always.", False),
}
DELETE: Fields = _WHICH


def read_which(fields: Fields, body: dict) -> dict:
    """The checked fields, of which `model` has the name. Raises RequestError."""
    values = Object(fields).check(body, "")
    values["model"] = values["model"] or values["name"]  # Open WebUI sends both
    if values["model"] is None:
        raise refused("missing_required_parameter", "'model' is required.", "model")
    return values


def _chat(values: dict) -> dict:
    """The body of a chat request without its messages."""
    options, think = values["options"], values["think"]
    chat = {
        "model": values["model"],
        "stream": values["stream"],
        "logprobs": values["logprobs"],
        "top_logprobs": values["top_logprobs"] if values["logprobs"] else None,
        "response_format": values["format"],
        "keep_alive": values["keep_alive"],
    }
    if (options["num_predict"] or 0) > 0:
        chat["max_tokens"] = options["num_predict"]
    for name in "seed temperature top_k min_p repeat_penalty presence_penalty frequency_penalty stop".split():
        if options[name] is not None:
            chat[_NAMES.get(name, name)] = options[name]
    if options["top_p"]:
        chat["top_p"] = options["top_p"]
    if think is not None:
        variables: dict = {"enable_thinking": think is not False}
        if type(think) is str:
            variables["reasoning_effort"] = think
        chat |= {"chat_template_kwargs": variables} | ({"thinking_budget": 0} if think is False else {})
    return chat


def read_ollama_chat(body: dict) -> Completion:
    """Check the body of POST /api/chat. Raises RequestError."""
    values = Object(CHAT).check(body, "")
    if not values["messages"]:
        raise refused("missing_required_parameter", "'messages' is required.", "messages")
    chat = _chat(values) | {"messages": _conversation(values["messages"]), "tools": values["tools"]}
    return _of_ollama(read_chat_of(chat, "think", "format", function=".function"), "messages")


def read_ollama_generate(body: dict) -> Completion:
    """Check the body of POST /api/generate. Raises RequestError."""
    values = Object(GENERATE).check(body, "")
    if not values["prompt"]:
        raise refused("missing_required_parameter", "'prompt' is required.", "prompt")
    if values["raw"]:
        return _continued(values)
    system = [{"role": "system", "content": values["system"]}] if values["system"] else []
    said = {"role": "user", "content": _content(values["prompt"], values["images"])}
    chat = _chat(values) | {"messages": [*system, said]}
    completion = _of_ollama(read_chat_of(chat, "think", "format", "prompt"), "prompt")
    completion.plain = "" if system else values["prompt"]
    return completion


def _of_ollama(completion: Completion, field: str) -> Completion:
    """What chat requests have no word for: num_predict ends an answer, as the context does, and images stand in a field of their own."""
    completion.is_bounded = True
    for part in images_of(completion.messages or []):
        path = part["path"].replace(".content[", ".images[")
        part["path"] = path if field == "messages" else path.rpartition(".")[2]
    return completion


def _continued(values: dict) -> Completion:
    """What `raw` asks for."""
    for name in ("think", "system", "format", "images"):
        if values[name]:
            raise refused("invalid_value", f"'{name}' does not go with 'raw'.", name)
    # A chat's. What is left of think says false, which asks for nothing here.
    of_chats = "response_format", "top_logprobs", "chat_template_kwargs", "thinking_budget"
    text = {name: value for name, value in _chat(values).items() if name not in of_chats}
    text["logprobs"] = min(values["top_logprobs"] or 0, 5) if values["logprobs"] else None
    completion = _of_ollama(read_completions(text | {"prompt": values["prompt"]}), "prompt")
    if "max_tokens" not in text:  # to the end of the context, which completions have no word for
        completion.params = msgspec.structs.replace(completion.params, max_tokens=None)
    return completion


def _content(text: str, images: list[str]) -> str | list[dict]:
    """As a chat request has it."""
    parts: list[dict] = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    return [*parts, {"type": "text", "text": text}] if images else text


def _conversation(messages: list[dict]) -> list[dict]:
    """Messages of a chat request: calls get ids, and results those of the calls that they answer, by id where the call has one, by
    name or in turn."""
    out: list[dict] = []
    waiting: list[tuple[str, str, bool]] = []  # (id, function, whether the id was sent) of calls without a result
    num_calls = 0
    for index, message in enumerate(messages):
        role = message["role"]
        made = {"role": role, "content": _content(message["content"], message["images"])}
        if message["thinking"]:
            made["reasoning_content"] = message["thinking"]
        if role == "tool":
            name, id = message["tool_name"], message["tool_call_id"]
            found = next(
                (call for call in waiting if (id in (None, call[0]) or not call[2]) and name in (None, call[1])), None
            )
            if found is None:
                path = f"messages[{index}]"
                raise refused("invalid_value", f"'{path}' is the result of no call before it.", path)
            waiting.remove(found)
            made["tool_call_id"] = found[0]
        calls = []
        for call in message["tool_calls"]:
            num_calls += 1
            id = call["id"] or f"call_{num_calls}"
            arguments = msgspec.json.encode(call["function"]["arguments"]).decode()
            waiting.append((id, call["function"]["name"], call["id"] is not None))
            function = {"name": call["function"]["name"], "arguments": arguments}
            calls.append({"id": id, "type": "function", "function": function})
        if calls:
            made["tool_calls"] = calls
        out.append(made)
    return out


def read_ollama_embed(body: dict) -> Embeddings:
    """Check the body of POST /api/embed. Raises RequestError."""
    values = Object(EMBED).check(body, "")
    return read_embeddings({name: values[name] for name in ("model", "input", "truncate", "dimensions", "keep_alive")})


def read_ollama_embeddings(body: dict) -> Embeddings:
    """Check the body of POST /api/embeddings, the older form. Raises RequestError."""
    values = Object(EMBEDDINGS).check(body, "")
    return read_embeddings(
        {"model": values["model"], "input": values["prompt"], "truncate": True, "keep_alive": values["keep_alive"]}
    )
