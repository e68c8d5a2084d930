"""What the completion routes answer: text, tokens, log-probabilities, usage, and the grammar of streams."""

import concurrent.futures
import json
import random
import re
import time

import pytest
from fake_text import TextModel
from harness import chat_body, read_reply, request, wait_for

from zse.engine.messages import TokenLogprob, Tokens
from zse.sampling.params import SamplingParams
from zse.server.answering import Choice
from zse.server.requests.completions import choice_seed

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def joined(events: list, index: int = 0) -> str:
    """The text of one choice of a stream."""
    parts = [choice for event in events if event != "[DONE]" for choice in event["choices"] if choice["index"] == index]
    return "".join(part["delta"].get("content") or "" if "delta" in part else part["text"] for part in parts)


def check_grammar(events: list, num_choices: int, chat: bool, usage: bool) -> None:
    """Role first, then deltas, one finish_reason per choice, usage if asked, [DONE] once and last."""
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    chunks = events[:-1]
    assert len({(chunk["id"], chunk["created"], chunk["object"], chunk["model"]) for chunk in chunks}) == 1
    if usage:
        assert chunks[-1]["choices"] == [] and set(chunks[-1]["usage"]) >= {"prompt_tokens", "total_tokens"}
        chunks = chunks[:-1]
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    for index in range(num_choices):
        parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [part["finish_reason"] is not None for part in parts] == [False] * (len(parts) - 1) + [True]
        if chat:
            assert parts[0]["delta"] == {"role": "assistant", "content": ""}
            assert all("role" not in part["delta"] for part in parts[1:])


def test_chat_whole(server):
    reply = server.chat("hello").json
    assert reply["object"] == "chat.completion" and reply["id"].startswith("chatcmpl-") and reply["model"] == "fake"
    assert abs(reply["created"] - time.time()) < 10
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert reply["usage"] == {
        "prompt_tokens": 21,
        "completion_tokens": 6,
        "total_tokens": 27,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_chat_stream(server):
    for usage in (False, True):
        options = {"stream_options": {"include_usage": usage}} if usage else {}
        reply = server.chat("héllo 😀!", stream=True, **options)
        assert reply.headers["content-type"].startswith("text/event-stream")
        check_grammar(reply.events, 1, True, usage)
        assert joined(reply.events) == "héllo 😀!"
        assert "�" not in reply.body.decode()


def test_cached_tokens(server):
    assert server.chat("!cached " + "a" * 40).json["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    assert server.chat("!cached " + "a" * 40, n=2).json["usage"]["prompt_tokens_details"]["cached_tokens"] == 64


@pytest.mark.parametrize(
    "prompt,texts,tokens",
    [
        ("abc", ["abc"], 3),
        (["abc", "d"], ["abc", "d"], 4),
        ([97, 98], ["ab"], 2),
        ([[97], [98, 99]], ["a", "bc"], 3),
        (["abc"], ["abc"], 3),
        ([[97]], ["a"], 1),
    ],
)
def test_prompt_forms(server, prompt, texts, tokens):
    reply = server.complete(prompt).json
    assert [choice["text"] for choice in reply["choices"]] == texts
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(texts)))
    assert reply["usage"]["prompt_tokens"] == tokens and reply["object"] == "text_completion"
    events = server.complete(prompt, stream=True).events
    check_grammar(events, len(texts), False, False)
    assert [joined(events, index) for index in range(len(texts))] == texts


def test_echo(server):
    assert server.complete("abc", echo=True).json["choices"][0]["text"] == "abcabc"
    assert server.complete([97, 98], echo=True).json["choices"][0]["text"] == "abab"
    assert joined(server.complete(["abc", "d"], echo=True, stream=True, n=2).events, 3) == "dd"


