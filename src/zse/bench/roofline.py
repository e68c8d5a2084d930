"""What a step of a model must move and multiply, and so the least time it takes on a machine with given floors.

Weights count as the engine stores them, once a step; a multiply-add counts once, although int16 activations take two of
int8."""

from math import prod
from typing import Any, NamedTuple

from zse.bench.floors import FloorMeter, Floors, best, medians
from zse.cache.layout import layer_nbytes
from zse.cache.pages import BLOCK
from zse.dtypes import ITEM_BYTES
from zse.errors import EngineError
from zse.runtime.symbol import Sym

TOLERANCE = 1.1  # a figure and its floor are seconds apart
AGAIN = 6  # more measures of floors before a figure is refused: others' work may have slowed the first ones


class Work(NamedTuple):
    """bytes that are read; multiply-adds of 8-bit numbers, and of wider ones."""

    bytes: int = 0
    int8: int = 0
    f32: int = 0

    def plus(self, other: "Work") -> "Work":
        return Work(*(mine + more for mine, more in zip(self, other, strict=True)))

    def seconds(self, floors: Floors) -> float:
        """The least time: reading and multiplying go on side by side."""
        return max(self.bytes / floors.read, self.int8 / floors.int8 + self.f32 / floors.f32) / 1e9


def share_of_experts(chosen: float, experts: int, tokens: float) -> float:
    """How much of a stack of experts is read for `tokens` tokens with `chosen` experts each, at random: one token reads
    chosen / experts."""
    return 1 - (1 - chosen / experts) ** tokens


def weights_bytes(model: Any) -> int:
    """Bytes of the matrices that every step reads: all but an embedding that is not the head too."""
    return sum(
        weight.scheme.nbytes(*weight.shape, weight.layout)
        for name, weight in model.weights.items()
        if name != "embed" or "head" not in model.weights
    )


