"""From a path to an engine that can step. Threads open the device and read weights while Python goes on importing and
recording."""

import os
import sys
from contextlib import suppress
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import msgspec

from zse import env, lazy
from zse.cache import divided, groups, prefix, states
from zse.cache import pages as cache_pages
from zse.engine import core, disk_opening, expert_counters, host_memory, memory, messages, metrics, roles
from zse.engine import draft as draft_model
from zse.engine import ranks as model_ranks
from zse.engine.config import GPU_MIXED_TOKENS, QUEUE_TOKENS, EngineConfig, ResolvedConfig
from zse.engine.rank_options import num_ranks
from zse.engine.step import steps_in_flight
from zse.errors import DeviceError, UnsupportedError, ZSEError
from zse.formats import opening as model_files
from zse.kernel import cache as kernel_cache
from zse.lazy import logging
from zse.models import load as model_load
from zse.models import registry, vision
from zse.runtime import load as loads
from zse.runtime import opening as device_opening
from zse.runtime import probe
from zse.scheduler import scheduler as schedulers
from zse.speculative import ngram


class Loaded:
    """An engine and what belongs to it. source: the open model file; model_config: its ModelConfig; plan: its
    MemoryPlan."""

    def __init__(self, engine, config: ResolvedConfig, model_config, source, device, plan):
        self.engine, self.config, self.model_config = engine, config, model_config
        self.source, self.device, self.plan = source, device, plan

    @property
    def memory_bytes(self) -> dict[str, int]:
        return self.plan.parts


def load_engine(config: EngineConfig, phases, on_source=None, on_plan=None, opening=None, ranks=None) -> Loaded:
    """Open, load and make ready. phases: Phases to mark. on_source(source): called as soon as the file is open (the
    tokenizer can load meanwhile). on_plan(MemoryPlan): called before anything but weights is allocated.
    opening: the PendingDevice to load onto, if one was started. ranks: the Follower, in a process beside rank 0's. Raises
    FormatError, UnsupportedError, ConfigError, DeviceError, GroupError."""
    if num_ranks(config) == 1:
        return _load(config, phases, on_source, on_plan, opening)
    ranks = ranks or model_ranks.Leader.start(config)
    loaded = _load(ranks.config, phases, on_source, on_plan, opening, ranks)
    if ranks.leads:
        loaded.engine.use("ranks", model_ranks.RankWatch(ranks))
        try:
            ranks.wait_loaded()
            if loaded.config.cache_disk is not None:
                loaded.engine.feature("disk").read_ahead()
        except BaseException:
            loaded.engine.close()
            loaded.source.close()
            raise
        phases.mark("ranks loaded")
    return loaded


def _load(config: EngineConfig, phases, on_source, on_plan, opening, ranks=None) -> Loaded:
    share, opening = ranks.share if ranks else {}, opening or device_opening.PendingDevice(config.device)
    opening.threads = config.threads
    device = model = engine = source = draft = drafting = ahead = tower = None
    try:
        source = model_files.open_model(config.model)
        phases.mark("file open")
        ahead = _read_ahead(config.device, source.files)
        if on_source is not None:
            on_source(source)
        plan = _plan_beside(opening, source, config, share)
        device = _opened(opening, config)
        phases.mark("device open")
        if plan is None or plan.family != device.kernels:
            plan = model_load.plan_model(source, quantize=config.quantize, family=device.kernels, **share)
        plan = plan._replace(lazy_experts=config.lazy_experts)
        if (config.draft_model or config.speculation == "mtp") and (ranks is None or ranks.leads):
            whole = plan.config if plan.share is None else plan.share.whole
            draft = draft_model.plan_drafts(config, source, whole, device.kernels)
        bound = memory.memory_bound(config, device)
        model = _read_early(config, plan, device, source, bound[0], ranks is None and ahead.finished)
        if early := model is not None:
            ahead.stop()
            phases.mark("weights reading")
        planned, tower = _settled(config, plan, device, source, draft, ranks, bound if early else None)
        plan = planned.model
        _tell(planned, on_plan)
        if model is None:
            model = model_load.load_model(device, plan, start=False, verify_weights=config.verify_weights)
        engine = _build(planned.config, device, model, plan, tower, ranks)
        if planned.config.cache_disk is not None:
            disk_opening.open_disk_tier(engine, planned.config, source, config.quantize, ranks)
        if planned.config.role != "both" or planned.config.kv_listen or planned.config.kv_peers:
            roles.open_roles(engine, planned.config, source, config.quantize)
        phases.mark("engine built")
        if not early:
            model.start()  # beside what reads ahead: alone its threads need a second more of a cold disk
            phases.mark("weights reading")
        if draft is not None:
            drafting, speculator = draft_model.build_draft(
                planned.config, device, draft, plan, engine, verify_weights=config.verify_weights
            )
            engine.use("speculation", speculator)
        engine.runner.record_ahead()
        phases.mark("prefill recorded")
        runners = [engine.runner] if draft is None else [engine.runner, engine.feature("speculation").runner]
        while not model.is_loaded and any(runner.record_ahead() for runner in runners):
            pass
        model.wait()
        ahead.stop()  # what is left of the files is not for this load
        ahead.wait()
        if draft is not None and drafting is not None:
            drafting.wait()
            if draft.source is not None:
                draft.source.close()
        phases.mark("weights loaded")
        if planned.config.cache_disk is not None and ranks is None:
            engine.feature("disk").read_ahead()
    except BaseException:
        for loading in (model, drafting, ahead):
            if loading is not None:
                loading.cancel()  # its threads read the file that is closed next
        if model is not None and engine is None:
            with suppress(ZSEError):  # what is raised here came first
                model.buffer.free()  # a GPU's context stays where another engine of the process has it
        for opened in (draft and draft.source, tower and tower.source, source):
            if opened is not None:
                opened.close()
        if device is None:
            with suppress(DeviceError, UnsupportedError):  # what is raised here came first
                device = opening.result()
        if ranks is not None:
            ranks.fail()
        if device is not None:
            device.close()
        raise
    whole = plan.config if plan.share is None else plan.share.whole
    return Loaded(engine, planned.config, whole, source, device, planned)


