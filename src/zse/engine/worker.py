"""The engine process: `python -m zse.engine.worker --fd N --model PATH [--max-rows 8 ...]`, or parked:
`--fd N --park [--device D]`, which opens its device and waits for Load to become the engine of a model.

Speaks engine/messages.py over the inherited socket N: first Ready (or Fatal), then Tokens and Failed of requests, and
Heartbeat. It exits when the server closes the socket or sends Shutdown. SIGINT is ignored: the server decides.
"""

import gc
import os
import signal
import sys

from zse import lazy
from zse.engine.metrics import Phases, since_exec_clock

# The server calls an engine stuck after several silent seconds; idle engines wake this often, which costs nothing.
HEARTBEAT_S = 0.5
SWITCH_INTERVAL_S = 0.0002


def main(arguments: list[str], build=None, clock=None) -> int:
    """Serve until the server goes; the process's exit code. build: (arguments, Phases[, PendingDevice]) → (Engine,
    Ready). clock: () → seconds, from which the phases count (default: since this process's exec)."""
    phases = Phases(clock or since_exec_clock())
    phases.mark("interpreter")
    gc.disable()  # a start makes many objects and no garbage; _serve turns it on again
    # The thread that opens the device makes dozens of short calls; after each it would wait up to 5 ms (Python's
    # default) for the imports that run meanwhile to give way.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if len(arguments) < 2 or arguments[0] != "--fd" or not arguments[1].isdigit():
        sys.stderr.write("this process is started by `zse serve`; its arguments are --fd N --model PATH [options]\n")
        return 2
    early: tuple = ()
    if build is None:
        # First of all: a GPU's driver takes 0.2 s, which the imports below need not wait for.
        early = _start_device(arguments[2:])
        lazy.import_lean("msgspec")
        from zse.engine.load import build_from_arguments as build
    from zse.engine.framing import FrameSocket, ServerGone
    from zse.engine.messages import Fatal
    from zse.engine.process import die_with_parent
    from zse.errors import DeviceLost, EngineError, ZSEError

    die_with_parent(parent)
    socket = FrameSocket.from_fd(int(arguments[1]))
    engine = None
    try:
        options, parked = arguments[2:], ()
        if options[:1] == ["--park"]:
            loading = _wait_for_load(socket, options[1:], phases)
            if loading is None:
                return 0
            options, phases, parked = loading
        engine, ready = build(options, phases, *(parked or early))
        socket.send(ready)
        return _serve(engine, socket)
    except ServerGone:
        return 0  # as when a receive meets the closed socket: which of the two comes first is chance
    except EngineError as error:  # a frame that cannot be trusted: nobody is left to tell
        sys.stderr.write(f"zse engine: {error}\n")
        return 1
    except DeviceLost as error:
        # Nothing on the device can be freed or closed any more, and trying may hang: the process's end does it.
        sys.stderr.write(f"zse engine: the device failed: {error}\n")
        sys.stderr.flush()
        os._exit(_fatal(socket, Fatal(message=f"the device failed: {error}", exit_code=error.exit_code)))
    except ZSEError as error:
        return _fatal(socket, Fatal(message=str(error), exit_code=error.exit_code, code=error.code or ""))
    except MemoryError:
        return _fatal(socket, Fatal(message="out of memory; lower max_context or max_rows"))
    except Exception as error:
        import logging

        logging.getLogger("zse.engine").exception("engine stopped by a bug")
        return _fatal(socket, Fatal(message=f"internal error in the engine: {type(error).__name__}"))
    finally:
        if engine is not None:
            engine.close()


def _start_device(options: list[str]) -> tuple:
    """(the PendingDevice that --device names,); () for an engine that parks."""
    if options[:1] == ["--park"]:
        return ()
    from zse.runtime.opening import open_device_async

    return (open_device_async(dict(zip(options[::2], options[1::2])).get("--device", "auto")),)


