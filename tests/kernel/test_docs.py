"""docs/kernel-language.md lists every function of the language; its example compiles."""

import re
from pathlib import Path

from zse.kernel.emit import emit_gpu, emit_unit
from zse.kernel.language import BUILTINS, Variant
from zse.kernel.nvrtc import compile_variant, find_library

PAGE = Path(__file__).parents[2] / "docs" / "kernel-language.md"


def test_every_function_is_listed():
    listed = re.findall(r"^- `(\w+)\(", PAGE.read_text(), re.M)
    assert listed == list(BUILTINS)


def test_the_example_compiles(tmp_path, monkeypatch):
    (tmp_path / "page_example.py").write_text(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[0])
    monkeypatch.syspath_prepend(tmp_path)
    import page_example

    text, manifest = emit_unit([Variant("scale_rows_4", page_example.scale_rows, {"UNROLL": 4})], "x86-64-v3")
    assert manifest["scale_rows_4"]["params"] == [["x", "ptr"], ["out", "ptr"], ["width", "i64"], ["factor", "f32"]]
    assert text.count("_mem *)") == 8  # four loads, four stores


def test_the_gpu_example_compiles(tmp_path, monkeypatch):
    (tmp_path / "gpu_example.py").write_text(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[1])
    monkeypatch.syspath_prepend(tmp_path)
    import gpu_example

    for variant in gpu_example.VARIANTS:
        text, entry = emit_gpu(variant, "sm_90a")
        assert entry["threads"] == variant.threads and f" {variant.symbol}(" in text
        if find_library():
            assert compile_variant(variant, "sm_90a").spills == 0
