"""Helpers of the other tests: the scheduler's simulator, the server's harness, small model files."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [
    str(TESTS / name)
    for name in ("reliability", "scheduler", "server", "http", "formats", "tokenizer", "structured", "engine")
]

from servers import own_server, scheduled, server  # noqa: E402, F401
