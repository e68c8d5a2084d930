"""Masks against random choice: whatever is drawn among the allowed tokens must be of the form that was asked for."""

import ctypes
import json
import os
import random
import re
import time
from pathlib import Path

import msgspec
import pytest
import tiny_model
import tiny_text
from llguidance import LLMatcher, LLTokenizer
from schemas import SCHEMAS, check_text

from zse.errors import RequestError
from zse.structured import checker
from zse.structured.checker import verdict
from zse.structured.compile import GrammarError, Vocabulary, grammar_of, refusal
from zse.structured.mask import MAX_FORCED_BYTES, Guide
from zse.structured.messages import FREE
from zse.structured.options import MAX_SOURCE_BYTES, TEXT, Structure, Thinking, read_structure
from zse.structured.schema import expressed
from zse.structured.worker import line_nbytes, load_tokenizer

THINKING = Thinking(opening="<think>", closing="</think>")


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    folder = tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")
    tiny_text.write(folder)
    return Vocabulary(load_tokenizer(str(folder)), tiny_model.VOCAB, frozenset({tiny_model.EOS}))


class Walk:
    """A request whose model is a coin."""

    def __init__(self, vocabulary, structure, seed=0):
        self.vocabulary, self.random = vocabulary, random.Random(seed)
        matcher = None if structure.kind == TEXT else vocabulary.compile(structure)
        self.guide = Guide(vocabulary, matcher, structure.thinking)
        self.nbytes = line_nbytes(vocabulary.vocab_size)
        self.memory = bytearray(b"\xaa" * self.nbytes * 8)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.tokens: list[int] = []

    def masks(self, drafts=()):
        """The allowed ids of each line, None where it is free."""
        kinds = self.guide.masks(memoryview(self.memory), 0, self.nbytes, self.address, list(drafts))
        return [None if kind == FREE else self.line(index) for index, kind in enumerate(kinds)]

    def forced(self, *drafts):
        """What must come behind the token that the last line allows, by that token, as text."""
        found: dict[int, list[int]] = {}
        self.guide.masks(memoryview(self.memory), 0, self.nbytes, self.address, list(drafts), found)
        text = self.vocabulary.tokens
        return {text[token]: b"".join(text[id] for id in run) for token, run in found.items()}

    def line(self, index):
        data = self.memory[index * self.nbytes : (index + 1) * self.nbytes]
        return [id for id in range(self.vocabulary.vocab_size) if data[id >> 3] >> (id & 7) & 1]

    def take(self, *tokens):
        self.tokens += tokens
        self.guide.take(list(tokens))

    def run(self, limit=600):
        """Draw until the end token; the text."""
        while len(self.tokens) < limit:
            allowed = self.masks()[0] or list(range(self.vocabulary.vocab_size))
            ends = [id for id in allowed if id in self.vocabulary.eos_ids]
            token = ends[0] if ends and self.random.random() < 0.2 else self.random.choice(allowed)
            if token in self.vocabulary.eos_ids:
                return self.text()
            self.take(token)
        raise AssertionError(f"no end: {self.text()}")

    def text(self):
        return b"".join(self.vocabulary.tokens[id] for id in self.tokens).decode()

    def ids(self, text):
        return self.vocabulary.mark(text)


def json_structure(schema, **more):
    return Structure(kind="json_schema", source=json.dumps(schema), **more)


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_tokens_give_valid_json(vocabulary, name):
    for seed in range(3):
        check_text(Walk(vocabulary, json_structure(SCHEMAS[name]), seed).run(), SCHEMAS[name])


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-z]{1,4}"}, r"[0-9]{3}-[a-z]{1,4}"),
        ({"choice": ["yes", "no", 'may be "so"', "line\nfeed"]}, 'yes|no|may be "so"|line\nfeed'),
        ({"grammar": 'start: "<" word ("," word)~0..3 ">"\nword: /[a-d]{1,3}/'}, r"<[a-d]{1,3}(,[a-d]{1,3}){0,3}>"),
        ({"grammar": 'root ::= "x" digit+ end?\ndigit ::= [0-9]\nend ::= "." ("a" | "b")'}, r"x[0-9]+(\.[ab])?"),
    ],
)
def test_other_grammars(vocabulary, fields, pattern):
    for seed in range(5):
        assert re.fullmatch(pattern, Walk(vocabulary, read_structure(fields), seed).run())


