"""What drafts beside the model: a draft model, opened and held against it, the model's own next-token block, or an EAGLE-3 head."""

from array import array
from typing import Any, NamedTuple

import msgspec

from zse.engine.block_runner import BlockRunner
from zse.engine.config import EngineConfig, ResolvedConfig
from zse.engine.runner import Runner
from zse.errors import ConfigError
from zse.formats.opening import open_model
from zse.models import eagle3
from zse.models.load import load_model, plan_model
from zse.models.next_token import plan_block, share
from zse.plan.kept import KeptStreams
from zse.speculative.block import BlockSpeculator
from zse.speculative.draft_model import DraftModelSpeculator
from zse.tokenizer import load as tokenizers

# Tokens of one run of a block, which sees those of a larger step in several: its scratch is beside the model's.
BLOCK_TOKENS = 1024


class DraftPlan(NamedTuple):
    """source: the open file of what drafts, None where it is the model's; plan: its ModelPlan. is_block: it runs on states of the
    model's. ids: i32, of each token of the model an EAGLE-3 head's own or -1; None: they are the same."""

    source: Any
    plan: Any
    is_block: bool = False
    ids: array | None = None


def plan_drafts(config: EngineConfig, source, model, family: str) -> DraftPlan:
    """What drafts beside the model of `source` and its ModelConfig: a model or a head that is named, or its block.

    Raises FormatError, UnsupportedError, ConfigError where it does not go with the model."""
    if config.speculation == "mtp":
        return DraftPlan(None, plan_block(source, model, quantize=config.quantize, family=family), is_block=True)
    assert config.draft_model is not None
    draft_source = open_model(config.draft_model)
    try:
        if config.speculation == "eagle3":
            plan = eagle3.plan_head(draft_source, model, family=family)
            return DraftPlan(draft_source, plan, is_block=True, ids=eagle3.read_ids(draft_source, plan.config))
        plan = plan_model(draft_source, quantize=config.quantize, family=family)
        if plan.config.has_state:
            raise ConfigError(
                f"draft model {draft_source.path} has recurrent layers, whose states cannot take rejected drafts back; "
                "use one without"
            )
        _check_vocabulary(source, model, draft_source, plan.config)
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
    # Heads are padded to round numbers, with ids that nobody says; a folder's tokenizer does not know them.
    for id in range(min(config.vocab_size, draft_config.vocab_size, mine.vocab_size, other.vocab_size)):
        if mine.token_bytes(id) != other.token_bytes(id):
            raise differs(f"token {id} is {other.token_bytes(id)!r}, of the model {mine.token_bytes(id)!r}")


def draft_config(config: ResolvedConfig, draft: DraftPlan) -> ResolvedConfig:
    """Its own: as many rows, and pages as all ranks together, its own context, no drafts of drafts."""
    changes: dict[str, Any] = {}
    if draft.is_block:
        most = max(BLOCK_TOKENS, config.max_lines)
        changes = dict(max_tokens_per_step=min(config.max_tokens_per_step, most), draft_tokens=0)
    return msgspec.structs.replace(
        config,
        max_context=min(config.max_context, draft.plan.config.max_context),
        max_drafts=0,
        speculation="none",
        prefix_cache=False,
        num_pages=config.all_pages,
        page_pools=1,
        adapter_slots=0,
        state_slots=0,
        **changes,
    )


def draft_runner(config: ResolvedConfig, device, draft: DraftPlan, model, beside: Runner) -> Runner:
    """The Runner of what drafts, `model`, beside the model's."""
    own = draft_config(config, draft)
    if not draft.is_block:
        return Runner(device, model, own, grouped=False)
    if own_eagle := model.config.eagle:
        eagle3.share(model, beside.model, draft.ids, device)
        beside.planner.kept = KeptStreams(beside.planner, own_eagle.layers)
    else:
        share(model, beside.model)
    return BlockRunner(device, model, own, beside, config.draft_tokens, config.draft_vocabulary)


def build_draft(
    config: ResolvedConfig, device, draft: DraftPlan, target_plan: Any, engine, *, verify_weights: bool | None = None
):
    """(what drafts, whose weights are being read, its Speculator)."""
    model = load_model(device, draft.plan, verify_weights=verify_weights)
    runner = draft_runner(config, device, draft, model, engine.runner)
    own, plan = runner.config, draft.plan
    nbytes, target_nbytes = (sum(each.memory_bytes.values()) for each in (plan, target_plan))
    # Of what drafts with the model's head.
    head = 0 if draft.source else target_plan.memory_bytes.get("head", target_plan.memory_bytes["embedding"])
    options: dict[str, Any] = dict(
        draft_tokens=config.draft_tokens,
        family=device.kernels,
        runs_ahead=engine.runner.num_sets > 1,
        num_pages=own.num_pages,
        page_size=own.page_size,
        max_tokens=own.max_tokens_per_step,
        max_context=own.max_context,
        share=(nbytes + head * draft.is_block) / target_nbytes,
    )
    if draft.is_block:  # it reads the model's head, or its first rows
        assert isinstance(runner, BlockRunner)
        part = runner.vocabulary / runner.num_ids
        options["narrow_share"] = (nbytes + part * head) / target_nbytes
        return model, BlockSpeculator(engine.scheduler, runner, **options)
    vocabularies = dict(vocab_size=plan.config.vocab_size, target_vocab=target_plan.config.vocab_size)
    return model, DraftModelSpeculator(engine.scheduler, runner, **options, **vocabularies)
