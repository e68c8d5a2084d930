"""BM25 and TF-IDF against plain formulas, filters, and questions that are no syntax."""

import math
import random

import pytest
from rag.documents_file import opened

from zse.rag import search, store, words
from zse.rag.search import K1, B, Filters


@pytest.fixture
def file(tmp_path):
    with opened(tmp_path) as file:
        yield file


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Cats' 3.5 boxes, libraries, glass, bus", "the cat 3 5 boxe library glass bus"),
        ("maxTokens max_tokens HTTPServer2", "max token maxtoken max token maxtoken http server 2 httpserver2"),
        ("Crème BRÛLÉE Straße", "creme brulee straße"),
        ("機械学習 and 日", "機械 械学 学習 and 日"),
        ("हिन्दी", "हिन्दी"),
        ("한국어 ได้", "한국어 ได ด้"),
        ("__ -- ··", ""),
    ],
)
def test_words(text, expected):
    assert words.words_of(text) == expected.split()


def test_asked_words_leave_out_what_says_nothing():
    assert words.asked_words("What is the width of the table, the table?", 9) == ["width", "table"]
    assert words.asked_words("to be or not to be", 9) == ["to", "be", "or", "not"]
    assert words.asked_words("a b c d", 2) == ["b", "c"]


def naive(texts: list[list[str]], question: list[str]) -> tuple[list[float], list[float]]:
    """BM25 and the lnc.ltc cosine of each text, by their definitions."""
    mean = sum(map(len, texts)) / len(texts)
    holds = {word: sum(word in text for text in texts) for word in question}
    known = [word for word in question if holds[word]]
    ltc = {word: math.log((len(texts) + 1) / holds[word]) for word in known}
    asked = math.sqrt(sum(weight**2 for weight in ltc.values())) or 1.0
    bm25, cosine = [], []
    for text in texts:
        total = inner = 0.0
        for word in known:
            if count := text.count(word):
                rarity = math.log(1 + (len(texts) - holds[word] + 0.5) / (holds[word] + 0.5))
                total += rarity * count * (K1 + 1) / (count + K1 * (1 - B + B * len(text) / mean))
                inner += (1 + math.log(count)) * ltc[word]
        norm = math.sqrt(sum((1 + math.log(text.count(word))) ** 2 for word in set(text)))
        bm25.append(total)
        cosine.append(inner / norm / asked)
    return bm25, cosine


def test_scores_are_those_of_the_formulas(file):
    draw = random.Random(3)
    vocabulary = [f"w{number}x" for number in range(40)]
    texts = [
        [draw.choice(vocabulary[: draw.randrange(2, 40)]) for _ in range(draw.randrange(3, 60))] for _ in range(50)
    ]
    file.add("other", "z", "w3x " * 50)
    for number in range(0, 50, 10):
        file.add("a", f"d{number:02}", *(" ".join(text) for text in texts[number : number + 10]), name=f"d{number:02}")
    # The name of a document is searched too.
    whole = [[f"d{number // 10 * 10:02}", *text] for number, text in enumerate(texts)]
    for _ in range(20):
        question = draw.sample([*vocabulary, "unknown"], 4)
        for stage, expected in zip(("bm25", "tfidf"), naive(whole, question), strict=True):
            found = file.search("a", " ".join(question), stages=(stage,), top_k=50)
            got = {int(passage.document[1:]) + passage.position: passage.stages[stage][1] for passage in found}
            assert got == pytest.approx({i: score for i, score in enumerate(expected) if score > 0}, rel=1e-5)
            scores = [passage.score for passage in found]
            assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    "text",
    [
        'cat" OR "*',
        "NEAR(cat dog)",
        "text:cat",
        "cat*",
        "^cat",
        "(cat",
        "cat AND NOT dog -",
        "'; DROP TABLE chunks; --",
        "\0cat",
    ],
)
def test_a_question_is_no_syntax(file, text):
    file.add("a", "x", "the cat", "the dog", "catalogue")
    found = {passage.chunk.text for passage in file.search("a", text)}
    assert found <= {"the cat", "the dog"} and ("the cat" in found) == ("cat" in text)


