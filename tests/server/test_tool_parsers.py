"""Tool calls and reasoning in the formats of each family: whole, at every cut, malformed, and never losing a character."""

import json
import random
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zse.cli import serve
from zse.server.tools import parsers, reasoning
from zse.server.tools.answer import Format, Splitter, format_of
from zse.server.tools.calls import fold
from zse.server.tools.reasoning import Reasoning

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
_KIMI = parsers.KIMI
_FIRST, _SECOND = dump("weather", HARD), dump("stop", {})
_INVOKED = f'<invoke name="weather">\n<parameter name="place">{_FILE}</parameter>\n<parameter name="days">3</parameter>\n</invoke>'
_BOTH = [("weather", HARD), ("stop", {})]
GOOD += [
    (
        "glm4",
        f"Hm.\n<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>{_PAGE}</arg_value>\n<arg_key>days</arg_key>"
        "\n<arg_value>3</arg_value>\n</tool_call><tool_call>stop</tool_call>",
        "Hm.",
        [("weather", {"place": _PAGE, "days": 3}), ("stop", {})],
    ),
    (
        "seed_oss",
        _FORGOTTEN.replace("tool_call>", "seed:tool_call>").format("</parameter>\n", "</parameter>\n"),
        "",
        [_ROME],
    ),
    (
        "minimax_m2",
        f'<minimax:tool_call>\n{_INVOKED}\n<invoke name="stop">\n</invoke>\n</minimax:tool_call>',
        "",
        [("weather", {"place": _FILE, "days": 3}), ("stop", {})],
    ),
    (
        "minicpm",
        'Hm.\n<function name="weather"><param name="place"><![CDATA[a </param> b</function> <param name="days">1]] "c]]></param>'
        '<param name="days">3</param></function>\n<function name="stop"></function>',
        "Hm.",
        [("weather", {"place": 'a </param> b</function> <param name="days">1]] "c', "days": 3}), ("stop", {})],
    ),
    (
        "minicpm",
        '<function name="weather">\n<param name="place">2025 <b></param>\n<param name="exact">true</param>\n</function>',
        "",
        [("weather", {"place": "2025 <b>", "exact": True})],
    ),
    (
        "kimi_k2",
        f"Hm.{_KIMI[0]}{_KIMI[1]}functions.weather:0{_KIMI[2]}{json.dumps(HARD)}{_KIMI[3]}"
        f"{_KIMI[1]}functions.stop:1{_KIMI[2]}{{}}{_KIMI[3]}{_KIMI[4]}",
        "Hm.",
        _BOTH,
    ),
    ("granite", f"<|tool_call|>[{_FIRST}, {_SECOND}]", "", _BOTH),
    ("granite", f"<|tool_call|>[{_FIRST}, {_SECOND}]<|/tool_call|>", "", _BOTH),
    ("nemotron", f"<TOOLCALL>[{_FIRST}, {_SECOND}]</TOOLCALL>", "", _BOTH),
    ("tool_calls", f"<tool_calls>\n[\n{_FIRST},\n{_SECOND}\n]\n</tool_calls> then", " then", _BOTH),
    (
        "command_r",
        '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "weather", "parameters": {"days": 1}}\n]<|END_ACTION|>',
        "",
        [("weather", {"days": 1})],
    ),
    (
        "harmony",
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"place": "<|call|>"}<|call|>',
        "",
        [("weather", {"place": "<|call|>"})],
    ),
    ("harmony", "Well. to=functions.stop<|channel|>commentary json<|message|>{}<|call|>", "Well.", [("stop", {})]),
    (
        "gemma4",
        'Well.\n<|tool_call>call:weather{at:[1,{a:<|"|>b<|"|>}, null],days:2,exact:true,place:<|"|>a, "b}<tool_call|>\n<|"|>}'
        "<tool_call|><|tool_call>call:stop{}<tool_call|>",
        "Well.",
        [
            ("weather", {"at": [1, {"a": "b"}, None], "days": 2, "exact": True, "place": 'a, "b}<tool_call|>\n'}),
            ("stop", {}),
        ],
    ),
    (
        "gemma4",
        '<|tool_call>call:weather{"days": 1.5, "at": {"x": ["y"]}}',
        "",
        [("weather", {"days": 1.5, "at": {"x": ["y"]}})],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[weather(place='<|tool_call_end|>'), stop()]<|tool_call_end|>Well.",
        "Well.",
        [("weather", {"place": "<|tool_call_end|>"}), ("stop", {})],
    ),
    ("functionary", f"<function=weather>{json.dumps(HARD)}</function><function=stop>{{}}</function>", "", _BOTH),
]
# What models are known to write: a bracket too many or missing, a closing mark missing, raw line ends in strings, keys in
# another order.
GOOD += [
    ("hermes", f"<tool_call>{_FIRST}}}\n</tool_call> x", " x", _BOTH[:1]),
    ("hermes", f"<tool_call>\n{_FIRST[:-1]}\n</tool_call>", "", _BOTH[:1]),
    ("hermes", f"<tool_call>{_FIRST}\n<tool_call>{_SECOND}</tool_call>", "", _BOTH),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"place": "a\n\tb"}}</tool_call>',
        "",
        [("weather", {"place": "a\n\tb"})],
    ),
    ("hermes", '<tool_call>{"arguments": {"days": 1}, "name": "weather"}</tool_call>', "", [("weather", {"days": 1})]),
    ("hermes", '<tool_call>{"name": "other", "arguments": {"a": 1}}</tool_call>', "", [("other", {"a": 1})]),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "weather", "arguments": {"days": 1}, "id": "abcdef123"}, {"name": "stop", "arguments": {}}]',
        "",
        [("weather", {"days": 1}), ("stop", {})],
    ),
    (
        "qwen3_coder",
        f"{_STOPPED.removesuffix('</tool_call>')}<tool_call>\n{_WRITTEN}\n</tool_call>",
        "",
        [("stop", {}), ("weather", {"place": _FILE, "days": 3})],
    ),
]
# Texts in which the marks say whether a value is text (DeepSeek), and calls behind a name on a line (Functionary, GigaChat).
_D = parsers.DSML


