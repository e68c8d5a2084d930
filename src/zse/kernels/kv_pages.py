"""Keys and values in 8 bits: how a head's part of a page lies in memory, and how a CPU packs and unpacks it.

A *packed* head is 16 * head_dim bytes of values, in the order that unpacked pages have, then 16 f32 scales: one for
each token, so that a token is written once and never rescaled, and a page stays one piece of memory. value = scale *
stored. int8: scale = peak / 127. e4m3 (OCP 8-bit floating point): scale = peak / 448, its largest number.

A Tensor of packed pages is [pages, kv_heads, 16 * head_dim + 64] of dtype "i8" or "e4m3".

Of multi-head latent attention a page has 16 latents, each rank numbers and the rotary numbers of the key that turns: a
key whole, a value without the latter. Its Tensor is [pages, 16, rank + rotary] on every device, or packed [pages, 16 *
(rank + rotary) + 128]: the scales of the latents, then those of the keys that turn, whose sizes differ."""

from typing import Any

from zse import kernel as zl
from zse.dtypes import ITEM_BYTES
from zse.lazy import numpy as np
from zse.quant import pack

BLOCK = 16  # tokens: what kernels address of a sequence (docs/glossary.md)
SCALE_BYTES = 4 * BLOCK
PACKED = {"i8": zl.i8, "e4m3": zl.e4m3}
LARGEST = {"i8": 127.0, "e4m3": 448.0}
TRANSPOSED = {"cpu": True, "gpu": False}  # whether a page's keys are [head_dim, BLOCK], by kind of device
# What widen() and narrow_e4m3() give is smaller by these powers of two: an e4m3's bits stand where an f32 and an f16,
# whose exponents are biased by 127 and 15 instead of 7, have sign, exponent and fraction. Exact, subnormal numbers too.
E4M3_IN_F32 = 2.0**120
E4M3_IN_F16 = 2.0**8


@zl.inline
def widen(values, KV):
    """Stored values as f32; e4m3: as 1 / E4M3_IN_F32 of them."""
    if KV is zl.e4m3:
        bits = zl.convert(zl.bitcast(values, zl.i8), zl.i32) << 20
        wide = zl.bitcast(bits & -0x78100000, zl.f32)
    else:
        wide = zl.convert(values, zl.f32)
    return wide


@zl.inline
def narrow_e4m3(values):
    """e4m3 as f16, 1 / E4M3_IN_F16 of them."""
    return zl.bitcast(zl.convert(zl.bitcast(values, zl.i8), zl.i16) << 7 & -0x4001, zl.f16)


@zl.inline
def pack_head(values, out, scale, head_dim, lanes, KV):
    """One token's f32 values[head_dim] as bytes out[head_dim], and its scale. As in quantize_group the peak is found on
    bit patterns, so that NaN and infinity survive into the scale."""
    top = zl.i32.x(lanes)(0)
    for d in range(0, head_dim, lanes):
        top = max(top, zl.bitcast(zl.load(values + d, lanes), zl.i32) & 0x7FFFFFFF)
    peak = zl.bitcast(zl.reduce_max(top), zl.f32)
    largest = 448.0 if KV is zl.e4m3 else 127.0
    inverse = zl.where(peak > 1e-30, largest / peak, 0.0)
    scale[0] = peak / largest
    for d in range(0, head_dim, lanes):
        value = zl.load(values + d, lanes) * inverse
        if KV is zl.e4m3:
            # Normal numbers (2**-6 and up) keep 3 of 23 fraction bits, to nearest even; below, multiples of 2**-9.
            bits = zl.bitcast(value, zl.u32)
            size = bits & 0x7FFFFFFF
            normal = ((size + 0x7FFFF + (size >> 20 & 1)) >> 20) - 960
            small = zl.convert(zl.convert(zl.round_even(zl.bitcast(size, zl.f32) * 512.0), zl.i32), zl.u32)
            code = min(zl.where(size < 0x3C800000, small, normal), 0x7E) | bits >> 24 & 0x80
            zl.store(out + d, zl.convert(code, zl.u8))
        else:
            zl.store(out + d, zl.narrow_s8(zl.convert(zl.round_even(value), zl.i32)))


def head_nbytes(head_dim: int, dtype: str) -> int:
    """Bytes of one head's keys, or values, in a page of `dtype` (a Tensor's)."""
    return BLOCK * head_dim * ITEM_BYTES[dtype] + (SCALE_BYTES if dtype in PACKED else 0)


