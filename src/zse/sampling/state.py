"""The sampler's parameters on the device: one line for each row of logits, rewritten when the row's request changes.

The draws themselves are kernels (zse.kernels.sample). What penalties look at is lists that the host keeps (CPU), or the
token history on the device (GPU), where a step can be submitted before the host has read the last token. What is random
depends on the request's seed and the position of the token alone, so a request gives the same tokens alone, in a batch,
and after a preemption."""

from array import array
from math import prod

from zse.dtypes import ITEM_BYTES, VIEW_FORMAT
from zse.kernels.sample import MAX_LOGPROBS, PARAMETERS, row_parameters, sample, sample_tensors
from zse.sampling.params import MAX_LOGIT_BIAS_ENTRIES, SamplingParams
from zse.tensor import Tensor

_NEUTRAL = (1.0, 0.0, 0.0)  # repetition, presence, frequency
RESULTS = ("tokens", "status", "logprob", "top_ids", "top_logprobs")
LISTS = ("bias_ids", "bias_values", "bias_saved", "seen_ids", "seen_counts", "seen_saved")  # of all lines together
LEAST_PENALTY = 1e-30  # logits are divided by it, in f32: they stay finite
# (parameter of the kernels, field of SamplingParams) for all that are a field's value as it is.
_FIELDS = tuple(
    (name, field)
    for name in PARAMETERS
    for field in (name, f"{name}_penalty")
    if field in SamplingParams.__struct_fields__ and name != "seed"
)
_ALIGN = 16  # bytes: arrays inside a staging


def input_nbytes(max_rows: int, family: str = "gpu") -> int:
    """Bytes of the parameters of `max_rows` lines."""
    return sum(_aligned(ITEM_BYTES[dtype] * max_rows) for dtype in row_parameters(family).values())


def result_nbytes(max_rows: int) -> int:
    """Bytes of what is sampled for `max_rows` lines, log-probabilities included."""
    return 3 * _aligned(4 * max_rows) + 2 * _aligned(4 * MAX_LOGPROBS * max_rows)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


