"""What kernels read and write: arrays in device memory, quantized weights, activations. No maths, no NumPy."""

from typing import Any, NamedTuple

from zse.dtypes import ITEM_BYTES, VIEW_FORMAT
from zse.runtime.symbol import Sym

# What makes probabilities of a router's logits (zse.kernels.route): softmax over all experts, sigmoid of each, softmax
# over the chosen, sqrt(softplus) of each.
GATINGS = ("softmax", "sigmoid", "softmax_chosen", "sqrt_softplus")
MAX_EXPERTS, MAX_EXPERT_GROUPS = 1024, 64


class Tensor(NamedTuple):
    """A row-major array inside a device buffer.

    shape: the first dimension may be a Sym (how many rows a run uses; the buffer holds the most there can be).
    offset: bytes from the buffer's start.
    """

    buffer: Any
    shape: tuple
    dtype: str
    offset: int = 0

    @property
    def address(self) -> int:
        return self.buffer.address + self.offset

    @property
    def nbytes(self) -> int:
        """Bytes of the elements. ValueError for a symbolic shape."""
        count = ITEM_BYTES[self.dtype]
        for size in self.shape:
            if isinstance(size, Sym):
                raise ValueError(f"shape {self.shape} has a symbolic size")
            count *= size
        return count

    def with_rows(self, rows: "int | Sym") -> "Tensor":
        """The same memory, another first dimension."""
        return Tensor(self.buffer, (rows, *self.shape[1:]), self.dtype, self.offset)

    def view(self) -> memoryview:
        """Host view of the elements, flat; f16 and bf16 are seen as u16. Only for devices whose memory the host can
        touch."""
        raw = memoryview(self.buffer.view())[self.offset : self.offset + self.nbytes]
        return raw.cast("B").cast(VIEW_FORMAT[self.dtype])  # type: ignore[call-overload]


class Activation(NamedTuple):
    """int8 rows: q i8 [M, K], scale f32 [M, K/32], sum f32 [M, K/32] = scale * sum of q; a = scale * q.

    int16 rows have `low` i8 [M, K] too: a = scale * (q + low / 256), and sum is of that. An f32 activation is a plain
    Tensor."""

    q: Tensor
    scale: Tensor
    sum: Tensor
    low: "Tensor | None" = None

    @property
    def dtype(self) -> str:
        return "int8" if self.low is None else "int16"

    @property
    def shape(self) -> tuple:
        return self.q.shape

    def with_rows(self, rows: "int | Sym") -> "Activation":
        return Activation(
            self.q.with_rows(rows),
            self.scale.with_rows(rows),
            self.sum.with_rows(rows),
            None if self.low is None else self.low.with_rows(rows),
        )


SUM_COLUMNS = 128  # of a row of an Fp8Activation that have a sum


def sum_width(width: int) -> int:
    """Sums of a row of an Fp8Activation of `width` columns, filled up to 16 bytes."""
    return -(-width // (SUM_COLUMNS * 8)) * 8


class Fp8Activation(NamedTuple):
    """8-bit float rows for a GEMM with fp8 or int4 weights: q e4m3 [M, K], scale f32 [M]; a[m, k] = scale[m] * q[m, k].
    sums f16 [M, sum_width(K)]: of q, each SUM_COLUMNS of a row; what is behind the last is anything. None where nobody reads
    them: products with int4 weights alone do."""

    q: Tensor
    scale: Tensor
    sums: Tensor | None

    @property
    def dtype(self) -> str:
        return "fp8"

    @property
    def shape(self) -> tuple:
        return self.q.shape

    def with_rows(self, rows: "int | Sym") -> "Fp8Activation":
        sums = None if self.sums is None else self.sums.with_rows(rows)
        return Fp8Activation(self.q.with_rows(rows), self.scale.with_rows(rows), sums)


class Routing(NamedTuple):
    """Which experts compute which tokens, k of them each (zse.kernels.route). A pair is a token and one of its experts.

    ids i32, weights f32 [M, k]: a token's experts, the best first, and what their results are multiplied with. source
    i32 [M * k]: the tokens of the pairs sorted by expert; place i32 [M * k]: where a token's pairs stand among these.
    tasks i32 [N, 3]: an expert and a range of up to task_pairs sorted pairs, which one block of a product computes;
    empty ones at the end."""

    ids: Tensor
    weights: Tensor
    source: Tensor
    place: Tensor
    tasks: Tensor
    task_pairs: int = 64


class StatePart(NamedTuple):
    """A part of what a sequence carries through a recurrent layer (zse.cache.states). tensor f32 [slots, stride]: every
    slot; place: where the part begins in each; shape: of the part. Number i of it in slot s stands at s * stride + place
    + i."""

    tensor: Tensor
    place: int
    shape: tuple[int, ...]

    @property
    def stride(self) -> int:
        return self.tensor.shape[1]


# Runs of up to so many tokens go token by token on a GPU; only such runs leave states behind tokens before their last.
SHORT_RUN = 16


class Runs(NamedTuple):
    """The runs of a batch: tokens of one sequence that stand one behind the other. start i32 [most runs + 1]: the first
    token of each, and behind the last one the number of tokens; slot i32 [runs]: where its state is. positions i32
    [tokens]: a run whose first token has position 0 begins with zeros, whatever its slot holds.

    leave i32 [tokens]: the slot that the state behind a token is left in, too; -1: none, as of all tokens of runs of more than
    SHORT_RUN. Each is named once, and is the slot of no run of the batch. Of a run's last token it is not read: the state
    behind that goes to the run's slot. None: of no token."""

    start: Tensor
    slot: Tensor
    positions: Tensor
    leave: Tensor | None = None


class Taken(NamedTuple):
    """What a block that predicts behind a model (zse.models.next_token, zse.models.eagle3) begins with: of each token the row
    `rows` i32 [max_tokens] of `stream` f32 [tokens, width]. again: the stream is its own."""

    stream: Tensor
    rows: Tensor
    again: bool = False


class Weight(NamedTuple):
    """A matrix of N outputs and K inputs. planes: name → Tensor, as `scheme.planes(N, K, layout)` lists them.

    layout: "r16" (tiles of 16 rows) or "rows" (row-major), see zse.quant.scheme. order: i32 [K], the input that each
    column belongs to, which the product's inputs are gathered by (zse.kernels.reorder); None: the columns are the
    inputs."""

    shape: tuple
    scheme: Any
    planes: dict
    layout: str = "r16"
    order: "Tensor | None" = None


class OwnRows(NamedTuple):
    """Of ranks that have tokens of their own, i32: rows: which of the step's they are; positions, token_row: theirs; place: of each of
    the step's tokens where it stands among them, the largest step's size for others'; owner: of each of the step's tokens its rank."""

    rows: Tensor
    positions: Tensor
    token_row: Tensor
    place: Tensor
    owner: Tensor
