"""Requests whose fields forbid tokens: min_tokens, bad_words, allowed_token_ids.

The tokens that may come are a mask of the vocabulary, as a grammar's is (engine/masking.py), made here: a step in which
one of these requests may not have every token is the forward, then masking and sampling. Other steps, such as those
behind the first min_tokens, are as ever. A mask behind drafts reads them as if they stood. Log-probabilities are of the
tokens that may come."""

from typing import TYPE_CHECKING, Any

from zse.errors import RequestError
from zse.sampling.params import SamplingParams
from zse.scheduler.batch import Batch, StepOutput
from zse.scheduler.feature import Feature
from zse.scheduler.options import RequestOptions
from zse.scheduler.request import Request

if TYPE_CHECKING:
    from zse.engine.core import Engine


class TokenRules:
    """Of one request. vocab_size: of the masks. A mask is one bit a token, id 0 the lowest bit of the first byte."""

    def __init__(self, params: SamplingParams, stop_ids: frozenset[int], vocab_size: int):
        self._min_tokens, self._stop_ids = params.min_tokens, stop_ids
        self._words = params.bad_token_ids
        nbytes = mask_nbytes(vocab_size)
        self._base: bytes | None = None
        if params.allowed_token_ids is not None:
            base = bytearray(nbytes)
            for id in params.allowed_token_ids:
                base[id >> 3] |= 1 << (id & 7)
            self._base = bytes(base)
        self._all = b"\xff" * nbytes

    def banned(self, reply: list[int]) -> frozenset[int]:
        """What may not come behind these tokens of the reply, of all that else might."""
        return self._ends(reply) | {
            last for *before, last in self._words if reply[len(reply) - len(before) :] == before
        }

    def _ends(self, reply: list[int]) -> frozenset[int]:
        """Of these, those that would end it too early."""
        return self._stop_ids if len(reply) < self._min_tokens else frozenset()

    def mask(self, reply: list[int]) -> bytes | None:
        """Of the token behind them; None: any may come. Where bad words leave none, they are not looked at."""
        for ids in (self.banned(reply), self._ends(reply)):
            if not ids:
                break
            mask = bytearray(self._base or self._all)
            for id in ids:
                mask[id >> 3] &= ~(1 << (id & 7)) & 255
            if self._base is None or any(mask):
                return bytes(mask)
        return self._base


def mask_nbytes(vocab_size: int) -> int:
    """Bytes of a mask: whole words of 32 bits."""
    return (vocab_size + 31) // 32 * 4


class RuleMasks:
    """The masks of one step's lines, as StepMasks has those of grammars."""

    come_first, draws_first = True, False

    def __init__(self, masks: dict[int, bytes]):
        self._masks = masks

    def first_lines(self) -> frozenset[int]:
        return frozenset(self._masks)

    def mask(self, line: int) -> bytes:
        return self._masks[line]


class TokenRuleQueue(Feature):
    """The requests with such fields, which the scheduler has."""

    def __init__(self, engine: "Engine"):
        self._engine, self._vocab_size = engine, engine.scheduler.vocab_size
        self._rules: dict[int, TokenRules] = {}

    @property
    def is_live(self) -> bool:  # type: ignore[override]
        return bool(self._rules)

    def submit(self, id: int, prompt: list[int], params: SamplingParams, options: RequestOptions, now: float) -> Any:
        """Raises RequestError."""
        limits = self._engine.scheduler.limits
        limits.check_ids("allowed_token_ids", params.allowed_token_ids or ())
        limits.check_ids("bad_words", [token for word in params.bad_token_ids for token in word])
        if options.structure is not None:
            raise RequestError(
                f"'{params.rule}' does not go with a form of the answer, tool calls that must come or a budget of reasoning",
                code="unsupported_parameter",
                param=params.rule,
            )
        request = self._engine.queue(id, prompt, params, options, now)
        rules = TokenRules(params, request.stop_ids, self._vocab_size)
        if (
            params.min_tokens
            and params.allowed_token_ids is not None
            and request.stop_ids.issuperset(params.allowed_token_ids)
        ):
            self._engine.scheduler.cancel(id)
            raise RequestError(
                "'allowed_token_ids' has only tokens that end the answer, and 'min_tokens' asks for others",
                code="invalid_value",
                param="allowed_token_ids",
            )
        self._rules[id] = rules
        return request

    def before_run(self, batch: Batch) -> RuleMasks | None:
        masks, line = {}, 0
        for entry in batch.entries:
            rules = self._rules.get(entry.request.id) if entry.samples else None
            if rules is not None:
                for place in range(entry.samples):
                    mask = rules.mask(_reply(entry.request, entry, place))
                    if mask is not None:
                        masks[line + place] = mask
            line += entry.samples
        return RuleMasks(masks) if masks else None

    def cancel(self, id: int) -> bool:
        self._rules.pop(id, None)
        return False

    def filter_outputs(self, outputs: list[StepOutput]) -> list[StepOutput]:
        for output in outputs:
            if output.finish is not None:
                self._rules.pop(output.id, None)
        return outputs


def _reply(request: Request, entry: Any, place: int) -> list[int]:
    """The reply in front of line `place` of an entry. Of tokens in flight only their number is known: a request that
    looks at more is stepwise."""
    length = entry.start + entry.count - (entry.samples - 1) + place
    reply = list(request.tokens[request.prompt_len : length]) + list(entry.drafts[:place] if entry.drafts else ())
    return reply[: length - request.prompt_len] + [-1] * (length - request.prompt_len - len(reply))
