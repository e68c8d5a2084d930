"""What bounds a chat template while it renders, whoever runs it: steps, CPU time, sizes; and the functions it may
call.

No operation escapes: one that goes through values (compares, prints, hashes, sorts) pays for all that is inside them
before it begins (weigh), as often as it meets them, and what it makes is paid for by its size (made). So a render ends
soon after its time is over, and holds no more than its bytes.
"""

import re
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

from zse.errors import RequestError
from zse.lazy import datetime, json

REFUSED, FAILED = "chat_template_refused", "chat_template_failed"  # by the template; by what it does with the messages
MAX_OUTPUT_BYTES = 4 << 20  # of a text, and of the output
MAX_MADE_BYTES = (
    256 << 20
)  # of all values that one render makes, and BYTES_A_CHARACTER more for what the request brings
BYTES_A_CHARACTER = 64
ENTRY_BYTES = 64  # of a list, tuple or dict, with the small value in it
MAX_STEPS = 1_000_000
STEPS_A_LOOK = 32  # between two looks at the clock, at most, but for what one operation takes at once
MAX_SECONDS = 0.1  # of CPU time of the thread: a busy machine must not refuse requests
# More for what the request brings: public templates take 10 to 100 us for each value of a history, and some go through
# all messages again for each one. An agent's 100 calls with their results are 1,200 values.
SECONDS_A_VALUE, STEPS_A_VALUE = 0.0005, 5000
MOST_VALUES = 4000  # that count: 2.1 s and 21 million steps
# Seconds are those of a core that takes USUAL_S for TURNS of slowness(); some take two and a half times as long.
TURNS, USUAL_S, MOST_SLOWNESS = 100_000, 0.003, 4.0
MAX_INTEGER = 1_000_000  # of literals
MAX_RANGE = 100_000
MAX_DEPTH = 1000  # that json.dumps goes down
MAX_REASON = 1000  # characters of an error
MAX_BITS = 1024  # of what `int` makes of a text
_LISTS: Any = (list, tuple, type({}.keys()), type({}.values()), type({}.items()))
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
# Those that may compare each character of a text with each one of another: strip does, and Python searches backwards so
# (forwards in linear time).
PAIRED = frozenset("strip lstrip rstrip rfind rindex rsplit rpartition".split())


def too_much(what: str, advice: str = "send shorter messages") -> RequestError:
    return RequestError(
        f"rendering the model's chat template takes too much: {what}; {advice}",
        code="chat_template_limit",
        param="messages",
    )


def cannot_render(reason: object) -> RequestError:
    said = str(reason)[:MAX_REASON]
    return RequestError(
        f"the model's chat template cannot render these messages: {said}", code=FAILED, param="messages"
    )


def slowness() -> float:
    """How many times as long this core takes for a loop now as where the seconds were chosen, from 1 to MOST_SLOWNESS;
    shared machines change it within minutes."""
    start = time.thread_time()
    for _ in range(TURNS):
        start += 0
    return min(max((time.thread_time() - start) / USUAL_S, 1.0), MOST_SLOWNESS)


