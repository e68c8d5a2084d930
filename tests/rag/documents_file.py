"""A file of documents for tests, and documents of lines of text."""

import hashlib
from collections.abc import Callable
from contextlib import contextmanager

from zse.rag import schema, search, store
from zse.rag.documents import Chunk, Passage
from zse.rag.index import Indexes
from zse.server.database.connection import Database


class File:
    """write(work), read(work): through the database's threads, as a server does."""

    def __init__(self, path: str, **options):
        self.writer, self.reader = Database(path, schema.MIGRATIONS), Database(path, schema.MIGRATIONS)
        self.indexes = Indexes(**options)

    def write(self, function: Callable, *args, **options):
        return self.writer.now(lambda connection: function(connection, *args, **options))

    def read(self, function: Callable, *args, **options):
        return self.reader.now(lambda connection: function(connection, *args, **options), writes=False)

    def add(self, tenant: str, id: str, *texts: str, now: float = 1.0, **options) -> store.Added:
        return self.write(store.add, tenant, document(id, *texts, **options), now)

    def search(self, tenant: str, text: str, vector=None, model: str = "", **options) -> list[Passage]:
        query = search.SearchQuery(text, **options)
        return self.read(search.search, self.indexes, tenant, query, vector, model)

    def close(self) -> None:
        self.reader.close()
        self.writer.close()


@contextmanager
def opened(folder, **options):
    file = File(str(folder / "documents.db"), **options)
    try:
        yield file
    finally:
        file.close()


def document(id: str, *texts: str, **options) -> store.NewDocument:
    fields = {"name": f"{id}.txt", "kind": "text", "title": "", "options": "", "num_pages": 0} | options
    chunks = [Chunk(text, [], 0, 0, len(text.split())) for text in texts]
    data = "\n".join(texts).encode()
    return store.NewDocument(id=id, digest=hashlib.sha256(data).digest(), file_bytes=len(data), chunks=chunks, **fields)
