"""Jinja for chat templates: a sandbox that is narrower than jinja2's own, and that counts what a template does.

A template comes with a model file, so it is a stranger's program. check() refuses at load whatever no chat template
needs (an allow-list over the syntax tree: statements, filters, tests, methods, names that may be called); at render
time values have no attributes beyond short lists, and steps, CPU time and sizes are bounded: instrument() and
Environment put Budget's questions before every operation. Importing this takes 20 to 26 ms of a core, nearly all of it
jinja2: it is imported for templates that template_fast.py does not know."""

import functools
from collections.abc import Iterator

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.filters import do_round, do_sum
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

from zse.lazy import json
from zse.tokenizer.template_limits import (
    HIDDEN_ATTRIBUTES,
    MAX_INTEGER,
    METHOD_NAMES,
    METHODS,
    Budget,
    cannot_render,
    raise_exception,
    rendered,
    strftime_now,
    too_much,
)

NODES = frozenset(
    getattr(nodes, name)
    for name in """Template Output TemplateData If For Macro CallBlock FilterBlock Assign AssignBlock With Scope Continue Break
    Name NSRef Const List Tuple Dict Pair Keyword Getattr Getitem Slice Call Filter Test CondExpr And Or Not
    Compare Operand Add Sub Mul Div FloorDiv Mod Neg Pos Concat""".split()
)
FILTERS = frozenset(
    """abs capitalize count d default dictsort e escape first float from_json indent int items join last
    length list lower map max min reject rejectattr replace reverse round safe select selectattr sort string sum title
    tojson trim truncate unique upper wordcount""".split()
)
TESTS = frozenset(
    """boolean defined divisibleby eq equalto even false float ge greaterthan gt in integer iterable le
    lessthan lower lt mapping ne none number odd sameas sequence string true undefined upper == != < <= > >=""".split()
)
FUNCTIONS = frozenset(("range", "namespace", "dict", "raise_exception", "strftime_now", "caller"))
HIDDEN_NAMES = frozenset(("self", "cycler", "joiner", "lipsum", "super"))
LOOP = frozenset(
    """changed cycle depth depth0 first index index0 last length nextitem previtem revindex
    revindex0""".split()
)
# Values cannot be changed; templates that try in some branch are refused when they get there.
CHANGING = frozenset(("append", "extend", "insert", "pop", "update"))
# Filters and tests that look at no more than the value itself, or pay for what they do.
CHEAP_FILTERS = frozenset("count d default first items join length replace tojson indent safe".split())
CHEAP_TESTS = frozenset(
    """boolean callable defined even false float integer iterable lower mapping none number odd sameas sequence string true
    undefined upper""".split()
)
MAX_PRECISION = 100  # digits that a number is rounded to
SORTS = frozenset(("dictsort", "sort"))
TITLE_STEPS = 100  # for 64 characters: it runs an expression for each word
BUFFERED = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)  # the text in them becomes a value
ALL_METHODS = METHOD_NAMES | CHANGING | {"cycle", "changed"}


