"""zse rag: documents of a server that runs: add them, search them, ask about them."""

import hashlib
import json
import os
import re
import sys
from urllib.parse import urlencode

from zse.cli import rag_bench
from zse.cli.parser import JSON, Amount, Kinds, Many, arg, option
from zse.cli.remote import server_of
from zse.cli.terminal import notice, printable, reply_writer, size, table
from zse.errors import ConfigError, ZSEError
from zse.rag.parse import kinds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

EPILOG = """examples:
  zse rag add report.pdf notes/               a folder: what it holds, of the kinds that are read
  zse rag ls
  zse rag search "notice period" --top-k 3
  zse rag ask "How long is the notice period?"
  zse rag rm report-pdf-1f0c7a9d
  zse rag bench smollm2                       on this machine, without a server

A file that was added before becomes a new version of its document; one that did not change stays as it is."""

MOST_FILES = 10_000  # of one command
SERVER = option("--server --url", "URL", "its address (default: the server of this user that runs here)", dest="server")
KEY = option("--api-key", "KEY", "a key, where the server asks for one (default: ZSE_API_KEY)")
MODEL = option("--model", "NAME", "of the server's models (default: its first)")
EXTENSIONS = {extension for kind in kinds.KINDS.values() for extension in kind.extensions}
STAGES = ("bm25", "tfidf", "dense", "rerank")
_WHERE = (SERVER, KEY, JSON)
_HOW = (
    MODEL,
    option("--top-k", Amount(int, 1, 50), "passages", 5),
    option("--stages", "NAME,…", f"of {', '.join(STAGES)} (default: all but rerank)"),
    option("--document", Many("ID"), "only in this one; may be repeated"),
)
ARGUMENTS = (
    Kinds(
        {
            "add": (
                "add files, and the files of folders",
                (
                    arg("files", nargs="+", metavar="FILE|FOLDER", help="what to add"),
                    option("--id", "ID", "of the document, of one file (default: made of its path)"),
                    option("--password", "TEXT", "of encrypted files"),
                    option("--chunk-tokens", Amount(int, 32, 4096), "most tokens of a passage (default: 512)"),
                    option("--overlap-tokens", Amount(int, 0, 2048), "that a passage repeats (default: an eighth)"),
                    MODEL,
                    *_WHERE,
                ),
            ),
            "ls": ("list the documents", _WHERE),
            "search": ("find passages", (arg("query", metavar="TEXT", help="what to look for"), *_HOW, *_WHERE)),
            "rm": (
                "delete documents",
                (arg("ids", nargs="+", metavar="ID", help="as `zse rag ls` shows them"), *_WHERE),
            ),
            "bench": ("measure search and the compact form of passages, on a fixed set", rag_bench.ARGUMENTS),
            "ask": (
                "answer a question and cite",
                (arg("question", metavar="TEXT", help="the question"), *_HOW, *_WHERE),
            ),
        }
    ),
)


def run(args) -> int:
    return {"add": _add, "ls": _ls, "search": _search, "rm": _rm, "ask": _ask, "bench": rag_bench.run}[args.kind](args)


# -- add


def document_id(path: str) -> str:
    """Of a file, by the path as it was named: its end, readable, and a hash of all of it."""
    path = os.path.normpath(path)
    word = re.sub(r"[^a-z0-9]+", "-", path.lower()).strip("-")[-48:].strip("-")
    return f"{word or 'file'}-{hashlib.sha256(path.encode('utf-8', 'surrogateescape')).hexdigest()[:8]}"


def document_name(path: str) -> str:
    """Of a file: its name, with what is not printable, or no UTF-8, as an escape: the server takes no other."""
    name = os.path.basename(path)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)[:255]


def found(paths: list[str], skipped: list[str]) -> "Iterator[str]":
    """The files that are meant, in order; in `skipped` those of folders whose kind is not read. Links are not followed, nor are
    hidden files looked at. Raises ConfigError."""
    for path in paths:
        if not os.path.isdir(path):
            if not os.path.exists(path):
                raise ConfigError(f"{path}: there is no such file or folder")
            if not os.path.isfile(path):  # a pipe would be waited for, /dev/zero has no end
                raise ConfigError(f"{path}: neither a file nor a folder")
            yield path
            continue
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                place = os.path.join(folder, name)
                if name.startswith(".") or os.path.islink(place) or not os.path.isfile(place):
                    continue
                if name.rpartition(".")[2].lower() not in EXTENSIONS:
                    skipped.append(place)
                else:
                    yield place


