"""An interpreter of the Jinja that common chat templates are written in, for the start path.

With jinja2 the first token of a small model comes 17 to 21 ms later (medians of 40 and 50 pairs of starts;
benchmarks/LOG.md, 2026-11-22). compile_fast() returns None for whatever it does not know (macros, blocks, rarer
statements, filters and tests, names that look like an attack), and jinja2 does it (template_jinja.py). What it does
know it does as jinja2 would: tests compare the two. Grammar and white space rules: jinja2's documentation and its
lexer, with trim_blocks and lstrip_blocks.

A template is written as Python, whose parser gives a syntax tree; none of that is ever executed. The nodes that are
known become functions of the variables: an expression gives a value, a statement the parts of the text."""

import _ast as ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from typing import Any

from zse.tokenizer.template_limits import HIDDEN_ATTRIBUTES, MAX_INTEGER, METHOD_NAMES, rendered
from zse.tokenizer.template_values import (
    APPLIED,
    BUDGET,
    CHEAP,
    FUNCTIONS,
    KEYWORDS,
    LOOP,
    OPERATORS,
    Namespace,
    Undefined,
    attribute_of,
    hashed,
    item_of,
    sequence,
)

Token = tuple[str, int]  # text, of strings as Python writes them; brackets around it
Expression = Callable[[dict], Any]
Statement = Callable[[dict], Iterable[str]]

# Words with "__" are left to jinja2, so no template has these: `x | trim` is written as x.__f_trim(), `x is none` as
# x.__is_none(), `x is not none` as x.__not_none(), an `else` that is not there as a name that is undefined, __else.
_PYTHON = {"true": "True", "false": "False", "none": "None", "~": "@"}
_OTHER_NAMES = frozenset("loop self super caller varargs kwargs cycler joiner lipsum dict".split()) | set(FUNCTIONS)

_OPEN = re.compile(r"\{([%{#])(-|(?<!\{)\+)?")
_CLOSE = {"%": re.compile(r"\s*([-+]?)%\}"), "{": re.compile(r"\s*(-?)\}\}"), "#": re.compile(r".*?([-+]?)#\}", re.S)}
_TOKEN = re.compile(
    r"""\s*(\d+(?![\d.]) | [A-Za-z_][A-Za-z0-9_]* | '(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*"
    | // | \*\* | == | != | <= | >= | [-+*/%~<>=()\[\]{}.,:|])""",
    re.X | re.S,
)


class Unknown(Exception):
    """Something that is left to jinja2."""


def compile_fast(source: str) -> "FastTemplate | None":
    """The template, or None when it needs jinja2: it uses something unknown, or is not valid."""
    try:
        return FastTemplate(source)
    except (Unknown, SyntaxError, ValueError, LookupError, AttributeError, RecursionError, MemoryError):
        return None


# --- from Jinja to Python


def _lex(source: str) -> Iterator[tuple[str, Any]]:
    """("data", text), ("{", tokens), ("%", tokens) and, for a comment, ("#", [])."""
    source = re.sub(r"\r\n|\r", "\n", source).removesuffix("\n")
    at, line_starts = 0, True
    while found := _OPEN.search(source, at):
        text, (kind, sign) = source[at : found.start()], found.groups()
        start = text.rfind("\n") + 1
        if sign == "-":
            text = text.rstrip()
        elif sign != "+" and kind != "{" and (start or line_starts) and not text[start:].strip():
            text = text[:start]  # lstrip_blocks: white space between the line's start and the block goes
        yield "data", text
        at, closing, tokens = _lex_code(source, found.end(), kind)
        yield kind, tokens
        if closing == "-":
            at = len(source) - len(source[at:].lstrip())
        elif closing != "+" and kind != "{" and source[at : at + 1] == "\n":
            at += 1  # trim_blocks
        line_starts = source[at - 1] == "\n"
    yield "data", source[at:]


