"""What clients are known to send that others would refuse, and what no client means."""

import threading

import fake_text
import pytest

from zse.sampling.params import SamplingParams
from zse.server.admission import Quota
from zse.server.keys import Access, Key
from zse.server.requests.completions import choice_params, choice_seed, read_chat, read_completions
from zse.server.requests.conversation import FOREIGN_KEYS

CHAT = "/v1/chat/completions"
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_foreign_keys_in_messages_say_nothing(server):
    """A second turn as litellm, LangChain or the AI SDK send it: with what they noted in the first."""
    foreign = dict.fromkeys(FOREIGN_KEYS, {"a": 1})
    call = CALL | {key: value for key, value in foreign.items() if key != "id"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi"} | foreign]} | foreign,
        {"role": "assistant", "content": None, "tool_calls": [call]} | foreign,
        {"role": "tool", "tool_call_id": "c1", "content": "1"} | foreign,
    ]
    bare = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "f"} | foreign} | foreign]
    plain = [{"type": "function", "function": {"name": "f"}}]
    assert read_chat({"messages": messages, "tools": tools}) == read_chat({"messages": bare, "tools": plain})
    reply = server.post(CHAT, {"messages": [{"role": "user", "content": "hi", "provider_specific_fields": {}}]})
    assert reply.status == 200


@pytest.mark.parametrize(
    "body, param",
    [
        ({"messages": [{"role": "user", "content": "hi", "colour": 1}]}, "messages[0].colour"),
        ({"messages": [{"role": "user", "content": "hi"}], "provider_specific_fields": {}}, "provider_specific_fields"),
    ],
)
def test_unknown_keys_are_refused_still(server, body, param):
    reply = server.post(CHAT, body)
    assert reply.status == 400 and reply.error["code"] == "unknown_parameter" and reply.error["param"] == param


def test_a_field_of_others_caches_is_accepted(server):
    assert server.chat("hi", prompt_cache_retention="24h").status == 200


@pytest.mark.parametrize("path", ["/health", "/health/", "/v1/models/", "/models", "/openapi.json/"])
def test_paths_as_clients_write_them(server, path):
    assert server.get(path).status == 200


@pytest.mark.parametrize(
    "path", ["/rerank", "/v1/rerank/", "/v2/rerank/", "/v1/v1/rerank", "/score", "/embeddings/", "/detokenize/"]
)
def test_paths_of_posts(server, path):
    reply = server.post(path, {})
    assert reply.status == 400 and reply.error["code"] != "not_found"
    assert server.get(path).status == 405


@pytest.mark.parametrize("path", ["/v1/models/fake", "/models/fake", "/v1/models/fake/"])
def test_one_model(server, path):
    assert server.get(path).json["id"] == "fake"


def test_a_path_that_is_unknown_is_told_what_there_is(server):
    message = server.post("/v1/images", {}).error["message"]
    assert message.startswith("There is no route /v1/images.") and "POST /v1/chat/completions" in message
    assert "Did you mean /v1/chat/completions?" in server.post("/v1/chat/completion", {}).error["message"]
    assert "Did you mean" not in server.get("/nothing").error["message"]


def test_tokenizing_counts_as_a_request_and_takes_no_tokens(own_server):
    server = own_server(key=(Key("a", "ka", None, Quota(rpm=2, tpm=1000)),))
    headers = {"authorization": "Bearer ka"}
    for path in ("/tokenize", "/v1/tokenize"):
        reply = server.post(path, {"prompt": "a" * 4000}, headers)
        assert reply.status == 200 and reply.headers["x-ratelimit-remaining-tokens"] == "1000"
    assert server.post("/tokenize", {"prompt": "a"}, headers).status == 429


