"""Chunks: bounds, structure, and that nothing of a document is lost."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zse.errors import RequestError
from zse.rag import chunk as chunk_module
from zse.rag.chunk import checked_sizes, chunk_document
from zse.rag.documents import DocumentError, ParsedDocument, ParseLimits, TextBlock
from zse.rag.parse import markdown, text


def count_tokens(texts: list[str]) -> list[int]:
    """As a byte-level vocabulary does it, roughly: a word of up to eight letters is a token, another sign is one."""
    return [len(re.findall(r" ?[A-Za-z]{1,8}|\s+|[^A-Za-z\s]", text)) for text in texts]


def chunked(blocks: list[TextBlock], tokens=64, overlap=0, count=count_tokens):
    return chunk_document(ParsedDocument("text", "", blocks), count, tokens, overlap)


def letters(text: str) -> str:
    return re.sub(r"\s", "", text)


KINDS = st.sampled_from(["heading", "paragraph", "list", "code"])
TEXTS = st.one_of(
    st.text("ab .\n!?。😀", min_size=1, max_size=300),
    st.builds(lambda word, n: word * n, st.sampled_from(["x", "word ", "End. ", "😀", "a\n"]), st.integers(1, 900)),
)
SIZES = {"tokens": st.integers(32, 80), "overlap": st.integers(0, 39)}


@settings(max_examples=100, deadline=None)
@given(blocks=st.lists(st.builds(TextBlock, KINDS, TEXTS, st.integers(1, 6)), max_size=12), **SIZES)
def test_every_character_is_in_some_chunk_and_none_is_too_long(blocks, tokens, overlap):
    chunks = chunked(blocks, tokens)
    assert "".join(letters(one.text) for one in chunks) == letters("".join(block.text for block in blocks))
    chunks = chunked(blocks, tokens, min(overlap, (tokens - 1) // 2))
    assert chunks == chunked(blocks, tokens, min(overlap, (tokens - 1) // 2))
    for one in chunks:
        assert one.text.strip() and one.num_tokens == count_tokens([one.text])[0] <= tokens


@settings(max_examples=60, deadline=None)
@given(shapes=st.lists(st.tuples(KINDS, st.integers(1, 120), st.integers(1, 6)), max_size=12), **SIZES)
def test_with_an_overlap_chunks_follow_each_other_without_a_gap(shapes, tokens, overlap):
    blocks, number = [], 0
    for kind, size, level in shapes:
        blocks.append(TextBlock(kind, " ".join(f"w{at}." for at in range(number, number + size)), level))
        number += size
    covered = begin = 0
    for one in chunked(blocks, tokens, min(overlap, (tokens - 1) // 2)):
        words = one.text.split()
        numbers = [int(word[1:-1]) for word in (words if words[0].startswith("w") else words[1:])]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert begin <= numbers[0] <= covered < numbers[-1] + 1
        begin, covered = numbers[0], numbers[-1] + 1
    assert covered == number


def test_a_section_begins_a_chunk_and_its_headings_go_along():
    source = (
        "# Guide\n\n"
        + "Intro words here. " * 20
        + "\n\n## Setup\n\n"
        + "Do this step now. " * 60
        + "\n\n## Use\n\nShort."
    )
    document = markdown.parse(source.encode(), "g.md", ParseLimits())
    chunks = chunk_document(document, count_tokens, 100, 10)
    setup = next(one for one in chunks if one.text.startswith("Setup"))
    assert setup.headings == ["Guide"]
    after = chunks[chunks.index(setup) + 1]
    assert after.headings == ["Guide", "Setup"] and not after.text.startswith("Setup")
    assert chunks[-1].text.startswith("Use\n\nShort.") or "Use\n\nShort." in chunks[-1].text


def test_a_heading_stays_with_what_it_stands_above():
    blocks = []
    for number in range(30):
        blocks += [TextBlock("heading", f"Part {number}", 2), TextBlock("paragraph", "word " * (number % 7 + 20))]
    for one in chunked(blocks, 64, 8):
        assert not re.search(r"Part \d+$", one.text)


def test_rows_repeat_the_row_that_names_their_columns():
    rows = [TextBlock("table", "name | size", 1)] + [
        TextBlock("table", f"item{number} | {number}") for number in range(200)
    ]
    chunks = chunked(rows, 64, 16)
    assert len(chunks) > 10 and all(one.text.startswith("name | size\n") for one in chunks)
    assert [line for one in chunks for line in one.text.split("\n")[1:]] == [row.text for row in rows[1:]]


def test_code_that_fits_is_not_cut():
    function = "\n".join(f"    x{line} = {line}" for line in range(8))
    blocks = [TextBlock("code", f"def f{number}():\n{function}") for number in range(6)]
    for one in chunked(blocks, 128, 0):
        assert one.text.count("def f") == one.text.count("x7 = 7")


def test_a_chunk_repeats_the_end_of_the_one_before():
    chunks = chunked([TextBlock("paragraph", " ".join(f"word{number} stays." for number in range(400)))], 64, 24)
    for one, following in zip(chunks, chunks[1:]):
        shared = next(size for size in range(len(one.text), 0, -1) if following.text.startswith(one.text[-size:]))
        assert 0 < count_tokens([one.text[-shared:]])[0] <= 26


def test_pages_are_those_of_the_text():
    blocks = [TextBlock("paragraph", "some words here. " * 6, page=page) for page in (1, 2, 3, 4)]
    chunks = chunked(blocks, 64, 0)
    assert [(one.first_page, one.last_page) for one in chunks] == [(1, 2), (3, 4)] or chunks[0].first_page == 1
    assert chunks[-1].last_page == 4 and all(one.first_page <= one.last_page for one in chunks)


def test_a_tokenizer_that_counts_more_across_seams_is_believed():
    def odd(texts):
        return [len(one) // 4 + (len(one) > 100) * len(one) // 8 + 1 for one in texts]

    chunks = chunked([TextBlock("paragraph", "many words stand here. " * 300)], 64, 8, odd)
    assert all(one.num_tokens == odd([one.text])[0] <= 64 for one in chunks)


@pytest.mark.parametrize(
    ("tokens", "overlap", "field"),
    [
        (0, 0, "chunk_tokens"),
        (-1, 0, "chunk_tokens"),
        (31, 0, "chunk_tokens"),
        (4097, 0, "chunk_tokens"),
        (2**63, 0, "chunk_tokens"),
    ]
    + [(64, 32, "overlap_tokens"), (64, -1, "overlap_tokens"), (64, 2**63, "overlap_tokens")],
)
def test_sizes_are_checked(tokens, overlap, field):
    with pytest.raises(RequestError) as refused:
        checked_sizes(tokens, overlap)
    assert (refused.value.param, refused.value.code, refused.value.status) == (field, "out_of_range", 400)


def test_sizes_have_defaults():
    assert (
        checked_sizes(None, None) == (512, 64)
        and checked_sizes(64, None) == (64, 8)
        and checked_sizes(32, 15) == (32, 15)
    )


def test_too_many_chunks_are_refused(monkeypatch):
    monkeypatch.setattr(chunk_module, "MAX_CHUNKS", 10)
    with pytest.raises(DocumentError, match="more than 10 chunks") as refused:
        chunked([TextBlock("paragraph", "word " * 1000)])
    assert refused.value.code == "request_too_large"


@pytest.mark.parametrize("kind", [text, markdown])
@pytest.mark.parametrize(
    "source",
    [
        "a",
        " ",
        ".",
        "a\n\n",
        "[",
        "*",
        "_ _a",
        ".)",
        "[a](b",
        "<!--",
        "|-\n",
        ">",
        "- ",
        "#\n",
        "😀",
        "`",
        "a. ",
        "\n    x",
        "1) ",
    ],
)
def test_time_grows_with_the_text(kind, source):
    """Four times the text may take twelve times as long: what is quadratic takes sixteen times."""

    def spent(size: int) -> float:
        data = (source * (size // len(source)) + "x").encode()
        started = time.process_time()
        chunked(
            kind.parse(data, "x", ParseLimits()).blocks, 512, 64, lambda texts: [len(one) // 4 + 1 for one in texts]
        )
        return time.process_time() - started

    short = min(spent(50_000) for _ in range(2))
    # Of two: a collection of the garbage of all tests before may fall into one.
    assert min(spent(200_000) for _ in range(2)) < 12 * short + 0.05
