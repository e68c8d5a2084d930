"""What a rank has of recurrent layers (docs/design/0011-several-devices.md): channels of a short convolution; of Gated DeltaNet and
Mamba-2 heads of values, with the groups of keys that they read.

Where that cannot be (a norm over what several ranks would have, scales of more columns than a head's), every rank has the whole of
these layers, and computes the same."""

from math import gcd, lcm
from typing import Any

import msgspec

from zse.models.config import ModelConfig
from zse.models.config_parts import RecurrentConfig
from zse.models.spans import Span, head_spans, reads_rows, spread
from zse.quant.scheme import TILE_ROWS

CHANNELS, GROUPS, STATES, STEPS = (
    "channels",
    "groups",
    "states",
    "steps",
)  # groups of keys; values of heads; a number of each head
# Mixer → role → the spans of its rows, one behind the other.
_QKV, _BEHIND = (GROUPS, GROUPS, STATES), (STATES, GROUPS, GROUPS)
ROWS: dict[str, dict[str, tuple[str, ...]]] = {
    "conv": {"mix_in": (CHANNELS,) * 3, "conv": (CHANNELS,), "conv_bias": (CHANNELS,)},
    "delta": {"mix_qkv": _QKV, "conv": _QKV, "conv_bias": _QKV, "mix_z": (STATES,)},
    "ssm": {"mix_in": (STATES, *_BEHIND, STEPS), "conv": _BEHIND, "conv_bias": _BEHIND, "mix_norm": (STATES,)},
}
ROWS["delta"] |= dict.fromkeys(("mix_b", "mix_a", "A", "dt_bias"), (STEPS,))
ROWS["ssm"] |= dict.fromkeys(("A", "D", "dt_bias"), (STEPS,))
COLUMNS = {"conv": {"mix_out": CHANNELS}, "delta": {"mix_out": STATES}, "ssm": {"mix_out": STATES}}


