"""The servers of tests/server: most of what HTTP has to withstand shows with streams that run for long."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("http", "server")]

from servers import own_server, scheduled, server  # noqa: E402, F401
