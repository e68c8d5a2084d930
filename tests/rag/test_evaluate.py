"""The fixed set and its measures."""

import zlib

import numpy as np
import pytest

from zse.rag import evaluate, questions
from zse.rag.words import STOP_WORDS, words_of


def test_the_set_has_what_it_says():
    passages, asked = questions.make_set()
    assert len(passages) >= 100 and len(asked) >= 200 and {one.kind for one in passages} == set(questions.KINDS)
    assert len({one.document for one in passages}) == len(passages)
    assert questions.make_set() == (passages, asked) != questions.make_set(17)
    for one in asked:
        assert one.answer in passages[one.passage].chunk.text, one
    shared = [
        len(set(words_of(one.text)) & set(words_of(passages[one.passage].chunk.text)) - STOP_WORDS)
        for one in asked
        if one.is_paraphrase
    ]
    assert len(shared) == len(asked) // 2 and np.mean(shared) < 1.6, "the name, and little more"
    for first, second in zip(passages[::2], passages[1::2], strict=True):
        name = second.document.split("-")[1].capitalize()
        assert first.kind == second.kind and name in first.chunk.text


def bags(texts: list[str]) -> np.ndarray:
    """Vectors that know words, by hashes."""
    out = np.zeros((len(texts), 256), np.float32)
    for row, text in enumerate(texts):
        for word in words_of(text):
            out[row, zlib.crc32(word.encode()) % 256] += 1
    return out + 0.1


def test_every_combination_is_measured():
    first = evaluate.evaluate(
        per_kind=4,
        embed=bags,
        judge=lambda question, texts: [-float(len(text)) for text in texts],
        read=lambda context, question: context,
        count_tokens=len,
        rankers={"nothing": lambda texts: lambda question: []},
    )
    names = [one.name for one in first.found]
    assert len(names) == 9 and names[6:] == ["bm25 + tfidf + dense", "bm25 + tfidf + dense + rerank", "nothing"]
    by_name = dict(zip(names, first.found, strict=True))
    assert by_name["bm25"].recalls[10] > 0.9 and by_name["dense"].recalls[10] > 0.3 and by_name["nothing"].mrr == 0
    assert by_name["bm25"].mrr != by_name["bm25 + tfidf + dense + rerank"].mrr
    plain, zpf = first.forms
    assert plain.kept == zpf.kept == 1.0 and plain.answered == pytest.approx(zpf.answered)
    assert first.saved() > 0.2
    text = evaluate.table(first)
    assert text.count("\n") == 19 and "| bm25 + dense |" in text and f"{100 * first.saved():.1f} %" in text


def test_zpf_saves_a_quarter_of_the_words():
    report = evaluate.evaluate()
    assert report.saved() >= 0.25 and report.forms[0].kept == report.forms[1].kept == 1.0
