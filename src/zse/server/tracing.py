"""Traces over OTLP (OpenTelemetry), by the extra `otel`: a span for each request, its parent the caller's (W3C
traceparent), with spans of what it went through. They are made when a request has ended, by a thread; the event loop
puts one object into a queue.

Nothing that was said is in a span: names, numbers, the model, the request's id. Attributes are named as OpenTelemetry's
conventions for HTTP and generative AI name them. OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS and
so on are heeded."""

import logging
import os
import queue
import threading
import time
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from zse import __version__
from zse.errors import ConfigError

log = logging.getLogger("zse.server")

MOST_WAITING = 4096  # requests whose spans are not made yet; more are dropped
FLUSH_S = 3.0  # for what is not exported when the server ends
_OPERATIONS = {"/v1/completions": "text_completion", "/api/generate": "text_completion"} | dict.fromkeys(
    ("/v1/embeddings", "/api/embed", "/api/embeddings"), "embeddings"
)


def checked(endpoint: str) -> str:
    """The address that spans are sent to: with OTLP's path where it has none. Raises ConfigError, also without the
    extra."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint!r} is not the address of an OTLP collector over HTTP, such as http://localhost:4318"
        )
    for name in ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        try:
            found = find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ConfigError("--otlp-traces-endpoint needs the extra otel: pip install 'zse[otel]'")
    return endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"


class Tracer:
    """Sends the spans of requests that have ended to `endpoint`, as checked() gives it."""

    def __init__(self, endpoint: str):
        self._endpoint = endpoint
        self._requests: queue.Queue = queue.Queue(MOST_WAITING)
        self._dropped = 0
        self._provider: Any = None
        self._thread = threading.Thread(target=self._run, name="zse-traces", daemon=True)
        self._thread.start()

    def record(self, request, status: int) -> None:
        """A request has ended. Never waits."""
        now, wall = time.monotonic(), time.time()
        try:
            self._requests.put_nowait((_facts(request, status, now), wall - now, now))
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                log.warning("traces of requests are dropped: more than %d wait to be sent", MOST_WAITING)

    def close(self) -> None:
        """Send what is there, for FLUSH_S at most."""
        try:
            self._requests.put(None, timeout=FLUSH_S)
        except queue.Full:
            return
        self._thread.join(FLUSH_S)

    def _run(self) -> None:
        try:
            make = self._open()
        except Exception as error:
            log.error("no traces are sent: %s", error)
            return
        while (item := self._requests.get()) is not None:
            try:
                make(*item)
            except Exception:
                log.exception("a trace was not made")
        self._provider.shutdown()

    def _open(self):
        """Imports the SDK (0.3 s) and gives what makes the spans of a request."""
        trace = import_module("opentelemetry.trace")
        sdk = import_module("opentelemetry.sdk.trace")
        export = import_module("opentelemetry.sdk.trace.export")
        exporter = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter
        resource = import_module("opentelemetry.sdk.resources").Resource
        propagator = import_module("opentelemetry.trace.propagation.tracecontext").TraceContextTextMapPropagator()
        about = {"service.version": __version__}
        if "OTEL_SERVICE_NAME" not in os.environ:
            about["service.name"] = "zse"
        self._provider = sdk.TracerProvider(resource=resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter(endpoint=self._endpoint)))
        tracer = self._provider.get_tracer("zse", __version__)

        def make(facts: dict, offset: float, now: float) -> None:
            def ns(at: float) -> int:
                return int(1e9 * (at + offset))

            span = tracer.start_span(
                facts["name"],
                context=propagator.extract(facts["carrier"]),
                kind=trace.SpanKind.SERVER,
                attributes=facts["attributes"],
                start_time=ns(facts["started"]),
            )
            inside = trace.set_span_in_context(span)
            for name, first, last in facts["parts"]:
                tracer.start_span(name, context=inside, start_time=ns(first)).end(ns(last))
            if facts["failed"]:
                span.set_status(trace.Status(trace.StatusCode.ERROR))
            span.end(ns(now))

        return make


def _facts(request, status: int, now: float) -> dict[str, Any]:
    """What the spans of a request say. Times are monotonic seconds."""
    path = request.route.path
    attributes = {
        "http.request.method": request.method,
        "http.route": path,
        "http.response.status_code": status,
        "zse.request_id": request.id,
    }
    parts: list[tuple[str, float, float]] = []
    run = request.run
    if run is not None and run.served is not None:
        attributes |= {
            "gen_ai.operation.name": _OPERATIONS.get(path, "chat"),
            "gen_ai.provider.name": "zse",
            "gen_ai.request.model": run.served.name,
            "gen_ai.usage.input_tokens": run.prompt_tokens,
            "gen_ai.usage.output_tokens": run.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": run.cached,
            "gen_ai.response.finish_reasons": sorted(run.outcomes),
        }
        end = run.submitted or now
        parts.append(("prepare", request.started, end))
        if run.first:
            begun = min(end + run.queued_s, run.first)
            parts += [("queue", end, begun), ("prefill", begun, run.first), ("decode", run.first, run.last)]
            attributes["gen_ai.server.time_to_first_token"] = run.first - request.started
        elif run.submitted:
            parts.append(("engine", end, now))
    carrier = {name: request.headers[name] for name in ("traceparent", "tracestate") if name in request.headers}
    return {
        "name": f"{request.method} {path}",
        "carrier": carrier,
        "attributes": attributes,
        "started": request.started,
        "parts": parts,
        "failed": status >= 500,
    }
