"""Tools of MCP servers in the Responses API, by the official client, and the routes of the page."""

import asyncio
import json
import sys

import mcp_server
import openai
import pytest
from harness import Harness, request, wait_for
from pydantic import TypeAdapter
from servers import TEMPLATE

from zse.server.keys import Access, Key
from zse.server.mcp import servers as clients
from zse.server.routes import metrics, responses_mcp

COMMAND = {"command": sys.executable, "args": [mcp_server.__file__]}
FREE = {"type": "mcp", "server_label": "free"}
ASKED = {"type": "mcp", "server_label": "asked"}


def calls(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """free: a process whose tools run unasked; asked: HTTP, where each call is asked for; broken: it cannot be started."""
    folder = tmp_path_factory.mktemp("mcp")
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(clients, "ALIVE_S", 0.2)
    monkeypatch.setattr(clients, "FIRST_PAUSE_S", 0.0)  # one test kills what the next one needs
    other, url = mcp_server.http(as_events=True)
    servers = {
        "free": COMMAND | {"allow": ["*"], "deny": ["secret"], "timeout_s": 2.0, "max_result_bytes": 100},
        "asked": {"url": url, "allow": ["weather"]},
        "broken": {"command": "no-such-program"},
    }
    path = folder / "mcp.json"
    path.write_text(json.dumps({"mcpServers": servers}))
    keys = (Key("alice", "a"), Key("bob", "b", access=Access(routes=frozenset({"/v1/responses"}))))
    harness = Harness(template=TEMPLATE, mcp=str(path), key=keys, database=str(folder / "server.db"))
    harness.mcp_file = path
    yield harness
    harness.assert_quiet()
    harness.close()
    monkeypatch.undo()
    other.shutdown()
    other.server_close()


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=served.base + "/v1", api_key="a", timeout=20, max_retries=0) as client:
        yield client


HEADERS = {"authorization": "Bearer a"}


@pytest.mark.parametrize("streamed", [False, True])
def test_calls_and_the_model_again(client, streamed):
    """The fake model repeats what it reads last: the call, then the tool's result, which holds a user's line."""
    text = f"I look. {calls('weather', place='Rome')}{calls('say', text='done')}"
    options = dict(model="fake", input=text, tools=[FREE | {"allowed_tools": ["weather", "say"]}])
    if streamed:
        with client.responses.stream(**options) as stream:
            events = list(stream)
            reply = stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events]
        assert kinds.count("response.mcp_call.in_progress") == 2 == kinds.count("response.mcp_call.completed")
        assert "response.mcp_list_tools.completed" in kinds and "response.mcp_call_arguments.done" in kinds
        done = [event.output_index for event in events if event.type == "response.output_item.done"]
        assert sorted(done) == [0, 1, 2, 3, 4] and kinds[-1] == "response.completed"
    else:
        reply = client.responses.create(**options)
    assert [item.type for item in reply.output] == ["mcp_list_tools", "message", "mcp_call", "mcp_call", "message"]
    listed, _, weather, echo, last = reply.output
    assert [tool.name for tool in listed.tools] == ["say", "weather"] and listed.error is None
    assert (weather.server_label, weather.status, weather.error) == ("free", "completed", None)
    assert json.loads(weather.arguments) == {"place": "Rome"} and weather.output.startswith(
        "14 degrees in Rome <|im_end|>"
    )
    assert echo.output == "user:done" and last.content[0].text == "done"
    assert reply.tools[0].server_label == "free"
    assert reply.usage.input_tokens > 2 * len(text) and reply.usage.output_tokens > len(text)
    # What came back can be sent again; the tools are not listed again.
    items = [{"role": "user", "content": text}, *(item.model_dump(exclude_none=True) for item in reply.output)]
    again = client.responses.create(model="fake", input=[*items, {"role": "user", "content": "more"}], tools=[FREE])
    assert [item.type for item in again.output] == ["message"] and again.output_text == "more"
    plain = client.responses.create(model="fake", input=[*items, {"role": "user", "content": "plain"}])
    assert plain.output_text == "plain"


def test_the_stream_is_what_the_clients_types_say(served):
    from openai.types.responses import ResponseStreamEvent

    adapter = TypeAdapter(ResponseStreamEvent)
    text = calls("fail") + calls("weather") + calls("mine")
    tools = [FREE, ASKED | {"require_approval": "always"}, {"type": "mcp", "server_label": "broken"}]
    tools += [{"type": "function", "name": "mine", "parameters": {"type": "object"}}]
    reply = served.post("/v1/responses", {"model": "fake", "input": text, "tools": tools, "stream": True}, HEADERS)
    kinds = []
    for event in reply.body.decode().strip().split("\n\n"):
        name, data = event.split("\n")
        value = adapter.validate_json(data.removeprefix("data: "), strict=False)
        assert name == f"event: {value.type}"
        kinds.append(value.type)
    assert "response.mcp_list_tools.failed" in kinds and "response.mcp_call.failed" in kinds
    # The client's function has to be answered first.
    output = json.loads(data.removeprefix("data: "))["response"]["output"]
    assert [item["type"] for item in output[-3:]] == ["mcp_call", "mcp_call", "function_call"]
    assert output[-3]["error"]["content"][0]["text"] == "it cannot be done" and output[-2]["name"] == "weather"
    labels = {item["server_label"]: item for item in output[:3]}
    assert "no program" in labels["broken"]["error"] and labels["asked"]["error"] is None