def test_any_object(vocabulary):
    walk = Walk(vocabulary, read_structure({"json": True}))
    walk.take(*walk.ids('{"a": [1, {"b": null}]'))
    allowed = walk.masks()[0]
    assert set(walk.ids("}")) <= set(allowed) and tiny_model.EOS not in allowed
    walk.take(*walk.ids("}"))
    assert tiny_model.EOS in walk.masks()[0]


def test_the_end_is_allowed_only_where_the_grammar_ends(vocabulary):
    walk = Walk(vocabulary, Structure(kind="regex", source="ab?"))
    assert walk.masks()[0] == walk.ids("a")
    walk.take(*walk.ids("a"))
    assert sorted(walk.masks()[0]) == sorted([*walk.ids("b"), tiny_model.EOS])
    walk.take(*walk.ids("b"))
    assert walk.masks()[0] == [tiny_model.EOS]


def test_a_draft_has_the_mask_of_its_place(vocabulary):
    walk = Walk(vocabulary, Structure(kind="regex", source="abcd"))
    before = walk.masks()[0]
    lines = walk.masks(walk.ids("abx"))
    assert lines[:3] == [walk.ids("a"), walk.ids("b"), walk.ids("c")] and lines[3] is None
    assert walk.masks()[0] == before, "drafts leave no trace"
    walk.take(*walk.ids("ab"))
    assert walk.masks(walk.ids("cd")) == [walk.ids("c"), walk.ids("d"), [tiny_model.EOS]]


def test_the_grammar_begins_behind_the_reasoning(vocabulary):
    structure = Structure(
        kind="regex", source="[0-9]{2}", thinking=Thinking(opening="<think>", closing="</think>", is_open=True)
    )
    walk = Walk(vocabulary, structure)
    assert tiny_model.EOS not in walk.masks()[0] and len(walk.masks()[0]) == tiny_model.VOCAB - 1
    walk.take(*walk.ids("so "), *walk.ids("</think>"))
    assert {walk.vocabulary.tokens[id][:1].decode() for id in walk.masks()[0]} == set("0123456789")


def test_reasoning_may_begin_an_answer_that_has_a_grammar(vocabulary):
    walk = Walk(vocabulary, Structure(kind="regex", source="a", thinking=THINKING))
    assert sorted(walk.masks()[0]) == sorted([*walk.ids("a"), *walk.ids("<think>")])
    walk.take(*walk.ids("<think>"))
    assert len(walk.masks()[0]) == tiny_model.VOCAB - 1
    walk.take(*walk.ids("</think>"))
    assert walk.masks()[0] == walk.ids("a")


@pytest.mark.parametrize("budget", [0, 3])
def test_a_spent_budget_forces_the_closing_mark(vocabulary, budget):
    thinking = Thinking(opening="<think>", closing="</think>", is_open=True, budget=budget)
    walk = Walk(vocabulary, Structure(kind=TEXT, thinking=thinking))
    for _ in range(budget):
        assert walk.masks() == [None]
        walk.take(*walk.ids("x"))
    assert walk.masks()[0] == walk.ids("</think>")
    walk.take(*walk.ids("</think>"))
    assert walk.masks() == [None]


def test_a_closing_mark_of_several_tokens(vocabulary):
    thinking = Thinking(opening="[THINK]", closing="[/THINK]", is_open=True, budget=1)
    walk = Walk(vocabulary, Structure(kind="regex", source="z", thinking=thinking))
    walk.take(*walk.ids("x"))
    for id in walk.ids("[/THINK]"):
        assert walk.masks()[0] == [id]
        walk.take(id)
    assert walk.masks()[0] == walk.ids("z")


