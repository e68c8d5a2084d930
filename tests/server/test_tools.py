"""Tools and reasoning over HTTP: the official client's round trip, streams, history, refusals, template texts."""

import json

import openai
import pytest
from servers import TEMPLATE

from zse.server.requests.conversation import CONVERSATION
from zse.server.tools import parsers
from zse.server.tools.answer import format_of
from zse.server.tools.blocks import BlockParser
from zse.server.tools.calls import fold
from zse.tokenizer.chat_template import ChatTemplate

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>'
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def client(tool_server):
    with openai.OpenAI(base_url=tool_server.base + "/v1", api_key="any", timeout=20) as client:
        yield client


def user(text):
    return [{"role": "user", "content": text}]


def collect(stream):
    """(message as a dict, finish reasons, usage) of a stream of one choice."""
    message, finishes, usage = {"content": "", "reasoning": "", "calls": []}, [], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta = choice.delta
            message["content"] += delta.content or ""
            message["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            assert getattr(delta, "reasoning_content", None) == getattr(delta, "reasoning", None)
            for call in delta.tool_calls or []:
                if call.id is not None:  # the first of a call: id, type, name
                    assert call.index == len(message["calls"]) and call.type == "function"
                    message["calls"].append([call.id, call.function.name, ""])
                assert call.function.name is None or call.id
                message["calls"][call.index][2] += call.function.arguments
            if choice.finish_reason:
                finishes.append(choice.finish_reason)
    return message, finishes, usage


def test_round_trip_with_the_official_client(client):
    messages = user(CALL)
    reply = client.chat.completions.create(model="fake", messages=messages, tools=[WEATHER], tool_choice="auto")
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "weather",
        {"place": "Rome"},
    )
    for echoed in (choice.message, choice.message.model_dump()):
        again = [*messages, echoed, {"role": "tool", "tool_call_id": call.id, "content": "user:14 degrees"}]
        reply = client.chat.completions.create(model="fake", messages=again, tools=[WEATHER])
        assert reply.choices[0].message.content == "14 degrees" and reply.choices[0].finish_reason == "stop"
        assert reply.choices[0].message.tool_calls is None


def test_streamed_calls(client):
    text = f"<think>\nlook\n</think>\nOne moment.\n{CALL}\n{CALL}"
    message, finishes, usage = collect(
        client.chat.completions.create(
            model="fake", messages=user(text), tools=[WEATHER], stream=True, stream_options={"include_usage": True}
        )
    )
    assert (message["content"], message["reasoning"], finishes) == ("One moment.", "look", ["tool_calls"])
    assert [call[1:] for call in message["calls"]] == [["weather", '{"place": "Rome"}']] * 2
    assert message["calls"][0][0] != message["calls"][1][0]
    assert usage.completion_tokens == len(text) + 1
    assert usage.completion_tokens_details.reasoning_tokens == len("<think>\nlook\n</think>")


def test_whole_and_streamed_agree_and_tokens_may_come_in_one_message(client, tool_server):
    text = f"<think>a</think>b {CALL} c"
    whole = client.chat.completions.create(model="fake", messages=user(text), tools=[WEATHER], n=2)
    for choice in whole.choices:
        assert choice.message.content == "b c" and choice.message.reasoning_content == choice.message.reasoning == "a"
        assert len(choice.message.tool_calls) == 1 and choice.finish_reason == "tool_calls"
    message, finishes, _ = collect(
        client.chat.completions.create(model="fake", messages=user(text), tools=[WEATHER], stream=True)
    )
    assert (message["content"], message["reasoning"], finishes) == ("b c", "a", ["tool_calls"])
    assert (
        tool_server.post(CHAT, {"messages": user(CALL), "tools": [WEATHER], "logprobs": True}).json["choices"][0][
            "logprobs"
        ]["content"][0]["token"]
        == "<"
    )


def test_no_parallel_calls_ends_the_answer(client, tool_server):
    reply = client.chat.completions.create(
        model="fake", messages=user(CALL + CALL), tools=[WEATHER], parallel_tool_calls=False
    )
    assert len(reply.choices[0].message.tool_calls) == 1 and reply.choices[0].finish_reason == "tool_calls"
    assert reply.usage.completion_tokens == CALL.index("}}") + 1  # nothing can change the call behind its arguments
    message, finishes, _ = collect(
        client.chat.completions.create(
            model="fake", messages=user(CALL + CALL), tools=[WEATHER], parallel_tool_calls=False, stream=True
        )
    )
    assert len(message["calls"]) == 1 and finishes == ["tool_calls"]
    tool_server.assert_quiet()


