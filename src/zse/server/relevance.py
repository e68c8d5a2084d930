"""How well a document fits a query. Models that were trained for it:

cross_encoder   An encoder with a classifier reads both: the logistic function of its one logit.
qwen3_reranker  Qwen3-Reranker (Zhang et al. 2025) by its own template: p(yes) / (p(yes) + p(no)) of the next token.

By a language model that nobody trained for it, three methods, each a forward pass:

likelihood  The probability of the query behind the document, per token (geometric mean): query likelihood of Ponte and
            Croft 1998, with language models as UPR (Sachan et al. 2022). Works from the smallest models on.
yes_no      The model is asked whether the document answers the query; p(yes) / (p(yes) + p(no)) of its next token, as
            monoT5 (Nogueira et al. 2020) and Qwen3-Reranker (Zhang et al. 2025) do. Needs a model that can judge.
embedding   Cosine of the two hidden states (the last token's, or their mean).

On ten questions with one right answer in ten, SmolLM2-135M and Gemma 3 270M put it first for likelihood 10 and 10
times, embedding (last) 9 and 10, (mean) 7 and 7, yes_no 1 and 2."""

import math
import struct
from collections.abc import Sequence

import msgspec

from zse.engine.messages import Ask, Measured
from zse.server.errors import APIError
from zse.server.models import QWEN3_RERANKER
from zse.server.tools.reasoning import PARSERS

LIKELIHOOD, YES_NO, EMBEDDING, CROSS_ENCODER, QWEN3 = METHODS = (
    "likelihood",
    "yes_no",
    "embedding",
    "cross_encoder",
    QWEN3_RERANKER,
)
# Of Qwen3-Reranker's model card; what the model was trained with.
QWEN3_TASK = "Given a web search query, retrieve relevant passages that answer the query"
QWEN3_HEAD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
QWEN3_TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TASK = "Does the document answer the query?"


class Measurement(msgspec.Struct, frozen=True):
    """Token ids, and what is asked of them. source: the request's field that it came from."""

    ids: list[int]
    ask: Ask
    source: str


class Judge:
    """Makes the sequences of pairs, and scores of their results. task: the question that yes_no asks, the instruction
    of qwen3_reranker; None: as usual. most: tokens that a pair is cut to, the document first; None: it is not cut."""

    def __init__(self, model, method: str, task: str | None, most: int | None = None):
        self._model, self._method, self._task, self._most = model, method, task, most
        self._yes: list[int] = []
        self._no: list[int] = []
        if method == QWEN3:
            self._yes, self._no = ([model.encode_part(word)[0]] for word in ("yes", "no"))
        if method == YES_NO:
            self._yes, self._no = answer_tokens(model)
            if not self._yes or not self._no:
                message = "'method' yes_no: this model has no tokens that begin yes and no."
                raise APIError("unsupported_parameter", message, "method")

    def sequence(self, query: str, document: str, source: str) -> Measurement:
        found = self._whole(query, document, source)
        if self._most is None or self._method in (CROSS_ENCODER, QWEN3):  # these are cut already
            return found
        texts = [query, document]
        for which in (1, 0):  # the document first
            if len(found.ids) <= self._most:
                break
            ids = self._model.encode_part(texts[which])
            left = len(ids)
            while left and (over := len(found.ids) - self._most) > 0:  # again: the rest may join into other tokens
                left = max(left - over, 0)
                texts[which] = self._model.decode(ids[:left])
                found = self._whole(texts[0], texts[1], source)
        return found

    def _whole(self, query: str, document: str, source: str) -> Measurement:
        if self._method == CROSS_ENCODER:
            ids, second = self._model.encode_pair(query, document, self._most)
            return Measurement(ids, Ask("labels", second=second), source)
        if self._method == LIKELIHOOD:
            head = self._model.encode_text(f"Document: {document}\n\nQuery:")
            tail = self._model.encode_part(" " + query)
            return Measurement(head + tail, Ask("logprobs", first=len(head)), source)
        ids = self._template(query, document) if self._method == QWEN3 else self._question(query, document)
        return Measurement(ids, Ask("targets", targets=(*self._yes, *self._no)), source)

    def score(self, result: Measured) -> float:
        """Within [0, 1]; higher fits better."""
        if self._method == CROSS_ENCODER:
            (logit,) = struct.unpack_from("<f", result.vector or b"")
            return 1 / (1 + math.exp(min(-logit, 700.0)))
        values = [entry.logprob for entry in result.scores() if entry is not None]
        if self._method == LIKELIHOOD:
            return math.exp(sum(values) / len(values))
        yes, no = _total(values[: len(self._yes)]), _total(values[len(self._yes) :])
        return 1 / (1 + math.exp(min(no - yes, 700.0)))

    def _template(self, query: str, document: str) -> list[int]:
        """Texts of users give no control token; a document is cut where the pair would be too long."""
        head, tail = (self._model.encode_part(text, control=True) for text in (QWEN3_HEAD, QWEN3_TAIL))
        text = f"<Instruct>: {self._task or QWEN3_TASK}\n<Query>: {query}\n<Document>: {document}"
        middle = self._model.encode_part(text)
        if self._most is not None:
            middle = middle[: max(self._most - len(head) - len(tail), 1)]
        return head + middle + tail

    def _question(self, query: str, document: str) -> list[int]:
        text = f"Query: {query}\n\nDocument: {document}\n\n{self._task or TASK} Answer with yes or no."
        if not self._model.has_chat_template:
            return self._model.encode_text(f"{text}\nAnswer:")
        # No reasoning: the next token has to be the answer. Templates that do not know the variable ignore it; one that
        # opens the reasoning by itself has it closed.
        ids = self._model.encode_chat([{"role": "user", "content": text}], None, {"enable_thinking": False})
        end = self._model.decode(ids[-8:]).rstrip()
        for marks in PARSERS.values():
            if end.endswith(marks.opening):
                ids = ids + self._model.encode_part(f"\n{marks.closing}\n\n", control=True)
        return ids


def answer_tokens(model) -> tuple[list[int], list[int]]:
    """The tokens that a yes and a no may begin with, those left out that begin both."""

    def firsts(word: str) -> set[int]:
        forms = (word, word.capitalize(), word.upper())
        return {model.encode_part(lead + form)[0] for form in forms for lead in ("", " ")}

    yes, no = firsts("yes"), firsts("no")
    return sorted(yes - no), sorted(no - yes)


def _total(logprobs: Sequence[float]) -> float:
    """log of the sum of exp."""
    high = max(logprobs)
    return high + math.log(sum(math.exp(value - high) for value in logprobs)) if high > -math.inf else -1e9


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Of two vectors of length 1."""
    return max(-1.0, min(1.0, math.fsum(a * b for a, b in zip(one, other, strict=True))))
