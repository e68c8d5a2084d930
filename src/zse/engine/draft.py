"""The draft model beside the model: opened, held against it, planned, built."""

from typing import Any, NamedTuple

import msgspec

from zse.engine.config import ResolvedConfig
from zse.engine.runner import Runner
from zse.errors import ConfigError
from zse.formats.opening import open_model
from zse.models.load import load_model, plan_model
from zse.speculative.draft_model import DraftModelSpeculator
from zse.tokenizer import load as tokenizers


class DraftPlan(NamedTuple):
    """source: the open file of the draft model; plan: its ModelPlan. It goes with a model of the same vocabulary."""

    source: Any
    plan: Any


def plan_draft(path: str, source, config, *, quantize: str | None, family: str) -> DraftPlan:
    """Open the draft model at `path` and hold it against the model of `source` and its ModelConfig.

    Raises FormatError, UnsupportedError, ConfigError when their vocabularies differ."""
    draft_source = open_model(path)
    try:
        plan = plan_model(draft_source, quantize=quantize, family=family)
        if plan.config.has_state:
            raise ConfigError(
                f"draft model {draft_source.path} has recurrent layers, whose states cannot take rejected drafts back; "
                "use one without"
            )
        _check_vocabulary(source, config, draft_source, plan.config)
    except BaseException:
        draft_source.close()
        raise
    return DraftPlan(draft_source, plan)


def _check_vocabulary(source, config, draft_source, draft_config) -> None:
    def differs(why: str) -> ConfigError:
        return ConfigError(f"draft model {draft_source.path}: {why}; a draft model must have the same vocabulary")

    if source.tokenizer is None or draft_source.tokenizer is None:
        # Token ids without texts: all that can be held against each other is how many there are.
        if config.vocab_size != draft_config.vocab_size:
            raise differs(f"has {draft_config.vocab_size} token ids, the model {config.vocab_size}")
        return
    if source.tokenizer.kind == draft_source.tokenizer.kind == "gguf":
        theirs, ours = (each.tokenizer.fields.get("tokenizer.ggml.tokens") for each in (draft_source, source))
        if theirs is not None and ours is not None and theirs.raw == ours.raw:
            return
    mine, other = tokenizers.load_tokenizer(source), tokenizers.load_tokenizer(draft_source)
    # Heads are padded to round numbers, with ids that nobody says.
    for id in range(min(config.vocab_size, draft_config.vocab_size)):
        if mine.token_bytes(id) != other.token_bytes(id):
            raise differs(f"token {id} is {other.token_bytes(id)!r}, of the model {mine.token_bytes(id)!r}")


def draft_config(config: ResolvedConfig, plan: Any) -> ResolvedConfig:
    """The draft model's own: as many rows and pages, its own context, no drafts of drafts."""
    return msgspec.structs.replace(
        config,
        max_context=min(config.max_context, plan.config.max_context),
        max_drafts=0,
        speculation="none",
        prefix_cache=False,
        adapter_slots=0,
        state_slots=0,
    )


def build_draft(
    config: ResolvedConfig,
    device,
    draft: DraftPlan,
    target_plan: Any,
    scheduler,
    *,
    runs_ahead: bool,
    verify_weights: bool | None = None,
):
    """(the draft model, whose weights are being read, its DraftModelSpeculator)."""
    model = load_model(device, draft.plan, verify_weights=verify_weights)
    own = draft_config(config, draft.plan)
    runner = Runner(device, model, own, grouped=False)
    nbytes, target_nbytes = (sum(plan.memory_bytes.values()) for plan in (draft.plan, target_plan))
    return model, DraftModelSpeculator(
        scheduler,
        runner,
        draft_tokens=config.draft_tokens,
        family=device.kernels,
        runs_ahead=runs_ahead,
        num_pages=own.num_pages,
        page_size=own.page_size,
        max_tokens=own.max_tokens_per_step,
        max_context=own.max_context,
        vocab_size=draft.plan.config.vocab_size,
        target_vocab=target_plan.config.vocab_size,
        share=nbytes / target_nbytes,
    )
