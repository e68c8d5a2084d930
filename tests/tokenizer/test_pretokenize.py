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
QWEN35 = (
    (CASELESS % "").replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{M}\p{N}]+")
)
MINICPM5 = r"\p{N}{1,3}", CASELESS % "+"
SEED = (CASELESS % "").replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")
KIMI = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?UPPER*LOWER+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?UPPER+LOWER*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI = KIMI.replace("UPPER", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]")
KIMI = KIMI.replace("LOWER", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]")
# The letters with a case that DeepSeek LLM's tokenizer lists.
CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅ"
    "ὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-"
    "ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{CASED}]+",
    "\\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-\ud7ff]+",
    r"\p{N}+",
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
    bpe.QWEN35: split(QWEN35),
    bpe.MINICPM5: pre_tokenizers.Sequence([split(pattern) for pattern in MINICPM5]),
    bpe.SEED: split(SEED),
    bpe.KIMI: split(KIMI),
    bpe.DEEPSEEK_LLM: pre_tokenizers.Sequence([split(pattern) for pattern in DEEPSEEK_LLM]),
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
        0x2F00,
        0x3007,
        0x3021,
        0x3002,
        0x560,
        0xFF01,
        0xFF21,
        0xAC00,
        0x10400,
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
        for run, following in zip(runs, [*runs[1:], 0x110000 << 4], strict=True):
            for code in range(run >> 4, min(following >> 4, 0x3000)):
                assert run & 15 == 0 or script["class_of"](code) == run & 15, hex(code)
