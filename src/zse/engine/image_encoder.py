"""Runs a tower: an image's pixels in, the embeddings of its parts out.

The recording is cut into a graph for each layer, so that whoever runs it can do other things between: on a CPU a layer
of a large image takes seconds."""

from array import array
from collections.abc import Iterator
from typing import Any

from zse.cache.layout import KVCache
from zse.cache.pages import BLOCK, blocks_for
from zse.kernels.activation import gated
from zse.kernels.images import mean_rows, place_rows, standardize
from zse.kernels.matmul import matmul
from zse.kernels.norm import add_rmsnorm
from zse.kernels.quantize import quantize
from zse.lazy import numpy as np
from zse.models.vision.load import TowerModel, TowerPlan
from zse.plan.forms import form_of, row_bytes, tensor_of
from zse.plan.record import Planner, Run, StepBuffers, new_tensor
from zse.plan.trace import PlanError
from zse.runtime.counting import CountingDevice
from zse.tensor import Tensor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from numpy.typing import NDArray

LABEL = "vision tower"


class TowerPlanner(Planner):
    """Records the layers of a tower. rotations: f32 [max_tokens, head_dim] that the host fills, or None. windows: of layers
    in which each window is a sequence of its own."""

    rotations: Tensor | None = None
    windows: StepBuffers | None = None
    window_scratch: Any = None  # as attention_scratch, of the windows

    def use_windows(self, windows: StepBuffers) -> None:
        """Allocates."""
        self.windows = windows
        if self.attention_scratch is not None:
            context = windows.page_table.shape[1] * BLOCK
            self.window_scratch = self.new_attention_scratch(self.max_tokens, context)

    def share_attention(self, recorder: Any) -> None:
        """Record how attention is cut, for every layer of an image."""
        for step in (self.buffers, self.windows):
            if step is not None and self.attention_scratch is not None:
                self._run(recorder, step).share_attention(None)

    def _run(self, recorder: Any, step: StepBuffers) -> Run:
        run = Run(self, recorder, step, recorder.symbol("tokens", self.max_tokens), self.max_tokens)
        run.scratch = self.attention_scratch if step is self.buffers else self.window_scratch
        return run

    def left_by(self, layer: int) -> Tensor | None:
        """What a layer leaves to be added to the stream, f32 [max_tokens, hidden]."""
        pending = self._layers[layer].pending
        if pending is not None and pending.options:
            raise PlanError("a layer of deepstack leaves what is normalized before it is added")
        return None if pending is None else self._carry

    def record_part(self, recorder: Any, layer: int | None) -> None:
        """One layer; None: what follows them (Tower.finish)."""
        step = self.windows if self.windows is not None and layer in self.forward.tower.windowed else self.buffers
        run = self._run(recorder, step)
        if run.scratch is not None:
            run.sharing = {"scratch": run.scratch, "longest_run": None}
        if self.rotations is not None:
            run.tables = {name: run.of(self.rotations) for name in run.tables}
        last = self.config.num_layers - 1
        run.layer, run.prefix = (last, f"layers.{last}.") if layer is None else (layer, f"layers.{layer - 1}.")
        part = self._finish if layer is None else self._layers[layer]
        if part is None:
            return
        # Each recording stands alone: the part's tensors are bound to its own symbols.
        run.play(part, self._place(part, self.max_tokens), "" if layer is None else f"layers.{layer}.", run.tokens)


