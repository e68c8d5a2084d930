"""An interpreter of the Jinja that common chat templates are written in, for the start path.

jinja2 takes 40 ms to import and 5 ms to compile a template, a quarter of the time from exec to the first token of a
small model; this takes 3 ms in all. compile_fast() returns None for whatever it does not know (macros, calls with
blocks, rarer filters, names that look like an attack), and jinja2 does it (template_jinja.py). What it does know it
does as jinja2 would: tests compare the two. Values have no attributes here but the entries of dicts and the methods
listed, so there is nothing to escape to. Grammar and white space rules: jinja2's documentation and its lexer.
"""

import operator
import re
from collections.abc import Callable

from zse.errors import RequestError
from zse.tokenizer.template_limits import (
    MAX_INTEGER,
    Budget,
    cannot_render,
    from_json,
    raise_exception,
    strftime_now,
    tojson,
    too_much,
)


class Unknown(Exception):
    """Something that is left to jinja2."""


class Failure(Exception):
    """What jinja2 would raise UndefinedError and such for."""


class Undefined:
    """The value of a name or attribute that is not there: false, empty, "" in the text; anything else fails."""

    __slots__ = ("name",)

    def __init__(self, name):
        self.name = name

    def fail(self, *_):
        raise Failure(f"{self.name!r} is undefined")

    def __bool__(self):
        return False

    def __str__(self):
        return ""

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0

    def __eq__(self, other):
        return type(other) is Undefined

    def __hash__(self):
        return 0

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __floordiv__ = __mod__ = fail
    __rtruediv__ = __rfloordiv__ = __rmod__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __pos__ = fail
    __getitem__ = fail


class Namespace:
    __slots__ = ("values",)

    def __init__(self, *args, **kwargs):
        self.values = dict(*args, **kwargs)


class Loop:
    """`loop` inside a for."""

    __slots__ = ("items", "index0")

    def __init__(self, items):
        self.items, self.index0 = items, 0

    def get(self, name):
        at, size = self.index0, len(self.items)
        if name == "previtem":
            return self.items[at - 1] if at else Undefined("there is no previous item")
        if name == "nextitem":
            return self.items[at + 1] if at + 1 < size else Undefined("there is no next item")
        if name == "cycle":
            return lambda *values: values[at % len(values)]
        return {
            "index0": at,
            "index": at + 1,
            "first": at == 0,
            "last": at + 1 == size,
            "length": size,
            "revindex": size - at,
            "revindex0": size - at - 1,
        }[name]


LOOP = frozenset("index index0 first last length revindex revindex0 previtem nextitem cycle".split())
METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        """capitalize count endswith find index isdigit isspace join lower lstrip replace rfind rsplit
               rstrip split splitlines startswith strip title upper""".split()
    ),
    dict: frozenset(("get", "items", "keys", "values")),
    list: frozenset(("count", "index")),
    tuple: frozenset(),
}
ALL_METHODS = frozenset().union(*METHODS.values()) | {"cycle"}
BUDGET = Budget()


def attribute_of(value, name):
    """value.name: in jinja2 a method comes before an entry."""
    if type(value) is dict and name in METHODS[dict]:
        return getattr(value, name)
    return item_of(value, name)


def item_of(value, key):
    """value[key]; Undefined when it is not there."""
    kind = type(value)
    if kind is dict:
        try:
            if key in value:
                return value[key]
        except TypeError:
            return Undefined(str(key))
    elif kind is Undefined:
        value.fail()
    elif type(key) is str:
        if kind is Namespace:
            return value.values[key] if key in value.values else Undefined(key)
        if kind is Loop and key in LOOP:
            return value.get(key)
    elif kind in (list, tuple, str):
        try:
            return value[key]
        except (LookupError, TypeError):
            return Undefined(str(key))
    if type(key) is str and key in METHODS.get(kind, ()):
        return getattr(value, key)
    return Undefined(str(key))


def call(function, args, kwargs):
    BUDGET.spend()
    if type(function) is Undefined:
        function.fail()
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if type(owner) is str and name == "replace":
        return BUDGET.replace(owner, *args)
    if type(owner) is str and name == "join":
        return BUDGET.join(list(*args), owner)
    if not callable(function):
        raise Failure(f"{type(function).__name__} is called")
    return function(*args, **kwargs)


# --- filters, tests, functions: each as in jinja2, or bounded (template_limits.py) --------------------------


def sequence(value) -> list:
    made = list(value)
    BUDGET.spend(1 + len(made))
    return made


def select(keep):
    def chosen(items, attribute, test=None, *args):
        check = (lambda value: bool(value)) if test is None else (lambda value: TESTS[test](value, *args))
        return [item for item in sequence(items) if bool(check(path_of(item, attribute))) is keep]

    return chosen


def path_of(value, attribute):
    for name in str(attribute).split("."):
        value = item_of(value, int(name) if name.isdigit() else name)
    return value


def default(value, default_value="", boolean=False):
    return default_value if type(value) is Undefined or (boolean and not value) else value


def edge(at):
    def found(value):
        items = sequence(value)
        return items[at] if items else Undefined("there is no item, the sequence was empty")

    return found


def to_int(value, default=0):
    try:
        return int(value)
    except (TypeError, ValueError):
        try:
            return int(float(value))
        except (TypeError, ValueError, OverflowError):
            return default


