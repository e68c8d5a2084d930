"""tokenizer.json files: into the C tables where they fit, through the `tokenizers` library else; equal to that
library."""

import itertools
import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pretokenize import CASELESS, GPT2, O200K, QWEN35, TEKKEN
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from zse import lazy
from zse.errors import ConfigError, FormatError, UnsupportedError
from zse.formats.source import TokenizerSource
from zse.tokenizer import bpe
from zse.tokenizer.bpe import BPETokenizer, from_section
from zse.tokenizer.huggingface import PATTERNS, from_json
from zse.tokenizer.load import load_tokenizer
from zse.tokenizer.wrapped import WrappedTokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog 0123456789",
    "I'll say: don't, we're HERE\n\n  indented\tcode()",
    "日本語の文字と한국어와 emoji 😀😀 and café naïve",
    "1 22 333 4444 1995, 2024; x=y*2 // comment\r\n",
] * 8
CONFIG = {"bos_token": "<|begin|>", "eos_token": {"content": "<|im_end|>"}, "pad_token": None}
SPECIAL = ["<|begin|>", "<|im_start|>", "<|im_end|>"]
TEXTS = st.text(
    st.one_of(
        st.sampled_from("the quick 0123 \n'sIre日本😀<|im_start|>_e\u0301"),
        st.characters(exclude_categories=("Cs", "Cn")),
    ),
    max_size=40,
)


def byte_level(steps, ignore_merges=False, normalizer=None) -> Tokenizer:
    """A small tokenizer of the kind that Llama 3, Qwen and GPT-2 have."""
    made = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    made.decoder = decoders.ByteLevel()
    if normalizer:
        made.normalizer = normalizer
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=420, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
    )
    made.add_special_tokens(SPECIAL)
    made.add_tokens(["<think>"])
    return made


def split(pattern):
    return [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


BYTE_LEVEL = {
    "gpt2": ([pre_tokenizers.ByteLevel(add_prefix_space=False)], bpe.GPT2),
    "smollm": (
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        bpe.SMOLLM,
    ),
    "llama3": (split(CASELESS % "{1,3}"), bpe.LLAMA3),
    "qwen2": (split(CASELESS % ""), bpe.QWEN2),
    "qwen35": (split(QWEN35), bpe.QWEN35),
    "tekken": (split(TEKKEN), bpe.TEKKEN),
    "o200k": (split(O200K), bpe.O200K),
    "split gpt2": (split(GPT2), bpe.GPT2),
}


@pytest.fixture(scope="module", params=BYTE_LEVEL)
def pair(request):
    steps, _ = BYTE_LEVEL[request.param]
    library = byte_level(
        steps,
        ignore_merges=request.param == "llama3",
        normalizer=normalizers.NFC() if request.param == "qwen2" else None,
    )
    return library, from_json(library.to_str().encode(), CONFIG)


def reference(library, text, special):
    library.encode_special_tokens = not special
    return library.encode(text, add_special_tokens=False).ids


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, special=st.booleans())
def test_native_equals_the_library(pair, text, special):
    library, ours = pair
    assert isinstance(ours, BPETokenizer)
    ids = reference(library, text, special)
    assert ours.encode(text, special=special, add_bos=False) == ids
    assert ours.decode(ids) == library.decode(ids, skip_special_tokens=False)
    assert from_section(ours.to_section()).encode(text, special=special, add_bos=False) == ids


def test_every_known_pattern_has_its_scanner():
    assert set(PATTERNS.values()) == {bpe.GPT2, bpe.LLAMA3, bpe.QWEN2, bpe.QWEN35, bpe.TEKKEN, bpe.O200K}
    assert set(PATTERNS) == {GPT2, CASELESS % "{1,3}", CASELESS % "", QWEN35, TEKKEN, O200K}


def test_roles_and_ends():
    library = byte_level(BYTE_LEVEL["gpt2"][0])
    begin, start, end = map(library.token_to_id, SPECIAL)
    data = library.to_str().encode()
    ours = from_json(data, CONFIG)
    assert (ours.bos_id, ours.eos_id, ours.pad_id, ours.eos_ids) == (begin, end, None, {end})
    assert not ours.adds_bos and ours.is_special(start) and not ours.is_special(library.token_to_id("<think>"))
    assert from_json(data, CONFIG | {"add_bos_token": True}).encode("") == [begin]
    assert from_json(data, {}, {"bos_token": "<|begin|>"}).bos_id == begin
    assert from_json(data, CONFIG, generation_config={"eos_token_id": [end, start, 10**9]}).eos_ids == {start, end}
    library.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", begin)])
    ours = from_json(library.to_str().encode(), CONFIG)
    assert ours.encode("the") == library.encode("the").ids and ours.adds_bos


def test_load_tokenizer_reads_it():
    data = byte_level(BYTE_LEVEL["qwen2"][0]).to_str().encode()
    source = TokenizerSource("hf", read_json=lambda: data, config=CONFIG)
    assert load_tokenizer(source).bos_id is not None


