"""The process of a rank beside rank 0: `python -m zse.engine.worker --fd N --rank R --memory M --model PATH ...`."""

import gc
from typing import Any

from zse.engine import load, ranks
from zse.engine.messages import FrameSocket
from zse.errors import ZSEError


def follow(words: list[str], link: FrameSocket, phases: Any, opening: Any = None) -> None:
    """The life of a rank beside rank 0, in a process of its own. Errors as of load_engine, GroupError."""
    # After an error all stays as it is until the process ends: rank 0 is to hear of the error first.
    follower = ranks.Follower.join(words, link)
    try:
        loaded = load.load_engine(follower.config, phases, opening=opening, ranks=follower)
        gc.freeze()
        gc.enable()
        follower.run(loaded.engine.runner)
    except ZSEError as error:
        follower.tell(error)
        raise
    follower.close()
    loaded.engine.close()
    loaded.source.close()
