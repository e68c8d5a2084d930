"""What the admin's routes for adapters accept."""

from zse.sampling.fields import Field, Fields, String

_MODEL = {"model": Field(String(256, empty=False), "The model that it is of (default: the first).", None)}
UNLOAD: Fields = _MODEL | {"name": Field(String(64, empty=False), "Of the adapter.", required=True)}
LOAD: Fields = UNLOAD | {
    "path": Field(String(4096, empty=False), "Of its folder, on the server's machine.", required=True)
}
