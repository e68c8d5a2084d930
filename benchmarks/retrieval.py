"""Search over many chunks, and the fixed set of `zse.rag.questions` by all combinations of stages, beside bm25s.

    python benchmarks/retrieval.py speed --chunks 10000 --words 200 --width 576 --questions 300
    python benchmarks/retrieval.py vectors --rows 1000000 --width 576        # the kernel alone
    python benchmarks/retrieval.py quality smollm2 --seed 16 --seed 101 [--read 64] [--no-model]

speed: words are drawn as in natural text (Zipf, exponent 1.1, 50,000 words), a question has 8 of them; each stage alone and all together
with the reading of the passages, in one thread, through SQLite in a file. quality: bm25s is compared where it is installed
(`pip install bm25s`): its own tokenizer and stop words, its default k1 and b.
"""

import argparse
import os
import sqlite3
import tempfile
import time

import numpy as np

from zse.rag import evaluate, schema, store
from zse.rag.dense import Scorer, Segment
from zse.rag.documents import Chunk
from zse.rag.index import Indexes
from zse.rag.search import SearchQuery, search
from zse.server.database.connection import Database


def milliseconds(work, count: int) -> str:
    """Elapsed, and in brackets what the thread computed: on a machine that does other things the two differ."""
    times = []
    for index in range(count):
        start, busy = time.perf_counter(), time.thread_time()
        work(index)
        times.append((time.perf_counter() - start, time.thread_time() - busy))
    elapsed, computed = np.array(times).T * 1000
    return "  ".join(
        f"p{at} {np.percentile(elapsed, at):6.2f} ({np.percentile(computed, at):6.2f}) ms" for at in (50, 95, 99)
    )


def speed(options) -> None:
    draw = np.random.default_rng(1)
    chances = 1 / np.arange(1, 50_001) ** 1.1
    chances /= chances.sum()

    def text(count: int) -> str:
        return " ".join(f"w{word}" for word in draw.choice(50_000, count, p=chances))

    per_document = 50
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "documents.db")
        Database(path, schema.MIGRATIONS).close()
        connection = sqlite3.connect(path, isolation_level=None)
        stored_s = size = 0
        for number in range(options.chunks // per_document):
            texts = [text(options.words) for _ in range(per_document)]
            chunks = [Chunk(one, [], 0, 0, options.words) for one in texts]
            size += sum(map(len, texts))
            new = store.NewDocument(f"d{number}", "x", "text", "", number.to_bytes(32), "", 0, 0, chunks)
            began = time.thread_time()
            connection.execute("BEGIN")
            store.add(connection, "t", new, 0.0)
            connection.execute("COMMIT")
            stored_s += time.thread_time() - began
            rows = draw.standard_normal((per_document, options.width))
            store.put_vectors(connection, "m", store.Unembedded("t", f"d{number}", 1, 0, texts), rows)
        print(
            f"stored {options.chunks} chunks, {size / 1e6:.1f} MB of text: {size / 1e6 / stored_s:.1f} MB a second of computing"
        )
        indexes, vector = Indexes(), draw.standard_normal(options.width).astype(np.float32)
        questions = [text(8) for _ in range(options.questions)]
        for stages in (("bm25",), ("tfidf",), ("dense",), ("bm25", "tfidf", "dense")):

            def one(index: int, stages=stages) -> None:
                query = SearchQuery(questions[index % len(questions)], 5, stages)
                search(connection, indexes, "t", query, vector, "m")

            began = time.perf_counter()
            one(0)
            first = (time.perf_counter() - began) * 1000
            connection.execute("UPDATE owners SET changes = changes + 1")  # no postings are in memory
            print(f"{' + '.join(stages):22} {milliseconds(one, options.questions)}  (first {first:.0f} ms)")


def vectors(options) -> None:
    draw = np.random.default_rng(1)
    scorer, segments = Scorer(), []
    padded = -(-options.width // 64) * 64
    for first in range(0, options.rows, 1 << 14):
        count = min(1 << 14, options.rows - first)
        segment = Segment(scorer, 1 << 14, padded)
        segment.append(draw.integers(-127, 128, (count, options.width), np.int8), np.ones(count, np.float32), 1, first)
        segments.append(segment)
    query = draw.integers(-127, 128, options.width).astype(np.int8)
    size = options.rows * padded

    def one(_: int) -> None:
        scores = np.concatenate([segment.scores(query, 1.0) for segment in segments])
        np.argpartition(scores, -100)

    print(f"{options.rows} x {options.width}, {size / 1e6:.0f} MB: {milliseconds(one, 20)}, with the 100 best")


def bm25s_ranker(texts: list[str]):
    import bm25s

    index = bm25s.BM25()
    index.index(bm25s.tokenize(texts, stopwords="en", show_progress=False), show_progress=False)

    def rank(question: str) -> list[int]:
        asked = bm25s.tokenize(question, stopwords="en", show_progress=False)
        found, scores = index.retrieve(asked, k=evaluate.DEPTH, show_progress=False)
        return [int(one) for one, score in zip(found[0], scores[0], strict=True) if score > 0]

    return rank


def quality(options) -> None:
    given = {}
    try:
        import bm25s

        print(f"bm25s {bm25s.__version__}")
        given["rankers"] = {"bm25s": bm25s_ranker}
    except ImportError:
        print("bm25s is not installed: left out")
    if not options.no_model:
        import zse

        llm = zse.LLM(options.model)
        given["embed"] = lambda texts: llm.embed(texts, pooling="mean", normalize=False)
        given["count_tokens"] = lambda text: len(llm.tokenizer.encode(text, add_bos=False))
        if options.read:
            asks = "{context}\n\nAnswer in a few words, from the text above: {question}"
            params = zse.SamplingParams(max_tokens=24, temperature=0.0)

            def read(context: str, question: str) -> str:
                message = {"role": "user", "content": asks.format(context=context, question=question)}
                return llm.chat([message], params).text

            given |= {"read": read, "num_read": options.read}
    for seed in options.seed or [evaluate.DEFAULT_SEED]:
        print(evaluate.table(evaluate.evaluate(seed=seed, **given)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("speed")
    for name, value in (("chunks", 10_000), ("words", 200), ("width", 576), ("questions", 300)):
        one.add_argument(f"--{name}", type=int, default=value)
    one.set_defaults(run=speed)
    one = commands.add_parser("vectors")
    one.add_argument("--rows", type=int, default=1_000_000)
    one.add_argument("--width", type=int, default=576)
    one.set_defaults(run=vectors)
    one = commands.add_parser("quality")
    one.add_argument("model", nargs="?", default="smollm2")
    one.add_argument("--seed", type=int, action="append")
    one.add_argument("--read", type=int, default=0, help="questions that the model answers from either form")
    one.add_argument("--no-model", action="store_true")
    one.set_defaults(run=quality)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
