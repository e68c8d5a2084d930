"""Matrix products of more than a few tokens: which kernel and which tiles a weight and a number of tokens get.

On Hopper, up to SKINNY_TOKENS a product is bound by reading the weights (gemm_skinny); above, by the tensor cores:
gemm_wgmma for bf16 and fp8, gemm_r16 for integers. With 132 multiprocessors a product of 1,024 tokens and 3,584 rows is
112 tiles of 128 x 256: a sixth of the chip would idle. So there are several tiles, and `choose` takes what a simple
model of measured times says is fastest: waves of units, each as long as its steps of k and its epilogue, and for few
tiles their k split into parts. The figures stand in benchmarks/LOG.md.

Elsewhere, and for weights that these kernels have no form for (f16, f32), pieces of the weight that stay in the L2
cache are turned into bf16 (dequantize) and multiplied (gemm_wgmma, gemm_portable).
"""

from typing import NamedTuple
from weakref import WeakKeyDictionary

from zse.dtypes import ITEM_BYTES
from zse.kernel import Variant
from zse.kernels.gpu import dequantize, gemm_portable, gemm_r16, gemm_skinny, gemm_wgmma, r16
from zse.kernels.gpu.gemm_parts import ACCUMULATE, PARTIAL_BYTES, STORE, STORE_BF16
from zse.kernels.op import require
from zse.quant.scheme import DenseScheme
from zse.runtime.symbol import ceil_div
from zse.tensor import Tensor, Weight

FEW_TOKENS = 8  # up to here matmul_small is faster
SKINNY_TOKENS = 64
# above, a weight that must be made bf16 first is: matmul_small would read it once per 8 tokens
PREPARED_TOKENS = 32
PIECE_BYTES = 32 << 20  # of bf16 weights made at a time: they stay in an L2 of 40 MB and more
LOG2E = 1.4426950408889634
# act(x) = x * sigmoid(y): exp(-y) = 2 ** (linear * x + cubic * x**3)
GELU = -2 * 0.7978845608028654 * LOG2E
GATES = {"silu": (-LOG2E, 0.0), "gelu_tanh": (GELU, GELU * 0.044715)}
# What a unit costs beyond its steps, us: filling the ring and a quarter of it per 8,192 elements to write; more for
# adding parts.
READ_BYTES_US = 4.1e6  # the memory's speed
UNIT_US, WRITE_US, SPLIT_US = 1.5, 2.5 / 32768, 3.0
PART_US = {False: 3.8 / 32768, True: 2.0 / 32768}  # for integers: True


class Tile(NamedTuple):
    """tokens x rows of the weight; step_us: time of 128 bytes of k (64 columns of integers), measured on an H200."""

    tokens: int
    rows: int
    step_us: float


# (kind, gated) -> tiles. Gated tiles are half gates, half ups.
TILES = {
    ("bf16", False): (
        Tile(128, 256, 0.690),
        Tile(256, 144, 0.700),
        Tile(128, 224, 0.595),
        Tile(128, 144, 0.365),
        Tile(128, 128, 0.335),
        Tile(128, 64, 0.230),
    ),
    ("bf16", True): (Tile(256, 144, 0.745), Tile(128, 256, 0.690), Tile(128, 192, 0.525), Tile(128, 144, 0.385)),
    ("e4m3", False): (
        Tile(256, 128, 0.720),
        Tile(256, 144, 0.800),
        Tile(256, 112, 0.670),
        Tile(128, 144, 0.415),
        Tile(128, 128, 0.380),
        Tile(128, 64, 0.240),
    ),
    ("e4m3", True): (Tile(256, 128, 0.780), Tile(128, 192, 0.590), Tile(128, 144, 0.440)),
    ("block", False): (Tile(256, 128, 0.850), Tile(128, 128, 0.450)),
    ("block", True): (Tile(256, 128, 0.850), Tile(128, 128, 0.450)),
    ("integer", False): (Tile(256, 128, 0.670), Tile(176, 128, 0.560), Tile(128, 128, 0.490)),
    ("integer", True): (Tile(256, 128, 0.670), Tile(128, 128, 0.490)),
}
# gemm_skinny: kind -> (tokens, warpgroups that multiply) of its forms.
SKINNY = {
    "bf16": ((16, 2), (64, 2)),
    "e4m3": ((16, 2), (64, 2)),
    "block": ((16, 2), (64, 2)),
    4: ((16, 4), (64, 3)),
    5: ((64, 3),),
    6: ((64, 3),),
    8: ((64, 3),),
}
# gemm_r16: bits -> how many scales: one a step ("wide": groups of 64 and more), one a block of 32 ("block"), or two
# ("fine").
CLASSES = {4: ("wide", "block", "fine"), 5: ("block", "fine"), 6: ("fine",), 8: ("wide", "block", "fine")}


