"""How well search finds and what ZPF saves, on the fixed set: recall@k and MRR of every combination of stages, tokens of both forms and
whether the answers are still in them.

    report = evaluate(embed=lambda texts: llm.embed(texts, pooling="mean"), count_tokens=lambda text: len(tokenizer.encode(text)))
    print(table(report))

Dense, rerank, tokens and reading take callables, so that the same runs against a server or an offline `zse.LLM`."""

import re
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from zse.lazy import hashlib
from zse.rag import compress, schema, store
from zse.rag.documents import Passage
from zse.rag.fuse import reranked
from zse.rag.index import Indexes
from zse.rag.questions import DEFAULT_SEED, MadePassage, MadeQuestion, make_set
from zse.rag.search import SearchQuery, Stage, search
from zse.rag.words import words_of

TENANT, MODEL = "evaluation", "evaluated"
DEPTH = 10  # passages that MRR looks at
RERANKED = 10  # passages of a question that the judge reads

Embed = Callable[[list[str]], "Sequence[Sequence[float]]"]  # texts → a vector each, f32 [n, width]
Judge = Callable[[str, list[str]], Sequence[float]]  # question, passages → a score each, the higher the better
Read = Callable[[str, str], str]  # context, question → the answer
Ranker = Callable[
    [list[str]], Callable[[str], Sequence[int]]
]  # passages → (question → indexes of passages, the best first)


class Quality(NamedTuple):
    """name: stages, or another ranker. recalls: k → share of questions whose passage is among the first k. mrr: mean of 1 / rank, 0
    beyond DEPTH."""

    name: str
    recalls: dict[int, float]
    mrr: float


class Forms(NamedTuple):
    """Of the passages that the last combination of stages found. tokens, in all. kept: share of questions whose answer stands in the
    passage that it was made of, where that was found. answered: share of those that the reader was asked which it answered, -1 without a
    reader."""

    name: str
    tokens: int
    kept: float
    answered: float


class Report(NamedTuple):
    seed: int
    num_passages: int
    num_questions: int
    found: list[Quality]
    forms: list[Forms]

    def saved(self) -> float:
        """Share of the plain form's tokens that ZPF does without."""
        return 1 - self.forms[1].tokens / max(self.forms[0].tokens, 1)


def evaluate(
    *,
    seed: int = DEFAULT_SEED,
    per_kind: int = 16,
    embed: Embed | None = None,
    judge: Judge | None = None,
    read: Read | None = None,
    count_tokens: Callable[[str], int] | None = None,
    rankers: Mapping[str, Ranker] | None = None,
    num_read: int = 64,
    top_k: int = 5,
    fusion: str = "rrf",
    weights: Mapping[str, float] | None = None,
) -> Report:
    """count_tokens: None: words are counted. num_read: questions that the reader is asked, evenly of all.
    rankers: others to stand beside ours."""
    passages, questions = make_set(seed, per_kind)
    connection = opened(passages)
    vectors: list = [None] * len(questions)
    if embed is not None:
        _embed_all(connection, embed)
        vectors = list(embed([question.text for question in questions]))
    stages: tuple[Stage, ...] = ("bm25", "tfidf", "dense") if embed else ("bm25", "tfidf")
    indexes, found, last = Indexes(), [], list[list[Passage]]()
    for some in _combinations(stages):
        last = []
        for question, vector in zip(questions, vectors, strict=True):
            query = SearchQuery(question.text, DEPTH, some, fusion, dict(weights or {}))  # type: ignore[arg-type]
            last.append(search(connection, indexes, TENANT, query, vector, MODEL))
        found.append(_measured(" + ".join(some), map(_documents, last), passages, questions))
    if judge is not None:
        last = [_judged(judge, question.text, some) for question, some in zip(questions, last, strict=True)]
        found.append(_measured(f"{found[-1].name} + rerank", map(_documents, last), passages, questions))
    for name, ranker in (rankers or {}).items():
        rank = ranker([searched_text(passage) for passage in passages])
        ranked = [[passages[index].document for index in rank(question.text)[:DEPTH]] for question in questions]
        found.append(_measured(name, ranked, passages, questions))
    tops = [some[:top_k] for some in last]
    forms = [
        _form("plain", "\n\n", [compress.plain(some) for some in tops], tops, passages, questions, count_tokens, read, num_read),
        _form("ZPF", "\n", [compress.zpf(some, question.text) for some, question in zip(tops, questions, strict=True)],
              tops, passages, questions, count_tokens, read, num_read),
    ]  # fmt: skip
    return Report(seed, len(passages), len(questions), found, forms)


