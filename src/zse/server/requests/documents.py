"""What the routes of documents accept, and the field `rag` of a chat request."""

import base64
import binascii
import re
from typing import Any

import msgspec

from zse.rag.parse.kinds import KINDS
from zse.sampling.fields import (
    Array,
    Boolean,
    Custom,
    Field,
    Fields,
    Integer,
    Number,
    Object,
    OneOf,
    OneOrMore,
    String,
    expect,
    refused,
    wrong_type,
)
from zse.server.requests.completions import METADATA, MODEL, read_chat
from zse.server.requests.queries import PAGE

STAGES = ("bm25", "tfidf", "dense", "rerank")
MOST_QUERY_CHARACTERS = 8192
MOST_PASSAGES = 50
MOST_NAMES = 256  # documents or kinds of a filter
LEAST_CHUNK, MOST_CHUNK, CHUNK, OVERLAP = 32, 4096, 256, 32  # tokens
DEFAULT_STAGES = tuple(stage for stage in STAGES if stage != "rerank")
ID = re.compile(r"[a-z0-9_-]{1,64}")
_ID_SCHEMA = {"type": "string", "pattern": "^[a-z0-9_-]{1,64}$"}


def _id(value: Any, path: str) -> str:
    if not ID.fullmatch(expect(str, value, path)):
        raise refused("invalid_value", f"'{path}' must be 1 to 64 of a to z, 0 to 9, '_' and '-'.", path)
    return value


def _name(value: Any, path: str) -> str:
    """A name is shown and never a path: control characters and what turns the direction of text are refused."""
    String(255, empty=False).check(value, path)
    if not value.isprintable() or any("\u202a" <= letter <= "\u202e" or "\u2066" <= letter <= "\u2069" for letter in value):
        raise refused("invalid_value", f"'{path}' must be printable text.", path)
    return value


def _data(value: Any, path: str) -> bytes:
    try:
        return base64.b64decode(expect(str, value, path), validate=True)
    except (binascii.Error, ValueError):
        raise refused("invalid_value", f"'{path}' is not base64.", path) from None


def _time(value: Any, path: str) -> float:
    if type(value) not in (int, float):
        raise wrong_type(path, "a number of seconds since 1970", value)
    return Number(0, 1e11).check(value, path)


DOCUMENT_ID = Custom(_id, _ID_SCHEMA)
KIND = OneOf(tuple(KINDS))
_SECONDS = Custom(_time, Number(0, 1e11).schema)