class Scratch(NamedTuple):
    """partial: f32 sums of parts of tiles; counters: i32, zero between launches. One per device: its launches follow
    each other."""

    partial: Tensor
    counters: Tensor


_scratch: "WeakKeyDictionary[object, Scratch]" = WeakKeyDictionary()
_pieces: "WeakKeyDictionary[object, Tensor]" = WeakKeyDictionary()


def scratch_nbytes(device) -> int:
    """Device memory that the kernels of this module take once."""
    return device.num_sms * (PARTIAL_BYTES + 4 * 8)


def scratch_of(device) -> Scratch:
    """The device's scratch, made when first asked for."""
    found = _scratch.get(device)
    if found is None:
        sms = device.num_sms
        found = _scratch[device] = Scratch(
            Tensor(device.alloc(sms * PARTIAL_BYTES, "scratch"), (sms * PARTIAL_BYTES // 4,), "f32"),
            Tensor(device.alloc(sms * 32, "scratch"), (sms * 8,), "i32"),
        )
    return found


def _piece_of(device, nbytes: int) -> Tensor:
    """The place of the bf16 piece of a weight, at least this large. An outgrown one stays with the recordings that use
    it."""
    found = _pieces.get(device)
    if found is None or found.nbytes < nbytes:
        nbytes = max(nbytes, PIECE_BYTES)
        found = _pieces[device] = Tensor(device.alloc(nbytes, "scratch"), (nbytes // 2,), "bf16")
    return found


def has_wgmma(device) -> bool:
    """Only Hopper: the instructions were not carried over to later architectures."""
    return device.arch == 90


def kind_of(scheme) -> object:
    """Of the operands on Hopper: bits of an integer, "bf16", "e4m3", "block", or None where those kernels have no
    form."""
    if scheme.kind == "affine":
        return scheme.bits
    if scheme.kind == "fp8":
        return "block" if scheme.scaling == "block" else "e4m3"
    return "bf16" if scheme.dtype == "bf16" else None


def _is_fp8(kind: object) -> bool:
    return kind in ("e4m3", "block")


def wants_fp8(device, scheme, max_tokens: int) -> bool:
    """Whether products of this many tokens with such a weight take an Fp8Activation rather than bf16."""
    return has_wgmma(device) and scheme.kind == "fp8" and max_tokens > FEW_TOKENS


def _direct(device, weight, activation: str, gated: bool, max_tokens: int) -> bool:
    """Whether a Hopper kernel takes the weight as it is."""
    rows, width = weight.shape
    kind = kind_of(weight.scheme)
    if not has_wgmma(device) or max_tokens <= FEW_TOKENS or kind is None:
        return False
    if activation != ("fp8" if _is_fp8(kind) else "bf16"):
        return False
    if kind == "block" and gated and rows % 128:
        return False
    if isinstance(kind, int):
        return rows % (32 if gated else 2) == 0
    return width % (16 if _is_fp8(kind) else 8) == 0 and rows % (16 if gated else 2) == 0


def takes(device, weight, activation: str, gated: bool, max_tokens: int) -> bool:
    """Whether launch() has a kernel for this product. activation: "bf16" or "fp8"."""
    if _direct(device, weight, activation, gated, max_tokens):
        return True
    rows, width = weight.shape
    return (
        activation == "bf16"
        and max_tokens > PREPARED_TOKENS
        and device.arch >= 80
        and width % 8 == 0
        and rows % (32 if gated else 1) == 0
    )


class Choice(NamedTuple):
    tile: Tile
    splits: int
    microseconds: float


def choose(kind: object, gated: bool, tokens: int, cols: int, width: int, sms: int, group: int = 0) -> Choice:
    """The tile and the number of parts of k for out [tokens, cols], by the model of this module."""
    integer = isinstance(kind, int)
    only = 256 if integer and (kind != 4 or group == 16) else 0  # other integers have the large tile alone
    steps = -(-width // (128 if _is_fp8(kind) else 64))
    item = kind / 8 if isinstance(kind, int) else 2.0 if kind == "bf16" else 1.0
    read_us = cols * (2 if gated else 1) * width * item / READ_BYTES_US
    best = None
    for tile in TILES["integer" if integer else kind, gated]:
        if only and tile.tokens != only:
            continue
        made = tile.rows // 2 if gated else tile.rows
        tiles = -(-tokens // tile.tokens) * -(-cols // made)
        size = tile.tokens * tile.rows
        for splits in range(1, 10):
            if splits > 1 and (tiles * splits > sms or splits * 4 > steps):
                break
            waves = -(-tiles * splits // sms)
            computing = waves * (-(-steps // splits) * tile.step_us + UNIT_US + WRITE_US * size)
            time = max(read_us, computing) + 0.1 * computing  # neither hides the other quite
            if splits > 1:
                time += SPLIT_US + PART_US[integer] * size * splits
            if best is None or time < best.microseconds:
                best = Choice(tile, splits, time)
    assert best is not None
    return best


def group_class(scheme) -> str:
    """The key of CLASSES for an integer scheme: the first that fits."""
    fits = {"wide": scheme.group == 0 or scheme.group % 64 == 0, "block": scheme.group != 16, "fine": True}
    return next(name for name in CLASSES[scheme.bits] if fits[name])


def _symbol(kernel: str, kind: object, tokens: int, rows: int, gated: bool, group: str = "") -> str:
    name = f"int{kind}" if isinstance(kind, int) else str(kind)
    return f"{kernel}_{name}{'_' + group if group else ''}_{tokens}x{rows}{'_gated' if gated else ''}"


def variants(target) -> list[Variant]:
    """Every kernel of this module, and those that make bf16 of weights."""
    if not target.has("mma_sync"):
        return []
    made = dequantize.variants(target)
    made += [
        Variant(_portable(gated), gemm_portable.gemm_portable, {"GATED": gated}, threads=gemm_portable.THREADS)
        for gated in (False, True)
    ]
    if not target.has("wgmma"):
        return made
    for (kind, gated), tiles in TILES.items():
        for tile in tiles:
            if kind == "integer":
                made += [
                    _r16_variant(bits, group, tile, gated)
                    for bits, groups in CLASSES.items()
                    for group in groups
                    if tile.tokens == 256 or (bits == 4 and group != "fine")
                ]
            else:
                made.append(
                    Variant(
                        _symbol("gemm", kind, tile.tokens, tile.rows, gated),
                        gemm_wgmma.gemm_wgmma,
                        {
                            "BM": tile.tokens,
                            "BN": tile.rows,
                            "STAGES": gemm_wgmma.stages(tile.tokens, tile.rows),
                            "GATED": gated,
                            "KIND": kind,
                        },
                        threads=gemm_wgmma.THREADS,
                    )
                )
    for kind, forms in SKINNY.items():
        made += [
            Variant(
                _symbol("gemm_skinny", kind, tokens, wg * 64, gated),
                gemm_skinny.gemm_skinny,
                {"KIND": kind, "BT": tokens, "WG": wg, "STAGES": gemm_skinny.stages(kind, tokens, wg), "GATED": gated},
                threads=128 * (wg + 1),
            )
            for tokens, wg in forms
            for gated in (False, True)
        ]
    return made


def _portable(gated: bool) -> str:
    return f"gemm_portable{'_gated' if gated else ''}"


def _r16_variant(bits: int, group: str, tile: Tile, gated: bool) -> Variant:
    wg = tile.rows // 64
    return Variant(
        _symbol("gemm", bits, tile.tokens, tile.rows, gated, group),
        gemm_r16.gemm_r16,
        {
            "BITS": bits,
            "WIDE": group == "wide",
            "HALVES": 2 if group == "fine" else 1,
            "BT": tile.tokens,
            "WG": wg,
            "STAGES": gemm_r16.stages(bits, tile.tokens, wg),
            "GATED": gated,
        },
        threads=128 * (wg + 1),
    )


def launch(
    recorder, a, weight, out, bias=None, *, accumulate: bool = False, gated: str | None = None, max_tokens: int
) -> None:
    """Record out = a @ weight.T + bias (f32 or bf16), out f32 += it, or, gated, out bf16 = act(a @ gates.T) * (a @
    ups.T).

    a: bf16 [M, K], or Fp8Activation for fp8 weights. gated: "silu" or "gelu_tanh"; the weight's first half are the
    gates. max_tokens: the most tokens this recording will run with. takes() must be true; shapes are the caller's to
    check.
    """
    require(gated is None or gated in GATES, f"matmul_gated: kind {gated!r}; supported: {', '.join(GATES)}")
    if not _direct(recorder.device, weight, a.dtype, gated is not None, max_tokens):
        _launch_pieces(recorder, a, weight, out, bias, accumulate, gated, max_tokens)
        return
    kind = kind_of(weight.scheme)
    if max_tokens <= SKINNY_TOKENS and not (isinstance(kind, int) and weight.scheme.group == 16):
        _launch_skinny(recorder, a, weight, out, bias, accumulate, gated, max_tokens)
    else:
        _launch_tiles(recorder, a, weight, out, bias, accumulate, gated, max_tokens)


def _mode(out, accumulate: bool) -> int:
    return ACCUMULATE if accumulate else STORE_BF16 if out.dtype == "bf16" else STORE


def _token_map(device, a, max_tokens: int, box: int, fp8: bool):
    """The map of the activations, as many rows as the recording may use."""
    q = a.q if fp8 else a
    return device.tensor_map(q, (box, 128 if fp8 else 64), swizzle=128, dims=(max_tokens, q.shape[1]))


def _word_map(device, plane, bits_per_block: int, tiles: int):
    """The map of an integer plane as u32 words: boxes of `tiles` tiles and 64 columns."""
    words = 1
    for size in plane.shape[1:]:
        words *= size
    words //= 4
    whole = Tensor(plane.buffer, (plane.shape[0], words), "u32", plane.offset)
    return device.tensor_map(whole, (tiles, bits_per_block // 2))


def _integer_maps(device, weight, tiles: int):
    """Maps of q and of high (q's again where there is none)."""
    planes, bits = weight.planes, weight.scheme.bits
    q = _word_map(device, planes["q"], r16.q_bytes(bits), tiles)
    return q, _word_map(device, planes["high"], r16.HIGH_BYTES[bits], tiles) if "high" in planes else q


def _launch_tiles(recorder, a, weight, out, bias, accumulate: bool, gated: str | None, max_tokens: int) -> None:
    device, scheme, planes = recorder.device, weight.scheme, weight.planes
    rows, width = weight.shape
    kind = kind_of(scheme)
    if not isinstance(kind, int):
        _launch_wgmma(recorder, a, weight, out, bias, accumulate, gated, max_tokens)
        return
    cols = rows // 2 if gated else rows
    tile, splits, _ = choose(kind, gated is not None, max_tokens, cols, width, device.num_sms, scheme.group)
    linear, cubic = GATES[gated] if gated else (0.0, 0.0)
    scratch = scratch_of(device)
    q_map, high_map = _integer_maps(device, weight, tile.rows // 16 // (2 if gated else 1))
    group = scheme.group or width
    wide = group_class(scheme) == "wide"
    recorder.launch(
        _symbol("gemm", kind, tile.tokens, tile.rows, gated is not None, group_class(scheme)),
        [
            _token_map(device, a, max_tokens, tile.tokens, False),
            q_map,
            high_map,
            planes["scale"],
            planes.get("offset", 0),
            bias if bias is not None else 0,
            out,
            scratch.partial,
            scratch.counters,
            out.shape[0],
            cols,
            width // 32,
            scheme.groups(width),
            -(-group // 64) if wide else max(1, group // 32),
            16 if group == 16 else 0,
            splits,
            int(not scheme.symmetric),
            int(bias is not None),
            _mode(out, accumulate),
            r16.center(scheme),
            linear,
            cubic,
        ],
        (_grid(device, tile, max_tokens, cols, gated, splits),),
    )


def _grid(device, tile: Tile, max_tokens: int, cols: int, gated: str | None, splits: int) -> int:
    made = tile.rows // 2 if gated else tile.rows
    return min(device.num_sms, -(-max_tokens // tile.tokens) * -(-cols // made) * splits)


def _launch_wgmma(
    recorder,
    a,
    weight,
    out,
    bias,
    accumulate: bool,
    gated: str | None,
    max_tokens: int,
    first: int = 0,
    early: bool = True,
) -> None:
    """Columns of out from `first`, as many as the weight makes. early: nobody writes the weight while this runs."""
    device, scheme = recorder.device, weight.scheme
    rows, width = weight.shape
    kind = kind_of(scheme)
    fp8 = _is_fp8(kind)
    cols = rows // 2 if gated else rows
    tile, splits, _ = choose(kind, gated is not None, max_tokens, cols, width, device.num_sms)
    linear, cubic = GATES[gated] if gated else (0.0, 0.0)
    scratch = scratch_of(device)
    w_map = device.tensor_map(
        weight.planes["w"], (tile.rows // 2 if gated else tile.rows, 128 if fp8 else 64), swizzle=128
    )
    scales = [a.scale, weight.planes["scale"]] if fp8 else [0, 0]
    stride = out.shape[1]
    recorder.launch(
        _symbol("gemm", kind, tile.tokens, tile.rows, gated is not None),
        [
            _token_map(device, a, max_tokens, tile.tokens, fp8),
            w_map,
            *scales,
            _from(bias, first),
            _from(out, first),
            scratch.partial,
            scratch.counters,
            out.shape[0],
            cols,
            stride,
            width,
            splits,
            int(early),
            int(fp8 and scheme.scaling == "row"),
            int(bias is not None),
            _mode(out, accumulate),
            linear,
            cubic,
        ],
        (_grid(device, tile, max_tokens, cols, gated, splits),),
    )


def _from(tensor, first: int):
    """The tensor's memory from element `first` of its rows; 0 for None."""
    if tensor is None:
        return 0
    return (
        tensor
        if first == 0
        else Tensor(tensor.buffer, tensor.shape, tensor.dtype, tensor.offset + first * ITEM_BYTES[tensor.dtype])
    )


def _launch_pieces(recorder, a, weight, out, bias, accumulate: bool, gated: str | None, max_tokens: int) -> None:
    """Pieces of the weight as bf16, each multiplied when it is made. bf16 weights are multiplied as they are."""
    device = recorder.device
    rows, width = weight.shape
    cols = rows // 2 if gated else rows
    whole = weight.scheme.kind == "dense" and weight.scheme.dtype == "bf16"
    step = cols if whole else min(cols, max(256, PIECE_BYTES // (2 * width * (2 if gated else 1)) // 256 * 256))
    for first in range(0, cols, step):
        made = min(step, cols - first)
        if whole:
            w = weight.planes["w"]
        else:
            place = _piece_of(device, 2 * width * step * (2 if gated else 1))
            w = Tensor(place.buffer, (made * (2 if gated else 1), width), "bf16")
            dequantize.launch(recorder, weight, first, made, w)
            if gated:
                dequantize.launch(
                    recorder, weight, cols + first, made, Tensor(w.buffer, (made, width), "bf16", 2 * width * made)
                )
        piece = Weight(w.shape, DenseScheme("bf16"), {"w": w}, "rows")
        if has_wgmma(device) and made % 2 == 0 and out.shape[1] % 2 == 0:
            _launch_wgmma(recorder, a, piece, out, bias, accumulate, gated, max_tokens, first, early=whole)
            continue
        linear, cubic = GATES[gated] if gated else (0.0, 0.0)
        tile = gemm_portable.TILE
        recorder.launch(
            _portable(gated is not None),
            [
                a,
                w,
                _from(bias, first),
                _from(out, first),
                out.shape[0],
                made,
                out.shape[1],
                width,
                int(bias is not None),
                _mode(out, accumulate),
                linear,
                cubic,
            ],
            (ceil_div(out.shape[0], tile), -(-made // (tile // 2 if gated else tile))),
        )


def _launch_skinny(recorder, a, weight, out, bias, accumulate: bool, gated: str | None, max_tokens: int) -> None:
    device, scheme, planes = recorder.device, weight.scheme, weight.planes
    rows, width = weight.shape
    kind = kind_of(scheme)
    fp8, integer = _is_fp8(kind), isinstance(kind, int)
    cols = rows // 2 if gated else rows
    box, wg = next(form for form in SKINNY[kind] if form[0] >= max_tokens)
    steps = -(-width // (128 if fp8 else 64))
    total = steps * -(-cols // (wg * (32 if gated else 64)))
    share = ceil_div(total, device.num_sms)
    linear, cubic = GATES[gated] if gated else (0.0, 0.0)
    scratch = scratch_of(device)
    a_map = _token_map(device, a, max_tokens, box, fp8)
    center = 0.0
    if integer:
        w_map, high_map = _integer_maps(device, weight, wg * (2 if gated else 4))
        group = scheme.group or width
        center = -gemm_skinny.magic(kind) - (2 ** (kind - 1) if scheme.symmetric else 0)
        head = [planes["scale"], planes.get("offset", 0), 0, 0]
        groups = [width // 32, scheme.groups(width), group // 32]
    else:
        depth, item = (128, 1) if fp8 else (64, 2)
        if gated:
            w_map = device.tensor_map(
                planes["w"],
                (wg * 4, 2, 8, depth),
                swizzle=128,
                dims=(cols // 8, 2, 8, width),
                strides=(8 * width * item, cols * width * item, width * item),
            )
        else:
            w_map = device.tensor_map(planes["w"], (wg * 64, depth), swizzle=128)
        high_map = w_map
        head = [0, 0, a.scale, planes["scale"]] if fp8 else [0, 0, 0, 0]
        groups = [0, 0, 1]
    recorder.launch(
        _symbol("gemm_skinny", kind, box, wg * 64, gated is not None),
        [
            a_map,
            w_map,
            high_map,
            *head,
            bias if bias is not None else 0,
            out,
            scratch.partial,
            scratch.counters,
            out.shape[0],
            cols,
            steps,
            *groups,
            share,
            int(fp8 and scheme.scaling == "row"),
            int(integer and not scheme.symmetric),
            int(bias is not None),
            _mode(out, accumulate),
            center,
            linear,
            cubic,
        ],
        (-(-total // share),),
    )
