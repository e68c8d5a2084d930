"""Grammars of tool calls: what an answer may be when a call has to come, or when functions are strict.

One grammar in llguidance's Lark for each format of parsers.py. Marks that are control tokens of the vocabulary are
named by id, since their text can come from users' words too. Arguments follow the function's JSON schema."""

import json
from collections.abc import Callable

from zse.server.errors import APIError, unsupported
from zse.server.tools import gemma4, harmony, parsers, recipients
from zse.server.tools.patterns import ANYTHING, FORMATS, whole
from zse.structured.negation import SILENT
from zse.structured.options import LARK, WHITESPACE, Structure, checked
from zse.structured.schema import expressed, rewritten

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
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Python reads \/ and \u in strings otherwise than JSON does.
_PYTHON_ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}


class Grammar:
    """functions: name → schema of parameters. strict: names whose schema has to be followed to the letter (else
    keywords that are not implemented are passed over). template: of the model, which shows variants. token_id: text →
    id of the control token with this text, or None."""

    def __init__(
        self, functions: dict[str, dict], strict: frozenset[str], template: str, token_id: Callable[[str], int | None]
    ):
        self._functions, self._strict, self._template, self._token_id = functions, strict, template, token_id
        self._rules: list[str] = []
        self._num_rules = 0

    def source(self, form: str, calls: str, several: bool, content: Structure | None = None) -> str:
        """The grammar's text. form: of FORMATS. calls: "required": the answer is calls; "free": text, and where it
        calls a function, the call is right; "either": calls, or the JSON that `content` describes. several: more than
        one call may come."""
        if form in ("harmony", "functionary_v3"):
            return getattr(self, f"_{form}")(calls, several, content)
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

    def _harmony(self, calls: str, several: bool, content: Structure | None) -> str:
        """gpt-oss: a whole answer, its thought included."""
        start, channel, message, end, call, _, constrain = (self._mark(mark) for mark in harmony.MARKS)
        bodies = [
            self._rule(
                f'{_quoted(f"commentary to=functions.{name} ")} {constrain} "json" {message} {self._arguments(name)}'
            )
            for name in self._functions
        ]
        one = self._rule(f"{channel} {self._either(bodies)} {call}")
        again = f' ({start} "assistant" {one})*' if several else ""
        answer = f"{one}{again}"
        if calls != "required":
            answer += f' | {channel} "final" {message} {"TEXT" if content is None else self._content(content)}'
        thought = f'{channel} "analysis" {message} {self._lazy(harmony.END)} {start} "assistant"'
        head = f"%llguidance {{}}\nstart: ({thought})? ({answer})\nTEXT: /(.|\\n)*/\n"
        return head + "".join(rule + "\n" for rule in self._rules)

    def _functionary_v3(self, calls: str, several: bool, content: Structure | None) -> str:
        """Functionary 3.2: a whole answer, behind the mark that ends the prompt."""
        one = self._either(
            [self._rule(f"{_quoted(name + chr(10))} {self._arguments(name)}") for name in self._functions]
        )
        mark = _quoted(recipients.RECIPIENT)
        answer = several_calls = f"{one} ({mark} {one})*" if several else one
        if calls != "required" and content is not None:
            answer += f" | {_quoted(recipients.WORDS)} {self._content(content)}"
        elif calls != "required":
            answer += f" | {_quoted(recipients.WORDS)} (before {several_calls} | TEXT)"
            self._rules.append(f"before[lazy]: /(.|\\n)*{_regex(recipients.RECIPIENT)}/")
        head = f"%llguidance {{}}\nstart: {answer}\nTEXT: /(.|\\n)*/\n"
        return head + "".join(rule + "\n" for rule in self._rules)

    # -- parts

    def _content(self, content: Structure) -> str:
        """A rule of the JSON that an answer may be."""
        schema = json.loads(content.source or '{"type": "object"}')
        guidance = {"whitespace_pattern": WHITESPACE, "lenient": content.lenient}
        return self._rule("%json " + json.dumps({"x-guidance": guidance, **expressed(schema)}, ensure_ascii=False))

    def _rule(self, body: str) -> str:
        name = f"r{self._num_rules}"
        self._num_rules += 1
        self._rules.append(f"{name}: {body}")
        return name

    def _mark(self, text: str) -> str:
        """A mark, or a text with the control token that all of DeepSeek's marks have in them."""
        id = self._token_id(text)
        if id is not None:
            return f"<[{id}]>"
        if parsers.DSML in text and self._token_id(parsers.DSML) is not None:
            before, _, behind = text.partition(parsers.DSML)
            return f"{_quoted(before)} {self._mark(parsers.DSML)} {_quoted(behind)}"
        return _quoted(text)

    def _lazy(self, text: str) -> str:
        """Any text up to a mark, which ends it."""
        id = self._token_id(text)
        if id is not None:
            return f"TEXT <[{id}]>"
        if parsers.DSML in text and self._token_id(parsers.DSML) is not None:
            self._rules.append("BEFORE: /(.|\\n)*</")
            return f"BEFORE {self._mark(text).partition(' ')[2]}"
        self._rules.append(f"before[lazy]: /(.|\\n)*{_regex(text)}/")
        return "before"

    def _either(self, bodies: list[str]) -> str:
        return bodies[0] if len(bodies) == 1 else self._rule(" | ".join(bodies))

    def _json(self, name: str, schema: object, **options) -> str:
        """A rule of JSON by a schema of the function `name`."""
        clean = dict(_clean(schema)) if isinstance(schema, dict) else {}
        guidance = {**_SEPARATORS, **options}
        if name not in self._strict:
            guidance["lenient"] = True
        return self._rule("%json " + json.dumps({"x-guidance": guidance, **clean}, ensure_ascii=False))

    def _arguments(self, name: str) -> str:
        schema = self._functions[name]
        if schema.get("type") is None:
            schema = {"type": "object", **schema}
        return self._json(name, schema)

    def _objects(self, key: str, opening: str = '"{"', name_key: str = "name") -> str:
        """{"name": NAME, KEY: arguments} of any function. opening: what stands before the name, in the grammar's
        words."""
        return self._either(
            [
                self._rule(
                    f"{opening} {_quoted(_pair(name_key, name) + f', {json.dumps(key)}: ')} {self._arguments(name)} {_quoted('}')}"
                )
                for name in self._functions
            ]
        )

    # -- formats: (mark that begins a call or None, the call behind it, what stands between calls)

    def _hermes(self, several: bool):
        return "<tool_call>", f'"\\n" {self._objects("arguments")} "\\n" {self._mark("</tool_call>")}', '"\\n"'

    def _xml(self, opening: str, closing: str, head: str, parameter: str, value_end: str, call_end: str):
        bodies = []
        for name, schema in self._functions.items():
            parts = [_quoted(head.format(name))]
            required = schema.get("required") or ()
            for key, of in (schema.get("properties") or {}).items():
                part = f"{_quoted(parameter.format(key))} {self._xml_value(name, of, value_end)}"
                parts.append(part if key in required else f"({part})?")
            bodies.append(
                self._rule(" ".join([*parts, *([_quoted(call_end)] if call_end else []), self._mark(closing)]))
            )
        return opening, self._either(bodies), '"\\n"'

    def _xml_value(self, name: str, schema: object, end: str) -> str:
        words = _words(schema)
        if words:
            return f"({' | '.join(_quoted(word) for word in words)}) {_quoted(end) if end else ''}"
        if _is_text(schema):
            self._num_rules += 1
            rule = f"t{self._num_rules}"
            counted, forms = self._text_count(schema), self._text_forms(name, schema)
            # One lexeme with its mark: the value ends where the mark comes first.
            if not forms:
                self._rules.append(f"{rule}[lazy]: /{counted[0] if counted else ANYTHING}{_regex(end)}/")
                return rule
            # The mark is not in the value, so that a form which allows it does not make the lexeme longer.
            terminal, mark = rule.upper(), _regex(end)
            forms += counted
            self._rules += [
                f"{rule}[lazy]: {terminal} {terminal}_END",
                f"{terminal}_END: /{mark}/",
                f"{terminal}_IN: /{ANYTHING}{mark}{ANYTHING}/",
                f"{terminal}: {' & '.join(f'/{form}/' for form in forms)} & ~{terminal}_IN",
            ]
            return rule
        value = self._json(name, self._part(name, schema))
        return f"{value} {_quoted(end)}" if end else value

    def _text_count(self, schema: object) -> list[str]:
        """The regular expression of a text by its schema's lengths."""
        least, most = (schema.get(key) if isinstance(schema, dict) else None for key in ("minLength", "maxLength"))
        return [f"(.|\\n){{{least or 0},{'' if most is None else most}}}"] if least or most is not None else []

    def _text_forms(self, name: str, schema: object) -> list[str]:
        """Regular expressions of a text by its schema's `pattern` and `format`. Raises APIError for what a strict
        function asks for and this cannot do."""
        found = []
        for key, read in (("pattern", whole), ("format", FORMATS.get)):
            asked = schema.get(key) if isinstance(schema, dict) else None
            if not isinstance(asked, str) or not asked:
                continue
            form = read(asked)
            if form is not None:
                found.append(form)
            elif name in self._strict:
                reason = f"the {key} of a parameter of {name!r} is not implemented for texts in this model's calls"
                raise APIError("invalid_schema", f"'tools': {reason}.", "tools")
        return found

    def _llama3_json(self, several: bool):
        return None, self._objects("parameters"), '"; "'

    def _mistral(self, several: bool):
        if "[ARGS]" in self._template:
            arguments = self._mark("[ARGS]")
            bodies = [self._rule(f"{_quoted(name)} {arguments} {self._arguments(name)}") for name in self._functions]
            return "[TOOL_CALLS]", self._either(bodies), ""
        return "[TOOL_CALLS]", _list(self._objects("arguments"), several), None

    def _marked_list(self, form: str, several: bool):
        opening, closing = _LISTS[form]
        objects = self._objects("arguments")
        if form == "command_r":
            objects = self._objects("parameters", r'"{\"tool_call_id\": \"" /[0-9]{1,2}/ "\", "', "tool_name")
        calls = _list(objects, several)
        return opening, f"{calls} {self._mark(closing)}" if closing else calls, None

    def _dsml(self, several: bool):
        word = parsers.DSML_BLOCKS["function_calls" not in self._template]
        bodies = []
        for name, schema in self._functions.items():
            required = schema.get("required") or ()
            parts = [self._mark(f'<{parsers.DSML}invoke name="{name}">\n')]
            for key, of in (schema.get("properties") or {}).items():
                said = str(_is_text(of)).lower()
                part = self._mark(f'<{parsers.DSML}parameter name="{key}" string="{said}">')
                part += " " + self._dsml_value(name, of, f"</{parsers.DSML}parameter>\n")
                parts.append(part if key in required else f"({part})?")
            bodies.append(self._rule(" ".join([*parts, self._mark(f"</{parsers.DSML}invoke>\n")])))
        call = self._either(bodies)
        closing = self._mark(f"</{parsers.DSML}{word}>")
        return f"<{parsers.DSML}{word}>", f'"\\n" {call} {f"({call})*" if several else ""} {closing}', None

    def _dsml_value(self, name: str, schema: object, end: str) -> str:
        if not _is_text(schema) or _words(schema):
            return f"{self._xml_value(name, schema, '')} {self._mark(end)}"
        if self._token_id(parsers.DSML) is None:
            return self._xml_value(name, schema, end)
        # The characters before the control token end the text: one lexeme with it.
        text = self._text_before(name, schema, parsers.DSML).partition(" ")[0]
        self._rules.append(f"{text}_END: {text} {_quoted('</')}")
        return f"{text}_END {self._mark(end).partition(' ')[2]}"

    def _gigachat(self, several: bool):
        call, (opening, message, role) = self._objects("arguments"), parsers.GIGACHAT
        if opening in self._template:
            return opening, call, None
        return message, f'"\\n\\nfunction call" {self._mark(role)} "\\n" {call}', None

    def _functionary(self, several: bool):
        bodies = [self._rule(f"{_quoted(name + '>')} {self._arguments(name)}") for name in self._functions]
        return "<function=", f'{self._either(bodies)} "</function>"', ""

    def _kimi_k2(self, several: bool):
        _, first, middle, last, end = map(self._mark, parsers.KIMI)
        bodies = [
            self._rule(
                f"{first} {_quoted(f'functions.{name}:')} /[0-9]{{1,2}}/ {middle} {self._arguments(name)} {last}"
            )
            for name in self._functions
        ]
        call = self._either(bodies)
        return parsers.KIMI[0], f"{call} ({call})* {end}" if several else f"{call} {end}", None

    def _lfm2(self, several: bool):
        calls = _list(self._either([self._python(name) for name in self._functions]), several)
        return "<|tool_call_start|>", f"{calls} {self._mark('<|tool_call_end|>')}", None

    def _pythonic(self, several: bool):
        calls = _list(self._either([self._python(name) for name in self._functions]), several)
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
            head, arguments, tail = f"{_quoted(name)} {separator}", self._arguments(name), ""
            if "```json" in self._template:
                head, tail = f'"function" {separator} {_quoted(name + chr(10) + "```json" + chr(10))}', '"\\n```"'
            bodies.append(self._rule(f"{first} {head} {arguments} {tail} {last}"))
        call = self._either(bodies)
        return parsers.CALLS_BEGIN, f'{call} ("\\n"? {call})* {end}' if several else f"{call} {end}", None

    def _gemma4(self, several: bool):
        bodies = []
        for name in self._functions:
            members = self._members(name, lambda key: key + ":", ",", self._gemma4_value)
            bodies.append(self._rule(f"{_quoted(f'call:{name}' + '{')} {members} {_quoted('}')}"))
        return gemma4.OPENING, f"{self._either(bodies)} {self._mark(gemma4.CLOSING)}", ""

    def _gemma4_value(self, name: str, schema: object) -> str:
        """A text between its marks; all else as JSON, which the parser takes as well."""
        if not _is_text(schema):
            return self._xml_value(name, schema, "")
        return f"{self._mark(gemma4.QUOTE)} {self._text_before(name, schema, gemma4.QUOTE)}"

    def _text_before(self, name: str, schema: object, end: str) -> str:
        """A text and the mark that ends it, which may be a control token."""
        if self._token_id(end) is None:
            return self._xml_value(name, schema, end)
        words = _words(schema)
        if words:
            return f"({' | '.join(map(_quoted, words))}) {self._mark(end)}"
        forms = self._text_forms(name, schema) + self._text_count(schema)
        self._num_rules += 1
        self._rules.append(f"T{self._num_rules}: " + " & ".join(f"/{form}/" for form in forms or [ANYTHING]))
        return f"T{self._num_rules} {self._mark(end)}"

    def _minicpm(self, several: bool):
        opening, closing, parameter, end = parsers.MINICPM
        bodies = []
        for name, schema in self._functions.items():
            required, parts = schema.get("required") or (), [_quoted(f' name="{name}">')]
            for key, of in (schema.get("properties") or {}).items():
                value = f"{self._xml_value(name, of, '')} {self._mark(end)}"
                if _is_text(of):
                    value = self._text_before(name, of, end)
                key_mark = _quoted(f' name="{key}">')
                part = f"{self._mark(parameter)} {key_mark} {value}"
                parts.append(part if key in required else f"({part})?")
            bodies.append(self._rule(" ".join([*parts, self._mark(closing)])))
        return opening, self._either(bodies), '"\\n"?'

    # -- Python calls

    def _python(self, name: str) -> str:
        """NAME(key=value, …): properties in the schema's order, values as JSON, which the parser takes for Python's."""
        schema = self._functions[name]
        properties = schema.get("properties") or {}
        if not all(word.isidentifier() for word in (*properties, *name.split("."))):
            reason = f"the calls of this model are Python: {name!r} has a name that Python does not know"
            raise unsupported("tools", reason)
        members = self._members(
            name,
            lambda key: key + "=",
            ", ",
            lambda name, of: self._json(name, self._part(name, of), **_PYTHON_ESCAPES),
        )
        return self._rule(f"{_quoted(name + '(')} {members} {_quoted(')')}")

    def _members(
        self, name: str, head: Callable[[str], str], comma: str, value_of: Callable[[str, object], str]
    ) -> str:
        """The properties of a function's parameters in the schema's order. head: key → what stands before the value."""
        schema = self._functions[name]
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        # first: nothing stands before; rest: something does. From the last property to the first.
        first = rest = '""'
        for key, of in reversed(list(properties.items())):
            value = value_of(name, of)
            opening, following = f"{_quoted(head(key))} {value} {rest}", f"{_quoted(comma + head(key))} {value} {rest}"
            if key in required:
                first, rest = self._rule(opening), self._rule(following)
            else:
                first, rest = self._rule(f"{opening} | {first}"), self._rule(f"{following} | {rest}")
        return first

    def _part(self, name: str, schema: object) -> object:
        """A property's schema, with the definitions that it may refer to."""
        whole = self._functions[name]
        shared = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
        return {**shared, **schema} if isinstance(schema, dict) else schema


def _list(call: str, several: bool) -> str:
    return f'"[" {call} (", " {call})* "]"' if several else f'"[" {call} "]"'


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


def _clean(schema):
    """Without what says nothing about validity, which may be most of a schema."""
    return rewritten(expressed(schema), lambda part: {key: part[key] for key in part if key not in SILENT})


def _is_text(schema: object) -> bool:
    """Whether a value by this schema is written as it is, without quotes."""
    kinds = schema.get("type") if isinstance(schema, dict) else "string"
    return "string" in (kinds if isinstance(kinds, list) else [kinds]) or bool(_words(schema))


def _words(schema: object) -> list[str]:
    """The values of an enum or constant of strings."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else []) if isinstance(schema, dict) else []
    return values if isinstance(values, list) and all(isinstance(value, str) and value for value in values) else []


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _pair(key: str, value: str) -> str:
    return f"{json.dumps(key)}: {json.dumps(value)}"


def _regex(text: str) -> str:
    """A text as a regular expression between slashes."""
    return "".join(
        "\\n" if letter == "\n" else letter if letter.isalnum() or ord(letter) > 127 else f"\\x{ord(letter):02x}"
        for letter in text
    )
