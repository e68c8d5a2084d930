"""Files made to hurt: every truncation, every number at its extremes, mutants, and things that are no files at all."""

import json
import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from formats_build import Tensor, gguf, safetensors, small_gguf, small_safetensors
from mutate import EXTREMES, independent_check, repair

from zse.errors import FormatError, UnsupportedError
from zse.formats.convert import convert
from zse.formats.opening import open_model
from zse.formats.verify import verify

FORMATS = ("gguf", "safetensors", "zse")
# Nightly: ZSE_TEST_MUTANTS=10000 (per format); ZSE_TEST_SEED changes the mutants.
MUTANTS = int(os.environ.get("ZSE_TEST_MUTANTS", "400"))
SEED = int(os.environ.get("ZSE_TEST_SEED", "1"))


@pytest.fixture(scope="module")
def small_zse(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zse")
    (folder / "a.gguf").write_bytes(small_gguf())
    convert(folder / "a.gguf", folder / "a.zse")
    return (folder / "a.zse").read_bytes()


@pytest.fixture
def attempt(tmp_path):
    """attempt(data) -> "accepted", or the FormatError or UnsupportedError; anything else is raised."""
    path = tmp_path / "model"

    def run(data):
        path.write_bytes(data)
        try:
            with open_model(path) as source:
                independent_check(source, len(data))
            verify(path)
        except (FormatError, UnsupportedError) as error:
            assert "\n" not in str(error)
            return error
        return "accepted"

    return run


def seed_file(format, small_zse):
    return {"gguf": bytes(small_gguf()), "safetensors": small_safetensors(), "zse": small_zse}[format]


@pytest.mark.parametrize("format", FORMATS)
def test_every_truncation_is_refused(format, attempt, small_zse):
    data = seed_file(format, small_zse)
    assert attempt(data) == "accepted"
    for length in range(0, len(data), 1 if len(data) < 8000 else 37):
        assert attempt(data[:length]) != "accepted", length


@pytest.mark.parametrize("format", ["safetensors", "zse"])
def test_bytes_after_the_end_are_refused(format, attempt, small_zse):
    assert isinstance(attempt(seed_file(format, small_zse) + b"\0"), FormatError)


def extremes(size, length):
    for value in (*EXTREMES, length - 1, length, length + 1):
        if value < 1 << 8 * size:
            yield value


def test_every_gguf_number_at_its_extremes(attempt):
    good = small_gguf()
    for offset, size in good.numbers:
        if size < 4:
            continue
        for value in extremes(size, len(good)):
            data = bytearray(good)
            data[offset : offset + size] = value.to_bytes(size, "little")
            attempt(data)


def test_every_zse_header_number_at_its_extremes(attempt, small_zse):
    sections = struct.unpack_from("<I", small_zse, 12)[0]
    fields = [(8, 4), (12, 4), (16, 8)]
    for number in range(sections):
        fields += [(64 + 64 * number + 24, 8), (64 + 64 * number + 32, 8), (64 + 64 * number + 44, 4)]
    for offset, size in fields:
        for value in extremes(size, len(small_zse)):
            for repaired in (False, True):
                data = bytearray(small_zse)
                data[offset : offset + size] = value.to_bytes(size, "little")
                if repaired:
                    repair(data)
                result = attempt(data)
                assert (result == "accepted") == (bytes(data) == small_zse), (offset, value, repaired, result)


def json_numbers(value, path=()):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from json_numbers(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from json_numbers(item, (*path, index))
    elif type(value) is int:
        yield path


def with_value(value, path, new):
    copy = json.loads(json.dumps(value))
    at = copy
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = new
    return copy


WRONG = (*EXTREMES, -1, 1.5, None, True, "1", [], {}, 10**30)


def test_every_safetensors_number_at_its_extremes(attempt):
    good = small_safetensors()
    length = struct.unpack_from("<Q", good)[0]
    header, data = json.loads(good[8 : 8 + length]), good[8 + length :]
    for value in extremes(8, len(good)):
        assert value == length or attempt(struct.pack("<Q", value) + good[8:]) != "accepted"
    for path in json_numbers(header):
        for new in (*WRONG, len(good) - 1, len(good), len(good) + 1):
            changed = with_value(header, path, new)
            text = json.dumps(changed).encode()
            result = attempt(struct.pack("<Q", len(text)) + text + data)
            assert (result == "accepted") == (changed == header and type(new) is int), (path, new, result)


def rebuilt(zse, name, value):
    """The .zse with another JSON in a section, in the same place, all checksums right."""
    data = bytearray(zse)
    for number in range(struct.unpack_from("<I", data, 12)[0]):
        entry = 64 + 64 * number
        if data[entry : entry + 24].rstrip(b"\0") == name.encode():
            offset = struct.unpack_from("<Q", data, entry + 24)[0]
            text = json.dumps(value).encode()
            assert len(text) <= 4096
            data[offset : offset + 4096] = text.ljust(4096, b"\0")
            struct.pack_into("<Q", data, entry + 32, len(text))
    repair(data)
    return bytes(data)


def section_json(zse, name):
    for number in range(struct.unpack_from("<I", zse, 12)[0]):
        entry = 64 + 64 * number
        if zse[entry : entry + 24].rstrip(b"\0") == name.encode():
            offset, nbytes = struct.unpack_from("<QQ", zse, entry + 24)
            return json.loads(zse[offset : offset + nbytes])
    raise AssertionError(name)


@pytest.mark.parametrize("section,harmless", [("index", ()), ("tokenizer", ("fields",))])
def test_every_zse_number_in_json_at_its_extremes(section, harmless, attempt, small_zse):
    good = section_json(small_zse, section)
    assert attempt(rebuilt(small_zse, section, good)) == "accepted"
    paths = [path for path in json_numbers(good) if path[0] not in harmless]
    assert len(paths) >= 8
    for path in paths:
        for new in (*WRONG, len(small_zse) - 1, len(small_zse), len(small_zse) + 1):
            changed = with_value(good, path, new)
            result = attempt(rebuilt(small_zse, section, changed))
            if path[-2:] == ("shape", 0) and path[1] in (1, 2) and type(new) is int and 0 < new <= 16:
                assert result == "accepted"  # rows of the same tile: as many bytes, the rest is padding
                continue
            assert (result == "accepted") == (changed == good and type(new) is int), (path, new, result)


@pytest.mark.parametrize(
    "key,value,reason",
    [
        ("name", "a", "stands twice"),
        ("name", "", "name"),
        ("name", 7, "name"),
        ("layout", "r32", "layout 'r32'"),
        ("type", "int4-g33", "int4-g33"),
        ("type", ["F32"], "type"),
        ("shape", [1] * 9, "shape"),
        ("shape", [2, 0], "shape"),
        ("shape", [2], "rank 1"),
        ("shape", "2,32", "shape"),
        ("offset", 0, "first plane"),
        ("planes", None, "missing"),
        ("planes", [1, 512], "aligned"),
        ("planes", [256], "planes"),
        ("planes", [256, 520], "aligned"),
        ("planes", [256, 1 << 40], "aligned"),
        ("planes", [256, 256], "overlaps"),
        ("planes", [256, "512"], "planes"),
        ("crc32", "zz", "crc32"),
        ("crc32", "zzzzzzzz", "invalid literal"),
        ("crc32", "00000000", "checksum"),
    ],
)
def test_zse_index_entries(key, value, reason, attempt, small_zse):
    index = section_json(small_zse, "index")
    assert index["tensors"][1]["layout"] == "r16"
    index["tensors"][1][key] = value
    result = attempt(rebuilt(small_zse, "index", index))
    assert result != "accepted" and reason in str(result), result


def test_a_newer_zse_may_have_more_sections(attempt, small_zse):
    data = bytearray(small_zse)
    count = struct.unpack_from("<I", data, 12)[0]
    data += bytes(-len(data) % 4096) + b"news"
    struct.pack_into("<24sQQII", data, 64 + 64 * count, b"extra", len(data) - 4, 4, 0, 0)
    struct.pack_into("<IQ", data, 12, count + 1, len(data))
    repair(data)
    assert attempt(data) == "accepted"
    for name in (b"config", b"", b"no name", b"\xff"):
        struct.pack_into("<24s", data, 64 + 64 * count, name)
        repair(data)
        assert "section name" in str(attempt(data))


@pytest.mark.parametrize("name", ["config", "index", "provenance", "weights"])
def test_missing_zse_sections(name, attempt, small_zse):
    data = bytearray(small_zse)
    at = data.index(name.encode(), 64)
    data[at : at + len(name)] = b"x" * len(name)
    repair(data)
    assert f"section {name} is missing" in str(attempt(data))


def nan_block(type):
    block = {"Q8_0": 34, "Q4_1": 20, "Q4_K": 144}[type]
    return struct.pack("<e", float("nan")) + bytes(block - 2)


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("w", "F32", (4,), struct.pack("<4f", 1, 2, float("inf"), 4)),
        Tensor("w", "F16", (1, 2), b"\0\x7c\0\0"),
        Tensor("w", "BF16", (1, 2), b"\xc0\x7f\0\0"),
        Tensor("w", "Q8_0", (1, 32), nan_block("Q8_0")),
        Tensor("w", "Q4_1", (1, 32), nan_block("Q4_1")),
        Tensor("w", "Q4_K", (1, 256), nan_block("Q4_K")),
    ],
)
def test_verify_finds_nan_and_infinity(tensor, tmp_path):
    (tmp_path / "a.gguf").write_bytes(gguf([], [tensor]))
    with pytest.raises(FormatError, match="w: a (weight|scale) in rows .* is NaN or infinite"):
        verify(tmp_path / "a.gguf")
    verify(tmp_path / "a.gguf", numbers=False)
    convert(tmp_path / "a.gguf", tmp_path / "a.zse")  # keeping what is there asks no questions
    with pytest.raises(FormatError, match="w: a (weight|scale) in rows .* is NaN or infinite"):
        verify(tmp_path / "a.zse")