# --- kinds that only the library reads -------------------------------------------------------------------------------


def pieces(prefix: str) -> Tokenizer:
    """A tokenizer of Llama 2's kind: spaces as U+2581, unknown characters as bytes."""
    names = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "t",
        "h",
        "e",
        "a",
        "th",
        "▁t",
        "▁th",
        "the",
        "▁the",
        "é",
    ]
    made = Tokenizer(
        models.BPE(
            {name: id for id, name in enumerate(names)},
            [("t", "h"), ("▁", "th"), ("▁th", "e"), ("th", "e"), ("▁", "t")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    if prefix == "normalizer":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix != "never" else steps)
    made.add_special_tokens([AddedToken(name, normalized=False) for name in names[:3]])
    return made


@pytest.fixture(scope="module", params=["normalizer", "always", "first", "never"])
def wrapped(request):
    library = pieces(request.param)
    return library, from_json(library.to_str().encode(), {"bos_token": "<s>", "eos_token": "</s>"})


@settings(max_examples=300, deadline=None)
@given(
    text=st.one_of(
        st.text(st.sampled_from("the é日\n "), max_size=20),
        st.lists(st.sampled_from(["the", "<s>", "</s>", " ", "é"]), max_size=6).map("".join),
    ),
    special=st.booleans(),
)
def test_wrapped_equals_the_library(wrapped, text, special):
    library, ours = wrapped
    assert isinstance(ours, WrappedTokenizer)
    ids = reference(library, text, special)
    assert ours.encode(text, special=special, add_bos=False) == ids
    if not special:
        assert ours.decode(ids) == library.decode(ids, skip_special_tokens=False)


def test_wrapped_keeps_users_text_apart(wrapped):
    _, ours = wrapped
    assert ours.find("</s>") == 2 and ours.eos_ids == {2} and ours.is_special(2)
    assert 2 in ours.encode("a</s>", special=True, add_bos=False)
    assert 2 not in ours.encode("a</s>", add_bos=False)
    assert 2 not in ours.encode("a</s>", special=True, add_bos=False, barriers=[3])
    assert ours.encode("é</s></s>", special=True, add_bos=False, barriers=[3]).count(2) == 1
    assert (
        ours.control_first_characters() == "<"
        and ours.ends_inside_control("x</")
        and not ours.ends_inside_control("x>")
    )
    with pytest.raises(IndexError):
        ours.token_bytes(ours.vocab_size)
    assert ours.token_bytes(3 + 0xE6) == b"\xe6"


def test_flags_of_added_tokens_go_to_the_library():
    library = byte_level(BYTE_LEVEL["gpt2"][0])
    library.add_special_tokens([AddedToken("<|mask|>", lstrip=True, rstrip=True)])
    ours = from_json(library.to_str().encode(), CONFIG)
    assert isinstance(ours, WrappedTokenizer)
    for text in ("the <|mask|>  fox", "<|im_end|> <|mask|>"):
        assert ours.encode(text, special=True) == reference(library, text, True)


def test_damaged_files():
    good = json.loads(byte_level(BYTE_LEVEL["gpt2"][0]).to_str())
    for data in (
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"model": 3}',
        b"\xff",
        b'{"model": {"type": "BPE", "merges": [], "vocab": []}}',
    ):
        with pytest.raises((FormatError, UnsupportedError)):
            from_json(data)
    for change in (
        {"vocab": {"a": -1}},
        {"vocab": {"a": 1 << 40}},
        {"vocab": {"a": "x"}},
        {"merges": ["ab"]},
        {"merges": [["a"]]},
        {"merges": ["a zzzzz"]},
        {"vocab": None},
    ):
        with pytest.raises(FormatError):
            from_json(json.dumps(good | {"model": good["model"] | change}).encode())
    with pytest.raises(UnsupportedError, match="tokenizer decoder"):
        from_json(json.dumps(good | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}).encode())


def test_random_damage_is_an_error_or_a_tokenizer():
    text, pool = byte_level(BYTE_LEVEL["gpt2"][0]).to_str(), random.Random(1)
    for _ in range(150):
        at = pool.randrange(len(text))
        data = (text[:at] + pool.choice(["", "0", '"', "-1", "}", "null"]) + text[at + pool.randrange(3) :]).encode()
        try:
            from_json(data, CONFIG).encode("the quick")
        except (FormatError, UnsupportedError):
            pass


# --- Gemma's kind ----------------------------------------------------------------------------------------------------


def gemma(num_words: int = 0) -> bytes:
    """A tokenizer.json of Gemma 3's kind: spaces as U+2581, runs of them and of line ends as added tokens, and so many
    words more."""
    marks = ["<pad>", "<eos>", "<bos>", "<unk>"]
    runs = [sign * size for sign in "▁\n" for size in range(2, 32)]
    names = [*marks, *runs, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "\n", *"abcdefghijklmnop"]
    merges = [(sign * left, sign * (size - left)) for sign in "▁\n" for size in range(2, 32) for left in range(1, size)]
    letters = "abcdefghijklmnop"
    longer = (word for size in range(1, 6) for word in itertools.product(letters, repeat=size + 1))
    words = ["".join(word) for word in itertools.islice(longer, num_words)]
    merges += [(word[:-1], word[-1]) for word in words]
    names += words
    vocabulary = {name: id for id, name in enumerate(names)}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken(name, normalized=False) for name in marks])
    made.add_tokens([AddedToken(name, normalized=False) for name in runs])
    return made.to_str(pretty=True).encode()


