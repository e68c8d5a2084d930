"""Traces: a collector of OTLP over HTTP gets a span for each request, below the caller's, with what it went through."""

import signal
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from harness import chat_body, read_reply, request
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from test_lifecycle import start  # noqa: F401

from zse.errors import ConfigError
from zse.server import tracing

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector():
    """(address, spans and bodies as they come)"""
    spans, bodies = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            bodies.append((self.path, body))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                name = {each.key: each.value.string_value for each in resource.resource.attributes}["service.name"]
                spans.extend((name, span) for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", spans, bodies
    server.shutdown()
    thread.join()
    server.server_close()


def attributes(span) -> dict:
    values = {each.key: each.value for each in span.attributes}
    return {key: getattr(value, value.WhichOneof("value")) for key, value in values.items()}


def test_a_request_s_spans(start, collector):  # noqa: F811
    address, spans, bodies = collector
    process = start("--otlp-traces-endpoint", address, "--api-key", "sk-1", env={"OTEL_BSP_SCHEDULE_DELAY": "100"})
    sent = [
        (chat_body("SECRETPROMPT", max_tokens=4), {"traceparent": f"00-{TRACE}-{PARENT}-01"}),
        (chat_body("SECRETPROMPT", max_tokens=4, stream=True), {}),
        (chat_body("unsampled"), {"traceparent": f"00-{TRACE[::-1]}-{PARENT}-00"}),
        (chat_body("SECRETPROMPT", nonsense=1), {"traceparent": "not one at all"}),
    ]
    ids = []
    for body, headers in sent:
        with process.send(
            request("POST", "/v1/chat/completions", body, headers | {"authorization": "Bearer sk-1"})
        ) as sock:
            ids.append(read_reply(sock).headers["x-request-id"])
    assert process.get("/health/live").status == 200  # has no span
    process.popen.send_signal(signal.SIGTERM)
    assert process.finish()[0] == 0
    assert {path for path, _ in bodies} == {"/v1/traces"} and not any(b"SECRETPROMPT" in body for _, body in bodies)
    assert {name for name, _ in spans} == {"zse"}
    roots = {attributes(span)["zse.request_id"]: span for _, span in spans if span.kind == 2}
    assert set(roots) == {ids[0], ids[1], ids[3]}
    first = roots[ids[0]]
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, PARENT)
    assert roots[ids[1]].parent_span_id == b"" and roots[ids[3]].trace_id.hex() != TRACE
    values = attributes(first)
    assert values["http.response.status_code"] == 200 and values["http.route"] == "/v1/chat/completions"
    assert values["gen_ai.request.model"] == "fake" and values["gen_ai.usage.output_tokens"] == 4
    assert values["gen_ai.operation.name"] == "chat" and values["gen_ai.usage.input_tokens"] > 0
    assert attributes(roots[ids[3]])["http.response.status_code"] == 400
    for root in (first, roots[ids[1]]):
        parts = {span.name: span for _, span in spans if span.parent_span_id == root.span_id}
        assert list(parts) == ["prepare", "queue", "prefill", "decode"]
        at = root.start_time_unix_nano
        for span in parts.values():
            assert abs(span.start_time_unix_nano - at) < 2000 and span.end_time_unix_nano >= span.start_time_unix_nano
            assert span.trace_id == root.trace_id
            at = span.end_time_unix_nano
        assert at <= root.end_time_unix_nano + 2000
        assert parts["decode"].end_time_unix_nano > parts["decode"].start_time_unix_nano


def test_a_collector_that_is_not_there_holds_nobody_up(start):  # noqa: F811
    process = start("--otlp-traces-endpoint", "http://127.0.0.1:1", env={"OTEL_BSP_SCHEDULE_DELAY": "50"})
    for _ in range(3):
        assert process.chat("hi").status == 200
    process.popen.send_signal(signal.SIGTERM)
    assert process.finish(20)[0] == 0


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://x", "http://", "/path"])
def test_an_address_that_is_none_is_refused(start, endpoint):  # noqa: F811
    code, stderr = start("--otlp-traces-endpoint", endpoint, wait=False).finish()
    assert code == 2 and "such as http://localhost:4318" in stderr and stderr.count("\n") == 1


def test_without_the_extra_it_is_refused(monkeypatch):
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'zse\[otel\]'"):
        tracing.checked("http://localhost:4318")
    monkeypatch.undo()
    assert tracing.checked("http://localhost:4318") == "http://localhost:4318/v1/traces"
    assert tracing.checked("https://host/custom/path") == "https://host/custom/path"
