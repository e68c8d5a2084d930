"""SentencePiece BPE by scores, against its definition written out in Python."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import Array, numbers, spm_fields

from zse.errors import FormatError
from zse.tokenizer.bpe import from_gguf

PIECES = {
    "▁": -1.0,
    "a": -2.0,
    "b": -3.0,
    "c": -3.0,
    "é": -4.0,
    "▁a": -0.5,
    "ab": -0.25,
    "▁ab": -5.0,
    "bc": -0.25,
    "abc": -0.1,
    "▁▁": -0.7,
    "b▁": -0.2,
    "aa": -0.3,
    "aaaa": -0.2,
    "▁b": -0.9,
    "日": -1.0,
    "日本": -1.5,
}


def by_definition(text: str, pieces: dict[str, float]) -> list[bytes]:
    """Merges the best-scored pair of neighbours, leftmost of equals, until no pair is a piece; the rest as bytes."""
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [(-pieces[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in pieces]
        if not pairs:
            break
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    out = []
    for part in parts:
        out += [part.replace("▁", " ").encode()] if part in pieces else [bytes([byte]) for byte in part.encode()]
    return out


@pytest.fixture(scope="module")
def plain():
    return from_gguf(spm_fields(PIECES, add_space_prefix=False, add_bos_token=False))


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from("aabbc  é日本x"), max_size=24))
def test_equal_to_the_definition(plain, text):
    assert [plain.token_bytes(id) for id in plain.encode(text)] == by_definition(text, PIECES)


@settings(max_examples=300, deadline=None)
@given(
    scores=st.lists(st.floats(-10, 10, width=32), min_size=len(PIECES), max_size=len(PIECES)),
    text=st.text(st.sampled_from("abc "), max_size=16),
)
def test_equal_for_any_scores(scores, text):
    pieces = dict(zip(PIECES, scores, strict=True))
    tokenizer = from_gguf(spm_fields(pieces, add_space_prefix=False, add_bos_token=False))
    assert [tokenizer.token_bytes(id) for id in tokenizer.encode(text)] == by_definition(text, pieces)


def test_space_prefix_and_bos_are_the_default():
    tokenizer = from_gguf(spm_fields(PIECES))
    assert tokenizer.encode("") == [1]
    ids = tokenizer.encode("ab")
    assert ids[0] == 1 and [tokenizer.token_bytes(id) for id in ids[1:]] == [b" ab"]
    assert tokenizer.decode(ids[1:]) == "ab" and tokenizer.decode(ids[1:], continuation=True) == " ab"
    assert tokenizer.decode(tokenizer.encode(" ab", add_bos=False)) == " ab"
    # After a special token a text begins anew.
    ids = tokenizer.encode("c</s>c", special=True, add_bos=False)
    assert tokenizer.decode(ids, continuation=True) == " c</s> c"


def test_user_text_is_never_a_control_or_byte_token():
    pieces = dict.fromkeys(["<", "s", ">", "<s", "s>", "0", "x", "A", "<0", "<0x", "<0x0", "<0x0A"], -1.0)
    tokenizer = from_gguf(spm_fields(pieces, add_space_prefix=False))
    ids = tokenizer.encode("<s><0x0A>", add_bos=False)
    assert tokenizer.decode(ids) == "<s><0x0A>" and 1 not in ids and 3 + 0x0A not in ids
    assert tokenizer.encode("<s>", special=True, add_bos=False) == [1]


def test_lower_one_eighth_block_is_not_a_space(plain):
    """U+2581 stands for a space inside SentencePiece vocabularies; written by a user it stays itself."""
    assert plain.decode(plain.encode("a▁b")) == "a▁b"


def test_without_byte_tokens_the_unknown_token_stands_in():
    tokenizer = from_gguf(spm_fields(PIECES, with_bytes=False, add_space_prefix=False))
    assert tokenizer.encode("aé", add_bos=False) == [tokenizer.find("a"), tokenizer.find("é")]
    assert set(tokenizer.encode("ü", add_bos=False)) == {0}


def test_user_defined_spaces_are_cut_out_first():
    tokenizer = from_gguf(spm_fields(PIECES, user=["  ", "   ", "\n\n"], add_space_prefix=False))
    assert tokenizer.encode("     a", add_bos=False) == [
        tokenizer.find("   "),
        tokenizer.find("  "),
        tokenizer.find("a"),
    ]


def test_damaged_scores():
    good = spm_fields(PIECES)
    count = good["tokenizer.ggml.tokens"].count
    for scores, match in (
        (numbers("f", [0.0]), "one score for each"),
        (numbers("f", [float("nan")] * count), "not a number"),
        (Array("f32", count, b""), "4 bytes each"),
    ):
        with pytest.raises(FormatError, match=match):
            from_gguf(good | {"tokenizer.ggml.scores": scores})
    with pytest.raises(FormatError, match="scores: is missing"):
        from_gguf({key: value for key, value in good.items() if key != "tokenizer.ggml.scores"})
    with pytest.raises(FormatError, match="4 bytes each"):
        from_gguf(good | {"tokenizer.ggml.token_type": Array("i32", count, b"1234")})


def test_no_control_token_stands_in_for_what_a_vocabulary_lacks():
    """A file may name its end token as the unknown one, whatever that token's type says."""
    for types in ({}, {"token_type": numbers("i", [2, 3, 2] + [1] * len(PIECES))}):
        fields = spm_fields(PIECES, with_bytes=False, add_space_prefix=False, unknown_token_id=2, **types)
        tokenizer = from_gguf(fields)
        ids = tokenizer.encode("aüb", add_bos=False)
        assert 2 in tokenizer.eos_ids and [tokenizer.token_bytes(id) for id in ids] == [b"a", b"b"]