@pytest.mark.parametrize(
    "header",
    [
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
        '"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
        "[" * 50_000,
        '{"a":' * 50_000,
        "[]",
        "7",
        "",
        "{",
        '{"a": 1}',
        '{"__metadata__": {"a": 1}}',
        '{"__metadata__": 3}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "more": 1}}',
        '{"a": {"dtype": 5, "shape": [1], "data_offsets": [0, 4]}}',
        '{"": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
        '{"a": NaN}',
        '{"a": ' + "9" * 5000 + "}",
        '{"a": {"dtype": "F32", "shape": [1,1,1,1,1,1,1,1,1], "data_offsets": [0, 4]}}',
        "\ufeff{}",
    ],
)
def test_safetensors_headers(header, attempt):
    result = attempt(safetensors({"a": ("F32", (1,), bytes(4))}, header=header))
    assert isinstance(result, FormatError | UnsupportedError)


@pytest.mark.parametrize("dtype", ["F6_E3M2", "F4", "C64"])
def test_safetensors_dtypes_are_named(dtype, attempt):
    result = attempt(safetensors({"w": (dtype, (4,), bytes(4))}))
    assert isinstance(result, UnsupportedError)
    assert f"tensor w: dtype '{dtype}'" in str(result) and "BF16" in str(result)


