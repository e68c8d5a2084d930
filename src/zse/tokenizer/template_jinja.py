"""Jinja for chat templates: a sandbox that is narrower than jinja2's own, and that counts what a template does.

A template comes with a model file, so it is a stranger's program. check() refuses at load whatever no chat template
needs (an allow-list over the syntax tree: statements, filters, tests, methods, names that may be called); at render
time values have no attributes beyond short lists, and steps, CPU time and sizes are bounded. Importing this takes 20 to 26 ms
of a core, nearly all of it jinja2: it is imported for templates that template_fast.py does not know.
"""

import functools

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

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
    tojson,
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
ALL_METHODS = METHOD_NAMES | CHANGING | {"cycle", "changed"}


class Generation(Extension):
    """`{% generation %}`: marks what the assistant wrote, for training; here only a block."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(["name:endgeneration"], drop_needle=True), lineno=line)


class _Counted:
    """An iterable whose every item costs a step."""

    def __init__(self, budget: Budget, items):
        self._budget, self._items = budget, items

    def __iter__(self):
        self._budget.spend(64)
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
        bounded = {
            "join": self._join,
            "replace": self.budget.replace,
            "tojson": tojson,
            "from_json": lambda text: json.loads(text),
            "indent": self._indent,
        }
        filters = {name: bounded.get(name) or self.filters.get(name) for name in FILTERS}
        self.filters = {name: self._counted_filter(function) for name, function in filters.items()}
        self.filters["_counted"] = lambda items: _Counted(self.budget, items)
        self.filters["_concat"] = self.budget.concat
        self.tests = {name: self.tests[name] for name in TESTS}

    # --- what values have ----------------------------------------------------------------------------------------

    def getattr(self, obj, attribute):
        """obj.attribute: a method comes before an entry of a dict, as in jinja2."""
        if isinstance(obj, dict) and attribute in METHODS[dict]:
            return getattr(obj, attribute)
        return self.getitem(obj, attribute)

    def getitem(self, obj, argument):
        """obj[argument]: an entry, else one of the attributes that templates have."""
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
                return obj[argument]
            except (LookupError, TypeError):
                pass
        if isinstance(obj, Undefined):
            return getattr(obj, argument)
        return self.undefined(obj=obj, name=argument)

    # --- what may be done with them ------------------------------------------------------------------------------

    def call(self, context, obj, *args, **kwargs):
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str) and name in ("replace", "join"):
            return self.budget.call(obj, args, {})
        self.budget.spend()
        is_method = isinstance(owner, (str, dict, list, tuple, LoopContext))
        if not is_method and not isinstance(obj, Macro) and obj not in self.globals.values():
            raise cannot_render(f"{name or 'a value'} is called, which is not a function")
        return super().call(context, obj, *args, **kwargs)

    def is_safe_callable(self, obj) -> bool:
        return True  # call() decided

    def call_binop(self, context, operator, left, right):
        self.budget.check_binary(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _counted_filter(self, function):
        # functools.wraps copies jinja2's marks (pass_environment, pass_eval_context) along with the name.
        @functools.wraps(function)
        def counted(*args, **kwargs):
            self.budget.spend(1 + sum(len(value) for value in args if isinstance(value, (list, tuple, dict, range))))
            result = function(*args, **kwargs)
            if isinstance(result, (str, list, tuple)):
                self.budget.check_size(len(result))
            return result

        return counted

    def _join(self, value, d="", attribute=None):
        items = list(_Counted(self.budget, value))
        return self.budget.join(items if attribute is None else [self.getitem(item, attribute) for item in items], d)

    def _indent(self, s, width=4, first=False, blank=False):
        pad = width if isinstance(width, str) else " " * min(int(width), 64)
        lines = (str(s) + "\n").splitlines()
        self.budget.check_size(len(s) + len(pad) * (len(lines) + 1))
        rest = [pad + line if line or blank else line for line in lines[1:]]
        return (pad if first else "") + "\n".join([*lines[:1], *rest])


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
    """Loops and `~` go through counted filters."""

    def rewrite(node):
        for field, value in node.iter_fields():
            if isinstance(value, nodes.Node):
                setattr(node, field, rewrite(value))
            elif isinstance(value, list):
                setattr(node, field, [rewrite(item) if isinstance(item, nodes.Node) else item for item in value])
        if isinstance(node, nodes.For):
            node.iter = _filter("_counted", node.iter)
        elif isinstance(node, nodes.Concat):
            return _filter("_concat", nodes.List(node.nodes, lineno=node.lineno))
        return node

    def _filter(name, argument):
        return nodes.Filter(argument, name, [], [], None, None, lineno=argument.lineno)

    return rewrite(tree)


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
        except RecursionError:
            raise ValueError("line 1: nested too deeply") from None

    def render(self, variables: dict) -> str:
        """The text. RequestError (400) when the template refuses, fails, or takes too much."""
        try:
            return rendered(self._template.generate(variables), self._environment.budget, variables)
        except TemplateError as error:
            raise cannot_render(error) from None
