"""The engine process's loop: what the server sends becomes requests, what steps say becomes messages."""

import gc
import sys
import time

from zse.engine import messages
from zse.errors import RequestError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# The server calls an engine stuck after several silent seconds; idle engines wake this often, which costs nothing.
HEARTBEAT_S = 0.5
# Without work or messages, before idle time is used: what the server sends next is on its way (2 ms after a start and between
# the requests of one client), and a graph that is recorded meanwhile makes it wait for 30 ms.
QUIET_S = 0.01


def serve(engine, socket) -> int:
    """Step while there is work; between steps take what the server sent, without waiting unless idle. Returns the
    process's exit code when the server goes."""
    gc.freeze()
    gc.enable()
    sys.setswitchinterval(0.005)
    for _ in turns(engine, socket):
        pass
    return 0


def turns(engine, socket) -> "Iterator[None]":
    """The loop of serve(), which a test takes turn by turn. It ends when the server goes."""
    next_beat = time.monotonic()
    quiet_at = next_beat + QUIET_S
    for fd in engine.wake_fds:
        socket.watch(fd)
    while True:
        now = time.monotonic()
        replies = []
        if now >= next_beat:
            replies.append(heartbeat(engine))
            next_beat = now + HEARTBEAT_S
        if engine.has_work:
            quiet_at = now + QUIET_S
        # Idle time goes into graphs that a first request would otherwise wait for.
        is_idle = not engine.has_work and not replies and (now < quiet_at or not engine.use_idle_time())
        until = min(next_beat, quiet_at) if now < quiet_at else next_beat
        received = socket.receive(max(0.0, until - time.monotonic()) if is_idle else 0.0)
        if received is None:
            return
        if received:
            quiet_at = time.monotonic() + QUIET_S
        for message in received:
            if isinstance(message, messages.Submit):
                try:
                    engine.submit(message.id, message.prompt, message.params, message.all_options)
                except RequestError as error:
                    replies.append(failed(message.id, error, 0))
            elif isinstance(message, messages.Cancel):
                replies.append(messages.Cancelled(id=message.id, computed=engine.num_computed(message.id)))
                engine.cancel(message.id)
            elif isinstance(message, messages.LoadAdapter):
                try:
                    engine.feature("adapters").begin(message.id, message.path)
                except RequestError as error:
                    replies.append(failed(message.id, error, 0))
            elif isinstance(message, messages.UnloadAdapter):
                engine.feature("adapters").unload(message.adapter)
            elif isinstance(message, messages.DropSession):
                engine.drop_session(message.session)
            elif isinstance(message, messages.Shutdown):
                return
        replies += told(engine.step())
        replies += map(completed, engine.take_completed())
        if replies:
            socket.send(*replies)
        yield


def told(outputs) -> list:
    """The messages that tell the server of a step's Outputs: one for all requests that run on."""
    ids: list[int] = []
    tokens: list[int] = []
    others: list = []
    for output in outputs:
        is_plain = output.finish is None and output.logprobs is None and not (output.cached_tokens or output.waited_s)
        if is_plain and len(output.tokens) == 1:
            ids.append(output.id)
            tokens.append(output.tokens[0])
        elif output.error is not None:
            others.append(failed(output.id, output.error, output.computed))
        else:
            others.append(
                messages.Tokens(
                    id=output.id,
                    tokens=output.tokens,
                    logprobs=output.logprobs,
                    finish=output.finish,
                    cached_tokens=output.cached_tokens,
                    waited_s=output.waited_s,
                )
            )
    return [messages.StepTokens(ids=ids, tokens=tokens), *others] if ids else others


def completed(job):
    """The message that gives the result of a completed job or search."""
    if job.result is None:
        return failed(job.id, job.error, job.computed_len)
    return job.result.to_send() if isinstance(job.result, messages.Measured) else job.result


def failed(id: int, error, computed: int):
    """The Failed that tells of a RequestError, after which so many tokens were computed."""
    return messages.Failed(
        id=id,
        message=error.message,
        status=error.status,
        type=error.type,
        code=error.code,
        param=error.param,
        computed=computed,
    )


def heartbeat(engine):
    scheduler = engine.scheduler
    return messages.Heartbeat(
        steps=scheduler.totals.steps,
        running=len(scheduler.running),
        waiting=scheduler.queue.num_waiting,
        free_pages=scheduler.cache.allocator.num_free,
        counters=engine.counters(),
    )
