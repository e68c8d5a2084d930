"""Weights that kernels make while a model is loaded: checkpoints of others are repacked, plain numbers quantized.

On the CPU the load threads do it on pieces of the file. For a GPU the words of the file are copied as they are, into
one slot of a staging buffer after the other; a launch in the stream of the copies makes planes of a slot. What NumPy
alone can do is in quantize_load.py."""

from array import array
from collections.abc import Iterator, Sequence

from zse.errors import FormatError
from zse.formats.column_order import order_of
from zse.kernels import repack_pieces
from zse.kernels.repack_pieces import ALIGN, Orders, StoredPiece
from zse.models.weight_plan import STAGING_LABEL, FileTensor
from zse.quant.scheme import TILE_ROWS
from zse.runtime.buffer import Account, Buffer
from zse.runtime.load import LoadJob, LoadStep
from zse.tensor import Tensor, Weight

# A copy of 32 MiB takes 0.6 ms on an H200, a launch and its description 0.05 ms of the CPU; while one slot is read by
# its kernel the next is written, and threads that read a file from the disk need some to write to at once.
STEP_BYTES, SLOTS = 32 << 20, 3
# Bytes of the file for a thread of the CPU: they stay in its L2 cache.
PIECE_BYTES = 1 << 20


def _place(piece: StoredPiece) -> tuple[int, int]:
    """File descriptor and offset of its first source."""
    info, offset, _ = piece.sources[0]
    return info.fd, info.offset + offset


def _tables(infos) -> dict[tuple[str, str], array]:
    """What kernels need of checkpoints with act-order, by role and the name of the tensor that says it: the stored
    column at each column of memory, and the row of memory of each stored row."""
    found: dict[tuple[str, str], array] = {}
    for info in infos:
        for role in Orders._fields:
            stored = (info.parts or {}).get(role)
            if stored is None or (role, stored.name) in found:
                continue
            table = order = order_of(stored)
            if role == "rows":
                table = array("i", order)
                for place, row in enumerate(order):
                    table[row] = place
            found[role, stored.name] = table
    return found


