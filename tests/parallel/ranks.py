"""Ranks as forked processes of a test."""

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from select import select

from zse.errors import GroupError
from zse.parallel.group import RankGroup
from zse.runtime.cpu import CPUDevice
from zse.tensor import Tensor

DEADLINE_S = 60


def run_ranks(
    size: int, work: Callable[[int], object], killed: tuple[int, ...] = (), forked: Callable[[], object] = lambda: None
) -> list:
    """work(rank) in a process for each rank; what each returned, in their order. A rank of `killed` ends itself. What one
    raises fails the test here. forked: called when all have been started."""
    children, pipes = [], []
    for rank in range(size):
        ours, theirs = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            status = 1
            with suppress(BaseException):
                os.close(ours)
                try:
                    answer = (True, work(rank))
                except BaseException:
                    answer = (False, traceback.format_exc())
                with open(theirs, "wb") as out:
                    pickle.dump(answer, out)
                status = 0
            os._exit(status)
        os.close(theirs)
        children.append(pid)
        pipes.append(ours)
    forked()
    answers = []
    try:
        for rank, pipe in enumerate(pipes):
            data = b""
            while select([pipe], [], [], DEADLINE_S)[0] and (more := os.read(pipe, 1 << 16)):
                data += more
            good, answer = pickle.loads(data) if data else (rank in killed, None)
            assert good, f"rank {rank}: {answer or 'ended without an answer'}"
            answers.append(answer)
    finally:
        for pid, pipe in zip(children, pipes, strict=True):
            os.close(pipe)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return answers


def message_of(call) -> str:
    """Of the GroupError that it raises."""
    try:
        call()
    except GroupError as error:
        return str(error)
    return "nothing was raised"


def recorded_sum(group: RankGroup, device: CPUDevice):
    """A recording with a sum of all ranks."""
    recorder, x = device.record(), Tensor(device.alloc(400), (100, 1), "f32")
    group.host.all_reduce(recorder, x, x)
    return recorder.finish()
