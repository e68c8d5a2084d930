"""Rules that grammars of tool calls are made of: marks, values by their schemas, lists of functions."""

import json
from collections.abc import Callable

from zse.server.errors import APIError, unsupported
from zse.server.tools import parsers, reasoning
from zse.server.tools.patterns import ANYTHING, FORMATS, whole
from zse.structured.negation import SILENT
from zse.structured.options import WHITESPACE, Structure
from zse.structured.schema import expressed, rewritten

_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Python reads \/ and \u in strings otherwise than JSON does.
_PYTHON_ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}


class GrammarParts:
    """The rules of one grammar. functions: name → schema of parameters. strict: names whose schema has to be followed to the letter (else
    keywords that are not implemented are passed over). template: of the model, which shows variants. token_id: text →
    id of the control token with this text, or None."""

    def __init__(
        self, functions: dict[str, dict], strict: frozenset[str], template: str, token_id: Callable[[str], int | None]
    ):
        self._functions, self._strict, self._template, self._token_id = functions, strict, template, token_id
        self._rules: list[str] = []
        self._num_rules = 0

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
        """A mark, or a text with control tokens in it that marks of its format are made of."""
        id = self._token_id(text)
        if id is not None:
            return f"<[{id}]>"
        found = self._control(text)
        if found is None:
            return quoted(text)
        before, control, behind = found
        pieces = [quoted(before) if before else "", self._mark(control), self._mark(behind) if behind else ""]
        return " ".join(filter(None, pieces))

    def _control(self, text: str) -> tuple[str, str, str] | None:
        """The first control token that is a part of a mark, with what stands before and behind it."""
        parts = [
            part for part in (parsers.DSML, *reasoning.KIMI_K3) if part in text and self._token_id(part) is not None
        ]
        return text.partition(min(parts, key=text.index)) if parts else None

    def _lazy(self, text: str) -> str:
        """Any text up to a mark, which ends it."""
        if self._token_id(text) is not None:
            return f"TEXT {self._mark(text)}"
        found = self._control(text)
        if found is None:
            self._rules.append(f"before[lazy]: /(.|\\n)*{regex(text)}/")
            return "before"
        before, control, behind = found
        if before:
            self._rules.append(f"BEFORE: /(.|\\n)*{regex(before)}/")
        return f"{'BEFORE' if before else 'TEXT'} {self._mark(control + behind)}"

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
                    f"{opening} {quoted(pair(name_key, name) + f', {json.dumps(key)}: ')} {self._arguments(name)} {quoted('}')}"
                )
                for name in self._functions
            ]
        )

    def _xml_value(self, name: str, schema: object, end: str) -> str:
        words = words_of(schema)
        if words:
            return f"({' | '.join(quoted(word) for word in words)}) {quoted(end) if end else ''}"
        if is_text(schema):
            self._num_rules += 1
            rule = f"t{self._num_rules}"
            counted, forms = self._text_count(schema), self._text_forms(name, schema)
            # One lexeme with its mark: the value ends where the mark comes first.
            if not forms:
                self._rules.append(f"{rule}[lazy]: /{counted[0] if counted else ANYTHING}{regex(end)}/")
                return rule
            # The mark is not in the value, so that a form which allows it does not make the lexeme longer.
            terminal, mark = rule.upper(), regex(end)
            forms += counted
            self._rules += [
                f"{rule}[lazy]: {terminal} {terminal}_END",
                f"{terminal}_END: /{mark}/",
                f"{terminal}_IN: /{ANYTHING}{mark}{ANYTHING}/",
                f"{terminal}: {' & '.join(f'/{form}/' for form in forms)} & ~{terminal}_IN",
            ]
            return rule
        value = self._json(name, self._part(name, schema))
        return f"{value} {quoted(end)}" if end else value

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

    def _value_before(self, name: str, schema: object, end: str) -> str:
        """A parameter's value and the mark that ends it, in which there may be a control token."""
        if not is_text(schema) or words_of(schema):
            return f"{self._xml_value(name, schema, '')} {self._mark(end)}"
        found = self._control(end)
        if found is None:
            return self._xml_value(name, schema, end)
        before, control, behind = found
        text = self._text_before(name, schema, control).partition(" ")[0]
        if before:  # the characters before the control token end the text: one lexeme with it
            self._rules.append(f"{text}_END: {text} {quoted(before)}")
            text += "_END"
        return f"{text} {self._mark(control + behind)}"

    def _text_before(self, name: str, schema: object, end: str) -> str:
        """A text and the mark that ends it, which may be a control token."""
        if self._token_id(end) is None:
            return self._xml_value(name, schema, end)
        words = words_of(schema)
        if words:
            return f"({' | '.join(map(quoted, words))}) {self._mark(end)}"
        forms = self._text_forms(name, schema) + self._text_count(schema)
        self._num_rules += 1
        self._rules.append(f"T{self._num_rules}: " + " & ".join(f"/{form}/" for form in forms or [ANYTHING]))
        return f"T{self._num_rules} {self._mark(end)}"

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
        return self._rule(f"{quoted(name + '(')} {members} {quoted(')')}")

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
            opening, following = f"{quoted(head(key))} {value} {rest}", f"{quoted(comma + head(key))} {value} {rest}"
            if key in required:
                first, rest = self._rule(opening), self._rule(following)
            else:
                first, rest = self._rule(f"{opening} | {first}"), self._rule(f"{following} | {rest}")
        return first

    def _in_turn(self, name: str, part: Callable[[str, str, object], str]) -> list[str]:
        """What part(name, key, schema) says of each property of a function, in the schema's order; what is not required may be
        left out."""
        schema = self._functions[name]
        required, properties = schema.get("required") or (), schema.get("properties") or {}
        parts = ((key, part(name, key, of)) for key, of in properties.items())
        return [text if key in required else f"({text})?" for key, text in parts]

    def _part(self, name: str, schema: object) -> object:
        """A property's schema, with the definitions that it may refer to."""
        whole = self._functions[name]
        shared = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
        return {**shared, **schema} if isinstance(schema, dict) else schema


def listed(call: str, several: bool) -> str:
    return f'"[" {call} (", " {call})* "]"' if several else f'"[" {call} "]"'


def _clean(schema):
    """Without what says nothing about validity, which may be most of a schema."""
    return rewritten(expressed(schema), lambda part: {key: part[key] for key in part if key not in SILENT})


def is_text(schema: object) -> bool:
    """Whether a value by this schema is written as it is, without quotes."""
    kinds = schema.get("type") if isinstance(schema, dict) else "string"
    return "string" in (kinds if isinstance(kinds, list) else [kinds]) or bool(words_of(schema))


def words_of(schema: object) -> list[str]:
    """The values of an enum or constant of strings."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else []) if isinstance(schema, dict) else []
    return values if isinstance(values, list) and all(isinstance(value, str) and value for value in values) else []


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def pair(key: str, value: str) -> str:
    return f"{json.dumps(key)}: {json.dumps(value)}"


def regex(text: str) -> str:
    """A text as a regular expression between slashes."""
    return "".join(
        "\\n" if letter == "\n" else letter if letter.isalnum() or ord(letter) > 127 else f"\\x{ord(letter):02x}"
        for letter in text
    )
