"""Whether a model does here what its authors mean: what `zse check` finds out, part by part."""

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from typing import Any

import numpy as np

from zse.bench import check_vectors, perplexity, speed
from zse.errors import ZSEError
from zse.formats.opening import open_model
from zse.models import names
from zse.models.weight_plan import plan_model
from zse.sampling.params import SamplingParams

QUESTION = "What is the capital of France? Answer in one sentence."
BEGINNING = "The capital of France is"
# What tokenizers get wrong: white space, letters with marks, other scripts, emoji of several code points, code. All in
# form C.
TEXTS = (
    "Hello, world!  Two spaces,\ttab,\n\n  and lines.\r\n",
    "naïve café Ångström – “quotes” … 1234567 3.14",
    "日本語のテキスト、中文文本，한국어 텍스트",
    "Привет, мир! שלום עולם مرحبا بالعالم नमस्ते दुनिया",
    "👩‍👩‍👧‍👦 🇫🇷 ✈️ zwj\u200djoin",
    "def f(x):\n    return {'a': [x**2 for _ in range(10)]}  # comment\n",
)
COMPARED_TOKENS = 256
MIN_SAME = 0.9  # of the likeliest next tokens: 8-bit activations of a small model keep 95 in 100, a wrong permutation 5
# For an interpreter that has transformers, whichever that is: this package imports neither it nor torch.
_REFERENCE = """
import json, sys
import numpy, torch, transformers
path, out = sys.argv[1:]
config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
known = transformers.AutoModelForCausalLM  # which does not list every class: Mistral 4's, for one
if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
    known = getattr(transformers, (config.architectures or [""])[0], known)
model = known.from_pretrained(path, dtype=torch.float32, trust_remote_code=False).eval()
with torch.no_grad():
    logits = model(input_ids=torch.tensor([json.load(sys.stdin)])).logits[0]
numpy.save(out, logits.float().numpy())
print(transformers.__version__)
"""


def tensors(path: str, family: str) -> dict:
    """How many of the file's tensors the model reads, each once, and the names of the others."""
    with open_model(path) as source:
        plan = plan_model(source, family=family)
        parts = [matrix.parts for matrix in plan.matrices] + [vector.parts for vector in plan.vectors]
        read = [part.info.name for whole in parts for part in whole]
        read += [name for name in names.ROPE_TENSORS if name in source.tensors]
        if len(read) != len(set(read)):  # the plan takes each by its role's name
            raise ZSEError(f"{path}: a tensor is read twice: {max(read, key=read.count)}")
        # Of a stack the parts of each expert are read, of a joined product rows.
        whole = {name.partition("[")[0].partition(" rows ")[0] for name in read}
        return {"read": len(whole), "not_read": sorted(set(source.tensors) - whole)}


def tokenizer(llm) -> dict:
    """Texts that do not come back as they were, of TEXTS and the text of `zse bench perplexity`."""
    texts = (*TEXTS, perplexity.TEXT)
    wrong = [text for text in texts if llm.tokenizer.decode(llm.tokenizer.encode(text, add_bos=False)) != text]
    return {"texts": len(texts), "wrong": wrong}


def answer(llm) -> dict:
    """The greedy reply to a question, of a model without a chat template to the beginning of a sentence."""
    params = SamplingParams(max_tokens=32, temperature=0.0)
    if llm.has_chat_template:
        return {"prompt": QUESTION, "text": llm.chat([{"role": "user", "content": QUESTION}], params).text}
    return {"prompt": BEGINNING, "text": llm.generate([BEGINNING], params)[0].text}


def rates(llm) -> dict:
    """Tokens a second of one prompt and of one reply, once each: to see that they are of the order that they should
    be."""
    return {
        "prompt_tok_per_s": speed.prefill(llm, min(256, llm.config.max_context - 1), 1)["tok_per_s"],
        "reply_tok_per_s": speed.decode(llm, 16, 32, 1)["tok_per_s"],
    }


def compared(llm, path: str) -> dict:
    """Logits of a text beside those of transformers in f32; {"left_out": why} where they cannot be had."""
    if not os.path.isdir(path):
        return {"left_out": "transformers reads Hugging Face folders"}
    with open_model(path) as source:
        if not all(info.was_dense for info in source.tensors.values()):
            return {"left_out": "the weights are quantized"}
    if find_spec("transformers") is None or find_spec("torch") is None:
        return {"left_out": "transformers and torch are not installed beside zse"}
    ids = llm.tokenizer.encode(perplexity.TEXT)[: min(COMPARED_TOKENS, llm.config.max_context)]
    ours = np.concatenate([logits for _, logits in llm.logits_of(ids)])
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "logits.npy")
        done = subprocess.run(
            [sys.executable, "-c", _REFERENCE, path, out],
            input=str(ids),
            capture_output=True,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        if done.returncode:
            return {"left_out": f"transformers: {(done.stderr.strip().splitlines() or ['ended'])[-1][:200]}"}
        theirs = np.load(out, allow_pickle=False)
    same = float((ours.argmax(1) == theirs[:, : ours.shape[1]].argmax(1)).mean())
    difference = float(np.abs(ours - theirs[:, : ours.shape[1]]).mean())
    return {
        "transformers": done.stdout.strip(),
        "tokens": len(ids),
        "same_next_token": same,
        "mean_difference": difference,
        "mean_logit": float(np.abs(theirs).mean()),
    }


def check(llm, path: str) -> dict[str, Any]:
    """All parts, and `wrong`: what no sound model gives, a line each."""
    config = {
        name: getattr(llm.model_config, name)
        for name in "architecture num_layers hidden_size num_heads num_kv_heads head_dim vocab_size max_context".split()
    }
    read = tensors(path, llm.device.kernels)
    if not llm.model_config.causal:
        return check_vectors.check(llm, path, config, read)
    result: dict[str, Any] = {
        "config": config,
        "tensors": read,
        "tokenizer": tokenizer(llm),
        "answer": answer(llm),
        "perplexity": perplexity.measure(llm, 512),
        "speed": rates(llm),
        "compared": compared(llm, path),
    }
    wrong = [f"the tokenizer gives back another text for {text[:40]!r}" for text in result["tokenizer"]["wrong"]]
    if llm.model_config.pooling:  # made for vectors, not to write
        result["meaning"] = check_vectors.meaning(llm)
        result["vectors"] = check_vectors.compared(llm, path)
        wrong += check_vectors.wrong(result["meaning"], result["vectors"])
    elif not result["perplexity"]["perplexity"] < llm.vocab_size / 10:  # NaN is not smaller either
        wrong.append("the perplexity of plain prose is that of a guess: the weights are not what the config says")
    if result["compared"].get("same_next_token", 1.0) < MIN_SAME:
        wrong.append("the logits are not those of transformers")
    return result | {"wrong": wrong}