class Budget(threading.local):
    """What the render in progress on this thread may still do. Its methods raise RequestError (400)."""

    steps = most_steps = bytes = num_messages = num_tools = 0
    looks_at = 0  # steps left from which on the time is looked at
    usual_seconds = seconds = deadline = 0.0

    def start(self, variables: dict) -> None:
        messages, tools = variables.get("messages") or (), variables.get("tools") or ()
        self.num_messages, self.num_tools = len(messages), len(tools)
        given = str((messages, tools))
        count = min(given.count("': "), MOST_VALUES)  # entries of dicts, more or less
        self.usual_seconds = self.seconds = MAX_SECONDS + SECONDS_A_VALUE * count
        self.most_steps = MAX_STEPS + STEPS_A_VALUE * count
        self.steps = self.looks_at = self.most_steps
        self.deadline = time.thread_time() + self.seconds
        self.bytes = MAX_MADE_BYTES + BYTES_A_CHARACTER * len(given)

    def spend(self, steps: int = 1) -> None:
        self.steps -= steps
        if self.steps < self.looks_at:
            self.looks_at = max(self.steps - STEPS_A_LOOK, 0)
            if self.steps < 0 or self._is_late():
                raise too_much(
                    f"more than {self.most_steps} steps or {self.seconds:.2g} s for {self.num_messages} messages and "
                    f"{self.num_tools} tools",
                    "leave out the oldest messages with their tool calls, or tools that are not needed",
                )

    def _is_late(self) -> bool:
        if time.thread_time() <= self.deadline:
            return False
        # Only who would be refused pays for knowing the core.
        seconds = max(self.seconds, self.usual_seconds * slowness())
        self.deadline += seconds - self.seconds
        self.seconds = seconds
        return time.thread_time() > self.deadline

    def weigh(self, *values) -> int:
        """Pay for all that is inside `values`: a step each, and for 64 characters. What stands in several places counts
        in each: a comparison meets it in each. Returns the steps."""
        steps, before, inside = 0, self.steps, []
        for value in values:
            if type(value) is str:
                steps += len(value) >> 6
            elif value is not None and type(value) is not bool and type(value) is not int:
                inside.append(value)
        while inside:
            value = inside.pop()
            if isinstance(value, str):
                steps += 1 + (len(value) >> 6)
            elif isinstance(value, _LISTS):
                steps += 1 + len(value)
                if steps <= self.steps:
                    inside.extend(value)
            elif isinstance(value, dict):
                inside += value.keys(), value.values()
            elif type(value) is slice:
                inside += value.start, value.stop, value.step
            else:
                steps += len(value) if type(value) is range else 1
                if type(value).__name__ == "Namespace":  # jinja2's
                    inside.append(value._Namespace__attrs)
            if steps > 4096:  # the deadline is looked at
                self.spend(steps)
                steps = 0
        if steps:
            self.spend(steps)
        return before - self.steps

    def made(self, value):
        """The value, which may be new, with its size paid for."""
        kind = type(value)
        if kind is bool or value is None:
            return value
        if kind is int:
            if value.bit_length() > MAX_BITS:
                raise too_much(f"a number of more than {MAX_BITS} bits")
        elif isinstance(value, str):
            self.check_size(len(value))
            self._take(sys.getsizeof(value), len(value) >> 6)
        elif isinstance(value, (list, tuple, dict)):
            self._take(ENTRY_BYTES * (1 + len(value)), len(value) >> 1)
        return value

    def _take(self, size: int, steps: int) -> None:
        self.bytes -= size
        if self.bytes < 0:
            raise too_much(f"more than {MAX_MADE_BYTES >> 20} MiB of values")
        if steps:
            self.spend(steps)

    def check_size(self, size: int) -> None:
        if size > MAX_OUTPUT_BYTES:
            raise too_much(f"a value of more than {MAX_OUTPUT_BYTES} bytes")

    def _check_length(self, value, length: int) -> None:
        """Before a text or a sequence like `value` with `length` items is made."""
        if isinstance(value, str):
            self.check_size(length)
        elif ENTRY_BYTES * length > self.bytes:
            raise too_much(f"more than {MAX_MADE_BYTES >> 20} MiB of values")

    def check_binary(self, operator: str, left, right) -> None:
        """Before left `operator` right is computed."""
        self.spend()
        if operator == "*":
            value, times = (left, right) if isinstance(right, int) else (right, left)
            if isinstance(value, (str, list, tuple)) and isinstance(times, int):
                self._check_length(value, len(value) * max(times, 0))
        elif operator == "+" and isinstance(left, (str, list, tuple)):
            self._check_length(left, len(left) + (len(right) if isinstance(right, (str, list, tuple)) else 0))
        elif operator == "%" and not isinstance(left, (int, float)):
            raise cannot_render("formatting with % is not supported")
        if isinstance(left, int) and isinstance(right, int) and max(left.bit_length(), right.bit_length()) > 128:
            raise too_much("a number of more than 128 bits")

    def check_member(self, item, container):
        """Before `item in container`; the container."""
        self.weigh(item, None if isinstance(container, dict) else container)
        return container

    def call(self, function, args, kwargs):
        """A function or method of FUNCTIONS, METHODS or the filters; those that could make much of little are
        bounded."""
        self.spend()
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str) and name == "replace":
            return self.replace(owner, *args)
        if isinstance(owner, str) and name == "join":
            return self.join(list(*args), owner)
        if isinstance(owner, str) and name in PAIRED and (args or kwargs):
            self.check_pairs(owner, *args[:1], *kwargs.values())
        self.weigh(None if isinstance(owner, dict) else owner, *args, *kwargs.values())
        return self.result(function(*args, **kwargs), owner, *args)

    def result(self, value, *given):
        """What an operation gives; paid for unless it is one of the values that it was given."""
        return value if any(value is one for one in given) else self.made(value)

    def check_pairs(self, text, *others):
        """Before a method of PAIRED. The text."""
        if isinstance(text, str):
            self.spend(1 + sum(len(text) * len(other) // 4096 for other in others if isinstance(other, str)))
        return text

    def shown(self, value) -> str:
        """`{{ value }}`: the value as text."""
        if type(value) is str:
            return value
        self.weigh(value)
        return self.made(str(value))

    def concat(self, parts) -> str:
        """`~`: the values as text, joined."""
        parts = [self.shown(part) for part in parts]
        self.spend()
        self.check_size(sum(map(len, parts)))
        return self.made("".join(parts))

    def join(self, items, separator="") -> str:
        self.spend(1 + len(items))
        items, separator = [self.shown(item) for item in items], self.shown(separator)
        self.check_size(sum(map(len, items)) + len(separator) * len(items))
        return self.made(separator.join(items))

    def replace(self, text, old, new, count=-1) -> str:
        text, old, new = self.shown(text), self.shown(old), self.shown(new)
        count = -1 if count is None else count
        self.spend(1 + (len(text) >> 6))
        found = text.count(old) if old else len(text) + 1
        self.check_size(len(text) + max(0, len(new) - len(old)) * (min(found, count) if count >= 0 else found))
        return self.result(text.replace(old, new, count), text)

    def range(self, *args) -> range:
        numbers = range(*args)
        if len(numbers) > MAX_RANGE:
            raise too_much(f"a range of more than {MAX_RANGE} numbers")
        return numbers

    def check_json(self, text) -> None:
        """Before json.loads: each character could be a value."""
        if isinstance(text, str):
            self._take(ENTRY_BYTES // 2 * len(text), len(text) >> 1)

    def tojson(self, value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        """As transformers': no HTML escapes, and text is not escaped to ASCII."""
        indent = min(indent, 16) if isinstance(indent, int) else indent[:16] if isinstance(indent, str) else None
        separators = tuple(str(separator)[:16] for separator in separators) if separators else None
        steps = self.weigh(value) + 1
        self.spend()
        if indent:
            self.spend(steps * min(_depth(value), MAX_DEPTH) // 4)
        text = json.dumps(
            value, ensure_ascii=bool(ensure_ascii), indent=indent, separators=separators, sort_keys=bool(sort_keys)
        )
        return self.made(text)


def _depth(value) -> int:
    """How many lists and dicts lie in each other. What weigh() let pass is small enough to be gone through."""
    depth, level = 0, [value]
    while level:
        entries = [list(item.values()) if isinstance(item, dict) else item for item in level]
        level = [item for items in entries if isinstance(items, (list, tuple)) for item in items]
        depth += 1
    return depth


def rendered(parts: Iterable[str], budget: Budget, variables: dict) -> str:
    """The text that a template makes part by part of `variables`. RequestError (400) when it refuses, fails, or takes
    too much."""
    texts, size = [], 0
    budget.start(variables)
    try:
        for text in parts:
            budget.spend()
            size += len(text)
            budget.check_size(size)
            texts.append(text)
    except RequestError:
        raise
    except RecursionError:
        raise too_much("values or macros nested too deeply") from None
    except MemoryError:
        raise too_much("more memory than there is") from None
    except Exception as error:  # jinja2's filters fail with whatever their arguments make them fail with
        raise cannot_render(error) from None
    return "".join(texts)


def raise_exception(message=""):
    said = str(message)[:MAX_REASON]
    raise RequestError(f"the model's chat template refuses these messages: {said}", code=REFUSED, param="messages")


def strftime_now(format="%Y-%m-%d"):
    if len(format) > 64 or re.search(r"%[-_0^#+]*\d", format):  # "%999999999d" pads
        raise cannot_render("it asks for the time in a format that is not supported")
    return datetime.datetime.now().strftime(format)
