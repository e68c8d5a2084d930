"""The seeded mutator of everything that strangers send: python mutator.py FORMAT COUNT SEED FOLDER [ADDRESSES_MIB].

tests/formats/mutate.py changes bytes, numbers and words of a seed; where the seed is JSON, half of the mutants are changed as a tree
instead and stay JSON. FORMATS says what each format's seeds are and what is tried: an attempt gives "accepted" after an independent
look at what was made of the mutant, "refused" for the error that the format may give, and raises whatever else happened. It
runs in a process of its own with a limit of addresses and of processor time. Prints one JSON object; a mutant that failed stays
in FOLDER, and the mutant that a process died of, which is FOLDER/FORMAT-now."""

import copy
import json
import os
import random
import re
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

TESTS = Path(__file__).parents[1]
FOLDERS = ("formats", "tokenizer", "structured", "models", "engine", "server", "rag", "reliability")
sys.path[:0] = [str(TESTS / name) for name in FOLDERS if str(TESTS / name) not in sys.path]

import documents  # noqa: E402
import mutate as files  # noqa: E402

from zse.errors import FormatError, RequestError, UnsupportedError  # noqa: E402

CHUNK = 400  # mutants that are made at once
LEAVES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1.5,
    1e308,
    2**31,
    2**63,
    10**30,
    10**400,
    "",
    "a",
    "\ud800",
    "\0",
    [],
    {},
]


class Format(NamedTuple):
    """seeds: valid ones. attempt(mutant): "accepted" or "refused". limit_s: of processor time for one mutant. ahead(mutants): which
    are going to be attempted next, in this order."""

    seeds: list[bytes]
    attempt: Callable[[bytes], str]
    limit_s: float = 0.2
    is_json: bool = False
    ahead: Callable[[list[bytes]], None] = lambda mutants: None


def changed_tree(rng: random.Random, value: Any) -> Any:
    """The JSON value with some nodes changed."""
    value = json.loads(json.dumps(value))
    root = [value]
    for _ in range(rng.choice((1, 1, 2, 4))):
        places = [(root, 0)]
        stack = [value := root[0]]
        while stack:
            node = stack.pop()
            keys = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
            for key in keys:
                places.append((node, key))
                stack.append(node[key])
        holder, key = rng.choice(places)
        other, of = rng.choice(places)
        match rng.randrange(6):
            case 0 | 1:
                holder[key] = copy.copy(rng.choice(LEAVES))
            case 2:
                holder[key] = json.loads(json.dumps(other[of]))
            case 3 if holder is not root:
                del holder[key]
            case 4:
                for _ in range(rng.choice((1, 70, 900))):
                    holder[key] = rng.choice(([holder[key]], {"a": holder[key]}))
            case _ if isinstance(holder, dict):
                holder[rng.choice((str(key) + "x", "type", "$ref", "id", "model"))] = copy.copy(rng.choice(LEAVES))
    return root[0]


def mutant_of(rng: random.Random, format: Format) -> bytes:
    seed = rng.choice(format.seeds)
    if format.is_json and rng.random() < 0.6:
        try:
            return json.dumps(changed_tree(rng, json.loads(seed)), ensure_ascii=rng.random() < 0.5).encode(
                "utf-8", "surrogatepass"
            )
        except RecursionError:
            return b"[" * 2000
    return files.mutate(rng, seed, "")


# -- vocabularies

TEXTS = [
    "",
    "a",
    "hello world",
    " 12345  \n\n x",
    "<s>x</s><think>",
    "äöü 漢字 🙂👩‍👩‍👧",
    "a" * 300,
    "\0\x01\x7f",
    "'s 're",
    '{"a": [1]}',
]


