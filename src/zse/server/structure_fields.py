"""The fields that ask for a form of the answer, and those that are about its reasoning."""

import msgspec

from zse.errors import RequestError
from zse.server.errors import APIError
from zse.server.fields import Field, boolean, mapping, one_of, read_fields, string, too_long, wrong_type
from zse.structured.options import JSON_OBJECT, JSON_SCHEMA, Structure, checked, read_structure

# Tokens of reasoning for each effort; None: as many as the model likes.
EFFORTS: dict[str, int | None] = {"none": 0, "minimal": 256, "low": 1024, "medium": 8192, "high": None}
MAX_VARIABLES, MAX_VARIABLE_BYTES = 32, 16 << 10
# The route gives these to the template.
_RESERVED = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token")

_JSON_SCHEMA = {
    "name": Field(string(64, empty=False), "", required=True),
    "description": Field(string(16384), ""),
    "schema": Field(lambda value, path: value, ""),
    "strict": Field(boolean, "", False),
}


def response_format(value, path) -> Structure | None:
    """OpenAI's {"type": "text" | "json_object" | "json_schema", ...}."""
    if type(value) is not dict:
        raise wrong_type(path, "an object", value)
    kind = one_of("text", JSON_OBJECT, JSON_SCHEMA)(value.get("type"), path + ".type") if "type" in value else None
    fields = {"type": Field(string(), "", required=True)}
    if kind == JSON_SCHEMA:
        fields["json_schema"] = Field(_json_schema, "", required=True)
    values = read_fields(fields, value, path + ".")
    if kind == JSON_SCHEMA:
        return values["json_schema"]
    return Structure(kind=JSON_OBJECT) if kind == JSON_OBJECT else None


def _json_schema(value, path) -> Structure:
    if type(value) is not dict:
        raise wrong_type(path, "an object", value)
    values = read_fields(_JSON_SCHEMA, value, path + ".")
    schema = values["schema"]
    if schema is None:
        return Structure(kind=JSON_OBJECT)
    if type(schema) is not dict:
        raise wrong_type(path + ".schema", "a JSON schema (an object)", schema)
    return checked(
        Structure(kind=JSON_SCHEMA, source=schema_text(schema, path + ".schema"), lenient=not values["strict"]),
        path + ".schema",
    )


def structured_outputs(value, path) -> Structure:
    """{"json" | "regex" | "choice" | "grammar": …}, as vLLM names them."""
    if type(value) is not dict:
        raise wrong_type(path, "an object", value)
    return read_structure(value, path)


def schema_text(schema: dict, path: str) -> str:
    """JSON of a schema. Raises APIError when it nests too deeply."""
    try:
        return msgspec.json.encode(schema).decode()
    except (RecursionError, UnicodeEncodeError):
        raise APIError("schema_too_complex", f"'{path}' is nested too deeply, or not Unicode.", path) from None


def the_structure(values: dict) -> tuple[Structure | None, str]:
    """What a body asks for, and the field that does. Raises APIError when both do."""
    first, second = values.get("response_format"), values["structured_outputs"]
    if first is not None and second is not None:
        raise APIError(
            "invalid_value",
            "'structured_outputs' and 'response_format' both ask for a form; give one.",
            "structured_outputs",
        )
    return (first, "response_format") if second is None else (second, "structured_outputs")


def effort(value, path) -> str:
    return one_of(*EFFORTS)(value, path)


def template_variables(value, path) -> dict:
    """What the chat template may read beside the messages: JSON by name."""
    for name, item in mapping(value, path, MAX_VARIABLES).items():
        if not name.isidentifier() or len(name) > 64:
            raise APIError("invalid_value", f"A key of '{path}' is not a name.", path)
        if name in _RESERVED:
            raise APIError(
                "invalid_value", f"'{path}.{name}' is given by the request's other fields.", f"{path}.{name}"
            )
        try:
            size = len(msgspec.json.encode(item))
        except (RecursionError, UnicodeEncodeError):
            size = MAX_VARIABLE_BYTES + 1
        if size > MAX_VARIABLE_BYTES:
            raise too_long(f"{path}.{name}", f"at most {MAX_VARIABLE_BYTES} bytes")
    return value


def named(error: RequestError, field: str) -> RequestError:
    """An engine's refusal of a grammar, in terms of the field that asked for it."""
    if error.param == "structure":
        error.param = field
        error.message = f"'{field}': {error.message}"
    return error
