"""From a path to an engine that can step. C threads read weights while Python goes on importing and recording."""

from zse.engine.config import EngineConfig, ResolvedConfig


class Loaded:
    """An engine and what belongs to it. source: the open model file; model_config: its ModelConfig."""

    def __init__(self, engine, config: ResolvedConfig, model_config, source, device, memory_bytes: dict[str, int]):
        self.engine, self.config, self.model_config = engine, config, model_config
        self.source, self.device, self.memory_bytes = source, device, memory_bytes


def load_engine(config: EngineConfig, phases, on_source=None) -> Loaded:
    """Open, load and make ready. phases: Phases to mark. on_source(source): called as soon as the file is open (the
    tokenizer can load meanwhile). Raises FormatError, UnsupportedError, ConfigError, DeviceError."""
    from zse.formats.source import open_model
    source = open_model(config.model)
    phases.mark("file open")
    device = model = None
    try:
        if on_source is not None:
            on_source(source)
        from zse.models.load import load_model, plan_model
        from zse.runtime import open_device
        plan = plan_model(source, quantize=config.quantize)
        device = open_device("cpu", config.threads)
        model = load_model(device, plan, max_memory=config.max_memory)
        phases.mark("weights reading")
        engine, resolved, memory_bytes = _build(config, device, model, plan)
        phases.mark("engine built")
        engine.runner.record_ahead()
        phases.mark("prefill recorded")
        while not model.is_loaded and engine.runner.record_ahead():
            pass
        model.wait()
        phases.mark("weights loaded")
    except BaseException:
        if model is not None:
            model.cancel()   # its threads read the file that is closed next
        source.close()
        if device is not None:
            device.close()
        raise
    return Loaded(engine, resolved, plan.config, source, device, memory_bytes)


def _build(config: EngineConfig, device, model, plan):
    """Everything but the weights' contents: needs only their addresses."""
    from zse.cache.layout import page_nbytes
    from zse.cache.pages import PAGE, pages_for
    from zse.engine.config import resolve
    from zse.engine.core import Engine
    from zse.engine.runner import Runner, logit_rows
    from zse.models.decoder import scratch_nbytes
    from zse.models.load import require_memory
    from zse.runtime.probe import memory_bytes as machine_memory
    from zse.scheduler.scheduler import Scheduler

    def scratch_for(context: int) -> int:
        return scratch_nbytes(plan.config, config.max_tokens_per_step, logit_rows(config), pages_for(context) * PAGE)

    machine, room = machine_memory(), None
    if config.max_memory is not None:
        longest = config.max_context or plan.config.max_context
        room = config.max_memory - sum(model.memory_bytes.values()) - scratch_for(longest)
    resolved = resolve(config, model_context=plan.config.max_context, threads=device.threads, room_bytes=room,
                       page_bytes=page_nbytes(plan.config, config.kv_dtype),
                       memory_bytes=machine["limit"] or machine["total"] or 0)
    scratch = scratch_for(resolved.max_context)
    memory = {**model.memory_bytes, "kv cache": resolved.kv_bytes, "scratch": scratch}
    require_memory(memory, config.max_memory)
    scheduler = Scheduler(
        num_pages=resolved.num_pages, max_rows=resolved.max_rows, max_tokens=resolved.max_tokens_per_step,
        max_context=resolved.max_context, vocab_size=plan.config.vocab_size, max_waiting=resolved.max_waiting,
        eos_ids=frozenset(plan.config.eos_ids))
    runner = Runner(device, model, resolved)
    return Engine(scheduler, runner), resolved, memory


def build_from_arguments(arguments: list[str], phases):
    """The worker's way: (Engine, Ready) from its command line. Raises ZSEError."""
    from zse.engine.messages import Ready
    loaded = load_engine(EngineConfig.from_arguments(arguments), phases)
    phases.mark("ready")
    config = loaded.config
    return loaded.engine, Ready(
        model=config.model, max_context=config.max_context, max_rows=config.max_rows, num_pages=config.num_pages,
        memory_bytes=loaded.memory_bytes, phases_ms=phases.ms)
