"""A process that has torch and transformers and forks for each script: their imports take eight seconds, most scripts two tenths of one.

The modules that the first model of a process imports, a thousand with torch's compiler and SymPy, are three of these seconds."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

SERVER = """
import json, os, sys, traceback
import numpy, torch, transformers
import torch._dynamo, torch.distributed.tensor
import transformers.generation, transformers.loss.loss_utils, transformers.modeling_utils, transformers.quantizers.auto
transformers.AutoModel, transformers.AutoModelForCausalLM, transformers.AutoModelForSequenceClassification
for line in sys.stdin:
    asked = json.loads(line)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            for number, name in enumerate(("input", "output", "errors")):
                os.dup2(os.open(asked["files"] + "/" + name, os.O_RDWR | os.O_CREAT, 0o600), number)
            sys.stdin = open(0)
            sys.argv = ["-c", *asked["arguments"]]
            os.chdir(asked["cwd"])
            exec(compile(asked["script"], "<string>", "exec"), {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Preloaded:
    """Stands where a module has `subprocess`: run() of [python, "-c", script, *arguments] alone. env: as it was at the start."""

    def __init__(self, env: dict[str, str]):
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def run(self, command, *, input: str, cwd: str = ".", **_) -> SimpleNamespace:
        assert command[:2] == [sys.executable, "-c"]
        with tempfile.TemporaryDirectory() as files:
            Path(files, "input").write_text(input)
            asked = {"script": command[2], "arguments": command[3:], "cwd": cwd, "files": files}
            self._server.stdin.write(json.dumps(asked) + "\n")
            self._server.stdin.flush()
            code = int(self._server.stdout.readline())
            read = {name: Path(files, name).read_text() for name in ("output", "errors")}
        return SimpleNamespace(returncode=code, stdout=read["output"], stderr=read["errors"])

    def close(self) -> None:
        self._server.stdin.close()
        self._server.wait(20)
        self._server.stdout.close()


@pytest.fixture(scope="module")
def preloaded():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    process = Preloaded(os.environ | {"HF_HUB_OFFLINE": "1"})
    yield process
    process.close()
