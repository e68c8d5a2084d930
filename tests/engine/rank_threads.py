"""An engine whose ranks are threads of this process, each with a device of its own: what is patched here holds for all of them."""

import os
import socket
import threading
from types import SimpleNamespace

from zse.engine import load, messages, ranks
from zse.engine.config import EngineConfig
from zse.engine.metrics import Phases
from zse.engine.process import EngineProcess
from zse.engine.rank_options import num_ranks
from zse.parallel.group import RankGroup


class ThreadedRanks:
    """open_device(rank) → its Device. options: of EngineConfig, tensor_parallel_size or pipeline_parallel_size among them. engine: rank 0's."""

    def __init__(self, open_device, **options):
        config = EngineConfig(**options)
        size, self.errors = num_ranks(config), []
        group = RankGroup.create(size)
        leader = ranks.Leader(group, config)
        self.threads = []
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            reader = messages.FrameReader(ranks.ToLeader | messages.Fatal)
            leader._poll.register(ours, 1)
            leader._peers.append(ranks.Peer(EngineProcess(os.getpid(), ours), reader))
            place = RankGroup.join(rank, size, os.dup(group.descriptor))
            follower = ranks.Follower(place, config, messages.FrameSocket(theirs, ranks.ToRank))
            self.threads.append(threading.Thread(target=self._follow, args=(follower, open_device, rank), daemon=True))
            self.threads[-1].start()
        self.loaded = load.load_engine(config, Phases(lambda: 0.0), opening=_opened(open_device(0)), ranks=leader)
        self.engine = self.loaded.engine

    def _follow(self, follower, open_device, rank: int) -> None:
        try:
            loaded = load.load_engine(
                follower.config, Phases(lambda: 0.0), opening=_opened(open_device(rank)), ranks=follower
            )
            follower.run(loaded.engine.runner)
            follower.close()
            loaded.engine.close()
            loaded.source.close()
        except BaseException as error:
            self.errors.append(error)
            follower.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.engine.close()
        self.loaded.source.close()
        for thread in self.threads:
            thread.join(20)
        assert not self.errors and not any(thread.is_alive() for thread in self.threads)


def _opened(device):
    return SimpleNamespace(done=True, result=lambda: device)
