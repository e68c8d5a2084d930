"""Makes mtp.npz: logits of the next-token blocks of tiny_mtp.py by transformers (PyTorch, CPU, float32).

    PYTHONPATH=src:tests/formats:tests/models python tests/models/make_mtp_references.py

"FAMILY": of the pairs (state of token i behind the final norm, token i + 1) of the reference sequence. "FAMILY again": of the
last two of them as drafts behind drafts, with the block's own states. Run it when a tiny model changes.
"""

import copy
import sys
import tempfile
from pathlib import Path

import numpy as np
import tiny
import tiny_mtp
import torch
import transformers
from transformers.modeling_layers import MtpLayer

PATH = Path(__file__).with_name("mtp.npz")
OWN = {name: name for name in ("enorm", "hnorm", "eh_proj")} | {"shared_head.norm": "post_norm"}
OWN |= {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "post_norm"}
AGAIN = 2  # pairs with states of the block's own


def model_of(family: str, path: str):
    kind = getattr(transformers, tiny_mtp.config(family)["architectures"][0])
    return kind.from_pretrained(path, attn_implementation="eager").eval().float()


def block_of(family: str, model) -> MtpLayer:
    """The layer, with the tensors of the folder: transformers finds them for the layer numbers of published models only."""
    config, decoder, state = copy.deepcopy(model.config), model.model, {}
    if family.startswith("qwen"):
        config.layer_types, at = ["full_attention"], "mtp."
    else:
        config.first_k_dense_replace, at = 0, f"model.layers.{config.num_hidden_layers}."
        config.mlp_layer_types = ["sparse"]
    layer = MtpLayer(config, type(decoder.layers[2]), type(decoder.norm), 0)
    experts: dict[str, list] = {}
    for name, values in tiny_mtp.block_weights(family).items():
        called, tensor = name.removeprefix(at).removeprefix("layers.0."), torch.from_numpy(values.copy())
        if ".experts." in called:
            experts.setdefault(called.split(".")[-2], []).append(tensor)
            continue
        own = next((OWN[part] for part in OWN if called == f"{part}.weight"), None)
        state[f"{own}.weight" if own else f"mtp_block.{called}"] = tensor
    if experts:
        gate, up, down = (torch.stack(experts[f"{name}_proj"]) for name in ("gate", "up", "down"))
        state["mtp_block.mlp.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        state["mtp_block.mlp.experts.down_proj"] = down
    layer.load_state_dict(state, strict=True)
    return layer.eval()


def references(family: str) -> tuple[np.ndarray, np.ndarray]:
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = str(tiny_mtp.write(family, Path(folder)))
        model = model_of(family, path)
        ids = torch.tensor(tiny.tokens(family)[None].astype(np.int64))
        states = model.model(input_ids=ids).last_hidden_state[:, :-1]
        layer = block_of(family, model)

    def run(states):
        embeds = model.model.embed_tokens(ids[:, 1 : states.shape[1] + 1])
        positions = torch.arange(1, states.shape[1] + 1)[None]
        if hasattr(model.model, "rotary_emb") and family.startswith("qwen3_5"):
            turned = model.model.rotary_emb(embeds, positions[None].expand(3, 1, -1))
        else:
            turned = model.model.rotary_emb(embeds, positions)
        mask = torch.full((states.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        return layer(embeds, states, turned, mask, positions, None)

    with torch.no_grad():
        out = run(states)
        mixed = states.clone()
        for at in range(states.shape[1] - AGAIN, states.shape[1]):
            mixed[:, at] = run(mixed)[:, at - 1]
        return model.lm_head(out)[0].numpy(), model.lm_head(run(mixed))[0, -AGAIN:].numpy()


if __name__ == "__main__":
    found = {}
    for name in tiny_mtp.FAMILIES:
        found[name], found[f"{name} again"] = references(name)
        print(name, found[name].std(), file=sys.stderr)
    np.savez_compressed(PATH, **found)
