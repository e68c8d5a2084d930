"""The GGUF reader on files made byte by byte: what it reads, and what it refuses, field by field."""

import struct

import numpy as np
import pytest
from formats_build import Tensor, gguf, llama_metadata, llama_tensors, small_gguf, split_gguf, split_keys

from zse.errors import FormatError, UnsupportedError
from zse.formats import arrays
from zse.formats.opening import open_model
from zse.formats.source import rope_row_order


@pytest.fixture
def opened(tmp_path):
    def open_bytes(data):
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return open_model(path)

    return open_bytes


def test_everything_is_read(opened):
    source = opened(gguf(llama_metadata(), llama_tensors()))
    assert (source.kind, source.naming, source.architecture, source.interleaved_rope) == ("gguf", "gguf", "llama", True)
    assert source.metadata["llama.block_count"] == 1 and source.metadata["general.tags"] == ["a", "b"]
    assert source.metadata["tokenizer.ggml.add_bos_token"] is True
    assert source.metadata["llama.rope.freq_base"] == 10000.0
    assert source.vocab_size == 64 and source.chat_template == "{{ messages }}"
    tokens = source.tokenizer.fields["tokenizer.ggml.tokens"]
    assert tokens.count == 64 and tokens.tolist()[:4] == [b"<unk>", b"<s>", b"</s>", b"t0"]
    assert bytes(tokens.raw).startswith(struct.pack("<Q", 5) + b"<unk>") and len(tokens.raw) == tokens.nbytes
    assert source.tokenizer.fields["tokenizer.ggml.scores"].tolist() == [-float(i) for i in range(64)]
    for tensor in llama_tensors():
        info = source.tensors[tensor.name]
        assert (info.type, info.shape) == (tensor.type, tensor.shape)
        assert source.read(tensor.name) == tensor.data
        assert info.layout == ("rows" if tensor.type in ("F32", "F16", "BF16") else "ggml")
    assert list(source.tensors) == [tensor.name for tensor in llama_tensors()]


def test_every_scalar_type(opened):
    values = {
        "u8": 255,
        "i8": -128,
        "u16": 65535,
        "i16": -32768,
        "u32": 2**32 - 1,
        "i32": -(2**31),
        "f32": 0.5,
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f64": 1e300,
        "bool": 0,
    }
    metadata = [(f"x.{type}", type, value) for type, value in values.items()]
    metadata += [(f"y.{type}", f"{type}[]", [value, value]) for type, value in values.items()]
    source = opened(gguf(metadata, []))
    for type, value in values.items():
        assert source.metadata[f"x.{type}"] == value and source.metadata[f"y.{type}"] == [value, value]


def test_parts_of_a_tensor(opened):
    source = opened(gguf([], [Tensor("a", "F32", (4, 2))]))
    whole = source.read("a")
    assert source.read("a", 8, 8) == whole[8:16] and source.read("a", 24) == whole[24:]
    with pytest.raises(ValueError, match=r"\[24, 40\)"):
        source.read("a", 24, 16)
    with pytest.raises(FormatError, match="no such tensor"):
        source.read("b")


def test_long_arrays_stay_in_the_file(opened):
    source = opened(gguf([("long", "u32[]", range(5000)), ("words", "string[]", ["é"] * 5000)], []))
    assert source.metadata["long"].tolist() == list(range(5000))
    assert source.metadata["words"].tolist() == ["é".encode()] * 5000


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 7], [3_000_000], [1, 2_000_000, 1], [5] * 300_000])
def test_string_arrays_across_windows(opened, lengths, monkeypatch):
    strings = [b"x" * length for length in lengths]
    data = gguf([("tokenizer.list", "string[]", strings), ("after", "u32", 7)], [])
    source = opened(data)
    assert source.metadata["tokenizer.list"].count == len(lengths) and source.metadata["after"] == 7
    assert [len(item) for item in source.metadata["tokenizer.list"]] == lengths
    monkeypatch.setattr(arrays, "_native", False)
    assert opened(data).metadata["tokenizer.list"].nbytes == source.metadata["tokenizer.list"].nbytes


def test_native_and_python_scans_agree():
    native = arrays._load_native()
    if not native:
        pytest.fail("libzse_formats.so is not built; run the build (ZSE_NATIVE_DIR can point to it)")
    rng = np.random.default_rng(4)
    for _ in range(3000):
        data = b"".join(struct.pack("<Q", n) + bytes(n) for n in rng.integers(0, 9, rng.integers(0, 6)).tolist())
        if rng.random() < 0.5 and len(data) > 8:
            at = int(rng.integers(0, len(data) - 8))
            extreme = [0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, len(data)][rng.integers(8)]
            data = data[:at] + struct.pack("<Q", extreme) + data[at + 8 :]
        data = data[: int(rng.integers(0, len(data) + 1))]
        count, limit = int(rng.integers(0, 9)), int(rng.integers(0, len(data) + 20))
        arguments = (data, count, limit)
        assert arrays.scan_strings(*arguments) == arrays._scan_strings_python(*arguments), arguments


