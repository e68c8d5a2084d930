"""The device that the model tests run on."""

import pytest


@pytest.fixture(scope="session")
def device():
    """The CPU device with two threads, from the installed kernel libraries. Without them the tests fail, not skip."""
    from zse.runtime.opening import open_device

    with open_device("cpu", threads=2) as opened:
        yield opened
