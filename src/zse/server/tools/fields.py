"""The fields of a chat request that are about tools, and the messages that hold calls and their results."""

import msgspec

from zse.server.errors import APIError
from zse.server.fields import Field, array, boolean, one_of, read_fields, string, too_long, wrong_type
from zse.server.tools.calls import is_name, load_object

MAX_TOOLS = 128
MAX_CALLS = 128
MAX_SCHEMA_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 32
_TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")


def _name(value, path) -> str:
    string(64, empty=False)(value, path)
    if not is_name(value):
        raise APIError("invalid_value", f"'{path}' must be letters, digits, '_', '-' and '.'.", path)
    return value


class ToolChoice(msgspec.Struct, frozen=True):
    """mode: none, auto, required, or named: the function `name`. is_given: by the request."""

    mode: str = "auto"
    name: str = ""
    is_given: bool = False

    def __str__(self) -> str:
        return self.mode if self.is_given else ""


def _parameters(value, path) -> dict:
    """A JSON schema of an object: its shape is checked where templates and parsers read it."""
    if type(value) is not dict:
        raise wrong_type(path, "an object", value)
    if len(msgspec.json.encode(value)) > MAX_SCHEMA_BYTES:
        raise too_long(path, f"at most {MAX_SCHEMA_BYTES} bytes")
    if value.get("type", "object") != "object":
        raise APIError("invalid_value", f"'{path}.type' must be object.", path + ".type")
    _schema(value, path, 0)
    return value


def _schema(value, path, depth) -> None:
    if type(value) is bool and depth:
        return
    if type(value) is not dict:
        raise wrong_type(path, "a JSON schema (an object)", value)
    if depth > MAX_SCHEMA_DEPTH:
        raise too_long(path, f"at most {MAX_SCHEMA_DEPTH} levels")
    kinds = value.get("type")
    if kinds is not None:
        if not isinstance(kinds, list):
            kinds = [kinds]
        for kind in kinds:
            one_of(*_TYPES)(kind, path + ".type")
    for key in ("properties", "$defs", "definitions", "patternProperties"):
        if key in value:
            if type(value[key]) is not dict:
                raise wrong_type(f"{path}.{key}", "an object", value[key])
            for name, item in value[key].items():
                _schema(item, f"{path}.{key}.{_shown(name)}", depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if key in value:
            if type(value[key]) is not list:
                raise wrong_type(f"{path}.{key}", "an array", value[key])
            for index, item in enumerate(value[key]):
                _schema(item, f"{path}.{key}[{index}]", depth + 1)
    for key in ("items", "additionalProperties", "not"):
        if key in value and not (key == "items" and type(value[key]) is list):
            _schema(value[key], f"{path}.{key}", depth + 1)
    if "required" in value:
        array(string(), 4096)(value["required"], path + ".required")
    if "enum" in value and type(value["enum"]) is not list:
        raise wrong_type(path + ".enum", "an array", value["enum"])


def _shown(name: str) -> str:
    return name if len(name) <= 64 and name.isprintable() else "(unprintable)"


_FUNCTION = {
    "name": Field(_name, "", required=True),
    "description": Field(string(16384), ""),
    "parameters": Field(_parameters, ""),
    "strict": Field(boolean, "", False),
}


def _object(fields: dict[str, Field]):
    def check(value, path) -> dict:
        if type(value) is not dict:
            raise wrong_type(path, "an object", value)
        return read_fields(fields, value, path + ".")

    return check


_TOOL = {"type": Field(one_of("function"), "", required=True), "function": Field(_object(_FUNCTION), "", required=True)}


def tools(value, path) -> list[dict]:
    """The tools as templates expect them: description only where one was given, parameters always."""
    out: list[dict] = []
    for index, tool in enumerate(array(_object(_TOOL), MAX_TOOLS)(value, path)):
        given = tool["function"]
        if any(given["name"] == other["function"]["name"] for other in out):
            raise APIError(
                "invalid_value",
                f"'{path}[{index}].function.name' is the name of an earlier tool.",
                f"{path}[{index}].function.name",
            )
        function = {"name": given["name"]}
        if given["description"] is not None:
            function["description"] = given["description"]
        function["parameters"] = given["parameters"] or {"type": "object", "properties": {}}
        if given["strict"]:
            function["strict"] = True
        out.append({"type": "function", "function": function})
    return out


_NAMED = {
    "type": Field(one_of("function"), "", required=True),
    "function": Field(
        lambda value, path: _object({"name": Field(_name, "", required=True)})(value, path), "", required=True
    ),
}


def tool_choice(value, path) -> ToolChoice:
    if type(value) is dict:
        return ToolChoice("named", _object(_NAMED)(value, path)["function"]["name"], True)
    return ToolChoice(one_of("none", "auto", "required")(value, path), is_given=True)


def _arguments(value, path) -> dict:
    """A JSON object as text → the object, as templates expect it."""
    try:
        return load_object(string()(value, path))
    except ValueError:
        raise APIError("invalid_value", f"'{path}' must be a JSON object as a string.", path) from None


_CALL = {
    "id": Field(string(256, empty=False), "", required=True),
    "type": Field(one_of("function"), "", "function"),
    "index": Field(lambda value, path: value, ""),
    "function": Field(
        _object({"name": Field(_name, "", required=True), "arguments": Field(_arguments, "", required=True)}),
        "",
        required=True,
    ),
}


def tool_calls(value, path) -> list[dict]:
    """Calls that an assistant message of the history holds."""
    return [
        {"id": call["id"], "type": "function", "function": call["function"]}
        for call in array(_object(_CALL), MAX_CALLS)(value, path)
    ]
