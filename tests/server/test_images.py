"""Images of chat requests in the four APIs, over the fake engine, which tells what it got of them."""

import base64
import logging

import anthropic
import ollama
import openai
import pytest
import test_batches as batches
from harness import Harness, chat_body, wait_for
from image_files import file_of, hostile, uri
from test_stored_keys import bearer
from test_stored_responses import keys, path  # noqa: F401

from zse.http.listener import Limits
from zse.images.worker import ImageDecoder, ImageLimits
from zse.server.database import sessions
from zse.server.keys import Key, Quota

CHAT = "/v1/chat/completions"
RED = "56x56 ff0000"


def image(url: str | None = None) -> dict:
    return {"type": "image_url", "image_url": {"url": uri() if url is None else url}}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def asking(*parts: dict, **fields) -> dict:
    return chat_body([*parts, text("!images")], **fields)


def answered(reply) -> str:
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def seeing():
    harness = Harness("--vision area")
    yield harness
    harness.assert_quiet()
    harness.close()


def test_an_image_reaches_the_engine_where_it_stands(seeing):
    assert answered(seeing.post(CHAT, asking(image()))) == f"5+4 {RED}"  # behind "user:"
    assert answered(seeing.post(CHAT, asking(text("ab"), image(), text("c")))) == f"7+4 {RED}"
    blue = file_of(100, 60, "WEBP", (0, 0, 255), lossless=True)
    two = [image(), text("and"), image(uri(blue, "image/webp"))]
    reply = seeing.post(CHAT, asking(*two))
    assert answered(reply) == f"5+4 {RED}; 12+8 112x56 0000ff"
    assert reply.json["usage"]["prompt_tokens"] == len("user:and!images\nassistant:") + 4 + 8


def test_several_answers_and_streams(seeing):
    reply = seeing.post(CHAT, asking(image(), n=2))
    assert [choice["message"]["content"] for choice in reply.json["choices"]] == [f"5+4 {RED}"] * 2
    events = seeing.post(CHAT, asking(image(), stream=True)).events
    parts = [event["choices"][0]["delta"].get("content") or "" for event in events if event != "[DONE]"]
    assert "".join(parts) == f"5+4 {RED}"


@pytest.mark.parametrize(("kind", "wanted"), [("square", f"6+4 {RED}"), ("edge", f"5+20 {RED}")])
def test_what_stands_around_images_and_behind_their_rows(own_server, kind, wanted):
    """[ and ] around a square; of an edge 4 rows of 4, each with its end, the last with the image's."""
    server = own_server(f"--vision {kind}")
    reply = server.post(CHAT, asking(image()))
    assert answered(reply) == wanted
    asked = {"model": "fake", "messages": asking(image())["messages"]}
    ids = server.post("/tokenize", asked).json["tokens"]
    assert len(ids) == reply.json["usage"]["prompt_tokens"]
    if kind == "edge":
        assert ids[5:25] == ([257, 257, 257, 257, 258] * 4)[:-1] + [259]
    else:
        assert bytes(ids[4:6]) == b":[" and ids[6:10] == [257] * 4 and ids[10] == ord("]")


def test_the_other_apis(seeing):
    data, png = base64.b64encode(file_of()).decode(), uri()
    with openai.OpenAI(base_url=seeing.base + "/v1", api_key="-", max_retries=0) as client:
        said = client.responses.create(
            model="fake",
            input=[
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": png, "detail": "auto"},
                        {"type": "input_text", "text": "!images"},
                    ],
                }
            ],
        )
        assert said.output_text == f"5+4 {RED}"
    source = {"type": "base64", "media_type": "image/png", "data": data}
    block = {"type": "image", "source": source}
    with anthropic.Anthropic(base_url=seeing.base, api_key="-", max_retries=0) as client:
        messages = [{"role": "user", "content": [block, {"type": "text", "text": "!images"}]}]
        said = client.messages.create(model="fake", max_tokens=99, messages=messages)
        assert said.content[0].text == f"5+4 {RED}"
        counted = client.messages.count_tokens(model="fake", messages=messages)
        assert counted.input_tokens == said.usage.input_tokens
        called = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "done"}, block]}
        messages = [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [called]},
            {"role": "user", "content": [result, {"type": "text", "text": "!images"}]},
        ]
    reply = seeing.post("/v1/messages/count_tokens", {"model": "fake", "messages": messages})
    assert reply.status == 400 and "tool support" in reply.error["message"]  # not for the image
    with ollama.Client(host=seeing.base) as client:
        said = client.chat(model="fake", messages=[{"role": "user", "content": "!images", "images": [file_of()]}])
        assert said.message.content == f"5+4 {RED}"
        assert client.generate(model="fake", prompt="!images", images=[file_of()]).response == f"5+4 {RED}"