def step_work(runner: Any, tokens: int, rows: int, context: float) -> Work:
    """A step of `tokens` tokens of `rows` sequences, `rows` of which get logits, each token seeing `context` keys on
    average."""
    model, config, kv = runner.model, runner.model.config, runner.kv
    products, unread = {"int8": 0, "f32": 0}, 0.0
    for name, weight in model.weights.items():
        if name != "embed" or "head" not in model.weights:
            form = "int8" if runner.planner.activations == "int8" and "int8" in weight.scheme.forms else "f32"
            count = weight.shape[0] * weight.shape[1] * (tokens if name.startswith("layers.") else rows)
            if config.moe is not None and name.endswith("_exps"):
                chosen, experts = config.moe.experts_per_token, config.moe.num_experts
                count = count * chosen // experts
                nbytes = weight.scheme.nbytes(*weight.shape, weight.layout)
                unread += nbytes * (1 - share_of_experts(chosen, experts, tokens))
            products[form] += count
    attending = [layer for layer in range(config.num_layers) if config.mixer(layer) == "attention"]
    seen_by = {layer: min(int(context), config.window(layer) or int(context)) for layer in attending}
    keys = sum(rows * seen * layer_nbytes(config, kv.dtype, layer) // BLOCK for layer, seen in seen_by.items())
    attention = tokens * sum(seen_by.values()) * config.num_heads * sum(config.attended)
    states = 0 if runner.states is None else 2 * rows * runner.states.slot_nbytes  # read and written
    return Work(weights_bytes(model) - int(unread) + keys + states, products["int8"], products["f32"] + attention)


class Launches:
    """What each launch of an engine's recordings does, found by its arguments: planes of weights, pages of keys, plain
    tensors."""

    def __init__(self, runner: Any):
        self._kv, self._config, self._states = runner.kv, runner.model.config, runner.states
        self._weights = {
            plane.address: weight for weight in runner.model.weights.values() for plane in weight.planes.values()
        }

    def work(self, launch: Any, symbols: dict[str, int], rows: int, context: int) -> Work:
        """Of one replay with `symbols`, a step of `rows` sequences of at most `context` tokens. Tensors count once,
        weights whole unless rows of them are looked up; scratch memory does not count."""
        done, seen = Work(), set()
        args = launch.args
        tokens = _size(args.get("tokens", getattr(args.get("out"), "shape", (0,))[0]), symbols)
        for name, arg in args.items():
            address = getattr(arg, "address", None)
            weight = self._weights.get(address) if address is not None else None
            if address in seen or address is None:
                continue
            seen.add(address)
            if weight is not None:
                if id(weight) not in seen:
                    seen.add(id(weight))
                    done = done.plus(_weight_work(launch.symbol, weight, args, tokens, symbols))
            elif self._states is not None and getattr(arg, "buffer", None) is self._states.buffer:
                done = done.plus(Work(bytes=2 * rows * self._part_nbytes(args)))
            elif getattr(arg, "shape", None) and arg.buffer is not self._kv.buffer and name not in UNCOUNTED:
                done = done.plus(Work(bytes=prod(_size(size, symbols) for size in arg.shape) * ITEM_BYTES[arg.dtype]))
        if launch.symbol.startswith(("attention", "latent_attention")) and "combine" not in launch.symbol:
            done = done.plus(self._attention(args, symbols["tokens"], rows, context))
        return done

    def _part_nbytes(self, args: dict[str, Any]) -> int:
        """Of the part of a state that a launch has the place of."""
        parts = self._states.layout.places.values()
        return next((4 * prod(shape) for place, shape in parts if place == args.get("place")), 0)

    def _attention(self, args: dict[str, Any], tokens: int, rows: int, context: int) -> Work:
        config, mean = self._config, context - (tokens / rows - 1) / 2
        window = args.get("window") or context
        alike = [layer for layer in range(config.num_layers) if config.window(layer) == (args.get("window") or 0)]
        keys = layer_nbytes(config, self._kv.dtype, alike[0] if alike else 0) / BLOCK
        products = tokens * min(mean, window) * config.num_heads * sum(config.attended)
        return Work(bytes=int(rows * min(context, window + tokens / rows) * keys), f32=int(products))


UNCOUNTED = ("page_table", "partial", "counters")


def _size(size: Any, symbols: dict[str, int]) -> int:
    return size.value(symbols) if isinstance(size, Sym) else size


def _weight_work(symbol: str, weight: Any, args: dict[str, Any], tokens: float, symbols: dict[str, int]) -> Work:
    """Of a launch that reads a weight: a product, a look-up of rows, or making other numbers of it."""
    nbytes = weight.scheme.nbytes(*weight.shape, weight.layout)
    if args.get("experts") and symbol.startswith("matmul"):  # tokens: pairs of a token and an expert
        experts, chosen = weight.shape[0] // args["rows"], args.get("chosen")  # of one token
        share = chosen / experts if chosen else share_of_experts(1, experts, tokens)
        tokens, nbytes = (chosen or tokens) / experts, int(nbytes * share)
    if symbol.startswith("embed"):
        return Work(bytes=nbytes * symbols["tokens"] // weight.shape[0])
    is_product = symbol.startswith(("matmul", "gemm", "head_product"))
    products = int(weight.shape[0] * weight.shape[1] * tokens) if is_product else 0
    narrow = args.get("aq") is not None or args.get("a_scale") is not None
    return Work(nbytes, *((products, 0) if narrow else (0, products)))


def check_uncached(metrics: dict[str, float]) -> None:
    """EngineError where an engine, by its LLM.metrics(), took tokens from the prefix cache or verified drafts."""
    for name, what in (
        ("prefix_hit_tokens", "tokens came from the prefix cache"),
        ("drafted_tokens", "tokens were drafts"),
    ):
        if metrics.get(name):
            raise EngineError(f"{metrics[name]:.0f} {what}: the figure is not one of the model's")


class FloorJudge:
    """Holds figures of an engine on a CPU against the machine's floors. meter: measured before the first figure and
    after each."""

    def __init__(self, runner: Any, meter: Any):
        self._runner, self._meter = runner, meter
        self.floors = [meter.measure()]

    def share(self, name: str, tokens_per_s: float, tokens: int, rows: int, context: float) -> float:
        """How much of what the machine allows a figure is that was just measured, of steps as step_work() takes them,
        by the floors before and after it. EngineError above what the best floors of the run allow, up to AGAIN more of
        them: something else was measured."""
        self.floors.append(self._meter.measure())
        work = step_work(self._runner, tokens, rows, context)
        share = tokens_per_s * work.seconds(medians(self.floors[-2:])) / tokens
        for _ in range(AGAIN):
            if tokens_per_s > tokens / work.seconds(best(self.floors)) * TOLERANCE:
                self.floors.append(self._meter.measure())
        limit = tokens / work.seconds(best(self.floors))
        if tokens_per_s > limit * TOLERANCE:
            raise EngineError(
                f"{name}: {tokens_per_s:.4g} is above the machine's floor of {limit:.4g}: something else was measured"
            )
        return share


def of_floor(llm: Any, name: str, tokens_per_s: float, tokens: int, rows: int, context: float) -> dict:
    """{"floors", "share_of_floor"} of a figure of an LLM on a CPU that was just measured; {} on other devices, where a
    step's time is what `zse profile` shows. Errors as of FloorJudge.share."""
    if llm.device.kernels != "cpu":
        return {}
    runner = llm._engine.runner
    meter = FloorMeter(llm.device, weights_bytes(runner.model))
    try:
        judge = FloorJudge(runner, meter)
        share = judge.share(name, tokens_per_s, tokens, rows, context)
        return {"floors": medians(judge.floors)._asdict(), "share_of_floor": share}
    finally:
        meter.close()
