"""Ollama's official client against /api: chat and generate, whole and streamed, tools, thinking, vectors, models, wrong fields."""

import json
import math
from datetime import UTC, datetime

import ollama
import pytest
from servers import TEMPLATE
from test_anthropic import CALL, WEATHER

from zse.errors import RequestError
from zse.server.keys import Key
from zse.server.requests.completions import read_chat
from zse.server.requests.ollama import OPTIONS, read_ollama_chat, read_ollama_generate

TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER["input_schema"]}}


@pytest.fixture(scope="module")
def client(tool_server):
    with ollama.Client(host=tool_server.base, timeout=20) as client:
        yield client


def user(text):
    return [{"role": "user", "content": text}]


def test_chat(client):
    reply = client.chat("fake", user("héllo"))
    assert (reply.message.role, reply.message.content, reply.done, reply.done_reason) == (
        "assistant",
        "héllo",
        True,
        "stop",
    )
    assert (reply.prompt_eval_count, reply.eval_count) == (len("user:héllo\nassistant:".encode()), 7)
    assert reply.total_duration >= reply.prompt_eval_duration + reply.eval_duration - 2 > 0
    again = [*user("a"), reply.message, *user("more")]
    assert client.chat("fake", again).message.content == "more"
    assert client.chat("fake", user("abcdef"), options={"num_predict": 2}).done_reason == "length"
    assert client.chat("fake", user("abcdef"), options={"stop": ["d"], "num_ctx": 4096}).message.content == "abc"


def test_stream(client, tool_server):
    parts = list(client.chat("fake", user("héllo"), stream=True))
    assert "".join(part.message.content for part in parts) == "héllo" and len(parts) > 3
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == 7 and parts[-1].created_at.endswith("Z")
    reply = tool_server.post("/api/chat", {"model": "fake", "messages": user("ab")})  # streams unless told otherwise
    assert reply.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in reply.body.decode().splitlines()]
    assert [line["message"]["content"] for line in lines] == ["a", "b", ""]


@pytest.mark.parametrize("streamed", [False, True])
def test_thinking_text_and_calls(client, tool_server, streamed):
    text = f"<think>\nlook\n</think>\nOne moment.\n{CALL}\n{CALL}"
    reply = client.chat("fake", user(text), tools=[TOOL], stream=streamed)
    parts = list(reply) if streamed else [reply]
    assert "".join(part.message.thinking or "" for part in parts).strip() == "look"
    assert "".join(part.message.content for part in parts).strip() == "One moment."
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in calls] == [("weather", {"place": "Rome"})] * 2
    sent = {"messages": user(text), "model": "fake", "tools": [TOOL], "stream": streamed}
    shown = [json.loads(line) for line in tool_server.post("/api/chat", sent).body.splitlines()]
    shown = [call for line in shown for call in line["message"].get("tool_calls", ())]
    assert [call["function"]["index"] for call in shown] == [0, 1] and len({call["id"] for call in shown}) == 2
    told = [{"role": "tool", "tool_call_id": call["id"], "content": "user:12 degrees"} for call in reversed(shown)]
    for calls_sent in (shown, [{"index": 0, "function": call["function"]} for call in shown]):  # with ids and without
        again = [*user(text), {"role": "assistant", "tool_calls": calls_sent}, *told]
        assert tool_server.post("/api/chat", sent | {"messages": again, "truncate": False, "shift": None}).status == 200
    result = {"role": "tool", "tool_name": "weather", "content": "user:14 degrees"}
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    assert client.chat("fake", [*user(text), called, result], tools=[TOOL]).message.content == "14 degrees"


def test_generate(client):
    reply = client.generate("fake", "hello", system="x")
    assert (reply.response, reply.done_reason) == ("hello", "stop")
    assert reply.prompt_eval_count == len("system:x\nuser:hello\nassistant:")
    assert "".join(part.response for part in client.generate("fake", "hello", stream=True)) == "hello"
    raw = client.generate("fake", "abc", raw=True, options={"num_predict": 2})
    assert (raw.response, raw.prompt_eval_count, raw.done_reason) == ("ab", 3, "length")
    assert client.generate("fake", "abc", raw=True).response == "abc"  # to its own end
    assert client.generate("fake", "abc", raw=True, think=False).response == "abc"  # as every raw prompt
    scored = client.generate("fake", "ab", logprobs=True, top_logprobs=1)
    assert [score.token for score in scored.logprobs] == ["a", "b"] and len(scored.logprobs[0].top_logprobs) == 1


def test_where_a_model_is_and_until_when(own_server):
    """Of one that stays Ollama says a time that is far away, of one on a GPU that all of it is there."""
    server = own_server()
    [shown] = server.get("/api/ps").json["models"]
    left = datetime.fromisoformat(shown["expires_at"]) - datetime.now(UTC)
    assert left.days > 20 * 365 and shown["size_vram"] == 0 < shown["size"]
    server.pool.default.engine.info.kernels = "gpu"
    [shown] = server.get("/api/ps").json["models"]
    assert shown["size_vram"] == shown["size"]


