"""The official client against /v1/responses: items whole and streamed, tools, reasoning, structured output, wrong fields."""

import json

import openai
import pytest
from openai.types.responses import ResponseErrorEvent, ResponseFunctionToolCall
from pydantic import TypeAdapter
from test_anthropic import WEATHER

from zse.errors import RequestError
from zse.server.requests.completions import read_chat
from zse.server.requests.responses import FIELDS, LOGPROBS, check_responses, completion_of

CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>'
TOOL = {"type": "function", "name": "weather", "parameters": WEATHER["input_schema"], "strict": False}


def read_responses(body: dict):
    """The chat request that a body without stored responses means."""
    values = check_responses(body)
    return completion_of(values, values["input"])


@pytest.fixture(scope="module")
def client(tool_server):
    with openai.OpenAI(base_url=tool_server.base + "/v1", api_key="any", timeout=20, max_retries=0) as client:
        yield client


def test_a_response(client):
    reply = client.responses.create(model="fake", input="héllo", instructions="x", metadata={"a": "b"}, user="u")
    assert (reply.status, reply.output_text, reply.model, reply.error) == ("completed", "héllo", "fake", None)
    assert (reply.instructions, reply.metadata, reply.user, reply.store) == ("x", {"a": "b"}, "u", False)
    assert reply.id.startswith("resp_") and reply.output[0].id.startswith("msg_")
    assert reply.usage.input_tokens == len("system:x\nuser:héllo\nassistant:".encode())
    assert reply.usage.output_tokens == 7 == reply.usage.total_tokens - reply.usage.input_tokens
    # What came back can be sent again.
    items = [{"role": "user", "content": "a"}, *(item.model_dump() for item in reply.output)]
    again = client.responses.create(model="fake", input=[*items, {"role": "user", "content": "more"}])
    assert again.output_text == "more"


def test_an_answer_that_is_cut_off(client):
    reply = client.responses.create(model="fake", input="abcdef", max_output_tokens=2)
    assert (reply.status, reply.output_text, reply.incomplete_details.reason) == (
        "incomplete",
        "ab",
        "max_output_tokens",
    )
    assert reply.output[0].status == "incomplete"


@pytest.mark.parametrize("streamed", [False, True])
def test_reasoning_text_and_calls(client, streamed):
    text = f"<think>\nlook\n</think>\nOne moment.\n{CALL}\n{CALL}"
    options = dict(model="fake", input=text, tools=[TOOL])
    if streamed:
        with client.responses.stream(**options) as stream:
            events = list(stream)
            reply = stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.type for event in events][:2] == ["response.created", "response.in_progress"]
        assert [event.output_index for event in events if event.type == "response.output_item.done"] == [0, 1, 2, 3]
        assert events[-1].type == "response.completed"
    else:
        reply = client.responses.create(**options)
    assert [item.type for item in reply.output] == ["reasoning", "message", "function_call", "function_call"]
    assert reply.output[0].content[0].text.strip() == "look" and reply.output_text.strip() == "One moment."
    call = reply.output[2]
    assert (call.name, json.loads(call.arguments), call.status) == ("weather", {"place": "Rome"}, "completed")
    assert len({item.id for item in reply.output}) == 4
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "user:14 degrees"}
    items = [{"role": "user", "content": text}, *(item.model_dump(exclude_none=True) for item in reply.output), result]
    assert client.responses.create(model="fake", input=items, tools=[TOOL]).output_text == "14 degrees"