def _add(args) -> int:
    skipped: list[str] = []
    files = []
    for path in found(args.files, skipped):
        files.append(path)
        if len(files) > MOST_FILES:
            raise ConfigError(f"more than {MOST_FILES} files; add fewer at once")
    if args.id is not None and len(files) != 1:
        raise ConfigError(f"--id names one document, and these are {len(files)} files")
    for path in skipped:
        notice(f"skipped {printable(path)}: none of the kinds {', '.join(kinds.KINDS)}")
    server, done, failed = server_of(args, "a key"), [], 0
    options = {
        "password": args.password,
        "chunk_tokens": args.chunk_tokens,
        "overlap_tokens": args.overlap_tokens,
        "model": args.model,
    }
    for number, path in enumerate(files, 1):
        query = {"id": args.id or document_id(path), "name": document_name(path)}
        query |= {name: value for name, value in options.items() if value is not None}
        try:
            with open(path, "rb") as file:
                answer = server.upload(f"/v1/rag/documents?{urlencode(query)}", file, os.fstat(file.fileno()).st_size)
        except (OSError, ZSEError) as error:
            failed += 1
            notice(f"{number}/{len(files)} {printable(path)}: {getattr(error, 'strerror', None) or error}")
            continue
        done.append(answer)
        notice(f"{number}/{len(files)} {printable(path)}: {_outcome(answer)}")
    if args.json:
        print(json.dumps(done, indent=1))
    elif not files:
        notice("nothing to add")
    return int(bool(failed) or not files)


def _outcome(document: dict) -> str:
    if document.get("duplicate_of"):
        return f"the same as {document['duplicate_of']}"
    text = f"{document['id']}, {document['num_chunks']} passage{'s' * (document['num_chunks'] != 1)}"
    if document.get("outcome") == "unchanged":
        return f"{text}, unchanged"
    text += f", version {document['version']}" if document["version"] > 1 else ""
    return "; ".join([text, *map(printable, document["warnings"])])


# -- the others


def _ls(args) -> int:
    server, rows, after = server_of(args, "a key"), [], ""
    while True:
        query = {"limit": 100} | ({"after": after} if after else {})
        page = server.ask("GET", f"/v1/rag/documents?{urlencode(query)}")
        rows += page["data"]
        if not page["has_more"]:
            break
        after = page["last_id"]
    if args.json:
        print(json.dumps(rows, indent=1))
    elif rows:
        cells = [
            (row["id"], printable(row["name"]), row["kind"] or "-", str(row["version"]), str(row["num_chunks"]))
            + (size(row["bytes"]), _status(row))
            for row in rows
        ]
        sys.stdout.write(table([("ID", "NAME", "KIND", "VERSION", "PASSAGES", "SIZE", "STATUS"), *cells]))
    else:
        notice("there are no documents; `zse rag add FILE` adds one")
    return 0


def _status(document: dict) -> str:
    vectors, status = document["vectors"], document["status"]
    if status == "failed":
        return f"failed: {printable(document['error'] or '')}"
    return f"{status} {vectors['done']}/{vectors['total']}" if status == "indexing" else status


def _how(args) -> dict:
    """The fields of a search."""
    fields: dict = {"top_k": args.top_k}
    if args.model is not None:
        fields["model"] = args.model
    if args.stages is not None:
        fields["stages"] = [word.strip() for word in args.stages.split(",") if word.strip()]
        unknown = [name for name in fields["stages"] if name not in STAGES]
        if unknown or not fields["stages"]:
            raise ConfigError(f"--stages {args.stages}: give some of {', '.join(STAGES)}")
    if args.document:
        fields["documents"] = args.document
    return fields


def _search(args) -> int:
    answer = server_of(args, "a key").ask("POST", "/v1/rag/search", {"query": args.query} | _how(args))
    if args.json:
        print(json.dumps(answer, indent=1))
        return 0
    for note in answer["notes"]:
        notice(note)
    write = reply_writer(sys.stdout)
    for number, hit in enumerate(answer["data"], 1):
        parts = ", ".join(f"{stage} {of['rank']}" for stage, of in hit["stages"].items())
        write(f"{number}. {_source(hit)}  ({hit['score']:.4f}: {parts})\n   {' '.join(hit['text'].split())}\n\n")
    if not answer["data"]:
        notice("nothing was found")
    return 0


def _source(hit: dict) -> str:
    page = f", page {hit['page']}" if hit["page"] else ""
    headings = " > ".join(hit["headings"])
    return printable(f"{hit['name']}{page}{headings and ': '}{headings} [{hit['document']}]")


def _rm(args) -> int:
    server, failed = server_of(args, "a key"), False
    for id in args.ids:
        try:
            server.ask("DELETE", f"/v1/rag/documents/{id}")
        except ZSEError as error:
            failed = True
            notice(f"{printable(id)}: {error}")
    return int(failed)


def _ask(args) -> int:
    server = server_of(args, "a key")
    body = {"question": args.question} | _how(args)
    if args.json:
        print(json.dumps(server.ask("POST", "/v1/rag/ask", body), indent=1))
        return 0
    cited: dict[int, dict] = {}
    notes: list[str] = []
    write = reply_writer(sys.stdout, wraps=True)

    def show(chunk: dict) -> None:
        notes.extend(chunk.get("rag", {}).get("notes", []))
        for choice in chunk["choices"]:
            write(choice["delta"].get("content") or "")
            for citation in choice["delta"].get("citations", []):
                cited.setdefault(citation["number"], citation)

    server.follow("/v1/rag/ask", body, show)
    write("\n")
    for number, citation in sorted(cited.items()):
        write(f"\n[{number}] {_source(citation)}\n    {' '.join(citation['text'].split())[:300]}\n")
    for note in notes:
        notice(note)
    return 0