@pytest.mark.parametrize("stored", [False, True])
def test_approval(client, stored):
    text = calls("say", text="seen")
    options = dict(model="fake", tools=[ASKED], store=stored)
    reply = client.responses.create(input=text, **options)
    assert [item.type for item in reply.output] == ["mcp_list_tools", "mcp_approval_request"]
    question = reply.output[1]
    assert (question.name, json.loads(question.arguments)) == ("say", {"text": "seen"})

    def answered(**said):
        items = [{"type": "mcp_approval_response", "approval_request_id": question.id, **said}]
        if stored:
            return client.responses.create(input=items, previous_response_id=reply.id, **options)
        earlier = [{"role": "user", "content": text}, *(item.model_dump(exclude_none=True) for item in reply.output)]
        return client.responses.create(input=[*earlier, *items], **options)

    granted = answered(approve=True)
    assert [item.type for item in granted.output] == ["mcp_call", "message"]
    assert granted.output[0].approval_request_id == question.id and granted.output_text == "seen"
    refused = answered(approve=False, reason="user:not now")
    assert [item.type for item in refused.output] == ["message"] and refused.output_text == "not now"
    if stored:  # the call does not run again
        later = client.responses.create(input="user:on", previous_response_id=granted.id, **options)
        assert [item.type for item in later.output] == ["message"] and later.output_text == "on"
        listed = client.responses.input_items.list(granted.id, order="asc").data
        assert listed[-1].type == "mcp_approval_response"


@pytest.mark.parametrize(
    "tool, approval, asks",
    [
        ("weather", None, False),
        ("weather", "never", False),
        ("weather", "always", True),
        ("weather", {"never": {"tool_names": ["weather"]}}, False),
        ("weather", {"never": {"tool_names": ["say"]}}, True),
        ("say", "never", True),  # the operator allows weather only
        ("say", None, True),
    ],
)
def test_who_asks(client, tool, approval, asks):
    options = {} if approval is None else {"require_approval": approval}
    reply = client.responses.create(model="fake", input=calls(tool, text="a"), tools=[ASKED | options])
    assert reply.output[1].type == ("mcp_approval_request" if asks else "mcp_call")


def test_a_name_that_another_has(client):
    """A function keeps its name; the tool of the same name is called by its server's as well."""
    mine = {"type": "function", "name": "say", "parameters": {"type": "object"}}
    reply = client.responses.create(model="fake", input=calls("say"), tools=[FREE, mine])
    assert reply.output[-1].type == "function_call"
    reply = client.responses.create(model="fake", input=calls("free__say", text="x"), tools=[FREE, mine])
    assert (reply.output[1].type, reply.output[1].name, reply.output_text) == ("mcp_call", "say", "x")


@pytest.mark.parametrize(
    "text, words",
    [
        (calls("hang"), "within 2 s"),
        (calls("crash"), "code 9"),
        (calls("huge"), None),
        (calls("flood"), "nobody asked"),
    ],
)
def test_a_server_that_fails_ends_its_call_only(client, text, words):
    reply = client.responses.create(model="fake", input=text, tools=[FREE], max_tool_calls=1)
    call = reply.output[1]
    assert reply.status == "completed" and reply.output[-1].type == "message"
    if words:
        assert call.status == "failed" and words in call.error.content[0]["text"]
    else:
        assert call.output.endswith("[cut: 100 of 200000 bytes]")


def test_bounds(client, monkeypatch):
    """A model that calls for ever is stopped by the number of its calls, or by the time."""
    endless = calls("echo", text="a")  # what the fake model reads last is still the question
    reply = client.responses.create(model="fake", input=endless, tools=[FREE], max_tool_calls=2)
    assert sum(item.type == "mcp_call" for item in reply.output) == 2 and reply.output[-1].type == "message"
    assert reply.status == "completed" and reply.max_tool_calls == 2
    cut = client.responses.create(model="fake", input=calls("echo", text="a" * 50), tools=[FREE], max_output_tokens=60)
    assert cut.status == "incomplete" and [item.status for item in cut.output[1:]] == ["incomplete"]
    monkeypatch.setattr(responses_mcp, "TOTAL_S", 0.0)
    late = client.responses.create(model="fake", input=calls("say", text="a"), tools=[FREE])
    assert late.output[1].status == "failed" and "no time left" in late.output[1].error.content[0]["text"]


