"""Schemas that are compiled unchecked: what they may take is bounded by their size, and what does harm is none of them."""

import json
import time

import pytest
import tiny_model
import tiny_text
from schemas import SCHEMAS
from test_masks import vocabulary  # noqa: F401

from zse.structured import checker, plain
from zse.structured.options import Structure, read_structure
from zse.structured.plain import MAX_COUNT, MAX_NUMBER, is_plain
from zse.structured.service import Grammars

TEXT = {"type": "string", "maxLength": MAX_COUNT}
RECORD = {
    "title": "record",
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "tags"],
    "properties": {
        "name": TEXT,
        "age": {"type": ["integer", "null"], "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "maxItems": 3, "items": {"enum": ["a", "b", None]}},
    },
}


def structure(schema) -> Structure:
    return Structure(kind="json_schema", source=json.dumps(schema))


def nested(depth, part, **more):
    for _ in range(depth):
        part = {"type": "array", "items": part, **more}
    return part


def fields(count, part, **more):
    return {"type": "object", "properties": {f"p{number}": part(number) for number in range(count)}, **more}


def whole(number):
    return {"type": "integer", "minimum": number * 7919 - MAX_NUMBER, "maximum": MAX_NUMBER - number * 104729}


LARGEST = {
    "counts within counts": nested(60, {"type": "integer"}, minItems=MAX_COUNT, maxItems=MAX_COUNT),
    "texts within counts": nested(10, TEXT, maxItems=MAX_COUNT),
    "optional fields": fields(63, lambda number: TEXT),
    "optional integers": fields(55, whole),
    "optional numbers": fields(55, lambda number: whole(number) | {"type": "number"}),
    "names that begin alike": {"type": "object", "properties": {"a" * number: TEXT for number in range(1, 55)}},
    "any value in each": fields(63, lambda number: {}),
    "fields within fields": {"type": "object", "properties": {"a": fields(30, lambda number: nested(1, TEXT))}},
    "constants": {"enum": ["".join(chr(32 + (7 * place + line) % 90) for place in range(40)) for line in range(60)]},
}


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_take_little(vocabulary, name):  # noqa: F811
    """34 ms of processor time, the dearest on two cores of an EPYC beside SmolLM2's vocabulary; the bound is a sixth of the checker's
    own."""
    asked = structure(LARGEST[name])
    assert is_plain(asked)
    started = time.process_time()
    assert checker.verdict(asked, vocabulary) == ("", "")
    assert time.process_time() - started < checker.CHECK_S / 6


@pytest.mark.parametrize("part", [{"type": "string"}, RECORD, SCHEMAS["person"], {}])
def test_what_people_ask_for_is_plain(part):
    assert is_plain(structure(part)) and is_plain(structure(nested(2, part)))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "integer", "multipleOf": 9999991},
        {"type": "string", "pattern": "(a|b){9}"},
        {"type": "string", "format": "uri"},
        {"type": "string", "maxLength": MAX_COUNT + 1},
        {"type": "integer", "maximum": MAX_NUMBER + 1},
        {"type": "number", "minimum": 0.5},
        {"type": "integer", "minimum": True},
        {"anyOf": [{}, {}]},
        {"$ref": "#"},
        {"not": {}},
        {"patternProperties": {"a": {}}},
        {"items": [{}]},
        {"enum": [[1]]},
        {"enum": [1.5]},
        {"properties": {"a": True}},
        {"properties": []},
        {"additionalProperties": {}},
        True,
        fields(plain.MAX_PARTS, lambda number: {}),
        {"title": "x" * plain.MAX_BYTES},
    ],
)
def test_anything_else_is_checked(part):
    assert not is_plain(structure(part)) and not is_plain(structure(nested(1, part)))


@pytest.mark.parametrize("source", ["{", "[" * 4000, "[]", "1", ""])
def test_what_is_no_schema_is_checked(source):
    assert not is_plain(Structure(kind="json_schema", source=source))


@pytest.mark.parametrize("asked", [{"regex": "a"}, {"json": True}, {"choice": ["a"]}])
def test_other_grammars_are_checked(asked):
    assert not is_plain(read_structure(asked))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")
    tiny_text.write(folder)
    return str(folder)


def settled(grammars):
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if found := grammars.poll(0.5):
            return found
    raise AssertionError("no answer")


def test_a_plain_schema_that_ends_the_process_is_refused_by_the_checker(model_folder):
    """The process begins anew once, and then its checker ends instead of it."""
    script = """
import os, sys
from zse.structured import worker
compile = worker.Vocabulary.compile
worker.Vocabulary.compile = lambda self, asked: os._exit(1) if "deadly" in asked.source else compile(self, asked)
sys.exit(worker.main(sys.argv[1:]))
"""
    grammars = Grammars(model_folder, tiny_model.VOCAB, frozenset({tiny_model.EOS}), 4, command=("-c", script))
    try:
        grammars.open(1, structure(RECORD))
        assert settled(grammars) == [(1, None)]
        grammars.open(2, structure(RECORD | {"title": "deadly"}))
        ((id, error),) = settled(grammars)
        assert id == 2 and error.code == "schema_too_complex"
        grammars.open(3, structure(RECORD | {"title": "harmless"}))
        assert settled(grammars) == [(3, None)]
        assert grammars.counters()["grammar_process_restarts"] == 1
    finally:
        grammars.stop()
