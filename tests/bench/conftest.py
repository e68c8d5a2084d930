import pytest
from fake_openai import FakeOpenAI


@pytest.fixture
def fake():
    with FakeOpenAI() as server:
        yield server
