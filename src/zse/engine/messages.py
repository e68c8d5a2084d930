"""Frames between the server process and its engine process: msgpack, typed, each behind a 4-byte little-endian length.

The tag field is `kind`: Failed has a `type` of its own. Shared by both ends: `encode` and `FrameReader` are pure,
`FrameSocket` is the engine's blocking end."""

import os
from typing import Annotated, Literal

import msgspec

from zse.errors import EngineError
from zse.lazy import hashlib, select, socket
from zse.sampling.fields import Array, Field, Integer
from zse.sampling.params import MAX_LOGPROBS, TOKEN_ID, Asked, BeamParams, SamplingParams
from zse.scheduler.options import DEFAULT, RequestOptions

_TARGETS = Array(TOKEN_ID, 1024)

POOLINGS = ("last", "mean", "cls", "max")  # of hidden states


class Ask(Asked, frozen=True):
    """What is measured of a sequence that is run without sampling (engine/jobs.py).

    "logprobs": the log-probability of each token given those before it, with `top` alternatives (0..20), of those at
    position `first` and behind. "last", "mean", "cls", "max": the hidden state after the final norm, of the last token,
    their mean, the first token's, their greatest numbers; normalize: brought to length 1. "labels": a cross-encoder's
    logits. "targets": the log-probability of each of `targets` as the next token (at most 1,024). second: where the
    second text of a pair begins, for encoders that tell the two apart; 0: there is one."""

    what: Literal["logprobs", "last", "mean", "cls", "max", "labels", "targets"]
    top: Annotated[int, Field(Integer(0, MAX_LOGPROBS), routes=())] = 0
    targets: Annotated[tuple[int, ...], Field(_TARGETS, routes=())] = ()
    normalize: bool = False
    first: int = 0
    second: int = 0


class ImageInput(msgspec.Struct, array_like=True):
    """An image of a prompt. start: index of its first placeholder in the prompt; count: tokens from there on that stand
    for it, ends of rows among them (VisionConfig.num_tokens of the size). height, width: of the resized image, a size
    that VisionConfig.fits. pixels: u8 red, green, blue, rows from the top: 3 * height * width bytes. key: SHA-256 of
    size and pixels (image_key): what stands for the image in caches."""

    start: int
    count: int
    height: int
    width: int
    pixels: bytes
    key: bytes


def image_key(height: int, width: int, pixels: bytes) -> bytes:
    """ImageInput.key: SHA-256 of height and width, each as 4 bytes little-endian, and the pixels."""
    size = height.to_bytes(4, "little") + width.to_bytes(4, "little")
    return hashlib.sha256(size + pixels).digest()


class Submit(msgspec.Struct, tag_field="kind", tag=True):
    """server → engine. `id` is unique for the life of the engine. prompt: token ids, at least one. params:
    SamplingParams of a reply, which Tokens tell; an Ask, answered by one Measured; BeamParams of a beam search,
    answered by one Searched. Or Failed. images: of the prompt, in its order; only for models of which Ready says how
    they see."""

    id: int
    prompt: list[int]
    params: SamplingParams | Ask | BeamParams
    options: RequestOptions = DEFAULT
    images: list[ImageInput] = []

    @property
    def all_options(self) -> RequestOptions:
        """The options, with the images."""
        return msgspec.structs.replace(self.options, images=tuple(self.images)) if self.images else self.options


class Cancel(msgspec.Struct, tag_field="kind", tag=True):
    """server → engine, answered by Cancelled. An unknown or finished id is counted."""

    id: int


class LoadModel(msgspec.Struct, tag_field="kind", tag=True):
    """server → a parked engine, once: become the engine of this model. arguments: as on a worker's command line.
    Answered by Ready or Fatal; Ready.phases_ms count from here."""

    arguments: list[str]


class Expect(msgspec.Struct, tag_field="kind", tag=True):
    """server → a parked engine, not answered: it may become the engine of one of these models, rather of the first ones. It makes ready what lies
    in memory of their files, at most max_bytes (None: its own bound)."""

    paths: list[str]
    max_bytes: int | None


class LoadAdapter(msgspec.Struct, tag_field="kind", tag=True):
    """server → engine: read the PEFT folder `path`. Answered by AdapterLoaded or Failed. `id` as of Submit."""

    id: int
    path: str


class UnloadAdapter(msgspec.Struct, tag_field="kind", tag=True):
    """server → engine, not answered: no request will name this adapter; those that do already end as they would."""

    adapter: str


class DropSession(msgspec.Struct, tag_field="kind", tag=True):
    """server → engine, not answered: forget what was computed for this session (RequestOptions.session) alone."""

    session: str


class AdapterLoaded(msgspec.Struct, tag_field="kind", tag=True):
    """engine → server: requests may name it. adapter: the hash of what it holds. members: the model's weights that it
    changes, by our names. nbytes: of the host's memory."""

    id: int
    adapter: str
    rank: int
    members: list[str]
    nbytes: int


class Shutdown(msgspec.Struct, tag_field="kind", tag=True):
    """server → engine: finish nothing more, free everything, exit 0."""


