"""What a request meets before its route: names, keys, methods, media types; and what the routes share."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from zse.errors import RequestError
from zse.http import body as bodies
from zse.http.exchange import Response
from zse.lazy import difflib
from zse.log import RecentRecords
from zse.sampling.fields import shown
from zse.scheduler.options import LOWEST, RequestOptions
from zse.server import adapter_uploads as uploaded
from zse.server import batches as batch_runs
from zse.server import errors, idempotency
from zse.server import files as stores
from zse.server import images as pictures
from zse.server import library as libraries
from zse.server.admission import AdmissionControl
from zse.server.api_request import APIRequest
from zse.server.auth import CacheSalts, HostCheck, KeyCheck, WrongKeys, invalid_key
from zse.server.errors import OLLAMA, APIError
from zse.server.keys import Caller, Key, quotas
from zse.server.pool import ModelPool
from zse.server.routes.table import ADMIN, BY_PATH, PUBLIC, ROUTES, USER, WITH_IMAGES, WITH_NAME, Route, resolve
from zse.server.served import Served
from zse.server.work import FairThreads, RequestRun, Tenants

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.images.worker import ImageDecoder
    from zse.server.adapter_uploads import AdapterUploads
    from zse.server.batches import BatchRunner
    from zse.server.cross_origin import CrossOrigin
    from zse.server.database.connection import Database
    from zse.server.database.usage import UsageLog
    from zse.server.files import FileStore
    from zse.server.key_watch import KeyWatch
    from zse.server.library import Library
    from zse.server.mcp.servers import McpServers
    from zse.server.retrieval import Retrieval

log = logging.getLogger("zse.server")


SESSION_TTL_S = 86400.0
FILE_QUOTA_BYTES = 4 << 30
ADAPTER_QUOTA_BYTES = 16 << 30
PREFLIGHT = "info.preflight"
_APIS = {"/api/": OLLAMA, "/v1/messages/": errors.ANTHROPIC}  # whose clients ask for paths that are not here
LARGE_BODY = 64 << 10  # bytes; admission is asked before it is read


def find_route(path: str) -> tuple[dict[str, Route], dict[str, str]] | None:
    """Routes by method and path parameters for a percent-decoded path; None when it is unknown. A slash at the end and
    a /v1 that is left out, or there twice, are forgiven: clients differ in what they take for the base URL."""
    bare = path.rstrip("/") or "/"
    while bare.startswith("/v1/"):
        bare = bare[3:]
    for known in (bare, "/v1" + bare):
        if known in BY_PATH and "{" not in known:
            return BY_PATH[known], {}
        for before, name, behind in WITH_NAME:
            if known.startswith(before) and known.endswith(behind) and len(known) > len(before) + len(behind):
                found = known[len(before) : len(known) - len(behind)]
                return BY_PATH[f"{before}{{{name}}}{behind}"], {name: found}
    return None


def unknown(path: str) -> str:
    """What to say of a path that is unknown: those that there are, the one that it resembles first."""
    near = difflib.get_close_matches("/v1" + path.removeprefix("/v1"), BY_PATH, 1, 0.8)
    listed = ", ".join(f"{route.method} {route.path}" for route in ROUTES)
    meant = f"Did you mean {near[0]}? " if near else ""
    return f"There is no route {shown(path)}. {meant}There are: {listed}. The base URL ends in /v1."


def _refuse_other_sites(request: APIRequest) -> None:
    """A browser asks nobody before it lets another site's page send a form, but says from where it comes. Raises
    APIError where --cors-origin does not have it."""
    origin = request.headers.get("origin")
    if ("access-control-allow-origin", origin) in request.more_headers:
        return
    if origin is not None and origin.partition("://")[2].lower() != request.headers.get("host", "").lower():
        raise APIError("insufficient_permissions", "A page of another site may send no form here.")


class App:
    """The application that zse.http serves.

    Args:
        pool: the models and their engines.
        library: makes what knows the models that may be added.
        documents: makes what has the documents of tenants; None: there are none.
        images: makes what decodes images.
        weights: of tenants, for the scheduler.
        any_model_name: a name that no model has means the first one.
        tool_parser, reasoning_parser: for all models, instead of what their chat templates show.
        session_ttl_s: for which a session is kept after its last request, at most.
        file_quota: bytes of the files of a tenant.
        adapter_quota: bytes of uploaded adapters together.

    running: requests that the engine may be working for. phases_ms: of the server's start, for /metrics."""

    request_type = APIRequest

    def __init__(
        self,
        pool: ModelPool,
        *,
        admission: AdmissionControl,
        key: KeyCheck,
        hosts: HostCheck,
        weights: Mapping[str, float] | None = None,
        salts: CacheSalts | None = None,
        cross_origin: "CrossOrigin | None" = None,
        any_model_name: bool = False,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        session_ttl_s: float = SESSION_TTL_S,
        file_quota: int = FILE_QUOTA_BYTES,
        adapter_quota: int = ADAPTER_QUOTA_BYTES,
        library: "Callable[[], Library]" = lambda: libraries.Library(),
        documents: "Callable[[App], Retrieval] | None" = None,
        images: "Callable[[], ImageDecoder]" = lambda: pictures.decoder(),
    ):
        self.pool, self.admission, self._make_library = pool, admission, library
        self._make_documents, self._make_images = documents, images
        self.salts = salts or CacheSalts()
        self.any_model_name = any_model_name
        self.tool_parser, self.reasoning_parser = tool_parser, reasoning_parser
        self.tracer: Any = None  # of zse.server.tracing, where traces are wanted
        self.mcp: McpServers | None = None  # where the operator lists some
        self.created = int(time.time())
        self.draining = False
        self.responses: Counter[tuple[str, int]] = Counter()  # (route, status) → answers; "" is no route of ours
        self.tenants, self.threads = Tenants(), FairThreads()
        self.running: dict[RequestRun, None] = {}  # a set in order
        self.running_keys: set[tuple[str, str]] = set()  # (tenant, Idempotency-Key) of requests that are answered now
        self.running_sessions: set[tuple[str, str]] = set()  # the same by session_id
        self.session_ttl_s = session_ttl_s
        self.wrong_keys = WrongKeys()
        self.logs = RecentRecords()
        self.phases_ms: dict[str, float] = {}
        self.usage: UsageLog | None = None  # where it is kept
        self.key_watch: KeyWatch | None = None
        self.file_quota, self.adapter_quota = file_quota, adapter_quota
        self._key, self._hosts, self._weights = key, hosts, dict(weights or {})
        self.cross_origin = cross_origin
        self.needs_key = key.is_needed

    @property
    def database(self) -> "Database | None":
        """None: the server was started without one."""
        return None if self.key_watch is None else self.key_watch.database

    def replace_hosts(self, hosts: HostCheck) -> None:
        """Other Host names are answered from now on."""
        self._hosts = hosts

    @cached_property
    def library(self) -> "Library":
        """Made when it is first asked for: a start does without."""
        return self._make_library()

    @cached_property
    def images(self) -> "ImageDecoder":
        """Made with the first of them."""
        return self._make_images()

    @cached_property
    def files(self) -> "FileStore | None":
        """None: there is no database."""
        return None if self.database is None else stores.FileStore(self)

    @cached_property
    def _documents(self) -> "Retrieval | None":
        return None if self._make_documents is None else self._make_documents(self)

    def documents(self, field: str | None = None) -> "Retrieval":
        """Those of tenants, from the first request on that asks for them, by its `field`. Raises APIError: the server
        has none."""
        if self._documents is None:
            raise APIError("unsupported_parameter", "This server keeps no documents (--documents none).", field)
        return self._documents

    @cached_property
    def batches(self) -> "BatchRunner | None":
        """None: there is no database."""
        return None if self.files is None else batch_runs.BatchRunner(self, self.files)

    @cached_property
    def adapter_uploads(self) -> "AdapterUploads":
        """Made with the first of them."""
        return uploaded.AdapterUploads(self)

    def replace_keys(self, keys: Sequence[Key], weights: Mapping[str, float]) -> None:
        """The keys have changed: these are all, those of the file and of the database."""
        self._key.replace(keys)
        self.needs_key = self._key.is_needed
        self._weights = dict(weights)
        self.admission.replace(weights, quotas(keys))

    def error_response(self, error: RequestError, request: APIRequest | None) -> Response:
        path = "" if request is None else request.path
        beside = next((api for prefix, api in _APIS.items() if path.startswith(prefix)), errors.OPENAI)
        return errors.response(error, beside if request is None or request.route is None else request.route.api)

    def error_event(self, error: RequestError, request: APIRequest) -> bytes:
        return errors.event(error, request.route.api, request.num_events)

    def identify(self, request: APIRequest) -> Caller:
        """Whose key the request brought. Raises APIError: 401, or 429 where wrong keys keep coming."""
        authorization = request.headers.get("authorization")
        try:
            return self._key.check(authorization)
        except APIError:
            if authorization is not None:
                self.wrong_keys.count(request.connection.client)
            raise

    def check_still_admin(self, request: APIRequest) -> None:
        """Of a stream without an end. Raises APIError: its key has expired, or is no admin's any more."""
        caller = self._key.find(request.headers.get("authorization"))
        if self.needs_key and (caller is None or not caller.access.admin):
            raise invalid_key()

    def end_invalid(self) -> None:
        """End the requests whose key has expired or is its account's no more: a stream with an error event."""
        callers: dict[str | None, Caller | None] = {}  # by key, each looked up once
        for run in list(self.running):
            identity, key = run.request.identity, run.request.headers.get("authorization")
            key = identity or key
            if key not in callers:
                callers[key] = self._key.holder(identity) if identity else self._key.find(key)
            caller = callers[key] or Caller()
            if run.request.account not in ("", caller.account) and run.channel.failure is None:
                run.channel.fail(invalid_key())

    def check_head(self, request: APIRequest) -> None:
        """Everything that can be decided before the body is read. Raises APIError."""
        self._hosts.check(request.headers.get("host"), request.http_10)
        found = find_route(request.path)
        if found is None:
            raise APIError("not_found", unknown(request.path))
        methods, request.parameters = found
        request.route = next(iter(methods.values()))  # until the method is known: how errors are written
        if self.cross_origin is not None and self.cross_origin.allow(request, methods, self.needs_key):
            request.route = msgspec.structs.replace(request.route, scope=PUBLIC, function=PREFLIGHT)
            return
        if request.route.api == errors.ANTHROPIC:
            request.more_headers.append(("request-id", request.id))  # where its clients look
        if "x-api-key" in request.headers:  # Anthropic's clients
            request.headers.setdefault("authorization", f"Bearer {request.headers['x-api-key']}")
        if self.needs_key and any(route.scope != PUBLIC for route in methods.values()):
            request.tenant, request.access, request.account, request.key_id = self.identify(request)
            request.payer = request.account
            request.connection.authenticated = True
        route = methods.get("GET" if request.method == "HEAD" else request.method)
        if route is None:
            allow = ", ".join(sorted({*methods, *(["HEAD"] if "GET" in methods else [])}))
            raise APIError("method_not_allowed", f"This route takes {allow}.", headers=(("allow", allow),))
        request.route, request.has_files = route, route.path in WITH_IMAGES
        if route.scope == ADMIN or request.access.routes is not None:
            self.check_access(request, route)
        if not route.fields:
            return
        kind, _, parameters = request.headers.get("content-type", "").partition(";")
        kind = kind.strip().lower()
        is_upload = bool(route.upload) and not (route.file and kind == route.body_type)
        charset = "" if is_upload else parameters.replace(" ", "").replace('"', "").lower()
        if not (route.file and kind) and kind != route.body_type or charset not in ("", "charset=utf-8"):
            raise APIError("unsupported_media_type", f"Send the body as 'Content-Type: {route.body_type}' in UTF-8.")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise APIError("unsupported_media_type", "Compressed request bodies are not supported.")
        if "content-length" not in request.headers and "transfer-encoding" not in request.headers:
            raise APIError("length_required", "Give the body's length in Content-Length.")
        if int(request.headers.get("content-length") or LARGE_BODY) >= LARGE_BODY:
            self.admission.admit(
                request, needs_room=route.is_queued, counts=False
            )  # a small one costs less than the connection that a refusal ends
        if is_upload:
            _refuse_other_sites(request)
            request.upload = bodies.BodyStream(route.upload)

    def check_access(self, request: APIRequest, route: Route) -> None:
        """Raises APIError insufficient_permissions: the request's key may not use the route."""
        routes = request.access.routes if route.scope == USER else None
        is_closed = route.scope == ADMIN and not request.access.admin
        if is_closed or routes is not None and route.path not in routes:
            raise APIError("insufficient_permissions", "This key may not use this route.")

    def identity(self, request: APIRequest) -> str:
        """By which key_holder() knows the request's key later."""
        holder = Caller(request.tenant, request.access, request.account, request.key_id)
        return self._key.identity(request.headers.get("authorization"), holder)

    def key_holder(self, identity: str) -> Caller | None:
        """Whose key it is; None: it is not valid now."""
        return self._key.holder(identity)

    async def answer_line(self, request: APIRequest) -> Response:
        """What handle() does, for a line of a batch, which is asked the same. Raises RequestError."""
        self.check_access(request, request.route)
        self.admission.admit(request, needs_room=True)
        return await resolve("routes", request.route.function)(self, request)

    async def resume(self) -> None:
        """Go on with the batches that a server before left."""
        if self.batches is not None and await self.batches.left():
            self.batches.wake()

    async def close(self) -> None:
        """End what no client waits for."""
        for made in (self.__dict__.get("batches"), self.__dict__.get("_documents")):
            if made is not None:
                await made.close()
        if "images" in self.__dict__:
            self.images.close()

    async def handle(self, request: APIRequest) -> Response | None:
        if request.route.scope != PUBLIC:
            self.admission.admit(request, needs_room=request.route.is_queued)
        handler = resolve("routes", request.route.function)
        if "idempotency-key" in request.headers and request.route.method == "POST":
            if not request.route.is_queued:
                raise idempotency.refused("only routes on which a model answers take it")
            return await idempotency.once(self, request, handler)
        return await handler(self, request)

    def finished(self, request: APIRequest | None, status: int) -> None:
        """An answer was given: the access log and the counters; status 0: the client left before it began. request
        None: nobody could read it."""
        route = request.route.path if request is not None and request.route is not None else ""
        self.responses[route, status] += 1
        if request is None:
            return
        seconds = time.monotonic() - request.started
        shown_status = status or "-"
        fields = {
            "request_id": request.id,
            "method": request.method,
            "path": request.path,
            "status": status,
            "note": request.note,
            "tenant": request.tenant,
            "duration_ms": round(1000 * seconds, 3),
        }
        log.info(
            "%s %s %s %s %.0f ms %s",
            request.method,
            request.path,
            shown_status,
            request.note,
            1000 * seconds,
            request.id,
            extra={"fields": fields},  # of a line of JSON
        )
        if self.tracer is not None and request.route is not None and request.route.scope == USER:
            self.tracer.record(request, status)
        if request.account:
            usage = self.tenants[request.account]
            usage.requests += 1
            usage.refused += status == 503
            usage.limited += status == 429
            if self.usage is not None:
                self.usage.wake()

    def models(self, request: APIRequest) -> list[Served]:
        """Those that the request's key may use, the default one first."""
        allowed = request.access.models
        return [model for model in self.pool.models if allowed is None or not allowed.isdisjoint(model.spec.names)]

    def usable(self, request: APIRequest) -> list[tuple[Served, str]]:
        """What the request's key may name: (model, ""), and (model, adapter) of its adapters."""
        allowed, found = request.access.models, []
        for model in self.pool.models:
            may_all = allowed is None or not allowed.isdisjoint(model.spec.names)
            named = {"": may_all} | {one: f"{model.name}:{one}" in (allowed or ()) for one in model.adapters.by_name}
            found += [(model, adapter) for adapter, may in named.items() if may_all or may]
        return found

    def find_model(self, request: APIRequest, name: str | None, param: str | None) -> Served:
        """The model of that name, of MODEL:ADAPTER with request.adapter set; for None, and with any_model_name for a
        name that no model has, the first one that the key may use. Raises APIError, of which a key that is bound to
        some models does not learn whether there are others."""
        given = name
        if name is not None and name not in self.pool.by_name:
            base, _, adapter = name.rpartition(":")
            if base in self.pool.by_name and adapter in self.pool.by_name[base].adapters.by_name:
                name, request.adapter = base, adapter
            elif base in self.pool.by_name and adapter == "latest" and request.route.api == OLLAMA:
                name = base  # which means the same there
            elif self.any_model_name:
                name = None
        model = next(iter(self.models(request)), None) if name is None else self.pool.by_name.get(name)
        allowed = request.access.models
        if (
            allowed is not None
            and allowed.isdisjoint((name, given))
            and (model is None or allowed.isdisjoint(model.spec.names))
        ):
            raise APIError("insufficient_permissions", "This key may not use this model.", param)
        if model is None:
            known = (f"{each.name}:{adapter}" if adapter else each.name for each, adapter in self.usable(request))
            names = ", ".join(known) or "none"
            raise APIError(
                "model_not_found", f"The model '{shown(name or '')}' is not served here; served: {names}.", param
            )
        return model

    def request_options(self, request: APIRequest, options: RequestOptions) -> RequestOptions:
        """`options` with what the server knows of who asks. The client's cache_salt becomes a secret one of the
        tenant's."""
        return msgspec.structs.replace(
            options,
            tenant=request.account,
            weight=self._weights.get(request.account),
            cache_salt=self.salts.salt(request.tenant, options.cache_salt),
            max_wait_s=None if request.identity else self.admission.bounds.max_wait_s,
            priority=LOWEST if request.identity else options.priority,
        )