@pytest.mark.parametrize(
    ("structure", "code"),
    [
        (Structure(kind="regex", source="[0-9"), "invalid_schema"),
        (Structure(kind="lark", source="start: other"), "invalid_schema"),
        (Structure(kind="gbnf", source="root ::= (((("), "invalid_schema"),
        (json_structure({"type": "strin"}), "invalid_schema"),
        (json_structure({"$ref": "http://127.0.0.1/schema.json"}), "invalid_schema"),
        (json_structure({"$ref": "#/$defs/none"}), "invalid_schema"),
        (json_structure({"type": "integer", "minimum": 5, "maximum": 3}), "invalid_schema"),
        *(
            (json_structure({"allOf": [{"type": ["integer", "null"]}, bounds]}), "invalid_schema")
            for bounds in (
                {"minimum": 1e308, "maximum": 1e308},  # 9223372036854775807 was allowed
                {"exclusiveMinimum": (1 << 63) - 1, "maximum": 1e30},
                {"minimum": -1e30, "exclusiveMaximum": -(1 << 63)},
                {"minimum": 10**400},
            )
        ),
        (
            json_structure(
                {
                    "allOf": [
                        {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(8)]}
                        for i in range(8)
                    ]
                }
            ),
            "schema_too_complex",
        ),
    ],
)
def test_what_cannot_be_compiled_says_why(vocabulary, structure, code):
    with pytest.raises(GrammarError) as caught:
        vocabulary.compile(structure)
    assert caught.value.code == code and "\n" not in str(caught.value) and len(str(caught.value)) <= 301


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({}, "invalid_value"),
        ({"json": {}, "regex": "a"}, "invalid_value"),
        ({"xml": "a"}, "unknown_parameter"),
        ({"choice": []}, "invalid_value"),
        ({"choice": "ab"}, "invalid_type"),
        ({"choice": ["a", ""]}, "invalid_value"),
        ({"regex": 3}, "invalid_type"),
        ({"regex": " "}, "invalid_value"),
        ({"json": "{"}, "invalid_schema"),
        ({"json": [1]}, "invalid_type"),
        ({"regex": "a" * (MAX_SOURCE_BYTES + 1)}, "schema_too_complex"),
        ({"json": {"enum": [f"{number:06}" for number in range(10000)]}}, "schema_too_complex"),
    ],
)
def test_fields_that_are_refused(fields, code):
    with pytest.raises(RequestError) as caught:
        read_structure(fields)
    assert caught.value.code == code and caught.value.param


def test_unknown_keywords_are_refused_unless_lenient(vocabulary):
    schema = {"type": "array", "items": {"type": "boolean"}, "contains": {"const": True}, "maxItems": 2}
    with pytest.raises(GrammarError):
        vocabulary.compile(json_structure(schema))
    assert Walk(vocabulary, json_structure(schema, lenient=True)).run()


def fits(vocabulary, schema, text):
    """Whether the grammar of a strict schema takes a text to its end."""
    matcher = vocabulary.compile(json_structure(schema))
    ids = [vocabulary.tokens.index(bytes([byte])) for byte in text.encode()]
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


