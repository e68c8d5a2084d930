"""The memory plan: what weights, scratch, KV pages and the GPU's context take, counted before it is allocated."""

from typing import NamedTuple

from zse.engine.config import (
    GPU_MEMORY_SHARE,
    STEPS_IN_FLIGHT,
    EngineConfig,
    ResolvedConfig,
    host_slots,
    resolve,
    settle,
)
from zse.engine.page_size import AUTO_CONTEXTS
from zse.errors import MemoryPlanError

MIB = 1 << 20
# A CUDA context with loaded kernels, measured on an H200 (driver 580): 527 MiB before anything is allocated.
CONTEXT_BYTES = 530 * MIB


class MemoryPlan(NamedTuple):
    """config: every value settled. parts: label → bytes of device memory, the KV pages in full. limit: what the parts
    must stay within, None when nothing says so. first_bytes: what is taken once the model is loaded: KV pages get memory
    as they are written, on a GPU some at once."""

    config: ResolvedConfig
    parts: dict[str, int]
    limit: int | None
    first_bytes: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def describe(self) -> str:
        """One line for logs and `--verbose`."""
        text = ", ".join(f"{label} {_mib(nbytes)}" for label, nbytes in self.parts.items())
        config = self.config
        return (
            f"memory: {_mib(self.first_bytes)} at the start, {_mib(self.total)} when all KV pages are in use: {text} "
            f"({config.num_pages} pages of {config.page_size} tokens, reserved, resident once written; "
            f"--max-context {config.max_context}, --max-concurrency {config.max_rows}, {config.max_tokens_per_step} tokens a step)"
        )


