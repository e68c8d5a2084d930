"""Fixtures: one server over the fake engine for all tests that do not need their own, and factories of others."""

import pytest
from harness import Harness, Scheduled

TEMPLATE = "{{ tools }} <tool_call> </think>"


@pytest.fixture(scope="session")
def server():
    harness = Harness()
    yield harness
    harness.assert_quiet()
    harness.close()


@pytest.fixture(scope="session")
def tool_server():
    """Its template has tools and reasoning."""
    harness = Harness(template=TEMPLATE)
    yield harness
    harness.assert_quiet()
    harness.close()


def _factory(kind):
    made = []

    def make(engine="", **options):
        made.append(kind(engine, **options))
        return made[-1]

    yield make
    for harness in made:
        harness.close()


@pytest.fixture
def own_server():
    """A factory of servers with options of their own."""
    yield from _factory(Harness)


@pytest.fixture
def scheduled():
    """A factory of servers over the real scheduler."""
    yield from _factory(Scheduled)
