"""Engines of a small model on the CPU, closed when a test is over, and prompts for them."""

import numpy as np
from tiny_model import NAN_TOKEN

from zse.engine.config import EngineConfig
from zse.engine.load import load_engine
from zse.engine.metrics import Phases
from zse.engine.runner import Runner


class TinyEngines:
    """Makes engines: of these options and those of a call. ahead: step n + 1 is submitted before n is read. made: what was loaded,
    with its first runner."""

    def __init__(self, model, **options):
        self.options = dict(model=str(model), threads=2, activations="f32", device="cpu", ahead=False) | options
        self.made = []

    def __call__(self, **options):
        options = self.options | options
        ahead = options.pop("ahead")
        loaded = load_engine(EngineConfig(**options), Phases(lambda: 0.0))
        first = loaded.engine.runner
        if ahead:
            loaded.engine.runner = Runner(loaded.device, first.model, loaded.config, runs_ahead=True)
        self.made.append((loaded, first))
        return loaded.engine

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for loaded, first in self.made:
            close(loaded, first)


def close(loaded, first):
    """Close what was loaded; first: the runner that it was loaded with."""
    if first is not loaded.engine.runner:
        first.drop_graphs()
    loaded.engine.close()
    loaded.source.close()


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(3, NAN_TOKEN, length).tolist()
