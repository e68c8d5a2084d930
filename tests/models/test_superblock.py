"""GGUF's K types keep the scales of their blocks: on a CPU bit for bit, in a `.zse` too, on a GPU rounded to f16."""

import numpy as np
import pytest
import tiny  # noqa: F401 (its path to formats_build)
from formats_build import random_blocks
from test_lut4 import file_of  # noqa: F401

from zse.formats import opening
from zse.formats.convert import convert
from zse.formats.gguf_blocks import dequantize, to_scheme
from zse.formats.matrix import Rows
from zse.formats.verify import verify
from zse.models.load import load_model, plan_model
from zse.quant.scheme import AffineScheme, parse_scheme
from zse.quant.superblock import SUPERBLOCK, SUPERBLOCK_SCHEMES, SuperblockScheme

BITS = {"Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625}
TYPES = dict(embed="Q5_K", q="Q4_K", k="Q5_K", v="Q6_K", o="Q4_K", gate="Q5_K", up="Q5_K", down="Q6_K", head="Q4_K")


def planes_of(weight) -> dict:
    dtypes = {"u8": np.uint8, "f16": np.float16}
    return {
        name: np.frombuffer(plane.view(), dtypes[plane.dtype]).reshape(plane.shape)
        for name, plane in weight.planes.items()
    }


@pytest.mark.parametrize("type", BITS)
@pytest.mark.parametrize("rows, columns", [(1, 256), (37, 768)])
def test_blocks_are_taken_over_bit_for_bit(type, rows, columns):
    raw, shape = random_blocks(np.random.default_rng(), type, rows * columns // SUPERBLOCK), (rows, columns)
    arrays = to_scheme(type, raw, shape)
    scheme, planes = arrays.scheme, arrays.pack()
    assert parse_scheme(scheme.name) == scheme and 8 * scheme.nbytes(16, columns) == BITS[type] * 16 * columns
    wanted = dequantize(type, raw, shape)
    for found in (arrays.dequantize(), scheme.dequantize(planes, *shape)):
        assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32))
    again = scheme.unpack(planes, *shape).pack()
    assert all(np.array_equal(again[name], plane) for name, plane in planes.items())
    places = np.random.default_rng().permutation(rows)
    taken = scheme.take(planes, places, rows, columns, "r16", 0)
    assert np.array_equal(scheme.dequantize(taken, *shape), wanted[places])
    for plane in scheme.planes(*shape):
        assert planes[plane.name].shape == plane.shape and planes[plane.name].nbytes == plane.nbytes
        with pytest.raises(ValueError, match=plane.name):
            scheme.unpack(planes | {plane.name: planes[plane.name][:0]}, *shape)
    if type != "Q6_K":  # the fields as docs/zse-format.md says
        words = planes["scale"].view("<u4")[..., 0].transpose(0, 3, 1, 2).reshape(-1, columns // SUPERBLOCK, 3)
        assert not words[rows:].any()
        number = sum(words[:rows, :, j].astype(object) % 2**30 << 30 * j for j in range(3))
        last = sum((words[:rows, :, j].astype(object) >> 30) << 2 * j for j in range(3))
        for i in range(8):
            assert np.array_equal(arrays.sc.reshape(rows, -1, 8)[..., i], (number >> 6 * i) % 64)
            m = (number >> 6 * (8 + i)) % 64 if i < 7 else last
            assert np.array_equal(arrays.m.reshape(rows, -1, 8)[..., i], m)


@pytest.mark.parametrize("scheme", SUPERBLOCK_SCHEMES, ids=str)
def test_quantizing(scheme):
    rng = np.random.default_rng()
    w = (rng.standard_normal((5, 512)) * np.exp(rng.standard_normal((5, 1)))).astype(np.float32)
    w[1, :32], w[2, 32:64] = np.abs(w[1, :32]), 0
    error = scheme.dequantize(scheme.quantize(w), 5, 512) - w
    # Half a step of the numbers, and of the scales: 1/126 of a super-block's largest.
    assert np.abs(error).max() <= np.abs(w).max() * (1.1 / (1 << scheme.bits) + 2 / 63)
    assert np.sqrt((error**2).mean()) < {4: 0.11, 5: 0.06, 6: 0.035}[scheme.bits] * w.std()
    for bad in (np.nan, np.inf, 3e38):
        with pytest.raises(ValueError, match="NaN or infinite|does not fit"):
            scheme.quantize(np.full((1, 256), bad, np.float32))


def test_a_file_is_loaded_bit_for_bit(device, file_of, tmp_path):  # noqa: F811
    path = file_of(TYPES)
    convert(path, tmp_path / "m.zse")
    convert(path, tmp_path / "gpu.zse", layout="rows")
    assert verify(tmp_path / "m.zse").num_tensors and verify(tmp_path / "gpu.zse").num_tensors
    with opening.open_model(path) as source, opening.open_model(tmp_path / "m.zse") as converted:
        plan = plan_model(source)
        model, same = load_model(device, plan), load_model(device, plan_model(converted))
        model.wait(), same.wait()
        for matrix in plan.matrices:
            parts = [part.info for part in matrix.parts]
            arrays = [to_scheme(info.type, source.read(info), info.shape) for info in parts]
            assert isinstance(matrix.scheme, SuperblockScheme)
            made = [part.pack() for part in arrays]
            for name, plane in planes_of(model.weights[matrix.name]).items():
                wanted = np.concatenate([planes[name] for planes in made])
                assert np.array_equal(plane, wanted), (matrix.name, name)
                assert np.array_equal(planes_of(same.weights[matrix.name])[name], wanted), (matrix.name, name)
        narrow = plan_model(source, family="gpu").matrices
        assert {type(matrix.scheme) for matrix in narrow} == {AffineScheme}
        with opening.open_model(tmp_path / "gpu.zse") as stored:
            for part in (part for matrix in narrow for part in matrix.parts):
                info, mine = part.info, stored.tensors[part.info.name]
                found = Rows(stored, mine, 0, info.shape[0]).f32()
                wanted = to_scheme(info.type, source.read(info), info.shape).narrowed().dequantize()
                assert mine.scheme == info.scheme.narrow and np.array_equal(found, wanted)
