"""Vectors: exact search in int8 against float64, and the memory that follows the file."""

import numpy as np
import pytest
from rag.documents_file import opened

from zse.rag import dense, store
from zse.rag.search import Filters

WIDTH = 72  # not a multiple of a register


@pytest.fixture
def file(tmp_path):
    with opened(tmp_path) as file:
        yield file


def embed(file, vector_of, model="m", limit=7):
    while (group := file.read(store.unembedded, model, limit)) is not None:
        assert file.write(store.put_vectors, model, group, np.array([vector_of(text) for text in group.texts]))


def cone(number: int) -> np.ndarray:
    """As a causal model's: a common part that is longer than what differs, one dimension that is larger than all."""
    draw = np.random.default_rng(number)
    common = np.random.default_rng(10**6).standard_normal(WIDTH) * 20
    vector = common + draw.standard_normal(WIDTH)
    vector[5] += 900 + 30 * draw.standard_normal()
    return (vector * draw.uniform(0.1, 50)).astype(np.float32)


def vector_of(text: str) -> np.ndarray:
    return cone(int(text.split()[1]))


def expected(numbers: list[int], question: np.ndarray) -> np.ndarray:
    """Cosines of standardised vectors, float64."""

    def units(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    all_ = units(np.array([cone(number) for number in numbers], np.float64))
    count = len(numbers)
    mean = all_.sum(0) / (count + dense.PRIOR)
    variance = all_.var(0)
    spread = np.sqrt((count * variance + dense.PRIOR * variance.mean()) / (count + dense.PRIOR))
    return units((all_ - mean) / spread) @ units((units(question.astype(np.float64)) - mean) / spread)


def test_cosines_are_those_of_float64(file):
    numbers = list(range(300))
    for first in range(0, 300, 100):
        file.add("a", f"d{first:03}", *(f"n {number}" for number in numbers[first : first + 100]))
    assert file.search("a", "n", vector=cone(3), model="m", stages=("dense",)) == [], "no vector is there yet"
    assert file.search("a", "17", vector=cone(3), model="m")[0].chunk.text == "n 17", "words are"
    embed(file, vector_of)
    question = cone(1000) + cone(41) * 3
    found = file.search("a", "", vector=question, model="m", stages=("dense",), top_k=300)
    got = np.array([passage.stages["dense"][1] for passage in found])
    order = [int(passage.document[1:]) + passage.position for passage in found]
    assert sorted(order) == numbers
    # Two int8 roundings of vectors of length 1: 1/127 of the largest of 72 values each, at random.
    assert np.abs(got - expected(numbers, question)[order]).max() < 0.02
    for number in (0, 41, 299):
        passage = file.search("a", "", vector=cone(number), model="m", stages=("dense",))[0]
        assert passage.chunk.text == f"n {number}" and passage.score == pytest.approx(0.3 / 61)
        assert passage.stages["dense"][1] == pytest.approx(1, abs=0.02)
    assert file.search("a", "", vector=cone(0), model="another", stages=("dense",)) == []
    assert file.search("a", "", vector=cone(0)[:9], model="m", stages=("dense",)) == []
    only = file.search("a", "", vector=cone(0), model="m", stages=("dense",), filters=Filters(documents=["d200"]))
    assert {passage.document for passage in only} == {"d200"}
    assert file.search("b", "", vector=cone(0), model="m") == []


def test_memory_follows_what_is_added_replaced_and_deleted(file, monkeypatch):
    monkeypatch.setattr(dense, "SEGMENT_ROWS", 32)
    draw, texts = np.random.default_rng(4), {}
    for turn in range(41):
        id = f"d{draw.integers(9)}"
        if id in texts and draw.random() < 0.4:
            file.write(store.delete, "a", id)
            del texts[id]
        else:
            texts[id] = [f"n {100 * turn + number}" for number in range(draw.integers(1, 30))]
            file.add("a", id, *texts[id])
        if turn % 3:
            embed(file, vector_of)
        embedded = {one.id for one in file.read(store.listed, "a") if one.num_embedded}
        for id in texts:
            number = int(texts[id][-1].split()[1])
            found = file.search("a", "", vector=cone(number), model="m", stages=("dense",), top_k=1)
            assert bool(found and found[0].chunk.text == texts[id][-1]) == (id in embedded)
    block = file.indexes._of["a"].dense
    assert sum(map(len, texts.values())) <= len(block) <= 2 * sum(map(len, texts.values()))


def test_an_approximate_index_finds_nearly_the_same(tmp_path):
    pytest.importorskip("usearch", reason="the extra `ann` is not installed")
    with opened(tmp_path, ann_from=100) as near, opened(tmp_path) as exact:
        near.add("a", "x", *(f"n {number}" for number in range(2000)))
        embed(near, vector_of, limit=500)
        same = 0
        for number in range(20):
            question = cone(number) + cone(number + 7)
            options = {"vector": question, "model": "m", "stages": ("dense",), "top_k": 10}
            found = [{one.position for one in file.search("a", "", **options)} for file in (near, exact)]
            same += len(found[0] & found[1])
        assert near.indexes._of["a"].dense._near is not None and same >= 170, same
