"""Anthropic's official client against /v1/messages: whole and streamed, tools, thinking, counting, errors, wrong fields."""

import json

import anthropic
import pytest

from zse.errors import RequestError
from zse.server.keys import Key
from zse.server.requests.completions import read_chat
from zse.server.requests.messages import FIELDS, read_messages

CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>'
WEATHER = {
    "name": "weather",
    "description": "The weather of a place",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}


def client_of(server, key="any", **options):
    return anthropic.Anthropic(base_url=server.base, api_key=key, timeout=20, max_retries=0, **options)


@pytest.fixture(scope="module")
def client(tool_server):
    with client_of(tool_server) as client:
        yield client


def user(text):
    return [{"role": "user", "content": text}]


def ask(client, text, **more):
    return client.messages.create(model="fake", max_tokens=1000, messages=user(text), **more)


def test_a_message(client):
    reply = ask(client, "héllo", system=[{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}])
    assert (reply.type, reply.role, reply.model, reply.stop_reason) == ("message", "assistant", "fake", "end_turn")
    assert [block.text for block in reply.content] == ["héllo"] and reply.id.startswith("msg_")
    usage = reply.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len("system:x\nuser:héllo\nassistant:".encode())
    assert usage.output_tokens == 7 and usage.cache_creation_input_tokens == 0
    # What came back can be sent again.
    again = [*user("a"), reply.to_param(), *user("more")]
    assert client.messages.create(model="fake", max_tokens=9, messages=again).content[0].text == "more"


def test_why_it_ended(client):
    assert ask(client, "abcdef", stop_sequences=["x", "d"]).stop_reason == "stop_sequence"
    reply = ask(client, "abcdef", stop_sequences=["x", "d"])
    assert (reply.stop_sequence, reply.content[0].text) == ("d", "abc")
    reply = client.messages.create(model="fake", max_tokens=2, messages=user("abcdef"))
    assert (reply.stop_reason, reply.stop_sequence, reply.content[0].text) == ("max_tokens", None, "ab")