class SamplerState:
    """max_rows: lines. max_tokens: tokens that the requests of one step can have together, prompts included.

    On a GPU: history, the TokenHistory that penalties look at (zse.kernels.feed writes it). inputs, results: places as
    (Staging, byte offset) for the parameters, input_nbytes() bytes, and for what was sampled, result_nbytes() bytes;
    their owner then records their copies. Without them the state makes its own, and record() records the copies too."""

    def __init__(
        self, device, vocab_size: int, *, max_rows: int, max_tokens: int, history=None, inputs=None, results=None
    ):
        self._device, self._vocab_size, self.history = device, vocab_size, history
        shapes = sample_tensors(max_rows, vocab_size, max_rows * MAX_LOGIT_BIAS_ENTRIES, max_tokens, device.kernels)
        self._reads_history = "history_row" in shapes  # of the device; else lists of the tokens that were seen
        if self._reads_history and history is None:
            raise ValueError("SamplerState on a GPU needs the token history")
        self._owned = [None, None]
        if inputs is None:
            inputs = device.staging(input_nbytes(max_rows, device.kernels), label="sampler"), 0
            self._owned[0] = inputs[0]
        if results is None:
            results = device.staging(result_nbytes(max_rows), label="sampler"), 0
            self._owned[1] = results[0]
        self._tensors, self._views = {}, {}
        self._place(inputs, {name: shapes.pop(name) for name in row_parameters(device.kernels)})
        self._place(results, {name: shapes.pop(name) for name in RESULTS})
        for name, (dtype, shape) in shapes.items():
            tensor = self._tensors[name] = _new(device, dtype, shape)
            if device.shares_memory:
                self._views[name] = tensor.view()
        views = self._views
        self._tokens, self._status, self._counter = views["tokens"], views["status"], views["counter"]
        self._requests: list = [None] * max_rows  # whose parameters each line holds
        self._batch: list = []
        self._penalized: list[int] = []  # lines of the batch
        self.wants_logprobs = False
        self._biased: list = []  # requests that the bias lists hold, in line order
        self._histories: dict[int, _History] = {}  # by arrival, of requests with penalties (CPU)
        self._num_seen = 0

    def _place(self, place, shapes) -> None:
        """Tensors of these shapes one after another in a part of a Staging, and the host's views of them."""
        staging, at = place
        for name, (dtype, shape) in shapes.items():
            tensor = self._tensors[name] = Tensor(staging.buffer, shape, dtype, at)
            self._views[name] = staging.host[at : at + tensor.nbytes].cast(VIEW_FORMAT[dtype])
            at += _aligned(tensor.nbytes)

    @property
    def tokens(self) -> Tensor:
        """i32 [max_rows]: what the last replay sampled, on the device."""
        return self._tensors["tokens"]

    def record(self, recorder, logits, first: int = 0) -> None:
        """Record sampling from `logits` f32 [rows, vocab_size or fewer], which are those of the lines from `first` on."""
        inputs, results = self._owned
        if inputs is not None:
            recorder.upload(inputs)
        tensors, vocab = self._tensors, logits.shape[1]
        if vocab < self._vocab_size:  # of the first ids alone: a row has fewer parts
            shapes = sample_tensors(1, vocab, 1, 1, self._device.kernels)
            parts = {name: tensor for name, tensor in tensors.items() if len(shapes[name][1]) == 3}
            rows = {name: tensor.shape[:1] + shapes[name][1][1:] for name, tensor in parts.items()}
            tensors = tensors | {name: tensor._replace(shape=rows[name]) for name, tensor in parts.items()}
        if first:
            tensors = {name: tensor if name in LISTS else _from_line(tensor, first) for name, tensor in tensors.items()}
        sample(recorder, logits, history=self.history, **tensors)
        if results is not None:
            recorder.download(results)

    def prepare(self, requests: list, lengths=None, drafts=None) -> None:
        """Line i samples for requests[i] (scheduler Requests) in the next replay, after lengths[i] tokens (default: all
        that the request has; more when a batch in flight will give the last of them, or when drafts stand between).
        drafts: request → token ids behind its own, for lines that are sampled behind some of them; a request has a line
        for each then, one after another."""
        if lengths is None:
            lengths = [len(request.tokens) for request in requests]
        self._counter[: len(requests)] = array("q", lengths)
        if requests != self._batch:
            self._batch = requests
            mine = self._requests
            for line, request in enumerate(requests):
                if mine[line] is not request:
                    self._write_parameters(line, request)
            all_params = [request.params for request in requests]
            self._penalized = [
                line
                for line, params in enumerate(all_params)
                if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != _NEUTRAL
            ]
            self.wants_logprobs = any(params.logprobs is not None for params in all_params)
            # None now and none before: the lists are empty.
            if self._biased != requests and (self._biased or any(params.logit_bias for params in all_params)):
                self._write_biases(requests)
        if not self._reads_history:
            if self._penalized or self._num_seen or self._histories:
                self._write_seen(requests, lengths, drafts)
            return
        for line in self._penalized:
            self._views["history_row"][line], self._views["history_len"][line] = requests[line].row, lengths[line]

    def read(self) -> list[tuple[int, tuple[float, list[tuple[int, float]]] | None]]:
        """(token, None or (logprob, [(token, logprob), ...])) of each line; token -1: the logits were not finite."""
        count = len(self._batch)
        if not self.wants_logprobs and not any(self._status[:count].tolist()):
            return [(token, None) for token in self._tokens[:count].tolist()]
        results: list[tuple[int, tuple[float, list[tuple[int, float]]] | None]] = []
        for line, request in enumerate(self._batch):
            if self._status[line]:
                results.append((-1, None))
            elif request.params.logprobs is None:
                results.append((self._tokens[line], None))
            else:
                results.append((self._tokens[line], self._logprobs(line, request.params.logprobs)))
        return results

    # -- a line that is sampled again, where host and device share memory

    def token_of(self, line: int) -> int:
        """What the last replay sampled in a line; -1: the logits were not finite."""
        return -1 if self._status[line] else self._tokens[line]

    def put(self, line: int, token: int) -> int:
        """Let `token` stand, the only one that may. Not where log-probabilities are wanted: they are of another."""
        self._tokens[line] = token
        return token

    def draw_again(self, line: int, more: int) -> None:
        """The next replay draws this line with the random number of (seed, position + more)."""
        self._counter[line] += more

    def keep(self, line: int, token: int, logits: memoryview) -> None:
        """Let `token` stand where the last replay sampled another from the same logits f32 [vocab_size]."""
        sampled = self._tokens[line]
        if self._status[line] or sampled == token:
            return
        self._views["logprob"][line] += logits[token] - logits[sampled]
        self._tokens[line] = token

    def _logprobs(self, line: int, wanted: int) -> tuple[float, list[tuple[int, float]]]:
        views = self._views
        first = line * self._tensors["top_ids"].shape[1]
        ids, values = views["top_ids"][first : first + wanted], views["top_logprobs"][first : first + wanted]
        return views["logprob"][line], [(id, value) for id, value in zip(ids, values, strict=True) if id >= 0]

    def _write_parameters(self, line: int, request) -> None:
        params, views = request.params, self._views
        for name, field in _FIELDS:
            views[name][line] = getattr(params, field)
        views["repetition"][line] = max(params.repetition_penalty, LEAST_PENALTY)
        views["seed"][line] = request.seed
        views["num_logprobs"][line] = -1 if params.logprobs is None else params.logprobs
        if self._reads_history:
            views["history_len"][line], views["prompt_len"][line] = 0, request.prompt_len
            views["filtered"][line] = params.is_filtered
        self._requests[line] = request

    def _write_biases(self, requests: list) -> None:
        starts, ids, values = array("i", [0]), array("i"), array("f")
        for request in requests:
            for token, bias in (request.params.logit_bias or {}).items():
                ids.append(token)
                values.append(bias)
            starts.append(len(ids))
        # All lines: a larger batch without biases finds the lists empty and does not write them.
        starts.extend([len(ids)] * (len(self._requests) - len(requests)))
        for name, content in (("bias_start", starts), ("bias_ids", ids), ("bias_values", values)):
            if content:
                self._device.write(self._tensors[name].with_rows(len(content)), memoryview(content))
        self._biased = list(requests) if ids else []

    def _write_seen(self, requests: list, lengths, drafts) -> None:
        if not self._penalized:
            starts = self._views["seen_start"]
            starts[:] = array("i", bytes(4 * len(starts)))
            self._num_seen = 0
            self._histories.clear()
            return
        before, self._histories, penalized = self._histories, {}, set(self._penalized)
        starts, ids, counts = self._views["seen_start"], self._views["seen_ids"], self._views["seen_counts"]
        at = 0
        for line, request in enumerate(requests):
            if line in penalized:
                history = self._histories.get(request.arrival)
                if history is None:
                    history = self._histories[request.arrival] = before.get(request.arrival) or _History(request)
                    history.update(request)
                some_ids, some_counts = history.ids, history.counts
                if drafts and lengths[line] > len(request.tokens) and request in drafts:
                    behind = drafts[request][: lengths[line] - len(request.tokens)]
                    some_ids, some_counts = history.followed_by(behind)
                end = at + len(some_ids)
                ids[at:end], counts[at:end] = some_ids, some_counts
                at = end
            starts[line + 1] = at
        self._num_seen = at