class Repacking:
    """What kernels make in one load, and the memory that they need meanwhile: `buffer`, freed by finish(). order: i32
    [head_dim] of the host, which row of a head stands at each row in memory, or None."""

    def __init__(self, device, plan, order: Tensor | None):
        self._device, self._plan, self._order = device, plan, order
        self._is_cpu = plan.family == "cpu"
        parts = [
            (part, matrix)
            for matrix in plan.matrices
            for part in matrix.parts
            if (part.cut is None or (part.info.is_dense and part.cut.rows == (0, part.info.shape[0])))
            and repack_pieces.takes(part.info, matrix.scheme, matrix.layout, plan.family, self._permuted(part))
        ]
        self._parts = {part.info.name: (number, part, matrix) for number, (part, matrix) in enumerate(parts)}
        self._num_steps, self._slot_bytes, self.buffer = 0, 0, None
        if not parts:
            return
        flags, heads = 4 * len(parts), 4 * plan.config.head_dim
        tables = _tables(part.info for part, _ in parts)
        tables_bytes = sum(4 * len(table) for table in tables.values())
        if self._is_cpu:
            heads = 0
            self.buffer = Buffer(flags + tables_bytes, "bad numbers", Account())
        else:
            heads_unit = plan.config.head_dim if order else TILE_ROWS
            least = max(repack_pieces.least_bytes(part.info, heads_unit) for part, _ in parts)
            largest = max(part.info.nbytes for part, _ in parts)
            self._slot_bytes = -(-max(min(STEP_BYTES, largest), least) // ALIGN) * ALIGN + 2 * ALIGN
            self.buffer = device.alloc(SLOTS * self._slot_bytes + flags + heads + tables_bytes, label=STAGING_LABEL)
        self._flags = Tensor(self.buffer, (len(parts),), "i32", SLOTS * self._slot_bytes)
        self._tables: dict[tuple[str, str], Tensor] = {}
        at = self._flags.offset + flags + heads
        for key, table in tables.items():
            self._tables[key] = tensor = Tensor(self.buffer, (len(table),), "i32", at)
            device.write(tensor, table.tobytes())
            at += tensor.nbytes

    def _permuted(self, part) -> bool:
        return bool(self._order and part.role.heads)

    def takes(self, part) -> bool:
        """Whether kernels make this part of a matrix."""
        return part.info.name in self._parts

    def jobs(self, part, weight: Weight) -> Iterator[LoadJob]:
        """The jobs of the CPU's load threads that make a part."""
        for piece in self._pieces(part, weight, PIECE_BYTES):
            yield self._host_job(piece, part.info.name)

    def steps(self, parts: Sequence[tuple[FileTensor, Weight]]) -> list[LoadJob]:
        """The jobs of a GPU's steps that make these parts, in the order of the files."""
        most = self._slot_bytes - 2 * ALIGN
        pieces = [(piece, part.info.name) for part, weight in parts for piece in self._pieces(part, weight, most)]
        pieces.sort(key=lambda entry: _place(entry[0]))
        return [job for piece, field in pieces for job in self._step_jobs(piece, field)]

    def _pieces(self, part, weight: Weight, most: int) -> Iterator[StoredPiece]:
        number = self._parts[part.info.name][0]
        bad = Tensor(self.buffer, (1,), "i32", self._flags.offset + 4 * number)
        order, unit = None, TILE_ROWS
        if self._permuted(part):
            order, unit = self._order if self._is_cpu else self._device_order(), self._plan.config.head_dim
        found = part.info.parts or {}
        orders = Orders(*(self._tables[role, found[role].name] if role in found else None for role in Orders._fields))
        columns = part.cut and part.cut.columns
        return repack_pieces.pieces_of(
            part.info, weight, part.first, bad, most, order, unit, orders, self._is_cpu, columns
        )

    def _device_order(self) -> Tensor:
        assert self._order is not None
        at = self._flags.offset + self._flags.nbytes
        order = Tensor(self.buffer, self._order.shape, "i32", at)
        self._device.write(order, self._order.view().cast("B"))
        return order

    def _host_job(self, piece: StoredPiece, field: str) -> LoadJob:
        (info, offset, nbytes), *more = piece.sources
        args, second = piece.args, None
        if more:
            second = (more[0][0].fd, more[0][0].offset + more[0][1], more[0][2])
        elif "has_zero" in args:
            args = args | {"zero": None}
        place = info.fd, info.offset + offset, nbytes
        grid, path = piece.grid("cpu"), info.file.path
        return LoadJob(*place, piece.symbol, args, grid, path, field, second, runs=piece.runs)

    def _step_jobs(self, piece: StoredPiece, field: str) -> Iterator[LoadJob]:
        at = self._num_steps % SLOTS * self._slot_bytes
        if piece.nbytes > self._slot_bytes:
            raise ValueError(f"{field}: a piece of {piece.nbytes} bytes, over the {self._slot_bytes} of a slot")
        places = []
        for _, _, nbytes in piece.sources:
            places.append(Tensor(self.buffer, (nbytes,), "u8", at))
            at += -(-nbytes // ALIGN) * ALIGN
        args = piece.args | {"src": places[0]}
        if "has_zero" in args:
            args["zero"] = places[1] if len(places) > 1 else None
        after = max(0, self._num_steps - SLOTS + 1)
        step = LoadStep(piece.symbol, args, piece.grid("gpu"), after, _place(piece))
        self._num_steps += 1
        for (info, offset, nbytes), place in zip(piece.sources, places, strict=True):
            where = info.fd, info.offset + offset, nbytes
            yield LoadJob(*where, None, {"destination": place}, (1,), info.file.path, field, step=step)

    def finish(self) -> None:
        """After the load: FormatError for a number that a scheme cannot hold; the memory is given back."""
        buffer, self.buffer = self.buffer, None
        if buffer is None:
            return
        flags = memoryview(bytes(self._flags.view() if self._is_cpu else self._device.read(self._flags))).cast("i")
        buffer.free()
        for code, (_, part, matrix) in zip(flags, self._parts.values(), strict=True):
            if code:
                info, reason = part.info, repack_pieces.wrong(code, part.info, matrix.scheme)
                raise FormatError(
                    self._plan.source.path, info.offset, info.name, f"cannot become {matrix.scheme}: {reason}"
                )
