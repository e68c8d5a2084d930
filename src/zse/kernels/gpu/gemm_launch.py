"""Matrix products of more than a few tokens: their launches."""

from typing import Any, NamedTuple

from zse.dtypes import ITEM_BYTES
from zse.kernels.activation import ALPHA, CLAMPED
from zse.kernels.gpu import dequantize, gemm, gemm_portable, gemm_w4a8
from zse.kernels.gpu.gemm import (
    FINE,
    PUSH,
    SKINNY,
    W4A8_FEW,
    direct,
    is_fp8,
    is_skinny,
    kind_of,
    symbol_of,
    w4a8_symbol,
)
from zse.kernels.gpu.gemm_parts import ACCUMULATE, PARTIAL_BYTES, SLICE_BYTES, STORE, STORE_BF16, depth_of
from zse.kernels.gpu.r16 import HIGH_BYTES, arguments, q_bytes, stage_blocks
from zse.kernels.op import require
from zse.quant.scheme import DenseScheme
from zse.runtime.args import Args
from zse.runtime.symbol import ceil_div
from zse.tensor import Tensor, Weight

PIECE_BYTES = 32 << 20  # of bf16 weights made at a time: they stay in an L2 of 40 MB and more
LOG2E = 1.4426950408889634
# act(x) = x * sigmoid(y): exp(-y) = 2 ** (linear * x + cubic * x**3)
GELU = -2 * 0.7978845608028654 * LOG2E
GATES = {"silu": (-LOG2E, 0.0), "gelu_tanh": (GELU, GELU * 0.044715)}
EXPERT_GATES = GATES | {CLAMPED: (-ALPHA * LOG2E, 0.0)}  # of experts' kernels


