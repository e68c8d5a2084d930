"""What is refused at once: requests that could never be served, or for which there is no room in the queue."""

from collections.abc import Collection

import msgspec

from zse.errors import RequestError
from zse.sampling.params import SamplingParams
from zse.scheduler.queue import WaitingQueue


class Intake(msgspec.Struct, frozen=True):
    """max_context: tokens of one request. cache_capacity: tokens of the longest sequence that all pages together hold.
    max_waiting, max_waiting_tokens: requests and prompt tokens that may queue."""

    vocab_size: int
    max_context: int
    cache_capacity: int
    max_waiting: int
    max_waiting_tokens: int

    def check_room(self, queue: WaitingQueue, prompt_len: int) -> None:
        """Raises RequestError when the queue is full."""
        if len(queue) >= self.max_waiting:
            raise RequestError(
                f"{self.max_waiting} requests are waiting already; try again later",
                status=503,
                type="server_error",
                code="overloaded",
            )
        if queue and queue.num_tokens + prompt_len > self.max_waiting_tokens:
            raise RequestError(
                f"{queue.num_tokens} prompt tokens are waiting already; try again later",
                status=503,
                type="server_error",
                code="overloaded",
            )

    def check_ids(self, param: str, ids: Collection[int]) -> None:
        """Raises RequestError for an id outside the vocabulary."""
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            bad = next(id for id in ids if not 0 <= id < self.vocab_size)
            raise RequestError(
                f"token id {bad} is outside this model's vocabulary of {self.vocab_size}",
                code="invalid_token_id",
                param=param,
            )

    def check_prompt(self, prompt: list[int]) -> None:
        """Raises RequestError for a prompt without tokens, or with ids outside the vocabulary."""
        if not prompt:
            raise RequestError("the prompt has no tokens", code="invalid_value", param="prompt")
        self.check_ids("prompt", prompt)

    def check_params(self, params: SamplingParams) -> None:
        """Raises RequestError for ids outside the vocabulary."""
        self.check_ids("stop_token_ids", params.stop_token_ids)
        self.check_ids("logit_bias", params.logit_bias or ())

    def admissible_length(self, prompt_len: int, max_tokens: int | None) -> int:
        """Most tokens, prompt included, that the request may reach. RequestError when that is beyond the context
        or beyond all pages together: such a request would wait for ever."""
        # The last sampled token needs no page.
        capacity = min(self.max_context, self.cache_capacity + 1)
        wanted = prompt_len + (max_tokens or 1)
        if wanted > capacity:
            why = f"this model's context is {self.max_context} tokens"
            if capacity < self.max_context:
                why = f"the KV cache of this engine holds {capacity - 1} tokens"
            asked = f"{prompt_len} prompt tokens" + (f" and max_tokens {max_tokens}" if max_tokens else "")
            raise RequestError(f"{why}; the request has {asked}", code="context_length_exceeded")
        return wanted if max_tokens is not None else capacity

    def check_sequence(self, token_ids: list[int]) -> None:
        """Raises RequestError for a sequence that can never run beside the requests (a job's: nothing is sampled)."""
        self.check_prompt(token_ids)
        capacity = min(self.max_context, self.cache_capacity)
        if len(token_ids) > capacity:
            raise RequestError(
                f"{len(token_ids)} tokens are more than the context of {capacity}",
                code="context_length_exceeded",
                param="prompt",
            )
