"""GET /metrics in the text format of Prometheus (version 0.0.4): what starts and loads took, and what is going on."""

import math
from operator import attrgetter

from zse import __version__
from zse.engine.client import READY
from zse.http.exchange import Response
from zse.scheduler.counters import BOUNDS, NAMES
from zse.server.api_request import APIRequest
from zse.server.engine_counters import COUNTERS
from zse.server.work import Histogram

_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STATES = ("unloaded", "loading", "loaded", "restarting", "failed", "stopping")

# (name, help, attribute) of the App; a name that ends in _total is a counter, any other one a gauge.
OF_SERVER = (
    ("zse_requests_running", "Answers that run or wait.", "admission.choices"),
    ("zse_queued_prompt_tokens", "Prompt tokens of requests without a first token.", "admission.queued_tokens"),
    ("zse_requests_refused_total", "Requests that the full queue refused (503).", "admission.num_refused"),
    ("zse_requests_limited_total", "Requests beyond their key's quota (429).", "admission.num_limited"),
    ("zse_wrong_keys_total", "Requests with a key that is not valid (401, or 429).", "wrong_keys.num_wrong"),
    ("zse_parked_engines", "Engines without a model that are up.", "pool.spares.ready"),
    ("zse_parked_engine_loads_total", "Loads into a parked engine.", "pool.spares.num_loads"),
)
# Of a tenant's Usage.
OF_TENANT = (
    ("zse_tenant_requests_total", "Requests of a tenant, by the name of its keys, that were answered.", "requests"),
    ("zse_tenant_requests_refused_total", "Of those, the ones that the full queue refused (503).", "refused"),
    ("zse_tenant_requests_limited_total", "Of those, the ones beyond the quota (429).", "limited"),
    ("zse_tenant_prompt_tokens_total", "Tokens of a tenant's prompts.", "prompt_tokens"),
    ("zse_tenant_cached_prompt_tokens_total", "Of those, the ones that were in the prefix cache.", "cached_tokens"),
    ("zse_tenant_completion_tokens_total", "Tokens of a tenant's answers.", "completion_tokens"),
    ("zse_tenant_computed_tokens_total", "Tokens that were computed for a tenant, its charges.", "computed_tokens"),
)
# Histograms of a model's Statistics.
HISTOGRAMS = (
    ("zse_time_to_first_token_seconds", "From a request's head to its first token.", "first_token_s"),
    ("zse_time_between_tokens_seconds", "Between two tokens of an answer.", "between_tokens_s"),
    ("zse_request_seconds", "From a request's head to its end.", "request_s"),
    ("zse_prefill_seconds", "From a place in the batch to the first token.", "prefill_s"),
    ("zse_decode_seconds", "From the first token of a request to its last.", "decode_s"),
    ("zse_time_per_output_token_seconds", "Between two tokens, the mean of each answer.", "per_token_s"),
    ("zse_prompt_length_tokens", "Tokens of a request's prompts.", "prompt_length"),
    ("zse_completion_length_tokens", "Tokens of an answer.", "completion_length"),
)
# Of a Served; those of engine.info are there while the model is loaded.
OF_MODEL = (
    ("zse_model_requests_total", "Requests that named the model.", "num_requests"),
    ("zse_model_loads_total", "Loads on demand.", "num_loads"),
    ("zse_model_evictions_total", "Times that the model was unloaded.", "num_evictions"),
    ("zse_prompt_tokens_total", "Tokens of prompts.", "statistics.prompt_tokens"),
    ("zse_cached_prompt_tokens_total", "Of those, the ones that were in the prefix cache.", "statistics.cached_tokens"),
    (
        "zse_completion_tokens_total",
        "Tokens of answers, those of clients that left included.",
        "statistics.completion_tokens",
    ),
    ("zse_engine_restarts_total", "Restarts of the engine after it died.", "engine.num_restarts"),
    ("zse_engine_steps", "Steps of the engine that runs.", "engine.heartbeat.steps"),
    ("zse_engine_running", "Requests in the batch.", "engine.heartbeat.running"),
    ("zse_engine_waiting", "Requests that wait for a place in the batch.", "engine.heartbeat.waiting"),
    ("zse_engine_free_pages", "Free KV pages.", "engine.heartbeat.free_pages"),
    ("zse_engine_last_step_age_seconds", "Since the last step while there is work.", "engine.last_step_age_s"),
    ("zse_engine_pages", "KV pages.", "engine.info.num_pages"),
    ("zse_engine_page_tokens", "Tokens of a KV page.", "engine.info.page_size"),
)


