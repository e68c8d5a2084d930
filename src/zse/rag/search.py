"""A question → passages of one tenant's documents: BM25, TF-IDF and dense vectors, each of which can be left out, fused
(rag/fuse.py) and explained.

BM25 (k1 = 1.2, b = 0.75) and the cosine of TF-IDF (lnc.ltc: Manning, Raghavan, Schütze, "Introduction to Information Retrieval",
6.4.3) are computed from one reading of the question's postings. Their statistics are the tenant's own."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Literal

import msgspec

from zse.lazy import numpy as np
from zse.rag import store
from zse.rag.documents import Passage
from zse.rag.fuse import Fusion, Ranking, fuse
from zse.rag.index import Indexes, Posting, TenantIndex
from zse.rag.store import Scalar
from zse.rag.words import asked_words

K1, B = 1.2, 0.75
MAX_WORDS = 64  # of a question
# A word of more than a quarter of the chunks (and of 1,000) tells little and has most of the postings: of 10,000 chunks the commonest word
# has 180,000, which take 50 ms to read.
COMMON_SHARE, COMMON_CHUNKS = 4, 1000
Stage = Literal["bm25", "tfidf", "dense"]
STAGES: tuple[Stage, ...] = ("bm25", "tfidf", "dense")


class Filters(msgspec.Struct, frozen=True):
    """None: any. documents: their ids. kinds: of rag/parse/kinds.py. after, before: seconds since 1970, of the version:
    after <= updated < before. metadata: name → value, all of which a document must have."""

    documents: list[str] | None = None
    kinds: list[str] | None = None
    after: float | None = None
    before: float | None = None
    metadata: dict[str, Scalar] | None = None


class SearchQuery(msgspec.Struct):
    """stages: those that take part; "dense" also needs the text's vector. weights: stage → factor of what it gives to the fused
    score, that of fuse.DEFAULT_WEIGHTS where there is none. num_candidates: of each stage, at least top_k."""

    text: str
    top_k: int = 5
    stages: tuple[Stage, ...] = STAGES
    fusion: Fusion = "rrf"
    weights: dict[str, float] = {}
    filters: Filters = Filters()
    num_candidates: int = 100


def search(
    connection: sqlite3.Connection, indexes: Indexes, tenant: str, query: SearchQuery, vector=None, model: str = ""
) -> list[Passage]:
    """At most top_k, the best first. vector f32 [width]: the query's, of the model; None: dense does not take part."""
    with snapshot(connection):
        index = indexes.of(connection, tenant)
        if index is None or not len(index):
            return []
        allowed = _allowed(connection, tenant, query.filters, index)
        most = max(query.num_candidates, query.top_k)
        rankings: dict[str, Ranking] = {}
        if "bm25" in query.stages or "tfidf" in query.stages:
            postings = _postings(connection, index, asked_words(query.text, MAX_WORDS))
            for stage, scored in (("bm25", _bm25), ("tfidf", _tfidf)):
                if stage in query.stages:
                    rankings[stage] = _best(scored(index, postings), allowed, most)
        if "dense" in query.stages and vector is not None:
            block = index.vectors(connection, tenant, model, indexes.scorer)
            wanted = np.asarray(vector, np.float32)
            cosines = block.scores(wanted, len(index), most, allowed is not None)
            rankings["dense"] = _best(cosines, allowed, most, -np.inf)
        indexes.make_room()
        fused = fuse(rankings, query.fusion, query.weights)[: query.top_k]
        return [
            _passage(
                connection, tenant, int(index.ids[one.place]), int(index.documents[one.place]), one.score, one.stages
            )
            for one in fused
        ]


@contextmanager
def snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    """What is read within is one state of the file."""
    if connection.in_transaction:
        yield
        return
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")


