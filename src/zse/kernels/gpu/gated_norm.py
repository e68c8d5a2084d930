"""The norm behind a recurrent layer with its gate, on a GPU: a part of a row is a warp's, a long one a block's, and stays
in registers."""

from zse import kernel as zl
from zse.kernels.gated_norm import checked, forms
from zse.kernels.gpu.rows import block_sum, inverse_rms, square_sum
from zse.kernels.gpu.state import four, sigmoid
from zse.kernels.op import check, require
from zse.runtime.args import Args

# threads of a part → (threads of a block, vectors of four numbers a thread)
SHAPES = {32: (128, 4), 512: (512, 8)}


class PartParams(zl.Record):
    """x, z f32, rows x_stride and z_stride apart, of parts * part numbers. weight f32 [part], or one for each part
    (weight_step = part, else 0). WIDE: threads of a part. ALIGNED: rows of x and z begin at multiples of 16 bytes."""

    x: zl.Ptr[zl.f32, "const"]
    z: zl.Ptr[zl.f32, "const"]
    weight: zl.Ptr[zl.f32, "const"]
    out: zl.Ptr[zl.bf16]
    x_stride: zl.i32
    z_stride: zl.i32
    part: zl.i32
    parts: zl.i32
    weight_step: zl.i32
    eps: zl.f32
    ACTIVATION: zl.static
    GATE_FIRST: zl.static
    WIDE: zl.static
    ALIGNED: zl.static


@zl.inline
def gate_of(z, ACTIVATION):
    """silu(z) or sigmoid(z)."""
    return z * sigmoid(z) if ACTIVATION == "silu" else sigmoid(z)


@zl.kernel
def gated_norm_gpu(p: PartParams):
    """Grid (parts / those of a block, tokens)."""
    zl.grid_launch_dependents()
    scratch = zl.shared_array(zl.f32, zl.target.threads // zl.target.warp)
    together = zl.target.threads // p.WIDE
    index = zl.block_index(0) * together + zl.thread_index() // p.WIDE
    token = zl.i64(zl.block_index(1))
    thread = zl.thread_index() % p.WIDE
    places = [(thread + v * p.WIDE) * 4 for v in zl.static(range(SHAPES[p.WIDE][1]))]
    inside = index < p.parts
    part = min(index, p.parts - 1) * p.part
    xs = [zl.f32.x(4)(0) for _ in places]
    gates = [zl.f32.x(4)(0) for _ in places]
    zl.grid_wait()
    for v in zl.static(range(len(places))):
        if places[v] < p.part:
            xs[v] = four(p.x + (token * p.x_stride + (part + places[v])), p.ALIGNED)
            gates[v] = gate_of(four(p.z + (token * p.z_stride + (part + places[v])), p.ALIGNED), p.ACTIVATION)
            if p.GATE_FIRST:
                xs[v] = xs[v] * gates[v]
    squares = square_sum(xs)
    total = zl.warp_sum(squares) if p.WIDE == 32 else block_sum(squares, scratch)
    inverse = inverse_rms(total, p.part, p.eps)
    for v in zl.static(range(len(places))):
        if inside and places[v] < p.part:
            weight = zl.load(p.weight + (min(index, p.parts - 1) * p.weight_step + places[v]), 4)
            value = xs[v] * inverse * weight
            if not p.GATE_FIRST:
                value = value * gates[v]
            zl.store(p.out + (token * (p.parts * p.part) + (part + places[v])), zl.convert(value, zl.bf16))


def record(
    recorder, x, z, weight, out, eps: float, groups: int = 1, gate_first: bool = False, activation: str = "silu"
) -> None:
    """gated_norm() on a GPU: out bf16, parts of a multiple of 4 numbers."""
    tokens, width = out.shape
    form, args = checked(x, z, weight, out, eps, groups, gate_first, activation)
    part = width // groups
    check("gated_norm out", out, "bf16", tokens, width)
    aligned = all(args[f"{name}_stride"] % 4 == 0 and args[name].offset % 16 == 0 for name in ("x", "z"))
    require(part % 4 == 0, f"gated_norm on a GPU: parts of {part} numbers are no multiple of 4")
    wide = next(wide for wide, (_, vectors) in SHAPES.items() if part <= wide * vectors * 4)
    together = SHAPES[wide][0] // wide
    recorder.launch(
        f"{form}_w{wide}{'' if aligned else '_any'}",
        Args(**args, out=out, parts=groups),
        (-(-groups // together), tokens),
    )


def variants(target) -> list[zl.Variant]:
    """Order x activation x threads of a part x alignment."""
    return [
        zl.Variant(
            f"{form}_w{wide}{'' if aligned else '_any'}",
            gated_norm_gpu,
            {**fixed, "WIDE": wide, "ALIGNED": aligned},
            threads=threads,
        )
        for form, fixed in forms()
        for wide, (threads, _) in SHAPES.items()
        for aligned in (True, False)
    ]