def test_rope_row_order_undoes_the_converter():
    heads, head_dim = 3, 8
    hf = np.arange(heads * head_dim)
    permuted = hf.reshape(heads, 2, head_dim // 2).swapaxes(1, 2).reshape(-1)  # convert_hf_to_gguf.py, permute()
    assert np.array_equal(permuted[rope_row_order(heads, head_dim)], hf)
    for bad in ((0, 8), (2, 7), (2, 0), (-1, 4)):
        with pytest.raises(ValueError):
            rope_row_order(*bad)


def refused(opened, data, field, reason, error=FormatError):
    with pytest.raises(error) as caught:
        opened(data)
    line = str(caught.value)
    assert "\n" not in line and reason in line, line
    if error is FormatError:
        assert field in caught.value.field, line
        assert 0 <= caught.value.offset <= len(data)


F = [Tensor("a", "F32", (4,)), Tensor("b", "F32", (4,))]


@pytest.mark.parametrize(
    "data,field,reason",
    [
        (gguf([("k", "u32", 1), ("k", "u32", 1)], []), "k", "stands twice"),
        (gguf([], [Tensor("a", "F32", (4,)), Tensor("a", "F32", (4,))]), "a", "stands twice"),
        (gguf([], [Tensor("a", "F32", (40,)), Tensor("b", "F32", (4,), offset=32)]), "b", "overlaps tensor a"),
        (gguf([], [Tensor("a", "F32", (4,), offset=8)]), "a", "not a multiple of 32"),
        (gguf([], [Tensor("a", "F32", (4,), offset=2**63)]), "a", "end beyond"),
        (gguf([], [Tensor("a", "F32", (4,), offset=32)]), "a", "end beyond"),
        (gguf([], [Tensor("a", "F32", (4,), dimensions=(2**40, 2**40))]), "a", "elements"),
        (gguf([], [Tensor("a", "F32", (4,), dimensions=(2**63, 2**63, 2**63, 2**63))]), "a", "elements"),
        (gguf([], [Tensor("a", "F32", (4,), dimensions=(4, 0))]), "a", "0 elements"),
        (gguf([], [Tensor("a", "F32", (4,), dimensions=(1,) * 9)]), "a", "rank 9"),
        (gguf([], [Tensor("a", "F32", (4,), dimensions=(1,) * 5)]), "a", "rank 5"),
        (gguf([], [Tensor("a", "Q8_0", (2, 32), dimensions=(16, 4))]), "a", "not a multiple of Q8_0's 32"),
        (gguf([], [Tensor("", "F32", (4,))]), "tensor name", "empty"),
        (gguf([], [Tensor("n" * 300, "F32", (4,))]), "tensor name", "300 bytes"),
        (gguf([], F, num_tensors=2**40), "tensor_count", "at most"),
        (gguf([], F, num_tensors=100_000), "tensor_count", "do not fit"),
        (gguf([], F, num_keys=2**63), "metadata_kv_count", "at most"),
        (gguf([("k" * 2000, "u32", 1)], []), "metadata key", "2000 bytes"),
        (gguf([(b"\xff\xfe", "u32", 1)], []), "metadata key", "UTF-8"),
        (gguf([("k", "string", b"\xff")], []), "k", "UTF-8"),
        (gguf([("k", "bool", 2)], []), "k", "neither 0 nor 1"),
        (gguf([("k", "bool[]", [0, 1, 3])], []), "k", "neither 0 nor 1"),
        (gguf(llama_metadata(llama__block_count=("u32", 4097)), []), "block_count", "4097"),
        (gguf(llama_metadata(llama__block_count=("u32", 0)), []), "block_count", "0"),
        (gguf(llama_metadata(llama__block_count=("string", "many")), []), "block_count", "many"),
        (
            gguf(llama_metadata(tokenizer__ggml__scores=("f32[]", [0.0] * 63)), []),
            "scores",
            "63 entries for a vocabulary",
        ),
        (gguf([("", "u32", 1)], []), "metadata key", "is empty"),
        (gguf(llama_metadata(tokenizer__ggml__token_type=("i32[]", [1] * 65)), []), "token_type", "65 entries"),
        (gguf(llama_metadata(tokenizer__ggml__tokens=("u32", 1)), []), "tokens", "not an array of strings"),
        (gguf(llama_metadata(tokenizer__ggml__merges=("u32[]", [1])), []), "merges", "not an array"),
    ],
)
def test_refused(opened, data, field, reason):
    refused(opened, data, field, reason)


@pytest.mark.parametrize("alignment", [0, 1, 3, 48, 2**31, 2**17])
def test_bad_alignment(opened, alignment):
    refused(opened, gguf([("general.alignment", "u32", alignment)], F), "general.alignment", str(alignment))


def test_alignment_of_another_type(opened):
    refused(opened, gguf([("general.alignment", "string", "32")], F), "general.alignment", "'32'")


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_other_alignments(opened, alignment):
    source = opened(gguf([("general.alignment", "u32", alignment)], F, alignment=alignment))
    assert source.read("b") == F[1].data and source.tensors["b"].offset % alignment == 0


@pytest.mark.parametrize(
    "data,reason",
    [
        (gguf([], [], version=1), "version 1 is not supported"),
        (gguf([], [], version=4), "version 4"),
        (gguf([], [], version=3 << 24), "big endian"),
        (gguf([], [Tensor("blk.3.x", "F32", (4,), number=15)]), "tensor blk.3.x: type 'Q8_K'"),
        (gguf([], [Tensor("a", "F32", (4,), number=999)]), "type 999"),
    ],
)
def test_unsupported_is_named_with_what_is_supported(opened, data, reason):
    refused(opened, data, "", reason, UnsupportedError)
    with pytest.raises(UnsupportedError, match="supported: "):
        opened(data)


@pytest.fixture
def parts(tmp_path):
    """Three parts of a tiny model, the first without a tensor; a call writes them, with `changes` to some: number → bytes."""

    def write(changes=None, name="model"):
        for number, data in enumerate(split_gguf(3, first=0), 1):
            data = (changes or {}).get(number, data)
            if data is not None:
                (tmp_path / f"{name}-0000{number}-of-00003.gguf").write_bytes(data)
        return tmp_path / f"{name}-00001-of-00003.gguf"

    return write


def test_a_model_in_parts_is_the_model(opened, parts):
    whole = opened(gguf(llama_metadata(), llama_tensors()))
    with open_model(parts()) as source:
        assert list(source.tensors) == list(whole.tensors) and len(source.files) == 3
        for name, info in source.tensors.items():
            assert source.read(name) == whole.read(name) and info.shape == whole.tensors[name].shape
        assert {key for key in source.metadata if not key.startswith("split.")} == set(whole.metadata)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({2: None}, "model-00002-of-00003.gguf: offset 0: file: is missing: part 2 of 3"),
        ({2: split_gguf(3, first=0)[2]}, "is not part 2 of 3"),
        ({2: split_gguf(4)[1]}, "is not part 2 of 3"),
        ({3: split_gguf(3, first=0)[2][:-200]}, "model-00003-of-00003.gguf"),
        ({3: gguf(split_keys(2, 3, 0), llama_tensors())}, "stands also in"),
        ({3: gguf(split_keys(2, 3, 0), [])}, "but the parts hold"),
        ({1: gguf([*llama_metadata(), *split_keys(1, 3, 9)], [])}, "open model-00001-of-00003.gguf"),
        ({1: gguf([*llama_metadata(), ("split.count", "i32", -1)], [])}, "split.count: -1"),
        ({1: gguf([*llama_metadata(), ("split.count", "u32", 60_000)], [])}, "split.count: 60000"),
        ({1: gguf([*llama_metadata(), ("split.count", "string", "3")], [])}, "split.count: 3"),
    ],
)
def test_parts_that_do_not_belong_together(parts, changes, reason):
    with pytest.raises(FormatError, match=reason):
        open_model(parts(changes))


