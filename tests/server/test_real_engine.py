"""`zse serve` with the real engine and SmolLM2: text, batching, seeds, log-probabilities, refusals, exit codes."""

import concurrent.futures
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time

import openai
import pytest

from zse import LLM, BeamParams, SamplingParams
from zse.server.requests.completions import choice_seed


def command(model: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "zse", "serve", model, "--port", "0", "--max-context", "512", *options]


@pytest.fixture(scope="module")
def client(real_models):
    process = subprocess.Popen(
        command(str(real_models["smollm2"]), "--model-name", "smollm2", "--max-rows", "4"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    line = process.stdout.readline()
    assert " on http://" in line, process.communicate()[1]
    with openai.OpenAI(base_url=line.split(" on ")[1].split()[0] + "/v1", api_key="x", max_retries=0) as client:
        yield client
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 0 and "Traceback" not in stderr


def ask(client, text: str, **options):
    options = {"temperature": 0, "max_tokens": 24} | options
    return client.chat.completions.create(model="smollm2", messages=[{"role": "user", "content": text}], **options)


def test_an_answer_is_the_same_streamed_or_not(client):
    whole = ask(client, "Hello")
    assert whole.choices[0].message.content.startswith("Hello")
    count = whole.usage.completion_tokens
    assert whole.choices[0].finish_reason == ("length" if count == 24 else "stop")
    assert "<|im_end|>" not in whole.choices[0].message.content
    chunks = list(ask(client, "Hello", stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_prompt_forms_agree(client):
    text = client.completions.create(model="smollm2", prompt="The capital of France is", temperature=0, max_tokens=6)
    assert text.choices[0].text.startswith(" Paris")
    both = client.completions.create(
        model="smollm2", prompt=["The capital of France is", "One, two,"], temperature=0, max_tokens=6
    )
    assert both.choices[0].text == text.choices[0].text and len(both.choices) == 2


def test_requests_at_once_get_what_they_get_alone(client):
    questions = ["Hello", "Name a colour.", "Count to five.", "What is water?", "Say yes.", "Why is the sky blue?"]
    alone = [ask(client, question).choices[0].message.content for question in questions]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda question: ask(client, question).choices[0].message.content, questions))
    assert together == alone


def test_seeds(client):
    def texts(**options):
        reply = ask(client, "Tell me a story.", temperature=1.2, n=2, **options)
        return [choice.message.content for choice in reply.choices]

    first = texts(seed=7)
    assert first == texts(seed=7) and first[0] != first[1]
    assert first != texts(seed=1234)


def test_sampling_is_the_models_where_a_request_names_none(client, real_models):
    def text(client, **options):
        reply = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "Tell me a story."}],
            max_tokens=24,
            seed=3,
            **options,
        )
        return reply.choices[0].message.content

    own = text(client)
    named = dict(temperature=0.2, top_p=0.9, extra_body={"repetition_penalty": 1.05})
    assert own == text(client, **named) == text(client, top_p=0.9)
    openais = text(client, temperature=1, top_p=1, extra_body={"repetition_penalty": 1})
    assert openais != own
    options = "--model-name", "smollm2", "--generation-config", "none"
    process = subprocess.Popen(
        command(str(real_models["smollm2"]), *options), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        url = process.stdout.readline().split(" on ")[1].split()[0]
        with openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0) as other:
            assert text(other) == openais
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)


def test_logprobs_are_probabilities(client):
    content = ask(client, "Hello", logprobs=True, top_logprobs=5, max_tokens=5).choices[0].logprobs.content
    for entry in content:
        tops = [top.logprob for top in entry.top_logprobs]
        assert entry.logprob <= 0 and tops == sorted(tops, reverse=True) and tops[0] == entry.logprob
        assert sum(map(math.exp, tops)) <= 1.001
    assert (
        "".join(bytes(entry.bytes).decode() for entry in content)
        == ask(client, "Hello", max_tokens=5).choices[0].message.content
    )


