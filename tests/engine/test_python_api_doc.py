"""docs/python-api.md: its example runs, and every name in it exists."""

import re
import subprocess
import sys
from pathlib import Path

from zse.engine.config import EngineConfig
from zse.engine.llm import LLM, Found
from zse.engine.reply import Delta, Output
from zse.sampling.params import SamplingParams

TEXT = (Path(__file__).parents[2] / "docs" / "python-api.md").read_text()


def test_the_example_runs(real_models, tmp_path):
    code = re.search(r"```python\n(.*?)```", TEXT, re.S)[1]
    script = tmp_path / "example.py"
    script.write_text(code.replace('"smollm2"', repr(str(real_models["smollm2"]))))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    # Of a reply that is drawn; the tokens are those of the CPU's level.
    assert done.returncode == 0 and "red" in done.stdout.lower() and "Paris" in done.stdout, (done.stdout, done.stderr)


def test_every_name_exists():
    for name in re.findall(r"`(\w+)\(", TEXT.split("| call | gives |")[1]):
        assert name in ("LLM", "Output", "Delta", "Found") or hasattr(LLM, name), name
    assert (
        f"Output({', '.join(Output._fields)})" in TEXT
        and f"Found({', '.join(Found._fields)})" in TEXT
        and f"Delta({', '.join(Delta._fields)})" in TEXT
    )
    assert all(f"`{name}`" in TEXT for name in SamplingParams.__struct_fields__)
    for name in EngineConfig.__struct_fields__:
        assert name in TEXT, name