def _read_early(
    config: EngineConfig, plan, device, source, most: int | None, is_alone: bool
) -> model_load.Model | None:
    """The model, whose weights come while the memory is counted and the engine built (25 to 60 ms), where the plan of the memory cannot
    want them elsewhere. most: bytes that a GPU may have for them; is_alone: no other rank has a say, and no disk is waited for.

    A GPU's driver gives no memory while it registers a file's pages (90 ms for 4 GB): threads read them, unless all are registered."""
    nbytes, held = sum(plan.memory_bytes.values()), False
    if device.shares_memory:
        is_early = nbytes <= (config.max_memory or device.memory_total)
    else:
        stays = config.resident_layers is None and config.expert_memory is None
        held = device.registered is not None and device.registered.hold(source.files)
        is_early = is_alone and stays and nbytes <= (most or 0) and (held or loads.reads_beside())
    if not is_early:
        return None
    device.allocates = not held
    try:
        return model_load.load_model(device, plan, verify_weights=config.verify_weights)
    finally:
        device.allocates = False


def _settled(config: EngineConfig, plan, device, source, draft, ranks, bound):
    """The memory's plan, of several ranks one that all have room for; and what the model sees with."""
    tower = _find_tower(source, config, plan, device)
    plan_again = partial(
        memory.plan_memory, plan=plan, device=device, draft=draft, ranks=ranks, tower=tower, bound=bound
    )
    planned = plan_again(config)
    return planned if ranks is None else ranks.agree(device, source, planned, plan_again), tower


def _find_tower(source, config: EngineConfig, plan, device):
    """The TowerPlan of what the model sees with, or None. Asked only where its files say something of it: config.json, or
    an mmproj file that is named or lies beside a GGUF."""
    if config.mmproj is None and source.kind == "gguf":
        names = os.listdir(os.path.dirname(os.path.abspath(source.path)))
        if not any("mmproj" in name for name in names):
            return None
    elif config.mmproj is None and "vision_config" not in (source.hf_config or {}):
        return None
    return vision.load.find_tower(source, config.mmproj, plan.config, config.quantize, device.kernels)


def _tell(planned: memory.MemoryPlan, on_plan) -> None:
    """The plan to who asked for it, and what layers in host memory cost to everybody."""
    if planned.expectation:
        logging.getLogger("zse.engine").warning("%s", planned.expectation)
    if on_plan is not None:
        on_plan(planned)