def to_float(value, default=0.0):
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return default


FILTERS: dict[str, Callable] = {
    "trim": lambda value, chars=None: str(value).strip(chars),
    "upper": lambda value: str(value).upper(),
    "lower": lambda value: str(value).lower(),
    "capitalize": lambda value: str(value).capitalize(),
    "length": len,
    "count": len,
    "string": str,
    "list": sequence,
    "int": to_int,
    "float": to_float,
    "default": default,
    "d": default,
    "join": lambda value, d="": BUDGET.join(list(value), d),
    "replace": BUDGET.replace,
    "tojson": tojson,
    "from_json": from_json,
    "items": lambda value: [] if type(value) is Undefined else sequence(value.items()),
    "first": edge(0),
    "last": edge(-1),
    "selectattr": select(True),
    "rejectattr": select(False),
    "map": lambda items, *, attribute: [path_of(item, attribute) for item in sequence(items)],
    "reverse": lambda value: value[::-1] if isinstance(value, str) else sequence(value)[::-1],
    "abs": abs,
}
NUMBERS = (int, float)
TESTS: dict[str, Callable] = {
    "defined": lambda value: type(value) is not Undefined,
    "undefined": lambda value: type(value) is Undefined,
    "none": lambda value: value is None,
    "string": lambda value: isinstance(value, str),
    "mapping": lambda value: isinstance(value, dict),
    "sequence": lambda value: hasattr(value, "__len__"),
    "iterable": lambda value: hasattr(value, "__iter__"),
    "number": lambda value: isinstance(value, NUMBERS),
    "boolean": lambda value: isinstance(value, bool),
    "true": lambda value: value is True,
    "false": lambda value: value is False,
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, float),
    "odd": lambda value: value % 2 == 1,
    "even": lambda value: value % 2 == 0,
    "lower": lambda value: str(value).islower(),
    "upper": lambda value: str(value).isupper(),
    "in": lambda value, other: value in other,
    "sameas": lambda value, other: value is other,
    "divisibleby": lambda value, other: value % other == 0,
    **dict.fromkeys(("eq", "equalto", "=="), operator.eq),
    **dict.fromkeys(("ne", "!="), operator.ne),
    **dict.fromkeys(("lt", "lessthan", "<"), operator.lt),
    **dict.fromkeys(("le", "<="), operator.le),
    **dict.fromkeys(("gt", "greaterthan", ">"), operator.gt),
    **dict.fromkeys(("ge", ">="), operator.ge),
}
# Keyword arguments that filters take here; jinja2 knows more.
KEYWORDS = {
    "tojson": {"indent", "ensure_ascii", "separators", "sort_keys"},
    "default": {"default_value", "boolean"},
    "d": {"default_value", "boolean"},
    "map": {"attribute"},
    "join": {"d"},
}
FUNCTIONS = {
    "namespace": Namespace,
    "range": BUDGET.range,
    "raise_exception": raise_exception,
    "strftime_now": strftime_now,
    "dict": dict,
}


# --- what expressions become: functions of the variables --------------------------------------------------------

_BINARY = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}


def choice(condition, value, other):
    return lambda scope: value(scope) if condition(scope) else other(scope)


def either(left, right):
    return lambda scope: left(scope) or right(scope)


def both(left, right):
    return lambda scope: left(scope) and right(scope)


def unary(compute, value):
    return lambda scope: compute(value(scope))


def binary(symbol, left, right):
    compute = _BINARY[symbol]

    def run(scope):
        a, b = left(scope), right(scope)
        BUDGET.check_binary(symbol, a, b)
        return compute(a, b)

    return run


def attribute(value, name):
    return lambda scope: attribute_of(value(scope), name)


def invocation(value, args, kwargs):
    return lambda scope: call(value(scope), [arg(scope) for arg in args], {key: arg(scope) for key, arg in kwargs})


def application(function, value, args, kwargs):
    """A filter or test."""

    def run(scope):
        BUDGET.spend()
        return function(value(scope), *[arg(scope) for arg in args], **{key: arg(scope) for key, arg in kwargs})

    return run


class Break(Exception):
    pass


class Continue(Exception):
    pass


class FastTemplate:
    """A template as a tree of Python functions. literals: every constant text in it."""

    def __init__(self, body, literals: list[str]):
        self._body, self.literals = body, literals

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


class Output:
    """The text so far."""

    __slots__ = ("parts", "size")

    def __init__(self):
        self.parts, self.size = [], 0

    def add(self, value) -> None:
        text = value if type(value) is str else str(value)
        BUDGET.spend()
        self.size += len(text)
        BUDGET.check_size(self.size)
        self.parts.append(text)


def compile_fast(source: str) -> FastTemplate | None:
    """The template, or None when it needs jinja2: it uses something unknown, or is not valid."""
    from zse.tokenizer.template_parse import Parser

    try:
        parser = Parser(source)
        return FastTemplate(parser.template(), parser.literals)
    except (Unknown, RecursionError):
        return None


def check_constant(text: str) -> str:
    """A string constant; names such as __class__, or parts of one, are for jinja2's allow-list to judge."""
    if "__" in text:
        raise Unknown
    return text


def check_number(value):
    if abs(value) > MAX_INTEGER:
        raise Unknown
    return value


def check_name(name: str) -> str:
    if name.startswith("__") or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise Unknown
    return name
