"""What `zse check` finds out of models that give vectors or judge pairs instead of writing: encoders, cross-encoders,
and the vectors of language models whose files say how they are pooled (Qwen3-Embedding)."""

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import numpy as np

from zse.bench import perplexity, speed
from zse.engine.messages import Ask
from zse.formats.opening import open_model

QUESTION = "How do you grow tomatoes on a balcony?"
NEAR = "Tomatoes need a large pot, a sunny balcony and water every day."
FAR = "The parliament passed the new law on railway freight yesterday."
TEXTS = (
    *perplexity.TEXT.split("\n\n"),
    "Hello, world!  Two spaces,\ttab\n and lines.",
    "naïve café Ångström",
    "e-mail: a.b@c.org, 3.14 %",
)
COMPARED_TOKENS = 128
MIN_COSINE = 0.99  # 8-bit activations of a small model give 0.999 (benchmarks/LOG.md), a wrong permutation 0
SPEED_TEXTS, SPEED_TOKENS = 8, 128
# For an interpreter that has transformers; modules behind the pooling are those of sentence-transformers' files.
_REFERENCE = """
import json, os, sys
import torch, transformers
from safetensors.torch import load_file
path, kind = sys.argv[1:]
asked = json.load(sys.stdin)
auto = transformers.AutoModelForSequenceClassification if kind == "labels" else transformers.AutoModel
model = auto.from_pretrained(path, dtype=torch.float32, trust_remote_code=False).eval()
ids = asked["ids"]
types = {}
if asked["second"] and getattr(model.config, "type_vocab_size", 0) > 1:
    types["token_type_ids"] = torch.tensor([[0] * asked["second"] + [1] * (len(ids) - asked["second"])])
with torch.no_grad():
    out = model(input_ids=torch.tensor([ids]), **types)
    if kind == "labels":
        vector = out.logits[0]
    else:
        states = out.last_hidden_state[0]
        vector = {"mean": states.mean(0), "cls": states[0], "last": states[-1], "max": states.max(0).values}[kind]
        for folder in asked["dense"]:
            config = json.load(open(os.path.join(path, folder, "config.json")))
            read = load_file(os.path.join(path, folder, "model.safetensors"))
            vector = torch.nn.functional.linear(vector, read["linear.weight"].float(), read.get("linear.bias"))
            vector = getattr(torch.nn, config["activation_function"].rpartition(".")[2])()(vector)
print(json.dumps([transformers.__version__, vector.tolist()]))
"""


def tokenizer(llm) -> dict:
    """Texts whose tokens, written out and read again, are others; what is no text of the vocabulary is left out. An
    encoder's tokenizer changes case, marks and spaces, so the text itself need not come back."""
    tokens = llm.tokenizer
    wrong = []
    for text in TEXTS:
        known = [id for id in tokens.encode(text, add_bos=False) if id != tokens.unknown_id]
        if not known or tokens.encode(tokens.decode(known), add_bos=False) != known:
            wrong.append(text)
    return {"texts": len(TEXTS), "wrong": wrong}


def _ids(llm, *texts: str) -> tuple[list[int], int]:
    """(token ids, where the second text begins) of one text or two, cut to what the model takes."""
    if len(texts) == 1:
        return llm.tokenizer.encode(texts[0])[: llm.config.max_context], 0
    first, second = (llm.tokenizer.encode(text, add_bos=False) for text in texts)
    over = max(len(llm.tokenizer.join_pair(first, second)[0]) - llm.config.max_context, 0)
    return llm.tokenizer.join_pair(first, second[: len(second) - over])


def _vectors(llm, kind: str, *sequences: tuple[list[int], int]) -> np.ndarray:
    asks = [Ask(kind, second=second) for _, second in sequences]  # type: ignore[arg-type]
    results = llm._complete([ids for ids, _ in sequences], asks)
    return np.array([np.frombuffer(result.vector, "<f4") for result in results], np.float64)


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / max(np.linalg.norm(one) * np.linalg.norm(other), 1e-30))


def kind_of(llm) -> str:
    """How the model's states become a vector: "labels" of a cross-encoder, else the pooling that its files name."""
    config = llm.model_config
    return "labels" if config.num_labels else config.pooling or ("last" if config.causal else "mean")