class Ready(msgspec.Struct, tag_field="kind", tag=True):
    """engine → server, once: the model is loaded. num_pages: of page_size tokens. phases_ms: name → milliseconds since
    exec. queue_tokens: of prompts that may wait before it is known how fast they drain. hidden_size: numbers of a
    vector. generates: False of encoders. pooling: what the model's files say of its vectors, "": nothing. num_labels:
    of a cross-encoder, 0: it is none. vision: how images become tokens, an encoded VisionConfig
    (models/vision/config.py); b"": the model sees none. has_state: it has recurrent layers, whose states are kept at
    RequestOptions.state_points. kernels: of the device, cpu or gpu."""

    model: str
    max_context: int
    max_rows: int
    num_pages: int
    memory_bytes: dict[str, int]
    phases_ms: dict[str, float]
    page_size: int = 16
    queue_tokens: int = 1 << 18
    hidden_size: int = 0
    generates: bool = True
    pooling: str = ""
    num_labels: int = 0
    vision: bytes = b""
    has_state: bool = False
    kernels: str = "cpu"


class Parked(msgspec.Struct, tag_field="kind", tag=True):
    """engine → server, once: started without a model, the device is open, waiting for LoadModel."""

    phases_ms: dict[str, float]


class TokenLogprob(msgspec.Struct, array_like=True):
    """One sampled token's log-probability and its alternatives [(token, logprob)], best first."""

    logprob: float
    top: list[tuple[int, float]]


class Tokens(msgspec.Struct, tag_field="kind", tag=True):
    """engine → server: newly sampled tokens of one request, in order. logprobs: one per token when asked for. finish:
    None while running, else "stop" (end-of-sequence or stop id; that token is the last one), "length". cached_tokens,
    waited_s: of the prompt, in the prefix cache, and seconds in the engine's queue; told with the first tokens."""

    id: int
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish: str | None = None
    cached_tokens: int = 0
    waited_s: float = 0.0


PACKED_TOKENS = 256


class Measured(msgspec.Struct, tag_field="kind", tag=True):
    """engine → server: the one answer to an Ask. vector: f32 little-endian [hidden_size of Ready] ("last", "mean").
    logprobs: of "logprobs" one for each token of the prompt from Ask.first on, None for the very first, which nothing
    stands before; of "targets" one for each target, in order. packed: the same as bytes, as the server gets them."""

    id: int
    num_tokens: int
    vector: bytes | None = None
    logprobs: list[TokenLogprob | None] | None = None
    packed: list[bytes] | None = None

    def to_send(self) -> "Measured":
        """The same with `logprobs` as bytes, some tokens each: of a long prompt they are 100,000 objects, which the
        server makes in a thread, and a few at a time, since it holds the interpreter lock while it does."""
        if self.logprobs is None:
            return self
        return Measured(
            self.id,
            self.num_tokens,
            self.vector,
            packed=[
                msgspec.msgpack.encode(self.logprobs[at : at + PACKED_TOKENS])
                for at in range(0, len(self.logprobs), PACKED_TOKENS)
            ],
        )

    def scores(self) -> list[TokenLogprob | None]:
        """`logprobs`, as they came or from bytes; empty when there are none."""
        if self.packed is None:
            return self.logprobs or []
        return [entry for part in self.packed for entry in _packed_scores.decode(part)]


_packed_scores = msgspec.msgpack.Decoder(list[TokenLogprob | None])


class SearchedReply(msgspec.Struct, array_like=True):
    """One reply of a beam search. logprobs: of each token; total: their sum; score: total divided by the length to the
    power of the length penalty. finish: "stop" (its last token ends it) or "length"."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    total: float
    score: float
    finish: str


class Searched(msgspec.Struct, tag_field="kind", tag=True):
    """engine → server: the one answer to BeamParams: at most beam_width replies, best first. computed: tokens of the
    prompt that were not cached, and those of all beams, kept or not."""

    id: int
    num_tokens: int
    replies: list[SearchedReply]
    cached_tokens: int = 0
    computed: int = 0


class StepTokens(msgspec.Struct, tag_field="kind", tag=True):
    """engine → server: one token each of requests that go on: ids[i] said tokens[i]. One message for a step, where
    a Tokens for each of 256 requests would cost both processes more than the step."""

    ids: list[int]
    tokens: list[int]

    def __post_init__(self):
        if len(self.ids) != len(self.tokens):
            raise ValueError(f"{len(self.ids)} ids for {len(self.tokens)} tokens")


class Failed(msgspec.Struct, tag_field="kind", tag=True):
    """engine → server: the request's only and last event. Fields as in RequestError. computed: as of Cancelled."""

    id: int
    message: str
    status: int
    type: str
    code: str | None = None
    param: str | None = None
    computed: int = 0


class Cancelled(msgspec.Struct, tag_field="kind", tag=True):
    """engine → server: the last word about a request, unless there was one already. computed: tokens that were computed
    for it: of the prompt without what was cached, and made, those that nobody was told of included."""

    id: int
    computed: int