class Generation(Extension):
    """`{% generation %}`: marks what the assistant wrote, for training; here only a block."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(["name:endgeneration"], drop_needle=True), lineno=line)


class _Counted:
    """An iterable whose every item costs a step."""

    def __init__(self, budget: Budget, items, first: int = 64):
        """first: what it costs to begin."""
        self._budget, self._items, self._first = budget, items, first

    def __iter__(self):
        self._budget.spend(self._first)
        for item in self._items:
            self._budget.spend()
            yield item

    def __len__(self) -> int:
        return len(self._items)


class Environment(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox with short lists of attributes, counted loops and calls, and bounded values."""

    intercepted_binops = frozenset("+ * % / // -".split())

    def __init__(self):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            cache_size=0,
            extensions=["jinja2.ext.loopcontrols", Generation],
        )
        self.budget = Budget()
        self.globals = {
            "range": self.budget.range,
            "namespace": Namespace,
            "dict": dict,
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
        }
        own = {
            "join": self._join,
            "replace": self.budget.replace,
            "tojson": self.budget.tojson,
            "from_json": self._from_json,
            "indent": self._indent,
            "round": self._round,
            "sum": self._sum,
            "trim": self._trim,
        }
        for name in FILTERS:
            self.filters[name] = self._counted(name, own.get(name) or self.filters[name], CHEAP_FILTERS)
        self.filters = {name: self.filters[name] for name in FILTERS}
        self.filters.update(
            _items=lambda items: _Counted(self.budget, items),
            _concat=self.budget.concat,
            _weighed=self._weighed,
            _member=lambda container: self._weighed(None if isinstance(container, dict) else container) or container,
            _made=self.budget.made,
            _text=pass_context(lambda context, value: self.budget.made(self.budget.shown(value))),  # is never folded
        )
        self.tests = {name: self._counted(name, self.tests[name], CHEAP_TESTS) for name in TESTS}
        self.finalize = self.budget.shown

    # --- what values have ----------------------------------------------------------------------------------------

    def getattr(self, obj, attribute):
        """obj.attribute: a method comes before an entry of a dict, as in jinja2."""
        if isinstance(obj, dict) and attribute in METHODS[dict]:
            return getattr(obj, attribute)
        return self.getitem(obj, attribute)

    def getitem(self, obj, argument):
        """obj[argument]: an entry, else one of the attributes that templates have."""
        self.budget.weigh(argument)  # it is hashed, or written into an error
        if isinstance(argument, str):
            if isinstance(obj, dict) and argument in obj:
                return obj[argument]
            if isinstance(obj, Namespace) and not argument.startswith("_"):
                return getattr(obj, argument, self.undefined(obj=obj, name=argument))
            if isinstance(obj, LoopContext) and argument in LOOP:
                return getattr(obj, argument)
            for kind, names in METHODS.items():
                if isinstance(obj, kind) and argument in names:
                    return getattr(obj, argument)
        elif isinstance(obj, Undefined):
            return obj[argument]
        elif isinstance(obj, (dict, list, tuple, str)):
            try:
                return self.budget.result(obj[argument], obj) if isinstance(argument, slice) else obj[argument]
            except (LookupError, TypeError):
                pass
        if isinstance(obj, Undefined):
            return getattr(obj, argument)
        return self.undefined(obj=obj, name=argument)

    # --- what may be done with them ------------------------------------------------------------------------------

    def call(self, context, obj, *args, **kwargs):
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, (str, dict, list, tuple)):
            own = {key: value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")}  # jinja2's
            return self.budget.call(obj, args, own)
        self.budget.spend()
        if isinstance(obj, Macro):
            return super().call(context, obj, *args, **kwargs)
        if not isinstance(owner, LoopContext) and obj not in self.globals.values():
            raise cannot_render(f"{name or 'a value'} is called, which is not a function")
        self.budget.weigh(*args, *kwargs.values())
        return self.budget.made(super().call(context, obj, *args, **kwargs))

    def is_safe_callable(self, obj) -> bool:
        return True  # call() decided

    def call_binop(self, context, operator, left, right):
        self.budget.check_binary(operator, left, right)
        return self.budget.made(super().call_binop(context, operator, left, right))

    def _counted(self, name, function, cheap):
        """A filter or test that pays for what it goes through and what it makes."""

        # functools.wraps copies jinja2's marks (pass_environment, pass_eval_context) along with the name.
        @functools.wraps(function)
        def counted(*args, **kwargs):
            self.budget.spend()
            if name in cheap:
                return function(*args, **kwargs)
            steps = self.budget.weigh(*args, *kwargs.values())
            if name in SORTS:
                self.budget.spend(steps * steps.bit_length())
            elif name == "title":
                self.budget.spend(steps * TITLE_STEPS)
            result = function(*args, **kwargs)
            if isinstance(result, Iterator):
                return iter(_Counted(self.budget, result, 1))
            return self.budget.result(result, *args)

        return counted

    def _weighed(self, value):
        self.budget.weigh(value)
        return value

    def _trim(self, value, chars=None):
        return self.budget.check_pairs(self.budget.shown(value), chars).strip(chars)

    def _from_json(self, text):
        self.budget.check_json(text)
        return json.loads(text)

    def _round(self, value, precision=0, method="common"):
        if not isinstance(precision, int) or abs(precision) > MAX_PRECISION:
            raise too_much(f"rounding to {precision} digits")
        return do_round(value, precision, method)

    def _sum(self, iterable, attribute=None, start=0):
        if not isinstance(start, (int, float)):
            raise cannot_render("sum adds numbers only")
        return do_sum(self, iterable, attribute, start)

    def _join(self, value, d="", attribute=None):
        items = list(_Counted(self.budget, value, 1))
        return self.budget.join(items if attribute is None else [self.getitem(item, attribute) for item in items], d)

    def _indent(self, s, width=4, first=False, blank=False):
        pad = width if isinstance(width, str) else " " * min(int(width), 64)
        text = self.budget.shown(s)
        self.budget.spend(1 + text.count("\n"))
        lines = (text + "\n").splitlines()
        self.budget.check_size(len(text) + len(pad) * (len(lines) + 1))
        rest = [pad + line if line or blank else line for line in lines[1:]]
        return self.budget.made((pad if first else "") + "\n".join([*lines[:1], *rest]))


def check(tree: nodes.Template) -> None:
    """ValueError("line 3: ...") unless everything in the template is on the lists above."""
    macros = {macro.name for macro in tree.find_all(nodes.Macro)}

    def refuse(node, why):
        raise ValueError(f"line {node.lineno}: {why}")

    def visit(node, is_called=False):
        if type(node) not in NODES:
            refuse(node, f"{type(node).__name__.lower()} is not supported in chat templates")
        if isinstance(node, nodes.Name):
            if node.name.startswith("__") or node.name in HIDDEN_NAMES:
                refuse(node, f"the name {node.name!r} is not allowed")
        elif isinstance(node, (nodes.Getattr, nodes.Keyword, nodes.NSRef)):
            name = node.attr if not isinstance(node, nodes.Keyword) else node.key
            if name.startswith("_") or name in HIDDEN_ATTRIBUTES:
                refuse(node, f"the attribute {name!r} is not allowed")
        elif isinstance(node, nodes.Const):
            _check_constant(node, refuse)
        elif isinstance(node, nodes.Filter) and node.name not in FILTERS:
            refuse(node, f"the filter {node.name!r} is not supported")
        elif isinstance(node, nodes.Test) and node.name not in TESTS:
            refuse(node, f"the test {node.name!r} is not supported")
        elif isinstance(node, nodes.For) and node.recursive:
            refuse(node, "recursive loops are not supported")
        elif isinstance(node, nodes.Macro) and (node.name.startswith("__") or node.name in FUNCTIONS):
            refuse(node, f"a macro named {node.name!r} is not allowed")
        elif isinstance(node, nodes.Call):
            callee = node.node
            if isinstance(callee, nodes.Name):
                if callee.name not in FUNCTIONS and callee.name not in macros:
                    refuse(node, f"{callee.name!r} is not a function of chat templates")
            elif not isinstance(callee, nodes.Getattr):
                refuse(node, "only functions, macros and methods can be called")
            elif callee.attr not in ALL_METHODS:
                refuse(node, f"the method {callee.attr!r} is not supported")
            if node.dyn_args is not None or node.dyn_kwargs is not None:
                refuse(node, "* and ** arguments are not supported")
        for child in node.iter_child_nodes():
            visit(child)

    visit(tree)


def _check_constant(node, refuse) -> None:
    value = node.value
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_INTEGER:
        refuse(node, f"the number {value} is too large")
    # A name such as __class__, or a part of one to be put together later.
    if isinstance(value, str) and "__" in value and value.isascii():
        word = value.strip()
        if word.replace("_", "a").isalnum() and (word.startswith("__") or word.endswith("__")):
            refuse(node, f"the string {value!r} is not allowed")


def instrument(tree: nodes.Template) -> nodes.Template:
    """Loops, `~`, comparisons, values that are written out and text that becomes a value go through Budget's
    filters."""

    def rewrite(node, is_buffered: bool):
        is_buffered = is_buffered or isinstance(node, BUFFERED)
        for field, value in node.iter_fields():
            if isinstance(value, nodes.Node):
                setattr(node, field, rewrite(value, is_buffered))
            elif isinstance(value, list):
                items = [rewrite(item, is_buffered) if isinstance(item, nodes.Node) else item for item in value]
                setattr(node, field, items)
        if isinstance(node, nodes.For):
            node.iter = _filter("_items", node.iter)
        elif isinstance(node, nodes.Concat):
            return _filter("_concat", nodes.List(node.nodes, lineno=node.lineno))
        elif isinstance(node, nodes.Compare):
            node.expr = _filter("_weighed", node.expr)
        elif isinstance(node, nodes.Operand):
            node.expr = _filter("_member" if node.op in ("in", "notin") else "_weighed", node.expr)
        elif isinstance(node, nodes.Pair):
            node.key = _filter("_weighed", node.key)
        elif isinstance(node, (nodes.List, nodes.Dict)) or isinstance(node, nodes.Tuple) and node.ctx == "load":
            return _filter("_made", node)
        elif isinstance(node, nodes.Output) and is_buffered:
            node.nodes = [_filter("_text", _constant(item)) for item in node.nodes]
        return node

    def _constant(node):
        return nodes.Const(node.data, lineno=node.lineno) if isinstance(node, nodes.TemplateData) else node

    def _filter(name, argument):
        return nodes.Filter(argument, name, [], [], None, None, lineno=argument.lineno)

    return rewrite(tree, False)


class JinjaTemplate:
    """A compiled template. ValueError("line 3: ...") when it is refused."""

    def __init__(self, source: str):
        self._environment = Environment()
        try:
            tree = self._environment.parse(source)
            check(tree)
            self.literals = [node.data for node in tree.find_all(nodes.TemplateData)]
            self.literals += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
            self._template = self._environment.from_string(instrument(tree))
        except TemplateError as error:
            raise ValueError(f"line {getattr(error, 'lineno', 1)}: {error.message}") from None
        except (RecursionError, SyntaxError, MemoryError):  # the last two from Python's parser
            raise ValueError("line 1: nested too deeply") from None

    def render(self, variables: dict) -> str:
        """The text. RequestError (400) when the template refuses, fails, or takes too much."""
        try:
            return rendered(self._template.generate(variables), self._environment.budget, variables)
        except TemplateError as error:
            raise cannot_render(error) from None