def test_stream(client):
    with client.messages.stream(model="fake", max_tokens=100, messages=user("héllo")) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds[-3:] == [
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert (final.content[0].text, final.stop_reason, final.usage.output_tokens) == ("héllo", "end_turn", 7)


@pytest.mark.parametrize("streamed", [False, True])
def test_thinking_text_and_calls(client, streamed):
    text = f"<think>\nlook\n</think>\nOne moment.\n{CALL}\n{CALL}"
    options = dict(model="fake", max_tokens=1000, messages=user(text), tools=[WEATHER])
    if streamed:
        with client.messages.stream(**options) as stream:
            indices = [event.index for event in stream if event.type == "content_block_start"]
            reply = stream.get_final_message()
        assert indices == [0, 1, 2, 3]
    else:
        reply = client.messages.create(**options)
    assert [block.type for block in reply.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, words, call, _ = reply.content
    assert thinking.thinking.strip() == "look" and words.text.strip() == "One moment."
    assert (call.name, call.input, reply.stop_reason) == ("weather", {"place": "Rome"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "user:14 degrees"}]}
    again = [*user(text), reply.to_param(), {"role": "user", "content": [result]}]
    answer = client.messages.create(model="fake", max_tokens=99, messages=again, tools=[WEATHER])
    assert answer.content[0].text == "14 degrees" and answer.stop_reason == "end_turn"


def test_blocks_stand_in_the_order_in_which_they_came(client):
    options = dict(model="fake", max_tokens=200, messages=user(f"One.\n{CALL}\nTwo."), tools=[WEATHER])
    with client.messages.stream(**options) as stream:
        replies = client.messages.create(**options), stream.get_final_message()
    for reply in replies:
        assert [block.type for block in reply.content] == ["text", "tool_use", "text"]
        assert [block.text.strip() for block in reply.content if block.type == "text"] == ["One.", "Two."]


def test_an_answer_that_is_begun(client):
    begun = [*user("hello"), {"role": "assistant", "content": "hel"}]
    counted = client.messages.count_tokens(model="fake", messages=begun)
    assert counted.input_tokens == len("user:hello\nassistant:hel")
    completion = read_messages(body(messages=begun))
    assert completion.template_variables == {"continue_final_message": True}


def test_count_tokens(client):
    counted = client.messages.count_tokens(model="fake", messages=user("hello"), system="x", tools=[WEATHER])
    assert counted.input_tokens == len("tool:weather\nsystem:x\nuser:hello\nassistant:")


def test_errors_have_their_classes(tool_server, own_server):
    with client_of(tool_server) as client:
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.messages.create(model="other", max_tokens=1, messages=user("x"))
        assert caught.value.body["error"]["type"] == "not_found_error" and caught.value.request_id
        with pytest.raises(anthropic.BadRequestError) as caught:
            ask(client, "x", extra_body={"mcp_servers": [{}]})
        assert caught.value.body["error"]["param"] == "mcp_servers"
    server = own_server(key=(Key("a", "right"),))
    with client_of(server, "right") as client:  # x-api-key
        assert ask(client, "hello").content[0].text == "hello"
    with client_of(server, "wrong") as client, pytest.raises(anthropic.AuthenticationError) as caught:
        ask(client, "hello")
    assert caught.value.body["type"] == "error" and caught.value.body["error"]["type"] == "authentication_error"
    with anthropic.Anthropic(base_url=server.base, auth_token="right", max_retries=0) as client:  # Authorization
        assert ask(client, "hello").content[0].text == "hello"


def test_a_stream_that_breaks_ends_with_an_error(client):
    text = ""
    with pytest.raises(anthropic.APIStatusError) as caught:
        with client.messages.stream(model="fake", max_tokens=100, messages=user("!tokens=9 !nan=3")) as stream:
            for event in stream.text_stream:
                text += event
    assert len(text) == 3 and caught.value.body["type"] == "error"
    assert caught.value.body["error"]["code"] == "numerical_error" and caught.value.body["error"]["type"] == "api_error"


def body(**more):
    return {"model": "fake", "max_tokens": 10, "messages": user("x")} | more


def blocks(*content, role="user"):
    return body(messages=[*user("a"), {"role": role, "content": list(content)}, *user("b")])


@pytest.mark.parametrize(
    "wrong, param",
    [
        (body(max_tokens=None), "max_tokens"),
        (body(max_tokens=0), "max_tokens"),
        (body(model=None), "model"),
        (body(temperature=3), "temperature"),
        (body(stop_sequences=["a"] * 17), "stop_sequences"),
        (body(stop_sequences=[""]), "stop_sequences[0]"),
        (body(unheard=1), "unheard"),
        (body(container="x"), "container"),
        (body(messages=[]), "messages"),
        (body(thinking={"type": "enabled"}), "thinking.budget_tokens"),
        (body(thinking={"type": "disabled", "budget_tokens": 5}), "thinking.budget_tokens"),
        (body(thinking={"type": "between"}), "thinking.type"),
        (body(tool_choice={"type": "tool"}, tools=[WEATHER]), "tool_choice.name"),
        (body(tool_choice={"type": "any"}), "tool_choice"),
        (body(tool_choice={"type": "tool", "name": "other"}, tools=[WEATHER]), "tool_choice.name"),
        (body(tools=[{"type": "web_search_20250305", "name": "web_search"}]), "tools[0].type"),
        (body(tools=[WEATHER, WEATHER]), "tools[1].name"),
        (blocks({"type": "image", "source": {}}), "messages[1].content[0].source.type"),
        (blocks({"type": "document", "source": {}}), "messages[1].content[0].type"),
        (blocks({"type": "text"}), "messages[1].content[0].text"),
        (blocks({"type": "thinking", "thinking": "x"}), "messages[1].content[0]"),
        (blocks({"type": "tool_result", "tool_use_id": "a"}, role="assistant"), "messages[1].content[0]"),
        (blocks({"type": 5}), "messages[1].content[0].type"),
        (blocks({}), "messages[1].content[0].type"),
        (blocks("text"), "messages[1].content[0]"),
    ],
)
def test_what_is_refused(wrong, param):
    with pytest.raises(RequestError) as caught:
        read_messages({name: value for name, value in wrong.items() if value is not None})
    assert caught.value.param == param and caught.value.status == 400


def test_what_the_chat_template_sees():
    """Turns of one role are one, results of tools are messages of their own, in their place."""
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"place": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": "no"}
    completion = read_messages(
        body(
            system="s",
            messages=[
                {"role": "user", "content": "a"},
                {"role": "user", "content": [{"type": "text", "text": "b"}]},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": ""}, use]},
                {"role": "user", "content": [result, {"type": "text", "text": "c"}]},
            ],
            tools=[WEATHER | {"strict": True, "cache_control": {"type": "ephemeral"}}],
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
            thinking={"type": "enabled", "budget_tokens": 100},
            output_config={"effort": "max"},
        )
    )
    function = {"name": "weather", "arguments": {"place": "Rome"}}
    assert completion.messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
            "reasoning_content": "t",
        },
        {"role": "tool", "content": "Error: no", "tool_call_id": "t1", "name": "weather"},
        {"role": "user", "content": "c"},
    ]
    assert completion.strict_tools == {"weather"} and not completion.parallel_tool_calls
    assert (completion.thinking_budget, completion.thinking_field) == (100, "thinking")
    assert completion.template_variables == {"reasoning_effort": "high", "enable_thinking": True}


def test_sampling_is_that_of_a_chat_request():
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 5}
    ours = read_messages(body(**given, stop_sequences=["x"]))
    chat = read_chat(body(**given, stop=["x"]))
    assert ours.params == chat.params and ours.left_out == chat.left_out
    assert read_messages(body()).left_out == read_chat(body()).left_out
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    output = {"format": {"type": "json_schema", "schema": schema}}
    completion = read_messages(body(output_config=output))
    assert completion.structure_field == "output_config.format" and json.loads(completion.structure.source) == schema


def test_every_field_of_the_client_is_known():
    """The official client's parameters, but for those of Anthropic's own service."""
    import inspect

    from anthropic.types.message_create_params import MessageCreateParamsBase

    own = {"diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id"}
    assert set(inspect.get_annotations(MessageCreateParamsBase)) - own <= FIELDS.keys()


def test_a_path_that_is_not_here_is_an_error_as_its_others(client):
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.batches.list()
    assert caught.value.body["error"]["type"] == "not_found_error"
