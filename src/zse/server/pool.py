"""The models of a server: loaded when a request names one, evicted when they idle or another needs their memory.

One engine process for each loaded model, and parked ones beside them (a process that has its device open and its
kernels loaded, but no model), so that a load is a transfer of weights and not a start. State of the models and of the
parked processes has this one writer; all of it lives on the server's event loop.
"""

import asyncio
import functools
import hashlib
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from zse import __version__
from zse.engine.client import DOWN, READY, STARTING, UNLOADED, EngineClient, EngineStartError, shutting_down_error
from zse.engine.messages import Fatal, FrameReader, FromEngine, Ready
from zse.engine.process import EngineProcess
from zse.errors import EngineError, RequestError, ZSEError
from zse.server.errors import APIError
from zse.server.work import Statistics

log = logging.getLogger("zse.server")

TICK_S = 0.25
RETRY_S = 2.0  # after a load that failed, a request tries again; sooner ones get the same answer
SPARE_BUDGET, SPARE_WINDOW_S = 5, 600.0  # parked engines that may die within the window before they are given up


class ModelSpec(msgspec.Struct, frozen=True):
    """A model that is served. names: what requests may call it, the first is listed. path: file or folder.
    arguments: of its engine's command line."""

    names: tuple[str, ...]
    path: str
    arguments: tuple[str, ...] = ()


class Served:
    """One model. engine: the client of its engine process, also while it is not loaded. text: tokenizer and template, once
    somebody needed them. users: requests that hold it. changing: the load or eviction that is under way."""

    def __init__(self, spec: ModelSpec, engine: EngineClient):
        self.spec, self.engine = spec, engine
        self.text: asyncio.Future | None = None
        self.users = self.num_loads = self.num_evictions = self.num_requests = 0
        self.load_ms = 0.0  # of the last load, from the request to Ready
        self.last_used = time.monotonic()
        self.statistics = Statistics()
        # system_fingerprint of answers: the same while version, model and options are the same.
        origin = "\0".join((__version__, spec.names[0], *spec.arguments))
        self.fingerprint = "fp_" + hashlib.sha256(origin.encode()).hexdigest()[:10]
        self.failed_at = 0.0
        self.failure: RequestError | None = None
        self.changing: asyncio.Task | None = None

    @property
    def name(self) -> str:
        return self.spec.names[0]

    @property
    def state(self) -> str:
        """unloaded, loading, loaded, restarting, failed or stopping."""
        if self.changing is not None:
            return "loading" if self.engine.state in (STARTING, UNLOADED, DOWN) else "stopping"
        return {STARTING: "loading", READY: "loaded", DOWN: "failed"}.get(self.engine.state, self.engine.state)


