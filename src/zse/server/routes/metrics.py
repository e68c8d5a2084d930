"""GET /metrics in the text format of Prometheus (version 0.0.4): what starts and loads took, and what is going on."""

import math
from operator import attrgetter

from zse import __version__
from zse.http.exchange import Response
from zse.scheduler.counters import BOUNDS, NAMES
from zse.server.api_request import APIRequest
from zse.server.engine_counters import COUNTERS
from zse.server.statistics import METRICS, Histogram

_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STATES = ("unloaded", "loading", "loaded", "restarting", "failed", "stopping")


class _Page:
    """Lines by metric, in the order in which the metrics were first named."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}

    def add(self, name: str, kind: str, help: str, value: float, **labels: str) -> None:
        self._line(name, kind, help, "", value, labels)

    def _line(self, name: str, kind: str, help: str, suffix: str, value: float, labels: dict[str, str]) -> None:
        lines = self._lines.setdefault(name, [f"# HELP {name} {help}", f"# TYPE {name} {kind}"])
        text = ",".join(f'{label}="{_escaped(str(of))}"' for label, of in labels.items())
        number = f"{value:.12g}"  # %g alone would round a total of tokens above a million
        lines.append(f"{name}{suffix}{{{text}}} {number}" if text else f"{name}{suffix} {number}")

    def histogram(self, name: str, help: str, histogram: Histogram, **labels: str) -> None:
        total = 0
        for bound, count in zip([*histogram.bounds, math.inf], histogram.counts, strict=True):
            total += count
            self._line(
                name,
                "histogram",
                help,
                "_bucket",
                total,
                labels | {"le": "+Inf" if bound == math.inf else f"{bound:g}"},
            )
        self._line(name, "histogram", help, "_sum", histogram.sum, labels)
        self._line(name, "histogram", help, "_count", total, labels)

    def text(self) -> str:
        return "".join(line + "\n" for lines in self._lines.values() for line in lines)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


# (name, kind, help, attribute of the App)
OF_SERVER = (
    ("zse_requests_running", "gauge", "Answers that run or wait.", "admission.choices"),
    (
        "zse_queued_prompt_tokens",
        "gauge",
        "Prompt tokens of requests without a first token.",
        "admission.queued_tokens",
    ),
    ("zse_requests_refused_total", "counter", "Requests that the full queue refused (503).", "admission.num_refused"),
    ("zse_requests_limited_total", "counter", "Requests beyond their key's quota (429).", "admission.num_limited"),
    ("zse_parked_engines", "gauge", "Engines without a model that are up.", "pool.spares_ready"),
    ("zse_parked_engine_loads_total", "counter", "Loads into a parked engine.", "pool.num_spare_loads"),
)
# (name, help, histogram of a model's Statistics)
HISTOGRAMS = (
    ("zse_time_to_first_token_seconds", "From a request's head to its first token.", "first_token_s"),
    ("zse_time_between_tokens_seconds", "Between two tokens of an answer.", "between_tokens_s"),
    ("zse_request_seconds", "From a request's head to its end.", "request_s"),
)
# (name, kind, help, attribute of a Served; those of engine.info are there while the model is loaded)
OF_MODEL = (
    ("zse_model_requests_total", "counter", "Requests that named the model.", "num_requests"),
    ("zse_model_loads_total", "counter", "Loads on demand.", "num_loads"),
    ("zse_model_evictions_total", "counter", "Times that the model was unloaded.", "num_evictions"),
    ("zse_prompt_tokens_total", "counter", "Tokens of prompts.", "statistics.prompt_tokens"),
    (
        "zse_cached_prompt_tokens_total",
        "counter",
        "Of those, the ones that were in the prefix cache.",
        "statistics.cached_tokens",
    ),
    (
        "zse_completion_tokens_total",
        "counter",
        "Tokens of answers, those of clients that left included.",
        "statistics.completion_tokens",
    ),
    ("zse_engine_restarts_total", "counter", "Restarts of the engine after it died.", "engine.num_restarts"),
    ("zse_engine_steps", "gauge", "Steps of the engine that runs.", "engine.heartbeat.steps"),
    ("zse_engine_running", "gauge", "Requests in the batch.", "engine.heartbeat.running"),
    ("zse_engine_waiting", "gauge", "Requests that wait for a place in the batch.", "engine.heartbeat.waiting"),
    ("zse_engine_free_pages", "gauge", "Free KV pages.", "engine.heartbeat.free_pages"),
    ("zse_engine_last_step_age_seconds", "gauge", "Since the last step while there is work.", "engine.last_step_age_s"),
    ("zse_engine_pages", "gauge", "KV pages.", "engine.info.num_pages"),
    ("zse_engine_page_tokens", "gauge", "Tokens of a KV page.", "engine.info.page_size"),
)


async def metrics(app, request: APIRequest) -> Response:
    """GET /metrics"""
    page = _Page()
    page.add("zse_info", "gauge", "The version.", 1, version=__version__)
    for phase, ms in app.phases_ms.items():
        help = "Since exec of the server, when the phase ended."
        page.add("zse_start_phase_seconds", "gauge", help, ms / 1000, phase=phase)
    for name, kind, help, attribute in OF_SERVER:
        page.add(name, kind, help, attrgetter(attribute)(app))
    for (route, status), count in sorted(app.responses.items()):
        page.add(
            "zse_http_responses_total",
            "counter",
            "Answers by route and status.",
            count,
            route=route,
            status=str(status),
        )
    for metric in METRICS:
        for tenant, usage in app.tenants.items():
            page.add(metric.name, "counter", metric.help, getattr(usage, metric.field), tenant=tenant)
    for served in app.pool.models:
        _add_model(page, served)
    return Response(200, page.text().encode(), media_type=_MEDIA_TYPE)


def _add_model(page: _Page, served) -> None:
    name, engine = served.name, served.engine
    for state in _STATES:
        help = "1 for the state that the model is in."
        page.add("zse_model_state", "gauge", help, served.state == state, model=name, state=state)
    for metric, kind, help, attribute in OF_MODEL:
        if engine.info is not None or not attribute.startswith("engine.info"):
            page.add(metric, kind, help, attrgetter(attribute)(served), model=name)
    if served.load_ms:
        help = "What the last load on demand took."
        page.add("zse_model_load_seconds", "gauge", help, served.load_ms / 1000, model=name)
    for metric, help, histogram in HISTOGRAMS:
        page.histogram(metric, help, getattr(served.statistics, histogram), model=name)
    for reason, count in sorted(served.statistics.finished.items()):
        page.add("zse_answers_total", "counter", "Answers by how they ended.", count, model=name, reason=reason)
    counters = engine.heartbeat.counters
    if NAMES[0] in counters:
        waits = Histogram(BOUNDS)
        waits.counts = [int(counters[bucket]) for bucket in NAMES]
        waits.sum = counters.get("queue_wait_s", 0.0)
        page.histogram("zse_queue_seconds", "From the engine's queue to a place in the batch.", waits, model=name)
    for total, value in counters.items():
        if total in COUNTERS:  # the others, queue_wait_le_…, are the histogram above
            page.add(f"zse_engine_{total}", *COUNTERS[total], value, model=name)
    if engine.info is not None:
        for phase, ms in engine.info.phases_ms.items():
            help = "Since exec of the engine, or since it was told to load."
            page.add("zse_engine_phase_seconds", "gauge", help, ms / 1000, model=name, phase=phase)
        for label, nbytes in engine.info.memory_bytes.items():
            page.add("zse_engine_memory_bytes", "gauge", "Planned device memory by use.", nbytes, model=name, use=label)
