"""Incremental text: equal to decoding all at once, whole characters only, no part of a stop string ever shown."""

import random

import pytest
from conftest import bpe_fields, spm_fields
from hypothesis import given, settings
from hypothesis import strategies as st

from zse.tokenizer.bpe import from_gguf
from zse.tokenizer.detokenize import Detokenizer

SAMPLES = ["plain text ", "👩‍👩‍👧‍👦", "🏳️‍🌈", "日本語", "한국어 글자", "e\u0301\u0302", "עברית", "العربية", "\u202eabc\u202c", "\n\t", "<|im_end|>",
           "\ufffd", "a", " ", "\U0010ffff"]
CONTROLS = ("<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="module")
def small():
    return from_gguf(bpe_fields(["h e", "l l", "a b", "ð Ł", "ðŁ ĺ", "Ġ a"], CONTROLS))


def pieces_of(tokenizer, ids, pool, **options):
    """The pieces when tokens arrive one or several at a time."""
    made, pieces = Detokenizer(tokenizer, **options), []
    while ids:
        size = pool.randint(1, 4)
        pieces.append(made.push(ids[:size]))
        ids = ids[size:]
    return [*pieces, made.finish()], made


@settings(max_examples=1000, deadline=None)
@given(parts=st.lists(st.one_of(st.sampled_from([sample.encode() for sample in SAMPLES]), st.binary(max_size=6)), max_size=12),
       seed=st.integers(0, 1 << 16))
def test_pieces_joined_are_the_whole(real_tokenizers, small, parts, seed):
    data, pool = b"".join(parts), random.Random(seed)
    for tokenizer in (small, *real_tokenizers.values()):
        ids = tokenizer.encode_bytes(data)
        pieces, _ = pieces_of(tokenizer, ids, pool)
        assert "".join(pieces) == tokenizer.decode(ids)
        if "\ufffd" not in data.decode(errors="replace"):
            assert not any("\ufffd" in piece for piece in pieces)
        assert all(piece.encode() for piece in pieces if piece)  # valid Unicode: no lone surrogates


@settings(max_examples=1000, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=40), seed=st.integers(0, 1 << 16))
def test_any_tokens_whatever(real_tokenizers, ids, seed):
    for tokenizer in real_tokenizers.values():
        for skip in (True, False):
            pieces, made = pieces_of(tokenizer, ids, random.Random(seed), skip_special=skip)
            assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip)
            assert made.num_tokens == len(ids)


@settings(max_examples=2000, deadline=None)
@given(text=st.text(st.sampled_from("abc "), max_size=30), stop=st.lists(st.text(st.sampled_from("abc "), min_size=1, max_size=6),
                                                                       min_size=1, max_size=3), seed=st.integers(0, 1 << 16))
def test_stop_strings(small, text, stop, seed):
    ends = [(at + len(one), -len(one), one) for one in stop if (at := text.find(one)) >= 0]
    expected = text[:min(ends)[0] + min(ends)[1]] if ends else text
    ids = small.encode(text)
    made, shown = Detokenizer(small, stop=stop), ""
    pool = random.Random(seed)
    while ids and made.stopped is None:
        size = pool.randint(1, 3)
        shown += made.push(ids[:size])
        ids = ids[size:]
        assert expected.startswith(shown)  # nothing shown is ever taken back
    assert shown + made.finish() == expected
    assert made.stopped == (min(ends)[2] if ends else None)
    assert made.push(small.encode("more")) == "" or made.stopped is None


def test_stop_string_over_eight_tokens_is_held_back(small):
    stop = "\nUser: 日本"
    ids = small.encode("ok" + stop + " tail")
    made = Detokenizer(small, stop=[stop])
    assert [piece for id in ids if (piece := made.push([id]))] == ["o", "k"]
    assert made.stopped == stop and made.finish() == ""
    assert made.num_tokens == len(small.encode("ok" + stop))
    # A text that only begins like the stop string comes out, late but whole.
    made = Detokenizer(small, stop=[stop])
    assert "".join(made.push([id]) for id in small.encode("ok\nUser: 日")) == "ok"
    assert made.finish() == "\nUser: 日"


def test_stop_string_that_is_a_control_token(small):
    ids = [*small.encode("hello"), small.find("<|im_end|>"), *small.encode("more")]
    made = Detokenizer(small, stop=["<|im_end|>"])
    assert made.push(ids) + made.finish() == "hello" and made.stopped == "<|im_end|>" and made.num_tokens == len(ids) - 4
    made = Detokenizer(small, stop=["<|im_end|>"], skip_special=False)
    assert made.push(ids) + made.finish() == "hello"


def test_unfinished_character_at_the_end(small):
    ids = small.encode_bytes("日".encode()[:2])
    made = Detokenizer(small)
    assert made.push(ids) == "" and made.finish() == "\ufffd"
    # An invalid byte before a stop token's end does not swallow the stop.
    made = Detokenizer(small, stop=["<|im_end|>"])
    assert made.push([*ids, small.find("<|im_end|>")]) == "\ufffd" and made.stopped == "<|im_end|>"


def test_space_prefix():
    tokenizer = from_gguf(spm_fields({"▁": -1.0, "a": -1.0, "▁a": -0.5}))
    ids = tokenizer.encode("a a", add_bos=False)
    assert Detokenizer(tokenizer).push(ids) == " a a"
    assert Detokenizer(tokenizer, continuation=False).push(ids) == "a a"


def test_constant_work_per_token(small):
    import time
    def seconds(count):
        made, ids = Detokenizer(small, stop=["aaaaaaaaaaaaaaaaaaaab", "ac"]), small.encode("a" * 8)
        start = time.thread_time()
        for _ in range(count):
            made.push(ids)
        return time.thread_time() - start
    for _ in range(4):
        half, whole = seconds(2000), seconds(4000)
        if whole < 2.5 * half:
            return
    pytest.fail(f"{half:.4f} s for half, {whole:.4f} s for all")


def test_empty_stop_string_is_an_error(small):
    with pytest.raises(ValueError, match="empty"):
        Detokenizer(small, stop=["a", ""])