class Fatal(msgspec.Struct, tag_field="kind", tag=True):
    """engine → server: the engine cannot go on (load error, device fault); it exits after this.
    exit_code: as ZSEError's. code: "out_of_memory" when the model would fit beside less."""

    message: str
    exit_code: int = 1
    code: str = ""


class Heartbeat(msgspec.Struct, tag_field="kind", tag=True):
    """engine → server, at least once a second while it has work and when idle: steps done, rows and pages in use, and
    the totals of the scheduler, the cache and what speculates or masks, by name (`zse_engine_NAME` in /metrics)."""

    steps: int
    running: int
    waiting: int
    free_pages: int
    counters: dict[str, float] = {}


ToEngine = Submit | Cancel | LoadModel | Expect | LoadAdapter | UnloadAdapter | DropSession | Shutdown
FromEngine = (
    Ready | Parked | AdapterLoaded | Tokens | StepTokens | Measured | Searched | Failed | Cancelled | Fatal | Heartbeat
)

HEADER_BYTES = 4
MAX_FRAME_BYTES = 64 << 20  # a prompt of 1 M token ids is 5 MB; anything near this is a broken peer
_READ_BYTES = 1 << 18
_POLLRDHUP = getattr(select, "POLLRDHUP", 0)  # of TCP, whose POLLHUP says that both ends have closed

_encoder = msgspec.msgpack.Encoder()


def encode(message: object) -> bytes:
    """One message as one frame. Raises EngineError when it is larger than MAX_FRAME_BYTES."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise EngineError(f"a {type(message).__name__} message of {len(payload)} bytes is over the frame limit")
    return len(payload).to_bytes(HEADER_BYTES, "little") + payload


class ServerGone(EngineError):
    """The server has closed its end: the engine has nobody left to work for and ends."""


class FrameReader:
    """Turns a byte stream, however it is cut, into messages. `kind`: the union of messages this end may receive."""

    def __init__(self, kind: object):
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list:
        """Add received bytes; returns the messages completed by them.

        Raises EngineError for an oversized frame or one that is no message: the stream cannot be trusted after that.
        """
        buffer = self._buffer
        buffer += data
        messages, start = [], 0
        while len(buffer) - start >= HEADER_BYTES:
            size = int.from_bytes(buffer[start : start + HEADER_BYTES], "little")
            if size > MAX_FRAME_BYTES:
                raise EngineError(f"a frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
            end = start + HEADER_BYTES + size
            if len(buffer) < end:
                break
            try:
                messages.append(self._decoder.decode(bytes(buffer[start + HEADER_BYTES : end])))
            except msgspec.MsgspecError as error:
                raise EngineError(f"a frame that is no message: {error}") from error
            start = end
        del buffer[:start]
        return messages


class FrameSocket:
    """The engine's end: blocking sends, receives with a timeout. One thread receives; sends are atomic per call
    only if the caller serialises them."""

    def __init__(self, sock: "socket.socket", kind: object = ToEngine):
        sock.setblocking(True)
        self._sock = sock
        self._reader = FrameReader(kind)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN | _POLLRDHUP)

    @classmethod
    def from_fd(cls, fd: int, kind: object = ToEngine) -> "FrameSocket":
        """Adopt an inherited descriptor (`--fd N` of the worker). kind: of the messages that come."""
        return cls(socket.socket(fileno=fd), kind)

    @property
    def is_hung_up(self) -> bool:
        """Whether the other end is closed. Reads nothing."""
        return any(events & (select.POLLHUP | _POLLRDHUP) for _, events in self._poll.poll(0))

    def fileno(self) -> int:
        return self._sock.fileno()

    def watch(self, fd: int) -> None:
        """From now on receive() waits for this end of a pipe, too, and empties it."""
        self._poll.register(fd, select.POLLIN)

    def send(self, *messages: FromEngine) -> None:
        """Write the messages in one call. Raises ServerGone when the server has closed its end."""
        try:
            self._sock.sendall(b"".join([encode(message) for message in messages]))
        except OSError as error:
            raise ServerGone(f"the server process is gone: {error.strerror}") from error

    def receive(self, timeout: float | None = 0.0) -> list[ToEngine] | None:
        """The messages that are there, waiting up to `timeout` seconds (None: for ever, 0: not at all) for the first
        byte. Returns [] when nothing came and None when the server closed its end: then the engine must exit."""
        messages: list[ToEngine] = []
        wait_ms = None if timeout is None else max(0, int(timeout * 1000 + 0.999))
        while ready := self._poll.poll(wait_ms):
            for fd, _ in ready:
                if fd != self._sock.fileno():
                    os.read(fd, _READ_BYTES)
            wait_ms = 0
            if all(fd != self._sock.fileno() for fd, _ in ready):
                continue
            try:
                data = self._sock.recv(_READ_BYTES)
            except ConnectionError:
                data = b""
            if not data:
                return None
            messages += self._reader.feed(data)
        return messages

    def close(self) -> None:
        self._sock.close()