class Product(NamedTuple):
    """out = a @ weight.T + bias (f32 or bf16), out f32 += it, or, gated, out bf16 = act(a @ gates.T) * (a @ ups.T).

    a: bf16 [M, K], or Fp8Activation for fp8 and int4 weights. gated: None, "silu" or "gelu_tanh"; the weight's first half are
    the gates. max_tokens: the most tokens this recording will run with. kind: kind_of() of the weight."""

    device: Any
    a: Any
    weight: Weight
    out: Tensor
    bias: Tensor | None
    accumulate: bool
    gated: str | None
    max_tokens: int
    kind: object

    @property
    def cols(self) -> int:
        """Columns of out that the weight makes."""
        return self.weight.shape[0] // 2 if self.gated else self.weight.shape[0]

    @property
    def group(self) -> int:
        """Of integers, 0: a row; of others 0."""
        return self.weight.scheme.group if isinstance(self.kind, int) else 0

    def common(self, first: int = 0) -> dict[str, Any]:
        """The arguments of every kernel, which writes columns of out from `first` on."""
        linear, cubic = EXPERT_GATES[self.gated] if self.gated else (0.0, 0.0)
        return dict(
            bias=None if self.bias is None else _from(self.bias, first),
            out=_from(self.out, first),
            tokens=self.out.shape[0],
            cols=self.cols,
            has_bias=int(self.bias is not None),
            mode=ACCUMULATE if self.accumulate else STORE_BF16 if self.out.dtype == "bf16" else STORE,
            linear=linear,
            cubic=cubic,
        )

    def fp8_scales(self) -> dict[str, Any]:
        """Scales of the activations and of the weights, where these are fp8."""
        fp8 = is_fp8(self.kind)
        return dict(
            a_scale=self.a.scale if fp8 else None,
            w_scale=self.weight.planes["scale"] if fp8 else None,
            per_row=int(fp8 and self.weight.scheme.scaling == "row"),
        )

    def token_map(self, box: int):
        """The tensor map of the activations, as many rows as the recording may use."""
        fp8 = is_fp8(self.kind)
        q = self.a.q if fp8 else self.a
        return self.device.tensor_map(q, (box, 128 if fp8 else 64), swizzle=128, dims=(self.max_tokens, q.shape[1]))

    def integer_maps(self, tiles: int, bt: int):
        """Tensor maps of q and of high (q's again where there is none), as u32 words: boxes of `tiles` tiles and a
        stage's blocks, of products of `bt` tokens a tile."""
        planes, bits = self.weight.planes, self.weight.scheme.bits
        blocks = stage_blocks(bits, bt)

        def words(plane, block_bytes: int):
            count = plane.nbytes // plane.shape[0] // 4
            whole = Tensor(plane.buffer, (plane.shape[0], count), "u32", plane.offset)
            return self.device.tensor_map(whole, (tiles, blocks * block_bytes // 4))

        q = words(planes["q"], q_bytes(bits))
        return q, words(planes["high"], HIGH_BYTES[bits]) if "high" in planes else q

    def choice(self, kind: object = None) -> tuple[gemm.TileChoice, int]:
        """The tile with the parts of k, and the grid. kind: other than the weight's."""
        sms, width = self.device.num_sms, self.weight.shape[1]
        found = gemm.choose(kind or self.kind, bool(self.gated), self.max_tokens, self.cols, width, sms, self.group)
        made = found.tile.rows // 2 if self.gated else found.tile.rows
        return found, min(sms, -(-self.max_tokens // found.tile.tokens) * -(-self.cols // made) * found.splits)


def scratch_of(device) -> dict[str, Any]:
    """partial: f32 sums of parts of tiles; counters: i32, zero between launches."""
    sms = device.num_sms
    return dict(
        partial=device.scratch("gemm partial", sms * PARTIAL_BYTES), counters=device.scratch("gemm counters", sms * 32)
    )


def slices_of(device) -> dict[str, Any]:
    """partial: f32 sums of parts of gemm_skinny's tiles, zero between launches, of other weights than integers."""
    return dict(partial=device.scratch("gemm slices", device.num_sms * SLICE_BYTES), counters=None)


def reserve(device, weight, activation: str, gated: bool, max_tokens: int) -> None:
    """Allocate what launch() works in for products with this weight of up to `max_tokens` tokens. activation: "bf16", or
    "fp8" with or without sums."""
    activation = "fp8" if activation.startswith("fp8") else activation
    if not gemm.takes(device, weight, activation, gated, max_tokens):
        return
    if gemm.has_wgmma(device):
        scratch_of(device)
        slices_of(device)
    if not direct(device, weight, activation, gated, max_tokens) and weight.scheme.element != "bf16":
        _piece_of(device, weight, gated)


def _piece_of(device, weight, gated: bool) -> tuple[Any, int]:
    """(the place of the bf16 pieces of a weight, the columns that one makes)."""
    width, halves = weight.shape[1], 2 if gated else 1
    cols = weight.shape[0] // halves
    step = min(cols, max(256, PIECE_BYTES // (2 * width * halves) // 256 * 256))
    return device.scratch("bf16 piece", max(PIECE_BYTES, 2 * width * step * halves)), step


def launch(
    recorder, a, weight, out, bias=None, *, accumulate: bool = False, gated: str | None = None, max_tokens: int
) -> None:
    """Record a Product; the arguments are its. gemm.takes() must be true; shapes are the caller's to check."""
    require(gated is None or gated in GATES, f"matmul_gated: kind {gated!r}; supported: {', '.join(GATES)}")
    kind = kind_of(weight.scheme)
    product = Product(recorder.device, a, weight, out, bias, accumulate, gated, max_tokens, kind)
    integer = isinstance(kind, int)
    if not direct(product.device, weight, a.dtype, gated is not None, max_tokens):
        _launch_pieces(recorder, product)
    elif integer and a.dtype == "fp8":
        _launch_w4a8(recorder, product)
    elif is_skinny(kind, max_tokens, product.group):
        _launch_skinny(recorder, product)
    elif integer:
        _launch_r16(recorder, product)
    else:
        _launch_wgmma(recorder, product)


def _launch_r16(recorder, product: Product) -> None:
    (tile, splits, _), grid = product.choice()
    w_map, high_map = product.integer_maps(tile.rows // 16 // (2 if product.gated else 1), tile.tokens)
    args = Args(
        **product.common(),
        **scratch_of(product.device),
        **arguments(product.weight),
        a_map=product.token_map(tile.tokens),
        w_map=w_map,
        high_map=high_map,
        splits=splits,
    )
    fine = product.group == FINE
    recorder.launch(symbol_of("gemm", product.kind, tile.tokens, tile.rows, bool(product.gated), fine), args, grid)


def _launch_w4a8(recorder, product: Product) -> None:
    device, weight, gated, most = product.device, product.weight, bool(product.gated), product.max_tokens
    groups = weight.shape[1] // gemm_w4a8.DEPTH
    shift_steps = -(-groups // gemm_w4a8.SHIFTS)
    steps = shift_steps + groups
    form = next((form for form in W4A8_FEW if form[0] >= most), None)
    if form:
        (bt, mt), splits = form, 1
        total = steps * -(-product.cols // (mt * (64 if gated else 128)))
        share = ceil_div(total, device.num_sms)
        grid = -(-total // share)
    else:
        (tile, splits, _), grid = product.choice("w4a8")
        bt, mt, share = tile.tokens, 0, 0
    tiles = (mt or 1) * (4 if gated else 8)

    def plane(name: str, box: tuple[int, int], dtype: str):
        held = weight.planes[name]
        columns = held.nbytes // held.shape[0] // ITEM_BYTES[dtype]
        return device.tensor_map(Tensor(held.buffer, (held.shape[0], columns), dtype, held.offset), box)

    q, sums = product.a.q, product.a.sums
    require(sums is not None, "matmul: int4 weights take fp8 activations with their sums")
    has_offset = not weight.scheme.symmetric
    args = Args(
        **product.common(),
        **(slices_of(device) if form else scratch_of(device)),
        a_map=device.tensor_map(q, (bt, gemm_w4a8.DEPTH), swizzle=128, dims=(most, q.shape[1])),
        sums_map=device.tensor_map(
            sums, (bt, gemm_w4a8.SHIFTS), swizzle=gemm_w4a8.SUM_BYTES, dims=(most, groups), strides=(sums.shape[1] * 2,)
        ),
        w_map=plane("q", (tiles, 16 * gemm_w4a8.ROW_BYTES // 4), "u32"),
        scale_map=plane("scale", (tiles, 16), "f16"),
        shift_map=plane("offset" if has_offset else "scale", (tiles, 16 * gemm_w4a8.BOX), "f16"),
        a_scale=product.a.scale,
        steps=steps,
        shift_steps=shift_steps,
        splits=splits,
        share=share,
        shift_scale=1.0 if has_offset else gemm_w4a8.MIDDLE,
    )
    recorder.launch(w4a8_symbol(bt, mt, gated), args, grid)


def _launch_wgmma(recorder, product: Product, first: int = 0, early: bool = True) -> None:
    """Columns of out from `first`, as many as the weight makes. early: nobody writes the weight while this runs."""
    weight = product.weight
    (tile, splits, _), grid = product.choice()
    box = (tile.rows // 2 if product.gated else tile.rows, 128 if is_fp8(product.kind) else 64)
    args = Args(
        **product.common(first),
        **scratch_of(product.device),
        **product.fp8_scales(),
        a_map=product.token_map(tile.tokens),
        w_map=product.device.tensor_map(weight.planes["w"], box, swizzle=128),
        stride=product.out.shape[1],
        width=weight.shape[1],
        splits=splits,
        early=int(early),
    )
    recorder.launch(gemm.wgmma_symbol(product.kind, tile, bool(product.gated)), args, grid)


def _launch_pieces(recorder, product: Product) -> None:
    """Pieces of the weight as bf16, each multiplied when it is made. bf16 weights are multiplied as they are."""
    device, weight, out, gated = product.device, product.weight, product.out, product.gated
    width, cols, halves = weight.shape[1], product.cols, 2 if gated else 1
    whole = weight.scheme.element == "bf16"
    place, step = (None, cols) if whole else _piece_of(device, weight, bool(gated))
    for first in range(0, cols, step):
        made = min(step, cols - first)
        if whole:
            w = weight.planes["w"]
        else:
            w = Tensor(place, (made * halves, width), "bf16")
            for half in range(halves):
                part = Tensor(place, (made, width), "bf16", half * 2 * width * made)
                dequantize.launch(recorder, weight, half * cols + first, made, part)
        piece = product._replace(weight=Weight(w.shape, DenseScheme("bf16"), {"w": w}, "rows"), kind="bf16")
        if gemm.has_wgmma(device) and made % 2 == 0 and out.shape[1] % 2 == 0:
            _launch_wgmma(recorder, piece, first, early=whole)
            continue
        tile = gemm_portable.TILE
        args = Args(**piece.common(first), a=product.a, w=w, stride=out.shape[1], width=width)
        recorder.launch(gemm.portable(bool(gated)), args, (ceil_div(out.shape[0], tile), -(-made // (tile // halves))))


def can_push(device, weight, activation: str, max_tokens: int) -> bool:
    """Whether launch_push() takes this product."""
    box = SKINNY["bf16"][-1][0]
    is_bf16 = kind_of(weight.scheme) == "bf16" and activation == "bf16" and weight.shape[0] % 16 == 0
    return (
        is_bf16 and SKINNY["bf16"][-2][0] < max_tokens <= box and direct(device, weight, activation, False, max_tokens)
    )


def launch_push(recorder, a, weight, bias, slots: dict[str, Any], max_tokens: int) -> None:
    """Record a @ weight.T + bias into slots of this rank and of the other one, as gemm_push says: "mine" and "theirs", addresses."""
    out = Tensor(None, (a.shape[0], weight.shape[0]), "f32")
    _launch_skinny(recorder, Product(recorder.device, a, weight, out, bias, False, None, max_tokens, "bf16"), slots)


def _launch_skinny(recorder, product: Product, slots: dict[str, Any] | None = None) -> None:
    device, weight, kind, gated = product.device, product.weight, product.kind, product.gated
    width, cols = weight.shape[1], product.cols
    box, wg = next(form for form in SKINNY[kind] if form[0] >= product.max_tokens)
    steps = -(-width // depth_of(kind, box))
    total = steps * -(-cols // (wg * (32 if gated else 64)))
    share = ceil_div(total, device.num_sms)
    args = Args(
        **product.common(),
        **(scratch_of(device) if isinstance(kind, int) else slices_of(device)),
        **product.fp8_scales(),
        a_map=product.token_map(box),
        steps=steps,
        share=share,
    )
    if isinstance(kind, int):
        args["w_map"], args["high_map"] = product.integer_maps(wg * (2 if gated else 4), box)
        args |= arguments(weight)
    else:
        depth, item = depth_of(kind, box), 1 if is_fp8(kind) else 2
        box_of, options = (wg * 64, depth), {}
        if gated:  # tiles of 8 gates and their 8 ups in turn
            box_of = (wg * 4, 2, 8, depth)
            strides = (8 * width * item, cols * width * item, width * item)
            options = dict(dims=(cols // 8, 2, 8, width), strides=strides)
        args["w_map"] = args["high_map"] = device.tensor_map(weight.planes["w"], box_of, swizzle=128, **options)
        args |= dict(scale=None, offset=None, blocks=0, groups=0, group_blocks=1, half_step=0, has_offset=0, center=0.0)
    if slots is not None:
        args |= slots | {"out": None}
    symbol = symbol_of("gemm_skinny", kind, box, wg * 64, bool(gated)) if slots is None else PUSH
    recorder.launch(symbol, args, -(-total // share))


def _from(tensor: Tensor, first: int) -> Tensor:
    """The tensor's memory from element `first` of its rows."""
    return tensor._replace(offset=tensor.offset + first * ITEM_BYTES[tensor.dtype]) if first else tensor