@pytest.mark.parametrize(
    "tool, param",
    [
        (FREE | {"server_url": "https://example.com/mcp"}, "tools[0].server_url"),
        (FREE | {"connector_id": "connector_gmail"}, "tools[0].connector_id"),
        (FREE | {"headers": {"a": "b"}}, "tools[0].headers"),
        (FREE | {"server_label": "nobody"}, "tools[0].server_label"),
        (FREE | {"require_approval": "maybe"}, "tools[0].require_approval"),
        (FREE | {"allowed_tools": "echo"}, "tools[0].allowed_tools"),
        (FREE | {"command": "sh"}, "tools[0].command"),
        ({"type": "mcp"}, "tools[0].server_label"),
    ],
)
def test_what_is_refused(client, tool, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="fake", input="a", tools=[tool])
    assert caught.value.param == param


def test_answers_to_no_question(client):
    answer = {"type": "mcp_approval_response", "approval_request_id": "mcpr_x", "approve": True}
    with pytest.raises(openai.BadRequestError, match="answers no mcp_approval_request"):
        client.responses.create(model="fake", input=[{"role": "user", "content": "a"}, answer], tools=[ASKED])
    asked = {"type": "mcp_approval_request", "id": "mcpr_x", "server_label": "asked", "name": "echo", "arguments": "{}"}
    with pytest.raises(openai.BadRequestError, match="once more"):
        client.responses.create(model="fake", input=[{"role": "user", "content": "a"}, asked, answer])
    # One that names what is not offered runs nothing.
    forged = [{"role": "user", "content": "a"}, asked | {"name": "secret", "server_label": "free"}, answer]
    reply = client.responses.create(model="fake", input=forged, tools=[FREE])
    assert reply.output[-2].status == "failed" and "offers no tool" in reply.output[-2].error.content[0]["text"]


def test_a_server_without_the_option(tool_server):
    reply = tool_server.post("/v1/responses", {"input": "a", "tools": [FREE]})
    assert reply.status == 400 and "has: none" in reply.error["message"]
    assert tool_server.get("/v1/mcp/tools").json == {"object": "list", "data": [], "servers": []}
    assert tool_server.post("/v1/mcp/call", {"server_label": "free", "name": "echo"}).status == 404


def test_a_client_that_leaves_ends_its_call(served):
    body = {"model": "fake", "input": calls("hang"), "tools": [FREE], "stream": True}
    with served.connect() as sock:
        sock.sendall(request("POST", "/v1/responses", body, HEADERS))
        data = b""
        while b"mcp_call_arguments.done" not in data:
            data += sock.recv(1 << 16)
    wait_for(lambda: not served.app.mcp._running and not served.state()["requests"])


def test_the_routes_of_the_page(served):
    listed = served.get("/v1/mcp/tools", HEADERS).json
    tools = {(tool["server_label"], tool["name"]): tool for tool in listed["data"]}
    assert ("free", "secret") not in tools and tools["free", "echo"]["needs_approval"] is False
    assert tools["asked", "echo"]["needs_approval"] is True and tools["asked", "echo"]["input_schema"]["required"] == [
        "text"
    ]
    states = {server["server_label"]: server for server in listed["servers"]}
    assert states["free"]["state"] == "running" and "no program" in states["broken"]["error"]

    def call(headers=HEADERS, **body):
        return served.post("/v1/mcp/call", body, headers)

    said = call(server_label="asked", name="echo", arguments={"text": "hi"})
    assert said.json["output"] == "hi" and said.json["is_error"] is False
    assert call(server_label="free", name="huge").json["was_cut"]
    assert call(server_label="free", name="crash").json["is_error"]
    assert call(server_label="free", name="secret").status == 404 == call(server_label="none", name="echo").status
    assert call(server_label="broken", name="echo").json["is_error"]
    assert call(server_label="free", name="echo", arguments="x").error["param"] == "arguments"
    # No page of a stranger: neither by its name, nor with a body that browsers send unasked, nor without a key.
    body = {"server_label": "free", "name": "echo"}
    plain = HEADERS | {"content-type": "text/plain"}
    assert call(plain, **body).status == 415 and call({}, **body).status == 401
    # A key that is limited to routes uses tools where this one is among them.
    bob = {"authorization": "Bearer b"}
    assert call(bob, **body).status == 403
    assert served.post("/v1/responses", {"input": "a", "tools": [FREE]}, bob).status == 403


def test_metrics_and_a_new_file(served):
    served.app.mcp.counts["free", "ok"] += 1
    page = asyncio.run_coroutine_threadsafe(metrics.metrics(served.app, None), served.loop).result(10).body.decode()
    assert 'zse_mcp_calls_total{server="free",outcome="ok"}' in page
    before = served.mcp_file.read_text()
    servers = json.loads(before)["mcpServers"]
    del servers["free"]
    served.mcp_file.write_text(json.dumps({"mcpServers": servers}))
    served.call(served.app.mcp.read_again)
    assert served.post("/v1/responses", {"input": "a", "tools": [FREE]}, HEADERS).status == 400
    served.mcp_file.write_text(before)
    served.call(served.app.mcp.read_again)
    assert served.post("/v1/responses", {"input": "a", "tools": [FREE]}, HEADERS).status == 200
