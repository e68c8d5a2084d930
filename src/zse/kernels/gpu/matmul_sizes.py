"""Matrix products of a real model's sizes, for timing: those of Qwen2.5-7B, in three formats, for some numbers of
tokens."""

from zse.kernels.gpu.matmul_cases import case_of, tolerance
from zse.kernels.host import HostWeight
from zse.kernels.op import HostArray, HostFp8Activation, Tolerance
from zse.lazy import numpy as np
from zse.quant.pack import f32_to_bf16
from zse.quant.scheme import AffineScheme, DenseScheme, Fp8Scheme

# name: rows, columns, epilogue
SHAPES = {
    "qkv": (4608, 3584, "store"),
    "o": (3584, 3584, "accumulate"),
    "gate_up": (37888, 3584, "silu"),
    "down": (3584, 18944, "accumulate"),
    "head": (152064, 3584, "store"),
}
SCHEMES = (
    AffineScheme(4, 128, True),
    Fp8Scheme("row"),
    DenseScheme("bf16"),
    AffineScheme(4, 128, False),
    AffineScheme(8, 32, True),
)
TOKENS = (1, 4, 8, 16, 64, 256)
COMPARED = 64  # rows at the beginning of the weight (and of its second half) that are held against float64


def random_planes(rng, rows: int, width: int, scheme):
    """A HostWeight of random bits in seconds: any q, scales near 1/16 (e4m3 and bf16: values near 1)."""
    layout = scheme.in_memory["gpu"]
    planes = {}
    for plane in scheme.planes(rows, width, layout):
        raw = np.frombuffer(rng.bytes(plane.nbytes), np.uint8)
        if plane.dtype == "f16":  # exponent 2**-5, offsets negative
            made = (raw.view(np.uint16) & 0x03FF) | (0xA800 if plane.name == "offset" else 0x2800)
        elif plane.dtype == "f32":
            made = (raw.view(np.uint32) & 0x007FFFFF) | 0x3D000000
        elif plane.dtype == "bf16":
            made = (raw.view(np.uint16) & 0x80FF) | 0x3F00
        elif plane.dtype == "e4m3":
            made = raw & 0xBF  # below 2: no NaN
        else:
            made = raw
        made = (
            made.view(np.float16) if plane.dtype == "f16" else made.view(np.float32) if plane.dtype == "f32" else made
        )
        planes[plane.name] = made.reshape(plane.shape)
    return HostWeight((rows, width), scheme, planes, layout)


def some_rows(weight, first: int, count: int):
    """The weight of `count` rows from `first` on, both multiples of 16."""
    step = 16 if weight.layout == "r16" else 1
    planes = {}
    for name, plane in weight.planes.items():
        whole = weight.scheme in (Fp8Scheme("tensor"), Fp8Scheme("block")) and name == "scale"
        planes[name] = plane if whole else plane[first // step : (first + count) // step]
    return HostWeight((count, weight.shape[1]), weight.scheme, planes, weight.layout)


def sizes(rng, family: str = "gpu"):
    """(case, expected) for every scheme, shape and number of tokens; the head only for one token."""
    for scheme in SCHEMES:
        for name, (rows, width, epilogue) in SHAPES.items():
            if name == "head" and scheme.element == "int4":
                continue  # heads are not stored in 4 bits
            weight = random_planes(rng, rows, width, scheme)
            numbers = some_rows(weight, 0, COMPARED).dequantize()
            largest, spread = float(np.abs(numbers).max()), float(numbers.std()) * width**0.5
            for tokens in TOKENS if name != "head" else (1,):
                # So that the results are near 2, as a model's are.
                x = (rng.standard_normal((tokens, width)) * (2 / spread)).astype(np.float32)
                # What the engine does: above 8 tokens fp8 weights get fp8 activations.
                fp8 = scheme.element == "e4m3" and tokens > 8
                a = HostFp8Activation.quantize(x) if fp8 else HostArray("bf16", f32_to_bf16(x))
                gated = epilogue == "silu"
                # Up to 8 tokens nothing but the result is rounded.
                near = (
                    Tolerance(2e-4 * width**0.5 if not gated else 0.05, 2**-7 if gated else 1e-3, "f32 sums")
                    if tokens <= 8
                    else tolerance(scheme, a.dequantize() if fp8 else a.wide(), largest, gated, gated)
                )
                name_of = f"{scheme} {name} {tokens} x {rows} x {width}"
                case = case_of(name_of, weight, a, epilogue, near, rng, {"max_tokens": tokens})
                before = case.outputs["out"].inout

                def expected(a=a, weight=weight, before=before, gated=gated, rows=rows):
                    values = a.dequantize() if isinstance(a, HostFp8Activation) else a.wide().astype(np.float64)
                    y = values @ some_rows(weight, 0, COMPARED).dequantize().astype(np.float64).T
                    if gated:
                        up = values @ some_rows(weight, rows // 2, COMPARED).dequantize().astype(np.float64).T
                        y = y / (1 + np.exp(-y)) * up
                    if before is not None:
                        y = y + before[:, :COMPARED]
                    return {"out": (np.s_[:, :COMPARED], y)}

                yield case, expected
