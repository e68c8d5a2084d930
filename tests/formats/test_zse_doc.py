"""docs/zse-format.md says what the code does: its tables are parsed and compared."""

import re
from pathlib import Path

from zse.formats import zse
from zse.formats.ggml import EXACT, SCHEMES
from zse.quant.policy import MIN_ELEMENTS, MIN_ROWS
from zse.quant.scheme import AffineScheme, DenseScheme

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "zse-format.md").read_text()


def test_numbers():
    magic = re.search(r"magic `([0-9A-F ]+)`", TEXT)[1]
    assert bytes.fromhex(magic) == zse.MAGIC
    assert f"1 to {zse.MAX_SECTIONS}" in TEXT and f"version, {zse.VERSION}" in TEXT
    assert zse.HEADER.size == zse.ENTRY.size == 64 and f"{zse.MAX_SMALL_BYTES >> 20} MiB for a section" in TEXT
    assert f"{zse.MAX_TENSORS:,} tensors" in TEXT and f"{zse.MAX_NAME_BYTES:,} bytes for a name" in TEXT
    assert f"{MIN_ELEMENTS:,} elements or {MIN_ROWS} rows" in TEXT


def test_sections():
    assert set(re.findall(r"^\*\*`(\w+)`\*\*", TEXT, re.M)) == set(zse.SECTIONS)


def test_mappings():
    rows = re.findall(r"^\| ([IT]?Q\w+|MXFP4|NVFP4) \| .* \| `([\w-]+)` \| (.*) \|$", TEXT, re.M)
    assert {type: scheme for type, scheme, _ in rows} == {type: scheme.name for type, scheme in SCHEMES.items()}
    assert sorted(type for type, _, equal in rows if equal == "bit for bit") == sorted(EXACT)


def test_plane_shapes():
    rows = re.findall(r"^\| (.*?) \| (?:(u8|f16) )?\[([^\]]+)\] \|", TEXT, re.M)
    assert len(rows) == 6
    n, k = 40, 192
    for names, dtype, shape in rows:
        bits = re.findall(r"\b[4568]\b", names.split("bits")[1]) if "bits" in names else ["4"]
        sizes = {"T": 3, "B": 6, "K": 192, "G": 6}
        expected = tuple(sizes.get(size) or int(size) for size in shape.split(", "))
        for bit in bits:
            scheme = DenseScheme("f32") if "dense" in names else AffineScheme(int(bit), 32, False)
            planes = {plane.name: plane for plane in scheme.planes(n, k)}
            for name in re.findall(r"`(\w+)`", names):
                assert planes[name].shape == expected and planes[name].dtype == (dtype or "f32")
