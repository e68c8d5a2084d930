"""Structured output, enforced tools and thinking budgets over HTTP: the real worker with a tiny random model."""

import json
import re
import time
from pathlib import Path

import pytest
import tiny_model
import tiny_text
from harness import Harness
from schemas import SCHEMAS, check_text, problem

from zse.engine.process import spawn
from zse.server.models import load

# It shows the format of calls, not the tools: they would fill the context.
TEMPLATE = (
    "{% if tools %}{{ tools | length }}{{ '<tool_call>'[:0] }}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{{ greeting }}"
)
PERSON = SCHEMAS["person"]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMAS["choices"]}}
CALENDAR = {"type": "function", "function": {"name": "calendar", "parameters": SCHEMAS["person"]}}
CHAT = "/v1/chat/completions"


class TinyHarness(Harness):
    """Over the real engine with a model of 160 tokens."""

    def __init__(self, folder: Path, **options):
        self.folder = folder
        super().__init__(**options)

    def spawn(self):
        """The real engine."""
        return spawn(
            [
                "--model",
                str(self.folder),
                "--threads",
                "1",
                "--activations",
                "f32",
                "--device",
                "cpu",
                "--max-rows",
                "8",
                "--num-pages",
                "128",
            ]
        )

    def text_model(self):
        model = load(str(self.folder), "fake")
        if self._template:  # what the parsers are chosen by
            model.template_source += self._template
        return model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")
    tiny_text.write(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    harness = TinyHarness(folder)
    yield harness
    harness.close()


@pytest.fixture(scope="module")
def thinker(tiny):
    """The same model, and a template that knows reasoning."""
    harness = TinyHarness(tiny.folder, template="</think>")
    yield harness
    harness.close()


def body(**more):
    return {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 150, "seed": 3} | more


def as_schema(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema} | more}


def answer(tiny, **more):
    reply = tiny.post(CHAT, body(**more))
    assert reply.status == 200, reply
    return reply.json["choices"]


def streamed(tiny, **more):
    """(text, tool calls by index, finish reasons) of a streamed answer with one choice."""
    text, calls, reasons = "", {}, []
    for chunk in tiny.post(CHAT, body(stream=True, **more)).events[:-1]:
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            reasons.append(choice["finish_reason"])
            for call in choice["delta"].get("tool_calls", ()):
                entry = calls.setdefault(call["index"], {"name": "", "arguments": "", "pieces": 0})
                entry["name"] += call["function"].get("name") or ""
                entry["arguments"] += call["function"].get("arguments") or ""
                entry["pieces"] += 1
    return text, calls, [reason for reason in reasons if reason]


def test_json_schema_whole_streamed_and_several(tiny):
    (choice,) = answer(tiny, response_format=as_schema(PERSON, strict=True))
    check_text(choice["message"]["content"], PERSON)
    assert choice["finish_reason"] == "stop"
    text, _, reasons = streamed(tiny, response_format=as_schema(PERSON, strict=True))
    assert (text, reasons) == (choice["message"]["content"], ["stop"])
    choices = answer(tiny, response_format=as_schema(PERSON), n=4)
    assert choices[0]["message"]["content"] == text
    for each in choices:
        check_text(each["message"]["content"], PERSON)


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": "[a-c]{2}-[0-9]"}, "[a-c]{2}-[0-9]"),
        ({"choice": ["on", "in"]}, "on|in"),
        ({"grammar": 'root ::= "<" [a-z] ">"'}, "<[a-z]>"),
        ({"json": {"type": "boolean"}}, "true|false"),
    ],
)
def test_the_other_forms_in_both_routes(tiny, outputs, pattern):
    (choice,) = answer(tiny, structured_outputs=outputs, logprobs=True, top_logprobs=2)
    assert re.fullmatch(pattern, choice["message"]["content"]) and choice["logprobs"]["content"]
    reply = tiny.post(
        "/v1/completions",
        {"model": "fake", "prompt": ["a", "b"], "max_tokens": 60, "best_of": 2, "structured_outputs": outputs},
    )
    for choice in reply.json["choices"]:
        assert re.fullmatch(pattern, choice["text"])


