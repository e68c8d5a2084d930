"""The tool formats of model families: name → parser, and which one a chat template asks for."""

import json
import re
from collections.abc import Callable

from zse.server.tools.blocks import Balanced, Block, BlockParser, Until
from zse.server.tools.calls import ToolCall, load_json, make_call, read_json, read_python

NONE = "none"


class Functions(dict):
    """What a request offers: function name → its JSON schema of parameters."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self)


def hermes(functions: Functions) -> BlockParser:
    """Hermes 2/3, Qwen 2.5 and 3: <tool_call>{"name": …, "arguments": {…}}</tool_call>"""
    return BlockParser(
        [Block("<tool_call>", lambda: Until("</tool_call>"), read_json, "</tool_call>")], functions.names
    )


def qwen3_coder(functions: Functions) -> BlockParser:
    """Qwen3-Coder: <tool_call><function=NAME><parameter=KEY>value</parameter>…</function></tool_call>"""
    return BlockParser(
        [Block("<tool_call>", lambda: Until("</tool_call>"), lambda text: _read_xml(text, functions), "</tool_call>")],
        functions.names,
    )


def llama3_json(functions: Functions) -> BlockParser:
    """Llama 3.1 to 3.3: the answer is {"name": …, "parameters": {…}}, several with `;` between them; <|python_tag|> may
    stand before."""
    return BlockParser(
        [Block("<|python_tag|>", Balanced, read_json), Block("{", Balanced, read_json, bare=True, known=True)],
        functions.names,
        ";,",
    )


def pythonic(functions: Functions) -> BlockParser:
    """Llama 3.2 and 4: the answer is [f(a=1), g(b="x")], which <|python_start|> and <|python_end|> may enclose."""
    return BlockParser(
        [
            Block("<|python_start|>", lambda: Until("<|python_end|>"), read_python, "<|python_end|>"),
            Block("[", lambda: Balanced("\"'"), read_python, bare=True, known=True),
        ],
        functions.names,
    )


def mistral(functions: Functions) -> BlockParser:
    """Mistral: [TOOL_CALLS][{"name": …, "arguments": {…}}, …], and since v11 [TOOL_CALLS]NAME[ARGS]{…}"""
    return BlockParser([Block("[TOOL_CALLS]", lambda: Balanced(head=True), _read_mistral)], functions.names)


def gemma(functions: Functions) -> BlockParser:
    """Gemma: ```tool_code with Python calls, ```json with {"name": …, "parameters": {…}}, or either as the answer."""
    return BlockParser(
        [
            Block("```tool_code\n", lambda: Until("```"), read_python, "```", known=True),
            Block("```json\n", lambda: Until("```"), read_json, "```", known=True),
            Block("{", Balanced, read_json, bare=True, known=True),
            Block("[", lambda: Balanced("\"'"), _read_either, bare=True, known=True),
        ],
        functions.names,
    )


def deepseek(functions: Functions) -> BlockParser:
    """DeepSeek V3, R1 (a JSON code block behind the name) and V3.1 (plain JSON)."""
    return BlockParser([Block(CALLS_BEGIN, lambda: Until(CALLS_END), _read_deepseek, CALLS_END)], functions.names)


CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"

PARSERS: dict[str, Callable[[Functions], BlockParser]] = {
    "deepseek": deepseek,
    "gemma": gemma,
    "hermes": hermes,
    "llama3_json": llama3_json,
    "mistral": mistral,
    "pythonic": pythonic,
    "qwen3_coder": qwen3_coder,
}

# The first row with a marker that the template's text holds decides.
MARKERS: tuple[tuple[str, str], ...] = (
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    (CALLS_BEGIN, "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("[AVAILABLE_TOOLS]", "mistral"),
    ("```tool_code", "gemma"),
    ("<start_of_turn>", "gemma"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ('"parameters": dictionary', "llama3_json"),
    ("<|python_tag|>", "llama3_json"),
)

# Control tokens of some vocabularies that a parser has to see in the text.
CONTROLS: dict[str, tuple[str, ...]] = {
    "deepseek": (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR),
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "pythonic": ("<|python_start|>", "<|python_end|>"),
    "gemma": (),
}


def choose(template: str) -> str:
    """The parser for a chat template's text; NONE when it shows no format that is known."""
    return next((name for marker, name in MARKERS if marker in template), NONE)


def _read_either(text: str) -> list[ToolCall] | None:
    return read_json(text) or read_python(text)


_MISTRAL = r"\s*([A-Za-z0-9_.-]{1,64})\s*(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\])?\s*"


def _read_mistral(text: str) -> list[ToolCall] | None:
    head = re.match(_MISTRAL, text)
    if head is None:
        return read_json(text)
    arguments = text[head.end() :]
    call = make_call(head[1], arguments) if arguments.startswith("{") else None
    return None if call is None else [call]


def _read_deepseek(text: str) -> list[ToolCall] | None:
    calls = []
    first, *entries = text.split(CALL_BEGIN)
    if first.strip():
        return None
    for entry in entries:
        body, end, rest = entry.partition(CALL_END)
        kind, _, words = body.partition(SEPARATOR)
        name, arguments = kind.strip(), words.strip()
        if name == "function" and not arguments.startswith("{"):
            name, _, arguments = arguments.partition("\n")
            arguments = arguments.strip().removeprefix("```json").removesuffix("```")
        call = make_call(name.strip(), arguments)
        if call is None or not end or rest.strip():
            return None
        calls.append(call)
    return calls or None


_FUNCTION = r"\s*<function=([^>\s]{1,64})>(.*)</function>\s*"


def _read_xml(text: str, functions: Functions) -> list[ToolCall] | None:
    match = re.fullmatch(_FUNCTION, text, re.DOTALL)
    if match is None:
        return None
    properties = (functions.get(match[1]) or {}).get("properties")
    arguments = {}
    body = match[2]
    first, *entries = re.split(r"(?:^|(?<=</parameter>))\s*<parameter=", body.strip())
    if first.strip():
        return None
    for entry in entries:
        key, bracket, value = entry.partition(">")
        value = value.rstrip()
        if not bracket or not key or key in arguments or not value.endswith("</parameter>"):
            return None
        value = value.removesuffix("</parameter>").removeprefix("\n").removesuffix("\n")
        schema = properties.get(key) if isinstance(properties, dict) else None
        arguments[key] = _typed(value, schema)
    call = make_call(match[1], arguments)
    return None if call is None else [call]


def _typed(text: str, schema: object):
    """The value that a parameter's schema means by its text; text where it means nothing else."""
    kinds = schema.get("type") if isinstance(schema, dict) else "string"
    if kinds == "string" or isinstance(kinds, list) and "string" in kinds and text != "null":
        return text
    try:
        value = load_json({"True": "true", "False": "false", "None": "null"}.get(text, text))
        json.dumps(value, allow_nan=False)
        return value
    except (ValueError, RecursionError):
        return text