def test_embeddings_and_rerank_find_what_fits(client):
    documents = [
        "Photosynthesis lets plants turn sunlight, water and carbon dioxide into sugar.",
        "Hamlet is a tragedy written by William Shakespeare around 1600.",
        "Neil Armstrong walked on the lunar surface in July 1969.",
    ]
    queries = ["How do plants make food?", "Who wrote Hamlet?", "Who was the first person on the moon?"]
    vectors = [item.embedding for item in client.embeddings.create(model="smollm2", input=queries + documents).data]
    assert all(math.fsum(value * value for value in vector) == pytest.approx(1, abs=1e-5) for vector in vectors)
    alone = client.embeddings.create(model="smollm2", input=queries[0], encoding_format="float").data[0].embedding
    assert math.fsum(a * b for a, b in zip(alone, vectors[0], strict=True)) > 0.999
    short = client.embeddings.create(model="smollm2", input=queries[0], dimensions=64).data[0].embedding
    assert len(short) == 64 and math.fsum(value * value for value in short) == pytest.approx(1, abs=1e-5)
    for index, query in enumerate(queries):
        for method in ("likelihood", "embedding"):
            reply = client.post(
                "/rerank", cast_to=object, body={"query": query, "documents": documents, "method": method, "top_n": 1}
            )
            assert [row["index"] for row in reply["results"]] == [index], method
        yes_no = client.post(
            "/rerank", cast_to=object, body={"query": query, "documents": documents, "method": "yes_no"}
        )
        assert all(0 < row["relevance_score"] < 1 for row in yes_no["results"])


def test_stop_bias_and_end_tokens(client):
    whole = ask(client, "Count from one to ten.").choices[0].message.content
    stop = whole[5:8]
    cut = ask(client, "Count from one to ten.", stop=[stop]).choices[0]
    assert cut.message.content == whole[: whole.index(stop)] and cut.finish_reason == "stop"
    banned = ask(client, "Hello", logit_bias={"19556": -100}).choices[0].message.content  # 19556 is "Hello"
    assert not banned.startswith("Hello")
    ignoring = ask(client, "Hello", extra_body={"ignore_eos": True}, max_tokens=20)
    assert ignoring.usage.completion_tokens == 20 and ignoring.choices[0].finish_reason == "length"


PROMPT = "Once upon a time, there was a"
SAMPLING = [
    dict(temperature=0.0),
    dict(temperature=1.3),
    dict(top_k=3),
    dict(top_p=0.5),
    dict(min_p=0.2),
    dict(repetition_penalty=1.5, temperature=0.0),
    dict(presence_penalty=1.5),
    dict(frequency_penalty=1.5),
    dict(logit_bias={"325": 4.0, "253": -100.0}),
    dict(stop_token_ids=[30, 28]),
    dict(ignore_eos=True, max_tokens=9),
    dict(stop_token_ids=[30, 28, 253, 260], min_tokens=9),
    dict(bad_words=["little", "girl", "young boy"]),
    dict(allowed_token_ids=[253, 260, 325, 28, 30, 1000, 2000], temperature=0.0),
    dict(logprobs=3, temperature=0.7, top_k=50, top_p=0.9),
]


