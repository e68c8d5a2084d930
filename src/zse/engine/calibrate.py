"""What the inputs of a model's products are on a text, layer by layer, for a conversion that quantizes by them
(zse.quant.gptq).

The forward is the engine's: its trace, launches and kernels on the CPU, in f32, cut where a product reads
(plan/layers.py). A layer runs twice over the text: as it is, to see its inputs, and with its weights as they were
rounded, so that the next layer's inputs are those that it will get. One layer is in memory at a time, in f32, with the
squares of its inputs (of experts the inputs: calibrate_experts.py), and what the layers hand on for the whole text: 4
to 8 bytes for each token and hidden number."""

import hashlib
import threading
import time
from array import array
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zse.cache.layout import KVCache
from zse.cache.pages import BLOCK
from zse.cache.states import state_cache
from zse.engine.calibrate_experts import ExpertInputs, experts_of, stacks_of
from zse.errors import ConfigError, UnsupportedError
from zse.formats.source import ModelSource
from zse.models.load import load_model, place, plan_model
from zse.models.quantize_load import fill_parts, write_rows
from zse.models.registry import forward_of
from zse.models.weight_plan import MatrixPlan, part_of
from zse.plan.layers import LayerPlanner
from zse.plan.record import StepBuffers
from zse.plan.trace import Value
from zse.quant import gptq
from zse.quant.scheme import LAYOUT, TILE_ROWS, DenseScheme
from zse.runtime.opening import open_device
from zse.tokenizer.load import load_tokenizer

CHUNK = 512  # tokens of the text that are one sequence
DEFAULT_TOKENS = (
    32 * CHUNK
)  # four times what benchmarks/LOG.md measured; some minutes with a model of 270M parameters on two cores
F32 = DenseScheme("f32")


