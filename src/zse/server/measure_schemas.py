"""What the embeddings, rerank and score routes accept."""

from typing import Literal

import msgspec

from zse.scheduler.options import RequestOptions
from zse.server.errors import APIError
from zse.server.fields import (
    Field,
    array,
    boolean,
    integer,
    one_of,
    read_fields,
    string,
    token_id,
    token_ids,
    wrong_type,
)
from zse.server.relevance import EMBEDDING, LIKELIHOOD, METHODS, TASK
from zse.server.schemas import CHAT

MAX_INPUTS = 2048
MAX_DOCUMENTS = 1024
MAX_IDS = 1 << 20
MODEL = {"model": CHAT["model"]}
URGENCY = {name: CHAT[name] for name in ("priority", "deadline_ms")}


class Embeddings(msgspec.Struct):
    """inputs: text or token ids. pooling: "last" or "mean". dimensions: keep the first so many, None: all."""

    model: str | None
    options: RequestOptions
    inputs: list[str | list[int]]
    base64: bool
    pooling: Literal["last", "mean"]
    normalize: bool
    dimensions: int | None


class Pairs(msgspec.Struct):
    """What rerank and score compare: queries[i] with documents[i], or the one query with every document."""

    model: str | None
    options: RequestOptions
    queries: list[str]
    documents: list[str]
    method: str
    pooling: Literal["last", "mean"]
    task: str
    top_n: int | None = None
    return_documents: bool = False
    max_tokens_per_doc: int | None = None


def _input(value, path) -> list:
    """String, strings, token ids, or lists of token ids → list of str | list[int]."""
    if type(value) is str:
        return [string(empty=False)(value, path)]
    if type(value) is not list:
        raise wrong_type(path, "a string or an array", value)
    if not value:
        raise APIError("invalid_value", f"'{path}' must not be empty.", path)
    if type(value[0]) is int:
        return [token_ids(MAX_IDS)(value, path)]
    if type(value[0]) is str:
        return array(string(empty=False), MAX_INPUTS)(value, path)
    if type(value[0]) is list:
        return array(array(token_id, MAX_IDS, 1), MAX_INPUTS)(value, path)
    raise wrong_type(path + "[0]", "a string, an integer or an array of integers", value[0])


def _document(value, path) -> str:
    if type(value) is dict:
        return read_fields({"text": Field(string(empty=False), "", required=True)}, value, path + ".")["text"]
    if type(value) is not str:
        raise wrong_type(path, "a string or an object with a text", value)
    return string(empty=False)(value, path)


def _texts(value, path) -> list[str]:
    if type(value) is str:
        return [string(empty=False)(value, path)]
    return array(string(empty=False), MAX_DOCUMENTS, 1)(value, path)


_POOLING = Field(
    one_of("last", "mean"), "Of which hidden states the vector is made: the last token's, or the mean.", "last"
)

EMBEDDINGS = (
    MODEL
    | {
        "input": Field(_input, "A string, strings, token ids or lists of token ids; up to 2,048.", required=True),
        "encoding_format": Field(one_of("float", "base64"), "base64: of little-endian 32-bit floats.", "float"),
        "dimensions": Field(
            integer(1),
            "Keep the first so many numbers, brought to length 1 again; for models that were trained for it.",
        ),
        "pooling": _POOLING,
        "normalize": Field(boolean, "Bring vectors to length 1.", True),
        "user": Field(string(512), "An identifier of yours; accepted, not used."),
    }
    | URGENCY
)

_PAIRS = {
    "pooling": _POOLING,
    "task": Field(string(1024, empty=False), "The question that method yes_no asks of query and document.", TASK),
    "user": Field(string(512), "An identifier of yours; accepted, not used."),
} | URGENCY

RERANK = (
    MODEL
    | {
        "query": Field(string(empty=False), "What is looked for.", required=True),
        "documents": Field(
            array(_document, MAX_DOCUMENTS, 1), "Strings, or objects with a text; up to 1,024.", required=True
        ),
        "top_n": Field(integer(1), "Answer with the best so many only."),
        "return_documents": Field(boolean, "Answer with the documents' texts, too.", True),
        "max_tokens_per_doc": Field(
            integer(1),
            "Longer documents are cut to so many tokens; without it they are refused where they exceed the context.",
        ),
        "method": Field(one_of(*METHODS), "likelihood, yes_no or embedding; see below.", LIKELIHOOD),
        "rank_fields": Field(None, "Documents are texts."),
    }
    | _PAIRS
)

SCORE = (
    MODEL
    | {
        "text_1": Field(_texts, "A text, or texts.", required=True),
        "text_2": Field(_texts, "A text, or texts: as many as text_1, or any number for one text_1.", required=True),
        "method": Field(
            one_of(*METHODS), "embedding, likelihood or yes_no (text_1 is the query); see rerank.", EMBEDDING
        ),
        "encoding_format": Field(None, "Scores are numbers.", harmless=(None, "float")),
    }
    | _PAIRS
)


def _urgency(values: dict) -> RequestOptions:
    return RequestOptions(priority=values["priority"], deadline_ms=values["deadline_ms"])


def read_embeddings(body: dict) -> Embeddings:
    """Check the body of POST /v1/embeddings. Raises APIError."""
    values = read_fields(EMBEDDINGS, body)
    return Embeddings(
        values["model"],
        _urgency(values),
        values["input"],
        values["encoding_format"] == "base64",
        values["pooling"],
        values["normalize"],
        values["dimensions"],
    )


def read_rerank(body: dict) -> Pairs:
    """Check the body of POST /v1/rerank. Raises APIError."""
    values = read_fields(RERANK, body)
    return _pairs(
        values,
        [values["query"]],
        values["documents"],
        top_n=values["top_n"],
        return_documents=values["return_documents"],
        max_tokens_per_doc=values["max_tokens_per_doc"],
    )


def read_score(body: dict) -> Pairs:
    """Check the body of POST /v1/score. Raises APIError."""
    values = read_fields(SCORE, body)
    one, two = values["text_1"], values["text_2"]
    if len(one) not in (1, len(two)):
        raise APIError(
            "invalid_value",
            f"'text_1' has {len(one)} texts and 'text_2' {len(two)}: give one text_1, or as many as text_2.",
            "text_2",
        )
    return _pairs(values, one, two)


def _pairs(values: dict, queries: list[str], documents: list[str], **more) -> Pairs:
    return Pairs(
        values["model"],
        _urgency(values),
        queries,
        documents,
        values["method"],
        values["pooling"],
        values["task"],
        **more,
    )
