"""Images of prompts: each is encoded once, in pieces between the engine's steps, before its request enters the queue.

The tower is loaded with the first image, in a thread: what has none waits for nothing and pays nothing. Embeddings are
kept by what the image shows, in host memory; a request keeps its own for as long as it lives."""

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from threading import Thread
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from zse.engine import image_encoder
from zse.engine.messages import Ask, ImageInput, image_key
from zse.engine.metrics import IMAGE_COUNTERS
from zse.errors import RequestError, ZSEError
from zse.lazy import hashlib, logging
from zse.sampling.params import SamplingParams
from zse.scheduler.batch import StepOutput
from zse.scheduler.feature import Feature
from zse.scheduler.images import PlacedImage
from zse.scheduler.options import RequestOptions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zse.engine.core import Engine

SLICE_S = 0.05  # of encoding between two steps, at least one layer
WAIT_S = 0.002  # for the tower's weights where nothing else is to be done
MAX_WAITING_BYTES = 1 << 29  # of pixels that wait to be encoded


class Encoding:
    """What a tower made of an image. values f32 [1 + deepstack layers, parts, hidden]; parts: for each of the image's
    tokens the number of its embedding, -1: it has none."""

    __slots__ = ("__weakref__", "parts", "values")

    def __init__(self, values: Any, parts: list[int]):
        self.values, self.parts = values, parts

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


class Waiting(msgspec.Struct, eq=False):
    """A request whose images are not all encoded. found: those that are, by key."""

    prompt: list[int]
    params: Any
    options: RequestOptions
    now: float
    images: list[ImageInput]
    found: dict[bytes, Encoding] = {}