@pytest.mark.parametrize("schema", [None, {"type": "object"}])
def test_white_space_is_a_space_or_a_line(vocabulary, schema):
    schema = schema or {"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]}
    for text in ('{"a":[1,2]}', '{"a": [1, 2]}', '{\n  "a": [\n    1,\n    2\n  ]\n}'):
        assert fits(vocabulary, schema, text), text
    for text in ('{\n\n"a":[]}', '{"a":  []}', '{"a":[]\n\n}', '{"a":[\n \n1]}'):
        assert not fits(vocabulary, schema, text), text


CAT, DOG = (
    {"type": "object", "properties": {"kind": {"const": kind}, sound: {"type": "integer"}}, "required": ["kind"]}
    for kind, sound in (("cat", "meow"), ("dog", "bark"))
)


PAIR = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": {"cat": CAT, "dog": DOG}},
            ['{"kind":"cat","meow":3}', '{"kind":"dog"}'],
            ['{"kind":"cow"}', "{}"],
        ),
        (
            {"type": "object", "oneOf": [CAT, {**DOG, "type": ["object"]}], "properties": {"format": {"const": 1}}},
            ['{"format":1,"kind":"dog"}'],
            ['{"format":2,"kind":"dog"}'],
        ),
        ({"oneOf": [{"type": ["string", "null"]}, {"type": "integer"}]}, ["7", "null", '"a"'], ["[]"]),
        *(
            (
                {
                    "type": "object",
                    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                    "additionalProperties": False,
                    **rule,
                },
                ["{}", '{"b":1}', '{"a":1,"b":2}'],
                ['{"a":1}', '{"c":1}'],
            )
            for rule in (
                {"dependencies": {"a": ["b"]}},
                {"dependentRequired": {"a": ["b"]}},
                {"dependentSchemas": {"a": {"required": ["b"]}}},
            )
        ),
        ({"type": "string", "format": "int-or-string"}, ['"x"'], ["1"]),
        (PAIR | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, ['{"a":1}', '{"b":2}'], ["{}", '{"a":1,"b":2}']),
        (PAIR | {"not": {"required": ["a", "b"]}}, ['{"a":1}', '{"b":2}', "{}"], ['{"a":1,"b":2}']),
        (PAIR | {"not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}}, ["{}"], ['{"a":1}', '{"b":2}']),
        (
            PAIR | {"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}},
            ['{"a":1,"b":7}', '{"a":2}', "{}", '{"b":1}'],
            ['{"a":1}'],
        ),
        (
            {
                "type": "object",
                "properties": {"kind": {"type": "string"}, "x": {"type": "integer"}},
                "required": ["kind"],
                "additionalProperties": False,
                "if": {"properties": {"kind": {"const": "ab"}}},
                "then": {"required": ["x"]},
                "else": {"not": {"required": ["x"]}},
            },
            ['{"kind":"ab","x":1}', '{"kind":"abc"}', '{"kind":"a"}', '{"kind":""}', '{"kind":"\\n"}'],
            ['{"kind":"ab"}', '{"kind":"b","x":1}'],
        ),
        (
            {"not": {"enum": ["a", 1, True, None]}},
            ['"b"', "0", "1.5", "2", "false", "[]"],
            ['"a"', "1", "true", "null"],
        ),
        ({"type": "integer", "not": {"minimum": 3, "maximum": 5}}, ["2", "6"], ["3", "5"]),
        ({"type": "array", "not": {"maxItems": 1}}, ["[1, 2]"], ["[]", "[1]"]),
        ({"oneOf": [{"const": 1}, {"const": 2, "standsFor": "words"}, {"enum": ["x"]}]}, ["1", '"x"'], ["3"]),
        (
            {"oneOf": [PAIR | {"required": ["a"]}, {"type": "object", "required": ["c"]}]},
            ['{"a":1}', '{"c":1}'],
            ["{}", '{"b":1}'],
        ),
        (
            {"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}, "additionalProperties": {"type": "integer"}},
            ['{"ab":1}', "{}"],
            ['{"d":1}', '{"a":"x"}'],
        ),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, ['{"a":1,"b":[]}'], ['{"c":1}']),
        ({"type": "string", "format": "date"}, ['"2026-01-31"'], ['"x"']),
        ({"type": "array", "items": {"enum": [1]}, "uniqueItems": False}, ["[1,1]"], ["[2]"]),
        # Bounds are doubles: between 2^53 and 2^63 the next one within.
        (
            {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 5},
            [str(2**53 + 2), str(2**53 + 4)],
            [str(2**53), str(2**53 + 6)],
        ),
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, ["0", str(2**62), str(2**63 - 1024)], [str(2**63)]),
        ({"type": "integer", "minimum": 1 - 2**63, "maximum": 0}, ["0", str(1024 - 2**63)], [str(-(2**63))]),
    ],
)
def test_what_generated_schemas_carry_compiles_strictly(vocabulary, schema, good, bad):
    assert [text for text in good if not fits(vocabulary, schema, text)] == []
    assert [text for text in bad if fits(vocabulary, schema, text)] == []


@pytest.mark.parametrize(
    "branches", [[{"type": "number"}, {"type": "integer"}], [{"pattern": "a"}, {"pattern": "b"}], [CAT, CAT]]
)
def test_a_one_of_whose_branches_overlap_is_refused_in_words_of_the_schema(vocabulary, branches):
    with pytest.raises(GrammarError, match="oneOf needs branches that differ"):
        vocabulary.compile(json_structure({"oneOf": branches}))


def test_what_is_no_schema_is_left_to_the_compiler():
    branches = [{"type": "object", "required": 3}, {"type": {}, "properties": 4}, 7]
    for schema in ({"oneOf": branches}, {"allOf": 3, "oneOf": branches}, {"oneOf": {}, "format": [], "type": 3}):
        assert expressed(schema) == schema


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (r'"\u00e9\xe9\U0001F600\x41\[\]\"\\\n"', ['éé😀A[]"\\\n'], ["é"]),
        (r"[\u00e0-\u00ff]", ["é"], ["a"]),
        (r"[\U0001F600-\U0001F64F]", ["😎"], ["a"]),
        ("[a&&b]", ["a", "&", "b"], ["c"]),
        ("[+--z]", ["+", ",", "-", "z"], [".", "a"]),
        (r"[^\x00-\x1f\]^~]", ["a", "-"], ["\n", "]", "^", "~"]),
        ("[/[-]", ["/", "[", "-"], ["\\"]),
        (".", ["a", "\n", "é"], [""]),
        ('start # "[.\nstart ::= "start"', ["start"], ["x"]),
    ],
)
def test_gbnf_means_what_it_does_in_llama_cpp(rule, good, bad):
    grammar = grammar_of(Structure(kind="gbnf", source=f"root ::= {rule}\n"))
    for text in (*good, *bad):
        matcher, ids = LLMatcher(LLTokenizer("byte"), grammar), list(text.encode())
        fit = matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()
        assert fit == (text in good), text