def look_at_tokenizer(tokenizer) -> None:
    """What any accepted tokenizer must do, from the outside."""
    size = tokenizer.vocab_size
    assert 0 < size < 1 << 23
    for role in (tokenizer.bos_id, tokenizer.eos_id, tokenizer.unknown_id, tokenizer.pad_id, *tokenizer.eos_ids):
        assert role is None or type(role) is int and 0 <= role < size, f"role {role!r} of {size} tokens"
    known = [tokenizer.token_bytes(id) for id in range(min(size, 2000))]
    specials = {id for id in range(min(size, 2000)) if tokenizer.is_special(id)}
    for text in TEXTS:
        ids = tokenizer.encode(text, add_bos=False)
        assert all(type(id) is int and 0 <= id < size for id in ids), "an id outside the vocabulary"
        if not tokenizer.adds_eos:
            assert not specials.intersection(ids) - {tokenizer.unknown_id}, "a user's text becomes a control token"
        data = tokenizer.decode(ids)
        assert isinstance(data, bytes | str)
    assert all(isinstance(piece, bytes) for piece in known)
    for bad in (-1, size, 1 << 31):
        try:
            tokenizer.token_bytes(bad)
        except IndexError:
            continue
        raise AssertionError(f"token {bad} of {size} has bytes")


def tokenizer_json() -> Format:
    import tempfile

    import tiny_text
    from vocabularies import alphabet

    from zse.tokenizer import huggingface

    folder = Path(tempfile.mkdtemp())
    tiny_text.write(folder)
    whole = (folder / "tokenizer.json").read_bytes()
    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    letters = {letter: id for id, letter in enumerate(alphabet())}
    small = {
        "added_tokens": [
            {"id": 258, "content": "<s>", "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": next(iter(list(huggingface.PATTERNS)[1:]))},
                    "behavior": "Isolated",
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [258], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {**letters, "he": 256, "hel": 257}, "merges": [["h", "e"], ["he", "l"]]},
    }

    def attempt(data: bytes) -> str:
        parts = json.loads(json.dumps(config)), None, None
        if data[:2] == b'{"' and b'"//roles"' in data[:20]:  # the files beside it
            try:
                parsed = json.loads(data)
            except (ValueError, RecursionError):
                return "refused"
            parts = tuple(
                part if isinstance(part, dict) else {} for part in (parsed.get("c"), parsed.get("s"), parsed.get("g"))
            )
            data = whole
        try:
            made = huggingface.from_json(data, *parts)
            look_at_tokenizer(made)
        except (FormatError, UnsupportedError) as error:
            assert "\n" not in str(error)
            return "refused"
        return "accepted"

    roles = {
        "//roles": 0,
        "c": {**config, "add_bos_token": True, "pad_token": {"content": "<s>"}},
        "s": {"bos_token": {"content": "<s>", "lstrip": False}, "unk_token": "<unk>"},
        "g": {"eos_token_id": [2, 1]},
    }
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "e", "he", "▁he"]
    wrapped = {
        "version": "1.0",
        "added_tokens": [{**small["added_tokens"][0], "id": 1}],
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "vocab": {piece: id for id, piece in enumerate(pieces)},
            "merges": ["h e", "▁ he"],
            "unk_token": "<unk>",
            "byte_fallback": True,
            "fuse_unk": True,
        },
    }
    seeds = [whole, *(json.dumps(each).encode() for each in (small, roles, wrapped))]
    return Format(seeds, attempt, 0.5, True)


def vocabulary() -> Format:
    """The arrays of a GGUF file, as one block of bytes with the lengths of its parts; and the tables made of them."""
    import vocabularies as v

    from zse.tokenizer import bpe

    def packed(fields: dict) -> bytes:
        names = [name for name, value in fields.items() if isinstance(value, v.Array)]
        head = {name: [fields[name].type, fields[name].count, len(fields[name].raw)] for name in names}
        rest = {name: value for name, value in fields.items() if name not in names}
        return json.dumps([head, rest]).encode() + b"\n" + b"".join(bytes(fields[name].raw) for name in names)

    def attempt(data: bytes) -> str:
        try:
            if bpe.is_section(data):
                look_at_tokenizer(bpe.from_section(data))
                return "accepted"
            text, _, raw = data.partition(b"\n")
            try:
                head, fields = json.loads(text)
                at, arrays = 0, {}
                for name, (kind, count, size) in head.items():
                    if not (isinstance(size, int) and isinstance(count, int) and 0 <= count < 1 << 40 and size >= 0):
                        return "refused"  # the file's reader has refused it
                    arrays[name] = v.Array(kind, count, raw[at : at + size])
                    at += size
                fields = {**fields, **arrays}
            except (ValueError, TypeError, AttributeError):
                return "refused"
            look_at_tokenizer(bpe.from_gguf(fields))
        except (FormatError, UnsupportedError) as error:
            assert "\n" not in str(error)
            return "refused"
        return "accepted"

    bpe_fields = v.bpe_fields(["h e", "he l", "hel l", "l o"], ["<s>", "</s>"], ["<tool>"], bos_token_id=260)
    spm_fields = v.spm_fields({"▁": -1.0, "▁he": -2.0, "llo": -3.0, "he": -4.0, "h": -5.0}, user=("<tool>",))
    sections = [bpe.from_gguf(fields).to_section() for fields in (bpe_fields, spm_fields)]
    return Format([packed(bpe_fields), packed(spm_fields), *sections], attempt)


