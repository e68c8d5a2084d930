"""The server process from its first import to its exit code: start, signals, drain."""

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from zse import __version__
from zse.engine.client import shutting_down_error
from zse.engine.process import EngineProcess
from zse.errors import ConfigError, EngineError, ZSEError
from zse.http import bind
from zse.http.listener import Limits, Server
from zse.server import cross_origin, images, mcp, models, presence, resident, retrieval, tracing
from zse.server import database as storage
from zse.server import library as libraries
from zse.server import reload as reloading
from zse.server.admission import AdmissionControl, QueueBounds
from zse.server.app import ADAPTER_QUOTA_BYTES, FILE_QUOTA_BYTES, SESSION_TTL_S, App
from zse.server.auth import CacheSalts, HostCheck, KeyCheck
from zse.server.key_watch import KeyWatch
from zse.server.keys import Key, quotas, weights
from zse.server.pool import ModelPool
from zse.server.served import ModelSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.server.database.connection import Database
    from zse.server.database.keys import Keyring

log = logging.getLogger("zse.server")

DOCUMENTS_S = 3.0  # after the start, when first requests are through
FLUSH_S = 1.0  # for answers that are written but not yet sent when everything else is done


class ServeOptions(msgspec.Struct, frozen=True):
    """What `zse serve` was asked for.

    Args:
        models: the first is loaded at once, the others when a request names them.
        spare_engines: parked engines to keep.
        idle_timeout_s: a model without requests for so long is evicted; None: never.
        max_loaded: models that may be loaded at once; None: what memory holds.
        max_queue: answers that may wait; None: by what the engine does.
        max_queue_tokens: prompt tokens that may wait; None: by what the engine begins within queue_timeout_s.
        max_wait_s: a request that has not begun after so long is refused after all.
        drain_s: time that running requests have after the first signal.
        key_file: where `keys` came from; it is read again when it has changed, and on SIGHUP.
        tenant_weights: of accounts whose key has none.
        database: the path of the SQLite file with more keys; None: there is none.
        documents: the path of the SQLite file with the tenants' documents; None: they have none. document_quota: of one tenant.
        ann_from: vectors of a tenant's documents from which an approximate index answers; 0: never.
        ocr: reads pages that are images, from the path of a PNG; None: nothing does.
        mcp: the path of the file with MCP servers, read again on SIGHUP; None: there are none.
        images: makes what decodes images.
        cache_secret: of the salts of cached prompts; None: a new one. cache_folder: where the prefix cache is kept, None:
            nowhere.
        allowed_hosts: Host names that are answered; None: any.
        cors_origins: of pages that may use the API from a browser; "*": all.
        exits_on_failure: the process ends when the engines of all models have died too often; else they are tried again.
        any_model_name: a name that no model has means the first one.
        file_quota: bytes of the files of a tenant.
        adapter_quota: bytes of uploaded adapters together.
        session_ttl_s: how long a session is kept after its last request, at most.
        library: makes what knows the models that may be added while it serves.
        tool_parser, reasoning_parser: names of zse.server.tools; None: what the chat template shows.
        phases_ms: what happened so far, name → milliseconds since exec.
        since_exec: the clock of phases_ms, in seconds.
        log_level, log_format: of what is logged from a reload on.
        traces: the OTLP endpoint for spans of requests; None: there are none.
        reload: reads the configuration again: (fields of these options that may change, lines for the log); None: there is none to
            read. Raises ConfigError.
        copies: makes a copies.ConvertedCopies; None: models are loaded from their own files.
        keep_in_memory: bytes of the files of models that were unloaded; None: those that parked engines make ready.
        when_ready: called a second after the first model is, when first requests are through."""

    models: tuple[ModelSpec, ...]
    host: str = "127.0.0.1"
    spare_engines: int = 0
    idle_timeout_s: float | None = None
    max_loaded: int | None = None
    max_queue: int | None = None
    max_queue_tokens: int | None = None
    queue_timeout_s: float = 30.0
    max_wait_s: float = 600.0
    drain_s: float = 30.0
    keys: tuple[Key, ...] = ()
    key_file: str | None = None
    tenant_weights: dict[str, float] = {}
    database: str | None = None
    documents: str | None = None
    document_quota: int = 4 << 30
    ocr: Callable[[str], str] | None = None
    ann_from: int = 0
    mcp: str | None = None
    images: Callable[[], Any] = lambda: images.decoder()
    cache_secret: bytes | None = None
    cache_folder: str | None = None
    allowed_hosts: frozenset[str] | None = None
    cors_origins: frozenset[str] = frozenset()
    exits_on_failure: bool = True
    any_model_name: bool = False
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    session_ttl_s: float = SESSION_TTL_S
    file_quota: int = FILE_QUOTA_BYTES
    adapter_quota: int = ADAPTER_QUOTA_BYTES
    library: Callable[[], Any] = lambda: libraries.Library()
    limits: Limits = Limits()
    phases_ms: dict[str, float] = {}
    since_exec: Callable[[], float] = time.process_time
    when_ready: Callable[[], None] | None = None
    copies: Callable[[], Any] | None = None
    keep_in_memory: int | None = None
    log_level: str | None = None
    log_format: str | None = None
    traces: str | None = None
    reload: Callable[[], tuple[dict, list[str]]] | None = None