@pytest.mark.parametrize(
    "rule, why",
    [
        (r'"\ud83d"', "is no character"),
        ("[z-a]", "before its beginning"),
        (r'"\q', "the text has no end"),
        ('"\\', "the text has no end"),
        ("[a", "the class has no end"),
    ],
)
def test_gbnf_that_is_none_is_refused(vocabulary, rule, why):
    with pytest.raises(GrammarError, match=why):
        vocabulary.compile(Structure(kind="gbnf", source=f"root ::= {rule}\n"))


def test_a_form_that_nothing_has_is_refused_in_words(vocabulary):
    parts = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
    found = verdict(json_structure({"$ref": "#/$defs/a", "$defs": parts}), vocabulary)
    assert found == ("invalid_schema", "no token can follow")


def test_messages_have_no_words_of_the_compiler():
    assert str(refusal("stopped: NoExtensionBias")) == "no token can follow"
    assert str(refusal('Unimplemented keys: ["contains"]')).startswith("nothing enforces 'contains'")


def test_what_must_follow_is_told_before_the_token_is_drawn(vocabulary):
    """Names of fields and their colons, behind the quote; in the place of the last draft, where there are drafts."""
    schema = {
        "type": "object",
        "additionalProperties": False,
        "required": ["name", "level"],
        "properties": {"name": {"enum": ["abcd"]}, "level": {"type": "integer"}},
    }
    walk = Walk(vocabulary, read_structure({"json": schema}))
    assert all(text[:1] in (b'"', b"n") or not text for text in walk.forced().values())
    brace, quote, digit = (vocabulary(text) for text in ("{", '"', "1"))
    walk.take(*brace)
    assert walk.forced()[b'"'] == b'name":'
    assert walk.forced(*quote) == {b"n": b'ame":'}
    walk.take(*quote, *vocabulary('name":"abcd","'))
    assert walk.forced() == {b"l": b'evel":'}
    walk.take(*vocabulary('level":'), *digit)
    assert not any(walk.forced().values())
    text = Walk(vocabulary, Structure(kind=TEXT, source=""))
    assert text.forced() == {}
    free = Walk(vocabulary, read_structure({"regex": "[a-z]{3}(.|\\n){50}"}))
    assert free.forced() == {}  # 26 letters that force nothing


def test_text_that_must_follow_is_bounded(vocabulary, monkeypatch):
    walk = Walk(vocabulary, read_structure({"regex": "[a-d]" + "x" * 5000}))
    assert set(walk.forced().values()) == {b"x" * MAX_FORCED_BYTES}
    monkeypatch.setattr("zse.structured.mask.LOOK_S", 0.0)
    assert walk.forced() == {}


def test_a_checker_is_forked_ahead_and_ends_with_its_parent(vocabulary):
    """The fork that compiles a grammar is there before the grammar comes; one that is killed costs that grammar alone."""

    def children(pid):
        return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))

    def until(condition):
        deadline = time.monotonic() + 20
        while not (found := condition()):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return found

    ours = os.getpid()
    before = children(ours)
    pipe = checker.start(vocabulary, [])
    (pid,) = children(ours) - before
    spares = []
    for source, code in (("[a-z]+", ""), ("[a-", "invalid_schema"), ("a", "")):
        spares.append(*until(lambda: children(pid)))
        pipe.send_bytes(msgspec.msgpack.encode(checker.Check(7, Structure(kind="regex", source=source))))
        found = msgspec.msgpack.decode(pipe.recv_bytes(), type=checker.Checked)
        assert (found.id, found.code) == (7, code), source
        until(lambda: spares[-1] not in children(pid))
    os.kill(*until(lambda: children(pid)), 9)
    pipe.send_bytes(msgspec.msgpack.encode(checker.Check(8, Structure(kind="regex", source="a"))))
    assert msgspec.msgpack.decode(pipe.recv_bytes(), type=checker.Checked).code == "schema_too_complex"
    (last,) = until(lambda: children(pid))
    pipe.close()
    os.waitpid(pid, 0)
    until(lambda: not Path(f"/proc/{last}").exists() or "Z" in Path(f"/proc/{last}/stat").read_text().split()[2])
    assert len({*spares, last}) == 4