def test_length_and_stop_strings_end_it_too(tiny):
    (choice,) = answer(tiny, structured_outputs={"regex": "[a-z]{50}"}, max_tokens=3)
    assert choice["finish_reason"] == "length" and re.fullmatch("[a-z]{3,}", choice["message"]["content"])
    (choice,) = answer(tiny, structured_outputs={"regex": "[a-z]{5}-[a-z]{5}"}, stop="-")
    assert re.fullmatch("[a-z]{5}", choice["message"]["content"]) and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"response_format": as_schema({"$ref": "http://127.0.0.1:9/a"})}, "response_format", "invalid_schema"),
        ({"response_format": as_schema({"contains": {}}, strict=True)}, "response_format", "invalid_schema"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "invalid_schema"),
        (
            {
                "structured_outputs": {
                    "json": {"type": "integer", "multipleOf": 9999991, "minimum": 0, "maximum": 10**18}
                }
            },
            "structured_outputs",
            "schema_too_complex",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "strict": True,
                            "parameters": {"properties": {"a": {"type": "string", "pattern": "(?<=a)b"}}},
                        },
                    }
                ]
            },
            "tools",
            "invalid_schema",
        ),
    ],
)
@pytest.mark.timed
def test_refusals_name_the_field(tiny, more, param, code):
    answer(tiny, structured_outputs={"regex": "a"})  # the grammar process is up
    started = time.monotonic()
    reply = tiny.post(CHAT, body(**more))
    assert reply.status == 400 and time.monotonic() - started < 2.5
    assert (reply.error["code"], reply.error["param"]) == (code, param) and param in reply.error["message"]


@pytest.mark.timed
def test_hostile_bodies_do_not_block_the_loop(tiny):
    nested = "x"
    for _ in range(200):
        nested = {"type": "array", "items": nested}
    loop = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    tiny.lag_s = 0.0
    for schema in (nested, {"enum": ["y" * 100] * 20_000}, {"enum": [f"value {n}" for n in range(4000)]}, loop):
        data = json.dumps(body(response_format=as_schema(schema), max_tokens=4)).encode()
        with tiny.longest_callback() as callback:
            reply = tiny.post(CHAT, data)
        assert reply.status in (200, 400, 413) and (reply.status == 200 or reply.error["code"])
        assert callback[0][0] < 0.05, callback
    assert tiny.lag_s < 0.25, tiny.lag_s


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "parallel", "names"),
    [
        ("required", True, {"weather", "calendar"}),
        ("required", False, {"weather", "calendar"}),
        ({"type": "function", "function": {"name": "calendar"}}, True, {"calendar"}),
    ],
)
def test_enforced_tool_calls(tiny, choice, parallel, names, stream):
    more = {"tools": [WEATHER, CALENDAR], "tool_choice": choice, "parallel_tool_calls": parallel, "max_tokens": 90}
    if stream:
        text, calls, reasons = streamed(tiny, **more)
        found, reason = [(call["name"], call["arguments"]) for call in calls.values()], reasons[-1]
    else:
        (whole,) = answer(tiny, **more)
        text, reason = whole["message"]["content"] or "", whole["finish_reason"]
        found = [
            (call["function"]["name"], call["function"]["arguments"]) for call in whole["message"].get("tool_calls", ())
        ]
    assert not text.strip() or reason == "length"
    if not parallel or choice != "required":
        assert reason == "tool_calls" and len(found) == 1
    schemas = {"weather": SCHEMAS["choices"], "calendar": SCHEMAS["person"]}
    assert found and {name for name, _ in found} <= names
    for name, arguments in found if reason == "tool_calls" else found[:-1]:
        assert problem(json.loads(arguments), schemas[name]) is None


def test_a_thinking_budget_forces_the_answer(thinker):
    more = {"chat_template_kwargs": {"greeting": "<think>"}, "structured_outputs": {"choice": ["on", "in"]}}
    reply = thinker.post(CHAT, body(thinking_budget=6, **more)).json
    (choice,) = reply["choices"]
    assert choice["message"]["content"] in ("on", "in") and choice["message"]["reasoning_content"]
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 7
    for seed in range(3):
        reply = thinker.post(
            CHAT, body(thinking_budget=2, seed=seed, max_tokens=20, chat_template_kwargs={"greeting": "<think>"})
        ).json
        assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 3


def test_variables_reach_the_template(tiny):
    def prompt_tokens(**more):
        return tiny.post(CHAT, body(max_tokens=1, **more)).json["usage"]["prompt_tokens"]

    assert prompt_tokens(chat_template_kwargs={"greeting": "zzz"}) == prompt_tokens() + 3


def test_mask_times_are_in_the_metrics(tiny):
    answer(tiny, structured_outputs={"regex": "[ab]{3}"})
    deadline = time.monotonic() + 5
    while "zse_engine_mask_us_p99" not in (text := tiny.get("/metrics").body.decode()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "zse_engine_mask_us_p50" in text and "zse_engine_grammars_compiled" in text