def test_images_of_tools_results_are_shown_by_the_user(own_server):
    server = own_server("--vision area", template="{{ tools }} <tool_call>")
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": uri().partition(",")[2]}}
    calls = [{"type": "tool_use", "id": id, "name": "look", "input": {}} for id in "ab"]
    results = [{"type": "tool_result", "tool_use_id": id, "content": [block]} for id in "ab"]
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": calls},
        {"role": "user", "content": [*results, {"type": "text", "text": "!images"}]},
    ]
    reply = server.post("/v1/messages", {"model": "fake", "max_tokens": 99, "messages": messages})
    begin = len("user:look\nassistant:\ntool:\ntool:\nuser:")
    assert reply.json["content"][0]["text"] == f"{begin}+4 {RED}; {begin + 4}+4 {RED}"


def test_images_of_functions_outputs_are_shown_by_the_user(own_server):
    server = own_server("--vision area", template="{{ tools }} <tool_call>")
    seen = {"type": "input_image", "image_url": uri()}
    calls = [{"type": "function_call", "call_id": id, "name": "look", "arguments": "{}"} for id in "ab"]
    outputs = [{"type": "function_call_output", "call_id": id, "output": [seen]} for id in "ab"]
    begin = len("user:look\nassistant:\ntool:\ntool:\nuser:")
    for said, count in (("!images", 2), ([seen, {"type": "input_text", "text": "!images"}], 3)):
        items = [{"role": "user", "content": "look"}, *calls, *outputs, {"role": "user", "content": said}]
        reply = server.post("/v1/responses", {"model": "fake", "input": items}).json
        wanted = (f"{begin + 4 * number}+4 {RED}" for number in range(count))
        assert reply["output"][0]["content"][0]["text"] == "; ".join(wanted)
    alone = server.post(
        "/v1/responses", {"model": "fake", "input": [{"role": "user", "content": "look"}, *calls, *outputs]}
    )
    assert alone.status == 200
    wrong = [{"role": "assistant", "content": [seen]}]
    assert "role user" in server.post("/v1/responses", {"model": "fake", "input": wrong}).error["message"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.com/a.png", "no URL is fetched; send the image itself"),
        ("HTTP://169.254.169.254/latest", "no URL is fetched"),
        ("//example.com/a.png", "no URL is fetched"),
        ("file:///etc/passwd", "must be a data URI"),
        ("data:image/gif;base64,R0lGODlh", "must be a data URI of a PNG, JPEG or WebP"),
        ("data:image/svg+xml;base64,PHN2Zz4=", "must be a data URI"),
        ("data:image/png,abc", "must be a data URI"),
        ("data:image/png;base64,@@@@", "not base64"),
        ("data:image/png;base64,", "neither a PNG"),
        ("", "must be a data URI"),
    ],
)
def test_what_is_no_data_uri_is_refused(seeing, url, words):
    reply = seeing.post(CHAT, asking(image(url)))
    assert reply.status == 400 and words in reply.error["message"] and "content[0]" in reply.error["param"]


def test_who_sees_is_told(seeing, server):
    for each, kinds in ((seeing, ["text", "image"]), (server, ["text"])):
        assert each.get("/v1/models").json["data"][0]["input_modalities"] == kinds


def test_urls_are_fetched_by_no_api(seeing):
    url = "http://127.0.0.1:9/a.png"
    bodies = {
        "/v1/responses": {
            "model": "fake",
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}],
        },
        "/v1/messages": {
            "model": "fake",
            "max_tokens": 9,
            "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": url}}]}],
        },
        "/api/chat": {"model": "fake", "messages": [{"role": "user", "content": "x", "images": [url]}]},
        "/api/generate": {"model": "fake", "prompt": "x", "images": [url]},
    }
    for where, body in bodies.items():
        reply = seeing.post(where, body)
        assert reply.status == 400 and b"no URL is fetched" in reply.body, where