def test_any_model_name(own_server):
    server = own_server(any_model_name=True)
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}
    assert server.post(CHAT, body).json["model"] == "gpt-4o"
    assert server.post("/tokenize", {"model": "gpt-4o", "prompt": "a"}).status == 200
    bound = own_server(any_model_name=True, key=(Key("a", "ka", access=Access(models=frozenset({"other"}))),))
    assert bound.post(CHAT, body, {"authorization": "Bearer ka"}).status == 403


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/chat/completions/"])
def test_the_base_url_may_lack_v1(server, path):
    assert server.post(path, {"messages": [{"role": "user", "content": "hi"}]}).status == 200
    assert server.get(path).status == 405 and server.get("/chat").status == 404 and server.get("/v1").status == 404


def test_tokenize_and_back(server):
    reply = server.post("/tokenize", {"prompt": "aé", "return_token_strs": True}).json
    assert reply["tokens"] == list("aé".encode()) and reply["count"] == 3 and reply["max_model_len"] > 0
    assert reply["token_strs"][0] == "a"
    for path in ("/tokenize", "/v1/tokenize", "/tokenize/"):
        chat = server.post(path, {"messages": [{"role": "user", "content": "x"}]}).json
        assert bytes(chat["tokens"]).decode().startswith("user:x")
    assert server.post("/detokenize", {"tokens": list(b"abc")}).json == {"prompt": "abc"}
    for body in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}, {"prompt": 3}):
        assert server.post("/tokenize", body).status == 400
    assert server.post("/detokenize", {"tokens": [10**6]}).error["code"] == "invalid_token_id"
    assert server.post("/tokenize", {"prompt": "a", "model": "other"}).error["code"] == "model_not_found"


def test_a_model_that_is_not_there_is_named_with_those_that_are(server):
    error = server.post(CHAT, {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}).error
    assert error["code"] == "model_not_found" and "'gpt-4o'" in error["message"] and "fake" in error["message"]


def test_what_can_never_fit_is_no_retryable_error(own_server):
    server = own_server(max_choices=4)
    reply = server.post("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2})
    assert reply.status == 400 and "6 answers" in reply.error["message"] and "holds 4" in reply.error["message"]


@pytest.mark.parametrize(
    "field, value",
    [("temperature", 0.5), ("top_p", 0.5), ("top_k", 3), ("min_p", 0.1), ("seed", 3), ("reasoning_effort", "low")],
)
def test_a_beam_search_drops_nothing_silently(server, field, value):
    reply = server.chat("hi", use_beam_search=True, **{field: value})
    assert reply.status == 400 and reply.error["param"] == field
    assert server.chat("hi", use_beam_search=True, temperature=0).status == 200


@pytest.mark.parametrize("effort, status", [("none", 200), ("low", 400), ("high", 400)])
def test_every_effort_is_refused_where_there_is_no_reasoning(server, effort, status):
    reply = server.chat("hi", reasoning_effort=effort)
    assert reply.status == status and (status == 200 or reply.error["param"] == "reasoning_effort")


def test_choices_have_seeds_of_their_own():
    completion = read_completions({"prompt": "a", "n": 16, "seed": 7})
    seeds = [choice_params(completion, index, 1).seed for index in range(16)]
    others = [choice_seed(8, index) for index in range(16)]
    assert seeds[0] == 7 and len(set(seeds)) == 16 and not set(seeds) & {8, *others}
    assert all(SamplingParams(seed=seed) and 0 <= seed < 1 << 63 for seed in seeds)


@pytest.mark.parametrize(
    "path, body",
    [
        (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
        ("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_the_loop_does_not_wait_for_a_template(server, monkeypatch, path, body):
    """A chat template is a stranger's program: also a short chat is rendered beside the event loop."""
    render = fake_text.TextModel.encode_chat
    loop_thread = server.call(threading.get_ident)
    rendered_by = []

    def noted(*args, **kwargs):
        rendered_by.append(threading.get_ident())
        return render(*args, **kwargs)

    monkeypatch.setattr(fake_text.TextModel, "encode_chat", noted)
    assert server.post(path, body).status == 200
    assert rendered_by and loop_thread not in rendered_by