@pytest.fixture(scope="module")
def gemma_pair():
    return Tokenizer.from_str(gemma().decode()), from_json(gemma(), {"bos_token": "<bos>", "eos_token": "<eos>"})


@settings(max_examples=300, deadline=None)
@given(text=st.one_of(st.text(st.sampled_from(" \n\tabé日"), max_size=80), st.text(max_size=20)))
def test_gemma_texts_decode_to_themselves(gemma_pair, text):
    """Indentation is added tokens of U+2581, which are spaces in a text."""
    library, ours = gemma_pair
    ids = ours.encode(text, add_bos=False)
    assert ids == reference(library, text, False)
    assert ours.decode(ids) == library.decode(ids, skip_special_tokens=False) == text.replace("▁", " ")


@pytest.mark.timed
def test_a_large_vocabulary_costs_what_the_library_takes():
    """33 MB, as Gemma 3's: our own part (two passes with a regular expression once) is less than the library's."""
    data = gemma(260000)
    data += b" " * max(0, 33_000_000 - len(data))
    start = time.process_time()
    Tokenizer.from_buffer(data)
    library = time.process_time() - start
    start = time.process_time()
    ours = from_json(data, {"bos_token": "<bos>"})
    taken = time.process_time() - start
    assert ours.vocab_size > 260000
    assert taken < 1.8 * library, f"{taken:.2f} s, of which the library takes {library:.2f} s"


def test_a_kind_that_needs_the_library_says_what_to_type(monkeypatch):
    monkeypatch.setattr("zse.tokenizer.wrapped.tokenizers", lazy.LazyModule("a_library_that_is_not_there"))
    parts = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "decoder": {"type": "Metaspace"}}
    with pytest.raises(ConfigError, match="^m/tokenizer.json: this kind .* -m pip install tokenizers "):
        from_json(json.dumps(parts).encode(), path="m/tokenizer.json")


# --- a user's text never becomes a control token ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["native", "wrapped"])
def test_two_texts_with_one_id_are_refused(kind):
    library = byte_level(BYTE_LEVEL["gpt2"][0]) if kind == "native" else pieces("never")
    parsed = json.loads(library.to_str())
    vocabulary = parsed["model"]["vocab"]
    end = next(token for token in parsed["added_tokens"] if token["content"] in ("<|im_end|>", "</s>"))
    vocabulary[end["content"]] = end["id"]
    from_json(json.dumps(parsed).encode())
    vocabulary["the"] = end["id"]
    with pytest.raises(FormatError, match=rf"vocab: .*'the'.* have the same id {end['id']}"):
        from_json(json.dumps(parsed).encode())


def test_an_added_token_with_the_id_of_a_piece_is_refused():
    parsed = json.loads(pieces("never").to_str())
    vocabulary = parsed["model"]["vocab"]
    parsed["added_tokens"][2] |= {"content": "<|turn|>", "id": vocabulary["the"]}
    with pytest.raises(FormatError, match=r"added_tokens: '<|turn|>' has id \d+, which the vocabulary gives to 'the'"):
        from_json(json.dumps(parsed).encode())


@pytest.mark.parametrize("text", ["</s>", "a</s></s>b", "</s", "the</s> </s>the<s>", "x<"])
def test_a_unigram_vocabulary_has_control_tokens_among_its_pieces(text):
    scored = [("<unk>", -9.0), ("<s>", 0.0), ("</s>", 0.0), *((letter, -3.0) for letter in "▁the<>/sab"), ("the", -1.0)]
    library = Tokenizer(models.Unigram(scored, unk_id=0))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    library.decoder = decoders.Metaspace(prepend_scheme="never")
    library.add_special_tokens([AddedToken(name, normalized=False) for name, _ in scored[:3]])
    ours = from_json(library.to_str().encode(), {"eos_token": "</s>", "unk_token": "<unk>"})
    ids = ours.encode(text, add_bos=False)
    assert not {1, 2}.intersection(ids) and ours.decode(ids) == text.replace("x", "<unk>")
    assert 2 in ours.encode("a</s>", special=True, add_bos=False)


def test_no_control_token_stands_in_for_what_a_vocabulary_lacks():
    parsed = json.loads(pieces("never").to_str())
    parsed["model"] |= {"unk_token": "</s>", "byte_fallback": False}
    ours = from_json(json.dumps(parsed).encode(), {"eos_token": "</s>", "unk_token": "</s>"})
    ids = ours.encode("the 日 é日e", add_bos=False)
    assert ours.eos_id == 2 and 2 not in ids and ours.decode(ids) == "the  ée"
