"""The runs of a batch, for kernels whose sequences carry a state (zse.tensor: Runs, StatePart), and their cases."""

from collections.abc import Callable
from typing import Any

from zse import kernel as zl
from zse.kernels.op import Case, OutputSpec, Tolerance, check, require
from zse.lazy import numpy as np
from zse.tensor import SHORT_RUN, Runs, StatePart


class RunParams(zl.Record):
    """state: all slots, `slot_size` f32 numbers apart; place: where the part begins in each."""

    state: zl.Ptr[zl.f32]
    slot_size: zl.i64
    place: zl.i64
    run_start: zl.Ptr[zl.i32, "const"]
    run_slot: zl.Ptr[zl.i32, "const"]
    positions: zl.Ptr[zl.i32, "const"]
    runs: zl.index


class KeepParams(RunParams):
    """Of kernels that leave states behind tokens before a run's last. keeps: whether there is `leave`."""

    leave: zl.Ptr[zl.i32, "const"]
    keeps: zl.i32


@zl.inline
def run_of(p, run):
    """(first token, token behind the last one, where the state begins) of a run."""
    state = p.state + zl.i64(p.run_slot[run]) * p.slot_size + p.place
    return zl.i64(p.run_start[run]), zl.i64(p.run_start[run + 1]), state


@zl.inline
def slot_behind(p, run, token, last):
    """The slot that the state behind a token goes to: the run's own behind its last token; -1: none."""
    slot = zl.i32(-1)
    if token == last - 1:
        slot = p.run_slot[run] + 0
    elif p.keeps != 0:
        slot = p.leave[token] + 0
    return slot


@zl.inline
def piece_end(p, token, end):
    """Where what is computed at once from `token` on ends: behind a token whose state is left, at `end` at the latest."""
    stop = end + 0
    if p.keeps != 0 and end - token <= SHORT_RUN:
        stop = token + 1
        while stop < end and p.leave[stop - 1] < 0:
            stop += 1
    return stop


