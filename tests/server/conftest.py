"""The fixtures of servers.py and pages.py; helpers beside these tests and those of the tiny model are importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("structured", "engine")]  # the tiny model

from pages import chromium, lab, page  # noqa: E402, F401
from servers import own_server, scheduled, server, tool_server  # noqa: E402, F401
