"""JSON values of another type than they should be, one at a time, in every file of a model: each is an error of one line
that names the file, or does not matter."""

import json
import sys
import zlib
from pathlib import Path

import pytest

from zse.errors import ConfigError, FormatError, UnsupportedError
from zse.formats import recommended
from zse.formats.convert import convert
from zse.formats.file import MAX_JSON_DEPTH, read_object
from zse.formats.info import info
from zse.formats.opening import open_model
from zse.formats.zse import ENTRY, HEADER, PAGE, SECTIONS, read_sections, table_crc32
from zse.models.load import plan_model
from zse.sampling.params import recommended_params
from zse.tokenizer.chat_template import load_chat_template
from zse.tokenizer.load import load_tokenizer

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / name) for name in ("engine", "structured")]
import tiny_model  # noqa: E402
import tiny_text  # noqa: E402

VALUES = (None, True, -1, 0, 1.5, 1 << 70, float("inf"), "x", "\ud800", [], [[]], [None], {}, {"x": []}, [1, "x"])
EXPECTED = (FormatError, UnsupportedError, ConfigError)


def mutants(value, most=4):
    """(where, the whole with one value replaced) for every value of a JSON document; of long lists the first ones."""

    def walk(node, path, rebuild):
        for other in VALUES:
            if type(other) is not type(node) or other != node:
                yield path, rebuild(other)
        if isinstance(node, dict):
            for key in list(node)[: 4 * most]:
                yield f"{path}.{key} left out", rebuild({k: v for k, v in node.items() if k != key})
                yield from walk(node[key], f"{path}.{key}", lambda new, key=key: rebuild(node | {key: new}))
        elif isinstance(node, list):
            for index, item in list(enumerate(node))[:most]:
                yield from walk(
                    item, f"{path}[{index}]", lambda new, i=index: rebuild([*node[:i], new, *node[i + 1 :]])
                )

    yield from walk(value, "", lambda new: new)


def use(path) -> None:
    """Everything that a start, `zse info` and `zse show` read."""
    with open_model(path) as source:
        try:
            plan_model(source)
        finally:
            tokenizer = load_tokenizer(source)
            tokenizer.decode(tokenizer.encode("a b"))
            load_chat_template(source, tokenizer)
            recommended_params(recommended.recommended(source)[0])
    info(path)


def check(make, documents) -> int:
    """make(where, document) → a path to use; how many were refused. Anything but a refusal of one line is a failure."""
    refused = failed = 0
    wrong = []
    for where, document in documents:
        try:
            use(make(where, document))
        except EXPECTED as error:
            refused += 1
            assert "\n" not in str(error)
        except Exception as error:
            failed += 1
            wrong.append(f"{where} = {json.dumps(document)[-60:]}: {type(error).__name__}: {error}"[:300])
    assert not failed, f"{failed} of them:\n" + "\n".join(wrong[:15])
    return refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tiny_model.write(tmp_path_factory.mktemp("wrong") / "tiny")
    tiny_text.write(path)
    (path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 3, "eos_token_id": [2, 3]}')
    (path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    config = json.loads((path / "tokenizer_config.json").read_text())
    config |= {"chat_template": "{{ messages[0].content }}", "added_tokens_decoder": {"2": {"content": "</s>"}}}
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": True}))
    return path


FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@pytest.mark.parametrize("name", FILES)
def test_files_of_a_folder(folder, name):
    path = folder / name
    text = path.read_text()

    def make(where, document):
        path.write_text(json.dumps(document))
        return str(folder)

    try:
        assert check(make, mutants(json.loads(text))) > 10
    finally:
        path.write_text(text)


def test_the_header_of_safetensors(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")

    def make(where, document):
        header = json.dumps(document).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])
        return str(folder)

    try:
        assert check(make, mutants(json.loads(data[8:end]), 2)) > 100
    finally:
        path.write_bytes(data)


def rebuilt(path: str, name: str, content: bytes) -> bytes:
    """The `.zse` with another content of a section, all its checksums right."""
    data = Path(path).read_bytes()
    with open_model(path) as source:
        sections = read_sections(source.files[0])
    body, table = b"", b""
    for section in sections.values():
        part = content if section.name == name else data[section.offset : section.offset + section.nbytes]
        crc32 = 0 if SECTIONS[section.name] else zlib.crc32(part)
        table += ENTRY.pack(section.name.encode(), PAGE + len(body), len(part), crc32, section.flags)
        body += part + bytes(-len(part) % PAGE)
    head = bytearray(HEADER.pack(*HEADER.unpack_from(data)[:3], PAGE + len(body), 0) + table)
    head[24:28] = table_crc32(bytes(head)).to_bytes(4, "little")
    return bytes(head).ljust(PAGE, b"\0") + body


@pytest.mark.each()
@pytest.mark.parametrize("kind", ["hf", "gguf"])
@pytest.mark.parametrize("name", ["config", "tokenizer", "provenance", "index"])
def test_sections_of_a_zse(folder, tmp_path, name, kind):
    path, out = str(tmp_path / "m.zse"), tmp_path / "wrong.zse"
    if kind == "gguf":
        (tmp_path / "m.gguf").write_bytes(real_gguf())
        convert(str(tmp_path / "m.gguf"), path)
    else:
        convert(str(folder), path, quant="int8")
    use(path)
    with open_model(path) as source:
        section = read_sections(source.files[0])[name]
        document = json.loads(source.files[0].read(section.offset, section.nbytes, name))

    def make(where, value):
        out.write_bytes(rebuilt(path, name, json.dumps(value).encode()))
        return str(out)

    assert check(make, mutants(document, 3)) >= (10 if name != "provenance" else 1)


def real_gguf() -> bytes:
    """A GGUF whose tokenizer and sizes are those of a model."""
    from test_load_equal import tiny_llama

    return bytes(tiny_llama("Q8_0"))


def test_json_that_is_nested_deeply_is_refused_before_a_message_shows_it(tmp_path):
    """What json reads, at 500 deep, is more than repr() of a message can write under a deep stack."""
    path = tmp_path / "config.json"
    for depth, is_refused in ((MAX_JSON_DEPTH - 1, False), (MAX_JSON_DEPTH, True), (500, True)):
        path.write_text('{"a": ' + "[" * depth + "]" * depth + "}")
        if is_refused:
            with pytest.raises(FormatError, match="nested more than 64 deep"):
                read_object(str(path), "config.json")
        else:
            assert read_object(str(path), "config.json")["a"]
