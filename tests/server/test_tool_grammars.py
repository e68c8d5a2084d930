"""Grammars of tool calls: what random tokens give under them is read by the format's parser as valid calls."""

import json
import random
import re

import pytest
import tiny_model
import tiny_text
from schemas import problem
from test_masks import Walk

from zse.errors import RequestError
from zse.server.errors import APIError
from zse.server.tools import parsers, reasoning
from zse.server.tools.answer import Format, Splitter
from zse.server.tools.calls import CallPart, fold
from zse.server.tools.grammars import _XML, WHOLE_ANSWERS, structure_of
from zse.server.tools.parsers import FORMATS as TOOL_FORMATS
from zse.server.tools.patterns import FORMATS, whole
from zse.server.tools.reasoning import Reasoning
from zse.structured.compile import Vocabulary
from zse.structured.options import Structure
from zse.structured.worker import load_tokenizer

WEATHER = {
    "type": "object",
    "title": "unread",
    "additionalProperties": False,
    "required": ["city", "days"],
    "properties": {
        "city": {"type": "string", "maxLength": 5, "description": "the city"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
        "exact": {"type": "boolean"},
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SHARED = {
    "type": "object",
    "additionalProperties": False,
    "required": ["when"],
    "$defs": {"day": {"type": "integer", "minimum": 1, "maximum": 31}},
    "properties": {
        "when": {"$ref": "#/$defs/day"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
}
FUNCTIONS = {"weather": WEATHER, "stop_all": NOTHING, "calendar": SHARED}
# (format, text that the model's template has)
FORMS = [
    ("hermes", ""),
    ("qwen3_coder", ""),
    ("llama3_json", ""),
    ("pythonic", ""),
    ("pythonic", "<|python_start|>"),
    ("mistral", ""),
    ("mistral", "[ARGS]"),
    ("gemma", "```tool_code"),
    ("gemma", ""),
    ("deepseek", "```json"),
    ("deepseek", ""),
    ("seed_oss", ""),
    ("glm4", ""),
    ("minimax_m2", ""),
    ("minicpm", ""),
    ("granite", ""),
    ("nemotron", ""),
    ("tool_calls", ""),
    ("command_r", ""),
    ("functionary", ""),
    ("kimi_k2", ""),
    ("lfm2", ""),
    ("gemma4", ""),
    ("dsml", "function_calls"),
    ("dsml", "tool_calls"),
    ("gigachat", "<|function_call|>"),
    ("gigachat", ""),
    ("apertus", ""),
    ("firefunction", ""),
]
BYTES = "ï½ľ"  # of DeepSeek's bar, as byte-level letters
_NAMES = [f"{form} {template}".strip() for form, template in FORMS]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")
    tiny_text.write(folder, parsers.DSML, BYTES)
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return Vocabulary(tokenizer, tiny_model.VOCAB, frozenset({tiny_model.EOS}))


def grammar(tokenizer, form, template, functions=FUNCTIONS, calls="required", several=True, **more):
    def control_id(text):
        id = tokenizer.find(text)
        return id if id is not None and tokenizer.is_special(id) else None

    return structure_of(
        form, functions, frozenset(functions), template, control_id, calls=calls, several=several, **more
    )


def read(form, text, functions=FUNCTIONS):
    splitter = Splitter(Format(form), functions, False)
    return splitter.push(text) + splitter.finish()


def check_calls(pieces, functions=FUNCTIONS):
    assert all(isinstance(piece, CallPart) for piece in pieces), pieces
    calls = fold(pieces)
    for piece in calls:
        found = problem(json.loads(piece.arguments), functions[piece.name])
        assert found is None, (found, piece)
    return calls


@pytest.mark.parametrize(("form", "template"), FORMS, ids=_NAMES)
def test_required_calls(tokenizer, vocabulary, form, template):
    structure = grammar(tokenizer, form, template)
    names = set()
    for seed in range(6):
        calls = check_calls(read(form, Walk(vocabulary, structure, seed).run(2000)))
        names |= {call.name for call in calls}
    assert len(names) >= 2, "any of the functions may be called"


@pytest.mark.parametrize(("form", "template"), FORMS, ids=_NAMES)
def test_a_named_function_is_called_once(tokenizer, vocabulary, form, template):
    named = {"calendar": SHARED}
    structure = grammar(tokenizer, form, template, named, several=False)
    for seed in range(4):
        (call,) = check_calls(read(form, Walk(vocabulary, structure, seed).run(2000), named))
        assert call.name == "calendar"


@pytest.mark.parametrize(("form", "template"), FORMS, ids=_NAMES)
def test_strict_functions_leave_text_free(tokenizer, vocabulary, form, template):
    structure = grammar(tokenizer, form, template, calls="free")
    called = Walk(vocabulary, grammar(tokenizer, form, template, several=False), 3).run(2000).lstrip("\n")
    free = Walk(vocabulary, structure)
    free.take(*free.ids("Just text, no call."))
    assert tiny_model.EOS in free.masks()[0]
    both = Walk(vocabulary, structure)
    is_bare = form in ("llama3_json",) or form == "pythonic" and not template or form == "gemma" and not template
    if not is_bare:
        both.take(*both.ids("Let me see. "))
    ids = both.ids(called)
    both.take(*ids[:-1])
    assert ids[-1] in both.masks()[0]
    both.take(ids[-1])
    assert tiny_model.EOS in both.masks()[0]
    wrong = Walk(vocabulary, structure)
    cut = called[: called.index(next(name for name in FUNCTIONS if name in called))]
    wrong.take(*wrong.ids(cut))
    assert not set(wrong.ids("x")) & set(wrong.masks()[0]), "behind the mark only a call can come"


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize(("form", "template"), FORMS, ids=_NAMES)
def test_streamed_parts_make_the_calls(tokenizer, vocabulary, form, template, step):
    for seed in range(3):
        text = Walk(vocabulary, grammar(tokenizer, form, template), seed).run(2000)
        whole = check_calls(read(form, text))
        splitter = Splitter(Format(form), FUNCTIONS, False)
        pieces = [piece for at in range(0, len(text), step) for piece in splitter.push(text[at : at + step])]
        pieces += splitter.finish()
        assert [(call.name, call.arguments) for call in fold(pieces)] == [(call.name, call.arguments) for call in whole]
        assert all(piece.id for piece in pieces if piece.name)
        assert len([piece for piece in pieces if piece.is_last]) == len(whole)
        if (
            step == 1
            and form not in (*_XML, "minicpm", "pythonic", "lfm2", "gemma4", "dsml", "apertus")
            and "tool_code" not in template
        ):
            # No longer than an escape: arguments come as they are written.
            assert max(len(piece.arguments) for piece in pieces) <= 12


TICKET = {
    "type": "object",
    "additionalProperties": False,
    "required": ["code", "day", "free"],
    "properties": {
        "code": {"type": "string", "pattern": "^[A-C]{2}-\\d+$", "maxLength": 6},
        "day": {"type": "string", "format": "date"},
        "free": {"type": "string", "pattern": "^[^x]*b$", "maxLength": 9},
    },
}


def test_texts_that_are_no_json_follow_pattern_and_format(tokenizer, vocabulary):
    ticket = {"ticket": TICKET}
    structure = grammar(tokenizer, "qwen3_coder", "", ticket, several=False)
    for seed in range(6):
        (call,) = fold(read("qwen3_coder", Walk(vocabulary, structure, seed).run(2000), ticket))
        given = json.loads(call.arguments)
        assert re.fullmatch(r"[A-C]{2}-[0-9]{1,3}", given["code"]) and re.fullmatch(r"[^x]{0,8}b", given["free"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", given["day"])
    values = "<tool_call>\n<function=ticket>\n<parameter=code>\nAB-1\n</parameter>\n<parameter=day>\n2024-05-06\n</parameter>\n"
    for text, fits in (("a\n<b", True), ("a\n</parameter>\nb", False), ("xb", False)):
        walk = Walk(vocabulary, structure)
        ids = walk.ids(f"{values}<parameter=free>\n{text}\n</parameter>\n</function>\n")
        assert (walk.guide.matcher.try_consume_tokens(ids) == len(ids)) is fits, text


@pytest.mark.parametrize("schema", [{"pattern": "a(?=b)"}, {"pattern": "[b-a]"}, {"format": "iri"}])
def test_what_texts_cannot_follow_is_refused_when_strict(tokenizer, vocabulary, schema):
    functions = {
        "f": {
            "type": "object",
            "required": ["a"],
            "additionalProperties": False,
            "properties": {"a": {"type": "string", "maxLength": 3} | schema},
        }
    }
    with pytest.raises(APIError, match="not implemented") as caught:
        grammar(tokenizer, "qwen3_coder", "", functions)
    assert caught.value.code == "invalid_schema"
    loose = structure_of("qwen3_coder", functions, frozenset(), "", lambda text: None, calls="required", several=False)
    assert vocabulary.compile(loose)


PATTERNS = [
    r"^[A-Z]{2}-\d+$",
    "a|^b$",
    "abc",
    r"^a|b$",
    r"^(a|b)*c?$",
    r"\w+@\w+\.com",
    r"^[^\s/]+/[\d-]+$",
    "a+?b",
    r"^[0-9]{1,3}(?:\.\d{2})?$",
    r"[\]a\-]",
    "^$",
    r"^\u0041\x42$",
    "^[-a]b",
    "^[a^]$",
    "/",
    r"^\s\S$",
    "^é+$",
    "^(?:a|bc){2,3}$",
    "^a{2}?b??$",
    "[a-]",
]


def accepts(expression):
    """text → whether llguidance takes all of it for the regular expression."""
    from llguidance import LLMatcher, LLTokenizer

    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(f"start: V\nV: /{expression}/\n"), log_level=0)
    assert not matcher.is_error(), matcher.get_error()

    def fits(text):
        copy, ids = matcher.deep_copy(), list(text.encode())
        return copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting()

    return fits


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_what_they_match(pattern):
    """Against Python's search, whose \\Z is ECMAScript's $."""
    fits = accepts(whole(pattern))
    draw = random.Random(pattern)
    expected = re.compile(re.sub(r"\$(?=\||$)", r"\\Z", pattern), re.ASCII)
    for _ in range(300):
        text = "".join(draw.choice("abcAZB-/. 01@é^]\n") for _ in range(draw.randint(0, 5)))
        if draw.random() < 0.4:
            text = draw.choice(
                ["AB-12", "b", "abc", "a@b.com", "x/1-", "12.50", "AB", "aab", "bcbca", "aa"]
            ) + draw.choice("\nq0")
        assert fits(text) == bool(expected.search(text)), text


@pytest.mark.parametrize(
    "pattern",
    [
        r"a(?=b)",
        r"\bfoo",
        r"(a)\1",
        "a{",
        "(a",
        "a)",
        "a(^b)",
        "a$b",
        "*a",
        "a**",
        "[[a]]",
        "[]",
        "[a&&b]",
        "(?i)a",
        r"\p{L}",
        "a{1,2",
        "[^]",
        "[b-a]",
        "a{3,2}",
        "(" * 900 + ")" * 900,
        "a" * 1001,
        "\\ud83d",
    ],
)
def test_patterns_that_cannot_be_said(pattern):
    assert whole(pattern) is None


def test_formats():
    yes = {
        "date": "2024-02-29",
        "time": "23:59:60Z",
        "date-time": "2024-02-28T10:00:00.5+01:00",
        "ipv4": "1.20.255.0",
        "uuid": "123e4567-e89b-12d3-a456-426614174000",
        "email": "a.b+c@d-e.org",
        "hostname": "a-b.c",
        "uri": "http://a/b?c#d",
        "ipv6": "fe80::1:2",
    }
    no = {
        "date": "2024-13-01",
        "time": "24:00:00Z",
        "date-time": "2024-02-28",
        "ipv4": "1.2.3.256",
        "uuid": "123e4567",
        "email": "a@",
        "hostname": "-a",
        "uri": "a b",
        "ipv6": "1::2::3",
    }
    assert set(yes) == set(no) == set(FORMATS)
    for name, form in FORMATS.items():
        fits = accepts(form)
        assert fits(yes[name]) and not fits(no[name]), name


def test_a_call_or_the_json_of_a_schema(tokenizer, vocabulary):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    structure = grammar(
        tokenizer, "hermes", "", calls="either", content=Structure(kind="json_schema", source=json.dumps(schema))
    )
    seen = set()
    for seed in range(12):
        for piece in read("hermes", Walk(vocabulary, structure, seed).run(2000)):
            seen.add(type(piece))
            assert problem(json.loads(piece), schema) is None if isinstance(piece, str) else check_calls([piece])
    assert seen == {str, CallPart}


def test_schemas_of_128_functions_that_are_too_long_are_refused(tokenizer):
    many = {
        f"f{number}": {"type": "object", "properties": {f"p{at}": {"enum": ["x" * 20]} for at in range(30)}}
        for number in range(128)
    }
    with pytest.raises(RequestError) as caught:
        grammar(tokenizer, "hermes", "", many)
    assert caught.value.code == "schema_too_complex"


def test_python_knows_no_such_name(tokenizer):
    with pytest.raises(APIError, match="Python"):
        grammar(tokenizer, "pythonic", "", {"get-it": NOTHING})


def test_every_format_has_a_grammar():
    """Harmony's and Functionary 3.2's are of the whole answer: the next tests have them."""
    assert {form for form, _ in FORMS} | set(WHOLE_ANSWERS) == set(TOOL_FORMATS)


@pytest.fixture(scope="module")
def plain_tokenizer(tmp_path_factory):
    """Of a vocabulary without DeepSeek's control token."""
    folder = tiny_model.write(tmp_path_factory.mktemp("models") / "plain")
    tiny_text.write(folder, "", BYTES)
    return load_tokenizer(str(folder))


@pytest.mark.parametrize("block", parsers.DSML_BLOCKS)
@pytest.mark.parametrize("functions", [FUNCTIONS, {"ticket": TICKET}], ids=["functions", "patterns"])
@pytest.mark.parametrize("has_control", [False, True])
def test_dsml_with_and_without_its_control_token(tokenizer, plain_tokenizer, block, functions, has_control):
    tokens = tokenizer if has_control else plain_tokenizer
    vocabulary = Vocabulary(tokens, tiny_model.VOCAB, frozenset({tiny_model.EOS}))
    for calls, seed in (("required", 1), ("free", 2), ("required", 3), ("free", 4)):
        walk = Walk(vocabulary, grammar(tokens, "dsml", block, functions, calls), seed)
        walk.take(*walk.ids(f"<{parsers.DSML}{block}>\n"))
        pieces = read("dsml", walk.run(4000), functions)
        assert check_calls([piece for piece in pieces if isinstance(piece, CallPart)], functions)


@pytest.mark.parametrize("several", [False, True])
def test_functionary_is_enforced(tokenizer, vocabulary, several):
    for seed in range(8):
        walk = Walk(vocabulary, grammar(tokenizer, "functionary_v3", "", several=several), seed)
        calls = check_calls(read("functionary_v3", walk.run(2000)))
        assert calls and (several or len(calls) == 1)
    required = Walk(vocabulary, grammar(tokenizer, "functionary_v3", ""))
    assert not set(required.ids("all")[:1]) & set(required.masks()[0]), "a call has to come"
    structure = grammar(tokenizer, "functionary_v3", "", calls="free")
    free = Walk(vocabulary, structure)
    free.take(*free.ids("all\nJust text, no call."))
    assert tiny_model.EOS in free.masks()[0]
    free.take(*free.ids(">>>"))
    allowed = {vocabulary.tokens[id][:1] for id in free.masks()[0]}
    assert allowed <= {name[:1].encode() for name in FUNCTIONS}, "behind the mark only a call can come"
    content = Structure(
        kind="json_schema", source='{"type": "object", "properties": {}, "additionalProperties": false}'
    )
    either = Walk(vocabulary, grammar(tokenizer, "functionary_v3", "", calls="free", content=content))
    either.take(*either.ids("all\n{}"))
    assert tiny_model.EOS in either.masks()[0]


@pytest.fixture(scope="module")
def k3_tokenizer(tmp_path_factory):
    """Of a vocabulary in which <|sep|> is a control token."""
    folder = tiny_model.write(tmp_path_factory.mktemp("models") / "k3")
    tiny_text.write(folder, reasoning.KIMI_K3[2], BYTES)
    return load_tokenizer(str(folder))


# format; an answer in words; what stands before a call behind words; an answer of the JSON {}; a call's first text
ANSWERS = [
    (
        "kimi_k3",
        "<|open|>response<|sep|>Yes.<|close|>response<|sep|>",
        "",
        "<|open|>response<|sep|>{}<|close|>response<|sep|>",
    ),
    ("solar_open", "<|content|>Yes.", "<|end|><|begin|>assistant", "<|content|>{}"),
]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(("form", "words", "between", "content"), ANSWERS, ids=["kimi_k3", "solar_open"])
def test_answers_of_messages_are_enforced(tokenizer, k3_tokenizer, form, words, between, content, several):
    tokens = k3_tokenizer if form == "kimi_k3" and several else tokenizer
    vocabulary = Vocabulary(tokens, tiny_model.VOCAB, frozenset({tiny_model.EOS}))

    def read_answer(text):
        splitter = Splitter(Format(form, form), FUNCTIONS, False)
        return splitter.push(text) + splitter.finish()

    for seed in range(6):
        walk = Walk(vocabulary, grammar(tokens, form, "", several=several), seed)
        calls = check_calls(read_answer(walk.run(4000)))
        assert calls and (several or len(calls) == 1)
    free = Walk(vocabulary, grammar(tokens, form, "", calls="free", several=several), 1)
    free.take(*free.ids(words))
    assert tiny_model.EOS in free.masks()[0]
    begins = parsers.FORMATS[form].blocks[0].opening
    free.take(*free.ids(between + begins))
    *said, last = read_answer(free.run(4000))
    assert isinstance(last, CallPart) and said[0] == "Yes."
    structure = Structure(kind="json_schema", source='{"type": "object", "additionalProperties": false}')
    either = Walk(vocabulary, grammar(tokens, form, "", calls="either", content=structure))
    either.take(*either.ids(content))
    assert tiny_model.EOS in either.masks()[0] and read_answer(content) == ["{}"]


@pytest.mark.parametrize("several", [False, True])
def test_harmony_is_enforced(tokenizer, vocabulary, several):
    """Its grammar is of the whole answer, the thought before the calls included."""
    structure = grammar(tokenizer, "harmony", "", several=several)
    for seed in range(8):
        walk, thought = Walk(vocabulary, structure, seed), "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
        begun = (thought if seed % 2 else "") + "<|channel|>commentary"
        walk.take(*walk.ids(begun))
        splitter = Splitter(Format("harmony", "harmony"), FUNCTIONS, False)
        pieces = splitter.push(begun + walk.run(2000).removeprefix(begun)) + splitter.finish()
        assert [piece.text for piece in pieces if isinstance(piece, Reasoning)] == ["hm"] * (seed % 2)
        calls = check_calls([piece for piece in pieces if not isinstance(piece, Reasoning)])
        assert calls and (several or len(calls) == 1)
    refused = Walk(vocabulary, structure)
    refused.take(*refused.ids("<|channel|>"))
    assert not set(refused.ids("final")[:1]) & set(refused.masks()[0]), "a call has to come"
    free = Walk(vocabulary, grammar(tokenizer, "harmony", "", calls="free"))
    free.take(*free.ids("<|channel|>final<|message|>Just text."))
    assert tiny_model.EOS in free.masks()[0]
