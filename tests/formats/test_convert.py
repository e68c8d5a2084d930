"""`.zse` files: what convert writes, what the reader gives back, and what survives kills and full disks."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from formats_build import Tensor, gguf, llama_metadata, llama_tensors, safetensors

from zse.errors import ConfigError, FormatError, UnsupportedError, ZSEError
from zse.formats import zse_writer
from zse.formats.convert import convert
from zse.formats.ggml import EXACT, SCHEMES
from zse.formats.gguf_blocks import dequantize, to_affine, to_scheme
from zse.formats.info import info
from zse.formats.matrix import Rows
from zse.formats.opening import open_model
from zse.formats.source import rope_row_order
from zse.formats.verify import verify
from zse.quant.pack import NUMPY_DTYPE
from zse.quant.scheme import AffineScheme


def planes_from_bytes(scheme, data, n, k, align=1, layout=None):
    """Views of the planes of N x K that lie one after another in `data`, each at a multiple of `align` bytes."""
    planes, at = {}, 0
    for plane in scheme.planes(n, k, layout or scheme.layouts[0]):
        at += -at % align
        planes[plane.name] = np.frombuffer(
            data, NUMPY_DTYPE[plane.dtype], plane.nbytes // np.dtype(NUMPY_DTYPE[plane.dtype]).itemsize, at
        ).reshape(plane.shape)
        at += plane.nbytes
    return planes


def test_planes_from_bytes_honours_alignment():
    scheme, rng = AffineScheme(6, 16, False), np.random.default_rng(3)
    planes = {plane.name: rng.bytes(plane.nbytes) for plane in scheme.planes(20, 96)}
    data = b""
    for plane in planes.values():
        data += bytes(-len(data) % 256) + plane
    for name, array in planes_from_bytes(scheme, data, 20, 96, align=256).items():
        assert array.tobytes() == planes[name]


@pytest.fixture
def llama(tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf(llama_metadata(), llama_tensors()))
    return path


@pytest.fixture
def llama_dir(tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    rng = np.random.default_rng(3)
    tensors = {}
    for name, shape in (
        ("lm_head.weight", (512, 96)),
        ("model.layers.1.mlp.up_proj.weight", (192, 96)),
        ("model.layers.0.mlp.up_proj.weight", (192, 96)),
        ("model.layers.0.self_attn.q_proj.bias", (96,)),
        ("model.layers.0.tiny.weight", (8, 32)),
        ("model.layers.0.odd.weight", (700, 50)),
        ("model.embed_tokens.weight", (512, 96)),
        ("model.norm.weight", (96,)),
    ):
        tensors[name] = ("F32", shape, rng.normal(size=shape).astype(np.float32).tobytes())
    tensors["position_ids"] = ("I64", (2, 3), np.arange(6).tobytes())
    tensors["scalar"] = ("F32", (), np.float32(3).tobytes())
    (folder / "model.safetensors").write_bytes(safetensors(tensors, {"format": "pt"}))
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": 512}))
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"vocab": {"é": 0}}}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ x }}", "eos_token": "</s>"}')
    (folder / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    return folder


def values(source, name, order=None):
    tensor = source.tensors[name]
    if not tensor.shape:
        return np.frombuffer(source.read(tensor), np.float32)
    return Rows(source, tensor, 0, tensor.shape[0], order, len(order) if order else 1).f32()


def test_a_gguf_is_kept_as_it_is(llama, tmp_path):
    out = tmp_path / "tiny.zse"
    report = convert(llama, out)
    with open_model(llama) as before, open_model(out) as after:
        assert (after.kind, after.naming, after.architecture) == ("zse", "gguf", "llama")
        assert before.interleaved_rope and not after.interleaved_rope
        assert set(after.tensors) == set(before.tensors) and report.num_tensors == len(before.tensors)
        for name, tensor in before.tensors.items():
            heads = {"blk.0.attn_q.weight": 4, "blk.0.attn_k.weight": 2}.get(name)
            order = rope_row_order(heads, 16) if heads else list(range(tensor.shape[0]))
            factor = np.frombuffer(before.read(tensor.factor), np.float32)[0] if tensor.factor else 1
            expected = dequantize(tensor.type, before.read(tensor), tensor.shape, factor)[order]
            if tensor.layout == "ggml" and tensor.type not in EXACT:
                expected = to_affine(tensor.type, before.read(tensor), tensor.shape).dequantize()
            assert np.array_equal(values(after, name), expected), name
            got = after.tensors[name]
            assert got.layout == ("r16" if len(tensor.shape) == 2 else "rows")
            assert got.type == (tensor.scheme.name if len(tensor.shape) == 2 else "F32")
            assert got.offset % 256 == 0
        assert after.tokenizer.kind == "gguf" and after.chat_template == before.chat_template
        for key, value in before.metadata.items():
            theirs = after.metadata[key]
            if hasattr(value, "raw"):
                assert (bytes(theirs.raw), theirs.count, theirs.type) == (bytes(value.raw), value.count, value.type)
            else:
                assert theirs == value and type(theirs) is type(value)
        assert after.vocab_size == 64
        assert after.provenance["source"]["files"] == [{"name": "tiny.gguf", "nbytes": llama.stat().st_size}]
    assert verify(out).num_tensors == len(llama_tensors())
    assert not os.path.exists(f"{out}.part")


def test_planes_in_the_file_are_those_of_pack(llama, tmp_path):
    out = tmp_path / "tiny.zse"
    convert(llama, out)
    with open_model(llama) as before, open_model(out) as after:
        for name in ("blk.0.attn_v.weight", "blk.0.attn_output.weight", "token_embd.weight", "blk.0.extra_b.weight"):
            tensor = before.tensors[name]
            expected = to_scheme(tensor.type, before.read(tensor), tensor.shape).pack()
            got = planes_from_bytes(SCHEMES[tensor.type], after.read(name), *tensor.shape)
            assert set(got) == set(expected)
            for plane, array in expected.items():
                assert np.array_equal(got[plane], array), (name, plane)


def test_tensors_lie_in_execution_order(llama_dir, tmp_path):
    out = tmp_path / "m.zse"
    convert(llama_dir, out)
    with open_model(out) as source:
        names = list(source.tensors)
        offsets = [tensor.offset for tensor in source.tensors.values()]
    assert offsets == sorted(offsets)
    assert names[0] == "model.layers.0.self_attn.q_proj.bias", "what is no matrix comes first"
    assert names[names.index("scalar") + 1] == "model.embed_tokens.weight"
    assert names.index("model.layers.0.mlp.up_proj.weight") < names.index("model.layers.1.mlp.up_proj.weight")
    assert names.index("model.layers.1.mlp.up_proj.weight") < names.index("lm_head.weight")


@pytest.mark.parametrize(
    "quant,group,expected,head",
    [
        ("int4", None, "int4-g32", "int8-g32-sym"),
        ("int4", 0, "int4-row", "int8-row-sym"),
        ("int4", 64, "int4-g32", "int8-g32-sym"),  # 96 columns: 64 does not divide them
        ("int8", 16, "int8-g16-sym", "int8-g16-sym"),
        ("int6", None, "int6-g32", "int8-g32-sym"),
        ("f16", None, "f16", "f16"),
        ("bf16", None, "bf16", "bf16"),
        (None, None, "f32", "f32"),
    ],
)
def test_quantizing_a_directory(llama_dir, tmp_path, quant, group, expected, head):
    out = tmp_path / "m.zse"
    report = convert(llama_dir, out, quant, group)
    with open_model(llama_dir) as before, open_model(out) as after:
        types = {name: tensor.type for name, tensor in after.tensors.items()}
        assert types["model.layers.0.mlp.up_proj.weight"] == expected
        assert types["model.embed_tokens.weight"] == types["lm_head.weight"] == head
        assert types["model.norm.weight"] == types["model.layers.0.self_attn.q_proj.bias"] == "F32"
        assert types["position_ids"] == "I64" and after.tensors["position_ids"].layout == "rows"
        if quant and quant.startswith("int"):
            assert types["model.layers.0.odd.weight"] == "f16" and types["model.layers.0.tiny.weight"] == "F32"
            name = "model.layers.0.mlp.up_proj.weight"
            whole = Rows(after, after.tensors[name], 0, 192).arrays()
            assert np.array_equal(whole.q, after.tensors[name].scheme.nearest(values(before, name)).q)
        for name in before.tensors:
            if name != "position_ids":
                error = np.abs(values(after, name) - values(before, name)).max()
                bound = {"int4": 0.5, "int6": 0.1, "int8": 0.03, "f16": 0.002, "bf16": 0.02, None: 0}[quant]
                assert error <= bound, name
        assert after.hf_config == before.hf_config and after.generation_config == {"temperature": 0.6}
        assert after.tokenizer.json == before.tokenizer.json and after.tokenizer.config == before.tokenizer.config
        assert after.tokenizer.special_tokens == {"eos_token": "</s>"} and after.chat_template == "{{ x }}"
    assert report.nbytes == out.stat().st_size and verify(out).kind == "zse"


def test_head_can_be_chosen(llama_dir, tmp_path):
    convert(llama_dir, tmp_path / "m.zse", "int4", head="f16")
    with open_model(tmp_path / "m.zse") as source:
        assert source.tensors["lm_head.weight"].type == "f16"


def test_zse_to_zse(llama, tmp_path):
    convert(llama, tmp_path / "a.zse")
    convert(tmp_path / "a.zse", tmp_path / "b.zse")
    assert (tmp_path / "a.zse").read_bytes() == (tmp_path / "b.zse").read_bytes()
    convert(tmp_path / "b.zse", tmp_path / "b.zse", "int8")  # in place, through the .part
    with open_model(tmp_path / "b.zse") as source:
        assert source.tensors["blk.0.ffn_gate.weight"].type == "int8-g32-sym"
        assert source.provenance["source_provenance"]["source"]["kind"] == "gguf"


def test_chunks_do_not_show(llama_dir, tmp_path, monkeypatch):
    convert(llama_dir, tmp_path / "a.zse", "int4")
    monkeypatch.setattr("zse.formats.convert._CHUNK_ELEMENTS", 1)  # 16 rows at a time
    convert(llama_dir, tmp_path / "b.zse", "int4")
    assert (tmp_path / "a.zse").read_bytes() == (tmp_path / "b.zse").read_bytes()


def test_interleaved_rows_in_chunks(tmp_path, monkeypatch):
    tensors = [Tensor("blk.0.attn_q.weight", "Q8_0", (96, 32)), Tensor("blk.0.attn_q.bias", "F32", (96,))]
    path = tmp_path / "q.gguf"
    path.write_bytes(gguf(llama_metadata(llama__attention__head_count=("u32", 4)), tensors))  # heads of 24 rows
    monkeypatch.setattr("zse.formats.convert._CHUNK_ELEMENTS", 1)
    convert(path, tmp_path / "q.zse")
    order = rope_row_order(4, 24)
    with open_model(path) as before, open_model(tmp_path / "q.zse") as after:
        for tensor in tensors:
            expected = dequantize(tensor.type, before.read(tensor.name), tensor.shape)[order]
            assert np.array_equal(values(after, tensor.name), expected)


def test_blocks_that_are_no_matrix(tmp_path):
    tensors = [Tensor("v", "Q8_0", (64,)), Tensor("cube", "Q5_1", (2, 3, 2, 64)), Tensor("k", "Q6_K", (256,))]
    (tmp_path / "a.gguf").write_bytes(gguf([], tensors))
    verify(tmp_path / "a.gguf")
    convert(tmp_path / "a.gguf", tmp_path / "a.zse")
    with open_model(tmp_path / "a.zse") as source:
        for tensor in tensors:
            assert (source.tensors[tensor.name].type, source.tensors[tensor.name].shape) == ("F32", tensor.shape)
            expected = dequantize(tensor.type, tensor.data, tensor.shape)
            assert source.read(tensor.name) == expected.tobytes()


def test_a_stack_of_matrices_becomes_one(tmp_path):
    """Experts: all rows of one behind those of the other."""
    tensors = [Tensor("blocks", "Q5_1", (3, 16, 64)), Tensor("plain", "F32", (2, 16, 32))]
    (tmp_path / "a.gguf").write_bytes(gguf([], tensors))
    convert(tmp_path / "a.gguf", tmp_path / "a.zse")
    with open_model(tmp_path / "a.zse") as source:
        for tensor, type in zip(tensors, ("int5-g32", "f32"), strict=True):
            found = source.tensors[tensor.name]
            expected = dequantize(tensor.type, tensor.data, tensor.shape).reshape(-1, tensor.shape[-1])
            assert (found.type, found.layout, found.shape) == (type, "r16", expected.shape)
            np.testing.assert_array_equal(values(source, tensor.name), expected)


def test_rows_that_are_no_heads_are_refused(tmp_path):
    (tmp_path / "q.gguf").write_bytes(gguf(llama_metadata(), [Tensor("blk.0.attn_q.weight", "F32", (36, 32))]))
    with pytest.raises(FormatError, match="36 rows are not 4 heads"):
        convert(tmp_path / "q.gguf", tmp_path / "q.zse")


def test_progress_and_perplexities(llama, tmp_path):
    calls = []
    evaluated = []

    def evaluate(path):
        evaluated.append(path)
        return 10.0 + len(evaluated)

    report = convert(llama, tmp_path / "m.zse", "int4", progress=lambda *call: calls.append(call), evaluate=evaluate)
    done = [call[0] for call in calls]
    assert done == sorted(done) and done[-1] == calls[0][1] and len({call[2] for call in calls}) == report.num_tensors
    assert evaluated == [str(llama), str(tmp_path / "m.zse.part")]
    assert (report.perplexity_before, report.perplexity_after) == (11.0, 12.0)
    assert sum(report.schemes.values()) == done[-1]


@pytest.mark.parametrize(
    "after, is_written", [(10.0, True), (10.1, True), (10.2, False), (9.0, True), (math.nan, False)]
)
def test_a_result_that_is_too_far_from_its_source_is_not_written(llama, tmp_path, after, is_written):
    out = tmp_path / "m.zse"
    out.write_bytes(b"the one before")

    def evaluate(path):
        if str(path) == str(llama):
            return 10.0
        with open_model(path) as made:  # a whole file, under another name
            assert made.kind == "zse"
        assert out.read_bytes() == b"the one before"
        return after

    if is_written:
        assert convert(llama, out, "int4", evaluate=evaluate, max_change=0.015).perplexity_after == after
        assert out.read_bytes()[1:4] == b"ZSE"
    else:
        with pytest.raises(ZSEError, match="was not written: its perplexity is .* 1.50% were allowed") as caught:
            convert(llama, out, "int4", evaluate=evaluate, max_change=0.015)
        assert caught.value.exit_code == 1 and out.read_bytes() == b"the one before"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("m.zse")) == ["m.zse"]


@pytest.mark.parametrize(
    "arguments,error,reason",
    [
        (("int3",), UnsupportedError, "int3"),
        (("int4", 48), UnsupportedError, "48"),
        (("f16", 32), ConfigError, "f16"),
        ((None, 32), ZSEError, "--quant"),
    ],
)
def test_wrong_options(llama, tmp_path, arguments, error, reason):
    with pytest.raises(error, match=reason):
        convert(llama, tmp_path / "m.zse", *arguments)
    assert os.listdir(tmp_path) == ["tiny.gguf"]


def test_nan_in_the_source_is_named(llama_dir, tmp_path):
    w = np.ones((192, 96), np.float32)
    w[100, 3] = np.nan
    (llama_dir / "model.safetensors").write_bytes(safetensors({"w.weight": ("F32", w.shape, w.tobytes())}))
    with pytest.raises(FormatError, match="w.weight: cannot become int4-g32: a value is NaN"):
        convert(llama_dir, tmp_path / "m.zse", "int4")
    with pytest.raises(FormatError, match=r"w.weight: a weight in rows \[0, 192\) is NaN"):
        verify(llama_dir)
    assert verify(llama_dir, numbers=False).num_tensors == 1


def test_a_killed_conversion_goes_on(llama_dir, tmp_path):
    """Dies when the second tensor is done, again and again; every call goes on, and the end is the same bytes."""
    convert(llama_dir, tmp_path / "whole.zse", "int4")
    whole = (tmp_path / "whole.zse").read_bytes()
    out = tmp_path / "m.zse"
    out.write_bytes(b"old state")
    with open_model(llama_dir) as source:
        count = len(source.tensors)
    for stop in range(count):
        seen = []

        def die(done, total, name, seen=seen):
            seen.append(name)
            if len(set(seen)) == 2:
                raise KeyboardInterrupt

        try:
            convert(llama_dir, out, "int4", progress=die, threads=1)
        except KeyboardInterrupt:
            assert out.read_bytes() == b"old state" and (tmp_path / "m.zse.part").exists()
        else:
            break
    assert stop > 0 and out.read_bytes() == whole


def test_sigkill_at_random_moments(llama_dir, tmp_path):
    convert(llama_dir, tmp_path / "whole.zse", "int4")
    whole, out = (tmp_path / "whole.zse").read_bytes(), tmp_path / "m.zse"
    code = (
        "import sys, time\nfrom zse.formats.convert import convert\n"
        "def tick(*_):\n    print('.', flush=True)\n    time.sleep(0.02)\n"
        "r = convert(sys.argv[1], sys.argv[2], 'int4', progress=tick)\n"
        "print('resumed', r.resumed_bytes)"
    )
    lines = []
    for number in range(8):
        process = subprocess.Popen([sys.executable, "-c", code, llama_dir, out], stdout=subprocess.PIPE, text=True)
        for _ in range(3 + number % 3):
            lines.append(process.stdout.readline())
        time.sleep(0.003 * number)
        process.send_signal(signal.SIGKILL)
        process.wait()
        lines += process.stdout.readlines()  # a start that found all tensors written has no tick to wait for
        process.stdout.close()
        assert not out.exists() or out.read_bytes() == whole
    result = subprocess.run([sys.executable, "-c", code, llama_dir, out], capture_output=True, text=True, check=True)
    lines += result.stdout.splitlines()
    resumed = [int(line.split()[1]) for line in lines if line.startswith("resumed")]
    assert out.read_bytes() == whole and any(resumed) and not (tmp_path / "m.zse.part").exists()


def test_a_part_of_another_plan_is_not_continued(llama_dir, tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(llama_dir, tmp_path / "m.zse", "int8", progress=stop)
    assert convert(llama_dir, tmp_path / "m.zse", "int4").resumed_bytes == 0
    assert verify(tmp_path / "m.zse")


def test_pages_lost_after_the_journal_are_written_again(llama_dir, tmp_path):
    """A crash of the machine can lose data that the journal calls finished: its checksum shows it."""
    convert(llama_dir, tmp_path / "whole.zse", "int4")
    names = []

    def stop(done, total, name):
        names.append(name)
        if len(set(names)) > 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(llama_dir, tmp_path / "m.zse", "int4", progress=stop)
    part = tmp_path / "m.zse.part"
    with open_model(tmp_path / "whole.zse") as source:
        place = next(iter(source.tensors.values())).offset
    data = bytearray(part.read_bytes())
    data[place : place + 64] = bytes(64)
    part.write_bytes(data)
    report = convert(llama_dir, tmp_path / "m.zse", "int4")
    assert report.resumed_bytes > 0
    assert (tmp_path / "m.zse").read_bytes() == (tmp_path / "whole.zse").read_bytes()


@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate", "fsync", "replace", "ftruncate"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failing_disk_keeps_the_old_file(llama_dir, tmp_path, monkeypatch, call, code):
    out = tmp_path / "m.zse"
    out.write_bytes(b"old state")
    real = getattr(os, call)
    failing = 0
    for number in range(1, 200):
        calls = 0

        def fail(*arguments, number=number):
            nonlocal calls
            calls += 1
            if calls == number:
                raise OSError(code, os.strerror(code))
            return real(*arguments)

        (tmp_path / "m.zse.part").unlink(missing_ok=True)
        monkeypatch.setattr(zse_writer.os, call, fail)
        try:
            convert(llama_dir, out, "int4", clip_search=False)
        except ZSEError as error:
            failing += 1
            line = str(error)
            assert "\n" not in line and ("disk is full" in line if code == errno.ENOSPC else os.strerror(code) in line)
            # A failing fsync of the folder comes after the rename: then the new file is whole.
            assert out.read_bytes() == b"old state" or verify(out)
        finally:
            monkeypatch.setattr(zse_writer.os, call, real)
        if calls < number:
            break
    assert failing and verify(out)


def test_two_writers_do_not_mix(llama_dir, tmp_path):
    def other(*_):
        with pytest.raises(ZSEError, match="another process is writing"):
            convert(llama_dir, tmp_path / "m.zse", "int4")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(llama_dir, tmp_path / "m.zse", "int4", progress=other)


def test_output_must_be_a_file_name(llama, tmp_path):
    with pytest.raises(ZSEError, match="is a directory"):
        convert(llama, tmp_path)
    with pytest.raises(ZSEError, match="no such directory"):
        convert(llama, tmp_path / "none" / "m.zse")
    (tmp_path / "m.zse.part").symlink_to(tmp_path / "victim")
    with pytest.raises(ZSEError, match="m.zse.part"):
        convert(llama, tmp_path / "m.zse")
    assert not (tmp_path / "victim").exists()


def test_verify_finds_every_flipped_byte(llama, tmp_path):
    """A flipped bit anywhere in the file is found, in a section, a tensor, or the zeros between them."""
    out = tmp_path / "m.zse"
    convert(llama, out)
    good = out.read_bytes()
    rng = np.random.default_rng(11)
    places = {*range(0, 28), *rng.integers(0, len(good), 250).tolist()}
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 1 << int(rng.integers(8))
        out.write_bytes(bad)
        with pytest.raises((FormatError, UnsupportedError)):
            verify(out)


def test_a_tokenizer_image_is_kept_and_checked(llama_dir, tmp_path):
    image = bytes(range(256)) * 33
    convert(llama_dir, tmp_path / "m.zse", tokenizer_image=lambda source: image)
    with open_model(tmp_path / "m.zse") as source:
        assert source.tokenizer.image() == image and source.tokenizer.json.startswith(b'{"version"')
    convert(tmp_path / "m.zse", tmp_path / "again.zse", tokenizer_image=lambda source: source.tokenizer.image()[:100])
    with open_model(tmp_path / "again.zse") as source:
        assert source.tokenizer.image() == image[:100]
    convert(tmp_path / "m.zse", tmp_path / "none.zse")
    with open_model(tmp_path / "none.zse") as source:
        assert source.tokenizer.image is None
    data = bytearray((tmp_path / "m.zse").read_bytes())
    place = data.index(image) + 5000
    data[place] ^= 1
    (tmp_path / "m.zse").write_bytes(data)
    with pytest.raises(FormatError, match="image: does not match"):
        verify(tmp_path / "m.zse")


def test_verify_names_the_damaged_tensor(llama, tmp_path):
    out = tmp_path / "m.zse"
    convert(llama, out)
    with open_model(out) as source:
        place = source.tensors["blk.0.ffn_up.weight"].offset
    data = bytearray(out.read_bytes())
    data[place + 5] ^= 1
    out.write_bytes(data)
    with pytest.raises(FormatError, match="blk.0.ffn_up.weight: checksum is"):
        verify(out)


@pytest.mark.parametrize("quant", [None, "int8"])
def test_a_damaged_zse_is_not_converted(llama, tmp_path, quant):
    """Its weights would get checksums that fit them; a second try does not go on behind the damage either."""
    source, out = tmp_path / "m.zse", tmp_path / "again.zse"
    convert(llama, source)
    with open_model(source) as model:
        place = model.tensors["blk.0.ffn_up.weight"].offset
    data = bytearray(source.read_bytes())
    data[place + 5] ^= 1
    source.write_bytes(data)
    for _ in range(2):
        with pytest.raises(FormatError, match="blk.0.ffn_up.weight: checksum is"):
            convert(source, out, quant)
        assert not out.exists()


def test_info(llama, llama_dir, tmp_path):
    convert(llama, tmp_path / "m.zse")
    for path, kind in ((llama, "gguf"), (tmp_path / "m.zse", "zse")):
        result = info(path)
        json.dumps(result)
        assert (result["kind"], result["architecture"], result["vocab_size"]) == (kind, "llama", 64)
        assert result["num_parameters"] == sum(int(np.prod(tensor.shape)) for tensor in llama_tensors())
        assert result["metadata"]["tokenizer.ggml.tokens"] == "64 x string" and result["chat_template"]
        assert sum(entry["tensors"] for entry in result["types"].values()) == result["num_tensors"] == 18
    result = info(llama_dir)
    assert result["kind"] == "safetensors" and result["metadata"]["config.vocab_size"] == 512
    assert result["tokenizer"] == {"kind": "hf", "vocab_size": 512}


def test_real_models_convert(real_models, tmp_path):
    for path in real_models.values():
        out = tmp_path / "m.zse"
        report = convert(path, out)
        assert report.nbytes < 1.02 * report.source_bytes
        with open_model(path) as before, open_model(out) as after:
            assert after.tensors.keys() == before.tensors.keys()
            name = "blk.0.ffn_gate.weight"
            assert np.array_equal(values(after, name), values(before, name))
        assert verify(out).kind == "zse"
