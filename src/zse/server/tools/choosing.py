"""Which tool format a chat template writes: it renders a call, and the format that reads this call back is its own."""

import itertools
import json
import os.path

from zse.errors import RequestError
from zse.server.tools.blocks import BlockParser
from zse.server.tools.calls import fold
from zse.server.tools.parsers import FORMATS, NONE, ToolFormat
from zse.tokenizer import chat_template

_NAME, _ARGUMENTS = "find_probe", {"place": "Rome", "days": 3}
_IDS = "abcDEF123", f"functions.{_NAME}:0"  # Mistral's templates want nine letters, Kimi's write the id for the name
_SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string", "description": "where"}, "days": {"type": "integer"}},
    "required": ["place", "days"],
}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "finds", "parameters": _SCHEMA}}
_USER = {"role": "user", "content": "Where?"}
_ANSWER = "Zq7 answer"


def choose(source: str) -> str:
    """The name in FORMATS of a chat template's format, NONE when no format reads what it writes. A template that writes
    no calls (it passes over them, or refuses them) is judged by its text."""
    alike = [name for name, form in FORMATS.items() if any(marker in source for marker in form.markers)]
    turns = _turns(source)
    if not turns:
        return alike[0] if alike else NONE
    tried = dict.fromkeys([*alike, *FORMATS])
    return next((name for name in tried if any(_reads(FORMATS[name], turn) for turn in turns)), NONE)


def _turns(source: str) -> list[str]:
    """What the template writes of an assistant's call, from where an answer begins, with arguments as an object and as
    text."""
    try:
        template = chat_template.compile_template(source)
    except ValueError:
        return []

    def render(*messages: dict) -> str:
        given = {"messages": [_USER, *messages], "tools": [_TOOL], "add_generation_prompt": False}
        try:
            return template.render({"bos_token": "", "eos_token": "", **given})
        except RequestError:
            return ""

    before, plain = render(), render({"role": "assistant", "content": _ANSWER})
    header = plain[: plain.find(_ANSWER)] if _ANSWER in plain else ""
    turns = []
    for id, arguments in itertools.product(_IDS, (_ARGUMENTS, json.dumps(_ARGUMENTS))):
        call = {"id": id, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        asked = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "name": _NAME, "tool_call_id": id, "content": "{}"}
        text = render(asked) or render(asked, result)
        start = len(header) if header and text.startswith(header) else len(os.path.commonprefix([before, text]))
        if _NAME in text[start:]:
            turns.append(text[start:])
    return turns


def _reads(form: ToolFormat, turn: str) -> bool:
    parser = BlockParser(form.blocks, {_NAME: _SCHEMA}, form.separators)
    parts = parser.push(turn) + parser.finish()
    if any("call" in part for part in parts if isinstance(part, str)):
        return False  # marks around the call that it does not know
    found = [(call.name, call.arguments) for call in fold(parts)]
    try:
        return [(name, json.loads(arguments)) for name, arguments in found] == [(_NAME, _ARGUMENTS)]
    except (ValueError, RecursionError):
        return False