# -- config.json


def config() -> Format:
    import tiny_configs
    import tiny_encoders
    import tiny_families

    from zse.formats.file import parse_object
    from zse.models import registry

    families = {**tiny_configs.LLAMA_LIKE, **tiny_configs.OTHERS, **tiny_families.CONFIGS, **tiny_encoders.CONFIGS}
    seeds = [json.dumps(each).encode() for each in families.values()]

    def attempt(data: bytes) -> str:
        try:
            parsed = parse_object(data, "config.json", 0, "config.json")
            made = registry.config_from_hf("config.json", parsed, {"eos_token_id": parsed.get("eos_token_id")})
            again = type(made).from_json(made.to_json())
        except (FormatError, UnsupportedError) as error:
            assert "\n" not in str(error)
            return "refused"
        assert again == made, "another after a round trip"
        assert 0 < made.num_layers <= 4096 and 0 < made.hidden_size <= 1 << 20 and 0 < made.vocab_size <= 1 << 23
        assert made.num_heads % made.num_kv_heads == 0 and made.head_dim % 2 == 0
        assert len(made.sliding_layers) in (0, made.num_layers)
        for rope in {made.rope, made.local_rope} - {None}:
            speeds = rope.inv_freq(made.head_dim, made.max_context)
            assert len(speeds) == rope.dims(made.head_dim) // 2
            assert all(isinstance(speed, float) and 0 <= speed < float("inf") for speed in speeds), (
                "a speed is no number"
            )
            assert 0 <= rope.mscale < float("inf")
        return "accepted"

    return Format(seeds, attempt, is_json=True)


# -- chat templates

TEMPLATES = [
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{%- set ns = namespace(i=0, seen=false) -%}{%- macro tool(t) -%}{{ t | tojson(indent=2) }}{%- endmacro -%}"
    "{{- bos_token -}}{% for m in messages if m.role != 'x' %}{% set ns.i = ns.i + loop.index0 %}"
    "{{ m.role.upper() ~ ': ' ~ m['content'][:20].split(' ')[-1] }}{% if loop.last and not ns.seen %}{{ ns.i }}{% endif %}"
    "{% else %}none{% endfor %}{% for t in tools or [] %}{{ tool(t) }}{% endfor %}",
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% set x = messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') %}"
    "{{ x | replace('a', 'b') | default('', true) }}{{ range(3) | list | length }}{% filter upper %}a{% endfilter %}",
]


def template() -> Format:
    from zse.tokenizer.template_fast import compile_fast
    from zse.tokenizer.template_jinja import JinjaTemplate

    variables = {
        "messages": [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "<|im_end|>"}],
        "tools": [{"function": {"name": "f", "parameters": {"type": "object"}}}],
        "add_generation_prompt": True,
        "bos_token": "<s>",
    }

    def attempt(data: bytes) -> str:
        try:
            source = data.decode()
        except UnicodeDecodeError:
            return "refused"
        results = []
        for compile in (compile_fast, JinjaTemplate):
            try:
                made = compile(source)
            except ValueError:
                continue
            if made is not None:
                try:
                    results.append(made.render(dict(variables)))
                except RequestError:
                    results.append(None)
        texts = [
            result if result is None or isinstance(result, str) else "".join(map(str, result)) for result in results
        ]
        assert len(set(texts)) <= 1, f"two interpreters, two answers: {texts}"
        return "accepted" if texts and texts[0] is not None else "refused"

    return Format([text.encode() for text in TEMPLATES], attempt, 1.2)


