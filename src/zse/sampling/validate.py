"""The ranges of SamplingParams, checked before anything reaches a kernel. They are the API's."""

from zse.errors import RequestError
from zse.sampling.params import SamplingParams

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_BEAM_WIDTH = 16
LENGTH_PENALTIES = (-10.0, 10.0)

# name → (lowest, highest, whether the lowest itself is allowed)
RANGES = {
    "temperature": (0.0, 2.0, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "repetition_penalty": (0.0, 100.0, False),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "top_k": (0, 1 << 30, True),
}


def check_params(params: SamplingParams) -> None:
    """Raises RequestError (400, out_of_range or array_above_max_length) that names the field. NaN is out of range."""
    for name, (low, high, inclusive) in RANGES.items():
        value = getattr(params, name)
        if not (low <= value <= high) or (value == low and not inclusive):
            raise _out_of_range(name, value, f"from {low} to {high}" if inclusive else f"above {low}, up to {high}")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise _out_of_range("max_tokens", params.max_tokens, "at least 1")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            raise _out_of_range(name, value, f"from 0 to {MAX_LOGPROBS}")
    if params.seed is not None and not -(1 << 63) <= params.seed < 1 << 64:
        raise _out_of_range("seed", params.seed, "a 64-bit number")
    if "" in params.stop:
        raise RequestError("stop: an empty text would stop at once", code="invalid_value", param="stop")
    bias = params.logit_bias
    if bias:
        if len(bias) > MAX_LOGIT_BIAS_ENTRIES:
            raise RequestError(
                f"logit_bias has {len(bias)} entries, at most {MAX_LOGIT_BIAS_ENTRIES} are allowed",
                code="array_above_max_length",
                param="logit_bias",
            )
        for value in bias.values():
            if not -100 <= value <= 100:
                raise _out_of_range("logit_bias", value, "from -100 to 100")


def _out_of_range(name: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"{name} {value} must be {allowed}", code="out_of_range", param=name)