def test_the_address_alone(seeing):
    told = answered(seeing.post(CHAT, asking({"type": "image_url", "image_url": uri()})))
    assert told == answered(seeing.post(CHAT, asking(image())))
    reply = seeing.post(CHAT, asking({"type": "image_url", "image_url": "http://127.0.0.1:9/a.png"}))
    assert reply.status == 400 and "no URL is fetched" in reply.error["message"]


def test_base64_in_lines(seeing):
    """As `base64` and MIME write it."""
    lines = base64.encodebytes(file_of(200, 200, noise=True)).decode()
    for text in (lines, lines.replace("\n", "\r\n")):
        assert seeing.post(CHAT, asking(image("data:image/png;base64," + text))).status == 200
        asked = {"model": "fake", "prompt": "x", "images": [text], "stream": False}
        assert seeing.post("/api/generate", asked).status == 200
    assert seeing.post(CHAT, asking(image("data:image/png;base64," + lines[:-9] + " " + lines[-9:]))).status == 400


def test_ollama_s_images_are_named_as_they_were_sent(seeing, server):
    for each, words in ((seeing, "not base64"), (server, "sees no images")):
        chat = {"model": "fake", "messages": [{"role": "user", "content": "x", "images": ["@@@@"]}]}
        assert each.post("/api/chat", chat).json["error"].startswith("'messages[0].images[0]'")
        reply = each.post("/api/generate", {"model": "fake", "system": "y", "prompt": "x", "images": ["@@@@"]})
        assert reply.json["error"].startswith("'images[0]'") and words in reply.json["error"]


def test_messages_are_named_as_they_were_sent(seeing):
    """Anthropic's have their system beside them, and results of tools within: places in the chat that they mean are not theirs."""
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    asked = {"model": "fake", "max_tokens": 9, "system": "x", "messages": [{"role": "user", "content": [block]}]}
    message = seeing.post("/v1/messages", asked).error["message"]
    assert message == "'messages': the image is neither a PNG, nor a JPEG, nor a WebP."


@pytest.mark.parametrize("name", hostile())
def test_hostile_images_are_400_with_one_line(seeing, name):
    data, words = hostile()[name]
    reply = seeing.post(CHAT, asking(image(uri(data))))
    assert reply.status == 400 and reply.error["code"] == "invalid_value", reply.body
    assert words in reply.error["message"] and "\n" not in reply.error["message"]
    assert reply.error["message"].startswith("'messages[0].content[0]': ")


def test_the_bounds_of_a_request(own_server):
    server = own_server("--vision area")
    server.call(lambda: server.app.__dict__.update(images=ImageDecoder(ImageLimits(2000, 5000, 2))))
    assert answered(server.post(CHAT, asking(image(), image()))) == f"5+4 {RED}; 9+4 {RED}"
    reply = server.post(CHAT, asking(image(), image(), image()))
    assert reply.error["code"] == "array_above_max_length" and "3 images; at most 2" in reply.error["message"]
    reply = server.post(CHAT, asking(image(uri(file_of(80, 80)))))
    assert reply.status == 400 and "80 x 80 pixels; at most 5000" in reply.error["message"]
    reply = server.post(CHAT, asking(image(uri(b"\x89PNG" + bytes(3000)))))
    assert reply.status == 400 and "more than 2000 bytes" in reply.error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_what_does_not_go_with_images(seeing, fields, param):
    reply = seeing.post(CHAT, asking(image(), **fields))
    assert reply.status == 400 and reply.error["param"] == param and "images" in reply.error["message"]


def test_images_of_other_roles_and_models(seeing, server):
    reply = server.post(CHAT, asking(image()))
    assert reply.status == 400 and reply.error["code"] == "unsupported_parameter"
    assert reply.error["message"] == "'messages[0].content[0]': this model sees no images."
    assert server.post("/tokenize", {"messages": asking(image())["messages"]}).status == 400
    for role in ("system", "assistant"):
        messages = [{"role": role, "content": [image()]}, {"role": "user", "content": "x"}]
        reply = seeing.post(CHAT, {"model": "fake", "messages": messages})
        assert reply.status == 400 and "belong to messages of the role user" in reply.error["message"]


