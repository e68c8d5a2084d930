"""What the embeddings, rerank and score routes accept."""

from typing import Any, Literal

import msgspec

from zse.engine.messages import POOLINGS
from zse.sampling.fields import (
    EMBEDDINGS,
    RERANK,
    SCORE,
    Array,
    Boolean,
    Custom,
    Field,
    Fields,
    Integer,
    Object,
    OneOf,
    OneOrMore,
    String,
    fields_of,
    refused,
    wrong_type,
)
from zse.scheduler.options import RequestOptions
from zse.server.relevance import METHODS, TASK
from zse.server.requests.completions import KEEP_ALIVE, MODEL, USER, of_route, texts_or_ids

MAX_INPUTS = 2048
MAX_DOCUMENTS = 1024


class Embeddings(msgspec.Struct):
    """input: text or token ids. pooling: of which hidden states. dimensions: keep the first so many, None: all."""

    model: str | None
    options: RequestOptions
    input: list[str | list[int]]
    encoding_format: Literal["float", "base64"]
    pooling: str | None
    normalize: bool
    dimensions: int | None
    truncate: bool
    prompt_name: str | None
    keep_alive: float | None = None


class Pairs(msgspec.Struct):
    """What rerank and score compare: queries[i] with documents[i], or the one query with every document."""

    model: str | None
    options: RequestOptions
    queries: list[str]
    documents: list[str]
    method: str | None
    pooling: str | None
    task: str | None
    truncate: bool
    top_n: int | None = None
    return_documents: bool = False
    max_tokens_per_doc: int | None = None
    keep_alive: float | None = None


TEXT = String(empty=False)
_DOCUMENT = Object({"text": Field(TEXT, required=True)})


def _document(value: Any, path: str) -> str:
    if type(value) is dict:
        return _DOCUMENT.check(value, path)["text"]
    if type(value) is not str:
        raise wrong_type(path, "a string or an object with a text", value)
    return TEXT.check(value, path)


_DOCUMENTS = Array(Custom(_document, {"anyOf": [TEXT.schema, _DOCUMENT.schema]}), MAX_DOCUMENTS, 1)
TEXTS = OneOrMore(TEXT, MAX_DOCUMENTS, 1)
_OPTIONS = of_route(fields_of(RequestOptions), EMBEDDINGS)
_POOLING = Field(
    OneOf(POOLINGS),
    "Of which hidden states the vector is made: the last token's, their mean, the first token's, their greatest numbers. Default: "
    "what the model's files say, else mean of an encoder and last.",
)
_TRUNCATE = Field(Boolean(), "Cut longer texts to the context instead of refusing them.", False)

EMBEDDINGS_FIELDS: Fields = {
    "model": MODEL,
    "input": Field(
        texts_or_ids(MAX_INPUTS, empty=False),
        "A string, strings, token ids or lists of token ids; up to 2,048.",
        required=True,
    ),
    "encoding_format": Field(OneOf(("float", "base64")), "base64: of little-endian 32-bit floats.", "float"),
    "dimensions": Field(
        Integer(1), "Keep the first so many numbers, brought to length 1 again; for models that were trained for it."
    ),
    "pooling": _POOLING,
    "normalize": Field(Boolean(), "Bring vectors to length 1.", True),
    "truncate": _TRUNCATE,
    "prompt_name": Field(
        String(64, empty=False),
        "Which of the model's own prompts (config_sentence_transformers.json) stands before each text: query, say.",
    ),
    "user": USER,
    "keep_alive": KEEP_ALIVE,
} | _OPTIONS

_PAIRS: Fields = {
    "pooling": _POOLING,
    "truncate": _TRUNCATE,
    "task": Field(
        String(1024, empty=False),
        f"The question that method yes_no asks of query and document (default: {TASK}), or the instruction of qwen3_reranker.",
    ),
    "user": USER,
    "keep_alive": KEEP_ALIVE,
}

RERANK_FIELDS: Fields = (
    {
        "model": MODEL,
        "query": Field(TEXT, "What is looked for.", required=True),
        "documents": Field(_DOCUMENTS, "Strings, or objects with a text; up to 1,024.", required=True),
        "top_n": Field(Integer(1), "Answer with the best so many only."),
        "return_documents": Field(Boolean(), "Answer with the documents' texts, too.", True),
        "max_tokens_per_doc": Field(
            Integer(1),
            "Longer documents are cut to so many tokens; without it they are refused where they exceed the context.",
        ),
        "method": Field(OneOf(METHODS), f"{', '.join(METHODS)}; see below. Default: the model's own, else likelihood."),
        "rank_fields": Field(None, "Documents are texts."),
    }
    | _PAIRS
    | of_route(fields_of(RequestOptions), RERANK)
)

SCORE_FIELDS: Fields = (
    {
        "model": MODEL,
        "text_1": Field(TEXTS, "A text, or texts.", required=True),
        "text_2": Field(TEXTS, "A text, or texts: as many as text_1, or any number for one text_1.", required=True),
        "method": Field(
            OneOf(METHODS),
            f"{', '.join(METHODS)} (text_1 is the query); see rerank. Default: the model's own, else embedding.",
        ),
        "encoding_format": Field(None, "Scores are numbers.", harmless=(None, "float")),
    }
    | _PAIRS
    | of_route(fields_of(RequestOptions), SCORE)
)


def _read(fields: Fields, body: dict) -> dict[str, Any]:
    """The checked values, those of RequestOptions as one under "options"."""
    values = Object(fields).check(body, "")
    return values | {"options": RequestOptions(**{name: values[name] for name in _OPTIONS})}


def _struct(kind, values: dict[str, Any]):
    return kind(**{name: values[name] for name in kind.__struct_fields__ if name in values})


def read_embeddings(body: dict) -> Embeddings:
    """Check the body of POST /v1/embeddings. Raises RequestError."""
    return _struct(Embeddings, _read(EMBEDDINGS_FIELDS, body))


def read_rerank(body: dict) -> Pairs:
    """Check the body of POST /v1/rerank. Raises RequestError."""
    values = _read(RERANK_FIELDS, body)
    return _struct(Pairs, values | {"queries": [values["query"]]})


def read_score(body: dict) -> Pairs:
    """Check the body of POST /v1/score. Raises RequestError."""
    values = _read(SCORE_FIELDS, body)
    one, two = values["text_1"], values["text_2"]
    if len(one) not in (1, len(two)):
        message = f"'text_1' has {len(one)} texts and 'text_2' {len(two)}: give one text_1, or as many as text_2."
        raise refused("invalid_value", message, "text_2")
    return _struct(Pairs, values | {"queries": one, "documents": two})
