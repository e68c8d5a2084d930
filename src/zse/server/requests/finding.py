"""What is looked for in documents: the fields of a search, and the field `rag` of a chat request."""

from typing import Any

import msgspec

from zse.rag.parse.kinds import KINDS
from zse.sampling.fields import (
    LABELS,
    Array,
    Custom,
    Field,
    Fields,
    Integer,
    Matching,
    Number,
    Object,
    OneOf,
    OneOrMore,
    String,
    refused,
    wrong_type,
)
from zse.server.requests.image_parts import text_of

STAGES = ("bm25", "tfidf", "dense", "rerank")
MOST_QUERY_CHARACTERS = 8192
MOST_PASSAGES = 50
MOST_NAMES = 256  # documents or kinds of a filter
DEFAULT_STAGES = tuple(stage for stage in STAGES if stage != "rerank")


def _time(value: Any, path: str) -> float:
    if type(value) not in (int, float):
        raise wrong_type(path, "a number of seconds since 1970", value)
    return Number(0, 1e11).check(value, path)


DOCUMENT_ID = Matching("[a-z0-9_-]{1,64}", "1 to 64 of a to z, 0 to 9, '_' and '-'")
KIND = OneOf(tuple(KINDS))
_SECONDS = Custom(_time, Number(0, 1e11).schema)

_FILTERS: Fields = {
    "documents": Field(OneOrMore(DOCUMENT_ID, MOST_NAMES, 1), "Ids: only passages of these documents."),
    "kinds": Field(OneOrMore(KIND, len(KINDS), 1), "Only passages of documents of these kinds."),
    "after": Field(_SECONDS, "Only of documents that were added since; seconds since 1970."),
    "before": Field(_SECONDS, "Only of documents that were added before; seconds since 1970."),
    "metadata": Field(LABELS, "Only of documents whose metadata have these values."),
}
_WEIGHTS = Object({stage: Field(Number(0, 1000)) for stage in STAGES if stage != "rerank"})


def _stages(value: Any, path: str) -> tuple[str, ...]:
    given = Array(OneOf(STAGES), len(STAGES), 1).check(value, path)
    if given == ["rerank"]:
        raise refused("invalid_value", f"'{path}': rerank orders what another stage found; add one.", path)
    return tuple(stage for stage in STAGES if stage in given)


FINDING: Fields = {
    "top_k": Field(Integer(1, MOST_PASSAGES), f"Most passages, up to {MOST_PASSAGES}.", 5),
    "stages": Field(
        Custom(_stages, Array(OneOf(STAGES), len(STAGES), 1).schema),
        f"Which of {', '.join(STAGES)} take part; see docs/retrieval.md. Default: all but rerank, which asks the model about "
        "each of rerank_k passages.",
        DEFAULT_STAGES,
    ),
    "fusion": Field(
        OneOf(("rrf", "weights")),
        "How the stages' results become one order: by their ranks, or by weighted scores.",
        "rrf",
    ),
    "weights": Field(_WEIGHTS, "Of each stage; where none is given bm25 has 1, tfidf 0.5 and dense 0.3."),
    "rerank_k": Field(Integer(1, 64), "Passages that rerank reads.", 16),
    "rerank_by": Field(
        OneOf(("yes_no", "likelihood")),
        "How a language model judges: by its yes or no, which takes one that can judge, or by how likely the passage makes the "
        "query, which small models can too. Rerankers do as they were trained.",
        "yes_no",
    ),
} | _FILTERS
OF_ANSWERS: Fields = {
    "format": Field(
        OneOf(("zpf", "plain")), "How the model reads the passages: zpf, in fewer tokens, or plain, as they are.", "zpf"
    ),
    "max_tokens": Field(Integer(64, 1 << 20), "Most tokens of all passages; the context bounds them too.", 2048),
}
RAG = Object(
    {
        "query": Field(
            String(MOST_QUERY_CHARACTERS, empty=False), "What is looked for; default: the last message of the user."
        )
    }
    | FINDING
    | OF_ANSWERS
)


class Finding(msgspec.Struct, frozen=True):
    """What is looked for, and how. Filters are None where there are none. format, max_tokens: of an answer's passages."""

    query: str
    top_k: int = 5
    stages: tuple[str, ...] = DEFAULT_STAGES
    fusion: str = "rrf"
    weights: dict[str, float] = {}
    rerank_k: int = 16
    rerank_by: str = "yes_no"
    documents: list[str] | None = None
    kinds: list[str] | None = None
    after: float | None = None
    before: float | None = None
    metadata: dict[str, Any] | None = None
    format: str = "zpf"
    max_tokens: int = 2048


def finding_of(values: dict, query: str) -> Finding:
    """What checked values ask for."""
    fields = {name: values[name] for name in Finding.__struct_fields__ if name in values}
    weights = {stage: weight for stage, weight in (values["weights"] or {}).items() if weight is not None}
    return Finding(**fields | {"query": query, "weights": weights})


def rag_of(values: dict, messages: list[dict]) -> Finding:
    """What a checked field `rag` asks for. Raises RequestError where nothing says what to look for."""
    said = [text_of(message["content"]) for message in messages if message["role"] == "user"]
    query = values["query"] or (said[-1].strip()[-MOST_QUERY_CHARACTERS:] if said else "")
    if not query or not said:
        message = "'rag' looks for what the last message of the user says, and there is none."
        raise refused("invalid_value", message, "messages")
    return finding_of(values, query)