@pytest.mark.parametrize(
    "text,limit,finish,content,arguments",
    [
        (CALL[:-18], None, "tool_calls", None, '{"place": "Ro'),  # ended by the model
        (CALL, 53, "length", None, '{"place"'),
        (CALL, 20, "length", CALL[:20], None),
        ("<tool_call>{</tool_call> x", None, "stop", "<tool_call>{</tool_call> x", None),
    ],
)
def test_calls_that_break_off(client, text, limit, finish, content, arguments):
    """Streamed and whole are the same: what is certain of the arguments, which is no complete object; else content."""
    options = {"model": "fake", "messages": user(text), "tools": [WEATHER], "max_tokens": limit}
    choice = client.chat.completions.create(**options).choices[0]
    assert (choice.message.content, choice.finish_reason) == (content, finish)
    assert [call.function.arguments for call in choice.message.tool_calls or []] == [arguments] * (content is None)
    message, finishes, _ = collect(client.chat.completions.create(**options, stream=True))
    assert (message["content"], finishes) == (content or "", [finish])
    assert [call[2] for call in message["calls"]] == [arguments] * (content is None)


def test_without_tools_or_with_none_the_text_stays(client):
    for options in ({}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}):
        reply = client.chat.completions.create(model="fake", messages=user(CALL), **options)
        assert reply.choices[0].message.content == CALL and reply.choices[0].finish_reason == "stop"


