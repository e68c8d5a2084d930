"""Jinja source -> functions, for template_fast.py: lexer with jinja2's white space rules, recursive-descent parser.

An expression becomes a function of the variables; a statement a function of the variables and the output.
"""

import operator
import re

from zse.tokenizer.template_fast import (
    ALL_METHODS,
    BUDGET,
    FILTERS,
    FUNCTIONS,
    KEYWORDS,
    TESTS,
    Break,
    Continue,
    Failure,
    Loop,
    Namespace,
    Output,
    Undefined,
    Unknown,
    attribute_of,
    call,
    check_constant,
    check_name,
    check_number,
    item_of,
    sequence,
)
from zse.tokenizer.template_limits import HIDDEN_ATTRIBUTES

_OPEN = re.compile(r"\{(?:(?P<kind>[%{#])(?P<sign>[-+]?))")
_TOKEN = re.compile(r"""\s*(?:(?P<float>\d+\.\d+)|(?P<int>\d+)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<close>[-+]?%\}|-?\}\})|(?P<op>//|\*\*|==|!=|<=|>=|[-+*/%~<>=()\[\]{}.,:|]))""",
                    re.X | re.S)
_COMMENT_END = re.compile(r"([-+]?)#\}")
_KEYWORDS = frozenset("and or not in is if else true false none True False None".split())
_CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "none": None, "None": None}
_COMPARE = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_BINARY = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
           "%": operator.mod}
_RARE_LOOP = ("depth", "depth0", "changed")
MAX_DEPTH = 60


def lex(source: str) -> list[tuple]:
    """[("data", text) | ("begin", "%" or "{") | (token kind, text) | ("end", "")], comments left out."""
    source = re.sub(r"\r\n|\r", "\n", source)
    if source.endswith("\n"):
        source = source[:-1]
    out, at, line_starts = [], 0, True
    while True:
        found = _OPEN.search(source, at)
        text = source[at:found.start()] if found else source[at:]
        if not found:
            out.append(("data", text))
            return out
        kind, sign = found["kind"], found["sign"]
        if kind == "{" and sign == "+":
            sign, stop = "", found.end() - 1
        else:
            stop = found.end()
        if sign == "-":
            text = text.rstrip()
        elif sign != "+" and kind != "{":
            # lstrip_blocks: white space between the line's start and the block goes.
            start = text.rfind("\n") + 1
            if (start > 0 or line_starts) and not text[start:].strip():
                text = text[:start]
        out.append(("data", text))
        if kind == "#":
            end = _COMMENT_END.search(source, stop)
            if not end:
                raise Unknown
            at, closing = end.end(), end[1]
        else:
            out.append(("begin", kind))
            at, closing = _lex_code(source, stop, "%}" if kind == "%" else "}}", out)
        if closing == "-":
            while at < len(source) and source[at].isspace():
                at += 1
        elif closing != "+" and kind != "{" and source[at:at + 1] == "\n":
            at += 1  # trim_blocks
        line_starts = source[at - 1] == "\n"


def _lex_code(source: str, at: int, close: str, out: list) -> tuple[int, str]:
    depth = 0
    while True:
        found = _TOKEN.match(source, at)
        if not found:
            raise Unknown
        kind, text = found.lastgroup, found[found.lastgroup]
        if kind == "close" and (depth or not text.endswith(close)):
            # "}}" inside {{ {"a": {}}["a"] }}, or "-%" and the like in an expression: a single character is the token.
            found = re.compile(r"\s*(?P<op>[-+%}])").match(source, at)
            kind, text = "op", found["op"]
        if kind == "close":
            out.append(("end", ""))
            return found.end(), text[0] if text[0] in "-+" else ""
        if kind == "op" and text in "([{":
            depth += 1
        elif kind == "op" and text in ")]}":
            depth -= 1
        out.append((kind, text))
        at = found.end()


def _string(token: str) -> str:
    body = token[1:-1]
    return body if "\\" not in body else body.encode("ascii", "backslashreplace").decode("unicode-escape")