def table(report: Report) -> str:
    """For a terminal, and as Markdown."""
    cutoffs = sorted(report.found[0].recalls)
    lines = [f"{report.num_questions} questions on {report.num_passages} passages (seed {report.seed})", ""]
    lines += [
        "| stages | " + " | ".join(f"recall@{k}" for k in cutoffs) + " | MRR |",
        "|---" * (len(cutoffs) + 2) + "|",
    ]
    for one in report.found:
        recalls = " | ".join(f"{one.recalls[k]:.3f}" for k in cutoffs)
        lines.append(f"| {one.name} | {recalls} | {one.mrr:.3f} |")
    lines += ["", "| form | tokens a question | answer kept | answered |", "|---" * 4 + "|"]
    for form in report.forms:
        answered = f"{form.answered:.3f}" if form.answered >= 0 else "–"
        mean = form.tokens / report.num_questions
        lines.append(f"| {form.name} | {mean:.0f} | {form.kept:.3f} | {answered} |")
    return "\n".join([*lines, "", f"ZPF takes {100 * report.saved():.1f} % fewer tokens than the plain form."])


def opened(passages: Sequence[MadePassage]) -> sqlite3.Connection:
    """A file in memory that has them, each a document."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    for step in schema.MIGRATIONS:
        for statement in step:
            connection.execute(statement)
    connection.execute("BEGIN")
    for passage in passages:
        digest = hashlib.sha256(passage.document.encode()).digest()
        name = f"{passage.document}.txt"
        new = store.NewDocument(passage.document, name, passage.kind, passage.title, digest, "", 0, 0, [passage.chunk])
        store.add(connection, TENANT, new, 0.0)
    connection.execute("COMMIT")
    return connection


def searched_text(passage: MadePassage) -> str:
    """What the index has of it."""
    return " ".join([passage.title, f"{passage.document}.txt", *passage.chunk.headings, passage.chunk.text])


def _embed_all(connection: sqlite3.Connection, embed: Embed) -> None:
    while (group := store.unembedded(connection, MODEL, 64)) is not None:
        store.put_vectors(connection, MODEL, group, embed(group.texts))


def _combinations(stages: tuple[Stage, ...]) -> list[tuple[Stage, ...]]:
    return [some for count in range(1, len(stages) + 1) for some in combinations(stages, count)]


def _documents(passages: list[Passage]) -> list[str]:
    return [passage.document for passage in passages]


def _judged(judge: Judge, question: str, passages: list[Passage]) -> list[Passage]:
    some = passages[:RERANKED]
    return reranked(passages, judge(question, [passage.chunk.text for passage in some]), DEPTH)


def _measured(
    name: str, ranked: Iterable[list[str]], passages: Sequence[MadePassage], questions: Sequence[MadeQuestion]
) -> Quality:
    ranks = []
    for documents, question in zip(ranked, questions, strict=True):
        right = passages[question.passage].document
        ranks.append(documents.index(right) + 1 if right in documents else 0)
    recalls = {k: sum(0 < rank <= k for rank in ranks) / len(ranks) for k in (1, 3, 5, 10)}
    return Quality(name, recalls, sum(1 / rank for rank in ranks if rank) / len(ranks))


def plain_words(text: str) -> str:
    """As answers are compared: lower case, without articles and punctuation (Rajpurkar et al., "SQuAD", 2016)."""
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", re.sub(r"[^\w\s]", " ", text.lower())).split())


def _holds(text: str, answer: str) -> bool:
    return f" {plain_words(answer)} " in f" {plain_words(text)} "


def _form(
    name: str,
    separator: str,
    parts: list[list[str]],
    tops: list[list[Passage]],
    passages: Sequence[MadePassage],
    questions: Sequence[MadeQuestion],
    count_tokens: Callable[[str], int] | None,
    read: Read | None,
    num_read: int,
) -> Forms:
    """The measures of one form; parts[question][passage]: text."""
    tokens = kept = num_found = 0
    readings = []
    step = max(1, len(questions) // num_read)
    for index, (some, top, question) in enumerate(zip(parts, tops, questions, strict=True)):
        context = separator.join(some)
        tokens += count_tokens(context) if count_tokens else len(words_of(context))
        right = passages[question.passage].document
        for text, passage in zip(some, top, strict=True):
            if passage.document == right:
                num_found, kept = num_found + 1, kept + _holds(text, question.answer)
        if read is not None and index % step == 0:
            readings.append(_holds(read(context, question.text), question.answer))
    answered = sum(readings) / len(readings) if readings else -1.0
    return Forms(name, tokens, kept / max(num_found, 1), answered)
