"""One server over the fake engine for all tests that do not need their own."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def server():
    from harness import Harness

    harness = Harness()
    yield harness
    harness.assert_quiet()
    harness.close()


@pytest.fixture
def own_server():
    """A factory of servers with options of their own."""
    from harness import Harness

    made = []

    def make(**options):
        made.append(Harness(**options))
        return made[-1]

    yield make
    for harness in made:
        harness.close()
