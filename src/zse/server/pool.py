"""The models of a server: added and removed while it serves, loaded when a request names one or an administrator wants
it, evicted when they idle or another needs their memory.

One engine process for each loaded model, and parked ones beside them (a process that has its device open and its
kernels loaded, but no model), so that a load is a transfer of weights and not a start. State of the models and of the
parked processes has this one writer; all of it lives on the server's event loop.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Sequence

from zse.engine.client import DOWN, READY, STARTING, UNLOADED, EngineClient, EngineStartError, shutting_down_error
from zse.engine.messages import Ready
from zse.engine.process import EngineProcess
from zse.errors import EngineError, RequestError, ZSEError
from zse.server.errors import APIError
from zse.server.served import ModelSpec, ReadBytes, Served, stamp
from zse.server.spares import ParkedEngines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.server.copies import ConvertedCopies
    from zse.server.resident import ResidentFiles

log = logging.getLogger("zse.server")

TICK_S = 0.25
BEHIND_S = 3.0  # behind an unload: for what is to make the next load quicker
RETRY_S = 2.0  # after a load that failed, a request tries again; sooner ones get the same answer


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
        copies: makes what takes and makes converted copies of models, when it is first asked for; None: nothing does.
        resident: keeps the files of models that were unloaded in memory; None: the system as it likes.
        expect_bytes: of files that a parked engine may make ready for its GPU; None: its own bound.
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
        copies: "Callable[[], ConvertedCopies] | None" = None,
        resident: "ResidentFiles | None" = None,
        expect_bytes: int | None = None,
        on_failure: Callable[[EngineError], None] = lambda error: None,
    ):
        self._tries_again, self._on_failure = tries_again, on_failure
        self._make_copies, self.resident = copies, resident
        self.models = [self._served(spec) for spec in models]
        self._removed: list[Served] = []  # whose requests, or engines, have not ended yet
        self.draining = False
        self._load_text, self._spawn = load_text, spawn
        self.idle_s, self._max_loaded = idle_s, max_loaded
        self.spares = ParkedEngines(spares, park, expect_bytes)
        self.by_name = {name: model for model in self.models for name in model.spec.names}
        self._task: asyncio.Task | None = None
        self._memory = asyncio.Lock()  # one load at a time decides who has to go
        self._unloading: list[Served] = []  # those that are being evicted

    def _served(self, spec: ModelSpec) -> Served:
        def respawn() -> EngineProcess:
            self._read_replaced(served)
            return self.take_process(list(spec.arguments))

        served = Served(spec, EngineClient(respawn, self._tries_again, self._on_engine_down))
        return served

    @functools.cached_property
    def _copies(self) -> "ConvertedCopies | None":
        return None if self._make_copies is None else self._make_copies()

    @property
    def default(self) -> Served:
        return self.models[0]

    @property
    def _all(self) -> list[Served]:
        return [*self.models, *self._removed]

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
        ends = model.num_ends
        while model.engine.state != READY or model.changing is not None:
            if model.num_ends != ends:
                raise _unloaded_error()
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
            model.problem = _for_administrator(model, error)
            raise APIError("engine_unavailable", "The model could not be loaded.") from None

    def _start_text(self, model: Served) -> None:
        assert self._load_text is not None
        model.files, model.revision = stamp(model.spec.path), None
        model.text = asyncio.get_running_loop().run_in_executor(None, self._load_text, model.spec.path, model.name)
        model.text.add_done_callback(lambda future: future.cancelled() or future.exception())  # "never retrieved"

    def _read_replaced(self, model: Served) -> None:
        """Before an engine reads the model's files: tokenizer and template anew, where others took their place."""
        if model.text is not None and model.files != stamp(model.spec.path):
            self._start_text(model)

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
            self._read_replaced(model)
            model.changing = asyncio.get_running_loop().create_task(self._load(model))

    def _allow_retry(self, model: Served) -> None:
        """A new request may load what failed to load RETRY_S ago; at once where only memory that others used was
        missing."""
        wait_s = 0.0 if model.failure is not None and model.failure.code == "overloaded" else RETRY_S
        if model.failure is not None and model.changing is None and time.monotonic() - model.failed_at >= wait_s:
            model.failure = None
            if model.engine.state == DOWN:
                model.engine.state = UNLOADED

    # -- models that come and go

    def add(self, spec: ModelSpec) -> Served:
        """Serve one more model, which its first request loads; one that is served already stays as it is. Raises
        APIError."""
        if self.draining:
            raise shutting_down_error()
        for name in spec.names:
            if name in self.by_name:
                if self.by_name[name].spec == spec:
                    return self.by_name[name]
                raise APIError("conflict", f"Another model is served as '{name}'; remove it first.")
        model = self._served(spec)
        self.models.append(model)
        self.by_name |= dict.fromkeys(spec.names, model)
        return model

    def remove(self, model: Served) -> None:
        """From now on no request finds it. Those that have begun end as they would; then its engine ends. Raises
        APIError."""
        _check_started(model)
        self.models.remove(model)
        self.by_name = {name: other for name, other in self.by_name.items() if other is not model}
        self._removed.append(model)
        self.keep(model, 0.0)

    async def unload(self, model: Served, force: bool = False) -> None:
        """End its engine; the next request loads it again. force: requests that use it end with an error, otherwise
        they are in the way. Raises APIError."""
        _check_started(model)
        if model.users and not force:
            message = f"{model.users} requests use the model; send 'force': true to end them."
            raise APIError("conflict", message)
        model.num_ends += 1
        model.engine.fail_requests(_unloaded_error())
        if model not in self._unloading and (model.changing is not None or model.engine.state != UNLOADED):
            self._evict(model)
        if model.changing is not None:
            await asyncio.shield(model.changing)

    def keep(self, model: Served, seconds: float) -> None:
        """Until it is unloaded it stays loaded for so long without requests, whatever idle_s says; math.inf: for ever,
        unless another model needs its memory."""
        model.keep_s = seconds
        self._look_after()

    # -- loading and evicting

    async def _load(self, model: Served) -> None:
        start, ends = time.monotonic(), model.num_ends
        words = list(model.spec.arguments)
        try:
            if self._copies is not None:
                words = await asyncio.to_thread(self._copies.arguments, words)
            model.reads = _model_of(words, model)
            while True:
                async with self._memory:
                    if model.num_ends != ends:
                        return
                    self._make_room(model)
                    process = self.take_process(list(words))
                    model.reading = ReadBytes(process, model.spec.path)
                    model.engine.start(process)
                    try:
                        info = await model.engine.started()
                        break
                    except EngineStartError as error:
                        if model.num_ends != ends:
                            return
                        if error.died and process.load is not None:
                            log.warning("a parked engine died when it was to load %s: %s", model.name, error)
                            continue  # with the next parked one, or a new one
                        if error.code != "out_of_memory" or not await self._free_memory(model):
                            raise
            model.num_loads += 1
            model.problem = ""
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
            model.problem = _for_administrator(model, error)
            others_busy = any(other.users for other in self._all if other is not model)
            is_memory = error.code == "out_of_memory" and others_busy
            model.failure = (
                APIError("overloaded", "There is no memory for this model while others are in use.")
                if is_memory
                else APIError("engine_unavailable", "The model could not be loaded.")
            )
            model.failed_at = time.monotonic()
        finally:
            model.reading = None
            if model.changing is asyncio.current_task():  # else it is being unloaded
                model.changing = None

    def _make_room(self, model: Served) -> None:
        """Begin to evict until one more model may be loaded. The load does not wait: if memory is short before the
        others are gone, it is tried again then."""
        while self._max_loaded is not None:
            loaded = [
                other
                for other in self._all
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
        idle = [model for model in self._all if model is not wanted and model.is_idle]
        return min(idle, key=lambda model: model.last_used, default=None)

    def _evict(self, model: Served) -> None:
        """Begin to unload it."""
        model.num_evictions += 1
        model.keep_s = None
        self._unloading.append(model)
        model.changing = asyncio.get_running_loop().create_task(self._unload(model))

    async def _unload(self, model: Served) -> None:
        try:
            await model.engine.unload()
        finally:
            self._unloading.remove(model)
            model.changing = None
        asyncio.get_running_loop().call_later(BEHIND_S, self._unloaded, model)

    def _unloaded(self, model: Served) -> None:
        """A while after an unload: the load that it made room for had the machine for itself."""
        if not self.draining and (self._copies is not None or self.resident is not None):
            asyncio.get_running_loop().run_in_executor(None, self._make_next_load_quick, model, model in self.models)

    def _make_next_load_quick(self, model: Served, is_served: bool) -> None:
        """In a thread."""
        words = list(model.spec.arguments)
        if self._copies is not None and is_served:
            self._copies.begin([model.spec.path] if not model.spec.adapters else [])
            words = self._copies.arguments(words)
        model.reads = _model_of(words, model)
        if self.resident is not None and is_served:
            self.resident.hold(model.name, model.reads)
        elif self.resident is not None:
            self.resident.release(model.name)

    def take_process(self, arguments: list[str]) -> EngineProcess:
        """A parked engine for these arguments, or a new one."""
        assert self._spawn is not None
        return self.spares.take(arguments) or self._spawn(arguments)

    # -- in the background

    def start(self) -> None:
        """From now on keep parked engines and evict idle models. Call it once the first models are loaded or
        loading."""
        if self.spares.wanted or self.idle_s is not None:
            self._look_after()

    def _look_after(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._maintain())

    def limit(self, spares: int, idle_s: float | None, max_loaded: int | None) -> None:
        """Other bounds from now on; a model that is loaded already stays until it is idle or room is needed."""
        self.spares.wanted, self.idle_s, self._max_loaded = spares, idle_s, max_loaded
        self.start()

    async def _maintain(self) -> None:
        while True:
            self.spares.replace(all(model.changing is None for model in self._all))
            self.spares.tell(self._expected())
            self._evict_idle(time.monotonic())
            await asyncio.sleep(TICK_S)

    def _expected(self) -> list[str]:
        """What engines read of the models that may be loaded next: those that are not loaded, the one that was used last first, then the others."""
        waiting = sorted((m for m in self.models if m.engine.state == UNLOADED), key=lambda model: -model.last_used)
        return [model.reads for model in (*waiting, *(m for m in self.models if m not in waiting))]

    def _evict_idle(self, now: float) -> None:
        for model in self.models:
            keep_s = self.idle_s if model.keep_s is None else model.keep_s
            idle_s = now - model.last_used
            if keep_s is not None and model.is_idle and model.engine.state == READY and idle_s >= keep_s:
                log.info("%s has been idle for %.0f s and is evicted", model.name, idle_s)
                self._evict(model)
        for model in self._removed:
            if model.is_idle:
                self._evict(model)
        is_left = [model.users or model.changing or model.engine.state != UNLOADED for model in self._removed]
        self._removed = [model for model, left in zip(self._removed, is_left, strict=True) if left]

    # -- health and the end

    def _on_engine_down(self) -> None:
        # One that could not be loaded is tried again when somebody asks for it.
        if self.models and all(model.engine.state == DOWN and model.failure is None for model in self.models):
            reasons = dict.fromkeys(model.engine.reason for model in self.models)
            self._on_failure(EngineError(f"the engine failed for good: {'; '.join(reasons)}"))

    def health(self) -> tuple[bool, str]:
        """(would a request for any model be answered, why not)."""
        is_failed = all(model.engine.state == DOWN for model in self.models)
        for model in self.models:
            if model is self.default and model.text is not None and not model.text.done():
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
        self.spares.close()
        await asyncio.gather(*(model.engine.stop() for model in self._all))
        for model in self._all:
            if model.changing is not None:
                model.changing.cancel()

    def kill(self) -> None:
        """Immediately, for the second signal."""
        self.spares.kill()
        for model in self._all:
            model.engine.kill()

    def fail_requests(self, error: RequestError) -> None:
        for model in self._all:
            model.engine.fail_requests(error)


def _model_of(words: list[str], model: Served) -> str:
    """What an engine with these arguments reads."""
    return dict(zip(words[::2], words[1::2])).get("--model", model.spec.path)


def _check_started(model: Served) -> None:
    """The server waits for the first start of its first model, which only ends with it."""
    if model.engine.state == STARTING and model.changing is None:
        raise APIError("conflict", "The model is being started with the server; try again when it is loaded.")


def _unloaded_error() -> RequestError:
    return APIError("engine_restarting", "The model was unloaded; the next request loads it again.")


def _for_administrator(model: Served, error: Exception) -> str:
    """One line without the place of the model's files."""
    return " ".join(str(error).replace(model.spec.path, model.name).split())