class TailWork:
    """What a tower's tail is recorded with (Tower.tail): results are [parts, columns] in memory of their own, f32 of
    products and means, of norms and activations what the device's products take."""

    def __init__(self, device: Any, model: TowerModel, activations: str, max_parts: int, merged: int):
        self._device, self._model, self._activations, self.most = device, model, activations, max_parts
        self._made: dict[tuple, Any] = {}
        self._merged = merged  # patches of a part
        self.recorder: Any = None
        self.added: Any = None  # positions, f32 [patches, hidden]

    def begin(self, recorder: Any) -> Any:
        """Record into `recorder` from now on; the symbol of how many parts there are."""
        self.recorder = recorder
        self._number = 0
        self.parts = recorder.symbol("parts", self.most)
        return self.parts

    def _room(self, columns: int, rows: Any = None, dtype: str = "f32") -> Tensor:
        """[parts, columns], or of as many rows as there are patches; the same memory for what stands at the same place in
        every recording."""
        key, rows = (self._number, columns), self.parts if rows is None else rows
        self._number += 1
        if key not in self._made:
            most = self.most if rows is self.parts else self.most * self._merged
            self._made[key] = new_tensor(self._device, LABEL, dtype, most, columns)
        return self._made[key].with_rows(rows)

    def copy(self, x: Tensor, added: Tensor | None, places: Tensor) -> Tensor:
        """The layers' result so far, f32 [patches, hidden], apart: x + added. places: i32 [patches], 0, 1, 2, ..."""
        key = "copy", x.shape[1]
        if key not in self._made:
            self._made[key] = new_tensor(self._device, LABEL, "f32", places.shape[0], x.shape[1])
        rows = x.shape[0]
        out = self._made[key].with_rows(rows)
        place_rows(self.recorder, x, places.with_rows(rows), out)
        if added is not None:
            add_rmsnorm(self.recorder, out, added, None, None, None, 1e-6)
        return out

    def spread(self, x: Tensor, places: "NDArray") -> Tensor:
        """The rows `places` of x, i32 [most * merged]; zeros where -1."""
        rows, width = self.recorder.symbol("cells", len(places)), x.shape[1]
        if ("spread",) not in self._made:
            made = new_tensor(self._device, LABEL, "f32", len(places), width)
            table = new_tensor(self._device, LABEL, "i32", len(places))
            self._device.write(made, bytes(4 * len(places) * width))
            self._device.write(table, places.tobytes())
            self._made["spread",] = made, table
        out, table = (tensor.with_rows(rows) for tensor in self._made["spread",])
        place_rows(self.recorder, x, table, out)
        return out

    def together(self, x: Tensor, count: int) -> Tensor:
        """`count` neighbouring rows of the layers' result as one."""
        return Tensor(x.buffer, (self.parts, count * x.shape[1]), x.dtype, x.offset)

    def add_positions(self, x: Tensor) -> Tensor:
        """x + Tower.positions(), x itself."""
        add_rmsnorm(self.recorder, x, self.added.with_rows(x.shape[0]), None, None, None, 1e-6)
        return x

    def mean(self, x: Tensor, count: int) -> Tensor:
        """The mean of each `count` neighbouring rows of the layers' result."""
        out = self._room(x.shape[1])
        mean_rows(self.recorder, x, out, count)
        return out

    def standardize(self, x: Tensor, bias: str, scale: str) -> Tensor:
        """(x - the vector `bias`) * the vector `scale`, x itself."""
        standardize(self.recorder, x, self._model.vectors[bias], self._model.vectors[scale])
        return x

    def norm(self, x: Tensor, name: str, kind: str, eps: float) -> Tensor:
        """x normalized, times the vector `name`, plus its bias where it has one: x itself of LayerNorm."""
        vectors = self._model.vectors
        weight, bias = vectors[name], vectors.get(f"{name}_bias")
        if kind == "layer":
            add_rmsnorm(self.recorder, x, None, None, weight, None, eps, kind, bias, in_place=True)
            return x
        out = self._room(x.shape[1], x.shape[0], self._device.inner)
        add_rmsnorm(self.recorder, x, None, None, weight, out, eps, kind, bias)
        return out

    def act(self, x: Tensor, activation: str) -> Tensor:
        """act(x)."""
        out = self._room(x.shape[1], None, self._device.inner)
        gated(self.recorder, (x,), out, activation)
        return out

    def product(self, x: Any, name: str, out: Any = None, most: int | None = None) -> Tensor:
        """x @ weight.T + bias. out: where it goes (default: memory of its own); most: rows of x at most."""
        weight, most = self._model.weights[name], most or self.most
        if out is None:
            out = self._room(weight.shape[0])
        form = form_of(self._device, self._activations, [(weight.scheme, weight.shape[0])], most, True)
        if form != x.dtype:
            key = name, form
            if key not in self._made:
                nbytes = most * row_bytes(form, x.shape[1])
                self._made[key] = self._device.alloc(nbytes, label=LABEL)
            converted = tensor_of(form, self._made[key], 0, most, x.shape[0], x.shape[1])
            if form == "int8":
                quantize(self.recorder, x, converted)
            else:
                add_rmsnorm(self.recorder, x, None, None, None, converted, 1e-6, "none")
            x = converted
        matmul(self.recorder, x, weight, out, self._model.vectors.get(f"{name}_bias"), max_tokens=most)
        return out