def test_a_part_under_another_name(parts, tmp_path):
    parts().rename(tmp_path / "other.gguf")
    with pytest.raises(FormatError, match="does not end with -00001-of-00003.gguf"):
        open_model(tmp_path / "other.gguf")
    with pytest.raises(FormatError, match="open model-00001-of-00003.gguf"):
        open_model(tmp_path / "model-00003-of-00003.gguf")


def test_names_cannot_break_the_line(opened):
    data = gguf([("evil\n\x1b[31mkey", "bool", 7)], [])
    refused(opened, data, "evil", r"evil\n\x1b[31mkey")


def test_an_array_of_arrays_is_refused(opened):
    data = bytearray(gguf([("k", "u32[]", [1])], []))
    at = data.index(struct.pack("<II", 9, 4))
    data[at + 4 : at + 8] = struct.pack("<I", 9)
    refused(opened, data, "k", "array of arrays")


def test_small_file_is_valid(opened):
    assert len(opened(small_gguf()).tensors) == 3


def test_reading_ahead_brings_a_file_into_the_page_cache(tmp_path):
    """Where the system can tell (RWF_NOWAIT) and lets go of pages when asked (not on tmpfs)."""
    import os

    from zse.formats.file import ModelFile
    from zse.runtime.load import ReadAhead

    path = tmp_path / "big"
    path.write_bytes(os.urandom(1 << 20) * 8)
    file = ModelFile(path)

    def is_cached() -> bool:
        try:
            return os.preadv(file.fd, [bytearray(4096)], 5 << 20, os.RWF_NOWAIT) == 4096
        except BlockingIOError:
            return False

    os.fsync(file.fd)
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if (
        is_cached()
    ):  # on tmpfs pages are the file: nothing can be read ahead there, and no other folder is the test's own
        pytest.skip("this file system keeps its pages")
    assert file.is_cold
    ReadAhead([file], file.size).wait()
    assert is_cached() and not file.is_cold
    stopped = ReadAhead([file], file.size)
    stopped.stop()
    stopped.wait()
    os.truncate(path, 1 << 20)  # what it cannot read is the load's to tell
    shorter = ReadAhead([file], file.size)
    shorter.stop()
    shorter.wait()
    file.close()