def test_the_stream_is_what_the_clients_types_say(client, tool_server):
    from openai.types.responses import ResponseStreamEvent

    adapter = TypeAdapter(ResponseStreamEvent)
    body = {"model": "fake", "input": f"<think>a</think>hi {CALL}", "tools": [TOOL], "stream": True}
    body |= {"include": [LOGPROBS], "top_logprobs": 2}
    reply = tool_server.post("/v1/responses", body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events, kinds = reply.body.decode().strip().split("\n\n"), []
    for event in events:
        name, data = event.split("\n")
        value = adapter.validate_json(data.removeprefix("data: "), strict=False)
        assert name == f"event: {value.type}"
        kinds.append(value.type)
    texts = [json.loads(event.split("data: ")[1]) for event in events if "output_text.delta" in event]
    assert all(len(part["logprobs"]) >= 1 for part in texts if part["delta"].strip())
    assert kinds[-1] == "response.completed" and "response.function_call_arguments.done" in kinds


def test_log_probabilities(client):
    reply = client.responses.create(model="fake", input="abc", include=[LOGPROBS], top_logprobs=1)
    scores = reply.output[0].content[0].logprobs
    assert [score.token for score in scores] == ["a", "b", "c"] and all(
        len(score.top_logprobs) == 1 for score in scores
    )


@pytest.mark.parametrize("text", ["aé😀b", f"<think>é</think>\né {CALL}", f"é {CALL[:30]}"])
def test_the_log_probabilities_of_a_message_are_those_of_its_tokens(client, text):
    """Streamed as at once: a character of several tokens has all of theirs, and reasoning and calls none."""
    options = dict(model="fake", input=text, tools=[TOOL], include=[LOGPROBS])
    whole = client.responses.create(**options)
    with client.responses.stream(**options) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    for reply in (whole, streamed):
        (part,) = [item.content[0] for item in reply.output if item.type == "message"]
        assert b"".join(bytes(score.bytes) for score in part.logprobs).strip().decode() == part.text.strip()
    deltas = [score for event in events if event.type == "response.output_text.delta" for score in event.logprobs]
    assert [score.token for score in deltas] == [score.token for score in part.logprobs]


def test_no_alternatives_of_no_log_probabilities(client):
    reply = client.responses.create(model="fake", input="abc", top_logprobs=0)
    assert reply.output_text == "abc" and not reply.output[0].content[0].logprobs


def test_items_stand_in_the_order_in_which_they_came(client):
    text = f"One.\n{CALL}\nTwo.\n{CALL} Three."
    options = dict(model="fake", input=text, tools=[TOOL])
    whole = client.responses.create(**options)
    with client.responses.stream(**options) as stream:
        streamed = list(stream)[-1].response
    for reply in (whole, streamed):
        assert [item.type for item in reply.output] == ["message", "function_call"] * 2 + ["message"]
        texts = [item.content[0].text.strip() for item in reply.output if item.type == "message"]
        assert texts == ["One.", "Two.", "Three."]
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"user:{number}"}
        for number, item in enumerate(reply.output)
        if item.type == "function_call"
    ]
    items = [{"role": "user", "content": text}, *(item.model_dump(exclude_none=True) for item in reply.output)]
    found = read_responses({"input": [*items, *results]}).messages
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "tool"]
    assert len(found[1]["tool_calls"]) == 2 and found[1]["content"].split() == ["One.", "Two.", "Three."]


def test_a_call_that_was_cut_may_be_sent_again(client):
    options = dict(model="fake", tools=[TOOL], max_output_tokens=60)
    reply = client.responses.create(input=CALL, **options)
    (call,) = reply.output
    assert (call.type, call.status) == ("function_call", "incomplete") and not call.arguments.endswith("}")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "user:again"}
    items = [{"role": "user", "content": CALL}, call.model_dump(exclude_none=True), result]
    assert client.responses.create(input=items, **options).output_text == "again"


def test_only_the_item_that_is_cut_is_incomplete(client):
    options = dict(model="fake", input="<think>ab</think>\nabcdef", max_output_tokens=20)
    whole = client.responses.create(**options)
    with client.responses.stream(**options) as stream:
        streamed = list(stream)[-1].response
    for reply in (whole, streamed):
        assert [item.status for item in reply.output] == ["completed", "incomplete"]


def test_structured_output_has_its_schema():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    completion = read_responses({"input": "a", "text": {"format": form}})
    assert completion.structure_field == "text.format" and json.loads(completion.structure.source) == schema
    assert read_responses({"input": "a", "text": {"format": {"type": "text"}}}).structure is None


