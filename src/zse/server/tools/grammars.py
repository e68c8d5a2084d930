"""Grammars of tool calls: what an answer may be when a call has to come, or when functions are strict.

One grammar in llguidance's Lark for each format of parsers.py. Marks that are control tokens of the vocabulary are
named by id, since their text can come from users' words too. Arguments follow the function's JSON schema."""

import json
from collections.abc import Callable

from zse.server.tools import gemma4, harmony, parsers, reasoning, recipients
from zse.server.tools.grammar_parts import GrammarParts, is_text, listed, quoted, regex
from zse.structured.options import LARK, Structure, checked

# Calls written as XML: the marks around a block; what begins a call and a parameter; what ends a value and a call.
_XML = {
    "qwen3_coder": (
        "<tool_call>",
        "</tool_call>",
        "\n<function={}>\n",
        "<parameter={}>\n",
        "\n</parameter>\n",
        "</function>\n",
    ),
    "seed_oss": (
        "<seed:tool_call>",
        "</seed:tool_call>",
        "\n<function={}>\n",
        "<parameter={}>",
        "</parameter>\n",
        "</function>\n",
    ),
    "glm4": ("<tool_call>", "</tool_call>", "{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", ""),
    "minimax_m2": (
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        '\n<invoke name="{}">\n',
        '<parameter name="{}">',
        "</parameter>\n",
        "</invoke>\n",
    ),
}
# Calls as a list of JSON: the marks around it, the second "" where there is none.
_LISTS = {
    "granite": ("<|tool_call|>", ""),
    "nemotron": ("<TOOLCALL>", "</TOOLCALL>"),
    "tool_calls": ("<tool_calls>", "</tool_calls>"),
    "command_r": ("<|START_ACTION|>", "<|END_ACTION|>"),
}
# Formats whose grammar is that of a whole answer, behind its thought if that is not in it.
WHOLE_ANSWERS = ("harmony", "functionary_v3", "kimi_k3", "solar_open")
# What Kimi K3 calls the types of JSON schemas.
_K3_TYPES = {kind: kind for kind in ("boolean", "number", "null", "object", "array")} | {"integer": "number"}


