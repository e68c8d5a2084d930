"""Collectives between the GPUs of this machine, a process each: python -m pytest tests/gpu/test_collectives.py"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu import collective_rank
from zse.errors import GroupError
from zse.parallel.group import RankGroup
from zse.runtime.cuda import list_devices

RANK = Path(__file__).with_name("collective_rank.py")


@pytest.mark.parametrize("what", ["sums", "norms", "replays", "others", "rows", "messages", "dies"])
def test_collectives(what):
    size = min(len(list_devices()), 4)
    if size < 2:
        pytest.skip("needs two GPUs")
    group = RankGroup.create(size)
    os.set_inheritable(group.descriptor, True)
    others = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), str(size), str(group.descriptor), what],
            close_fds=False,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(1, size)
    ]

    def look() -> None:
        for rank, other in enumerate(others, 1):
            if other.poll():
                raise GroupError(f"rank {rank} has ended with {other.returncode}")

    group.look = look
    try:
        collective_rank.play(group, what)
        ended = [other.communicate(timeout=60) and other.returncode for other in others]
        assert ended == [-9 if what == "dies" and rank == 0 else 0 for rank in range(size - 1)]
    except BaseException:
        for other in others:
            other.kill()
            sys.stderr.write(other.communicate()[1])
        raise