# Of an upload: what JSON holds, and what stands in the query or in the parts of a form where the body is the file.
OPTIONS: Fields = {
    "name": Field(Custom(_name, String(255, empty=False).schema), "Its name, such as report.pdf; shown with what is cited of it."),
    "id": Field(DOCUMENT_ID, "Its id; that of a document that is there makes a new version of it. Default: a new one."),
    "kind": Field(KIND, f"{', '.join(KINDS)}. Default: by the name, the media type and the content."),
    "password": Field(String(1024, empty=False), "Of an encrypted file; kept nowhere."),
    "chunk_tokens": Field(Integer(LEAST_CHUNK, MOST_CHUNK), "Most tokens of a passage.", CHUNK),
    "overlap_tokens": Field(
        Integer(0, MOST_CHUNK // 2), "Tokens that a passage repeats of the one before it; less than half of chunk_tokens.", OVERLAP
    ),
    "model": Field(MODEL.kind, "Whose tokens are counted and whose vectors are made; left out: the first one."),
    "wait": Field(
        Boolean(),
        "true answers when the document can be searched, or with what is wrong with it; false at once, GET tells the status.",
        True,
    ),
}
UPLOAD: Fields = {
    "text": Field(String(empty=False), "The document, where it is text."),
    "data": Field(Custom(_data, {"type": "string", "contentEncoding": "base64"}), "The file in base64; of text and data give one."),
    "metadata": Field(METADATA.kind, "Up to 16 strings of yours, by which a search can be narrowed."),
} | OPTIONS
LISTED: Fields = PAGE

_FILTERS: Fields = {
    "documents": Field(OneOrMore(DOCUMENT_ID, MOST_NAMES, 1), "Ids: only passages of these documents."),
    "kinds": Field(OneOrMore(KIND, len(KINDS), 1), "Only passages of documents of these kinds."),
    "after": Field(_SECONDS, "Only of documents that were added since; seconds since 1970."),
    "before": Field(_SECONDS, "Only of documents that were added before; seconds since 1970."),
    "metadata": Field(METADATA.kind, "Only of documents whose metadata have these values."),
}
_WEIGHTS = Object({stage: Field(Number(0, 1000), default=1.0) for stage in STAGES if stage != "rerank"})


def _stages(value: Any, path: str) -> tuple[str, ...]:
    given = Array(OneOf(STAGES), len(STAGES), 1).check(value, path)
    if given == ["rerank"]:
        raise refused("invalid_value", f"'{path}': rerank orders what another stage found; add one.", path)
    return tuple(stage for stage in STAGES if stage in given)


_FINDING: Fields = {
    "top_k": Field(Integer(1, MOST_PASSAGES), f"Most passages, up to {MOST_PASSAGES}.", 5),
    "stages": Field(
        Custom(_stages, Array(OneOf(STAGES), len(STAGES), 1).schema),
        f"Which of {', '.join(STAGES)} take part; see docs/retrieval.md. Default: all but rerank, which asks the model about "
        "each of rerank_k passages.",
        DEFAULT_STAGES,
    ),
    "fusion": Field(
        OneOf(("rrf", "weights")), "How the stages' results become one order: by their ranks, or by weighted scores.", "rrf"
    ),
    "weights": Field(_WEIGHTS, "Of each stage; 1 where none is given."),
    "rerank_k": Field(Integer(1, 64), "Passages that rerank reads.", 16),
} | _FILTERS
SEARCH: Fields = {
    "query": Field(String(MOST_QUERY_CHARACTERS, empty=False), "What is looked for.", required=True),
    "model": MODEL,
} | _FINDING
_OF_ANSWERS: Fields = {
    "format": Field(
        OneOf(("zpf", "plain")), "How the model reads the passages: zpf, in fewer tokens, or plain, as they are.", "zpf"
    ),
    "max_tokens": Field(Integer(64, 1 << 20), "Most tokens of all passages; the context bounds them too.", 2048),
}
_RAG = Object(
    {"query": Field(String(MOST_QUERY_CHARACTERS, empty=False), "What is looked for; default: the last message of the user.")}
    | _FINDING
    | _OF_ANSWERS
)
ASK: Fields = (
    {
        "question": Field(String(MOST_QUERY_CHARACTERS, empty=False), "What is asked.", required=True),
        "model": MODEL,
        "stream": Field(Boolean(), "Answer as server-sent events, chunks as of chat completions.", False),
        "max_answer_tokens": Field(Integer(1), "Most tokens of the answer."),
        "temperature": Field(Number(0, 2), "As of chat completions."),
        "seed": Field(Integer(), "As of chat completions."),
    }
    | _FINDING
    | _OF_ANSWERS
)


class Finding(msgspec.Struct, frozen=True):
    """What is looked for, and how. Filters are None where there are none. format, max_tokens: of an answer's passages."""

    query: str
    top_k: int = 5
    stages: tuple[str, ...] = DEFAULT_STAGES
    fusion: str = "rrf"
    weights: dict[str, float] | None = None
    rerank_k: int = 16
    documents: list[str] | None = None
    kinds: list[str] | None = None
    after: float | None = None
    before: float | None = None
    metadata: dict[str, str] | None = None
    format: str = "zpf"
    max_tokens: int = 2048


def _finding(values: dict, query: str, path: str) -> Finding:
    if values["weights"] is not None and values["fusion"] != "weights":
        path = path + "weights"
        raise refused("invalid_value", f"'{path}' needs 'fusion': \"weights\".", path)
    fields = {name: values[name] for name in Finding.__struct_fields__ if name in values}
    return Finding(**fields | {"query": query})


def read_search(body: dict) -> tuple[Finding, str | None]:
    """Check the body of POST /v1/rag/search: what is looked for, and the model. Raises RequestError."""
    values = Object(SEARCH).check(body, "")
    return _finding(values, values["query"], ""), values["model"]


def check_rag(value: Any, path: str) -> dict:
    """Check the field `rag` of a chat request. Raises RequestError."""
    values = _RAG.check(value, path)
    _finding(values, "", path + ".")
    return values


def rag_of(values: dict, messages: list[dict]) -> Finding:
    """What a checked field `rag` asks for. Raises RequestError where nothing says what to look for."""
    said = [message["content"] for message in messages if message["role"] == "user"]
    query = values["query"] or (said[-1].strip()[-MOST_QUERY_CHARACTERS:] if said else "")
    if not query or not said:
        message = "'rag' looks for what the last message of the user says, and there is none."
        raise refused("invalid_value", message, "messages")
    return _finding(values, query, "rag.")


def rag_schema() -> dict:
    """JSON schema of the field `rag`."""
    return _RAG.schema


def read_ask(body: dict) -> Any:
    """The chat request that the body of POST /v1/rag/ask means. Raises RequestError."""
    values = Object(ASK).check(body, "")
    chat = {name: values[name] for name in ("model", "stream", "temperature", "seed") if values[name] is not None}
    chat |= {"messages": [{"role": "user", "content": values["question"]}]}
    if values["max_answer_tokens"] is not None:
        chat["max_tokens"] = values["max_answer_tokens"]
    chat["rag"] = {name: values[name] for name in _RAG.fields if values.get(name) is not None}
    if "weights" in chat["rag"] and values["fusion"] != "weights":
        raise refused("invalid_value", "'weights' needs 'fusion': \"weights\".", "weights")
    return read_chat(chat)


class Upload(msgspec.Struct):
    """A document that was sent, without its bytes. media_type: of the body that was the file, "": unknown."""

    name: str
    id: str | None = None
    kind: str | None = None
    password: str | None = None
    chunk_tokens: int = CHUNK
    overlap_tokens: int = OVERLAP
    model: str | None = None
    wait: bool = True
    metadata: dict[str, str] = {}
    media_type: str = ""


def _upload(values: dict, media_type: str = "") -> Upload:
    if 2 * values["overlap_tokens"] >= values["chunk_tokens"]:
        message = "'overlap_tokens' must be less than half of 'chunk_tokens'."
        raise refused("out_of_range", message, "overlap_tokens")
    if values["password"] is not None and not values["wait"]:
        raise refused("invalid_value", "'password' goes with 'wait': true: it is kept nowhere.", "password")
    fields = {name: values[name] for name in Upload.__struct_fields__ if values.get(name) is not None}
    return Upload(**{"name": values["id"] or "document"} | fields | {"media_type": media_type})


def read_upload(body: dict) -> tuple[Upload, bytes]:
    """Check the JSON body of POST /v1/rag/documents: (what it says, the file). Raises RequestError."""
    values = Object(UPLOAD).check(body, "")
    if (values["text"] is None) == (values["data"] is None):
        raise refused("invalid_value", "Give 'text' or 'data'.", "text")
    data = values["data"]
    if data is None:
        try:
            data = values["text"].encode()
        except UnicodeEncodeError:
            raise refused("invalid_value", "'text' is not Unicode.", "text") from None
    upload = _upload(values)
    if values["text"] is not None and upload.kind is None and "." not in upload.name:
        upload.kind = "text"
    return upload, data


def read_options(values: dict[str, Any], media_type: str) -> Upload:
    """The same of a file that is the body, or a part of a form, from the checked OPTIONS."""
    return _upload(values | {"metadata": values.get("metadata") or {}}, media_type)
