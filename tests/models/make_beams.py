"""Makes beams.json: beam searches of tiny models of tiny.py by transformers (PyTorch, CPU, float32).

    PYTHONPATH=src python tests/models/make_beams.py

Run it when tiny.py changes, with transformers and torch installed; tests/engine/test_beams.py compares with it.
"""

import itertools
import json
from pathlib import Path

import tiny
from make_references import load

PATH = Path(__file__).with_name("beams.json")
FAMILIES = ("llama", "gemma3")


def search(model, case: dict) -> tuple[list[list[int]], list[float]]:
    """Tokens and scores of the replies, best first."""
    import torch

    prompt = torch.tensor([case["prompt"]])
    found = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        num_beams=case["num_beams"],
        num_return_sequences=case["num_beams"],
        max_new_tokens=case["max_new_tokens"],
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
        eos_token_id=case["eos"],
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    replies = []
    for line in found.sequences[:, prompt.shape[1] :].tolist():
        end = next((place for place, token in enumerate(line) if token in case["eos"]), len(line) - 1)
        replies.append(line[: end + 1])
    return replies, found.sequences_scores.tolist()


def cases(family: str):
    """Every combination, with end tokens that the model says: those of a search that has none."""
    ids = tiny.tokens(family).tolist()
    model = load(family)
    for number, (width, penalty, stopping, length) in enumerate(
        itertools.product((2, 3, 5), (1.0, 0.0, 2.0, -1.0), (False, True, "never"), (9, 24))
    ):
        if number % 3 == 1:
            continue
        case = dict(
            family=family,
            prompt=ids[: 5 + number % 13],
            num_beams=width,
            max_new_tokens=length,
            length_penalty=penalty,
            early_stopping=stopping,
            eos=[],
        )
        said, _ = search(model, case | dict(eos=[159]))
        case["eos"] = sorted({said[0][4], said[-1][6], said[1][-2]})[: 1 + number % 3]
        case["tokens"], case["scores"] = search(model, case)
        yield case


if __name__ == "__main__":
    found = [case for family in FAMILIES for case in cases(family)]
    PATH.write_text("[\n" + ",\n".join(json.dumps(case) for case in found) + "\n]\n")
    ended = sum(reply[-1] in case["eos"] for case in found for reply in case["tokens"])
    print(PATH, len(found), "searches,", ended, "of", sum(len(case["tokens"]) for case in found), "replies ended")
