"""The tool formats of model families, one table: how each writes its calls, and by what a chat template shows it."""

import json
import re

import msgspec

from zse.server.tools.blocks import Block
from zse.server.tools.calls import ToolCall, load_json, make_call, read_json, read_python

NONE = "none"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"

_KEY = r'\s*"(?:arguments|parameters)"\s*:\s*'
_OBJECT = r'[\s,;\[\]}]*\{\s*"name"\s*:\s*"([A-Za-z0-9_.-]{1,64})"\s*,' + _KEY
_MISTRAL = r"\s*([A-Za-z0-9_.-]{1,64})\s*(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\])?\s*"
_NEXT_PARAMETER = r"(?:^|(?<=</parameter>))\s*<parameter="
_FUNCTION = r"\s*<function=([^>\s]{1,64})>(.*)</function>\s*"


class ToolFormat(msgspec.Struct, frozen=True):
    """How a family of models writes calls.

    Args:
        markers: a chat template whose text holds one may be of this format; those formats are tried first.
        blocks: what calls stand in; of two that begin at one place the first counts.
        head: a regular expression of what stands before a call's arguments; its group is the name.
        controls: control tokens of some vocabularies that have to be seen in the text.
        arguments: written as "json", "xml" or "python".
        separators: characters that may stand between calls.
    """

    markers: tuple[str, ...]
    blocks: tuple[Block, ...]
    head: str
    controls: tuple[str, ...] = ()
    arguments: str = "json"
    separators: str = ""


def _read_either(text: str, functions: dict) -> list[ToolCall] | None:
    return read_json(text) or read_python(text)


def _read_mistral(text: str, functions: dict) -> list[ToolCall] | None:
    head = re.match(_MISTRAL, text)
    if head is None:
        return read_json(text)
    arguments = text[head.end() :]
    call = make_call(head[1], arguments) if arguments.startswith("{") else None
    return None if call is None else [call]


def _read_deepseek(text: str, functions: dict) -> list[ToolCall] | None:
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


def _read_xml(text: str, functions: dict) -> list[ToolCall] | None:
    match = re.fullmatch(_FUNCTION, text, re.DOTALL)
    if match is None:
        return None
    properties = (functions.get(match[1]) or {}).get("properties")
    properties = properties if isinstance(properties, dict) else {}
    texts = _parameters(match[2], _NEXT_PARAMETER)
    if texts is None and properties:  # a </parameter> is missing: only parameters that the function has are taken
        known = "|".join(map(re.escape, properties))
        texts = _parameters(match[2], rf"(?:^|(?<=</parameter>)|\n)\s*<parameter=(?=(?:{known})>)", is_strict=False)
    if texts is None:
        return None
    call = make_call(match[1], {key: _typed(text, properties.get(key)) for key, text in texts.items()})
    return None if call is None else [call]


def _parameters(text: str, begin: str, is_strict: bool = True) -> dict[str, str] | None:
    """The texts of a call's parameters, None when they are not well formed. begin: a regular expression of where one
    begins. is_strict: each has its closing mark, and so has each that stands in a value."""
    texts: dict[str, str] = {}
    first, *entries = re.split(begin, text.strip())
    for entry in entries:
        key, bracket, value = entry.partition(">")
        value = value.rstrip()
        is_closed = value.endswith("</parameter>")
        value = value.removesuffix("</parameter>").removeprefix("\n").removesuffix("\n")
        is_open = is_strict and (not is_closed or value.count("<parameter=") > value.count("</parameter>"))
        if not bracket or not key or key in texts or is_open:
            return None
        texts[key] = value
    return None if first.strip() else texts


def _is_in_parameter(body: str, calls: object) -> bool:
    """Whether a call's XML ends in an argument: a file that is written may hold the marks, or a whole call."""
    if body.count("<function=") > body.count("</function>"):
        return True
    return body.lstrip().startswith("<function=") and not body.rstrip().endswith("</function>")


