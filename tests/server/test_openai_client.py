"""The official client against the server: both routes, streamed and not, pairwise parameters, errors and retries."""

import itertools

import openai
import pytest


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.base + "/v1", api_key="any", timeout=20) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_chat(client):
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "hello"}]
    reply = client.chat.completions.create(model="fake", messages=messages)
    assert reply.choices[0].message.content == "hello" and reply.choices[0].finish_reason == "stop"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 6
    # What came back can be sent again.
    again = [*messages, reply.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
    assert client.chat.completions.create(model="fake", messages=again).choices[0].message.content == "more"
    assert (
        client.chat.completions.create(model="fake", messages=[reply.choices[0].message, *messages])
        .choices[0]
        .message.content
        == "hello"
    )


def test_chat_stream_helper(client):
    with client.chat.completions.stream(
        model="fake", messages=[{"role": "user", "content": "héllo"}], stream_options={"include_usage": True}
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "héllo" and final.usage.completion_tokens == 7


def test_completions(client):
    reply = client.completions.create(model="fake", prompt=["a", "bc"], logprobs=2, max_tokens=5)
    assert [choice.text for choice in reply.choices] == ["a", "bc"]
    assert reply.choices[1].logprobs.tokens == ["b", "c"]


# Every pair of values of these occurs in at least one row (all combinations of three, cycled through the rest).
OPTIONS = {
    "stream": (False, True),
    "n": (1, 3),
    "stop": (None, "l", ["xyz", "o!"]),
    "logprobs": (None, 0, 3),
    "max_tokens": (None, 1, 50),
    "temperature": (0, 0.7),
    "seed": (None, 11),
    "usage": (False, True),
    "logit_bias": (None, {"65": -100}),
    "extra_body": (None, {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}),
}


def pairwise(options: dict) -> list[dict]:
    """Rows that cover every pair of values, greedily."""
    names = list(options)
    pairs = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(range(len(names)), 2)
        for x in range(len(options[names[a]]))
        for y in range(len(options[names[b]]))
    }
    rows = []
    while pairs:
        row: dict[int, int] = {}
        for (a, x), (b, y) in sorted(pairs):
            if row.get(a, x) == x and row.get(b, y) == y:
                row[a], row[b] = x, y
        full = [row.get(index, 0) for index in range(len(names))]
        pairs -= {((a, full[a]), (b, full[b])) for a, b in itertools.combinations(range(len(names)), 2)}
        rows.append({name: options[name][value] for name, value in zip(names, full, strict=True)})
    return rows


@pytest.mark.parametrize("row", pairwise(OPTIONS), ids=lambda row: "-".join(str(value) for value in row.values())[:60])
@pytest.mark.parametrize("chat", [True, False])
def test_pairs_of_parameters(client, row, chat):
    options = {name: value for name, value in row.items() if value is not None and name not in ("usage", "logprobs")}
    if row["usage"] and row["stream"]:
        options["stream_options"] = {"include_usage": True}
    limit = row["max_tokens"] or (1000 if chat else 16)
    text = "hello!"
    if chat:
        options["messages"] = [{"role": "user", "content": text}]
        if row["logprobs"] is not None:
            options |= {"logprobs": True, "top_logprobs": row["logprobs"]}
        create = client.chat.completions.create
    else:
        options["prompt"] = text
        if row["logprobs"] is not None:
            options["logprobs"] = row["logprobs"]
        create = client.completions.create
    expected, finish = text[:limit], "length" if limit <= len(text) else "stop"
    for stop in [row["stop"]] if isinstance(row["stop"], str) else row["stop"] or []:
        if stop in expected:
            expected, finish = expected[: expected.index(stop)], "stop"
    reply = create(model="fake", **options)
    texts, finishes, scored, usage = [""] * row["n"], [None] * row["n"], [0] * row["n"], None
    for chunk in reply if row["stream"] else [reply]:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            part = (choice.delta if row["stream"] else choice.message) if chat else choice
            texts[choice.index] += (part.content if chat else part.text) or ""
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
            if choice.logprobs:
                scored[choice.index] += len(choice.logprobs.content if chat else choice.logprobs.tokens)
    assert texts == [expected] * row["n"] and finishes == [finish] * row["n"]
    assert (usage is not None) is (not row["stream"] or row["usage"])
    if usage:
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    if row["logprobs"] is not None:
        assert all(count >= len(expected) for count in scored)


@pytest.mark.parametrize(
    "fields,error",
    [
        ({"temperature": 3}, openai.BadRequestError),
        ({"model": "other"}, openai.NotFoundError),
        ({"extra_body": {"nonsense": 1}}, openai.BadRequestError),
    ],
)
def test_errors_are_raised_and_not_retried(server, client, fields, error):
    before = server.call(lambda: server.server.bodies.total)
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": "fake", "messages": [{"role": "user", "content": "a"}], **fields})
    assert caught.value.type == "invalid_request_error" and caught.value.code and caught.value.request_id
    assert server.call(lambda: server.server.bodies.total) == before


def test_a_500_is_not_retried_and_a_stream_error_is_raised(server, client):
    """x-should-retry: false keeps the client from sending a request again that would fail again."""

    def sent() -> int:
        return server.call(lambda: server.engine._next_id)

    before = sent()
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "!nan=0"}])
    assert sent() == before + 1
    with pytest.raises(openai.APIError) as caught:
        for _ in client.chat.completions.create(
            model="fake", stream=True, messages=[{"role": "user", "content": "!tokens=9 !nan=2"}]
        ):
            pass
    assert caught.value.code == "numerical_error"


def test_wrong_key(own_server):
    server = own_server(key="right")
    with openai.OpenAI(base_url=server.base + "/v1", api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
    with openai.OpenAI(base_url=server.base + "/v1", api_key="right") as client:
        assert len(client.models.list().data) == 1
