"""What /tokenize and /detokenize accept, as vLLM has them."""

import msgspec

from zse.sampling.fields import Boolean, Field, Fields, Object, String, refused
from zse.sampling.params import TokenIds
from zse.server.requests.completions import MAX_IDS, MODEL
from zse.server.requests.conversation import CONVERSATION

TOKENIZE_FIELDS: Fields = {
    "model": MODEL,
    "prompt": Field(String(), "A text; or else messages."),
    "messages": msgspec.structs.replace(CONVERSATION["messages"], required=False),
    "tools": CONVERSATION["tools"],
    "add_special_tokens": Field(Boolean(), "Begin a prompt as the model wants it, with its BOS token.", True),
    "return_token_strs": Field(Boolean(), "Give the text of each token, too.", False),
}
DETOKENIZE_FIELDS: Fields = {"model": MODEL, "tokens": Field(TokenIds(max_length=MAX_IDS), "Token ids.", required=True)}


def read_tokenize(body: dict) -> dict:
    """The checked fields; of prompt and messages one is None. Raises RequestError."""
    values = Object(TOKENIZE_FIELDS).check(body, "")
    if (values["prompt"] is None) == (values["messages"] is None):
        raise refused("invalid_value", "Give 'prompt' or 'messages'.", "prompt")
    return values


def read_detokenize(body: dict) -> dict:
    """The checked fields. Raises RequestError."""
    return Object(DETOKENIZE_FIELDS).check(body, "")
