"""Models that a server may add while it serves: those of the store."""

from collections.abc import Callable

from zse.errors import ZSEError
from zse.formats import store
from zse.sampling.fields import shown
from zse.server.errors import APIError
from zse.server.served import ModelSpec


class Library:
    """arguments_of: of the engine that serves the model at a path; None: models cannot be added. What touches the disk is called in a
    thread."""

    def __init__(self, arguments_of: Callable[[str], list[str]] | None = None):
        self._arguments_of = arguments_of

    def spec(self, name: str, called: str | None = None) -> ModelSpec:
        """The stored model as it is to be served. No path is taken: what an administrator may serve over HTTP is in the store.
        called: by requests, instead of its own name. Raises APIError."""
        try:
            found = store.describe(name)
        except ZSEError as error:
            raise APIError("invalid_value", told(error), "model") from None
        if found is None or self._arguments_of is None:
            raise APIError("model_not_found", self._missing(name), "model")
        path = found["path"]
        return ModelSpec((called or name,), path, tuple(self._arguments_of(path)))

    def _missing(self, name: str) -> str:
        if store.can_be_pulled(name):
            return f"The model '{shown(name)}' is not in the store; pull it first."
        names = ", ".join(model["name"] for model in store.entries()) or "nothing"
        return f"The model '{shown(name)}' is not in the store, which has: {names}."

    def stored(self) -> list[dict]:
        """Every model of the store: name, bytes, licence."""
        return [{key: model[key] for key in ("name", "bytes", "licence")} for model in store.entries()]


def told(error: Exception) -> str:
    """One line, without the place of the store."""
    return " ".join(str(error).replace(store.home(), "ZSE_HOME").split())