class Grammar(GrammarParts):
    """The grammars of all formats: the method that a format names gives (mark that begins a call or None, the call behind it,
    what stands between calls)."""

    def source(self, form: str, calls: str, several: bool, content: Structure | None = None) -> str:
        """The grammar's text. form: of FORMATS. calls: "required": the answer is calls; "free": text, and where it
        calls a function, the call is right; "either": calls, or the JSON that `content` describes. several: more than
        one call may come."""
        if form in WHOLE_ANSWERS:
            return self._whole(getattr(self, f"_{form}")(calls, several, content))
        if form in _XML:
            mark, call, between = self._xml(*_XML[form])
        elif form in _LISTS:
            mark, call, between = self._marked_list(form, several)
        else:
            mark, call, between = getattr(self, f"_{form}")(several)
        block = call
        if mark is not None:
            call = self._rule(call)
            block = f"{self._mark(mark)} {call}"
        start = f"{block} ({between} {block})*" if several and between is not None else block
        lead = "LEAD: /[ \\n]{0,2}/\n"
        if calls == "required":
            head = f"%llguidance {{}}\nstart: LEAD answer\nanswer: {start}\n{lead}"
        elif content is not None:
            other = self._content(content)
            head = f"%llguidance {{}}\nstart: LEAD (answer | {other})\nanswer: {start}\n{lead}"
        elif mark is None:  # a bare bracket begins a call, or the answer is text
            head = (
                f"%llguidance {{}}\nstart: LEAD (answer | TEXT)?\nanswer: {start}\n{lead}"
                f"TEXT: /[^\\x7b\\x5b \\n](.|\\n)*/\n"
            )
        else:
            # In free text the mark is a part of what comes before: the rule of the call goes on behind it.
            again = "*" if several else "?"
            head = f"%llguidance {{}}\nstart: called{again} TEXT\ncalled: {self._lazy(mark)} {call}\nTEXT: /(.|\\n)*/\n"
        return head + "".join(rule + "\n" for rule in self._rules)

    def _whole(self, start: str) -> str:
        """The grammar of an answer that is this from its first character on."""
        return "\n".join(["%llguidance {}", f"start: {start}", "TEXT: /(.|\\n)*/", *self._rules, ""])

    def _harmony(self, calls: str, several: bool, content: Structure | None) -> str:
        """gpt-oss: a whole answer, its thought included."""
        start, channel, message, end, call, _, constrain = (self._mark(mark) for mark in harmony.MARKS)
        bodies = [
            self._rule(
                f'{quoted(f"commentary to=functions.{name} ")} {constrain} "json" {message} {self._arguments(name)}'
            )
            for name in self._functions
        ]
        one = self._rule(f"{channel} {self._either(bodies)} {call}")
        again = f' ({start} "assistant" {one})*' if several else ""
        answer = f"{one}{again}"
        if calls != "required":
            answer += f' | {channel} "final" {message} {"TEXT" if content is None else self._content(content)}'
        thought = f'{channel} "analysis" {message} {self._lazy(harmony.END)} {start} "assistant"'
        return f"({thought})? ({answer})"

    def _functionary_v3(self, calls: str, several: bool, content: Structure | None) -> str:
        """Functionary 3.2: a whole answer, behind the mark that ends the prompt."""
        one = self._either(
            [self._rule(f"{quoted(name + chr(10))} {self._arguments(name)}") for name in self._functions]
        )
        mark = quoted(recipients.RECIPIENT)
        answer = several_calls = f"{one} ({mark} {one})*" if several else one
        if calls != "required" and content is not None:
            answer += f" | {quoted(recipients.WORDS)} {self._content(content)}"
        elif calls != "required":
            answer += f" | {quoted(recipients.WORDS)} (before {several_calls} | TEXT)"
            self._rules.append(f"before[lazy]: /(.|\\n)*{regex(recipients.RECIPIENT)}/")
        return answer

    def _kimi_k3(self, calls: str, several: bool, content: Structure | None) -> str:
        words, words_end = reasoning.k3_mark("response"), reasoning.k3_mark("response", is_end=True)
        opening, closing = reasoning.k3_mark("tools"), reasoning.k3_mark("tools", is_end=True)
        begin, _, separator = map(self._mark, reasoning.KIMI_K3)
        bodies = []
        for name in self._functions:
            call = quoted(f'call tool="{name}" index="')
            parts = self._in_turn(name, self._k3_argument)
            bodies.append(self._rule(" ".join([begin, call, "K3_INDEX", separator, *parts])))
        end = self._mark(reasoning.k3_mark("call", is_end=True))
        call = self._rule(f"{self._either(bodies)} {end}")
        self._rules.append('K3_INDEX: /[1-9][0-9]?"/')
        block = self._rule(f"{self._mark(opening)} {call}{f' ({call})*' if several else ''} {self._mark(closing)}")
        if calls == "required":
            answer = f"({self._mark(words)} {self._mark(words_end)})? {block}"
        elif content is not None:
            answer = f"{self._mark(words)} {self._content(content)} {self._mark(words_end)} | {block}"
        else:
            answer = f"{self._mark(words)} {self._lazy(words_end)} ({block})? | {block}"
        message = self._mark(reasoning.k3_mark("message", is_end=True))
        return f"({answer}) ({message})?"

    def _k3_argument(self, name: str, key: str, schema: object) -> str:
        kind = schema.get("type") if isinstance(schema, dict) else "string"
        kinds = ["string"] if is_text(schema) else [_K3_TYPES[kind]] if kind in _K3_TYPES else list(_K3_TYPES.values())
        types = " | ".join(map(quoted, dict.fromkeys(kinds)))
        opening, _, separator = map(self._mark, reasoning.KIMI_K3)
        head = quoted(f'argument key="{key}" type="')
        value = self._value_before(name, schema, reasoning.k3_mark("argument", is_end=True))
        return f'{opening} {head} ({types}) "\\"" {separator} {value}'

    def _solar_open(self, calls: str, several: bool, content: Structure | None) -> str:
        opening, first, middle, behind, last, _ = map(self._mark, reasoning.SOLAR)
        bodies = [
            self._rule(f"{first} SOLAR_ID {middle} {quoted(name)} {behind} {self._arguments(name)} {last}")
            for name in self._functions
        ]
        self._rules.append("SOLAR_ID: /[a-z0-9]{1,12}/")
        call = self._either(bodies)
        block = self._rule(f"{opening} {call}{f' ({call})*' if several else ''}")
        header, words = f'{self._mark("<|begin|>")} "assistant"', self._mark("<|content|>")
        answer = block
        if calls != "required" and content is not None:
            answer += f" | {words} {self._content(content)}"
        elif calls != "required":
            answer += f" | {words} ({self._lazy('<|end|>')} {header} {block} | TEXT)"
        return f"({header})? ({answer})"

    def _hermes(self, several: bool):
        return "<tool_call>", f'"\\n" {self._objects("arguments")} "\\n" {self._mark("</tool_call>")}', '"\\n"'

    def _xml(self, opening: str, closing: str, head: str, parameter: str, value_end: str, call_end: str):
        def part(name: str, key: str, of: object) -> str:
            return f"{quoted(parameter.format(key))} {self._xml_value(name, of, value_end)}"

        bodies = []
        ends = [*([quoted(call_end)] if call_end else []), self._mark(closing)]
        for name in self._functions:
            bodies.append(self._rule(" ".join([quoted(head.format(name)), *self._in_turn(name, part), *ends])))
        return opening, self._either(bodies), '"\\n"'

    def _llama3_json(self, several: bool):
        return None, self._objects("parameters"), '"; "'

    def _mistral(self, several: bool):
        if "[ARGS]" in self._template:
            arguments = self._mark("[ARGS]")
            bodies = [self._rule(f"{quoted(name)} {arguments} {self._arguments(name)}") for name in self._functions]
            return "[TOOL_CALLS]", self._either(bodies), ""
        return "[TOOL_CALLS]", listed(self._objects("arguments"), several), None

    def _marked_list(self, form: str, several: bool):
        opening, closing = _LISTS[form]
        objects = self._objects("arguments")
        if form == "command_r":
            objects = self._objects("parameters", r'"{\"tool_call_id\": \"" /[0-9]{1,2}/ "\", "', "tool_name")
        calls = listed(objects, several)
        return opening, f"{calls} {self._mark(closing)}" if closing else calls, None

    def _dsml(self, several: bool):
        word = parsers.DSML_BLOCKS["function_calls" not in self._template]

        def part(name: str, key: str, of: object) -> str:
            mark = self._mark(f'<{parsers.DSML}parameter name="{key}" string="{str(is_text(of)).lower()}">')
            return f"{mark} {self._value_before(name, of, f'</{parsers.DSML}parameter>{chr(10)}')}"

        bodies = []
        for name in self._functions:
            begins = self._mark(f'<{parsers.DSML}invoke name="{name}">\n')
            ends = self._mark(f"</{parsers.DSML}invoke>\n")
            bodies.append(self._rule(" ".join([begins, *self._in_turn(name, part), ends])))
        call = self._either(bodies)
        closing = self._mark(f"</{parsers.DSML}{word}>")
        return f"<{parsers.DSML}{word}>", f'"\\n" {call} {f"({call})*" if several else ""} {closing}', None

    def _gigachat(self, several: bool):
        call, (opening, message, role) = self._objects("arguments"), parsers.GIGACHAT
        if opening in self._template:
            return opening, call, None
        return message, f'"\\n\\nfunction call" {self._mark(role)} "\\n" {call}', None

    def _apertus(self, several: bool):
        bodies = [
            self._rule(f"{quoted('{' + json.dumps(name) + ': ')} {self._arguments(name)} {quoted('}')}")
            for name in self._functions
        ]
        opening, closing = parsers.APERTUS
        return opening, f"{listed(self._either(bodies), several)} {self._mark(closing)}", None

    def _firefunction(self, several: bool):
        return "functools", listed(self._objects("arguments"), several), None

    def _functionary(self, several: bool):
        bodies = [self._rule(f"{quoted(name + '>')} {self._arguments(name)}") for name in self._functions]
        return "<function=", f'{self._either(bodies)} "</function>"', ""

    def _kimi_k2(self, several: bool):
        _, first, middle, last, end = map(self._mark, parsers.KIMI)
        bodies = [
            self._rule(f"{first} {quoted(f'functions.{name}:')} /[0-9]{{1,2}}/ {middle} {self._arguments(name)} {last}")
            for name in self._functions
        ]
        call = self._either(bodies)
        return parsers.KIMI[0], f"{call} ({call})* {end}" if several else f"{call} {end}", None

    def _lfm2(self, several: bool):
        calls = listed(self._either([self._python(name) for name in self._functions]), several)
        return "<|tool_call_start|>", f"{calls} {self._mark('<|tool_call_end|>')}", None

    def _pythonic(self, several: bool):
        calls = listed(self._either([self._python(name) for name in self._functions]), several)
        if "<|python_start|>" in self._template:
            return "<|python_start|>", f"{calls} {self._mark('<|python_end|>')}", None
        return None, self._rule(calls), None

    def _gemma(self, several: bool):
        if "```tool_code" not in self._template:
            return None, self._objects("parameters"), '"\\n"'
        call = self._either([self._python(name) for name in self._functions])
        return "```tool_code\n", f'{call} "\\n```"', '"\\n"'

    def _deepseek(self, several: bool):
        end = self._mark(parsers.CALLS_END)
        first, last, separator = map(self._mark, (parsers.CALL_BEGIN, parsers.CALL_END, parsers.SEPARATOR))
        bodies = []
        for name in self._functions:
            head, arguments, tail = f"{quoted(name)} {separator}", self._arguments(name), ""
            if "```json" in self._template:
                head, tail = f'"function" {separator} {quoted(name + chr(10) + "```json" + chr(10))}', '"\\n```"'
            bodies.append(self._rule(f"{first} {head} {arguments} {tail} {last}"))
        call = self._either(bodies)
        return parsers.CALLS_BEGIN, f'{call} ("\\n"? {call})* {end}' if several else f"{call} {end}", None

    def _gemma4(self, several: bool):
        bodies = []
        for name in self._functions:
            members = self._members(name, lambda key: key + ":", ",", self._gemma4_value)
            bodies.append(self._rule(f"{quoted(f'call:{name}' + '{')} {members} {quoted('}')}"))
        return gemma4.OPENING, f"{self._either(bodies)} {self._mark(gemma4.CLOSING)}", ""

    def _gemma4_value(self, name: str, schema: object) -> str:
        """A text between its marks; all else as JSON, which the parser takes as well."""
        if not is_text(schema):
            return self._xml_value(name, schema, "")
        return f"{self._mark(gemma4.QUOTE)} {self._text_before(name, schema, gemma4.QUOTE)}"

    def _minicpm(self, several: bool):
        opening, closing, parameter, end = parsers.MINICPM

        def part(name: str, key: str, of: object) -> str:
            is_said = is_text(of)
            value = (
                self._text_before(name, of, end) if is_said else f"{self._xml_value(name, of, '')} {self._mark(end)}"
            )
            begins = quoted(f' name="{key}">')
            return f"{self._mark(parameter)} {begins} {value}"

        bodies = []
        for name in self._functions:
            parts = [quoted(f' name="{name}">'), *self._in_turn(name, part), self._mark(closing)]
            bodies.append(self._rule(" ".join(parts)))
        return opening, self._either(bodies), '"\\n"?'


def structure_of(
    form: str,
    functions: dict[str, dict],
    strict: frozenset[str],
    template: str,
    token_id: Callable[[str], int | None],
    *,
    calls: str,
    several: bool,
    content: Structure | None = None,
) -> Structure:
    """The Structure that enforces tool calls; see Grammar.source(). Raises APIError when there is no such grammar."""
    source = Grammar(functions, strict, template, token_id).source(form, calls, several, content)
    return checked(Structure(kind=LARK, source=source), "tools")
