"""Jinja source -> functions, for template_fast.py: a recursive-descent parser.

An expression becomes a function of the variables; a statement a function of the variables and the output.
"""

import operator
from collections.abc import Callable
from typing import Any

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
    application,
    attribute,
    binary,
    both,
    check_constant,
    check_name,
    check_number,
    choice,
    either,
    invocation,
    item_of,
    sequence,
    unary,
)
from zse.tokenizer.template_lex import lex, string_value
from zse.tokenizer.template_limits import HIDDEN_ATTRIBUTES

_KEYWORDS = frozenset("and or not in is if else true false none True False None".split())
_CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "none": None, "None": None}
_COMPARE = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_AFTER_TEST = ("else", "or", "and", "if", "is", "in", "not")
_JINJA_NAMES = ("self", "super", "caller", "varargs", "kwargs", "cycler", "joiner", "lipsum")
_RARE_LOOP = ("depth", "depth0", "changed")
MAX_DEPTH = 60


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

            made = choice(condition, value, other)
        self._depth -= 1
        return made

    def _or(self):
        made = self._and()
        while self._take("or", "name"):
            made = either(made, self._and())
        return made

    def _and(self):
        made = self._not()
        while self._take("and", "name"):
            made = both(made, self._not())
        return made

    def _not(self):
        if self._take("not", "name"):
            return unary(operator.not_, self._not())
        return self._compare()

    def _compare(self):
        first = self._sum()
        rest: list[tuple[Callable[[Any, Any], Any], Any]] = []
        while True:
            kind, text = self._peek()
            if kind == "op" and text in _COMPARE:
                self._at += 1
                rest.append((_COMPARE[text], self._sum()))
            elif self._take("in", "name"):
                rest.append((lambda left, right: left in right, self._sum()))
            elif (kind, text) == ("name", "not") and self._tokens[self._at + 1 : self._at + 2] == [("name", "in")]:
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
            made = binary(symbol, made, operand())
        return made

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
            made = unary(operator.neg, self._unary(False))
        elif self._take("+"):
            made = unary(operator.pos, self._unary(False))
        else:
            made = self._postfix(self._primary())
        if self._is("**"):
            raise Unknown
        return self._filters(made) if with_filters else made

    def _primary(self):
        kind, text = self._next()
        if kind == "string":
            value = string_value(text)
            while self._peek()[0] == "string":
                value += string_value(self._next()[1])
            self.literals.append(check_constant(value))
            return lambda scope: value
        if kind in ("int", "float"):
            number = check_number(int(text) if kind == "int" else float(text))
            return lambda scope: number
        if kind == "name":
            if text in _CONSTANTS:
                constant = _CONSTANTS[text]
                return lambda scope: constant
            if text in _KEYWORDS or text in _JINJA_NAMES:
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
                value = attribute(value, name)
            elif self._take("["):
                value = self._subscript(value)
                if self._is("("):
                    raise Unknown
            elif self._take("("):
                args, kwargs = self._arguments()
                value = invocation(value, args, kwargs)
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
            if self._peek()[0] == "name" and self._tokens[self._at + 1 : self._at + 2] == [("op", "=")]:
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
                value = application(FILTERS[name], value, args, kwargs)
            elif self._take("is", "name"):
                negated = self._take("not", "name")
                name = self._next()[1]
                args = []
                if self._take("("):
                    args, kwargs = self._arguments()
                    if kwargs:
                        raise Unknown
                elif (
                    self._peek()[0] in ("string", "int", "float")
                    or self._peek()[1] in ("[", "{")
                    or self._peek()[0] == "name"
                    and self._peek()[1] not in _AFTER_TEST
                ):
                    args = [self._postfix(self._primary())]
                if name not in TESTS:
                    raise Unknown
                value = application(TESTS[name], value, args, [])
                if negated:
                    value = unary(operator.not_, value)
            elif self._is("(") or self._is("["):
                raise Unknown
            else:
                return value
