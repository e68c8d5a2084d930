"""What becomes of an encoder's hidden states, and of a decoder's where a vector is asked for: pooling, dense modules,
and the classifier of a cross-encoder. On the host in float64: it is a few numbers a sequence."""

import math
from collections.abc import Callable
from typing import Any

from zse.lazy import numpy as np


class StatePool:
    """The hidden states of one sequence, chunk by chunk. kind: one of messages.POOLINGS; "cls" is the first token's
    state."""

    def __init__(self, kind: str):
        self.kind = kind
        self._state: Any = None
        self._count = 0

    def wants(self, start: int, count: int, length: int) -> tuple[int, int]:
        """(first, count) of a chunk's tokens whose states add() takes; `length` is the sequence's."""
        if self.kind in ("mean", "max"):
            return 0, count
        if self.kind == "cls":
            return (0, 1) if start == 0 else (0, 0)
        return (count - 1, 1) if start + count == length else (0, 0)

    def add(self, lines: Any) -> None:
        """lines: [count, hidden_size]."""
        self._count += len(lines)
        if self.kind == "max":
            part = lines.max(axis=0)
            self._state = part if self._state is None else np.maximum(self._state, part)
        else:
            part = lines.sum(axis=0, dtype=np.float64)
            self._state = part if self._state is None else self._state + part

    def result(self) -> Any:
        return self._state / self._count if self.kind == "mean" else self._state


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "identity": lambda x: x,
    "tanh": lambda x: np.tanh(x),
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


class DenseModules:
    """Dense modules of sentence-transformers, one behind the other. configs: ModelConfig.dense; read: as of Classifier.
    Products in f32, as sentence-transformers computes them: a matrix of EmbeddingGemma is 9 MB so."""

    def __init__(self, configs: Any, read: Any):
        self._layers = []
        for number, config in enumerate(configs):
            weight = read(f"dense_{number}").astype(np.float32).reshape(config.outputs, config.inputs)
            self._layers.append((weight, read(f"dense_{number}_bias"), ACTIVATIONS[config.activation]))

    def __call__(self, pooled: Any) -> Any:
        """f64 [texts, outputs] of f64 [texts, inputs]."""
        for weight, bias, act in self._layers:
            product = (pooled.astype(np.float32) @ weight.T).astype(np.float64)
            pooled = act(product if bias is None else product + bias)
        return pooled


class Classifier:
    """The head of a cross-encoder: out(norm(act(dense(x)))). read: name → f64 array or None, of the model's vectors."""

    def __init__(self, forward: Any, read: Any):
        self._forward, self._eps = forward, forward.config.norm_eps
        hidden = forward.config.hidden_size
        self._dense = read("cls_dense").reshape(hidden, hidden)
        self._out = read("cls_out").reshape(-1, hidden)
        self._dense_bias, self._out_bias, self._norm = read("cls_dense_bias"), read("cls_out_bias"), read("cls_norm")

    def __call__(self, pooled: Any) -> Any:
        """Logits f64 [num_labels] of the pooled state f64 [hidden_size]."""
        x = self._dense @ pooled
        x = x if self._dense_bias is None else x + self._dense_bias
        x = ACTIVATIONS[self._forward.head_activation](x)
        if self._norm is not None:
            x = (x - x.mean()) / np.sqrt(((x - x.mean()) ** 2).mean() + self._eps) * self._norm
        logits = self._out @ x
        return logits if self._out_bias is None else logits + self._out_bias