def _postings(connection: sqlite3.Connection, index: TenantIndex, words: list[str]) -> list[Posting]:
    """Of the words that some chunk has; of common ones only where the question has no others. The words of other tenants have other
    numbers before them."""
    out = []
    most = max(COMMON_CHUNKS, len(index) // COMMON_SHARE)
    for word in words:
        if word not in index.common and (posting := index.postings.get(word)) is None:
            posting = _read(connection, index, word, most)
            if len(posting.places) == most:
                index.common.add(word)
            else:
                index.keep(word, posting)
        if word not in index.common and posting is not None and len(posting.places):
            out.append(posting)
    if not out:
        out = [_read(connection, index, word, len(index)) for word in words if word in index.common]
    return out


def _read(connection: sqlite3.Connection, index: TenantIndex, word: str, most: int) -> Posting:
    statement = "SELECT doc, count(*) FROM postings WHERE term = ? GROUP BY doc LIMIT ?"
    rows = connection.execute(statement, (f"{index.number}{store.MARK}{word}", most)).fetchall()
    pairs = np.fromiter(chain.from_iterable(rows), np.int64, 2 * len(rows)).reshape(-1, 2)
    return Posting(np.searchsorted(index.ids, pairs[:, 0]), pairs[:, 1].astype(np.float32))


def _bm25(index: TenantIndex, postings: list[Posting]) -> "np.ndarray":
    """f32 [chunks]."""
    scores = np.zeros(len(index), np.float32)
    for places, counts in postings:
        rarity = np.log(1 + (len(index) - len(places) + 0.5) / (len(places) + 0.5))
        length = 1 - B + B * index.num_words[places] / index.mean_words
        scores[places] += (rarity * (K1 + 1) * counts / (counts + K1 * length)).astype(np.float32)
    return scores


def _tfidf(index: TenantIndex, postings: list[Posting]) -> "np.ndarray":
    """f32 [chunks]: cosine of the question's ltc vector with each chunk's lnc vector."""
    scores = np.zeros(len(index), np.float32)
    length = 0.0
    for places, counts in postings:
        rarity = np.log((len(index) + 1) / len(places))
        length += rarity * rarity
        scores[places] += ((1 + np.log(counts)) * rarity).astype(np.float32)
    return scores / (index.norms * np.float32(max(length, 1e-30) ** 0.5) + np.float32(1e-30))


def _best(scores: "np.ndarray", allowed: "np.ndarray | None", most: int, least: float = 0.0) -> Ranking:
    """The places with the highest scores above `least`; of equal ones the first."""
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    if len(scores) > most:
        bound = np.partition(scores, len(scores) - most)[len(scores) - most]
        places = np.flatnonzero(scores >= max(bound, least))
    else:
        places = np.arange(len(scores))
    places = places[scores[places] > least]
    places = places[np.argsort(-scores[places], kind="stable")][:most]
    return Ranking(places, scores[places])


def _allowed(connection: sqlite3.Connection, tenant: str, filters: Filters, index: TenantIndex) -> "np.ndarray | None":
    """Which chunks may be found, bool [chunks]; None: all."""
    if filters == Filters():
        return None
    conditions, values = "", list[str | float]([tenant])
    for column, wanted in (("id", filters.documents), ("kind", filters.kinds)):
        if wanted is not None:
            conditions += f" AND {column} IN (SELECT value FROM json_each(?))"
            values.append(msgspec.json.encode(wanted).decode())
    for condition, bound in (("updated >= ?", filters.after), ("updated < ?", filters.before)):
        if bound is not None:
            conditions += f" AND {condition}"
            values.append(bound)
    rows = {row for (row,) in connection.execute(f"SELECT row FROM documents WHERE tenant = ?{conditions}", values)}
    for name, value in (filters.metadata or {}).items():
        rows &= store.labelled(connection, tenant, name, value)
    return np.isin(index.documents, np.fromiter(rows, np.int64, len(rows)))


def _passage(
    connection: sqlite3.Connection, tenant: str, id: int, document: int, score: float, stages: dict
) -> Passage:
    statement = "SELECT id, version, name FROM documents WHERE tenant = ? AND row = ?"
    name, version, shown = connection.execute(statement, (tenant, document)).fetchone()
    statement = (
        "SELECT position, text, headings, first_page, last_page, num_tokens FROM chunks WHERE tenant = ? AND id = ?"
    )
    position, *columns = connection.execute(statement, (tenant, id)).fetchone()
    return Passage(name, version, shown, position, store.chunk_of(*columns), score, stages)