def k3(*calls):
    """Kimi K3's block of calls, each a name and (key, type, value)."""

    def mark(word, is_end=False):
        return f"<|{'close' if is_end else 'open'}|>{word}<|sep|>"

    texts = []
    for index, (name, *arguments) in enumerate(calls, 1):
        inner = "".join(
            mark(f'argument key="{key}" type="{kind}"') + value + mark("argument", True)
            for key, kind, value in arguments
        )
        texts.append(mark(f'call tool="{name}" index="{index}"') + inner + mark("call", True))
    return mark("tools") + "".join(texts) + mark("tools", True)


def solar(*calls):
    """Solar Open's block of calls."""
    return "<|tool_calls|>" + "".join(
        f"<|tool_call:begin|>{index}x<|tool_call:name|>{name}<|tool_call:args|>{json.dumps(arguments)}<|tool_call:end|>"
        for index, (name, arguments) in enumerate(calls)
    )


def dsml(block, *calls):
    """calls: (name, *(key, whether it is text, value))"""
    invoked = "".join(
        f'<{_D}invoke name="{name}">\n'
        + "".join(
            f'<{_D}parameter name="{key}" string="{str(is_text).lower()}">{value}</{_D}parameter>\n'
            for key, is_text, value in values
        )
        + f"</{_D}invoke>\n"
        for name, *values in calls
    )
    return f"<{_D}{block}>\n{invoked}</{_D}{block}>"


