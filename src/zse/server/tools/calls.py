"""One function call: read from the JSON or Python that a model wrote, checked, never run."""

import ast
import json
import re
from collections.abc import Iterable

import msgspec

from zse.syntax import parse

MAX_PYTHON = 64 << 10  # characters of Python that are parsed
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ToolCall(msgspec.Struct, frozen=True):
    """A call. arguments: a JSON object as text; of a call that broke off its beginning, which is no JSON. id: what its
    result is to refer to; "" until it is given."""

    name: str
    arguments: str
    id: str = ""


class CallPart(msgspec.Struct, frozen=True):
    """A piece of a call. name: of the call that begins with it, else "". arguments: text that follows what came before;
    with a name it is not empty. id: of a call that begins; "" until it is given. is_last: the call is complete."""

    name: str
    arguments: str
    id: str = ""
    is_last: bool = False


def fold(parts: Iterable[object]) -> list[ToolCall]:
    """The calls that parts make. What is no CallPart is passed over."""
    begun: list[tuple[CallPart, list[str]]] = []
    for part in parts:
        if isinstance(part, CallPart):
            if part.name:
                begun.append((part, []))
            begun[-1][1].append(part.arguments)
    return [ToolCall(first.name, "".join(arguments), first.id) for first, arguments in begun]


def whole(calls: Iterable[ToolCall]) -> list[CallPart]:
    """Complete calls as parts."""
    return [CallPart(call.name, call.arguments, call.id, is_last=True) for call in calls]


def is_name(text: object) -> bool:
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def load_json(text: str):
    """The value of JSON, in whose strings raw control characters may stand. ValueError also for NaN and infinities, and
    for what nests too deeply."""
    try:
        return json.loads(text, parse_constant=_no_constant, strict=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _no_constant(name: str):
    raise ValueError(f"{name} is not JSON")


def load_object(text: str) -> dict:
    """A JSON object. ValueError for anything else."""
    value = load_json(text) if text.strip() else {}
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def arguments_of(call: ToolCall) -> dict:
    """An object; {} of a call that broke off."""
    try:
        return msgspec.json.decode(call.arguments, type=dict)
    except msgspec.DecodeError:
        return {}


def make_call(name: object, arguments: object) -> ToolCall | None:
    """A call of checked parts; None when they make none. arguments: an object, its JSON as text, or None for {}."""
    try:
        if isinstance(arguments, str):
            arguments = load_object(arguments)
        if not is_name(name) or not isinstance(arguments, dict | None):
            return None
        # With the spaces that templates' tojson writes: the call sent back in the history is the same tokens.
        text = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
        text.encode()  # a lone surrogate is no text that an answer could hold
    except (ValueError, TypeError, RecursionError):
        return None
    return ToolCall(str(name), text)


def from_json(value: object) -> list[ToolCall] | None:
    """Calls of a decoded {"name", "arguments" | "parameters"} or a list of them; None when any of them is none."""
    entries = value if isinstance(value, list) else [value]
    calls = []
    for entry in entries:
        if not isinstance(entry, dict):
            return None
        inner = entry.get("function")
        parts: dict = inner if isinstance(inner, dict) else entry
        call = make_call(parts.get("name", parts.get("tool_name")), parts.get("arguments", parts.get("parameters")))
        if call is None:
            return None
        calls.append(call)
    return calls or None


def read_json(text: str) -> list[ToolCall] | None:
    """Calls of JSON text, or None."""
    try:
        return from_json(load_json(text))
    except ValueError:
        return None


def read_python(text: str) -> list[ToolCall] | None:
    """Calls of `[f(a=1), g()]`, of one call or of several lines of them: keyword arguments that are literals, parsed
    and never run. `print(f())` is f(). None for any other code."""
    if len(text) > MAX_PYTHON:
        return None
    try:
        tree = parse(text.strip())
        calls = [_python_call(node) for statement in tree.body for node in _python_nodes(statement)]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return calls or None


def _python_nodes(statement: ast.stmt) -> list[ast.expr]:
    if not isinstance(statement, ast.Expr):
        raise ValueError
    return statement.value.elts if isinstance(statement.value, ast.List) else [statement.value]


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call):
        raise ValueError
    name = ast.unparse(node.func)
    if name == "print" and len(node.args) == 1 and not node.keywords:
        return _python_call(node.args[0])
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError
    call = make_call(name, {keyword.arg: _literal(keyword.value) for keyword in node.keywords})
    if call is None:
        raise ValueError
    return call


def _literal(node: ast.expr):
    """A literal; the names that JSON has are taken for Python's, since models mix them up."""
    names = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) for key in node.keys if key is not None]
        if len(keys) != len(node.values) or not all(isinstance(key, str) for key in keys):
            raise ValueError
        return dict(zip(keys, map(_literal, node.values), strict=True))
    return ast.literal_eval(node)
