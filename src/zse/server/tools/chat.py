"""Tools and reasoning in the chat route: which parsers a request gets, and how answers show what they found."""

from typing import TYPE_CHECKING

import msgspec

import zse.server.tools.parsers as parsers
from zse.server.errors import APIError, unsupported
from zse.server.tools import grammars, reasoning
from zse.server.tools.answer import Format, Splitter, format_of
from zse.structured.options import JSON_OBJECT, JSON_SCHEMA, TEXT, Structure, Thinking

if TYPE_CHECKING:
    from zse.server.answering import Choice
    from zse.server.requests.completions import Completion


class Answers:
    """How the answers of one request are taken apart. is_open: the prompt has begun the reasoning. grammar: of its tool
    calls, None where they are free."""

    def __init__(self, form: Format, tools: list[dict] | None, parallel: bool, grammar: Structure | None = None):
        self._format, self._parallel, self.grammar = form, parallel, grammar
        self._functions: dict[str, dict] | None = None
        if tools is not None:
            self._functions = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
        self.is_open = False
        self.controls = form.controls(tools is not None)

    def opens_reasoning(self, prompt_end: str) -> bool:
        """Whether the template has begun the reasoning in the prompt, of which `prompt_end` is the end."""
        marks = self._format.marks
        if self._format.reasoning == reasoning.HARMONY:
            return prompt_end.endswith("<|channel|>analysis<|message|>")
        return marks is not None and prompt_end.rstrip().endswith((marks.opening, marks.opening + marks.label))

    def thinking(self, budget: int | None) -> Thinking | None:
        """The reasoning that stands before what a grammar is about; None for models that do not reason."""
        marks = self._format.marks
        if self._format.reasoning == reasoning.HARMONY and budget is not None:
            raise unsupported("thinking_budget", "this model's reasoning has no bound; reasoning_effort shortens it")
        if marks is None:
            return None
        # A grammar of calls has what stands before them; any other begins with the answer's words.
        closing = marks.closing + (marks.answer if self.grammar is None else "")
        return Thinking(opening=marks.opening, closing=closing, is_open=self.is_open, budget=budget)

    def splitter(self) -> Splitter:
        return Splitter(self._format, self._functions, self.is_open, self._parallel)


def prepare(completion: "Completion", model, tool_parser: str | None, reasoning_parser: str | None) -> Answers | None:
    """The parsers for a request to a model; None where nothing is to be found. Raises APIError when the model's chat
    template cannot take what the request has of tools."""
    template = model.template_source
    if template is None:
        return None  # encode_chat() refuses
    # What calls look like is found by rendering one: only for requests that can have some.
    form = format_of(template, parsers.NONE if completion.tools is None else tool_parser, reasoning_parser)
    if completion.tools is not None:
        if not form.takes_tools:
            raise unsupported("tools", "this model's chat template has no tool support")
        if form.tools == parsers.NONE:
            reason = (
                "no known format reads the calls that this model's chat template writes; start the server with "
                f"--tool-parser NAME (one of {', '.join(parsers.FORMATS)})"
            )
            raise unsupported("tools", reason)
    for index, message in enumerate(() if form.names_tools else completion.messages or ()):
        field = "role" if message["role"] == "tool" else "tool_calls" if "tool_calls" in message else None
        if field is not None:  # the template would leave calls and results out without a word
            raise unsupported(f"messages[{index}].{field}", "this model's chat template has no tool support")
    if completion.thinking_field and completion.thinking_budget != 0 and form.reasoning == parsers.NONE:
        raise unsupported(completion.thinking_field, "this model's chat template has no reasoning")
    if completion.tools is None and form.reasoning == parsers.NONE and not form.recipients:
        return None
    grammar = None if completion.tools is None else _grammar(completion, form, model)
    choice = completion.tool_choice.mode
    return Answers(form, completion.tools, completion.parallel_tool_calls and choice != "named", grammar)


def _grammar(completion: "Completion", form: Format, model) -> Structure | None:
    """What enforces a call that has to come, or calls of strict functions. Raises APIError."""
    choice, strict = completion.tool_choice, completion.strict_tools
    must = choice.mode in ("required", "named")
    content = completion.structure
    if not must and not strict and content is None:
        return None
    if content is not None and content.kind not in (JSON_OBJECT, JSON_SCHEMA):
        field = completion.structure_field
        raise APIError("invalid_value", f"'{field}' beside 'tools' must be a JSON schema.", field)
    functions = {
        tool["function"]["name"]: tool["function"]["parameters"]
        for tool in completion.tools or ()
        if not choice.name or tool["function"]["name"] == choice.name
    }
    return grammars.structure_of(
        form.tools,
        functions,
        strict,
        model.template_source,
        model.control_id,
        calls="required" if must else "free" if content is None else "either",
        content=content,
        several=completion.parallel_tool_calls and choice.mode != "named",
    )


def structure_for(completion: "Completion", answers: Answers | None) -> tuple[Structure | None, str]:
    """The form that the engine has to keep to, and the field that asks for it."""
    form, field = completion.structure, completion.structure_field
    if answers is None:
        return form, field
    if answers.grammar is not None:
        form, field = answers.grammar, "tools"
    thinking = answers.thinking(completion.thinking_budget)
    if form is None:
        form, field = Structure(kind=TEXT), completion.thinking_field
        if thinking is None or completion.thinking_budget is None:
            return None, ""
    return msgspec.structs.replace(form, thinking=thinking), field


def message(choice: "Choice") -> dict:
    """The assistant message of a whole answer."""
    out: dict = {"role": "assistant", "content": choice.text or (None if choice.calls else ""), "refusal": None}
    if choice.calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    if choice.reasoning:
        out["reasoning_content"] = out["reasoning"] = choice.reasoning
    if choice.is_grounded:
        out["citations"] = choice.citations
    return out
