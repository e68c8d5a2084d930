"""Tools and reasoning in the chat route: which parsers a request gets, and how answers show what they found."""

import re
from typing import TYPE_CHECKING

from zse.server.errors import APIError
from zse.server.tools import parsers
from zse.server.tools.answer import Format, Splitter, format_of, opens_reasoning

if TYPE_CHECKING:
    from zse.server.generation import Choice, Delta
    from zse.server.schemas import Completion


class Answers:
    """How the answers of one request are taken apart. is_open: the prompt has begun the reasoning."""

    def __init__(self, form: Format, tools: list[dict] | None, parallel: bool):
        self._format, self._parallel = form, parallel
        self._functions = None if tools is None else parsers.Functions(
            {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools})
        self.is_open = False
        self.controls = form.controls(tools is not None)

    def opens_reasoning(self, prompt_end: str) -> bool:
        return opens_reasoning(self._format, prompt_end)

    def splitter(self) -> Splitter:
        return Splitter(self._format, self._functions, self.is_open, self._parallel)


def prepare(completion: "Completion", model, tool_parser: str | None, reasoning_parser: str | None) -> Answers | None:
    """The parsers for a request to a model; None where nothing is to be found. Raises APIError when the model's chat
    template cannot take what the request has of tools."""
    template = model.template_source
    if template is None:
        return None         # encode_chat() refuses
    form = format_of(template, tool_parser, reasoning_parser)
    if completion.tools is not None:
        if not parsers.takes_tools(template):
            raise APIError("unsupported_parameter", "'tools': this model's chat template has no tool support.", "tools")
        if form.tools == parsers.NONE:
            raise APIError("unsupported_parameter", "'tools': the format of this model's tool calls is not known; start "
                                                    "the server with --tool-parser.", "tools")
    _check_history(completion.messages or [], template)
    if completion.tools is None and form.reasoning == parsers.NONE:
        return None
    return Answers(form, completion.tools, completion.parallel_tool_calls)


def _check_history(messages: list[dict], template: str) -> None:
    """Templates without tool support would leave calls and results out without a word."""
    if re.search("tool", template):
        return
    for index, message in enumerate(messages):
        field = "role" if message["role"] == "tool" else "tool_calls" if "tool_calls" in message else None
        if field is not None:
            raise APIError("unsupported_parameter", f"'messages[{index}].{field}': this model's chat template has no "
                                                    "tool support.", f"messages[{index}].{field}")


def message(choice: "Choice") -> dict:
    """The assistant message of a whole answer."""
    out: dict = {"role": "assistant", "content": choice.text or (None if choice.calls else ""), "refusal": None}
    if choice.calls:
        out["tool_calls"] = [{"id": call.id, "type": "function",
                              "function": {"name": call.name, "arguments": call.arguments}} for call in choice.calls]
    if choice.reasoning:
        out["reasoning_content"] = out["reasoning"] = choice.reasoning
    return out


def deltas(delta: "Delta") -> list[dict]:
    """The `delta` objects of one event: reasoning, content, then for each call its id and name, then its arguments."""
    out: list[dict] = []
    if delta.reasoning:
        out.append({"reasoning_content": delta.reasoning, "reasoning": delta.reasoning})
    if delta.text:
        out.append({"content": delta.text})
    for index, call in delta.calls:
        out.append({"tool_calls": [{"index": index, "id": call.id, "type": "function",
                                    "function": {"name": call.name, "arguments": ""}}]})
        out.append({"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]})
    return out