def test_a_stream_that_breaks_says_so_as_its_other_events(tool_server):
    """With a type and a number, by which clients tell events apart."""
    reply = tool_server.post("/v1/responses", {"input": "!tokens=9 !nan=3", "stream": True})
    events = [json.loads(line[6:]) for line in reply.body.decode().split("\n") if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = TypeAdapter(ResponseErrorEvent).validate_python(events[-1])
    assert b"event: error\ndata: " in reply.body and (last.type, last.code) == ("error", "numerical_error")


def test_a_stream_that_breaks_raises(client):
    with pytest.raises(openai.APIError, match="finite"):
        for _ in client.responses.create(model="fake", input="!tokens=9 !nan=3", stream=True):
            pass


@pytest.mark.parametrize(
    "change, param",
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0].arguments"),
        ({"input": [5]}, "input[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"previous_response_id": ""}, "previous_response_id"),
        ({"store": "yes"}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "x"}, "conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 5}}}, "text.format.schema"),
        ({"tools": [TOOL], "tool_choice": "required", "text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_is_refused(change, param):
    with pytest.raises(RequestError) as caught:
        read_responses({name: value for name, value in ({"input": "a"} | change).items() if value is not None})
    assert caught.value.param == param and caught.value.status == 400 and f"'{param}'" in caught.value.message


def test_what_answers_say_may_be_sent():
    """The choice among no tools, and the client's call with all of its fields."""
    assert read_responses({"input": "a", "tools": [], "tool_choice": "auto"}).tool_choice.mode == "auto"
    call = ResponseFunctionToolCall(arguments="{}", call_id="c", name="f", type="function_call")
    result = {"type": "function_call_output", "call_id": "c", "output": "1"}
    for shown in (call.model_dump(), call.model_dump(by_alias=True)):
        completion = read_responses({"input": [{"role": "user", "content": "a"}, shown, result]})
        assert completion.messages[1]["tool_calls"][0]["id"] == "c"


def test_what_the_chat_template_sees():
    """An assistant's reasoning, text and calls in a row are one message, instructions and what developers say another."""
    call = {
        "type": "function_call",
        "call_id": "c1",
        "name": "f",
        "arguments": '{"a": 1}',
        "id": "fc_1",
        "status": "completed",
    }
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"role": "user", "content": "q"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t", "annotations": []}]},
        call,
        call | {"call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {"role": "assistant", "content": "u"},
        {"role": "assistant", "content": "v"},
        {"role": "user", "content": "w"},
    ]
    completion = read_responses({"input": items, "instructions": "s", "reasoning": {"effort": "low"}})
    called = [{"id": id, "type": "function", "function": {"name": "f", "arguments": {"a": 1}}} for id in ("c1", "c2")]
    assert completion.messages == [
        {"role": "system", "content": "s\n\nd"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "t", "tool_calls": called, "reasoning_content": "r"},
        {"role": "tool", "content": "1", "tool_call_id": "c1", "name": "f"},
        {"role": "tool", "content": "2", "tool_call_id": "c2", "name": "f"},
        {"role": "assistant", "content": "u"},
        {"role": "assistant", "content": "v"},
        {"role": "user", "content": "w"},
    ]
    assert (completion.thinking_field, completion.thinking_budget) == ("reasoning.effort", 1024)


def test_sampling_is_that_of_a_chat_request():
    ours = read_responses({"input": "a", "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 7})
    chat = read_chat(
        {"messages": [{"role": "user", "content": "a"}], "temperature": 0.5, "top_p": 0.9, "max_completion_tokens": 7}
    )
    assert ours.params == chat.params and ours.left_out == chat.left_out


def test_every_field_of_the_client_is_known():
    """The official client's parameters, but for those of OpenAI's own service."""
    import inspect

    from openai.types.responses.response_create_params import ResponseCreateParamsBase

    own = {"access_programs", "background_options", "context_management", "image", "moderation", "prompt_cache_options"}
    assert set(inspect.get_annotations(ResponseCreateParamsBase)) - own <= FIELDS.keys()
