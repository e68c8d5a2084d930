"""What /tokenize and /detokenize accept, as vLLM has them."""

import msgspec

from zse.sampling.fields import Boolean, Field, Fields, Object, String, refused
from zse.sampling.params import TokenIds
from zse.server.requests.completions import CHAT_FIELDS, MAX_IDS, MODEL, prompt_end
from zse.server.requests.conversation import CONVERSATION

# Fields of a chat request of which its prompt is made, beside its messages.
_OF_CHATS = "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"

TOKENIZE_FIELDS: Fields = {
    "model": MODEL,
    "prompt": Field(String(), "A text; or else messages."),
    "messages": msgspec.structs.replace(CONVERSATION["messages"], required=False),
    **{name: CHAT_FIELDS[name] for name in _OF_CHATS},
    "add_special_tokens": Field(Boolean(), "Begin a prompt as the model wants it, with its BOS token.", True),
    "return_token_strs": Field(Boolean(), "Give the text of each token, too.", False),
}
DETOKENIZE_FIELDS: Fields = {"model": MODEL, "tokens": Field(TokenIds(max_length=MAX_IDS), "Token ids.", required=True)}


def read_tokenize(body: dict) -> dict:
    """The checked fields, and `variables` for the template; of prompt and messages one is None. What is about messages is
    not used beside a prompt. Raises RequestError."""
    values = Object(TOKENIZE_FIELDS).check(body, "")
    if (values["prompt"] is None) == (values["messages"] is None):
        raise refused("invalid_value", "Give 'prompt' or 'messages'.", "prompt")
    if values["messages"] is not None:
        values["variables"] = values["chat_template_kwargs"] | prompt_end(body, values)
    return values


def read_detokenize(body: dict) -> dict:
    """The checked fields. Raises RequestError."""
    return Object(DETOKENIZE_FIELDS).check(body, "")