@zl.inline
def move(target, source, count):
    """target = source; None: zeros."""
    L = zl.target.lanes
    for i in range(0, count // L * L, L):
        zl.store(target + i, zl.f32.x(L)(0) if source is None else zl.load(source + i, L))
    for i in range(count // L * L, count):
        target[i] = 0.0 if source is None else source[i]


@zl.inline
def keep_state(p, token, last, source, at, count):
    """Leaves `count` numbers, which begin `at` numbers behind the part's beginning, where the token's state is to be left
    beside the run's own slot."""
    if p.keeps != 0 and token < last - 1:
        slot = zl.i64(p.leave[token])
        if slot >= 0:
            move(p.state + slot * p.slot_size + p.place + at, source, count)


def run_args(op: str, state: StatePart, runs: Runs, tokens: Any, *shape: int) -> dict[str, Any]:
    """The fields of KeepParams, checked: the state's part has this shape."""
    require(tuple(state.shape) == shape, f"{op} state: a part of shape {tuple(state.shape)}, expected {shape}")
    check(f"{op} state", state.tensor, "f32", None, None)
    slot_size = state.tensor.shape[1]
    size = 1
    for each in shape:
        size *= each
    require(0 <= state.place <= slot_size - size, f"{op} state: place {state.place} in a slot of {slot_size} numbers")
    check(f"{op} runs.start", runs.start, "i32", None)
    check(f"{op} runs.slot", runs.slot, "i32", None)
    check(f"{op} runs.positions", runs.positions, "i32", tokens)
    if runs.leave is not None:
        check(f"{op} runs.leave", runs.leave, "i32", tokens)
    return dict(
        state=state.tensor,
        slot_size=slot_size,
        place=state.place,
        run_start=runs.start,
        run_slot=runs.slot,
        positions=runs.positions,
        leave=runs.leave,
        keeps=int(runs.leave is not None),
        runs=runs.slot.shape[0],
    )


# -- of cases and references


def random_runs(rng: Any, lengths: tuple[int, ...], fresh: tuple[int, ...] = ()) -> Runs:
    """Runs of so many tokens on the host, each with a slot, two of which are nobody's. fresh: those that begin at position
    0; the others begin later. Of short runs about every second token leaves its state in a slot of its own."""
    start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    begins = [0 if run in fresh else int(rng.integers(1, 5000)) for run in range(len(lengths))]
    positions = np.concatenate([begin + np.arange(length) for begin, length in zip(begins, lengths, strict=True)])
    keeps = [rng.random(length) < (0.5 if length <= SHORT_RUN else 0) for length in lengths]
    keeps = np.concatenate([np.append(each[:-1], False) for each in keeps])
    slots = rng.permutation(len(lengths) + int(keeps.sum()) + 2).astype(np.int32)
    leave = np.full(len(keeps), -1, np.int32)
    leave[keeps] = slots[len(lengths) : -2]
    return Runs(start, slots[: len(lengths)], positions.astype(np.int32), leave if keeps.any() else None)


def random_state(rng: Any, runs: Runs, shape: tuple[int, ...], scale: float = 1.0) -> StatePart:
    """A part of that shape between others in slots of which those hold numbers that continued runs have; everything
    else, the slots of fresh runs and of what is left with it, is NaN."""
    size, place = int(np.prod(shape)), 16 * int(rng.integers(0, 4))
    slots = len(runs.slot) + 2 + (0 if runs.leave is None else int((runs.leave >= 0).sum()))
    tensor = np.full((slots, place + size + 32), np.nan, np.float32)
    for first, slot in zip(runs.start, runs.slot, strict=False):
        if runs.positions[first] > 0:
            tensor[slot, place : place + size] = rng.standard_normal(size) * scale
    return StatePart(tensor, place, shape)


def random_batch(rng: Any, lengths: tuple[int, ...], fresh: tuple[int, ...], *shape: int) -> tuple[Runs, StatePart]:
    """random_runs() with a random_state()."""
    runs = random_runs(rng, lengths, fresh)
    return runs, random_state(rng, runs, shape)


def state_output(state: StatePart, tolerance: Tolerance) -> dict[str, OutputSpec]:
    """The state as a case's output: what lies beside the part, and slots of no run, stay as they are."""
    return {"state.tensor": OutputSpec(state.tensor.shape, "float32", tolerance, inout=state.tensor)}


class States:
    """A reference's states. each(): of every run its tokens' numbers and its state, float64, zeros where it begins;
    what is left in it goes to `tensor` when the next one begins."""

    def __init__(self, state: StatePart, runs: Runs):
        self.state, self.runs = state, runs
        self.tensor = np.asarray(state.tensor, np.float64).copy()

    def each(self) -> Any:
        """(range of tokens, state) of every run, the state to be changed in place."""
        place, shape = self.state.place, tuple(self.state.shape)
        size = int(np.prod(shape))
        for run, slot in enumerate(self.runs.slot):
            first, last = (int(self.runs.start[at]) for at in (run, run + 1))
            part = self.tensor[slot, place : place + size]
            if self.runs.positions[first] == 0:
                part[:] = 0
            yield range(first, last), part.reshape(shape)

    def behind(self, token: int, part: Any) -> None:
        """`part` is the state behind the token, which may be left in a slot of its own."""
        leave = self.runs.leave
        if leave is not None and leave[token] >= 0 and token + 1 not in self.runs.start:
            self.tensor[leave[token], self.state.place : self.state.place + part.size] = part.reshape(-1)


# The runs of batches that operations are timed with.
BATCHES = {"1 token": (1,), "16 sequences": (1,) * 16, "512 tokens": (512,)}


def whole(reference: Callable[..., dict[str, Any]], case: Case) -> Callable[[], dict[str, Any]]:
    """What Op.sizes says of a case that is compared whole."""
    return lambda: {name: (..., value) for name, value in reference(**case.inputs, **case.options).items()}
