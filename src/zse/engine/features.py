"""The features of a step: name → how it is made, which requests ask for it, what it counts.

A feature's module is imported and its object made with the first request that asks for it, or, where the configuration
asks, by load.py (Engine.use). The order is that in which the engine calls them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from zse.engine import adapters, beams, grammars, idle_memory, images, jobs, token_rules
from zse.engine.messages import Ask, ImageInput
from zse.engine.metrics import ADAPTER_COUNTERS, BEAM_COUNTERS, IMAGE_COUNTERS, JOB_COUNTERS
from zse.sampling.params import BeamParams, SamplingParams
from zse.scheduler.feature import Feature
from zse.scheduler.options import RequestOptions


class FeatureRow(NamedTuple):
    """make(engine): the feature, None where load.py makes it. takes(params, options): whether it is for such a request.
    checks(options): whether it may refuse one that others take, None: it refuses none. counters: what is told before it
    is made."""

    make: Callable[[Any], Feature] | None = None
    takes: Callable[[Any, RequestOptions], bool] = lambda params, options: False
    checks: Callable[[RequestOptions], bool] | None = None
    counters: dict[str, float] = {}


FEATURES = {
    "images": FeatureRow(
        make=lambda engine: images.ImageStore(engine),
        # Once they are encoded, the others have their turn.
        takes=lambda params, options: bool(options.images) and isinstance(options.images[0], ImageInput),
        counters=IMAGE_COUNTERS,
    ),
    "speculation": FeatureRow(),
    "beams": FeatureRow(
        make=lambda engine: beams.BeamQueue(engine),
        takes=lambda params, options: isinstance(params, BeamParams),
        counters=BEAM_COUNTERS,
    ),
    "jobs": FeatureRow(
        make=lambda engine: jobs.JobQueue(engine),
        takes=lambda params, options: isinstance(params, Ask),
        counters=JOB_COUNTERS,
    ),
    "rules": FeatureRow(
        make=lambda engine: token_rules.TokenRuleQueue(engine),
        takes=lambda params, options: (
            isinstance(params, SamplingParams)
            and (params.min_tokens > 0 or params.bad_token_ids != () or params.allowed_token_ids is not None)
        ),
    ),
    "grammars": FeatureRow(
        make=lambda engine: grammars.GrammarQueue(engine), takes=lambda params, options: options.structure is not None
    ),
    "adapters": FeatureRow(
        make=lambda engine: adapters.AdapterStore(engine),
        checks=lambda options: options.adapter != "",
        counters=ADAPTER_COUNTERS,
    ),
    "disk": FeatureRow(),
    "prefill server": FeatureRow(),
    "prefill client": FeatureRow(),
    "experts": FeatureRow(),
    "ranks": FeatureRow(),
    "host memory": FeatureRow(counters={"host_cache_bytes": 0}),
    "idle memory": FeatureRow(make=lambda engine: idle_memory.IdleMemory(engine), counters={"idle_evicted_pages": 0}),
}
