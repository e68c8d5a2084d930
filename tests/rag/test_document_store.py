"""Documents in SQLite: versions, duplicates, quotas, and that one tenant has nothing of another's."""

import numpy as np
import pytest
from rag.documents_file import document, opened

from zse.rag import store
from zse.rag.documents import DocumentError


@pytest.fixture
def file(tmp_path):
    with opened(tmp_path) as file:
        yield file


def count(file, table: str) -> int:
    return file.read(lambda c: c.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def test_a_document_is_stored_listed_replaced_and_deleted(file):
    first = file.add("a", "x", "one", "two", now=5.0, metadata={"team": "red", "year": 2024}, warnings=["page 3"])
    assert first.outcome == "created"
    stored = file.read(store.find, "a", "x")
    assert stored == first.document
    assert (stored.version, stored.name, stored.num_chunks, stored.num_tokens) == (1, "x.txt", 2, 2)
    assert (stored.created, stored.updated, stored.warnings) == (5.0, 5.0, ["page 3"])
    assert stored.metadata == {"team": "red", "year": 2024}
    assert [chunk.text for chunk in file.read(store.chunks, "a", "x")] == ["one", "two"]
    assert [chunk.text for chunk in file.read(store.chunks, "a", "x", first=1)] == ["two"]

    second = file.add("a", "x", "three", now=9.0)
    assert (second.outcome, second.document.version, second.document.created) == ("replaced", 2, 5.0)
    assert [chunk.text for chunk in file.read(store.chunks, "a", "x")] == ["three"]
    assert file.search("a", "one") == [] and file.search("a", "three")[0].version == 2

    for id in ("w", "y", "z"):
        file.add("a", id, f"text of {id}")
    assert [one.id for one in file.read(store.listed, "a", limit=2)] == ["w", "x"]
    assert [one.id for one in file.read(store.listed, "a", after="x")] == ["y", "z"]
    for id in "wxyz":
        assert file.write(store.delete, "a", id) and not file.write(store.delete, "a", id)
    assert file.read(store.used_bytes, "a") == 0
    for table in ("documents", "chunks", "words", "labels", "vectors", "postings"):
        assert count(file, table) == 0, table


def test_the_same_bytes_are_stored_once(file):
    file.add("a", "x", "same")
    assert file.add("a", "x", "same").outcome == "unchanged"
    twin = file.add("a", "y", "same")
    assert (twin.outcome, twin.document.id) == ("duplicate", "x") and file.read(store.find, "a", "y") is None
    assert file.read(store.find_content, "a", twin.document.digest).id == "x"
    assert file.add("a", "x", "same", options="other chunks").outcome == "replaced"
    file.add("a", "z", "other")
    assert file.add("a", "z", "same").outcome == "replaced", "an id that is there gets what it was sent"
    assert file.add("b", "y", "same").outcome == "created", "another tenant's"


def test_a_tenant_has_a_quota(file):
    file.add("a", "x", "t" * 400)
    with pytest.raises(DocumentError, match="at most|may take 1000 bytes") as wrong:
        file.write(store.add, "a", document("y", "u" * 900), 1.0, 1000)
    assert wrong.value.code == "request_too_large"
    assert file.read(store.find, "a", "y") is None and count(file, "chunks") == 1
    file.write(store.add, "a", document("x", "v" * 900), 1.0, 1000)  # its old version does not count
    file.write(store.add, "b", document("y", "u" * 900), 1.0, 1000)
    assert 900 < file.read(store.used_bytes, "a") < 1000


def test_tenants_see_nothing_of_each_other(file):
    file.add("a", "x", "the canary sings")
    file.add("b", "y", "quiet words", "and more of them")
    assert [file.read(function, "b", "x") for function in (store.find, store.chunks)] == [None, []]
    assert not file.write(store.delete, "b", "x")
    assert file.search("b", "canary") == [] == file.search("c", "canary")
    alone = file.search("b", "quiet")
    for number in range(20):
        file.add("a", f"d{number}", f"quiet {number}")
    assert file.search("b", "quiet") == alone, "another tenant's words change no score"


def vectors_of(group, width=8):
    return np.random.default_rng(len(group.texts)).standard_normal((len(group.texts), width)).astype(np.float32)


def test_vectors_come_later_and_only_for_the_version_they_are_of(file):
    file.add("a", "x", *(f"text {number}" for number in range(5)))
    file.add("b", "y", "one")
    group = file.read(store.unembedded, "m", 3)
    assert (group.tenant, group.document, group.first, len(group.texts)) == ("a", "x", 0, 3)
    assert file.write(store.put_vectors, "m", group, vectors_of(group))
    assert not file.write(store.put_vectors, "m", group, vectors_of(group)), "twice"
    later = file.read(store.unembedded, "m", 3)
    assert (later.document, later.first, len(later.texts)) == ("x", 3, 2)
    file.add("a", "x", "new text")
    assert not file.write(store.put_vectors, "m", later, vectors_of(later)), "of a version that is gone"
    assert count(file, "vectors") == 0
    done = []
    while (group := file.read(store.unembedded, "m", 3)) is not None:
        assert file.write(store.put_vectors, "m", group, vectors_of(group))
        done.append(group.document)
    assert sorted(done) == ["x", "y"] and file.read(store.find, "a", "x").num_embedded == 1
    other = file.read(store.unembedded, "n", 3)
    assert (other.first, other.document) == (0, "x"), "another model's are made anew"
    assert file.write(store.put_vectors, "n", other, vectors_of(other)) and count(file, "vectors") == 2
    assert file.read(store.unembedded, "n", 3, "a").tenant == "b"
