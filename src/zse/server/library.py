"""Models that a server may add while it serves: those of the store, and what it pulls into it."""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from zse.errors import ConfigError, ModelNotFoundError, RequestError, ZSEError
from zse.formats import store
from zse.sampling.fields import shown
from zse.server.errors import APIError
from zse.server.served import ModelSpec

log = logging.getLogger("zse.server")
MAX_PULLS, MAX_KEPT = 4, 32  # that go on at once; that are remembered


class Pull:
    """A model on its way into the store. label: of what is done now, done and total: of that, in bytes; both have one
    writer, the pull's thread. notice: what it said last. error: why it failed. task: ends with the pull, and never
    fails. name: as it was asked for."""

    def __init__(self, name: str):
        self.name, self.label, self.done, self.total, self.notice = name, "", 0, 0, ""
        self.error: RequestError | None = None
        self.task: asyncio.Task | None = None

    def progress(self, label: str, done: int, total: int) -> None:
        self.label, self.done, self.total = label, done, total

    @property
    def state(self) -> str:
        """pulling, stored or failed."""
        if self.task is not None and not self.task.done():
            return "pulling"
        return "stored" if self.error is None else "failed"

    def card(self) -> dict:
        """What an administrator sees of it."""
        return {
            "name": self.name,
            "state": self.state,
            "doing": self.label or None,
            "done_bytes": self.done,
            "total_bytes": self.total,
            "notice": self.notice or None,
            "problem": self.error and self.error.message,
        }


class Library:
    """arguments_of: of the engine that serves the model at a path; None: models cannot be added. fetch:
    zse.formats.hub.pull with this server's device; None: models cannot be pulled. What touches the disk is called in a
    thread."""

    def __init__(
        self, arguments_of: Callable[[str], list[str]] | None = None, fetch: Callable[..., object] | None = None
    ):
        self._arguments_of, self._fetch = arguments_of, fetch
        self.pulls: dict[str, Pull] = {}

    def spec(self, name: str, called: str | None = None) -> ModelSpec:
        """The stored model as it is to be served. No path is taken: what an administrator may serve over HTTP is in the
        store. called: by requests, instead of its own name. Raises APIError."""
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

    def pull(self, name: str, force: bool = False) -> Pull:
        """Begin to pull a model, or the pull of it that goes on; it ends though nobody waits for it. Exactly what `zse
        pull` does: the store's lock, one rename at the end. Raises APIError overloaded. Called on the event loop."""
        found = self.pulls.get(name)
        if found is not None and found.state == "pulling":
            return found
        if sum(pull.state == "pulling" for pull in self.pulls.values()) >= MAX_PULLS:
            raise APIError("overloaded", f"{MAX_PULLS} models are being pulled; wait for one.")
        for over in [pull.name for pull in self.pulls.values() if pull.state != "pulling"][: 1 - MAX_KEPT]:
            del self.pulls[over]
        pull = self.pulls[name] = Pull(name)
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        # A thread of its own: those of requests are few, and a server that ends does not wait for it; the next pull
        # goes on there.
        threading.Thread(target=self._run, args=(pull, force, loop, ended), daemon=True, name="zse-pull").start()
        pull.task = loop.create_task(_ended(ended))
        return pull

    def _run(self, pull: Pull, force: bool, loop: asyncio.AbstractEventLoop, ended: asyncio.Future) -> None:
        def note(line: str) -> None:
            pull.notice = line

        try:
            if self._fetch is None:
                raise ModelNotFoundError("this server pulls no models")
            self._fetch(pull.name, force=force, progress=pull.progress, notice=note)
        except ModelNotFoundError as error:
            pull.error = APIError("model_not_found", told(error), "model")
        except ConfigError as error:
            pull.error = APIError("invalid_value", told(error), "model")
        except ZSEError as error:
            pull.error = APIError("pull_failed", told(error), "model")
        except Exception:
            log.exception("the pull of %s failed", pull.name)
            pull.error = APIError("pull_failed", "The pull failed; the server's log has the reason.", "model")
        with suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(_end, ended)

    def remove(self, name: str) -> None:
        """Delete a model from the store, as `zse rm`. Raises APIError."""
        try:
            store.remove(name)
        except ModelNotFoundError:
            raise APIError("model_not_found", self._missing(name), "model") from None
        except ZSEError as error:
            raise APIError("conflict", told(error), "model") from None

    def stored(self) -> list[dict]:
        """Every model of the store: name, bytes, licence."""
        return [{key: model[key] for key in ("name", "bytes", "licence")} for model in store.entries()]


async def _ended(future: asyncio.Future) -> None:
    await future


def _end(future: asyncio.Future) -> None:
    if not future.done():  # the server ends
        future.set_result(None)


def told(error: Exception) -> str:
    """One line, without the place of the store."""
    return " ".join(str(error).replace(store.home(), "ZSE_HOME").split())