class _History:
    """The distinct tokens that penalties look at and how often each was sampled."""

    __slots__ = ("counts", "ids", "places", "seen")

    def __init__(self, request):
        self.ids, self.counts = array("i"), array("i")
        self.places: dict[int, int] = {}
        # Presence and frequency look at the reply, repetition at the prompt too.
        self.seen = 0 if request.params.repetition_penalty != 1.0 else request.prompt_len

    def update(self, request) -> None:
        """Take in the tokens that came since last time."""
        tokens = request.tokens
        for position in range(self.seen, len(tokens)):
            token = tokens[position]
            place = self.places.get(token)
            if place is None:
                place = self.places[token] = len(self.ids)
                self.ids.append(token)
                self.counts.append(0)
            if position >= request.prompt_len:
                self.counts[place] += 1
        self.seen = len(tokens)

    def followed_by(self, tokens) -> tuple[array, array]:
        """(ids, counts) as they are when the reply goes on with these tokens; this object stays as it is."""
        ids, counts = self.ids[:], self.counts[:]
        places: dict[int, int] = {}
        for token in tokens:
            place = self.places.get(token, places.get(token))
            if place is None:
                place = places[token] = len(ids)
                ids.append(token)
                counts.append(0)
            counts[place] += 1
        return ids, counts


def _from_line(tensor: Tensor, first: int) -> Tensor:
    """The same tensor without its first lines."""
    nbytes = ITEM_BYTES[tensor.dtype] * prod(tensor.shape[1:])
    return Tensor(
        tensor.buffer, (tensor.shape[0] - first, *tensor.shape[1:]), tensor.dtype, tensor.offset + first * nbytes
    )


def _new(device, dtype: str, shape: tuple[int, ...]) -> Tensor:
    return Tensor(device.alloc(ITEM_BYTES[dtype] * prod(shape), label="sampler"), shape, dtype)
