"""What the routes that administer models accept."""

from zse.sampling.fields import Boolean, Field, Fields, Object, String
from zse.server.requests.completions import KEEP_ALIVE

_STREAM = Field(Boolean(), "Answer as server-sent events, with the progress.", False)
ADD: Fields = {
    "model": Field(String(256, empty=False), "A name from the store (`zse ls`).", required=True),
    "name": Field(String(256, empty=False), "What requests call it; left out: the same."),
}
LOAD: Fields = {"keep_alive": KEEP_ALIVE, "stream": _STREAM}
PULL: Fields = {
    "serve": Field(Boolean(), "Serve the model when it is there.", True),
    "force": Field(Boolean(), "Fetch it again even if it is there.", False),
    "stream": _STREAM,
}
UNLOAD: Fields = {"force": Field(Boolean(), "End the requests that use it.", False)}


def read(fields: Fields, body: dict) -> dict:
    """The checked fields. Raises RequestError."""
    return Object(fields).check(body, "")
