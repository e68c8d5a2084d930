"""Which of a catalog model's files fits this machine's memory: that of the GPU that would be used, else RAM."""

import os
import sys
from typing import NamedTuple

from zse.errors import ConfigError
from zse.formats.catalog import HubModel
from zse.lazy import json, subprocess
from zse.runtime import probe

# The share of the memory that weights may take. The rest is for the KV cache and a step's scratch. A CPU reads all
# weights for each token: a file of half the size answers twice as fast, so that there the more precise ones need more
# room.
GPU_SHARE, CPU_SHARE, MOST = 0.5, 0.25, 0.8
# In a process of its own: a CUDA driver that has been started does not work in the engine, which is forked.
_LIST_GPUS = """
import json
from zse.runtime import cuda
from zse.runtime.bindings.cuda import LEAST_ARCH
print(json.dumps([device for device in cuda.list_devices() if device["arch"] >= LEAST_ARCH]))
"""


class Memory(NamedTuple):
    """Bytes, whose they are, and the share that weights should take of them."""

    nbytes: int
    owner: str
    share: float

    def __str__(self) -> str:
        return f"{self.nbytes / 1e9:.1f} GB of {self.owner}"


def memory_for(device: str = "auto") -> Memory:
    """The memory in which a model on `device` (an option's value) would lie."""
    kind, _, number = device.partition(":")
    if kind in ("auto", "cuda") and probe.cuda_driver()["library"]:
        gpus = _list_gpus()
        ordinal = int(number) if number.isdecimal() else 0
        if ordinal < len(gpus):
            gpu = gpus[ordinal]
            return Memory(gpu["memory_bytes"], f"the GPU {gpu['name']}", GPU_SHARE)
    facts = probe.memory_bytes()
    return Memory(facts["limit"] or facts["total"] or 0, "RAM", CPU_SHARE)


def _list_gpus() -> list[dict]:
    command = [sys.executable, "-P", "-c", _LIST_GPUS]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else []


def best(model: HubModel, memory: Memory) -> str | None:
    """The quantization to take: the most precise within `memory.share`, else the smallest if it fits at all, else
    None."""
    tags = model.quantizations.split()
    roomy = [tag for tag in tags if model.nbytes(tag) <= memory.share * memory.nbytes]
    if roomy:
        return roomy[0]
    return tags[-1] if model.nbytes(tags[-1]) <= MOST * memory.nbytes else None


def choose(model: HubModel, memory: Memory) -> tuple[str, str]:
    """(best(), a line that says why). ConfigError when nothing fits."""
    tag = best(model, memory)
    if tag is None:
        smallest = model.quantizations.split()[-1]
        raise ConfigError(
            f"{model.name} does not fit: {smallest}, its smallest file, takes ≈ {model.nbytes(smallest) / 1e9:.1f} GB, and "
            f"weights may take {MOST:.0%} of {memory}; `zse ls --available` shows what fits, `zse pull {model.name}:{smallest}` "
            "fetches it all the same"
        )
    size = model.nbytes(tag)
    why = f"the most precise of its files that takes at most {memory.share:.0%} of {memory}"
    if size > memory.share * memory.nbytes:
        why = f"its smallest file, which fits {memory}"
    return tag, f"{model.name}:{tag} (≈ {size / 1e9:.1f} GB): {why}"