def pages_shape(head_dim: int, dtype: str, keys: bool, family: str) -> tuple[int, ...]:
    """What stands behind [pages, kv_heads] in the shape of a Tensor of keys or of values, for a family of devices."""
    if dtype in PACKED:
        return (head_nbytes(head_dim, dtype),)
    return (head_dim, BLOCK) if keys and TRANSPOSED[family] else (BLOCK, head_dim)


def latent_shape(width: int, dtype: str) -> tuple[int, ...]:
    """What stands behind [pages] in the shape of a Tensor of latents of `width` numbers a token."""
    return (BLOCK * width + 2 * SCALE_BYTES,) if dtype in PACKED else (BLOCK, width)


def head_dim_of(values: Any) -> int:
    """head_dim of a Tensor (or array) of values."""
    return values.shape[3] if len(values.shape) == 4 else (values.shape[2] - SCALE_BYTES) // BLOCK


# -- on the host, for references and tests


def pack_pages(values, dtype: str, keys: bool, family: str = "cpu"):
    """f32 [P, Hk, 16, D] as packed pages [P, Hk, bytes], NumPy's int8, or uint8 for e4m3. Tokens with a NaN have a NaN
    as their scale."""
    values = np.asarray(values, np.float32)
    scale = np.abs(values).max(axis=3) / np.float32(LARGEST[dtype])
    stored = values / np.where(scale == 0, np.float32(1), scale)[..., None]
    if dtype == "i8":
        stored = np.rint(np.nan_to_num(stored)).astype(np.int8).view(np.uint8)
    else:
        stored = pack.f32_to_e4m3(stored)
    if keys and TRANSPOSED[family]:
        stored = stored.swapaxes(2, 3)
    head = values.shape[:2]
    scales = np.ascontiguousarray(scale).view(np.uint8).reshape(*head, -1)
    return np.concatenate([stored.reshape(*head, -1), scales], axis=2).view(np.int8 if dtype == "i8" else np.uint8)


def unpack_pages(packed, dtype: str, keys: bool, family: str = "cpu"):
    """(stored f64 [P, Hk, 16, D], scale f64 [P, Hk, 16]) of packed pages."""
    packed = np.ascontiguousarray(packed).view(np.uint8)
    scale = np.ascontiguousarray(packed[..., -SCALE_BYTES:]).view(np.float32).astype(np.float64)
    data = packed[..., :-SCALE_BYTES]
    stored = pack.e4m3_to_f32(data) if dtype == "e4m3" else np.ascontiguousarray(data).view(np.int8)
    if keys and TRANSPOSED[family]:
        stored = stored.reshape(*packed.shape[:2], -1, BLOCK).swapaxes(2, 3)
    return stored.reshape(*packed.shape[:2], BLOCK, -1).astype(np.float64), scale


def packed_error(got, initial, pages, slots, wanted, dtype: str, keys: bool, family: str, slack: float = 2e-6) -> str:
    """What is wrong with packed pages `got` where tokens with values f64 [M, Hk, D] were written over `initial` at
    pages, slots [M]; '' when nothing is. slack: error of the values before they are rounded, as a part of the token's
    peak."""
    (stored, scale), before = (unpack_pages(array, dtype, keys, family) for array in (got, initial))
    others = np.ones((len(stored), BLOCK), bool)
    others[pages, slots] = False
    for mine, old in zip((stored, scale), before, strict=True):
        if not np.array_equal(mine.swapaxes(1, 2)[others], old.swapaxes(1, 2)[others], equal_nan=True):
            return "another token's place was changed"
    stored, scale = stored[pages, :, slots], scale[pages, :, slots]
    peak = np.abs(wanted).max(axis=2)
    off = np.abs(scale - peak / LARGEST[dtype])
    if not (off <= (4 * slack + 1e-6) * scale + 1e-38).all():
        return f"scale is off by {(off / np.maximum(scale, 1e-38)).max():.2e} of itself"
    if not np.isfinite(stored).all() or np.abs(stored).max() > LARGEST[dtype]:
        return "a stored value is NaN or too large"
    step = np.broadcast_to(0.5 * scale[..., None], wanted.shape)
    if dtype == "e4m3":
        step = np.maximum(np.abs(wanted) * 2.0**-4, scale[..., None] * 2.0**-10) * (1 + 1e-5)
    error = np.abs(stored * scale[..., None] - wanted) / (step + 4 * slack * peak[..., None] + 1e-38)
    return "" if (error <= 1).all() else f"off by {error.max():.3f} of what rounding explains"
