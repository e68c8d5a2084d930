"""Helpers of the tests beside this folder: the models' oracle and session, the engine's tiny model."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
for name in ("engine", "models", "formats", "runtime", "speculative", "structured"):
    sys.path.insert(0, str(TESTS / name))
