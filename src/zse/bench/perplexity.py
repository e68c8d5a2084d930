"""Perplexity of a model on a short fixed text: enough to see what quantizing costs, not to rank models."""

import os
from typing import Any

from zse.engine import llm as engine
from zse.errors import ConfigError

# Written for this purpose, so no model was trained on it: plain prose, numbers, a dialogue, a list and some code.
TEXT = """\
The harbour of Velden lies at the mouth of a slow river, and for most of the year nothing much happens there. In \
March the ice goes out with a noise like furniture being dragged across a floor, and the boats that spent the winter \
upside down on the quay are turned over, scraped, painted and argued about. Old Maren keeps the book in which every \
launch is written down: the name of the boat, the day, the weather, and who was late. The first entry is from 1911, \
and the handwriting changes only four times after that.

Last spring the book said that the water was nine degrees warmer than the air, which nobody believed until the \
thermometer was fetched and shown around. It was a good instrument, made of brass and glass, and it had been right \
about everything since the day it was bought. So the harbour master made a note, and under it he wrote a question: if \
the sea is already this warm, where will the fish go?

"They will go north," said Maren. "They have always gone north when they were tired of us."
"And then?"
"Then we will learn to catch something else."

A simple calculation shows why the question matters. A cod lays about five million eggs. If one egg in a million \
grows into a fish that is large enough to be caught, then every cod that stays in the bay is worth five more. If the \
warm water lowers that chance to one in five million, a cod replaces only itself, and every fish that is taken is one \
that does not come back. Between the two there is no loud moment, no storm and no broken mast. There is a column of \
numbers in a book, and the numbers become smaller.

What the town decided to do was modest:

1. Count the boats on the first day of each month, and the baskets that they bring in.
2. Measure the temperature at the same three places, at the surface and at a depth of ten metres.
3. Close the inner bay from April to June, and open it again only if the counts agree with the hopes.
4. Write everything down, including the mistakes.

The schoolteacher wrote a small program for the tables, because the sums were tedious and the older people distrusted \
the machine that belonged to the bank. It read like this:

def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

The children found the error before the harbour master did: a month without boats has no values, and a division by \
zero is not a fish. They corrected it, and in the margin of the book there is now a drawing of an empty basket with \
the words "nothing is also a result". By the autumn the mean of the catches had fallen by twelve per cent, the water \
had cooled to eleven degrees, and the herring, which no one had asked for, had come into the bay in such numbers that \
the gulls forgot to be afraid of the dogs.
"""


MOST_TOKENS = 768  # of a text
# What a device computes with, by kind: what an engine on it would be started with. "weights": f32, so that the weights
# alone make the difference.
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "weights": {"device": "cpu", "activations": "f32", "kv_dtype": "f32"},
    "cpu": {"device": "cpu", "activations": "int8", "kv_dtype": "f16"},
    "gpu": {"device": "cuda", "activations": "fp8", "kv_dtype": "bf16"},
}


def perplexity(
    path: str | os.PathLike, max_tokens: int = MOST_TOKENS, target: str = "weights", text: str | None = None
) -> float:
    """exp of the mean negative log-probability of the first `max_tokens` tokens of `text` (default: TEXT), with the
    activations and the KV type of ACTIVATIONS. Loads the model at `path` and unloads it. Errors: those of LLM();
    ConfigError for a text of fewer than two tokens."""
    with engine.LLM(path, max_rows=1, max_context=max_tokens, **ACTIVATIONS[target]) as llm:
        return measure(llm, max_tokens, text)["perplexity"]


def measure(llm, max_tokens: int, text: str | None = None) -> dict:
    """Perplexity of an LLM on the first `max_tokens` tokens of `text` (default: TEXT), which must have two at least."""
    ids = llm.tokenizer.encode(TEXT if text is None else text)[: min(max_tokens, llm.config.max_context)]
    if len(ids) < 2:
        raise ConfigError("the text has fewer than two tokens")
    return {"tokens": len(ids), "perplexity": llm.perplexity(ids)}