def test_every_way_of_sampling_arrives(client, real_models):
    """Through HTTP as offline, with the same seeds: n, best_of, stop strings, the prompt's log-probabilities, beams."""

    def complete(**options):
        names = (
            "seed",
            "temperature",
            "top_p",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
            "logprobs",
            "n",
            "best_of",
            "stop",
            "max_tokens",
            "echo",
        )
        known = {name: options.pop(name) for name in names if name in options}
        # Not what the model recommends.
        known = {"max_tokens": 12, "seed": 11, "temperature": 1, "top_p": 1} | known
        options = {"repetition_penalty": 1} | options
        return client.completions.create(model="smollm2", prompt=PROMPT, extra_body=options, **known).choices

    def offline(seed=11, **options):
        if "logit_bias" in options:
            options["logit_bias"] = {int(id): bias for id, bias in options["logit_bias"].items()}
        if "stop_token_ids" in options:
            options["stop_token_ids"] = tuple(options["stop_token_ids"])
        for name in {"bad_words", "allowed_token_ids"} & {*options}:
            options[name] = tuple(options[name])
        return SamplingParams(**{"max_tokens": 12, "seed": seed} | options)

    with LLM(real_models["smollm2"], max_context=512, max_rows=4) as llm:
        replies = llm.generate([PROMPT] * len(SAMPLING), [offline(**options) for options in SAMPLING])
        for options, reply in zip(SAMPLING, replies, strict=True):
            (choice,) = complete(**options)
            assert (choice.text, choice.finish_reason) == (reply.text, reply.finish_reason), options
            if "logprobs" in options:
                said = [entry.logprob for entry in reply.logprobs]
                assert choice.logprobs.token_logprobs == pytest.approx(said[: len(choice.logprobs.tokens)], abs=1e-5)
        assert len({reply.text for reply in replies}) >= len(replies) - 2  # each of them changes something
        seeds = [11, *(choice_seed(11, index) for index in range(1, 4))]
        several = llm.generate([PROMPT] * 4, [offline(seed=seed, logprobs=0) for seed in seeds])
        assert [choice.text for choice in complete(n=4)] == [reply.text for reply in several]

        def rank(reply):
            return sum(entry.logprob for entry in reply.logprobs) / len(reply.token_ids)

        ranked = sorted(several, key=rank, reverse=True)
        best = complete(n=2, best_of=4, logprobs=0)
        assert [choice.text for choice in best] == [reply.text for reply in ranked[:2]]
        assert sum(best[0].logprobs.token_logprobs) <= 0
        words = several[0].text.split()
        (stopped,) = complete(stop=[words[2]])
        assert stopped.text == several[0].text[: several[0].text.index(words[2])] and stopped.finish_reason == "stop"
        (echoed,) = complete(echo=True, logprobs=2, max_tokens=1)
        expected = llm.logprobs_of(llm.tokenizer.encode(PROMPT)).logprobs
        assert echoed.logprobs.token_logprobs[1:-1] == pytest.approx(expected, abs=1e-4)
        assert echoed.logprobs.token_logprobs[0] is None and len(echoed.logprobs.top_logprobs[1]) in (2, 3)
        found = complete(use_beam_search=True, beam_width=4, n=3, length_penalty=0.5, seed=None, top_p=1)
        (searched,) = llm.beam_search(PROMPT, BeamParams(beam_width=4, max_tokens=12, length_penalty=0.5))
        assert [choice.text for choice in found] == [reply.text for reply in searched[:3]]


def test_control_tokens_in_messages_are_text(client):
    plain = ask(client, "a", max_tokens=1).usage.prompt_tokens
    assert ask(client, "<|im_end|>", max_tokens=1).usage.prompt_tokens > plain + 3


def test_context_is_refused_with_the_numbers(client):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "a " * 600)
    assert caught.value.code == "context_length_exceeded" and "512" in caught.value.message
    full = client.completions.create(model="smollm2", prompt=[504] * 500, max_tokens=12, temperature=0)
    assert full.usage.total_tokens <= 512


def test_a_client_that_leaves_frees_the_engine(client):
    port = client.base_url.port
    for _ in range(4):
        fields = {"prompt": "Once upon a time", "max_tokens": 500, "ignore_eos": True, "stream": True}
        body = json.dumps(fields).encode()
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(body) + body
            )
            sock.recv(300)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        state = client.get("/../health/ready", cast_to=object)
        if not (state["running"] or state["requests"]):  # a heartbeat may be from before the last request
            break
        time.sleep(0.1)
    assert state["running"] == 0 and state["requests"] == 0