def test_a_prompt_of_a_model_without_a_chat_template_is_continued(own_server):
    """As by Ollama, whose template is the prompt where a model has none."""
    server = own_server()
    model = server.pool.default.text.result()
    asked = {"model": "fake", "prompt": "abc", "stream": False}
    assert server.post("/api/generate", asked).json["prompt_eval_count"] == len("user:abc\nassistant:")
    model.has_chat_template = False
    reply = server.post("/api/generate", asked).json
    assert (reply["response"], reply["prompt_eval_count"]) == ("abc", 3)
    model.encode_chat = lambda *given: pytest.fail("it is rendered")
    assert server.post("/api/generate", asked | {"format": "json", "stream": True}).status == 200

    def refuse(*given):
        raise RequestError("none", code="no_chat_template")

    model.encode_chat = refuse
    assert server.post("/api/generate", asked | {"system": "x"}).status == 400
    model.template_refused = "it imports"
    assert server.post("/api/generate", asked).status == 400


def test_num_predict_beyond_the_context_ends_with_it(client):
    """It is a bound there: clients send 128,000 to whatever model."""
    options = {"num_predict": 1 << 20}
    assert client.chat("fake", user("abc"), options=options).message.content == "abc"
    for raw in (False, True):
        assert client.generate("fake", "abc", raw=raw, options=options).response == "abc"
    whole = client.chat("fake", user("!tokens=2000000"), options=options)
    context = client.ps().models[0].context_length
    assert (whole.done_reason, whole.prompt_eval_count + whole.eval_count) == ("length", context)
    with pytest.raises(ollama.ResponseError, match="context is"):
        client.chat("fake", user("a" * context), options=options)


def test_a_request_without_a_prompt_loads_the_model(client):
    assert client.generate("fake").done_reason == "load"
    assert client.chat("fake", []).done_reason == "load"
    with pytest.raises(ollama.ResponseError, match="not served"):
        client.generate("other")


def test_embed(client):
    reply = client.embed("fake", ["a", "bc"])
    assert len(reply.embeddings) == 2 and reply.prompt_eval_count == 3
    assert all(math.isclose(math.fsum(x * x for x in vector), 1, rel_tol=1e-3) for vector in reply.embeddings)
    assert len(client.embed("fake", "a", dimensions=2).embeddings[0]) == 2
    assert client.embeddings("fake", "a").embedding == reply.embeddings[0]


@pytest.mark.parametrize("nothing", [[], ""])
def test_nothing_to_embed_loads_the_model(client, nothing):
    assert client.embed("fake", nothing).embeddings == []
    with pytest.raises(ollama.ResponseError, match="not served"):
        client.embed("other", nothing)
    if nothing != []:
        assert client.embeddings("fake", nothing).embedding == []
    with pytest.raises(ollama.ResponseError, match=r"input\[1\]"):
        client.embed("fake", ["a", ""])


def test_latest_is_the_model(client, tool_server):
    """A name without a tag means that tag to Ollama's users."""
    assert client.chat("fake:latest", user("a")).message.content == "a"
    assert client.show("fake:latest").details == client.show("fake").details
    for named in ({"name": "fake"}, {"name": "fake", "model": "fake"}):  # as older clients call it, as Open WebUI does
        assert tool_server.post("/api/show", named).json["template"] == TEMPLATE
    with pytest.raises(ollama.ResponseError, match="not served"):
        client.chat("fake:7b", user("a"))
    with pytest.raises(ollama.ResponseError, match="^There is no route /api/copy"):  # a text, as in all its errors
        client.copy("fake", "other")
    assert tool_server.post("/v1/chat/completions", {"model": "fake:latest", "messages": user("a")}).status == 404


def test_durations_tell_the_prompt_from_what_stands_before_it():
    import time
    from types import SimpleNamespace

    from zse.server.routes.ollama import _Writer

    now = time.monotonic()
    work = SimpleNamespace(request=SimpleNamespace(started=now - 9), first=now - 2, prefill_s=3.0)
    job = SimpleNamespace(
        work=work,
        completion=SimpleNamespace(model="m"),
        choices=[SimpleNamespace(finish_reason="stop")],
        usage=SimpleNamespace(prompt=6, completion=4),
    )
    end = _Writer(True, job)._end()
    took = [end[f"{name}_duration"] / 1e9 for name in ("load", "prompt_eval", "eval", "total")]
    assert took == pytest.approx([4, 3, 2, 9], abs=0.5) and sum(took[:3]) == pytest.approx(took[3])


def test_models(client, tool_server):
    [model] = client.list().models
    assert model.model == "fake" and len(model.digest) == 64
    [loaded] = client.ps().models
    assert loaded.model == "fake" and loaded.context_length > 0
    shown = client.show("fake")
    assert set(shown.capabilities) == {"completion", "embedding", "tools", "thinking"} and shown.template == TEMPLATE
    assert tool_server.get("/api/version").json["version"]


