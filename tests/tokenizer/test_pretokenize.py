"""The hand-written scanners against the patterns they stand for, run by the `tokenizers` library."""

import runpy
import unicodedata
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from zse.tokenizer import bpe, native

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CASELESS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)


def split(pattern: str):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


REFERENCES = {
    bpe.GPT2: split(GPT2),
    bpe.SMOLLM: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split(GPT2)]),
    bpe.LLAMA3: split(CASELESS % "{1,3}"),
    bpe.QWEN2: split(CASELESS % ""),
    bpe.TEKKEN: split(TEKKEN),
    bpe.O200K: split(O200K),
    bpe.DEEPSEEK3: pre_tokenizers.Sequence([split(pattern) for pattern in DEEPSEEK3]),
    bpe.DEFAULT: pre_tokenizers.Sequence([split(pattern) for pattern in DEFAULT]),
}


def scan(pre: int, data: bytes) -> list[int]:
    """Where the pieces end that one of the scanners cuts."""
    ends = array("q", bytes(8 * len(data)))
    count = native.library().zt_pretokenize(pre, data, len(data), ends.buffer_info()[0], len(ends))
    return list(ends[:count])


def pretokenize(pre: int, text: str) -> list[str]:
    data = text.encode("utf-8", "surrogatepass")
    ends = scan(pre, data)
    return [data[start:end].decode("utf-8", "surrogatepass") for start, end in zip([0, *ends], ends, strict=False)]


# Characters at which the patterns' alternatives meet: contractions, white space of every kind, digits, marks, capitals.
EDGES = list("aAsStTlLdDvVeErRmMzZ''''    \n\r\t1239.,!?/$<_-") + [
    chr(code)
    for code in (
        0xE9,
        0xDF,
        0xC9,
        0x1C5,
        0x17F,
        0x2B0,
        0xAA,
        0x5D0,
        0x65E5,
        0x672C,
        0xFF71,
        0x301,
        0x302,
        0xE48,
        0x93E,
        0x967,
        0x662,
        0x2163,
        0xBD,
        0xB2,
        0x2014,
        0x201C,
        0xAB,
        0x20AC,
        0xA0,
        0x3000,
        0x200B,
        0x200D,
        0x1F600,
        0x85,
        0x1C,
        0x0B,
        0x30A2,
        0x30FB,
        0x3042,
        0x3099,
        0x309B,
        0x9FA6,
        0x4E00,
        0xA4,
        0x7F,
    )
]
ASSIGNED = st.characters(exclude_categories=("Cs", "Cn"))
TEXTS = st.one_of(
    st.text(st.sampled_from(EDGES), max_size=30),
    st.text(ASSIGNED, max_size=20),
    st.text(st.one_of(ASSIGNED, st.sampled_from(EDGES)), max_size=30),
)


@pytest.mark.parametrize("pre", REFERENCES)
@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_equal_to_the_pattern(pre, text):
    assert pretokenize(pre, text) == [piece for piece, _ in REFERENCES[pre].pre_tokenize_str(text)]


def test_digits_of_smollm_stand_alone():
    assert pretokenize(bpe.SMOLLM, "x  12 y") == ["x", "  ", "1", "2", " y"]
    assert pretokenize(bpe.GPT2, "x  12 y") == ["x", " ", " 12", " y"]
    assert pretokenize(bpe.LLAMA3, "12345") == ["123", "45"]
    assert pretokenize(bpe.QWEN2, "123") == ["1", "2", "3"]


def test_bytes_that_are_not_utf8_are_single_characters():
    for pre in REFERENCES:
        for data in (b"\xff\xfe a\xc3", b"\xe2\x82", b"\xf0\x9f\x98 x\xed\xa0\x80", b"\xc0\xaf\xf4\x90\x80\x80"):
            ends = scan(pre, data)
            assert ends == sorted(set(ends)) and ends[-1] == len(data)


def test_committed_table_is_what_the_script_writes():
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "make_unicode_table.py"))
    committed = script["TARGET"].read_text()
    version = unicodedata.unidata_version
    if f"Unicode {version}." in committed:
        assert committed == script["text"]()
    else:  # another Python's data: what both know must agree
        runs = [
            int(word)
            for word in committed[committed.index("class_runs[") :].split("{")[1].split("}")[0].split(",")[:-1]
        ]
        for run, following in zip(runs, [*runs[1:], 0x110000 << 3], strict=True):
            for code in range(run >> 3, min(following >> 3, 0x3000)):
                assert run & 7 == 0 or script["class_of"](code) == run & 7, hex(code)