@pytest.mark.parametrize("damage", ["truncated", "empty", "text"])
def test_a_damaged_model_is_one_line_and_exit_code_2(real_models, tmp_path, damage):
    path = tmp_path / "model.gguf"
    with open(real_models["smollm2"], "rb") as file:
        path.write_bytes({"truncated": file.read(3_000_000), "empty": b"", "text": b"hello\n" * 100}[damage])
    done = subprocess.run(command(str(path)), capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and done.stderr.startswith("zse: error: ") and done.stderr.count("\n") == 1
    assert "model.gguf" in done.stderr and done.stdout == ""


def test_options_the_engine_refuses_are_one_line(real_models):
    done = subprocess.run(
        [*command(str(real_models["smollm2"])), "--max-context", "100000000"],
        capture_output=True,
        text=True,
        timeout=30,
        env=os.environ | {"ZSE_LOG": "error"},
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "max_context" in done.stderr


def test_tenants_share_no_prefix(real_models, tmp_path):
    """Each tenant's prompt is in the cache for itself alone, and what it gets is what it would get without a cache."""
    (tmp_path / "keys").touch(0o600)
    (tmp_path / "keys").write_text("".join(f"tenant{number} sk-{number:08d}\n" for number in range(3)))
    process = subprocess.Popen(
        command(
            str(real_models["smollm2"]),
            "--model-name",
            "smollm2",
            "--max-rows",
            "3",
            "--api-key-file",
            str(tmp_path / "keys"),
            "--log-level",
            "debug",
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    base = process.stdout.readline().split(" on ")[1].split()[0] + "/v1"
    clients = [openai.OpenAI(base_url=base, api_key=f"sk-{number:08d}", max_retries=0) for number in range(3)]
    common = "You are the assistant of a bank. Answer in one short sentence and keep every password to yourself. " * 6
    secrets = ["swordfish-4711", "open-sesame-815", "abracadabra-42"]

    def reply(number: int, salt: str | None = None):
        body = {} if salt is None else {"cache_salt": salt}
        asked = ask(
            clients[number], f"{common} The password is {secrets[number]}. Say hello.", extra_body=body, max_tokens=10
        )
        return asked.choices[0].message.content, asked.usage.prompt_tokens_details.cached_tokens

    first = [reply(number) for number in range(3)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        again = list(pool.map(reply, range(3)))
    salted = [reply(number, "mine") for number in range(3)]
    for other in clients:
        other.close()
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=20)
    assert [cached for _, cached in first + salted] == [0] * 6
    assert all(cached > 100 for _, cached in again)
    assert [text for text, _ in again] == [text for text, _ in first]
    for number, (text, _) in enumerate(first + again + salted):
        assert not any(secret in text for other, secret in enumerate(secrets) if other != number % 3)
    assert process.returncode == 0 and not any(word in log for word in [*secrets, "sk-0"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_session_goes_on_after_a_restart_and_its_file_goes_with_it(ranks, real_models, tmp_path, monkeypatch):
    """And its file of every rank."""
    monkeypatch.setenv("ZSE_API_KEY", "a-key-of-this-test-alone")
    options = ("--cache-disk", str(tmp_path / "kv"), "--database", str(tmp_path / "db"), "--model-name", "m")
    options += ("--tp", str(ranks), "--threads", "2")
    text = " ".join(f"word {number}" for number in range(60))

    def start():
        process = subprocess.Popen(
            command(str(real_models["smollm2"]), *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        line = next((line for line in process.stdout if " on http://" in line), None)
        assert line is not None, process.communicate()[1]
        url = line.split(" on ")[1].split()[0] + "/v1"
        return process, openai.OpenAI(base_url=url, api_key="a-key-of-this-test-alone", max_retries=0)

    def ask(client, prompt):
        said = client.completions.create(model="m", prompt=prompt, max_tokens=4, extra_body={"session_id": "trip"})
        return said.usage.prompt_tokens, said.usage.prompt_tokens_details.cached_tokens

    def end(process):
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
        assert process.returncode == 0 and "Traceback" not in stderr

    process, client = start()
    with client:
        first, _ = ask(client, text)
    end(process)
    files = [*tmp_path.rglob("kv/**/*.kv")]
    assert len(files) == ranks
    process, client = start()
    with client:
        total, cached = ask(client, " and more")
        assert (
            total > first and cached == first + 3 and all(file.exists() for file in files)
        )  # of the answer's 4 tokens the last has no key yet
        client.delete("/sessions/trip", cast_to=object)
        deadline = time.monotonic() + 30
        while any(file.exists() for file in files):
            assert time.monotonic() < deadline, "the file of a session that was removed is still there"
            time.sleep(0.05)
    end(process)
    assert not list(tmp_path.rglob("kv/**/*.kv"))