def state_heads(found: RecurrentConfig, size: int) -> list[tuple[Span, Span]]:
    """Of each rank the heads of values, and the groups of keys that they read: whole groups with their heads, or where there are
    more ranks some heads of one. Where heads belong to groups in turn, whole turns, or a part of one."""
    each = found.heads // found.groups
    if not found.tiled:
        heads = head_spans(found.heads, found.groups, size)
        return [((start, stop), (start // each, -(-stop // each))) for start, stop in heads]
    heads = head_spans(found.heads, each, size)
    whole = size <= each
    first = [0 if whole else start % found.groups for start, _ in heads]
    return [
        ((start, stop), (at, found.groups if whole else at + stop - start))
        for (start, stop), at in zip(heads, first, strict=True)
    ]


class MixerShares:
    """config: of the whole model. stored, schemes: of its roles. narrowed(role, fits): the scheme of a role whose columns are cut,
    as zse.models.shares.ModelShare has it. is_cut: whether ranks have parts; recurrent: the RecurrentConfig of this rank."""

    def __init__(self, config: ModelConfig, stored: dict, schemes: dict, narrowed: Any, rank: int, size: int):
        assert config.recurrent is not None
        self._whole, self._hidden = config.recurrent, config.hidden_size
        self._stored, self._schemes = stored, schemes
        self._layers = [layer for layer in range(config.num_layers) if config.mixer(layer) in ROWS]
        self._mixers = {layer: config.mixer(layer) for layer in self._layers}
        spans = self._channels(size, narrowed) if set(self._mixers.values()) == {"conv"} else self._heads(size)
        self.is_cut = bool(spans) and self._fits(spans, narrowed)
        self._spans = spans[rank] if self.is_cut else {}
        self.recurrent = self._config() if self.is_cut else self._whole

    # -- spans of each rank, or none where the numbers do not allow any

    def _channels(self, size: int, narrowed: Any) -> list[dict[str, Span]]:
        unit = 2 * TILE_ROWS
        for layer in self._layers:
            fits = lambda unit: self._hidden // unit >= size  # noqa: E731
            unit = lcm(unit, narrowed(f"layers.{layer}.mix_out", fits).column_unit)
        spans = spread(self._hidden, unit, size)
        return [{CHANNELS: span} for span in spans] if all(start < stop for start, stop in spans) else []

    def _heads(self, size: int) -> list[dict[str, Span]]:
        found = self._whole
        if found.heads < size or "conv" in self._mixers.values():
            return []
        heads = state_heads(found, size)
        normed = found.inner // found.norm_groups  # that a norm of Mamba-2 sees together
        if "ssm" in self._mixers.values() and any(stop * found.value_size % normed for (_, stop), _ in heads):
            return []
        return [
            {GROUPS: (low * found.key_size, high * found.key_size), STEPS: of_heads}
            | {STATES: (of_heads[0] * found.value_size, of_heads[1] * found.value_size)}
            for of_heads, (low, high) in heads
        ]

    def _fits(self, spans: list[dict[str, Span]], narrowed: Any) -> bool:
        """Whether all weights can be cut there."""
        for layer, mixer in self._mixers.items():
            role = f"layers.{layer}.mix_out"
            ends = gcd(*(each[COLUMNS[mixer]["mix_out"]][1] for each in spans))
            scheme = narrowed(role, lambda unit, ends=ends: ends % unit == 0)
            if ends % lcm(scheme.column_unit, 2 * TILE_ROWS) or self._stored[role][0].order is not None:
                return False
            for name, kinds in ROWS[mixer].items():
                if f"layers.{layer}.{name}" in self._schemes and not all(
                    self._reads(f"layers.{layer}.{name}", kinds, each) for each in spans
                ):
                    return False
        return True

    def _reads(self, role: str, kinds: tuple[str, ...], spans: dict[str, Span]) -> bool:
        """Whether a rank's rows of a matrix can be read or cut, and stand at whole tiles."""
        infos, unit, at = self._stored[role], self._schemes[role].row_unit, 0
        for number, kind in enumerate(kinds):
            start, stop = at + spans[kind][0], at + spans[kind][1]
            if number < len(kinds) - 1 and (stop - start) % unit:
                return False
            if len(infos) == 1 and not reads_rows(infos[0], start, stop):
                if start % unit or (stop % unit and stop != infos[0].shape[0]):
                    return False
            at += self.total(kind)
        return True

    # -- this rank's

    def _config(self) -> RecurrentConfig:
        found, spans = self._whole, self._spans
        if CHANNELS in spans:
            return msgspec.structs.replace(found, width=spans[CHANNELS][1] - spans[CHANNELS][0])
        heads = spans[STEPS][1] - spans[STEPS][0]
        groups = (spans[GROUPS][1] - spans[GROUPS][0]) // found.key_size
        normed = found.norm_groups * heads // found.heads if "ssm" in self._mixers.values() else found.norm_groups
        return msgspec.structs.replace(found, heads=heads, groups=groups, norm_groups=normed)

    def rows(self, layer: int, name: str) -> tuple[str, ...]:
        """The kinds of spans that the rows of a role have; () where all ranks have all of it."""
        return ROWS.get(self._mixers.get(layer, ""), {}).get(name, ()) if self.is_cut else ()

    def columns(self, layer: int, name: str) -> str:
        """The kind of its columns, likewise."""
        return COLUMNS.get(self._mixers.get(layer, ""), {}).get(name, "") if self.is_cut else ""

    def span(self, kind: str) -> Span | None:
        """This rank's, in numbers; None of a kind of other layers."""
        return self._spans.get(kind)

    def total(self, kind: str) -> int:
        """Of all ranks."""
        found = self._whole
        totals = {
            CHANNELS: self._hidden,
            GROUPS: found.groups * found.key_size,
            STATES: found.inner,
            STEPS: found.heads,
        }
        return totals[kind]
