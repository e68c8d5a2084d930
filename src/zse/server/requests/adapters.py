"""What the admin's routes for adapters accept."""

from zse.sampling.fields import Field, Fields, Matching, String
from zse.server.requests.keys import NAMED
from zse.server.uploads import FILE

_MODEL = {"model": Field(String(256, empty=False), "The model that it is of (default: the first).", None)}
UNLOAD: Fields = _MODEL | {"name": Field(String(64, empty=False), "Of the adapter.", required=True)}
LOAD: Fields = _MODEL | {
    "name": Field(NAMED, "Of the adapter.", required=True),
    "path": Field(String(4096, empty=False), "Of its folder, on the server's machine (default: an uploaded one's)."),
}
MAX_CONFIG_BYTES = 1 << 20
UPLOAD: Fields = _MODEL | {
    "name": Field(Matching("[a-z0-9_-]{1,64}", "1 to 64 of a-z, 0-9, '_' and '-'"), "Of the adapter.", required=True),
    "config": Field(FILE, "Its adapter_config.json.", required=True),
    "weights": Field(FILE, "Its adapter_model.safetensors.", required=True),
    "sha256": Field(
        Matching("[0-9a-f]{64}", "64 hexadecimal digits in lower case"), "Of the weights, which is compared."
    ),
}
