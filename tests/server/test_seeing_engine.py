"""`zse serve` with the real engine and a tiny model that sees: a picture from a data URI to the answer, and who is refused."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from image_files import file_of, uri

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("structured", "models", "formats")]
import tiny_text  # noqa: E402
import tiny_vision  # noqa: E402

del sys.path[:3]

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<|image_pad|>{% endif %}{% endfor %}{% endif %}\n{% endfor %}assistant:"
)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tiny_vision.write("qwen3_vl", tmp_path_factory.mktemp("seeing"))
    tiny_text.write(folder, control="<|image_pad|>")
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"image_token_id": vocabulary["<|image_pad|>"]}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    command = [sys.executable, "-m", "zse", "serve", str(folder), "--port", "0", "--device", "cpu", "--threads", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert " on http://" in line, process.communicate()[1]
    with openai.OpenAI(base_url=line.split(" on ")[1].split()[0] + "/v1", api_key="x", max_retries=0) as client:
        yield client
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 0 and "Traceback" not in stderr, stderr


def ask(client, *parts, **options):
    content = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]
    options = {"temperature": 0, "max_tokens": 8, "logprobs": True} | options
    model = client.models.list().data[0].id
    return client.chat.completions.create(model=model, messages=[{"role": "user", "content": content}], **options)


def picture(**options) -> dict:
    return {"type": "image_url", "image_url": {"url": uri(file_of(40, 24, **options))}}


def logprobs(answer) -> list[float]:
    return [token.logprob for token in answer.choices[0].logprobs.content]


def test_what_a_picture_shows_changes_the_answer(client):
    text = ask(client, "What is this?")
    red, blue = (ask(client, picture(colour=colour), "What is this?") for colour in ((255, 0, 0), (0, 0, 255)))
    parts = 5 * 3  # 40 x 24 pixels, of 8 x 8 a token
    assert red.usage.prompt_tokens == text.usage.prompt_tokens + parts
    assert logprobs(red) != logprobs(blue) != logprobs(text)
    again = ask(client, picture(colour=(255, 0, 0)), "What is this?")
    assert again.choices[0].message.content == red.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens == red.usage.prompt_tokens - 1
    both = ask(client, picture(colour=(255, 0, 0)), "and", picture(noise=True), "Which?", stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in both if chunk.choices)


def test_several_answers_and_forms(client):
    several = ask(client, picture(), "What?", n=3, temperature=1.0, seed=4)
    assert len(several.choices) == 3
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}
    answer = ask(client, picture(), "Is it red?", response_format=form, max_tokens=12)
    assert answer.choices[0].message.content in ("true", "false")
