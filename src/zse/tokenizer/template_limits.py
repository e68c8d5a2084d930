"""What bounds a chat template while it renders, whoever runs it: steps, CPU time, sizes; and the functions it may
call."""

import re
import threading
import time
from collections.abc import Iterable

from zse.errors import RequestError
from zse.lazy import datetime, json

REFUSED, FAILED = "chat_template_refused", "chat_template_failed"  # by the template; by what it does with the messages
MAX_OUTPUT_BYTES = 4 << 20
MAX_STEPS = 1_000_000
MAX_SECONDS = 0.1  # of CPU time of the thread: a busy machine must not refuse requests
# More for what the request brings: public templates take 10 to 100 us for each value of a history, and some go through
# all messages again for each one. An agent's 100 calls with their results are 1,200 values.
SECONDS_A_VALUE, STEPS_A_VALUE = 0.0005, 5000
MOST_VALUES = 4000  # that count: 2.1 s and 21 million steps
MAX_INTEGER = 1_000_000  # of literals
MAX_RANGE = 100_000
# Names of Python's inner workings; no chat template has a reason to write them.
HIDDEN_ATTRIBUTES = frozenset(
    """mro func_globals func_code func_closure im_class im_func im_self gi_frame gi_code
    cr_frame cr_code ag_frame ag_code f_globals f_locals f_builtins f_code f_back tb_frame tb_next co_code format
    format_map""".split()
)

METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        """capitalize count endswith find index isalnum isalpha isdigit islower isnumeric isspace isupper
        join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split
        splitlines startswith strip swapcase title upper""".split()
    ),
    dict: frozenset(("get", "items", "keys", "values")),
    list: frozenset(("count", "index")),
    tuple: frozenset(("count", "index")),
}
METHOD_NAMES = frozenset().union(*METHODS.values())


def too_much(what: str, advice: str = "send shorter messages") -> RequestError:
    return RequestError(
        f"rendering the model's chat template takes too much: {what}; {advice}",
        code="chat_template_limit",
        param="messages",
    )


def cannot_render(reason: object) -> RequestError:
    return RequestError(
        f"the model's chat template cannot render these messages: {reason}", code=FAILED, param="messages"
    )


class Budget(threading.local):
    """What the render in progress on this thread may still do. Its methods raise RequestError (400)."""

    steps = most_steps = num_messages = num_tools = 0
    seconds = deadline = 0.0

    def start(self, variables: dict) -> None:
        messages, tools = variables.get("messages") or (), variables.get("tools") or ()
        self.num_messages, self.num_tools = len(messages), len(tools)
        count = min(str((messages, tools)).count("': "), MOST_VALUES)  # entries of dicts, more or less
        self.seconds, self.most_steps = MAX_SECONDS + SECONDS_A_VALUE * count, MAX_STEPS + STEPS_A_VALUE * count
        self.steps, self.deadline = self.most_steps, time.thread_time() + self.seconds

    def spend(self, steps: int = 1) -> None:
        self.steps -= steps
        if self.steps < 0 or (self.steps & 63 == 0 or steps > 8) and time.thread_time() > self.deadline:
            raise too_much(
                f"more than {self.most_steps} steps or {self.seconds:.2g} s for {self.num_messages} messages and "
                f"{self.num_tools} tools",
                "leave out the oldest messages with their tool calls, or tools that are not needed",
            )

    def check_size(self, size: int) -> None:
        if size > MAX_OUTPUT_BYTES:
            raise too_much(f"a value of more than {MAX_OUTPUT_BYTES} bytes")

    def check_binary(self, operator: str, left, right) -> None:
        """Before left `operator` right is computed."""
        self.spend()
        if operator == "*":
            value, times = (left, right) if isinstance(right, int) else (right, left)
            if isinstance(value, (str, list, tuple)) and isinstance(times, int):
                self.check_size(len(value) * max(times, 0))
        elif operator == "+" and isinstance(left, (str, list, tuple)):
            self.check_size(len(left) + (len(right) if isinstance(right, (str, list, tuple)) else 0))
        elif operator == "%" and not isinstance(left, (int, float)):
            raise cannot_render("formatting with % is not supported")
        if isinstance(left, int) and isinstance(right, int) and max(left.bit_length(), right.bit_length()) > 128:
            raise too_much("a number of more than 128 bits")

    def call(self, function, args, kwargs):
        """A call; the methods of a text that could make much of little are bounded."""
        self.spend()
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str) and name == "replace":
            return self.replace(owner, *args)
        if isinstance(owner, str) and name == "join":
            return self.join(list(*args), owner)
        return function(*args, **kwargs)

    def concat(self, parts) -> str:
        """`~`: the values as text, joined."""
        parts = [part if isinstance(part, str) else str(part) for part in parts]
        self.spend()
        self.check_size(sum(map(len, parts)))
        return "".join(parts)

    def join(self, items, separator="") -> str:
        self.spend(1 + len(items))
        items = [item if isinstance(item, str) else str(item) for item in items]
        self.check_size(sum(map(len, items)) + len(str(separator)) * len(items))
        return str(separator).join(items)

    def replace(self, text, old, new, count=-1) -> str:
        text, old, new = str(text), str(old), str(new)
        count = -1 if count is None else count
        self.spend()
        found = text.count(old) if old else len(text) + 1
        self.check_size(len(text) + max(0, len(new) - len(old)) * (min(found, count) if count >= 0 else found))
        return text.replace(old, new, count)

    def range(self, *args) -> range:
        numbers = range(*args)
        if len(numbers) > MAX_RANGE:
            raise too_much(f"a range of more than {MAX_RANGE} numbers")
        return numbers


def rendered(parts: Iterable[str], budget: Budget, variables: dict) -> str:
    """The text that a template makes part by part of `variables`. RequestError (400) when it refuses, fails, or takes too much."""
    texts, size = [], 0
    budget.start(variables)
    try:
        for text in parts:
            budget.spend()
            size += len(text)
            budget.check_size(size)
            texts.append(text)
    except RecursionError:
        raise too_much("values or macros nested too deeply") from None
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise cannot_render(error) from None
    return "".join(texts)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """As transformers': no HTML escapes, and text is not escaped to ASCII."""
    indent = min(indent, 16) if isinstance(indent, int) else indent[:16] if isinstance(indent, str) else None
    return json.dumps(
        value,
        ensure_ascii=bool(ensure_ascii),
        indent=indent,
        separators=tuple(separators) if separators else None,
        sort_keys=bool(sort_keys),
    )


def raise_exception(message=""):
    raise RequestError(f"the model's chat template refuses these messages: {message}", code=REFUSED, param="messages")


def strftime_now(format="%Y-%m-%d"):
    if len(format) > 64 or re.search(r"%[-_0^#+]*\d", format):  # "%999999999d" pads
        raise cannot_render("it asks for the time in a format that is not supported")
    return datetime.datetime.now().strftime(format)
