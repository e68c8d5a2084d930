"""An interpreter of the Jinja that common chat templates are written in, for the start path.

With jinja2 the first token of a small model comes 17 to 21 ms later (medians of 40 and 50 pairs of starts; benchmarks/LOG.md,
2026-11-22). compile_fast() returns None for whatever it does not know (macros, blocks, rarer statements, filters and
tests, names that look like an attack), and jinja2 does it (template_jinja.py). What it does know it does as jinja2 would: tests
compare the two. Grammar and white space rules: jinja2's documentation and its lexer, with trim_blocks and lstrip_blocks.

A template is written as Python, whose parser gives a syntax tree; none of that is ever executed. The nodes that are known
become functions: an expression one of the variables, a statement one of the variables and the output.
"""

import _ast as ast
import re
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

from zse.errors import RequestError
from zse.tokenizer.template_limits import HIDDEN_ATTRIBUTES, MAX_INTEGER, cannot_render, too_much
from zse.tokenizer.template_values import (
    ARITHMETIC,
    BUDGET,
    CALLABLE,
    COMPARE,
    FILTERS,
    FUNCTIONS,
    KEYWORDS,
    TESTS,
    Failure,
    Loop,
    Namespace,
    Undefined,
    attribute_of,
    call,
    item_of,
    sequence,
)

Token = tuple[str, str, int]  # kind, text, brackets around it
Expression = Callable[[dict], Any]
Statement = Callable[[dict, "Output"], None]

# Names that begin like these are left to jinja2, so no template has them: `x | trim` is written as x.__f_trim(), `x is none` as
# x.__t_none(), `x is not none` as x.__n_none(), a value to print as an assignment to __f_, an `else` that is not there as __f_.
_FILTER, _TEST, _NO_TEST = "__f_", "__t_", "__n_"
_PYTHON = {"true": "True", "false": "False", "none": "None", "~": "@"}
_OTHER_NAMES = frozenset("loop self super caller varargs kwargs cycler joiner lipsum dict".split()) | set(FUNCTIONS)

_OPEN = re.compile(r"\{(?:(?P<kind>[%{#])(?P<sign>[-+]?))")
_TOKEN = re.compile(
    r"""\s*(?:(?P<int>\d+(?![\d.]))|(?P<name>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<close>[-+]?%\}|-?\}\})
    |(?P<op>//|\*\*|==|!=|<=|>=|[-+*/%~<>=()\[\]{}.,:|]))""",
    re.X | re.S,
)
_SINGLE = re.compile(r"\s*(?P<op>[-+%}])")
_COMMENT_END = re.compile(r"([-+]?)#\}")


class Unknown(Exception):
    """Something that is left to jinja2."""


class Output:
    """The text so far."""

    def __init__(self):
        self.parts, self.size = [], 0

    def add(self, value) -> None:
        text = value if type(value) is str else str(value)
        BUDGET.spend()
        self.size += len(text)
        BUDGET.check_size(self.size)
        self.parts.append(text)