# vLLM's names (docs.vllm.ai, "Production Metrics") for dashboards and autoscalers that ask for them: (their name, ours,
# values of labels that are called otherwise there). Their label of the model is model_name; `reason` is
# finished_reason.
_REASONS = {"tool_calls": "stop", "cancelled": "abort"}
ALIASES: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("vllm:num_requests_running", "zse_engine_running", {}),
    ("vllm:num_requests_waiting", "zse_engine_waiting", {}),
    ("vllm:kv_cache_usage_perc", "zse_engine_kv_usage", {}),
    ("vllm:gpu_cache_usage_perc", "zse_engine_kv_usage", {}),
    ("vllm:prefix_cache_queries_total", "zse_prompt_tokens_total", {}),
    ("vllm:prefix_cache_hits_total", "zse_cached_prompt_tokens_total", {}),
    ("vllm:num_preemptions_total", "zse_engine_preemptions", {}),
    ("vllm:prompt_tokens_total", "zse_prompt_tokens_total", {}),
    ("vllm:generation_tokens_total", "zse_completion_tokens_total", {}),
    ("vllm:request_success_total", "zse_answers_total", _REASONS),
    ("vllm:time_to_first_token_seconds", "zse_time_to_first_token_seconds", {}),
    ("vllm:inter_token_latency_seconds", "zse_time_between_tokens_seconds", {}),
    ("vllm:time_per_output_token_seconds", "zse_time_between_tokens_seconds", {}),
    ("vllm:request_time_per_output_token_seconds", "zse_time_per_output_token_seconds", {}),
    ("vllm:e2e_request_latency_seconds", "zse_request_seconds", {}),
    ("vllm:request_queue_time_seconds", "zse_queue_seconds", {}),
    ("vllm:request_prefill_time_seconds", "zse_prefill_seconds", {}),
    ("vllm:request_decode_time_seconds", "zse_decode_seconds", {}),
    ("vllm:request_prompt_tokens", "zse_prompt_length_tokens", {}),
    ("vllm:request_generation_tokens", "zse_completion_length_tokens", {}),
    ("vllm:spec_decode_num_drafts_total", "zse_engine_verified_runs", {}),
    ("vllm:spec_decode_num_draft_tokens_total", "zse_engine_drafted_tokens", {}),
    ("vllm:spec_decode_num_accepted_tokens_total", "zse_engine_accepted_tokens", {}),
)
_LABELS = {"model": "model_name", "reason": "finished_reason"}


class _Page:
    """Samples by metric, in the order in which the metrics were first named."""

    def __init__(self) -> None:
        # name → (help, kind, (suffix, labels) → value)
        self._metrics: dict[str, tuple[str, str, dict[tuple, float]]] = {}

    def add(self, name: str, help: str, value: float, kind: str = "", suffix: str = "", **labels: object) -> None:
        """One sample; of the same labels they add up. kind "": by the name."""
        kind = kind or ("counter" if name.endswith("_total") else "gauge")
        samples = self._metrics.setdefault(name, (help, kind, {}))[2]
        key = suffix, tuple((label, str(of)) for label, of in labels.items())
        samples[key] = samples.get(key, 0) + value

    def histogram(self, name: str, help: str, histogram: Histogram, model: str) -> None:
        total = 0
        for bound, count in zip([*histogram.bounds, math.inf], histogram.counts, strict=True):
            total += count
            le = "+Inf" if bound == math.inf else f"{bound:g}"
            self.add(name, help, total, "histogram", "_bucket", model=model, le=le)
        self.add(name, help, histogram.sum, "histogram", "_sum", model=model)
        self.add(name, help, total, "histogram", "_count", model=model)

    def alias(self, name: str, of: str, values: dict[str, str]) -> None:
        """The samples of one metric once more, as another."""
        if of not in self._metrics:
            return  # no model of the server has it now
        _, kind, samples = self._metrics[of]
        for (suffix, labels), value in samples.items():
            named = {_LABELS.get(label, label): values.get(text, text) for label, text in labels}
            self.add(name, f"{of}, as vLLM calls it.", value, kind, suffix, **named)

    def text(self) -> str:
        lines = []
        for name, (help, kind, samples) in self._metrics.items():
            lines += [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]
            for (suffix, labels), value in samples.items():
                text = ",".join(f'{label}="{_escaped(of)}"' for label, of in labels)
                number = f"{value:.12g}"  # %g alone would round a total of tokens above a million
                lines.append(f"{name}{suffix}{{{text}}} {number}" if text else f"{name}{suffix} {number}")
        return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


