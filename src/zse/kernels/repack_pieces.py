"""Which kernel makes which piece of a weight: other people's checkpoints into layout r16, plain numbers quantized on
load.

A piece is a range of a stored tensor that one call of a kernel reads, and what it is called with. The CPU's kernels
(repack_checkpoint) and a GPU's (gpu.repack) have the same names and parameters. What no kernel takes, NumPy converts
(models/quantize_load.py): other bits and groups than these, checkpoints whose heads' rows have to change places, and on
a CPU what becomes dense."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from zse.quant.scheme import BLOCK_COLUMNS, TILE_ROWS, AffineScheme, Fp8Scheme
from zse.tensor import Tensor

ITEMS = {"F32": 4, "F16": 2, "BF16": 2}
INPUTS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
INTEGERS = ("awq", "gptq", "gptq+1", "packed", "int8")  # layouts of integers (zse.formats.quantized)
BY_ROW = ("packed", "int8")  # those whose rows follow one another; others' columns do
MAX_GROUP = 256  # columns of a group of the CPU's kernel
RUN_BYTES, MAX_PIECE_BYTES = 8 << 10, 8 << 20  # of a run of the file, and of all runs of a piece
LINES = 8  # blocks of 32 columns, or groups, of a tile that a thread block of a GPU makes
ALIGN = 256  # of a piece's second source


class StoredPiece(NamedTuple):
    """sources: (offset, nbytes) in the files of `parts`; the first parameters of the kernel, src and zero, point to
    them."""

    sources: tuple[tuple[Any, int, int], ...]  # (TensorInfo, offset in it, bytes)
    symbol: str
    args: dict[str, Any]
    lines: int  # blocks or groups of a tile; rows of fp8
    tiles: int
    runs: tuple[int, int] = (1, 0)  # of the first source: equal runs of the file, and the bytes from one to the next

    @property
    def nbytes(self) -> int:
        """With the second source at a multiple of ALIGN."""
        return sum(-(-nbytes // ALIGN) * ALIGN for _, _, nbytes in self.sources)

    def grid(self, family: str) -> tuple[int, ...]:
        if self.symbol.startswith("quantize_e4m3"):
            return (self.lines,)
        return (self.tiles,) if family == "cpu" else (-(-self.lines // LINES), self.tiles)


class Orders(NamedTuple):
    """Of a checkpoint with act-order, in memory that the kernels read. columns: i32 [K], the stored column at each one
    in memory; rows: i32 [N], the row in memory of each stored one; None: as they are stored."""

    columns: Tensor | None = None
    rows: Tensor | None = None


AS_STORED = Orders()


def takes(info, scheme, layout: str, family: str, permuted: bool) -> bool:
    """Whether kernels make `scheme` of a stored tensor (TensorInfo) for a kind of device. permuted: rows of heads are
    put in order."""
    if info.layout in INTEGERS:
        (n, k), parts, elements = info.shape, info.parts, info.shape[0] * info.shape[1]
        as_stored = 8 * parts["q"].nbytes == scheme.bits * elements and parts[
            "scale"
        ].num_elements == n * scheme.groups(k)
        known = {"q", "scale"} if info.layout == "int8" else {"q", "scale", "zero"}
        if info.layout in ("gptq", "gptq+1", "packed"):
            known |= {"columns", "rows"}
        return not permuted and info.scheme == scheme and scheme.bits in (4, 8) and as_stored and parts.keys() <= known
    if not info.is_dense:
        return False
    if isinstance(scheme, Fp8Scheme):
        return family == "gpu" and scheme.scaling == "row"
    if not isinstance(scheme, AffineScheme) or (scheme.bits, scheme.symmetric) not in ((4, False), (8, True)):
        return False
    return scheme.group % BLOCK_COLUMNS == 0 and 0 < scheme.group <= MAX_GROUP


def least_bytes(info, unit: int) -> int:
    """No piece of the tensor need be larger than this: 32 columns of all rows, or whole units of rows."""
    if info.layout in INTEGERS:
        words, (rows, width) = info.parts["q"], info.shape
        if info.layout not in BY_ROW and not info.parts.keys().isdisjoint(("columns", "rows")):
            return words.nbytes
        most = words.nbytes // (width // BLOCK_COLUMNS) if info.layout not in BY_ROW else 0
        return max(most, words.nbytes // rows * TILE_ROWS, 8 * rows, 8 * TILE_ROWS * info.scheme.groups(width))
    return info.nbytes // info.shape[0] * unit


def pieces_of(
    info,
    weight,
    first_row: int,
    bad: Tensor,
    most: int,
    order: Tensor | None,
    unit: int,
    orders: Orders = AS_STORED,
    in_runs: bool = False,
    columns: tuple[int, int] | None = None,
) -> Iterator[StoredPiece]:
    """The pieces that fill rows [first_row, + info's rows) of `weight`; of at most `most` bytes where that can be. columns:
    of plain numbers, those that are taken; None: all.

    bad: i32, gets what says that a number cannot be held (`wrong()`). order: i32 [unit]: row i of every unit of rows is
    the source's row order[i]; None: rows stay. orders: of integers. in_runs: a piece may be runs of the file."""
    if info.layout not in INTEGERS:
        yield from _dense_pieces(
            info, weight, first_row, bad, most, order, unit, in_runs, columns or (0, info.shape[1])
        )
        return
    by_column = info.layout not in BY_ROW
    yield from (_scale_columns if by_column else _scale_rows)(info, weight, first_row, bad, most, orders.rows)
    if orders != AS_STORED:
        yield from _ordered_words(info, weight, first_row, most, orders, in_runs)
    else:
        yield from (_word_columns if by_column else _word_rows)(info, weight, first_row, most)


def wrong(code: int, info, scheme) -> str:
    """What a number in `bad` says."""
    if info.layout in INTEGERS:
        return "a scale does not fit in f16" if code == 2 else "an offset does not fit in f16"
    if code >= 0x7F800000:
        return "a value is NaN or infinite"
    exponent, fraction = (code >> 23) - 127, 1 + (code & 0x7FFFFF) / (1 << 23)
    return f"the value {fraction * 2.0**exponent:.8g} does not fit in f16"


def lines_of(plane: Tensor, first_row: int, rows: int, per_line: int = TILE_ROWS) -> Tensor:
    """The bytes of some rows in a plane whose entries are `per_line` rows."""
    line_bytes, first = plane.nbytes // plane.shape[0], first_row // per_line
    return Tensor(plane.buffer, (-(-rows // per_line) * line_bytes,), "u8", plane.offset + first * line_bytes)


def _dense_pieces(info, weight, first_row, bad, most, order, unit, in_runs, columns) -> Iterator[StoredPiece]:
    """Of some columns only their runs are read, or where pieces are none, whole rows, whose other columns the kernel skips."""
    (rows, stride), scheme, (first, last) = info.shape, weight.scheme, columns
    row_bytes, width, at = info.nbytes // rows, last - first, 0
    line_bytes = row_bytes
    if in_runs and width < stride:
        at, row_bytes = row_bytes // stride * first, row_bytes // stride * width
        first, stride = 0, width
    is_rows = isinstance(scheme, Fp8Scheme)
    symbol = f"quantize_{scheme.element}_{INPUTS[info.type]}"
    common = dict(order=order, has_order=int(order is not None), unit=unit, bad=bad)
    common |= dict(stride=stride, first_column=first, width=width)
    if not is_rows:
        common |= dict(group=scheme.group, offset=None)
    step = max(unit, most // row_bytes // unit * unit)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        planes = {
            name: lines_of(plane, first_row + start, count, 1 if is_rows else TILE_ROWS)
            for name, plane in weight.planes.items()
        }
        args = common | planes if is_rows else common | planes | {"rows": count}
        yield StoredPiece(
            ((info, start * line_bytes + at, count * row_bytes),),
            symbol,
            args,
            count if is_rows else width // scheme.group,
            -(-count // TILE_ROWS),
            (count, line_bytes) if line_bytes != row_bytes else (1, 0),
        )


def _word_rows(info, weight, first_row, most) -> Iterator[StoredPiece]:
    """compressed-tensors: a row's words, or bytes in two's complement, follow each other."""
    words, (rows, width) = info.parts["q"], info.shape
    row_words = words.nbytes // rows // 4
    symbol = "repack_int8" if info.layout == "int8" else f"repack_words{info.scheme.bits}"
    step = max(TILE_ROWS, most // (4 * row_words) // TILE_ROWS * TILE_ROWS)
    for start in range(0, rows, step):
        count, blocks = min(step, rows - start), width // BLOCK_COLUMNS
        q = lines_of(weight.planes["q"], first_row + start, count)
        args = dict(q=q, rows=count, row_stride=row_words, word_stride=1)
        args |= dict(first_block=0, blocks=blocks, all_blocks=blocks)
        source = words, 4 * start * row_words, 4 * count * row_words
        yield StoredPiece((source,), symbol, args, blocks, -(-count // TILE_ROWS))


def _ordered_words(info, weight, first_row, most, orders: Orders, in_runs: bool) -> Iterator[StoredPiece]:
    """Words whose columns, and perhaps rows, change places: a piece has all columns of some rows, which in GPTQ's files
    are a run of each line of words, or else of all rows."""
    words, (rows, width), bits = info.parts["q"], info.shape, info.scheme.bits
    lines, row_words, by_column = words.shape[0], words.shape[1], info.layout not in BY_ROW
    step = most // (width * bits // 8)
    if by_column and in_runs:
        # Reads of 8 KiB get half of the page cache's speed, of 2 KiB a fifth (benchmarks/LOG.md).
        step = min(max(step, RUN_BYTES // 4), MAX_PIECE_BYTES // (4 * lines))
    step = max(TILE_ROWS, step // TILE_ROWS * TILE_ROWS) if in_runs or not by_column else rows
    args: dict[str, Any] = dict(q=lines_of(weight.planes["q"], first_row, rows), blocks=width // BLOCK_COLUMNS)
    args |= dict(columns=orders.columns, has_columns=int(orders.columns is not None))
    args |= dict(places=orders.rows, has_places=int(orders.rows is not None))
    for start in range(0, rows, step):
        count = min(step, rows - start)
        args |= dict(rows=count, first_row=start)
        if by_column:
            args |= dict(row_stride=1, word_stride=count)
            source, runs = (words, 4 * start, 4 * count * lines), (lines, 4 * rows)
        else:
            args |= dict(row_stride=row_words, word_stride=1)
            source, runs = (words, 4 * start * row_words, 4 * count * row_words), (1, 0)
        runs = (1, 0) if count == rows else runs
        yield StoredPiece(
            (source,), f"repack_ordered{bits}", dict(args), width // BLOCK_COLUMNS, -(-count // TILE_ROWS), runs
        )


def _word_columns(info, weight, first_row, most) -> Iterator[StoredPiece]:
    """AWQ, GPTQ: the words of a range of columns follow each other, for all rows."""
    words, (rows, width) = info.parts["q"], info.shape
    bits, line_words = info.scheme.bits, words.shape[1]
    is_awq = info.layout == "awq"
    block_bytes = 4 * line_words * (BLOCK_COLUMNS if is_awq else BLOCK_COLUMNS * bits // 32)
    blocks, tiles = width // BLOCK_COLUMNS, -(-rows // TILE_ROWS)
    step = max(1, most // block_bytes)
    q = lines_of(weight.planes["q"], first_row, rows)
    args = dict(q=q, rows=rows, row_stride=0 if is_awq else 1, word_stride=line_words, all_blocks=blocks)
    symbol = "repack_awq4" if is_awq else f"repack_words{bits}"
    for first in range(0, blocks, step):
        count = min(step, blocks - first)
        source = words, first * block_bytes, count * block_bytes
        yield StoredPiece((source,), symbol, args | {"first_block": first, "blocks": count}, count, tiles)


def _scale_args(info, weight, bad, places) -> dict[str, Any]:
    return dict(
        bad=bad,
        places=places,
        has_places=int(places is not None),
        first_row=0,
        offset=None,
        all_groups=info.scheme.groups(info.shape[1]),
        bits=info.scheme.bits,
        has_zero=int("zero" in info.parts),
        plus=int(info.layout == "gptq+1"),
        awq=int(info.layout == "awq"),
    )


def _scale_rows(info, weight, first_row, bad, most, places) -> Iterator[StoredPiece]:
    scale, zero, rows = info.parts["scale"], info.parts.get("zero"), info.shape[0]
    args, per_word = _scale_args(info, weight, bad, places), 32 // info.scheme.bits
    groups, item = args["all_groups"], ITEMS[scale.type]
    args |= dict(row_stride=groups, group_stride=1, word_stride=groups, zero_stride=1, first_group=0, groups=groups)
    step = max(TILE_ROWS, most // (2 * item * groups) // TILE_ROWS * TILE_ROWS)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        sources: tuple = ((scale, start * groups * item, count * groups * item),)
        if zero is not None:
            sources += ((zero, start // per_word * groups * 4, -(-count // per_word) * groups * 4),)
        # Rows that change places may go anywhere.
        at, most_rows = (start, count) if places is None else (0, rows)
        planes = {
            name: lines_of(plane, first_row + at, most_rows) for name, plane in weight.planes.items() if name != "q"
        }
        symbol, of_piece = f"repack_scales_{INPUTS[scale.type]}", {"rows": count, "first_row": start - at}
        yield StoredPiece(sources, symbol, args | planes | of_piece, groups, -(-count // TILE_ROWS))


def _scale_columns(info, weight, first_row, bad, most, places) -> Iterator[StoredPiece]:
    scale, zero, rows = info.parts["scale"], info.parts.get("zero"), info.shape[0]
    args = _scale_args(info, weight, bad, places)
    groups, item, zero_words = args["all_groups"], ITEMS[scale.type], rows * info.scheme.bits // 32
    args |= dict(rows=rows, row_stride=1, group_stride=rows, word_stride=1, zero_stride=zero_words)
    args |= {name: lines_of(plane, first_row, rows) for name, plane in weight.planes.items() if name != "q"}
    step = max(1, most // (2 * item * rows))
    for first in range(0, groups, step):
        count = min(step, groups - first)
        sources: tuple = ((scale, first * rows * item, count * rows * item),)
        if zero is not None:
            sources += ((zero, first * zero_words * 4, count * zero_words * 4),)
        symbol = f"repack_scales_{INPUTS[scale.type]}"
        yield StoredPiece(sources, symbol, args | {"first_group": first, "groups": count}, count, -(-rows // TILE_ROWS))