class ModelPool:
    """The models of a server and the parked engines beside them.

    Args:
        models: the first is the default one.
        load_text: (path, name) → tokenizer and template; called in a thread.
        spawn: starts an engine from its arguments.
        park: starts a parked engine.
        spares: parked engines to keep.
        idle_s: a model without requests for so long is evicted; None: never.
        max_loaded: models that may be loaded at once; None: what memory holds.
        tries_again: an engine that died too often is tried again later.
        on_failure: called with an error that says why when every model's engine has died too often."""

    def __init__(
        self,
        models: Sequence[ModelSpec],
        load_text: Callable[[str, str], object] | None = None,
        *,
        spawn: Callable[[list[str]], EngineProcess] | None = None,
        park: Callable[[], EngineProcess] | None = None,
        spares: int = 0,
        idle_s: float | None = None,
        max_loaded: int | None = None,
        tries_again: bool = False,
        on_failure: Callable[[EngineError], None] = lambda error: None,
    ):
        self.models = [
            Served(
                spec,
                EngineClient(
                    functools.partial(self.take_process, list(spec.arguments)), tries_again, self._on_engine_down
                ),
            )
            for spec in models
        ]
        self._on_failure = on_failure
        self.draining = False
        self.num_spare_loads = 0
        self._load_text, self._spawn, self._park = load_text, spawn, park
        self._num_spares, self._idle_s, self._max_loaded = spares, idle_s, max_loaded
        self._spares: list[EngineProcess] = []
        self._spare_deaths: list[float] = []
        self.by_name = {name: model for model in self.models for name in model.spec.names}
        self._task: asyncio.Task | None = None
        self._memory = asyncio.Lock()  # one load at a time decides who has to go
        self._unloading: list[Served] = []  # those that are being evicted

    @property
    def default(self) -> Served:
        return self.models[0]

    @property
    def spares_ready(self) -> int:
        """Parked engines that are up."""
        return sum(spare.is_parked for spare in self._spares)

    def adopt(self, process: EngineProcess, text: asyncio.Future) -> None:
        """The default model's engine and text are being loaded already."""
        self.default.text = text
        self.default.engine.start(process)

    # -- requests

    def enter(self, model: Served) -> None:
        """A request that uses the model begins: the model is loaded if need be and is not evicted before leave()."""
        model.users += 1
        model.num_requests += 1
        if model.text is None or (model.text.done() and model.text.exception() is not None):
            self._start_text(model)
        if model.engine.state != READY or model.changing is not None:
            self._allow_retry(model)
            self._ensure_loading(model)

    def leave(self, model: Served) -> None:
        model.users -= 1
        model.last_used = time.monotonic()

    async def ready(self, model: Served) -> Ready:
        """Its engine's Ready message, once the model is loaded. Raises RequestError when that fails."""
        while model.engine.state != READY or model.changing is not None:
            self._ensure_loading(model)
            if model.changing is not None:
                await asyncio.shield(model.changing)
            elif model.failure is not None:
                raise model.failure
            else:
                await model.engine.wait_ready()
        assert model.engine.info is not None
        return model.engine.info

    async def text(self, model: Served):
        """Tokenizer and template. Raises APIError when they cannot be loaded."""
        if model.text is None:
            self._start_text(model)
        assert model.text is not None
        try:
            return model.text.result() if model.text.done() else await asyncio.shield(model.text)
        except ZSEError as error:
            log.error("the tokenizer of %s cannot be loaded: %s", model.name, error)
            raise APIError("engine_unavailable", "The model could not be loaded.") from None

    def _start_text(self, model: Served) -> None:
        assert self._load_text is not None
        model.text = asyncio.get_running_loop().run_in_executor(None, self._load_text, model.spec.path, model.name)
        model.text.add_done_callback(lambda future: future.cancelled() or future.exception())  # "never retrieved"

    def _ensure_loading(self, model: Served) -> None:
        """Starts a load unless there is one, the model is loaded, or it failed just now or for good."""
        if self.draining:
            raise shutting_down_error()
        if (
            model.changing is None
            and self._spawn is not None
            and model.failure is None
            and model.engine.state == UNLOADED
        ):
            model.changing = asyncio.get_running_loop().create_task(self._load(model))

    def _allow_retry(self, model: Served) -> None:
        """A new request may load what failed to load RETRY_S ago; at once where only memory that others used was missing."""
        wait_s = 0.0 if model.failure is not None and model.failure.code == "overloaded" else RETRY_S
        if model.failure is not None and model.changing is None and time.monotonic() - model.failed_at >= wait_s:
            model.failure = None
            if model.engine.state == DOWN:
                model.engine.state = UNLOADED

    # -- loading and evicting

    async def _load(self, model: Served) -> None:
        start = time.monotonic()
        try:
            while True:
                async with self._memory:
                    self._make_room(model)
                    process = self.take_process(list(model.spec.arguments))
                    model.engine.start(process)
                    try:
                        info = await model.engine.started()
                        break
                    except EngineStartError as error:
                        if error.died and process.load is not None:
                            log.warning("a parked engine died when it was to load %s: %s", model.name, error)
                            continue  # with the next parked one, or a new one
                        if error.code != "out_of_memory" or not await self._free_memory(model):
                            raise
            model.num_loads += 1
            model.load_ms = round(1000 * (time.monotonic() - start), 1)
            model.last_used = time.monotonic()
            log.info(
                "loaded %s in %.0f ms%s; in its engine: %s",
                model.name,
                model.load_ms,
                " into a parked engine" if process.load is not None else "",
                ", ".join(f"{phase} {value:.0f}" for phase, value in info.phases_ms.items()),
            )
        except RequestError as error:
            model.failure, model.failed_at = error, time.monotonic()
        except EngineStartError as error:
            log.error("%s cannot be loaded: %s", model.name, error)
            others_busy = any(other.users for other in self.models if other is not model)
            is_memory = error.code == "out_of_memory" and others_busy
            model.failure = (
                APIError("overloaded", "There is no memory for this model while others are in use.")
                if is_memory
                else APIError("engine_unavailable", "The model could not be loaded.")
            )
            model.failed_at = time.monotonic()
        finally:
            model.changing = None

    def _make_room(self, model: Served) -> None:
        """Begin to evict until one more model may be loaded. The load does not wait: if memory is short before the others
        are gone, it is tried again then."""
        while self._max_loaded is not None:
            loaded = [
                other
                for other in self.models
                if other is not model and other.engine.state != UNLOADED and other not in self._unloading
            ]
            if len(loaded) < self._max_loaded:
                return
            victim = self._longest_idle(model)
            if victim is None:
                raise APIError("overloaded", f"{self._max_loaded} models are loaded and in use.")
            self._evict(victim)

    async def _free_memory(self, model: Served) -> bool:
        """Wait for the evictions that are under way, or evict the model idle for longest; False when there is none."""
        if not self._unloading:
            victim = self._longest_idle(model)
            if victim is None:
                return False
            log.info("%s does not fit beside %s, which is evicted", model.name, victim.name)
            self._evict(victim)
        await asyncio.wait([other.changing for other in self._unloading if other.changing is not None])
        return True

    def _longest_idle(self, wanted: Served) -> Served | None:
        """The loaded model, other than `wanted`, that has been without requests for longest."""
        idle = [
            model
            for model in self.models
            if model is not wanted
            and not model.users
            and model.changing is None
            and model.engine.state in (READY, DOWN)
        ]
        return min(idle, key=lambda model: model.last_used, default=None)

    def _evict(self, model: Served) -> None:
        """Begin to unload it."""
        model.num_evictions += 1
        self._unloading.append(model)
        model.changing = asyncio.get_running_loop().create_task(self._unload(model))

    async def _unload(self, model: Served) -> None:
        try:
            await model.engine.unload()
        finally:
            self._unloading.remove(model)
            model.changing = None

    def take_process(self, arguments: list[str]) -> EngineProcess:
        """A parked engine for these arguments, preferably one that is up, or a new one."""
        for spare in sorted(self._spares, key=lambda spare: not spare.is_parked):
            self._spares.remove(spare)
            if spare.poll() is None:
                spare.load = arguments
                self.num_spare_loads += 1
                return spare
            self._count_death(spare)
        assert self._spawn is not None
        return self._spawn(arguments)

    # -- in the background

    def start(self) -> None:
        """From now on keep parked engines and evict idle models. Call it once the first models are loaded or loading."""
        if self._task is None and (self._num_spares or self._idle_s is not None):
            self._task = asyncio.get_running_loop().create_task(self._maintain())

    def limit(self, spares: int, idle_s: float | None, max_loaded: int | None) -> None:
        """Other bounds from now on; a model that is loaded already stays until it is idle or room is needed."""
        self._num_spares, self._idle_s, self._max_loaded = spares, idle_s, max_loaded
        self.start()

    async def _maintain(self) -> None:
        while True:
            self._replace_spares()
            self._evict_idle(time.monotonic())
            await asyncio.sleep(TICK_S)

    def _replace_spares(self) -> None:
        for spare in [spare for spare in self._spares if spare.poll() is not None]:
            self._spares.remove(spare)
            self._count_death(spare)
        # A load that is going on should have the machine for itself.
        if self._park is None or any(model.changing is not None for model in self.models):
            return
        while len(self._spares) < self._num_spares:
            self._spares.append(self._park())

    def _count_death(self, spare: EngineProcess) -> None:
        now = time.monotonic()
        reason = _fatal_message(spare)
        spare.sock.close()
        self._spare_deaths = [at for at in self._spare_deaths if now - at < SPARE_WINDOW_S] + [now]
        log.error("a parked engine ended with exit code %s%s", spare.poll(), reason)
        if len(self._spare_deaths) >= SPARE_BUDGET and self._num_spares:
            self._num_spares = 0
            log.error("no engine is parked any more: %d of them ended within %.0f s", SPARE_BUDGET, SPARE_WINDOW_S)

    def _evict_idle(self, now: float) -> None:
        if self._idle_s is None:
            return
        for model in self.models:
            idle = model.engine.state == READY and not model.users and model.changing is None
            if idle and now - model.last_used > self._idle_s:
                log.info("%s has been idle for %.0f s and is evicted", model.name, now - model.last_used)
                self._evict(model)

    # -- health and the end

    def _on_engine_down(self) -> None:
        # One that could not be loaded is tried again when somebody asks for it.
        if all(model.engine.state == DOWN and model.failure is None for model in self.models):
            reasons = dict.fromkeys(model.engine.reason for model in self.models)
            self._on_failure(EngineError(f"the engine failed for good: {'; '.join(reasons)}"))

    def health(self) -> tuple[bool, str]:
        """(would a request for any model be answered, why not)."""
        is_failed = all(model.engine.state == DOWN for model in self.models)
        for model in self.models:
            if model.text is not None and not model.text.done():
                return False, "the tokenizer is loading"
            if model.engine.state == UNLOADED or (model.changing is not None and model is not self.default):
                continue
            if model.engine.state == DOWN and not is_failed:
                continue  # its requests fail, others' do not
            ok, reason = model.engine.health()
            if not ok:
                return ok, reason if len(self.models) == 1 else f"{model.name}: {reason}"
        return True, ""

    async def stop(self) -> None:
        """End all engines, the parked ones too."""
        self.draining = True
        if self._task is not None:
            self._task.cancel()
        for spare in self._spares:
            spare.kill()
            spare.sock.close()
        await asyncio.gather(*(model.engine.stop() for model in self.models))
        for model in self.models:
            if model.changing is not None:
                model.changing.cancel()

    def kill(self) -> None:
        """Immediately, for the second signal."""
        for spare in self._spares:
            spare.kill()
        for model in self.models:
            model.engine.kill()

    def fail_requests(self, error: RequestError) -> None:
        for model in self.models:
            model.engine.fail_requests(error)


def _fatal_message(process: EngineProcess) -> str:
    """: MESSAGE" of the Fatal that a process sent before it ended; "" where it sent none."""
    try:
        process.sock.setblocking(False)
        messages = FrameReader(FromEngine).feed(process.sock.recv(1 << 16))
    except (OSError, EngineError):
        return ""
    return "".join(f": {message.message}" for message in messages if isinstance(message, Fatal))