_INNER = f'a </{_D}parameter> b\n<{_D}invoke name="stop">\n</{_D}invoke> "c'
GOOD += [
    (
        "dsml",
        "Hm.\n\n" + dsml("function_calls", ("weather", ("place", True, _PAGE), ("days", False, "3")), ("stop",)),
        "Hm.",
        [("weather", {"place": _PAGE, "days": 3}), ("stop", {})],
    ),
    (
        "dsml",
        dsml("tool_calls", ("weather", ("place", True, _INNER), ("at", False, '[1, {"a": null}]'))),
        "",
        [("weather", {"place": _INNER, "at": [1, {"a": None}]})],
    ),
    # The schema before the mark, the mark where the schema says nothing.
    (
        "dsml",
        dsml(
            "tool_calls", ("weather", ("place", False, "3"), ("days", True, "3"), ("x", True, "3"), ("y", False, "3"))
        ),
        "",
        [("weather", {"place": "3", "days": 3, "x": "3", "y": 3})],
    ),
    (
        "dsml",
        dsml("tool_calls", ("weather", ("place", True, "1"))).replace(' string="true"', ""),
        "",
        [("weather", {"place": "1"})],
    ),
    ("kimi_k3", k3(("weather", ("place", "string", HARD["place"]), ("days", "number", "3")), ("stop",)), "", _BOTH),
    (
        "kimi_k3",
        "Hm. " + k3(("weather", ("at", "array", '[1, {"a": null}]'), ("x", "string", "3"), ("y", "number", "3"))),
        "Hm.",
        [("weather", {"at": [1, {"a": None}], "x": "3", "y": 3})],
    ),
    # Marks in a value, and one that was forgotten at the end.
    (
        "kimi_k3",
        k3(("weather", ("place", "string", f"a {k3(('stop',))} b")))[: -len("<|close|>tools<|sep|>")],
        "",
        [("weather", {"place": f"a {k3(('stop',))} b"})],
    ),
    ("solar_open", f"Hm. {solar(('weather', HARD), ('stop', {}))}<|calls|>", "Hm.", _BOTH),
    ("solar_open", solar(("weather", HARD)), "", _BOTH[:1]),
    ("apertus", f"Hm. <|tools_prefix|>{json.dumps([{'weather': HARD}, {'stop': {}}])}<|tools_suffix|>", "Hm.", _BOTH),
    (
        "apertus",
        '<|tools_prefix|>[{"weather": {"place": "<|tools_suffix|>"}}]<|tools_suffix|> so',
        " so",
        [("weather", {"place": "<|tools_suffix|>"})],
    ),
    ("firefunction", f"I call functools[{_FIRST}, {dump('stop', {})}]", "I call", _BOTH),
    ("functionary_v3", f"weather\n{json.dumps(HARD)}>>>stop\n{{}}", "", _BOTH),
    ("functionary_v3", f"I look >>> there.>>>weather\n{json.dumps(HARD)}", "I look >>> there.", _BOTH[:1]),
    ("gigachat", f"Well.<|function_call|>{_FIRST}<|message_sep|>\n\n", "Well.", _BOTH[:1]),
    ("gigachat", f"Well.<|message_sep|>\n\nfunction call<|role_sep|>\n{_FIRST}<|message_sep|>", "Well.", _BOTH[:1]),
]
# Calls that break off: what of the arguments is certain, and content where the text goes on in another way.
BROKEN = [
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"pla', "", '{"pla'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"days": 1, "exact": tr', "", '{"days": 1, "exact": '),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"place": "a\\ud83d', "", '{"place": "a'),
    (
        "hermes",
        'a <tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call> b',
        "aNaN}}</tool_call> b",
        '{"days": ',
    ),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"days": 1e999}}', "1e999}}", '{"days": '),
    ("mistral", "[TOOL_CALLS]stop[ARGS]{]}", "]}", "{"),
    ("deepseek", f'{_DS[0]}{_DS[1]}weather{_DS[2]}{{"days": 1', "", '{"days": '),
    (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n<parameter=place>\nRo",
        "",
        '{"days": 3',
    ),
    ("glm4", "<tool_call>weather<arg_key>days</arg_key><arg_value>3</arg_value>", "", '{"days": 3'),
    (
        "minimax_m2",
        '<minimax:tool_call><invoke name="weather"><parameter name="days">3</parameter><parameter name="days">'
        "4</parameter></invoke></minimax:tool_call>",
        "</invoke></minimax:tool_call>",
        '{"days": 3',
    ),
    (
        "minicpm",
        '<function name="weather"><param name="days">3</param><param name="place"><![CDATA[Ro</param></function>',
        "",
        '{"days": 3',
    ),
    ("dsml", dsml("tool_calls", ("weather", ("days", False, "3"), ("place", True, "Ro")))[:-40], "", '{"days": 3'),
    ("functionary_v3", 'weather\n{"days": 3, "place": "Ro', "", '{"days": 3, "place": "Ro'),
    ("functionary_v3", 'weather\n{"days": 3]} x', "]} x", '{"days": 3'),
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
    ("hermes", '<tool_call>{"name": "weather", "arguments": '),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {"pla'),
    ("glm4", "<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>Rome"),
    ("glm4", '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'),
    ("minimax_m2", "<minimax:tool_call>words</minimax:tool_call>"),
    ("functionary", "<function=unknown>{}</function>"),
    ("minicpm", 'the mark <function name="other"></function> and <function name="stop"'),
    ("minicpm", '<function name="stop">words</function>'),
    ("kimi_k2", f"{_KIMI[0]}{_KIMI[1]}functions.stop:0{_KIMI[4]}"),
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
    ("gemma4", "<|tool_call>call:weather{days:soon}<tool_call|>"),
    ("gemma4", "<|tool_call>call:weather{days:1,days:2}<tool_call|>"),
    ("gemma4", '<|tool_call>weather{place:<|"|>x<|"|>}<tool_call|>'),
    ("gemma4", '<|tool_call>call:weather{place:<|"|>x<tool_call|>'),
    ("gemma4", "<|tool_call>call:weather{at:" + "[" * 99 + "]" * 99 + "}<tool_call|>"),
    ("gemma", "```tool_code\nother()\n```"),
    ("gemma", "```python\nstop()\n```"),
    ("deepseek", f"{_DS[0]}{_DS[4]}"),
    ("dsml", f"<{_D}function_calls>\n</{_D}function_calls>"),
    ("dsml", f'<{_D}function_calls>words <{_D}invoke name="stop">\n</{_D}invoke>\n</{_D}function_calls>'),
    ("dsml", f'<{_D}invoke name="stop">\n</{_D}invoke>'),
    ("dsml", dsml("tool_calls", ("stop two",))),
    ("dsml", '<tool_calls><invoke name="stop"></invoke></tool_calls>'),
    ("functionary_v3", "weather"),
    ("functionary_v3", "weather\nis fine"),
    ("functionary_v3", "weather {}"),
    ("functionary_v3", "other\n{}"),
    ("functionary_v3", "words>>>other\n{}>>> stop\n{}"),
    ("functionary_v3", ">>>" * 50),
    ("functionary_v3", "Look: stop\n{}"),
    ("gigachat", "function call<|role_sep|>\n{}"),
    ("kimi_k3", "<|open|>tools<|sep|>words<|close|>tools<|sep|>"),
    ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="weather"'),
    ("kimi_k3", '<|open|>call tool="stop" index="1"<|sep|><|close|>call<|sep|>'),
    ("solar_open", "<|tool_calls|>stop<|tool_call:args|>{}"),
    ("solar_open", "<|tool_call:begin|>1<|tool_call:name|>stop<|tool_call:args|>{}<|tool_call:end|>"),
    ("apertus", '<|tools_prefix|>[{"weather": {}, "stop": {}}]<|tools_suffix|>'),
    ("apertus", "<|tools_prefix|>[]<|tools_suffix|>"),
    ("apertus", '<|tools_prefix|>[{"stop": 1}]<|tools_suffix|>'),
    ("apertus", '<|tools_prefix|>{"stop": {}}<|tools_suffix|>'),
    ("firefunction", "functools is a module; functools[1]"),
    ("gigachat", "<|function_call|>words<|message_sep|>"),
    ("deepseek", f"{_DS[0]}x{_DS[1]}stop{_DS[2]}{{}}{_DS[3]}{_DS[4]}"),
]


def read(arguments):
    """Arguments as a value; those of a call that broke off as the text that they are."""
    try:
        return json.loads(arguments)
    except ValueError:
        assert arguments.startswith("{")
        return arguments


def split(name, pieces, thinking="none", is_open=False, functions=FUNCTIONS, parallel=True):
    """(content, reasoning, calls, number of content pieces)"""
    splitter = Splitter(Format(name, thinking), functions, is_open, parallel)
    out = [part for piece in pieces for part in splitter.push(piece)] + splitter.finish()
    return (
        "".join(part for part in out if isinstance(part, str)),
        "".join(part.text for part in out if isinstance(part, Reasoning)),
        [(call.name, read(call.arguments)) for call in fold(out)],
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


@pytest.mark.parametrize("name,text", BAD, ids=lambda value: value[:30])
def test_malformed_is_content_and_nothing_is_lost(name, text):
    for pieces in cuts(text):
        assert split(name, pieces) == (text, "", []), pieces


@pytest.mark.parametrize("name,text,content,arguments", BROKEN, ids=lambda value: value[:30])
def test_a_call_that_breaks_off_keeps_what_is_certain(name, text, content, arguments):
    for pieces in cuts(text):
        found, _, calls = split(name, pieces)
        assert (found, [call[1] for call in calls]) == (content, [arguments]), pieces


@pytest.mark.parametrize("name,text,content,calls", GOOD)
def test_an_answer_that_ends_anywhere(name, text, content, calls):
    """max_tokens may end the answer anywhere: then the calls are the first of the calls, and perhaps the beginning of one,
    which nobody can take for a call; and every cut of the text gives the same."""
    for at in range(len(text)):
        found, _, parts = split(name, [text[:at]])
        assert split(name, list(text[:at])) == (found, "", parts)
        whole = [call for call in parts if not isinstance(call[1], str)]
        assert whole == calls[: len(whole)] and parts[: len(whole)] == whole and len(parts) <= len(whole) + 1
        if len(parts) > len(whole):
            assert parts[-1][0] == calls[len(whole)][0]
            keys = json.loads(_closed(parts[-1][1]))
            assert all(key in calls[len(whole)][1] for key in list(keys)[:-1])
        if not parts:
            assert found == text[:at]


def _closed(text):
    """The beginning of an object, made an object: brackets and quotes closed, a half pair taken away."""
    while text:
        for end in (
            "}",
            '"}',
            '": 0}',
            ": 0}",
            "0}",
            "]}",
            '"]}',
            "}]}",
            ": 0}]}",
            '"}]}',
            '": 0}]}',
            '"": 0}',
            " 0}]}",
        ):
            try:
                json.loads(text + end)
                return text + end
            except ValueError:
                pass
        text = text[:-1]
    return "{}"


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
    "<function=weather>",
    "<parameter=place>",
    "<arg_key>place</arg_key><arg_value>",
    "</arg_value>",
    '<invoke name="weather">',
    '<parameter name="days">',
    "</invoke>",
    '{"name": "weather", "arguments": {"days": 1',
    "weather>{",
    "functions.weather:0",
    "stop[ARGS]{",
    "\\ud83d",
    "1e",
    '{"name": "stop", "parameters": {}}',
    "function",
    "stop",
    "<think>",
    "</think>",
    "é",
    f"<{_D}tool_calls>",
    f'<{_D}invoke name="weather">',
    f'<{_D}parameter name="days" string="false">',
    f"</{_D}parameter>",
    f"</{_D}invoke>",
    ">>>",
    "stop\n{}",
    "functools",
    '<|open|>call tool="weather" index="1"<|sep|>',
    '<|open|>argument key="days" type="number"<|sep|>',
    "<|close|>argument<|sep|>",
    "<|open|>tools<|sep|>",
    "<|close|>tools<|sep|>",
    "<|tool_call:begin|>1<|tool_call:name|>weather<|tool_call:args|>{",
    '[{"weather": {"days": 1}}]',
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


@pytest.mark.parametrize(
    "text,is_open,content,thought",
    [
        ("<|channel>thought\nhm <b> \n<channel|>Yes", False, "Yes", "hm <b>"),
        ("<|channel>thought\n<channel|>Yes", False, "Yes", ""),
        ("thoughts\n<channel|>Yes", True, "Yes", "thoughts"),
        ("<|channel>hm<channel|>Yes", False, "Yes", "hm"),
        ("<|channel>thou", False, "", ""),
        ("Yes <|channel>", False, "Yes <|channel>", ""),
    ],
)
def test_reasoning_behind_a_label(text, is_open, content, thought):
    for pieces in cuts(text):
        assert split("none", pieces, "gemma4", is_open, None) == (content, thought, []), pieces


@pytest.mark.parametrize(
    "name,text,is_open,content,thought,calls",
    [
        (
            "solar_open",
            "<|think|>hm <b><|end|><|begin|>assistant<|content|>Yes, <|x|>",
            False,
            "Yes, <|x|>",
            "hm <b>",
            0,
        ),
        ("solar_open", "hm<|end|><|begin|>assistant<|content|>Yes<|end|>", True, "Yes", "hm", 0),
        (
            "solar_open",
            "<|think|>hm<|end|><|begin|>assistant<|content|>Look:<|end|><|begin|>assistant"
            + solar(("weather", {"place": "<|content|> <|end|>"}))
            + "<|calls|>",
            False,
            "Look:",
            "hm",
            1,
        ),
        ("solar_open", "<|content|>Yes", False, "Yes", "", 0),
        ("solar_open", "<|begin|>assist", False, "<|begin|>assist", "", 0),
        (
            "kimi_k3",
            "hm<|close|>think<|sep|><|open|>response<|sep|>Yes <|open|>x<|close|>response<|sep|><|close|>message<|sep|>",
            True,
            "Yes <|open|>x",
            "hm",
            0,
        ),
        (
            "kimi_k3",
            "<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|>"
            + k3(("weather", ("place", "string", "<|open|>response<|sep|> <|close|>message<|sep|>")))
            + "<|close|>message<|sep|>",
            False,
            "",
            "hm",
            1,
        ),
        ("kimi_k3", "<|open|>response<|sep|>Yes", False, "Yes", "", 0),
    ],
)
def test_messages_in_an_answer_at_every_cut(name, text, is_open, content, thought, calls):
    """Marks around the answer go, those in a call's arguments stay."""
    for pieces in cuts(text):
        found = split(name, pieces, name, is_open)
        assert found[:2] == (content, thought) and len(found[2]) == calls, pieces
        assert all("<|" in call[1]["place"] for call in found[2])


_THOUGHT = "<|channel|>analysis<|message|>hm <b><|end|>"
_CALLED = "commentary to=functions.weather <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    "text,is_open,content,thought,calls",
    [
        (_THOUGHT + "<|start|>assistant<|channel|>final<|message|>Yes<|return|>", False, "Yes", "hm <b>", []),
        (
            _THOUGHT + "<|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
            f'<|start|>assistant<|channel|>{_CALLED}{{"days": 2}}<|call|>',
            False,
            "Let me see.",
            "hm <b>",
            [("weather", {"days": 2})],
        ),
        (
            _THOUGHT + '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"days": 2}',
            False,
            "",
            "hm <b>",
            [("weather", {"days": 2})],
        ),
        (f'<|channel|>{_CALLED}{{"days": 2}}<|call|>', False, "", "", [("weather", {"days": 2})]),
        ("hm<|end|><|start|>assistant<|channel|>final<|message|>Yes", True, "Yes", "hm", []),
        # What it should not write: no header, ends that are missing, unknown channels and recipients, a header of words.
        ("Yes, no header", False, "Yes, no header", "", []),
        ("<|channel|>analysis<|message|>hm<|channel|>final<|message|>Yes", False, "Yes", "hm", []),
        ("<|channel|>other<|message|>Yes<|end|>and no", False, "Yesand no", "", []),
        ("<|channel|>analysis to=browser.search<|message|>{}<|call|>Yes", False, "Yes", "{}", []),
        ("<|channel|>" + "x" * 600 + "<|message|>y", False, "<|channel|>" + "x" * 600 + "<|message|>y", "", []),
        ("<|channel|>final", False, "<|channel|>final", "", []),
        ("<|end|>Yes", False, "Yes", "", []),
        ("", False, "", "", []),
    ],
)
def test_harmony_at_every_cut(text, is_open, content, thought, calls):
    for pieces in cuts(text) if text else [[]]:
        assert split("harmony", pieces, "harmony", is_open) == (content, thought, calls), pieces


@pytest.mark.parametrize(
    "text,content,calls",
    [
        ("all\nHello, all\nof you.", "Hello, all\nof you.", []),
        (
            'all\nI will compare>>>weather\n{"place": "Song"}>>>weather\n{"place": "Tang"}',
            "I will compare",
            [("weather", {"place": "Song"}), ("weather", {"place": "Tang"})],
        ),
        ('weather\n{"place": "Hanoi"}>>>all\nDone', "Done", [("weather", {"place": "Hanoi"})]),
        ("No recipient", "No recipient", []),
        ("all", "all", []),
        ("all\n>>>all", ">>>all", []),
        ("python\nprint(1)", "python\nprint(1)", []),
        ("", "", []),
    ],
)
def test_recipients_at_every_cut(text, content, calls):
    form = Format("functionary_v3", recipients=True)
    for pieces in cuts(text) if text else [[]]:
        splitter = Splitter(form, FUNCTIONS, False)
        out = [part for piece in pieces for part in splitter.push(piece)] + splitter.finish()
        assert "".join(part for part in out if isinstance(part, str)) == content, pieces
        assert [(call.name, json.loads(call.arguments)) for call in fold(out)] == calls, pieces
        plain = Splitter(msgspec.structs.replace(form, tools="none"), None, False)
        shown = "".join(part for piece in pieces for part in plain.push(piece)) + "".join(plain.finish())
        assert calls or shown == content
    assert "".join(Splitter(form, FUNCTIONS, False).push("all\nHe")) == "He"


def test_calls_in_reasoning_are_no_calls_and_one_call_may_be_all():
    call = f"<tool_call>{dump('stop', {})}</tool_call>"
    text = f"<think>{call}</think>{call}{call}"
    assert split("hermes", [text], "think") == ("", call, [("stop", {})] * 2)
    assert split("hermes", list(text), "think", parallel=False) == ("", call, [("stop", {})])


def test_text_is_not_held_longer_than_needed():
    splitter = Splitter(Format("hermes", "think"), FUNCTIONS, False)
    assert splitter.push("Hello") == ["Hello"] and splitter.push(" a<") == [" a"] and splitter.push("b") == ["<b"]
    assert splitter.push("<tool_call>{") == [] and splitter.push("}.") == ["<tool_call>{}", "."]


@pytest.mark.each()
@pytest.mark.parametrize("name", parsers.FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 10_000,
        '<tool_call>"</tool_call>' * 5_000,
        "{" * 50_000,
        " " * 25_000,
        "[TOOL_CALLS]" * 5_000,
        "```json\n" * 5_000,
        ">>>" * 10_000,
        f"<{_D}tool_calls>" * 2_500,
        '<|python_tag|>{"' * 5_000,
    ],
)
def test_hostile_text_takes_linear_time(text, name):
    start = time.process_time()
    assert split(name, [text[at : at + 5] for at in range(0, len(text), 5)])[0] == text
    assert time.process_time() - start < 1.5


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
    assert {*serve._REASONING_PARSERS} == {*reasoning.NAMES, "none"}
    assert format_of("<tool_call> </think>") == Format("hermes", "think", takes_tools=False)
    assert format_of("<tool_call> </think>", "mistral", "none") == Format("mistral", "none", takes_tools=False)
    assert format_of("tools") == Format() and not format_of("messages").names_tools
    assert format_of(None, "mistral") == Format()


