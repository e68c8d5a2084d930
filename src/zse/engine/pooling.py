"""What becomes of an encoder's hidden states, and of a decoder's where a vector is asked for: pooling, and the classifier of a
cross-encoder. On the host in float64: it is a few numbers a sequence."""

import math
from typing import Any

from zse.lazy import numpy as np


class StatePool:
    """The hidden states of one sequence, chunk by chunk. kind: one of messages.POOLINGS; "cls" is the first token's state."""

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
        if self._forward.head_activation == "tanh":
            x = np.tanh(x)
        else:
            x = x * 0.5 * (1 + np.array([math.erf(value / math.sqrt(2)) for value in x]))
        if self._norm is not None:
            x = (x - x.mean()) / np.sqrt(((x - x.mean()) ** 2).mean() + self._eps) * self._norm
        logits = self._out @ x
        return logits if self._out_bias is None else logits + self._out_bias