def _lex_code(source: str, at: int, kind: str) -> tuple[int, str, list[Token]]:
    """Where what begins at `at` ends, its closing sign, its tokens."""
    tokens: list[Token] = []
    depth = 0
    while depth or not (end := _CLOSE[kind].match(source, at)):
        found = _TOKEN.match(source, at)
        if not found or depth < 0:
            raise Unknown
        text, at = found[1], found.end()
        if text[0] in "'\"":
            text = repr(text[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape"))
        if "__" in text:
            raise Unknown  # a name such as __class__, or a part of one: for jinja2's check
        depth -= text in (")", "]", "}")
        tokens.append((text, depth))
        depth += text in ("(", "[", "{")
    return end.end(), end[1], tokens


def _python(source: str) -> str:
    """The template in the syntax of Python."""
    lines = ["pass"]
    blocks: list[str] = []  # the words of the statements that are open
    for kind, content in _lex(source):
        indent = " " * len(blocks)
        if kind == "data":
            lines.append(indent + repr(content))
        elif kind == "{":
            lines.append(f"{indent}({_expression(content)})")
        elif kind == "%":
            (word, _), *tokens = content
            match word:
                case "if" | "elif":
                    head = f"{word} {_expression(tokens)}:"
                case "for" if ("if", 0) not in tokens:
                    names, items = _split(tokens, "in")
                    head = f"for {_operands(names)} in ({_expression(items)}):"
                case "else" if not tokens:
                    head = "else:"
                case "endif" | "endfor" if not tokens and blocks.pop() == word[3:]:
                    continue
                case "set":
                    target, value = _split(tokens, "=")
                    lines.append(f"{indent}{_operands(target)} = ({_expression(value)})")
                    continue
                case _:
                    raise Unknown
            blocks += [word] if word in ("if", "for") else []
            lines += [" " * (len(blocks) - 1) + head, " " * len(blocks) + "pass"]
    if blocks:
        raise Unknown
    return "\n".join(lines)


def _split(tokens: list[Token], word: str) -> tuple[list[Token], list[Token]]:
    """What stands before and behind a word that is outside all brackets."""
    at = tokens.index((word, 0))
    return tokens[:at], tokens[at + 1 :]


def _expression(tokens: list[Token]) -> str:
    if not tokens:
        raise Unknown
    has_no_else = tokens.count(("if", 0)) - tokens.count(("else", 0)) == 1
    return _operands(tokens) + " else __else" * has_no_else


def _operands(tokens: list[Token]) -> str:
    out, at = [], 0
    while at < len(tokens):
        (text, depth), at = tokens[at], at + 1
        if text not in ("|", "is"):
            out.append(_PYTHON.get(text, text))
            continue
        mark, arguments = "f" if text == "|" else text, []
        if text == "is" and tokens[at] == ("not", depth):
            mark, at = "not", at + 1
        (name, _), at = tokens[at], at + 1
        if tokens[at : at + 1] == [("(", depth)]:
            end = tokens.index((")", depth), at)
            arguments, at = tokens[at + 1 : end], end + 1
        if at < len(tokens) and tokens[at][0] in (".", "(", "["):
            raise Unknown
        out.append(f".__{mark}_{name}({_operands(arguments)})")
    return " ".join(out)


# --- from Python to functions


class FastTemplate:
    """A template as a tree of functions. literals: every constant text in it. Raises Unknown for a node that is not
    known."""

    def __init__(self, source: str):
        self.literals: list[str] = []
        tree: Any = compile(_python(source), "template", "exec", ast.PyCF_ONLY_AST)
        self._body = self._statements(tree.body)

    def render(self, variables: dict) -> str:
        """The text. RequestError (400) when the template refuses, fails, or takes too much."""
        return rendered(self._body({**FUNCTIONS, **variables}), BUDGET, variables)

    def _statements(self, nodes: list) -> Statement:
        steps = [self._statement(node) for node in nodes if not isinstance(node, ast.Pass)]

        def run(scope):
            for step in steps:
                yield from step(scope)

        return run

    def _statement(self, node) -> Statement:
        match node:
            case ast.Expr(value):
                shown = self._expression(value)
                return lambda scope: (BUDGET.shown(shown(scope)),)
            case ast.Assign([ast.Name(name)], value) if name != "loop":
                return self._assign(None, name, self._expression(value))
            case ast.Assign([ast.Attribute(ast.Name(space), name)], value) if not name.startswith("_"):
                return self._assign(space, name, self._expression(value))
            case ast.If(test, body, orelse):
                condition, then, other = self._expression(test), self._statements(body), self._statements(orelse)

                def choose(scope):
                    BUDGET.spend()
                    return (then if condition(scope) else other)(scope)

                return choose
            case ast.For(target, items, body, orelse):
                names = [name.id for name in getattr(target, "elts", [target])]
                if "loop" in names or isinstance(target, ast.Tuple) and len(names) == 1:
                    raise Unknown
                return self._for(names, self._expression(items), self._statements(body), self._statements(orelse))
        raise Unknown

    def _assign(self, space: str | None, name: str, assigned: Expression) -> Statement:
        def run(scope):
            target = scope if space is None else scope.get(space)
            if target is not scope and type(target) is not Namespace:
                raise ValueError("cannot assign attribute on non-namespace object")
            target[name] = assigned(scope)
            return ()

        return run

    def _for(self, names: list[str], items: Expression, body: Statement, otherwise: Statement) -> Statement:
        def run(scope):
            values = sequence(items(scope))
            for index, value in enumerate(values):
                BUDGET.spend()
                parts = [value] if len(names) == 1 else list(value)
                if len(parts) != len(names):
                    raise ValueError(f"a loop over {len(names)} names meets {len(parts)} values")
                yield from body({**scope, **dict(zip(names, parts, strict=True)), "loop": (values, index)})
            if not values:
                yield from otherwise(dict(scope))

        return run

    def _expression(self, node) -> Expression:
        kind: type
        build: Callable[[Any], Expression] = self._expression
        match node:
            case ast.Constant(str(text)):
                self.literals.append(text)
                return lambda scope: text
            case ast.Constant(bool() | int() | None as value) if value is None or value <= MAX_INTEGER:
                return lambda scope: value
            case ast.Name(name) if name not in _OTHER_NAMES:
                return lambda scope: scope[name] if name in scope else Undefined(name)
            case ast.List(items) | ast.Tuple(items):
                kind, parts = list if isinstance(node, ast.List) else tuple, [build(item) for item in items]
                return lambda scope: BUDGET.made(kind([part(scope) for part in parts]))
            case ast.Dict(keys, values):
                pairs = [(build(key), build(value)) for key, value in zip(keys, values, strict=True)]
                return lambda scope: BUDGET.made({hashed(key(scope)): value(scope) for key, value in pairs})
            case ast.IfExp(test, value, other):
                first, second, third = build(test), build(value), build(other)
                return lambda scope: second(scope) if first(scope) else third(scope)
            case ast.BoolOp(ast.And(), values):
                return reduce(lambda left, right: lambda scope: left(scope) and right(scope), map(build, values))
            case ast.BoolOp(ast.Or(), values):
                return reduce(lambda left, right: lambda scope: left(scope) or right(scope), map(build, values))
            case ast.UnaryOp(ast.Not() as op, value) | ast.UnaryOp(ast.USub() as op, ast.Constant() as value):
                compute, first = OPERATORS[type(op)], build(value)  # -x|abs is (-x)|abs in Jinja, so a number only
                return lambda scope: compute(first(scope))
            case ast.BinOp(ast.BinOp(_, ast.MatMult()), ast.Mult() | ast.Mod()):
                raise Unknown  # a ~ b * c is a ~ (b * c) in Jinja
            case ast.BinOp(left, op, right) | ast.Compare(left, [op], [right]):
                first, compute, second = build(left), OPERATORS[type(op)], build(right)
                return lambda scope: compute(first(scope), second(scope))
            case ast.Attribute(ast.Name("loop"), name) if name in LOOP:
                compute = LOOP[name]
                return lambda scope: compute(*(scope.get("loop") or Undefined("loop").fail()))
            case ast.Attribute(value, name) if not name.startswith("_") and name not in HIDDEN_ATTRIBUTES:
                first = build(value)
                return lambda scope: attribute_of(first(scope), name)
            case ast.Subscript(value, key):
                first, second = build(value), build(key)
                return lambda scope: item_of(first(scope), second(scope))
            case ast.Slice(lower, upper, step):
                bounds = [build(bound) if bound else lambda scope: None for bound in (lower, upper, step)]
                return lambda scope: slice(*[bound(scope) for bound in bounds])
            case ast.Call(function, args, keywords) if all(keyword.arg for keyword in keywords):
                return self._call(function, args, {str(keyword.arg): build(keyword.value) for keyword in keywords})
        raise Unknown

    def _call(self, function, args: list, kwargs: dict[str, Expression]) -> Expression:
        """Of a filter or a test, a method, or a function."""
        match function:
            case ast.Attribute(value, name) if name in APPLIED and KEYWORDS.issuperset(kwargs):
                args, apply = [value, *args], APPLIED[name]
                called: Expression = lambda scope: apply  # noqa: E731
            case ast.Attribute(_, name) if name in METHOD_NAMES:
                called = self._expression(function)
            case ast.Name(name) if name in FUNCTIONS:
                called = lambda scope: scope[name]  # noqa: E731
            case _:
                raise Unknown
        given = [self._expression(arg) for arg in args]
        if isinstance(function, ast.Attribute) and APPLIED.get(function.attr) in CHEAP:
            return lambda scope: apply(*[a(scope) for a in given], **{k: v(scope) for k, v in kwargs.items()})
        return lambda scope: BUDGET.call(
            called(scope), [a(scope) for a in given], {k: v(scope) for k, v in kwargs.items()}
        )