def test_a_template_that_opens_the_reasoning(own_server):
    server = own_server(template="</think> <think>")
    reply = server.chat("look</think>Yes").json
    assert reply["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Yes",
        "refusal": None,
        "reasoning_content": "look",
        "reasoning": "look",
    }
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("look</think>")}
    deltas = [event["choices"][0]["delta"] for event in server.chat("lo</think>Yes", stream=True).events[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "lo"
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes"


def test_parsers_of_the_command_line(own_server):
    body = {"messages": user('[TOOL_CALLS]weather[ARGS]{"place": "Oslo"}'), "tools": [WEATHER]}
    server = own_server(template=TEMPLATE, tool_parser="mistral", reasoning_parser="none")
    message = server.post(CHAT, body).json["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == '{"place": "Oslo"}'
    assert len(message["tool_calls"][0]["id"]) == 9
    assert server.chat("<think>a</think>b").json["choices"][0]["message"]["content"] == "<think>a</think>b"
    for template, options, words in (
        ("no such thing", {}, "no tool support"),
        ("{{ tools }}", {}, "--tool-parser"),
        (TEMPLATE, {"tool_parser": "none"}, "--tool-parser"),
    ):
        reply = own_server(template=template, **options).post(CHAT, body)
        assert reply.status == 400 and words in reply.error["message"] and reply.error["param"] == "tools"


# Small templates in the style of each family: the tools, the calls of the history and their results.
TEMPLATES = {
    "hermes": """
{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Answer calls as <tool_call>
{"name": <name>, "arguments": <arguments>}
</tool_call><|im_end|>
{% endif %}{%- for m in messages %}{% if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{% if m.reasoning_content is defined %}<think>
{{ m.reasoning_content }}
</think>
{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "qwen3_coder": """
{%- for tool in tools or [] %}<function><name>{{ tool.function.name }}</name>{{ tool.function.description }}
{%- for key, value in tool.function.parameters.properties | items %}<{{ key }}>{{ value.type }}</{{ key }}>{% endfor %}</function>
{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments | items %}<parameter={{ key }}>
{{ value }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}
{% endfor %}""",
    "llama3_json": """
{%- if tools %}Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.
{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}
{%- for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>
{% if m.tool_calls is defined %}{% set call = m.tool_calls[0].function %}{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{%- elif m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}""",
    "mistral": """
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}
{%- if m.role == 'tool' %}[TOOL_RESULTS]{"call_id": "{{ m.tool_call_id }}", "content": {{ m.content }}}[/TOOL_RESULTS]
{%- elif m.tool_calls is defined %}[TOOL_CALLS][{% for call in m.tool_calls %}{% if call.id | length != 9 %}
{{- raise_exception('ids have nine characters') }}{% endif %}{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}{% endfor %}]
{%- else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}""",
    "gemma": """
{%- if tools %}Call as ```tool_code: {{ tools | tojson }}{% endif %}{% for m in messages %}<start_of_turn>{{ m.role }}
{{ m.content }}{% if m.tool_calls %}```json
{% for call in m.tool_calls %}{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}{% endfor %}
```{% endif %}{% if m.role == 'tool' %} of {{ m.name }}{% endif %}<end_of_turn>
{% endfor %}""",
    "deepseek": """
{%- if tools %}Tools: {% for tool in tools %}{{ tool.function | tojson }}{% endfor %}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}
{%- if m.tool_calls %}<｜tool▁calls▁begin｜>{% for call in m.tool_calls %}<｜tool▁call▁begin｜>{{ call.type }}<｜tool▁sep｜>{{ call.function.name }}
```json
{{ call.function.arguments | tojson }}
```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}{% endfor %}""",
}
TEMPLATES["pythonic"] = """
{%- if tools %}Call as [func_name1(params_name1=params_value1)]: {{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}:
{% if m.tool_calls %}[{% for call in m.tool_calls %}{{ call.function.name }}({% for key, value in call.function.arguments | items %}{{ key }}={{ value | tojson }}{{ ', ' if not loop.last }}{% endfor %})
{%- endfor %}]{% else %}{{ m.content }}{% endif %}
{% endfor %}"""


# Formats that no parser knows, in templates whose text looks as if they were hermes, qwen3_coder or llama3_json.
_BEFORE = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
_AFTER = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
UNKNOWN = {
    "a name as a key": """{% if m.tool_calls %}<|named|>[{% for call in m.tool_calls %}{"{{ call.function.name }}": {{ call.function.arguments | tojson }}}
{%- endfor %}]<|/named|>{% endif %}{# <|python_tag|> #}""",
    "an unknown mark": """{% if m.tool_calls %}<|tool_list|>[{% for call in m.tool_calls %}{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
{%- endfor %}]<|/tool_list|>{% endif %}{# <tool_call> #}""",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_format_that_no_parser_reads_is_none(name):
    assert format_of(_BEFORE + UNKNOWN[name] + _AFTER).tools == parsers.NONE


def test_tools_of_an_unknown_format_are_refused(own_server):
    template = _BEFORE + UNKNOWN["an unknown mark"] + _AFTER
    reply = own_server(template=template).post(CHAT, {"messages": user(CALL), "tools": [WEATHER]})
    assert (reply.status, reply.error["param"]) == (400, "tools")
    assert "--tool-parser NAME (one of qwen3_coder, hermes" in reply.error["message"]
    named = own_server(template=template, tool_parser="hermes").post(CHAT, {"messages": user(CALL), "tools": [WEATHER]})
    assert named.json["choices"][0]["finish_reason"] == "tool_calls"


# What resembles another format, is described nowhere in the text, or needs more than the first conversation.
HERMES = """{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": CALL_ARGUMENTS}
</tool_call>{% endfor %}"""
_LIST = """{% if m.tool_calls %}OPEN[{% for call in m.tool_calls %}{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
{%- endfor %}]CLOSE{% endif %}"""
_INVOKE = """{% if m.tool_calls %}<OPEN>{% for call in m.tool_calls %}<invoke name="{{ call.function.name }}">
{% for key, value in call.function.arguments | items %}<parameter name="{{ key }}">{{ value if value is string else value | tojson }}</parameter>
{% endfor %}</invoke>{% endfor %}</OPEN>{% endif %}"""
_DSML = """{% if m.tool_calls %}<｜DSML｜BLOCK>
{% for call in m.tool_calls %}<｜DSML｜invoke name="{{ call.function.name }}">
{% for key, value in call.function.arguments | items %}<｜DSML｜parameter name="{{ key }}" string="{{ 'true' if value is string else 'false' }}">
{#- -#} {{ value if value is string else value | tojson }}</｜DSML｜parameter>
{% endfor %}</｜DSML｜invoke>
{% endfor %}</｜DSML｜BLOCK>{% endif %}"""
KNOWN = [
    (
        "glm4",
        """{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}
{% for key, value in call.function.arguments | items %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}""",
    ),
    (
        "seed_oss",
        """{% for call in m.tool_calls or [] %}<seed:tool_call><function={{ call.function.name }}>
{% for key, value in call.function.arguments | items %}<parameter={{ key }}>{{ value }}</parameter>
{% endfor %}</function></seed:tool_call>{% endfor %}""",
    ),
    (
        "functionary",
        """{% for call in m.tool_calls or [] %}<function={{ call.function.name }}>{{ call.function.arguments | tojson }}</function>
{%- endfor %}{# <|python_tag|> #}""",
    ),
    (
        "functionary_v3",
        """{% if m.content %}>>>all
{{ m.content }}{% endif %}{% for call in m.tool_calls or [] %}>>>{{ call.function.name }}
{{ '' + call.function.arguments }}{% endfor %}{# <|python_tag|> #}""",
    ),
    ("dsml", _DSML.replace("BLOCK", "function_calls")),
    ("dsml", _DSML.replace("BLOCK", "tool_calls")),
    (
        "gigachat",
        """{% if m.tool_calls %}<|message_sep|>

function call<|role_sep|>
{"name": "{{ m.tool_calls[0].function.name }}", "arguments": {{ m.tool_calls[0].function.arguments | tojson }}}<|message_sep|>{% endif %}""",
    ),
    (
        "gigachat",
        HERMES.replace("<tool_call>", "<|function_call|>")
        .replace("</tool_call>", "<|message_sep|>")
        .replace("CALL_ARGUMENTS", "{{ call.function.arguments | tojson }}"),
    ),
    ("lfm2", "{# List of tools: <|tool_list_start|>[ #}"),
    ("granite", _LIST.replace("OPEN", "<|tool_call|>").replace("CLOSE", "")),
    ("granite", _LIST.replace("OPEN", "<|tool_call|>").replace("CLOSE", "<|/tool_call|>")),
    ("nemotron", _LIST.replace("OPEN", "<TOOLCALL>").replace("CLOSE", "</TOOLCALL>")),
    ("tool_calls", _LIST.replace("OPEN", "<tool_calls>").replace("CLOSE", "</tool_calls>")),
    (
        "command_r",
        _LIST.replace("OPEN", "<|START_ACTION|>")
        .replace("CLOSE", "<|END_ACTION|>")
        .replace('"name"', '"tool_call_id": "0", "tool_name"')
        .replace('"arguments"', '"parameters"'),
    ),
    ("minimax_m2", _INVOKE.replace("OPEN", "minimax:tool_call")),
    (
        "minicpm",
        """{% for call in m.tool_calls or [] %}<function name="{{ call.function.name }}">
{%- for key, value in call.function.arguments | items %}<param name="{{ key }}">
{%- if value is string %}<![CDATA[{{ value }}]]>{% else %}{{ value | tojson }}{% endif %}</param>{% endfor %}</function>
{% endfor %}""",
    ),
    (
        "kimi_k2",
        """{% if m.tool_calls %}<|tool_calls_section_begin|>{% for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }}
{#- -#} <|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}""",
    ),
    (
        "lfm2",
        """{% if m.tool_calls %}<|tool_call_start|>[{% for call in m.tool_calls %}{{ call.function.name }}(
{%- for key, value in call.function.arguments | items %}{{ key }}={{ value | tojson }}{{ ', ' if not loop.last }}{% endfor %})
{%- endfor %}]<|tool_call_end|>{% endif %}""",
    ),
    (
        "kimi_k3",
        """{% macro open(tag) %}{{ '<|open|>' + tag + '<|sep|>' }}{% endmacro %}{% macro close(tag) %}{{ '<|close|>' + tag + '<|sep|>' }}{% endmacro %}
{%- if m.role == 'assistant' %}{{ open('think') }}{{ close('think') }}{{ open('response') }}{{ close('response') }}{% endif %}
{%- if m.tool_calls %}{{ open('tools') }}{% for call in m.tool_calls %}{{ open('call tool="' + call.function.name + '" index="' + loop.index | string + '"') }}
{%- for key, value in call.function.arguments | items %}{{ open('argument key="' + key + '" type="' + ('string' if value is string else 'number') + '"') }}
{{- value if value is string else value | tojson }}{{ close('argument') }}{% endfor %}{{ close('call') }}{% endfor %}{{ close('tools') }}{% endif %}""",
    ),
    (
        "solar_open",
        """{% if m.tool_calls %}<|end|><|begin|>assistant<|tool_calls|>{% for call in m.tool_calls %}<|tool_call:begin|>{{ call.id }}
{#- -#} <|tool_call:name|>{{ call.function.name }}<|tool_call:args|>{{ call.function.arguments | tojson }}<|tool_call:end|>{% endfor %}<|calls|>{% endif %}""",
    ),
    (
        "apertus",
        """{% if m.tool_calls %}<|tools_prefix|>[{% for call in m.tool_calls %}{"{{ call.function.name }}": {{ call.function.arguments | tojson }}}
{%- endfor %}]<|tools_suffix|>{% endif %}{# <|python_tag|> #}""",
    ),
    ("firefunction", _LIST.replace("OPEN", "functools").replace("CLOSE", "")),
    ("hermes", HERMES.replace("CALL_ARGUMENTS", "{{ call.function.arguments | tojson }}") + "{# <function= #}"),
    ("hermes", HERMES.replace("CALL_ARGUMENTS", "{{ '' + call.function.arguments }}")),
    (
        "hermes",
        HERMES.replace("CALL_ARGUMENTS", "{{ call.function.arguments | tojson }}")
        + "{% if m.tool_calls and loop.last %}{{ raise_exception('a result has to follow') }}{% endif %}",
    ),
    (
        "llama3_json",
        """{% if m.tool_calls %}<|python_start|><|python_end|>{% for call in m.tool_calls %}{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}
{%- endfor %}{% endif %}""",
    ),
    ("hermes", "{# <tool_call> #}"),
]


@pytest.mark.parametrize("expected,body", KNOWN)
def test_a_format_is_known_by_what_it_writes(expected, body):
    assert format_of(_BEFORE + body + _AFTER).tools == expected


class Characters:
    """As much of a tokenizer as a template needs: a few control tokens, the rest is text."""

    bos_id = eos_id = pad_id = unknown_id = None

    def text_of(self, id):
        return ""

    def control_first_characters(self):
        return ""

    def ends_inside_control(self, text):
        return False


@pytest.mark.parametrize("name", TEMPLATES)
def test_history_round_trip_through_template_texts(name):
    """What the template writes of a call in the history is what its parser reads as that call."""
    source = TEMPLATES[name]
    form = format_of(source)
    assert form.tools == name and form.takes_tools
    tools = CONVERSATION["tools"].kind.check([WEATHER], "tools")
    arguments = {"place": "Rome"}
    history = CONVERSATION["messages"].kind.check(
        [
            *user("Weather?"),
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "look it up",
                "tool_calls": [
                    {
                        "id": "abcdef123",
                        "type": "function",
                        "index": 0,
                        "function": {"name": "weather", "arguments": json.dumps(arguments)},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "abcdef123", "content": "14 degrees"},
        ],
        "messages",
    )
    text = ChatTemplate(source, Characters()).render(history, tools=tools).text
    assert "weather" in text and "14 degrees" in text and '"function": {"name"' not in text.split("Weather?")[1]
    if name == "gemma":
        assert "of weather" in text
    if "reasoning_content" in source:
        assert "<think>\nlook it up\n</think>" in text
    # The assistant's turn alone, as the model would have written it.
    bare = ChatTemplate(source, Characters()).render(history[:1], add_generation_prompt=False).text
    turn = ChatTemplate(source, Characters()).render(history[:2], add_generation_prompt=False).text[len(bare) :]
    start = {"llama3_json": "{", "pythonic": "["}.get(name)
    turn = turn[turn.index(start) :] if start else turn
    functions = {"weather": WEATHER["function"]["parameters"]}
    form = parsers.FORMATS[name]
    parser = BlockParser(form.blocks, functions, form.separators)
    found = fold(parser.push(turn) + parser.finish())
    assert [(call.name, json.loads(call.arguments)) for call in found] == [("weather", arguments)]
