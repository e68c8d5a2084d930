"""A parked engine on the CUDA device: a model whose file it has registered gives the tokens of one that it reads."""

import time

import pytest
import tiny_model
from test_park import Parking

from gpu.harness import device
from zse.engine.messages import Expect, LoadModel, Parked, Ready, Shutdown, Submit
from zse.sampling.params import SamplingParams

GPU = device()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [str(tiny_model.write(folder / f"tiny{number}", head_dim=64)) for number in range(2)]


def reply(models: list[str], expects: list[str]) -> list[int]:
    """A greedy answer of the first model, where these models were expected."""
    parking = Parking("--device", "cuda")
    try:
        assert isinstance(parking.receive(120), Parked)
        if expects:
            parking.send(Expect(expects, None))
            time.sleep(1)
        parking.send(LoadModel(["--model", models[0], "--device", "cuda", "--max-context", "64", "--max-rows", "2"]))
        ready = parking.receive(120)
        assert isinstance(ready, Ready) and ready.kernels == "gpu"
        parking.send(Submit(1, [5, 6, 7], SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)))
        tokens: list[int] = []
        while len(tokens) < 16:
            message = parking.receive(120)
            tokens += message.tokens  # of Tokens and StepTokens
        parking.send(Shutdown())
        assert parking.process.wait(20) == 0
        return tokens
    finally:
        parking.process.kill()
        parking.process.sock.close()


def test_a_model_whose_file_is_registered_is_the_same(models):
    plain = reply(models, [])
    assert reply(models, models[::-1]) == plain
    assert reply(models, models[1:]) == plain
