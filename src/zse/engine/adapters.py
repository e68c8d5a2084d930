"""The adapters of an engine: read in a thread beside the steps, named by the hash of what they hold, kept in host
memory; the runner puts those that a step needs into slots of the device."""

import threading
from typing import Any, NamedTuple

from zse.engine.messages import AdapterLoaded, Ask
from zse.engine.metrics import ADAPTER_COUNTERS
from zse.errors import RequestError, ZSEError
from zse.lora.targets import Image, read_image
from zse.scheduler.feature import Feature
from zse.scheduler.options import RequestOptions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.engine.core import Engine

WAIT_S = 0.002  # for an adapter that is being read while nothing else is to be done


class _Loaded(NamedTuple):
    """What take_completed() gives."""

    id: int
    result: AdapterLoaded | None
    error: RequestError | None
    computed_len: int = 0


class AdapterStore(Feature):
    """Made when the first adapter is loaded, or a request names one."""

    is_live = False  # steps read the runner's slots

    def __init__(self, engine: "Engine"):
        self._scheduler, self._runner = engine.scheduler, engine.runner
        self._loading: dict[int, threading.Thread] = {}
        self._read: dict[int, Image | ZSEError] = {}
        self._leaving: set[str] = set()

    # -- which there are

    def load(self, path: str) -> Image:
        """Read an adapter and keep it. Raises RequestError, FormatError, UnsupportedError."""
        slots = self._slots()
        image = read_image(path, slots.whole, slots.rank)
        self._keep(image)
        return image

    def begin(self, id: int, path: str) -> None:
        """Read an adapter in a thread; take_completed() tells of it under `id`. Raises RequestError."""
        slots = self._slots()

        def read() -> None:
            try:
                self._read[id] = read_image(path, slots.whole, slots.rank)
            except ZSEError as error:
                self._read[id] = error
            except Exception as error:  # the step's thread must hear of it
                self._read[id] = ZSEError(f"{path}: cannot be read: {type(error).__name__}")

        self._loading[id] = threading.Thread(target=read, name=f"adapter {id}", daemon=True)
        self._loading[id].start()

    def unload(self, adapter: str) -> None:
        """Forget an adapter as soon as no request has it; new ones are refused at once."""
        if self._runner.adapters is not None and adapter in self._runner.adapters.images:
            self._leaving.add(adapter)
            self._sweep()

    def check(self, params: Any, options: RequestOptions) -> None:
        if isinstance(params, Ask):
            message = "adapters write replies; scores, log-probabilities of prompts and embeddings are the base model's: leave it out of `model`"
            raise RequestError(message, code="unsupported_parameter", param="model")
        self.before_queue([], options)

    def _slots(self) -> Any:
        if self._runner.adapters is None:
            raise RequestError(
                "this engine has no slots for adapters: start the server with --adapter or --adapter-slots",
                code="unsupported_parameter",
                param="path",
            )
        return self._runner.adapters

    def _keep(self, image: Image) -> None:
        self._leaving.discard(image.id)
        self._runner.keep_adapter(image)

    def _sweep(self) -> None:
        used = {request.options.adapter for request in self._scheduler.requests.values()} if self._leaving else set()
        for adapter in self._leaving - used:
            self._runner.adapters.forget(adapter)
            self._leaving.remove(adapter)

    # -- of the engine

    def before_queue(self, prompt: list[int], options: RequestOptions) -> None:
        adapter = options.adapter
        if adapter and (
            adapter in self._leaving or self._runner.adapters is None or adapter not in self._runner.adapters.images
        ):
            message = "the adapter of this request is not loaded here any more"
            raise RequestError(message, status=404, code="model_not_found", param="model")

    def take_completed(self) -> list[_Loaded]:
        completed = []
        for id in list(self._read) if self._read else ():
            self._loading.pop(id).join()
            found = self._read.pop(id)
            if isinstance(found, Image):
                self._keep(found)
                told = AdapterLoaded(id, found.id, found.own_rank, sorted(found.members), found.nbytes)
                completed.append(_Loaded(id, told, None))
            else:
                error = RequestError(str(found), status=422, code="unprocessable_file", param="path")
                completed.append(_Loaded(id, None, error))
        return completed

    def idle(self, now: float) -> bool:
        for thread in list(self._loading.values()):
            thread.join(WAIT_S)
        return bool(self._loading)

    def counters(self) -> dict[str, float]:
        """Asked with every heartbeat, which is when adapters leave that requests had."""
        slots = self._runner.adapters
        if slots is None:
            return ADAPTER_COUNTERS
        self._sweep()
        counts = len(slots.images), len(slots.resident), slots.num_loads
        return dict(zip(ADAPTER_COUNTERS, counts, strict=True))
