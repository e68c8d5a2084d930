"""Embedding tokens/s of an encoder on a CPU, beside transformers with PyTorch on the same cores, in turns in one process.

    python benchmarks/embeddings.py MODEL_DIR [--texts 192] [--shortest 16] [--longest 256] [--threads 2] [--rounds 3]

Texts are random token ids of random lengths. PyTorch gets them as sentence-transformers gives them: sorted by length, 32 in a
batch, padded, mean pooling over the mask. Printed: the best of the rounds in tokens/s (padding not counted), how that compares
with PyTorch's, and the cosine of the vectors to PyTorch's, least and mean.
"""

import argparse
import time

import numpy as np

BATCH = 32


def torch_embedder(path: str, ids: list[list[int]], threads: int):
    """() → vectors f32 [texts, hidden], by transformers."""
    import torch
    from transformers import AutoModel

    torch.set_num_threads(threads)
    model = AutoModel.from_pretrained(path).eval()
    lengths = np.array([len(each) for each in ids])
    order = np.argsort(-lengths, kind="stable")

    def run() -> np.ndarray:
        found = {}
        for at in range(0, len(ids), BATCH):
            part = order[at : at + BATCH]
            tokens = np.zeros((len(part), lengths[part].max()), np.int64)
            mask = np.zeros_like(tokens)
            for row, index in enumerate(part):
                tokens[row, : lengths[index]], mask[row, : lengths[index]] = ids[index], 1
            with torch.inference_mode():
                weights = torch.tensor(mask)[..., None].float()
                states = model(input_ids=torch.tensor(tokens), attention_mask=torch.tensor(mask)).last_hidden_state
                vectors = torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1))
            found |= dict(zip(part.tolist(), vectors.numpy(), strict=True))
        return np.array([found[index] for index in range(len(ids))])

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for name, default in (("texts", 192), ("shortest", 16), ("longest", 256), ("threads", 2), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    from zse import LLM

    rng = np.random.default_rng(5)
    lengths = rng.integers(asked.shortest, asked.longest + 1, asked.texts)
    ids = [rng.integers(1000, 30000, length).tolist() for length in lengths]
    options = {"f32": {}, "int8 weights": {"quantize": "int8", "activations": "f32"}, "int8": {"quantize": "int8"}}
    engines = {name: LLM(asked.model, device="cpu", threads=asked.threads, **each) for name, each in options.items()}
    runs = {"transformers": torch_embedder(asked.model, ids, asked.threads)}
    runs |= {name: (lambda engine=engine: engine.embed(ids, pooling="mean")) for name, engine in engines.items()}
    vectors, best = {}, dict.fromkeys(runs, float("inf"))
    for _ in range(asked.rounds):
        for name, run in runs.items():
            begun = time.perf_counter()
            vectors[name] = run()
            best[name] = min(best[name], time.perf_counter() - begun)
    print(f"{asked.texts} texts, {lengths.sum()} tokens, {asked.threads} threads")
    for name, seconds in best.items():
        cosines = (vectors[name] * vectors["transformers"]).sum(1)
        rate, times = lengths.sum() / seconds, best["transformers"] / seconds
        print(f"{name:13} {rate:7.0f} tokens/s {times:5.2f} x   cosine {cosines.min():.7f} {cosines.mean():.7f}")
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
