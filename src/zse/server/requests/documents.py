"""What the routes of documents accept."""

import base64
import binascii
from typing import Any

import msgspec

from zse.rag.chunk import DEFAULT_TOKENS, MAX_TOKENS, MIN_TOKENS
from zse.sampling.fields import LABELS, Boolean, Custom, Field, Fields, Integer, Number, Object, String, expect, refused
from zse.server.requests.completions import MODEL, read_chat_of
from zse.server.requests.finding import (
    DOCUMENT_ID,
    FINDING,
    KIND,
    MOST_QUERY_CHARACTERS,
    OF_ANSWERS,
    RAG,
    Finding,
    finding_of,
)
from zse.server.requests.queries import PAGE
from zse.server.uploads import FILE


def _name(value: Any, path: str) -> str:
    """A name is shown and never a path: control characters and what turns the direction of text are refused."""
    String(255, empty=False).check(value, path)
    if not value.isprintable() or any(
        "\u202a" <= letter <= "\u202e" or "\u2066" <= letter <= "\u2069" for letter in value
    ):
        raise refused("invalid_value", f"'{path}' must be printable text.", path)
    return value


def _data(value: Any, path: str) -> bytes:
    try:
        return base64.b64decode(expect(str, value, path), validate=True)
    except (binascii.Error, ValueError):
        raise refused("invalid_value", f"'{path}' is not base64.", path) from None


NAME = Custom(_name, String(255, empty=False).schema)
# Of an upload: what JSON holds, and what stands in the query or in the parts of a form where the body is the file.
OPTIONS: Fields = {
    "name": Field(NAME, "Its name, such as report.pdf; shown with what is cited of it."),
    "id": Field(DOCUMENT_ID, "Its id; that of a document that is there makes a new version of it. Default: a new one."),
    "kind": Field(KIND, "Of the kinds in docs/retrieval.md. Default: by the name, the media type and the content."),
    "password": Field(String(1024, empty=False), "Of an encrypted file; kept nowhere."),
    "chunk_tokens": Field(Integer(MIN_TOKENS, MAX_TOKENS), "Most tokens of a passage.", DEFAULT_TOKENS),
    "overlap_tokens": Field(
        Integer(0, MAX_TOKENS // 2),
        "Tokens that a passage repeats of the one before it; less than half of chunk_tokens. Default: an eighth of it.",
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
    "data": Field(
        Custom(_data, {"type": "string", "contentEncoding": "base64"}), "The file in base64; of text and data give one."
    ),
    "metadata": Field(LABELS, "Up to 16 strings of yours, by which a search can be narrowed."),
} | OPTIONS
FORM: Fields = {"file": Field(FILE, "The file.", required=True), "metadata": UPLOAD["metadata"]} | OPTIONS
LISTED: Fields = {
    "limit": PAGE["limit"],
    "after": Field(DOCUMENT_ID, "The id behind which to go on; documents are listed in the order of their ids."),
}

SEARCH: Fields = {
    "query": Field(String(MOST_QUERY_CHARACTERS, empty=False), "What is looked for.", required=True),
    "model": MODEL,
} | FINDING
ASK: Fields = (
    {
        "question": Field(String(MOST_QUERY_CHARACTERS, empty=False), "What is asked.", required=True),
        "model": MODEL,
        "stream": Field(Boolean(), "Answer as server-sent events, chunks as of chat completions.", False),
        "max_answer_tokens": Field(Integer(1), "Most tokens of the answer."),
        "temperature": Field(Number(0, 2), "As of chat completions."),
        "seed": Field(Integer(), "As of chat completions."),
    }
    | FINDING
    | OF_ANSWERS
)


def read_search(body: dict) -> tuple[Finding, str | None]:
    """Check the body of POST /v1/rag/search: what is looked for, and the model. Raises RequestError."""
    values = Object(SEARCH).check(body, "")
    return finding_of(values, values["query"]), values["model"]


def read_ask(body: dict) -> Any:
    """The chat request that the body of POST /v1/rag/ask means. Raises RequestError."""
    values = Object(ASK).check(body, "")
    chat = {name: values[name] for name in ("model", "stream", "temperature", "seed") if values[name] is not None}
    chat |= {"messages": [{"role": "user", "content": values["question"]}]}
    if values["max_answer_tokens"] is not None:
        chat["max_tokens"] = values["max_answer_tokens"]
    chat["rag"] = {name: values[name] for name in RAG.fields if values.get(name) is not None}
    return read_chat_of(chat, "", "", "question")


class Upload(msgspec.Struct):
    """A document that was sent, without its bytes. media_type: of the body that was the file, "": unknown."""

    name: str
    id: str | None = None
    kind: str | None = None
    password: str | None = None
    chunk_tokens: int = DEFAULT_TOKENS
    overlap_tokens: int | None = None
    model: str | None = None
    wait: bool = True
    metadata: dict[str, str] = {}
    media_type: str = ""


def _upload(values: dict, media_type: str = "") -> Upload:
    if 2 * (values["overlap_tokens"] or 0) >= values["chunk_tokens"]:
        message = "'overlap_tokens' must be less than half of 'chunk_tokens'."
        raise refused("out_of_range", message, "overlap_tokens")
    if values["password"] is not None and not values["wait"]:
        raise refused("invalid_value", "'password' goes with 'wait': true: it is kept nowhere.", "password")
    fields: dict[str, Any] = {name: values[name] for name in Upload.__struct_fields__ if values.get(name) is not None}
    fields.setdefault("name", values["id"] or "document")
    return Upload(**fields, media_type=media_type)


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