class FastTemplate:
    """A template as a tree of Python functions. literals: every constant text in it."""

    def __init__(self, source: str):
        self.literals: list[str] = []
        tree: Any = compile(_python(source), "template", "exec", ast.PyCF_ONLY_AST)
        self._body = _Builder(self.literals).statements(tree.body)

    def render(self, variables: dict) -> str:
        """The text. RequestError (400) when the template refuses, fails, or takes too much."""
        BUDGET.start()
        out = Output()
        try:
            self._body({**FUNCTIONS, **variables}, out)
        except RecursionError:
            raise too_much("values nested too deeply") from None
        except RequestError:
            raise
        except (Failure, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise cannot_render(error) from None
        return "".join(out.parts)


def compile_fast(source: str) -> FastTemplate | None:
    """The template, or None when it needs jinja2: it uses something unknown, or is not valid."""
    try:
        return FastTemplate(source)
    except (Unknown, SyntaxError, ValueError, LookupError, AttributeError, RecursionError, MemoryError):
        return None


# --- from Jinja to Python


def _lex(source: str) -> Iterator[tuple[str, Any]]:
    """("data", text), ("{", tokens) and ("%", tokens); no comments."""
    source = re.sub(r"\r\n|\r", "\n", source).removesuffix("\n")
    at, line_starts = 0, True
    while found := _OPEN.search(source, at):
        text, kind, sign, at = source[at : found.start()], found["kind"], found["sign"], found.end()
        if kind == "{" and sign == "+":
            sign, at = "", at - 1
        start = text.rfind("\n") + 1
        if sign == "-":
            text = text.rstrip()
        elif sign != "+" and kind != "{" and (start or line_starts) and not text[start:].strip():
            text = text[:start]  # lstrip_blocks: white space between the line's start and the block goes
        yield "data", text
        if kind == "#":
            end = _COMMENT_END.search(source, at)
            if not end:
                raise Unknown
            at, closing = end.end(), end[1]
        else:
            at, closing, tokens = _lex_code(source, at, "%}" if kind == "%" else "}}")
            yield kind, tokens
        if closing == "-":
            at = len(source) - len(source[at:].lstrip())
        elif closing != "+" and kind != "{" and source[at : at + 1] == "\n":
            at += 1  # trim_blocks
        line_starts = source[at - 1] == "\n"
    yield "data", source[at:]


def _lex_code(source: str, at: int, close: str) -> tuple[int, str, list[Token]]:
    """Where the code that begins at `at` ends, its closing sign, its tokens."""
    tokens: list[Token] = []
    depth = 0
    while depth >= 0 and (found := _TOKEN.match(source, at)):
        kind = found.lastgroup or ""
        if kind == "close" and (depth or not found[kind].endswith(close)):
            # "}}" inside {{ {"a": {}}["a"] }}, or "-%" and the like in an expression: a single character is the token.
            found, kind = _SINGLE.match(source, at), "op"
            if not found:
                break
        text, at = found[kind], found.end()
        if kind == "close":
            return at, text[0] if text[0] in "-+" else "", tokens
        depth -= kind == "op" and text in ")]}"
        tokens.append((kind, text, depth))
        depth += kind == "op" and text in "([{"
    raise Unknown


def _python(source: str) -> str:
    """The template in the syntax of Python."""
    lines = ["pass"]
    blocks: list[str] = []  # the words of the statements that are open
    for kind, content in _lex(source):
        indent = " " * len(blocks)
        if kind == "data":
            lines.append(indent + repr(content))
            continue
        if kind == "{":
            lines.append(f"{indent}{_FILTER} = ({_expression(content)})")
            continue
        word, tokens = content[0][1], content[1:]
        if word in ("endif", "endfor"):
            if tokens or blocks.pop() != word[3:]:
                raise Unknown
        elif word in ("if", "for"):
            at = _outside(tokens, "in")[0] if word == "for" else 0
            if at and _outside(tokens, "if"):
                raise Unknown
            head = f"{_expression(tokens[:at])} in ({_expression(tokens[at + 1 :])})" if at else _expression(tokens)
            lines += [f"{indent}{word} {head}:", f"{indent} pass"]
            blocks.append(word)
        elif word in ("else", "elif"):
            head = f" {_expression(tokens)}" if word == "elif" else "".join(text for _, text, _ in tokens)
            lines += [f"{indent[1:]}{word}{head}:", f"{indent}pass"]
        elif word == "set":
            at = [text for _, text, _ in tokens[:4]].index("=")
            lines.append(f"{indent}{_expression(tokens[:at])} = ({_expression(tokens[at + 1 :])})")
        else:
            raise Unknown
    if blocks:
        raise Unknown
    return "\n".join(lines)


def _outside(tokens: list[Token], word: str) -> list[int]:
    """Where a word stands outside all brackets."""
    return [at for at, token in enumerate(tokens) if token == ("name", word, 0)]


def _expression(tokens: list[Token]) -> str:
    missing = len(_outside(tokens, "if")) - len(_outside(tokens, "else"))
    if not tokens:
        raise Unknown
    return _operands(tokens) + f" else {_FILTER}" * (missing == 1)


def _operands(tokens: list[Token]) -> str:
    out, at = [], 0
    while at < len(tokens):
        (kind, text, depth), at = tokens[at], at + 1
        if (kind, text) not in (("op", "|"), ("name", "is")):
            if kind == "name" and text.startswith("__"):
                raise Unknown
            out.append(repr(_string_value(text)) if kind == "string" else _PYTHON.get(text, text))
            continue
        mark = _FILTER if text == "|" else _TEST
        if mark == _TEST and tokens[at][1] == "not":
            mark, at = _NO_TEST, at + 1
        (kind, name, _), at, arguments = tokens[at], at + 1, []
        if kind != "name":
            raise Unknown
        if tokens[at : at + 1] == [("op", "(", depth)]:
            end = tokens.index(("op", ")", depth), at)
            arguments, at = tokens[at + 1 : end], end + 1
        out.append(f".{mark}{name}({_operands(arguments)})")
        if at < len(tokens) and tokens[at][:2] in (("op", "."), ("op", "("), ("op", "[")):
            raise Unknown
    return " ".join(out)


def _string_value(token: str) -> str:
    body = token[1:-1]
    return body if "\\" not in body else body.encode("ascii", "backslashreplace").decode("unicode-escape")


# --- from Python to functions


class _Builder:
    """Nodes of the syntax tree → functions; raises Unknown for every node that is not known. literals: constant texts."""

    def __init__(self, literals: list[str]):
        self.literals = literals

    def statements(self, nodes: list) -> Statement:
        steps = [self._statement(node) for node in nodes if not isinstance(node, ast.Pass)]

        def run(scope, out):
            for step in steps:
                step(scope, out)

        return run

    def _statement(self, node) -> Statement:
        match node:
            case ast.Expr(ast.Constant(str(text))):
                self.literals.append(text)
                return lambda scope, out: out.add(text)
            case ast.Assign([ast.Name(name)], value):
                assigned = self.expression(value)
                if name == _FILTER:
                    return lambda scope, out: out.add(assigned(scope))
                return lambda scope, out: scope.__setitem__(name, assigned(scope))
            case ast.Assign([ast.Attribute(ast.Name(space), name)], value) if not name.startswith("_"):
                assigned = self.expression(value)

                def assign(scope, out):
                    if type(scope.get(space)) is not Namespace:
                        raise Failure("cannot assign attribute on non-namespace object")
                    scope[space][name] = assigned(scope)

                return assign
            case ast.If(test, body, orelse):
                condition, then, other = self.expression(test), self.statements(body), self.statements(orelse)

                def choose(scope, out):
                    BUDGET.spend()
                    (then if condition(scope) else other)(scope, out)

                return choose
            case ast.For(target, items, body, orelse):
                names = [name.id for name in getattr(target, "elts", [target])]
                if isinstance(target, ast.Tuple) and len(names) == 1:
                    raise Unknown
                return self._for(names, self.expression(items), self.statements(body), self.statements(orelse))
        raise Unknown

    def _for(self, names: list[str], items: Expression, body: Statement, otherwise: Statement) -> Statement:
        if "loop" in names:
            raise Unknown

        def run(scope, out):
            values = sequence(items(scope))
            for index, value in enumerate(values):
                BUDGET.spend()
                parts = [value] if len(names) == 1 else list(value)
                if len(parts) != len(names):
                    raise Failure(f"a loop over {len(names)} names meets {len(parts)} values")
                body({**scope, **dict(zip(names, parts, strict=True)), "loop": Loop(values, index)}, out)
            if not values:
                otherwise(dict(scope), out)

        return run

    def expression(self, node) -> Expression:
        kind: type
        build: Callable[[Any], Expression] = self.expression
        match node:
            case ast.Constant(str(text)) if "__" not in text:  # else a name such as __class__: for jinja2's check
                self.literals.append(text)
                return lambda scope: text
            case ast.Constant(bool() | int() | None as value) if value is None or value <= MAX_INTEGER:
                return lambda scope: value
            case ast.Name("__f_"):
                return lambda scope: Undefined("the else of an inline if")
            case ast.Name(name) if name not in _OTHER_NAMES:
                return lambda scope: scope[name] if name in scope else Undefined(name)
            case ast.List(items) | ast.Tuple(items):
                kind, parts = list if isinstance(node, ast.List) else tuple, [build(item) for item in items]
                return lambda scope: kind([part(scope) for part in parts])
            case ast.Dict(keys, values):
                pairs = [(build(key), build(value)) for key, value in zip(keys, values, strict=True)]
                return lambda scope: {key(scope): value(scope) for key, value in pairs}
            case ast.IfExp(test, value, other):
                first, second, third = build(test), build(value), build(other)
                return lambda scope: second(scope) if first(scope) else third(scope)
            case ast.BoolOp(ast.And(), values):
                return reduce(lambda left, right: lambda scope: left(scope) and right(scope), map(build, values))
            case ast.BoolOp(ast.Or(), values):
                return reduce(lambda left, right: lambda scope: left(scope) or right(scope), map(build, values))
            case ast.UnaryOp(ast.Not(), value):
                first = build(value)
                return lambda scope: not first(scope)
            case ast.UnaryOp(ast.USub(), ast.Constant() as value):  # -3|abs is (-3)|abs in Jinja
                first = build(value)
                return lambda scope: -first(scope)
            case ast.BinOp(left, op, right):
                return self._binary(left, op, right)
            case ast.Compare(left, [op], [right]):
                first, compare, second = build(left), COMPARE[type(op)], build(right)
                return lambda scope: compare(first(scope), second(scope))
            case ast.Attribute(ast.Name("loop"), name) if name in Loop.NAMES:
                return lambda scope: attribute_of(scope.get("loop", Undefined("loop")), name)
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
                kwargs = {str(keyword.arg): build(keyword.value) for keyword in keywords}
                return self._call(function, [build(arg) for arg in args], kwargs)
        raise Unknown

    def _binary(self, left, op, right) -> Expression:
        if isinstance(left, ast.BinOp) and isinstance(left.op, ast.MatMult) and isinstance(op, (ast.Mult, ast.Mod)):
            raise Unknown  # a ~ b * c is a ~ (b * c) in Jinja
        first, second = self.expression(left), self.expression(right)
        if isinstance(op, ast.MatMult):
            return lambda scope: BUDGET.concat([first(scope), second(scope)])
        symbol, compute = ARITHMETIC[type(op)]

        def run(scope):
            a, b = first(scope), second(scope)
            BUDGET.check_binary(symbol, a, b)
            return compute(a, b)

        return run

    def _call(self, function, args: list[Expression], kwargs: dict[str, Expression]) -> Expression:
        match function:
            case ast.Attribute(value, name) if name[:4] in (_FILTER, _TEST, _NO_TEST):
                return self._applied(name[:4], name[4:], [self.expression(value), *args], kwargs)
            case ast.Attribute(_, name) if name in CALLABLE:
                called = self.expression(function)
            case ast.Name(name) if name in FUNCTIONS:
                called = lambda scope: scope[name]  # noqa: E731
            case _:
                raise Unknown
        return lambda scope: call(called(scope), [a(scope) for a in args], {k: v(scope) for k, v in kwargs.items()})

    def _applied(self, mark: str, name: str, args: list[Expression], kwargs: dict[str, Expression]) -> Expression:
        """A filter or a test."""
        function = (FILTERS if mark == _FILTER else TESTS)[name]
        if set(kwargs) - KEYWORDS.get(name, set()):
            raise Unknown

        def run(scope):
            BUDGET.spend()
            found = function(*[arg(scope) for arg in args], **{key: arg(scope) for key, arg in kwargs.items()})
            return not found if mark == _NO_TEST else found

        return run