def serve(
    options: ServeOptions,
    sock: socket.socket,
    process: EngineProcess,
    spawn: Callable[[list[str]], EngineProcess],
    park: Callable[[], EngineProcess] | None = None,
    load_model: Callable[[str, str], object] = models.load,
) -> int:
    """Serve until a signal; returns the exit code. The engines are gone when this returns or raises.

    Args:
        sock: a listening socket.
        process: the engine of the first model, spawned already.
        spawn: starts an engine from its arguments.
        park: starts a parked engine.
        load_model: (path, name) → tokenizer and template; called in a thread."""
    _raise_file_limit()
    try:
        return asyncio.run(_Serving(options, sock, process, spawn, park, load_model).run())
    finally:
        process.kill()


def _raise_file_limit() -> None:
    """One file descriptor per client: take what the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            log.debug("file limit stays at %d: %s", soft, error)


class _Serving:
    def __init__(self, options: ServeOptions, sock, process, spawn, park, load_model):
        self._options, self._sock, self._process, self._load_model = options, sock, process, load_model
        self._spawn, self._park = spawn, park
        self._phases = dict(options.phases_ms)
        self._signals = 0
        self._announcement: presence.Announcement | None = None
        self._key_watch: KeyWatch
        self._watching: asyncio.Task | None = None
        self._resuming: asyncio.Task | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        stopped = loop.create_future()

        def end(error: EngineError) -> None:
            if self._options.exits_on_failure and not stopped.done():
                stopped.set_exception(error)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number, stopped)
        options = self._options
        first = options.models[0]
        text_model = loop.run_in_executor(None, self._load_model, first.path, first.names[0])
        text_model.add_done_callback(self._text_model_loaded)
        self._pool = ModelPool(
            options.models,
            self._load_model,
            spawn=self._spawn,
            park=self._park,
            spares=options.spare_engines,
            idle_s=options.idle_timeout_s,
            max_loaded=options.max_loaded,
            tries_again=not options.exits_on_failure,
            copies=options.copies,
            resident=resident.ResidentFiles(options.keep_in_memory) if options.keep_in_memory else None,
            expect_bytes=options.keep_in_memory,
            on_failure=end,
        )
        self._engine = self._pool.default.engine
        database, keyring = await self._open_database()
        self._app = self._make_app(keyring)
        self._app.logs.attach()
        if database is not None:
            usage = self._app.usage = storage.usage.UsageLog(database, self._app.admission)
            await database.run(lambda connection: storage.usage.restore(connection, self._app.admission))
        if options.traces is not None:
            self._app.tracer = tracing.Tracer(options.traces)
        self._app.mcp = mcp.servers.McpServers(options.mcp) if options.mcp else None
        self._server = Server(self._app, options.limits)
        self._key_watch = KeyWatch(self._app, options.key_file, options.keys, options.tenant_weights, database, keyring)
        self._app.key_watch = self._key_watch
        self._watch()
        if options.key_file is not None or options.reload is not None or options.mcp is not None:
            loop.add_signal_handler(signal.SIGHUP, self._reload)
        self._pool.adopt(self._process, text_model)
        await self._server.listen(self._sock)
        self._mark("listening")
        try:
            if not await self._started(text_model, stopped):
                return 0
            await stopped
            return await self._drain()
        except ZSEError as error:
            sys.stderr.write(f"zse: error: {' '.join(str(error).split())}\n")
            return error.exit_code
        finally:
            await self._close()
            if self._app.tracer is not None:
                await loop.run_in_executor(None, self._app.tracer.close)
            if database is not None:
                usage.close()

    def _make_app(self, keyring: "Keyring | None") -> App:
        options = self._options
        keys = options.keys + (() if keyring is None else keyring.valid)
        shares = weights(keys, options.tenant_weights)
        return App(
            self._pool,
            admission=AdmissionControl(
                QueueBounds(options.max_queue, options.max_queue_tokens, options.queue_timeout_s, options.max_wait_s),
                shares,
                quotas(keys),
            ),
            weights=shares,
            salts=CacheSalts(options.cache_secret, options.cache_folder),
            key=KeyCheck(keys, secret=None if keyring is None else keyring.secret),
            hosts=HostCheck(options.allowed_hosts),
            cross_origin=cross_origin.CrossOrigin(options.cors_origins) if options.cors_origins else None,
            any_model_name=options.any_model_name,
            tool_parser=options.tool_parser,
            reasoning_parser=options.reasoning_parser,
            session_ttl_s=options.session_ttl_s,
            file_quota=options.file_quota,
            adapter_quota=options.adapter_quota,
            library=options.library,
            documents=None if options.documents is None else self._documents,
            images=options.images,
        )

    async def _close(self) -> None:
        if self._announcement is not None:
            self._announcement.withdraw()
        if self._watching is not None:
            self._watching.cancel()
        await self._app.close()
        await self._pool.stop()
        await self._flush()
        self._server.close()
        if self._app.mcp is not None:
            await self._app.mcp.close()

    async def _open_database(self) -> "tuple[Database | None, Keyring | None]":
        """And the keys in it; the first start that has no other key makes one and prints it. Raises ConfigError."""
        path, makes_admin = self._options.database, not self._options.keys
        if path is None:
            return None, None
        database = await asyncio.get_running_loop().run_in_executor(None, lambda: storage.connection.Database(path))
        made = await database.run(lambda connection: storage.keys.prepare(connection, makes_admin))
        if made:
            print(f"admin key, shown this once: {made}", flush=True)
        return database, await database.run(lambda connection: storage.keys.read(database, connection), writes=False)

    def _documents(self, app: App) -> Any:
        options = self._options
        assert options.documents is not None
        return retrieval.Retrieval(app, options.documents, options.document_quota, options.ocr, options.ann_from)

    def _resume_documents(self) -> None:
        """Go on with documents that an earlier run left half done."""
        path = self._options.documents
        if path is not None and os.path.exists(path) and not self._app.draining:
            self._resuming = asyncio.get_running_loop().create_task(self._app.documents().opened())
            self._resuming.add_done_callback(lambda done: done.cancelled() or done.exception())  # it is logged

    def _watch(self) -> None:
        """Look after the keys from now on, if there are any."""
        if self._watching is None and self._app.needs_key:
            self._watching = asyncio.get_running_loop().create_task(self._key_watch.run())

    def _reload(self) -> None:
        """SIGHUP: read the configuration and the key file again; what is wrong in the one leaves it and the other as
        they were."""
        before = self._options
        if before.reload is not None:
            try:
                fields, lines = before.reload()
            except ConfigError as error:
                log.error("the configuration stays as it was: %s", error)
                return
            self._options = msgspec.structs.replace(before, **fields)
            changed = {name for name, value in fields.items() if value != getattr(before, name)}
            reloading.take(self._options, changed, self._app, self._pool, self._server)
            if changed & {"keys", "key_file", "tenant_weights"}:
                self._key_watch.give(self._options.key_file, self._options.keys, self._options.tenant_weights)
                self._watch()
            for line in lines or ["read the configuration again: nothing differs"]:
                log.warning("%s", line)
        if self._options.key_file is not None:
            self._key_watch.read_now()
        if self._app.mcp is not None:
            self._app.mcp.read_again()

    async def _started(self, text_model: asyncio.Future, stopped: asyncio.Future) -> bool:
        """Wait for tokenizer and engine, say so; False when a signal came first. Raises ZSEError when one failed."""
        ready = asyncio.ensure_future(self._engine.started())
        ready.add_done_callback(lambda future: future.cancelled() or future.exception())  # both may fail; one is told
        waiting = {ready, text_model}
        try:
            while waiting and not stopped.done():
                done, waiting = await asyncio.wait({*waiting, stopped}, return_when=asyncio.FIRST_COMPLETED)
                waiting.discard(stopped)
                for future in done - {stopped}:
                    future.result()
        finally:
            ready.cancel()
        if stopped.done():
            self._app.draining = self._pool.draining = True
            return False
        info = ready.result()
        if self._options.models[0].adapters:
            await self._pool.default.adapters.load_first()
        self._app.admission.bounds.set_engine(info.max_rows, info.queue_tokens)
        self._announce(info, text_model.result())
        gc.freeze()  # what stays is looked at no more
        gc.enable()
        self._pool.start()
        await self._app.resume()
        return True

    def _text_model_loaded(self, future: asyncio.Future) -> None:
        if not future.cancelled() and future.exception() is None:
            self._mark("tokenizer")

    def _mark(self, name: str) -> None:
        self._phases[name] = round(1000 * self._options.since_exec())

    def _announce(self, info, text_model) -> None:
        """The start block on stdout."""
        self._mark("ready")
        if self._options.when_ready is not None:
            asyncio.get_running_loop().call_later(1.0, self._options.when_ready)
        name = self._options.models[0].names[0]
        self._app.phases_ms = self._phases
        log.info(
            "phases of the engine's start, ms: %s",
            ", ".join(f"{phase} {value:.0f}" for phase, value in info.phases_ms.items()),
        )
        address = bind.url(self._options.host, self._sock.getsockname()[1])
        asyncio.get_running_loop().call_later(1.0, self._leave_address, address)
        asyncio.get_running_loop().call_later(DOCUMENTS_S, self._resume_documents)
        # KV pages take memory when they are first written.
        memory = ", ".join(
            f"{part} {'up to ' if part.startswith('kv') else ''}{count / 2**20:.0f} MiB"
            for part, count in info.memory_bytes.items()
        )
        phases = ", ".join(f"{phase} {value:.0f}" for phase, value in self._phases.items())
        key = ' -H "Authorization: Bearer $ZSE_API_KEY"' if self._app.needs_key else ""
        if text_model.has_chat_template:
            route, body = "chat/completions", f'"model":"{name}","messages":[{{"role":"user","content":"Hello"}}]'
        else:
            route, body = "completions", f'"model":"{name}","prompt":"Once upon a time"'
        print(
            f"ZSE {__version__}: {name} on {address} (context {info.max_context}, {info.max_rows} at once)\n"
            f"  memory: {memory}\n"
            f"  start, ms since exec: {phases}\n"
            f"{self._others()}"
            f"  try: curl -N {address}/v1/{route}{key} -H 'Content-Type: application/json'"
            f" -d '{{{body},\"stream\":true}}'",
            flush=True,
        )

    def _leave_address(self, address: str) -> None:
        try:
            self._announcement = presence.Announcement(address, __version__)
        except OSError as error:
            log.warning("`zse ps` will not find this server: %s", error)

    def _others(self) -> str:
        names = [spec.names[0] for spec in self._options.models[1:]]
        return f"  on demand: {', '.join(names)}\n" if names else ""

    def _on_signal(self, number: int, stopped: asyncio.Future) -> None:
        self._signals += 1
        if self._signals > 1:
            self._pool.kill()
            os._exit(128 + number)
        if not stopped.done():
            stopped.set_result(number)

    async def _drain(self) -> int:
        """Let running requests finish, up to drain_s; then end them with shutting_down."""
        self._app.draining = self._pool.draining = True
        busy = sum(connection.busy for connection in self._server.connections)
        if busy:
            log.warning(
                "draining: %d requests have up to %.0f s; a second signal stops at once", busy, self._options.drain_s
            )
        # Connections that the kernel has accepted already are answered, not reset.
        for _ in range(3):
            await asyncio.sleep(0)
        self._server.stop_listening()
        if not await self._wait_idle(self._options.drain_s):
            self._pool.fail_requests(shutting_down_error())
            if self._app.mcp is not None:
                self._app.mcp.end_calls()
            await self._wait_idle(FLUSH_S)
        return 0

    async def _wait_idle(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while any(connection.busy for connection in self._server.connections):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.01)
        return True

    async def _flush(self) -> None:
        await self._wait_idle(FLUSH_S)
        deadline = time.monotonic() + FLUSH_S
        while any(connection.unsent_bytes for connection in self._server.connections) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