def test_what_a_file_says_of_itself(tmp_path):
    import tiny_model

    from zse.server.routes import ollama as route

    path = str(tiny_model.write(tmp_path))
    facts = route.facts_of(path, 0.0)
    assert facts["details"]["family"] and facts["parameter_count"] > 1000 and facts["size"] > 1000
    assert str(tmp_path) not in json.dumps(facts) and route.facts_of(str(tmp_path / "none"), 0.0) == {}


def test_errors(client, own_server):
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat("other", user("x"))
    assert caught.value.status_code == 404 and "not served" in caught.value.error
    with pytest.raises(ollama.ResponseError, match="finite"):
        list(client.chat("fake", user("!tokens=9 !nan=3"), stream=True))
    server = own_server(key=(Key("a", "right"),))
    reply = server.post("/api/chat", {"model": "fake", "messages": user("x")})
    assert reply.status == 401 and type(reply.json["error"]) is str
    with ollama.Client(host=server.base, headers={"authorization": "Bearer right"}) as with_key:
        assert with_key.chat("fake", user("x")).message.content == "x"


def body(**more):
    return {"model": "m", "messages": user("x")} | more


@pytest.mark.parametrize(
    "wrong, param",
    [
        (body(model=""), "model"),
        (body(options={"temperature": 3}), "options.temperature"),
        (body(options={"mirostat": 1}), "options.mirostat"),
        (body(options={"unheard": 1}), "options.unheard"),
        (body(options={"stop": ["a"] * 17}), "options.stop"),
        (body(format="xml"), "format"),
        (body(format=5), "format"),
        (body(think="hard"), "think"),
        (body(keep_alive=[]), "keep_alive"),
        (body(images=[]), "images"),
        (body(messages=[{"role": "user", "content": "x", "images": ["http://x"]}]), "messages[0].images[0]"),
        (body(messages=[{"role": "function", "content": "x"}]), "messages[0].role"),
        (body(messages=[{"role": "tool", "content": "x"}]), "messages[0]"),
        (
            body(messages=[{"role": "assistant", "tool_calls": [{"function": {}}]}]),
            "messages[0].tool_calls[0].function.name",
        ),
        (body(tools=[{"type": "function"}]), "tools[0].function"),
        (body(messages=[]), "messages"),
    ],
)
def test_what_is_refused(wrong, param):
    with pytest.raises(RequestError) as caught:
        read_ollama_chat(wrong)
    assert caught.value.param == param and caught.value.status == 400


@pytest.mark.parametrize(
    "change, param",
    [
        ({"suffix": "x"}, "suffix"),
        ({"template": "x"}, "template"),
        ({"context": [1]}, "context"),
        ({"truncate": True}, "truncate"),
        ({"images": ["http://x"]}, "images[0]"),
        ({"raw": True, "system": "x"}, "system"),
        ({"raw": True, "format": "json"}, "format"),
        ({"prompt": ""}, "prompt"),
    ],
)
def test_what_generate_refuses(change, param):
    with pytest.raises(RequestError) as caught:
        read_ollama_generate({"model": "m", "prompt": "x"} | change)
    assert caught.value.param == param


def test_what_the_chat_template_sees():
    """Calls get ids, and results those of the calls that they answer."""
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    completion = read_ollama_chat(
        body(
            messages=[
                {"role": "user", "content": "q"},
                {
                    "role": "assistant",
                    "content": "",
                    "thinking": "t",
                    "tool_calls": [call, {"function": {"name": "g"}}],
                },
                {"role": "tool", "tool_name": "g", "content": "2"},
                {"role": "tool", "content": "1"},
            ],
            think="low",
            format={"type": "object", "properties": {}},
        )
    )
    assert [message.get("tool_call_id") for message in completion.messages] == [None, None, "call_2", "call_1"]
    assert completion.messages[1]["reasoning_content"] == "t"
    assert completion.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert completion.template_variables == {"enable_thinking": True, "reasoning_effort": "low"}
    assert completion.structure_field == "format" and completion.structure.kind == "json_schema"
    assert read_ollama_chat(body(think=False)).thinking_budget == 0


def test_sampling_is_that_of_a_chat_request():
    options = {
        "seed": 5,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repeat_penalty": 1.1,
        "num_predict": 9,
    }
    ours = read_ollama_chat(body(options=options, stream=False))
    chat = {name: options[name] for name in ("seed", "temperature", "top_k", "top_p", "min_p")}
    theirs = read_chat(body(**chat, repetition_penalty=1.1, max_tokens=9))
    assert ours.params == theirs.params and ours.left_out == theirs.left_out
    assert read_ollama_chat(body(options={"num_predict": -1})).params.max_tokens is None


def test_every_option_of_the_client_is_known():
    assert set(ollama.Options.model_fields) <= {*OPTIONS.fields, *OPTIONS.ignored}