def _read_function(text: str, functions: dict) -> list[ToolCall] | None:
    return _read_xml(f"<function={text}</function>", functions)


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


# In the order in which they are tried (choosing.py).
FORMATS: dict[str, ToolFormat] = {
    # Qwen3-Coder: <tool_call><function=NAME><parameter=KEY>value</parameter>…</function></tool_call>. It forgets
    # <tool_call> and </parameter> at times.
    "qwen3_coder": ToolFormat(
        ("<function=",),
        (
            Block("<tool_call>", _read_xml, "</tool_call>", is_inside=_is_in_parameter),
            Block("<function=", _read_function, "</function>", known=True, is_inside=_is_in_parameter, whole=True),
        ),
        r"\s*<function=([^>\s]{1,64})>",
        ("<tool_call>", "</tool_call>"),
        arguments="xml",
    ),
    # Hermes 2/3, Qwen 2.5 and 3: <tool_call>{"name": …, "arguments": {…}}</tool_call>
    "hermes": ToolFormat(
        ("<tool_call>",), (Block("<tool_call>", read_json, "</tool_call>"),), _OBJECT, ("<tool_call>", "</tool_call>")
    ),
    # DeepSeek V3, R1 (a JSON code block behind the name) and V3.1 (plain JSON).
    "deepseek": ToolFormat(
        (CALLS_BEGIN,),
        (Block(CALLS_BEGIN, _read_deepseek, CALLS_END),),
        rf"(?:\s|```)*(?:{CALL_END})?\s*{CALL_BEGIN}\s*(?:function{SEPARATOR}([A-Za-z0-9_.-]{{1,64}})"
        rf"\n```json\s*|([A-Za-z0-9_.-]{{1,64}}){SEPARATOR}\s*)",
        (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR),
    ),
    # Mistral: [TOOL_CALLS][{"name": …, "arguments": {…}}, …], and since v11 [TOOL_CALLS]NAME[ARGS]{…}
    "mistral": ToolFormat(
        ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
        (Block("[TOOL_CALLS]", _read_mistral, head=True),),
        rf"(?:{_OBJECT})|\s*([A-Za-z0-9_.-]{{1,64}})\s*(?:\[CALL_ID\]\w*)?\s*\[ARGS\]\s*",
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    # Gemma: ```tool_code with Python calls, ```json with {"name": …, "parameters": {…}}, or either as the answer.
    "gemma": ToolFormat(
        ("```tool_code", "<start_of_turn>"),
        (
            Block("```tool_code\n", read_python, "```", known=True),
            Block("```json\n", read_json, "```", known=True),
            Block("{", read_json, bare=True, known=True),
            Block("[", _read_either, quotes="\"'", bare=True, known=True),
        ),
        _OBJECT,
    ),
    # Llama 3.2 and 4: the answer is [f(a=1), g(b="x")], which <|python_start|> and <|python_end|> may enclose.
    "pythonic": ToolFormat(
        ("<|python_start|>", "[func_name1("),
        (
            Block("<|python_start|>", read_python, "<|python_end|>"),
            Block("[", read_python, quotes="\"'", bare=True, known=True),
        ),
        r"\s*\[?\s*([A-Za-z0-9_.]{1,64})\(",
        ("<|python_start|>", "<|python_end|>"),
        arguments="python",
    ),
    # Llama 3.1 to 3.3: the answer is {"name": …, "parameters": {…}}, several with `;` between them; <|python_tag|> may
    # stand before. Llama 4's template writes it behind an empty block of Python.
    "llama3_json": ToolFormat(
        ('"parameters": dictionary', "<|python_tag|>"),
        (
            Block("<|python_tag|>", read_json),
            Block("<|python_start|><|python_end|>", read_json),
            Block("{", read_json, bare=True, known=True),
        ),
        _OBJECT,
        ("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
        separators=";,",
    ),
}
