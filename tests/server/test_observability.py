"""What operators see: metrics by both names, the board's queries, timings of an answer, lines of the log without a prompt."""

import json
import logging
import re
import signal
import socket
import time
from pathlib import Path

import pytest
from harness import chat_body, read_reply, request, wait_for
from test_lifecycle import start  # noqa: F401

from zse import log
from zse.server.routes.metrics import ALIASES

ROOT = Path(__file__).parents[2]
SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-z_]+="(?:[^"\\]|\\.)*",?)*)\})? ([0-9.e+-]+|[+-]Inf|NaN)')


def samples(text: str) -> tuple[dict, dict]:
    """(name and labels → value, metric → kind) of a page. Every line is a sample, HELP or TYPE, and each metric stands together."""
    values, kinds, seen = {}, {}, []
    for line in text.splitlines():
        if line.startswith("# "):
            _, word, name, rest = line.split(" ", 3)
            assert word in ("HELP", "TYPE")
            if word == "TYPE":
                assert name not in kinds and rest in ("counter", "gauge", "histogram")
                kinds[name] = rest
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        name, labels, value = match.groups()
        metric = re.sub("_(bucket|sum|count)$", "", name) if name not in kinds else name
        assert metric in kinds, line
        if not seen or seen[-1] != metric:
            assert metric not in seen, f"{metric} stands in two places"
            seen.append(metric)
        key = name, frozenset(re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', labels or ""))
        assert key not in values, line
        values[key] = float(value)
    return values, kinds


@pytest.fixture
def busy(scheduled):
    """A server over the real scheduler that has answered, and its page."""
    server = scheduled()
    for _ in range(2):
        assert server.chat("one two three four five six seven eight nine ten " * 4, max_tokens=9).status == 200
    assert server.chat("a stream", max_tokens=3, stream=True).events[-1] == "[DONE]"
    time.sleep(1.2)  # the next heartbeat has the engine's counts
    return server, server.get("/metrics").body.decode()


def test_vllm_s_names_have_the_same_figures(busy):
    _, text = busy
    values, kinds = samples(text)
    labels = {"model": "model_name", "reason": "finished_reason"}
    for alias, name, renamed in ALIASES:
        assert kinds[alias] == kinds[name], alias
        theirs = {
            key: value
            for key, value in values.items()
            if re.sub("_(bucket|sum|count)$", "", key[0]) == alias or key[0] == alias
        }
        expected: dict = {}
        for (ours, pairs), value in values.items():
            if ours == name or re.sub("_(bucket|sum|count)$", "", ours) == name:
                key = ours.replace(name, alias), frozenset((labels.get(k, k), renamed.get(v, v)) for k, v in pairs)
                expected[key] = expected.get(key, 0) + value
        assert theirs and theirs == expected, alias
    count = values["vllm:time_to_first_token_seconds_count", frozenset({("model_name", "fake")})]
    assert count == 3 == values["zse_request_seconds_count", frozenset({("model", "fake")})]
    assert values["zse_completion_length_tokens_sum", frozenset({("model", "fake")})] == 21
    assert values["vllm:generation_tokens_total", frozenset({("model_name", "fake")})] == 21
    assert values["vllm:prefix_cache_hits_total", frozenset({("model_name", "fake")})] > 0
    assert 0 <= values["vllm:kv_cache_usage_perc", frozenset({("model_name", "fake")})] < 0.5
    for kind in ("prefill", "decode"):
        assert values[f"zse_{kind}_seconds_sum", frozenset({("model", "fake")})] > 0


def test_an_answer_that_the_client_leaves_is_an_abort(own_server):
    server = own_server()
    with server.connect() as sock:
        sock.sendall(request("POST", "/v1/chat/completions", chat_body("!tokens=3000 !ms=10", stream=True)))
        sock.recv(10, socket.MSG_PEEK)
    key = "vllm:request_success_total", frozenset({("model_name", "fake"), ("finished_reason", "abort")})
    wait_for(lambda: samples(server.get("/metrics").body.decode())[0].get(key) == 1)


def test_every_query_of_the_board_is_of_a_metric_that_is_there(busy):
    _, text = busy
    values, _ = samples(text)
    names = {name for name, _ in values} | {"zse_tenant_computed_tokens_total"}  # there with the first tenant
    label_names = {name: {label for label, _ in pairs} for name, pairs in values}
    board = json.loads((ROOT / "deploy/grafana/zse.json").read_text(encoding="utf-8"))
    places = set()
    asked = set()
    for panel in board["panels"]:
        places.add((panel["gridPos"]["x"], panel["gridPos"]["y"]))
        for target in panel["targets"]:
            expression = target["expr"]
            assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")
            found = set(re.findall(r"\bzse_[a-z_]+", expression))
            assert found and found <= names, f"{panel['title']}: {found - names}"
            for name, inner in re.findall(r"(zse_[a-z_]+)\{([^}]*)\}", expression):
                assert {label for label in re.findall(r"([a-z]+)=", inner)} <= label_names[name], expression
            asked |= found
    assert len(places) == len(board["panels"]) == len({panel["id"] for panel in board["panels"]})
    assert "label_values(zse_model_state, model)" in json.dumps(board) and len(asked) > 25


def test_every_alias_is_documented():
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `vllm:")]
    assert rows == [f"| `{alias}` | `{name}` |" for alias, name, _ in ALIASES]


def test_timings(busy, own_server):
    server, _ = busy
    prompt = "one two three four five six seven eight nine ten " * 4
    for stream in (False, True):
        reply = server.chat(prompt, max_tokens=9, timings=True, stream=stream)
        if stream:
            *others, last, done = reply.events
            assert done == "[DONE]" and last["choices"] == [] and "usage" not in last
            assert all("timings" not in other for other in others)
            body = last
        else:
            body = reply.json
        timings = body["timings"]
        parts = ("before_ms", "queue_ms", "prompt_ms", "predicted_ms")
        assert (
            all(timings[part] >= 0 for part in parts)
            and sum(timings[part] for part in parts) <= timings["total_ms"] + 1
        )
        assert timings["predicted_n"] == 9 and timings["predicted_ms"] > 0 and timings["predicted_per_second"] > 0
        assert timings["cache_n"] > 0 and timings["prompt_n"] > 0
        if not stream:
            usage = body["usage"]
            assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
    both = server.complete("hi", max_tokens=2, timings=True, stream=True, stream_options={"include_usage": True}).events
    assert both[-2]["usage"]["completion_tokens"] == 2 and both[-2]["timings"]["predicted_n"] == 2
    assert "timings" not in server.chat("hi", max_tokens=1).json
    for path, body in (
        ("/v1/responses", {"model": "fake", "input": "hi"}),
        ("/v1/messages", {"model": "fake", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/embeddings", {"model": "fake", "input": "hi"}),
    ):
        reply = server.post(path, body | {"timings": True})
        assert reply.status == 400 and "timings" in reply.body.decode(), path


def test_json_logs_have_request_ids_and_no_prompt(start):  # noqa: F811
    process = start("--log-format", "json", "--log-level", "debug", "--api-key", "sk-secret")
    ids = []
    for path, body in (
        ("/v1/chat/completions", chat_body("my SECRETPROMPT", max_tokens=5)),
        ("/v1/chat/completions", chat_body("my SECRETPROMPT", max_tokens=5, stream=True)),
        ("/v1/completions", {"prompt": "my SECRETPROMPT", "max_tokens": 5, "temperature": "SECRETPROMPT"}),
        ("/v1/messages", {"model": "fake", "max_tokens": 3, "messages": [{"role": "user", "content": "SECRETPROMPT"}]}),
        ("/v1/chat/completions?q=SECRETPROMPT", chat_body("hi")),
        ("/nothing%E2%80%A8forged%0a", chat_body("SECRETPROMPT")),
    ):
        with process.send(request("POST", path, body, {"authorization": "Bearer sk-secret"})) as sock:
            ids.append(read_reply(sock).headers["x-request-id"])
    with process.send(
        request("POST", "/v1/chat/completions", chat_body("SECRETPROMPT"), {"authorization": "Bearer sk-wrong"})
    ) as sock:
        ids.append(read_reply(sock).headers["x-request-id"])
    process.popen.send_signal(signal.SIGTERM)
    code, stderr = process.finish()
    lines = [json.loads(line) for line in stderr.splitlines()]
    assert code == 0 and "SECRETPROMPT" not in stderr and "sk-" not in stderr
    by_id = {line["request_id"]: line for line in lines if "request_id" in line}
    assert list(by_id) == ids
    assert [by_id[id]["status"] for id in ids] == [200, 200, 400, 200, 200, 404, 401]
    assert all(line["level"] in ("debug", "info", "warning", "error") and line["time"].endswith("Z") for line in lines)
    assert by_id[ids[0]]["tenant"] and by_id[ids[0]]["note"].endswith("+5 tokens") and by_id[ids[0]]["duration_ms"] > 0


def test_a_traceback_is_a_field(capsys):
    logger = logging.getLogger("zse")
    before = logger.handlers[:], logger.level, logger.propagate
    try:
        log.setup("info", "json")
        try:
            raise ValueError("wrong\nsecond line")
        except ValueError:
            logging.getLogger("zse.server").exception("it\nfailed %s", "\x1b\u2028")
    finally:
        logger.handlers[:], logger.level, logger.propagate = before
    (text,) = capsys.readouterr().err.splitlines()
    line = json.loads(text)
    assert text.isascii() and line["message"] == "it\nfailed \x1b\u2028" and "ValueError: wrong" in line["exception"]