async def metrics(app, request: APIRequest) -> Response:
    """GET /metrics"""
    page = _Page()
    page.add("zse_info", "The version.", 1, version=__version__)
    help = "Since exec of the server, when the phase ended."
    for phase, ms in app.phases_ms.items():
        page.add("zse_start_phase_seconds", help, ms / 1000, phase=phase)
    for name, help, attribute in OF_SERVER:
        page.add(name, help, attrgetter(attribute)(app))
    for (route, status), count in sorted(app.responses.items()):
        page.add("zse_http_responses_total", "Answers by route and status.", count, route=route, status=status)
    if app.pool.resident is not None:
        page.add("zse_kept_in_memory_bytes", "Of files of models that were unloaded.", app.pool.resident.num_bytes)
    for (label, outcome), count in sorted(app.mcp.counts.items()) if app.mcp is not None else ():
        page.add("zse_mcp_calls_total", "Calls of MCP servers' tools.", count, server=label, outcome=outcome)
    for name, help, attribute in OF_TENANT:
        for tenant, usage in app.tenants.items():
            page.add(name, help, getattr(usage, attribute), tenant=tenant)
    for served in app.pool.models:
        _add_model(page, served)
    for alias in ALIASES:
        page.alias(*alias)
    return Response(200, page.text().encode(), media_type=_MEDIA_TYPE)


def _add_model(page: _Page, served) -> None:
    model, engine = served.name, served.engine
    info = engine.info if engine.state == READY else None  # of one that has ended nothing is held
    for state in _STATES:
        page.add(
            "zse_model_state", "1 for the state that the model is in.", served.state == state, model=model, state=state
        )
    for metric, help, attribute in OF_MODEL:
        if info is not None or not attribute.startswith("engine.info"):
            page.add(metric, help, attrgetter(attribute)(served), model=model)
    if served.load_ms:
        help = "What the last load on demand took."
        page.add("zse_model_load_seconds", help, served.load_ms / 1000, model=model)
    for metric, help, histogram in HISTOGRAMS:
        page.histogram(metric, help, getattr(served.statistics, histogram), model)
    for reason, count in sorted(served.statistics.finished.items()):
        page.add("zse_answers_total", "Answers by how they ended.", count, model=model, reason=reason)
    counters = engine.heartbeat.counters
    if NAMES[0] in counters:
        waits = Histogram(BOUNDS)
        waits.counts = [int(counters[bucket]) for bucket in NAMES]
        waits.sum = counters.get("queue_wait_s", 0.0)
        page.histogram("zse_queue_seconds", "From the engine's queue to a place in the batch.", waits, model)
    for total, value in counters.items():
        if total in COUNTERS:  # the others, queue_wait_le_…, are the histogram above
            kind, help = COUNTERS[total]
            page.add(f"zse_engine_{total}", help, value, kind, model=model)
    if info is not None:
        beat = engine.heartbeat
        used = info.num_pages - beat.free_pages - counters.get("prefix_idle_pages", 0)
        help = "Share of the KV pages that requests use; cached ones that nobody uses count as free."
        page.add("zse_engine_kv_usage", help, max(0.0, used / max(1, info.num_pages)), model=model)
        help = "Since exec of the engine, or since it was told to load."
        for phase, ms in info.phases_ms.items():
            page.add("zse_engine_phase_seconds", help, ms / 1000, model=model, phase=phase)
        for label, nbytes in info.memory_bytes.items():
            page.add("zse_engine_memory_bytes", "Planned device memory by use.", nbytes, model=model, use=label)