class ImageStore(Feature):
    """Requests with images until they are encoded, and the embeddings of images that were."""

    def __init__(self, engine: "Engine"):
        self._engine, self._plan = engine, engine.tower
        self._limit = engine.runner.config.image_cache
        self._waiting: dict[int, Waiting] = {}
        self._alive: WeakValueDictionary[bytes, Encoding] = WeakValueDictionary()
        self._kept: OrderedDict[bytes, Encoding] = OrderedDict()  # the most recently used last
        self._kept_bytes = 0
        self._encoder: Any = None
        self._loading: Thread | None = None
        self._load_error: ZSEError | None = None
        self._current: tuple[ImageInput, Iterator, str] | None = None  # being encoded, for a tenant
        self._spent_s: dict[str, float] = {}  # of encoding, by tenant, while it has images that wait
        self._outputs: list[StepOutput] = []
        self._counters = dict(IMAGE_COUNTERS)

    @property
    def is_live(self) -> bool:  # type: ignore[override]
        return bool(self._waiting or self._outputs)

    @property
    def has_work(self) -> bool:  # type: ignore[override]
        return bool(self._waiting or self._outputs)

    def submit(self, id: int, prompt: list[int], params: Any, options: RequestOptions, now: float) -> None:
        """Take a request with ImageInputs. Raises RequestError, and keeps nothing, when it is refused."""
        images = options.images
        if self._plan is None:
            raise _refused("this model takes no images")
        if isinstance(params, Ask):
            raise _refused("embeddings, scores and log-probabilities of a prompt with images are not there")
        self._engine.scheduler.check_room(id, self._waiting, len(self._waiting))
        if isinstance(params, SamplingParams):
            self._engine.scheduler.limits.max_len(prompt, params)
        self._check(prompt, images)
        waiting = sum(len(image.pixels) for each in self._waiting.values() for image in each.images)
        held = sum(encoding.nbytes for encoding in self._alive.values()) - self._kept_bytes
        if waiting + held + sum(len(image.pixels) for image in images) > MAX_WAITING_BYTES:
            message = "too many images are waiting already; try again later"
            raise RequestError(message, status=503, type="server_error", code="overloaded")
        request = Waiting(prompt, params, options, now, list(images))
        for image in images:
            encoding = self._find(image.key)
            if encoding is not None:
                request.found[image.key] = encoding
                self._counters["image_hits"] += 1
        if len(request.found) == len({image.key for image in images}):
            self._enter(id, request)
            return
        self._waiting[id] = request
        others = (self._spent_s.get(each.options.tenant, 0.0) for each in self._waiting.values() if each is not request)
        self._spent_s.setdefault(options.tenant, min(others, default=0.0))
        if self._loading is None:
            self._loading = Thread(target=self._load, name="vision tower", daemon=True)
            self._loading.start()

    def _check(self, prompt: list[int], images: Sequence[ImageInput]) -> None:
        how, end, most = self._plan.vision, 0, self._engine.runner.config.max_tokens_per_step
        for image in images:
            size = image.height, image.width
            if not how.fits(*size) or len(image.pixels) != 3 * how.num_pixels(*size):
                raise _refused(
                    f"an image of {image.width} x {image.height} pixels is not of a size that this model takes"
                )
            if image.count != how.num_tokens(*size) or image.start < end or image.start + image.count > len(prompt):
                raise _refused("an image's tokens do not stand where they should")
            if image.key != image_key(*size, image.pixels):
                raise _refused("an image's key is not that of its pixels")
            if how.whole and image.count > most:
                raise _refused(
                    f"an image is {image.count} tokens of one step, which has {most} (--max-tokens-per-step)"
                )
            end = image.start + image.count

    # -- between steps

    def before_schedule(self, now: float) -> list[StepOutput]:
        for id, waiting in list(self._waiting.items()):
            options, waited_s = waiting.options, now - waiting.now
            if options.deadline_ms is not None and waited_s > options.deadline_ms / 1000:
                del self._waiting[id]
                error = RequestError(
                    "the deadline passed while the request waited",
                    status=504,
                    type="server_error",
                    code="timeout",
                    param="deadline_ms",
                )
                self._outputs.append(StepOutput(id, [], None, "timeout", error=error))
        outputs, self._outputs = self._outputs, []
        return outputs

    def after_step(self, ran: bool) -> bool:
        """Encode for a while."""
        if not self._waiting:
            return False
        assert self._loading is not None
        if self._loading.is_alive():
            if not ran:
                self._loading.join(WAIT_S)
            return False
        if self._load_error is not None:
            self._fail_all(self._load_error)
            return False
        started = last = time.perf_counter()
        while last - started <= SLICE_S and (tenant := self._advance()) is not None:
            now = time.perf_counter()
            self._spent_s[tenant] = self._spent_s.get(tenant, 0.0) + now - last
            last = now
        self._counters["image_seconds"] += last - started
        tenants = {waiting.options.tenant for waiting in self._waiting.values()}
        self._spent_s = {name: seconds for name, seconds in self._spent_s.items() if name in tenants}
        return True

    def _advance(self) -> str | None:
        """Run one piece of an image, the next of the tenant that had the least time; whose it was, None when nothing is
        left."""
        if self._current is None:
            if not self._waiting:
                return None
            first = min(self._waiting.values(), key=lambda each: self._spent_s.get(each.options.tenant, 0.0))
            image = next(image for image in first.images if image.key not in first.found)
            pieces = self._encoder.encode(image.pixels, image.height, image.width)
            self._current = image, pieces, first.options.tenant
        image, pieces, tenant = self._current
        values = next(pieces)
        if values is not None:
            self._current = None
            self._counters["images_encoded"] += 1
            self._took(image.key, Encoding(values, self._plan.vision.parts(image.height, image.width)))
        return tenant

    def _took(self, key: bytes, encoding: Encoding) -> None:
        """Keep it, and let requests go that have all they need."""
        self._alive[key] = encoding
        self._keep(key, encoding)
        for id, waiting in list(self._waiting.items()):
            if any(image.key == key for image in waiting.images):
                waiting.found[key] = encoding
                if all(image.key in waiting.found for image in waiting.images):
                    del self._waiting[id]
                    try:
                        self._enter(id, waiting)
                    except RequestError as error:
                        self._outputs.append(StepOutput(id, [], None, "error", error=error))

    def _enter(self, id: int, request: Waiting) -> None:
        """Give the request to who takes it without images. Raises RequestError."""
        placed = tuple(
            PlacedImage(
                image.start,
                image.count,
                image.key,
                _numbers(image.key, image.count),
                self._plan.vision.whole,
                request.found[image.key],
                self._plan.vision.grid(image.height, image.width) if self._plan.sections else (0, 0),
            )
            for image in request.images
        )
        options = msgspec.structs.replace(request.options, images=placed)
        self._engine.submit(id, request.prompt, request.params, options, request.now)

    # -- what was encoded

    def _find(self, key: bytes) -> Encoding | None:
        encoding = self._alive.get(key)
        if encoding is not None:
            self._keep(key, encoding)
        return encoding

    def _keep(self, key: bytes, encoding: Encoding) -> None:
        if key not in self._kept:
            self._kept_bytes += encoding.nbytes
        self._kept[key] = encoding
        self._kept.move_to_end(key)
        while self._kept_bytes > self._limit:
            _, gone = self._kept.popitem(last=False)
            self._kept_bytes -= gone.nbytes
            self._counters["image_evictions"] += 1

    # -- the tower

    def _load(self) -> None:
        """In a thread: the tower, from its files to the device."""
        runner = self._engine.runner
        try:
            self._encoder = image_encoder.ImageEncoder(
                runner.device, self._plan, kv_dtype=image_encoder.tower_kv_dtype(runner.config.kv_dtype)
            )
            self._encoder.load()
        except ZSEError as error:
            self._load_error = error
        except Exception as error:
            self._load_error = ZSEError(f"{type(error).__name__}: {error}")

    def _fail_all(self, error: ZSEError) -> None:
        """The tower cannot be had: the next image tries again."""
        logging.getLogger("zse.engine").error("the vision tower cannot be loaded: %s", error)
        for id in self._waiting:
            told = RequestError(
                "the model's vision tower cannot be loaded", status=500, type="server_error", code="engine_error"
            )
            self._outputs.append(StepOutput(id, [], None, "error", error=told))
        self._waiting.clear()
        self._loading = self._load_error = self._encoder = None

    # -- the end

    def cancel(self, id: int) -> bool:
        if self._waiting.pop(id, None) is None:
            return False
        self._engine.scheduler.counters.cancelled += 1
        return True

    def num_computed(self, id: int) -> int | None:
        return 0 if id in self._waiting else None

    def counters(self) -> dict[str, float]:
        return self._counters | {"image_cache_bytes": self._kept_bytes, "images_waiting": len(self._waiting)}

    def close(self) -> None:
        if self._loading is not None:
            self._loading.join()
        if self._encoder is not None:
            self._encoder.close()


def _numbers(key: bytes, count: int) -> bytes:
    """PlacedImage.numbers: SHAKE-256 of the key, 31 bits a token, the highest bit set."""
    numbers = bytearray(hashlib.shake_256(key).digest(4 * count))
    for at in range(3, len(numbers), 4):
        numbers[at] |= 0x80
    return bytes(numbers)


def _refused(message: str) -> RequestError:
    return RequestError(message, code="unsupported_parameter", param="messages")