def _read_ahead(device: str, files) -> loads.ReadAhead:
    """What reads the files that are not in the page cache, none for a CPU: its loader begins at once. Of a model that is
    larger than memory, what still is there when the loader comes."""
    cold = [file for file in files if device != "cpu" and file.is_cold]
    available = probe.memory_bytes()["available"] if cold else 0  # a warm start need not ask
    return loads.ReadAhead(cold, (available or 0) // 2)


def _opened(opening, config: EngineConfig):
    """The device, which knows how to learn what it will be asked for. ConfigError, before anything is planned, where others
    cannot be reached as the configuration says."""
    if config.kv_secret is not None:
        roles.check_options(config)
    device = opening.result()
    device.compile_ahead(lambda: gpu_kernels_of(config, device))
    return device


def _plan_beside(opening, source, config: EngineConfig, share: dict):
    """While a GPU's driver starts (0.2 s): plan for a GPU, and import what comes next. None when there is no time for
    it, or when a GPU cannot have the model (the device may turn out to be the CPU)."""
    if opening.done or config.device == "cpu":
        return None
    plan = None
    with suppress(ZSEError):
        plan = model_load.plan_model(source, quantize=config.quantize, family="gpu", **share)
    for name in lazy.GPU_ENGINE:
        if opening.done:
            break
        import_module(name)
    return plan


def _build(config: ResolvedConfig, device, model, plan, tower, ranks=None):
    """Everything but the weights' contents: needs only their addresses."""
    if not config.graphs:
        device.supports_capture = False
    mixed = None
    if device.runs_ahead:
        mixed = min(max(GPU_MIXED_TOKENS, 2 * config.max_rows), config.max_tokens_per_step)
    prefix_cache = None
    if config.prefix_cache:
        prefix_cache = prefix.PrefixCache(config.num_pages, config.cache_policy, config.page_size)
    if config.kv_layout == "contiguous":
        pages = groups.rows_of(config.max_context, config.num_pages, config.page_size)
    else:
        pages = groups.geometry(
            groups.paged_by(plan), config.max_tokens_per_step, steps_in_flight(device, plan.share), config.page_size
        )
    slots = None
    if config.state_slots:
        host, page_size = cache_pages.HostPool(config.host_states), config.page_size if config.prefix_cache else 0
        nbytes = config.state_bytes // config.state_slots
        slots = states.StateSlots(
            config.state_slots, config.state_interval, host, page_size=page_size, slot_nbytes=nbytes
        )
    scheduler = schedulers.Scheduler(
        num_pages=config.num_pages,
        max_rows=config.max_rows,
        max_tokens=config.max_tokens_per_step,
        max_context=config.max_context,
        vocab_size=plan.config.vocab_size,
        max_waiting=config.max_waiting,
        eos_ids=frozenset(plan.config.eos_ids),
        mixed_tokens=mixed,
        prefix_cache=prefix_cache,
        max_drafts=config.max_drafts,
        host=cache_pages.HostPool(config.host_slots),
        policy=config.policy,
        geometry=pages,
        adapter_slots=config.adapter_slots,
        states=slots,
        micro_batches=steps_in_flight(device, plan.share) - device.runs_ahead,
        feeds=device.runs_ahead,
        cache=_divided_cache(config, pages) if config.page_pools > 1 else None,
    )
    if scheduler.cache.num_groups > 1 and (config.host_slots or config.cache_disk):
        logging.getLogger("zse.engine").warning(
            "pages of this model's sliding windows are not kept in host memory or on disk: prefixes come back from there only "
            "while these pages are still in the cache (preempted requests are swapped in full)"
        )
    runner = memory.runner_of(model)(device, model, config, tower=tower, ranks=ranks)
    if runner.adapters is not None:
        runner.adapters.kept = scheduler.life.adapters.rows
    wanted = {"grammars": config.warm_grammars, "idle memory": hasattr(runner.kv.buffer, "discard")}
    warm = tuple(name for name, is_wanted in wanted.items() if is_wanted)
    encoder = None if plan.config.causal else plan.config
    engine = core.Engine(scheduler, runner, model=config.model, warm=warm, encoder=encoder, tower=tower)
    if config.host_slots or config.host_states:
        engine.use("host memory", host_memory.HostMemory(engine))
    if config.speculation == "ngram":
        ahead = runner.num_sets > 1
        speculator = ngram.NgramSpeculator(scheduler, config.draft_tokens, device.kernels, ahead)
        engine.use("speculation", speculator)
    if model.host_experts is not None:
        engine.use("experts", expert_counters.ExpertCounters(model.host_experts))
    return engine


def _divided_cache(config: ResolvedConfig, pages: groups.PageGeometry) -> "divided.DividedCache":
    """Of ranks with pages of their own."""

    def make() -> schedulers.CacheManager:
        cached = None
        if config.prefix_cache:
            cached = prefix.PrefixCache(config.num_pages, config.cache_policy, config.page_size)
        allocator, host = cache_pages.PageAllocator(config.num_pages), cache_pages.HostPool(config.host_slots)
        return schedulers.cache_manager(allocator, cached, host, pages)

    return divided.divide(config.page_pools, make)


def build_from_arguments(arguments: list[str], phases, opening=None):
    """The worker's way: (Engine, Ready) from its command line; prints the memory plan. opening: as of load_engine.
    Raises ZSEError."""

    def show(plan) -> None:
        if env.get("ZSE_LOG").lower() in ("debug", "info"):
            sys.stderr.write(f"zse engine: {plan.describe()}\n")

    try:
        config = EngineConfig.from_arguments(arguments)
    except ZSEError:
        if opening is not None:
            with suppress(DeviceError, UnsupportedError):
                opening.result().close()
        raise
    loaded = load_engine(config, phases, on_plan=show, opening=opening)
    phases.mark("ready")
    used, kernels = loaded.config, loaded.engine.runner.device.kernels
    return loaded.engine, messages.Ready(
        model=used.model,
        max_context=used.max_context,
        max_rows=used.max_rows,
        num_pages=used.all_pages,
        page_size=used.page_size,
        kernels=kernels,
        queue_tokens=QUEUE_TOKENS[kernels],
        hidden_size=loaded.model_config.embedding_size,
        generates=loaded.model_config.causal,
        pooling=loaded.model_config.pooling,
        num_labels=loaded.model_config.num_labels,
        has_state=loaded.model_config.has_state,
        vision=b"" if loaded.engine.tower is None else loaded.engine.tower.vision.encode(),
        memory_bytes=loaded.memory_bytes,
        phases_ms=phases.ms,
    )


def kernels_of(model: str, level: str, threads: int) -> set[str]:
    """The symbols that a start of `model`, a path, and its first requests ask a CPU for, with default options; features
    that a request names come on top. Reads the file's head, no weights. Raises as load_engine()."""
    asking = import_module("zse.engine.needed").AskingDevice(level, threads)
    return _asked(EngineConfig(model=model, device="cpu"), asking)


def gpu_kernels_of(config: EngineConfig, device) -> set[str]:
    """Those of a start with `config` on a GPU like `device`."""
    return _asked(
        msgspec.structs.replace(
            config,
            cache_disk=None,
            tensor_parallel_size=1,
            expert_parallel=False,
            data_parallel_attention=False,
            pipeline_parallel_size=1,
            nnodes=1,
            node_rank=0,
            rendezvous=None,
            group_secret=None,
            role="both",
            kv_listen=None,
            kv_peers=None,
        ),
        import_module("zse.engine.needed").AskingGPU(device),
    )


def _asked(config: EngineConfig, device) -> set[str]:
    opening = SimpleNamespace(done=True, result=lambda: device)
    loaded = load_engine(config, metrics.Phases(lambda: 0.0), opening=opening)
    while loaded.engine.runner.record_ahead():
        pass
    loaded.engine.close()
    loaded.source.close()
    return device.asked | {job.symbol for jobs in device.loads for job in jobs if job.symbol is not None}


def park(arguments: list[str]):
    """What can be done before the model is known: the device opened, kernels loaded into it, modules imported.

    arguments: --device, --threads and the numbers of ranks of a worker's command line. Returns the PendingDevice. Raises
    ZSEError.
    """
    config = EngineConfig.from_arguments(["--model", "", *arguments])
    if num_ranks(config) > 1:
        config = model_ranks.of_rank(config, model_ranks.device_of(config), 0)
    opening = device_opening.PendingDevice(config.device, config.threads)
    for name in lazy.PARKED_ENGINE:
        import_module(name)
    for name in registry.ARCHITECTURES:
        registry.architecture(name)
    device = opening.result()
    for name in lazy.GPU_ENGINE if not device.shares_memory else ():
        import_module(name)
    load_kernels(device)
    return opening


def load_kernels(device) -> None:
    """Load every kernel of the device's pack into it, 0.1 ms each. Without a pack they are compiled one by one when a
    model asks for them, which would keep the machine busy for a minute here."""
    if not device.loads_modules or kernel_cache.open_pack(device.isa).pack is None:
        return
    for symbol in device.symbols():
        with suppress(DeviceError):  # one that this GPU cannot hold is told when a model needs it
            device.program(symbol)
