"""Documents of the tenants: the file that holds them, their search, and what a chat request gets of them.

State: documents.db has one writer, the thread of `OpenDocuments.writes`; searches read in a thread of their own, so that none
waits for a document that is being stored. It is opened with the first request that needs it, and a server that finds the
file goes on with what its last run left (server/ingest.py, server/vectors.py)."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from zse.engine.messages import Ready
from zse.errors import ConfigError, DeviceError
from zse.rag import compress, index, neighbours, ocr, schema, store
from zse.rag import search as searching
from zse.rag.documents import DocumentError, Passage
from zse.rag.fuse import reranked
from zse.server import citations, ingest, measuring, vectors
from zse.server import database as storage
from zse.server.citations import CitedPassage, Grounding
from zse.server.errors import APIError
from zse.server.relevance import CROSS_ENCODER, Judge, Measurement
from zse.server.requests.completions import Completion
from zse.server.requests.finding import Finding, rag_of
from zse.server.requests.image_parts import text_of, with_text
from zse.server.work import RequestRun, maybe_in_thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.server.database.connection import Database

log = logging.getLogger("zse.server")

RESERVED_TOKENS = 256  # of the context for an answer that has no max_tokens
# Of the tenant's passages that have vectors, from which on these take part: a passage without one would stand behind all
# that have one.
DENSE_FROM = 0.9
NOTHING = "No passage was found: the answer has none."
NO_ROOM = "No passage has room in the model's context beside the conversation."


class FoundPassages(msgspec.Struct):
    """passages: the best first. stages: that took part. notes: why others did not, a line each."""

    passages: list[Passage]
    stages: list[str]
    notes: list[str]


class OpenDocuments:
    """The file, open. reads: its own connection and thread, which `indexes` belongs to."""

    def __init__(self, path: str, ann_from: int):
        self.writes: Database = storage.connection.Database(path, schema.MIGRATIONS)
        self.reads: Database = storage.connection.Database(path, schema.MIGRATIONS)
        self.indexes = index.Indexes(ann_from=ann_from)

    def close(self) -> None:
        """All that was submitted is written first."""
        self.writes.close()
        self.reads.close()


def checked_ann(ann_from: int) -> int:
    """Of --ann-from. Raises ConfigError: what it needs is not installed."""
    if ann_from:
        neighbours.Neighbours([], 8)
    return ann_from


def ocr_command(command: str) -> Callable[[str], str]:
    """Of --ocr-command. Raises ConfigError."""
    return ocr.OcrCommand(command)


class Retrieval:
    """Args:
    app: whose models read documents.
    path: of documents.db.
    quota_bytes: of one tenant.
    ocr: reads pages that are images (rag/ocr.py).
    ann_from: vectors of a tenant from which an approximate index answers; 0: never."""

    def __init__(
        self, app: Any, path: str, quota_bytes: int, ocr: Callable[[str], str] | None = None, ann_from: int = 0
    ):
        self.app, self.path, self.quota_bytes, self.ocr, self._ann_from = app, path, quota_bytes, ocr, ann_from
        self._opening: asyncio.Future[OpenDocuments] | None = None
        self.ingest = ingest.Ingest(self)
        self.vectors = vectors.Embedder(self)
        self.revision = ""  # of the model that makes vectors, once it is known

    # -- the file

    async def opened(self) -> OpenDocuments:
        """The file, which the first caller opens. Raises APIError storage_unavailable."""
        if self._opening is None or self._opening.done() and self._opening.exception() is not None:
            self._opening = asyncio.get_running_loop().create_task(self._open())
        return await asyncio.shield(self._opening)

    async def _open(self) -> OpenDocuments:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(None, self.ingest.lock)
            found = await loop.run_in_executor(None, OpenDocuments, self.path, self._ann_from)
            await loop.run_in_executor(None, self.ingest.recover)
        except (ConfigError, OSError) as error:
            log.error("documents cannot be opened: %s", error)
            raise APIError("storage_unavailable", "The server's documents cannot be opened now.") from None
        if self.app.pool.models:
            self.revision = await vectors.revision(self.app.pool.default)
        self.ingest.resume()
        self.vectors.start(found)
        return found

    async def close(self) -> None:
        """Nothing more is begun; what was acknowledged is on the disk."""
        if self._opening is None:
            return
        await asyncio.gather(self.ingest.stop(), self.vectors.stop())
        if self._opening.done() and not self._opening.cancelled() and self._opening.exception() is None:
            await asyncio.get_running_loop().run_in_executor(None, self._opening.result().close)
        self.ingest.unlock()

    async def read(self, work: Callable, *given: Any, **named: Any) -> Any:
        """work(connection, …) in the thread of searches."""
        return await (await self.opened()).reads.run(lambda connection: work(connection, *given, **named), writes=False)

    async def write(self, work: Callable, *given: Any, **named: Any) -> Any:
        """The same in a transaction, on the disk when it ends. Raises APIError for a DocumentError."""
        try:
            return await (await self.opened()).writes.run(lambda connection: work(connection, *given, **named))
        except DocumentError as error:
            raise ingest.refused(error) from None

    # -- search

    async def find(
        self, work: RequestRun, finding: Finding, model: str | None, most: int | None = None
    ) -> FoundPassages:
        """Search the documents of the request's tenant. The model's engine is asked only where a stage needs it: where
        the request has no place in the queue yet, it gets one. most: passages, None: top_k. Raises RequestError."""
        request, notes = work.request, list[str]()
        opened, stages = await self.opened(), list(finding.stages)
        served = work.served or self.app.find_model(request, model, "model")
        revision = await vectors.revision(served)
        if "dense" in stages:
            coverage = await self.read(store.coverage, request.tenant)
            note = _dense_note(coverage, revision)
            notes += [note] if note else []
            total, own = sum(coverage.values()), coverage.get(revision, 0)
            if not own or own < DENSE_FROM * total and stages != ["dense"]:
                stages.remove("dense")
        vector = None
        if "dense" in stages or "rerank" in stages:
            if work.served is None:
                work.start(model)
            info = await self.app.pool.ready(work.served)
        if "dense" in stages:
            vector = await self._vector(work, finding.query, info)
        query = searching.SearchQuery(
            finding.query,
            max(finding.top_k, finding.rerank_k) if "rerank" in stages else finding.top_k,
            tuple(stage for stage in searching.STAGES if stage in stages),
            finding.fusion,  # type: ignore[arg-type]  # checked by the table of fields
            finding.weights,
            searching.Filters(finding.documents, finding.kinds, finding.after, finding.before, finding.metadata),
        )
        given = opened.indexes, request.tenant, query
        try:
            passages = await self._search(request.account, *given, vector, revision)
        except DeviceError as error:
            log.error("vectors of documents cannot be searched: %s", error)
            stages.remove("dense")
            notes.append("dense: this machine cannot compute it; the other stages search all.")
            passages = await self._search(request.account, *given)
        if "rerank" in stages and passages:
            passages = await self._reranked(work, finding, passages, info)
        return FoundPassages(passages[: most or finding.top_k], stages, notes)

    async def _search(self, account: str, *given: Any) -> list[Passage]:
        """In the thread of searches, to which tenants come in turns: one that sends hundreds does not stand before the
        others."""
        reads = (await self.opened()).reads
        work = partial(reads.now, lambda connection: searching.search(connection, *given), writes=False)
        return await self.app.threads.run(account, work)

    async def _vector(self, work: RequestRun, query: str, info: Ready):
        model = await self.app.pool.text(work.served)
        ids = await maybe_in_thread(True, lambda: model.cut(model.encode_text(query), info.max_context))
        options = vectors.options_of(self.app, work.request.tenant, work.request.account, priority=0)
        (result,) = await work.channel.complete([ids], [vectors.ask(info)], options)
        work.prompt_tokens += len(ids)
        return vectors.numbers(result.vector)

    async def _reranked(
        self, work: RequestRun, finding: Finding, passages: list[Passage], info: Ready
    ) -> list[Passage]:
        """The model says of each of the first rerank_k whether it answers the query."""
        model = await self.app.pool.text(work.served)

        def sequences() -> tuple[Judge, list[Measurement]]:
            judge = Judge(
                model, CROSS_ENCODER if info.num_labels else model.method or finding.rerank_by, None, info.max_context
            )
            room, made = max(16, info.max_context - len(model.encode_part(finding.query)) - 128), []
            for passage in passages[: finding.rerank_k]:
                ids = model.encode_part(passage.chunk.text)
                text = passage.chunk.text if len(ids) <= room else model.decode(ids[:room])
                made.append(judge.sequence(finding.query, text, "query"))
            return judge, made

        judge, pairs = await maybe_in_thread(True, sequences)
        total = sum(len(pair.ids) for pair in pairs)
        work.reserve(work.estimated + total)
        options = vectors.options_of(self.app, work.request.tenant, work.request.account, priority=0)
        results = await measuring.run_all(work, pairs, options, measuring.AT_ONCE)
        work.prompt_tokens += total
        return reranked(passages, [judge.score(result) for result in results], finding.top_k)

    # -- answers

    async def ground(self, work: RequestRun, completion: Completion, model: Any) -> Grounding:
        """Search for what a chat request asks and put the passages in front of its question. Raises RequestError."""
        assert completion.messages is not None and completion.rag is not None
        finding = rag_of(completion.rag, completion.messages)
        found = await self.find(work, finding, completion.model)
        info = await self.app.pool.ready(work.served)
        notes = found.notes if found.passages else [*found.notes, NOTHING]
        if not found.passages:
            return Grounding(finding.query, [], notes)
        cited = [cited_passage(number, passage) for number, passage in enumerate(found.passages, 1)]
        answer_tokens = completion.params.max_tokens or RESERVED_TOKENS

        def fit() -> tuple[list[CitedPassage], list[dict], int]:
            spent = sum(
                len(model.encode_part(text_of(message["content"]))) + 8 for message in completion.messages or ()
            )
            room = info.max_context - spent - answer_tokens - len(model.encode_part(citations.TASK)) - 32
            blocks = shown_blocks(finding, cited, found.passages)
            number, total = citations.fitting(
                blocks, min(finding.max_tokens, room), lambda text: len(model.encode_part(text))
            )
            return cited[:number], with_passages(completion.messages or [], blocks[:number]), total

        kept, messages, total = await maybe_in_thread(True, fit)
        if not kept:
            return Grounding(finding.query, [], [*notes, NO_ROOM])
        completion.messages = messages
        return Grounding(finding.query, kept, notes, total)


def with_passages(messages: list[dict], blocks: list[str]) -> list[dict]:
    """The conversation with the passages in the last message of the user."""
    last = max(place for place, message in enumerate(messages) if message["role"] == "user")
    content = messages[last]["content"]
    changed = messages[last] | {"content": with_text(content, citations.with_passages(text_of(content), blocks))}
    return [*messages[:last], changed, *messages[last + 1 :]]


def cited_passage(number: int, passage: Passage) -> CitedPassage:
    chunk = passage.chunk
    place = chunk.first_page, chunk.last_page, passage.position, chunk.headings
    return CitedPassage(number, passage.document, passage.version, passage.name, *place, chunk.text)


def shown_blocks(finding: Finding, cited: list[CitedPassage], passages: list[Passage]) -> list[str]:
    """Each passage as the model reads it. A later one in ZPF may leave out what stands in one before it: keep the first ones."""
    if finding.format == "plain":
        return [citations.block(passage, passage.text) for passage in cited]
    parts = compress.zpf_parts(passages, finding.query)
    return [citations.compact_block(number, *part) for number, part in enumerate(parts, 1)]


def _dense_note(coverage: dict[str, int], revision: str) -> str:
    """Why vectors do not tell of all passages; "": they do. coverage: as of store.coverage()."""
    total, own = sum(coverage.values()), coverage.get(revision, 0)
    if own == total:
        return ""
    others = sum(count for name, count in coverage.items() if name not in ("", revision))
    if others:
        return f"dense: {others} of {total} passages have vectors of another model; new ones are made."
    return f"dense: {own} of {total} passages have their vectors so far."
