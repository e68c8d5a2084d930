"""What the expressions of a chat template compute with where template_fast.py runs it: values, operators, filters,
tests.

Each does as jinja2's does, or is bounded (template_limits.py). Values have no attributes but the entries of dicts and
the methods of METHODS, so there is nothing to escape to."""

import _ast as ast
import operator
from collections.abc import Callable

from zse.tokenizer.template_limits import METHODS, Budget, raise_exception, strftime_now

BUDGET = Budget()


class Undefined:
    """The value of a name or attribute that is not there: false, empty, "" in the text; anything else fails."""

    def __init__(self, name):
        self.name = name

    def fail(self, *_, **__):
        raise ValueError(f"{self.name!r} is undefined")

    def __str__(self):
        return ""

    def __repr__(self):
        return "Undefined"

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0

    def __eq__(self, other):
        return type(other) is Undefined

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = __neg__ = fail
    __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = __call__ = fail


class Namespace(dict):
    """`namespace()`: what a template may assign to."""


def attribute_of(value, name: str):
    """value.name: in jinja2 a method comes before an entry."""
    return getattr(value, name) if type(value) is dict and name in METHODS[dict] else item_of(value, name)


def item_of(value, key):
    """value[key], key may be a slice; Undefined when it is not there."""
    if type(value) is Undefined:
        value.fail()
    BUDGET.weigh(key)  # it is hashed, or written into an error
    if isinstance(value, dict) or type(value) in (list, tuple, str) and type(key) is not str:
        BUDGET.spend()
        try:
            if type(key) is slice:
                return BUDGET.result(value[key], value)
            return value[key]
        except (LookupError, TypeError):
            pass
    if type(key) is str and key in METHODS.get(type(value), ()):
        return getattr(value, key)
    return Undefined(str(key))


def hashed(key):
    BUDGET.weigh(key)
    return key


def sequence(value) -> list:
    BUDGET.spend(1 + len(value) if hasattr(value, "__len__") else 1)
    return list(value)


def edge(value, at: int):
    items = sequence(value)
    return items[at] if items else Undefined("there is no item, the sequence was empty")


def default(value, default_value="", boolean=False):
    return default_value if type(value) is Undefined or (boolean and not value) else value


def bounded(symbol: str, compute: Callable) -> Callable:
    def checked(left, right):
        BUDGET.check_binary(symbol, left, right)
        return BUDGET.made(compute(left, right))

    return checked


def weighed(compute: Callable) -> Callable:
    def checked(left, right):
        BUDGET.weigh(left, right)
        return compute(left, right)

    return checked


OPERATORS: dict[type, Callable] = {
    ast.Add: bounded("+", operator.add),
    ast.Sub: bounded("-", operator.sub),
    ast.Mult: bounded("*", operator.mul),
    ast.Mod: bounded("%", operator.mod),
    ast.MatMult: lambda left, right: BUDGET.concat([left, right]),  # Jinja's ~
    ast.Eq: weighed(operator.eq),
    ast.NotEq: weighed(operator.ne),
    ast.Lt: weighed(operator.lt),
    ast.LtE: weighed(operator.le),
    ast.Gt: weighed(operator.gt),
    ast.GtE: weighed(operator.ge),
    ast.In: lambda left, right: left in BUDGET.check_member(left, right),
    ast.NotIn: lambda left, right: left not in BUDGET.check_member(left, right),
    ast.Not: operator.not_,
    ast.USub: operator.neg,
}
FILTERS: dict[str, Callable] = {
    "trim": lambda value, chars=None: BUDGET.check_pairs(str(value), chars).strip(chars),
    "upper": lambda value: str(value).upper(),
    "lower": lambda value: str(value).lower(),
    "length": len,
    "string": str,
    "list": sequence,
    "default": default,
    "join": lambda value, d="": BUDGET.join(list(value), d),
    "replace": BUDGET.replace,
    "tojson": BUDGET.tojson,
    "items": lambda value: [] if type(value) is Undefined else sequence(value.items()),
    "first": lambda value: edge(value, 0),
    "last": lambda value: edge(value, -1),
}
TESTS: dict[str, Callable] = {
    "defined": lambda value: type(value) is not Undefined,
    "undefined": lambda value: type(value) is Undefined,
    "none": lambda value: value is None,
    "string": lambda value: isinstance(value, str),
    "mapping": lambda value: isinstance(value, dict),
    "sequence": lambda value: hasattr(value, "__len__"),
    "iterable": lambda value: hasattr(value, "__iter__"),
    "number": lambda value: isinstance(value, (int, float)),
    "boolean": lambda value: isinstance(value, bool),
    "true": lambda value: value is True,
    "false": lambda value: value is False,
}
# As template_fast.py calls them; each takes the value first.
APPLIED: dict[str, Callable] = {
    **{f"__f_{name}": apply for name, apply in FILTERS.items()},
    **{f"__is_{name}": test for name, test in TESTS.items()},
    **{f"__not_{name}": lambda *args, test=test: not test(*args) for name, test in TESTS.items()},
}
# They look at no more than the value itself, or pay for what they do.
CHEAP = frozenset(
    APPLIED[name]
    for name in APPLIED
    if name[:4] != "__f_" or name[4:] in ("length", "default", "join", "replace", "tojson")
)
KEYWORDS = frozenset(("indent", "boolean"))  # that they take; jinja2 knows more
# Of the items of a for and the index of one: `loop` there.
LOOP: dict[str, Callable] = {
    "index": lambda items, at: at + 1,
    "index0": lambda items, at: at,
    "first": lambda items, at: at == 0,
    "last": lambda items, at: at + 1 == len(items),
    "length": lambda items, at: len(items),
    "revindex": lambda items, at: len(items) - at,
    "revindex0": lambda items, at: len(items) - at - 1,
    "previtem": lambda items, at: items[at - 1] if at else Undefined("there is no previous item"),
    "nextitem": lambda items, at: items[at + 1] if at + 1 < len(items) else Undefined("there is no next item"),
}
FUNCTIONS: dict[str, Callable] = {
    "namespace": Namespace,
    "range": BUDGET.range,
    "raise_exception": raise_exception,
    "strftime_now": strftime_now,
}
