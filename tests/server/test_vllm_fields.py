"""The fields that vLLM has beside OpenAI's, over HTTP."""

import json

import pytest
from harness import chat_body

from zse.errors import RequestError
from zse.server.requests.completions import read_chat, read_completions
from zse.structured.options import Structure

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def events(reply):
    return [json.loads(line[6:]) for line in reply.body.decode().split("\n\n") if line.startswith("data: {")]


def test_token_ids(server):
    reply = server.post(CHAT, chat_body("ab", return_token_ids=True)).json
    assert bytes(reply["prompt_token_ids"]) == b"user:ab\nassistant:"
    assert reply["choices"][0]["token_ids"] == [*b"ab", 256]  # the token that ended it, too
    reply = server.post(TEXT, {"prompt": ["ab", "c"], "return_token_ids": True}).json
    assert [bytes(choice["prompt_token_ids"]) for choice in reply["choices"]] == [b"ab", b"c"]
    assert [choice["token_ids"] for choice in reply["choices"]] == [[*b"ab", 256], [*b"c", 256]]
    assert "token_ids" not in server.post(CHAT, chat_body("ab")).json["choices"][0]


@pytest.mark.parametrize("path, given", [(CHAT, chat_body("hé!")), (TEXT, {"prompt": "hé!"})])
def test_streamed_token_ids(server, path, given):
    chunks = events(server.post(path, given | {"stream": True, "return_token_ids": True, "stop": "!"}))
    assert [chunk.get("prompt_token_ids") for chunk in chunks].count(None) < len(chunks)
    assert "prompt_token_ids" in chunks[0]
    ids = [id for chunk in chunks for choice in chunk["choices"] for id in choice.get("token_ids", ())]
    assert bytes(ids) == "hé!".encode()  # also the bytes of a character that was not whole, and of the stop string


def test_the_stop_string_in_the_answer(server):
    for stream in (False, True):
        given = chat_body("ab!cd", stop=["!c"], include_stop_str_in_output=True, stream=stream)
        reply = server.post(CHAT, given)
        text = reply.json["choices"][0]["message"]["content"] if not stream else ""
        for chunk in events(reply) if stream else ():
            text += chunk["choices"][0]["delta"].get("content", "")
        assert text == "ab!c"
    assert server.post(CHAT, chat_body("ab!cd", stop=["!c"])).json["choices"][0]["message"]["content"] == "ab"


def test_a_prompt_that_is_cut(server, own_server):
    given = {"prompt": "abcdef", "return_token_ids": True}
    reply = server.post(TEXT, given | {"truncate_prompt_tokens": 2}).json
    assert bytes(reply["choices"][0]["prompt_token_ids"]) == b"ef" and reply["usage"]["prompt_tokens"] == 2
    small = own_server(engine="--max-context 10")
    assert small.post(TEXT, {"prompt": "a" * 50}).json["error"]["code"] == "context_length_exceeded"
    reply = small.post(TEXT, {"prompt": "a" * 50, "truncate_prompt_tokens": -1, "max_tokens": 4}).json
    assert reply["usage"]["prompt_tokens"] == 6
    assert small.post(TEXT, {"prompt": "a" * 50, "truncate_prompt_tokens": 30, "max_tokens": 4}).status == 200


def test_where_the_prompt_ends(server):
    def prompt(*messages, **more):
        return bytes(
            server.post(CHAT, {"messages": list(messages), "return_token_ids": True} | more).json["prompt_token_ids"]
        )

    said, begun = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "x"}
    assert prompt(said, add_generation_prompt=False) == b"user:ab\n"
    assert prompt(said, begun, continue_final_message=True) == b"user:ab\nassistant:x"
    assert prompt(said, begun, continue_final_message=True, add_generation_prompt=False) == b"user:ab\nassistant:x"

    def counted(*messages, **more):
        return server.post("/tokenize", {"messages": list(messages)} | more)

    more = {"chat_template_kwargs": {"enable_thinking": False}}
    assert bytes(counted(said, **more).json["tokens"]) == b"user:ab\nassistant:"
    assert bytes(counted(said, add_generation_prompt=False).json["tokens"]) == b"user:ab\n"
    assert bytes(counted(said, begun, continue_final_message=True).json["tokens"]) == b"user:ab\nassistant:x"
    assert counted(said, continue_final_message=True).error["param"] == "continue_final_message"
    for wrong in ({"messages": [said]}, {"messages": [said, begun], "add_generation_prompt": True}):
        reply = server.post(CHAT, wrong | {"continue_final_message": True})
        assert reply.status == 400 and reply.error["param"] == "continue_final_message"


@pytest.mark.parametrize(
    "field, value", [("json", {"type": "object"}), ("regex", "a+"), ("choice", ["a", "b"]), ("grammar", 'root ::= "a"')]
)
def test_guided_fields(field, value):
    """They are the older names of structured_outputs."""
    for read, given in ((read_chat, chat_body("x")), (read_completions, {"prompt": "x"})):
        old, new = read(given | {f"guided_{field}": value}), read(given | {"structured_outputs": {field: value}})
        assert old.structure == new.structure and isinstance(old.structure, Structure)
        assert old.structure_field == f"guided_{field}"
        with pytest.raises(RequestError) as caught:
            read(given | {f"guided_{field}": 5})
        assert caught.value.param == f"guided_{field}" and "structured" not in caught.value.message
    with pytest.raises(RequestError, match="both ask for a form"):
        read_chat(chat_body("x") | {"guided_regex": "a", "response_format": {"type": "json_object"}})


@pytest.mark.parametrize("value, code", [(0, "out_of_range"), (-2, "out_of_range"), ("5", "invalid_type")])
def test_wrong_cuts(value, code):
    with pytest.raises(RequestError) as caught:
        read_completions({"prompt": "a", "truncate_prompt_tokens": value})
    assert (caught.value.code, caught.value.param) == (code, "truncate_prompt_tokens")
