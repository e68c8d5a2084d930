"""One order out of several stages' orders.

"rrf": the sum of weight / (60 + rank) over the stages that found a passage (Cormack, Clarke, Büttcher, "Reciprocal rank fusion
outperforms Condorcet and individual rank learning methods", 2009). "weights": the sum of weight * score, each stage's scores
brought to 0 … 1 over what it found; a passage that a stage did not find has 0 there."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from zse.rag.documents import Passage

TYPE_CHECKING = False
if TYPE_CHECKING:
    import numpy

RRF_K = 60
# Found on seeds 101 and 102 of rag/questions.py, not on the set that is reported: mean-pooled vectors of a causal model find half of what
# words find, and with weight 1 they took as much away as they gave.
DEFAULT_WEIGHTS = {"bm25": 1.0, "tfidf": 0.5, "dense": 0.3}
Fusion = Literal["rrf", "weights"]


class Ranking(NamedTuple):
    """What a stage found, the best first: places i64 [n] in the tenant's table of chunks, scores f32 [n]."""

    places: "numpy.ndarray"
    scores: "numpy.ndarray"


class Fused(NamedTuple):
    """stages: as Passage has them."""

    place: int
    score: float
    stages: dict[str, tuple[int, float, float]]


def fuse(
    rankings: Mapping[str, Ranking], fusion: Fusion = "rrf", weights: Mapping[str, float] | None = None
) -> list[Fused]:
    """The best first; of equal ones that which was stored first. weights: stage → factor, that of DEFAULT_WEIGHTS where there is
    none."""
    found: dict[int, dict[str, tuple[int, float, float]]] = {}
    for stage, ranking in rankings.items():
        weight = (DEFAULT_WEIGHTS | dict(weights or {})).get(stage, 1.0)
        scores = ranking.scores.tolist()
        low = scores[-1] if len(scores) > 1 else 0.0
        span = scores[0] - low if scores else 0.0
        for rank, (place, score) in enumerate(zip(ranking.places.tolist(), scores, strict=True), 1):
            part = weight / (RRF_K + rank) if fusion == "rrf" else weight * ((score - low) / span if span > 0 else 1.0)
            found.setdefault(place, {})[stage] = (rank, score, part)
    fused = [Fused(place, sum(part for _, _, part in stages.values()), stages) for place, stages in found.items()]
    return sorted(fused, key=lambda one: (-one.score, one.place))


def reranked(passages: Sequence[Passage], scores: Sequence[float], top_k: int) -> list[Passage]:
    """The first len(scores) passages in the order of what a judge gave them, then the others as they were; at most top_k. A judged
    passage's score is the judge's, which the stage "rerank" says."""
    judged = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    out = []
    for rank, index in enumerate(judged, 1):
        passage, score = passages[index], float(scores[index])
        stages = passage.stages | {"rerank": (rank, score, score)}
        out.append(
            Passage(passage.document, passage.version, passage.name, passage.position, passage.chunk, score, stages)
        )
    return [*out, *passages[len(scores) :]][:top_k]
