"""Beam search in the completion routes: its fields, and what they do not go with."""

from zse.sampling.params import BeamParams
from zse.sampling.validate import LENGTH_PENALTIES, MAX_BEAM_WIDTH
from zse.server.errors import APIError
from zse.server.fields import Field, boolean, integer, number, wrong_type


def _early_stopping(value, path):
    if type(value) is not bool and value != "never":
        raise wrong_type(path, 'true, false or "never"', value)
    return value


BEAM_FIELDS = {
    "use_beam_search": Field(
        boolean,
        "Search for the likeliest answers instead of sampling; not with stream, stop, "
        "penalties, logit_bias or a form of the answer.",
        False,
    ),
    "beam_width": Field(integer(1, MAX_BEAM_WIDTH), "Beams of the search, up to 16; left out: n."),
    "length_penalty": Field(
        number(*LENGTH_PENALTIES), "A beam's score is its log-probability divided by its length to this power.", 1.0
    ),
    "early_stopping": Field(
        _early_stopping,
        "true ends the search with the first beam_width answers, false when better "
        'ones are unlikely, "never" when there can be none.',
        False,
    ),
}
# Fields that a search would have to ignore, and the values that ask for nothing.
_OTHERS = {
    "stop": ((),),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "thinking_budget": (None,),
}


def read_beams(values: dict, best_of: int, structure_field: str, logprobs: int | None) -> BeamParams | None:
    """The search that the checked fields ask for, or None. Raises APIError for what does not go together."""
    if not values["use_beam_search"]:
        for name in ("beam_width", "length_penalty", "early_stopping"):
            if values[name] != BEAM_FIELDS[name].default:
                raise APIError("invalid_value", f"'{name}' needs 'use_beam_search': true.", name)
        return None
    if values["stream"]:
        raise APIError("invalid_value", "A beam search cannot be streamed: its answers are known at the end.", "stream")
    for name, harmless in _OTHERS.items():
        if values.get(name) not in harmless:
            raise APIError("invalid_value", f"'{name}' does not go with 'use_beam_search'.", name)
    if structure_field:
        raise APIError("invalid_value", f"'{structure_field}' does not go with 'use_beam_search'.", structure_field)
    width = values["beam_width"] or best_of
    if width < values["n"]:
        raise APIError("out_of_range", "'beam_width' must be at least 'n'.", "beam_width")
    if values["max_tokens"] == 0:
        raise APIError("out_of_range", "'max_tokens' 0 does not go with 'use_beam_search'.", "max_tokens")
    return BeamParams(
        beam_width=width,
        max_tokens=values["max_tokens"],
        length_penalty=values["length_penalty"],
        early_stopping=values["early_stopping"],
        stop_token_ids=tuple(values["stop_token_ids"]),
        ignore_eos=values["ignore_eos"],
        logprobs=logprobs,
    )