def tower_kv_dtype(kv_dtype: str) -> str:
    """Of keys and values, which live within a layer: those of an engine with `kv_dtype`, in 16 bits at least."""
    return kv_dtype if kv_dtype in ("f32", "bf16") else "f16"


def encoder_bytes(device: Any, plan: TowerPlan, kv_dtype: str) -> int:
    """What an ImageEncoder allocates on the device."""
    counter = CountingDevice(device)
    encoder = ImageEncoder(counter, plan, kv_dtype=tower_kv_dtype(kv_dtype))
    encoder.record()
    return sum(counter.memory().values())


class ImageEncoder:
    """A loaded tower on a device. Everything is allocated here; encode() runs one image at a time."""

    def __init__(self, device: Any, plan: TowerPlan, *, kv_dtype: str, activations: str | None = None):
        """kv_dtype: of keys and values, which live within a layer. Raises DeviceError."""
        self.plan, self._device = plan, device
        self.model = TowerModel(device, plan)
        forward, config = plan.forward, plan.forward.config
        most, merged = plan.vision.max_patches, plan.vision.merge**2
        self._most, blocks = most, blocks_for(most)
        self._windows, longest = 0, 0
        if forward.tower.windowed:
            self._windows, longest = forward.window_room(most)
        self._kv = KVCache(device, config, blocks + self._windows, kv_dtype, None, BLOCK)
        self._buffers = StepBuffers.allocate(device, config, max_tokens=most, max_rows=1, max_pages=blocks)
        self._planner = TowerPlanner(device, forward, self.model, self._kv, self._buffers, activations=activations)
        if self._windows:
            pages = blocks_for(longest)
            self._planner.use_windows(
                StepBuffers.allocate(device, config, max_tokens=most, max_rows=self._windows, max_pages=pages)
            )
        columns, hidden = self.model.weights["patch"].shape[1], config.hidden_size
        turns = bool(self._planner._tables)
        self._places = [0, 4 * most * columns, 4 * most * (columns + hidden)]
        self._input = device.staging(4 * most * (columns + hidden + turns * config.head_dim), label=LABEL)
        self._patches = Tensor(self._input.buffer, (most, columns), "f32", 0)
        self._added = Tensor(self._input.buffer, (most, hidden), "f32", self._places[1])
        if turns:
            self._planner.rotations = Tensor(self._input.buffer, (most, config.head_dim), "f32", self._places[2])
        self._tail = TailWork(device, self.model, self._planner.activations, max(1, forward.num_parts(most)), merged)
        self._tail.added = self._added
        self._graphs: list[Any] = []
        self._results: list[Any] = []  # what each tail gives

    def load(self) -> None:
        """Read the weights. FormatError."""
        self.model.load()

    def encode(self, pixels: bytes, height: int, width: int) -> "Iterator[NDArray | None]":
        """Runs a graph at each step of the iterator and gives None; at last the embeddings, f32 [1 + deepstack layers,
        parts, out]."""
        forward = self.plan.forward
        patches = forward.patches(pixels, height, width, self.model.host)
        count = len(patches)
        parts = forward.num_parts(count)
        if not self._graphs:
            self._prepare()
        order = None
        if self._windows:
            order, sizes = forward.windows(height, width)
            self._write_windows(sizes)
        taken = slice(None) if order is None else order
        self._write(0, patches[taken], self._patches.shape[1])
        added = forward.positions(self.model.host.get("position_table"), height, width)
        if added is not None:
            self._write(1, added[taken])
        rotations = forward.rotations(height, width)
        if rotations is not None:
            self._write(2, rotations[taken])
        cells = parts * self.plan.vision.merge**2
        symbols = {"tokens": count, "parts": parts, "cells": cells, "rows": 1, "splits": 1}
        self._device.write(self._buffers.positions, array("i", range(self._most)))
        results = []
        for graph, result in zip(self._graphs, self._results, strict=True):
            graph.submit(**{name: symbols[name] for name in graph.symbols}).wait()
            if result is not None:
                found = np.frombuffer(self._device.read(result.with_rows(parts)), np.float32)
                results.append(found.reshape(parts, -1))
            yield None
        yield forward.assembled(np.stack([results[-1], *results[:-1]]), order, height, width, self.model.host)

    def _write_windows(self, sizes: "NDArray") -> None:
        """Each window of `sizes` patches is a row of its own, in pages of its own."""
        step, pages = self._planner.windows, -(-sizes // BLOCK)
        assert step is not None and len(sizes) <= self._windows
        rows, most = step.page_table.shape
        blocks = self._kv.table_entries(list(range(self._kv.num_pages)), 0, self._kv.num_pages, 0)
        table, first = np.zeros((rows, most), np.int32), np.cumsum(pages) - pages
        for row, (start, count) in enumerate(zip(first.tolist(), pages.tolist(), strict=True)):
            table[row, :count] = blocks[start : start + count]
        of_token = np.zeros(self._most, np.int32)
        of_token[: sizes.sum()] = np.repeat(np.arange(len(sizes)), sizes)
        places = np.zeros(self._most, np.int32)
        places[: sizes.sum()] = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        for tensor, values in ((step.page_table, table), (step.token_row, of_token), (step.positions, places)):
            self._device.write(tensor, values.tobytes())

    def _write(self, number: int, values: "NDArray", columns: int | None = None) -> None:
        """Rows of `columns` numbers: behind a row's values stand the zeros of before."""
        count, wide = len(values), columns or values.shape[1]
        at = self._places[number]
        rows = np.frombuffer(self._input.host[at : at + 4 * count * wide], np.float32).reshape(count, wide)
        rows[:, : values.shape[1]] = values

    def _prepare(self) -> None:
        """The page table and the graphs: the beginning, each layer (with the tail of those of deepstack), the end."""
        device, buffers = self._device, self._buffers
        blocks = buffers.page_table.shape[1]
        device.write(buffers.page_table, self._kv.table_entries(list(range(blocks)), 0, blocks, 0))
        device.write(buffers.token_row, array("i", [0]) * self._most)
        self._kv.map_to(self._kv.num_pages - 1)
        for recorder, result in self.record():
            self._graphs.append(recorder.finish())
            self._results.append(result)

    def record(self) -> "list[tuple[Any, Any]]":
        """(recorder, what its tail gives or None) of each graph; allocates the memory of tails. A CPU has one graph a
        layer, so that others run between; a GPU, which has all of them done in some milliseconds, one up to each tail."""
        forward, made, recorder = self.plan.forward, [], None
        deepstack, last = forward.tower.deepstack, forward.config.num_layers
        for part in range(-1, last + 1):
            recorder = recorder or self._device.record()
            tail = 0 if part == last else deepstack.index(part) + 1 if part in deepstack else None
            if part < 0:
                self._begin(recorder)
            else:
                self._planner.record_part(recorder, None if part == last else part)
            result = self._record_tail(recorder, tail)
            if result is not None or self._device.shares_memory:
                made.append((recorder, result))
                recorder = None
        return made

    def _record_tail(self, recorder: Any, tail: int | None) -> Any:
        """What it gives; None: there is no tail here."""
        if tail is None:
            return None
        hidden = self._planner.hidden.with_rows(recorder.symbol("tokens", self._most))
        self._tail.begin(recorder)
        if tail:  # the next layer goes on from the stream, and adds what this one has left to be added
            left = self._planner.left_by(self.plan.forward.tower.deepstack[tail - 1])
            left = None if left is None else left.with_rows(hidden.shape[0])
            hidden = self._tail.copy(hidden, left, self._buffers.positions)
        return self.plan.forward.tail(self._tail, hidden, tail)

    def _begin(self, recorder: Any) -> None:
        """hidden = patches @ weight.T, + positions or normalized by "pre_norm" where the tower has them."""
        tokens = recorder.symbol("tokens", self._most)
        recorder.upload(self._input)
        self._planner.share_attention(recorder)
        self._tail.recorder = recorder
        hidden, added = (tensor.with_rows(tokens) for tensor in (self._planner.hidden, self._added))
        norm = self.model.vectors.get("pre_norm")
        self._tail.product(self._patches.with_rows(tokens), "patch", hidden, self._most)
        if norm is not None:
            add_rmsnorm(recorder, hidden, None, None, norm, None, self._planner.config.norm_eps, in_place=True)
        if self.plan.forward.tower.positions:
            add_rmsnorm(recorder, hidden, added, None, None, None, 1e-6)

    def close(self) -> None:
        """Drop the graphs."""
        for graph in self._graphs:
            graph.close()
        self._graphs.clear()
