"""A real (tiny) engine behind `zse serve`: the fields that forbid tokens, and a batch whose server is killed again and again."""

import json
import re
import signal
import subprocess
import sys
import time

import openai
import pytest
import tiny_model
import tiny_text
from harness import wait_for
from test_batches import ENDED, jsonl, results
from test_stored_keys import make

from zse.server.database.connection import Database

LINES, KILLS = 200, 3
TEXT_IDS = list(range(12, 124))  # of the tiny tokenizer, those that are text


class Served:
    """`zse serve` on a free port."""

    def __init__(self, model, database: str):
        command = [sys.executable, "-m", "zse", "serve", str(model), "--port", "0", "--device", "cpu", "--threads", "1"]
        command += ["--max-context", "256", "--max-rows", "4", "--database", database, "--model-name", "tiny"]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        block = ""
        while "try:" not in block:
            line = self.popen.stdout.readline()
            assert line, self.popen.stderr.read()
            block += line
        port = re.search(r"http://[^:]+:(\d+)", block)[1]
        self.base = f"http://127.0.0.1:{port}/v1"

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.communicate()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")
    tiny_text.write(folder)
    return folder


def check_fields(client) -> None:
    def ask(**fields):
        known = {"temperature": 0, "max_tokens": 24} | {n: fields.pop(n) for n in ("stop", "max_tokens") if n in fields}
        extra = {"return_token_ids": True, "allowed_token_ids": TEXT_IDS} | fields
        return client.completions.create(model="tiny", prompt="hello", extra_body=extra, **known).choices[0]

    plain = ask(ignore_eos=True)
    ids = plain.model_extra["token_ids"]
    stop = ids[3]
    assert len(ask(stop_token_ids=[stop]).model_extra["token_ids"]) == ids.index(stop) + 1
    longer = ask(stop_token_ids=[stop], min_tokens=12).model_extra["token_ids"]
    assert len(longer) > 11 and stop not in longer[:12]
    assert ask(stop=plain.text[2:4]).text == plain.text[: plain.text.index(plain.text[2:4])]
    later = ask(stop=plain.text[2:4], min_tokens=20, ignore_eos=True)
    assert later.text.startswith(plain.text[:4]) and len(later.model_extra["token_ids"]) >= 20
    allowed = ask(allowed_token_ids=[20, 30, 40]).model_extra["token_ids"]
    assert {*allowed} <= {20, 30, 40} and len(allowed) == 24
    letter = next(c for c in plain.text if c.isalpha())
    assert letter in plain.text and letter not in ask(bad_words=[letter], ignore_eos=True).text
    for wrong, param in (
        ({"min_tokens": 25}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [124]}, "allowed_token_ids"),
        ({"min_tokens": 1, "guided_regex": "a+"}, "min_tokens"),
        ({"bad_words": ["a"], "use_beam_search": True, "allowed_token_ids": None}, "bad_words"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(**wrong)
        assert caught.value.param == param


def test_a_batch_survives_kills(model, tmp_path):
    path = str(tmp_path / "server.db")
    with Database(path) as database:
        key = make(database, "a")
    server = Served(model, path)
    client = openai.OpenAI(base_url=server.base, api_key=key, timeout=20, max_retries=0)
    check_fields(client)
    body = {"model": "tiny", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    lines = [
        {"custom_id": f"id{n}", "method": "POST", "url": "/v1/completions", "body": body | {"prompt": f"line {n}"}}
        for n in range(LINES)
    ]
    file = client.files.create(file=jsonl(lines), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    counts = [0]
    try:
        for _ in range(KILLS):
            wait_for(
                lambda: client.batches.retrieve(made.id).request_counts.completed >= min(LINES, counts[-1] + 25), 30
            )
            counts.append(client.batches.retrieve(made.id).request_counts.completed)
            server.kill()
            time.sleep(0.05)
            server = Served(model, path)
            client = openai.OpenAI(base_url=server.base, api_key=key, timeout=20, max_retries=0)
            assert (
                client.batches.retrieve(made.id).request_counts.completed >= counts[-1]
            )  # nothing that was told is lost
        wait_for(lambda: client.batches.retrieve(made.id).status in ENDED, 60)
        done = client.batches.retrieve(made.id)
        output = results(client, done.output_file_id)
        assert done.status == "completed" and [one["custom_id"] for one in output] == [
            one["custom_id"] for one in lines
        ]
        for one, line in list(zip(output, lines, strict=True))[::60]:
            given = {name: value for name, value in line["body"].items() if name != "ignore_eos"}
            (alone,) = client.completions.create(**given, extra_body={"ignore_eos": True}).choices
            assert one["response"]["body"]["choices"][0]["text"] == alone.text
        assert len({json.dumps(one["response"]["body"]["choices"]) for one in output}) > 5
        server.popen.terminate()
        assert server.popen.wait(20) == 0
    finally:
        server.popen.kill()
        server.popen.communicate()
