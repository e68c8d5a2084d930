"""What a decoder with recurrent layers is written in, beside zse.models.decoder:

    class Lfm2(Hybrid):
        def layer(self, x, i):
            h = self.norm(x, "attn_norm", i)
            if self.config.mixer(i) == "conv":
                mixed = self.linear(self.gated_conv(self.linear(h, "in", i), "conv", i), "out", i)
            ...

A recurrent layer's weights that are no matrices are vectors (f32): "A" holds -exp(A_log). What a sequence carries from
token to token, says `state_parts`; which tokens are whose, the batch's runs (zse.tensor.Runs)."""

from typing import Any

from zse.models.decoder import Decoder
from zse.plan.trace import Value


class Hybrid(Decoder):
    """A decoder some of whose layers are recurrent (ModelConfig.mixers)."""

    def parts(self, x: Value, *widths: int) -> tuple[Value, ...]:
        """The columns of x, so many after so many: what recurrent operations read of a product that gives several. x
        has no other readers."""
        if sum(widths) != x.width:
            raise ValueError(f"parts: {' + '.join(map(str, widths))} columns of {x.width}")
        found = tuple(Value(self.trace, width) for width in widths)
        self.trace.split[x], self.trace.named = found, True
        return found

    def conv(self, x: Value, name: str, i: int, *, activation: str = "silu") -> Value:
        """activation of each channel's causal convolution over its last inputs by the vector `name` [channels, kernel],
        its last column a token's own input; bias `name`_bias where the model has one. activation: "silu" or "". State
        part: "conv" [kernel - 1, channels]."""
        return self._conv("conv", x, name, x.width, {"activation": activation})

    def gated_conv(self, x: Value, name: str, i: int) -> Value:
        """C * conv(B * x') of x = [B | C | x'] (LFM2), as `conv` without an activation."""
        if x.width % 3:
            raise ValueError(f"gated_conv: {x.width} columns are no three parts")
        return self._conv("gated_conv", x, name, x.width // 3, {})

    def _conv(self, op: str, x: Value, name: str, channels: int, options: dict[str, Any]) -> Value:
        if self.trace.shape(name)[0] != channels:
            raise ValueError(f"{op} {name}: {self.trace.shape(name)} for {channels} channels")
        bias = {"bias": f"{name}_bias"} if f"{name}_bias" in self.trace.shapes else {}
        return self.trace.add(op, (x,), channels, {"weight": name} | bias, **options)

    def delta(
        self, qkv: Value, b: Value, a: Value, i: int, *, k_heads: int, v_heads: int, k_size: int, tiled: bool = False
    ) -> Value:
        """The gated delta rule (Yang et al., arXiv 2412.06464), [tokens, v_heads * v size]. qkv = [q | k | v] as `conv`
        gave it: k_heads heads of k_size, twice, then v's; q and k are normalized here. b [v_heads]: a token's weight is
        sigmoid(b). a [v_heads], or [v_heads * k_size] of a decay of each channel: the log of the decay is "A" [v_heads] *
        softplus(a + "dt_bias"). tiled: v head j has k head j mod k_heads (GGUF), else j // (v_heads / k_heads). State
        part: "delta" [v_heads, k_size, v size]."""
        width = qkv.width - 2 * k_heads * k_size
        if width <= 0 or width % v_heads or v_heads % k_heads:
            raise ValueError(f"delta: {qkv.width} columns for {k_heads} heads of {k_size} and {v_heads} heads")
        if b.width != v_heads or a.width not in (v_heads, v_heads * k_size):
            raise ValueError(f"delta: b has {b.width} and a {a.width} columns for {v_heads} heads of {k_size}")
        weights = self._named(A=v_heads, dt_bias=a.width)
        options: dict[str, Any] = dict(k_heads=k_heads, v_heads=v_heads, k_size=k_size, tiled=tiled)
        return self.trace.add("delta", (qkv, b, a), width, weights, **options)

    def scan(
        self, x: Value, dt: Value, i: int, *, heads: int, groups: int, state_size: int, dt_limits: Any = None
    ) -> Value:
        """Mamba-2 (Dao and Gu, arXiv 2405.21060), [tokens, heads * head size]. x = [x | B | C] as `conv` gave it: heads of
        x, then B and C of `groups` groups of state_size. dt [heads]: steps are softplus(dt + "dt_bias"), within
        dt_limits (low, high) where there are any; the decay is exp(step * "A"); "D" * x is added. State part: "ssm"
        [heads, state_size, head size]."""
        width = x.width - 2 * groups * state_size
        if width <= 0 or width % heads or heads % groups or dt.width != heads:
            raise ValueError(f"scan: {x.width} and {dt.width} columns for {heads} heads, {groups} groups")
        weights = self._named(A=heads, D=heads, dt_bias=heads)
        options: dict[str, Any] = dict(heads=heads, groups=groups, state_size=state_size, dt_limits=dt_limits)
        return self.trace.add("scan", (x, dt), width, weights, **options)

    def _named(self, **sizes: int) -> dict[str, str]:
        """Vectors that are called as an operation calls them."""
        for name, size in sizes.items():
            if self.trace.shape(name) != (size,):
                raise ValueError(f"{name}: shape {self.trace.shape(name)}, expected {(size,)}")
        return {name: name for name in sizes}

    def gated_norm(
        self,
        x: Value,
        gate: Value,
        name: str,
        i: int,
        *,
        groups: int = 1,
        gate_first: bool = False,
        activation: str = "silu",
    ) -> Value:
        """RMSNorm of each of `groups` equal parts of x, times the vector `name` (as long as x, or as a part), times
        activation(gate); gate_first: RMSNorm of x * activation(gate) instead (Mamba-2). activation: "silu" or
        "sigmoid"."""
        if x.width != gate.width or x.width % groups or self.trace.shape(name)[0] not in (x.width, x.width // groups):
            raise ValueError(f"gated_norm {name}: {x.width} and {gate.width} columns, {groups} groups")
        # norm_eps of the stream may be another (see ModelConfig).
        eps = self.config.norm_eps if self.config.recurrent is None else self.config.recurrent.norm_eps
        options: dict[str, Any] = dict(groups=groups, gate_first=gate_first, activation=activation)
        return self.trace.add("gated_norm", (x, gate), x.width, {"weight": name}, eps=eps, **options)

    def head_halves(self, x: Value, heads: int) -> tuple[Value, Value]:
        """(q, gate) of a product that gives them head by head, first q (Qwen3-Next). q goes on as what `qkv` gets from
        "q": head_norm, rotate, attention; the gate to gate_output."""
        if x.width % (2 * heads):
            raise ValueError(f"head_halves: {x.width} columns are no two halves of {heads} heads")
        self.trace.named = True
        q, gate = (self.trace.add("head_half", (x,), x.width // 2, heads=heads, half=half) for half in range(2))
        return q, gate

    def gate_output(self, x: Value, gate: Value, i: int) -> Value:
        """x * sigmoid(gate). gate: as wide as x, of head_halves or a product of its own."""
        if x.width != gate.width:
            raise ValueError(f"gate_output: {x.width} and {gate.width} columns")
        return self.trace.add("gate_output", (x, gate), x.width)