def _wait_for_load(socket, options: list[str], phases):
    """Parks; when Load comes: (its arguments, Phases that count from then, (PendingDevice,)). None when the server
    went."""
    from time import perf_counter

    from zse.engine.load import park
    from zse.engine.messages import Load, Parked

    opening = park(options)
    phases.mark("parked")
    gc.collect()
    gc.freeze()
    socket.send(Parked(phases_ms=phases.ms))
    while True:
        messages = socket.receive(None)
        if messages is None:
            break
        start = perf_counter()
        for message in messages:
            if isinstance(message, Load):
                return message.arguments, Phases(lambda: perf_counter() - start), (opening,)
        if messages:
            break  # Shutdown
    opening.result().close()
    return None


def _fatal(socket, message) -> int:
    from zse.engine.framing import ServerGone

    try:
        socket.send(message)
    except ServerGone:
        pass  # the server is gone too; the exit code still says it
    return message.exit_code


def _serve(engine, socket) -> int:
    """Steps while there is work; between steps takes what the server sent, without waiting unless idle."""
    from time import monotonic

    from zse.engine.messages import Cancel, Measure, Search, Shutdown, Submit
    from zse.errors import RequestError

    gc.freeze()
    gc.enable()
    sys.setswitchinterval(0.005)
    next_beat = monotonic()
    while True:
        now = monotonic()
        replies = []
        if now >= next_beat:
            replies.append(heartbeat(engine))
            next_beat = now + HEARTBEAT_S
        # Idle time goes into graphs that a first request would otherwise wait for.
        is_idle = not engine.has_work and not replies and not engine.use_idle_time()
        messages = socket.receive(max(0.0, next_beat - monotonic()) if is_idle else 0.0)
        if messages is None:
            return 0
        for message in messages:
            if isinstance(message, Submit | Measure | Search):
                try:
                    if isinstance(message, Submit):
                        engine.submit(message.id, message.prompt, message.params, message.options)
                    elif isinstance(message, Measure):
                        engine.measure(message.id, message.prompt, message.ask, message.options)
                    else:
                        engine.search(message.id, message.prompt, message.params, message.options)
                except RequestError as error:
                    replies.append(failed(message.id, error))
            elif isinstance(message, Cancel):
                engine.cancel(message.id)
            elif isinstance(message, Shutdown):
                return 0
        replies += news(engine.step())
        replies += [over(job) for job in engine.over_jobs()]
        if replies:
            socket.send(*replies)


def news(outputs) -> list:
    """The messages that tell the server of a step's Outputs: one for all requests that just go on."""
    from zse.engine.messages import Failed, StepTokens, Tokens

    ids: list[int] = []
    tokens: list[int] = []
    messages: list[Tokens | Failed] = []
    for output in outputs:
        if output.finish is None and output.logprobs is None and len(output.tokens) == 1 and not output.cached_tokens:
            ids.append(output.id)
            tokens.append(output.tokens[0])
        elif output.error is not None:
            messages.append(failed(output.id, output.error))
        elif output.finish == "error":
            messages.append(
                Failed(
                    id=output.id,
                    status=500,
                    type="server_error",
                    code="numerical_error",
                    message="the model gave numbers that are not finite for this request",
                )
            )
        elif output.finish == "timeout":
            messages.append(
                Failed(
                    id=output.id,
                    status=504,
                    type="server_error",
                    code="timeout",
                    param="deadline_ms",
                    message="the deadline passed while the request waited",
                )
            )
        else:
            messages.append(
                Tokens(
                    id=output.id,
                    tokens=output.tokens,
                    logprobs=output.logprobs,
                    finish=output.finish,
                    cached_tokens=output.cached_tokens,
                )
            )
    return [StepTokens(ids=ids, tokens=tokens), *messages] if ids else messages


def over(job):
    """The message that tells of a job or search that ended."""
    if job.result is None:
        return failed(job.id, job.error)
    return job.result.to_send() if hasattr(job.result, "to_send") else job.result


def failed(id: int, error):
    """The Failed that tells of a RequestError."""
    from zse.engine.messages import Failed

    return Failed(
        id=id, message=error.message, status=error.status, type=error.type, code=error.code, param=error.param
    )


def heartbeat(engine):
    from zse.engine.messages import Heartbeat

    scheduler = engine.scheduler
    return Heartbeat(
        steps=engine.metrics.steps,
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        free_pages=scheduler.cache.num_free,
        counters=engine.counters(),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