# -- HTTP and JSON


def http() -> Format:
    """Bytes of a connection: the verdict does not depend on how they are cut, and h11 reads the same requests."""
    import h11

    from zse.http.exchange import HTTPRequest
    from zse.http.listener import Server
    from zse.http.reader import RequestReader

    def no_check(request) -> None:
        return

    app = SimpleNamespace(request_type=HTTPRequest, check_head=no_check)
    connection = SimpleNamespace(client="10.0.0.1", expect_continue=lambda: None)

    def read(pieces: list[bytes]):
        server = Server(app)
        reader = RequestReader(server, connection)
        for piece in pieces:
            while piece and reader.refusal is None:
                piece = reader.feed(piece)
        found = [
            (r.method, r.path, bytes(r.body), r.keep_alive, r.headers, r.refusal and r.refusal.code)
            for r in reader.ready
        ]
        held = sum(len(r.body) for r in reader.ready) + (len(reader.request.body) if reader.request else 0)
        assert server.bodies.total >= held, "bodies that nobody counts"
        if reader.refusal is not None:
            assert 400 <= reader.refusal.status < 500, reader.refusal
        return found, reader.refusal and reader.refusal.code

    def theirs(data: bytes):
        """What h11 makes of the first request: (method, target, body), or None."""
        peer = h11.Connection(h11.SERVER)
        try:
            peer.receive_data(data)
            head, body = peer.next_event(), b""
            while isinstance(event := peer.next_event(), h11.Data):
                body += event.data
            return (head.method.decode(), head.target, body) if isinstance(event, h11.EndOfMessage) else None
        except (h11.RemoteProtocolError, AttributeError):
            return None

    def attempt(data: bytes) -> str:
        whole = read([data])
        for cuts in ([len(data) // 2], [1, len(data) - 1], range(1, len(data)) if len(data) < 300 else [7]):
            ends = [*sorted(cuts), len(data)]
            cuts = ends[:-1]
            cut = read([data[start:end] for start, end in zip([0, *cuts], ends)])
            assert cut == whole, f"cut {cut} and whole {whole} differ"
        if not whole[0]:
            return "refused"
        method, path, body, _, headers, _ = whole[0][0]
        assert method.isascii() and method.isalpha() or "-" in method, method
        assert not any("\r" in text or "\n" in text or "\0" in text for pair in headers.items() for text in pair)
        assert not ("content-length" in headers and "transfer-encoding" in headers), "two lengths"
        other = theirs(data)
        if other is not None:
            assert (other[0], other[2]) == (method, body), f"h11 reads {other}, we {whole[0][0]}"
        return "accepted"

    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
    head = b"POST /v1/chat/completions?a=b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunked = b"Transfer-Encoding: chunked\r\n\r\n5\r\n" + body[:5] + b"\r\n%x;x=y\r\n" % (len(body) - 5) + body[5:]
    seeds = [
        head + b"Authorization: Bearer key\r\nContent-Length: %d\r\n\r\n" % len(body) + body,
        head + chunked + b"\r\n0\r\nTrailer: x\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: [::1]:80\r\nConnection: close\r\n\r\n",
        b"GET http://localhost/health%2flive HTTP/1.0\r\nAccept: */*\r\n\r\n" * 2,
        b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\nConnection: upgrade\r\nContent-Length: 3\r\n\r\nabcGET / HTTP/1.1\r\nHost: a\r\n\r\n",
    ]
    return Format(seeds, attempt)


def strict(data: bytes) -> dict:
    """JSON as the reliability list wants it, by another parser. ValueError."""

    def pairs(items):
        if len(dict(items)) != len(items):
            raise ValueError("a key twice")
        return dict(items)

    def constant(name):
        raise ValueError(name)

    def whole(text):
        if not -(2**63) <= int(text) <= 2**64 - 1:
            raise ValueError("integer")
        return int(text)

    return json.loads(data.decode(), object_pairs_hook=pairs, parse_constant=constant, parse_int=whole)


def body() -> Format:
    """Bodies of all routes that generate: JSON agrees with another parser's, and what is accepted is within the bounds."""
    from zse.http.exchange import HTTPRequest
    from zse.server.requests.completions import read_chat, read_completions
    from zse.server.requests.messages import read_messages
    from zse.server.requests.ollama import read_ollama_chat, read_ollama_generate
    from zse.server.requests.responses import REFERENCE, check_items, check_responses, completion_of, shown_items

    chat = {
        "model": "m",
        "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 2,
        "stop": ["a", "b"],
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logit_bias": {"5": 1.5},
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
        "metadata": {"a": "b"},
    }
    text = {
        "model": "m",
        "prompt": ["a", "b"],
        "max_tokens": 5,
        "best_of": 2,
        "n": 1,
        "echo": True,
        "logprobs": 2,
        "min_p": 0.1,
    }
    more = {"model": "m", "prompt": [1, 2, 3], "stop_token_ids": [5], "top_k": 5, "repetition_penalty": 1.1}

    use = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x"}], "is_error": True}
    message = {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": ""}, use]},
            {"role": "user", "content": [result]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {}}}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 3},
        "output_config": {"effort": "low"},
        "stop_sequences": ["a"],
    }

    items = {
        "model": "m",
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "call_id": "t", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "t", "output": "1"},
            {"type": "item_reference", "id": "msg_1_0"},
        ],
        "instructions": "i",
        "tools": [
            {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": True}
        ],
        "tool_choice": "auto",
        "text": {"format": {"type": "json_object"}},
        "reasoning": {"effort": "low"},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }

    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    lines = {
        "model": "m",
        "messages": [
            {"role": "user", "content": "a", "images": []},
            {"role": "assistant", "content": "", "thinking": "t", "tool_calls": [call]},
            {"role": "tool", "tool_name": "f", "content": "x"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
        "options": {"temperature": 0.5, "num_predict": 5, "stop": ["a"], "num_ctx": 100, "repeat_penalty": 1.1},
        "think": "low",
        "keep_alive": "5m",
        "logprobs": True,
        "top_logprobs": 2,
    }
    raw = {"model": "m", "prompt": "a", "raw": True, "options": {"num_predict": -1}, "stream": False}

    def read_stored(body: dict):
        """A stored response is what it was when it is gone on from. The route puts what is stored where an item is named."""
        values = check_responses(body)
        asked = [item for item in values["input"] if item["type"] != REFERENCE]
        made = completion_of(values, asked)
        again = check_items(json.loads(json.dumps(shown_items(asked, "resp_1"))))
        assert again == asked and completion_of(values, again).messages == made.messages
        return made

    readers = read_chat, read_completions, read_messages, read_stored, read_ollama_chat, read_ollama_generate

    def attempt(data: bytes) -> str:
        request = HTTPRequest("POST", "/", "", {}, False, True, None, data)
        try:
            value = request.json()
        except RequestError:
            return "refused"
        try:
            other = strict(data)
        except (ValueError, RecursionError) as error:
            raise AssertionError(f"accepted JSON that another parser refuses: {error}") from None
        assert repr(other) == repr(value), "another value"
        accepted = False
        for read in readers:
            try:
                made = read(json.loads(data))
            except RequestError as error:
                assert 400 <= error.status < 500 and error.code and "\n" not in error.message, error
                continue
            accepted = True
            params = made.params
            assert 0 <= params.temperature <= 2 and 0 < params.top_p <= 1 and 1 <= made.n <= made.best_of <= 128
            assert params.max_tokens is None or params.max_tokens >= 0
            assert params.logprobs is None or 0 <= params.logprobs <= 20
            assert all(isinstance(stop, str) and stop for stop in params.stop)
        return "accepted" if accepted else "refused"

    return Format(
        [json.dumps(each).encode() for each in (chat, text, more, message, items, lines, raw)], attempt, is_json=True
    )


def query() -> Format:
    """What stands behind the "?" of a list: what is accepted is within the bounds, and is what another parser finds."""
    from urllib.parse import parse_qs

    from zse.server.requests import queries

    rows = [{"id": f"msg_{index}"} for index in range(300)]

    def attempt(data: bytes) -> str:
        try:
            text = data.decode("ascii")  # the server's reader refuses others
        except UnicodeDecodeError:
            return "refused"
        try:
            values = queries.read(text, queries.PAGE)
            page = queries.page(rows, values)
        except RequestError as error:
            assert error.status == 400 and error.code and "\n" not in error.message and len(error.message) < 300, error
            return "refused"
        given = parse_qs(text, keep_blank_values=True)
        assert given.keys() <= queries.PAGE.keys() and all(len(values) == 1 for values in given.values())
        assert int(given.get("limit", ["20"])[0]) == values["limit"] and len(page["data"]) <= values["limit"] <= 100
        assert given.get("after", [None])[0] == values["after"] and {*map(str, page["data"])} <= {*map(str, rows)}
        return "accepted"

    seeds = [b"limit=5&order=asc&after=msg_7", b"after=%6dsg_1&limit=07", b"order=desc", b"", b"limit=100"]
    return Format(seeds, attempt)


# -- grammars

SERVED_EVERY = 100  # of so many mutants that compile, one goes through the server's own checker as well


class Compilers:
    """Compile grammars as the server's checker does, with its limits and its clock, a chunk of them in one fork: a fork for each takes 10
    to 20 ms, compiling one. What a fork does not survive, or not in time, goes through the checker itself, and one of SERVED_EVERY
    others, for which it must find the same."""

    def __init__(self, words):
        from zse.structured import checker

        self.words, self.checker = words, checker
        self.pipe = checker.start(words, [])
        self.waiting: deque = deque()
        self.pid = self.count = self.alone = 0

    def begin(self, structures) -> None:
        """Compile these in a fork; verdict() is asked for them in this order. Those that are left from before go."""
        import multiprocessing

        self.end()
        self.waiting = deque(structures)
        self.results, theirs = multiprocessing.Pipe(duplex=False)
        self.pid = os.fork()
        if self.pid:
            theirs.close()
            return
        try:
            self.results.close()
            self.pipe.close()
            self.checker.close_in()
            for structure in self.waiting:
                theirs.send(self.checker.verdict(structure, self.words))
        finally:
            os._exit(0)

    def end(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.results.close()
            self.pid = 0

    def verdict(self, structure) -> tuple[str, str]:
        """(code, error) as Checked has them."""
        if not self.waiting or self.waiting[0] != structure:
            return self._served(structure)
        self.waiting.popleft()
        found = None
        try:
            if self.results.poll(self.checker.CHECK_S):
                found = self.results.recv()
        except (EOFError, ConnectionError):
            pass
        self.count += 1
        if found is None:
            self.begin(self.waiting)
        elif self.count % SERVED_EVERY:
            return found
        served = self._served(structure)
        codes = {served[0], found[0] if found else "schema_too_complex"}
        assert len(codes) == 1 or "schema_too_complex" in codes, f"{found} and {served}"
        return served

    def _served(self, structure) -> tuple[str, str]:
        import msgspec

        self.alone += 1
        started = time.monotonic()
        self.pipe.send_bytes(msgspec.msgpack.encode(self.checker.Check(1, structure)))
        assert self.pipe.poll(20), "the checker hangs"
        result = msgspec.msgpack.decode(self.pipe.recv_bytes(), type=self.checker.Checked)
        assert time.monotonic() - started < self.checker.CHECK_S + 5
        return result.code, result.error


def grammar(kind: str, seeds: list[bytes], is_json: bool = False) -> Format:
    """What the compilers accept compiles here too, and a random text of it is of the form."""
    import tempfile

    import tiny_model
    import tiny_text
    from test_masks import Walk

    from zse.structured.compile import GrammarError, Vocabulary
    from zse.structured.options import read_structure
    from zse.structured.worker import load_tokenizer

    folder = tiny_model.write(Path(tempfile.mkdtemp()) / "tiny")
    tiny_text.write(folder)
    words = Vocabulary(load_tokenizer(str(folder)), tiny_model.VOCAB, frozenset({tiny_model.EOS}))
    compilers = Compilers(words)

    def structure_of(data: bytes):
        """None where a request is refused for it."""
        try:
            return read_structure({kind: data.decode()})
        except UnicodeDecodeError:
            return None
        except RequestError as error:
            assert 400 <= error.status < 500 and "\n" not in error.message
            return None

    def ahead(mutants: list[bytes]) -> None:
        compilers.begin(structure for structure in map(structure_of, mutants) if structure is not None)

    def attempt(data: bytes) -> str:
        structure = structure_of(data)
        if structure is None:
            return "refused"
        code, error = compilers.verdict(structure)
        if code:
            assert code in ("invalid_schema", "schema_too_complex") and error and "\n" not in error
            return "refused"
        walk = Walk(words, structure)
        try:
            said = walk.run(120)
        except GrammarError:
            return "accepted"  # a mask that cannot be made fails its request alone
        except AssertionError:
            return "accepted"  # its texts are longer
        if kind == "json":
            look_at_json(said, data.decode())
        return "accepted"

    return Format(seeds, attempt, 8.0, is_json, ahead)


def look_at_json(said: str, schema: str) -> None:
    """The text is JSON, and of the schema as the jsonschema package reads it."""
    import jsonschema

    value = json.loads(said)
    parsed = json.loads(schema)
    try:
        jsonschema.Draft202012Validator.check_schema(parsed)
        problem = next(iter(jsonschema.Draft202012Validator(parsed).iter_errors(value)), None)
    except Exception:
        return  # a schema that only one of them reads
    # JSON's numbers are doubles (RFC 8259, 6), and the grammars' are.
    if problem is not None and any(abs(int(digits)) > 1 << 53 for digits in re.findall(r"-?[0-9]+", schema)):
        return
    assert problem is None, f"{said!r} is not of {schema}: {problem.message}"


def schema() -> Format:
    from schemas import SCHEMAS

    return grammar("json", [json.dumps(each).encode() for each in SCHEMAS.values()], True)


def regex() -> Format:
    return grammar(
        "regex", [rb"[0-9]{3}-[a-z]{1,4}", rb"(a|bc)*d?\.[^x-z]+", rb"(?i)x{2,5}|\w+\s\d{1,3}", rb"((a{3}){4}b){2}"]
    )


def lark() -> Format:
    return grammar(
        "grammar",
        [
            b'start: "<" word ("," word)~0..3 ">"\nword: /[a-d]{1,3}/',
            b'start: expr\nexpr: term (("+" | "-") term)*\nterm: NUMBER | "(" expr ")"\nNUMBER: /[0-9]+/\n%ignore " "',
        ],
    )


def gbnf() -> Format:
    return grammar(
        "grammar",
        [
            b'root ::= "x" digit+ end?\ndigit ::= [0-9]\nend ::= "." ("a" | "b")',
            b'root ::= item ("," ws item)*\nitem ::= [a-z]{2,4} | "\\"" [^"]* "\\""\nws ::= " "?',
        ],
    )


def model_file(format: str) -> Callable[[], Format]:
    """A model file: tests/formats/mutate.py has its seeds and its independent look."""

    def made() -> Format:
        import tempfile

        from zse.formats.opening import open_model
        from zse.formats.verify import verify

        folder = tempfile.mkdtemp()
        path = os.path.join(folder, "mutant")

        def attempt(data: bytes) -> str:
            with open(path, "wb") as file:
                file.write(data)
            try:
                with open_model(path) as source:
                    files.independent_check(source, len(data))
                verify(path)
            except (FormatError, UnsupportedError) as error:
                assert "\n" not in str(error)
                return "refused"
            return "accepted"

        return Format([files.seeds(format, folder)], attempt)

    return made


def adapter() -> Format:
    """A LoRA folder: its adapter_config.json, a line, then its tensors; read for a model of two layers."""
    import tempfile

    import numpy as np
    import tiny_adapters

    from zse.lora.targets import Targets, read_image
    from zse.models import registry

    targets = Targets(registry.config_from_hf("config.json", tiny_adapters.config_of("llama")))
    folder = Path(tempfile.mkdtemp())
    seeds = []
    for number, options in enumerate(({}, {"dtype": "BF16", "only": ("q_proj", "v_proj")}, {"use_rslora": True})):
        found = tiny_adapters.adapter("llama", number, only=options.pop("only", ("down_proj",)))
        tiny_adapters.write(found, folder, **options)
        files = (folder / "adapter_config.json").read_bytes(), (folder / "adapter_model.safetensors").read_bytes()
        seeds.append(files[0] + b"\n" + files[1])

    def attempt(data: bytes) -> str:
        config, _, tensors = data.partition(b"\n")
        (folder / "adapter_config.json").write_bytes(config)
        (folder / "adapter_model.safetensors").write_bytes(tensors)
        try:
            image = read_image(str(folder), targets, 16)
        except (FormatError, UnsupportedError) as error:
            assert "\n" not in str(error)
            return "refused"
        assert image.rank in (8, 16) and image.own_rank <= image.rank and image.members <= targets.members
        end = 0
        for at, numbers in image.parts:
            assert at >= end and len(numbers) % 2 == 0, "parts lie on one another"
            end = at + len(numbers) // 2
            assert np.isfinite(np.frombuffer(numbers, np.float16)).all()
        assert end <= targets.size * image.rank, "more than a slot"
        assert np.isfinite(np.frombuffer(image.scales, np.float32)).all()
        return "accepted"

    return Format(seeds, attempt, 0.5)


def document(kind: str) -> Callable[[], Format]:
    """A kind of documents. pdfium takes its time for some damaged files; the worker has 20 s for one."""

    def make() -> Format:
        seeds, attempt = documents.kinds()[kind]
        return Format(seeds, attempt, limit_s=2.0 if kind == "pdf" else 0.2)

    return make


DOCUMENTS = ("pdf", "docx", "html", "markdown", "json document", "csv", "plain text", "source")
FORMATS: dict[str, Callable[[], Format]] = {
    "adapter": adapter,
    "gguf": model_file("gguf"),
    "safetensors": model_file("safetensors"),
    "zse": model_file("zse"),
    "tokenizer.json": tokenizer_json,
    "vocabulary": vocabulary,
    "config.json": config,
    "chat template": template,
    "http": http,
    "body": body,
    "query": query,
    "json schema": schema,
    "regex": regex,
    "lark": lark,
    "gbnf": gbnf,
} | {kind: document(kind) for kind in DOCUMENTS}


def run(name: str, count: int, seed: int, folder: str) -> dict:
    format = FORMATS[name]()
    rng = random.Random(f"{name} {seed}")
    report: dict[str, Any] = {"accepted": 0, "refused": 0, "slowest_ms": 0.0, "failures": []}
    now = os.path.join(folder, f"{name.replace(' ', '-')}-now")
    for data in format.seeds:
        assert format.attempt(data) == "accepted", f"a seed is refused: {data[:200]!r}"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    chunk: list[bytes] = []
    for number in range(count):
        if not chunk:
            chunk = [
                files.mutate(rng, rng.choice(format.seeds), name) if name == "zse" else mutant_of(rng, format)
                for _ in range(min(CHUNK, count - number))
            ]
            format.ahead(chunk)
            chunk.reverse()
        data = chunk.pop()
        with open(now, "wb") as file:
            file.write(data)
        start, problem = time.process_time(), None
        try:
            report[format.attempt(data)] += 1
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        took = time.process_time() - start
        if took > format.limit_s:
            problem = problem or f"took {1000 * took:.0f} ms"
        report["slowest_ms"] = max(report["slowest_ms"], 1000 * took)
        if problem and len(report["failures"]) < 20:
            kept = os.path.join(folder, f"{name.replace(' ', '-')}-{seed}-{number}")
            os.replace(now, kept)
            report["failures"].append([number, problem[:600], kept])
    report["grown_mib"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return report


if __name__ == "__main__":
    if len(sys.argv) > 5:
        resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[5]) << 20,) * 2)
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
