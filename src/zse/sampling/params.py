"""What a request may ask of the sampler. Validated once, at the edge; the ranges are the API's."""

from typing import Literal

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """temperature 0 is greedy. top_k 0 and top_p 1 are off. seed None: the engine draws one.
    logprobs: None for none, else how many alternatives (0..20) beside the sampled token's own. prompt_logprobs: the same
    of the prompt's tokens; LLM takes it and measures them by a job, the engine's requests do not look at it."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class BeamParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """beam_width: 1 to 16. max_tokens: None: the rest of the context. length_penalty: above 0 favours longer replies.
    early_stopping: True ends the search when beam_width hypotheses are there; False when no beam is likely to give a
    better one; "never" when none can. logprobs: None, or how many alternatives (0..20) are told of each token."""

    beam_width: int = 4
    max_tokens: int | None = None
    length_penalty: float = 1.0
    early_stopping: Literal[True, False, "never"] = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