def test_filters(file):
    file.add("a", "x", "cat one", now=10.0, kind="pdf", metadata={"team": "red", "year": 2024, "open": True})
    file.add("a", "y", "cat two", now=20.0, metadata={"team": "blue", "year": 2024.0})
    file.add("a", "z", "cat three", now=30.0, metadata={"team": "red", "year": "2024"})

    def found(**filters) -> str:
        passages = file.search("a", "cat", filters=Filters(**filters))
        return "".join(sorted(passage.document for passage in passages))

    assert found() == "xyz"
    assert found(documents=["x", "z", "not there"]) == "xz" and found(documents=[]) == ""
    assert found(kinds=["pdf"]) == "x" and found(kinds=["text", "pdf"]) == "xyz"
    assert found(after=20.0) == "yz" and found(before=20.0) == "x" and found(after=11.0, before=30.0) == "y"
    assert found(metadata={"team": "red"}) == "xz" and found(metadata={"year": 2024}) == "xy"
    assert found(metadata={"team": "red", "year": "2024"}) == "z" and found(metadata={"open": True}) == "x"
    assert found(metadata={"team' OR 1=1 --": "red"}) == "" == found(documents=['x" OR 1'])


def test_stages_are_explained_and_can_be_left_out(file):
    file.add("a", "x", "cat cat cat", "cat and dog", "dog")
    both = file.search("a", "cat dog")
    assert all(passage.score == pytest.approx(sum(part for *_, part in passage.stages.values())) for passage in both)
    assert {rank for passage in both for rank, *_ in [passage.stages["bm25"]]} == {1, 2, 3}
    assert set(file.search("a", "cat", stages=("tfidf",))[0].stages) == {"tfidf"}
    assert file.search("a", "cat", stages=()) == []
    weighted = file.search("a", "cat dog", fusion="weights", weights={"bm25": 0.0, "tfidf": 2.0})
    assert weighted[0].score == pytest.approx(2.0) and weighted[0].stages["bm25"][2] == 0.0


def test_common_words_are_read_only_where_there_are_no_others(file, monkeypatch):
    monkeypatch.setattr(search, "COMMON_CHUNKS", 4)
    file.add("a", "x", *(f"often {'rare' if number % 7 == 0 else 'some'} {number}" for number in range(20)))
    index = file.indexes
    found = file.search("a", "often rare", stages=("bm25",), top_k=20)
    assert [passage.position for passage in found] == [0, 7, 14] and index._of["a"].common == {"often"}
    assert len(file.search("a", "often", stages=("bm25",), top_k=20)) == 20
    assert "rare" in index._of["a"].postings
    file.add("a", "y", *(f"rare {number}" for number in range(3)))
    assert len(file.search("a", "rare", stages=("bm25",), top_k=20)) == 6, "postings in memory follow the file"


def test_memory_follows_the_file_and_is_bounded(tmp_path):
    draw = random.Random(5)
    with opened(tmp_path) as file, opened(tmp_path, max_bytes=1) as fresh:
        texts: dict[str, str] = {}
        for _ in range(60):
            id = f"d{draw.randrange(12)}"
            if id in texts and draw.random() < 0.4:
                file.write(store.delete, "a", id)
                del texts[id]
            else:
                texts[id] = f"word{draw.randrange(4)} {draw.randrange(10**6)}"
                file.add("a", id, texts[id])
            file.add("b", "only", f"text {draw.random()}")
            question = f"word{draw.randrange(4)}"
            found = file.search("a", question, top_k=20)
            assert {passage.document for passage in found} == {i for i, text in texts.items() if question in text}
            fresh.search("b", "text")  # lets go of a
            assert fresh.search("a", question, top_k=20) == found
            assert list(fresh.indexes._of) == ["a"]