@pytest.mark.parametrize("format", FORMATS)
def test_mutants(format, tmp_path):
    source = Path(__file__).resolve().parents[2] / "src"
    environment = os.environ | {"PYTHONPATH": f"{source}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    script = Path(__file__).with_name("mutate.py")
    result = subprocess.run(
        [sys.executable, script, format, str(MUTANTS), str(SEED), tmp_path],
        capture_output=True,
        text=True,
        timeout=60 + MUTANTS / 10,
        env=environment,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    report = json.loads(result.stdout)
    assert not report["failures"], report["failures"][:5]
    assert report["grown_mib"] <= 64
    assert report["accepted"] >= 1 and report["refused"] >= MUTANTS // 4, report


@pytest.mark.parametrize(
    "header",
    [
        b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<Q", 2**39),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**34),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 4, 2**36),
        struct.pack("<Q", 2**39) + b"{",
    ],
)
def test_a_sparse_terabyte_is_refused_at_once(header, tmp_path):
    path = tmp_path / "model"
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(1 << 40)
    start = time.process_time()
    with pytest.raises(FormatError, match="is sparse"):
        open_model(path)
    assert time.process_time() - start < 0.2


def test_what_is_no_regular_file(tmp_path):
    fifo, device, plug = tmp_path / "fifo", tmp_path / "device", tmp_path / "socket"
    os.mkfifo(fifo)
    device.symlink_to("/dev/zero")
    for path, reason in (
        (fifo, "is a pipe"),
        (device, "is a device"),
        ("/dev/null", "is a device"),
        (tmp_path / "none", "No such file"),
        ("a\0b", "cannot be opened"),
    ):
        with pytest.raises(FormatError, match=reason):
            open_model(path)
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(plug))
        with pytest.raises(FormatError, match="is a socket"):
            open_model(plug)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(FormatError, match="symbolic links"):
        open_model(tmp_path / "loop")


@pytest.mark.parametrize(
    "content", [b"", b"G", b"GGUF", b"PK\x03\x04" + bytes(60), b"\x80\x02ctorch", b"\x7fELF" + bytes(60)]
)
def test_other_files(content, tmp_path):
    (tmp_path / "model").write_bytes(content)
    with pytest.raises((FormatError, UnsupportedError)):
        open_model(tmp_path / "model")


def test_a_file_that_shrinks_after_opening(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf([("tokenizer.list", "string[]", [b"abc"] * 9)], [Tensor("w", "F32", (4096,))]))
    with open_model(path) as source:
        source.check_unchanged()
        os.truncate(path, 300)
        with pytest.raises(FormatError, match="shrank"):
            source.read("w")
        with pytest.raises(FormatError, match="changed while it was in use"):
            source.check_unchanged()


def test_a_vocabulary_that_changes_after_opening(tmp_path):
    path = tmp_path / "a.gguf"
    data = gguf([("tokenizer.list", "string[]", [b"abc"] * 9)], [])
    path.write_bytes(data)
    with open_model(path) as source:
        strings = source.metadata["tokenizer.list"]
        with open(path, "r+b") as file:
            file.seek(strings.offset)
            file.write(struct.pack("<Q", 2**40))
        with pytest.raises(FormatError, match="is not 9 strings"):
            _ = strings.raw


def test_no_descriptor_leaks(tmp_path, small_zse):
    before = len(os.listdir("/proc/self/fd"))
    damaged = small_zse[:5000], bytes(small_gguf())[:300], small_safetensors()[:100], b"junk" * 9
    for number, data in enumerate(damaged):
        (tmp_path / str(number)).write_bytes(data)
        with pytest.raises((FormatError, UnsupportedError)):
            open_model(tmp_path / str(number))
    assert len(os.listdir("/proc/self/fd")) == before


def test_version_1_is_still_read(attempt, small_zse, tmp_path):
    """Its planes follow one another, and the padding between them belongs to the tensor."""
    import zlib

    from zse.formats.matrix import Rows
    from zse.quant.scheme import parse_scheme, placed_planes

    index = section_json(small_zse, "index")
    with open_model(_written(tmp_path / "new", small_zse)) as source:
        start = source.tensors["b.weight"].offset - next(
            entry["offset"] for entry in index["tensors"] if entry["name"] == "b.weight"
        )
        expected = Rows(source, source.tensors["b.weight"], 0, 2).arrays()
    for entry in index["tensors"]:
        if entry.pop("planes", None) is not None:
            entry["nbytes"] = placed_planes(parse_scheme(entry["type"]), *entry["shape"])[1]
        at = start + entry["offset"]
        entry["crc32"] = f"{zlib.crc32(small_zse[at : at + entry['nbytes']]):08x}"
    data = bytearray(rebuilt(small_zse, "index", index))
    data[8:12] = (1).to_bytes(4, "little")
    repair(data)
    assert attempt(data) == "accepted"
    with open_model(_written(tmp_path / "old", data)) as source:
        info = source.tensors["b.weight"]
        assert info.planes is None and info.layout == "r16"
        old = Rows(source, info, 0, 2).arrays()
    assert (old.q == expected.q).all() and (old.scale == expected.scale).all() and old.q.any()


def _written(path, data):
    path.write_bytes(data)
    return path
