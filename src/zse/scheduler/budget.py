"""How many tokens a step runs, and how many of them are of prompts, from the measured times of steps.

A step that decodes takes `decode_s`; with p prompt tokens it takes p * token_s more. Replies wait for at most `ratio`
times what their slow steps take when p = (ratio * slow_s - decode_s) / token_s, and the prompt has the rest of the
machine: of even steps it takes ratio / (ratio - 1) times as long as alone, 1.5 times at a ratio of 3. The cost of a
token grows along a prompt (attention looks at more), so the newest steps count most, and the rule is applied again
before each step.
"""

from zse.cache.pages import BLOCK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.scheduler.batch import Batch

# A step of this length lets cancellations, heartbeats and other requests' tokens through often enough. Prompts of slow
# models run in chunks that last about this long.
STEP_TARGET_S = 0.5
# The share of a step's tokens that prompts get at least, however many rows decode: new requests must not wait for running
# ones to end. And where measured times give prompts their share of the machine.
LEAST_PREFILL_SHARE, LEAST_MEASURED_SHARE = 1 / 16, 1 / 64
# Weights of the newest step. Decode steps are many and even; a mixed step tells the cost of the next. Slow steps are the
# upper end of those without prompts, drafts included (an expectile of 0.8): the replies waited for them already.
DECODE_STEP, TOKEN_STEP = 1 / 8, 1 / 2
SLOWER_STEP, FASTER_STEP = 1 / 8, 1 / 32
# A budget grows at most so much from one step to the next: a single quick step proves little.
MAX_GROWTH = 2.0


class StepBudget:
    """max_tokens: of one step, at least max_rows. mixed_tokens: of a step that decodes and prefills (None: a quarter of
    max_tokens). ratio: SchedulingPolicy.mixed_ratio; 0: times are not measured. token_s: seconds of a prompt token beside
    replies, 0 when not measured. is_limited: whether steps are shorter than configured."""

    def __init__(self, max_tokens: int, mixed_tokens: int | None, max_rows: int, ratio: float):
        self.max_tokens = self._configured_tokens = max_tokens
        self._mixed_tokens, self._max_rows = mixed_tokens, max_rows
        self.ratio, self.token_s, self.is_limited = ratio, 0.0, False
        self._decode_s: dict[int, float] = {}  # by the number of rows that decode, in powers of two
        self._slow_s: dict[int, float] = {}
        self._last = 0  # prompt tokens of the last step that had some

    def limit(self, tokens: int) -> None:
        """From now on at most `tokens` in a step: whole blocks, at least one and one token of each row, at most what
        was configured."""
        self.max_tokens = min(self._configured_tokens, max(tokens // BLOCK * BLOCK, BLOCK, self._max_rows))
        self.is_limited = self.max_tokens < self._configured_tokens

    def prefill(self, num_decode: int) -> int:
        """Prompt tokens of a step that decodes `num_decode` lines.

        A step takes as long as its prompt tokens: beside running replies at most `mixed_tokens` in all, so that their
        next tokens are not held up for a whole chunk (256 tokens of a 135M model are about 0.3 s on two cores). Where both
        kinds of steps were measured, as many as the ratio allows."""
        most = self.max_tokens
        if not num_decode:
            return most
        mixed = most // 4 if self._mixed_tokens is None else min(self._mixed_tokens, most)
        tokens = max(1, int(most * LEAST_PREFILL_SHARE), mixed - num_decode)
        if not self.ratio:
            return tokens
        size = num_decode.bit_length()
        decode_s, slow_s = _nearest(self._decode_s, size), _nearest(self._slow_s, size)
        if decode_s is not None and slow_s is not None and self.token_s:
            wanted = (max(slow_s, decode_s) * self.ratio - decode_s) / self.token_s + 1e-6  # 20, not 19.999
            if self._last:
                wanted = min(wanted, MAX_GROWTH * max(self._last, tokens))
            tokens = int(wanted)
        return max(tokens, int(most * LEAST_MEASURED_SHARE), 1)

    def alone_s(self, num_decode: int, num_prompt: int) -> float:
        """What a step of these alone is likely to take."""
        decode_s = _nearest(self._decode_s, num_decode.bit_length()) if num_decode else None
        return (decode_s or 0.0) + self.token_s * num_prompt

    def observe(self, batch: "Batch", seconds: float) -> None:
        """The batch took `seconds`."""
        if seconds > STEP_TARGET_S or self.is_limited and batch.num_tokens > batch.num_samples:
            self.limit(int(batch.num_tokens * STEP_TARGET_S / max(seconds, 1e-6)))
        if not self.ratio:
            return
        num_decode, num_prompt = batch.num_decode - batch.num_drafts, batch.num_tokens - batch.num_decode
        size = num_decode.bit_length()
        if not num_prompt:
            slow = self._slow_s.get(size, seconds)
            weight = SLOWER_STEP if seconds > slow else FASTER_STEP
            self._slow_s[size] = slow + (min(seconds, 2 * slow) - slow) * weight
            if not batch.num_drafts:
                known = self._decode_s.get(size, seconds)
                # One late step (another process had the core) must not count for many.
                self._decode_s[size] = known + (min(seconds, 4 * known) - known) * DECODE_STEP
            return
        decode_s = _nearest(self._decode_s, size)
        if num_decode and decode_s is None:
            return
        if not num_decode and self.token_s:
            return  # a whole step of prompts: cheaper for each token than a chunk beside replies
        token_s = max(seconds - (decode_s or 0.0) if num_decode else seconds, 0.05 * seconds) / num_prompt
        if self.token_s:
            token_s = self.token_s + (min(token_s, 4 * self.token_s) - self.token_s) * TOKEN_STEP
        self.token_s = token_s
        self._last = num_prompt


def _nearest(times: dict[int, float], size: int) -> float | None:
    """The seconds of this size, or what those of the nearest that is known make likely: between flat and proportional, for a
    step reads the weights once whatever its rows."""
    if not times or size in times:
        return times.get(size)
    known = min(times, key=lambda other: abs(other - size))
    return times[known] * 2 ** ((size - known) / 2)
