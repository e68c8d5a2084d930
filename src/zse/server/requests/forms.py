"""The fields that ask for a form of the answer, and those that are about its reasoning."""

from typing import Any

import msgspec

from zse.errors import RequestError
from zse.sampling.fields import (
    Array,
    Boolean,
    Custom,
    Field,
    Fields,
    Integer,
    Object,
    OneOf,
    String,
    expect,
    refused,
    too_long,
    wrong_type,
)
from zse.structured.options import JSON_OBJECT, JSON_SCHEMA, MAX_CHOICES, Structure, checked, read_structure

# Tokens of reasoning for each effort; None: as many as the model likes.
EFFORTS: dict[str, int | None] = {"none": 0, "minimal": 256, "low": 1024, "medium": 8192, "high": None}
MAX_VARIABLES, MAX_VARIABLE_BYTES = 32, 16 << 10
# The route gives these to the template.
_RESERVED = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token")


def _json_schema(value: Any, path: str) -> Structure:
    values = _JSON_SCHEMA.check(value, path)
    schema, path = values["schema"], path + ".schema"
    if schema is None:
        return Structure(kind=JSON_OBJECT)
    if type(schema) is not dict:
        raise wrong_type(path, "a JSON schema (an object)", schema)
    return checked(Structure(kind=JSON_SCHEMA, source=_schema_text(schema, path), lenient=not values["strict"]), path)


def _schema_text(schema: dict, path: str) -> str:
    try:
        return msgspec.json.encode(schema).decode()
    except (RecursionError, UnicodeEncodeError):
        raise refused("schema_too_complex", f"'{path}' is nested too deeply, or not Unicode.", path) from None


_JSON_SCHEMA = Object(
    {
        "name": Field(String(64, empty=False), required=True),
        "description": Field(String(16384)),
        "schema": Field(Custom(lambda value, path: value, {"type": "object"})),
        "strict": Field(Boolean(), default=False),
    }
)
_KINDS = OneOf(("text", JSON_OBJECT, JSON_SCHEMA))
_FORMAT = Object({"type": Field(_KINDS, required=True)})
_SCHEMA_FORMAT = Object(
    _FORMAT.fields | {"json_schema": Field(Custom(_json_schema, _JSON_SCHEMA.schema), required=True)}
)


def _response_format(value: Any, path: str) -> Structure | None:
    """OpenAI's {"type": "text" | "json_object" | "json_schema", ...}."""
    kind = expect(dict, value, path).get("type")
    values = (_SCHEMA_FORMAT if kind == JSON_SCHEMA else _FORMAT).check(value, path)
    return (
        values["json_schema"] if kind == JSON_SCHEMA else Structure(kind=JSON_OBJECT) if kind == JSON_OBJECT else None
    )


def _structured_outputs(value: Any, path: str) -> Structure:
    """{"json" | "regex" | "choice" | "grammar": …}, as vLLM names them."""
    return read_structure(expect(dict, value, path), path)


def _template_variables(value: Any, path: str) -> dict:
    """What the chat template may read beside the messages: JSON by name."""
    expect(dict, value, path)
    if len(value) > MAX_VARIABLES:
        raise too_long(path, f"at most {MAX_VARIABLES} entries")
    for name, item in value.items():
        here = f"{path}.{name}"
        if not name.isidentifier() or len(name) > 64:
            raise refused("invalid_value", f"A key of '{path}' is not a name.", path)
        if name in _RESERVED:
            raise refused("invalid_value", f"'{here}' is given by the request's other fields.", here)
        try:
            size = len(msgspec.json.encode(item))
        except (RecursionError, UnicodeEncodeError):
            size = MAX_VARIABLE_BYTES + 1
        if size > MAX_VARIABLE_BYTES:
            raise too_long(here, f"at most {MAX_VARIABLE_BYTES} bytes")
    return value


def named(error: RequestError, field: str, messages: str, function: str = ".function") -> RequestError:
    """A refusal in terms of the API that was asked: `field` asks there for the form of the answer, the conversation is in
    `messages` ("": as a chat has it), and `function` stands before what a tool's function has."""
    ours = theirs = error.param or ""
    if ours == "structure":
        error.message, theirs = f"'{field}': {error.message}", field
    elif messages and ours.split("[")[0] == "messages":
        theirs = messages
    elif ours.startswith("response_format") and field != "response_format":
        theirs = ours.replace(".json_schema", "").replace("response_format", field)
    elif ours.startswith("tool"):
        theirs = ours.replace(".function", function)
    if theirs != ours:
        error.message, error.param = error.message.replace(f"'{ours}'", f"'{theirs}'"), theirs
    return error


def _guided(name: str, schema: dict) -> Field:
    """vLLM's older name of one of structured_outputs."""

    def check(value: Any, path: str) -> Structure:
        try:
            return read_structure({name: value}, path)
        except RequestError as error:
            error.message, error.param = error.message.replace(f"'{path}.{name}", f"'{path}"), path
            raise

    return Field(Custom(check, schema), f"As structured_outputs' {name}.")


_TEXT = String(empty=False).schema
GUIDED: Fields = {
    "guided_json": _guided("json", {"type": ["object", "string", "boolean"]}),
    "guided_regex": _guided("regex", _TEXT),
    "guided_choice": _guided("choice", Array(String(empty=False), MAX_CHOICES, 1).schema),
    "guided_grammar": _guided("grammar", _TEXT),
}
STRUCTURED_OUTPUTS = Field(
    Custom(
        _structured_outputs,
        {
            "type": "object",
            "properties": {name.removeprefix("guided_"): field.schema for name, field in GUIDED.items()},
            "additionalProperties": False,
            "minProperties": 1,
        },
    ),
    'One of {"json": schema}, {"regex": …}, {"choice": [texts]}, {"grammar": Lark or GBNF}; see Structured output.',
)
FORMS: Fields = {
    "response_format": Field(
        Custom(_response_format, {"anyOf": [_SCHEMA_FORMAT.schema, _FORMAT.schema]}),
        "text, json_object, or json_schema with name, schema and strict; see Structured output.",
    ),
    "thinking_budget": Field(Integer(0, 1 << 24), "Most tokens of reasoning; then the model has to answer."),
    "reasoning_effort": Field(
        OneOf(tuple(EFFORTS)),
        "none, minimal, low, medium or high: a thinking_budget of 0, 256, 1,024, 8,192 tokens or none; the chat template "
        "sees it too.",
    ),
    "chat_template_kwargs": Field(
        Custom(_template_variables, {"type": "object", "maxProperties": MAX_VARIABLES}),
        'What the chat template may read beside the messages, such as {"enable_thinking": false}.',
        {},
    ),
}
