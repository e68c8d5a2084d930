"""The memory plan: what an engine allocates, counted before it is: the engine is built on a device that only counts,
which takes a few milliseconds, so the plan cannot drift from what is allocated."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from zse.cache import groups, layout
from zse.cache.pages import BLOCK
from zse.engine import divided, image_encoder, stages, state_memory
from zse.engine import draft as draft_model
from zse.engine.config import (
    AUTO_LAYERS,
    GPU_MEMORY_SHARE,
    KV_MEMORY_SHARE,
    EngineConfig,
    ResolvedConfig,
    for_encoder,
    resolve,
    settle,
)
from zse.engine.rank_options import page_pools
from zse.engine.runner import Runner
from zse.engine.step import steps_in_flight
from zse.errors import ConfigError, MemoryPlanError
from zse.models import expert_places
from zse.models.load import load_model
from zse.models.registry import forward_of
from zse.models.weight_plan import STAGING_LABEL, ModelPlan
from zse.plan.record import StepBuffers
from zse.runtime import fetch, probe
from zse.runtime.counting import CountingDevice

Found = tuple[ResolvedConfig, dict[str, int], int]  # a configuration, and what count() says of it
MIB = 1 << 20
# A CUDA context with loaded kernels, measured on an H200 (driver 580): 527 MiB before anything is allocated.
CONTEXT_BYTES = 530 * MIB
# Tokens of a context, or the model's where that is shorter: where weights leave no room for so many, layers go to host
# memory.
LEAST_CONTEXT = 2048


class MemoryPlan(NamedTuple):
    """config: every value settled. parts: what it is for → bytes of device memory, the KV pages in full, and what
    features take when the first request asks for them; "load staging" is given back when the model is loaded. limit:
    what the parts must stay within, None when nothing says so; option: what says so. first_bytes: what is taken once
    the model is loaded: KV pages get memory as they are written, on a GPU some at once; features with their first
    request. model: the ModelPlan, with the layers or experts that stay in host memory. link: bytes a second that a copy
    to the device was measured at, 0 where there are none."""

    config: ResolvedConfig
    parts: dict[str, int]
    limit: int | None
    option: str
    first_bytes: int
    model: ModelPlan
    link: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def expectation(self) -> str:
        """What layers or experts in host memory cost, in one line; empty without any."""
        model = self.model
        if model.expert_slots:
            return expert_places.expectation(model, self.link)
        if not model.host_layers:
            return ""
        return (
            f"{len(model.host_layers)} of {model.config.num_layers} layers stay in host memory ({_mib(model.host_bytes)}) and are "
            f"copied in every step, at {self.link / 1e9:.1f} GB/s: at most {self.link / model.host_bytes:.3g} steps a second, "
            "each a token of every running request (--resident-layers, --max-memory)"
        )

    def describe(self) -> str:
        """A table for logs."""
        config = self.config
        bound = "" if self.limit is None else f", of {_mib(self.limit)} ({self.option})"
        width = max(map(len, self.parts))
        return "\n".join(
            (
                f"memory: {_mib(self.first_bytes)} at the start, {_mib(self.total)} when all is in use{bound}",
                *(f"  {label:{width}} {_mib(nbytes):>12}" for label, nbytes in self.parts.items()),
                f"  {config.num_pages} pages of {config.page_size} tokens, reserved, resident once written; "
                f"on a CPU {_mib(config.cache_idle_memory)} of them when idle (--cache-idle-memory); "
                f"--max-context {config.max_context}, --max-concurrency {config.max_rows}, "
                f"{config.max_tokens_per_step} tokens a step",
                *([f"  {_describe_states(config)}"] if config.state_slots else []),
                *([f"  {self.expectation}"] if self.expectation else []),
            )
        )


def plan_memory(config: EngineConfig, plan, device, draft=None, ranks=None, tower=None, bound=None) -> MemoryPlan:
    """Settle `config` for `plan` (zse.models.load.ModelPlan) on an open device and count its memory. draft: the
    DraftPlan of what drafts beside. ranks: zse.engine.ranks.Ranks where the plan is a rank's share. tower: a TowerPlan. bound: memory_bound()
    from before the weights had their memory; None: they have none.

    resident_layers: of the others the weights stay in host memory; AUTO_LAYERS: where not all layers fit, of as many as must. expert_memory:
    experts stay there, and have so many bytes on the device by turns. Raises MemoryPlanError that names what does not fit, in bytes, and the
    option that shrinks it."""
    model = plan.config
    beside = ranks.group.size if ranks is not None and device.shares_memory else 1  # ranks on this machine
    if not model.causal:
        config = for_encoder(config, model.max_context, device.kernels)
    limit, option = bound or memory_bound(config, device)
    if config.expert_memory is not None:
        plan = expert_places.with_expert_memory(plan, config.expert_memory)
    weight_bytes = sum(plan.memory_bytes.values())
    settings = settle(
        config,
        device.kernels,
        weight_bytes=weight_bytes,
        vocab_size=model.vocab_size,
        memory_bytes=limit or 0,
        token_bytes=partial(_token_bytes, plan, device, ranks),
    )
    seeing = {} if ranks is not None and not ranks.leads else _seeing(config, tower, device, settings.kv_dtype)
    # A row that has a whole context anyway gives nothing back.
    layers = _grouped(config, plan)
    block_bytes = layout.block_nbytes(model, settings.kv_dtype, layers)
    if draft is not None:  # it has pages for the requests of all
        block_bytes += page_pools(config) * layout.block_nbytes(draft.plan.config, settings.kv_dtype)
    if model.has_state:
        room = _cache_room(device, None if limit is None else limit - weight_bytes - sum(seeing.values()), beside)
        settings = state_memory.fewer_rows(config, settings, model, room)

    def pages_of(page_size: int) -> groups.PageGeometry:
        if len(layers) == 1:
            return groups.PageGeometry(page_size=page_size)
        most = steps_in_flight(device, plan.share)
        return groups.geometry(groups.paged_by(plan), settings.max_tokens_per_step, most, page_size)

    def resolved_in(room: int | None) -> Found:
        states = None
        if model.has_state:
            room = _cache_room(device, room, beside)
            states = state_memory.plan_states(config, settings, model, room, block_bytes)
            room = max(0, room - states.nbytes)
        found = resolve(
            config,
            settings,
            device=device.name,
            model_context=model.max_context,
            threads=device.threads,
            room_bytes=room,
            block_bytes=block_bytes,
            memory_bytes=device.memory_total // beside,
            geometry=pages_of,
        )
        found = found if states is None else states.of(found)
        return found, *count(found, plan, device, draft, ranks, seeing, tower)

    wanted, found = _wanted_host_layers(config, model.num_layers, device), None
    if not wanted:
        found = resolved_in(None if limit is None else limit - weight_bytes - sum(seeing.values()))
        if limit is not None and sum(found[1].values()) > limit:
            found = _shrunk(found, resolved_in, limit)
    if limit is not None and wanted != 0 and (found is None or _is_tight(found, limit, config, model)):
        plan, found = _with_host_layers(plan, resolved_in, limit, wanted, found)
        if plan.host_layers:
            found = found[0], *count(found[0], plan, device, draft, ranks, seeing, tower)
    assert found is not None
    resolved, parts, later = found
    if limit is not None and (total := sum(parts.values())) > limit:
        pages = max(0, limit - total + resolved.kv_bytes) // (resolved.kv_bytes // resolved.num_pages)
        raise MemoryPlanError(_does_not_fit(parts, limit, option, pages_of(resolved.page_size).capacity(pages)))
    link = _checked_link(plan, device) if plan.host_layers or plan.expert_slots else 0.0
    first = sum(parts.values()) - resolved.kv_bytes - later - parts.get(STAGING_LABEL, 0)
    if not device.shares_memory:
        first += layout.first_nbytes(resolved.kv_bytes)
    return MemoryPlan(resolved, parts, limit, option, first, plan, link)


def _grouped(config: EngineConfig, plan: ModelPlan) -> groups.Layers:
    if config.kv_layout == "paged":
        return groups.group_layers(plan.config, groups.paged_by(plan))
    return groups.one_group(plan.config)


def runner_of(model) -> type[Runner]:
    """The class of the runner of a Model or a ModelPlan."""
    if model.share is not None and model.share.divides_rows:
        return divided.DividedRunner
    return Runner if groups.paged_by(model) is model.config else stages.StageRunner


def _describe_states(config: ResolvedConfig) -> str:
    snapshots, each = config.state_slots - config.max_rows, config.state_bytes // config.state_slots
    return (
        f"{config.state_slots} states of {_mib(each)}, one for each request and {snapshots} beside prefixes "
        f"(--state-memory), every {config.state_interval} tokens (--state-interval)"
    )


def _cache_room(device, room: int | None, beside: int) -> int:
    """Bytes for what sequences take, where nothing says so: a share of the memory, which `beside` ranks share."""
    return int(device.memory_total * KV_MEMORY_SHARE / beside) if room is None else room


def _wanted_host_layers(config: EngineConfig, layers: int, device) -> int | None:
    """How many the configuration says; None: as many as must be."""
    if config.resident_layers is None:
        return 0
    if device.shares_memory:
        raise ConfigError("resident_layers is for GPUs: a CPU computes in host memory (leave --resident-layers out)")
    return None if config.resident_layers == AUTO_LAYERS else max(0, layers - config.resident_layers)


def _is_tight(found: Found, limit: int, config: EngineConfig, model) -> bool:
    """Whether all layers on the device are too many: over the limit, or beside them too short a context that nobody
    asked for."""
    is_short = found[0].max_context < min(LEAST_CONTEXT, model.max_context)
    is_free = config.max_context is None and config.num_pages is None
    return sum(found[1].values()) > limit or (is_short and is_free)


def _with_host_layers(
    plan: ModelPlan, resolved_in: Callable[[int | None], Found], limit: int, wanted: int | None, otherwise: Found | None
) -> tuple[ModelPlan, Found]:
    """The plan with `wanted` layers in host memory, or as few as must be (None); KV pages have a share of the limit
    then. What was found is counted with all layers on the device. The plan as it is and `otherwise` where nothing
    fits."""
    whole = sum(plan.memory_bytes.values())

    def within(count: int) -> tuple[ModelPlan, int]:
        fewer = plan.with_host_layers(count)
        return fewer, limit + whole - sum(fewer.memory_bytes.values())

    layers = plan.config.num_layers
    if wanted is not None:
        fewer, room = within(wanted)
        found = resolved_in(room - whole)
        return fewer, found if sum(found[1].values()) <= room else _shrunk(found, resolved_in, room)
    found = resolved_in(int(limit * KV_MEMORY_SHARE))
    for count in range(1, layers + 1):
        fewer, room = within(count)
        if sum(found[1].values()) <= room:
            return fewer, found
    fewer, room = within(layers)
    found = _shrunk(found, resolved_in, room)
    return (fewer, found) if sum(found[1].values()) <= room or otherwise is None else (plan, otherwise)


def _checked_link(plan: ModelPlan, device) -> float:
    """Bytes a second from host memory to the device, where the host has room for the plan's layers or experts.
    MemoryPlanError."""
    free, needed = probe.memory_bytes()["available"], plan.host_bytes + expert_places.host_bytes(plan)
    if free is not None and needed > free:
        what = f"{len(plan.host_layers)} layers" if plan.host_layers else "all experts"
        raise MemoryPlanError(
            f"{what} would stay in host memory, {_mib(needed)}; {_mib(free)} are available there: "
            "use --quantize int4 or a smaller model"
        )
    return fetch.link_bytes_per_s(device)


def _shrunk(found: Found, resolved_in: Callable[[int | None], Found], limit: int) -> Found:
    """With as many pages as fit `limit`, or too many if not even the fewest do. What steps take beside the pages (the
    sampler's lists, histories) grows with them, about linearly."""
    total, kv = sum(found[1].values()), found[0].cache_bytes
    while True:
        over = total - limit
        found = resolved_in(max(0, kv - over))
        smaller = sum(found[1].values()), found[0].cache_bytes
        if smaller[1] >= kv:
            return found  # these are the fewest
        if smaller[0] <= limit:
            break
        total, kv = smaller
    rate = (total - smaller[0]) / (kv - smaller[1])
    larger = resolved_in(smaller[1] + int((limit - smaller[0]) / rate))
    return larger if sum(larger[1].values()) <= limit else found


def count(
    config: ResolvedConfig, plan, device, draft=None, ranks=None, seeing: dict[str, int] | None = None, tower=None
) -> tuple[dict[str, int], int]:
    """Bytes by use that an engine of `config` allocates on `device` in the end, and those that only features do. seeing:
    what the first image takes, by use."""
    counter = CountingDevice(device)
    # Kept: what is dropped counts no more.
    runners = [runner_of(plan)(counter, load_model(counter, plan, start=False), config, ranks=ranks, tower=tower)]
    if draft is not None:
        beside = load_model(counter, draft.plan, start=False)
        runners.append(draft_model.draft_runner(config, counter, draft, beside, runners[0]))
    before = sum(counter.memory().values())
    features = runners[0].reserve()
    found = counter.memory()
    later = sum(found.values()) - before
    del features
    del found["weights"]
    parts = plan.memory_bytes | (seeing or {})
    later += sum((seeing or {}).values())
    if draft is not None:
        parts["draft model" if draft.source else "next-token block"] = sum(draft.plan.memory_bytes.values())
    if not device.shares_memory:
        parts["context"] = CONTEXT_BYTES
    return parts | found, later


def _seeing(config: EngineConfig, tower, device, kv_dtype: str) -> dict[str, int]:
    """What the first image takes, by use; nothing without a tower."""
    if tower is None:
        return {}
    cache = {"image cache": config.image_cache} if device.shares_memory else {}
    return {"vision tower": image_encoder.encoder_bytes(device, tower, kv_dtype)} | cache


def _token_bytes(plan, device, ranks) -> int:
    """Scratch that one more token of a step takes."""
    return (_scratch(plan, device, 2048, ranks) - _scratch(plan, device, 1024, ranks)) // 1024


def _scratch(plan, device, tokens: int, ranks) -> int:
    """Bytes of scratch that steps of so many tokens of one sequence work in."""
    counter = CountingDevice(device)
    model = load_model(counter, plan, start=False)
    buffers = StepBuffers.allocate(counter, plan.config, max_tokens=tokens, max_rows=1, max_pages=1)
    group = ranks and ranks.group
    return (
        runner_of(plan)
        .planner_class(counter, forward_of(plan.config), model, None, buffers, group=group)
        .scratch.nbytes
    )


def memory_bound(config: EngineConfig, device) -> tuple[int | None, str]:
    """Bytes that the parts may take together and what says so. ConfigError for options of another device."""
    if config.lazy_experts and device.kernels != "cpu":
        raise ConfigError(
            "lazy_experts is for a CPU: on a GPU --expert-memory keeps experts in host memory, --resident-layers whole layers"
        )
    if config.expert_memory is not None and device.shares_memory:
        raise ConfigError(
            "expert_memory is for GPUs: a CPU computes in host memory (--lazy-experts reads experts when they are chosen)"
        )
    if config.expert_memory is not None and config.resident_layers is not None:
        raise ConfigError(
            "expert_memory and resident_layers: a model's experts or its layers stay in host memory, take one of them"
        )
    limit, option = None, ""
    if not device.shares_memory:
        # The context is there already: what is free is beside it.
        share = config.gpu_memory_utilization or GPU_MEMORY_SHARE
        limit, option = int(device.memory_free * share) + CONTEXT_BYTES, "free on this GPU"
    elif config.gpu_memory_utilization is not None:
        raise ConfigError("gpu_memory_utilization is a part of a GPU's memory; on a CPU use --max-memory")
    if config.max_memory is not None and (limit is None or config.max_memory < limit):
        limit, option = config.max_memory, "--max-memory"
    return limit, option


def _does_not_fit(parts: dict[str, int], limit: int, option: str, tokens: int) -> str:
    """tokens: that the pages would hold within the limit."""
    text = ", ".join(f"{label} {_mib(nbytes)}" for label, nbytes in parts.items())
    model = sum(nbytes for label, nbytes in parts.items() if label in MODEL_PARTS)
    if tokens >= BLOCK:
        advice = f"--max-context x --max-concurrency of at most {tokens} tokens fits" + (
            ", or raise --max-memory" if option == "--max-memory" else ""
        )
    elif model <= limit:
        advice = "lower --max-tokens-per-step or --max-concurrency"
    else:
        advice = "use --quantize int4, a smaller model, --device cpu, or on a GPU --resident-layers auto (of experts --expert-memory)"
    bound = "of --max-memory" if option == "--max-memory" else option
    return f"needs {_mib(sum(parts.values()))} of memory ({text}), over the {_mib(limit)} {bound}: {advice}"


# Parts that no option of the engine but the model's own makes smaller.
MODEL_PARTS = (
    "embedding",
    "layers",
    "layer slots",
    "expert places",
    "expert tables",
    "head",
    "draft model",
    "next-token block",
    "vision tower",
    "context",
    "kv host",
)


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.0f} MiB"
