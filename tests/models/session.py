"""Runs a model step by step without an engine: fills the step buffers, records, replays, reads the logits."""

import numpy as np

from zse.cache.groups import group_layers
from zse.cache.layout import KVCache
from zse.cache.states import state_cache
from zse.formats.opening import open_model
from zse.kernels.op import HostFp8Activation
from zse.lora.slots import AdapterSlots
from zse.lora.targets import Targets
from zse.models.load import load_model, plan_model
from zse.models.registry import forward_of
from zse.plan.record import Planner, StepBuffers, new_tensor
from zse.tensor import OwnRows


def load(device, path, quantize=None):
    """A model, completely loaded."""
    with open_model(path) as source:
        model = load_model(device, plan_model(source, quantize=quantize))
        model.wait()
        return model


class Session:
    """One decoder with `rows` sequences, whose pages are scattered over the cache. max_lines: of logits (default: one a token).
    adapters: Images; adapt() says which row has which. owners: of ranks that have rows of their own, the rank of each."""

    def __init__(
        self,
        device,
        model,
        *,
        activations=None,
        kv_dtype=None,
        rows=2,
        max_tokens=64,
        max_lines=None,
        context=256,
        deterministic=False,
        adapters=(),
        group=None,
        owners=None,
        whole_stream="",
    ):
        self.device, self.model = device, model
        gpu = device.kernels == "gpu"
        activations, kv_dtype = activations or ("bf16" if gpu else "f32"), kv_dtype or ("bf16" if gpu else "f32")
        pages = -(-context // 16)
        groups = group_layers(model.config)
        if not model.config.global_head_dim:
            # all layers in every page
            groups = (tuple(i for i in range(model.config.num_layers) if model.config.kv_layer(i) >= 0),)
        every = len(groups) * rows * pages
        self.kv = KVCache(device, model.config, every, kv_dtype, groups)
        lines = max_lines or max_tokens
        self.buffers = StepBuffers.allocate(
            device, model.config, max_tokens=max_tokens, max_rows=lines, max_pages=pages, groups=len(groups)
        )
        self.owners, self.rank = owners, group.rank if group else 0
        if owners:
            arrays = (new_tensor(device, "step", "i32", max_tokens) for _ in OwnRows._fields)
            self.buffers = self.buffers._replace(own=OwnRows(*arrays))
        self.slots = self.adapted = None
        if adapters:
            self.slots = AdapterSlots(device, Targets(model.config), len(adapters), max(each.rank for each in adapters))
            for image in adapters:
                self.slots.keep(image)
            of_row = new_tensor(device, "step", "i32", rows)
            self._put(of_row, [-1] * rows)
            self.adapted = self.slots.tensors(of_row)
        forward, self.states = forward_of(model.config), None
        if model.config.has_state:  # row r has slot r
            self.states = state_cache(device, forward, rows)
        self.decoder = Planner(
            device,
            forward,
            model,
            self.kv,
            self.buffers,
            activations=activations,
            deterministic=deterministic,
            adapters=self.slots,
            states=self.states,
            group=group,
            whole_stream=whole_stream,
        )
        order = [int(page) for page in np.random.default_rng(7).permutation(every)]
        self.kv.map_to(every - 1)
        table = self.buffers.page_table
        for group in range(len(groups)):
            mine = order[group * rows * pages : (group + 1) * rows * pages]
            at = table.offset + 4 * group * lines * pages
            self._put(
                table._replace(shape=(rows, pages), offset=at), self.kv.table_entries(mine, 0, rows * pages, group)
            )
        self.lengths = [0] * rows
        self._graphs = {}

    def adapt(self, *ids):
        """Each row's adapter by its id, None: none."""
        self._put(self.adapted.of_row, [-1 if id is None else self.slots.slot_of(id) for id in ids])

    def _put(self, tensor, values):
        self.device.write(tensor, np.array(values, np.int32).tobytes())

    def step(self, batch, *, wanted=None, max_tokens=None):
        """batch: [(row, token ids), ...], each appended to its sequence. Logits f32 [lines, vocab] of every token, or
        of the flat indices `wanted`, which are then gathered before the head."""
        buffers, context = self.buffers, 0
        tokens, positions, token_row, run_start, run_slot = [], [], [], [0], []
        for row, ids in batch:
            tokens += [int(token) for token in ids]
            positions += range(self.lengths[row], self.lengths[row] + len(ids))
            token_row += [row] * len(ids)
            self.lengths[row] += len(ids)
            context = max(context, self.lengths[row])
            run_start.append(len(tokens))
            run_slot.append(row)
        at = len(tokens)
        for tensor, values in (
            (buffers.token_ids, tokens),
            (buffers.positions, positions),
            (buffers.token_row, token_row),
            (buffers.logit_rows, wanted or ()),
            (buffers.run_start, run_start),
            (buffers.run_slot, run_slot),
        ):
            if values and tensor is not None:
                self._put(tensor.with_rows(len(values)), values)
        mine = self._put_own(positions, token_row) if self.owners else at
        lines = at if wanted is None else len(wanted)
        size = max_tokens or at
        key = (size, wanted is None)
        if key not in self._graphs:
            recorder = self.device.record()
            self.decoder.record(recorder, max_tokens=size, every_token=wanted is None, adapted=self.adapted)
            self._graphs[key] = recorder.finish()
        graph = self._graphs[key]
        symbols = self.decoder.symbols(at, lines, context, runs=len(batch)) | {"own": mine}
        graph.run(**{name: symbols[name] for name in graph.symbols})
        logits = self.device.read(buffers.logits.with_rows(lines))
        return np.frombuffer(logits, np.float32).reshape(lines, buffers.logits.shape[1]).copy()

    def _put_own(self, positions, token_row) -> int:
        """Which of the step's tokens are this rank's."""
        own, owner = self.buffers.own, [self.owners[row] for row in token_row]
        mine = [index for index, rank in enumerate(owner) if rank == self.rank]
        place = [self.buffers.token_ids.shape[0]] * len(owner)
        for number, index in enumerate(mine):
            place[index] = number
        arrays = mine, [positions[index] for index in mine], [token_row[index] for index in mine], place, owner
        for tensor, values in zip(own, arrays, strict=True):
            if values:
                self._put(tensor.with_rows(len(values)), values)
        return len(mine)

    def run(self, ids, sizes=None, row=0):
        """Logits of a whole sequence, in steps of `sizes` tokens (default: one step)."""
        logits, at = [], 0
        for size in sizes or [len(ids)]:
            logits.append(self.step([(row, ids[at : at + size])]))
            at += size
        assert at == len(ids)
        return np.concatenate(logits)

    def reset(self):
        self.lengths = [0] * len(self.lengths)


def dequantized(device, model) -> dict[str, np.ndarray]:
    """What the planes on a GPU stand for, by role, f32."""
    dtypes = {"u8": np.uint8, "e4m3": np.uint8, "f16": np.float16, "f32": np.float32, "bf16": np.uint16}
    config = model.config
    q, kv, inner = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    found = {}
    for name, weight in model.weights.items():
        planes = {
            plane: np.frombuffer(device.read(tensor), dtypes[tensor.dtype]).reshape(tensor.shape)
            for plane, tensor in weight.planes.items()
        }
        values = weight.scheme.dequantize(planes, *weight.shape, weight.layout)
        at, _, stem = name.rpartition(".")
        cuts = {"qkv": (("q", q), ("k", kv), ("v", kv)), "gate_up": (("gate", inner), ("up", inner))}.get(stem)
        first = 0
        for role, rows in cuts or ((stem, len(values)),):
            found[f"{at}.{role}" if at else role] = values[first : first + rows]
            first += rows
    for name, vector in model.vectors.items():
        values = np.frombuffer(device.read(vector), np.float32)
        if name.endswith("qkv_bias"):
            at = name[: -len("qkv_bias")]
            for role, part in zip("qkv", np.split(values, [q, q + kv]), strict=True):
                found[f"{at}{role}_bias"] = part
        else:
            found[name] = values
    return found


def quantized(x):
    """An activation as fp8 products see it."""
    return HostFp8Activation.quantize(x).dequantize().astype(x.dtype)


def loss_of(logits, reference) -> float:
    """Root of the mean square of the differences, as a part of that of the logits."""
    assert np.isfinite(logits).all()
    return float(
        np.sqrt(np.mean((logits - reference) ** 2, dtype=np.float64) / np.mean(reference**2, dtype=np.float64))
    )
