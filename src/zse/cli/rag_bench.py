"""zse rag bench: the fixed set of questions (rag/questions.py) with a model in this process: recall and rank of every combination of stages,
and what the compact form of passages saves."""

import json
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from zse.cli.options import ENGINE_OPTIONS, locate, open_llm
from zse.cli.parser import JSON, Amount, ReadBy, arg, option
from zse.engine.messages import Measured, TokenLogprob
from zse.rag import evaluate
from zse.sampling.params import SamplingParams
from zse.server import models, relevance

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ARGUMENTS = (
    arg("model", metavar="MODEL", nargs="?", help="a name, or a path (default: none; words alone, tokens are words)"),
    option("--seed", ReadBy(Amount(int, 0, 1 << 31), "N"), "of the set; may be repeated", action="append"),
    option("--per-kind", Amount(int, 2, 200), "passages of each kind of document", 16),
    option(
        "--rerank",
        (relevance.YES_NO, relevance.LIKELIHOOD),
        "the model also judges the best ten passages of each question, by its yes or no or by how likely they make it",
    ),
    option("--read", Amount(int, 0, 10_000), "questions that the model answers from either form", 0),
    JSON,
    ENGINE_OPTIONS,
)
ASKS = "{context}\n\nAnswer in a few words, from the text above: {question}"


def run(args) -> int:
    rankers = {"bm25s": _bm25s} if find_spec("bm25s") else {}
    seeds = args.seed or [evaluate.DEFAULT_SEED]
    if args.model is None:
        return _told(args, [evaluate.evaluate(seed=seed, per_kind=args.per_kind, rankers=rankers) for seed in seeds])
    path = locate(args.model, args.quantize, args.device)
    with open_llm(args) as llm:
        given: dict[str, Any] = {
            "embed": lambda texts: llm.embed(texts, pooling="mean"),
            "count_tokens": lambda text: len(llm.tokenizer.encode(text, add_bos=False)),
            "judge": _judge(llm, str(path), args.rerank) if args.rerank else None,
            "rankers": rankers,
        }
        if args.read:
            given |= {"read": _reader(llm), "num_read": args.read}
        return _told(args, [evaluate.evaluate(seed=seed, per_kind=args.per_kind, **given) for seed in seeds])


def _told(args, reports: list) -> int:
    if args.json:
        print(json.dumps([_fields(report) for report in reports], indent=1))
    else:
        print("\n\n".join(map(evaluate.table, reports)))
    return 0


def _fields(report: Any) -> dict:
    found = [one._asdict() for one in report.found]
    return report._asdict() | {
        "found": found,
        "forms": [form._asdict() for form in report.forms],
        "saved": report.saved(),
    }


def _judge(llm, path: str, method: str) -> "Callable[[str, list[str]], list[float]]":
    """As a search's rerank."""
    judge = relevance.Judge(models.load(path, path), method, None, llm.config.max_context)

    def scores(question: str, passages: list[str]) -> list[float]:
        pairs = [judge.sequence(question, passage, "question") for passage in passages]
        if method == relevance.LIKELIHOOD:
            rows = [llm.logprobs_of(pair.ids).logprobs[pair.ask.first - 1 :] for pair in pairs]
        else:
            rows = llm.score([pair.ids for pair in pairs], pairs[0].ask.targets)
        return [judge.score(Measured(0, 0, None, [TokenLogprob(value, []) for value in row])) for row in rows]

    return scores


def _reader(llm) -> "Callable[[str, str], str]":
    params = SamplingParams(max_tokens=24, temperature=0.0)

    def read(context: str, question: str) -> str:
        message = {"role": "user", "content": ASKS.format(context=context, question=question)}
        return llm.chat([message], params).text

    return read


def _bm25s(texts: list[str]) -> "Callable[[str], Sequence[int]]":
    """bm25s with its own tokenizer and stop words, its default k1 and b."""
    bm25s = import_module("bm25s")
    made = bm25s.BM25()
    made.index(bm25s.tokenize(texts, stopwords="en", show_progress=False), show_progress=False)

    def rank(question: str) -> list[int]:
        asked = bm25s.tokenize(question, stopwords="en", show_progress=False)
        found, scores = made.retrieve(asked, k=min(evaluate.DEPTH, len(texts)), show_progress=False)
        return [int(one) for one, score in zip(found[0], scores[0], strict=True) if score > 0]

    return rank
