"""Tool calls and reasoning in the formats of each family: whole, at every cut, malformed, and never losing a character."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zse.cli import serve
from zse.server.tools import parsers, reasoning
from zse.server.tools.answer import Format, Splitter, format_of
from zse.server.tools.calls import ToolCall
from zse.server.tools.reasoning import Reasoning
from zse.server.tools.streaming import CallPart

FUNCTIONS = {
    "weather": {
        "type": "object",
        "properties": {
            "place": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "at": {"type": "array"},
        },
    },
    "stop": {"type": "object", "properties": {}},
}
HARD = {"place": 'São "Paulo" </tool_call> {[', "days": 3}
_DS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)


def dump(name, arguments, key="arguments"):
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


# (parser, text, content, calls)
GOOD = [
    ("hermes", f"<tool_call>\n{dump('weather', HARD)}\n</tool_call>", "", [("weather", HARD)]),
    (
        "hermes",
        f"I look.\n\n<tool_call>{dump('weather', {'days': 1})}</tool_call>\n<tool_call>{dump('stop', {})}</tool_call>\n",
        "I look.",
        [("weather", {"days": 1}), ("stop", {})],
    ),
    ("hermes", f"<tool_call>{dump('stop', {})}", "", [("stop", {})]),
    ("hermes", "<tool_call>" + dump("stop", '{"a": 1}') + "</tool_call> then", " then", [("stop", {"a": 1})]),
    (
        "qwen3_coder",
        '<tool_call>\n<function=weather>\n<parameter=place>\nRome\n<b> "x\n</parameter>\n<parameter=days>\n'
        '3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=at>\n[1, {"a": null}]\n</parameter>\n</function>\n'
        "</tool_call>",
        "",
        [("weather", {"place": 'Rome\n<b> "x', "days": 3, "exact": True, "at": [1, {"a": None}]})],
    ),
    ("qwen3_coder", "ok <tool_call><function=stop></function></tool_call>", "ok", [("stop", {})]),
    (
        "qwen3_coder",
        "<tool_call><function=stop><parameter=x>7</parameter></function></tool_call>",
        "",
        [("stop", {"x": "7"})],
    ),
    ("llama3_json", dump("weather", HARD, "parameters"), "", [("weather", HARD)]),
    (
        "llama3_json",
        "<|python_tag|>" + dump("weather", {"days": 2}, "parameters") + "; " + dump("stop", {}, "parameters"),
        "",
        [("weather", {"days": 2}), ("stop", {})],
    ),
    (
        "pythonic",
        "[weather(place='a, \"b]', days=2, exact=True, at=[1, {'x': None}]), stop()]",
        "",
        [("weather", {"place": 'a, "b]', "days": 2, "exact": True, "at": [1, {"x": None}]}), ("stop", {})],
    ),
    ("pythonic", "<|python_start|>[stop()]<|python_end|>", "", [("stop", {})]),
    (
        "pythonic",
        "[weather(exact=true, at=[-1, false, null])]",
        "",
        [("weather", {"exact": True, "at": [-1, False, None]})],
    ),
    (
        "mistral",
        "[TOOL_CALLS] [" + dump("weather", HARD) + ", " + dump("stop", {}) + "]",
        "",
        [("weather", HARD), ("stop", {})],
    ),
    (
        "mistral",
        'Well. [TOOL_CALLS]weather[ARGS]{"place": "[x] }"}[TOOL_CALLS]stop[CALL_ID]abcdef123[ARGS]{}',
        "Well.",
        [("weather", {"place": "[x] }"}), ("stop", {})],
    ),
    (
        "gemma",
        '```tool_code\nprint(weather(place="x", days=1))\nstop()\n```',
        "",
        [("weather", {"place": "x", "days": 1}), ("stop", {})],
    ),
    ("gemma", "Sure:\n```json\n" + dump("stop", {}, "parameters") + "\n```", "Sure:", [("stop", {})]),
    ("gemma", dump("stop", {}, "parameters"), "", [("stop", {})]),
    ("gemma", "[stop()]", "", [("stop", {})]),
    (
        "deepseek",
        f"Hm.{_DS[0]}{_DS[1]}function{_DS[2]}weather\n```json\n{json.dumps(HARD)}\n```{_DS[3]}\n{_DS[1]}function"
        f"{_DS[2]}stop\n```json\n{{}}\n```{_DS[3]}{_DS[4]}",
        "Hm.",
        [("weather", HARD), ("stop", {})],
    ),
    ("deepseek", f"{_DS[0]}{_DS[1]}weather{_DS[2]}{json.dumps(HARD)}{_DS[3]}{_DS[4]}", "", [("weather", HARD)]),
]
# Arguments that hold the marks of their own format, and a mark that was forgotten.
_FILE = 'a </parameter> b\n</tool_call>\n<tool_call>\n<function=stop>\n</function>\n</tool_call> "c'
_WRITTEN = (
    f"<function=weather>\n<parameter=place>\n{_FILE}\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>"
)
_STOPPED = "<tool_call>\n<function=stop>\n</function>\n</tool_call>"
_PAGE = '<b>"x"</tool_call> </parameter>'
GOOD += [
    ("qwen3_coder", f"<tool_call>\n{_WRITTEN}\n</tool_call>", "", [("weather", {"place": _FILE, "days": 3})]),
    (
        "qwen3_coder",
        f"<tool_call>\n{_WRITTEN}\n</tool_call>\n{_STOPPED}",
        "",
        [("weather", {"place": _FILE, "days": 3}), ("stop", {})],
    ),
    (
        "qwen3_coder",
        f"<tool_call><function=weather><parameter=place>{_PAGE}</parameter></function></tool_call>",
        "",
        [("weather", {"place": _PAGE})],
    ),
    (
        "qwen3_coder",
        "Well.\n<function=weather>\n<parameter=place>\nRome\n</parameter>\n</function>",
        "Well.",
        [("weather", {"place": "Rome"})],
    ),
]
# Without </parameter>: neither lost, nor two in one, nor the next call in a value.
_FORGOTTEN = (
    "<tool_call>\n<function=weather>\n<parameter=place>\nRome\n{}<parameter=days>\n3\n{}</function>\n</tool_call>"
)
_ROME = ("weather", {"place": "Rome", "days": 3})
GOOD += [
    ("qwen3_coder", _FORGOTTEN.format("", "") + "\n" + _STOPPED, "", [_ROME, ("stop", {})]),
    ("qwen3_coder", _FORGOTTEN.format("", "</parameter>\n") + _STOPPED, "", [_ROME, ("stop", {})]),
    ("qwen3_coder", _STOPPED + _FORGOTTEN.format("</parameter>\n", ""), "", [("stop", {}), _ROME]),
]
# Text that holds no call of the format, or a malformed one: all of it is content.
BAD = [
    *[
        (name, text)
        for name in parsers.FORMATS
        for text in [
            "",
            " \n",
            "plain text",
            "a < b [c] {d} ` ``` <",
            "{",
            "[",
            "{}",
            "[1, 2]",
            '{"a": [1}',
            "```json\n{}\n```",
            "  leading and trailing \n",
            '{"name": "unknown", "parameters": {}}',
            "[unknown()]",
            "<tool_call",
            "[TOOL_",
        ]
    ],
    *[
        ("hermes", f"a <tool_call>{body}</tool_call> b")
        for body in [
            "",
            "{",
            "[]",
            '{"name": 1}',
            '{"name": "a b", "arguments": {}}',
            '{"name": "f", "arguments": [1]}',
            "{'name': 'f'}",
            '{"name": "f", "arguments": {"x": NaN}}',
            '{"name": "f", "arguments": {"x": 1e999}}',
            '{"name": "f", "arguments": {"x": "\\ud800"}}',
            "[" * 3000,
            '"' * 31,
        ]
    ],
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"pla'),
    ("qwen3_coder", "<tool_call><function=stop><parameter=a>1</function></tool_call>"),
    ("qwen3_coder", "<tool_call><function=stop>words</function></tool_call>!"),
    ("qwen3_coder", "<tool_call>{}</tool_call>"),
    ("qwen3_coder", "the mark <function=name>, <function=other></function> and <function=stop"),
    ("llama3_json", '<|python_tag|>brave.call(query="x")'),
    ("llama3_json", 'See {"name": "stop", "parameters": {}}'),
    ("pythonic", "[stop(1)]"),
    ("pythonic", "[stop(**a)]"),
    ("pythonic", "[stop(a=b)]"),
    ("pythonic", "[stop(a=f())]"),
    ("pythonic", "[stop(), 1]"),
    ("pythonic", "[stop("),
    ("pythonic", "[__import__('os').system('x')]"),
    ("pythonic", "[stop(a=" + "-" * 5000 + "1)]"),
    ("pythonic", "[" + "(" * 3000 + ")" * 3000 + "]"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS] what {"),
    ("mistral", "[TOOL_CALLS]" + "x" * 1000),
    ("mistral", '[TOOL_CALLS][{"name": "stop"}'),
    ("mistral", "[TOOL_CALLS]f[ARGS]{]}"),
    ("gemma", "```tool_code\nimport os\n```"),
    ("gemma", "```tool_code\nother()\n```"),
    ("gemma", "```python\nstop()\n```"),
    ("deepseek", f"{_DS[0]}{_DS[4]}"),
    ("deepseek", f"{_DS[0]}{_DS[1]}function{_DS[2]}stop\n```json\n{{}}"),
    ("deepseek", f"{_DS[0]}x{_DS[1]}stop{_DS[2]}{{}}{_DS[3]}{_DS[4]}"),
]


def split(name, pieces, thinking="none", is_open=False, functions=FUNCTIONS, parallel=True):
    """(content, reasoning, calls, number of content pieces)"""
    splitter = Splitter(Format(name, thinking), functions, is_open, parallel)
    out = [part for piece in pieces for part in splitter.push(piece)] + splitter.finish()
    return (
        "".join(part for part in out if isinstance(part, str)),
        "".join(part.text for part in out if isinstance(part, Reasoning)),
        [(part.name, json.loads(part.arguments)) for part in out if isinstance(part, ToolCall)],
    )


def cuts(text, seed=0):
    """Whole, by character, in two at each place (of short texts), and some random ones."""
    yield [text]
    yield list(text)
    places = range(1, len(text)) if len(text) < 400 else random.Random(seed).sample(range(1, len(text)), 20)
    for at in places:
        yield [text[:at], text[at:]]
    draw = random.Random(seed)
    for _ in range(20):
        marks = sorted(draw.sample(range(len(text) + 1), min(len(text), draw.randrange(1, 9))))
        yield [text[a:b] for a, b in zip([0, *marks], [*marks, len(text)], strict=True)]


@pytest.mark.parametrize("name,text,content,calls", GOOD)
def test_calls_at_every_cut(name, text, content, calls):
    for pieces in cuts(text):
        assert split(name, pieces) == (content, "", calls), pieces


@pytest.mark.parametrize("name,text,content,calls", [case for case in GOOD if case[0] == "qwen3_coder"])
def test_parameters_streamed_at_every_cut(name, text, content, calls):
    for pieces in cuts(text):
        splitter = Splitter(Format(name), FUNCTIONS, False, streams=True)
        found = []
        for part in [part for piece in pieces for part in splitter.push(piece)] + splitter.finish():
            if isinstance(part, CallPart) and part.name or isinstance(part, ToolCall) and not part.is_streamed:
                found.append([part.name, part.arguments])
            elif isinstance(part, CallPart):
                found[-1][1] += part.arguments
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls, pieces


@pytest.mark.parametrize("name,text", BAD, ids=lambda value: value[:30])
def test_malformed_is_content_and_nothing_is_lost(name, text):
    for pieces in cuts(text):
        assert split(name, pieces) == (text, "", []), pieces


@pytest.mark.parametrize("name,text,content,calls", GOOD)
def test_a_cut_off_call_is_a_call_or_content(name, text, content, calls):
    """max_tokens may end the answer anywhere: the calls are then a prefix of the calls."""
    for at in range(len(text)):
        found = split(name, [text[:at]])
        assert found[2] == calls[: len(found[2])]
        if not found[2]:
            assert found[0] == text[:at]


WORDS = [word for name in parsers.FORMATS for word in parsers.FORMATS[name].controls] + [
    "<function=stop>",
    "</function>",
    "<parameter=a>",
    "</parameter>",
    "{",
    "}",
    "[",
    "]",
    '"',
    "'",
    "\\",
    ";",
    ",",
    " ",
    "\n",
    "x",
    "```tool_code\n",
    "```json\n",
    "```",
    "stop()",
    '{"name": "stop", "parameters": {}}',
    "function",
    "stop",
    "<think>",
    "</think>",
    "é",
]


@settings(max_examples=400, deadline=None)
@given(
    name=st.sampled_from(sorted(parsers.FORMATS)),
    words=st.lists(st.sampled_from(WORDS), max_size=25),
    thinking=st.sampled_from(["none", "think"]),
    is_open=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_any_text_is_the_same_at_any_cut(name, words, thinking, is_open, seed):
    text = "".join(words)
    whole = split(name, [text], thinking, is_open)
    if not whole[2] and thinking == "none":
        assert whole[0] == text
    draw = random.Random(seed)
    marks = sorted(draw.randrange(len(text) + 1) for _ in range(draw.randrange(12)))
    assert split(name, list(text), thinking, is_open) == whole
    assert (
        split(name, [text[a:b] for a, b in zip([0, *marks], [*marks, len(text)], strict=True)], thinking, is_open)
        == whole
    )


@pytest.mark.parametrize(
    "text,is_open,content,thought",
    [
        ("<think>\nhm \n</think>\n\nYes", False, "Yes", "hm"),
        ("hm\n</think>\nYes", True, "Yes", "hm"),
        ("<think></think>Yes", False, "Yes", ""),
        (" \nYes <think>", False, " \nYes <think>", ""),
        ("<thin", False, "<thin", ""),
        ("<think>a < b </thin", False, "", "a < b </thin"),
        ("Yes</think>", False, "Yes</think>", ""),
        ("<think>a</think> b </think>", False, "b </think>", "a"),
        ("", True, "", ""),
        ("<think>a  b", False, "", "a  b"),
    ],
)
def test_reasoning_at_every_cut(text, is_open, content, thought):
    for pieces in cuts(text) if text else [[]]:
        assert split("none", pieces, "think", is_open, None) == (content, thought, []), pieces


def test_calls_in_reasoning_are_no_calls_and_one_call_may_be_all():
    call = f"<tool_call>{dump('stop', {})}</tool_call>"
    text = f"<think>{call}</think>{call}{call}"
    assert split("hermes", [text], "think") == ("", call, [("stop", {})] * 2)
    assert split("hermes", list(text), "think", parallel=False) == ("", call, [("stop", {})])


def test_text_is_not_held_longer_than_needed():
    splitter = Splitter(Format("hermes", "think"), FUNCTIONS, False)
    assert splitter.push("Hello") == ["Hello"] and splitter.push(" a<") == [" a"] and splitter.push("b") == ["<b"]
    assert splitter.push("<tool_call>{}") == [] and splitter.push("</tool_call>.") == ["<tool_call>{}</tool_call>", "."]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 20_000,
        '<tool_call>"</tool_call>' * 10_000,
        "{" * 100_000,
        " " * 50_000,
        "[TOOL_CALLS]" * 10_000,
        "```json\n" * 10_000,
        '<|python_tag|>{"' * 10_000,
    ],
)
def test_hostile_text_takes_linear_time(text):
    import time

    for name in parsers.FORMATS:
        start = time.process_time()
        assert split(name, [text[at : at + 5] for at in range(0, len(text), 5)])[0] == text
        assert time.process_time() - start < 3


def test_ids():
    made = [
        part.id
        for name in ("hermes", "mistral")
        for part in Splitter(Format(name), FUNCTIONS, False).push(
            f"<tool_call>{dump('stop', {})}</tool_call>" if name == "hermes" else "[TOOL_CALLS]stop{}"
        )
    ]
    assert made[0].startswith("call_") and len(made[1]) == 9 and made[1].isalnum()


def test_names_of_the_command_line():
    assert {*serve._TOOL_PARSERS} == {*parsers.FORMATS, "none"}
    assert {*serve._REASONING_PARSERS} == {*reasoning.PARSERS, "none"}
    assert format_of("<tool_call> </think>") == Format("hermes", "think", takes_tools=False)
    assert format_of("<tool_call> </think>", "mistral", "none") == Format("mistral", "none", takes_tools=False)
    assert format_of("tools") == Format() and not format_of("messages").names_tools
    assert format_of(None, "mistral") == Format()