def meaning(llm) -> dict:
    """Three sentences: of two about one thing the vectors are closer, or the judgement higher, than of two that are
    not."""
    kind = kind_of(llm)
    if kind == "labels":
        near, far = _vectors(llm, kind, _ids(llm, QUESTION, NEAR), _ids(llm, QUESTION, FAR))
        return {"kind": kind, "numbers": len(near), "near": float(near[-1]), "far": float(far[-1])}
    one, near, far = _vectors(llm, kind, *(_ids(llm, text) for text in (QUESTION, NEAR, FAR)))
    return {
        "kind": kind,
        "numbers": len(one),
        "norm": float(np.linalg.norm(one)),
        "near": _cosine(one, near),
        "far": _cosine(one, far),
    }


def rate(llm) -> dict:
    """Tokens a second of texts that are run together, once."""
    count = min(SPEED_TOKENS, llm.config.max_context - 1)
    texts = [(speed.prompt_ids(llm, count, number), 0) for number in range(SPEED_TEXTS + 1)]
    _vectors(llm, kind_of(llm), texts[-1])  # warm
    started = perf_counter()
    _vectors(llm, kind_of(llm), *texts[:-1])
    return {"text_tok_per_s": SPEED_TEXTS * count / (perf_counter() - started)}


def compared(llm, path: str) -> dict:
    """The vector of a text, or the logits of a pair, beside those of transformers in f32; {"left_out": why} where they
    cannot be had."""
    if not os.path.isdir(path):
        return {"left_out": "transformers reads Hugging Face folders"}
    with open_model(path) as source:
        if not all(info.was_dense for info in source.tensors.values()):
            return {"left_out": "the weights are quantized"}
    if find_spec("transformers") is None or find_spec("torch") is None:
        return {"left_out": "transformers and torch are not installed beside zse"}
    kind = kind_of(llm)
    ids, second = _ids(llm, QUESTION, NEAR) if kind == "labels" else _ids(llm, perplexity.TEXT)
    ids = ids if kind == "labels" else ids[: min(COMPARED_TOKENS, llm.config.max_context)]
    ours = _vectors(llm, kind, (ids, second))[0]
    asked = {"ids": ids, "second": second, "dense": _dense_folders(path)}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", _REFERENCE, path, kind],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            cwd=folder,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
    if done.returncode:
        return {"left_out": f"transformers: {(done.stderr.strip().splitlines() or ['ended'])[-1][:200]}"}
    version, theirs = json.loads(done.stdout.splitlines()[-1])
    expected = np.array(theirs)
    return {
        "transformers": version,
        "tokens": len(ids),
        "cosine": _cosine(ours, expected),
        "mean_difference": float(np.abs(ours - expected).mean()),
        "mean_number": float(np.abs(expected).mean()),
    }


def _dense_folders(path: str) -> list[str]:
    try:
        with open(os.path.join(path, "modules.json"), encoding="utf-8") as file:
            return [module["path"] for module in json.load(file) if module["type"].endswith(".Dense")]
    except FileNotFoundError:
        return []


def wrong(meant: dict, beside: dict) -> list[str]:
    """What no sound model gives."""
    found = []
    if not meant["near"] > meant["far"]:  # NaN is not larger either
        found.append("a sentence about something else counts as the nearer one")
    if meant["kind"] != "labels" and not meant["norm"] > 0:
        found.append("the vector of a text is zero")
    if not beside.get("cosine", 1.0) >= MIN_COSINE:
        found.append("the vectors are not those of transformers")
    return found


def check(llm, path: str, config: dict, tensors: dict) -> dict[str, Any]:
    """All parts of an encoder's check, and `wrong`: what no sound model gives, a line each."""
    texts, meant, beside = tokenizer(llm), meaning(llm), compared(llm, path)
    lines = [f"the tokenizer reads other tokens from what it wrote of {text[:40]!r}" for text in texts["wrong"]]
    return {
        "config": config,
        "tensors": tensors,
        "tokenizer": texts,
        "meaning": meant,
        "speed": rate(llm),
        "compared": beside,
        "wrong": lines + wrong(meant, beside),
    }