def test_the_bytes_of_images_take_no_room_of_tokens(own_server):
    noise = uri(file_of(80, 80, noise=True))
    server = own_server("--vision area", key=(Key("acme", "k" * 32, quota=Quota(tpm=300)),))
    reply = server.post(CHAT, asking(image(noise), max_tokens=90), bearer("k" * 32))
    assert len(noise) > 25_000 and answered(reply).startswith("5+9 84x84")
    assert server.post(CHAT, chat_body("x" * 6000), bearer("k" * 32)).status == 429


def test_sessions_keep_images(own_server, path, keys, monkeypatch):  # noqa: F811
    server, me = own_server("--vision area", database=path), bearer(keys[0])
    assert answered(server.post(CHAT, asking(image(), session_id="s"), me)) == f"5+4 {RED}"
    reply = server.post(CHAT, chat_body("!images", session_id="s"), me)
    assert answered(reply) == f"5+4 {RED}"  # the first turn's, before the new words
    found = server.get("/v1/sessions/s", me).json["messages"]
    assert found[0]["content"] == [image(), text("!images")]
    monkeypatch.setattr(sessions, "SESSION_BYTES", 1000)
    reply = server.post(CHAT, asking(image(uri(file_of(40, 40, noise=True))), session_id="t"), me)
    assert reply.status == 413 and "images of this session" in reply.error["message"]
    assert server.get("/v1/sessions/t", me).status == 404


def test_stored_responses_keep_images(own_server, path, keys):  # noqa: F811
    server, me = own_server("--vision area", database=path), bearer(keys[0])
    content = [{"type": "input_image", "image_url": uri()}, {"type": "input_text", "text": "!images"}]
    body = {"model": "fake", "input": [{"role": "user", "content": content}], "store": True}
    first = server.post("/v1/responses", body, me).json
    listed = server.get(f"/v1/responses/{first['id']}/input_items", me).json["data"]
    assert listed[0]["content"] == content
    body = {"model": "fake", "input": "!images", "previous_response_id": first["id"]}
    said = server.post("/v1/responses", body, me).json
    assert said["output"][0]["content"][0]["text"] == f"5+4 {RED}"


def test_uploaded_files_are_images(own_server, path, keys):  # noqa: F811
    server, me, other = own_server("--vision area", database=path), bearer(keys[0]), bearer(keys[2])
    form = (
        b"--x\r\ncontent-disposition: form-data; name=purpose\r\n\r\nvision\r\n--x\r\n"
        b'content-disposition: form-data; name=file; filename="a.png"\r\n\r\n' + file_of() + b"\r\n--x--\r\n"
    )
    sent = {"content-type": "multipart/form-data; boundary=x", "content-length": str(len(form))}
    file = server.post("/v1/files", form, me | sent).json["id"]
    here = {"type": "image_url", "image_url": {"file_id": file}}
    assert answered(server.post(CHAT, asking(here, session_id="s"), me)) == f"5+4 {RED}"
    assert server.get("/v1/sessions/s", me).json["messages"][0]["content"] == [here, text("!images")]
    content = [{"type": "input_image", "file_id": file}, {"type": "input_text", "text": "!images"}]
    body = {"model": "fake", "input": [{"role": "user", "content": content}], "store": True}
    first = server.post("/v1/responses", body, me).json
    assert first["output"][0]["content"][0]["text"] == f"5+4 {RED}"
    listed = server.get(f"/v1/responses/{first['id']}/input_items", me).json["data"]
    assert listed[0]["content"] == content
    block = {"type": "image", "source": {"type": "file", "file_id": file}}
    messages = [{"role": "user", "content": [block, {"type": "text", "text": "!images"}]}]
    said = server.post("/v1/messages", {"model": "fake", "max_tokens": 99, "messages": messages}, me).json
    assert said["content"][0]["text"] == f"5+4 {RED}"

    reply = server.post(CHAT, asking(here), other)
    assert reply.status == 404 and reply.error["param"] == "messages[0].content[0]"
    assert server.post(CHAT, asking({"type": "image_url", "image_url": {"file_id": "../../x"}}), me).status == 400
    assert server.post(CHAT, asking({"type": "image_url", "image_url": {}}), me).error["param"].endswith("url")
    both = {"type": "image_url", "image_url": {"file_id": file, "url": uri()}}
    assert "no file_id" in server.post(CHAT, asking(both), me).error["message"]


