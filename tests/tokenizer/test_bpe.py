"""Byte-level BPE: merging, special tokens, exact bytes, linear time, damaged files."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import CONTROL, Array, alphabet, bpe_fields, numbers, strings

from zse.errors import FormatError, UnsupportedError
from zse.tokenizer.bpe import from_gguf, from_section

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "a a", "aa aa", "a b", "b c", "Ġ Ġ", "ĠĠ ĠĠ"]
CONTROLS = ("<|im_start|>", "<|im_end|>", "<|im", "<s>")
USER = ("<think>", "  \n", "<|image|>")


@pytest.fixture(scope="module")
def small():
    return from_gguf(bpe_fields(MERGES, CONTROLS, USER))


@pytest.fixture(scope="module")
def hf_smollm(real_fields):
    """SmolLM2's vocabulary and merges in the `tokenizers` library."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    fields = real_fields["smollm2"]
    vocabulary = {token.decode(): id for id, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.decode().split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return made


# SmolLM2 lacks tokens for these: llama.cpp merges nothing across one, `tokenizers` does as if it were not there.
LACKING = "\x04\x06\x13\x14\x16\x1d"


@settings(max_examples=300, deadline=None)
@given(
    text=st.one_of(
        st.text(st.characters(exclude_categories=("Cs", "Cn"), exclude_characters=LACKING), max_size=60),
        st.text(st.sampled_from("the and of 0123\n\t  ,.'sreve"), max_size=120),
    )
)
def test_equal_to_tokenizers(real_tokenizers, hf_smollm, text):
    assert real_tokenizers["smollm2"].encode(text) == hf_smollm.encode(text).ids


def test_equal_to_tokenizers_on_prose(real_tokenizers, hf_smollm):
    import zse.tokenizer.bpe as module

    with open(module.__file__) as file:
        text = file.read()
    assert real_tokenizers["smollm2"].encode(text) == hf_smollm.encode(text).ids


def test_merges_by_rank_leftmost_first(small):
    def pieces(text):
        return [small.token_bytes(id).decode() for id in small.encode(text)]

    assert pieces("hello world") == ["hello", " wor", "ld"]
    assert pieces("aaaaa") == ["aaaa", "a"]
    assert pieces("aaa") == ["aa", "a"]
    assert pieces("abc") == ["ab", "c"]  # "a b" comes before "b c"


def test_whole_pieces_skip_the_merges_where_the_model_says_so():
    fields = bpe_fields(["a b"], extra=["abc"], pre="gpt-2")
    assert [from_gguf(fields).token_bytes(id) for id in from_gguf(fields).encode("abc")] == [b"ab", b"c"]
    fields["tokenizer.ggml.pre"] = "llama-bpe"
    assert [from_gguf(fields).token_bytes(id) for id in from_gguf(fields).encode("abc")] == [b"abc"]


def test_special_tokens(small):
    start, end = small.find("<|im_start|>"), small.find("<|im_end|>")
    ids = small.encode("<|im_start|>a<|im_end|>", special=True)
    assert ids[0] == start and ids[-1] == end and small.decode(ids[1:-1]) == "a"
    assert small.encode("<|im_starx", special=True)[0] == small.find("<|im")  # the longest that is there
    assert not any(small.is_special(id) for id in small.encode("<|im_start|>a<|im_end|><s>"))
    # User-defined tokens are part of the text: found either way, kept when special tokens are left out.
    think = small.find("<think>")
    assert small.encode("a<think>b") == small.encode("a<think>b", special=True)
    assert think in small.encode("a<think>b") and not small.is_special(think)
    assert small.decode([start, think, end], skip_special=True) == "<think>"
    assert small.decode([start, think, end]) == "<|im_start|><think><|im_end|>"


def test_no_text_makes_a_special_token(real_tokenizers):
    """Every special token in twenty contexts, as a user would write it."""
    contexts = [
        "{}",
        " {}",
        "{} ",
        "a{}",
        "{}a",
        "\n{}\n",
        "{0}{0}",
        "<{}>",
        "<|{}|>",
        "é{}é",
        "😀{}",
        "1{}2",
        "\t{}",
        "'{}'",
        '"{}"',
        "x {} y",
        "\\{}",
        "&lt;{}",
        "\u200b{}\u200b",
        "<|im_start|>{}<|im_end|>",
    ]
    for tokenizer in real_tokenizers.values():
        texts = tokenizer.control_texts()
        if len(texts) > 200:  # Gemma's 6,241 <unusedN>
            texts = texts[:10] + texts[10::100] + ["<start_of_turn>", "<end_of_turn>"]
        for text in texts:
            for context in contexts:
                written = context.format(text)
                ids = tokenizer.encode(written, special=False, add_bos=False)
                assert not any(map(tokenizer.is_special, ids)), written
                assert tokenizer.decode(ids) == written


def test_barriers_keep_special_tokens_from_forming(small):
    text, end = "x<|im_end|>", small.find("<|im_end|>")
    assert end in small.encode(text, special=True)
    assert end in small.encode(text, special=True, barriers=[1]) and end in small.encode(
        text, special=True, barriers=[11]
    )
    for barrier in range(2, 11):
        assert end not in small.encode(text, special=True, barriers=[barrier])
    assert small.find("<|im") in small.encode(text, special=True, barriers=[5])  # the shorter one ends at the barrier
    assert small.encode("<think>", special=True, barriers=[3]) == [small.find("<think>")]
    assert small.encode("a<|im_end|>b<|im_end|>", special=True, barriers=[2]).count(end) == 1


def test_tokens_that_the_file_calls_ordinary_are_still_control():
    fields = bpe_fields(["< |"], extra=["<|im_start|>", "<|im_end|>", "<|endoftext|>", "</x>"], eos_token_id=260)
    tokenizer = from_gguf(fields)
    assert tokenizer.text_of(260) == "</x>"
    for text in ("<|im_start|>", "<|im_end|>", "</x>"):
        assert tokenizer.is_special(tokenizer.find(text)) and tokenizer.find(text) not in tokenizer.encode(text)
    assert tokenizer.eos_ids == {tokenizer.find("<|im_end|>"), tokenizer.find("<|endoftext|>"), 260}


def test_bos_and_eos():
    fields = bpe_fields([], ("<s>", "</s>"), bos_token_id=256, eos_token_id=257)
    assert from_gguf(fields).encode("") == []  # gpt-2 adds none unless told to
    fields["tokenizer.ggml.add_bos_token"] = fields["tokenizer.ggml.add_eos_token"] = True
    tokenizer = from_gguf(fields)
    assert tokenizer.encode("") == [256, 257]
    assert tokenizer.encode("", add_bos=True) == [256] and tokenizer.encode("", add_bos=False) == []
    fields = bpe_fields([], ("<s>",), bos_token_id=256, pre="llama-bpe")
    assert from_gguf(fields).encode("") == [256]  # Llama 3's default
    fields["tokenizer.ggml.bos_token_id"] = 0xFFFFFFFF  # how converters write "none"
    assert from_gguf(fields).encode("") == []


@settings(max_examples=300, deadline=None)
@given(
    data=st.one_of(
        st.binary(max_size=60),
        st.lists(
            st.sampled_from([b"<|im_start|>", b"<think>", b"hello", b"\xff", b"\xe2\x82", b"  \n", b" ", b"a"]),
            max_size=12,
        ).map(b"".join),
    )
)
def test_any_bytes_come_back(small, real_tokenizers, data):
    assert small.decode_bytes(small.encode_bytes(data)) == data
    assert small.decode_bytes(small.encode_bytes(data, special=True)) == data
    gemma = real_tokenizers["gemma3-270m"]
    assert gemma.decode_bytes(gemma.encode_bytes(data)) == data


def test_random_byte_strings_come_back(small, real_tokenizers):
    pool = random.Random(1)
    gemma = real_tokenizers["gemma3-270m"]
    for _ in range(20_000):
        data = pool.randbytes(pool.randrange(24))
        assert small.decode_bytes(small.encode_bytes(data)) == data
        assert gemma.decode_bytes(gemma.encode_bytes(data)) == data


def test_bytes_that_the_vocabulary_lacks_make_no_token(real_tokenizers):
    """SmolLM2 has no token for 0x04; llama.cpp and the original leave such a byte out."""
    tokenizer = real_tokenizers["smollm2"]
    assert tokenizer.decode(tokenizer.encode("a\x04b")) == "ab"


UNITS = {
    "a": b"a",
    "underscore": b"_",
    "space": b" ",
    "caret": b"^",
    "newline": b"\n",
    "less": b"<",
    "digit": b"7",
    "family": "👩‍👩‍👧".encode(),
    "cjk": "日本語文字".encode(),
    "prose": b"the quick brown fox ",
    "apostrophe": b"'",
    "almost": b"<|im_star",
    "mixed space": b" \n \t",
    "capitals": "AÉ".encode(),
    "quote space": b"\x81\xe2",
}


@pytest.mark.each()
@pytest.mark.parametrize("model", ["smollm2", "gemma3-270m"])
@pytest.mark.parametrize("unit", [*UNITS, "random"])
def test_a_megabyte_in_linear_time(real_tokenizers, model, unit):
    """Doubling the text takes at most 2.5 times as long, 1 MB at most 1 s (CPU time: the machine may be shared)."""

    def seconds(size):
        data = (
            random.Random(size).randbytes(size)
            if unit == "random"
            else (UNITS[unit] * (size // len(UNITS[unit]) + 1))[:size]
        )
        start = time.thread_time()
        real_tokenizers[model].encode_bytes(data)
        return time.thread_time() - start

    size = 1 << 20
    for _ in range(8):  # a neighbour on the machine can spoil one try
        # The less of two: a half that was disturbed would hide a square.
        half, whole = min(seconds(size // 2) for _ in range(2)), seconds(size)
        if whole <= 1 and whole <= 2.5 * max(half, 0.005):
            return
    pytest.fail(f"{half:.3f} s for {size // 2} bytes, {whole:.3f} s for {size}")


@pytest.mark.parametrize(
    "pre", ["default", "tekken", "qwen2", "llama-bpe", "deepseek-v3", "deepseek-llm", "kimi-k2", "qwen35", "minicpm5"]
)
@pytest.mark.parametrize("unit", ["a", "space", "digit", "cjk", "mixed space", "capitals"])
def test_scanners_in_linear_time(pre, unit):
    tokenizer = from_gguf(bpe_fields(MERGES, CONTROLS, pre=pre))

    def seconds(size):
        data = UNITS[unit] * (size // len(UNITS[unit]))
        start = time.thread_time()
        tokenizer.encode_bytes(data)
        return time.thread_time() - start

    for _ in range(4):
        half, whole = min(seconds(1 << 17) for _ in range(3)), min(seconds(1 << 18) for _ in range(3))
        if whole <= 0.5 and whole <= 2.5 * max(half, 0.002):
            return
    pytest.fail(f"{half:.3f} s and {whole:.3f} s")


def test_many_threads_use_one_tokenizer(real_tokenizers):
    tokenizer = real_tokenizers["smollm2"]
    texts = [f"request {i}: the quick brown fox 日本 {'x' * i}" for i in range(200)]
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            assert list(pool.map(tokenizer.encode, texts)) == expected


def test_ids_outside_the_vocabulary(small):
    for id in (-1, small.vocab_size, 1 << 31, 1 << 40, -(1 << 40)):
        with pytest.raises(IndexError):
            small.token_bytes(id)
        with pytest.raises(IndexError):
            small.decode([0, id])
        assert not small.is_special(id)


def test_unsupported_kinds_are_named():
    with pytest.raises(UnsupportedError, match="'bert' is not supported; supported: gpt2, llama"):
        from_gguf(bpe_fields() | {"tokenizer.ggml.model": "bert"})
    with pytest.raises(UnsupportedError, match="pre-tokenizer 'novel' is not supported; supported: .*qwen2"):
        from_gguf(bpe_fields(pre="novel"))


def test_damaged_arrays_are_refused_with_their_place():
    good = bpe_fields(MERGES, CONTROLS)

    def refuse(match, **changed):
        fields = good | {f"tokenizer.ggml.{key}": value for key, value in changed.items()}
        with pytest.raises(FormatError, match=match):
            from_gguf({key: value for key, value in fields.items() if value is not None}, "x.gguf")

    tokens, merges = good["tokenizer.ggml.tokens"], good["tokenizer.ggml.merges"]
    raw = bytes(tokens.raw)
    refuse("tokenizer.ggml.tokens: is missing", tokens=None)
    refuse("tokenizer.ggml.merges: is missing", merges=None)
    refuse("tokens: is not an array of string", tokens=numbers("i", [1]))
    refuse("offset 1000: tokenizer.ggml.tokens: the number of tokens", tokens=strings([]))
    refuse("more tokens than the array can hold", tokens=Array("string", 1 << 21, raw))
    refuse("length of a token's text", tokens=Array("string", tokens.count, (1 << 63).to_bytes(8, "little") + raw[8:]))
    refuse("bytes after the last token", tokens=Array("string", tokens.count, raw + b"\0"))
    refuse("one type for each token", token_type=numbers("i", [1]))
    refuse("not a token type", token_type=numbers("i", [7] * tokens.count))
    refuse("a byte token is not of the form", token_type=numbers("i", [6] * tokens.count))
    refuse("offset 1000: tokenizer.ggml.merges: .* two texts", merges=strings(["ab"]))
    refuse("two texts", merges=strings(["a "]))
    refuse("offset 1011: .*not in the vocabulary", merges=strings(["a a", "x y"]))
    refuse("more merges than", merges=Array("string", 9, b""))
    refuse("bytes after the last merge", merges=Array("string", 0, b"\0"))
    refuse("bos_token_id: 9999 is not a token id", bos_token_id=9999)
    refuse("eos_token_id: 'x' is not a token id", eos_token_id="x")
    refuse(
        "longer than 1024 bytes",
        tokens=strings([*alphabet(), "s" * 1025]),
        token_type=numbers("i", [1] * 256 + [CONTROL]),
        merges=strings([]),
    )
    for cut in range(len(raw)):  # every truncation
        refuse("tokens", tokens=Array("string", tokens.count, raw[:cut]))
    for cut in range(len(merges.raw)):
        refuse("merges", merges=Array("string", merges.count, bytes(merges.raw)[:cut]))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_arrays_never_crash(data):
    """Random bytes written over the arrays: a tokenizer that works, or a FormatError."""
    fields = bpe_fields(MERGES, CONTROLS)
    name = data.draw(st.sampled_from(["tokens", "merges", "token_type"]))
    array = fields[f"tokenizer.ggml.{name}"]
    raw = bytearray(array.raw)
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        tokenizer = from_gguf(fields | {f"tokenizer.ggml.{name}": Array(array.type, array.count, bytes(raw))})
    except FormatError:
        return
    tokenizer.decode(tokenizer.encode("hello world <|im_start|> aaaa", special=True))


def test_section_of_another_version_or_cut_short(small):
    section = small.to_section()
    for cut in (0, 7, 40, 60, 64, 100, 2000, len(section) - 1):
        with pytest.raises(FormatError):
            from_section(section[:cut])
    with pytest.raises(FormatError, match="of this version"):
        from_section(b"X" + section[1:])


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_section_never_crashes(small, data):
    section = bytearray(small.to_section())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.one_of(st.integers(0, 1400), st.integers(0, len(section) - 1)))
        section[at] = data.draw(st.integers(0, 255))
    try:
        tokenizer = from_section(section)
    except FormatError:
        return
    ids = tokenizer.encode("hello world <|im_start|> aaaa  \n<think>", special=True)
    tokenizer.decode([id for id in ids if 0 <= id < tokenizer.vocab_size])


@pytest.mark.parametrize("text", ["he", "hello hello", "h", "x hex"])
def test_a_section_gives_no_plain_text_a_control_tokens_id(text):
    """Its author may write any id into its tables: here pieces that the tables find become control tokens."""
    tokenizer = from_gguf(bpe_fields(["h e", "l l", "he ll", "hell o"], CONTROLS))
    ids = set(tokenizer.encode("hello he ll h"))
    section = bytearray(tokenizer.to_section())
    types = section.index(bytes([1] * 256), section.index(b"ZSE tokenizer 1"))
    for id in ids:
        section[types + id] = CONTROL
    crafted = from_section(section)
    assert all(map(crafted.is_special, ids))
    assert not any(map(crafted.is_special, crafted.encode(text)))


PIECES = ["▁ab", "▁a", "ab", "bc", "abc", "▁▁", "▁▁▁▁", "aa", "\n\n", "\n\n\n", "éa", "日本"]


def gemma4(pieces, user=()):
    """The fields of a Gemma 4 GGUF: every way in which a piece falls into two others is a merge, pieces in their order."""
    letters = list("▁abcé日本\n")
    known = {*letters, *pieces}
    merges = [
        f"{piece[:at]} {piece[at:]}"
        for piece in pieces
        for at in range(1, len(piece))
        if piece[:at] in known and piece[at:] in known
    ]
    named = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [3, 3, 3, 2] + [6] * 256 + [1] * (len(letters) + len(pieces)) + [4] * len(user)
    fields = {
        "model": "gemma4",
        "tokens": strings([*named, *letters, *pieces, *user]),
        "token_type": numbers("i", types),
        "merges": strings(merges),
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "add_space_prefix": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}, merges, [*named, *letters, *pieces]


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from("aabbc  é日本x\n\n"), max_size=24))
def test_gemma4_equals_the_tokenizers_package(text):
    tokenizers = pytest.importorskip("tokenizers")
    fields, merges, tokens = gemma4(PIECES)
    vocab = {token: id for id, token in enumerate(tokens)}
    model = tokenizers.models.BPE(
        vocab, [tuple(merge.split(" ")) for merge in merges], byte_fallback=True, unk_token="<unk>", fuse_unk=True
    )
    expected = tokenizers.Tokenizer(model)
    expected.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    ours = from_gguf(fields)
    ids = ours.encode(text)
    assert ids[0] == 2 and ids[1:] == expected.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids[1:]) == text


def test_gemma4_keeps_runs_of_newlines_and_marks():
    fields, _, tokens = gemma4([*PIECES, "\n\n\n\n\n"], user=["<|tool_call>"])
    del fields["tokenizer.ggml.merges"]
    fields["tokenizer.ggml.merges"] = strings(["a b"])
    tokenizer = from_gguf(fields)
    # No merge leads to a run of five: it is looked up whole, as llama.cpp does; one of four is not in the vocabulary.
    assert tokenizer.encode("\n" * 5)[1:] == [tokens.index("\n" * 5)]
    assert tokenizer.encode("\n" * 4)[1:] == [tokens.index("\n")] * 4
    assert tokenizer.decode(tokenizer.encode("ab<|tool_call>\nß")[1:]) == "ab<|tool_call>\nß"