def plan_memory(config: EngineConfig, plan, device, draft=None) -> MemoryPlan:
    """Settle `config` for `plan` (zse.models.load.ModelPlan) on an open device and count its memory. draft: the
    ModelPlan of a draft model that runs beside.

    Raises MemoryPlanError that names what does not fit, in bytes, and the option that shrinks it.
    """
    from zse.cache.groups import PageGeometry, geometry, group_layers
    from zse.cache.layout import block_nbytes, first_nbytes
    from zse.cache.pages import BLOCK, PAGE_SIZES, blocks_for
    from zse.engine.runner import JOB_ROWS, logit_rows
    from zse.engine.step import inputs_nbytes, masks_nbytes, new_blocks
    from zse.models.forms import FORMS, scratch_nbytes
    from zse.sampling.state import device_nbytes, input_nbytes

    family, model = device.family, plan.config
    if family == "gpu":
        from zse.kernels.gpu.gemm_parts import PARTIAL_BYTES
    # A row that has a whole context anyway gives nothing back.
    groups = group_layers(model) if config.kv_layout == "paged" else (tuple(range(model.num_layers)),)

    def scratch_for(tokens: int, rows: int, context: int, drafts: int = 0, of=plan) -> int:
        model, schemes = of.config, {matrix.name: matrix.scheme for matrix in of.matrices}
        context = blocks_for(context) * BLOCK
        lines = logit_rows(rows + drafts, tokens)
        total = scratch_nbytes(model, FORMS[family], schemes, max_tokens=tokens, max_rows=lines, max_context=context)
        if family == "gpu":
            # page tables, token history (of whole pages)
            history = context if context <= AUTO_CONTEXTS[BLOCK] else context + PAGE_SIZES[-1]
            total += len(groups) * (4 * (rows + JOB_ROWS) * context // BLOCK + 4 * rows * history)
            total += 2 * inputs_nbytes(
                tokens, lines, len(groups) * new_blocks(tokens, rows), input_nbytes(rows + drafts)
            )
            total += 2 * masks_nbytes(lines, model.vocab_size)
            # What jobs need when the first of them comes (engine/forwards.py).
            total += inputs_nbytes(tokens, lines, new_blocks(tokens, JOB_ROWS), input_nbytes(lines)) + 16 * lines
            total += device_nbytes(lines, model.vocab_size)
            total += 2 * device_nbytes(rows + drafts, model.vocab_size) + device.num_sms * PARTIAL_BYTES
        return total

    token_bytes = (scratch_for(2048, 1, BLOCK) - scratch_for(1024, 1, BLOCK)) // 1024
    settings = settle(config, family, weight_bytes=sum(plan.memory_bytes.values()), token_bytes=token_bytes)
    block_bytes = block_nbytes(model, settings.kv_dtype, groups)

    def pages_of(page_size: int) -> PageGeometry:
        if len(groups) == 1:
            return PageGeometry(page_size=page_size)
        return geometry(model, settings.max_tokens_per_step, STEPS_IN_FLIGHT[family], page_size)

    fixed = dict(plan.memory_bytes)
    if draft is not None:
        fixed["draft model"] = sum(draft.memory_bytes.values())
        block_bytes += block_nbytes(draft.config, settings.kv_dtype)  # it has as many pages
    limit, option = _limit(config, device)
    if family == "gpu":
        fixed["context"] = CONTEXT_BYTES
    least = pages_of(config.page_size or BLOCK)  # with auto, others that are taken hold as much
    page_bytes = block_bytes * (least.page_size // BLOCK)
    if family == "cpu" and (slots := host_slots(config, page_bytes, least.page_size)):
        fixed["kv host"] = slots * page_bytes  # a CPU's host memory is the device's

    def scratch(context: int) -> int:
        nbytes = scratch_for(settings.max_tokens_per_step, settings.max_rows, context, settings.max_drafts)
        if draft is not None:
            nbytes += scratch_for(
                settings.max_tokens_per_step, settings.max_rows, min(context, draft.config.max_context), of=draft
            )
        return nbytes

    room = None
    if limit is not None:
        room = limit - sum(fixed.values()) - scratch(config.max_context or model.max_context)
        one = least.needed(config.max_context or 1) * page_bytes
        if family == "gpu" and room < one:
            raise MemoryPlanError(
                _does_not_fit(
                    fixed,
                    scratch(config.max_context or BLOCK),
                    one,
                    limit,
                    option,
                    least.capacity(max(room, 0) // page_bytes),
                )
            )
    resolved = resolve(
        config,
        settings,
        device=device.name,
        model_context=model.max_context,
        threads=device.threads,
        room_bytes=room,
        block_bytes=block_bytes,
        memory_bytes=device.memory_total,
        geometry=pages_of,
    )
    parts = {**fixed, "kv cache": resolved.kv_bytes, "scratch": scratch(resolved.max_context)}
    total = sum(parts.values())
    if limit is not None and total > limit:
        affordable = least.capacity(max(limit - total + resolved.kv_bytes, 0) // page_bytes)
        raise MemoryPlanError(_does_not_fit(fixed, parts["scratch"], resolved.kv_bytes, limit, option, affordable))
    first = total - resolved.kv_bytes
    if family == "gpu":
        first += first_nbytes(resolved.kv_bytes)
    return MemoryPlan(resolved, parts, limit, first)


def _limit(config: EngineConfig, device) -> tuple[int | None, str]:
    """Bytes that the parts may take together and what says so."""
    limit, option = None, "--max-memory"
    if device.family == "gpu":
        # The context is there already: what is free is beside it.
        limit, option = int(device.memory_free * GPU_MEMORY_SHARE) + CONTEXT_BYTES, "free on this GPU"
    if config.max_memory is not None and (limit is None or config.max_memory < limit):
        limit, option = config.max_memory, "--max-memory"
    return limit, option


def _does_not_fit(fixed: dict[str, int], scratch: int, kv: int, limit: int, option: str, tokens: int) -> str:
    parts = {**fixed, "scratch": scratch, "kv cache": kv}
    text = ", ".join(f"{label} {_mib(nbytes)}" for label, nbytes in parts.items())
    if tokens >= 16:
        advice = f"--max-context x --max-concurrency of at most {tokens} tokens fits" + (
            "" if option != "--max-memory" else ", or raise --max-memory"
        )
    elif sum(fixed.values()) + scratch > limit and sum(fixed.values()) <= limit:
        advice = "lower --max-tokens-per-step or --max-concurrency"
    else:
        advice = "use --quantize int4, a smaller model, or --device cpu"
    return (
        f"needs {_mib(sum(parts.values()))} of memory ({text}), over the {_mib(limit)} "
        f"{'of --max-memory' if option == '--max-memory' else option}: {advice}"
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.0f} MiB"
