"""Vectors of documents, made in the background by the server's first model: the mean of a passage's hidden states.

Groups of passages run as embedding jobs of low priority, a tenant's turn after the other's. A group is one transaction,
so that a restart goes on behind the last one. Vectors belong to a revision of a model: what its files hold."""

import asyncio
import hashlib
import logging
import os
from array import array
from types import SimpleNamespace
from typing import Any

from zse.engine.channel import Channel
from zse.engine.client import READY
from zse.engine.messages import Ask, Ready
from zse.errors import RequestError
from zse.rag import store
from zse.scheduler.options import RequestOptions
from zse.server.served import Served

log = logging.getLogger("zse.server")

GROUP = 16  # passages of a transaction
LOWEST = -10
PAUSE_S = 1.0  # while the engine is not there, or the tenant has used up its tokens
FORM = 1  # one more whenever vectors are made in another way
_SAMPLE_BYTES = 1 << 20
_ENDINGS = (".gguf", ".zse", ".safetensors")


def _revision(path: str) -> str:
    """Of a model's files: their sizes, and their first and last megabyte."""
    digest = hashlib.sha256(b"%d" % FORM)
    files = [path]
    if os.path.isdir(path):
        files = sorted(os.path.join(path, name) for name in os.listdir(path) if name.endswith(_ENDINGS))
    for name in files:
        try:
            with open(name, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(b"%d" % size + file.read(_SAMPLE_BYTES))
                file.seek(max(size - _SAMPLE_BYTES, 0))
                digest.update(file.read())
        except OSError:
            digest.update(name.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


async def revision(served: Served) -> str:
    """What vectors of the model are told apart by."""
    if served.revision is None:
        served.revision = await asyncio.get_running_loop().run_in_executor(None, _revision, served.spec.path)
    return served.revision


def ask(info: Ready) -> Ask:
    return Ask(info.pooling or "mean", normalize=True)  # type: ignore[arg-type]  # one of POOLINGS


def numbers(data: bytes | None) -> array:
    """f32 little-endian, as all machines are that this runs on."""
    out = array("f")
    out.frombytes(data or b"")
    return out


def options_of(app: Any, tenant: str, account: str, priority: int) -> RequestOptions:
    """Of a measurement for a tenant's search or documents. Nobody else shares what is cached of it."""
    return RequestOptions(tenant=account, priority=priority, cache_salt=app.salts.salt(tenant, "documents"))


class Embedder:
    def __init__(self, retrieval: Any):
        self._retrieval, self._app = retrieval, retrieval.app
        self._wanted = asyncio.Event()
        self._task: asyncio.Task | None = None
        self._opened: Any = None
        self.accounts: dict[str, str] = {}  # tenant → who added its last document
        self._last = ""  # the tenant whose group was the last one

    def start(self, opened: Any) -> None:
        self._opened = opened
        self.wake()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def wake(self) -> None:
        """There may be passages without vectors."""
        self._wanted.set()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                while await self._step():
                    pass
            except RequestError as error:
                log.info("vectors of documents wait: %s", error)
                self._later()
            except Exception:
                log.exception("vectors of documents")
                self._later()

    def _later(self) -> None:
        asyncio.get_running_loop().call_later(PAUSE_S, self.wake)

    async def _step(self) -> bool:
        """One group; False: there is none, or none can be made now."""
        app = self._app
        if app.draining or not app.pool.models:
            return False
        served = app.pool.default
        model = self._retrieval.revision = await revision(served)
        group = await self._opened.reads.run(
            lambda connection: store.unembedded(connection, model, GROUP, self._last), writes=False
        )
        if group is None:
            return False
        account = self.accounts.get(group.tenant, group.tenant)
        bucket = app.admission.tenants[account].buckets.get("tokens")
        if served.engine.state != READY or bucket is not None and bucket.wait_s(1, app.admission.clock()) > 0:
            self._later()
            return False
        self._last = group.tenant
        rows = await self._rows(served, group, account)
        await self._opened.writes.run(lambda connection: store.put_vectors(connection, model, group, rows))
        return True

    async def _rows(self, served: Served, group: store.Unembedded, account: str) -> list[array]:
        """A vector of each text. Raises RequestError: the engine cannot."""
        app, loop = self._app, asyncio.get_running_loop()
        app.pool.enter(served)
        channel = Channel(served.engine, lambda computed: self._charge(served, group.tenant, account, computed))
        try:
            info, model = await app.pool.ready(served), await app.pool.text(served)
            prompts = await loop.run_in_executor(
                None, lambda: [model.cut(model.encode_text(text), info.max_context) for text in group.texts]
            )
            options = options_of(app, group.tenant, account, LOWEST)
            try:
                results = await channel.complete(prompts, [ask(info)] * len(prompts), options)
                return [numbers(result.vector) for result in results]
            except RequestError as error:
                if error.code != "numerical_error":
                    raise
            return [await self._row(served, prompt, info, options, group, account) for prompt in prompts]
        finally:
            channel.close()
            app.pool.leave(served)

    async def _row(
        self,
        served: Served,
        prompt: list[int],
        info: Ready,
        options: RequestOptions,
        group: store.Unembedded,
        account: str,
    ) -> array:
        """Of one text; of one that the model gives no numbers for, zeros: it is found by its words."""
        channel = Channel(served.engine, lambda computed: self._charge(served, group.tenant, account, computed))
        try:
            (result,) = await channel.complete([prompt], [ask(info)], options)
            return numbers(result.vector)
        except RequestError as error:
            if error.code != "numerical_error":
                raise
            log.warning("a passage of a document has no vector: %s", error)
            return array("f", bytes(4 * info.hidden_size))
        finally:
            channel.close()

    def _charge(self, served: Served, tenant: str, account: str, computed: int) -> None:
        """As RequestRun does: who added a document pays for its vectors."""
        app = self._app
        if account:
            app.tenants[account].computed_tokens += computed
        if app.usage is not None:
            request = SimpleNamespace(tenant=tenant, key_id=0)
            app.usage.settled(SimpleNamespace(request=request, served=served), computed)
        bucket = app.admission.tenants[account].buckets.get("tokens")
        if bucket is not None:
            bucket.wait_s(0, app.admission.clock())
            bucket.level -= computed
            app.admission.spent.add(account)
