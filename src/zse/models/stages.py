"""What one rank of a pipeline has of a model (docs/design/0011-several-devices.md): a span of its layers, and rank 0 all else.

Rank 0 samples, so it has the head beside the embedding: of a step hidden states come back to it, not logits, and a tied head is there
once. Spans are chosen so that ranks have about as many bytes of weights and of keys and values; on a CPU, whose memory all ranks
share, so that a step reads about as many on each, for the slowest one's time is that of all."""

from typing import Any

import msgspec

from zse.errors import UnsupportedError
from zse.models.config import ModelConfig
from zse.quant.scheme import Scheme, memory_layout

KV_TOKENS = {"gpu": 1 << 16, "cpu": 1 << 11}  # whose keys and values count, of two bytes a number
# Fields of a ModelConfig, and of its MoeConfig, with an entry for each layer.
PER_LAYER = ("sliding_layers", "nope_layers", "intermediate_sizes", "mixers")


def spans_of(costs: list[int], first: int, size: int) -> list[tuple[int, int]]:
    """Layers [from, to) of each of `size` ranks, at least one, so that the largest sum of costs is as small as can be. first: what
    rank 0 has beside its layers."""

    def within(most: int) -> list[tuple[int, int]] | None:
        spans, at = [], 0
        for rank in range(size):
            start, total, last = at, first if not rank else 0, len(costs) - (size - 1 - rank)
            while at < last and (at == start or total + costs[at] <= most):
                total, at = total + costs[at], at + 1
            if total > most and at - start > 1:
                return None
            spans.append((start, at))
        return spans if at == len(costs) else None

    low, high = 0, first + sum(costs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if within(middle) else (middle + 1, high)
    found = within(low)
    assert found is not None
    return found


class StageShare:
    """What rank `rank` of `size` has. config: its ModelConfig, of its layers alone; whole: the model's; spans: all ranks' layers. parts:
    FileTensors of each role; schemes: of the matrices, on a device of `family`. UnsupportedError for a model that cannot be cut between layers."""

    is_stage, divides_rows = True, False
    widths: tuple[int, ...] = ()  # the head is not cut
    partial: frozenset[str] = frozenset()  # nothing is added up

    def __init__(
        self,
        path: object,
        config: ModelConfig,
        parts: dict[str, list],
        schemes: dict[str, Scheme],
        *,
        rank: int,
        size: int,
        family: str,
    ):
        self.path, self.whole, self.rank, self.size = path, config, rank, size
        for is_refused, what, known in (
            (config.num_layers < size, f"{config.num_layers} layers", f"at least {size}"),
            (config.has_state, "layers with a state from token to token", "attention"),
            (config.num_shared_kv, "layers that read the K and V of others", "their own"),
            (config.ple_width, "embeddings of each layer's own", "none"),
        ):
            if is_refused:
                raise UnsupportedError(f"{path}: --pipeline-parallel-size {size}: layers", what, [known])
        costs, first = [0] * config.num_layers, 0
        for role, found in parts.items():
            nbytes = sum(4 * part.info.num_elements for part in found)
            if role in schemes:
                shape = sum(part.num_rows for part in found), found[0].role.shape[1]
                nbytes = sum(
                    plane.nbytes for plane in schemes[role].planes(*shape, memory_layout(schemes[role], family))
                )
            if role.startswith("layers."):
                costs[int(role.split(".")[1])] += nbytes
            elif family == "gpu" or role == ("embed" if config.tied_head else "head"):
                first += nbytes
        for layer in range(config.num_layers):
            width = 2 * config.kv_heads_of(layer) * config.head_dim_of(layer)
            costs[layer] += 2 * KV_TOKENS[family] * (width if config.latent is None else config.latent.width)
        self.spans = spans_of(costs, first, size)
        self.config = self.config_of(rank)

    def config_of(self, rank: int) -> ModelConfig:
        """A rank's ModelConfig."""
        whole, (start, stop) = self.whole, self.spans[rank]
        changes: dict[str, Any] = {name: getattr(whole, name)[start:stop] for name in PER_LAYER}
        if whole.moe is not None:
            changes["moe"] = msgspec.structs.replace(whole.moe, dense_layers=whole.moe.dense_layers[start:stop])
        return msgspec.structs.replace(whole, num_layers=stop - start, **changes)

    def cut(self, by_role: dict[str, Any]) -> dict[str, Any]:
        """Those of the rank's roles, by the names that they have there."""
        start, stop = self.spans[self.rank]
        found = {}
        for role, value in by_role.items():
            if not role.startswith("layers."):
                if not self.rank:
                    found[role] = value
                continue
            _, layer, name = role.split(".", 2)
            if start <= int(layer) < stop:
                found[f"layers.{int(layer) - start}.{name}"] = value
        return found