GEMMA4 = """{%- macro value(x) -%}
{%- if x is string -%}<|"|>{{ x }}<|"|>{%- elif x is boolean -%}{{ 'true' if x else 'false' }}{%- else -%}{{ x }}{%- endif -%}
{%- endmacro -%}
{%- if tools %}<|turn>system
{% for tool in tools %}<|tool>{{ tool['function']['name'] }}<tool|>{% endfor %}<turn|>
{% endif -%}
{%- for message in messages %}<|turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}
{% for call in message['tool_calls'] or [] %}<|tool_call>call:{{ call['function']['name'] }}{
{%- for key, x in call['function']['arguments'] | dictsort %}{{ key }}:{{ value(x) }}{{ ',' if not loop.last }}{% endfor -%}
}<tool_call|>{% endfor %}{{ message['content'] }}<turn|>
{% endfor -%}
{%- if add_generation_prompt %}<|turn>model
<|channel>thought
<channel|>{% endif %}"""


def test_a_template_like_gemma_4s_chooses_its_format():
    form = format_of(GEMMA4)
    assert (form.tools, form.reasoning) == ("gemma4", "gemma4")
    assert set(form.controls(True)) >= {"<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"}


GPT_OSS = """{%- if tools %}<|start|>developer<|message|>{% for tool in tools %}type {{ tool['function']['name'] }};{% endfor %}<|end|>
{%- endif -%}
{%- for message in messages %}
{%- if message['tool_calls'] -%}
{%- set call = message['tool_calls'][0]['function'] -%}
<|start|>assistant to=functions.{{ call['name'] }}<|channel|>commentary json<|message|>{{ call['arguments'] | tojson }}<|call|>
{%- elif message['role'] == 'assistant' -%}
{%- if message['thinking'] %}<|start|>assistant<|channel|>analysis<|message|>{{ message['thinking'] }}<|end|>{% endif -%}
<|start|>assistant<|channel|>final<|message|>{{ message['content'] }}<|end|>
{%- else -%}
<|start|>{{ message['role'] }}<|message|>{{ message['content'] }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""


def test_a_template_like_gpt_oss_chooses_harmony():
    form = format_of(GPT_OSS)
    assert (form.tools, form.reasoning) == ("harmony", "harmony")
    assert set(form.controls(False)) >= {"<|start|>", "<|channel|>", "<|message|>", "<|end|>"}