def test_lines_of_batches_have_images(own_server, path, keys):  # noqa: F811
    server = own_server("--vision area", database=path)
    with openai.OpenAI(base_url=server.base + "/v1", api_key=keys[0], max_retries=0) as client:
        lines = [asking(image()), asking(image("https://example.com/a.png"))]
        made = batches.begin(
            client,
            [{"custom_id": str(n), "method": "POST", "url": CHAT, "body": body} for n, body in enumerate(lines)],
            CHAT,
        )
        done = batches.ended(client, made)
        (good,), (bad,) = (batches.results(client, id) for id in (done.output_file_id, done.error_file_id))
    assert good["response"]["body"]["choices"][0]["message"]["content"] == f"5+4 {RED}"
    assert "no URL is fetched" in bad["response"]["body"]["error"]["message"]


def test_a_body_may_be_longer_by_its_images(own_server):
    server = own_server("--vision area", limits=Limits(body_bytes=20_000))
    big = image(uri(file_of(80, 80, noise=True)))
    assert len(big["image_url"]["url"]) > 25_000
    assert answered(server.post(CHAT, asking(big))).startswith("5+9 84x84")
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": uri().partition(",")[2]}}
    long = {"type": "text", "text": "words " * 5000}
    messages = [{"role": "user", "content": [block, long]}]
    bodies = {
        CHAT: asking(big, long),
        "/v1/responses": {"model": "fake", "input": "words " * 5000},
        "/v1/messages": {"model": "fake", "max_tokens": 9, "messages": messages},
        "/v1/messages/count_tokens": {"model": "fake", "messages": messages},
        "/tokenize": {"model": "fake", "prompt": "words " * 5000},
        "/api/generate": {"model": "fake", "prompt": "words " * 5000, "raw": True},
        "/v1/chats/c": {"version": 0, "messages": [{"parent": -1, "role": "root", "content": "words " * 5000}]},
    }
    for where, body in bodies.items():
        reply = server.post(where, body)
        assert reply.status == 413 and b"20000 bytes beside its images" in reply.body, (where, reply.body)
    # What would take long to decode is not decoded.
    for data in (b'{"a": [' + b"1," * 20_000 + b"1]}", b'{"a\\"": [' + b"1," * 20_000 + b"1]}"):
        reply = server.post(CHAT, data)
        assert reply.status == 413 and b"beside files" in reply.body, reply.body
    assert server.post(CHAT, b'{"a": "' + bytes([32]) * 400_000 + b'"}').status == 413
    # Other routes take what they took.
    reply = server.post("/v1/completions", {"model": "fake", "prompt": "words " * 5000})
    assert reply.status == 413 and b"larger than 20000 bytes" in reply.body


def test_passages_of_documents_stand_before_the_images_of_a_question(own_server, tmp_path):
    server = own_server("--vision area", documents=str(tmp_path / "documents.db"))
    made = server.post("/v1/rag/documents", {"name": "a.txt", "text": "The capital of France is Paris."}, timeout=20)
    assert made.status == 200, made.body
    wait_for(lambda: server.get(f"/v1/rag/documents/{made.json['id']}").json["status"] == "ready", 20)
    asked = asking(image(), text(" the capital of France "), rag={"stages": ["bm25"]})
    said = answered(server.post(CHAT, asked, timeout=20))
    start = int(said.partition("+")[0])
    assert said.endswith(f"+4 {RED}") and start > len("user:The capital of France is Paris.")


def test_logs_show_nothing_of_images(own_server, caplog):
    data = file_of(80, 80, noise=True)
    with caplog.at_level(logging.DEBUG):
        server = own_server("--vision area")
        assert server.post(CHAT, asking(image(uri(data)))).status == 200
        assert server.post(CHAT, asking(image(uri(data[:200])))).status == 400
    for part in (uri(data)[40:100], data[60:80].hex()):
        assert part not in caplog.text


def test_an_idempotency_key_tells_images_apart(own_server, path, keys):  # noqa: F811
    server, me = own_server("--vision area", database=path), bearer(keys[0]) | {"idempotency-key": "k"}
    first = server.post(CHAT, asking(image()), me)
    assert server.post(CHAT, asking(image()), me).body == first.body
    assert server.post(CHAT, asking(image(uri(file_of(61, 60)))), me).status == 422


def test_the_event_loop_is_not_held(seeing):
    big = uri(file_of(800, 800, noise=True)[: 1 << 20])
    with seeing.longest_callback() as longest:
        assert seeing.post(CHAT, asking(image(big))).status == 400
    assert longest[0][0] < 0.05, longest