def test_finish_reasons_and_limits(server):
    assert server.complete("abcdef", max_tokens=3).json["choices"][0] == {
        "index": 0,
        "text": "abc",
        "logprobs": None,
        "finish_reason": "length",
    }
    assert server.complete("!tokens=40").json["usage"]["completion_tokens"] == 16  # the route's default
    assert server.chat("!tokens=40").json["usage"]["completion_tokens"] == 41
    assert server.chat("abcdef", max_completion_tokens=2).json["choices"][0]["message"]["content"] == "ab"
    choice = server.complete("abcdef", stop_token_ids=[100]).json["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")
    assert server.complete("ab", ignore_eos=True, max_tokens=5).json["choices"][0]["text"] == "ababa"


@pytest.mark.parametrize(
    "stop,text",
    [("cd", "ab"), (["xx", "f"], "abcde"), ("fg", "abcdef"), ("abcdef", ""), (["ef", "cde"], "ab"), ("é", "abcdef")],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wide", ["", "!wide=3 "])
def test_stop_strings(server, stop, text, stream, wide):
    prompt, expected = wide + "abcdef", wide + text
    if stream:
        events = server.complete(prompt, stop=stop, stream=True, max_tokens=50).events
        assert joined(events) == expected
        assert [event["choices"][0]["finish_reason"] for event in events[:-1]][-1] == "stop"
    else:
        choice = server.complete(prompt, stop=stop, max_tokens=50).json["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (expected, "stop")


@pytest.mark.timed
def test_stop_string_ends_the_generation(server):
    start = time.monotonic()
    reply = server.complete("!tokens=1000 !ms=20", stop="c", max_tokens=1000).json
    assert reply["choices"][0]["text"] == "ab" and reply["usage"]["completion_tokens"] == 3
    assert time.monotonic() - start < 2
    server.assert_quiet()


def test_partial_stop_strings_never_leak(server):
    events = server.complete("aab aab aabc", stop="aabc", stream=True).events
    assert joined(events) == "aab aab "
    for event in events[:-2]:
        assert not event["choices"][0]["text"].endswith("aabc")


def test_n_and_seeds(server):
    reply = server.complete("!random", n=3, seed=5).json
    texts = [choice["text"] for choice in reply["choices"]]
    assert len(set(texts)) == 3 and [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert reply["usage"]["prompt_tokens"] == 7 and reply["usage"]["completion_tokens"] == 39
    assert [choice["text"] for choice in server.complete("!random", n=3, seed=5).json["choices"]] == texts
    assert server.complete("!random", seed=choice_seed(5, 1)).json["choices"][0]["text"] == texts[1]
    neighbours = {choice["text"] for choice in server.complete("!random", n=16, seed=6).json["choices"]}
    assert len(neighbours) == 16 and neighbours.isdisjoint(texts)
    events = server.complete("!random", n=3, seed=5, stream=True).events
    check_grammar(events, 3, False, False)
    assert [joined(events, index) for index in range(3)] == texts


def test_best_of_returns_the_most_likely(server):
    """The fake's tokens have log-probability -0.5 - seed: the smallest seed is the best."""
    texts = [choice["text"] for choice in server.complete("!random", n=4, seed=5).json["choices"]]
    seeds = [5, *(choice_seed(5, index) for index in range(1, 4))]
    texts = [text for _, text in sorted(zip(seeds, texts, strict=True))]
    reply = server.complete("!random", n=2, best_of=4, seed=5).json
    assert [choice["text"] for choice in reply["choices"]] == texts[:2]
    assert reply["choices"][0]["logprobs"] is None and reply["usage"]["completion_tokens"] == 52


def test_chat_logprobs(server):
    choice = server.chat("aé", logprobs=True, top_logprobs=2).json["choices"][0]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "�", "�"]
    assert bytes(sum((entry["bytes"] for entry in content), [])) == "aé".encode()
    assert content[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -1.5, "bytes": [98]},
        ],
    }
    assert server.chat("a", logprobs=True).json["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert server.chat("a", logprobs=False).json["choices"][0]["logprobs"] is None
    assert server.chat("a", logprobs=False, top_logprobs=0).json["choices"][0]["logprobs"] is None
    events = server.chat("aé", logprobs=True, top_logprobs=2, stream=True).events
    streamed = [entry for event in events[:-1] for entry in (event["choices"][0]["logprobs"] or {}).get("content", [])]
    assert streamed == content


def test_completion_logprobs(server):
    logprobs = server.complete("aé", logprobs=1).json["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"a": -0.5}, {"bytes:\\xc3": -0.5}, {"bytes:\\xa9": -0.5}],
        "text_offset": [0, 1, 1],
    }
    none = server.complete("ab", logprobs=0).json["choices"][0]["logprobs"]
    assert none["top_logprobs"] == [{"a": -0.5}, {"b": -0.5}]
    stopped = server.complete("abcd", logprobs=0, stop="c").json["choices"][0]
    assert stopped["text"] == "ab"


def test_offsets_count_text_that_may_begin_a_stop_string(server):
    for more in ({}, {"echo": True}):
        given = {"logprobs": 0, "stop": "cdx", "max_tokens": 6} | more
        reply = server.complete("abcdef", **given).json["choices"][0]
        assert reply["text"][-6:] == "abcdef"
        assert reply["logprobs"]["text_offset"] == list(range(len(reply["text"])))
        events = server.complete("abcdef", stream=True, **given).events
        streamed = [event["choices"][0]["logprobs"] for event in events[:-1]]
        assert sum((found["text_offset"] for found in streamed if found), []) == reply["logprobs"]["text_offset"]


def test_the_echo_of_a_prompt_that_is_cut(server):
    """What was read is repeated: its log-probabilities are those of that text."""
    for prompt in ("abcd", [97, 98, 99, 100]):
        given = {"echo": True, "logprobs": 0, "max_tokens": 1, "truncate_prompt_tokens": 2}
        reply = server.complete(prompt, **given).json["choices"][0]
        assert reply["text"] == "cdc"
        assert (reply["logprobs"]["tokens"], reply["logprobs"]["text_offset"]) == (["c", "d", "c"], [0, 1, 2])


def test_answers_are_ranked_by_the_tokens_that_they_have():
    """Not by those that came with the end of a stop string."""
    wide = Choice(0, TextModel(), SamplingParams(stop=("b",), logprobs=0))
    alone = Choice(1, TextModel(), SamplingParams(stop=("b",), logprobs=0))
    scores = [TokenLogprob(value, []) for value in (-1.0, -1.0, -50.0)]
    wide.feed(Tokens(1, [*b"abc"], scores))
    alone.feed(Tokens(2, [*b"ab"], scores[:2]))
    assert wide.rank[0] == alone.rank[0] == 1.0


def test_echoed_logprobs(server):
    """The prompt's tokens come first, without a log-probability for the one that nothing stands before."""
    choice = server.complete("aé", echo=True, logprobs=1, max_tokens=2).json["choices"][0]
    assert choice["text"].startswith("aéa")
    assert choice["logprobs"] == {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9", "a", "bytes:\\xc3"],
        "token_logprobs": [None] + [-0.5] * 4,
        "top_logprobs": [None, {"bytes:\\xc3": -0.5}, {"bytes:\\xa9": -0.5}, {"a": -0.5}, {"bytes:\\xc3": -0.5}],
        "text_offset": [0, 1, 1, 2, 3],
    }
    only = server.complete(["abc", "d"], echo=True, logprobs=0, max_tokens=0).json
    assert [choice["text"] for choice in only["choices"]] == ["abc", "d"]
    assert only["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert only["choices"][0]["finish_reason"] == "length" and only["usage"]["completion_tokens"] == 0
    events = server.complete("ab", echo=True, logprobs=0, max_tokens=2, stream=True).events
    streamed = [event["choices"][0]["logprobs"] for event in events[:-1] if event["choices"][0]["logprobs"]]
    assert sum((entry["token_logprobs"] for entry in streamed), []) == [None, -0.5, -0.5, -0.5]
    assert server.complete("ab", echo=True, max_tokens=0).json["choices"][0] == {
        "index": 0,
        "text": "ab",
        "logprobs": None,
        "finish_reason": "length",
    }


def test_prompt_logprobs(server):
    choices = server.complete(["abc", "d"], prompt_logprobs=2, max_tokens=1, n=2).json["choices"]
    first = [
        None,
        {
            "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
            "99": {"logprob": -1.5, "rank": 2, "decoded_token": "c"},
        },
    ]
    assert choices[0]["prompt_logprobs"][:2] == choices[1]["prompt_logprobs"][:2] == first
    assert choices[2]["prompt_logprobs"] == [None] and choices[0]["logprobs"] is None
    reply = server.chat("ab", prompt_logprobs=0, max_tokens=1).json
    assert reply["prompt_logprobs"][0] is None and "prompt_logprobs" not in reply["choices"][0]
    assert list(reply["prompt_logprobs"][-1].values())[0]["rank"] is None
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]
    assert server.complete("!nan", prompt_logprobs=1).error["code"] == "numerical_error"


def test_beam_search(server):
    reply = server.complete("abc", use_beam_search=True, beam_width=3, n=2, logprobs=1).json
    first, second = reply["choices"]
    assert (first["text"], first["finish_reason"]) == ("aaa", "stop") and second["text"] == "bbb"
    assert first["logprobs"]["token_logprobs"] == [-1.0] * 3 and second["logprobs"]["top_logprobs"][0] == {"b": -2.0}
    assert reply["usage"]["completion_tokens"] == 8
    both = server.complete(["ab", "cd"], use_beam_search=True, n=2, max_tokens=1, echo=True).json["choices"]
    assert [(choice["index"], choice["text"]) for choice in both] == [(0, "ab"), (1, "abb"), (2, "cd"), (3, "cdd")]
    assert [choice["finish_reason"] for choice in both] == ["stop", "length"] * 2
    chat = server.chat("hi", use_beam_search=True, n=2, early_stopping="never", length_penalty=-1, logprobs=True).json
    assert len(chat["choices"]) == 2 and chat["choices"][1]["message"]["role"] == "assistant"
    assert chat["choices"][1]["logprobs"]["content"][0]["logprob"] == -2.0


@pytest.mark.parametrize(
    "fields,code,param",
    [
        ({"stream": True}, "invalid_value", "stream"),
        ({"stop": "x"}, "invalid_value", "stop"),
        ({"presence_penalty": 1}, "invalid_value", "presence_penalty"),
        ({"beam_width": 1, "n": 2}, "out_of_range", "beam_width"),
        ({"logit_bias": {"5": 1}}, "invalid_value", "logit_bias"),
        ({"early_stopping": 1}, "invalid_type", "early_stopping"),
        ({"beam_width": 17}, "out_of_range", "beam_width"),
        ({"length_penalty": 11}, "out_of_range", "length_penalty"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "invalid_value", "structured_outputs"),
        ({"use_beam_search": False, "beam_width": 2}, "invalid_value", "beam_width"),
    ],
)
def test_beam_search_refusals(server, fields, code, param):
    error = server.complete("abc", **{"use_beam_search": True, **fields}).error
    assert (error["code"], error["param"]) == (code, param)


def test_failures_before_the_first_token_keep_their_status(server):
    for stream in (False, True):
        reply = server.chat("!nan=0", stream=stream)
        assert (reply.status, reply.error["code"]) == (500, "numerical_error")
        assert reply.headers["x-should-retry"] == "false"


def test_failures_in_a_stream_end_it_with_one_error(server):
    reply = server.chat("!tokens=9 !nan=3", stream=True)
    assert reply.status == 200 and reply.headers["x-request-id"]
    *events, last = reply.events
    assert joined(events) == "abc" and last["error"]["code"] == "numerical_error" and "[DONE]" not in events
    assert all(event["choices"][0]["finish_reason"] is None for event in events)
    reply = server.chat("!tokens=9 !nan=3")
    assert (reply.status, reply.error["type"]) == (500, "server_error")


def test_random_texts_stream_exactly(server):
    draw = random.Random(3)
    alphabet = ["a", " ", "é", "日本", "👩‍👩‍👧", "🇩🇪", "e\u0301", "שלום", "\n", '"', "\\", "\u2028", "\0"]
    for _ in range(40):
        text = "".join(draw.choices(alphabet, k=draw.randrange(1, 30)))
        wide = f"!wide={draw.randrange(1, 6)} "
        events = server.complete(wide + text, stream=True, max_tokens=1000).events
        assert joined(events) == wide + text
        assert server.complete(wide + text, max_tokens=1000).json["choices"][0]["text"] == wide + text


def test_many_streams_at_once_arrive_in_order(server):
    def one(number: int) -> bool:
        with server.connect(30) as sock:
            sock.sendall(request("POST", CHAT, chat_body(f"!tokens={100 + number}", stream=True)))
            events = read_reply(sock).events
        check_grammar(events, 1, True, False)
        return joined(events) == "".join(chr(97 + index % 26) for index in range(100 + number))

    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        assert all(pool.map(one, range(60)))
    server.assert_quiet()


@pytest.mark.timed
def test_long_prompts_do_not_block_the_loop(own_server):
    server = own_server(engine="--max-context 1000000", max_queue_tokens=1 << 24)
    for body, status in (
        ({"prompt": 'x"\\ é' * 150_000, "max_tokens": 1}, 200),
        ({"prompt": [65] * 250_000, "max_tokens": 1}, 200),
        ({"a": [""] * 300_000}, 400),
        ({"a": {str(number): 1 for number in range(150_000)}}, 400),
        ({"a": [{}] * 49_000}, 400),
        ({"prompt": "a b c " * 2000, "max_tokens": 1, "prompt_logprobs": 20}, 200),
        ({"prompt": "a b c " * 2000, "max_tokens": 0, "echo": True, "logprobs": 5}, 200),
        ({"prompt": "a b c " * 2000, "max_tokens": 1, "echo": True, "logprobs": 5, "stream": True}, 200),
        ({"prompt": ["a" * 200] * 12, "n": 4, "max_tokens": 100, "logprobs": 5}, 200),
    ):
        data = json.dumps(body).encode()
        # RELIABILITY's bar is 50 ms. A shared machine stalls any thread for longer now and then, so that is held against
        # the thread's own time: what is left are calls in other threads that keep the interpreter lock, and the machine. It stalls
        # one of five times, not each.
        found = []
        while not found or (len(found) < 5 and not (found[-1][0] < 0.05 and found[-1][1] < 0.4)):
            server.lag_s = 0.0
            with server.longest_callback() as callback:
                assert server.post(TEXT, data, timeout=60).status == status
            found.append((callback[0][0], server.lag_s, callback[0][1]))
        assert found[-1][0] < 0.05 and found[-1][1] < 0.4, (data[:60], found)


def test_many_answers_at_once_are_no_slow_reader(own_server):
    """256 answers with log-probabilities: what comes in a step or two is more than a stream may have waiting."""
    server = own_server(max_choices=256)
    prompts = ["abcdefgh" * 3] * 16
    reply = server.complete(prompts, n=16, max_tokens=24, logprobs=5)
    assert reply.status == 200 and len(reply.json["choices"]) == 256
    events = server.complete(prompts[:4], n=16, max_tokens=24, logprobs=5, stream=True).events
    assert sum(bool(choice["finish_reason"]) for event in events[:-1] for choice in event["choices"]) == 64


@pytest.mark.timed
def test_requests_wait_for_an_engine_that_loads(own_server):
    server = own_server(engine="--load-ms 600", wait=False)
    ready = server.get("/health/ready")
    assert ready.status == 503 and ready.json["engine"] == "starting" and ready.error["code"] == "engine_restarting"
    assert server.get("/health/live").status == 200
    start = time.monotonic()
    assert server.chat("hi").json["choices"][0]["message"]["content"] == "hi"
    assert time.monotonic() - start < 5
    wait_for(lambda: server.get("/health/ready").status == 200)


def test_ids_are_unique_and_match_the_header(server):
    replies = [server.chat("a") for _ in range(3)]
    assert len({reply.json["id"] for reply in replies}) == 3
    for reply in replies:
        assert reply.json["id"] == "chatcmpl-" + reply.headers["x-request-id"].removeprefix("req_")
        assert re.fullmatch("req_[0-9a-f]{24}", reply.headers["x-request-id"])