class Calibration:
    """source: an open model; text: what it is run over, up to `tokens` tokens; names: the tensors that will be rounded:
    what is in no layer is rounded as ever, and goes through the forward as the file has it. Each expert is rounded by
    its own inputs. Raises as plan_model(), UnsupportedError for models that it does not walk, ConfigError for a text
    that is too short."""

    def __init__(self, source: ModelSource, names: set[str], text: str, tokens: int = DEFAULT_TOKENS, threads=None):
        started = time.monotonic()
        plan = plan_model(source)
        config = plan.config
        if not config.causal or config.num_shared_kv or config.ple_width or config.global_head_dim:
            kinds = ["decoders whose layers have keys and values of their own, of one size"]
            raise UnsupportedError(f"{source.path}: calibrating", config.architecture, kinds)
        self._chunk = min(CHUNK, config.max_context)
        chunks = _chunks(load_tokenizer(source), text, self._chunk, tokens)
        self._expert_of, self._stacks = experts_of(plan.matrices), stacks_of(plan.matrices)
        names = {name for name in names if name not in self._stacks or self._stacks[name][0] % TILE_ROWS == 0}
        names |= {part for name in names & self._stacks.keys() for part in self._stacks[name][1]}
        self._plan = plan = plan._replace(matrices=tuple(_in_f32(matrix, names) for matrix in plan.matrices))
        self._place_of = {part.info.name: (matrix, part.first) for matrix in plan.matrices for part in matrix.parts}
        for name in names & self._stacks.keys():
            self._place_of[name] = self._place_of[self._stacks[name][1][0]]
        self.names = {name for name in names if self._layer_of(name) is not None}
        self._device = device = open_device("cpu", threads)
        begin = [matrix for matrix in plan.matrices if _layer(matrix.name) is None and matrix.name != "head"]
        self._fixed = load_model(device, part_of(plan, begin, plan.vectors), verify_weights=False)
        self._fixed.wait()
        weights, _ = place(plan, None)  # known to the trace, and not there before their layer's turn
        model = SimpleNamespace(
            config=config,
            weights=weights | self._fixed.weights,
            vectors=self._fixed.vectors,
            lazy_experts=None,
            host_experts=None,
            share=None,
        )
        self._weights = model.weights
        pages = -(-self._chunk // BLOCK)
        kv = KVCache(device, config, pages, "f32")
        kv.map_to(pages - 1)
        buffers = StepBuffers.allocate(device, config, max_tokens=self._chunk, max_rows=1, max_pages=pages)
        for tensor, values in (
            (buffers.positions, range(self._chunk)),
            (buffers.page_table, kv.table_entries(list(range(pages)), 0, pages)),
        ):
            device.write(tensor, array("i", values).tobytes())
        forward, states = forward_of(config), None
        if config.has_state:
            states = state_cache(device, forward, 1)
            for run, value in ((buffers.run_start, [0, self._chunk]), (buffers.run_slot, [0])):
                device.write(run, array("i", value).tobytes())
        self._planner = LayerPlanner(device, forward, model, kv, buffers, activations="f32", states=states)
        self._states = self._run_beginning(chunks)
        self._layer = -1
        self._parts: list[Any] = []  # models and buffers of the layer
        self._squares: dict[Value, NDArray] = {}
        self._inputs: dict[Value, gptq.Inputs] = {}
        self._experts: dict[Value, ExpertInputs] = {}
        self._value_of: dict[str, Value] = {}  # a matrix → what it multiplies
        self._lock = threading.Lock()
        self.num_tokens, self.seconds = len(chunks) * self._chunk, time.monotonic() - started
        self.provenance = {"tokens": self.num_tokens, "text_sha256": hashlib.sha256(text.encode()).hexdigest()}

    # -- for the conversion

    def comes_next(self, name: str) -> bool:
        """Whether `name` is of a later layer than what was asked for so far: enter() is to be called."""
        return name in self.names and (self._layer_of(name) or 0) > self._layer

    def enter(self, name: str) -> None:
        """Go on to the layer of tensor `name`. All of the layer before has been rounded."""
        started, layer = time.monotonic(), self._layer_of(name)
        assert layer is not None
        while self._layer < layer:
            if self._layer >= 0:
                self._run_layer()
            self._layer += 1
            self._load_layer()
        self._collect()
        self.seconds += time.monotonic() - started

    def rows_of_one(self, name: str) -> int | None:
        """Of a tensor that holds several experts the rows of each, whose inputs are others; else None."""
        return self._stacks[name][0] if name in self._stacks and name in self.names else None

    def inputs(self, name: str, row: int = 0) -> gptq.Inputs | None:
        """What is known of the inputs of tensor `name`, of a stack of experts of the one at `row`; None of one that is
        not rounded by them. Any thread."""
        if name not in self.names:
            return None
        name = self._part(name, row)[0]
        with self._lock:
            value = self._value_of[self._place_of[name][0].name]
            if name in self._expert_of:
                started = time.monotonic()
                found = self._experts[value].of(self._expert_of[name])
                self.seconds += time.monotonic() - started
                return found
            if value not in self._inputs:
                started = time.monotonic()
                self._inputs[value] = gptq.inputs_of(self._squares.pop(value))
                self.seconds += time.monotonic() - started
            return self._inputs[value]

    def rounded(self, name: str, start: int, values: NDArray) -> None:
        """Rows from `start` on of tensor `name` as they will be read, f32 [rows, K]. Any thread."""
        name, start = self._part(name, start)
        matrix, first = self._place_of[name]
        write_rows(matrix, self._weights[matrix.name], first + start, F32.quantize(values))

    def close(self) -> None:
        """Give back all memory; what it says of itself stays. Closing twice does nothing."""
        self._free_layer()
        self._states, self._squares, self._inputs, self._experts = [], {}, {}, {}
        self._fixed.buffer.free()
        self._device.close()

    def _part(self, name: str, row: int) -> tuple[str, int]:
        """Of a row of a tensor: the part of it and the row there."""
        if name not in self._stacks:
            return name, row
        rows, parts = self._stacks[name]
        return parts[row // rows], row % rows

    # -- the walk

    def _layer_of(self, name: str) -> int | None:
        """The layer that tensor `name` is part of; None for none."""
        found = self._place_of.get(name)
        return None if found is None else _layer(found[0].name)

    def _run_beginning(self, chunks: list[list[int]]) -> list[bytes]:
        """What the first layer gets of each chunk."""
        planner, device = self._planner, self._device
        recorder = device.record()
        planner.record_beginning(recorder)
        states = []
        with closing(recorder.finish()) as graph:
            for chunk in chunks:
                device.write(planner.buffers.token_ids, array("i", chunk).tobytes())
                graph.run()
                states.append(device.read(planner.carried))
        return states

    def _load_layer(self) -> None:
        self._free_layer()
        mine = [matrix for matrix in self._plan.matrices if _layer(matrix.name) == self._layer]
        stored = part_of(self._plan, [matrix for matrix in mine if matrix.scheme != F32])
        wide = part_of(self._plan, [matrix for matrix in mine if matrix.scheme == F32])
        model = load_model(self._device, stored, verify_weights=False)
        buffer = self._device.alloc(sum(wide.memory_bytes.values()), label="weights")
        weights, _ = place(wide, buffer)
        parts = [(part, matrix, weights[matrix.name]) for matrix in wide.matrices for part in matrix.parts]
        fill_parts(self._plan, parts, self._device.threads)
        model.wait()
        self._parts = [model, buffer]
        self._weights.update(model.weights | weights)

    def _free_layer(self) -> None:
        for part in self._parts:
            (part.buffer if hasattr(part, "buffer") else part).free()
        self._parts = []

    def _collect(self) -> None:
        """The layer over the text as it is: the squares of what its products read."""
        device, planner = self._device, self._planner
        self._inputs, self._squares, self._value_of, self._experts = {}, {}, {}, {}
        # What runs, and what it leaves for a product to read, of experts with the routing.
        graphs: list[tuple[Any, Any, Any, Any]] = []

        def tap(run, node) -> None:
            value, routing = node.inputs[0], None
            self._value_of[run.prefix + node.weights["weight"]] = value
            if node.op == "experts":
                if value in self._experts or run.prefix + node.weights["weight"] not in rounded:
                    return
                self._experts[value] = ExpertInputs(node.options["gather"])
                routing = run.t[node.inputs[1]].ids
            elif any(value is other and ids is None for _, other, _, ids in graphs):
                return
            graphs.append((opened.enter_context(closing(run.recorder.finish())), value, run.t[value], routing))
            run.recorder = device.record()

        rounded = {matrix.name for matrix in self._plan.matrices if matrix.scheme == F32}

        with ExitStack() as opened:
            planner.record_layer(device.record(), self._layer, tap)  # what comes behind the last tap is not run
            for chunk in self._states:
                device.write(planner.carried, chunk)
                for graph, value, tensor, routing in graphs:
                    graph.run()
                    x = np.frombuffer(device.read(tensor), np.float32).reshape(tensor.shape)
                    if routing is not None:
                        ids = np.frombuffer(device.read(routing), np.int32).reshape(routing.shape)
                        self._experts[value].add(x, ids)
                        continue
                    self._squares[value] = x.T @ x + self._squares.get(value, np.float32(0))

    def _run_layer(self) -> None:
        """The layer over the text with its weights as they were rounded: what the next one gets."""
        device, planner = self._device, self._planner
        recorder = device.record()
        planner.record_layer(recorder, self._layer)
        with closing(recorder.finish()) as graph:
            for number, chunk in enumerate(self._states):
                device.write(planner.carried, chunk)
                graph.run()
                self._states[number] = device.read(planner.carried)


def _layer(name: str) -> int | None:
    """Of a matrix: "layers.3.o" → 3."""
    return int(name.split(".")[1]) if name.startswith("layers.") else None


def _in_f32(matrix: MatrixPlan, names: set[str]) -> MatrixPlan:
    """A matrix of a layer that will be rounded, as the walk has it in memory."""
    if _layer(matrix.name) is None or not any(part.info.name in names for part in matrix.parts):
        return matrix
    return matrix._replace(scheme=F32, layout=LAYOUT, order=None)


def _chunks(tokenizer: Any, text: str, length: int, most: int) -> list[list[int]]:
    """The text's first tokens in sequences of one length, each with the model's first token."""
    begin = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
    step = length - len(begin)
    ids = tokenizer.encode(text, add_bos=False)[: max(1, most // length) * step]
    if len(ids) < step:
        raise ConfigError(f"the text to calibrate on has {len(ids)} tokens, and {step} are the least")
    return [begin + ids[at : at + step] for at in range(0, len(ids) - step + 1, step)]
