"""The engine process: `python -m zse.engine.worker --fd N --model PATH [--max-rows 8 ...]`, or parked:
`--fd N --park [--device D]`, which opens its device and waits for LoadModel to become the engine of a model.

Speaks engine/messages.py over the inherited socket N: first Ready (or Fatal), then Tokens and Failed of requests, and
Heartbeat. As a rank beside rank 0 (`--fd N --rank R --memory M`, engine/ranks.py) it speaks what that module says. It exits when the server closes the socket or sends Shutdown. SIGINT is ignored: the server decides.
"""

import ctypes
import gc
import os
import signal
import sys
from time import perf_counter

from zse import lazy
from zse.engine import follow, load, messages, ranks, registered_files, serving
from zse.engine.metrics import Phases, since_exec_clock
from zse.errors import DeviceLost, DeviceMemoryError, EngineError, ZSEError, missing_package
from zse.lazy import logging
from zse.runtime import opening

SWITCH_INTERVAL_S = 0.0002
REGISTER_PAUSE_S = 0.005  # between chunks of files: other processes' drivers have their turn
LOOK_AGAIN_S = 2.0  # a file that was removed keeps its place on the disk and in memory for so long


def main(arguments: list[str], build=None, clock=None) -> int:
    """Serve until the server goes; the process's exit code. build: (arguments, Phases[, PendingDevice]) → (Engine,
    Ready). clock: () → seconds, from which the phases count (default: since this process's exec)."""
    phases = Phases(clock or since_exec_clock())
    phases.mark("interpreter")
    gc.disable()  # a start makes many objects and no garbage; serve() turns it on again
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
        build = load.build_from_arguments
    is_rank = arguments[2:3] == ["--rank"]
    # A rank ends with its socket: the thread that started it may end before the process does. That of another host's has one thread.
    if not is_rank or "--node-rank" in arguments:
        die_with_parent(parent)
    socket = messages.FrameSocket.from_fd(int(arguments[1]), *((ranks.ToRank,) if is_rank else ()))
    engine = None
    try:
        options, parked = arguments[2:], ()
        if is_rank:
            follow.follow(options, socket, phases, *early)
            return 0
        if options[:1] == ["--park"]:
            loading = _wait_for_load(socket, options[1:], phases)
            if loading is None:
                return 0
            options, phases, parked = loading
        engine, ready = build(options, phases, *(parked or early))
        socket.send(ready)
        return serving.serve(engine, socket)
    except messages.ServerGone:
        return 0  # as when a receive meets the closed socket: which of the two comes first is chance
    except EngineError as error:  # a frame that cannot be trusted: nobody is left to tell
        sys.stderr.write(f"zse engine: {error}\n")
        return 1
    except DeviceLost as error:
        # Nothing on the device can be freed or closed any more, and trying may hang: the process's end does it.
        sys.stderr.write(f"zse engine: the device failed: {error}\n")
        sys.stderr.flush()
        os._exit(_fatal(socket, messages.Fatal(message=f"the device failed: {error}", exit_code=error.exit_code)))
    except ZSEError as error:
        return _fatal(socket, messages.Fatal(message=str(error), exit_code=error.exit_code, code=error.code or ""))
    except MemoryError:
        told = "out of memory; lower max_context or max_rows"
        return _fatal(socket, messages.Fatal(message=told, code=DeviceMemoryError.code or ""))
    except Exception as error:
        missing = missing_package(error) if isinstance(error, ModuleNotFoundError) else None
        if missing is not None:
            return _fatal(socket, messages.Fatal(message=missing))
        logging.getLogger("zse.engine").exception("engine stopped by a bug")
        return _fatal(socket, messages.Fatal(message=f"internal error in the engine: {type(error).__name__}"))
    finally:
        if engine is not None:
            engine.close()


def die_with_parent(parent: int) -> None:
    """Be killed when process `parent` dies (Linux; elsewhere end-of-file on the socket is the sign). Exits at once if
    it died before this call."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _start_device(options: list[str]) -> tuple:
    """(the PendingDevice that --device names,); () for an engine that parks."""
    if options[:1] == ["--park"]:
        return ()
    return (opening.PendingDevice(dict(zip(options[::2], options[1::2])).get("--device", "auto")),)


def _wait_for_load(socket, options: list[str], phases):
    """Park. When LoadModel arrives: (its arguments, Phases that count from then, (PendingDevice,)). None when the
    server went."""
    device = load.park(options)
    phases.mark("parked")
    gc.collect()
    gc.freeze()
    socket.send(messages.Parked(phases_ms=phases.ms))
    opened = device.result()
    files = registered_files.RegisteredFiles(opened) if opened.locks_memory else None
    while True:
        is_busy = files is not None and files.register_next()
        received = socket.receive(REGISTER_PAUSE_S if is_busy else LOOK_AGAIN_S if files is not None else None)
        if received is None:
            break
        if files is not None and not is_busy and not received:
            files.look_again()
        start = perf_counter()
        for message in received:
            if isinstance(message, messages.LoadModel):
                return message.arguments, Phases(lambda: perf_counter() - start), (device,)
            if files is not None and isinstance(message, messages.Expect):
                files.want(message.paths, message.max_bytes)
        if any(isinstance(message, messages.Shutdown) for message in received):
            break
    device.result().close()
    return None


def _fatal(socket, message) -> int:
    try:
        socket.send(message)
    except messages.ServerGone:
        pass  # the server is gone too; the exit code still says it
    return message.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
