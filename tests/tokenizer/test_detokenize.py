"""Incremental text: equal to decoding all at once, whole characters only, no part of a stop string ever shown."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import bpe_fields, spm_fields

from zse.server.models import ServedModel
from zse.tokenizer.bpe import from_gguf
from zse.tokenizer.detokenize import IncrementalDetokenizer

SAMPLES = [
    "plain text ",
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈",
    "日本語",
    "한국어 글자",
    "e\u0301\u0302",
    "עברית",
    "العربية",
    "\u202eabc\u202c",
    "\n\t",
    "<|im_end|>",
    "\ufffd",
    "a",
    " ",
    "\U0010ffff",
]
CONTROLS = ("<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="module")
def small():
    return from_gguf(bpe_fields(["h e", "l l", "a b", "ð Ł", "ðŁ ĺ", "Ġ a"], CONTROLS))


def pieces_of(tokenizer, ids, **options):
    """The pieces, one for each token and the rest."""
    made = IncrementalDetokenizer(tokenizer, **options)
    return [*map(made.push, ids), made.finish()], made


def push_all(made, ids) -> str:
    return "".join(map(made.push, ids))


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(
        st.one_of(st.sampled_from([sample.encode() for sample in SAMPLES]), st.binary(max_size=6)), max_size=12
    ),
    cuts=st.lists(st.integers(0, 100), max_size=4),
)
def test_pieces_joined_are_the_whole(real_tokenizers, small, parts, cuts):
    """The bytes are cut anywhere before they are encoded, so that tokens split characters as a model might."""
    data = b"".join(parts)
    cuts = sorted({cut for cut in cuts if cut < len(data)})
    for tokenizer in (small, *real_tokenizers.values()):
        ids = []
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            ids += tokenizer.encode_bytes(data[start:end])
        pieces, _ = pieces_of(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids)
        if "\ufffd" not in data.decode(errors="replace"):
            assert not any("\ufffd" in piece for piece in pieces)
        assert all(piece.encode() for piece in pieces if piece)  # valid Unicode: no lone surrogates


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=40))
def test_any_tokens_whatever(real_tokenizers, ids):
    for tokenizer in real_tokenizers.values():
        for skip in (True, False):
            pieces, made = pieces_of(tokenizer, ids, skip_special=skip)
            assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip)
            assert made.num_tokens == len(ids)


@settings(max_examples=800, deadline=None)
@given(
    text=st.text(st.sampled_from("abc "), max_size=30),
    stop=st.lists(st.text(st.sampled_from("abc "), min_size=1, max_size=6), min_size=1, max_size=3),
)
def test_stop_strings(small, text, stop):
    ends = [(at + len(one), -len(one), one) for one in stop if (at := text.find(one)) >= 0]
    expected = text[: min(ends)[0] + min(ends)[1]] if ends else text
    made, shown = IncrementalDetokenizer(small, stop=stop), ""
    for id in small.encode(text):
        shown += made.push(id)
        assert expected.startswith(shown)  # nothing shown is ever taken back
    assert shown + made.finish() == expected
    assert made.stopped == (min(ends)[2] if ends else None)
    if ends:
        assert push_all(made, small.encode("more")) == ""


def test_stop_string_over_eight_tokens_is_held_back(small):
    stop = "\nUser: 日本"
    ids = small.encode("ok" + stop + " tail")
    made = IncrementalDetokenizer(small, stop=[stop])
    assert [piece for id in ids if (piece := made.push(id))] == ["o", "k"]
    assert made.stopped == stop and made.finish() == ""
    assert made.num_tokens == len(small.encode("ok" + stop))
    # A text that only begins like the stop string comes out, late but whole.
    made = IncrementalDetokenizer(small, stop=[stop])
    assert "".join(made.push(id) for id in small.encode("ok\nUser: 日")) == "ok"
    assert made.finish() == "\nUser: 日"


def test_stop_strings_behind_the_fewest_tokens(small):
    """What the first tokens say is shown at once, and a stop string that begins there is none."""
    ids = small.encode("x1x1x1")
    assert len(ids) == 6
    for least, text in ((0, "x"), (1, "x"), (2, "x1x"), (3, "x1x"), (4, "x1x1x"), (6, "x1x1x1")):
        made = IncrementalDetokenizer(small, stop=["1"], min_tokens=least)
        assert push_all(made, ids[:least]) == "x1x1x1"[:least]
        assert made.stopped is None
        assert "x1x1x1"[:least] + push_all(made, ids[least:]) + made.finish() == text
    made = IncrementalDetokenizer(small, stop=["x1"], min_tokens=1)
    assert push_all(made, ids) == "x1" and made.stopped == "x1"
    made = IncrementalDetokenizer(small, stop=["<|im_end|>"], min_tokens=2)
    end = small.find("<|im_end|>")
    assert push_all(made, [end, *small.encode("a"), end, *small.encode("b")]) == "a" and made.num_tokens == 3


def test_stop_string_that_is_a_control_token(small):
    ids = [*small.encode("hello"), small.find("<|im_end|>"), *small.encode("more")]
    made = IncrementalDetokenizer(small, stop=["<|im_end|>"])
    assert (
        push_all(made, ids) + made.finish() == "hello"
        and made.stopped == "<|im_end|>"
        and made.num_tokens == len(ids) - 4
    )
    made = IncrementalDetokenizer(small, stop=["<|im_end|>"], skip_special=False)
    assert push_all(made, ids) + made.finish() == "hello"


def test_unfinished_character_at_the_end(small):
    ids = small.encode_bytes("日".encode()[:2])
    made = IncrementalDetokenizer(small)
    assert push_all(made, ids) == "" and made.finish() == "\ufffd"
    # An invalid byte before a stop token's end does not swallow the stop.
    made = IncrementalDetokenizer(small, stop=["<|im_end|>"])
    assert push_all(made, [*ids, small.find("<|im_end|>")]) == "\ufffd" and made.stopped == "<|im_end|>"


def test_space_prefix():
    tokenizer = from_gguf(spm_fields({"▁": -1.0, "a": -1.0, "▁a": -0.5}))
    ids = tokenizer.encode("a a", add_bos=False)
    assert push_all(IncrementalDetokenizer(tokenizer), ids) == " a a"
    assert push_all(IncrementalDetokenizer(tokenizer, continuation=False), ids) == "a a"


def test_pieces_of_a_prompt():
    """Of text neither the BOS nor the space that the tokenizer adds; of ids all that they are."""
    tokenizer = from_gguf(spm_fields({"▁": -1.0, "a": -1.0, "▁a": -0.5}))
    model = ServedModel(tokenizer, None, IncrementalDetokenizer, "m", {})
    ids = tokenizer.encode("a aé", add_bos=True)
    pieces = model.prompt_pieces(ids, is_text=True)
    assert (len(pieces), pieces[:3], "".join(pieces)) == (len(ids), ["", "a", " a"], "a aé")
    shown = model.prompt_pieces(ids, is_text=False)
    assert shown[0] == tokenizer.text_of(tokenizer.bos_id) and "".join(shown) == tokenizer.decode(ids)
    assert model.prompt_pieces(ids[:-1], is_text=True)[-1] == "\ufffd"  # where a cut leaves half of a character


def test_constant_work_per_token(small):
    import time

    def seconds(count):
        made, ids = IncrementalDetokenizer(small, stop=["aaaaaaaaaaaaaaaaaaaab", "ac"]), small.encode("a" * 8)
        start = time.thread_time()
        for _ in range(count):
            push_all(made, ids)
        return time.thread_time() - start

    for _ in range(4):
        half, whole = seconds(2000), seconds(4000)
        if whole < 2.5 * half:
            return
    pytest.fail(f"{half:.4f} s for half, {whole:.4f} s for all")


def test_empty_stop_string_is_an_error(small):
    with pytest.raises(ValueError, match="empty"):
        IncrementalDetokenizer(small, stop=["a", ""])


def test_rows_that_pad_the_embedding_have_no_text(small):
    """Qwen2.5 has 151,665 tokens and 152,064 rows: a sampled row past the vocabulary must not end the stream."""
    text = IncrementalDetokenizer(small)
    ids = small.encode("Hello")
    assert text.push(small.vocab_size) + "".join(map(text.push, ids)) + text.push(small.vocab_size + 300) == "Hello"
    with pytest.raises(IndexError):
        text.push(-1)


def test_control_tokens_that_are_kept(small):
    ids = small.encode("<|im_start|>a<|im_end|>", special=True)
    assert "".join(pieces_of(small, ids, keep=("<|im_start|>", "not there"))[0]) == "<|im_start|>a"