class Parser:
    """One template. template() may be called once; raises Unknown for what jinja2 has to do."""

    def __init__(self, source: str):
        self.literals: list[str] = []
        try:
            self._tokens = lex(source)
        except (UnicodeDecodeError, IndexError):
            raise Unknown from None
        self._at, self._depth, self._loops = 0, 0, 0

    # --- tokens ------------------------------------------------------------------------------------------------------

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("eof", "")

    def _next(self) -> tuple[str, str]:
        token = self._peek()
        self._at += 1
        return token

    def _is(self, text: str, kind: str = "op") -> bool:
        return self._peek() == (kind, text)

    def _take(self, text: str, kind: str = "op") -> bool:
        if self._is(text, kind):
            self._at += 1
            return True
        return False

    def _expect(self, text: str, kind: str = "op") -> None:
        if not self._take(text, kind):
            raise Unknown

    def _name(self) -> str:
        kind, text = self._next()
        if kind != "name" or text in _KEYWORDS:
            raise Unknown
        return check_name(text)

    def _end(self) -> None:
        self._expect("", "end")

    # --- statements --------------------------------------------------------------------------------------------------

    def template(self):
        body = self._body(())
        if self._peek()[0] != "eof":
            raise Unknown
        return body

    def _body(self, stops: tuple[str, ...]):
        """Statements up to one that begins with a word in `stops`, which is left to be read (behind its "begin")."""
        steps = []
        while True:
            kind, text = self._next()
            if kind == "data":
                if text:
                    self.literals.append(text)
                    steps.append(lambda scope, out, text=text: out.add(text))
            elif kind == "begin" and text == "{":
                value = self._expression()
                self._end()
                steps.append(lambda scope, out, value=value: out.add(value(scope)))
            elif kind == "begin":
                if self._peek()[0] == "name" and self._peek()[1] in stops:
                    break
                steps.append(self._statement())
            elif kind == "eof" and not stops:
                self._at -= 1
                break
            else:
                raise Unknown

        def run(scope, out):
            for step in steps:
                step(scope, out)
        return run

    def _statement(self):
        word = self._next()[1]
        handler = {"if": self._if, "for": self._for, "set": self._set, "generation": self._generation}.get(word)
        if handler:
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise Unknown
            made = handler()
            self._depth -= 1
            return made
        if word in ("break", "continue") and self._loops:
            self._end()
            kind = Break if word == "break" else Continue

            def leave(scope, out):
                raise kind
            return leave
        raise Unknown

    def _if(self):
        branches, otherwise = [], None
        word = "elif"
        while word == "elif":
            condition = self._expression()
            self._end()
            branches.append((condition, self._body(("elif", "else", "endif"))))
            word = self._next()[1]
        if word == "else":
            self._end()
            otherwise = self._body(("endif",))
            self._next()
        self._end()

        def run(scope, out):
            BUDGET.spend()
            for condition, body in branches:
                if condition(scope):
                    body(scope, out)
                    return
            if otherwise:
                otherwise(scope, out)
        return run

    def _for(self):
        names = [self._name()]
        while self._take(","):
            names.append(self._name())
        self._expect("in", "name")
        if "loop" in names:
            raise Unknown
        items = self._expression(with_condition=False)
        condition = self._expression() if self._take("if", "name") else None
        if self._peek() == ("name", "recursive"):
            raise Unknown
        self._end()
        self._loops += 1
        body = self._body(("else", "endfor"))
        self._loops -= 1
        otherwise = None
        if self._next()[1] == "else":
            self._end()
            otherwise = self._body(("endfor",))
            self._next()
        self._end()

        def bind(scope, item):
            if len(names) == 1:
                scope[names[0]] = item
                return
            parts = list(item)
            if len(parts) != len(names):
                raise Failure(f"a loop over {len(names)} names meets {len(parts)} values")
            scope.update(zip(names, parts, strict=True))

        def run(scope, out):
            values = sequence(items(scope))
            if condition:
                kept = []
                for value in values:
                    inner = dict(scope)
                    bind(inner, value)
                    if condition(inner):
                        kept.append(value)
                values = kept
            loop = Loop(values)
            for index, value in enumerate(values):
                BUDGET.spend()
                inner = dict(scope)
                loop.index0 = index
                bind(inner, value)
                inner["loop"] = loop
                try:
                    body(inner, out)
                except Continue:
                    continue
                except Break:
                    break
            if otherwise and not values:
                otherwise(dict(scope), out)
        return run

    def _set(self):
        name = self._name()
        attribute = self._name() if self._take(".") else None
        if self._take("="):
            value = self._expression()
            self._end()
        elif attribute is None:
            self._end()
            body = self._body(("endset",))
            self._next()
            self._end()

            def value(scope):
                inner = Output()
                body(dict(scope), inner)
                return "".join(inner.parts)
        else:
            raise Unknown
        if attribute is None:
            def assign(scope, out):
                scope[name] = value(scope)
        else:
            def assign(scope, out):
                space = scope.get(name)
                if type(space) is not Namespace:
                    raise Failure("cannot assign attribute on non-namespace object")
                space.values[attribute] = value(scope)
        return assign

    def _generation(self):
        self._end()
        body = self._body(("endgeneration",))
        self._next()
        self._end()
        return lambda scope, out: body(dict(scope), out)

    # --- expressions, weakest binding first --------------------------------------------------------------------------

    def _expression(self, with_condition: bool = True):
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unknown
        made = self._or()
        while with_condition and self._take("if", "name"):
            condition, value = self._or(), made
            if self._take("else", "name"):
                other = self._expression()
            else:
                def other(scope):
                    return Undefined("the inline if-expression evaluated to false and no else section was defined")
            made = (lambda condition, value, other: lambda scope: value(scope) if condition(scope) else other(scope))(
                condition, value, other)
        self._depth -= 1
        return made

    def _or(self):
        made = self._and()
        while self._take("or", "name"):
            made = (lambda left, right: lambda scope: left(scope) or right(scope))(made, self._and())
        return made

    def _and(self):
        made = self._not()
        while self._take("and", "name"):
            made = (lambda left, right: lambda scope: left(scope) and right(scope))(made, self._not())
        return made

    def _not(self):
        if self._take("not", "name"):
            value = self._not()
            return lambda scope: not value(scope)
        return self._compare()

    def _compare(self):
        first, rest = self._sum(), []
        while True:
            kind, text = self._peek()
            if kind == "op" and text in _COMPARE:
                self._at += 1
                rest.append((_COMPARE[text], self._sum()))
            elif self._take("in", "name"):
                rest.append((lambda left, right: left in right, self._sum()))
            elif (kind, text) == ("name", "not") and self._tokens[self._at + 1:self._at + 2] == [("name", "in")]:
                self._at += 2
                rest.append((lambda left, right: left not in right, self._sum()))
            else:
                break
        if not rest:
            return first

        def run(scope):
            left = first(scope)
            for compare, operand in rest:
                right = operand(scope)
                if not compare(left, right):
                    return False
                left = right
            return True
        return run

    def _operators(self, symbols: tuple[str, ...], operand):
        made = operand()
        while self._peek()[0] == "op" and self._peek()[1] in symbols:
            symbol = self._next()[1]
            made = self._binary(symbol, made, operand())
        return made

    @staticmethod
    def _binary(symbol, left, right):
        compute = _BINARY[symbol]

        def run(scope):
            a, b = left(scope), right(scope)
            BUDGET.check_binary(symbol, a, b)
            return compute(a, b)
        return run

    def _sum(self):
        return self._operators(("+", "-"), self._concat)

    def _concat(self):
        parts = [self._product()]
        while self._take("~"):
            parts.append(self._product())
        return parts[0] if len(parts) == 1 else lambda scope: BUDGET.concat([part(scope) for part in parts])

    def _product(self):
        return self._operators(("*", "/", "//", "%"), self._unary)

    def _unary(self, with_filters: bool = True):
        if self._take("-"):
            value = self._unary(False)
            made = (lambda value: lambda scope: -value(scope))(value)
        elif self._take("+"):
            value = self._unary(False)
            made = (lambda value: lambda scope: +value(scope))(value)
        else:
            made = self._postfix(self._primary())
        if self._is("**"):
            raise Unknown
        return self._filters(made) if with_filters else made

    def _primary(self):
        kind, text = self._next()
        if kind == "string":
            value = _string(text)
            while self._peek()[0] == "string":
                value += _string(self._next()[1])
            self.literals.append(check_constant(value))
            return lambda scope: value
        if kind in ("int", "float"):
            number = check_number(int(text) if kind == "int" else float(text))
            return lambda scope: number
        if kind == "name":
            if text in _CONSTANTS:
                constant = _CONSTANTS[text]
                return lambda scope: constant
            if text in _KEYWORDS or text in ("self", "super", "caller", "varargs", "kwargs", "cycler", "joiner", "lipsum"):
                raise Unknown
            name = check_name(text)
            if self._is("(") and name not in FUNCTIONS:
                raise Unknown
            return lambda scope: scope[name] if name in scope else Undefined(name)
        if (kind, text) == ("op", "("):
            items, is_tuple = [], False
            while not self._take(")"):
                items.append(self._expression())
                if self._take(","):
                    is_tuple = True
                elif not self._is(")"):
                    raise Unknown
            if not items or is_tuple:
                return lambda scope: tuple([item(scope) for item in items])
            return items[0]
        if (kind, text) == ("op", "["):
            items = self._list("]")
            return lambda scope: [item(scope) for item in items]
        if (kind, text) == ("op", "{"):
            pairs = []
            while not self._take("}"):
                key = self._expression()
                self._expect(":")
                pairs.append((key, self._expression()))
                if not self._take(",") and not self._is("}"):
                    raise Unknown
            return lambda scope: {key(scope): value(scope) for key, value in pairs}
        raise Unknown

    def _list(self, close: str) -> list:
        items = []
        while not self._take(close):
            items.append(self._expression())
            if not self._take(",") and not self._is(close):
                raise Unknown
        return items

    def _postfix(self, value):
        while True:
            if self._take("."):
                kind, name = self._next()
                if kind != "name" or name.startswith("_") or name in HIDDEN_ATTRIBUTES or name in _RARE_LOOP:
                    raise Unknown
                if self._is("(") and name not in ALL_METHODS:
                    raise Unknown
                value = (lambda value, name: lambda scope: attribute_of(value(scope), name))(value, name)
            elif self._take("["):
                value = self._subscript(value)
                if self._is("("):
                    raise Unknown
            elif self._take("("):
                args, kwargs = self._arguments()
                value = (lambda value, args, kwargs: lambda scope: call(
                    value(scope), [arg(scope) for arg in args], {key: arg(scope) for key, arg in kwargs}))(value, args, kwargs)
                if self._is("("):
                    raise Unknown
            else:
                return value

    def _subscript(self, value):
        bounds = [None]
        while not self._take("]"):
            if self._take(":"):
                bounds.append(None)
            elif bounds[-1] is None:
                bounds[-1] = self._expression()
            else:
                raise Unknown
        if len(bounds) == 1 and bounds[0]:
            key = bounds[0]
            return lambda scope: item_of(value(scope), key(scope))
        if len(bounds) > 3 or len(bounds) == 1:
            raise Unknown

        def run(scope):
            sliced = value(scope)
            if type(sliced) is Undefined:
                sliced.fail()
            if type(sliced) not in (list, tuple, str):
                return Undefined("slice")
            BUDGET.spend(1 + len(sliced) // 64)
            return sliced[slice(*[bound(scope) if bound else None for bound in bounds])]
        return run

    def _arguments(self):
        args, kwargs = [], []
        while not self._take(")"):
            if self._peek()[0] == "name" and self._tokens[self._at + 1:self._at + 2] == [("op", "=")]:
                name = self._name()
                self._at += 1
                kwargs.append((name, self._expression()))
            elif kwargs:
                raise Unknown
            else:
                args.append(self._expression())
            if not self._take(",") and not self._is(")"):
                raise Unknown
        return args, kwargs

    def _filters(self, value):
        while True:
            if self._take("|"):
                name = self._next()[1]
                args, kwargs = self._arguments() if self._take("(") else ([], [])
                if name not in FILTERS or self._is(".") or not {key for key, _ in kwargs} <= KEYWORDS.get(name, set()):
                    raise Unknown
                if name == "map" and (args or not kwargs):
                    raise Unknown
                value = self._apply(FILTERS[name], value, args, kwargs)
            elif self._take("is", "name"):
                negated = self._take("not", "name")
                name = self._next()[1]
                args = []
                if self._take("("):
                    args, kwargs = self._arguments()
                    if kwargs:
                        raise Unknown
                elif self._peek()[0] in ("string", "int", "float") or self._peek()[1] in ("[", "{") or \
                        self._peek()[0] == "name" and self._peek()[1] not in ("else", "or", "and", "if", "is", "in", "not"):
                    args = [self._postfix(self._primary())]
                if name not in TESTS:
                    raise Unknown
                value = self._apply(TESTS[name], value, args, [])
                if negated:
                    value = (lambda value: lambda scope: not value(scope))(value)
            elif self._is("(") or self._is("["):
                raise Unknown
            else:
                return value

    @staticmethod
    def _apply(function, value, args, kwargs):
        def run(scope):
            BUDGET.spend()
            return function(value(scope), *[arg(scope) for arg in args], **{key: arg(scope) for key, arg in kwargs})
        return run
